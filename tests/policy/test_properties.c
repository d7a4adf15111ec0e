/* Every policy on random and adversarial loads and shapes: legal plans, the same plan twice,
 * nothing lost; quality is tested apart from legality. */
#include "fixture.h"

static const char *const texts[] = {
    "static",
    "capacity",
    "capacity[cf=0.7,min_cap=0]",
    "capacity[drop=none]",
    "symi",
    "symi[drop=no]",
    "symi[slots=101]",
    "ultraep",
    "ultraep[eps=0,zero_main=yes,locality=no,scope=group,relay=no]",
    "ultraep[slots=101,u_min=1]",
    "lrmoe",
    "lrmoe[keep=0.5]",
    "lrmoe[keep=0.25,quota=ratio,scope=global]",
    "lrmoe[keep=0.5,quota=value]",
    "lrmoe[quota=joint]",
    "lrmoe[placement=symi,keep=0.5]",
    "lrmoe[placement=static,keep=0.1,q_min=0]",
    "lrmoe[forward=placement,keep=0.5,activations=resend]",
    "fastermoe",
    "fastermoe[rule=fastmoe,schedule=none]",
    "fastermoe[rule=prototype]",
    "fastermoe[rule=port,slots=101]",
    "ideal",
};

/* ranks, experts, ranks per domain (0: one domain) */
static const int32_t shapes[][3] = {{1, 1, 0},  {1, 5, 0},  {2, 2, 1},   {4, 8, 2},
                                    {3, 7, 0},  {7, 3, 0},  {5, 13, 2},  {8, 64, 4},
                                    {13, 5, 4}, {16, 4, 8}, {11, 101, 0}};

static void check_conservation(const rig *r, const mz_load *load) {
    const mz_plan *p = r->plan;
    int64_t computed = 0, backward = 0;
    for (int32_t i = 0; i < p->begin[p->experts]; i++) {
        computed += p->forward[i];
        backward += p->has_backward ? p->backward[i] : p->forward[i];
    }
    assert_int_equal(computed + p->dropped_pairs, load->pairs);
    assert_int_equal(backward, p->kept_pairs);
    assert_true(p->kept_pairs + p->dropped_pairs <= load->pairs);
    if (!r->traits.lossy) {
        assert_int_equal(p->kept_pairs, load->pairs);
        assert_int_equal(p->dropped_pairs, 0);
    }
    for (int32_t e = 0; e < p->experts; e++)
        assert_in_range(p->quota[e], 0, load->total[e]);
    if (p->total_score == 0)
        assert_true(p->kept_score == 0);
}

/* Kept rows that leave their source. */
static void check_sent(const mz_plan *p, int64_t most) {
    int64_t *sent = calloc((size_t)p->ranks, sizeof *sent);
    const int64_t *begin = p->has_backward ? p->back_begin : p->entry_begin;
    const int32_t *source = p->has_backward ? p->back_source : p->entry_source;
    const int64_t *pairs = p->has_backward ? p->back_pairs : p->entry_pairs;
    for (int32_t i = 0; i < p->begin[p->experts]; i++)
        for (int64_t j = begin[i]; j < begin[i + 1]; j++)
            sent[source[j]] += source[j] != p->rank[i] ? pairs[j] : 0;
    for (int32_t s = 0; s < p->ranks; s++)
        assert_true(sent[s] <= most);
    free(sent);
}

static void one_case(const char *text, const int32_t *shape, int kind, int budgeted) {
    rig a, b;
    mz_load *load = load_random(kind, shape[0], shape[1], 31);
    mz_load *history = load_random((kind + 1) % LOAD_KINDS, shape[0], shape[1], 32);
    mz_budget budget = {.backward_rows = load->pairs / (shape[0] + 1) / (1 + budgeted),
                        .backward_send_rows = budgeted > 1 ? load->pairs / shape[0] / 2 : -1};
    rig_open(&a, text, shape[0], shape[1], shape[2]);
    rig_open(&b, text, shape[0], shape[1], shape[2]);
    for (int call = 0; call < 2; call++) {
        const mz_load *seen = call > 0 ? history : NULL;
        rig_call(&a, load, seen, budgeted ? &budget : NULL, NULL);
        check_conservation(&a, load);
    }
    for (int call = 0; call < 2; call++)
        rig_call(&b, load, call > 0 ? history : NULL, budgeted ? &budget : NULL, NULL);
    assert_same_plan(a.plan, b.plan);
    const int64_t *rows = a.plan->has_backward ? a.plan->backward : a.plan->forward;
    if (budgeted && a.traits.lossy && strncmp(text, "lrmoe", 5) == 0 && !strstr(text, "keep") &&
        !strstr(text, "joint") && !a.plan->over_budget)
        for (int32_t r = 0; r < shape[0]; r++)
            assert_true(rank_rows(a.plan, rows, r) <= budget.backward_rows);
    if (budgeted > 1 && strcmp(text, "lrmoe") == 0 && !a.plan->over_budget)
        check_sent(a.plan, budget.backward_send_rows);
    rig_close(&a);
    rig_close(&b);
    load_free(load);
    load_free(history);
}

