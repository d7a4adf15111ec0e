/* The one exporter interface. A format is one file in traces/exporters/ and one line in the table.
 */
#ifndef MIZAN_TRACES_EXPORTER_H
#define MIZAN_TRACES_EXPORTER_H

#include "common/base/app.h"
#include "traces/trace.h"

/* What a format needs beyond the trace; 0: not said. */
typedef struct mz_export_options {
    int64_t first_step, steps;  /* recorded steps to skip, and to take (0: to the end) */
    int64_t micro_batch, layer; /* of the one call (nccl-alltoallv) */
    int64_t ranks;              /* R of the static placement; 0: as recorded */
    int64_t step_tokens;        /* tokens per step of a trace that has no steps */
    int64_t hidden;             /* elements of a row that is sent; 0: as the trace says */
    int64_t element_bytes;      /* bytes of one element */
    uint64_t seed;              /* of a re-shaping to R ranks that has to draw */
    bool sum;                   /* one matrix over all steps (sglang-json) */
} mz_export_options;

typedef struct mz_export_report {
    int64_t calls, tokens, pairs; /* what went out */
    char lost[512];               /* what the format cannot carry and this trace holds */
    char note[512];               /* what the reader of the files must know */
} mz_export_report;

typedef struct mz_exporter {
    const char *name; /* --format NAME */
    const char *summary;
    /* Those of mz_export_options that it reads, by the names of their options: "first-step steps".
     * Others are refused. */
    const char *options;
    /* Writes `output`, a file or a folder, whole or not at all. MZ_EINPUT: the format cannot hold
     * this trace; the message says why and what to do. */
    mz_code (*export)(mz_app *app, mz_trace *trace, const mz_export_options *options,
                      const char *output, mz_export_report *report, mz_err *err);
} mz_exporter;

extern const mz_exporter *const mz_exporters[]; /* NULL-terminated; traces/exporters/table.c */

/* mizan trace export. */
mz_code mz_cmd_trace_export(mz_app *app, int argc, char **argv, mz_err *err);

#endif
