#include "traces/info.h"

#include "common/base/arena.h"
#include "common/io/json.h"
#include "traces/reader.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b) {
    const int64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

mz_spread mz_spread_of(const int64_t *x, int64_t n, int64_t *sorted) {
    double sum = 0, squares = 0, ordered = 0, entropy = 0;
    memcpy(sorted, x, (size_t)n * sizeof *x);
    qsort(sorted, (size_t)n, sizeof *x, by_value);
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i];
    if (!(sum > 0))
        return (mz_spread){NAN, NAN, NAN, NAN, NAN, NAN};
    double count = (double)n, mean = sum / count;
    int64_t cold = 0;
    for (int64_t i = 0; i < n; i++) {
        double value = (double)sorted[i], share = value / sum;
        squares += (value - mean) * (value - mean);
        ordered += (double)(i + 1) * value;
        entropy -= share > 0 ? share * log(share) : 0;
        cold += value < 0.1 * mean;
    }
    double top = (double)sorted[n - 1];
    return (mz_spread){.max_over_mean = top / mean,
                       .top1_share = top / sum,
                       .cv = sqrt(squares / count) / mean,
                       .gini = 2 * ordered / (count * sum) - (count + 1) / count,
                       .entropy = n > 1 ? entropy / log(count) : 1.0,
                       .cold = (double)cold / count};
}

double mz_block_imbalance(const int64_t *load, int32_t experts, int32_t ranks) {
    double most = 0, sum = 0;
    for (int64_t e = 0, r = 0; r < ranks; r++) {
        double block = 0;
        for (; e < experts && e * ranks / experts == r; e++)
            block += (double)load[e];
        most = block > most ? block : most;
        sum += block;
    }
    return sum > 0 ? most * ranks / sum : (double)NAN;
}

mz_code mz_info_ranks(const mz_trace *trace, const mz_info_options *options, int32_t *ranks,
                      mz_err *err) {
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    int32_t most = facts->ranks < facts->experts ? facts->ranks : facts->experts;
    *ranks = options->ranks ? options->ranks : most;
    if (*ranks <= facts->experts)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT, "%s: --ranks: %d ranks for %d experts: pass at most %d",
                   mz_trace_path(trace), *ranks, facts->experts, facts->experts);
}

typedef struct info_pass {
    int32_t experts;
    int64_t *total;   /* [layers][E] whole trace */
    int64_t *load;    /* [E] of the current layer call */
    int64_t *seen;    /* [ranks] micro-batch in which the rank was met last */
    int64_t *scratch; /* [E] */
    int64_t *tokens;  /* of every call, for the median */
    mz_trace_info *info;
} info_pass;

/* Takes in the layer call whose loads are in pass->load. */
static void end_layer_call(info_pass *pass, int32_t layer) {
    mz_info_layer *row = &pass->info->layer[layer];
    int64_t *total = pass->total + (int64_t)layer * pass->experts, sum = 0, most = 0;
    for (int32_t e = 0; e < pass->experts; e++) {
        total[e] += pass->load[e];
        sum += pass->load[e];
        most = pass->load[e] > most ? pass->load[e] : most;
    }
    if (sum > 0) {
        double ranks = mz_block_imbalance(pass->load, pass->experts, pass->info->place_ranks);
        row->calls++;
        row->call_expert_mean += (double)most * pass->experts / (double)sum;
        row->call_rank_mean += ranks;
        row->call_rank_max = ranks > row->call_rank_max ? ranks : row->call_rank_max;
    }
    memset(pass->load, 0, (size_t)pass->experts * sizeof *pass->load);
}

/* Steps, tokens and pairs of the window; what needs no bulk data. A rank's tokens of a micro-batch
 * count with the first of its layers, whichever that is. */
static void count_calls(info_pass *pass, const mz_trace *trace, int64_t first, int64_t last) {
    mz_trace_info *info = pass->info;
    const mz_trace_call *calls = trace->calls;
    for (int64_t i = first; i < last; i++) {
        const mz_trace_call *call = &calls[i], *before = i > first ? call - 1 : NULL;
        bool new_step = !before || before->step != call->step;
        info->micro_batches += new_step || before->micro_batch != call->micro_batch;
        info->steps += new_step;
        if (pass->seen[call->rank] != info->micro_batches) {
            pass->seen[call->rank] = info->micro_batches;
            info->tokens += call->tokens;
            info->sequences += mz_find_sequence(trace, call->token_begin + call->tokens) -
                               mz_find_sequence(trace, call->token_begin);
        }
        info->pairs += call->pairs;
        pass->tokens[i - first] = call->tokens;
    }
    info->calls = last - first;
    if (info->calls == 0)
        return;
    info->first_step = calls[first].step;
    info->last_step = calls[last - 1].step;
    qsort(pass->tokens, (size_t)info->calls, sizeof *pass->tokens, by_value);
    info->call_tokens_min = pass->tokens[0];
    info->call_tokens_max = pass->tokens[info->calls - 1];
    info->call_tokens_median = pass->tokens[(info->calls - 1) / 2];
}

