/* A step in host memory is what the trace said of it, however the source reuses its own memory. */
#include "replay/steps.h"

#include "common/base/rng.h"
#include "tests/harness.h"

enum { RANKS = 3, EXPERTS = 5, MOST = 40, MICRO_BATCHES = 2, LAYERS = 3 };
enum { CALLS = MICRO_BATCHES * LAYERS, TOKENS_MAX = RANKS * MOST, PAIRS_MAX = 4 * TOKENS_MAX };

/* One call as a trace has it. */
typedef struct written {
    int64_t count[RANKS * EXPERTS], total[EXPERTS], source[RANKS];
    int64_t token_begin[RANKS + 1], pair_begin[RANKS + 1];
    uint16_t token_pairs[TOKENS_MAX], expert[PAIRS_MAX];
    float weight[PAIRS_MAX], grad_norm2[TOKENS_MAX], input_norm2[TOKENS_MAX];
    float hidden_norm2[PAIRS_MAX];
    mz_load load;
    mz_pairs pairs;
} written;

/* k: pairs of a token, 0: any number up to 3; has: which arrays are there. */
static void write_call(written *w, int32_t k, unsigned has, uint64_t seed) {
    mz_rng rng = mz_rng_make(seed, 3);
    memset(w, 0, sizeof *w);
    mz_pairs *p = &w->pairs;
    for (int32_t s = 0; s < RANKS; s++) {
        const int64_t tokens = (int64_t)mz_rng_below(&rng, MOST);
        for (int64_t t = 0; t < tokens; t++, p->tokens++) {
            const int32_t n = k ? k : (int32_t)mz_rng_below(&rng, 4);
            w->token_pairs[p->tokens] = (uint16_t)n;
            w->grad_norm2[p->tokens] = (float)mz_rng_below(&rng, 100);
            w->input_norm2[p->tokens] = (float)mz_rng_below(&rng, 100);
            for (int32_t i = 0; i < n; i++, p->pairs++) {
                const uint16_t e = (uint16_t)mz_rng_below(&rng, EXPERTS);
                w->expert[p->pairs] = e;
                w->weight[p->pairs] = (float)mz_rng_below(&rng, 100);
                w->hidden_norm2[p->pairs] = (float)mz_rng_below(&rng, 100);
                w->count[s * EXPERTS + e]++;
            }
        }
        w->token_begin[s + 1] = p->tokens;
        w->pair_begin[s + 1] = p->pairs;
    }
    p->sources = RANKS;
    p->top_k = k;
    p->token_begin = w->token_begin;
    p->pair_begin = w->pair_begin;
    p->token_pairs = k ? NULL : w->token_pairs;
    p->expert = w->expert;
    p->weight = has & 1u ? w->weight : NULL;
    p->grad_norm2 = has & 2u ? w->grad_norm2 : NULL;
    p->input_norm2 = has & 4u ? w->input_norm2 : NULL;
    p->hidden_norm2 = has & 8u ? w->hidden_norm2 : NULL;
    w->load = (mz_load){RANKS, EXPERTS, w->count, w->total, w->source, 0};
    mz_load_sum(&w->load);
}

/* A source of steps 10, 17, 24, ...; all calls are told from one place. */
typedef struct teller {
    int32_t k;
    int64_t steps, step, call; /* how many there are, told so far, of this step */
    int64_t bare, fails; /* numbers of calls: without pairs, failing; -1: none. -2: all bare */
    bool no_step;        /* next_step fails */
    bool failed;         /* nothing is asked after that */
    int64_t tokens[MICRO_BATCHES * RANKS];
    written now;
} teller;

static uint64_t seed_of(int64_t step, int64_t call) {
    return (uint64_t)(step * 100 + call);
}

