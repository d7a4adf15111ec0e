/* Routed experts in the JSON answers of servers, one answer per line or one JSON document (an
 * answer or a list of them).
 *
 * SGLang: meta_info.routed_experts, or sgl_ext.routed_experts of the OpenAI interface, base64 of
 * int32 [rows][layers][k]. vLLM: prompt_routed_experts, and routed_experts of each choice, int16 in
 * base64 (flat, a .npy, or {"data", "shape"}), or lists of numbers. A flat blob says nothing of its
 * shape: --layers and --top-k.
 *
 * An answer is a sequence, further choices are further ones. Zeros in all k > 1 places, or -1, are
 * no choice: a layer that holds nothing else is dense and left out, a token that holds nothing else
 * is filler and left out. The last token of a sequence has no row; where there are as many rows as
 * tokens, --filler-last says whether the last one is a token. Memory is one answer. */
#include "traces/importers/json_list.h"
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/base64.h"
#include "traces/jsonl.h"
#include "traces/npy.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

typedef struct routed_import {
    mz_app *app;
    const mz_import_options *options;
    const char *path;
    int64_t answer; /* number of the current one, for messages */
    mz_trace_facts facts;
    mz_block block;
    int64_t layers, top_k; /* of a row, dense layers included; 0: not settled */
    bool *dense;           /* per layer of a row; NULL: not settled */
    int32_t *id;           /* of the current sequence, [rows][layers][top_k] */
    size_t ids, id_room;
    uint16_t *expert;
    size_t expert_room;
    int64_t dense_rows, fillers;
    mz_trace_writer *writer;
    const char *output;
    const mz_trace_write_options *write;
    mz_import_report *report;
} routed_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    int first = mz_head_first(head, size);
    if (first != '{' && first != '[')
        return 0;
    if (mz_head_has(head, size, "routed_experts\""))
        return 80;
    return mz_head_has(head, size, "\"meta_info\"") || mz_head_has(head, size, "\"choices\"") ? 20
                                                                                              : 0;
}

static mz_code fail(const routed_import *in, mz_err *err, const char *fmt, ...) MZ_PRINTF(3, 4);

/* MZ_EINPUT "PATH: answer N: ...". */
static mz_code fail(const routed_import *in, mz_err *err, const char *fmt, ...) {
    char text[MZ_ERR_MAX];
    va_list list;
    va_start(list, fmt);
    vsnprintf(text, sizeof text, fmt, list);
    va_end(list);
    return mz_fail(err, MZ_EINPUT, "%s: answer %lld: %s", in->path, (long long)in->answer, text);
}

/* Layers and k of a row, told or found; all rows of the import must agree. */
static mz_code settle(routed_import *in, int64_t layers, int64_t top_k, mz_err *err) {
    const mz_import_options *options = in->options;
    if ((options->layers > 0 && options->layers != layers) ||
        (options->top_k > 0 && options->top_k != top_k))
        return fail(in, err, "rows of %lld layers x top-%lld, unlike --layers or --top-k",
                    (long long)layers, (long long)top_k);
    if (layers < 1 || layers > MZ_LAYERS_MAX || top_k < 1 || top_k > MZ_MAX_TOP_K)
        return fail(in, err, "rows of %lld layers x top-%lld are not plausible", (long long)layers,
                    (long long)top_k);
    if (in->layers && (in->layers != layers || in->top_k != top_k))
        return fail(in, err, "rows of %lld layers x top-%lld, before they were %lld x %lld",
                    (long long)layers, (long long)top_k, (long long)in->layers,
                    (long long)in->top_k);
    in->layers = layers;
    in->top_k = top_k;
    return MZ_OK;
}

/* One id, -1 (no data) or from 0. */
static mz_code add_id(routed_import *in, int64_t id, mz_err *err) {
    if (id < -1 || id >= in->facts.experts)
        return fail(in, err,
                    "expert id %lld is not from 0 to %d (--experts, or is --id-bytes wrong?)",
                    (long long)id, in->facts.experts - 1);
    if (!mz_grow((void **)&in->id, &in->id_room, in->ids + 1, sizeof *in->id))
        return mz_fail_nomem(err, "ids of an answer");
    in->id[in->ids++] = (int32_t)id;
    return MZ_OK;
}

