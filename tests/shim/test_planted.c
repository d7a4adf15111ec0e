/* The emulation: right results for right kernels in every order of threads, and a report for each
 * planted mistake. Mistakes end the process, so each runs in a child. `test_planted races` expects
 * the race detector to report the barrier that this build leaves out; `test_planted blocks` runs
 * with CUEMU_INTERBLOCK=1. */
#include "tests/harness.h"
#include "tests/shim/planted.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

/* GCC's names for the sanitizers; clang's. */
#ifdef __SANITIZE_ADDRESS__
#define PLANTED_ADDRESS
#endif
#ifdef __SANITIZE_THREAD__
#define PLANTED_THREADS
#endif
#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define PLANTED_ADDRESS
#endif
#if __has_feature(thread_sanitizer)
#define PLANTED_THREADS
#endif
#endif

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
static void report_of(int (*mistake)(float *to, int which), int which, char *text, size_t size) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        static float to[PLANTED_LINES * PLANTED_COLS];
        dup2(ends[1], 2);
        signal(SIGABRT, SIG_DFL);
        _exit(mistake(to, which));
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

static int divergent(float *to, int which) {
    return planted_divergent(to);
}
static int absent(float *to, int which) {
    return planted_absent(to);
}
static int default_stream(float *to, int which) {
    return planted_write(to, true);
}
#ifdef PLANTED_ADDRESS
static int past_end(float *to, int which) {
    return planted_past_end(to);
}
#endif

static void mistakes_are_reported(void **state) {
    char text[4096];
    report_of(divergent, 0, text, sizeof text);
    assert_non_null(strstr(text, "wait at different __syncthreads()"));
    assert_non_null(strstr(text, "divergent_kernel"));
    report_of(absent, 0, text, sizeof text);
    assert_non_null(strstr(text, "names a lane that"));
    float to[32] = {0};
    assert_int_equal(planted_write(to, false), 0);
    assert_true(to[31] == 1);
    report_of(default_stream, 0, text, sizeof text);
    assert_non_null(strstr(text, "the default stream"));
#ifdef PLANTED_ADDRESS
    report_of(past_end, 0, text, sizeof text);
    assert_non_null(strstr(text, "heap-buffer-overflow"));
#endif
}

/* ---- warpgroups ---------------------------------------------------------------------------------
 */

/* bf16 of a small whole number: sums of its products are exact. */
static uint16_t whole(int n) {
    const float f = (float)n;
    uint32_t word;
    memcpy(&word, &f, sizeof word);
    return (uint16_t)(word >> 16);
}

/* 0: the product came out right. */
static int product(float *to, int mistake) {
    enum { L = PLANTED_LINES, C = PLANTED_COLS, D = PLANTED_DEPTH };
    static int x[PLANTED_ROUNDS][L][D], y[PLANTED_ROUNDS][C][D];
    static _Alignas(16) uint16_t a[PLANTED_ROUNDS][L][D], b[PLANTED_ROUNDS][C][D];
    for (int r = 0; r < PLANTED_ROUNDS; r++)
        for (int d = 0; d < D; d++) {
            for (int l = 0; l < L; l++)
                a[r][l][d] = whole(x[r][l][d] = (r * 31 + l * 17 + d * 7) % 23 - 11);
            for (int c = 0; c < C; c++)
                b[r][c][d] = whole(y[r][c][d] = (r * 13 + c * 29 + d * 5) % 19 - 9);
        }
    assert_int_equal(planted_product(&a[0][0][0], &b[0][0][0], to, (planted_mistake)mistake), 0);
    for (int l = 0; l < L; l++)
        for (int c = 0; c < C; c++) {
            int want = 0;
            for (int r = 0; r < PLANTED_ROUNDS; r++)
                for (int d = 0; d < D; d++)
                    want += x[r][l][d] * y[r][c][d];
            if (!(to[l * C + c] == (float)want))
                return 1;
        }
    return 0;
}

static void products_right_in_any_order(void **state) {
    const char *seeds[] = {"0", "1", "2", "3", "4"};
    for (int i = 0; i < COUNT_OF(seeds); i++) {
        float to[PLANTED_LINES * PLANTED_COLS];
        setenv("CUEMU_SEED", seeds[i], 1);
        assert_int_equal(product(to, NO_MISTAKE), 0);
    }
}

