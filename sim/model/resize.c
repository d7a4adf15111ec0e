#include "sim/model/resize.h"

#include "sim/model/families/family.h"

#include <stdlib.h>
#include <string.h>

static mz_code pick(const char *option, int64_t asked, int64_t own, int64_t most, int64_t *value,
                    mz_err *err) {
    *value = asked ? asked : own;
    if (*value >= 1 && *value <= most)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT, "--%s %lld: must be within 1 and %lld", option,
                   (long long)*value, (long long)most);
}

static void add_layer(const mz_model *model, int32_t layer, mz_tensor *up, mz_tensor *down) {
    const mz_tensor experts = {.count = model->experts,
                               .layer = layer,
                               .tier = MZ_TIER_EXPERT,
                               .bytes_per_value = 2,
                               .trainable = true};
    *up = *down = experts;
    snprintf(up->name, sizeof up->name, "model.layers.%d.mlp.experts.*.gate_up_proj.weight", layer);
    up->rows = 2 * model->expert_intermediate;
    up->cols = model->hidden;
    snprintf(down->name, sizeof down->name, "model.layers.%d.mlp.experts.*.down_proj.weight",
             layer);
    down->rows = model->hidden;
    down->cols = model->expert_intermediate;
}

static mz_code fill(const mz_model *from, mz_model *to, mz_err *err) {
    bool *moe = MZ_NEW(&to->arena, bool, to->layers);
    bool *sliding = MZ_NEW(&to->arena, bool, to->layers);
    mz_tensor *tensor = MZ_NEW(&to->arena, mz_tensor, 2 * (int64_t)to->layers);
    if (!moe || !sliding || !tensor)
        return mz_fail_nomem(err, "a model's layers");
    memset(moe, true, sizeof *moe * (size_t)to->layers);
    memcpy(to->name, from->name, sizeof to->name);
    memcpy(to->model_type, from->model_type, sizeof to->model_type);
    snprintf(to->dtype, sizeof to->dtype, "bfloat16");
    to->is_moe = moe;
    to->is_sliding = sliding;
    to->moe_layers = to->layers;
    to->experts = from->experts;
    to->top_k = from->top_k;
    to->expert_group = 1;
    to->router_groups = from->router_groups;
    to->sigmoid_router = from->sigmoid_router;
    to->weights_normalized = from->weights_normalized;
    to->gated = true;
    for (int32_t l = 0; l < to->layers; l++)
        add_layer(to, l, &tensor[2 * l], &tensor[2 * l + 1]);
    to->tensor = tensor;
    to->tensors = 2 * (int64_t)to->layers;
    const double parameters = 3.0 * (double)to->layers * to->experts * (double)to->hidden *
                              (double)to->expert_intermediate;
    if (parameters > MZ_MODEL_PARAMETERS_MAX)
        return mz_fail(err, MZ_EINPUT, "%s: %.3g parameters are more than can be counted (1e17)",
                       to->name, parameters);
    return mz_model_resolve(to, err);
}

mz_code mz_model_resize(const mz_model *model, const mz_model_size *size, mz_model **resized,
                        mz_err *err) {
    int64_t layers = 0;
    *resized = NULL;
    mz_model *to = calloc(1, sizeof *to);
    if (!to)
        return mz_fail_nomem(err, "a model");
    mz_code code = pick("hidden", size->hidden, model->hidden, MZ_MODEL_SIZE_MAX, &to->hidden, err);
    if (code == MZ_OK)
        code = pick("inter", size->intermediate, model->expert_intermediate, MZ_MODEL_SIZE_MAX,
                    &to->expert_intermediate, err);
    if (code == MZ_OK)
        code = pick("layers", size->layers, model->moe_layers, model->moe_layers, &layers, err);
    to->layers = (int32_t)layers;
    if (code == MZ_OK)
        code = fill(model, to, err);
    if (code != MZ_OK)
        mz_model_free(&to);
    *resized = to;
    return code;
}
