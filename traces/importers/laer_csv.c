/* LAER-MoE's token log: rank,method,model_name,layer,iter,token_num, one row per computing rank,
 * layer and iteration. It says how many pairs a rank computed, not which expert or source they had,
 * so every rank's experts become one "expert" of the trace: expert r = the group of experts that
 * rank r computed. With one such expert per rank, placing them statically gives back each rank's
 * recorded load. (Under FSDP with expert parallelism, E / C ranks hold all groups once and the
 * groups repeat over the ranks: 32 ranks hold each of 4 groups 8 times.)
 *
 * Sources: every rank holds the same number of tokens. Tokens stay inside the smallest block of
 * neighbouring ranks that computes exactly its own tokens in every call of the run (a node of 8 in
 * the published static run); a rank's pairs are dealt evenly over the sources of its block, the
 * remainders going on round the block so that each source deals out exactly its own pairs. */
#include "traces/importers/common.h"
#include "traces/importers/runs.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/csv.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

typedef struct laer_row {
    int64_t layer, iteration, rank, pairs, line;
} laer_row;

enum {
    MAX_ROWS = 1 << 22,
    MAX_COUNTS = 1 << 25 /* of one iteration, [layers][ranks][ranks] */
};

typedef struct laer_log {
    mz_csv csv;
    int rank, layer, iteration, pairs; /* columns */
    mz_runs runs;
    laer_row *row;
    size_t rows, room;
    int64_t layers, ranks, iterations;
    int64_t *load;      /* [iterations][layers][ranks] */
    int64_t per_source; /* pairs of each source rank and call */
    int64_t block;      /* ranks among which tokens are exchanged */
    mz_trace_facts facts;
} laer_log;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    static const char *const columns[] = {"rank", "method", "model_name", "layer", "token_num"};
    char line[256] = "";
    for (size_t i = 0; i < size && i < sizeof line - 1 && head[i] != '\n'; i++)
        line[i] = (char)head[i];
    for (size_t i = 0; i < sizeof columns / sizeof columns[0]; i++)
        if (!strstr(line, columns[i]))
            return 0;
    return 90;
}

static mz_code open_log(laer_log *log, const char *path, mz_err *err) {
    mz_code code = mz_csv_open(path, &log->csv, err);
    if (!code)
        code = mz_csv_need(&log->csv, "rank", &log->rank, err);
    if (!code)
        code = mz_csv_need(&log->csv, "method", &log->runs.method, err);
    if (!code)
        code = mz_csv_need(&log->csv, "model_name", &log->runs.model, err);
    if (!code)
        code = mz_csv_need(&log->csv, "layer", &log->layer, err);
    if (!code)
        code = mz_csv_need(&log->csv, "iter", &log->iteration, err);
    if (!code)
        code = mz_csv_need(&log->csv, "token_num", &log->pairs, err);
    return code;
}

static mz_code read_rows(laer_log *log, const mz_import_options *options, mz_err *err) {
    for (;;) {
        bool end;
        mz_code code = mz_csv_next(&log->csv, &end, err);
        if (code || end)
            return code;
        laer_row row = {.line = mz_input_line_number(log->csv.input)};
        bool wanted;
        code = mz_runs_take(&log->runs, &log->csv, options, &wanted, err);
        if (!code && !wanted)
            continue;
        if (!code)
            code = mz_csv_int(&log->csv, log->rank, MZ_EXPERTS_MAX - 1, &row.rank, err);
        if (!code)
            code = mz_csv_int(&log->csv, log->layer, MZ_LAYERS_MAX - 1, &row.layer, err);
        if (!code)
            code = mz_csv_int(&log->csv, log->iteration, INT64_C(1) << 40, &row.iteration, err);
        if (!code)
            code = mz_csv_int(&log->csv, log->pairs, INT64_C(1) << 40, &row.pairs, err);
        if (code)
            return code;
        if (log->rows == MAX_ROWS)
            return mz_fail(err, MZ_EINPUT,
                           "%s: line %lld: more than %d rows of one run; import it in parts",
                           mz_input_path(log->csv.input),
                           (long long)mz_input_line_number(log->csv.input), MAX_ROWS);
        if (!mz_grow((void **)&log->row, &log->room, log->rows + 1, sizeof *log->row))
            return mz_fail_nomem(err, "rows of the token log");
        log->row[log->rows++] = row;
        log->ranks = row.rank >= log->ranks ? row.rank + 1 : log->ranks;
        log->layers = row.layer >= log->layers ? row.layer + 1 : log->layers;
        log->iterations = row.iteration >= log->iterations ? row.iteration + 1 : log->iterations;
    }
}

