/* OLMoE: every layer MoE, query and key norms over the whole projection, softmax before the top-k.
 */
#include "sim/model/families/family.h"

static mz_code read_olmoe(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    mz_code code = mz_read_experts(config, blocks, "num_experts", "num_experts_per_tok",
                                   "intermediate_size", err);
    if (code == MZ_OK)
        code = mz_read_head_dim(config, blocks, err);
    if (code == MZ_OK)
        code = mz_read_attention_bias(config, blocks, true, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "norm_topk_prob", false, &model->weights_normalized, err);
    blocks->q_norm = model->heads * model->head_dim;
    blocks->k_norm = model->kv_heads * model->head_dim;
    return code;
}

static void layer_olmoe(mz_blocks *blocks) {
    mz_add_norms(blocks);
    mz_add_attention(blocks);
    mz_add_mlp(blocks);
}

const mz_family mz_family_olmoe = {.model_type = "olmoe", .read = read_olmoe, .layer = layer_olmoe};
