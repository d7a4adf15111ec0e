/* lrmoe: quotas, selection and redistribution against brute force and against its own parts. */
#include "fixture.h"

#include <math.h>

/* ---- pairs
 * --------------------------------------------------------------------------------------*/

typedef struct pair_set {
    mz_pairs pairs;
    mz_load *load;
    int64_t *token_begin, *pair_begin;
    uint16_t *token_pairs, *expert;
    float *weight, *grad, *input, *hidden;
} pair_set;

/* Ragged sources; variable: 0 to 3 pairs per token instead of top-2. coarse: few distinct weights,
 * so that ties are common. */
static pair_set pairs_new(int32_t sources, int32_t experts, int32_t tokens, bool variable,
                          bool coarse, uint64_t seed) {
    pair_set p = {.load = load_new(sources, experts)};
    mz_rng rng = mz_rng_make(seed, 1);
    int64_t all = (int64_t)sources * tokens, cap = 3 * all, at = 0, token = 0;
    p.token_begin = calloc((size_t)sources + 1, sizeof(int64_t));
    p.pair_begin = calloc((size_t)sources + 1, sizeof(int64_t));
    p.token_pairs = calloc((size_t)all + 1, sizeof(uint16_t));
    p.expert = calloc((size_t)cap + 1, sizeof(uint16_t));
    p.weight = calloc((size_t)cap + 1, sizeof(float));
    p.grad = calloc((size_t)all + 1, sizeof(float));
    p.input = calloc((size_t)all + 1, sizeof(float));
    p.hidden = calloc((size_t)cap + 1, sizeof(float));
    for (int32_t s = 0; s < sources; s++) {
        int64_t n = (int64_t)mz_rng_below(&rng, (uint64_t)tokens + 1);
        for (int64_t t = 0; t < n; t++, token++) {
            p.grad[token] = (float)(1 + mz_rng_below(&rng, 9));
            p.input[token] = (float)(1 + mz_rng_below(&rng, 5));
            p.token_pairs[token] = (uint16_t)(variable ? mz_rng_below(&rng, 4) : 2);
            for (int k = 0; k < p.token_pairs[token]; k++, at++) {
                uint64_t e = mz_rng_below(&rng, (uint64_t)experts);
                e = mz_rng_below(&rng, e + 1); /* skewed */
                p.expert[at] = (uint16_t)e;
                p.weight[at] =
                    coarse ? (float)(1 + mz_rng_below(&rng, 4)) / 4 : (float)mz_rng_uniform(&rng);
                p.hidden[at] = (float)(1 + mz_rng_below(&rng, 7));
                p.load->count[(int64_t)s * experts + (int64_t)e]++;
            }
        }
        p.token_begin[s + 1] = token;
        p.pair_begin[s + 1] = at;
    }
    mz_load_sum(p.load);
    p.pairs = (mz_pairs){.sources = sources,
                         .top_k = variable ? 0 : 2,
                         .tokens = token,
                         .pairs = at,
                         .token_begin = p.token_begin,
                         .pair_begin = p.pair_begin,
                         .token_pairs = variable ? p.token_pairs : NULL,
                         .expert = p.expert,
                         .weight = p.weight};
    return p;
}

static void pairs_free(pair_set *p) {
    void *arrays[] = {p->token_begin, p->pair_begin, p->token_pairs, p->expert,
                      p->weight,      p->grad,       p->input,       p->hidden};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    load_free(p->load);
}

/* ---- selection against a full sort
 * ---------------------------------------------------------------*/

typedef struct ranked {
    float score;
    int64_t pair;
} ranked;

static int by_score(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->pair < y->pair ? -1 : 1;
}

/* Marks the `quota` best pairs of expert e among pairs [from, to). */
static void brute_select(const pair_set *p, const float *score, int64_t from, int64_t to, int32_t e,
                         int64_t quota, uint8_t *keep) {
    ranked *list = calloc((size_t)(to - from) + 1, sizeof *list);
    int64_t n = 0;
    for (int64_t i = from; i < to; i++)
        if (p->expert[i] == e)
            list[n++] = (ranked){score[i], i};
    qsort(list, (size_t)n, sizeof *list, by_score);
    for (int64_t i = 0; i < quota; i++)
        keep[list[i].pair] = 1;
    free(list);
}

static void brute_scores(const pair_set *p, mz_score_kind kind, bool norms, float *score) {
    for (int64_t t = 0, i = 0; t < p->pairs.tokens; t++)
        for (int k = 0; k < p->token_pairs[t]; k++, i++) {
            float w2 = p->weight[i] * p->weight[i];
            float g = norms ? p->grad[t] : 1, x = norms ? p->input[t] : 1;
            float h = norms ? p->hidden[i] : 1;
            float by_kind[] = {g * w2 * h, g * x * w2, w2, w2 * h, norms ? g : w2, norms ? h : w2};
            score[i] = by_kind[kind];
        }
}

