/* Logs with one row per (sequence, token, layer), in any order, as servers under load write them:
 * rows are sorted, tokens that lack a layer left out, and blocks of whole sequences become the
 * calls of a trace (micro-batches of step 0, or steps). */
#ifndef MIZAN_TRACES_IMPORTERS_TOKENS_H
#define MIZAN_TRACES_IMPORTERS_TOKENS_H

#include "traces/importers/gather.h"
#include "traces/importers/names.h"
#include "traces/importers/spill.h"

/* Memory: that of a spill, the names and 4 bytes of every sequence, and the longest sequence. */
typedef struct mz_tokens {
    mz_trace_facts *facts; /* top_k, experts, has_weight before the first row */
    mz_spill rows;
    unsigned char *record; /* one row as the spill holds it */
    mz_labels layers;
    mz_names names; /* of sequences */
    int32_t *domain;
    size_t domain_room;
    bool normalized;      /* the weights of every token so far sum to 1 within 1 % */
    mz_sequence sequence; /* the one being put together */
} mz_tokens;

/* `output` is the trace to be written; it must outlive the tokens. */
mz_tokens mz_tokens_make(mz_trace_facts *facts, const char *output);
/* Number of the sequence `name`; `domain` is taken when the name is new. */
mz_code mz_tokens_sequence(mz_tokens *tokens, const char *name, int32_t domain, int32_t *sequence,
                           mz_err *err);
/* The gate weights of a row of JSON, its member `key`; nothing where the trace has none. MZ_EINPUT:
 * the row has no weights but the trace has, or the other way round. Those of rows that are kept are
 * the caller's to hold against their sum. */
mz_code mz_tokens_weights(const mz_tokens *tokens, const mz_jsonl *lines, const char *key,
                          float *weight, mz_err *err);
/* Adds a row. It is checked by the caller. `weight` may be NULL where the trace has none. */
mz_code mz_tokens_add(mz_tokens *tokens, int32_t sequence, int64_t token, int64_t layer,
                      const uint16_t *expert, const float *weight, mz_err *err);
/* Settles layers, ranks, weights_normalized (unless `options` say) and notes, creates the trace,
 * writes and closes it. Tokens that lack a layer are left out and counted. MZ_EINPUT: no row, the
 * same (sequence, token, layer) twice, or a sequence of more than MZ_SEQUENCE_BYTES. */
mz_code mz_tokens_write(const mz_app *app, mz_tokens *tokens, const mz_import_options *options,
                        const char *output, const mz_trace_write_options *write,
                        mz_import_report *report, mz_err *err);
void mz_tokens_free(mz_tokens *tokens);

#endif
