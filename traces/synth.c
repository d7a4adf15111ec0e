#include "traces/synth_private.h"

#include "common/base/arena.h"
#include "common/base/opt.h"
#include "traces/schema.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Tokens after which the simple loads draw a new order of experts. */
enum { ORDER_TOKENS = 64 };

mz_rng mz_synth_rng(const mz_synth *synth, mz_synth_draw draw, int64_t a, int64_t b, int64_t c,
                    int64_t d) {
    uint64_t head = mz_rng_stream((uint64_t)draw, (uint64_t)a, (uint64_t)b, (uint64_t)c);
    return mz_rng_make(synth->options.seed, mz_rng_stream(head, (uint64_t)d, 0, 0));
}

void mz_synth_shuffle(mz_rng *rng, int32_t *order, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        /* Multiply-shift instead of an unbiased draw: the bias is below count / 2^32. */
        int32_t j = (int32_t)((uint64_t)mz_rng_u32(rng) * (uint64_t)(i + 1) >> 32);
        order[i] = order[j];
        order[j] = i;
    }
}

void mz_synth_block(const mz_synth *synth, int64_t rank, int32_t *first, int32_t *last) {
    int64_t experts = synth->options.experts, ranks = synth->options.ranks;
    *first = (int32_t)(rank * experts / ranks);
    *last = (int32_t)((rank + 1) * experts / ranks);
    if (*last == *first)
        ++*last;
}

/* Gate weights by rank fall like rank^-a; a from 0.1 to 0.9 spans what gpt-oss-20b shows (first of
 * four 0.29 to 0.43 of the weight). */
static void make_gates(mz_synth *synth) {
    int64_t k = synth->options.top_k;
    for (int64_t shape = 0; shape < MZ_GATE_SHAPES; shape++) {
        double a = 0.1 + 0.8 * (double)shape / (MZ_GATE_SHAPES - 1), sum = 0;
        for (int64_t j = 0; j < k; j++)
            sum += pow((double)(j + 1), -a);
        for (int64_t j = 0; j < k; j++)
            synth->gate[shape * k + j] = (float)(pow((double)(j + 1), -a) / sum);
    }
}

static mz_code check_range(const char *option, int64_t value, int64_t low, int64_t high,
                           mz_err *err) {
    if (value < low || value > high)
        return mz_fail(err, MZ_EINPUT, "--%s: %lld is not from %lld to %lld", option,
                       (long long)value, (long long)low, (long long)high);
    return MZ_OK;
}

static mz_code check_options(const mz_synth_options *o, mz_err *err) {
    const int64_t many = INT64_C(1) << 40;
    mz_code code = check_range("layers", o->layers, 1, MZ_LAYERS_MAX, err);
    if (!code)
        code = check_range("experts", o->experts, 1, MZ_EXPERTS_MAX, err);
    if (!code)
        code = check_range("top-k", o->top_k, 1, o->experts, err);
    if (!code)
        code = check_range("ranks", o->ranks, 1, MZ_RANKS_MAX, err);
    if (!code)
        code = check_range("tokens", o->tokens, 1, many / (o->top_k * o->ranks), err);
    if (!code)
        code = check_range("sequence", o->sequence, 1, many, err);
    if (!code)
        code = check_range("steps", o->steps, 1, many, err);
    if (!code)
        code = check_range("micro-batches", o->micro_batches, 1, INT32_MAX, err);
    return code;
}

static mz_code find_load(const char *name, const mz_synth_load **load, mz_err *err) {
    const char *names[32];
    int count = 0;
    for (int i = 0; mz_synth_loads[i]; i++) {
        names[count++] = mz_synth_loads[i]->name;
        if (strcmp(name, mz_synth_loads[i]->name) == 0) {
            *load = mz_synth_loads[i];
            return MZ_OK;
        }
    }
    const char *near = mz_nearest(name, names, count);
    return mz_fail(err, MZ_EINPUT, "--load: there is no load '%.40s'%s%s%s", name,
                   near ? "; did you mean '" : " (--list describes them)", near ? near : "",
                   near ? "'?" : "");
}