static void selection_case(int trial, mz_score_kind kind, bool global, bool norms) {
    int32_t S = 1 + trial % 5, E = 1 + trial % 7;
    pair_set p = pairs_new(S, E, 90, trial % 3 == 0, trial % 2 == 0, (uint64_t)trial);
    if (norms) {
        p.pairs.grad_norm2 = p.grad;
        p.pairs.input_norm2 = p.input;
        p.pairs.hidden_norm2 = p.hidden;
    }
    mz_arena arena = {0};
    mz_err err;
    mz_select *x;
    mz_plan *plan;
    mz_policy_env env = {.ranks = S, .experts = E, .layers = 1, .seed = 3};
    assert_int_equal(mz_plan_create(S, E, E, &plan, &err), MZ_OK);
    assert_int_equal(mz_select_create(&arena, &env, kind, global, false, &x, &err), MZ_OK);
    size_t n = (size_t)p.pairs.pairs + 1;
    uint8_t *keep = calloc(n, 1), *want = calloc(n, 1);
    float *score = calloc(n, sizeof *score), *yardstick = calloc(n, sizeof *score);
    brute_scores(&p, kind, norms, score);
    brute_scores(&p, MZ_SCORE_DOWN, norms, yardstick);
    mz_rng rng = mz_rng_make((uint64_t)trial, 77);
    plan->has_backward = true;
    for (int32_t e = 0; e < E; e++)
        plan->quota[e] = 0;
    for (int32_t s = 0; s < S; s++)
        for (int32_t e = 0; e < E; e++) {
            int64_t c = p.load->count[s * E + e];
            int64_t q = mz_rng_below(&rng, 3) ? (int64_t)mz_rng_below(&rng, (uint64_t)c + 1) : c;
            plan->kept[s * E + e] = q;
            plan->quota[e] += q;
            if (!global)
                brute_select(&p, score, p.pair_begin[s], p.pair_begin[s + 1], e, q, want);
        }
    for (int32_t e = 0; e < E && global; e++)
        brute_select(&p, score, 0, p.pairs.pairs, e, plan->quota[e], want);
    mz_call call = {.load = p.load, .pairs = &p.pairs};
    assert_int_equal(mz_select_run(x, &call, plan, keep, &err), MZ_OK);
    assert_memory_equal(keep, want, n);
    double kept = 0, total = 0;
    for (size_t i = 0; i + 1 < n; i++) {
        total += yardstick[i];
        kept += want[i] ? yardstick[i] : 0;
    }
    assert_true(fabs(plan->kept_score - kept) <= 1e-5 * (total + 1));
    assert_true(fabs(plan->total_score - total) <= 1e-5 * (total + 1));
    for (int32_t s = 0; s < S; s++) {
        int64_t *row = calloc((size_t)E, sizeof *row);
        for (int64_t i = p.pair_begin[s]; i < p.pair_begin[s + 1]; i++)
            row[p.expert[i]] += want[i];
        assert_memory_equal(plan->kept + (int64_t)s * E, row, (size_t)E * sizeof *row);
        free(row);
    }
    /* without marks: the same sums by the shorter way */
    assert_int_equal(mz_select_run(x, &call, plan, NULL, &err), MZ_OK);
    assert_true(fabs(plan->kept_score - kept) <= 1e-5 * (total + 1));
    assert_string_equal(mz_select_source(x), norms ? "trace" : "gate weights");
    free(keep);
    free(want);
    free(score);
    free(yardstick);
    mz_plan_free(&plan);
    mz_arena_free(&arena);
    pairs_free(&p);
}

static void selection_equals_a_full_sort(void **unused) {
    for (int trial = 0; trial < 90; trial++)
        for (int kind = MZ_SCORE_DOWN; kind <= MZ_SCORE_H; kind++)
            selection_case(trial, (mz_score_kind)kind, trial % 4 > 1, trial % 5 > 1);
}

/* The number kept is exact for drawn selections too; equal seeds draw equally, and over many calls
 * a pair twice as large in sqrt(s) stays more often. */
static void drawn_selections(void **unused) {
    pair_set p = pairs_new(3, 4, 200, false, false, 5);
    for (int kind = MZ_SCORE_RANDOM; kind <= MZ_SCORE_SAMPLE; kind++) {
        mz_arena arena = {0};
        mz_err err;
        mz_select *x;
        mz_plan *plan;
        mz_policy_env env = {.ranks = 3, .experts = 4, .layers = 1, .seed = 3};
        assert_int_equal(mz_plan_create(3, 4, 4, &plan, &err), MZ_OK);
        assert_int_equal(mz_select_create(&arena, &env, (mz_score_kind)kind, true, false, &x, &err),
                         MZ_OK);
        plan->has_backward = true;
        size_t n = (size_t)p.pairs.pairs;
        uint8_t *keep = calloc(n, 1), *again = calloc(n, 1);
        double heavy = 0, light = 0;
        for (int call_no = 0; call_no < 40; call_no++) {
            mz_call call = {.step = call_no, .load = p.load, .pairs = &p.pairs};
            for (int32_t e = 0; e < 4; e++)
                plan->quota[e] = p.load->total[e] / 2;
            assert_int_equal(mz_select_run(x, &call, plan, keep, &err), MZ_OK);
            int64_t kept[4] = {0};
            for (size_t i = 0; i < n; i++) {
                kept[p.expert[i]] += keep[i];
                *(p.weight[i] > 0.5f ? &heavy : &light) += keep[i];
            }
            assert_memory_equal(kept, plan->quota, sizeof kept);
            assert_int_equal(mz_select_run(x, &call, plan, again, &err), MZ_OK);
            assert_memory_equal(keep, again, n);
        }
        double ratio = heavy / light;
        assert_true(kind == MZ_SCORE_RANDOM ? ratio > 0.9 && ratio < 1.15 : ratio > 1.4);
        free(keep);
        free(again);
        mz_plan_free(&plan);
        mz_arena_free(&arena);
    }
    pairs_free(&p);
}

