/* Scores, grouping, prefix sums, selection, arrangement. Selection is compared with a full sort. */
#include "tests/kernels/reference.h"
#include "tests/kernels/rig.h"

#include <float.h>
#include <math.h>
#include <string.h>

static void *put64(rig *r, const int64_t *values, int64_t n) {
    return rig_in(r, values, sizeof *values * (size_t)n);
}

static void same64(rig *r, const char *what, const int64_t *memory, const int64_t *want,
                   int64_t n) {
    const int64_t *got = rig_get(r, memory);
    for (int64_t i = 0; i < n; i++)
        if (got[i] != want[i])
            rig_fail(r, "%s[%lld] is %lld, not %lld", what, (long long)i, (long long)got[i],
                     (long long)want[i]);
}

/* ---- scores -------------------------------------------------------------------------------------
 */

typedef struct factors {
    int64_t tokens, pairs;
    int32_t k;
    int64_t *begin; /* [tokens+1] */
    float *weight, *grad, *input, *hidden;
} factors;

static float *positive(rig *r, int64_t n) {
    float *x = rig_host(r, sizeof *x * (size_t)n);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)fabs(rig_normal(r) * exp(4 * rig_normal(r)));
    return x;
}

static factors make_factors(rig *r, int64_t tokens, bool variable) {
    factors f = {.tokens = tokens, .k = 1 + (int32_t)rig_below(r, 8)};
    f.begin = rig_host(r, 8 * (size_t)(tokens + 1));
    for (int64_t t = 0; t < tokens; t++)
        f.begin[t + 1] = f.begin[t] + (variable ? rig_below(r, 9) : f.k);
    f.pairs = f.begin[tokens];
    f.weight = positive(r, f.pairs);
    f.hidden = positive(r, f.pairs);
    f.grad = positive(r, tokens);
    f.input = positive(r, tokens);
    return f;
}

/* Products from left to right in fp32: scores must agree bit by bit. */
static float expected_score(const factors *f, mz_score kind, int64_t t, int64_t p, uint64_t seed) {
    const float w2 = f->weight[p] * f->weight[p];
    float s = w2 * f->grad[t];
    switch (kind) {
    case MZ_SCORED_DOWN:
        s = s * f->hidden[p];
        break;
    case MZ_SCORED_UP:
        s = s * f->input[t];
        break;
    case MZ_SCORED_W:
        s = w2;
        break;
    case MZ_SCORED_WH:
        s = w2 * f->hidden[p];
        break;
    case MZ_SCORED_G:
        s = f->grad[t];
        break;
    case MZ_SCORED_H:
        s = f->hidden[p];
        break;
    case MZ_SCORED_RANDOM:
        s = (float)ref_draw(seed, (uint64_t)p + 1000);
        break;
    case MZ_SCORED_SAMPLE:
        s = s * f->hidden[p];
        s = sqrtf(s < FLT_MAX ? s : FLT_MAX) / (float)ref_draw(seed, (uint64_t)p + 1000);
        break;
    }
    return s < FLT_MAX ? s : FLT_MAX;
}

static void scores(rig *r, int64_t tokens, bool variable, bool huge) {
    factors f = make_factors(r, tokens, variable);
    for (int64_t p = 0; huge && p < f.pairs; p++)
        f.weight[p] = 1e30f;
    for (int kind = MZ_SCORED_DOWN; kind <= MZ_SCORED_SAMPLE; kind++) {
        float *score = rig_room(r, MZ_F32, f.pairs);
        const mz_score_args args = {.kind = kind,
                                    .tokens = tokens,
                                    .pairs = f.pairs,
                                    .token_begin = variable ? put64(r, f.begin, tokens + 1) : NULL,
                                    .k = f.k,
                                    .weight = rig_in(r, f.weight, 4 * (size_t)f.pairs),
                                    .grad_norm2 = rig_in(r, f.grad, 4 * (size_t)tokens),
                                    .input_norm2 = rig_in(r, f.input, 4 * (size_t)tokens),
                                    .hidden_norm2 = rig_in(r, f.hidden, 4 * (size_t)f.pairs),
                                    .seed = 77,
                                    .first_pair = 1000,
                                    .score = score};
        RIG_OK(r, mz_score_pairs(r->kernels, 0, &args));
        const float *got = rig_floats(r, score);
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t p = f.begin[t]; p < f.begin[t + 1]; p++)
                if (got[p] != expected_score(&f, kind, t, p, 77))
                    rig_fail(r, "kind %d: pair %lld scores %.9g, not %.9g", kind, (long long)p,
                             got[p], expected_score(&f, kind, t, p, 77));
    }
}

