#include "tests/harness.h"

#include "common/base/load.h"

static void sums_by_expert_and_source(void **state) {
    int64_t count[] = {1, 2, 3, 0, 0, 0, 10, 0, (int64_t)1 << 40};
    int64_t total[] = {-1, -1, -1}, source[] = {-1, -1, -1};
    mz_load load = {.sources = 3, .experts = 3, .count = count, .total = total, .source = source};
    load.pairs = 99;
    mz_load_sum(&load);
    const int64_t big = (int64_t)1 << 40;
    assert_int_equal(total[0], 11);
    assert_int_equal(total[1], 2);
    assert_int_equal(total[2], 3 + big);
    assert_int_equal(source[0], 6);
    assert_int_equal(source[1], 0);
    assert_int_equal(source[2], 10 + big);
    assert_int_equal(load.pairs, 16 + big);
}

static void one_source_without_tokens(void **state) {
    int64_t count[2] = {0, 0}, total[2] = {5, 5}, source[1] = {5};
    mz_load load = {.sources = 1, .experts = 2, .count = count, .total = total, .source = source};
    mz_load_sum(&load);
    assert_int_equal(total[0] + total[1] + source[0] + load.pairs, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_by_expert_and_source),
        cmocka_unit_test(one_source_without_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
