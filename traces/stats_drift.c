/* Drift of the loads over recorded steps, and scatter between sources: definitions in stats.h. */
#include "traces/stats_private.h"

enum { HISTORY = 101, FORECAST = 10 }; /* steps kept, steps of the mean forecast */

static const int step_lag[MZ_STATS_LAGS] = {1, 5, 10, 20, 50, 100};

typedef struct drift_layer {
    double correlation[MZ_STATS_LAGS], same[MZ_STATS_LAGS];
    int64_t correlations[MZ_STATS_LAGS], sames[MZ_STATS_LAGS];
    double last, mean;
    int64_t lasts, means;
    double batch, batch_binomial, rank, rank_binomial;
} drift_layer;

struct mz_stats_drift {
    int32_t layers, experts, ranks;
    bool steps; /* the trace has steps */
    drift_layer *layer;
    int64_t done;       /* steps taken in */
    bool *in_window;    /* [HISTORY] */
    double *history;    /* [HISTORY][layers][E] shares, a ring; a layer without pairs is all NaN */
    int32_t *busiest;   /* [HISTORY][layers], -1 none */
    int64_t *total;     /* [layers][E] of the current step */
    double *square;     /* [layers][E] sum over its calls of c^2 */
    double *cross;      /* [layers][E] ... of n c */
    double *pairs2;     /* [layers] ... of n^2 */
    int32_t *calls;     /* [layers] with pairs */
    int64_t *rank_load; /* [ranks][layers][E]; NULL: too large */
};

mz_code mz_stats_drift_make(mz_arena *arena, const mz_trace_facts *facts, mz_stats_drift **out,
                            mz_err *err) {
    mz_stats_drift *d = *out = MZ_NEW(arena, mz_stats_drift, 1);
    if (!d)
        return mz_fail_nomem(err, "the statistics over steps");
    double cells = (double)facts->layers * facts->experts;
    int64_t room = (int64_t)facts->layers * facts->experts;
    *d = (mz_stats_drift){.layers = facts->layers,
                          .experts = facts->experts,
                          .ranks = facts->ranks,
                          .steps = facts->step_meaning != MZ_STEP_NONE};
    void *history = NULL, *ranks = NULL;
    mz_code code = mz_stats_table(arena, HISTORY * cells, sizeof *d->history, &history, err);
    if (!code)
        code = mz_stats_table(arena, facts->ranks * cells, sizeof *d->rank_load, &ranks, err);
    d->history = history;
    d->rank_load = ranks;
    d->layer = MZ_NEW(arena, drift_layer, facts->layers);
    d->in_window = MZ_NEW(arena, bool, HISTORY);
    d->busiest = MZ_NEW(arena, int32_t, HISTORY * (int64_t)facts->layers);
    d->total = MZ_NEW(arena, int64_t, room);
    d->square = MZ_NEW(arena, double, room);
    d->cross = MZ_NEW(arena, double, room);
    d->pairs2 = MZ_NEW(arena, double, facts->layers);
    d->calls = MZ_NEW(arena, int32_t, facts->layers);
    if (!code && (!d->layer || !d->in_window || !d->busiest || !d->total || !d->square ||
                  !d->cross || !d->pairs2 || !d->calls))
        code = mz_fail_nomem(err, "the statistics over steps");
    return code;
}

void mz_stats_drift_call(mz_stats_drift *d, int32_t layer, int32_t rank, const int64_t *count) {
    int64_t at = (int64_t)layer * d->experts;
    double n = 0;
    for (int32_t e = 0; e < d->experts; e++)
        n += (double)count[e];
    for (int32_t e = 0; e < d->experts; e++) {
        double c = (double)count[e];
        d->total[at + e] += count[e];
        d->square[at + e] += c * c;
        d->cross[at + e] += n * c;
    }
    d->pairs2[layer] += n * n;
    d->calls[layer] += n > 0;
    if (d->rank_load)
        for (int32_t e = 0; e < d->experts; e++)
            d->rank_load[(int64_t)rank * d->layers * d->experts + at + e] += count[e];
}

/* Variance of the step's counts between sources, and what independent draws would have. */
static void add_scatter(mz_stats_drift *d, int32_t layer, double sum) {
    drift_layer *row = &d->layer[layer];
    int64_t at = (int64_t)layer * d->experts, stride = (int64_t)d->layers * d->experts;
    if (d->calls[layer] > 1)
        for (int32_t e = 0; e < d->experts; e++) {
            double p = (double)d->total[at + e] / sum;
            row->batch += d->square[at + e] - 2 * p * d->cross[at + e] + p * p * d->pairs2[layer];
            row->batch_binomial += sum * p * (1 - p);
        }
    for (int32_t r = 0; d->rank_load && r < d->ranks; r++) {
        const int64_t *load = d->rank_load + r * stride + at;
        double n = 0;
        for (int32_t e = 0; e < d->experts; e++)
            n += (double)load[e];
        if (n == sum)
            return; /* a rank alone: nothing to scatter between */
        for (int32_t e = 0; e < d->experts; e++) {
            double p = (double)d->total[at + e] / sum, away = (double)load[e] - n * p;
            row->rank += away * away;
            row->rank_binomial += n * p * (1 - p);
        }
    }
}

