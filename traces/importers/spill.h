/* Records of one size, added in any order and read back in order, in bounded memory: what does not
 * fit is sorted in parts, which wait in a file without a name beside the output and are merged.
 *
 * Memory: MZ_SPILL_BYTES, half as much again while parts are sorted or merged. The file grows to as
 * many bytes as all records; nothing of it is left, whatever ends the program.
 * Threads: one spill belongs to one thread at a time. */
#ifndef MIZAN_TRACES_IMPORTERS_SPILL_H
#define MIZAN_TRACES_IMPORTERS_SPILL_H

#include "common/base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MZ_SPILL_BYTES ((size_t)64 << 20)

typedef struct mz_spill_run mz_spill_run;

typedef struct mz_spill {
    size_t size;                              /* of a record */
    int (*order)(const void *, const void *); /* as for qsort; equal records stay in no order */
    const char *beside;                       /* a path in the directory of the file */
    size_t most;                              /* bytes held in memory; MZ_SPILL_BYTES */
    int64_t records;
    unsigned char *held; /* records that are not in the file */
    size_t room, used;   /* in records */
    mz_spill_run *run;   /* sorted parts in the file */
    size_t runs, run_room;
    size_t *heap;           /* of runs, by their next record */
    size_t heap_size, next; /* next of `held`; with runs: 1 once a record was handed out */
    int fd;
} mz_spill;

/* An empty spill; `beside` must outlive it. */
mz_spill mz_spill_make(size_t size, int (*order)(const void *, const void *), const char *beside);
mz_code mz_spill_add(mz_spill *spill, const void *record, mz_err *err);
/* To the first record in order; nothing is added after this. As often as wanted. */
mz_code mz_spill_rewind(mz_spill *spill, mz_err *err);
/* The next record, valid until the next call; NULL behind the last. */
mz_code mz_spill_next(mz_spill *spill, const void **record, mz_err *err);
void mz_spill_free(mz_spill *spill);

#endif
