#include "traces/importers/rows.h"

#include "common/base/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

mz_code mz_physical_map_make(const char *path, const char *what, const int64_t *entries,
                             int64_t layers, int64_t slots, mz_physical_map *map, mz_err *err) {
    *map = (mz_physical_map){.layers = layers, .slots = slots};
    map->expert = mz_calloc((size_t)(layers * slots) + 1, sizeof *map->expert);
    if (!map->expert)
        return mz_fail_nomem(err, "the map of physical experts");
    for (int64_t i = 0; i < layers * slots; i++) {
        if (entries[i] < 0 || entries[i] >= MZ_EXPERTS_MAX)
            return mz_fail(err, MZ_EINPUT, "%s: %s[%lld][%lld]: %lld is no expert", path, what,
                           (long long)(i / slots), (long long)(i % slots), (long long)entries[i]);
        map->expert[i] = (int32_t)entries[i];
        if (map->expert[i] >= map->logical)
            map->logical = map->expert[i] + 1;
    }
    return MZ_OK;
}

void mz_physical_map_free(mz_physical_map *map) {
    free(map->expert);
    *map = (mz_physical_map){0};
}

void mz_rows_skip(mz_import_report *report, int64_t rows, const char *reason) {
    size_t used = strlen(report->note);
    if (rows == 0)
        return;
    report->skipped += rows;
    if (!strstr(report->note, reason))
        snprintf(report->note + used, sizeof report->note - used, "%s%s", used ? "; " : "", reason);
}

mz_code mz_rows_count(mz_gather *gather, const mz_gather_key *key, const int64_t *row,
                      const mz_import_options *options, mz_import_report *report, mz_err *err) {
    const mz_trace_facts *facts = gather->facts;
    int64_t sum = 0, tokens, *count;
    for (int32_t e = 0; e < facts->experts; e++) {
        if (row[e] < 0 || row[e] > UINT32_MAX)
            return mz_fail(err, MZ_EINPUT,
                           "step %lld, layer %lld, expert %d: %lld is no count (0 to 2^32 - 1)",
                           (long long)key->step, (long long)key->layer, e, (long long)row[e]);
        sum += row[e];
    }
    if (sum == 0) {
        mz_rows_skip(report, 1, "layers without any selection (dense ones)");
        return MZ_OK;
    }
    mz_code code = mz_gather_tokens(options, facts->top_k, sum, &tokens, err);
    if (code)
        return mz_err_prefix(err, "step %lld, layer %lld, rank %d", (long long)key->step,
                             (long long)key->layer, key->rank);
    code = mz_gather_counts(gather, key, tokens, &count, err);
    if (!code)
        memcpy(count, row, (size_t)facts->experts * sizeof *count);
    return code;
}

/* The logical expert of `id`, or -1. */
static int64_t fold(const mz_physical_map *map, int64_t layer, int64_t id) {
    if (!map)
        return id;
    return id >= 0 && id < map->slots ? map->expert[layer * map->slots + id] : -1;
}

mz_code mz_rows_ids(mz_gather *gather, const mz_gather_key *key, const int64_t *ids, int64_t tokens,
                    int64_t stride, const mz_physical_map *map, int64_t map_layer, mz_err *err) {
    const mz_trace_facts *facts = gather->facts;
    uint16_t *expert;
    float *unused;
    mz_code code = mz_gather_pairs(gather, key, tokens, &expert, &unused, err);
    for (int64_t t = 0; t < tokens && !code; t++, expert += facts->top_k)
        for (int32_t j = 0; j < facts->top_k && !code; j++) {
            int64_t raw = ids[t * stride + j], id = fold(map, map_layer, raw);
            const char *fault = map && id < 0 ? "is no physical expert of the map"
                                              : mz_id_fault(id, facts->experts, expert, j);
            if (fault)
                code = mz_fail(err, MZ_EINPUT,
                               "step %lld, layer %lld, token %lld, place %d: expert id %lld %s",
                               (long long)key->step, (long long)key->layer, (long long)t, j,
                               (long long)raw, fault);
            else
                expert[j] = (uint16_t)id;
        }
    return code;
}

int64_t mz_rows_rank_of(const char *path, const char *prefix, const char *suffix) {
    const char *base = mz_base_name(path);
    size_t length = strlen(base), tail = strlen(suffix), head = strlen(prefix);
    if (length <= tail || strcmp(base + length - tail, suffix) != 0)
        return -1;
    const char *end = base + length - tail, *digits = end;
    while (digits > base && digits[-1] >= '0' && digits[-1] <= '9' && end - digits < 7)
        digits--;
    if (digits == end || (size_t)(digits - base) < head || memcmp(digits - head, prefix, head) != 0)
        return -1;
    int64_t rank = atoll(digits);
    return rank < MZ_RANKS_MAX ? rank : -1;
}

/* ---- rows of ids in all layers --------------------------------------------------------------- */

static bool zero_row(const int64_t *row, int64_t ids) {
    for (int64_t j = 0; j < ids; j++)
        if (row[j] != 0)
            return false;
    return true;
}

