/* Datasets of an open trace: description, and decoded chunks on demand. */
#include "traces/reader.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

const char *mz_column_path(mz_column_id id, char buffer[64]) {
    const mz_column *column = &mz_columns[id];
    snprintf(buffer, 64, "%s/%s", column->group[1] ? column->group : "", column->name);
    return buffer;
}

/* ---- description ----------------------------------------------------------------------------- */

static mz_code check_filters(const mz_dataset *set, const char *name, mz_pipeline *pipeline,
                             mz_faults *faults, bool *fine) {
    unsigned seen = 0;
    *fine = false;
    for (int i = 0; i < set->filters; i++) {
        int32_t filter = i < MZ_SERVER_FILTERS ? set->filter[i] : 0;
        if (filter < MZ_FILTER_DEFLATE || filter > MZ_FILTER_FLETCHER32 || seen >> filter & 1)
            return mz_fault(faults,
                            "%s: filter %d (number %d) is not one of shuffle, deflate and "
                            "Fletcher-32, once each: write it with these",
                            name, i, filter);
        seen |= 1u << filter;
        pipeline->filter[i] = filter;
    }
    if (!(seen >> MZ_FILTER_FLETCHER32 & 1))
        return mz_fault(faults, "%s: has no Fletcher-32 checksums: write it with them", name);
    pipeline->count = set->filters;
    *fine = true;
    return MZ_OK;
}

static void accepted_types(unsigned accepts, char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int e = 1; e <= MZ_ELEM_F64; e++)
        if (accepts >> e & 1)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "",
                                     mz_elem_name((mz_elem)e));
}

static mz_code check_type(mz_column_id id, const mz_dataset *set, const char *name,
                          mz_faults *faults, bool *fine) {
    char accepted[128];
    *fine = mz_columns[id].accepts >> set->elem & 1 && set->elem != MZ_ELEM_OTHER;
    if (*fine)
        return MZ_OK;
    accepted_types(mz_columns[id].accepts, accepted, sizeof accepted);
    return mz_fault(faults, "%s: holds %s, must be one of %s (little-endian)", name,
                    set->elem ? mz_elem_name(set->elem) : set->other_type, accepted);
}

static mz_code check_shape(const mz_trace *trace, mz_column_id id, const mz_dataset *set,
                           const char *name, mz_faults *faults, bool *fine) {
    int dims = id == MZ_COL_COUNTS ? 2 : 1;
    int64_t width = dims == 2 ? trace->facts.experts : 1;
    int64_t elem = (int64_t)mz_elem_size(set->elem);
    *fine = false;
    if (set->dims != dims || (dims == 2 && set->dim[1] != width))
        return dims == 1 ? mz_fault(faults, "%s: has %d dimensions, must have 1", name, set->dims)
                         : mz_fault(faults, "%s: must have the shape [calls][%" PRId64 " experts]",
                                    name, width);
    if (!set->chunked || !set->whole_edges)
        return mz_fault(faults, "%s: must be stored in chunks, all of them filtered", name);
    if (set->chunk[0] < 1 || (dims == 2 && set->chunk[1] != width) ||
        set->chunk[0] > MZ_CHUNK_MAX / (elem * width))
        return mz_fault(faults, "%s: a chunk must hold whole rows and at most %d bytes", name,
                        MZ_CHUNK_MAX);
    /* Deflate shrinks at most 1032 times. */
    if (set->dim[0] < 0 || set->stored > trace->file_size ||
        set->dim[0] / 1100 > trace->file_size / (elem * width))
        return mz_fault(faults, "%s: claims %" PRId64 " rows, more than %" PRId64 " bytes can hold",
                        name, set->dim[0], trace->file_size);
    *fine = true;
    return MZ_OK;
}

static void set_up(mz_column_reader *col, mz_column_id id, const mz_dataset *set, int64_t width) {
    col->elem = set->elem;
    col->rows = set->dim[0];
    col->width = id == MZ_COL_COUNTS ? width : 1;
    col->row_size = mz_elem_size(set->elem) * (size_t)col->width;
    col->chunk_rows = set->chunk[0];
    col->pipeline.elem_size = mz_elem_size(set->elem);
    int64_t fit = MZ_CACHE_BYTES / (col->chunk_rows * (int64_t)col->row_size);
    col->entries = fit < 1 ? 1 : fit > MZ_CACHE_ENTRIES ? MZ_CACHE_ENTRIES : (int)fit;
    col->usable = true;
}

