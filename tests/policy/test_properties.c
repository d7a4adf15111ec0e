/* Every policy of the table on random and adversarial loads and shapes: legal plans, the same plan
 * twice, nothing lost, nothing used that was not declared; quality is tested apart from legality.
 */
#include "checker.h"

/* ranks, experts, ranks per domain (0: one domain) */
static const int32_t shapes[][3] = {{1, 1, 0},  {1, 5, 0},  {2, 2, 1},    {4, 8, 2},
                                    {3, 7, 0},  {7, 3, 0},  {5, 13, 2},   {8, 64, 4},
                                    {13, 5, 4}, {16, 4, 8}, {11, 101, 0}, {8, 32, 0}};
enum { SHAPES = sizeof shapes / sizeof *shapes, STEPS = 4 };

/* The one shape that no rule may refuse: powers of two, several experts a rank, two nodes. */
static bool regular(const int32_t *shape) {
    return shape[0] == 8 && shape[1] == 64;
}

static int64_t opened, refused;

/* A rule may refuse a shape or options that it cannot have, in words, never the regular shape. */
static bool open_any(rig *r, const char *text, const int32_t *shape) {
    mz_code code = rig_try(r, text, shape[0], shape[1], shape[2]);
    opened++;
    if (code == MZ_OK)
        return true;
    refused++;
    if (code != MZ_EINPUT || (regular(shape) && !strchr(text, '[')))
        fail_msg("%s on %d ranks, %d experts: %s", text, shape[0], shape[1], r->err.msg);
    rig_close(r);
    return false;
}

