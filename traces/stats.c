/* The pass over a trace that feeds the statistics. */
#include "traces/stats.h"

#include "traces/reader.h"
#include "traces/stats_private.h"

#include <stdlib.h>

enum { BLOCK = 4096, BEFORE = 9, AFTER = 100 }; /* tokens read at once; steps around the window */

/* First experts of the tokens of one call, for the layer after. */
typedef struct first_call_of {
    int32_t rank;
    int64_t tokens, at;
} first_call_of;

typedef struct firsts {
    int32_t layer; /* -1: nothing */
    first_call_of *call;
    int32_t *expert;
    size_t calls, call_room, tokens, token_room;
    size_t next; /* call to look at next */
} firsts;

typedef struct stats_pass {
    mz_arena arena;
    const mz_app *app;
    mz_trace *trace;
    const mz_trace_facts *facts;
    const mz_trace_call *calls;
    const mz_trace_sequence *sequences;
    int64_t call_count, sequence_count;
    int64_t first, last; /* calls of the window */
    mz_stats_drift *drift;
    mz_stats_sequence *sequence; /* NULL: no sequences */
    mz_stats_token *token;       /* NULL: counts */
    int64_t *total;              /* [layers][E] */
    int64_t *count;              /* [E] of a call */
    mz_trace_pairs_out block;
    size_t expert_room, weight_room;
    uint8_t *chosen;    /* [E] scratch: already in the token */
    uint16_t *distinct; /* [E] experts of a token, each once */
    float *weight;      /* their weights */
    firsts before, now;
} stats_pass;

static mz_code make_pass(stats_pass *p, mz_err *err) {
    int32_t layers = p->facts->layers, experts = p->facts->experts;
    p->total = MZ_NEW(&p->arena, int64_t, (int64_t)layers * experts);
    p->count = MZ_NEW(&p->arena, int64_t, experts);
    p->chosen = MZ_NEW(&p->arena, uint8_t, experts);
    p->distinct = MZ_NEW(&p->arena, uint16_t, experts);
    p->weight = MZ_NEW(&p->arena, float, experts);
    p->block.token_pairs = MZ_NEW(&p->arena, uint16_t, BLOCK);
    if (!p->total || !p->count || !p->chosen || !p->distinct || !p->weight || !p->block.token_pairs)
        return mz_fail_nomem(err, "the statistics of a trace");
    mz_code code = mz_stats_drift_make(&p->arena, p->facts, &p->drift, err);
    if (code || p->facts->kind == MZ_TRACE_COUNTS)
        return code;
    if (p->sequence_count)
        code = mz_stats_sequence_make(&p->arena, layers, experts, &p->sequence, err);
    if (!code)
        code =
            mz_stats_token_make(&p->arena, layers, experts, p->facts->has_weight, &p->token, err);
    return code;
}

/* ---- first experts of the layer before ------------------------------------------------------- */

static void swap_layers(stats_pass *p, int32_t layer) {
    firsts spare = p->before;
    p->before = p->now;
    p->now = spare;
    p->now.layer = layer;
    p->now.calls = p->now.tokens = 0;
    p->before.next = 0;
}

/* Experts that the layer before gave to the tokens of this call, or NULL. */
static const int32_t *find_before(stats_pass *p, const mz_trace_call *call) {
    firsts *b = &p->before;
    if (b->layer < 0 || b->layer != call->layer - 1)
        return NULL;
    while (b->next < b->calls && b->call[b->next].rank < call->rank)
        b->next++;
    if (b->next == b->calls || b->call[b->next].rank != call->rank ||
        b->call[b->next].tokens != call->tokens)
        return NULL;
    return b->expert + b->call[b->next].at;
}

/* *now NULL: no room for what a micro-batch has beyond the largest table, of which two layers have
 * one half each. */
