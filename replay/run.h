/* A replay: policies run step by step over a window of a trace, measured.
 *
 * The window is run in passes. In each pass engines, planners and the past start anew, so every
 * pass makes the plans that a simulation of the window makes, from the same weights; a first pass
 * of `warmup` steps is not recorded: it gets the memory and touches it first. Several policies take
 * turns step by step (A B C A B C), so that what disturbs the machine disturbs all alike, where
 * their memory fits side by side; otherwise they run one after another. */
#ifndef MIZAN_REPLAY_RUN_H
#define MIZAN_REPLAY_RUN_H

#include "common/base/app.h"
#include "common/io/result.h"
#include "replay/measure.h"
#include "replay/verify.h"
#include "sim/cluster/cluster.h"
#include "sim/model/model.h"

#include <signal.h>

/* What a test asks to go wrong (man page): in step `step` (of all that are executed, from 0), when
 * `rank` has done its part of `phase`, or before its exchange. A run at whose end it has not
 * happened fails with MZ_EINPUT, and so does one whose verification cannot find it. */
typedef enum mz_fault_kind {
    MZ_FAULT_NONE,
    MZ_FAULT_KILL,    /* the rank's process is killed */
    MZ_FAULT_HANG,    /* ... is stopped, once */
    MZ_FAULT_CORRUPT, /* values that its process receives then, in the layer that is verified, get
                         the wrong sign; its optimizer does its updates twice */
    MZ_FAULT_MEMORY   /* the `step`-th allocation of its process for the first policy fails */
} mz_fault_kind;
typedef struct mz_fault {
    mz_fault_kind kind;
    mz_phase phase;
    int32_t rank;
    int64_t step;
} mz_fault;
/* RANK from 0, STEP from 0, N from 1. "kill:PHASE:RANK:STEP", "hang:...", "corrupt:...",
 * "oom:N:RANK"; NULL or "": none. */
mz_code mz_fault_parse(const char *text, mz_fault *fault, mz_err *err);

typedef enum mz_replay_order { MZ_ORDER_AUTO, MZ_ORDER_STEPS, MZ_ORDER_POLICIES } mz_replay_order;

typedef struct mz_replay_options {
    const mz_model *model;     /* resized: its layers are those that run */
    const mz_cluster *cluster; /* what policies are told of the machine; its ranks are R */
    const mz_optimizer *optimizer;
    mz_dtype type;
    bool recompute;
    int64_t norm_hidden; /* hidden size that the trace's norms belong to */
    int64_t repeat, warmup;
    mz_replay_order order;
    bool verify, digest;
    uint64_t seed;
    mz_fault fault;
    const volatile sig_atomic_t *stop; /* once set: MZ_EABORTED, soon; NULL: never */
} mz_replay_options;

/* The window from its first step on; what the last call gave is gone. */
typedef struct mz_replay_window {
    void *self;
    mz_code (*restart)(void *self, mz_load_source *source, mz_err *err);
    int64_t steps;
} mz_replay_window;

typedef struct mz_replay mz_replay;

/* policies: texts. What is given outlives the replay; the transport is attached to `kernels`. */
mz_code mz_replay_create(const mz_replay_options *options, char **policies, int count,
                         mz_kernels *kernels, mz_transport *transport, mz_replay **replay,
                         mz_err *err);
void mz_replay_free(mz_replay **replay);
/* Every process takes part; all have the results. */
mz_code mz_replay_run(mz_replay *replay, const mz_replay_window *window, mz_app *app, mz_err *err);
/* Steps of a policy that were recorded. */
int64_t mz_replay_records(const mz_replay *replay, int policy);
/* The run of a policy with records; its arrays live as long as the replay. */
mz_code mz_replay_result(mz_replay *replay, int policy, mz_run *run, mz_err *err);

/* With digest: SHA-256 of y, dx, gradients and weights of a policy's recorded steps, in hex. */
const char *mz_replay_digest(const mz_replay *replay, int policy, int64_t record);
/* With verify: what this process compared, over all policies. */
mz_verified mz_replay_verified(const mz_replay *replay);
bool mz_replay_dealt(const mz_replay *replay);        /* pairs were made from counts */
bool mz_replay_side_by_side(const mz_replay *replay); /* policies took turns step by step */
/* Bytes got from the context by this process: the most at a time. */
int64_t mz_replay_reserved(const mz_replay *replay);
/* Bytes in use on this process's device (cudaMemGetInfo), whoever uses them: the most at the end of
 * a step. 0: not available, as on the host, or no step yet. */
int64_t mz_replay_device_bytes(const mz_replay *replay);

#endif
