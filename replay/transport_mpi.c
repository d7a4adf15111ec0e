/* Open MPI: lanes go straight from and to host memory, short ones packed into one message per pair
 * of processes, long ones in pieces. */
#include "replay/transport_mpi.h"

#include "common/base/arena.h"
#include "common/base/log.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SHORT_LANE = 16 << 10, /* up to here a copy costs less than a message */
    PIECE = 8 << 20,       /* of a long lane: far below 2 GiB, and progress shows */
    TAGS = 30000           /* every MPI has 32767 */
};

/* ---- errors and waiting ------------------------------------------------------------------------
 */

static mz_code mpi_fail(mz_err *err, int status, const char *what) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(status, text, &length);
    return mz_fail(err, MZ_EINTERNAL, "%s: %s", what, text);
}

static mz_code peer_fail(const mz_transport *t, mz_err *err, int32_t peer, const char *text) {
    const int32_t each = t->ranks / t->processes;
    return mz_fail(err, MZ_EINTERNAL, "process %d (ranks %d to %d): %s", peer, peer * each,
                   (peer + 1) * each - 1, text);
}

mz_code mpi_check_wait(const mz_transport *t, double since, int32_t peer, mz_err *err) {
    const bool stopped = t->stop && *t->stop;
    if (!stopped && mz_now() - since < t->timeout_s)
        return MZ_OK;
    char whom[96] = "the others";
    const int32_t each = t->ranks / t->processes;
    if (peer >= 0)
        snprintf(whom, sizeof whom, "process %d (ranks %d to %d)", peer, peer * each,
                 (peer + 1) * each - 1);
    if (stopped)
        return mz_fail(err, MZ_EABORTED,
                       "interrupted while waiting for %s (another process may have ended the job)",
                       whom);
    return mz_fail(err, MZ_EINTERNAL,
                   "nothing has come from %s for %.3g s: it hangs or died; --timeout waits longer",
                   whom, t->timeout_s);
}

/* ---- messages ----------------------------------------------------------------------------------
 */

static mz_code add_message(mz_transport *t, mpi_link *l, int32_t peer, bool receive, void *memory,
                           size_t bytes, mz_err *err) {
    const size_t need = (size_t)l->messages + 1;
    if (!mz_grow((void **)&l->request, &l->request_cap, need, sizeof *l->request) ||
        !mz_grow((void **)&l->message, &l->message_cap, need, sizeof *l->message) ||
        !mz_grow((void **)&l->status, &l->status_cap, need, sizeof *l->status) ||
        !mz_grow((void **)&l->done, &l->done_cap, need, sizeof *l->done))
        return mz_fail_nomem(err, "the messages of an exchange");
    mpi_count *count = &l->count[peer];
    const int tag = 1 + (int)((receive ? count->received : count->sent) % TAGS);
    MPI_Request *request = &l->request[l->messages];
    const int status = receive
                           ? MPI_Irecv(memory, (int)bytes, MPI_BYTE, peer, tag, l->comm, request)
                           : MPI_Isend(memory, (int)bytes, MPI_BYTE, peer, tag, l->comm, request);
    if (status != MPI_SUCCESS)
        return mpi_fail(err, status, receive ? "a receive" : "a send");
    *(receive ? &count->receives : &count->sends) = true;
    l->message[l->messages++] = (mpi_message){peer, (int32_t)bytes, receive};
    return MZ_OK;
}

static mz_code add_pieces(mz_transport *t, mpi_link *l, int32_t peer, bool receive, void *memory,
                          size_t bytes, mz_err *err) {
    mz_code code = MZ_OK;
    size_t at = 0;
    do {
        const size_t piece = bytes - at < PIECE ? bytes - at : PIECE;
        code = add_message(t, l, peer, receive, (unsigned char *)memory + at, piece, err);
        at += piece;
    } while (code == MZ_OK && at < bytes);
    return code;
}

