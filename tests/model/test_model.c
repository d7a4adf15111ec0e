/* Shipped configs against the published parameter totals; tensors, FLOPs and errors. */
#include "tests/harness.h"

#include "sim/model/model.h"
#include "sim/model/resize.h"

#include <math.h>

static mz_model *load(const char *name) {
    mz_model *model;
    mz_err err;
    if (mz_model_load(name, MZ_SOURCE_DIR, &model, &err))
        fail_msg("%s: %s", name, err.msg);
    return model;
}

/* What others count, to the last parameter and, where known, the number of tensors: sums over the
 * checkpoints' indexes or headers; where each stands is in the configs' "_published". Each total
 * was also added up by hand from the architecture. The numbers stand here again, so that neither a
 * config nor the code can drift alone. */
static void published_totals(void **state) {
    static const struct {
        const char *name;
        int64_t total;
        int64_t mtp; /* what the checkpoint holds beyond the main model */
        int64_t tensors;
    } known[] = {
        {"qwen3-30b-a3b", 30532122624, 0, 18867},
        {"qwen3-235b-a22b", 235093634560, 0, 36945},
        {"mixtral-8x7b", 46702792704, 0, 995},
        {"mixtral-8x22b", 140620634112, 0, 1739},
        /* One MoE layer, its two norms apart enorm, hnorm, shared_head.norm, eh_proj 2H x H, and
         * copies of embedding and head:
         * 4096*12288*2 + 2*4096*1024 + 12288 + 2*1024 + 2*4096 + 128*4096 + 128 + 129*3*4096*1408
         *   + 2*4096*4096 + 3*4096 + 2*151552*4096 = 3,616,573,568 */
        {"glm-4.5-air", 110468824832, 3616573568, 0},
        {"glm-4.5", 358337791296, 5539962272, 0},
        {"deepseek-v2", 235741434880, 0, 0},
        {"deepseek-v2-lite", 15706484224, 0, 0},
        {"deepseek-v3", 671026419200, 0, 45395},
        {"olmoe-1b-7b", 6919161856, 0, 3219},
        {"gpt-oss-20b", 20914757184, 0, 0},
        {"gpt-oss-120b", 116829156672, 0, 0},
        {"granite-3.0-3b-a800m", 3298793472, 0, 0},
        {"qwen1.5-moe-a2.7b", 14315784192, 0, 4659},
        {"qwen2-57b-a14b", 57408658944, 0, 0},
        {"skewadam-6.8b", 6784327680, 0, 0},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        mz_model *model = load(known[i].name);
        int64_t tensors = 0;
        for (int64_t t = 0; t < model->tensors; t++)
            tensors += mz_tensor_parts(&model->tensor[t]);
        if (mz_model_total(model) + known[i].mtp != known[i].total)
            fail_msg("%s: %lld parameters, published %lld", known[i].name,
                     (long long)mz_model_total(model), (long long)(known[i].total - known[i].mtp));
        if (known[i].tensors && tensors != known[i].tensors)
            fail_msg("%s: %lld tensors, published %lld", known[i].name, (long long)tensors,
                     (long long)known[i].tensors);
        assert_int_equal(model->published.parameters, known[i].total);
        assert_int_equal(model->published.left_out, known[i].mtp);
        assert_int_equal(model->published.tensors, known[i].tensors);
        mz_model_free(&model);
    }
}

/* The checkpoints of GPT-OSS hold expert matrices in MXFP4: 4 bits a value and an 8-bit scale for
 * 32 of them. Bytes of all tensors as their indexes add them up. */
static void quantised_checkpoints(void **state) {
    static const struct {
        const char *name;
        int64_t bytes;
    } known[] = {{"gpt-oss-20b", 13761264768}, {"gpt-oss-120b", 65248815744}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        mz_model *model = load(known[i].name);
        int64_t bytes = 0;
        for (int64_t t = 0; t < model->tensors; t++) {
            const mz_tensor *x = &model->tensor[t];
            int64_t values = x->rows * x->cols * x->count;
            bytes += x->stacked && !x->vector ? values / 2 + values / 32 : 2 * values;
        }
        assert_int_equal(bytes, known[i].bytes);
        mz_model_free(&model);
    }
}

