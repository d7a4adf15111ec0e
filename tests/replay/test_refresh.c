/* A profile taken to another speed: factors by hand, what is scaled by which, what is refused. */
#include "replay/refresh.h"
#include "sim/cost/work.h"
#include "tests/replay/small_machine.h"

#include <math.h>
#include <unistd.h>

static const char *const path = "refresh.json";

static void near(double value, double wanted) {
    if (!(fabs(value - wanted) <= 1e-12 * fabs(wanted)))
        fail_msg("%.17g instead of %.17g", value, wanted);
}

static void put_profile(const char *measured) {
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    fprintf(out,
            "{\"name\": \"n\", \"device\": {\"memory\": {\"value\": \"8 GiB\"}, "
            "\"ranks_per_device\": {\"value\": 4}, \"bf16\": {\"value\": 6e9}, "
            "\"memory_bandwidth\": {\"value\": \"3 GB/s\"}}, \"planner\": {}%s%s}\n",
            measured[0] ? ", \"measured\": " : "", measured);
    assert_int_equal(fclose(out), 0);
}

#define HEAD                                                                                       \
    "{\"machine\": \"m\", \"backend\": \"host\", \"transport\": \"mpi\", \"processes\": 2, "       \
    "\"workers\": 3, \"call\": 10"
#define KINDS                                                                                      \
    ", \"kinds\": {"                                                                               \
    "\"pack\": {\"terms\": [1, 2, 3], \"rows\": [1], \"cols\": [1], \"bytes\": [1], "              \
    "\"seconds\": [12]}, "                                                                         \
    "\"update_adamw\": {\"terms\": [1, 2, 3], \"rows\": [1], \"cols\": [1], \"bytes\": [1], "      \
    "\"seconds\": [6]}, "                                                                          \
    "\"update_muon\": {\"terms\": [1, 2, 3], \"rows\": [1], \"cols\": [1], \"bytes\": [1], "       \
    "\"seconds\": [6]}, "                                                                          \
    "\"product_wgrad\": {\"terms\": [1, 2, 3, 4], \"m\": [1], \"n\": [1], \"k\": [1], "            \
    "\"seconds\": [20], \"tile_rows\": 0, \"tile_n\": 256, \"tile_k\": 0}}}"

#define FULL HEAD ", \"probe\": 3, \"probe_mean\": 4, \"rows_mean\": 8" KINDS

static void load(const char *measured, mz_arena *arena, mz_refresh *r) {
    mz_err err;
    put_profile(measured);
    assert_ok(mz_refresh_load(path, arena, r, &err), &err);
    near(r->memory, 8.0 * (1 << 30));
    assert_int_equal(r->ranks, 8);
}

static double number(const mz_refresh *r, const char *key) {
    return json_number_value(
        json_object_get(json_object_get(json_object_get(r->profile, "device"), key), "value"));
}

/* References twice as long as now: all takes half of its seconds, and so on. */
static void seconds_follow_the_probes(void **state) {
    (void)state;
    static const struct {
        const char *measured;
        mz_measured now;
        double product, rows;
    } cases[] = {
        {FULL, {.probe_s = 1.75, .probe_mean_s = 2, .rows_mean_s = 4}, 0.5, 0.5},
        {FULL, {.probe_s = 3, .probe_mean_s = 5, .rows_mean_s = 2}, 1.25, 0.25},
        /* the machine's memory was not looked at then, or cannot be now */
        {HEAD ", \"probe\": 3, \"probe_mean\": 4" KINDS,
         {.probe_s = 3, .probe_mean_s = 5, .rows_mean_s = 2},
         1.25,
         1},
        {FULL, {.probe_s = 3, .probe_mean_s = 5}, 1.25, 1},
        /* an old profile: medians */
        {HEAD ", \"probe\": 3" KINDS,
         {.probe_s = 4.5, .probe_mean_s = 5, .rows_mean_s = 2},
         1.5,
         1},
    };
    for (int i = 0; i < COUNT_OF(cases); i++) {
        const double product = cases[i].product, rows = cases[i].rows;
        mz_arena arena = {0};
        mz_refresh r;
        mz_factors f = {0};
        mz_measured *again = NULL;
        mz_err err;
        load(cases[i].measured, &arena, &r);
        assert_ok(mz_refresh_apply(&r, &cases[i].now, "2026-01-02T03:04:05Z", &f, &err), &err);
        near(f.product, product);
        near(f.rows, rows);
        near(number(&r, "bf16"), 6e9 / product);
        near(number(&r, "memory_bandwidth"), 3e9 / rows);
        assert_ok(
            mz_measured_read(json_object_get(r.profile, "measured"), "x", &arena, &again, &err),
            &err);
        near(again->call_s, 10 * product);
        near(again->probe_s, cases[i].now.probe_s);
        near(again->probe_mean_s, cases[i].now.probe_mean_s);
        near(again->fit[MZ_WORK_PACK].sample[0].seconds, 12 * rows);
        near(again->fit[MZ_WORK_PACK].term[1], 2 * rows);
        near(again->fit[MZ_WORK_PACK].sample[0].ratio, 2);
        near(again->fit[mz_work_update(MZ_RULE_ADAMW)].sample[0].seconds, 6 * rows);
        near(again->fit[mz_work_update(MZ_RULE_MUON)].sample[0].seconds, 6 * product);
        near(again->fit[MZ_WORK_WGRAD].sample[0].seconds, 20 * product);
        near(again->fit[MZ_WORK_WGRAD].term[3], 4 * product);
        assert_int_equal(again->tiling[MZ_WORK_WGRAD].n, 256);
        assert_string_equal(again->rescaled.at, "2026-01-02T03:04:05Z");
        near(again->rescaled.product, product);
        near(again->rescaled.rows, rows);
        mz_refresh_free(&r);
        mz_arena_free(&arena);
    }
}

