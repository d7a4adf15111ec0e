/* NCCL: one GPU per process; every exchange is one group of sends and receives on stream 0. The
 * library is opened when the transport is, so nothing is linked with it; MPI starts it, and carries
 * what lies in host memory. Types and numbers are those of NCCL's public interface (2.14 and newer,
 * for communicators that do not block). */
#include "replay/transport_mpi.h"

#include "common/base/arena.h"
#include "common/base/log.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7, NCCL_CHAR = 0 };
enum { NCCL_OLDEST = 21400 };
enum { CU_SUCCESS = 0, CU_NOT_READY = 600 };

typedef struct nccl_id {
    char internal[128];
} nccl_id;
typedef struct nccl_comm nccl_comm;
/* As version 2.14 has it; later ones take it for what it says it is. */
typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
} nccl_config;

typedef struct nccl_api {
    int (*get_version)(int *version);
    int (*get_id)(nccl_id *id);
    int (*init)(nccl_comm **comm, int ranks, nccl_id id, int rank, nccl_config *config);
    int (*comm_abort)(nccl_comm *comm);
    int (*destroy)(nccl_comm *comm);
    int (*async_error)(nccl_comm *comm, int *error);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *memory, size_t count, int type, int peer, nccl_comm *comm,
                void *stream);
    int (*receive)(void *memory, size_t count, int type, int peer, nccl_comm *comm, void *stream);
    const char *(*error_text)(int status);
    int (*stream_query)(void *stream); /* of the CUDA driver */
} nccl_api;

typedef struct nccl_state {
    mpi_link link;
    nccl_api api;
    nccl_comm *comm;
} nccl_state;

/* ---- the libraries -----------------------------------------------------------------------------
 */

static mz_code find_functions(nccl_api *a, void *nccl, void *driver, mz_err *err) {
    const struct {
        void *library;
        const char *name;
        void *function;
    } table[] = {
        {nccl, "ncclGetVersion", &a->get_version},
        {nccl, "ncclGetUniqueId", &a->get_id},
        {nccl, "ncclCommInitRankConfig", &a->init},
        {nccl, "ncclCommAbort", &a->comm_abort},
        {nccl, "ncclCommDestroy", &a->destroy},
        {nccl, "ncclCommGetAsyncError", &a->async_error},
        {nccl, "ncclGroupStart", &a->group_start},
        {nccl, "ncclGroupEnd", &a->group_end},
        {nccl, "ncclSend", &a->send},
        {nccl, "ncclRecv", &a->receive},
        {nccl, "ncclGetErrorString", &a->error_text},
        {driver, "cuStreamQuery", &a->stream_query},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        void *symbol = dlsym(table[i].library, table[i].name);
        if (!symbol)
            return mz_fail(err, MZ_EHARDWARE,
                           "--transport nccl needs NCCL %d.%d or newer: %s is missing",
                           NCCL_OLDEST / 10000, NCCL_OLDEST / 100 % 100, table[i].name);
        memcpy(table[i].function, &symbol, sizeof symbol);
    }
    return MZ_OK;
}

static mz_code open_libraries(nccl_api *a, mz_err *err) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!driver)
        return mz_fail(err, MZ_EHARDWARE,
                       "--transport nccl needs a GPU in every process: there is no CUDA driver "
                       "(libcuda.so.1)");
    void *nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!nccl)
        return mz_fail(err, MZ_EHARDWARE,
                       "--transport nccl needs NCCL: libnccl.so.2 could not be loaded; install it "
                       "or set LD_LIBRARY_PATH");
    return find_functions(a, nccl, driver, err);
}

/* ---- waiting -----------------------------------------------------------------------------------
 */

static mz_code nccl_fail(const nccl_state *s, int status, const char *what, mz_err *err) {
    return mz_fail(err, MZ_EINTERNAL, "NCCL, %s: %s", what, s->api.error_text(status));
}

/* What was started without blocking is over. */
static mz_code settle(const mz_transport *t, const nccl_state *s, int status, const char *what,
                      mz_err *err) {
    const double since = mz_now();
    mz_code code = MZ_OK;
    while (code == MZ_OK && status == NCCL_IN_PROGRESS) {
        const int asked = s->api.async_error(s->comm, &status);
        if (asked != NCCL_SUCCESS)
            return nccl_fail(s, asked, what, err);
        if (status == NCCL_IN_PROGRESS) {
            code = mpi_check_wait(t, since, -1, err);
            sched_yield();
        }
    }
    if (code != MZ_OK || status == NCCL_SUCCESS)
        return code;
    return nccl_fail(s, status, what, err);
}

/* The stream is empty, or a peer has failed. NCCL does not tell how far a transfer is: the deadline
 * is for the whole exchange. */
static mz_code wait_stream(const mz_transport *t, const nccl_state *s, mz_err *err) {
    const double since = mz_now();
    for (;;) {
        const int query = s->api.stream_query(t->stream);
        if (query == CU_SUCCESS)
            return MZ_OK;
        if (query != CU_NOT_READY)
            return mz_fail(err, MZ_EINTERNAL, "the device reports error %d", query);
        int error = NCCL_SUCCESS;
        const int asked = s->api.async_error(s->comm, &error);
        if (asked != NCCL_SUCCESS || (error != NCCL_SUCCESS && error != NCCL_IN_PROGRESS))
            return nccl_fail(s, asked != NCCL_SUCCESS ? asked : error, "an exchange", err);
        mz_code code = mpi_check_wait(t, since, -1, err);
        if (code != MZ_OK)
            return code;
        sched_yield();
    }
}