/* The instruct variant differs by 768 more words: index total_size 281,260,142,592 B. */
static void mixtral_instruct_vocabulary(void **state) {
    static const char text[] =
        "{\"model_type\":\"mixtral\",\"hidden_size\":6144,\"num_hidden_layers\":56,"
        "\"num_attention_heads\":48,\"num_key_value_heads\":8,\"intermediate_size\":16384,"
        "\"num_local_experts\":8,\"num_experts_per_tok\":2,\"vocab_size\":32768,"
        "\"rope_theta\":1e6}";
    char folder[256], path[300];
    make_directory(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/config.json", folder);
    write_bytes(path, text, strlen(text));
    mz_model *model = load(folder); /* a folder stands for the config.json in it */
    remove_directory(folder);
    assert_non_null(strstr(folder, model->name));
    assert_int_equal(mz_model_total(model), 140630071296);
    mz_model_free(&model);
}

static const mz_tensor *find(const mz_model *model, const char *name) {
    for (int64_t i = 0; i < model->tensors; i++)
        if (strcmp(model->tensor[i].name, name) == 0)
            return &model->tensor[i];
    fail_msg("%s has no tensor %s", model->name, name);
    return NULL;
}

/* cols 1 with a name that is no matrix's: one dimension. */
static void check_tensor(const mz_model *model, const char *name, int64_t rows, int64_t cols,
                         int64_t count, mz_tier tier) {
    const mz_tensor *tensor = find(model, name);
    assert_int_equal(tensor->rows, rows);
    assert_int_equal(tensor->cols, cols);
    assert_int_equal(tensor->vector, cols == 1);
    assert_int_equal(tensor->count, count);
    assert_int_equal(tensor->tier, tier);
}

/* One tensor of the checkpoint by its full name: shape ends with 0. */
static void check_shape(const mz_model *model, const char *name, const int64_t *shape,
                        const char *dtype) {
    char buffer[128];
    for (int64_t t = 0; t < model->tensors; t++)
        for (int64_t i = 0; i < mz_tensor_parts(&model->tensor[t]); i++) {
            if (strcmp(mz_tensor_name(&model->tensor[t], i, buffer, sizeof buffer), name) != 0)
                continue;
            int64_t have[3];
            int n = mz_tensor_shape(&model->tensor[t], have);
            for (int d = 0; d < n; d++)
                assert_int_equal(have[d], shape[d]);
            assert_int_equal(shape[n], 0);
            assert_string_equal(mz_tensor_dtype(model, &model->tensor[t]), dtype);
            return;
        }
    fail_msg("%s has no tensor %s", model->name, name);
}

#define SHAPE(...) ((const int64_t[]){__VA_ARGS__, 0})
#define SHAPED(name, dtype, ...) check_shape(model, name, SHAPE(__VA_ARGS__), dtype)

/* Full names and shapes of single tensors, one to three dimensions. */
static void names_and_shapes(void **state) {
    mz_model *model = load("qwen3-30b-a3b");
    SHAPED("model.embed_tokens.weight", "bfloat16", 151936, 2048);
    SHAPED("model.layers.3.mlp.experts.17.gate_proj.weight", "bfloat16", 768, 2048);
    SHAPED("model.layers.47.mlp.experts.127.down_proj.weight", "bfloat16", 2048, 768);
    SHAPED("model.layers.0.self_attn.k_norm.weight", "bfloat16", 128);
    SHAPED("model.layers.0.mlp.gate.weight", "bfloat16", 128, 2048);
    mz_model_free(&model);
    model = load("mixtral-8x22b");
    SHAPED("model.layers.55.block_sparse_moe.experts.7.w2.weight", "bfloat16", 6144, 16384);
    mz_model_free(&model);
    model = load("gpt-oss-20b");
    SHAPED("model.layers.0.mlp.experts.gate_up_proj", "bfloat16", 32, 2880, 5760);
    SHAPED("model.layers.0.mlp.experts.down_proj", "bfloat16", 32, 2880, 2880);
    SHAPED("model.layers.0.mlp.experts.gate_up_proj_bias", "bfloat16", 32, 5760);
    SHAPED("model.layers.0.mlp.router.bias", "bfloat16", 32);
    mz_model_free(&model);
    model = load("granite-3.0-3b-a800m");
    SHAPED("model.layers.31.block_sparse_moe.output_linear.weight", "bfloat16", 40, 1536, 512);
    mz_model_free(&model);
    model = load("deepseek-v3");
    SHAPED("model.layers.60.mlp.gate.e_score_correction_bias", "float32", 256);
    SHAPED("model.layers.60.self_attn.q_a_layernorm.weight", "bfloat16", 1536);
    mz_model_free(&model);
    model = load("skewadam-6.8b");
    SHAPED("model.embed_positions.weight", "bfloat16", 256, 4096);
    SHAPED("model.layers.1.input_layernorm.bias", "float32", 4096);
    SHAPED("model.layers.1.mlp.gate.weight", "float32", 128, 4096);
    SHAPED("model.layers.1.mlp.experts.127.up_proj.weight", "bfloat16", 4096, 4096);
    SHAPED("model.norm.bias", "float32", 4096);
    mz_model_free(&model);
}

/* The SkewAdam study's split into tiers, its active parameters and its weights of 12.637848 GiB:
 * bf16 but for 565,248 fp32 parameters. */
static void study_model(void **state) {
    mz_model *model = load("skewadam-6.8b");
    assert_int_equal(mz_model_parameters(model, MZ_TIER_BACKBONE), 341352448);
    assert_int_equal(mz_model_parameters(model, MZ_TIER_EXPERT), 6442450944);
    assert_int_equal(mz_model_parameters(model, MZ_TIER_ROUTER), 524288);
    assert_int_equal(mz_model_parameters(model, MZ_TIER_SHARED), 0);
    assert_int_equal(mz_model_active_parameters(model), 442540032);
    int64_t bytes = 0;
    for (int tier = 0; tier <= MZ_TIER_SHARED; tier++)
        bytes += mz_model_bytes(model, (mz_tier)tier);
    assert_int_equal(bytes, 2 * 6784327680 + 2 * 565248);
    mz_model_free(&model);
}

/* Parameters that one token meets, added up from the dimensions. */
static void active_parameters(void **state) {
    static const struct {
        const char *name;
        int64_t active;
    } known[] = {
        /* DeepSeek-V3: 671,026,419,200 - 58 layers x 248 experts x 3 x 7168 x 2048 */
        {"deepseek-v3", 671026419200 - 58LL * 248 * 3 * 7168 * 2048},
        /* Mixtral-8x7B: six of eight experts of 3 x 4096 x 14336 rest in 32 layers */
        {"mixtral-8x7b", 46702792704 - 32LL * 6 * 3 * 4096 * 14336},
        /* groups of four experts: a pair computes one of them */
        {"laer-groups",
         24LL * (4 * 3 * 4096 * 7168 + 2 * 4096 * 4096 + 2 * 1024 * 4096 + 128 * 4096 + 2 * 4096) +
             2 * 32000LL * 4096 + 4096},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        mz_model *model = load(known[i].name);
        assert_int_equal(mz_model_active_parameters(model), known[i].active);
        mz_model_free(&model);
    }
}

/* Shapes as the checkpoints' headers list them. */
static void tensors_of_checkpoints(void **state) {
    mz_model *model = load("deepseek-v3");
    check_tensor(model, "model.layers.0.mlp.gate_proj.weight", 18432, 7168, 1, MZ_TIER_BACKBONE);
    check_tensor(model, "model.layers.60.mlp.experts.*.down_proj.weight", 7168, 2048, 256,
                 MZ_TIER_EXPERT);
    check_tensor(model, "model.layers.3.mlp.shared_experts.up_proj.weight", 2048, 7168, 1,
                 MZ_TIER_SHARED);
    check_tensor(model, "model.layers.3.self_attn.kv_a_proj_with_mqa.weight", 576, 7168, 1,
                 MZ_TIER_BACKBONE);
    check_tensor(model, "model.layers.3.mlp.gate.weight", 256, 7168, 1, MZ_TIER_ROUTER);
    const mz_tensor *bias = find(model, "model.layers.3.mlp.gate.e_score_correction_bias");
    assert_false(bias->trainable);
    assert_int_equal(bias->bytes_per_value, 4);
    assert_int_equal(model->moe_layers, 58);
    assert_int_equal(model->head_dim, 192);
    mz_model_free(&model);

    model = load("gpt-oss-20b");
    check_tensor(model, "model.layers.5.mlp.experts.gate_up_proj", 2880, 5760, 32, MZ_TIER_EXPERT);
    check_tensor(model, "model.layers.5.mlp.experts.down_proj_bias", 2880, 1, 32, MZ_TIER_EXPERT);
    check_tensor(model, "model.layers.5.self_attn.sinks", 64, 1, 1, MZ_TIER_BACKBONE);
    check_tensor(model, "model.layers.5.self_attn.o_proj.bias", 2880, 1, 1, MZ_TIER_BACKBONE);
    assert_true(model->is_sliding[0]);
    assert_false(model->is_sliding[23]);
    mz_model_free(&model);

    model = load("qwen2-57b-a14b");
    check_tensor(model, "model.layers.27.mlp.shared_expert_gate.weight", 1, 3584, 1,
                 MZ_TIER_SHARED);
    mz_model_free(&model);
    model = load("granite-3.0-3b-a800m");
    check_tensor(model, "model.layers.0.block_sparse_moe.input_linear.weight", 1024, 1536, 40,
                 MZ_TIER_EXPERT);
    mz_model_free(&model);
    model = load("glm-4.5");
    check_tensor(model, "model.layers.0.self_attn.q_norm.weight", 128, 1, 1, MZ_TIER_BACKBONE);
    assert_int_equal(model->moe_layers, 89);
    mz_model_free(&model);
}

/* Bytes of one expert in bf16, as the balancing papers tabulate them. */
static void expert_bytes(void **state) {
    static const struct {
        const char *name;
        int64_t bytes;
    } known[] = {
        {"qwen3-30b-a3b", 9437184}, {"glm-4.5-air", 34603008}, {"mixtral-8x7b", 352321536},
        {"deepseek-v3", 88080384},  {"olmoe-1b-7b", 12582912}, {"qwen3-235b-a22b", 37748736},
        {"deepseek-v2", 47185920},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        mz_model *model = load(known[i].name);
        assert_int_equal(2 * mz_model_expert_parameters(model), known[i].bytes);
        mz_model_free(&model);
    }
    mz_model *model = load("gpt-oss-20b"); /* 49,766,400 B of matrices, 3 x 2880 biases beside */
    assert_int_equal(2 * mz_model_expert_parameters(model), 49766400 + 2 * 3 * 2880);
    mz_model_free(&model);
}

static void near(double value, double expected) {
    if (fabs(value - expected) > 1e-12 * fabs(expected))
        fail_msg("%.17g is not %.17g", value, expected);
}

static void flops_by_hand(void **state) {
    mz_model *model = load("mixtral-8x7b");
    near(mz_model_expert_flops(model, 3), 3 * 6.0 * 4096 * 14336);
    near(mz_model_router_flops(model, 10), 10 * 2.0 * 4096 * 8);
    near(mz_model_head_flops(model, 10), 10 * 2.0 * 4096 * 32000);
    near(mz_model_projection_flops(model, 1), 2.0 * (2 * 4096 * 4096 + 2 * 4096 * 1024));
    near(mz_model_dense_flops(model, 0, 10), 0);
    /* Two sequences of 2048: half of 2048 keys per query, 32 heads of 128, QK and PV. */
    near(mz_model_attention_flops(model, 0, 4096, 2048), 4096.0 * 1024 * 32 * 4 * 128);
    mz_model_free(&model);

    model = load("deepseek-v3");
    near(mz_model_dense_flops(model, 0, 1), 6.0 * 7168 * 18432);
    near(mz_model_dense_flops(model, 3, 1), 6.0 * 7168 * 2048);
    near(mz_model_attention_flops(model, 3, 1, 4096), 2048.0 * 128 * 2 * (192 + 128));
    double weights = 7168.0 * 1536 + 1536.0 * 24576 + 7168.0 * 576 + 512.0 * 32768 + 16384.0 * 7168;
    near(mz_model_projection_flops(model, 1), 2 * weights);
    mz_model_free(&model);

    model = load("gpt-oss-20b"); /* even layers see 128 keys, less at the start of a sequence */
    near(mz_model_attention_flops(model, 0, 4096, 4096), 4096 * (128 - 2.0) * 64 * 4 * 64);
    near(mz_model_attention_flops(model, 1, 4096, 4096), 4096 * 2048.0 * 64 * 4 * 64);
    near(mz_model_attention_flops(model, 0, 64, 64), 64 * 32.0 * 64 * 4 * 64);
    mz_model_free(&model);
}

/* A group of experts as one routed unit: weights of all, FLOPs of one. */
static void expert_groups(void **state) {
    mz_model *model = load("laer-groups");
    assert_int_equal(model->experts, 32);
    assert_int_equal(mz_model_expert_parameters(model), 4 * 3 * 4096LL * 7168);
    near(mz_model_expert_flops(model, 1), 6.0 * 4096 * 7168);
    /* 32 units of 4 experts of half the size are 8 copies of Mixtral's 8 experts. */
    assert_int_equal(mz_model_layer_parameters(model, 5, MZ_TIER_EXPERT),
                     8 * 8 * 3 * 4096LL * 14336);
    mz_model_free(&model);
    model = load("smartmoe-32e2k");
    assert_int_equal(mz_model_expert_parameters(model), 2 * 1024LL * 4096);
    near(mz_model_expert_flops(model, 1), 4.0 * 1024 * 4096);
    mz_model_free(&model);
}

/* n_group of the published configs; a model without it has one group of all experts. */
static void router_groups(void **state) {
    const struct {
        const char *name;
        int32_t groups;
    } want[] = {{"deepseek-v3", 8}, {"deepseek-v2", 8}, {"glm-4.5", 1}, {"qwen3-30b-a3b", 1}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        mz_model *model = load(want[i].name);
        assert_int_equal(model->router_groups, want[i].groups);
        mz_model_free(&model);
    }
}

static void every_shipped_config_loads(void **state) {
    mz_arena arena = {0};
    char **names;
    int count;
    mz_err err;
    assert_int_equal(mz_model_list(MZ_SOURCE_DIR, &arena, &names, &count, &err), MZ_OK);
    assert_int_equal(count, 19);
    for (int i = 0; i < count; i++) {
        mz_model *model = load(names[i]);
        assert_string_equal(model->name, names[i]);
        assert_true(i == 0 || strcmp(names[i - 1], names[i]) < 0);
        int64_t layers = 0;
        for (int32_t l = 0; l < model->layers; l++)
            for (int tier = 0; tier <= MZ_TIER_SHARED; tier++)
                layers += mz_model_layer_parameters(model, l, (mz_tier)tier);
        int64_t outside = 0;
        for (int tier = 0; tier <= MZ_TIER_SHARED; tier++)
            outside += mz_model_layer_parameters(model, -1, (mz_tier)tier);
        assert_int_equal(layers + outside, mz_model_total(model));
        if (strcmp(names[i], "skewadam-6.8b") != 0) /* which has positions and a bias beside */
            assert_int_equal(outside,
                             model->hidden * (1 + model->vocab * (model->tied_embeddings ? 1 : 2)));
        mz_model_free(&model);
    }
    mz_arena_free(&arena);
}

/* Loads `text` as a config and expects MZ_EINPUT whose message holds both words. */
static void refused(const char *text, const char *word, const char *other) {
    char folder[256], path[300];
    mz_model *model;
    mz_err err = {0};
    make_directory(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/wrong.json", folder);
    write_bytes(path, text, strlen(text));
    assert_fails(mz_model_load(path, MZ_SOURCE_DIR, &model, &err), MZ_EINPUT, word, &err);
    remove_directory(folder);
    assert_null(model);
    if (!strstr(err.msg, other) || !strstr(err.msg, "wrong.json"))
        fail_msg("message lacks \"%s\" or the file: %s", other, err.msg);
}

#define MIXTRAL                                                                                    \
    "\"model_type\":\"mixtral\",\"hidden_size\":64,\"num_hidden_layers\":2,\"vocab_size\":100,"

static void bad_configs(void **state) {
    refused("{\"model_type\":\"llama\"}", "llama", "qwen3_moe");
    refused("{\"hidden_size\":64}", "model_type", "missing");
    refused("[1]", "object", "wrong.json");
    refused("{", "wrong.json", "JSON");
    refused("{" MIXTRAL "\"num_attention_heads\":4,\"intermediate_size\":8,"
            "\"num_experts_per_tok\":2}",
            "num_local_experts", "missing");
    refused("{" MIXTRAL "\"num_attention_heads\":4,\"intermediate_size\":8,"
            "\"num_local_experts\":2,\"num_experts_per_tok\":3}",
            "num_experts_per_tok", "wrong.json");
    refused("{" MIXTRAL "\"num_attention_heads\":4,\"num_key_value_heads\":3}", "multiple",
            "num_key_value_heads");
    refused("{" MIXTRAL "\"num_attention_heads\":5,\"intermediate_size\":8,"
            "\"num_local_experts\":2,\"num_experts_per_tok\":2}",
            "head_dim", "hidden_size");
    refused("{" MIXTRAL "\"num_attention_heads\":4,\"torch_dtype\":\"fp8\"}", "torch_dtype",
            "bfloat16");
    refused("{\"model_type\":\"mixtral\",\"hidden_size\":-64,\"num_hidden_layers\":2,"
            "\"vocab_size\":100}",
            "hidden_size", "wrong.json");
    refused("{\"model_type\":\"mixtral\",\"hidden_size\":4000000,\"num_hidden_layers\":4000,"
            "\"vocab_size\":100,\"num_attention_heads\":1,\"intermediate_size\":4000000,"
            "\"num_local_experts\":60000,\"num_experts_per_tok\":1}",
            "parameters", "1e17");
    refused("{\"model_type\":\"mizan_moe\",\"hidden_size\":64,\"num_hidden_layers\":2,"
            "\"vocab_size\":100,\"num_attention_heads\":4,\"moe_intermediate_size\":8,"
            "\"num_experts\":4,\"num_experts_per_tok\":2,\"expert_per_group\":2}",
            "expert_per_group", "experts_per_group");
    refused("{\"model_type\":\"glm4_moe\",\"hidden_size\":64,\"num_hidden_layers\":2,"
            "\"vocab_size\":100,\"num_attention_heads\":4,\"moe_intermediate_size\":8,"
            "\"n_routed_experts\":4,\"num_experts_per_tok\":2,\"first_k_dense_replace\":2,"
            "\"intermediate_size\":8}",
            "MoE layer", "wrong.json");
}

/* What is left of OLMoE for a replay: 64 experts of 16 layers, 3 x 2048 x 1024 values each; of a
 * model with dense layers and shared experts the routed ones alone; at other sizes as told. */
static void routed_experts_alone(void **state) {
    mz_err err;
    mz_model *model = load("olmoe-1b-7b"), *alone;
    assert_int_equal(mz_model_resize(model, &(mz_model_size){0}, &alone, &err), MZ_OK);
    assert_int_equal(mz_model_total(alone), INT64_C(16) * 64 * 3 * 2048 * 1024);
    assert_int_equal(mz_model_parameters(alone, MZ_TIER_EXPERT), mz_model_total(alone));
    assert_int_equal(mz_model_expert_parameters(alone), mz_model_expert_parameters(model));
    assert_int_equal(alone->layers, 16);
    assert_int_equal(alone->tensors, 32);
    assert_string_equal(alone->name, "olmoe-1b-7b");
    mz_model_free(&alone);
    const mz_model_size size = {.hidden = 96, .intermediate = 40, .layers = 3};
    assert_int_equal(mz_model_resize(model, &size, &alone, &err), MZ_OK);
    assert_int_equal(mz_model_total(alone), 3 * 64 * 3 * 96 * 40);
    assert_int_equal(mz_model_bytes(alone, MZ_TIER_EXPERT), 2 * mz_model_total(alone));
    assert_int_equal(alone->tensor[4].rows, 80);
    assert_int_equal(alone->tensor[4].cols, 96);
    assert_int_equal(alone->tensor[5].rows, 96);
    assert_int_equal(alone->tensor[5].cols, 40);
    assert_int_equal(alone->tensor[5].layer, 2);
    assert_int_equal(alone->tensor[5].count, 64);
    assert_int_equal(alone->top_k, model->top_k);
    assert_int_equal(json_integer_value(json_object_get(alone->resolved, "hidden")), 96);
    mz_model_free(&alone);
    mz_model_free(&model);
    model = load("deepseek-v2-lite"); /* 27 layers, the first dense; two shared experts */
    assert_int_equal(mz_model_resize(model, &(mz_model_size){0}, &alone, &err), MZ_OK);
    assert_int_equal(alone->layers, 26);
    assert_int_equal(mz_model_total(alone), INT64_C(26) * 64 * 3 * 2048 * 1408);
    mz_model_free(&alone);
    static const mz_model_size bad[] = {{.hidden = -1}, {.intermediate = 1 << 23}, {.layers = 27}};
    static const char *const said[] = {"--hidden -1", "--inter 8388608", "--layers 27"};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(mz_model_resize(model, &bad[i], &alone, &err), MZ_EINPUT);
        assert_non_null(strstr(err.msg, said[i]));
        assert_null(alone);
    }
    mz_model_free(&model);
}

static void unknown_names(void **state) {
    mz_model *model;
    mz_err err;
    assert_int_equal(mz_model_load("mixtral-9x9b", MZ_SOURCE_DIR, &model, &err), MZ_EINPUT);
    assert_non_null(strstr(err.msg, "did you mean mixtral-8x7b?"));
    assert_int_equal(mz_model_load("no/such/file.json", MZ_SOURCE_DIR, &model, &err), MZ_EINPUT);
    assert_non_null(strstr(err.msg, "no/such/file.json"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_totals),
        cmocka_unit_test(quantised_checkpoints),
        cmocka_unit_test(names_and_shapes),
        cmocka_unit_test(study_model),
        cmocka_unit_test(active_parameters),
        cmocka_unit_test(mixtral_instruct_vocabulary),
        cmocka_unit_test(tensors_of_checkpoints),
        cmocka_unit_test(expert_bytes),
        cmocka_unit_test(flops_by_hand),
        cmocka_unit_test(expert_groups),
        cmocka_unit_test(router_groups),
        cmocka_unit_test(every_shipped_config_loads),
        cmocka_unit_test(bad_configs),
        cmocka_unit_test(routed_experts_alone),
        cmocka_unit_test(unknown_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
