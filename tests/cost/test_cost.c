/* Times worked out by hand on a small made-up device, and list scheduling against brute force. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "sim/cost/cost.h"
#include "sim/cost/schedule.h"
#include "sim/cost/work.h"

#include <math.h>

/* 10 SMs, 1 TFLOP/s in all at half of a 2 TFLOP/s peak, 100 GB/s of a 200 GB/s memory: one
 * 128 x 128 tile of depth k takes 2 * 16384 * k / 1e11 s. */
static mz_device toy(void) {
    return (mz_device){.memory_bytes_per_s = 200e9,
                       .memory_efficiency = 0.5,
                       .bf16_flops = 2e12,
                       .gemm_efficiency = 0.5,
                       .attention_efficiency = 0.25,
                       .attention_backward_efficiency = 0.2,
                       .sms = 10,
                       .tile_m = 128,
                       .tile_n = 128,
                       .row_alignment = 1,
                       .speed = 1};
}

static const mz_cost_effects none = {false, false}, tiles = {true, false}, floors = {false, true},
                             both = {true, true};

static double tile(double k) {
    return 2.0 * 16384 * k / 1e11;
}

static void near(double value, double expected) {
    if (fabs(value - expected) > 1e-9 * fabs(expected))
        fail_msg("%.17g is not %.17g", value, expected);
}

static void one_product(void **state) {
    mz_device device = toy();
    near(mz_cost_gemm(&device, none, 1000, 2000, 100), 2.0 * 1000 * 2000 * 100 / 1e12);
    /* 8 x 16 = 128 tiles in 13 waves. */
    near(mz_cost_gemm(&device, tiles, 1000, 2000, 100), 13 * tile(100));
    near(mz_cost_gemm(&device, tiles, 1024, 2048, 100), 13 * tile(100));
    near(mz_cost_gemm(&device, tiles, 1025, 2048, 100), 15 * tile(100)); /* 144 tiles */
    /* Bytes: 2 (1000 * 100 + 100 * 2000 + 1000 * 2000) = 4.6 MB at 100 GB/s. */
    near(mz_cost_gemm(&device, floors, 1000, 2000, 1), 2 * 2003000 / 100e9);
    assert_true(mz_cost_gemm(&device, both, 0, 10, 10) == 0);
    device.speed = 0.5;
    near(mz_cost_gemm(&device, tiles, 1000, 2000, 100), 2 * 13 * tile(100));
}

/* 2 tiles of depth 4096 on 10 SMs: 5 SMs each, 820 deep; depth 1000 allows one SM only. */
static void split_depth(void **state) {
    mz_device device = toy();
    near(mz_cost_gemm(&device, tiles, 128, 256, 4096), tile(820));
    near(mz_cost_gemm(&device, tiles, 128, 256, 1000), tile(1000));
    near(mz_cost_gemm(&device, tiles, 128, 256, 1024), tile(512));
    near(mz_cost_gemm(&device, tiles, 128, 128 * 6, 1 << 20), tile(1 << 20)); /* 6 tiles: no room */
    /* Partial sums: 5 x 128 x 256 values of 4 B written and read, beside the operands. */
    mz_device slow = device;
    slow.memory_bytes_per_s = 2e6;
    double bytes = 2.0 * (128 * 4096 + 4096 * 256 + 128 * 256) + 8.0 * 5 * 128 * 256;
    near(mz_cost_gemm(&slow, both, 128, 256, 4096), bytes / 1e6);
}

static double grouped_gemm(const mz_device *device, mz_cost_effects effects, mz_gemm_kind kind,
                           const int64_t *rows, int32_t groups, int64_t n, int64_t k) {
    return mz_cost_grouped_gemm(device, effects, kind, rows, groups, n, k, NULL);
}

