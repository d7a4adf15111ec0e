#include "traces/importers/logits.h"

#include <math.h>
#include <string.h>

mz_code mz_scores_parse(const char *path, const char *name, mz_scores *scores, mz_err *err) {
    static const char *const names[] = {"none", "softmax-chosen", "softmax-all", "sigmoid"};
    for (int i = 0; i < 4 && name; i++)
        if (strcmp(name, names[i]) == 0) {
            *scores = (mz_scores)i;
            return MZ_OK;
        }
    if (name)
        return mz_fail(err, MZ_EINPUT,
                       "--scores: '%.40s' is not one of softmax-chosen, softmax-all, sigmoid, none",
                       name);
    return mz_fail(err, MZ_EINPUT,
                   "%s: how logits become gate weights is not in the file: pass --scores "
                   "softmax-chosen (sum to 1 over the chosen experts), softmax-all (over all), "
                   "sigmoid (sum to 1 over the chosen) or none",
                   path);
}

bool mz_scores_normalized(mz_scores scores) {
    return scores == MZ_SCORES_SOFTMAX_CHOSEN || scores == MZ_SCORES_SIGMOID;
}

const char *mz_scores_router(mz_scores scores) {
    return scores == MZ_SCORES_SIGMOID ? "sigmoid" : scores ? "softmax" : "unknown";
}

/* exp(logit - highest), or the sigmoid as it is: divided by a sum of these it is the weight. */
static double raw_score(mz_scores scores, double logit, double highest) {
    return scores == MZ_SCORES_SIGMOID ? 1 / (1 + exp(-logit)) : exp(logit - highest);
}

mz_code mz_scores_weights(mz_scores scores, const float *logit, int32_t experts,
                          const uint16_t *expert, int32_t top_k, float *weight, mz_err *err) {
    double highest = -INFINITY, all = 0, chosen = 0;
    for (int32_t e = 0; e < experts; e++) {
        if (isnan(logit[e]) || logit[e] == INFINITY)
            return mz_fail(err, MZ_EINPUT, "logit of expert %d is %g", e, (double)logit[e]);
        highest = logit[e] > highest ? logit[e] : highest;
    }
    if (!isfinite(highest))
        return mz_fail(err, MZ_EINPUT, "all logits are minus infinity");
    for (int32_t e = 0; e < experts; e++)
        all += raw_score(scores, logit[e], highest);
    for (int32_t i = 0; i < top_k; i++)
        chosen += raw_score(scores, logit[expert[i]], highest);
    double sum = mz_scores_normalized(scores) ? chosen : all;
    for (int32_t i = 0; i < top_k; i++)
        weight[i] = (float)(sum > 0 ? raw_score(scores, logit[expert[i]], highest) / sum : 0);
    return MZ_OK;
}
