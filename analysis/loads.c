#include "analysis/loads.h"

#include "sim/policy/policy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct mz_loads {
    mz_loads_options o;
    mz_arena arena;
    mz_load load;
    int64_t *tokens; /* [micro_batches][ranks] */
    size_t tokens_cap;
    int64_t *recorded; /* [micro_batches][ranks] of the shape */
    size_t recorded_cap;
    int64_t *weight;   /* [experts] shares of an uneven load */
    uint64_t *scratch; /* [experts] */
    int32_t step;
    int64_t call; /* of the step */
};

/* Experts of a group's first rank in the block layout (policy.h). */
static int32_t first_experts(const mz_loads_options *o) {
    return (o->experts + o->ep - 1) / o->ep;
}

static mz_code check(const mz_loads_options *o, mz_err *err) {
    const double most = fmin(o->ep, (double)o->ep * first_experts(o) / o->top_k);
    if (o->shape || o->imbalance == 1 || (o->imbalance > 1 && o->imbalance <= most))
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "an imbalance of %g is impossible: with %d ranks in a group and top-%d of %d "
                   "experts it lies between 1 and %g",
                   o->imbalance, o->ep, o->top_k, o->experts, most);
}

/* The first rank's experts share imbalance / ep of all pairs, the others what is left. */
static void set_weights(mz_loads *l) {
    static const double SCALE = 1e12;
    const mz_loads_options *o = &l->o;
    const int32_t first = first_experts(o), others = o->experts - first;
    const double part = o->imbalance / o->ep;
    const double heavy = part / first, light = others > 0 ? (1 - part) / others : 0;
    for (int32_t e = 0; e < o->experts; e++)
        l->weight[e] = o->imbalance == 1 ? 1 : llround(SCALE * (e < first ? heavy : light));
}

mz_code mz_loads_create(const mz_loads_options *options, mz_loads **loads, mz_err *err) {
    const int64_t ranks = options->ranks, experts = options->experts;
    *loads = NULL;
    mz_code code = check(options, err);
    mz_loads *l = code == MZ_OK ? mz_calloc(1, sizeof *l) : NULL;
    if (code != MZ_OK || !l)
        return code != MZ_OK ? code : mz_fail_nomem(err, "loads");
    l->o = *options;
    l->load = (mz_load){.sources = options->ranks, .experts = options->experts};
    l->load.count = MZ_NEW(&l->arena, int64_t, ranks * experts);
    l->load.total = MZ_NEW(&l->arena, int64_t, experts);
    l->load.source = MZ_NEW(&l->arena, int64_t, ranks);
    l->weight = MZ_NEW(&l->arena, int64_t, experts);
    l->scratch = MZ_NEW(&l->arena, uint64_t, experts);
    if (!l->load.count || !l->load.total || !l->load.source || !l->weight || !l->scratch) {
        mz_loads_free(&l);
        return mz_fail_nomem(err, "loads");
    }
    set_weights(l);
    *loads = l;
    return MZ_OK;
}

void mz_loads_free(mz_loads **loads) {
    mz_loads *l = *loads;
    if (!l)
        return;
    free(l->tokens);
    free(l->recorded);
    mz_arena_free(&l->arena);
    free(l);
    *loads = NULL;
}

/* ---- steps -------------------------------------------------------------------------------------
 */

static mz_code shape_step(mz_loads *l, mz_step_head *head, bool *end, mz_err *err) {
    const mz_load_source *shape = l->o.shape;
    mz_code code = shape->next_step(shape->self, head, end, err);
    if (code != MZ_OK || *end || l->o.tokens == 0)
        return code;
    const size_t rows = (size_t)head->micro_batches * (size_t)l->o.ranks;
    if (!mz_grow((void **)&l->recorded, &l->recorded_cap, rows, sizeof *l->recorded))
        return mz_fail_nomem(err, "tokens of a step");
    memcpy(l->recorded, head->tokens, rows * sizeof *l->recorded);
    return MZ_OK;
}

static mz_code next_step(void *self, mz_step_head *head, bool *end, mz_err *err) {
    mz_loads *l = self;
    mz_code code = MZ_OK;
    l->call = 0;
    *end = !l->o.shape && l->step == l->o.steps;
    if (l->o.shape)
        code = shape_step(l, head, end, err);
    else
        *head = (mz_step_head){
            .step = l->step, .micro_batches = l->o.micro_batches, .layers = l->o.layers};
    l->step++;
    if (code != MZ_OK || *end || l->o.tokens == 0)
        return code;
    const size_t rows = (size_t)head->micro_batches * (size_t)l->o.ranks;
    if (!mz_grow((void **)&l->tokens, &l->tokens_cap, rows, sizeof *l->tokens))
        return mz_fail_nomem(err, "tokens of a step");
    for (size_t i = 0; i < rows; i++)
        l->tokens[i] = l->o.tokens;
    head->tokens = l->tokens;
    head->sequence_begin = NULL;
    head->sequence_tokens = NULL;
    return MZ_OK;
}

/* ---- calls -------------------------------------------------------------------------------------
 */

static void fill_even(mz_loads *l) {
    const int32_t experts = l->o.experts;
    for (int32_t r = 0; r < l->o.ranks; r++)
        mz_largest_remainder(l->o.tokens * l->o.top_k, l->weight, experts,
                             l->load.count + (int64_t)r * experts, l->scratch);
    mz_load_sum(&l->load);
}

static int64_t scaled(int64_t pairs, int64_t from, int64_t to) {
    return llround((double)pairs * (double)to / (double)from);
}

static void fill_scaled(mz_loads *l, const mz_layer_call *call) {
    const int32_t experts = l->o.experts;
    const int64_t *tokens = l->recorded + (int64_t)call->micro_batch * l->o.ranks;
    const mz_load *load = call->load;
    int64_t all = 0;
    for (int32_t r = 0; r < l->o.ranks; r++)
        all += tokens[r];
    for (int32_t r = 0; r < l->o.ranks; r++) {
        const bool own = load->source[r] > 0 && tokens[r] > 0;
        const int64_t *weight = own ? load->count + (int64_t)r * experts : load->total;
        const int64_t pairs = own       ? scaled(load->source[r], tokens[r], l->o.tokens)
                              : all > 0 ? scaled(load->pairs, all, l->o.tokens)
                                        : 0;
        mz_largest_remainder(pairs, weight, experts, l->load.count + (int64_t)r * experts,
                             l->scratch);
    }
    mz_load_sum(&l->load);
}

static mz_code next_call(void *self, mz_layer_call *call, mz_err *err) {
    mz_loads *l = self;
    const mz_load_source *shape = l->o.shape;
    if (shape) {
        mz_code code = shape->next_call(shape->self, call, err);
        if (code != MZ_OK || l->o.tokens == 0)
            return code;
        fill_scaled(l, call);
    } else {
        if (l->step == 1 && l->call == 0)
            fill_even(l);
        call->micro_batch = (int32_t)(l->call / l->o.layers);
        call->layer = (int32_t)(l->call % l->o.layers);
    }
    call->load = &l->load;
    call->pairs = NULL;
    l->call++;
    return MZ_OK;
}

mz_load_source mz_loads_source(mz_loads *loads) {
    loads->step = 0;
    return (mz_load_source){.self = loads,
                            .ranks = loads->o.ranks,
                            .experts = loads->o.experts,
                            .layers = loads->o.layers,
                            .next_step = next_step,
                            .next_call = next_call};
}
