/* Routers against the reference in double; gradients by finite differences of
 * sum dweight * weight + aux_factor * balance + z_factor * z, the choice held. */
#include "tests/kernels/reference.h"
#include "tests/kernels/rig.h"

#include <math.h>
#include <string.h>

typedef struct routed {
    mz_router args; /* with context memory */
    ref_router want;
    double *logits, *bias, *gain, *share, *dweight;
    int64_t *count, pairs;
    uint8_t *keep;
} routed;

typedef struct setting {
    mz_router_kind kind;
    int64_t tokens;
    int32_t experts, k, n_group, topk_group;
    bool normalize, softmax_all, proxy_paper, biased, gained, shared;
    float theta;
} setting;

static bool is_variable(mz_router_kind kind) {
    return kind == MZ_ROUTER_RELU || kind == MZ_ROUTER_ROUTING_FREE;
}

static float *put_or_null(rig *r, bool there, const double *values, int64_t n) {
    return there ? rig_put_floats(r, values, n) : NULL;
}

/* Logits on a grid coarse enough that ties happen and are ties in every precision. */
static routed prepare(rig *r, const setting *s, bool grid) {
    const int64_t n = s->tokens * s->experts;
    const bool norms = s->kind == MZ_ROUTER_AOE || s->kind == MZ_ROUTER_ROUTING_FREE;
    routed x = {.logits = rig_normals(r, MZ_F32, n, 1.5)};
    for (int64_t i = 0; i < n; i++) {
        if (norms)
            x.logits[i] = fabs(x.logits[i]);
        if (grid)
            x.logits[i] = floor(4 * x.logits[i]) / 4;
    }
    x.bias = rig_normals(r, MZ_F32, s->experts, s->kind == MZ_ROUTER_SIGMOID && grid ? 0 : 0.1);
    x.gain = rig_normals(r, MZ_F32, s->experts, 0.1);
    for (int32_t e = 0; e < s->experts; e++)
        x.gain[e] = ref_stored(MZ_F32, 1 + x.gain[e]);
    x.share = rig_normals(r, MZ_F32, s->tokens, 0);
    for (int64_t t = 0; t < s->tokens; t++)
        x.share[t] = ref_stored(MZ_F32, rig_uniform(r));
    x.args = (mz_router){.kind = s->kind,
                         .tokens = s->tokens,
                         .experts = s->experts,
                         .k = s->k,
                         .normalize = s->normalize,
                         .softmax_all = s->softmax_all,
                         .scale = 1.25f,
                         .n_group = s->n_group > 0 ? s->n_group : 1,
                         .topk_group = s->topk_group > 0 ? s->topk_group : 1,
                         .theta = s->theta,
                         .logits = rig_put_floats(r, x.logits, n),
                         .bias = put_or_null(r, s->biased, x.bias, s->experts),
                         .gain = put_or_null(r, s->gained, x.gain, s->experts),
                         .proxy_paper = s->proxy_paper};
    const int64_t most = is_variable(s->kind) ? n : s->tokens * s->k;
    x.args.expert = rig_out(r, 4 * (size_t)most);
    x.args.weight = rig_room(r, MZ_F32, most);
    if (is_variable(s->kind))
        x.args.token_begin = rig_out(r, 8 * (size_t)(s->tokens + 1));
    x.want = (ref_router){.logits = x.logits,
                          .bias = s->biased ? x.bias : NULL,
                          .gain = s->gained ? x.gain : NULL,
                          .token_share = s->shared ? x.share : NULL,
                          .weight = rig_host(r, 8 * (size_t)n),
                          .slot = rig_host(r, 4 * (size_t)n)};
    return x;
}

static void route(rig *r, routed *x) {
    x->want.args = &x->args;
    ref_route(&x->want);
    void *workspace = rig_workspace(r, mz_router_workspace(r->kernels, &x->args));
    RIG_OK(r, mz_router_forward(r->kernels, 0, &x->args, workspace));
}