/* Little-endian integers of `width` bytes, signed but for single bytes. */
static mz_code add_integers(routed_import *in, const unsigned char *data, size_t size, int width,
                            mz_err *err) {
    int64_t row = in->layers * in->top_k * width;
    mz_code code = MZ_OK;
    if (size % (size_t)row)
        return fail(in, err,
                    "%zu bytes are no whole rows of %lld layers x top-%lld x %d bytes: check "
                    "--layers, --top-k and --id-bytes",
                    size, (long long)in->layers, (long long)in->top_k, width);
    for (size_t i = 0; i < size && !code; i += (size_t)width) {
        uint64_t bits = 0;
        for (int b = 0; b < width; b++)
            bits |= (uint64_t)data[i + (size_t)b] << (8 * b);
        if (width > 1 && width < 8 && bits >> (8 * width - 1))
            bits |= ~UINT64_C(0) << (8 * width);
        code = add_id(in, (int64_t)bits, err);
    }
    return code;
}

static mz_code add_npy(routed_import *in, const unsigned char *data, size_t size, mz_err *err) {
    mz_npy_shape shape;
    mz_code code = mz_npy_parse(in->path, data, size, &shape, err);
    if (code)
        return mz_err_prefix(err, "answer %lld", (long long)in->answer);
    if (shape.dims != 3 || shape.kind == 'f' ||
        (size_t)shape.elements * (size_t)shape.size != size - shape.header_bytes)
        return fail(in, err, "the .npy in it is no whole integer array [rows, layers, top_k]");
    code = settle(in, shape.extent[1], shape.extent[2], err);
    for (size_t i = shape.header_bytes; i < size && !code; i += (size_t)shape.size) {
        int64_t id;
        code = add_id(in, mz_npy_to_int(&shape, data + i, &id) ? id : INT64_MAX, err);
    }
    return code;
}

/* Integers whose number of bytes follows from their `shape`. */
static mz_code add_shaped(routed_import *in, const unsigned char *data, size_t size,
                          const json_t *shape, mz_err *err) {
    int64_t rows = json_integer_value(json_array_get(shape, 0));
    int64_t layers = json_integer_value(json_array_get(shape, 1));
    int64_t top_k = json_integer_value(json_array_get(shape, 2));
    mz_code code = settle(in, layers, top_k, err);
    if (code)
        return code;
    size_t row = rows > 0 ? size / (size_t)rows : 0, ids = (size_t)(layers * top_k);
    if (json_array_size(shape) != 3 || rows < 0 || row * (size_t)rows != size || row % ids)
        return fail(in, err, "shape [%lld, %lld, %lld] does not fit %zu bytes", (long long)rows,
                    (long long)layers, (long long)top_k, size);
    size_t width = row / ids;
    if (rows == 0)
        return MZ_OK;
    if (width != 1 && width != 2 && width != 4 && width != 8)
        return fail(in, err, "ids of %zu bytes", width);
    return add_integers(in, data, size, (int)width, err);
}

/* `shape` NULL: flat, told by the options. `width`: bytes of an id where nothing else tells. */
static mz_code add_base64(routed_import *in, const json_t *text, const json_t *shape, int width,
                          mz_err *err) {
    size_t length = json_string_length(text), size;
    unsigned char *data = malloc(length / 4 * 3 + 3);
    mz_code code = MZ_OK;
    if (!data)
        return mz_fail_nomem(err, "ids of an answer");
    if (!mz_base64_decode(json_string_value(text), length, data, &size)) {
        code = fail(in, err, "routed experts are not valid base64");
    } else if (!shape && size >= 6 && memcmp(data, "\x93NUMPY", 6) == 0) {
        code = add_npy(in, data, size, err);
    } else if (shape) {
        code = add_shaped(in, data, size, shape, err);
    } else if (in->options->layers <= 0 || in->options->top_k <= 0) {
        code = fail(in, err,
                    "%zu bytes of routed experts without a shape: pass --layers L (rows per token, "
                    "dense layers included if recorded) and --top-k K",
                    size);
    } else {
        code = settle(in, in->options->layers, in->options->top_k, err);
        if (!code)
            code = add_integers(in, data, size, width, err);
    }
    free(data);
    return code;
}

