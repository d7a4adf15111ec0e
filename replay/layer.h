/* One layer call on this process's ranks: what engine.c and layer*.c share. Private to them.
 *
 * A *block* is the rows that one source has on one instance; dispatch, combine and their mirrors
 * send one lane per block. A source's *list* is its pairs that are not dropped, expert by expert,
 * in order of pairs (strided: in order of places); a block takes a run of its expert's part. */
#ifndef MIZAN_REPLAY_LAYER_H
#define MIZAN_REPLAY_LAYER_H

#include "replay/data.h"
#include "replay/inside.h"

/* ---- layout (layer_layout.c): which rows lie where
 * ------------------------------------------------------- */

typedef struct layer_block {
    int32_t source, instance;
    bool moved;          /* backward: x is sent and gate and up are computed again */
    int64_t pairs, rows; /* rows: padded ones included */
    int64_t from;        /* first pair in the source's list of the expert */
    int64_t send, receive;
    int64_t again_send, again_receive; /* moved: of x */
} layer_block;

/* Send buffers: blocks by (rank, instance); rows of a rank: by (instance, stayed or moved, source).
 */
typedef struct layer_layout {
    int32_t instances;
    layer_block *block;
    int64_t *begin;                    /* [instances+1] blocks of an instance */
    int64_t *row, *again_row;          /* [instances] its first row on its rank */
    int64_t *rows, *again_rows;        /* [R] received */
    int64_t *sent, *again_sent;        /* [R] sent, to itself included */
    int32_t *by_rank, *rank_begin;     /* instances by rank, [R+1] */
    int64_t *of_source, *source_begin; /* blocks by source in order of instances, [R+1] */
    size_t caps[12];
} layer_layout;

/* Forward's blocks, padded where the policy pads. */
mz_code layout_forward(const mz_engine *e, const mz_replay_call *call, const mz_plan *plan,
                       layer_layout *layout, mz_err *err);
/* Blocks of a lossy plan's backward: of every entry one of pairs that stay where their activations
 * are (all, so far) and one of those that move. layout_place then lays the rows:
 * moved[source][instance] pairs of each entry (NULL: all of them) move. */
mz_code layout_backward(const mz_engine *e, const mz_plan *plan, layer_layout *layout, mz_err *err);
void layout_place(const mz_engine *e, const mz_plan *plan, const int64_t *moved,
                  layer_layout *layout);
void layout_free(layer_layout *layout);

/* ---- buffers of a rank
 * ----------------------------------------------------------------------------- */

typedef enum layer_buffer {
    /* from a layer's forward to its backward */
    HELD_INPUT,
    HELD_ROWS,
    HELD_GATE_UP,
    HELD_ACT,
    HELD_NORMS,
    LAYER_HELD,
    /* of the call at hand */
    CALL_EXPERTS = LAYER_HELD,
    CALL_WEIGHTS,
    CALL_TOKENS,
    CALL_LIST,
    CALL_LIST_LEFT,
    CALL_LIST_BEGIN,
    CALL_QUOTA,
    CALL_SEGMENTS,
    CALL_ROW_PAIR,
    CALL_POSITION,
    CALL_SEND,
    CALL_OUTPUTS,
    CALL_COMBINED,
    CALL_ROW_NORMS,
    CALL_SENT_NORMS,
    CALL_GROUPS,
    CALL_GROUPS_AGAIN,
    CALL_OUTPUT,
    CALL_GRADIENTS,
    CALL_GRADIENT_NORMS,
    CALL_INPUT_NORMS,
    CALL_SELECTION,
    CALL_SAVED,
    CALL_SAVED_ROWS,
    CALL_BACK_SEND,
    CALL_ROWS_AGAIN,
    CALL_BACK_ROWS,
    CALL_UP_AGAIN,
    CALL_ACT_BACK,
    CALL_GATE_UP_BACK,
    CALL_INPUT_BACK,
    CALL_COMBINED_BACK,
    CALL_DOTS,
    CALL_SENT_DOTS,
    CALL_WORKSPACE,
    LAYER_BUFFERS
} layer_buffer;

