/* Expert ids as a .npy array [tokens, layers, top_k], as vLLM and SGLang return them, with an
 * optional array of gate weights of the same shape and an optional CSV of sequence bounds
 * (first_row and num_tokens, or token_begin and tokens; dataset names the domain). Several files
 * are one sequence each. Dense layers, which some versions record as rows of zeros, and tokens that
 * are zero in every layer (fillers) are left out. The log has no steps: blocks of whole sequences
 * become the micro-batches of step 0. */
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/csv.h"
#include "traces/npy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    LOOK_TOKENS = 64,      /* looked at to tell dense layers, */
    LOOK_VALUES = 1 << 23, /* but no more values than this */
    LOOK_WEIGHTS = 1024    /* rows looked at to tell whether weights sum to 1 */
};

/* More than any model has: layers, and ids of one token. */
enum { PLAUSIBLE_LAYERS = 256, PLAUSIBLE_IDS = 1 << 22 };

typedef struct ids_import {
    mz_app *app;
    mz_id_rows rows;
    bool filler_last;  /* the last row of a sequence is no token */
    float *row_weight; /* [layers * top_k] of one token */
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

/* Dense layers, from the first tokens that are not zero everywhere. */
static mz_code find_dense(ids_import *in, const char *path, const mz_import_options *options,
                          mz_err *err) {
    mz_npy npy;
    const int64_t *extent = in->ids.shape.extent;
    int64_t row = extent[1] * extent[2], rest = extent[0], have = 0;
    mz_id_rows look = {.layers = extent[1], .top_k = (int32_t)extent[2]};
    int64_t most = LOOK_VALUES / row < LOOK_TOKENS ? LOOK_VALUES / row + 1 : LOOK_TOKENS;
    int64_t *tokens = mz_calloc((size_t)most, (size_t)row * sizeof *tokens);
    if (!tokens)
        return mz_fail_nomem(err, "the first tokens");
    mz_code code = mz_npy_open(path, &npy, err);
    for (; rest > 0 && have < most && !code; rest--) {
        code = mz_npy_read_int(&npy, tokens + have * row, row, err);
        if (!code && (have > 0 || !mz_rows_zero(&look, tokens)))
            have++;
    }
    mz_npy_close(&npy);
    if (!code)
        code = mz_id_rows_make(path, tokens, have, extent[1], (int32_t)extent[2], options,
                               &in->rows, err);
    free(tokens);
    return code;
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
    /* Axes in another order would make a trace of thousands of layers, each of a few tokens. */
    const bool turned = shape->extent[1] > PLAUSIBLE_LAYERS && shape->extent[1] > shape->extent[0];
    if (turned || shape->extent[1] > MZ_LAYERS_MAX || shape->extent[2] > MZ_MAX_TOP_K ||
        shape->extent[1] * shape->extent[2] > PLAUSIBLE_IDS)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %lld layers and top-%lld are not plausible; the axes must be tokens, "
                       "layers, top_k",
                       path, (long long)shape->extent[1], (long long)shape->extent[2]);
    if (options->top_k > 0 && options->top_k != shape->extent[2])
        return mz_fail(err, MZ_EINPUT, "%s: top-%lld in the file, but --top-k %lld", path,
                       (long long)shape->extent[2], (long long)options->top_k);
    if (options->experts <= 0)
        return mz_import_ask(err, path, "the number of experts is", "experts");
    code = find_dense(in, path, options, err);
    if (code)
        return code;
    in->facts.model_layers = in->rows.kept < in->rows.layers ? (int32_t)in->rows.layers : 0;
    in->facts.layers = (int32_t)in->rows.kept;
    in->facts.top_k = in->rows.top_k;
    in->facts.experts = (int32_t)options->experts;
    in->facts.ranks = 1;
    if (in->facts.model_layers)
        mz_import_note(&in->facts, "dense layers=%d of %d left out",
                       in->facts.model_layers - in->facts.layers, in->facts.model_layers);
    return MZ_OK;
}

/* Whether the first weights that are not all 0, as those of fillers are, sum to one over the chosen
 * experts, in the layers that are kept. */
static mz_code look_normalized(const ids_import *in, const char *path, bool *normalized,
                               mz_err *err) {
    mz_npy npy;
    float row[MZ_MAX_TOP_K];
    int64_t looked = 0;
    *normalized = true;
    mz_code code = mz_npy_open(path, &npy, err);
    int64_t rows = code ? 0 : npy.shape.elements / in->rows.top_k;
    for (int64_t i = 0; i < rows && looked < LOOK_WEIGHTS && *normalized && !code; i++) {
        bool zero = true;
        code = mz_npy_read_float(&npy, row, in->rows.top_k, err);
        for (int32_t j = 0; j < in->rows.top_k && !code; j++)
            zero = zero && row[j] == 0;
        if (code || zero || in->rows.dense[i % in->rows.layers])
            continue;
        looked++;
        *normalized = mz_weights_normalized(row, 1, in->rows.top_k);
    }
    *normalized = *normalized && looked > 0;
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
        code = look_normalized(in, options->weights, &in->facts.weights_normalized, err);
    return code;
}

