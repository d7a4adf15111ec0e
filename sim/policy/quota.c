/* Quota rules of lrmoe (lrmoe.md sections 2 and 3): how many pairs of each expert stay in backward.
 */
#include "sim/policy/lrmoe.h"

#include <string.h>

mz_code mz_quota_create(mz_arena *arena, int32_t ranks, int32_t experts, mz_quota_scratch *scratch,
                        mz_err *err) {
    scratch->trial = MZ_NEW(arena, int64_t, experts);
    scratch->sent = MZ_NEW(arena, int64_t, ranks);
    scratch->free = MZ_NEW(arena, int64_t, ranks);
    scratch->word = MZ_NEW(arena, uint64_t, experts);
    if (!scratch->trial || !scratch->sent || !scratch->free || !scratch->word)
        return mz_fail_nomem(err, "quotas");
    for (int32_t r = 0; r < ranks; r++)
        scratch->free[r] = INT64_MAX / 4;
    return MZ_OK;
}

/* Most of q of n pairs that can fall on a source with c of them: its share rounded up, or anything.
 */
static int64_t share_up(int64_t c, int64_t q, int64_t n, bool any_source) {
    if (q >= n || q == 0)
        return q == 0 ? 0 : c;
    if (any_source)
        return c < q ? c : q;
    int64_t share = (int64_t)((double)c * ((double)q / (double)n)) + 1;
    return share < c ? share : c;
}

static bool send_fits(const mz_quota_scratch *scratch, const mz_plan *plan, const mz_load *load,
                      const mz_limits *limits, const int64_t *q) {
    int64_t send = limits->send;
    for (int32_t s = 0; s < plan->ranks; s++) {
        const int64_t *row = load->count + (int64_t)s * plan->experts;
        int64_t sent = 0;
        for (int32_t e = 0; e < plan->experts && sent <= send; e++) {
            int32_t first = plan->begin[e];
            bool only_here = plan->begin[e + 1] - first == 1 && plan->rank[first] == s;
            if (row[e] > 0 && !only_here)
                sent += share_up(row[e], q[e], load->total[e], limits->any_source);
        }
        if (sent > send)
            return false;
    }
    return true;
}

bool mz_quota_fits(const mz_quota_scratch *scratch, mz_balance *balance, const mz_plan *plan,
                   const mz_load *load, const mz_limits *limits, const int64_t *q) {
    int64_t sum = 0;
    for (int32_t e = 0; e < plan->experts; e++)
        sum += q[e];
    if (limits->total >= 0 && sum > limits->total)
        return false;
    if (limits->cap && !mz_balance_fits(balance, q, NULL, limits->cap))
        return false;
    return limits->send < 0 || send_fits(scratch, plan, load, limits, q);
}

static void cut_at(const int64_t *n, int32_t experts, int64_t level, int64_t *q) {
    for (int32_t e = 0; e < experts; e++)
        q[e] = n[e] < level ? n[e] : level;
}

/* Largest C in [low, high] for which min(ceiling, C) fits; low when not even that does. */
static int64_t largest_level(mz_quota_scratch *scratch, mz_balance *balance, const mz_plan *plan,
                             const mz_load *load, const mz_limits *limits, const int64_t *ceiling,
                             int64_t low, int64_t high, bool *fits) {
    *fits = true;
    int64_t least = low - 1; /* does not count as tested */
    while (least < high) {
        int64_t middle = least + (high - least + 1) / 2;
        cut_at(ceiling, plan->experts, middle, scratch->trial);
        if (mz_quota_fits(scratch, balance, plan, load, limits, scratch->trial))
            least = middle;
        else
            high = middle - 1;
    }
    *fits = least >= low;
    return least >= low ? least : low;
}

bool mz_quota_waterfill(mz_quota_scratch *scratch, mz_balance *balance, const mz_plan *plan,
                        const mz_load *load, const mz_limits *limits, int64_t *q, int64_t *level) {
    int64_t most = 0;
    for (int32_t e = 0; e < plan->experts; e++)
        most = load->total[e] > most ? load->total[e] : most;
    bool fits = true;
    *level = most;
    if (!mz_quota_fits(scratch, balance, plan, load, limits, load->total)) {
        int64_t low = limits->rows_min < most ? limits->rows_min : most;
        *level = largest_level(scratch, balance, plan, load, limits, load->total, low,
                               low < most ? most - 1 : most, &fits);
    }
    cut_at(load->total, plan->experts, *level, q);
    return fits;
}

