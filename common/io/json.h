/* JSON through jansson, with what users need: file, line and column in errors, unknown keys refused
 * with a suggestion, numbers or strings with units, and output whose bytes are reproducible. */
#ifndef MIZAN_IO_JSON_H
#define MIZAN_IO_JSON_H

#include "common/base/err.h"
#include "common/base/units.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* A value in memory, refusing duplicate keys; flags: more of JSON_DECODE_*. NULL when the text is
 * no JSON, or with json_error_code(why) == json_error_out_of_memory when memory was short: jansson
 * itself calls the text invalid then, or loses a byte of a string. Caller json_decref()s. */
json_t *mz_json_parse(const char *text, size_t length, size_t flags, json_error_t *why);

/* Loads a whole JSON file (plain, .gz or .xz; duplicate keys refused). Caller json_decref()s. */
mz_code mz_json_load(const char *path, json_t **value, mz_err *err);

/* A view of one object that remembers which keys were asked for. `where` names it in errors:
 * "a100.json: links[0]". Views nest; they do not own. Getters return MZ_EINPUT naming file and key
 * when the key is missing (without _or), of the wrong type or out of range. */
typedef struct mz_json {
    json_t *object;
    char where[256];
    const char *asked[64];
    int nasked;
} mz_json;

mz_code mz_json_object(json_t *value, const char *where, mz_json *view, mz_err *err);
mz_code mz_json_string(mz_json *view, const char *key, const char **value, mz_err *err);
mz_code mz_json_string_or(mz_json *view, const char *key, const char *dflt, const char **value,
                          mz_err *err);
mz_code mz_json_int(mz_json *view, const char *key, int64_t low, int64_t high, int64_t *value,
                    mz_err *err);
mz_code mz_json_int_or(mz_json *view, const char *key, int64_t dflt, int64_t low, int64_t high,
                       int64_t *value, mz_err *err);
mz_code mz_json_bool_or(mz_json *view, const char *key, bool dflt, bool *value, mz_err *err);
/* A number, or a string with a unit ("400 GB/s"). */
mz_code mz_json_quantity(mz_json *view, const char *key, mz_unit unit, double *value, mz_err *err);
mz_code mz_json_quantity_or(mz_json *view, const char *key, mz_unit unit, double dflt,
                            double *value, mz_err *err);
mz_code mz_json_get(mz_json *view, const char *key, json_type type, json_t **value, mz_err *err);
bool mz_json_has(mz_json *view, const char *key);
/* MZ_EINPUT if the object has a key that was never asked for; names it and the nearest known one.
 * Keys that start with '_' or are named "source"/"sources"/"comment" are remarks and always
 * allowed. */
mz_code mz_json_no_more(mz_json *view, mz_err *err);

/* A string for output: text that is not UTF-8 (a path may be anything) gets '?' for its bytes
 * beyond ASCII. NULL when memory is short. */
json_t *mz_json_text(const char *text);
/* A number for output, null where it is not finite. NULL when memory is short. */
json_t *mz_json_number(double value);
/* The object or list, or NULL, and it is freed, where `failed`: a part of it could not be had. */
json_t *mz_json_whole(json_t *value, bool failed);

/* Writes with 2-space indent, lists of plain values on one line, keys in insertion order,
 * reals with 15 to 17 significant digits, the fewest that read back equal, non-finite numbers
 * refused (MZ_EINTERNAL). Ends with a newline. */
mz_code mz_json_write(const json_t *value, FILE *out, mz_err *err);

#endif
