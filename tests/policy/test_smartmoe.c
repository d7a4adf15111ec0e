/* SmartMoE: assignments against brute force and by hand, the switch rule, the MindSpeed variant. */
#include "fixture.h"

#include <math.h>

/* Least peak over all assignments with at most ceil(E/R) experts a rank. */
static int64_t brute_peak(const int64_t *total, int32_t experts, int32_t ranks) {
    const int32_t cap = (experts + ranks - 1) / ranks;
    int64_t cases = 1, best = INT64_MAX;
    for (int32_t e = 0; e < experts; e++)
        cases *= ranks;
    for (int64_t c = 0; c < cases; c++) {
        int64_t load[8] = {0}, peak = 0, code = c;
        int32_t held[8] = {0};
        bool legal = true;
        for (int32_t e = 0; e < experts; e++, code /= ranks) {
            const int32_t r = (int32_t)(code % ranks);
            load[r] += total[e];
            legal = legal && ++held[r] <= cap;
        }
        for (int32_t r = 0; r < ranks; r++)
            peak = load[r] > peak ? load[r] : peak;
        if (legal && peak < best)
            best = peak;
    }
    return best;
}

static int64_t planned_peak(const char *text, const mz_load *load, int32_t domain_size) {
    rig r;
    rig_open(&r, text, load->sources, load->experts, domain_size);
    rig_call(&r, load, load, NULL, NULL);
    const int64_t peak = r.plan->peak_forward;
    rig_close(&r);
    return peak;
}

static void exact_is_the_optimum(void **unused) {
    static const int32_t shapes[][2] = {{2, 8}, {4, 8}, {3, 7}, {2, 5}, {4, 6}, {5, 3}, {1, 4}};
    int worse = 0, cases = 0;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int kind = 0; kind < LOAD_KINDS; kind++)
            for (uint64_t seed = 0; seed < 3; seed++) {
                mz_load *load = load_random(kind, shapes[s][0], shapes[s][1], seed);
                const int64_t best = brute_peak(load->total, load->experts, load->sources);
                const int64_t greedy = planned_peak("smartmoe", load, 0);
                assert_int_equal(planned_peak("smartmoe[mode=exact]", load, 0), best);
                assert_true(greedy >= best);
                worse += greedy > best;
                cases++;
                load_free(load);
            }
    print_message("greedy above the optimum in %d of %d cases\n", worse, cases);
}

/* 16 experts on 4 ranks: the whole table, no brute force; the LPT bound 4/3 holds without caps, so
 * only order is claimed. */
static void exact_never_above_the_others(void **unused) {
    for (int kind = 0; kind < LOAD_KINDS; kind++) {
        mz_load *load = load_random(kind, 4, 16, 9);
        const int64_t exact = planned_peak("smartmoe[mode=exact]", load, 0);
        assert_true(exact <= planned_peak("smartmoe", load, 0));
        assert_int_equal(exact, planned_peak("smartmoe[mode=hybrid]", load, 0));
        load_free(load);
    }
}

/* Loads 9 7 6 5 4 3 on 3 ranks of 2: greedy 9|7|6, 6+5, 7+4, 9+3: peak 12, which block mains
 * (16) and the optimum (9+3, 7+4, 6+5) confirm. */
static void greedy_by_hand(void **unused) {
    static const int64_t total[6] = {9, 7, 6, 5, 4, 3};
    static const int32_t want[6] = {0, 1, 2, 2, 1, 0};
    rig r;
    mz_load *load = load_even(3, 6, total);
    rig_open(&r, "smartmoe[bytes=1000]", 3, 6, 0);
    assert_int_equal(r.traits.interval, 10);
    assert_int_equal(r.traits.window, 10);
    assert_int_equal(r.traits.slots, 2);
    assert_int_equal(r.traits.replica_memory, MZ_REPLICAS_NONE);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 16);
    assert_int_equal(r.plan->moves, 0);
    /* A switch costs far more than a few rows gain. */
    rig_call(&r, load, load, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 16);
    rig_close(&r);
    rig_open(&r, "smartmoe", 3, 6, 0);
    rig_call(&r, load, load, NULL, NULL);
    assert_memory_equal(r.plan->rank, want, sizeof want);
    assert_int_equal(r.plan->peak_forward, 12);
    assert_int_equal(r.plan->moves, 0);
    rig_close(&r);
    load_free(load);
}

