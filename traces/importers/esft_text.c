/* DeepSeek's ESFT logs: expert_weights_{layer}.txt, one file per layer, a line per sequence: the
 * ids of all tokens (top-k after top-k, in the router's order) separated by tabs, two tabs, their
 * weights alike. Neither k nor E is in the files. Files of one folder belong together (a folder per
 * evaluating process): its sequences follow those of the folder before. Files are read side by
 * side; memory is one sequence. */
#include "traces/importers/ranks.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "common/io/input.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct esft_file {
    const char *path;
    size_t folder; /* length of the path up to the file's name */
    long layer;
} esft_file;

typedef struct esft_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_block block;
    mz_input **input; /* of the folder being read, [layers] */
    mz_sequence sequence;
    mz_trace_writer *writer;
    mz_import_report *report;
} esft_import;

/* Layer in the name expert_weights_{layer}.txt (or .txt.xz, .txt.gz), or -1. */
static long layer_of(const char *path) {
    static const char prefix[] = "expert_weights_";
    const char *name = mz_base_name(path);
    char *end;
    if (strncmp(name, prefix, strlen(prefix)) != 0 || !isdigit((unsigned char)name[strlen(prefix)]))
        return -1;
    errno = 0;
    long layer = strtol(name + strlen(prefix), &end, 10);
    return errno == 0 && layer <= MZ_LAYERS_MAX && strncmp(end, ".txt", 4) == 0 ? layer : -1;
}

static int recognise(const char *path, const unsigned char *head, size_t size) {
    if (layer_of(path) < 0 || !isdigit(mz_head_first(head, size)) || !mz_head_has(head, size, "\t"))
        return 0;
    for (size_t i = 0; i < size; i++)
        if (!strchr("0123456789.eE+-\t\r\n", head[i]) || head[i] == '\0')
            return 0;
    return 85;
}

static mz_code line_fault(const mz_input *input, mz_err *err, const char *what) {
    return mz_fail(err, MZ_EINPUT, "%s: line %lld: %s", mz_input_path(input),
                   (long long)mz_input_line_number(input), what);
}

/* Numbers separated by single tabs from `text` up to `end`. */
static int64_t count_numbers(const char *text, const char *end) {
    int64_t count = text < end;
    for (; text < end; text++)
        count += *text == '\t';
    return count;
}

/* The ids of a line into layer `layer` of the sequence. */
static mz_code read_ids(esft_import *in, const mz_input *input, char *text, int64_t tokens,
                        int32_t layer, mz_err *err) {
    int32_t k = in->facts.top_k, layers = in->facts.layers;
    for (int64_t t = 0; t < tokens; t++) {
        uint16_t *expert = in->sequence.expert + (t * layers + layer) * k;
        for (int32_t i = 0; i < k; i++) {
            char *end;
            long id = strtol(text, &end, 10);
            const char *fault = end == text || *end != '\t'
                                    ? "is not a whole number"
                                    : mz_id_fault(id, in->facts.experts, expert, i);
            if (fault)
                return mz_fail(err, MZ_EINPUT, "%s: line %lld: token %lld: id '%.*s' %s",
                               mz_input_path(input), (long long)mz_input_line_number(input),
                               (long long)t, (int)strcspn(text, "\t"), text, fault);
            expert[i] = (uint16_t)id;
            text = end + 1;
        }
    }
    return MZ_OK;
}

static mz_code read_weights(esft_import *in, const mz_input *input, char *text, int64_t tokens,
                            int32_t layer, mz_err *err) {
    int32_t k = in->facts.top_k, layers = in->facts.layers;
    for (int64_t t = 0; t < tokens; t++) {
        float *weight = in->sequence.weight + (t * layers + layer) * k;
        for (int32_t i = 0; i < k; i++) {
            char *end;
            double value = strtod(text, &end);
            if (end == text || (*end != '\t' && *end != '\0') || !(value >= 0 && value < 1e30))
                return mz_fail(err, MZ_EINPUT,
                               "%s: line %lld: token %lld: weight '%.*s' is not a number of at "
                               "least 0",
                               mz_input_path(input), (long long)mz_input_line_number(input),
                               (long long)t, (int)strcspn(text, "\t"), text);
            weight[i] = (float)value;
            text = *end ? end + 1 : end;
        }
        if (mz_weights_fit("the weights", weight, &in->facts, err))
            return mz_err_prefix(err, "%s: line %lld: token %lld", mz_input_path(input),
                                 (long long)mz_input_line_number(input), (long long)t);
    }
    return MZ_OK;
}

