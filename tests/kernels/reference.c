#include "tests/kernels/reference.h"

#include <math.h>
#include <stdlib.h>

/* ---- numbers ------------------------------------------------------------------------------------
 */

double ref_bf16(double x) {
    if (x == 0 || !isfinite(x))
        return x;
    int exponent;
    frexp(x, &exponent);
    if (exponent < -125)
        exponent = -125; /* denormal numbers share the smallest normal exponent */
    return ldexp(nearbyint(ldexp(x, 8 - exponent)), exponent - 8);
}

double ref_stored(mz_dtype type, double x) {
    return type == MZ_BF16 ? ref_bf16((float)x) : (double)(float)x;
}

void ref_philox(uint64_t seed, uint64_t a, uint32_t b, uint32_t c, uint32_t out[4]) {
    uint64_t counter[4] = {a & 0xffffffff, a >> 32, b, c};
    uint64_t key[2] = {seed & 0xffffffff, seed >> 32};
    for (int round = 0; round < 10; round++) {
        const uint64_t first = 0xD2511F53u * counter[0], second = 0xCD9E8D57u * counter[2];
        const uint64_t next[4] = {(second >> 32) ^ counter[1] ^ key[0], second & 0xffffffff,
                                  (first >> 32) ^ counter[3] ^ key[1], first & 0xffffffff};
        for (int i = 0; i < 4; i++)
            counter[i] = next[i];
        key[0] = (key[0] + 0x9E3779B9u) & 0xffffffff;
        key[1] = (key[1] + 0xBB67AE85u) & 0xffffffff;
    }
    for (int i = 0; i < 4; i++)
        out[i] = (uint32_t)counter[i];
}

double ref_draw(uint64_t seed, uint64_t pair) {
    uint32_t four[4];
    ref_philox(seed, pair, 0x70616972u, 0, four);
    return ((four[0] >> 8) + 1) * 0x1p-24;
}

uint32_t ref_element_bits(uint64_t seed, uint64_t tensor, uint64_t step, uint64_t element) {
    uint32_t stream[4], key[4];
    ref_philox(seed, tensor, step & 0xffffffff, (uint32_t)(step >> 32), stream);
    ref_philox(stream[0] + ((uint64_t)stream[1] << 32), element / 8192, stream[2], stream[3], key);
    const uint64_t factor[3] = {0xed5ad4bb, 0xac4c1b51, 0x31848bab}, mask[3] = {0, key[2], key[3]};
    const int shift[3] = {17, 11, 15};
    uint64_t x = (key[0] + element % 8192 / 2 * (key[1] | 1)) % 0x100000000;
    for (int i = 0; i < 3; i++)
        x = (x ^ (x >> shift[i]) ^ mask[i]) * factor[i] % 0x100000000;
    x ^= x >> 14;
    return (uint32_t)(element % 2 ? x / 65536 : x % 65536);
}

double ref_dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static double logistic(double x) {
    return 1 / (1 + exp(-x));
}

double ref_silu(double u) {
    return u * logistic(u);
}

double ref_silu_slope(double u) {
    const double s = logistic(u);
    return s + u * s * (1 - s);
}

/* ---- order --------------------------------------------------------------------------------------
 * Merging keeps equal values in their order. */

static void sort(const double *value, int64_t *order, int64_t *scratch, int64_t n) {
    if (n < 2)
        return;
    const int64_t half = n / 2;
    sort(value, order, scratch, half);
    sort(value, order + half, scratch, n - half);
    int64_t i = 0, j = half, to = 0;
    while (i < half && j < n)
        scratch[to++] = value[order[j]] > value[order[i]] ? order[j++] : order[i++];
    while (i < half)
        scratch[to++] = order[i++];
    while (j < n)
        scratch[to++] = order[j++];
    for (i = 0; i < n; i++)
        order[i] = scratch[i];
}

void ref_order(const double *value, int64_t n, int64_t *order) {
    int64_t *scratch = calloc((size_t)n + 1, sizeof *scratch);
    for (int64_t i = 0; i < n; i++)
        order[i] = i;
    if (scratch)
        sort(value, order, scratch, n);
    free(scratch);
}

/* ---- products -----------------------------------------------------------------------------------
 */

