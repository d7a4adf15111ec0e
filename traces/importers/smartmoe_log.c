/* The SmartMoE training history as the run wrote it: one file table_iter{I}_rank{R}.log per
 * iteration and source rank, one line per layer, `layer:[[E counts], ... one list per
 * micro-batch]`, counts written as floats. All files make one trace; every iteration must have the
 * same ranks. */
#include "traces/importers/ranks.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "common/io/input.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct log_file {
    char *path;
    int64_t iteration, rank;
} log_file;

/* Counts of one file: [layers][micro_batches][experts]. */
typedef struct log_table {
    int64_t *count;
    size_t used, room;
    int64_t layers, batches, experts; /* 0 until the first line says */
} log_table;

static bool parse_name(const char *path, int64_t *iteration, int64_t *rank) {
    long long i, r;
    int end = 0;
    if (sscanf(mz_base_name(path), "table_iter%lld_rank%lld.log%n", &i, &r, &end) != 2 || end == 0)
        return false;
    *iteration = i;
    *rank = r;
    return i >= 0 && r >= 0 && i < INT64_C(1) << 53 && r < MZ_RANKS_MAX;
}

static int recognise(const char *path, const unsigned char *head, size_t size) {
    int64_t iteration, rank;
    size_t digits = 0;
    while (digits < size && isdigit(head[digits]))
        digits++;
    if (digits == 0 || digits + 3 > size || memcmp(head + digits, ":[[", 3) != 0)
        return 0;
    return parse_name(path, &iteration, &rank) ? 95 : 40;
}

