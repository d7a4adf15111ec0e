/* Megatron-LM's router trace: router_trace_rank{R}.jsonl, one line per (step, block, layer) with
 * the chosen ids of every token, optionally logits_rank{R}.bin (bfloat16 [tokens][E]) beside it.
 * One file per rank; the lines of one (step, layer) in a file are its micro-batches, in order.
 * Rows without an id in any layer are padding and left out; rows with fewer than k are what
 * dropping left, and --dropped takes them as they are (a trace of variable k). Blocks of the
 * multi-token prediction are left out and counted. Under pipeline parallelism layer numbers are
 * local to the stage: --layer-offsets. Ranks of a stage, in order, are the trace's source ranks.
 * Steps of all files are read side by side: memory is one step of all ranks. */
#include "traces/importers/gather.h"
#include "traces/importers/logits.h"
#include "traces/importers/ranks.h"
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/jsonl.h"

#include <stdlib.h>
#include <string.h>

typedef struct layer_seen {
    int64_t layer;
    int32_t lines; /* of the current step */
} layer_seen;

typedef struct router_file {
    mz_jsonl lines;
    FILE *logits;
    int64_t logits_size, step; /* step of the current line */
    layer_seen *seen;          /* layers of this file in the current step */
    size_t layers, room;
} router_file;

typedef struct router_import {
    mz_app *app;
    const mz_import_options *options;
    router_file *file;
    mz_rank_file *rank;
    int files;
    mz_trace_facts facts;
    mz_gather gather;
    mz_scores scores;
    int32_t top_k;         /* of the router, before any dropping */
    int64_t mtp;           /* lines of multi-token prediction */
    const char **path;     /* a file of each source rank */
    bool ascending;        /* ids of every token so far */
    unsigned char *stored; /* one token's logits as stored, and converted */
    float *logit;
    mz_trace_writer *writer;
    mz_import_report *report;
} router_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    if (mz_head_first(head, size) != '{' || !mz_head_has(head, size, "\"top_indices\""))
        return 0;
    return mz_head_has(head, size, "\"pre_dispatch\"") ? 95 : 70;
}

static mz_code next_line(router_import *in, router_file *file, mz_err *err) {
    int64_t before = file->step;
    const char *stage = "pre_dispatch";
    mz_code code = mz_megatron_next(&file->lines, "step", &file->step, &in->mtp, err);
    if (!code && file->lines.object && json_object_get(file->lines.object, "stage"))
        code = mz_jsonl_text(&file->lines, "stage", &stage, err);
    if (!code && strcmp(stage, "pre_dispatch") != 0)
        code = mz_jsonl_fail(&file->lines, err, "stage \"%.40s\" is not pre_dispatch", stage);
    for (size_t i = 0; i < file->layers && file->step != before; i++)
        file->seen[i].lines = 0;
    return code;
}

/* Which micro-batch this line of `layer` is. */
static mz_code micro_batch(router_file *file, int64_t layer, int32_t *batch, mz_err *err) {
    size_t i = 0;
    while (i < file->layers && file->seen[i].layer != layer)
        i++;
    if (i == file->layers) {
        if (i == MZ_LAYERS_MAX ||
            !mz_grow((void **)&file->seen, &file->room, i + 1, sizeof *file->seen))
            return mz_fail_nomem(err, "layers");
        file->seen[file->layers++] = (layer_seen){.layer = layer};
    }
    *batch = file->seen[i].lines++;
    return MZ_OK;
}

static mz_code open_logits(router_file *file, const char *path, int64_t rank, mz_err *err) {
    const char *base = mz_base_name(path);
    char name[4096];
    snprintf(name, sizeof name, "%.*slogits_rank%lld.bin", (int)(base - path), path,
             (long long)rank);
    file->logits = fopen(name, "rb");
    if (!file->logits)
        return mz_jsonl_fail(&file->lines, err,
                             "logits are said to lie in %s, which cannot be read; --scores none "
                             "goes without",
                             name);
    if (fseek(file->logits, 0, SEEK_END) != 0 || (file->logits_size = ftell(file->logits)) < 0)
        return mz_fail(err, MZ_EINPUT, "%s: not a file of logits", name);
    return MZ_OK;
}

