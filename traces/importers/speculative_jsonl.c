/* speculative-moe's log (JSON lines): {"dataset", "problem_id", "layer", "token_idx", "experts":
 * [3, 7], "gating_probs": [0.68, 0.32]}. A problem of a dataset is a sequence, a dataset a domain.
 */
#include "traces/importers/table.h"
#include "traces/importers/tokens.h"

#include "common/base/arena.h"
#include "traces/jsonl.h"

#include <stdlib.h>
#include <string.h>

typedef struct speculative_import {
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_tokens tokens;
    mz_domains domains;
    uint16_t *expert; /* of one row */
    float *weight;
} speculative_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return mz_head_first(head, size) == '{' && mz_head_has(head, size, "\"problem_id\"") &&
                   mz_head_has(head, size, "\"experts\"") &&
                   mz_head_has(head, size, "\"token_idx\"")
               ? 90
               : 0;
}

static mz_code take_facts(speculative_import *in, const mz_jsonl *lines, mz_err *err) {
    size_t top_k = json_array_size(json_object_get(lines->object, "experts"));
    if (in->options->experts <= 0)
        return mz_import_ask(err, mz_input_path(lines->input), "the number of experts is",
                             "experts");
    if (top_k == 0 || top_k > MZ_MAX_TOP_K)
        return mz_jsonl_fail(lines, err, "\"experts\" is not a list of 1 to %d expert ids",
                             MZ_MAX_TOP_K);
    if (in->options->top_k > 0 && in->options->top_k != (int64_t)top_k)
        return mz_jsonl_fail(lines, err, "top-%zu in the file, but --top-k %lld", top_k,
                             (long long)in->options->top_k);
    in->facts.top_k = (int32_t)top_k;
    in->facts.experts = (int32_t)in->options->experts;
    in->facts.has_weight = json_object_get(lines->object, "gating_probs") != NULL;
    mz_code code = mz_import_normalized(mz_input_path(lines->input), in->options, &in->facts, err);
    if (code)
        return code;
    in->expert = mz_calloc(top_k, sizeof *in->expert);
    in->weight = mz_calloc(top_k, sizeof *in->weight);
    return in->expert && in->weight ? MZ_OK : mz_fail_nomem(err, "a row");
}

/* Number of the row's sequence. */
static mz_code sequence_of(speculative_import *in, const mz_jsonl *lines, int32_t *sequence,
                           mz_err *err) {
    const json_t *problem = json_object_get(lines->object, "problem_id");
    const char *dataset;
    char *name = json_dumps(problem, JSON_ENCODE_ANY | JSON_COMPACT), *whole = NULL;
    int32_t domain;
    mz_code code = MZ_OK;
    if (!json_is_string(problem) && !json_is_integer(problem))
        code = mz_jsonl_fail(lines, err, "\"problem_id\" is missing, or no text or number");
    if (!code)
        code = mz_jsonl_text(lines, "dataset", &dataset, err);
    if (!code)
        code = mz_domain_of(&in->domains, dataset, &domain, err);
    if (!code && (!name || !(whole = malloc(strlen(dataset) + strlen(name) + 2))))
        code = mz_fail_nomem(err, "names of sequences");
    if (!code) {
        sprintf(whole, "%s/%s", dataset, name);
        code = mz_tokens_sequence(&in->tokens, whole, domain, sequence, err);
    }
    free(name);
    free(whole);
    return code;
}

static mz_code take_row(void *self, const mz_jsonl *lines, mz_err *err) {
    speculative_import *in = self;
    int32_t sequence;
    int64_t token, layer;
    mz_code code = in->expert ? MZ_OK : take_facts(in, lines, err);
    if (!code)
        code = sequence_of(in, lines, &sequence, err);
    if (!code)
        code = mz_jsonl_int(lines, "token_idx", 0, INT64_MAX / 2, &token, err);
    if (!code)
        code = mz_jsonl_int(lines, "layer", 0, MZ_LAYERS_MAX, &layer, err);
    if (!code)
        code = mz_jsonl_ids(lines, "experts", json_object_get(lines->object, "experts"),
                            in->facts.top_k, in->facts.experts, in->expert, err);
    if (!code)
        code = mz_tokens_weights(&in->tokens, lines, "gating_probs", in->weight, err);
    if (!code)
        code = mz_jsonl_fit(lines, "gating_probs", in->weight, &in->facts, err);
    return code ? code
                : mz_tokens_add(&in->tokens, sequence, token, layer, in->expert, in->weight, err);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "speculative-moe log",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    speculative_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (speculative_import){.options = options};
    in->tokens = mz_tokens_make(&in->facts, output);
    mz_code code = mz_import_facts(app, options, &defaults, &in->facts, err);
    for (int i = 0; i < count && !code; i++)
        code = mz_import_lines(app, files[i], take_row, in, err);
    if (!code) {
        code = mz_tokens_write(app, &in->tokens, options, output, write, report, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, count > 1 ? "%s and the other files" : "%s", files[0]);
    }
    if (!code && report->skipped)
        snprintf(report->note, sizeof report->note, "of tokens that lack a layer");
    mz_tokens_free(&in->tokens);
    mz_domains_free(&in->domains);
    free(in->expert);
    free(in->weight);
    free(in);
    return code;
}

const mz_importer mz_import_speculative_jsonl = {
    .name = "speculative",
    .summary = "speculative-moe log (.jsonl), one row per problem, token and layer",
    .answers = "experts top-k normalized",
    .recognise = recognise,
    .import = import_files,
};
