/* Statistics of a trace against their definitions, written out naively. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "traces/info.h"

#include <math.h>

static void near(double value, double wanted) {
    if (!(fabs(value - wanted) <= 1e-9 * (1 + fabs(wanted))))
        fail_msg("%.12g is not %.12g", value, wanted);
}

static void spread_by_definition(const int64_t *x, int n, mz_spread *s) {
    double sum = 0, top = 0, squares = 0, pairs = 0, entropy = 0, cold = 0;
    for (int i = 0; i < n; i++) {
        sum += (double)x[i];
        top = fmax(top, (double)x[i]);
    }
    double mean = sum / n;
    for (int i = 0; i < n; i++) {
        double share = (double)x[i] / sum;
        squares += pow((double)x[i] - mean, 2);
        entropy -= share > 0 ? share * log2(share) : 0;
        cold += (double)x[i] < 0.1 * mean;
        for (int j = 0; j < n; j++)
            pairs += fabs((double)(x[i] - x[j]));
    }
    *s = (mz_spread){.max_over_mean = top / mean,
                     .top1_share = top / sum,
                     .cv = sqrt(squares / n) / mean,
                     .gini = pairs / (2.0 * n * n * mean),
                     .entropy = entropy / log2(n),
                     .cold = cold / n};
}

static void compare(const mz_spread *a, const mz_spread *b) {
    near(a->max_over_mean, b->max_over_mean);
    near(a->top1_share, b->top1_share);
    near(a->cv, b->cv);
    near(a->gini, b->gini);
    near(a->entropy, b->entropy);
    near(a->cold, b->cold);
}

static void spreads(void **state) {
    int64_t x[40], sorted[40];
    mz_rng rng = mz_rng_make(3, 4);
    (void)state;
    /* By hand: 0, 0, 0, 4 over four places. */
    mz_spread s = mz_spread_of((int64_t[]){0, 4, 0, 0}, 4, sorted);
    near(s.max_over_mean, 4);
    near(s.top1_share, 1);
    near(s.cv, sqrt(3));
    near(s.gini, 0.75);
    near(s.entropy, 0);
    near(s.cold, 0.75);
    s = mz_spread_of((int64_t[]){5, 5, 5}, 3, sorted);
    near(s.max_over_mean, 1);
    near(s.gini, 0);
    near(s.cv, 0);
    near(s.entropy, 1);
    assert_true(isnan(mz_spread_of((int64_t[]){0, 0}, 2, sorted).gini));
    near(mz_spread_of((int64_t[]){7}, 1, sorted).max_over_mean, 1);
    for (int round = 0; round < 200; round++) {
        int n = 2 + (int)mz_rng_below(&rng, 39);
        n = n > 40 ? 40 : n;
        uint64_t scale = (uint64_t)1 << mz_rng_below(&rng, 40);
        for (int i = 0; i < n; i++)
            x[i] = mz_rng_below(&rng, 3) ? (int64_t)mz_rng_below(&rng, scale) : 0;
        x[0]++;
        mz_spread wanted, got = mz_spread_of(x, n, sorted);
        spread_by_definition(x, n, &wanted);
        compare(&got, &wanted);
    }
}

enum { STEPS = 4, BATCHES = 2, LAYERS = 3, RANKS = 3, E = 12 };
static int64_t counts[STEPS][BATCHES][LAYERS][RANKS][E];