static mz_code add_lists(routed_import *in, const json_t *rows, mz_err *err) {
    const json_t *first = json_array_get(rows, 0);
    mz_code code = settle(in, (int64_t)json_array_size(first),
                          (int64_t)json_array_size(json_array_get(first, 0)), err);
    for (size_t t = 0; t < json_array_size(rows) && !code; t++) {
        const json_t *row = json_array_get(rows, t);
        if (json_array_size(row) != (size_t)in->layers)
            return fail(in, err, "row %zu does not list %lld layers", t, (long long)in->layers);
        for (size_t l = 0; l < (size_t)in->layers && !code; l++) {
            const json_t *ids = json_array_get(row, l);
            if (json_array_size(ids) != (size_t)in->top_k)
                return fail(in, err, "row %zu, layer %zu does not list %lld ids", t, l,
                            (long long)in->top_k);
            for (size_t i = 0; i < (size_t)in->top_k && !code; i++)
                code = json_is_integer(json_array_get(ids, i))
                           ? add_id(in, json_integer_value(json_array_get(ids, i)), err)
                           : fail(in, err, "row %zu, layer %zu: not a whole number", t, l);
        }
    }
    return code;
}

/* Appends routed experts in any of the forms; null or absent: none. */
static mz_code add_routed(routed_import *in, const json_t *routed, int width, mz_err *err) {
    width = in->options->id_bytes > 0 ? (int)in->options->id_bytes : width;
    if (width == 3)
        return mz_fail(err, MZ_EINPUT, "--id-bytes: 3 is not 1, 2 or 4");
    if (!routed || json_is_null(routed))
        return MZ_OK;
    if (json_is_string(routed))
        return add_base64(in, routed, NULL, width, err);
    if (json_is_string(json_object_get(routed, "data")) &&
        json_is_array(json_object_get(routed, "shape")))
        return add_base64(in, json_object_get(routed, "data"), json_object_get(routed, "shape"),
                          width, err);
    if (json_is_array(routed))
        return json_array_size(routed) ? add_lists(in, routed, err) : MZ_OK;
    return fail(in, err, "routed experts are neither base64, data with a shape, nor lists");
}

/* Whether the k ids of a row are what a dense layer leaves: all 0 or all -1. */
static bool no_data(const int32_t *id, int64_t top_k) {
    for (int64_t i = 1; i < top_k; i++)
        if (id[i] != id[0])
            return false;
    return id[0] <= 0;
}

/* Whether they cannot be a choice; with one expert per token 0 can. */
static bool no_choice(const int32_t *id, int64_t top_k) {
    return no_data(id, top_k) && (top_k > 1 || id[0] < 0);
}

/* Finds the dense layers: what --dense-layers says, or those without data in all rows. */
static mz_code find_dense(routed_import *in, int64_t rows, mz_err *err) {
    if (in->options->dense_layers) {
        mz_id_rows told;
        mz_code code = mz_id_rows_make(in->path, NULL, 0, in->layers, (int32_t)in->top_k,
                                       in->options, &told, err);
        in->dense = told.dense;
        return code;
    }
    in->dense = mz_calloc((size_t)in->layers, sizeof *in->dense);
    if (!in->dense)
        return mz_fail_nomem(err, "layers");
    for (int64_t l = 0; l < in->layers; l++) {
        bool sure = true; /* that what holds no data holds no choice */
        in->dense[l] = true;
        for (int64_t t = 0; t < rows && in->dense[l]; t++) {
            const int32_t *id = in->id + (t * in->layers + l) * in->top_k;
            in->dense[l] = no_data(id, in->top_k);
            sure = sure && no_choice(id, in->top_k);
        }
        if (in->dense[l] && !sure)
            return fail(in, err,
                        "layer %lld: with one expert per token zeros may be expert 0 or a dense "
                        "layer: pass --dense-layers none or L,L,...",
                        (long long)l);
    }
    return MZ_OK;
}

