/* moe-balance's log (JSON lines), one line per layer and batch: {"layer", "batch_id",
 * "origin_rows": [source device of each token], "topk_experts": [[ids] x tokens], "topk_weights":
 * [[...]] or absent}. A batch is a step, a device a source rank (the highest one that sent anything
 * is the last). Lines may come in any order: the whole log is held in memory. */
#include "traces/importers/gather.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/jsonl.h"

#include <stdlib.h>
#include <string.h>

typedef struct balance_import {
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_gather gather;
    bool known;      /* top-k and weights are settled */
    int64_t *tokens; /* of the line from each device */
    int64_t *device; /* of each token of the line */
    size_t room, device_room;
    mz_import_report *report;
} balance_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return mz_head_first(head, size) == '{' && mz_head_has(head, size, "\"batch_id\"") &&
                   (mz_head_has(head, size, "\"origin_rows\"") ||
                    mz_head_has(head, size, "\"topk_experts\""))
               ? 90
               : 0;
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
    in->facts.has_weight = json_object_get(lines->object, "topk_weights") != NULL &&
                           !json_is_null(json_object_get(lines->object, "topk_weights"));
    in->known = true;
    return MZ_OK;
}

/* Devices of the line's tokens, and how many each of them has. */
static mz_code read_devices(balance_import *in, const mz_jsonl *lines, size_t count, mz_err *err) {
    json_t *origin;
    mz_code code = mz_jsonl_array(lines, "origin_rows", &origin, err);
    if (code)
        return code;
    if (json_array_size(origin) != count)
        return mz_jsonl_fail(lines, err, "%zu origin_rows for %zu tokens", json_array_size(origin),
                             count);
    if (!mz_grow((void **)&in->device, &in->device_room, count + 1, sizeof *in->device))
        return mz_fail_nomem(err, "source devices");
    for (size_t t = 0; t < count; t++) {
        const json_t *member = json_array_get(origin, t);
        int64_t device = json_integer_value(member);
        if (!json_is_integer(member) || device < 0 || device >= MZ_RANKS_MAX)
            return mz_jsonl_fail(lines, err, "origin_rows[%zu] is not a device from 0 to %d", t,
                                 MZ_RANKS_MAX - 1);
        if (device >= in->facts.ranks)
            in->facts.ranks = (int32_t)device + 1;
        in->device[t] = device;
    }
    if (!mz_grow((void **)&in->tokens, &in->room, (size_t)in->facts.ranks + 1, sizeof *in->tokens))
        return mz_fail_nomem(err, "source devices");
    memset(in->tokens, 0, (size_t)in->facts.ranks * sizeof *in->tokens);
    for (size_t t = 0; t < count; t++)
        in->tokens[in->device[t]]++;
    return MZ_OK;
}

/* The tokens that came from one device, in order. */
static mz_code take_device(balance_import *in, const mz_jsonl *lines, const mz_gather_key *key,
                           const json_t *rows, const json_t *weights, mz_err *err) {
    uint16_t *expert;
    float *weight;
    int32_t k = in->facts.top_k;
    mz_code code = mz_gather_pairs(&in->gather, key, in->tokens[key->rank], &expert, &weight, err);
    for (size_t t = 0; t < json_array_size(rows) && !code; t++) {
        char what[48];
        if (in->device[t] != key->rank)
            continue;
        snprintf(what, sizeof what, "topk_experts[%zu]", t);
        code =
            mz_jsonl_ids(lines, what, json_array_get(rows, t), k, in->facts.experts, expert, err);
        expert += k;
        if (code || !in->facts.has_weight)
            continue;
        snprintf(what, sizeof what, "topk_weights[%zu]", t);
        code = mz_jsonl_weights(lines, what, json_array_get(weights, t), k, weight, err);
        weight += k;
    }
    return code;
}

static mz_code take_line(void *self, const mz_jsonl *lines, mz_err *err) {
    balance_import *in = self;
    mz_gather_key key = {0};
    json_t *rows;
    mz_code code = mz_jsonl_int(lines, "layer", 0, MZ_LAYERS_MAX, &key.layer, err);
    if (!code)
        code = mz_jsonl_int(lines, "batch_id", 0, INT64_MAX / 2, &key.step, err);
    if (!code)
        code = mz_jsonl_array(lines, "topk_experts", &rows, err);
    if (!code && json_array_size(rows) == 0)
        code = mz_jsonl_fail(lines, err, "\"topk_experts\" lists no token");
    if (!code && !in->known)
        code = take_facts(in, lines, rows, err);
    if (!code)
        code = read_devices(in, lines, json_array_size(rows), err);
    if (code)
        return code;
    const json_t *weights = json_object_get(lines->object, "topk_weights");
    if (in->facts.has_weight && json_array_size(weights) != json_array_size(rows))
        return mz_jsonl_fail(lines, err, "\"topk_weights\" is not a list of %zu tokens",
                             json_array_size(rows));
    for (int32_t r = 0; r < in->facts.ranks && !code; r++) {
        key.rank = r;
        if (in->tokens[r] > 0)
            code = take_device(in, lines, &key, rows, weights, err);
    }
    return code;
}

static mz_code write_trace(balance_import *in, const char *path, const char *output,
                           const mz_trace_write_options *write, mz_err *err) {
    mz_code code = mz_gather_settle(&in->gather, err);
    if (code)
        return mz_err_prefix(err, "%s", path);
    mz_import_note(&in->facts, "ranks=highest source device + 1");
    code = mz_gather_write_all(&in->gather, output, write, in->report, err);
    return code == MZ_EINPUT ? mz_err_prefix(err, "%s", path) : code;
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "moe-balance log",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .phase = MZ_PHASE_PREFILL,
                                                .meaning = MZ_STEP_FORWARD};
    if (mz_import_need_phase(err, files[0], options))
        return MZ_EINPUT;
    balance_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (balance_import){.options = options, .report = report};
    in->gather.facts = &in->facts;
    mz_code code = mz_import_facts(app, options, &defaults, &in->facts, err);
    for (int i = 0; i < count && !code; i++)
        code = mz_import_lines(app, files[i], take_line, in, err);
    if (!code)
        code = write_trace(in, files[0], output, write, err);
    mz_gather_free(&in->gather);
    free(in->tokens);
    free(in->device);
    free(in);
    return code;
}

const mz_importer mz_import_moe_balance = {
    .name = "moe-balance",
    .summary = "moe-balance log (.jsonl), one line per layer and batch",
    .recognise = recognise,
    .import = import_files,
};
