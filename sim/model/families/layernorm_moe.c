/* Our own description of the model of the SkewAdam study (arXiv 2607.19058): LayerNorm with biases
 * before attention and feed-forward and at the end, learned positions, grouped-query attention,
 * gated experts. Norms and routers are fp32, all else torch_dtype. */
#include "sim/model/families/family.h"

static mz_code read_layernorm(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    blocks->norm_bias = true;
    mz_code code = mz_read_experts(config, blocks, "num_experts", "num_experts_per_tok",
                                   "moe_intermediate_size", err);
    if (code == MZ_OK)
        code = mz_read_head_dim(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_first_dense(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_size(config, "max_position_embeddings", &blocks->positions, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "norm_topk_prob", true, &model->weights_normalized, err);
    return code;
}

static void layer_layernorm(mz_blocks *blocks) {
    const size_t first = blocks->tensors;
    mz_add_norms(blocks);
    mz_add_attention(blocks);
    mz_add_mlp(blocks);
    for (size_t i = first; i < blocks->tensors; i++)
        if (blocks->tensor[i].tier == MZ_TIER_ROUTER)
            blocks->tensor[i].bytes_per_value = 4;
}

const mz_family mz_family_layernorm_moe = {.model_type = "mizan_layernorm_moe",
                                           .read = read_layernorm,
                                           .layer = layer_layernorm,
                                           .strict = true};
