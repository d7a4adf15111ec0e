#include "traces/importers/tokens.h"

#include "common/base/arena.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct mz_token_row {
    int64_t sequence, token, layer;
    size_t index; /* of its values */
};

mz_code mz_tokens_sequence(mz_tokens *tokens, const char *name, int32_t domain, int64_t *sequence,
                           mz_err *err) {
    if (!tokens->names && !(tokens->names = json_object()))
        return mz_fail_nomem(err, "names of sequences");
    const json_t *known = json_object_get(tokens->names, name);
    if (known) {
        *sequence = json_integer_value(known);
        return MZ_OK;
    }
    *sequence = (int64_t)tokens->sequences;
    if (!mz_grow((void **)&tokens->domain, &tokens->domain_room, tokens->sequences + 1,
                 sizeof *tokens->domain) ||
        json_object_set_new(tokens->names, name, json_integer(*sequence)))
        return mz_fail_nomem(err, "names of sequences");
    tokens->domain[tokens->sequences++] = domain;
    return MZ_OK;
}

mz_code mz_tokens_add(mz_tokens *tokens, int64_t sequence, int64_t token, int64_t layer,
                      const uint16_t *expert, const float *weight, mz_err *err) {
    size_t k = (size_t)tokens->facts->top_k, first = tokens->rows * k;
    bool ok =
        mz_grow((void **)&tokens->row, &tokens->row_room, tokens->rows + 1, sizeof *tokens->row) &&
        mz_grow((void **)&tokens->expert, &tokens->expert_room, first + k, sizeof *tokens->expert);
    if (ok && tokens->facts->has_weight)
        ok = mz_grow((void **)&tokens->weight, &tokens->weight_room, first + k,
                     sizeof *tokens->weight);
    if (!ok)
        return mz_fail_nomem(err, "rows of the log");
    memcpy(tokens->expert + first, expert, k * sizeof *expert);
    if (tokens->facts->has_weight) {
        double sum = 0;
        memcpy(tokens->weight + first, weight, k * sizeof *weight);
        for (size_t i = 0; i < k; i++)
            sum += weight[i];
        tokens->normalized = (tokens->rows == 0 || tokens->normalized) && fabs(sum - 1) < 0.01;
    }
    tokens->row[tokens->rows] =
        (mz_token_row){.sequence = sequence, .token = token, .layer = layer, .index = tokens->rows};
    tokens->rows++;
    return MZ_OK;
}

void mz_tokens_forget(mz_tokens *tokens) {
    tokens->rows = 0;
}

static int by_place(const void *a, const void *b) {
    const mz_token_row *x = a, *y = b;
    if (x->sequence != y->sequence)
        return x->sequence < y->sequence ? -1 : 1;
    if (x->token != y->token)
        return x->token < y->token ? -1 : 1;
    return (x->layer > y->layer) - (x->layer < y->layer);
}

