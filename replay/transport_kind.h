/* What a transport implements: one file, one mz_transport_kind, one line in transport.c's table.
 * Copies between ranks of one process are transport.c's own; a kind moves what crosses processes.
 * Kinds in a shared module use nothing of the program but what they are linked with (common/base).
 * Internal to the transports. */
#ifndef MIZAN_REPLAY_TRANSPORT_KIND_H
#define MIZAN_REPLAY_TRANSPORT_KIND_H

#include "replay/transport.h"

/* Which context memory lanes may lie in. */
typedef enum mz_transport_memory {
    MZ_TRANSPORT_ANY,
    MZ_TRANSPORT_HOST,
    MZ_TRANSPORT_DEVICE
} mz_transport_memory;

struct mz_transport_kind {
    mz_transport_memory memory;
    /* Sets processes, process, device, neighbours (1, 0, 0, 1 before), and self. What failed half
     * way is released by close. */
    mz_code (*open)(mz_transport *t, const mz_transport_options *options, mz_err *err);
    /* t->kernels and t->stream are set. NULL: nothing to do. */
    mz_code (*attach)(mz_transport *t, mz_err *err);
    void (*close)(mz_transport *t);
    /* Lanes between this process and others, in the common order, none empty. start returns when
     * they are under way; finish when this process's ends are done. NULL: there are no others. */
    mz_code (*start)(mz_transport *t, const mz_lane *lane, int64_t lanes, mz_err *err);
    mz_code (*finish)(mz_transport *t, mz_err *err);
    /* Host memory: `bytes` of every process, mine to all [processes][bytes]; 0 bytes: a barrier. */
    mz_code (*gather)(mz_transport *t, const void *mine, size_t bytes, void *all, mz_err *err);
    /* Ends the others when this process exits, which it does soon and with a code that is not 0:
     * so it has time for its own line. */
    void (*end_others)(mz_transport *t);
};

extern const mz_transport_kind mz_transport_local;

/* In the module: */
extern const mz_transport_kind mz_transport_mpi, mz_transport_nccl;

/* Which process holds a rank. */
static inline int32_t mz_transport_home(const mz_transport *t, int32_t rank) {
    return rank / (t->ranks / t->processes);
}

#endif
