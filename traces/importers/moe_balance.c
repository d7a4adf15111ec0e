/* moe-balance's log (JSON lines), one line per layer and batch: {"layer", "batch_id",
 * "origin_rows": [source device of each token], "topk_experts": [[ids] x tokens], "topk_weights":
 * [[...]] or absent}. A batch is a step, a device a source rank (the highest one that sent anything
 * is the last). Lines may come in any order: tokens are sorted, and memory is that of the sorting
 * and one batch. */
#include "traces/importers/gather.h"
#include "traces/importers/spill.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/jsonl.h"

#include <stdlib.h>
#include <string.h>

/* The beginning of a record; ids and then weights follow. */
typedef struct balance_key {
    int64_t step, line; /* lines of all files are counted through */
    int32_t layer, rank;
    int64_t token; /* within the line */
} balance_key;

typedef struct balance_import {
    const mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_gather gather;
    mz_spill tokens;
    unsigned char *record; /* one token as the spill holds it; not NULL: facts are settled */
    bool normalized;       /* the weights of every token so far sum to 1 */
    uint16_t *expert;      /* of one token */
    float *weight;
    int64_t line;
    unsigned char *call; /* records of one call, in order */
    size_t call_room;
    mz_trace_writer *writer;
    mz_import_report *report;
} balance_import;

static int by_call(const balance_key *x, const balance_key *y) {
    if (x->step != y->step)
        return x->step < y->step ? -1 : 1;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

static int by_place(const void *a, const void *b) {
    balance_key x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    int order = by_call(&x, &y);
    if (order != 0)
        return order;
    if (x.line != y.line)
        return x.line < y.line ? -1 : 1;
    return (x.token > y.token) - (x.token < y.token);
}

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return mz_head_first(head, size) == '{' && mz_head_has(head, size, "\"batch_id\"") &&
                   (mz_head_has(head, size, "\"origin_rows\"") ||
                    mz_head_has(head, size, "\"topk_experts\""))
               ? 90
               : 0;
}

/* The line's weights, or NULL. */
static const json_t *weights_of(const mz_jsonl *lines) {
    const json_t *weights = json_object_get(lines->object, "topk_weights");
    return json_is_null(weights) ? NULL : weights;
}

static mz_code take_facts(balance_import *in, const mz_jsonl *lines, const json_t *rows,
                          mz_err *err) {
    size_t top_k = json_array_size(json_array_get(rows, 0));
    if (in->options->experts <= 0)
        return mz_import_ask(err, mz_input_path(lines->input), "the number of experts is",
                             "experts");
    if (top_k == 0 || top_k > MZ_MAX_TOP_K)
        return mz_jsonl_fail(lines, err, "topk_experts[0] is not a list of 1 to %d expert ids",
                             MZ_MAX_TOP_K);
    if (in->options->top_k > 0 && in->options->top_k != (int64_t)top_k)
        return mz_jsonl_fail(lines, err, "top-%zu in the file, but --top-k %lld", top_k,
                             (long long)in->options->top_k);
    in->facts.top_k = (int32_t)top_k;
    in->facts.experts = (int32_t)in->options->experts;
    in->facts.has_weight = in->normalized = weights_of(lines) != NULL;
    mz_code code = mz_import_normalized(mz_input_path(lines->input), in->options, &in->facts, err);
    if (code)
        return code;
    in->tokens.size = sizeof(balance_key) + top_k * sizeof *in->expert +
                      (in->facts.has_weight ? top_k * sizeof *in->weight : 0);
    in->record = mz_calloc(1, in->tokens.size);
    in->expert = mz_calloc(top_k, sizeof *in->expert);
    in->weight = mz_calloc(top_k, sizeof *in->weight);
    return in->record && in->expert && in->weight ? MZ_OK : mz_fail_nomem(err, "a token");
}

