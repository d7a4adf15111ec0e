#include "traces/shape.h"

#include "common/base/arena.h"
#include "common/base/rng.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { RUN_TOKENS = 512 };

/* ---- index of the trace ---------------------------------------------------------------------- */

static mz_code nomem(mz_err *err) {
    return mz_fail_nomem(err, "the shape of a trace");
}

static bool stopped(const mz_shape *shape) {
    return shape->options.stop && *shape->options.stop;
}

static bool same_group(const mz_trace_call *a, const mz_trace_call *b) {
    return a->step == b->step && a->micro_batch == b->micro_batch;
}

/* Blocks of the calls [begin, end) of one group, and their calls by layer. */
static void index_group(mz_shape *shape, int64_t begin, int64_t end, int64_t *of_rank) {
    const mz_trace_call *calls = shape->trace->calls;
    mz_group *group = &shape->groups[shape->group_count++];
    *group = (mz_group){calls[begin].step, shape->block_count, shape->block_count, 0};
    for (int64_t i = begin; i < end; i++) {
        const mz_trace_call *call = &calls[i];
        int64_t b = of_rank[call->rank];
        if (b < group->block_begin) {
            b = of_rank[call->rank] = shape->block_count++;
            shape->blocks[b] = (mz_block){call->token_begin, call->tokens, call->rank};
            group->tokens += call->tokens;
            for (int32_t l = 0; l < shape->layers; l++)
                shape->call[b * shape->layers + l] = -1;
        }
        if (call->layer < shape->layers)
            shape->call[b * shape->layers + call->layer] = i;
    }
    group->block_end = shape->block_count;
}

/* Every (step, micro-batch, rank) opens with its first call, so counting those bounds the blocks.
 */
static int64_t count_blocks(const mz_trace *trace, int64_t *stamp, int64_t *groups) {
    int64_t blocks = 0;
    *groups = 0;
    for (int64_t i = 0; i < trace->call_count; i++) {
        const mz_trace_call *call = &trace->calls[i];
        if (i == 0 || !same_group(call - 1, call))
            ++*groups;
        blocks += stamp[call->rank] != *groups;
        stamp[call->rank] = *groups;
    }
    return blocks;
}

static mz_code index_calls(mz_shape *shape, mz_err *err) {
    const mz_trace *trace = shape->trace;
    size_t ranks = (size_t)trace->facts.ranks;
    int64_t *of_rank = mz_calloc(ranks, sizeof *of_rank);
    if (!of_rank)
        return nomem(err);
    int64_t groups, blocks = count_blocks(trace, of_rank, &groups);
    shape->groups = mz_calloc((size_t)groups, sizeof *shape->groups);
    shape->blocks = mz_calloc((size_t)blocks, sizeof *shape->blocks);
    shape->call = mz_calloc((size_t)blocks, sizeof *shape->call * (size_t)shape->layers);
    if (!shape->groups || !shape->blocks || !shape->call) {
        free(of_rank);
        return nomem(err);
    }
    memset(of_rank, 0xff, ranks * sizeof *of_rank);
    for (int64_t begin = 0, i = 1; i <= trace->call_count; i++)
        if (i == trace->call_count || !same_group(&trace->calls[begin], &trace->calls[i])) {
            index_group(shape, begin, i, of_rank);
            begin = i;
        }
    free(of_rank);
    return MZ_OK;
}

static mz_code check_layers(const mz_shape *shape, mz_err *err) {
    const mz_trace *trace = shape->trace;
    for (int64_t g = 0; g < shape->group_count; g++)
        for (int64_t b = shape->groups[g].block_begin; b < shape->groups[g].block_end; b++)
            for (int32_t l = 0; l < shape->layers; l++)
                if (shape->blocks[b].tokens > 0 && shape->call[b * shape->layers + l] < 0)
                    return mz_fail(err, MZ_EINPUT,
                                   "%s: step %" PRId64 ", rank %d, tokens from %" PRId64
                                   ": no call for layer %d; choose layers that every step has with "
                                   "mizan trace cut",
                                   trace->path, shape->groups[g].step, shape->blocks[b].rank,
                                   shape->blocks[b].token_begin, l);
    return MZ_OK;
}

/* ---- sequences ------------------------------------------------------------------------------- */