static mz_code begin_firsts(stats_pass *p, const mz_trace_call *call, int32_t **now, mz_err *err) {
    firsts *f = &p->now;
    void *calls = f->call, *experts = f->expert;
    *now = NULL;
    if (call->tokens > (int64_t)(MZ_STATS_TABLE / 2 / sizeof *f->expert - f->tokens))
        return MZ_OK;
    int good = mz_grow(&calls, &f->call_room, f->calls + 1, sizeof *f->call);
    f->call = calls;
    if (good)
        good =
            mz_grow(&experts, &f->token_room, f->tokens + (size_t)call->tokens, sizeof *f->expert);
    f->expert = experts;
    if (!good)
        return mz_fail_nomem(err, "the first experts of a micro-batch");
    f->call[f->calls++] = (first_call_of){call->rank, call->tokens, (int64_t)f->tokens};
    *now = f->expert + f->tokens;
    f->tokens += (size_t)call->tokens;
    return MZ_OK;
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static mz_code read_block(stats_pass *p, int64_t index, int64_t first, int64_t tokens,
                          mz_err *err) {
    int64_t begin, pairs;
    mz_code code = mz_trace_count_pairs(p->trace, index, first, tokens, &begin, &pairs, err);
    void *experts = p->block.expert, *weights = p->block.weight;
    if (code)
        return code;
    int good = mz_grow(&experts, &p->expert_room, (size_t)pairs, sizeof *p->block.expert);
    p->block.expert = experts;
    if (good && p->facts->has_weight) {
        good = mz_grow(&weights, &p->weight_room, (size_t)pairs, sizeof *p->block.weight);
        p->block.weight = weights;
    }
    if (!good)
        return mz_fail_nomem(err, "the pairs of a block");
    mz_trace_pairs_out out = {.expert = p->block.expert, .weight = p->block.weight};
    out.token_pairs = p->facts->top_k ? NULL : p->block.token_pairs;
    return mz_trace_read_pairs(p->trace, index, first, tokens, &out, err);
}

/* The token's experts, each once, into p->distinct and p->weight; counts every pair. */
static int64_t take_token(stats_pass *p, const uint16_t *expert, const float *weight, int64_t n) {
    int64_t distinct = 0;
    for (int64_t i = 0; i < n; i++) {
        p->count[expert[i]]++;
        if (p->chosen[expert[i]])
            continue;
        p->chosen[expert[i]] = 1;
        p->distinct[distinct] = expert[i];
        p->weight[distinct++] = weight ? weight[i] : 0;
    }
    for (int64_t i = 0; i < distinct; i++)
        p->chosen[p->distinct[i]] = 0;
    return distinct;
}

/* Tokens [first, first + tokens) of a call, which are in p->block. *at: sequence that the next
 * token may belong to. */
static void take_block(stats_pass *p, const mz_trace_call *call, int64_t first, int64_t tokens,
                       int64_t *at, const int32_t *before, int32_t *now) {
    const uint16_t *expert = p->block.expert;
    const float *weight = p->block.weight;
    for (int64_t t = 0; t < tokens; t++) {
        int64_t n = p->facts->top_k ? p->facts->top_k : p->block.token_pairs[t];
        int64_t token = call->token_begin + first + t, distinct = take_token(p, expert, weight, n);
        while (*at < p->sequence_count &&
               token >= p->sequences[*at].token_begin + p->sequences[*at].tokens)
            ++*at;
        if (*at < p->sequence_count && token >= p->sequences[*at].token_begin) {
            if (token == p->sequences[*at].token_begin)
                mz_stats_sequence_begin(p->sequence, call->layer, p->sequences[*at].tokens);
            mz_stats_sequence_token(p->sequence, p->distinct, distinct);
        }
        int32_t top =
            mz_stats_token_add(p->token, call->layer, p->distinct, weight ? p->weight : NULL,
                               distinct, before ? before[first + t] : -1);
        if (now)
            now[first + t] = top;
        expert += n;
        weight += weight ? n : 0;
    }
}

static mz_code take_pairs(stats_pass *p, int64_t index, mz_err *err) {
    const mz_trace_call *call = &p->calls[index];
    int32_t *now = NULL;
    bool fresh = index == p->first || call[-1].micro_batch != call->micro_batch ||
                 call[-1].step != call->step;
    if (fresh || call[-1].layer != call->layer)
        swap_layers(p, call->layer);
    if (fresh)
        p->before.layer = -1;
    const int32_t *before = find_before(p, call);
    mz_code code = begin_firsts(p, call, &now, err);
    int64_t at = p->sequence_count ? mz_find_sequence(p->trace, call->token_begin) : 0;
    for (int64_t first = 0; first < call->tokens && !code; first += BLOCK) {
        int64_t tokens = call->tokens - first < BLOCK ? call->tokens - first : BLOCK;
        code = read_block(p, index, first, tokens, err);
        if (!code)
            take_block(p, call, first, tokens, &at, before, now);
    }
    return code;
}

/* ---- the pass -------------------------------------------------------------------------------- */

/* First call of the window and one past its last. */
static void find_window(stats_pass *p, const mz_info_options *options) {
    p->first = 0;
    while (p->first < p->call_count && p->calls[p->first].step < options->from_step)
        p->first++;
    p->last = p->first;
    while (p->last < p->call_count && p->calls[p->last].step <= options->to_step)
        p->last++;
}

/* Widens the window by some steps for the statistics over steps. */
static void find_margins(const stats_pass *p, int64_t *begin, int64_t *end) {
    *begin = p->first;
    *end = p->last;
    if (p->facts->step_meaning == MZ_STEP_NONE || p->first == p->last)
        return;
    for (int steps = 0; *begin > 0; --*begin)
        if (p->calls[*begin - 1].step != p->calls[*begin].step && ++steps > BEFORE)
            break;
    for (int steps = 0; *end < p->call_count; ++*end)
        if (p->calls[*end - 1].step != p->calls[*end].step && ++steps > AFTER)
            break;
}

static mz_code take_call(stats_pass *p, int64_t index, mz_err *err) {
    const mz_trace_call *call = &p->calls[index];
    bool inside = index >= p->first && index < p->last;
    memset(p->count, 0, (size_t)p->facts->experts * sizeof *p->count);
    mz_code code = p->token && inside ? take_pairs(p, index, err)
                                      : mz_trace_add_counts(p->trace, index, p->count, err);
    if (code)
        return code;
    int64_t *total = p->total + (int64_t)call->layer * p->facts->experts;
    for (int32_t e = 0; e < p->facts->experts && inside; e++)
        total[e] += p->count[e];
    mz_stats_drift_call(p->drift, call->layer, call->rank, p->count);
    return MZ_OK;
}

static mz_code take_calls(stats_pass *p, mz_err *err) {
    int64_t begin, end, pairs = 0, all = 0;
    find_margins(p, &begin, &end);
    for (int64_t i = begin; i < end; i++)
        all += p->calls[i].pairs;
    mz_progress progress = mz_progress_start(&p->app->log, "statistics", "pairs", all);
    mz_code code = MZ_OK;
    for (int64_t i = begin; i < end && !code; i++) {
        code = take_call(p, i, err);
        if (!code && (i + 1 == end || p->calls[i + 1].step != p->calls[i].step))
            mz_stats_drift_step(p->drift, i < p->first, i < p->last);
        pairs += p->calls[i].pairs;
        mz_progress_update(&progress, pairs);
        if (!code && p->app->stop && *p->app->stop)
            code = mz_fail(err, MZ_EABORTED, "interrupted");
    }
    mz_progress_end(&progress);
    return code;
}

void mz_stats_summary(mz_trace_stats *stats) {
    for (int m = 0; m < MZ_STATS_METRICS; m++) {
        double sum = 0, low = INFINITY, high = -INFINITY;
        int32_t layers = 0;
        for (int32_t l = 0; l < stats->layers; l++) {
            double value = stats->layer[(int64_t)l * MZ_STATS_METRICS + m];
            if (!isfinite(value))
                continue;
            layers++;
            sum += value;
            low = fmin(low, value);
            high = fmax(high, value);
        }
        stats->mean[m] = layers ? sum / layers : (double)NAN;
        stats->low[m] = layers ? low : (double)NAN;
        stats->high[m] = layers ? high : (double)NAN;
    }
}

static mz_code finish(stats_pass *p, int32_t ranks, mz_trace_stats *stats, mz_err *err) {
    int64_t cells = (int64_t)stats->layers * MZ_STATS_METRICS, tokens, experts = p->facts->experts;
    int64_t *scratch = MZ_NEW(&p->arena, int64_t, experts);
    stats->layer = mz_calloc((size_t)cells, sizeof *stats->layer);
    mz_code code =
        scratch && stats->layer ? MZ_OK : mz_fail_nomem(err, "the statistics of a trace");
    for (int64_t i = 0; i < cells && !code; i++)
        stats->layer[i] = NAN;
    for (int32_t l = 0; l < stats->layers && !code; l++) {
        double *metric = stats->layer + (int64_t)l * MZ_STATS_METRICS;
        mz_stats_skew(p->total + l * experts, (int32_t)experts, ranks, scratch, metric);
        mz_stats_drift_finish(p->drift, l, metric);
        const int64_t *chose = p->token ? mz_stats_token_chose(p->token, l, &tokens) : NULL;
        if (p->sequence)
            mz_stats_sequence_finish(p->sequence, l, chose, tokens, metric);
        if (p->token)
            code = mz_stats_token_finish(p->token, l, metric, err);
    }
    if (!code)
        mz_stats_summary(stats);
    return code;
}

mz_code mz_trace_stats_read(const mz_app *app, mz_trace *trace, const mz_info_options *options,
                            mz_trace_stats *stats, mz_err *err) {
    stats_pass p = {.app = app, .trace = trace, .facts = mz_trace_facts_of(trace)};
    int32_t ranks;
    *stats = (mz_trace_stats){.layers = p.facts->layers};
    mz_code code = mz_info_ranks(trace, options, &ranks, err);
    if (!code && (int64_t)p.facts->layers * p.facts->experts > MZ_STATS_TABLE / 8)
        code = mz_fail(err, MZ_EINPUT,
                       "%s: %d layers of %d experts are too many for these statistics; mizan trace "
                       "info --loads-only does without",
                       mz_trace_path(trace), p.facts->layers, p.facts->experts);
    if (code)
        return code;
    p.call_count = mz_trace_calls(trace, &p.calls);
    p.sequence_count = mz_trace_sequences(trace, &p.sequences);
    p.before.layer = p.now.layer = -1;
    find_window(&p, options);
    code = make_pass(&p, err);
    if (!code)
        code = take_calls(&p, err);
    if (!code)
        code = finish(&p, ranks, stats, err);
    if (code)
        mz_trace_stats_free(stats);
    free(p.before.call);
    free(p.before.expert);
    free(p.now.call);
    free(p.now.expert);
    free(p.block.expert);
    free(p.block.weight);
    mz_arena_free(&p.arena);
    return code;
}

void mz_trace_stats_free(mz_trace_stats *stats) {
    free(stats->layer);
    stats->layer = NULL;
}