static mz_code check_done(const mz_transport *t, mpi_link *l, int index, const MPI_Status *status,
                          bool failed, mz_err *err) {
    const mpi_message m = l->message[index];
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0, got = 0;
    if (failed && status->MPI_ERROR != MPI_SUCCESS && status->MPI_ERROR != MPI_ERR_PENDING) {
        MPI_Error_string(status->MPI_ERROR, text, &length);
        return peer_fail(t, err, m.peer, text);
    }
    if (!m.receive)
        return MZ_OK;
    MPI_Get_count(status, MPI_BYTE, &got);
    if (got == m.bytes)
        return MZ_OK;
    snprintf(text, sizeof text, "sent %d bytes where %d were expected", got, m.bytes);
    return peer_fail(t, err, m.peer, text);
}

static int32_t waited_for(const mpi_link *l) {
    for (int64_t i = 0; i < l->messages; i++)
        if (l->request[i] != MPI_REQUEST_NULL)
            return l->message[i].peer;
    return -1;
}

static mz_code poll(mz_transport *t, mpi_link *l, int64_t *left, mz_err *err) {
    int count = 0;
    const int status = MPI_Testsome((int)l->messages, l->request, &count, l->done, l->status);
    const bool failed = status == MPI_ERR_IN_STATUS;
    if (status != MPI_SUCCESS && !failed)
        return mpi_fail(err, status, "waiting for messages");
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && count != MPI_UNDEFINED && i < count; i++)
        code = check_done(t, l, l->done[i], &l->status[i], failed, err);
    *left -= count == MPI_UNDEFINED ? 0 : count;
    return code;
}

static mz_code wait_all(mz_transport *t, mpi_link *l, mz_err *err) {
    double since = mz_now();
    mz_code code = MZ_OK;
    int64_t left = l->messages;
    while (code == MZ_OK && left > 0) {
        const int64_t before = left;
        code = poll(t, l, &left, err);
        if (code != MZ_OK || left == 0)
            break;
        if (left < before) {
            since = mz_now();
            continue;
        }
        code = mpi_check_wait(t, since, waited_for(l), err);
        sched_yield(); /* processes may share a core */
    }
    l->broken = l->broken || code != MZ_OK;
    l->messages = 0;
    for (int32_t p = 0; p < t->processes; p++) {
        mpi_count *count = &l->count[p];
        count->sent += count->sends;
        count->received += count->receives;
        count->sends = count->receives = false;
    }
    return code;
}

/* ---- exchanges ---------------------------------------------------------------------------------
 */

static bool sends(const mz_transport *t, const mz_lane *lane) {
    return mz_transport_holds(t, lane->from);
}

static int32_t peer_of(const mz_transport *t, const mz_lane *lane) {
    return mz_transport_home(t, sends(t, lane) ? lane->to : lane->from);
}

/* Begins of every peer's short lanes in the two buffers. */
static mz_code size_packed(mz_transport *t, mpi_link *l, mz_err *err) {
    size_t send = 0, receive = 0;
    memset(l->packed, 0, sizeof *l->packed * (size_t)t->processes);
    for (int64_t i = 0; i < l->lanes; i++) {
        const mz_lane *lane = &l->lane[i];
        if (lane->bytes > SHORT_LANE)
            continue;
        mpi_packed *p = &l->packed[peer_of(t, lane)];
        *(sends(t, lane) ? &p->send_bytes : &p->receive_bytes) += lane->bytes;
    }
    for (int32_t p = 0; p < t->processes; p++) {
        l->packed[p].send = send;
        l->packed[p].receive = receive;
        send += l->packed[p].send_bytes;
        receive += l->packed[p].receive_bytes;
    }
    if (!mz_grow((void **)&l->send, &l->send_cap, send, 1) ||
        !mz_grow((void **)&l->receive, &l->receive_cap, receive, 1))
        return mz_fail_nomem(err, "short messages");
    return MZ_OK;
}

