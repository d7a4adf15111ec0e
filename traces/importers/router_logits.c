/* Router logits of a Hugging Face model (output_router_logits=True), saved with numpy.save or
 * numpy.savez: [layers, tokens, experts], or [samples, layers, tokens, experts], every sample a
 * sequence. The choice of the router is made again: the k largest logits of a token (of equal ones
 * the lower expert), and weights as --scores says. Routers with a bias or with groups (DeepSeek-V3)
 * choose otherwise: their choice is not in the logits. */
#include "traces/importers/common.h"
#include "traces/importers/logits.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/zip.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_VALUES = 1 << 20 };

typedef struct logits_import {
    mz_app *app;
    const mz_import_options *options;
    const char *path;
    mz_datafile *file;
    mz_zip zip;
    mz_tensor logits;
    mz_scores scores;
    int64_t samples, layers, tokens, experts; /* of the array */
    mz_trace_facts facts;
    mz_block block;
    mz_trace_writer *writer;
    mz_import_report *report;
    float *values; /* a chunk of tokens of one layer */
    int64_t chunk; /* its tokens */
} logits_import;

/* Where the first array of a .npz begins; 0: no .npz. */
static size_t npz_array(const unsigned char *head, size_t size) {
    if (size < 64 || memcmp(head, "PK\3\4", 4) != 0)
        return 0;
    size_t name = mz_le16(head + 26), at = 30 + name + mz_le16(head + 28);
    return name > 4 && at < size && memcmp(head + 30 + name - 4, ".npy", 4) == 0 ? at : 0;
}

/* Counts are whole and not negative; logits are not, somewhere among the first values. */
static bool looks_like_counts(const mz_npy_shape *shape, const unsigned char *head, size_t size) {
    for (size_t at = shape->header_bytes; at + (size_t)shape->size <= size;
         at += (size_t)shape->size) {
        float value = mz_npy_to_float(shape, head + at);
        if (!(value >= 0) || value != floorf(value))
            return false;
    }
    return true;
}

static int recognise(const char *path, const unsigned char *head, size_t size) {
    mz_npy_shape shape;
    mz_err err;
    size_t npz = npz_array(head, size);
    if (npz && mz_le16(head + 8) != 0)
        return 10; /* compressed: its import says what to do */
    if (mz_npy_parse(path, head + npz, size - npz, &shape, &err))
        return 0;
    if (shape.kind != 'f' || (shape.dims != 3 && shape.dims != 4))
        return 0;
    if (npz || shape.dims == 4)
        return 60;
    return looks_like_counts(&shape, head, size) ? 20 : 60;
}

/* The only array of floats with 3 or 4 axes. Others may be of any type; why they cannot be read is
 * told if there is none. */
static mz_code open_npz(logits_import *in, mz_err *err) {
    mz_err why = {.code = MZ_OK};
    int found = 0;
    mz_code code = mz_zip_open(in->file, &in->zip, err);
    for (int64_t i = 0; i < in->zip.count && !code; i++) {
        char name[120];
        mz_tensor tensor;
        const char *key = in->zip.member[i].key;
        size_t length = strlen(key);
        if (length < 5 || strcmp(key + length - 4, ".npy") != 0)
            continue;
        if (length - 4 >= sizeof name)
            return mz_fail(err, MZ_EINPUT, "%s: an array with a name of %zu bytes", in->path,
                           length - 4);
        snprintf(name, sizeof name, "%.*s", (int)(length - 4), key);
        code = mz_zip_npy(&in->zip, name, &tensor, err);
        if (code == MZ_EINPUT) {
            why = *err;
            code = MZ_OK;
        } else if (!code && tensor.shape.kind == 'f' &&
                   (tensor.shape.dims == 3 || tensor.shape.dims == 4)) {
            in->logits = tensor;
            found++;
        }
    }
    if (!code && found == 0 && why.code) {
        *err = why;
        return why.code;
    }
    if (!code && found != 1)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %d float arrays of 3 or 4 axes in the .npz; there must be one",
                       in->path, found);
    return code;
}

