/* Writes a trace generated from a model: sequences of recorded lengths, dealt to the ranks of a
 * micro-batch until each has its tokens, so that sources are ragged. A call is held in memory, and
 * the table of the micro-batch's sequences; nothing grows with the trace. */
#include "traces/synth_model.h"

#include "common/base/arena.h"

#include <stdlib.h>
#include <string.h>

/* A call's pairs and a micro-batch's tokens are held in memory: 1.5 and 4 GiB. */
#define CALL_PAIRS ((int64_t)1 << 28)
#define MICRO_BATCH_TOKENS ((int64_t)1 << 31)

typedef struct planned {
    int64_t index, tokens;
} planned;

typedef struct model_job {
    mz_app *app;
    const mz_synth_model *model;
    mz_model_draw *draw;
    mz_trace_writer *writer;
    mz_trace_facts facts;
    mz_model_options options;
    mz_progress progress;
    planned *plan;  /* sequences of the micro-batch, rank after rank */
    int64_t *first; /* [ranks + 1] first of each rank's */
    size_t plan_room, expert_room, weight_room, before_room;
    uint16_t *expert;
    float *weight;
    uint16_t *before; /* first experts of the micro-batch's tokens in the layer before */
    int64_t overshoot;
    int64_t sequence, token, pairs; /* done so far */
} model_job;

/* Tokens of a rank in a micro-batch, at least. Whole sequences overshoot by half of one on average,
 * which is taken off where the mean is the recorded one. */
static int64_t wanted_tokens(const model_job *job, int32_t rank) {
    const double *share = job->model->rank_share;
    bool recorded = share && job->options.ranks == job->model->facts.ranks;
    double tokens = (double)job->options.tokens * (recorded ? share[rank] : 1);
    if (tokens < 0.5)
        return 0;
    return tokens > (double)(2 * job->overshoot) ? (int64_t)tokens - job->overshoot : 1;
}

static mz_code plan_micro_batch(model_job *job, mz_err *err) {
    int64_t planned_so_far = 0;
    for (int32_t r = 0; r < job->options.ranks; r++) {
        job->first[r] = planned_so_far;
        for (int64_t tokens = 0; tokens < wanted_tokens(job, r); planned_so_far++) {
            void *plan = job->plan;
            if (job->app->stop && *job->app->stop)
                return mz_fail(err, MZ_EABORTED, "interrupted; nothing was written");
            if (!mz_grow(&plan, &job->plan_room, (size_t)planned_so_far + 1, sizeof *job->plan))
                return mz_fail_nomem(err, "the sequences of a micro-batch");
            job->plan = plan;
            int64_t n = job->model->length[mz_model_profile(job->draw, job->sequence)];
            job->plan[planned_so_far] = (planned){job->sequence++, n};
            tokens += n;
        }
    }
    job->first[job->options.ranks] = planned_so_far;
    int64_t tokens = 0;
    for (int64_t i = 0; i < planned_so_far; i++)
        tokens += job->plan[i].tokens;
    void *before = job->before;
    if (!mz_grow(&before, &job->before_room, (size_t)tokens, sizeof *job->before))
        return mz_fail_nomem(err, "the tokens of a micro-batch");
    job->before = before;
    return MZ_OK;
}

static mz_code write_call(model_job *job, mz_trace_call_data *call, mz_err *err) {
    int64_t k = job->facts.top_k, tokens = 0;
    for (int64_t i = job->first[call->rank]; i < job->first[call->rank + 1]; i++)
        tokens += job->plan[i].tokens;
    void *expert = job->expert, *weight = job->weight;
    int good = mz_grow(&expert, &job->expert_room, (size_t)(tokens * k), sizeof *job->expert);
    job->expert = expert;
    if (good)
        good = mz_grow(&weight, &job->weight_room, (size_t)(tokens * k), sizeof *job->weight);
    job->weight = weight;
    if (!good)
        return mz_fail_nomem(err, "the pairs of a call");
    int64_t at = 0;
    for (int64_t i = job->first[call->rank]; i < job->first[call->rank + 1]; i++) {
        const planned *s = &job->plan[i];
        if (job->app->stop && *job->app->stop)
            return mz_fail(err, MZ_EABORTED, "interrupted; nothing was written");
        mz_model_sequence(job->draw, s->index, call->layer, s->tokens, job->expert + at * k,
                          job->before + (call->token_begin - job->token) + at);
        mz_model_weights(job->draw, s->index, call->layer, s->tokens, job->weight + at * k);
        at += s->tokens;
    }
    call->tokens = tokens;
    call->pairs = tokens * k;
    call->expert = job->expert;
    call->weight = job->facts.has_weight ? job->weight : NULL;
    job->pairs += call->pairs;
    mz_progress_update(&job->progress, job->pairs);
    return mz_trace_write_call(job->writer, call, err);
}

