#include "common/io/result.h"

#include "common/base/digest.h"
#include "common/base/stat.h"
#include "common/base/units.h"
#include "common/io/input.h"
#include "common/io/json.h"

#include <hdf5.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- statistics -------------------------------------------------------------------------------
 */

mz_stat mz_stat_of(double *values, int64_t count) {
    if (count <= 0)
        return (mz_stat){NAN, NAN, NAN, NAN};
    mz_sort(values, count);
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += values[i];
    int64_t middle = count / 2;
    int64_t rank95 = (int64_t)ceil(0.95 * (double)count);
    return (mz_stat){
        .mean = sum / (double)count,
        .p50 = count % 2 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]),
        .p95 = values[rank95 - 1],
        .max = values[count - 1],
    };
}

/* ---- JSON -------------------------------------------------------------------------------------
 */

/* Adds a new reference; counts failures so that one test at the end covers a whole object. */
static void put(json_t *object, const char *key, json_t *value, int *failed) {
    if (json_object_set_new(object, key, value) != 0)
        ++*failed;
}

static json_t *text_or_null(const char *text) {
    return text[0] ? mz_json_text(text) : json_null();
}

static json_t *shared_or_null(json_t *value) {
    return value ? json_incref(value) : json_null();
}

static json_t *time_stat(mz_stat stat, int *failed) {
    json_t *object = json_object();
    put(object, "mean", mz_json_number(stat.mean), failed);
    put(object, "p50", mz_json_number(stat.p50), failed);
    put(object, "p95", mz_json_number(stat.p95), failed);
    return object;
}

static json_t *imbalance_stat(mz_stat stat, int *failed) {
    json_t *object = json_object();
    put(object, "mean", mz_json_number(stat.mean), failed);
    put(object, "p95", mz_json_number(stat.p95), failed);
    put(object, "max", mz_json_number(stat.max), failed);
    return object;
}

static json_t *memory_json(const mz_run *run, int *failed) {
    json_t *object = json_object();
    for (int i = 0; i < MZ_MEM_CATEGORIES; i++)
        put(object, mz_memcat_name((mz_memcat)i), json_integer(run->memory_bytes[i]), failed);
    return object;
}

static json_t *phases_json(const mz_run *run, int *failed) {
    json_t *object = json_object();
    for (int i = 0; i < run->phases; i++)
        put(object, run->phase_name[i], mz_json_number(run->phase_s[i]), failed);
    return object;
}

static json_t *reals_json(const double *value, int64_t count, int *failed) {
    json_t *list = json_array();
    for (int64_t i = 0; i < count; i++)
        *failed += json_array_append_new(list, mz_json_number(value[i])) != 0;
    return list;
}

static json_t *integers_json(const int64_t *value, int64_t count, int *failed) {
    json_t *list = json_array();
    for (int64_t i = 0; i < count; i++)
        *failed += json_array_append_new(list, json_integer(value[i])) != 0;
    return list;
}

/* Rows of `cols` numbers. */
static json_t *phase_rows(const mz_run *run, const double *value, int64_t rows, int *failed) {
    json_t *list = json_array();
    for (int64_t i = 0; i < rows; i++)
        *failed += json_array_append_new(
                       list, reals_json(value + i * run->phases, run->phases, failed)) != 0;
    return list;
}

static json_t *seconds_json(const mz_run *run, int *failed) {
    json_t *steps = json_array();
    const int64_t layer = (int64_t)run->ranks * run->phases;
    for (int64_t i = 0; i < run->steps; i++) {
        json_t *layers = json_array();
        for (int64_t l = 0; l < run->detail_layers; l++)
            *failed +=
                json_array_append_new(
                    layers, phase_rows(run, run->detail_s + (i * run->detail_layers + l) * layer,
                                       run->ranks, failed)) != 0;
        *failed += json_array_append_new(steps, layers) != 0;
    }
    return steps;
}

static json_t *memory_rows(const mz_run *run, int *failed) {
    json_t *list = json_array();
    for (int32_t i = 0; i < run->ranks; i++)
        *failed += json_array_append_new(
                       list, integers_json(run->rank_memory_bytes + (int64_t)i * MZ_MEM_CATEGORIES,
                                           MZ_MEM_CATEGORIES, failed)) != 0;
    return list;
}

