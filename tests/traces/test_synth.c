/* The generator: each load has the property its name says, steps are independent of each other, and
 * the realistic load lies in the ranges measured on recorded traces. */
#include "tests/harness.h"

#include "traces/synth.h"
#include "traces/trace.h"

#include <math.h>

static mz_synth_options shape(const char *load) {
    return (mz_synth_options){.load = load,
                              .layers = 3,
                              .experts = 64,
                              .top_k = 8,
                              .ranks = 8,
                              .tokens = 2048,
                              .sequence = 256,
                              .steps = 8,
                              .micro_batches = 2,
                              .seed = 7};
}

typedef struct call {
    uint16_t *expert;
    float *weight;
    int64_t tokens, pairs;
} call;

static call make_call(mz_synth *synth, const mz_synth_options *o, int64_t step, int32_t batch,
                      int32_t layer, int32_t rank) {
    call c = {.tokens = mz_synth_tokens(synth, rank)};
    c.pairs = c.tokens * o->top_k;
    c.expert = calloc((size_t)c.pairs + 1, sizeof *c.expert);
    c.weight = calloc((size_t)c.pairs + 1, sizeof *c.weight);
    assert_true(c.expert && c.weight);
    mz_synth_call(synth, step, batch, layer, rank, c.expert, c.weight);
    return c;
}

static void free_call(call *c) {
    free(c->expert);
    free(c->weight);
}

static mz_synth *open_synth(const mz_synth_options *o) {
    mz_synth *synth;
    mz_err err;
    assert_ok(mz_synth_open(o, &synth, &err), &err);
    return synth;
}

/* Pairs per expert of one layer in one step, all ranks and micro-batches. */
static void add_layer(mz_synth *synth, const mz_synth_options *o, int64_t step, int32_t layer,
                      int64_t *count) {
    memset(count, 0, (size_t)o->experts * sizeof *count);
    for (int32_t m = 0; m < o->micro_batches; m++)
        for (int32_t r = 0; r < o->ranks; r++) {
            call c = make_call(synth, o, step, m, layer, r);
            for (int64_t i = 0; i < c.pairs; i++)
                count[c.expert[i]]++;
            free_call(&c);
        }
}

static double rank_imbalance(const int64_t *count, const mz_synth_options *o, int32_t *busiest) {
    int64_t most = -1, sum = 0, each = o->experts / o->ranks;
    for (int32_t r = 0; r < o->ranks; r++) {
        int64_t load = 0;
        for (int64_t e = r * each; e < (r + 1) * each; e++)
            load += count[e];
        if (load > most) {
            most = load;
            *busiest = r;
        }
        sum += load;
    }
    return (double)most * (double)o->ranks / (double)sum;
}

static void near(double value, double wanted, double relative) {
    if (!(fabs(value - wanted) <= relative * fabs(wanted)))
        fail_msg("%g is not within %g %% of %g", value, 100 * relative, wanted);
}

static void every_token_is_valid(void **state) {
    static const struct {
        int64_t experts, top_k, ranks, tokens;
    } shapes[] = {{64, 8, 8, 300}, {8, 2, 3, 65},    {4, 4, 2, 10}, {1, 1, 1, 1},
                  {5, 3, 8, 64},   {256, 8, 16, 20}, {2, 1, 1, 9}};
    (void)state;
    for (int i = 0; mz_synth_loads[i]; i++)
        for (int s = 0; s < COUNT_OF(shapes); s++) {
            mz_synth_options o = shape(mz_synth_loads[i]->name);
            o.experts = shapes[s].experts;
            o.top_k = shapes[s].top_k;
            o.ranks = shapes[s].ranks;
            o.tokens = shapes[s].tokens;
            mz_synth *synth = open_synth(&o);
            for (int32_t r = 0; r < o.ranks; r++) {
                call c = make_call(synth, &o, 3, 1, 2, r);
                for (int64_t t = 0; t < c.tokens; t++) {
                    double sum = 0;
                    for (int64_t j = 0; j < o.top_k; j++) {
                        int64_t at = t * o.top_k + j;
                        assert_true(c.expert[at] < o.experts);
                        for (int64_t b = 0; b < j; b++)
                            assert_int_not_equal(c.expert[at], c.expert[t * o.top_k + b]);
                        assert_true(j == 0 || c.weight[at] <= c.weight[at - 1]);
                        assert_true(c.weight[at] > 0);
                        sum += (double)c.weight[at];
                    }
                    near(sum, 1.0, 1e-5);
                }
                free_call(&c);
            }
            mz_synth_close(&synth);
        }
}

