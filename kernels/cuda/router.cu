/* Routers: one warp per token, a lane for every 32nd expert. Formulas as the host's
 * (kernels/host/router.c). Sums over tokens (losses, gradients of biases and gains) go by blocks of
 * tokens that follow from their number alone, then over the blocks in order.
 *
 * Bytes beside each kernel: T tokens, E experts, P pairs. FLOPs do not count: some 10 a logit, k
 * comparisons of each to choose. */
#include "kernels/cuda/device.cuh"
#include "kernels/settings.h"

/* Tokens of a block, most blocks; sums behind the columns of the experts: logsumexp^2, products of
 * token balance, active pairs. */
enum { BLOCK_TOKENS = 256, BLOCKS_MOST = 256 };
enum { SUM_Z, SUM_TOKENS, SUM_ACTIVE, LOSS_SUMS };

typedef struct route_work {
    mz_router a;
    int64_t blocks, block;
    float *mean;        /* [blocks][E + LOSS_SUMS] */
    float *bias, *gain; /* [blocks][E] */
    int64_t *count;     /* [tokens] active pairs (variable kinds) */
    void *prefix;       /* scratch of the prefix sums */
} route_work;

__device__ static inline int64_t block_end(const route_work &w, int64_t block) {
    const int64_t end = (block + 1) * w.block;
    return end < w.a.tokens ? end : w.a.tokens;
}

__device__ static inline int lane_of() {
    return (int)threadIdx.x % 32;
}

__device__ static inline float warp_max(float v) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        const float other = __shfl_xor_sync(CU_FULL, v, apart);
        v = other > v ? other : v;
    }
    return v;
}

/* ---- one token, by one warp
 * ----------------------------------------------------------------------- p, value: [E] floats of
 * the warp in shared memory. */

/* Probabilities of the token in p; returns logsumexp (softmax). */
__device__ static inline float probabilities(const mz_router &a, int64_t token, float *p) {
    const float *l = a.logits + token * a.experts;
    if (!mz_router_is_softmax(&a)) {
        for (int32_t e = lane_of(); e < a.experts; e += 32)
            p[e] = mz_sigmoid(l[e]);
        __syncwarp();
        return 0;
    }
    float most = -INFINITY, sum = 0;
    for (int32_t e = lane_of(); e < a.experts; e += 32)
        most = l[e] > most ? l[e] : most;
    most = warp_max(most);
    for (int32_t e = lane_of(); e < a.experts; e += 32) {
        p[e] = expf(l[e] - most);
        sum += p[e];
    }
    sum = cu_warp_sum(sum);
    for (int32_t e = lane_of(); e < a.experts; e += 32)
        p[e] /= sum;
    __syncwarp();
    return most + logf(sum);
}

/* The best of what is left in value[0..n), where NaN marks what is taken: the largest, ties to the
 * lower index; in all lanes. */
__device__ static inline int32_t best_of(const float *value, int32_t n) {
    float most = -INFINITY;
    int32_t at = INT32_MAX;
    for (int32_t e = lane_of(); e < n; e += 32)
        if (value[e] > most || (at == INT32_MAX && value[e] == value[e])) {
            most = value[e];
            at = e;
        }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        const float other = __shfl_xor_sync(CU_FULL, most, apart);
        const int32_t index = __shfl_xor_sync(CU_FULL, at, apart);
        if (other > most || (other == most && index < at)) {
            most = other;
            at = index;
        }
    }
    return at; /* there is one: k is at most n */
}

/* Leaves the experts of the topk_group best groups; group: [n_group] in shared memory. */
__device__ static inline void keep_groups(const mz_router &a, float *value, mz_group *group) {
    const int32_t size = a.experts / a.n_group;
    for (int32_t g = lane_of(); g < a.n_group; g += 32)
        group[g] = mz_group_of(value + g * size, size);
    __syncwarp();
    for (int32_t g = lane_of(); g < a.n_group; g += 32) {
        int32_t better = 0;
        for (int32_t other = 0; other < a.n_group; other++)
            better += mz_group_precedes(group[other], other, group[g], g);
        for (int32_t i = 0; better >= a.topk_group && i < size; i++)
            value[g * size + i] = -INFINITY;
    }
    __syncwarp();
}