/* Every pair listed where it belongs, with its weight. */
static void compare_forward(rig *r, routed *x) {
    const mz_router *a = &x->args;
    const int32_t *expert = rig_get(r, a->expert);
    const double *weight = rig_values(r, MZ_F32, a->weight);
    int64_t *want_begin = rig_host(r, 8 * (size_t)(a->tokens + 1));
    for (int64_t t = 0; t < a->tokens; t++) {
        want_begin[t + 1] = want_begin[t];
        for (int32_t e = 0; e < a->experts; e++) {
            const int32_t slot = x->want.slot[t * a->experts + e];
            if (slot < 0)
                continue;
            const int64_t pair = is_variable(a->kind) ? slot : t * a->k + slot;
            want_begin[t + 1]++;
            if (expert[pair] != e)
                rig_fail(r, "kind %d, token %lld, slot %d: expert %d, not %d", (int)a->kind,
                         (long long)t, (int)slot, (int)expert[pair], (int)e);
            rig_near(r, "weight", weight + pair, &x->want.weight[t * a->experts + e], 1, 2e-6,
                     1e-9);
        }
    }
    x->pairs = want_begin[a->tokens];
    if (a->token_begin)
        RIG_TRUE(r,
                 memcmp(rig_get(r, a->token_begin), want_begin, 8 * (size_t)(a->tokens + 1)) == 0);
}

static const setting settings[] = {
    {.kind = MZ_ROUTER_SOFTMAX, .tokens = 0, .experts = 8, .k = 2, .normalize = true},
    {.kind = MZ_ROUTER_SOFTMAX, .tokens = 1, .experts = 1, .k = 1},
    {.kind = MZ_ROUTER_SOFTMAX, .tokens = 37, .experts = 16, .k = 4, .normalize = true},
    {.kind = MZ_ROUTER_SOFTMAX, .tokens = 300, .experts = 10, .k = 10},
    {.kind = MZ_ROUTER_SOFTMAX, .tokens = 20, .experts = 384, .k = 8, .normalize = true},
    {.kind = MZ_ROUTER_SOFTMAX, .tokens = 33, .experts = 16, .k = 4},
    {.kind = MZ_ROUTER_SIGMOID,
     .tokens = 33,
     .experts = 16,
     .k = 4,
     .normalize = true,
     .biased = true},
    {.kind = MZ_ROUTER_SIGMOID, .tokens = 21, .experts = 24, .k = 3},
    {.kind = MZ_ROUTER_SIGMOID,
     .tokens = 50,
     .experts = 64,
     .k = 8,
     .n_group = 8,
     .topk_group = 3,
     .normalize = true,
     .biased = true},
    {.kind = MZ_ROUTER_SIGMOID, .tokens = 9, .experts = 6, .k = 2, .n_group = 6, .topk_group = 2},
    {.kind = MZ_ROUTER_SIGMOID,
     .tokens = 9,
     .experts = 384,
     .k = 8,
     .n_group = 48,
     .topk_group = 5,
     .normalize = true,
     .biased = true},
    {.kind = MZ_ROUTER_AOE, .tokens = 29, .experts = 8, .k = 2},
    {.kind = MZ_ROUTER_AOE, .tokens = 29, .experts = 8, .k = 2, .softmax_all = true},
    {.kind = MZ_ROUTER_AOE, .tokens = 11, .experts = 384, .k = 8},
    {.kind = MZ_ROUTER_RELU, .tokens = 41, .experts = 12, .k = 3},
    {.kind = MZ_ROUTER_RELU, .tokens = 7, .experts = 384, .k = 8},
    {.kind = MZ_ROUTER_RELU, .tokens = 0, .experts = 12, .k = 3},
    {.kind = MZ_ROUTER_ROUTING_FREE, .tokens = 39, .experts = 12, .theta = 1, .biased = true},
    {.kind = MZ_ROUTER_ROUTING_FREE,
     .tokens = 700,
     .experts = 9,
     .theta = 0.7f,
     .biased = true,
     .gained = true,
     .shared = true},
    {.kind = MZ_ROUTER_ROUTING_FREE,
     .tokens = 25,
     .experts = 7,
     .theta = 1.2f,
     .gained = true,
     .proxy_paper = true},
    {.kind = MZ_ROUTER_ROUTING_FREE, .tokens = 12, .experts = 5, .theta = 50},
    {.kind = MZ_ROUTER_ROUTING_FREE, .tokens = 13, .experts = 70, .theta = 0.7f, .biased = true},
    {.kind = MZ_ROUTER_ROUTING_FREE,
     .tokens = 14,
     .experts = 300,
     .theta = 1,
     .biased = true,
     .gained = true,
     .shared = true},
    {.kind = MZ_ROUTER_ROUTING_FREE,
     .tokens = 600, /* three blocks of tokens */
     .experts = 3,
     .theta = 0.5f,
     .biased = true,
     .gained = true,
     .shared = true},
};
enum { SETTINGS = sizeof settings / sizeof *settings };

