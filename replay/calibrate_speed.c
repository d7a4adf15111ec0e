/* How fast the machine was while it was measured, by the probes (replay/probe.h): arithmetic,
 * memory, caches. A later run of the same says by how much seconds of either kind have grown. */
#include "replay/calibrate_inside.h"

#include "common/base/stat.h"
#include "sim/cost/work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Pools that are longer than caches: rows of so many calls. */
enum { PARTS_LEAST = 8, PIECES = 112 };

static mz_code keep(calibrate_seconds *s, double seconds, mz_err *err) {
    if (!mz_grow((void **)&s->value, &s->cap, s->count + 1, sizeof *s->value))
        return mz_fail_nomem(err, "calibration");
    s->value[s->count++] = seconds;
    return MZ_OK;
}

mz_code calibrate_probe(calibration *c, mz_speed speed, mz_err *err) {
    double seconds = 0;
    if (speed != MZ_SPEED_PRODUCT && c->options.pool_bytes < PARTS_LEAST * MZ_PROBE_LONG / 2)
        return MZ_OK;
    mz_code code = calibrate_go_on(c, err);
    if (code == MZ_OK)
        code = mz_probe_run(c->probe, speed, &seconds, err);
    if (code != MZ_OK)
        return code;
    memcpy(c->all, mz_probe_ranks(c->probe), sizeof *c->all * (size_t)c->transport->ranks);
    code = calibrate_note_lag(c, err);
    return code == MZ_OK ? keep(&c->probed[speed], seconds, err) : code;
}

mz_code calibrate_note_lag(calibration *c, mz_err *err) {
    enum { STRETCH_MS = 30 };
    const int32_t processes = c->transport->processes, each = c->transport->ranks / processes;
    double sum = 0, most = 0;
    if (processes == 1)
        return MZ_OK;
    for (int32_t p = 0; p < processes; p++) {
        c->stretch[p] += c->all[p * each];
        sum += c->stretch[p];
        most = fmax(most, c->stretch[p]);
    }
    if (sum / processes < 1e-3 * STRETCH_MS)
        return MZ_OK;
    memset(c->stretch, 0, sizeof *c->stretch * (size_t)processes);
    return keep(&c->lag, most * processes / sum - 1, err);
}

/* As of a sample of seven rounds the fastest and the slowest are left out, so are the fastest and
 * the slowest seventh here. 0: never probed. */
static double mean_of(const calibrate_seconds *s) {
    const int64_t count = (int64_t)s->count, off = count / 7;
    return count > 0 ? mz_middle_mean(s->value, count, off > 0 ? off : count >= 3) : 0;
}

void calibrate_references(calibration *c) {
    mz_measured *m = c->measured;
    const calibrate_seconds *product = &c->probed[MZ_SPEED_PRODUCT];
    m->probe_mean_s = mean_of(product); /* sorts */
    m->rows_mean_s = mean_of(&c->probed[MZ_SPEED_MEMORY]);
    m->cache_mean_s = mean_of(&c->probed[MZ_SPEED_CACHE]);
    /* All wait for every lag, the longest too: none is left out. */
    m->uneven = c->lag.count > 0 ? mz_middle_mean(c->lag.value, (int64_t)c->lag.count, 0) : 0;
    m->probe_s = product->count > 0 ? product->value[product->count / 2] : 0;
}

mz_code calibrate_pieces(calibration *c, mz_err *err) {
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < PIECES * MZ_SPEEDS; i++)
        code = calibrate_probe(c, (mz_speed)(i % MZ_SPEEDS), err);
    return code;
}

/* ---- what was measured, at another speed --------------------------------------------------------
 */

/* Products, and updates that are products. */
static bool computes(int work) {
    return work >= MZ_WORK_FORWARD || work == (int)mz_work_update(MZ_RULE_MUON);
}

/* Updates and saved activations, that nobody has touched for long. Copies and messages are not
 * among them: where these are short their time is that of the calls. */
static bool is_cold(int work) {
    return work == MZ_WORK_GATHER || (work >= MZ_WORK_UPDATE && work < MZ_WORK_FORWARD);
}

static double factor_of(const mz_factors *f, int work, const mz_fit_sample *s) {
    if (computes(work))
        return f->product;
    if (is_cold(work))
        return f->rows;
    return mz_speed_factor(s->size[2], f->cache, f->rows);
}

/* Terms of one factor go with it; where samples moved apart from each other they are fitted anew,
 * with the ratios that follow. */
static mz_code scale(mz_fit *fit, int work, const mz_factors *f, mz_err *err) {
    bool apart = false;
    if (fit->samples == 0)
        return MZ_OK;
    const double first = factor_of(f, work, &fit->sample[0]);
    for (int32_t i = 0; i < fit->samples; i++) {
        const double factor = factor_of(f, work, &fit->sample[i]);
        fit->sample[i].seconds *= factor;
        apart = apart || factor != first;
    }
    if (apart)
        return mz_fit_terms(fit, (mz_work)work, err);
    for (int t = 0; t < MZ_FIT_TERMS; t++)
        fit->term[t] *= first;
    return MZ_OK;
}

/* 1 where either has none. */
static double ratio_of(double now, double then) {
    return now > 0 && then > 0 ? now / then : 1;
}

mz_code mz_calibrate_rescale(mz_measured *m, const mz_measured *now, mz_factors *factors,
                             mz_err *err) {
    /* Means of both, or where a profile has none of them medians of both. */
    const bool means = m->probe_mean_s > 0;
    const bool cached = m->cache_mean_s > 0 && now->cache_mean_s > 0;
    mz_factors f = {.product =
                        means ? now->probe_mean_s / m->probe_mean_s : now->probe_s / m->probe_s,
                    .rows = ratio_of(now->rows_mean_s, m->rows_mean_s)};
    f.cache = cached ? now->cache_mean_s / m->cache_mean_s : f.rows;
    if (!(f.product > 0 && isfinite(f.product) && isfinite(f.rows) && isfinite(f.cache)))
        return mz_fail(err, MZ_EINPUT, "no probe of the machine's speed to compare with");
    for (int work = 0; work < MZ_WORKS; work++) {
        const mz_code code = scale(&m->fit[work], work, &f, err);
        if (code != MZ_OK)
            return code;
    }
    m->call_s *= f.product;
    m->probe_s = now->probe_s;
    m->probe_mean_s = now->probe_mean_s;
    m->rows_mean_s = m->rows_mean_s > 0 ? now->rows_mean_s : 0;
    m->cache_mean_s = m->cache_mean_s > 0 ? now->cache_mean_s : 0;
    m->uneven = now->uneven > 0 ? now->uneven : m->uneven;
    *factors = f;
    return MZ_OK;
}
