/* Expert ids as a .npy array [tokens, layers, top_k], as vLLM and others return them, with an
 * optional array of gate weights of the same shape and an optional CSV of sequence bounds
 * (first_row and num_tokens, or token_begin and tokens; dataset names the domain). The log has no
 * steps: blocks of whole sequences become the micro-batches of step 0. */
#include "traces/importers/common.h"
#include "traces/importers/table.h"

#include "traces/csv.h"
#include "traces/npy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct ids_import {
    mz_app *app;
    mz_npy ids, weights;
    mz_csv csv;
    int first_column, tokens_column, domain_column;
    mz_domains domains;
    mz_block block;
    mz_trace_facts facts;
    mz_trace_writer *writer;
    int64_t *row;  /* [layers * top_k] of one token */
    int64_t token; /* rows read so far */
    mz_import_report *report;
} ids_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    mz_npy_shape shape;
    mz_err err;
    if (mz_npy_parse(path, head, size, &shape, &err))
        return 0;
    return shape.dims == 3 && shape.kind != 'f' ? 60 : 0;
}

static mz_code open_ids(ids_import *in, const char *path, const mz_import_options *options,
                        mz_err *err) {
    mz_code code = mz_npy_open(path, &in->ids, err);
    if (code)
        return code;
    const mz_npy_shape *shape = &in->ids.shape;
    if (shape->dims != 3 || shape->kind == 'f')
        return mz_fail(err, MZ_EINPUT, "%s: not an integer array [tokens, layers, top_k]", path);
    if (shape->elements == 0)
        return mz_fail(err, MZ_EINPUT, "%s: the array is empty", path);
    if (shape->extent[1] > MZ_LAYERS_MAX || shape->extent[2] > MZ_MAX_TOP_K)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %lld layers and top-%lld are not plausible; the axes must be tokens, "
                       "layers, top_k",
                       path, (long long)shape->extent[1], (long long)shape->extent[2]);
    if (options->top_k > 0 && options->top_k != shape->extent[2])
        return mz_fail(err, MZ_EINPUT, "%s: top-%lld in the file, but --top-k %lld", path,
                       (long long)shape->extent[2], (long long)options->top_k);
    if (options->experts <= 0)
        return mz_import_ask(err, path, "the number of experts is", "experts");
    in->facts.layers = (int32_t)shape->extent[1];
    in->facts.top_k = (int32_t)shape->extent[2];
    in->facts.experts = (int32_t)options->experts;
    in->facts.ranks = 1;
    return MZ_OK;
}

/* Whether the first tokens' weights sum to one over the chosen experts. */
static mz_code look_normalized(const char *path, int32_t top_k, bool *normalized, mz_err *err) {
    mz_npy npy;
    float row[MZ_MAX_TOP_K];
    *normalized = true;
    mz_code code = mz_npy_open(path, &npy, err);
    int64_t rows = code ? 0 : npy.shape.elements / top_k;
    for (int64_t i = 0; i < rows && i < 1024 && !code; i++) {
        double sum = 0;
        code = mz_npy_read_float(&npy, row, top_k, err);
        for (int32_t j = 0; j < top_k && !code; j++)
            sum += row[j];
        if (!(fabs(sum - 1) < 0.01)) /* half precision: four roundings of 2^-11 and some margin */
            *normalized = false;
    }
    mz_npy_close(&npy);
    return code;
}

static mz_code open_weights(ids_import *in, const mz_import_options *options, mz_err *err) {
    if (!options->weights)
        return MZ_OK;
    mz_code code = mz_npy_open(options->weights, &in->weights, err);
    if (code)
        return code;
    const mz_npy_shape *ids = &in->ids.shape, *weights = &in->weights.shape;
    if (weights->dims != 3 || weights->kind != 'f' ||
        memcmp(ids->extent, weights->extent, 3 * sizeof ids->extent[0]) != 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: not a float array [%lld, %lld, %lld] as the ids of %s demand",
                       options->weights, (long long)ids->extent[0], (long long)ids->extent[1],
                       (long long)ids->extent[2], mz_input_path(in->ids.input));
    in->facts.has_weight = in->block.weights = true;
    if (options->weights_normalized < 0)
        code =
            look_normalized(options->weights, in->facts.top_k, &in->facts.weights_normalized, err);
    return code;
}

