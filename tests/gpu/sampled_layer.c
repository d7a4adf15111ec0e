/* Gates, routers, optimizers and the whole backward pass, as they were written at the size that was
 * timed, against double precision. */
#include "tests/gpu/sampled.h"

#include "tests/kernels/reference.h"

#include <math.h>
#include <string.h>

/* ---- gates --------------------------------------------------------------------------------------
 */

void check_gate_norms(probe *p) {
    const layer *l = p->l;
    const int64_t rows = l->shape.tokens * l->shape.experts, r = gate_rank(l);
    probe_poison(p, l->gate_norm, 4 * (size_t)rows);
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t row = probe_row(p, i, rows);
        const double *z = probe_values(p, MZ_BF16, l->gate_up, row * r, r);
        const double *got = probe_values(p, MZ_F32, l->gate_norm, row, 1);
        const double want = z ? sqrt(ref_dot(z, z, r)) : 0;
        if (got)
            probe_near(p, "norm", row, 0, *got, want, 2e-6 * want);
        probe_forget(p, copies);
    }
}

void check_gate_norms_backward(probe *p) {
    const layer *l = p->l;
    const int64_t rows = l->shape.tokens * l->shape.experts, r = gate_rank(l);
    probe_poison(p, l->dgate_up, 2 * (size_t)(rows * r));
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t row = probe_row(p, i, rows);
        const double *z = probe_values(p, MZ_BF16, l->gate_up, row * r, r);
        const double *dnorm = probe_values(p, MZ_F32, l->logits, row, 1);
        const double *got = probe_values(p, MZ_BF16, l->dgate_up, row * r, r);
        for (int64_t j = 0; j < r && z && dnorm && got; j++) {
            const double want = z[j] * *dnorm / sqrt(ref_dot(z, z, r));
            probe_near(p, "gradient", row, j, got[j], want, 0x1p-8 * fabs(want) + 1e-30);
        }
        probe_forget(p, copies);
    }
}

/* ---- routers ------------------------------------------------------------------------------------
 */

/* What one token's logits lead to; dense, as the reference has it. */
typedef struct routed {
    mz_router args;
    ref_router want;
} routed;

static routed route_token(probe *p, mz_router_kind kind, int64_t t) {
    const layer *l = p->l;
    const int32_t E = l->shape.experts;
    routed r = {.args = router_of(l, kind)};
    r.args.tokens = 1;
    r.want.logits = probe_values(p, MZ_F32, r.args.logits, t * E, E);
    r.want.bias = r.args.bias ? probe_values(p, MZ_F32, r.args.bias, 0, E) : NULL;
    r.want.weight = probe_room(p, sizeof(double) * (size_t)E);
    r.want.slot = probe_room(p, sizeof(int32_t) * (size_t)E);
    r.want.args = &r.args;
    if (probe_going(p))
        ref_route(&r.want);
    return r;
}

/* The same expert, or one whose weight fp32 does not tell from it. */
static void same_expert(probe *p, const routed *r, int64_t t, int slot, int32_t got) {
    const int32_t E = r->args.experts;
    if (got < 0 || got >= E) {
        probe_same(p, "expert", t, got, -1);
        return;
    }
    double want = 0;
    for (int32_t e = 0; e < E; e++)
        want = r->want.slot[e] == slot ? r->want.weight[e] : want;
    probe_near(p, "choice", t, slot, r->want.weight[got], want, 1e-6 * want);
}

static void fixed(probe *p, mz_router_kind kind) {
    const layer *l = p->l;
    const int32_t k = l->shape.k;
    probe_poison(p, l->chosen, 4 * (size_t)l->pairs);
    probe_poison(p, l->router_weight, 4 * (size_t)l->pairs);
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t t = probe_row(p, i, l->shape.tokens);
        routed r = route_token(p, kind, t);
        r.want.args = &r.args;
        const int32_t *expert = probe_bytes(p, l->chosen, 4 * (size_t)(t * k), 4 * (size_t)k);
        const double *weight = probe_values(p, MZ_F32, l->router_weight, t * k, k);
        for (int32_t j = 0; j < k && probe_going(p); j++) {
            same_expert(p, &r, t, j, expert[j]);
            if (probe_going(p))
                probe_near(p, "weight", t, j, weight[j], r.want.weight[expert[j]],
                           4e-6 * fabs(r.want.weight[expert[j]]));
        }
        probe_forget(p, copies);
    }
}

