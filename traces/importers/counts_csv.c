/* Tables of counts or shares, one row per layer and expert. Columns layer and expert, and one of
 * count (pairs), prob (share) or token_distr (either); step, epoch, model, kind and domain where
 * they are there. Dialects met: step,layer,expert,prob (tt-train); epoch,step,layer,expert,count;
 * step,layer,expert,token_distr,expert_imp,token_dropped,expert_bias;
 * model,kind,domain,layer,expert, count. Several models or kinds: --model-name and --method choose.
 *
 * Shares need --tokens: they become counts whose sum is exact (largest remainders). Shares that sum
 * to 1 are of pairs, to top-k of tokens. Domains are micro-batches, steps without a step column
 * none. One source rank. Rows are sorted; memory is that of the sorting and one step. */
#include "traces/importers/rows.h"
#include "traces/importers/runs.h"
#include "traces/importers/spill.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/csv.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct csv_row {
    int64_t epoch, step, layer, expert, line;
    int32_t domain;
    double value;
} csv_row;

typedef struct csv_import {
    mz_app *app;
    const mz_import_options *options;
    mz_csv csv;
    int step, epoch, layer, expert, value, domain; /* columns, -1: none */
    mz_domains domains;
    mz_runs runs;
    mz_spill rows;
    int64_t last_epoch, highest_step; /* so far, in the order of the file; -1 before the first */
    bool anew;                        /* steps start anew in an epoch */
    csv_row *call;                    /* rows of one call, in order */
    size_t calls, room;
    bool shares;
    mz_trace_facts facts;
    mz_gather gather;
    double *rest;   /* remainders of one call's shares */
    int64_t *count; /* of one call */
    mz_trace_writer *writer;
    mz_import_report *report;
} csv_import;

/* Whether `name` is one of the comma-separated columns in the first line. */
static bool has_column(const unsigned char *head, size_t size, const char *name) {
    size_t length = strlen(name), begin = 0;
    for (size_t i = 0; i <= size; i++) {
        bool end = i == size || head[i] == '\n' || head[i] == '\r';
        if (!end && head[i] != ',')
            continue;
        size_t quotes = i - begin >= 2 && head[begin] == '"' && head[i - 1] == '"';
        if (i - begin == length + 2 * quotes && memcmp(head + begin + quotes, name, length) == 0)
            return true;
        if (end)
            return false;
        begin = i + 1;
    }
    return false;
}

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return has_column(head, size, "layer") && has_column(head, size, "expert") &&
                   (has_column(head, size, "count") || has_column(head, size, "prob") ||
                    has_column(head, size, "token_distr"))
               ? 85
               : 0;
}

static mz_code open_table(csv_import *in, const char *path, mz_err *err) {
    mz_code code = mz_csv_open(path, &in->csv, err);
    if (!code)
        code = mz_csv_need(&in->csv, "layer", &in->layer, err);
    if (!code)
        code = mz_csv_need(&in->csv, "expert", &in->expert, err);
    const struct {
        const char *name;
        int *column;
    } others[] = {{"step", &in->step},        {"epoch", &in->epoch},   {"model", &in->runs.model},
                  {"kind", &in->runs.method}, {"domain", &in->domain}, {"count", &in->value}};
    for (size_t i = 0; i < sizeof others / sizeof others[0] && !code; i++)
        code = mz_csv_column(&in->csv, others[i].name, others[i].column, err);
    if (!code && in->value < 0)
        code = mz_csv_column(&in->csv, "prob", &in->value, err);
    if (!code && in->value < 0)
        code = mz_csv_need(&in->csv, "token_distr", &in->value, err);
    return code;
}

static mz_code line_fault(const csv_import *in, mz_err *err, int column, const char *what) {
    return mz_fail(err, MZ_EINPUT, "%s: line %lld: %s is '%.40s', not %s",
                   mz_input_path(in->csv.input), (long long)mz_input_line_number(in->csv.input),
                   in->csv.name[column], in->csv.field[column], what);
}

