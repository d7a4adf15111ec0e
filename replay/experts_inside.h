/* What the files of the experts share: experts.c (memory, pointers), experts_place.c (which slot
 * holds which expert), experts_move.c (weights to replicas), experts_reduce.c (gradients),
 * experts_update.c (norm, optimizer, fresh weights). Private to them.
 *
 * Every process keeps the tables of all ranks; memory exists for its own alone, so pointers of
 * other ranks are NULL. */
#ifndef MIZAN_REPLAY_EXPERTS_INSIDE_H
#define MIZAN_REPLAY_EXPERTS_INSIDE_H

#include "replay/data.h"
#include "replay/inside.h"
#include "replay/update.h"

enum { EXPERTS_UP, EXPERTS_DOWN, EXPERTS_MATRICES };
enum { EXPERTS_POINTERS = 3 * EXPERTS_MATRICES }; /* arrays of a rank's groups */

typedef enum experts_mode {
    EXPERTS_CALL, /* mains stay, replicas live for a call */
    EXPERTS_LAST, /* what a plan says stays until another one says otherwise */
    EXPERTS_CUT   /* the same, with the optimizer cut over the group */
} experts_mode;

/* One expert's matrices on one rank: up, down. */
typedef struct experts_memory {
    char *weight[EXPERTS_MATRICES], *gradient[EXPERTS_MATRICES];
    mz_dtype gradient_type;
} experts_memory;

/* Buffers of one layer on a local rank. */
typedef struct experts_layer {
    mz_buffer weights, gradients, extra;   /* slots: the mains', and those beyond */
    mz_buffer state[EXPERTS_MATRICES];     /* EXPERTS_CUT: the first alone */
    mz_buffer *replica, *replica_gradient; /* [replicas] PER_LAYER */
    size_t replica_cap, gradient_cap;
    int32_t replicas, gradients_held;
} experts_layer;

typedef struct experts_instance {
    int32_t expert;
    int32_t slot;    /* of its rank; -1: a replica of the call */
    int32_t replica; /* its number among its rank's; -1 */
    int32_t first;   /* the instance of the same expert and rank whose weights it uses */
    bool arrived;    /* while experts are placed: it was not there before */
} experts_instance;

/* Part of a transfer: `charged` bytes of it go as the plan's, the rest uncharged. */
typedef struct experts_piece {
    int32_t from, to;
    const char *send;
    char *receive;
    int64_t bytes, charged;
} experts_piece;

/* A move of one expert between two ranks; wave: after which others it can go. */
typedef struct experts_edge {
    int32_t expert, src, dst, wave;
    int64_t bytes; /* stated */
    bool free;
} experts_edge;

/* What arrives at one rank to be added to its gradient. */
typedef struct experts_sum {
    int32_t expert, rank, count;
    mz_buffer received; /* [count][3HI] */
} experts_sum;

/* An expert that comes to a slot where it was not; or gradients of a step that follow their owner.
 */
typedef struct experts_arrival {
    int32_t expert, rank, slot;
    int32_t weights, state, gradient; /* ranks that send them; -1: not needed */
    int64_t budget;                   /* bytes stated */
    mz_buffer received;
} experts_arrival;