/* ---- the transport -----------------------------------------------------------------------------
 */

static mz_code open_nccl(mz_transport *t, const mz_transport_options *options, mz_err *err) {
    nccl_state *s = mz_calloc(1, sizeof *s);
    t->self = s;
    if (!s)
        return mz_fail_nomem(err, "a transport");
    mz_code code = open_libraries(&s->api, err);
    if (code == MZ_OK)
        code = mpi_link_open(t, &s->link, err);
    int version = 0;
    if (code == MZ_OK && (s->api.get_version(&version) != NCCL_SUCCESS || version < NCCL_OLDEST))
        code = mz_fail(err, MZ_EHARDWARE, "--transport nccl needs NCCL %d.%d or newer",
                       NCCL_OLDEST / 10000, NCCL_OLDEST / 100 % 100);
    return code;
}

static mz_code share_id(mz_transport *t, nccl_state *s, nccl_id *id, mz_err *err) {
    nccl_id mine = {{0}};
    nccl_id *all = mz_calloc((size_t)t->processes, sizeof *all);
    if (!all)
        return mz_fail_nomem(err, "a transport");
    mz_code code = MZ_OK;
    if (t->process == 0) {
        const int status = s->api.get_id(&mine);
        if (status != NCCL_SUCCESS)
            code = nccl_fail(s, status, "start", err);
    }
    if (code == MZ_OK)
        code = mpi_link_gather(t, &s->link, &mine, sizeof mine, all, err);
    *id = all[0];
    free(all);
    return code;
}

static mz_code attach_nccl(mz_transport *t, mz_err *err) {
    nccl_state *s = t->self;
    nccl_id id;
    mz_code code = share_id(t, s, &id, err);
    if (code != MZ_OK)
        return code;
    nccl_config config = {sizeof config, 0xcafebeef, NCCL_OLDEST, 0};
    const int status = s->api.init(&s->comm, t->processes, id, t->process, &config);
    return settle(t, s, status, "start", err);
}

static void close_nccl(mz_transport *t) {
    nccl_state *s = t->self;
    if (!s)
        return;
    if (s->comm && s->link.broken)
        s->api.comm_abort(s->comm);
    else if (s->comm)
        s->api.destroy(s->comm);
    mpi_link_close(t, &s->link);
    if (!s->link.broken)
        free(s);
}

static mz_code add_lane(mz_transport *t, const nccl_state *s, const mz_lane *lane, mz_err *err) {
    const bool sends = mz_transport_holds(t, lane->from);
    const int peer = mz_transport_home(t, sends ? lane->to : lane->from);
    const int status =
        sends ? s->api.send(lane->send, lane->bytes, NCCL_CHAR, peer, s->comm, t->stream)
              : s->api.receive(lane->receive, lane->bytes, NCCL_CHAR, peer, s->comm, t->stream);
    if (status == NCCL_SUCCESS || status == NCCL_IN_PROGRESS)
        return MZ_OK;
    return nccl_fail(s, status, sends ? "a send" : "a receive", err);
}

static mz_code start_nccl(mz_transport *t, const mz_lane *lane, int64_t lanes, mz_err *err) {
    nccl_state *s = t->self;
    if (lanes == 0)
        return MZ_OK;
    const int status = s->api.group_start();
    mz_code code = status == NCCL_SUCCESS ? MZ_OK : nccl_fail(s, status, "a group", err);
    for (int64_t i = 0; code == MZ_OK && i < lanes; i++)
        code = add_lane(t, s, &lane[i], err);
    /* A group that was begun is ended all the same: what comes after it would wait in it. */
    const int ended = status == NCCL_SUCCESS ? s->api.group_end() : NCCL_SUCCESS;
    if (code == MZ_OK)
        code = settle(t, s, ended, "a group", err);
    s->link.broken = s->link.broken || code != MZ_OK;
    return code;
}

static mz_code finish_nccl(mz_transport *t, mz_err *err) {
    nccl_state *s = t->self;
    const mz_code code = wait_stream(t, s, err);
    s->link.broken = s->link.broken || code != MZ_OK;
    return code;
}

static mz_code gather_nccl(mz_transport *t, const void *mine, size_t bytes, void *all,
                           mz_err *err) {
    nccl_state *s = t->self;
    return mpi_link_gather(t, &s->link, mine, bytes, all, err);
}

static void end_others_nccl(mz_transport *t) {
    nccl_state *s = t->self;
    if (s)
        mpi_link_end_others(&s->link);
}

__attribute__((visibility("default"))) const mz_transport_kind mz_transport_nccl = {
    .memory = MZ_TRANSPORT_DEVICE,
    .open = open_nccl,
    .attach = attach_nccl,
    .close = close_nccl,
    .start = start_nccl,
    .finish = finish_nccl,
    .gather = gather_nccl,
    .end_others = end_others_nccl,
};
