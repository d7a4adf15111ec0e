#include "sim/model/model.h"

#include "common/base/opt.h"
#include "common/io/catalog.h"
#include "sim/model/families/family.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const mz_family *const families[] = {
    &mz_family_deepseek_v2, &mz_family_deepseek_v3,   &mz_family_glm4_moe,  &mz_family_gpt_oss,
    &mz_family_granitemoe,  &mz_family_layernorm_moe, &mz_family_mixtral,   &mz_family_mizan_moe,
    &mz_family_olmoe,       &mz_family_qwen2_moe,     &mz_family_qwen3_moe,
};

enum { FAMILIES = sizeof families / sizeof families[0] };

static mz_code find_family(mz_json *config, const mz_family **family, mz_err *err) {
    const char *type;
    mz_code code = mz_json_string(config, "model_type", &type, err);
    if (code)
        return code;
    for (int i = 0; i < FAMILIES; i++)
        if (strcmp(families[i]->model_type, type) == 0) {
            *family = families[i];
            return MZ_OK;
        }
    const char *names[FAMILIES];
    char text[256] = "";
    size_t used = 0;
    for (int i = 0; i < FAMILIES; i++) {
        names[i] = families[i]->model_type;
        if (used < sizeof text)
            used +=
                (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? ", " : "", names[i]);
    }
    const char *near = mz_nearest(type, names, FAMILIES);
    return mz_fail(err, MZ_EINPUT, "%s: model_type \"%s\" is not supported%s%s%s; supported are %s",
                   config->where, type, near ? " (did you mean \"" : "", near ? near : "",
                   near ? "\"?)" : "", text);
}

static mz_code read_dtype(mz_json *config, mz_blocks *blocks, mz_err *err) {
    const char *key = mz_json_has(config, "torch_dtype") ? "torch_dtype" : "dtype";
    const char *type;
    mz_code code = mz_json_string_or(config, key, "bfloat16", &type, err);
    if (code)
        return code;
    if (strcmp(type, "bfloat16") == 0 || strcmp(type, "float16") == 0)
        blocks->weight_bytes = 2;
    else if (strcmp(type, "float32") == 0)
        blocks->weight_bytes = 4;
    else
        return mz_fail(err, MZ_EINPUT, "%s: '%s' is \"%s\", must be bfloat16, float16 or float32",
                       config->where, key, type);
    snprintf(blocks->model->dtype, sizeof blocks->model->dtype, "%s", type);
    return MZ_OK;
}

static mz_code read_heads(mz_json *config, mz_model *model, mz_err *err) {
    int64_t heads, kv_heads;
    mz_code code = mz_json_int(config, "num_attention_heads", 1, 1 << 16, &heads, err);
    if (code == MZ_OK)
        code = mz_json_int_or(config, "num_key_value_heads", heads, 1, heads, &kv_heads, err);
    if (code)
        return code;
    if (heads % kv_heads)
        return mz_fail(err, MZ_EINPUT,
                       "%s: 'num_attention_heads' %lld is not a multiple of "
                       "'num_key_value_heads' %lld",
                       config->where, (long long)heads, (long long)kv_heads);
    model->heads = (int32_t)heads;
    model->kv_heads = (int32_t)kv_heads;
    return MZ_OK;
}

static mz_code read_common(mz_json *config, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    int64_t layers;
    mz_code code = mz_json_int(config, "num_hidden_layers", 1, MZ_MODEL_LAYERS_MAX, &layers, err);
    if (code == MZ_OK)
        code = mz_read_size(config, "hidden_size", &model->hidden, err);
    if (code == MZ_OK)
        code = mz_read_size(config, "vocab_size", &model->vocab, err);
    if (code == MZ_OK)
        code = mz_json_bool_or(config, "tie_word_embeddings", false, &model->tied_embeddings, err);
    if (code == MZ_OK)
        code = read_heads(config, model, err);
    if (code == MZ_OK)
        code = read_dtype(config, blocks, err);
    if (code)
        return code;
    model->layers = (int32_t)layers;
    model->expert_group = 1;
    model->router_groups = 1;
    model->gated = true;
    model->is_moe = blocks->is_moe = MZ_NEW(&model->arena, bool, layers);
    model->is_sliding = blocks->is_sliding = MZ_NEW(&model->arena, bool, layers);
    if (!blocks->is_moe || !blocks->is_sliding)
        return mz_fail_nomem(err, "a model's layers");
    memset(blocks->is_moe, true, (size_t)layers * sizeof(bool));
    return MZ_OK;
}

