/* Loads for a placement: a window of steps as the counts to place, what lies before it as history.
 */
#include "analysis/place.h"

#include "traces/stream.h"
#include "traces/trace.h"

#include <stdlib.h>
#include <string.h>

struct place_source {
    mz_trace *trace;            /* or NULL */
    const place_counts *counts; /* or NULL */
    place_facts facts;
};

mz_code place_source_open(const char *trace, const place_counts *counts, place_source **out,
                          mz_err *err) {
    place_source *source = mz_calloc(1, sizeof *source);
    if (!source)
        return mz_fail_nomem(err, "the loads");
    *out = source;
    source->counts = counts;
    if (counts) {
        source->facts = (place_facts){.layers = counts->layers,
                                      .experts = counts->experts,
                                      .sources = counts->sources,
                                      .number = counts->number,
                                      .rows = counts->rows};
        return MZ_OK;
    }
    mz_code code = mz_trace_open(trace, &source->trace, err);
    if (code != MZ_OK)
        return code;
    const mz_trace_facts *t = mz_trace_facts_of(source->trace);
    source->facts = (place_facts){.layers = t->layers,
                                  .experts = t->experts,
                                  .sources = t->ranks,
                                  .top_k = t->top_k,
                                  .rows = t->layers};
    return MZ_OK;
}

void place_source_close(place_source **source) {
    if (*source)
        mz_trace_close(&(*source)->trace);
    free(*source);
    *source = NULL;
}

place_facts place_source_facts(const place_source *source) {
    return source->facts;
}

/* ---- adding up ---------------------------------------------------------------------------------
 * A unit of history is a step, or a micro-batch for policies that count calls. */

typedef struct tally {
    int64_t layers, sources, experts;
    int64_t *current; /* [layers][S][E] sums over the window */
    int64_t steps;    /* of it */
    int64_t *ring;    /* [depth][layers][S][E] the last units before it */
    int64_t depth, units;
    int64_t first_unit_step, last_unit_step; /* of the history used, for the words */
    int64_t *unit_step;                      /* [depth] */
} tally;

static int64_t cells(const tally *t) {
    return t->layers * t->sources * t->experts;
}

/* steps: how many lie before the window. */
static mz_code tally_make(tally *t, const mz_policy_traits *traits, int64_t steps, mz_arena *arena,
                          mz_err *err) {
    if (traits->sees & MZ_SEES_HISTORY)
        t->depth =
            (traits->lag < 1 ? 1 : traits->lag) + (traits->window < 1 ? 1 : traits->window) - 1;
    if (!traits->history_calls && t->depth > steps)
        t->depth = steps;
    t->current = MZ_NEW(arena, int64_t, cells(t));
    t->ring = t->depth > 0 ? MZ_NEW(arena, int64_t, t->depth * cells(t)) : NULL;
    t->unit_step = MZ_NEW(arena, int64_t, t->depth + 1);
    if (!t->current || !t->unit_step || (t->depth > 0 && !t->ring))
        return mz_fail_nomem(err, "the sums of the loads");
    return MZ_OK;
}

/* The place of a layer in the unit of history under way. */
static int64_t *unit_layer(tally *t, int64_t layer) {
    return t->ring + (t->units % t->depth) * cells(t) + layer * t->sources * t->experts;
}

static void add_layer(int64_t *sum, const int64_t *count, int64_t n, bool fresh) {
    for (int64_t i = 0; i < n; i++)
        sum[i] = count[i] + (fresh ? 0 : sum[i]);
}

/* ---- files -------------------------------------------------------------------------------------
 */

static mz_code add_counts(const place_counts *c, const place_window *w, tally *t, mz_err *err) {
    const int64_t n = cells(t), last = w->steps ? w->first_step + w->steps : c->steps;
    if (w->first_step >= c->steps || last > c->steps)
        return mz_fail(err, MZ_EINPUT,
                       "--first-step %lld, --steps %lld: the file has %lld step%s of counts",
                       (long long)w->first_step, (long long)w->steps, (long long)c->steps,
                       c->steps == 1 ? "" : "s");
    for (int64_t s = 0; s < w->first_step && t->depth > 0; s++) {
        memcpy(unit_layer(t, 0), c->count + s * n, (size_t)n * sizeof *t->ring);
        t->unit_step[t->units++ % t->depth] = s;
    }
    for (int64_t s = w->first_step; s < last; s++, t->steps++)
        add_layer(t->current, c->count + s * n, n, t->steps == 0);
    return MZ_OK;
}

/* ---- traces ------------------------------------------------------------------------------------
 */