/* Gradients of the logits of a token whose pairs are given: softmax over the chosen, or sigmoid
 * over their sum. */
static void fixed_backward(probe *p, mz_router_kind kind) {
    const layer *l = p->l;
    const int32_t k = l->shape.k, E = l->shape.experts;
    probe_poison(p, l->dgate_up, 4 * (size_t)(l->shape.tokens * E));
    probe_run(p);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t t = probe_row(p, i, l->shape.tokens);
        const double *logit = probe_values(p, MZ_F32, l->logits, t * E, E);
        const double *d = probe_values(p, MZ_F32, l->score, t * k, k);
        const int32_t *expert = probe_bytes(p, l->chosen, 4 * (size_t)(t * k), 4 * (size_t)k);
        const double *got = probe_values(p, MZ_F32, l->dgate_up, t * E, E);
        double *want = probe_room(p, sizeof *want * (size_t)E), all = 0, mean = 0, size = 0;
        const double scale = (double)router_of(l, kind).scale;
        const bool sigmoid = kind == MZ_ROUTER_SIGMOID;
        for (int32_t j = 0; j < k && probe_going(p); j++) {
            const double x = logit[expert[j]], q = sigmoid ? 1 / (1 + exp(-x)) : exp(x);
            all += q;
            mean += q * d[j];
            size = fmax(size, fabs(d[j]));
        }
        for (int32_t j = 0; j < k && probe_going(p); j++) {
            const double x = logit[expert[j]], q = sigmoid ? 1 / (1 + exp(-x)) : exp(x);
            want[expert[j]] = scale * q / all * (d[j] - mean / all) * (sigmoid ? 1 - q : 1);
        }
        for (int32_t e = 0; e < E && probe_going(p); e++)
            probe_near(p, "gradient", t, e, got[e], want[e], 4e-6 * size * scale);
        probe_forget(p, copies);
    }
}

/* The lists' lengths add up to all active pairs; drawn tokens' lists are right. */
static void listed(probe *p, mz_router_kind kind) {
    const layer *l = p->l;
    const int64_t T = l->shape.tokens;
    const int32_t E = l->shape.experts;
    probe_poison(p, l->token_begin, 8 * (size_t)(T + 1));
    probe_poison(p, l->listed, 4 * (size_t)(T * E));
    probe_poison(p, l->listed_weight, 4 * (size_t)(T * E));
    probe_run(p);
    const int64_t *begin = probe_integers(p, l->token_begin, T + 1);
    const mz_router args = router_of(l, kind);
    const double *logit = probe_values(p, MZ_F32, args.logits, 0, T * E);
    const double least = kind == MZ_ROUTER_RELU ? 0x1p-1074 : (double)args.theta;
    int64_t before = 0;
    for (int64_t t = 0; t <= T && probe_going(p); t++) {
        probe_same(p, "token_begin", t, begin[t], before);
        for (int32_t e = 0; e < E && t < T; e++)
            before += logit[t * E + e] >= least;
    }
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t t = probe_row(p, i, T), n = begin[t + 1] - begin[t];
        const int32_t *expert = probe_bytes(p, l->listed, 4 * (size_t)begin[t], 4 * (size_t)n);
        const double *weight = probe_values(p, MZ_F32, l->listed_weight, begin[t], n);
        int64_t at = 0;
        for (int32_t e = 0; e < E && probe_going(p); e++) {
            if (logit[t * E + e] < least)
                continue;
            probe_same(p, "listed expert", t, expert[at], e);
            probe_near(p, "weight", t, e, weight[at++], logit[t * E + e], 0);
        }
        probe_forget(p, copies);
    }
}