static mz_code next_step(void *self, mz_step_head *head, bool *end, mz_err *err) {
    teller *t = self;
    assert_false(t->failed);
    t->failed = t->no_step;
    *head = (mz_step_head){.micro_batches = 1, .layers = 1, .tokens = t->tokens};
    *end = false;
    if (t->no_step)
        return mz_fail(err, MZ_EINPUT, "a broken head");
    *end = t->step == t->steps;
    if (*end)
        return MZ_OK;
    for (int i = 0; i < COUNT_OF(t->tokens); i++)
        t->tokens[i] = 1000 * (t->step + 1) + (1 << i);
    t->call = 0;
    *head = (mz_step_head){.step = 10 + 7 * t->step++,
                           .micro_batches = MICRO_BATCHES,
                           .layers = LAYERS,
                           .tokens = t->tokens};
    return MZ_OK;
}

static mz_code next_call(void *self, mz_layer_call *call, mz_err *err) {
    teller *t = self;
    memset(t->tokens, 0x5a, sizeof t->tokens); /* the head is gone */
    assert_false(t->failed);
    t->failed = t->call == t->fails;
    if (t->failed)
        return mz_fail(err, MZ_EINPUT, "a broken call");
    assert_true(t->call < CALLS);
    write_call(&t->now, t->k, (unsigned)t->call * 3, seed_of(t->step, t->call));
    *call = (mz_layer_call){(int32_t)(t->call / LAYERS), (int32_t)(t->call % LAYERS), &t->now.load,
                            t->bare == -2 || t->call == t->bare ? NULL : &t->now.pairs};
    t->call++;
    return MZ_OK;
}

static mz_load_source source_of(teller *t) {
    return (mz_load_source){t, RANKS, EXPERTS, LAYERS, next_step, next_call};
}

#define SAME(field, n)                                                                             \
    do {                                                                                           \
        assert_true(!got->field == !want->field);                                                  \
        if (want->field) {                                                                         \
            assert_ptr_not_equal(got->field, want->field);                                         \
            assert_memory_equal(got->field, want->field, (size_t)(n) * sizeof *want->field);       \
        }                                                                                          \
    } while (0)

static void same_load(const mz_load *got, const mz_load *want) {
    assert_int_equal(got->sources, want->sources);
    assert_int_equal(got->experts, want->experts);
    assert_int_equal(got->pairs, want->pairs);
    SAME(count, RANKS * EXPERTS);
    SAME(total, EXPERTS);
    SAME(source, RANKS);
}

static void same_pairs(const mz_pairs *got, const mz_pairs *want) {
    assert_int_equal(got->sources, want->sources);
    assert_int_equal(got->top_k, want->top_k);
    assert_int_equal(got->tokens, want->tokens);
    assert_int_equal(got->pairs, want->pairs);
    SAME(token_begin, RANKS + 1);
    SAME(pair_begin, RANKS + 1);
    SAME(token_pairs, want->tokens);
    SAME(expert, want->pairs);
    SAME(weight, want->pairs);
    SAME(grad_norm2, want->tokens);
    SAME(input_norm2, want->tokens);
    SAME(hidden_norm2, want->pairs);
}

/* Dealt pairs know no weights and norms, and count as the load does; tokens have k or one fewer. */
static void dealt_from(const mz_pairs *got, const mz_load *load, int32_t k) {
    assert_true(!got->weight && !got->grad_norm2 && !got->input_norm2 && !got->hidden_norm2);
    assert_int_equal(got->pairs, load->pairs);
    int64_t pair = 0;
    for (int32_t s = 0; s < RANKS; s++) {
        int64_t count[EXPERTS] = {0};
        assert_int_equal(got->token_begin[s + 1] - got->token_begin[s],
                         (load->source[s] + k - 1) / k);
        for (int64_t t = got->token_begin[s]; t < got->token_begin[s + 1]; t++) {
            const int32_t n = got->top_k ? got->top_k : got->token_pairs[t];
            assert_true(n == k || n == k - 1);
            for (int32_t i = 0; i < n; i++)
                count[got->expert[pair++]]++;
        }
        assert_int_equal(got->pair_begin[s + 1], pair);
        assert_memory_equal(count, load->count + s * EXPERTS, sizeof count);
    }
}

