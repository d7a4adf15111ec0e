/* The grouped-nf4 recordings (JSON lines): {"meta": {"model", "prompt", "steps", "layers", "top_k",
 * "n_experts", ...}}, then one line per generated token, {"step": i, "routed": {"0": [ids], ...}},
 * ids in ascending order. A file is one sequence. More ids may be recorded than the model's own
 * top-k ("top_k_native"); as their order is lost, all of them are taken, and only when --top-k says
 * so. Memory is one sequence. */
#include "traces/importers/common.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/jsonl.h"

#include <stdlib.h>
#include <string.h>

typedef struct nf4_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_block block;
    mz_domains domains;
    char (*key)[8];   /* names of the layers in "routed", ascending */
    int64_t native_k; /* the model's own top-k, 0: not known */
    mz_sequence sequence;
    mz_trace_writer *writer;
    mz_import_report *report;
} nf4_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return mz_head_first(head, size) == '{' && mz_head_has(head, size, "\"meta\"") &&
                   mz_head_has(head, size, "\"routed\"")
               ? 90
               : 0;
}

/* A whole number in the meta object; absent or null: 0. */
static mz_code meta_int(const mz_jsonl *lines, const char *key, int64_t high, int64_t *value,
                        mz_err *err) {
    const json_t *member = json_object_get(json_object_get(lines->object, "meta"), key);
    *value = 0;
    if (!member || json_is_null(member))
        return MZ_OK;
    *value = json_integer_value(member);
    if (!json_is_integer(member) || *value < 1 || *value > high)
        return mz_jsonl_fail(lines, err, "meta: \"%s\" is not a whole number from 1 to %lld", key,
                             (long long)high);
    return MZ_OK;
}

/* What was recorded against what the model chooses by itself. */
static mz_code check_top_k(nf4_import *in, const mz_jsonl *lines, int64_t recorded, mz_err *err) {
    const mz_import_options *options = in->options;
    const json_t *meta = json_object_get(lines->object, "meta");
    int64_t native;
    mz_code code = meta_int(lines, "top_k_native", MZ_MAX_TOP_K, &native, err);
    if (code)
        return code;
    if (native > 0 && options->native_k > 0 && native != options->native_k)
        return mz_jsonl_fail(lines, err, "meta: top_k_native is %lld, but --native-k %lld",
                             (long long)native, (long long)options->native_k);
    if (native == 0)
        native = options->native_k > 0 ? options->native_k : 0;
    in->native_k = native;
    if (native == 0 && json_is_true(json_object_get(meta, "top_k_overridden")))
        return mz_jsonl_fail(lines, err,
                             "meta: top-k was overridden, but the model's own is not in the file: "
                             "pass --native-k N");
    if (options->top_k > 0 && options->top_k != recorded)
        return mz_jsonl_fail(lines, err,
                             "%lld experts per token recorded, but --top-k %lld; ids are in "
                             "ascending order, so fewer cannot be told apart",
                             (long long)recorded, (long long)options->top_k);
    if (native > 0 && native != recorded && options->top_k <= 0)
        return mz_jsonl_fail(lines, err,
                             "%lld experts per token recorded, the model's own top-k is %lld; ids "
                             "are in ascending order, so these cannot be told apart: pass --top-k "
                             "%lld to take all as chosen",
                             (long long)recorded, (long long)native, (long long)recorded);
    return MZ_OK;
}