static void check_scores(rig *r) {
    const int64_t tokens[] = {0, 1, 77, 1000};
    for (int i = 0; i < (r->small ? 3 : 4); i++) {
        scores(r, tokens[i], false, false);
        scores(r, tokens[i], true, false);
    }
    scores(r, 9, false, true);
}

/* Unused factors may be NULL. */
static void check_score_factors(rig *r) {
    enum { N = 40 };
    const float *x = positive(r, N);
    float *in = rig_in(r, x, 4 * N), *out = rig_room(r, MZ_F32, N);
    const mz_score kinds[] = {MZ_SCORED_W, MZ_SCORED_G, MZ_SCORED_H, MZ_SCORED_RANDOM};
    for (int i = 0; i < 4; i++) {
        mz_score_args args = {.kind = kinds[i], .tokens = N, .pairs = N, .k = 1, .score = out};
        args.weight = kinds[i] == MZ_SCORED_W ? in : NULL;
        args.grad_norm2 = kinds[i] == MZ_SCORED_G ? in : NULL;
        args.hidden_norm2 = kinds[i] == MZ_SCORED_H ? in : NULL;
        RIG_OK(r, mz_score_pairs(r->kernels, 0, &args));
        const float *got = rig_floats(r, out);
        for (int p = 0; p < N && kinds[i] != MZ_SCORED_RANDOM; p++)
            RIG_TRUE(r, got[p] == (kinds[i] == MZ_SCORED_W ? x[p] * x[p] : x[p]));
    }
}

/* Uniform in (0, 1]: mean and variance of many draws within five standard deviations. */
static void check_random_scores(rig *r) {
    const int64_t n = r->small ? 2000 : 100000;
    float *out = rig_room(r, MZ_F32, n);
    const mz_score_args args = {.kind = MZ_SCORED_RANDOM,
                                .tokens = n,
                                .pairs = n,
                                .k = 1,
                                .seed = rig_bits(r),
                                .score = out};
    RIG_OK(r, mz_score_pairs(r->kernels, 0, &args));
    const float *got = rig_floats(r, out);
    double mean = 0, square = 0;
    for (int64_t i = 0; i < n; i++) {
        RIG_TRUE(r, got[i] > 0 && got[i] <= 1);
        mean += got[i] / (double)n;
        square += got[i] * (double)got[i] / (double)n;
    }
    RIG_TRUE(r, fabs(mean - 0.5) < 5 * sqrt(1.0 / 12 / (double)n));
    RIG_TRUE(r, fabs(square - 1.0 / 3) < 5 * sqrt(4.0 / 45 / (double)n));
}

/* ---- drawn samples ------------------------------------------------------------------------------
 */

enum { SAMPLE_PARTS = 3 }; /* values of what a pair contributes */

/* Pairs of several experts, each with a contribution per unit of weight. */
typedef struct population {
    factors f;
    int32_t experts;
    int64_t *begin, *order, *quota;
    double *root; /* [pairs] sqrt(w^2 |g|^2 |h|^2) */
    double *part; /* [pairs][SAMPLE_PARTS] */
    mz_score_args score;
    mz_selection select;
} population;