static mz_code read_loads(const mz_app *app, info_pass *pass, mz_trace *trace,
                          const mz_trace_call *calls, int64_t first, int64_t last, mz_err *err) {
    mz_progress progress = mz_progress_start(&app->log, "reading", "pairs", pass->info->pairs);
    int64_t pairs = 0;
    mz_code code = MZ_OK;
    for (int64_t i = first; i < last && !code; i++) {
        const mz_trace_call *call = &calls[i], *next = i + 1 < last ? call + 1 : NULL;
        code = mz_trace_add_counts(trace, i, pass->load, err);
        if (!code && (!next || next->layer != call->layer ||
                      next->micro_batch != call->micro_batch || next->step != call->step))
            end_layer_call(pass, call->layer);
        pairs += call->pairs;
        mz_progress_update(&progress, pairs);
        if (!code && app->stop && *app->stop)
            code = mz_fail(err, MZ_EABORTED, "interrupted");
    }
    mz_progress_end(&progress);
    return code;
}

static void metrics_of(const mz_info_layer *row, double *metric) {
    const double all[MZ_INFO_METRICS] = {
        row->experts.max_over_mean, row->experts.top1_share, row->experts.cv,
        row->experts.gini,          row->experts.entropy,    row->experts.cold,
        row->rank_imbalance,        row->call_expert_mean,   row->call_rank_mean,
        row->call_rank_max};
    memcpy(metric, all, sizeof all);
}

/* Per layer from the totals, then over layers (those with pairs). */
static void finish(info_pass *pass) {
    mz_trace_info *info = pass->info;
    double metric[MZ_INFO_METRICS];
    int32_t with_pairs = 0;
    for (int m = 0; m < MZ_INFO_METRICS; m++) {
        info->mean[m] = 0;
        info->low[m] = INFINITY;
        info->high[m] = -INFINITY;
    }
    for (int32_t l = 0; l < info->layers; l++) {
        mz_info_layer *row = &info->layer[l];
        const int64_t *total = pass->total + (int64_t)l * pass->experts;
        row->experts = mz_spread_of(total, pass->experts, pass->scratch);
        row->rank_imbalance = mz_block_imbalance(total, pass->experts, info->place_ranks);
        double calls = row->calls ? (double)row->calls : NAN;
        row->call_expert_mean /= calls;
        row->call_rank_mean /= calls;
        row->call_rank_max = row->calls ? row->call_rank_max : NAN;
        if (row->calls == 0)
            continue;
        with_pairs++;
        metrics_of(row, metric);
        for (int m = 0; m < MZ_INFO_METRICS; m++) {
            info->mean[m] += metric[m];
            info->low[m] = fmin(info->low[m], metric[m]);
            info->high[m] = fmax(info->high[m], metric[m]);
        }
    }
    for (int m = 0; m < MZ_INFO_METRICS; m++)
        info->mean[m] = with_pairs ? info->mean[m] / with_pairs : NAN;
}

/* First call whose step is at least `step`. */
static int64_t first_call(const mz_trace_call *calls, int64_t count, int64_t step) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (calls[middle].step < step)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static mz_code make_pass(info_pass *pass, int32_t ranks, int64_t calls, mz_err *err) {
    size_t experts = (size_t)pass->experts, layers = (size_t)pass->info->layers;
    pass->info->layer = mz_calloc(layers, sizeof *pass->info->layer);
    pass->total = mz_calloc(layers, experts * sizeof *pass->total);
    pass->load = mz_calloc(experts, sizeof *pass->load);
    pass->seen = mz_calloc((size_t)ranks, sizeof *pass->seen);
    pass->scratch = mz_calloc(experts, sizeof *pass->scratch);
    pass->tokens = mz_calloc((size_t)calls, sizeof *pass->tokens);
    if (!pass->total)
        return mz_fail(err, MZ_ENOMEM,
                       "out of memory: the loads of %zu layers of %zu experts take %zu bytes",
                       layers, experts, layers * experts * sizeof *pass->total);
    if (!pass->info->layer || !pass->load || !pass->seen || !pass->scratch || !pass->tokens)
        return mz_fail_nomem(err, "the statistics of a trace");
    return MZ_OK;
}

