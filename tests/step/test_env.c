/* What policies are told about the machine: numbers from the data sheets in the shipped profiles,
 * worked out here. */
#include "sim/policy/policy.h"
#include "sim/cost/cost.h"
#include "sim/model/optimizer.h"
#include "tests/harness.h"

#include <math.h>

typedef struct machine {
    mz_model *model;
    mz_cluster *cluster;
    mz_arena arena;
    mz_policy_env env;
} machine;

static void make(machine *x, const char *model, const char *cluster, int32_t ep, int32_t group) {
    mz_err err;
    mz_optimizer adamw;
    *x = (machine){0};
    assert_ok(mz_model_load(model, MZ_SOURCE_DIR, &x->model, &err), &err);
    assert_ok(mz_cluster_load(cluster, MZ_SOURCE_DIR, &x->cluster, &err), &err);
    assert_ok(mz_optimizer_parse("adamw", &adamw, &err), &err);
    const mz_policy_job job = {.model = x->model,
                               .cluster = x->cluster,
                               .optimizer = &adamw,
                               .ep = ep ? ep : x->cluster->ranks,
                               .recompute = true,
                               .seed = 9};
    assert_ok(mz_policy_env_of(&job, group, &x->arena, &x->env, &err), &err);
}

static void done(machine *x) {
    mz_arena_free(&x->arena);
    mz_model_free(&x->model);
    mz_cluster_free(&x->cluster);
}

static void near(double got, double want, double part) {
    if (!(fabs(got - want) <= part * want))
        fail_msg("%.9g, not %.9g", got, want);
}

/* DeepSeek-V3 (H 7168, I 2048, 256 experts in 8 groups) on H100 nodes of 8: 989.4 TFLOP/s at 0.7,
 * NVLink 450 GB/s at 0.78, one 400 Gb/s NIC a GPU at 0.89; AdamW keeps 12 bytes a parameter. */
static void test_nodes(void **state) {
    (void)state;
    machine x;
    make(&x, "deepseek-v3", "h100-80gb:64", 32, 1);
    assert_int_equal(x.env.ranks, 32);
    assert_int_equal(x.env.experts, 256);
    assert_int_equal(x.env.layers, 58);
    assert_int_equal(x.env.expert_groups, 8);
    assert_int_equal(x.env.domains, 4);
    for (int r = 0; r < 32; r++)
        assert_int_equal(x.env.domain[r], r / 8);
    assert_int_equal(x.env.weight_bytes, 88080384); /* balancing-systems.md section 2 */
    assert_int_equal(x.env.token_bytes, 14336);
    assert_int_equal(x.env.expert_state_bytes, 12LL * 3 * 7168 * 2048);
    assert_true(x.env.recompute && x.env.seed == 9);
    near(x.env.pair_seconds, 6.0 * 7168 * 2048 / (0.7 * 989.4e12), 0.02);
    near(x.env.inside_bytes_s, 0.78 * 450e9, 1e-12);
    near(x.env.outside_bytes_s, 0.89 * 50e9, 1e-12);
    done(&x);
}

/* One node, and a group inside one: there is no outside. */
static void test_one_domain(void **state) {
    (void)state;
    machine x;
    make(&x, "olmoe-1b-7b", "h100-80gb:16", 8, 1);
    assert_int_equal(x.env.domains, 1);
    assert_int_equal(x.env.domain[7], 0);
    assert_int_equal(x.env.expert_groups, 1);
    near(x.env.outside_bytes_s, 0.78 * 450e9, 1e-12);
    done(&x);
}

/* Eight ranks on one H200: rows are copied in its memory (4.8 TB/s at 0.88, read and written) by
 * all at once. */
static void test_one_device(void **state) {
    (void)state;
    machine x;
    make(&x, "olmoe-1b-7b", "h200:1x8", 0, 0);
    assert_int_equal(x.env.ranks, 8);
    near(x.env.inside_bytes_s, 0.88 * 4.8e12 / 2 / 8, 1e-12);
    near(x.env.outside_bytes_s, 0.88 * 4.8e12 / 2 / 8, 1e-12);
    done(&x);
}

/* Two ranks share each port of an H100. */
static void test_shared_ports(void **state) {
    (void)state;
    machine x;
    make(&x, "olmoe-1b-7b", "h100-80gb:16x2", 0, 0);
    near(x.env.inside_bytes_s, 0.78 * 450e9 / 2, 1e-12);
    near(x.env.outside_bytes_s, 0.89 * 50e9 / 2, 1e-12);
    done(&x);
}

/* Every policy of the table has its planning time in every shipped profile, and those that solve
 * while they route that of the solver. */
static void test_planner_entries(void **state) {
    (void)state;
    mz_arena arena = {0};
    char **names;
    int count;
    mz_err err;
    assert_ok(mz_cluster_list(MZ_SOURCE_DIR, &arena, &names, &count, &err), &err);
    for (int c = 0; c < count; c++) {
        char spec[128];
        machine x;
        snprintf(spec, sizeof spec, "%s:8", names[c]);
        make(&x, "smartmoe-32e2k", spec, 0, 0);
        for (int i = 0; mz_policies[i]; i++) {
            const mz_policy *policy;
            mz_policy_traits traits;
            void *options, *self;
            char route[64];
            double seconds = -1;
            assert_ok(mz_policy_parse(mz_policies[i]->name, &x.arena, &policy, &options, &err),
                      &err);
            assert_ok(policy->init(&x.env, options, &x.arena, &self, &traits, &err), &err);
            assert_ok(mz_cost_planner(x.cluster, policy->name, 8, 32, &seconds, &err), &err);
            assert_true(seconds >= 0);
            snprintf(route, sizeof route, "%s.route", policy->name);
            if (traits.route_plans)
                assert_ok(mz_cost_planner(x.cluster, route, 8, 32, &seconds, &err), &err);
        }
        done(&x);
    }
    mz_arena_free(&arena);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nodes),           cmocka_unit_test(test_one_domain),
        cmocka_unit_test(test_one_device),      cmocka_unit_test(test_shared_ports),
        cmocka_unit_test(test_planner_entries),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
