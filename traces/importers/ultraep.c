/* UltraEP's load profile: TRACE.manifest.json (schema "ultra_ep_trace_v1",
 * num_global_logical_experts, chunks, dropped_records, ...) and beside it TRACE.chunkNNNNNN.npz
 * with layers [n], microbatches [n] (numbered through the run) and pre_logical_loads [n, experts],
 * the loads of the whole expert group before replicas. Who sent what is not recorded: one source
 * rank. Replicas' loads are left aside. Micro-batches become steps, as nothing says how many make
 * an iteration. Records are sorted; memory is that of the sorting and one step. */
#include "traces/importers/rows.h"
#include "traces/importers/spill.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "common/io/json.h"
#include "traces/zip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The beginning of a record as it is sorted; 32-bit loads [experts] follow. */
typedef struct load_key {
    int64_t step, layer, record; /* record: within its chunk */
    int64_t chunk;
} load_key;

typedef struct ultraep_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_gather gather;
    mz_import_report *report;
    int64_t chunks, lost;
    int64_t chunk;               /* being read */
    int64_t *layer, *step, *row; /* of one chunk; one row of loads */
    size_t layer_room, step_room;
    mz_spill records;
    unsigned char *record; /* one, as the spill holds it */
    mz_trace_writer *writer;
    char path[4096]; /* of the chunk being read */
} ultraep_import;

static int by_step(const void *a, const void *b) {
    load_key x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    if (x.step != y.step)
        return x.step < y.step ? -1 : 1;
    if (x.layer != y.layer)
        return x.layer < y.layer ? -1 : 1;
    if (x.chunk != y.chunk)
        return x.chunk < y.chunk ? -1 : 1;
    return (x.record > y.record) - (x.record < y.record);
}

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return mz_head_first(head, size) == '{' && mz_head_has(head, size, "ultra_ep_trace_v") ? 95 : 0;
}

static mz_code read_manifest(ultraep_import *in, const char *path, mz_err *err) {
    json_t *json = NULL;
    mz_json view;
    const char *schema = "";
    int64_t experts = 0;
    mz_code code = mz_json_load(path, &json, err);
    if (!code)
        code = mz_json_object(json, path, &view, err);
    if (!code)
        code = mz_json_string(&view, "schema", &schema, err);
    if (!code && strcmp(schema, "ultra_ep_trace_v1") != 0)
        code =
            mz_fail(err, MZ_EINPUT, "%s: schema '%.40s'; ultra_ep_trace_v1 is read", path, schema);
    if (!code)
        code = mz_json_int(&view, "num_global_logical_experts", 1, MZ_EXPERTS_MAX, &experts, err);
    if (!code)
        code = mz_json_int(&view, "chunks", 1, 999999, &in->chunks, err);
    if (!code)
        code = mz_json_int_or(&view, "dropped_records", 0, 0, INT64_MAX, &in->lost, err);
    json_decref(json);
    if (code)
        return code;
    code = mz_import_experts(path, in->options, experts, &in->facts, err);
    if (code)
        return code;
    in->facts.ranks = 1;
    in->row = mz_calloc((size_t)experts, sizeof *in->row);
    in->records.size = sizeof(load_key) + (size_t)experts * sizeof(uint32_t);
    in->record = mz_calloc(1, in->records.size);
    return in->row && in->record ? MZ_OK : mz_fail_nomem(err, "a row of loads");
}

/* "DIR/TRACE.manifest.json" to "DIR/TRACE.chunkNNNNNN.npz". */
static mz_code chunk_path(ultraep_import *in, const char *manifest, int64_t chunk, mz_err *err) {
    static const char ending[] = ".manifest.json";
    size_t length = strlen(manifest), tail = sizeof ending - 1;
    if (length <= tail || strcmp(manifest + length - tail, ending) != 0 ||
        length + 32 > sizeof in->path)
        return mz_fail(
            err, MZ_EINPUT,
            "%s: the name must be TRACE.manifest.json, beside its chunks TRACE.chunk*.npz",
            manifest);
    snprintf(in->path, sizeof in->path, "%.*s.chunk%06lld.npz", (int)(length - tail), manifest,
             (long long)chunk);
    return MZ_OK;
}

