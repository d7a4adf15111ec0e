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
    int64_t sum = 0, *count;
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
    if (sum % facts->top_k && !options->dropped)
        return mz_fail(err, MZ_EINPUT,
                       "step %lld, layer %lld, rank %d: %lld selections are no multiple of top-%d; "
                       "pass the right --top-k, or --dropped if they were counted after dropping",
                       (long long)key->step, (long long)key->layer, key->rank, (long long)sum,
                       facts->top_k);
    mz_code code =
        mz_gather_counts(gather, key, options->dropped ? -1 : sum / facts->top_k, &count, err);
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
