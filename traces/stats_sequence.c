/* What tokens of one sequence have in common: definitions in stats.h. */
#include "traces/stats_private.h"

#include <stdlib.h>

enum { RING = 256, WINDOWS = 2, HALF_TOKENS = 32 };

static const int token_lag[MZ_STATS_LAGS] = {1, 2, 4, 16, 64, 128};
static const int window_tokens[WINDOWS] = {64, 256};
static const int distinct_tokens[MZ_STATS_DISTINCT] = {8, 16, 32, 64, 128};

typedef struct sequence_layer {
    double shared[MZ_STATS_LAGS], chosen[MZ_STATS_LAGS];
    int64_t windows[WINDOWS];
    int64_t distinct[MZ_STATS_DISTINCT], distinct_windows[MZ_STATS_DISTINCT];
    int64_t sequences; /* with halves */
    double ab, aa, bb;
} sequence_layer;

struct mz_stats_sequence {
    int32_t experts;
    sequence_layer *layer;
    double *window_sum, *window_square; /* [layers][WINDOWS][E] */
    double *half_sum;                   /* [layers][2][E] sums of a and of b */
    /* The sequence at hand. */
    int32_t at;
    int64_t tokens, done;
    uint8_t *mark;                   /* [RING][E] token chose expert */
    uint16_t *list;                  /* [RING][E] its experts */
    int64_t *listed;                 /* [RING] how many */
    int64_t *window;                 /* [WINDOWS][E] */
    int64_t *stamp;                  /* [E] clock when it was last used */
    int64_t clock;                   /* numbers windows, never the same twice */
    int64_t seen[MZ_STATS_DISTINCT]; /* distinct experts so far in the window */
    int64_t *half;                   /* [2][E] */
    double *q;                       /* [E] scratch: share of tokens that chose the expert */
};

mz_code mz_stats_sequence_make(mz_arena *arena, int32_t layers, int32_t experts,
                               mz_stats_sequence **out, mz_err *err) {
    mz_stats_sequence *s = *out = MZ_NEW(arena, mz_stats_sequence, 1);
    int64_t cells = (int64_t)layers * experts;
    if (!s)
        return mz_fail_nomem(err, "the statistics of sequences");
    s->experts = experts;
    s->layer = MZ_NEW(arena, sequence_layer, layers);
    s->window_sum = MZ_NEW(arena, double, cells *WINDOWS);
    s->window_square = MZ_NEW(arena, double, cells *WINDOWS);
    s->half_sum = MZ_NEW(arena, double, cells * 2);
    s->mark = MZ_NEW(arena, uint8_t, RING * (int64_t)experts);
    s->list = MZ_NEW(arena, uint16_t, RING * (int64_t)experts);
    s->listed = MZ_NEW(arena, int64_t, RING);
    s->window = MZ_NEW(arena, int64_t, WINDOWS * (int64_t)experts);
    s->stamp = MZ_NEW(arena, int64_t, experts);
    s->half = MZ_NEW(arena, int64_t, 2 * (int64_t)experts);
    s->q = MZ_NEW(arena, double, experts);
    if (!s->layer || !s->window_sum || !s->window_square || !s->half_sum || !s->mark || !s->list ||
        !s->listed || !s->window || !s->stamp || !s->half || !s->q)
        return mz_fail_nomem(err, "the statistics of sequences");
    return MZ_OK;
}

static void clear_slot(mz_stats_sequence *s, int64_t slot) {
    for (int64_t i = 0; i < s->listed[slot]; i++)
        s->mark[slot * s->experts + s->list[slot * s->experts + i]] = 0;
    s->listed[slot] = 0;
}

void mz_stats_sequence_begin(mz_stats_sequence *s, int32_t layer, int64_t tokens) {
    s->at = layer;
    s->tokens = tokens;
    s->done = 0;
    for (int64_t slot = 0; slot < RING; slot++)
        clear_slot(s, slot);
    memset(s->window, 0, (size_t)(WINDOWS * s->experts) * sizeof *s->window);
    memset(s->half, 0, (size_t)(2 * s->experts) * sizeof *s->half);
    for (int i = 0; i < MZ_STATS_DISTINCT; i++)
        s->seen[i] = 0;
    s->clock++;
}

static void add_reuse(mz_stats_sequence *s, const uint16_t *expert, int64_t n) {
    sequence_layer *row = &s->layer[s->at];
    for (int i = 0; i < MZ_STATS_LAGS && s->done >= token_lag[i]; i++) {
        const uint8_t *mark = s->mark + (s->done - token_lag[i]) % RING * s->experts;
        int64_t shared = 0;
        for (int64_t j = 0; j < n; j++)
            shared += mark[expert[j]];
        row->shared[i] += (double)shared;
        row->chosen[i] += (double)n;
    }
    int64_t slot = s->done % RING;
    clear_slot(s, slot);
    for (int64_t j = 0; j < n; j++) {
        s->mark[slot * s->experts + expert[j]] = 1;
        s->list[slot * s->experts + j] = expert[j];
    }
    s->listed[slot] = n;
}

static void end_window(mz_stats_sequence *s, int w) {
    int64_t at = ((int64_t)s->at * WINDOWS + w) * s->experts, *count = s->window + w * s->experts;
    for (int32_t e = 0; e < s->experts; e++) {
        double c = (double)count[e];
        s->window_sum[at + e] += c;
        s->window_square[at + e] += c * c;
        count[e] = 0;
    }
    s->layer[s->at].windows[w]++;
}

