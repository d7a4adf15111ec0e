/* Fits and draws histories of counts: synth_history.h. */
#include "traces/synth_history.h"

#include "common/base/arena.h"
#include "common/base/rng.h"

#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SINGLE = 20, SPANS = 96 }; /* steps that are spans of their own; most spans */

mz_code mz_history_make(const mz_trace_facts *facts, int64_t steps, mz_synth_history *h,
                        mz_err *err) {
    size_t cells = (size_t)facts->layers * (size_t)facts->experts, layers = (size_t)facts->layers;
    *h = (mz_synth_history){.facts = *facts};
    h->first = mz_calloc(SPANS + 1, sizeof *h->first);
    if (!h->first)
        return mz_fail_nomem(err, "a history");
    for (int64_t step = 0; step < steps && h->spans < SPANS; h->spans++) {
        int64_t length = step < SINGLE ? 1 : step / 12 > 1 ? step / 12 : 1;
        length = h->spans == SPANS - 1 || step + length > steps ? steps - step : length;
        h->first[h->spans] = step;
        h->first[h->spans + 1] = step += length;
    }
    h->share = mz_calloc((size_t)h->spans, cells * sizeof *h->share);
    h->change = mz_calloc((size_t)h->spans, cells * sizeof *h->change);
    h->micro_batch = mz_calloc((size_t)h->spans, layers * sizeof *h->micro_batch);
    h->rank = mz_calloc((size_t)h->spans, layers * sizeof *h->rank);
    if (h->share && h->change && h->micro_batch && h->rank)
        return MZ_OK;
    mz_history_free(h);
    return mz_fail_nomem(err, "a history");
}

void mz_history_free(mz_synth_history *h) {
    free(h->first);
    free(h->share);
    free(h->change);
    free(h->micro_batch);
    free(h->rank);
    *h = (mz_synth_history){0};
}

void mz_history_cap(double *share, int64_t experts, int64_t top_k) {
    double most = top_k > 0 ? 1.0 / (double)top_k : 1;
    for (int64_t round = 0; round < top_k && top_k < experts; round++) {
        double cut = 0, open = 0;
        for (int64_t e = 0; e < experts; e++) {
            if (share[e] >= most) {
                cut += share[e] - most;
                share[e] = most;
            } else {
                open += share[e];
            }
        }
        if (cut <= 0 || open <= 0)
            return;
        for (int64_t e = 0; e < experts; e++)
            if (share[e] < most)
                share[e] *= 1 + cut / open;
    }
}

static int32_t span_of(const mz_synth_history *h, int64_t step) {
    int32_t span = 0;
    while (span + 1 < h->spans && h->first[span + 1] <= step)
        span++;
    return span;
}

/* ---- fit ------------------------------------------------------------------------------------- */

typedef struct history_fit {
    mz_synth_history *h;
    mz_arena arena;
    int64_t *count;         /* [E] */
    double *total, *before; /* [layers][E] pairs of the step, shares of the one before */
    double *square, *cross; /* [layers][E] sums over calls of c^2 and n c */
    double *pairs2;         /* [layers] of n^2 */
    double *rank_load;      /* [ranks][layers][E] */
    bool *known;            /* [layers] the step before had pairs */
    double *taken;          /* [spans][layers] steps with pairs */
    double *changes;        /* [spans][layers] number of changes */
    double *sum;            /* [spans][layers][4] scatter, binomial scatter: micro-batches, ranks */
    int64_t steps;
} history_fit;

static void take_call(history_fit *f, const mz_trace_call *call) {
    int64_t experts = f->h->facts.experts, at = call->layer * experts;
    double n = (double)call->pairs;
    for (int64_t e = 0; e < experts; e++) {
        double c = (double)f->count[e];
        f->total[at + e] += c;
        f->square[at + e] += c * c;
        f->cross[at + e] += n * c;
        f->rank_load[call->rank * f->h->facts.layers * experts + at + e] += c;
    }
    f->pairs2[call->layer] += n * n;
}

