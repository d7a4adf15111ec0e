/* The vLLM routing logger that several projects share (JSON lines): {"type": "meta", "top_k",
 * "num_experts"?, "model_id"?, ...}, then {"type": "route", "req_id", "token_idx", "layer",
 * "topk_ids": [...], "topk_weights": [...]}. A request is a sequence.
 *
 * A server's profiling run pollutes the start: thousands of rows of equal dummy tokens. Rows at the
 * start of a file that equal the first row of their layer, ids and weights, are left out when there
 * are at least PROFILE_ROWS of them; --skip-rows N leaves out the first N of all instead. */
#include "traces/importers/table.h"
#include "traces/importers/tokens.h"

#include "common/base/arena.h"
#include "traces/jsonl.h"

#include <stdlib.h>
#include <string.h>

enum { PROFILE_ROWS = 32 };
static const char WEIGHTS[] = "topk_weights";

typedef struct logger_row {
    int32_t sequence;
    int64_t token, layer;
    uint16_t *expert; /* [top_k] */
    float *weight;
} logger_row;

/* A row that equals the first one of its layer. */
typedef struct equal_row {
    int32_t sequence;
    int64_t token, line;
    size_t first; /* of the layers' first rows */
} equal_row;

typedef struct logger_import {
    const mz_import_options *options;
    const char *path; /* of the current file */
    mz_trace_facts facts;
    mz_tokens tokens;
    int64_t top_k, experts; /* of the meta line, 0 unknown */
    int64_t rows;           /* of all files so far */
    logger_row row;         /* the current one */
    int64_t *first_layer;   /* layers of the file whose first row is kept, to compare with */
    uint16_t *first_expert;
    float *first_weight;
    size_t firsts, room[3];
    equal_row equal[PROFILE_ROWS]; /* the first rows of the file, which may be profiling */
    int64_t equals;
    bool started; /* a row that differs was met in the file */
    mz_import_report *report;
} logger_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    if (mz_head_first(head, size) != '{' || !mz_head_has(head, size, "\"topk_ids\"") ||
        !mz_head_has(head, size, "\"token_idx\""))
        return 0;
    return mz_head_has(head, size, "\"route\"") ? 90 : 60;
}

static mz_code take_meta(logger_import *in, const mz_jsonl *lines, mz_err *err) {
    const char *model = json_string_value(json_object_get(lines->object, "model_id"));
    mz_code code = MZ_OK;
    if (json_is_integer(json_object_get(lines->object, "top_k")))
        code = mz_jsonl_int(lines, "top_k", 1, MZ_MAX_TOP_K, &in->top_k, err);
    if (!code && json_is_integer(json_object_get(lines->object, "num_experts")))
        code = mz_jsonl_int(lines, "num_experts", 1, MZ_EXPERTS_MAX, &in->experts, err);
    if (!code && in->row.expert && in->top_k && in->top_k != in->facts.top_k)
        code = mz_jsonl_fail(lines, err, "\"top_k\" %lld, but there were rows of top-%d before",
                             (long long)in->top_k, in->facts.top_k);
    if (model && !in->options->name && strlen(model) < sizeof in->facts.name &&
        mz_text_is_clean(model))
        strcpy(in->facts.name, model);
    return code;
}

/* The first row settles what the rest must look like. */
static mz_code take_facts(logger_import *in, const mz_jsonl *lines, mz_err *err) {
    size_t listed = json_array_size(json_object_get(lines->object, "topk_ids"));
    int64_t top_k = in->top_k ? in->top_k : (int64_t)listed, experts = in->options->experts;
    if (experts > 0 && in->experts > 0 && experts != in->experts)
        return mz_jsonl_fail(lines, err, "%lld experts in the file, but --experts %lld",
                             (long long)in->experts, (long long)experts);
    if (experts <= 0)
        experts = in->experts;
    if (experts <= 0)
        return mz_import_ask(err, mz_input_path(lines->input), "the number of experts is",
                             "experts");
    if (in->options->top_k > 0 && in->options->top_k != top_k)
        return mz_jsonl_fail(lines, err, "top-%lld in the file, but --top-k %lld", (long long)top_k,
                             (long long)in->options->top_k);
    if (top_k < 1 || top_k > MZ_MAX_TOP_K)
        return mz_jsonl_fail(lines, err, "\"topk_ids\" is not a list of 1 to %d expert ids",
                             MZ_MAX_TOP_K);
    in->facts.top_k = (int32_t)top_k;
    in->facts.experts = (int32_t)experts;
    in->facts.has_weight = json_object_get(lines->object, WEIGHTS) != NULL;
    mz_code code = mz_import_normalized(mz_input_path(lines->input), in->options, &in->facts, err);
    if (code)
        return code;
    in->row.expert = mz_calloc((size_t)top_k, sizeof *in->row.expert);
    in->row.weight = mz_calloc((size_t)top_k, sizeof *in->row.weight);
    return in->row.expert && in->row.weight ? MZ_OK : mz_fail_nomem(err, "a row");
}

