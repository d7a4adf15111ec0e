/* Real policies on a shipped machine and model, through whole simulations. */
#include "common/base/rng.h"
#include "sim/step/run.h"
#include "tests/step/tiny.h"

enum { STEPS = 2 };

typedef struct source {
    mz_load load;
    int64_t tokens[64];
    int32_t step, call, layers;
    double skew;
} source;

/* Loads drawn anew for every call: expert e gets a share that falls with e, other per source. */
static void draw_load(source *from, uint64_t stream) {
    mz_load *l = &from->load;
    for (int32_t s = 0; s < l->sources; s++)
        for (int32_t e = 0; e < l->experts; e++) {
            mz_rng rng = mz_rng_make(1, mz_rng_stream(stream, (uint64_t)s, (uint64_t)e, 0));
            const double share = 40.0 / (1 + from->skew * e);
            l->count[(int64_t)s * l->experts + e] = (int64_t)(share * 2 * mz_rng_uniform(&rng));
        }
    mz_load_sum(l);
}

static mz_code next_step(void *self, mz_step_head *head, bool *end, mz_err *err) {
    source *from = self;
    *end = from->step == STEPS;
    *head = (mz_step_head){from->step++, 1, from->layers, from->tokens};
    from->call = 0;
    return MZ_OK;
}

static mz_code next_call(void *self, mz_layer_call *call, mz_err *err) {
    source *from = self;
    draw_load(from, (uint64_t)(from->step * 1000 + from->call));
    *call = (mz_layer_call){0, from->call++, &from->load, NULL};
    return MZ_OK;
}

typedef struct fixture {
    mz_model *model;
    mz_cluster *cluster;
    source from;
} fixture;

static void setup(fixture *f, const char *cluster, double skew) {
    mz_err err;
    memset(f, 0, sizeof *f);
    assert_ok(mz_model_load("smartmoe-32e2k", MZ_SOURCE_DIR, &f->model, &err), &err);
    assert_ok(mz_cluster_load(cluster, MZ_SOURCE_DIR, &f->cluster, &err), &err);
    mz_load *l = &f->from.load;
    l->sources = f->cluster->ranks;
    l->experts = f->model->experts;
    l->count = calloc((size_t)l->sources * (size_t)l->experts, sizeof *l->count);
    l->total = calloc((size_t)l->experts, sizeof *l->total);
    l->source = calloc((size_t)l->sources, sizeof *l->source);
    assert_true(l->count && l->total && l->source);
    f->from.layers = f->model->moe_layers;
    f->from.skew = skew;
    for (int32_t r = 0; r < l->sources; r++)
        f->from.tokens[r] = 600;
}

static void teardown(fixture *f) {
    free(f->from.load.count);
    free(f->from.load.total);
    free(f->from.load.source);
    mz_cluster_free(&f->cluster);
    mz_model_free(&f->model);
}

/* Results of the policies on the same loads; strings and arrays of a run die with the simulation.
 */
static void simulate(fixture *f, const mz_step_options *options, char **policies, int n,
                     mz_run *runs) {
    mz_err err;
    mz_sim *sim;
    mz_app app = {.log = mz_log_make(NULL, -1)};
    const mz_load_source loads = {&f->from,       f->cluster->ranks, f->model->experts,
                                  f->from.layers, next_step,         next_call};
    f->from.step = 0;
    assert_ok(mz_sim_create(f->model, f->cluster, options, policies, n, &sim, &err), &err);
    assert_ok(mz_sim_run(sim, &loads, &app, STEPS, &err), &err);
    assert_ok(mz_sim_results(sim, runs, &err), &err);
    mz_sim_free(&sim);
}

/* With memory for every pair the quotas bind nowhere: same times, bytes and memory as the placement
 * part alone. */