static void take_scatter(history_fit *f, int32_t span, int32_t layer, double pairs) {
    int64_t experts = f->h->facts.experts, at = layer * experts;
    double *sum = f->sum + 4 * ((int64_t)span * f->h->facts.layers + layer);
    for (int64_t e = 0; e < experts; e++) {
        double p = f->total[at + e] / pairs;
        sum[0] += f->square[at + e] - 2 * p * f->cross[at + e] + p * p * f->pairs2[layer];
        sum[1] += pairs * p * (1 - p);
    }
    for (int64_t r = 0; r < f->h->facts.ranks; r++) {
        const double *load = f->rank_load + r * f->h->facts.layers * experts + at;
        double n = 0;
        for (int64_t e = 0; e < experts; e++)
            n += load[e];
        for (int64_t e = 0; e < experts; e++) {
            double p = f->total[at + e] / pairs;
            sum[2] += (load[e] - n * p) * (load[e] - n * p);
            sum[3] += n * p * (1 - p);
        }
    }
}

static void take_step(history_fit *f) {
    mz_synth_history *h = f->h;
    int64_t experts = h->facts.experts, cells = h->facts.layers * experts;
    int32_t span = span_of(h, f->steps);
    bool inside = f->steps > h->first[span]; /* the step before is of the same span */
    for (int32_t l = 0; l < h->facts.layers; l++) {
        double pairs = 0;
        for (int64_t e = 0; e < experts; e++)
            pairs += f->total[l * experts + e];
        bool follows = inside && f->known[l];
        f->known[l] = pairs > 0;
        if (!f->known[l])
            continue;
        take_scatter(f, span, l, pairs);
        for (int64_t e = 0; e < experts; e++) {
            int64_t at = l * experts + e;
            double share = f->total[at] / pairs;
            h->share[span * cells + at] += share;
            h->change[span * cells + at] += follows ? fabs(share - f->before[at]) : 0;
            f->before[at] = share;
        }
        f->taken[(int64_t)span * h->facts.layers + l]++;
        f->changes[(int64_t)span * h->facts.layers + l] += follows;
    }
    f->steps++;
    memset(f->total, 0, (size_t)cells * sizeof *f->total);
    memset(f->square, 0, (size_t)cells * sizeof *f->square);
    memset(f->cross, 0, (size_t)cells * sizeof *f->cross);
    memset(f->pairs2, 0, (size_t)h->facts.layers * sizeof *f->pairs2);
    memset(f->rank_load, 0, (size_t)(h->facts.ranks * cells) * sizeof *f->rank_load);
}

/* Means over the steps that had pairs. A layer that had none in a whole span keeps the shares of
 * the span before, at first even ones. */
static void finish_shares(history_fit *f, int32_t span) {
    mz_synth_history *h = f->h;
    int64_t experts = h->facts.experts, cells = h->facts.layers * experts;
    for (int64_t i = 0; i < cells; i++) {
        int64_t row = span * h->facts.layers + i / experts;
        double *share = h->share + span * cells + i;
        if (f->taken[row] > 0)
            *share /= f->taken[row];
        else
            *share = span > 0 ? share[-cells] : 1.0 / (double)experts;
        h->change[span * cells + i] /= f->changes[row] > 0 ? f->changes[row] : 1;
    }
}

/* Scatter of counts of n pairs from shares that vary is 1 + (n - 1) rho times the binomial one; of
 * a rank's M micro-batches together 1 + (n - 1)(rho_m + rho_r) + (M - 1) n rho_r. The mean of the
 * sources, from which the scatter was measured, takes one degree of freedom. */
static void finish_span(history_fit *f, int32_t span) {
    mz_synth_history *h = f->h;
    double n = (double)h->pairs;
    double batches = (double)h->micro_batches, ranks = h->facts.ranks, sources = ranks * batches;
    finish_shares(f, span);
    for (int32_t l = 0; l < h->facts.layers; l++) {
        const double *sum = f->sum + 4 * ((int64_t)span * h->facts.layers + l);
        if (!(sum[1] > 0) || sources < 2 || n < 2)
            continue;
        double batch = sum[0] / sum[1] / (1 - 1 / sources);
        double rank = ranks > 1 ? sum[2] / sum[3] / (1 - 1 / ranks) : batch;
        double between = batches > 1 ? (rank - batch) / ((batches - 1) * n) : (batch - 1) / (n - 1);
        between = fmax(between, 0);
        h->rank[(int64_t)span * h->facts.layers + l] = fmin(between, 0.9);
        h->micro_batch[(int64_t)span * h->facts.layers + l] =
            fmin(fmax((batch - 1) / (n - 1) - between, 0), 0.9);
    }
}

