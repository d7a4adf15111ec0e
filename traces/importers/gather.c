#include "traces/importers/gather.h"

#include "common/base/arena.h"
#include "traces/importers/rows.h"

#include <stdlib.h>
#include <string.h>

struct mz_gather_entry {
    mz_gather_key key;
    int64_t tokens, pairs;
    size_t first, first_row; /* of its values in expert and weight, or in count; in row */
};

static mz_code add_entry(mz_gather *gather, const mz_gather_key *key, int64_t tokens, int64_t pairs,
                         size_t first, mz_err *err) {
    if (!mz_grow((void **)&gather->entry, &gather->entry_room, gather->entries + 1,
                 sizeof *gather->entry))
        return mz_fail_nomem(err, "calls");
    gather->entry[gather->entries++] = (mz_gather_entry){
        .key = *key, .tokens = tokens, .pairs = pairs, .first = first, .first_row = gather->rows};
    return MZ_OK;
}

static mz_code add_pairs(mz_gather *gather, const mz_gather_key *key, int64_t tokens, int64_t pairs,
                         uint16_t **expert, float **weight, mz_err *err) {
    size_t more = (size_t)pairs, first = gather->pairs;
    bool ok = mz_grow((void **)&gather->expert, &gather->expert_room, first + more + 1,
                      sizeof *gather->expert);
    if (ok && gather->facts->has_weight)
        ok = mz_grow((void **)&gather->weight, &gather->weight_room, first + more + 1,
                     sizeof *gather->weight);
    if (!ok)
        return mz_fail_nomem(err, "expert ids");
    gather->pairs += more;
    *expert = gather->expert + first;
    if (weight)
        *weight = gather->facts->has_weight ? gather->weight + first : NULL;
    return add_entry(gather, key, tokens, pairs, first, err);
}

mz_code mz_gather_pairs(mz_gather *gather, const mz_gather_key *key, int64_t tokens,
                        uint16_t **expert, float **weight, mz_err *err) {
    return add_pairs(gather, key, tokens, tokens * gather->facts->top_k, expert, weight, err);
}

mz_code mz_gather_rows(mz_gather *gather, const mz_gather_key *key, int64_t tokens, int64_t pairs,
                       uint16_t **row, uint16_t **expert, float **weight, mz_err *err) {
    if (!mz_grow((void **)&gather->row, &gather->row_room, gather->rows + (size_t)tokens + 1,
                 sizeof *gather->row))
        return mz_fail_nomem(err, "experts of tokens");
    mz_code code = add_pairs(gather, key, tokens, pairs, expert, weight, err);
    *row = gather->row + gather->rows;
    gather->rows += (size_t)tokens;
    return code;
}

mz_code mz_gather_counts(mz_gather *gather, const mz_gather_key *key, int64_t tokens,
                         int64_t **count, mz_err *err) {
    size_t more = (size_t)gather->facts->experts, first = gather->counts;
    if (!mz_grow((void **)&gather->count, &gather->count_room, first + more, sizeof *gather->count))
        return mz_fail_nomem(err, "counts");
    gather->counts += more;
    *count = gather->count + first;
    memset(*count, 0, more * sizeof **count);
    return add_entry(gather, key, tokens, 0, first, err);
}

mz_code mz_gather_tokens(const mz_import_options *options, int32_t top_k, int64_t pairs,
                         int64_t *tokens, mz_err *err) {
    if (options->tokens > 0 && pairs > options->tokens * top_k)
        return mz_fail(err, MZ_EINPUT,
                       "%lld pairs, but --tokens %lld at top-%d make no more than %lld",
                       (long long)pairs, (long long)options->tokens, top_k,
                       (long long)(options->tokens * top_k));
    if (options->tokens <= 0 && !options->dropped && pairs % top_k)
        return mz_fail(err, MZ_EINPUT,
                       "%lld pairs are no multiple of top-%d; counts after dropping need --dropped "
                       "or --tokens N",
                       (long long)pairs, top_k);
    *tokens = options->tokens > 0 ? options->tokens : options->dropped ? -1 : pairs / top_k;
    return MZ_OK;
}