/* The layers that hold nothing in any row of the first answer with data; creates the trace. */
static mz_code settle_layers(routed_import *in, int64_t rows, mz_err *err) {
    int64_t used = 0, first = -1, last = -1;
    mz_code code = find_dense(in, rows, err);
    if (code)
        return code;
    for (int64_t l = 0; l < in->layers; l++) {
        if (in->dense[l])
            continue;
        used++;
        first = first < 0 ? l : first;
        last = l;
    }
    if (used == 0) {
        free(in->dense);
        in->dense = NULL;
        return MZ_OK;
    }
    in->facts.layers = (int32_t)used;
    in->facts.top_k = (int32_t)in->top_k;
    in->facts.ranks = 1;
    in->facts.has_sequences = true;
    in->block.layers = in->facts.layers;
    in->block.top_k = in->facts.top_k;
    in->block.step_per_block = in->facts.step_meaning != MZ_STEP_NONE;
    mz_import_note(&in->facts, "layers=%lld from %lld to %lld of %lld", (long long)used,
                   (long long)first, (long long)last, (long long)in->layers);
    if (in->options->filler_last)
        mz_import_note(&in->facts, "filler last=%s", in->options->filler_last);
    return mz_trace_create(in->output, &in->facts, in->write, &in->writer, err);
}

/* One token's ids of the MoE layers to `expert`; *filler: it has none. */
static mz_code take_token(const routed_import *in, int64_t token, uint16_t *expert, bool *filler,
                          mz_err *err) {
    const int32_t *id = in->id + token * in->layers * in->top_k;
    int64_t empty = 0;
    for (int64_t l = 0; l < in->layers; l++, id += in->top_k) {
        if (in->dense[l]) {
            if (!no_data(id, in->top_k))
                return fail(in, err, "row %lld: layer %lld has experts, but had none before",
                            (long long)token, (long long)l);
            continue;
        }
        empty += no_choice(id, in->top_k);
        for (int64_t i = 0; i < in->top_k && empty == 0; i++) {
            const char *fault = mz_id_fault(id[i], in->facts.experts, expert, (int32_t)i);
            if (fault)
                return fail(in, err, "row %lld, layer %lld: expert id %d %s", (long long)token,
                            (long long)l, id[i], fault);
            expert[i] = (uint16_t)id[i];
        }
        expert += in->top_k;
    }
    *filler = empty == in->facts.layers;
    if (empty > 0 && !*filler)
        return fail(in, err, "row %lld: %lld of %d layers have no experts", (long long)token,
                    (long long)empty, in->facts.layers);
    return MZ_OK;
}

/* Rows against the answer's tokens (0: unknown); as many rows as tokens leave the last one open. */
static mz_code check_rows(const routed_import *in, int64_t tokens, int64_t *rows, mz_err *err) {
    const int32_t *last = in->id + (*rows - 1) * in->layers * in->top_k;
    const char *filler = in->options->filler_last;
    bool empty = true;
    for (int64_t l = 0; l < in->layers; l++)
        empty = empty && no_choice(last + l * in->top_k, in->top_k);
    if (filler && strcmp(filler, "yes") != 0 && strcmp(filler, "no") != 0)
        return mz_fail(err, MZ_EINPUT, "--filler-last: '%.40s' is neither yes nor no", filler);
    if (tokens > 0 && *rows > tokens)
        return fail(in, err, "%lld rows for %lld tokens: check --layers, --top-k and --id-bytes",
                    (long long)*rows, (long long)tokens);
    if (tokens > 0 && *rows == tokens && !empty && !filler)
        return fail(in, err,
                    "%lld rows for %lld tokens, but the last token is never routed: pass "
                    "--filler-last yes (leave the last row out) or no (it is a token)",
                    (long long)*rows, (long long)tokens);
    if (filler && strcmp(filler, "yes") == 0 && (tokens == 0 || *rows == tokens) && !empty)
        --*rows;
    return MZ_OK;
}

/* What was added becomes a sequence. */
static mz_code end_sequence(routed_import *in, int64_t tokens, mz_err *err) {
    if (in->ids == 0)
        return MZ_OK;
    int64_t rows = (int64_t)in->ids / (in->layers * in->top_k), whole = 0, all = rows;
    mz_code code = check_rows(in, tokens, &rows, err);
    in->fillers += all - rows;
    if (!code && !in->dense)
        code = settle_layers(in, rows, err);
    if (code)
        return code;
    size_t row = (size_t)in->facts.layers * (size_t)in->top_k;
    if (!in->dense)
        in->fillers += rows;
    if (in->dense && !mz_grow((void **)&in->expert, &in->expert_room, (size_t)rows * row + 1,
                              sizeof *in->expert))
        return mz_fail_nomem(err, "a sequence");
    for (int64_t t = 0; t < rows && in->dense && !code; t++) {
        bool filler = false;
        code = take_token(in, t, in->expert + (size_t)whole * row, &filler, err);
        in->fillers += filler;
        whole += !filler;
    }
    in->ids = 0;
    if (code || whole == 0)
        return code;
    in->dense_rows += whole * (in->layers - in->facts.layers);
    return mz_block_add(&in->block, in->expert, NULL, whole, -1, in->writer, in->report, err);
}

