/* State and traffic rules per tensor, and the published state of the SkewAdam study's model. */
#include "tests/harness.h"

#include "sim/model/optimizer.h"

/* The study's 6,784,327,680-parameter model (arXiv 2607.19058), tensor by tensor: dense SwiGLU in
 * block 0, 128 experts of 3 matrices in block 1, norms and router in fp32. */
#define MATRIX(n, m, copies, layer_, tier_, bytes)                                                 \
    {                                                                                              \
        .rows = n, .cols = m, .count = copies, .layer = layer_, .tier = tier_,                     \
        .bytes_per_value = bytes, .trainable = true                                                \
    }
static const mz_tensor study[] = {
    {.rows = 50304,
     .cols = 4096,
     .count = 1,
     .layer = -1,
     .bytes_per_value = 2,
     .trainable = true,
     .role = MZ_ROLE_EMBEDDING},
    {.rows = 256,
     .cols = 4096,
     .count = 1,
     .layer = -1,
     .bytes_per_value = 2,
     .trainable = true,
     .role = MZ_ROLE_EMBEDDING},
    MATRIX(4096, 4096, 4, 0, MZ_TIER_BACKBONE, 2),
    MATRIX(1024, 4096, 4, 0, MZ_TIER_BACKBONE, 2),
    MATRIX(4096, 4096, 3, 0, MZ_TIER_BACKBONE, 2),
    {.rows = 4096, .cols = 1, .count = 10, .bytes_per_value = 4, .trainable = true, .vector = true},
    MATRIX(4096, 4096, 384, 1, MZ_TIER_EXPERT, 2),
    MATRIX(128, 4096, 1, 1, MZ_TIER_ROUTER, 4),
};

static mz_optimizer get(const char *name) {
    mz_optimizer optimizer;
    mz_err err;
    if (mz_optimizer_parse(name, &optimizer, &err))
        fail_msg("%s", err.msg);
    return optimizer;
}

static int64_t study_state(const char *name) {
    const mz_optimizer optimizer = get(name);
    int64_t bytes = 0;
    for (size_t i = 0; i < sizeof study / sizeof study[0]; i++)
        bytes += study[i].count * mz_optimizer_state_bytes(&optimizer, &study[i]);
    return bytes;
}

/* Published: AdamW 50.54718 GiB = 8 bytes of each parameter, Lion half of it, SkewAdam 1.28597 GiB,
 * Adafactor 0.01240 GiB; the exact bytes follow from the study's table of components. */
static void published_states(void **state) {
    assert_int_equal(study_state("adamw-bf16"), 8 * 6784327680);
    assert_int_equal(study_state("lion"), 4 * 6784327680);
    assert_int_equal(study_state("skewadam"), 1380800000);
    assert_int_equal(study_state("adafactor"), 13309952);
    /* Master weights for all but the 565,248 fp32 parameters. */
    assert_int_equal(study_state("adamw"), 12 * 6784327680 - 4 * 565248);
}

static mz_tensor matrix(mz_tier tier, int32_t bytes) {
    return (mz_tensor)MATRIX(30, 50, 1, 0, tier, bytes);
}

static int64_t state_of(const char *name, mz_tensor tensor) {
    const mz_optimizer optimizer = get(name);
    return mz_optimizer_state_bytes(&optimizer, &tensor);
}

static double traffic_of(const char *name, mz_tensor tensor) {
    const mz_optimizer optimizer = get(name);
    return mz_optimizer_update(&optimizer, &tensor, 1, 1, MZ_TEMPORARIES_FUSED).traffic_bytes;
}