/* Four pairs of one token with sqrt(s) = 1, 1, 1, 1/2 and one to keep: keys v/u, so the last one
 * wins with probability integral of (1 - u/c)^3 over [0, c] = c/4 = 1/8. */
static void sampling_probabilities(void **unused) {
    int64_t begin[] = {0, 1}, pair_begin[] = {0, 4};
    uint16_t expert[4] = {0};
    float weight[] = {1, 1, 1, 0.5f};
    mz_pairs pairs = {.sources = 1,
                      .top_k = 4,
                      .tokens = 1,
                      .pairs = 4,
                      .token_begin = begin,
                      .pair_begin = pair_begin,
                      .expert = expert,
                      .weight = weight};
    int64_t four[] = {4};
    mz_load *load = load_even(1, 1, four);
    mz_arena arena = {0};
    mz_err err;
    mz_select *x;
    mz_plan *plan;
    mz_policy_env env = {.ranks = 1, .experts = 1, .layers = 1, .seed = 4};
    assert_int_equal(mz_plan_create(1, 1, 1, &plan, &err), MZ_OK);
    assert_int_equal(mz_select_create(&arena, &env, MZ_SCORE_SAMPLE, false, false, &x, &err),
                     MZ_OK);
    plan->has_backward = true;
    plan->quota[0] = plan->kept[0] = 1;
    enum { CALLS = 20000 };
    int64_t wins = 0;
    for (int64_t step = 0; step < CALLS; step++) {
        uint8_t keep[4];
        mz_call call = {.step = step, .load = load, .pairs = &pairs};
        assert_int_equal(mz_select_run(x, &call, plan, keep, &err), MZ_OK);
        wins += keep[3];
    }
    assert_true(fabs((double)wins / CALLS - 0.125) < 0.01); /* 4 standard deviations */
    mz_plan_free(&plan);
    mz_arena_free(&arena);
    load_free(load);
}

/* A norm of -0 is a norm of 0: its pair goes first, and the distributions take it. */
static void negative_zero_is_zero(void **unused) {
    int64_t begin[] = {0, 3}, pair_begin[] = {0, 3}, three[] = {3};
    uint16_t expert[3] = {0};
    float weight[] = {1, 1, 1}, grad[] = {2, -0.0f, 1}, hidden[] = {1, 1, -0.0f};
    mz_pairs pairs = {.sources = 1,
                      .top_k = 1,
                      .tokens = 3,
                      .pairs = 3,
                      .token_begin = begin,
                      .pair_begin = pair_begin,
                      .expert = expert,
                      .weight = weight,
                      .grad_norm2 = grad,
                      .hidden_norm2 = hidden};
    mz_load *load = load_even(1, 1, three);
    mz_arena arena = {0};
    mz_err err;
    mz_select *x;
    mz_plan *plan;
    mz_policy_env env = {.ranks = 1, .experts = 1, .layers = 1};
    assert_int_equal(mz_plan_create(1, 1, 1, &plan, &err), MZ_OK);
    assert_int_equal(mz_select_create(&arena, &env, MZ_SCORE_DOWN, false, true, &x, &err), MZ_OK);
    plan->has_backward = true;
    plan->quota[0] = plan->kept[0] = 1;
    uint8_t keep[3];
    mz_call call = {.load = load, .pairs = &pairs};
    assert_int_equal(mz_select_run(x, &call, plan, keep, &err), MZ_OK);
    assert_memory_equal(keep, ((uint8_t[]){1, 0, 0}), sizeof keep);
    double value[MZ_SCORE_BINS];
    const uint32_t *bins = mz_select_histogram(x, 0, value);
    uint32_t all = 0;
    for (int b = 0; b < MZ_SCORE_BINS; b++)
        all += bins[b];
    assert_int_equal(bins[0], 1);
    assert_int_equal(all, 3);
    mz_plan_free(&plan);
    mz_arena_free(&arena);
    load_free(load);
}

static void pairs_must_match_counts(void **unused) {
    pair_set p = pairs_new(2, 4, 50, false, false, 12);
    mz_arena arena = {0};
    mz_err err;
    mz_select *x;
    mz_plan *plan;
    mz_policy_env env = {.ranks = 2, .experts = 4, .layers = 1};
    assert_int_equal(mz_plan_create(2, 4, 4, &plan, &err), MZ_OK);
    assert_int_equal(mz_select_create(&arena, &env, MZ_SCORE_DOWN, false, false, &x, &err), MZ_OK);
    plan->has_backward = true;
    mz_call call = {.load = p.load, .pairs = &p.pairs};
    p.expert[0] = p.expert[0] == 0 ? 1 : 0; /* the counts keep the old expert */
    assert_int_equal(mz_select_run(x, &call, plan, NULL, &err), MZ_EINTERNAL);
    p.expert[0] = 60000;
    assert_int_equal(mz_select_run(x, &call, plan, NULL, &err), MZ_EINTERNAL);
    mz_plan_free(&plan);
    mz_arena_free(&arena);
    pairs_free(&p);
}

/* ---- the plain path
 * ------------------------------------------------------------------------------*/