/* The device that token `t` of the line came from. */
static mz_code read_device(balance_import *in, const mz_jsonl *lines, const json_t *origin,
                           size_t t, int32_t *rank, mz_err *err) {
    const json_t *member = json_array_get(origin, t);
    int64_t device = json_integer_value(member);
    if (!json_is_integer(member) || device < 0 || device >= MZ_RANKS_MAX)
        return mz_jsonl_fail(lines, err, "origin_rows[%zu] is not a device from 0 to %d", t,
                             MZ_RANKS_MAX - 1);
    *rank = (int32_t)device;
    if (device >= in->facts.ranks)
        in->facts.ranks = (int32_t)device + 1;
    return MZ_OK;
}

/* Token `t` of the line to the spill. */
static mz_code take_token(balance_import *in, const mz_jsonl *lines, const balance_key *key,
                          const json_t *row, const json_t *weights, mz_err *err) {
    size_t k = (size_t)in->facts.top_k, at = sizeof *key;
    char what[48];
    snprintf(what, sizeof what, "topk_experts[%lld]", (long long)key->token);
    mz_code code =
        mz_jsonl_ids(lines, what, row, in->facts.top_k, in->facts.experts, in->expert, err);
    snprintf(what, sizeof what, "topk_weights[%lld]", (long long)key->token);
    if (!code && in->facts.has_weight)
        code = mz_jsonl_weights(lines, what, weights, in->facts.top_k, in->weight, err);
    if (!code && in->facts.has_weight)
        code = mz_jsonl_fit(lines, what, in->weight, &in->facts, err);
    if (code)
        return code;
    memcpy(in->record, key, at);
    memcpy(in->record + at, in->expert, k * sizeof *in->expert);
    if (in->facts.has_weight)
        memcpy(in->record + at + k * sizeof *in->expert, in->weight, k * sizeof *in->weight);
    in->normalized = in->normalized && mz_weights_normalized(in->weight, 1, in->facts.top_k);
    return mz_spill_add(&in->tokens, in->record, err);
}

static mz_code take_tokens(balance_import *in, const mz_jsonl *lines, balance_key *key,
                           const json_t *rows, mz_err *err) {
    const json_t *weights = weights_of(lines);
    json_t *origin;
    size_t count = json_array_size(rows);
    mz_code code = mz_jsonl_array(lines, "origin_rows", &origin, err);
    if (code)
        return code;
    if (json_array_size(origin) != count)
        return mz_jsonl_fail(lines, err, "%zu origin_rows for %zu tokens", json_array_size(origin),
                             count);
    if (!in->facts.has_weight && weights)
        return mz_jsonl_fail(lines, err, "\"topk_weights\", which the first line has not");
    if (in->facts.has_weight && json_array_size(weights) != count)
        return mz_jsonl_fail(lines, err, "\"topk_weights\" is not a list of %zu tokens", count);
    for (size_t t = 0; t < count && !code; t++) {
        key->token = (int64_t)t;
        code = read_device(in, lines, origin, t, &key->rank, err);
        if (!code)
            code = take_token(in, lines, key, json_array_get(rows, t), json_array_get(weights, t),
                              err);
    }
    return code;
}

static mz_code take_line(void *self, const mz_jsonl *lines, mz_err *err) {
    balance_import *in = self;
    balance_key key = {.line = in->line++};
    int64_t layer;
    json_t *rows;
    mz_code code = mz_jsonl_int(lines, "layer", 0, MZ_LAYERS_MAX, &layer, err);
    if (!code)
        code = mz_jsonl_int(lines, "batch_id", 0, INT64_MAX / 2, &key.step, err);
    if (!code)
        code = mz_jsonl_array(lines, "topk_experts", &rows, err);
    if (!code && json_array_size(rows) == 0)
        code = mz_jsonl_fail(lines, err, "\"topk_experts\" lists no token");
    if (!code && !in->record)
        code = take_facts(in, lines, rows, err);
    if (!code)
        code = mz_labels_add(&in->gather.label, layer, err);
    if (code)
        return code;
    key.layer = (int32_t)layer;
    return take_tokens(in, lines, &key, rows, err);
}

