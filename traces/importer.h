/* The one importer interface. A format is one file in traces/importers/ and one line in the table.
 */
#ifndef MIZAN_TRACES_IMPORTER_H
#define MIZAN_TRACES_IMPORTER_H

#include "common/base/app.h"
#include "traces/trace.h"

/* Answers to what a format does not carry (traces-and-formats section 2 (a)-(k)); unset: -1 / NULL.
 * An importer that needs one it was not given fails with MZ_EINPUT naming the option and choices.
 */
typedef struct mz_import_options {
    int64_t experts, top_k, hidden, intermediate, step_stride;
    const char *name, *source, *licence;
    const char *weights;   /* companion file with gate weights */
    const char *sequences; /* companion CSV with sequence bounds */
    const char *phase, *step_meaning, *method, *model_name;
    bool phase_by_format;   /* `phase` is the importer's, not the user's */
    int weights_normalized; /* -1 unknown, 0, 1 */
    /* Unset: 0 or less, NULL, false. */
    int64_t native_k;  /* the model's own experts per token, where more were recorded */
    int64_t tokens;    /* of each call, where the file holds shares or counts after dropping */
    int64_t layers;    /* rows per token of a flat list of ids */
    int64_t ep_size;   /* ranks that hold all experts once, where they are numbered locally */
    int64_t id_bytes;  /* of one id of a flat list */
    int64_t skip_rows; /* rows at the start to leave out */
    const char *layer_offsets; /* "RANK:OFFSET,...": what to add to layer numbers from RANK on */
    const char *ep_ranks;      /* "RANK:EP_RANK,...": place of each rank in its expert group */
    const char *scores;        /* how logits become weights */
    const char *filler_last;   /* "yes", "no": the last row of a sequence is no token */
    int ranks_hold; /* files of several ranks count 1 the same tokens, 2 their own tokens, 3 their
                       own experts */
    int padding;    /* rows of zeros: 1 none, 2 before each sequence, 3 before and behind it */
    const char *dense_layers; /* "none" or "0,1,2": layers recorded as rows of zeros */
    bool dropped;             /* counts are those after dropping */
    bool force;
} mz_import_options;

typedef struct mz_import_report {
    int64_t calls, tokens, pairs, skipped; /* skipped: rows left out, explained in `note` */
    char note[256];
    char missing[64]; /* ranks that files are missing of, "2, 5-7" */
    /* Micro-batches in which a rank recorded nothing while others did, and the first of them. */
    int64_t absent, absent_step;
    int32_t absent_rank;
    /* Rows of gate weights (a token in a layer), and those that do not sum to 1. */
    int64_t weight_rows, weight_rows_off;
} mz_import_report;

typedef struct mz_importer {
    const char *name; /* --format NAME */
    const char *summary;
    /* The members of mz_import_options that it reads beyond those of every format (what a trace
     * says of itself), by the names of their options: "experts top-k". Others are refused. */
    const char *answers;
    const char
        *phase; /* of every such recording; NULL: files do not tell, and --phase is demanded */
    /* 0: not mine; 1-100: confidence, from the file name and its first bytes (decompressed). */
    int (*recognise)(const char *path, const unsigned char *head, size_t size);
    /* Reads all files (one per rank or one in all) and writes one trace. */
    mz_code (*import)(mz_app *app, char **files, int count, const mz_import_options *options,
                      const char *output, const mz_trace_write_options *write,
                      mz_import_report *report, mz_err *err);
} mz_importer;

extern const mz_importer *const mz_importers[]; /* NULL-terminated; traces/importers/table.c */

#endif
