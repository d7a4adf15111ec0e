#include "tests/harness.h"

static void message_code_and_context(void **state) {
    mz_err err = {0};
    assert_int_equal(mz_fail(&err, MZ_EINPUT, "row %d is bad", 7), MZ_EINPUT);
    assert_string_equal(err.msg, "row 7 is bad");
    assert_int_equal(mz_err_prefix(&err, "file %s", "a.h5"), MZ_EINPUT);
    assert_string_equal(err.msg, "file a.h5: row 7 is bad");
    assert_int_equal(err.code, MZ_EINPUT);
}

static void one_error_is_one_line(void **state) {
    mz_err err;
    mz_fail(&err, MZ_EINPUT, "a\nb\tc\x1b[31m\x7f");
    assert_string_equal(err.msg, "a?b?c?[31m?");
}

static void long_messages_are_cut(void **state) {
    mz_err err;
    char text[2 * MZ_ERR_MAX];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = 0;
    mz_fail(&err, MZ_EINPUT, "%s", text);
    assert_int_equal(strlen(err.msg), MZ_ERR_MAX - 1);
    assert_string_equal(err.msg + MZ_ERR_MAX - 4, "...");
    mz_err_prefix(&err, "%s", text);
    assert_int_equal(strlen(err.msg), MZ_ERR_MAX - 1);
    assert_string_equal(err.msg + MZ_ERR_MAX - 4, "...");
}

static void exit_codes(void **state) {
    static const int wanted[][2] = {{MZ_OK, 0},        {MZ_ECHECK, 1},    {MZ_EINPUT, 2},
                                    {MZ_EHARDWARE, 3}, {MZ_EINTERNAL, 4}, {MZ_ENOMEM, 4},
                                    {MZ_EABORTED, 130}};
    for (int i = 0; i < COUNT_OF(wanted); i++)
        assert_int_equal(mz_exit_code((mz_code)wanted[i][0]), wanted[i][1]);
    mz_err err;
    assert_int_equal(mz_fail_nomem(&err, "a plan"), MZ_ENOMEM);
    assert_string_equal(err.msg, "out of memory while allocating a plan");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(message_code_and_context),
        cmocka_unit_test(one_error_is_one_line),
        cmocka_unit_test(long_messages_are_cut),
        cmocka_unit_test(exit_codes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