static mz_code add_step(const mz_load_source *source, const mz_step_head *head, int64_t ordinal,
                        const place_window *w, bool calls, tally *t, mz_err *err) {
    const int64_t n = t->sources * t->experts;
    const bool window = ordinal >= w->first_step;
    for (int64_t i = 0; i < (int64_t)head->micro_batches * source->layers; i++) {
        mz_layer_call call;
        mz_code code = source->next_call(source->self, &call, err);
        if (code != MZ_OK)
            return code;
        const bool first = call.micro_batch == 0;
        if (window)
            add_layer(t->current + call.layer * n, call.load->count, n, first && t->steps == 0);
        else if (t->depth > 0)
            add_layer(unit_layer(t, call.layer), call.load->count, n, first || calls);
        const bool last_layer = call.layer == source->layers - 1;
        const bool last_batch = call.micro_batch == head->micro_batches - 1;
        if (!window && t->depth > 0 && last_layer && (calls || last_batch))
            t->unit_step[t->units++ % t->depth] = ordinal;
    }
    t->steps += window;
    return MZ_OK;
}

static mz_code add_trace(place_source *from, int32_t ranks, const place_window *w,
                         const mz_policy_traits *traits, tally *t, bool *reshaped, mz_err *err) {
    /* As many steps before the window as history can reach. */
    const int64_t before = t->depth < w->first_step ? t->depth : w->first_step;
    const mz_stream_options options = {.ranks = ranks,
                                       .step_tokens = w->step_tokens,
                                       .first_step = w->first_step - before,
                                       .steps = w->steps ? w->steps + before : 0,
                                       .seed = w->seed,
                                       .stop = w->stop};
    mz_stream *stream = NULL;
    mz_code code = mz_stream_open(from->trace, &options, &stream, err);
    if (code != MZ_OK)
        return code;
    const mz_load_source source = mz_stream_source(stream);
    *reshaped = mz_stream_reshaped(stream);
    bool end = false;
    for (int64_t ordinal = options.first_step; code == MZ_OK && !end; ordinal++) {
        mz_step_head head;
        code = source.next_step(source.self, &head, &end, err);
        if (code == MZ_OK && !end)
            code = add_step(&source, &head, ordinal, w, traits->history_calls, t, err);
    }
    mz_stream_close(&stream);
    if (code == MZ_OK && t->steps == 0)
        code = mz_fail(err, MZ_EINPUT, "--first-step %lld: the trace has no such step",
                       (long long)w->first_step);
    return code;
}

/* ---- to what a policy sees ---------------------------------------------------------------------
 */

static mz_code load_make(int32_t ranks, int32_t experts, mz_arena *arena, mz_load *load,
                         mz_err *err) {
    *load = (mz_load){.sources = ranks, .experts = experts};
    load->count = MZ_NEW(arena, int64_t, (int64_t)ranks * experts);
    load->total = MZ_NEW(arena, int64_t, experts);
    load->source = MZ_NEW(arena, int64_t, ranks);
    return load->count && load->total && load->source ? MZ_OK : mz_fail_nomem(err, "a load matrix");
}

/* Each source's row divided by `by`, its sum rounded and shared by largest remainder. */
static void average(int64_t *rows, int64_t sources, int64_t experts, int64_t by,
                    uint64_t *scratch) {
    for (int64_t s = 0; by > 1 && s < sources; s++) {
        int64_t *row = rows + s * experts, sum = 0;
        for (int64_t e = 0; e < experts; e++)
            sum += row[e];
        mz_largest_remainder((sum + by / 2) / by, row, (int32_t)experts, row, scratch);
    }
}

/* Recorded sources to ranks: as they are, merged in order, or one row spread evenly (largest
 * remainder: the first ranks take one more). */
static void to_ranks(const int64_t *rows, int64_t sources, mz_load *load) {
    const int64_t E = load->experts, R = load->sources;
    memset(load->count, 0, sizeof(int64_t) * (size_t)(R * E));
    for (int64_t s = 0; s < sources; s++)
        for (int64_t e = 0; e < E; e++) {
            const int64_t n = rows[s * E + e];
            if (sources > 1 || R == 1)
                load->count[s / (sources / R) * E + e] += n;
            else
                for (int64_t r = 0; r < R; r++)
                    load->count[r * E + e] = n / R + (r < n % R);
        }
    mz_load_sum(load);
}