/* A call is a function of its coordinates: the order of asking does not matter, seeds and steps do.
 */
static void steps_are_independent(void **state) {
    (void)state;
    for (int i = 0; mz_synth_loads[i]; i++) {
        mz_synth_options o = shape(mz_synth_loads[i]->name);
        mz_synth *fresh = open_synth(&o), *used = open_synth(&o);
        o.seed++;
        mz_synth *other = open_synth(&o);
        int32_t rank = 0; /* one with tokens under every seed tried here */
        while (mz_synth_tokens(fresh, rank) == 0 ||
               mz_synth_tokens(fresh, rank) != mz_synth_tokens(other, rank)) {
            rank++;
            if (rank == o.ranks)
                break;
        }
        for (int64_t step = 0; step < 5; step++)
            for (int32_t r = 0; r < o.ranks; r++) {
                call c = make_call(used, &o, step, 0, (int32_t)step % 3, r);
                free_call(&c);
            }
        if (rank < o.ranks) {
            call a = make_call(fresh, &o, 5, 1, 1, rank), b = make_call(used, &o, 5, 1, 1, rank);
            call c = make_call(other, &o, 5, 1, 1, rank), d = make_call(used, &o, 6, 1, 1, rank);
            assert_memory_equal(a.expert, b.expert, (size_t)a.pairs * 2);
            assert_memory_equal(a.weight, b.weight, (size_t)a.pairs * 4);
            assert_memory_not_equal(a.expert, c.expert, (size_t)a.pairs * 2);
            assert_memory_not_equal(a.expert, d.expert, (size_t)a.pairs * 2);
            free_call(&a);
            free_call(&b);
            free_call(&c);
            free_call(&d);
        }
        mz_synth_close(&fresh);
        mz_synth_close(&used);
        mz_synth_close(&other);
    }
}

static void balanced_is_even(void **state) {
    int64_t count[64];
    (void)state;
    mz_synth_options o = shape("balanced");
    o.micro_batches = 1;
    o.tokens = 1003; /* 8 ranks x 1003 x 8 pairs over 64 experts do divide; a rank's do not */
    mz_synth *synth = open_synth(&o);
    add_layer(synth, &o, 2, 1, count);
    for (int e = 0; e < 64; e++)
        assert_int_equal(count[e], 1003);
    for (int32_t r = 0; r < 8; r++) {
        call c = make_call(synth, &o, 2, 0, 1, r);
        memset(count, 0, sizeof count);
        for (int64_t i = 0; i < c.pairs; i++)
            count[c.expert[i]]++;
        for (int e = 0; e < 64; e++)
            assert_in_range(count[e], 1003 / 8, 1003 / 8 + 1);
        free_call(&c);
    }
    mz_synth_close(&synth);
}

/* How many experts have more than twice the median load, and their mean load over the others'. */
static int hot_set(const int64_t *count, int experts, double *heat) {
    double hot = 0, rest = 0;
    int n = 0;
    int64_t sorted[256];
    memcpy(sorted, count, (size_t)experts * sizeof *count);
    for (int i = 0; i < experts; i++)
        for (int j = i + 1; j < experts; j++)
            if (sorted[j] < sorted[i]) {
                int64_t swap = sorted[i];
                sorted[i] = sorted[j];
                sorted[j] = swap;
            }
    for (int e = 0; e < experts; e++) {
        if (count[e] > 2 * sorted[experts / 2]) {
            hot += (double)count[e];
            n++;
        } else {
            rest += (double)count[e];
        }
    }
    *heat = n ? (hot / n) / (rest / (experts - n)) : 1;
    return n;
}

