/* TensorRT-LLM's expert statistic: meta_info.json {"num_experts", "num_experts_per_token"} and, per
 * rank, rank{R}.safetensors (key "{iteration}_{layer}": counts [E]) or rank{R}_raw.safetensors
 * (the same key: chosen experts [tokens, k]). Ids are logical, layers those of the model, and every
 * rank counts its own tokens: ranks become source ranks. Safetensors: eight bytes of length, that
 * much JSON with type, shape and place of every array, then the data. */
#include "traces/importers/ranks.h"
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "common/io/json.h"
#include "traces/datafile.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int64_t HEADER_MAX = 100000000; /* as the safetensors library allows */

/* One array of one rank's file. */
typedef struct entry {
    int64_t step, layer;
    int32_t rank;
    mz_tensor tensor;
} entry;

typedef struct trt_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_gather gather;
    mz_trace_writer *writer;
    mz_import_report *report;
    mz_rank_file *rank; /* in order */
    mz_datafile **file; /* of each rank */
    const char **path;
    entry *list;
    size_t count, room;
    int64_t *scratch;
    size_t scratch_room;
} trt_import;

/* Whether "{iteration}_{layer}" and a quote begin here. */
static bool is_key(const unsigned char *text, size_t size) {
    size_t i = 0, first, second;
    while (i < size && isdigit(text[i]))
        i++;
    first = i;
    i += i < size && text[i] == '_';
    second = i;
    while (i < size && isdigit(text[i]))
        i++;
    return first > 0 && second > first && i > second && i < size && text[i] == '"';
}

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    if (mz_head_first(head, size) == '{' && mz_head_has(head, size, "\"num_experts\"") &&
        mz_head_has(head, size, "\"num_experts_per_token\"") && size < 512)
        return 85;
    if (size < 16 || head[8] != '{' || mz_le64(head) > (uint64_t)HEADER_MAX)
        return 0;
    for (size_t i = 9; i < size; i++)
        if (head[i] == '"' && is_key(head + i + 1, size - i - 1))
            return 85;
    return 0;
}

static mz_code read_meta(trt_import *in, const char *path, mz_err *err) {
    json_t *json = NULL;
    mz_json view;
    int64_t experts = 0, top_k = 0;
    if (in->facts.experts)
        return mz_fail(err, MZ_EINPUT, "%s: a second .json file: pass one meta_info.json", path);
    mz_code code = mz_json_load(path, &json, err);
    if (!code)
        code = mz_json_object(json, path, &view, err);
    if (!code)
        code = mz_json_int(&view, "num_experts", 1, MZ_EXPERTS_MAX, &experts, err);
    if (!code)
        code = mz_json_int(&view, "num_experts_per_token", 1, MZ_MAX_TOP_K, &top_k, err);
    json_decref(json);
    in->facts.experts = (int32_t)experts;
    in->facts.top_k = (int32_t)top_k;
    return code;
}

static bool is_meta(const char *path) {
    const char *base = mz_base_name(path);
    size_t length = strlen(base);
    return length >= 5 && strcmp(base + length - 5, ".json") == 0;
}

/* E and k from meta_info.json, if it is among the files, and from the options. */
static mz_code take_shape(trt_import *in, char **files, int count, mz_err *err) {
    const mz_import_options *o = in->options;
    mz_code code = MZ_OK;
    for (int i = 0; i < count && !code; i++)
        if (is_meta(files[i]))
            code = read_meta(in, files[i], err);
    if (code)
        return code;
    if (o->experts > 0 && in->facts.experts && o->experts != in->facts.experts)
        return mz_fail(err, MZ_EINPUT, "meta_info.json says %d experts, but --experts %lld",
                       in->facts.experts, (long long)o->experts);
    if (o->top_k > 0 && in->facts.top_k && o->top_k != in->facts.top_k)
        return mz_fail(err, MZ_EINPUT, "meta_info.json says top-%d, but --top-k %lld",
                       in->facts.top_k, (long long)o->top_k);
    if (o->experts > 0)
        in->facts.experts = (int32_t)o->experts;
    if (o->top_k > 0)
        in->facts.top_k = (int32_t)o->top_k;
    if (in->facts.experts == 0 || in->facts.top_k == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: experts and top-k are in meta_info.json: pass it with the other files, "
                       "or pass --experts E --top-k K",
                       files[0]);
    return MZ_OK;
}

