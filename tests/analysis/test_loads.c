/* Loads made for mizan memory: even, with a stated imbalance, in the shape of others. */
#include "tests/harness.h"

#include "analysis/loads.h"

static mz_layer_call first_call(mz_loads *loads, mz_step_head *head) {
    const mz_load_source source = mz_loads_source(loads);
    mz_layer_call call = {0};
    mz_err err;
    bool end = true;
    assert_ok(source.next_step(source.self, head, &end, &err), &err);
    assert_false(end);
    assert_ok(source.next_call(source.self, &call, &err), &err);
    return call;
}

static mz_loads *make(const mz_loads_options *options) {
    mz_loads *loads;
    mz_err err;
    assert_ok(mz_loads_create(options, &loads, &err), &err);
    return loads;
}

/* Pairs that go to experts [first, end). */
static int64_t pairs_of(const mz_load *load, int32_t first, int32_t end) {
    int64_t sum = 0;
    for (int32_t e = first; e < end; e++)
        sum += load->total[e];
    return sum;
}

/* 100 tokens with top-2 over 8 experts: 25 pairs from every source to every expert; as many calls
 * as layers and micro-batches, as many steps as asked for, and again from the start. */
static void test_even(void **state) {
    const mz_loads_options options = {.ranks = 4,
                                      .ep = 2,
                                      .experts = 8,
                                      .layers = 3,
                                      .top_k = 2,
                                      .steps = 2,
                                      .micro_batches = 2,
                                      .tokens = 100,
                                      .imbalance = 1};
    mz_loads *loads = make(&options);
    for (int pass = 0; pass < 2; pass++) {
        mz_load_source source = mz_loads_source(loads);
        mz_step_head head;
        mz_err err;
        bool end = false;
        for (int step = 0; step < 2; step++) {
            assert_ok(source.next_step(source.self, &head, &end, &err), &err);
            assert_false(end);
            assert_int_equal(head.step, step);
            assert_true(head.micro_batches == 2 && head.layers == 3 && !head.sequence_begin);
            for (int i = 0; i < 8; i++)
                assert_int_equal(head.tokens[i], 100);
            for (int i = 0; i < 6; i++) {
                mz_layer_call call;
                assert_ok(source.next_call(source.self, &call, &err), &err);
                assert_true(call.micro_batch == i / 3 && call.layer == i % 3 && !call.pairs);
                assert_int_equal(call.load->pairs, 4 * 200);
                for (int c = 0; c < 32; c++)
                    assert_int_equal(call.load->count[c], 25);
            }
        }
        assert_ok(source.next_step(source.self, &head, &end, &err), &err);
        assert_true(end);
    }
    mz_loads_free(&loads);
    assert_null(loads);
}

/* The first rank's rows over the mean are what was asked for, also where experts do not divide. */
static void test_imbalance(void **state) {
    const struct {
        int32_t ep, experts, top_k, first;
        double imbalance;
    } of[] = {{8, 64, 8, 8, 2},   {8, 64, 8, 8, 8}, {4, 60, 4, 15, 1.3},
              {8, 60, 4, 8, 1.5}, {16, 8, 2, 1, 3}, {2, 8, 2, 4, 1.01}};
    for (int i = 0; i < COUNT_OF(of); i++) {
        mz_step_head head;
        mz_loads *loads = make(&(mz_loads_options){.ranks = 2 * of[i].ep,
                                                   .ep = of[i].ep,
                                                   .experts = of[i].experts,
                                                   .layers = 1,
                                                   .top_k = of[i].top_k,
                                                   .steps = 1,
                                                   .micro_batches = 1,
                                                   .tokens = 100000,
                                                   .imbalance = of[i].imbalance});
        const mz_load *load = first_call(loads, &head).load;
        const double mean = (double)load->pairs / of[i].ep;
        const double got = (double)pairs_of(load, 0, of[i].first) / mean;
        assert_int_equal(load->pairs, (int64_t)2 * of[i].ep * 100000 * of[i].top_k);
        if (got < of[i].imbalance - 1e-3 || got > of[i].imbalance + 1e-3)
            fail_msg("case %d: %g instead of %g", i, got, of[i].imbalance);
        for (int32_t c = 0; c < load->sources * load->experts; c++)
            assert_true(load->count[c] <= 100000); /* a token chooses an expert once */
        mz_loads_free(&loads);
    }
}

static void test_impossible(void **state) {
    mz_loads_options options = {.ranks = 8,
                                .ep = 8,
                                .experts = 16,
                                .layers = 1,
                                .top_k = 4,
                                .steps = 1,
                                .micro_batches = 1};
    const double wrong[] = {0.5, 4.1, 9, -1};
    mz_loads *loads;
    mz_err err;
    for (int i = 0; i < COUNT_OF(wrong); i++) {
        options.imbalance = wrong[i];
        assert_fails(mz_loads_create(&options, &loads, &err), MZ_EINPUT, "between 1 and 4", &err);
        assert_null(loads);
    }
}

/* A shape of two sources: 10 tokens with 20 pairs, 15 to expert 0 and 5 to expert 2; none at all.
 */
typedef struct fixed {
    int64_t count[6], total[3], source[2], tokens[2];
    mz_load load;
} fixed;

static mz_code fixed_step(void *self, mz_step_head *head, bool *end, mz_err *err) {
    fixed *f = self;
    *end = false;
    *head = (mz_step_head){.step = 7, .micro_batches = 1, .layers = 1, .tokens = f->tokens};
    return MZ_OK;
}

static mz_code fixed_call(void *self, mz_layer_call *call, mz_err *err) {
    fixed *f = self;
    *call = (mz_layer_call){.load = &f->load};
    return MZ_OK;
}

static void test_shape(void **state) {
    fixed f = {.count = {15, 0, 5, 0, 0, 0}, .tokens = {10, 0}};
    f.load = (mz_load){
        .sources = 2, .experts = 3, .count = f.count, .total = f.total, .source = f.source};
    mz_load_sum(&f.load);
    const mz_load_source shape = {&f, 2, 3, 1, fixed_step, fixed_call};
    mz_loads_options options = {
        .ranks = 2, .ep = 2, .experts = 3, .layers = 1, .top_k = 2, .shape = &shape};
    mz_step_head head;
    /* as it comes */
    mz_loads *loads = make(&options);
    mz_layer_call call = first_call(loads, &head);
    assert_ptr_equal(call.load, &f.load);
    assert_ptr_equal(head.tokens, f.tokens);
    mz_loads_free(&loads);
    /* 33 tokens: 66 pairs, 49.5 and 16.5 by largest remainder; the idle source has them alike */
    options.tokens = 33;
    loads = make(&options);
    call = first_call(loads, &head);
    const int64_t want[] = {50, 0, 16, 50, 0, 16};
    assert_memory_equal(call.load->count, want, sizeof want);
    assert_int_equal(call.load->pairs, 132);
    assert_true(head.step == 7 && head.tokens[0] == 33 && head.tokens[1] == 33);
    mz_loads_free(&loads);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_even),
        cmocka_unit_test(test_imbalance),
        cmocka_unit_test(test_impossible),
        cmocka_unit_test(test_shape),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