/* What the datasets of the HDF5 file hold, under their names. */
static json_t *detail_json(const mz_run *run, int *failed) {
    json_t *o = json_object();
    if (run->step_s)
        put(o, "step_time_s", reals_json(run->step_s, run->steps, failed), failed);
    if (run->step_ordinal)
        put(o, "step_ordinal", integers_json(run->step_ordinal, run->steps, failed), failed);
    for (int k = 0; k < MZ_SPEEDS; k++)
        if (run->probe_s[k])
            put(o, mz_speed_key((mz_speed)k), reals_json(run->probe_s[k], run->steps, failed),
                failed);
    if (run->rank_busy_s)
        put(o, "rank_busy_s", reals_json(run->rank_busy_s, run->ranks, failed), failed);
    if (run->rank_peak_bytes)
        put(o, "rank_peak_bytes", integers_json(run->rank_peak_bytes, run->ranks, failed), failed);
    if (run->rank_memory_bytes)
        put(o, "rank_memory_bytes", memory_rows(run, failed), failed);
    if (run->detail_s)
        put(o, "detail_s", seconds_json(run, failed), failed);
    return o;
}

static json_t *run_json(const mz_run *run, const mz_result *result, int *failed) {
    json_t *o = json_object();
    put(o, "policy", mz_json_text(run->policy), failed);
    put(o, "system", text_or_null(run->system), failed);
    put(o, "lossy", json_boolean(run->lossy), failed);
    put(o, "steps", json_integer(run->steps), failed);
    put(o, "step_time_s", time_stat(run->step_time_s, failed), failed);
    put(o, "moe_time_s", mz_json_number(run->moe_time_s), failed);
    put(o, "tokens_per_s", mz_json_number(run->tokens_per_s), failed);
    put(o, "layer_calls", mz_json_number(run->layer_calls), failed);
    put(o, "peak_memory_bytes", json_integer(run->peak_memory_bytes), failed);
    put(o, "memory_bytes", memory_json(run, failed), failed);
    put(o, "capacity_bytes", json_integer(run->capacity_bytes), failed);
    put(o, "fits", json_boolean(run->fits), failed);
    put(o, "out_of_memory", text_or_null(run->oom), failed);
    put(o, "over_budget_calls", json_integer(run->over_budget_calls), failed);
    put(o, "over_budget", text_or_null(run->over_budget), failed);
    put(o, "peak_at", text_or_null(run->peak_at), failed);
    put(o, "rank_imbalance", imbalance_stat(run->rank_imbalance, failed), failed);
    if (run->bounds) {
        put(o, "imbalance_bound_hosts", imbalance_stat(run->imbalance_bound_hosts, failed), failed);
        put(o, "imbalance_bound_any", imbalance_stat(run->imbalance_bound_any, failed), failed);
    }
    put(o, "dispatch_bytes", json_integer(run->dispatch_bytes), failed);
    put(o, "combine_bytes", json_integer(run->combine_bytes), failed);
    put(o, "backward_dispatch_bytes", json_integer(run->backward_dispatch_bytes), failed);
    put(o, "backward_combine_bytes", json_integer(run->backward_combine_bytes), failed);
    put(o, "transfer_bytes", json_integer(run->transfer_bytes), failed);
    if (run->split) {
        put(o, "within_process_bytes", json_integer(run->within_process_bytes), failed);
        put(o, "between_process_bytes", json_integer(run->between_process_bytes), failed);
    }
    put(o, "kept_pairs_fraction", mz_json_number(run->kept_pairs_fraction), failed);
    put(o, "kept_score_mass", mz_json_number(run->kept_score_mass), failed);
    put(o, "score_source", text_or_null(run->score_source), failed);
    put(o, "dropped_pairs_fraction", mz_json_number(run->dropped_pairs_fraction), failed);
    put(o, "phases_s", phases_json(run, failed), failed);
    put(o, "planner_s", mz_json_number(run->planner_s), failed);
    put(o, "planner_hidden_s", mz_json_number(run->planner_hidden_s), failed);
    if (result->timing)
        put(o, "planner_measured_s", mz_json_number(run->planner_measured_s), failed);
    if (result->detail)
        put(o, "detail", detail_json(run, failed), failed);
    return o;
}