static void hot_loads_are_hot(void **state) {
    int64_t count[64];
    double heat;
    int32_t busiest, first = 0;
    (void)state;
    mz_synth_options o = shape("hot-experts");
    mz_synth *synth = open_synth(&o);
    add_layer(synth, &o, 1, 0, count);
    assert_int_equal(hot_set(count, 64, &heat), 4);
    near(heat, 8, 0.03);
    mz_synth_close(&synth);

    o.load = "hot-rank";
    synth = open_synth(&o);
    for (int64_t step = 0; step < 3; step++) {
        add_layer(synth, &o, step, 1, count);
        assert_int_equal(hot_set(count, 64, &heat), 8);
        near(heat, 4, 0.03);
        near(rank_imbalance(count, &o, &busiest), 32.0 / 11.0, 0.02); /* 8 x 4 / (7 + 4) */
        first = step ? first : busiest;
        assert_int_equal(busiest, first);
    }
    mz_synth_close(&synth);

    o.load = "spread-heat";
    synth = open_synth(&o);
    add_layer(synth, &o, 1, 1, count);
    assert_int_equal(hot_set(count, 64, &heat), 8);
    near(heat, 4, 0.03);
    near(rank_imbalance(count, &o, &busiest), 1, 0.03);
    mz_synth_close(&synth);
}

static void moving_loads_move(void **state) {
    int64_t count[64];
    int32_t before = 0, busiest;
    (void)state;
    mz_synth_options o = shape("rotating");
    mz_synth *synth = open_synth(&o);
    for (int64_t step = 0; step < 10; step++) {
        add_layer(synth, &o, step, 2, count);
        near(rank_imbalance(count, &o, &busiest), 32.0 / 11.0, 0.02);
        if (step)
            assert_int_equal(busiest, (before + 1) % 8);
        before = busiest;
    }
    mz_synth_close(&synth);
    o.load = "burst";
    synth = open_synth(&o);
    int bursts = 0, last = -1;
    for (int step = 0; step < 12; step++) {
        add_layer(synth, &o, step, 2, count);
        double imbalance = rank_imbalance(count, &o, &busiest);
        if (imbalance > 2) {
            near(imbalance, 64.0 / 15.0, 0.02); /* 8 x 8 / (7 + 8) */
            assert_true(last < 0 || step - last == 4);
            last = step;
            bursts++;
        } else {
            near(imbalance, 1, 0.03);
        }
    }
    assert_int_equal(bursts, 3);
    mz_synth_close(&synth);
}

static void sources_and_places_run_empty(void **state) {
    int64_t count[64], total = 0;
    bool seen[9] = {false};
    (void)state;
    mz_synth_options o = shape("ragged");
    mz_synth *synth = open_synth(&o);
    for (int32_t r = 0; r < 8; r++) {
        int64_t tokens = mz_synth_tokens(synth, r);
        total += tokens;
        double place = ((double)tokens / 2048 - 0.25) / 1.5 * 7;
        near(place + 1, round(place) + 1, 0.01);
        seen[(int)round(place)] = true;
    }
    for (int i = 0; i < 8; i++)
        assert_true(seen[i]);
    assert_int_equal(total, 8 * 2048);
    mz_synth_close(&synth);

    o.load = "empty";
    synth = open_synth(&o);
    int idle = 0, cold = 0, cold_ranks = 0;
    for (int32_t r = 0; r < 8; r++)
        idle += mz_synth_tokens(synth, r) == 0;
    assert_int_equal(idle, 2);
    add_layer(synth, &o, 0, 1, count);
    for (int e = 0; e < 64; e++)
        cold += count[e] == 0;
    assert_int_equal(cold, 16);
    for (int r = 0; r < 8; r++) {
        int used = 0;
        for (int e = 0; e < 8; e++)
            used += count[8 * r + e] > 0;
        cold_ranks += used == 0;
    }
    assert_in_range(cold_ranks, 1, 2);
    mz_synth_close(&synth);
}

