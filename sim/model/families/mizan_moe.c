/* Our own description, for traces that match no published model: grouped-query attention, dense
 * first layers, shared experts, gated or two-matrix experts, and expert groups as routed units.
 * README.md of sim/model explains the keys; unknown ones are errors here. */
#include "sim/model/families/family.h"

static mz_code read_router(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    int64_t group, shared;
    mz_code code = mz_json_int_or(config, "experts_per_group", 1, 1, 1024, &group, err);
    if (code == MZ_OK)
        code = mz_json_int_or(config, "num_shared_experts", 0, 0, 1024, &shared, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "norm_topk_prob", true, &model->weights_normalized, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "sigmoid_router", false, &model->sigmoid_router, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "gated", true, &model->gated, err);
    if (code)
        return code;
    model->expert_group = (int32_t)group;
    model->shared_experts = (int32_t)shared;
    model->shared_intermediate = shared * model->expert_intermediate;
    return MZ_OK;
}

static mz_code read_mizan(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_code code = mz_read_experts(config, blocks, "num_experts", "num_experts_per_tok",
                                   "moe_intermediate_size", err);
    if (code == MZ_OK)
        code = mz_read_head_dim(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_attention_bias(config, blocks, true, err);
    if (code == MZ_OK)
        code = mz_read_first_dense(config, blocks, err);
    if (code == MZ_OK)
        code = read_router(config, blocks, err);
    return code;
}

static void layer_mizan(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    mz_add_norms(blocks);
    mz_add_attention(blocks);
    mz_add_mlp(blocks);
    if (model->is_moe[blocks->layer] && model->shared_experts)
        mz_add_ffn(blocks, MZ_TIER_SHARED, "mlp.shared_experts", model->shared_intermediate, 1);
}

const mz_family mz_family_mizan_moe = {
    .model_type = "mizan_moe", .read = read_mizan, .layer = layer_mizan, .strict = true};
