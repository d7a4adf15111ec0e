/* Rows, weights and dealt pairs of a replay: what they must be whatever makes them. */
#include "common/base/rng.h"
#include "replay/data.h"
#include "replay/deal.h"
#include "tests/harness.h"

#include <math.h>

static const mz_replay_job job = {.ranks = 2,
                                  .layers = 2,
                                  .experts = 4,
                                  .top_k = 2,
                                  .hidden = 64,
                                  .intermediate = 40,
                                  .type = MZ_BF16,
                                  .seed = 5};

static const int64_t token_begin[] = {10, 13, 15};
static float input_norm2[15], grad_norm2[15];

static mz_replay_call call_of(bool recorded) {
    for (int i = 0; i < 15; i++) {
        input_norm2[i] = (float)(i + 1);
        grad_norm2[i] = (float)(100 + i);
    }
    return (mz_replay_call){.step = 9,
                            .micro_batch = 1,
                            .layer = 1,
                            .pairs = {.sources = 2,
                                      .top_k = 2,
                                      .tokens = 5,
                                      .pairs = 10,
                                      .token_begin = token_begin,
                                      .input_norm2 = recorded ? input_norm2 : NULL,
                                      .grad_norm2 = recorded ? grad_norm2 : NULL}};
}

static void base_rows_have_norm_one(void **state) {
    mz_replay_job exact = job;
    exact.type = MZ_F32;
    float *base = calloc((size_t)(MZ_DATA_ROWS * job.hidden), sizeof *base);
    float *rounded = calloc((size_t)(MZ_DATA_ROWS * job.hidden), sizeof *rounded);
    mz_data_base(&exact, base);
    mz_data_base(&job, rounded);
    double across = 0;
    for (int64_t b = 0; b < MZ_DATA_ROWS; b++) {
        double norm2 = 0, dot = 0;
        for (int64_t j = 0; j < job.hidden; j++) {
            const float x = base[b * job.hidden + j];
            norm2 += (double)x * x;
            dot += (double)x * base[((b + 1) % MZ_DATA_ROWS) * job.hidden + j];
            /* bf16: 8 bits of mantissa, the rest cleared, nearest. */
            const float r = rounded[b * job.hidden + j];
            uint32_t bits;
            memcpy(&bits, &r, sizeof bits);
            assert_int_equal(bits & 0xffff, 0);
            assert_true(fabs(r - x) <= ldexp(fabs(x), -8));
        }
        assert_true(fabs(norm2 - 1) < 1e-5);
        across += dot / MZ_DATA_ROWS;
    }
    assert_true(fabs(across) < 0.02); /* independent directions: 1/sqrt(64 * 1024) */
    free(base);
    free(rounded);
}

static void rows_follow_recorded_norms(void **state) {
    const mz_replay_call call = call_of(true);
    for (int32_t r = 0; r < 2; r++)
        for (int64_t t = 0; t < token_begin[r + 1] - token_begin[r]; t++) {
            const int64_t at = token_begin[r] + t;
            assert_true(mz_data_of(&job, &call, MZ_DATA_INPUT, r, t).scale ==
                        sqrtf((float)(at + 1)));
            assert_true(mz_data_of(&job, &call, MZ_DATA_GRADIENT, r, t).scale ==
                        sqrtf((float)(100 + at)));
        }
    mz_replay_job narrow = job; /* recorded in a model four times as wide */
    narrow.norm_hidden = 4 * job.hidden;
    assert_true(mz_data_of(&narrow, &call, MZ_DATA_INPUT, 0, 0).scale == sqrtf(11 / 4.0f));
    const mz_replay_call bare = call_of(false);
    assert_true(mz_data_of(&job, &bare, MZ_DATA_INPUT, 0, 0).scale == 8);
    assert_true(fabsf(mz_data_of(&job, &bare, MZ_DATA_GRADIENT, 0, 0).scale - 0.08f) < 1e-6f);
}

