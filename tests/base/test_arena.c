#include "tests/harness.h"

#include "common/base/arena.h"

static void zeroed_aligned_and_apart(void **state) {
    mz_arena arena = {0};
    unsigned char *block[400];
    size_t size[400];
    for (int i = 0; i < 400; i++) {
        size[i] = (size_t)(i * 37 % 5000) + (i % 50 == 0 ? 100000 : 0);
        block[i] = mz_arena_alloc(&arena, size[i], 1);
        assert_non_null(block[i]);
        assert_int_equal((uintptr_t)block[i] % 16, 0);
        for (size_t k = 0; k < size[i]; k++)
            assert_int_equal(block[i][k], 0);
        memset(block[i], i % 255 + 1, size[i]);
    }
    for (int i = 0; i < 400; i++)
        for (size_t k = 0; k < size[i]; k++)
            assert_int_equal(block[i][k], i % 255 + 1);
    assert_true(arena.total > 0);
    mz_arena_free(&arena);
    assert_null(arena.head);
    assert_int_equal(arena.total, 0);
    assert_non_null(mz_arena_alloc(&arena, 1, 1));
    mz_arena_free(&arena);
}

static void impossible_sizes_are_refused(void **state) {
    mz_arena arena = {0};
    assert_null(mz_arena_alloc(&arena, SIZE_MAX / 8, 16));
    assert_null(mz_arena_alloc(&arena, SIZE_MAX, 1));
    assert_null(mz_arena_alloc(&arena, SIZE_MAX - 15, 1));
    assert_null(mz_calloc(SIZE_MAX / 2, 4));
    mz_arena_free(&arena);
}

static void strings(void **state) {
    mz_arena arena = {0};
    assert_string_equal(mz_arena_strdup(&arena, "expert"), "expert");
    assert_string_equal(mz_arena_strdup(&arena, ""), "");
    assert_string_equal(mz_arena_printf(&arena, "%s-%03d", "rank", 7), "rank-007");
    int32_t *numbers = MZ_NEW(&arena, int32_t, 10);
    assert_int_equal(numbers[9], 0);
    mz_arena_free(&arena);
}

static void growing_keeps_content(void **state) {
    void *data = NULL;
    size_t capacity = 0;
    for (size_t i = 0; i < 1000; i++) {
        assert_true(mz_grow(&data, &capacity, i + 1, sizeof(uint32_t)));
        assert_true(capacity > i);
        ((uint32_t *)data)[i] = (uint32_t)(i * i);
    }
    for (size_t i = 0; i < 1000; i++)
        assert_int_equal(((uint32_t *)data)[i], i * i);
    size_t before = capacity;
    assert_false(mz_grow(&data, &capacity, SIZE_MAX / 2 + 2, 1));
    assert_false(mz_grow(&data, &capacity, SIZE_MAX / 4, 16));
    assert_int_equal(capacity, before);
    free(data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(zeroed_aligned_and_apart),
        cmocka_unit_test(impossible_sizes_are_refused),
        cmocka_unit_test(strings),
        cmocka_unit_test(growing_keeps_content),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
