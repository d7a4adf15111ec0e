#include "traces/importers/tokens.h"

#include "common/base/arena.h"

#include <stdlib.h>
#include <string.h>

/* The beginning of a record; ids and then weights follow. */
typedef struct token_key {
    int64_t token;
    int32_t sequence, layer;
} token_key;

static int by_place(const void *a, const void *b) {
    token_key x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    if (x.sequence != y.sequence)
        return x.sequence < y.sequence ? -1 : 1;
    if (x.token != y.token)
        return x.token < y.token ? -1 : 1;
    return (x.layer > y.layer) - (x.layer < y.layer);
}

mz_tokens mz_tokens_make(mz_trace_facts *facts, const char *output) {
    return (mz_tokens){.facts = facts, .rows = mz_spill_make(0, by_place, output)};
}

mz_code mz_tokens_sequence(mz_tokens *tokens, const char *name, int32_t domain, int32_t *sequence,
                           mz_err *err) {
    bool fresh;
    mz_code code = mz_names_number(&tokens->names, name, sequence, &fresh, err);
    if (code || !fresh)
        return code;
    if (!mz_grow((void **)&tokens->domain, &tokens->domain_room, (size_t)*sequence + 1,
                 sizeof *tokens->domain))
        return mz_fail_nomem(err, "domains of sequences");
    tokens->domain[*sequence] = domain;
    return MZ_OK;
}

mz_code mz_tokens_weights(const mz_tokens *tokens, const mz_jsonl *lines, const char *key,
                          float *weight, mz_err *err) {
    const json_t *array = json_object_get(lines->object, key);
    if (tokens->facts->has_weight)
        return mz_jsonl_weights(lines, key, array, tokens->facts->top_k, weight, err);
    return array ? mz_jsonl_fail(lines, err, "\"%s\", which the first row has not", key) : MZ_OK;
}

mz_code mz_tokens_add(mz_tokens *tokens, int32_t sequence, int64_t token, int64_t layer,
                      const uint16_t *expert, const float *weight, mz_err *err) {
    size_t k = (size_t)tokens->facts->top_k;
    const token_key key = {.token = token, .sequence = sequence, .layer = (int32_t)layer};
    if (!tokens->record) {
        tokens->rows.size = sizeof key + k * sizeof *expert;
        if (tokens->facts->has_weight)
            tokens->rows.size += k * sizeof *weight;
        tokens->record = mz_calloc(1, tokens->rows.size);
        if (!tokens->record)
            return mz_fail_nomem(err, "a row of the log");
    }
    memcpy(tokens->record, &key, sizeof key);
    memcpy(tokens->record + sizeof key, expert, k * sizeof *expert);
    if (tokens->facts->has_weight) {
        memcpy(tokens->record + sizeof key + k * sizeof *expert, weight, k * sizeof *weight);
        tokens->normalized = (tokens->rows.records == 0 || tokens->normalized) &&
                             mz_weights_normalized(weight, 1, (int32_t)k);
    }
    mz_code code = mz_labels_add(&tokens->layers, layer, err);
    return code ? code : mz_spill_add(&tokens->rows, tokens->record, err);
}

/* Layers of the trace: the different numbers that the log names. */
static mz_code settle_layers(mz_tokens *tokens, mz_err *err) {
    const mz_labels *layers = &tokens->layers;
    size_t count = layers->count;
    if (count == 0)
        return mz_fail(err, MZ_EINPUT, "no row in it");
    if (count > MZ_LAYERS_MAX)
        return mz_fail(err, MZ_EINPUT, "%zu layers; there must be 1 to %d", count, MZ_LAYERS_MAX);
    int64_t first = layers->value[0], last = layers->value[count - 1];
    if (last - first == (int64_t)count - 1)
        mz_import_note(tokens->facts, "layers=%lld-%lld", (long long)first, (long long)last);
    else
        mz_import_note(tokens->facts, "layers=%zu of those up to %lld", count, (long long)last);
    tokens->facts->layers = (int32_t)count;
    return MZ_OK;
}

/* The sequence being put together: whole tokens so far, and layers of the last one. */
typedef struct sequence_state {
    token_key last;
    int64_t whole;
    int32_t layers;
    bool any;
} sequence_state;

