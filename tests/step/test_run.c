/* A whole run over loads made here: what a policy may see (history), figures that can be counted
 * without the simulator (imbalance, drops), and that policies in one run do not touch each other.
 */
#include "sim/step/run.h"
#include "common/base/rng.h"
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 8, EXPERTS = 64, LAYERS = 16, STEPS = 4, MICRO = 2, TOKENS = 96, TOP_K = 8 };

typedef struct fake_source {
    int64_t step;
    int32_t call;
    int64_t tokens[MICRO * RANKS];
    int parts; /* equal sequences that a rank's tokens are made of; 0: unknown */
    int64_t sequence_begin[MICRO * RANKS + 1], sequence_tokens[MICRO * RANKS * TOKENS];
    mz_load load;
    int64_t count[RANKS * EXPERTS], total[EXPERTS], source[RANKS];
} fake_source;

/* A pure function of (step, micro-batch, layer): skewed, and the hot experts move
 * with the step and the micro-batch. */
static void fill_counts(int64_t step, int32_t micro, int32_t layer, int64_t *count) {
    memset(count, 0, sizeof(int64_t) * RANKS * EXPERTS);
    for (int32_t s = 0; s < RANKS; s++) {
        mz_rng rng = mz_rng_make(
            7, mz_rng_stream((uint64_t)step, (uint64_t)micro, (uint64_t)layer, (uint64_t)s));
        for (int i = 0; i < TOKENS * TOP_K; i++) {
            double u = mz_rng_uniform(&rng);
            int32_t e = (int32_t)(u * u * u * EXPERTS);
            count[s * EXPERTS + (e + 11 * step + 5 * layer + 23 * micro) % EXPERTS]++;
        }
    }
}

static mz_code fake_step(void *self, mz_step_head *head, bool *end, mz_err *err) {
    fake_source *f = self;
    (void)err;
    *end = f->step == STEPS;
    if (*end)
        return MZ_OK;
    for (int i = 0; i < MICRO * RANKS; i++)
        f->tokens[i] = TOKENS;
    *head = (mz_step_head){
        .step = f->step, .micro_batches = MICRO, .layers = LAYERS, .tokens = f->tokens};
    for (int i = 0; f->parts && i < MICRO * RANKS; i++) {
        f->sequence_begin[i + 1] = (int64_t)(i + 1) * f->parts;
        for (int k = 0; k < f->parts; k++)
            f->sequence_tokens[i * f->parts + k] = TOKENS / f->parts;
        head->sequence_begin = f->sequence_begin;
        head->sequence_tokens = f->sequence_tokens;
    }
    f->step++;
    f->call = 0;
    return MZ_OK;
}

static mz_code fake_call(void *self, mz_layer_call *call, mz_err *err) {
    fake_source *f = self;
    (void)err;
    *call = (mz_layer_call){
        .micro_batch = f->call / LAYERS, .layer = f->call % LAYERS, .load = &f->load};
    fill_counts(f->step - 1, call->micro_batch, call->layer, f->count);
    mz_load_sum(&f->load);
    f->call++;
    return MZ_OK;
}

static mz_load_source make_source(fake_source *f) {
    memset(f, 0, sizeof *f);
    f->load = (mz_load){.sources = RANKS,
                        .experts = EXPERTS,
                        .count = f->count,
                        .total = f->total,
                        .source = f->source};
    return (mz_load_source){.self = f,
                            .ranks = RANKS,
                            .experts = EXPERTS,
                            .layers = LAYERS,
                            .next_step = fake_step,
                            .next_call = fake_call};
}

typedef struct fixture {
    mz_model *model;
    mz_cluster *cluster;
    mz_sim *sim;
    double budget; /* bytes for one layer's backward, < 0: what memory leaves */
    mz_run run[8];
} fixture;

static void run_parts(fixture *f, char **policies, int count, int parts, double budget) {
    mz_err err;
    *f = (fixture){.budget = budget};
    assert_ok(mz_model_load("olmoe-1b-7b", MZ_SOURCE_DIR, &f->model, &err), &err);
    assert_ok(mz_cluster_load("h100-80gb:8", MZ_SOURCE_DIR, &f->cluster, &err), &err);
    mz_step_options options = mz_step_defaults(RANKS);
    options.sequence_length = TOKENS;
    options.budget_memory_bytes = f->budget;
    options.budget_network_bytes = -1;
    assert_ok(mz_sim_create(f->model, f->cluster, &options, policies, count, &f->sim, &err), &err);
    fake_source fake;
    mz_load_source source = make_source(&fake);
    fake.parts = parts;
    mz_app app = {0};
    assert_ok(mz_sim_run(f->sim, &source, &app, STEPS, &err), &err);
    assert_ok(mz_sim_results(f->sim, f->run, &err), &err);
}

static void run_policies(fixture *f, char **policies, int count) {
    run_parts(f, policies, count, 0, -1);
}

static void done(fixture *f) {
    mz_sim_free(&f->sim);
    mz_model_free(&f->model);
    mz_cluster_free(&f->cluster);
}