static int by_number(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Layers of the trace: the different numbers that the log names. */
static mz_code settle_layers(mz_tokens *tokens, mz_err *err) {
    int64_t *layer = mz_calloc(tokens->rows + 1, sizeof *layer);
    size_t distinct = 0;
    if (!layer)
        return mz_fail_nomem(err, "layers");
    for (size_t i = 0; i < tokens->rows; i++)
        layer[i] = tokens->row[i].layer;
    qsort(layer, tokens->rows, sizeof *layer, by_number);
    for (size_t i = 0; i < tokens->rows; i++)
        distinct += i == 0 || layer[i] != layer[i - 1];
    if (distinct > 0 && layer[tokens->rows - 1] - layer[0] == (int64_t)distinct - 1)
        mz_import_note(tokens->facts, "layers=%lld-%lld", (long long)layer[0],
                       (long long)layer[tokens->rows - 1]);
    else
        mz_import_note(tokens->facts, "layers=%zu of those up to %lld", distinct,
                       tokens->rows ? (long long)layer[tokens->rows - 1] : 0);
    free(layer);
    if (distinct == 0 || distinct > MZ_LAYERS_MAX)
        return mz_fail(err, MZ_EINPUT, "%zu layers; there must be 1 to %d", distinct,
                       MZ_LAYERS_MAX);
    tokens->facts->layers = (int32_t)distinct;
    return MZ_OK;
}

/* Name of a sequence, for a message. */
static const char *name_of(const mz_tokens *tokens, int64_t sequence) {
    const char *name;
    json_t *value;
    json_object_foreach(tokens->names, name,
                        value) if (json_integer_value(value) == sequence) return name;
    return "?";
}

/* Rows [first, first + count) are one sequence; its complete tokens go to the block. */
static mz_code write_sequence(mz_tokens *tokens, mz_block *block, const mz_token_row *row,
                              size_t count, mz_trace_writer *writer, mz_import_report *report,
                              mz_err *err) {
    size_t layers = (size_t)tokens->facts->layers, k = (size_t)tokens->facts->top_k;
    int64_t whole = 0;
    for (size_t i = 1; i < count; i++)
        if (by_place(&row[i - 1], &row[i]) == 0)
            return mz_fail(err, MZ_EINPUT, "sequence %.80s, token %lld, layer %lld: recorded twice",
                           name_of(tokens, row->sequence), (long long)row[i].token,
                           (long long)row[i].layer);
    mz_code code = mz_block_begin(block, (int64_t)(count / layers), writer, report, err);
    for (size_t i = 0, next; i < count && !code; i = next) {
        for (next = i + 1; next < count && row[next].token == row[i].token; next++)
            ;
        if (next - i != layers) {
            report->skipped += (int64_t)(next - i);
            continue;
        }
        for (size_t l = 0; l < layers; l++) {
            size_t to = ((size_t)whole * layers + l) * k, from = row[i + l].index * k;
            memcpy(mz_block_expert(block) + to, tokens->expert + from, k * sizeof(uint16_t));
            if (block->weights)
                memcpy(mz_block_weight(block) + to, tokens->weight + from, k * sizeof(float));
        }
        whole++;
    }
    return code || whole == 0
               ? code
               : mz_block_end(block, whole, true, tokens->domain[row->sequence], err);
}

static mz_code write_rows(mz_tokens *tokens, mz_block *block, mz_trace_writer *writer,
                          mz_import_report *report, mz_err *err) {
    mz_code code = MZ_OK;
    for (size_t i = 0, next; i < tokens->rows && !code; i = next) {
        for (next = i + 1;
             next < tokens->rows && tokens->row[next].sequence == tokens->row[i].sequence; next++)
            ;
        code = write_sequence(tokens, block, tokens->row + i, next - i, writer, report, err);
    }
    if (!code)
        code = mz_block_write(block, writer, report, err);
    if (!code && report->tokens == 0)
        code = mz_fail(err, MZ_EINPUT, "no token has all %d layers", tokens->facts->layers);
    return code;
}

mz_code mz_tokens_write(mz_tokens *tokens, const mz_import_options *options, const char *output,
                        const mz_trace_write_options *write, mz_import_report *report,
                        mz_err *err) {
    mz_trace_writer *writer = NULL;
    mz_trace_facts *facts = tokens->facts;
    mz_code code = settle_layers(tokens, err);
    if (code)
        return code;
    facts->ranks = 1;
    facts->has_sequences = true;
    if (options->weights_normalized < 0)
        facts->weights_normalized = facts->has_weight && tokens->normalized;
    qsort(tokens->row, tokens->rows, sizeof *tokens->row, by_place);
    mz_block block = {.layers = facts->layers,
                      .top_k = facts->top_k,
                      .weights = facts->has_weight,
                      .step_per_block = facts->step_meaning != MZ_STEP_NONE};
    code = mz_trace_create(output, facts, write, &writer, err);
    if (!code)
        code = write_rows(tokens, &block, writer, report, err);
    if (!code)
        code = mz_trace_writer_close(&writer, err);
    if (writer)
        mz_trace_writer_abandon(&writer);
    mz_block_free(&block);
    return code;
}

void mz_tokens_free(mz_tokens *tokens) {
    json_decref(tokens->names);
    free(tokens->row);
    free(tokens->expert);
    free(tokens->weight);
    free(tokens->domain);
    *tokens = (mz_tokens){0};
}