/* The line's weights, from its logits beside the file. */
static mz_code read_weights(router_import *in, router_file *file, int64_t tokens,
                            const uint16_t *chosen, const uint16_t *expert, float *weight,
                            mz_err *err) {
    int64_t offset, bytes, experts = in->facts.experts, row = 2 * experts;
    json_t *shape;
    mz_code code = mz_jsonl_int(&file->lines, "logit_offset", 0, INT64_MAX / 2, &offset, err);
    if (!code)
        code = mz_jsonl_int(&file->lines, "logit_bytes", 0, INT64_MAX / 2, &bytes, err);
    if (!code)
        code = mz_jsonl_array(&file->lines, "logit_shape", &shape, err);
    if (code)
        return code;
    if (json_array_size(shape) != 2 || json_integer_value(json_array_get(shape, 0)) != tokens ||
        json_integer_value(json_array_get(shape, 1)) != experts || bytes != tokens * row)
        return mz_jsonl_fail(&file->lines, err,
                             "logit_shape and logit_bytes are not those of [%lld, %lld] bfloat16",
                             (long long)tokens, (long long)experts);
    if (offset > file->logits_size - bytes || fseek(file->logits, (long)offset, SEEK_SET) != 0)
        return mz_jsonl_fail(&file->lines, err,
                             "logits end at byte %lld of a file of %lld: it is truncated",
                             (long long)(offset + bytes), (long long)file->logits_size);
    for (int64_t t = 0; t < tokens && !code; t++) {
        if (fread(in->stored, 1, (size_t)row, file->logits) != (size_t)row)
            return mz_jsonl_fail(&file->lines, err, "logits of token %lld cannot be read",
                                 (long long)t);
        for (int64_t e = 0; e < experts; e++) {
            uint32_t bits = (uint32_t)in->stored[2 * e] << 16 | (uint32_t)in->stored[2 * e + 1]
                                                                    << 24;
            memcpy(&in->logit[e], &bits, sizeof bits);
        }
        if (chosen[t] == 0) /* padding, whose logits may be anything */
            continue;
        code = mz_scores_weights(in->scores, in->logit, (int32_t)experts, expert, chosen[t], weight,
                                 err);
        if (code)
            return mz_err_prefix(err, "%s: line %lld: token %lld", mz_input_path(file->lines.input),
                                 (long long)mz_input_line_number(file->lines.input), (long long)t);
        expert += chosen[t];
        weight += chosen[t];
    }
    return code;
}

/* Ids of all tokens; chosen[t] is how many token t has. */
static mz_code read_tokens(router_import *in, router_file *file, const json_t *rows,
                           uint16_t *chosen, uint16_t *expert, mz_err *err) {
    for (size_t t = 0; t < json_array_size(rows); t++) {
        char what[48];
        const json_t *row = json_array_get(rows, t);
        size_t n = json_array_size(row);
        snprintf(what, sizeof what, "top_indices[%zu]", t);
        if (n > 0 && n < (size_t)in->top_k && !in->options->dropped)
            return mz_jsonl_fail(
                &file->lines, err,
                "%s lists %zu expert ids, not %d: the choice after dropping, not the router's: "
                "record without a capacity, or pass --dropped for a trace of what was computed",
                what, n, in->top_k);
        int32_t k = n < (size_t)in->top_k ? (int32_t)n : in->top_k;
        mz_code code = mz_jsonl_ids(&file->lines, what, row, k, in->facts.experts, expert, err);
        if (code)
            return code;
        for (int32_t i = 1; i < k; i++)
            in->ascending = in->ascending && expert[i] > expert[i - 1];
        chosen[t] = (uint16_t)k;
        expert += k;
    }
    return MZ_OK;
}

/* Ids of all rows, no more than k of each. */
static int64_t count_ids(const json_t *rows, int32_t top_k) {
    int64_t pairs = 0;
    for (size_t t = 0; t < json_array_size(rows); t++) {
        size_t n = json_array_size(json_array_get(rows, t));
        pairs += n < (size_t)top_k ? (int64_t)n : top_k;
    }
    return pairs;
}

/* Takes the current line of a file as one call. */
static mz_code take_line(router_import *in, int index, mz_err *err) {
    router_file *file = &in->file[index];
    const mz_rank_file *rank = &in->rank[index];
    int64_t layer, number, tokens, top_k;
    json_t *rows;
    uint16_t *chosen, *expert;
    float *weight;
    mz_gather_key key = {.step = file->step, .rank = rank->source};
    mz_code code = mz_jsonl_int(&file->lines, "layer", 0, MZ_LAYERS_MAX, &layer, err);
    if (!code)
        code = mz_jsonl_int(&file->lines, "rank", 0, MZ_RANKS_MAX, &number, err);
    if (!code)
        code = mz_jsonl_int(&file->lines, "num_tokens", 0, INT32_MAX, &tokens, err);
    if (!code)
        code = mz_jsonl_int(&file->lines, "topk", 1, MZ_MAX_TOP_K, &top_k, err);
    if (!code)
        code = mz_jsonl_array(&file->lines, "top_indices", &rows, err);
    if (code)
        return code;
    if (number != rank->rank)
        return mz_jsonl_fail(&file->lines, err, "rank %lld in the file of rank %lld",
                             (long long)number, (long long)rank->rank);
    if (top_k != in->top_k || json_array_size(rows) != (size_t)tokens)
        return mz_jsonl_fail(&file->lines, err, "%zu rows of top-%lld, not %lld rows of top-%d",
                             json_array_size(rows), (long long)top_k, (long long)tokens, in->top_k);
    key.layer = layer + rank->offset;
    code = micro_batch(file, layer, &key.micro_batch, err);
    if (!code)
        code = mz_gather_rows(&in->gather, &key, tokens, count_ids(rows, in->top_k), &chosen,
                              &expert, &weight, err);
    if (!code)
        code = read_tokens(in, file, rows, chosen, expert, err);
    if (!code && in->facts.has_weight)
        code = read_weights(in, file, tokens, chosen, expert, weight, err);
    return code;
}