/* An array [rows] of whole numbers into *values. */
static mz_code read_column(ultraep_import *in, const mz_zip *zip, const char *name, int64_t rows,
                           int64_t **values, size_t *room, mz_err *err) {
    mz_tensor tensor;
    mz_code code = mz_zip_npy(zip, name, &tensor, err);
    if (code)
        return code;
    if (tensor.shape.dims != 1 || tensor.shape.extent[0] != rows)
        return mz_fail(err, MZ_EINPUT, "%s: %s does not hold %lld numbers", in->path, name,
                       (long long)rows);
    if (!mz_grow((void **)values, room, (size_t)rows + 1, sizeof **values))
        return mz_fail_nomem(err, "a chunk");
    code = mz_tensor_read_int(zip->file, &tensor, name, 0, rows, *values, err);
    for (int64_t i = 0; i < rows && !code; i++)
        if ((*values)[i] < 0)
            code =
                mz_fail(err, MZ_EINPUT, "%s: %s[%lld] is negative", in->path, name, (long long)i);
    return code;
}

/* Row in->row of record `index` to the spill. */
static mz_code add_record(ultraep_import *in, int64_t index, mz_err *err) {
    const load_key key = {
        .step = in->step[index], .layer = in->layer[index], .record = index, .chunk = in->chunk};
    bool any = false;
    memcpy(in->record, &key, sizeof key);
    for (int32_t e = 0; e < in->facts.experts; e++) {
        uint32_t load = (uint32_t)in->row[e];
        if (in->row[e] < 0 || in->row[e] > UINT32_MAX)
            return mz_fail(err, MZ_EINPUT,
                           "step %lld, layer %lld, expert %d: %lld is no count (0 to 2^32 - 1)",
                           (long long)key.step, (long long)key.layer, e, (long long)in->row[e]);
        any = any || load > 0;
        memcpy(in->record + sizeof key + (size_t)e * sizeof load, &load, sizeof load);
    }
    mz_code code = any ? mz_labels_add(&in->gather.label, key.layer, err) : MZ_OK;
    if (!code && in->gather.label.count > MZ_LAYERS_MAX)
        code = mz_fail(err, MZ_EINPUT, "more than %d layers", MZ_LAYERS_MAX);
    return code ? code : mz_spill_add(&in->records, in->record, err);
}

static mz_code read_records(ultraep_import *in, const mz_zip *zip, mz_err *err) {
    mz_tensor loads;
    mz_code code = mz_zip_npy(zip, "pre_logical_loads", &loads, err);
    if (code)
        return code;
    if (loads.shape.dims != 2 || loads.shape.extent[1] != in->facts.experts)
        return mz_fail(err, MZ_EINPUT, "%s: pre_logical_loads is not [records, %d]", in->path,
                       in->facts.experts);
    int64_t rows = loads.shape.extent[0];
    code = read_column(in, zip, "layers", rows, &in->layer, &in->layer_room, err);
    if (!code)
        code = read_column(in, zip, "microbatches", rows, &in->step, &in->step_room, err);
    for (int64_t i = 0; i < rows && !code; i++) {
        code = mz_tensor_read_int(zip->file, &loads, "pre_logical_loads", i * in->facts.experts,
                                  in->facts.experts, in->row, err);
        if (!code)
            code = add_record(in, i, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, "%s: record %lld", in->path, (long long)i);
    }
    return code;
}

static mz_code read_chunk(ultraep_import *in, mz_err *err) {
    mz_datafile *file = NULL;
    mz_zip zip = {0};
    mz_code code = mz_datafile_open(in->path, &file, err);
    if (!code)
        code = mz_zip_open(file, &zip, err);
    if (!code)
        code = read_records(in, &zip, err);
    mz_zip_close(&zip);
    mz_datafile_close(&file);
    return code;
}