static mz_code open_sequences(ids_import *in, const mz_import_options *options, mz_err *err) {
    if (!options->sequences)
        return MZ_OK;
    mz_code code = mz_csv_open(options->sequences, &in->csv, err);
    if (!code)
        code = mz_csv_column(&in->csv, "first_row", &in->first_column, err);
    bool rows = !code && in->first_column >= 0;
    if (!code && !rows)
        code = mz_csv_column(&in->csv, "token_begin", &in->first_column, err);
    if (!code && in->first_column < 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: line 1: no column named first_row (with num_tokens) or token_begin "
                       "(with tokens)",
                       options->sequences);
    if (!code)
        code = mz_csv_need(&in->csv, rows ? "num_tokens" : "tokens", &in->tokens_column, err);
    if (!code)
        code = mz_csv_column(&in->csv, "dataset", &in->domain_column, err);
    if (!code && in->domain_column < 0)
        code = mz_csv_column(&in->csv, "domain", &in->domain_column, err);
    in->facts.has_sequences = true;
    return code;
}

/* The weights of one token, of the layers that are kept. */
static mz_code read_weights(ids_import *in, float *weight, mz_err *err) {
    int64_t k = in->rows.top_k, row = in->rows.layers * k;
    mz_code code = mz_npy_read_float(&in->weights, in->row_weight, row, err);
    for (int64_t i = 0; i < row && weight && !code; i++) {
        float value = in->row_weight[i];
        if (in->rows.dense[i / k])
            continue;
        if (!(value >= 0) || !isfinite(value))
            return mz_fail(err, MZ_EINPUT,
                           "%s: [%lld, %lld, %lld]: weight %g is not finite and at least 0",
                           mz_input_path(in->weights.input), (long long)in->token,
                           (long long)(i / k), (long long)(i % k), (double)value);
        *weight++ = value;
        if (i % k == k - 1 && mz_weights_fit("the weights", weight - k, &in->facts, err))
            return mz_err_prefix(err, "%s: [%lld, %lld]", mz_input_path(in->weights.input),
                                 (long long)in->token, (long long)(i / k));
    }
    return code;
}

/* Reads one token's ids and weights to `expert` and `weight` (NULL: read and forget); *kept: it is
 * no filler. */
static mz_code read_token(ids_import *in, uint16_t *expert, float *weight, bool *kept,
                          mz_err *err) {
    int64_t k = in->rows.top_k, at = 0;
    mz_code code = mz_npy_read_int(&in->ids, in->row, in->rows.layers * k, err);
    *kept = expert && !(k > 1 && mz_rows_zero(&in->rows, in->row));
    const char *fault = !code && *kept ? mz_rows_take(&in->rows, in->row, expert, &at) : NULL;
    if (fault)
        return mz_fail(err, MZ_EINPUT, "%s: [%lld, %lld, %lld]: expert id %lld %s",
                       mz_input_path(in->ids.input), (long long)in->token, (long long)(at / k),
                       (long long)(at % k), (long long)in->row[at], fault);
    if (!code && in->weights.input)
        code = read_weights(in, *kept ? weight : NULL, err);
    in->token++;
    return code;
}

/* Rows that are read and left out. The block's free room serves as scratch. */
static mz_code skip_rows(ids_import *in, int64_t rows, const char *reason, mz_err *err) {
    mz_code code = MZ_OK;
    bool kept;
    mz_rows_skip(in->report, rows, reason);
    for (; rows > 0 && !code; rows--)
        code = read_token(in, NULL, NULL, &kept, err);
    return code;
}

/* `last`: the block ends a sequence. */
static mz_code read_block(ids_import *in, int64_t tokens, bool last, bool named, int32_t domain,
                          mz_err *err) {
    int64_t row = (int64_t)in->facts.layers * in->facts.top_k, taken = 0;
    int64_t data = tokens - (last && in->filler_last);
    bool kept = false;
    mz_code code = mz_block_begin(&in->block, tokens, in->writer, in->report, err);
    if (code)
        return mz_err_prefix(err, "%s", mz_input_path(in->ids.input));
    for (int64_t t = 0; t < data && !code; t++) {
        code = read_token(in, mz_block_expert(&in->block) + taken * row,
                          in->weights.input ? mz_block_weight(&in->block) + taken * row : NULL,
                          &kept, err);
        taken += kept;
    }
    if (!code)
        code = skip_rows(in, tokens - data, "filler rows of last tokens", err);
    mz_rows_skip(in->report, data - taken, "tokens without any expert (fillers)");
    mz_rows_skip(in->report, taken * (in->rows.layers - in->rows.kept),
                 "rows of dense layers (all zero)");
    if (code || taken == 0)
        return code;
    return mz_block_end(&in->block, taken, named, domain, err);
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
        code = skip_rows(in, first - in->token, "rows that belong to no sequence", err);
    return code ? code : read_block(in, tokens, true, true, domain, err);
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
            const int64_t most = mz_block_most(&in->block);
            end = rest <= most;
            code = read_block(in, end ? rest : most, end, false, -1, err);
        }
        if (!code)
            code = mz_import_stopped(in->app, err);
        mz_progress_update(&progress, in->token);
    }
    if (!code && in->token < total)
        code = skip_rows(in, total - in->token, "rows that belong to no sequence", err);
    if (!code)
        code = mz_block_write(&in->block, in->writer, in->report, err);
    if (!code)
        code = mz_npy_finish(&in->ids, err);
    if (!code && in->weights.input)
        code = mz_npy_finish(&in->weights, err);
    mz_progress_end(&progress);
    return code;
}

