#include "tests/harness.h"

#include "common/base/units.h"

static void quantities(void **state) {
    static const struct {
        const char *text;
        mz_unit unit;
        double value;
    } good[] = {
        {"0.5", MZ_UNIT_NONE, 0.5},
        {" 32k ", MZ_UNIT_NONE, 32000},
        {"1.5M", MZ_UNIT_NONE, 1.5e6},
        {"+2e3", MZ_UNIT_NONE, 2000},
        {".25", MZ_UNIT_NONE, 0.25},
        {"80 GiB", MZ_UNIT_BYTES, 85899345920.0},
        {"96MB", MZ_UNIT_BYTES, 96e6},
        {"1024", MZ_UNIT_BYTES, 1024},
        {"400 GB/s", MZ_UNIT_RATE, 400e9},
        {"100 Gb/s", MZ_UNIT_RATE, 12.5e9},
        {"25 GiB/s", MZ_UNIT_RATE, 26843545600.0},
        {"312 TFLOP/s", MZ_UNIT_FLOPS, 312e12},
        {"19.5 TFLOPS", MZ_UNIT_FLOPS, 19.5e12},
        {"5 us", MZ_UNIT_SECONDS, 5e-6},
        {"5 µs", MZ_UNIT_SECONDS, 5e-6},
        {"90 ns", MZ_UNIT_SECONDS, 90e-9},
        {"2 s", MZ_UNIT_SECONDS, 2},
        {"1410 MHz", MZ_UNIT_HERTZ, 1410e6},
        {"0", MZ_UNIT_SECONDS, 0},
    };
    for (int i = 0; i < COUNT_OF(good); i++) {
        mz_err err = {0};
        double value = -1;
        assert_ok(mz_unit_parse(good[i].text, good[i].unit, "x", &value, &err), &err);
        if (value != good[i].value)
            fail_msg("%s: %.17g, not %.17g", good[i].text, value, good[i].value);
    }
}

static void bad_quantities(void **state) {
    static const struct {
        const char *text;
        mz_unit unit;
        const char *message;
    } bad[] = {
        {"", MZ_UNIT_NONE, "is not a number"},  {"nan", MZ_UNIT_NONE, "is not a number"},
        {"inf", MZ_UNIT_BYTES, "is not bytes"}, {"0x10", MZ_UNIT_NONE, "is not a number"},
        {"1e999", MZ_UNIT_NONE, "too large"},   {"-1", MZ_UNIT_SECONDS, "negative"},
        {"80 gib", MZ_UNIT_BYTES, "80 GiB"},    {"5 parsecs", MZ_UNIT_SECONDS, "5 us"},
        {"400 GB", MZ_UNIT_RATE, "400 GB/s"},   {"5 5", MZ_UNIT_NONE, "is not a number"},
    };
    for (int i = 0; i < COUNT_OF(bad); i++) {
        mz_err err;
        double value;
        assert_fails(mz_unit_parse(bad[i].text, bad[i].unit, "link bandwidth", &value, &err),
                     MZ_EINPUT, bad[i].message, &err);
        assert_ptr_equal(strstr(err.msg, "link bandwidth: "), err.msg);
    }
}

static void whole_numbers(void **state) {
    static const struct {
        const char *text;
        int64_t value;
    } good[] = {
        {"0", 0},
        {"-7", -7},
        {"32k", 32000},
        {"1.5k", 1500},
        {"1e6", 1000000},
        {"2.5e3", 2500},
        {"80 GiB", 85899345920},
        {"9007199254740993", 9007199254740993}, /* 2^53 + 1: exact, not through a double */
        {"9223372036854775807", INT64_MAX},
        {"100e-2", 1},
    };
    for (int i = 0; i < COUNT_OF(good); i++) {
        mz_err err = {0};
        int64_t value = 1;
        assert_ok(mz_int_parse(good[i].text, "n", INT64_MIN, INT64_MAX, &value, &err), &err);
        assert_int_equal(value, good[i].value);
    }
}

static void bad_whole_numbers(void **state) {
    static const struct {
        const char *text, *message;
    } bad[] = {
        {"", "is not a whole number"},
        {"abc", "is not a whole number"},
        {"1.5", "is not a whole number"},
        {"0.0001k", "is not a whole number"},
        {"9223372036854775808", "2^63"},
        {"10000000000000T", "2^63"},
        {"1e30", "2^63"},
        {"101", "outside [1, 100]"},
        {"0", "outside [1, 100]"},
        {"5 x", "is not a whole number"},
        {"-", "is not a whole number"},
        {"12 GB/s", "is not a whole number"},
    };
    for (int i = 0; i < COUNT_OF(bad); i++) {
        mz_err err;
        int64_t value;
        assert_fails(mz_int_parse(bad[i].text, "--ranks", 1, 100, &value, &err), MZ_EINPUT,
                     bad[i].message, &err);
        assert_ptr_equal(strstr(err.msg, "--ranks: "), err.msg);
    }
}

static void human_forms(void **state) {
    char b[32];
    assert_string_equal(mz_format_bytes(0, b, sizeof b), "0 B");
    assert_string_equal(mz_format_bytes(1023, b, sizeof b), "1023 B");
    assert_string_equal(mz_format_bytes(31.33 * 1073741824, b, sizeof b), "31.33 GiB");
    assert_string_equal(mz_format_seconds(0, b, sizeof b), "0 s");
    assert_string_equal(mz_format_seconds(1.25e-3, b, sizeof b), "1.25 ms");
    assert_string_equal(mz_format_seconds(5e-6, b, sizeof b), "5 us");
    assert_string_equal(mz_format_seconds(12345, b, sizeof b), "12345 s");
    assert_string_equal(mz_format_rate(400e9, b, sizeof b), "400 GB/s");
    assert_string_equal(mz_format_bytes(0.0 / 0.0, b, sizeof b), "-");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantities),    cmocka_unit_test(bad_quantities),
        cmocka_unit_test(whole_numbers), cmocka_unit_test(bad_whole_numbers),
        cmocka_unit_test(human_forms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