static void write_random(const char *path, mz_err *err) {
    mz_rng rng = mz_rng_make(1, 1);
    mz_trace_facts facts = {.kind = MZ_TRACE_COUNTS,
                            .phase = MZ_PHASE_TRAIN,
                            .step_meaning = MZ_STEP_ITERATION,
                            .name = "random",
                            .producer = "test",
                            .layers = LAYERS,
                            .experts = E,
                            .ranks = RANKS,
                            .step_stride = 5};
    mz_trace_writer *writer;
    int64_t token = 0;
    assert_ok(mz_trace_create(path, &facts, NULL, &writer, err), err);
    for (int s = 0; s < STEPS; s++)
        for (int m = 0; m < BATCHES; m++, token += 1000000)
            for (int l = 0; l < LAYERS; l++)
                for (int r = 0; r < RANKS; r++) {
                    int64_t *count = counts[s][m][l][r], pairs = 0;
                    for (int e = 0; e < E; e++) {
                        count[e] = mz_rng_below(&rng, 4) ? (int64_t)mz_rng_below(&rng, 50) : 0;
                        count[e] = l == 2 ? 0 : count[e]; /* a layer without pairs */
                        pairs += count[e];
                    }
                    mz_trace_call_data call = {.step = 10 + 5 * s,
                                               .micro_batch = m,
                                               .layer = l,
                                               .rank = r,
                                               .token_begin = token + 1000 * r,
                                               .tokens = 100 + 10 * r + s,
                                               .pairs = pairs,
                                               .count = count};
                    assert_ok(mz_trace_write_call(writer, &call, err), err);
                }
    assert_ok(mz_trace_writer_close(&writer, err), err);
}

/* max/mean over `ranks` contiguous blocks of experts. */
static double blocks(const int64_t *x, int ranks) {
    double most = 0, sum = 0;
    for (int r = 0; r < ranks; r++) {
        double load = 0;
        for (int e = 0; e < E; e++)
            load += e * ranks / E == r ? (double)x[e] : 0;
        most = fmax(most, load);
        sum += load;
    }
    return most * ranks / sum;
}

static void check_window(mz_trace *trace, int first, int last, int ranks) {
    mz_app app = {.log = mz_log_make(NULL, -1), .version = "0"};
    mz_info_options options = {
        .ranks = ranks, .from_step = 10 + 5 * first - 4, .to_step = 10 + 5 * last};
    mz_trace_info info;
    mz_err err;
    assert_ok(mz_trace_info_read(&app, trace, &options, &info, &err), &err);
    int steps = last - first + 1;
    int64_t tokens = 0, pairs = 0;
    for (int s = first; s <= last; s++)
        tokens += BATCHES * (330 + 3 * s);
    assert_int_equal(info.steps, steps);
    assert_int_equal(info.first_step, 10 + 5 * first);
    assert_int_equal(info.last_step, 10 + 5 * last);
    assert_int_equal(info.micro_batches, steps * BATCHES);
    assert_int_equal(info.calls, steps * BATCHES * LAYERS * RANKS);
    assert_int_equal(info.tokens, tokens);
    assert_int_equal(info.call_tokens_min, 100 + first);
    assert_int_equal(info.call_tokens_max, 120 + last);
    for (int l = 0; l < 2; l++) {
        int64_t total[E] = {0};
        double expert = 0, rank = 0, worst = 0;
        for (int s = first; s <= last; s++)
            for (int m = 0; m < BATCHES; m++) {
                int64_t call[E] = {0}, sum = 0, most = 0;
                for (int r = 0; r < RANKS; r++)
                    for (int e = 0; e < E; e++)
                        call[e] += counts[s][m][l][r][e];
                for (int e = 0; e < E; e++) {
                    total[e] += call[e];
                    sum += call[e];
                    most = call[e] > most ? call[e] : most;
                }
                pairs += sum;
                expert += (double)most * E / (double)sum / (steps * BATCHES);
                rank += blocks(call, ranks) / (steps * BATCHES);
                worst = fmax(worst, blocks(call, ranks));
            }
        mz_spread wanted;
        spread_by_definition(total, E, &wanted);
        compare(&info.layer[l].experts, &wanted);
        near(info.layer[l].rank_imbalance, blocks(total, ranks));
        near(info.layer[l].call_expert_mean, expert);
        near(info.layer[l].call_rank_mean, rank);
        near(info.layer[l].call_rank_max, worst);
    }
    assert_int_equal(info.pairs, pairs);
    assert_int_equal(info.layer[2].calls, 0);
    assert_true(isnan(info.layer[2].experts.cv) && isnan(info.layer[2].call_rank_max));
    near(info.mean[2], (info.layer[0].experts.cv + info.layer[1].experts.cv) / 2);
    near(info.high[6], fmax(info.layer[0].rank_imbalance, info.layer[1].rank_imbalance));
    near(info.low[3], fmin(info.layer[0].experts.gini, info.layer[1].experts.gini));
    json_t *json = mz_trace_info_json(trace, &info);
    assert_non_null(json);
    assert_string_equal(json_string_value(json_object_get(json, "schema")), "mizan-trace-info/1");
    json_t *row = json_array_get(json_object_get(json, "layers"), 1);
    near(json_real_value(json_object_get(row, "expert_gini")), info.layer[1].experts.gini);
    row = json_array_get(json_object_get(json, "layers"), 2);
    assert_true(json_is_null(json_object_get(row, "expert_gini")));
    json_decref(json);
    mz_trace_info_free(&info);
}

