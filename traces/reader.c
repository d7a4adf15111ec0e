/* Pairs and counts of single calls, converted and validated. */
#include "traces/reader.h"

#include <inttypes.h>
#include <string.h>

const mz_trace_facts *mz_trace_facts_of(const mz_trace *trace) {
    return &trace->facts;
}

const char *mz_trace_path(const mz_trace *trace) {
    return trace->path;
}

bool mz_trace_complete(const mz_trace *trace) {
    return trace->complete;
}

int64_t mz_trace_calls(const mz_trace *trace, const mz_trace_call **calls) {
    if (calls)
        *calls = trace->calls;
    return trace->call_count;
}

int64_t mz_trace_sequences(const mz_trace *trace, const mz_trace_sequence **sequences) {
    if (sequences)
        *sequences = trace->sequences;
    return trace->sequence_count;
}

int64_t mz_trace_steps(const mz_trace *trace, const mz_trace_step **steps) {
    if (steps)
        *steps = trace->steps;
    return trace->step_count;
}

int64_t mz_find_sequence(const mz_trace *trace, int64_t token) {
    int64_t low = 0, high = trace->sequence_count;
    while (low < high) {
        int64_t mid = low + (high - low) / 2;
        if (trace->sequences[mid].token_begin < token)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

mz_code mz_bad_id(const mz_trace *trace, mz_column_id id, const uint8_t *data, int64_t n,
                  int64_t first, mz_err *err) {
    char name[64];
    bool wide = trace->col[id].elem == MZ_ELEM_U16;
    for (int64_t i = 0; i < n; i++) {
        uint16_t v = data[i];
        if (wide)
            memcpy(&v, data + 2 * (size_t)i, 2);
        if (v >= trace->facts.experts)
            return mz_fail(err, MZ_EINPUT, "%s: %s[%" PRId64 "] is %d, must be below %d",
                           trace->path, mz_column_path(id, name), first + i, v,
                           trace->facts.experts);
    }
    return MZ_OK;
}

mz_code mz_bad_norm(const mz_trace *trace, mz_column_id id, const uint8_t *data, int64_t n,
                    int64_t first, mz_err *err) {
    char name[64];
    mz_elem elem = trace->col[id].elem;
    size_t size = mz_elem_size(elem);
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *at = data + (size_t)i * size;
        if (mz_read_norms(elem, at, 1, NULL))
            continue;
        char text[32] = "not finite";
        float value = 0;
        if (elem == MZ_ELEM_F32)
            memcpy(&value, at, 4);
        uint16_t half = 0;
        if (elem == MZ_ELEM_F16)
            memcpy(&half, at, 2);
        if (half >= 0x8000 && half < 0xfc00)
            value = -mz_float_from_half(half);
        if (value < 0)
            snprintf(text, sizeof text, "%g", (double)value);
        return mz_fail(err, MZ_EINPUT, "%s: %s[%" PRId64 "] is %s, must be finite and at least 0",
                       trace->path, mz_column_path(id, name), first + i, text);
    }
    return MZ_OK;
}

/* ---- ranges of tokens and pairs -------------------------------------------------------------- */

static mz_code check_arguments(const mz_trace *trace, int64_t index, int64_t first, int64_t tokens,
                               mz_err *err) {
    if (trace->facts.kind != MZ_TRACE_PAIRS)
        return mz_fail(err, MZ_EINPUT, "%s: holds counts, not pairs", trace->path);
    if (index < 0 || index >= trace->call_count || first < 0 || tokens < 0 ||
        first > trace->calls[index].tokens || tokens > trace->calls[index].tokens - first)
        return mz_fail(err, MZ_EINTERNAL, "%s: tokens outside call %" PRId64, trace->path, index);
    return MZ_OK;
}

static int64_t sum_ids(mz_elem elem, const uint8_t *data, int64_t n) {
    int64_t sum = 0;
    if (elem == MZ_ELEM_U8) {
        for (int64_t i = 0; i < n; i++)
            sum += data[i];
        return sum;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, data + 2 * (size_t)i, 2);
        sum += v;
    }
    return sum;
}

/* Adds up /rows/pairs of `n` tokens from `row` on. */
static mz_code sum_rows(mz_trace *trace, int64_t row, int64_t n, int64_t *sum, mz_err *err) {
    for (int64_t done = 0; done < n;) {
        const uint8_t *data;
        int64_t got;
        mz_code code =
            mz_column_span(trace, MZ_COL_ROW_PAIRS, row + done, n - done, &data, &got, err);
        if (code != MZ_OK)
            return code;
        *sum += sum_ids(trace->col[MZ_COL_ROW_PAIRS].elem, data, got);
        done += got;
    }
    return MZ_OK;
}