/* Holds a step against what the source wrote of it, long after. */
static void check_step(const mz_replay_step *step, const teller *t, int64_t n, int32_t deal_k) {
    assert_int_equal(step->step, 10 + 7 * (n - 1));
    assert_int_equal(step->micro_batches, MICRO_BATCHES);
    assert_int_equal(step->layers, LAYERS);
    assert_int_equal(step->tokens,
                     MICRO_BATCHES * RANKS * 1000 * n + (1 << MICRO_BATCHES * RANKS) - 1);
    assert_int_equal(step->dealt, t->bare != -1);
    written *want = malloc(sizeof *want);
    for (int64_t c = 0; c < CALLS; c++) {
        const mz_replay_call *call = &step->call[c];
        write_call(want, t->k, (unsigned)c * 3, seed_of(n, c));
        assert_int_equal(call->step, step->step);
        assert_int_equal(call->micro_batch, c / LAYERS);
        assert_int_equal(call->layer, c % LAYERS);
        same_load(&call->load, &want->load);
        if (t->bare == -2 || c == t->bare)
            dealt_from(&call->pairs, &want->load, deal_k);
        else
            same_pairs(&call->pairs, &want->pairs);
    }
    free(want);
}

static void steps_are_as_told(void **state) {
    static const struct {
        int32_t k, deal_k;
        int64_t bare;
    } cases[] = {{2, 2, -1}, {0, 1, -1}, {2, 2, -2}, {3, 3, 4}, {0, 2, 0}, {0, 1, -2}, {1, 4, 5}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        mz_err err = {0};
        mz_replay_steps *steps = NULL;
        teller *t = calloc(1, sizeof *t);
        t->k = cases[i].k;
        t->steps = 3;
        t->bare = cases[i].bare;
        t->fails = -1;
        const mz_load_source source = source_of(t);
        assert_ok(mz_replay_steps_create(cases[i].deal_k, &steps, &err), &err);
        for (int64_t n = 1; n <= 3; n++) {
            mz_replay_step step;
            bool end = true;
            assert_ok(mz_replay_steps_next(steps, &source, &step, &end, &err), &err);
            assert_false(end);
            memset(&t->now, 0x5a, sizeof t->now);
            check_step(&step, t, n, cases[i].deal_k);
        }
        for (int twice = 0; twice < 2; twice++) {
            mz_replay_step step;
            bool end = false;
            assert_ok(mz_replay_steps_next(steps, &source, &step, &end, &err), &err);
            assert_true(end && !step.call && step.tokens == 0);
        }
        mz_replay_steps_free(&steps);
        assert_null(steps);
        free(t);
    }
}

/* What the source says is passed on, wherever it fails; a source that starts again is read. */
static void failures_pass(void **state) {
    mz_err err = {0};
    mz_replay_steps *steps = NULL;
    mz_replay_step step;
    bool end = false;
    teller *t = calloc(1, sizeof *t);
    const mz_load_source source = source_of(t);
    assert_ok(mz_replay_steps_create(2, &steps, &err), &err);
    for (int64_t c = 0; c < CALLS; c++) {
        *t = (teller){.k = 2, .steps = 1, .bare = 1, .fails = c};
        assert_fails(mz_replay_steps_next(steps, &source, &step, &end, &err), MZ_EINPUT,
                     "a broken call", &err);
        assert_int_equal(t->call, c);
    }
    *t = (teller){.no_step = true};
    assert_fails(mz_replay_steps_next(steps, &source, &step, &end, &err), MZ_EINPUT,
                 "a broken head", &err);
    *t = (teller){.k = 2, .steps = 1, .bare = 1, .fails = -1};
    assert_ok(mz_replay_steps_next(steps, &source, &step, &end, &err), &err);
    check_step(&step, t, 1, 2);
    mz_replay_steps_free(&steps);
    mz_replay_steps_free(&steps); /* of none */
    free(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_as_told),
        cmocka_unit_test(failures_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
