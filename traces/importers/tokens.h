/* Logs of one row per (sequence, token, layer) in any order: gathered, sorted, and written as whole
 * sequences. */
#ifndef MIZAN_TRACES_IMPORTERS_TOKENS_H
#define MIZAN_TRACES_IMPORTERS_TOKENS_H

#include "traces/importers/common.h"

#include <jansson.h>

typedef struct mz_token_row mz_token_row;

/* Memory: 40 bytes a row, 2 a pair, 4 a weight; the whole log is held. */
typedef struct mz_tokens {
    mz_trace_facts *facts; /* top_k, experts, has_weight before the first row */
    mz_token_row *row;
    size_t rows, row_room;
    uint16_t *expert;
    float *weight;
    size_t expert_room, weight_room;
    json_t *names; /* number of each sequence's name */
    int32_t *domain;
    size_t sequences, domain_room;
    bool normalized; /* the weights of every token so far sum to 1 within 1 % */
} mz_tokens;

/* Number of the sequence `name`; `domain` is taken when the name is new. */
mz_code mz_tokens_sequence(mz_tokens *tokens, const char *name, int32_t domain, int64_t *sequence,
                           mz_err *err);
/* Adds a row. It is checked by the caller. `weight` may be NULL where the trace has none. */
mz_code mz_tokens_add(mz_tokens *tokens, int64_t sequence, int64_t token, int64_t layer,
                      const uint16_t *expert, const float *weight, mz_err *err);
/* Forgets all rows so far. */
void mz_tokens_forget(mz_tokens *tokens);
/* Settles layers, ranks, weights_normalized (unless `options` say) and notes, creates the trace,
 * writes and closes it. Tokens that lack a layer are left out and counted. MZ_EINPUT: no row, or
 * the same (sequence, token, layer) twice. */
mz_code mz_tokens_write(mz_tokens *tokens, const mz_import_options *options, const char *output,
                        const mz_trace_write_options *write, mz_import_report *report, mz_err *err);
void mz_tokens_free(mz_tokens *tokens);

#endif