struct mz_experts {
    mz_engine *e;
    experts_mode mode;
    int64_t rows[EXPERTS_MATRICES], cols[EXPERTS_MATRICES], values[EXPERTS_MATRICES];
    int64_t all;           /* values of an expert, 3HI */
    int64_t cut;           /* EXPERTS_CUT: values of an expert that a rank updates, at most */
    int64_t value_bytes;   /* of weights and mains' gradients */
    mz_dtype replica_type; /* of replicas' gradients */
    int64_t replica_bytes; /* of one of these values; 0: they lie in `spare` by expert */
    int32_t mains, slots, extra, state_slots; /* of a rank */
    int32_t *home;                            /* [E] block layout */
    int32_t *held;        /* [layers][R][slots] expert, -1 none, -2-e: e's further instance */
    int32_t *owner;       /* [layers][E] rank of the first instance */
    bool *placed;         /* [layers] by a plan */
    experts_layer *layer; /* [layers][local] */
    mz_buffer *shared, *spare, *arrays;     /* [local] */
    experts_instance *instance;             /* [job.instances] of the plan at hand */
    int32_t *replicas;                      /* [R] of it */
    mz_expert_groups *groups;               /* [local] */
    int32_t *group_instance, *group_expert; /* [local][job.instances] */
    void **pointer; /* [EXPERTS_POINTERS][job.instances] before they are copied in */
    experts_piece *piece;
    size_t piece_cap;
    int64_t pieces;
    bool uncharged;     /* some piece of any process is, in part */
    mz_buffer *padding; /* of pieces without content */
    size_t padding_cap;
    int64_t paddings;
    experts_edge *edge;
    size_t edge_cap;
    int64_t edges;
    int32_t *edge_begin; /* [E+1] */
    int32_t *depth;      /* [R] */
    experts_sum *sum;
    size_t sum_cap;
    int64_t sums;
    int64_t *position;
    size_t position_cap;
    experts_arrival *arrival;
    size_t arrival_cap;
    int64_t arrivals;
    mz_move **once; /* [layers] moves of micro-batch 0 that happen once per step */
    size_t *once_cap;
    int32_t *onces;   /* [layers] */
    int32_t *former;  /* [R][slots] of the layer being placed */
    double norm;      /* of all gradients in the last step */
    double *norm2;    /* [R], [local] */
    bool repeat;      /* test aid: updates are done twice */
    bool repeated;    /* in the last update one was */
    mz_buffer *fresh; /* [local] EXPERTS_CUT: weights just updated */
    float *row_norm;  /* of a run of slots */
    size_t row_norm_cap;
    mz_arena arena;
};

/* ---- experts.c ---------------------------------------------------------------------------------
 */

static inline bool experts_local(const mz_experts *x, int32_t rank) {
    return rank >= x->e->first && rank < x->e->end;
}
static inline char *experts_at(char *base, int64_t offset) {
    return base ? base + offset : NULL;
}
static inline experts_layer *experts_layer_of(const mz_experts *x, int32_t layer, int32_t rank) {
    return &x->layer[(int64_t)layer * x->e->local + rank - x->e->first];
}
static inline int32_t *experts_held(const mz_experts *x, int32_t layer, int32_t rank) {
    return x->held + ((int64_t)layer * x->e->job.ranks + rank) * x->slots;
}
/* A plan that does not hold together: "layer L: expert E, rank R: what". */
mz_code experts_bug(int32_t layer, int32_t expert, int32_t rank, const char *what, mz_err *err);
/* Slots of `rank` whose weights are `weights`: the first ones; the others are replicas. */
int32_t experts_mains(const mz_experts *x, int32_t rank);
/* Slots of `rank` that have optimizer state: the first ones. */
int32_t experts_state_slots(const mz_experts *x, int32_t rank);
/* The slot of `rank` that holds the expert's weights, or -1. */
int32_t experts_slot(const mz_experts *x, int32_t layer, int32_t rank, int32_t expert);
experts_memory experts_slot_memory(const mz_experts *x, int32_t layer, int32_t rank, int32_t slot);
/* Weights of the instance's first, its own gradient. Replicas' gradients: once they are there. */
experts_memory experts_instance_memory(const mz_experts *x, int32_t layer, const mz_plan *plan,
                                       int32_t instance);
/* The rank's first instance of the expert in the plan at hand, or -1. */
int32_t experts_first(const mz_plan *plan, int32_t expert, int32_t rank);
/* Memory of (expert, rank) that others exchange with: its slot, or its first instance's replica. */
experts_memory experts_node(const mz_experts *x, int32_t layer, const mz_plan *plan, int32_t expert,
                            int32_t rank);