/* Rows into load [iterations][layers][ranks], each exactly once. */
static mz_code fill_loads(laer_log *log, const char *path, mz_err *err) {
    double cells = (double)log->iterations * (double)log->layers * (double)log->ranks;
    if (cells != (double)log->rows)
        return mz_fail(
            err, MZ_EINPUT,
            "%s: %zu rows for %lld iterations x %lld layers x %lld ranks: rows are missing "
            "or doubled",
            path, log->rows, (long long)log->iterations, (long long)log->layers,
            (long long)log->ranks);
    if (log->ranks * log->ranks > MAX_COUNTS / log->layers)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %lld layers x %lld ranks x as many experts: more than the %d counts of "
                       "an iteration that are held",
                       path, (long long)log->layers, (long long)log->ranks, MAX_COUNTS);
    log->load = mz_calloc(log->rows, sizeof *log->load);
    if (!log->load)
        return mz_fail_nomem(err, "the token log");
    for (size_t i = 0; i < log->rows; i++)
        log->load[i] = -1;
    for (size_t i = 0; i < log->rows; i++) {
        const laer_row *row = &log->row[i];
        int64_t *cell =
            &log->load[(row->iteration * log->layers + row->layer) * log->ranks + row->rank];
        if (*cell >= 0)
            return mz_fail(err, MZ_EINPUT,
                           "%s: line %lld: iteration %lld, layer %lld, rank %lld a second time",
                           path, (long long)row->line, (long long)row->iteration,
                           (long long)row->layer, (long long)row->rank);
        *cell = row->pairs;
    }
    return MZ_OK;
}

/* Every call must hold the same number of pairs, a whole number per source. */
static mz_code find_share(laer_log *log, const char *path, mz_err *err) {
    int64_t calls = log->iterations * log->layers, first = 0;
    for (int64_t c = 0; c < calls; c++) {
        int64_t sum = 0;
        for (int64_t r = 0; r < log->ranks; r++)
            sum += log->load[c * log->ranks + r];
        first = c == 0 ? sum : first;
        if (sum != first || sum % (log->ranks * log->facts.top_k))
            return mz_fail(
                err, MZ_EINPUT,
                "%s: iteration %lld, layer %lld: %lld pairs over all ranks; every call must "
                "have the same number, a multiple of ranks x top-k (%lld x %d)",
                path, (long long)(c / log->layers), (long long)(c % log->layers), (long long)sum,
                (long long)log->ranks, log->facts.top_k);
    }
    log->per_source = first / log->ranks;
    return MZ_OK;
}

static bool closed_blocks(const laer_log *log, int64_t block) {
    for (size_t i = 0; i < log->rows; i += (size_t)block) {
        int64_t sum = 0;
        for (int64_t r = 0; r < block; r++)
            sum += log->load[i + (size_t)r];
        if (sum != block * log->per_source)
            return false;
    }
    return true;
}

/* "e16k4" anywhere in the model's name gives the top-k. */
static int64_t top_k_of(const char *model) {
    for (const char *p = model; (p = strchr(p, 'e')) != NULL; p++) {
        char *end;
        if (!isdigit((unsigned char)p[1]))
            continue;
        strtol(p + 1, &end, 10);
        if (*end == 'k' && isdigit((unsigned char)end[1]))
            return strtol(end + 1, NULL, 10);
    }
    return 0;
}

static mz_code take_facts(laer_log *log, const char *path, const mz_import_options *options,
                          mz_err *err) {
    mz_trace_facts *facts = &log->facts;
    const mz_run *run = &log->runs.run[0];
    int64_t top_k = options->top_k > 0 ? options->top_k : top_k_of(run->model);
    if (top_k < 1 || top_k > MZ_MAX_TOP_K)
        return mz_import_ask(err, path, "the number of experts per token is", "top-k");
    if (options->experts > 0 && options->experts != log->ranks)
        return mz_fail(err, MZ_EINPUT,
                       "%s: --experts %lld, but this log gives one group of experts per rank: %lld",
                       path, (long long)options->experts, (long long)log->ranks);
    if (options->top_k <= 0)
        mz_import_note(facts, "top-k=%lld by the model's name", (long long)top_k);
    if (!options->name)
        strcpy(facts->name, run->model);
    if (!options->source)
        snprintf(facts->source, sizeof facts->source, "LAER-MoE artifact, token log, %.100s %.100s",
                 run->method, run->model);
    snprintf(facts->group_note, sizeof facts->group_note,
             "experts are groups of experts: expert r = all that rank r of %lld computed",
             (long long)log->ranks);
    /* The shapes of the two published runs (Mixtral 8x7B, split in two for e16k4). */
    bool e16k4 = strstr(run->model, "mixtral-8x7b-e16k4") != NULL;
    if (e16k4 || strstr(run->model, "mixtral-8x7b-e8k2")) {
        facts->hidden = facts->hidden ? facts->hidden : 4096;
        facts->intermediate = facts->intermediate ? facts->intermediate : e16k4 ? 7168 : 14336;
        facts->sequence_length = 8192;
    }
    facts->layers = (int32_t)log->layers;
    facts->experts = facts->ranks = (int32_t)log->ranks;
    facts->top_k = (int32_t)top_k;
    return MZ_OK;
}