/* A layer's number may follow a word, as in "idx2" or "layers.2". */
static mz_code read_layer(csv_import *in, int64_t *layer, mz_err *err) {
    char *text = in->csv.field[in->layer], *end;
    if (isdigit((unsigned char)*text))
        return mz_csv_int(&in->csv, in->layer, MZ_LAYERS_MAX, layer, err);
    while (isalpha((unsigned char)*text) || *text == '_' || *text == '.')
        text++;
    *layer = strtoll(text, &end, 10);
    if (!isdigit((unsigned char)*text) || *end != '\0' || *layer > MZ_LAYERS_MAX)
        return line_fault(in, err, in->layer, "the number of a layer");
    return MZ_OK;
}

static mz_code read_value(csv_import *in, double *value, mz_err *err) {
    char *text = in->csv.field[in->value], *end;
    *value = strtod(text, &end);
    if (end == text || *end != '\0' || !(*value >= 0 && *value <= UINT32_MAX))
        return line_fault(in, err, in->value, "a number from 0 to 2^32-1");
    return MZ_OK;
}

static mz_code read_row(csv_import *in, csv_row *out, mz_err *err) {
    csv_row row = {.line = mz_input_line_number(in->csv.input), .domain = 0};
    mz_code code = MZ_OK;
    if (in->step >= 0)
        code = mz_csv_int(&in->csv, in->step, INT64_C(1) << 40, &row.step, err);
    if (!code && in->epoch >= 0)
        code = mz_csv_int(&in->csv, in->epoch, 1 << 20, &row.epoch, err);
    if (!code)
        code = read_layer(in, &row.layer, err);
    if (!code)
        code = mz_csv_int(&in->csv, in->expert, MZ_EXPERTS_MAX - 1, &row.expert, err);
    if (!code)
        code = read_value(in, &row.value, err);
    if (!code && in->domain >= 0)
        code = mz_domain_of(&in->domains, in->csv.field[in->domain], &row.domain, err);
    if (code)
        return code;
    if (row.domain < 0)
        return line_fault(in, err, in->domain, "one of the first 1024 domains");
    *out = row;
    return MZ_OK;
}

/* Hands every row that the user chose to `take`. */
static mz_code read_rows(csv_import *in, mz_code (*take)(csv_import *, csv_row *, mz_err *),
                         mz_err *err) {
    for (;;) {
        bool end;
        bool wanted;
        csv_row row;
        mz_code code = mz_csv_next(&in->csv, &end, err);
        if (code || end)
            return code;
        code = mz_runs_take(&in->runs, &in->csv, in->options, &wanted, err);
        if (!code && !wanted)
            continue;
        if (!code)
            code = read_row(in, &row, err);
        if (!code)
            code = take(in, &row, err);
        if (!code)
            code = mz_import_stopped(in->app, err);
        if (code)
            return code;
    }
}

/* Whether steps start anew in every epoch. */
static mz_code look_epoch(csv_import *in, csv_row *row, mz_err *err) {
    (void)err;
    in->anew = in->anew || (row->epoch > in->last_epoch && row->step <= in->highest_step);
    in->highest_step = row->step > in->highest_step ? row->step : in->highest_step;
    in->last_epoch = row->epoch > in->last_epoch ? row->epoch : in->last_epoch;
    return MZ_OK;
}

static mz_code take_row(csv_import *in, csv_row *row, mz_err *err) {
    if (in->anew)
        row->step += row->epoch * (in->highest_step + 1);
    return mz_spill_add(&in->rows, row, err);
}

static int by_call(const void *a, const void *b) {
    const csv_row *x = a, *y = b;
    if (x->step != y->step)
        return x->step < y->step ? -1 : 1;
    if (x->domain != y->domain)
        return x->domain < y->domain ? -1 : 1;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return (x->expert > y->expert) - (x->expert < y->expert);
}

