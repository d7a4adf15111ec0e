/* The tables of a trace: calls, sequences, steps, and what must hold between them. */
#include "traces/reader.h"

#include "common/base/arena.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 1024 };

/* A (step, micro-batch, rank): one token range, whatever the layer. */
typedef struct token_range {
    int64_t begin, tokens;
    int64_t group; /* (step, micro-batch) ordinal + 1 while scanning; 0: never seen */
} token_range;

typedef struct scan {
    mz_trace *trace;
    mz_faults *faults;
    token_range *of_rank; /* [ranks] range in the group being read */
    token_range *ranges;  /* every non-empty one, in file order */
    size_t range_count, range_cap;
    int64_t group;
    int64_t rows, pairs;           /* running sums */
    int64_t row_limit, pair_limit; /* rows of the bulk datasets */
} scan;

/* ---- calls ----------------------------------------------------------------------------------- */

static mz_code call_fault(scan *s, mz_column_id id, int64_t i, int64_t value, const char *rule) {
    char name[64];
    s->trace->consistent = false;
    return mz_fault(s->faults, "%s[%" PRId64 "] is %" PRId64 ", %s", mz_column_path(id, name), i,
                    value, rule);
}

static mz_code check_fields(scan *s, int64_t i, const int64_t value[MZ_CALL_COLUMNS], bool *fine) {
    const mz_trace_facts *f = &s->trace->facts;
    const int64_t high[MZ_CALL_COLUMNS] = {INT64_MAX,    INT32_MAX,     f->layers - 1,
                                           f->ranks - 1, INT64_MAX / 4, INT64_MAX / 4,
                                           INT64_MAX / 4};
    char rule[64];
    for (int id = 0; id < MZ_CALL_COLUMNS; id++) {
        if (value[id] >= 0 && value[id] <= high[id])
            continue;
        *fine = false;
        snprintf(rule, sizeof rule, "must be 0 to %" PRId64, high[id]);
        mz_code code = call_fault(s, (mz_column_id)id, i, value[id], rule);
        if (code != MZ_OK)
            return code;
    }
    return MZ_OK;
}

static bool comes_before(const mz_trace_call *a, const mz_trace_call *b) {
    if (a->step != b->step)
        return a->step < b->step;
    if (a->micro_batch != b->micro_batch)
        return a->micro_batch < b->micro_batch;
    if (a->layer != b->layer)
        return a->layer < b->layer;
    return a->rank < b->rank;
}

static mz_code check_range(scan *s, int64_t i, const mz_trace_call *call, mz_err *err) {
    token_range *r = &s->of_rank[call->rank];
    if (r->group == s->group) {
        if (r->begin == call->token_begin && r->tokens == call->tokens)
            return MZ_OK;
        s->trace->consistent = false;
        return mz_fault(s->faults,
                        "/calls/token_begin[%" PRId64 "]: tokens %" PRId64 " to %" PRId64
                        " differ from the same micro-batch and rank in an earlier layer",
                        i, call->token_begin, call->token_begin + call->tokens);
    }
    *r = (token_range){call->token_begin, call->tokens, s->group};
    if (call->tokens == 0)
        return MZ_OK;
    if (!mz_grow((void **)&s->ranges, &s->range_cap, s->range_count + 1, sizeof *s->ranges))
        return mz_fail_nomem(err, "the token ranges of the trace");
    s->ranges[s->range_count++] = *r;
    return MZ_OK;
}

static mz_code check_amounts(scan *s, int64_t i, const mz_trace_call *call) {
    const mz_trace_facts *f = &s->trace->facts;
    bool pairs = f->kind == MZ_TRACE_PAIRS;
    if (pairs && f->top_k > 0 && (call->pairs % f->top_k || call->pairs / f->top_k != call->tokens))
        return call_fault(s, MZ_COL_PAIRS, i, call->pairs, "must be tokens times top_k");
    if (call->pairs > 0 && call->tokens == 0)
        return call_fault(s, MZ_COL_PAIRS, i, call->pairs, "but the call has no tokens");
    if (call->tokens > INT64_MAX / 4 - s->rows || call->pairs > INT64_MAX / 4 - s->pairs)
        return call_fault(s, MZ_COL_TOKENS, i, call->tokens, "the sum is beyond any file");
    return MZ_OK;
}

