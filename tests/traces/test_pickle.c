/* The pickle reader on streams written by hand, operation by operation. */
#include "tests/harness.h"

#include "traces/pickle.h"

typedef struct fixture {
    char directory[256], path[300];
    mz_datafile *file;
    mz_arena arena;
} fixture;

static int setup(void **state) {
    static fixture f;
    mz_err err;
    make_directory(f.directory, sizeof f.directory);
    snprintf(f.path, sizeof f.path, "%s/x", f.directory);
    write_bytes(f.path, "bytes", 5);
    assert_ok(mz_datafile_open(f.path, &f.file, &err), &err);
    *state = &f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    mz_arena_free(&f->arena);
    mz_datafile_close(&f->file);
    remove_directory(f->directory);
    return 0;
}

static mz_code run(fixture *f, const char *text, size_t size, mz_value **value, mz_err *err) {
    return mz_pickle_read(f->file, (const unsigned char *)text, size, NULL, NULL, &f->arena, value,
                          err);
}

#define READ(f, text, value, err) run(f, "\x80\x02" text ".", sizeof text + 2, value, err)

static void whole_numbers(void **state) {
    static const int64_t wanted[] = {
        0, 255, 65535, -1, INT32_MIN, INT32_MAX, -1, (int64_t)1 << 40, -256, 0, INT64_MIN};
    mz_value *value;
    mz_err err;
    assert_ok(READ(*state,
                   "("
                   "K\x00"
                   "K\xff"
                   "M\xff\xff"
                   "J\xff\xff\xff\xff"
                   "J\x00\x00\x00\x80"
                   "J\xff\xff\xff\x7f"
                   "\x8a\x01\xff"
                   "\x8a\x06\x00\x00\x00\x00\x00\x01"
                   "\x8a\x02\x00\xff"
                   "\x8a\x00"
                   "\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"
                   "t",
                   &value, &err),
              &err);
    assert_int_equal(value->type, MZ_VALUE_LIST);
    assert_int_equal(value->count, COUNT_OF(wanted));
    for (int i = 0; i < COUNT_OF(wanted); i++) {
        int64_t whole = 77;
        assert_true(mz_value_int(value->item[i], &whole));
        assert_int_equal(whole, wanted[i]);
    }
}

static void containers(void **state) {
    mz_value *value;
    mz_err err;
    /* {"a": [1.5, None, True], "b": <the same list>, "a": ()} and a list within itself. */
    assert_ok(READ(*state,
                   "}(X\x01\x00\x00\x00"
                   "a](G\x3f\xf8\x00\x00\x00\x00\x00\x00N\x88"
                   "eq\x00X\x01\x00\x00\x00"
                   "bh\x00X\x01\x00\x00\x00"
                   "a)u",
                   &value, &err),
              &err);
    const mz_value *list = mz_value_get(value, "b");
    assert_int_equal(list->count, 3);
    assert_true(list->item[0]->type == MZ_VALUE_REAL && list->item[0]->real == 1.5);
    assert_int_equal(list->item[1]->type, MZ_VALUE_NONE);
    assert_true(list->item[2]->type == MZ_VALUE_BOOL && list->item[2]->whole == 1);
    assert_int_equal(mz_value_get(value, "a")->count, 0); /* the last of equal keys */
    assert_null(mz_value_get(value, "c"));
    assert_null(mz_value_get(list, "a"));
    assert_ok(READ(*state,
                   "]q\x00h\x00"
                   "a",
                   &value, &err),
              &err);
    assert_true(value->count == 1 && value->item[0] == value);
}

#define REFUSED(text, why) assert_fails(READ(*state, text, &value, &err), MZ_EINPUT, why, &err)

static void refused(void **state) {
    mz_value *value;
    mz_err err;
    REFUSED("", "does not leave one value");
    REFUSED("NN", "does not leave one value");
    REFUSED("(N", "does not leave one value");
    REFUSED("a", "without a container");
    REFUSED("}(Nu", "without a container");
    REFUSED("](N(t"
            "u",
            "without a container");
    REFUSED("Na", "without a container");
    REFUSED("t", "a mark is missing");
    REFUSED("\x85", "a value is missing");
    REFUSED("(N\x86", "a value is missing");
    REFUSED("h\x00", "never set");
    REFUSED("Nr\x00\x00\x00\x7f", "beyond the size of the pickle");
    REFUSED("X\xff\xff\xff\x7f", "beyond the end");
    REFUSED("\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "beyond the end");
    REFUSED("\x8a\x09", "beyond 64 bits");
    REFUSED("J\x00", "ends within an operation");
    REFUSED("cos\nsystem\nX\x02\x00\x00\x00"
            "ls\x85R",
            "names os.system");
    REFUSED("X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93", "names os.system");
    REFUSED("cos", "a name reaches beyond the end");
    REFUSED("NNR", "no function");
    REFUSED("NNb", "a state of its own");
    REFUSED("NQ", "no storage");
    REFUSED("\x8f", "operation 0x8f is not read");
    assert_fails(run(*state, "\x80\x02N", 3, &value, &err), MZ_EINPUT, "without its stop", &err);
    assert_fails(run(*state, "\x80\x01N.", 4, &value, &err), MZ_EINPUT, "protocol 2 to 5", &err);
    assert_fails(run(*state, "(dp0\n.", 6, &value, &err), MZ_EINPUT, "not a pickle", &err);
}

#define WITH_FILE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {WITH_FILE(whole_numbers), WITH_FILE(containers),
                                       WITH_FILE(refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
