#include "sim/cluster/measured.h"

#include "common/io/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

bool mz_on_host(const mz_measured *m) {
    return strcmp(m->backend, "host") == 0;
}

static int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

mz_cut mz_cut_side(const mz_measured *m, int64_t side, int32_t most) {
    enum { GRAIN = 8 };
    if (most <= 0 || side <= most)
        return (mz_cut){{1, 0}, {side, 0}};
    int64_t part = most;
    if (mz_on_host(m)) {
        const int64_t even = divide_up(side, divide_up(side, most));
        const int64_t grains = divide_up(even, GRAIN) * GRAIN;
        part = grains < most ? grains : most;
    }
    const int64_t whole = side / part, rest = side - whole * part;
    return (mz_cut){{whole, rest > 0}, {part, rest}};
}

typedef struct size_range {
    double least, most;
} size_range;

/* Of one of the sizes in samples, at least one. */
static size_range sampled(const mz_fit *fit, int which) {
    size_range range = {INFINITY, 0};
    for (int32_t i = 0; i < fit->samples; i++) {
        range.least = fmin(range.least, fit->sample[i].size[which]);
        range.most = fmax(range.most, fit->sample[i].size[which]);
    }
    return range;
}

/* By which factor a size is out of the range; up to 1: it is within. */
static double out_by(size_range range, double size) {
    return fmax(size / range.most, range.least / size);
}

static const double NEAR = 2; /* as a factor: samples tell about sizes that are no farther out */

bool mz_measured_reaches(const mz_measured *m, mz_work product, int64_t n, int64_t k) {
    const mz_fit *fit = &m->fit[product];
    const mz_tiling *t = &m->tiling[product];
    const double side[2] = {(double)mz_cut_side(m, n, t->n).part[0],
                            (double)mz_cut_side(m, k, t->k).part[0]};
    bool reached = true;
    for (int i = 0; i < 2 && fit->samples > 0; i++)
        reached = reached && out_by(sampled(fit, i + 1), side[i]) <= NEAR;
    return reached;
}

void mz_rows_meet(mz_rows_met *met, const mz_measured *m, mz_work work, int64_t rows) {
    if (work >= MZ_WORK_CONVERT && !mz_work_is_product(work))
        return;
    if (m->fit[work].samples == 0) /* profiles of earlier versions, or calibrated in part */
        work = work == MZ_WORK_GATHER ? MZ_WORK_PACK : work == MZ_WORK_UP ? MZ_WORK_FORWARD : work;
    const mz_cut cut = mz_cut_side(m, rows, mz_work_is_product(work) ? m->tiling[work].rows : 0);
    if (cut.part[0] > met->most[work])
        met->most[work] = cut.part[0];
}

bool mz_measured_rows_outside(const mz_measured *m, const mz_rows_met *met, char *text,
                              size_t size) {
    double farthest = NEAR;
    int outside = 0;
    for (int w = 0; w < MZ_WORKS; w++) {
        if (met->most[w] == 0 || m->fit[w].samples == 0)
            continue;
        const size_range range = sampled(&m->fit[w], 0);
        const double out = out_by(range, (double)met->most[w]);
        outside += out > NEAR;
        if (out <= farthest)
            continue;
        farthest = out;
        snprintf(text, size, "%s of %lld row%s (%.0f to %.0f calibrated)", mz_work_name((mz_work)w),
                 (long long)met->most[w], met->most[w] == 1 ? "" : "s", range.least, range.most);
    }
    const size_t used = outside > 1 ? strlen(text) : 0;
    if (outside > 1)
        snprintf(text + used, size - used, " and %d other kind%s", outside - 1,
                 outside > 2 ? "s" : "");
    return outside > 0;
}

/* ---- JSON
 * -----------------------------------------------------------------------------------------------
 */

/* What a number in a profile may be: no machine has more, and sums stay finite. */
static const double SIZE_MOST = 1e15, SECONDS_LEAST = 1e-30, SECONDS_MOST = 1e6;

/* A list of numbers from `least` on. *value: [count]; where count is -1 the list says it. */
static mz_code read_numbers(mz_json *view, const char *key, double least, double most,
                            mz_arena *arena, int64_t *count, double **value, mz_err *err) {
    json_t *list = NULL, *item;
    size_t i;
    mz_code code = mz_json_get(view, key, JSON_ARRAY, &list, err);
    if (code != MZ_OK)
        return code;
    if (*count >= 0 && (int64_t)json_array_size(list) != *count)
        return mz_fail(err, MZ_EINPUT, "%s: '%s' has %zu numbers, must have %lld", view->where, key,
                       json_array_size(list), (long long)*count);
    *count = (int64_t)json_array_size(list);
    *value = MZ_NEW(arena, double, *count);
    if (!*value)
        return mz_fail_nomem(err, "a profile's measurements");
    json_array_foreach(list, i, item) {
        if (!json_is_number(item) || !(json_number_value(item) >= least) ||
            !(json_number_value(item) <= most))
            return mz_fail(err, MZ_EINPUT, "%s: '%s' number %zu must be a number from %g to %g",
                           view->where, key, i, least, most);
        (*value)[i] = json_number_value(item);
    }
    return MZ_OK;
}

