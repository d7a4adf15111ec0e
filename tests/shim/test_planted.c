/* The emulation: right results for right kernels in every order of threads, and a report for each
 * planted mistake. Mistakes end the process, so each runs in a child. `test_planted races` expects
 * the race detector to report the barrier that this build leaves out. */
#include "tests/harness.h"
#include "tests/shim/planted.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N = 64 };

static bool neighbours_right(void) {
    float from[N], to[N], want[N], next[N];
    for (int i = 0; i < N; i++)
        from[i] = want[i] = (float)(i * i % 17);
    for (int r = 0; r < 3; r++) {
        for (int i = 0; i < N; i++)
            next[i] = want[(i + 1) % N] + want[(i + N - 1) % N];
        memcpy(want, next, sizeof want);
    }
    assert_int_equal(planted_neighbours(from, to, 3), 0);
    return memcmp(to, want, sizeof want) == 0;
}

static void right_in_any_order(void **state) {
    const char *seeds[] = {"0", "1", "2", "3"};
    for (int i = 0; i < COUNT_OF(seeds); i++) {
        setenv("CUEMU_SEED", seeds[i], 1);
        assert_true(neighbours_right());
    }
}

static void copies_need_their_wait(void **state) {
    _Alignas(16) float from[128];
    float to[128];
    for (int i = 0; i < 128; i++)
        from[i] = (float)i;
    assert_int_equal(planted_copy(from, to, true), 0);
    for (int i = 0; i < 128; i++)
        assert_true(to[i] == (i < 124 ? (float)i : 0)); /* the last lane's copy is of zeros */
    assert_int_equal(planted_copy(from, to, false), 0);
    for (int i = 0; i < 128; i++)
        assert_true(isnan(to[i]));
}

/* Element (row, col) of tile i is 64 i + 8 row + col. */
static void matrices_as_the_manual_says(void **state) {
    uint16_t from[256];
    unsigned words[128], to[128];
    for (int i = 0; i < 256; i++)
        from[i] = (uint16_t)i;
    memcpy(words, from, sizeof words);
    for (int transposed = 0; transposed < 2; transposed++) {
        assert_int_equal(planted_matrices(words, to, transposed), 0);
        for (int lane = 0; lane < 32; lane++)
            for (int tile = 0; tile < 4; tile++) {
                const unsigned row = (unsigned)lane / 4, col = (unsigned)lane % 4 * 2;
                const unsigned base = 64 * (unsigned)tile;
                const unsigned first = base + (transposed ? 8 * col + row : 8 * row + col);
                assert_int_equal(to[4 * lane + tile], first | (first + (transposed ? 8 : 1)) << 16);
            }
    }
}

/* What a child that makes the mistake writes to its standard error; it must not end well. */
static void report_of(int (*mistake)(float *), char *text, size_t size) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        static float to[N];
        dup2(ends[1], 2);
        signal(SIGABRT, SIG_DFL);
        mistake(to);
        _exit(0);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t got; n + 1 < size && (got = read(ends[0], text + n, size - 1 - n)) > 0;)
        n += (size_t)got;
    text[n] = '\0';
    close(ends[0]);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_false(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void mistakes_are_reported(void **state) {
    char text[4096];
    report_of(planted_divergent, text, sizeof text);
    assert_non_null(strstr(text, "wait at different __syncthreads()"));
    assert_non_null(strstr(text, "divergent_kernel"));
    report_of(planted_absent, text, sizeof text);
    assert_non_null(strstr(text, "names a lane that"));
#if defined(__SANITIZE_ADDRESS__)
    report_of(planted_past_end, text, sizeof text);
    assert_non_null(strstr(text, "heap-buffer-overflow"));
#endif
}

static int neighbours_once(float *to) {
    float from[N] = {0};
    return planted_neighbours(from, to, 3);
}

/* Without the sanitizer a missing barrier shows as results that depend on the order. */
static void missing_barrier_is_found(void **state) {
#if defined(__SANITIZE_THREAD__)
    char text[4096];
    report_of(neighbours_once, text, sizeof text);
    assert_non_null(strstr(text, "data race"));
    assert_non_null(strstr(text, "planted.cu"));
#else
    int wrong = 0;
    const char *seeds[] = {"0", "1", "2", "3"};
    for (int i = 0; i < COUNT_OF(seeds); i++) {
        setenv("CUEMU_SEED", seeds[i], 1);
        wrong += !neighbours_right();
    }
    assert_true(wrong > 0);
    (void)neighbours_once;
#endif
}

int main(int argc, char **argv) {
    const struct CMUnitTest sound[] = {
        cmocka_unit_test(right_in_any_order),
        cmocka_unit_test(copies_need_their_wait),
        cmocka_unit_test(matrices_as_the_manual_says),
        cmocka_unit_test(mistakes_are_reported),
    };
    const struct CMUnitTest broken[] = {cmocka_unit_test(missing_barrier_is_found)};
    return argc > 1 ? cmocka_run_group_tests(broken, NULL, NULL)
                    : cmocka_run_group_tests(sound, NULL, NULL);
}