static mz_code read_row(logger_import *in, const mz_jsonl *lines, mz_err *err) {
    const json_t *object = lines->object, *request = json_object_get(object, "req_id");
    char name[32];
    const char *text = name;
    mz_code code = MZ_OK;
    if (json_is_string(request))
        text = json_string_value(request);
    else if (json_is_integer(request))
        snprintf(name, sizeof name, "%lld", (long long)json_integer_value(request));
    else
        return mz_jsonl_fail(lines, err, "\"req_id\" is missing, or no text or number");
    code = mz_tokens_sequence(&in->tokens, text, -1, &in->row.sequence, err);
    if (!code)
        code = mz_jsonl_int(lines, "token_idx", 0, INT64_MAX / 2, &in->row.token, err);
    if (!code)
        code = mz_jsonl_int(lines, "layer", 0, MZ_LAYERS_MAX, &in->row.layer, err);
    if (!code)
        code = mz_jsonl_ids(lines, "topk_ids", json_object_get(object, "topk_ids"), in->facts.top_k,
                            in->facts.experts, in->row.expert, err);
    return code ? code : mz_tokens_weights(&in->tokens, lines, WEIGHTS, in->row.weight, err);
}

/* Whether the row equals row *first, the first one of its layer (which it may be). */
static mz_code like_first(logger_import *in, bool *like, size_t *first, mz_err *err) {
    size_t k = (size_t)in->facts.top_k, i = 0;
    while (i < in->firsts && in->first_layer[i] != in->row.layer)
        i++;
    *first = i;
    *like = true;
    if (i < in->firsts) {
        *like = memcmp(in->first_expert + i * k, in->row.expert, k * sizeof(uint16_t)) == 0 &&
                memcmp(in->first_weight + i * k, in->row.weight, k * sizeof(float)) == 0;
        return MZ_OK;
    }
    if (!mz_grow((void **)&in->first_layer, &in->room[0], i + 1, sizeof *in->first_layer) ||
        !mz_grow((void **)&in->first_expert, &in->room[1], (i + 1) * k, sizeof *in->first_expert) ||
        !mz_grow((void **)&in->first_weight, &in->room[2], (i + 1) * k, sizeof *in->first_weight))
        return mz_fail_nomem(err, "first rows");
    in->first_layer[i] = in->row.layer;
    memcpy(in->first_expert + i * k, in->row.expert, k * sizeof(uint16_t));
    memcpy(in->first_weight + i * k, in->row.weight, k * sizeof(float));
    in->firsts++;
    return MZ_OK;
}

/* One of the equal rows, which are no profiling, to the tokens. */
static mz_code keep_equal(logger_import *in, const equal_row *row, mz_err *err) {
    size_t k = (size_t)in->facts.top_k;
    const float *weight = in->first_weight + row->first * k;
    mz_code code = mz_weights_fit(WEIGHTS, weight, &in->facts, err);
    if (code)
        return mz_err_prefix(err, "%s: line %lld", in->path, (long long)row->line);
    return mz_tokens_add(&in->tokens, row->sequence, row->token, in->first_layer[row->first],
                         in->first_expert + row->first * k, weight, err);
}