static population make_population(rig *r, int64_t tokens, int32_t experts, bool zeros) {
    population x = {.f = make_factors(r, tokens, false), .experts = experts};
    const int64_t n = x.f.pairs;
    x.begin = rig_host(r, 8 * (size_t)(experts + 1));
    x.order = rig_host(r, 8 * (size_t)n);
    x.quota = rig_host(r, 8 * (size_t)experts);
    x.root = rig_host(r, 8 * (size_t)n);
    x.part = rig_normals(r, MZ_F32, n * SAMPLE_PARTS, 1);
    int32_t *of = rig_host(r, 4 * (size_t)n);
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        of[i] = (int32_t)rig_below(r, experts);
        x.f.weight[i] = zeros && rig_below(r, 2) ? 0 : (float)exp(0.7 * rig_normal(r));
        x.f.hidden[i] = (float)exp(0.7 * rig_normal(r));
        x.f.grad[i / x.f.k] = (float)exp(0.7 * rig_normal(r));
    }
    for (int64_t i = 0; i < n; i++)
        x.root[i] =
            sqrt((double)x.f.weight[i] * x.f.weight[i] * x.f.grad[i / x.f.k] * x.f.hidden[i]);
    for (int32_t e = 0; e < experts; e++) {
        x.begin[e] = at;
        for (int64_t i = 0; i < n; i++)
            if (of[i] == e)
                x.order[at++] = i;
        x.begin[e + 1] = at;
        /* none, some, all and more than there are */
        x.quota[e] = e == 1 ? 0 : e == 2 ? at : (at - x.begin[e]) / 2;
    }
    x.score = (mz_score_args){.kind = MZ_SCORED_SAMPLE,
                              .tokens = tokens,
                              .pairs = n,
                              .k = x.f.k,
                              .weight = rig_in(r, x.f.weight, 4 * (size_t)n),
                              .grad_norm2 = rig_in(r, x.f.grad, 4 * (size_t)tokens),
                              .hidden_norm2 = rig_in(r, x.f.hidden, 4 * (size_t)n),
                              .seed = rig_bits(r),
                              .score = rig_room(r, MZ_F32, n)};
    x.select = (mz_selection){.score = x.score.score,
                              .order = put64(r, x.order, n),
                              .begin = put64(r, x.begin, experts + 1),
                              .quota = put64(r, x.quota, experts),
                              .pairs = n,
                              .experts = experts,
                              .kept = rig_out(r, 8 * (size_t)n),
                              .kept_begin = rig_out(r, 8 * (size_t)(experts + 1)),
                              .scaled = rig_room(r, MZ_F32, n),
                              .weight = x.score.weight,
                              .seed = x.score.seed};
    return x;
}

/* Draws with numbers from `first` on; scaled weights of kept pairs, 0 of others. */
static float *draw_sample(rig *r, population *x, uint64_t first) {
    const int64_t n = x->f.pairs;
    x->score.first_pair = x->select.first_pair = first;
    void *workspace = rig_workspace(r, mz_select_workspace(r->kernels, &x->select));
    RIG_OK(r, mz_score_pairs(r->kernels, 0, &x->score));
    RIG_OK(r, mz_select_pairs(r->kernels, 0, &x->select, workspace));
    const int64_t *kept = rig_get(r, x->select.kept), *end = rig_get(r, x->select.kept_begin);
    const float *scaled = rig_floats(r, x->select.scaled);
    float *all = rig_host(r, 4 * (size_t)n);
    for (int64_t i = 0; i < end[x->experts]; i++)
        all[kept[i]] = scaled[kept[i]];
    return all;
}

/* Of one draw every number, from the formula in double precision. Factors of pairs that the
 * threshold nearly met have a relative error of a few roundings. */
