/* Megatron-LM's tokens per expert: rank{R}.jsonl, one line per (iteration, block, layer) with the
 * counts of that rank's own experts for every micro-batch: {"iter", "block", "layer", "tpe":
 * [[local experts] x micro-batches]}. The file does not say which ranks share the experts
 * (--ep-size, --ep-ranks; expert = place x local experts + i), nor the pipeline stage
 * (--layer-offsets), nor where the tokens came from.
 *
 * The ranks that hold all experts once form a group, and only they send to each other; every rank
 * of a group holds the same number of tokens. So an expert's pairs are dealt evenly over the
 * group's sources, the remainders going on round the group so that each source deals out its own
 * share. Counts are those after dropping: without --dropped or --tokens all layers must hold the
 * same number. Memory is one iteration of all ranks. */
#include "traces/importers/gather.h"
#include "traces/importers/ranks.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/jsonl.h"

#include <stdlib.h>
#include <string.h>

typedef struct tpe_file {
    mz_jsonl lines;
    int64_t iteration;
    int32_t place, group; /* within the expert group, and which group of the stage */
} tpe_file;

/* Counts of one rank's experts in one micro-batch. */
typedef struct tpe_row {
    int64_t layer;
    int32_t micro_batch, group, place;
    size_t first;
} tpe_row;

typedef struct tpe_import {
    mz_app *app;
    const mz_import_options *options;
    tpe_file *file;
    mz_rank_file *rank;
    int files;
    mz_trace_facts facts;
    int32_t places, local; /* ranks of a group, experts of a rank */
    mz_gather gather;
    const char **source; /* a file of each source rank, for messages */
    tpe_row *row;
    int64_t *count, *load; /* of the rows; of all experts of a group */
    size_t rows, row_room, counts, count_room;
    mz_trace_writer *writer;
    mz_import_report *report;
} tpe_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return mz_head_first(head, size) == '{' && mz_head_has(head, size, "\"tpe\"") &&
                   mz_head_has(head, size, "\"iter\"")
               ? 90
               : 0;
}

static mz_code next_line(tpe_import *in, tpe_file *file, mz_err *err) {
    return mz_megatron_next(&file->lines, "iter", &file->iteration, &in->report->skipped, err);
}

/* One micro-batch of the current line. */
static mz_code take_row(tpe_import *in, const tpe_file *file, int64_t layer, const json_t *counts,
                        int32_t micro_batch, mz_err *err) {
    size_t local = (size_t)in->local, at;
    if (!mz_grow((void **)&in->row, &in->row_room, in->rows + 1, sizeof *in->row) ||
        !mz_grow((void **)&in->count, &in->count_room, in->counts + local, sizeof *in->count))
        return mz_fail_nomem(err, "one iteration of counts");
    const char *fault = mz_json_counts(counts, local, in->count + in->counts, &at);
    if (fault)
        return mz_jsonl_fail(&file->lines, err, "tpe[%d]: entry %zu %s", micro_batch, at, fault);
    in->row[in->rows++] = (tpe_row){.layer = layer,
                                    .micro_batch = micro_batch,
                                    .group = file->group,
                                    .place = file->place,
                                    .first = in->counts};
    in->counts += local;
    return MZ_OK;
}

static mz_code take_line(tpe_import *in, int index, mz_err *err) {
    const tpe_file *file = &in->file[index];
    json_t *batches;
    int64_t layer;
    mz_code code = mz_jsonl_int(&file->lines, "layer", 0, MZ_LAYERS_MAX, &layer, err);
    if (!code)
        code = mz_jsonl_array(&file->lines, "tpe", &batches, err);
    if (!code && json_array_size(batches) == 0)
        code = mz_jsonl_fail(&file->lines, err, "\"tpe\" lists no micro-batch");
    if (code)
        return code;
    for (size_t m = 0; m < json_array_size(batches) && m < INT32_MAX && !code; m++)
        code = take_row(in, file, layer + in->rank[index].offset, json_array_get(batches, m),
                        (int32_t)m, err);
    return code;
}

static int by_place(const void *a, const void *b) {
    const tpe_row *x = a, *y = b;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    if (x->micro_batch != y->micro_batch)
        return x->micro_batch < y->micro_batch ? -1 : 1;
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    return (x->place > y->place) - (x->place < y->place);
}