static mz_code make_fit(history_fit *f, mz_err *err) {
    const mz_synth_history *h = f->h;
    int64_t layers = h->facts.layers, cells = layers * h->facts.experts;
    f->count = MZ_NEW(&f->arena, int64_t, h->facts.experts);
    f->total = MZ_NEW(&f->arena, double, cells);
    f->before = MZ_NEW(&f->arena, double, cells);
    f->square = MZ_NEW(&f->arena, double, cells);
    f->cross = MZ_NEW(&f->arena, double, cells);
    f->pairs2 = MZ_NEW(&f->arena, double, layers);
    f->rank_load = MZ_NEW(&f->arena, double, h->facts.ranks *cells);
    f->known = MZ_NEW(&f->arena, bool, layers);
    f->taken = MZ_NEW(&f->arena, double, h->spans *layers);
    f->changes = MZ_NEW(&f->arena, double, h->spans *layers);
    f->sum = MZ_NEW(&f->arena, double, 4 * h->spans * layers);
    if (f->count && f->total && f->before && f->square && f->cross && f->pairs2 && f->rank_load &&
        f->known && f->taken && f->changes && f->sum)
        return MZ_OK;
    return mz_fail_nomem(err, "a history");
}

static mz_code read_history(mz_app *app, mz_trace *trace, history_fit *f, mz_err *err) {
    const mz_trace_call *calls;
    int64_t count = mz_trace_calls(trace, &calls);
    mz_progress progress = mz_progress_start(&app->log, "reading", "calls", count);
    mz_code code = MZ_OK;
    for (int64_t i = 0; i < count && !code; i++) {
        memset(f->count, 0, (size_t)f->h->facts.experts * sizeof *f->count);
        code = mz_trace_add_counts(trace, i, f->count, err);
        if (code)
            break;
        take_call(f, &calls[i]);
        if (i + 1 == count || calls[i + 1].step != calls[i].step)
            take_step(f);
        mz_progress_update(&progress, i);
        if (app->stop && *app->stop)
            code = mz_fail(err, MZ_EABORTED, "interrupted");
    }
    mz_progress_end(&progress);
    return code;
}

/* Pairs of so many tokens where `per` tokens have `pairs`: one at least. */
static int64_t pairs_of(int64_t tokens, int64_t pairs, int64_t per) {
    return (int64_t)fmax(round((double)tokens * ((double)pairs / (double)per)), 1);
}

mz_code mz_history_fit(mz_app *app, mz_trace *trace, mz_synth_history *h, mz_err *err) {
    const mz_trace_call *calls;
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    int64_t count = mz_trace_calls(trace, &calls), steps = 0, batches = 0, pairs = 0, tokens = 0;
    history_fit f = {.h = h};
    for (int64_t i = 0; i < count; i++) {
        bool step = i == 0 || calls[i].step != calls[i - 1].step;
        steps += step;
        batches += step || calls[i].micro_batch != calls[i - 1].micro_batch;
        pairs += calls[i].pairs;
        tokens += calls[i].tokens;
    }
    *h = (mz_synth_history){0};
    if (pairs == 0)
        return mz_fail(err, MZ_EINPUT, "%s: holds no pairs: there is nothing to fit",
                       mz_trace_path(trace));
    if (facts->step_meaning == MZ_STEP_NONE)
        return mz_fail(
            err, MZ_EINPUT, "%s: counts are fitted over steps, and this trace has none%s",
            mz_trace_path(trace), facts->kind == MZ_TRACE_PAIRS ? ": leave out --kind counts" : "");
    mz_code code = mz_history_make(facts, steps, h, err);
    if (code)
        return code;
    h->first_step = calls[0].step;
    h->tokens = (int64_t)fmax(round((double)tokens / (double)count), 1);
    h->pairs = pairs_of(h->tokens, pairs, tokens);
    h->micro_batches = (batches + steps / 2) / steps;
    code = make_fit(&f, err);
    if (!code)
        code = read_history(app, trace, &f, err);
    for (int32_t span = 0; span < h->spans && !code; span++)
        finish_span(&f, span);
    mz_arena_free(&f.arena);
    if (code)
        mz_history_free(h);
    return code;
}

