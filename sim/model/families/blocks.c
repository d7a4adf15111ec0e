#include "sim/model/families/family.h"

#include <stdio.h>

mz_code mz_read_size(mz_json *config, const char *key, int64_t *value, mz_err *err) {
    return mz_json_int(config, key, 1, MZ_MODEL_SIZE_MAX, value, err);
}

mz_code mz_read_size_or(mz_json *config, const char *key, int64_t dflt, int64_t *value,
                        mz_err *err) {
    return mz_json_int_or(config, key, dflt, 1, MZ_MODEL_SIZE_MAX, value, err);
}

mz_code mz_read_experts(mz_json *config, mz_blocks *blocks, const char *experts_key,
                        const char *top_k_key, const char *size_key, mz_err *err) {
    mz_model *model = blocks->model;
    int64_t experts, top_k;
    mz_code code = mz_json_int(config, experts_key, 1, MZ_MODEL_EXPERTS_MAX, &experts, err);
    if (code == MZ_OK)
        code = mz_json_int(config, top_k_key, 1, experts, &top_k, err);
    if (code == MZ_OK)
        code = mz_read_size(config, size_key, &model->expert_intermediate, err);
    if (code)
        return code;
    model->experts = (int32_t)experts;
    model->top_k = (int32_t)top_k;
    return MZ_OK;
}

mz_code mz_read_router_groups(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    int64_t groups;
    mz_code code = mz_json_int_or(config, "n_group", 1, 1, model->experts, &groups, err);
    if (code == MZ_OK && model->experts % groups)
        code = mz_fail(err, MZ_EINPUT, "%s: 'n_group' %lld does not divide %d experts",
                       config->where, (long long)groups, model->experts);
    if (code == MZ_OK)
        model->router_groups = (int32_t)groups;
    return code;
}

mz_code mz_read_head_dim(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    if (!mz_json_has(config, "head_dim") && model->hidden % model->heads)
        return mz_fail(err, MZ_EINPUT,
                       "%s: 'hidden_size' %lld is not a multiple of 'num_attention_heads' %d and "
                       "there is no 'head_dim'",
                       config->where, (long long)model->hidden, model->heads);
    mz_code code =
        mz_read_size_or(config, "head_dim", model->hidden / model->heads, &model->head_dim, err);
    model->v_head_dim = model->head_dim;
    return code;
}

mz_code mz_read_first_dense(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    int64_t dense, size = 0;
    mz_code code =
        mz_json_int_or(config, "first_k_dense_replace", 0, 0, model->layers, &dense, err);
    if (code)
        return code;
    for (int32_t l = 0; l < model->layers; l++)
        blocks->is_moe[l] = l >= dense;
    if (dense || mz_json_has(config, "intermediate_size")) /* known, though nothing uses it */
        code = mz_read_size(config, "intermediate_size", &size, err);
    model->dense_intermediate = dense ? size : 0;
    return code;
}

mz_code mz_read_attention_bias(mz_json *config, mz_blocks *blocks, bool output, mz_err *err) {
    mz_code code = mz_json_bool_or(config, "attention_bias", false, &blocks->qkv_bias, err);
    blocks->o_bias = blocks->qkv_bias && output;
    return code;
}

mz_tensor *mz_add(mz_blocks *blocks, mz_tier tier, const char *name, int64_t rows, int64_t cols,
                  int64_t count) {
    if (blocks->no_memory || !mz_grow((void **)&blocks->tensor, &blocks->cap, blocks->tensors + 1,
                                      sizeof *blocks->tensor)) {
        blocks->no_memory = true;
        return &blocks->spare;
    }
    mz_tensor *tensor = &blocks->tensor[blocks->tensors++];
    *tensor = (mz_tensor){.rows = rows,
                          .cols = cols,
                          .count = count,
                          .layer = blocks->layer,
                          .tier = tier,
                          .bytes_per_value = blocks->weight_bytes,
                          .trainable = true};
    if (blocks->layer < 0)
        snprintf(tensor->name, sizeof tensor->name, "%s", name);
    else
        snprintf(tensor->name, sizeof tensor->name, "model.layers.%d.%s", blocks->layer, name);
    blocks->parameters += (double)rows * (double)cols * (double)count;
    return tensor;
}

mz_tensor *mz_add_vector(mz_blocks *blocks, mz_tier tier, const char *name, int64_t length) {
    mz_tensor *tensor = mz_add(blocks, tier, name, length, 1, 1);
    tensor->vector = true;
    return tensor;
}

void mz_add_stacked(mz_blocks *blocks, mz_tier tier, const char *name, int64_t rows, int64_t cols,
                    bool vector) {
    mz_tensor *tensor = mz_add(blocks, tier, name, rows, cols, blocks->model->experts);
    tensor->stacked = true;
    tensor->vector = vector;
}