/* The rows of the next call to in->call; none: in->calls is 0. `ahead` is the row behind them. */
static mz_code next_call(csv_import *in, const void **ahead, mz_err *err) {
    mz_code code = MZ_OK;
    in->calls = 0;
    while (*ahead && !code) {
        const csv_row *row = *ahead, *first = in->call;
        if (in->calls > 0 && (row->step != first->step || row->domain != first->domain ||
                              row->layer != first->layer))
            return MZ_OK;
        if (!mz_grow((void **)&in->call, &in->room, in->calls + 1, sizeof *in->call))
            return mz_fail_nomem(err, "rows of the table");
        in->call[in->calls++] = *row;
        if (in->calls > MZ_EXPERTS_MAX) /* more than there are experts: one of them twice */
            return MZ_OK;
        code = mz_spill_next(&in->rows, ahead, err);
    }
    return code;
}

static mz_code first_call(csv_import *in, const void **ahead, mz_err *err) {
    mz_code code = mz_spill_rewind(&in->rows, err);
    if (!code)
        code = mz_spill_next(&in->rows, ahead, err);
    return code ? code : next_call(in, ahead, err);
}

/* Checks the rows of a call; *highest expert so far. */
static mz_code check_call(csv_import *in, const char *path, int64_t *highest, mz_err *err) {
    int64_t experts = in->options->experts;
    for (size_t j = 0; j < in->calls; j++) {
        const csv_row *row = &in->call[j];
        if (j > 0 && by_call(&row[-1], row) == 0)
            return mz_fail(err, MZ_EINPUT,
                           "%s: line %lld: expert %lld of layer %lld a second time in this step",
                           path, (long long)row->line, (long long)row->expert,
                           (long long)row->layer);
        *highest = row->expert > *highest ? row->expert : *highest;
        if (experts > 0 && row->expert >= experts)
            return mz_fail(err, MZ_EINPUT, "%s: line %lld: expert %lld, but --experts %lld", path,
                           (long long)row->line, (long long)row->expert, (long long)experts);
    }
    return MZ_OK;
}

/* Whether a call holds nothing but zeros. */
static bool zero_call(const csv_import *in) {
    for (size_t i = 0; i < in->calls; i++)
        if (in->call[i].value != 0)
            return false;
    return true;
}

/* Layers: those that are not zero in every call, as dense ones are. Experts: from --experts, or
 * where every call lists all of them. */
static mz_code take_shape(csv_import *in, const char *path, mz_err *err) {
    int64_t experts = in->options->experts, highest = 0;
    size_t fewest = SIZE_MAX;
    const void *ahead = NULL;
    mz_code code = first_call(in, &ahead, err);
    while (in->calls > 0 && !code) {
        code = check_call(in, path, &highest, err);
        fewest = in->calls < fewest ? in->calls : fewest;
        if (!code && !zero_call(in))
            code = mz_labels_add(&in->gather.label, in->call[0].layer, err);
        if (!code)
            code = next_call(in, &ahead, err);
    }
    if (!code && in->gather.label.count == 0)
        return mz_fail(err, MZ_EINPUT, "%s: %s is 0 everywhere", path, in->csv.name[in->value]);
    if (!code && experts <= 0 && fewest != (size_t)highest + 1)
        return mz_fail(err, MZ_EINPUT,
                       "%s: not every layer lists every expert, so their number is not in the "
                       "file: pass --experts N",
                       path);
    in->facts.experts = (int32_t)(experts > 0 ? experts : highest + 1);
    return code;
}

/* token_distr may hold either: whole numbers that sum to more than top-k are counts. */
static bool holds_shares(const csv_import *in) {
    const char *name = in->csv.name[in->value];
    if (strcmp(name, "token_distr") != 0)
        return strcmp(name, "prob") == 0;
    double sum = 0;
    for (size_t i = 0; i < in->calls; i++) {
        if (in->call[i].value != floor(in->call[i].value))
            return true;
        sum += in->call[i].value;
    }
    return sum <= in->facts.top_k;
}