static mz_code finish(tally *t, int64_t *sums, int64_t by, int32_t ranks, mz_load *out,
                      mz_arena *arena, mz_err *err) {
    static const int64_t pairs_max = (int64_t)1 << 40;
    uint64_t *scratch = MZ_NEW(arena, uint64_t, t->experts);
    if (!scratch)
        return mz_fail_nomem(err, "the loads");
    for (int64_t l = 0; l < t->layers; l++) {
        int64_t *rows = sums + l * t->sources * t->experts;
        average(rows, t->sources, t->experts, by, scratch);
        mz_code code = load_make(ranks, (int32_t)t->experts, arena, &out[l], err);
        if (code != MZ_OK)
            return code;
        to_ranks(rows, t->sources, &out[l]);
        if (out[l].pairs > pairs_max)
            return mz_fail(err, MZ_EINPUT,
                           "layer %lld: %lld pairs are more than 2^40: give fewer steps, or the "
                           "mean instead of --sum",
                           (long long)l, (long long)out[l].pairs);
    }
    return MZ_OK;
}

/* The units that a policy with this lag and window sees, summed in the place of the oldest. */
static int64_t *history_sum(tally *t, const mz_policy_traits *traits, int64_t *units) {
    const int64_t lag = traits->lag < 1 ? 1 : traits->lag;
    const int64_t window = traits->window < 1 ? 1 : traits->window;
    const int64_t last = t->units - lag; /* index of the newest unit seen */
    if (t->depth == 0 || last < 0)
        return NULL;
    int64_t first = last - window + 1;
    first = first < 0 ? 0 : first;
    int64_t *sum = t->ring + first % t->depth * cells(t);
    for (int64_t u = first + 1; u <= last; u++)
        add_layer(sum, t->ring + u % t->depth * cells(t), cells(t), false);
    *units = last - first + 1;
    t->first_unit_step = t->unit_step[first % t->depth];
    t->last_unit_step = t->unit_step[last % t->depth];
    return sum;
}

static void put_words(const tally *t, const place_window *w, const mz_policy_traits *traits,
                      int64_t history_units, bool one_snapshot, char *text, size_t size) {
    char counts[128] = "the counts given";
    if (!one_snapshot)
        snprintf(counts, sizeof counts, "%s of steps %lld to %lld", w->sum ? "the sum" : "the mean",
                 (long long)w->first_step, (long long)(w->first_step + t->steps - 1));
    const bool current = traits->sees & MZ_SEES_CURRENT, history = traits->sees & MZ_SEES_HISTORY;
    if (!current && !history)
        snprintf(text, size, "nothing");
    else if (!history)
        snprintf(text, size, "%s", counts);
    else if (history_units == 0)
        snprintf(text, size, "%s, as history too: nothing lies before", counts);
    else
        snprintf(text, size, "%s%sas history the mean of %lld %s, steps %lld to %lld",
                 current ? counts : "", current ? ", and " : "", (long long)history_units,
                 traits->history_calls ? "calls" : "steps", (long long)t->first_unit_step,
                 (long long)t->last_unit_step);
}

mz_code place_source_read(place_source *from, int32_t ranks, const place_window *w,
                          const mz_policy_traits *traits, mz_arena *arena, place_loads *loads,
                          mz_err *err) {
    tally t = {.layers = from->facts.layers,
               .sources = from->trace ? ranks : from->facts.sources,
               .experts = from->facts.experts};
    *loads =
        (place_loads){.layers = from->facts.layers, .ranks = ranks, .experts = from->facts.experts};
    if (!from->trace && t.sources > 1 && t.sources % ranks != 0)
        return mz_fail(err, MZ_EINPUT,
                       "the loads are of %lld sources, which do not merge to %d ranks: give a "
                       "number of ranks that divides them",
                       (long long)t.sources, ranks);
    mz_code code = tally_make(&t, traits, w->first_step, arena, err);
    if (code == MZ_OK)
        code = from->trace ? add_trace(from, ranks, w, traits, &t, &loads->reshaped, err)
                           : add_counts(from->counts, w, &t, err);
    loads->current = MZ_NEW(arena, mz_load, t.layers);
    loads->history = MZ_NEW(arena, mz_load, t.layers);
    if (code == MZ_OK && (!loads->current || !loads->history))
        code = mz_fail_nomem(err, "the loads");
    if (code == MZ_OK)
        code = finish(&t, t.current, w->sum ? 1 : t.steps, ranks, loads->current, arena, err);
    int64_t units = 0;
    int64_t *past = code == MZ_OK ? history_sum(&t, traits, &units) : NULL;
    if (code == MZ_OK && past)
        code = finish(&t, past, units, ranks, loads->history, arena, err);
    else if (code == MZ_OK)
        memcpy(loads->history, loads->current, (size_t)t.layers * sizeof *loads->history);
    put_words(&t, w, traits, units, from->counts && from->counts->steps == 1, loads->shown,
              sizeof loads->shown);
    return code;
}