void mz_add_norm(mz_blocks *blocks, const char *name) {
    static const char *const part[] = {"weight", "bias"};
    for (int i = 0; i <= blocks->norm_bias; i++) {
        char full[64];
        snprintf(full, sizeof full, "%s.%s", name, part[i]);
        mz_tensor *tensor = mz_add_vector(blocks, MZ_TIER_BACKBONE, full, blocks->model->hidden);
        if (blocks->norm_bias)
            tensor->bytes_per_value = 4;
    }
}

void mz_add_norms(mz_blocks *blocks) {
    mz_add_norm(blocks, "input_layernorm");
    mz_add_norm(blocks, "post_attention_layernorm");
}

static void add_biased(mz_blocks *blocks, const char *name, int64_t rows, int64_t cols, bool bias) {
    char full[64];
    snprintf(full, sizeof full, "self_attn.%s.weight", name);
    mz_add(blocks, MZ_TIER_BACKBONE, full, rows, cols, 1);
    if (bias) {
        snprintf(full, sizeof full, "self_attn.%s.bias", name);
        mz_add_vector(blocks, MZ_TIER_BACKBONE, full, rows);
    }
}

static void add_norm(mz_blocks *blocks, const char *name, int64_t length) {
    if (length)
        mz_add_vector(blocks, MZ_TIER_BACKBONE, name, length);
}

void mz_add_attention(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    int64_t queries = model->heads * model->head_dim, keys = model->kv_heads * model->head_dim;
    int64_t values = model->kv_heads * model->v_head_dim;
    add_biased(blocks, "q_proj", queries, model->hidden, blocks->qkv_bias);
    add_biased(blocks, "k_proj", keys, model->hidden, blocks->qkv_bias);
    add_biased(blocks, "v_proj", values, model->hidden, blocks->qkv_bias);
    add_biased(blocks, "o_proj", model->hidden, model->heads * model->v_head_dim, blocks->o_bias);
    add_norm(blocks, "self_attn.q_norm.weight", blocks->q_norm);
    add_norm(blocks, "self_attn.k_norm.weight", blocks->k_norm);
    if (blocks->sinks)
        mz_add_vector(blocks, MZ_TIER_BACKBONE, "self_attn.sinks", model->heads);
}

void mz_add_latent_attention(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    int64_t queries = model->heads * model->head_dim;
    if (model->q_lora) {
        add_biased(blocks, "q_a_proj", model->q_lora, model->hidden, blocks->qkv_bias);
        add_norm(blocks, "self_attn.q_a_layernorm.weight", model->q_lora);
        add_biased(blocks, "q_b_proj", queries, model->q_lora, false);
    } else {
        add_biased(blocks, "q_proj", queries, model->hidden, false);
    }
    add_biased(blocks, "kv_a_proj_with_mqa", model->kv_lora + model->rope_dim, model->hidden,
               blocks->qkv_bias);
    add_norm(blocks, "self_attn.kv_a_layernorm.weight", model->kv_lora);
    add_biased(blocks, "kv_b_proj", model->heads * (model->nope_dim + model->v_head_dim),
               model->kv_lora, false);
    add_biased(blocks, "o_proj", model->hidden, model->heads * model->v_head_dim, blocks->o_bias);
}

void mz_add_ffn(mz_blocks *blocks, mz_tier tier, const char *prefix, int64_t intermediate,
                int64_t count) {
    static const char *const matrix[] = {"gate_proj", "up_proj", "down_proj"};
    int64_t hidden = blocks->model->hidden;
    for (int i = blocks->model->gated ? 0 : 1; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.%s.weight", prefix, matrix[i]);
        mz_add(blocks, tier, name, i < 2 ? intermediate : hidden, i < 2 ? hidden : intermediate,
               count);
    }
}

void mz_add_mlp(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    if (!model->is_moe[blocks->layer]) {
        mz_add_ffn(blocks, MZ_TIER_BACKBONE, "mlp", model->dense_intermediate, 1);
        return;
    }
    int64_t experts = (int64_t)model->experts * model->expert_group;
    mz_add(blocks, MZ_TIER_ROUTER, "mlp.gate.weight", experts, model->hidden, 1);
    mz_add_ffn(blocks, MZ_TIER_EXPERT, "mlp.experts.*", model->expert_intermediate, experts);
}

void mz_add_correction_bias(mz_blocks *blocks) {
    mz_tensor *bias = mz_add_vector(blocks, MZ_TIER_ROUTER, "mlp.gate.e_score_correction_bias",
                                    blocks->model->experts);
    bias->bytes_per_value = 4;
    bias->trainable = false;
}