/* q = shares of `kept` pairs in proportion to n, each at least min(n, q_min). */
static void share_pairs(mz_quota_scratch *scratch, const mz_load *load, int64_t kept,
                        int64_t rows_min, int64_t *q) {
    mz_largest_remainder(kept, load->total, load->experts, q, scratch->word);
    for (int32_t e = 0; e < load->experts; e++) {
        int64_t least = rows_min < load->total[e] ? rows_min : load->total[e];
        q[e] = q[e] < least ? least : q[e];
    }
}

bool mz_quota_ratio(mz_quota_scratch *scratch, mz_balance *balance, const mz_plan *plan,
                    const mz_load *load, const mz_limits *limits, int64_t *q) {
    int64_t low = 0, high = load->pairs; /* nothing but q_min is the smallest choice */
    if (limits->total >= 0 && limits->total < high)
        high = limits->total;
    share_pairs(scratch, load, high, limits->rows_min, q);
    if (mz_quota_fits(scratch, balance, plan, load, limits, q))
        return true;
    for (high--; low < high;) {
        int64_t middle = low + (high - low + 1) / 2;
        share_pairs(scratch, load, middle, limits->rows_min, scratch->trial);
        if (mz_quota_fits(scratch, balance, plan, load, limits, scratch->trial))
            low = middle;
        else
            high = middle - 1;
    }
    share_pairs(scratch, load, low, limits->rows_min, q);
    return mz_quota_fits(scratch, balance, plan, load, limits, q);
}

/* Keeps q_min rows of every expert; false when a rank or the total cannot hold them. */
static bool keep_least(mz_balance *balance, const mz_load *load, const mz_limits *limits,
                       int64_t *left, int64_t *q) {
    bool fits = true;
    for (int32_t e = 0; e < load->experts; e++) {
        int64_t least = limits->rows_min < load->total[e] ? limits->rows_min : load->total[e];
        fits = mz_balance_push(balance, e, least) == least && fits;
        q[e] = least;
        *left -= least;
    }
    return fits && *left >= 0;
}

/* Greedy over the bins, highest first, experts in order inside a bin: quotas that the flow can
 * carry are a polymatroid, so taking what fits in order of value is optimal. Experts that had no
 * pairs in the histogram come last. above[e]: pairs of the histogram in higher bins. */
static double fill_by_value(mz_balance *balance, const mz_load *load, const uint32_t *histogram,
                            const double *value, const int64_t *seen, uint64_t *above, int64_t left,
                            int64_t *q) {
    double score = 0;
    memset(above, 0, sizeof(uint64_t) * (size_t)load->experts);
    for (int bin = 0; bin < MZ_SCORE_BINS; bin++)
        for (int32_t e = 0; e < load->experts; e++) {
            int64_t n = load->total[e];
            double rows = seen[e] > 0 ? (double)n / (double)seen[e] : 0;
            int64_t before = (int64_t)((double)above[e] * rows);
            above[e] += histogram[(size_t)e * MZ_SCORE_BINS + (size_t)bin];
            int64_t upto = bin == MZ_SCORE_BINS - 1 ? n : (int64_t)((double)above[e] * rows);
            int64_t want = upto - q[e] < left ? upto - q[e] : left;
            if (want <= 0 || q[e] < before) /* cut in a higher bin: cut for good */
                continue;
            int64_t got = mz_balance_push(balance, e, want);
            q[e] += got;
            left -= got;
            score += (double)got * value[bin];
        }
    return score;
}

bool mz_quota_value(mz_quota_scratch *scratch, mz_balance *balance, const mz_plan *plan,
                    const mz_load *load, const mz_limits *limits, const uint32_t *histogram,
                    const double *value, int64_t *q, double *score) {
    int64_t left = limits->total >= 0 ? limits->total : INT64_MAX / 4;
    *score = 0;
    mz_balance_start(balance, limits->cap ? limits->cap : scratch->free);
    if (!keep_least(balance, load, limits, &left, q))
        return false;
    for (int32_t e = 0; e < load->experts; e++) {
        scratch->trial[e] = 0;
        for (int b = 0; b < MZ_SCORE_BINS; b++)
            scratch->trial[e] += histogram[(size_t)e * MZ_SCORE_BINS + b];
    }
    *score = fill_by_value(balance, load, histogram, value, scratch->trial, scratch->word, left, q);
    if (limits->send < 0)
        return true;
    mz_limits only_send = *limits;
    only_send.total = -1;
    only_send.cap = NULL;
    int64_t most = 0;
    for (int32_t e = 0; e < load->experts; e++)
        most = q[e] > most ? q[e] : most;
    bool fits;
    int64_t low = limits->rows_min < most ? limits->rows_min : most;
    int64_t level = largest_level(scratch, balance, plan, load, &only_send, q, low, most, &fits);
    cut_at(q, load->experts, level, q);
    return fits;
}
