#include "traces/server.h"

#include "common/base/arena.h"
#include "traces/server_wire.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PATIENCE_MS = 60000 };

struct mz_server {
    char *path;
    uint8_t *slots;
    pid_t pid; /* 0 once it has been waited for */
    int fd;
    int patience_ms;
    mz_wire_reply reply;
    char death[96]; /* why there is no child any more */
};

static void describe_death(mz_server *server, int status) {
    if (WIFSIGNALED(status))
        snprintf(server->death, sizeof server->death, "signal %d", WTERMSIG(status));
    else
        snprintf(server->death, sizeof server->death, "exit status %d", WEXITSTATUS(status));
}

static void reap(mz_server *server) {
    int status = 0;
    if (server->pid <= 0)
        return;
    while (waitpid(server->pid, &status, 0) < 0 && errno == EINTR)
        ;
    server->pid = 0;
    if (!server->death[0])
        describe_death(server, status);
}

static mz_code dead(mz_server *server, mz_err *err) {
    reap(server);
    return mz_fail(err, MZ_EINPUT, "%s: the HDF5 library failed on this file (%s): it is damaged",
                   server->path, server->death);
}

static mz_code hung(mz_server *server, mz_err *err) {
    snprintf(server->death, sizeof server->death, "no answer for %g s",
             server->patience_ms / 1000.0);
    kill(server->pid, SIGKILL);
    return dead(server, err);
}

static mz_code send_request(mz_server *server, const mz_wire_request *request, mz_err *err) {
    for (;;) {
        if (server->pid == 0)
            return dead(server, err);
        ssize_t n = send(server->fd, request, sizeof *request, MSG_NOSIGNAL);
        if (n == (ssize_t)sizeof *request)
            return MZ_OK;
        if (n < 0 && errno == EINTR)
            continue;
        return dead(server, err);
    }
}

static mz_code await_reply(mz_server *server, mz_err *err) {
    for (;;) {
        if (server->pid == 0)
            return dead(server, err);
        struct pollfd poll_fd = {.fd = server->fd, .events = POLLIN};
        int ready = poll(&poll_fd, 1, server->patience_ms);
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready == 0)
            return hung(server, err);
        ssize_t n = recv(server->fd, &server->reply, sizeof server->reply, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n != (ssize_t)sizeof server->reply)
            return dead(server, err);
        server->reply.text[sizeof server->reply.text - 1] = 0;
        server->reply.attr.text[MZ_SERVER_TEXT - 1] = 0;
        server->reply.dataset.other_type[sizeof server->reply.dataset.other_type - 1] = 0;
        return MZ_OK;
    }
}

/* Signals that ask the program to stop reach the child too: it must outlive them, because the
 * parent may still want to finish. Handlers of the parent make no sense in it. */
static void prepare_child(int fd) {
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGSYS, SIGTRAP};
    static const int ignored[] = {SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGPIPE};
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++)
        signal(fatal[i], SIG_DFL);
    for (size_t i = 0; i < sizeof ignored / sizeof ignored[0]; i++)
        signal(ignored[i], SIG_IGN);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    if (fd > 3)
        close_range(3, (unsigned)fd - 1, 0);
    close_range((unsigned)fd + 1, ~0U, 0);
    /* Locks are for writers; on many network file systems they only fail. */
    setenv("HDF5_USE_FILE_LOCKING", "FALSE", 1);
}

static mz_code fork_child(mz_server *server, mz_err *err) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return mz_fail(err, MZ_EINTERNAL, "cannot make a socket pair: %s", strerror(errno));
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(0);
        prepare_child(pair[1]);
        mz_server_child(pair[1], server->slots, server->path);
    }
    close(pair[1]);
    if (pid < 0) {
        close(pair[0]);
        return mz_fail(err, MZ_EINTERNAL, "cannot start a process to read %s: %s", server->path,
                       strerror(errno));
    }
    server->pid = pid;
    server->fd = pair[0];
    return MZ_OK;
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
    server->fd = -1;
    server->patience_ms = PATIENCE_MS;
    server->path = strdup(path);
    server->slots = mmap(NULL, MZ_COLUMNS * mz_wire_slot_size(), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mz_code code = MZ_OK;
    if (!server->path || server->slots == MAP_FAILED)
        code = mz_fail_nomem(err, "the buffers of a trace reader");
    if (code == MZ_OK)
        code = fork_child(server, err);
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
    if (s->fd >= 0)
        close(s->fd);
    /* The child only reads, so nothing is lost by not waiting for the call it may be in. */
    if (s->pid > 0)
        kill(s->pid, SIGKILL);
    reap(s);
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
        got->size > (int64_t)mz_wire_slot_size())
        return hung(server, err);
    *reply = (mz_chunk_reply){got->column, got->row, got->size, got->mask,
                              got->failed ? got->text : NULL};
    return MZ_OK;
}

const uint8_t *mz_server_slot(const mz_server *server, mz_column_id id) {
    return server->slots + (size_t)id * mz_wire_slot_size();
}

pid_t mz_server_pid(const mz_server *server) {
    return server->pid;
}

void mz_server_set_patience(mz_server *server, int milliseconds) {
    server->patience_ms = milliseconds;
}
