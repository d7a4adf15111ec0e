/* FineMoE: symmetric placements, the optimum against all sets of ranks, re-placement, movement. */
#include "fixture.h"

#include <math.h>

/* Every expert has d distinct hosts, every rank at most ceil(d*E/R) experts. */
static void symmetric_placements(void **unused) {
    for (int32_t ranks = 1; ranks <= 17; ranks++)
        for (int32_t experts = 1; experts <= 40; experts += 3)
            for (int32_t d = 1; d <= 4; d++) {
                char text[64];
                rig r;
                snprintf(text, sizeof text, "finemoe[d=%d,placement=symmetric]", d);
                mz_load *load = load_random(LOAD_RANDOM, ranks, experts, 1);
                const int32_t n = d < ranks ? d : ranks;
                rig_open(&r, text, ranks, experts, 0);
                rig_call(&r, load, NULL, NULL, NULL);
                assert_int_equal(r.traits.slots, (n * experts + ranks - 1) / ranks);
                for (int32_t e = 0; e < experts; e++) {
                    const int32_t *host = r.plan->rank + r.plan->begin[e];
                    assert_int_equal(r.plan->begin[e + 1] - r.plan->begin[e], n);
                    for (int32_t i = 0; i < n; i++)
                        for (int32_t j = 0; j < i; j++)
                            assert_int_not_equal(host[i], host[j]);
                }
                rig_close(&r);
                load_free(load);
            }
}