void ref_forward(int64_t m, int64_t n, int64_t k, const double *a, const double *w, double *c) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            c[i * n + j] = ref_dot(a + i * k, w + j * k, k);
}

void ref_dgrad(int64_t m, int64_t n, int64_t k, const double *a, const double *w, double *c) {
    for (int64_t i = 0; i < m * k; i++)
        c[i] = 0;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            for (int64_t x = 0; x < k; x++)
                c[i * k + x] += a[i * n + j] * w[j * k + x];
}

void ref_wgrad(int64_t m, int64_t n, int64_t k, const double *a, const double *c, double *w) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            for (int64_t x = 0; x < k; x++)
                w[j * k + x] += a[i * n + j] * c[i * k + x];
}

/* ---- routers ------------------------------------------------------------------------------------
 */

static double score_of(const ref_router *r, int64_t t, int32_t e) { /* routing-free's s */
    const double x = r->logits[t * r->args->experts + e];
    return (r->gain ? r->gain[e] : 1) * x - (r->bias ? r->bias[e] : 0);
}

/* p[e]: softmax, or sigmoid. Returns the logarithm of the sum of exponentials. */
static double probabilities(const ref_router *r, int64_t t, double *p) {
    const mz_router *a = r->args;
    const double *l = r->logits + t * a->experts;
    double sum = 0;
    for (int32_t e = 0; e < a->experts; e++)
        sum += p[e] = a->kind == MZ_ROUTER_SIGMOID ? logistic(l[e]) : exp(l[e]);
    for (int32_t e = 0; a->kind != MZ_ROUTER_SIGMOID && e < a->experts; e++)
        p[e] /= sum;
    return log(sum);
}

static void choose_fixed(ref_router *r, int64_t t, const double *p) {
    const mz_router *a = r->args;
    const int32_t E = a->experts, groups = a->kind == MZ_ROUTER_SIGMOID ? a->n_group : 1;
    const int32_t size = E / groups;
    double value[512], group[512];
    int64_t order[512];
    for (int32_t e = 0; e < E; e++)
        value[e] =
            a->kind == MZ_ROUTER_SIGMOID ? p[e] + (r->bias ? r->bias[e] : 0) : r->logits[t * E + e];
    for (int32_t g = 0; g < groups; g++) {
        ref_order(value + g * size, size, order);
        group[g] = value[g * size + order[0]] + (size > 1 ? value[g * size + order[1]] : 0);
    }
    ref_order(group, groups, order);
    for (int32_t i = a->kind == MZ_ROUTER_SIGMOID ? a->topk_group : 1; i < groups; i++)
        for (int32_t e = 0; e < size; e++)
            value[order[i] * size + e] = -INFINITY;
    ref_order(value, E, order);
    for (int32_t i = 0; i < a->k; i++)
        r->slot[t * E + order[i]] = i;
}

void ref_route(ref_router *r) {
    const mz_router *a = r->args;
    double p[512];
    for (int64_t i = 0; i < a->tokens * a->experts; i++)
        r->slot[i] = -1;
    int32_t listed = 0;
    for (int64_t t = 0; t < a->tokens; t++) {
        if (a->kind == MZ_ROUTER_RELU || a->kind == MZ_ROUTER_ROUTING_FREE) {
            for (int32_t e = 0; e < a->experts; e++) {
                const double s =
                    a->kind == MZ_ROUTER_RELU ? r->logits[t * a->experts + e] : score_of(r, t, e);
                const double least = a->kind == MZ_ROUTER_RELU ? 0 : a->theta;
                if (s >= least && s > 0)
                    r->slot[t * a->experts + e] = listed++;
            }
        } else {
            probabilities(r, t, p);
            choose_fixed(r, t, p);
        }
    }
    ref_weigh(r);
}

