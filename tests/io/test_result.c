#include "tests/harness.h"

#include "common/io/result.h"

#include <hdf5.h>
#include <math.h>

static double step_s[3] = {0.010, 0.012, 0.020};
static double busy_s[2] = {0.005, 0.007};
static int64_t peaks[2] = {100, 300};

static mz_result make_result(void) {
    mz_result r = {.runs = 2};
    r.run = calloc(2, sizeof *r.run);
    assert_non_null(r.run);
    r.trace = json_pack("{s:i}", "experts", 4);
    r.cluster = json_pack("{s:i}", "gpus", 2);
    mz_run *lossy = &r.run[0], *plain = &r.run[1];
    snprintf(lossy->policy, sizeof lossy->policy, "lrmoe[keep=0.5]");
    snprintf(lossy->system, sizeof lossy->system, "LRMoE (our reading)");
    snprintf(lossy->oom, sizeof lossy->oom, "activations, layer 3, rank 1");
    lossy->lossy = true;
    lossy->kept_score_mass = NAN;
    lossy->rank_imbalance = (mz_stat){1.25, NAN, 1.5, 2};
    snprintf(plain->policy, sizeof plain->policy, "static");
    plain->fits = true;
    plain->steps = 3;
    plain->ranks = 2;
    plain->step_time_s = (mz_stat){0.014, 0.012, 0.020, 0.020};
    plain->moe_time_s = 0.004;
    plain->tokens_per_s = 123456.5;
    plain->peak_memory_bytes = 300;
    plain->dispatch_bytes = (int64_t)1 << 53;
    for (int i = 0; i < MZ_MEM_CATEGORIES; i++)
        plain->memory_bytes[i] = 30;
    plain->kept_pairs_fraction = 1;
    plain->kept_score_mass = 0.75;
    snprintf(plain->score_source, sizeof plain->score_source, "trace");
    plain->phase_name[0] = "dispatch";
    plain->phase_s[0] = 0.001;
    plain->phases = 1;
    plain->planner_measured_s = 7;
    plain->step_s = step_s;
    plain->rank_busy_s = busy_s;
    plain->rank_peak_bytes = peaks;
    return r;
}

static void statistics(void **state) {
    double odd[] = {5, 1, 3}, even[] = {4, 1, 3, 2}, one[] = {7}, hundred[100];
    mz_stat s = mz_stat_of(odd, 3);
    assert_true(s.mean == 3 && s.p50 == 3 && s.p95 == 5 && s.max == 5);
    s = mz_stat_of(even, 4);
    assert_true(s.mean == 2.5 && s.p50 == 2.5 && s.p95 == 4 && s.max == 4);
    s = mz_stat_of(one, 1);
    assert_true(s.mean == 7 && s.p50 == 7 && s.p95 == 7 && s.max == 7);
    for (int i = 0; i < 100; i++)
        hundred[i] = 100 - i;
    s = mz_stat_of(hundred, 100);
    assert_true(s.mean == 50.5 && s.p50 == 50.5 && s.p95 == 95 && s.max == 100);
    s = mz_stat_of(NULL, 0);
    assert_true(isnan(s.mean) && isnan(s.p50) && isnan(s.p95) && isnan(s.max));
}

static void memory_categories(void **state) {
    static const char *const names[] = {
        "weights",       "gradients",   "optimizer_state", "replicas",      "activations",
        "token_buffers", "temporaries", "workspace",       "communication", "context"};
    assert_int_equal(MZ_MEM_CATEGORIES, COUNT_OF(names));
    for (int i = 0; i < MZ_MEM_CATEGORIES; i++)
        assert_string_equal(mz_memcat_name((mz_memcat)i), names[i]);
    assert_string_equal(mz_memcat_name(MZ_MEM_CATEGORIES), "unknown");
}

