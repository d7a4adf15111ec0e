/* Errors as values.
 *
 * A function that can fail returns mz_code and takes `mz_err *err` last. On failure it returns
 * mz_fail(err, code, "what, where, what to do"); a caller that knows more prepends context with
 * mz_err_prefix and returns the same code. `err` must not be NULL. Nothing here allocates.
 * Threads: one mz_err belongs to one thread at a time. */
#ifndef MIZAN_BASE_ERR_H
#define MIZAN_BASE_ERR_H

#include <stdarg.h>
#include <stddef.h>

/* Values 0-4 are the program's exit codes (DESIGN: output). */
typedef enum mz_code {
    MZ_OK = 0,
    MZ_ECHECK = 1,    /* a check ran and failed */
    MZ_EINPUT = 2,    /* bad input: file, option, trace, profile */
    MZ_EHARDWARE = 3, /* missing hardware or library */
    MZ_EINTERNAL = 4, /* a bug, or a failed system call that is nobody's input */
    MZ_ENOMEM = 5,    /* allocation failed; exits with 4 */
    MZ_EABORTED = 6   /* the user interrupted (SIGINT, SIGTERM, SIGHUP); exits with 130 */
} mz_code;

enum { MZ_ERR_MAX = 768 };

typedef struct mz_err {
    mz_code code;
    char msg[MZ_ERR_MAX]; /* one line, no trailing newline; long messages are cut with "..." */
} mz_err;

#if defined(__GNUC__)
#define MZ_PRINTF(fmt_index, first) __attribute__((format(printf, fmt_index, first)))
#else
#define MZ_PRINTF(fmt_index, first)
#endif

/* Sets `err` and returns `code`, so that `return mz_fail(...)` is the whole error path.
 * Line breaks and control characters in the text are replaced by '?': one error is one line. */
mz_code mz_fail(mz_err *err, mz_code code, const char *fmt, ...) MZ_PRINTF(3, 4);

/* Prepends "text: " to the message of an error already set; returns its code. */
mz_code mz_err_prefix(mz_err *err, const char *fmt, ...) MZ_PRINTF(2, 3);

/* printf into a buffer of at least 4 bytes, with '?' for line breaks and control characters and
 * "..." at the end of what is too long: what is printed from a file or a path stays one line. */
void mz_format_line(char *buffer, size_t size, const char *fmt, ...) MZ_PRINTF(3, 4);
void mz_vformat_line(char *buffer, size_t size, const char *fmt, va_list args);

/* The usual failure of malloc and friends, in one place. `what` names what was to be stored. */
mz_code mz_fail_nomem(mz_err *err, const char *what);

/* Exit code of the program for `code`. */
int mz_exit_code(mz_code code);

#endif
