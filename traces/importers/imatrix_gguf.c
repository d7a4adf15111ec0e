/* llama.cpp's importance matrix as GGUF: general.type "imatrix", and for every MoE layer N tensors
 * blk.N.ffn_{gate,up,down}_exps.weight.counts, F32, one number per expert: how often it was chosen.
 * The three agree; one is taken, the same in all layers. There is no time axis: the trace is one
 * step on one source rank. The older .dat form holds values already divided by the counts and is
 * refused. */
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/datafile.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TENSORS = 1 << 20, MAX_KEYS = 1 << 20, F32 = 0 };

typedef struct gguf_import {
    const mz_import_options *options;
    mz_datafile *file;
    int64_t at;   /* next byte of the header */
    uint64_t end; /* of the last tensor, from the beginning of the data */
    mz_trace_facts facts;
    mz_gather gather;
    mz_import_report *report;
    bool imatrix; /* general.type says so */
    uint64_t alignment;
    char kind[8]; /* gate, up or down: which of the three is taken */
    mz_tensor *tensor;
    int64_t *layer;
    size_t count, room, layer_room;
    mz_labels counted, taken; /* layers with counts of any of the three, and of that one */
} gguf_import;

/* The older form: a number of entries, then the length and text of the first tensor's name. */
static bool old_form(const unsigned char *head, size_t size) {
    if (size < 16)
        return false;
    uint32_t entries = mz_le32(head), length = mz_le32(head + 4);
    return entries > 0 && entries < 1 << 20 && length > 8 && length < 128 && 8 + length <= size &&
           (memcmp(head + 8, "blk.", 4) == 0 || memcmp(head + 8, "output", 6) == 0);
}

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    if (old_form(head, size))
        return 60;
    if (size < 24 || memcmp(head, "GGUF", 4) != 0)
        return 0;
    return mz_head_has(head, size, "imatrix") ? 90 : 40;
}

/* ---- header ---------------------------------------------------------------------------------- */

static mz_code take(gguf_import *in, void *data, size_t size, mz_err *err) {
    mz_code code = mz_datafile_read(in->file, in->at, data, size, err);
    in->at += (int64_t)size;
    return code;
}

static mz_code take_u64(gguf_import *in, uint64_t *value, mz_err *err) {
    unsigned char bytes[8];
    mz_code code = take(in, bytes, sizeof bytes, err);
    *value = code ? 0 : mz_le64(bytes);
    return code;
}

static mz_code take_u32(gguf_import *in, uint32_t *value, mz_err *err) {
    unsigned char bytes[4];
    mz_code code = take(in, bytes, sizeof bytes, err);
    *value = code ? 0 : mz_le32(bytes);
    return code;
}

/* Up to size-1 bytes of a text are kept. */
static mz_code take_text(gguf_import *in, char *text, size_t size, mz_err *err) {
    uint64_t length;
    mz_code code = take_u64(in, &length, err);
    int64_t rest = mz_datafile_size(in->file) - in->at;
    text[0] = '\0';
    if (!code && (rest < 0 || length > (uint64_t)rest))
        return mz_fail(err, MZ_EINPUT, "%s: byte %lld: a text reaches beyond the end of the file",
                       mz_datafile_path(in->file), (long long)in->at);
    if (code)
        return code;
    size_t kept = length < size - 1 ? (size_t)length : size - 1;
    code = mz_datafile_read(in->file, in->at, text, kept, err);
    text[code ? 0 : kept] = '\0';
    in->at += (int64_t)length;
    return code;
}

/* Bytes of a plain value of a metadata type, 0: text (8), array (9) or unknown. */
static int64_t value_bytes(uint32_t type) {
    static const int64_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizeof bytes / sizeof bytes[0] ? bytes[type] : 0;
}

static mz_code skip_array(gguf_import *in, mz_err *err) {
    uint32_t type;
    uint64_t count;
    char text[2];
    mz_code code = take_u32(in, &type, err);
    if (!code)
        code = take_u64(in, &count, err);
    int64_t size = mz_datafile_size(in->file), bytes = code ? 0 : value_bytes(type);
    if (!code && ((bytes == 0 && type != 8) || count > (uint64_t)size))
        return mz_fail(err, MZ_EINPUT, "%s: byte %lld: a metadata array of unknown type or size",
                       mz_datafile_path(in->file), (long long)in->at);
    if (!code && bytes)
        in->at += bytes * (int64_t)count;
    for (uint64_t i = 0; !code && !bytes && i < count; i++)
        code = take_text(in, text, sizeof text, err);
    return code;
}

