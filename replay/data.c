#include "replay/data.h"

#include "common/base/rng.h"
#include "kernels/arithmetic.h"

#include <math.h>

enum { BASE_STREAM = 0x62617365, WEIGHT_STREAM = 0x77656967 };

/* ||g||^2 per value of the hidden size where none was recorded. */
static const double GRADIENT_VARIANCE = 1e-4;

float mz_data_round(mz_dtype type, float value) {
    return type == MZ_BF16 ? mz_from_bf16(mz_to_bf16(value)) : value;
}

void mz_data_base(const mz_replay_job *job, float *base) {
    const int64_t H = job->hidden;
    for (int64_t b = 0; b < MZ_DATA_ROWS; b++) {
        float *row = base + b * H;
        mz_rng rng = mz_rng_make(job->seed, mz_rng_stream((uint64_t)b, BASE_STREAM, 0, 0));
        double sum = 0;
        for (int64_t j = 0; j < H; j++) {
            row[j] = (float)mz_rng_normal(&rng);
            sum += (double)row[j] * row[j];
        }
        const double factor = sum > 0 ? 1 / sqrt(sum) : 0;
        for (int64_t j = 0; j < H; j++)
            row[j] = mz_data_round(job->type, (float)(row[j] * factor));
    }
}

mz_data_row mz_data_of(const mz_replay_job *job, const mz_replay_call *call, mz_data_kind kind,
                       int32_t rank, int64_t token) {
    const uint64_t of_call =
        mz_rng_stream(job->seed, (uint64_t)call->step, (uint64_t)call->micro_batch,
                      2 * (uint64_t)call->layer + (kind == MZ_DATA_GRADIENT));
    const uint64_t bits = mz_rng_stream(of_call, (uint64_t)rank, (uint64_t)token, 0);
    const bool input = kind == MZ_DATA_INPUT;
    const float *norm2 = input ? call->pairs.input_norm2 : call->pairs.grad_norm2;
    const double H = (double)job->hidden;
    double value = input ? H : GRADIENT_VARIANCE * H;
    if (norm2) {
        const double recorded = job->norm_hidden > 0 ? (double)job->norm_hidden : H;
        value = (double)norm2[call->pairs.token_begin[rank] + token] * (H / recorded);
    }
    return (mz_data_row){.base = (int64_t)(bits % MZ_DATA_ROWS), .scale = (float)sqrt(value)};
}

void mz_data_weights(const mz_replay_job *job, int32_t layer, int32_t expert, mz_data_matrix which,
                     float *value) {
    const bool up = which == MZ_DATA_UP;
    const int64_t H = job->hidden, I = job->intermediate;
    const int64_t n = up ? 2 * I * H : H * I;
    const double limit = sqrt(3.0 / (double)(up ? H : I)); /* variance limit^2 / 3 */
    const uint64_t stream =
        mz_rng_stream((uint64_t)layer, (uint64_t)expert, (uint64_t)which, WEIGHT_STREAM);
    const uint32_t key[2] = {(uint32_t)job->seed, (uint32_t)(job->seed >> 32)};
    enum { PER_BLOCK = 8 }; /* 16 bits are more than a bf16 value holds */
    for (int64_t i = 0; i < n; i += PER_BLOCK) {
        const uint64_t at = (uint64_t)(i / PER_BLOCK);
        const uint32_t counter[4] = {(uint32_t)at, (uint32_t)(at >> 32), (uint32_t)stream,
                                     (uint32_t)(stream >> 32)};
        uint32_t block[4];
        mz_philox(counter, key, block);
        for (int64_t j = i; j < i + PER_BLOCK && j < n; j++) {
            const uint32_t u = block[(j - i) / 2] >> (16 * ((j - i) % 2)) & 0xffff;
            value[j] =
                mz_data_round(job->type, (float)(limit * (((double)u + 0.5) / 32768.0 - 1.0)));
        }
    }
}

mz_score mz_data_score(const mz_replay_job *job) {
    const mz_score kind = (mz_score)job->traits->score_kind;
    const bool hidden = kind == MZ_SCORED_DOWN || kind == MZ_SCORED_WH || kind == MZ_SCORED_H ||
                        kind == MZ_SCORED_SAMPLE;
    return hidden && job->traits->score_combine_bytes == 0 ? MZ_SCORED_W : kind;
}

float mz_data_weight(const mz_replay_job *job, const mz_replay_call *call, int64_t pair) {
    const mz_pairs *p = &call->pairs;
    if (p->weight)
        return p->weight[pair];
    if (p->top_k > 0)
        return 1.0f / (float)p->top_k;
    return p->pairs > 0 ? (float)((double)p->tokens / (double)p->pairs) : 0;
}