static mz_code take_facts(csv_import *in, const char *path, mz_err *err) {
    const void *ahead = NULL;
    if (in->anew)
        mz_import_note(&in->facts, "step=epoch x %lld + step", (long long)(in->highest_step + 1));
    mz_code code = take_shape(in, path, err);
    if (!code)
        code = mz_import_top_k(path, in->options, in->facts.experts, &in->facts.top_k, err);
    if (!code)
        code = first_call(in, &ahead, err);
    while (!code && zero_call(in))
        code = next_call(in, &ahead, err);
    if (code)
        return code;
    in->shares = holds_shares(in);
    if (in->shares && in->options->tokens <= 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %s holds shares; the number of tokens they are of is not in the file: "
                       "pass --tokens N (of each step and layer)",
                       path, in->csv.name[in->value]);
    if (!in->options->name && in->runs.run[0].model[0])
        strcpy(in->facts.name, in->runs.run[0].model);
    if (!in->options->step_meaning && in->step < 0 && in->epoch < 0)
        in->facts.step_meaning = MZ_STEP_NONE;
    in->rest = mz_calloc((size_t)in->facts.experts, sizeof *in->rest);
    in->count = mz_calloc((size_t)in->facts.experts, sizeof *in->count);
    return in->rest && in->count ? MZ_OK : mz_fail_nomem(err, "counts");
}

/* Shares of one call to counts whose sum is tokens x top-k. */
static mz_code share_out(csv_import *in, const csv_row *row, size_t rows, int64_t *count,
                         mz_err *err) {
    double sum = 0;
    int64_t pairs = in->options->tokens * in->facts.top_k, given = 0;
    for (size_t i = 0; i < rows; i++)
        sum += row[i].value;
    if (!(fabs(sum - 1) < 0.02) && !(fabs(sum - in->facts.top_k) < 0.02 * in->facts.top_k))
        return mz_fail(err, MZ_EINPUT,
                       "shares sum to %g, neither to 1 (of pairs) nor to top-k (of "
                       "tokens)",
                       sum);
    memset(in->rest, 0, (size_t)in->facts.experts * sizeof *in->rest);
    for (size_t i = 0; i < rows; i++) {
        double exact = row[i].value / sum * (double)pairs, tokens = (double)in->options->tokens;
        if (exact > tokens + 1)
            return mz_fail(err, MZ_EINPUT,
                           "expert %lld has a share of %g of the pairs; at top-%d it cannot be "
                           "more than 1/%d",
                           (long long)row[i].expert, row[i].value / sum, in->facts.top_k,
                           in->facts.top_k);
        bool all = exact >= tokens; /* no token chooses an expert twice */
        count[row[i].expert] = all ? in->options->tokens : (int64_t)exact;
        in->rest[row[i].expert] = all ? -1 : exact - floor(exact);
        given += count[row[i].expert];
    }
    for (; given < pairs; given++) {
        int32_t best = 0;
        for (int32_t e = 1; e < in->facts.experts; e++)
            best = in->rest[e] > in->rest[best] ? e : best;
        in->rest[best] = -1;
        count[best]++;
    }
    return MZ_OK;
}

static mz_code take_counts(csv_import *in, const csv_row *row, size_t rows, int64_t *tokens,
                           int64_t *count, mz_err *err) {
    int64_t pairs = 0;
    for (size_t i = 0; i < rows; i++) {
        if (row[i].value != floor(row[i].value))
            return mz_fail(err, MZ_EINPUT, "line %lld: %g is not a whole number",
                           (long long)row[i].line, row[i].value);
        count[row[i].expert] = (int64_t)row[i].value;
        pairs += (int64_t)row[i].value;
    }
    return mz_gather_tokens(in->options, in->facts.top_k, pairs, tokens, err);
}

static mz_code take_call(csv_import *in, mz_err *err) {
    const csv_row *row = in->call;
    mz_gather_key key = {.step = row->step, .layer = row->layer, .micro_batch = row->domain};
    int64_t tokens = in->options->tokens, *count;
    memset(in->count, 0, (size_t)in->facts.experts * sizeof *in->count);
    mz_code code = in->shares ? share_out(in, row, in->calls, in->count, err)
                              : take_counts(in, row, in->calls, &tokens, in->count, err);
    if (code)
        return mz_err_prefix(err, "step %lld, layer %lld", (long long)row->step,
                             (long long)row->layer);
    code = mz_gather_counts(&in->gather, &key, tokens, &count, err);
    if (!code)
        memcpy(count, in->count, (size_t)in->facts.experts * sizeof *count);
    return code;
}

