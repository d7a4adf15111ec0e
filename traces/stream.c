#include "traces/stream.h"

#include "common/base/arena.h"
#include "traces/shape.h"
#include "traces/split.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* One layer call being given out or read ahead. */
typedef struct call_buffer {
    int64_t step, ordinal; /* which call it holds; ordinal = micro-batch * layers + layer */
    mz_code code;
    mz_err err;
    mz_load load;
    mz_pairs pairs;
    int64_t *token_begin, *pair_begin; /* [R+1] */
    int64_t *piece_pairs;              /* [pieces] first pair of each piece; variable top_k only */
    uint16_t *token_pairs, *expert;
    float *weight, *grad_norm2, *input_norm2, *hidden_norm2;
    size_t token_cap, pair_cap, piece_cap;
} call_buffer;

struct mz_stream {
    mz_shape shape;
    mz_step_plan
        plan[2]; /* by parity of the step: the next one may be made while this one is read */
    call_buffer buffer[2];
    int current;     /* buffer that the consumer holds */
    int64_t step;    /* given out last, -1 none yet */
    int64_t ordinal; /* of the next call within it */
    int64_t *row;    /* [E] counts of one source, for splitting */
    int64_t *bound;  /* [R+1] */
    bool want_pairs;
    pthread_t thread;
    bool threaded;
    /* Under the lock: the reading thread owns trace, plans and buffer[1 - current] while busy. */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool busy, quit;
    int64_t job_step, job_ordinal; /* read ahead, being done or done; -1 none */
};

/* ---- buffers --------------------------------------------------------------------------------- */

static bool make_buffer(const mz_stream *stream, call_buffer *b) {
    size_t ranks = (size_t)stream->shape.ranks,
           experts = (size_t)stream->shape.trace->facts.experts;
    b->step = b->ordinal = -1;
    b->load.sources = stream->shape.ranks;
    b->load.experts = stream->shape.trace->facts.experts;
    b->load.count = mz_calloc(ranks * experts, sizeof *b->load.count);
    b->load.total = mz_calloc(experts, sizeof *b->load.total);
    b->load.source = mz_calloc(ranks, sizeof *b->load.source);
    b->token_begin = mz_calloc(ranks + 1, sizeof *b->token_begin);
    b->pair_begin = mz_calloc(ranks + 1, sizeof *b->pair_begin);
    return b->load.count && b->load.total && b->load.source && b->token_begin && b->pair_begin;
}