static void compare_sample(rig *r, population *x) {
    const uint64_t first = rig_bits(r) >> 1;
    const float *got = draw_sample(r, x, first);
    const int64_t n = x->f.pairs;
    double *priority = rig_host(r, 8 * (size_t)n), *want = rig_host(r, 8 * (size_t)n);
    int64_t *rank = rig_host(r, 8 * (size_t)n);
    for (int32_t e = 0; e < x->experts; e++) {
        const int64_t *own = x->order + x->begin[e], count = x->begin[e + 1] - x->begin[e];
        const int64_t quota = x->quota[e] < count ? x->quota[e] : count;
        for (int64_t i = 0; i < count; i++)
            priority[i] =
                x->root[own[i]] / (float)ref_draw(x->score.seed, first + (uint64_t)own[i]);
        ref_order(priority, count, rank);
        const double left = quota < count ? priority[rank[quota]] : 0;
        for (int64_t i = 0; i < quota; i++) {
            const double root = x->root[own[rank[i]]];
            const double w = x->select.weight ? x->f.weight[own[rank[i]]] : 1;
            want[own[rank[i]]] = root >= left ? w : w * left / root;
        }
    }
    for (int64_t i = 0; i < n; i++)
        if (!rig_same(got[i], want[i], 1e-6 * want[i]))
            rig_fail(r, "pair %lld counts for %.9g, not %.9g", (long long)i, got[i], want[i]);
}

/* A sample's sums are those of all pairs on average, in every part; each within five standard
 * deviations of the mean of many draws. Without the scale they are short of it by far more. */
static void check_sampling(rig *r) {
    const int runs = r->small ? 200 : 4000;
    population x = make_population(r, 24, 3, false);
    double all[SAMPLE_PARTS] = {0}, mean[SAMPLE_PARTS] = {0}, square[SAMPLE_PARTS] = {0};
    double short_of = 0;
    for (int64_t i = 0; i < x.f.pairs; i++)
        x.part[i * SAMPLE_PARTS] = fabs(x.part[i * SAMPLE_PARTS]); /* a sum that has no zero */
    x.quota[1] = 3;
    x.select.quota = put64(r, x.quota, 3);
    for (int64_t i = 0; i < x.f.pairs; i++)
        for (int j = 0; j < SAMPLE_PARTS; j++)
            all[j] += x.f.weight[i] * x.part[i * SAMPLE_PARTS + j];
    for (int run = 0; run < runs; run++) {
        const float *scaled = draw_sample(r, &x, (uint64_t)run * (uint64_t)x.f.pairs);
        for (int j = 0; j < SAMPLE_PARTS; j++) {
            double sum = 0;
            for (int64_t i = 0; i < x.f.pairs; i++)
                sum += scaled[i] * x.part[i * SAMPLE_PARTS + j];
            mean[j] += sum / runs;
            square[j] += sum * sum / runs;
        }
        for (int64_t i = 0; i < x.f.pairs; i++)
            short_of += scaled[i] > 0 ? 0 : x.f.weight[i] * x.part[i * SAMPLE_PARTS] / runs;
    }
    for (int j = 0; j < SAMPLE_PARTS; j++) {
        const double deviation = sqrt((square[j] - mean[j] * mean[j]) / runs);
        if (fabs(mean[j] - all[j]) > 5 * deviation)
            rig_fail(r, "part %d is %g on average, not %g (deviation %g)", j, mean[j], all[j],
                     deviation);
        if (j == 0)
            RIG_TRUE(r, short_of > 10 * deviation); /* the test can tell */
    }
}

static void check_scaled_samples(rig *r) {
    const int64_t tokens[] = {0, 1, 40, 700};
    for (int i = 0; i < (r->small ? 3 : 4); i++)
        for (int zeros = 0; zeros < 2; zeros++) {
            population x = make_population(r, tokens[i], 4, zeros);
            compare_sample(r, &x);
            x.select.weight = NULL;
            compare_sample(r, &x);
            x.select.weight = x.select.scaled = rig_in(r, x.f.weight, 4 * (size_t)x.f.pairs);
            compare_sample(r, &x);
            rig_clear(r);
        }
}

/* ---- grouping -----------------------------------------------------------------------------------
 */

