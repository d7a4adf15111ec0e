/* The parts of lrmoe that are not placement: quota rules and selection. */
#ifndef MIZAN_SIM_POLICY_LRMOE_H
#define MIZAN_SIM_POLICY_LRMOE_H

#include "sim/policy/parts.h"

/* ---- select.c: scores of pairs, and which pairs stay
 * --------------------------------------------- s = w^2 ||g||^2 ||h||^2 (lrmoe.md section 1), g of
 * the token, w and h of the pair. A kind whose norms the trace does not hold falls back to w^2
 * alone. Score sums are always sums of s (or of w^2), whatever kind of score selects, so that kinds
 * can be compared. */
typedef enum mz_score_kind {
    MZ_SCORE_DOWN,   /* s */
    MZ_SCORE_UP,     /* w^2 ||g||^2 ||x||^2, x the layer's input */
    MZ_SCORE_W,      /* w^2 */
    MZ_SCORE_WH,     /* w^2 ||h||^2 */
    MZ_SCORE_G,      /* ||g||^2 */
    MZ_SCORE_H,      /* ||h||^2 */
    MZ_SCORE_RANDOM, /* uniform */
    MZ_SCORE_SAMPLE  /* sqrt(s) / u, u uniform: priority sampling, exactly q_e pairs; unbiased when
                        kept pairs are scaled by max(1, threshold / sqrt(s)) */
} mz_score_kind;

enum { MZ_SCORE_BINS = 64 };

typedef struct mz_select mz_select;
/* histograms: keep each expert's distribution of s per layer, for the value rule. */
mz_code mz_select_create(mz_arena *arena, const mz_policy_env *env, mz_score_kind kind, bool global,
                         bool histograms, mz_select **select, mz_err *err);
/* Are there scores in these pairs? pairs may be NULL. */
bool mz_select_possible(const mz_pairs *pairs);
/* Where the scores come from: "" before the first call with pairs, "gate weights", "trace". The
 * pointer stays the same, its text is filled in. */
const char *mz_select_source(const mz_select *select);
/* Selects plan->quota pairs. In: quota, and kept (shares of the sources) unless the scope is
 * global, where kept is an output. Out: kept_score, total_score and, where keep is not NULL, a byte
 * per pair from the load's first pair on (1: stays). Ties stay by (source, token, slot). Quotas
 * that keep everything only sum up. MZ_EINTERNAL when pairs and counts disagree. Scratch grows in
 * the arena to the largest call seen. */
mz_code mz_select_run(mz_select *select, const mz_call *call, mz_plan *plan, uint8_t *keep,
                      mz_err *err);
/* The layer's last distributions: [E][MZ_SCORE_BINS] pairs from the highest bin down; NULL before
 * the first call. value: [MZ_SCORE_BINS] score that stands for a bin. */
const uint32_t *mz_select_histogram(const mz_select *select, int32_t layer, double *value);

/* ---- quota.c
 * -----------------------------------------------------------------------------------*/
typedef struct mz_limits {
    int64_t total;      /* most kept pairs of the call, < 0: no limit */
    const int64_t *cap; /* [R] most kept pairs on a rank, NULL: no limit */
    int64_t send;       /* most kept pairs that a source may send, < 0: no limit */
    bool any_source;    /* kept pairs may come from any source, not in proportion (scope=global) */
    int64_t rows_min;   /* q_min */
} mz_limits;

typedef struct mz_quota_scratch {
    int64_t *trial; /* [E] */
    int64_t *sent;  /* [R] */
    int64_t *free;  /* [R] caps where there are none */
    uint64_t *word; /* [E] */
} mz_quota_scratch;
mz_code mz_quota_create(mz_arena *arena, int32_t ranks, int32_t experts, mz_quota_scratch *scratch,
                        mz_err *err);

/* Can q be kept? balance holds the hosts of the plan. Caps and total are exact; `send` is a
 * heuristic on the safe side: a source sends its proportional share of every expert (rounded up;
 * with any_source, all the pairs it has up to the quota) that has a host besides it. */
bool mz_quota_fits(const mz_quota_scratch *scratch, mz_balance *balance, const mz_plan *plan,
                   const mz_load *load, const mz_limits *limits, const int64_t *q);
/* The rules fill q[e] in [min(n_e, q_min), n_e]; false when even the smallest does not fit (q is
 * then that). waterfill: q_e = min(n_e, C), *level the largest C. ratio: the largest number of
 * pairs, shared in proportion by largest remainder. value: greedy from the highest scores down;
 * optimal for the histograms given under caps and total; `send` is then met by cutting the largest
 * quotas. *score: expected score. */
bool mz_quota_waterfill(mz_quota_scratch *scratch, mz_balance *balance, const mz_plan *plan,
                        const mz_load *load, const mz_limits *limits, int64_t *q, int64_t *level);
bool mz_quota_ratio(mz_quota_scratch *scratch, mz_balance *balance, const mz_plan *plan,
                    const mz_load *load, const mz_limits *limits, int64_t *q);
bool mz_quota_value(mz_quota_scratch *scratch, mz_balance *balance, const mz_plan *plan,
                    const mz_load *load, const mz_limits *limits, const uint32_t *histogram,
                    const double *value, int64_t *q, double *score);

#endif
