/* Means by hand; order against what a list of integers must become. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "common/base/stat.h"

#include <math.h>

static void middle_means(void **state) {
    double seven[] = {100, 6, 4, 5, 3, 2, -90}, six[] = {3, 1, 2, 30, 5, 7},
           same[] = {0.1, 0.1, 0.1};
    assert_true(fabs(mz_middle_mean(seven, 7, 1) - 4) < 1e-12);
    assert_true(fabs(mz_middle_mean(seven, 7, 3) - 4) < 1e-12); /* the median */
    assert_true(fabs(mz_middle_mean(six, 6, 0) - 8) < 1e-12);
    assert_true(mz_middle_mean(same, 3, 0) == 0.1);
    assert_true(isnan(mz_middle_mean(same, 2, 1)));
    assert_true(isnan(mz_middle_mean(NULL, 0, 0)));
}

static void order(void **state) {
    double value[101];
    for (int i = 0; i <= 100; i++)
        value[i] = i;
    mz_rng rng = mz_rng_make(3, 1);
    for (int i = 100; i > 0; i--) {
        const int other = (int)mz_rng_below(&rng, (uint64_t)i + 1);
        const double v = value[i];
        value[i] = value[other];
        value[other] = v;
    }
    mz_sort(value, 101);
    for (int i = 0; i <= 100; i++)
        assert_true(value[i] == i);
    mz_sort(NULL, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(middle_means), cmocka_unit_test(order)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