/* ---- drawing --------------------------------------------------------------------------------- */

/* GSL's distributions fed by our counter-based streams. */
static unsigned long rng_get(void *state) {
    return mz_rng_u32(((mz_rng *)state));
}

static double rng_uniform(void *state) {
    return mz_rng_uniform(((mz_rng *)state));
}

/* Never seeded by GSL. */
static const gsl_rng_type philox = {.name = "philox4x32-10",
                                    .max = 0xffffffffUL,
                                    .size = sizeof(mz_rng),
                                    .get = rng_get,
                                    .get_double = rng_uniform};

typedef struct history_job {
    mz_app *app;
    const mz_synth_history *h;
    mz_trace_writer *writer;
    mz_model_options options;
    mz_rng state;
    gsl_rng rng;                 /* draws from the state */
    double *step, *rank, *batch; /* [layers][E] of the step; [ranks][layers][E]; [E] */
    unsigned *drawn;             /* [E] */
    int64_t *count;              /* [E] */
    int64_t pairs, tokens;       /* of a call */
} history_job;

static void restart(history_job *job, int64_t a, int64_t b, int64_t c, int64_t d) {
    uint64_t stream = mz_rng_stream((uint64_t)a, (uint64_t)b, (uint64_t)c, (uint64_t)d);
    job->state = mz_rng_make(job->options.seed, stream);
}

/* Shares around p whose scatter has correlation rho within the draw. */
static void dirichlet(history_job *job, const double *p, double rho, double *out) {
    int32_t experts = job->h->facts.experts;
    double sum = 0;
    for (int32_t e = 0; e < experts && rho > 1e-9; e++) {
        out[e] = p[e] > 0 ? gsl_ran_gamma(&job->rng, fmax(p[e] * (1 / rho - 1), 1e-6), 1) : 0;
        sum += out[e];
    }
    for (int32_t e = 0; e < experts; e++)
        out[e] = sum > 0 ? out[e] / sum : p[e];
    mz_history_cap(out, experts, job->h->facts.top_k);
}

/* Variance of the noise of an expert's share that explains its changes: the mean size of the
 * difference of two normal values is 2 sigma / sqrt(pi). */
static double noise_of(const mz_synth_history *h, int64_t row, int64_t e) {
    double sigma = h->change[row * h->facts.experts + e] * 0.886226925452758;
    return sigma * sigma;
}

/* Variance that the sampling of sources brings into a share; the ranks' part is left out where they
 * are scaled to the step's shares. */
static double sampled_of(const mz_synth_history *h, int64_t row, int64_t e, bool raked) {
    double p = h->share[row * h->facts.experts + e];
    double n = (double)h->pairs, batches = (double)h->micro_batches;
    double scatter = 1 + (n - 1) * h->micro_batch[row];
    scatter += raked ? 0 : (n - 1) * h->rank[row] + (batches - 1) * n * h->rank[row];
    return p * (1 - p) * scatter / (n * batches * h->facts.ranks);
}

/* Whether sources that are drawn apart would move the step's shares more than they were seen to
 * move, within the span or, where that is a single step, to the next: then what one rank has more,
 * others have less. */
static bool is_raked(const mz_synth_history *h, int64_t row) {
    int64_t experts = h->facts.experts, span = row / h->facts.layers;
    int64_t next = row + (span + 1 < h->spans ? h->facts.layers : -h->facts.layers);
    double seen = 0, sampled = 0, moved = 0;
    for (int64_t e = 0; e < experts; e++) {
        double step = h->spans > 1 ? h->share[next * experts + e] - h->share[row * experts + e] : 0;
        seen += noise_of(h, row, e);
        moved += 0.5 * step * step;
        sampled += sampled_of(h, row, e, false);
    }
    return sampled > (seen > 0 ? seen : moved);
}