static mz_code take_key(gguf_import *in, mz_err *err) {
    char key[64], text[32];
    uint32_t type, number;
    mz_code code = take_text(in, key, sizeof key, err);
    if (!code)
        code = take_u32(in, &type, err);
    if (code)
        return code;
    if (type == 8) {
        code = take_text(in, text, sizeof text, err);
        in->imatrix = in->imatrix || (!strcmp(key, "general.type") && !strcmp(text, "imatrix"));
        return code;
    }
    if (type == 9)
        return skip_array(in, err);
    if (value_bytes(type) == 0)
        return mz_fail(err, MZ_EINPUT, "%s: %s: metadata type %u is not known",
                       mz_datafile_path(in->file), key, type);
    if (strcmp(key, "general.alignment") == 0 && type == 4) {
        code = take_u32(in, &number, err);
        in->alignment = number;
        return code;
    }
    in->at += value_bytes(type);
    return MZ_OK;
}

/* The file must hold every tensor, one behind another, not those alone that are read. Of other
 * types (an imatrix has none) a byte is all that is known to be there. */
static mz_code note_end(gguf_import *in, const char *name, const uint64_t *extent, uint32_t type,
                        uint64_t offset, mz_err *err) {
    uint64_t bytes = type == F32 ? 4 : 1, size = (uint64_t)mz_datafile_size(in->file);
    for (int d = 0; d < 4; d++) {
        if (extent[d] > 0 && bytes > size / extent[d])
            return mz_fail(err, MZ_EINPUT,
                           "%s: %s: larger than the file, whose end is missing: it is truncated",
                           mz_datafile_path(in->file), name);
        bytes *= type == F32 ? extent[d] : 1;
    }
    if (offset < in->end)
        return mz_fail(err, MZ_EINPUT, "%s: %s overlaps a tensor before it: the file is damaged",
                       mz_datafile_path(in->file), name);
    if (offset > size - bytes)
        return mz_fail(err, MZ_EINPUT, "%s: %s reaches beyond the end of the file: it is truncated",
                       mz_datafile_path(in->file), name);
    in->end = offset + bytes;
    return MZ_OK;
}

/* One tensor of the header; those that count experts are kept, of one kind. */
static mz_code take_tensor(gguf_import *in, mz_err *err) {
    char name[128], kind[8] = "";
    uint32_t dims, type;
    uint64_t extent[4] = {1, 1, 1, 1}, offset;
    int64_t layer;
    int end = 0;
    mz_code code = take_text(in, name, sizeof name, err);
    if (!code)
        code = take_u32(in, &dims, err);
    if (!code && dims > 4)
        return mz_fail(err, MZ_EINPUT, "%s: %s: %u dimensions", mz_datafile_path(in->file), name,
                       dims);
    for (uint32_t d = 0; !code && d < dims; d++)
        code = take_u64(in, &extent[d], err);
    if (!code)
        code = take_u32(in, &type, err);
    if (!code)
        code = take_u64(in, &offset, err);
    if (!code)
        code = note_end(in, name, extent, type, offset, err);
    if (code)
        return code;
    long long number;
    if (strncmp(name, "blk.", 4) != 0 || !isdigit((unsigned char)name[4]) ||
        sscanf(name, "blk.%9lld.ffn_%4[a-z]_exps.weight.counts%n", &number, kind, &end) != 2 ||
        name[end] != '\0' || end == 0)
        return MZ_OK;
    layer = number;
    if (strcmp(kind, "gate") != 0 && strcmp(kind, "up") != 0 && strcmp(kind, "down") != 0)
        return MZ_OK;
    if (in->kind[0] == '\0')
        strcpy(in->kind, kind);
    if (in->counted.count > MZ_LAYERS_MAX)
        return mz_fail(err, MZ_EINPUT, "%s: more than %d layers with experts",
                       mz_datafile_path(in->file), MZ_LAYERS_MAX);
    code = mz_labels_add(&in->counted, layer, err);
    if (code || strcmp(in->kind, kind) != 0)
        return code;
    code = mz_labels_add(&in->taken, layer, err);
    if (!code && in->taken.count == in->count)
        code = mz_fail(err, MZ_EINPUT, "%s: %s a second time", mz_datafile_path(in->file), name);
    if (code)
        return code;
    mz_tensor tensor = {.shape = {.dims = 1, .kind = 'f', .size = 4}, .offset = (int64_t)offset};
    tensor.shape.extent[0] = (int64_t)(extent[0] * extent[1]);
    if (type != F32 || extent[0] > MZ_EXPERTS_MAX || extent[1] > MZ_EXPERTS_MAX ||
        extent[2] * extent[3] != 1 || offset > INT64_MAX / 2 || tensor.shape.extent[0] < 1 ||
        tensor.shape.extent[0] > MZ_EXPERTS_MAX || !mz_tensor_contiguous(&tensor))
        return mz_fail(err, MZ_EINPUT, "%s: %s is not a row of 32-bit floats, one per expert",
                       mz_datafile_path(in->file), name);
    if (!mz_grow((void **)&in->tensor, &in->room, in->count + 1, sizeof *in->tensor) ||
        !mz_grow((void **)&in->layer, &in->layer_room, in->count + 1, sizeof *in->layer))
        return mz_fail_nomem(err, "tensors");
    in->tensor[in->count] = tensor;
    in->layer[in->count++] = layer;
    return MZ_OK;
}