/* A listed pair's weight is its logit: the gradient goes straight through. */
static void listed_backward(probe *p, mz_router_kind kind) {
    const layer *l = p->l;
    const int64_t T = l->shape.tokens;
    const int32_t E = l->shape.experts;
    probe_poison(p, l->dgate_up, 4 * (size_t)(T * E));
    probe_run(p);
    const int64_t *begin = probe_integers(p, l->token_begin, T + 1);
    const double scale = (double)router_of(l, kind).scale;
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t t = probe_row(p, i, T), n = begin[t + 1] - begin[t];
        const int32_t *expert = probe_bytes(p, l->listed, 4 * (size_t)begin[t], 4 * (size_t)n);
        const double *d = probe_values(p, MZ_F32, l->gate_norm, begin[t], n);
        const double *got = probe_values(p, MZ_F32, l->dgate_up, t * E, E);
        double *want = probe_room(p, sizeof *want * (size_t)E);
        for (int64_t j = 0; j < n && probe_going(p); j++)
            want[expert[j]] = scale * d[j];
        for (int32_t e = 0; e < E && probe_going(p); e++)
            probe_near(p, "gradient", t, e, got[e], want[e], 1e-6 * fabs(want[e]));
        probe_forget(p, copies);
    }
}

void check_softmax(probe *p) {
    fixed(p, MZ_ROUTER_SOFTMAX);
}
void check_softmax_backward(probe *p) {
    fixed_backward(p, MZ_ROUTER_SOFTMAX);
}
void check_sigmoid(probe *p) {
    fixed(p, MZ_ROUTER_SIGMOID);
}
void check_sigmoid_backward(probe *p) {
    fixed_backward(p, MZ_ROUTER_SIGMOID);
}
void check_aoe(probe *p) {
    fixed(p, MZ_ROUTER_AOE);
}
void check_aoe_backward(probe *p) {
    fixed_backward(p, MZ_ROUTER_AOE);
}
void check_relu(probe *p) {
    listed(p, MZ_ROUTER_RELU);
}
void check_relu_backward(probe *p) {
    listed_backward(p, MZ_ROUTER_RELU);
}
void check_routing_free(probe *p) {
    listed(p, MZ_ROUTER_ROUTING_FREE);
}
void check_routing_free_backward(probe *p) {
    listed_backward(p, MZ_ROUTER_ROUTING_FREE);
}

void check_losses(probe *p) {
    const layer *l = p->l;
    const int32_t E = l->shape.experts;
    probe_poison(p, l->loss, 12);
    probe_run(p);
    const mz_router args = router_of(l, MZ_ROUTER_SOFTMAX);
    const double *logits = probe_values(p, MZ_F32, l->logits, 0, l->shape.tokens * E);
    const ref_router want = {
        .args = &args, .logits = logits, .count = probe_integers(p, l->count, E)};
    const double *got = probe_values(p, MZ_F32, l->loss, 0, 3);
    if (!got || !probe_going(p))
        return;
    probe_near(p, "balance", 0, 0, got[0], ref_balance(&want), 1e-5 * ref_balance(&want));
    probe_near(p, "z", 0, 0, got[1], ref_z(&want), 1e-5 * ref_z(&want));
    const double density = (double)l->shape.k / E;
    probe_near(p, "density", 0, 0, got[2], density, 1e-5 * density);
}

/* ---- optimizers ---------------------------------------------------------------------------------
 * One matrix of those of a step: its factors as a whole, and drawn values of the rest. */

typedef struct rule {
    mz_update_kind kind;
    bool momentum, factored;
    double beta1, beta2, eps; /* as fp32 holds them */
    double place;             /* of bf16: what a write may be off by, relative */
} rule;

typedef struct matrix {
    const rule *rule;
    int64_t rows, cols, z;
    mz_update args;
    ref_update at; /* before the step, then after it */
} matrix;

enum { STEP = 1000 }; /* operations.c's */
static const float RATE = 0x1p-6F;

