/* Routers. Tokens are independent but for the losses' means over tokens, which are summed in blocks
 * of tokens that follow from their number alone. Formulas: kernels.h and
 * moe-variants-and-optimizers.md sections 2 to 5. */
#include "kernels/host/host.h"
#include "kernels/settings.h"

#include <stdlib.h>

/* ROWS: probabilities, ranks, and groups, which are two floats each. */
enum { BLOCK_TOKENS = 256, BLOCKS_MOST = 256, ROWS = 4 };

typedef struct routing {
    const mz_router *args;
    int64_t blocks, block;
    float *row;         /* [threads][ROWS][E] of one token */
    double *mean;       /* [blocks][E + LOSS_SUMS] */
    int64_t *count;     /* [tokens + 1] active pairs before each token (variable kinds) */
    float *bias, *gain; /* [blocks][E] gradients */
} routing;

/* Sums behind the columns of `mean`: logsumexp^2, products of token balance, active pairs. */
enum { SUM_Z, SUM_TOKENS, SUM_ACTIVE, LOSS_SUMS };

static int64_t blocks_of(int64_t tokens) {
    const int64_t blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    return blocks < 1 ? 1 : blocks < BLOCKS_MOST ? blocks : BLOCKS_MOST;
}

static size_t place(routing *r, const mz_kernels *k, const mz_router *a, char *workspace) {
    const size_t E = (size_t)a->experts, threads = (size_t)mz_pool_threads(mz_host_of(k)->pool);
    r->args = a;
    r->blocks = blocks_of(a->tokens);
    r->block = (a->tokens + r->blocks - 1) / r->blocks;
    const size_t blocks = (size_t)r->blocks;
    size_t used = 0;
    r->mean = mz_take(workspace, &used, sizeof(double) * blocks * (E + LOSS_SUMS));
    r->row = mz_take(workspace, &used, sizeof(float) * threads * ROWS * E);
    r->bias = mz_take(workspace, &used, sizeof(float) * blocks * E);
    r->gain = mz_take(workspace, &used, sizeof(float) * blocks * E);
    r->count = mz_take(workspace, &used,
                       mz_router_is_variable(a) ? sizeof(int64_t) * ((size_t)a->tokens + 1) : 0);
    return used;
}

size_t mz_host_router_workspace(const mz_kernels *k, const mz_router *a) {
    routing r;
    return place(&r, k, a, NULL);
}

static int64_t block_end(const routing *r, int64_t block) {
    const int64_t end = (block + 1) * r->block;
    return end < r->args->tokens ? end : r->args->tokens;
}

/* ---- one token ----------------------------------------------------------------------------------
 */

/* p = softmax(l); returns log of the sum of exponentials. */
static float softmax(const float *l, int32_t n, float *p) {
    float most = l[0], sum = 0;
    for (int32_t e = 1; e < n; e++)
        most = l[e] > most ? l[e] : most;
    for (int32_t e = 0; e < n; e++) {
        p[e] = expf(l[e] - most);
        sum += p[e];
    }
    for (int32_t e = 0; e < n; e++)
        p[e] /= sum;
    return most + logf(sum);
}

/* The k largest of `value`, best first, ties to the lower index; negative infinity (and NaN) is
 * never chosen while there is anything else. */
static void choose(const float *value, int32_t n, int32_t k, int32_t *chosen) {
    for (int32_t count = 0, e = 0; e < n; e++) {
        const float mine = mz_router_rank(value[e]);
        if (count == k && !(mine > mz_router_rank(value[chosen[k - 1]])))
            continue;
        int32_t at = count < k ? count++ : k - 1;
        for (; at > 0 && mine > mz_router_rank(value[chosen[at - 1]]); at--)
            chosen[at] = chosen[at - 1];
        chosen[at] = e;
    }
}

/* Leaves the experts of the topk_group best groups; group: [n_group]. */
static void keep_groups(const mz_router *a, float *value, mz_group *group) {
    const int32_t size = a->experts / a->n_group;
    for (int32_t g = 0; g < a->n_group; g++)
        group[g] = mz_group_of(value + g * size, size);
    for (int32_t g = 0; g < a->n_group; g++) {
        int32_t better = 0;
        for (int32_t other = 0; other < a->n_group; other++)
            better += mz_group_precedes(group[other], other, group[g], g);
        for (int32_t i = 0; better >= a->topk_group && i < size; i++)
            value[g * size + i] = -INFINITY;
    }
}