void ref_weigh(ref_router *r) {
    const mz_router *a = r->args;
    double p[512];
    for (int64_t t = 0; t < a->tokens; t++) {
        double chosen = 0;
        const bool fixed = a->kind != MZ_ROUTER_RELU && a->kind != MZ_ROUTER_ROUTING_FREE;
        const bool divided = a->kind == MZ_ROUTER_AOE ? !a->softmax_all : a->normalize;
        if (fixed)
            probabilities(r, t, p);
        for (int32_t e = 0; fixed && e < a->experts; e++)
            chosen += r->slot[t * a->experts + e] >= 0 ? p[e] : 0;
        for (int32_t e = 0; e < a->experts; e++) {
            double w = fixed                       ? p[e] / (divided ? chosen : 1)
                       : a->kind == MZ_ROUTER_RELU ? r->logits[t * a->experts + e]
                                                   : score_of(r, t, e);
            r->weight[t * a->experts + e] =
                r->slot[t * a->experts + e] >= 0 ? w * (double)a->scale : 0;
        }
    }
}

/* G of the losses: where the pair is active, or as the paper has it wherever s > 0. */
static double counted(const ref_router *r, int64_t t, int32_t e) {
    const mz_router *a = r->args;
    const bool active = r->slot[t * a->experts + e] >= 0;
    if (a->kind == MZ_ROUTER_RELU)
        return active ? r->logits[t * a->experts + e] : 0;
    const double s = score_of(r, t, e);
    return active || (a->proxy_paper && s > 0) ? s : 0;
}

static double balance_fixed(const ref_router *r) {
    const mz_router *a = r->args;
    const double T = (double)a->tokens;
    double p[512], loss = 0;
    for (int64_t t = 0; t < a->tokens; t++) {
        probabilities(r, t, p);
        double sum = 0;
        for (int32_t e = 0; e < a->experts; e++)
            sum += p[e];
        for (int32_t e = 0; e < a->experts; e++)
            loss += a->experts * (p[e] / sum / T) * (double)r->count[e] / (T * a->k);
    }
    return loss;
}

double ref_balance(const ref_router *r) {
    const mz_router *a = r->args;
    const double T = (double)a->tokens, E = a->experts;
    const double pool = a->pool_experts > 0 ? a->pool_experts : E;
    double by_expert = 0, by_token = 0;
    if (a->tokens == 0)
        return 0;
    if (a->kind != MZ_ROUTER_RELU && a->kind != MZ_ROUTER_ROUTING_FREE)
        return balance_fixed(r);
    for (int32_t e = 0; e < a->experts; e++) {
        double sum = 0;
        for (int64_t t = 0; t < a->tokens; t++)
            sum += counted(r, t, e);
        if (a->kind == MZ_ROUTER_RELU)
            by_expert += sum * (double)r->count[e] * E / (T * T * a->k);
        else
            by_expert += (double)r->count[e] / T * (sum / T) / pool;
    }
    if (a->kind == MZ_ROUTER_RELU)
        return by_expert;
    for (int64_t t = 0; t < a->tokens; t++) {
        double sum = 0, active = 0;
        for (int32_t e = 0; e < a->experts; e++) {
            sum += counted(r, t, e);
            active += r->slot[t * a->experts + e] >= 0;
        }
        by_token += (r->token_share ? r->token_share[t] : active / E) * (sum / pool) / T;
    }
    return (double)a->balance_mix * by_expert + (1 - (double)a->balance_mix) * by_token;
}

double ref_z(const ref_router *r) {
    double p[512], sum = 0;
    if (r->args->kind != MZ_ROUTER_SOFTMAX && r->args->kind != MZ_ROUTER_AOE)
        return 0;
    for (int64_t t = 0; t < r->args->tokens; t++)
        sum += pow(probabilities(r, t, p), 2) / (double)r->args->tokens;
    return sum;
}

/* ---- optimizers ---------------------------------------------------------------------------------
 */

/* As numpy's maximum: NaN stays. */
static double at_least(double x, double least) {
    return x < least ? least : x;
}

static void factored(ref_update *s, int64_t z, double beta2, double added, double least,
                     double floor) {
    const int64_t R = s->args->rows, C = s->args->cols;
    const double *g = s->g + z * R * C;
    double *row = s->row + z * R, *col = s->col + z * C, mean = 0;
    for (int64_t i = 0; i < R; i++) {
        double sum = 0;
        for (int64_t j = 0; j < C; j++)
            sum += g[i * C + j] * g[i * C + j] + added;
        row[i] = beta2 * row[i] + (1 - beta2) * sum / (double)C;
        mean += row[i] / (double)R;
    }
    for (int64_t j = 0; j < C; j++) {
        double sum = 0;
        for (int64_t i = 0; i < R; i++)
            sum += g[i * C + j] * g[i * C + j] + added;
        col[j] = beta2 * col[j] + (1 - beta2) * sum / (double)R;
    }
    for (int64_t i = 0; i < R; i++)
        for (int64_t j = 0; j < C; j++)
            s->u[(z * R + i) * C + j] /= sqrt(at_least(row[i] / at_least(mean, floor), least)) *
                                         sqrt(at_least(col[j], least));
}

