/* SGLang's expert distribution recorder, modes per_pass and per_token: one .pt file per rank,
 * {"records": [{"forward_pass_id", "rank", "gatherer_key", "global_physical_count"
 * [layers, physical experts], ...}], "last_physical_to_logical_map" [layers, physical experts]}; in
 * mode per_token also "topk_ids_of_layer" [layers, tokens, 8], where places and layers without an
 * expert are -1, and "extend_seq_lens". All ids are physical and folded by the map. Passes are
 * steps, gatherer keys (two-batch overlap) micro-batches. Whether the ranks saw the same tokens is
 * not recorded. */
#include "traces/importers/ranks.h"
#include "traces/importers/rows.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/pickle.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_PLACES = 64, MAX_KEYS = 32 };
enum { HOLD_SAME = 1, HOLD_TOKENS, HOLD_EXPERTS };

typedef struct record {
    int64_t pass;
    int32_t batch, rank, source; /* source rank of the trace */
    int file;
    const mz_value *value;
} record;

typedef struct records_import {
    mz_app *app;
    const mz_import_options *options;
    mz_trace_facts facts;
    mz_gather gather;
    mz_trace_writer *writer;
    mz_import_report *report;
    mz_torch_file *torch; /* of each file */
    mz_physical_map *map;
    record *list;
    size_t count, room;
    int64_t *rank; /* that recorded */
    size_t ranks;
    const char *key[MAX_KEYS];
    int keys;
    int64_t *scratch, *sum; /* one layer of one record; counts of all layers of one pass */
    size_t scratch_room;
    bool *filler; /* of the tokens of one record */
    size_t filler_room;
    mz_trace_sequence *sequence; /* of one pass, relative to their rank's tokens */
    size_t sequences, sequence_room;
} records_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    if (!mz_torch_head(head, size))
        return 0;
    if (mz_head_has(head, size, "forward_pass_id"))
        return 90;
    return mz_head_has(head, size, "records") ? 80 : 9;
}

static const char *path_of(const records_import *in, int file) {
    return mz_datafile_path(in->torch[file].file);
}

/* ---- the files ------------------------------------------------------------------------------- */

static const mz_tensor *tensor_of(const mz_value *value, const char *key, int dims) {
    const mz_value *member = mz_value_get(value, key);
    return member && member->type == MZ_VALUE_TENSOR && member->tensor->shape.dims == dims
               ? member->tensor
               : NULL;
}

static mz_code read_map(records_import *in, int file, mz_err *err) {
    static const char name[] = "last_physical_to_logical_map";
    const mz_tensor *tensor = tensor_of(in->torch[file].value, name, 2);
    if (!tensor || tensor->shape.elements == 0 || tensor->shape.elements > 1 << 26)
        return mz_fail(err, MZ_EINPUT, "%s: no %s [layers, physical experts] in it",
                       path_of(in, file), name);
    int64_t *entries = mz_calloc((size_t)tensor->shape.elements, sizeof *entries);
    if (!entries)
        return mz_fail_nomem(err, "the map of physical experts");
    mz_code code = mz_tensor_read_int(in->torch[file].file, tensor, name, 0, tensor->shape.elements,
                                      entries, err);
    if (!code)
        code = mz_physical_map_make(path_of(in, file), name, entries, tensor->shape.extent[0],
                                    tensor->shape.extent[1], &in->map[file], err);
    free(entries);
    if (!code && file > 0 &&
        (in->map[file].layers != in->map[0].layers || in->map[file].logical != in->map[0].logical))
        return mz_fail(err, MZ_EINPUT, "%s: another number of layers or experts than in %s",
                       path_of(in, file), path_of(in, 0));
    return code;
}

/* Number of a gatherer key, by first appearance. */
static mz_code batch_of(records_import *in, const mz_value *key, int32_t *batch, mz_err *err) {
    const char *text = key && key->type == MZ_VALUE_TEXT ? key->text : "";
    for (*batch = 0; *batch < in->keys; ++*batch)
        if (strcmp(in->key[*batch], text) == 0)
            return MZ_OK;
    if (in->keys == MAX_KEYS)
        return mz_fail(err, MZ_EINPUT, "more than %d gatherer keys", MAX_KEYS);
    in->key[in->keys++] = text;
    return MZ_OK;
}