/* Static placement: expert e on rank e / 8; max/mean counted here. */
static void test_static_imbalance(void **state) {
    (void)state;
    fixture f;
    char *policies[] = {"static"};
    run_policies(&f, policies, 1);
    int64_t count[RANKS * EXPERTS];
    double sum = 0, most = 0;
    for (int64_t step = 0; step < STEPS; step++)
        for (int32_t micro = 0; micro < MICRO; micro++)
            for (int32_t layer = 0; layer < LAYERS; layer++) {
                int64_t rows[RANKS] = {0}, peak = 0;
                fill_counts(step, micro, layer, count);
                for (int i = 0; i < RANKS * EXPERTS; i++)
                    rows[i % EXPERTS / 8] += count[i];
                for (int r = 0; r < RANKS; r++)
                    peak = rows[r] > peak ? rows[r] : peak;
                double ratio = (double)peak / (TOKENS * TOP_K);
                sum += ratio;
                most = ratio > most ? ratio : most;
            }
    assert_float_equal(f.run[0].rank_imbalance.mean, sum / (STEPS * MICRO * LAYERS), 1e-12);
    assert_float_equal(f.run[0].rank_imbalance.max, most, 1e-12);
    assert_true(f.run[0].kept_pairs_fraction == 1 && f.run[0].dropped_pairs_fraction == 0);
    done(&f);
}

/* Replica counts of SYMI (balancing-systems section 4.2), written from the text. */
static void symi_counts(const int64_t *pop, int slots, int64_t *count) {
    double diff[EXPERTS], total = 0;
    int64_t sum = 0;
    for (int e = 0; e < EXPERTS; e++)
        total += (double)pop[e];
    for (int e = 0; e < EXPERTS; e++) {
        double goal = (double)pop[e] / total * slots;
        count[e] = (int64_t)floor(goal > 1 ? goal : 1);
        diff[e] = (double)count[e] - goal;
        sum += count[e];
    }
    while (sum > slots) {
        int i = 0;
        for (int e = 1; e < EXPERTS; e++)
            if (diff[e] > diff[i])
                i = e;
        if (count[i] > 1) {
            count[i]--;
            sum--;
        }
        diff[i] -= 1;
    }
    while (sum < slots) {
        int i = 0;
        for (int e = 1; e < EXPERTS; e++)
            if (diff[e] < diff[i])
                i = e;
        count[i]++;
        sum++;
        diff[i] += 1;
    }
}

/* Drops of one call: capacity(e) = slot capacity times replicas, slot capacity = pairs / slots, a
 * real number; a started pair counts as whole. */
static int64_t symi_drops(const int64_t *now, const int64_t *replicas, int slots) {
    int64_t pairs = 0, dropped = 0;
    for (int e = 0; e < EXPERTS; e++)
        pairs += now[e];
    for (int e = 0; e < EXPERTS; e++) {
        double capacity = ceil((double)(pairs * replicas[e]) / slots);
        if ((double)now[e] > capacity)
            dropped += now[e] - (int64_t)capacity;
    }
    return dropped;
}

static void totals(const int64_t *count, int64_t *total) {
    for (int i = 0; i < RANKS * EXPERTS; i++)
        total[i % EXPERTS] += count[i];
}

/* The policy must be shown exactly the step before, summed over micro-batches, and nothing before
 * the first step is complete. Expected drops are computed here from the loads alone. */
static void test_history_is_last_step(void **state) {
    (void)state;
    fixture f;
    char *policies[] = {"symi[slots=10]"};
    run_policies(&f, policies, 1);
    const int slots = 10 * RANKS;
    int64_t count[RANKS * EXPERTS], dropped = 0, all = 0;
    for (int64_t step = 1; step < STEPS; step++) {
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            int64_t pop[EXPERTS] = {0}, replicas[EXPERTS];
            for (int32_t micro = 0; micro < MICRO; micro++) {
                fill_counts(step - 1, micro, layer, count);
                totals(count, pop);
            }
            symi_counts(pop, slots, replicas);
            for (int32_t micro = 0; micro < MICRO; micro++) {
                int64_t now[EXPERTS] = {0};
                fill_counts(step, micro, layer, count);
                totals(count, now);
                dropped += symi_drops(now, replicas, slots);
            }
        }
    }
    /* Step 0 has no history: replicas are even, 80 slots over 64 experts, the first 16 get two. */
    for (int32_t layer = 0; layer < LAYERS; layer++)
        for (int32_t micro = 0; micro < MICRO; micro++) {
            int64_t now[EXPERTS] = {0}, even[EXPERTS], replicas[EXPERTS];
            for (int e = 0; e < EXPERTS; e++)
                even[e] = 1;
            symi_counts(even, slots, replicas);
            fill_counts(0, micro, layer, count);
            totals(count, now);
            dropped += symi_drops(now, replicas, slots);
        }
    all = (int64_t)STEPS * MICRO * LAYERS * RANKS * TOKENS * TOP_K;
    assert_float_equal(f.run[0].dropped_pairs_fraction, (double)dropped / (double)all, 1e-12);
    assert_true(dropped > 0);
    done(&f);
}

