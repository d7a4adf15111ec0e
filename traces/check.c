#include "traces/check.h"

#include "common/base/arena.h"
#include "traces/reader.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct checker {
    const mz_app *app;
    mz_trace *trace;
    mz_faults *faults;
    mz_progress progress;
    int64_t done;
    int64_t call; /* whose tokens or counts are being added up */
    int64_t sum;
    bool broken; /* part of that call could not be read */
} checker;

/* Rows that the calls account for; an unfinished file may hold others, half written. */
static int64_t rows_to_check(const mz_trace *trace, mz_column_id id) {
    int64_t rows = trace->col[id].rows, covered = rows;
    const mz_trace_call *last = trace->call_count ? &trace->calls[trace->call_count - 1] : NULL;
    if (trace->complete || !trace->consistent)
        return rows;
    if (id < MZ_CALL_COLUMNS || id == MZ_COL_COUNTS)
        covered = trace->call_count;
    else if (id == MZ_COL_EXPERT || id == MZ_COL_WEIGHT || id == MZ_COL_HIDDEN_NORM2)
        covered = last ? last->pair_begin + last->pairs : 0;
    else if (id == MZ_COL_ROW_PAIRS || id == MZ_COL_GRAD_NORM2 || id == MZ_COL_INPUT_NORM2)
        covered = last ? last->row_begin + last->tokens : 0;
    else if (id >= MZ_COL_SEQ_TOKEN_BEGIN && id <= MZ_COL_SEQ_DOMAIN)
        covered = trace->sequence_count;
    else
        covered = trace->step_count;
    return covered < rows ? covered : rows;
}

static void check_values(checker *c, mz_column_id id, const uint8_t *data, int64_t n, int64_t row) {
    mz_trace *trace = c->trace;
    mz_err err = {0};
    mz_code code = MZ_OK;
    switch (id) {
    case MZ_COL_EXPERT:
        if (mz_read_ids(trace->col[id].elem, data, n, NULL) >= (unsigned)trace->facts.experts)
            code = mz_bad_id(trace, id, data, n, row, &err);
        break;
    case MZ_COL_WEIGHT:
    case MZ_COL_HIDDEN_NORM2:
    case MZ_COL_GRAD_NORM2:
    case MZ_COL_INPUT_NORM2:
        if (!mz_read_norms(trace->col[id].elem, data, n, NULL))
            code = mz_bad_norm(trace, id, data, n, row, &err);
        break;
    default:
        break;
    }
    if (code != MZ_OK)
        mz_fault_line(c->faults, &err);
}

/* ---- sums ------------------------------------------------------------------------------------ */

static void end_call(checker *c, const char *name) {
    const mz_trace_call *call = &c->trace->calls[c->call];
    if (!c->broken && c->sum != call->pairs)
        mz_fault(c->faults,
                 "%s of call %" PRId64 " add up to %" PRId64 ", /calls/pairs[%" PRId64
                 "] says %" PRId64,
                 name, c->call, c->sum, c->call, call->pairs);
    c->call++;
    c->sum = 0;
    c->broken = false;
}

/* Adds tokens [row, row+n) of /rows/pairs to the calls that they belong to. */
static void add_rows(checker *c, const uint8_t *data, int64_t n, int64_t row) {
    const mz_trace *trace = c->trace;
    size_t size = mz_elem_size(trace->col[MZ_COL_ROW_PAIRS].elem);
    for (int64_t i = 0; i < n;) {
        while (c->call < trace->call_count &&
               row + i >= trace->calls[c->call].row_begin + trace->calls[c->call].tokens)
            end_call(c, "/rows/pairs");
        if (c->call >= trace->call_count)
            return;
        uint16_t v = data ? data[(size_t)i * size] : 0;
        if (data && size == 2)
            memcpy(&v, data + 2 * (size_t)i, 2);
        c->sum += v;
        c->broken = c->broken || !data;
        i++;
    }
}