/* 8 ranks, 16 experts: generators 1 and 4^(1/2) = 2. */
static void generators_by_hand(void **unused) {
    rig r;
    mz_load *load = load_random(LOAD_RANDOM, 8, 16, 1);
    rig_open(&r, "finemoe", 8, 16, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    for (int32_t g = 0; g < 8; g++)
        for (int32_t j = 0; j < 2; j++) {
            const int32_t i = r.plan->begin[2 * g + j];
            assert_int_equal(r.plan->rank[i], g);
            assert_int_equal(r.plan->rank[i + 1], (g + 1 + j) % 8);
        }
    assert_int_equal(r.traits.interval, 50);
    assert_int_equal(r.traits.slots, 4);
    assert_true(r.traits.route_plans && r.traits.replica_optimizer);
    rig_close(&r);
    load_free(load);
}

/* The largest density of an induced set: rows of experts hosted in it alone over its size. */
static int64_t densest(const mz_plan *plan, const int64_t *total) {
    int64_t most = 0;
    for (uint32_t set = 1; set < 1U << plan->ranks; set++) {
        int64_t rows = 0;
        for (int32_t e = 0; e < plan->experts; e++) {
            bool inside = true;
            for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
                inside = inside && (set >> plan->rank[i] & 1);
            rows += inside ? total[e] : 0;
        }
        const int64_t size = __builtin_popcount(set), density = (rows + size - 1) / size;
        most = density > most ? density : most;
    }
    return most;
}

static const int32_t small[][2] = {{8, 32}, {7, 13}, {5, 3}, {6, 24}, {1, 4}, {2, 9}};

static void routing_reaches_the_density(void **unused) {
    for (size_t s = 0; s < sizeof small / sizeof *small; s++)
        for (int kind = 0; kind < LOAD_KINDS; kind++)
            for (int adaptive = 0; adaptive < 2; adaptive++) {
                rig r;
                mz_load *load = load_random(kind, small[s][0], small[s][1], 3);
                mz_load *history = load_random(LOAD_ZIPF, small[s][0], small[s][1], 4);
                rig_open(&r, adaptive ? "finemoe" : "finemoe[placement=symmetric]", small[s][0],
                         small[s][1], 0);
                rig_call(&r, load, history, NULL, NULL);
                assert_int_equal(r.plan->peak_forward, densest(r.plan, load->total));
                rig_close(&r);
                load_free(load);
                load_free(history);
            }
}

/* Re-placed after a load, the peak on that load is never above the symmetric placement's, and the
 * best of more samples is no worse. */
static void replacement_gains(void **unused) {
    int better = 0, cases = 0;
    for (size_t s = 0; s < sizeof small / sizeof *small; s++)
        for (int kind = 0; kind < LOAD_KINDS; kind++) {
            mz_load *load = load_random(kind, small[s][0], small[s][1], 6);
            static const char *const texts[] = {"finemoe[placement=symmetric]",
                                                "finemoe[samples=4]", "finemoe[samples=64]"};
            int64_t peak[3];
            for (int t = 0; t < 3; t++) {
                rig r;
                rig_open(&r, texts[t], small[s][0], small[s][1], 0);
                rig_call(&r, load, load, NULL, NULL);
                peak[t] = r.plan->peak_forward;
                rig_close(&r);
            }
            assert_true(peak[1] <= peak[0] && peak[2] <= peak[1]);
            better += peak[2] < peak[0];
            cases++;
            load_free(load);
        }
    print_message("re-placement better in %d of %d cases\n", better, cases);
    assert_true(better > 3);
}

/* Greedy counts: loads 60 20 10 10 on 4 ranks of 2 slots: 60 -> 4 (no more than ranks), then one
 * slot each and the last to 20: peak 25, the mean. */
static void counts_by_hand(void **unused) {
    static const int64_t total[4] = {60, 20, 10, 10}, hot[4] = {100, 0, 0, 0};
    rig r;
    mz_load *load = load_even(4, 4, total), *one = load_even(4, 4, hot);
    rig_open(&r, "finemoe", 4, 4, 0);
    rig_call(&r, load, load, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 25);
    assert_int_equal(r.plan->begin[1], 4);
    rig_close(&r);
    /* One expert alone: all ranks, and the slots it cannot use go to the others. */
    rig_open(&r, "finemoe", 4, 4, 0);
    rig_call(&r, one, one, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 25);
    assert_int_equal(r.plan->begin[1], 4);
    assert_int_equal(r.plan->begin[4], 8);
    rig_close(&r);
    load_free(load);
    load_free(one);
}

/* Claim C15: perfect balance for Zipf exponents below 1, d=2, without re-placement. */
static void zipf_below_one(void **unused) {
    const int32_t ranks = 8, experts = 64;
    for (int tenth = 5; tenth <= 12; tenth++) {
        double worst = 0, sum = 0;
        for (uint64_t seed = 0; seed < 20; seed++) {
            int64_t total[64];
            int32_t order[64];
            mz_rng rng = mz_rng_make(seed, 15);
            for (int32_t e = 0; e < experts; e++) {
                const int32_t at = (int32_t)mz_rng_below(&rng, (uint64_t)e + 1);
                order[e] = order[at];
                order[at] = e;
            }
            for (int32_t e = 0; e < experts; e++)
                total[order[e]] = (int64_t)(1e6 * pow(e + 1, -tenth / 10.0));
            rig r;
            mz_load *load = load_even(ranks, experts, total);
            rig_open(&r, "finemoe", ranks, experts, 0);
            rig_call(&r, load, NULL, NULL, NULL);
            const double ratio = (double)r.plan->peak_forward * ranks / (double)load->pairs;
            worst = fmax(worst, ratio);
            sum += ratio;
            rig_close(&r);
            load_free(load);
        }
        print_message("Zipf %.1f: imbalance %.3f, worst of 20 orders %.3f\n", tenth / 10.0,
                      sum / 20, worst);
        if (tenth <= 8)
            assert_true(worst < 1.001);
        if (tenth == 12)
            assert_true(sum / 20 > 1.01);
    }
}

/* Each source sends only to an expert that it hosts: nothing leaves its rank. */
static void local_rows_stay(void **unused) {
    rig r;
    mz_load *load = load_new(8, 16);
    for (int32_t s = 0; s < 8; s++)
        load->count[s * 16 + 2 * s] = 100;
    mz_load_sum(load);
    rig_open(&r, "finemoe", 8, 16, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(local_pairs(r.plan), 800);
    assert_int_equal(r.plan->peak_forward, 100);
    rig_close(&r);
    /* Where the peak (expert 10, 500 rows each on ranks 5 and 6) leaves a choice, expert 0 is
     * computed on rank 1, where its rows are, and not on rank 0. */
    memset(load->count, 0, sizeof(int64_t) * 8 * 16);
    load->count[1 * 16 + 0] = 100;
    load->count[3 * 16 + 10] = 1000;
    mz_load_sum(load);
    rig_open(&r, "finemoe", 8, 16, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 500);
    assert_int_equal(r.plan->rank[r.plan->begin[0] + 1], 1);
    assert_int_equal(r.plan->forward[r.plan->begin[0] + 1], 100);
    rig_close(&r);
    load_free(load);
}

static bool hosts(const mz_plan *plan, int32_t e, int32_t rank) {
    for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
        if (plan->rank[i] == rank)
            return true;
    return false;
}

static void movement(void **unused) {
    rig before, after;
    mz_load *load = load_random(LOAD_ZIPF, 8, 32, 2),
            *other = load_random(LOAD_ONE_EXPERT, 8, 32, 7);
    rig_open(&before, "finemoe", 8, 32, 0);
    rig_open(&after, "finemoe", 8, 32, 0);
    rig_call(&before, load, NULL, NULL, NULL);
    rig_call(&after, load, NULL, NULL, NULL);
    assert_int_equal(after.plan->moves, 64); /* rings of two: W each way */
    for (int32_t i = 0; i < 64; i++) {
        assert_int_equal(after.plan->move[i].bytes, after.env.weight_bytes);
        assert_int_equal(after.plan->move[i].phase, MZ_MOVE_REDUCE_STEP);
    }
    rig_call(&after, load, load, NULL, NULL);
    int32_t fresh = 0, moved = 0;
    for (int32_t e = 0; e < 32; e++)
        for (int32_t r = 0; r < 8; r++)
            fresh += hosts(after.plan, e, r) && !hosts(before.plan, e, r);
    for (int32_t i = 0; i < after.plan->moves; i++) {
        const mz_move *m = &after.plan->move[i];
        if (!m->change)
            continue;
        moved++;
        assert_int_equal(m->bytes, 18 * after.env.expert_parameters);
        assert_true(hosts(before.plan, m->expert, m->src) && hosts(after.plan, m->expert, m->dst));
    }
    assert_int_equal(moved, fresh);
    assert_true(fresh > 0);
    /* The placement stays until the next decision, and where nothing better is found. */
    mz_plan *p = after.plan;
    int32_t kept[256];
    memcpy(kept, p->rank, sizeof(int32_t) * (size_t)p->begin[32]);
    for (after.micro_batch = 0; after.micro_batch < 2; after.micro_batch++) {
        rig_call(&after, load, after.micro_batch ? other : load, NULL, NULL);
        assert_memory_equal(kept, p->rank, sizeof(int32_t) * (size_t)p->begin[32]);
        for (int32_t i = 0; i < p->moves; i++)
            assert_false(p->move[i].change);
    }
    load_free(other);
    rig_close(&before);
    rig_close(&after);
    load_free(load);
}

static void idle_history_changes_nothing(void **unused) {
    rig r;
    mz_load *load = load_random(LOAD_ZIPF, 8, 32, 2), *idle = load_random(LOAD_NOTHING, 8, 32, 2);
    rig_open(&r, "finemoe", 8, 32, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    rig_call(&r, load, idle, NULL, NULL);
    assert_int_equal(r.plan->moves, 64);
    rig_close(&r);
    load_free(load);
    load_free(idle);
}

static void same_seed_same_plan(void **unused) {
    rig a, b;
    mz_load *load = load_random(LOAD_ZIPF, 16, 64, 2);
    rig_open(&a, "finemoe[seed=5]", 16, 64, 4);
    rig_open(&b, "finemoe[seed=5]", 16, 64, 4);
    rig_call(&a, load, load, NULL, NULL);
    rig_call(&b, load, load, NULL, NULL);
    assert_same_plan(a.plan, b.plan);
    rig_close(&a);
    rig_close(&b);
    load_free(load);
}

static void awkward_shapes(void **unused) {
    static const int32_t shapes[][3] = {{1, 1, 0},  {1, 5, 0},    {2, 2, 1},     {13, 5, 4},
                                        {5, 13, 2}, {11, 101, 0}, {1024, 384, 8}};
    static const char *const texts[] = {"finemoe", "finemoe[d=5]", "finemoe[slots=120,samples=3]"};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (size_t t = 0; t < sizeof texts / sizeof *texts; t++)
            for (int kind = 0; kind < LOAD_KINDS; kind++) {
                rig r;
                if (shapes[s][0] > 100 && (t > 0 || kind != LOAD_ZIPF))
                    continue;
                mz_load *load = load_random(kind, shapes[s][0], shapes[s][1], 4);
                rig_open(&r, texts[t], shapes[s][0], shapes[s][1], shapes[s][2]);
                rig_call(&r, load, load, NULL, NULL);
                rig_close(&r);
                load_free(load);
            }
}

static void refusal(void **unused) {
    rig r;
    assert_int_equal(rig_try(&r, "finemoe[slots=7]", 8, 32, 0), MZ_EINPUT);
    assert_non_null(strstr(r.err.msg, "give at least 8, or a lower d"));
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(symmetric_placements),
        cmocka_unit_test(generators_by_hand),
        cmocka_unit_test(routing_reaches_the_density),
        cmocka_unit_test(replacement_gains),
        cmocka_unit_test(counts_by_hand),
        cmocka_unit_test(zipf_below_one),
        cmocka_unit_test(local_rows_stay),
        cmocka_unit_test(movement),
        cmocka_unit_test(idle_history_changes_nothing),
        cmocka_unit_test(same_seed_same_plan),
        cmocka_unit_test(awkward_shapes),
        cmocka_unit_test(refusal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