mz_code mz_synth_open(const mz_synth_options *options, mz_synth **out, mz_err *err) {
    const mz_synth_load *load = NULL;
    *out = NULL;
    mz_code code = find_load(options->load, &load, err);
    if (!code)
        code = check_options(options, err);
    if (code)
        return code;
    mz_synth *synth = calloc(1, sizeof *synth);
    if (!synth)
        return mz_fail_nomem(err, "the generator");
    synth->options = *options;
    synth->load = load;
    size_t experts = (size_t)options->experts, ranks = (size_t)options->ranks;
    synth->token_begin = mz_calloc(ranks + 1, sizeof *synth->token_begin);
    synth->gate = mz_calloc(MZ_GATE_SHAPES * (size_t)options->top_k, sizeof *synth->gate);
    synth->weight = mz_calloc(experts, sizeof *synth->weight);
    synth->edge = mz_calloc(experts + 1, sizeof *synth->edge);
    synth->order = mz_calloc(experts, sizeof *synth->order);
    synth->guide = mz_calloc(experts + 1, sizeof *synth->guide);
    if (!synth->token_begin || !synth->gate || !synth->weight || !synth->edge || !synth->order ||
        !synth->guide)
        code = mz_fail_nomem(err, "the generator");
    if (!code && load->realistic)
        code = mz_realistic_open(synth, &synth->realistic, err);
    if (code) {
        mz_synth_close(&synth);
        return code;
    }
    make_gates(synth);
    for (int32_t r = 0; r < options->ranks; r++)
        synth->token_begin[r + 1] =
            synth->token_begin[r] + (load->tokens ? load->tokens(synth, r) : options->tokens);
    *out = synth;
    return MZ_OK;
}

void mz_synth_close(mz_synth **handle) {
    mz_synth *synth = *handle;
    if (!synth)
        return;
    mz_realistic_close(&synth->realistic);
    free(synth->token_begin);
    free(synth->gate);
    free(synth->weight);
    free(synth->edge);
    free(synth->order);
    free(synth->guide);
    free(synth);
    *handle = NULL;
}

int64_t mz_synth_tokens(const mz_synth *synth, int32_t rank) {
    return synth->token_begin[rank + 1] - synth->token_begin[rank];
}

int32_t mz_synth_domain(const mz_synth *synth, int64_t step, int32_t micro_batch, int32_t rank,
                        int64_t index) {
    return synth->realistic ? mz_realistic_domain(synth, step, micro_batch, rank, index) : -1;
}

/* Scales weight[] to probabilities of being among a token's k experts: k w / sum w, but at most 1;
 * what is cut off goes to the others in proportion. */
static void inclusion(double *weight, int64_t experts, int64_t k) {
    for (int64_t round = 0; round <= k; round++) {
        double open = 0, need = (double)k;
        for (int64_t e = 0; e < experts; e++) {
            if (round > 0 && weight[e] >= 1.0)
                need -= 1.0;
            else
                open += weight[e];
        }
        bool capped = false;
        for (int64_t e = 0; e < experts; e++) {
            if (round > 0 && weight[e] >= 1.0)
                continue;
            weight[e] *= need / open;
            if (weight[e] >= 1.0) {
                weight[e] = 1.0;
                capped = true;
            }
        }
        if (!capped)
            return;
    }
}

/* Running sums of the inclusion probabilities in the current order, and where to start looking. */
static void make_edges(mz_synth *synth) {
    int64_t experts = synth->options.experts;
    double k = (double)synth->options.top_k, sum = 0;
    for (int64_t i = 0; i < experts; i++) {
        synth->edge[i] = sum;
        sum += synth->weight[synth->order[i]];
    }
    synth->edge[experts] = k;
    int32_t place = 0;
    for (int64_t g = 0; g <= experts; g++) {
        double value = k * (double)g / (double)experts;
        while (place + 1 < experts && synth->edge[place + 1] <= value)
            place++;
        synth->guide[g] = place;
    }
}

/* Systematic sampling (Madow 1949): the experts whose intervals hold u, u+1, ..., u+k-1. Always k
 * different ones, each with exactly its inclusion probability. */
static void draw_token(const mz_synth *synth, uint32_t bits, uint32_t turn, uint16_t *expert) {
    int64_t k = synth->options.top_k, experts = synth->options.experts;
    double per_guide = (double)experts / (double)k, u = ((double)bits + 0.5) * 0x1p-32;
    int64_t slot = (int64_t)((uint64_t)turn * (uint64_t)k >> 24);
    for (int64_t j = 0; j < k; j++) {
        double value = u + (double)j;
        int32_t place = synth->guide[(int64_t)(value * per_guide)];
        /* Empty intervals (popularity 0) are passed over: their edges coincide. */
        while (place + 1 < experts && synth->edge[place + 1] <= value)
            place++;
        expert[slot] = (uint16_t)synth->order[place];
        slot = slot + 1 < k ? slot + 1 : 0;
    }
}

