/* slime's --save-debug-rollout-data: a .pt file {"rollout_id", "samples": [dict]}; each sample's
 * "rollout_routed_experts" is an int32 array [len(tokens) - 1, layers, k] of logical ids (the last
 * token has no row), all layers of the model with dense ones as rows of zeros. Every sample is a
 * sequence; blocks of whole sequences become the micro-batches of step 0. */
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/pickle.h"

#include <stdlib.h>
#include <string.h>

typedef struct slime_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_id_rows rows;
    mz_block block;
    mz_trace_writer *writer;
    mz_import_report *report;
    int64_t *ids; /* of one sample */
    size_t room;
} slime_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    if (!mz_torch_head(head, size))
        return 0;
    if (mz_head_has(head, size, "rollout_routed_experts"))
        return 90;
    return mz_head_has(head, size, "rollout_id") && mz_head_has(head, size, "samples") ? 85 : 8;
}

/* The ids of one sample into in->ids; *tokens rows. NULL shape: it has none. */
static mz_code read_ids(slime_import *in, mz_datafile *file, const mz_value *sample,
                        const mz_npy_shape **shape, int64_t *tokens, mz_err *err) {
    static const char name[] = "rollout_routed_experts";
    const mz_value *value = mz_value_get(sample, name), *text = mz_value_get(sample, "tokens");
    *shape = NULL;
    if (sample->type != MZ_VALUE_DICT)
        return mz_fail(err, MZ_EINPUT, "is no dict");
    if (!value || value->type == MZ_VALUE_NONE)
        return MZ_OK;
    if (value->type != MZ_VALUE_TENSOR || value->tensor->shape.dims != 3)
        return mz_fail(err, MZ_EINPUT, "%s is not an array [tokens, layers, k]", name);
    *shape = &value->tensor->shape;
    *tokens = (*shape)->extent[0];
    if ((*shape)->extent[1] < 1 || (*shape)->extent[1] > MZ_LAYERS_MAX || (*shape)->extent[2] < 1 ||
        (*shape)->extent[2] > MZ_MAX_TOP_K)
        return mz_fail(err, MZ_EINPUT, "%s: %lld layers and top-%lld are not plausible", name,
                       (long long)(*shape)->extent[1], (long long)(*shape)->extent[2]);
    if (text && text->type == MZ_VALUE_LIST && *tokens > 0 && *tokens >= text->count)
        return mz_fail(err, MZ_EINPUT,
                       "%u tokens and %lld rows of %s, as many rows or more: the last token was "
                       "never routed and must have none",
                       text->count, (long long)*tokens, name);
    if (!mz_grow((void **)&in->ids, &in->room, (size_t)(*shape)->elements + 1, sizeof *in->ids))
        return mz_fail_nomem(err, "a sample");
    return mz_tensor_read_int(file, value->tensor, name, 0, (*shape)->elements, in->ids, err);
}

/* Layers and top-k, from the first sample that has rows. */
static mz_code start(slime_import *in, const char *path, const mz_npy_shape *shape, int64_t tokens,
                     const char *output, const mz_trace_write_options *write, mz_err *err) {
    const mz_import_options *o = in->options;
    if (o->top_k > 0 && o->top_k != shape->extent[2])
        return mz_fail(err, MZ_EINPUT, "top-%lld in the file, but --top-k %lld",
                       (long long)shape->extent[2], (long long)o->top_k);
    mz_code code = mz_id_rows_make(path, in->ids, tokens, shape->extent[1],
                                   (int32_t)shape->extent[2], o, &in->rows, err);
    if (code)
        return code;
    in->facts.layers = in->block.layers = (int32_t)in->rows.kept;
    in->facts.top_k = in->block.top_k = in->rows.top_k;
    in->facts.model_layers = (int32_t)in->rows.layers;
    in->facts.experts = in->rows.experts;
    in->facts.ranks = 1;
    in->facts.has_sequences = true;
    in->block.step_per_block = in->facts.step_meaning != MZ_STEP_NONE;
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

static mz_code read_sample(slime_import *in, const char *path, mz_datafile *file,
                           const mz_value *sample, const char *output,
                           const mz_trace_write_options *write, mz_err *err) {
    const mz_npy_shape *shape;
    int64_t tokens = 0;
    mz_code code = read_ids(in, file, sample, &shape, &tokens, err);
    if (code)
        return code;
    if (!shape || tokens == 0) {
        mz_rows_skip(in->report, 1, "samples without routed experts");
        return MZ_OK;
    }
    if (!in->writer && shape->extent[2] > 1 &&
        mz_rows_first(in->ids, tokens, shape->extent[1] * shape->extent[2]) == tokens) {
        mz_rows_skip(in->report, tokens, "tokens without any expert (fillers)");
        return MZ_OK;
    }
    if (!in->writer)
        code = start(in, path, shape, tokens, output, write, err);
    else if (shape->extent[1] != in->rows.layers || shape->extent[2] != in->rows.top_k)
        code = mz_fail(err, MZ_EINPUT, "%lld layers, top-%lld, unlike the samples before",
                       (long long)shape->extent[1], (long long)shape->extent[2]);
    if (!code)
        code =
            mz_rows_sequence(&in->rows, in->ids, tokens, &in->block, in->writer, in->report, err);
    return code;
}

static mz_code read_file(slime_import *in, const char *path, const char *output,
                         const mz_trace_write_options *write, mz_err *err) {
    mz_torch_file torch;
    mz_code code = mz_torch_open(path, &torch, err);
    const mz_value *samples = code ? NULL : mz_value_get(torch.value, "samples");
    if (!code && (!samples || samples->type != MZ_VALUE_LIST))
        code = mz_fail(err, MZ_EINPUT, "%s: no list \"samples\" in it, as slime writes", path);
    for (uint32_t i = 0; !code && i < samples->count; i++) {
        code = read_sample(in, path, torch.file, samples->item[i], output, write, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, "%s: samples[%u]", path, i);
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
                                                .source = "slime rollout data",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    slime_import in = {.app = app, .options = options, .report = report};
    if (options->experts <= 0)
        return mz_import_ask(err, files[0], "the number of experts is", "experts");
    mz_code code = mz_import_facts(app, options, &defaults, &in.facts, err);
    mz_progress progress = mz_progress_start(&app->log, "importing", "files", count);
    for (int i = 0; i < count && !code; i++) {
        code = read_file(&in, files[i], output, write, err);
        mz_progress_update(&progress, i + 1);
    }
    mz_progress_end(&progress);
    if (!code && !in.writer)
        code =
            mz_fail(err, MZ_EINPUT,
                    "%s: no sample has rollout_routed_experts, or every row of every layer is zero",
                    files[0]);
    if (!code)
        code = mz_block_write(&in.block, in.writer, report, err);
    if (!code)
        code = mz_import_close(files[0], report, &in.writer, err);
    if (in.writer)
        mz_trace_writer_abandon(&in.writer);
    mz_block_free(&in.block);
    mz_id_rows_free(&in.rows);
    free(in.ids);
    return code;
}

const mz_importer mz_import_slime_pt = {
    .name = "slime-pt",
    .summary = "slime's debug rollout data (.pt, one or more files); needs --experts",
    .answers = "experts top-k dense-layers",
    .recognise = recognise,
    .import = import_files,
};
