/* Verification of kept pairs: right selections pass and are counted where their scores were
 * compared; pairs that were kept in others' place are found and named, in cells of few and of many
 * pairs. (A cell: the pairs of one rank with one expert.) */
#include "replay/inside.h"
#include "replay/verify.h"
#include "tests/harness.h"
#include "tests/replay/scene.h"

#include <math.h>

/* An engine and its verification, with something between them that can change what the engine says
 * of one rank. */
typedef struct bench {
    scene s;
    machine m;
    mz_verify *verify;
    mz_engine_watch watch; /* verification's */
    void *watcher;
    int32_t rank;
    uint8_t *keep[SCENE_LAYERS]; /* [pairs of the rank] what is said to be kept; NULL: the truth */
    const int64_t *dropped;      /* what the plan is said to drop, or NULL */
    float drawn;                 /* factor of what is said of a sample's weights; 0: the truth */
    float *said;                 /* [pairs of the rank] */
} bench;

static mz_code tell(void *self, const mz_engine_seen *seen, mz_err *err) {
    bench *b = self;
    scene_watcher truth = {&b->s, b->m.kernels};
    assert_int_equal(scene_watch(&truth, seen, err), MZ_OK);
    mz_engine_seen told = *seen;
    mz_plan plan = *seen->plan;
    if (seen->dx && seen->rank == b->rank && b->keep[seen->call->layer])
        told.keep = b->keep[seen->call->layer];
    if (seen->dx && b->dropped) {
        plan.has_drops = true;
        memcpy(plan.dropped, b->dropped,
               sizeof *plan.dropped * (size_t)(plan.ranks * plan.experts));
        told.plan = &plan;
    }
    if (seen->drawn && seen->rank == b->rank && b->drawn > 0) {
        const int64_t n = b->s.pair_begin[b->rank + 1] - b->s.pair_begin[b->rank];
        b->said = realloc(b->said, sizeof(float) * (size_t)(n + 1));
        for (int64_t i = 0; i < n; i++)
            b->said[i] = b->drawn * seen->drawn[i];
        told.drawn = b->said;
    }
    return b->watch(b->watcher, &told, err);
}

/* rank: that with the most pairs. The optimizer is one whose update is not looked at: steps are
 * repeated from the same weights, without one. */
static void bench_open(bench *b, const scene_options *o, uint64_t seed) {
    *b = (bench){.rank = 0};
    scene_open(&b->s, o, seed);
    assert_ok(mz_optimizer_parse("skewadam", &b->s.optimizer, &b->m.err), &b->m.err);
    machine_open(&b->m, &b->s, 1);
    machine_engine(&b->m, &b->s);
    const mz_verify_options options = mz_verify_defaults();
    assert_ok(
        mz_verify_create(&b->s.job, b->m.engine, b->m.transport, &options, &b->verify, &b->m.err),
        &b->m.err);
    b->watch = b->m.engine->watch;
    b->watcher = b->m.engine->watcher;
    mz_engine_set_watch(b->m.engine, tell, b);
    const int64_t *begin = b->s.pair_begin;
    for (int32_t r = 1; r < o->ranks; r++)
        if (begin[r + 1] - begin[r] > begin[b->rank + 1] - begin[b->rank])
            b->rank = r;
}

static void bench_close(bench *b) {
    for (int32_t l = 0; l < SCENE_LAYERS; l++)
        free(b->keep[l]);
    free(b->said);
    mz_verify_free(&b->verify);
    machine_close(&b->m);
    scene_close(&b->s);
}

/* The same step again and again, verified. */
static mz_code bench_step(bench *b) {
    mz_err *err = &b->m.err;
    scene *s = &b->s;
    mz_code code = mz_engine_begin_step(b->m.engine, 0, err);
    if (code == MZ_OK)
        code = mz_verify_begin_step(b->verify, 0, 1, err);
    for (int32_t l = 0; code == MZ_OK && l < SCENE_LAYERS; l++)
        code = mz_engine_forward(b->m.engine, &s->at[l].call, s->at[l].plan, err);
    for (int32_t l = SCENE_LAYERS - 1; code == MZ_OK && l >= 0; l--)
        code = mz_engine_backward(b->m.engine, &s->at[l].call, s->at[l].plan, true, err);
    const mz_replay_call calls[SCENE_LAYERS] = {s->at[0].call, s->at[1].call};
    return code == MZ_OK ? mz_verify_end_step(b->verify, calls, err) : code;
}

