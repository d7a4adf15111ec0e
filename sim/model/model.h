/* Architectures, read from Hugging Face config.json files, and everything that follows from them:
 * tensors, parameters by tier, FLOPs, bytes. Shipped configs: sim/model/configs/. */
#ifndef MIZAN_SIM_MODEL_MODEL_H
#define MIZAN_SIM_MODEL_MODEL_H

#include "common/base/arena.h"
#include "common/base/err.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum mz_tier { MZ_TIER_BACKBONE, MZ_TIER_EXPERT, MZ_TIER_ROUTER, MZ_TIER_SHARED } mz_tier;

/* What a matrix is: a map between features, a table of words or positions, the output head. */
typedef enum mz_role { MZ_ROLE_MAP, MZ_ROLE_EMBEDDING, MZ_ROLE_HEAD } mz_role;

/* `count` tensors of one shape (the experts of a layer) in one row, as the checkpoint has them. */
typedef struct mz_tensor {
    char name[96];      /* '*' stands for the copy's number; mz_tensor_name puts it in */
    int64_t rows, cols; /* of one copy; a vector has one column */
    int64_t count;
    int32_t layer; /* -1: not in a layer (embedding, head, final norm) */
    mz_tier tier;
    int32_t bytes_per_value; /* 2 bf16, 4 fp32: what training holds, not a quantised checkpoint */
    bool trainable; /* false: set by a rule, no gradient (DeepSeek's score correction bias) */
    bool vector;    /* one copy has one dimension */
    bool stacked;   /* the copies are slices of one tensor with one dimension more, count first */
    mz_role role;
} mz_tensor;

/* The checkpoint's tensors of a row: count, or 1 where stacked. */
int64_t mz_tensor_parts(const mz_tensor *tensor);
/* Dimensions of one of them, 1 to 3, into shape. */
int mz_tensor_shape(const mz_tensor *tensor, int64_t shape[3]);
/* Name of the i-th, 0 <= i < mz_tensor_parts: layers.3.mlp.experts.17.up_proj.weight. */
const char *mz_tensor_name(const mz_tensor *tensor, int64_t i, char *buffer, size_t size);

/* A count that others published, read from "_published" of a config. */
typedef struct mz_published {
    int64_t parameters; /* 0: none known */
    int64_t left_out;   /* of these, what the model here leaves out on purpose */
    int64_t tensors;    /* in the checkpoint; 0: not known */
    const char *source; /* where the count stands */
    const char *left_out_is;
} mz_published;

typedef struct mz_model {
    char name[128];
    char model_type[64];
    char dtype[16]; /* of the weights that are not fp32: bfloat16, float16, float32 */
    int32_t layers, moe_layers;
    const bool *is_moe;     /* [layers] */
    const bool *is_sliding; /* [layers] attention limited to sliding_window */
    int32_t experts, top_k, shared_experts;
    int32_t expert_group;  /* experts in one routed unit: 1, or C where traces know groups only;
                              a unit's weights are C experts', a pair's FLOPs one expert's */
    int32_t router_groups; /* of experts that the router chooses groups from (n_group); 1: none */
    int64_t hidden, expert_intermediate, dense_intermediate, vocab;
    int64_t shared_intermediate; /* of all shared experts together */
    int32_t heads, kv_heads;
    int64_t head_dim, v_head_dim; /* of queries and keys (MLA: nope + rope), of values */
    int64_t q_lora, kv_lora, rope_dim,
        nope_dim;           /* MLA; 0 otherwise; q_lora 0: queries in one step */
    int64_t sliding_window; /* 0: full attention in every layer */
    bool tied_embeddings, attention_bias, expert_bias, qk_norm;
    bool sigmoid_router, router_bias;
    bool weights_normalized; /* gate weights sum to 1 over the chosen experts */
    bool gated;              /* SwiGLU: three matrices per expert; else two */
    const mz_tensor *tensor; /* [tensors] embedding, layers in order, final norm, head */
    int64_t tensors;
    mz_published published;
    json_t *resolved; /* every value used, for the result file */
    mz_arena arena;
} mz_model;

/* name: a shipped config, or a path to a config.json or to the folder it is in. Keys that we do not
 * read are ignored, as configs carry many; a missing or impossible one, or a model_type that is not
 * supported: MZ_EINPUT. Multi-token-prediction layers are left out. */
mz_code mz_model_load(const char *name, const char *data_dir, mz_model **model, mz_err *err);
void mz_model_free(mz_model **model);
/* Names of the shipped configs, sorted; arena-owned strings. */
mz_code mz_model_list(const char *data_dir, mz_arena *arena, char ***names, int *count,
                      mz_err *err);

/* "float32", or the model's dtype. */
const char *mz_tensor_dtype(const mz_model *model, const mz_tensor *tensor);

int64_t mz_model_parameters(const mz_model *model, mz_tier tier); /* total of a tier */
int64_t mz_model_total(const mz_model *model);                    /* of all tiers */
int64_t mz_model_bytes(const mz_model *model, mz_tier tier);      /* weights of a tier */
/* What one token meets: all but the experts that it does not choose; embedding included. */
int64_t mz_model_active_parameters(const mz_model *model);
int64_t mz_model_expert_parameters(const mz_model *model); /* of one expert of one layer, of
                                                              all expert_group where grouped */
int64_t mz_model_layer_parameters(const mz_model *model, int32_t layer, mz_tier tier);

/* FLOPs of one layer's forward for `tokens` tokens in sequences of `seq` tokens; a multiplication
 * and an addition are two. Backward is twice that. Biases, norms and softmax are not counted.
 * Scores: causal attention computes half of the square, seq / 2 keys per query; with a window w
 * smaller than seq, w - w*w / (2 seq). */
double mz_model_attention_flops(const mz_model *model, int32_t layer, double tokens, double seq);
double mz_model_projection_flops(const mz_model *model, double tokens);           /* q,k,v,o */
double mz_model_dense_flops(const mz_model *model, int32_t layer, double tokens); /* dense FFN, or
                                                               the shared experts of an MoE layer */
double mz_model_router_flops(const mz_model *model, double tokens);
double mz_model_head_flops(const mz_model *model, double tokens);
double mz_model_expert_flops(const mz_model *model, double pairs); /* 6HI a pair, 4HI not gated */

#endif