static void grouped_forward(void **state) {
    mz_device device = toy();
    const int64_t rows[] = {0, 1, 128, 129, 700};
    /* Row tiles 0 + 1 + 1 + 2 + 6 = 10, times 3 columns of tiles: 30 tiles, 3 waves. */
    near(grouped_gemm(&device, tiles, MZ_GEMM_FORWARD, rows, 5, 300, 64), 3 * tile(64));
    near(grouped_gemm(&device, tiles, MZ_GEMM_DGRAD, rows, 5, 300, 64), 3 * tile(64));
    near(grouped_gemm(&device, none, MZ_GEMM_FORWARD, rows, 5, 300, 64),
         2.0 * 958 * 300 * 64 / 1e12);
    /* Weights of 4 groups, 958 rows in and out. */
    near(grouped_gemm(&device, floors, MZ_GEMM_FORWARD, rows, 5, 300, 1),
         2.0 * (4 * 300 + 958 * 301) / 100e9);
    const int64_t nothing[] = {0, 0};
    assert_true(grouped_gemm(&device, both, MZ_GEMM_FORWARD, nothing, 2, 300, 64) == 0);
    assert_true(grouped_gemm(&device, both, MZ_GEMM_FORWARD, NULL, 0, 300, 64) == 0);
    /* Padding to 256 rows: 256 + 256 + 256 + 768 rows, 12 row tiles, 36 tiles, 4 waves. */
    device.row_alignment = 256;
    near(grouped_gemm(&device, tiles, MZ_GEMM_FORWARD, rows, 5, 300, 64), 4 * tile(64));
}

/* Every remainder once, mean - 64 ... mean + 63: 65 of 128 groups take mean rows of tiles, 63 take
 * one tile more, so mean + 63 rows are computed for mean - 1/2. */
static void padding_effect(void **state) {
    mz_device device = toy();
    device.sms = 1; /* one tile after another: no wave effect */
    static const struct {
        int64_t mean;
        double factor;
    } known[] = {{512, 1.125}, {128, 1.5}};
    for (int i = 0; i < 2; i++) {
        int64_t rows[128], mean = known[i].mean;
        for (int64_t r = 0; r < 128; r++)
            rows[r] = mean - 64 + r;
        double with = grouped_gemm(&device, tiles, MZ_GEMM_FORWARD, rows, 128, 128, 512);
        double without = grouped_gemm(&device, none, MZ_GEMM_FORWARD, rows, 128, 128, 512);
        assert_true(fabs(with / without - known[i].factor) < 0.01);
        near(with / without, (double)(mean + 63) / ((double)mean - 0.5));
    }
}

static void grouped_wgrad(void **state) {
    mz_device device = toy();
    /* 256 x 384: 2 x 3 = 6 tiles a group on 10 SMs. Group of 100 rows: 6 SMs busy until 100. Group
     * of 60: 4 free SMs take tiles until 60, the other 2 tiles start at 60 on two of them, end 120.
     * (Units: tile of one row.) */
    const int64_t rows[] = {100, 60, 0};
    near(grouped_gemm(&device, tiles, MZ_GEMM_WGRAD, rows, 3, 384, 256), tile(120));
    const int64_t swapped[] = {60, 100};
    /* 6 SMs until 60; 4 SMs until 100; 2 of the six until 160. */
    near(grouped_gemm(&device, tiles, MZ_GEMM_WGRAD, swapped, 2, 384, 256), tile(160));
    near(grouped_gemm(&device, none, MZ_GEMM_WGRAD, rows, 3, 384, 256),
         2.0 * 160 * 384 * 256 / 1e12);
    /* Floor: three gradients written, the empty group's too, and 160 rows of both operands. */
    near(grouped_gemm(&device, floors, MZ_GEMM_WGRAD, rows, 3, 384, 256),
         fmax(2.0 * (3 * 384 * 256 + 160 * 640) / 100e9, 2.0 * 160 * 384 * 256 / 1e12));
    const int64_t nothing[] = {0, 0};
    near(grouped_gemm(&device, both, MZ_GEMM_WGRAD, nothing, 2, 384, 256),
         2.0 * 2 * 384 * 256 / 100e9);
}

static void memory_and_attention(void **state) {
    mz_device device = toy();
    near(mz_cost_memory(&device, 5e9), 0.05);
    near(mz_cost_attention(&device, 1e9, false), 1e9 / 0.5e12);
    near(mz_cost_attention(&device, 1e9, true), 1e9 / 0.4e12);
    device.speed = 2;
    near(mz_cost_memory(&device, 5e9), 0.025);
    near(mz_cost_attention(&device, 1e9, false), 1e9 / 1e12);
}

/* One SM after another by hand. */
static double brute_force(int sms, const int64_t *count, const double *length, int groups) {
    double free_at[64] = {0}, end = 0;
    for (int g = 0; g < groups; g++)
        for (int64_t t = 0; t < count[g]; t++) {
            int first = 0;
            for (int i = 1; i < sms; i++)
                if (free_at[i] < free_at[first])
                    first = i;
            free_at[first] += length[g];
            end = fmax(end, free_at[first]);
        }
    return end;
}

