/* What both backends derive from the arguments of routers and optimizers, in one text. Internal to
 * kernels/; C11, C++ and CUDA. */
#ifndef MIZAN_KERNELS_SETTINGS_H
#define MIZAN_KERNELS_SETTINGS_H

#include "kernels/arithmetic.h"
#include "kernels/kernels.h"

/* Takes the next `bytes` of a workspace, 256-byte aligned; without one it only counts. */
static inline void *mz_take(void *workspace, size_t *used, size_t bytes) {
    void *memory = workspace ? (char *)workspace + *used : NULL;
    *used += (bytes + 255) & ~(size_t)255;
    return memory;
}

/* ---- optimizers ---------------------------------------------------------------------------------
 */

/* Below this a row factor is under every floor of the study and its reciprocal may overflow. */
#define MZ_ROW_LEAST 1e-23f
/* Of the mean of the row factors, in SkewAdam's code; Adafactor has none. */
#define MZ_MEAN_LEAST 1e-15f

static inline bool mz_keeps_factors(const mz_update *a) {
    return a->cols > 1 &&
           (a->kind == MZ_UPDATE_ADAFACTOR || (a->kind == MZ_UPDATE_SKEWADAM && a->factored));
}

static inline bool mz_keeps_full_v(const mz_update *a) {
    return a->kind == MZ_UPDATE_ADAMW ||
           ((a->kind == MZ_UPDATE_ADAFACTOR || a->kind == MZ_UPDATE_SKEWADAM) &&
            !mz_keeps_factors(a));
}

/* Settings without momentum do not look at m. */
static inline bool mz_keeps_momentum(const mz_update *a) {
    return a->kind != MZ_UPDATE_ADAFACTOR && (a->kind != MZ_UPDATE_SKEWADAM || a->momentum);
}

/* Numbers of one step that follow from its settings. */
typedef struct mz_update_rates {
    float correction; /* of biases, a factor of the update */
    float beta2;      /* of this step */
    float floor;      /* added to g^2; AdamW: 1 / sqrt(1 - beta2^t) */
    float least;      /* of the second moment in a denominator */
    float mean_least; /* of the mean of the row factors */
} mz_update_rates;

/* Row factors from this on may be at or above the floor, least * mean, of a step whose mean is not
 * known yet: the mean falls to beta2 times the one before it at most. */
MZ_HD float mz_row_bound(mz_update_rates r, float mean_before) {
    const float bound = r.least * r.beta2 * mean_before;
    return bound > MZ_ROW_LEAST ? bound : MZ_ROW_LEAST;
}

/* Bias corrections (moe-variants-and-optimizers.md 6.3): SkewAdam puts the second moment's into the
 * multiplier. */
static inline mz_update_rates mz_update_rates_of(const mz_update *a) {
    const double t = (double)a->step;
    const double first = 1 - pow(a->beta1, t), second = 1 - pow(a->beta2, t);
    mz_update_rates r = {1, a->beta2, 0, 0, 0};
    if (a->kind == MZ_UPDATE_SKEWADAM) {
        r.correction = (float)(sqrt(second) / (a->momentum ? first : 1));
        r.least = a->eps;
        r.mean_least = MZ_MEAN_LEAST;
    } else if (a->kind == MZ_UPDATE_ADAMW) {
        r.correction = (float)(1 / first);
        r.floor = (float)(1 / sqrt(second));
    } else if (a->kind == MZ_UPDATE_ADAFACTOR) {
        r.beta2 = (float)(1 - pow(t, -0.8));
        r.floor = a->eps;
    }
    return r;
}

/* ---- routers ------------------------------------------------------------------------------------
 */

/* Of sums that are divided by. */
#define MZ_SUM_LEAST 1e-20f

/* The number of pairs of a token follows from its logits. */
MZ_HD bool mz_router_is_variable(const mz_router *a) {
    return a->kind == MZ_ROUTER_RELU || a->kind == MZ_ROUTER_ROUTING_FREE;
}

MZ_HD bool mz_router_is_softmax(const mz_router *a) {
    return a->kind == MZ_ROUTER_SOFTMAX || a->kind == MZ_ROUTER_AOE;
}

/* By what experts are ranked: NaN is the least, so that as many are chosen as there should be. */
MZ_HD float mz_router_rank(float value) {
    return value == value ? value : -INFINITY;
}

/* Weights are divided by the sum of the chosen ones. */
MZ_HD bool mz_router_is_normalized(const mz_router *a) {
    return a->kind == MZ_ROUTER_AOE ? !a->softmax_all : a->normalize;
}

#endif
