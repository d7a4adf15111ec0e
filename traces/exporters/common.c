#include "traces/exporters/common.h"

#include "common/base/arena.h"
#include "common/io/input.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- folders --------------------------------------------------------------------------------- */

mz_code mz_folder_begin(mz_folder *folder, const char *path, mz_err *err) {
    struct stat info;
    size_t n = strlen(path);
    *folder = (mz_folder){{0}, {0}};
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (n == 0 || n >= sizeof folder->path)
        return mz_fail(err, MZ_EINPUT, "the output path is %s", n ? "too long" : "empty");
    memcpy(folder->path, path, n);
    if (lstat(folder->path, &info) == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: it exists; this format writes a folder: name one that does not exist",
                       folder->path);
    snprintf(folder->partial, sizeof folder->partial, "%s.partial-%ld", folder->path,
             (long)getpid());
    if (mkdir(folder->partial, 0777) != 0) {
        folder->partial[0] = 0;
        return mz_fail(err, MZ_EINPUT, "%s: cannot make the folder: %s", folder->path,
                       strerror(errno));
    }
    return MZ_OK;
}

mz_code mz_folder_open(const mz_folder *folder, const char *name, FILE **file, mz_err *err) {
    char path[4400];
    snprintf(path, sizeof path, "%s/%s", folder->partial, name);
    *file = fopen(path, "wbe");
    if (!*file)
        return mz_fail(err, MZ_EINTERNAL, "%s/%s: cannot write: %s", folder->path, name,
                       strerror(errno));
    return MZ_OK;
}

mz_code mz_folder_close(const mz_folder *folder, FILE **file, mz_err *err) {
    if (!*file)
        return MZ_OK;
    bool ok = !ferror(*file) && fflush(*file) == 0 && fsync(fileno(*file)) == 0;
    int reason = errno;
    ok = fclose(*file) == 0 && ok;
    *file = NULL;
    return ok ? MZ_OK
              : mz_fail(err, MZ_EINTERNAL, "%s: cannot write: %s", folder->path, strerror(reason));
}

mz_code mz_folder_commit(mz_folder *folder, mz_err *err) {
    if (rename(folder->partial, folder->path) != 0)
        return mz_fail(err, MZ_EINTERNAL, "%s: cannot make the folder: %s", folder->path,
                       strerror(errno));
    folder->partial[0] = 0;
    return MZ_OK;
}

void mz_folder_abandon(mz_folder *folder) {
    DIR *dir = folder->partial[0] ? opendir(folder->partial) : NULL;
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
    if (folder->partial[0])
        rmdir(folder->partial);
    folder->partial[0] = 0;
}

/* ---- one file -------------------------------------------------------------------------------- */

mz_code mz_export_file(const char *path, mz_code (*write)(void *self, FILE *out, mz_err *err),
                       void *self, mz_err *err) {
    mz_output output;
    mz_code code = mz_output_begin(&output, path, err);
    if (code)
        return code;
    FILE *file = fopen(output.partial, "wbe");
    if (!file)
        code = mz_fail(err, MZ_EINTERNAL, "%s: cannot write: %s", path, strerror(errno));
    else
        code = write(self, file, err);
    bool failed = file && ferror(file);
    failed = (file && fclose(file) != 0) || failed;
    if (!code && failed)
        code = mz_fail(err, MZ_EINTERNAL, "%s: cannot write (disk full?)", path);
    if (!code)
        return mz_output_commit(&output, err);
    mz_output_abandon(&output);
    return code;
}

static mz_code no_such_step(const mz_export_options *options, int64_t steps, mz_err *err) {
    return mz_fail(err, MZ_EINPUT, "no step from --first-step %" PRId64 " on: there are %" PRId64,
                   options->first_step, steps);
}

mz_code mz_export_window(mz_trace *trace, const mz_export_options *options, int64_t *first,
                         int64_t *end, mz_err *err) {
    const mz_trace_call *call;
    int64_t calls = mz_trace_calls(trace, &call), step = -1;
    *first = *end = calls;
    for (int64_t i = 0; i < calls; i++) {
        if (i > 0 && call[i].step == call[i - 1].step)
            continue;
        step++;
        if (step == options->first_step)
            *first = i;
        if (options->steps > 0 && step == options->first_step + options->steps)
            *end = i;
    }
    return *first == calls ? no_such_step(options, step + 1, err) : MZ_OK;
}

/* ---- micro-batches --------------------------------------------------------------------------- */

static bool same_batch(const mz_trace_call *a, const mz_trace_call *b) {
    return a->step == b->step && a->micro_batch == b->micro_batch;
}

/* The micro-batch that begins at call `first`, and its number of calls. */
static mz_code take_batch(const mz_trace_facts *facts, const mz_trace_call *call, int64_t calls,
                          int64_t first, mz_batch *batch, int64_t *size, mz_err *err) {
    int64_t n = 0, ranks = 0;
    while (first + n < calls && same_batch(&call[first], &call[first + n])) {
        ranks += call[first + n].layer == call[first].layer;
        n++;
    }
    *batch = (mz_batch){.step = call[first].step,
                        .first = first,
                        .micro_batch = call[first].micro_batch,
                        .ranks = (int32_t)ranks};
    *size = n;
    bool whole = n == ranks * facts->layers;
    for (int64_t i = 0; i < n && whole; i++)
        whole = call[first + i].layer == i / ranks &&
                call[first + i].rank == call[first + i % ranks].rank;
    if (!whole)
        return mz_fail(err, MZ_EINPUT,
                       "step %" PRId64 ", micro-batch %d: not every rank has all %d layers; 'mizan "
                       "trace cut' can leave steps or layers out",
                       batch->step, batch->micro_batch, facts->layers);
    return MZ_OK;
}