__device__ static inline void forward_token(const mz_router &a, int64_t token, float *p,
                                            float *value, mz_group *group) {
    const float *l = a.logits + token * a.experts;
    int32_t *chosen = a.expert + token * a.k;
    float *weight = a.weight + token * a.k, sum = 0;
    probabilities(a, token, p);
    for (int32_t e = lane_of(); e < a.experts; e += 32)
        value[e] =
            mz_router_rank(mz_router_is_softmax(&a) ? l[e] : p[e] + (a.bias ? a.bias[e] : 0.0f));
    __syncwarp();
    if (mz_router_is_grouped(&a))
        keep_groups(a, value, group);
    for (int32_t i = 0; i < a.k; i++) {
        const int32_t e = best_of(value, a.experts);
        sum += p[e];
        __syncwarp();
        if (lane_of() == 0) {
            chosen[i] = e;
            weight[i] = p[e];
            value[e] = NAN;
        }
        __syncwarp();
    }
    const float factor =
        a.scale / (mz_router_is_normalized(&a) ? mz_at_least(sum, MZ_SUM_LEAST) : 1.0f);
    for (int32_t i = lane_of(); i < a.k; i += 32)
        weight[i] *= factor;
    __syncwarp();
}

/* Of the variable kinds: the weight of (token, expert), 0 where it is not active. */
__device__ static inline float active_weight(const mz_router &a, int64_t token, int32_t e) {
    const float x = a.logits[token * a.experts + e];
    if (a.kind == MZ_ROUTER_RELU)
        return x > 0 ? x : 0;
    const float s = MZ_ADD(MZ_MUL(a.gain ? a.gain[e] : 1.0f, x), -(a.bias ? a.bias[e] : 0.0f));
    return s >= a.theta && s > 0 ? s : 0;
}

/* G of the losses: the weight of active pairs, or as the paper has it also below the threshold. */
__device__ static inline float proxy_of(const mz_router &a, int64_t token, int32_t e) {
    const float weight = active_weight(a, token, e);
    if (weight > 0 || a.kind == MZ_ROUTER_RELU || !a.proxy_paper)
        return weight;
    const float x = a.logits[token * a.experts + e];
    const float s = MZ_ADD(MZ_MUL(a.gain ? a.gain[e] : 1.0f, x), -(a.bias ? a.bias[e] : 0.0f));
    return s > 0 ? s : 0;
}

__device__ static inline float share_of(const mz_router &a, int64_t token) {
    if (a.token_share)
        return a.token_share[token];
    return (float)(a.token_begin[token + 1] - a.token_begin[token]) / (float)a.experts;
}

/* ---- forward ------------------------------------------------------------------------------------
 */

/* Probabilities, ranks, and groups, which are two floats each: rows of E floats of a token. */
__host__ __device__ static inline int forward_rows(const mz_router *a) {
    return mz_router_is_grouped(a) ? 4 : 2;
}

/* Bytes: 4 T E + 8 P. */
__global__ static void __launch_bounds__(CU_BLOCK) forward_kernel(mz_router a) {
    CU_DYN_SHARED(float, held);
    const int warps = (int)blockDim.x / 32, warp = (int)threadIdx.x / 32;
    float *p = held + (size_t)warp * forward_rows(&a) * (size_t)a.experts;
    for (int64_t t = (int64_t)blockIdx.x * warps + warp; t < a.tokens;
         t += (int64_t)gridDim.x * warps)
        forward_token(a, t, p, p + a.experts, (mz_group *)(p + 2 * a.experts));
}