static void whole_traces_and_windows(void **state) {
    char directory[256], path[300];
    mz_trace *trace;
    mz_err err;
    (void)state;
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/random.h5", directory);
    write_random(path, &err);
    assert_ok(mz_trace_open(path, &trace, &err), &err);
    check_window(trace, 0, 3, 3);
    check_window(trace, 0, 3, 4);
    check_window(trace, 1, 2, 5); /* 5 does not divide 12 */
    check_window(trace, 3, 3, 12);
    mz_app app = {.log = mz_log_make(NULL, -1), .version = "0"};
    mz_trace_info info;
    mz_info_options options = {.ranks = 13, .to_step = INT64_MAX};
    assert_fails(mz_trace_info_read(&app, trace, &options, &info, &err), MZ_EINPUT,
                 "--ranks: 13 ranks for 12 experts", &err);
    options = (mz_info_options){.from_step = 1000, .to_step = INT64_MAX};
    assert_ok(mz_trace_info_read(&app, trace, &options, &info, &err), &err);
    assert_int_equal(info.steps, 0);
    assert_true(isnan(info.mean[0]));
    json_t *json = mz_trace_info_json(trace, &info);
    assert_true(json && json_is_null(json_object_get(json, "first_step")));
    json_decref(json);
    mz_trace_info_free(&info);
    mz_trace_close(&trace);
    remove_directory(directory);
}

/* Two micro-batches of the only layer are two layer calls: each all on one expert, together even.
 */
static void one_layer(void **state) {
    char directory[256], path[300];
    static const int64_t count[2][2] = {{4, 0}, {0, 4}};
    mz_trace_facts facts = {.kind = MZ_TRACE_COUNTS,
                            .name = "one",
                            .producer = "test",
                            .layers = 1,
                            .experts = 2,
                            .ranks = 1,
                            .top_k = 1,
                            .step_stride = 1};
    mz_app app = {.log = mz_log_make(NULL, -1), .version = "0"};
    mz_info_options options = {.ranks = 2, .to_step = INT64_MAX};
    mz_trace_writer *writer;
    mz_trace_info info;
    mz_trace *trace;
    mz_err err;
    (void)state;
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/one.h5", directory);
    assert_ok(mz_trace_create(path, &facts, NULL, &writer, &err), &err);
    for (int m = 0; m < 2; m++) {
        mz_trace_call_data call = {
            .micro_batch = m, .token_begin = 4 * m, .tokens = 4, .pairs = 4, .count = count[m]};
        assert_ok(mz_trace_write_call(writer, &call, &err), &err);
    }
    assert_ok(mz_trace_writer_close(&writer, &err), &err);
    assert_ok(mz_trace_open(path, &trace, &err), &err);
    assert_ok(mz_trace_info_read(&app, trace, &options, &info, &err), &err);
    assert_int_equal(info.layer[0].calls, 2);
    near(info.layer[0].experts.max_over_mean, 1);
    near(info.layer[0].call_expert_mean, 2);
    near(info.layer[0].call_rank_mean, 2);
    mz_trace_info_free(&info);
    mz_trace_close(&trace);
    remove_directory(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(spreads),
        cmocka_unit_test(whole_traces_and_windows),
        cmocka_unit_test(one_layer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
