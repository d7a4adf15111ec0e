/* Loads of steps whose tokens are chosen: even, uneven in a stated way, or in a trace's shape. */
#ifndef MIZAN_ANALYSIS_LOADS_H
#define MIZAN_ANALYSIS_LOADS_H

#include "common/base/arena.h"
#include "common/base/load.h"

typedef struct mz_loads_options {
    int32_t ranks, ep, experts, layers, top_k; /* layers: MoE layers */
    int32_t steps, micro_batches;              /* with `shape`: its own */
    int64_t tokens;   /* of every rank and micro-batch; 0 with `shape`: as they come */
    double imbalance; /* rows of each group's first rank over the mean when experts stay on their
                         owners; 1: even */
    const mz_load_source *shape; /* NULL, or loads whose proportions are kept */
} mz_loads_options;

typedef struct mz_loads mz_loads;

/* Every source spreads its pairs over the experts by largest remainder. With `shape` a source's
 * counts are scaled from its recorded tokens to the chosen ones; a source without tokens takes the
 * job's proportions. Pairs themselves are not passed on once counts are scaled. MZ_EINPUT for an
 * imbalance that no routing can have: more than ep, or more than ep / top_k times the first rank's
 * experts (a token chooses an expert once). */
mz_code mz_loads_create(const mz_loads_options *options, mz_loads **loads, mz_err *err);
mz_load_source mz_loads_source(mz_loads *loads); /* from the first step; valid while they live */
void mz_loads_free(mz_loads **loads);

#endif