static mz_code read_header(gguf_import *in, mz_err *err) {
    const char *path = mz_datafile_path(in->file);
    unsigned char head[256] = {0};
    uint32_t version;
    uint64_t tensors, keys;
    int64_t size = mz_datafile_size(in->file);
    mz_code code = mz_datafile_read(in->file, 0, head,
                                    size < (int64_t)sizeof head ? (size_t)size : sizeof head, err);
    if (!code && old_form(head, sizeof head))
        return mz_fail(err, MZ_EINPUT,
                       "%s: an imatrix in the older .dat form, whose values are already divided by "
                       "the experts' counts: the counts cannot be recovered; write it again with a "
                       "newer llama-imatrix (--output-format gguf)",
                       path);
    if (!code && memcmp(head, "GGUF", 4) != 0)
        return mz_fail(err, MZ_EINPUT, "%s: not a GGUF file", path);
    in->at = 4;
    if (!code)
        code = take_u32(in, &version, err);
    if (!code && (version < 2 || version > 3))
        return mz_fail(err, MZ_EINPUT, "%s: GGUF version %u; 2 and 3 are read", path, version);
    if (!code)
        code = take_u64(in, &tensors, err);
    if (!code)
        code = take_u64(in, &keys, err);
    if (!code && (tensors > MAX_TENSORS || keys > MAX_KEYS))
        return mz_fail(err, MZ_EINPUT, "%s: %llu tensors and %llu keys are not plausible", path,
                       (unsigned long long)tensors, (unsigned long long)keys);
    in->alignment = 32;
    for (uint64_t i = 0; !code && i < keys; i++)
        code = take_key(in, err);
    if (!code && !in->imatrix)
        return mz_fail(err, MZ_EINPUT, "%s: a GGUF file, but no imatrix (general.type)", path);
    for (uint64_t i = 0; !code && i < tensors; i++)
        code = take_tensor(in, err);
    if (!code && in->count == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: no tensor blk.N.ffn_gate_exps.weight.counts: the model has no experts",
                       path);
    if (!code && in->counted.count > in->taken.count)
        return mz_fail(
            err, MZ_EINPUT,
            "%s: %zu layers have counts of their experts, but only %zu of ffn_%s_exps: is "
            "it of a run that was cut short?",
            path, in->counted.count, in->taken.count, in->kind);
    if (!code && (in->alignment == 0 || in->alignment > 1 << 20))
        return mz_fail(err, MZ_EINPUT, "%s: alignment %llu is not plausible", path,
                       (unsigned long long)in->alignment);
    return code;
}

/* ---- counts ---------------------------------------------------------------------------------- */