/* Bytes: 4 T E + 8 T. */
__global__ static void __launch_bounds__(CU_BLOCK) count_kernel(route_work w) {
    for (int64_t t = cu_first_row<32>(); t < w.a.tokens; t += cu_row_step<32>()) {
        int n = 0;
        for (int32_t e = lane_of(); e < w.a.experts; e += 32)
            n += active_weight(w.a, t, e) > 0;
        n = __reduce_add_sync(CU_FULL, n);
        if (lane_of() == 0)
            w.count[t] = n;
    }
}

/* Bytes: 4 T E + 8 T + 8 P. */
__global__ static void __launch_bounds__(CU_BLOCK) list_kernel(mz_router a) {
    for (int64_t t = cu_first_row<32>(); t < a.tokens; t += cu_row_step<32>()) {
        int64_t pair = a.token_begin[t];
        for (int32_t first = 0; first < a.experts; first += 32) {
            const int32_t e = first + lane_of();
            const float weight = e < a.experts ? active_weight(a, t, e) : 0;
            const unsigned active = __ballot_sync(CU_FULL, weight > 0);
            if (weight > 0) {
                const int64_t at = pair + __popc(active & ((1u << lane_of()) - 1u));
                a.expert[at] = e;
                a.weight[at] = weight * a.scale;
            }
            pair += __popc(active);
        }
    }
}

/* ---- losses -------------------------------------------------------------------------------------
 * One block of threads per block of tokens; its warps take every token together, lane by lane of
 * the experts, so that a column is summed token after token by one thread. */

/* Sums of one block of tokens: thread e of the block owns the columns e + k CU_BLOCK. Bytes: 4 T E,
 * and 4 E a block of tokens. */
__global__ static void __launch_bounds__(CU_BLOCK) sum_kernel(route_work w) {
    CU_DYN_SHARED(float, p);
    const mz_router &a = w.a;
    float *mean = w.mean + blockIdx.x * (int64_t)(a.experts + LOSS_SUMS);
    float z = 0, balance = 0, active = 0;
    for (int32_t e = threadIdx.x; e < a.experts; e += CU_BLOCK)
        mean[e] = 0;
    for (int64_t t = (int64_t)blockIdx.x * w.block; t < block_end(w, blockIdx.x); t++) {
        __syncthreads(); /* p of the token before is read */
        float sum = 0;
        if (mz_router_is_variable(&a)) {
            for (int32_t e = threadIdx.x; e < a.experts; e += CU_BLOCK) {
                const float g = proxy_of(a, t, e);
                mean[e] += g;
                sum += g;
            }
            sum = cu_row_sum<CU_BLOCK>(sum);
            balance += share_of(a, t) * sum / (float)a.experts;
            active += (float)(a.token_begin[t + 1] - a.token_begin[t]);
            continue;
        }
        float lse = 0;
        if (threadIdx.x < 32)
            lse = probabilities(a, t, p);
        __syncthreads();
        for (int32_t e = threadIdx.x; e < a.experts; e += CU_BLOCK)
            sum += p[e];
        sum = cu_row_sum<CU_BLOCK>(sum);
        sum = mz_router_is_softmax(&a) ? 1.0f : mz_at_least(sum, MZ_SUM_LEAST);
        for (int32_t e = threadIdx.x; e < a.experts; e += CU_BLOCK)
            mean[e] += p[e] / sum;
        z += lse * lse;
        active += (float)a.k;
    }
    if (threadIdx.x == 0) {
        mean[a.experts + SUM_Z] = z;
        mean[a.experts + SUM_TOKENS] = balance;
        mean[a.experts + SUM_ACTIVE] = active;
    }
}

/* One block: sums over the blocks of tokens, then the three losses. Bytes: 4 E a block of tokens.
 */