/* The run of equal rows at the start of the file has ended: profiling, or the log itself. */
static mz_code end_start(logger_import *in, mz_err *err) {
    mz_code code = MZ_OK;
    if (in->equals >= PROFILE_ROWS)
        in->report->skipped += in->equals;
    for (int64_t i = 0; in->equals < PROFILE_ROWS && i < in->equals && !code; i++)
        code = keep_equal(in, &in->equal[i], err);
    in->started = true;
    return code;
}

/* A row before the first one that differs; *taken: it is one of the equal ones. */
static mz_code take_start(logger_import *in, int64_t line, bool *taken, mz_err *err) {
    size_t first;
    mz_code code = like_first(in, taken, &first, err);
    if (code || !*taken)
        return code ? code : end_start(in, err);
    if (in->equals < PROFILE_ROWS)
        in->equal[in->equals] = (equal_row){in->row.sequence, in->row.token, line, first};
    in->equals++;
    return MZ_OK;
}

static mz_code take_row(logger_import *in, const mz_jsonl *lines, mz_err *err) {
    bool taken = false;
    mz_code code = in->row.expert ? MZ_OK : take_facts(in, lines, err);
    if (!code)
        code = read_row(in, lines, err);
    if (code)
        return code;
    if (in->rows++ < in->options->skip_rows) {
        in->report->skipped++;
        return MZ_OK;
    }
    if (in->options->skip_rows <= 0 && !in->started)
        code = take_start(in, mz_input_line_number(lines->input), &taken, err);
    if (!code && !taken)
        code = mz_jsonl_fit(lines, WEIGHTS, in->row.weight, &in->facts, err);
    return code || taken ? code
                         : mz_tokens_add(&in->tokens, in->row.sequence, in->row.token,
                                         in->row.layer, in->row.expert, in->row.weight, err);
}

static mz_code take_line(void *self, const mz_jsonl *lines, mz_err *err) {
    logger_import *in = self;
    const char *type = "route";
    if (json_object_get(lines->object, "type")) {
        mz_code code = mz_jsonl_text(lines, "type", &type, err);
        if (code)
            return code;
    }
    if (strcmp(type, "meta") == 0)
        return take_meta(in, lines, err);
    if (strcmp(type, "route") == 0)
        return take_row(in, lines, err);
    return mz_jsonl_fail(lines, err, "type \"%.40s\" is neither meta nor route", type);
}

static mz_code read_file(const mz_app *app, logger_import *in, const char *path, mz_err *err) {
    in->path = path;
    in->firsts = 0;
    in->equals = 0;
    in->started = false;
    mz_code code = mz_import_lines(app, path, take_line, in, err);
    return code || in->started || in->options->skip_rows > 0 ? code : end_start(in, err);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "vLLM routing logger",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    logger_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (logger_import){.options = options, .report = report};
    in->tokens = mz_tokens_make(&in->facts, output);
    mz_code code = mz_import_facts(app, options, &defaults, &in->facts, err);
    for (int i = 0; i < count && !code; i++)
        code = read_file(app, in, files[i], err);
    int64_t start = report->skipped;
    if (!code && start > 0 && in->tokens.rows.records == 0)
        code = mz_fail(err, MZ_EINPUT, "%s: no row but the %lld %s", files[0], (long long)start,
                       options->skip_rows > 0 ? "left out: pass a smaller --skip-rows"
                                              : "equal ones of a profiling run");
    mz_import_note(&in->facts, "rows left out at the start=%lld", (long long)start);
    if (!code) {
        code = mz_tokens_write(app, &in->tokens, options, output, write, report, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, count > 1 ? "%s and the other files" : "%s", files[0]);
    }
    if (!code && report->skipped)
        snprintf(report->note, sizeof report->note,
                 "%lld at the start (profiling), %lld of tokens that lack a layer",
                 (long long)start, (long long)(report->skipped - start));
    mz_tokens_free(&in->tokens);
    free(in->row.expert);
    free(in->row.weight);
    free(in->first_layer);
    free(in->first_expert);
    free(in->first_weight);
    free(in);
    return code;
}

const mz_importer mz_import_vllm_logger = {
    .name = "vllm-logger",
    .summary = "vLLM routing logger (.jsonl), one row per request, token and layer",
    .answers = "experts top-k skip-rows normalized",
    .recognise = recognise,
    .import = import_files,
};
