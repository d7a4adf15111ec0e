/* The gpt-oss "Fingerprinting" JSON: one file per answer, router_data = one object per generated
 * token, {"token_N": {"layer_L": {"selected_experts": [...], "selected_probs": [...]}}}, N the
 * absolute position. Every file is one sequence; blocks of whole sequences become the micro-batches
 * of step 0, in the order the files were given. */
#include "traces/importers/common.h"
#include "traces/importers/json_list.h"
#include "traces/importers/table.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* The two models that such files were written of, told apart by their layers. */
static const struct known {
    const char *name;
    int32_t layers, experts;
    int64_t hidden, intermediate;
} models[] = {{"gpt-oss-20b", 24, 32, 2880, 2880}, {"gpt-oss-120b", 36, 128, 2880, 2880}};

typedef struct json_import {
    mz_app *app;
    const mz_import_options *options;
    const char *path;
    int64_t tokens, position; /* of the current file, so far */
    mz_sequence sequence;     /* of it */
    mz_trace_facts facts;
    mz_block block;
    mz_domains domains;
    mz_trace_writer *writer;
    mz_import_report *report;
} json_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    if (mz_head_first(head, size) != '{')
        return 0;
    if (mz_head_has(head, size, "\"router_data\""))
        return 80;
    return mz_head_has(head, size, "\"full_text\"") &&
                   mz_head_has(head, size, "\"original_prompt\"")
               ? 70
               : 0;
}

/* N of "token_N", or -1. */
static int64_t position_of(const char *key) {
    static const char prefix[] = "token_";
    char *end;
    if (strncmp(key, prefix, strlen(prefix)) != 0 || !isdigit((unsigned char)key[strlen(prefix)]))
        return -1;
    long long number = strtoll(key + strlen(prefix), &end, 10);
    return *end == '\0' && number < INT64_MAX ? number : -1;
}

/* The layers of entry `index`: the one member of {"token_N": {...}}. */
static mz_code token_layers(const char *path, json_t *entry, size_t index, json_t **layers,
                            int64_t *position, mz_err *err) {
    void *member = json_object_iter(entry);
    *position = json_object_size(entry) == 1 ? position_of(json_object_iter_key(member)) : -1;
    if (*position < 0 || !json_is_object(json_object_iter_value(member)))
        return mz_fail(err, MZ_EINPUT, "%s: router_data[%zu]: not an object {\"token_N\": {...}}",
                       path, index);
    *layers = json_object_iter_value(member);
    return MZ_OK;
}

/* Reads one layer of one token; `where` names it for messages. */
static mz_code read_layer(const json_import *in, json_t *layer, const char *where, uint16_t *expert,
                          float *weight, mz_err *err) {
    json_t *ids = json_object_get(layer, "selected_experts");
    json_t *probs = json_object_get(layer, "selected_probs");
    size_t k = (size_t)in->facts.top_k;
    if (json_array_size(ids) != k || json_array_size(probs) != k)
        return mz_fail(
            err, MZ_EINPUT,
            "%s: selected_experts and selected_probs must list %zu entries, as the first "
            "token does",
            where, k);
    for (size_t i = 0; i < k; i++) {
        json_t *id = json_array_get(ids, i), *prob = json_array_get(probs, i);
        if (!json_is_integer(id))
            return mz_fail(err, MZ_EINPUT,
                           "%s: selected_experts[%zu]: the expert id is not a whole number", where,
                           i);
        const char *fault =
            mz_id_fault(json_integer_value(id), in->facts.experts, expert, (int32_t)i);
        if (fault)
            return mz_fail(err, MZ_EINPUT, "%s: selected_experts[%zu]: expert id %lld %s", where, i,
                           (long long)json_integer_value(id), fault);
        double value = json_number_value(prob);
        if (!json_is_number(prob) || !(value >= 0) || !(value <= 1e30))
            return mz_fail(err, MZ_EINPUT, "%s: selected_probs[%zu] is not a number of at least 0",
                           where, i);
        expert[i] = (uint16_t)json_integer_value(id);
        weight[i] = (float)value;
    }
    mz_code code = mz_weights_fit("selected_probs", weight, &in->facts, err);
    return code ? mz_err_prefix(err, "%s", where) : MZ_OK;
}

static mz_code read_token(const json_import *in, const char *path, json_t *entry, size_t index,
                          int64_t *position, uint16_t *expert, float *weight, mz_err *err) {
    json_t *layers;
    int64_t number;
    mz_code code = token_layers(path, entry, index, &layers, &number, err);
    if (code)
        return code;
    if (index > 0 && number != *position + 1)
        return mz_fail(err, MZ_EINPUT, "%s: router_data[%zu]: token_%lld follows token_%lld", path,
                       index, (long long)number, (long long)*position);
    *position = number;
    if (json_object_size(layers) != (size_t)in->facts.layers)
        return mz_fail(err, MZ_EINPUT, "%s: router_data[%zu]: %zu layers, not %d", path, index,
                       json_object_size(layers), in->facts.layers);
    for (int32_t l = 0; l < in->facts.layers; l++) {
        char key[32], where[MZ_ERR_MAX / 2];
        snprintf(key, sizeof key, "layer_%d", l);
        snprintf(where, sizeof where, "%s: router_data[%zu].token_%lld.%s", path, index,
                 (long long)number, key);
        json_t *layer = json_object_get(layers, key);
        if (!json_is_object(layer))
            return mz_fail(err, MZ_EINPUT, "%s: not there", where);
        code = read_layer(in, layer, where, expert + (size_t)l * (size_t)in->facts.top_k,
                          weight + (size_t)l * (size_t)in->facts.top_k, err);
        if (code)
            return code;
    }
    return MZ_OK;
}