static void add_windows(mz_stats_sequence *s, const uint16_t *expert, int64_t n) {
    sequence_layer *row = &s->layer[s->at];
    for (int w = 0; w < WINDOWS; w++) {
        for (int64_t j = 0; j < n; j++)
            s->window[w * s->experts + expert[j]]++;
        if ((s->done + 1) % window_tokens[w] == 0)
            end_window(s, w);
    }
    /* The clock moves on with every window of 8, the shortest, so it tells all windows apart. */
    int64_t begin[MZ_STATS_DISTINCT];
    for (int i = 0; i < MZ_STATS_DISTINCT; i++)
        begin[i] = s->clock - s->done % distinct_tokens[i] / distinct_tokens[0];
    for (int64_t j = 0; j < n; j++) {
        for (int i = 0; i < MZ_STATS_DISTINCT; i++)
            s->seen[i] += s->stamp[expert[j]] < begin[i];
        s->stamp[expert[j]] = s->clock;
    }
    for (int i = 0; i < MZ_STATS_DISTINCT; i++)
        if ((s->done + 1) % distinct_tokens[i] == 0) {
            row->distinct[i] += s->seen[i];
            row->distinct_windows[i]++;
            s->seen[i] = 0;
        }
    s->clock += (s->done + 1) % distinct_tokens[0] == 0;
}

static void end_sequence(mz_stats_sequence *s) {
    sequence_layer *row = &s->layer[s->at];
    double first = (double)(s->tokens / 2), second = (double)(s->tokens - s->tokens / 2);
    double *sum = s->half_sum + (int64_t)s->at * 2 * s->experts;
    for (int32_t e = 0; e < s->experts; e++) {
        double a = (double)s->half[e] / first, b = (double)s->half[s->experts + e] / second;
        row->ab += a * b;
        row->aa += a * a;
        row->bb += b * b;
        sum[e] += a;
        sum[s->experts + e] += b;
    }
    row->sequences++;
}

void mz_stats_sequence_token(mz_stats_sequence *s, const uint16_t *expert, int64_t n) {
    int64_t *half = s->half + (s->done >= s->tokens / 2 ? s->experts : 0);
    for (int64_t j = 0; j < n; j++)
        half[expert[j]]++;
    add_reuse(s, expert, n);
    add_windows(s, expert, n);
    s->done++;
    if (s->done == s->tokens && s->tokens >= HALF_TOKENS)
        end_sequence(s);
}

static double inflation(const mz_stats_sequence *s, int32_t layer, int w) {
    int64_t at = ((int64_t)layer * WINDOWS + w) * s->experts;
    double windows = (double)s->layer[layer].windows[w], n = window_tokens[w], found = 0, drawn = 0;
    if (windows < 2)
        return NAN;
    for (int32_t e = 0; e < s->experts; e++) {
        double mean = s->window_sum[at + e] / windows;
        found += (s->window_square[at + e] - windows * mean * mean) / (windows - 1);
        drawn += mean * (1 - mean / n);
    }
    return drawn > 0 ? found / drawn : (double)NAN;
}

static void half_correlation(const mz_stats_sequence *s, int32_t layer, const double *q,
                             double *metric) {
    const sequence_layer *row = &s->layer[layer];
    const double *sum = s->half_sum + (int64_t)layer * 2 * s->experts;
    double n = (double)row->sequences, ab = row->ab, aa = row->aa, bb = row->bb, other = 0;
    for (int32_t e = 0; e < s->experts; e++) {
        double a = sum[e], b = sum[s->experts + e];
        ab += n * q[e] * q[e] - q[e] * (a + b);
        aa += n * q[e] * q[e] - 2 * q[e] * a;
        bb += n * q[e] * q[e] - 2 * q[e] * b;
        other += (a - n * q[e]) * (b - n * q[e]);
    }
    /* What is this small against the sums it is left of is their rounding: every half has mix q. */
    double rounding = 1e-12 * (row->aa + row->bb);
    if (n == 0 || aa <= rounding || bb <= rounding)
        return;
    double norm = sqrt(aa) * sqrt(bb);
    metric[MZ_HALF_SAME] = ab / norm;
    if (n > 1)
        metric[MZ_HALF_OTHER] = (other - ab) / ((n - 1) * norm);
}

void mz_stats_sequence_finish(const mz_stats_sequence *s, int32_t layer, const int64_t *chose,
                              int64_t tokens, double *metric) {
    const sequence_layer *row = &s->layer[layer];
    double *q = s->q, k = 0, square = 0;
    if (tokens == 0)
        return;
    for (int32_t e = 0; e < s->experts; e++) {
        q[e] = (double)chose[e] / (double)tokens;
        k += q[e];
        square += q[e] * q[e];
    }
    metric[MZ_REUSE_UNIFORM] = k / s->experts;
    metric[MZ_REUSE_INDEPENDENT] = square / k;
    for (int i = 0; i < MZ_STATS_LAGS; i++)
        if (row->chosen[i] > 0)
            metric[MZ_REUSE + i] = row->shared[i] / row->chosen[i];
    for (int w = 0; w < WINDOWS; w++)
        metric[MZ_INFLATION + w] = inflation(s, layer, w);
    for (int i = 0; i < MZ_STATS_DISTINCT; i++) {
        double independent = 0;
        for (int32_t e = 0; e < s->experts; e++)
            independent += 1 - pow(1 - q[e], distinct_tokens[i]);
        metric[MZ_DISTINCT_INDEPENDENT + i] = independent;
        if (row->distinct_windows[i])
            metric[MZ_DISTINCT + i] = (double)row->distinct[i] / (double)row->distinct_windows[i];
    }
    half_correlation(s, layer, q, metric);
}