/* Policies side by side give what each gives alone, whatever their order. */
static void test_policies_are_independent(void **state) {
    (void)state;
    char *together[] = {"lrmoe[keep=0.5]", "symi", "ultraep", "static", "ideal", "capacity"};
    fixture all;
    run_policies(&all, together, 6);
    for (int i = 0; i < 6; i++) {
        fixture one;
        run_policies(&one, &together[i], 1);
        assert_true(one.run[0].step_time_s.mean == all.run[i].step_time_s.mean);
        assert_true(one.run[0].peak_memory_bytes == all.run[i].peak_memory_bytes);
        assert_true(one.run[0].dispatch_bytes == all.run[i].dispatch_bytes);
        assert_true(one.run[0].rank_imbalance.mean == all.run[i].rank_imbalance.mean);
        done(&one);
    }
    done(&all);
}

/* What must hold between policies whatever the cost model: ideal is perfectly balanced to the pair,
 * LRMoE at keep 1/2 halves the backward rows and is no slower than its placement part. */
static void test_orders_that_must_hold(void **state) {
    (void)state;
    char *policies[] = {"static", "ultraep", "ideal", "lrmoe[keep=0.5,quota=ratio]",
                        "lrmoe[quota=none]"};
    fixture f;
    run_policies(&f, policies, 5);
    assert_true(f.run[2].rank_imbalance.max <= 1 + 1.0 / (TOKENS * TOP_K) + 1e-12);
    assert_true(f.run[1].rank_imbalance.mean < f.run[0].rank_imbalance.mean);
    assert_float_equal(f.run[3].kept_pairs_fraction, 0.5, 1e-9);
    assert_true(f.run[3].backward_dispatch_bytes < f.run[4].backward_dispatch_bytes);
    assert_true(f.run[4].kept_pairs_fraction == 1);
    for (int i = 0; i < 5; i++) {
        int64_t sum = 0;
        for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
            sum += f.run[i].memory_bytes[c];
        assert_int_equal(sum, f.run[i].peak_memory_bytes);
        assert_true(f.run[i].step_time_s.p50 <= f.run[i].step_time_s.p95);
    }
    done(&f);
}

/* A budget that not even one pair an expert fits in is said, call by call; without one nothing is.
 */
static void test_over_budget_is_said(void **state) {
    (void)state;
    char *policies[] = {"lrmoe[q_min=4]", "lrmoe[quota=none]"};
    fixture f;
    run_parts(&f, policies, 2, 0, 1000);
    assert_int_equal(f.run[0].over_budget_calls, STEPS * MICRO * LAYERS);
    assert_non_null(strstr(f.run[0].over_budget, "OVER BUDGET"));
    assert_true(f.run[0].kept_pairs_fraction < 0.1);
    assert_int_equal(f.run[1].over_budget_calls, 0);
    assert_true(f.run[1].over_budget[0] == 0 && f.run[1].kept_pairs_fraction == 1);
    done(&f);
}

static double attention_s(const mz_run *run) {
    for (int k = 0; k < run->phases; k++)
        if (strcmp(run->phase_name[k], "attention") == 0)
            return run->phase_s[k];
    return -1;
}

/* OLMoE: 16 heads of 128. Causal scores of a sequence of l tokens: QK^T and PV over l*l/2 pairs of
 * positions, 2 FLOPs a multiplication with its addition. */
static double score_seconds(const fixture *f, int parts) {
    const double l = TOKENS / parts;
    return mz_cost_attention(&f->cluster->device, parts * l * l / 2 * 2 * 2 * 128 * 16, false);
}

/* Attention goes by the bounds of sequences: parts of a rank's tokens cost the sum of their
 * squares, and sequences that are all of the usual length cost what unknown ones do. */
static void test_attention_by_sequence_bounds(void **state) {
    (void)state;
    char *policies[] = {"static"};
    fixture unknown, one, four;
    run_parts(&unknown, policies, 1, 0, -1);
    run_parts(&one, policies, 1, 1, -1);
    run_parts(&four, policies, 1, 4, -1);
    const double expected = LAYERS * MICRO * (score_seconds(&one, 1) - score_seconds(&one, 4));
    const double difference = attention_s(one.run) - attention_s(four.run);
    assert_true(expected > 0 && fabs(difference - expected) < 1e-9 * expected + 1e-15);
    assert_true(one.run[0].step_time_s.mean == unknown.run[0].step_time_s.mean);
    assert_true(four.run[0].step_time_s.mean < one.run[0].step_time_s.mean);
    done(&unknown);
    done(&one);
    done(&four);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_static_imbalance),
        cmocka_unit_test(test_history_is_last_step),
        cmocka_unit_test(test_policies_are_independent),
        cmocka_unit_test(test_orders_that_must_hold),
        cmocka_unit_test(test_attention_by_sequence_bounds),
        cmocka_unit_test(test_over_budget_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