__global__ static void __launch_bounds__(CU_BLOCK) losses_kernel(route_work w, float *loss) {
    const mz_router &a = w.a;
    const int64_t width = a.experts + LOSS_SUMS;
    const float T = a.tokens > 0 ? (float)a.tokens : 1.0f, E = (float)a.experts;
    float products = 0, sums[LOSS_SUMS] = {0, 0, 0};
    for (int32_t e = threadIdx.x; e < a.experts; e += CU_BLOCK) {
        float mean = 0;
        for (int64_t b = 0; b < w.blocks; b++)
            mean += w.mean[b * width + e];
        products += mean / T * ((float)a.count[e] / T);
    }
    products = cu_row_sum<CU_BLOCK>(products);
    for (int i = 0; i < LOSS_SUMS; i++)
        for (int64_t b = 0; b < w.blocks; b++)
            sums[i] += w.mean[b * width + a.experts + i];
    float balance = products * E / (float)(a.k > 0 ? a.k : 1);
    if (a.kind == MZ_ROUTER_ROUTING_FREE) {
        const float pool = a.pool_experts > 0 ? (float)a.pool_experts : E;
        balance = a.balance_mix * products / pool +
                  (1.0f - a.balance_mix) * (sums[SUM_TOKENS] / T) * (E / pool);
    }
    if (threadIdx.x == 0) {
        loss[0] = a.aux_factor * balance;
        loss[1] = a.z_factor * (sums[SUM_Z] / T);
        loss[2] = sums[SUM_ACTIVE] / (T * E);
    }
}

/* ---- backward -----------------------------------------------------------------------------------
 */

__device__ static inline float pair_gradient(const mz_router &a, int64_t pair) {
    return a.keep && !a.keep[pair] ? 0.0f : a.dweight[pair];
}

/* dp of the chosen experts from dweight, by lane 0: k is small. */
__device__ static inline void weight_gradients(const mz_router &a, int64_t token, const float *p,
                                               float *dp) {
    const int32_t *chosen = a.expert + token * a.k;
    float sum = 0, mixed = 0;
    for (int32_t i = 0; i < a.k; i++)
        sum += p[chosen[i]];
    sum = mz_at_least(sum, MZ_SUM_LEAST);
    for (int32_t i = 0; mz_router_is_normalized(&a) && i < a.k; i++)
        mixed += p[chosen[i]] / sum * pair_gradient(a, token * a.k + i);
    for (int32_t i = 0; i < a.k; i++) {
        const float dw = pair_gradient(a, token * a.k + i);
        dp[chosen[i]] += mz_router_is_normalized(&a) ? a.scale * (dw - mixed) / sum : a.scale * dw;
    }
}

__device__ static inline void backward_sigmoid(const mz_router &a, const float *p, const float *dp,
                                               float aux, float *dl) {
    float sum = 0, mixed = 0;
    for (int32_t e = lane_of(); e < a.experts; e += 32)
        sum += p[e];
    sum = cu_warp_sum(sum);
    sum = mz_at_least(sum, MZ_SUM_LEAST);
    for (int32_t e = lane_of(); aux != 0 && e < a.experts; e += 32)
        mixed += p[e] / sum * aux * (float)a.count[e];
    mixed = cu_warp_sum(mixed);
    for (int32_t e = lane_of(); e < a.experts; e += 32) {
        const float loss = aux != 0 ? (aux * (float)a.count[e] - mixed) / sum : 0.0f;
        dl[e] = (dp[e] + loss) * p[e] * (1.0f - p[e]);
    }
}

__device__ static inline void backward_token(const mz_router &a, int64_t token, float *p,
                                             float *dp) {
    const float T = (float)a.tokens;
    const float aux =
        a.aux_factor == 0 ? 0.0f : a.aux_factor * (float)a.experts / (T * T * (float)a.k);
    float *dl = a.dlogits + token * a.experts, mixed = 0;
    const float lse = probabilities(a, token, p);
    for (int32_t e = lane_of(); e < a.experts; e += 32)
        dp[e] = mz_router_is_softmax(&a) && aux != 0 ? aux * (float)a.count[e] : 0.0f;
    __syncwarp();
    if (lane_of() == 0)
        weight_gradients(a, token, p, dp);
    __syncwarp();
    if (!mz_router_is_softmax(&a)) {
        backward_sigmoid(a, p, dp, aux, dl);
        __syncwarp();
        return;
    }
    for (int32_t e = lane_of(); e < a.experts; e += 32)
        mixed += p[e] * dp[e];
    mixed = cu_warp_sum(mixed);
    for (int32_t e = lane_of(); e < a.experts; e += 32)
        dl[e] = p[e] * (dp[e] - mixed) + 2.0f * a.z_factor * lse * p[e] / T;
    __syncwarp();
}