bool mz_rows_zero(const mz_id_rows *rows, const int64_t *token) {
    return zero_row(token, rows->layers * rows->top_k);
}

int64_t mz_rows_first(const int64_t *tokens, int64_t count, int64_t row) {
    int64_t first = 0;
    while (first < count && zero_row(tokens + first * row, row))
        first++;
    return first;
}

/* Layers named by the user: "none" or "0,1,2". */
static mz_code read_dense(mz_id_rows *rows, const char *text, mz_err *err) {
    const char *p = text;
    while (strcmp(text, "none") != 0) {
        char *end;
        long long layer = strtoll(p, &end, 10);
        if (end == p || layer < 0 || layer >= rows->layers || (*end != ',' && *end != '\0'))
            return mz_fail(err, MZ_EINPUT,
                           "--dense-layers: '%.40s' is not none or a list of layers below %lld",
                           text, (long long)rows->layers);
        rows->dense[layer] = true;
        if (*end == '\0')
            break;
        p = end + 1;
    }
    return MZ_OK;
}

mz_code mz_id_rows_make(const char *path, const int64_t *tokens, int64_t count, int64_t layers,
                        int32_t top_k, const mz_import_options *options, mz_id_rows *rows,
                        mz_err *err) {
    *rows = (mz_id_rows){.layers = layers, .top_k = top_k, .experts = (int32_t)options->experts};
    rows->dense = mz_calloc((size_t)layers, sizeof *rows->dense);
    if (!rows->dense)
        return mz_fail_nomem(err, "layers");
    /* Two experts of a token are never both 0, so that one token tells; one expert may be. */
    int64_t row = layers * top_k, first = top_k > 1 ? mz_rows_first(tokens, count, row) : 0;
    int64_t end = top_k > 1 && first < count ? first + 1 : count;
    bool asked = false;
    for (int64_t l = 0; l < layers && !options->dense_layers; l++) {
        bool zero = true;
        for (int64_t t = first; t < end && zero; t++)
            zero = zero_row(tokens + t * row + l * top_k, top_k);
        rows->dense[l] = zero;
        asked = asked || (zero && top_k == 1);
    }
    if (asked)
        return mz_fail(err, MZ_EINPUT,
                       "%s: with one expert per token a row of zeros may be expert 0 or a dense "
                       "layer: pass --dense-layers none or --dense-layers L,L,...",
                       path);
    mz_code code = options->dense_layers ? read_dense(rows, options->dense_layers, err) : MZ_OK;
    for (int64_t l = 0; l < layers; l++)
        rows->kept += !rows->dense[l];
    if (!code && rows->kept == 0)
        return mz_fail(err, MZ_EINPUT, "%s: every row of every layer is zero: no expert ids in it",
                       path);
    return code;
}

void mz_id_rows_free(mz_id_rows *rows) {
    free(rows->dense);
    *rows = (mz_id_rows){0};
}

const char *mz_rows_take(const mz_id_rows *rows, const int64_t *token, uint16_t *expert,
                         int64_t *at) {
    const int32_t k = rows->top_k;
    for (int64_t l = 0; l < rows->layers; l++) {
        const int64_t *row = token + l * k;
        *at = l * k;
        if (rows->dense[l] && !zero_row(row, k)) {
            return "is data in a layer that was zero before (a dense one)";
        } else if (!rows->dense[l]) {
            for (int32_t j = 0; j < k; j++) {
                const char *fault = mz_id_fault(row[j], rows->experts, expert, j);
                *at = l * k + j;
                if (fault)
                    return fault;
                expert[j] = (uint16_t)row[j];
            }
            expert += k;
        }
    }
    return NULL;
}

mz_code mz_rows_sequence(const mz_id_rows *rows, const int64_t *tokens, int64_t count,
                         mz_block *block, mz_trace_writer *writer, mz_import_report *report,
                         mz_err *err) {
    int64_t taken = 0, at = 0, row = rows->kept * rows->top_k;
    mz_code code = mz_block_begin(block, count, writer, report, err);
    for (int64_t t = 0; t < count && !code; t++) {
        const int64_t *token = tokens + t * rows->layers * rows->top_k;
        if (rows->top_k > 1 && mz_rows_zero(rows, token)) {
            mz_rows_skip(report, 1, "tokens without any expert (fillers)");
            continue;
        }
        const char *fault = mz_rows_take(rows, token, mz_block_expert(block) + taken * row, &at);
        if (fault)
            return mz_fail(err, MZ_EINPUT, "[%lld, %lld, %lld]: expert id %lld %s", (long long)t,
                           (long long)(at / rows->top_k), (long long)(at % rows->top_k),
                           (long long)token[at], fault);
        taken++;
    }
    mz_rows_skip(report, rows->kept < rows->layers ? taken * (rows->layers - rows->kept) : 0,
                 "rows of dense layers (all zero)");
    return code || taken == 0 ? code : mz_block_end(block, taken, true, -1, err);
}