struct engine_rank {
    mz_buffer *held;              /* [layers][LAYER_HELD] */
    mz_buffer now[LAYER_BUFFERS]; /* from LAYER_HELD on */
    int64_t tokens, pairs;        /* of the call at hand */
    int64_t *list_begin;          /* [E+1] list by expert: pairs not dropped */
    float *drawn;                 /* [pairs] where somebody watches a sample: mz_engine_seen */
    size_t drawn_cap;             /* bytes */
};

/* Host arrays that grow to the largest call, and memory of the replay itself (not of what it
 * replays, so outside the heap): what rows are made from. */
enum { LAYER_SCRATCH = 8 };
struct engine_shared {
    layer_layout forward, backward;
    int32_t *expert_of;      /* [job.instances] */
    int64_t *counts;         /* [local][E] own, [R][E] of all: exchanged */
    int64_t *moved;          /* [local][instances] own, [R][instances] of all: exchanged */
    int64_t *taken;          /* [R] while blocks are laid */
    int64_t *group_begin[2]; /* [job.instances + 1] of a rank's groups; again: of those with x */
    void *scratch[LAYER_SCRATCH];
    size_t scratch_cap[LAYER_SCRATCH];        /* bytes */
    void *base;                               /* context: [MZ_DATA_ROWS][H] */
    void *made_row, *made_token, *made_scale; /* context: [made_cap] */
    int64_t made_cap;
};

/* ---- a call
 * --------------------------------------------------------------------------------------- */

typedef struct layer_call {
    mz_engine *e;
    const mz_replay_call *call;
    const mz_plan *plan;
    bool lossy;                      /* backward differs from forward: scores, selection */
    bool resent;                     /* lossy, and the source sends x again */
    bool stay;                       /* forward: what backward needs stays */
    bool again;                      /* forward repeated in backward */
    int32_t k;                       /* pairs of each token; 0: CALL_TOKENS says */
    int64_t H, I, row, gate_up, act; /* sizes; bytes of a row of each */
    mz_err *err;
} layer_call;

layer_call layer_call_of(mz_engine *e, const mz_replay_call *call, const mz_plan *plan,
                         mz_err *err);
static inline struct engine_rank *layer_rank(const layer_call *c, int32_t rank) {
    return &c->e->rank[rank - c->e->first];
}
/* The buffer of a local rank; of a rank elsewhere nothing. */
mz_buffer *layer_buffer_of(const layer_call *c, int32_t rank, layer_buffer b);
void *layer_memory(const layer_call *c, int32_t rank, layer_buffer b);
mz_code layer_take(const layer_call *c, int32_t rank, layer_buffer b, int64_t bytes);
void layer_give(const layer_call *c, int32_t rank, layer_buffer b);
void layer_give_each(const layer_call *c, layer_buffer b);
/* Takes the buffer and fills it from the host. */
mz_code layer_put(const layer_call *c, int32_t rank, layer_buffer b, const void *data,
                  int64_t bytes);
mz_code layer_copy_in(const layer_call *c, int32_t rank, void *memory, const void *data,
                      int64_t bytes);
/* To the host; waits. */
mz_code layer_get(const layer_call *c, int32_t rank, void *data, const void *memory, int64_t bytes);
void layer_give_all(mz_engine *e);
mz_code layer_kernel(const layer_call *c, int32_t rank, const char *what, mz_kstatus status);
/* Host scratch with room for n items of a size, contents undefined; NULL: err is set. */
typedef enum layer_scratch_use {
    SCRATCH_EXPERTS,
    SCRATCH_WEIGHTS,
    SCRATCH_SEGMENTS,
    SCRATCH_LIST,
    SCRATCH_KEPT,
    SCRATCH_PLACES,
    SCRATCH_HOMES,
    SCRATCH_ROWS
} layer_scratch_use;
void *layer_scratch(const layer_call *c, layer_scratch_use use, int64_t n, size_t size);
/* Runs part(c, rank) for every local rank in order, charging it to the phase. */
typedef mz_code (*layer_part)(const layer_call *c, int32_t rank);
mz_code layer_each(const layer_call *c, mz_phase phase, layer_part part);
/* The same outside the clock. */
mz_code layer_each_untimed(const layer_call *c, layer_part part);
/* Outside the clock, too, for what is timed next: then all processes meet. */
mz_code layer_data(const layer_call *c, layer_part part);

