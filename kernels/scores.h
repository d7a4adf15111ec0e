/* The score of a pair, as the host computes it as well (host/pairs.c), bit by bit, and what a drawn
 * pair counts for. Internal to kernels/. */
#ifndef MIZAN_KERNELS_SCORES_H
#define MIZAN_KERNELS_SCORES_H

#include "kernels/arithmetic.h"
#include "kernels/kernels.h"

MZ_HD float mz_score_down(const mz_score_args *a, float w2, int64_t token, int64_t pair) {
    return mz_product3(w2, a->grad_norm2[token], a->hidden_norm2[pair]);
}

/* Before the clamp to FLT_MAX. */
MZ_HD float mz_raw_score(const mz_score_args *a, int64_t token, int64_t pair) {
    const float w2 = a->weight ? MZ_MUL(a->weight[pair], a->weight[pair]) : 1;
    switch (a->kind) {
    case MZ_SCORED_DOWN:
        return mz_score_down(a, w2, token, pair);
    case MZ_SCORED_UP:
        return mz_product3(w2, a->grad_norm2[token], a->input_norm2[token]);
    case MZ_SCORED_W:
        return w2;
    case MZ_SCORED_WH:
        return MZ_MUL(w2, a->hidden_norm2[pair]);
    case MZ_SCORED_G:
        return a->grad_norm2[token];
    case MZ_SCORED_H:
        return a->hidden_norm2[pair];
    case MZ_SCORED_RANDOM:
        return mz_unit_float(mz_pair_bits(a->seed, a->first_pair + (uint64_t)pair));
    case MZ_SCORED_SAMPLE:
        break;
    }
    const float u = mz_unit_float(mz_pair_bits(a->seed, a->first_pair + (uint64_t)pair));
    return sqrtf(mz_finite_score(mz_score_down(a, w2, token, pair))) / u;
}

MZ_HD float mz_score_of(const mz_score_args *a, int64_t token, int64_t pair) {
    return mz_finite_score(mz_raw_score(a, token, pair));
}

/* What a kept pair of a sample counts for: 1 over the chance to be drawn, given the threshold. At
 * most about 1 / u, as the score is not below the threshold; 1 where both are 0. */
MZ_HD float mz_sample_scale(const mz_selection *a, int64_t pair, float threshold) {
    const float u = mz_unit_float(mz_pair_bits(a->seed, a->first_pair + (uint64_t)pair));
    const float root = MZ_MUL(a->score[pair], u);
    const float scale = root >= threshold ? 1.0f : threshold / root;
    return a->weight ? MZ_MUL(a->weight[pair], scale) : scale;
}

#endif