/* One pair per token, all with one expert: one cell on every rank, of up to `tokens` pairs. */
static scene_options one_cell(const char *policy, int64_t tokens) {
    scene_options o = scene_usual(policy, MZ_F32);
    o.k = 1;
    o.one_expert = 5;
    o.tokens = tokens;
    return o;
}

/* ---- cells --------------------------------------------------------------------------------------
 */

static int64_t kept_of(const bench *b, int32_t l, int32_t rank, int32_t e) {
    return b->s.at[l].plan->kept[(int64_t)rank * b->s.o.experts + e];
}

static bool in_part(const bench *b, int32_t l, int32_t rank, int32_t e) {
    const int64_t all = b->s.load[l]->count[(int64_t)rank * b->s.o.experts + e];
    const int64_t kept = kept_of(b, l, rank, e);
    return kept > 0 && kept < all;
}

/* Ranks with a cell that is kept in part. */
static int64_t ranks_in_part(const bench *b, int32_t l) {
    int64_t ranks = 0;
    for (int32_t r = 0; r < b->s.o.ranks; r++) {
        bool any = false;
        for (int32_t e = 0; e < b->s.o.experts; e++)
            any = any || in_part(b, l, r, e);
        ranks += any;
    }
    return ranks;
}

/* One selection per rank, in one of the layers. */
static void check_selections(const bench *b) {
    const int64_t n = mz_verify_figures(b->verify).selections;
    assert_true(n > 0 && (n == ranks_in_part(b, 0) || n == ranks_in_part(b, 1)));
}

/* Of the cell's pairs that are (not) marked the one of highest or lowest reference score; of equal
 * ones the first or the last. -1: none. Pairs count from the rank's first. */
static int64_t extreme(const bench *b, int32_t l, int32_t e, const uint8_t *mark, bool marked,
                       bool highest) {
    const int64_t first = b->s.pair_begin[b->rank], end = b->s.pair_begin[b->rank + 1];
    const double *score = b->s.at[l].score;
    int64_t found = -1;
    for (int64_t p = first; p < end; p++) {
        if (b->s.expert[l][p] != e || (mark[p - first] != 0) != marked)
            continue;
        if (found < 0 || (highest ? score[p] > score[found] : score[p] <= score[found]))
            found = p;
    }
    return found < 0 ? -1 : found - first;
}

/* Tells the truth until something else is said. */
static uint8_t *copy_kept(bench *b, int32_t l) {
    const int64_t first = b->s.pair_begin[b->rank];
    const size_t n = (size_t)(b->s.pair_begin[b->rank + 1] - first);
    b->keep[l] = calloc(n + 1, 1);
    memcpy(b->keep[l], b->s.at[l].kept + first, n);
    return b->keep[l];
}

/* In all cells of the rank the best pair goes out, the worst that was out comes in. */
static void swap_extremes(bench *b) {
    for (int32_t l = 0; l < SCENE_LAYERS; l++) {
        scene_reference(&b->s, l);
        uint8_t *keep = copy_kept(b, l);
        for (int32_t e = 0; e < b->s.o.experts; e++) {
            if (!in_part(b, l, b->rank, e))
                continue;
            const int64_t out = extreme(b, l, e, keep, true, true);
            const int64_t in = extreme(b, l, e, keep, false, false);
            keep[out] = 0;
            keep[in] = 1;
        }
    }
}

/* ---- cases --------------------------------------------------------------------------------------
 */