/* The same loads, a thousandfold, and a switch whose price is known: experts 1 to 5 move (block
 * mains 0 0 1 1 2 2 against 0 1 2 2 1 0); rank 1 sends two and receives two. Gain: 4000 rows, 10
 * steps. */
static void switch_rule(void **unused) {
    static const int64_t total[6] = {9000, 7000, 6000, 5000, 4000, 3000};
    mz_load *load = load_even(3, 6, total);
    for (int side = 0; side < 2; side++) {
        rig r;
        rig_prepare(&r, 3, 6, 0);
        r.env.expert_parameters *= 1000;
        const double row = 3 * r.env.pair_seconds + 4 * 128 / r.env.inside_bytes_s;
        const double gain = 4000 * row * 10;
        /* Two experts over one link in just less, or just more, than the gain. */
        const double cost = gain * (side == 0 ? 0.99 : 1.01);
        const double bytes = cost * r.env.inside_bytes_s / 2 / (double)r.env.expert_parameters;
        char text[64];
        snprintf(text, sizeof text, "smartmoe[bytes=%.3f]", bytes);
        assert_int_equal(rig_start(&r, text), MZ_OK);
        rig_call(&r, load, NULL, NULL, NULL);
        rig_call(&r, load, load, NULL, NULL);
        assert_int_equal(r.plan->peak_forward, side == 0 ? 12000 : 16000);
        assert_int_equal(r.plan->moves, side == 0 ? 5 : 0);
        for (int32_t i = 0; i < r.plan->moves; i++) {
            const mz_move *m = &r.plan->move[i];
            assert_true(m->phase == MZ_MOVE_STEP && m->change && m->hide == MZ_HIDE_NOTHING);
            assert_int_equal(m->bytes,
                             ceil(atof(strchr(text, '=') + 1) * (double)r.env.expert_parameters));
        }
        rig_close(&r);
    }
    load_free(load);
}

static void without_times_every_gain_counts(void **unused) {
    static const int64_t total[6] = {9, 7, 6, 5, 4, 3};
    rig r;
    mz_load *load = load_even(3, 6, total);
    rig_prepare(&r, 3, 6, 0);
    r.env.pair_seconds = 0;
    assert_int_equal(rig_start(&r, "smartmoe"), MZ_OK);
    rig_call(&r, load, NULL, NULL, NULL);
    rig_call(&r, load, load, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 12);
    rig_close(&r);
    load_free(load);
}

/* Rank loads 16 11 7 become 12 11 11: coefficients of variation 0.3249 and 0.0416. */
static void mindspeed_threshold(void **unused) {
    static const int64_t total[6] = {9, 7, 6, 5, 4, 3};
    mz_load *load = load_even(3, 6, total);
    static const double cv[2] = {0.28, 0.29};
    for (int i = 0; i < 2; i++) {
        rig r;
        char text[64];
        snprintf(text, sizeof text, "smartmoe[variant=mindspeed,cv=%.2f]", cv[i]);
        rig_open(&r, text, 3, 6, 0);
        rig_call(&r, load, NULL, NULL, NULL);
        rig_call(&r, load, load, NULL, NULL);
        assert_int_equal(r.plan->peak_forward, i == 0 ? 12 : 16);
        rig_close(&r);
    }
    load_free(load);
}

