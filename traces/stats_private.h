/* What the files of the statistics share. Private to this room. */
#ifndef MIZAN_TRACES_STATS_PRIVATE_H
#define MIZAN_TRACES_STATS_PRIVATE_H

#include "common/base/arena.h"
#include "traces/stats.h"

#include <math.h>
#include <string.h>

/* Tables larger than this are not made; what needs them is NaN. */
enum { MZ_STATS_TABLE = 256 << 20 };

/* A table of counts of that many entries, or NULL with MZ_OK when it would be too large. */
mz_code mz_stats_table(mz_arena *arena, double entries, size_t size, void **table, mz_err *err);

/* ---- stats_skew.c: from the totals of the window --------------------------------------------- */

void mz_stats_skew(const int64_t *total, int32_t experts, int32_t ranks, int64_t *scratch,
                   double *metric);

/* ---- stats_drift.c: from loads of steps ------------------------------------------------------ */

typedef struct mz_stats_drift mz_stats_drift;

mz_code mz_stats_drift_make(mz_arena *arena, const mz_trace_facts *facts, mz_stats_drift **drift,
                            mz_err *err);
/* One call's counts. */
void mz_stats_drift_call(mz_stats_drift *drift, int32_t layer, int32_t rank, const int64_t *count);
/* After the last call of a step; in_window: of the steps asked for. */
void mz_stats_drift_step(mz_stats_drift *drift, bool before_window, bool in_window);
void mz_stats_drift_finish(const mz_stats_drift *drift, int32_t layer, double *metric);

/* ---- stats_sequence.c: tokens of sequences, one layer's sequence after another --------------- */

typedef struct mz_stats_sequence mz_stats_sequence;

mz_code mz_stats_sequence_make(mz_arena *arena, int32_t layers, int32_t experts,
                               mz_stats_sequence **sequence, mz_err *err);
void mz_stats_sequence_begin(mz_stats_sequence *sequence, int32_t layer, int64_t tokens);
/* `n` different experts of the next token of that sequence. */
void mz_stats_sequence_token(mz_stats_sequence *sequence, const uint16_t *expert, int64_t n);
/* chose[e]: tokens of the layer that chose e, of `tokens`. */
void mz_stats_sequence_finish(const mz_stats_sequence *sequence, int32_t layer,
                              const int64_t *chose, int64_t tokens, double *metric);

/* ---- stats_token.c: single tokens ------------------------------------------------------------ */

typedef struct mz_stats_token mz_stats_token;

mz_code mz_stats_token_make(mz_arena *arena, int32_t layers, int32_t experts, bool weights,
                            mz_stats_token **token, mz_err *err);
/* `n` different experts of a token, weights (NULL: none); `before`: its first expert in the layer
 * before, -1 none. Returns its first expert. */
int32_t mz_stats_token_add(mz_stats_token *token, int32_t layer, const uint16_t *expert,
                           const float *weight, int64_t n, int32_t before);
const int64_t *mz_stats_token_chose(const mz_stats_token *token, int32_t layer, int64_t *tokens);
mz_code mz_stats_token_finish(const mz_stats_token *token, int32_t layer, double *metric,
                              mz_err *err);

/* Mean, lowest and highest over layers. */
void mz_stats_summary(mz_trace_stats *stats);

#endif