/* ---- the realistic load ---------------------------------------------------------------------- */

enum { TOKENS = 64 * 256, LENGTH = 256, WINDOW = 64, K = 4, E = 32, LAYERS = 6 };

typedef struct realism {
    double cv, reuse, far_reuse, inflation;
} realism;

/* Statistics of one layer, tokens in order, sequences of LENGTH tokens. */
static realism measure(const uint16_t *expert) {
    static double share[E], window[E], square[E], sum[E];
    realism r = {0};
    memset(share, 0, sizeof share);
    memset(square, 0, sizeof square);
    memset(sum, 0, sizeof sum);
    for (int64_t i = 0; i < (int64_t)TOKENS * K; i++)
        share[expert[i]] += 1.0 / TOKENS;
    double independent = 0, variance = 0, squares = 0;
    for (int e = 0; e < E; e++) {
        independent += share[e] * share[e] / K;
        variance += (share[e] - (double)K / E) * (share[e] - (double)K / E) / E;
    }
    r.cv = sqrt(variance) * E / K;
    int64_t same[2] = {0}, of[2] = {0}, lag[2] = {1, 64};
    for (int which = 0; which < 2; which++)
        for (int64_t t = 0; t + lag[which] < TOKENS; t++) {
            if (t / LENGTH != (t + lag[which]) / LENGTH)
                continue;
            of[which] += K;
            for (int a = 0; a < K; a++)
                for (int b = 0; b < K; b++)
                    same[which] += expert[t * K + a] == expert[(t + lag[which]) * K + b];
        }
    r.reuse = (double)same[0] / (double)of[0] / independent;
    r.far_reuse = (double)same[1] / (double)of[1] / independent;
    for (int64_t w = 0; w < TOKENS / WINDOW; w++) {
        memset(window, 0, sizeof window);
        for (int64_t i = 0; i < (int64_t)WINDOW * K; i++)
            window[expert[w * WINDOW * K + i]]++;
        for (int e = 0; e < E; e++) {
            sum[e] += window[e];
            square[e] += window[e] * window[e];
        }
    }
    double n = TOKENS / (double)WINDOW, expected = 0;
    for (int e = 0; e < E; e++) {
        squares += square[e] / n - sum[e] / n * (sum[e] / n);
        expected += WINDOW * share[e] * (1 - share[e]);
    }
    r.inflation = squares / expected;
    return r;
}

/* Ranges of what recorded traces show: CV over experts, reuse of the next token's experts over
 * independent draws, variance in windows of 64 tokens over independent draws. */
static void realistic_is_realistic(void **state) {
    (void)state;
    mz_synth_options o = shape("realistic");
    o.layers = LAYERS;
    o.experts = E;
    o.top_k = K;
    o.ranks = 1;
    o.tokens = TOKENS;
    o.sequence = LENGTH;
    for (o.seed = 1; o.seed <= 3; o.seed++) {
        mz_synth *synth = open_synth(&o);
        double low = 10, high = 0, reuse = 0, cv = 0;
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            call c = make_call(synth, &o, 4, 0, layer, 0);
            realism r = measure(c.expert);
            print_message("seed %d layer %d: CV %.2f, reuse %.2f, at 64 %.2f, windows %.1f\n",
                          (int)o.seed, layer, r.cv, r.reuse, r.far_reuse, r.inflation);
            assert_true(r.cv > 0.3 && r.cv < 1.6);
            assert_true(r.reuse > 1.3 && r.reuse < 2.6);
            assert_true(r.far_reuse > 1.0 && r.far_reuse < 1.7);
            assert_true(r.inflation > 3 && r.inflation < 13);
            low = fmin(low, r.cv);
            high = fmax(high, r.cv);
            reuse += r.reuse / LAYERS;
            cv += r.cv / LAYERS;
            free_call(&c);
        }
        assert_true(cv > 0.4 && cv < 1.2 && high > 1.4 * low);
        assert_true(reuse > 1.3 && reuse < 2.3);
        mz_synth_close(&synth);
    }
}

