/* verl's routed_experts [batch, sequence, layers, k] (int16), saved with torch.save as the array
 * itself or within a dict. Prompts are padded on the left with rows of zeros, and the row of the
 * last token of a response is a filler: neither is marked in the file, so both are asked for.
 * Dense layers are rows of zeros. Every row of the batch is a sequence; blocks of whole sequences
 * become the micro-batches of step 0. */
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/pickle.h"

#include <stdlib.h>
#include <string.h>

enum { PAD_NONE = 1, PAD_LEFT, PAD_BOTH };

typedef struct verl_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_id_rows rows;
    mz_block block;
    mz_trace_writer *writer;
    mz_import_report *report;
    int64_t *ids; /* of one sequence */
    bool filler;  /* the last row is one */
} verl_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    if (!mz_torch_head(head, size))
        return 0;
    return mz_head_has(head, size, "routed_experts") && !mz_head_has(head, size, "rollout_") ? 85
                                                                                             : 7;
}

static mz_code ask(verl_import *in, const char *path, mz_err *err) {
    const char *filler = in->options->filler_last;
    if (in->options->experts <= 0)
        return mz_import_ask(err, path, "the number of experts is", "experts");
    if (in->options->padding == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: where sequences are padded with rows of zeros is not in the file: pass "
                       "--padding left (prompts, as verl does), both (responses too) or none",
                       path);
    if (!filler || (strcmp(filler, "yes") != 0 && strcmp(filler, "no") != 0))
        return mz_fail(err, MZ_EINPUT,
                       "%s: whether the last row of a sequence is a filler is not in the file: "
                       "pass --filler-last yes (verl: the last token was never routed) or no",
                       path);
    in->filler = strcmp(filler, "yes") == 0;
    mz_import_note(&in->facts, "padding=%s; filler-last=%s",
                   (const char *[]){"", "none", "left", "both"}[in->options->padding], filler);
    return MZ_OK;
}

/* Rows [*first, *first + tokens) of one sequence are data. */
static int64_t trim(verl_import *in, int64_t length, int64_t *first) {
    int64_t row = in->rows.layers * in->rows.top_k, end = length, padded;
    int padding = in->options->padding;
    *first = padding == PAD_NONE ? 0 : mz_rows_first(in->ids, length, row);
    while (padding == PAD_BOTH && end > *first &&
           mz_rows_zero(&in->rows, in->ids + (end - 1) * row))
        end--;
    padded = *first + (length - end);
    /* With padding behind, the filler (a row of zeros as well) went with it. */
    bool filler = in->filler && end == length && end > *first;
    mz_rows_skip(in->report, padded, "rows of padding");
    mz_rows_skip(in->report, filler, "filler rows of last tokens");
    return end - *first - filler;
}

static mz_code take_shape(verl_import *in, const char *path, const mz_npy_shape *shape,
                          mz_err *err) {
    const mz_import_options *o = in->options;
    if (shape->dims != 4 || shape->elements == 0 || shape->extent[2] > MZ_LAYERS_MAX ||
        shape->extent[3] > MZ_MAX_TOP_K)
        return mz_fail(err, MZ_EINPUT,
                       "%s: routed_experts is not [batch, sequence, layers, k] (ids of one "
                       "sequence: save them as .npy)",
                       path);
    if (o->top_k > 0 && o->top_k != shape->extent[3])
        return mz_fail(err, MZ_EINPUT, "%s: top-%lld in the file, but --top-k %lld", path,
                       (long long)shape->extent[3], (long long)o->top_k);
    in->ids = mz_calloc((size_t)(shape->elements / shape->extent[0]), sizeof *in->ids);
    return in->ids ? MZ_OK : mz_fail_nomem(err, "a sequence");
}

