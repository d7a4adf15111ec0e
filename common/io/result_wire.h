/* What the child that reads an HDF5 result file says: blocks, each a header and its data in pieces
 * of MZ_RESULT_PIECE bytes (the last one shorter). Private to result_file.c and result_child.c. */
#ifndef MIZAN_IO_RESULT_WIRE_H
#define MIZAN_IO_RESULT_WIRE_H

#include "common/io/speed.h"

#include <stdint.h>

enum { MZ_RESULT_PIECE = 1 << 14 };

typedef enum mz_result_what {
    MZ_RESULT_JSON,    /* the text */
    MZ_RESULT_STEPS,   /* step_time_s */
    MZ_RESULT_ORDINAL, /* step_ordinal */
    MZ_RESULT_PROBE,   /* of mz_speed: probe_s, ...; these of all speeds */
    MZ_RESULT_PROBE_LAST = MZ_RESULT_PROBE + MZ_SPEEDS - 1,
    MZ_RESULT_BUSY,    /* rank_busy_s */
    MZ_RESULT_MEMORY,  /* rank_memory_bytes [ranks][categories] */
    MZ_RESULT_DETAIL,  /* detail_s [steps][layers][ranks][phases] */
    MZ_RESULT_COLUMNS, /* names of the phases, text */
    MZ_RESULT_END,
    MZ_RESULT_FAILED /* the text says what */
} mz_result_what;

typedef struct mz_result_block {
    int32_t what, run;
    int64_t bytes;
    int64_t size[4]; /* of the dimensions; 0 beyond them */
} mz_result_block;

/* The child's work: reads the file and says all of it. */
void mz_result_child(int fd, const char *path);

#endif
