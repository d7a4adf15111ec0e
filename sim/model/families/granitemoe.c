/* Granite-MoE (PowerMoE): every layer MoE, gate and up of all experts fused into input_linear,
 * softmax over the chosen experts. */
#include "sim/model/families/family.h"

static mz_code read_granite(mz_json *config, mz_blocks *blocks, mz_err *err) {
    blocks->model->weights_normalized = true;
    mz_code code = mz_read_experts(config, blocks, "num_local_experts", "num_experts_per_tok",
                                   "intermediate_size", err);
    if (code == MZ_OK)
        code = mz_read_head_dim(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_attention_bias(config, blocks, true, err);
    return code;
}

static void layer_granite(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    int64_t size = model->expert_intermediate;
    mz_add_norms(blocks);
    mz_add_attention(blocks);
    mz_add(blocks, MZ_TIER_ROUTER, "block_sparse_moe.router.layer.weight", model->experts,
           model->hidden, 1);
    mz_add_stacked(blocks, MZ_TIER_EXPERT, "block_sparse_moe.input_linear.weight", 2 * size,
                   model->hidden, false);
    mz_add_stacked(blocks, MZ_TIER_EXPERT, "block_sparse_moe.output_linear.weight", model->hidden,
                   size, false);
}

const mz_family mz_family_granitemoe = {
    .model_type = "granitemoe", .read = read_granite, .layer = layer_granite};