static matrix read_matrix(probe *p, const rule *a, int64_t z) {
    const layer *l = p->l;
    const int64_t R = 2 * l->shape.intermediate, C = l->shape.hidden, n = R * C;
    matrix x = {.rule = a, .rows = R, .cols = C, .z = z};
    x.args = (mz_update){.kind = a->kind,
                         .matrices = 1,
                         .rows = R,
                         .cols = C,
                         .rate = RATE,
                         .beta1 = (float)a->beta1,
                         .beta2 = (float)a->beta2,
                         .eps = (float)a->eps,
                         .momentum = a->momentum,
                         .factored = a->factored,
                         .clip_rms = true};
    x.at.p = probe_values(p, MZ_BF16, l->parameters, z * n, n);
    x.at.g = probe_values(p, MZ_BF16, l->gradients, z * n, n);
    x.at.m = probe_values(p, MZ_F32, l->m, z * n, n);
    x.at.v = probe_values(p, MZ_F32, l->v, z * n, n);
    x.at.row = probe_values(p, MZ_F32, l->row, z * R, R);
    x.at.col = probe_values(p, MZ_F32, l->col, z * C, C);
    x.at.u = probe_room(p, sizeof(double) * (size_t)n);
    return x;
}

static void same_state(probe *p, const char *what, const float *memory, int64_t z, int64_t n,
                       const double *want) {
    const double *got = probe_values(p, MZ_F32, memory, z * n, n);
    double size = 0;
    for (int64_t i = 0; i < n && got; i++)
        size = fmax(size, fabs(want[i]));
    for (int64_t i = 0; i < n && got && probe_going(p); i++)
        probe_near(p, what, z, i, got[i], want[i], 1e-5 * fabs(want[i]) + 1e-6 * size);
}

/* Values as rounding may leave them; and it must not lean to one side. */
static void same_parameters(probe *p, const matrix *x) {
    const int64_t n = x->rows * x->cols;
    const double *got = probe_values(p, MZ_BF16, p->l->parameters, x->z * n, n);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n && got && probe_going(p); i++) {
        const double want = x->at.p[i], off = got[i] - want;
        probe_near(p, "parameter", x->z, i, got[i], want, x->rule->place * fabs(want) + 1e-7);
        sum += off;
        squares += off * off;
    }
    if (got)
        probe_near(p, "bias of rounding", x->z, 0, sum, 0, 6 * sqrt(squares));
}

/* The divisor of its clip. */
static double held_step(probe *p, const rule *a) {
    layer *l = p->l;
    matrix x = read_matrix(p, a, probe_below(p, l->shape.experts));
    const float rate = l->rate;
    l->rate = RATE;
    probe_run(p);
    l->rate = rate;
    if (!probe_going(p))
        return 0;
    x.at.args = &x.args;
    ref_step(&x.at, STEP);
    const int64_t n = x.rows * x.cols;
    if (a->momentum)
        same_state(p, "m", l->m, x.z, n, x.at.m);
    if (a->kind == MZ_UPDATE_ADAMW || (a->kind == MZ_UPDATE_SKEWADAM && !a->factored))
        same_state(p, "v", l->v, x.z, n, x.at.v);
    if (a->factored) {
        same_state(p, "row factor", l->row, x.z, x.rows, x.at.row);
        same_state(p, "column factor", l->col, x.z, x.cols, x.at.col);
    }
    same_parameters(p, &x);
    return x.at.divisor;
}

/* Gradients of the timed backward are small beside the floor of the root, and moments of so many
 * steps of one gradient are its squares: the clip has nothing to do. With larger ones and moments
 * that begin anew it has. */