/* What the emulation says; NULL: nothing, but the result is wrong. */
static const char *const product_mistakes[MISTAKES] = {
    [NO_FULL_WAIT] = "reads shared memory that a copy in flight writes",
    [NO_EMPTY_WAIT] = "copy",
    [EARLY_RELEASE] = "overwrites shared memory that a wgmma in flight reads",
    [MISSING_ARRIVAL] = "an mbarrier for a phase that nothing completes",
    [NO_SYNC_OF_BARRIERS] = "not been initialised",
    [NO_SWIZZLE] = NULL,
    [MISALIGNED_SLOT] = NULL,
    [WRONG_STRIDE] = NULL,
    [NO_PROXY_FENCE] = "without a fence.proxy.async",
    [NO_WGMMA_FENCE] = "no wgmma.fence",
    [NO_COMMIT] = "",
    [EARLY_READ] = NULL,
    [EARLY_WRITE] = "sums were written",
    [WARPS_DIFFER] = "ask for different products",
    [TOO_MANY_REGISTERS] = "more registers than the block has",
};

static void product_mistakes_are_found(void **state) {
    for (int m = NO_MISTAKE + 1; m < MISTAKES; m++) {
        char text[4096];
        setenv("CUEMU_SEED", m == NO_SYNC_OF_BARRIERS ? "1" : "0", 1);
        report_of(product, m, text, sizeof text);
        if (product_mistakes[m] && !strstr(text, product_mistakes[m]))
            fail_msg("mistake %d is reported as: %s", m, text);
    }
}

static void products_need_their_device(void **state) {
    const char *others[] = {"80", "100"};
    for (int i = 0; i < COUNT_OF(others); i++) {
        char text[4096];
        setenv("CUEMU_CAPABILITY", others[i], 1);
        report_of(product, NO_MISTAKE, text, sizeof text);
        assert_non_null(strstr(text, "not of compute capability 9.0"));
    }
    unsetenv("CUEMU_CAPABILITY");
}

static int blocks_race(float *to, int which) {
    static unsigned sum;
    return planted_blocks(&sum, 3, false);
}

/* With CUEMU_INTERBLOCK=1 the race detector takes blocks for unordered, and atomics for what they
 * are. Elsewhere blocks run one after another, and only the sum is looked at. */
static void races_between_blocks_are_found(void **state) {
    unsigned sum = 0;
    assert_int_equal(planted_blocks(&sum, 3, true), 0);
    assert_int_equal(sum, 3);
#ifdef PLANTED_THREADS
    char text[4096];
    report_of(blocks_race, 0, text, sizeof text);
    assert_non_null(strstr(text, "data race"));
    assert_non_null(strstr(text, "blocks_kernel"));
#else
    (void)blocks_race;
#endif
}

static int neighbours_once(float *to, int which) {
    float from[N] = {0};
    return planted_neighbours(from, to, 3);
}

/* Without the sanitizer a missing barrier shows as results that depend on the order. */
static void missing_barrier_is_found(void **state) {
#ifdef PLANTED_THREADS
    char text[4096];
    report_of(neighbours_once, 0, text, sizeof text);
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
        cmocka_unit_test(right_in_any_order),          cmocka_unit_test(copies_need_their_wait),
        cmocka_unit_test(matrices_as_the_manual_says), cmocka_unit_test(mistakes_are_reported),
        cmocka_unit_test(products_right_in_any_order), cmocka_unit_test(product_mistakes_are_found),
        cmocka_unit_test(products_need_their_device),
    };
    const struct CMUnitTest broken[] = {cmocka_unit_test(missing_barrier_is_found)};
    const struct CMUnitTest blocks[] = {cmocka_unit_test(races_between_blocks_are_found)};
    if (argc > 1 && strcmp(argv[1], "blocks") == 0)
        return cmocka_run_group_tests(blocks, NULL, NULL);
    return argc > 1 ? cmocka_run_group_tests(broken, NULL, NULL)
                    : cmocka_run_group_tests(sound, NULL, NULL);
}