/* Every coordinate matters, and nothing else: rows are spread evenly over the base. */
static void rows_are_functions_of_their_place(void **state) {
    mz_replay_call call = call_of(false), other = call;
    enum { N = 400 };
    int same[6] = {0};
    for (int64_t t = 0; t < N; t++) {
        const int64_t base = mz_data_of(&job, &call, MZ_DATA_INPUT, 0, t).base;
        assert_true(base >= 0 && base < MZ_DATA_ROWS);
        assert_int_equal(mz_data_of(&job, &call, MZ_DATA_INPUT, 0, t).base, base);
        mz_replay_job seeded = job;
        seeded.seed++;
        same[0] += mz_data_of(&seeded, &call, MZ_DATA_INPUT, 0, t).base == base;
        same[1] += mz_data_of(&job, &call, MZ_DATA_GRADIENT, 0, t).base == base;
        same[2] += mz_data_of(&job, &call, MZ_DATA_INPUT, 1, t).base == base;
        other.step++;
        same[3] += mz_data_of(&job, &other, MZ_DATA_INPUT, 0, t).base == base;
        other = call;
        other.micro_batch++;
        same[4] += mz_data_of(&job, &other, MZ_DATA_INPUT, 0, t).base == base;
        other = call;
        other.layer = 0;
        same[5] += mz_data_of(&job, &other, MZ_DATA_INPUT, 0, t).base == base;
        other = call;
    }
    for (int i = 0; i < COUNT_OF(same); i++)
        assert_true(same[i] < 10); /* 0.4 expected */
}

static void weights_have_their_variance(void **state) {
    const int64_t H = job.hidden, I = job.intermediate, up = 2 * H * I, down = H * I;
    float *value = calloc((size_t)up, sizeof *value), *again = calloc((size_t)up, sizeof *again);
    for (int which = 0; which < 2; which++) {
        const int64_t n = which == 0 ? up : down;
        const double variance = 1.0 / (double)(which == 0 ? H : I);
        double sum = 0, sum2 = 0, most = 0;
        mz_data_weights(&job, 1, 2, (mz_data_matrix)which, value);
        for (int64_t i = 0; i < n; i++) {
            sum += value[i];
            sum2 += (double)value[i] * value[i];
            most = fmax(most, fabs(value[i]));
        }
        assert_true(fabs(sum / (double)n) < 5 * sqrt(variance / (double)n));
        assert_true(fabs(sum2 / (double)n / variance - 1) < 0.05);
        assert_true(most <= sqrt(3 * variance) * (1 + 1.0 / 256) &&
                    most > 0.98 * sqrt(3 * variance));
        mz_data_weights(&job, 1, 2, (mz_data_matrix)which, again);
        assert_memory_equal(value, again, sizeof *value * (size_t)n);
        int64_t same = 0;
        mz_data_weights(&job, 1, 3, (mz_data_matrix)which, again);
        for (int64_t i = 0; i < n; i++)
            same += value[i] == again[i];
        assert_true(same < n / 50);
    }
    free(value);
    free(again);
}

static void gate_weights(void **state) {
    mz_replay_call call = call_of(false);
    const float weight[] = {0.5f, 0.25f};
    assert_true(mz_data_weight(&job, &call, 1) == 0.5f);
    call.pairs.top_k = 0;
    call.pairs.pairs = 15;
    assert_true(mz_data_weight(&job, &call, 1) == (float)(5 / 15.0));
    call.pairs.weight = weight;
    assert_true(mz_data_weight(&job, &call, 1) == 0.25f);
}

/* ---- dealt pairs --------------------------------------------------------------------------------
 */

static mz_load load_of(int64_t *count, int64_t *total, int64_t *source, int32_t S, int32_t E) {
    mz_load load = {.sources = S, .experts = E, .count = count, .total = total, .source = source};
    mz_load_sum(&load);
    return load;
}