/* Bytes: 8 T E + 8 P. */
__global__ static void __launch_bounds__(CU_BLOCK) backward_kernel(mz_router a) {
    CU_DYN_SHARED(float, held);
    const int warps = (int)blockDim.x / 32, warp = (int)threadIdx.x / 32;
    float *p = held + (size_t)warp * 2 * (size_t)a.experts;
    for (int64_t t = (int64_t)blockIdx.x * warps + warp; t < a.tokens;
         t += (int64_t)gridDim.x * warps)
        backward_token(a, t, p, p + a.experts);
}

/* d loss / dG of (token, expert), where G counts. */
__device__ static inline float balance_slope(const mz_router &a, int64_t token, int32_t e) {
    const float T = (float)a.tokens, E = (float)a.experts;
    if (a.aux_factor == 0)
        return 0;
    const float experts = (float)a.count[e] / T;
    if (a.kind == MZ_ROUTER_RELU)
        return a.aux_factor * experts * E / (T * (float)a.k);
    const float pool = a.pool_experts > 0 ? (float)a.pool_experts : E;
    return a.aux_factor * (a.balance_mix * experts + (1.0f - a.balance_mix) * share_of(a, token)) /
           (pool * T);
}

/* The pair of (token, expert) where it is active, else -1: experts ascend within a token. */
__device__ static inline int64_t pair_of(const mz_router &a, int64_t token, int32_t e) {
    int64_t low = a.token_begin[token], high = a.token_begin[token + 1];
    const int64_t end = high;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (a.expert[middle] < e)
            low = middle + 1;
        else
            high = middle;
    }
    return low < end && a.expert[low] == e ? low : -1;
}

/* Variable kinds: one block of threads per block of tokens; a thread owns columns of the experts.
 * Bytes: 8 T E + 8 T + 8 P, and 8 E a block of tokens. */
__global__ static void __launch_bounds__(CU_BLOCK) backward_active(route_work w) {
    const mz_router &a = w.a;
    for (int32_t e = threadIdx.x; e < a.experts; e += CU_BLOCK) {
        float bias = 0, gain = 0;
        for (int64_t t = (int64_t)blockIdx.x * w.block; t < block_end(w, blockIdx.x); t++) {
            const int64_t pair = pair_of(a, t, e);
            float ds = pair >= 0 ? a.scale * pair_gradient(a, pair) : 0.0f;
            if (pair >= 0 || proxy_of(a, t, e) > 0)
                ds += balance_slope(a, t, e);
            const bool relu = a.kind == MZ_ROUTER_RELU;
            a.dlogits[t * a.experts + e] = relu ? ds : ds * (a.gain ? a.gain[e] : 1.0f);
            bias -= ds;
            /* what is not active may be NaN */
            gain += ds == 0 ? 0.0f : ds * a.logits[t * a.experts + e];
        }
        w.bias[(int64_t)blockIdx.x * a.experts + e] = bias;
        w.gain[(int64_t)blockIdx.x * a.experts + e] = gain;
    }
}

/* Bytes: 8 E a block of tokens. */
__global__ static void __launch_bounds__(CU_BLOCK) add_gains(route_work w) {
    const int64_t e = (int64_t)blockIdx.x * CU_BLOCK + threadIdx.x;
    if (e >= w.a.experts)
        return;
    for (int64_t b = 0; b < w.blocks; b++) {
        if (w.a.dbias)
            w.a.dbias[e] += w.bias[b * w.a.experts + e];
        if (w.a.dgain)
            w.a.dgain[e] += w.gain[b * w.a.experts + e];
    }
}