mz_code mz_trace_info_read(const mz_app *app, mz_trace *trace, const mz_info_options *options,
                           mz_trace_info *info, mz_err *err) {
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    const mz_trace_call *calls;
    int64_t count = mz_trace_calls(trace, &calls);
    int64_t first = first_call(calls, count, options->from_step);
    int64_t last =
        options->to_step == INT64_MAX ? count : first_call(calls, count, options->to_step + 1);
    last = last < first ? first : last;
    *info = (mz_trace_info){.layers = facts->layers};
    info_pass pass = {.experts = facts->experts, .info = info};
    mz_code code = mz_info_ranks(trace, options, &info->place_ranks, err);
    if (!code)
        code = make_pass(&pass, facts->ranks, last - first, err);
    if (!code) {
        count_calls(&pass, trace, first, last);
        code = read_loads(app, &pass, trace, calls, first, last, err);
    }
    if (!code)
        finish(&pass);
    free(pass.total);
    free(pass.load);
    free(pass.seen);
    free(pass.scratch);
    free(pass.tokens);
    if (code)
        mz_trace_info_free(info);
    return code;
}

void mz_trace_info_free(mz_trace_info *info) {
    free(info->layer);
    info->layer = NULL;
}

/* ---- output ---------------------------------------------------------------------------------- */

static const char *const metric_keys[MZ_INFO_METRICS] = {
    "expert_max_over_mean",
    "expert_top1_share",
    "expert_cv",
    "expert_gini",
    "expert_entropy_over_log",
    "expert_cold_fraction",
    "rank_max_over_mean",
    "call_expert_max_over_mean",
    "call_rank_max_over_mean",
    "call_rank_max_over_mean_worst",
};

static json_t *metrics_json(const double *metric) {
    json_t *object = json_object();
    int bad = 0;
    for (int m = 0; m < MZ_INFO_METRICS; m++)
        bad |= json_object_set_new(object, metric_keys[m], mz_json_number(metric[m]));
    if (!bad)
        return object;
    json_decref(object);
    return NULL;
}

static json_t *facts_json(const mz_trace_facts *f) {
    return json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, "
        "s:I, s:I, s:I, "
        "s:I, s:b, s:b, s:b, s:b, s:b, s:b}",
        "name", mz_json_text(f->name), "source", mz_json_text(f->source), "licence",
        mz_json_text(f->licence), "producer", mz_json_text(f->producer), "router",
        mz_json_text(f->router), "group_note", mz_json_text(f->group_note), "import_notes",
        mz_json_text(f->import_notes), "kind", mz_kind_names[f->kind], "phase",
        mz_phase_names[f->phase], "step_meaning", mz_step_names[f->step_meaning], "layers",
        (int)f->layers, "model_layers", (int)f->model_layers, "experts", (int)f->experts, "top_k",
        (int)f->top_k, "ranks", (int)f->ranks, "shared_experts", (int)f->shared_experts, "hidden",
        (json_int_t)f->hidden, "intermediate", (json_int_t)f->intermediate, "sequence_length",
        (json_int_t)f->sequence_length, "step_stride", (json_int_t)f->step_stride,
        "weights_normalized", (int)f->weights_normalized, "has_weight", (int)f->has_weight,
        "has_grad_norm2", (int)f->has_grad_norm2, "has_input_norm2", (int)f->has_input_norm2,
        "has_hidden_norm2", (int)f->has_hidden_norm2, "has_sequences", (int)f->has_sequences);
}

/* NULL when memory is short. */
static json_t *layers_json(const mz_trace_info *info) {
    json_t *layers = json_array();
    int bad = 0;
    for (int32_t l = 0; l < info->layers; l++) {
        double metric[MZ_INFO_METRICS];
        metrics_of(&info->layer[l], metric);
        json_t *row = metrics_json(metric);
        bad |= json_object_set_new(row, "layer", json_integer(l));
        bad |= json_object_set_new(row, "layer_calls", json_integer(info->layer[l].calls));
        bad |= json_array_append_new(layers, row);
    }
    if (!bad)
        return layers;
    json_decref(layers);
    return NULL;
}

json_t *mz_trace_info_json(const mz_trace *trace, const mz_trace_info *info) {
    bool any = info->steps > 0;
    return json_pack(
        "{s:s, s:o, s:o, s:b, s:I, s:o, s:o, s:I, s:I, s:I, s:I, s:I, s:{s:I, s:I, s:I}, s:i, s:o, "
        "s:o, "
        "s:o, s:o}",
        "schema", "mizan-trace-info/1", "path", mz_json_text(mz_trace_path(trace)), "facts",
        facts_json(mz_trace_facts_of(trace)), "complete", (int)mz_trace_complete(trace), "steps",
        (json_int_t)info->steps, "first_step", any ? json_integer(info->first_step) : json_null(),
        "last_step", any ? json_integer(info->last_step) : json_null(), "micro_batches",
        (json_int_t)info->micro_batches, "calls", (json_int_t)info->calls, "tokens",
        (json_int_t)info->tokens, "pairs", (json_int_t)info->pairs, "sequences",
        (json_int_t)info->sequences, "tokens_per_call", "min", (json_int_t)info->call_tokens_min,
        "median", (json_int_t)info->call_tokens_median, "max", (json_int_t)info->call_tokens_max,
        "placement_ranks", (int)info->place_ranks, "mean", metrics_json(info->mean), "low",
        metrics_json(info->low), "high", metrics_json(info->high), "layers", layers_json(info));
}

