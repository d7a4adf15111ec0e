/* A plan that is kept: its copy is the plan, and stays what it is when the plan is made anew. */
#include "fixture.h"

enum { RANKS = 8, EXPERTS = 16 };

static const char *const policies[] = {"static",          "symi", "ultraep", "capacity[cf=1]",
                                       "lrmoe[keep=0.3]", "llep", "laer"};
enum { POLICIES = sizeof policies / sizeof policies[0] };

/* Every array, so far as the plan uses it, and every figure. */
static void assert_same(const mz_plan *a, const mz_plan *b) {
    const size_t n = (size_t)a->begin[EXPERTS], cells = RANKS * EXPERTS * sizeof(int64_t);
    assert_same_entries(a, b);
    assert_memory_equal(a->target, b->target, n * sizeof *a->target);
    assert_memory_equal(a->quota, b->quota, EXPERTS * sizeof *a->quota);
    assert_int_equal(a->has_backward, b->has_backward);
    assert_int_equal(a->has_drops, b->has_drops);
    if (a->has_backward) {
        const size_t m = (size_t)a->back_begin[n];
        assert_memory_equal(a->backward, b->backward, n * sizeof *a->backward);
        assert_memory_equal(a->back_begin, b->back_begin, (n + 1) * sizeof *a->back_begin);
        assert_memory_equal(a->back_source, b->back_source, m * sizeof *a->back_source);
        assert_memory_equal(a->back_pairs, b->back_pairs, m * sizeof *a->back_pairs);
        assert_memory_equal(a->kept, b->kept, cells);
    }
    if (a->has_drops)
        assert_memory_equal(a->dropped, b->dropped, cells);
    assert_int_equal(a->moves, b->moves);
    assert_memory_equal(a->move, b->move, (size_t)a->moves * sizeof *a->move);
    assert_int_equal(a->pairs, b->pairs);
    assert_int_equal(a->kept_pairs, b->kept_pairs);
    assert_int_equal(a->dropped_pairs, b->dropped_pairs);
    assert_int_equal(a->peak_backward, b->peak_backward);
    assert_string_equal(a->why, b->why);
}

static void test_a_copy_is_the_plan(void **state) {
    for (int k = 0; k < POLICIES; k++) {
        rig r, other;
        rig_open(&r, policies[k], RANKS, EXPERTS, 4);
        rig_open(&other, policies[k], RANKS, EXPERTS, 4);
        mz_load *first = load_random(LOAD_ZIPF, RANKS, EXPERTS, 1);
        mz_load *second = load_random(LOAD_RANDOM, RANKS, EXPERTS, 2);
        mz_plan *copy = NULL, *again = NULL;
        assert_int_equal(mz_plan_create(RANKS, EXPERTS, r.traits.slots, &copy, &r.err), MZ_OK);
        assert_int_equal(mz_plan_create(RANKS, EXPERTS, r.traits.slots, &again, &r.err), MZ_OK);
        /* The copy holds another plan before. */
        rig_call(&r, second, second, NULL, NULL);
        assert_int_equal(mz_plan_copy(r.plan, copy, &r.err), MZ_OK);
        rig_call(&other, second, second, NULL, NULL);
        rig_call(&r, first, first, NULL, NULL);
        rig_call(&other, first, first, NULL, NULL);
        assert_int_equal(mz_plan_copy(r.plan, copy, &r.err), MZ_OK);
        assert_same(r.plan, copy);
        assert_int_equal(mz_plan_check(copy, first, &r.traits, &r.err), MZ_OK);
        assert_int_equal(mz_plan_copy(copy, again, &r.err), MZ_OK);
        /* The next plan leaves the copy alone. */
        rig_call(&r, second, second, NULL, NULL);
        assert_same(other.plan, copy);
        assert_same(other.plan, again);
        mz_plan_free(&copy);
        mz_plan_free(&again);
        load_free(first);
        load_free(second);
        rig_close(&r);
        rig_close(&other);
    }
}

static void test_plans_of_another_size(void **state) {
    mz_plan *a = NULL, *b = NULL;
    mz_err err;
    assert_int_equal(mz_plan_create(RANKS, EXPERTS, 4, &a, &err), MZ_OK);
    assert_int_equal(mz_plan_create(RANKS, EXPERTS + 1, 4, &b, &err), MZ_OK);
    assert_int_equal(mz_plan_copy(a, b, &err), MZ_EINTERNAL);
    mz_plan_free(&a);
    mz_plan_free(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_copy_is_the_plan),
        cmocka_unit_test(test_plans_of_another_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
