/* Verdicts and exit codes of tests/gpu/run, on timings that no device made. */
#include "tests/gpu/gpu.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static timing row(const char *name, goal g, double seconds, double flops, double bytes) {
    return (timing){.operation = name,
                    .shape = "layer",
                    .goal = g,
                    .seconds = seconds,
                    .held = true,
                    .flops = flops,
                    .bytes = bytes};
}

/* A copy of 4 TB/s and products of 800 TFLOP/s, and one operation. */
static const char *judged(goal g, double seconds, double flops, double bytes) {
    timings t = {.n = 1, .copy_rate = 4e12, .matrix_rate = 8e14};
    t.at[0] = row("it", g, seconds, flops, bytes);
    return verdict(&t, t.at);
}

static void copy_goals(void **state) {
    (void)state;
    const goal g = {GOAL_COPY_SHARE, 0.7, NULL};
    assert_string_equal(judged(g, 1e-3, 0, 2.9e9), "met");
    assert_string_equal(judged(g, 1e-3, 0, 2.7e9), "missed");
    timings t = {.n = 1, .at[0] = row("it", g, 1e-3, 0, 2.9e9)}; /* no copy was timed */
    assert_string_equal(verdict(&t, t.at), "not known");
    t.copy_rate = 4e12;
    assert_true(fabs(reached(&t, t.at) - 0.725) < 1e-12);
}

static void flops_goals(void **state) {
    (void)state;
    const goal g = {GOAL_FLOPS, 450e12, NULL};
    assert_string_equal(judged(g, 1e-3, 4.51e11, 1), "met");
    assert_string_equal(judged(g, 1e-3, 4.49e11, 1), "missed");
}

/* A share of time is of the operation named, on the same shape: less is better. */
static void time_goals(void **state) {
    (void)state;
    timings t = {.n = 3};
    const goal none = {GOAL_NONE, 0, NULL}, g = {GOAL_TIME_SHARE, 0.6, "all"};
    t.at[0] = row("all", none, 1e-3, 1, 1);
    t.at[0].shape = "other layer";
    t.at[1] = row("all", none, 1e-2, 1, 1);
    t.at[2] = row("half", g, 5.9e-3, 1, 1);
    assert_string_equal(verdict(&t, &t.at[2]), "met");
    t.at[2].seconds = 6.1e-3;
    assert_string_equal(verdict(&t, &t.at[2]), "missed");
    t.at[1].seconds = NAN;
    assert_string_equal(verdict(&t, &t.at[2]), "not known");
    t.at[1].operation = "another";
    assert_string_equal(verdict(&t, &t.at[2]), "not known");
}

/* What has no time never meets anything, whatever goal it has. */
static void times_that_are_none(void **state) {
    (void)state;
    const goal goals[] = {{GOAL_COPY_SHARE, 0.7, NULL},
                          {GOAL_FLOPS, 1, NULL},
                          {GOAL_TIME_SHARE, 0.6, "it"},
                          {GOAL_NONE, 0, NULL}};
    const double seconds[] = {NAN, 0, -1};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 3; j++) {
            timings t = {.n = 1, .copy_rate = 1, .at[0] = row("it", goals[i], seconds[j], 1, 1)};
            assert_true(isnan(reached(&t, t.at)));
            assert_string_equal(judged(goals[i], seconds[j], 1e15, 1e15), "not run");
        }
    assert_string_equal(judged(goals[3], 1e-3, 1, 1), "no goal");
}

static void exit_codes(void **state) {
    (void)state;
    const goal g = {GOAL_FLOPS, 1e12, NULL}, none = {GOAL_NONE, 0, NULL};
    timings t = {.n = 3};
    t.at[0] = row("good", g, 1, 2e12, 1);
    t.at[1] = row("not run", g, NAN, 0, 0);
    t.at[2] = row("no goal", none, 1, 1, 1);
    assert_int_equal(exit_of(&t, false), 0);
    t.at[0].flops = 1e11;
    assert_int_equal(exit_of(&t, false), 1); /* missed */
    assert_int_equal(exit_of(&t, true), 0);  /* which says nothing on the emulated device */
    assert_int_equal(count_verdicts(&t, "missed", true), 1);
    assert_int_equal(count_verdicts(&t, "not run", true), 1);
    assert_int_equal(count_verdicts(&t, "met", true), 0);
    t.at[2].wrong = true;
    assert_int_equal(exit_of(&t, true), 1);
    assert_int_equal(count_verdicts(&t, "wrong", false), 1);
    assert_int_equal(count_verdicts(&t, "wrong", true), 0);
}