static void held_steps(probe *p, const rule *a) {
    layer *l = p->l;
    const shape *s = &l->shape;
    const size_t rows = 2 * (size_t)s->intermediate, cols = (size_t)s->hidden;
    const size_t each = sizeof(float) * (size_t)s->experts;
    const size_t bytes = each / 2 * rows * cols;
    mz_kernels *k = l->kernels;
    /* The next operations' values are not those of such a step. */
    char *kept = l->wide_gradients;
    held_step(p, a);
    if (!probe_going(p))
        return;
    p->status = mz_kernels_copy(k, 0, MZ_COPY_INSIDE, kept, l->parameters, bytes);
    if (probe_going(p))
        p->status = mz_kernels_copy(k, 0, MZ_COPY_INSIDE, kept + bytes, l->gradients, bytes);
    if (probe_going(p))
        p->status = mz_kernels_copy(k, 0, MZ_COPY_INSIDE, l->gradients, l->parameters, bytes);
    if (probe_going(p) && a->factored)
        p->status = mz_kernels_zero(k, 0, l->row, each * rows);
    if (probe_going(p) && a->factored)
        p->status = mz_kernels_zero(k, 0, l->col, each * cols);
    if (probe_going(p) && !a->factored)
        p->status = mz_kernels_zero(k, 0, l->v, each * rows * cols);
    const double divisor = held_step(p, a);
    if (probe_going(p))
        probe_near(p, "clipped, 1: yes", 0, 0, divisor > 2, 1, 0);
    if (probe_going(p))
        p->status = mz_kernels_copy(k, 0, MZ_COPY_INSIDE, l->parameters, kept, bytes);
    if (probe_going(p))
        p->status = mz_kernels_copy(k, 0, MZ_COPY_INSIDE, l->gradients, kept + bytes, bytes);
}

static const double B09 = 0.9F, B099 = 0.99F, B0999 = 0.999F, TINY = 1e-8F;
void check_skewadam_factored(probe *p) {
    held_steps(p, &(rule){MZ_UPDATE_SKEWADAM, false, true, 0, B0999, TINY, 0x1p-7});
}
void check_skewadam_momentum(probe *p) {
    held_steps(p, &(rule){MZ_UPDATE_SKEWADAM, true, true, B09, B0999, TINY, 0x1p-7});
}
void check_skewadam_full(probe *p) {
    held_steps(p, &(rule){MZ_UPDATE_SKEWADAM, false, false, 0, B0999, TINY, 0x1p-7});
}
void check_adamw(probe *p) {
    held_step(p, &(rule){MZ_UPDATE_ADAMW, true, false, B09, B0999, TINY, 0x1p-8});
}
void check_adafactor(probe *p) {
    held_step(p, &(rule){MZ_UPDATE_ADAFACTOR, false, true, 0, 0, (double)1e-30F, 0x1p-8});
}
void check_lion(probe *p) {
    held_step(p, &(rule){MZ_UPDATE_LION, true, false, B09, B099, 0, 0x1p-8});
}

/* ---- Muon ---------------------------------------------------------------------------------------
 * Its step is a matrix polynomial: held by what it does to a random vector, which needs no product
 * of matrices. */

static void times(const matrix *x, const double *from, double *to, bool transposed) {
    const int64_t R = x->rows, C = x->cols;
    memset(to, 0, sizeof *to * (size_t)(transposed ? C : R));
    for (int64_t i = 0; i < R; i++) {
        const double *m = x->at.m + i * C;
        if (!transposed)
            to[i] = ref_dot(m, from, C);
        for (int64_t j = 0; j < C && transposed; j++)
            to[j] += m[j] * from[i];
    }
}

/* X of a level times a vector, or its transpose: aX + bAX + cAAX with A = XX^T of the level below.
 */
static void level_times(probe *p, const matrix *x, int level, const double *from, double *to,
                        bool transposed) {
    if (level == 0) {
        times(x, from, to, transposed);
        return;
    }
    const int copies = p->copies;
    const size_t R = (size_t)x->rows, C = (size_t)x->cols;
    double *y = probe_room(p, 8 * R), *ay = probe_room(p, 8 * R), *aay = probe_room(p, 8 * R);
    double *inner = probe_room(p, 8 * C);
    if (!inner)
        return;
    if (transposed)
        memcpy(y, from, 8 * R);
    else
        level_times(p, x, level - 1, from, y, false);
    level_times(p, x, level - 1, y, inner, true);
    level_times(p, x, level - 1, inner, ay, false);
    level_times(p, x, level - 1, ay, inner, true);
    level_times(p, x, level - 1, inner, aay, false);
    for (size_t i = 0; i < R; i++)
        y[i] = 3.4445 * y[i] - 4.7750 * ay[i] + 2.0315 * aay[i];
    if (transposed)
        level_times(p, x, level - 1, y, to, true);
    else
        memcpy(to, y, 8 * R);
    probe_forget(p, copies);
}