static void grouping(rig *r, int64_t pairs, int32_t experts, int skew, bool outside) {
    int32_t *expert = rig_host(r, 4 * (size_t)pairs);
    int64_t *count = rig_host(r, 8 * (size_t)experts),
            *begin = rig_host(r, 8 * (size_t)(experts + 1));
    int64_t *order = rig_host(r, 8 * (size_t)pairs), listed = 0;
    for (int64_t i = 0; i < pairs; i++) {
        expert[i] = skew == 1 ? experts / 2 : (int32_t)rig_below(r, experts > 0 ? experts : 1);
        if (outside && rig_below(r, 5) == 0)
            expert[i] = rig_below(r, 2) ? -1 - (int32_t)rig_below(r, 3) : experts;
    }
    for (int32_t e = 0; e < experts; e++) {
        begin[e] = listed;
        for (int64_t i = 0; i < pairs; i++)
            if (expert[i] == e)
                order[listed++] = i;
        begin[e + 1] = listed;
        count[e] = listed - begin[e];
    }
    mz_grouping args = {.expert = rig_in(r, expert, 4 * (size_t)pairs),
                        .pairs = pairs,
                        .experts = experts,
                        .count = rig_out(r, 8 * (size_t)experts),
                        .begin = rig_out(r, 8 * (size_t)(experts + 1)),
                        .order = rig_out(r, 8 * (size_t)pairs)};
    const mz_grouping all = args;
    void *workspace = rig_workspace(r, mz_group_pairs_workspace(r->kernels, &args));
    RIG_OK(r, mz_group_pairs(r->kernels, 0, &args, workspace));
    same64(r, "count", all.count, count, experts);
    same64(r, "begin", all.begin, begin, experts + 1);
    same64(r, "order", all.order, order, listed);
    args.count = NULL;
    args.order = NULL;
    args.begin = rig_out(r, 8 * (size_t)(experts + 1));
    workspace = rig_workspace(r, mz_group_pairs_workspace(r->kernels, &args));
    RIG_OK(r, mz_group_pairs(r->kernels, 0, &args, workspace));
    same64(r, "begin alone", args.begin, begin, experts + 1);
}

static void check_grouping(rig *r) {
    grouping(r, 0, 5, 0, false);
    grouping(r, 0, 0, 0, false);
    grouping(r, 1, 1, 0, false);
    grouping(r, 1000, 384, 0, true);
    grouping(r, 777, 7, 1, false);
    grouping(r, 5000, 64, 0, true);
    if (!r->small)
        grouping(r, 150001, 16, 0, true);
}

static void check_prefix_sums(rig *r) {
    const int64_t lengths[] = {0, 1, 2, 255, 256, 257, 1025, 5000};
    for (int i = 0; i < 8; i++) {
        const int64_t n = lengths[i];
        int64_t *count = rig_host(r, 8 * (size_t)n), *want = rig_host(r, 8 * (size_t)(n + 1));
        for (int64_t j = 0; j < n; j++) {
            count[j] = rig_below(r, 3) ? rig_below(r, INT64_C(1) << 40) : 0;
            want[j + 1] = want[j] + count[j];
        }
        int64_t *begin = rig_out(r, 8 * (size_t)(n + 1));
        void *workspace = rig_workspace(r, mz_prefix_sums_workspace(r->kernels, n));
        RIG_OK(r, mz_prefix_sums(r->kernels, 0, put64(r, count, n), n, begin, workspace));
        same64(r, "begin", begin, want, n + 1);
    }
}

/* ---- selection ----------------------------------------------------------------------------------
 */

typedef enum ties { DISTINCT, FEW, EQUAL, ZEROS, EDGES, TIES } ties;

