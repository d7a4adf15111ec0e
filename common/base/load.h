/* The load of one layer call: who sends how many pairs to which expert, and, where the trace holds
 * them, the pairs themselves. Shared by traces (which fill it) and policies (which read it).
 *
 * A pair is one (token, expert) choice of the router. Source rank = the rank that holds the token.
 */
#ifndef MIZAN_BASE_LOAD_H
#define MIZAN_BASE_LOAD_H

#include "common/base/err.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct mz_load {
    int32_t sources; /* S: source ranks of this expert-parallel group */
    int32_t experts; /* E: routed experts of the layer */
    int64_t *count;  /* [S][E] pairs, row-major, non-negative; owner: whoever made the load */
    int64_t *total;  /* [E] n_e: sums over sources */
    int64_t *source; /* [S] sums over experts */
    int64_t pairs;   /* sum of everything */
} mz_load;

/* Fills total, source and pairs from count (all arrays already allocated). O(S*E). */
void mz_load_sum(mz_load *load);

/* Pairs of one layer call, grouped by source rank in rank order, tokens in order within a source,
 * the router's order within a token. Arrays that the trace does not hold are NULL. */
typedef struct mz_pairs {
    int32_t sources;
    int32_t top_k; /* pairs per token, or 0: variable, see token_pairs */
    int64_t tokens, pairs;
    const int64_t *token_begin;  /* [S+1] first token of each source */
    const int64_t *pair_begin;   /* [S+1] first pair of each source */
    const uint16_t *token_pairs; /* [tokens] pairs of each token when top_k == 0, else NULL */
    const uint16_t *expert;      /* [pairs] */
    const float *weight;         /* [pairs] gate weight w, finite and >= 0, or NULL */
    const float *grad_norm2;     /* [tokens] ||g||^2 of the layer output's gradient, or NULL */
    const float *input_norm2;    /* [tokens] ||x||^2 of the layer input, or NULL */
    const float *hidden_norm2;   /* [pairs] ||h||^2 of the saved down-projection input, or NULL */
} mz_pairs;

/* Where loads come from: a trace, a generator, a benchmark. One pass, in order of
 * (step, micro-batch, layer); every rank of the job is in one load, expert-parallel group i owning
 * the source rows [i*N, (i+1)*N). */
typedef struct mz_step_head {
    int64_t step;          /* as the trace numbers it */
    int32_t micro_batches; /* >= 1 */
    int32_t layers;        /* MoE layers */
    const int64_t *tokens; /* [micro_batches][ranks] tokens held by each rank */
    /* Where the source knows sequences: lengths of those that rank r holds in micro-batch m are
     * sequence_tokens[i], i from sequence_begin[m * ranks + r] to that of the next rank. They add
     * up to at most `tokens`; tokens beyond belong to sequences of unknown length. NULL: none
     * known. */
    const int64_t *sequence_begin, *sequence_tokens;
} mz_step_head;

typedef struct mz_layer_call {
    int32_t micro_batch, layer; /* layer counts MoE layers from 0 */
    const mz_load *load;        /* valid until the next call of next_call */
    const mz_pairs *pairs;      /* the same; NULL when not recorded or not asked for */
} mz_layer_call;

typedef struct mz_load_source {
    void *self;
    int32_t ranks, experts, layers;
    /* *end = true when there is no further step. */
    mz_code (*next_step)(void *self, mz_step_head *head, bool *end, mz_err *err);
    /* micro_batches * layers calls after each next_step, layers fastest. */
    mz_code (*next_call)(void *self, mz_layer_call *call, mz_err *err);
} mz_load_source;

#endif
