/* The layer engine: every MoE layer of a step executed for real on this process's logical ranks,
 * phase by phase as the simulator has them (README.md of this room says what runs in each), one
 * rank after another within a phase. Reductions run in rank order, so results do not depend on the
 * number of processes.
 *
 * Use: create; per step begin_step, then per micro-batch forward through all layers and backward
 * through them in reverse with the same plans, then update. All buffers come from the heap, at the
 * sizes the plan needs.
 *
 * Time is charged to (layer, rank, phase). Making data and checking it are outside: `untimed`.
 * Threads: one engine belongs to one thread. */
#ifndef MIZAN_REPLAY_ENGINE_H
#define MIZAN_REPLAY_ENGINE_H

#include "common/io/phase.h"
#include "replay/heap.h"
#include "replay/job.h"
#include "replay/transport.h"

typedef struct mz_engine mz_engine;

/* The transport is attached to `kernels`. What is given outlives the engine. MZ_EINPUT where the
 * policy's traits ask for what the engine cannot do, in one line that says what. Allocates weights,
 * gradients and optimizer state. */
mz_code mz_engine_create(const mz_replay_job *job, mz_kernels *kernels, mz_transport *transport,
                         mz_heap *heap, mz_engine **engine, mz_err *err);
void mz_engine_free(mz_engine **engine);

/* ordinal: 0, 1, 2, ... of the run. Clears the figures and starts the heap's peaks anew. */
mz_code mz_engine_begin_step(mz_engine *engine, int64_t ordinal, mz_err *err);
mz_code mz_engine_forward(mz_engine *engine, const mz_replay_call *call, const mz_plan *plan,
                          mz_err *err);
mz_code mz_engine_backward(mz_engine *engine, const mz_replay_call *call, const mz_plan *plan,
                           bool last_micro_batch, mz_err *err);
/* Once per step, after the last backward. */
mz_code mz_engine_update(mz_engine *engine, mz_err *err);

/* Time that the caller spent for a phase (planning), charged to every local rank. */
void mz_engine_charge_all(mz_engine *engine, mz_phase phase, int32_t layer, double seconds);

/* Figures of the step so far; pointers live until the next begin_step. */
typedef struct mz_engine_figures {
    const double *detail_s; /* [layers+1][end-first][MZ_PHASES]; row `layers`: of the whole step */
    double untimed_s;       /* of the wall time since begin_step: data, checks */
    /* off-rank bytes sent by this process's ranks */
    int64_t dispatch_bytes, combine_bytes, backward_dispatch_bytes, backward_combine_bytes,
        transfer_bytes;
    mz_transport_bytes moved;                 /* the same, as the transport counted them */
    int64_t pairs, kept_pairs, dropped_pairs; /* of this process's ranks as sources */
} mz_engine_figures;
mz_engine_figures mz_engine_figures_of(const mz_engine *engine);

/* ---- what a check sees (verify.c)
 * --------------------------------------------------------------- Called, when set, outside the
 * clock: after a call's forward with y, and after its backward (before replica gradients and kept
 * buffers go) with dx and the kept pairs. Pointers are context memory of the local rank `rank`,
 * valid during the call. Gradients of expert weights are looked at after mz_experts_reduce, through
 * experts.h. */
typedef struct mz_engine_seen {
    const mz_replay_call *call;
    const mz_plan *plan;
    int32_t rank;
    int64_t tokens;
    const void *y;        /* [tokens][H] after forward; else NULL */
    const void *dx;       /* [tokens][H] after backward; else NULL */
    const uint8_t *keep;  /* (host) [pairs of the rank] 1: computed (after forward), has gradient
                             (after backward); NULL: all */
    const float *dweight; /* (host) [pairs of the rank] gradient of the gate weight after backward:
                             of kept pairs with a weight above 0, else 0 */
    const float *drawn;   /* (host) [pairs of the rank] where backward keeps a sample: gate weights
                             of kept pairs times what a drawn pair counts for, by which gradients
                             were multiplied in place of the gate weight; else NULL */
} mz_engine_seen;
typedef mz_code (*mz_engine_watch)(void *self, const mz_engine_seen *seen, mz_err *err);
void mz_engine_set_watch(mz_engine *engine, mz_engine_watch watch, void *self);

/* ---- what a run may do between phases: interrupts, injected faults
 * ----------------------------------- Called, when set, when a local rank's part of a phase is done
 * (rank), and before the lanes of an exchange run (this process's first rank). row: where its time
 * is charged, job.layers for the whole step; layer: the same, but of lanes that of what moves. An
 * error ends the call with it. */
typedef mz_code (*mz_engine_notice)(void *self, int32_t rank, mz_phase phase, int32_t layer,
                                    int32_t row, mz_err *err);
void mz_engine_set_notice(mz_engine *engine, mz_engine_notice notice, void *self);

#endif