static mz_code element_type(const char *name, mz_npy_shape *shape) {
    static const struct {
        const char *name;
        char kind;
        int size;
    } types[] = {{"I64", 'i', 8}, {"I32", 'i', 4}, {"I16", 'i', 2}, {"I8", 'i', 1},
                 {"U64", 'u', 8}, {"U32", 'u', 4}, {"U16", 'u', 2}, {"U8", 'u', 1}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (name && strcmp(types[i].name, name) == 0) {
            shape->kind = types[i].kind;
            shape->size = types[i].size;
            return MZ_OK;
        }
    return MZ_EINPUT;
}

/* One member of the header: type, shape and place of an array behind byte `data`. */
static mz_code take_tensor(mz_datafile *file, const char *key, const json_t *about, int64_t data,
                           mz_tensor *tensor, mz_err *err) {
    const char *path = mz_datafile_path(file);
    const json_t *shape = json_object_get(about, "shape");
    const json_t *place = json_object_get(about, "data_offsets");
    size_t dims = json_array_size(shape);
    *tensor = (mz_tensor){0};
    if (element_type(json_string_value(json_object_get(about, "dtype")), &tensor->shape))
        return mz_fail(err, MZ_EINPUT, "%s: %s: dtype is not that of whole numbers (I64, I32, ...)",
                       path, key);
    if (!json_is_array(shape) || dims < 1 || dims > 2 || json_array_size(place) != 2)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %s: not counts [E] or ids [tokens, k] with their data_offsets", path,
                       key);
    tensor->shape.dims = (int)dims;
    for (size_t d = 0; d < dims; d++)
        tensor->shape.extent[d] = (int64_t)json_integer_value(json_array_get(shape, d));
    int64_t begin = (int64_t)json_integer_value(json_array_get(place, 0));
    int64_t end = (int64_t)json_integer_value(json_array_get(place, 1));
    if (!mz_tensor_contiguous(tensor) || begin < 0 || end < begin ||
        begin > mz_datafile_size(file) - data ||
        end - begin != tensor->shape.elements * tensor->shape.size)
        return mz_fail(err, MZ_EINPUT, "%s: %s: data_offsets do not fit the shape or the file",
                       path, key);
    tensor->offset = data + begin;
    return mz_tensor_check(file, tensor, key, err);
}

/* The number at *text, digits alone; *text is moved behind it. */
static bool take_number(const char **text, int64_t *number) {
    char *end;
    errno = 0;
    *number = strtoll(*text, &end, 10);
    bool ok = isdigit((unsigned char)**text) && errno == 0;
    *text = end;
    return ok;
}

/* "{iteration}_{layer}" */
static bool parse_key(const char *key, int64_t *step, int64_t *layer) {
    return take_number(&key, step) && *key++ == '_' && take_number(&key, layer) && *key == '\0';
}

static mz_code add_entry(trt_import *in, int32_t rank, const char *key, const json_t *about,
                         int64_t data, mz_err *err) {
    entry e = {.rank = rank};
    if (!parse_key(key, &e.step, &e.layer))
        return mz_fail(err, MZ_EINPUT, "%s: the key %.40s is not {iteration}_{layer}",
                       mz_datafile_path(in->file[rank]), key);
    mz_code code = take_tensor(in->file[rank], key, about, data, &e.tensor, err);
    if (code)
        return code;
    bool counts = e.tensor.shape.dims == 1;
    if (counts ? e.tensor.shape.extent[0] != in->facts.experts
               : e.tensor.shape.extent[1] != in->facts.top_k)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %s: %lld values a row, but there are %d experts, top-%d",
                       mz_datafile_path(in->file[rank]), key,
                       (long long)e.tensor.shape.extent[e.tensor.shape.dims - 1], in->facts.experts,
                       in->facts.top_k);
    if (in->count > 0 && in->list[0].tensor.shape.dims != e.tensor.shape.dims)
        return mz_fail(err, MZ_EINPUT,
                       "%s: counts and raw ids cannot be mixed: pass the files of one kind",
                       mz_datafile_path(in->file[rank]));
    if (!mz_grow((void **)&in->list, &in->room, in->count + 1, sizeof *in->list))
        return mz_fail_nomem(err, "the arrays of the files");
    in->list[in->count++] = e;
    return MZ_OK;
}

/* An array without elements may stand where the next one begins: it comes first. */
static int by_offset(const void *a, const void *b) {
    const mz_tensor *x = &((const entry *)a)->tensor, *y = &((const entry *)b)->tensor;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (x->shape.elements > y->shape.elements) - (x->shape.elements < y->shape.elements);
}

