/* NumPy arrays in a folder: ids.npy [tokens, layers, top_k] (u1, or u2 from 257 experts on),
 * weights.npy of the same shape (f4) where recorded, and sequences.csv (first_row, num_tokens and,
 * where known, domain). Rows are the tokens of (step, micro-batch, rank) after (step, micro-batch,
 * rank). Memory: 32 MiB, whatever the trace. Format: numpy.lib.format of the NumPy manual. */
#include "traces/exporters/common.h"
#include "traces/exporters/table.h"

#include "common/base/arena.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { SLICE_BYTES = 32 << 20, NPY_ALIGN = 64 };

/* The rows of one (step, micro-batch, rank). */
typedef struct block {
    int64_t token_begin, tokens, row;
} block;

typedef struct npy_export {
    mz_app *app;
    mz_trace *trace;
    const mz_trace_facts *facts;
    mz_folder folder;
    FILE *ids, *weights;
    mz_batch *batch;
    int64_t batches, rows, done;
    int64_t slice; /* tokens handled at once */
    uint16_t *expert;
    float *weight, *out_weight; /* one layer's slice; token-major */
    unsigned char *out_id;
    mz_export_report *report;
} npy_export;

/* Version 1.0: magic, version, length, then the description padded with blanks to 64 bytes. */
static void write_header(FILE *file, const char *type, const npy_export *x) {
    char text[256];
    int n = snprintf(text, sizeof text,
                     "{'descr': '%s', 'fortran_order': False, 'shape': (%" PRId64 ", %d, %d), }",
                     type, x->rows, x->facts->layers, x->facts->top_k);
    int size = n + 1 + (NPY_ALIGN - (10 + n + 1) % NPY_ALIGN) % NPY_ALIGN;
    fwrite("\x93NUMPY\x01\x00", 1, 8, file);
    fputc(size & 255, file);
    fputc(size >> 8, file);
    fprintf(file, "%-*s\n", size - 1, text);
}

static mz_code make_buffers(npy_export *x, mz_err *err) {
    int64_t row = (int64_t)x->facts->layers * x->facts->top_k;
    x->slice = SLICE_BYTES / (row * 12);
    x->slice = x->slice < 1 ? 1 : x->slice;
    size_t n = (size_t)x->slice, k = (size_t)x->facts->top_k;
    x->expert = mz_calloc(n * k, sizeof *x->expert);
    x->weight = mz_calloc(n * k, sizeof *x->weight);
    x->out_id = mz_calloc(n * (size_t)row, 2);
    x->out_weight = mz_calloc(n * (size_t)row, sizeof *x->out_weight);
    return x->expert && x->weight && x->out_id && x->out_weight
               ? MZ_OK
               : mz_fail_nomem(err, "rows of the arrays");
}

/* Layer `l` of a slice of `n` tokens into its place among the token-major rows. */
static void interleave(npy_export *x, int32_t l, int64_t n) {
    int64_t k = x->facts->top_k, row = (int64_t)x->facts->layers * k;
    for (int64_t t = 0; t < n; t++) {
        for (int64_t i = 0; i < k; i++) {
            uint16_t id = x->expert[t * k + i];
            int64_t at = t * row + l * k + i;
            if (x->facts->experts <= 256) {
                x->out_id[at] = (unsigned char)id;
            } else {
                x->out_id[2 * at] = id & 255;
                x->out_id[2 * at + 1] = (unsigned char)(id >> 8);
            }
        }
        if (x->weights)
            memcpy(x->out_weight + t * row + l * k, x->weight + t * k,
                   (size_t)k * sizeof *x->weight);
    }
}

