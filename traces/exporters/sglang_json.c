/* SGLang's expert counts: {"logical_count": [steps][layers][experts]}, summed over source ranks and
 * micro-batches; with --sum, and where no steps were recorded, the form that is published,
 * [layers][experts] over all steps. Memory: one step of counts. */
#include "traces/exporters/common.h"
#include "traces/exporters/table.h"

#include "common/base/arena.h"

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
    bool sum;           /* over all steps */
    mz_export_report *report;
} counts_export;

static void write_matrix(const counts_export *x, FILE *out) {
    const char *between = "";
    fputc('[', out);
    for (int32_t l = 0; l < x->facts->layers; l++) {
        fprintf(out, "%s[", between);
        for (int32_t e = 0; e < x->facts->experts; e++)
            fprintf(out, "%s%" PRId64, e ? "," : "", x->count[(int64_t)l * x->facts->experts + e]);
        fputc(']', out);
        between = ",\n";
    }
    fputc(']', out);
}

static mz_code write_counts(void *self, FILE *out, mz_err *err) {
    counts_export *x = self;
    bool sum = x->sum;
    size_t cells = (size_t)x->facts->layers * (size_t)x->facts->experts;
    mz_code code = MZ_OK;
    mz_progress progress = mz_progress_start(&x->app->log, "exporting", "calls", x->end - x->first);
    fputs(sum ? "{\"logical_count\":\n" : "{\"logical_count\": [\n", out);
    for (int64_t i = x->first; i < x->end && !code; i++) {
        const mz_trace_call *call = &x->call[i];
        code = mz_trace_add_counts(x->trace, i, x->count + (int64_t)call->layer * x->facts->experts,
                                   err);
        x->report->calls++;
        x->report->pairs += call->pairs;
        x->report->tokens += call->layer == 0 ? call->tokens : 0;
        bool last = i + 1 == x->end;
        if (last || (!sum && x->call[i + 1].step != call->step)) {
            write_matrix(x, out);
            fputs(last ? "" : ",\n", out);
            memset(x->count, 0, cells * sizeof *x->count);
            code = code ? code : mz_export_stopped(x->app, err);
        }
        mz_progress_update(&progress, i + 1 - x->first);
    }
    mz_progress_end(&progress);
    fputs(sum ? "}\n" : "]}\n", out);
    return code;
}

static mz_code export(mz_app *app, mz_trace *trace, const mz_export_options *options,
                      const char *output, mz_export_report *report, mz_err *err) {
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    counts_export x = {.app = app,
                       .trace = trace,
                       .facts = facts,
                       .sum = options->sum || facts->step_meaning == MZ_STEP_NONE,
                       .report = report};
    const mz_carries carries = {.steps = !x.sum};
    mz_trace_calls(trace, &x.call);
    mz_code code = mz_export_window(trace, options, &x.first, &x.end, err);
    if (code)
        return code;
    x.count = mz_calloc((size_t)x.facts->layers, (size_t)x.facts->experts * sizeof *x.count);
    code = x.count ? mz_export_file(output, write_counts, &x, err)
                   : mz_fail_nomem(err, "one step of counts");
    mz_export_lost(trace, &carries, report);
    if (x.facts->kind == MZ_TRACE_PAIRS)
        mz_remark(report->lost, sizeof report->lost, "experts of single tokens");
    if (!x.sum)
        mz_remark(report->note, sizeof report->note, "steps are numbered from 0");
    free(x.count);
    return code;
}

const mz_exporter mz_export_sglang_json = {
    .name = "sglang-json",
    .summary = "SGLang's logical_count, [steps][layers][experts] or with --sum [layers][experts]",
    .options = "first-step steps sum",
    .export = export,
};
