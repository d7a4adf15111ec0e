/* Loads, environments and runs of policies for the tests of this room. */
#ifndef MIZAN_TESTS_POLICY_FIXTURE_H
#define MIZAN_TESTS_POLICY_FIXTURE_H

#include "common/base/rng.h"
#include "sim/policy/lrmoe.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static inline mz_load *load_new(int32_t sources, int32_t experts) {
    mz_load *load = calloc(1, sizeof *load);
    load->sources = sources;
    load->experts = experts;
    load->count = calloc((size_t)sources * (size_t)experts, sizeof(int64_t));
    load->total = calloc((size_t)experts, sizeof(int64_t));
    load->source = calloc((size_t)sources, sizeof(int64_t));
    return load;
}

static inline void load_free(mz_load *load) {
    free(load->count);
    free(load->total);
    free(load->source);
    free(load);
}

/* total[e] pairs of each expert, dealt evenly over the sources. */
static inline mz_load *load_even(int32_t sources, int32_t experts, const int64_t *total) {
    mz_load *load = load_new(sources, experts);
    for (int32_t e = 0; e < experts; e++)
        for (int32_t s = 0; s < sources; s++)
            load->count[(int64_t)s * experts + e] = total[e] / sources + (s < total[e] % sources);
    mz_load_sum(load);
    return load;
}

enum load_kind {
    LOAD_RANDOM,
    LOAD_ONE_EXPERT,
    LOAD_ONE_SOURCE,
    LOAD_SPARSE,
    LOAD_ZIPF,
    LOAD_NOTHING,
    LOAD_KINDS
};

static inline mz_load *load_random(int kind, int32_t sources, int32_t experts, uint64_t seed) {
    mz_load *load = load_new(sources, experts);
    mz_rng rng = mz_rng_make(seed, (uint64_t)kind);
    int32_t hot = (int32_t)mz_rng_below(&rng, (uint64_t)experts);
    int32_t speaker = (int32_t)mz_rng_below(&rng, (uint64_t)sources);
    for (int32_t s = 0; s < sources; s++)
        for (int32_t e = 0; e < experts; e++) {
            int64_t c = (int64_t)mz_rng_below(&rng, 400);
            if (kind == LOAD_NOTHING || (kind == LOAD_ONE_EXPERT && e != hot) ||
                (kind == LOAD_ONE_SOURCE && s != speaker) || (kind == LOAD_SPARSE && c % 8 != 0))
                c = 0;
            if (kind == LOAD_ZIPF)
                c = c * 40 / (1 + (e + hot) % experts);
            load->count[(int64_t)s * experts + e] = c;
        }
    mz_load_sum(load);
    return load;
}

/* One policy at work. */
typedef struct rig {
    mz_arena arena;
    mz_policy_env env;
    int32_t *domain;
    const mz_policy *policy;
    void *options, *state;
    mz_policy_traits traits;
    mz_plan *plan;
    int64_t step; /* of the next calls, as layer and micro_batch */
    int32_t layer, micro_batch;
    mz_err err;
} rig;

/* A small group; tests change the environment before rig_start. domain_size 0: one domain. */
static inline void rig_prepare(rig *r, int32_t ranks, int32_t experts, int32_t domain_size) {
    *r = (rig){0};
    r->domain = calloc((size_t)ranks, sizeof(int32_t));
    for (int32_t i = 0; i < ranks && domain_size > 0; i++)
        r->domain[i] = i / domain_size;
    r->env = (mz_policy_env){.ranks = ranks,
                             .experts = experts,
                             .top_k = 2,
                             .layers = 2,
                             .domain = r->domain,
                             .domains = domain_size > 0 ? (ranks - 1) / domain_size + 1 : 1,
                             .hidden = 64,
                             .intermediate = 32,
                             .expert_parameters = 3 * 64 * 32,
                             .weight_bytes = 6 * 64 * 32,
                             .token_bytes = 128,
                             .seed = 7,
                             .expert_groups = 1,
                             .expert_state_bytes = 12 * 3 * 64 * 32,
                             .pair_seconds = 1e-8,
                             .inside_bytes_s = 2e11,
                             .outside_bytes_s = domain_size > 0 ? 5e10 : 2e11};
}

static inline mz_code rig_start(rig *r, const char *text) {
    mz_code code = mz_policy_parse(text, &r->arena, &r->policy, &r->options, &r->err);
    if (code == MZ_OK)
        code = r->policy->init(&r->env, r->options, &r->arena, &r->state, &r->traits, &r->err);
    if (code == MZ_OK)
        code = mz_plan_create(r->env.ranks, r->env.experts, r->traits.slots, &r->plan, &r->err);
    return code;
}

static inline mz_code rig_try(rig *r, const char *text, int32_t ranks, int32_t experts,
                              int32_t domain_size) {
    rig_prepare(r, ranks, experts, domain_size);
    return rig_start(r, text);
}

