/* What is replayed: the sizes of one expert-parallel group, and the calls of its steps. */
#ifndef MIZAN_REPLAY_JOB_H
#define MIZAN_REPLAY_JOB_H

#include "common/base/load.h"
#include "kernels/kernels.h"
#include "sim/model/optimizer.h"
#include "sim/policy/policy.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct mz_replay_job {
    int32_t ranks;                  /* R, one expert-parallel group */
    int32_t layers, experts, top_k; /* MoE layers; top_k 0: varies */
    int64_t hidden, intermediate;   /* H, I as run */
    int64_t norm_hidden;            /* hidden size that recorded norms belong to; 0: as run */
    mz_dtype type;                  /* rows, weights, gradients: MZ_BF16 (as the simulator counts),
                                       or MZ_F32 for tests */
    bool recompute; /* full: a layer's forward is repeated, dispatch included, before its backward;
                       nothing but its input is kept. A lossy policy that re-sends x does not */
    const mz_policy_traits *traits;
    const mz_optimizer *optimizer;
    int32_t instances; /* most that a plan has (mz_planner_instances) */
    uint64_t seed;
} mz_replay_job;

/* One layer call of the whole group, in host memory for as long as its step runs. Pairs are always
 * there: where only counts were recorded they are dealt to tokens (deal.c), and said so. */
typedef struct mz_replay_call {
    int64_t step; /* as the trace numbers it */
    int32_t micro_batch, layer;
    mz_load load;
    mz_pairs pairs; /* weight NULL: 1/k; norms NULL: 1 */
} mz_replay_call;

#endif