static mz_code at_most(const mz_json *view, const char *key, double value, double most,
                       mz_err *err) {
    if (value <= most)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT, "%s: '%s' is %g, must be at most %g", view->where, key, value,
                   most);
}

/* 0 where it is not there. */
static mz_code read_quantity_or(mz_json *view, const char *key, mz_unit unit, double most,
                                double *value, mz_err *err) {
    const mz_code code = mz_json_quantity_or(view, key, unit, 0, value, err);
    return code == MZ_OK ? at_most(view, key, *value, most, err) : code;
}

static const char *const size_keys[2][MZ_FIT_SIZES] = {{"rows", "cols", "bytes"}, {"m", "n", "k"}};

static mz_code read_samples(mz_json *view, mz_work work, mz_arena *arena, mz_fit *fit,
                            mz_err *err) {
    const bool product = mz_work_is_product(work);
    double feature[MZ_FIT_TERMS], *term, *size[MZ_FIT_SIZES], *seconds;
    int64_t terms = mz_fit_features(work, (const double[MZ_FIT_SIZES]){0}, feature), count = -1;
    mz_code code = read_numbers(view, "terms", 0, SECONDS_MOST, arena, &terms, &term, err);
    for (int k = 0; code == MZ_OK && k < MZ_FIT_SIZES; k++)
        code =
            read_numbers(view, size_keys[product][k], 0, SIZE_MOST, arena, &count, &size[k], err);
    if (code == MZ_OK)
        code = read_numbers(view, "seconds", SECONDS_LEAST, SECONDS_MOST, arena, &count, &seconds,
                            err);
    if (code != MZ_OK)
        return code;
    if (count < 1)
        return mz_fail(err, MZ_EINPUT, "%s: no samples", view->where);
    if (count > MZ_FIT_SAMPLES_MOST)
        return mz_fail(err, MZ_EINPUT, "%s: %lld samples, at most %d are allowed", view->where,
                       (long long)count, MZ_FIT_SAMPLES_MOST);
    fit->sample = MZ_NEW(arena, mz_fit_sample, count);
    if (!fit->sample)
        return mz_fail_nomem(err, "a profile's measurements");
    memcpy(fit->term, term, sizeof *term * (size_t)terms);
    fit->samples = (int32_t)count;
    for (int64_t i = 0; i < count; i++) {
        for (int k = 0; k < MZ_FIT_SIZES; k++)
            fit->sample[i].size[k] = size[k][i];
        fit->sample[i].seconds = seconds[i];
    }
    mz_fit_finish(fit, work);
    return MZ_OK;
}

static mz_code read_fit(json_t *value, const char *where, mz_work work, mz_arena *arena,
                        mz_measured *m, mz_err *err) {
    mz_json view;
    int64_t tile[3] = {0};
    double residual;
    mz_code code = mz_json_object(value, where, &view, err);
    if (code == MZ_OK)
        code = read_samples(&view, work, arena, &m->fit[work], err);
    if (code == MZ_OK) /* for readers */
        code = read_quantity_or(&view, "residual", MZ_UNIT_NONE, SIZE_MOST, &residual, err);
    if (code == MZ_OK && mz_work_is_product(work)) {
        static const char *const keys[3] = {"tile_rows", "tile_n", "tile_k"};
        for (int i = 0; code == MZ_OK && i < 3; i++)
            code = mz_json_int(&view, keys[i], 0, INT32_MAX, &tile[i], err);
        m->tiling[work] = (mz_tiling){(int32_t)tile[0], (int32_t)tile[1], (int32_t)tile[2]};
    }
    return code == MZ_OK ? mz_json_no_more(&view, err) : code;
}

