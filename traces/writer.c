#include "traces/trace.h"

#include "common/base/arena.h"
#include "common/io/input.h"
#include "traces/chunk.h"
#include "traces/schema.h"

#include <hdf5.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_TARGET = 1 << 20, PENDING_CALLS = 1 << 16 };

/* One dataset: whole chunks go to the file as they fill, the rest waits here. */
typedef struct column {
    hid_t dataset; /* -1: the trace does not hold it */
    mz_elem elem;
    size_t row_size; /* bytes */
    int64_t width;   /* elements of a row */
    int64_t chunk_rows;
    mz_pipeline pipeline;
    uint8_t *buffer; /* one chunk */
    int64_t filled;  /* rows in the buffer */
    int64_t written; /* rows in whole chunks of the file */
    int64_t extent;  /* rows that the dataset has now */
} column;

/* A (step, micro-batch, rank) has one token range, whatever the layer. */
typedef struct range {
    int64_t begin, tokens;
    int64_t step;
    int32_t micro_batch;
    bool set;
} range;

struct mz_trace_writer {
    mz_output output;
    mz_trace_facts facts;
    mz_trace_write_options options;
    hid_t file;
    column col[MZ_COLUMNS];
    mz_codec *codec;
    mz_trace_call *pending; /* calls whose bulk data may still wait in buffers */
    size_t pending_count, pending_cap;
    mz_trace_call last_call;
    int64_t calls;
    range *ranges; /* [ranks] */
    int64_t sequence_end;
    int64_t last_step;
    bool broken; /* a write failed: nothing more may follow */
};

static mz_code hdf5_failed(mz_trace_writer *writer, const char *doing, mz_err *err) {
    writer->broken = true;
    return mz_fail(err, MZ_EINTERNAL, "%s: HDF5 failed while %s (disk full?)", writer->output.path,
                   doing);
}

/* ---- creation -------------------------------------------------------------------------------- */

static bool put_text(hid_t object, const char *name, const char *text) {
    hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    size_t size = strlen(text) + 1;
    hid_t attr = -1;
    if (H5Tset_size(type, size) >= 0 && H5Tset_cset(type, H5T_CSET_UTF8) >= 0)
        attr = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    bool ok = attr >= 0 && H5Awrite(attr, type, text) >= 0;
    H5Aclose(attr);
    H5Sclose(space);
    H5Tclose(type);
    return ok;
}