/* Everything of one step, from all files. */
static mz_code take_step(router_import *in, int64_t step, mz_err *err) {
    for (int i = 0; i < in->files; i++) {
        router_file *file = &in->file[i];
        while (file->lines.object && file->step == step) {
            mz_code code = take_line(in, i, err);
            if (!code)
                code = next_line(in, file, err);
            if (code)
                return code;
        }
    }
    return MZ_OK;
}

/* The files of one stage must record the same layers; if they do not, stages number from 0. Files
 * that have no line of the first step say nothing. */
static mz_code layers_agree(const router_import *in, char **files, mz_err *err) {
    int first = 0;
    while (first < in->files && in->file[first].layers == 0)
        first++;
    for (int i = first + 1; i < in->files && !in->options->layer_offsets; i++) {
        const router_file *a = &in->file[first], *b = &in->file[i];
        size_t same = 0;
        for (size_t x = 0; x < a->layers; x++)
            for (size_t y = 0; y < b->layers; y++)
                same += a->seen[x].layer == b->seen[y].layer;
        if (b->layers > 0 && (same != a->layers || same != b->layers))
            return mz_fail(
                err, MZ_EINPUT,
                "%s and %s record different layers: with pipeline parallelism every "
                "stage numbers its layers from 0: pass --layer-offsets RANK:N,... (add N "
                "to the layers of ranks from RANK on; 0:0 if the numbers are right)",
                files[first], files[i]);
    }
    return MZ_OK;
}

/* Opens all files at their first line; top-k, experts and ranks of the trace. */
static mz_code open_files(router_import *in, char **files, mz_err *err) {
    mz_code code = MZ_OK;
    int64_t top_k, experts = in->options->experts;
    for (int i = 0; i < in->files && !code; i++) {
        in->rank[i].path = files[i];
        code = mz_jsonl_open(files[i], &in->file[i].lines, err);
        if (!code)
            code = next_line(in, &in->file[i], err);
        if (!code && !in->file[i].lines.object)
            code = mz_fail(err, MZ_EINPUT, "%s: no line of the decoder", files[i]);
        if (!code)
            code =
                mz_jsonl_int(&in->file[i].lines, "rank", 0, MZ_RANKS_MAX, &in->rank[i].rank, err);
    }
    if (!code)
        code =
            mz_rank_stages(in->rank, in->files, in->options->layer_offsets, &in->facts.ranks, err);
    if (!code)
        code = mz_jsonl_int(&in->file[0].lines, "topk", 1, MZ_MAX_TOP_K, &top_k, err);
    if (code)
        return code;
    const json_t *shape = json_object_get(in->file[0].lines.object, "logit_shape");
    if (shape) {
        code = mz_scores_parse(files[0], in->options->scores, &in->scores, err);
        if (code)
            return code;
        if (experts <= 0)
            experts = json_integer_value(json_array_get(shape, 1));
    }
    if (experts <= 0 || experts > MZ_EXPERTS_MAX)
        return mz_import_ask(err, files[0], "the number of experts is", "experts");
    if (in->options->top_k > 0 && in->options->top_k != top_k)
        return mz_fail(err, MZ_EINPUT, "%s: top-%lld in the file, but --top-k %lld", files[0],
                       (long long)top_k, (long long)in->options->top_k);
    in->top_k = (int32_t)top_k;
    in->facts.top_k = in->options->dropped ? 0 : in->top_k;
    in->facts.experts = (int32_t)experts;
    if (in->scores == MZ_SCORES_NONE)
        return MZ_OK;
    if (in->options->dropped && mz_scores_normalized(in->scores))
        return mz_fail(err, MZ_EINPUT,
                       "%s: --scores %s divides by the sum over all chosen experts, and dropped "
                       "ones are not known: pass --scores softmax-all or none with --dropped",
                       files[0], in->options->scores);
    in->facts.has_weight = true;
    in->facts.weights_normalized = mz_scores_normalized(in->scores);
    strcpy(in->facts.router, mz_scores_router(in->scores));
    in->stored = mz_calloc((size_t)experts, 2);
    in->logit = mz_calloc((size_t)experts, sizeof *in->logit);
    if (!in->stored || !in->logit)
        return mz_fail_nomem(err, "logits");
    for (int i = 0; i < in->files && !code; i++)
        code = open_logits(&in->file[i], files[i], in->rank[i].rank, err);
    return code;
}

