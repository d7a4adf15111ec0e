/* Everything that is wrong with a trace file. */
#ifndef MIZAN_TRACES_CHECK_H
#define MIZAN_TRACES_CHECK_H

#include "common/base/app.h"

#include <stdint.h>
#include <stdio.h>

/* Reads the whole file, every chunk of every dataset, and prints one line per problem on `out`
 * ("FILE: /pairs/expert[17] is 99, must be below 64"), at most `limit` of them and then how many
 * more; a line that begins "note:" is no problem. *faults counts the problems. MZ_OK when the check
 * could be done, whatever it found; MZ_EINPUT when the file is no trace at all or of a newer
 * version; MZ_EABORTED when app->stop is set. `app` may be NULL: no progress. */
mz_code mz_trace_check(const mz_app *app, const char *path, int64_t limit, FILE *out,
                       int64_t *faults, mz_err *err);

#endif