/* Popularity drifts slowly: close after one step, less so after a thousand. */
static void realistic_drifts(void **state) {
    int64_t a[64], b[64], c[64];
    (void)state;
    mz_synth_options o = shape("realistic");
    o.layers = 1;
    o.tokens = 8192;
    mz_synth *synth = open_synth(&o);
    add_layer(synth, &o, 0, 0, a);
    add_layer(synth, &o, 1, 0, b);
    add_layer(synth, &o, 2000, 0, c);
    double near_distance = 0, far_distance = 0, sum = 0;
    for (int e = 0; e < 64; e++) {
        near_distance += fabs((double)(a[e] - b[e])) / 2;
        far_distance += fabs((double)(a[e] - c[e])) / 2;
        sum += (double)a[e];
    }
    assert_true(near_distance / sum < 0.05);
    assert_true(far_distance > 3 * near_distance);
    mz_synth_close(&synth);
}

static void bad_options_are_named(void **state) {
    mz_err err;
    mz_synth *synth;
    (void)state;
    mz_synth_options o = shape("hot-rnk");
    assert_fails(mz_synth_open(&o, &synth, &err), MZ_EINPUT, "did you mean 'hot-rank'", &err);
    o = shape("balanced");
    o.top_k = 65;
    assert_fails(mz_synth_open(&o, &synth, &err), MZ_EINPUT, "--top-k: 65", &err);
    o = shape("balanced");
    o.experts = 0;
    assert_fails(mz_synth_open(&o, &synth, &err), MZ_EINPUT, "--experts: 0", &err);
    o = shape("balanced");
    o.tokens = INT64_MAX;
    assert_fails(mz_synth_open(&o, &synth, &err), MZ_EINPUT, "--tokens", &err);
    o = shape("balanced");
    o.steps = 0;
    assert_fails(mz_synth_open(&o, &synth, &err), MZ_EINPUT, "--steps", &err);
}

/* ---- files ----------------------------------------------------------------------------------- */

static void same_pairs(mz_trace *a, mz_trace *b) {
    static uint16_t expert[2][8192];
    static float weight[2][8192];
    const mz_trace_call *x, *y;
    mz_err err;
    int64_t count = mz_trace_calls(a, &x);
    assert_int_equal(mz_trace_calls(b, &y), count);
    for (int64_t i = 0; i < count; i++) {
        assert_true(x[i].step == y[i].step && x[i].micro_batch == y[i].micro_batch);
        assert_true(x[i].layer == y[i].layer && x[i].rank == y[i].rank);
        assert_true(x[i].token_begin == y[i].token_begin && x[i].tokens == y[i].tokens);
        assert_in_range(x[i].pairs, 1, 8192);
        mz_trace_pairs_out out[2] = {{.expert = expert[0], .weight = weight[0]},
                                     {.expert = expert[1], .weight = weight[1]}};
        assert_ok(mz_trace_read_pairs(a, i, 0, x[i].tokens, &out[0], &err), &err);
        assert_ok(mz_trace_read_pairs(b, i, 0, y[i].tokens, &out[1], &err), &err);
        assert_memory_equal(expert[0], expert[1], (size_t)x[i].pairs * sizeof expert[0][0]);
        assert_memory_equal(weight[0], weight[1], (size_t)x[i].pairs * sizeof weight[0][0]);
    }
}