/* `first`: the row that tells which layers are dense; those before it are zero. */
static mz_code create(verl_import *in, const char *path, const mz_npy_shape *shape, int64_t first,
                      const char *output, const mz_trace_write_options *write, mz_err *err) {
    int64_t layers = shape->extent[2], row = layers * shape->extent[3];
    mz_code code = mz_id_rows_make(path, in->ids + first * row, shape->extent[1] - first, layers,
                                   (int32_t)shape->extent[3], in->options, &in->rows, err);
    if (code)
        return code;
    in->facts.layers = in->block.layers = (int32_t)in->rows.kept;
    in->facts.top_k = in->block.top_k = in->rows.top_k;
    in->facts.model_layers = (int32_t)layers;
    in->facts.experts = in->rows.experts;
    in->facts.ranks = 1;
    in->facts.has_sequences = true;
    in->block.step_per_block = in->facts.step_meaning != MZ_STEP_NONE;
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

/* The trace from the first sequence that is not zero everywhere; those before it are left out. */
static mz_code start(verl_import *in, const char *path, const mz_tensor *ids, const char *output,
                     const mz_trace_write_options *write, mz_err *err) {
    const int64_t *extent = ids->shape.extent;
    bool padded = in->options->padding != PAD_NONE;
    int64_t first = 0;
    if (padded || extent[3] > 1)
        first = mz_rows_first(in->ids, extent[1], extent[2] * extent[3]);
    if (first == extent[1]) {
        mz_rows_skip(in->report, first,
                     padded ? "rows of padding" : "tokens without any expert (fillers)");
        return MZ_OK;
    }
    return create(in, path, &ids->shape, first, output, write, err);
}

static mz_code read_sequences(verl_import *in, const char *path, mz_datafile *file,
                              const mz_tensor *ids, const char *output,
                              const mz_trace_write_options *write, mz_err *err) {
    int64_t each = ids->shape.elements / ids->shape.extent[0], first;
    int64_t row = ids->shape.extent[2] * ids->shape.extent[3];
    mz_code code = MZ_OK;
    for (int64_t b = 0; b < ids->shape.extent[0] && !code; b++) {
        code = mz_tensor_read_int(file, ids, "routed_experts", b * each, each, in->ids, err);
        if (!code && !in->writer) {
            code = start(in, path, ids, output, write, err);
            if (!in->writer)
                continue;
        }
        if (code)
            break;
        int64_t tokens = trim(in, ids->shape.extent[1], &first);
        code = mz_rows_sequence(&in->rows, in->ids + first * row, tokens, &in->block, in->writer,
                                in->report, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, "%s: sequence %lld from row %lld on", path, (long long)b,
                          (long long)first);
        if (!code)
            code = mz_import_stopped(in->app, err);
    }
    if (!code && !in->writer)
        code = mz_fail(err, MZ_EINPUT, "%s: every row of every layer is zero: no expert ids in it",
                       path);
    if (!code)
        code = mz_block_write(&in->block, in->writer, in->report, err);
    return code ? code : mz_import_close(path, in->report, &in->writer, err);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "verl routed experts",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    verl_import in = {.app = app, .options = options, .report = report};
    mz_torch_file torch = {0};
    if (count != 1)
        return mz_fail(err, MZ_EINPUT, "verl-pt takes one file, got %d", count);
    mz_code code = mz_import_facts(app, options, &defaults, &in.facts, err);
    if (!code)
        code = mz_torch_open(files[0], &torch, err);
    const mz_value *value = code ? NULL : torch.value;
    if (value && value->type == MZ_VALUE_DICT)
        value = mz_value_get(value, "routed_experts");
    if (!code && (!value || value->type != MZ_VALUE_TENSOR))
        code =
            mz_fail(err, MZ_EINPUT, "%s: no array \"routed_experts\" in it, as verl has", files[0]);
    if (!code)
        code = take_shape(&in, files[0], &value->tensor->shape, err);
    if (!code)
        code = ask(&in, files[0], err);
    if (!code)
        code = read_sequences(&in, files[0], torch.file, value->tensor, output, write, err);
    if (in.writer)
        mz_trace_writer_abandon(&in.writer);
    mz_torch_close(&torch);
    mz_block_free(&in.block);
    mz_id_rows_free(&in.rows);
    free(in.ids);
    return code;
}

const mz_importer mz_import_verl_pt = {
    .name = "verl-pt",
    .summary = "verl's routed_experts [batch, sequence, layers, k] (.pt); needs --experts",
    .answers = "experts top-k padding filler-last dense-layers",
    .recognise = recognise,
    .import = import_files,
};
