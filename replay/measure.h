/* From the figures of every rank and step to the run of a result file. */
#ifndef MIZAN_REPLAY_MEASURE_H
#define MIZAN_REPLAY_MEASURE_H

#include "common/io/result.h"
#include "replay/engine.h"
#include "sim/policy/planner.h"

/* What one rank says of one step; plain bytes, gathered by mz_transport_gather. Seconds by layer
 * and phase, [layers+1][MZ_PHASES], stand behind it. What belongs to a process stands at its first
 * rank and is 0 at the others. */
typedef struct mz_measure_rank {
    double step_s, moe_s; /* of its process: without what is nobody's; moe_s: before the update */
    int64_t dispatch_bytes, combine_bytes, backward_dispatch_bytes, backward_combine_bytes,
        transfer_bytes;
    int64_t within_process_bytes, between_process_bytes; /* the same bytes, by the transport */
    int64_t pairs, kept_pairs, dropped_pairs;
    int64_t peak, at_peak[MZ_MEM_CATEGORIES], most[MZ_MEM_CATEGORIES];
    int32_t peak_layer;
    char peak_label[60];
} mz_measure_rank;

/* What every process knows of one step. */
typedef struct mz_measure_step {
    int64_t ordinal;           /* of the window */
    int64_t tokens;            /* of all ranks */
    double probe_s[MZ_SPEEDS]; /* the machine's speeds just before it: replay/probe.h */
    int64_t over_budget_calls;
    char over_budget[192]; /* of the first of them */
    double kept_score, total_score;
    const double *imbalance; /* [calls] max/mean of computed pairs */
    int64_t calls;
} mz_measure_step;

typedef struct mz_measure mz_measure;

mz_code mz_measure_create(int32_t ranks, int32_t layers, mz_measure **measure, mz_err *err);
void mz_measure_free(mz_measure **measure);
/* Bytes of one rank's record. */
size_t mz_measure_size(const mz_measure *measure);
double *mz_measure_detail(void *record); /* behind an mz_measure_rank */
/* records: [ranks] of mz_measure_size each. */
mz_code mz_measure_add(mz_measure *measure, const mz_measure_step *step, const void *records,
                       mz_err *err);
int64_t mz_measure_steps(const mz_measure *measure);
/* Arrays of the run live as long as the measure. MZ_EINPUT where no step was added. */
mz_code mz_measure_run(mz_measure *measure, const mz_planner *planner, mz_run *run, mz_err *err);

#endif