static void draw_popular(mz_synth *synth, int64_t step, int32_t micro_batch, int32_t layer,
                         int32_t rank, uint16_t *expert) {
    int64_t k = synth->options.top_k, tokens = mz_synth_tokens(synth, rank);
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_TOKENS, step, micro_batch, layer, rank);
    synth->load->popularity(synth, step, layer, synth->weight);
    inclusion(synth->weight, synth->options.experts, k);
    for (int64_t t = 0; t < tokens; t++) {
        if (t % ORDER_TOKENS == 0) {
            mz_synth_shuffle(&rng, synth->order, (int32_t)synth->options.experts);
            make_edges(synth);
        }
        uint32_t bits = mz_rng_u32(&rng);
        draw_token(synth, bits, mz_rng_u32(&rng) >> 8, expert + t * k);
    }
}

/* Experts in turn, going on from rank to rank, so that rank and layer totals differ by 1 at most.
 */
static void deal_evenly(mz_synth *synth, int64_t step, int32_t micro_batch, int32_t layer,
                        int32_t rank, uint16_t *expert) {
    int64_t k = synth->options.top_k, experts = synth->options.experts;
    int64_t pairs = mz_synth_tokens(synth, rank) * k;
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_ORDER, step, micro_batch, layer, 0);
    mz_synth_shuffle(&rng, synth->order, (int32_t)experts);
    int64_t place = synth->token_begin[rank] * k % experts;
    for (int64_t i = 0; i < pairs; i++) {
        expert[i] = (uint16_t)synth->order[place];
        place = place + 1 < experts ? place + 1 : 0;
    }
}

static void draw_gates(const mz_synth *synth, int64_t step, int32_t micro_batch, int32_t layer,
                       int32_t rank, float *weight) {
    int64_t k = synth->options.top_k, tokens = mz_synth_tokens(synth, rank);
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_GATE, step, micro_batch, layer, rank);
    for (int64_t t = 0; t < tokens; t++) {
        uint32_t shape = mz_rng_u32(&rng) % MZ_GATE_SHAPES;
        memcpy(weight + t * k, synth->gate + shape * k, (size_t)k * sizeof *weight);
    }
}

void mz_synth_call(mz_synth *synth, int64_t step, int32_t micro_batch, int32_t layer, int32_t rank,
                   uint16_t *expert, float *weight) {
    draw_gates(synth, step, micro_batch, layer, rank, weight);
    if (synth->realistic)
        mz_realistic_call(synth, step, micro_batch, layer, rank, expert);
    else if (synth->load->popularity)
        draw_popular(synth, step, micro_batch, layer, rank, expert);
    else
        deal_evenly(synth, step, micro_batch, layer, rank, expert);
}

/* ---- writing a trace ------------------------------------------------------------------------- */

typedef struct synth_job {
    mz_app *app;
    mz_synth *synth;
    mz_trace_writer *writer;
    mz_progress progress;
    uint16_t *expert; /* of one call */
    float *weight;
    int64_t *count;
    int64_t token; /* tokens of the micro-batches before */
    int64_t pairs; /* written so far, for the progress */
} synth_job;

static mz_code write_call(synth_job *job, int64_t step, int32_t micro_batch, int32_t layer,
                          int32_t rank, mz_err *err) {
    mz_synth *synth = job->synth;
    int64_t tokens = mz_synth_tokens(synth, rank), pairs = tokens * synth->options.top_k;
    mz_synth_call(synth, step, micro_batch, layer, rank, job->expert, job->weight);
    mz_trace_call_data call = {.step = step,
                               .micro_batch = micro_batch,
                               .layer = layer,
                               .rank = rank,
                               .token_begin = job->token + synth->token_begin[rank],
                               .tokens = tokens,
                               .pairs = pairs};
    if (synth->options.kind == MZ_TRACE_COUNTS) {
        memset(job->count, 0, (size_t)synth->options.experts * sizeof *job->count);
        for (int64_t i = 0; i < pairs; i++)
            job->count[job->expert[i]]++;
        call.count = job->count;
    } else {
        call.expert = job->expert;
        call.weight = job->weight;
    }
    job->pairs += pairs;
    mz_progress_update(&job->progress, job->pairs);
    if (job->app->stop && *job->app->stop)
        return mz_fail(err, MZ_EABORTED, "interrupted; nothing was written");
    return mz_trace_write_call(job->writer, &call, err);
}

