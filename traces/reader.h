/* Inside of the trace reader, shared by its files and the checker. Private to this room. */
#ifndef MIZAN_TRACES_READER_H
#define MIZAN_TRACES_READER_H

#include "traces/chunk.h"
#include "traces/server.h"
#include "traces/trace.h"

#include <stdio.h>

/* Where problems of a file go. Opening stops at the first one; checking lists them all. */
typedef struct mz_faults {
    const char *path;
    FILE *out;     /* NULL: stop at the first */
    int64_t found; /* so far */
    int64_t limit; /* lines printed at most */
    mz_err *err;
} mz_faults;

/* MZ_EINPUT when the caller must stop, MZ_OK when it goes on to the next problem. */
mz_code mz_fault(mz_faults *faults, const char *fmt, ...) MZ_PRINTF(2, 3);

/* The same for a complete message that another function made. */
mz_code mz_fault_line(mz_faults *faults, const mz_err *line);

typedef struct mz_cached_chunk {
    int64_t chunk; /* -1: empty */
    uint64_t used; /* clock of the last use */
    uint8_t *data;
} mz_cached_chunk;

enum { MZ_CACHE_ENTRIES = 32, MZ_CACHE_BYTES = 32 << 20 };

/* One dataset of an open trace: its shape, and the decoded chunks used last. */
typedef struct mz_column_reader {
    bool present, usable; /* usable: shape, type and filters are what the format allows */
    mz_elem elem;
    int64_t rows, width, chunk_rows;
    size_t row_size;
    mz_pipeline pipeline;
    mz_cached_chunk cache[MZ_CACHE_ENTRIES];
    int entries;     /* of the cache, by chunk size */
    int recent;      /* entry used last */
    int64_t asked;   /* chunk requested from the child, -1 none */
    int64_t decoded; /* chunk decoded last, -1 none */
    bool arrived;
    mz_chunk_reply reply; /* when arrived */
    char wrong[256];      /* copy of reply.wrong, which does not last */
} mz_column_reader;

/* Place of a token in /rows/pairs whose running sum is known: ends of the range asked for last, so
 * that going on does not begin anew. */
typedef struct mz_pair_mark {
    int64_t index, token, pair;
} mz_pair_mark;

struct mz_trace {
    char *path;
    int64_t file_size;
    mz_trace_facts facts;
    mz_server *server;
    mz_codec *codec;
    mz_column_reader col[MZ_COLUMNS];
    mz_trace_call *calls;
    int64_t call_count;
    mz_trace_sequence *sequences;
    int64_t sequence_count;
    mz_trace_step *steps;
    int64_t step_count;
    bool complete;   /* the writer closed the file */
    bool consistent; /* attributes and calls can be relied on */
    mz_pair_mark mark[2];
    uint64_t clock;
};

/* Opens and validates; with faults->out set, goes on after faults as far as that makes sense and
 * returns MZ_OK with trace->consistent false. */
mz_code mz_trace_load(const char *path, mz_faults *faults, mz_trace **trace, mz_err *err);

/* Describes the dataset of every column and validates shapes and types. */
mz_code mz_columns_open(mz_trace *trace, mz_faults *faults, mz_err *err);
void mz_columns_free(mz_trace *trace);

/* Rows from `row` on that lie in one chunk, at most `limit`, decoded and verified. The pointer is
 * good until the next call for the same column. MZ_EINPUT names file, dataset and row. */
mz_code mz_column_span(mz_trace *trace, mz_column_id id, int64_t row, int64_t limit,
                       const uint8_t **data, int64_t *n, mz_err *err);
mz_code mz_column_ints(mz_trace *trace, mz_column_id id, int64_t row, int64_t n, int64_t *out,
                       mz_err *err);
mz_code mz_column_reals(mz_trace *trace, mz_column_id id, int64_t row, int64_t n, double *out,
                        mz_err *err);
/* "/pairs/expert": into buffer, returned. */
const char *mz_column_path(mz_column_id id, char buffer[64]);

/* First sequence that begins at token `token` or later; the number of sequences when none does. */
int64_t mz_find_sequence(const mz_trace *trace, int64_t token);

/* Reads calls, sequences and steps and validates them against each other. */
mz_code mz_tables_load(mz_trace *trace, mz_faults *faults, mz_err *err);

/* As mz_trace_add_counts, for tokens [first, first+tokens) of a call of kind pairs. */
mz_code mz_trace_add_range(mz_trace *trace, int64_t index, int64_t first, int64_t tokens,
                           int64_t *count, mz_err *err);

/* Messages about the first bad value of a span (its row in the dataset is first + i). */
mz_code mz_bad_id(const mz_trace *trace, mz_column_id id, const uint8_t *data, int64_t n,
                  int64_t first, mz_err *err);
mz_code mz_bad_norm(const mz_trace *trace, mz_column_id id, const uint8_t *data, int64_t n,
                    int64_t first, mz_err *err);

#endif