json_t *mz_result_json(const mz_result *result) {
    int failed = 0;
    json_t *root = json_object(), *runs = json_array();
    put(root, "schema", json_string("mizan-result/1"), &failed);
    if (result->kind)
        put(root, "kind", json_string(result->kind), &failed);
    if (result->kind && strcmp(result->kind, "measurement") == 0)
        put(root, "prediction_digest", text_or_null(result->prediction), &failed);
    put(root, "trace", shared_or_null(result->trace), &failed);
    put(root, "model", shared_or_null(result->model), &failed);
    put(root, "cluster", shared_or_null(result->cluster), &failed);
    put(root, "settings", shared_or_null(result->settings), &failed);
    for (int i = 0; i < result->runs; i++)
        if (json_array_append_new(runs, run_json(&result->run[i], result, &failed)) != 0)
            failed++;
    put(root, "runs", runs, &failed);
    if (failed) {
        json_decref(root);
        return NULL;
    }
    return root;
}

mz_code mz_result_print_json(const mz_result *result, FILE *out, mz_err *err) {
    json_t *json = mz_result_json(result);
    if (!json)
        return mz_fail_nomem(err, "the result as JSON");
    mz_code code = mz_json_write(json, out, err);
    json_decref(json);
    return code;
}

void mz_result_free(mz_result *result) {
    json_decref(result->trace);
    json_decref(result->model);
    json_decref(result->cluster);
    json_decref(result->settings);
    free(result->run);
    *result = (mz_result){0};
}

/* ---- table ------------------------------------------------------------------------------------
 */

enum { NAME_WIDTH = 28, NUMBER_WIDTH = 9, NUMBERS = 7 };

/* Four significant digits in a column of fixed width. */
static void print_number(double value, FILE *out) {
    if (!isfinite(value))
        fprintf(out, " %*s", NUMBER_WIDTH, "-");
    else if (fabs(value) >= 1e3)
        fprintf(out, " %*.0f", NUMBER_WIDTH, value);
    else
        fprintf(out, " %*.*f", NUMBER_WIDTH,
                fabs(value) >= 100  ? 1
                : fabs(value) >= 10 ? 2
                                    : 3,
                value);
}

static void print_name(const char *name, FILE *out) {
    int width = (int)strlen(name);
    fprintf(out, "%s", name);
    if (width > NAME_WIDTH)
        fprintf(out, "\n%*s", NAME_WIDTH, "");
    else
        fprintf(out, "%*s", NAME_WIDTH - width, "");
}

static void print_run(const mz_run *run, FILE *out) {
    const double gib = 1073741824.0;
    const double numbers[NUMBERS] = {
        run->step_time_s.mean * 1e3,      run->moe_time_s * 1e3,
        run->tokens_per_s / 1e3,          (double)run->peak_memory_bytes / gib,
        run->rank_imbalance.mean,         run->kept_pairs_fraction * 100,
        run->dropped_pairs_fraction * 100};
    print_name(run->policy, out);
    for (int i = 0; i < NUMBERS; i++)
        print_number(numbers[i], out);
    fprintf(out, "%s\n", run->fits ? "" : " !");
}

static int print_group(const mz_result *result, bool lossy, FILE *out) {
    int shown = 0;
    for (int i = 0; i < result->runs; i++) {
        if (result->run[i].lossy != lossy)
            continue;
        if (shown++ == 0)
            fprintf(out, "%s\n",
                    lossy
                        ? "lossy (drops pairs or gradient; only time to a loss compares them with "
                          "the others)"
                        : "lossless");
        print_run(&result->run[i], out);
    }
    return shown;
}