static float make_score(rig *r, ties t) {
    const float edge[] = {0, -0.0f, 1e-45f, FLT_MIN, 1, FLT_MAX, 0x1.000002p0f, 0x1.fffffep-1f};
    switch (t) {
    case DISTINCT:
        return (float)exp(3 * rig_normal(r));
    case FEW:
        return (float)rig_below(r, 4);
    case EQUAL:
        return 2.5f;
    case ZEROS:
        return rig_below(r, 3) ? 0 : (float)rig_uniform(r);
    case EDGES:
        return edge[rig_below(r, 8)];
    default:
        return 0;
    }
}

typedef struct chosen {
    int64_t *kept, *kept_begin;
    uint8_t *keep;
    float *threshold;
    double sum; /* of the scores that stay, experts in order */
} chosen;

/* Sorts each expert's pairs by falling score, ties by position, and takes the first quota. */
static chosen sort_and_take(rig *r, const float *score, const int64_t *order, const int64_t *begin,
                            const int64_t *quota, int64_t pairs, int32_t experts) {
    chosen c = {rig_host(r, 8 * (size_t)pairs), rig_host(r, 8 * (size_t)(experts + 1)),
                rig_host(r, (size_t)pairs), rig_host(r, 4 * (size_t)experts), 0};
    double *value = rig_host(r, 8 * (size_t)pairs);
    int64_t *rank = rig_host(r, 8 * (size_t)pairs);
    uint8_t *stays = rig_host(r, (size_t)pairs);
    memset(c.keep, 0xff, (size_t)pairs);
    for (int32_t e = 0; e < experts; e++) {
        const int64_t n = begin[e + 1] - begin[e], q = quota[e] < n ? quota[e] : n;
        for (int64_t i = 0; i < n; i++)
            value[i] = score[order[begin[e] + i]];
        ref_order(value, n, rank);
        for (int64_t i = 0; i < n; i++)
            stays[rank[i]] = i < q;
        c.threshold[e] = q < n ? (float)value[rank[q]] : 0;
        c.kept_begin[e + 1] = c.kept_begin[e];
        for (int64_t i = 0; i < n; i++) {
            c.keep[order[begin[e] + i]] = stays[i];
            if (stays[i])
                c.kept[c.kept_begin[e + 1]++] = order[begin[e] + i];
            c.sum += stays[i] ? value[i] : 0;
        }
    }
    return c;
}

/* Whatever selection writes, against the full sort. */
static void compare_selection(rig *r, const float *score, const int64_t *order,
                              const int64_t *begin, const int64_t *quota, int64_t pairs,
                              int32_t experts) {
    const chosen want = sort_and_take(r, score, order, begin, quota, pairs, experts);
    const mz_selection args = {.score = rig_in(r, score, 4 * (size_t)pairs),
                               .order = put64(r, order, pairs),
                               .begin = put64(r, begin, experts + 1),
                               .quota = put64(r, quota, experts),
                               .pairs = pairs,
                               .experts = experts,
                               .kept = rig_out(r, 8 * (size_t)pairs),
                               .kept_begin = rig_out(r, 8 * (size_t)(experts + 1)),
                               .keep = rig_out(r, (size_t)pairs),
                               .threshold = rig_room(r, MZ_F32, experts)};
    void *workspace = rig_workspace(r, mz_select_workspace(r->kernels, &args));
    RIG_OK(r, mz_select_pairs(r->kernels, 0, &args, workspace));
    same64(r, "kept_begin", args.kept_begin, want.kept_begin, experts + 1);
    same64(r, "kept", args.kept, want.kept, want.kept_begin[experts]);
    RIG_TRUE(r, pairs == 0 || memcmp(rig_get(r, args.keep), want.keep, (size_t)pairs) == 0);
    const float *threshold = rig_floats(r, args.threshold);
    for (int32_t e = 0; e < experts; e++)
        if (threshold[e] != want.threshold[e])
            rig_fail(r, "threshold of expert %d: %g, not %g", (int)e, threshold[e],
                     want.threshold[e]);
    double sum = 0; /* the most that so many scores can add up to */
    const int64_t *kept = rig_get(r, args.kept);
    for (int64_t i = 0; i < want.kept_begin[experts]; i++)
        sum += score[kept[i]];
    RIG_TRUE(r, sum == want.sum);
}

