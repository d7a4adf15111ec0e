/* The .npy reader and the CSV reader on hand-made bytes. */
#include "tests/harness.h"

#include "traces/csv.h"
#include "traces/npy.h"

#include <math.h>

typedef struct fixture {
    char directory[256], path[300];
} fixture;

static int setup(void **state) {
    static fixture f;
    make_directory(f.directory, sizeof f.directory);
    snprintf(f.path, sizeof f.path, "%s/array.npy", f.directory);
    *state = &f;
    return 0;
}

static int teardown(void **state) {
    remove_directory(((fixture *)*state)->directory);
    return 0;
}

/* Writes a file of the given format version; the header is padded as numpy does. */
static void put(const fixture *f, int version, const char *header, const void *data, size_t size) {
    unsigned char bytes[4096] = "\x93NUMPY";
    size_t start = version == 1 ? 10 : 12, text = strlen(header), total = start + text + 1;
    size_t pad = (64 - total % 64) % 64, length = text + pad + 1;
    bytes[6] = (unsigned char)version;
    bytes[8] = length & 255;
    bytes[9] = (unsigned char)(length >> 8);
    memcpy(bytes + start, header, text);
    memset(bytes + start + text, ' ', pad);
    bytes[start + text + pad] = '\n';
    memcpy(bytes + start + length, data, size);
    write_bytes(f->path, bytes, start + length + size);
}

static void integers_of_every_size(void **state) {
    const fixture *f = *state;
    static const struct {
        const char *type;
        unsigned char data[16];
        int size;
        int64_t first, second;
    } cases[] = {
        {"|u1", {0, 255}, 1, 0, 255},
        {"|i1", {0x80, 0x7f}, 1, -128, 127},
        {"<u2", {0x34, 0x12, 0xff, 0xff}, 2, 0x1234, 65535},
        {"<i2", {0xff, 0xff, 0x00, 0x80}, 2, -1, -32768},
        {"<u4", {1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff}, 4, 1, 4294967295},
        {"<i4", {0xfe, 0xff, 0xff, 0xff, 0, 0, 0, 0x80}, 4, -2, INT32_MIN},
        {"<u8",
         {5, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f},
         8,
         5,
         INT64_MAX},
        {"<i8",
         {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0x80},
         8,
         -1,
         INT64_MIN},
    };
    for (int version = 1; version <= 3; version++)
        for (int i = 0; i < COUNT_OF(cases); i++) {
            char header[128];
            mz_npy npy;
            mz_err err;
            int64_t value[2];
            snprintf(header, sizeof header,
                     "{'descr': '%s', 'fortran_order': False, 'shape': (2,), }", cases[i].type);
            put(f, version, header, cases[i].data, 2 * (size_t)cases[i].size);
            assert_ok(mz_npy_open(f->path, &npy, &err), &err);
            assert_int_equal(npy.shape.dims, 1);
            assert_int_equal(npy.shape.elements, 2);
            assert_ok(mz_npy_read_int(&npy, value, 2, &err), &err);
            assert_true(value[0] == cases[i].first && value[1] == cases[i].second);
            assert_ok(mz_npy_finish(&npy, &err), &err);
            mz_npy_close(&npy);
        }
}

