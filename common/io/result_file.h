/* Result files read back: the HDF5 or JSON that `mizan sim` and `mizan replay` write (result.h).
 * HDF5 is read by a child process, so a damaged file is an error like any other; what comes from a
 * file is checked before it is used.
 *
 * Threads: none is shared. */
#ifndef MIZAN_IO_RESULT_FILE_H
#define MIZAN_IO_RESULT_FILE_H

#include "common/base/arena.h"
#include "common/base/err.h"
#include "common/io/memcat.h"
#include "common/io/phase.h"
#include "common/io/speed.h"

#include <jansson.h>
#include <stdint.h>

typedef struct mz_run_file {
    json_t *json;               /* the run's object; borrowed */
    const char *policy;         /* borrowed */
    int64_t steps;              /* records */
    double *step_s;             /* [steps], or NULL: JSON without --detail */
    int64_t *ordinal;           /* [steps] which step of the window each record is; with step_s */
    double *probe_s[MZ_SPEEDS]; /* [steps] or NULL: the machine's speeds before each
                                   (replay/probe.h) */
    int32_t ranks;              /* of the following; 0: none is there */
    double *rank_busy_s;        /* [ranks] or NULL */
    int64_t *rank_memory;       /* [ranks][MZ_MEM_CATEGORIES] or NULL */
    int32_t layers;             /* of detail_s; the last stands for the whole step */
    double *detail_s;           /* [steps][layers][ranks][MZ_PHASES] or NULL; finite, >= 0 */
} mz_run_file;

typedef struct mz_result_file {
    json_t *root; /* the whole JSON object, owned */
    mz_run_file *run;
    int runs;
    char digest[80]; /* mz_result_digest of it */
    mz_arena arena;
} mz_result_file;

/* MZ_EINPUT: not such a file, or one that contradicts itself; names what. */
mz_code mz_result_load(const char *path, mz_result_file *file, mz_err *err);
void mz_result_file_free(mz_result_file *file); /* zeroed or loaded */

/* What a result says, whatever file holds it: SHA-256 of the JSON object as mz_json_write puts it,
 * without any `detail`, and then of the detail of each run, in binary: of every array that is there
 * its name with a zero byte, the number of its sizes, the sizes, the values; all numbers of eight
 * bytes, the least significant first. In this order: step_time_s [steps], step_ordinal [steps],
 * rank_busy_s [ranks], rank_memory_bytes [ranks][categories], and for every phase with any time
 * in detail_s its own array of that name [steps][layers][ranks]. The prefix tells it from digests
 * of before, which were of the text alone. Into text[80]. */
#define MZ_RESULT_DIGEST "sha256/2:"
mz_code mz_result_digest(const mz_result_file *file, char text[80], mz_err *err);

/* Whether the detail that a run of routed layers has adds up to its summary: step times, phases,
 * and that the memory of its peak is no more than the most of each category. MZ_EINPUT names the
 * first that does not. */
mz_code mz_result_adds_up(const mz_run_file *run, mz_err *err);

#endif