static void right_selections_pass(void **state) {
    static const char *const score[] = {"down", "up", "w", "wh", "g", "h", "random", "sample"};
    for (int i = 0; i < COUNT_OF(score); i++)
        for (int type = MZ_F32; type <= MZ_BF16; type++)
            for (int tokens = 40; tokens <= 400; tokens += 360) {
                bench b;
                char text[96];
                snprintf(text, sizeof text, "lrmoe[keep=0.4,score=%s]", score[i]);
                scene_options o = tokens > 40 ? one_cell(text, tokens) : scene_usual(text, MZ_F32);
                o.type = type;
                bench_open(&b, &o, (uint64_t)(400 + i));
                assert_ok(bench_step(&b), &b.m.err);
                const mz_verified v = mz_verify_figures(b.verify);
                assert_true(v.largest <= 1 && v.values > 0);
                if (i != 6)
                    check_selections(&b);
                else
                    assert_int_equal(v.selections, 0); /* random */
                bench_close(&b);
            }
}

/* Where everything stays or nothing was left to compare with, nothing is counted. */
static void what_is_not_compared_is_not_counted(void **state) {
    static const char *const policy[] = {"static", "lrmoe[keep=1]", "lrmoe[keep=0.000001,q_min=0]",
                                         "capacity[cf=0.8]", "lrmoe[keep=0.5]"};
    for (int i = 0; i < COUNT_OF(policy); i++) {
        bench b;
        int64_t dropped[64];
        const scene_options o = one_cell(policy[i], 400);
        for (int j = 0; j < COUNT_OF(dropped); j++)
            dropped[j] = 1;
        bench_open(&b, &o, 420);
        b.dropped = i == 4 ? dropped : NULL;
        assert_ok(bench_step(&b), &b.m.err);
        assert_int_equal(mz_verify_figures(b.verify).selections, 0);
        bench_close(&b);
    }
}

/* What is said of two tokens of expert 5 of the rank. */
static void check_message(const bench *b, int32_t l) {
    const char *at = strstr(b->m.err.msg, "of expert 5, token ");
    const scene_call *c = &b->s.at[l];
    const int64_t first = b->s.pair_begin[b->rank];
    long long left, kept;
    double left_score, kept_score, error;
    char where[64];
    snprintf(where, sizeof where, "layer %d, rank %d: ", l, b->rank);
    assert_non_null(strstr(b->m.err.msg, where));
    assert_non_null(at);
    assert_int_equal(sscanf(at,
                            "of expert 5, token %lld with a score of %lf is left out, and token "
                            "%lld with %lf is kept (%lf times",
                            &left, &left_score, &kept, &kept_score, &error),
                     5);
    assert_int_equal(b->keep[l][left], 0);
    assert_int_equal(b->keep[l][kept], 1);
    assert_true(fabs(left_score / c->score[first + left] - 1) < 1e-4);
    assert_true(fabs(kept_score / c->score[first + kept] - 1) < 1e-4);
    assert_true(left_score > kept_score);
    assert_true(fabs(error / ((left_score / kept_score - 1) * 16384) - 1) < 1e-2);
    /* the side that is compared as a whole has the worst */
    const int64_t all = b->s.pair_begin[b->rank + 1] - first, quota = kept_of(b, l, b->rank, 5);
    if (all - quota < quota)
        assert_int_equal(left, extreme(b, l, 5, b->keep[l], false, true));
    else
        assert_int_equal(kept, extreme(b, l, 5, b->keep[l], true, false));
}

/* A step passes; with pairs swapped it does not. The bench stays open. */
static void swap_is_found(bench *b, const scene_options *o, uint64_t seed, const char *said) {
    bench_open(b, o, seed);
    assert_ok(bench_step(b), &b->m.err);
    check_selections(b);
    swap_extremes(b);
    assert_fails(bench_step(b), MZ_ECHECK, said, &b->m.err);
}

static void swapped_pairs_are_found_among_many(void **state) {
    static const char *const policy[] = {"lrmoe[keep=0.1]", "lrmoe[keep=0.5]", "lrmoe[keep=0.9]",
                                         "lrmoe[keep=0.5,score=g,activations=resend]",
                                         "lrmoe[keep=0.5,score=sample]"};
    for (int i = 0; i < COUNT_OF(policy); i++)
        for (uint64_t seed = 430; seed < 433; seed++) {
            bench b;
            const scene_options o = one_cell(policy[i], 600);
            swap_is_found(&b, &o, seed, "is left out");
            assert_true(b.s.pair_begin[b.rank + 1] - b.s.pair_begin[b.rank] > 200);
            check_message(&b, strstr(b.m.err.msg, "layer 0") ? 0 : 1);
            bench_close(&b);
        }
}