/* After the first step: what is known now becomes the trace's facts. */
static mz_code create(router_import *in, char **files, const char *output,
                      const mz_trace_write_options *write, mz_err *err) {
    mz_code code = layers_agree(in, files, err);
    if (!code)
        code = mz_gather_settle(&in->gather, err);
    in->path = mz_calloc((size_t)in->facts.ranks, sizeof *in->path);
    if (!code && !in->path)
        code = mz_fail_nomem(err, "names of files");
    if (code)
        return code;
    for (int i = in->files; i-- > 0;)
        in->path[in->rank[i].source] = files[i];
    in->gather.path = in->path;
    mz_import_note(&in->facts, "ids within a token=%s", in->ascending ? "ascending" : "as routed");
    if (in->options->dropped)
        mz_import_note(&in->facts, "pairs=after dropping; top-k before=%d", in->top_k);
    if (in->options->layer_offsets)
        mz_import_note(&in->facts, "layer offsets=%s", in->options->layer_offsets);
    code = mz_rank_files_note(in->report, &in->facts, in->rank, in->files, err);
    if (code)
        return code;
    if (in->facts.has_weight)
        mz_import_note(&in->facts, "weights=%s of the logits", in->options->scores);
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

static mz_code read_steps(router_import *in, char **files, const char *output,
                          const mz_trace_write_options *write, mz_err *err) {
    mz_code code = MZ_OK;
    mz_progress progress = mz_progress_start(&in->app->log, "importing", "calls", 0);
    for (;;) {
        int64_t step = -1;
        for (int i = 0; i < in->files; i++)
            if (in->file[i].lines.object && (step < 0 || in->file[i].step < step))
                step = in->file[i].step;
        if (step < 0)
            break;
        bool first = !in->writer;
        code = take_step(in, step, err);
        if (!code && first)
            code = create(in, files, output, write, err);
        if (!code)
            code = mz_gather_write(&in->gather, in->writer, in->report, err);
        if (!code)
            code = mz_import_stopped(in->app, err);
        if (code)
            break;
        mz_progress_update(&progress, in->report->calls);
    }
    mz_progress_end(&progress);
    return code;
}

static void free_import(router_import *in) {
    for (int i = 0; i < in->files && in->file; i++) {
        mz_jsonl_close(&in->file[i].lines);
        free(in->file[i].seen);
        if (in->file[i].logits)
            fclose(in->file[i].logits);
    }
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    mz_gather_free(&in->gather);
    free(in->path);
    free(in->stored);
    free(in->logit);
    free(in->file);
    free(in->rank);
    free(in);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "Megatron-LM router trace",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_ITERATION};
    router_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (router_import){
        .app = app, .options = options, .report = report, .files = count, .ascending = true};
    in->gather.facts = &in->facts;
    in->file = mz_calloc((size_t)count, sizeof *in->file);
    in->rank = mz_calloc((size_t)count, sizeof *in->rank);
    mz_code code = in->file && in->rank ? MZ_OK : mz_fail_nomem(err, "files");
    if (!code)
        code = mz_import_facts(app, options, &defaults, &in->facts, err);
    if (!code)
        code = open_files(in, files, err);
    if (!code)
        code = read_steps(in, files, output, write, err);
    if (!code)
        code = mz_trace_writer_close(&in->writer, err);
    mz_rows_skip(report, in->mtp, "lines of multi-token prediction (mtp)");
    if (!report->skipped && count > 1 && !options->layer_offsets)
        snprintf(report->note, sizeof report->note,
                 "all ranks record the same layers: taken as one pipeline stage "
                 "(--layer-offsets says otherwise)");
    free_import(in);
    return code;
}

const mz_importer mz_import_megatron_router = {
    .name = "megatron-route",
    .summary = "Megatron-LM router trace (router_trace_rank{R}.jsonl), one file per rank",
    .answers = "experts top-k layer-offsets scores dropped",
    .recognise = recognise,
    .import = import_files,
};