/* *keep: false when the data of this call is not in an unfinished file. */
static mz_code add_call(scan *s, int64_t i, const int64_t value[MZ_CALL_COLUMNS], bool *keep,
                        mz_err *err) {
    mz_trace *trace = s->trace;
    bool fine = true;
    mz_code code = check_fields(s, i, value, &fine);
    if (code != MZ_OK || !fine)
        return code;
    mz_trace_call call = {.step = value[0],
                          .micro_batch = (int32_t)value[1],
                          .layer = (int32_t)value[2],
                          .rank = (int32_t)value[3],
                          .token_begin = value[4],
                          .tokens = value[5],
                          .row_begin = s->rows,
                          .pair_begin = s->pairs,
                          .pairs = value[6]};
    const mz_trace_call *last = i ? &trace->calls[i - 1] : NULL;
    if (last && !comes_before(last, &call)) {
        trace->consistent = false;
        code = mz_fault(s->faults,
                        "/calls[%" PRId64 "]: step %" PRId64 ", micro-batch %d, layer %d, rank %d "
                        "does not come after the call before it: calls must be sorted and unique",
                        i, call.step, call.micro_batch, call.layer, call.rank);
    }
    if (!last || last->step != call.step || last->micro_batch != call.micro_batch)
        s->group++;
    if (code == MZ_OK)
        code = check_amounts(s, i, &call);
    if (code != MZ_OK)
        return code;
    *keep = trace->complete ||
            (call.tokens <= s->row_limit - s->rows && call.pairs <= s->pair_limit - s->pairs);
    if (!*keep)
        return MZ_OK;
    trace->calls[i] = call;
    s->rows += call.tokens;
    s->pairs += call.pairs;
    return check_range(s, i, &call, err);
}

static mz_code count_calls(scan *s, int64_t *rows) {
    mz_trace *trace = s->trace;
    int64_t first = trace->col[MZ_COL_STEP].rows;
    char name[64];
    *rows = first;
    for (int id = 0; id < MZ_CALL_COLUMNS; id++) {
        int64_t n = trace->col[id].rows;
        if (n < *rows)
            *rows = n;
        if (n == first || !trace->complete)
            continue;
        trace->consistent = false;
        mz_code code = mz_fault(s->faults, "%s: %" PRId64 " rows, /calls/step has %" PRId64,
                                mz_column_path((mz_column_id)id, name), n, first);
        if (code != MZ_OK)
            return code;
    }
    const mz_column_reader *counts = &trace->col[MZ_COL_COUNTS];
    if (!trace->complete && trace->facts.kind == MZ_TRACE_COUNTS && counts->rows < *rows)
        *rows = counts->rows;
    return MZ_OK;
}

static mz_code read_calls(scan *s, int64_t rows, mz_err *err) {
    mz_trace *trace = s->trace;
    int64_t column[MZ_CALL_COLUMNS][BATCH], value[MZ_CALL_COLUMNS];
    size_t cap = 0;
    bool keep = true;
    for (int64_t i = 0; i < rows && keep;) {
        int64_t n = rows - i < BATCH ? rows - i : BATCH;
        for (int id = 0; id < MZ_CALL_COLUMNS; id++) {
            mz_code code = mz_column_ints(trace, (mz_column_id)id, i, n, column[id], err);
            if (code != MZ_OK)
                return code;
        }
        if (!mz_grow((void **)&trace->calls, &cap, (size_t)(i + n), sizeof *trace->calls))
            return mz_fail_nomem(err, "the calls of the trace");
        for (int64_t j = 0; j < n && keep; j++, i++) {
            for (int id = 0; id < MZ_CALL_COLUMNS; id++)
                value[id] = column[id][j];
            memset(&trace->calls[i], 0, sizeof trace->calls[i]);
            mz_code code = add_call(s, i, value, &keep, err);
            if (code != MZ_OK)
                return code;
            if (keep)
                trace->call_count = i + 1;
        }
    }
    return MZ_OK;
}

/* The recorder was stopped somewhere: a last micro-batch in which layers lack calls is dropped. */
static void drop_unfinished(scan *s) {
    mz_trace *trace = s->trace;
    int64_t end = trace->call_count, begin = end;
    if (end == 0)
        return;
    const mz_trace_call *last = &trace->calls[end - 1];
    while (begin > 0 && trace->calls[begin - 1].step == last->step &&
           trace->calls[begin - 1].micro_batch == last->micro_batch)
        begin--;
    int64_t first_layer = 0, last_layer = 0;
    for (int64_t i = begin; i < end; i++) {
        first_layer += trace->calls[i].layer == trace->calls[begin].layer;
        last_layer += trace->calls[i].layer == last->layer;
    }
    if (last->layer == trace->facts.layers - 1 && first_layer == last_layer)
        return;
    trace->call_count = begin;
    while (s->range_count > 0 && s->ranges[s->range_count - 1].group == s->group)
        s->range_count--;
    s->rows = begin ? trace->calls[begin - 1].row_begin + trace->calls[begin - 1].tokens : 0;
    s->pairs = begin ? trace->calls[begin - 1].pair_begin + trace->calls[begin - 1].pairs : 0;
}