/* One record into the gather, whose step ends where the record's begins. */
static mz_code take_record(ultraep_import *in, const unsigned char *record, int64_t *step,
                           mz_err *err) {
    load_key key;
    memcpy(&key, record, sizeof key);
    if (key.step != *step && in->gather.entries > 0) {
        mz_code code = mz_gather_write(&in->gather, in->writer, in->report, err);
        if (code)
            return code;
    }
    *step = key.step;
    for (int32_t e = 0; e < in->facts.experts; e++) {
        uint32_t load;
        memcpy(&load, record + sizeof key + (size_t)e * sizeof load, sizeof load);
        in->row[e] = load;
    }
    const mz_gather_key call = {.step = key.step, .layer = key.layer};
    mz_code code = mz_rows_count(&in->gather, &call, in->row, in->options, in->report, err);
    if (code == MZ_EINPUT)
        mz_err_prefix(err, "chunk %lld, record %lld", (long long)key.chunk, (long long)key.record);
    return code ? code : mz_import_stopped(in->app, err);
}

static mz_code write_steps(ultraep_import *in, mz_err *err) {
    const void *record = NULL;
    int64_t step = 0;
    mz_code code = mz_spill_rewind(&in->records, err);
    while (!code) {
        code = mz_spill_next(&in->records, &record, err);
        if (code || !record)
            break;
        code = take_record(in, record, &step, err);
    }
    return code ? code : mz_gather_write(&in->gather, in->writer, in->report, err);
}

static mz_code write_trace(ultraep_import *in, const char *manifest, const char *output,
                           const mz_trace_write_options *write, mz_err *err) {
    if (in->gather.label.count == 0)
        return mz_fail(err, MZ_EINPUT, "%s: all loads are 0", manifest);
    mz_code code = mz_gather_settle_labels(&in->gather, err);
    mz_import_note(&in->facts, "counts=whole expert group; step=micro-batch; lost records=%lld",
                   (long long)in->lost);
    if (!code)
        code = mz_trace_create(output, &in->facts, write, &in->writer, err);
    if (!code)
        code = write_steps(in, err);
    if (code == MZ_EINPUT)
        mz_err_prefix(err, "%s", manifest);
    return code ? code : mz_trace_writer_close(&in->writer, err);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "UltraEP load profile",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_COUNTS,
                                                .meaning = MZ_STEP_FORWARD};
    ultraep_import *in = mz_calloc(1, sizeof *in);
    if (!in)
        return mz_fail_nomem(err, "the importer");
    in->app = app;
    in->options = options;
    in->report = report;
    in->gather.facts = &in->facts;
    in->records = mz_spill_make(0, by_step, output);
    mz_code code = count == 1 ? mz_import_facts(app, options, &defaults, &in->facts, err)
                              : mz_fail(err, MZ_EINPUT,
                                        "ultraep takes one manifest (its chunks lie beside it), "
                                        "got %d files",
                                        count);
    if (!code)
        code = read_manifest(in, files[0], err);
    for (int64_t c = 0; c < in->chunks && !code; c++) {
        in->chunk = c;
        code = chunk_path(in, files[0], c, err);
        if (!code)
            code = read_chunk(in, err);
        if (!code)
            code = mz_import_stopped(app, err);
    }
    if (!code)
        code = write_trace(in, files[0], output, write, err);
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    mz_gather_free(&in->gather);
    mz_spill_free(&in->records);
    free(in->record);
    free(in->layer);
    free(in->step);
    free(in->row);
    free(in);
    return code;
}

const mz_importer mz_import_ultraep = {
    .name = "ultraep",
    .summary = "UltraEP load profile: TRACE.manifest.json beside its .npz chunks; needs --top-k",
    .answers = "experts top-k tokens dropped",
    .recognise = recognise,
    .import = import_files,
};