static mz_code read_log(laer_log *log, const char *path, const mz_import_options *options,
                        mz_err *err) {
    mz_code code = open_log(log, path, err);
    if (!code)
        code = read_rows(log, options, err);
    if (!code)
        code = mz_runs_one(&log->runs, path, options, err);
    if (!code)
        code = take_facts(log, path, options, err);
    if (!code)
        code = fill_loads(log, path, err);
    if (!code)
        code = find_share(log, path, err);
    if (!code && log->facts.top_k > log->ranks)
        code =
            mz_fail(err, MZ_EINPUT,
                    "%s: top-%d, but this log gives one group of experts per rank: %lld, which no "
                    "token can choose so many of",
                    path, log->facts.top_k, (long long)log->ranks);
    if (code)
        return code;
    for (log->block = 1; log->block < log->ranks; log->block++)
        if (log->ranks % log->block == 0 && closed_blocks(log, log->block))
            break;
    mz_import_note(&log->facts, "sources=dealt evenly within blocks of %lld ranks",
                   (long long)log->block);
    return MZ_OK;
}

/* Deals one call's loads to sources: count [sources][experts]. */
static void deal_sources(const laer_log *log, const int64_t *load, int64_t *count) {
    memset(count, 0, (size_t)(log->ranks * log->ranks) * sizeof *count);
    for (int64_t base = 0; base < log->ranks; base += log->block) {
        int64_t next = 0;
        for (int64_t e = base; e < base + log->block; e++) {
            for (int64_t s = 0; s < log->block; s++)
                count[(base + s) * log->ranks + e] = load[e] / log->block;
            for (int64_t i = load[e] % log->block; i > 0; i--, next = (next + 1) % log->block)
                count[(base + next) * log->ranks + e]++;
        }
    }
}

static mz_code write_log(mz_app *app, const laer_log *log, mz_trace_writer *writer,
                         mz_import_report *report, mz_err *err) {
    int64_t each = log->ranks * log->ranks, token = 0;
    int64_t *count = mz_calloc((size_t)log->layers, (size_t)each * sizeof *count);
    if (!count)
        return mz_fail_nomem(err, "one iteration of counts");
    mz_progress progress = mz_progress_start(&app->log, "importing", "iterations", log->iterations);
    mz_code code = MZ_OK;
    for (int64_t i = 0; i < log->iterations && !code; i++) {
        for (int64_t l = 0; l < log->layers; l++)
            deal_sources(log, log->load + (i * log->layers + l) * log->ranks, count + l * each);
        mz_counts_step step = {.step = i,
                               .micro_batches = 1,
                               .count = count,
                               .layer_stride = each,
                               .rank_stride = log->ranks};
        code = mz_counts_write(&step, &log->facts, writer, &token, report, err);
        if (!code)
            code = mz_import_stopped(app, err);
        mz_progress_update(&progress, i + 1);
    }
    mz_progress_end(&progress);
    free(count);
    return code;
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.licence = "Apache-2.0",
                                                .router = "softmax",
                                                .kind = MZ_TRACE_COUNTS,
                                                .meaning = MZ_STEP_ITERATION};
    mz_trace_writer *writer = NULL;
    if (count != 1)
        return mz_fail(err, MZ_EINPUT, "laer-csv takes one file, got %d", count);
    laer_log *log = calloc(1, sizeof *log);
    if (!log)
        return mz_fail_nomem(err, "the importer");
    mz_code code = mz_import_facts(app, options, &defaults, &log->facts, err);
    if (!code)
        code = read_log(log, files[0], options, err);
    if (!code)
        code = mz_trace_create(output, &log->facts, write, &writer, err);
    if (!code)
        code = write_log(app, log, writer, report, err);
    if (code == MZ_EINPUT && writer)
        mz_err_prefix(err, "%s", files[0]);
    if (!code)
        code = mz_import_close(files[0], report, &writer, err);
    if (writer)
        mz_trace_writer_abandon(&writer);
    if (!code)
        snprintf(report->note, sizeof report->note,
                 "sources are not recorded: pairs are dealt evenly within blocks of %lld ranks%s",
                 (long long)log->block,
                 options->top_k > 0 ? "" : "; top-k by the model's name (--top-k says otherwise)");
    mz_csv_close(&log->csv);
    free(log->row);
    free(log->load);
    free(log);
    return code;
}

const mz_importer mz_import_laer_csv = {
    .name = "laer-csv",
    .summary = "LAER-MoE token log (.csv): one group of experts per rank",
    .answers = "experts top-k method model-name",
    .phase = "train",
    .recognise = recognise,
    .import = import_files,
};