static void add_counts(checker *c, const uint8_t *data, int64_t n, int64_t row) {
    const mz_column_reader *col = &c->trace->col[MZ_COL_COUNTS];
    size_t size = mz_elem_size(col->elem);
    for (int64_t i = 0; i < n && row + i < c->trace->call_count; i++) {
        for (int64_t e = 0; e < col->width && data; e++) {
            int64_t value;
            mz_read_ints(col->elem, data + (size_t)(i * col->width + e) * size, 1, &value);
            if (value < 0 || value > INT64_MAX / 2 - c->sum)
                value = INT64_MAX / 2 - c->sum;
            c->sum += value;
        }
        c->broken = !data;
        end_call(c, "/counts");
    }
}

/* ---- scanning -------------------------------------------------------------------------------- */

static bool stopped(const checker *c) {
    return c->app && c->app->stop && *c->app->stop;
}

static mz_code check_column(checker *c, mz_column_id id, mz_err *err) {
    mz_trace *trace = c->trace;
    int64_t rows = rows_to_check(trace, id);
    c->call = c->sum = 0;
    c->broken = false;
    for (int64_t row = 0; row < rows;) {
        const uint8_t *data = NULL;
        int64_t rest = trace->col[id].chunk_rows - row % trace->col[id].chunk_rows;
        int64_t n = rows - row < rest ? rows - row : rest;
        if (stopped(c))
            return mz_fail(err, MZ_EABORTED, "interrupted");
        mz_code code = mz_column_span(trace, id, row, n, &data, &n, err);
        if (code != MZ_OK && code != MZ_EINPUT)
            return code;
        if (code == MZ_EINPUT) {
            data = NULL;
            mz_fault_line(c->faults, err);
            if (mz_server_pid(trace->server) == 0)
                return MZ_OK; /* nobody is left to ask */
        } else {
            check_values(c, id, data, n, row);
        }
        if (trace->consistent && id == MZ_COL_ROW_PAIRS)
            add_rows(c, data, n, row);
        if (trace->consistent && id == MZ_COL_COUNTS)
            add_counts(c, data, n, row);
        row += n;
        c->done += n * (int64_t)trace->col[id].row_size;
        if (c->app)
            mz_progress_update(&c->progress, c->done);
    }
    while (trace->consistent && id == MZ_COL_ROW_PAIRS && c->call < trace->call_count)
        end_call(c, "/rows/pairs");
    return MZ_OK;
}

static void check_whole(checker *c) {
    const mz_trace *trace = c->trace;
    if (!trace->consistent)
        return;
    int64_t tokens = 0;
    for (int64_t i = 0; i < trace->call_count; i++)
        tokens += trace->calls[i].tokens;
    if (tokens == 0)
        mz_fault(c->faults, "the whole trace holds no token");
    if (!trace->complete)
        fprintf(c->faults->out,
                "note: %s: the writer never closed this file; it is read up to its last complete "
                "flush: %" PRId64 " calls\n",
                trace->path, trace->call_count);
}

static mz_code check_columns(checker *c, mz_err *err) {
    mz_trace *trace = c->trace;
    int64_t total = 0;
    for (int id = 0; id < MZ_COLUMNS; id++)
        if (trace->col[id].usable)
            total += rows_to_check(trace, (mz_column_id)id) * (int64_t)trace->col[id].row_size;
    if (c->app)
        c->progress = mz_progress_start(&c->app->log, "checking", "bytes", total);
    mz_code code = MZ_OK;
    for (int id = 0; id < MZ_COLUMNS && code == MZ_OK; id++)
        if (trace->col[id].usable && mz_server_pid(trace->server) != 0)
            code = check_column(c, (mz_column_id)id, err);
    if (c->app)
        mz_progress_end(&c->progress);
    return code;
}

mz_code mz_trace_check(const mz_app *app, const char *path, int64_t limit, FILE *out,
                       int64_t *faults, mz_err *err) {
    mz_faults sink = {.path = path, .out = out, .limit = limit, .err = err};
    checker c = {.app = app, .faults = &sink};
    *faults = 0;
    mz_code code = mz_trace_load(path, &sink, &c.trace, err);
    if (code == MZ_OK)
        code = check_columns(&c, err);
    if (code == MZ_OK)
        check_whole(&c);
    mz_trace_close(&c.trace);
    *faults = sink.found;
    if (code == MZ_OK && sink.found > limit)
        fprintf(out, "%s: ... and %" PRId64 " more\n", path, sink.found - limit);
    return code;
}
