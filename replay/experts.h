/* Expert weights, their gradients and optimizer state, and everything that moves them: replicas to
 * and fro, gradient reductions in rank order, the optimizer's step, fresh weights. Private to this
 * room; engine.c drives it.
 *
 * One expert is up [2I][H] (gate above up) and down [H][I], W bytes in the job's type; matrices of
 * a kind lie side by side in a layer, so that one call updates them. A gradient has the same
 * layout. An instance is a position of plan->rank; its replica lives as traits.replica_memory says.
 *
 * Three kinds of policies, by their traits:
 * - Replicas of a call (SHARED, PER_LAYER): mains stay in block layout; weights travel along the
 *   plan's moves, from whoever has them by then; gradients come back along them, are added where
 *   they meet - a rank's own first, the others in order of instance, fp32 sums, one rounding - and
 *   end at the main.
 * - Placements that last (RESIDENT, or no replicas): a rank has `slots` slots of every layer. The
 *   first plan of a layer finds its experts in place. A changed one has their weights and optimizer
 *   state moved before the forward of the step that decided it, by its `change` moves, which are
 *   charged to weight_move (of the whole step where their phase is MZ_MOVE_STEP) and carry what is
 *   stated: beyond what there is to move, bytes without meaning; what they do not cover goes along
 *   uncharged. What moves every step after the optimizer (LPLB's replicas) is where the next
 *   placement wants it: put there uncharged. Rings are run as reduce-scatter and all-gather with
 *   direct lanes, cut at whole rows: the same bytes per rank, and every host has the same sum, over
 *   all hosts in order of instance. Instances of one rank are summed first.
 * - Sharded optimizer (SYMI): the same slots; after the ring every rank takes its part of every
 *   expert's gradient, updates it, and sends fresh weights to all slots. The optimizer must work
 *   value by value.
 * Sharded weights (LAER) and free replicas (ideal) are refused. Rounds of the plan follow from what
 * must arrive before it can be sent on, not from mz_move.round. MZ_HIDE_FREE moves go uncharged. A
 * move list that leaves an instance without its weights, or a gradient without a way, is
 * MZ_EINTERNAL naming policy, expert and rank. Bytes stated are bf16's; fp32 jobs scale them. */
#ifndef MIZAN_REPLAY_EXPERTS_H
#define MIZAN_REPLAY_EXPERTS_H

#include "replay/engine.h"

typedef struct mz_experts mz_experts;

/* The groups of a local rank in one call: its instances by ascending expert (two instances of the
 * same expert on one rank are two groups). Arrays of pointers are context memory, [count], valid
 * until the next mz_experts_forward or mz_experts_backward. Gradients hold zeros or the sum so far:
 * products add to them. */
typedef struct mz_expert_groups {
    int32_t count;
    const int32_t *instance;                 /* (host) position in plan->rank */
    const int32_t *expert;                   /* (host) */
    void *const *up, *const *down;           /* weights; set by mz_experts_forward */
    void *const *grad_up, *const *grad_down; /* set by mz_experts_backward: of the job's type; an
                                                entry is NULL where the group's gradient is wide */
    void *const *wide_up, *const *wide_down; /* fp32 gradients of replicas beside bf16 mains, NULL
                                                where a group's is not; both NULL: none is */
} mz_expert_groups;

mz_code mz_experts_create(mz_engine *engine, mz_experts **experts, mz_err *err);
void mz_experts_free(mz_experts **experts);

mz_code mz_experts_begin_step(mz_experts *experts, mz_err *err); /* gradients to zero */
/* Moves of MZ_MOVE_FORWARD, and pointers of every local rank's groups. Charged to weight_move. */
mz_code mz_experts_forward(mz_experts *experts, const mz_replay_call *call, const mz_plan *plan,
                           mz_err *err);
const mz_expert_groups *mz_experts_groups(const mz_experts *experts, int32_t rank);
/* Moves of MZ_MOVE_BACKWARD (weights again where slots are shared), gradient buffers, pointers. */
mz_code mz_experts_backward(mz_experts *experts, const mz_replay_call *call, const mz_plan *plan,
                            mz_err *err);
/* Moves of MZ_MOVE_REDUCE and, after the last micro-batch, MZ_MOVE_REDUCE_STEP: replica gradients
 * are added to the main's in order of instance. Charged to replica_reduce. Gives back what the call
 * took. */
mz_code mz_experts_reduce(mz_experts *experts, const mz_replay_call *call, const mz_plan *plan,
                          bool last_micro_batch, mz_err *err);
/* Gradient norm over the group (charged to optimizer; exchanged in rank order), one update of every
 * owned matrix, moves of MZ_MOVE_STEP (charged to weight_move). */
mz_code mz_experts_update(mz_experts *experts, mz_err *err);

/* Collective: host copies of an expert's weights or of its reduced gradient as they are now, in
 * fp32, [2I*H + H*I]; every process gets them. Outside the clock. After update, before the next
 * begin_step, gradients are still there. */
mz_code mz_experts_read(mz_experts *experts, int32_t layer, int32_t expert, bool gradient,
                        float *value, mz_err *err);
/* The same of a part of its optimizer state that has a value for each of its own: fp32, 0 the
 * master weights, 1 m, 2 v (mz_update_state). */
mz_code mz_experts_read_state(mz_experts *experts, int32_t layer, int32_t expert, int part,
                              float *value, mz_err *err);
/* Do all slots of this process that hold the expert have the weights `value` [2I*H + H*I], as
 * mz_experts_read gave them? If not: a rank, and the first value that differs. */
typedef struct mz_experts_copy {
    int32_t rank; /* -1: all do */
    int64_t place;
    float value;
} mz_experts_copy;
mz_code mz_experts_compare(mz_experts *experts, int32_t layer, int32_t expert, const float *value,
                           mz_experts_copy *differs, mz_err *err);
/* Squared norms of the last update's gradients: [R] as they came from all ranks, and [end-first] of
 * this process's. */
void mz_experts_norms(const mz_experts *experts, const double **all, const double **mine);
/* Test aid, once the gradients' norm is there: what this process updates it does twice; has one
 * been done twice in the last step? */
void mz_experts_repeat_update(mz_experts *experts);
bool mz_experts_repeated(const mz_experts *experts);
/* The rank of the expert's first instance, known to every process. */
int32_t mz_experts_owner(const mz_experts *experts, int32_t layer, int32_t expert);
mz_experts *mz_engine_experts(mz_engine *engine);

#endif
