#include "traces/cut.h"

#include "common/base/arena.h"
#include "traces/reader.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* One (step, micro-batch, rank) that is kept. */
typedef struct kept {
    int64_t old_begin, new_begin;
    int64_t tokens; /* kept ones, from the first */
} kept;

typedef struct cutter {
    mz_app *app;
    mz_trace *trace;
    mz_cut_options options;
    mz_trace_writer *writer;
    int64_t first_step, last_step; /* recorded numbers */
    kept *of_rank;                 /* [ranks] in the micro-batch at hand; tokens -1: not seen yet */
    int64_t tokens;                /* written */
    int64_t reached;               /* step of the last call written */
    bool full;
    int64_t *count;
    uint16_t *expert, *token_pairs;
    float *weight, *hidden_norm2, *grad_norm2, *input_norm2;
    size_t pair_cap, token_cap;
} cutter;

static mz_code check_window(const char *what, int64_t first, int64_t *n, int64_t have,
                            const mz_trace *trace, mz_err *err) {
    if (*n == 0)
        *n = have - first;
    if (first >= 0 && *n > 0 && first <= have - *n)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "%s: %s %" PRId64 " to %" PRId64 " are asked for, the trace has %" PRId64
                   " (counted from 0)",
                   trace->path, what, first, first + (*n > 0 ? *n - 1 : 0), have);
}

/* Recorded numbers of the first and last step of the window. */
static mz_code find_steps(cutter *c, mz_err *err) {
    const mz_trace *trace = c->trace;
    int64_t steps = 0, ordinal = -1;
    for (int64_t i = 0; i < trace->call_count; i++)
        steps += i == 0 || trace->calls[i].step != trace->calls[i - 1].step;
    mz_code code =
        check_window("steps", c->options.first_step, &c->options.steps, steps, trace, err);
    for (int64_t i = 0; i < trace->call_count && code == MZ_OK; i++) {
        ordinal += i == 0 || trace->calls[i].step != trace->calls[i - 1].step;
        if (ordinal == c->options.first_step)
            c->first_step = trace->calls[i].step;
        if (ordinal == c->options.first_step + c->options.steps - 1)
            c->last_step = trace->calls[i].step;
    }
    return code;
}

static mz_code find_windows(cutter *c, mz_err *err) {
    const mz_trace_facts *f = &c->trace->facts;
    int64_t layers = c->options.layers, ranks = c->options.ranks;
    mz_code code =
        check_window("layers", c->options.first_layer, &layers, f->layers, c->trace, err);
    if (code == MZ_OK)
        code = check_window("ranks", c->options.first_rank, &ranks, f->ranks, c->trace, err);
    if (code == MZ_OK)
        code = find_steps(c, err);
    c->options.layers = (int32_t)layers;
    c->options.ranks = (int32_t)ranks;
    return code;
}

static bool in_window(const cutter *c, const mz_trace_call *call) {
    return call->step >= c->first_step && call->step <= c->last_step &&
           call->layer >= c->options.first_layer &&
           call->layer < c->options.first_layer + c->options.layers &&
           call->rank >= c->options.first_rank &&
           call->rank < c->options.first_rank + c->options.ranks;
}

/* How many of the block's tokens still fit, in whole sequences where the trace has them. */
static int64_t fitting(const cutter *c, int64_t begin, int64_t tokens) {
    int64_t room = c->options.max_tokens - c->tokens, fit = 0;
    if (c->options.max_tokens == 0 || tokens <= room)
        return tokens;
    if (c->trace->facts.kind == MZ_TRACE_COUNTS)
        return 0;
    if (c->trace->sequence_count == 0)
        return room;
    for (int64_t i = mz_find_sequence(c->trace, begin); i < c->trace->sequence_count; i++) {
        int64_t end = c->trace->sequences[i].token_begin + c->trace->sequences[i].tokens - begin;
        if (end > room)
            break;
        fit = end;
    }
    return fit;
}

static mz_code write_sequences(cutter *c, const kept *k, mz_err *err) {
    mz_code code = MZ_OK;
    int64_t i = mz_find_sequence(c->trace, k->old_begin), end = k->old_begin + k->tokens;
    for (; i < c->trace->sequence_count && code == MZ_OK; i++) {
        mz_trace_sequence q = c->trace->sequences[i];
        if (q.token_begin >= end)
            break;
        q.token_begin += k->new_begin - k->old_begin;
        code = mz_trace_write_sequence(c->writer, &q, err);
    }
    return code;
}

/* Decides about a rank's tokens when its first layer of a micro-batch comes by. */
static mz_code meet(cutter *c, const mz_trace_call *call, kept *k, mz_err *err) {
    int64_t tokens = c->full ? 0 : fitting(c, call->token_begin, call->tokens);
    c->full = c->full || tokens < call->tokens;
    *k = (kept){call->token_begin, c->tokens, tokens};
    c->tokens += tokens;
    return write_sequences(c, k, err);
}

static bool grow_floats(bool wanted, float **array, size_t n) {
    free(*array);
    *array = wanted ? malloc(n * sizeof **array) : NULL;
    return !wanted || *array;
}

static bool grow_buffers(cutter *c, int64_t tokens, int64_t pairs) {
    const mz_trace_facts *f = &c->trace->facts;
    bool ok = true;
    if ((size_t)pairs >= c->pair_cap) {
        c->pair_cap = (size_t)pairs + (size_t)pairs / 4 + 64;
        free(c->expert);
        c->expert = malloc(c->pair_cap * sizeof *c->expert);
        ok = c->expert && grow_floats(f->has_weight, &c->weight, c->pair_cap) &&
             grow_floats(f->has_hidden_norm2, &c->hidden_norm2, c->pair_cap);
    }
    if (ok && (size_t)tokens >= c->token_cap) {
        c->token_cap = (size_t)tokens + (size_t)tokens / 4 + 64;
        free(c->token_pairs);
        c->token_pairs = malloc(c->token_cap * sizeof *c->token_pairs);
        ok = c->token_pairs && grow_floats(f->has_grad_norm2, &c->grad_norm2, c->token_cap) &&
             grow_floats(f->has_input_norm2, &c->input_norm2, c->token_cap);
    }
    return ok;
}