static mz_code rows_differ(const mz_trace *trace, int64_t index, int64_t sum, mz_err *err) {
    return mz_fail(err, MZ_EINPUT,
                   "%s: /rows/pairs of call %" PRId64 " (from row %" PRId64 ") add up to %s%" PRId64
                   ", /calls/pairs says %" PRId64,
                   trace->path, index, trace->calls[index].row_begin,
                   sum > trace->calls[index].pairs ? "at least " : "", sum,
                   trace->calls[index].pairs);
}

/* Pairs before token `token` of the call, from the nearest place known; remembers it as `which`. */
static mz_code pairs_before(mz_trace *trace, int64_t index, int64_t token, int which,
                            int64_t *pairs, mz_err *err) {
    const mz_trace_call *call = &trace->calls[index];
    mz_pair_mark mark = {index, 0, 0};
    for (int i = 0; i < 2; i++)
        if (trace->mark[i].index == index && trace->mark[i].token <= token &&
            trace->mark[i].token >= mark.token)
            mark = trace->mark[i];
    int64_t sum = mark.pair;
    mz_code code = sum_rows(trace, call->row_begin + mark.token, token - mark.token, &sum, err);
    if (code != MZ_OK)
        return code;
    if (sum > call->pairs || (token == call->tokens && sum != call->pairs))
        return rows_differ(trace, index, sum, err);
    trace->mark[which] = (mz_pair_mark){index, token, sum};
    *pairs = sum;
    return MZ_OK;
}

mz_code mz_trace_count_pairs(mz_trace *trace, int64_t index, int64_t first, int64_t tokens,
                             int64_t *pair_first, int64_t *pairs, mz_err *err) {
    mz_code code = check_arguments(trace, index, first, tokens, err);
    if (code != MZ_OK)
        return code;
    int32_t k = trace->facts.top_k;
    if (k > 0) {
        *pair_first = first * k;
        *pairs = tokens * k;
        return MZ_OK;
    }
    int64_t end = 0;
    code = pairs_before(trace, index, first, 0, pair_first, err);
    if (code == MZ_OK)
        code = pairs_before(trace, index, first + tokens, 1, &end, err);
    *pairs = end - *pair_first;
    return code;
}

/* ---- reading --------------------------------------------------------------------------------- */

static mz_code read_ids(mz_trace *trace, mz_column_id id, int64_t row, int64_t n, uint16_t *out,
                        mz_err *err) {
    for (int64_t done = 0; done < n;) {
        const uint8_t *data;
        int64_t got;
        mz_code code = mz_column_span(trace, id, row + done, n - done, &data, &got, err);
        if (code != MZ_OK)
            return code;
        unsigned largest = mz_read_ids(trace->col[id].elem, data, got, out + done);
        if (id == MZ_COL_EXPERT && largest >= (unsigned)trace->facts.experts)
            return mz_bad_id(trace, id, data, got, row + done, err);
        done += got;
    }
    return MZ_OK;
}

static mz_code read_norms(mz_trace *trace, mz_column_id id, int64_t row, int64_t n, float *out,
                          mz_err *err) {
    char name[64];
    if (!trace->col[id].usable)
        return mz_fail(err, MZ_EINPUT, "%s: holds no %s", trace->path, mz_column_path(id, name));
    for (int64_t done = 0; done < n;) {
        const uint8_t *data;
        int64_t got;
        mz_code code = mz_column_span(trace, id, row + done, n - done, &data, &got, err);
        if (code != MZ_OK)
            return code;
        if (!mz_read_norms(trace->col[id].elem, data, got, out + done))
            return mz_bad_norm(trace, id, data, got, row + done, err);
        done += got;
    }
    return MZ_OK;
}

mz_code mz_trace_read_pairs(mz_trace *trace, int64_t index, int64_t first, int64_t tokens,
                            const mz_trace_pairs_out *out, mz_err *err) {
    int64_t pair_first = 0, pairs = 0;
    mz_code code = mz_trace_count_pairs(trace, index, first, tokens, &pair_first, &pairs, err);
    if (code != MZ_OK)
        return code;
    int64_t pair = trace->calls[index].pair_begin + pair_first;
    int64_t row = trace->calls[index].row_begin + first;
    if (out->expert)
        code = read_ids(trace, MZ_COL_EXPERT, pair, pairs, out->expert, err);
    if (code == MZ_OK && out->weight)
        code = read_norms(trace, MZ_COL_WEIGHT, pair, pairs, out->weight, err);
    if (code == MZ_OK && out->hidden_norm2)
        code = read_norms(trace, MZ_COL_HIDDEN_NORM2, pair, pairs, out->hidden_norm2, err);
    if (code == MZ_OK && out->grad_norm2)
        code = read_norms(trace, MZ_COL_GRAD_NORM2, row, tokens, out->grad_norm2, err);
    if (code == MZ_OK && out->input_norm2)
        code = read_norms(trace, MZ_COL_INPUT_NORM2, row, tokens, out->input_norm2, err);
    if (code != MZ_OK || !out->token_pairs)
        return code;
    if (trace->facts.top_k == 0)
        return read_ids(trace, MZ_COL_ROW_PAIRS, row, tokens, out->token_pairs, err);
    for (int64_t i = 0; i < tokens; i++)
        out->token_pairs[i] = (uint16_t)trace->facts.top_k;
    return MZ_OK;
}