/* Imbalance beside its bounds, in a table of its own: the first is as wide as a terminal. */
static void print_bounds(const mz_result *result, FILE *out) {
    if (result->runs == 0 || !result->run[0].bounds)
        return;
    fprintf(out, "%-*s %19s %19s %19s\n%-*s", NAME_WIDTH, "imbalance, max/mean", "as planned",
            "its hosts at best", "bound, any hosts", NAME_WIDTH, "");
    for (int i = 0; i < 3; i++)
        fprintf(out, " %*s %*s", NUMBER_WIDTH, "mean", NUMBER_WIDTH, "max");
    fputc('\n', out);
    for (int i = 0; i < result->runs; i++) {
        const mz_run *run = &result->run[i];
        const mz_stat *stats[] = {&run->rank_imbalance, &run->imbalance_bound_hosts,
                                  &run->imbalance_bound_any};
        print_name(run->policy, out);
        for (int k = 0; k < 3; k++) {
            print_number(stats[k]->mean, out);
            print_number(stats[k]->max, out);
        }
        fputc('\n', out);
    }
}

/* ---- table of phases: policies across, as many side by side as a line has room for -------------
 */

enum { PHASE_WIDTH = 18, LINE_WIDTH = 100 };

/* The run in that place of the tables: lossless ones first. */
static const mz_run *run_at(const mz_result *result, int place) {
    for (int lossy = 0; lossy < 2; lossy++)
        for (int i = 0; i < result->runs; i++)
            if (result->run[i].lossy == lossy && place-- == 0)
                return &result->run[i];
    return NULL;
}

static int column_width(const mz_run *run) {
    const int name = (int)strlen(run->policy);
    return name > NUMBER_WIDTH ? name : NUMBER_WIDTH;
}

/* The place behind the last of those from `first` on that fit; at least one does. */
static int line_end(const mz_result *result, int first) {
    int width = PHASE_WIDTH, end = first;
    while (end < result->runs) {
        width += 1 + column_width(run_at(result, end));
        if (width > LINE_WIDTH && end > first)
            break;
        end++;
    }
    return end;
}

/* Its name where some policy spends time in it, else NULL. */
static const char *phase_with_time(const mz_result *result, int phase) {
    for (int i = 0; i < result->runs; i++)
        if (phase < result->run[i].phases && result->run[i].phase_s[phase] > 0)
            return result->run[i].phase_name[phase];
    return NULL;
}

static void print_phase(const mz_result *result, int phase, int first, int end, FILE *out) {
    const char *name = phase_with_time(result, phase);
    if (!name)
        return;
    fprintf(out, "%-*s", PHASE_WIDTH, name);
    for (int i = first; i < end; i++) {
        const mz_run *run = run_at(result, i);
        fprintf(out, "%*s", column_width(run) - NUMBER_WIDTH, "");
        print_number(phase < run->phases ? run->phase_s[phase] * 1e3 : 0, out);
    }
    fputc('\n', out);
}

static void print_phases(const mz_result *result, FILE *out) {
    if (!result->phases)
        return;
    fputs("phases, busy ms of a step on each one's worst rank (their sum is not the step)\n", out);
    for (int first = 0, end; first < result->runs; first = end) {
        end = line_end(result, first);
        fprintf(out, "%-*s", PHASE_WIDTH, "phase");
        for (int i = first; i < end; i++)
            fprintf(out, " %*s", column_width(run_at(result, i)), run_at(result, i)->policy);
        fputc('\n', out);
        for (int k = 0; k < MZ_PHASES_MAX; k++)
            print_phase(result, k, first, end, out);
    }
}