static inline void rig_open(rig *r, const char *text, int32_t ranks, int32_t experts,
                            int32_t domain_size) {
    mz_code code = rig_try(r, text, ranks, experts, domain_size);
    if (code != MZ_OK)
        fail_msg("%s: %s", text, r->err.msg);
}

static inline void rig_close(rig *r) {
    if (r->state && r->policy->release)
        r->policy->release(r->state);
    mz_plan_free(&r->plan);
    mz_arena_free(&r->arena);
    free(r->domain);
}

/* One call: decide with what the policy may see, route, check. */
static inline void rig_call(rig *r, const mz_load *load, const mz_load *history,
                            const mz_budget *budget, const mz_pairs *pairs) {
    mz_view view = {.step = r->step,
                    .micro_batch = r->micro_batch,
                    .layer = r->layer,
                    .current = r->traits.sees & MZ_SEES_CURRENT ? load : NULL,
                    .history = r->traits.sees & MZ_SEES_HISTORY ? history : NULL,
                    .budget = budget};
    mz_call call = {.step = r->step,
                    .micro_batch = r->micro_batch,
                    .layer = r->layer,
                    .load = load,
                    .pairs = pairs};
    mz_code code = r->policy->decide(r->state, &view, r->plan, &r->err);
    if (code == MZ_OK)
        code = r->policy->route(r->state, &call, r->plan, &r->err);
    if (code == MZ_OK)
        code = mz_plan_check(r->plan, load, &r->traits, &r->err);
    if (code == MZ_OK && r->policy->account)
        code = r->policy->account(r->state, &call, r->plan, &r->err);
    if (code != MZ_OK)
        fail_msg("%s: %s", r->policy->name, r->err.msg);
}

static inline int64_t rank_rows(const mz_plan *plan, const int64_t *total, int32_t rank) {
    int64_t sum = 0;
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
        sum += plan->rank[i] == rank ? total[i] : 0;
    return sum;
}

/* Entries that stay on their source rank. */
static inline int64_t local_pairs(const mz_plan *plan) {
    int64_t sum = 0;
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
        for (int64_t j = plan->entry_begin[i]; j < plan->entry_begin[i + 1]; j++)
            sum += plan->entry_source[j] == plan->rank[i] ? plan->entry_pairs[j] : 0;
    return sum;
}

static inline void assert_same_entries(const mz_plan *a, const mz_plan *b) {
    size_t n = (size_t)a->begin[a->experts];
    assert_int_equal(a->begin[a->experts], b->begin[b->experts]);
    assert_memory_equal(a->begin, b->begin, ((size_t)a->experts + 1) * sizeof *a->begin);
    assert_memory_equal(a->rank, b->rank, n * sizeof *a->rank);
    assert_memory_equal(a->forward, b->forward, n * sizeof *a->forward);
    assert_memory_equal(a->entry_begin, b->entry_begin, (n + 1) * sizeof *a->entry_begin);
    size_t m = (size_t)a->entry_begin[n];
    assert_memory_equal(a->entry_source, b->entry_source, m * sizeof *a->entry_source);
    assert_memory_equal(a->entry_pairs, b->entry_pairs, m * sizeof *a->entry_pairs);
    assert_int_equal(a->has_backward, b->has_backward);
    if (a->has_backward) {
        assert_memory_equal(a->backward, b->backward, n * sizeof *a->backward);
        assert_memory_equal(a->back_begin, b->back_begin, (n + 1) * sizeof *a->back_begin);
        size_t k = (size_t)a->back_begin[n];
        assert_memory_equal(a->back_source, b->back_source, k * sizeof *a->back_source);
        assert_memory_equal(a->back_pairs, b->back_pairs, k * sizeof *a->back_pairs);
    }
}

static inline void assert_same_plan(const mz_plan *a, const mz_plan *b) {
    assert_same_entries(a, b);
    assert_memory_equal(a->quota, b->quota, (size_t)a->experts * sizeof *a->quota);
    assert_int_equal(a->moves, b->moves);
    for (int32_t i = 0; i < a->moves; i++) {
        const mz_move *x = &a->move[i], *y = &b->move[i];
        assert_true(x->kind == y->kind && x->phase == y->phase && x->hide == y->hide &&
                    x->expert == y->expert && x->src == y->src && x->dst == y->dst &&
                    x->bytes == y->bytes && x->round == y->round);
    }
    assert_int_equal(a->kept_pairs, b->kept_pairs);
    assert_int_equal(a->dropped_pairs, b->dropped_pairs);
    assert_int_equal(a->peak_forward, b->peak_forward);
    assert_int_equal(a->peak_backward, b->peak_backward);
    assert_true(a->kept_score == b->kept_score && a->total_score == b->total_score);
    assert_string_equal(a->why, b->why);
}

#endif