static mz_code read_call(cutter *c, int64_t index, mz_trace_call_data *data, mz_err *err) {
    if (c->trace->facts.kind == MZ_TRACE_COUNTS) {
        memset(c->count, 0, sizeof *c->count * (size_t)c->trace->facts.experts);
        data->count = c->count;
        data->pairs = c->trace->calls[index].pairs;
        return mz_trace_add_counts(c->trace, index, c->count, err);
    }
    int64_t first;
    mz_code code =
        mz_trace_count_pairs(c->trace, index, 0, data->tokens, &first, &data->pairs, err);
    if (code == MZ_OK && !grow_buffers(c, data->tokens, data->pairs))
        code = mz_fail_nomem(err, "a call of the trace");
    if (code != MZ_OK)
        return code;
    mz_trace_pairs_out out = {c->expert,      c->weight,     c->hidden_norm2,
                              c->token_pairs, c->grad_norm2, c->input_norm2};
    data->expert = c->expert;
    data->weight = c->weight;
    data->hidden_norm2 = c->hidden_norm2;
    data->token_pairs = c->token_pairs;
    data->grad_norm2 = c->grad_norm2;
    data->input_norm2 = c->input_norm2;
    return mz_trace_read_pairs(c->trace, index, 0, data->tokens, &out, err);
}

static mz_code cut_call(cutter *c, int64_t index, mz_err *err) {
    const mz_trace_call *call = &c->trace->calls[index];
    kept *k = &c->of_rank[call->rank];
    mz_code code = k->tokens < 0 ? meet(c, call, k, err) : MZ_OK;
    if (code != MZ_OK || (k->tokens == 0 && call->tokens > 0))
        return code;
    mz_trace_call_data data = {.step = call->step,
                               .micro_batch = call->micro_batch,
                               .layer = call->layer - c->options.first_layer,
                               .rank = call->rank - c->options.first_rank,
                               .token_begin = k->new_begin,
                               .tokens = k->tokens};
    code = read_call(c, index, &data, err);
    c->reached = call->step;
    return code == MZ_OK ? mz_trace_write_call(c->writer, &data, err) : code;
}

static mz_code cut_calls(cutter *c, mz_err *err) {
    const mz_trace *trace = c->trace;
    mz_progress progress = {0};
    mz_code code = MZ_OK;
    if (c->app)
        progress = mz_progress_start(&c->app->log, "cutting", "calls", trace->call_count);
    for (int64_t i = 0; i < trace->call_count && code == MZ_OK; i++) {
        const mz_trace_call *call = &trace->calls[i];
        bool fresh =
            i == 0 || call[-1].step != call->step || call[-1].micro_batch != call->micro_batch;
        if (fresh && c->full)
            break;
        for (int32_t r = 0; fresh && r < trace->facts.ranks; r++)
            c->of_rank[r].tokens = -1;
        if (c->app && c->app->stop && *c->app->stop)
            code = mz_fail(err, MZ_EABORTED, "interrupted");
        else if (in_window(c, call))
            code = cut_call(c, i, err);
        if (c->app)
            mz_progress_update(&progress, i + 1);
    }
    if (c->app)
        mz_progress_end(&progress);
    if (code == MZ_OK && c->tokens == 0)
        code =
            mz_fail(err, MZ_EINPUT,
                    "%s: nothing is left: no tokens in what is asked for; take more steps, layers "
                    "or ranks, or allow more tokens",
                    trace->path);
    return code;
}

static mz_code cut_steps(cutter *c, mz_err *err) {
    mz_code code = MZ_OK;
    for (int64_t i = 0; i < c->trace->step_count && code == MZ_OK; i++) {
        const mz_trace_step *s = &c->trace->steps[i];
        if (s->step >= c->first_step && s->step <= (c->full ? c->reached : c->last_step))
            code = mz_trace_write_step(c->writer, s->step, s->loss, s->learning_rate, s->wall_time,
                                       err);
    }
    return code;
}

static void free_cutter(cutter *c) {
    mz_trace_writer_abandon(&c->writer);
    void *all[] = {c->of_rank, c->count,      c->expert,      c->token_pairs,
                   c->weight,  c->grad_norm2, c->input_norm2, c->hidden_norm2};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

mz_code mz_trace_cut(mz_app *app, mz_trace *trace, const mz_cut_options *options,
                     const char *output, const mz_trace_write_options *write, mz_err *err) {
    cutter c = {.app = app, .trace = trace, .options = *options};
    mz_trace_facts facts = trace->facts;
    mz_code code = find_windows(&c, err);
    facts.layers = c.options.layers;
    facts.ranks = c.options.ranks;
    c.of_rank = mz_calloc((size_t)trace->facts.ranks, sizeof *c.of_rank);
    c.count = mz_calloc((size_t)trace->facts.experts, sizeof *c.count);
    if (code == MZ_OK && (!c.of_rank || !c.count))
        code = mz_fail_nomem(err, "a cut of the trace");
    if (code == MZ_OK)
        code = mz_trace_create(output, &facts, write, &c.writer, err);
    if (code == MZ_OK)
        code = cut_calls(&c, err);
    if (code == MZ_OK)
        code = cut_steps(&c, err);
    if (code == MZ_OK)
        code = mz_trace_writer_close(&c.writer, err);
    free_cutter(&c);
    return code;
}