static mz_code read_layer(gguf_import *in, size_t index, int64_t data, float *real, int64_t *row,
                          mz_err *err) {
    char what[64];
    mz_tensor *tensor = &in->tensor[index];
    mz_gather_key key = {.layer = in->layer[index]};
    snprintf(what, sizeof what, "blk.%lld.ffn_%s_exps.weight.counts", (long long)key.layer,
             in->kind);
    if (tensor->shape.extent[0] != in->facts.experts)
        return mz_fail(err, MZ_EINPUT, "%s: %lld experts, but %d in the first layer", what,
                       (long long)tensor->shape.extent[0], in->facts.experts);
    tensor->offset += data;
    mz_code code = mz_tensor_check(in->file, tensor, what, err);
    if (!code)
        code = mz_tensor_read_float(in->file, tensor, what, 0, in->facts.experts, real, err);
    for (int32_t e = 0; e < in->facts.experts && !code; e++) {
        if (!(real[e] >= 0 && real[e] < 0x1p24f) || real[e] != (float)(int64_t)real[e])
            return mz_fail(err, MZ_EINPUT,
                           "%s[%d]: %g is no exact count (whole, below 2^24, where 32-bit floats "
                           "stop counting)",
                           what, e, (double)real[e]);
        row[e] = (int64_t)real[e];
    }
    return code ? code : mz_rows_count(&in->gather, &key, row, in->options, in->report, err);
}

static mz_code read_layers(gguf_import *in, mz_err *err) {
    int64_t align = (int64_t)in->alignment, data = (in->at + align - 1) / align * align;
    size_t experts = (size_t)in->facts.experts;
    uint64_t size = (uint64_t)mz_datafile_size(in->file);
    if ((uint64_t)data > size || in->end > size - (uint64_t)data)
        return mz_fail(err, MZ_EINPUT,
                       "%s: tensors reach beyond the end of the file: it is truncated",
                       mz_datafile_path(in->file));
    float *real = mz_calloc(experts, sizeof *real);
    int64_t *row = mz_calloc(experts, sizeof *row);
    mz_code code = real && row ? MZ_OK : mz_fail_nomem(err, "a row of counts");
    for (size_t i = 0; i < in->count && !code; i++) {
        code = read_layer(in, i, data, real, row, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, "%s", mz_datafile_path(in->file));
    }
    free(real);
    free(row);
    return code;
}

static mz_code write_trace(gguf_import *in, const char *output, const mz_trace_write_options *write,
                           mz_err *err) {
    mz_trace_writer *writer = NULL;
    if (in->gather.entries == 0)
        return mz_fail(err, MZ_EINPUT, "%s: all counts are 0", mz_datafile_path(in->file));
    mz_code code = mz_gather_settle(&in->gather, err);
    if (code)
        return code;
    mz_import_note(&in->facts, "counts=of ffn_%s_exps, whole run", in->kind);
    code = mz_trace_create(output, &in->facts, write, &writer, err);
    if (!code) {
        code = mz_gather_write(&in->gather, writer, in->report, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, "%s", mz_datafile_path(in->file));
    }
    if (!code)
        code = mz_import_close(mz_datafile_path(in->file), in->report, &writer, err);
    if (writer)
        mz_trace_writer_abandon(&writer);
    return code;
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "llama.cpp importance matrix",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_COUNTS,
                                                .meaning = MZ_STEP_NONE};
    gguf_import in = {.options = options, .report = report};
    if (count != 1)
        return mz_fail(err, MZ_EINPUT, "imatrix takes one file, got %d", count);
    mz_code code = mz_import_facts(app, options, &defaults, &in.facts, err);
    in.gather.facts = &in.facts;
    if (!code)
        code = mz_datafile_open(files[0], &in.file, err);
    if (!code)
        code = read_header(&in, err);
    in.facts.ranks = 1;
    if (!code)
        code = mz_import_experts(files[0], options, in.tensor[0].shape.extent[0], &in.facts, err);
    if (!code)
        code = read_layers(&in, err);
    if (!code)
        code = write_trace(&in, output, write, err);
    mz_datafile_close(&in.file);
    mz_gather_free(&in.gather);
    mz_labels_free(&in.counted);
    mz_labels_free(&in.taken);
    free(in.tensor);
    free(in.layer);
    return code;
}

const mz_importer mz_import_imatrix_gguf = {
    .name = "imatrix",
    .summary = "llama.cpp importance matrix (GGUF): counts of a whole run; needs --top-k",
    .answers = "experts top-k tokens dropped",
    .phase = "prefill",
    .recognise = recognise,
    .import = import_files,
};
