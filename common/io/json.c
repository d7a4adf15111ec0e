#include "common/io/json.h"

#include "common/base/arena.h"
#include "common/base/opt.h"
#include "common/io/input.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 256 };

/* The parsed value takes up to 20 times as many bytes, and is held whole. */
static const size_t FILE_MAX_BYTES = (size_t)256 << 20;

/* ---- reading ----------------------------------------------------------------------------------
 */

static mz_code read_all(mz_input *input, void **text, size_t *length, mz_err *err) {
    size_t capacity = 0, got = 1;
    while (got) {
        if (*length >= FILE_MAX_BYTES)
            return mz_fail(err, MZ_EINPUT, "%s: JSON of more than 256 MiB in one value; split it",
                           mz_input_path(input));
        if (!mz_grow(text, &capacity, *length + 65536, 1))
            return mz_fail_nomem(err, "a JSON file");
        mz_code code = mz_input_read(input, (char *)*text + *length, capacity - *length, &got, err);
        if (code)
            return code;
        *length += got;
    }
    return MZ_OK;
}

/* A text being parsed. malloc sets errno where it fails, which jansson sets to 0 when it has read a
 * number: so it gets numbers and what is between them in pieces, and errno is seen before each. */
typedef struct parsing {
    const char *text;
    size_t left;
    bool nomem;
} parsing;

static bool of_number(char c) {
    return (c >= '0' && c <= '9') || c == '-' || c == '+' || c == '.';
}

static size_t next_piece(void *buffer, size_t size, void *self) {
    parsing *p = self;
    size_t n = 0;
    p->nomem = p->nomem || errno == ENOMEM;
    if (p->nomem)
        return (size_t)-1;
    while (n < p->left && n < size && of_number(p->text[n]) == of_number(p->text[0]))
        n++;
    memcpy(buffer, p->text, n);
    p->text += n;
    p->left -= n;
    return n;
}

json_t *mz_json_parse(const char *text, size_t length, size_t flags, json_error_t *why) {
    parsing p = {.text = text, .left = length};
    errno = 0;
    json_t *value = json_load_callback(next_piece, &p, JSON_REJECT_DUPLICATES | flags, why);
    if (!p.nomem && errno != ENOMEM)
        return value;
    json_decref(value);
    /* Where json_error_code looks. */
    why->text[JSON_ERROR_TEXT_LENGTH - 1] = json_error_out_of_memory;
    return NULL;
}

mz_code mz_json_load(const char *path, json_t **value, mz_err *err) {
    mz_input *input;
    void *text = NULL;
    size_t length = 0;
    *value = NULL;
    mz_code code = mz_input_open(path, &input, err);
    if (code)
        return code;
    code = read_all(input, &text, &length, err);
    if (!code) {
        json_error_t why;
        *value = mz_json_parse(text, length, 0, &why);
        if (!*value && json_error_code(&why) == json_error_out_of_memory)
            code = mz_fail_nomem(err, "a JSON value");
        else if (!*value)
            code = mz_fail(err, MZ_EINPUT, "%s:%d:%d: not valid JSON: %s%s", mz_input_path(input),
                           why.line, why.column, why.text,
                           (size_t)why.position + 1 >= length ? " (is the file truncated?)" : "");
    }
    free(text);
    mz_input_close(&input);
    return code;
}

/* ---- views ------------------------------------------------------------------------------------
 */

static const char *type_name(json_type type) {
    switch (type) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "a whole number";
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "true or false";
    case JSON_NULL:
        break;
    }
    return "null";
}

mz_code mz_json_object(json_t *value, const char *where, mz_json *view, mz_err *err) {
    *view = (mz_json){.object = value};
    snprintf(view->where, sizeof view->where, "%s", where);
    if (!json_is_object(value))
        return mz_fail(err, MZ_EINPUT, "%s: is %s, must be an object", where,
                       value ? type_name(json_typeof(value)) : "missing");
    return MZ_OK;
}

/* The member, or NULL when it is missing or null; remembers that it was asked for. */
static mz_code lookup(mz_json *view, const char *key, json_t **value, mz_err *err) {
    bool known = false;
    for (int i = 0; i < view->nasked && !known; i++)
        known = strcmp(view->asked[i], key) == 0;
    if (!known) {
        if (view->nasked == (int)(sizeof view->asked / sizeof view->asked[0]))
            return mz_fail(err, MZ_EINTERNAL, "%s: more keys asked for than a view remembers",
                           view->where);
        view->asked[view->nasked++] = key;
    }
    *value = json_object_get(view->object, key);
    if (json_is_null(*value))
        *value = NULL;
    return MZ_OK;
}

static mz_code missing(const mz_json *view, const char *key, mz_err *err) {
    return mz_fail(err, MZ_EINPUT, "%s: key '%s' is missing", view->where, key);
}