static mz_code read_kinds(mz_json *view, mz_arena *arena, mz_measured *m, mz_err *err) {
    json_t *kinds = NULL, *value;
    const char *name;
    mz_code code = mz_json_get(view, "kinds", JSON_OBJECT, &kinds, err);
    if (code != MZ_OK)
        return code;
    json_object_foreach(kinds, name, value) {
        char where[400];
        int work = 0;
        while (work < MZ_WORKS && strcmp(mz_work_name((mz_work)work), name) != 0)
            work++;
        snprintf(where, sizeof where, "%s.kinds.%s", view->where, name);
        if (work == MZ_WORKS)
            return mz_fail(err, MZ_EINPUT, "%s: there is no such kind of work", where);
        code = read_fit(value, where, (mz_work)work, arena, m, err);
        if (code != MZ_OK)
            return code;
    }
    return MZ_OK;
}

static mz_code read_text(mz_json *view, const char *key, char *text, size_t size, mz_err *err) {
    const char *value;
    mz_code code = mz_json_string(view, key, &value, err);
    if (code == MZ_OK)
        snprintf(text, size, "%s", value);
    return code;
}

static mz_code read_rescaled(mz_json *view, mz_rescaled *rescaled, mz_err *err) {
    json_t *object;
    mz_json of;
    char where[400];
    *rescaled = (mz_rescaled){.product = 1, .rows = 1, .cache = 1};
    if (!mz_json_has(view, "rescaled"))
        return MZ_OK;
    snprintf(where, sizeof where, "%s.rescaled", view->where);
    mz_code code = mz_json_get(view, "rescaled", JSON_OBJECT, &object, err);
    if (code == MZ_OK)
        code = mz_json_object(object, where, &of, err);
    if (code == MZ_OK)
        code = read_text(&of, "at", rescaled->at, sizeof rescaled->at, err);
    if (code == MZ_OK)
        code = mz_json_quantity(&of, "products", MZ_UNIT_NONE, &rescaled->product, err);
    if (code == MZ_OK)
        code = mz_json_quantity(&of, "memory", MZ_UNIT_NONE, &rescaled->rows, err);
    if (code == MZ_OK) /* earlier versions took what lies in a cache for memory's */
        code =
            mz_json_quantity_or(&of, "cache", MZ_UNIT_NONE, rescaled->rows, &rescaled->cache, err);
    if (code == MZ_OK &&
        !(rescaled->product > 0 && rescaled->rows > 0 && rescaled->cache > 0 &&
          fmax(rescaled->product, fmax(rescaled->rows, rescaled->cache)) <= SIZE_MOST))
        return mz_fail(err, MZ_EINPUT, "%s: factors must be above 0 and at most %g", where,
                       SIZE_MOST);
    return code == MZ_OK ? mz_json_no_more(&of, err) : code;
}

mz_code mz_measured_read(json_t *object, const char *where, mz_arena *arena, mz_measured **measured,
                         mz_err *err) {
    mz_json view;
    int64_t processes = 0, workers = 0, rounds = 0;
    mz_measured *m = MZ_NEW(arena, mz_measured, 1);
    if (!m)
        return mz_fail_nomem(err, "a profile's measurements");
    mz_code code = mz_json_object(object, where, &view, err);
    if (code == MZ_OK)
        code = read_text(&view, "machine", m->machine, sizeof m->machine, err);
    if (code == MZ_OK)
        code = read_text(&view, "backend", m->backend, sizeof m->backend, err);
    if (code == MZ_OK)
        code = read_text(&view, "transport", m->transport, sizeof m->transport, err);
    if (code == MZ_OK)
        code = mz_json_int(&view, "processes", 1, INT32_MAX, &processes, err);
    if (code == MZ_OK)
        code = mz_json_int(&view, "workers", 1, INT32_MAX, &workers, err);
    if (code == MZ_OK)
        code = mz_json_int_or(&view, "rounds", 0, 0, INT32_MAX, &rounds, err);
    if (code == MZ_OK)
        code = read_quantity_or(&view, "spent", MZ_UNIT_SECONDS, SECONDS_MOST, &m->spent_s, err);
    if (code == MZ_OK)
        code = mz_json_quantity(&view, "call", MZ_UNIT_SECONDS, &m->call_s, err);
    if (code == MZ_OK)
        code = at_most(&view, "call", m->call_s, SECONDS_MOST, err);
    if (code == MZ_OK)
        code = mz_json_quantity_or(&view, "alone", MZ_UNIT_NONE, 1, &m->alone, err);
    if (code == MZ_OK && !(m->alone > 0 && m->alone <= 1))
        return mz_fail(err, MZ_EINPUT, "%s: 'alone' is %g, must be above 0 and at most 1", where,
                       m->alone);
    if (code == MZ_OK)
        code = read_quantity_or(&view, "probe", MZ_UNIT_SECONDS, SECONDS_MOST, &m->probe_s, err);
    if (code == MZ_OK)
        code = read_quantity_or(&view, "probe_mean", MZ_UNIT_SECONDS, SECONDS_MOST,
                                &m->probe_mean_s, err);
    if (code == MZ_OK)
        code = read_quantity_or(&view, "rows_mean", MZ_UNIT_SECONDS, SECONDS_MOST, &m->rows_mean_s,
                                err);
    if (code == MZ_OK)
        code = read_quantity_or(&view, "cache_mean", MZ_UNIT_SECONDS, SECONDS_MOST,
                                &m->cache_mean_s, err);
    if (code == MZ_OK)
        code = read_quantity_or(&view, "uneven", MZ_UNIT_NONE, SECONDS_MOST, &m->uneven, err);
    if (code == MZ_OK)
        code = read_rescaled(&view, &m->rescaled, err);
    if (code == MZ_OK)
        code = read_kinds(&view, arena, m, err);
    if (code == MZ_OK)
        code = mz_json_no_more(&view, err);
    m->processes = (int32_t)processes;
    m->workers = (int32_t)workers;
    m->rounds = (int32_t)rounds;
    *measured = m;
    return code;
}

