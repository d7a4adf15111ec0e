/* What is written comes back, from HDF5 and from JSON; damaged files are refused in one line. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "common/io/json.h"
#include "common/io/result.h"
#include "common/io/result_file.h"

#include <hdf5.h>
#include <math.h>

enum { STEPS = 5, RANKS = 3, LAYERS = 2, CELLS = LAYERS * RANKS * MZ_PHASES };

static double step_s[STEPS], busy_s[RANKS], detail_s[STEPS * CELLS];
static int64_t peak[RANKS], memory[RANKS * MZ_MEM_CATEGORIES];
static const int64_t ordinal[STEPS] = {0, 1, 0, 1, 0};
static const double probe_s[MZ_SPEEDS][STEPS] = {
    {0.1, 0.3, 1e-3, 0, 7}, {0.2, 0.4, 2e-3, 9, 0}, {0, 1e-6, 5, 0.6, 3}};

static mz_result make(void) {
    mz_rng rng = mz_rng_make(1, 1);
    for (int i = 0; i < STEPS; i++)
        step_s[i] = mz_rng_uniform(&rng);
    for (int i = 0; i < STEPS * CELLS; i++)
        detail_s[i] = mz_rng_uniform(&rng) * 1e-3;
    for (int i = 0; i < RANKS; i++)
        busy_s[i] = mz_rng_uniform(&rng);
    for (int i = 0; i < RANKS * MZ_MEM_CATEGORIES; i++)
        memory[i] = (int64_t)mz_rng_below(&rng, INT64_C(1) << 50);
    mz_result r = {.runs = 2, .kind = "measurement"};
    snprintf(r.prediction, sizeof r.prediction, "sha256:1");
    r.run = calloc(2, sizeof *r.run);
    assert_non_null(r.run);
    r.trace = json_pack("{s:f}", "exactly", 0.1 + 0.2);
    for (int i = 0; i < 2; i++) {
        mz_run *run = &r.run[i];
        snprintf(run->policy, sizeof run->policy, "%s", i ? "lrmoe[keep=0.5]" : "static");
        run->steps = STEPS;
        run->step_s = step_s;
        run->ranks = RANKS;
        run->rank_busy_s = busy_s;
        run->rank_peak_bytes = peak;
        run->rank_memory_bytes = memory;
        run->step_ordinal = i ? ordinal : NULL;
        for (int k = 0; k < MZ_SPEEDS; k++)
            run->probe_s[k] = i ? probe_s[k] : NULL;
        run->detail_layers = LAYERS;
        run->detail_s = detail_s;
        for (int p = 0; p < MZ_PHASES; p++)
            run->phase_name[p] = mz_phase_name((mz_phase)p);
        run->phases = MZ_PHASES;
    }
    return r;
}

static void write_json(const mz_result *r, const char *path) {
    mz_err err;
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    assert_ok(mz_result_print_json(r, out, &err), &err);
    assert_int_equal(fclose(out), 0);
}

static void check_loaded(const mz_result_file *f) {
    assert_int_equal(f->runs, 2);
    for (int i = 0; i < 2; i++) {
        const mz_run_file *run = &f->run[i];
        assert_string_equal(run->policy, i ? "lrmoe[keep=0.5]" : "static");
        assert_int_equal(run->steps, STEPS);
        assert_int_equal(run->ranks, RANKS);
        assert_int_equal(run->layers, LAYERS);
        assert_memory_equal(run->step_s, step_s, sizeof step_s);
        for (int k = 0; k < STEPS; k++)
            assert_int_equal(run->ordinal[k], i ? ordinal[k] : k);
        for (int k = 0; k < MZ_SPEEDS; k++) {
            assert_true((run->probe_s[k] != NULL) == (i == 1));
            if (run->probe_s[k])
                assert_memory_equal(run->probe_s[k], probe_s[k], sizeof probe_s[k]);
        }
        assert_memory_equal(run->rank_busy_s, busy_s, sizeof busy_s);
        assert_memory_equal(run->rank_memory, memory, sizeof memory);
        assert_memory_equal(run->detail_s, detail_s, sizeof detail_s);
    }
}

static void round_trips(void **state) {
    char directory[512], h5[600], json[600], plain[600];
    mz_err err;
    mz_result_file a, b, c;
    mz_result r = make();
    make_directory(directory, sizeof directory);
    snprintf(h5, sizeof h5, "%s/a.h5", directory);
    snprintf(json, sizeof json, "%s/a.json", directory);
    snprintf(plain, sizeof plain, "%s/plain.json", directory);
    assert_ok(mz_result_write(&r, h5, "mizan 9", &err), &err);
    write_json(&r, plain);
    r.detail = true;
    write_json(&r, json);
    assert_ok(mz_result_load(h5, &a, &err), &err);
    assert_ok(mz_result_load(json, &b, &err), &err);
    assert_ok(mz_result_load(plain, &c, &err), &err);
    check_loaded(&a);
    check_loaded(&b);
    assert_null(c.run[0].step_s);
    assert_null(c.run[0].detail_s);
    assert_string_equal(json_string_value(json_object_get(a.root, "kind")), "measurement");
    assert_string_equal(json_string_value(json_object_get(a.root, "prediction_digest")),
                        "sha256:1");
    /* one digest, whatever the file */
    assert_string_equal(a.digest, b.digest);
    assert_string_equal(a.digest, c.digest);
    assert_true(strlen(a.digest) == strlen("sha256:") + 64);
    json_object_set_new(a.root, "trace", json_string("another"));
    char text[80];
    assert_ok(mz_result_digest(a.root, text, &err), &err);
    assert_string_not_equal(text, b.digest);
    mz_result_file_free(&a);
    mz_result_file_free(&b);
    mz_result_file_free(&c);
    mz_result_free(&r);
    remove_directory(directory);
}