static void clip(ref_update *s) {
    const mz_update *a = s->args;
    const int64_t each = s->args->rows * s->args->cols, all = s->args->matrices * each;
    const int64_t step = a->clip_tensor ? all : each;
    for (int64_t first = 0; first < all; first += step) {
        double sum = 0;
        for (int64_t i = first; i < first + step; i++)
            sum += s->u[i] * s->u[i];
        s->divisor = a->clip_rms ? at_least(sqrt(sum / (double)step), 1) : 1;
        for (int64_t i = first; i < first + step; i++)
            s->u[i] /= s->divisor;
    }
}

static void adaptive_update(ref_update *s, double t) {
    const mz_update *a = s->args;
    const int64_t n = s->args->matrices * s->args->rows * s->args->cols;
    const bool skew = a->kind == MZ_UPDATE_SKEWADAM;
    const double beta2 = skew ? (double)a->beta2 : 1 - pow(t, -0.8), eps = a->eps;
    const double added = skew ? 0 : eps, least = skew ? eps : 0, floor = skew ? 1e-15 : 0;
    for (int64_t i = 0; i < n; i++) {
        double base = s->g[i];
        if (skew && a->momentum)
            base = s->m[i] = (double)a->beta1 * s->m[i] + (1 - (double)a->beta1) * s->g[i];
        s->u[i] = base * (skew ? sqrt(1 - pow(beta2, t)) : 1) /
                  (skew && a->momentum ? 1 - pow((double)a->beta1, t) : 1);
    }
    if (s->args->cols > 1 && (!skew || a->factored)) {
        for (int64_t z = 0; z < s->args->matrices; z++)
            factored(s, z, beta2, added, least, floor);
    } else {
        for (int64_t i = 0; i < n; i++) {
            s->v[i] = beta2 * s->v[i] + (1 - beta2) * (s->g[i] * s->g[i] + added);
            s->u[i] /= sqrt(at_least(s->v[i], least));
        }
    }
    clip(s);
}

static void adamw_update(ref_update *s, double t) {
    const mz_update *a = s->args;
    const double b1 = a->beta1, b2 = a->beta2;
    for (int64_t i = 0; i < s->args->matrices * s->args->rows * s->args->cols; i++) {
        s->m[i] = b1 * s->m[i] + (1 - b1) * s->g[i];
        s->v[i] = b2 * s->v[i] + (1 - b2) * s->g[i] * s->g[i];
        s->u[i] =
            s->m[i] / (1 - pow(b1, t)) / (sqrt(s->v[i]) / sqrt(1 - pow(b2, t)) + (double)a->eps);
    }
}

static void lion_update(ref_update *s) {
    const double b1 = s->args->beta1, b2 = s->args->beta2;
    for (int64_t i = 0; i < s->args->matrices * s->args->rows * s->args->cols; i++) {
        const double c = b1 * s->m[i] + (1 - b1) * s->g[i];
        s->u[i] = isnan(c) ? c : (c > 0) - (c < 0);
        s->m[i] = b2 * s->m[i] + (1 - b2) * s->g[i];
    }
}

void ref_step(ref_update *s, int64_t t) {
    const mz_update *a = s->args;
    if (a->kind == MZ_UPDATE_ADAMW)
        adamw_update(s, (double)t);
    else if (a->kind == MZ_UPDATE_LION)
        lion_update(s);
    else
        adaptive_update(s, (double)t);
    for (int64_t i = 0; i < s->args->matrices * s->args->rows * s->args->cols; i++)
        s->p[i] = s->p[i] * (1 - (double)a->rate * (double)a->decay) - (double)a->rate * s->u[i];
}