/* Four tables, so that equal ids in a row do not wait for each other's store. Every byte has a
 * place in them; ids that are no experts show up there afterwards. */
static bool count_bytes(const uint8_t *ids, int64_t n, int32_t experts, int64_t *count) {
    uint32_t table[4][256];
    memset(table, 0, sizeof table);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t w;
        memcpy(&w, ids + i, 8);
        table[0][w & 255]++;
        table[1][w >> 8 & 255]++;
        table[2][w >> 16 & 255]++;
        table[3][w >> 24 & 255]++;
        table[0][w >> 32 & 255]++;
        table[1][w >> 40 & 255]++;
        table[2][w >> 48 & 255]++;
        table[3][w >> 56]++;
    }
    for (; i < n; i++)
        table[0][ids[i]]++;
    int32_t known = experts < 256 ? experts : 256;
    for (int32_t e = 0; e < known; e++)
        count[e] += (int64_t)table[0][e] + table[1][e] + table[2][e] + table[3][e];
    uint32_t beyond = 0;
    for (int32_t e = known; e < 256; e++)
        beyond |= table[0][e] | table[1][e] | table[2][e] | table[3][e];
    return beyond == 0;
}

static bool count_words(const uint8_t *ids, int64_t n, int32_t experts, int64_t *count) {
    if (mz_read_ids(MZ_ELEM_U16, ids, n, NULL) >= (unsigned)experts)
        return n == 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, ids + 2 * (size_t)i, 2);
        count[v]++;
    }
    return true;
}

mz_code mz_trace_add_range(mz_trace *trace, int64_t index, int64_t first, int64_t tokens,
                           int64_t *count, mz_err *err) {
    int64_t pair_first = 0, pairs = 0;
    mz_code code = mz_trace_count_pairs(trace, index, first, tokens, &pair_first, &pairs, err);
    if (code != MZ_OK)
        return code;
    int64_t row = trace->calls[index].pair_begin + pair_first;
    bool bytes = trace->col[MZ_COL_EXPERT].elem == MZ_ELEM_U8;
    int32_t experts = trace->facts.experts;
    for (int64_t done = 0; done < pairs;) {
        const uint8_t *data;
        int64_t got;
        code = mz_column_span(trace, MZ_COL_EXPERT, row + done, pairs - done, &data, &got, err);
        if (code != MZ_OK)
            return code;
        bool fine =
            bytes ? count_bytes(data, got, experts, count) : count_words(data, got, experts, count);
        if (!fine)
            return mz_bad_id(trace, MZ_COL_EXPERT, data, got, row + done, err);
        done += got;
    }
    return MZ_OK;
}

static mz_code add_row(mz_trace *trace, int64_t index, int64_t *count, mz_err *err) {
    const mz_column_reader *col = &trace->col[MZ_COL_COUNTS];
    const uint8_t *data;
    int64_t got, value[256], sum = 0;
    size_t size = mz_elem_size(col->elem);
    mz_code code = mz_column_span(trace, MZ_COL_COUNTS, index, 1, &data, &got, err);
    if (code != MZ_OK)
        return code;
    for (int64_t e = 0; e < col->width; e += 256) {
        int64_t n = col->width - e < 256 ? col->width - e : 256;
        mz_read_ints(col->elem, data + (size_t)e * size, n, value);
        for (int64_t i = 0; i < n; i++) {
            if (value[i] < 0 || value[i] > trace->calls[index].pairs - sum)
                return mz_fail(err, MZ_EINPUT,
                               "%s: /counts[%" PRId64 "] adds up to more than the %" PRId64
                               " that /calls/pairs[%" PRId64 "] says",
                               trace->path, index, trace->calls[index].pairs, index);
            count[e + i] += value[i];
            sum += value[i];
        }
    }
    if (sum != trace->calls[index].pairs)
        return mz_fail(err, MZ_EINPUT,
                       "%s: /counts[%" PRId64 "] adds up to %" PRId64 ", /calls/pairs[%" PRId64
                       "] says %" PRId64,
                       trace->path, index, sum, index, trace->calls[index].pairs);
    return MZ_OK;
}

mz_code mz_trace_add_counts(mz_trace *trace, int64_t index, int64_t *count, mz_err *err) {
    if (index < 0 || index >= trace->call_count)
        return mz_fail(err, MZ_EINTERNAL, "%s: no call %" PRId64, trace->path, index);
    if (trace->facts.kind == MZ_TRACE_COUNTS)
        return add_row(trace, index, count, err);
    return mz_trace_add_range(trace, index, 0, trace->calls[index].tokens, count, err);
}