/* ---- norms of gates -----------------------------------------------------------------------------
 */

/* Bytes, s of a value: T E (r s + 4); FLOPs: 2 T E r. */
template <class T>
__global__ static void __launch_bounds__(CU_BLOCK)
    gate_norms_kernel(const T *z, int64_t n, int64_t r, float *norm) {
    for (int64_t i = cu_first_row<32>(); i < n; i += cu_row_step<32>()) {
        float sum = 0;
        for (int64_t j = lane_of(); j < r; j += 32) {
            const float v = cu_widen(z[i * r + j]);
            sum += v * v;
        }
        sum = cu_warp_sum(sum);
        if (lane_of() == 0)
            norm[i] = sqrtf(sum);
    }
}

/* Bytes: T E (2 r s + 8); FLOPs: T E r. */
template <class T>
__global__ static void __launch_bounds__(CU_BLOCK)
    gate_norms_back_kernel(const T *z, const float *norm, const float *dnorm, int64_t n, int64_t r,
                           T *dz) {
    for (int64_t i = cu_first_row<32>(); i < n; i += cu_row_step<32>()) {
        const float factor = dnorm[i] / mz_at_least(norm[i], MZ_SUM_LEAST);
        for (int64_t j = lane_of(); j < r; j += 32)
            cu_narrow(&dz[i * r + j], cu_widen(z[i * r + j]) * factor);
    }
}

/* ---- launching ----------------------------------------------------------------------------------
 */