void mz_result_print_table(const mz_result *result, FILE *out) {
    static const char *const head[2][NUMBERS] = {
        {"step -", "in MoE -", "tokens +", "peak -", "imbal. -", "kept +", "dropped -"},
        {"ms", "ms", "k/s", "GiB/GPU", "max/mean", "% pairs", "% pairs"}};
    for (int line = 0; line < 2; line++) {
        fprintf(out, "%-*s", NAME_WIDTH, line == 0 ? "policy" : "");
        for (int i = 0; i < NUMBERS; i++)
            fprintf(out, " %*s", NUMBER_WIDTH, head[line][i]);
        fputc('\n', out);
    }
    print_group(result, false, out);
    print_group(result, true, out);
    fprintf(out, "- lower is better, + higher is better; means over %lld step%s\n",
            (long long)(result->runs ? result->run[0].steps : 0),
            result->runs && result->run[0].steps == 1 ? "" : "s");
    print_bounds(result, out);
    print_phases(result, out);
    for (int i = 0; i < result->runs; i++) {
        const mz_run *run = &result->run[i];
        if (!run->fits)
            fprintf(out, "! %s does not fit: %s\n", run->policy, run->oom);
        if (run->over_budget_calls > 0)
            fprintf(out, "! %s breaks its budget in %lld layer calls: %s\n", run->policy,
                    (long long)run->over_budget_calls, run->over_budget);
        if (run->system[0])
            fprintf(out, "%s: %s\n", run->policy, run->system);
        if (result->timing)
            fprintf(out, "%s: planner charged %.3g ms per step, took %.3g ms here\n", run->policy,
                    run->planner_s * 1e3, run->planner_measured_s * 1e3);
    }
}

/* ---- HDF5 -------------------------------------------------------------------------------------
 */

/* Everything below returns false on the first call of the HDF5 library that fails. */

static bool write_attribute(hid_t object, const char *name, hid_t type, const void *value) {
    hid_t space = H5Screate(H5S_SCALAR);
    hid_t attribute = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    bool good = attribute >= 0 && H5Awrite(attribute, type, value) >= 0;
    if (attribute >= 0)
        good = H5Aclose(attribute) >= 0 && good;
    if (space >= 0)
        H5Sclose(space);
    return good;
}

static hid_t text_type(const char *text) {
    hid_t type = H5Tcopy(H5T_C_S1);
    if (type >= 0 &&
        (H5Tset_size(type, strlen(text) + 1) < 0 || H5Tset_cset(type, H5T_CSET_UTF8) < 0)) {
        H5Tclose(type);
        return -1;
    }
    return type;
}

static bool write_text_attribute(hid_t object, const char *name, const char *text) {
    hid_t type = text_type(text);
    bool good = type >= 0 && write_attribute(object, name, type, text);
    if (type >= 0)
        H5Tclose(type);
    return good;
}

enum { DIMENSIONS_MOST = 4 };

/* What is written of one dataset. dimensions 0: one value. */
typedef struct dataset_of {
    const char *name;
    hid_t file_type, memory_type;
    int dimensions;
    hsize_t size[DIMENSIONS_MOST];
    const void *data;
    const char *unit, *long_name;
    const char *axes, *columns; /* names of the dimensions, of the last one's items; or NULL */
    const char *digest;         /* SHA-256 of the data, or NULL */
} dataset_of;

static bool describe_dataset(hid_t dataset, const dataset_of *d) {
    return write_text_attribute(dataset, "units", d->unit) &&
           write_text_attribute(dataset, "long_name", d->long_name) &&
           (!d->axes || write_text_attribute(dataset, "dimensions", d->axes)) &&
           (!d->columns || write_text_attribute(dataset, "columns", d->columns)) &&
           (!d->digest || write_text_attribute(dataset, "sha256", d->digest));
}

/* Without object times: the same results are the same bytes. More than one dimension: a chunk per
 * item of the first, compressed. Every chunk has a checksum. */
static bool write_dataset(hid_t group, const dataset_of *d) {
    hid_t space =
        d->dimensions ? H5Screate_simple(d->dimensions, d->size, NULL) : H5Screate(H5S_SCALAR);
    hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    hid_t dataset = -1;
    bool some = true;
    hsize_t chunk[DIMENSIONS_MOST];
    for (int i = 0; i < d->dimensions; i++) {
        some = some && d->size[i] > 0;
        chunk[i] = i == 0 && d->dimensions > 1 ? 1 : d->size[i];
    }
    bool good = space >= 0 && properties >= 0 && H5Pset_obj_track_times(properties, false) >= 0;
    if (good && some && d->dimensions > 0)
        good = H5Pset_chunk(properties, d->dimensions, chunk) >= 0;
    if (good && some && d->dimensions > 1)
        good = H5Pset_shuffle(properties) >= 0 && H5Pset_deflate(properties, 4) >= 0;
    if (good && some && d->dimensions > 0)
        good = H5Pset_fletcher32(properties) >= 0;
    if (good)
        dataset =
            H5Dcreate2(group, d->name, d->file_type, space, H5P_DEFAULT, properties, H5P_DEFAULT);
    good =
        dataset >= 0 &&
        (!some || H5Dwrite(dataset, d->memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, d->data) >= 0) &&
        describe_dataset(dataset, d);
    if (dataset >= 0)
        good = H5Dclose(dataset) >= 0 && good;
    if (properties >= 0)
        H5Pclose(properties);
    if (space >= 0)
        H5Sclose(space);
    return good;
}