static mz_code write_sequences(synth_job *job, int64_t step, int32_t micro_batch, mz_err *err) {
    const mz_synth *synth = job->synth;
    int64_t length = synth->options.sequence;
    mz_code code = MZ_OK;
    for (int32_t r = 0; r < synth->options.ranks; r++) {
        int64_t tokens = mz_synth_tokens(synth, r);
        for (int64_t first = 0; first < tokens && !code; first += length) {
            mz_trace_sequence sequence = {
                .token_begin = job->token + synth->token_begin[r] + first,
                .tokens = tokens - first < length ? tokens - first : length,
                .domain = mz_synth_domain(synth, step, micro_batch, r, first / length)};
            code = mz_trace_write_sequence(job->writer, &sequence, err);
        }
    }
    return code;
}

static mz_code write_step(synth_job *job, int64_t step, mz_err *err) {
    const mz_synth_options *o = &job->synth->options;
    mz_code code = MZ_OK;
    for (int32_t m = 0; m < o->micro_batches && !code; m++) {
        for (int32_t l = 0; l < o->layers && !code; l++)
            for (int32_t r = 0; r < o->ranks && !code; r++)
                code = write_call(job, step, m, l, r, err);
        if (!code && o->kind == MZ_TRACE_PAIRS)
            code = write_sequences(job, step, m, err);
        job->token += job->synth->token_begin[o->ranks];
    }
    return code;
}

mz_code mz_synth_name(mz_trace_facts *facts, const char *name, const char *prefix, mz_err *err) {
    size_t room = sizeof facts->name;
    if ((size_t)snprintf(facts->name, room, "%s%s", prefix, name) < room)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT, "--model-name: longer than %zu characters: shorten it",
                   room - 1);
}

static mz_code make_facts(const mz_app *app, const mz_synth_options *o, mz_trace_facts *facts,
                          mz_err *err) {
    *facts = (mz_trace_facts){.kind = o->kind,
                              .phase = MZ_PHASE_TRAIN,
                              .step_meaning = MZ_STEP_ITERATION,
                              .layers = (int32_t)o->layers,
                              .experts = (int32_t)o->experts,
                              .top_k = (int32_t)o->top_k,
                              .ranks = (int32_t)o->ranks,
                              .hidden = o->hidden,
                              .intermediate = o->intermediate,
                              .sequence_length = o->sequence,
                              .step_stride = 1,
                              .licence = "CC0-1.0",
                              .router = "softmax"};
    facts->weights_normalized = facts->has_weight = facts->has_sequences =
        o->kind == MZ_TRACE_PAIRS;
    mz_code code =
        mz_synth_name(facts, o->name ? o->name : o->load, o->name ? "" : "synthetic-", err);
    if (code)
        return code;
    snprintf(facts->source, sizeof facts->source, "synthetic: load %s, seed %llu", o->load,
             (unsigned long long)o->seed);
    snprintf(facts->producer, sizeof facts->producer, "mizan %.64s", app->version);
    return MZ_OK;
}

static mz_code make_buffers(synth_job *job, mz_err *err) {
    const mz_synth *synth = job->synth;
    int64_t most = 0;
    for (int32_t r = 0; r < synth->options.ranks; r++)
        most = mz_synth_tokens(synth, r) > most ? mz_synth_tokens(synth, r) : most;
    size_t pairs = (size_t)(most * synth->options.top_k);
    job->expert = mz_calloc(pairs, sizeof *job->expert);
    job->weight = mz_calloc(pairs, sizeof *job->weight);
    job->count = mz_calloc((size_t)synth->options.experts, sizeof *job->count);
    if (!job->expert || !job->weight || !job->count)
        return mz_fail_nomem(err, "the pairs of one call");
    return MZ_OK;
}

mz_code mz_synth_write(mz_app *app, const mz_synth_options *options, const char *path,
                       const mz_trace_write_options *write, mz_err *err) {
    synth_job job = {.app = app};
    mz_trace_facts facts;
    mz_code code = mz_synth_open(options, &job.synth, err);
    if (!code)
        code = make_facts(app, options, &facts, err);
    if (!code)
        code = make_buffers(&job, err);
    if (!code)
        code = mz_trace_create(path, &facts, write, &job.writer, err);
    if (!code) {
        double total = (double)job.synth->token_begin[options->ranks] * (double)options->top_k *
                       (double)options->layers * (double)options->micro_batches *
                       (double)options->steps;
        job.progress = mz_progress_start(&app->log, "generating", "pairs",
                                         total < 0x1p62 ? (int64_t)total : 0);
        for (int64_t s = 0; s < options->steps && !code; s++)
            code = write_step(&job, s, err);
        mz_progress_end(&job.progress);
    }
    if (!code)
        code = mz_trace_writer_close(&job.writer, err);
    if (job.writer)
        mz_trace_writer_abandon(&job.writer);
    mz_synth_close(&job.synth);
    free(job.expert);
    free(job.weight);
    free(job.count);
    return code;
}