static void print_head(const mz_trace *trace, const mz_trace_info *info, FILE *out) {
    const mz_trace_facts *f = mz_trace_facts_of(trace);
    char top_k[16] = "variable", dims[64] = "", path[4096];
    if (f->top_k)
        snprintf(top_k, sizeof top_k, "%d", f->top_k);
    if (f->hidden)
        snprintf(dims, sizeof dims, ", hidden %lld, intermediate %lld", (long long)f->hidden,
                 (long long)f->intermediate);
    mz_format_line(path, sizeof path, "%s", mz_trace_path(trace));
    fprintf(out, "%s%s\n", path,
            mz_trace_complete(trace) ? "" : " (not closed by its writer; holds what was flushed)");
    fprintf(out, "model     %s: %d MoE layers, %d experts, top-k %s%s\n", f->name, f->layers,
            f->experts, top_k, dims);
    fprintf(out, "source    %s%s%s%s\n", f->source[0] ? f->source : "unknown",
            f->licence[0] ? " (licence " : "", f->licence, f->licence[0] ? ")" : "");
    if (f->group_note[0])
        fprintf(out, "note      %s\n", f->group_note);
    if (f->import_notes[0])
        fprintf(out, "import    %s\n", f->import_notes);
    fprintf(out, "recorded  %s, %s%s%s%s%s, %d rank%s, phase %s\n", mz_kind_names[f->kind],
            f->has_weight ? "weights" : "no weights", f->weights_normalized ? " (sum to 1)" : "",
            f->has_grad_norm2 ? ", gradient norms" : "", f->has_input_norm2 ? ", input norms" : "",
            f->has_hidden_norm2 ? ", hidden norms" : "", f->ranks, f->ranks == 1 ? "" : "s",
            mz_phase_names[f->phase]);
    if (f->step_meaning == MZ_STEP_NONE)
        fprintf(out,
                "steps     none recorded: %lld blocks of whole sequences (sim needs "
                "--step-tokens)\n",
                (long long)info->micro_batches);
    else
        fprintf(out, "steps     %lld (%s %lld to %lld, stride %lld), %lld micro-batches in all\n",
                (long long)info->steps, mz_step_names[f->step_meaning], (long long)info->first_step,
                (long long)info->last_step, (long long)f->step_stride,
                (long long)info->micro_batches);
    fprintf(out,
            "size      %lld calls, %lld tokens, %lld pairs, %lld sequences\n"
            "          tokens per call: %lld least, %lld median, %lld most\n",
            (long long)info->calls, (long long)info->tokens, (long long)info->pairs,
            (long long)info->sequences, (long long)info->call_tokens_min,
            (long long)info->call_tokens_median, (long long)info->call_tokens_max);
}

static void print_row(const char *name, const double *m, FILE *out) {
    static const int digits[MZ_INFO_METRICS] = {2, 2, 2, 2, 3, 2, 2, 2, 2, 2};
    static const int widths[MZ_INFO_METRICS] = {9, 8, 8, 8, 9, 8, 10, 9, 9, 9};
    fprintf(out, "%-7s", name);
    for (int i = 0; i < MZ_INFO_METRICS; i++) {
        bool percent = i == 1 || i == 5;
        if (!isfinite(m[i]))
            fprintf(out, "%*s", widths[i], "-");
        else if (percent)
            fprintf(out, "%*.1f%%", widths[i] - 1, 100 * m[i]);
        else
            fprintf(out, "%*.*f", widths[i], digits[i], m[i]);
    }
    fputc('\n', out);
}

void mz_trace_info_print(const mz_trace *trace, const mz_trace_info *info, bool layers, FILE *out) {
    double metric[MZ_INFO_METRICS];
    print_head(trace, info, out);
    fprintf(
        out,
        "\n       -------------- experts, whole trace --------------  rank load  ---- per layer "
        "call ----\n"
        "        max/mean    top-1      CV    Gini  entropy    under  max/mean   expert     rank  "
        "   rank\n"
        "layer     1=even    share  0=even  0=even   1=even 0.1xmean  %4d ranks max/mean max/mean  "
        "  worst\n",
        info->place_ranks);
    for (int32_t l = 0; layers && l < info->layers; l++) {
        char name[16];
        snprintf(name, sizeof name, "%d", l);
        metrics_of(&info->layer[l], metric);
        print_row(name, metric, out);
    }
    print_row("mean", info->mean, out);
    print_row("lowest", info->low, out);
    print_row("highest", info->high, out);
}
