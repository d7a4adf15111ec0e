/* SGLang's expert counts as published JSON: {"logical_count": [layers][experts]}, or with a first
 * axis of recorded steps. Counts are of logical experts, summed over all ranks, and cover all
 * layers: rows of zeros are dense layers (zero in every step) and are left out, as are steps
 * without tokens. One source rank: who sent what is not recorded. Several files follow one another
 * in steps. */
#include "traces/importers/gather.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "common/io/json.h"
#include "traces/jsonl.h"

#include <stdlib.h>
#include <string.h>

typedef struct sglang_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_gather gather;
    int64_t layers, step; /* layers of the file, dense ones included; next step */
    int64_t *count;       /* [layers][experts] of one step */
    mz_trace_writer *writer;
    mz_import_report *report;
} sglang_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return mz_head_first(head, size) == '{' && mz_head_has(head, size, "\"logical_count\"") ? 90
                                                                                            : 0;
}

/* `counts` [layers][experts] into in->count. `where` names it. */
static mz_code read_counts(sglang_import *in, const char *path, const json_t *counts,
                           const char *where, mz_err *err) {
    size_t at;
    if (!json_is_array(counts) || (int64_t)json_array_size(counts) != in->layers)
        return mz_fail(err, MZ_EINPUT, "%s: %s does not list %lld layers", path, where,
                       (long long)in->layers);
    for (int64_t l = 0; l < in->layers; l++) {
        const char *fault =
            mz_json_counts(json_array_get(counts, (size_t)l), (size_t)in->facts.experts,
                           in->count + l * in->facts.experts, &at);
        if (fault)
            return mz_fail(err, MZ_EINPUT, "%s: %s[%lld]: entry %zu %s", path, where, (long long)l,
                           at, fault);
    }
    return MZ_OK;
}

/* Adds the layers of one step that count anything, or that some step counted before. */
static mz_code take_step(sglang_import *in, const char *path, const bool *dense, mz_err *err) {
    bool any = false;
    for (int64_t i = 0; i < in->layers * in->facts.experts; i++)
        any = any || in->count[i] > 0;
    int64_t step = in->step++;
    for (int64_t l = 0; l < in->layers; l++) {
        int64_t pairs = 0, tokens, *row, *from = in->count + l * in->facts.experts;
        mz_gather_key key = {.step = step, .layer = l};
        for (int32_t e = 0; e < in->facts.experts; e++)
            pairs += from[e];
        if (!any || dense[l]) {
            in->report->skipped++;
            continue;
        }
        mz_code code = mz_gather_tokens(in->options, in->facts.top_k, pairs, &tokens, err);
        if (!code)
            code = mz_gather_counts(&in->gather, &key, tokens, &row, err);
        if (code)
            return mz_err_prefix(err, "%s: step %lld, layer %lld", path, (long long)step,
                                 (long long)l);
        memcpy(row, from, (size_t)in->facts.experts * sizeof *row);
    }
    return MZ_OK;
}

/* Depth and extents of logical_count; experts and layers of the trace from the first file. */
static mz_code take_shape(sglang_import *in, const char *path, const json_t *counts, bool *steps,
                          mz_err *err) {
    const json_t *first = json_array_get(counts, 0), *second = json_array_get(first, 0);
    *steps = json_is_array(second);
    const json_t *row = *steps ? second : first;
    size_t layers = json_array_size(*steps ? first : counts), experts = json_array_size(row);
    if (!json_is_array(counts) || layers == 0 || experts == 0 || layers > MZ_LAYERS_MAX ||
        experts > MZ_EXPERTS_MAX)
        return mz_fail(err, MZ_EINPUT,
                       "%s: logical_count is not [layers][experts] or [steps][layers][experts]",
                       path);
    if (in->count && (in->layers != (int64_t)layers || in->facts.experts != (int32_t)experts))
        return mz_fail(err, MZ_EINPUT, "%s: %zu layers and %zu experts, unlike the files before",
                       path, layers, experts);
    if (in->options->experts > 0 && in->options->experts != (int64_t)experts)
        return mz_fail(err, MZ_EINPUT, "%s: %zu experts in the file, but --experts %lld", path,
                       experts, (long long)in->options->experts);
    if (in->count)
        return MZ_OK;
    in->layers = (int64_t)layers;
    in->facts.experts = (int32_t)experts;
    in->facts.top_k = (int32_t)in->options->top_k;
    in->facts.model_layers = (int32_t)layers;
    in->facts.ranks = 1;
    if (!in->options->step_meaning)
        in->facts.step_meaning = *steps ? MZ_STEP_FORWARD : MZ_STEP_NONE;
    in->count = mz_calloc(layers, experts * sizeof *in->count);
    return in->count ? MZ_OK : mz_fail_nomem(err, "one step of counts");
}