static hid_t create_group(hid_t parent, const char *name) {
    hid_t properties = H5Pcreate(H5P_GROUP_CREATE);
    hid_t group = -1;
    if (properties >= 0 && H5Pset_obj_track_times(properties, false) >= 0)
        group = H5Gcreate2(parent, name, H5P_DEFAULT, properties, H5P_DEFAULT);
    if (properties >= 0)
        H5Pclose(properties);
    return group;
}

static bool write_reals(hid_t group, const char *name, const double *value, int64_t count,
                        const char *unit, const char *long_name) {
    const dataset_of d = {.name = name,
                          .file_type = H5T_IEEE_F64LE,
                          .memory_type = H5T_NATIVE_DOUBLE,
                          .dimensions = 1,
                          .size = {value ? (hsize_t)count : 0},
                          .data = value,
                          .unit = unit,
                          .long_name = long_name};
    return write_dataset(group, &d);
}

static bool write_integers(hid_t group, const char *name, const int64_t *value, int64_t count,
                           const char *unit, const char *long_name) {
    const dataset_of d = {.name = name,
                          .file_type = H5T_STD_I64LE,
                          .memory_type = H5T_NATIVE_INT64,
                          .dimensions = 1,
                          .size = {value ? (hsize_t)count : 0},
                          .data = value,
                          .unit = unit,
                          .long_name = long_name};
    return write_dataset(group, &d);
}

/* Names behind each other, separated by commas. */
static void add_name(char *text, size_t size, const char *name) {
    const size_t used = strlen(text);
    snprintf(text + used, size - used, "%s%s", used ? "," : "", name);
}

static bool write_memory(hid_t group, const mz_run *run) {
    char names[256] = "";
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
        add_name(names, sizeof names, mz_memcat_name((mz_memcat)c));
    const dataset_of d = {.name = "rank_memory_bytes",
                          .file_type = H5T_STD_I64LE,
                          .memory_type = H5T_NATIVE_INT64,
                          .dimensions = 2,
                          .size = {(hsize_t)run->ranks, MZ_MEM_CATEGORIES},
                          .data = run->rank_memory_bytes,
                          .unit = "bytes",
                          .long_name = "the most of each category on each rank",
                          .axes = "rank,category",
                          .columns = names};
    return write_dataset(group, &d);
}

static bool write_detail(hid_t group, const mz_run *run) {
    char names[1024] = "";
    for (int p = 0; p < run->phases; p++)
        add_name(names, sizeof names, run->phase_name[p]);
    const dataset_of d = {.name = "detail_s",
                          .file_type = H5T_IEEE_F64LE,
                          .memory_type = H5T_NATIVE_DOUBLE,
                          .dimensions = 4,
                          .size = {(hsize_t)run->steps, (hsize_t)run->detail_layers,
                                   (hsize_t)run->ranks, (hsize_t)run->phases},
                          .data = run->detail_s,
                          .unit = "s",
                          .long_name = "busy time; the last layer stands for the whole step",
                          .axes = "step,layer,rank,phase",
                          .columns = names};
    return write_dataset(group, &d);
}

static bool write_probes(hid_t group, const mz_run *run) {
    bool good = true;
    for (int k = 0; k < MZ_SPEEDS && good; k++)
        good = !run->probe_s[k] || write_reals(group, mz_speed_key((mz_speed)k), run->probe_s[k],
                                               run->steps, "s", mz_speed_what((mz_speed)k));
    return good;
}

