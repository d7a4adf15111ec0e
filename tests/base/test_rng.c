#include "tests/harness.h"

#include "common/base/rng.h"

#include <math.h>

/* Known answers of Random123's kat_vectors for philox4x32-10. */
static void known_answers(void **state) {
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < COUNT_OF(vectors); i++) {
        uint32_t out[4];
        mz_philox(vectors[i].counter, vectors[i].key, out);
        assert_memory_equal(out, vectors[i].out, sizeof out);
    }
}

static void a_stream_is_a_pure_function(void **state) {
    /* The third vector through the stream interface: index, stream and seed make counter and key.
     */
    mz_rng rng = mz_rng_make(0x299f31d0a4093822u, 0x0370734413198a2eu);
    rng.index = 0x85a308d3243f6a88u;
    assert_int_equal(mz_rng_u32(&rng), 0xd16cfe09);
    assert_int_equal(mz_rng_u64(&rng), 0x94fdcceb5001e420u);
    assert_int_equal(mz_rng_u32(&rng), 0x24126ea1);
    assert_int_equal(rng.index, 0x85a308d3243f6a89u);
    mz_rng a = mz_rng_make(1, 2), b = mz_rng_make(1, 2), other = mz_rng_make(1, 3);
    int same = 0;
    for (int i = 0; i < 1000; i++) {
        uint64_t x = mz_rng_u64(&a);
        assert_int_equal(x, mz_rng_u64(&b));
        same += x == mz_rng_u64(&other);
    }
    assert_int_equal(same, 0);
}

static void streams_of_neighbours_differ(void **state) {
    uint64_t seen[4 * 256];
    int n = 0;
    for (uint64_t i = 0; i < 256; i++) {
        seen[n++] = mz_rng_stream(i, 0, 0, 1000);
        seen[n++] = mz_rng_stream(0, i, 1000, 0);
        seen[n++] = mz_rng_stream(1000, 0, i, 0);
        seen[n++] = mz_rng_stream(0, 1000, 0, i);
    }
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            assert_int_not_equal(seen[i], seen[k]);
}

/* Bounds are five standard deviations of the statistic under the distribution it should have. */
static void uniform_and_normal_moments(void **state) {
    enum { N = 100000 };
    mz_rng rng = mz_rng_make(42, 7);
    double sum = 0, square = 0, normal = 0, normal_square = 0, fourth = 0;
    for (int i = 0; i < N; i++) {
        double u = mz_rng_uniform(&rng);
        assert_true(u >= 0 && u < 1);
        sum += u;
        square += u * u;
        double z = mz_rng_normal(&rng);
        assert_true(isfinite(z));
        normal += z;
        normal_square += z * z;
        fourth += z * z * z * z;
    }
    assert_true(fabs(sum / N - 0.5) < 5 * sqrt(1.0 / 12 / N));
    assert_true(fabs(square / N - 1.0 / 3) < 5 * sqrt(4.0 / 45 / N));
    assert_true(fabs(normal / N) < 5 / sqrt(N));
    assert_true(fabs(normal_square / N - 1) < 5 * sqrt(2.0 / N));
    assert_true(fabs(fourth / N - 3) < 5 * sqrt(96.0 / N));
}

static void below_is_in_range_and_even(void **state) {
    enum { N = 70000, K = 7 };
    mz_rng rng = mz_rng_make(3, 3);
    int seen[K] = {0};
    for (int i = 0; i < N; i++) {
        uint64_t x = mz_rng_below(&rng, K);
        assert_true(x < K);
        seen[x]++;
    }
    double chi2 = 0;
    for (int k = 0; k < K; k++)
        chi2 += (seen[k] - N / (double)K) * (seen[k] - N / (double)K) / (N / (double)K);
    assert_true(chi2 < 22.46); /* 99.9 % of chi-squared with 6 degrees of freedom */
    assert_int_equal(mz_rng_below(&rng, 1), 0);
    for (int i = 0; i < 100; i++)
        assert_true(mz_rng_below(&rng, UINT64_MAX) < UINT64_MAX);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(a_stream_is_a_pure_function),
        cmocka_unit_test(streams_of_neighbours_differ),
        cmocka_unit_test(uniform_and_normal_moments),
        cmocka_unit_test(below_is_in_range_and_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
