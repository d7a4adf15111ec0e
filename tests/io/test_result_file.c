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

/* The summary of the detail, each figure by its definition. */
static void summarize(mz_run *run) {
    double sorted[STEPS];
    memcpy(sorted, run->step_s, sizeof sorted);
    run->step_time_s = mz_stat_of(sorted, STEPS);
    for (int p = 0; p < run->phases; p++) {
        run->phase_s[p] = 0;
        for (int i = 0; i < STEPS; i++) {
            double worst = 0;
            for (int k = 0; k < RANKS; k++) {
                double all = 0;
                for (int l = 0; l < LAYERS; l++)
                    all += run->detail_s[((i * LAYERS + l) * RANKS + k) * MZ_PHASES + p];
                worst = all > worst ? all : worst;
            }
            run->phase_s[p] += worst / STEPS;
        }
    }
}

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
        summarize(run);
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
    /* one digest, whatever the file; another where the detail is left out */
    assert_string_equal(a.digest, b.digest);
    assert_string_not_equal(a.digest, c.digest);
    assert_int_equal(strncmp(a.digest, MZ_RESULT_DIGEST, strlen(MZ_RESULT_DIGEST)), 0);
    assert_true(strlen(a.digest) == strlen(MZ_RESULT_DIGEST) + 64);
    json_object_set_new(a.root, "trace", json_string("another"));
    char text[80];
    assert_ok(mz_result_digest(&a, text, &err), &err);
    assert_string_not_equal(text, b.digest);
    mz_result_file_free(&a);
    mz_result_file_free(&b);
    mz_result_file_free(&c);
    mz_result_free(&r);
    remove_directory(directory);
}

/* Two records of one layer on two ranks; the arrays are filled where they are given. */
static mz_result_file small_file(mz_run_file *run) {
    static double step[2], busy[2], detail[2 * 2 * MZ_PHASES];
    static int64_t order[2], held[2 * MZ_MEM_CATEGORIES];
    step[0] = 0.1, step[1] = 0.25;
    order[0] = 1, order[1] = 0;
    busy[0] = 3, busy[1] = 1e-9;
    for (int i = 0; i < 2 * MZ_MEM_CATEGORIES; i++)
        held[i] = i + 1;
    memset(detail, 0, sizeof detail);
    detail[2 * MZ_PHASES + MZ_PHASE_PACK] = 0.5;
    for (int i = 0; i < 4; i++)
        detail[i * MZ_PHASES + MZ_PHASE_EXPERTS] = i + 1;
    *run = (mz_run_file){.policy = "static",
                         .steps = 2,
                         .step_s = step,
                         .ordinal = order,
                         .ranks = 2,
                         .rank_busy_s = busy,
                         .rank_memory = held,
                         .layers = 1,
                         .detail_s = detail};
    json_t *root = json_pack("{s:s, s:[{s:s, s:i}]}", "schema", "mizan-result/1", "runs", "policy",
                             "static", "detail", 1);
    assert_non_null(root);
    return (mz_result_file){.root = root, .run = run, .runs = 1};
}

/* SHA-256 of what result_file.h describes, computed with another program (python's struct and
 * hashlib); the text alone where there is no detail. */
static void known_digest(void **state) {
    mz_err err;
    char text[80];
    mz_run_file run, bare = {.policy = "static", .steps = 2};
    mz_result_file file = small_file(&run);
    assert_ok(mz_result_digest(&file, text, &err), &err);
    assert_string_equal(
        text, "sha256/2:a6267f22b86174dbdc4230df191f7f4ea80051fb0edbcab02c0a4e7d88c6aa91");
    assert_non_null(
        json_object_get(json_array_get(json_object_get(file.root, "runs"), 0), "detail"));
    file.run = &bare;
    assert_ok(mz_result_digest(&file, text, &err), &err);
    assert_string_equal(
        text, "sha256/2:e7090e67d5244b9fe2e2ef914afa3cbed19bd22a8579b89c7712344e098d03ae");
    json_decref(file.root);
}

/* One other value of any array is another digest. */
static void digest_covers_detail(void **state) {
    mz_err err;
    char before[80], after[80];
    mz_run_file run;
    mz_result_file file = small_file(&run);
    assert_ok(mz_result_digest(&file, before, &err), &err);
    double *const real[] = {&run.step_s[1], &run.rank_busy_s[0],
                            &run.detail_s[3 * MZ_PHASES + MZ_PHASE_EXPERTS],
                            &run.detail_s[MZ_PHASE_OPTIMIZER]};
    int64_t *const integer[] = {&run.ordinal[0], &run.rank_memory[MZ_MEM_CATEGORIES]};
    for (int i = 0; i < COUNT_OF(real); i++) {
        const double was = *real[i];
        *real[i] = nextafter(was, 9);
        assert_ok(mz_result_digest(&file, after, &err), &err);
        assert_string_not_equal(before, after);
        *real[i] = was;
    }
    for (int i = 0; i < COUNT_OF(integer); i++) {
        ++*integer[i];
        assert_ok(mz_result_digest(&file, after, &err), &err);
        assert_string_not_equal(before, after);
        --*integer[i];
    }
    assert_ok(mz_result_digest(&file, after, &err), &err);
    assert_string_equal(before, after);
    json_decref(file.root);
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

/* A detail that is not what the summary says of it. */
static void does_not_add_up(void **state) {
    char directory[512], path[600];
    mz_err err;
    mz_result r = make();
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/a.h5", directory);
    const struct {
        double *value;
        const char *said;
    } real[] = {{&r.run[1].step_time_s.mean, "step_time_s of lrmoe[keep=0.5] is "},
                {&r.run[0].step_time_s.p50, "step_time_s of static is "},
                {&r.run[0].step_time_s.p95, "step_time_s of static is "},
                {&r.run[0].phase_s[MZ_PHASE_DISPATCH], "dispatch of static is "}};
    for (int i = 0; i < COUNT_OF(real); i++) {
        const double was = *real[i].value;
        *real[i].value *= 1 + 1e-7;
        assert_ok(mz_result_write(&r, path, "mizan 9", &err), &err);
        refuse(path, real[i].said);
        *real[i].value = was;
    }
    r.run[0].memory_bytes[MZ_MEM_WEIGHTS] = INT64_C(1) << 50;
    assert_ok(mz_result_write(&r, path, "mizan 9", &err), &err);
    refuse(path, "weights of static is ");
    r.kind = NULL; /* of a whole step */
    mz_result_file file;
    assert_ok(mz_result_write(&r, path, "mizan 9", &err), &err);
    assert_ok(mz_result_load(path, &file, &err), &err);
    mz_result_file_free(&file);
    mz_result_free(&r);
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
        cmocka_unit_test(round_trips),     cmocka_unit_test(known_digest),
        cmocka_unit_test(wrong_json),      cmocka_unit_test(damaged_hdf5),
        cmocka_unit_test(other_hdf5),      cmocka_unit_test(digest_covers_detail),
        cmocka_unit_test(does_not_add_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