static mz_code take_facts(nf4_import *in, const mz_jsonl *lines, int64_t layers, int64_t top_k,
                          int64_t experts, mz_err *err) {
    const char *path = mz_input_path(lines->input);
    const char *model =
        json_string_value(json_object_get(json_object_get(lines->object, "meta"), "model"));
    if (in->options->experts > 0 && experts > 0 && in->options->experts != experts)
        return mz_jsonl_fail(lines, err, "%lld experts in the file, but --experts %lld",
                             (long long)experts, (long long)in->options->experts);
    if (in->options->experts > 0)
        experts = in->options->experts;
    if (experts == 0)
        return mz_import_ask(err, path, "the number of experts is", "experts");
    if (top_k > experts)
        return mz_jsonl_fail(lines, err, "top-%lld of %lld experts", (long long)top_k,
                             (long long)experts);
    if (in->writer &&
        (in->facts.layers != layers || in->facts.top_k != top_k || in->facts.experts != experts))
        return mz_fail(err, MZ_EINPUT,
                       "%s: %lld layers, top-%lld of %lld experts, unlike the files before", path,
                       (long long)layers, (long long)top_k, (long long)experts);
    if (in->writer)
        return MZ_OK;
    in->facts.layers = (int32_t)layers;
    in->facts.top_k = (int32_t)top_k;
    in->facts.experts = (int32_t)experts;
    in->facts.ranks = 1;
    in->facts.has_sequences = true;
    const char *name = model ? mz_base_name(model) : "";
    if (!in->options->name && name[0] && strlen(name) < sizeof in->facts.name)
        strcpy(in->facts.name, name);
    in->block.layers = in->facts.layers;
    in->block.top_k = in->facts.top_k;
    in->block.step_per_block = in->facts.step_meaning != MZ_STEP_NONE;
    in->key = mz_calloc((size_t)layers, sizeof *in->key);
    return in->key ? MZ_OK : mz_fail_nomem(err, "names of layers");
}

static int by_layer(const void *a, const void *b) {
    long x = strtol(a, NULL, 10), y = strtol(b, NULL, 10);
    return (x > y) - (x < y);
}

/* Names of the layers, from the first token; later files must have the same. */
static mz_code name_layers(nf4_import *in, const mz_jsonl *lines, json_t *routed, mz_err *err) {
    const char *key;
    json_t *value;
    int32_t n = 0;
    if (json_object_size(routed) != (size_t)in->facts.layers)
        return mz_jsonl_fail(lines, err, "\"routed\" has %zu layers, but meta says %d",
                             json_object_size(routed), in->facts.layers);
    json_object_foreach(routed, key, value) {
        size_t length = strlen(key);
        if (length == 0 || length >= sizeof in->key[0] || strspn(key, "0123456789") != length)
            return mz_jsonl_fail(lines, err, "routed: \"%.20s\" is not the number of a layer", key);
        strcpy(in->key[n++], key);
    }
    qsort(in->key, (size_t)n, sizeof *in->key, by_layer);
    for (int32_t l = 1; l < n; l++)
        if (by_layer(in->key[l - 1], in->key[l]) == 0)
            return mz_jsonl_fail(lines, err, "routed: \"%s\" and \"%s\" are one layer",
                                 in->key[l - 1], in->key[l]);
    if (atol(in->key[n - 1]) - atol(in->key[0]) == n - 1)
        mz_import_note(&in->facts, "layers=%s-%s", in->key[0], in->key[n - 1]);
    else
        mz_import_note(&in->facts, "layers=%d of those up to %s", n, in->key[n - 1]);
    mz_import_note(&in->facts, "ids within a token=ascending");
    if (in->native_k > 0)
        mz_import_note(&in->facts, "native top-k=%lld", (long long)in->native_k);
    return MZ_OK;
}

/* The current line as token `token`. */
static mz_code read_token(nf4_import *in, const mz_jsonl *lines, int64_t token, mz_err *err) {
    size_t row = (size_t)in->facts.layers * (size_t)in->facts.top_k;
    json_t *routed = json_object_get(lines->object, "routed");
    int64_t step;
    mz_code code = mz_jsonl_int(lines, "step", token, token, &step, err);
    if (code)
        return code;
    if (!json_is_object(routed) || json_object_size(routed) != (size_t)in->facts.layers)
        return mz_jsonl_fail(lines, err, "\"routed\" is not an object of %d layers",
                             in->facts.layers);
    code = mz_sequence_grow(&in->sequence, token + 1, row, false, err);
    if (code)
        return mz_err_prefix(err, "%s", mz_input_path(lines->input));
    uint16_t *expert = in->sequence.expert + (size_t)token * row;
    for (int32_t l = 0; l < in->facts.layers && !code; l++) {
        char what[24];
        snprintf(what, sizeof what, "routed.%s", in->key[l]);
        code = mz_jsonl_ids(lines, what, json_object_get(routed, in->key[l]), in->facts.top_k,
                            in->facts.experts, expert + l * in->facts.top_k, err);
    }
    return code;
}