static void selecting(rig *r, int64_t pairs, int32_t experts, ties t, int shape) {
    float *score = rig_host(r, 4 * (size_t)pairs);
    int64_t *order = rig_host(r, 8 * (size_t)pairs),
            *begin = rig_host(r, 8 * (size_t)(experts + 1));
    int64_t *quota = rig_host(r, 8 * (size_t)experts);
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t j = rig_below(r, i + 1);
        score[i] = make_score(r, t);
        order[i] = order[j];
        order[j] = i;
    }
    for (int32_t e = 0; e < experts; e++) /* shape 1: one expert has everything */
        begin[e + 1] = shape == 1 ? (e >= experts / 2 ? pairs : 0) : pairs * (e + 1) / experts;
    const int64_t listed = rig_below(r, 4) == 0 ? begin[experts] * 3 / 4 : begin[experts];
    for (int32_t e = 0; e <= experts; e++) /* some pairs may be listed nowhere */
        begin[e] = begin[e] < listed ? begin[e] : listed;
    for (int32_t e = 0; e < experts; e++) {
        const int64_t n = begin[e + 1] - begin[e], how = rig_below(r, 6);
        quota[e] = how == 0   ? 0
                   : how == 1 ? n
                   : how == 2 ? n + 5
                   : how == 3 ? 1
                              : rig_below(r, n + 1);
    }
    compare_selection(r, score, order, begin, quota, pairs, experts);
}

static void check_selection(rig *r) {
    /* Of the last, one expert has more than a CUDA block of the largest size has threads. */
    const int64_t pairs[] = {0, 1, 17, 256, 1000, 5099};
    const int32_t experts[] = {1, 1, 3, 384, 16, 3};
    for (int t = DISTINCT; t < TIES; t++)
        for (int i = 0; i < 6; i++)
            for (int shape = 0; shape < 2; shape++)
                selecting(r, pairs[i], experts[i], t, shape), rig_clear(r);
    selecting(r, 0, 0, DISTINCT, 0);
    if (!r->small)
        selecting(r, 100000, 128, DISTINCT, 0);
}

/* Every pattern of three scores over up to six pairs with every quota, an expert for each; on an
 * emulated device up to four pairs. */
static void check_all_ties(rig *r) {
    enum { MOST = 6 };
    const int n_most = r->small ? 4 : MOST;
    int64_t experts = 0, pairs = 0, patterns = 1;
    for (int n = 1; n <= n_most; n++) {
        patterns *= 3;
        experts += patterns * (n + 1);
        pairs += patterns * (n + 1) * n;
    }
    float *score = rig_host(r, 4 * (size_t)pairs);
    int64_t *order = rig_host(r, 8 * (size_t)pairs), *quota = rig_host(r, 8 * (size_t)experts);
    int64_t *begin = rig_host(r, 8 * (size_t)(experts + 1)), e = 0;
    patterns = 1;
    for (int n = 1; n <= n_most; n++) {
        patterns *= 3;
        for (int64_t i = 0; i < patterns * (n + 1); i++, e++) {
            int64_t digits = i / (n + 1);
            quota[e] = i % (n + 1);
            begin[e + 1] = begin[e] + n;
            for (int64_t at = begin[e]; at < begin[e + 1]; at++, digits /= 3) {
                order[at] = pairs - 1 - at; /* ties go by position, not by number */
                score[order[at]] = (float)(digits % 3);
            }
        }
    }
    RIG_TRUE(r, e == experts && begin[e] == pairs);
    compare_selection(r, score, order, begin, quota, pairs, (int32_t)experts);
}