static void free_buffer(call_buffer *b) {
    void *all[] = {b->load.count, b->load.total,  b->load.source, b->token_begin,
                   b->pair_begin, b->piece_pairs, b->token_pairs, b->expert,
                   b->weight,     b->grad_norm2,  b->input_norm2, b->hidden_norm2};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* Room for `need` elements of each array that is wanted; contents need not survive. */
static bool grow_arrays(size_t *cap, size_t need, void **arrays[], const size_t *sizes, int n) {
    if (need <= *cap)
        return true;
    size_t room = need + need / 4;
    for (int i = 0; i < n; i++) {
        if (!arrays[i])
            continue;
        free(*arrays[i]);
        *arrays[i] = NULL;
    }
    *cap = 0;
    for (int i = 0; i < n; i++)
        if (arrays[i] && (room > SIZE_MAX / sizes[i] || !(*arrays[i] = malloc(room * sizes[i]))))
            return false;
    *cap = room;
    return true;
}

static bool pair_arrays(const mz_stream *stream, call_buffer *b, int64_t pairs) {
    const mz_trace_facts *f = &stream->shape.trace->facts;
    bool weights = stream->shape.options.want_weights;
    void **arrays[] = {(void **)&b->expert, weights && f->has_weight ? (void **)&b->weight : NULL,
                       weights && f->has_hidden_norm2 ? (void **)&b->hidden_norm2 : NULL};
    const size_t sizes[] = {sizeof *b->expert, sizeof(float), sizeof(float)};
    return grow_arrays(&b->pair_cap, (size_t)pairs + 1, arrays, sizes, 3);
}

static bool token_arrays(const mz_stream *stream, call_buffer *b, int64_t tokens) {
    const mz_trace_facts *f = &stream->shape.trace->facts;
    bool weights = stream->shape.options.want_weights;
    void **arrays[] = {f->top_k == 0 ? (void **)&b->token_pairs : NULL,
                       weights && f->has_grad_norm2 ? (void **)&b->grad_norm2 : NULL,
                       weights && f->has_input_norm2 ? (void **)&b->input_norm2 : NULL};
    const size_t sizes[] = {sizeof *b->token_pairs, sizeof(float), sizeof(float)};
    return grow_arrays(&b->token_cap, (size_t)tokens + 1, arrays, sizes, 3);
}

static mz_code check_stop(const mz_stream *stream, mz_err *err) {
    const volatile sig_atomic_t *stop = stream->shape.options.stop;
    return stop && *stop ? mz_fail(err, MZ_EABORTED, "interrupted") : MZ_OK;
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static int64_t call_of(const mz_stream *stream, const mz_piece *piece, int32_t layer) {
    return stream->shape.call[piece->block * stream->shape.layers + layer];
}

static int by_axis(const void *a, const void *b) {
    const int64_t *x = a, *y = b;
    return (x[0] > y[0]) - (x[0] < y[0]);
}

/* First pair of every piece in the buffer: pieces lie on the token axis in rank order, which is not
 * the order in which they are read. */
static mz_code place_pairs(mz_stream *stream, const mz_micro *micro, int32_t layer, call_buffer *b,
                           mz_err *err) {
    size_t n = micro->count;
    int64_t(*axis)[2] = malloc(sizeof *axis * (n + 1)); /* token, piece */
    void **arrays[] = {(void **)&b->piece_pairs};
    const size_t sizes[] = {sizeof *b->piece_pairs};
    if (!axis || !grow_arrays(&b->piece_cap, n + 1, arrays, sizes, 1)) {
        free(axis);
        return mz_fail_nomem(err, "the pairs of a layer call");
    }
    mz_code code = MZ_OK;
    for (size_t i = 0; i < n && code == MZ_OK; i++) {
        int64_t first;
        axis[i][0] = micro->pieces[i].at;
        axis[i][1] = (int64_t)i;
        code = mz_trace_count_pairs(stream->shape.trace, call_of(stream, &micro->pieces[i], layer),
                                    micro->pieces[i].first, micro->pieces[i].tokens, &first,
                                    &b->piece_pairs[i], err);
        if (code == MZ_OK)
            code = check_stop(stream, err);
    }
    if (code == MZ_OK && n > 0)
        qsort(axis, n, sizeof *axis, by_axis);
    int64_t at = 0;
    memset(b->pair_begin, 0, sizeof *b->pair_begin * ((size_t)stream->shape.ranks + 1));
    for (size_t i = 0; i < n && code == MZ_OK; i++) {
        int64_t *slot = &b->piece_pairs[axis[i][1]], pairs = *slot;
        *slot = at;
        at += pairs;
        b->pair_begin[micro->pieces[axis[i][1]].rank + 1] += pairs;
    }
    for (int32_t r = 0; r < stream->shape.ranks; r++)
        b->pair_begin[r + 1] += b->pair_begin[r];
    free(axis);
    return code;
}

static mz_code lay_out(mz_stream *stream, const mz_micro *micro, int32_t layer, call_buffer *b,
                       mz_err *err) {
    int32_t ranks = stream->shape.ranks, k = stream->shape.trace->facts.top_k;
    b->token_begin[0] = 0;
    for (int32_t r = 0; r < ranks; r++)
        b->token_begin[r + 1] = b->token_begin[r] + micro->rank_tokens[r];
    int64_t tokens = b->token_begin[ranks];
    if (k > 0) {
        for (int32_t r = 0; r <= ranks; r++)
            b->pair_begin[r] = b->token_begin[r] * k;
    } else {
        mz_code code = place_pairs(stream, micro, layer, b, err);
        if (code != MZ_OK)
            return code;
    }
    if (!token_arrays(stream, b, tokens) || !pair_arrays(stream, b, b->pair_begin[ranks]))
        return mz_fail_nomem(err, "the pairs of a layer call");
    b->pairs = (mz_pairs){.sources = ranks,
                          .top_k = k,
                          .tokens = tokens,
                          .pairs = b->pair_begin[ranks],
                          .token_begin = b->token_begin,
                          .pair_begin = b->pair_begin,
                          .token_pairs = b->token_pairs,
                          .expert = b->expert,
                          .weight = b->weight,
                          .grad_norm2 = b->grad_norm2,
                          .input_norm2 = b->input_norm2,
                          .hidden_norm2 = b->hidden_norm2};
    return MZ_OK;
}

static mz_code read_piece(mz_stream *stream, const mz_micro *micro, size_t i, int64_t call,
                          call_buffer *b, mz_err *err) {
    const mz_piece *piece = &micro->pieces[i];
    int32_t k = stream->shape.trace->facts.top_k;
    int64_t token = piece->at, pair = k > 0 ? piece->at * k : b->piece_pairs[i];
    mz_trace_pairs_out out = {.expert = b->expert + pair,
                              .weight = b->weight ? b->weight + pair : NULL,
                              .hidden_norm2 = b->hidden_norm2 ? b->hidden_norm2 + pair : NULL,
                              .token_pairs = b->token_pairs ? b->token_pairs + token : NULL,
                              .grad_norm2 = b->grad_norm2 ? b->grad_norm2 + token : NULL,
                              .input_norm2 = b->input_norm2 ? b->input_norm2 + token : NULL};
    return mz_trace_read_pairs(stream->shape.trace, call, piece->first, piece->tokens, &out, err);
}

static mz_code fill_pairs(mz_stream *stream, const mz_micro *micro, int32_t layer, call_buffer *b,
                          mz_err *err) {
    mz_code code = stream->want_pairs ? lay_out(stream, micro, layer, b, err) : MZ_OK;
    for (size_t i = 0; i < micro->count && code == MZ_OK; i++) {
        const mz_piece *piece = &micro->pieces[i];
        int64_t call = call_of(stream, piece, layer);
        int64_t *row = b->load.count + (int64_t)piece->rank * b->load.experts;
        code = mz_trace_add_range(stream->shape.trace, call, piece->first, piece->tokens, row, err);
        if (code == MZ_OK && stream->want_pairs)
            code = read_piece(stream, micro, i, call, b, err);
        if (code == MZ_OK)
            code = check_stop(stream, err);
    }
    return code;
}

/* ---- counts ---------------------------------------------------------------------------------- */

/* Divides the counts of one source among the ranks that hold parts of its tokens. */
static void split_source(mz_stream *stream, const mz_step_plan *plan, int32_t m, int32_t layer,
                         int32_t source, int64_t pairs, call_buffer *b) {
    const mz_micro *micro = &plan->micro[m];
    int32_t first, experts = b->load.experts;
    int32_t parts = mz_shape_parts(&stream->shape, micro, source, &first, stream->bound);
    int64_t tokens = micro->source_tokens[source], left = pairs, given = 0;
    mz_rng rng = mz_rng_make(
        stream->shape.options.seed,
        mz_rng_stream((uint64_t)plan->step, (uint64_t)m, 2 + (uint64_t)layer, (uint64_t)source));
    for (int32_t i = 0; i < parts; i++) {
        int64_t *row = b->load.count + (int64_t)(first + i) * experts;
        int64_t end = (int64_t)((__int128)pairs * stream->bound[i + 1] / tokens);
        if (i == parts - 1) {
            for (int32_t e = 0; e < experts; e++)
                row[e] += stream->row[e];
            break;
        }
        mz_split_counts(&rng, stream->row, experts, left, end - given, row);
        left -= end - given;
        given = end;
    }
}

static mz_code add_block(mz_stream *stream, const mz_step_plan *plan, int32_t m, int32_t layer,
                         int64_t block, call_buffer *b, mz_err *err) {
    const mz_shape *shape = &stream->shape;
    int32_t source = shape->blocks[block].rank, sources = shape->trace->facts.ranks;
    int64_t index = shape->call[block * shape->layers + layer];
    if (index < 0)
        return MZ_OK; /* a rank without tokens need not have every layer */
    int64_t pairs = shape->trace->calls[index].pairs;
    if (pairs > INT64_MAX / 4 / plan->factor)
        return mz_fail(err, MZ_EINPUT, "%s: call %" PRId64 " has more pairs than can be scaled",
                       shape->trace->path, index);
    bool whole = sources % shape->ranks == 0;
    int64_t *row = stream->row;
    if (whole)
        row = b->load.count + (int64_t)(source / (sources / shape->ranks)) * b->load.experts;
    else
        memset(row, 0, sizeof *row * (size_t)b->load.experts);
    mz_code code = mz_trace_add_counts(shape->trace, index, row, err);
    if (code != MZ_OK || whole || pairs == 0)
        return code;
    for (int32_t e = 0; e < b->load.experts; e++)
        row[e] *= plan->factor;
    split_source(stream, plan, m, layer, source, pairs * plan->factor, b);
    return MZ_OK;
}

static mz_code fill_counts(mz_stream *stream, const mz_step_plan *plan, int32_t m, int32_t layer,
                           call_buffer *b, mz_err *err) {
    const mz_shape *shape = &stream->shape;
    const mz_micro *micro = &plan->micro[m];
    mz_code code = MZ_OK;
    int64_t begin = shape->groups[micro->group_begin].block_begin;
    int64_t end = shape->groups[micro->group_end - 1].block_end;
    for (int64_t block = begin; block < end && code == MZ_OK; block++)
        if ((code = check_stop(stream, err)) == MZ_OK)
            code = add_block(stream, plan, m, layer, block, b, err);
    if (shape->trace->facts.ranks % shape->ranks == 0 && plan->factor > 1)
        for (int64_t i = 0; i < (int64_t)b->load.sources * b->load.experts; i++)
            b->load.count[i] *= plan->factor;
    return code;
}

/* ---- producing ------------------------------------------------------------------------------- */

static mz_code need_plan(mz_stream *stream, int64_t step, mz_step_plan **plan, mz_err *err) {
    *plan = &stream->plan[step & 1];
    return (*plan)->step == step ? MZ_OK : mz_step_plan_make(&stream->shape, step, *plan, err);
}

/* Fills a buffer; runs in the reading thread or, without one, in the consumer. */
static void produce(mz_stream *stream, int64_t step, int64_t ordinal, call_buffer *b) {
    mz_step_plan *plan;
    b->step = step;
    b->ordinal = ordinal;
    b->code = need_plan(stream, step, &plan, &b->err);
    if (b->code != MZ_OK)
        return;
    int32_t layers = stream->shape.layers;
    int32_t m = (int32_t)(ordinal / layers), layer = (int32_t)(ordinal % layers);
    memset(b->load.count, 0,
           sizeof *b->load.count * (size_t)b->load.sources * (size_t)b->load.experts);
    if (stream->shape.trace->facts.kind == MZ_TRACE_PAIRS)
        b->code = fill_pairs(stream, &plan->micro[m], layer, b, &b->err);
    else
        b->code = fill_counts(stream, plan, m, layer, b, &b->err);
    if (b->code == MZ_OK)
        mz_load_sum(&b->load);
}

static void *read_ahead(void *arg) {
    mz_stream *stream = arg;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->busy && !stream->quit)
            pthread_cond_wait(&stream->wake, &stream->lock);
        if (stream->quit)
            break;
        call_buffer *b = &stream->buffer[1 - stream->current];
        pthread_mutex_unlock(&stream->lock);
        produce(stream, stream->job_step, stream->job_ordinal, b);
        pthread_mutex_lock(&stream->lock);
        stream->busy = false;
        pthread_cond_broadcast(&stream->wake);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static void wait_idle(mz_stream *stream) {
    if (!stream->threaded)
        return;
    pthread_mutex_lock(&stream->lock);
    while (stream->busy)
        pthread_cond_wait(&stream->wake, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}

/* Only while idle. */
static void start_reading(mz_stream *stream, int64_t step, int64_t ordinal) {
    if (!stream->threaded)
        return;
    pthread_mutex_lock(&stream->lock);
    stream->job_step = step;
    stream->job_ordinal = ordinal;
    stream->busy = true;
    pthread_cond_broadcast(&stream->wake);
    pthread_mutex_unlock(&stream->lock);
}

static int64_t window_end(const mz_stream *stream) {
    return stream->shape.options.first_step + stream->shape.options.steps;
}

static mz_code next_step(void *self, mz_step_head *head, bool *end, mz_err *err) {
    mz_stream *stream = self;
    mz_step_plan *plan;
    *end = stream->step + 1 >= window_end(stream);
    if (*end)
        return MZ_OK;
    wait_idle(stream);
    mz_code code = need_plan(stream, stream->step + 1, &plan, err);
    if (code != MZ_OK)
        return code;
    stream->step++;
    stream->ordinal = 0;
    *head = (mz_step_head){plan->label, plan->micros, stream->shape.layers, plan->tokens};
    if (mz_step_plan_has_sequences(&stream->shape)) {
        head->sequence_begin = plan->sequence_begin;
        head->sequence_tokens = plan->sequence;
    }
    if (stream->job_step != stream->step || stream->job_ordinal != 0)
        start_reading(stream, stream->step, 0);
    return MZ_OK;
}

static mz_code next_call(void *self, mz_layer_call *call, mz_err *err) {
    mz_stream *stream = self;
    wait_idle(stream);
    if (stream->step < stream->shape.options.first_step)
        return mz_fail(err, MZ_EINTERNAL, "a layer call was asked for before its step");
    const mz_step_plan *plan = &stream->plan[stream->step & 1];
    int64_t calls = (int64_t)plan->micros * stream->shape.layers, ordinal = stream->ordinal;
    if (ordinal >= calls)
        return mz_fail(err, MZ_EINTERNAL, "the step has no further layer call");
    call_buffer *b = &stream->buffer[1 - stream->current];
    if (b->step != stream->step || b->ordinal != ordinal)
        produce(stream, stream->step, ordinal, b);
    if (b->code != MZ_OK) {
        *err = b->err;
        return b->code;
    }
    stream->current = 1 - stream->current;
    stream->ordinal++;
    call->micro_batch = (int32_t)(ordinal / stream->shape.layers);
    call->layer = (int32_t)(ordinal % stream->shape.layers);
    call->load = &b->load;
    call->pairs = stream->want_pairs ? &b->pairs : NULL;
    if (ordinal + 1 < calls)
        start_reading(stream, stream->step, ordinal + 1);
    else if (stream->step + 1 < window_end(stream))
        start_reading(stream, stream->step + 1, 0);
    return MZ_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

static mz_code start_thread(mz_stream *stream, mz_err *err) {
    if (pthread_create(&stream->thread, NULL, read_ahead, stream) != 0)
        return mz_fail(err, MZ_EINTERNAL, "cannot start the thread that reads ahead");
    stream->threaded = true;
    return MZ_OK;
}

mz_code mz_stream_open(mz_trace *trace, const mz_stream_options *options, mz_stream **out,
                       mz_err *err) {
    *out = NULL;
    mz_stream *stream = mz_calloc(1, sizeof *stream);
    if (!stream)
        return mz_fail_nomem(err, "a stream of loads");
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->wake, NULL);
    stream->plan[0].step = stream->plan[1].step = -1;
    stream->job_step = -1;
    mz_code code = mz_shape_make(trace, options, &stream->shape, err);
    if (code == MZ_OK) {
        stream->step = stream->shape.options.first_step - 1;
        stream->want_pairs = options->want_pairs && trace->facts.kind == MZ_TRACE_PAIRS;
        stream->row = mz_calloc((size_t)trace->facts.experts, sizeof *stream->row);
        stream->bound = mz_calloc((size_t)stream->shape.ranks + 1, sizeof *stream->bound);
        if (!stream->row || !stream->bound || !make_buffer(stream, &stream->buffer[0]) ||
            !make_buffer(stream, &stream->buffer[1]))
            code = mz_fail_nomem(err, "the buffers of a stream of loads");
    }
    if (code == MZ_OK && options->read_ahead)
        code = start_thread(stream, err);
    if (code != MZ_OK)
        mz_stream_close(&stream);
    *out = stream;
    return code;
}

mz_load_source mz_stream_source(mz_stream *stream) {
    return (mz_load_source){.self = stream,
                            .ranks = stream->shape.ranks,
                            .experts = stream->shape.trace->facts.experts,
                            .layers = stream->shape.layers,
                            .next_step = next_step,
                            .next_call = next_call};
}

bool mz_stream_reshaped(const mz_stream *stream) {
    return stream->shape.reshaped;
}

int64_t mz_stream_steps(const mz_stream *stream) {
    return stream->shape.options.steps;
}

void mz_stream_close(mz_stream **stream) {
    mz_stream *s = *stream;
    *stream = NULL;
    if (!s)
        return;
    if (s->threaded) {
        wait_idle(s);
        pthread_mutex_lock(&s->lock);
        s->quit = true;
        pthread_cond_broadcast(&s->wake);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
    }
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->wake);
    for (int i = 0; i < 2; i++) {
        free_buffer(&s->buffer[i]);
        mz_step_plan_free(&s->plan[i]);
    }
    free(s->row);
    free(s->bound);
    mz_shape_free(&s->shape);
    free(s);
}
