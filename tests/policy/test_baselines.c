/* static, capacity, symi and ideal: vectors of balancing-systems.md and cases by hand. */
#include "fixture.h"

#include <math.h>

/* ---- static
 * ------------------------------------------------------------------------------------*/

static void static_rows(void **unused) {
    rig r;
    int64_t total[] = {900, 100, 300, 100, 50, 50, 60, 40};
    mz_load *load = load_even(4, 8, total);
    rig_open(&r, "static", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    int64_t want[] = {1000, 400, 100, 100};
    for (int32_t g = 0; g < 4; g++)
        assert_int_equal(rank_rows(r.plan, r.plan->forward, g), want[g]);
    assert_int_equal(r.plan->moves, 0);
    assert_int_equal(r.plan->kept_pairs, 1600);
    assert_int_equal(r.plan->peak_forward, 1000);
    assert_int_equal(r.traits.slots, 2);
    rig_close(&r);
    load_free(load);
}

/* ---- capacity
 * ----------------------------------------------------------------------------------*/

static mz_load *four_by_two(void) {
    mz_load *load = load_new(2, 4);
    /* source 0: 20 pairs, an even share is 5; source 1: 9 pairs, 2.25 */
    int64_t count[] = {11, 5, 4, 0, 6, 1, 1, 1};
    memcpy(load->count, count, sizeof count);
    mz_load_sum(load);
    return load;
}

static void expect_drops(const char *text, const int64_t *dropped, int64_t pairs) {
    rig r;
    mz_load *load = four_by_two();
    rig_open(&r, text, 2, 4, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_true(r.plan->has_drops);
    assert_memory_equal(r.plan->dropped, dropped, 8 * sizeof *dropped);
    assert_int_equal(r.plan->dropped_pairs, pairs);
    assert_int_equal(r.plan->kept_pairs, 29 - pairs);
    assert_true(r.traits.lossy && r.traits.capacity_padded);
    rig_close(&r);
    load_free(load);
}

static void capacity_by_hand(void **unused) {
    /* cf 1: C = 5 and max(3, 4) = 4 */
    expect_drops("capacity", (int64_t[]){6, 0, 0, 0, 2, 0, 0, 0}, 8);
    /* cf 1.5, no minimum: 7.5 -> 8 and 3.375 -> 4 */
    expect_drops("capacity[cf=1.5,min_cap=0]", (int64_t[]){3, 0, 0, 0, 2, 0, 0, 0}, 5);
    expect_drops("capacity[cf=0.5,min_cap=1,drop=position]", (int64_t[]){8, 2, 1, 0, 4, 0, 0, 0},
                 15); /* C = 3 and 2 */
    rig r;
    mz_load *load = four_by_two();
    rig_open(&r, "capacity[drop=none]", 2, 4, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_false(r.plan->has_drops || r.traits.lossy);
    assert_int_equal(mz_capacity_rows(&r.traits, load, 0), 11);
    assert_int_equal(mz_capacity_rows(&r.traits, load, 1), 11);
    rig_close(&r);
    rig_open(&r, "capacity[cf=1.1]", 2, 4, 0);
    int64_t even[] = {100, 100, 100, 100};
    load_free(load);
    load = load_even(2, 4, even); /* 1.1 times 50 is 55, whatever binary fractions say */
    assert_int_equal(mz_capacity_rows(&r.traits, load, 0), 55);
    rig_close(&r);
    load_free(load);
}

/* A load that is exactly even loses nothing, however large it is. */
static void large_even_loads_lose_nothing(void **unused) {
    const char *texts[] = {"capacity", "symi", "capacity[cf=1.1]", "symi[cf=1.1]"};
    int64_t total[8];
    for (int32_t e = 0; e < 8; e++)
        total[e] = (int64_t)1 << 40;
    mz_load *load = load_even(4, 8, total);
    for (int i = 0; i < 4; i++) {
        rig r;
        rig_open(&r, texts[i], 4, 8, 0);
        rig_call(&r, load, load, NULL, NULL);
        assert_int_equal(r.plan->dropped_pairs, 0);
        rig_close(&r);
    }
    load_free(load);
}

/* ---- symi
 * --------------------------------------------------------------------------------------*/

static void expect_counts(const int64_t *popularity, int32_t experts, int32_t slots,
                          const int32_t *want) {
    int32_t count[16];
    int64_t diff[16];
    mz_symi_counts(popularity, experts, slots, count, diff);
    assert_memory_equal(count, want, (size_t)experts * sizeof *want);
}

static void symi_count_vectors(void **unused) {
    expect_counts((int64_t[]){100, 50, 25, 25}, 4, 8, (int32_t[]){4, 2, 1, 1});
    expect_counts((int64_t[]){7, 7, 7, 7}, 4, 6, (int32_t[]){2, 2, 1, 1});
    expect_counts((int64_t[]){0, 0, 0, 40}, 4, 8, (int32_t[]){1, 1, 1, 5});
    expect_counts((int64_t[]){1000, 10, 10, 10, 10, 10, 10, 10}, 8, 16,
                  (int32_t[]){9, 1, 1, 1, 1, 1, 1, 1});
    expect_counts((int64_t[]){900, 100, 300, 100, 50, 50, 60, 40}, 8, 12,
                  (int32_t[]){5, 1, 1, 1, 1, 1, 1, 1});
    expect_counts((int64_t[]){0, 0, 0, 0}, 4, 6, (int32_t[]){2, 2, 1, 1});
}

/* Algorithm 1 to the letter, diff in units of 1 / sum. */
static void literal_counts(const int64_t *pop, int32_t experts, int32_t slots, int32_t *count) {
    int64_t sum = 0, diff[16];
    int32_t given = 0;
    for (int32_t e = 0; e < experts; e++)
        sum += pop[e];
    for (int32_t e = 0; e < experts; e++) {
        int64_t goal = pop[e] * slots;
        count[e] = (int32_t)((goal > sum ? goal : sum) / sum);
        diff[e] = count[e] * sum - goal;
        given += count[e];
    }
    for (int32_t i; given > slots; diff[i] -= sum) {
        i = 0;
        for (int32_t e = 1; e < experts; e++)
            i = diff[e] > diff[i] ? e : i;
        given -= count[i] > 1;
        count[i] -= count[i] > 1;
    }
    for (int32_t i; given < slots; diff[i] += sum, count[i]++, given++) {
        i = 0;
        for (int32_t e = 1; e < experts; e++)
            i = diff[e] < diff[i] ? e : i;
    }
}

static void symi_counts_equal_the_algorithm(void **unused) {
    mz_rng rng = mz_rng_make(2, 5);
    for (int trial = 0; trial < 4000; trial++) {
        int32_t experts = 1 + (int32_t)mz_rng_below(&rng, 16), want[16];
        int32_t slots = experts + (int32_t)mz_rng_below(&rng, trial % 2 ? 4 : 40);
        int64_t pop[16];
        for (int32_t e = 0; e < experts; e++) {
            uint64_t c = mz_rng_below(&rng, trial % 3 ? 1000 : 6);
            pop[e] = (int64_t)(trial % 5 ? c : c * c * c * c); /* few hot ones, many ties */
        }
        pop[experts - 1]++;
        literal_counts(pop, experts, slots, want);
        expect_counts(pop, experts, slots, want);
    }
}

static void symi_traffic_example(void **unused) {
    /* GPT3-175B-like: 3.375 GB of gradients and of weights per expert, E 64, N 2048, s 2,
     * PCIe 64 GB/s, 400 Gb/s: 0.269 s static, 0.273 s SYMI, +1.52 %; +1.54 % without PCIe. */
    mz_symi_traffic t = mz_symi_phase_bytes(64, 2048, 2, 3.375e9);
    double pci = t.host / 64e9, fixed = pci + t.network_static / 50e9;
    double symi = pci + t.network_symi / 50e9;
    assert_true(fabs(2 * fixed - 0.2691) < 5e-5);
    assert_true(fabs(2 * symi - 0.2732) < 5e-5);
    assert_true(fabs(symi / fixed - 1.0152) < 5e-5);
    assert_true(fabs(t.network_symi / t.network_static - 1.0154) < 5e-5);
}

/* Contiguous slots, even split, drops at capacity, one step of lag. */
static void symi_by_hand(void **unused) {
    rig r;
    int64_t before[] = {100, 50, 25, 25}, now[] = {80, 80, 40, 0};
    mz_load *history = load_even(4, 4, before), *load = load_even(4, 4, now);
    rig_open(&r, "symi[slots=2]", 4, 4, 0);
    rig_call(&r, load, history, NULL, NULL);
    const mz_plan *p = r.plan;
    assert_memory_equal(p->begin, ((int32_t[]){0, 4, 6, 7, 8}), 5 * sizeof(int32_t));
    assert_memory_equal(p->rank, ((int32_t[]){0, 0, 1, 1, 2, 2, 3, 3}), 8 * sizeof(int32_t));
    /* slot capacity 200 / 8 = 25 rows: limits 100, 50, 25, 25 on 80, 80, 40, 0 */
    assert_memory_equal(p->quota, ((int64_t[]){80, 50, 25, 0}), 4 * sizeof(int64_t));
    assert_int_equal(p->dropped_pairs, 45);
    assert_memory_equal(p->forward, ((int64_t[]){20, 20, 20, 20, 25, 25, 25, 0}),
                        8 * sizeof(int64_t));
    for (int32_t s = 0; s < 4; s++) { /* 30 of 80 and 15 of 40, shared by four equal sources */
        assert_in_range(p->dropped[s * 4 + 1], 7, 8);
        assert_in_range(p->dropped[s * 4 + 2], 3, 4);
    }
    rig_close(&r);
    const char *lossless[] = {"symi[slots=2,drop=no]", "symi[slots=2,cf=0]"};
    for (int i = 0; i < 2; i++) {
        rig_open(&r, lossless[i], 4, 4, 0);
        rig_call(&r, load, history, NULL, NULL);
        assert_int_equal(r.plan->dropped_pairs, 0);
        assert_int_equal(r.plan->kept_pairs, 200);
        assert_false(r.traits.lossy);
        rig_close(&r);
    }
    load_free(load);
    load_free(history);
}

/* Fresh weights of every slot, S*R*W; gradients: ring over the hosts, then E*W to the shards. */
static void symi_movement(void **unused) {
    rig r;
    int64_t before[] = {0, 0, 0, 40}; /* counts 1 1 1 5: expert 3 on ranks 1, 2 and 3 */
    mz_load *load = load_even(4, 4, before);
    rig_open(&r, "symi[slots=2]", 4, 4, 0);
    rig_call(&r, load, load, NULL, NULL);
    int64_t W = r.env.weight_bytes, fresh = 0, ring = 0, shards = 0;
    for (int32_t i = 0; i < r.plan->moves; i++) {
        const mz_move *m = &r.plan->move[i];
        if (m->phase == MZ_MOVE_STEP) {
            assert_int_equal(m->src, MZ_EVERY_RANK);
            fresh += m->bytes;
        } else if (m->dst == MZ_EVERY_RANK)
            shards += m->bytes;
        else
            ring += m->bytes;
    }
    assert_int_equal(fresh, 2 * 4 * W);
    /* Of a shard's bytes 3/4 travel. Experts 0 to 2 have one host: the three others read 3/4 W.
     * Expert 3 has three hosts, which read their own copy: the fourth rank reads 1/4 W. */
    assert_int_equal(shards, 3 * W + W / 3);
    assert_int_equal(ring, 4 * W); /* 2 (m - 1) W in all */
    assert_true(r.traits.sharded_optimizer);
    mz_view later = {.micro_batch = 1, .history = load};
    assert_int_equal(r.policy->decide(r.state, &later, r.plan, &r.err), MZ_OK);
    assert_int_equal(r.plan->moves, 0); /* once per step */
    rig_close(&r);
    load_free(load);
}

/* ---- ideal
 * -------------------------------------------------------------------------------------*/

static void ideal_is_balanced(void **unused) {
    rig r;
    int64_t total[] = {900, 100, 300, 100, 50, 50, 60, 43};
    mz_load *load = load_even(4, 8, total);
    rig_open(&r, "ideal", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    int64_t want[] = {401, 401, 401, 400};
    for (int32_t g = 0; g < 4; g++)
        assert_int_equal(rank_rows(r.plan, r.plan->forward, g), want[g]);
    assert_int_equal(r.plan->moves, 0);
    assert_int_equal(r.plan->begin[8], 11); /* expert 0 also on ranks 1 (one row), 2 and 3 */
    rig_close(&r);
    rig_open(&r, "ideal", 4, 8, 2); /* rank 1 has no room; domain {2,3} takes the rest */
    rig_call(&r, load, NULL, NULL, NULL);
    for (int32_t g = 0; g < 4; g++)
        assert_int_equal(rank_rows(r.plan, r.plan->forward, g), want[g]);
    rig_close(&r);
    load_free(load);
}

/* Rank 3 evens out with rank 2 of its own domain, though rank 0 comes first in id order. */
static void ideal_stays_in_domains(void **unused) {
    rig r;
    int64_t total[] = {700, 400, 100, 700, 100, 400};
    mz_load *load = load_even(6, 6, total);
    rig_open(&r, "ideal", 6, 6, 2);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->begin[6], 8);
    assert_int_equal(r.plan->rank[1], 4);
    assert_int_equal(r.plan->rank[r.plan->begin[3] + 1], 2);
    rig_close(&r);
    load_free(load);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(static_rows),
        cmocka_unit_test(capacity_by_hand),
        cmocka_unit_test(large_even_loads_lose_nothing),
        cmocka_unit_test(symi_count_vectors),
        cmocka_unit_test(symi_traffic_example),
        cmocka_unit_test(symi_counts_equal_the_algorithm),
        cmocka_unit_test(symi_by_hand),
        cmocka_unit_test(symi_movement),
        cmocka_unit_test(ideal_is_balanced),
        cmocka_unit_test(ideal_stays_in_domains),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
