/* SGLang's expert distribution recorder, modes stat and stat_approx: a .pt file with the dict
 * {"rank", "logical_count" [steps, layers, experts], "average_utilization_rate_over_window"}.
 * Counts are of logical experts and already summed over ranks (under plain tensor parallelism every
 * token is then counted once per rank), so the trace has one source rank. Dense layers are rows of
 * zeros. Several files follow one another in steps. */
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/pickle.h"

#include <stdlib.h>
#include <string.h>

typedef struct stat_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_gather gather;
    mz_trace_writer *writer;
    mz_import_report *report;
    int64_t *row; /* [experts] */
    int64_t layers, step;
} stat_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    if (!mz_torch_head(head, size))
        return 0;
    return mz_head_has(head, size, "logical_count") ? 90 : 10;
}

/* The array of one file; experts and layers of the trace from the first. */
static mz_code take_shape(stat_import *in, const char *path, const mz_value *root,
                          const mz_tensor **counts, mz_err *err) {
    const mz_value *value = mz_value_get(root, "logical_count");
    if (!value || value->type != MZ_VALUE_TENSOR)
        return mz_fail(err, MZ_EINPUT,
                       "%s: no array \"logical_count\" in it, as SGLang's recorder writes in mode "
                       "stat; if another program wrote the file pass --format (--list has them)",
                       path);
    const mz_npy_shape *shape = &value->tensor->shape;
    if (shape->dims != 3 || shape->elements == 0 || shape->extent[1] > MZ_LAYERS_MAX ||
        shape->extent[2] > MZ_EXPERTS_MAX)
        return mz_fail(err, MZ_EINPUT, "%s: logical_count is not [steps, layers, experts]", path);
    *counts = value->tensor;
    if (in->row && (in->layers != shape->extent[1] || in->facts.experts != shape->extent[2]))
        return mz_fail(err, MZ_EINPUT, "%s: %lld layers and %lld experts, unlike the files before",
                       path, (long long)shape->extent[1], (long long)shape->extent[2]);
    if (in->row)
        return MZ_OK;
    mz_code code = mz_import_experts(path, in->options, shape->extent[2], &in->facts, err);
    if (code)
        return code;
    in->layers = shape->extent[1];
    in->facts.model_layers = (int32_t)in->layers;
    in->facts.ranks = 1;
    in->row = mz_calloc((size_t)in->facts.experts, sizeof *in->row);
    return in->row ? MZ_OK : mz_fail_nomem(err, "a row of counts");
}

static mz_code create(stat_import *in, const char *output, const mz_trace_write_options *write,
                      mz_err *err) {
    mz_code code = mz_gather_settle(&in->gather, err);
    if (code)
        return code;
    mz_import_note(&in->facts, "counts=summed over all ranks");
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

static mz_code write_step(stat_import *in, mz_datafile *file, const mz_tensor *counts, int64_t s,
                          const char *output, const mz_trace_write_options *write, mz_err *err) {
    mz_code code = MZ_OK;
    for (int64_t l = 0; l < in->layers && !code; l++) {
        mz_gather_key key = {.step = in->step, .layer = l};
        code = mz_tensor_read_int(file, counts, "logical_count",
                                  (s * in->layers + l) * in->facts.experts, in->facts.experts,
                                  in->row, err);
        if (!code)
            code = mz_rows_count(&in->gather, &key, in->row, in->options, in->report, err);
    }
    in->step++;
    if (code || in->gather.entries == 0) /* a step without tokens */
        return code;
    if (!in->writer)
        code = create(in, output, write, err);
    return code ? code : mz_gather_write(&in->gather, in->writer, in->report, err);
}

static mz_code read_file(stat_import *in, const char *path, const char *output,
                         const mz_trace_write_options *write, mz_err *err) {
    mz_torch_file torch;
    const mz_tensor *counts = NULL;
    mz_code code = mz_torch_open(path, &torch, err);
    if (!code)
        code = take_shape(in, path, torch.value, &counts, err);
    for (int64_t s = 0; !code && s < counts->shape.extent[0]; s++) {
        code = write_step(in, torch.file, counts, s, output, write, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, "%s", path);
        if (!code)
            code = mz_import_stopped(in->app, err);
    }
    mz_torch_close(&torch);
    return code;
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "SGLang expert distribution recorder",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_COUNTS,
                                                .meaning = MZ_STEP_FORWARD};
    stat_import in = {.app = app, .options = options, .report = report};
    mz_code code = mz_import_facts(app, options, &defaults, &in.facts, err);
    in.gather.facts = &in.facts;
    mz_progress progress = mz_progress_start(&app->log, "importing", "files", count);
    for (int i = 0; i < count && !code; i++) {
        code = read_file(&in, files[i], output, write, err);
        mz_progress_update(&progress, i + 1);
    }
    mz_progress_end(&progress);
    if (!code && !in.writer)
        code = mz_fail(err, MZ_EINPUT, "%s: all counts are 0", files[0]);
    if (!code)
        code = mz_import_close(files[0], report, &in.writer, err);
    if (in.writer)
        mz_trace_writer_abandon(&in.writer);
    mz_gather_free(&in.gather);
    free(in.row);
    return code;
}

const mz_importer mz_import_sglang_stat = {
    .name = "sglang-stat",
    .summary = "SGLang recorder, modes stat and stat_approx (.pt); needs --top-k",
    .answers = "experts top-k tokens dropped",
    .recognise = recognise,
    .import = import_files,
};
