/* GPT-OSS: attention alternates between a sliding window and the full sequence, one sink per head,
 * biases everywhere, experts fused into one tensor per layer (gate and up interleaved). The
 * checkpoint is MXFP4; training holds bf16, which is what bytes_per_value says. */
#include "sim/model/families/family.h"

#include <string.h>

static mz_code read_layer_types(mz_json *config, mz_blocks *blocks, mz_err *err) {
    json_t *list;
    mz_code code = mz_json_get(config, "layer_types", JSON_ARRAY, &list, err);
    if (code)
        return code;
    if (json_array_size(list) != (size_t)blocks->model->layers)
        return mz_fail(err, MZ_EINPUT, "%s: 'layer_types' has %zu entries for %d layers",
                       config->where, json_array_size(list), blocks->model->layers);
    for (int32_t l = 0; l < blocks->model->layers; l++) {
        const char *type = json_string_value(json_array_get(list, (size_t)l));
        bool sliding = type && strcmp(type, "sliding_attention") == 0;
        if (!sliding && (!type || strcmp(type, "full_attention") != 0))
            return mz_fail(err, MZ_EINPUT,
                           "%s: 'layer_types' entry %d must be \"sliding_attention\" or "
                           "\"full_attention\"",
                           config->where, l);
        blocks->is_sliding[l] = sliding;
    }
    return MZ_OK;
}

static mz_code read_gpt_oss(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    mz_code code = mz_read_experts(config, blocks, "num_local_experts", "num_experts_per_tok",
                                   "intermediate_size", err);
    if (code == MZ_OK)
        code = mz_read_head_dim(config, blocks, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "attention_bias", true, &blocks->qkv_bias, err);
    if (code == MZ_OK)
        code = mz_json_int(config, "sliding_window", 1, 1 << 30, &model->sliding_window, err);
    if (code == MZ_OK)
        code = read_layer_types(config, blocks, err);
    model->weights_normalized = model->router_bias = model->expert_bias = true;
    blocks->o_bias = blocks->qkv_bias;
    blocks->sinks = true;
    return code;
}

static void layer_gpt_oss(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    int64_t hidden = model->hidden, size = model->expert_intermediate, experts = model->experts;
    mz_add_norms(blocks);
    mz_add_attention(blocks);
    mz_add(blocks, MZ_TIER_ROUTER, "mlp.router.weight", experts, hidden, 1);
    mz_add_vector(blocks, MZ_TIER_ROUTER, "mlp.router.bias", experts);
    mz_add_stacked(blocks, MZ_TIER_EXPERT, "mlp.experts.gate_up_proj", hidden, 2 * size, false);
    mz_add_stacked(blocks, MZ_TIER_EXPERT, "mlp.experts.gate_up_proj_bias", 2 * size, 1, true);
    mz_add_stacked(blocks, MZ_TIER_EXPERT, "mlp.experts.down_proj", size, hidden, false);
    mz_add_stacked(blocks, MZ_TIER_EXPERT, "mlp.experts.down_proj_bias", hidden, 1, true);
}

const mz_family mz_family_gpt_oss = {
    .model_type = "gpt_oss", .read = read_gpt_oss, .layer = layer_gpt_oss};