static mz_code open_column(mz_trace *trace, mz_column_id id, mz_faults *faults, mz_err *err) {
    mz_column_reader *col = &trace->col[id];
    mz_dataset set;
    char name[64];
    bool fine = false;
    mz_code code = mz_server_dataset(trace->server, id, &set, err);
    if (code != MZ_OK)
        return code;
    mz_column_path(id, name);
    col->present = set.exists;
    col->asked = col->decoded = -1;
    for (int i = 0; i < MZ_CACHE_ENTRIES; i++)
        col->cache[i].chunk = -1;
    if (!set.exists)
        return MZ_OK;
    code = check_type(id, &set, name, faults, &fine);
    if (code == MZ_OK && fine)
        code = check_shape(trace, id, &set, name, faults, &fine);
    if (code == MZ_OK && fine)
        code = check_filters(&set, name, &col->pipeline, faults, &fine);
    if (code == MZ_OK && fine)
        set_up(col, id, &set, trace->facts.experts);
    return code;
}

static bool may_be_absent(const mz_trace *trace, mz_column_id id) {
    bool pairs = trace->facts.kind == MZ_TRACE_PAIRS;
    switch (id) {
    case MZ_COL_EXPERT:
        return !pairs;
    case MZ_COL_ROW_PAIRS:
        return !pairs || trace->facts.top_k > 0;
    case MZ_COL_COUNTS:
        return pairs;
    case MZ_COL_SEQ_TOKENS:
        return !trace->col[MZ_COL_SEQ_TOKEN_BEGIN].present;
    default:
        return id >= MZ_CALL_COLUMNS;
    }
}

mz_code mz_columns_open(mz_trace *trace, mz_faults *faults, mz_err *err) {
    mz_trace_facts *facts = &trace->facts;
    mz_code code = MZ_OK;
    char name[64];
    for (int id = 0; id < MZ_COLUMNS && code == MZ_OK; id++) {
        code = open_column(trace, id, faults, err);
        if (code == MZ_OK && !trace->col[id].present && !may_be_absent(trace, id))
            code = mz_fault(faults, "%s: is missing", mz_column_path(id, name));
        if (!trace->col[id].usable && !may_be_absent(trace, id))
            trace->consistent = false;
    }
    bool pairs = facts->kind == MZ_TRACE_PAIRS;
    facts->has_weight = pairs && trace->col[MZ_COL_WEIGHT].present;
    facts->has_hidden_norm2 = pairs && trace->col[MZ_COL_HIDDEN_NORM2].present;
    facts->has_grad_norm2 = pairs && trace->col[MZ_COL_GRAD_NORM2].present;
    facts->has_input_norm2 = pairs && trace->col[MZ_COL_INPUT_NORM2].present;
    facts->has_sequences = trace->col[MZ_COL_SEQ_TOKEN_BEGIN].present;
    return code;
}