static json_t *numbers_of(const mz_fit *fit, int which) {
    json_t *list = json_array();
    bool failed = false;
    for (int32_t i = 0; i < fit->samples; i++) {
        const mz_fit_sample *s = &fit->sample[i];
        const double value = which < MZ_FIT_SIZES ? s->size[which] : s->seconds;
        failed |= json_array_append_new(list, json_real(value)) != 0;
    }
    return mz_json_whole(list, failed);
}

/* Root of the mean squared relative error of the fitted terms alone. */
static double residual(const mz_fit *fit) {
    double sum = 0;
    for (int32_t i = 0; i < fit->samples; i++)
        sum += (fit->sample[i].ratio - 1) * (fit->sample[i].ratio - 1);
    return sqrt(sum / fit->samples);
}

static json_t *fit_json(const mz_measured *m, mz_work work) {
    const mz_fit *fit = &m->fit[work];
    double feature[MZ_FIT_TERMS];
    const int32_t terms = mz_fit_features(work, (const double[MZ_FIT_SIZES]){0}, feature);
    json_t *out = json_object(), *list = json_array();
    bool failed = false;
    for (int32_t i = 0; i < terms; i++)
        failed |= json_array_append_new(list, json_real(fit->term[i])) != 0;
    failed |= json_object_set_new(out, "terms", list) != 0;
    for (int k = 0; k < MZ_FIT_SIZES; k++)
        failed |= json_object_set_new(out, size_keys[mz_work_is_product(work)][k],
                                      numbers_of(fit, k)) != 0;
    failed |= json_object_set_new(out, "seconds", numbers_of(fit, MZ_FIT_SIZES)) != 0;
    failed |= json_object_set_new(out, "residual", json_real(residual(fit))) != 0;
    if (mz_work_is_product(work)) {
        const mz_tiling *t = &m->tiling[work];
        failed |= json_object_set_new(out, "tile_rows", json_integer(t->rows)) != 0;
        failed |= json_object_set_new(out, "tile_n", json_integer(t->n)) != 0;
        failed |= json_object_set_new(out, "tile_k", json_integer(t->k)) != 0;
    }
    return mz_json_whole(out, failed);
}

json_t *mz_measured_json(const mz_measured *m) {
    json_t *kinds = json_object();
    for (int w = 0; w < MZ_WORKS; w++)
        if (m->fit[w].samples > 0 &&
            json_object_set_new(kinds, mz_work_name((mz_work)w), fit_json(m, (mz_work)w)) != 0)
            return mz_json_whole(kinds, true);
    json_t *rescaled =
        m->rescaled.at[0]
            ? json_pack("{s:o,s:f,s:f,s:f}", "at", mz_json_text(m->rescaled.at), "products",
                        m->rescaled.product, "memory", m->rescaled.rows, "cache", m->rescaled.cache)
            : NULL;
    if (m->rescaled.at[0] && !rescaled)
        return mz_json_whole(kinds, true);
    return json_pack("{s:o,s:s,s:s,s:i,s:i,s:i,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:o*,s:o}",
                     "machine", mz_json_text(m->machine), "backend", m->backend, "transport",
                     m->transport, "processes", m->processes, "workers", m->workers, "rounds",
                     m->rounds, "spent", m->spent_s, "alone", m->alone, "call", m->call_s, "probe",
                     m->probe_s, "probe_mean", m->probe_mean_s, "rows_mean", m->rows_mean_s,
                     "cache_mean", m->cache_mean_s, "uneven", m->uneven, "rescaled", rescaled,
                     "kinds", kinds);
}