typedef struct piece_list {
    mz_piece **pieces;
    size_t *count, *cap;
} piece_list;

static bool push(piece_list list, int64_t block, int64_t first, int64_t tokens, int64_t most) {
    while (tokens > 0) {
        int64_t n = most > 0 && tokens > most ? most : tokens;
        if (!mz_grow((void **)list.pieces, list.cap, *list.count + 1, sizeof **list.pieces))
            return false;
        const int64_t order = (int64_t)*list.count;
        (*list.pieces)[*list.count] =
            (mz_piece){.block = block, .first = first, .tokens = n, .order = order, .at = order};
        ++*list.count;
        first += n;
        tokens -= n;
    }
    return true;
}

static int64_t run_length(const mz_shape *shape) {
    if (shape->options.sequence_length > 0)
        return shape->options.sequence_length;
    int64_t recorded = shape->trace->facts.sequence_length;
    return recorded > 0 ? recorded : RUN_TOKENS;
}

/* Sequences of a block, and the tokens between them in runs. */
static bool push_block(const mz_shape *shape, int64_t b, piece_list list) {
    const mz_trace *trace = shape->trace;
    const mz_block *block = &shape->blocks[b];
    int64_t run = run_length(shape), done = 0;
    for (int64_t i = mz_find_sequence(trace, block->token_begin); i < trace->sequence_count; i++) {
        int64_t first = trace->sequences[i].token_begin - block->token_begin;
        if (first >= block->tokens)
            break;
        if (!push(list, b, done, first - done, run) ||
            !push(list, b, first, trace->sequences[i].tokens, shape->options.sequence_length))
            return false;
        done = first + trace->sequences[i].tokens;
    }
    return push(list, b, done, block->tokens - done, run);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* A step of a log without steps ends once it has step_tokens tokens. */
static bool cut_steps(mz_shape *shape, int64_t n, bool pieces) {
    int64_t tokens = 0;
    shape->step_begin = mz_calloc((size_t)n + 2, sizeof *shape->step_begin);
    if (!shape->step_begin)
        return false;
    for (int64_t i = 0; i < n; i++) {
        tokens += pieces ? shape->items[i].tokens : shape->groups[i].tokens;
        if (tokens >= shape->options.step_tokens || (i == n - 1 && shape->step_count == 0)) {
            shape->step_begin[++shape->step_count] = i + 1;
            tokens = 0;
        }
    }
    return true;
}

static mz_code make_steps(mz_shape *shape, mz_err *err) {
    const mz_trace *trace = shape->trace;
    bool none = trace->facts.step_meaning == MZ_STEP_NONE;
    if (none && shape->options.step_tokens <= 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: this trace has no steps: say how many tokens make one with "
                       "--step-tokens",
                       trace->path);
    bool pieces = none && trace->facts.kind == MZ_TRACE_PAIRS;
    piece_list list = {&shape->items, &shape->item_count, &shape->item_cap};
    for (int64_t b = 0; b < shape->block_count && pieces; b++)
        if (!push_block(shape, b, list))
            return nomem(err);
    if (none)
        return cut_steps(shape, pieces ? (int64_t)shape->item_count : shape->group_count, pieces)
                   ? MZ_OK
                   : nomem(err);
    shape->step_begin = mz_calloc((size_t)shape->group_count + 1, sizeof *shape->step_begin);
    if (!shape->step_begin)
        return nomem(err);
    for (int64_t g = 0; g < shape->group_count; g++) {
        bool last =
            g + 1 == shape->group_count || shape->groups[g + 1].step != shape->groups[g].step;
        if (last)
            shape->step_begin[++shape->step_count] = g + 1;
    }
    return MZ_OK;
}

static int64_t tokens_of_window(const mz_shape *shape) {
    int64_t sum = 0, first = shape->options.first_step, end = first + shape->options.steps;
    int64_t i = shape->step_begin[first], stop = shape->step_begin[end];
    for (; i < stop; i++)
        sum += shape->items ? shape->items[i].tokens : shape->groups[i].tokens;
    return sum;
}

static mz_code check_window(mz_shape *shape, mz_err *err) {
    mz_stream_options *o = &shape->options;
    const char *path = shape->trace->path;
    int64_t tokens = 0;
    for (int64_t g = 0; g < shape->group_count; g++)
        tokens += shape->groups[g].tokens;
    if (tokens == 0)
        return mz_fail(err, MZ_EINPUT, "%s: the whole trace holds no token", path);
    if (o->steps == 0)
        o->steps = shape->step_count - o->first_step;
    if (o->first_step < 0 || o->steps <= 0 || o->first_step > shape->step_count - o->steps)
        return mz_fail(err, MZ_EINPUT,
                       "%s: steps %" PRId64 " to %" PRId64 " are asked for, the trace has %" PRId64
                       " (counted from 0)",
                       path, o->first_step, o->first_step + (o->steps > 0 ? o->steps - 1 : 0),
                       shape->step_count);
    if (tokens_of_window(shape) == 0)
        return mz_fail(err, MZ_EINPUT, "%s: the steps asked for hold no token", path);
    return MZ_OK;
}

/* Tokens of one resampled step: well above what any run trains on, and its pairs of one layer call
 * still fit into memory. */
enum { STEP_TOKENS_MAX = 1 << 30 };

static mz_code check_options(const mz_trace *trace, const mz_stream_options *o, mz_err *err) {
    if (o->ranks < 0 || o->ranks > MZ_RANKS_MAX || o->step_tokens < 0 || o->tokens_per_rank < 0 ||
        o->sequence_length < 0 || o->steps < 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: ranks, steps, step tokens, tokens per rank and sequence length must "
                       "not be negative, ranks at most %d",
                       trace->path, MZ_RANKS_MAX);
    if (o->step_tokens > 0 && o->tokens_per_rank > 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: step tokens and tokens per rank exclude each other: give one",
                       trace->path);
    if (o->layers < 0 || o->layers > trace->facts.layers)
        return mz_fail(err, MZ_EINPUT, "%s: %d layers are asked for, the trace has %d", trace->path,
                       o->layers, trace->facts.layers);
    const int64_t ranks = o->ranks > 0 ? o->ranks : trace->facts.ranks;
    if (o->step_tokens > STEP_TOKENS_MAX || o->tokens_per_rank > STEP_TOKENS_MAX / ranks)
        return mz_fail(err, MZ_EINPUT,
                       "%s: a step of more than %d tokens is asked for (%" PRId64
                       " ranks): give fewer tokens per step or per rank",
                       trace->path, STEP_TOKENS_MAX, ranks);
    return MZ_OK;
}

mz_code mz_shape_make(mz_trace *trace, const mz_stream_options *options, mz_shape *shape,
                      mz_err *err) {
    const mz_trace_facts *f = &trace->facts;
    bool pairs = f->kind == MZ_TRACE_PAIRS, none = f->step_meaning == MZ_STEP_NONE;
    *shape = (mz_shape){.trace = trace,
                        .options = *options,
                        .layers = options->layers ? options->layers : f->layers};
    shape->ranks = options->ranks ? options->ranks : f->ranks;
    bool resized = (options->step_tokens > 0 && !none) || options->tokens_per_rank > 0;
    shape->reshaped = shape->ranks != f->ranks || resized || (none && pairs && shape->ranks > 1);
    shape->deal = pairs && (none || shape->reshaped);
    mz_code code = check_options(trace, options, err);
    if (code == MZ_OK)
        code = index_calls(shape, err);
    if (code == MZ_OK)
        code = make_steps(shape, err);
    if (code == MZ_OK)
        code = check_window(shape, err);
    if (code == MZ_OK)
        code = check_layers(shape, err);
    if (code != MZ_OK)
        mz_shape_free(shape);
    return code;
}

void mz_shape_free(mz_shape *shape) {
    free(shape->groups);
    free(shape->blocks);
    free(shape->call);
    free(shape->step_begin);
    free(shape->items);
    memset(shape, 0, sizeof *shape);
}

/* ---- dealing --------------------------------------------------------------------------------- */

/* Ranks as a binary heap, least loaded on top, lower rank first. */
typedef struct heap {
    int64_t *load; /* [R] by rank */
    int32_t *rank; /* [R] heap order */
    int32_t n;
} heap;

static bool less_loaded(const heap *h, int32_t a, int32_t b) {
    return h->load[a] != h->load[b] ? h->load[a] < h->load[b] : a < b;
}

static int32_t give_to_least(heap *h, int64_t tokens) {
    int32_t top = h->rank[0], i = 0;
    h->load[top] += tokens;
    for (int32_t child = 1; child < h->n; child = 2 * i + 1) {
        if (child + 1 < h->n && less_loaded(h, h->rank[child + 1], h->rank[child]))
            child++;
        if (less_loaded(h, top, h->rank[child]))
            break;
        h->rank[i] = h->rank[child];
        i = child;
    }
    h->rank[i] = top;
    return top;
}

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* One pass of a radix sort: `from` into `to` by falling digit, equal digits in their order. */
static void sort_by_digit(const mz_piece *piece, size_t n, int shift, const size_t *from,
                          size_t *to) {
    size_t place[DIGITS] = {0};
    for (size_t i = 0; i < n; i++)
        place[piece[i].tokens >> shift & (DIGITS - 1)]++;
    size_t before = 0;
    for (int digit = DIGITS - 1; digit >= 0; digit--) {
        const size_t count = place[digit];
        place[digit] = before;
        before += count;
    }
    for (size_t i = 0; i < n; i++)
        to[place[piece[from[i]].tokens >> shift & (DIGITS - 1)]++] = from[i];
}

/* Indices of the pieces, longest first, equal ones in order. False when stopped. */
static bool longest_first(const mz_shape *shape, const mz_micro *micro, size_t *order,
                          size_t *spare) {
    int64_t most = 0;
    for (size_t i = 0; i < micro->count; i++) {
        order[i] = i;
        most = micro->pieces[i].tokens > most ? micro->pieces[i].tokens : most;
    }
    for (int shift = 0; shift < 63 && most >> shift > 0; shift += DIGIT_BITS) {
        if (stopped(shape))
            return false;
        sort_by_digit(micro->pieces, micro->count, shift, order, spare);
        memcpy(order, spare, micro->count * sizeof *order);
    }
    return true;
}

/* One of the first `base` pieces again; what it is a copy of stays in `at` until place(). */
static bool draw(mz_micro *micro, size_t base, mz_rng *rng, mz_piece **drawn) {
    if (!mz_grow((void **)&micro->pieces, &micro->cap, micro->count + 1, sizeof *micro->pieces))
        return false;
    *drawn = &micro->pieces[micro->count];
    **drawn = micro->pieces[mz_rng_below(rng, base)];
    (*drawn)->order = (int64_t)micro->count++;
    return true;
}

/* Fewer sequences than there are, or more than there are, until the micro-batch has `target`. */
static bool resize(const mz_shape *shape, mz_micro *micro, int64_t target, mz_rng *rng) {
    int64_t tokens = 0;
    size_t base = micro->count, used = 0;
    while (used < base && tokens < target)
        tokens += micro->pieces[used++].tokens;
    micro->count = used;
    while (base > 0 && tokens < target) {
        mz_piece *drawn;
        if (stopped(shape) || !draw(micro, base, rng, &drawn))
            return false;
        tokens += drawn->tokens;
    }
    return true;
}

/* Deals the pieces; then draws more until the least loaded rank holds `least` tokens. */
static bool deal(const mz_shape *shape, mz_micro *micro, int64_t least, mz_rng *rng) {
    const int32_t ranks = shape->ranks;
    const size_t base = micro->count;
    heap h = {micro->rank_tokens, malloc(sizeof(int32_t) * (size_t)ranks), ranks};
    size_t *order = malloc(sizeof *order * (base + 1));
    size_t *spare = malloc(sizeof *spare * (base + 1));
    bool ok = h.rank && order && spare && longest_first(shape, micro, order, spare);
    free(spare);
    for (int32_t r = 0; r < ranks && ok; r++)
        h.rank[r] = r;
    for (size_t i = 0; i < base && ok; i++) {
        mz_piece *piece = &micro->pieces[order[i]];
        piece->rank = give_to_least(&h, piece->tokens);
        ok = !stopped(shape);
    }
    while (ok && base > 0 && h.load[h.rank[0]] < least) {
        mz_piece *drawn;
        ok = !stopped(shape) && draw(micro, base, rng, &drawn);
        if (ok)
            drawn->rank = give_to_least(&h, drawn->tokens);
    }
    free(h.rank);
    free(order);
    return ok;
}

/* Places pieces on the micro-batch's token axis, rank after rank and in order within one, and
 * leaves them in file order: sorted by the piece that they are a copy of, which `at` names. */
static bool place(const mz_shape *shape, mz_micro *micro) {
    const size_t n = micro->count;
    int64_t *next = mz_calloc((size_t)shape->ranks + 1, sizeof *next);
    size_t *slot = mz_calloc(n + 1, sizeof *slot);
    mz_piece *sorted = malloc(sizeof *sorted * (n + 1));
    bool ok = next && slot && sorted && !stopped(shape);
    for (int32_t r = 0; ok && r < shape->ranks; r++)
        next[r + 1] = next[r] + micro->rank_tokens[r];
    for (size_t i = 0; ok && i < n; i++)
        slot[micro->pieces[i].at + 1]++;
    for (size_t i = 0; ok && i < n; i++)
        slot[i + 1] += slot[i];
    for (size_t i = 0; ok && i < n; i++) {
        mz_piece *to = &sorted[slot[micro->pieces[i].at]++];
        *to = micro->pieces[i];
        to->at = next[to->rank];
        next[to->rank] += to->tokens;
    }
    free(next);
    free(slot);
    if (!ok) {
        free(sorted);
        return false;
    }
    free(micro->pieces);
    micro->pieces = sorted;
    micro->cap = n + 1;
    return true;
}

/* ---- plans ----------------------------------------------------------------------------------- */

static bool make_room(const mz_shape *shape, mz_step_plan *plan, int32_t micros) {
    if (micros > plan->cap) {
        mz_micro *grown = realloc(plan->micro, sizeof *grown * (size_t)micros);
        if (!grown)
            return false;
        memset(grown + plan->cap, 0, sizeof *grown * (size_t)(micros - plan->cap));
        plan->micro = grown;
        plan->cap = micros;
    }
    plan->micros = micros;
    size_t ranks = (size_t)shape->ranks;
    if (!mz_grow((void **)&plan->tokens, &plan->tokens_cap, ranks * (size_t)micros,
                 sizeof *plan->tokens))
        return false;
    memset(plan->tokens, 0, ranks * (size_t)micros * sizeof *plan->tokens);
    for (int32_t m = 0; m < micros; m++) {
        mz_micro *micro = &plan->micro[m];
        micro->count = 0;
        micro->rank_tokens = plan->tokens + (size_t)m * ranks;
        if (!micro->source_tokens)
            micro->source_tokens =
                mz_calloc((size_t)shape->trace->facts.ranks, sizeof *micro->source_tokens);
        if (!micro->source_tokens)
            return false;
    }
    return true;
}

static bool plan_pairs(const mz_shape *shape, mz_step_plan *plan, int32_t m, int64_t group) {
    mz_micro *micro = &plan->micro[m];
    piece_list list = {&micro->pieces, &micro->count, &micro->cap};
    mz_rng rng =
        mz_rng_make(shape->options.seed, mz_rng_stream((uint64_t)plan->step, (uint64_t)m, 1, 0));
    int64_t share = (shape->options.step_tokens + plan->micros - 1) / plan->micros;
    int64_t least = (shape->options.tokens_per_rank + plan->micros - 1) / plan->micros;
    if (shape->items) {
        for (int64_t i = shape->step_begin[plan->step]; i < shape->step_begin[plan->step + 1]; i++)
            if (!push(list, shape->items[i].block, shape->items[i].first, shape->items[i].tokens,
                      0))
                return false;
    } else {
        for (int64_t b = shape->groups[group].block_begin; b < shape->groups[group].block_end; b++)
            if (!(shape->deal ? push_block(shape, b, list)
                              : push(list, b, 0, shape->blocks[b].tokens, 0)))
                return false;
    }
    if (shape->options.step_tokens > 0 && !resize(shape, micro, share, &rng))
        return false;
    if (shape->deal) {
        if (!deal(shape, micro, least, &rng))
            return false;
    } else {
        for (size_t i = 0; i < micro->count; i++) {
            micro->pieces[i].rank = shape->blocks[micro->pieces[i].block].rank;
            micro->rank_tokens[micro->pieces[i].rank] += micro->pieces[i].tokens;
        }
    }
    return place(shape, micro);
}

int32_t mz_shape_parts(const mz_shape *shape, const mz_micro *micro, int32_t source, int32_t *first,
                       int64_t *bound) {
    int32_t ranks = shape->ranks, sources = shape->trace->facts.ranks;
    int64_t tokens = micro->source_tokens[source], total = 0, before = 0;
    bound[0] = 0;
    if (sources % ranks == 0) {
        *first = source / (sources / ranks);
        bound[1] = tokens;
        return 1;
    }
    if (ranks % sources == 0) { /* a source stays on its own ranks */
        int32_t q = ranks / sources;
        *first = source * q;
        for (int32_t i = 1; i <= q; i++)
            bound[i] = (int64_t)((__int128)tokens * i / q);
        return q;
    }
    for (int32_t s = 0; s < sources; s++) {
        before += s < source ? micro->source_tokens[s] : 0;
        total += micro->source_tokens[s];
    }
    int32_t parts = 0;
    *first = 0;
    for (int32_t r = 0; r < ranks && total > 0; r++) {
        int64_t end = (int64_t)((__int128)total * (r + 1) / ranks) - before;
        if (end <= 0) {
            *first = r + 1;
            continue;
        }
        bound[++parts] = end < tokens ? end : tokens;
        if (end >= tokens)
            break;
    }
    return parts;
}

static mz_code plan_counts(const mz_shape *shape, mz_step_plan *plan, int32_t m, int64_t begin,
                           int64_t end, mz_err *err) {
    mz_micro *micro = &plan->micro[m];
    int64_t *bound = malloc(sizeof *bound * ((size_t)shape->ranks + 1));
    if (!bound)
        return nomem(err);
    micro->group_begin = begin;
    micro->group_end = end;
    memset(micro->source_tokens, 0,
           sizeof *micro->source_tokens * (size_t)shape->trace->facts.ranks);
    for (int64_t b = shape->groups[begin].block_begin; b < shape->groups[end - 1].block_end; b++)
        micro->source_tokens[shape->blocks[b].rank] += shape->blocks[b].tokens;
    for (int32_t s = 0; s < shape->trace->facts.ranks; s++) {
        int32_t first, parts = 0;
        if (micro->source_tokens[s] > 0)
            parts = mz_shape_parts(shape, micro, s, &first, bound);
        for (int32_t i = 0; i < parts; i++)
            micro->rank_tokens[first + i] += bound[i + 1] - bound[i];
    }
    free(bound);
    return MZ_OK;
}

/* Counts know no sequences: they grow by whole factors only. */
static mz_code choose_factor(const mz_shape *shape, mz_step_plan *plan, mz_err *err) {
    const mz_stream_options *o = &shape->options;
    int64_t tokens = 0, want = 0;
    plan->factor = 1;
    for (int64_t i = 0; i < (int64_t)plan->micros * shape->ranks; i++)
        tokens += plan->tokens[i];
    if (shape->trace->facts.step_meaning != MZ_STEP_NONE && o->step_tokens > 0)
        want = o->step_tokens;
    if (o->tokens_per_rank > 0)
        want = o->tokens_per_rank * shape->ranks;
    if (want == 0 || tokens == 0)
        return MZ_OK;
    plan->factor = (want + tokens - 1) / tokens;
    if (o->step_tokens > 0 && want % tokens != 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: step %" PRId64 " holds %" PRId64 " tokens; counts scale by whole "
                       "factors: --step-tokens must be a multiple of that",
                       shape->trace->path, plan->label, tokens);
    for (int64_t i = 0; i < (int64_t)plan->micros * shape->ranks; i++)
        plan->tokens[i] *= plan->factor;
    return MZ_OK;
}

bool mz_step_plan_has_sequences(const mz_shape *shape) {
    return shape->trace->facts.kind == MZ_TRACE_PAIRS && shape->trace->facts.has_sequences;
}

/* First sequence that begins at or after `token`; sequences ascend. */
static int64_t sequence_at(const mz_trace_sequence *sequence, int64_t count, int64_t token) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (sequence[middle].token_begin < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* A sequence of `tokens`, cut as dealing cuts it, into `length` (NULL: only counts the parts). */
static int64_t cut_sequence(const mz_shape *shape, int64_t tokens, int64_t *length) {
    const int64_t most = shape->options.sequence_length;
    int64_t parts = 0;
    for (; tokens > 0; parts++) {
        const int64_t part = most > 0 && tokens > most ? most : tokens;
        if (length)
            length[parts] = part;
        tokens -= part;
    }
    return parts;
}

/* Lengths of the sequences of a piece into `length` (NULL: only counts them): the piece itself
 * where pieces were dealt, else those recorded in its block. */
static int64_t piece_sequences(const mz_shape *shape, const mz_piece *piece, int64_t *length) {
    if (shape->deal) {
        if (length)
            *length = piece->tokens;
        return 1;
    }
    const mz_trace_sequence *sequence;
    const int64_t count = mz_trace_sequences(shape->trace, &sequence);
    const int64_t begin = shape->blocks[piece->block].token_begin + piece->first;
    int64_t n = 0;
    for (int64_t i = sequence_at(sequence, count, begin);
         i < count && sequence[i].token_begin < begin + piece->tokens; i++)
        n += cut_sequence(shape, sequence[i].tokens, length ? length + n : NULL);
    return n;
}

/* Counting sort of all pieces' sequences by (micro-batch, rank). */
static bool list_sequences(const mz_shape *shape, mz_step_plan *plan) {
    const size_t ranks = (size_t)shape->ranks, cells = ranks * (size_t)plan->micros;
    if (!mz_grow((void **)&plan->sequence_begin, &plan->sequence_begin_cap, cells + 2,
                 sizeof *plan->sequence_begin))
        return false;
    /* Shifted by one cell, so that filling leaves the begins in place. */
    int64_t *next = plan->sequence_begin + 1;
    memset(plan->sequence_begin, 0, sizeof *next * (cells + 2));
    for (size_t m = 0; m < (size_t)plan->micros; m++)
        for (size_t i = 0; i < plan->micro[m].count; i++) {
            const mz_piece *piece = &plan->micro[m].pieces[i];
            next[m * ranks + (size_t)piece->rank + 1] += piece_sequences(shape, piece, NULL);
        }
    for (size_t cell = 0; cell < cells; cell++)
        next[cell + 1] += next[cell];
    if (!mz_grow((void **)&plan->sequence, &plan->sequence_cap, (size_t)next[cells] + 1,
                 sizeof *plan->sequence))
        return false;
    for (size_t m = 0; m < (size_t)plan->micros; m++)
        for (size_t i = 0; i < plan->micro[m].count; i++) {
            const mz_piece *piece = &plan->micro[m].pieces[i];
            int64_t *at = &next[m * ranks + (size_t)piece->rank];
            *at += piece_sequences(shape, piece, plan->sequence + *at);
        }
    return true;
}

mz_code mz_step_plan_make(const mz_shape *shape, int64_t step, mz_step_plan *plan, mz_err *err) {
    bool none = shape->trace->facts.step_meaning == MZ_STEP_NONE;
    bool pairs = shape->trace->facts.kind == MZ_TRACE_PAIRS;
    int64_t begin = shape->step_begin[step], end = shape->step_begin[step + 1];
    int64_t micros = none ? 1 : end - begin;
    plan->step = -1; /* nothing valid in it until all is done */
    plan->factor = 1;
    if (micros > INT32_MAX || !make_room(shape, plan, (int32_t)micros))
        return nomem(err);
    plan->step = step;
    plan->label = none ? step : shape->groups[begin].step;
    mz_code code = MZ_OK;
    for (int32_t m = 0; m < plan->micros && code == MZ_OK; m++) {
        if (pairs)
            code = plan_pairs(shape, plan, m, begin + m) ? MZ_OK
                   : stopped(shape)                      ? mz_fail(err, MZ_EABORTED, "interrupted")
                                                         : nomem(err);
        else
            code = plan_counts(shape, plan, m, none ? begin : begin + m, none ? end : begin + m + 1,
                               err);
    }
    if (code == MZ_OK && !pairs)
        code = choose_factor(shape, plan, err);
    if (code == MZ_OK && mz_step_plan_has_sequences(shape) && !list_sequences(shape, plan))
        code = nomem(err);
    if (code != MZ_OK)
        plan->step = -1;
    return code;
}

void mz_step_plan_free(mz_step_plan *plan) {
    for (int32_t m = 0; m < plan->cap; m++) {
        free(plan->micro[m].pieces);
        free(plan->micro[m].source_tokens);
    }
    free(plan->micro);
    free(plan->tokens);
    free(plan->sequence_begin);
    free(plan->sequence);
    memset(plan, 0, sizeof *plan);
}