/* Copies short lanes into the send buffer, or out of the receive buffer. */
static void copy_packed(mz_transport *t, mpi_link *l, bool in) {
    for (int32_t p = 0; p < t->processes; p++)
        l->packed[p].send_bytes = l->packed[p].receive_bytes = 0;
    for (int64_t i = 0; i < l->lanes; i++) {
        const mz_lane *lane = &l->lane[i];
        if (lane->bytes > SHORT_LANE)
            continue;
        mpi_packed *p = &l->packed[peer_of(t, lane)];
        if (sends(t, lane)) {
            if (in)
                memcpy(l->send + p->send + p->send_bytes, lane->send, lane->bytes);
            p->send_bytes += lane->bytes;
        } else {
            if (!in)
                memcpy(lane->receive, l->receive + p->receive + p->receive_bytes, lane->bytes);
            p->receive_bytes += lane->bytes;
        }
    }
}

/* All messages of one direction: per peer what is packed first, then long lanes in their order. */
static mz_code add_direction(mz_transport *t, mpi_link *l, bool receive, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t p = 0; code == MZ_OK && p < t->processes; p++) {
        const mpi_packed *k = &l->packed[p];
        const size_t bytes = receive ? k->receive_bytes : k->send_bytes;
        if (bytes > 0)
            code = add_pieces(t, l, p, receive,
                              receive ? l->receive + k->receive : l->send + k->send, bytes, err);
    }
    for (int64_t i = 0; code == MZ_OK && i < l->lanes; i++) {
        const mz_lane *lane = &l->lane[i];
        if (lane->bytes > SHORT_LANE && sends(t, lane) != receive)
            code = add_pieces(t, l, peer_of(t, lane), receive,
                              receive ? lane->receive : (void *)(uintptr_t)lane->send, lane->bytes,
                              err);
    }
    return code;
}

mz_code mpi_link_start(mz_transport *t, mpi_link *l, const mz_lane *lane, int64_t lanes,
                       mz_err *err) {
    l->lane = lane;
    l->lanes = lanes;
    mz_code code = size_packed(t, l, err);
    if (code != MZ_OK)
        return code;
    copy_packed(t, l, true);
    code = add_direction(t, l, true, err);
    if (code == MZ_OK)
        code = add_direction(t, l, false, err);
    l->broken = l->broken || code != MZ_OK;
    return code;
}

/* A process whose messages are done may still hold back what tells their receivers so, if they were
 * many, until it calls MPI again: after its next products. So it stays until its peers are done. */
static mz_code part(mz_transport *t, mpi_link *l, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t p = 0; code == MZ_OK && p < t->processes; p++) {
        if (l->count[p].meets)
            code = add_message(t, l, p, true, NULL, 0, err);
        if (code == MZ_OK && l->count[p].meets)
            code = add_message(t, l, p, false, NULL, 0, err);
    }
    l->broken = l->broken || code != MZ_OK;
    return code == MZ_OK ? wait_all(t, l, err) : code;
}

mz_code mpi_link_finish(mz_transport *t, mpi_link *l, mz_err *err) {
    for (int32_t p = 0; p < t->processes; p++)
        l->count[p].meets = l->count[p].sends || l->count[p].receives;
    mz_code code = wait_all(t, l, err);
    if (code == MZ_OK)
        code = part(t, l, err);
    if (code == MZ_OK)
        copy_packed(t, l, false);
    return code;
}

mz_code mpi_link_gather(mz_transport *t, mpi_link *l, const void *mine, size_t bytes, void *all,
                        mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t p = 0; code == MZ_OK && p < t->processes; p++)
        if (p != t->process)
            code = add_pieces(t, l, p, true,
                              bytes ? (unsigned char *)all + (size_t)p * bytes : NULL, bytes, err);
    for (int32_t p = 0; code == MZ_OK && p < t->processes; p++)
        if (p != t->process)
            code = add_pieces(t, l, p, false, (void *)(uintptr_t)mine, bytes, err);
    l->broken = l->broken || code != MZ_OK;
    if (code != MZ_OK)
        return code;
    if (bytes > 0)
        memcpy((unsigned char *)all + (size_t)t->process * bytes, mine, bytes);
    return wait_all(t, l, err);
}

/* ---- opening and closing -----------------------------------------------------------------------
 */

