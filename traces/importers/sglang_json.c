/* SGLang's expert counts as published JSON: {"logical_count": [layers][experts]}, or with a first
 * axis of recorded steps. Counts are of logical experts, summed over all ranks, and cover all
 * layers: rows of zeros are dense layers (zero in every step) and are left out, as are steps
 * without tokens. One source rank: who sent what is not recorded. Several files follow one another
 * in steps. A file is read twice, a step (without steps: a layer) at a time. */
#include "traces/importers/gather.h"
#include "traces/importers/json_list.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/jsonl.h"

#include <stdlib.h>
#include <string.h>

typedef struct sglang_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_gather gather;
    const char *path;     /* of the current file */
    bool known;           /* layers and experts are settled */
    bool steps;           /* the file has a first axis of steps */
    bool first_steps;     /* so has the first file */
    int64_t layers, step; /* layers of the file, dense ones included; next step */
    int64_t rows;         /* of a file without steps, so far */
    bool *dense;          /* layers that count nothing in any step of this file */
    int64_t *count;       /* [layers][experts] of one step */
    size_t count_room;
    mz_trace_writer *writer;
    const char *output;
    const mz_trace_write_options *write;
    mz_import_report *report;
} sglang_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return mz_head_first(head, size) == '{' && mz_head_has(head, size, "\"logical_count\"") ? 90
                                                                                            : 0;
}

/* One layer's counts into in->count; `where` names them. */
static mz_code read_row(sglang_import *in, const json_t *row, int64_t layer, const char *where,
                        mz_err *err) {
    size_t at;
    const char *fault =
        mz_json_counts(row, (size_t)in->facts.experts, in->count + layer * in->facts.experts, &at);
    return fault ? mz_fail(err, MZ_EINPUT, "%s: %s[%lld]: entry %zu %s", in->path, where,
                           (long long)layer, at, fault)
                 : MZ_OK;
}

/* One step's counts [layers][experts] into in->count. */
static mz_code read_step(sglang_import *in, const json_t *counts, size_t index, mz_err *err) {
    char where[64];
    mz_code code = MZ_OK;
    snprintf(where, sizeof where, "logical_count[%zu]", index);
    if (!json_is_array(counts) || (int64_t)json_array_size(counts) != in->layers)
        return mz_fail(err, MZ_EINPUT, "%s: %s does not list %lld layers", in->path, where,
                       (long long)in->layers);
    for (int64_t l = 0; l < in->layers && !code; l++)
        code = read_row(in, json_array_get(counts, (size_t)l), l, where, err);
    return code;
}

/* Adds the layers of one step that count anything, or that some step counted before. */
static mz_code add_step(sglang_import *in, mz_err *err) {
    bool any = false;
    for (int64_t i = 0; i < in->layers * in->facts.experts; i++)
        any = any || in->count[i] > 0;
    int64_t step = in->step++;
    for (int64_t l = 0; l < in->layers; l++) {
        int64_t pairs = 0, tokens, *row, *from = in->count + l * in->facts.experts;
        mz_gather_key key = {.step = step, .layer = l};
        for (int32_t e = 0; e < in->facts.experts; e++)
            pairs += from[e];
        if (!any || in->dense[l]) {
            in->report->skipped++;
            continue;
        }
        mz_code code = mz_gather_tokens(in->options, in->facts.top_k, pairs, &tokens, err);
        if (!code)
            code = mz_gather_counts(&in->gather, &key, tokens, &row, err);
        if (code)
            return mz_err_prefix(err, "%s: step %lld, layer %lld", in->path, (long long)step,
                                 (long long)l);
        memcpy(row, from, (size_t)in->facts.experts * sizeof *row);
    }
    return MZ_OK;
}

static mz_code create(sglang_import *in, mz_err *err) {
    mz_code code = mz_gather_settle(&in->gather, err);
    if (code)
        return code;
    mz_import_note(&in->facts, "counts=summed over all ranks");
    return mz_trace_create(in->output, &in->facts, in->write, &in->writer, err);
}

/* The shape from the first element: a step [layers][experts], or one layer [experts]. */
static mz_code take_shape(sglang_import *in, const json_t *element, mz_err *err) {
    const json_t *first = json_array_get(element, 0);
    in->steps = json_is_array(first);
    size_t layers = in->steps ? json_array_size(element) : 1;
    size_t experts = json_array_size(in->steps ? first : element);
    if (!json_is_array(element) || layers == 0 || experts == 0 || layers > MZ_LAYERS_MAX ||
        experts > MZ_EXPERTS_MAX)
        return mz_fail(err, MZ_EINPUT,
                       "%s: logical_count is not [layers][experts] or [steps][layers][experts]",
                       in->path);
    if (in->known &&
        ((in->steps && in->layers != (int64_t)layers) || in->facts.experts != (int32_t)experts))
        return mz_fail(err, MZ_EINPUT, "%s: %zu layers and %zu experts, unlike the files before",
                       in->path, layers, experts);
    if (in->known && in->steps != in->first_steps)
        return mz_fail(err, MZ_EINPUT,
                       "%s: counts of %s, unlike those of the files before: import them apart",
                       in->path, in->steps ? "steps" : "a whole run");
    mz_code code = mz_import_experts(in->path, in->options, (int64_t)experts, &in->facts, err);
    if (code)
        return code;
    if (in->steps)
        in->layers = (int64_t)layers;
    if (!mz_grow((void **)&in->count, &in->count_room, layers * experts, sizeof *in->count))
        return mz_fail_nomem(err, "one step of counts");
    free(in->dense);
    in->dense = in->steps ? mz_calloc(layers, sizeof *in->dense) : NULL;
    if (in->steps && !in->dense)
        return mz_fail_nomem(err, "layers");
    for (int64_t l = 0; in->steps && l < in->layers; l++)
        in->dense[l] = true;
    return MZ_OK;
}