static mz_code open_sequences(ids_import *in, const mz_import_options *options, mz_err *err) {
    if (!options->sequences)
        return MZ_OK;
    mz_code code = mz_csv_open(options->sequences, &in->csv, err);
    if (code)
        return code;
    bool rows = mz_csv_column(&in->csv, "first_row") >= 0;
    if (!rows && mz_csv_column(&in->csv, "token_begin") < 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: line 1: no column named first_row (with num_tokens) or token_begin "
                       "(with tokens)",
                       options->sequences);
    code = mz_csv_need(&in->csv, rows ? "first_row" : "token_begin", &in->first_column, err);
    if (!code)
        code = mz_csv_need(&in->csv, rows ? "num_tokens" : "tokens", &in->tokens_column, err);
    in->domain_column = mz_csv_column(&in->csv, "dataset");
    if (in->domain_column < 0)
        in->domain_column = mz_csv_column(&in->csv, "domain");
    in->facts.has_sequences = true;
    return code;
}

/* Reads one token's ids and weights to `expert` and `weight` (NULL: read and forget). */
static mz_code read_token(ids_import *in, uint16_t *expert, float *weight, mz_err *err) {
    int32_t k = in->facts.top_k;
    int64_t row = (int64_t)in->facts.layers * k;
    mz_code code = mz_npy_read_int(&in->ids, in->row, row, err);
    for (int64_t i = 0; i < row && expert && !code; i++) {
        const char *fault =
            mz_id_fault(in->row[i], in->facts.experts, expert + i - i % k, (int32_t)(i % k));
        if (fault)
            return mz_fail(err, MZ_EINPUT, "%s: [%lld, %lld, %lld]: expert id %lld %s",
                           mz_input_path(in->ids.input), (long long)in->token, (long long)(i / k),
                           (long long)(i % k), (long long)in->row[i], fault);
        expert[i] = (uint16_t)in->row[i];
    }
    if (!code && in->weights.input)
        code = mz_npy_read_float(&in->weights, weight, row, err);
    for (int64_t i = 0; i < row && expert && in->weights.input && !code; i++)
        if (!(weight[i] >= 0) || !isfinite(weight[i]))
            return mz_fail(err, MZ_EINPUT,
                           "%s: [%lld, %lld, %lld]: weight %g is not finite and at least 0",
                           mz_input_path(in->weights.input), (long long)in->token,
                           (long long)(i / k), (long long)(i % k), (double)weight[i]);
    in->token++;
    return code;
}

static mz_code read_block(ids_import *in, int64_t tokens, bool named, int32_t domain, mz_err *err) {
    int64_t row = (int64_t)in->facts.layers * in->facts.top_k;
    mz_code code = mz_block_begin(&in->block, tokens, in->writer, in->report, err);
    for (int64_t t = 0; t < tokens && !code; t++)
        code = read_token(in, mz_block_expert(&in->block) + t * row,
                          in->weights.input ? mz_block_weight(&in->block) + t * row : NULL, err);
    return code ? code : mz_block_end(&in->block, tokens, named, domain, err);
}

/* Rows that belong to no sequence: read and left out. The block's free room serves as scratch. */
static mz_code skip_rows(ids_import *in, int64_t rows, mz_err *err) {
    mz_code code = mz_block_begin(&in->block, 1, in->writer, in->report, err);
    in->report->skipped += rows;
    for (; rows > 0 && !code; rows--)
        code = read_token(in, NULL, in->weights.input ? mz_block_weight(&in->block) : NULL, err);
    return code;
}

