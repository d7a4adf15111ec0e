#include "tests/harness.h"

#include "common/base/rng.h"
#include "common/io/json.h"

#include <math.h>
#include <zlib.h>

static char *written(const json_t *value) {
    char *text = NULL;
    size_t size;
    mz_err err = {0};
    FILE *out = open_memstream(&text, &size);
    assert_ok(mz_json_write(value, out, &err), &err);
    fclose(out);
    return text;
}

static void assert_writes(json_t *value, const char *wanted) {
    assert_non_null(value);
    char *text = written(value);
    assert_string_equal(text, wanted);
    free(text);
    json_decref(value);
}

static void layout(void **state) {
    assert_writes(json_pack("{s:i, s:[i,i,b], s:[{s:n}], s:{}, s:[]}", "b", 1, "a", 1, 2, 1, "o",
                            "k", "e", "l"),
                  "{\n  \"b\": 1,\n  \"a\": [1, 2, true],\n  \"o\": [\n    {\n      \"k\": null\n"
                  "    }\n  ],\n  \"e\": {},\n  \"l\": []\n}\n");
    assert_writes(json_string("quote \" back \\ tab \t line \n bell \x07 µ"),
                  "\"quote \\\" back \\\\ tab \\t line \\n bell \\u0007 µ\"\n");
    assert_writes(json_integer(INT64_MIN), "-9223372036854775808\n");
    assert_writes(mz_json_text("caf\xe9"), "\"caf?\"\n");
    assert_writes(mz_json_text("é"), "\"é\"\n");
}

static void shortest_reals(void **state) {
    assert_writes(json_real(0.1), "0.1\n");
    assert_writes(json_real(2), "2.0\n");
    assert_writes(json_real(-0.0), "-0.0\n");
    assert_writes(json_real(1e300), "1e+300\n");
    assert_writes(json_real(0.1 + 0.2), "0.30000000000000004\n");
    assert_writes(json_real(5e-324), "4.94065645841247e-324\n");
    assert_writes(mz_json_number(-1.5), "-1.5\n");
    assert_writes(mz_json_number(NAN), "null\n");
    assert_writes(mz_json_number(-INFINITY), "null\n");
    mz_rng rng = mz_rng_make(1, 1);
    for (int i = 0; i < 20000; i++) {
        union {
            uint64_t bits;
            double real;
        } x = {.bits = mz_rng_u64(&rng)};
        if (!isfinite(x.real))
            continue;
        json_t *value = json_real(x.real);
        char *text = written(value);
        assert_true(strtod(text, NULL) == x.real);
        /* One digit fewer must not do, unless 15 digits were enough. */
        char shorter[400];
        int digits = 0;
        for (const char *c = text; *c && *c != 'e' && strcmp(c, ".0\n") != 0; c++)
            digits += *c >= '0' + (digits == 0) && *c <= '9';
        snprintf(shorter, sizeof shorter, "%.*g", digits - 1, x.real);
        if (digits > 15)
            assert_true(strtod(shorter, NULL) != x.real);
        free(text);
        json_decref(value);
    }
}

static void output_errors(void **state) {
    json_t *value = json_integer(1);
    mz_err err;
    FILE *full = fopen("/dev/full", "w");
    assert_non_null(full);
    setvbuf(full, NULL, _IONBF, 0);
    assert_fails(mz_json_write(value, full, &err), MZ_EINTERNAL, "cannot write JSON", &err);
    fclose(full);
    json_decref(value);
    json_t *deep = json_integer(1);
    for (int i = 0; i < 300; i++)
        deep = json_pack("[o]", deep);
    FILE *nowhere = fopen("/dev/null", "w");
    assert_fails(mz_json_write(deep, nowhere, &err), MZ_EINTERNAL, "nested deeper", &err);
    fclose(nowhere);
    json_decref(deep);
}