/* A count of tokens in `counter`; absent: 0. */
static mz_code count_in(const routed_import *in, const json_t *counter, const char *key,
                        int64_t *count, mz_err *err) {
    const json_t *member = json_object_get(counter, key);
    *count = json_integer_value(member);
    if (json_is_integer(member) && (*count < 0 || *count > INT32_MAX))
        return fail(in, err, "\"%s\" is not a number of tokens from 0 to %d", key, INT32_MAX);
    return MZ_OK;
}

/* Tokens of an answer, from the object that counts them; 0: it does not. */
static mz_code tokens_of(const routed_import *in, const json_t *counter, int64_t *tokens,
                         mz_err *err) {
    int64_t prompt, completion, start;
    mz_code code = count_in(in, counter, "prompt_tokens", &prompt, err);
    if (!code)
        code = count_in(in, counter, "completion_tokens", &completion, err);
    if (!code)
        code = count_in(in, counter, "routed_experts_start_len", &start, err);
    if (code)
        return code;
    bool both = json_is_integer(json_object_get(counter, "prompt_tokens")) &&
                json_is_integer(json_object_get(counter, "completion_tokens"));
    *tokens = both ? prompt + completion - start : 0;
    if (*tokens < 0)
        return fail(in, err, "routed_experts_start_len %lld, but there are %lld tokens",
                    (long long)start, (long long)(prompt + completion));
    return MZ_OK;
}

static mz_code take_choices(routed_import *in, const json_t *answer, bool *any, mz_err *err) {
    const json_t *choices = json_object_get(answer, "choices");
    const json_t *prompt = json_object_get(answer, "prompt_routed_experts");
    size_t count = json_array_size(choices);
    int64_t tokens = 0;
    mz_code code =
        count > 1 ? MZ_OK : tokens_of(in, json_object_get(answer, "usage"), &tokens, err);
    if (!code)
        code = add_routed(in, prompt, 2, err);
    *any = *any || in->ids > 0;
    for (size_t i = 0; i < count && !code; i++) {
        const json_t *choice = json_array_get(choices, i);
        const json_t *extension = json_object_get(choice, "sgl_ext");
        code = add_routed(in, json_object_get(extension, "routed_experts"), 4, err);
        if (!code)
            code = add_routed(in, json_object_get(choice, "routed_experts"), 2, err);
        *any = *any || in->ids > 0;
        if (!code)
            code = end_sequence(in, tokens, err);
    }
    return code;
}

static bool has_routed(const json_t *holder) {
    const json_t *routed = json_object_get(holder, "routed_experts");
    return routed && !json_is_null(routed);
}

/* Places of an answer that hold its routed experts. */
static int places_of(const json_t *answer) {
    const json_t *choices = json_object_get(answer, "choices"), *choice;
    int most = 0;
    size_t i;
    json_array_foreach(choices, i, choice) {
        int here = has_routed(choice) + has_routed(json_object_get(choice, "sgl_ext"));
        most = here > most ? here : most;
    }
    return most + has_routed(answer) + has_routed(json_object_get(answer, "meta_info")) +
           has_routed(json_object_get(answer, "sgl_ext"));
}