/* The array of the file: all of a .npy, or one of a .npz. */
static mz_code open_array(logits_import *in, mz_err *err) {
    unsigned char head[4096];
    int64_t size = mz_datafile_size(in->file);
    size_t have = size < (int64_t)sizeof head ? (size_t)size : sizeof head;
    mz_code code = mz_datafile_read(in->file, 0, head, have, err);
    if (code)
        return code;
    if (have < 4 || memcmp(head, "PK\3\4", 4) != 0) {
        code = mz_npy_parse(in->path, head, have, &in->logits.shape, err);
        in->logits.offset = (int64_t)in->logits.shape.header_bytes;
        if (!code && !mz_tensor_contiguous(&in->logits))
            code = mz_fail(err, MZ_EINPUT, "%s: the array is too large", in->path);
        return code ? code : mz_tensor_check(in->file, &in->logits, "logits", err);
    }
    return open_npz(in, err);
}

static mz_code take_shape(logits_import *in, mz_err *err) {
    const mz_npy_shape *shape = &in->logits.shape;
    const mz_import_options *o = in->options;
    int first = shape->dims - 3;
    if (shape->kind != 'f' || (first != 0 && first != 1) || shape->elements == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: not a float array [layers, tokens, experts] or [samples, layers, "
                       "tokens, experts]",
                       in->path);
    in->samples = first ? shape->extent[0] : 1;
    in->layers = shape->extent[first];
    in->tokens = shape->extent[first + 1];
    in->experts = shape->extent[first + 2];
    if (in->layers > MZ_LAYERS_MAX || in->experts > MZ_EXPERTS_MAX)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %lld layers and %lld experts are not plausible; the axes must be "
                       "[samples,] layers, tokens, experts",
                       in->path, (long long)in->layers, (long long)in->experts);
    mz_code code = mz_import_experts(in->path, o, in->experts, &in->facts, err);
    if (!code)
        code = mz_scores_parse(in->path, o->scores, &in->scores, err);
    if (code)
        return code;
    in->facts.layers = in->block.layers = (int32_t)in->layers;
    in->block.top_k = in->facts.top_k;
    in->facts.ranks = 1;
    in->facts.has_sequences = first == 1;
    in->facts.has_weight = in->block.weights = in->scores != MZ_SCORES_NONE;
    in->facts.weights_normalized = mz_scores_normalized(in->scores);
    strcpy(in->facts.router, mz_scores_router(in->scores));
    in->block.step_per_block = in->facts.step_meaning != MZ_STEP_NONE;
    mz_import_note(&in->facts, "choice=top-k of the logits; scores=%s", o->scores);
    in->chunk = CHUNK_VALUES / in->experts > 0 ? CHUNK_VALUES / in->experts : 1;
    in->values = mz_calloc((size_t)in->chunk, (size_t)in->experts * sizeof *in->values);
    return in->values ? MZ_OK : mz_fail_nomem(err, "logits");
}

/* The k largest, in order; false: one is no number. */
static bool choose(const float *logit, int32_t experts, int32_t k, uint16_t *expert) {
    int32_t have = 0;
    for (int32_t e = 0; e < experts; e++) {
        if (!isfinite(logit[e]))
            return false;
        if (have == k && logit[e] <= logit[expert[k - 1]])
            continue;
        int32_t at = have < k ? have++ : k - 1;
        for (; at > 0 && logit[e] > logit[expert[at - 1]]; at--)
            expert[at] = expert[at - 1];
        expert[at] = (uint16_t)e;
    }
    return true;
}

static mz_code take_token(logits_import *in, const float *logit, uint16_t *expert, float *weight,
                          mz_err *err) {
    if (!choose(logit, in->facts.experts, in->facts.top_k, expert))
        return mz_fail(err, MZ_EINPUT, "a logit is not finite");
    return weight ? mz_scores_weights(in->scores, logit, in->facts.experts, expert, in->facts.top_k,
                                      weight, err)
                  : MZ_OK;
}