void mz_columns_free(mz_trace *trace) {
    for (int id = 0; id < MZ_COLUMNS; id++)
        for (int i = 0; i < MZ_CACHE_ENTRIES; i++)
            free(trace->col[id].cache[i].data);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

static mz_code ask(mz_trace *trace, mz_column_id id, int64_t chunk, mz_err *err) {
    mz_column_reader *col = &trace->col[id];
    mz_code code = mz_server_request(trace->server, id, chunk * col->chunk_rows, err);
    col->asked = code == MZ_OK ? chunk : -1;
    col->arrived = false;
    return code;
}

/* Takes replies, whoever they are for, until this column's is there. */
static mz_code await(mz_trace *trace, mz_column_id id, mz_err *err) {
    while (!trace->col[id].arrived) {
        mz_chunk_reply reply;
        mz_code code = mz_server_wait(trace->server, &reply, err);
        if (code != MZ_OK)
            return code;
        mz_column_reader *col = &trace->col[reply.column];
        col->reply = reply;
        col->arrived = true;
        snprintf(col->wrong, sizeof col->wrong, "%s", reply.wrong ? reply.wrong : "");
    }
    return MZ_OK;
}

static mz_code fetch(mz_trace *trace, mz_column_id id, int64_t chunk, mz_err *err) {
    mz_column_reader *col = &trace->col[id];
    mz_code code = MZ_OK;
    if (col->asked >= 0 && col->asked != chunk) {
        code = await(trace, id, err); /* the slot is taken until the earlier request is answered */
        col->asked = -1;
    }
    if (code == MZ_OK && col->asked < 0)
        code = ask(trace, id, chunk, err);
    return code == MZ_OK ? await(trace, id, err) : code;
}

static mz_cached_chunk *oldest(mz_column_reader *col) {
    mz_cached_chunk *old = &col->cache[0];
    for (int i = 1; i < col->entries; i++)
        if (col->cache[i].used < old->used)
            old = &col->cache[i];
    return old;
}

static mz_code decode(mz_trace *trace, mz_column_id id, int64_t chunk, mz_cached_chunk *entry,
                      mz_err *err) {
    mz_column_reader *col = &trace->col[id];
    size_t size = (size_t)col->chunk_rows * col->row_size;
    entry->chunk = -1;
    if (!entry->data && !(entry->data = malloc(size)))
        return mz_fail_nomem(err, "a chunk of the trace");
    const char *wrong = col->wrong;
    if (!*wrong && col->reply.size == 0)
        wrong = "its data was never written";
    else if (!*wrong)
        wrong = mz_chunk_decode(trace->codec, &col->pipeline, col->reply.mask,
                                mz_server_slot(trace->server, id), (size_t)col->reply.size,
                                entry->data, size);
    if (wrong == mz_chunk_no_memory)
        return mz_fail_nomem(err, "a chunk of the trace");
    if (wrong && *wrong) {
        char name[64];
        return mz_fail(err, MZ_EINPUT, "%s: %s: chunk %" PRId64 " (from row %" PRId64 "): %s",
                       trace->path, mz_column_path(id, name), chunk, chunk * col->chunk_rows,
                       wrong);
    }
    entry->chunk = chunk;
    return MZ_OK;
}

static mz_code load_chunk(mz_trace *trace, mz_column_id id, int64_t chunk, mz_err *err) {
    mz_column_reader *col = &trace->col[id];
    mz_code code = fetch(trace, id, chunk, err);
    if (code != MZ_OK)
        return code;
    mz_cached_chunk *entry = oldest(col);
    code = decode(trace, id, chunk, entry, err);
    col->asked = -1;
    if (code != MZ_OK)
        return code;
    col->recent = (int)(entry - col->cache);
    /* The child reads the next chunk while this one is used. */
    bool follows = chunk == 0 || chunk == col->decoded + 1;
    col->decoded = chunk;
    if (follows && (chunk + 1) * col->chunk_rows < col->rows)
        code = ask(trace, id, chunk + 1, err);
    return code;
}

mz_code mz_column_span(mz_trace *trace, mz_column_id id, int64_t row, int64_t limit,
                       const uint8_t **data, int64_t *n, mz_err *err) {
    mz_column_reader *col = &trace->col[id];
    int64_t chunk = row / col->chunk_rows;
    for (int i = 0; i < col->entries && col->cache[col->recent].chunk != chunk; i++)
        if (col->cache[i].chunk == chunk)
            col->recent = i;
    if (col->cache[col->recent].chunk != chunk) {
        mz_code code = load_chunk(trace, id, chunk, err);
        if (code != MZ_OK)
            return code;
    }
    mz_cached_chunk *entry = &col->cache[col->recent];
    entry->used = ++trace->clock;
    int64_t within = row - chunk * col->chunk_rows;
    *data = entry->data + (size_t)within * col->row_size;
    *n = col->chunk_rows - within < limit ? col->chunk_rows - within : limit;
    return MZ_OK;
}

mz_code mz_column_ints(mz_trace *trace, mz_column_id id, int64_t row, int64_t n, int64_t *out,
                       mz_err *err) {
    int64_t width = trace->col[id].width;
    while (n > 0) {
        const uint8_t *data;
        int64_t got;
        mz_code code = mz_column_span(trace, id, row, n, &data, &got, err);
        if (code != MZ_OK)
            return code;
        mz_read_ints(trace->col[id].elem, data, got * width, out);
        row += got;
        n -= got;
        out += got * width;
    }
    return MZ_OK;
}

mz_code mz_column_reals(mz_trace *trace, mz_column_id id, int64_t row, int64_t n, double *out,
                        mz_err *err) {
    while (n > 0) {
        const uint8_t *data;
        int64_t got;
        mz_code code = mz_column_span(trace, id, row, n, &data, &got, err);
        if (code != MZ_OK)
            return code;
        mz_read_reals(trace->col[id].elem, data, got, out);
        row += got;
        n -= got;
        out += got;
    }
    return MZ_OK;
}
