/* "RANK:VALUE,...": a value that holds from a rank on, and the placing of ranks on pipeline stages.
 */
#ifndef MIZAN_TRACES_IMPORTERS_RANKS_H
#define MIZAN_TRACES_IMPORTERS_RANKS_H

#include "traces/jsonl.h"

#include <stdbool.h>
#include <stdint.h>

/* Value of `rank` in the list of an option: of the pair with the largest RANK that is not above it.
 * `exact` demands a pair for the rank itself. MZ_EINPUT: the list does not parse, or has none. */
mz_code mz_rank_value(const char *option, const char *list, int64_t rank, bool exact,
                      int64_t *value, mz_err *err);

/* The number after the last "rank" in a file's name ("rank12.jsonl", "x_rank_3.txt"), or -1. */
int64_t mz_rank_of_name(const char *path);

/* A rank's file as the importers of per-rank recordings see it. */
typedef struct mz_rank_file {
    int64_t rank;   /* as recorded */
    int64_t offset; /* of its layer numbers: one offset is one pipeline stage */
    int32_t source; /* derived: its place among the ranks of its stage, the trace's source rank */
} mz_rank_file;

/* Fills offset (from --layer-offsets, may be NULL: 0) and source of all; *sources is the number of
 * ranks of a stage. MZ_EINPUT: a rank twice, or stages of different size. */
mz_code mz_rank_stages(mz_rank_file *file, int count, const char *layer_offsets, int32_t *sources,
                       mz_err *err);

/* Of the recordings of Megatron-LM: moves to the next line of the decoder; lines of the multi-token
 * prediction are counted in *skipped. `key` names the member with the line's step: *step, which
 * must not fall from line to line. */
mz_code mz_megatron_next(mz_jsonl *lines, const char *key, int64_t *step, int64_t *skipped,
                         mz_err *err);

#endif