static void swapped_pairs_are_found_among_few(void **state) {
    for (uint64_t seed = 440; seed < 448; seed++) {
        bench b;
        scene_options o = scene_usual("lrmoe[keep=0.5]", MZ_F32);
        o.tokens = 120;
        swap_is_found(&b, &o, seed, "is left out");
        bench_close(&b);
    }
}

/* Where a cell has more pairs than are scored, the wrong ones stay all over it. */
static void the_lowest_scores_are_found_in_a_sample(void **state) {
    bench b;
    const scene_options o = one_cell("lrmoe[keep=0.5]", 6000);
    bench_open(&b, &o, 450);
    assert_ok(bench_step(&b), &b.m.err);
    check_selections(&b);
    const int64_t n = b.s.pair_begin[b.rank + 1] - b.s.pair_begin[b.rank];
    assert_true(n > 3000);
    for (int32_t l = 0; l < SCENE_LAYERS; l++) {
        uint8_t *keep = copy_kept(&b, l);
        int64_t kept = 0;
        for (int64_t p = 0; p < n; p++)
            kept += keep[p] = !keep[p];
        for (int64_t p = 0; kept != kept_of(&b, l, b.rank, 5); p++)
            if (keep[p] == (kept > kept_of(&b, l, b.rank, 5))) {
                kept += keep[p] ? -1 : 1;
                keep[p] = !keep[p];
            }
    }
    assert_fails(bench_step(&b), MZ_ECHECK, "is left out", &b.m.err);
    bench_close(&b);
}

/* Gate weights that are all the same: the first pairs stay. */
static void of_equal_scores_the_first_stay(void **state) {
    static const char *const policy[] = {"lrmoe[keep=0.5,score=w]", "lrmoe[keep=0.9,score=w]"};
    for (int i = 0; i < 2 * COUNT_OF(policy); i++) {
        bench b;
        scene_options o = one_cell(policy[i / 2], i % 2 ? 600 : 30);
        o.weights = false;
        swap_is_found(&b, &o, 460, "of equal scores the first stays");
        bench_close(&b);
    }
}

static void kept_pairs_are_counted(void **state) {
    bench b;
    const scene_options o = one_cell("lrmoe[keep=0.5]", 400);
    bench_open(&b, &o, 470);
    assert_ok(bench_step(&b), &b.m.err);
    for (int32_t l = 0; l < SCENE_LAYERS; l++) {
        uint8_t *keep = copy_kept(&b, l);
        keep[extreme(&b, l, 5, keep, true, false)] = 0;
    }
    assert_fails(bench_step(&b), MZ_ECHECK, "kept pairs of expert [5]", &b.m.err);
    bench_close(&b);
}

/* Too much of every pair, and too little; in cells that are looked at as a whole and in part. In
 * part the threshold lies between two scores, which need not be near each other. */
static void wrong_weights_of_a_sample_are_found(void **state) {
    const scene_options some[] = {one_cell("lrmoe[keep=0.5,score=sample]", 100),
                                  one_cell("lrmoe[keep=0.5,score=sample,activations=resend]", 600)};
    const float factor[][3] = {{0.99f, 1.01f, 1000}, {0.99f, 2, 1000}};
    for (int i = 0; i < 3 * COUNT_OF(some); i++) {
        bench b;
        bench_open(&b, &some[i / 3], 480);
        assert_ok(bench_step(&b), &b.m.err);
        check_selections(&b);
        b.drawn = factor[i / 3][i % 3];
        assert_fails(bench_step(&b), MZ_ECHECK, "weight of a drawn pair", &b.m.err);
        bench_close(&b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_selections_pass),
        cmocka_unit_test(what_is_not_compared_is_not_counted),
        cmocka_unit_test(swapped_pairs_are_found_among_many),
        cmocka_unit_test(swapped_pairs_are_found_among_few),
        cmocka_unit_test(the_lowest_scores_are_found_in_a_sample),
        cmocka_unit_test(of_equal_scores_the_first_stay),
        cmocka_unit_test(kept_pairs_are_counted),
        cmocka_unit_test(wrong_weights_of_a_sample_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
