#include "common/io/result_match.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static mz_code differ(const char *where, const char *key, const json_t *a, const json_t *b,
                      mz_err *err) {
    char *x = a ? json_dumps(a, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    char *y = b ? json_dumps(b, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    const mz_code code = mz_fail(err, MZ_EINPUT,
                                 "the files do not belong together: %s.%s is %.80s in the "
                                 "prediction, %.80s in the measurement",
                                 where, key, x ? x : "absent", y ? y : "absent");
    free(x);
    free(y);
    return code;
}

static bool equal(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

/* Every key of either object but `but`. */
static mz_code same_object(const char *where, const char *but, json_t *a, json_t *b, mz_err *err) {
    const char *key;
    json_t *value;
    json_object_foreach(a, key, value) {
        if (strcmp(key, but) != 0 && !equal(value, json_object_get(b, key)))
            return differ(where, key, value, json_object_get(b, key), err);
    }
    json_object_foreach(b, key, value) {
        if (strcmp(key, but) != 0 && !json_object_get(a, key))
            return differ(where, key, NULL, value, err);
    }
    return MZ_OK;
}

static mz_code same_settings(json_t *a, json_t *b, mz_err *err) {
    static const char *const key[] = {"ranks",           "seed",        "first_step",
                                      "steps",           "step_tokens", "tokens_per_rank",
                                      "sequence_length", "recompute",   "optimizer"};
    for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
        const json_t *x = json_object_get(a, key[i]), *y = json_object_get(b, key[i]);
        if (x && y ? !equal(x, y) : x != y)
            return differ("settings", key[i], x, y, err);
    }
    return MZ_OK;
}

static bool has_policy(const json_t *file, const char *policy) {
    size_t i;
    json_t *run;
    json_array_foreach(json_object_get(file, "runs"), i, run) {
        const char *name = json_string_value(json_object_get(run, "policy"));
        if (name && strcmp(name, policy) == 0)
            return true;
    }
    return false;
}

static mz_code same_policies(const json_t *p, const json_t *m, mz_err *err) {
    for (int way = 0; way < 2; way++) {
        size_t i;
        json_t *run;
        json_array_foreach(json_object_get(way ? m : p, "runs"), i, run) {
            const char *name = json_string_value(json_object_get(run, "policy"));
            if (!name || !has_policy(way ? p : m, name))
                return mz_fail(err, MZ_EINPUT,
                               "the files do not belong together: policy %.200s is in the %s alone",
                               name ? name : "without a name", way ? "measurement" : "prediction");
        }
    }
    return MZ_OK;
}

/* One type of values and one number of ranks on a device are what a prediction is of. */
static mz_code same_machine(const json_t *p, const json_t *m, mz_err *err) {
    const json_t *settings = json_object_get(m, "settings");
    const char *type = json_string_value(json_object_get(settings, "type"));
    const int64_t each =
        json_integer_value(json_object_get(json_object_get(p, "cluster"), "ranks_per_device"));
    const json_t *processes = json_object_get(settings, "processes"),
                 *ranks = json_object_get(settings, "ranks");
    if (type && strcmp(type, "bf16") != 0)
        return mz_fail(err, MZ_EINPUT,
                       "the measurement has --type %s: predictions are of bf16, replay with that",
                       type);
    if (processes && ranks && each > 0 &&
        json_integer_value(processes) * each != json_integer_value(ranks))
        return mz_fail(err, MZ_EINPUT,
                       "the files do not belong together: the prediction has %lld ranks on each of "
                       "%lld devices, the measurement ran in %lld processes: give --cluster "
                       "PROFILE:%lld to mizan sim",
                       (long long)each, (long long)(json_integer_value(ranks) / each),
                       (long long)json_integer_value(processes),
                       (long long)json_integer_value(processes));
    return MZ_OK;
}

static mz_code is_kind(const json_t *file, const char *kind, const char *hint, mz_err *err) {
    const char *is = json_string_value(json_object_get(file, "kind"));
    const bool first = strcmp(kind, "prediction") == 0;
    if (is && strcmp(is, kind) == 0)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT, "the %s is a %s%s: pass %s",
                   first ? "first file" : "second file", is ? is : "simulation of whole steps",
                   first ? "" : ", nothing was measured in it", hint);
}

mz_code mz_result_belong(const json_t *p, const json_t *m, mz_err *err) {
    mz_code code = is_kind(p, "prediction", "what mizan sim --scope layers wrote", err);
    if (code == MZ_OK)
        code = is_kind(m, "measurement", "what mizan replay wrote", err);
    if (code == MZ_OK)
        code = same_object("trace", "path", json_object_get(p, "trace"),
                           json_object_get(m, "trace"), err);
    if (code == MZ_OK)
        code =
            same_object("model", "", json_object_get(p, "model"), json_object_get(m, "model"), err);
    if (code == MZ_OK)
        code = same_settings(json_object_get(p, "settings"), json_object_get(m, "settings"), err);
    if (code == MZ_OK)
        code = same_policies(p, m, err);
    return code == MZ_OK ? same_machine(p, m, err) : code;
}

mz_code mz_result_detailed(const mz_run_file *run, const char *of, mz_err *err) {
    if (run->step_s && run->detail_s)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "the %s has no times by step, layer, rank and phase of %s: write it with "
                   "--output, or with --json --detail",
                   of, run->policy);
}