/* Either output alone. */
static void check_selection_outputs(rig *r) {
    enum { N = 100 };
    float score[N];
    int64_t order[N], begin[3] = {0, 40, N}, quota[2] = {7, 30};
    for (int i = 0; i < N; i++) {
        score[i] = make_score(r, FEW);
        order[i] = i;
    }
    const chosen want = sort_and_take(r, score, order, begin, quota, N, 2);
    mz_selection args = {.score = rig_in(r, score, sizeof score),
                         .order = put64(r, order, N),
                         .begin = put64(r, begin, 3),
                         .quota = put64(r, quota, 2),
                         .pairs = N,
                         .experts = 2,
                         .keep = rig_out(r, N)};
    void *workspace = rig_workspace(r, mz_select_workspace(r->kernels, &args));
    RIG_OK(r, mz_select_pairs(r->kernels, 0, &args, workspace));
    RIG_TRUE(r, memcmp(rig_get(r, args.keep), want.keep, N) == 0);
    args.keep = NULL;
    args.kept = rig_out(r, 37 * 8); /* no more than the quotas' sum is written */
    args.kept_begin = rig_out(r, 3 * 8);
    workspace = rig_workspace(r, mz_select_workspace(r->kernels, &args));
    RIG_OK(r, mz_select_pairs(r->kernels, 0, &args, workspace));
    same64(r, "kept alone", args.kept, want.kept, 37);
}

/* ---- arrangement --------------------------------------------------------------------------------
 */

static void check_arrange(rig *r) {
    for (int round = 0; round < 5; round++) {
        const int64_t segments = rig_below(r, 60), gap = 3;
        mz_segment *segment = rig_host(r, sizeof *segment * (size_t)segments);
        int64_t in_size = 5, out_size = 0;
        for (int64_t i = 0; i < segments; i++) {
            segment[i].length = rig_below(r, 3) ? rig_below(r, 200) : 0;
            segment[i].to = out_size;
            out_size += segment[i].length + gap;
            in_size += segment[i].length;
        }
        int64_t *in = rig_host(r, 8 * (size_t)in_size), *want = rig_host(r, 8 * (size_t)out_size);
        for (int64_t i = 0; i < in_size; i++)
            in[i] = (int64_t)rig_bits(r);
        memset(want, 0xff, 8 * (size_t)out_size);
        for (int64_t i = 0; i < segments; i++) {
            segment[i].from = rig_below(r, in_size - segment[i].length + 1);
            for (int64_t j = 0; j < segment[i].length; j++)
                want[segment[i].to + j] = in[segment[i].from + j];
        }
        int64_t *out = rig_out(r, 8 * (size_t)out_size);
        RIG_OK(r, mz_arrange(r->kernels, 0, rig_in(r, segment, sizeof *segment * (size_t)segments),
                             segments, put64(r, in, in_size), out));
        same64(r, "arranged", out, want, out_size);
    }
}

static void check_random_bits(rig *r) { /* the generator's published vectors */
    const uint32_t want[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                 {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                 {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    uint32_t got[3][4];
    ref_philox(0, 0, 0, 0, got[0]);
    ref_philox(UINT64_MAX, UINT64_MAX, UINT32_MAX, UINT32_MAX, got[1]);
    ref_philox(UINT64_C(0x299f31d0a4093822), UINT64_C(0x85a308d3243f6a88), 0x13198a2e, 0x03707344,
               got[2]);
    RIG_TRUE(r, memcmp(got, want, sizeof want) == 0);
}

const check checks_of_pairs[] = {{"random bits", check_random_bits},
                                 {"scores", check_scores},
                                 {"scores' factors", check_score_factors},
                                 {"random scores", check_random_scores},
                                 {"sampling", check_sampling},
                                 {"scaled samples", check_scaled_samples},
                                 {"grouping", check_grouping},
                                 {"prefix sums", check_prefix_sums},
                                 {"selection", check_selection},
                                 {"all ties", check_all_ties},
                                 {"selection's outputs", check_selection_outputs},
                                 {"arrange", check_arrange},
                                 {NULL, NULL}};