static mz_code find_neighbours(mz_transport *t, mpi_link *l, mz_err *err) {
    MPI_Comm machine;
    int rank = 0, size = 1;
    int status = MPI_Comm_split_type(l->comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    if (status != MPI_SUCCESS)
        return mpi_fail(err, status, "processes of this machine");
    MPI_Comm_rank(machine, &rank);
    MPI_Comm_size(machine, &size);
    MPI_Comm_free(&machine);
    t->device = rank;
    t->neighbours = size;
    return MZ_OK;
}

mz_code mpi_link_open(mz_transport *t, mpi_link *l, mz_err *err) {
    int provided = 0, rank = 0, size = 1;
    int status = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    if (status != MPI_SUCCESS)
        return mpi_fail(err, status, "MPI_Init");
    l->open = true;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    status = MPI_Comm_dup(MPI_COMM_WORLD, &l->comm);
    if (status != MPI_SUCCESS)
        return mpi_fail(err, status, "a communicator");
    MPI_Comm_set_errhandler(l->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(l->comm, &rank);
    MPI_Comm_size(l->comm, &size);
    t->process = rank;
    t->processes = size;
    l->packed = mz_calloc((size_t)size, sizeof *l->packed);
    l->count = mz_calloc((size_t)size, sizeof *l->count);
    return l->packed && l->count ? find_neighbours(t, l, err) : mz_fail_nomem(err, "a transport");
}

void mpi_link_close(mz_transport *t, mpi_link *l) {
    mz_err ignored;
    if (!l->open || l->broken)
        return;
    /* Process 0 may still write the result, however long that takes; Finalize has no deadline, so a
     * barrier that an interrupt can end comes before it. */
    t->timeout_s = INFINITY;
    if (l->count && mpi_link_gather(t, l, NULL, 0, NULL, &ignored) != MZ_OK) {
        mpi_link_end_others(l);
        return;
    }
    MPI_Comm_free(&l->comm);
    MPI_Finalize();
    void *arrays[] = {l->request, l->message, l->status, l->done,
                      l->packed,  l->count,   l->send,   l->receive};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        free(arrays[i]);
    *l = (mpi_link){0};
}

static void end_world(int status, void *unused) {
    (void)unused;
    fflush(NULL); /* MPI_Abort leaves no time for what was said last */
    MPI_Abort(MPI_COMM_WORLD, status ? status : MZ_EINTERNAL);
}

void mpi_link_end_others(mpi_link *l) {
    if (l->open && !l->ending)
        l->ending = on_exit(end_world, NULL) == 0;
    l->broken = true;
}

/* ---- the transport -----------------------------------------------------------------------------
 */

static mz_code open_mpi(mz_transport *t, const mz_transport_options *options, mz_err *err) {
    t->self = mz_calloc(1, sizeof(mpi_link));
    return t->self ? mpi_link_open(t, t->self, err) : mz_fail_nomem(err, "a transport");
}

static void close_mpi(mz_transport *t) {
    mpi_link *l = t->self;
    if (!l)
        return;
    mpi_link_close(t, l);
    if (!l->broken)
        free(l);
}

static mz_code start_mpi(mz_transport *t, const mz_lane *lane, int64_t lanes, mz_err *err) {
    return mpi_link_start(t, t->self, lane, lanes, err);
}

static mz_code finish_mpi(mz_transport *t, mz_err *err) {
    return mpi_link_finish(t, t->self, err);
}

static mz_code gather_mpi(mz_transport *t, const void *mine, size_t bytes, void *all, mz_err *err) {
    return mpi_link_gather(t, t->self, mine, bytes, all, err);
}

static void end_others_mpi(mz_transport *t) {
    if (t->self)
        mpi_link_end_others(t->self);
}

__attribute__((visibility("default"))) const mz_transport_kind mz_transport_mpi = {
    .memory = MZ_TRANSPORT_HOST,
    .open = open_mpi,
    .close = close_mpi,
    .start = start_mpi,
    .finish = finish_mpi,
    .gather = gather_mpi,
    .end_others = end_others_mpi,
};
