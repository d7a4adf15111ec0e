/* GLM-4.5 and 4.5-Air: grouped-query attention with biases on q, k, v, first layers dense, one
 * shared expert, sigmoid router with a score correction bias. The multi-token-prediction layer is
 * left out. */
#include "sim/model/families/family.h"

static mz_code read_glm4(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    int64_t shared;
    bool norm = false;
    mz_code code = mz_read_experts(config, blocks, "n_routed_experts", "num_experts_per_tok",
                                   "moe_intermediate_size", err);
    if (code == MZ_OK)
        code = mz_read_router_groups(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_head_dim(config, blocks, err);
    if (code == MZ_OK)
        code = mz_json_int_or(config, "n_shared_experts", 0, 0, 1024, &shared, err);
    if (code == MZ_OK)
        code = mz_read_first_dense(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_attention_bias(config, blocks, false, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "use_qk_norm", false, &norm, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "norm_topk_prob", true, &model->weights_normalized, err);
    if (code)
        return code;
    blocks->q_norm = blocks->k_norm = norm ? model->head_dim : 0;
    model->shared_experts = (int32_t)shared;
    model->shared_intermediate = shared * model->expert_intermediate;
    model->sigmoid_router = model->router_bias = true;
    return MZ_OK;
}

static void layer_glm4(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    mz_add_norms(blocks);
    mz_add_attention(blocks);
    mz_add_mlp(blocks);
    if (!model->is_moe[blocks->layer])
        return;
    mz_add_correction_bias(blocks);
    if (model->shared_experts)
        mz_add_ffn(blocks, MZ_TIER_SHARED, "mlp.shared_experts", model->shared_intermediate, 1);
}

const mz_family mz_family_glm4_moe = {
    .model_type = "glm4_moe", .read = read_glm4, .layer = layer_glm4};