/* Puts the file of a place of a group before the message. */
static mz_code in_file(const tpe_import *in, int32_t group, int32_t place, mz_err *err) {
    for (int i = 0; i < in->files; i++)
        if (in->file[i].place == place && in->file[i].group == group)
            return mz_err_prefix(err, "%s", in->rank[i].path);
    return err->code;
}

/* Deals the loads of one group's experts to its sources. */
static mz_code deal_group(tpe_import *in, int64_t step, const tpe_row *row, mz_err *err) {
    int64_t n = in->places;
    for (int64_t s = 0; s < n; s++) {
        mz_gather_key key = {.step = step,
                             .layer = row->layer,
                             .micro_batch = row->micro_batch,
                             .rank = (int32_t)(row->group * n + s)};
        int64_t *count, pairs = 0, tokens, next = 0;
        for (int32_t e = 0; e < in->facts.experts; e++) {
            int64_t rest = in->load[e] % n;
            pairs += in->load[e] / n + ((s - next + n) % n < rest);
            next = (next + rest) % n;
        }
        mz_code code = mz_gather_tokens(in->options, in->facts.top_k, pairs, &tokens, err);
        if (!code)
            code = mz_gather_counts(&in->gather, &key, tokens, &count, err);
        if (code) {
            mz_err_prefix(err, "iteration %lld, layer %lld, micro-batch %d, source %d",
                          (long long)step, (long long)key.layer, key.micro_batch, key.rank);
            return in_file(in, row->group, (int32_t)s, err);
        }
        next = 0;
        for (int32_t e = 0; e < in->facts.experts; e++) {
            int64_t rest = in->load[e] % n;
            count[e] = in->load[e] / n + ((s - next + n) % n < rest);
            next = (next + rest) % n;
        }
    }
    return MZ_OK;
}

/* What is wrong with place `place` of the group of `row`. */
static mz_code place_fault(const tpe_import *in, int64_t step, const tpe_row *row, int32_t place,
                           const char *what, mz_err *err) {
    mz_fail(
        err, MZ_EINPUT,
        "iteration %lld, layer %lld, micro-batch %d: the rank at place %d of expert group %d is "
        "%s",
        (long long)step, (long long)row->layer, row->micro_batch, place, row->group, what);
    return in_file(in, row->group, place, err);
}

/* Loads of all experts from the `rows` rows of one group, each place once. */
static mz_code join_group(tpe_import *in, int64_t step, const tpe_row *row, size_t rows,
                          mz_err *err) {
    for (int32_t p = 0; p < in->places || (size_t)p < rows; p++) {
        if ((size_t)p >= rows || row[p].place > p)
            return place_fault(in, step, row, p, "missing: is its file truncated?", err);
        if (row[p].place < p)
            return place_fault(in, step, row, row[p].place, "recorded twice", err);
        memcpy(in->load + p * in->local, in->count + row[p].first,
               (size_t)in->local * sizeof *in->load);
    }
    return MZ_OK;
}

/* Puts the rows of one iteration together, group by group. */
static mz_code deal_rows(tpe_import *in, int64_t step, mz_err *err) {
    qsort(in->row, in->rows, sizeof *in->row, by_place);
    mz_code code = MZ_OK;
    for (size_t i = 0, next; i < in->rows && !code; i = next) {
        const tpe_row *row = &in->row[i];
        for (next = i + 1; next < in->rows; next++)
            if (in->row[next].layer != row->layer ||
                in->row[next].micro_batch != row->micro_batch || in->row[next].group != row->group)
                break;
        code = join_group(in, step, row, next - i, err);
        if (!code)
            code = deal_group(in, step, row, err);
    }
    in->rows = in->counts = 0;
    return code;
}

static mz_code take_step(tpe_import *in, int64_t step, mz_err *err) {
    for (int i = 0; i < in->files; i++) {
        tpe_file *file = &in->file[i];
        while (file->lines.object && file->iteration == step) {
            mz_code code = take_line(in, i, err);
            if (!code)
                code = next_line(in, file, err);
            if (code)
                return code;
        }
    }
    return deal_rows(in, step, err);
}

static mz_code group_incomplete(const tpe_import *in, int64_t first, mz_err *err) {
    int64_t missing, highest = 0;
    char text[64];
    for (int i = 0; i < in->files; i++)
        highest = in->rank[i].rank > highest ? in->rank[i].rank : highest;
    mz_code code =
        mz_rank_files_missing(in->rank, in->files, highest / in->places * in->places + in->places,
                              &missing, text, sizeof text, err);
    return code ? code
                : mz_fail(err, MZ_EINPUT,
                          "the files of ranks %s are missing: with --ep-size %d ranks %lld to %lld "
                          "hold all experts once, and the counts of some would be unknown",
                          text, in->places, (long long)first, (long long)(first + in->places - 1));
}