static void state_rules(void **state) {
    mz_tensor expert = matrix(MZ_TIER_EXPERT, 2), backbone = matrix(MZ_TIER_BACKBONE, 2);
    mz_tensor router = matrix(MZ_TIER_ROUTER, 4), bias = expert;
    bias.cols = 1;
    bias.vector = true;
    assert_int_equal(state_of("skewadam", expert), 4 * (30 + 50));
    assert_int_equal(state_of("skewadam", backbone), 4 * 1500 + 4 * (30 + 50));
    assert_int_equal(state_of("skewadam", router), 4 * 1500);
    assert_int_equal(state_of("skewadam", bias), 4 * 30);
    assert_int_equal(state_of("adafactor", router), 4 * (30 + 50));
    assert_int_equal(state_of("sgdm", expert), 4 * 1500);
    assert_int_equal(state_of("adamw", expert), 12 * 1500);
    assert_int_equal(state_of("adamw", router), 8 * 1500);
}

static void update_traffic(void **state) {
    mz_tensor expert = matrix(MZ_TIER_EXPERT, 2), router = matrix(MZ_TIER_ROUTER, 4);
    /* bf16: gradient 2, weights written 2, master and two moments read and written 24. */
    assert_true(traffic_of("adamw", expert) == 28.0 * 1500);
    /* fp32: gradient 4, weights 8, moments 16. */
    assert_true(traffic_of("adamw", router) == 28.0 * 1500);
    assert_true(traffic_of("adamw-bf16", expert) == 22.0 * 1500);
    assert_true(traffic_of("lion", expert) == 14.0 * 1500);
    /* gradient three times 6, weights 4, row and column means read and written 8 (n + m). */
    assert_true(traffic_of("skewadam", expert) == 10.0 * 1500 + 8 * 80);
    assert_true(traffic_of("skewadam[sweeps=1]", expert) == 6.0 * 1500 + 8 * 80);
    /* gradient and moment twice in, moment once out. */
    assert_true(traffic_of("skewadam", router) == (4 + 8 + 8 + 4 + 4.0) * 1500);
}

static void nothing_for_what_is_not_trained(void **state) {
    int count;
    const mz_optimizer *const *table = mz_optimizers(&count);
    mz_tensor frozen = matrix(MZ_TIER_BACKBONE, 4);
    frozen.trainable = false;
    assert_true(count >= 9);
    for (int i = 0; i < count; i++) {
        const mz_update u = mz_optimizer_update(table[i], &frozen, 1, 1, MZ_TEMPORARIES_UNFUSED);
        assert_int_equal(u.state_bytes, 0);
        assert_true(u.traffic_bytes == 0);
        assert_int_equal(u.temporary_bytes, 0);
    }
}

/* The table holds the options that parsing the bare name gives. */
static void defaults(void **state) {
    int count;
    const mz_optimizer *const *table = mz_optimizers(&count);
    for (int i = 0; i < count; i++) {
        const mz_optimizer parsed = get(table[i]->name);
        assert_string_equal(parsed.name, table[i]->name);
        assert_int_equal(parsed.rule, table[i]->rule);
        assert_memory_equal(&parsed.options, &table[i]->options, sizeof parsed.options);
    }
}

static void refuses(const char *text, const char *word) {
    mz_optimizer optimizer;
    mz_err err = {0};
    assert_fails(mz_optimizer_parse(text, &optimizer, &err), MZ_EINPUT, word, &err);
}

static void bad_names_and_options(void **state) {
    refuses("adam", "adamw");
    refuses("zebra", "skewadam");
    refuses("", "known are");
    refuses("galore[rank=0]", "rank");
    refuses("galore[rnk=8]", "rank");
    refuses("lion[rank=8]", "lion");
    refuses("muon[state=x]", "coded");
    refuses("muon[state=coded", "name[key=value");
    refuses("muon]", "without '['");
    refuses("adamw[master=fp32,]", "comma");
    refuses("skewadam[experts=momentum,experts=momentum,experts=momentum,experts=momentum,"
            "experts=momentum,experts=momentum]",
            "longer");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_states), cmocka_unit_test(state_rules),
        cmocka_unit_test(update_traffic),   cmocka_unit_test(nothing_for_what_is_not_trained),
        cmocka_unit_test(defaults),         cmocka_unit_test(bad_names_and_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
