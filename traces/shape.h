/* Which tokens of a trace make up which micro-batch of a step, and on which rank. Private to this
 * room. A shape reads only the tables of the trace, never its bulk data. */
#ifndef MIZAN_TRACES_SHAPE_H
#define MIZAN_TRACES_SHAPE_H

#include "traces/reader.h"
#include "traces/stream.h"

/* The tokens of one (step, micro-batch, rank), in file order. */
typedef struct mz_block {
    int64_t token_begin, tokens;
    int32_t rank;
} mz_block;

/* One (step, micro-batch). */
typedef struct mz_group {
    int64_t step;
    int64_t block_begin, block_end;
    int64_t tokens;
} mz_group;

/* A sequence, or a run of tokens, that stays together. */
typedef struct mz_piece {
    int64_t block;
    int64_t first, tokens; /* within the block */
    int64_t order;         /* in the micro-batch: file order, then drawn ones */
    int64_t at;            /* first token within the micro-batch, grouped by rank; until it is
                              placed: the piece that this one is a copy of */
    int32_t rank;          /* that holds it */
} mz_piece;

/* One micro-batch of a step that is being given out. */
typedef struct mz_micro {
    mz_piece *pieces; /* kind pairs: in file order, for reading */
    size_t count, cap;
    int64_t group_begin, group_end; /* kind counts: recorded micro-batches that it adds up */
    int64_t *rank_tokens;           /* [R] */
    int64_t *source_tokens;         /* kind counts: [S] before scaling */
} mz_micro;

typedef struct mz_step_plan {
    int64_t step;  /* ordinal, -1: none */
    int64_t label; /* as the trace numbers it */
    int32_t micros, cap;
    int64_t factor; /* counts are multiplied by this */
    mz_micro *micro;
    int64_t *tokens; /* [micros][R] */
    size_t tokens_cap;
    /* Lengths of whole sequences by (micro-batch, rank), where the trace has them. */
    int64_t *sequence_begin; /* [micros * R + 1] */
    size_t sequence_begin_cap;
    int64_t *sequence;
    size_t sequence_cap;
} mz_step_plan;

typedef struct mz_shape {
    mz_trace *trace;
    mz_stream_options options;
    int32_t ranks, layers;
    bool deal; /* pieces are dealt to ranks anew */
    bool reshaped;
    mz_group *groups;
    int64_t group_count;
    mz_block *blocks;
    int64_t block_count;
    int64_t *call;       /* [blocks][layers] index of the call, -1: none */
    int64_t *step_begin; /* [steps+1] groups of a step; first items of a step for dealt logs */
    int64_t step_count;
    mz_piece *items; /* dealt logs (MZ_STEP_NONE, pairs): every sequence in file order */
    size_t item_count, item_cap;
} mz_shape;

mz_code mz_shape_make(mz_trace *trace, const mz_stream_options *options, mz_shape *shape,
                      mz_err *err);
void mz_shape_free(mz_shape *shape);

/* Plans step `step` (an ordinal of all steps, window not applied). MZ_EABORTED once options.stop is
 * set and anything is left to draw. */
mz_code mz_step_plan_make(const mz_shape *shape, int64_t step, mz_step_plan *plan, mz_err *err);
/* Whether plans list sequences: the trace holds pairs and a table of sequences. */
bool mz_step_plan_has_sequences(const mz_shape *shape);
void mz_step_plan_free(mz_step_plan *plan);

/* Token boundaries of the parts in which source `source` of a micro-batch goes to ranks *first,
 * *first+1, ...: part i gets tokens [bound[i], bound[i+1]). Returns the number of parts, at most R;
 * bound has room for R+1. */
int32_t mz_shape_parts(const mz_shape *shape, const mz_micro *micro, int32_t source, int32_t *first,
                       int64_t *bound);

#endif