static double *shares_of(const mz_stats_drift *d, int64_t step, int32_t layer) {
    return d->history + (step % HISTORY * d->layers + layer) * d->experts;
}

static double correlation(const double *a, const double *b, int32_t experts) {
    double ab = 0, aa = 0, bb = 0, even = 1.0 / experts;
    for (int32_t e = 0; e < experts; e++) {
        ab += (a[e] - even) * (b[e] - even);
        aa += (a[e] - even) * (a[e] - even);
        bb += (b[e] - even) * (b[e] - even);
    }
    return ab / sqrt(aa * bb);
}

/* Compares the newest step with those before it that lie in the window. */
static void compare_steps(mz_stats_drift *d, int32_t layer) {
    drift_layer *row = &d->layer[layer];
    int64_t now = d->done;
    const double *s = shares_of(d, now, layer);
    if (isnan(s[0]))
        return;
    for (int i = 0; i < MZ_STATS_LAGS; i++) {
        int64_t start = now - step_lag[i];
        if (start < 0 || !d->in_window[start % HISTORY])
            continue;
        const double *before = shares_of(d, start, layer);
        if (isnan(before[0]))
            continue;
        double r = correlation(before, s, d->experts);
        if (isfinite(r)) {
            row->correlation[i] += r;
            row->correlations[i]++;
        }
        row->same[i] += d->busiest[start % HISTORY * d->layers + layer] ==
                        d->busiest[now % HISTORY * d->layers + layer];
        row->sames[i]++;
    }
    if (now == 0 || !d->in_window[(now - 1) % HISTORY])
        return;
    const double *past[FORECAST];
    int steps = 0;
    for (int64_t j = now - 1; j >= 0 && j >= now - FORECAST; j--)
        if (!isnan(shares_of(d, j, layer)[0]))
            past[steps++] = shares_of(d, j, layer);
    if (steps == 0 || past[0] != shares_of(d, now - 1, layer))
        return;
    for (int32_t e = 0; e < d->experts; e++) {
        double mean = 0;
        for (int j = 0; j < steps; j++)
            mean += past[j][e] / steps;
        row->last += 0.5 * fabs(s[e] - past[0][e]);
        row->mean += 0.5 * fabs(s[e] - mean);
    }
    row->lasts++;
    row->means++;
}

void mz_stats_drift_step(mz_stats_drift *d, bool before_window, bool in_window) {
    int64_t cells = (int64_t)d->layers * d->experts, now = d->done;
    d->in_window[now % HISTORY] = in_window && !before_window;
    for (int32_t l = 0; l < d->layers && d->steps; l++) {
        const int64_t *total = d->total + (int64_t)l * d->experts;
        double sum = 0;
        int32_t most = 0;
        for (int32_t e = 0; e < d->experts; e++) {
            sum += (double)total[e];
            most = total[e] > total[most] ? e : most;
        }
        if (sum > 0 && d->in_window[now % HISTORY])
            add_scatter(d, l, sum);
        if (!d->history)
            continue;
        double *s = shares_of(d, now, l);
        for (int32_t e = 0; e < d->experts; e++)
            s[e] = sum > 0 ? (double)total[e] / sum : (double)NAN;
        d->busiest[now % HISTORY * d->layers + l] = sum > 0 ? most : -1;
        compare_steps(d, l);
    }
    d->done++;
    memset(d->total, 0, (size_t)cells * sizeof *d->total);
    memset(d->square, 0, (size_t)cells * sizeof *d->square);
    memset(d->cross, 0, (size_t)cells * sizeof *d->cross);
    memset(d->pairs2, 0, (size_t)d->layers * sizeof *d->pairs2);
    memset(d->calls, 0, (size_t)d->layers * sizeof *d->calls);
    if (d->rank_load)
        memset(d->rank_load, 0, (size_t)(d->ranks * cells) * sizeof *d->rank_load);
}

static double over(double sum, double count) {
    return count > 0 ? sum / count : (double)NAN;
}

void mz_stats_drift_finish(const mz_stats_drift *d, int32_t layer, double *metric) {
    const drift_layer *row = &d->layer[layer];
    for (int i = 0; i < MZ_STATS_LAGS; i++) {
        metric[MZ_DRIFT_CORRELATION + i] = over(row->correlation[i], (double)row->correlations[i]);
        metric[MZ_DRIFT_BUSIEST + i] = over(row->same[i], (double)row->sames[i]);
    }
    metric[MZ_DRIFT_LAST] = over(row->last, (double)row->lasts);
    metric[MZ_DRIFT_MEAN] = over(row->mean, (double)row->means);
    metric[MZ_SOURCE_BATCH] = over(row->batch, row->batch_binomial);
    metric[MZ_SOURCE_RANK] = over(row->rank, row->rank_binomial);
}