/* A group that lacks a rank lacks its experts: nothing can be made of the rest. A group that is
 * missing as a whole leaves fewer source ranks. */
static mz_code check_groups(const tpe_import *in, mz_err *err) {
    for (int i = 0; i < in->files && !in->options->ep_ranks; i++) {
        int64_t group = in->rank[i].rank / in->places;
        int32_t held = 0;
        for (int j = 0; j < in->files; j++)
            held += in->rank[j].rank / in->places == group;
        if (held < in->places)
            return group_incomplete(in, group * in->places, err);
    }
    if (in->facts.ranks % in->places)
        return mz_fail(err, MZ_EINPUT, "%d ranks of a stage are no whole groups of --ep-size %d",
                       in->facts.ranks, in->places);
    return MZ_OK;
}

/* Each rank's place in its expert group, and which group of its stage that is. */
static mz_code place_files(tpe_import *in, mz_err *err) {
    for (int i = 0; i < in->files; i++) {
        int64_t place = in->rank[i].rank % in->places;
        if (in->options->ep_ranks) {
            mz_code code = mz_rank_value("ep-ranks", in->options->ep_ranks, in->rank[i].rank, true,
                                         &place, err);
            if (code)
                return code;
        }
        if (place >= in->places)
            return mz_fail(err, MZ_EINPUT, "--ep-ranks: place %lld of rank %lld, but --ep-size %d",
                           (long long)place, (long long)in->rank[i].rank, in->places);
        in->file[i].place = (int32_t)place;
    }
    for (int i = 0; i < in->files; i++)
        for (int j = 0; j < in->files; j++)
            in->file[i].group += in->rank[j].offset == in->rank[i].offset &&
                                 in->file[j].place == in->file[i].place &&
                                 in->rank[j].rank < in->rank[i].rank;
    return MZ_OK;
}

/* Files by which messages name the sources: of the first stage that is given. */
static mz_code name_sources(tpe_import *in, mz_err *err) {
    in->source = mz_calloc((size_t)in->facts.ranks, sizeof *in->source);
    if (!in->source)
        return mz_fail_nomem(err, "names of files");
    for (int i = in->files - 1; i >= 0; i--) {
        int64_t source = (int64_t)in->file[i].group * in->places + in->file[i].place;
        if (source < in->facts.ranks)
            in->source[source] = in->rank[i].path;
    }
    for (int32_t r = 0; r < in->facts.ranks; r++)
        if (!in->source[r])
            in->source[r] = in->rank[0].path;
    in->gather.path = in->source;
    return MZ_OK;
}

static mz_code open_files(tpe_import *in, char **files, mz_err *err) {
    mz_code code = MZ_OK;
    for (int i = 0; i < in->files && !code; i++) {
        in->rank[i].path = files[i];
        in->rank[i].rank = mz_rank_of_name(files[i]);
        if (in->rank[i].rank < 0)
            return mz_fail(err, MZ_EINPUT,
                           "%s: the rank must stand in the file's name: rank{R}.jsonl", files[i]);
        code = mz_jsonl_open(files[i], &in->file[i].lines, err);
        if (!code)
            code = next_line(in, &in->file[i], err);
        if (!code && !in->file[i].lines.object)
            code = mz_fail(err, MZ_EINPUT, "%s: no line of the decoder", files[i]);
    }
    return code;
}

/* Experts of a rank and in all, ranks of a stage and of an expert group. */
static mz_code take_shape(tpe_import *in, const char *path, mz_err *err) {
    const json_t *first = json_array_get(json_object_get(in->file[0].lines.object, "tpe"), 0);
    size_t local = json_array_size(first);
    if (in->options->ep_size <= 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: counts are of this rank's %zu experts; which ranks hold the others is "
                       "not in the file: pass --ep-size N (ranks iN to iN+N-1 hold all experts "
                       "once; else also --ep-ranks)",
                       path, local);
    if (local == 0 || (int64_t)local > MZ_EXPERTS_MAX / in->options->ep_size)
        return mz_jsonl_fail(&in->file[0].lines, err,
                             "tpe[0] lists %zu experts; with --ep-size %lld there must be 1 to %d "
                             "in all",
                             local, (long long)in->options->ep_size, MZ_EXPERTS_MAX);
    in->local = (int32_t)local;
    in->places = (int32_t)in->options->ep_size;
    in->facts.experts = in->local * in->places;
    mz_code code = mz_import_top_k(path, in->options, in->facts.experts, &in->facts.top_k, err);
    if (code)
        return code;
    if (in->options->experts > 0 && in->options->experts != in->facts.experts)
        return mz_fail(err, MZ_EINPUT, "%s: --experts %lld, but %d ranks with %d experts each",
                       path, (long long)in->options->experts, in->places, in->local);
    code = mz_rank_stages(in->rank, in->files, in->options->layer_offsets, &in->facts.ranks, err);
    if (!code)
        code = check_groups(in, err);
    if (!code)
        code = place_files(in, err);
    return code ? code : name_sources(in, err);
}

