#include "replay/calibrate_inside.h"

#include "common/base/rng.h"

#include <stdlib.h>
#include <string.h>

mz_calibration_options mz_calibration_defaults(void) {
    return (mz_calibration_options){.repeats = 7, .pool_bytes = INT64_C(256) << 20};
}

mz_code calibrate_failed(calibration *c, const char *what, mz_err *err) {
    return mz_fail(err, MZ_EINTERNAL, "calibration of %s: %s", what, mz_kernels_error(c->kernels));
}

mz_code calibrate_scratch(calibration *c, size_t bytes, mz_err *err) {
    if (bytes <= c->scratch_bytes)
        return MZ_OK;
    mz_kernels_free(c->kernels, c->scratch);
    c->scratch = NULL;
    c->scratch_bytes = 0;
    if (mz_kernels_alloc(c->kernels, bytes, &c->scratch) != MZ_K_OK)
        return calibrate_failed(c, "an operation's scratch", err);
    c->scratch_bytes = bytes;
    return MZ_OK;
}

/* The next part of a pool; parts follow each other and start again at its front. */
static char *next_part(const calibration *c, char *pool, int64_t *at, int64_t bytes) {
    const int64_t size = (bytes + 255) / 256 * 256;
    if (*at + size > c->options.pool_bytes)
        *at = 0;
    char *part = pool + *at;
    *at += size;
    return part;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

mz_code calibrate_time(calibration *c, calibrate_run run, const void *sizes, int64_t in_bytes,
                       int64_t out_bytes, double *seconds, mz_err *err) {
    const int32_t repeats = c->options.repeats;
    mz_code code = mz_transport_barrier(c->transport, err);
    if (code != MZ_OK)
        return code;
    if (c->app->stop && *c->app->stop)
        return mz_fail(err, MZ_EABORTED, "interrupted");
    if (in_bytes > c->options.pool_bytes || out_bytes > c->options.pool_bytes)
        return mz_fail(err, MZ_EINTERNAL, "a sample larger than the pools");
    for (int32_t i = -1; i < repeats; i++) { /* the first warms up */
        char *in = next_part(c, c->inputs, &c->input_at, in_bytes);
        char *out = next_part(c, c->results, &c->result_at, out_bytes);
        const double start = mz_now();
        if (run(c, sizes, in, out) != MZ_K_OK || mz_kernels_sync(c->kernels, 0) != MZ_K_OK)
            return calibrate_failed(c, "a sample", err);
        if (i >= 0)
            c->times[i] = mz_now() - start;
    }
    qsort(c->times, (size_t)repeats, sizeof *c->times, by_value);
    const int32_t local = c->transport->end - c->transport->first;
    double sum = 0;
    for (int32_t r = 0; r < local; r++)
        c->mine[r] = c->times[repeats / 2];
    code = mz_transport_gather(c->transport, c->mine, sizeof *c->mine, c->all, err);
    for (int32_t r = 0; r < c->transport->ranks; r++)
        sum += c->all[r];
    *seconds = sum / c->transport->ranks;
    return code;
}

mz_code calibrate_begin(calibration *c, mz_work work, int32_t most, mz_err *err) {
    mz_fit *fit = &c->measured->fit[work];
    *fit = (mz_fit){.sample = MZ_NEW(c->arena, mz_fit_sample, most)};
    return fit->sample ? MZ_OK : mz_fail_nomem(err, "samples");
}

void calibrate_add(calibration *c, mz_work work, double a, double b, double bytes, double seconds) {
    mz_fit *fit = &c->measured->fit[work];
    fit->sample[fit->samples++] =
        (mz_fit_sample){.size = {a, b, bytes}, .seconds = seconds > 1e-9 ? seconds : 1e-9};
}

/* bf16 values in +-1 over the whole input pool: read as fp32 they are finite as well. */
static mz_code fill_inputs(calibration *c, mz_err *err) {
    enum { PIECE = 1 << 16 };
    uint16_t *piece = malloc(PIECE * sizeof *piece);
    if (!piece)
        return mz_fail_nomem(err, "calibration data");
    mz_rng rng = mz_rng_make(1, 1);
    for (int32_t i = 0; i < PIECE; i++)
        piece[i] = (uint16_t)(0x3e00u + (mz_rng_u32(&rng) & 0x81ffu));
    mz_code code = MZ_OK;
    const int64_t bytes = PIECE * (int64_t)sizeof *piece;
    for (int64_t at = 0; code == MZ_OK && at + bytes <= c->options.pool_bytes; at += bytes)
        if (mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, c->inputs + at, piece, (size_t)bytes) !=
                MZ_K_OK ||
            mz_kernels_sync(c->kernels, 0) != MZ_K_OK)
            code = calibrate_failed(c, "its data", err);
    free(piece);
    return code;
}