static void check_forward(rig *r) {
    for (int i = 0; i < SETTINGS; i++)
        for (int grid = 0; grid < 2; grid++) {
            routed x = prepare(r, &settings[i], grid);
            route(r, &x);
            compare_forward(r, &x);
        }
}

/* ---- losses and gradients -----------------------------------------------------------------------
 */

static void add_losses(rig *r, const setting *s, routed *x) {
    const mz_router *a = &x->args;
    x->count = rig_host(r, 8 * (size_t)a->experts);
    for (int64_t i = 0; i < a->tokens * a->experts; i++)
        x->count[i % a->experts] += x->want.slot[i] >= 0;
    x->want.count = x->count;
    x->args.count = rig_in(r, x->count, 8 * (size_t)a->experts);
    x->args.aux_factor = 0.3f;
    x->args.z_factor = a->kind == MZ_ROUTER_SOFTMAX || a->kind == MZ_ROUTER_AOE ? 0.2f : 0;
    x->args.balance_mix = 0.4f;
    x->args.pool_experts = s->shared ? 3 * a->experts : 0;
    x->args.token_share = put_or_null(r, s->shared, x->share, a->tokens);
}

static void check_losses(rig *r) {
    for (int i = 0; i < SETTINGS; i++) {
        routed x = prepare(r, &settings[i], false);
        route(r, &x);
        compare_forward(r, &x);
        add_losses(r, &settings[i], &x);
        float *loss = rig_room(r, MZ_F32, 3);
        void *workspace = rig_workspace(r, mz_router_workspace(r->kernels, &x.args));
        RIG_OK(r, mz_router_losses(r->kernels, 0, &x.args, loss, workspace));
        const double tokens = (double)(x.args.tokens > 0 ? x.args.tokens : 1);
        const double want[3] = {(double)x.args.aux_factor * ref_balance(&x.want),
                                (double)x.args.z_factor * ref_z(&x.want),
                                (double)x.pairs / (tokens * x.args.experts)};
        rig_near(r, "losses", rig_values(r, MZ_F32, loss), want, 3, 3e-6, 1e-9);
    }
}

static double objective(const routed *x) {
    const mz_router *a = &x->args;
    ref_router want = x->want;
    double sum = 0;
    ref_weigh(&want);
    for (int64_t t = 0; t < a->tokens; t++)
        for (int32_t e = 0; e < a->experts; e++) {
            const int32_t slot = want.slot[t * a->experts + e];
            const int64_t pair = is_variable(a->kind) ? slot : t * a->k + slot;
            if (slot >= 0 && x->keep[pair])
                sum += want.weight[t * a->experts + e] * x->dweight[pair];
        }
    return sum + (double)a->aux_factor * ref_balance(&want) + (double)a->z_factor * ref_z(&want);
}

/* Every value, or as many at random as are worth their time: each takes two sums over all pairs.
 * Gradients with something before them are sums over tokens, and round with each. */
static void compare_slopes(rig *r, const routed *x, const char *what, double *values, int64_t n,
                           const double *got, const double *before) {
    const int64_t pairs = x->args.tokens * x->args.experts;
    const int64_t most = pairs < 4000 ? 100 : 400000 / pairs;
    const double absolute = 4e-6 + (before ? 1e-7 * (double)x->args.tokens : 0);
    for (int64_t j = 0; j < n && j < most; j++) {
        const int64_t i = n <= most ? j : rig_below(r, n);
        const double was = values[i], step = 1e-5;
        values[i] = was + step;
        const double after = objective(x);
        values[i] = was - step;
        const double want = (after - objective(x)) / (2 * step) + (before ? before[i] : 0);
        values[i] = was;
        rig_near(r, what, got + i, &want, 1, 2e-5, absolute);
    }
}