/* Probabilities p of a token: softmax, or sigmoid values. Returns logsumexp (softmax). */
static float probabilities(const mz_router *a, int64_t token, float *p) {
    const float *l = a->logits + token * a->experts;
    if (mz_router_is_softmax(a))
        return softmax(l, a->experts, p);
    for (int32_t e = 0; e < a->experts; e++)
        p[e] = mz_sigmoid(l[e]);
    return 0;
}

/* A sum of sigmoids to divide by, bounded away from 0. */
static float sum_of_values(const float *p, int32_t n) {
    float sum = 0;
    for (int32_t e = 0; e < n; e++)
        sum += p[e];
    return mz_at_least(sum, MZ_SUM_LEAST);
}

static void forward_token(const mz_router *a, int64_t token, float *scratch) {
    float *p = scratch, *value = p + a->experts;
    int32_t *chosen = a->expert + token * a->k;
    float *weight = a->weight + token * a->k, sum = 0;
    probabilities(a, token, p);
    /* Softmax keeps the order of the logits, which have no rounding ties of their own. */
    const float *by = a->logits + token * a->experts;
    if (a->kind == MZ_ROUTER_SIGMOID) {
        for (int32_t e = 0; e < a->experts; e++)
            value[e] = mz_router_rank(p[e] + (a->bias ? a->bias[e] : 0));
        if (mz_router_is_grouped(a))
            keep_groups(a, value, (mz_group *)(void *)(value + a->experts));
        by = value;
    }
    choose(by, a->experts, a->k, chosen);
    for (int32_t i = 0; i < a->k; i++)
        sum += p[chosen[i]];
    const float factor =
        a->scale / (mz_router_is_normalized(a) ? mz_at_least(sum, MZ_SUM_LEAST) : 1);
    for (int32_t i = 0; i < a->k; i++)
        weight[i] = p[chosen[i]] * factor;
}

/* Of the variable kinds: the weight of (token, expert), 0 where it is not active. */
static float active_weight(const mz_router *a, int64_t token, int32_t e) {
    const float x = a->logits[token * a->experts + e];
    if (a->kind == MZ_ROUTER_RELU)
        return x > 0 ? x : 0;
    const float s = (a->gain ? a->gain[e] : 1) * x - (a->bias ? a->bias[e] : 0);
    return s >= a->theta && s > 0 ? s : 0;
}

/* ---- forward ------------------------------------------------------------------------------------
 */

static void forward_block(void *argument, int64_t block, int32_t thread) {
    const routing *r = argument;
    const mz_router *a = r->args;
    for (int64_t t = block * r->block; t < block_end(r, block); t++)
        forward_token(a, t, r->row + (int64_t)thread * ROWS * a->experts);
}

static void count_block(void *argument, int64_t block, int32_t thread) {
    (void)thread;
    const routing *r = argument;
    const mz_router *a = r->args;
    for (int64_t t = block * r->block; t < block_end(r, block); t++) {
        r->count[t] = 0;
        for (int32_t e = 0; e < a->experts; e++)
            r->count[t] += active_weight(a, t, e) > 0;
    }
}

static void list_block(void *argument, int64_t block, int32_t thread) {
    (void)thread;
    const routing *r = argument;
    const mz_router *a = r->args;
    for (int64_t t = block * r->block; t < block_end(r, block); t++) {
        int64_t pair = a->token_begin[t];
        for (int32_t e = 0; e < a->experts; e++) {
            const float w = active_weight(a, t, e);
            if (w > 0) {
                a->expert[pair] = e;
                a->weight[pair++] = w * a->scale;
            }
        }
    }
}