static mz_code write_micro_batch(model_job *job, int64_t step, int32_t micro_batch, mz_err *err) {
    mz_model_draw_at(job->draw, step);
    mz_code code = plan_micro_batch(job, err);
    int64_t end = job->token;
    for (int32_t l = 0; l < job->facts.layers && !code; l++) {
        end = job->token;
        for (int32_t r = 0; r < job->options.ranks && !code; r++) {
            mz_trace_call_data call = {.step =
                                           job->model->first_step + step * job->facts.step_stride,
                                       .micro_batch = micro_batch,
                                       .layer = l,
                                       .rank = r,
                                       .token_begin = end};
            code = write_call(job, &call, err);
            end += call.tokens;
        }
    }
    for (int64_t i = 0; i < job->first[job->options.ranks] && !code; i++) {
        int32_t profile = mz_model_profile(job->draw, job->plan[i].index);
        mz_trace_sequence s = {job->token, job->plan[i].tokens, job->model->domain[profile]};
        code = mz_trace_write_sequence(job->writer, &s, err);
        job->token += s.tokens;
    }
    job->token = end;
    return code;
}

static mz_code prepare(model_job *job, mz_err *err) {
    const mz_synth_model *m = job->model;
    mz_model_options *o = &job->options;
    o->ranks = o->ranks ? o->ranks : m->facts.ranks;
    o->steps = o->steps ? o->steps : m->steps;
    o->micro_batches = o->micro_batches ? o->micro_batches : m->micro_batches;
    if (o->tokens == 0) {
        int64_t sources = o->ranks * m->steps * m->micro_batches, sum = 0;
        for (int32_t p = 0; p < m->profiles; p++)
            sum += m->length[p];
        o->tokens = m->tokens / sources > 1 ? m->tokens / sources : 1;
        job->overshoot = sum / m->profiles / 2;
    }
    if (o->tokens > CALL_PAIRS / m->facts.top_k || o->tokens > MICRO_BATCH_TOKENS / o->ranks)
        return mz_fail(err, MZ_EINPUT,
                       "--tokens: %lld for each of %lld ranks: a call may have 2^28 pairs, a "
                       "micro-batch 2^31 tokens: pass more --micro-batches or --steps",
                       (long long)o->tokens, (long long)o->ranks);
    job->facts = m->facts;
    job->facts.ranks = (int32_t)o->ranks;
    job->facts.has_sequences = true;
    job->facts.sequence_length = 0;
    job->facts.import_notes[0] = 0; /* nothing was imported */
    job->facts.has_grad_norm2 = job->facts.has_input_norm2 = job->facts.has_hidden_norm2 = false;
    snprintf(job->facts.source, sizeof job->facts.source, "synthetic%s%s: like %.120s, seed %llu",
             o->shuffle.sequences ? ", sequences shuffled" : "",
             o->shuffle.layers ? ", layers shuffled" : "", m->facts.name,
             (unsigned long long)o->seed);
    snprintf(job->facts.producer, sizeof job->facts.producer, "mizan %.64s", job->app->version);
    job->first = mz_calloc((size_t)o->ranks + 1, sizeof *job->first);
    if (!job->first)
        return mz_fail_nomem(err, "the ranks of a trace");
    return mz_model_draw_open(m, o->seed, o->shuffle, &job->draw, err);
}

mz_code mz_synth_model_write(mz_app *app, const mz_synth_model *model,
                             const mz_model_options *options, const char *path,
                             const mz_trace_write_options *write, mz_err *err) {
    model_job job = {.app = app, .model = model, .options = *options};
    mz_code code = prepare(&job, err);
    if (!code)
        code = mz_trace_create(path, &job.facts, write, &job.writer, err);
    if (!code) {
        double total = (double)job.options.ranks * (double)job.options.tokens *
                       (double)job.options.steps * (double)job.options.micro_batches *
                       job.facts.layers * job.facts.top_k;
        job.progress = mz_progress_start(&app->log, "generating", "pairs",
                                         total < 0x1p62 ? (int64_t)total : 0);
        for (int64_t s = 0; s < job.options.steps && !code; s++)
            for (int32_t b = 0; b < job.options.micro_batches && !code; b++)
                code = write_micro_batch(&job, s, b, err);
        mz_progress_end(&job.progress);
    }
    if (!code)
        code = mz_trace_writer_close(&job.writer, err);
    if (job.writer)
        mz_trace_writer_abandon(&job.writer);
    mz_model_draw_close(&job.draw);
    free(job.plan);
    free(job.first);
    free(job.expert);
    free(job.before);
    free(job.weight);
    return code;
}