static bool write_run(hid_t group, const mz_run *run) {
    return write_text_attribute(group, "policy", run->policy) &&
           write_reals(group, "step_time_s", run->step_s, run->steps, "s", "time of each step") &&
           write_reals(group, "rank_busy_s", run->rank_busy_s, run->ranks, "s",
                       "mean compute busy time of each rank per step") &&
           write_integers(group, "rank_peak_bytes", run->rank_peak_bytes, run->ranks, "bytes",
                          "peak memory of each rank") &&
           (!run->step_ordinal ||
            write_integers(group, "step_ordinal", run->step_ordinal, run->steps, "none",
                           "which step of the window each record is")) &&
           write_probes(group, run) && (!run->rank_memory_bytes || write_memory(group, run)) &&
           (!run->detail_s || write_detail(group, run));
}

static bool write_runs(hid_t file, const mz_result *result) {
    hid_t runs = create_group(file, "runs");
    bool good = runs >= 0;
    for (int i = 0; i < result->runs && good; i++) {
        char name[16];
        snprintf(name, sizeof name, "%04d", i);
        hid_t group = create_group(runs, name);
        good = group >= 0 && write_run(group, &result->run[i]);
        if (group >= 0)
            good = H5Gclose(group) >= 0 && good;
    }
    if (runs >= 0)
        good = H5Gclose(runs) >= 0 && good;
    return good;
}

static bool write_root(hid_t file, const char *producer, const char *json) {
    int32_t version = 1;
    char digest[MZ_DIGEST_TEXT];
    hid_t type = text_type(json);
    mz_digest_text_of(json, strlen(json), digest);
    const dataset_of text = {.name = "json",
                             .file_type = type,
                             .memory_type = type,
                             .data = json,
                             .unit = "none",
                             .long_name = "the whole result as JSON (mizan-result/1)",
                             .digest = digest};
    bool good = type >= 0 && write_text_attribute(file, "format", "mizan-result") &&
                write_attribute(file, "format_version", H5T_NATIVE_INT32, &version) &&
                write_text_attribute(file, "producer", producer) && write_dataset(file, &text);
    if (type >= 0)
        H5Tclose(type);
    return good;
}

static bool write_file(const char *path, const mz_result *result, const char *producer,
                       const char *json) {
    hid_t properties = H5Pcreate(H5P_FILE_CREATE);
    hid_t file = -1;
    if (properties >= 0 && H5Pset_obj_track_times(properties, false) >= 0)
        file = H5Fcreate(path, H5F_ACC_TRUNC, properties, H5P_DEFAULT);
    bool good = file >= 0 && write_root(file, producer, json) && write_runs(file, result);
    if (file >= 0)
        good = H5Fclose(file) >= 0 && good;
    if (properties >= 0)
        H5Pclose(properties);
    return good;
}

static mz_code json_text(const mz_result *result, char **text, mz_err *err) {
    size_t size = 0;
    *text = NULL;
    FILE *memory = open_memstream(text, &size);
    if (!memory)
        return mz_fail_nomem(err, "the result as JSON");
    mz_result plain = *result;
    plain.detail = false; /* that is in the datasets */
    mz_code code = mz_result_print_json(&plain, memory, err);
    if (fclose(memory) != 0 && !code)
        code = mz_fail_nomem(err, "the result as JSON");
    return code;
}

mz_code mz_result_write(const mz_result *result, const char *path, const char *producer,
                        mz_err *err) {
    char *json;
    mz_output output;
    mz_code code = json_text(result, &json, err);
    if (!code)
        code = mz_output_begin(&output, path, err);
    if (!code) {
        /* The library would print its error stack; the one line below says what a user can use. At
         * exit it would follow freed memory where closing a file failed for want of room. */
        H5dont_atexit();
        H5E_auto2_t printer;
        void *printer_data;
        H5Eget_auto2(H5E_DEFAULT, &printer, &printer_data);
        H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
        if (write_file(output.partial, result, producer, json))
            code = mz_output_commit(&output, err);
        else
            code = mz_fail(err, MZ_EINTERNAL,
                           "%s: the result file could not be written; is the disk full?", path);
        H5Eset_auto2(H5E_DEFAULT, printer, printer_data);
        mz_output_abandon(&output);
    }
    free(json);
    return code;
}
