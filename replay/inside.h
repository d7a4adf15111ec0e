/* What the files of the engine share. Nothing here is used outside replay/. */
#ifndef MIZAN_REPLAY_INSIDE_H
#define MIZAN_REPLAY_INSIDE_H

#include "common/base/log.h"
#include "replay/engine.h"
#include "replay/experts.h"

/* Lanes of one exchange, grown as needed and reused. */
typedef struct engine_lanes {
    mz_lane *lane;
    size_t cap;
    int64_t count;
} engine_lanes;

struct mz_engine {
    mz_replay_job job;
    mz_kernels *kernels;
    mz_transport *transport;
    mz_heap *heap;
    mz_experts *experts;
    int32_t first, end, local; /* this process's ranks: end - first */
    int64_t value_bytes;       /* of job.type */
    int64_t ordinal;
    engine_lanes lanes;
    double *exchange_s; /* [local] of the exchange under way */
    double *detail_s;   /* [layers+1][local][MZ_PHASES] */
    mz_engine_figures figures;
    mz_engine_watch watch;
    void *watcher;
    mz_engine_notice notice;
    void *noticer;
    struct engine_rank *rank;     /* [local] buffers of each rank; layer.c */
    struct engine_shared *shared; /* scratch of all ranks; layer.c */
};

/* ---- engine.c ----------------------------------------------------------------------------------
 */

/* Time: start = mz_now(); work; engine_charge(e, ...) waits for stream 0 and adds what passed to
 * the phase of a local rank (global number). */
mz_code engine_charge(mz_engine *e, int32_t rank, mz_phase phase, int32_t layer, double start,
                      mz_err *err);
/* What the process did once for all of its ranks: equal shares. */
void engine_charge_shared(mz_engine *e, mz_phase phase, int32_t layer, double start);
void engine_untimed(mz_engine *e, double start); /* what passed is nobody's */
/* All processes in one place, off the clock: after what is nobody's and takes them unequal time,
 * which must not become another's timed waiting. Where they meet does not depend on what is checked
 * or on what happens to move uncharged: the simulator has them meet in the same places (README.md,
 * "Where processes meet"). */
mz_code engine_meet(mz_engine *e, mz_err *err);

/* Status of a kernel call as an error that says which operation, rank and layer. */
mz_code engine_kernel(mz_engine *e, mz_kstatus status, const char *what, int32_t rank,
                      int32_t layer, mz_err *err);

/* Adds a lane; bytes between different ranks are added to *counter (may be NULL) where `from` is
 * local. send or receive of a rank elsewhere is not looked at. */
mz_code engine_add_lane(mz_engine *e, int32_t from, int32_t to, const void *send, void *receive,
                        int64_t bytes, int64_t *counter, mz_err *err);
/* Runs the lanes collected, charges each local rank's time to the phase in `row`, and empties the
 * list. layer: that of what moves, or job.layers where it is of several; row: layer, or job.layers
 * for what is the whole step's. */
mz_code engine_exchange(mz_engine *e, mz_phase phase, int32_t layer, int32_t row, mz_err *err);
/* mz_transport_gather of host memory; what passed since `start` is charged in equal shares. */
mz_code engine_gather(mz_engine *e, const void *mine, size_t bytes, void *all, mz_phase phase,
                      int32_t layer, double start, mz_err *err);

#endif