/* Tokens [first, first + n) of the `r`-th rank of a batch. */
static mz_code write_slice(npy_export *x, const mz_batch *batch, int32_t r, int64_t first,
                           int64_t n, mz_err *err) {
    const mz_trace_pairs_out out = {.expert = x->expert, .weight = x->weights ? x->weight : NULL};
    size_t row = (size_t)x->facts->layers * (size_t)x->facts->top_k;
    for (int32_t l = 0; l < x->facts->layers; l++) {
        mz_code code = mz_trace_read_pairs(x->trace, batch->first + (int64_t)l * batch->ranks + r,
                                           first, n, &out, err);
        if (code)
            return code;
        interleave(x, l, n);
    }
    fwrite(x->out_id, x->facts->experts <= 256 ? 1 : 2, (size_t)n * row, x->ids);
    if (x->weights)
        fwrite(x->out_weight, sizeof *x->out_weight, (size_t)n * row, x->weights);
    x->done += n;
    if (ferror(x->ids) || (x->weights && ferror(x->weights)))
        return mz_fail(err, MZ_EINTERNAL, "%s: cannot write (disk full?)", x->folder.path);
    return mz_export_stopped(x->app, err);
}

static mz_code write_arrays(npy_export *x, mz_err *err) {
    const mz_trace_call *call;
    mz_trace_calls(x->trace, &call);
    mz_code code = make_buffers(x, err);
    if (!code)
        code = mz_folder_open(&x->folder, "ids.npy", &x->ids, err);
    if (!code && x->facts->has_weight)
        code = mz_folder_open(&x->folder, "weights.npy", &x->weights, err);
    if (code)
        return code;
    write_header(x->ids, x->facts->experts <= 256 ? "|u1" : "<u2", x);
    if (x->weights)
        write_header(x->weights, "<f4", x);
    mz_progress progress = mz_progress_start(&x->app->log, "exporting", "tokens", x->rows);
    for (int64_t b = 0; b < x->batches && !code; b++)
        for (int32_t r = 0; r < x->batch[b].ranks && !code; r++) {
            int64_t tokens = call[x->batch[b].first + r].tokens, n;
            for (int64_t t = 0; t < tokens && !code; t += n) {
                n = tokens - t < x->slice ? tokens - t : x->slice;
                code = write_slice(x, &x->batch[b], r, t, n, err);
                mz_progress_update(&progress, x->done);
            }
        }
    mz_progress_end(&progress);
    if (!code)
        code = mz_folder_close(&x->folder, &x->ids, err);
    return code ? code : mz_folder_close(&x->folder, &x->weights, err);
}

/* ---- sequences ------------------------------------------------------------------------------- */

static int by_token(const void *a, const void *b) {
    const block *x = a, *y = b;
    return (x->token_begin > y->token_begin) - (x->token_begin < y->token_begin);
}

static int by_row(const void *a, const void *b) {
    const mz_trace_sequence *x = a, *y = b;
    return (x->token_begin > y->token_begin) - (x->token_begin < y->token_begin);
}

/* The blocks of rows in the order of the token axis. */
static mz_code list_blocks(npy_export *x, block **out, int64_t *count, mz_err *err) {
    const mz_trace_call *call;
    block *blocks = NULL;
    size_t room = 0;
    mz_trace_calls(x->trace, &call);
    x->rows = *count = 0;
    for (int64_t b = 0; b < x->batches; b++)
        for (int32_t r = 0; r < x->batch[b].ranks; r++) {
            const mz_trace_call *c = &call[x->batch[b].first + r];
            if (!mz_grow((void **)&blocks, &room, (size_t)*count + 1, sizeof *blocks)) {
                free(blocks);
                return mz_fail_nomem(err, "the blocks of rows");
            }
            if (c->tokens > 0)
                blocks[(*count)++] = (block){c->token_begin, c->tokens, x->rows};
            x->rows += c->tokens;
        }
    qsort(blocks, (size_t)*count, sizeof *blocks, by_token);
    *out = blocks;
    return MZ_OK;
}