/* The records of one call, `tokens` of them, into the gather. */
static mz_code gather_call(balance_import *in, int64_t tokens, mz_err *err) {
    size_t k = (size_t)in->facts.top_k, size = in->tokens.size, ids = k * sizeof(uint16_t);
    uint16_t *expert;
    float *weight;
    balance_key key;
    memcpy(&key, in->call, sizeof key);
    const mz_gather_key call = {.step = key.step, .layer = key.layer, .rank = key.rank};
    mz_code code = mz_gather_pairs(&in->gather, &call, tokens, &expert, &weight, err);
    for (int64_t t = 0; t < tokens && !code; t++) {
        const unsigned char *record = in->call + (size_t)t * size + sizeof key;
        memcpy(expert + (size_t)t * k, record, ids);
        if (weight)
            memcpy(weight + (size_t)t * k, record + ids, k * sizeof(float));
    }
    return code;
}

/* Writes the batch that is gathered. */
static mz_code write_batch(balance_import *in, mz_err *err) {
    mz_code code = mz_gather_write(&in->gather, in->writer, in->report, err);
    return code ? code : mz_import_stopped(in->app, err);
}

/* One record behind `tokens` of its call; what comes before a new call or batch is done with. */
static mz_code take_record(balance_import *in, const unsigned char *record, int64_t *tokens,
                           mz_err *err) {
    balance_key key, last;
    mz_code code = MZ_OK;
    memcpy(&key, record, sizeof key);
    if (*tokens > 0) {
        memcpy(&last, in->call, sizeof last);
        bool same = by_call(&last, &key) == 0;
        if (same && key.line != last.line)
            return mz_fail(err, MZ_EINPUT, "batch %lld, layer %d, rank %d: recorded twice",
                           (long long)key.step, key.layer, key.rank);
        if (!same) {
            code = gather_call(in, *tokens, err);
            *tokens = 0;
        }
        if (!code && key.step != last.step)
            code = write_batch(in, err);
    }
    if (!code && !mz_grow((void **)&in->call, &in->call_room, (size_t)*tokens + 1, in->tokens.size))
        code = mz_fail_nomem(err, "one call");
    if (!code)
        memcpy(in->call + (size_t)(*tokens)++ * in->tokens.size, record, in->tokens.size);
    return code;
}

static mz_code write_trace(balance_import *in, const char *output,
                           const mz_trace_write_options *write, mz_err *err) {
    const void *record = NULL;
    int64_t tokens = 0;
    if (!in->record)
        return mz_fail(err, MZ_EINPUT, "no line in it");
    mz_code code = mz_gather_settle_labels(&in->gather, err);
    mz_import_note(&in->facts, "ranks=highest source device + 1");
    if (in->options->weights_normalized < 0)
        in->facts.weights_normalized = in->normalized;
    in->report->weight_rows = in->facts.has_weight;
    in->report->weight_rows_off = !in->normalized;
    if (!code)
        code = mz_trace_create(output, &in->facts, write, &in->writer, err);
    if (!code)
        code = mz_spill_rewind(&in->tokens, err);
    while (!code) {
        code = mz_spill_next(&in->tokens, &record, err);
        if (code || !record)
            break;
        code = take_record(in, record, &tokens, err);
    }
    if (!code)
        code = gather_call(in, tokens, err);
    if (!code)
        code = write_batch(in, err);
    return code ? code : mz_trace_writer_close(&in->writer, err);
}

static void free_import(balance_import *in) {
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    mz_gather_free(&in->gather);
    mz_spill_free(&in->tokens);
    free(in->record);
    free(in->expert);
    free(in->weight);
    free(in->call);
    free(in);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "moe-balance log",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_FORWARD};
    balance_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (balance_import){.app = app, .options = options, .report = report};
    in->tokens = mz_spill_make(0, by_place, output);
    in->gather.facts = &in->facts;
    mz_code code = mz_import_facts(app, options, &defaults, &in->facts, err);
    for (int i = 0; i < count && !code; i++)
        code = mz_import_lines(app, files[i], take_line, in, err);
    if (!code) {
        code = write_trace(in, output, write, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, count > 1 ? "%s and the other files" : "%s", files[0]);
    }
    free_import(in);
    return code;
}

const mz_importer mz_import_moe_balance = {
    .name = "moe-balance",
    .summary = "moe-balance log (.jsonl), one line per layer and batch",
    .answers = "experts top-k normalized",
    .recognise = recognise,
    .import = import_files,
};