/* The known model with so many layers and, where the user says, experts; NULL: another one. */
static const struct known *known_model(size_t layers, int64_t experts) {
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        if ((size_t)models[i].layers == layers && (experts <= 0 || experts == models[i].experts))
            return &models[i];
    return NULL;
}

/* Layers, top-k and experts from the first file. */
static mz_code take_shape(json_import *in, const char *path, json_t *entry,
                          const mz_import_options *options, mz_err *err) {
    json_t *layers;
    int64_t position;
    mz_code code = token_layers(path, entry, 0, &layers, &position, err);
    if (code)
        return code;
    size_t count = json_object_size(layers);
    size_t k =
        json_array_size(json_object_get(json_object_get(layers, "layer_0"), "selected_experts"));
    if (count == 0 || count > MZ_LAYERS_MAX || k == 0 || k > MZ_MAX_TOP_K)
        return mz_fail(err, MZ_EINPUT, "%s: router_data[0]: no layer_0 with selected_experts",
                       path);
    if (options->top_k > 0 && options->top_k != (int64_t)k)
        return mz_fail(err, MZ_EINPUT, "%s: top-%zu in the file, but --top-k %lld", path, k,
                       (long long)options->top_k);
    const struct known *model = known_model(count, options->experts);
    if (options->experts <= 0 && !model)
        return mz_import_ask(err, path, "the number of experts is", "experts");
    mz_trace_facts *facts = &in->facts;
    facts->layers = (int32_t)count;
    facts->top_k = (int32_t)k;
    facts->ranks = 1;
    facts->has_weight = facts->has_sequences = true;
    facts->experts = options->experts > 0 ? (int32_t)options->experts : model->experts;
    if (model && !options->name)
        strcpy(facts->name, model->name);
    if (model)
        mz_import_note(facts, "model=%s, by its %d layers", model->name, model->layers);
    if (model && options->experts <= 0)
        snprintf(in->report->note, sizeof in->report->note,
                 "taken for %s with %d experts, by its %d layers (--experts says otherwise)",
                 model->name, model->experts, model->layers);
    if (model && facts->hidden == 0)
        facts->hidden = model->hidden;
    if (model && facts->intermediate == 0)
        facts->intermediate = model->intermediate;
    in->block.layers = facts->layers;
    in->block.top_k = facts->top_k;
    in->block.weights = true;
    in->block.step_per_block = facts->step_meaning != MZ_STEP_NONE;
    return MZ_OK;
}

/* One element of router_data behind those before; the first one of all settles the facts. */
static mz_code take_token(void *self, size_t index, json_t *entry, mz_err *err) {
    json_import *in = self;
    mz_code code = in->facts.layers ? MZ_OK : take_shape(in, in->path, entry, in->options, err);
    size_t row = (size_t)in->facts.layers * (size_t)in->facts.top_k;
    if (code)
        return code;
    in->tokens = (int64_t)index + 1;
    code = mz_sequence_grow(&in->sequence, in->tokens, row, true, err);
    if (code)
        return mz_err_prefix(err, "%s: router_data[%zu]", in->path, index);
    return read_token(in, in->path, entry, index, &in->position, in->sequence.expert + index * row,
                      in->sequence.weight + index * row, err);
}

/* One file, which is one sequence; the first one creates the trace. */
static mz_code read_file(json_import *in, const char *output, const mz_trace_write_options *write,
                         mz_err *err) {
    json_t *rest = NULL;
    int32_t domain = -1;
    in->tokens = 0;
    mz_code code = mz_json_list(in->path, "router_data", take_token, in, &rest, err);
    if (!code && in->tokens == 0)
        code = mz_fail(err, MZ_EINPUT, "%s: no router_data, or no token in it", in->path);
    const char *dataset = json_string_value(json_object_get(rest, "dataset"));
    if (!code && dataset)
        code = mz_domain_of(&in->domains, dataset, &domain, err);
    json_decref(rest);
    if (!code && !in->writer) {
        if (in->options->weights_normalized < 0)
            in->facts.weights_normalized = mz_weights_normalized(
                in->sequence.weight, in->tokens * in->facts.layers, in->facts.top_k);
        code = mz_trace_create(output, &in->facts, write, &in->writer, err);
    }
    if (code)
        return code;
    code = mz_block_add(&in->block, in->sequence.expert, in->sequence.weight, in->tokens, domain,
                        in->writer, in->report, err);
    return code == MZ_EINPUT ? mz_err_prefix(err, "%s", in->path) : code;
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "gpt-oss router fingerprints",
                                                .licence = "Apache-2.0",
                                                .router = "softmax",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    json_import *in = calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    in->app = app;
    in->options = options;
    in->report = report;
    mz_code code = mz_import_facts(app, options, &defaults, &in->facts, err);
    mz_progress progress = mz_progress_start(&app->log, "importing", "files", count);
    for (int i = 0; i < count && !code; i++) {
        in->path = files[i];
        code = read_file(in, output, write, err);
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
    mz_sequence_free(&in->sequence);
    free(in);
    return code;
}

const mz_importer mz_import_gpt_oss_json = {
    .name = "gpt-oss-json",
    .summary = "gpt-oss router fingerprints (.json), one file per sequence",
    .answers = "experts top-k normalized",
    .phase = "decode",
    .recognise = recognise,
    .import = import_files,
};