void check_muon(probe *p) {
    layer *l = p->l;
    const rule a = {MZ_UPDATE_MUON, true, false, (double)0.95F, 0, 0, 0};
    const int64_t matrices = l->shape.experts < 8 ? l->shape.experts : 8;
    const size_t values =
        (size_t)(matrices * 2 * l->shape.intermediate * l->shape.hidden); /* of all of them */
    /* A gradient of full rank: rounding grows with every iteration where a direction has none. */
    if (probe_going(p))
        p->status = mz_kernels_zero(l->kernels, 0, l->m, 4 * values);
    if (probe_going(p))
        p->status =
            mz_kernels_copy(l->kernels, 0, MZ_COPY_INSIDE, l->gradients, l->parameters, 2 * values);
    matrix x = read_matrix(p, &a, probe_below(p, matrices));
    const int64_t n = x.rows * x.cols;
    const float rate = l->rate;
    l->rate = 1; /* an orthogonal matrix has small values */
    probe_run(p);
    l->rate = rate;
    double *v = probe_room(p, 8 * (size_t)x.cols), *want = probe_room(p, 8 * (size_t)x.rows);
    const double *after = probe_values(p, MZ_BF16, l->parameters, x.z * n, n);
    if (!probe_going(p))
        return;
    for (int64_t i = 0; i < n; i++)
        x.at.m[i] = a.beta1 * x.at.m[i] + x.at.g[i];
    same_state(p, "m", l->m, x.z, n, x.at.m);
    const double norm = sqrt(ref_dot(x.at.m, x.at.m, n));
    for (int64_t i = 0; i < n; i++) {
        x.at.m[i] = ref_bf16(x.at.m[i] / norm);
        x.at.u[i] = x.at.p[i] - after[i];
    }
    for (int64_t j = 0; j < x.cols; j++)
        v[j] = probe_bits(p) % 2 ? 1 : -1;
    level_times(p, &x, 3, v, want, false);
    double off = 0, size = 0;
    for (int64_t i = 0; i < x.rows && probe_going(p); i++) {
        off += pow(ref_dot(x.at.u + i * x.cols, v, x.cols) - want[i], 2);
        size += want[i] * want[i];
    }
    probe_near(p, "step times a vector, share off", x.z, 0, sqrt(off / size), 0, 0.03);
}

/* ---- the whole backward pass --------------------------------------------------------------------
 */

typedef struct pass {
    bool resend;          /* gate and up are computed from x */
    const int64_t *order; /* [pairs] in expert order */
    const int64_t *place; /* [pairs] where each lies there */
    const uint8_t *keep;  /* [pairs] */
} pass;

static pass read_pass(probe *p, bool all, bool resend) {
    const layer *l = p->l;
    pass x = {resend, probe_integers(p, l->order, l->pairs),
              probe_integers(p, l->position, l->pairs), NULL};
    uint8_t *every = all ? probe_room(p, (size_t)l->pairs) : NULL;
    if (every)
        memset(every, 1, (size_t)l->pairs);
    x.keep = all ? every : chosen_pairs(p);
    return x;
}

/* Gate and up of a pair, saved or made again with its expert's matrix. */
static const double *gate_up_of(probe *p, const pass *x, int64_t pair, const double *input,
                                const double *up) {
    const layer *l = p->l;
    const int64_t wide = 2 * l->shape.intermediate, H = l->shape.hidden;
    if (!x->resend)
        return probe_values(p, MZ_BF16, l->gate_up, x->place[pair] * wide, wide);
    double *made = probe_room(p, sizeof *made * (size_t)wide);
    for (int64_t j = 0; j < wide && made; j++)
        made[j] = ref_dot(input, up + j * H, H);
    return made;
}