/* Exact with few groups; with many, where end times are merged, within a thousandth. */
static void list_scheduling(void **state) {
    mz_rng rng = mz_rng_make(7, 1);
    for (int i = 0; i < 3000; i++) {
        int64_t count[128];
        double length[128];
        int sms = 1 + (int)mz_rng_below(&rng, 60);
        int groups = 1 + (int)mz_rng_below(&rng, i % 10 ? 12 : 120);
        double scale = pow(10, (double)mz_rng_below(&rng, 4));
        mz_schedule schedule = mz_schedule_start(sms);
        for (int g = 0; g < groups; g++) {
            count[g] = 1 + (int64_t)mz_rng_below(&rng, i % 3 ? 40 : 300);
            length[g] = 1 + floor(mz_rng_uniform(&rng) * scale);
            mz_schedule_add(&schedule, count[g], length[g]);
        }
        double expected = brute_force(sms, count, length, groups);
        double got = mz_schedule_end(&schedule);
        double bound = groups <= 12 ? 1e-9 : 1e-3;
        if (fabs(got - expected) > bound * expected)
            fail_msg("%d groups on %d SMs: %.17g, brute force %.17g", groups, sms, got, expected);
    }
}

static double end_alone(int64_t sms, const double *length, int count, double alone) {
    mz_schedule schedule = mz_schedule_start(sms);
    for (int i = 0; i < count; i++)
        mz_schedule_add(&schedule, 1, length[i]);
    return mz_schedule_end_alone(&schedule, alone);
}

/* Three SMs with 2, 4 and 10 to do: all run to 2, then two at 3/2 of the speed, then one at twice
 * it. One tile on four runs alone from the start. */
static void who_is_left_runs_faster(void **state) {
    const double length[] = {2, 4, 10}, one = 8;
    near(end_alone(3, length, 3, 0.5), 2 + 2 / 1.5 + 6 / 2.0);
    near(end_alone(3, length, 3, 1), 10);
    near(end_alone(1, length, 3, 0.5), 16);
    near(end_alone(4, &one, 1, 0.8), 6.4);
}

/* A device that nobody measured takes every kernel's bytes at its memory's rate, 100 GB/s; what has
 * nothing to do takes no time. Every kind has a name of its own. */
static void kinds_of_work(void **state) {
    mz_device device = toy();
    for (int k = 0; k < MZ_WORKS; k++) {
        near(mz_cost_work(&device, (mz_work)k, 100, 50, 3e9), 0.03);
        assert_true(mz_cost_work(&device, (mz_work)k, 0, 50, 3e9) == 0);
        assert_true(mz_cost_work(&device, (mz_work)k, 100, 0, 3e9) == 0);
        assert_true(mz_cost_work(&device, (mz_work)k, 100, 50, 0) == 0);
        for (int other = 0; other < k; other++)
            assert_string_not_equal(mz_work_name((mz_work)k), mz_work_name((mz_work)other));
    }
    assert_null(mz_work_name(MZ_WORKS));
    assert_string_equal(mz_work_name(mz_work_update(MZ_RULE_SKEWADAM)), "update_skewadam");
}

static void planner_table(void **state) {
    mz_planner_cost table[] = {{"static", 0, 0}, {"ultraep", 20e-6, 3.2e-9}};
    mz_cluster cluster = {.name = "toy", .planner = table, .planners = 2};
    mz_err err;
    double seconds;
    assert_int_equal(mz_cost_planner(&cluster, "ultraep", 64, 256, &seconds, &err), MZ_OK);
    near(seconds, 72.4288e-6);
    assert_int_equal(mz_cost_planner(&cluster, "static", 64, 256, &seconds, &err), MZ_OK);
    assert_true(seconds == 0);
    assert_int_equal(mz_cost_planner(&cluster, "ultra", 64, 256, &seconds, &err), MZ_EINPUT);
    assert_non_null(strstr(err.msg, "mizan calibrate"));
    assert_non_null(strstr(err.msg, "ultra"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_product),     cmocka_unit_test(split_depth),
        cmocka_unit_test(grouped_forward), cmocka_unit_test(padding_effect),
        cmocka_unit_test(grouped_wgrad),   cmocka_unit_test(memory_and_attention),
        cmocka_unit_test(list_scheduling), cmocka_unit_test(planner_table),
        cmocka_unit_test(kinds_of_work),   cmocka_unit_test(who_is_left_runs_faster),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
