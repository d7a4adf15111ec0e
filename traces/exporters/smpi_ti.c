/* A time-independent trace that SimGrid's SMPI replays: per layer call two all-to-alls, dispatch
 * and combine, under the static placement (bytes as in nccl-alltoallv). A folder: `replay`, the
 * list that smpirun takes, names `actions`, which holds all ranks: R init | R alltoallv SENT s_0 ..
 * s_{n-1} RECEIVED r_0 .. r_{n-1} | R finalize with bytes as elements. Forward pass only, and no
 * computation between the two. */
#include "traces/exporters/common.h"
#include "traces/exporters/table.h"

#include "common/base/arena.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

typedef struct smpi_export {
    mz_app *app;
    mz_folder folder;
    FILE *file;
    int32_t ranks;
    int64_t *bytes; /* [ranks][ranks] of the current dispatch */
    mz_export_report *report;
} smpi_export;

static void write_all(smpi_export *x, const char *action) {
    for (int32_t r = 0; r < x->ranks; r++)
        fprintf(x->file, "%d %s\n", r, action);
}

/* What rank `r` sends to (or, with `across`, receives from) all: the total, then each. */
static void write_side(smpi_export *x, int32_t r, bool across) {
    int64_t sum = 0, n = x->ranks;
    for (int64_t i = 0; i < n; i++)
        sum += x->bytes[across ? i * n + r : r * n + i];
    fprintf(x->file, " %" PRId64, sum);
    for (int64_t i = 0; i < n; i++)
        fprintf(x->file, " %" PRId64, x->bytes[across ? i * n + r : r * n + i]);
}

static void write_alltoallv(smpi_export *x, bool combine) {
    for (int32_t r = 0; r < x->ranks; r++) {
        fprintf(x->file, "%d alltoallv", r);
        write_side(x, r, combine);
        write_side(x, r, !combine);
        fputc('\n', x->file);
    }
}

/* SMPI reads counts as int. */
static mz_code check_sizes(const smpi_export *x, const mz_step_head *head,
                           const mz_layer_call *call, mz_err *err) {
    for (int64_t i = 0; i < x->ranks; i++) {
        int64_t sent = 0, received = 0;
        for (int64_t j = 0; j < x->ranks; j++) {
            sent += x->bytes[i * x->ranks + j];
            received += x->bytes[j * x->ranks + i];
        }
        if (sent > INT_MAX || received > INT_MAX)
            return mz_fail(err, MZ_EINPUT,
                           "step %" PRId64 ", layer %d: rank %" PRId64 " sends %" PRId64
                           " and receives %" PRId64 " bytes, more than the %d that SMPI can hold",
                           head->step, call->layer, i, sent, received, INT_MAX);
    }
    return MZ_OK;
}

static mz_code write_step(smpi_export *x, mz_load_source *loads, const mz_step_head *head,
                          int64_t row_bytes, mz_err *err) {
    for (int64_t i = 0; i < (int64_t)head->micro_batches * head->layers; i++) {
        mz_layer_call call;
        mz_code code = loads->next_call(loads->self, &call, err);
        if (code)
            return code;
        code = mz_export_matrix(call.load, row_bytes, x->bytes, err);
        if (!code)
            code = check_sizes(x, head, &call, err);
        if (code)
            return code;
        write_alltoallv(x, false);
        write_alltoallv(x, true);
        x->report->calls += x->ranks;
        x->report->pairs += call.load->pairs;
    }
    for (int64_t i = 0; i < (int64_t)head->micro_batches * x->ranks; i++)
        x->report->tokens += head->tokens[i];
    if (ferror(x->file))
        return mz_fail(err, MZ_EINTERNAL, "%s: cannot write (disk full?)", x->folder.path);
    return mz_export_stopped(x->app, err);
}

static mz_code write_actions(smpi_export *x, mz_load_source *loads, int64_t steps,
                             int64_t row_bytes, mz_err *err) {
    mz_progress progress = mz_progress_start(&x->app->log, "exporting", "steps", steps);
    mz_code code = MZ_OK;
    bool end = false;
    write_all(x, "init");
    for (int64_t done = 0; !code && !end; done++) {
        mz_step_head head;
        code = loads->next_step(loads->self, &head, &end, err);
        if (!code && !end)
            code = write_step(x, loads, &head, row_bytes, err);
        mz_progress_update(&progress, done);
    }
    write_all(x, "finalize");
    mz_progress_end(&progress);
    return code ? code : mz_folder_close(&x->folder, &x->file, err);
}

static mz_code write_folder(smpi_export *x, mz_stream *stream, int64_t row_bytes,
                            const char *output, mz_err *err) {
    mz_load_source loads = mz_stream_source(stream);
    x->ranks = loads.ranks;
    x->bytes = mz_calloc((size_t)x->ranks, (size_t)x->ranks * sizeof *x->bytes);
    if (!x->bytes)
        return mz_fail_nomem(err, "the matrix");
    mz_code code = mz_folder_begin(&x->folder, output, err);
    if (!code)
        code = mz_folder_open(&x->folder, "replay", &x->file, err);
    if (!code) {
        char whole[PATH_MAX];
        /* smpirun reads the name from where it runs: absolute where that is possible. */
        const char *real = realpath(x->folder.partial, whole);
        size_t n = real ? strlen(real) : 0,
               suffix = strlen(x->folder.partial) - strlen(x->folder.path);
        if (n > suffix)
            whole[n - suffix] = 0;
        fprintf(x->file, "%s/actions\n", real ? whole : x->folder.path);
        code = mz_folder_close(&x->folder, &x->file, err);
    }
    if (!code)
        code = mz_folder_open(&x->folder, "actions", &x->file, err);
    if (!code)
        code = write_actions(x, &loads, mz_stream_steps(stream), row_bytes, err);
    return code ? code : mz_folder_commit(&x->folder, err);
}

static mz_code export(mz_app *app, mz_trace *trace, const mz_export_options *options,
                      const char *output, mz_export_report *report, mz_err *err) {
    mz_stream *stream;
    int64_t row_bytes;
    mz_code code = mz_export_loads(trace, options, &stream, &row_bytes, err);
    if (code)
        return code;
    smpi_export x = {.app = app, .report = report};
    code = write_folder(&x, stream, row_bytes, output, err);
    if (!code)
        mz_remark(report->note, sizeof report->note,
                  "dispatch and combine of the forward pass on %d ranks%s, %" PRId64
                  " bytes a row, no computation; run smpirun -np %d -platform P.xml -hostfile H "
                  "-replay %s/replay",
                  x.ranks, mz_stream_reshaped(stream) ? " (re-shaped)" : "", row_bytes, x.ranks,
                  output);
    if (x.file)
        fclose(x.file);
    mz_folder_abandon(&x.folder);
    free(x.bytes);
    mz_stream_close(&stream);
    return code;
}

const mz_exporter mz_export_smpi_ti = {
    .name = "smpi-ti",
    .summary = "a folder with dispatch and combine as SimGrid's SMPI replays them",
    .options = "first-step steps ranks step-tokens hidden element-bytes seed",
    .export = export,
};
