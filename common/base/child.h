/* A child process for work that is not trusted: a library that reads a hostile file, code of the
 * user's own. It is forked, talks in messages over a socket, and may crash, exit or hang; whoever
 * asks it then gets false and the reason in words. It ends with its parent.
 *
 * Signals that ask the program to stop do not reach it, so that the parent may finish; those that
 * report a fault end it. No core is written, no descriptor but the standard ones, the socket and
 * `keep` is open in it.
 * Threads: one mz_child belongs to one thread at a time, and ends with the thread that started it.
 */
#ifndef MIZAN_BASE_CHILD_H
#define MIZAN_BASE_CHILD_H

#include "common/base/err.h"

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

typedef struct mz_child {
    pid_t pid; /* 0: there is none, or it has been waited for */
    int fd;
    int patience_ms; /* how long an answer may take before the child counts as hung */
    const volatile sig_atomic_t *stop; /* once set, no answer is waited for any more: the child is
                                        * killed. NULL, as mz_child_start leaves it: never */
    char death[96]; /* why there is none any more: "signal 11", "exit status 3" */
} mz_child;

/* Runs run(context, fd) in a new process and ends it with status 0 when that returns. keep: one
 * more descriptor that stays open there, or -1. MZ_EINTERNAL when no process can be made; the child
 * is then as mz_child_stop leaves it. */
mz_code mz_child_start(mz_child *child, void (*run)(void *context, int fd), void *context, int keep,
                       int patience_ms, mz_err *err);

/* One message there, one message back, each of exactly `size` bytes. False when the child has
 * ended, hangs or is not waited for (it is then killed), or says something of another size;
 * child->death has the reason.
 */
bool mz_child_send(mz_child *child, const void *message, size_t size);
bool mz_child_receive(mz_child *child, void *message, size_t size);

/* Ends a child that does not keep to what was agreed; `why` becomes child->death. */
void mz_child_kill(mz_child *child, const char *why);

/* Kills the child if there is one, waits for it and closes the socket. A zeroed or stopped mz_child
 * is left as it is. */
void mz_child_stop(mz_child *child);

/* For the child: the next message; false when the parent has gone. */
bool mz_parent_receive(int fd, void *message, size_t size);
bool mz_parent_send(int fd, const void *message, size_t size);

#endif
