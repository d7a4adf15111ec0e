/* Rows of the replayed layers. Training data is not in a trace, so rows are made: their directions
 * are seeded, their norms are the trace's. All of it is a function of (seed, step, micro-batch,
 * layer, rank, token), whatever the number of processes, so that a reference can make the same rows
 * again. Values are what the storage type holds: base[b][j] rounded to it, times the scale in fp32,
 * rounded again (mz_pack_rows with a scale).
 *
 * x of a layer call: ||x||^2 as recorded (input_norm2), else H * 1 (unit variance).
 * g, the gradient of the layer's output: ||g||^2 as recorded (grad_norm2), else 1e-4 * H.
 * Recorded norms are scaled by H / job.norm_hidden where a run is narrower than the trace's model,
 * so that the variance of a value stays. */
#ifndef MIZAN_REPLAY_DATA_H
#define MIZAN_REPLAY_DATA_H

#include "common/base/arena.h"
#include "replay/job.h"

enum { MZ_DATA_ROWS = 1024 }; /* rows of the base */

/* fp32 base [MZ_DATA_ROWS][H], already rounded to `type`; each row has norm 1 before rounding. */
void mz_data_base(const mz_replay_job *job, float *base);

typedef enum mz_data_kind { MZ_DATA_INPUT, MZ_DATA_GRADIENT } mz_data_kind;

/* Of token `token` (counted within source rank `rank`) of the call: which base row, times what. */
typedef struct mz_data_row {
    int64_t base;
    float scale;
} mz_data_row;
mz_data_row mz_data_of(const mz_replay_job *job, const mz_replay_call *call, mz_data_kind kind,
                       int32_t rank, int64_t token);

/* Initial weights of expert `expert` of `layer`: up [2I][H] (gate above up), down [H][I], fp32
 * values that `type` holds, uniform with variance 1/H and 1/I. One value is a function of (seed,
 * layer, expert, matrix, index). */
typedef enum mz_data_matrix { MZ_DATA_UP, MZ_DATA_DOWN } mz_data_matrix;
void mz_data_weights(const mz_replay_job *job, int32_t layer, int32_t expert, mz_data_matrix which,
                     float *value);

/* Gate weight of a pair as the replay uses it: recorded, or 1/k (where k varies: 1 over the call's
 * mean). `pair` counts as in call->pairs. */
float mz_data_weight(const mz_replay_job *job, const mz_replay_call *call, int64_t pair);

/* The score that selects: the policy's; where it needs ||h||^2 and the policy has none travel, gate
 * weights decide alone. */
mz_score mz_data_score(const mz_replay_job *job);

/* fp32 to the storage type and back, nearest even. */
float mz_data_round(mz_dtype type, float value);

#endif
