#include "traces/jsonl.h"

#include "common/io/json.h"
#include "traces/importers/common.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

mz_code mz_jsonl_open(const char *path, mz_jsonl *in, mz_err *err) {
    *in = (mz_jsonl){0};
    return mz_input_open(path, &in->input, err);
}

mz_code mz_jsonl_next(mz_jsonl *in, mz_err *err) {
    char *line;
    size_t length;
    json_error_t fault;
    json_decref(in->object);
    in->object = NULL;
    do {
        mz_code code = mz_input_line(in->input, &line, &length, err);
        if (code || !line)
            return code;
    } while (strspn(line, " \t\r") == length);
    json_t *value = mz_json_parse(line, length, 0, &fault);
    if (!value && json_error_code(&fault) == json_error_out_of_memory)
        return mz_fail_nomem(err, "a JSON value");
    if (!value)
        return mz_jsonl_fail(in, err, "column %d: no valid JSON (truncated or torn line?): %.200s",
                             fault.column, fault.text);
    if (!json_is_object(value)) {
        json_decref(value);
        return mz_jsonl_fail(in, err, "not a JSON object");
    }
    in->object = value;
    return MZ_OK;
}

void mz_jsonl_close(mz_jsonl *in) {
    json_decref(in->object);
    in->object = NULL;
    if (in->input)
        mz_input_close(&in->input);
}

mz_code mz_jsonl_fail(const mz_jsonl *in, mz_err *err, const char *fmt, ...) {
    char text[MZ_ERR_MAX];
    va_list list;
    va_start(list, fmt);
    vsnprintf(text, sizeof text, fmt, list);
    va_end(list);
    return mz_fail(err, MZ_EINPUT, "%s: line %lld: %s", mz_input_path(in->input),
                   (long long)mz_input_line_number(in->input), text);
}

static mz_code no_member(const mz_jsonl *in, const char *key, mz_err *err) {
    return mz_jsonl_fail(
        in, err, "no member \"%s\": another format? 'mizan trace import --list' describes them",
        key);
}

mz_code mz_jsonl_int(const mz_jsonl *in, const char *key, int64_t low, int64_t high, int64_t *value,
                     mz_err *err) {
    const json_t *member = json_object_get(in->object, key);
    if (!member)
        return no_member(in, key, err);
    if (!json_is_integer(member) || json_integer_value(member) < low ||
        json_integer_value(member) > high)
        return mz_jsonl_fail(in, err, "\"%s\" is not a whole number from %lld to %lld", key,
                             (long long)low, (long long)high);
    *value = json_integer_value(member);
    return MZ_OK;
}

mz_code mz_jsonl_text(const mz_jsonl *in, const char *key, const char **value, mz_err *err) {
    const json_t *member = json_object_get(in->object, key);
    if (!member)
        return no_member(in, key, err);
    if (!json_is_string(member))
        return mz_jsonl_fail(in, err, "\"%s\" is not a string", key);
    *value = json_string_value(member);
    return MZ_OK;
}

mz_code mz_jsonl_array(const mz_jsonl *in, const char *key, json_t **value, mz_err *err) {
    *value = json_object_get(in->object, key);
    if (!*value)
        return no_member(in, key, err);
    if (!json_is_array(*value))
        return mz_jsonl_fail(in, err, "\"%s\" is not a list", key);
    return MZ_OK;
}

mz_code mz_jsonl_ids(const mz_jsonl *in, const char *what, const json_t *array, int32_t top_k,
                     int32_t experts, uint16_t *expert, mz_err *err) {
    if (!json_is_array(array) || json_array_size(array) != (size_t)top_k)
        return mz_jsonl_fail(in, err, "%s does not list %d expert ids", what, top_k);
    for (int32_t i = 0; i < top_k; i++) {
        const json_t *id = json_array_get(array, (size_t)i);
        if (!json_is_integer(id))
            return mz_jsonl_fail(in, err, "%s[%d]: the expert id is not a whole number", what, i);
        const char *fault = mz_id_fault(json_integer_value(id), experts, expert, i);
        if (fault)
            return mz_jsonl_fail(in, err, "%s[%d]: expert id %lld %s", what, i,
                                 (long long)json_integer_value(id), fault);
        expert[i] = (uint16_t)json_integer_value(id);
    }
    return MZ_OK;
}

mz_code mz_jsonl_weights(const mz_jsonl *in, const char *what, const json_t *array, int32_t top_k,
                         float *weight, mz_err *err) {
    if (!json_is_array(array) || json_array_size(array) != (size_t)top_k)
        return mz_jsonl_fail(in, err, "%s does not list %d weights", what, top_k);
    for (int32_t i = 0; i < top_k; i++) {
        const json_t *member = json_array_get(array, (size_t)i);
        double value = json_number_value(member);
        if (!json_is_number(member) || !(value >= 0) || !(value <= 1e30))
            return mz_jsonl_fail(in, err, "%s[%d] is not a number of at least 0", what, i);
        weight[i] = (float)value;
    }
    return MZ_OK;
}

const char *mz_json_counts(const json_t *array, size_t size, int64_t *count, size_t *at) {
    *at = 0;
    if (!json_is_array(array))
        return "is not a list";
    if (json_array_size(array) != size)
        return "does not have as many entries as the list before it";
    for (*at = 0; *at < size; ++*at) {
        const json_t *member = json_array_get(array, *at);
        double value = json_number_value(member);
        if (!json_is_number(member) || !(value >= 0 && value <= UINT32_MAX) ||
            (double)(int64_t)value != value)
            return "is not a count (a whole number from 0 to 2^32-1)";
        count[*at] = (int64_t)value;
    }
    return NULL;
}