static mz_code take_answer(routed_import *in, const json_t *answer, mz_err *err) {
    const json_t *info = json_object_get(answer, "meta_info");
    const json_t *extension = json_object_get(answer, "sgl_ext");
    const char *model = json_string_value(json_object_get(answer, "model"));
    bool any = false;
    in->answer++;
    in->ids = 0;
    if (places_of(answer) > 1)
        return fail(in, err,
                    "routed experts stand in it twice (meta_info, sgl_ext, choices, or by "
                    "themselves): leave one");
    if (model && !in->writer && !in->options->name && strlen(model) < sizeof in->facts.name &&
        mz_text_is_clean(model))
        strcpy(in->facts.name, model);
    mz_code code = add_routed(in, json_object_get(info, "routed_experts"), 4, err);
    if (!code)
        code = add_routed(in, json_object_get(extension, "routed_experts"), 4, err);
    any = in->ids > 0;
    int64_t tokens = 0;
    if (!code && any)
        code = tokens_of(in, info ? info : json_object_get(answer, "usage"), &tokens, err);
    if (!code && any)
        code = end_sequence(in, tokens, err);
    if (!code)
        code = take_choices(in, answer, &any, err);
    if (!code)
        code = add_routed(in, json_object_get(answer, "routed_experts"), 2, err);
    any = any || in->ids > 0;
    if (!code)
        code = end_sequence(in, 0, err);
    if (!code && !any)
        code = fail(in, err, "no routed experts in it (routed_experts, prompt_routed_experts)");
    return code ? code : mz_import_stopped(in->app, err);
}

static mz_code read_lines(routed_import *in, mz_jsonl *lines, mz_err *err) {
    mz_code code = MZ_OK;
    while (!code && lines->object) {
        code = take_answer(in, lines->object, err);
        if (!code)
            code = mz_jsonl_next(lines, err);
    }
    return code;
}

static mz_code take_element(void *self, size_t index, json_t *answer, mz_err *err) {
    (void)index;
    return take_answer(self, answer, err);
}

static mz_code read_document(routed_import *in, mz_err *err) {
    json_t *rest = NULL;
    mz_code code = mz_json_list(in->path, NULL, take_element, in, &rest, err);
    if (!code && json_is_object(rest))
        code = take_answer(in, rest, err);
    if (!code && in->answer == 0)
        code = mz_fail(err, MZ_EINPUT, "%s: no answer in it", in->path);
    json_decref(rest);
    return code;
}

/* Lines of answers if the first line is a whole object, else one document. */
static mz_code read_file(routed_import *in, const char *path, mz_err *err) {
    mz_jsonl lines;
    mz_err not_lines;
    in->path = path;
    in->answer = 0;
    mz_code code = mz_jsonl_open(path, &lines, err);
    if (!code) {
        bool by_line = mz_jsonl_next(&lines, &not_lines) == MZ_OK && lines.object;
        if (by_line)
            code = read_lines(in, &lines, err);
        mz_jsonl_close(&lines);
        if (!by_line)
            code = read_document(in, err);
    }
    return code;
}

static void put_note(const routed_import *in, mz_import_report *report) {
    report->skipped = in->dense_rows + in->fillers;
    if (report->skipped)
        snprintf(report->note, sizeof report->note,
                 "%lld of dense layers, %lld of filler tokens; the last token of a sequence has no "
                 "row",
                 (long long)in->dense_rows, (long long)in->fillers);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "routed experts of a server's answers",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    if (options->experts <= 0)
        return mz_import_ask(err, files[0], "the number of experts is", "experts");
    routed_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (routed_import){
        .app = app, .options = options, .output = output, .write = write, .report = report};
    mz_code code = mz_import_facts(app, options, &defaults, &in->facts, err);
    in->facts.experts = (int32_t)options->experts;
    mz_progress progress = mz_progress_start(&app->log, "importing", "files", count);
    for (int i = 0; i < count && !code; i++) {
        code = read_file(in, files[i], err);
        mz_progress_update(&progress, i + 1);
    }
    mz_progress_end(&progress);
    if (!code && !in->writer)
        code = mz_fail(err, MZ_EINPUT, "%s: no row with experts", files[0]);
    if (!code)
        code = mz_block_write(&in->block, in->writer, report, err);
    if (!code)
        code = mz_import_close(files[0], report, &in->writer, err);
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    put_note(in, report);
    mz_block_free(&in->block);
    free(in->dense);
    free(in->id);
    free(in->expert);
    free(in);
    return code;
}

const mz_importer mz_import_routed_json = {
    .name = "routed-json",
    .summary = "routed experts in answers of SGLang and vLLM (.json, .jsonl)",
    .answers = "experts top-k layers id-bytes filler-last dense-layers",
    .recognise = recognise,
    .import = import_files,
};
