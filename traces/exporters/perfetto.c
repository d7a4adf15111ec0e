/* Counters for ui.perfetto.dev and chrome://tracing, in Chrome's JSON form of trace events: how
 * uneven every layer was, step by step. Events of phase "C" (counter), times `ts` in microseconds
 * from the start of the first exported step: the recorded wall times of the steps before where all
 * are known, otherwise one millisecond for every number that steps count on. Process 0 has the
 * counters of whole steps, process l + 1 those of MoE layer l, loads summed over the micro-batches
 * and source ranks of the step. Memory: one step of counts. */
#include "traces/exporters/common.h"
#include "traces/exporters/table.h"

#include "common/base/arena.h"
#include "traces/stats_private.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct counters {
    mz_app *app;
    mz_trace *trace;
    const mz_trace_facts *facts;
    const mz_trace_call *call;
    const mz_trace_step *described;
    int64_t described_count;
    int64_t first, end; /* calls of the window of steps */
    int32_t ranks;      /* that hold experts in contiguous blocks */
    bool timed;         /* every step of the window has a wall time */
    double ts;          /* of the step at hand, microseconds */
    int64_t *count;     /* [layers][experts] */
    int64_t *tokens;    /* [layers] */
    int64_t *scratch;   /* [experts] */
    mz_export_report *report;
} counters;

/* What is recorded of a step besides its routing, or NULL. */
static const mz_trace_step *describe(const counters *x, int64_t step) {
    int64_t low = 0, high = x->described_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (x->described[middle].step < step)
            low = middle + 1;
        else
            high = middle;
    }
    return low < x->described_count && x->described[low].step == step ? &x->described[low] : NULL;
}

/* Whether all wall times are known, and their sum in microseconds is a number. */
static bool all_timed(const counters *x) {
    double sum = 0;
    for (int64_t i = x->first; i < x->end; i++) {
        if (i > x->first && x->call[i].step == x->call[i - 1].step)
            continue;
        const mz_trace_step *s = describe(x, x->call[i].step);
        if (!s || !(s->wall_time >= 0))
            return false;
        sum += 1e6 * s->wall_time;
    }
    return isfinite(sum);
}

static void put_name(FILE *out, int32_t process, const char *name, int32_t number) {
    fprintf(out, ",\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"%s",
            process, name);
    if (number >= 0)
        fprintf(out, " %d", number);
    fprintf(out, "\"}},\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_sort_index\",", process);
    fprintf(out, "\"args\":{\"sort_index\":%d}}", process);
}

static void put(const counters *x, FILE *out, int32_t process, const char *name, double value) {
    if (isfinite(value))
        fprintf(out,
                ",\n{\"ph\":\"C\",\"pid\":%d,\"ts\":%.3f,\"name\":\"%s\",\"args\":{\"value\":"
                "%.9g}}",
                process, x->ts, name, value);
}

static void put_layer(const counters *x, FILE *out, int32_t layer) {
    const int64_t *count = x->count + (int64_t)layer * x->facts->experts;
    double metric[MZ_STATS_METRICS];
    int64_t pairs = 0;
    double wanted = (double)x->tokens[layer] * x->facts->top_k;
    for (int m = 0; m < MZ_STATS_METRICS; m++)
        metric[m] = NAN;
    for (int32_t e = 0; e < x->facts->experts; e++)
        pairs += count[e];
    mz_stats_skew(count, x->facts->experts, x->ranks, x->scratch, metric);
    put(x, out, layer + 1, "pairs", (double)pairs);
    put(x, out, layer + 1, "experts: max/mean", metric[MZ_SKEW_MAX_OVER_MEAN]);
    put(x, out, layer + 1, "experts: entropy / log E", metric[MZ_SKEW_ENTROPY]);
    put(x, out, layer + 1, "experts: share of the busiest", metric[MZ_SKEW_TOP1]);
    put(x, out, layer + 1, "experts: share below 0.1 x mean", metric[MZ_SKEW_COLD]);
    if (x->ranks > 1)
        put(x, out, layer + 1, "ranks: max/mean", metric[MZ_SKEW_RANKS]);
    if (x->facts->kind == MZ_TRACE_COUNTS && wanted > 0)
        put(x, out, layer + 1, "dropped pairs", fmax(wanted - (double)pairs, 0));
}

static void put_step(counters *x, FILE *out, int64_t step) {
    const mz_trace_step *s = describe(x, step);
    put(x, out, 0, "step", (double)step);
    put(x, out, 0, "tokens", (double)x->tokens[0]);
    if (s) {
        put(x, out, 0, "loss, nat/token", s->loss);
        put(x, out, 0, "learning rate", s->learning_rate);
        put(x, out, 0, "wall time, s", s->wall_time);
    }
    for (int32_t l = 0; l < x->facts->layers; l++)
        put_layer(x, out, l);
}