static void test_lrmoe_with_nothing_to_drop(void **state) {
    char ample[] = "lrmoe", none[] = "lrmoe[quota=none]", resend[] = "lrmoe[activations=resend]";
    char *policies[] = {ample, none, resend};
    mz_run run[3];
    fixture f;
    setup(&f, "h100-80gb:16", 0.2);
    const mz_step_options options = mz_step_defaults(f.cluster->ranks);
    simulate(&f, &options, policies, 3, run);
    for (int i = 0; i < 3; i++) {
        assert_near(run[i].kept_pairs_fraction, 1, 0);
        assert_near(run[i].step_time_s.mean, run[1].step_time_s.mean, 0);
        assert_near(run[i].moe_time_s, run[1].moe_time_s, 0);
        assert_int_equal(run[i].peak_memory_bytes, run[1].peak_memory_bytes);
        assert_int_equal(run[i].backward_dispatch_bytes, run[1].backward_dispatch_bytes);
        assert_int_equal(run[i].transfer_bytes, run[1].transfer_bytes);
    }
    teardown(&f);
}

/* Half of the pairs kept: backward sends and computes about half; forward does not change. */
static void test_lrmoe_keeps_half(void **state) {
    char none[] = "lrmoe[quota=none]", half[] = "lrmoe[quota=ratio,keep=0.5]";
    char *policies[] = {none, half};
    mz_run run[2];
    fixture f;
    setup(&f, "h100-80gb:16", 0.2);
    const mz_step_options options = mz_step_defaults(f.cluster->ranks);
    simulate(&f, &options, policies, 2, run);
    assert_near(run[1].kept_pairs_fraction, 0.5, 0.02);
    assert_int_equal(run[1].dispatch_bytes, run[0].dispatch_bytes);
    assert_near((double)run[1].backward_combine_bytes / (double)run[0].backward_combine_bytes, 0.5,
                0.1);
    const int experts = tiny_phase("experts"), back = tiny_phase("backward_experts");
    /* a phase is a sum of differences of clock times, which round apart */
    assert_near(run[1].phase_s[experts], run[0].phase_s[experts], 1e-12);
    assert_true(run[1].phase_s[back] < run[0].phase_s[back]);
    assert_true(run[1].phase_s[tiny_phase("score")] > 0);
    teardown(&f);
}

/* Every policy, expert groups of 16 and 8, both networks: conservation is checked inside (plans,
 * memory back to its level), times are positive and no policy beats the free perfect balance - but
 * where ZeRO 3 gathers experts from the other groups' ranks, one that holds them sharded inside its
 * group may. */
static void test_all_policies(void **state) {
    enum { MOST = 32 };
    char text[MOST][64];
    char *policies[MOST];
    mz_run run[MOST];
    int n = 0;
    for (int i = 0; mz_policies[i]; i++) {
        snprintf(text[n], sizeof text[n], "%s", mz_policies[i]->name);
        policies[n] = text[n];
        n++;
        assert_true(n < MOST);
    }
    for (int variant = 0; variant < 4; variant++) {
        fixture f;
        setup(&f, "h100-80gb:16", 0.5);
        mz_step_options options = mz_step_defaults(f.cluster->ranks);
        options.effects.planner = false;
        options.ep = variant & 1 ? 8 : 16;
        options.network = variant & 2 ? MZ_NETWORK_FLOW : MZ_NETWORK_PORT;
        options.zero = variant;
        simulate(&f, &options, policies, n, run);
        double ideal = 0, fixed = 0;
        for (int i = 0; i < n; i++) {
            assert_true(run[i].fits);
            ideal = strcmp(policies[i], "ideal") == 0 ? run[i].step_time_s.mean : ideal;
            fixed = strcmp(policies[i], "static") == 0 ? run[i].step_time_s.mean : fixed;
        }
        for (int i = 0; i < n; i++)
            if (!run[i].lossy && (options.zero < 3 || strcmp(policies[i], "laer") != 0) &&
                !(run[i].step_time_s.mean >= 0.999 * ideal))
                fail_msg("variant %d: %s takes %g s, the free perfect balance %g s", variant,
                         policies[i], run[i].step_time_s.mean, ideal);
        assert_true(ideal < fixed);
        teardown(&f);
    }
}

