/* How much a rank must set aside for something whose size changes from step to step, three ways
 * (lrmoe.md section 5, the memory figure). */
#ifndef MIZAN_SIM_STEP_SIZING_H
#define MIZAN_SIM_STEP_SIZING_H

#include "common/base/arena.h"

#include <stdbool.h>
#include <stdint.h>

/* The most that each rank held in each step so far. */
typedef struct mz_sizing {
    int32_t ranks;
    int64_t *most; /* [ranks] over all steps */
    int64_t steps;
    double sum, worst; /* over steps: of all ranks, of the highest rank */
} mz_sizing;

/* Bytes of all ranks together and of the worst rank. dynamic: each step what it takes, mean over
 * steps. highwater: each rank its own maximum over the steps. provisioned: every rank the largest
 * of all, as symmetric buffers of fixed size do. */
typedef struct mz_sized {
    double dynamic_sum, dynamic_worst;
    int64_t highwater_sum, highwater_worst;
    int64_t provisioned_sum, provisioned_worst;
} mz_sized;

bool mz_sizing_init(mz_sizing *sizing, int32_t ranks, mz_arena *arena); /* false: no memory */
void mz_sizing_add(mz_sizing *sizing, const int64_t *rank_bytes);       /* [ranks] of one step */
mz_sized mz_sizing_result(const mz_sizing *sizing);                     /* zeros before any step */

#endif
