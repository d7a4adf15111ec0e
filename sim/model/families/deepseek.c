/* DeepSeek-V2 and V3: latent attention, first layers dense, shared experts. V2 routes by softmax,
 * V3 by sigmoid with a score correction bias. The multi-token-prediction layer of V3 is left out.
 */
#include "sim/model/families/family.h"

static mz_code read_latent(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    mz_code code =
        mz_json_int_or(config, "q_lora_rank", 0, 1, MZ_MODEL_SIZE_MAX, &model->q_lora, err);
    if (code == MZ_OK)
        code = mz_read_size(config, "kv_lora_rank", &model->kv_lora, err);
    if (code == MZ_OK)
        code = mz_read_size(config, "qk_nope_head_dim", &model->nope_dim, err);
    if (code == MZ_OK)
        code = mz_read_size(config, "qk_rope_head_dim", &model->rope_dim, err);
    if (code == MZ_OK)
        code = mz_read_size(config, "v_head_dim", &model->v_head_dim, err);
    model->head_dim = model->nope_dim + model->rope_dim;
    if (code == MZ_OK)
        code = mz_read_attention_bias(config, blocks, true, err);
    return code;
}

static mz_code read_common(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    int64_t shared, every;
    mz_code code = read_latent(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_experts(config, blocks, "n_routed_experts", "num_experts_per_tok",
                               "moe_intermediate_size", err);
    if (code == MZ_OK)
        code = mz_read_router_groups(config, blocks, err);
    if (code == MZ_OK)
        code = mz_json_int_or(config, "n_shared_experts", 0, 0, 1024, &shared, err);
    if (code == MZ_OK)
        code = mz_json_int_or(config, "moe_layer_freq", 1, 1, 1, &every, err);
    if (code == MZ_OK)
        code = mz_read_first_dense(config, blocks, err);
    if (code)
        return code;
    model->shared_experts = (int32_t)shared;
    model->shared_intermediate = shared * model->expert_intermediate;
    return MZ_OK;
}

static mz_code read_v2(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_code code = read_common(config, blocks, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "norm_topk_prob", false, &blocks->model->weights_normalized,
                               err);
    return code;
}

static mz_code read_v3(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    mz_code code = read_common(config, blocks, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "norm_topk_prob", true, &model->weights_normalized, err);
    model->sigmoid_router = model->router_bias = true;
    return code;
}

static void layer_v2(mz_blocks *blocks) {
    const mz_model *model = blocks->model;
    mz_add_norms(blocks);
    mz_add_latent_attention(blocks);
    mz_add_mlp(blocks);
    if (model->is_moe[blocks->layer] && model->shared_experts)
        mz_add_ffn(blocks, MZ_TIER_SHARED, "mlp.shared_experts", model->shared_intermediate, 1);
}

static void layer_v3(mz_blocks *blocks) {
    layer_v2(blocks);
    if (blocks->model->is_moe[blocks->layer])
        mz_add_correction_bias(blocks);
}

const mz_family mz_family_deepseek_v2 = {
    .model_type = "deepseek_v2", .read = read_v2, .layer = layer_v2};
const mz_family mz_family_deepseek_v3 = {
    .model_type = "deepseek_v3", .read = read_v3, .layer = layer_v3};
