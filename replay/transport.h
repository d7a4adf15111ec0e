/* How rows, weights and gradients travel between logical ranks. R ranks are spread in blocks over P
 * processes (P divides R; rank r lives in process r / (R/P)); what is computed does not depend on
 * P. A transport is one file and one line in transport.c's table: "local" (one process), "mpi"
 * (Open MPI, host memory), "nccl" (one GPU per process, started by mpirun).
 *
 * The library behind a transport is loaded when that transport is opened, so the program starts
 * without it: MZ_EHARDWARE says in one line what is missing.
 *
 * Failure: every call that waits for a peer gives up when nothing has moved for timeout_s, or when
 * the transport reports a dead peer. The error names this process and its ranks, the peer where it
 * is known, and what was under way; the process then calls mz_transport_abort, which ends the
 * others, too. All processes end within timeout_s, each with one line, exit code 4.
 *
 * Threads: a transport belongs to one thread at a time. */
#ifndef MIZAN_REPLAY_TRANSPORT_H
#define MIZAN_REPLAY_TRANSPORT_H

#include "common/base/err.h"
#include "kernels/kernels.h"

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mz_transport_options {
    const char *name; /* of the table */
    int32_t ranks;    /* R */
    double timeout_s; /* 20: with what a launcher takes to end a job, all of it is over in 30 s */
    const char *lib_dir; /* folders, separated by ':', where modules are looked for before the
                            loader's own; NULL: the program's, and where they are installed */
    const volatile sig_atomic_t *stop; /* or NULL: once it is set, waiting ends with MZ_EABORTED
                                          (a launcher that ends a job asks first) */
} mz_transport_options;

/* One message. The k-th lane from one rank to another on the sender is the k-th on the receiver:
 * all processes list lanes in the same order, and may leave out those without an end of theirs; a
 * process that has none left may leave out the exchange. */
typedef struct mz_lane {
    int32_t from, to;
    const void *send; /* context memory; read where `from` is local */
    void *receive;    /* context memory; written where `to` is local */
    size_t bytes;     /* 0: nothing happens */
} mz_lane;

/* What a transport moved since it was opened, by sending rank's process. */
typedef struct mz_transport_bytes {
    int64_t within;  /* between ranks of one process, by copies */
    int64_t between; /* between processes */
} mz_transport_bytes;

typedef struct mz_transport mz_transport;
typedef struct mz_transport_kind mz_transport_kind; /* the table's entry; transport_kind.h */

struct mz_transport {
    const mz_transport_kind *kind;
    const char *name;
    int32_t ranks, processes, process;
    int32_t first, end;         /* this process's ranks: first .. end-1 */
    int32_t device, neighbours; /* of the processes of this machine: which one, of how many */
    double timeout_s;
    const volatile sig_atomic_t *stop;
    mz_transport_bytes moved;
    mz_kernels *kernels; /* set by mz_transport_attach */
    void *stream;        /* its native stream 0, NULL on the host */
    const char *doing;   /* set by the caller for messages: "dispatch", with its layer (-1: none) */
    int32_t layer;
    bool placed;          /* the error of the call that failed names this process and its ranks */
    bool corrupt;         /* test aid: the next exchange or gather that receives something corrupts
                             it, and sets this back */
    bool corrupted;       /* one has */
    void *scratch;        /* of transport.c */
    void *library, *self; /* of the kind */
};

/* Is it one of this process's ranks? */
static inline bool mz_transport_holds(const mz_transport *t, int32_t rank) {
    return rank >= t->first && rank < t->end;
}

/* Before any kernels context: a process learns which ranks (and which device) are its own. */
mz_code mz_transport_open(const mz_transport_options *options, mz_transport **transport,
                          mz_err *err);
/* The context whose memory and stream 0 the lanes use. */
mz_code mz_transport_attach(mz_transport *transport, mz_kernels *kernels, mz_err *err);
void mz_transport_close(mz_transport **transport);

/* Moves all lanes and returns when this process's ends are done (what stream 0 held before has
 * completed, what follows on it may use the rows), over MPI also those of the processes that it
 * exchanged with. seconds: [end-first], added to, or NULL: time of
 * each local rank, the copies it received within the process and an equal share of the rest. The
 * three parts of the wall time that a transport can tell apart - packing for the wire, copies,
 * waiting for peers - are not kept. */
mz_code mz_transport_exchange(mz_transport *transport, const mz_lane *lane, int64_t lanes,
                              double *seconds, mz_err *err);

/* Host memory: `bytes` of every rank, mine [end-first][bytes] to all [R][bytes]. */
mz_code mz_transport_gather(mz_transport *transport, const void *mine, size_t bytes, void *all,
                            mz_err *err);
mz_code mz_transport_barrier(mz_transport *transport, mz_err *err);
/* Ends the other processes; does nothing where there is one. Safe after any failure. */
void mz_transport_abort(mz_transport *transport);

/* Host threads of this process's kernels: `asked`, or where that is 0 its share of the machine's
 * processors (0, the kernels' own choice, for a process alone, which may be bound to fewer). */
int32_t mz_transport_threads(const mz_transport *transport, int64_t asked);

/* Processes that take their memory from where this one does: those of the machine share its memory,
 * each has a GPU of its own. The transport is attached. */
int32_t mz_transport_sharing(const mz_transport *transport);

/* Bytes of memory that is this process's: an equal share of what it and others take from. */
mz_code mz_transport_room(const mz_transport *transport, double *bytes, mz_err *err);

/* Names of the table, separated by ", ". */
const char *mz_transport_names(void);

#endif