static mz_code take_call(counters *x, int64_t index, mz_err *err) {
    const mz_trace_call *call = &x->call[index];
    x->report->calls++;
    x->report->pairs += call->pairs;
    x->report->tokens += call->layer == 0 ? call->tokens : 0;
    x->tokens[call->layer] += call->tokens;
    return mz_trace_add_counts(x->trace, index, x->count + (int64_t)call->layer * x->facts->experts,
                               err);
}

static mz_code write_steps(counters *x, FILE *out, mz_err *err) {
    size_t cells = (size_t)x->facts->layers * (size_t)x->facts->experts;
    mz_code code = MZ_OK;
    mz_progress progress = mz_progress_start(&x->app->log, "exporting", "calls", x->end - x->first);
    for (int64_t i = x->first; i < x->end && !code; i++) {
        int64_t step = x->call[i].step;
        code = take_call(x, i, err);
        mz_progress_update(&progress, i + 1 - x->first);
        if (code || (i + 1 < x->end && x->call[i + 1].step == step))
            continue;
        put_step(x, out, step);
        memset(x->count, 0, cells * sizeof *x->count);
        memset(x->tokens, 0, (size_t)x->facts->layers * sizeof *x->tokens);
        if (x->timed)
            x->ts += 1e6 * describe(x, step)->wall_time;
        else if (i + 1 < x->end)
            x->ts = 1e3 * (double)(x->call[i + 1].step - x->call[x->first].step);
        code = mz_export_stopped(x->app, err);
    }
    mz_progress_end(&progress);
    return code;
}

static mz_code write_events(void *self, FILE *out, mz_err *err) {
    counters *x = self;
    fprintf(out,
            "{\"displayTimeUnit\":\"ms\",\n\"otherData\":{\"schema\":\"mizan-trace-counters/1\","
            "\"producer\":\"mizan %s\",\"time\":\"%s\",\"experts\":%d,\"ranks\":%d},\n"
            "\"traceEvents\":[\n{\"ph\":\"M\",\"pid\":0,\"name\":\"process_labels\",\"args\":"
            "{\"labels\":\"%s\"}}",
            x->app->version, x->timed ? "recorded wall times of steps" : "1 ms per step number",
            x->facts->experts, x->ranks,
            x->timed ? "time: recorded wall times of steps" : "time: 1 ms per step number");
    put_name(out, 0, "steps", -1);
    for (int32_t l = 0; l < x->facts->layers; l++)
        put_name(out, l + 1, "MoE layer", l);
    mz_code code = write_steps(x, out, err);
    fputs("\n]}\n", out);
    return code;
}

static mz_code export(mz_app *app, mz_trace *trace, const mz_export_options *options,
                      const char *output, mz_export_report *report, mz_err *err) {
    const mz_carries carries = {.steps = true};
    counters x = {.app = app, .trace = trace, .facts = mz_trace_facts_of(trace), .report = report};
    int32_t experts = x.facts->experts, recorded = x.facts->ranks;
    x.ranks = options->ranks ? (int32_t)options->ranks : recorded < experts ? recorded : experts;
    if (x.ranks > experts)
        return mz_fail(err, MZ_EINPUT, "--ranks: %d ranks for %d experts", x.ranks, experts);
    mz_trace_calls(trace, &x.call);
    x.described_count = mz_trace_steps(trace, &x.described);
    mz_code code = mz_export_window(trace, options, &x.first, &x.end, err);
    if (code)
        return code;
    x.timed = all_timed(&x);
    x.count = mz_calloc((size_t)x.facts->layers, (size_t)experts * sizeof *x.count);
    x.tokens = mz_calloc((size_t)x.facts->layers, sizeof *x.tokens);
    x.scratch = mz_calloc((size_t)experts, sizeof *x.scratch);
    code = x.count && x.tokens && x.scratch ? mz_export_file(output, write_events, &x, err)
                                            : mz_fail_nomem(err, "one step of counts");
    mz_export_lost(trace, &carries, report);
    if (x.facts->kind == MZ_TRACE_PAIRS)
        mz_remark(report->lost, sizeof report->lost, "experts of single tokens");
    mz_remark(report->note, sizeof report->note, "open %s at ui.perfetto.dev; time: %s", output,
              x.timed ? "recorded wall times of steps" : "1 ms per step number");
    free(x.count);
    free(x.tokens);
    free(x.scratch);
    return code;
}

const mz_exporter mz_export_perfetto = {
    .name = "perfetto",
    .summary = "unevenness of every layer over the steps, as counters for ui.perfetto.dev",
    .options = "first-step steps ranks",
    .export = export,
};