static void gradients(rig *r, const setting *s, bool dropped) {
    routed x = prepare(r, s, false);
    route(r, &x);
    compare_forward(r, &x);
    add_losses(r, s, &x);
    mz_router *a = &x.args;
    x.dweight = rig_normals(r, MZ_F32, x.pairs, 1);
    x.keep = rig_host(r, (size_t)x.pairs);
    for (int64_t i = 0; i < x.pairs; i++)
        x.keep[i] = !dropped || rig_below(r, 2);
    const bool free = s->kind == MZ_ROUTER_ROUTING_FREE;
    double *before = rig_normals(r, MZ_F32, s->experts, 1);
    a->dweight = rig_put_floats(r, x.dweight, x.pairs);
    a->keep = dropped ? rig_in(r, x.keep, (size_t)x.pairs) : NULL;
    a->dlogits = rig_room(r, MZ_F32, s->tokens * s->experts);
    a->dbias = free ? rig_put_floats(r, before, s->experts) : NULL;
    a->dgain = free ? rig_put_floats(r, before, s->experts) : NULL;
    void *workspace = rig_workspace(r, mz_router_workspace(r->kernels, a));
    RIG_OK(r, mz_router_backward(r->kernels, 0, a, workspace));
    compare_slopes(r, &x, "d logits", x.logits, s->tokens * s->experts,
                   rig_values(r, MZ_F32, a->dlogits), NULL);
    if (free) { /* differences of a bias or gain that is there */
        x.want.bias = x.bias;
        x.want.gain = x.gain;
        for (int32_t e = 0; e < s->experts; e++) {
            x.bias[e] = s->biased ? x.bias[e] : 0;
            x.gain[e] = s->gained ? x.gain[e] : 1;
        }
        compare_slopes(r, &x, "d bias", x.bias, s->experts, rig_values(r, MZ_F32, a->dbias),
                       before);
        compare_slopes(r, &x, "d gain", x.gain, s->experts, rig_values(r, MZ_F32, a->dgain),
                       before);
    }
}

static void check_gradients(rig *r) {
    for (int i = 0; i < SETTINGS; i++) {
        gradients(r, &settings[i], false);
        gradients(r, &settings[i], true);
    }
}

/* Extreme logits: weights stay finite and add up to what they should. */
static void check_extremes(rig *r) {
    enum { T = 3, E = 8, K = 2 };
    for (int kind = MZ_ROUTER_SOFTMAX; kind <= MZ_ROUTER_SIGMOID; kind++) {
        const setting s = {.kind = kind, .tokens = T, .experts = E, .k = K, .normalize = true};
        routed x = prepare(r, &s, false);
        for (int e = 0; e < E; e++) {
            x.logits[e] = e == 5 ? 1e4 : -1e4; /* one wins by all */
            x.logits[E + e] = -1e4;            /* all equally hopeless */
            x.logits[2 * E + e] = 1e4;
        }
        x.args.logits = rig_put_floats(r, x.logits, T * E);
        void *workspace = rig_workspace(r, mz_router_workspace(r->kernels, &x.args));
        RIG_OK(r, mz_router_forward(r->kernels, 0, &x.args, workspace));
        const float *weight = rig_floats(r, x.args.weight);
        const int32_t *expert = rig_get(r, x.args.expert);
        RIG_TRUE(r, expert[0] == 5 && fabsf(weight[0] - 1.25f) < 1e-6f && weight[1] < 1e-6f);
        RIG_TRUE(r, expert[4] == 0 && expert[5] == 1 && fabsf(weight[4] - 0.625f) < 1e-6f);
        for (int i = 0; i < T * K; i++)
            RIG_TRUE(r, isfinite(weight[i]));
        for (int64_t i = 0; i < T * E; i++)
            x.want.slot[i] = i % E < K ? (int32_t)(i % E) : -1;
        add_losses(r, &s, &x);
        float *loss = rig_room(r, MZ_F32, 3);
        const double ones[T * K] = {1, 1, 1, 1, 1, 1};
        x.args.dweight = rig_put_floats(r, ones, T * K);
        x.args.dlogits = rig_room(r, MZ_F32, T * E);
        RIG_OK(r, mz_router_losses(r->kernels, 0, &x.args, loss, workspace));
        RIG_OK(r, mz_router_backward(r->kernels, 0, &x.args, workspace));
        const double *dl = rig_values(r, MZ_F32, x.args.dlogits);
        for (int i = 0; i < T * E; i++)
            RIG_TRUE(r, isfinite(dl[i]));
        RIG_TRUE(r, isfinite(rig_floats(r, loss)[0]));
    }
}

