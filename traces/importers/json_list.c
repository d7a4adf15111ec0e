#include "traces/importers/json_list.h"

#include "common/base/arena.h"
#include "common/io/input.h"
#include "common/io/json.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 1 << 16 };

static const size_t TEXT_MAX = (size_t)64 << 20;

typedef struct text {
    char *data;
    size_t used, room;
} text;

/* Where the reader stands. Brackets are only counted: whether they fit, the parser of each part
 * says. */
typedef struct list_scan {
    const char *path, *key;
    mz_code (*take)(void *self, size_t index, json_t *element, mz_err *err);
    void *self;
    text rest, element;
    int64_t depth;
    bool in_text, escaped;
    size_t text_begin;       /* of the last text outside of the list, in `rest` */
    int at_key;              /* 1: behind the key, 2: behind its colon */
    bool inside, found, any; /* any: the element has a byte that is no space */
    size_t index;
} list_scan;

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static const char *name_of(const list_scan *scan) {
    return scan->key ? scan->key : "element ";
}

static mz_code append(const list_scan *scan, text *to, char c, mz_err *err) {
    if (to->used == TEXT_MAX && scan->inside)
        return mz_fail(err, MZ_EINPUT, "%s: %s[%zu]: more than 64 MiB in one element; split it",
                       scan->path, name_of(scan), scan->index);
    if (to->used == TEXT_MAX)
        return mz_fail(err, MZ_EINPUT, "%s: JSON of more than 64 MiB in one value; split it",
                       scan->path);
    if (!mz_grow((void **)&to->data, &to->room, to->used + 1, 1))
        return mz_fail_nomem(err, "a JSON value");
    to->data[to->used++] = c;
    return MZ_OK;
}

/* The element that ended. */
static mz_code end_element(list_scan *scan, mz_err *err) {
    json_error_t why;
    json_t *element = mz_json_parse(scan->element.data, scan->element.used, JSON_DECODE_ANY, &why);
    mz_code code = MZ_OK;
    if (element)
        code = scan->take(scan->self, scan->index, element, err);
    else if (json_error_code(&why) == json_error_out_of_memory)
        code = mz_fail_nomem(err, "a JSON value");
    else
        code = mz_fail(err, MZ_EINPUT, "%s: %s[%zu]: not valid JSON (damaged?): %s", scan->path,
                       name_of(scan), scan->index, why.text);
    json_decref(element);
    scan->element.used = 0;
    scan->any = false;
    scan->index++;
    return code;
}

/* A byte within the list; depth 0 is the list's own. */
static mz_code take_inside(list_scan *scan, char c, mz_err *err) {
    bool own = scan->depth == 0 && !scan->in_text;
    if (own && (c == ',' || c == ']')) {
        mz_code code = scan->any || c == ',' || scan->index > 0 ? end_element(scan, err) : MZ_OK;
        if (c == ',' || code)
            return code;
        scan->inside = false;
        scan->depth = scan->key ? 1 : 0;
        return append(scan, &scan->rest, c, err);
    }
    scan->any = scan->any || !is_space(c);
    return append(scan, &scan->element, c, err);
}

/* Whether the text that ended is the key. */
static bool is_key(const list_scan *scan) {
    size_t length = strlen(scan->key), begin = scan->text_begin;
    return scan->rest.used - begin == length + 2 &&
           memcmp(scan->rest.data + begin + 1, scan->key, length) == 0;
}

/* A byte outside; the list may begin with it. */
static mz_code take_outside(list_scan *scan, char c, bool text_ended, mz_err *err) {
    bool space = is_space(c);
    mz_code code = append(scan, &scan->rest, c, err);
    if (code || scan->found || space || scan->in_text)
        return code;
    bool here = scan->key ? scan->at_key == 2 && c == '[' : scan->rest.used == 1 && c == '[';
    if (here) {
        scan->inside = scan->found = true;
        scan->depth = 0;
    } else if (scan->key) {
        scan->at_key = text_ended && scan->depth == 1 && is_key(scan) ? 1
                       : scan->at_key == 1 && c == ':'                ? 2
                                                                      : 0;
    } else {
        scan->found = true; /* the document is no list */
    }
    return MZ_OK;
}

static mz_code take_byte(list_scan *scan, char c, mz_err *err) {
    bool text_ended = scan->in_text && !scan->escaped && c == '"';
    bool begins = !scan->in_text && c == '"';
    if (scan->in_text) {
        scan->escaped = !scan->escaped && c == '\\';
        scan->in_text = !text_ended;
    } else if (c == '[' || c == '{') {
        scan->depth++;
    }
    if (begins)
        scan->text_begin = scan->rest.used;
    bool closes = !scan->in_text && !text_ended && (c == ']' || c == '}');
    mz_code code;
    if (scan->inside) {
        bool own_end = closes && scan->depth == 0;
        code = take_inside(scan, c, err);
        closes = closes && !own_end;
    } else {
        code = take_outside(scan, c, text_ended, err);
    }
    scan->depth -= closes;
    scan->in_text = scan->in_text || begins;
    return code;
}

static mz_code parse_rest(const list_scan *scan, json_t **rest, mz_err *err) {
    json_error_t why;
    if (scan->inside)
        return mz_fail(err, MZ_EINPUT, "%s: the JSON ends within %s[%zu]: it is truncated",
                       scan->path, name_of(scan), scan->index);
    *rest = mz_json_parse(scan->rest.data, scan->rest.used, 0, &why);
    if (*rest)
        return MZ_OK;
    if (json_error_code(&why) == json_error_out_of_memory)
        return mz_fail_nomem(err, "a JSON value");
    return mz_fail(err, MZ_EINPUT, "%s: not valid JSON%s: %s", scan->path,
                   (size_t)why.position + 1 >= scan->rest.used ? " (is it truncated?)" : "",
                   why.text);
}

static mz_code scan_file(list_scan *scan, mz_input *input, mz_err *err) {
    char *chunk = mz_calloc(CHUNK, 1);
    size_t got = 1;
    mz_code code = chunk ? MZ_OK : mz_fail_nomem(err, "a chunk of JSON");
    while (!code && got > 0) {
        code = mz_input_read(input, chunk, CHUNK, &got, err);
        for (size_t i = 0; i < got && !code; i++)
            code = take_byte(scan, chunk[i], err);
    }
    free(chunk);
    return code;
}

mz_code mz_json_list(const char *path, const char *key,
                     mz_code (*take)(void *self, size_t index, json_t *element, mz_err *err),
                     void *self, json_t **rest, mz_err *err) {
    mz_input *input = NULL;
    list_scan scan = {.path = path, .key = key, .take = take, .self = self};
    *rest = NULL;
    mz_code code = mz_input_open(path, &input, err);
    if (!code)
        code = scan_file(&scan, input, err);
    if (!code)
        code = parse_rest(&scan, rest, err);
    free(scan.rest.data);
    free(scan.element.data);
    mz_input_close(&input);
    return code;
}
