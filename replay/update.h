/* One optimizer update of equal matrices: an optimizer of sim/model as the kernels run it. Needs no
 * engine: `mizan calibrate` measures the same call.
 *
 * Rules (moe-variants-and-optimizers.md section 6.3), expert tier: AdamW 0.9/0.999/1e-8 with decay
 * 0.01; SkewAdam factored, with momentum where asked; Adafactor; Lion 0.9/0.99; Muon 0.95 without
 * Nesterov. Rate 1e-4. bf16 weights without master weights are written as the study does (dithered;
 * Adafactor to nearest); with master weights these are updated in fp32 and converted. GaLore, 8-bit
 * Adam, momentum SGD and bf16 moments have no kernel. */
#ifndef MIZAN_REPLAY_UPDATE_H
#define MIZAN_REPLAY_UPDATE_H

#include "common/base/err.h"
#include "kernels/kernels.h"
#include "sim/model/optimizer.h"

#include <stdbool.h>
#include <stdint.h>

/* MZ_EINPUT in one line where the kernels cannot run the optimizer. */
mz_code mz_update_supported(const mz_optimizer *optimizer, mz_err *err);
/* Does it work value by value, so that a matrix may be cut anywhere? */
bool mz_update_is_elementwise(const mz_optimizer *optimizer);
/* Are weights written with random bits, which depend on an element's place in its call? */
bool mz_update_is_dithered(const mz_optimizer *optimizer, mz_dtype type);
/* fp32 copies of the weights kept with the state. */
bool mz_update_has_master(const mz_optimizer *optimizer, mz_dtype type);

/* State of `matrices` matrices in one block: master weights, m, v, row and column factors, each
 * [matrices][...], fp32, one after the other; NULL what the optimizer lacks. */
typedef struct mz_update_state {
    float *master, *m, *v, *row, *col;
} mz_update_state;
enum { MZ_UPDATE_STATES = 5 };
/* Values of one matrix in each part, in this order. */
void mz_update_parts(const mz_optimizer *optimizer, mz_dtype type, int64_t rows, int64_t cols,
                     int64_t part[MZ_UPDATE_STATES]);
/* Equal to mz_optimizer_update's state_bytes of as many copies. */
int64_t mz_update_block_bytes(const mz_optimizer *optimizer, mz_dtype type, int64_t matrices,
                              int64_t rows, int64_t cols);
mz_update_state mz_update_state_of(const mz_optimizer *optimizer, mz_dtype type, int64_t matrices,
                                   int64_t rows, int64_t cols, void *block);

/* Matrices [first, first + matrices) of a block of `held`; weights and gradient are those of
 * `first` and following. */
typedef struct mz_update_call {
    const mz_optimizer *optimizer;
    mz_dtype type; /* of weights and gradient */
    int64_t held, first, matrices, rows, cols;
    int64_t step; /* from 1 */
    uint64_t seed, tensor;
    void *weights, *block;
    const void *gradient;
} mz_update_call;
size_t mz_update_scratch(const mz_kernels *kernels, const mz_update_call *call);
/* Enqueues the update, and the conversion of master weights, on stream 0. */
mz_kstatus mz_update_run(mz_kernels *kernels, const mz_update_call *call, void *scratch);

#endif