/* Every bulk dataset holds what the calls announce: no less, and in a finished file no more. */
static mz_code check_lengths(scan *s) {
    mz_trace *trace = s->trace;
    const struct {
        mz_column_id id;
        int64_t want;
        const char *what;
    } rules[] = {{MZ_COL_EXPERT, s->pairs, "pairs"},        {MZ_COL_WEIGHT, s->pairs, "pairs"},
                 {MZ_COL_HIDDEN_NORM2, s->pairs, "pairs"},  {MZ_COL_ROW_PAIRS, s->rows, "tokens"},
                 {MZ_COL_GRAD_NORM2, s->rows, "tokens"},    {MZ_COL_INPUT_NORM2, s->rows, "tokens"},
                 {MZ_COL_COUNTS, trace->call_count, "rows"}};
    char name[64];
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const mz_column_reader *col = &trace->col[rules[i].id];
        if (!col->usable || !mz_column_wanted(rules[i].id, &trace->facts) ||
            col->rows == rules[i].want || (!trace->complete && col->rows > rules[i].want))
            continue;
        trace->consistent = false;
        mz_code code =
            mz_fault(s->faults, "%s: %" PRId64 " rows, but the calls hold %" PRId64 " %s",
                     mz_column_path(rules[i].id, name), col->rows, rules[i].want, rules[i].what);
        if (code != MZ_OK)
            return code;
    }
    return MZ_OK;
}

static int by_begin(const void *a, const void *b) {
    const token_range *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

static mz_code check_overlap(scan *s) {
    if (s->range_count)
        qsort(s->ranges, s->range_count, sizeof *s->ranges, by_begin);
    for (size_t i = 1; i < s->range_count; i++) {
        const token_range *a = &s->ranges[i - 1], *b = &s->ranges[i];
        if (a->begin + a->tokens <= b->begin)
            continue;
        s->trace->consistent = false;
        return mz_fault(s->faults,
                        "/calls/token_begin: token %" PRId64
                        " belongs to two ranks, micro-batches or steps",
                        b->begin);
    }
    return MZ_OK;
}

static int64_t least_rows(const mz_trace *trace, const mz_column_id *ids, int n) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < n; i++)
        if (mz_column_wanted(ids[i], &trace->facts) && trace->col[ids[i]].usable &&
            trace->col[ids[i]].rows < least)
            least = trace->col[ids[i]].rows;
    return least;
}

static mz_code load_calls(scan *s, mz_err *err) {
    static const mz_column_id per_pair[] = {MZ_COL_EXPERT, MZ_COL_WEIGHT, MZ_COL_HIDDEN_NORM2};
    static const mz_column_id per_row[] = {MZ_COL_ROW_PAIRS, MZ_COL_GRAD_NORM2, MZ_COL_INPUT_NORM2};
    int64_t rows;
    s->pair_limit = least_rows(s->trace, per_pair, 3);
    s->row_limit = least_rows(s->trace, per_row, 3);
    mz_code code = count_calls(s, &rows);
    if (code == MZ_OK)
        code = read_calls(s, rows, err);
    if (code == MZ_OK && !s->trace->complete)
        drop_unfinished(s);
    if (code == MZ_OK)
        code = check_lengths(s);
    if (code == MZ_OK)
        code = check_overlap(s);
    return code;
}

/* ---- sequences and steps --------------------------------------------------------------------- */

static mz_code same_rows(mz_trace *trace, const mz_column_id *ids, int n, mz_faults *faults,
                         int64_t *rows) {
    char name[64], other[64];
    *rows = trace->col[ids[0]].rows;
    for (int i = 1; i < n; i++) {
        const mz_column_reader *col = &trace->col[ids[i]];
        if (!col->usable || col->rows == trace->col[ids[0]].rows)
            continue;
        if (col->rows < *rows)
            *rows = col->rows;
        mz_code code = MZ_OK;
        if (trace->complete)
            code = mz_fault(faults, "%s: %" PRId64 " rows, %s has %" PRId64,
                            mz_column_path(ids[i], name), col->rows, mz_column_path(ids[0], other),
                            trace->col[ids[0]].rows);
        if (code != MZ_OK)
            return code;
    }
    return MZ_OK;
}

