#include "common/base/log.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

mz_log mz_log_make(FILE *stream, int verbosity) {
    mz_log log = {.stream = stream, .verbosity = verbosity};
    log.tty = stream && isatty(fileno(stream)) == 1;
    const char *no_color = getenv("NO_COLOR");
    log.color = log.tty && !(no_color && *no_color);
    return log;
}

void mz_log_choose(mz_log *log, bool quiet, bool verbose) {
    if (quiet)
        log->verbosity = -1;
    else if (verbose)
        log->verbosity = 1;
}

static void say(const mz_log *log, const char *label, const char *fmt, va_list args) {
    if (!log->stream)
        return;
    /* A progress line may stand on the terminal: wipe it, the next update draws it again. */
    if (log->tty)
        fputs("\r\033[K", log->stream);
    if (label)
        fprintf(log->stream, log->color ? "\033[33m%s:\033[0m " : "%s: ", label);
    /* A path may hold anything: one message is one line. */
    char text[4 * MZ_ERR_MAX];
    mz_vformat_line(text, sizeof text, fmt, args);
    fprintf(log->stream, "%s\n", text);
    fflush(log->stream);
}

void mz_info(const mz_log *log, const char *fmt, ...) {
    if (log->verbosity < 0)
        return;
    va_list args;
    va_start(args, fmt);
    say(log, NULL, fmt, args);
    va_end(args);
}

void mz_note(const mz_log *log, const char *fmt, ...) {
    if (log->verbosity < 1)
        return;
    va_list args;
    va_start(args, fmt);
    say(log, NULL, fmt, args);
    va_end(args);
}

void mz_warn(const mz_log *log, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    say(log, "warning", fmt, args);
    va_end(args);
}

double mz_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

mz_progress mz_progress_start(const mz_log *log, const char *what, const char *unit,
                              int64_t total) {
    double now = mz_now();
    return (mz_progress){
        .log = log, .what = what, .unit = unit, .total = total, .started = now, .printed = now};
}

/* "12.3 M": counts of things, powers of 1000. */
static const char *short_count(double value, char *buffer, size_t size) {
    static const char *const suffix[] = {"", " k", " M", " G", " T"};
    int i = 0;
    while (value >= 1000 && i < 4) {
        value /= 1000;
        i++;
    }
    snprintf(buffer, size, "%.3g%s", value, suffix[i]);
    return buffer;
}

static void draw(mz_progress *progress, int64_t done, double now) {
    const mz_log *log = progress->log;
    double elapsed = now - progress->started;
    double rate = elapsed > 0 ? (double)done / elapsed : 0;
    char text[200], part[32];
    int n = 0;
    n += snprintf(text, sizeof text, "%s: %s", progress->what,
                  short_count((double)done, part, sizeof part));
    if (progress->total > 0)
        n += snprintf(text + n, sizeof text - (size_t)n, " of %s",
                      short_count((double)progress->total, part, sizeof part));
    n += snprintf(text + n, sizeof text - (size_t)n, " %s, %s %s/s", progress->unit,
                  short_count(rate, part, sizeof part), progress->unit);
    if (progress->total > done && rate > 0)
        snprintf(text + n, sizeof text - (size_t)n, ", %.0f s left",
                 (double)(progress->total - done) / rate);
    if (log->tty)
        fprintf(log->stream, "\r\033[K%s", text);
    else
        fprintf(log->stream, "%s\n", text);
    fflush(log->stream);
    progress->drawn = true;
    progress->printed = now;
}

void mz_progress_update(mz_progress *progress, int64_t done) {
    const mz_log *log = progress->log;
    if (!log->stream || log->verbosity < 0)
        return;
    double now = mz_now();
    if (now - progress->printed >= (log->tty ? 0.2 : 10.0))
        draw(progress, done, now);
}

void mz_progress_end(mz_progress *progress) {
    const mz_log *log = progress->log;
    if (progress->drawn && log->tty) {
        fputs("\r\033[K", log->stream);
        fflush(log->stream);
    }
    progress->drawn = false;
}
