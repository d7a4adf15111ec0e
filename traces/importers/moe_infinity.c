/* MoE-Infinity's expert activation matrices: a float .npy [capacity, layers, experts], one matrix
 * of counts per past request; matrices of zeros are unused places. Requests become steps, in file
 * order; the trace has one source rank. */
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/npy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_MATRIX = 1 << 24 }; /* more counts of one request than any model has */

typedef struct matrices_import {
    mz_app *app;
    const mz_import_options *options;
    mz_npy npy;
    mz_trace_facts facts;
    mz_gather gather;
    mz_trace_writer *writer;
    mz_import_report *report;
    float *real;  /* one row of counts */
    int64_t *row; /* [layers][experts] of one request */
} matrices_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    mz_npy_shape shape;
    mz_err err;
    if (mz_npy_parse(path, head, size, &shape, &err) || shape.dims != 3 || shape.kind != 'f')
        return 0;
    bool positive = false;
    for (size_t at = shape.header_bytes; at + (size_t)shape.size <= size;
         at += (size_t)shape.size) {
        float value = mz_npy_to_float(&shape, head + at);
        if (!(value >= 0) || value != floorf(value))
            return 0;
        positive = positive || value > 0;
    }
    return positive ? 55 : 20; /* zeros alone may be unused places, or logits */
}

/* Where floats of the file, or those that it is read into, stop counting one by one. */
static float counts_end(const mz_npy_shape *shape) {
    return shape->size == 2 ? 0x1p11f : 0x1p24f;
}

static mz_code take_shape(matrices_import *in, const char *path, mz_err *err) {
    const mz_npy_shape *shape = &in->npy.shape;
    if (shape->dims != 3 || shape->kind != 'f' || shape->elements == 0)
        return mz_fail(err, MZ_EINPUT, "%s: not a float array [requests, layers, experts]", path);
    if (shape->extent[1] > MZ_LAYERS_MAX || shape->extent[2] > MZ_EXPERTS_MAX ||
        shape->extent[1] * shape->extent[2] > MAX_MATRIX)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %lld layers and %lld experts are not plausible; the axes must be "
                       "requests, layers, experts",
                       path, (long long)shape->extent[1], (long long)shape->extent[2]);
    mz_code code = mz_import_experts(path, in->options, shape->extent[2], &in->facts, err);
    if (code)
        return code;
    in->facts.ranks = 1;
    in->real = mz_calloc((size_t)shape->extent[2], sizeof *in->real);
    in->row = mz_calloc((size_t)shape->extent[1], (size_t)shape->extent[2] * sizeof *in->row);
    return in->real && in->row ? MZ_OK : mz_fail_nomem(err, "a matrix of counts");
}

static mz_code create(matrices_import *in, const char *output, const mz_trace_write_options *write,
                      mz_err *err) {
    mz_code code = mz_gather_settle(&in->gather, err);
    if (code)
        return code;
    mz_import_note(&in->facts, "step=request");
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

/* One matrix into in->row; *used: it holds any count. */
static mz_code read_matrix(matrices_import *in, int64_t request, bool *used, mz_err *err) {
    int64_t layers = in->npy.shape.extent[1], experts = in->facts.experts;
    const float end = counts_end(&in->npy.shape);
    *used = false;
    for (int64_t l = 0; l < layers; l++) {
        mz_code code = mz_npy_read_float(&in->npy, in->real, experts, err);
        if (code)
            return code;
        for (int64_t e = 0; e < experts; e++) {
            float value = in->real[e];
            if (!(value >= 0 && value < end) || value != floorf(value))
                return mz_fail(err, MZ_EINPUT,
                               "%s: [%lld, %lld, %lld]: %.9g is no count (whole, below %.9g, where "
                               "such floats stop counting)",
                               mz_input_path(in->npy.input), (long long)request, (long long)l,
                               (long long)e, (double)value, (double)end);
            in->row[l * experts + e] = (int64_t)value;
            *used = *used || value > 0;
        }
    }
    return MZ_OK;
}

static mz_code write_matrix(matrices_import *in, int64_t request, const char *output,
                            const mz_trace_write_options *write, mz_err *err) {
    mz_code code = MZ_OK;
    for (int64_t l = 0; l < in->npy.shape.extent[1] && !code; l++) {
        mz_gather_key key = {.step = request, .layer = l};
        code = mz_rows_count(&in->gather, &key, in->row + l * in->facts.experts, in->options,
                             in->report, err);
    }
    if (!code && !in->writer)
        code = create(in, output, write, err);
    if (!code)
        code = mz_gather_write(&in->gather, in->writer, in->report, err);
    return code == MZ_EINPUT ? mz_err_prefix(err, "%s", mz_input_path(in->npy.input)) : code;
}

static mz_code read_all(matrices_import *in, const char *path, const char *output,
                        const mz_trace_write_options *write, mz_err *err) {
    int64_t requests = in->npy.shape.extent[0];
    mz_progress progress = mz_progress_start(&in->app->log, "importing", "requests", requests);
    mz_code code = MZ_OK;
    for (int64_t i = 0; i < requests && !code; i++) {
        bool used;
        code = read_matrix(in, i, &used, err);
        if (!code && used)
            code = write_matrix(in, i, output, write, err);
        else if (!code)
            mz_rows_skip(in->report, 1, "unused places (matrices of zeros)");
        if (!code)
            code = mz_import_stopped(in->app, err);
        mz_progress_update(&progress, i + 1);
    }
    mz_progress_end(&progress);
    if (!code)
        code = mz_npy_finish(&in->npy, err);
    if (!code && !in->writer)
        return mz_fail(err, MZ_EINPUT, "%s: all counts are 0", path);
    return code ? code : mz_import_close(path, in->report, &in->writer, err);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "MoE-Infinity activation matrices",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_COUNTS,
                                                .meaning = MZ_STEP_FORWARD};
    matrices_import in = {.app = app, .options = options, .report = report};
    if (count != 1)
        return mz_fail(err, MZ_EINPUT, "moe-infinity takes one file, got %d", count);
    mz_code code = mz_import_facts(app, options, &defaults, &in.facts, err);
    in.gather.facts = &in.facts;
    if (!code)
        code = mz_npy_open(files[0], &in.npy, err);
    if (!code)
        code = take_shape(&in, files[0], err);
    if (!code)
        code = read_all(&in, files[0], output, write, err);
    if (in.writer)
        mz_trace_writer_abandon(&in.writer);
    mz_npy_close(&in.npy);
    mz_gather_free(&in.gather);
    free(in.real);
    free(in.row);
    return code;
}

const mz_importer mz_import_moe_infinity = {
    .name = "moe-infinity",
    .summary = "MoE-Infinity counts [requests, layers, experts] (float .npy); needs --top-k",
    .answers = "experts top-k tokens dropped",
    .recognise = recognise,
    .import = import_files,
};