/* Arrays of one file, from list[first] on, share no byte: those of a sound one never do. */
static mz_code check_apart(trt_import *in, size_t first, const char *path, mz_err *err) {
    if (in->count > first)
        qsort(in->list + first, in->count - first, sizeof *in->list, by_offset);
    for (size_t i = first + 1; i < in->count; i++) {
        const entry *x = &in->list[i - 1], *y = &in->list[i];
        int64_t end = x->tensor.offset + x->tensor.shape.elements * x->tensor.shape.size;
        if (y->tensor.offset < end)
            return mz_fail(err, MZ_EINPUT,
                           "%s: the arrays %lld_%lld and %lld_%lld overlap: the header is damaged",
                           path, (long long)x->step, (long long)x->layer, (long long)y->step,
                           (long long)y->layer);
    }
    return MZ_OK;
}

static mz_code read_header(trt_import *in, int32_t rank, mz_err *err) {
    mz_datafile *file = in->file[rank];
    const char *path = mz_datafile_path(file), *key;
    unsigned char length[8];
    size_t first = in->count;
    json_t *header = NULL, *about;
    mz_code code = mz_datafile_read(file, 0, length, sizeof length, err);
    if (code)
        return code;
    uint64_t size = mz_le64(length);
    if (size > (uint64_t)HEADER_MAX || (int64_t)size > mz_datafile_size(file) - 8)
        return mz_fail(err, MZ_EINPUT,
                       "%s: no safetensors file, or truncated: it ends within its header", path);
    char *text = malloc((size_t)size + 1);
    if (!text)
        return mz_fail_nomem(err, "the header of a safetensors file");
    code = mz_datafile_read(file, 8, text, (size_t)size, err);
    json_error_t why;
    if (!code)
        header = mz_json_parse(text, (size_t)size, 0, &why);
    free(text);
    if (!code && !header && json_error_code(&why) == json_error_out_of_memory)
        code = mz_fail_nomem(err, "the header of a safetensors file");
    if (!code && !json_is_object(header))
        code = mz_fail(err, MZ_EINPUT, "%s: the header is no JSON object (damaged?): %s", path,
                       header ? "not an object" : why.text);
    if (!code)
        json_object_foreach(header, key, about) {
            if (strcmp(key, "__metadata__") != 0 && !code)
                code = add_entry(in, rank, key, about, 8 + (int64_t)size, err);
        }
    json_decref(header);
    return code ? code : check_apart(in, first, path, err);
}

static int64_t rank_of(const char *path) {
    int64_t rank = mz_rows_rank_of(path, "rank", ".safetensors");
    return rank >= 0 ? rank : mz_rows_rank_of(path, "rank", "_raw.safetensors");
}