/* The rule, read off the header: pair i of the source to token i mod T. */
static void dealt_by_the_rule(void **state) {
    enum { S = 3, E = 5, K = 2 };
    int64_t count[S * E] = {3, 0, 2, 1, 1, 0, 0, 0, 0, 0, 2, 2, 2, 2, 0};
    int64_t total[E], source[S];
    const mz_load load = load_of(count, total, source, S, E);
    mz_dealt dealt = {0};
    mz_pairs pairs;
    mz_err err;
    assert_ok(mz_deal_pairs(&dealt, &load, K, &pairs, &err), &err);
    assert_int_equal(pairs.top_k, 0); /* seven pairs: one token has one */
    assert_int_equal(pairs.tokens, 4 + 0 + 4);
    assert_int_equal(pairs.pairs, 7 + 0 + 8);
    /* Source 0: pairs 0 0 0 2 2 3 4, T = 4: tokens {0, 2}, {0, 3}, {0, 4}, {2}. */
    const uint16_t want[] = {0, 2, 0, 3, 0, 4, 2, 0, 2, 0, 2, 1, 3, 1, 3};
    const uint16_t many[] = {2, 2, 2, 1, 2, 2, 2, 2};
    assert_memory_equal(pairs.expert, want, sizeof want);
    assert_memory_equal(pairs.token_pairs, many, sizeof many);
    const int64_t tokens[] = {0, 4, 4, 8}, begins[] = {0, 7, 7, 15};
    assert_memory_equal(pairs.token_begin, tokens, sizeof tokens);
    assert_memory_equal(pairs.pair_begin, begins, sizeof begins);
    mz_dealt_free(&dealt);
}

static void dealt_at_random(void **state) {
    enum { S = 4, E = 12 };
    mz_dealt dealt = {0};
    mz_err err;
    for (uint64_t seed = 0; seed < 200; seed++) {
        mz_rng rng = mz_rng_make(seed, 0);
        int64_t count[S * E], total[E], source[S];
        for (int i = 0; i < S * E; i++)
            count[i] = (int64_t)mz_rng_below(&rng, seed % 3 == 0 ? 3 : 40);
        const mz_load load = load_of(count, total, source, S, E);
        const int32_t k = 1 + (int32_t)mz_rng_below(&rng, 4);
        mz_pairs pairs;
        assert_ok(mz_deal_pairs(&dealt, &load, k, &pairs, &err), &err);
        assert_int_equal(pairs.pairs, load.pairs);
        int64_t pair = 0;
        for (int32_t s = 0; s < S; s++) {
            int64_t seen[E] = {0}, most = 0;
            const int64_t tokens = pairs.token_begin[s + 1] - pairs.token_begin[s];
            assert_int_equal(tokens, (source[s] + k - 1) / k);
            assert_int_equal(pairs.pair_begin[s], pair);
            for (int e = 0; e < E; e++)
                most = count[s * E + e] > most ? count[s * E + e] : most;
            for (int64_t t = pairs.token_begin[s]; t < pairs.token_begin[s + 1]; t++) {
                const int64_t n = pairs.top_k > 0 ? pairs.top_k : pairs.token_pairs[t];
                assert_true(n == k || n == k - 1);
                for (int64_t j = pair; j < pair + n; j++) {
                    seen[pairs.expert[j]]++;
                    for (int64_t i = pair; i < j && most <= tokens; i++)
                        assert_int_not_equal(pairs.expert[i], pairs.expert[j]);
                }
                pair += n;
            }
            assert_memory_equal(seen, count + s * E, sizeof seen);
        }
        assert_int_equal(pair, load.pairs);
    }
    mz_dealt_free(&dealt);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(base_rows_have_norm_one),
        cmocka_unit_test(rows_follow_recorded_norms),
        cmocka_unit_test(rows_are_functions_of_their_place),
        cmocka_unit_test(weights_have_their_variance),
        cmocka_unit_test(gate_weights),
        cmocka_unit_test(dealt_by_the_rule),
        cmocka_unit_test(dealt_at_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