mz_code mz_export_batches(mz_trace *trace, const mz_export_options *options, mz_batch **out,
                          int64_t *count, mz_err *err) {
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    const mz_trace_call *call;
    int64_t calls = mz_trace_calls(trace, &call), step = -1, size;
    mz_batch *batch = NULL;
    size_t room = 0;
    mz_code code = MZ_OK;
    *count = 0;
    for (int64_t i = 0; i < calls && !code; i += size) {
        mz_batch next;
        step += i == 0 || call[i].step != call[i - 1].step;
        code = take_batch(facts, call, calls, i, &next, &size, err);
        if (code)
            break;
        if (step < options->first_step ||
            (options->steps > 0 && step >= options->first_step + options->steps))
            continue;
        if (!mz_grow((void **)&batch, &room, (size_t)*count + 1, sizeof *batch))
            code = mz_fail_nomem(err, "the micro-batches");
        else
            batch[(*count)++] = next;
    }
    if (!code && *count == 0)
        code = no_such_step(options, step + 1, err);
    if (code) {
        free(batch);
        batch = NULL;
    }
    *out = batch;
    return code;
}

/* ---- loads ----------------------------------------------------------------------------------- */

int32_t mz_static_rank(int32_t expert, int32_t experts, int32_t ranks) {
    return (int32_t)((int64_t)expert * ranks / experts);
}

mz_code mz_export_loads(mz_trace *trace, const mz_export_options *options, mz_stream **stream,
                        int64_t *row_bytes, mz_err *err) {
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    int64_t hidden = options->hidden ? options->hidden : facts->hidden;
    int32_t ranks = options->ranks ? (int32_t)options->ranks : facts->ranks;
    mz_stream_options shape = {.ranks = (int32_t)options->ranks,
                               .step_tokens = options->step_tokens,
                               .first_step = options->first_step,
                               .steps = options->steps,
                               .seed = options->seed};
    *stream = NULL;
    if (hidden <= 0)
        return mz_fail(err, MZ_EINPUT,
                       "the trace does not say the hidden size, which the bytes of a row follow "
                       "from: pass --hidden H");
    if (ranks > facts->experts)
        return mz_fail(err, MZ_EINPUT, "%d ranks for %d experts: pass --ranks R", ranks,
                       facts->experts);
    if (options->ranks == 0 && ranks == 1)
        return mz_fail(err, MZ_EINPUT,
                       "the trace was recorded on one rank, which sends nothing: pass --ranks R");
    *row_bytes = hidden * options->element_bytes;
    return mz_stream_open(trace, &shape, stream, err);
}

mz_code mz_export_matrix(const mz_load *load, int64_t row_bytes, int64_t *bytes, mz_err *err) {
    int32_t ranks = load->sources;
    if (load->pairs > INT64_MAX / row_bytes)
        return mz_fail(err, MZ_EINPUT,
                       "%" PRId64 " pairs of %" PRId64
                       " bytes are more than 64 bits count: check --hidden and --element-bytes",
                       load->pairs, row_bytes);
    memset(bytes, 0, (size_t)ranks * (size_t)ranks * sizeof *bytes);
    for (int32_t s = 0; s < ranks; s++)
        for (int32_t e = 0; e < load->experts; e++)
            bytes[(int64_t)s * ranks + mz_static_rank(e, load->experts, ranks)] +=
                load->count[(int64_t)s * load->experts + e] * row_bytes;
    return MZ_OK;
}

/* ---- remarks --------------------------------------------------------------------------------- */

void mz_remark(char *list, size_t size, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    size_t used = strlen(list);
    if (used + strlen(text) + 3 < size)
        snprintf(list + used, size - used, "%s%s", used ? "; " : "", text);
}

void mz_export_lost(mz_trace *trace, const mz_carries *carries, mz_export_report *report) {
    const mz_trace_facts *f = mz_trace_facts_of(trace);
    const mz_trace_call *call;
    const mz_trace_step *step;
    int64_t calls = mz_trace_calls(trace, &call);
    bool batches = false;
    for (int64_t i = 0; i < calls && !batches; i++)
        batches = call[i].micro_batch > 0;
    const struct {
        bool lost;
        const char *what;
    } row[] = {{f->has_weight && !carries->weights, "gate weights"},
               {f->has_sequences && !carries->sequences, "bounds of sequences"},
               {f->step_meaning != MZ_STEP_NONE && !carries->steps, "steps"},
               {batches && !carries->micro_batches, "micro-batches"},
               {f->ranks > 1 && !carries->ranks, "source ranks"},
               {f->has_grad_norm2 || f->has_input_norm2 || f->has_hidden_norm2, "norms"},
               {mz_trace_steps(trace, &step) > 0, "losses and times of steps"}};
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++)
        if (row[i].lost)
            mz_remark(report->lost, sizeof report->lost, "%s", row[i].what);
}

mz_code mz_export_need_top_k(mz_trace *trace, const char *format, mz_err *err) {
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    if (facts->kind != MZ_TRACE_PAIRS)
        return mz_fail(err, MZ_EINPUT,
                       "%s holds the experts of every token, and this trace holds counts only; "
                       "sglang-json takes it",
                       format);
    if (facts->top_k == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s holds a fixed number of experts per token, and in this trace it varies",
                       format);
    return MZ_OK;
}

mz_code mz_export_stopped(const mz_app *app, mz_err *err) {
    if (app->stop && *app->stop)
        return mz_fail(err, MZ_EABORTED, "interrupted");
    return MZ_OK;
}
