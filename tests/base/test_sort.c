/* Against the library's sort, on random elements of several sizes, with ties, sorted and reversed.
 */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "common/base/sort.h"

enum { COUNT_MAX = 3000, SIZE_MAX_BYTES = 100 };

static size_t size; /* of an element: the comparison is told nothing else */

static int by_bytes(const void *a, const void *b) {
    return memcmp(a, b, size);
}

/* `values` different bytes: with few, whole elements are equal. */
static void draw(unsigned char *base, size_t count, uint64_t values, mz_rng *rng) {
    for (size_t i = 0; i < count * size; i++)
        base[i] = (unsigned char)mz_rng_below(rng, values);
}

static void reverse(unsigned char *base, size_t count) {
    unsigned char held[SIZE_MAX_BYTES];
    for (size_t a = 0, b = count - 1; a < b; a++, b--) {
        memcpy(held, base + a * size, size);
        memcpy(base + a * size, base + b * size, size);
        memcpy(base + b * size, held, size);
    }
}

static void like_the_library(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 4, 16, 24, 64, 65, SIZE_MAX_BYTES};
    static unsigned char mine[COUNT_MAX * SIZE_MAX_BYTES], theirs[sizeof mine];
    for (int c = 0; c < 420; c++) {
        mz_rng rng = mz_rng_make(11, (uint64_t)c);
        size = sizes[c % 7];
        const size_t count = c < 70 ? (size_t)c / 7 : (size_t)mz_rng_below(&rng, COUNT_MAX) + 1;
        draw(mine, count, c % 3 == 0 ? 2 : 256, &rng);
        memcpy(theirs, mine, count * size);
        qsort(theirs, count, size, by_bytes);
        mz_sort_in_place(mine, count, size, by_bytes);
        assert_memory_equal(mine, theirs, count * size);
        mz_sort_in_place(mine, count, size, by_bytes);
        assert_memory_equal(mine, theirs, count * size);
        if (count > 0)
            reverse(mine, count);
        mz_sort_in_place(mine, count, size, by_bytes);
        assert_memory_equal(mine, theirs, count * size);
    }
    mz_sort_in_place(NULL, 0, 8, by_bytes);
}

static size_t comparisons;

static int counting(const void *a, const void *b) {
    const int *x = a, *y = b;
    comparisons++;
    return (*x > *y) - (*x < *y);
}

/* No order of elements makes it slow: n log2 n comparisons twice, and one look for order. */
static void never_quadratic(void **state) {
    (void)state;
    enum { N = 4096, LOG = 12 };
    static int value[N];
    for (int kind = 0; kind < 5; kind++) {
        for (int i = 0; i < N; i++)
            value[i] = kind == 0   ? i
                       : kind == 1 ? -i
                       : kind == 2 ? i % 2
                       : kind == 3 ? i ^ 85
                                   : i % 64;
        comparisons = 0;
        mz_sort_in_place(value, N, sizeof *value, counting);
        assert_true(comparisons < (size_t)N * (2 * LOG + 4));
        assert_true(kind != 0 || comparisons < N);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(like_the_library),
                                       cmocka_unit_test(never_quadratic)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
