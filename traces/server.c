#include "traces/server.h"

#include "common/base/arena.h"
#include "common/base/child.h"
#include "traces/server_wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PATIENCE_MS = 60000 };

struct mz_server {
    char *path;
    uint8_t *slots;
    mz_child child;
    mz_wire_reply reply;
};

static mz_code dead(mz_server *server, mz_err *err) {
    return mz_fail(err, MZ_EINPUT, "%s: the HDF5 library failed on this file (%s): it is damaged",
                   server->path, server->child.death);
}

static mz_code send_request(mz_server *server, const mz_wire_request *request, mz_err *err) {
    return mz_child_send(&server->child, request, sizeof *request) ? MZ_OK : dead(server, err);
}

static mz_code await_reply(mz_server *server, mz_err *err) {
    if (!mz_child_receive(&server->child, &server->reply, sizeof server->reply))
        return dead(server, err);
    server->reply.text[sizeof server->reply.text - 1] = 0;
    server->reply.attr.text[MZ_SERVER_TEXT - 1] = 0;
    server->reply.dataset.other_type[sizeof server->reply.dataset.other_type - 1] = 0;
    return MZ_OK;
}

static void run_child(void *context, int fd) {
    const mz_server *server = context;
    /* Locks are for writers; on many network file systems they only fail. */
    setenv("HDF5_USE_FILE_LOCKING", "FALSE", 1);
    mz_server_child(fd, server->slots, server->path);
}

static mz_code open_file(mz_server *server, mz_err *err) {
    mz_wire_request request = {.op = MZ_WIRE_OPEN};
    mz_code code = send_request(server, &request, err);
    if (code == MZ_OK)
        code = await_reply(server, err);
    if (code == MZ_OK && server->reply.failed)
        code = mz_fail(err, MZ_EINPUT, "%s: %s", server->path, server->reply.text);
    return code;
}

mz_code mz_server_start(const char *path, mz_server **out, mz_err *err) {
    *out = NULL;
    mz_server *server = mz_calloc(1, sizeof *server);
    if (!server)
        return mz_fail_nomem(err, "a trace reader");
    server->path = strdup(path);
    server->slots = mmap(NULL, MZ_COLUMNS * mz_wire_slot_size(), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mz_code code = MZ_OK;
    if (!server->path || server->slots == MAP_FAILED)
        code = mz_fail_nomem(err, "the buffers of a trace reader");
    if (code == MZ_OK)
        code = mz_child_start(&server->child, run_child, server, -1, PATIENCE_MS, err);
    if (code == MZ_OK)
        code = open_file(server, err);
    if (code != MZ_OK)
        mz_server_stop(&server);
    *out = server;
    return code;
}

void mz_server_stop(mz_server **server) {
    mz_server *s = *server;
    *server = NULL;
    if (!s)
        return;
    /* The child only reads, so nothing is lost by not waiting for the call it may be in. */
    mz_child_stop(&s->child);
    if (s->slots != MAP_FAILED)
        munmap(s->slots, MZ_COLUMNS * mz_wire_slot_size());
    free(s->path);
    free(s);
}

mz_code mz_server_attr(mz_server *server, const char *group, const char *name, mz_attr *attr,
                       mz_err *err) {
    mz_wire_request request = {.op = MZ_WIRE_ATTR};
    snprintf(request.group, sizeof request.group, "%s", group);
    snprintf(request.name, sizeof request.name, "%s", name);
    mz_code code = send_request(server, &request, err);
    if (code == MZ_OK)
        code = await_reply(server, err);
    if (code == MZ_OK)
        *attr = server->reply.attr;
    return code;
}

mz_code mz_server_dataset(mz_server *server, mz_column_id id, mz_dataset *dataset, mz_err *err) {
    mz_wire_request request = {.op = MZ_WIRE_DATASET, .column = id};
    mz_code code = send_request(server, &request, err);
    if (code == MZ_OK)
        code = await_reply(server, err);
    if (code == MZ_OK)
        *dataset = server->reply.dataset;
    return code;
}

mz_code mz_server_request(mz_server *server, mz_column_id id, int64_t row, mz_err *err) {
    mz_wire_request request = {.op = MZ_WIRE_CHUNK, .column = id, .row = row};
    return send_request(server, &request, err);
}

mz_code mz_server_wait(mz_server *server, mz_chunk_reply *reply, mz_err *err) {
    mz_code code = await_reply(server, err);
    if (code != MZ_OK)
        return code;
    const mz_wire_reply *got = &server->reply;
    if (got->op != MZ_WIRE_CHUNK || got->column < 0 || got->column >= MZ_COLUMNS || got->size < 0 ||
        got->size > (int64_t)mz_wire_slot_size()) {
        mz_child_kill(&server->child, "an answer that makes no sense");
        return dead(server, err);
    }
    *reply = (mz_chunk_reply){got->column, got->row, got->size, got->mask,
                              got->failed ? got->text : NULL};
    return MZ_OK;
}

const uint8_t *mz_server_slot(const mz_server *server, mz_column_id id) {
    return server->slots + (size_t)id * mz_wire_slot_size();
}

pid_t mz_server_pid(const mz_server *server) {
    return server->child.pid;
}

void mz_server_set_patience(mz_server *server, int milliseconds) {
    server->child.patience_ms = milliseconds;
}
