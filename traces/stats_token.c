/* Experts of one token: popularity, teams, dependence between layers, gate weights. Definitions in
 * stats.h. */
#include "traces/stats_private.h"

#include <gsl/gsl_sort.h>
#include <gsl/gsl_statistics_double.h>
#include <stdlib.h>

/* Weights are binned by the upper bits of their float: sign, exponent and 10 bits of mantissa. */
enum { BIN_SHIFT = 13, BINS = 1 << (31 - BIN_SHIFT) };

typedef struct token_layer {
    int64_t tokens, linked; /* linked: with a first expert in the layer before */
    double weight[MZ_STATS_RANKS];
    int64_t weighed[MZ_STATS_RANKS];
} token_layer;

struct mz_stats_token {
    int32_t layers, experts;
    token_layer *layer;
    int64_t *chose; /* [layers][E] */
    int64_t *both;  /* [layers][E][E] tokens with a and b, a < b; NULL: too large */
    int64_t *link;  /* [layers][E][E] first expert before, first expert; NULL: too large */
    int32_t *bins;  /* [layers][BINS] of the largest weight; NULL: none, too large */
};

mz_code mz_stats_table(mz_arena *arena, double entries, size_t size, void **table, mz_err *err) {
    *table = NULL;
    if (entries * (double)size > MZ_STATS_TABLE)
        return MZ_OK;
    *table = mz_arena_alloc(arena, (size_t)entries, size);
    return *table ? MZ_OK : mz_fail_nomem(err, "the statistics of a trace");
}

mz_code mz_stats_token_make(mz_arena *arena, int32_t layers, int32_t experts, bool weights,
                            mz_stats_token **out, mz_err *err) {
    mz_stats_token *t = *out = MZ_NEW(arena, mz_stats_token, 1);
    double squares = (double)layers * experts * experts;
    void *both = NULL, *link = NULL, *bins = NULL;
    if (!t)
        return mz_fail_nomem(err, "the statistics of tokens");
    t->layers = layers;
    t->experts = experts;
    t->layer = MZ_NEW(arena, token_layer, layers);
    t->chose = MZ_NEW(arena, int64_t, (int64_t)layers * experts);
    mz_code code = mz_stats_table(arena, squares, sizeof *t->both, &both, err);
    if (!code)
        code = mz_stats_table(arena, squares, sizeof *t->link, &link, err);
    if (!code && weights)
        code = mz_stats_table(arena, (double)layers * BINS, sizeof *t->bins, &bins, err);
    t->both = both;
    t->link = link;
    t->bins = bins;
    if (!code && (!t->layer || !t->chose))
        code = mz_fail_nomem(err, "the statistics of tokens");
    return code;
}

static void add_weights(mz_stats_token *t, int32_t layer, const float *weight, int64_t n) {
    token_layer *row = &t->layer[layer];
    float largest[MZ_STATS_RANKS];
    int64_t kept = 0;
    for (int64_t j = 0; j < n; j++) {
        int64_t at = kept < MZ_STATS_RANKS ? kept++ : MZ_STATS_RANKS - 1;
        if (at == MZ_STATS_RANKS - 1 && j > at && largest[at] >= weight[j])
            continue;
        for (; at > 0 && largest[at - 1] < weight[j]; at--)
            largest[at] = largest[at - 1];
        largest[at] = weight[j];
    }
    for (int64_t j = 0; j < kept; j++) {
        row->weight[j] += (double)largest[j];
        row->weighed[j]++;
    }
    if (t->bins && kept) {
        uint32_t bits;
        memcpy(&bits, &largest[0], sizeof bits);
        int32_t *bin = &t->bins[(int64_t)layer * BINS + (bits >> BIN_SHIFT & (BINS - 1))];
        *bin += *bin < INT32_MAX; /* full after 2^31 tokens of one weight, which then count less */
    }
}

int32_t mz_stats_token_add(mz_stats_token *t, int32_t layer, const uint16_t *expert,
                           const float *weight, int64_t n, int32_t before) {
    int64_t at = (int64_t)layer * t->experts;
    int32_t first = n ? expert[0] : -1;
    float most = n && weight ? weight[0] : 0;
    t->layer[layer].tokens++;
    for (int64_t i = 0; i < n; i++) {
        t->chose[at + expert[i]]++;
        if (weight && weight[i] > most) {
            most = weight[i];
            first = expert[i];
        }
        for (int64_t j = 0; t->both && j < i; j++) {
            int64_t low = expert[i] < expert[j] ? expert[i] : expert[j];
            int64_t high = expert[i] < expert[j] ? expert[j] : expert[i];
            t->both[(at + low) * t->experts + high]++;
        }
    }
    if (weight)
        add_weights(t, layer, weight, n);
    if (before >= 0 && first >= 0) {
        t->layer[layer].linked++;
        if (t->link)
            t->link[(at + before) * t->experts + first]++;
    }
    return first;
}