/* A wrong result is wrong however fast it was. */
static void wrong_results(void **state) {
    (void)state;
    timings t = {.n = 1, .copy_rate = 1, .matrix_rate = 1};
    t.at[0] = row("it", (goal){GOAL_FLOPS, 1, NULL}, 1, 2, 1);
    assert_string_equal(verdict(&t, t.at), "met");
    t.at[0].wrong = true;
    assert_string_equal(verdict(&t, t.at), "wrong");
    assert_int_equal(count_verdicts(&t, "met", true), 0);
}

/* Nor is a time worth anything when nothing holds what it wrote, its own or that it is a share of.
 */
static void results_not_held(void **state) {
    (void)state;
    timings t = {.n = 2, .copy_rate = 1, .matrix_rate = 1};
    t.at[0] = row("all", (goal){GOAL_FLOPS, 1, NULL}, 1, 2, 1);
    t.at[1] = row("half", (goal){GOAL_TIME_SHARE, 0.6, "all"}, 0.5, 1, 1);
    assert_string_equal(verdict(&t, &t.at[1]), "met");
    assert_int_equal(exit_of(&t, true), 0);
    t.at[0].held = false;
    assert_string_equal(verdict(&t, t.at), "not held");
    assert_string_equal(verdict(&t, &t.at[1]), "not known");
    assert_int_equal(count_verdicts(&t, "met", true), 0);
    assert_int_equal(exit_of(&t, true), 1);
    t.at[0].seconds = NAN; /* never timed: nothing to hold */
    assert_string_equal(verdict(&t, t.at), "not run");
    assert_int_equal(exit_of(&t, true), 0);
}

static void floors(void **state) {
    (void)state;
    timings t = {.n = 1, .copy_rate = 4e12, .matrix_rate = 8e14};
    t.at[0] = row("it", (goal){GOAL_NONE, 0, NULL}, 1, 8e14, 2e12);
    assert_true(floor_of(&t, t.at) == 1); /* of its FLOPs */
    t.at[0].bytes = 8e12;
    assert_true(floor_of(&t, t.at) == 2); /* of its bytes */
    t.matrix_rate = 0;
    assert_true(floor_of(&t, t.at) == 0); /* no ceiling for its FLOPs */
}

/* The table and the JSON say what the verdict says, and JSON holds no NaN. */
static void texts(void **state) {
    (void)state;
    timings t = {.n = 2, .copy_rate = 4e12};
    t.at[0] = row("slow", (goal){GOAL_COPY_SHARE, 0.8, NULL}, 1, 0, 1e12);
    t.at[1] = row("absent", (goal){GOAL_FLOPS, 1e12, NULL}, NAN, NAN, NAN);
    strcpy(t.at[1].message, "said \"no\"");
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    assert_non_null(file);
    print_json(file, &t, false);
    print_table(file, &t, NULL, false);
    fclose(file);
    assert_non_null(strstr(text, "\"goal\": 0.8, \"goal_is\": \"share of copy bytes/s, at least\", "
                                 "\"reached\": 0.25, \"verdict\": \"missed\""));
    assert_non_null(strstr(text, "\"seconds\": null, \"flops\": null, \"bytes\": null"));
    assert_non_null(strstr(text, "\"verdict\": \"not run\", \"message\": \"said \\\"no\\\"\""));
    assert_non_null(strstr(text, ">= 80% copy: 25%"));
    assert_non_null(strstr(text, "not run: said"));
    assert_non_null(strstr(
        text, "goals: 0 met, 1 missed, 0 not known, 1 not run; 0 operations wrong, 0 not held"));
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(copy_goals),
                                       cmocka_unit_test(flops_goals),
                                       cmocka_unit_test(time_goals),
                                       cmocka_unit_test(times_that_are_none),
                                       cmocka_unit_test(exit_codes),
                                       cmocka_unit_test(wrong_results),
                                       cmocka_unit_test(results_not_held),
                                       cmocka_unit_test(floors),
                                       cmocka_unit_test(texts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
