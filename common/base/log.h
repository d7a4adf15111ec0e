/* What a person reads on stderr: messages and progress. Results never go here.
 *
 * No globals: an mz_log lives in main and travels inside mz_app. Progress is a single redrawn line
 * on a terminal and a plain line at most every 10 s otherwise; silent with --quiet. */
#ifndef MIZAN_BASE_LOG_H
#define MIZAN_BASE_LOG_H

#include "common/base/err.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct mz_log {
    FILE *stream;  /* usually stderr; NULL silences everything */
    int verbosity; /* -1 quiet, 0 normal, 1 verbose (-v) */
    bool tty;      /* redraw in place */
    bool color;    /* stderr is a terminal, NO_COLOR not set */
} mz_log;

mz_log mz_log_make(FILE *stream, int verbosity);
/* Applies --quiet and --verbose where given; quiet wins. */
void mz_log_choose(mz_log *log, bool quiet, bool verbose);
void mz_info(const mz_log *log, const char *fmt, ...) MZ_PRINTF(2, 3); /* unless quiet */
void mz_note(const mz_log *log, const char *fmt, ...) MZ_PRINTF(2, 3); /* with -v */
void mz_warn(const mz_log *log, const char *fmt, ...) MZ_PRINTF(2, 3); /* always; "warning: " */

typedef struct mz_progress {
    const mz_log *log;
    const char *what; /* "reading", "simulating" */
    const char *unit; /* "pairs", "steps" */
    int64_t total;    /* 0: unknown */
    double started, printed;
    bool drawn;
} mz_progress;

mz_progress mz_progress_start(const mz_log *log, const char *what, const char *unit, int64_t total);
void mz_progress_update(mz_progress *progress, int64_t done); /* cheap; call as often as you like */
void mz_progress_end(mz_progress *progress);                  /* clears the redrawn line */

/* Seconds of the monotonic clock; only for progress, --timing and benchmarks, never for results. */
double mz_now(void);

#endif
