/* Elements of a long list in a JSON document, parsed one at a time: what is held is one element and
 * what stands outside of the list, as text and parsed (up to 20 bytes per byte of text). */
#ifndef MIZAN_TRACES_IMPORTERS_JSON_LIST_H
#define MIZAN_TRACES_IMPORTERS_JSON_LIST_H

#include "common/base/err.h"

#include <jansson.h>
#include <stddef.h>

/* Hands every element of the list that is member `key` of the document (NULL: of the document that
 * is a list itself) to `take`, in order. *rest, to be released, is the document with that list
 * empty. Where there is no such list no element is handed over, and *rest is all.
 * MZ_EINPUT: no valid JSON, truncated, more than 64 MiB in one element or outside of the list. */
mz_code mz_json_list(const char *path, const char *key,
                     mz_code (*take)(void *self, size_t index, json_t *element, mz_err *err),
                     void *self, json_t **rest, mz_err *err);

#endif
