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

/* max(x, least), and a NaN stays one: a bound that hid it would make numbers of what depends on it.
 */
MZ_HD float mz_at_least(float x, float least) {
    return x < least ? least : x;
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

/* 1 / sqrt(max(x, least)), 0 where that is 0: of what has never had a gradient. A NaN's lower half
 * is zero, as the host's writers of bf16 want it. */
MZ_HD float mz_inverse_root(float x, float least) {
    const float bounded = mz_at_least(x, least);
    if (bounded > 0)
        return 1.0f / sqrtf(bounded);
    return bounded == bounded ? 0.0f : NAN;
}

/* The same of a row's factor over their mean. Of an infinite mean nothing is left of finite ones:
 * without a floor their updates are infinite. */
MZ_HD float mz_row_root(float row, float mean, float least) {
    if (mean > FLT_MAX && least == 0)
        return 1.0f / sqrtf(row / mean);
    return mz_inverse_root(row / mean, least);
}

/* 1 / max(1, RMS) */
MZ_HD float mz_clip_of(float rms) {
    return rms <= 1 ? 1.0f : 1.0f / rms;
}

/* Row factors from this on may be at or above the floor, least * mean, of a step whose mean is not
 * known yet: the mean falls to beta2 times the one before it at most. Of a NaN any number will do:
 * the mean of this step is one, too. */
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

/* DeepSeek-V3's score of a group of n experts by their ranks: the sum of its two best, and the best
 * of them, which decides between groups that have no other number. */
typedef struct mz_group {
    float sum, best;
} mz_group;
MZ_HD mz_group mz_group_of(const float *rank, int32_t n) {
    float first = -INFINITY, second = -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        if (rank[i] > first) {
            second = first;
            first = rank[i];
        } else if (rank[i] > second) {
            second = rank[i];
        }
    }
    mz_group g = {n > 1 ? mz_router_rank(first + second) : first, first};
    return g;
}
/* Experts are left of the best groups alone. */
MZ_HD bool mz_router_is_grouped(const mz_router *a) {
    return a->kind == MZ_ROUTER_SIGMOID && a->topk_group < a->n_group;
}
/* Of two groups the one that is kept rather; ties go to the lower. */
MZ_HD bool mz_group_precedes(mz_group x, int32_t x_at, mz_group y, int32_t y_at) {
    if (x.sum != y.sum)
        return x.sum > y.sum;
    if (x.sum == -INFINITY && x.best != y.best)
        return x.best > y.best;
    return x_at < y_at;
}

/* Weights are divided by the sum of the chosen ones. */
MZ_HD bool mz_router_is_normalized(const mz_router *a) {
    return a->kind == MZ_ROUTER_AOE ? !a->softmax_all : a->normalize;
}

#endif