static void floats_of_every_size(void **state) {
    const fixture *f = *state;
    mz_npy npy;
    mz_err err;
    float value[6];
    /* 1, -2, the largest half, the smallest subnormal, infinity, 0.333251953125 (IEEE 754). */
    const unsigned char half[12] = {0x00, 0x3c, 0x00, 0xc0, 0xff, 0x7b,
                                    0x01, 0x00, 0x00, 0x7c, 0x55, 0x35};
    put(f, 1, "{'descr': '<f2', 'fortran_order': False, 'shape': (3, 2), }", half, sizeof half);
    assert_ok(mz_npy_open(f->path, &npy, &err), &err);
    assert_int_equal(npy.shape.dims, 2);
    assert_int_equal(npy.shape.extent[0], 3);
    assert_ok(mz_npy_read_float(&npy, value, 6, &err), &err);
    assert_true(value[0] == 1 && value[1] == -2 && value[2] == 65504.0f);
    assert_true(value[3] == 5.9604644775390625e-8f && isinf(value[4]));
    assert_true(value[5] == 0.333251953125f);
    mz_npy_close(&npy);
    const double wide[2] = {0.1, -3e300};
    put(f, 1, "{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", wide, sizeof wide);
    assert_ok(mz_npy_open(f->path, &npy, &err), &err);
    assert_ok(mz_npy_read_float(&npy, value, 2, &err), &err);
    assert_true(value[0] == 0.1f && isinf(value[1]));
    mz_npy_close(&npy);
    int64_t whole;
    put(f, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", half, 4);
    assert_ok(mz_npy_open(f->path, &npy, &err), &err);
    assert_fails(mz_npy_read_int(&npy, &whole, 1, &err), MZ_EINPUT, "floats where integers", &err);
    mz_npy_close(&npy);
}

static void bad_headers_are_explained(void **state) {
    const fixture *f = *state;
    static const struct {
        const char *header, *message;
    } cases[] = {
        {"{'descr': '<u2', 'fortran_order': True, 'shape': (2,), }", "ascontiguousarray"},
        {"{'descr': '>u2', 'fortran_order': False, 'shape': (2,), }", "big-endian"},
        {"{'descr': '|O', 'fortran_order': False, 'shape': (2,), }", "Python objects"},
        {"{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (2,), }", "structured"},
        {"{'descr': '<c8', 'fortran_order': False, 'shape': (2,), }", "not supported"},
        {"{'descr': '|b1', 'fortran_order': False, 'shape': (2,), }", "not supported"},
        {"{'descr': '<f16', 'fortran_order': False, 'shape': (2,), }", "not supported"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (-2,), }", "no valid shape"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (2, x), }", "no valid shape"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': 2}", "no valid shape"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (2,", "no valid shape"},
        {"{'descr': '<u2', 'fortran_order': False, }", "lacks"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1), }", "dimensions"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999, 99999999999), }",
         "too large"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999999999999999, 2), }",
         "too large"},
        {"", "lacks"},
    };
    mz_npy npy;
    mz_err err;
    for (int i = 0; i < COUNT_OF(cases); i++) {
        put(f, 1, cases[i].header, "abcd", 4);
        assert_fails(mz_npy_open(f->path, &npy, &err), MZ_EINPUT, cases[i].message, &err);
        assert_non_null(strstr(err.msg, "array.npy"));
    }
    write_bytes(f->path, "hello, this is no array", 23);
    assert_fails(mz_npy_open(f->path, &npy, &err), MZ_EINPUT, "not a .npy file", &err);
    put(f, 9, cases[0].header, "", 0);
    assert_fails(mz_npy_open(f->path, &npy, &err), MZ_EINPUT, "not a .npy file", &err);
    write_bytes(f->path, "\x93NUMPY\x01\x00\x76\x00{'descr'", 18);
    assert_fails(mz_npy_open(f->path, &npy, &err), MZ_EINPUT, "ends within the .npy header", &err);
}

static void lengths_are_checked(void **state) {
    const fixture *f = *state;
    int64_t value[3];
    mz_npy npy;
    mz_err err;
    put(f, 2, "{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }", "abcde", 5);
    assert_ok(mz_npy_open(f->path, &npy, &err), &err);
    assert_fails(mz_npy_read_int(&npy, value, 3, &err), MZ_EINPUT, "ends at element 2 of 3", &err);
    mz_npy_close(&npy);
    put(f, 2, "{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }", "abcdefg", 7);
    assert_ok(mz_npy_open(f->path, &npy, &err), &err);
    assert_ok(mz_npy_read_int(&npy, value, 3, &err), &err);
    assert_fails(mz_npy_finish(&npy, &err), MZ_EINPUT, "bytes follow the last of 3", &err);
    mz_npy_close(&npy);
    const unsigned char large[8] = {0, 0, 0, 0, 0, 0, 0, 0x80};
    put(f, 1, "{'descr': '<u8', 'fortran_order': False, 'shape': (1,), }", large, 8);
    assert_ok(mz_npy_open(f->path, &npy, &err), &err);
    assert_fails(mz_npy_read_int(&npy, value, 1, &err), MZ_EINPUT, "element 0 is too large", &err);
    mz_npy_close(&npy);
}

