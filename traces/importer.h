/* The one importer interface. A format is one file in traces/importers/ and one line in the table. */
#ifndef MIZAN_TRACES_IMPORTER_H
#define MIZAN_TRACES_IMPORTER_H

#include "common/base/app.h"
#include "traces/trace.h"

/* Answers to what a format does not carry (traces-and-formats section 2 (a)-(k)); unset: -1 / NULL.
 * An importer that needs one it was not given fails with MZ_EINPUT naming the option and choices. */
typedef struct mz_import_options {
    int64_t experts, top_k, hidden, intermediate, step_stride;
    const char *name, *source, *licence;
    const char *weights;   /* companion file with gate weights */
    const char *sequences; /* companion CSV with sequence bounds */
    const char *phase, *step_meaning, *method, *model_name;
    int weights_normalized; /* -1 unknown, 0, 1 */
    bool force;
} mz_import_options;

typedef struct mz_import_report {
    int64_t calls, tokens, pairs, skipped; /* skipped: rows left out, explained in `note` */
    char note[256];
} mz_import_report;

typedef struct mz_importer {
    const char *name;    /* --format NAME */
    const char *summary;
    /* 0: not mine; 1-100: confidence, from the file name and its first bytes (decompressed). */
    int (*recognise)(const char *path, const unsigned char *head, size_t size);
    /* Reads all files (one per rank or one in all) and writes one trace. */
    mz_code (*import)(mz_app *app, char **files, int count, const mz_import_options *options,
                      const char *output, const mz_trace_write_options *write,
                      mz_import_report *report, mz_err *err);
} mz_importer;

extern const mz_importer *const mz_importers[]; /* NULL-terminated; traces/importers/table.c */

#endif
