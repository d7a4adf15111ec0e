/* What the transports between processes share: messages of host memory through MPI, waited for with
 * a deadline. In the module that is linked with libmpi; nobody else includes this. */
#ifndef MIZAN_REPLAY_TRANSPORT_MPI_H
#define MIZAN_REPLAY_TRANSPORT_MPI_H

#include "replay/transport_kind.h"

#include <mpi.h>

/* A message under way: a piece of a lane, or many short lanes packed. */
typedef struct mpi_message {
    int32_t peer; /* process */
    int32_t bytes;
    bool receive;
} mpi_message;

/* Short lanes of one peer, packed; offsets into the two buffers. */
typedef struct mpi_packed {
    size_t send, receive;             /* begin */
    size_t send_bytes, receive_bytes; /* packed so far */
} mpi_packed;

/* Exchanges so far in which this process had something for a peer, and the peer for it: both ends
 * count the same, so the tags keep processes that are out of step from mixing messages. */
typedef struct mpi_count {
    int64_t sent, received;
    bool sends, receives; /* in the exchange under way */
    bool meets;           /* one of them, before it was waited for */
} mpi_count;

typedef struct mpi_link {
    MPI_Comm comm;
    bool open, broken, ending; /* broken: a failure left messages under way */
    MPI_Request *request;
    mpi_message *message;
    MPI_Status *status;
    int *done;
    size_t request_cap, message_cap, status_cap, done_cap;
    int64_t messages;
    mpi_packed *packed; /* [processes] */
    mpi_count *count;   /* [processes] */
    unsigned char *send, *receive;
    size_t send_cap, receive_cap;
    const mz_lane *lane; /* of the exchange under way */
    int64_t lanes;
} mpi_link;

/* MPI itself, and where this process stands. link is zeroed. */
mz_code mpi_link_open(mz_transport *t, mpi_link *link, mz_err *err);
/* After a failure nothing is waited for or released: messages may still be under way. */
void mpi_link_close(mz_transport *t, mpi_link *link);
mz_code mpi_link_start(mz_transport *t, mpi_link *link, const mz_lane *lane, int64_t lanes,
                       mz_err *err);
mz_code mpi_link_finish(mz_transport *t, mpi_link *link, mz_err *err);
mz_code mpi_link_gather(mz_transport *t, mpi_link *link, const void *mine, size_t bytes, void *all,
                        mz_err *err);
void mpi_link_end_others(mpi_link *link);

/* Waiting: `since` is when something last moved. MZ_EABORTED when the user interrupted or a
 * launcher ends the job, MZ_EINTERNAL when nothing moved for timeout_s; `peer` names whom this
 * process waits for, -1: not known. */
mz_code mpi_check_wait(const mz_transport *t, double since, int32_t peer, mz_err *err);

#endif
