/* Mixtral: every layer MoE, experts w1 (gate), w2 (down), w3 (up) under block_sparse_moe, softmax
 * over the chosen experts. Tensors as in the checkpoints mistralai/Mixtral-8x7B-v0.1 and 8x22B. */
#include "sim/model/families/family.h"

static mz_code read_mixtral(mz_json *config, mz_blocks *blocks, mz_err *err) {
    blocks->model->weights_normalized = true;
    mz_code code = mz_read_experts(config, blocks, "num_local_experts", "num_experts_per_tok",
                                   "intermediate_size", err);
    if (code == MZ_OK)
        code = mz_read_head_dim(config, blocks, err);
    if (code == MZ_OK)
        code = mz_json_int_or(config, "sliding_window", 0, 0, 1 << 30,
                              &blocks->model->sliding_window, err);
    if (code == MZ_OK && blocks->model->sliding_window)
        for (int32_t l = 0; l < blocks->model->layers; l++)
            blocks->is_sliding[l] = true;
    return code;
}

static void layer_mixtral(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    int64_t size = model->expert_intermediate;
    mz_add_norms(blocks);
    mz_add_attention(blocks);
    mz_add(blocks, MZ_TIER_ROUTER, "block_sparse_moe.gate.weight", model->experts, model->hidden,
           1);
    mz_add(blocks, MZ_TIER_EXPERT, "block_sparse_moe.experts.*.w1.weight", size, model->hidden,
           model->experts);
    mz_add(blocks, MZ_TIER_EXPERT, "block_sparse_moe.experts.*.w2.weight", model->hidden, size,
           model->experts);
    mz_add(blocks, MZ_TIER_EXPERT, "block_sparse_moe.experts.*.w3.weight", size, model->hidden,
           model->experts);
}

const mz_family mz_family_mixtral = {
    .model_type = "mixtral", .read = read_mixtral, .layer = layer_mixtral};