static mz_code wrong_type(const mz_json *view, const char *key, const json_t *value,
                          const char *wanted, mz_err *err) {
    return mz_fail(err, MZ_EINPUT, "%s: '%s' is %s, must be %s", view->where, key,
                   type_name(json_typeof(value)), wanted);
}

mz_code mz_json_get(mz_json *view, const char *key, json_type type, json_t **value, mz_err *err) {
    mz_code code = lookup(view, key, value, err);
    if (code)
        return code;
    if (!*value)
        return missing(view, key, err);
    if (json_typeof(*value) != type)
        return wrong_type(view, key, *value, type_name(type), err);
    return MZ_OK;
}

bool mz_json_has(mz_json *view, const char *key) {
    json_t *value = NULL;
    mz_err ignored;
    return lookup(view, key, &value, &ignored) == MZ_OK && value;
}

mz_code mz_json_string(mz_json *view, const char *key, const char **value, mz_err *err) {
    json_t *found;
    mz_code code = mz_json_get(view, key, JSON_STRING, &found, err);
    if (!code)
        *value = json_string_value(found);
    return code;
}

mz_code mz_json_string_or(mz_json *view, const char *key, const char *dflt, const char **value,
                          mz_err *err) {
    *value = dflt;
    return mz_json_has(view, key) ? mz_json_string(view, key, value, err) : MZ_OK;
}

mz_code mz_json_int(mz_json *view, const char *key, int64_t low, int64_t high, int64_t *value,
                    mz_err *err) {
    json_t *found;
    mz_code code = lookup(view, key, &found, err);
    if (code)
        return code;
    if (!found)
        return missing(view, key, err);
    double real = json_number_value(found);
    bool whole_real = json_is_real(found) && real == floor(real) && fabs(real) <= 0x1p53;
    if (!json_is_integer(found) && !whole_real)
        return wrong_type(view, key, found, "a whole number", err);
    int64_t whole = json_is_integer(found) ? (int64_t)json_integer_value(found) : (int64_t)real;
    if (whole < low || whole > high)
        return mz_fail(err, MZ_EINPUT, "%s: '%s' is %lld, must be within [%lld, %lld]", view->where,
                       key, (long long)whole, (long long)low, (long long)high);
    *value = whole;
    return MZ_OK;
}

mz_code mz_json_int_or(mz_json *view, const char *key, int64_t dflt, int64_t low, int64_t high,
                       int64_t *value, mz_err *err) {
    *value = dflt;
    return mz_json_has(view, key) ? mz_json_int(view, key, low, high, value, err) : MZ_OK;
}

mz_code mz_json_bool_or(mz_json *view, const char *key, bool dflt, bool *value, mz_err *err) {
    json_t *found;
    mz_code code = lookup(view, key, &found, err);
    if (code)
        return code;
    *value = dflt;
    if (!found)
        return MZ_OK;
    if (!json_is_boolean(found))
        return wrong_type(view, key, found, "true or false", err);
    *value = json_is_true(found);
    return MZ_OK;
}

mz_code mz_json_quantity(mz_json *view, const char *key, mz_unit unit, double *value, mz_err *err) {
    json_t *found;
    mz_code code = lookup(view, key, &found, err);
    if (code)
        return code;
    if (!found)
        return missing(view, key, err);
    if (json_is_string(found)) {
        char what[MZ_ERR_MAX / 2];
        snprintf(what, sizeof what, "%s: '%s'", view->where, key);
        return mz_unit_parse(json_string_value(found), unit, what, value, err);
    }
    if (!json_is_number(found))
        return wrong_type(view, key, found, "a number or a string with a unit", err);
    double number = json_number_value(found);
    if (number < 0)
        return mz_fail(err, MZ_EINPUT, "%s: '%s' is %g, must not be negative", view->where, key,
                       number);
    *value = number;
    return MZ_OK;
}

mz_code mz_json_quantity_or(mz_json *view, const char *key, mz_unit unit, double dflt,
                            double *value, mz_err *err) {
    *value = dflt;
    return mz_json_has(view, key) ? mz_json_quantity(view, key, unit, value, err) : MZ_OK;
}

static bool is_remark(const char *key) {
    return key[0] == '_' || strcmp(key, "source") == 0 || strcmp(key, "sources") == 0 ||
           strcmp(key, "comment") == 0;
}

