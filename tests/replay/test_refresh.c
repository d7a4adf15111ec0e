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
        near(again->rescaled.cache, rows); /* as these have no time of a cache */
        mz_refresh_free(&r);
        mz_arena_free(&arena);
    }
}

/* Short rows of a cache that takes half of its time now, long ones of a memory that takes 3.5 times
 * as much, what is between by the logarithm of its bytes; and terms fitted to what comes of it:
 * seconds before are those of the terms, over the factors. */
static void rows_follow_their_size(void **state) {
    (void)state;
    static const struct {
        double rows, bytes, factor;
    } samples[] = {{3, 1000, 0.5},
                   {20, 1 << 18, 0.5},
                   {1, 1 << 19, 0.5 + 3.0 / 7},
                   {50, 1 << 20, 0.5 + 6.0 / 7},
                   {7, 1 << 23, 0.5 + 15.0 / 7},
                   {90, 1 << 25, 3.5},
                   {10, 1 << 30, 3.5}};
    static const double term[] = {2e-6, 5e-7, 1e-10};
    const mz_measured now = {.probe_mean_s = 8, .rows_mean_s = 28, .cache_mean_s = 3};
    mz_fit_sample own[COUNT_OF(samples)];
    mz_fit_sample product = {.size = {64, 64, 64}, .seconds = 5}, cold[2];
    mz_measured m = {.probe_mean_s = 4, .rows_mean_s = 8, .cache_mean_s = 6, .call_s = 10};
    mz_factors f = {0};
    mz_err err;
    for (int i = 0; i < COUNT_OF(samples); i++)
        own[i] = (mz_fit_sample){
            .size = {samples[i].rows, 1, samples[i].bytes},
            .seconds = (term[0] + term[1] * samples[i].rows + term[2] * samples[i].bytes) /
                       samples[i].factor};
    m.fit[MZ_WORK_EXCHANGE] = (mz_fit){.samples = COUNT_OF(samples), .sample = own};
    m.fit[MZ_WORK_DGRAD] = (mz_fit){.term = {1, 2, 3, 4}, .samples = 1, .sample = &product};
    for (int i = 0; i < 2; i++) {
        cold[i] = (mz_fit_sample){.size = {1, 1, 1000}, .seconds = 2};
        m.fit[i ? MZ_WORK_GATHER : mz_work_update(MZ_RULE_SGDM)] =
            (mz_fit){.term = {1}, .samples = 1, .sample = &cold[i]};
    }
    assert_ok(mz_calibrate_rescale(&m, &now, &f, &err), &err);
    near(f.product, 2);
    near(f.rows, 3.5);
    near(f.cache, 0.5);
    near(m.cache_mean_s, 3);
    near(m.call_s, 20);
    near(product.seconds, 10); /* whatever its size */
    near(m.fit[MZ_WORK_DGRAD].term[3], 8);
    near(cold[0].seconds, 7); /* from memory, however short */
    near(cold[1].seconds, 7);
    for (int i = 0; i < COUNT_OF(samples); i++)
        if (!(fabs(own[i].ratio - 1) < 1e-9))
            fail_msg("sample %d is %.12g of what the terms say", i, own[i].ratio);
    for (int t = 0; t < COUNT_OF(term); t++)
        assert_true(fabs(m.fit[MZ_WORK_EXCHANGE].term[t] / term[t] - 1) < 1e-6);
}

/* A profile that was not asked for its cache's time, or a machine that cannot be now: rows go with
 * memory, whatever their size. */
static void rows_of_old_profiles_go_with_memory(void **state) {
    (void)state;
    for (int then = 0; then < 2; then++) {
        const mz_measured now = {
            .probe_mean_s = 4, .rows_mean_s = 24, .cache_mean_s = then ? 0 : 3};
        mz_fit_sample own[2] = {{.size = {1, 1, 1000}, .seconds = 5},
                                {.size = {1, 1, 1 << 30}, .seconds = 7}};
        mz_measured m = {.probe_mean_s = 4, .rows_mean_s = 8, .cache_mean_s = then ? 6 : 0};
        mz_factors f = {0};
        mz_err err;
        m.fit[MZ_WORK_PACK] = (mz_fit){.term = {1, 2, 3}, .samples = 2, .sample = own};
        assert_ok(mz_calibrate_rescale(&m, &now, &f, &err), &err);
        near(f.cache, 3);
        near(own[0].seconds, 15);
        near(own[1].seconds, 21);
        near(m.fit[MZ_WORK_PACK].term[0], 3);
        assert_true(m.cache_mean_s == 0); /* of no probe: the next refresh does the same */
    }
}