/* Options that would be ignored beside others are refused, and the message names both. */
static void test_idle_options(void **state) {
    static const struct {
        const char *text, *why;
    } wrong[] = {
        {"lrmoe[quota=none,keep=0.5]", "keep has no effect with quota=none"},
        {"lrmoe[quota=none,rows=5]", "rows has no effect with quota=none"},
        {"lrmoe[quota=none,scope=global]", "scope has no effect with quota=none"},
        {"lrmoe[quota=none,activations=resend]", "activations has no effect with quota=none"},
        {"lrmoe[quota=joint,placement=symi]", "quota=joint has no effect with another placement"},
        {"lrmoe[placement=symi,replicas=group]", "replicas has no effect with another placement"},
        {"lrmoe[placement=static,slots=4]", "slots has no effect with placement=static"},
        {"symi[drop=no,cf=2]", "cf has no effect with drop=no"},
    };
    fixture f;
    setup(&f, "h100-80gb:8", 0.2);
    const mz_step_options options = mz_step_defaults(f.cluster->ranks);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char text[64], *policies[] = {text};
        mz_sim *sim = NULL;
        mz_err err;
        snprintf(text, sizeof text, "%s", wrong[i].text);
        assert_fails(mz_sim_create(f.model, f.cluster, &options, policies, 1, &sim, &err),
                     MZ_EINPUT, wrong[i].why, &err);
    }
    teardown(&f);
}

/* Imbalance beside its bounds: what any placement could reach is below what the plan's own hosts
 * could, which is below what was planned; one host each leaves no choice. Groups of 8 and of 16. */
static void test_bounds(void **state) {
    char fixed[] = "static", symi[] = "symi", ultraep[] = "ultraep[slots=6]", ideal[] = "ideal";
    char *policies[] = {fixed, symi, ultraep, ideal};
    for (int32_t ep = 8; ep <= 16; ep *= 2) {
        mz_run run[4];
        mz_err err;
        mz_sim *sim;
        fixture f;
        setup(&f, "h100-80gb:16", 0.5);
        mz_app app = {.log = mz_log_make(NULL, -1)};
        mz_step_options options = mz_step_defaults(f.cluster->ranks);
        options.ep = ep;
        const mz_load_source loads = {&f.from,       f.cluster->ranks, f.model->experts,
                                      f.from.layers, next_step,        next_call};
        assert_ok(mz_sim_create(f.model, f.cluster, &options, policies, 4, &sim, &err), &err);
        assert_ok(mz_sim_want_bounds(sim, &err), &err);
        assert_ok(mz_sim_run(sim, &loads, &app, STEPS, &err), &err);
        assert_ok(mz_sim_results(sim, run, &err), &err);
        for (int i = 0; i < 4; i++) {
            const mz_run *r = &run[i];
            assert_true(r->bounds);
            assert_true(1 <= r->imbalance_bound_any.mean);
            assert_true(r->imbalance_bound_any.mean <= r->imbalance_bound_hosts.mean);
            assert_true(r->imbalance_bound_any.max <= r->imbalance_bound_hosts.max);
            assert_true(r->imbalance_bound_hosts.mean <= r->rank_imbalance.mean);
            assert_true(r->imbalance_bound_hosts.max <= r->rank_imbalance.max);
        }
        assert_near(run[0].imbalance_bound_hosts.mean, run[0].rank_imbalance.mean, 1e-12);
        assert_near(run[3].imbalance_bound_any.mean, run[3].rank_imbalance.mean, 1e-12);
        assert_true(run[2].imbalance_bound_any.mean < run[0].imbalance_bound_any.mean);
        mz_sim_free(&sim);
        teardown(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lrmoe_with_nothing_to_drop),
        cmocka_unit_test(test_lrmoe_keeps_half),
        cmocka_unit_test(test_all_policies),
        cmocka_unit_test(test_idle_options),
        cmocka_unit_test(test_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
