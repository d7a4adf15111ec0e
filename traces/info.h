/* What a trace holds, in numbers: one streaming pass over its loads.
 *
 * Spread of a load over n places (experts or ranks), x_i >= 0, m their mean:
 *   max/mean, top-1 share max/sum, CV = standard deviation / m (population), Gini = sum over i, j
 * of |x_i - x_j| / (2 n^2 m), entropy of the shares over log n, share of places below 0.1 m.
 * Threads: like the trace. */
#ifndef MIZAN_TRACES_INFO_H
#define MIZAN_TRACES_INFO_H

#include "common/base/app.h"
#include "traces/trace.h"

#include <jansson.h>

typedef struct mz_spread {
    double max_over_mean, top1_share, cv, gini, entropy, cold; /* NaN when all x are 0 */
} mz_spread;

/* sorted: scratch of n values. */
mz_spread mz_spread_of(const int64_t *x, int64_t n, int64_t *sorted);

/* max/mean over ranks that hold contiguous blocks of the experts; NaN when all loads are 0. */
double mz_block_imbalance(const int64_t *load, int32_t experts, int32_t ranks);

/* One layer. Whole trace: loads summed over all steps and ranks. Per layer call: one layer of one
 * micro-batch, all ranks together; calls without pairs do not count. Ranks: experts placed in
 * contiguous blocks on info->place_ranks ranks. NaN: no pairs at all. */
typedef struct mz_info_layer {
    mz_spread experts;                    /* whole trace */
    double rank_imbalance;                /* whole trace: max/mean over ranks */
    double call_expert_mean;              /* mean over layer calls of the experts' max/mean */
    double call_rank_mean, call_rank_max; /* mean and maximum of the ranks' max/mean */
    int64_t calls;                        /* layer calls with pairs */
} mz_info_layer;

enum { MZ_INFO_METRICS = 10 }; /* doubles of mz_info_layer, in order */

typedef struct mz_trace_info {
    int64_t steps, first_step, last_step;    /* steps 0: the window holds none */
    int64_t micro_batches;                   /* over all steps */
    int64_t calls, tokens, pairs, sequences; /* of the window; a layer may be absent */
    int64_t call_tokens_min, call_tokens_median, call_tokens_max;
    int32_t place_ranks, layers;
    mz_info_layer *layer;                                                      /* [layers]; owned */
    double mean[MZ_INFO_METRICS], low[MZ_INFO_METRICS], high[MZ_INFO_METRICS]; /* over layers */
} mz_trace_info;

typedef struct mz_info_options {
    int32_t ranks; /* 0: the recorded ranks, or all experts apart where there are fewer */
    int64_t from_step, to_step; /* recorded step numbers, both included */
} mz_info_options;

/* Ranks of the contiguous placement; MZ_EINPUT when they are more than the experts. */
mz_code mz_info_ranks(const mz_trace *trace, const mz_info_options *options, int32_t *ranks,
                      mz_err *err);

/* MZ_EINPUT: ranks beyond the number of experts, or what is wrong with the trace. */
mz_code mz_trace_info_read(const mz_app *app, mz_trace *trace, const mz_info_options *options,
                           mz_trace_info *info, mz_err *err);
void mz_trace_info_free(mz_trace_info *info);

/* Schema "mizan-trace-info/1"; NULL when memory is short. */
json_t *mz_trace_info_json(const mz_trace *trace, const mz_trace_info *info);
void mz_trace_info_print(const mz_trace *trace, const mz_trace_info *info, bool layers, FILE *out);

#endif