static void step_shares(history_job *job, int64_t step, int32_t layer) {
    const mz_synth_history *h = job->h;
    int64_t experts = h->facts.experts, cells = h->facts.layers * experts;
    int32_t span = span_of(h, step), other = span;
    double middle = 0.5 * (double)(h->first[span] + h->first[span + 1] - 1), weight = 0, sum = 0;
    if ((double)step > middle && span + 1 < h->spans)
        other = span + 1;
    if ((double)step < middle && span > 0)
        other = span - 1;
    if (other != span) {
        double far = 0.5 * (double)(h->first[other] + h->first[other + 1] - 1);
        weight = ((double)step - middle) / (far - middle);
    }
    restart(job, 1, step, layer, 0);
    double *share = job->step + layer * experts;
    int64_t row = (int64_t)span * h->facts.layers + layer;
    bool raked = is_raked(h, row);
    for (int64_t e = 0; e < experts; e++) {
        int64_t at = layer * experts + e;
        double mean =
            (1 - weight) * h->share[span * cells + at] + weight * h->share[other * cells + at];
        share[e] = mean + gsl_ran_gaussian(
                              &job->rng,
                              sqrt(fmax(noise_of(h, row, e) - sampled_of(h, row, e, raked), 0)));
        share[e] = share[e] > 0.02 * mean ? share[e] : 0.02 * mean;
        sum += share[e];
    }
    for (int64_t e = 0; e < experts; e++)
        share[e] /= sum;
    mz_history_cap(share, experts, h->facts.top_k);
}

/* No expert gets more pairs than there are tokens: what is over goes to the next ones with room. */
static void limit_counts(const history_job *job) {
    int64_t experts = job->h->facts.experts, over = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t e = 0; e < experts; e++) {
            int64_t n = job->count[e] + over;
            job->count[e] = n > job->tokens ? job->tokens : n;
            over = n - job->count[e];
        }
    job->count[experts - 1] += over; /* more pairs than tokens x experts */
}

static mz_code write_call(history_job *job, int64_t step, int32_t batch, int32_t layer,
                          int32_t rank, mz_err *err) {
    const mz_synth_history *h = job->h;
    int64_t experts = h->facts.experts;
    int64_t row = (int64_t)span_of(h, step) * h->facts.layers + layer;
    const double *around = job->rank + (rank * h->facts.layers + layer) * experts;
    restart(job, 3, step * job->options.micro_batches + batch, layer, rank);
    dirichlet(job, around, h->micro_batch[row], job->batch);
    gsl_ran_multinomial(&job->rng, (size_t)experts, (unsigned)job->pairs, job->batch, job->drawn);
    for (int64_t e = 0; e < experts; e++)
        job->count[e] = job->drawn[e];
    limit_counts(job);
    int64_t source = (step * job->options.micro_batches + batch) * job->options.ranks + rank;
    mz_trace_call_data call = {.step = h->first_step + step * h->facts.step_stride,
                               .micro_batch = batch,
                               .layer = layer,
                               .rank = rank,
                               .token_begin = source * job->tokens,
                               .tokens = job->tokens,
                               .pairs = job->pairs,
                               .count = job->count};
    if (job->app->stop && *job->app->stop)
        return mz_fail(err, MZ_EABORTED, "interrupted; nothing was written");
    return mz_trace_write_call(job->writer, &call, err);
}

/* Scales the ranks' shares until their mean is the step's: what one rank has more, others have
 * less, however far apart they are. */
static void rake(history_job *job, int32_t layer) {
    int64_t experts = job->h->facts.experts, stride = job->h->facts.layers * experts;
    const double *step = job->step + layer * experts;
    double *rank = job->rank + layer * experts;
    for (int round = 0; round < 4; round++) {
        for (int64_t e = 0; e < experts; e++) {
            double mean = 0;
            for (int64_t r = 0; r < job->options.ranks; r++)
                mean += rank[r * stride + e] / (double)job->options.ranks;
            double factor = mean > 0 ? fmin(step[e] / mean, 1e3) : 1;
            for (int64_t r = 0; r < job->options.ranks; r++)
                rank[r * stride + e] *= factor;
        }
        for (int64_t r = 0; r < job->options.ranks; r++) {
            double sum = 0;
            for (int64_t e = 0; e < experts; e++)
                sum += rank[r * stride + e];
            for (int64_t e = 0; e < experts; e++)
                rank[r * stride + e] = sum > 0 ? rank[r * stride + e] / sum : step[e];
            mz_history_cap(rank + r * stride, experts, job->h->facts.top_k);
        }
    }
}