/* SHA-256 of the object as written, computed with another program. */
static void known_digest(void **state) {
    mz_err err;
    char text[80];
    json_t *root = json_pack("{s:s, s:[{s:s, s:i}]}", "schema", "mizan-result/1", "runs", "policy",
                             "static", "detail", 1);
    assert_ok(mz_result_digest(root, text, &err), &err);
    assert_string_equal(text,
                        "sha256:e7090e67d5244b9fe2e2ef914afa3cbed19bd22a8579b89c7712344e098d03ae");
    assert_int_equal(json_array_size(json_object_get(root, "runs")), 1);
    assert_non_null(json_object_get(json_array_get(json_object_get(root, "runs"), 0), "detail"));
    json_decref(root);
}

static void refuse(const char *path, const char *said) {
    mz_err err = {0};
    mz_result_file file;
    assert_int_equal(mz_result_load(path, &file, &err), MZ_EINPUT);
    assert_null(file.root);
    if (!strstr(err.msg, said) || !strstr(err.msg, path))
        fail_msg("'%s' does not say '%s' of %s", err.msg, said, path);
}

static void wrong_json(void **state) {
    static const struct {
        const char *text, *said;
    } bad[] = {
        {"{}", "schema"},
        {"[1]", "schema"},
        {"{\"schema\":\"mizan-result/2\",\"runs\":[]}", "schema"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[]}", "no runs"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\"}]}", "no steps"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":2,\"detail\":{"
         "\"step_time_s\":[1]}}]}",
         "not as long"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":2,\"detail\":{"
         "\"step_time_s\":[1,\"x\"]}}]}",
         "not a number"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":2,\"detail\":{"
         "\"step_time_s\":[1,-1]}}]}",
         "no time"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":2,\"detail\":{"
         "\"step_time_s\":[1,1],\"step_ordinal\":[0,2]}}]}",
         "step_ordinal"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":2,\"detail\":{"
         "\"step_time_s\":[1,1],\"memory_probe_s\":[1,-1]}}]}",
         "memory_probe_s is not all times"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":2,\"detail\":{"
         "\"step_time_s\":[1,1],\"cache_probe_s\":[1]}}]}",
         "not as long"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":1,\"phases_s\":{"
         "\"pack\":1},\"detail\":{\"detail_s\":[[[[1,2]]]]}}]}",
         "not as long"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":1,\"phases_s\":{"
         "\"pax\":1},\"detail\":{\"detail_s\":[[[[1]]]]}}]}",
         "phase that is not known"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":1,\"phases_s\":{"
         "\"pack\":1},\"detail\":{\"rank_busy_s\":[1,1],\"detail_s\":[[[[1]]]]}}]}",
         "detail_s does not fit"},
        {"{\"schema\":\"mizan-result/1\",\"runs\":[{\"policy\":\"a\",\"steps\":1,\"detail\":{"
         "\"rank_memory_bytes\":[[1,2]]}}]}",
         "not as long"},
    };
    char directory[512], path[600];
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/bad.json", directory);
    for (int i = 0; i < COUNT_OF(bad); i++) {
        write_bytes(path, bad[i].text, strlen(bad[i].text));
        refuse(path, bad[i].said);
    }
    snprintf(path, sizeof path, "%s/none.json", directory);
    refuse(path, "No such file");
    remove_directory(directory);
}