/* With nothing to drop, quotas change nothing; and the placement part is ultraep. */
static void plain_path(void **unused) {
    int32_t shapes[][3] = {{4, 8, 0}, {8, 8, 4}, {5, 7, 0}, {3, 1, 0}, {16, 64, 8}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = 0; kind < LOAD_KINDS; kind++) {
            mz_load *load = load_random(kind, shapes[i][0], shapes[i][1], 3 + i);
            mz_budget ample = {.backward_rows = load->pairs, .backward_send_rows = load->pairs};
            const char *texts[] = {"lrmoe[quota=none]",
                                   "lrmoe",
                                   "lrmoe[keep=1]",
                                   "lrmoe[quota=ratio]",
                                   "lrmoe[quota=value,scope=global]",
                                   "lrmoe[quota=joint]"};
            rig none, r;
            rig_open(&none, texts[0], shapes[i][0], shapes[i][1], shapes[i][2]);
            rig_call(&none, load, NULL, NULL, NULL);
            assert_false(none.plan->has_backward);
            for (int t = 1; t < 6; t++) {
                rig_open(&r, texts[t], shapes[i][0], shapes[i][1], shapes[i][2]);
                rig_call(&r, load, NULL, &ample, NULL);
                assert_same_plan(none.plan, r.plan);
                rig_close(&r);
            }
            rig_close(&none);
            /* with ultraep's quotas, lifetime and gradients all of its plan */
            rig_open(&none,
                     "lrmoe[quota=none,forward=placement,lifetime=resend_weights,gradient=fp32]",
                     shapes[i][0], shapes[i][1], shapes[i][2]);
            rig_call(&none, load, NULL, NULL, NULL);
            rig_open(&r, "ultraep", shapes[i][0], shapes[i][1], shapes[i][2]);
            rig_call(&r, load, NULL, NULL, NULL);
            memcpy(none.plan->why, r.plan->why, sizeof r.plan->why);
            assert_same_plan(none.plan, r.plan);
            assert_int_equal(none.traits.replica_memory, r.traits.replica_memory);
            assert_int_equal(none.traits.replica_gradient_bytes, r.traits.replica_gradient_bytes);
            rig_close(&none);
            rig_close(&r);
            rig_open(&none, "lrmoe[quota=none,forward=placement,replicas=group]", shapes[i][0],
                     shapes[i][1], shapes[i][2]);
            rig_call(&none, load, NULL, NULL, NULL);
            rig_open(&r, "ultraep[scope=group]", shapes[i][0], shapes[i][1], shapes[i][2]);
            rig_call(&r, load, NULL, NULL, NULL);
            assert_same_entries(none.plan, r.plan);
            rig_close(&none);
            rig_close(&r);
            load_free(load);
        }
}

/* Pairs may be there for another policy's sake: without quotas nobody asks what they are worth. */
static void no_quota_no_scores(void **unused) {
    pair_set p = pairs_new(4, 8, 60, false, false, 6);
    for (int with = 0; with < 2; with++) {
        rig r;
        rig_open(&r, "lrmoe[quota=none]", 4, 8, 0);
        rig_call(&r, p.load, NULL, NULL, with ? &p.pairs : NULL);
        assert_true(r.plan->total_score == 0 && r.plan->kept_score == 0);
        assert_string_equal(r.traits.score_source, "");
        rig_close(&r);
    }
    pairs_free(&p);
}

/* Route sums scores up where the plan depends on them, else reports ask for the sums. */
static void sums_of_scores_are_no_planning(void **unused) {
    static const struct {
        const char *policy;
        bool planned;
    } of[] = {{"lrmoe[keep=0.5]", false},
              {"lrmoe[keep=0.5,scope=global]", true},
              {"lrmoe[keep=0.5,quota=value]", true}};
    pair_set p = pairs_new(4, 8, 60, false, false, 6);
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        rig r;
        rig_open(&r, of[i].policy, 4, 8, 0);
        const mz_view view = {.current = p.load};
        const mz_call call = {.load = p.load, .pairs = &p.pairs};
        assert_int_equal(r.policy->decide(r.state, &view, r.plan, &r.err), MZ_OK);
        assert_int_equal(r.policy->route(r.state, &call, r.plan, &r.err), MZ_OK);
        assert_int_equal(r.plan->total_score > 0, of[i].planned);
        const double planned = r.plan->total_score;
        assert_int_equal(r.policy->account(r.state, &call, r.plan, &r.err), MZ_OK);
        assert_true(r.plan->kept_score > 0 && r.plan->kept_score < r.plan->total_score);
        assert_true(!of[i].planned || r.plan->total_score == planned);
        rig_close(&r);
    }
    pairs_free(&p);
}

static void full_backward_until_start(void **unused) {
    rig r;
    mz_load *load = load_random(LOAD_ZIPF, 4, 8, 2);
    rig_open(&r, "lrmoe[keep=0.5,start=3]", 4, 8, 0);
    for (int64_t step = 0; step < 5; step++) {
        mz_view view = {.step = step, .current = load};
        assert_int_equal(r.policy->decide(r.state, &view, r.plan, &r.err), MZ_OK);
        assert_int_equal(r.plan->has_backward, step >= 3);
    }
    rig_close(&r);
    load_free(load);
}

/* ---- quotas
 * -------------------------------------------------------------------------------------*/