/* Fills x->instance and x->replicas from the tables. */
mz_code experts_resolve(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err);
/* Weights as they are before training, into a slot of a local rank; its state zero. Untimed. */
mz_code experts_start_slot(mz_experts *x, int32_t layer, int32_t rank, int32_t slot, int32_t expert,
                           mz_err *err);
mz_code experts_zero(mz_experts *x, void *memory, int64_t bytes, int32_t rank, int32_t layer,
                     mz_err *err);

/* ---- experts_move.c ----------------------------------------------------------------------------
 */

/* A piece; what *budget (bytes that are stated and not used yet) covers is charged. */
mz_code experts_add_piece(mz_experts *x, int32_t from, int32_t to, const char *send, char *receive,
                          int64_t bytes, int64_t *budget, mz_err *err);
/* Values [low, high) of an expert's matrices laid end to end, between two memories of the type. */
mz_code experts_add_values(mz_experts *x, int32_t from, int32_t to, char *const *send,
                           char *const *receive, int64_t value_bytes, int64_t low, int64_t high,
                           int64_t *budget, mz_err *err);
/* The same where one end has these values alone, one after the other: `line` receives those of
 * `part` (collect), or they come from it. */
typedef enum experts_direction { EXPERTS_COLLECT, EXPERTS_SPREAD } experts_direction;
mz_code experts_add_line(mz_experts *x, int32_t from, int32_t to, experts_direction direction,
                         char *const *part, char *line, int64_t low, int64_t high, int64_t *budget,
                         mz_err *err);
/* Bytes without meaning. */
mz_code experts_add_padding(mz_experts *x, int32_t from, int32_t to, int64_t bytes, int32_t layer,
                            mz_err *err);
/* Runs all pieces, the charged ones as `phase` of `row` (a layer, or the whole step's), and empties
 * the list. layer: that of the pieces, job.layers where they are of all. */
mz_code experts_run_pieces(mz_experts *x, mz_phase phase, int32_t layer, int32_t row, mz_err *err);
/* The same of pieces that are all uncharged: no phase sees it. */
mz_code experts_run_uncharged(mz_experts *x, mz_err *err);
/* Both matrices of a contiguous [3HI]. */
static inline void experts_parts(const mz_experts *x, char *base, int64_t value_bytes,
                                 char *part[EXPERTS_MATRICES]) {
    part[EXPERTS_UP] = base;
    part[EXPERTS_DOWN] = experts_at(base, x->values[EXPERTS_UP] * value_bytes);
}
/* Stated bytes of a weight move in the job's type. */
static inline int64_t experts_stated(const mz_experts *x, const mz_move *m) {
    return m->bytes / 2 * x->value_bytes;
}
/* Collects the plan's moves of a kind and phase in x->edge, by expert. */
mz_code experts_collect(mz_experts *x, const mz_move *move, int32_t moves, mz_move_kind kind,
                        mz_move_phase phase, mz_err *err);
/* Weights of EXPERTS_CALL, along the moves of `phase`. */
mz_code experts_send_weights(mz_experts *x, int32_t layer, const mz_plan *plan, mz_move_phase phase,
                             mz_err *err);

/* ---- experts_place.c ---------------------------------------------------------------------------
 */

/* Puts the experts where the plan has them. */
mz_code experts_place(mz_experts *x, const mz_replay_call *call, const mz_plan *plan, mz_err *err);

/* ---- experts_reduce.c --------------------------------------------------------------------------
 */

mz_code experts_reduce_moves(mz_experts *x, int32_t layer, const mz_plan *plan, const mz_move *move,
                             int32_t moves, mz_move_phase phase, mz_err *err);
/* EXPERTS_CUT: values [low, high) of every expert that `rank` updates, and where its part of the
 * layer's gradient lies after the last reduction: [E][x->cut]. */
static inline int64_t experts_cut_begin(const mz_experts *x, int32_t rank) {
    const int64_t at = x->cut * rank;
    return at < x->all ? at : x->all;
}
char *experts_cut_gradient(const mz_experts *x, int32_t layer, int32_t rank);

#endif