mz_code calibrate_experts(calibration *c, int32_t experts, mz_err *err) {
    const size_t bytes = CALIBRATE_PAIRS * sizeof(int32_t);
    int32_t *expert = malloc(bytes);
    if (!expert)
        return mz_fail_nomem(err, "calibration data");
    mz_rng rng = mz_rng_make(1, 3);
    for (size_t i = 0; i < CALIBRATE_PAIRS; i++)
        expert[i] = (int32_t)mz_rng_below(&rng, (uint64_t)experts);
    const bool copied =
        mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, c->expert, expert, bytes) == MZ_K_OK &&
        mz_kernels_sync(c->kernels, 0) == MZ_K_OK;
    free(expert);
    return copied ? MZ_OK : calibrate_failed(c, "its lists", err);
}

static mz_code make_lists(calibration *c, mz_err *err) {
    const size_t n = CALIBRATE_PAIRS;
    int64_t *shuffled = MZ_NEW(c->arena, int64_t, n), *counting = MZ_NEW(c->arena, int64_t, n);
    float *weight = MZ_NEW(c->arena, float, n);
    if (!shuffled || !counting || !weight)
        return mz_fail_nomem(err, "calibration data");
    mz_rng rng = mz_rng_make(1, 2);
    for (size_t i = 0; i < n; i++) {
        const size_t other = mz_rng_u32(&rng) % (i + 1);
        counting[i] = (int64_t)i;
        shuffled[i] = shuffled[other];
        shuffled[other] = (int64_t)i;
        weight[i] = (float)(mz_rng_u32(&rng) >> 8) / (float)(1 << 24);
    }
    const struct {
        void **to;
        const void *from;
        size_t bytes;
    } list[] = {{(void **)&c->counting, counting, n * sizeof *counting},
                {(void **)&c->shuffled, shuffled, n * sizeof *shuffled},
                {(void **)&c->expert, counting, n * sizeof *c->expert},
                {(void **)&c->weight, weight, n * sizeof *weight},
                {(void **)&c->begin, counting, (CALIBRATE_EXPERTS + 1) * sizeof *c->begin},
                {(void **)&c->quota, counting, CALIBRATE_EXPERTS * sizeof *c->quota}};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        if (mz_kernels_alloc(c->kernels, list[i].bytes, list[i].to) != MZ_K_OK ||
            mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, *list[i].to, list[i].from, list[i].bytes) !=
                MZ_K_OK)
            return calibrate_failed(c, "its lists", err);
    return mz_kernels_sync(c->kernels, 0) == MZ_K_OK ? MZ_OK
                                                     : calibrate_failed(c, "its lists", err);
}

static mz_code prepare(calibration *c, mz_err *err) {
    c->times = MZ_NEW(c->arena, double, c->options.repeats);
    c->all = MZ_NEW(c->arena, double, c->transport->ranks);
    c->mine = MZ_NEW(c->arena, double, c->transport->end - c->transport->first);
    if (!c->times || !c->all || !c->mine)
        return mz_fail_nomem(err, "calibration");
    if (mz_kernels_alloc(c->kernels, (size_t)c->options.pool_bytes, (void **)&c->inputs) !=
            MZ_K_OK ||
        mz_kernels_alloc(c->kernels, (size_t)c->options.pool_bytes, (void **)&c->results) !=
            MZ_K_OK ||
        mz_kernels_zero(c->kernels, 0, c->results, (size_t)c->options.pool_bytes) != MZ_K_OK)
        return calibrate_failed(c, "its pools", err);
    mz_code code = fill_inputs(c, err);
    return code == MZ_OK ? make_lists(c, err) : code;
}

mz_code mz_calibrate(mz_kernels *kernels, mz_transport *transport,
                     const mz_calibration_options *options, mz_app *app, mz_arena *arena,
                     mz_measured *measured, mz_wire *wire, mz_err *err) {
    calibration c = {.kernels = kernels,
                     .transport = transport,
                     .options = *options,
                     .app = app,
                     .arena = arena,
                     .measured = measured};
    measured->processes = transport->processes;
    mz_code code = prepare(&c, err);
    if (code == MZ_OK)
        code = calibrate_products(&c, err);
    if (code == MZ_OK)
        code = calibrate_rows(&c, err);
    if (code == MZ_OK)
        code = calibrate_updates(&c, err);
    if (code == MZ_OK)
        code = calibrate_copies(&c, err);
    if (code == MZ_OK)
        code = calibrate_wire(&c, wire, err);
    for (int w = 0; code == MZ_OK && w < MZ_WORKS; w++)
        if (measured->fit[w].samples > 0)
            code = mz_fit_terms(&measured->fit[w], (mz_work)w, err);
    void *const all[] = {c.inputs,   c.results, c.scratch, c.counting, c.expert,
                         c.shuffled, c.weight,  c.begin,   c.quota};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mz_kernels_free(kernels, all[i]);
    return code;
}