static void getters(void **state) {
    json_error_t why;
    json_t *value =
        json_loads("{\"s\": \"text\", \"i\": 42, \"whole\": 1e3, \"b\": true, \"bw\": \"400 GB/s\","
                   " \"n\": 5, \"null\": null, \"list\": [1], \"half\": 0.5, \"neg\": -1}",
                   0, &why);
    assert_non_null(value);
    mz_json v;
    mz_err err = {0};
    const char *text;
    int64_t i;
    double q;
    bool b;
    json_t *list;
    assert_ok(mz_json_object(value, "a.json: links[0]", &v, &err), &err);
    assert_ok(mz_json_string(&v, "s", &text, &err), &err);
    assert_string_equal(text, "text");
    assert_ok(mz_json_string_or(&v, "absent", "dflt", &text, &err), &err);
    assert_string_equal(text, "dflt");
    assert_ok(mz_json_int(&v, "i", 0, 100, &i, &err), &err);
    assert_int_equal(i, 42);
    assert_ok(mz_json_int(&v, "whole", 0, 1000, &i, &err), &err);
    assert_int_equal(i, 1000);
    assert_ok(mz_json_int_or(&v, "null", 7, 0, 100, &i, &err), &err);
    assert_int_equal(i, 7);
    assert_ok(mz_json_bool_or(&v, "b", false, &b, &err), &err);
    assert_true(b);
    assert_ok(mz_json_quantity(&v, "bw", MZ_UNIT_RATE, &q, &err), &err);
    assert_true(q == 400e9);
    assert_ok(mz_json_quantity(&v, "n", MZ_UNIT_RATE, &q, &err), &err);
    assert_true(q == 5);
    assert_ok(mz_json_quantity_or(&v, "absent", MZ_UNIT_RATE, 1.5, &q, &err), &err);
    assert_true(q == 1.5);
    assert_ok(mz_json_get(&v, "list", JSON_ARRAY, &list, &err), &err);
    assert_int_equal(json_array_size(list), 1);
    assert_true(mz_json_has(&v, "half"));
    assert_false(mz_json_has(&v, "null"));
    assert_fails(mz_json_string(&v, "i", &text, &err), MZ_EINPUT,
                 "a.json: links[0]: 'i' is a whole number, must be a string", &err);
    assert_fails(mz_json_string(&v, "gone", &text, &err), MZ_EINPUT, "key 'gone' is missing", &err);
    assert_fails(mz_json_int(&v, "i", 0, 41, &i, &err), MZ_EINPUT, "must be within [0, 41]", &err);
    assert_fails(mz_json_int(&v, "half", 0, 41, &i, &err), MZ_EINPUT, "a whole number", &err);
    assert_fails(mz_json_int_or(&v, "s", 0, 0, 41, &i, &err), MZ_EINPUT, "is a string", &err);
    assert_fails(mz_json_bool_or(&v, "i", true, &b, &err), MZ_EINPUT, "true or false", &err);
    assert_fails(mz_json_quantity(&v, "neg", MZ_UNIT_NONE, &q, &err), MZ_EINPUT, "negative", &err);
    assert_fails(mz_json_quantity(&v, "s", MZ_UNIT_BYTES, &q, &err), MZ_EINPUT,
                 "a.json: links[0]: 's': 'text' is not bytes", &err);
    assert_fails(mz_json_quantity(&v, "list", MZ_UNIT_BYTES, &q, &err), MZ_EINPUT, "is a list",
                 &err);
    assert_fails(mz_json_object(json_object_get(value, "list"), "x", &v, &err), MZ_EINPUT,
                 "x: is a list, must be an object", &err);
    assert_fails(mz_json_object(NULL, "x", &v, &err), MZ_EINPUT, "x: is missing", &err);
    json_decref(value);
}

static void misspelt_keys(void **state) {
    json_t *value =
        json_pack("{s:i, s:s, s:s, s:i}", "latency", 1, "_note", "", "source", "", "bandwith", 3);
    mz_json v;
    mz_err err = {0};
    double q;
    assert_ok(mz_json_object(value, "p.json", &v, &err), &err);
    assert_ok(mz_json_quantity(&v, "latency", MZ_UNIT_NONE, &q, &err), &err);
    assert_ok(mz_json_quantity_or(&v, "bandwidth", MZ_UNIT_NONE, 0, &q, &err), &err);
    assert_fails(mz_json_no_more(&v, &err), MZ_EINPUT,
                 "p.json: unknown key 'bandwith'; did you mean 'bandwidth'?", &err);
    json_object_del(value, "bandwith");
    memset(&err, 0, sizeof err);
    assert_ok(mz_json_no_more(&v, &err), &err);
    json_decref(value);
}

static void a_view_remembers_a_bounded_number_of_keys(void **state) {
    json_t *value = json_object();
    mz_json v;
    mz_err err = {0};
    static char names[64][16];
    int64_t i;
    assert_ok(mz_json_object(value, "x", &v, &err), &err);
    for (int k = 0; k < 64; k++) {
        snprintf(names[k], sizeof names[k], "k%d", k);
        mz_json_has(&v, names[k]);
        mz_json_has(&v, names[k]);
    }
    assert_fails(mz_json_int(&v, "one more", 0, 1, &i, &err), MZ_EINTERNAL, "more keys", &err);
    json_decref(value);
}

static void files(void **state) {
    char directory[512], path[600];
    json_t *value;
    mz_err err = {0};
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/x.json", directory);
    write_bytes(path, "{\"a\": [1, 2.5]}", 15);
    assert_ok(mz_json_load(path, &value, &err), &err);
    assert_true(json_real_value(json_array_get(json_object_get(value, "a"), 1)) == 2.5);
    json_decref(value);
    gzFile packed = gzopen(path, "wb");
    assert_true(gzputs(packed, "{\"a\": 3}") > 0);
    gzclose(packed);
    assert_ok(mz_json_load(path, &value, &err), &err);
    assert_int_equal(json_integer_value(json_object_get(value, "a")), 3);
    json_decref(value);
    static const char *const bad[][2] = {{"{\n  \"a\": 1,\n  \"b\" 2\n}", "x.json:3:"},
                                         {"{\"a\": 1, \"a\": 2}", "duplicate"},
                                         {"{\"a\": 1} x", "not valid JSON"},
                                         {"{\"a\": NaN}", "not valid JSON"},
                                         {"\"\xff\"", "not valid JSON"},
                                         {"{", "not valid JSON"}};
    for (int i = 0; i < COUNT_OF(bad); i++) {
        write_bytes(path, bad[i][0], strlen(bad[i][0]));
        assert_fails(mz_json_load(path, &value, &err), MZ_EINPUT, bad[i][1], &err);
        assert_null(value);
    }
    remove_directory(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout),
        cmocka_unit_test(shortest_reals),
        cmocka_unit_test(output_errors),
        cmocka_unit_test(getters),
        cmocka_unit_test(misspelt_keys),
        cmocka_unit_test(a_view_remembers_a_bounded_number_of_keys),
        cmocka_unit_test(files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