static mz_code list_tensors(const mz_family *family, mz_blocks *blocks, const char *where,
                            mz_err *err) {
    mz_model *model = blocks->model;
    blocks->layer = -1;
    mz_add(blocks, MZ_TIER_BACKBONE, "model.embed_tokens.weight", model->vocab, model->hidden, 1)
        ->role = MZ_ROLE_EMBEDDING;
    if (blocks->positions)
        mz_add(blocks, MZ_TIER_BACKBONE, "model.embed_positions.weight", blocks->positions,
               model->hidden, 1)
            ->role = MZ_ROLE_EMBEDDING;
    for (blocks->layer = 0; blocks->layer < model->layers; blocks->layer++) {
        family->layer(blocks);
        model->moe_layers += model->is_moe[blocks->layer];
    }
    blocks->layer = -1;
    mz_add_norm(blocks, "model.norm");
    if (!model->tied_embeddings)
        mz_add(blocks, MZ_TIER_BACKBONE, "lm_head.weight", model->vocab, model->hidden, 1)->role =
            MZ_ROLE_HEAD;
    mz_tensor *copy = blocks->no_memory ? NULL : MZ_NEW(&model->arena, mz_tensor, blocks->tensors);
    if (!copy)
        return mz_fail_nomem(err, "a model's tensors");
    if (blocks->parameters > MZ_MODEL_PARAMETERS_MAX)
        return mz_fail(err, MZ_EINPUT, "%s: %.3g parameters are more than can be counted (1e17)",
                       where, blocks->parameters);
    if (model->moe_layers == 0)
        return mz_fail(err, MZ_EINPUT, "%s: no layer is an MoE layer", where);
    memcpy(copy, blocks->tensor, blocks->tensors * sizeof *copy);
    model->tensor = copy;
    model->tensors = (int64_t)blocks->tensors;
    return MZ_OK;
}

mz_code mz_model_resolve(mz_model *model, mz_err *err) {
    const struct {
        const char *name;
        int64_t value;
    } size[] = {
        {"layers", model->layers},
        {"moe_layers", model->moe_layers},
        {"hidden", model->hidden},
        {"heads", model->heads},
        {"kv_heads", model->kv_heads},
        {"head_dim", model->head_dim},
        {"v_head_dim", model->v_head_dim},
        {"q_lora", model->q_lora},
        {"kv_lora", model->kv_lora},
        {"rope_dim", model->rope_dim},
        {"nope_dim", model->nope_dim},
        {"sliding_window", model->sliding_window},
        {"experts", model->experts},
        {"top_k", model->top_k},
        {"expert_group", model->expert_group},
        {"router_groups", model->router_groups},
        {"expert_intermediate", model->expert_intermediate},
        {"shared_experts", model->shared_experts},
        {"shared_intermediate", model->shared_intermediate},
        {"dense_intermediate", model->dense_intermediate},
        {"vocab", model->vocab},
    };
    bool failed = false;
    model->resolved = json_object();
    failed |= json_object_set_new(model->resolved, "name", mz_json_text(model->name)) != 0;
    failed |= json_object_set_new(model->resolved, "model_type", json_string(model->model_type));
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        failed |=
            json_object_set_new(model->resolved, size[i].name, json_integer(size[i].value)) != 0;
    failed |= json_object_set_new(model->resolved, "gated", json_boolean(model->gated)) != 0;
    failed |= json_object_set_new(model->resolved, "tied_embeddings",
                                  json_boolean(model->tied_embeddings)) != 0;
    static const char *const tier[] = {"backbone", "expert", "router", "shared"};
    int64_t total = 0;
    for (int t = 0; t < 4; t++) {
        char name[32];
        int64_t n = mz_model_parameters(model, (mz_tier)t);
        snprintf(name, sizeof name, "parameters_%s", tier[t]);
        failed |= json_object_set_new(model->resolved, name, json_integer(n)) != 0;
        total += n;
    }
    failed |= json_object_set_new(model->resolved, "parameters", json_integer(total)) != 0;
    return failed ? mz_fail_nomem(err, "a model's description") : MZ_OK;
}