/* The average decides, not the last counts. */
static void mindspeed_average(void **unused) {
    static const int64_t before[4] = {100, 100, 0, 0}, after[4] = {100, 0, 100, 0};
    rig r;
    mz_load *old = load_even(2, 4, before), *now = load_even(2, 4, after);
    rig_open(&r, "smartmoe[variant=mindspeed,cv=0.9]", 2, 4, 0);
    rig_call(&r, old, NULL, NULL, NULL);
    rig_call(&r, old, old, NULL, NULL); /* average 100 100 0 0: variation 1 -> 0 */
    assert_int_equal(r.plan->rank[0] + r.plan->rank[1], 1);
    rig_close(&r);
    /* From `after` (balanced) to `before` (not): with theta 0.9 the average is 100 10 90 0, whose
     * variation on block mains is 0.1; with theta 0 it is 1. */
    static const char *const texts[2] = {"smartmoe[variant=mindspeed,cv=0.5]",
                                         "smartmoe[variant=mindspeed,cv=0.5,theta=0]"};
    for (int i = 0; i < 2; i++) {
        rig_open(&r, texts[i], 2, 4, 0);
        rig_call(&r, now, NULL, NULL, NULL);
        rig_call(&r, now, now, NULL, NULL);
        rig_call(&r, old, old, NULL, NULL);
        assert_int_equal(r.plan->peak_forward, i == 0 ? 200 : 100);
        rig_close(&r);
    }
    load_free(old);
    load_free(now);
}

/* A layer keeps its own placement; later micro-batches keep the step's. */
static void layers_and_micro_batches(void **unused) {
    static const int64_t total[6] = {9, 7, 6, 5, 4, 3}, flat[6] = {5, 5, 5, 5, 5, 5};
    rig r;
    mz_load *load = load_even(3, 6, total), *even = load_even(3, 6, flat);
    rig_open(&r, "smartmoe", 3, 6, 0);
    rig_call(&r, load, load, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 12);
    r.layer = 1;
    rig_call(&r, load, even, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 16);
    r.layer = 0;
    r.micro_batch = 1;
    rig_call(&r, load, even, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 12);
    r.layer = 1;
    rig_call(&r, load, load, NULL, NULL);
    assert_int_equal(r.plan->peak_forward, 16);
    rig_close(&r);
    load_free(load);
    load_free(even);
}

/* Never above its starting placement on the load it planned for. */
static void never_worse_on_what_it_saw(void **unused) {
    static const int32_t shapes[][3] = {{1, 5, 0},  {7, 3, 0},    {5, 13, 2},     {13, 5, 4},
                                        {8, 64, 4}, {64, 256, 8}, {1024, 384, 8}, {3, 51, 0}};
    static const char *const texts[] = {"smartmoe", "smartmoe[mode=hybrid]"};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (size_t t = 0; t < sizeof texts / sizeof *texts; t++)
            for (int kind = 0; kind < LOAD_KINDS; kind++) {
                mz_load *load = load_random(kind, shapes[s][0], shapes[s][1], 4);
                assert_true(planned_peak(texts[t], load, shapes[s][2]) <=
                            planned_peak("static", load, shapes[s][2]));
                load_free(load);
                if (shapes[s][0] >= 64)
                    break;
            }
}

static void refusal(void **unused) {
    rig r;
    assert_int_equal(rig_try(&r, "smartmoe[mode=exact]", 4, 17, 0), MZ_EINPUT);
    assert_non_null(strstr(r.err.msg, "at most 16 experts, here are 17; give mode=hybrid"));
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_is_the_optimum),
        cmocka_unit_test(exact_never_above_the_others),
        cmocka_unit_test(greedy_by_hand),
        cmocka_unit_test(switch_rule),
        cmocka_unit_test(without_times_every_gain_counts),
        cmocka_unit_test(mindspeed_threshold),
        cmocka_unit_test(mindspeed_average),
        cmocka_unit_test(layers_and_micro_batches),
        cmocka_unit_test(never_worse_on_what_it_saw),
        cmocka_unit_test(refusal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
