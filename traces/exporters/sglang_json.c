/* SGLang's expert counts: {"logical_count": [steps][layers][experts]}, summed over source ranks and
 * micro-batches; with --sum the form that is published, [layers][experts] over all steps. Memory:
 * one step of counts. */
#include "traces/exporters/common.h"
#include "traces/exporters/table.h"

#include "common/base/arena.h"
#include "common/io/input.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct counts_export {
    mz_app *app;
    mz_trace *trace;
    const mz_trace_facts *facts;
    const mz_trace_call *call;
    int64_t first, end; /* calls of the window of steps */
    int64_t *count;     /* [layers][experts] */
    FILE *file;
    mz_export_report *report;
} counts_export;

static mz_code find_window(counts_export *x, const mz_export_options *options, mz_err *err) {
    int64_t calls = mz_trace_calls(x->trace, &x->call), step = -1;
    x->first = x->end = calls;
    for (int64_t i = 0; i < calls; i++) {
        if (i > 0 && x->call[i].step == x->call[i - 1].step)
            continue;
        step++;
        if (step == options->first_step)
            x->first = i;
        if (options->steps > 0 && step == options->first_step + options->steps)
            x->end = i;
    }
    if (x->first == calls)
        return mz_fail(err, MZ_EINPUT,
                       "no step from --first-step %" PRId64 " on: there are %" PRId64,
                       options->first_step, step + 1);
    return MZ_OK;
}

static void write_matrix(counts_export *x) {
    const char *between = "";
    fputc('[', x->file);
    for (int32_t l = 0; l < x->facts->layers; l++) {
        fprintf(x->file, "%s[", between);
        for (int32_t e = 0; e < x->facts->experts; e++)
            fprintf(x->file, "%s%" PRId64, e ? "," : "",
                    x->count[(int64_t)l * x->facts->experts + e]);
        fputc(']', x->file);
        between = ",\n";
    }
    fputc(']', x->file);
}

static mz_code write_file(counts_export *x, bool sum, mz_err *err) {
    size_t cells = (size_t)x->facts->layers * (size_t)x->facts->experts;
    mz_code code = MZ_OK;
    mz_progress progress = mz_progress_start(&x->app->log, "exporting", "calls", x->end - x->first);
    fputs(sum ? "{\"logical_count\":\n" : "{\"logical_count\": [\n", x->file);
    for (int64_t i = x->first; i < x->end && !code; i++) {
        const mz_trace_call *call = &x->call[i];
        code = mz_trace_add_counts(x->trace, i, x->count + (int64_t)call->layer * x->facts->experts,
                                   err);
        x->report->calls++;
        x->report->pairs += call->pairs;
        x->report->tokens += call->layer == 0 ? call->tokens : 0;
        bool last = i + 1 == x->end;
        if (last || (!sum && x->call[i + 1].step != call->step)) {
            write_matrix(x);
            fputs(last ? "" : ",\n", x->file);
            memset(x->count, 0, cells * sizeof *x->count);
            code = code ? code : mz_export_stopped(x->app, err);
        }
        mz_progress_update(&progress, i + 1 - x->first);
    }
    mz_progress_end(&progress);
    fputs(sum ? "}\n" : "]}\n", x->file);
    return code;
}

static mz_code write_output(counts_export *x, bool sum, const char *path, mz_err *err) {
    mz_output output;
    mz_code code = mz_output_begin(&output, path, err);
    if (code)
        return code;
    x->file = fopen(output.partial, "wbe");
    if (!x->file)
        code = mz_fail(err, MZ_EINTERNAL, "%s: cannot write: %s", path, strerror(errno));
    else
        code = write_file(x, sum, err);
    bool failed = x->file && ferror(x->file);
    failed = (x->file && fclose(x->file) != 0) || failed;
    if (!code && failed)
        code = mz_fail(err, MZ_EINTERNAL, "%s: cannot write (disk full?)", path);
    if (!code)
        return mz_output_commit(&output, err);
    mz_output_abandon(&output);
    return code;
}

static mz_code export(mz_app *app, mz_trace *trace, const mz_export_options *options,
                      const char *output, mz_export_report *report, mz_err *err) {
    const mz_carries carries = {.steps = !options->sum};
    counts_export x = {
        .app = app, .trace = trace, .facts = mz_trace_facts_of(trace), .report = report};
    mz_code code = find_window(&x, options, err);
    if (code)
        return code;
    x.count = mz_calloc((size_t)x.facts->layers, (size_t)x.facts->experts * sizeof *x.count);
    code = x.count ? write_output(&x, options->sum, output, err)
                   : mz_fail_nomem(err, "one step of counts");
    mz_export_lost(trace, &carries, report);
    if (x.facts->kind == MZ_TRACE_PAIRS)
        mz_remark(report->lost, sizeof report->lost, "experts of single tokens");
    if (!options->sum)
        mz_remark(report->note, sizeof report->note, "steps are numbered from 0");
    free(x.count);
    return code;
}

const mz_exporter mz_export_sglang_json = {
    .name = "sglang-json",
    .summary = "SGLang's logical_count, [steps][layers][experts] or with --sum [layers][experts]",
    .export = export,
};