/* Refreshed twice: the record has both, and the second one goes from the first one's references. */
static void refreshes_multiply(void **state) {
    (void)state;
    static const mz_measured now[] = {
        {.probe_s = 3, .probe_mean_s = 2, .rows_mean_s = 16, .cache_mean_s = 3, .uneven = 0.07},
        {.probe_s = 3, .probe_mean_s = 6, .rows_mean_s = 4, .cache_mean_s = 18}};
    mz_arena arena = {0};
    mz_refresh r;
    mz_factors f = {0};
    mz_err err;
    mz_measured *again = NULL;
    load(HEAD ", \"probe\": 3, \"probe_mean\": 4, \"rows_mean\": 8, \"cache_mean\": 4" KINDS,
         &arena, &r);
    assert_ok(mz_refresh_apply(&r, &now[0], "one", &f, &err), &err);
    near(r.measured->uneven, 0.07);
    assert_ok(mz_refresh_apply(&r, &now[1], "two", &f, &err), &err);
    near(r.measured->uneven, 0.07); /* not measured again */
    near(f.product, 3);
    near(f.rows, 0.25);
    near(r.measured->rescaled.product, 1.5);
    near(r.measured->rescaled.rows, 0.5);
    near(r.measured->rescaled.cache, 4.5);
    near(r.measured->fit[MZ_WORK_PACK].sample[0].seconds, 54); /* a byte lies in a cache */
    assert_ok(mz_measured_read(json_object_get(r.profile, "measured"), "x", &arena, &again, &err),
              &err);
    near(again->cache_mean_s, 18);
    near(again->rescaled.cache, 4.5);
    near(r.measured->fit[MZ_WORK_WGRAD].sample[0].seconds, 30);
    assert_string_equal(r.measured->rescaled.at, "two");
    mz_refresh_free(&r);
    mz_arena_free(&arena);
}

/* What earlier refreshes did to a profile without a word of caches they did to these as to memory.
 */
static void old_records_are_of_memory(void **state) {
    (void)state;
    mz_arena arena = {0};
    mz_refresh r;
    load(HEAD ", \"probe\": 3, \"rescaled\": {\"at\": \"x\", \"products\": 2, \"memory\": 3}" KINDS,
         &arena, &r);
    near(r.measured->rescaled.cache, 3);
    near(r.measured->rescaled.product, 2);
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
                  "factors must be above 0"},
                 {HEAD ", \"probe\": 3, \"rescaled\": {\"at\": \"x\", \"products\": 1, "
                       "\"memory\": 1, \"cache\": 0}" KINDS,
                  "factors must be above 0"},
                 {HEAD ", \"probe\": 3, \"cache_mean\": -1" KINDS, "cache_mean"}};
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

/* On the host: all probes where the pools are larger than caches, else the product alone. */
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
        assert_true(large ? now.cache_mean_s > 1e-6 && now.cache_mean_s < 0.1
                          : now.cache_mean_s == 0);
        small_machine_close(&m);
        mz_arena_free(&arena);
    }
}

/* Once the user asks for the end, before the next probe, whatever pools there are. */
static void an_interrupt_ends_it(void **state) {
    (void)state;
    const volatile sig_atomic_t stop = 1;
    mz_err err;
    small_machine m;
    mz_arena arena = {0};
    mz_measured now = {0};
    mz_app app = {.stop = &stop};
    assert_ok(small_machine_open(&m, 1, 1, 1 << 20, &err), &err);
    assert_fails(mz_calibrate_speed(m.kernels, m.transport, &m.options, &app, &arena, &now, &err),
                 MZ_EABORTED, "interrupted", &err);
    assert_true(now.probe_mean_s == 0);
    small_machine_close(&m);
    mz_arena_free(&arena);
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
        cmocka_unit_test(rows_follow_their_size),
        cmocka_unit_test(rows_of_old_profiles_go_with_memory),
        cmocka_unit_test(refreshes_multiply),
        cmocka_unit_test(old_records_are_of_memory),
        cmocka_unit_test(other_machines_are_refused),
        cmocka_unit_test(profiles_without_a_speed_are_refused),
        cmocka_unit_test(speeds_are_measured),
        cmocka_unit_test(an_interrupt_ends_it),
    };
    return cmocka_run_group_tests(tests, in_own_folder, without_it);
}