/* Sequences with rows instead of tokens, in the order of rows; those outside are left out. */
static int64_t place_sequences(const npy_export *x, const block *blocks, int64_t count,
                               mz_trace_sequence *placed) {
    const mz_trace_sequence *sequence;
    int64_t sequences = mz_trace_sequences(x->trace, &sequence), n = 0, b = 0;
    for (int64_t i = 0; i < sequences; i++) {
        while (b + 1 < count && blocks[b + 1].token_begin <= sequence[i].token_begin)
            b++;
        if (b == count || sequence[i].token_begin < blocks[b].token_begin ||
            sequence[i].token_begin >= blocks[b].token_begin + blocks[b].tokens)
            continue;
        placed[n] = sequence[i];
        placed[n++].token_begin += blocks[b].row - blocks[b].token_begin;
    }
    qsort(placed, (size_t)n, sizeof *placed, by_row);
    return n;
}

static mz_code write_sequences(npy_export *x, const block *blocks, int64_t count, mz_err *err) {
    const mz_trace_sequence *sequence;
    int64_t sequences = mz_trace_sequences(x->trace, &sequence), covered = 0;
    mz_trace_sequence *placed = mz_calloc((size_t)sequences + 1, sizeof *placed);
    FILE *csv = NULL;
    bool domains = false;
    if (!placed)
        return mz_fail_nomem(err, "the sequences");
    sequences = place_sequences(x, blocks, count, placed);
    for (int64_t i = 0; i < sequences; i++) {
        covered += placed[i].tokens;
        domains = domains || placed[i].domain >= 0;
    }
    mz_code code = mz_folder_open(&x->folder, "sequences.csv", &csv, err);
    if (csv) {
        fprintf(csv, "first_row,num_tokens%s\n", domains ? ",domain" : "");
        for (int64_t i = 0; i < sequences; i++) {
            fprintf(csv, "%" PRId64 ",%" PRId64, placed[i].token_begin, placed[i].tokens);
            if (domains)
                fprintf(csv, ",%d", placed[i].domain);
            fputc('\n', csv);
        }
        code = mz_folder_close(&x->folder, &csv, err);
    }
    if (covered < x->rows)
        mz_remark(x->report->note, sizeof x->report->note, "%" PRId64 " rows belong to no sequence",
                  x->rows - covered);
    free(placed);
    return code;
}

static mz_code write_folder(npy_export *x, const char *output, mz_err *err) {
    block *blocks = NULL;
    int64_t count;
    mz_code code = list_blocks(x, &blocks, &count, err);
    if (!code && x->rows == 0)
        code = mz_fail(err, MZ_EINPUT, "these steps hold no token");
    if (!code)
        code = mz_folder_begin(&x->folder, output, err);
    if (!code)
        code = write_arrays(x, err);
    if (!code && x->facts->has_sequences)
        code = write_sequences(x, blocks, count, err);
    if (!code)
        code = mz_folder_commit(&x->folder, err);
    free(blocks);
    return code;
}

static mz_code export(mz_app *app, mz_trace *trace, const mz_export_options *options,
                      const char *output, mz_export_report *report, mz_err *err) {
    const mz_carries carries = {.weights = true, .sequences = true};
    npy_export *x = mz_calloc(1, sizeof *x);
    if (!x)
        return mz_fail_nomem(err, "the exporter");
    x->app = app;
    x->trace = trace;
    x->facts = mz_trace_facts_of(trace);
    x->report = report;
    mz_code code = mz_export_need_top_k(trace, "npy", err);
    if (!code)
        code = mz_export_batches(trace, options, &x->batch, &x->batches, err);
    if (!code)
        code = write_folder(x, output, err);
    for (int64_t b = 0; b < x->batches && !code; b++)
        report->calls += (int64_t)x->batch[b].ranks * x->facts->layers;
    report->tokens = x->rows;
    report->pairs = x->rows * x->facts->layers * x->facts->top_k;
    mz_export_lost(trace, &carries, report);
    if (x->ids)
        fclose(x->ids);
    if (x->weights)
        fclose(x->weights);
    mz_folder_abandon(&x->folder);
    void *all[] = {x->batch, x->expert, x->weight, x->out_id, x->out_weight, x};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    return code;
}

const mz_exporter mz_export_npy = {
    .name = "npy",
    .summary = "a folder with ids.npy [tokens, layers, top_k], weights.npy, sequences.csv",
    .options = "first-step steps",
    .export = export,
};
