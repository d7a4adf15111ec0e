/* "RANK:VALUE,...": a value that holds from a rank on, and the placing of ranks on pipeline stages.
 */
#ifndef MIZAN_TRACES_IMPORTERS_RANKS_H
#define MIZAN_TRACES_IMPORTERS_RANKS_H

#include "traces/importers/common.h"

/* Value of `rank` in the list of an option: of the pair with the largest RANK that is not above it.
 * `exact` demands a pair for the rank itself. MZ_EINPUT: the list does not parse, or has none. */
mz_code mz_rank_value(const char *option, const char *list, int64_t rank, bool exact,
                      int64_t *value, mz_err *err);

/* Order of int64 numbers, for qsort and bsearch. */
int mz_number_order(const void *a, const void *b);

/* The number after the last "rank" in a file's name ("rank12.jsonl", "x_rank_3.txt"), or -1. */
int64_t mz_rank_of_name(const char *path);

/* A rank's file as the importers of per-rank recordings see it. */
typedef struct mz_rank_file {
    const char *path;
    int64_t rank;   /* as recorded */
    int64_t offset; /* of its layer numbers: one offset is one pipeline stage */
    int32_t source; /* derived: its place among the ranks of its stage, the trace's source rank */
} mz_rank_file;

/* Fills offset (from --layer-offsets, may be NULL: 0) and source of all; *sources is the number of
 * ranks of a stage. MZ_EINPUT: a rank twice, or stages of different size. */
mz_code mz_rank_stages(mz_rank_file *file, int count, const char *layer_offsets, int32_t *sources,
                       mz_err *err);

/* The numbers below `world`, or up to the highest of `rank` if that is more, that are not among the
 * `count` of `rank`: how many, and "2, 5-7" of them in `text` (cut short with "..."). MZ_ENOMEM. */
mz_code mz_ranks_missing(const int64_t *rank, size_t count, int64_t world, int64_t *missing,
                         char *text, size_t size, mz_err *err);
/* Notes in the report, which is printed, and in the trace that files of ranks are missing, if they
 * are: what is there makes a trace of fewer source ranks. */
mz_code mz_ranks_note(mz_import_report *report, mz_trace_facts *facts, const int64_t *rank,
                      size_t count, int64_t world, mz_err *err);

/* The same of the ranks of files; no more are known of than the highest. */
mz_code mz_rank_files_missing(const mz_rank_file *file, int count, int64_t world, int64_t *missing,
                              char *text, size_t size, mz_err *err);
mz_code mz_rank_files_note(mz_import_report *report, mz_trace_facts *facts,
                           const mz_rank_file *file, int count, mz_err *err);

/* Of the recordings of Megatron-LM: moves to the next line of the decoder; lines of the multi-token
 * prediction are counted in *skipped. `key` names the member with the line's step: *step, which
 * must not fall from line to line. */
mz_code mz_megatron_next(mz_jsonl *lines, const char *key, int64_t *step, int64_t *skipped,
                         mz_err *err);

#endif
