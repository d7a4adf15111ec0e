/* The datasets of a trace file as one table: writer, reader and checker walk it, and FORMAT.md
 * describes it in words. Private to this room. */
#ifndef MIZAN_TRACES_SCHEMA_H
#define MIZAN_TRACES_SCHEMA_H

#include "traces/trace.h"

enum {
    MZ_TRACE_VERSION = 1,
    MZ_CHUNK_MAX = 16 << 20, /* largest chunk that a file may hold, in bytes */
    MZ_EXPERTS_MAX = 65536,
    MZ_LAYERS_MAX = 1 << 16,
    MZ_RANKS_MAX = 1 << 20
};

typedef enum mz_column_id {
    MZ_COL_STEP,
    MZ_COL_MICRO_BATCH,
    MZ_COL_LAYER,
    MZ_COL_RANK,
    MZ_COL_TOKEN_BEGIN,
    MZ_COL_TOKENS,
    MZ_COL_PAIRS,
    MZ_COL_EXPERT,
    MZ_COL_WEIGHT,
    MZ_COL_HIDDEN_NORM2,
    MZ_COL_ROW_PAIRS,
    MZ_COL_GRAD_NORM2,
    MZ_COL_INPUT_NORM2,
    MZ_COL_COUNTS,
    MZ_COL_SEQ_TOKEN_BEGIN,
    MZ_COL_SEQ_TOKENS,
    MZ_COL_SEQ_DOMAIN,
    MZ_COL_STEPS_STEP,
    MZ_COL_LOSS,
    MZ_COL_LEARNING_RATE,
    MZ_COL_WALL_TIME,
    MZ_COLUMNS,
    MZ_CALL_COLUMNS = MZ_COL_PAIRS + 1
} mz_column_id;

/* Element types of the format. */
typedef enum mz_elem {
    MZ_ELEM_OTHER, /* anything that the format does not know */
    MZ_ELEM_U8,
    MZ_ELEM_U16,
    MZ_ELEM_U32,
    MZ_ELEM_U64,
    MZ_ELEM_I8,
    MZ_ELEM_I16,
    MZ_ELEM_I32,
    MZ_ELEM_I64,
    MZ_ELEM_F16,
    MZ_ELEM_F32,
    MZ_ELEM_F64
} mz_elem;

typedef struct mz_column {
    const char *group, *name;
    const char *units, *long_name;
    mz_elem elem;     /* what the writer stores; expert and weight may be narrower */
    unsigned accepts; /* bit set of mz_elem that a reader must take */
    int chunk_rows;   /* rows of a chunk; 0: as many as make 1 MiB */
} mz_column;

extern const mz_column mz_columns[MZ_COLUMNS];

size_t mz_elem_size(mz_elem elem); /* bytes; 0 for MZ_ELEM_OTHER */
const char *mz_elem_name(mz_elem elem);

/* Whether a trace with these facts holds the column. */
bool mz_column_wanted(mz_column_id id, const mz_trace_facts *facts);

/* Names of enumerations as the file spells them. */
extern const char *const mz_kind_names[2];  /* pairs, counts */
extern const char *const mz_phase_names[3]; /* train, prefill, decode */
extern const char *const mz_step_names[3];  /* iteration, forward, none */

/* Well-formed UTF-8 (RFC 3629) without control characters, as every string of the format is: facts
 * end up in JSON and on terminals. */
bool mz_text_is_clean(const char *text);

#endif