mz_kstatus mz_host_router_forward(mz_kernels *k, mz_kstream stream, const mz_router *a,
                                  void *workspace) {
    (void)stream;
    routing r;
    place(&r, k, a, workspace);
    mz_pool *pool = mz_host_of(k)->pool;
    if (!mz_router_is_variable(a)) {
        mz_pool_run(pool, forward_block, &r, r.blocks);
        return MZ_K_OK;
    }
    mz_pool_run(pool, count_block, &r, r.blocks);
    a->token_begin[0] = 0;
    for (int64_t t = 0; t < a->tokens; t++)
        a->token_begin[t + 1] = a->token_begin[t] + r.count[t];
    mz_pool_run(pool, list_block, &r, r.blocks);
    return MZ_K_OK;
}

/* ---- losses -------------------------------------------------------------------------------------
 * Sums over the tokens of a block, then over blocks in order. For the fixed kinds the columns hold
 * sums of p (sigmoid: divided by the token's sum); for the variable ones sums of G. */

/* G of the losses: the weight of active pairs, or as the paper has it also below the threshold. */
static float proxy_of(const mz_router *a, int64_t token, int32_t e) {
    const float w = active_weight(a, token, e);
    if (w > 0 || a->kind == MZ_ROUTER_RELU || !a->proxy_paper)
        return w;
    const float x = a->logits[token * a->experts + e];
    const float s = (a->gain ? a->gain[e] : 1) * x - (a->bias ? a->bias[e] : 0);
    return s > 0 ? s : 0;
}

static float share_of(const mz_router *a, int64_t token) {
    if (a->token_share)
        return a->token_share[token];
    return (float)(a->token_begin[token + 1] - a->token_begin[token]) / (float)a->experts;
}

static void sum_token(const mz_router *a, int64_t t, float *p, double *mean) {
    if (mz_router_is_variable(a)) {
        double sum = 0;
        for (int32_t e = 0; e < a->experts; e++) {
            const float g = proxy_of(a, t, e);
            mean[e] += g;
            sum += g;
        }
        mean[a->experts + SUM_TOKENS] += share_of(a, t) * sum / a->experts;
        mean[a->experts + SUM_ACTIVE] += (double)(a->token_begin[t + 1] - a->token_begin[t]);
        return;
    }
    const double lse = probabilities(a, t, p);
    const double sum = mz_router_is_softmax(a) ? 1 : sum_of_values(p, a->experts);
    for (int32_t e = 0; e < a->experts; e++)
        mean[e] += p[e] / sum;
    mean[a->experts + SUM_Z] += lse * lse;
    mean[a->experts + SUM_ACTIVE] += a->k;
}

static void sum_block(void *argument, int64_t block, int32_t thread) {
    const routing *r = argument;
    const mz_router *a = r->args;
    double *mean = r->mean + block * (a->experts + LOSS_SUMS);
    memset(mean, 0, sizeof *mean * (size_t)(a->experts + LOSS_SUMS));
    for (int64_t t = block * r->block; t < block_end(r, block); t++)
        sum_token(a, t, r->row + (int64_t)thread * ROWS * a->experts, mean);
}

static double balance_loss(const mz_router *a, const double *mean) {
    const double T = (double)(a->tokens > 0 ? a->tokens : 1), E = a->experts;
    double sum = 0;
    for (int32_t e = 0; e < a->experts; e++)
        sum += mean[e] * (double)a->count[e];
    if (a->kind == MZ_ROUTER_RELU)
        return sum * E / (T * T * a->k);
    if (a->kind != MZ_ROUTER_ROUTING_FREE)
        return E * sum / (T * T * a->k);
    const double pool = a->pool_experts > 0 ? a->pool_experts : E;
    const double experts = sum / (T * T) / pool, tokens = mean[a->experts + SUM_TOKENS] / T;
    return a->balance_mix * experts + (1 - a->balance_mix) * tokens * (E / pool);
}

mz_kstatus mz_host_router_losses(mz_kernels *k, mz_kstream stream, const mz_router *a, float *loss,
                                 void *workspace) {
    (void)stream;
    routing r;
    place(&r, k, a, workspace);
    mz_pool_run(mz_host_of(k)->pool, sum_block, &r, r.blocks);
    const int64_t width = a->experts + LOSS_SUMS;
    for (int64_t b = 1; b < r.blocks; b++)
        for (int64_t i = 0; i < width; i++)
            r.mean[i] += r.mean[b * width + i];
    const double T = (double)(a->tokens > 0 ? a->tokens : 1);
    loss[0] = a->aux_factor * (float)balance_loss(a, r.mean);
    loss[1] = a->z_factor * (float)(r.mean[a->experts + SUM_Z] / T);
    loss[2] = (float)(r.mean[a->experts + SUM_ACTIVE] / (T * a->experts));
    return MZ_K_OK;
}

