/* What an architecture family is: how its config.json reads, and which tensors a layer has.
 * One file per family; the table is in model.c. Shared blocks are in blocks.c. */
#ifndef MIZAN_SIM_MODEL_FAMILIES_FAMILY_H
#define MIZAN_SIM_MODEL_FAMILIES_FAMILY_H

#include "common/io/json.h"
#include "sim/model/model.h"

/* What the tensor list needs beyond mz_model. */
typedef struct mz_blocks {
    mz_model *model;
    bool *is_moe, *is_sliding; /* [layers], the model's, writable while it is read */
    mz_tensor *tensor;         /* grows; moved into the model at the end */
    size_t tensors, cap;
    double parameters;
    bool no_memory;
    mz_tensor spare;      /* what is added when memory is short */
    int32_t layer;        /* of the tensors being added; -1 outside the layers */
    int32_t weight_bytes; /* of torch_dtype */
    bool qkv_bias, o_bias;
    bool sinks;             /* one attention sink per head (GPT-OSS) */
    bool norm_bias;         /* LayerNorm, weights and biases in fp32; else RMSNorm in the dtype */
    int64_t positions;      /* of a learned table; 0: rotary */
    int64_t q_norm, k_norm; /* lengths of the query and key norms, 0 none */
} mz_blocks;

typedef struct mz_family {
    const char *model_type;
    /* Reads what is the family's own; the common keys are in the model already. */
    mz_code (*read)(mz_json *config, mz_blocks *blocks, mz_err *err);
    void (*layer)(mz_blocks *blocks); /* adds the tensors of blocks->layer */
    bool strict;                      /* our own format: unknown keys are errors */
} mz_family;

extern const mz_family mz_family_deepseek_v2, mz_family_deepseek_v3, mz_family_glm4_moe,
    mz_family_gpt_oss, mz_family_granitemoe, mz_family_layernorm_moe, mz_family_mixtral,
    mz_family_mizan_moe, mz_family_olmoe, mz_family_qwen2_moe, mz_family_qwen3_moe;

/* Limits that keep every product of sizes within 63 bits. */
enum { MZ_MODEL_SIZE_MAX = 1 << 22, MZ_MODEL_LAYERS_MAX = 4096, MZ_MODEL_EXPERTS_MAX = 1 << 16 };
/* No machine of ours holds more; keeps every sum of bytes within 63 bits. */
#define MZ_MODEL_PARAMETERS_MAX 1e17

/* Fills model->resolved once everything else is known. */
mz_code mz_model_resolve(mz_model *model, mz_err *err);

/* Readers of one key into a field, with the limits above. */
mz_code mz_read_size(mz_json *config, const char *key, int64_t *value, mz_err *err);
mz_code mz_read_size_or(mz_json *config, const char *key, int64_t dflt, int64_t *value,
                        mz_err *err);
/* Routed experts: their number, experts per token and intermediate size under the family's keys. */
mz_code mz_read_experts(mz_json *config, mz_blocks *blocks, const char *experts_key,
                        const char *top_k_key, const char *size_key, mz_err *err);
/* n_group: groups of experts that the router first chooses from; absent: one. After read_experts.
 */
mz_code mz_read_router_groups(mz_json *config, mz_blocks *blocks, mz_err *err);
/* Query, key and value heads of one size: head_dim, by default hidden / heads. */
mz_code mz_read_head_dim(mz_json *config, mz_blocks *blocks, mz_err *err);
/* The first `dense` layers (first_k_dense_replace) are dense, of intermediate_size. */
mz_code mz_read_first_dense(mz_json *config, mz_blocks *blocks, mz_err *err);
/* attention_bias: bias on q, k, v and, if `output` says so, on o. */
mz_code mz_read_attention_bias(mz_json *config, mz_blocks *blocks, bool output, mz_err *err);

/* Adds `count` copies of a matrix; `name` is relative to the layer, '*' the number of a copy. The
 * row is valid until the next is added; never NULL. */
mz_tensor *mz_add(mz_blocks *blocks, mz_tier tier, const char *name, int64_t rows, int64_t cols,
                  int64_t count);
/* A vector. */
mz_tensor *mz_add_vector(mz_blocks *blocks, mz_tier tier, const char *name, int64_t length);
/* Matrices, or vectors (cols 1), of all experts stacked in one tensor. */
void mz_add_stacked(mz_blocks *blocks, mz_tier tier, const char *name, int64_t rows, int64_t cols,
                    bool vector);
/* A norm over the hidden size: NAME.weight, and NAME.bias where norms have them. */
void mz_add_norm(mz_blocks *blocks, const char *name);
/* input_layernorm and post_attention_layernorm. */
void mz_add_norms(mz_blocks *blocks);
/* self_attn.{q,k,v,o}_proj with the biases, norms and sinks of `blocks`. */
void mz_add_attention(mz_blocks *blocks);
/* DeepSeek's multi-head latent attention. */
void mz_add_latent_attention(mz_blocks *blocks);
/* `count` gated FFNs PREFIX.{gate,up,down}_proj; not gated: without gate. */
void mz_add_ffn(mz_blocks *blocks, mz_tier tier, const char *prefix, int64_t intermediate,
                int64_t count);
/* Experts as modules under mlp: mlp.gate, mlp.experts.*; a dense mlp in a dense layer. */
void mz_add_mlp(mz_blocks *blocks);
/* The bias that balances sigmoid routers without gradients: fp32, set by a rule. */
void mz_add_correction_bias(mz_blocks *blocks);

#endif