/* The first time through: the shape, which layers are dense, and that all counts are some. */
static mz_code look(void *self, size_t index, json_t *element, mz_err *err) {
    sglang_import *in = self;
    mz_code code = index == 0 ? take_shape(in, element, err) : MZ_OK;
    if (code)
        return code;
    if (in->steps) {
        code = read_step(in, element, index, err);
        for (int64_t i = 0; i < in->layers * in->facts.experts && !code; i++)
            if (in->count[i] > 0)
                in->dense[i / in->facts.experts] = false;
        return code ? code : mz_import_stopped(in->app, err);
    }
    if (index == MZ_LAYERS_MAX)
        return mz_fail(err, MZ_EINPUT, "%s: logical_count lists more than %d layers", in->path,
                       MZ_LAYERS_MAX);
    in->rows = (int64_t)index + 1;
    if (!mz_grow((void **)&in->count, &in->count_room, (index + 1) * (size_t)in->facts.experts,
                 sizeof *in->count))
        return mz_fail_nomem(err, "one step of counts");
    return read_row(in, element, (int64_t)index, "logical_count", err);
}

/* The second time: every step is written. */
static mz_code take_step(void *self, size_t index, json_t *element, mz_err *err) {
    sglang_import *in = self;
    mz_code code = read_step(in, element, index, err);
    if (!code)
        code = add_step(in, err);
    if (!code && in->gather.entries > 0 && !in->writer)
        code = create(in, err);
    if (!code && in->writer)
        code = mz_gather_write(&in->gather, in->writer, in->report, err);
    return code ? code : mz_import_stopped(in->app, err);
}

/* A file without steps is in in->count already. */
static mz_code take_only(sglang_import *in, bool first, mz_err *err) {
    mz_code code = MZ_OK;
    if (!first && in->layers != in->rows)
        return mz_fail(err, MZ_EINPUT, "%s: %lld layers and %d experts, unlike the files before",
                       in->path, (long long)in->rows, in->facts.experts);
    in->layers = in->rows;
    in->dense = mz_calloc((size_t)in->layers, sizeof *in->dense);
    if (!in->dense)
        return mz_fail_nomem(err, "layers");
    for (int64_t l = 0; l < in->layers; l++) {
        in->dense[l] = true;
        for (int32_t e = 0; e < in->facts.experts; e++)
            in->dense[l] = in->dense[l] && in->count[l * in->facts.experts + e] == 0;
    }
    code = add_step(in, err);
    if (!code && in->gather.entries > 0 && !in->writer)
        code = create(in, err);
    if (!code && in->writer)
        code = mz_gather_write(&in->gather, in->writer, in->report, err);
    return code;
}

/* Facts that the first file settles. */
static void settle(sglang_import *in) {
    if (in->known)
        return;
    in->known = true;
    in->first_steps = in->steps;
    in->facts.model_layers = (int32_t)(in->steps ? in->layers : in->rows);
    in->facts.ranks = 1;
    if (!in->options->step_meaning)
        in->facts.step_meaning = in->steps ? MZ_STEP_FORWARD : MZ_STEP_NONE;
}

static mz_code read_file(sglang_import *in, mz_err *err) {
    json_t *rest = NULL;
    bool first = !in->known;
    in->rows = 0;
    in->steps = false;
    free(in->dense);
    in->dense = NULL;
    mz_code code = mz_json_list(in->path, "logical_count", look, in, &rest, err);
    bool any = in->rows > 0 || in->steps;
    if (!code && !any)
        code = json_object_get(rest, "logical_count")
                   ? mz_fail(err, MZ_EINPUT,
                             "%s: logical_count is not [layers][experts] or "
                             "[steps][layers][experts]",
                             in->path)
                   : mz_fail(err, MZ_EINPUT, "%s: no member \"logical_count\": another format?",
                             in->path);
    json_decref(rest);
    rest = NULL;
    if (code)
        return code;
    if (first)
        settle(in);
    code = in->steps ? mz_json_list(in->path, "logical_count", take_step, in, &rest, err)
                     : take_only(in, first, err);
    json_decref(rest);
    if (!code && !in->writer)
        code = mz_fail(err, MZ_EINPUT, "%s: all counts are 0", in->path);
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
    if (options->top_k <= 0)
        return mz_import_ask(err, files[0], "the number of experts per token is", "top-k");
    sglang_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (sglang_import){
        .app = app, .options = options, .output = output, .write = write, .report = report};
    in->gather.facts = &in->facts;
    in->gather.path = &in->path;
    mz_code code = mz_import_facts(app, options, &defaults, &in->facts, err);
    mz_progress progress = mz_progress_start(&app->log, "importing", "files", count);
    for (int i = 0; i < count && !code; i++) {
        in->path = files[i];
        code = read_file(in, err);
        if (!code)
            code = mz_import_stopped(app, err);
        mz_progress_update(&progress, i + 1);
    }
    mz_progress_end(&progress);
    if (!code)
        code = mz_import_close(files[0], report, &in->writer, err);
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    if (report->skipped)
        snprintf(report->note, sizeof report->note,
                 "rows of zeros, of dense layers and of steps without tokens");
    mz_gather_free(&in->gather);
    free(in->count);
    free(in->dense);
    free(in);
    return code;
}

const mz_importer mz_import_sglang_json = {
    .name = "sglang-json",
    .summary = "SGLang counts per layer and logical expert (logical_count, .json)",
    .answers = "experts top-k tokens dropped",
    .recognise = recognise,
    .import = import_files,
};