/* What others count, for shipped configs; a remark that nothing else depends on. */
static mz_code read_published(mz_json *config, mz_model *model, mz_err *err) {
    json_t *object = NULL;
    mz_json view;
    const char *source, *what;
    if (!mz_json_has(config, "_published"))
        return MZ_OK;
    mz_published *p = &model->published;
    char where[sizeof view.where];
    mz_code code = mz_json_get(config, "_published", JSON_OBJECT, &object, err);
    snprintf(where, sizeof where, "%.200s: _published", config->where);
    if (code == MZ_OK)
        code = mz_json_object(object, where, &view, err);
    if (code == MZ_OK)
        code = mz_json_int(&view, "parameters", 1, (int64_t)MZ_MODEL_PARAMETERS_MAX, &p->parameters,
                           err);
    if (code == MZ_OK)
        code = mz_json_int_or(&view, "left_out", 0, 0, p->parameters, &p->left_out, err);
    if (code == MZ_OK)
        code = mz_json_string_or(&view, "left_out_is", "", &what, err);
    if (code == MZ_OK)
        code = mz_json_int_or(&view, "tensors", 0, 1, INT64_C(1) << 40, &p->tensors, err);
    if (code == MZ_OK)
        code = mz_json_string(&view, "source", &source, err);
    if (code == MZ_OK)
        code = mz_json_no_more(&view, err);
    if (code)
        return code;
    p->source = mz_arena_strdup(&model->arena, source);
    p->left_out_is = mz_arena_strdup(&model->arena, what);
    return p->source && p->left_out_is ? MZ_OK : mz_fail_nomem(err, "a model's published size");
}

static mz_code build(json_t *root, const char *where, mz_blocks *blocks, mz_err *err) {
    mz_model *model = blocks->model;
    const mz_family *family = NULL;
    mz_json config;
    mz_code code = mz_json_object(root, where, &config, err);
    if (code == MZ_OK)
        code = find_family(&config, &family, err);
    if (code == MZ_OK)
        code = read_common(&config, blocks, err);
    if (code == MZ_OK)
        code = family->read(&config, blocks, err);
    if (code == MZ_OK)
        code = read_published(&config, model, err);
    if (code == MZ_OK && family->strict) {
        mz_json_has(&config, "architectures");
        code = mz_json_no_more(&config, err);
    }
    if (code)
        return code;
    snprintf(model->model_type, sizeof model->model_type, "%s", family->model_type);
    model->attention_bias = blocks->qkv_bias;
    model->qk_norm = blocks->q_norm > 0;
    code = list_tensors(family, blocks, where, err);
    return code ? code : mz_model_resolve(model, err);
}

/* "configs/mixtral-8x7b.json" -> "mixtral-8x7b"; "DIR/config.json" -> the folder's name. */
static void name_from_path(const char *path, char *name, size_t size) {
    const char *end = path + strlen(path), *last = strrchr(path, '/');
    const char *start = last ? last + 1 : path;
    if (last && strcmp(start, "config.json") == 0) {
        end = last;
        while (end > path && end[-1] == '/')
            end--;
        start = end;
        while (start > path && start[-1] != '/')
            start--;
    } else {
        const char *dot = strstr(start, ".json");
        end = dot ? dot : end;
    }
    if (start == end) {
        start = "model";
        end = start + 5;
    }
    snprintf(name, size, "%.*s", (int)(end - start), start);
}

static void configs_folder(const char *data_dir, char *folder, size_t size) {
    snprintf(folder, size, "%s/sim/model/configs", data_dir);
}

mz_code mz_model_load(const char *name, const char *data_dir, mz_model **model, mz_err *err) {
    char folder[4096], path[4096];
    json_t *root = NULL;
    *model = NULL;
    configs_folder(data_dir, folder, sizeof folder);
    mz_code code = mz_catalog_find(name, folder, "model", path, sizeof path, err);
    if (code == MZ_OK)
        code = mz_json_load(path, &root, err);
    if (code)
        return code;
    mz_blocks blocks = {.model = calloc(1, sizeof *blocks.model)};
    if (blocks.model) {
        name_from_path(path, blocks.model->name, sizeof blocks.model->name);
        code = build(root, path, &blocks, err);
    } else {
        code = mz_fail_nomem(err, "a model");
    }
    json_decref(root);
    free(blocks.tensor);
    *model = blocks.model;
    if (code)
        mz_model_free(model);
    return code;
}

void mz_model_free(mz_model **model) {
    if (!*model)
        return;
    json_decref((*model)->resolved);
    mz_arena_free(&(*model)->arena);
    free(*model);
    *model = NULL;
}

mz_code mz_model_list(const char *data_dir, mz_arena *arena, char ***names, int *count,
                      mz_err *err) {
    char folder[4096];
    configs_folder(data_dir, folder, sizeof folder);
    return mz_catalog_list(folder, arena, names, count, err);
}
