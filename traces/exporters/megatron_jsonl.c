/* Megatron-LM's router trace in a folder: router_trace_rank{R}.jsonl, one line per (step,
 * micro-batch, layer) with the chosen experts of every token. Micro-batches are told apart by their
 * order alone, so a rank that is absent from one, but not from a later one of the step, gets lines
 * without tokens, as does one that is absent from the first of all. Layers count the MoE
 * layers from 0. Several files are written at once, at most FILES_AT_ONCE: more ranks take more
 * passes over the trace. */
#include "traces/exporters/common.h"
#include "traces/exporters/table.h"

#include "common/base/arena.h"

#include <inttypes.h>
#include <stdlib.h>

enum { FILES_AT_ONCE = 256, SLICE_PAIRS = 1 << 20, DIGITS = 8 };

typedef struct megatron_export {
    mz_app *app;
    mz_trace *trace;
    const mz_trace_facts *facts;
    mz_folder folder;
    mz_batch *batch;
    int64_t batches, slice; /* slice: tokens handled at once */
    uint16_t *expert;
    char *text; /* of one token */
    FILE *file[FILES_AT_ONCE];
    int64_t last[FILES_AT_ONCE]; /* the last batch of the step at hand that has lines of the rank */
    int32_t first_rank, ranks;   /* of this pass */
    mz_export_report *report;
} megatron_export;

/* "[3,7]" of one token; returns its length. */
static size_t token_text(const uint16_t *expert, int32_t k, char *text) {
    size_t n = 0;
    for (int32_t i = 0; i < k; i++) {
        char digit[DIGITS];
        int d = 0;
        unsigned v = expert[i];
        text[n++] = i == 0 ? '[' : ',';
        do
            digit[d++] = (char)('0' + v % 10);
        while (v /= 10);
        while (d > 0)
            text[n++] = digit[--d];
    }
    text[n++] = ']';
    return n;
}

/* One line; call < 0: the rank is absent from this micro-batch. */
static mz_code write_line(megatron_export *x, FILE *file, const mz_batch *batch, int32_t layer,
                          int32_t rank, int64_t call, int64_t tokens, mz_err *err) {
    const mz_trace_pairs_out out = {.expert = x->expert};
    int32_t k = x->facts->top_k;
    fprintf(file,
            "{\"step\":%" PRId64 ",\"stage\":\"pre_dispatch\",\"block\":\"decoder\",\"layer\":%d,"
            "\"rank\":%d,\"num_tokens\":%" PRId64 ",\"topk\":%d,\"top_indices\":[",
            batch->step, layer, rank, tokens, k);
    for (int64_t t = 0, n; t < tokens && call >= 0; t += n) {
        n = tokens - t < x->slice ? tokens - t : x->slice;
        mz_code code = mz_trace_read_pairs(x->trace, call, t, n, &out, err);
        if (code)
            return code;
        for (int64_t i = 0; i < n; i++) {
            if (t + i > 0)
                fputc(',', file);
            fwrite(x->text, 1, token_text(x->expert + i * k, k, x->text), file);
        }
    }
    fputs("]}\n", file);
    if (ferror(file))
        return mz_fail(err, MZ_EINTERNAL, "%s: cannot write (disk full?)", x->folder.path);
    x->report->calls += call >= 0;
    x->report->pairs += tokens * k;
    return MZ_OK;
}

/* Where the ranks of this pass are seen last in the step that begins with batch `first`. The first
 * batch of all has lines of every rank, so that no file lacks the layers of the others. */
static void look_ahead(megatron_export *x, int64_t first) {
    const mz_trace_call *call;
    int64_t step = x->batch[first].step;
    mz_trace_calls(x->trace, &call);
    for (int32_t r = 0; r < x->ranks; r++)
        x->last[r] = first == 0 ? 0 : -1;
    for (int64_t b = first; b < x->batches && x->batch[b].step == step; b++)
        for (int32_t i = 0; i < x->batch[b].ranks; i++) {
            int32_t r = call[x->batch[b].first + i].rank - x->first_rank;
            if (r >= 0 && r < x->ranks)
                x->last[r] = b;
        }
}

