/* Pairs for calls of which only counts are known. A replay moves rows of tokens, so every pair
 * needs a token; which one the trace does not say. Of a source with P pairs, T = ceil(P / k) tokens
 * are made; its pairs, numbered expert by expert, go to them in turns: pair i to token i mod T. So
 * experts of a token differ (as long as no expert has more than T pairs of the source), and tokens
 * have k pairs or one fewer. */
#ifndef MIZAN_REPLAY_DEAL_H
#define MIZAN_REPLAY_DEAL_H

#include "common/base/load.h"

#include <stddef.h>

/* Storage of dealt pairs, grown as needed; zeroed: empty. */
typedef struct mz_dealt {
    int64_t *token_begin, *pair_begin;
    uint16_t *token_pairs, *expert;
    size_t sources_cap[2], tokens_cap, pairs_cap;
} mz_dealt;

/* The pairs of `load`, k >= 1 for each token; they point into `dealt` until the next call. top_k is
 * k where every token got k pairs, else 0 with token_pairs. MZ_ENOMEM alone. O(pairs). */
mz_code mz_deal_pairs(mz_dealt *dealt, const mz_load *load, int32_t k, mz_pairs *pairs,
                      mz_err *err);
void mz_dealt_free(mz_dealt *dealt);

#endif