static mz_code create(tpe_import *in, const char *output, const mz_trace_write_options *write,
                      mz_err *err) {
    mz_code code = mz_gather_settle(&in->gather, err);
    if (code)
        return code;
    mz_import_note(&in->facts, "ep size=%d", in->places);
    if (in->options->ep_ranks)
        mz_import_note(&in->facts, "ep ranks=%s", in->options->ep_ranks);
    if (in->options->layer_offsets)
        mz_import_note(&in->facts, "layer offsets=%s", in->options->layer_offsets);
    mz_import_note(&in->facts, "counts=after dropping");
    mz_import_note(&in->facts, "sources=dealt evenly within expert groups");
    code = mz_rank_files_note(in->report, &in->facts, in->rank, in->files, err);
    if (code)
        return code;
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

static mz_code read_steps(tpe_import *in, const char *output, const mz_trace_write_options *write,
                          mz_err *err) {
    mz_code code = MZ_OK;
    mz_progress progress = mz_progress_start(&in->app->log, "importing", "calls", 0);
    while (!code) {
        int64_t step = -1;
        for (int i = 0; i < in->files; i++)
            if (in->file[i].lines.object && (step < 0 || in->file[i].iteration < step))
                step = in->file[i].iteration;
        if (step < 0)
            break;
        code = take_step(in, step, err);
        if (!code && !in->writer)
            code = create(in, output, write, err);
        if (!code)
            code = mz_gather_write(&in->gather, in->writer, in->report, err);
        if (!code)
            code = mz_import_stopped(in->app, err);
        mz_progress_update(&progress, in->report->calls);
    }
    mz_progress_end(&progress);
    return code;
}

static void free_import(tpe_import *in) {
    for (int i = 0; i < in->files && in->file; i++)
        mz_jsonl_close(&in->file[i].lines);
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    mz_gather_free(&in->gather);
    free(in->source);
    free(in->row);
    free(in->count);
    free(in->load);
    free(in->file);
    free(in->rank);
    free(in);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "Megatron-LM tokens per expert",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_COUNTS,
                                                .meaning = MZ_STEP_ITERATION};
    tpe_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    *in = (tpe_import){.app = app, .options = options, .report = report, .files = count};
    in->gather.facts = &in->facts;
    in->file = mz_calloc((size_t)count, sizeof *in->file);
    in->rank = mz_calloc((size_t)count, sizeof *in->rank);
    mz_code code = in->file && in->rank ? MZ_OK : mz_fail_nomem(err, "files");
    if (!code)
        code = mz_import_facts(app, options, &defaults, &in->facts, err);
    if (!code)
        code = open_files(in, files, err);
    if (!code)
        code = take_shape(in, files[0], err);
    if (!code) {
        in->load = mz_calloc((size_t)in->facts.experts, sizeof *in->load);
        code = in->load ? read_steps(in, output, write, err) : mz_fail_nomem(err, "loads");
    }
    if (!code)
        code = mz_import_close(files[0], report, &in->writer, err);
    snprintf(report->note, sizeof report->note,
             report->skipped
                 ? "lines of multi-token prediction (mtp)"
                 : "sources are not recorded: pairs are dealt evenly within groups of %d ranks",
             in->places);
    free_import(in);
    return code;
}

const mz_importer mz_import_megatron_tpe = {
    .name = "megatron-tpe",
    .summary = "Megatron-LM tokens per expert (rank{R}.jsonl), one file per rank",
    .answers = "experts top-k ep-size ep-ranks layer-offsets tokens dropped",
    .phase = "train",
    .recognise = recognise,
    .import = import_files,
};