static mz_code add_record(records_import *in, int file, const mz_value *value, size_t index,
                          mz_err *err) {
    int64_t pass, rank;
    record r = {.file = file, .value = value};
    if (!mz_value_int(mz_value_get(value, "forward_pass_id"), &pass) ||
        !mz_value_int(mz_value_get(value, "rank"), &rank) || pass < 0 || rank < 0 ||
        rank >= MZ_RANKS_MAX)
        return mz_fail(err, MZ_EINPUT, "%s: records[%zu]: no forward_pass_id or rank in it",
                       path_of(in, file), index);
    mz_code code = batch_of(in, mz_value_get(value, "gatherer_key"), &r.batch, err);
    if (code)
        return mz_err_prefix(err, "%s: records[%zu]", path_of(in, file), index);
    r.pass = pass;
    r.rank = (int32_t)rank;
    if (!mz_grow((void **)&in->list, &in->room, in->count + 1, sizeof *in->list))
        return mz_fail_nomem(err, "records");
    in->list[in->count++] = r;
    return MZ_OK;
}

static mz_code open_file(records_import *in, const char *path, int file, mz_err *err) {
    mz_code code = mz_torch_open(path, &in->torch[file], err);
    if (code)
        return code;
    const mz_value *records = mz_value_get(in->torch[file].value, "records");
    if (!records || records->type != MZ_VALUE_LIST)
        return mz_fail(err, MZ_EINPUT,
                       "%s: no list \"records\" in it, as SGLang's recorder writes in modes "
                       "per_pass and per_token",
                       path);
    code = read_map(in, file, err);
    for (uint32_t i = 0; i < records->count && !code; i++)
        code = add_record(in, file, records->item[i], i, err);
    return code;
}