static mz_code next_sequence(ids_import *in, bool *end, mz_err *err) {
    int64_t first, tokens, total = in->ids.shape.extent[0];
    int32_t domain = -1;
    mz_code code = mz_csv_next(&in->csv, end, err);
    if (code || *end)
        return code;
    code = mz_csv_int(&in->csv, in->first_column, total, &first, err);
    if (!code)
        code = mz_csv_int(&in->csv, in->tokens_column, total, &tokens, err);
    if (code)
        return code;
    if (first < in->token || tokens < 1 || tokens > total - first)
        return mz_fail(err, MZ_EINPUT,
                       "%s: line %lld: rows %lld to %lld overlap the sequence before, are none, or "
                       "pass the %lld rows of %s",
                       mz_input_path(in->csv.input), (long long)mz_input_line_number(in->csv.input),
                       (long long)first, (long long)(first + tokens - 1), (long long)total,
                       mz_input_path(in->ids.input));
    if (in->domain_column >= 0)
        code = mz_domain_of(&in->domains, in->csv.field[in->domain_column], &domain, err);
    if (!code && first > in->token)
        code = skip_rows(in, first - in->token, err);
    return code ? code : read_block(in, tokens, true, domain, err);
}

static mz_code read_all(ids_import *in, mz_err *err) {
    int64_t total = in->ids.shape.extent[0];
    mz_progress progress = mz_progress_start(&in->app->log, "importing", "tokens", total);
    bool end = false;
    mz_code code = MZ_OK;
    while (!code && !end) {
        if (in->csv.input) {
            code = next_sequence(in, &end, err);
        } else {
            int64_t rest = total - in->token;
            code = read_block(in, rest < MZ_BLOCK_TOKENS ? rest : MZ_BLOCK_TOKENS, false, -1, err);
            end = in->token == total;
        }
        if (!code)
            code = mz_import_stopped(in->app, err);
        mz_progress_update(&progress, in->token);
    }
    if (!code && in->token < total)
        code = skip_rows(in, total - in->token, err);
    if (!code)
        code = mz_block_write(&in->block, in->writer, in->report, err);
    if (!code)
        code = mz_npy_finish(&in->ids, err);
    if (!code && in->weights.input)
        code = mz_npy_finish(&in->weights, err);
    mz_progress_end(&progress);
    return code;
}

static mz_code open_all(ids_import *in, const char *path, const mz_import_options *options,
                        mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .phase = MZ_PHASE_DECODE,
                                                .meaning = MZ_STEP_NONE};
    mz_code code = mz_import_facts(in->app, options, &defaults, &in->facts, err);
    if (!code)
        code = open_ids(in, path, options, err);
    if (!code)
        code = open_weights(in, options, err);
    if (!code)
        code = open_sequences(in, options, err);
    if (code)
        return code;
    in->block.layers = in->facts.layers;
    in->block.top_k = in->facts.top_k;
    in->block.step_per_block = in->facts.step_meaning != MZ_STEP_NONE;
    in->row = calloc((size_t)in->facts.layers * (size_t)in->facts.top_k, sizeof *in->row);
    return in->row ? MZ_OK : mz_fail_nomem(err, "one token's ids");
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    if (count != 1)
        return mz_fail(err, MZ_EINPUT,
                       "npy-ids takes one file of ids (weights: --weights FILE), got %d", count);
    ids_import *in = calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    in->app = app;
    in->report = report;
    mz_code code = open_all(in, files[0], options, err);
    if (!code)
        code = mz_trace_create(output, &in->facts, write, &in->writer, err);
    if (!code)
        code = read_all(in, err);
    if (!code)
        code = mz_trace_writer_close(&in->writer, err);
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    if (report->skipped)
        snprintf(report->note, sizeof report->note, "rows that belong to no sequence of %s",
                 options->sequences);
    mz_npy_close(&in->ids);
    mz_npy_close(&in->weights);
    mz_csv_close(&in->csv);
    mz_domains_free(&in->domains);
    mz_block_free(&in->block);
    free(in->row);
    free(in);
    return code;
}

const mz_importer mz_import_npy_ids = {
    .name = "npy-ids",
    .summary = "expert ids [tokens, layers, top_k] (.npy), --weights and --sequences beside it",
    .recognise = recognise,
    .import = import_files,
};