/* Tokens [from, from + count) of one layer of one sample, to every row of the block. */
static mz_code take_layer(logits_import *in, int64_t sample, int64_t layer, int64_t from,
                          int64_t count, mz_err *err) {
    int64_t k = in->facts.top_k, row = in->layers * k;
    uint16_t *expert = mz_block_expert(&in->block) + layer * k;
    float *weight = in->block.weights ? mz_block_weight(&in->block) + layer * k : NULL;
    mz_code code = MZ_OK;
    for (int64_t done = 0; done < count && !code; done += in->chunk) {
        int64_t n = count - done < in->chunk ? count - done : in->chunk;
        int64_t first = ((sample * in->layers + layer) * in->tokens + from + done) * in->experts;
        code = mz_tensor_read_float(in->file, &in->logits, "logits", first, n * in->experts,
                                    in->values, err);
        for (int64_t t = 0; t < n && !code; t++) {
            code = take_token(in, in->values + t * in->experts, expert + (done + t) * row,
                              weight ? weight + (done + t) * row : NULL, err);
            if (code)
                mz_err_prefix(err, "%s: sample %lld, layer %lld, token %lld", in->path,
                              (long long)sample, (long long)layer, (long long)(from + done + t));
        }
    }
    return code;
}

static mz_code take_tokens(logits_import *in, int64_t sample, int64_t from, int64_t count,
                           mz_err *err) {
    mz_code code = mz_block_begin(&in->block, count, in->writer, in->report, err);
    for (int64_t l = 0; l < in->layers && !code; l++)
        code = take_layer(in, sample, l, from, count, err);
    return code ? code : mz_block_end(&in->block, count, in->facts.has_sequences, -1, err);
}

static mz_code take_all(logits_import *in, mz_err *err) {
    int64_t step = in->facts.has_sequences ? in->tokens : MZ_BLOCK_TOKENS;
    mz_progress progress =
        mz_progress_start(&in->app->log, "importing", "tokens", in->samples * in->tokens);
    mz_code code = MZ_OK;
    for (int64_t s = 0; s < in->samples && !code; s++)
        for (int64_t t = 0; t < in->tokens && !code; t += step) {
            code = take_tokens(in, s, t, in->tokens - t < step ? in->tokens - t : step, err);
            if (!code)
                code = mz_import_stopped(in->app, err);
            mz_progress_update(&progress, s * in->tokens + t);
        }
    mz_progress_end(&progress);
    return code ? code : mz_block_write(&in->block, in->writer, in->report, err);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "router logits",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    logits_import in = {.app = app, .options = options, .path = files[0], .report = report};
    if (count != 1)
        return mz_fail(err, MZ_EINPUT, "router-logits takes one file, got %d", count);
    mz_code code = mz_import_facts(app, options, &defaults, &in.facts, err);
    if (!code)
        code = mz_datafile_open(files[0], &in.file, err);
    if (!code)
        code = open_array(&in, err);
    if (!code)
        code = take_shape(&in, err);
    if (!code)
        code = mz_trace_create(output, &in.facts, write, &in.writer, err);
    if (!code)
        code = take_all(&in, err);
    if (!code)
        code = mz_import_close(files[0], report, &in.writer, err);
    if (in.writer)
        mz_trace_writer_abandon(&in.writer);
    mz_zip_close(&in.zip);
    mz_datafile_close(&in.file);
    mz_block_free(&in.block);
    free(in.values);
    return code;
}

const mz_importer mz_import_router_logits = {
    .name = "router-logits",
    .summary = "router logits [(samples,) layers, tokens, experts] (.npy, .npz)",
    .answers = "experts top-k scores",
    .recognise = recognise,
    .import = import_files,
};