/* The keys that other programs read, with their types. */
static void contract(void **state) {
    static const struct {
        const char *key;
        json_type type;
    } keys[] = {
        {"policy", JSON_STRING},
        {"step_time_s", JSON_OBJECT},
        {"moe_time_s", JSON_REAL},
        {"tokens_per_s", JSON_REAL},
        {"layer_calls", JSON_REAL},
        {"peak_memory_bytes", JSON_INTEGER},
        {"memory_bytes", JSON_OBJECT},
        {"fits", JSON_TRUE},
        {"rank_imbalance", JSON_OBJECT},
        {"dispatch_bytes", JSON_INTEGER},
        {"combine_bytes", JSON_INTEGER},
        {"backward_dispatch_bytes", JSON_INTEGER},
        {"kept_pairs_fraction", JSON_REAL},
        {"kept_score_mass", JSON_REAL},
        {"dropped_pairs_fraction", JSON_REAL},
        {"phases_s", JSON_OBJECT},
        {"planner_s", JSON_REAL},
        {"planner_hidden_s", JSON_REAL},
    };
    mz_result r = make_result();
    json_t *root = mz_result_json(&r);
    assert_non_null(root);
    assert_string_equal(json_string_value(json_object_get(root, "schema")), "mizan-result/1");
    assert_int_equal(json_integer_value(json_object_get(json_object_get(root, "trace"), "experts")),
                     4);
    assert_true(json_is_null(json_object_get(root, "settings")));
    json_t *runs = json_object_get(root, "runs");
    assert_int_equal(json_array_size(runs), 2);
    json_t *run = json_array_get(runs, 1);
    for (int i = 0; i < COUNT_OF(keys); i++) {
        json_t *value = json_object_get(run, keys[i].key);
        if (!value || json_typeof(value) != keys[i].type)
            fail_msg("key %s is missing or has another type", keys[i].key);
    }
    json_t *memory = json_object_get(run, "memory_bytes");
    int64_t sum = 0;
    for (int i = 0; i < MZ_MEM_CATEGORIES; i++)
        sum += json_integer_value(json_object_get(memory, mz_memcat_name((mz_memcat)i)));
    assert_int_equal(sum, 300);
    assert_int_equal(json_object_size(memory), MZ_MEM_CATEGORIES);
    assert_int_equal(json_integer_value(json_object_get(run, "dispatch_bytes")), (int64_t)1 << 53);
    assert_null(json_object_get(run, "planner_measured_s"));
    assert_null(json_object_get(run, "imbalance_bound_hosts"));
    assert_null(json_object_get(run, "imbalance_bound_any"));
    assert_null(json_object_get(run, "within_process_bytes"));
    assert_null(json_object_get(run, "between_process_bytes"));
    run = json_array_get(runs, 0);
    assert_true(json_is_null(json_object_get(run, "kept_score_mass")));
    assert_true(json_is_null(json_object_get(run, "score_source")));
    assert_true(json_is_false(json_object_get(run, "fits")));
    assert_string_equal(json_string_value(json_object_get(run, "out_of_memory")),
                        "activations, layer 3, rank 1");
    json_t *imbalance = json_object_get(run, "rank_imbalance");
    assert_int_equal(json_object_size(imbalance), 3);
    assert_true(json_real_value(json_object_get(imbalance, "mean")) == 1.25);
    json_decref(root);
    r.timing = true;
    r.run[1].bounds = true;
    r.run[1].imbalance_bound_hosts = (mz_stat){1.5, NAN, 2, 3};
    r.run[1].imbalance_bound_any = (mz_stat){1.125, NAN, 1.25, 1.75};
    root = mz_result_json(&r);
    run = json_array_get(json_object_get(root, "runs"), 1);
    imbalance = json_object_get(run, "imbalance_bound_hosts");
    assert_true(json_real_value(json_object_get(imbalance, "max")) == 3);
    imbalance = json_object_get(run, "imbalance_bound_any");
    assert_true(json_real_value(json_object_get(imbalance, "mean")) == 1.125);
    assert_true(json_real_value(json_object_get(run, "planner_measured_s")) == 7);
    json_decref(root);
    mz_result_free(&r);
}

static void the_table_fits_and_ranks_lossless_first(void **state) {
    mz_result r = make_result();
    memset(r.run[0].policy, 'p', 60);
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    mz_result_print_table(&r, out);
    fclose(out);
    const char *plain = strstr(text, "\nstatic"), *lossy = strstr(text, "\npppp");
    assert_non_null(plain);
    assert_non_null(lossy);
    assert_true(plain < lossy);
    assert_non_null(strstr(text, "does not fit: activations, layer 3, rank 1"));
    assert_non_null(strstr(text, "LRMoE (our reading)"));
    assert_non_null(strstr(text, "14.00")); /* 0.014 s in ms */
    for (char *line = strtok(text, "\n"); line && line[0] != '!'; line = strtok(NULL, "\n"))
        if (strlen(line) > 100)
            fail_msg("wider than 100 columns: %s", line);
    free(text);
    mz_result_free(&r);
}

/* Times in ms under the policies' names, lossless first; what takes no time anywhere is left out;
 * of policies that a line has no room for the rest stands in a table below. */
static void phases_stand_side_by_side(void **state) {
    enum { RUNS = 4 };
    mz_run runs[RUNS] = {{.lossy = true}};
    mz_result r = {.run = runs, .runs = RUNS};
    for (int i = 0; i < RUNS; i++) {
        memset(runs[i].policy, 'a' + i, i == 0 ? 40 : 20);
        runs[i].phase_name[0] = "router";
        runs[i].phase_name[1] = "dispatch";
        runs[i].phase_name[2] = "experts";
        runs[i].phase_s[1] = i == 2 ? 0.0125 : 0;
        runs[i].phase_s[2] = 0.001 * (i + 1);
        runs[i].phases = 3;
        runs[i].fits = true;
    }
    for (int on = 0; on < 2; on++) {
        char *text = NULL;
        size_t size;
        r.phases = on;
        FILE *out = open_memstream(&text, &size);
        mz_result_print_table(&r, out);
        fclose(out);
        const char *at = strstr(text, "\nphases, ");
        assert_int_equal(at != NULL, on);
        if (at)
            assert_string_equal(strchr(at + 1, '\n'),
                                "\n"
                                "phase              bbbbbbbbbbbbbbbbbbbb cccccccccccccccccccc "
                                "dddddddddddddddddddd\n"
                                "dispatch                          0.000                12.50      "
                                "          0.000\n"
                                "experts                           2.000                3.000      "
                                "          4.000\n"
                                "phase              aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n"
                                "dispatch                                              0.000\n"
                                "experts                                               1.000\n");
        free(text);
    }
}

