/* Statistics of routing that decide how a policy fares on a trace, per layer. One pass over the
 * bulk data, in bounded memory. tests/traces/reference_stats.py computes the same from arrays.
 *
 * E experts, n_e pairs of expert e in the window, s_e = n_e / sum n its share, q_e the share of
 * tokens that chose e (a token that names an expert twice counts once), k = sum q_e. Sequences:
 * only traces of kind pairs with a table of sequences. NaN: the trace cannot tell.
 *
 * Skew        max/mean; MaxVio = max/mean - 1; balancedness = mean/max; top-1 share; CV; Gini;
 *             entropy of s over log E; Zipf exponent: minus the slope of the least squares line of
 *             log s on log rank over the floor(3E/4) busiest experts, unused ones left out; sigma:
 *             population standard deviation of log(E s_e) over used experts; cold: share of experts
 *             below 0.1 x mean; max/mean and balancedness of ranks that hold contiguous blocks.
 * Drift       over recorded steps, starts in the window, later and earlier steps wherever recorded:
 *             correlation sum d_e d'_e / sqrt(sum d_e^2 sum d'_e^2) of d = s - 1/E with its value n
 *             steps later; share of selections on the wrong expert, 1/2 sum |s'_e - s_e|, of the
 *             forecast s (last value) and of the mean of the last up to 10 steps; how often the
 *             busiest expert is the same n steps later. Means over starts.
 * Sources     scatter of counts c of n pairs: sum (c - n p)^2 / sum n p (1 - p), p the share of the
 *             expert in the step and layer, over experts and steps: for every (rank, micro-batch),
 *             and for ranks with their micro-batches added up; steps with one such source alone
 *             do not count. 1 - 1/sources + noise for independent draws.
 * Reuse       experts that token t and t + lag of one sequence share, over the experts of t + lag;
 *             uniform: k / E; independent: sum q_e^2 / k.
 * Windows     of 64 and 256 tokens end to end from the start of each sequence: sum over e of the
 *             variance (divisor N - 1) of the number of tokens in the window that chose e, over
 *             sum n p_e (1 - p_e), p_e the windows' mean share.
 * Distinct    experts in 8..128 successive tokens (windows as above); independent draws: sum over e
 *             of 1 - (1 - q_e)^n.
 * Halves      a, b: shares of tokens of the first floor(n/2) and the other tokens of a sequence of
 *             at least 32 tokens that chose e; correlation of a - q with b - q, sums running over
 *             sequences and experts, NaN where all have the mix q; for halves of different
 *             sequences over all such pairs.
 * Layers      first expert (largest weight, without weights the first listed) of a token in layer
 *             l - 1 and l: mutual information in bits, as a share of the entropy at l; how often
 *             guessing the commonest partner is right; how often guessing the commonest expert of l
 *             is. Plug-in estimates: too high where tokens are few against E^2. Tokens that a
 *             micro-batch has beyond 2^25 are left out.
 * Teams       c_ab tokens with both a and b, lift = (c_ab / sum c) / (p_a p_b), p_a = q_a / k: 99th
 *             percentile over used a != b, linear between ranks; best partner: mean over used a of
 *             max_b c_ab / c_a.
 * Weights     mean of the j-th largest weight of a token; 10th and 90th percentile of the largest,
 *             to 1 part in 1024 (float16 values: exact). As stored.
 * Threads: like the trace. */
#ifndef MIZAN_TRACES_STATS_H
#define MIZAN_TRACES_STATS_H

#include "traces/info.h"

#include <jansson.h>

enum { MZ_STATS_LAGS = 6, MZ_STATS_DISTINCT = 5, MZ_STATS_RANKS = 8 };

/* Places of the metrics of a layer; series take consecutive places. */
typedef enum mz_stats_metric {
    MZ_SKEW_MAX_OVER_MEAN,
    MZ_SKEW_MAXVIO,
    MZ_SKEW_BALANCEDNESS,
    MZ_SKEW_TOP1,
    MZ_SKEW_CV,
    MZ_SKEW_GINI,
    MZ_SKEW_ENTROPY,
    MZ_SKEW_ZIPF,
    MZ_SKEW_SIGMA,
    MZ_SKEW_COLD,
    MZ_SKEW_RANKS,
    MZ_SKEW_RANK_BALANCEDNESS,
    MZ_DRIFT_CORRELATION, /* lags 1, 5, 10, 20, 50, 100 recorded steps */
    MZ_DRIFT_LAST = MZ_DRIFT_CORRELATION + MZ_STATS_LAGS,
    MZ_DRIFT_MEAN,
    MZ_DRIFT_BUSIEST, /* the same lags */
    MZ_SOURCE_BATCH = MZ_DRIFT_BUSIEST + MZ_STATS_LAGS,
    MZ_SOURCE_RANK,
    MZ_REUSE_UNIFORM,
    MZ_REUSE_INDEPENDENT,
    MZ_REUSE,                                /* lags 1, 2, 4, 16, 64, 128 tokens */
    MZ_INFLATION = MZ_REUSE + MZ_STATS_LAGS, /* 64, 256 tokens */
    MZ_DISTINCT = MZ_INFLATION + 2,          /* 8, 16, 32, 64, 128 tokens */
    MZ_DISTINCT_INDEPENDENT = MZ_DISTINCT + MZ_STATS_DISTINCT,
    MZ_HALF_SAME = MZ_DISTINCT_INDEPENDENT + MZ_STATS_DISTINCT,
    MZ_HALF_OTHER,
    MZ_MI_BITS,
    MZ_MI_SHARE,
    MZ_MI_HIT,
    MZ_MI_GUESS,
    MZ_TEAM_PARTNER,
    MZ_TEAM_LIFT,
    MZ_WEIGHT,
    MZ_WEIGHT_P10 = MZ_WEIGHT + MZ_STATS_RANKS,
    MZ_WEIGHT_P90,
    MZ_STATS_METRICS
} mz_stats_metric;

/* Name and look of a metric; `tolerance`: differences up to this are within the noise of a trace
 * (relative to the larger one when `relative`). */
typedef struct mz_stats_name {
    const char *key;   /* "reuse_lag_1" */
    const char *label; /* for a table */
    const char *group; /* heading; equal for neighbours of one group */
    bool percent;
    int digits;
    bool relative;
    double tolerance;
} mz_stats_name;

extern const mz_stats_name mz_stats_names[MZ_STATS_METRICS];

typedef struct mz_trace_stats {
    int32_t layers;
    double *layer; /* [layers][MZ_STATS_METRICS]; owned */
    /* Over layers that have the metric; NaN when none has. */
    double mean[MZ_STATS_METRICS], low[MZ_STATS_METRICS], high[MZ_STATS_METRICS];
} mz_trace_stats;

/* The window and ranks of options as in mz_trace_info_read. MZ_EINPUT also for more than 2^25
 * layers times experts. */
mz_code mz_trace_stats_read(const mz_app *app, mz_trace *trace, const mz_info_options *options,
                            mz_trace_stats *stats, mz_err *err);
void mz_trace_stats_free(mz_trace_stats *stats);

/* {"metric": {"mean", "low", "high", "layers": [...]}, ...}; metrics that no layer has are null.
 * NULL when memory is short. */
json_t *mz_trace_stats_json(const mz_trace_stats *stats);
/* Without the skew that mz_trace_info_print shows already, unless `all`. */
void mz_trace_stats_print(const mz_trace_stats *stats, bool all, FILE *out);

#endif
