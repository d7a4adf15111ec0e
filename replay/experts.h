/* Expert weights, their gradients and optimizer state, and everything that moves them: replicas to
 * and fro, gradient reductions in rank order, the optimizer's step, fresh weights. Private to this
 * room; engine.c drives it.
 *
 * Layout of one expert: up [2I][H] (gate above up), then down [H][I], contiguous, W bytes in the
 * job's type; a gradient has the same layout. Buffers of a plan's instances: an instance is a
 * position of plan->rank. Mains (and resident slots) live in memory of the whole run; replicas of
 * one call live as traits.replica_memory says. */
#ifndef MIZAN_REPLAY_EXPERTS_H
#define MIZAN_REPLAY_EXPERTS_H

#include "replay/engine.h"

typedef struct mz_experts mz_experts;

/* The groups of a local rank in one call: its instances by ascending expert (two instances of the
 * same expert on one rank are two groups). Arrays of pointers are context memory, [count], valid
 * until the next call of the same layer. */
typedef struct mz_expert_groups {
    int32_t count;
    const int32_t *instance;                 /* (host) position in plan->rank */
    const int32_t *expert;                   /* (host) */
    void *const *up, *const *down;           /* weights; set by mz_experts_forward */
    void *const *grad_up, *const *grad_down; /* set by mz_experts_backward */
    mz_dtype gradient_type;
} mz_expert_groups;

mz_code mz_experts_create(mz_engine *engine, mz_experts **experts, mz_err *err);
void mz_experts_free(mz_experts **experts);

mz_code mz_experts_begin_step(mz_experts *experts, mz_err *err); /* gradients to zero */
/* Moves of MZ_MOVE_FORWARD, and pointers of every local rank's groups. Charged to weight_move. */
mz_code mz_experts_forward(mz_experts *experts, const mz_replay_call *call, const mz_plan *plan,
                           mz_err *err);
const mz_expert_groups *mz_experts_groups(const mz_experts *experts, int32_t rank);
/* After the forward of a call: buffers that do not stay until its backward are given back. */
void mz_experts_end_forward(mz_experts *experts, const mz_replay_call *call);
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
mz_code mz_experts_update(mz_experts *experts, const mz_plan *const *plan, mz_err *err);

/* Collective: host copies of an expert's weights or of its reduced gradient as they are now, in
 * fp32, [2I*H + H*I]; every process gets them. Outside the clock. After update, before the next
 * begin_step, gradients are still there. */
mz_code mz_experts_read(mz_experts *experts, int32_t layer, int32_t expert, bool gradient,
                        float *value, mz_err *err);
mz_experts *mz_engine_experts(mz_engine *engine);

#endif