/* ---- backward -----------------------------------------------------------------------------------
 */

static float pair_gradient(const mz_router *a, int64_t pair) {
    return a->keep && !a->keep[pair] ? 0 : a->dweight[pair];
}

/* dp of the chosen experts from dweight: weights are scale * p, or scale * p / their sum. */
static void weight_gradients(const mz_router *a, int64_t token, const float *p, float *dp) {
    const int32_t *chosen = a->expert + token * a->k;
    float sum = 0, mixed = 0;
    for (int32_t i = 0; i < a->k; i++)
        sum += p[chosen[i]];
    sum = mz_at_least(sum, MZ_SUM_LEAST);
    for (int32_t i = 0; mz_router_is_normalized(a) && i < a->k; i++)
        mixed += p[chosen[i]] / sum * pair_gradient(a, token * a->k + i);
    for (int32_t i = 0; i < a->k; i++) {
        const float dw = pair_gradient(a, token * a->k + i);
        dp[chosen[i]] += mz_router_is_normalized(a) ? a->scale * (dw - mixed) / sum : a->scale * dw;
    }
}

static void backward_softmax(const mz_router *a, const float *p, const float *dp, float lse,
                             float *dl) {
    const float T = (float)a->tokens;
    float mixed = 0;
    for (int32_t e = 0; e < a->experts; e++)
        mixed += p[e] * dp[e];
    for (int32_t e = 0; e < a->experts; e++)
        dl[e] = p[e] * (dp[e] - mixed) + 2 * a->z_factor * lse * p[e] / T;
}

static void backward_sigmoid(const mz_router *a, const float *p, const float *dp, float aux,
                             float *dl) {
    /* The balance loss sees p / sum p. */
    const float sum = sum_of_values(p, a->experts);
    float mixed = 0;
    for (int32_t e = 0; aux != 0 && e < a->experts; e++)
        mixed += p[e] / sum * aux * (float)a->count[e];
    for (int32_t e = 0; e < a->experts; e++) {
        const float loss = aux != 0 ? (aux * (float)a->count[e] - mixed) / sum : 0;
        dl[e] = (dp[e] + loss) * p[e] * (1 - p[e]);
    }
}

static void backward_token(const mz_router *a, int64_t token, float *scratch) {
    float *p = scratch, *dp = p + a->experts, *dl = a->dlogits + token * a->experts;
    const float T = (float)a->tokens;
    const float aux =
        a->aux_factor == 0 ? 0 : a->aux_factor * (float)a->experts / (T * T * (float)a->k);
    const float lse = probabilities(a, token, p);
    memset(dp, 0, sizeof *dp * (size_t)a->experts);
    weight_gradients(a, token, p, dp);
    if (!mz_router_is_softmax(a)) {
        backward_sigmoid(a, p, dp, aux, dl);
        return;
    }
    for (int32_t e = 0; aux != 0 && e < a->experts; e++)
        dp[e] += aux * (float)a->count[e];
    backward_softmax(a, p, dp, lse, dl);
}

/* d loss / dG of (token, expert), where G counts. */
static float balance_slope(const mz_router *a, int64_t token, int32_t e) {
    const float T = (float)a->tokens, E = (float)a->experts;
    if (a->aux_factor == 0)
        return 0;
    const float experts = (float)a->count[e] / T;
    if (a->kind == MZ_ROUTER_RELU)
        return a->aux_factor * experts * E / (T * (float)a->k);
    const float pool = a->pool_experts > 0 ? (float)a->pool_experts : E;
    return a->aux_factor * (a->balance_mix * experts + (1 - a->balance_mix) * share_of(a, token)) /
           (pool * T);
}