static void read_text_attribute(hid_t object, const char *name, char *text, size_t size) {
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    assert_true(attribute >= 0);
    hid_t type = H5Aget_type(attribute);
    assert_true(H5Tget_size(type) <= size);
    assert_true(H5Aread(attribute, type, text) >= 0);
    H5Tclose(type);
    H5Aclose(attribute);
}

static void check_file(const char *path) {
    char text[256];
    int version = 0;
    double steps[3], busy[2];
    int64_t bytes[2];
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    assert_true(file >= 0);
    read_text_attribute(file, "format", text, sizeof text);
    assert_string_equal(text, "mizan-result");
    read_text_attribute(file, "producer", text, sizeof text);
    assert_string_equal(text, "mizan 9");
    hid_t attribute = H5Aopen(file, "format_version", H5P_DEFAULT);
    assert_true(H5Aread(attribute, H5T_NATIVE_INT, &version) >= 0);
    H5Aclose(attribute);
    assert_int_equal(version, 1);
    hid_t group = H5Gopen2(file, "runs/0001", H5P_DEFAULT);
    assert_true(group >= 0);
    read_text_attribute(group, "policy", text, sizeof text);
    assert_string_equal(text, "static");
    hid_t data = H5Dopen2(group, "step_time_s", H5P_DEFAULT);
    assert_true(H5Dread(data, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, steps) >= 0);
    assert_memory_equal(steps, step_s, sizeof steps);
    read_text_attribute(data, "units", text, sizeof text);
    assert_string_equal(text, "s");
    read_text_attribute(data, "long_name", text, sizeof text);
    assert_string_equal(text, "time of each step");
    H5Dclose(data);
    data = H5Dopen2(group, "rank_busy_s", H5P_DEFAULT);
    assert_true(H5Dread(data, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, busy) >= 0);
    assert_memory_equal(busy, busy_s, sizeof busy);
    H5Dclose(data);
    data = H5Dopen2(group, "rank_peak_bytes", H5P_DEFAULT);
    assert_true(H5Dread(data, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes) >= 0);
    assert_memory_equal(bytes, peaks, sizeof bytes);
    H5Dclose(data);
    H5Gclose(group);
    H5Fclose(file);
}

/* The text in the file is the text on stdout. */
static void check_json(const char *path, const mz_result *result) {
    char *wanted = NULL;
    size_t size;
    mz_err err = {0};
    FILE *out = open_memstream(&wanted, &size);
    assert_ok(mz_result_print_json(result, out, &err), &err);
    fclose(out);
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    hid_t data = H5Dopen2(file, "json", H5P_DEFAULT);
    hid_t type = H5Dget_type(data);
    assert_int_equal(H5Tget_size(type), size + 1);
    char *text = malloc(size + 1);
    assert_non_null(text);
    assert_true(H5Dread(data, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text) >= 0);
    assert_string_equal(text, wanted);
    free(text);
    free(wanted);
    H5Tclose(type);
    H5Dclose(data);
    H5Fclose(file);
}

static void result_files(void **state) {
    char directory[512], a[600], b[600];
    mz_err err = {0};
    size_t size_a, size_b;
    mz_result r = make_result();
    make_directory(directory, sizeof directory);
    snprintf(a, sizeof a, "%s/a.h5", directory);
    snprintf(b, sizeof b, "%s/b.h5", directory);
    assert_ok(mz_result_write(&r, a, "mizan 9", &err), &err);
    sleep(1); /* the clock must not show in the bytes */
    assert_ok(mz_result_write(&r, b, "mizan 9", &err), &err);
    check_file(a);
    check_json(a, &r);
    char *bytes_a = read_bytes(a, &size_a), *bytes_b = read_bytes(b, &size_b);
    assert_int_equal(size_a, size_b);
    assert_memory_equal(bytes_a, bytes_b, size_a);
    free(bytes_a);
    free(bytes_b);
    snprintf(a, sizeof a, "%s/none/a.h5", directory);
    assert_fails(mz_result_write(&r, a, "mizan 9", &err), MZ_EINPUT, "No such file", &err);
    mz_result_free(&r);
    remove_directory(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(statistics),
        cmocka_unit_test(memory_categories),
        cmocka_unit_test(contract),
        cmocka_unit_test(the_table_fits_and_ranks_lossless_first),
        cmocka_unit_test(phases_stand_side_by_side),
        cmocka_unit_test(result_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
