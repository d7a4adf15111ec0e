/* What the timelines of a step and of its routed experts alone share: the buffers that come and go,
 * and how they are taken and given back. Errors stick in rank_timeline.code. */
#ifndef MIZAN_SIM_STEP_TIMELINE_H
#define MIZAN_SIM_STEP_TIMELINE_H

#include "sim/step/inside.h"

/* Everything that comes and goes, one of each per layer; BUFFER_IDS to BUFFER_UPDATE of the whole
 * model. */
typedef enum buffer {
    BUFFER_INPUT,
    BUFFER_ATTENTION,
    BUFFER_SCORES,
    BUFFER_SCORES_WORK,
    BUFFER_DENSE,
    BUFFER_SHARED,
    BUFFER_REPLICAS,
    BUFFER_REPLICA_GRADIENTS,
    BUFFER_SLOTS,
    BUFFER_SLOT_GRADIENTS,
    BUFFER_GATHERED,
    BUFFER_BUCKET,
    BUFFER_SEND,
    BUFFER_ROWS,
    BUFFER_GATE_UP,
    BUFFER_ACT,
    BUFFER_OUTPUTS,
    BUFFER_COMBINED,
    BUFFER_NORMS,
    BUFFER_SELECTION,
    BUFFER_BACK_SEND,
    BUFFER_ROWS_AGAIN,
    BUFFER_BACK_ROWS,
    BUFFER_UP_AGAIN,
    BUFFER_ACT_AGAIN,
    BUFFER_ACT_BACK,
    BUFFER_GATE_UP_BACK,
    BUFFER_INPUT_BACK,
    BUFFER_COMBINED_BACK,
    BUFFER_FFN_BACK,
    BUFFER_ATTENTION_BACK,
    BUFFER_IDS,
    BUFFER_NORM,
    BUFFER_LOGITS,
    BUFFER_KEPT_LOGITS,
    BUFFER_LOSS,
    BUFFER_HIDDEN,
    BUFFER_UPDATE,
    /* routed experts alone */
    BUFFER_EXPERTS,
    BUFFER_PAIR_WEIGHTS,
    BUFFER_TOKENS,
    BUFFER_LIST,
    BUFFER_COUNTS,
    BUFFER_ROW_PAIRS,
    BUFFER_PLACES,
    BUFFER_ROW_NORMS,
    BUFFER_SENT_NORMS,
    BUFFER_OUTPUT,
    BUFFER_GRADIENT,
    BUFFER_GRADIENT_NORMS,
    BUFFER_SAVED,
    BUFFER_SAVED_ROWS,
    BUFFER_DOTS,
    BUFFER_SENT_DOTS,
    BUFFER_GROUPS,
    BUFFER_ARRIVED,
    BUFFER_REDUCED,
    BUFFERS
} buffer;

typedef struct rank_timeline {
    const mz_step *s;
    mz_memory *memory;
    int32_t rank, micro_batch;
    int64_t tokens, score_pairs;
    mz_code code;
    mz_err *err;
} rank_timeline;

typedef struct layer_call {
    const step_call *call; /* NULL: a dense layer */
    const step_rank_work *work;
    int32_t layer, moe;
} layer_call;

/* A pair's score is fp32, its number in the list of kept pairs 64-bit; the list is made for all
 * pairs (kernels/kernels.h). */
enum { SELECTION_BYTES = 4 + 8 };

/* 0 bytes: nothing happens. */
void step_take(rank_timeline *t, buffer b, int32_t layer, int64_t bytes);
void step_give(rank_timeline *t, buffer b, int32_t layer);
void step_take_and_give(rank_timeline *t, buffer b, int32_t layer, int64_t bytes);
layer_call step_layer_call(const rank_timeline *t, int32_t layer, int32_t moe);
void step_start_micro_batch(rank_timeline *t, int32_t micro_batch);

/* One step of one rank in scope layers (timeline_layers.c). */
void layers_timeline(rank_timeline *t);

#endif
