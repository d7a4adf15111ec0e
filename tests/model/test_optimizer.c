/* State and traffic rules per tensor, and the published state of the SkewAdam study's model. */
#include "tests/harness.h"

#include "sim/model/model.h"

/* The study's 6,784,327,680-parameter model (arXiv 2607.19058), tensor by tensor: dense SwiGLU in
 * block 0, 128 experts of 3 matrices in block 1, norms and router in fp32. */
static const mz_tensor study[] = {
    {"embedding and head", 50304, 4096, 1, -1, MZ_TIER_BACKBONE, 2, true},
    {"positions", 256, 4096, 1, -1, MZ_TIER_BACKBONE, 2, true},
    {"q and o", 4096, 4096, 4, 0, MZ_TIER_BACKBONE, 2, true},
    {"k and v", 1024, 4096, 4, 0, MZ_TIER_BACKBONE, 2, true},
    {"dense", 4096, 4096, 3, 0, MZ_TIER_BACKBONE, 2, true},
    {"layer norms", 4096, 1, 10, 0, MZ_TIER_BACKBONE, 4, true},
    {"experts", 4096, 4096, 384, 1, MZ_TIER_EXPERT, 2, true},
    {"router", 128, 4096, 1, 1, MZ_TIER_ROUTER, 4, true},
};

static const mz_optimizer *get(const char *name) {
    const mz_optimizer *optimizer;
    mz_err err;
    if (mz_optimizer_find(name, &optimizer, &err))
        fail_msg("%s", err.msg);
    return optimizer;
}

static int64_t study_state(const char *name) {
    const mz_optimizer *optimizer = get(name);
    int64_t bytes = 0;
    for (size_t i = 0; i < sizeof study / sizeof study[0]; i++)
        bytes += study[i].count * optimizer->state_bytes(&study[i]);
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
    return (mz_tensor){.rows = 30,
                       .cols = 50,
                       .count = 1,
                       .tier = tier,
                       .bytes_per_value = bytes,
                       .trainable = true};
}

static void state_rules(void **state) {
    mz_tensor expert = matrix(MZ_TIER_EXPERT, 2), backbone = matrix(MZ_TIER_BACKBONE, 2);
    mz_tensor router = matrix(MZ_TIER_ROUTER, 4), bias = expert;
    bias.cols = 1;
    const mz_optimizer *skew = get("skewadam");
    assert_int_equal(skew->state_bytes(&expert), 4 * (30 + 50));
    assert_int_equal(skew->state_bytes(&backbone), 4 * 1500 + 4 * (30 + 50));
    assert_int_equal(skew->state_bytes(&router), 4 * 1500);
    assert_int_equal(skew->state_bytes(&bias), 4 * 30);
    assert_int_equal(get("adafactor")->state_bytes(&router), 4 * (30 + 50));
    assert_int_equal(get("sgdm")->state_bytes(&expert), 4 * 1500);
    assert_int_equal(get("adamw")->state_bytes(&expert), 12 * 1500);
    assert_int_equal(get("adamw")->state_bytes(&router), 8 * 1500);
}

static void update_traffic(void **state) {
    mz_tensor expert = matrix(MZ_TIER_EXPERT, 2), router = matrix(MZ_TIER_ROUTER, 4);
    /* bf16: gradient 2, weights written 2, master and two moments read and written 24. */
    assert_true(get("adamw")->update_bytes(&expert) == 28.0 * 1500);
    /* fp32: gradient 4, weights 8, moments 16. */
    assert_true(get("adamw")->update_bytes(&router) == 28.0 * 1500);
    assert_true(get("adamw-bf16")->update_bytes(&expert) == 22.0 * 1500);
    assert_true(get("lion")->update_bytes(&expert) == 14.0 * 1500);
    /* gradient twice 4, weights 4, row and column means read and written 8 (n + m). */
    assert_true(get("skewadam")->update_bytes(&expert) == 8.0 * 1500 + 8 * 80);
    assert_true(get("skewadam")->update_bytes(&router) == (12.0 + 8) * 1500);
}

static void nothing_for_what_is_not_trained(void **state) {
    int count;
    const mz_optimizer *const *table = mz_optimizers(&count);
    mz_tensor frozen = matrix(MZ_TIER_BACKBONE, 4);
    frozen.trainable = false;
    assert_true(count >= 6);
    for (int i = 0; i < count; i++) {
        assert_int_equal(table[i]->state_bytes(&frozen), 0);
        assert_true(table[i]->update_bytes(&frozen) == 0);
        assert_ptr_equal(get(table[i]->name), table[i]);
    }
}

static void unknown_optimizer(void **state) {
    const mz_optimizer *optimizer;
    mz_err err;
    assert_int_equal(mz_optimizer_find("adam", &optimizer, &err), MZ_EINPUT);
    assert_non_null(strstr(err.msg, "skewadam"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_states),  cmocka_unit_test(state_rules),
        cmocka_unit_test(update_traffic),    cmocka_unit_test(nothing_for_what_is_not_trained),
        cmocka_unit_test(unknown_optimizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