static int64_t step_of(const rig *r, int k) {
    return r->traits.interval > 1
               ? (int64_t[STEPS]){0, 1, r->traits.interval, r->traits.interval + 1}[k]
               : k;
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

static void check_budget(const rig *r, const char *text, const mz_budget *budget) {
    const int64_t *rows = r->plan->has_backward ? r->plan->backward : r->plan->forward;
    if (!budget || strncmp(text, "lrmoe", 5) != 0 || strstr(text, "keep") ||
        strstr(text, "joint") || strstr(text, "quota=none") || r->plan->over_budget)
        return;
    for (int32_t g = 0; g < r->plan->ranks; g++)
        assert_true(rank_rows(r->plan, rows, g) <= budget->backward_rows);
    if (budget->backward_send_rows >= 0 && strcmp(text, "lrmoe") == 0)
        check_sent(r->plan, budget->backward_send_rows);
}

/* Two of the same, one of them given the loads that it did not declare: the same plans. */
static void one_case(const char *text, const int32_t *shape, int kind, int budgeted) {
    rig a, b;
    if (!open_any(&a, text, shape))
        return;
    rig_open(&b, text, shape[0], shape[1], shape[2]);
    mz_load *load[STEPS], *hidden = load_random(LOAD_RANDOM, shape[0], shape[1], 99);
    for (int k = 0; k < STEPS; k++)
        load[k] = load_random(k % 2 ? (kind + 1) % LOAD_KINDS : kind, shape[0], shape[1],
                              31 + (uint64_t)k);
    for (int k = 0; k < STEPS; k++) {
        const int64_t pairs = load[k]->pairs, step = step_of(&a, k);
        mz_budget budget = {.backward_rows = pairs / (shape[0] + 1) / (1 + budgeted),
                            .backward_send_rows = budgeted > 1 ? pairs / shape[0] / 2 : -1};
        const mz_load *history = k > 0 ? load[k - 1] : NULL;
        if (!call_step(&a, step, load[k], history, NULL, budgeted ? &budget : NULL))
            break;
        call_step(&b, step, load[k], history, hidden, budgeted ? &budget : NULL);
        check_plan(&a, load[k]);
        check_budget(&a, text, budgeted ? &budget : NULL);
        assert_same_plan(a.plan, b.plan);
    }
    for (int k = 0; k < STEPS; k++)
        load_free(load[k]);
    load_free(hidden);
    rig_close(&a);
    rig_close(&b);
}

static void plans_are_legal_and_repeatable(void **unused) {
    static char texts[TEXTS_MOST][TEXT_SIZE];
    int sets = 0;
    for (int p = 0; mz_policies[p]; p++) {
        const int n = add_texts(mz_policies[p], texts);
        sets += n;
        for (int t = 0; t < n; t++)
            for (int s = 0; s < SHAPES; s++)
                for (int kind = 0; kind < LOAD_KINDS; kind++)
                    one_case(texts[t], shapes[s], kind, (s + kind) % 3);
    }
    print_message("%d sets of options, %lld of %lld cases refused in words\n", sets,
                  (long long)refused, (long long)opened);
    assert_true(refused < opened / 4);
}

/* What decide sets. */
static void assert_same_decision(const mz_plan *a, const mz_plan *b) {
    const size_t n = (size_t)a->begin[a->experts];
    assert_memory_equal(a->begin, b->begin, ((size_t)a->experts + 1) * sizeof *a->begin);
    assert_memory_equal(a->rank, b->rank, n * sizeof *a->rank);
    assert_memory_equal(a->target, b->target, n * sizeof *a->target);
    assert_int_equal(a->moves, b->moves);
    for (int32_t i = 0; i < a->moves; i++)
        assert_true(a->move[i].expert == b->move[i].expert && a->move[i].src == b->move[i].src &&
                    a->move[i].dst == b->move[i].dst && a->move[i].bytes == b->move[i].bytes);
}

/* A policy that does not see current counts sees them in route, as any dispatcher does: its next
 * decisions must not depend on them. */
static void route_teaches_decide_nothing(void **unused) {
    static const int32_t shape[3] = {8, 64, 4};
    static char texts[TEXTS_MOST][TEXT_SIZE];
    int checked = 0;
    for (int p = 0; mz_policies[p]; p++) {
        const int n = add_texts(mz_policies[p], texts);
        for (int t = 0; t < n; t++) {
            rig a, b;
            if (!open_any(&a, texts[t], shape))
                continue;
            rig_open(&b, texts[t], shape[0], shape[1], shape[2]);
            for (int k = 0; k < STEPS && !(a.traits.sees & MZ_SEES_CURRENT); k++) {
                mz_load *seen = load_random(LOAD_ZIPF, shape[0], shape[1], 7 + (uint64_t)k);
                mz_load *one = load_random(LOAD_RANDOM, shape[0], shape[1], 17 + (uint64_t)k);
                mz_load *other = load_random(LOAD_ONE_EXPERT, shape[0], shape[1], (uint64_t)k);
                const mz_load *history = k > 1 ? seen : NULL; /* none yet where the lag is 2 */
                call_step(&a, step_of(&a, k), one, history, NULL, NULL);
                call_step(&b, step_of(&b, k), other, history, NULL, NULL);
                assert_same_decision(a.plan, b.plan);
                checked++;
                load_free(seen);
                load_free(one);
                load_free(other);
            }
            rig_close(&a);
            rig_close(&b);
        }
    }
    assert_true(checked > 0);
}

/* As many ranks as a large job has in one group, everything on one expert included. */
static void many_ranks(void **unused) {
    static const int32_t shape[3] = {1024, 384, 8};
    for (int p = 0; mz_policies[p]; p++) {
        rig r;
        if (!open_any(&r, mz_policies[p]->name, shape))
            continue;
        mz_load *load = load_random(p % 2 ? LOAD_ZIPF : LOAD_ONE_EXPERT, shape[0], shape[1], 1);
        call_step(&r, 0, load, load, NULL, NULL);
        check_plan(&r, load);
        rig_close(&r);
        load_free(load);
    }
}

/* ---- quality ----------------------------------------------------------------------------------*/

static int64_t peak_of_targets(const mz_plan *p) {
    int64_t peak = 0;
    for (int32_t g = 0; g < p->ranks; g++) {
        const int64_t rows = rank_rows(p, p->target, g);
        peak = rows > peak ? rows : peak;
    }
    return peak;
}

/* Shares of a source are rounded: an instance gets less than one row per source more or less than
 * was meant for it. */
static void near_targets(const mz_plan *p) {
    for (int32_t i = 0; i < p->begin[p->experts]; i++)
        assert_true(llabs(p->forward[i] - p->target[i]) < p->ranks);
}

/* ultraep accepts only plans that no rank is above the level of, starting from the busiest main:
 * never busier than fixed homes, as planned; never below the optimum for its hosts. lrmoe spreads
 * exactly. ideal is the bound. */
static void quality(void **unused) {
    for (int s = 0; s < SHAPES; s++)
        for (int kind = 0; kind < LOAD_KINDS; kind++) {
            const int32_t *shape = shapes[s];
            static const char *const texts[] = {"static", "ultraep", "lrmoe[quota=none]", "ideal"};
            rig r[4];
            mz_load *load = load_random(kind, shape[0], shape[1], 5);
            int64_t *scratch = calloc((size_t)shape[1], sizeof *scratch), rows[4];
            for (int i = 0; i < 4; i++) {
                mz_balance *b;
                mz_err err;
                rig_open(&r[i], texts[i], shape[0], shape[1], shape[2]);
                rig_call(&r[i], load, NULL, NULL, NULL);
                assert_int_equal(mz_balance_create(&r[i].arena, shape[0], shape[1],
                                                   r[i].plan->begin[shape[1]], &b, &err),
                                 MZ_OK);
                assert_int_equal(mz_bound_hosts(b, r[i].plan, load, &rows[i], &err), MZ_OK);
                assert_true(rows[i] <= r[i].plan->peak_forward);
                const int32_t slots = r[i].traits.free_replicas ? 0 : r[i].traits.slots;
                assert_true(mz_bound_any(load, shape[0], slots, scratch) <= rows[i]);
            }
            assert_int_equal(rows[0], r[0].plan->peak_forward);
            assert_true(peak_of_targets(r[1].plan) <= r[0].plan->peak_forward);
            assert_true(rows[1] <= peak_of_targets(r[1].plan));
            near_targets(r[1].plan);
            assert_int_equal(r[2].plan->peak_forward, rows[2]);
            assert_true(rows[2] <= r[0].plan->peak_forward);
            assert_int_equal(r[3].plan->peak_forward, mz_bound_any(load, shape[0], 0, NULL));
            for (int i = 0; i < 4; i++)
                rig_close(&r[i]);
            free(scratch);
            load_free(load);
        }
}

/* topoep's balancing accepts only gains: more rounds never leave a busier rank; in one domain,
 * where it makes no other copies, never busier than fixed homes. */
static void topoep_accepts_only_gains(void **unused) {
    static const char *const texts[] = {"topoep[rounds=1]", "topoep[rounds=3]", "topoep[rounds=9]",
                                        "topoep"};
    for (int s = 0; s < SHAPES; s++)
        for (int kind = 0; kind < LOAD_KINDS; kind++) {
            const int32_t *shape = shapes[s];
            mz_load *load = load_random(kind, shape[0], shape[1], 8);
            rig fixed;
            rig_open(&fixed, "static", shape[0], shape[1], shape[2]);
            rig_call(&fixed, load, NULL, NULL, NULL);
            int64_t before = shape[2] ? INT64_MAX : fixed.plan->peak_forward;
            for (int i = 0; i < 4; i++) {
                rig r;
                rig_open(&r, texts[i], shape[0], shape[1], shape[2]);
                rig_call(&r, load, NULL, NULL, NULL);
                assert_true(r.plan->peak_forward <= before);
                before = r.plan->peak_forward;
                rig_close(&r);
            }
            rig_close(&fixed);
            load_free(load);
        }
}

/* Backward totals are the exact optimum for the quotas on the plan's hosts. */
static void backward_is_spread_exactly(void **unused) {
    for (int s = 0; s < SHAPES; s++) {
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
        cmocka_unit_test(route_teaches_decide_nothing),
        cmocka_unit_test(many_ranks),
        cmocka_unit_test(quality),
        cmocka_unit_test(topoep_accepts_only_gains),
        cmocka_unit_test(backward_is_spread_exactly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