/* Several files: one sequence each, of the same layers and top-k. */
static mz_code read_files(ids_import *in, char **files, int count, mz_err *err) {
    mz_progress progress = mz_progress_start(&in->app->log, "importing", "files", count);
    mz_code code = MZ_OK;
    for (int i = 0; i < count && !code; i++) {
        mz_npy_close(&in->ids);
        code = mz_npy_open(files[i], &in->ids, err);
        const mz_npy_shape *shape = &in->ids.shape;
        if (!code && (shape->dims != 3 || shape->kind == 'f' ||
                      shape->extent[1] != in->rows.layers || shape->extent[2] != in->rows.top_k))
            code = mz_fail(err, MZ_EINPUT, "%s: not [tokens, %lld, %d] integers, as %s", files[i],
                           (long long)in->rows.layers, in->rows.top_k, files[0]);
        in->token = 0;
        if (!code && shape->extent[0] > 0)
            code = read_block(in, shape->extent[0], true, true, -1, err);
        if (!code)
            code = mz_npy_finish(&in->ids, err);
        if (!code)
            code = mz_import_stopped(in->app, err);
        mz_progress_update(&progress, i + 1);
    }
    mz_progress_end(&progress);
    return code ? code : mz_block_write(&in->block, in->writer, in->report, err);
}

static mz_code take_answers(ids_import *in, int count, const mz_import_options *options,
                            mz_err *err) {
    const char *filler = options->filler_last;
    if (count > 1 && (options->weights || options->sequences))
        return mz_fail(err, MZ_EINPUT,
                       "--weights and --sequences belong to one file of ids, got %d", count);
    if (filler && strcmp(filler, "yes") != 0 && strcmp(filler, "no") != 0)
        return mz_fail(err, MZ_EINPUT, "--filler-last: '%.40s' is not yes or no", filler);
    in->filler_last = filler && strcmp(filler, "yes") == 0;
    if (filler)
        mz_import_note(&in->facts, "filler-last=%s", filler);
    return MZ_OK;
}

static mz_code open_all(ids_import *in, const char *path, const mz_import_options *options,
                        mz_err *err) {
    static const mz_import_defaults defaults = {
        .name = "unknown", .router = "unknown", .kind = MZ_TRACE_PAIRS, .meaning = MZ_STEP_NONE};
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
    size_t row = (size_t)in->rows.layers * (size_t)in->rows.top_k;
    in->row = mz_calloc(row, sizeof *in->row);
    in->row_weight = mz_calloc(row, sizeof *in->row_weight);
    return in->row && in->row_weight ? MZ_OK : mz_fail_nomem(err, "one token's ids");
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    ids_import *in = calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    in->app = app;
    in->report = report;
    mz_code code = open_all(in, files[0], options, err);
    if (!code)
        code = mz_import_normalized(files[0], options, &in->facts, err);
    if (!code)
        code = take_answers(in, count, options, err);
    in->facts.has_sequences |= count > 1;
    if (!code)
        code = mz_trace_create(output, &in->facts, write, &in->writer, err);
    if (!code)
        code = count > 1 ? read_files(in, files, count, err) : read_all(in, err);
    if (!code)
        code = mz_import_close(files[0], report, &in->writer, err);
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    mz_npy_close(&in->ids);
    mz_npy_close(&in->weights);
    mz_csv_close(&in->csv);
    mz_domains_free(&in->domains);
    mz_block_free(&in->block);
    free(in->row);
    free(in->row_weight);
    mz_id_rows_free(&in->rows);
    free(in);
    return code;
}

const mz_importer mz_import_npy_ids = {
    .name = "npy-ids",
    .summary =
        "vLLM, SGLang: ids [tokens, layers, k] (.npy), weights and bounds of sequences beside them",
    .answers = "experts top-k weights sequences normalized filler-last dense-layers",
    .recognise = recognise,
    .import = import_files,
};