/* Calls in order, written whenever a step ends. */
static mz_code take_calls(csv_import *in, mz_err *err) {
    const void *ahead = NULL;
    int64_t step = 0;
    mz_code code = first_call(in, &ahead, err);
    while (in->calls > 0 && !code) {
        if (in->gather.entries > 0 && in->call[0].step != step)
            code = mz_gather_write(&in->gather, in->writer, in->report, err);
        step = in->call[0].step;
        if (mz_labels_find(&in->gather.label, in->call[0].layer) < 0)
            mz_rows_skip(in->report, 1, "layers without any selection (dense ones)");
        else if (!code)
            code = take_call(in, err);
        if (!code)
            code = next_call(in, &ahead, err);
        if (!code)
            code = mz_import_stopped(in->app, err);
    }
    return code ? code : mz_gather_write(&in->gather, in->writer, in->report, err);
}

static mz_code write_trace(csv_import *in, const char *path, const char *output,
                           const mz_trace_write_options *write, mz_err *err) {
    mz_code code = mz_gather_settle_labels(&in->gather, err);
    if (code)
        return code;
    mz_import_note(&in->facts, "column=%s", in->csv.name[in->value]);
    if (in->runs.run[0].method[0])
        mz_import_note(&in->facts, "kind=%s", in->runs.run[0].method);
    if (in->shares)
        mz_import_note(&in->facts, "counts=shares of %lld tokens", (long long)in->options->tokens);
    if (in->domains.count > 0)
        mz_import_note(&in->facts, "micro-batches=domains, of which there are %d",
                       in->domains.count);
    code = mz_trace_create(output, &in->facts, write, &in->writer, err);
    if (!code)
        code = take_calls(in, err);
    if (code == MZ_EINPUT)
        mz_err_prefix(err, "%s", path);
    return code ? code : mz_import_close(path, in->report, &in->writer, err);
}

/* All rows into the spill; where there are epochs, a first time to look at these. */
static mz_code read_table(csv_import *in, const char *path, mz_err *err) {
    mz_code code = MZ_OK;
    if (in->epoch >= 0) {
        code = read_rows(in, look_epoch, err);
        mz_csv_close(&in->csv);
        if (!code)
            code = open_table(in, path, err);
    }
    return code ? code : read_rows(in, take_row, err);
}

static void free_import(csv_import *in) {
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    mz_csv_close(&in->csv);
    mz_domains_free(&in->domains);
    mz_gather_free(&in->gather);
    mz_spill_free(&in->rows);
    free(in->call);
    free(in->rest);
    free(in->count);
    free(in);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "table of counts per expert",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_COUNTS,
                                                .meaning = MZ_STEP_ITERATION};
    if (count != 1)
        return mz_fail(err, MZ_EINPUT, "counts-csv takes one file, got %d", count);
    csv_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (csv_import){
        .app = app, .options = options, .report = report, .last_epoch = -1, .highest_step = -1};
    in->gather.facts = &in->facts;
    in->rows = mz_spill_make(sizeof(csv_row), by_call, output);
    mz_code code = mz_import_facts(app, options, &defaults, &in->facts, err);
    if (!code)
        code = open_table(in, files[0], err);
    if (!code)
        code = mz_import_top_k(files[0], options, options->experts, &in->facts.top_k, err);
    in->facts.ranks = 1;
    if (!code)
        code = read_table(in, files[0], err);
    if (!code)
        code = mz_runs_one(&in->runs, files[0], options, err);
    if (!code)
        code = take_facts(in, files[0], err);
    if (!code)
        code = write_trace(in, files[0], output, write, err);
    if (!code && in->shares)
        snprintf(report->note + strlen(report->note), sizeof report->note - strlen(report->note),
                 "%scounts are shares of %lld tokens, rounded to whole pairs",
                 report->note[0] ? "; " : "", (long long)options->tokens);
    free_import(in);
    return code;
}

const mz_importer mz_import_counts_csv = {
    .name = "counts-csv",
    .summary = "tables of layer, expert and count, prob or token_distr (.csv)",
    .answers = "experts top-k tokens dropped method model-name",
    .recognise = recognise,
    .import = import_files,
};
