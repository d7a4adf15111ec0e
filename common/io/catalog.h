/* Shipped data files (hardware profiles, model configurations): one JSON file per name in a folder.
 */
#ifndef MIZAN_IO_CATALOG_H
#define MIZAN_IO_CATALOG_H

#include "common/base/arena.h"
#include "common/base/err.h"

#include <stdbool.h>
#include <stddef.h>

/* Names (file names without ".json") in `folder`, sorted by byte value; strings and array live in
 * `arena`. A folder that cannot be read: MZ_EINPUT. */
mz_code mz_catalog_list(const char *folder, mz_arena *arena, char ***names, int *count,
                        mz_err *err);

/* The file that `name` means: a path when it holds '/' or ends in ".json" (a folder stands for the
 * config.json in it), else a shipped file of `folder`. An unknown name: MZ_EINPUT with the
 * nearest and all shipped ones. `kind` names the thing in messages: "model", "cluster profile". */
mz_code mz_catalog_find(const char *name, const char *folder, const char *kind, char *path,
                        size_t size, mz_err *err);

#endif