/* The first line; leaves the second as the current one. */
static mz_code read_meta(nf4_import *in, mz_jsonl *lines, int64_t *steps, int32_t *domain,
                         mz_err *err) {
    int64_t layers, top_k, experts;
    mz_code code = mz_jsonl_next(lines, err);
    const json_t *meta = json_object_get(lines->object, "meta");
    if (!code && !json_is_object(meta))
        code = mz_jsonl_fail(lines, err, "not a line {\"meta\": {...}}");
    if (!code)
        code = meta_int(lines, "layers", MZ_LAYERS_MAX, &layers, err);
    if (!code)
        code = meta_int(lines, "top_k", MZ_MAX_TOP_K, &top_k, err);
    if (!code)
        code = meta_int(lines, "n_experts", MZ_EXPERTS_MAX, &experts, err);
    if (!code)
        code = meta_int(lines, "steps", INT32_MAX, steps, err);
    if (!code && (layers == 0 || top_k == 0))
        code = mz_jsonl_fail(lines, err, "meta: no \"%s\"", layers ? "top_k" : "layers");
    if (!code)
        code = check_top_k(in, lines, top_k, err);
    if (!code)
        code = take_facts(in, lines, layers, top_k, experts, err);
    if (code)
        return code;
    const char *prompt = json_string_value(json_object_get(meta, "prompt"));
    if (prompt)
        code = mz_domain_of(&in->domains, prompt, domain, err);
    if (!code)
        code = mz_jsonl_next(lines, err);
    if (!code && !lines->object)
        code = mz_fail(err, MZ_EINPUT, "%s: no token after the meta line",
                       mz_input_path(lines->input));
    return code;
}

static mz_code read_file(nf4_import *in, const char *path, const char *output,
                         const mz_trace_write_options *write, mz_err *err) {
    mz_jsonl lines;
    int64_t token = 0, steps = 0;
    int32_t domain = -1;
    mz_code code = mz_jsonl_open(path, &lines, err);
    if (!code)
        code = read_meta(in, &lines, &steps, &domain, err);
    if (!code && !in->writer) {
        code = name_layers(in, &lines, json_object_get(lines.object, "routed"), err);
        if (!code)
            code = mz_trace_create(output, &in->facts, write, &in->writer, err);
    }
    for (; !code && lines.object; token++) {
        code = read_token(in, &lines, token, err);
        if (!code)
            code = mz_jsonl_next(&lines, err);
    }
    if (!code && token < steps && !in->options->force)
        code = mz_fail(err, MZ_EINPUT,
                       "%s: %lld tokens, but the meta line says %lld: the file is truncated "
                       "(--force takes it all the same)",
                       path, (long long)token, (long long)steps);
    if (!code)
        code = mz_block_add(&in->block, in->sequence.expert, NULL, token, domain, in->writer,
                            in->report, err);
    mz_jsonl_close(&lines);
    return code;
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "grouped-nf4 router recording",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    nf4_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (nf4_import){.app = app, .options = options, .report = report};
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
        code = mz_block_write(&in->block, in->writer, report, err);
    if (!code)
        code = mz_import_close(files[0], report, &in->writer, err);
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    mz_block_free(&in->block);
    mz_domains_free(&in->domains);
    free(in->key);
    mz_sequence_free(&in->sequence);
    free(in);
    return code;
}

const mz_importer mz_import_nf4_jsonl = {
    .name = "nf4-jsonl",
    .summary = "grouped-nf4 recordings of decoding (.jsonl), one file per sequence",
    .answers = "experts top-k native-k",
    .phase = "decode",
    .recognise = recognise,
    .import = import_files,
};