/* *range: the token range that holds the last sequence, sequences come in order. */
static mz_code check_sequence(scan *s, int64_t i, const mz_trace_sequence *q, int64_t last_end,
                              size_t *range, bool *keep) {
    if (q->tokens <= 0 || q->token_begin < last_end || q->tokens > INT64_MAX / 4 ||
        q->token_begin > INT64_MAX / 4)
        return mz_fault(s->faults,
                        "/sequences[%" PRId64 "]: tokens %" PRId64 " to %" PRId64
                        ": sequences must hold tokens, sorted, without overlap",
                        i, q->token_begin, q->token_begin + (q->tokens > 0 ? q->tokens : 0));
    while (*range < s->range_count &&
           s->ranges[*range].begin + s->ranges[*range].tokens <= q->token_begin)
        ++*range;
    bool inside = *range < s->range_count && s->ranges[*range].begin <= q->token_begin &&
                  q->token_begin + q->tokens <= s->ranges[*range].begin + s->ranges[*range].tokens;
    if (inside)
        return MZ_OK;
    /* An unfinished file may know sequences of calls that are not there yet. */
    *keep = s->trace->complete;
    return *keep ? mz_fault(s->faults,
                            "/sequences[%" PRId64 "]: tokens %" PRId64 " to %" PRId64
                            " do not lie within one rank's micro-batch",
                            i, q->token_begin, q->token_begin + q->tokens)
                 : MZ_OK;
}

static mz_code load_sequences(scan *s, mz_err *err) {
    static const mz_column_id ids[] = {MZ_COL_SEQ_TOKEN_BEGIN, MZ_COL_SEQ_TOKENS,
                                       MZ_COL_SEQ_DOMAIN};
    mz_trace *trace = s->trace;
    int64_t rows, value[3], end = 0, kept = 0;
    size_t cap = 0, range = 0;
    if (!trace->col[ids[0]].usable || !trace->col[ids[1]].usable)
        return MZ_OK;
    mz_code code = same_rows(trace, ids, 3, s->faults, &rows);
    value[2] = -1;
    for (int64_t i = 0; i < rows && code == MZ_OK; i++) {
        bool keep = true;
        for (int c = 0; c < 3 && code == MZ_OK; c++)
            if (trace->col[ids[c]].usable)
                code = mz_column_ints(trace, ids[c], i, 1, &value[c], err);
        if (code != MZ_OK)
            return code;
        if (value[2] < -1 || value[2] > INT32_MAX)
            code = mz_fault(s->faults,
                            "/sequences/domain[%" PRId64 "] is %" PRId64 ", must be -1 or more", i,
                            value[2]);
        mz_trace_sequence q = {value[0], value[1], (int32_t)value[2]};
        if (code == MZ_OK)
            code = check_sequence(s, i, &q, end, &range, &keep);
        if (code != MZ_OK)
            break;
        if (!keep)
            continue;
        if (!mz_grow((void **)&trace->sequences, &cap, (size_t)kept + 1, sizeof q))
            return mz_fail_nomem(err, "the sequences of the trace");
        trace->sequences[kept++] = q;
        trace->sequence_count = kept;
        end = q.tokens > 0 && q.tokens < INT64_MAX / 4 && q.token_begin < INT64_MAX / 4
                  ? q.token_begin + q.tokens
                  : end;
    }
    return code;
}

static mz_code load_steps(mz_trace *trace, mz_faults *faults, mz_err *err) {
    static const mz_column_id ids[] = {MZ_COL_STEPS_STEP, MZ_COL_LOSS, MZ_COL_LEARNING_RATE,
                                       MZ_COL_WALL_TIME};
    int64_t rows;
    size_t cap = 0;
    if (!trace->col[ids[0]].usable)
        return MZ_OK;
    mz_code code = same_rows(trace, ids, 4, faults, &rows);
    for (int64_t i = 0; i < rows && code == MZ_OK; i++) {
        mz_trace_step step = {-1, NAN, NAN, NAN};
        double *real[] = {&step.loss, &step.learning_rate, &step.wall_time};
        code = mz_column_ints(trace, ids[0], i, 1, &step.step, err);
        for (int c = 1; c < 4 && code == MZ_OK; c++)
            if (trace->col[ids[c]].usable)
                code = mz_column_reals(trace, ids[c], i, 1, real[c - 1], err);
        if (code != MZ_OK)
            return code;
        if (step.step < 0 || (i && step.step <= trace->steps[i - 1].step))
            code = mz_fault(faults,
                            "/steps/step[%" PRId64 "] is %" PRId64
                            ", must not be negative and must come in order",
                            i, step.step);
        if (!mz_grow((void **)&trace->steps, &cap, (size_t)i + 1, sizeof step))
            return mz_fail_nomem(err, "the steps of the trace");
        trace->steps[i] = step;
        trace->step_count = i + 1;
    }
    return code;
}

mz_code mz_tables_load(mz_trace *trace, mz_faults *faults, mz_err *err) {
    scan s = {.trace = trace, .faults = faults};
    s.of_rank = mz_calloc((size_t)trace->facts.ranks, sizeof *s.of_rank);
    if (!s.of_rank)
        return mz_fail_nomem(err, "the ranks of the trace");
    mz_code code = load_calls(&s, err);
    if (code == MZ_OK && trace->consistent)
        code = load_sequences(&s, err);
    if (code == MZ_OK)
        code = load_steps(trace, faults, err);
    free(s.of_rank);
    free(s.ranges);
    return code;
}