static bool put_int(hid_t object, const char *name, int64_t value) {
    hid_t space = H5Screate(H5S_SCALAR);
    hid_t attr = H5Acreate2(object, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
    bool ok = attr >= 0 && H5Awrite(attr, H5T_NATIVE_INT64, &value) >= 0;
    H5Aclose(attr);
    H5Sclose(space);
    return ok;
}

static bool put_facts(hid_t file, hid_t model, hid_t run, const mz_trace_facts *f) {
    return put_text(file, "format", "mizan-trace") &&
           put_int(file, "format_version", MZ_TRACE_VERSION) && put_int(file, "complete", 0) &&
           put_text(file, "producer", f->producer) && put_text(file, "source", f->source) &&
           put_text(file, "licence", f->licence) && put_text(model, "name", f->name) &&
           put_text(model, "router", f->router) && put_text(model, "group_note", f->group_note) &&
           put_int(model, "layers", f->layers) && put_int(model, "model_layers", f->model_layers) &&
           put_int(model, "experts", f->experts) && put_int(model, "top_k", f->top_k) &&
           put_int(model, "shared_experts", f->shared_experts) &&
           put_int(model, "hidden", f->hidden) && put_int(model, "intermediate", f->intermediate) &&
           put_int(model, "weights_normalized", f->weights_normalized) &&
           put_text(run, "kind", mz_kind_names[f->kind]) &&
           put_text(run, "phase", mz_phase_names[f->phase]) &&
           put_text(run, "step", mz_step_names[f->step_meaning]) &&
           put_int(run, "ranks", f->ranks) && put_int(run, "sequence_length", f->sequence_length) &&
           put_int(run, "step_stride", f->step_stride) &&
           (!f->import_notes[0] || put_text(run, "import_notes", f->import_notes));
}

static hid_t make_group(hid_t file, const char *path) {
    hid_t plist = H5Pcreate(H5P_GROUP_CREATE);
    H5Pset_obj_track_times(plist, 0);
    hid_t group = H5Gcreate2(file, path, H5P_DEFAULT, plist, H5P_DEFAULT);
    H5Pclose(plist);
    return group;
}

static hid_t half_type(void) {
    hid_t type = H5Tcopy(H5T_IEEE_F32LE);
    if (H5Tset_fields(type, 15, 10, 5, 0, 10) < 0 || H5Tset_size(type, 2) < 0 ||
        H5Tset_ebias(type, 15) < 0)
        return -1;
    return type;
}

static hid_t file_type(mz_elem elem) {
    switch (elem) {
    case MZ_ELEM_U8:
        return H5Tcopy(H5T_STD_U8LE);
    case MZ_ELEM_U16:
        return H5Tcopy(H5T_STD_U16LE);
    case MZ_ELEM_U32:
        return H5Tcopy(H5T_STD_U32LE);
    case MZ_ELEM_I32:
        return H5Tcopy(H5T_STD_I32LE);
    case MZ_ELEM_I64:
        return H5Tcopy(H5T_STD_I64LE);
    case MZ_ELEM_F16:
        return half_type();
    case MZ_ELEM_F32:
        return H5Tcopy(H5T_IEEE_F32LE);
    case MZ_ELEM_F64:
        return H5Tcopy(H5T_IEEE_F64LE);
    default:
        return -1;
    }
}

static mz_elem stored_elem(mz_column_id id, const mz_trace_writer *writer) {
    if (id == MZ_COL_EXPERT)
        return writer->facts.experts <= 256 ? MZ_ELEM_U8 : MZ_ELEM_U16;
    if (id == MZ_COL_WEIGHT && writer->options.half_weights)
        return MZ_ELEM_F16;
    return mz_columns[id].elem;
}

static bool set_filters(hid_t plist, column *col, int deflate) {
    mz_pipeline *p = &col->pipeline;
    p->elem_size = mz_elem_size(col->elem);
    bool ok = true;
    if (deflate > 0) {
        p->filter[p->count++] = MZ_FILTER_SHUFFLE;
        p->filter[p->count++] = MZ_FILTER_DEFLATE;
        ok = H5Pset_shuffle(plist) >= 0 && H5Pset_deflate(plist, (unsigned)deflate) >= 0;
    }
    p->filter[p->count++] = MZ_FILTER_FLETCHER32;
    return ok && H5Pset_fletcher32(plist) >= 0;
}

static hid_t create_dataset(hid_t file, const char *path, column *col, int dims, int deflate) {
    hsize_t now[2] = {0, (hsize_t)col->width}, most[2] = {H5S_UNLIMITED, (hsize_t)col->width};
    hsize_t chunk[2] = {(hsize_t)col->chunk_rows, (hsize_t)col->width};
    hid_t space = H5Screate_simple(dims, now, most), type = file_type(col->elem);
    hid_t plist = H5Pcreate(H5P_DATASET_CREATE), dataset = -1;
    if (H5Pset_chunk(plist, dims, chunk) >= 0 && H5Pset_obj_track_times(plist, 0) >= 0 &&
        H5Pset_fill_time(plist, H5D_FILL_TIME_NEVER) >= 0 && set_filters(plist, col, deflate))
        dataset = H5Dcreate2(file, path, type, space, H5P_DEFAULT, plist, H5P_DEFAULT);
    H5Pclose(plist);
    H5Tclose(type);
    H5Sclose(space);
    return dataset;
}

static mz_code create_column(mz_trace_writer *writer, mz_column_id id, mz_err *err) {
    const mz_column *about = &mz_columns[id];
    column *col = &writer->col[id];
    bool counts = id == MZ_COL_COUNTS;
    col->elem = stored_elem(id, writer);
    col->width = counts ? writer->facts.experts : 1;
    col->row_size = mz_elem_size(col->elem) * (size_t)col->width;
    col->chunk_rows = about->chunk_rows ? about->chunk_rows : CHUNK_TARGET / (int64_t)col->row_size;
    if (col->chunk_rows == 0)
        col->chunk_rows = 1;
    col->buffer = mz_calloc((size_t)col->chunk_rows, col->row_size);
    if (!col->buffer)
        return mz_fail_nomem(err, "a buffer of the trace writer");
    char path[64];
    snprintf(path, sizeof path, "%s/%s", about->group[1] ? about->group : "", about->name);
    col->dataset = create_dataset(writer->file, path, col, counts ? 2 : 1, writer->options.deflate);
    if (col->dataset < 0 || !put_text(col->dataset, "units", about->units) ||
        !put_text(col->dataset, "long_name", about->long_name))
        return hdf5_failed(writer, "creating a dataset", err);
    return MZ_OK;
}

static mz_code create_content(mz_trace_writer *writer, mz_err *err) {
    const mz_trace_facts *f = &writer->facts;
    const char *const names[] = {"/model", "/run",  "/calls",    "/steps",
                                 "/pairs", "/rows", "/sequences"};
    bool wanted[] = {true,
                     true,
                     true,
                     true,
                     f->kind == MZ_TRACE_PAIRS,
                     mz_column_wanted(MZ_COL_ROW_PAIRS, f) ||
                         mz_column_wanted(MZ_COL_GRAD_NORM2, f) ||
                         mz_column_wanted(MZ_COL_INPUT_NORM2, f),
                     f->has_sequences};
    hid_t group[7];
    bool ok = true;
    for (int i = 0; i < 7; i++) {
        group[i] = wanted[i] ? make_group(writer->file, names[i]) : -1;
        ok = ok && (!wanted[i] || group[i] >= 0);
    }
    ok = ok && put_facts(writer->file, group[0], group[1], f);
    for (int i = 0; i < 7; i++)
        if (group[i] >= 0)
            H5Gclose(group[i]);
    if (!ok)
        return hdf5_failed(writer, "writing the attributes", err);
    for (int id = 0; id < MZ_COLUMNS; id++) {
        if (!mz_column_wanted(id, f))
            continue;
        mz_code code = create_column(writer, id, err);
        if (code != MZ_OK)
            return code;
    }
    if (H5Fstart_swmr_write(writer->file) < 0)
        return hdf5_failed(writer, "starting to write", err);
    return MZ_OK;
}

static mz_code create_file(mz_trace_writer *writer, mz_err *err) {
    hid_t access = H5Pcreate(H5P_FILE_ACCESS), creation = H5Pcreate(H5P_FILE_CREATE);
    /* What SWMR needs, and what every library since 1.10 reads, whichever one writes. */
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
    H5Pset_obj_track_times(creation, 0);
    writer->file = H5Fcreate(writer->output.partial, H5F_ACC_TRUNC, creation, access);
    H5Pclose(access);
    H5Pclose(creation);
    if (writer->file < 0)
        return hdf5_failed(writer, "creating the file", err);
    return MZ_OK;
}

static mz_code text_fault(const char *what, const char *text, size_t size, mz_err *err) {
    if (!memchr(text, 0, size))
        return mz_fail(err, MZ_EINPUT, "trace facts: %s is not terminated", what);
    if (!mz_text_is_clean(text))
        return mz_fail(err, MZ_EINPUT,
                       "trace facts: %s must be UTF-8 text without control characters, not '%s'",
                       what, text);
    return MZ_OK;
}

static mz_code check_numbers(const mz_trace_facts *f, mz_err *err) {
    const struct {
        const char *what;
        int64_t value, low, high;
    } rules[] = {{"layers", f->layers, 1, MZ_LAYERS_MAX},
                 {"model_layers", f->model_layers, 0, INT32_MAX},
                 {"experts", f->experts, 1, MZ_EXPERTS_MAX},
                 {"top_k", f->top_k, 0, f->experts < 65535 ? f->experts : 65535},
                 {"ranks", f->ranks, 1, MZ_RANKS_MAX},
                 {"shared_experts", f->shared_experts, 0, INT32_MAX},
                 {"hidden", f->hidden, 0, INT32_MAX},
                 {"intermediate", f->intermediate, 0, INT32_MAX},
                 {"sequence_length", f->sequence_length, 0, INT64_MAX},
                 {"step_stride", f->step_stride, 1, INT64_MAX},
                 {"kind", f->kind, 0, 1},
                 {"phase", f->phase, 0, 2},
                 {"step", f->step_meaning, 0, 2}};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (rules[i].value < rules[i].low || rules[i].value > rules[i].high)
            return mz_fail(err, MZ_EINPUT,
                           "trace facts: %s is %" PRId64 ", must be %" PRId64 " to %" PRId64,
                           rules[i].what, rules[i].value, rules[i].low, rules[i].high);
    return MZ_OK;
}

static mz_code check_facts(const mz_trace_facts *f, mz_err *err) {
    mz_code code = check_numbers(f, err);
    if (code == MZ_OK)
        code = text_fault("name", f->name, sizeof f->name, err);
    if (code == MZ_OK)
        code = text_fault("source", f->source, sizeof f->source, err);
    if (code == MZ_OK)
        code = text_fault("licence", f->licence, sizeof f->licence, err);
    if (code == MZ_OK)
        code = text_fault("producer", f->producer, sizeof f->producer, err);
    if (code == MZ_OK)
        code = text_fault("router", f->router, sizeof f->router, err);
    if (code == MZ_OK)
        code = text_fault("group_note", f->group_note, sizeof f->group_note, err);
    if (code == MZ_OK)
        code = text_fault("import_notes", f->import_notes, sizeof f->import_notes, err);
    return code;
}

mz_code mz_trace_create(const char *path, const mz_trace_facts *facts,
                        const mz_trace_write_options *options, mz_trace_writer **out, mz_err *err) {
    *out = NULL;
    mz_code code = check_facts(facts, err);
    if (code != MZ_OK)
        return code;
    mz_trace_writer *writer = mz_calloc(1, sizeof *writer);
    if (!writer)
        return mz_fail_nomem(err, "a trace writer");
    writer->facts = *facts;
    writer->options = options ? *options : (mz_trace_write_options){.deflate = 4};
    writer->file = -1;
    writer->last_step = -1;
    for (int i = 0; i < MZ_COLUMNS; i++)
        writer->col[i].dataset = -1;
    writer->codec = mz_codec_new(writer->options.deflate);
    writer->ranges = mz_calloc((size_t)facts->ranks, sizeof *writer->ranges);
    H5dont_atexit(); /* it follows freed memory where closing a file failed for want of room */
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    if (writer->options.deflate < 0 || writer->options.deflate > 9)
        code = mz_fail(err, MZ_EINPUT, "deflate level %d, must be 0 to 9", writer->options.deflate);
    else if (!writer->codec || !writer->ranges)
        code = mz_fail_nomem(err, "a trace writer");
    if (code == MZ_OK)
        code = mz_output_begin(&writer->output, path, err);
    if (code == MZ_OK)
        code = create_file(writer, err);
    if (code == MZ_OK)
        code = create_content(writer, err);
    if (code != MZ_OK)
        mz_trace_writer_abandon(&writer);
    *out = writer;
    return code;
}

/* ---- columns --------------------------------------------------------------------------------- */

static mz_code set_extent(mz_trace_writer *writer, column *col, mz_err *err) {
    int64_t rows = col->written + col->filled;
    if (rows == col->extent)
        return MZ_OK;
    hsize_t size[2] = {(hsize_t)rows, (hsize_t)col->width};
    if (H5Dset_extent(col->dataset, size) < 0)
        return hdf5_failed(writer, "extending a dataset", err);
    col->extent = rows;
    return MZ_OK;
}

/* Writes the chunk in the buffer, whole or padded with zeros; a padded one is written again later.
 */
static mz_code write_chunk(mz_trace_writer *writer, column *col, mz_err *err) {
    if (col->filled == 0)
        return MZ_OK;
    size_t used = (size_t)col->filled * col->row_size, size, whole;
    whole = (size_t)col->chunk_rows * col->row_size;
    memset(col->buffer + used, 0, whole - used);
    const uint8_t *data;
    uint32_t mask;
    if (!mz_chunk_encode(writer->codec, &col->pipeline, col->buffer, whole, &data, &size, &mask)) {
        writer->broken = true;
        return mz_fail_nomem(err, "a chunk of the trace");
    }
    mz_code code = set_extent(writer, col, err);
    hsize_t offset[2] = {(hsize_t)col->written, 0};
    if (code == MZ_OK && H5Dwrite_chunk(col->dataset, H5P_DEFAULT, mask, offset, size, data) < 0)
        code = hdf5_failed(writer, "writing a chunk", err);
    if (code == MZ_OK && col->filled == col->chunk_rows) {
        col->written += col->filled;
        col->filled = 0;
    }
    return code;
}

static void narrow(const column *col, const void *in, int64_t first, int64_t n, uint8_t *out) {
    size_t size = mz_elem_size(col->elem);
    if (col->elem == MZ_ELEM_U8) {
        const uint16_t *ids = (const uint16_t *)in + first;
        for (int64_t i = 0; i < n; i++)
            out[i] = (uint8_t)ids[i];
    } else if (col->elem == MZ_ELEM_F16) {
        const float *values = (const float *)in + first;
        for (int64_t i = 0; i < n; i++) {
            uint16_t half = mz_half_from_float(values[i]);
            memcpy(out + 2 * (size_t)i, &half, 2);
        }
    } else {
        memcpy(out, (const uint8_t *)in + (size_t)first * size, (size_t)n * size);
    }
}

/* Appends n rows. Wide memory types: ids as uint16, weights as float, everything else as stored. */
static mz_code append(mz_trace_writer *writer, mz_column_id id, const void *data, int64_t n,
                      mz_err *err) {
    column *col = &writer->col[id];
    for (int64_t done = 0; done < n;) {
        int64_t room = col->chunk_rows - col->filled;
        int64_t take = n - done < room ? n - done : room;
        narrow(col, data, done * col->width, take * col->width,
               col->buffer + (size_t)col->filled * col->row_size);
        col->filled += take;
        done += take;
        if (col->filled < col->chunk_rows)
            break;
        mz_code code = write_chunk(writer, col, err);
        if (code != MZ_OK)
            return code;
    }
    return MZ_OK;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static int compare_calls(const mz_trace_call *a, const mz_trace_call *b) {
    if (a->step != b->step)
        return a->step < b->step ? -1 : 1;
    if (a->micro_batch != b->micro_batch)
        return a->micro_batch < b->micro_batch ? -1 : 1;
    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

static mz_code call_fault(const mz_trace_call_data *call, mz_err *err, const char *what) {
    return mz_fail(err, MZ_EINPUT,
                   "call of step %" PRId64 ", micro-batch %d, layer %d, rank %d: %s", call->step,
                   call->micro_batch, call->layer, call->rank, what);
}

static mz_code check_place(mz_trace_writer *writer, const mz_trace_call_data *call, mz_err *err) {
    const mz_trace_facts *f = &writer->facts;
    mz_trace_call now = {.step = call->step,
                         .micro_batch = call->micro_batch,
                         .layer = call->layer,
                         .rank = call->rank};
    if (call->step < 0 || call->micro_batch < 0)
        return call_fault(call, err, "step and micro-batch must not be negative");
    if (call->layer < 0 || call->layer >= f->layers)
        return call_fault(call, err, "the layer is outside the model's MoE layers");
    if (call->rank < 0 || call->rank >= f->ranks)
        return call_fault(call, err, "the rank is outside the trace's ranks");
    if (writer->calls > 0 && compare_calls(&writer->last_call, &now) >= 0)
        return call_fault(call, err,
                          "calls must come once each, ordered by step, micro-batch, layer, rank");
    if (call->tokens < 0 || call->pairs < 0 || call->token_begin < 0 ||
        call->tokens > INT64_MAX - call->token_begin)
        return call_fault(call, err, "tokens, pairs and token_begin must not be negative");
    range *r = &writer->ranges[call->rank];
    bool same = r->set && r->step == call->step && r->micro_batch == call->micro_batch;
    if (same && (r->begin != call->token_begin || r->tokens != call->tokens))
        return call_fault(call, err, "its token range differs from an earlier layer's");
    *r = (range){call->token_begin, call->tokens, call->step, call->micro_batch, true};
    return MZ_OK;
}

static mz_code check_norms(const mz_trace_call_data *call, const float *values, int64_t n,
                           float most, const char *what, mz_err *err) {
    for (int64_t i = 0; i < n; i++)
        if (!(values[i] >= 0 && values[i] <= most)) {
            char text[96];
            snprintf(text, sizeof text, "%s %" PRId64 " is %g, must be 0 to %g", what, i,
                     (double)values[i], (double)most);
            return call_fault(call, err, text);
        }
    return MZ_OK;
}

static mz_code check_pairs(const mz_trace_writer *writer, const mz_trace_call_data *call,
                           mz_err *err) {
    const mz_trace_facts *f = &writer->facts;
    char text[96];
    if (f->top_k > 0 &&
        (call->tokens > INT64_MAX / f->top_k || call->pairs != call->tokens * f->top_k))
        return call_fault(call, err, "pairs differ from tokens times top_k");
    bool missing = (call->pairs && (!call->expert || (f->has_weight && !call->weight) ||
                                    (f->has_hidden_norm2 && !call->hidden_norm2))) ||
                   (call->tokens && ((f->top_k == 0 && !call->token_pairs) ||
                                     (f->has_grad_norm2 && !call->grad_norm2) ||
                                     (f->has_input_norm2 && !call->input_norm2)));
    if (missing)
        return call_fault(call, err, "an array that the facts announce is missing");
    int64_t sum = 0;
    for (int64_t i = 0; f->top_k == 0 && i < call->tokens; i++)
        sum += call->token_pairs[i];
    if (f->top_k == 0 && sum != call->pairs)
        return call_fault(call, err, "the tokens' pairs do not add up to the call's pairs");
    for (int64_t i = 0; i < call->pairs; i++)
        if (call->expert[i] >= f->experts) {
            snprintf(text, sizeof text, "pair %" PRId64 " names expert %d of %d", i,
                     call->expert[i], f->experts);
            return call_fault(call, err, text);
        }
    const float most = 3.402823466e38f, most_weight = writer->options.half_weights ? 65504.f : most;
    mz_code code = MZ_OK;
    if (f->has_weight)
        code = check_norms(call, call->weight, call->pairs, most_weight, "weight", err);
    if (code == MZ_OK && f->has_hidden_norm2)
        code = check_norms(call, call->hidden_norm2, call->pairs, most, "hidden_norm2", err);
    if (code == MZ_OK && f->has_grad_norm2)
        code = check_norms(call, call->grad_norm2, call->tokens, most, "grad_norm2", err);
    if (code == MZ_OK && f->has_input_norm2)
        code = check_norms(call, call->input_norm2, call->tokens, most, "input_norm2", err);
    return code;
}

static mz_code write_pairs(mz_trace_writer *writer, const mz_trace_call_data *call, mz_err *err) {
    const struct {
        mz_column_id id;
        const void *data;
        int64_t rows;
    } parts[] = {{MZ_COL_EXPERT, call->expert, call->pairs},
                 {MZ_COL_WEIGHT, call->weight, call->pairs},
                 {MZ_COL_HIDDEN_NORM2, call->hidden_norm2, call->pairs},
                 {MZ_COL_ROW_PAIRS, call->token_pairs, call->tokens},
                 {MZ_COL_GRAD_NORM2, call->grad_norm2, call->tokens},
                 {MZ_COL_INPUT_NORM2, call->input_norm2, call->tokens}};
    mz_code code = check_pairs(writer, call, err);
    for (size_t i = 0; code == MZ_OK && i < sizeof parts / sizeof parts[0]; i++)
        if (writer->col[parts[i].id].dataset >= 0)
            code = append(writer, parts[i].id, parts[i].data, parts[i].rows, err);
    return code;
}

static mz_code write_counts(mz_trace_writer *writer, const mz_trace_call_data *call, mz_err *err) {
    int32_t experts = writer->facts.experts;
    int64_t sum = 0;
    if (!call->count)
        return call_fault(call, err, "an array that the facts announce is missing");
    uint32_t *row = malloc(sizeof *row * (size_t)experts);
    if (!row)
        return mz_fail_nomem(err, "a row of counts");
    mz_code code = MZ_OK;
    for (int32_t e = 0; e < experts && code == MZ_OK; e++) {
        if (call->count[e] < 0 || call->count[e] > UINT32_MAX)
            code = call_fault(call, err, "a count is negative or above 2^32 - 1");
        row[e] = (uint32_t)call->count[e];
        sum += call->count[e];
    }
    if (code == MZ_OK && sum != call->pairs)
        code = call_fault(call, err, "the counts do not add up to the call's pairs");
    if (code == MZ_OK && call->pairs > 0 && call->tokens == 0)
        code = call_fault(call, err, "it has pairs but no tokens");
    if (code == MZ_OK)
        code = append(writer, MZ_COL_COUNTS, row, 1, err);
    free(row);
    return code;
}

mz_code mz_trace_write_call(mz_trace_writer *writer, const mz_trace_call_data *call, mz_err *err) {
    if (writer->broken)
        return mz_fail(err, MZ_EINTERNAL, "%s: an earlier write failed", writer->output.path);
    mz_code code = check_place(writer, call, err);
    if (code != MZ_OK)
        return code;
    if (!mz_grow((void **)&writer->pending, &writer->pending_cap, writer->pending_count + 1,
                 sizeof *writer->pending))
        return mz_fail_nomem(err, "the calls of the trace");
    code = writer->facts.kind == MZ_TRACE_PAIRS ? write_pairs(writer, call, err)
                                                : write_counts(writer, call, err);
    if (code != MZ_OK)
        return code;
    writer->last_call = (mz_trace_call){.step = call->step,
                                        .micro_batch = call->micro_batch,
                                        .layer = call->layer,
                                        .rank = call->rank,
                                        .token_begin = call->token_begin,
                                        .tokens = call->tokens,
                                        .pairs = call->pairs};
    writer->pending[writer->pending_count++] = writer->last_call;
    writer->calls++;
    return writer->pending_count >= PENDING_CALLS ? mz_trace_flush(writer, err) : MZ_OK;
}

mz_code mz_trace_write_sequence(mz_trace_writer *writer, const mz_trace_sequence *sequence,
                                mz_err *err) {
    if (!writer->facts.has_sequences)
        return mz_fail(err, MZ_EINTERNAL, "a sequence for a trace that announces none");
    if (sequence->tokens <= 0 || sequence->token_begin < writer->sequence_end ||
        sequence->tokens > INT64_MAX - sequence->token_begin || sequence->domain < -1)
        return mz_fail(err, MZ_EINPUT,
                       "sequence at token %" PRId64 " (%" PRId64
                       " tokens): sequences must hold tokens and come in order without overlap",
                       sequence->token_begin, sequence->tokens);
    writer->sequence_end = sequence->token_begin + sequence->tokens;
    mz_code code = append(writer, MZ_COL_SEQ_TOKEN_BEGIN, &sequence->token_begin, 1, err);
    if (code == MZ_OK)
        code = append(writer, MZ_COL_SEQ_TOKENS, &sequence->tokens, 1, err);
    if (code == MZ_OK)
        code = append(writer, MZ_COL_SEQ_DOMAIN, &sequence->domain, 1, err);
    return code;
}

mz_code mz_trace_write_step(mz_trace_writer *writer, int64_t step, double loss,
                            double learning_rate, double wall_time, mz_err *err) {
    if (step <= writer->last_step)
        return mz_fail(err, MZ_EINPUT, "step %" PRId64 ": facts of steps must come in order", step);
    writer->last_step = step;
    mz_code code = append(writer, MZ_COL_STEPS_STEP, &step, 1, err);
    if (code == MZ_OK)
        code = append(writer, MZ_COL_LOSS, &loss, 1, err);
    if (code == MZ_OK)
        code = append(writer, MZ_COL_LEARNING_RATE, &learning_rate, 1, err);
    if (code == MZ_OK)
        code = append(writer, MZ_COL_WALL_TIME, &wall_time, 1, err);
    return code;
}

/* ---- flush and close ------------------------------------------------------------------------- */

static mz_code append_call(mz_trace_writer *writer, const mz_trace_call *call, mz_err *err) {
    const void *fields[MZ_CALL_COLUMNS] = {&call->step, &call->micro_batch, &call->layer,
                                           &call->rank, &call->token_begin, &call->tokens,
                                           &call->pairs};
    mz_code code = MZ_OK;
    for (int id = 0; id < MZ_CALL_COLUMNS && code == MZ_OK; id++)
        code = append(writer, id, fields[id], 1, err);
    return code;
}

static mz_code flush_columns(mz_trace_writer *writer, int first, int end, mz_err *err) {
    for (int id = first; id < end; id++) {
        column *col = &writer->col[id];
        if (col->dataset < 0)
            continue;
        mz_code code = write_chunk(writer, col, err);
        if (code == MZ_OK)
            code = set_extent(writer, col, err);
        if (code != MZ_OK)
            return code;
        if (H5Dflush(col->dataset) < 0)
            return hdf5_failed(writer, "flushing a dataset", err);
    }
    return MZ_OK;
}

mz_code mz_trace_flush(mz_trace_writer *writer, mz_err *err) {
    if (writer->broken)
        return mz_fail(err, MZ_EINTERNAL, "%s: an earlier write failed", writer->output.path);
    /* Bulk data first, calls last: a reader never meets a call whose pairs are not there. */
    mz_code code = flush_columns(writer, MZ_CALL_COLUMNS, MZ_COLUMNS, err);
    for (size_t i = 0; i < writer->pending_count && code == MZ_OK; i++)
        code = append_call(writer, &writer->pending[i], err);
    if (code == MZ_OK)
        writer->pending_count = 0;
    if (code == MZ_OK)
        code = flush_columns(writer, 0, MZ_CALL_COLUMNS, err);
    return code;
}

static void free_writer(mz_trace_writer *writer) {
    for (int id = 0; id < MZ_COLUMNS; id++) {
        if (writer->col[id].dataset >= 0)
            H5Dclose(writer->col[id].dataset);
        free(writer->col[id].buffer);
    }
    if (writer->file >= 0)
        H5Fclose(writer->file);
    mz_codec_free(writer->codec);
    free(writer->pending);
    free(writer->ranges);
    free(writer);
}

/* No attribute may change while the file is open for concurrent readers, so the mark of a finished
 * file is set after opening it anew. */
static mz_code mark_complete(mz_trace_writer *writer, mz_err *err) {
    hid_t file = H5Fopen(writer->output.partial, H5F_ACC_RDWR, H5P_DEFAULT);
    hid_t attr = file >= 0 ? H5Aopen(file, "complete", H5P_DEFAULT) : -1;
    int64_t yes = 1;
    bool ok = attr >= 0 && H5Awrite(attr, H5T_NATIVE_INT64, &yes) >= 0;
    if (attr >= 0)
        H5Aclose(attr);
    if (file >= 0 && H5Fclose(file) < 0)
        ok = false;
    return ok ? MZ_OK : hdf5_failed(writer, "finishing the file", err);
}

static mz_code close_datasets(mz_trace_writer *writer, mz_err *err) {
    bool ok = true;
    for (int id = 0; id < MZ_COLUMNS; id++) {
        if (writer->col[id].dataset >= 0 && H5Dclose(writer->col[id].dataset) < 0)
            ok = false;
        writer->col[id].dataset = -1;
    }
    if (H5Fclose(writer->file) < 0)
        ok = false;
    writer->file = -1;
    return ok ? MZ_OK : hdf5_failed(writer, "closing the file", err);
}

mz_code mz_trace_writer_close(mz_trace_writer **writer, mz_err *err) {
    mz_trace_writer *w = *writer;
    if (!w)
        return MZ_OK;
    mz_code code = mz_trace_flush(w, err);
    if (code == MZ_OK)
        code = close_datasets(w, err);
    if (code == MZ_OK)
        code = mark_complete(w, err);
    if (code == MZ_OK)
        code = mz_output_commit(&w->output, err);
    if (code != MZ_OK) {
        mz_trace_writer_abandon(writer);
        return code;
    }
    *writer = NULL;
    free_writer(w);
    return MZ_OK;
}

void mz_trace_writer_abandon(mz_trace_writer **writer) {
    mz_trace_writer *w = *writer;
    *writer = NULL;
    if (!w)
        return;
    mz_output output = w->output;
    free_writer(w);
    mz_output_abandon(&output);
}