static void plans_are_legal_and_repeatable(void **unused) {
    for (size_t t = 0; t < sizeof texts / sizeof *texts; t++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int kind = 0; kind < LOAD_KINDS; kind++)
                one_case(texts[t], shapes[s], kind, (int)(s + (size_t)kind) % 3);
}

static void many_ranks(void **unused) {
    const int32_t shape[3] = {1024, 384, 8};
    const char *some[] = {"static", "symi", "ultraep", "lrmoe[keep=0.5]", "fastermoe", "ideal"};
    for (size_t t = 0; t < sizeof some / sizeof *some; t++) {
        rig r;
        mz_load *load = load_random(t % 2 ? LOAD_ZIPF : LOAD_ONE_EXPERT, shape[0], shape[1], 1);
        rig_open(&r, some[t], shape[0], shape[1], shape[2]);
        rig_call(&r, load, load, NULL, NULL);
        check_conservation(&r, load);
        rig_close(&r);
        load_free(load);
    }
}

/* Quality: replicas never make the busiest rank busier than fixed homes, the plan's own bound is
 * respected, and exact spreading reaches it. */
static void quality(void **unused) {
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int kind = 0; kind < LOAD_KINDS; kind++) {
            const int32_t *shape = shapes[s];
            rig fixed, ultra, exact, ideal;
            mz_load *load = load_random(kind, shape[0], shape[1], 5);
            mz_err err;
            mz_balance *b;
            int64_t rows;
            rig_open(&fixed, "static", shape[0], shape[1], shape[2]);
            rig_open(&ultra, "ultraep", shape[0], shape[1], shape[2]);
            rig_open(&exact, "lrmoe[quota=none]", shape[0], shape[1], shape[2]);
            rig_open(&ideal, "ideal", shape[0], shape[1], shape[2]);
            rig *all[] = {&fixed, &ultra, &exact, &ideal};
            for (int i = 0; i < 4; i++)
                rig_call(all[i], load, NULL, NULL, NULL);
            int32_t instances = exact.plan->begin[shape[1]];
            assert_int_equal(
                mz_balance_create(&exact.arena, shape[0], shape[1], instances, &b, &err), MZ_OK);
            assert_int_equal(mz_bound_hosts(b, exact.plan, load, &rows, &err), MZ_OK);
            /* Shares are rounded per source: a few rows off the quotas of the plan. */
            assert_true(ultra.plan->peak_forward <= fixed.plan->peak_forward + 2 * shape[0]);
            assert_true(rows <= ultra.plan->peak_forward + 2 * shape[0]);
            assert_int_equal(exact.plan->peak_forward, rows);
            assert_int_equal(ideal.plan->peak_forward, mz_bound_any(load, shape[0], 0, NULL));
            assert_true(rows >= mz_bound_any(load, shape[0], 0, NULL));
            for (int i = 0; i < 4; i++)
                rig_close(all[i]);
            load_free(load);
        }
}

/* Backward totals are the exact optimum for the quotas on the plan's hosts. */
static void backward_is_spread_exactly(void **unused) {
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const int32_t *shape = shapes[s];
        rig r;
        mz_load *load = load_random(LOAD_ZIPF, shape[0], shape[1], 6);
        mz_err err;
        mz_balance *b;
        int64_t rows;
        rig_open(&r, "lrmoe[keep=0.4]", shape[0], shape[1], shape[2]);
        rig_call(&r, load, NULL, NULL, NULL);
        assert_true(r.plan->has_backward || load->pairs == 0);
        assert_int_equal(
            mz_balance_create(&r.arena, shape[0], shape[1], r.plan->begin[shape[1]], &b, &err),
            MZ_OK);
        mz_load quotas = {.sources = shape[0], .experts = shape[1], .total = r.plan->quota};
        assert_int_equal(mz_bound_hosts(b, r.plan, &quotas, &rows, &err), MZ_OK);
        assert_int_equal(r.plan->peak_backward, rows);
        rig_close(&r);
        load_free(load);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_are_legal_and_repeatable),
        cmocka_unit_test(many_ranks),
        cmocka_unit_test(quality),
        cmocka_unit_test(backward_is_spread_exactly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