/* dx += what one pair gives its token. */
static void add_pair(probe *p, const pass *x, int64_t pair, double *dx) {
    const layer *l = p->l;
    const int64_t H = l->shape.hidden, I = l->shape.intermediate, t = pair / l->shape.k;
    const int64_t e = probe_expert(p, x->place[pair]);
    const int copies = p->copies;
    const double *input = probe_values(p, MZ_BF16, l->x, t * H, H);
    const double *dy = probe_values(p, MZ_BF16, l->dy, t * H, H);
    const double *weight = probe_values(p, MZ_F32, l->router_weight, pair, 1);
    const double *up = probe_values(p, MZ_BF16, l->parameters, e * 2 * I * H, 2 * I * H);
    const double *down = probe_values(p, MZ_BF16, l->down_parameters, e * H * I, H * I);
    const double *gate_up = probe_going(p) ? gate_up_of(p, x, pair, input, up) : NULL;
    double *dh = probe_room(p, sizeof *dh * (size_t)I);
    for (int64_t i = 0; i < H * I && probe_going(p); i++)
        dh[i % I] += *weight * dy[i / I] * down[i];
    for (int64_t i = 0; i < I && probe_going(p); i++) {
        const double u = gate_up[i], v = gate_up[I + i];
        const double du = dh[i] * v * ref_silu_slope(u), dv = dh[i] * ref_silu(u);
        for (int64_t h = 0; h < H; h++)
            dx[h] += du * up[i * H + h] + dv * up[(I + i) * H + h];
    }
    probe_forget(p, copies);
}

static void held_input(probe *p, const pass *x, int64_t t) {
    const layer *l = p->l;
    const int64_t H = l->shape.hidden;
    const int copies = p->copies;
    double *want = probe_room(p, sizeof *want * (size_t)H), off = 0, size = 0;
    const double *got = probe_values(p, MZ_BF16, l->dx, t * H, H);
    for (int32_t j = 0; j < l->shape.k && probe_going(p); j++)
        if (x->keep[t * l->shape.k + j])
            add_pair(p, x, t * l->shape.k + j, want);
    for (int64_t h = 0; h < H && probe_going(p); h++) {
        off += pow(got[h] - want[h], 2);
        size += want[h] * want[h];
    }
    if (probe_going(p)) /* a token of which nothing is kept has no gradient at all */
        probe_near(p, "dx: distance to the reference", t, 0, sqrt(off), 0, 0.015 * sqrt(size));
    p->checked += (int)H - 1;
    probe_forget(p, copies);
}

enum { PLACES = 4 };
typedef struct sums {
    int64_t expert, i, h[PLACES];                /* column i of the down-projection's matrix */
    double value[3][PLACES], squares[3][PLACES]; /* of down [h][i], up [i][h] and [I+i][h] */
} sums;

static void add_row(probe *p, const pass *x, int64_t pair, const double *up, const double *down,
                    sums *s) {
    const layer *l = p->l;
    const int64_t H = l->shape.hidden, I = l->shape.intermediate, t = pair / l->shape.k;
    const int copies = p->copies;
    const double *input = probe_values(p, MZ_BF16, l->x, t * H, H);
    const double *dy = probe_values(p, MZ_BF16, l->dy, t * H, H);
    const double *w = probe_values(p, MZ_F32, l->router_weight, pair, 1);
    const double *saved =
        x->resend ? NULL : probe_values(p, MZ_BF16, l->gate_up, x->place[pair] * 2 * I, 2 * I);
    if (probe_going(p)) {
        const double u = saved ? saved[s->i] : ref_dot(input, up + s->i * H, H);
        const double v = saved ? saved[I + s->i] : ref_dot(input, up + (I + s->i) * H, H);
        double dh = 0;
        for (int64_t h = 0; h < H; h++)
            dh += *w * dy[h] * down[h * I + s->i];
        for (int c = 0; c < PLACES; c++) {
            const double in = input[s->h[c]];
            const double term[3] = {*w * dy[s->h[c]] * ref_silu(u) * v,
                                    dh * v * ref_silu_slope(u) * in, dh * ref_silu(u) * in};
            for (int k = 0; k < 3; k++) {
                s->value[k][c] += term[k];
                s->squares[k][c] += term[k] * term[k];
            }
        }
    }
    probe_forget(p, copies);
}