static void backward_active(const mz_router *a, int64_t token, float *bias, float *gain) {
    const float *x = a->logits + token * a->experts;
    float *dl = a->dlogits + token * a->experts;
    int64_t pair = a->token_begin[token];
    for (int32_t e = 0; e < a->experts; e++) {
        const bool active = pair < a->token_begin[token + 1] && a->expert[pair] == e;
        float ds = active ? a->scale * pair_gradient(a, pair) : 0;
        if (active || proxy_of(a, token, e) > 0)
            ds += balance_slope(a, token, e);
        pair += active;
        if (a->kind == MZ_ROUTER_RELU) {
            dl[e] = ds;
            continue;
        }
        dl[e] = ds * (a->gain ? a->gain[e] : 1);
        bias[e] -= ds;
        gain[e] += ds == 0 ? 0 : ds * x[e]; /* what is not active may be NaN */
    }
}

static void backward_block(void *argument, int64_t block, int32_t thread) {
    const routing *r = argument;
    const mz_router *a = r->args;
    float *bias = r->bias + block * a->experts, *gain = r->gain + block * a->experts;
    memset(bias, 0, sizeof *bias * (size_t)a->experts);
    memset(gain, 0, sizeof *gain * (size_t)a->experts);
    for (int64_t t = block * r->block; t < block_end(r, block); t++) {
        if (mz_router_is_variable(a))
            backward_active(a, t, bias, gain);
        else
            backward_token(a, t, r->row + (int64_t)thread * ROWS * a->experts);
    }
}

mz_kstatus mz_host_router_backward(mz_kernels *k, mz_kstream stream, const mz_router *a,
                                   void *workspace) {
    (void)stream;
    routing r;
    place(&r, k, a, workspace);
    mz_pool_run(mz_host_of(k)->pool, backward_block, &r, r.blocks);
    for (int64_t b = 0; a->kind == MZ_ROUTER_ROUTING_FREE && b < r.blocks; b++)
        for (int32_t e = 0; e < a->experts; e++) {
            if (a->dbias)
                a->dbias[e] += r.bias[b * a->experts + e];
            if (a->dgain)
                a->dgain[e] += r.gain[b * a->experts + e];
        }
    return MZ_K_OK;
}

/* ---- norms of gates -----------------------------------------------------------------------------
 */

typedef struct gates {
    const mz_simd *simd;
    mz_dtype type;
    const void *z;
    const float *norm, *dnorm;
    int64_t r;
    float *out;
    void *dz;
} gates;

static void norms_range(void *argument, int64_t first, int64_t end) {
    const gates *g = argument;
    const int64_t bytes = g->r * (g->type == MZ_BF16 ? 2 : 4);
    for (int64_t i = first; i < end; i++)
        g->out[i] = sqrtf(g->simd->norm2(g->type, (const char *)g->z + i * bytes, g->r));
}

static void norms_back_range(void *argument, int64_t first, int64_t end) {
    const gates *g = argument;
    const int64_t bytes = g->r * (g->type == MZ_BF16 ? 2 : 4);
    for (int64_t i = first; i < end; i++) {
        const float factor = g->dnorm[i] / mz_at_least(g->norm[i], MZ_SUM_LEAST);
        const char *z = (const char *)g->z + i * bytes;
        g->simd->scale(g->type, (char *)g->dz + i * bytes, z, z, factor, g->r, false);
    }
}

mz_kstatus mz_host_gate_norms(mz_kernels *k, mz_kstream stream, mz_dtype type, const void *z,
                              int64_t tokens, int32_t experts, int64_t r, float *norm) {
    (void)stream;
    gates g = {.simd = mz_host_of(k)->simd, .type = type, .z = z, .r = r, .out = norm};
    mz_pool_range(mz_host_of(k)->pool, norms_range, &g, tokens * experts, 4 * r);
    return MZ_K_OK;
}

mz_kstatus mz_host_gate_norms_backward(mz_kernels *k, mz_kstream stream, mz_dtype type,
                                       const void *z, const float *norm, const float *dnorm,
                                       int64_t tokens, int32_t experts, int64_t r, void *dz) {
    (void)stream;
    gates g = {.simd = mz_host_of(k)->simd,
               .type = type,
               .z = z,
               .norm = norm,
               .dnorm = dnorm,
               .r = r,
               .dz = dz};
    mz_pool_range(mz_host_of(k)->pool, norms_back_range, &g, tokens * experts, 8 * r);
    return MZ_K_OK;
}
