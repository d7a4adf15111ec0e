/* Gate weights of chosen experts from a token's logits over all experts. */
#ifndef MIZAN_TRACES_IMPORTERS_LOGITS_H
#define MIZAN_TRACES_IMPORTERS_LOGITS_H

#include "common/base/err.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum mz_scores {
    MZ_SCORES_NONE,
    MZ_SCORES_SOFTMAX_CHOSEN, /* softmax, then divided by the sum over the chosen */
    MZ_SCORES_SOFTMAX_ALL,    /* softmax over all experts, as it is */
    MZ_SCORES_SIGMOID         /* sigmoid of each, divided by the sum over the chosen */
} mz_scores;

/* --scores NAME; NULL or another name: MZ_EINPUT that explains the choices. */
mz_code mz_scores_parse(const char *path, const char *name, mz_scores *scores, mz_err *err);
bool mz_scores_normalized(mz_scores scores);
const char *mz_scores_router(mz_scores scores); /* "softmax", "sigmoid", "unknown" */

/* weight[i] of the `top_k` experts, computed in double. A logit that is no number: MZ_EINPUT. */
mz_code mz_scores_weights(mz_scores scores, const float *logit, int32_t experts,
                          const uint16_t *expert, int32_t top_k, float *weight, mz_err *err);

#endif