/* ---- layer_pairs.c: rows made from data.c, pairs by expert, send order
 * ----------------------------- */

/* x or g of a rank into `out` [tokens][H]. */
mz_code layer_make_rows(const layer_call *c, int32_t rank, mz_data_kind kind, void *out);
void layer_free_rows(mz_engine *e);
/* What the router's product would have left in memory: CALL_EXPERTS (int32); gate weights, and
 * where k varies CALL_TOKENS: begins of the tokens' pairs [T+1], then the token of each pair. */
mz_code layer_put_experts(const layer_call *c, int32_t rank);
mz_code layer_put_weights(const layer_call *c, int32_t rank);
const int64_t *layer_token_begin(const layer_call *c, int32_t rank); /* NULL: k pairs each */
/* Pairs by expert: CALL_LIST, CALL_LIST_BEGIN (begins, then counts, [2E+1]); gives CALL_EXPERTS. */
mz_code layer_group(const layer_call *c, int32_t rank);
/* Takes dropped pairs out of the list; fills list_begin of the rank. */
mz_code layer_drop(const layer_call *c, int32_t rank);
/* The list in order of forward's blocks, -1 on padded rows: CALL_ROW_PAIR [sent]. */
mz_code layer_arrange(const layer_call *c, int32_t rank);
/* Segments of a source's blocks that are `moved` (or not): from `begin`[expert] + block.from. */
mz_code layer_segments(const layer_call *c, int32_t rank, const layer_layout *layout, bool moved,
                       const int64_t *begin, const void *list, void *out);
mz_code layer_pack(const layer_call *c, int32_t rank, const void *x, const int64_t *row_pair,
                   int64_t rows, const float *scale, void *out);

/* ---- layer_products.c
 * ------------------------------------------------------------------------------ */

/* Groups of a rank's instances, into CALL_GROUPS (again: CALL_GROUPS_AGAIN). */
mz_code layer_groups(const layer_call *c, int32_t rank, const layer_layout *layout, bool again,
                     mz_groups *groups);
/* With the workspace that they need. */
mz_code layer_workspace(const layer_call *c, int32_t rank, size_t bytes, void **memory);
mz_code layer_product(const layer_call *c, int32_t rank, const char *what,
                      const mz_product_args *args);
mz_code layer_up(const layer_call *c, int32_t rank, const mz_expert_up *args);

/* ---- layer_forward.c, layer_backward.c
 * --------------------------------------------------------------- */

/* Pack, dispatch, products, with c->stay and c->again. */
mz_code layer_forward_rows(const layer_call *c);
mz_code layer_forward(layer_call *c);
mz_code layer_backward(layer_call *c, bool last_micro_batch);

/* out[token] = sum of the token's rows, by position, times scale (or 1). */
mz_code layer_sum_tokens(const layer_call *c, int32_t rank, layer_buffer rows,
                         const int64_t *position, const float *scale, void *out);
/* (host) [pairs] 1: the pair has a row; scratch until the next call of this layer's parts. */
mz_code layer_keep_of(const layer_call *c, int32_t rank, const int64_t *position,
                      const uint8_t **keep);
/* Bytes of a position array; never 0 where there are tokens. */
int64_t layer_position_bytes(const struct engine_rank *r);
/* Both layouts of the call, charged to the pack of forward or backward. */
mz_code layer_layouts(const layer_call *c, bool backward);

/* Lanes of every block from its source to its instance's rank, or back; rows of `bytes`. */
typedef struct layer_rows {
    const layer_layout *layout;
    layer_buffer at_source, at_rank;
    int64_t bytes;
    bool back;        /* from the instance to the source */
    bool again;       /* moved blocks by their places of x, behind the other rows of the source */
    int64_t *counter; /* off-rank bytes */
} layer_rows;
mz_code layer_lanes(const layer_call *c, const layer_rows *rows);

#endif