static mz_code write_step(history_job *job, int64_t step, mz_err *err) {
    const mz_synth_history *h = job->h;
    int64_t experts = h->facts.experts;
    mz_code code = MZ_OK;
    for (int32_t l = 0; l < h->facts.layers; l++) {
        double rho = h->rank[(int64_t)span_of(h, step) * h->facts.layers + l];
        step_shares(job, step, l);
        for (int32_t r = 0; r < job->options.ranks; r++) {
            restart(job, 2, step, l, r);
            dirichlet(job, job->step + l * experts, rho,
                      job->rank + (r * h->facts.layers + l) * experts);
        }
        if (is_raked(h, (int64_t)span_of(h, step) * h->facts.layers + l))
            rake(job, l);
    }
    for (int32_t b = 0; b < job->options.micro_batches && !code; b++)
        for (int32_t l = 0; l < h->facts.layers && !code; l++)
            for (int32_t r = 0; r < job->options.ranks && !code; r++)
                code = write_call(job, step, b, l, r, err);
    return code;
}

static mz_code prepare(history_job *job, mz_trace_facts *facts, mz_err *err) {
    const mz_synth_history *h = job->h;
    mz_model_options *o = &job->options;
    size_t cells = (size_t)h->facts.layers * (size_t)h->facts.experts;
    *facts = h->facts;
    o->ranks = o->ranks ? o->ranks : h->facts.ranks;
    o->steps = o->steps ? o->steps : h->first[h->spans];
    o->micro_batches = o->micro_batches ? o->micro_batches : h->micro_batches;
    job->tokens = o->tokens ? o->tokens : h->tokens;
    job->pairs = pairs_of(job->tokens, h->pairs, h->tokens);
    if (job->pairs > INT32_MAX)
        return mz_fail(err, MZ_EINPUT, "--tokens: more than 2^31 pairs in a call of counts");
    facts->kind = MZ_TRACE_COUNTS;
    facts->import_notes[0] = 0; /* nothing was imported */
    facts->ranks = (int32_t)o->ranks;
    facts->has_weight = facts->has_sequences = facts->weights_normalized = false;
    facts->has_grad_norm2 = facts->has_input_norm2 = facts->has_hidden_norm2 = false;
    snprintf(facts->source, sizeof facts->source, "synthetic: history like %.120s, seed %llu",
             h->facts.name, (unsigned long long)o->seed);
    snprintf(facts->producer, sizeof facts->producer, "mizan %.64s", job->app->version);
    job->rng = (gsl_rng){&philox, &job->state};
    job->step = mz_calloc(cells, sizeof *job->step);
    job->rank = mz_calloc(cells * (size_t)o->ranks, sizeof *job->rank);
    job->batch = mz_calloc((size_t)h->facts.experts, sizeof *job->batch);
    job->drawn = mz_calloc((size_t)h->facts.experts, sizeof *job->drawn);
    job->count = mz_calloc((size_t)h->facts.experts, sizeof *job->count);
    if (job->step && job->rank && job->batch && job->drawn && job->count)
        return MZ_OK;
    return mz_fail_nomem(err, "a generator of counts");
}

mz_code mz_history_write(mz_app *app, const mz_synth_history *history,
                         const mz_model_options *options, const char *path,
                         const mz_trace_write_options *write, mz_err *err) {
    history_job job = {.app = app, .h = history, .options = *options};
    mz_trace_facts facts;
    mz_code code = prepare(&job, &facts, err);
    if (!code)
        code = mz_trace_create(path, &facts, write, &job.writer, err);
    if (!code) {
        mz_progress progress =
            mz_progress_start(&app->log, "generating", "steps", job.options.steps);
        for (int64_t s = 0; s < job.options.steps && !code; s++) {
            code = write_step(&job, s, err);
            mz_progress_update(&progress, s);
        }
        mz_progress_end(&progress);
    }
    if (!code)
        code = mz_trace_writer_close(&job.writer, err);
    if (job.writer)
        mz_trace_writer_abandon(&job.writer);
    free(job.step);
    free(job.rank);
    free(job.batch);
    free(job.drawn);
    free(job.count);
    return code;
}