/* Values of one expert's weights' gradients, of all its kept rows. */
static void held_weights(probe *p, const pass *x) {
    const layer *l = p->l;
    const int64_t H = l->shape.hidden, I = l->shape.intermediate;
    sums s = {.expert = probe_below(p, l->shape.experts), .i = probe_below(p, I)};
    const int64_t e = s.expert;
    for (int c = 0; c < PLACES; c++)
        s.h[c] = c < 2 ? c * (H - 1) : probe_below(p, H);
    const double *up = probe_values(p, MZ_BF16, l->parameters, e * 2 * I * H, 2 * I * H);
    const double *down = probe_values(p, MZ_BF16, l->down_parameters, e * H * I, H * I);
    for (int64_t i = l->begin_host[e]; i < l->begin_host[e + 1] && probe_going(p); i++)
        if (x->keep[x->order[i]])
            add_row(p, x, x->order[i], up, down, &s);
    for (int c = 0; c < PLACES && probe_going(p); c++) {
        const int64_t at[3] = {(e * H + s.h[c]) * I + s.i, (e * 2 * I + s.i) * H + s.h[c],
                               (e * 2 * I + I + s.i) * H + s.h[c]};
        for (int k = 0; k < 3 && probe_going(p); k++) {
            const double *got =
                probe_values(p, MZ_BF16, k ? l->gradients : l->down_gradients, at[k], 1);
            if (got) /* terms of the products before are rounded to bf16, one by one */
                probe_near(p, k ? "gradient of up" : "gradient of down", e, at[k], *got,
                           s.value[k][c],
                           0x1p-7 * fabs(s.value[k][c]) + 8 * 0x1p-8 * sqrt(s.squares[k][c]));
        }
    }
}

/* Pairs were chosen by the scores that they have, and as the quotas say. */
static void held_chosen(probe *p) {
    const layer *l = p->l;
    const int64_t H = l->shape.hidden;
    held_selection(p, l->score);
    for (int i = 0; i < SAMPLES && probe_going(p); i++) {
        const int copies = p->copies;
        const int64_t pair = probe_row(p, i, l->pairs);
        const double *dy = probe_values(p, MZ_BF16, l->dy, pair / l->shape.k * H, H);
        const double *w = probe_values(p, MZ_F32, l->router_weight, pair, 1);
        const double *hidden = probe_values(p, MZ_F32, l->norm, pair, 1);
        const double *got = probe_values(p, MZ_F32, l->score, pair, 1);
        const double want = got ? *w * *w * ref_dot(dy, dy, H) * *hidden : 0;
        if (got)
            probe_near(p, "score", pair, 0, *got, want, 4e-6 * want);
        probe_forget(p, copies);
    }
}

static void held_backward(probe *p, bool all, bool resend) {
    const layer *l = p->l;
    const size_t weights = 2 * (size_t)(l->shape.experts * l->shape.hidden * l->shape.intermediate);
    probe_poison(p, l->dx, 2 * (size_t)(l->shape.tokens * l->shape.hidden));
    probe_poison(p, l->gradients, 2 * weights);
    probe_poison(p, l->down_gradients, weights);
    if (!all) {
        poison_selection(p);
        probe_poison(p, l->score, sizeof *l->score * (size_t)l->pairs);
    }
    probe_run(p);
    if (!all)
        held_chosen(p);
    if (!probe_going(p))
        return;
    const pass x = read_pass(p, all, resend);
    for (int i = 0; i < 3 && probe_going(p); i++)
        held_input(p, &x, probe_row(p, i, l->shape.tokens));
    for (int i = 0; i < 2 && probe_going(p); i++) {
        const int copies = p->copies;
        held_weights(p, &x);
        probe_forget(p, copies);
    }
}

void check_backward_full(probe *p) {
    held_backward(p, true, false);
}
void check_backward_kept(probe *p) {
    held_backward(p, false, false);
}
void check_backward_resend(probe *p) {
    held_backward(p, false, true);
}