/* The shipped example is what its README's command makes; another seed gives another trace. */
static void example_is_reproduced(void **state) {
    char directory[256], path[300];
    const mz_trace_sequence *sequences;
    mz_trace *shipped, *made;
    mz_err err;
    mz_app app = {.log = mz_log_make(NULL, -1), .version = "0"};
    mz_trace_write_options write = {.deflate = 1, .half_weights = true};
    mz_synth_options o = {.load = "realistic",
                          .name = "olmoe-1b-7b",
                          .layers = 16,
                          .experts = 64,
                          .top_k = 8,
                          .ranks = 8,
                          .tokens = 256,
                          .sequence = 128,
                          .steps = 6,
                          .micro_batches = 1,
                          .hidden = 2048,
                          .intermediate = 1024,
                          .seed = 20,
                          .kind = MZ_TRACE_PAIRS};
    (void)state;
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/made.h5", directory);
    assert_ok(mz_synth_write(&app, &o, path, &write, &err), &err);
    assert_ok(mz_trace_open(MZ_SOURCE_DIR "/traces/example/olmoe-8r.h5", &shipped, &err), &err);
    assert_ok(mz_trace_open(path, &made, &err), &err);
    same_pairs(shipped, made);
    mz_trace_facts a = *mz_trace_facts_of(shipped), b = *mz_trace_facts_of(made);
    assert_string_equal(a.name, b.name);
    assert_string_equal(a.source, b.source);
    assert_true(a.hidden == b.hidden && a.intermediate == b.intermediate);
    assert_true(a.sequence_length == 128 && a.weights_normalized && a.has_weight);
    assert_int_equal(mz_trace_sequences(shipped, &sequences), 96);
    mz_trace_close(&made);
    mz_trace_close(&shipped);
    remove_directory(directory);
}

/* Counts are the pairs counted; ranks without tokens are written as calls without pairs. */
static void kinds_agree(void **state) {
    char directory[256], path[2][300];
    mz_trace *trace[2];
    mz_err err;
    mz_app app = {.log = mz_log_make(NULL, -1), .version = "0"};
    (void)state;
    make_directory(directory, sizeof directory);
    mz_synth_options o = shape("empty");
    o.tokens = 100;
    o.steps = 2;
    for (int kind = 0; kind < 2; kind++) {
        snprintf(path[kind], sizeof path[kind], "%s/%d.h5", directory, kind);
        o.kind = kind ? MZ_TRACE_COUNTS : MZ_TRACE_PAIRS;
        assert_ok(mz_synth_write(&app, &o, path[kind], NULL, &err), &err);
        assert_ok(mz_trace_open(path[kind], &trace[kind], &err), &err);
    }
    const mz_trace_call *calls;
    int64_t count = mz_trace_calls(trace[0], &calls), none = 0;
    assert_int_equal(count, 2 * 2 * 3 * 8);
    for (int64_t i = 0; i < count; i++) {
        int64_t a[64] = {0}, b[64] = {0};
        assert_ok(mz_trace_add_counts(trace[0], i, a, &err), &err);
        assert_ok(mz_trace_add_counts(trace[1], i, b, &err), &err);
        assert_memory_equal(a, b, sizeof a);
        none += calls[i].tokens == 0;
    }
    assert_int_equal(none, count / 4);
    mz_trace_close(&trace[0]);
    mz_trace_close(&trace[1]);
    volatile sig_atomic_t stop = 1;
    app.stop = &stop;
    snprintf(path[0], sizeof path[0], "%s/stopped.h5", directory);
    assert_fails(mz_synth_write(&app, &o, path[0], NULL, &err), MZ_EABORTED, "interrupted", &err);
    assert_int_not_equal(access(path[0], F_OK), 0);
    remove_directory(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_token_is_valid),
        cmocka_unit_test(steps_are_independent),
        cmocka_unit_test(balanced_is_even),
        cmocka_unit_test(hot_loads_are_hot),
        cmocka_unit_test(moving_loads_move),
        cmocka_unit_test(sources_and_places_run_empty),
        cmocka_unit_test(realistic_is_realistic),
        cmocka_unit_test(realistic_drifts),
        cmocka_unit_test(bad_options_are_named),
        cmocka_unit_test(example_is_reproduced),
        cmocka_unit_test(kinds_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
