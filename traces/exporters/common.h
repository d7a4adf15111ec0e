/* What exporters share: folders that appear whole or not at all, the micro-batches of a trace, and
 * the loads of a static placement. */
#ifndef MIZAN_TRACES_EXPORTERS_COMMON_H
#define MIZAN_TRACES_EXPORTERS_COMMON_H

#include "traces/exporter.h"
#include "traces/stream.h"

#include <stdio.h>

/* A folder under construction: PATH.partial-PID until the commit gives it its name. */
typedef struct mz_folder {
    char path[4096], partial[4200];
} mz_folder;

/* MZ_EINPUT: PATH exists or cannot be made. */
mz_code mz_folder_begin(mz_folder *folder, const char *path, mz_err *err);
/* A new file of the folder, to be closed with mz_folder_close. */
mz_code mz_folder_open(const mz_folder *folder, const char *name, FILE **file, mz_err *err);
/* Flushes and closes; NULL is allowed. What could not be written is MZ_EINTERNAL. */
mz_code mz_folder_close(const mz_folder *folder, FILE **file, mz_err *err);
mz_code mz_folder_commit(mz_folder *folder, mz_err *err);
void mz_folder_abandon(mz_folder *folder); /* removes what is there; no-op after the commit */

/* Writes one file, whole or not at all: `write` prints it to `out`. */
mz_code mz_export_file(const char *path, mz_code (*write)(void *self, FILE *out, mz_err *err),
                       void *self, mz_err *err);

/* Calls *first to *end - 1 of the window of steps in `options`. MZ_EINPUT: no step in it. */
mz_code mz_export_window(mz_trace *trace, const mz_export_options *options, int64_t *first,
                         int64_t *end, mz_err *err);

/* One (step, micro-batch) that has every layer of every rank in it: the call of layer l and the
 * r-th of its ranks is first + l * ranks + r. */
typedef struct mz_batch {
    int64_t step, first;
    int32_t micro_batch, ranks;
} mz_batch;

/* The micro-batches of the window of steps in `options`; caller frees *batch. MZ_EINPUT: a window
 * outside the trace, or a rank that lacks a layer. */
mz_code mz_export_batches(mz_trace *trace, const mz_export_options *options, mz_batch **batch,
                          int64_t *count, mz_err *err);

/* Which rank an expert lives on when experts lie in contiguous blocks, as even as they can be. */
int32_t mz_static_rank(int32_t expert, int32_t experts, int32_t ranks);

/* Opens a stream of loads on the options' window and ranks; checks that every rank gets an expert
 * and that the bytes of a row are known: *row_bytes. */
mz_code mz_export_loads(mz_trace *trace, const mz_export_options *options, mz_stream **stream,
                        int64_t *row_bytes, mz_err *err);

/* bytes[R * source + rank] of one dispatch: pairs of `load` to the experts of each rank times
 * row_bytes. MZ_EINPUT: their sum is beyond 64 bits. */
mz_code mz_export_matrix(const mz_load *load, int64_t row_bytes, int64_t *bytes, mz_err *err);

/* Adds "; text" to a list of remarks; what does not fit is left out. */
void mz_remark(char *list, size_t size, const char *fmt, ...) MZ_PRINTF(3, 4);

/* Names what of the trace is recorded and the caller's format does not hold. */
typedef struct mz_carries {
    bool weights, sequences, steps, micro_batches, ranks;
} mz_carries;
void mz_export_lost(mz_trace *trace, const mz_carries *carries, mz_export_report *report);

/* MZ_EINPUT unless the trace holds pairs with a fixed top-k. */
mz_code mz_export_need_top_k(mz_trace *trace, const char *format, mz_err *err);

/* MZ_EABORTED once the user has interrupted. */
mz_code mz_export_stopped(const mz_app *app, mz_err *err);

#endif