/* Layers that count nothing in any step of this file. */
static mz_code find_dense(sglang_import *in, const char *path, const json_t *counts, bool steps,
                          bool *dense, mz_err *err) {
    memset(dense, true, (size_t)in->layers);
    for (size_t s = 0; s < (steps ? json_array_size(counts) : 1); s++) {
        char where[64] = "logical_count";
        if (steps)
            snprintf(where, sizeof where, "logical_count[%zu]", s);
        mz_code code =
            read_counts(in, path, steps ? json_array_get(counts, s) : counts, where, err);
        if (code)
            return code;
        for (int64_t i = 0; i < in->layers * in->facts.experts; i++)
            if (in->count[i] > 0)
                dense[i / in->facts.experts] = false;
    }
    return MZ_OK;
}

static mz_code create(sglang_import *in, const char *path, const char *output,
                      const mz_trace_write_options *write, mz_err *err) {
    if (in->gather.entries == 0)
        return mz_fail(err, MZ_EINPUT, "%s: all counts are 0", path);
    mz_code code = mz_gather_settle(&in->gather, err);
    if (code)
        return code;
    mz_import_note(&in->facts, "counts=summed over all ranks");
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

static mz_code read_file(sglang_import *in, const char *path, const char *output,
                         const mz_trace_write_options *write, mz_err *err) {
    json_t *root = NULL;
    bool steps, *dense = NULL;
    mz_code code = mz_json_load(path, &root, err);
    if (code)
        return code;
    const json_t *counts = json_object_get(root, "logical_count");
    if (!counts)
        code = mz_fail(err, MZ_EINPUT, "%s: no member \"logical_count\"", path);
    if (!code)
        code = take_shape(in, path, counts, &steps, err);
    if (!code) {
        dense = mz_calloc((size_t)in->layers, sizeof *dense);
        code =
            dense ? find_dense(in, path, counts, steps, dense, err) : mz_fail_nomem(err, "layers");
    }
    for (size_t s = 0; !code && s < (steps ? json_array_size(counts) : 1); s++) {
        code =
            read_counts(in, path, steps ? json_array_get(counts, s) : counts, "logical_count", err);
        if (!code)
            code = take_step(in, path, dense, err);
    }
    if (!code && !in->writer)
        code = create(in, path, output, write, err);
    if (!code)
        code = mz_gather_write(&in->gather, in->writer, in->report, err);
    free(dense);
    json_decref(root);
    return code;
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "SGLang expert distribution recorder",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_COUNTS,
                                                .phase = MZ_PHASE_PREFILL,
                                                .meaning = MZ_STEP_FORWARD};
    if (options->top_k <= 0)
        return mz_import_ask(err, files[0], "the number of experts per token is", "top-k");
    if (mz_import_need_phase(err, files[0], options))
        return MZ_EINPUT;
    sglang_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (sglang_import){.app = app, .options = options, .report = report};
    in->gather.facts = &in->facts;
    mz_code code = mz_import_facts(app, options, &defaults, &in->facts, err);
    mz_progress progress = mz_progress_start(&app->log, "importing", "files", count);
    for (int i = 0; i < count && !code; i++) {
        code = read_file(in, files[i], output, write, err);
        if (!code)
            code = mz_import_stopped(app, err);
        mz_progress_update(&progress, i + 1);
    }
    mz_progress_end(&progress);
    if (!code)
        code = mz_trace_writer_close(&in->writer, err);
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    if (report->skipped)
        snprintf(report->note, sizeof report->note,
                 "rows of zeros, of dense layers and of steps without tokens");
    mz_gather_free(&in->gather);
    free(in->count);
    free(in);
    return code;
}

const mz_importer mz_import_sglang_json = {
    .name = "sglang-json",
    .summary = "SGLang counts per layer and logical expert (logical_count, .json)",
    .recognise = recognise,
    .import = import_files,
};