/* The next line of one layer; *tokens < 0 before the first layer of the sequence. */
static mz_code read_layer(esft_import *in, int32_t layer, int64_t *tokens, bool *end, mz_err *err) {
    mz_input *input = in->input[layer];
    char *line;
    size_t length;
    mz_code code = mz_input_line(input, &line, &length, err);
    *end = !line;
    if (code || !line)
        return code;
    if (strlen(line) != length)
        return line_fault(input, err, "a NUL byte in it: another format, or damaged?");
    char *split = strstr(line, "\t\t");
    if (!split)
        return line_fault(input, err,
                          "no two tabs between ids and weights: another format, or truncated?");
    int64_t ids = count_numbers(line, split), here = ids / in->facts.top_k;
    if (ids % in->facts.top_k || ids == 0)
        return mz_fail(err, MZ_EINPUT, "%s: line %lld: %lld ids are no whole tokens of top-%d",
                       mz_input_path(input), (long long)mz_input_line_number(input), (long long)ids,
                       in->facts.top_k);
    if (count_numbers(split + 2, line + length) != ids)
        return line_fault(input, err, "not as many weights as ids: is the line truncated?");
    if (*tokens >= 0 && *tokens != here)
        return line_fault(input, err, "another number of tokens than in the layer before");
    *tokens = here;
    size_t row = (size_t)in->facts.layers * (size_t)in->facts.top_k;
    code = mz_sequence_grow(&in->sequence, here, row, true, err);
    if (code)
        return mz_err_prefix(err, "%s: line %lld", mz_input_path(input),
                             (long long)mz_input_line_number(input));
    split[1] = '\0';
    code = read_ids(in, input, line, here, layer, err);
    return code ? code : read_weights(in, input, split + 2, here, layer, err);
}

static mz_code create(esft_import *in, int64_t tokens, const char *output,
                      const mz_trace_write_options *write, mz_err *err) {
    if (in->options->weights_normalized < 0)
        in->facts.weights_normalized =
            mz_weights_normalized(in->sequence.weight, tokens * in->facts.layers, in->facts.top_k);
    in->block = (mz_block){.layers = in->facts.layers,
                           .top_k = in->facts.top_k,
                           .weights = true,
                           .step_per_block = in->facts.step_meaning != MZ_STEP_NONE};
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

/* All sequences of the files of one folder. */
static mz_code read_folder(esft_import *in, const esft_file *file, const char *output,
                           const mz_trace_write_options *write, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t l = 0; l < in->facts.layers && !code; l++)
        code = mz_input_open(file[l].path, &in->input[l], err);
    while (!code) {
        int64_t tokens = -1;
        bool end = false, first_end = false;
        for (int32_t l = 0; l < in->facts.layers && !code; l++) {
            code = read_layer(in, l, &tokens, &end, err);
            first_end = l == 0 ? end : first_end;
            if (!code && end != first_end)
                code =
                    mz_fail(err, MZ_EINPUT, "%s has fewer lines than %s: is it truncated?",
                            end ? file[l].path : file[0].path, end ? file[0].path : file[l].path);
        }
        if (code || first_end)
            break;
        if (!in->writer)
            code = create(in, tokens, output, write, err);
        if (!code) {
            code = mz_block_add(&in->block, in->sequence.expert, in->sequence.weight, tokens, -1,
                                in->writer, in->report, err);
            if (code == MZ_EINPUT)
                mz_err_prefix(err, "%s and the other layers", file[0].path);
        }
        if (!code)
            code = mz_import_stopped(in->app, err);
    }
    for (int32_t l = 0; l < in->facts.layers; l++)
        if (in->input[l])
            mz_input_close(&in->input[l]);
    return code;
}

static int by_folder(const void *a, const void *b) {
    const esft_file *x = a, *y = b;
    size_t common = x->folder < y->folder ? x->folder : y->folder;
    int order = memcmp(x->path, y->path, common);
    if (order != 0 || x->folder != y->folder)
        return order ? order : x->folder < y->folder ? -1 : 1;
    return (x->layer > y->layer) - (x->layer < y->layer);
}