/* The lines of one micro-batch of the ranks of this pass. */
static mz_code write_batch(megatron_export *x, int64_t b, mz_err *err) {
    const mz_batch *batch = &x->batch[b];
    const mz_trace_call *call;
    mz_trace_calls(x->trace, &call);
    for (int32_t l = 0; l < x->facts->layers; l++) {
        int64_t at = batch->first + (int64_t)l * batch->ranks, end = at + batch->ranks;
        for (int32_t r = x->first_rank; r < x->first_rank + x->ranks; r++) {
            while (at < end && call[at].rank < r)
                at++;
            bool there = at < end && call[at].rank == r;
            if (x->last[r - x->first_rank] < b)
                continue;
            mz_code code = write_line(x, x->file[r - x->first_rank], batch, l, r, there ? at : -1,
                                      there ? call[at].tokens : 0, err);
            if (code)
                return code;
            if (there && l == 0)
                x->report->tokens += call[at].tokens;
        }
    }
    return mz_export_stopped(x->app, err);
}

static mz_code write_pass(megatron_export *x, mz_progress *progress, int64_t *done, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t r = 0; r < x->ranks && !code; r++) {
        char name[64];
        snprintf(name, sizeof name, "router_trace_rank%d.jsonl", x->first_rank + r);
        code = mz_folder_open(&x->folder, name, &x->file[r], err);
    }
    for (int64_t b = 0; b < x->batches && !code; b++) {
        if (b == 0 || x->batch[b].step != x->batch[b - 1].step)
            look_ahead(x, b);
        code = write_batch(x, b, err);
        mz_progress_update(progress, ++*done);
    }
    for (int32_t r = 0; r < x->ranks && !code; r++)
        code = mz_folder_close(&x->folder, &x->file[r], err);
    return code;
}

static mz_code write_folder(megatron_export *x, const char *output, mz_err *err) {
    int32_t k = x->facts->top_k;
    x->slice = SLICE_PAIRS / k < 1 ? 1 : SLICE_PAIRS / k;
    x->expert = mz_calloc((size_t)x->slice * (size_t)k, sizeof *x->expert);
    x->text = mz_calloc((size_t)k + 1, DIGITS);
    if (!x->expert || !x->text)
        return mz_fail_nomem(err, "the tokens of a call");
    mz_code code = mz_folder_begin(&x->folder, output, err);
    int32_t all = x->facts->ranks;
    int64_t passes = (all + FILES_AT_ONCE - 1) / FILES_AT_ONCE, done = 0;
    mz_progress progress =
        mz_progress_start(&x->app->log, "exporting", "micro-batches", x->batches * passes);
    for (int32_t r = 0; r < all && !code; r += FILES_AT_ONCE) {
        x->first_rank = r;
        x->ranks = all - r < FILES_AT_ONCE ? all - r : FILES_AT_ONCE;
        code = write_pass(x, &progress, &done, err);
    }
    mz_progress_end(&progress);
    return code ? code : mz_folder_commit(&x->folder, err);
}

static mz_code export(mz_app *app, mz_trace *trace, const mz_export_options *options,
                      const char *output, mz_export_report *report, mz_err *err) {
    const mz_carries carries = {.steps = true, .micro_batches = true, .ranks = true};
    megatron_export *x = mz_calloc(1, sizeof *x);
    if (!x)
        return mz_fail_nomem(err, "the exporter");
    x->app = app;
    x->trace = trace;
    x->facts = mz_trace_facts_of(trace);
    x->report = report;
    mz_code code = mz_export_need_top_k(trace, "megatron-jsonl", err);
    if (!code)
        code = mz_export_batches(trace, options, &x->batch, &x->batches, err);
    if (!code)
        code = write_folder(x, output, err);
    mz_export_lost(trace, &carries, report);
    mz_remark(report->note, sizeof report->note, "layers count the MoE layers from 0");
    for (int i = 0; i < FILES_AT_ONCE; i++)
        if (x->file[i])
            fclose(x->file[i]);
    mz_folder_abandon(&x->folder);
    free(x->batch);
    free(x->expert);
    free(x->text);
    free(x);
    return code;
}

const mz_exporter mz_export_megatron_jsonl = {
    .name = "megatron-jsonl",
    .summary = "a folder with Megatron-LM's router trace, router_trace_rank{R}.jsonl",
    .options = "first-step steps",
    .export = export,
};