static size_t place(const mz_cuda_device *d, route_work *w, const mz_router *a, char *workspace) {
    const size_t E = (size_t)a->experts;
    w->a = *a;
    w->blocks = (a->tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    w->blocks = w->blocks < 1 ? 1 : w->blocks < BLOCKS_MOST ? w->blocks : (int64_t)BLOCKS_MOST;
    w->block = (a->tokens + w->blocks - 1) / w->blocks;
    const size_t blocks = (size_t)w->blocks;
    size_t used = 0;
    w->mean = (float *)mz_take(workspace, &used, sizeof(float) * blocks * (E + LOSS_SUMS));
    w->bias = (float *)mz_take(workspace, &used, sizeof(float) * blocks * E);
    w->gain = (float *)mz_take(workspace, &used, sizeof(float) * blocks * E);
    if (!mz_router_is_variable(a))
        return used;
    w->count = (int64_t *)mz_take(workspace, &used, sizeof(int64_t) * (size_t)a->tokens);
    w->prefix = mz_take(workspace, &used, mz_cuda_prefix_sums_workspace(d, a->tokens));
    return used;
}

extern "C" size_t mz_cuda_router_workspace(const mz_cuda_device *d, const mz_router *a) {
    route_work w = {};
    return place(d, &w, a, NULL);
}

/* Warps of a block so that `arrays` rows of E floats for each fit shared memory; 0: not even one.
 */
static int warps_for(const mz_cuda_device *d, const mz_router *a, int arrays) {
    const size_t each = sizeof(float) * (size_t)arrays * (size_t)a->experts;
    const size_t fit = (size_t)d->shared_most / each;
    return fit < CU_WARPS ? (int)fit : (int)CU_WARPS;
}

template <class Kernel>
static int launch_tokens(const mz_cuda_device *d, void *stream, Kernel kernel, const mz_router *a,
                         int arrays) {
    const int warps = warps_for(d, a, arrays);
    if (warps == 0)
        return (int)cudaErrorInvalidValue;
    const size_t bytes = sizeof(float) * (size_t)warps * (size_t)arrays * (size_t)a->experts;
    int error = bytes > 48 * 1024 ? cu_allow_shared(kernel, (int)bytes) : 0;
    return error ? error
                 : CU_LAUNCH(kernel, cu_blocks(d, a->tokens, warps), 32 * warps, bytes, stream, *a);
}

extern "C" int mz_cuda_router_forward(const mz_cuda_device *d, void *stream, const mz_router *a,
                                      void *workspace) {
    route_work w = {};
    place(d, &w, a, (char *)workspace);
    if (!mz_router_is_variable(a))
        return launch_tokens(d, stream, forward_kernel, a, forward_rows(a));
    const unsigned blocks = cu_blocks(d, a->tokens, CU_WARPS);
    int error = CU_LAUNCH(count_kernel, blocks, CU_BLOCK, 0, stream, w);
    if (!error)
        error = mz_cuda_prefix_sums(d, stream, w.count, a->tokens, a->token_begin, w.prefix);
    return error ? error : CU_LAUNCH(list_kernel, blocks, CU_BLOCK, 0, stream, *a);
}

extern "C" int mz_cuda_router_losses(const mz_cuda_device *d, void *stream, const mz_router *a,
                                     float *loss, void *workspace) {
    route_work w = {};
    place(d, &w, a, (char *)workspace);
    const size_t bytes = sizeof(float) * (size_t)a->experts;
    if (bytes > (size_t)d->shared_most)
        return (int)cudaErrorInvalidValue;
    int error = bytes > 48 * 1024 ? cu_allow_shared(sum_kernel, (int)bytes) : 0;
    if (!error)
        error = CU_LAUNCH(sum_kernel, (unsigned)w.blocks, CU_BLOCK, bytes, stream, w);
    return error ? error : CU_LAUNCH(losses_kernel, 1, CU_BLOCK, 0, stream, w, loss);
}

extern "C" int mz_cuda_router_backward(const mz_cuda_device *d, void *stream, const mz_router *a,
                                       void *workspace) {
    route_work w = {};
    place(d, &w, a, (char *)workspace);
    if (!mz_router_is_variable(a))
        return launch_tokens(d, stream, backward_kernel, a, 2);
    int error = CU_LAUNCH(backward_active, (unsigned)w.blocks, CU_BLOCK, 0, stream, w);
    if (!error && a->kind == MZ_ROUTER_ROUTING_FREE && (a->dbias || a->dgain))
        error = CU_LAUNCH(add_gains, (unsigned)((a->experts + CU_BLOCK - 1) / CU_BLOCK), CU_BLOCK,
                          0, stream, w);
    return error;
}

extern "C" int mz_cuda_gate_norms(const mz_cuda_device *d, void *stream, mz_dtype type,
                                  const void *z, int64_t tokens, int32_t experts, int64_t r,
                                  float *norm) {
    const int64_t n = tokens * experts;
    const unsigned blocks = cu_blocks(d, n, CU_WARPS);
    return type == MZ_BF16 ? CU_LAUNCH(gate_norms_kernel<uint16_t>, blocks, CU_BLOCK, 0, stream,
                                       (const uint16_t *)z, n, r, norm)
                           : CU_LAUNCH(gate_norms_kernel<float>, blocks, CU_BLOCK, 0, stream,
                                       (const float *)z, n, r, norm);
}

extern "C" int mz_cuda_gate_norms_backward(const mz_cuda_device *d, void *stream, mz_dtype type,
                                           const void *z, const float *norm, const float *dnorm,
                                           int64_t tokens, int32_t experts, int64_t r, void *dz) {
    const int64_t n = tokens * experts;
    const unsigned blocks = cu_blocks(d, n, CU_WARPS);
    return type == MZ_BF16
               ? CU_LAUNCH(gate_norms_back_kernel<uint16_t>, blocks, CU_BLOCK, 0, stream,
                           (const uint16_t *)z, norm, dnorm, n, r, (uint16_t *)dz)
               : CU_LAUNCH(gate_norms_back_kernel<float>, blocks, CU_BLOCK, 0, stream,
                           (const float *)z, norm, dnorm, n, r, (float *)dz);
}
