#include "common/base/child.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void describe(mz_child *child, int status) {
    if (WIFSIGNALED(status))
        snprintf(child->death, sizeof child->death, "signal %d", WTERMSIG(status));
    else
        snprintf(child->death, sizeof child->death, "exit status %d", WEXITSTATUS(status));
}

static void reap(mz_child *child) {
    int status = 0;
    if (child->pid <= 0)
        return;
    kill(child->pid, SIGKILL); /* it may have closed its socket and live on */
    while (waitpid(child->pid, &status, 0) < 0 && errno == EINTR)
        ;
    child->pid = 0;
    if (!child->death[0])
        describe(child, status);
}

/* A library that exits ends the child at once: what the parent registered for its end is not for
 * it.
 */
static void leave(int status, void *unused) {
    (void)unused;
    _exit(status);
}

/* Signals that ask the program to stop reach the child too: it must outlive them, because the
 * parent may still want to finish. Handlers of the parent make no sense in it. */
static void settle(int fd, int keep) {
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
    const int low = keep >= 0 && keep < fd ? keep : fd, high = low == fd ? keep : fd;
    if (low > 3)
        close_range(3, (unsigned)low - 1, 0);
    if (high > low + 1)
        close_range((unsigned)low + 1, (unsigned)high - 1, 0);
    close_range((unsigned)(high > low ? high : low) + 1, ~0U, 0);
    on_exit(leave, NULL);
}

mz_code mz_child_start(mz_child *child, void (*run)(void *context, int fd), void *context, int keep,
                       int patience_ms, mz_err *err) {
    int pair[2];
    *child = (mz_child){.fd = -1, .patience_ms = patience_ms};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return mz_fail(err, MZ_EINTERNAL, "cannot make a socket pair: %s", strerror(errno));
    const pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent) {
            settle(pair[1], keep);
            run(context, pair[1]);
        }
        _exit(0);
    }
    const int why = errno;
    close(pair[1]);
    if (pid < 0) {
        close(pair[0]);
        return mz_fail(err, MZ_EINTERNAL, "cannot start a process: %s", strerror(why));
    }
    child->pid = pid;
    child->fd = pair[0];
    return MZ_OK;
}

void mz_child_kill(mz_child *child, const char *why) {
    if (child->pid <= 0)
        return;
    snprintf(child->death, sizeof child->death, "%s", why);
    reap(child);
}

bool mz_child_send(mz_child *child, const void *message, size_t size) {
    while (child->pid > 0) {
        const ssize_t n = send(child->fd, message, size, MSG_NOSIGNAL);
        if (n == (ssize_t)size)
            return true;
        if (n >= 0 || errno != EINTR)
            reap(child);
    }
    return false;
}

static bool wait_for(mz_child *child) {
    enum { LOOK_MS = 100 }; /* a signal may come just before poll, or to another thread */
    for (int left = child->patience_ms;;) {
        struct pollfd poll_fd = {.fd = child->fd, .events = POLLIN};
        const int slice = child->stop && left > LOOK_MS ? LOOK_MS : left;
        const int ready = poll(&poll_fd, 1, slice);
        if (ready > 0)
            return true;
        if (child->stop && *child->stop) {
            mz_child_kill(child, "interrupted");
            return false;
        }
        if (ready < 0 && errno == EINTR)
            continue;
        left -= slice;
        if (left > 0)
            continue;
        char why[48];
        snprintf(why, sizeof why, "no answer for %g s", child->patience_ms / 1000.0);
        mz_child_kill(child, why);
        return false;
    }
}

bool mz_child_receive(mz_child *child, void *message, size_t size) {
    while (child->pid > 0 && wait_for(child)) {
        const ssize_t n = recv(child->fd, message, size, MSG_TRUNC);
        if (n == (ssize_t)size)
            return true;
        if (n > 0)
            mz_child_kill(child, "an answer of the wrong size");
        else if (n == 0 || errno != EINTR)
            reap(child);
    }
    return false;
}

void mz_child_stop(mz_child *child) {
    if (child->fd > 0)
        close(child->fd);
    child->fd = -1;
    mz_child_kill(child, "stopped");
}

bool mz_parent_receive(int fd, void *message, size_t size) {
    ssize_t n;
    do
        n = recv(fd, message, size, 0);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)size;
}

bool mz_parent_send(int fd, const void *message, size_t size) {
    return send(fd, message, size, MSG_NOSIGNAL) == (ssize_t)size;
}