/* Refreshed twice: the record has both, and the second one goes from the first one's references. */
static void refreshes_multiply(void **state) {
    (void)state;
    static const mz_measured now[] = {
        {.probe_s = 3, .probe_mean_s = 2, .rows_mean_s = 16, .uneven = 0.07},
        {.probe_s = 3, .probe_mean_s = 6, .rows_mean_s = 4}};
    mz_arena arena = {0};
    mz_refresh r;
    mz_factors f = {0};
    mz_err err;
    load(FULL, &arena, &r);
    assert_ok(mz_refresh_apply(&r, &now[0], "one", &f, &err), &err);
    near(r.measured->uneven, 0.07);
    assert_ok(mz_refresh_apply(&r, &now[1], "two", &f, &err), &err);
    near(r.measured->uneven, 0.07); /* not measured again */
    near(f.product, 3);
    near(f.rows, 0.25);
    near(r.measured->rescaled.product, 1.5);
    near(r.measured->rescaled.rows, 0.5);
    near(r.measured->fit[MZ_WORK_WGRAD].sample[0].seconds, 30);
    assert_string_equal(r.measured->rescaled.at, "two");
    mz_refresh_free(&r);
    mz_arena_free(&arena);
}

static void other_machines_are_refused(void **state) {
    (void)state;
    const mz_refresh_here same = {"m", "host", "mpi", 2, 3, 8, 8.05 * (1 << 30)};
    mz_refresh_here here[7];
    static const char *const words[] = {"the machine was m when",
                                        "the backend was host when it was measured and is cuda now",
                                        "the transport was mpi",
                                        "processes was 2",
                                        "workers (--threads) was 3",
                                        "--ranks was 8",
                                        "memory was 8.00 GiB when it was measured and is 9.00 GiB"};
    mz_arena arena = {0};
    mz_refresh r;
    mz_err err;
    load(FULL, &arena, &r);
    assert_ok(mz_refresh_same(&r, &same, &err), &err);
    for (int i = 0; i < COUNT_OF(here); i++)
        here[i] = same;
    here[0].machine = "another";
    here[1].backend = "cuda";
    here[2].transport = "local";
    here[3].processes = 1;
    here[4].workers = 2;
    here[5].ranks = 4;
    here[6].memory = 9.0 * (1 << 30);
    for (int i = 0; i < COUNT_OF(here); i++)
        assert_fails(mz_refresh_same(&r, &here[i], &err), MZ_EINPUT, words[i], &err);
    mz_refresh_free(&r);
    mz_arena_free(&arena);
}

static void profiles_without_a_speed_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *measured, *words;
    } cases[] = {{"", "nothing in it was measured"},
                 {"3", "measured"},
                 {HEAD KINDS, "does not say how fast the machine was"},
                 {HEAD ", \"probe\": 3, \"rescaled\": {\"at\": \"x\", \"products\": 0, "
                       "\"memory\": 1}" KINDS,
                  "factors must be above 0"}};
    mz_arena arena = {0};
    mz_refresh r;
    mz_err err;
    for (int i = 0; i < COUNT_OF(cases); i++) {
        put_profile(cases[i].measured);
        assert_fails(mz_refresh_load(path, &arena, &r, &err), MZ_EINPUT, cases[i].words, &err);
        assert_null(r.profile);
    }
    assert_fails(mz_refresh_load("absent.json", &arena, &r, &err), MZ_EINPUT, "absent.json", &err);
    mz_arena_free(&arena);
}

/* On the host: both probes where the pools are larger than caches, else the product alone. */
static void speeds_are_measured(void **state) {
    (void)state;
    for (int large = 0; large < 2; large++) {
        mz_err err;
        small_machine m;
        mz_arena arena = {0};
        mz_measured now = {0};
        mz_app app = {0};
        assert_ok(small_machine_open(&m, 1, 1, INT64_C(1) << (large ? 27 : 20), &err), &err);
        assert_ok(mz_calibrate_speed(m.kernels, m.transport, &m.options, &app, &arena, &now, &err),
                  &err);
        assert_true(now.probe_s > 1e-5 && now.probe_s < 1);
        assert_true(now.probe_mean_s > 1e-5 && now.probe_mean_s < 1);
        assert_true(large ? now.rows_mean_s > 1e-5 && now.rows_mean_s < 1 : now.rows_mean_s == 0);
        small_machine_close(&m);
        mz_arena_free(&arena);
    }
}

static int in_own_folder(void **state) {
    static char folder[512];
    make_directory(folder, sizeof folder);
    *state = folder;
    return chdir(folder);
}

static int without_it(void **state) {
    const int code = chdir("/");
    remove_directory(*state);
    return code;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(seconds_follow_the_probes),
        cmocka_unit_test(refreshes_multiply),
        cmocka_unit_test(other_machines_are_refused),
        cmocka_unit_test(profiles_without_a_speed_are_refused),
        cmocka_unit_test(speeds_are_measured),
    };
    return cmocka_run_group_tests(tests, in_own_folder, without_it);
}