/* Sorts the files by folder and layer; every folder must have the same layers. */
static mz_code sort_files(esft_import *in, esft_file *file, char **files, int count, mz_err *err) {
    for (int i = 0; i < count; i++) {
        file[i] = (esft_file){.path = files[i],
                              .folder = (size_t)(mz_base_name(files[i]) - files[i]),
                              .layer = layer_of(files[i])};
        if (file[i].layer < 0)
            return mz_fail(
                err, MZ_EINPUT,
                "%s: the layer must stand in the file's name: expert_weights_{layer}.txt",
                files[i]);
    }
    qsort(file, (size_t)count, sizeof *file, by_folder);
    for (int i = 1; i < count; i++)
        if (by_folder(&file[i - 1], &file[i]) == 0)
            return mz_fail(err, MZ_EINPUT, "%s: layer %ld twice", file[i].path, file[i].layer);
    int layers = 1;
    while (layers < count && file[layers].folder == file[0].folder &&
           memcmp(file[layers].path, file[0].path, file[0].folder) == 0)
        layers++;
    for (int i = 0; i < count; i++) {
        const esft_file *first = &file[i - i % layers];
        if (count % layers || file[i].layer != file[i % layers].layer ||
            file[i].folder != first->folder ||
            memcmp(file[i].path, first->path, first->folder) != 0)
            return mz_fail(err, MZ_EINPUT,
                           "%s: every folder must have the same layers; %.*s has %d files",
                           file[i].path, (int)file[0].folder, file[0].path, layers);
    }
    in->facts.layers = layers;
    mz_import_note(&in->facts, "layers=%d from %ld to %ld", layers, file[0].layer,
                   file[layers - 1].layer);
    return MZ_OK;
}

/* Folders are named rank_{R} by the ranks that wrote them: notes those that are not there. */
static mz_code note_missing(esft_import *in, const esft_file *file, int count, mz_err *err) {
    int folders = count / in->facts.layers;
    mz_rank_file *rank = mz_calloc((size_t)folders, sizeof *rank);
    bool named = rank != NULL;
    for (int i = 0; i < folders && named; i++) {
        const esft_file *first = &file[i * in->facts.layers];
        char folder[64] = "";
        size_t end = first->folder > 0 ? first->folder - 1 : 0, begin = end;
        while (begin > 0 && first->path[begin - 1] != '/')
            begin--;
        snprintf(folder, sizeof folder, "%.*s", (int)(end - begin), first->path + begin);
        rank[i].rank = mz_rank_of_name(folder);
        named = rank[i].rank >= 0;
    }
    mz_code code = !rank   ? mz_fail_nomem(err, "folders")
                   : named ? mz_rank_files_note(in->report, &in->facts, rank, folders, err)
                           : MZ_OK;
    free(rank);
    return code;
}

static mz_code take_facts(esft_import *in, const char *path, mz_err *err) {
    mz_code code = mz_import_top_k(path, in->options, in->options->experts, &in->facts.top_k, err);
    if (!code && in->options->experts <= 0)
        code = mz_import_ask(err, path, "the number of experts is", "experts");
    if (code)
        return code;
    in->facts.experts = (int32_t)in->options->experts;
    in->facts.ranks = 1;
    in->facts.has_weight = in->facts.has_sequences = true;
    return MZ_OK;
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "ESFT expert weights",
                                                .router = "softmax",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    esft_import *in = mz_calloc(1, sizeof *in);
    esft_file *file = mz_calloc((size_t)count, sizeof *file);
    mz_code code = in && file ? MZ_OK : mz_fail_nomem(err, "the importer");
    if (!code) {
        *in = (esft_import){.app = app, .options = options, .report = report};
        code = mz_import_facts(app, options, &defaults, &in->facts, err);
    }
    if (!code)
        code = take_facts(in, files[0], err);
    if (!code)
        code = sort_files(in, file, files, count, err);
    if (!code)
        code = note_missing(in, file, count, err);
    if (!code) {
        in->input = mz_calloc((size_t)in->facts.layers, sizeof(mz_input *));
        code = in->input ? MZ_OK : mz_fail_nomem(err, "files");
    }
    for (int i = 0; i < count && !code; i += in->facts.layers)
        code = read_folder(in, file + i, output, write, err);
    if (!code)
        code = mz_block_write(&in->block, in->writer, report, err);
    if (!code)
        code = mz_import_close(files[0], report, &in->writer, err);
    free(file);
    if (!in)
        return code;
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    mz_block_free(&in->block);
    free(in->input);
    mz_sequence_free(&in->sequence);
    free(in);
    return code;
}

const mz_importer mz_import_esft_text = {
    .name = "esft-text",
    .summary = "ESFT logs (expert_weights_{layer}.txt), one file per layer",
    .answers = "experts top-k normalized",
    .recognise = recognise,
    .import = import_files,
};
