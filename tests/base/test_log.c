#include "tests/harness.h"

#include "common/base/log.h"

#include <time.h>

typedef struct capture {
    char *text;
    size_t size;
    mz_log log;
} capture;

static capture begin(int verbosity) {
    capture c = {0};
    return c.log.verbosity = verbosity, c;
}

static void messages_by_verbosity(void **state) {
    static const char *const wanted[] = {"warning: w 3\n", "i 1\nwarning: w 3\n",
                                         "i 1\nn 2\nwarning: w 3\n"};
    for (int v = -1; v <= 1; v++) {
        capture c = begin(v);
        c.log.stream = open_memstream(&c.text, &c.size);
        mz_info(&c.log, "i %d", 1);
        mz_note(&c.log, "n %d", 2);
        mz_warn(&c.log, "w %d", 3);
        fclose(c.log.stream);
        assert_string_equal(c.text, wanted[v + 1]);
        free(c.text);
    }
    mz_log silent = {.stream = NULL, .verbosity = 1};
    mz_info(&silent, "nobody reads this");
    mz_warn(&silent, "nor this");
}

static void choosing(void **state) {
    mz_log log = {.verbosity = 0};
    mz_log_choose(&log, false, false);
    assert_int_equal(log.verbosity, 0);
    mz_log_choose(&log, false, true);
    assert_int_equal(log.verbosity, 1);
    mz_log_choose(&log, true, true);
    assert_int_equal(log.verbosity, -1);
}

static void a_file_is_no_terminal(void **state) {
    FILE *file = tmpfile();
    assert_non_null(file);
    mz_log log = mz_log_make(file, 0);
    assert_false(log.tty || log.color);
    fclose(file);
}

static void progress_draws_and_clears(void **state) {
    capture c = begin(0);
    c.log.stream = open_memstream(&c.text, &c.size);
    c.log.tty = true;
    mz_progress p = mz_progress_start(&c.log, "reading", "pairs", 1000000);
    mz_progress_update(&p, 10);
    assert_false(p.drawn); /* too early to bother anyone */
    p.printed -= 1;
    p.started -= 1;
    mz_progress_update(&p, 250000);
    assert_true(p.drawn);
    mz_progress_end(&p);
    fclose(c.log.stream);
    assert_non_null(strstr(c.text, "\r\033[Kreading: 250 k of 1 M pairs, "));
    assert_non_null(strstr(c.text, "3 s left"));
    assert_string_equal(c.text + c.size - 4, "\r\033[K");
    free(c.text);
}

static void progress_is_rare_in_files_and_silent_when_quiet(void **state) {
    for (int v = -1; v <= 0; v++) {
        capture c = begin(v);
        c.log.stream = open_memstream(&c.text, &c.size);
        mz_progress p = mz_progress_start(&c.log, "simulating", "steps", 0);
        p.printed -= 5;
        mz_progress_update(&p, 1);
        p.printed -= 6;
        mz_progress_update(&p, 2);
        mz_progress_end(&p);
        fclose(c.log.stream);
        if (v < 0)
            assert_int_equal(c.size, 0);
        else
            assert_ptr_equal(strstr(c.text, "simulating: 2 steps, "), c.text);
        free(c.text);
    }
}

static void the_clock_runs(void **state) {
    double before = mz_now();
    struct timespec pause = {0, 2000000};
    nanosleep(&pause, NULL);
    assert_true(mz_now() - before >= 0.002);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_by_verbosity),
        cmocka_unit_test(choosing),
        cmocka_unit_test(a_file_is_no_terminal),
        cmocka_unit_test(progress_draws_and_clears),
        cmocka_unit_test(progress_is_rare_in_files_and_silent_when_quiet),
        cmocka_unit_test(the_clock_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