const int64_t *mz_stats_token_chose(const mz_stats_token *t, int32_t layer, int64_t *tokens) {
    *tokens = t->layer[layer].tokens;
    return t->chose + (int64_t)layer * t->experts;
}

static double plus_entropy(double bits, double count, double total) {
    return count > 0 ? bits - count / total * log2(count / total) : bits;
}

static void finish_link(const mz_stats_token *t, int32_t layer, double *metric, double *to) {
    double n = (double)t->layer[layer].linked, joint = 0, from_bits = 0, to_bits = 0;
    const int64_t *link = t->link + (int64_t)layer * t->experts * t->experts;
    double hits = 0, guess = 0;
    if (n == 0)
        return;
    memset(to, 0, (size_t)t->experts * sizeof *to);
    for (int32_t a = 0; a < t->experts; a++) {
        double from = 0, best = 0;
        for (int32_t b = 0; b < t->experts; b++) {
            double c = (double)link[(int64_t)a * t->experts + b];
            joint = plus_entropy(joint, c, n);
            from += c;
            to[b] += c;
            best = c > best ? c : best;
        }
        from_bits = plus_entropy(from_bits, from, n);
        hits += best;
    }
    for (int32_t b = 0; b < t->experts; b++) {
        to_bits = plus_entropy(to_bits, to[b], n);
        guess = to[b] > guess ? to[b] : guess;
    }
    metric[MZ_MI_BITS] = fmax(from_bits + to_bits - joint, 0); /* rounding may go below */
    metric[MZ_MI_SHARE] = to_bits > 0 ? metric[MZ_MI_BITS] / to_bits : (double)NAN;
    metric[MZ_MI_HIT] = hits / n;
    metric[MZ_MI_GUESS] = guess / n;
}

/* lift: room for E (E - 1) / 2 values; c_ab = c_ba, so each pair is taken once. */
static void finish_teams(const mz_stats_token *t, int32_t layer, double *metric, double *lift) {
    const int64_t *chose = t->chose + (int64_t)layer * t->experts;
    const int64_t *both = t->both + (int64_t)layer * t->experts * t->experts;
    double pairs = 0, all = 0, partner = 0;
    size_t n = 0;
    int32_t used = 0;
    for (int64_t a = 0; a < t->experts; a++) {
        double best = 0;
        all += (double)chose[a];
        for (int64_t b = 0; b < t->experts; b++) {
            double c = a == b ? 0 : (double)both[a < b ? a * t->experts + b : b * t->experts + a];
            pairs += c;
            best = c > best ? c : best;
        }
        used += chose[a] > 0;
        partner += chose[a] ? best / (double)chose[a] : 0;
    }
    if (pairs == 0)
        return;
    for (int64_t a = 0; a < t->experts; a++)
        for (int64_t b = a + 1; b < t->experts; b++)
            if (chose[a] && chose[b])
                lift[n++] = (double)both[a * t->experts + b] / pairs * all / (double)chose[a] *
                            all / (double)chose[b];
    gsl_sort(lift, 1, n);
    metric[MZ_TEAM_PARTNER] = partner / used;
    metric[MZ_TEAM_LIFT] = n ? gsl_stats_quantile_from_sorted_data(lift, 1, n, 0.99) : (double)NAN;
}

/* Value at the given share of the largest weights: the lower end of its bin. */
static double weight_quantile(const mz_stats_token *t, int32_t layer, double share) {
    const int32_t *bins = t->bins + (int64_t)layer * BINS;
    double wanted = share * (double)t->layer[layer].weighed[0], sum = 0;
    uint32_t bin = 0;
    for (; bin < BINS - 1; bin++) {
        sum += bins[bin];
        if (sum > wanted)
            break;
    }
    float value;
    bin <<= BIN_SHIFT;
    memcpy(&value, &bin, sizeof value);
    return (double)value;
}

mz_code mz_stats_token_finish(const mz_stats_token *t, int32_t layer, double *metric, mz_err *err) {
    const token_layer *row = &t->layer[layer];
    size_t experts = (size_t)t->experts;
    for (int j = 0; j < MZ_STATS_RANKS; j++)
        if (row->weighed[j])
            metric[MZ_WEIGHT + j] = row->weight[j] / (double)row->weighed[j];
    if (t->bins && row->weighed[0]) {
        metric[MZ_WEIGHT_P10] = weight_quantile(t, layer, 0.1);
        metric[MZ_WEIGHT_P90] = weight_quantile(t, layer, 0.9);
    }
    if (!t->both || !t->link)
        return MZ_OK;
    double *scratch = mz_calloc(experts * (experts + 1) / 2, sizeof *scratch);
    if (!scratch)
        return mz_fail_nomem(err, "the statistics of teams");
    finish_link(t, layer, metric, scratch);
    finish_teams(t, layer, metric, scratch);
    free(scratch);
    return MZ_OK;
}