/* One row behind those of its token that came before. */
static mz_code take_row(mz_tokens *tokens, const unsigned char *record, sequence_state *state,
                        mz_import_report *report, mz_err *err) {
    size_t k = (size_t)tokens->facts->top_k, row = (size_t)tokens->facts->layers * k;
    token_key key;
    memcpy(&key, record, sizeof key);
    bool same = state->layers > 0 && state->last.token == key.token;
    if (state->any && by_place(&state->last, &key) == 0)
        return mz_fail(err, MZ_EINPUT, "sequence %.80s, token %lld, layer %d: recorded twice",
                       mz_names_text(&tokens->names, key.sequence), (long long)key.token,
                       key.layer);
    if (!same) {
        report->skipped += state->layers; /* of a token that lacks some */
        state->layers = 0;
        mz_code code = mz_sequence_grow(&tokens->sequence, state->whole + 1, row,
                                        tokens->facts->has_weight, err);
        if (code)
            return mz_err_prefix(err, "%.80s", mz_names_text(&tokens->names, key.sequence));
    }
    size_t to = (size_t)state->whole * row + (size_t)state->layers * k;
    memcpy(tokens->sequence.expert + to, record + sizeof key, k * sizeof(uint16_t));
    if (tokens->facts->has_weight)
        memcpy(tokens->sequence.weight + to, record + sizeof key + k * sizeof(uint16_t),
               k * sizeof(float));
    state->last = key;
    state->any = true;
    if (++state->layers == tokens->facts->layers) {
        state->whole++;
        state->layers = 0;
    }
    return MZ_OK;
}

/* The sequence that ended goes to the block. */
static mz_code end_sequence(mz_tokens *tokens, sequence_state *state, mz_block *block,
                            mz_trace_writer *writer, mz_import_report *report, mz_err *err) {
    report->skipped += state->layers;
    mz_code code = MZ_OK;
    if (state->whole > 0)
        code = mz_block_add(block, tokens->sequence.expert, tokens->sequence.weight, state->whole,
                            tokens->domain[state->last.sequence], writer, report, err);
    state->whole = 0;
    state->layers = 0;
    return code;
}

static mz_code write_rows(const mz_app *app, mz_tokens *tokens, mz_block *block,
                          mz_trace_writer *writer, mz_import_report *report, mz_err *err) {
    sequence_state state = {.any = false};
    const void *record = NULL;
    mz_code code = mz_spill_rewind(&tokens->rows, err);
    while (!code) {
        code = mz_spill_next(&tokens->rows, &record, err);
        if (code || !record)
            break;
        token_key key;
        memcpy(&key, record, sizeof key);
        if (state.any && key.sequence != state.last.sequence)
            code = end_sequence(tokens, &state, block, writer, report, err);
        if (!code)
            code = take_row(tokens, record, &state, report, err);
        if (!code)
            code = mz_import_stopped(app, err);
    }
    if (!code)
        code = end_sequence(tokens, &state, block, writer, report, err);
    if (!code)
        code = mz_block_write(block, writer, report, err);
    if (!code && report->tokens == 0)
        code = mz_fail(err, MZ_EINPUT, "no token has all %d layers", tokens->facts->layers);
    return code;
}

mz_code mz_tokens_write(const mz_app *app, mz_tokens *tokens, const mz_import_options *options,
                        const char *output, const mz_trace_write_options *write,
                        mz_import_report *report, mz_err *err) {
    mz_trace_writer *writer = NULL;
    mz_trace_facts *facts = tokens->facts;
    mz_code code = settle_layers(tokens, err);
    if (code)
        return code;
    facts->ranks = 1;
    facts->has_sequences = true;
    if (options->weights_normalized < 0)
        facts->weights_normalized = tokens->normalized;
    mz_block block = {.layers = facts->layers,
                      .top_k = facts->top_k,
                      .weights = facts->has_weight,
                      .step_per_block = facts->step_meaning != MZ_STEP_NONE};
    code = mz_trace_create(output, facts, write, &writer, err);
    if (!code)
        code = write_rows(app, tokens, &block, writer, report, err);
    if (!code)
        code = mz_trace_writer_close(&writer, err);
    if (writer)
        mz_trace_writer_abandon(&writer);
    mz_block_free(&block);
    return code;
}

void mz_tokens_free(mz_tokens *tokens) {
    mz_spill_free(&tokens->rows);
    mz_labels_free(&tokens->layers);
    mz_names_free(&tokens->names);
    free(tokens->record);
    free(tokens->domain);
    mz_sequence_free(&tokens->sequence);
}