/* The first place of a number that is not below `value`. */
static size_t place_of(const mz_labels *labels, int64_t value) {
    size_t low = 0, high = labels->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (labels->value[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int64_t mz_labels_find(const mz_labels *labels, int64_t value) {
    size_t place = place_of(labels, value);
    return place < labels->count && labels->value[place] == value ? (int64_t)place : -1;
}

mz_code mz_labels_add(mz_labels *labels, int64_t value, mz_err *err) {
    size_t at = place_of(labels, value);
    if (at < labels->count && labels->value[at] == value)
        return MZ_OK;
    if (!mz_grow((void **)&labels->value, &labels->room, labels->count + 1, sizeof *labels->value))
        return mz_fail_nomem(err, "layers");
    memmove(labels->value + at + 1, labels->value + at,
            (labels->count - at) * sizeof *labels->value);
    labels->value[at] = value;
    labels->count++;
    return MZ_OK;
}

void mz_labels_free(mz_labels *labels) {
    free(labels->value);
    *labels = (mz_labels){0};
}

static const char *labels_of(const mz_gather *gather, char *text, size_t size) {
    const int64_t *label = gather->label.value;
    int32_t n = gather->layers;
    if (n > 1 && label[n - 1] - label[0] == n - 1) {
        snprintf(text, size, "%lld-%lld", (long long)label[0], (long long)label[n - 1]);
        return text;
    }
    size_t used = 0;
    text[0] = '\0';
    for (int32_t i = 0; i < n && used + 28 < size; i++)
        used +=
            (size_t)snprintf(text + used, size - used, "%s%lld", i ? "," : "", (long long)label[i]);
    if (used + 28 >= size)
        snprintf(text + used, size - used, "...");
    return text;
}

mz_code mz_gather_settle_labels(mz_gather *gather, mz_err *err) {
    char text[128];
    if (gather->label.count == 0 || gather->label.count > MZ_LAYERS_MAX)
        return mz_fail(err, MZ_EINPUT, "%zu layers; there must be 1 to %d", gather->label.count,
                       MZ_LAYERS_MAX);
    gather->layers = gather->facts->layers = (int32_t)gather->label.count;
    mz_import_note(gather->facts, "layers=%s", labels_of(gather, text, sizeof text));
    return MZ_OK;
}

mz_code mz_gather_settle(mz_gather *gather, mz_err *err) {
    mz_code code = MZ_OK;
    gather->label.count = 0;
    for (size_t i = 0; i < gather->entries && gather->label.count <= MZ_LAYERS_MAX && !code; i++)
        code = mz_labels_add(&gather->label, gather->entry[i].key.layer, err);
    return code ? code : mz_gather_settle_labels(gather, err);
}

static int by_key(const void *a, const void *b) {
    const mz_gather_key *x = &((const mz_gather_entry *)a)->key;
    const mz_gather_key *y = &((const mz_gather_entry *)b)->key;
    if (x->step != y->step)
        return x->step < y->step ? -1 : 1;
    if (x->micro_batch != y->micro_batch)
        return x->micro_batch < y->micro_batch ? -1 : 1;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* Puts the file of a rank before the message, where it is known. */
static mz_code in_file(const mz_gather *gather, int32_t rank, mz_err *err) {
    bool known = gather->path && rank >= 0 && rank < gather->facts->ranks;
    return known ? mz_err_prefix(err, "%s", gather->path[rank]) : err->code;
}

/* Puts the place of a call before the message. */
static mz_code place_fault(const mz_gather *gather, const mz_gather_key *key, mz_err *err) {
    mz_err_prefix(err, "step %lld, micro-batch %d, layer %lld, rank %d", (long long)key->step,
                  key->micro_batch, (long long)key->layer, key->rank);
    return in_file(gather, key->rank, err);
}

static mz_code call_fault(const mz_gather *gather, const mz_gather_key *key, mz_err *err,
                          const char *what) {
    mz_fail(err, MZ_EINPUT, "%s", what);
    return place_fault(gather, key, err);
}

static int64_t sum_of(const int64_t *count, int32_t experts) {
    int64_t sum = 0;
    for (int32_t e = 0; e < experts; e++)
        sum += count[e];
    return sum;
}

static int32_t fullest_of(const int64_t *count, int32_t experts) {
    int32_t fullest = 0;
    for (int32_t e = 1; e < experts; e++)
        fullest = count[e] > count[fullest] ? e : fullest;
    return fullest;
}

/* The fewest tokens that make such counts. */
static int64_t least_tokens(const int64_t *count, const mz_trace_facts *facts) {
    int64_t most = count[fullest_of(count, facts->experts)];
    int64_t least = (sum_of(count, facts->experts) + facts->top_k - 1) / facts->top_k;
    return most > least ? most : least;
}

/* Tokens of every rank of one micro-batch, layers [of rank] seen, and that they agree. */
static mz_code agree(const mz_gather *gather, const mz_gather_entry *entry, size_t entries,
                     int64_t *tokens, int32_t *layers, mz_err *err) {
    const mz_trace_facts *facts = gather->facts;
    for (size_t i = 0; i < entries; i++) {
        const mz_gather_key *key = &entry[i].key;
        int64_t held = entry[i].tokens;
        if (mz_labels_find(&gather->label, key->layer) < 0)
            return call_fault(gather, key, err,
                              "the steps before have no such layer; every step must hold the same "
                              "layers: leave this one out, or record it whole");
        if (key->rank < 0 || key->rank >= facts->ranks)
            return call_fault(gather, key, err, "the trace has no such rank");
        if (i > 0 && by_key(&entry[i - 1], &entry[i]) == 0)
            return call_fault(gather, key, err, "recorded twice");
        if (held < 0) {
            held = least_tokens(gather->count + entry[i].first, facts);
            tokens[key->rank] = held > tokens[key->rank] ? held : tokens[key->rank];
        } else if (layers[key->rank] > 0 && tokens[key->rank] != held) {
            return call_fault(gather, key, err,
                              facts->kind == MZ_TRACE_COUNTS
                                  ? "other tokens than in the layers before; counts after dropping "
                                    "need --dropped or --tokens N"
                                  : "another number of tokens than in the layers before");
        } else {
            tokens[key->rank] = held;
        }
        layers[key->rank]++;
    }
    for (int32_t r = 0; r < facts->ranks; r++)
        if (layers[r] != 0 && layers[r] != gather->layers) {
            mz_fail(err, MZ_EINPUT,
                    "step %lld, micro-batch %d, rank %d: %d of %d layers; the recording is "
                    "incomplete or the file truncated",
                    (long long)entry->key.step, entry->key.micro_batch, r, layers[r],
                    gather->layers);
            return in_file(gather, r, err);
        }
    return MZ_OK;
}

/* That no expert of a call was counted more often than it has tokens. */
static mz_code check_counts(const mz_gather *gather, const mz_gather_key *key,
                            const mz_trace_call_data *call, mz_err *err) {
    int32_t fullest = fullest_of(call->count, gather->facts->experts);
    mz_code code = mz_counts_fit(fullest, call->count[fullest], call->tokens, true, err);
    return code ? place_fault(gather, key, err) : MZ_OK;
}

static mz_code write_calls(const mz_gather *gather, const mz_gather_entry *entry, size_t entries,
                           const int64_t *tokens, const int64_t *begin, mz_trace_writer *writer,
                           mz_import_report *report, mz_err *err) {
    const mz_trace_facts *facts = gather->facts;
    bool counts = facts->kind == MZ_TRACE_COUNTS;
    mz_code code = MZ_OK;
    for (size_t i = 0; i < entries && !code; i++) {
        const mz_gather_key *key = &entry[i].key;
        mz_trace_call_data call = {.step = key->step,
                                   .micro_batch = key->micro_batch,
                                   .layer = (int32_t)mz_labels_find(&gather->label, key->layer),
                                   .rank = key->rank,
                                   .token_begin = begin[key->rank],
                                   .tokens = tokens[key->rank]};
        if (counts) {
            call.count = gather->count + entry[i].first;
            call.pairs = sum_of(call.count, facts->experts);
            code = check_counts(gather, key, &call, err);
        } else {
            call.expert = gather->expert + entry[i].first;
            call.weight = facts->has_weight ? gather->weight + entry[i].first : NULL;
            call.pairs = entry[i].pairs;
            call.token_pairs = facts->top_k == 0 ? gather->row + entry[i].first_row : NULL;
        }
        if (!code)
            code = mz_trace_write_call(writer, &call, err);
        report->calls++;
        report->pairs += call.pairs;
    }
    return code;
}

/* Compacts a call's rows to the tokens that are `used`; *kept of them. */
static mz_code keep_used(const mz_gather *gather, const mz_gather_entry *entry, const bool *used,
                         int64_t *kept, mz_err *err) {
    uint16_t *row = gather->row + entry->first_row;
    int32_t top_k = gather->facts->top_k;
    *kept = 0;
    for (int64_t t = 0; t < entry->tokens; t++) {
        if (!used[t])
            continue;
        if (top_k > 0 && row[t] != top_k) {
            char what[160];
            snprintf(what, sizeof what,
                     "token %lld has %d of %d experts, so pairs were dropped: pass --dropped (the "
                     "trace then holds what was computed)",
                     (long long)t, row[t], top_k);
            return call_fault(gather, &entry->key, err, what);
        }
        row[(*kept)++] = row[t];
    }
    return MZ_OK;
}

/* Leaves out the tokens of a micro-batch that have no expert in any layer: padding. begin[rank] is
 * where a rank's tokens begin among all, `total` of them. */
static mz_code leave_padding(const mz_gather *gather, mz_gather_entry *entry, size_t entries,
                             int64_t *tokens, const int64_t *begin, int64_t total,
                             mz_import_report *report, mz_err *err) {
    int64_t held = 0, kept;
    mz_code code = MZ_OK;
    bool *used = mz_calloc((size_t)total + 1, sizeof *used);
    if (!used)
        return mz_fail_nomem(err, "tokens of a micro-batch");
    for (size_t i = 0; i < entries; i++)
        for (int64_t t = 0; t < entry[i].tokens; t++)
            if (gather->row[entry[i].first_row + (size_t)t] > 0)
                used[begin[entry[i].key.rank] + t] = true;
    for (size_t i = 0; i < entries && !code; i++) {
        int32_t rank = entry[i].key.rank;
        code = keep_used(gather, &entry[i], used + begin[rank], &kept, err);
        if (!code)
            entry[i].tokens = tokens[rank] = kept;
    }
    for (int32_t r = 0; r < gather->facts->ranks; r++)
        held += tokens[r];
    if (!code)
        mz_rows_skip(report, total - held, "tokens without an expert in any layer (padding)");
    free(used);
    return code;
}

/* Numbers the tokens of all ranks from `first` on; the number behind the last. */
static int64_t number_tokens(const int64_t *tokens, int32_t ranks, int64_t first, int64_t *begin) {
    for (int32_t r = 0; r < ranks; r++) {
        begin[r] = first;
        first += tokens[r];
    }
    return first;
}

/* Ranks without a call in a micro-batch that others recorded. */
static void note_absent(const mz_gather *gather, const mz_gather_key *key, const int32_t *layers,
                        mz_import_report *report) {
    for (int32_t r = 0; r < gather->facts->ranks; r++) {
        if (layers[r] > 0)
            continue;
        if (report->absent++ == 0) {
            report->absent_step = key->step;
            report->absent_rank = r;
        }
    }
}

/* One (step, micro-batch). `scratch` holds 2 numbers per rank, `layers` one. */
static mz_code write_group(mz_gather *gather, mz_gather_entry *entry, size_t entries,
                           int64_t *scratch, int32_t *layers, mz_trace_writer *writer,
                           mz_import_report *report, mz_err *err) {
    int32_t ranks = gather->facts->ranks;
    int64_t *tokens = scratch, *begin = scratch + ranks;
    memset(tokens, 0, (size_t)ranks * sizeof *tokens);
    memset(layers, 0, (size_t)ranks * sizeof *layers);
    mz_code code = agree(gather, entry, entries, tokens, layers, err);
    if (code)
        return code;
    note_absent(gather, &entry->key, layers, report);
    if (gather->rows > 0) {
        int64_t total = number_tokens(tokens, ranks, 0, begin);
        code = leave_padding(gather, entry, entries, tokens, begin, total, report, err);
        if (code)
            return code;
    }
    int64_t first = gather->token;
    gather->token = number_tokens(tokens, ranks, first, begin);
    report->tokens += gather->token - first;
    return write_calls(gather, entry, entries, tokens, begin, writer, report, err);
}

mz_code mz_gather_write(mz_gather *gather, mz_trace_writer *writer, mz_import_report *report,
                        mz_err *err) {
    size_t ranks = (size_t)gather->facts->ranks;
    int64_t *scratch = mz_calloc(ranks, 2 * sizeof *scratch);
    int32_t *layers = mz_calloc(ranks, sizeof *layers);
    mz_code code = scratch && layers ? MZ_OK : mz_fail_nomem(err, "tokens per rank");
    if (gather->entries > 0)
        qsort(gather->entry, gather->entries, sizeof *gather->entry, by_key);
    for (size_t i = 0, next; i < gather->entries && !code; i = next) {
        const mz_gather_key *key = &gather->entry[i].key;
        for (next = i + 1; next < gather->entries; next++)
            if (gather->entry[next].key.step != key->step ||
                gather->entry[next].key.micro_batch != key->micro_batch)
                break;
        code =
            write_group(gather, gather->entry + i, next - i, scratch, layers, writer, report, err);
    }
    free(scratch);
    free(layers);
    gather->entries = gather->pairs = gather->counts = gather->rows = 0;
    return code;
}

void mz_gather_free(mz_gather *gather) {
    free(gather->entry);
    free(gather->expert);
    free(gather->weight);
    free(gather->count);
    free(gather->row);
    mz_labels_free(&gather->label);
    *gather = (mz_gather){0};
}

mz_code mz_gather_write_all(mz_gather *gather, const char *output,
                            const mz_trace_write_options *write, mz_import_report *report,
                            mz_err *err) {
    mz_trace_writer *writer = NULL;
    mz_code code = mz_trace_create(output, gather->facts, write, &writer, err);
    if (!code)
        code = mz_gather_write(gather, writer, report, err);
    if (!code)
        code = mz_trace_writer_close(&writer, err);
    if (writer)
        mz_trace_writer_abandon(&writer);
    return code;
}