/* Cut off anywhere, or with bytes changed: an answer, or a refusal that names the file. */
static void damaged_hdf5(void **state) {
    char directory[512], path[600];
    mz_err err = {0};
    size_t size;
    mz_result r = make();
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/a.h5", directory);
    assert_ok(mz_result_write(&r, path, "mizan 9", &err), &err);
    char *whole = read_bytes(path, &size);
    for (size_t cut = 100; cut < size; cut += size / 7) {
        write_bytes(path, whole, cut);
        refuse(path, "");
    }
    mz_rng rng = mz_rng_make(3, 3);
    int refused = 0;
    for (int i = 0; i < 60; i++) {
        char *copy = malloc(size);
        assert_non_null(copy);
        memcpy(copy, whole, size);
        for (int k = 0; k < 4; k++)
            copy[8 + mz_rng_below(&rng, i % 2 ? 4000 : size - 8)] = (char)mz_rng_below(&rng, 256);
        write_bytes(path, copy, size);
        free(copy);
        mz_result_file file;
        const mz_code code = mz_result_load(path, &file, &err);
        assert_true(code == MZ_OK || (code == MZ_EINPUT && strstr(err.msg, path)));
        refused += code != MZ_OK;
        mz_result_file_free(&file);
    }
    assert_true(refused > 5);
    /* One other bit of a value, wherever it stands: in the text, in an array. */
    const double *step = r.run[0].step_s;
    size_t texts = 0, arrays = 0;
    for (size_t i = 0; i + 16 < size; i++) {
        const bool text = memcmp(whole + i, "\"exactly\": ", 11) == 0;
        const bool array = memcmp(whole + i, step, sizeof *step) == 0;
        if (!text && !array)
            continue;
        char *at = whole + i + (text ? 13 : 3);
        *at ^= 1;
        write_bytes(path, whole, size);
        refuse(path, "");
        *at ^= 1;
        texts += text;
        arrays += array;
    }
    assert_true(texts > 0 && arrays > 0);
    free(whole);
    mz_result_free(&r);
    remove_directory(directory);
}

/* An HDF5 file that is something else. */
static void other_hdf5(void **state) {
    char directory[512], path[600];
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/a.h5", directory);
    const hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    assert_true(file >= 0);
    H5Fclose(file);
    refuse(path, "not a result of mizan");
    remove_directory(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trips), cmocka_unit_test(known_digest),
        cmocka_unit_test(wrong_json),  cmocka_unit_test(damaged_hdf5),
        cmocka_unit_test(other_hdf5),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