static int by_rank(const void *a, const void *b) {
    const mz_rank_file *x = a, *y = b;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* The ranks' files in order of rank: the trace's source ranks. */
static mz_code sort_ranks(trt_import *in, char **files, int count, mz_err *err) {
    for (int i = 0; i < count; i++) {
        if (is_meta(files[i]))
            continue;
        int64_t rank = rank_of(files[i]);
        if (rank < 0)
            return mz_fail(err, MZ_EINPUT,
                           "%s: the name must be rank{R}.safetensors or rank{R}_raw.safetensors",
                           files[i]);
        in->rank[in->facts.ranks++] = (mz_rank_file){.path = files[i], .rank = rank};
    }
    if (in->facts.ranks == 0)
        return mz_fail(err, MZ_EINPUT, "%s: pass the ranks' .safetensors files with it", files[0]);
    qsort(in->rank, (size_t)in->facts.ranks, sizeof *in->rank, by_rank);
    for (int32_t r = 1; r < in->facts.ranks; r++)
        if (in->rank[r].rank == in->rank[r - 1].rank)
            return mz_fail(err, MZ_EINPUT, "%s and %s are both of rank %lld: pass each rank once",
                           in->rank[r - 1].path, in->rank[r].path, (long long)in->rank[r].rank);
    return mz_rank_files_note(in->report, &in->facts, in->rank, in->facts.ranks, err);
}

static mz_code open_ranks(trt_import *in, char **files, int count, mz_err *err) {
    mz_code code = sort_ranks(in, files, count, err);
    for (int32_t r = 0; r < in->facts.ranks && !code; r++) {
        in->path[r] = in->rank[r].path;
        code = mz_datafile_open(in->path[r], &in->file[r], err);
        if (!code)
            code = read_header(in, r, err);
    }
    in->gather.path = in->path;
    if (!code && in->count == 0)
        return mz_fail(err, MZ_EINPUT, "%s: no array in it", in->path[0]);
    return code;
}

static int by_step(const void *a, const void *b) {
    const entry *x = a, *y = b;
    return (x->step > y->step) - (x->step < y->step);
}

static mz_code add_call(trt_import *in, const entry *e, mz_err *err) {
    char what[64];
    int64_t elements = e->tensor.shape.elements;
    mz_gather_key key = {.step = e->step, .layer = e->layer, .rank = e->rank};
    snprintf(what, sizeof what, "%lld_%lld", (long long)e->step, (long long)e->layer);
    if (!mz_grow((void **)&in->scratch, &in->scratch_room, (size_t)elements + 1,
                 sizeof *in->scratch))
        return mz_fail_nomem(err, "one array");
    mz_code code =
        mz_tensor_read_int(in->file[e->rank], &e->tensor, what, 0, elements, in->scratch, err);
    if (code)
        return code;
    if (e->tensor.shape.dims == 1)
        code = mz_rows_count(&in->gather, &key, in->scratch, in->options, in->report, err);
    else
        code = mz_rows_ids(&in->gather, &key, in->scratch, e->tensor.shape.extent[0],
                           in->facts.top_k, NULL, 0, err);
    return code == MZ_EINPUT ? mz_err_prefix(err, "%s", mz_datafile_path(in->file[e->rank])) : code;
}

static mz_code create(trt_import *in, const char *output, const mz_trace_write_options *write,
                      mz_err *err) {
    mz_code code = mz_gather_settle(&in->gather, err);
    if (code)
        return code;
    mz_import_note(&in->facts, "ranks-hold=tokens");
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

/* Writes one iteration after the other; the first one settles the layers. */
static mz_code write_steps(trt_import *in, const char *output, const mz_trace_write_options *write,
                           mz_err *err) {
    mz_code code = MZ_OK;
    qsort(in->list, in->count, sizeof *in->list, by_step);
    mz_progress progress =
        mz_progress_start(&in->app->log, "importing", "arrays", (int64_t)in->count);
    for (size_t i = 0; i < in->count && !code;) {
        size_t first = i;
        for (; i < in->count && in->list[i].step == in->list[first].step && !code; i++)
            code = add_call(in, &in->list[i], err);
        if (!code && in->gather.entries > 0 && !in->writer)
            code = create(in, output, write, err);
        if (!code && in->writer)
            code = mz_gather_write(&in->gather, in->writer, in->report, err);
        if (!code)
            code = mz_import_stopped(in->app, err);
        mz_progress_update(&progress, (int64_t)i);
    }
    mz_progress_end(&progress);
    if (!code && !in->writer)
        return mz_fail(err, MZ_EINPUT, "%s: no selection in it or in the other files", in->path[0]);
    return code ? code : mz_import_close(in->path[0], in->report, &in->writer, err);
}

static void clean_up(trt_import *in, int count) {
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    for (int i = 0; in->file && i < count; i++)
        mz_datafile_close(&in->file[i]);
    mz_gather_free(&in->gather);
    free(in->rank);
    free(in->path);
    free(in->file);
    free(in->list);
    free(in->scratch);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "TensorRT-LLM expert statistic",
                                                .router = "unknown",
                                                .meaning = MZ_STEP_FORWARD};
    trt_import in = {.app = app, .options = options, .report = report};
    in.rank = mz_calloc((size_t)count, sizeof *in.rank);
    in.file = mz_calloc((size_t)count, sizeof *in.file);
    in.path = mz_calloc((size_t)count, sizeof *in.path);
    mz_code code = in.rank && in.file && in.path
                       ? mz_import_facts(app, options, &defaults, &in.facts, err)
                       : mz_fail_nomem(err, "the list of files");
    in.gather.facts = &in.facts;
    if (!code)
        code = take_shape(&in, files, count, err);
    if (!code)
        code = open_ranks(&in, files, count, err);
    if (!code) {
        in.facts.kind = in.list[0].tensor.shape.dims == 1 ? MZ_TRACE_COUNTS : MZ_TRACE_PAIRS;
        code = write_steps(&in, output, write, err);
    }
    clean_up(&in, count);
    return code;
}

const mz_importer mz_import_trt_safetensors = {
    .name = "trt-stat",
    .summary = "TensorRT-LLM statistic: meta_info.json and all rank{R}[_raw].safetensors",
    .answers = "experts top-k tokens dropped",
    .recognise = recognise,
    .import = import_files,
};