static void waterfill_by_hand(void **unused) {
    rig r;
    int64_t total[] = {900, 100, 300, 100, 50, 50, 60, 40};
    mz_load *load = load_even(4, 8, total);
    rig_open(&r, "lrmoe[placement=static,rows=400]", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    /* rank 0: min(900, C) + 100 <= 400 */
    assert_memory_equal(r.plan->quota, ((int64_t[]){300, 100, 300, 100, 50, 50, 60, 40}),
                        8 * sizeof(int64_t));
    assert_int_equal(r.plan->peak_backward, 400);
    assert_false(r.plan->over_budget);
    rig_close(&r);
    rig_open(&r, "lrmoe[placement=static,keep=0.5]", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    /* sum of min(n, C) <= 800: 3 (C) of 900, 300 and the hundreds: C = 100 gives 600, C = 200: 800
     */
    assert_memory_equal(r.plan->quota, ((int64_t[]){200, 100, 200, 100, 50, 50, 60, 40}),
                        8 * sizeof(int64_t));
    rig_close(&r);
    rig_open(&r, "lrmoe[placement=static,keep=0.5,quota=ratio]", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_memory_equal(r.plan->quota, ((int64_t[]){450, 50, 150, 50, 25, 25, 30, 20}),
                        8 * sizeof(int64_t));
    rig_close(&r);
    /* keep and the simulator's budget: keep is instead of it */
    mz_budget tight = {.backward_rows = 10, .backward_send_rows = -1};
    rig_open(&r, "lrmoe[placement=static,keep=1]", 4, 8, 0);
    rig_call(&r, load, NULL, &tight, NULL);
    assert_false(r.plan->has_backward);
    rig_close(&r);
    load_free(load);
}

/* waterfill has one level C for all ranks: it stops where the tightest rank is full. A rank that no
 * expert fills does not count, and the least cap is not the cap of the others, though a simulator
 * states it beside them. */
static void per_rank_caps(void **unused) {
    rig r;
    int64_t total[] = {40, 6}, caps[] = {10, 4};
    mz_load *load = load_even(2, 2, total);
    mz_budget budget = {.backward_rows = 4, .backward_send_rows = -1, .rank_rows = caps};
    rig_open(&r, "lrmoe[placement=static]", 2, 2, 0);
    rig_call(&r, load, NULL, &budget, NULL);
    assert_memory_equal(r.plan->quota, ((int64_t[]){4, 4}), 2 * sizeof(int64_t));
    load_free(load);
    load = load_even(2, 2, (int64_t[]){40, 3});
    rig_call(&r, load, NULL, &budget, NULL);
    assert_memory_equal(r.plan->quota, ((int64_t[]){10, 3}), 2 * sizeof(int64_t));
    rig_close(&r);
    load_free(load);
}

/* Caps of unequal ranks hold for the spread rows as well, not only for the quotas. */
static void unequal_caps_hold(void **unused) {
    rig r;
    int64_t total[] = {4000, 100, 100, 100}, caps[] = {3000, 600, 120, 900};
    mz_load *load = load_even(4, 4, total);
    mz_budget budget = {.backward_rows = 120, .backward_send_rows = -1, .rank_rows = caps};
    rig_open(&r, "lrmoe", 4, 4, 0);
    rig_call(&r, load, NULL, &budget, NULL);
    assert_true(r.plan->has_backward);
    assert_true(r.plan->kept_pairs > 4 * 120);
    assert_false(r.plan->over_budget);
    for (int32_t g = 0; g < 4; g++)
        assert_true(rank_rows(r.plan, r.plan->backward, g) <= caps[g]);
    rig_close(&r);
    load_free(load);
}

/* Four experts must keep two rows each, two ranks hold three. With joint quotas an unused slot (2 W
 * = 24576 bytes, a row 448) is room for 54 rows, so that all 60 pairs fit; without spare slots they
 * do not. */
static void over_budget_is_said(void **unused) {
    int64_t total[] = {40, 6, 5, 9};
    mz_load *load = load_even(2, 4, total);
    static const struct {
        const char *text;
        bool over;
    } cases[] = {{"lrmoe[placement=static,rows=3,q_min=2]", true},
                 {"lrmoe[placement=static,rows=3,q_min=2,quota=ratio]", true},
                 {"lrmoe[placement=static,rows=3,q_min=2,quota=value]", true},
                 {"lrmoe[slots=2,rows=3,q_min=2,quota=joint]", true},
                 {"lrmoe[rows=3,q_min=2,quota=joint]", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig r;
        rig_open(&r, cases[i].text, 2, 4, 0);
        rig_call(&r, load, NULL, NULL, NULL);
        assert_int_equal(r.plan->over_budget, cases[i].over);
        assert_int_equal(strstr(r.plan->why, "OVER BUDGET") != NULL, cases[i].over);
        const int64_t *want = cases[i].over ? (int64_t[]){2, 2, 2, 2} : total;
        assert_memory_equal(r.plan->quota, want, 4 * sizeof(int64_t));
        rig_close(&r);
    }
    load_free(load);
}

/* Network and memory budgets turn into rows: H = 64, I = 32. */
static void budgets_in_bytes(void **unused) {
    rig r;
    int64_t total[] = {400, 400, 400, 400};
    mz_load *load = load_even(4, 4, total);
    /* a row is 4*64 + 6*32 = 448 bytes; resend adds 2*64 + 6*32 = 320 */
    rig_open(&r, "lrmoe[placement=static,memory=44800]", 4, 4, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->peak_backward, 100);
    rig_close(&r);
    rig_open(&r, "lrmoe[placement=static,memory=76800,activations=resend]", 4, 4, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->peak_backward, 100);
    assert_true(r.traits.resend);
    rig_close(&r);
    /* 12 H I = 24576 FLOPs a row: 100 rows take 2.4576 ms at 1 GFLOP/s */
    rig_open(&r, "lrmoe[placement=static,flops=1e9,time=2.4577 ms]", 4, 4, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->peak_backward, 100);
    rig_close(&r);
    /* 100 rows of 128 bytes a rank: sources send at most 100 and hosts return at most 100 */
    rig_open(&r, "lrmoe[placement=static,network=12800]", 4, 4, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->peak_backward, 100);
    for (int32_t s = 0; s < 4; s++) {
        int64_t sent = 0;
        for (int32_t e = 0; e < 4; e++)
            sent += e != s ? r.plan->kept[s * 4 + e] : 0;
        assert_true(sent <= 100);
    }
    rig_close(&r);
    load_free(load);
}

/* One source holds everything: its sends are limited, though every host could take more. */
static void send_budget_holds(void **unused) {
    rig r;
    mz_load *load = load_new(2, 2);
    load->count[0] = 1000;
    load->count[1] = 300;
    mz_load_sum(load);
    const char *texts[] = {"lrmoe", "lrmoe[quota=ratio]", "lrmoe[placement=static]",
                           "lrmoe[network=12800]"};
    for (int i = 0; i < 4; i++) {
        mz_budget budget = {.backward_rows = -1, .backward_send_rows = i < 3 ? 100 : -1};
        rig_open(&r, texts[i], 2, 2, 0);
        rig_call(&r, load, NULL, &budget, NULL);
        assert_true(r.plan->has_backward);
        assert_true(rank_rows(r.plan, r.plan->backward, 1) <= 100);
        rig_close(&r);
    }
    load_free(load);
}

/* With q_min=0 a budget that carries nothing is met by keeping nothing. */
static void nothing_fits_any_budget(void **unused) {
    rig r;
    int64_t total[] = {400, 400, 400, 400};
    mz_load *load = load_even(4, 4, total);
    rig_open(&r, "lrmoe[placement=static,q_min=0,network=128]", 4, 4, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_false(r.plan->over_budget);
    assert_int_equal(r.plan->kept_pairs, 0);
    rig_close(&r);
    load_free(load);
}

/* scope=global: all the best pairs may lie on one source, and its sends still stay in the budget.
 */
static void send_budget_holds_for_global_selection(void **unused) {
    rig r;
    pair_set p = pairs_new(4, 4, 200, false, false, 4);
    for (int64_t i = 0; i < p.pairs.pairs; i++)
        p.weight[i] = i < p.pair_begin[1] ? 0.9f : 0.1f;
    const char *texts[] = {"lrmoe[scope=global,placement=static]", "lrmoe[scope=global]",
                           "lrmoe[scope=global,quota=value]", "lrmoe[scope=global,quota=ratio]"};
    for (int t = 0; t < 4; t++) {
        mz_budget budget = {.backward_rows = -1, .backward_send_rows = 40};
        rig_open(&r, texts[t], 4, 4, 0);
        for (int call = 0; call < 2; call++) {
            rig_call(&r, p.load, NULL, &budget, &p.pairs);
            assert_true(r.plan->has_backward && !r.plan->over_budget);
            int64_t sent = 0;
            for (int32_t i = 0; i < r.plan->begin[4]; i++)
                for (int64_t j = r.plan->back_begin[i]; j < r.plan->back_begin[i + 1]; j++)
                    if (r.plan->back_source[j] == 0 && r.plan->rank[i] != 0)
                        sent += r.plan->back_pairs[j];
            assert_true(sent <= 40);
        }
        rig_close(&r);
    }
    pairs_free(&p);
}

/* ---- optimal quotas against brute force
 * ------------------------------------------------------------*/

typedef struct tiny {
    int32_t ranks, experts;
    int32_t begin[5], rank[8];
    int64_t total[4], cap[3];
} tiny;

static bool carries(const tiny *t, const int64_t *q) {
    for (uint32_t set = 1; set < 1u << t->ranks; set++) {
        int64_t room = 0, rows = 0;
        for (int32_t r = 0; r < t->ranks; r++)
            room += set >> r & 1 ? t->cap[r] : 0;
        for (int32_t e = 0; e < t->experts; e++) {
            bool inside = true;
            for (int32_t i = t->begin[e]; i < t->begin[e + 1]; i++)
                inside = inside && (set >> t->rank[i] & 1);
            rows += inside ? q[e] : 0;
        }
        if (rows > room)
            return false;
    }
    return true;
}

/* Best value over all feasible quotas; value of the first q pairs of e by its histogram. */
static double brute_value(const tiny *t, const uint32_t *histogram, const double *value,
                          int64_t limit) {
    double best = -1;
    int64_t q[4] = {0};
    for (;;) {
        int64_t sum = 0;
        double v = 0;
        for (int32_t e = 0; e < t->experts; e++) {
            int64_t left = q[e];
            sum += q[e];
            for (int b = 0; b < MZ_SCORE_BINS && left > 0; b++) {
                int64_t n = histogram[e * MZ_SCORE_BINS + b];
                n = n < left ? n : left;
                v += (double)n * value[b];
                left -= n;
            }
        }
        if (sum <= limit && v > best && carries(t, q))
            best = v;
        int32_t e = 0;
        while (e < t->experts && q[e] == t->total[e])
            q[e++] = 0;
        if (e == t->experts)
            return best;
        q[e]++;
    }
}

static tiny tiny_case(mz_rng *rng, uint32_t *histogram) {
    tiny t = {.ranks = 2 + (int32_t)mz_rng_below(rng, 2), .experts = 4};
    memset(histogram, 0, sizeof(uint32_t) * 4 * MZ_SCORE_BINS);
    for (int32_t e = 0; e < 4; e++) {
        int32_t at = t.begin[e];
        t.rank[at++] = (int32_t)mz_rng_below(rng, (uint64_t)t.ranks);
        if (mz_rng_below(rng, 2))
            t.rank[at++] = (t.rank[t.begin[e]] + 1) % t.ranks;
        t.begin[e + 1] = at;
        t.total[e] = (int64_t)mz_rng_below(rng, 6);
        for (int64_t i = 0; i < t.total[e]; i++)
            histogram[e * MZ_SCORE_BINS + (int)mz_rng_below(rng, 8)]++;
    }
    for (int32_t r = 0; r < t.ranks; r++)
        t.cap[r] = (int64_t)mz_rng_below(rng, 7);
    return t;
}

/* Shares of `kept` pairs: floors, then one each to the largest remainders, lower expert first. */
static void ratio_shares(const tiny *t, int64_t kept, int64_t *q) {
    int64_t all = 0, given = 0;
    bool done[4] = {0};
    for (int32_t e = 0; e < 4; e++)
        all += t->total[e];
    for (int32_t e = 0; e < 4; e++) {
        q[e] = all > 0 ? kept * t->total[e] / all : 0;
        given += q[e];
    }
    for (; given < kept; given++) {
        int32_t best = -1;
        for (int32_t e = 0; e < 4; e++)
            if (!done[e] && (best < 0 || kept * t->total[e] % all > kept * t->total[best] % all))
                best = e;
        done[best] = true;
        q[best]++;
    }
}

/* The quotas are the shares of their sum, legal, and those of one pair more are not. */
static void check_ratio(const tiny *t, const int64_t *q, int64_t limit) {
    int64_t sum = 0, all = 0, want[4];
    for (int32_t e = 0; e < 4; e++) {
        sum += q[e];
        all += t->total[e];
    }
    ratio_shares(t, sum, want);
    assert_memory_equal(q, want, sizeof want);
    assert_true(carries(t, q) && sum <= limit);
    if (sum == all || sum == limit)
        return;
    ratio_shares(t, sum + 1, want);
    assert_false(carries(t, want));
}

/* value: the best of all feasible quotas; waterfill and ratio: the largest feasible ones. */
static void quota_rules_are_optimal(void **unused) {
    mz_rng rng = mz_rng_make(21, 4);
    for (int trial = 0; trial < 400; trial++) {
        uint32_t histogram[4 * MZ_SCORE_BINS];
        double value[MZ_SCORE_BINS], score;
        for (int b = 0; b < MZ_SCORE_BINS; b++)
            value[b] = pow(2, -b);
        tiny t = tiny_case(&rng, histogram);
        mz_arena arena = {0};
        mz_err err;
        mz_balance *b;
        mz_quota_scratch scratch;
        mz_plan *plan;
        mz_load *load = load_even(t.ranks, 4, t.total);
        assert_int_equal(mz_plan_create(t.ranks, 4, 4, &plan, &err), MZ_OK);
        memcpy(plan->begin, t.begin, sizeof t.begin);
        memcpy(plan->rank, t.rank, sizeof t.rank);
        assert_int_equal(mz_balance_create(&arena, 3, 4, 8, &b, &err), MZ_OK);
        assert_int_equal(mz_quota_create(&arena, 3, 4, &scratch, &err), MZ_OK);
        assert_int_equal(mz_balance_hosts(b, t.ranks, 4, plan->begin, plan->rank, &err), MZ_OK);
        int64_t limit = trial % 3 ? 1000 : 5, q[4];
        mz_limits limits = {.total = limit, .cap = t.cap, .send = -1};
        assert_true(mz_quota_value(&scratch, b, plan, load, &limits, histogram, value, q, &score));
        assert_true(carries(&t, q));
        assert_true(fabs(score - brute_value(&t, histogram, value, limit)) < 1e-9);
        /* waterfill: the largest level that is carried */
        int64_t level;
        assert_true(mz_quota_waterfill(&scratch, b, plan, load, &limits, q, &level));
        int64_t more[4], sum = 0, next = 0;
        for (int32_t e = 0; e < 4; e++) {
            assert_int_equal(q[e], t.total[e] < level ? t.total[e] : level);
            more[e] = t.total[e] < level + 1 ? t.total[e] : level + 1;
            sum += q[e];
            next += more[e];
        }
        assert_true(carries(&t, q) && sum <= limit);
        assert_true(next == sum || !carries(&t, more) || next > limit);
        assert_true(mz_quota_ratio(&scratch, b, plan, load, &limits, q));
        check_ratio(&t, q, limit);
        load_free(load);
        mz_plan_free(&plan);
        mz_arena_free(&arena);
    }
}

/* The value rule uses the previous call of the layer: the expert with the better scores gets more.
 */
static void value_rule_follows_scores(void **unused) {
    rig r;
    pair_set p = pairs_new(2, 2, 400, false, false, 8);
    for (int64_t i = 0; i < p.pairs.pairs; i++)
        p.weight[i] = p.expert[i] == 1 ? 0.9f : 0.1f + 0.01f * (float)(i % 7);
    rig_open(&r, "lrmoe[placement=static,quota=value,keep=0.3]", 2, 2, 0);
    rig_call(&r, p.load, NULL, NULL, &p.pairs); /* no distribution yet: waterfill */
    int64_t before = r.plan->quota[1];
    rig_call(&r, p.load, NULL, NULL, &p.pairs);
    int64_t all = (int64_t)(0.3 * (double)p.load->pairs);
    int64_t want = p.load->total[1] < all - 1 ? p.load->total[1] : all - 1;
    assert_int_equal(r.plan->quota[1], want);
    assert_true(before < want);
    assert_true(r.plan->kept_score > 0.5 * r.plan->total_score);
    rig_close(&r);
    pairs_free(&p);
}

/* Slots against rows: with room only for rows no replica is bought, with ample room it is. */
static void joint_rule_trades(void **unused) {
    int64_t total[] = {6000, 100, 100, 100};
    mz_load *load = load_even(4, 4, total);
    for (int ample = 0; ample < 2; ample++) {
        rig r, wf;
        /* a slot costs 2 W = 24576 bytes, a row 448: 54 rows */
        const char *text = ample ? "lrmoe[quota=joint,rows=1200]" : "lrmoe[quota=joint,rows=10]";
        rig_open(&r, text, 4, 4, 0);
        rig_call(&r, load, NULL, NULL, NULL);
        rig_open(&wf, ample ? "lrmoe[rows=1200]" : "lrmoe[rows=10]", 4, 4, 0);
        rig_call(&wf, load, NULL, NULL, NULL);
        assert_true(r.plan->kept_pairs >= wf.plan->kept_pairs);
        assert_int_equal(r.plan->begin[4] > 4, ample);
        for (int32_t g = 0; g < 4; g++) {
            int64_t replicas = 0;
            for (int32_t e = 0; e < 4; e++)
                for (int32_t i = r.plan->begin[e] + 1; i < r.plan->begin[e + 1]; i++)
                    replicas += r.plan->rank[i] == g;
            assert_true(rank_rows(r.plan, r.plan->backward, g) <=
                        (ample ? 1200 : 10) + (2 - replicas) * 54);
        }
        rig_close(&r);
        rig_close(&wf);
    }
    load_free(load);
}

/* ---- traits
 * -------------------------------------------------------------------------------------*/

static void traits_follow_options(void **unused) {
    rig r;
    rig_open(&r, "lrmoe", 4, 8, 0);
    assert_string_equal(r.traits.label, "LRMoE (our reading)");
    assert_string_equal(r.traits.score_source, "");
    assert_int_equal(r.traits.slots, 4);
    assert_int_equal(r.traits.replica_memory, MZ_REPLICAS_PER_LAYER);
    assert_int_equal(r.traits.score_combine_bytes, 4); /* ||h||^2 returns with combine */
    assert_int_equal(r.traits.score_home_bytes, 0);
    assert_true(r.traits.lossy && r.traits.needs_weights && !r.traits.resend);
    pair_set p = pairs_new(4, 8, 50, false, false, 2);
    rig_call(&r, p.load, NULL, NULL, &p.pairs);
    assert_string_equal(r.traits.score_source, "gate weights");
    pairs_free(&p);
    rig_close(&r);
    rig_open(&r, "lrmoe[score=w,scope=global,router_gradient=kept,placement=symi]", 4, 8, 0);
    assert_int_equal(r.traits.score_combine_bytes, 0);
    assert_int_equal(r.traits.score_home_bytes, 4);
    assert_true(r.traits.router_gradient_kept && r.traits.sharded_optimizer);
    assert_int_equal(r.traits.sees, MZ_SEES_CURRENT | MZ_SEES_HISTORY);
    assert_int_equal(r.traits.lag, 1);
    rig_close(&r);
    rig_open(&r, "lrmoe[placement=static]", 4, 8, 0);
    assert_int_equal(r.traits.slots, 2);
    assert_int_equal(r.traits.replica_memory, MZ_REPLICAS_NONE);
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(selection_equals_a_full_sort),
        cmocka_unit_test(drawn_selections),
        cmocka_unit_test(sampling_probabilities),
        cmocka_unit_test(negative_zero_is_zero),
        cmocka_unit_test(pairs_must_match_counts),
        cmocka_unit_test(plain_path),
        cmocka_unit_test(no_quota_no_scores),
        cmocka_unit_test(sums_of_scores_are_no_planning),
        cmocka_unit_test(full_backward_until_start),
        cmocka_unit_test(waterfill_by_hand),
        cmocka_unit_test(per_rank_caps),
        cmocka_unit_test(unequal_caps_hold),
        cmocka_unit_test(over_budget_is_said),
        cmocka_unit_test(budgets_in_bytes),
        cmocka_unit_test(send_budget_holds),
        cmocka_unit_test(nothing_fits_any_budget),
        cmocka_unit_test(send_budget_holds_for_global_selection),
        cmocka_unit_test(quota_rules_are_optimal),
        cmocka_unit_test(value_rule_follows_scores),
        cmocka_unit_test(joint_rule_trades),
        cmocka_unit_test(traits_follow_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
