/* JSON lines: one object per line, plain, gzip or xz, read one at a time. Errors name file, line
 * and field. Memory: one line. Threads: one reader belongs to one thread at a time. */
#ifndef MIZAN_TRACES_JSONL_H
#define MIZAN_TRACES_JSONL_H

#include "common/base/err.h"
#include "common/io/input.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct mz_jsonl {
    mz_input *input;
    json_t *object; /* of the current line, NULL before the first and after the last */
} mz_jsonl;

mz_code mz_jsonl_open(const char *path, mz_jsonl *in, mz_err *err);
/* The next line's object; in->object is NULL at the end. Empty lines are skipped. A line that is no
 * JSON object, or names a key twice, is MZ_EINPUT. */
mz_code mz_jsonl_next(mz_jsonl *in, mz_err *err);
void mz_jsonl_close(mz_jsonl *in);

/* MZ_EINPUT "PATH: line N: ...". */
mz_code mz_jsonl_fail(const mz_jsonl *in, mz_err *err, const char *fmt, ...) MZ_PRINTF(3, 4);

/* Members of the current object; missing, of another type or out of range: MZ_EINPUT. */
mz_code mz_jsonl_int(const mz_jsonl *in, const char *key, int64_t low, int64_t high, int64_t *value,
                     mz_err *err);
mz_code mz_jsonl_text(const mz_jsonl *in, const char *key, const char **value, mz_err *err);
mz_code mz_jsonl_array(const mz_jsonl *in, const char *key, json_t **value, mz_err *err);

/* One token's `top_k` expert ids (below `experts`, each once) or gate weights (finite, >= 0) out of
 * `array`; `what` names it in the message. */
mz_code mz_jsonl_ids(const mz_jsonl *in, const char *what, const json_t *array, int32_t top_k,
                     int32_t experts, uint16_t *expert, mz_err *err);
mz_code mz_jsonl_weights(const mz_jsonl *in, const char *what, const json_t *array, int32_t top_k,
                         float *weight, mz_err *err);

/* A list of `size` counts, whole and from 0 to 2^32-1 (123.0 is accepted); NULL, or what is wrong
 * with entry *at. */
const char *mz_json_counts(const json_t *array, size_t size, int64_t *count, size_t *at);

#endif