static int by_pass(const void *a, const void *b) {
    const record *x = a, *y = b;
    if (x->pass != y->pass)
        return x->pass < y->pass ? -1 : 1;
    if (x->batch != y->batch)
        return x->batch < y->batch ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* The ranks that recorded, ascending, each once. */
static mz_code list_ranks(records_import *in, mz_err *err) {
    in->rank = mz_calloc(in->count, sizeof *in->rank);
    if (!in->rank)
        return mz_fail_nomem(err, "ranks");
    for (size_t i = 0; i < in->count; i++)
        in->rank[i] = in->list[i].rank;
    qsort(in->rank, in->count, sizeof *in->rank, mz_number_order);
    for (size_t i = 0; i < in->count; i++)
        if (i == 0 || in->rank[i] != in->rank[i - 1])
            in->rank[in->ranks++] = in->rank[i];
    return MZ_OK;
}

/* Ranks of the group that exchanged tokens, as the dispatch of DeepEP noted them; 0: not noted. */
static int64_t stated_ranks(const records_import *in) {
    int64_t stated = 0;
    for (size_t i = 0; i < in->count; i++) {
        const mz_value *misc = mz_value_get(in->list[i].value, "misc_objects");
        if (!misc || misc->type != MZ_VALUE_LIST || misc->count == 0)
            continue;
        const mz_value *tokens = mz_value_get(misc->item[0], "num_tokens_per_rank");
        if (tokens && tokens->type == MZ_VALUE_LIST && tokens->count > stated)
            stated = tokens->count;
    }
    return stated <= MZ_RANKS_MAX ? stated : 0;
}

/* Experts are not known without their ranks; tokens of other ranks are, without those. */
static mz_code check_complete(records_import *in, mz_err *err) {
    char text[64];
    int64_t missing, stated = stated_ranks(in);
    if (in->options->ranks_hold == HOLD_SAME)
        return MZ_OK;
    if (in->options->ranks_hold != HOLD_EXPERTS)
        return mz_ranks_note(in->report, &in->facts, in->rank, in->ranks, stated, err);
    mz_code code = mz_ranks_missing(in->rank, in->ranks, stated, &missing, text, sizeof text, err);
    if (!code && missing)
        return mz_fail(err, MZ_EINPUT,
                       "%s: the files of ranks %s are missing, and so are the counts of their "
                       "experts: pass the files of all ranks",
                       path_of(in, 0), text);
    return code;
}

/* Settles source ranks: how many there are, and which records are left out. */
static mz_code take_ranks(records_import *in, mz_err *err) {
    int hold = in->options->ranks_hold;
    mz_code code = list_ranks(in, err);
    if (code)
        return code;
    if (in->ranks > 1 && hold == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: whether the ranks counted the same tokens is not in the files: pass "
                       "--ranks-hold same (tensor parallel: one file is taken), tokens "
                       "(data-parallel attention: ranks are sources) or experts (DeepEP low "
                       "latency: added up)",
                       path_of(in, 0));
    in->facts.ranks = hold == HOLD_TOKENS ? (int32_t)in->ranks : 1;
    size_t kept = 0;
    for (size_t i = 0; i < in->count; i++) {
        if (hold != HOLD_TOKENS && hold != HOLD_EXPERTS && in->list[i].rank != in->rank[0])
            continue;
        const int64_t rank = in->list[i].rank,
                      *at = bsearch(&rank, in->rank, in->ranks, sizeof rank, mz_number_order);
        in->list[kept] = in->list[i];
        in->list[kept++].source = hold == HOLD_TOKENS ? (int32_t)(at - in->rank) : 0;
    }
    mz_rows_skip(in->report, (int64_t)(in->count - kept),
                 "records of ranks that hold the same tokens");
    in->count = kept;
    mz_import_note(&in->facts, "ranks-hold=%s",
                   in->ranks == 1 ? "one rank recorded"
                                  : (const char *[]){"", "same", "tokens", "experts"}[hold]);
    code = check_complete(in, err);
    mz_import_note(&in->facts, "ids=physical, folded by last_physical_to_logical_map");
    return code;
}

/* ---- counts ---------------------------------------------------------------------------------- */

/* Adds the counts of one record to in->sum [layers][experts], by logical expert. */
static mz_code sum_record(records_import *in, const record *r, mz_err *err) {
    static const char name[] = "global_physical_count";
    const mz_physical_map *map = &in->map[r->file];
    const mz_tensor *tensor = tensor_of(r->value, name, 2);
    if (!tensor || tensor->shape.extent[0] != map->layers || tensor->shape.extent[1] != map->slots)
        return mz_fail(err, MZ_EINPUT, "no %s [%lld, %lld], as large as the map", name,
                       (long long)map->layers, (long long)map->slots);
    for (int64_t l = 0; l < map->layers; l++) {
        mz_code code = mz_tensor_read_int(in->torch[r->file].file, tensor, name, l * map->slots,
                                          map->slots, in->scratch, err);
        if (code)
            return code;
        for (int64_t p = 0; p < map->slots; p++) {
            int64_t value = in->scratch[p];
            if (value < 0 || value > UINT32_MAX)
                return mz_fail(err, MZ_EINPUT, "%s[%lld][%lld]: %lld is no count", name,
                               (long long)l, (long long)p, (long long)value);
            in->sum[l * in->facts.experts + map->expert[l * map->slots + p]] += value;
        }
    }
    return MZ_OK;
}

static mz_code flush_sum(records_import *in, const record *r, mz_err *err) {
    size_t size = (size_t)(in->map[0].layers * in->facts.experts);
    mz_code code = MZ_OK;
    for (int64_t l = 0; l < in->map[0].layers && !code; l++) {
        mz_gather_key key = {
            .step = r->pass, .micro_batch = r->batch, .layer = l, .rank = r->source};
        code = mz_rows_count(&in->gather, &key, in->sum + l * in->facts.experts, in->options,
                             in->report, err);
    }
    memset(in->sum, 0, size * sizeof *in->sum);
    return code;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static int used_places(const int64_t *row, int places) {
    int used = 0;
    while (used < places && row[used] >= 0)
        used++;
    return used;
}

/* One layer, `tokens` rows of `places` in in->scratch: fillers are those without any place. */
static mz_code check_layer(records_import *in, int64_t tokens, int places, bool first,
                           int64_t layer, bool *dense, mz_err *err) {
    *dense = true;
    for (int64_t t = 0; t < tokens && *dense; t++)
        *dense = used_places(in->scratch + t * places, places) == 0;
    for (int64_t t = 0; t < tokens && !*dense; t++) {
        int used = used_places(in->scratch + t * places, places);
        bool filler = used == 0;
        if (!filler && in->facts.top_k == 0)
            in->facts.top_k = used;
        if (!filler && used != in->facts.top_k)
            return mz_fail(err, MZ_EINPUT, "layer %lld, token %lld: %d experts, not %d",
                           (long long)layer, (long long)t, used, in->facts.top_k);
        if (!first && filler != in->filler[t])
            return mz_fail(err, MZ_EINPUT,
                           "layer %lld, token %lld: without an expert in some layers only",
                           (long long)layer, (long long)t);
        in->filler[t] = filler;
    }
    return MZ_OK;
}

static mz_code add_layer(records_import *in, const record *r, int64_t layer, int64_t tokens,
                         int places, int64_t *kept, mz_err *err) {
    mz_gather_key key = {
        .step = r->pass, .micro_batch = r->batch, .layer = layer, .rank = r->source};
    *kept = 0;
    for (int64_t t = 0; t < tokens; t++)
        if (!in->filler[t])
            memmove(in->scratch + (*kept)++ * places, in->scratch + t * places,
                    (size_t)places * sizeof *in->scratch);
    return mz_rows_ids(&in->gather, &key, in->scratch, *kept, places, &in->map[r->file], layer,
                       err);
}

/* extend_seq_lens cuts the tokens of a prefill into requests; other records have none. */
static mz_code cut_sequences(records_import *in, const record *r, int64_t tokens, int64_t base,
                             mz_err *err) {
    const mz_value *lens = mz_value_get(r->value, "extend_seq_lens");
    int64_t sum = 0, length, at = 0, taken = base;
    if (!lens || lens->type == MZ_VALUE_NONE)
        return MZ_OK;
    if (lens->type != MZ_VALUE_LIST)
        return mz_fail(err, MZ_EINPUT, "extend_seq_lens is no list");
    for (uint32_t i = 0; i < lens->count; i++) {
        if (!mz_value_int(lens->item[i], &length) || length < 0 || length > tokens - sum)
            return mz_fail(err, MZ_EINPUT, "extend_seq_lens do not add up to the %lld tokens",
                           (long long)tokens);
        sum += length;
        int64_t begin = taken;
        for (; at < sum; at++)
            taken += !in->filler[at];
        if (taken == begin)
            continue;
        if (!mz_grow((void **)&in->sequence, &in->sequence_room, in->sequences + 1,
                     sizeof *in->sequence))
            return mz_fail_nomem(err, "sequences");
        in->sequence[in->sequences++] =
            (mz_trace_sequence){.token_begin = begin, .tokens = taken - begin, .domain = -1};
    }
    return MZ_OK;
}

/* One record's ids into the gather; *base counts the tokens of this pass and micro-batch. */
static mz_code add_tokens(records_import *in, const record *r, int64_t *base, mz_err *err) {
    static const char name[] = "topk_ids_of_layer";
    const mz_tensor *tensor = tensor_of(r->value, name, 3);
    if (!tensor || tensor->shape.extent[0] != in->map[r->file].layers ||
        tensor->shape.extent[2] < 1 || tensor->shape.extent[2] > MAX_PLACES)
        return mz_fail(err, MZ_EINPUT, "no %s [%lld layers, tokens, places]", name,
                       (long long)in->map[r->file].layers);
    int64_t tokens = tensor->shape.extent[1], kept = 0, dense_rows = 0;
    int places = (int)tensor->shape.extent[2];
    bool first = true, dense;
    if (!mz_grow((void **)&in->scratch, &in->scratch_room, (size_t)(tokens * places) + 1,
                 sizeof *in->scratch) ||
        !mz_grow((void **)&in->filler, &in->filler_room, (size_t)tokens + 1, sizeof *in->filler))
        return mz_fail_nomem(err, "one record");
    for (int64_t l = 0; l < tensor->shape.extent[0]; l++) {
        mz_code code = mz_tensor_read_int(in->torch[r->file].file, tensor, name,
                                          l * tokens * places, tokens * places, in->scratch, err);
        if (!code)
            code = check_layer(in, tokens, places, first, l, &dense, err);
        if (!code && dense)
            dense_rows += tokens;
        else if (!code)
            code = add_layer(in, r, l, tokens, places, &kept, err);
        if (code)
            return code;
        first = first && dense;
    }
    if (first) /* a pass without any token */
        return MZ_OK;
    mz_rows_skip(in->report, dense_rows, "rows of dense layers (-1)");
    mz_rows_skip(in->report, tokens - kept, "tokens without any expert (fillers)");
    mz_code code = cut_sequences(in, r, tokens, *base, err);
    *base += kept;
    return code;
}

/* ---- passes ---------------------------------------------------------------------------------- */

/* Places recorded per token, and how many of them the first token with an expert uses. */
static mz_code look_places(records_import *in, const record *r, int *places, mz_err *err) {
    static const char name[] = "topk_ids_of_layer";
    const mz_tensor *tensor = tensor_of(r->value, name, 3);
    int64_t row[MAX_PLACES], k = tensor ? tensor->shape.extent[2] : 0;
    if (k > MAX_PLACES)
        return mz_fail(err, MZ_EINPUT, "%s: %s: %lld places per token are not plausible",
                       path_of(in, r->file), name, (long long)k);
    if (k < 1)
        return MZ_OK;
    int used = 0;
    for (int64_t t = 0; t < tensor->shape.elements / k && used == 0; t++) {
        mz_code code =
            mz_tensor_read_int(in->torch[r->file].file, tensor, name, t * k, k, row, err);
        if (code)
            return code;
        used = used_places(row, (int)k);
    }
    if (used > 0)
        *places = (int)k;
    if (used > 0 && in->facts.top_k == 0)
        in->facts.top_k = used;
    return MZ_OK;
}

/* From the user, or the places used; all of them used may mean cut off. */
static mz_code take_top_k(records_import *in, mz_err *err) {
    const char *path = path_of(in, 0);
    int64_t asked = in->options->top_k;
    if (in->facts.kind == MZ_TRACE_COUNTS || asked > 0) {
        mz_code code = mz_import_top_k(path, in->options, in->facts.experts, &in->facts.top_k, err);
        if (code || in->facts.kind == MZ_TRACE_COUNTS)
            return code;
    }
    int places = 0;
    for (size_t i = 0; i < in->count && places == 0; i++) {
        mz_code code = look_places(in, &in->list[i], &places, err);
        if (code)
            return code;
    }
    if (in->facts.top_k == 0)
        return mz_fail(err, MZ_EINPUT, "%s: no token has an expert", path);
    if (asked > places)
        return mz_fail(err, MZ_EINPUT,
                       "%s: the recorder keeps %d experts per token, fewer than --top-k %lld; use "
                       "mode per_pass",
                       path, places, (long long)asked);
    if (in->facts.top_k == places && asked <= 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: all %d recorded places are used; a model with more experts per token "
                       "would be cut off: pass --top-k K",
                       path, places);
    return MZ_OK;
}

static mz_code take_shape(records_import *in, mz_err *err) {
    const mz_physical_map *map = &in->map[0];
    in->facts.experts = map->logical;
    in->facts.model_layers = (int32_t)(map->layers <= MZ_LAYERS_MAX ? map->layers : 0);
    if (in->options->experts > 0 && in->options->experts != map->logical)
        return mz_fail(err, MZ_EINPUT, "%s: the map names %d experts, but --experts %lld",
                       path_of(in, 0), map->logical, (long long)in->options->experts);
    in->facts.kind =
        tensor_of(in->list[0].value, "topk_ids_of_layer", 3) ? MZ_TRACE_PAIRS : MZ_TRACE_COUNTS;
    if (in->facts.kind == MZ_TRACE_PAIRS && in->options->ranks_hold == HOLD_EXPERTS)
        return mz_fail(err, MZ_EINPUT,
                       "%s: ids of tokens cannot be added up: pass --ranks-hold same or tokens",
                       path_of(in, 0));
    for (size_t i = 0; i < in->count && in->facts.kind == MZ_TRACE_PAIRS; i++) {
        const mz_value *lens = mz_value_get(in->list[i].value, "extend_seq_lens");
        in->facts.has_sequences |= lens && lens->type != MZ_VALUE_NONE;
    }
    mz_code code = take_top_k(in, err);
    if (code)
        return code;
    in->sum = mz_calloc((size_t)map->layers, (size_t)in->facts.experts * sizeof *in->sum);
    int64_t slots = 1;
    for (size_t i = 0; i < in->count; i++)
        if (in->map[in->list[i].file].slots > slots)
            slots = in->map[in->list[i].file].slots;
    if (!in->sum ||
        !mz_grow((void **)&in->scratch, &in->scratch_room, (size_t)slots, sizeof *in->scratch))
        return mz_fail_nomem(err, "one record");
    return MZ_OK;
}

/* The records of one pass and micro-batch. */
static mz_code gather_batch(records_import *in, const record *r, size_t count, mz_err *err) {
    int64_t base = 0;
    mz_code code = MZ_OK;
    in->sequences = 0;
    if (in->options->ranks_hold == HOLD_EXPERTS && count < in->ranks) {
        mz_rows_skip(in->report, (int64_t)count, "records of passes that some ranks lack");
        return MZ_OK;
    }
    for (size_t i = 0; i < count && !code; i++) {
        if (i > 0 && r[i].rank == r[i - 1].rank)
            code = mz_fail(err, MZ_EINPUT, "recorded twice, in %s as well: give each rank once",
                           path_of(in, r[i - 1].file));
        else if (in->facts.kind == MZ_TRACE_PAIRS) {
            code = add_tokens(in, &r[i], &base, err);
        } else {
            code = sum_record(in, &r[i], err);
            bool last = i + 1 == count || in->options->ranks_hold != HOLD_EXPERTS;
            if (!code && last)
                code = flush_sum(in, &r[i], err);
        }
        if (code == MZ_EINPUT)
            mz_err_prefix(err, "%s: forward pass %lld, rank %d", path_of(in, r[i].file),
                          (long long)r[i].pass, r[i].rank);
    }
    return code;
}

static mz_code create(records_import *in, const char *output, const mz_trace_write_options *write,
                      mz_err *err) {
    mz_code code = mz_gather_settle(&in->gather, err);
    if (code)
        return code;
    return mz_trace_create(output, &in->facts, write, &in->writer, err);
}

static mz_code write_batch(records_import *in, const char *output,
                           const mz_trace_write_options *write, mz_err *err) {
    if (in->gather.entries == 0)
        return MZ_OK;
    mz_code code = in->writer ? MZ_OK : create(in, output, write, err);
    int64_t first = in->gather.token;
    if (!code)
        code = mz_gather_write(&in->gather, in->writer, in->report, err);
    for (size_t i = 0; i < in->sequences && !code; i++) {
        in->sequence[i].token_begin += first;
        code = mz_trace_write_sequence(in->writer, &in->sequence[i], err);
    }
    return code;
}

static mz_code write_passes(records_import *in, const char *output,
                            const mz_trace_write_options *write, mz_err *err) {
    mz_code code = MZ_OK;
    mz_progress progress =
        mz_progress_start(&in->app->log, "importing", "records", (int64_t)in->count);
    qsort(in->list, in->count, sizeof *in->list, by_pass);
    for (size_t i = 0, next; i < in->count && !code; i = next) {
        for (next = i + 1; next < in->count && in->list[next].pass == in->list[i].pass &&
                           in->list[next].batch == in->list[i].batch;)
            next++;
        code = gather_batch(in, in->list + i, next - i, err);
        if (!code)
            code = write_batch(in, output, write, err);
        if (!code)
            code = mz_import_stopped(in->app, err);
        mz_progress_update(&progress, (int64_t)next);
    }
    mz_progress_end(&progress);
    if (!code && !in->writer)
        return mz_fail(err, MZ_EINPUT, "%s: no record has a token", path_of(in, 0));
    return code ? code : mz_import_close(path_of(in, 0), in->report, &in->writer, err);
}

static void clean_up(records_import *in, int count) {
    if (in->writer)
        mz_trace_writer_abandon(&in->writer);
    for (int i = 0; i < count; i++) {
        if (in->torch)
            mz_torch_close(&in->torch[i]);
        if (in->map)
            mz_physical_map_free(&in->map[i]);
    }
    mz_gather_free(&in->gather);
    free(in->torch);
    free(in->map);
    free(in->list);
    free(in->rank);
    free(in->scratch);
    free(in->sum);
    free(in->filler);
    free(in->sequence);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "SGLang expert distribution recorder",
                                                .router = "unknown",
                                                .meaning = MZ_STEP_FORWARD};
    records_import in = {.app = app, .options = options, .report = report};
    mz_code code = mz_import_facts(app, options, &defaults, &in.facts, err);
    in.gather.facts = &in.facts;
    in.torch = mz_calloc((size_t)count, sizeof *in.torch);
    in.map = mz_calloc((size_t)count, sizeof *in.map);
    if (!in.torch || !in.map)
        code = mz_fail_nomem(err, "the list of files");
    for (int i = 0; i < count && !code; i++)
        code = open_file(&in, files[i], i, err);
    if (!code && in.count == 0)
        code = mz_fail(err, MZ_EINPUT, "%s: no record in it", files[0]);
    if (!code)
        code = take_ranks(&in, err);
    if (!code)
        code = take_shape(&in, err);
    if (!code)
        code = write_passes(&in, output, write, err);
    clean_up(&in, count);
    return code;
}

const mz_importer mz_import_sglang_records = {
    .name = "sglang-records",
    .summary = "SGLang recorder, modes per_pass and per_token (.pt, all ranks at once)",
    .answers = "experts top-k ranks-hold tokens dropped",
    .recognise = recognise,
    .import = import_files,
};