/* Every header that is one flipped byte away is either read or refused in words. */
static void damaged_headers_never_crash(void **state) {
    const fixture *f = *state;
    size_t size;
    put(f, 1, "{'descr': '<u2', 'fortran_order': False, 'shape': (2, 1), }", "abcd", 4);
    unsigned char *bytes = (unsigned char *)read_bytes(f->path, &size);
    for (size_t at = 0; at < size; at++)
        for (int bit = 0; bit < 8; bit++) {
            mz_npy_shape shape;
            mz_err err = {0};
            bytes[at] ^= (unsigned char)(1 << bit);
            mz_code code = mz_npy_parse("x", bytes, size, &shape, &err);
            assert_true(code == MZ_OK || (code == MZ_EINPUT && err.msg[0]));
            bytes[at] ^= (unsigned char)(1 << bit);
        }
    free(bytes);
}

static void csv_rows(void **state) {
    const fixture *f = *state;
    mz_csv csv;
    mz_err err;
    bool end;
    int column;
    int64_t value;
    const char *text = "name,\"n, \"\"x\"\"\",tokens\r\na,b,12\n\n\"q,\"\"r\"\"\",,3.0\nc,d\n";
    write_bytes(f->path, text, strlen(text));
    assert_ok(mz_csv_open(f->path, &csv, &err), &err);
    assert_int_equal(csv.columns, 3);
    assert_ok(mz_csv_column(&csv, "n, \"x\"", &column, &err), &err);
    assert_int_equal(column, 1);
    assert_ok(mz_csv_column(&csv, "none", &column, &err), &err);
    assert_int_equal(column, -1);
    assert_fails(mz_csv_need(&csv, "none", &column, &err), MZ_EINPUT, "no column named none", &err);
    assert_ok(mz_csv_next(&csv, &end, &err), &err);
    assert_false(end);
    assert_ok(mz_csv_int(&csv, 2, 100, &value, &err), &err);
    assert_int_equal(value, 12);
    assert_fails(mz_csv_int(&csv, 2, 11, &value, &err), MZ_EINPUT, "line 2: tokens is '12'", &err);
    assert_fails(mz_csv_int(&csv, 0, 11, &value, &err), MZ_EINPUT, "line 2: name is 'a'", &err);
    assert_ok(mz_csv_next(&csv, &end, &err), &err);
    assert_string_equal(csv.field[0], "q,\"r\"");
    assert_string_equal(csv.field[1], "");
    assert_ok(mz_csv_int(&csv, 2, 3, &value, &err), &err);
    assert_int_equal(value, 3);
    assert_fails(mz_csv_next(&csv, &end, &err), MZ_EINPUT, "line 5", &err);
    mz_csv_close(&csv);
    text = "a,b,a,a\n1,2,3,4\n"; /* a name several times matters where it is asked for */
    write_bytes(f->path, text, strlen(text));
    assert_ok(mz_csv_open(f->path, &csv, &err), &err);
    assert_ok(mz_csv_need(&csv, "b", &column, &err), &err);
    assert_int_equal(column, 1);
    assert_fails(mz_csv_column(&csv, "a", &column, &err), MZ_EINPUT,
                 "line 1: two columns named a: rename one", &err);
    mz_csv_close(&csv);
    write_bytes(f->path, "a,\"b", 4);
    assert_fails(mz_csv_open(f->path, &csv, &err), MZ_EINPUT, "line 1", &err);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(integers_of_every_size, setup, teardown),
        cmocka_unit_test_setup_teardown(floats_of_every_size, setup, teardown),
        cmocka_unit_test_setup_teardown(bad_headers_are_explained, setup, teardown),
        cmocka_unit_test_setup_teardown(lengths_are_checked, setup, teardown),
        cmocka_unit_test_setup_teardown(damaged_headers_never_crash, setup, teardown),
        cmocka_unit_test_setup_teardown(csv_rows, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