/* ---- NaN ----------------------------------------------------------------------------------------
 */

enum { NAN_T = 4, NAN_E = 40, NAN_K = 3 };

/* Four tokens with few numbers above 0 among NaNs. */
static void set_nans(rig *r, routed *x) {
    for (int i = 0; i < NAN_T * NAN_E; i++)
        x->logits[i] = i < NAN_E ? -5 : NAN;
    x->logits[0] = NAN;
    x->logits[2] = 3;
    x->logits[33] = 2;
    x->logits[2 * NAN_E + 4] = 1;
    x->logits[3 * NAN_E + 39] = 2;
    x->logits[3 * NAN_E + 38] = 1;
    x->args.logits = rig_put_floats(r, x->logits, NAN_T * NAN_E);
}

static void expect_experts(rig *r, const mz_router *a, const int32_t *want, int n) {
    const int32_t *expert = rig_get(r, a->expert);
    for (int i = 0; i < n; i++)
        if (expert[i] != want[i])
            rig_fail(r, "kind %d, pair %d: expert %d, not %d", (int)a->kind, i, (int)expert[i],
                     (int)want[i]);
}

/* Gradients of the logits, with the losses' or without. */
static const double *slopes(rig *r, mz_router *a, bool losses) {
    a->aux_factor = losses ? 0.3f : 0;
    a->z_factor = losses ? 0.2f : 0;
    a->dlogits = rig_room(r, MZ_F32, NAN_T * NAN_E);
    RIG_OK(r, mz_router_backward(r->kernels, 0, a,
                                 rig_workspace(r, mz_router_workspace(r->kernels, a))));
    return rig_values(r, MZ_F32, a->dlogits);
}

static const float *losses_of(rig *r, const mz_router *a) {
    float *loss = rig_room(r, MZ_F32, 3);
    RIG_OK(r, mz_router_losses(r->kernels, 0, a, loss,
                               rig_workspace(r, mz_router_workspace(r->kernels, a))));
    return rig_floats(r, loss);
}

/* A softmax depends on all logits, a sigmoid on its own one, and where they are normalised on the
 * chosen ones. The losses of either depend on all. */
static void fixed_nans(rig *r, mz_router_kind kind, bool normalize) {
    static const int32_t want[NAN_T * NAN_K] = {2, 33, 1, 0, 1, 2, 4, 0, 1, 39, 38, 0};
    const setting s = {
        .kind = kind, .tokens = NAN_T, .experts = NAN_E, .k = NAN_K, .normalize = normalize};
    routed x = prepare(r, &s, false);
    set_nans(r, &x);
    mz_router *a = &x.args;
    RIG_OK(r, mz_router_forward(r->kernels, 0, a,
                                rig_workspace(r, mz_router_workspace(r->kernels, a))));
    expect_experts(r, a, want, NAN_T * NAN_K);
    const bool sigmoid = kind == MZ_ROUTER_SIGMOID;
    const float *weight = rig_floats(r, a->weight);
    int64_t count[NAN_E] = {0};
    double ones[NAN_T * NAN_K], sum = 0;
    for (int i = 0; i < NAN_K; i++) /* of token 0, whose chosen are numbers */
        sum += 1 / (1 + exp(-x.logits[want[i]]));
    for (int i = 0; i < NAN_T * NAN_K; i++) {
        const double l = x.logits[i / NAN_K * NAN_E + want[i]];
        const double by = !normalize ? 1 : i < NAN_K ? sum : NAN;
        ones[i] = 1;
        count[want[i]]++;
        const double here = sigmoid ? 1.25 / (1 + exp(-l)) / by : NAN;
        if (!rig_same(weight[i], here, 2e-6))
            rig_fail(r, "kind %d, normalized %d: weight %d is %.9g, not %.9g", (int)kind, normalize,
                     i, (double)weight[i], here);
    }
    a->dweight = rig_put_floats(r, ones, NAN_T * NAN_K);
    a->count = rig_in(r, count, sizeof count);
    const double *alone = slopes(r, a, false), *with_losses = slopes(r, a, true);
    for (int i = 0; i < NAN_T * NAN_E; i++) {
        bool chosen = false;
        for (int k = 0; k < NAN_K; k++)
            chosen = chosen || want[i / NAN_E * NAN_K + k] == i % NAN_E;
        const bool spoilt = normalize && chosen && i >= NAN_E;
        RIG_TRUE(r, isnan(alone[i]) == (!sigmoid || isnan(x.logits[i]) || spoilt));
        RIG_TRUE(r, isnan(with_losses[i]));
    }
    const float *loss = losses_of(r, a);
    RIG_TRUE(r, isnan(loss[0]) && isnan(loss[1]) == !sigmoid);
    RIG_TRUE(r, fabsf(loss[2] - (float)NAN_K / NAN_E) < 1e-6f);
}