mz_code mz_json_no_more(mz_json *view, mz_err *err) {
    const char *key;
    json_t *value;
    json_object_foreach(view->object, key, value) {
        bool known = is_remark(key);
        for (int i = 0; i < view->nasked && !known; i++)
            known = strcmp(view->asked[i], key) == 0;
        if (known)
            continue;
        const char *near = mz_nearest(key, view->asked, view->nasked);
        if (near)
            return mz_fail(err, MZ_EINPUT, "%s: unknown key '%s'; did you mean '%s'?", view->where,
                           key, near);
        return mz_fail(err, MZ_EINPUT, "%s: unknown key '%s'", view->where, key);
    }
    return MZ_OK;
}

/* ---- writing ----------------------------------------------------------------------------------
 */

json_t *mz_json_text(const char *text) {
    errno = 0;
    json_t *value = json_string(text);
    if (value || errno == ENOMEM)
        return value;
    char *clean = strdup(text);
    if (!clean)
        return NULL;
    for (char *c = clean; *c; c++)
        if ((unsigned char)*c >= 0x80)
            *c = '?';
    value = json_string(clean);
    free(clean);
    return value;
}

json_t *mz_json_number(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

static mz_code write_value(const json_t *value, int depth, FILE *out, mz_err *err);

static void write_string(const char *text, size_t length, FILE *out) {
    fputc('"', out);
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else if (c == '\n')
            fputs("\\n", out);
        else if (c == '\t')
            fputs("\\t", out);
        else if (c < 0x20 || c == 0x7f)
            fprintf(out, "\\u%04x", c);
        else
            fputc(c, out);
    }
    fputc('"', out);
}

static mz_code write_real(double real, FILE *out, mz_err *err) {
    if (!isfinite(real))
        return mz_fail(err, MZ_EINTERNAL, "a number in the output is not finite");
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, real);
        if (strtod(text, NULL) == real)
            break;
    }
    fputs(text, out);
    /* A real stays a real for readers that tell them apart. */
    if (!strpbrk(text, ".e"))
        fputs(".0", out);
    return MZ_OK;
}

static void indent(int depth, FILE *out) {
    fprintf(out, "\n%*s", 2 * depth, "");
}

static mz_code write_object(const json_t *value, int depth, FILE *out, mz_err *err) {
    json_t *object = (json_t *)(uintptr_t)value; /* jansson's iterators are not const */
    const char *key;
    json_t *member;
    bool first = true;
    fputc('{', out);
    json_object_foreach(object, key, member) {
        fputs(first ? "" : ",", out);
        first = false;
        indent(depth + 1, out);
        write_string(key, strlen(key), out);
        fputs(": ", out);
        mz_code code = write_value(member, depth + 1, out, err);
        if (code)
            return code;
    }
    if (!first)
        indent(depth, out);
    fputc('}', out);
    return MZ_OK;
}

/* Lists of plain values stand on one line, lists of objects or lists on one line per member. */
static mz_code write_list(const json_t *list, int depth, FILE *out, mz_err *err) {
    size_t count = json_array_size(list);
    bool plain = true;
    for (size_t i = 0; i < count && plain; i++)
        plain = !json_is_object(json_array_get(list, i)) && !json_is_array(json_array_get(list, i));
    fputc('[', out);
    for (size_t i = 0; i < count; i++) {
        fputs(i == 0 ? "" : plain ? ", " : ",", out);
        if (!plain)
            indent(depth + 1, out);
        mz_code code = write_value(json_array_get(list, i), depth + 1, out, err);
        if (code)
            return code;
    }
    if (count && !plain)
        indent(depth, out);
    fputc(']', out);
    return MZ_OK;
}

static mz_code write_value(const json_t *value, int depth, FILE *out, mz_err *err) {
    if (depth > DEPTH_MAX)
        return mz_fail(err, MZ_EINTERNAL, "JSON output nested deeper than %d", DEPTH_MAX);
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return write_object(value, depth, out, err);
    case JSON_ARRAY:
        return write_list(value, depth, out, err);
    case JSON_STRING:
        write_string(json_string_value(value), json_string_length(value), out);
        return MZ_OK;
    case JSON_INTEGER:
        fprintf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        return MZ_OK;
    case JSON_REAL:
        return write_real(json_real_value(value), out, err);
    case JSON_TRUE:
        fputs("true", out);
        return MZ_OK;
    case JSON_FALSE:
        fputs("false", out);
        return MZ_OK;
    case JSON_NULL:
        break;
    }
    fputs("null", out);
    return MZ_OK;
}

json_t *mz_json_whole(json_t *value, bool failed) {
    if (!failed)
        return value;
    json_decref(value);
    return NULL;
}

mz_code mz_json_write(const json_t *value, FILE *out, mz_err *err) {
    mz_code code = write_value(value, 0, out, err);
    if (code)
        return code;
    fputc('\n', out);
    if (ferror(out))
        return mz_fail(err, MZ_EINTERNAL, "cannot write JSON: %s", strerror(errno));
    return MZ_OK;
}
