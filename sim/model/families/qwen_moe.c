/* Qwen2-MoE (Qwen1.5-MoE too) and Qwen3-MoE. Both may keep some layers dense (mlp_only_layers,
 * decoder_sparse_step). Qwen2 has biases on q, k, v and one gated shared expert; Qwen3 has query
 * and key norms per head and no shared expert. */
#include "sim/model/families/family.h"

static mz_code read_moe_layers(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    int64_t step;
    mz_code code =
        mz_json_int_or(config, "decoder_sparse_step", 1, 1, MZ_MODEL_LAYERS_MAX, &step, err);
    if (code)
        return code;
    for (int32_t l = 0; l < model->layers; l++)
        blocks->is_moe[l] = (l + 1) % step == 0;
    json_t *list = NULL;
    if (mz_json_has(config, "mlp_only_layers"))
        code = mz_json_get(config, "mlp_only_layers", JSON_ARRAY, &list, err);
    if (code)
        return code;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        if (!json_is_integer(item) || json_integer_value(item) < 0 ||
            json_integer_value(item) >= model->layers)
            return mz_fail(err, MZ_EINPUT,
                           "%s: 'mlp_only_layers' must hold layer numbers from 0 to %d",
                           config->where, model->layers - 1);
        blocks->is_moe[json_integer_value(item)] = false;
    }
    bool dense = false;
    for (int32_t l = 0; l < model->layers; l++)
        dense = dense || !blocks->is_moe[l];
    return dense ? mz_read_size(config, "intermediate_size", &model->dense_intermediate, err)
                 : MZ_OK;
}

static mz_code read_common(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_code code = mz_read_experts(config, blocks, "num_experts", "num_experts_per_tok",
                                   "moe_intermediate_size", err);
    if (code == MZ_OK)
        code = mz_read_head_dim(config, blocks, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "norm_topk_prob", false, &blocks->model->weights_normalized,
                               err);
    if (code == MZ_OK)
        code = read_moe_layers(config, blocks, err);
    return code;
}

static mz_code read_qwen3(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_code code = read_common(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_attention_bias(config, blocks, true, err);
    blocks->q_norm = blocks->k_norm = blocks->model->head_dim;
    return code;
}

static mz_code read_qwen2(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_code code = read_common(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_size(config, "shared_expert_intermediate_size",
                            &blocks->model->shared_intermediate, err);
    blocks->model->shared_experts = 1;
    blocks->qkv_bias = true;
    return code;
}

static void layer_qwen3(mz_blocks *blocks) {
    mz_add_norms(blocks);
    mz_add_attention(blocks);
    mz_add_mlp(blocks);
}

static void layer_qwen2(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    layer_qwen3(blocks);
    if (!model->is_moe[blocks->layer])
        return;
    mz_add_ffn(blocks, MZ_TIER_SHARED, "mlp.shared_expert", model->shared_intermediate, 1);
    mz_add(blocks, MZ_TIER_SHARED, "mlp.shared_expert_gate.weight", 1, model->hidden, 1);
}

const mz_family mz_family_qwen3_moe = {
    .model_type = "qwen3_moe", .read = read_qwen3, .layer = layer_qwen3};
const mz_family mz_family_qwen2_moe = {
    .model_type = "qwen2_moe", .read = read_qwen2, .layer = layer_qwen2};