/* What is not active has neither weight nor gradient. */
static void variable_nans(rig *r, mz_router_kind kind, bool proxy_paper) {
    static const int32_t want[] = {2, 33, 4, 38, 39};
    static const int64_t want_begin[NAN_T + 1] = {0, 2, 2, 3, 5};
    static const double want_weight[] = {3, 2, 1, 1, 2};
    const setting s = {
        .kind = kind, .tokens = NAN_T, .experts = NAN_E, .k = NAN_K, .proxy_paper = proxy_paper};
    routed x = prepare(r, &s, false);
    set_nans(r, &x);
    mz_router *a = &x.args;
    RIG_OK(r, mz_router_forward(r->kernels, 0, a,
                                rig_workspace(r, mz_router_workspace(r->kernels, a))));
    expect_experts(r, a, want, 5);
    RIG_TRUE(r, memcmp(rig_get(r, a->token_begin), want_begin, sizeof want_begin) == 0);
    const float *weight = rig_floats(r, a->weight);
    int64_t count[NAN_E] = {0};
    const double ones[] = {1, 1, 1, 1, 1};
    for (int i = 0; i < 5; i++) {
        RIG_TRUE(r, rig_same(weight[i], 1.25 * want_weight[i], 2e-6));
        count[want[i]]++;
    }
    a->dweight = rig_put_floats(r, ones, 5);
    a->count = rig_in(r, count, sizeof count);
    a->balance_mix = 0.4f;
    double zeros[NAN_E] = {0};
    a->dbias = rig_put_floats(r, zeros, NAN_E);
    a->dgain = rig_put_floats(r, zeros, NAN_E);
    const double *dl = slopes(r, a, true);
    const float *bias = rig_floats(r, a->dbias), *gain = rig_floats(r, a->dgain);
    for (int i = 0; i < NAN_T * NAN_E; i++)
        RIG_TRUE(r, isfinite(dl[i]) && isfinite(bias[i % NAN_E]) && isfinite(gain[i % NAN_E]));
    const float *loss = losses_of(r, a);
    RIG_TRUE(r, isfinite(loss[0]) && fabsf(loss[2] - 5.0f / (NAN_T * NAN_E)) < 1e-6f);
}

/* NaN ranks last, with negative infinity: as many experts as there should be, each once, the same
 * on every backend. */
static void check_not_numbers(rig *r) {
    for (int normalize = 0; normalize < 2; normalize++) {
        fixed_nans(r, MZ_ROUTER_SOFTMAX, normalize);
        fixed_nans(r, MZ_ROUTER_SIGMOID, normalize);
        fixed_nans(r, MZ_ROUTER_AOE, true);
        variable_nans(r, MZ_ROUTER_RELU, false);
        variable_nans(r, MZ_ROUTER_ROUTING_FREE, normalize);
    }
}

static void grouped(rig *r, setting s, const double *logits, const double *bias,
                    const int32_t *want) {
    s.kind = MZ_ROUTER_SIGMOID;
    routed x = prepare(r, &s, false);
    x.args.logits = rig_put_floats(r, logits, s.tokens * s.experts);
    x.args.bias = bias ? rig_put_floats(r, bias, s.experts) : NULL;
    RIG_OK(r, mz_router_forward(r->kernels, 0, &x.args,
                                rig_workspace(r, mz_router_workspace(r->kernels, &x.args))));
    expect_experts(r, &x.args, want, (int)s.tokens * s.k);
}