static int by_iteration_and_rank(const void *a, const void *b) {
    const log_file *x = a, *y = b;
    if (x->iteration != y->iteration)
        return x->iteration < y->iteration ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* The iteration of file `at`, or of the last one, does not have the ranks that the first one has.
 */
static mz_code ranks_differ(const log_file *list, int at, int64_t ranks, mz_err *err) {
    const log_file *file = &list[at - at % ranks], *wanted = &list[at % ranks];
    return mz_fail(err, MZ_EINPUT,
                   "%s: iteration %lld does not have the ranks that iteration %lld has (first "
                   "difference: rank %lld, as of %s): give the same ranks of every iteration",
                   file->path, (long long)file->iteration, (long long)list[0].iteration,
                   (long long)wanted->rank, wanted->path);
}

/* Sorted list of the files; checks that they form iterations x ranks. */
static mz_code list_files(char **files, int count, log_file *list, int64_t *ranks, mz_err *err) {
    for (int i = 0; i < count; i++) {
        list[i].path = files[i];
        if (!parse_name(files[i], &list[i].iteration, &list[i].rank))
            return mz_fail(err, MZ_EINPUT,
                           "%s: iteration and rank are read from the name, which must be "
                           "table_iter{I}_rank{R}.log",
                           files[i]);
    }
    qsort(list, (size_t)count, sizeof *list, by_iteration_and_rank);
    *ranks = 0;
    while (*ranks < count && list[*ranks].iteration == list[0].iteration)
        ++*ranks;
    for (int i = 1; i < count; i++)
        if (by_iteration_and_rank(&list[i - 1], &list[i]) == 0)
            return mz_fail(err, MZ_EINPUT, "%s and %s are both rank %lld of iteration %lld",
                           list[i - 1].path, list[i].path, (long long)list[i].rank,
                           (long long)list[i].iteration);
    for (int i = 0; i < count; i++)
        if (list[i].rank != list[i % *ranks].rank ||
            list[i].iteration != list[i - i % *ranks].iteration)
            return ranks_differ(list, i, *ranks, err);
    if (count % *ranks)
        return ranks_differ(list, count, *ranks, err);
    return MZ_OK;
}

static const char *skip(const char *p, char c) {
    p += strspn(p, " \t");
    return *p == c ? p + 1 : NULL;
}

/* Parses "[a, b, ...]" and appends the values; *count of them. NULL when it is not that. */
static const char *parse_row(const char *p, log_table *table, int64_t *count, mz_err *err) {
    *count = 0;
    p = skip(p, '[');
    while (p) {
        char *end;
        double value = strtod(p, &end);
        if (end == p || !(value >= 0 && value <= UINT32_MAX) || value != (double)(int64_t)value)
            return NULL;
        if (!mz_grow((void **)&table->count, &table->room, table->used + 1, sizeof *table->count)) {
            mz_fail_nomem(err, "a table of counts");
            return NULL;
        }
        table->count[table->used++] = (int64_t)value;
        ++*count;
        const char *close = skip(end, ']');
        if (close)
            return close;
        p = skip(end, ',');
    }
    return NULL;
}

/* One line: its layer number, then the rows; dimensions must repeat. */
static mz_code parse_line(const char *line, log_table *table, mz_err *err) {
    char *end;
    errno = 0;
    long long layer = strtoll(line, &end, 10);
    if (end == line || *end != ':' || errno || layer != table->layers || layer >= MZ_LAYERS_MAX)
        return mz_fail(err, MZ_EINPUT, "expected '%lld:[[...]]'", (long long)table->layers);
    int64_t batches = 0, experts;
    const char *p = skip(end + 1, '[');
    while (p) {
        err->code = MZ_OK;
        p = parse_row(p, table, &experts, err);
        if (!p && err->code == MZ_ENOMEM)
            return MZ_ENOMEM;
        if (!p)
            break;
        if (table->experts == 0)
            table->experts = experts;
        if (experts != table->experts)
            return mz_fail(err, MZ_EINPUT, "micro-batch %lld lists %lld experts, not %lld",
                           (long long)batches, (long long)experts, (long long)table->experts);
        batches++;
        const char *close = skip(p, ']');
        if (close) {
            p = close + strspn(close, " \t");
            break;
        }
        p = skip(p, ',');
    }
    if (!p || *p != '\0')
        return mz_fail(err, MZ_EINPUT,
                       "layer %lld: not a list of lists of whole numbers from 0 to 2^32 - 1 (is "
                       "the line truncated?)",
                       layer);
    if (table->batches == 0)
        table->batches = batches;
    if (batches != table->batches)
        return mz_fail(err, MZ_EINPUT, "layer %lld lists %lld micro-batches, not %lld", layer,
                       (long long)batches, (long long)table->batches);
    table->layers++;
    return MZ_OK;
}

static mz_code read_table(const char *path, log_table *table, mz_err *err) {
    mz_input *input = NULL;
    char *line = NULL;
    size_t length;
    table->used = 0;
    table->layers = table->batches = table->experts = 0;
    mz_code code = mz_input_open(path, &input, err);
    if (code)
        return code;
    for (;;) {
        code = mz_input_line(input, &line, &length, err);
        if (code || !line)
            break;
        if (length == 0)
            continue;
        code = strlen(line) == length ? parse_line(line, table, err)
                                      : mz_fail(err, MZ_EINPUT, "a NUL byte");
        if (code) {
            mz_err_prefix(err, "%s: line %lld", path, (long long)mz_input_line_number(input));
            break;
        }
    }
    mz_input_close(&input);
    if (!code && table->layers == 0)
        return mz_fail(err, MZ_EINPUT, "%s: the file has no layers", path);
    return code;
}

/* Which ranks are missing below the highest. */
static mz_code note_missing(mz_import_report *report, const log_file *list, int64_t ranks,
                            mz_trace_facts *facts, mz_err *err) {
    int64_t *rank = mz_calloc((size_t)ranks, sizeof *rank);
    if (!rank)
        return mz_fail_nomem(err, "ranks");
    for (int64_t r = 0; r < ranks; r++)
        rank[r] = list[r].rank;
    mz_code code = mz_ranks_note(report, facts, rank, (size_t)ranks, 0, err);
    free(rank);
    return code;
}

static mz_code take_shape(const log_file *list, int count, int64_t ranks, const log_table *table,
                          const mz_import_options *options, mz_trace_facts *facts, mz_err *err) {
    if (table->experts > MZ_EXPERTS_MAX || table->batches > MZ_RANKS_MAX)
        return mz_fail(err, MZ_EINPUT, "%s: %lld experts or %lld micro-batches are not plausible",
                       list[0].path, (long long)table->experts, (long long)table->batches);
    mz_code code = mz_import_experts(list[0].path, options, table->experts, facts, err);
    if (code)
        return code;
    facts->layers = (int32_t)table->layers;
    facts->ranks = (int32_t)ranks;
    if (options->step_stride > 0)
        return MZ_OK;
    /* The stride between recorded iterations: what divides every gap. */
    int64_t stride = 0;
    for (int64_t i = ranks; i < count; i += ranks) {
        int64_t gap = list[i].iteration - list[i - ranks].iteration;
        while (gap) {
            int64_t rest = stride % gap;
            stride = gap;
            gap = rest;
        }
    }
    facts->step_stride = stride > 0 ? stride : 1;
    return MZ_OK;
}

/* Reads one iteration's files into count [ranks][layers][micro-batches][experts] and writes it. */
static mz_code import_step(const log_file *list, log_table *table, const log_table *shape,
                           int64_t *count, const char **path, const mz_trace_facts *facts,
                           mz_trace_writer *writer, int64_t *token, mz_import_report *report,
                           mz_err *err) {
    int64_t each = shape->layers * shape->batches * shape->experts;
    for (int32_t r = 0; r < facts->ranks; r++) {
        mz_code code = read_table(list[r].path, table, err);
        if (code)
            return code;
        if (table->layers != shape->layers || table->batches != shape->batches ||
            table->experts != shape->experts)
            return mz_fail(
                err, MZ_EINPUT,
                "%s: %lld layers x %lld micro-batches x %lld experts, but the first file "
                "has %lld x %lld x %lld (is one of them truncated?)",
                list[r].path, (long long)table->layers, (long long)table->batches,
                (long long)table->experts, (long long)shape->layers, (long long)shape->batches,
                (long long)shape->experts);
        path[r] = list[r].path;
        memcpy(count + r * each, table->count, (size_t)each * sizeof *count);
    }
    mz_counts_step step = {.step = list[0].iteration,
                           .micro_batches = (int32_t)shape->batches,
                           .count = count,
                           .batch_stride = shape->experts,
                           .layer_stride = shape->batches * shape->experts,
                           .rank_stride = each,
                           .path = path};
    return mz_counts_write(&step, facts, writer, token, report, err);
}

static mz_code import_steps(mz_app *app, const log_file *list, int count, log_table *table,
                            const mz_trace_facts *facts, mz_trace_writer *writer,
                            mz_import_report *report, mz_err *err) {
    log_table shape = *table;
    int64_t token = 0, each = shape.layers * shape.batches * shape.experts;
    int64_t *counts = mz_calloc((size_t)facts->ranks, (size_t)each * sizeof *counts);
    const char **path = mz_calloc((size_t)facts->ranks, sizeof *path);
    mz_code code = counts && path ? MZ_OK : mz_fail_nomem(err, "one iteration of counts");
    mz_progress progress = mz_progress_start(&app->log, "importing", "files", count);
    for (int i = 0; i < count && !code; i += facts->ranks) {
        code =
            import_step(list + i, table, &shape, counts, path, facts, writer, &token, report, err);
        if (!code)
            code = mz_import_stopped(app, err);
        mz_progress_update(&progress, i + facts->ranks);
    }
    mz_progress_end(&progress);
    free(path);
    free(counts);
    return code;
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "smartmoe-32e2k",
                                                .source = "SmartMoE artifact, training history",
                                                .licence = "GPL-3.0",
                                                .router = "softmax",
                                                .kind = MZ_TRACE_COUNTS,
                                                .meaning = MZ_STEP_ITERATION};
    mz_trace_facts facts;
    mz_trace_writer *writer = NULL;
    log_table table = {0};
    int64_t ranks = 0;
    log_file *list = mz_calloc((size_t)count, sizeof *list);
    if (!list)
        return mz_fail_nomem(err, "the list of files");
    mz_code code = mz_import_facts(app, options, &defaults, &facts, err);
    if (!code)
        code = list_files(files, count, list, &ranks, err);
    if (!code)
        code = read_table(list[0].path, &table, err);
    if (!code)
        code = take_shape(list, count, ranks, &table, options, &facts, err);
    if (!code)
        code = note_missing(report, list, ranks, &facts, err);
    if (!code)
        code = mz_trace_create(output, &facts, write, &writer, err);
    if (!code)
        code = import_steps(app, list, count, &table, &facts, writer, report, err);
    if (!code)
        code = mz_import_close(list[0].path, report, &writer, err);
    if (writer)
        mz_trace_writer_abandon(&writer);
    free(table.count);
    free(list);
    return code;
}

const mz_importer mz_import_smartmoe_log = {
    .name = "smartmoe-log",
    .summary = "SmartMoE tables table_iter{I}_rank{R}.log, all files at once; needs --top-k",
    .answers = "experts top-k",
    .phase = "train",
    .recognise = recognise,
    .import = import_files,
};
