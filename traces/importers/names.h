/* Names numbered from 0 in order of their first appearance. */
#ifndef MIZAN_TRACES_IMPORTERS_NAMES_H
#define MIZAN_TRACES_IMPORTERS_NAMES_H

#include "common/base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MZ_NAMES_MAX = 1 << 22 };

/* Memory: the text, 8 bytes a name, and 4 to 16 of the table that finds it. */
typedef struct mz_names {
    char *text;
    size_t used, text_room;
    int64_t *begin; /* of each name in `text` */
    int32_t count;
    size_t begin_room;
    int32_t *slot; /* open addressing: a name's number + 1; 0: free */
    size_t slots;
} mz_names;

/* Number of `name`; *fresh: it was not there. MZ_EINPUT: more than MZ_NAMES_MAX, or 256 MiB. */
mz_code mz_names_number(mz_names *names, const char *name, int32_t *number, bool *fresh,
                        mz_err *err);
const char *mz_names_text(const mz_names *names, int32_t number);
void mz_names_free(mz_names *names);

#endif