/* Groups with two numbers come before those with one, and these before those with none. */
static void check_groups_of_nans(rig *r) {
    const double N = NAN;
    grouped(r, (setting){.tokens = 4, .experts = 8, .k = 2, .n_group = 4, .topk_group = 2},
            (double[]){N, N, 0.5, N,  N, N, N, 1,  /* groups 3 and 1 have numbers */
                       N, 3, -2,  -1, N, N, 0, -3, /* groups 3 and 1 have two */
                       1, 2, N,   N,  3, N, N, N,  /* group 0 has two, group 2 one */
                       N, N, N,   N,  N, N, N, N},
            NULL, (int32_t[]){7, 2, 6, 3, 4, 1, 0, 1});
    grouped(r, (setting){.tokens = 1, .experts = 6, .k = 2, .n_group = 6, .topk_group = 2},
            (double[]){N, 1, N, 3, 2, N}, NULL, (int32_t[]){3, 4});
    /* A bias without bounds beside a NaN makes no NaN of its group. */
    grouped(r, (setting){.tokens = 1, .experts = 4, .k = 1, .n_group = 2, .topk_group = 1},
            (double[]){1, N, 2, 3}, (double[]){INFINITY, 0, 0, 0}, (int32_t[]){3});
}

/* A row with a NaN is NaN, one with an infinity 0 but there; the others go on. */
static void check_norms_of_nans(rig *r) {
    enum { ROWS = 4, R = 24 };
    for (int type = MZ_F32; type <= MZ_BF16; type++) {
        double *z = rig_normals(r, (mz_dtype)type, ROWS * R, 1);
        z[R + 5] = NAN;
        z[2 * R + 7] = -INFINITY;
        const double one[ROWS] = {1, 1, 1, 1};
        const void *in = rig_put(r, (mz_dtype)type, z, ROWS * R);
        float *norm = rig_room(r, MZ_F32, ROWS), *slope = rig_put_floats(r, one, ROWS);
        void *dz = rig_room(r, (mz_dtype)type, ROWS * R);
        RIG_OK(r, mz_gate_norms(r->kernels, 0, (mz_dtype)type, in, 2, 2, R, norm));
        RIG_OK(r,
               mz_gate_norms_backward(r->kernels, 0, (mz_dtype)type, in, norm, slope, 2, 2, R, dz));
        const double *got = rig_values(r, (mz_dtype)type, dz);
        for (int i = 0; i < ROWS * R; i++) {
            const double size = sqrt(ref_dot(z + i / R * R, z + i / R * R, R));
            RIG_TRUE(r, rig_same(got[i], z[i] / size, 0x1p-8));
        }
    }
}

static void check_lambda(rig *r) {
    /* Growth from 1e-10 by 2 %: 1163 updates to the cap of 1 (spec 2.5). */
    float lambda = 1e-10f;
    int updates = 0;
    for (; lambda < 1 && updates < 2000; updates++)
        lambda = mz_adapt_lambda(lambda, 0.02f, 0.9f, 0.25f, 1);
    RIG_TRUE(r, updates == 1163 && lambda == 1);
    RIG_TRUE(r, mz_adapt_lambda(0.5f, 0.02f, 0.25f, 0.25f, 1) == 0.5f);
    RIG_TRUE(r, fabsf(mz_adapt_lambda(0.5f, 0.02f, 0.1f, 0.25f, 1) - 0.5f / 1.02f) < 1e-7f);
    RIG_TRUE(r, fabsf(mz_adapt_lambda(3, 0.2f, 0.3f, 0.25f, INFINITY) - 3.6f) < 1e-6f);
    RIG_TRUE(r, isnan(mz_adapt_lambda(NAN, 0.02f, 0.3f, 0.25f, 1)));
    RIG_TRUE(r, isnan(mz_adapt_lambda(0.5f, 0.02f, NAN, 0.25f, 1)));
}

const check checks_of_routers[] = {{"forward", check_forward},
                                   {"losses", check_losses},
                                   {"gradients", check_gradients},
                                   {"extremes", check_extremes},
                                   {"not numbers", check_not_numbers},
                                   {"groups of not numbers", check_groups_of_nans},
                                   {"norms of not numbers", check_norms_of_nans},
                                   {"lambda", check_lambda},
                                   {NULL, NULL}};
