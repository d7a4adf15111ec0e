/* Architectures, read from Hugging Face config.json files, and everything that follows from them:
 * tensors, parameters by tier, FLOPs, bytes, optimizer state. Shipped configs: sim/model/configs/. */
#ifndef MIZAN_SIM_MODEL_MODEL_H
#define MIZAN_SIM_MODEL_MODEL_H

#include "common/base/arena.h"
#include "common/base/err.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum mz_tier { MZ_TIER_BACKBONE, MZ_TIER_EXPERT, MZ_TIER_ROUTER, MZ_TIER_SHARED } mz_tier;

/* One tensor, as the checkpoint has it; `count` identical copies (experts of a layer) in one row. */
typedef struct mz_tensor {
    char name[96];
    int64_t rows, cols;  /* cols == 1: a vector */
    int64_t count;
    int32_t layer;       /* -1: not in a layer (embedding, head, final norm) */
    mz_tier tier;
    int32_t bytes_per_value; /* 2 bf16, 4 fp32 */
} mz_tensor;

typedef struct mz_model {
    char name[128];
    char model_type[64];
    int32_t layers, moe_layers;
    const bool *is_moe;          /* [layers] */
    int32_t experts, top_k, shared_experts;
    int64_t hidden, expert_intermediate, dense_intermediate, shared_intermediate, vocab;
    int32_t heads, kv_heads;
    int64_t head_dim, v_head_dim;
    int64_t q_lora, kv_lora, rope_dim, nope_dim; /* MLA; 0 otherwise */
    int64_t sliding_window;      /* 0: full attention in every layer */
    bool tied_embeddings, attention_bias, expert_bias, qk_norm;
    bool sigmoid_router, router_bias;
    bool weights_normalized;     /* gate weights sum to 1 over the chosen experts */
    bool gated;                  /* SwiGLU: three matrices per expert; else two */
    const mz_tensor *tensor;
    int64_t tensors;
    json_t *resolved;
    mz_arena arena;
} mz_model;

/* name: a shipped config or a path to a config.json. Unsupported model_type: MZ_EINPUT that lists
 * the supported ones. */
mz_code mz_model_load(const char *name, const char *data_dir, mz_model **model, mz_err *err);
void mz_model_free(mz_model **model);
mz_code mz_model_list(const char *data_dir, mz_arena *arena, char ***names, int *count, mz_err *err);

int64_t mz_model_parameters(const mz_model *model, mz_tier tier); /* total of a tier */
int64_t mz_model_expert_parameters(const mz_model *model);        /* of one expert of one layer */
int64_t mz_model_layer_parameters(const mz_model *model, int32_t layer, mz_tier tier);

/* FLOPs of one layer's forward, without routed experts, for `tokens` tokens in sequences of `seq`
 * (causal attention: half of the square). Backward is twice that. */
double mz_model_attention_flops(const mz_model *model, double tokens, double seq); /* scores part */
double mz_model_projection_flops(const mz_model *model, double tokens);            /* q,k,v,o */
double mz_model_dense_flops(const mz_model *model, int32_t layer, double tokens);  /* dense or shared FFN */
double mz_model_router_flops(const mz_model *model, double tokens);
double mz_model_head_flops(const mz_model *model, double tokens);
double mz_model_expert_flops(const mz_model *model, double pairs);                 /* forward, 6HI a pair */

/* Optimizers: bytes of state and of traffic per parameter tensor. The optimizer issue adds more
 * entries to the table in optimizer.c. */
typedef struct mz_optimizer {
    const char *name;            /* "adamw", "skewadam", ... */
    const char *summary;
    /* State bytes of one tensor copy (fp32 master weights included where the optimizer keeps them). */
    int64_t (*state_bytes)(const mz_tensor *tensor);
    /* Bytes moved through device memory by one update of one tensor copy, fused. */
    double (*update_bytes)(const mz_tensor *tensor);
    int32_t temporaries;         /* fp32 copies of the tensor alive in an unfused update */
} mz_optimizer;

const mz_optimizer *const *mz_optimizers(int *count);
mz_code mz_optimizer_find(const char *name, const mz_optimizer **optimizer, mz_err *err);

#endif
