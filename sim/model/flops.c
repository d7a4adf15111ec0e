/* Parameters and FLOPs that follow from a model. A product of m x k by k x n counts 2mnk. */
#include "sim/model/model.h"

int64_t mz_model_parameters(const mz_model *model, mz_tier tier) {
    int64_t total = 0;
    for (int64_t i = 0; i < model->tensors; i++) {
        const mz_tensor *t = &model->tensor[i];
        if (t->tier == tier)
            total += t->rows * t->cols * t->count;
    }
    return total;
}

int64_t mz_model_total(const mz_model *model) {
    int64_t total = 0;
    for (int tier = MZ_TIER_BACKBONE; tier <= MZ_TIER_SHARED; tier++)
        total += mz_model_parameters(model, (mz_tier)tier);
    return total;
}

int64_t mz_model_bytes(const mz_model *model, mz_tier tier) {
    int64_t total = 0;
    for (int64_t i = 0; i < model->tensors; i++) {
        const mz_tensor *t = &model->tensor[i];
        if (t->tier == tier)
            total += t->rows * t->cols * t->count * t->bytes_per_value;
    }
    return total;
}

int64_t mz_model_active_parameters(const mz_model *model) {
    const int64_t chosen = mz_model_expert_parameters(model) / model->expert_group * model->top_k;
    return mz_model_total(model) - mz_model_parameters(model, MZ_TIER_EXPERT) +
           chosen * model->moe_layers;
}

int64_t mz_model_layer_parameters(const mz_model *model, int32_t layer, mz_tier tier) {
    int64_t total = 0;
    for (int64_t i = 0; i < model->tensors; i++) {
        const mz_tensor *t = &model->tensor[i];
        if (t->layer == layer && t->tier == tier)
            total += t->rows * t->cols * t->count;
    }
    return total;
}

int64_t mz_model_expert_parameters(const mz_model *model) {
    for (int32_t l = 0; l < model->layers; l++)
        if (model->is_moe[l])
            return mz_model_layer_parameters(model, l, MZ_TIER_EXPERT) / model->experts;
    return 0;
}

/* Keys per query, averaged over a sequence: the sum over queries of min(position, window) / seq. */
static double keys_per_query(const mz_model *model, int32_t layer, double seq) {
    double window = (double)model->sliding_window;
    if (!model->is_sliding[layer] || window >= seq)
        return seq / 2;
    return window - window * window / (2 * seq);
}

double mz_model_attention_flops(const mz_model *model, int32_t layer, double tokens, double seq) {
    double width = (double)(model->head_dim + model->v_head_dim); /* QK^T, then PV */
    return 2 * tokens * keys_per_query(model, layer, seq) * model->heads * width;
}

double mz_model_projection_flops(const mz_model *model, double tokens) {
    double hidden = (double)model->hidden, heads = model->heads;
    double queries = heads * (double)model->head_dim, values = heads * (double)model->v_head_dim;
    double weights = values * hidden; /* output projection */
    if (model->kv_lora) {
        double latent = (double)model->kv_lora;
        weights += model->q_lora ? (hidden + queries) * (double)model->q_lora : hidden * queries;
        weights += hidden * (latent + (double)model->rope_dim);
        weights += latent * (heads * (double)model->nope_dim + values);
    } else {
        weights += hidden * queries;
        weights += hidden * model->kv_heads * (double)(model->head_dim + model->v_head_dim);
    }
    return 2 * tokens * weights;
}

/* Matrices of one FFN: gate, up and down, or without gate. */
static double matrices(const mz_model *model) {
    return model->gated ? 3 : 2;
}

double mz_model_dense_flops(const mz_model *model, int32_t layer, double tokens) {
    int64_t size = model->is_moe[layer] ? model->shared_intermediate : model->dense_intermediate;
    return 2 * tokens * matrices(model) * (double)model->hidden * (double)size;
}

double mz_model_router_flops(const mz_model *model, double tokens) {
    return 2 * tokens * (double)model->hidden * model->experts * model->expert_group;
}

double mz_model_head_flops(const mz_model *model, double tokens) {
    return 2 * tokens * (double)model->hidden * (double)model->vocab;
}

double mz_model_expert_flops(const mz_model *model, double pairs) {
    return 2 * pairs * matrices(model) * (double)model->hidden * (double)model->expert_intermediate;
}
