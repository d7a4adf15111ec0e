/* Optimizer steps. The algorithm of the factored kinds is the host's (kernels/host/update.c): sweep
 * 1 gathers R, C and, by column, base^2 / R_i, from which the clip follows; sweep 2 writes. Rows
 * far below the floor are left out of the former and added when the mean of the factors is known.
 *
 * Bytes through memory, per value with bf16 gradient g and parameter p, fp32 m and v:
 *   factored              2 g twice, p 2 + 2                                     8
 *   factored, momentum    g 2, m 4 + 4 (sweep 1); m 4, p 2 + 2 (sweep 2)        18
 *   full v                g 2 twice, v 4 + 4 and 4, p 2 + 2                     20
 *   adamw                 g 2, m 4 + 4, v 4 + 4, p 2 + 2                        22
 *   lion                  g 2, m 4 + 4, p 2 + 2                                 14
 * Matrices are taken in waves, so that sweep 2 finds a wave's gradient in the second-level cache
 * and scratch stays at some rows per matrix. Blocks follow from the shape alone. */
#include "kernels/cuda/device.cuh"
#include "kernels/settings.h"

/* Values of a block, and most blocks of one matrix; matrices of a wave. */
enum { BLOCK_VALUES = 1 << 15, BLOCKS_MOST = 256, WAVE = 16 };

/* Everything a kernel needs besides its block. */
typedef struct step_work {
    mz_update a;
    mz_update_rates r;
    mz_random random;      /* of the tensor at this step */
    int64_t blocks, block; /* of rows (factored) or values, per matrix */
    int64_t first;         /* matrix of the wave */
    int64_t tiles;         /* of columns, per matrix (factored) */
    float *part;           /* [WAVE][blocks][2][cols] */
    float *sum;            /* [matrices][tiles or blocks] */
    float *clip;           /* [matrices] */
    float *bound;          /* [matrices]: mz_row_bound of this step (factored) */
    bool in_shared;        /* columns' sums and factors of a block fit shared memory */
} step_work;

__device__ static inline float gradient_scale(const mz_update &a) {
    return a.grad_scale ? *a.grad_scale : 1.0f;
}

/* ---- four values at a time: two words of random bits, 8 or 16 bytes of memory
 * --------------------
 */

/* Unrolled, so that the four stay in registers. */
#define UNROLLED_QUAD(l) _Pragma("unroll") for (int l = 0; l < 4; l++)

/* Values beyond n are 0 when read and left alone when written. */
typedef struct quad {
    float at[4];
} quad;

__device__ static inline quad read_f32(const float *p, int n) {
    quad q = {{0, 0, 0, 0}};
    if (n >= 4 && (uintptr_t)p % 16 == 0) {
        const float4 all = *reinterpret_cast<const float4 *>(p);
        memcpy(q.at, &all, sizeof all);
        return q;
    }
    UNROLLED_QUAD(l) if (l < n) q.at[l] = p[l];
    return q;
}

__device__ static inline quad read_bf16(const uint16_t *p, int n) {
    uint16_t h[4] = {0, 0, 0, 0};
    if (n >= 4 && (uintptr_t)p % 8 == 0) {
        const uint2 all = *reinterpret_cast<const uint2 *>(p);
        memcpy(h, &all, sizeof all);
    } else {
        UNROLLED_QUAD(l) if (l < n) h[l] = p[l];
    }
    quad q;
    UNROLLED_QUAD(l)
    q.at[l] = mz_from_bf16(h[l]);
    return q;
}

__device__ static inline void write_f32(float *p, quad q, int n) {
    if (n >= 4 && (uintptr_t)p % 16 == 0) {
        float4 all;
        memcpy(&all, q.at, sizeof all);
        *reinterpret_cast<float4 *>(p) = all;
        return;
    }
    UNROLLED_QUAD(l) if (l < n) p[l] = q.at[l];
}

__device__ static inline void write_bf16(uint16_t *p, const uint16_t h[4], int n) {
    if (n >= 4 && (uintptr_t)p % 8 == 0) {
        uint2 all;
        memcpy(&all, h, sizeof all);
        *reinterpret_cast<uint2 *>(p) = all;
        return;
    }
    UNROLLED_QUAD(l) if (l < n) p[l] = h[l];
}

__device__ static inline quad gradient_at(const mz_update &a, int64_t i, int n, float scale) {
    quad g = a.gradient_type == MZ_BF16 ? read_bf16((const uint16_t *)a.gradient + i, n)
                                        : read_f32((const float *)a.gradient + i, n);
    UNROLLED_QUAD(l)
    g.at[l] *= scale;
    return g;
}

/* at <- beta at + (1 - beta) value; returns the new values. */
__device__ static inline quad average(float *at, int n, float beta, quad value) {
    quad q = read_f32(at, n);
    UNROLLED_QUAD(l)
    q.at[l] = __fadd_rn(__fmul_rn(q.at[l], beta), __fmul_rn(value.at[l], 1.0f - beta));
    write_f32(at, q, n);
    return q;
}

/* Momentum where there is one, as it stands; else the gradient. */
__device__ static inline quad base_at(const mz_update &a, int64_t i, int n, float scale) {
    return a.m ? read_f32(a.m + i, n) : gradient_at(a, i, n, scale);
}

/* 16 random bits of each of the four values from i on, of which an odd i has the first and the last
 * in the halves of two more words. */
__device__ static inline void bits_of(mz_random *random, int64_t i, uint32_t bits[4]) {
    uint32_t word[3] = {0, 0, 0};
#pragma unroll
    for (int k = 0; k < 3; k++)
        if (k < 2 || i % 2 != 0) {
            const uint64_t element = (uint64_t)i + 2 * k;
            mz_random_reach(random, element);
            word[k] = mz_random_word(&random->at, (uint32_t)(element % MZ_SUBSTREAM / 2));
        }
    const int skip = i % 2 != 0 ? 16 : 0;
    const uint32_t low = (uint32_t)(((uint64_t)word[1] << 32 | word[0]) >> skip);
    const uint32_t high = (uint32_t)(((uint64_t)word[2] << 32 | word[1]) >> skip);
    bits[0] = low & 0xffffu;
    bits[1] = low >> 16;
    bits[2] = high & 0xffffu;
    bits[3] = high >> 16;
}

/* Decay, rounded to the parameter's type (but by Adafactor), then p - rate * update. `random`: of
 * the tensor at this step, the thread's own. */
__device__ static inline void write_values(const mz_update &a, mz_random *random, int64_t i, int n,
                                           quad update, float rate) {
    const float keep = 1.0f - a.rate * a.decay;
    if (a.type == MZ_F32) {
        float *p = (float *)a.parameter + i;
        quad q = read_f32(p, n);
        UNROLLED_QUAD(l)
        q.at[l] = __fadd_rn(__fmul_rn(q.at[l], keep), -__fmul_rn(update.at[l], rate));
        write_f32(p, q, n);
        return;
    }
    uint16_t *p = (uint16_t *)a.parameter + i, h[4];
    const quad old = read_bf16(p, n);
    uint32_t bits[4] = {0, 0, 0, 0};
    if (a.rounding != MZ_ROUND_NEAREST)
        bits_of(random, i, bits);
    UNROLLED_QUAD(l) {
        float q = __fmul_rn(old.at[l], keep);
        if (a.kind != MZ_UPDATE_ADAFACTOR)
            q = mz_from_bf16(mz_to_bf16(q));
        q = __fadd_rn(q, -__fmul_rn(update.at[l], rate));
        h[l] = a.rounding == MZ_ROUND_NEAREST  ? mz_to_bf16(q)
               : a.rounding == MZ_ROUND_DITHER ? mz_bf16_dither(q, bits[l])
                                               : mz_bf16_stochastic(q, bits[l]);
    }
    write_bf16(p, h, n);
}

/* Values from j on that a thread takes of a row or block that ends at `end`. */
__device__ static inline int count_of(int64_t j, int64_t end) {
    return end - j < 4 ? (int)(end - j) : 4;
}
enum { QUADS = 4 * CU_BLOCK }; /* values that a block of threads takes at once */

/* ---- factored -----------------------------------------------------------------------------------
 */

__device__ static inline int64_t block_end(const step_work &w, int64_t block) {
    const int64_t end = (block + 1) * w.block;
    return end < w.a.rows ? end : w.a.rows;
}

__device__ static inline float *part_of(const step_work &w, int64_t wave, int64_t block,
                                        int which) {
    return w.part + ((wave * w.blocks + block) * 2 + which) * w.a.cols;
}

/* max(mean of the row factors, its least) */
__device__ static inline float row_mean(const step_work &w, int64_t matrix) {
    const float *row = w.a.row + matrix * w.a.rows;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < w.a.rows; i += CU_BLOCK)
        sum += row[i];
    sum = cu_row_sum<CU_BLOCK>(sum) / (float)w.a.rows;
    return mz_at_least(sum, w.r.mean_least);
}

/* Before sweep 1, a block per matrix. */
__global__ static void __launch_bounds__(CU_BLOCK) factored_bounds(step_work w) {
    const float mean = row_mean(w, blockIdx.x);
    if (threadIdx.x == 0)
        w.bound[blockIdx.x] = mz_row_bound(w.r, mean);
}

/* Sweep 1: one block of threads per block of rows; a thread owns the columns 4 threadIdx.x + k
 * QUADS and the three after each. */
__global__ static void __launch_bounds__(CU_BLOCK) factored_statistics(step_work w) {
    CU_DYN_SHARED(float, held);
    const int64_t wave = blockIdx.x / w.blocks, block = blockIdx.x % w.blocks;
    const int64_t cols = w.a.cols, matrix = w.first + wave, mine = 4 * (int64_t)threadIdx.x;
    float *to_col = part_of(w, wave, block, 0), *to_weighted = part_of(w, wave, block, 1);
    float *col = w.in_shared ? held : to_col;
    float *weighted = w.in_shared ? held + cols : to_weighted;
    const float scale = gradient_scale(w.a);
    for (int64_t j = mine; j < cols; j += QUADS)
        UNROLLED_QUAD(l) if (l < count_of(j, cols)) col[j + l] = weighted[j + l] = 0;
    for (int64_t i = block * w.block; i < block_end(w, block); i++) {
        const int64_t row = matrix * w.a.rows + i;
        float sum = 0;
        for (int64_t j = mine; j < cols; j += QUADS) {
            const int n = count_of(j, cols);
            const quad g = gradient_at(w.a, row * cols + j, n, scale);
            UNROLLED_QUAD(l) if (l < n) {
                const float g2 = g.at[l] * g.at[l] + w.r.floor;
                sum += g2;
                col[j + l] += g2;
            }
            if (w.a.m)
                average(&w.a.m[row * cols + j], n, w.a.beta1, g);
        }
        sum = cu_row_sum<CU_BLOCK>(sum);
        const float factor = w.a.row[row] * w.r.beta2 + (sum / (float)cols) * (1.0f - w.r.beta2);
        __syncthreads(); /* all have read the old factor */
        if (threadIdx.x == 0)
            w.a.row[row] = factor;
        if (!(factor >= w.bound[matrix]))
            continue;
        const float inverse = 1.0f / factor;
        for (int64_t j = mine; j < cols; j += QUADS) {
            const int n = count_of(j, cols);
            const quad base = base_at(w.a, row * cols + j, n, scale);
            UNROLLED_QUAD(l) if (l < n) weighted[j + l] += base.at[l] * base.at[l] * inverse;
        }
    }
    for (int64_t j = mine; w.in_shared && j < cols; j += QUADS)
        UNROLLED_QUAD(l) if (l < count_of(j, cols)) {
            to_col[j + l] = col[j + l];
            to_weighted[j + l] = weighted[j + l];
        }
}

/* What sweep 1 left to do: rows below the floor; and whether some of them have added so much too
 * much that it may hide what the others have. */
typedef struct row_state {
    bool floored, hides;
} row_state;

__device__ static inline row_state state_of(const step_work &w, int64_t matrix, float mean) {
    const float *row = w.a.row + matrix * w.a.rows, bound = w.bound[matrix];
    int floored = 0, hides = 0;
    for (int64_t i = threadIdx.x; i < w.a.rows; i += CU_BLOCK) {
        const bool counted = row[i] >= bound;
        floored |= !(counted && row[i] / mean >= w.r.least);
        hides |= counted && row[i] / mean < 0.5f * w.r.least;
    }
    return {__syncthreads_or(floored) != 0, __syncthreads_or(hides) != 0};
}

/* What rows below the floor add to a column's weighted squares beyond what sweep 1 added; where
 * that is not to be used (`again`), what all rows add. */
__device__ static inline float floored_terms(const step_work &w, int64_t matrix, int64_t j,
                                             float mean, float scale, bool again) {
    float sum = 0;
    for (int64_t i = 0; i < w.a.rows; i++) {
        const int64_t row = matrix * w.a.rows + i;
        const float r = w.a.row[row];
        const bool counted = !again && r >= w.bound[matrix];
        if ((counted && r / mean >= w.r.least) || (r == 0 && !w.a.m))
            continue; /* of a row without a gradient, or with one whose square underflows: its terms
                         are 0 or far below the clip */
        const float bounded = mz_at_least(r / mean, w.r.least);
        if (bounded <= 0)
            continue;
        const float base = base_at(w.a, row * w.a.cols + j, 1, scale).at[0];
        sum += base * base * (1.0f / (bounded * mean) - (counted ? 1.0f / r : 0.0f));
    }
    return sum;
}

/* One block per tile of CU_BLOCK columns of a matrix: C moves on, sum of u^2 of the tile. */
__global__ static void __launch_bounds__(CU_BLOCK) factored_columns(step_work w) {
    const int64_t wave = blockIdx.x / w.tiles, tile = blockIdx.x % w.tiles;
    const int64_t matrix = w.first + wave, j = tile * CU_BLOCK + threadIdx.x;
    const float mean = row_mean(w, matrix);
    const row_state rows = state_of(w, matrix, mean);
    float u2 = 0;
    if (j < w.a.cols) {
        float col = 0, weighted = 0;
        for (int64_t b = 0; b < w.blocks; b++) {
            col += part_of(w, wave, b, 0)[j];
            weighted += part_of(w, wave, b, 1)[j];
        }
        if (rows.hides)
            weighted = 0;
        if (rows.floored)
            weighted += floored_terms(w, matrix, j, mean, gradient_scale(w.a), rows.hides);
        const quad mean_square = {{col / (float)w.a.rows, 0, 0, 0}};
        const float c = average(&w.a.col[matrix * w.a.cols + j], 1, w.r.beta2, mean_square).at[0];
        const float bounded = mz_at_least(c, w.r.least);
        u2 = bounded <= 0 ? 0 : weighted * mean / bounded;
    }
    u2 = cu_row_sum<CU_BLOCK>(u2);
    if (threadIdx.x == 0)
        w.sum[matrix * w.tiles + tile] = u2;
}

/* ---- the clip -----------------------------------------------------------------------------------
 */

/* One block per matrix of `first` and on, or one for all of them where the clip is the tensor's:
 * sums in order, then 1 / max(1, RMS). */
__global__ static void __launch_bounds__(CU_BLOCK)
    clip_kernel(step_work w, int64_t sums, bool tensor) {
    const int64_t matrix = tensor ? 0 : w.first + blockIdx.x;
    const int64_t n = tensor ? w.a.matrices * sums : sums;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += CU_BLOCK)
        sum += w.sum[matrix * sums + i];
    sum = cu_row_sum<CU_BLOCK>(sum);
    const float values = (float)w.a.rows * (float)w.a.cols * (tensor ? (float)w.a.matrices : 1.0f);
    const float rms = sqrtf(sum / values) * w.r.correction;
    if (threadIdx.x == 0)
        w.clip[matrix] = w.a.clip_rms ? mz_clip_of(rms) : 1.0f;
}

__device__ static inline float clip_of(const step_work &w, int64_t matrix) {
    return w.clip[w.a.clip_tensor ? 0 : matrix];
}

/* Sweep 2. */
__global__ static void __launch_bounds__(CU_BLOCK, 3) factored_write(step_work w) {
    CU_DYN_SHARED(float, col_factor);
    const int64_t block = blockIdx.x % w.blocks, matrix = w.first + blockIdx.x / w.blocks;
    const int64_t cols = w.a.cols;
    const float *c = w.a.col + matrix * cols;
    const float scale = gradient_scale(w.a);
    const float mean = row_mean(w, matrix);
    for (int64_t j = threadIdx.x; w.in_shared && j < cols; j += CU_BLOCK)
        col_factor[j] = mz_inverse_root(c[j], w.r.least);
    __syncthreads();
    const float rate = w.a.rate * w.r.correction * clip_of(w, matrix);
    mz_random random = w.random;
    for (int64_t i = block * w.block; i < block_end(w, block); i++) {
        const int64_t row = matrix * w.a.rows + i;
        const float row_rate = rate * mz_row_root(w.a.row[row], mean, w.r.least);
        for (int64_t j = 4 * (int64_t)threadIdx.x; j < cols; j += QUADS) {
            const int n = count_of(j, cols);
            quad update = base_at(w.a, row * cols + j, n, scale);
            UNROLLED_QUAD(l)
            if (l < n)
                update.at[l] *=
                    w.in_shared ? col_factor[j + l] : mz_inverse_root(c[j + l], w.r.least);
            write_values(w.a, &random, row * cols + j, n, update, row_rate);
        }
    }
}

/* ---- value by value -----------------------------------------------------------------------------
 */

/* This thread's first values *i, and the end of its block's values; one block of threads per block
 * of values. */
__device__ static inline void block_values(const step_work &w, int64_t *i, int64_t *end) {
    const int64_t values = w.a.rows * w.a.cols, matrix = blockIdx.x / w.blocks;
    const int64_t first = blockIdx.x % w.blocks * w.block;
    const int64_t last = first + w.block < values ? first + w.block : values;
    *i = matrix * values + first + 4 * (int64_t)threadIdx.x;
    *end = matrix * values + last;
}

__device__ static inline quad square_of(quad g, float floor) {
    UNROLLED_QUAD(l)
    g.at[l] = g.at[l] * g.at[l] + floor;
    return g;
}

__global__ static void __launch_bounds__(CU_BLOCK) full_statistics(step_work w) {
    const float scale = gradient_scale(w.a);
    int64_t i, end;
    float sum = 0;
    for (block_values(w, &i, &end); i < end; i += QUADS) {
        const int n = count_of(i, end);
        const quad g = gradient_at(w.a, i, n, scale);
        const quad v = average(&w.a.v[i], n, w.r.beta2, square_of(g, w.r.floor));
        const quad base = w.a.m ? average(&w.a.m[i], n, w.a.beta1, g) : g;
        UNROLLED_QUAD(l) if (l < n) {
            const float bounded = mz_at_least(v.at[l], w.r.least);
            sum += bounded <= 0 ? 0 : base.at[l] * base.at[l] / bounded;
        }
    }
    sum = cu_row_sum<CU_BLOCK>(sum);
    if (threadIdx.x == 0)
        w.sum[blockIdx.x] = sum;
}

__global__ static void __launch_bounds__(CU_BLOCK, 3) full_write(step_work w) {
    const float scale = gradient_scale(w.a);
    const float rate = w.a.rate * w.r.correction * clip_of(w, blockIdx.x / w.blocks);
    mz_random random = w.random;
    int64_t i, end;
    for (block_values(w, &i, &end); i < end; i += QUADS) {
        const int n = count_of(i, end);
        const quad v = read_f32(w.a.v + i, n);
        quad update = base_at(w.a, i, n, scale);
        UNROLLED_QUAD(l)
        update.at[l] *= mz_inverse_root(v.at[l], w.r.least);
        write_values(w.a, &random, i, n, update, rate);
    }
}

/* r.floor is 1 / sqrt(1 - beta2^t). */
__global__ static void __launch_bounds__(CU_BLOCK) adamw_kernel(step_work w) {
    const float scale = gradient_scale(w.a);
    mz_random random = w.random;
    int64_t i, end;
    for (block_values(w, &i, &end); i < end; i += QUADS) {
        const int n = count_of(i, end);
        const quad g = gradient_at(w.a, i, n, scale);
        quad update = average(&w.a.m[i], n, w.a.beta1, g);
        const quad v = average(&w.a.v[i], n, w.r.beta2, square_of(g, 0));
        UNROLLED_QUAD(l) if (l < n) update.at[l] /= sqrtf(v.at[l]) * w.r.floor + w.a.eps;
        write_values(w.a, &random, i, n, update, w.a.rate * w.r.correction);
    }
}

__global__ static void __launch_bounds__(CU_BLOCK) lion_kernel(step_work w) {
    const float scale = gradient_scale(w.a);
    mz_random random = w.random;
    int64_t i, end;
    for (block_values(w, &i, &end); i < end; i += QUADS) {
        const int n = count_of(i, end);
        const quad g = gradient_at(w.a, i, n, scale), m = read_f32(w.a.m + i, n);
        quad update;
        UNROLLED_QUAD(l) {
            const float mixed =
                __fadd_rn(__fmul_rn(m.at[l], w.a.beta1), __fmul_rn(g.at[l], 1.0f - w.a.beta1));
            update.at[l] = mixed > 0 ? 1.0f : mixed < 0 ? -1.0f : mixed == 0 ? 0.0f : mixed;
        }
        average(&w.a.m[i], n, w.a.beta2, g);
        write_values(w.a, &random, i, n, update, w.a.rate);
    }
}

/* ---- Muon: one matrix after the other, products by the grouped GEMM
 * ------------------------------- X, Y [s][l], gram, poly [s][s] in bf16, s the shorter side. */

enum { NORM_BLOCKS = 256 };

typedef struct muon_work {
    mz_update a;
    mz_random random; /* of the tensor at this step */
    int64_t matrix;
    uint16_t *x, *y, *gram, *poly;
    float *norm2;   /* [NORM_BLOCKS] parts of the squared norm of X */
    int64_t *begin; /* {0, s} */
    void **weight;  /* {gram or x} */
} muon_work;

__host__ __device__ static inline int64_t muon_short(const mz_update &a) {
    return ((a.rows < a.cols ? a.rows : a.cols) + 7) / 8 * 8;
}

__host__ __device__ static inline int64_t muon_long(const mz_update &a) {
    return ((a.rows < a.cols ? a.cols : a.rows) + 7) / 8 * 8;
}

/* Where value i of the matrix stands in X. */
__device__ static inline int64_t turned(const mz_update &a, int64_t i) {
    const int64_t row = i / a.cols, col = i % a.cols, l = muon_long(a);
    return a.rows > a.cols ? col * l + row : row * l + col;
}

__global__ static void __launch_bounds__(CU_BLOCK) muon_momentum(muon_work w) {
    const int64_t values = w.a.rows * w.a.cols, step = (int64_t)gridDim.x * CU_BLOCK;
    const float scale = gradient_scale(w.a);
    float sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * CU_BLOCK + threadIdx.x; i < values; i += step) {
        const int64_t at = w.matrix * values + i;
        const float g = gradient_at(w.a, at, 1, scale).at[0];
        const float m = __fadd_rn(__fmul_rn(w.a.m[at], w.a.beta1), g);
        w.a.m[at] = m;
        const uint16_t x = mz_to_bf16(w.a.nesterov ? __fadd_rn(g, __fmul_rn(m, w.a.beta1)) : m);
        w.x[turned(w.a, i)] = x;
        sum += mz_from_bf16(x) * mz_from_bf16(x);
    }
    sum = cu_row_sum<CU_BLOCK>(sum);
    if (threadIdx.x == 0)
        w.norm2[blockIdx.x] = sum;
}

__global__ static void __launch_bounds__(CU_BLOCK) muon_normalize(muon_work w, int64_t blocks) {
    const int64_t values = muon_short(w.a) * muon_long(w.a);
    const int64_t step = (int64_t)gridDim.x * CU_BLOCK;
    float sum = 0;
    for (int64_t b = 0; b < blocks; b++)
        sum += w.norm2[b];
    const float norm = sqrtf(sum) + 1e-7f;
    for (int64_t i = (int64_t)blockIdx.x * CU_BLOCK + threadIdx.x; i < values; i += step)
        w.x[i] = mz_to_bf16(mz_from_bf16(w.x[i]) / norm);
}

/* to = a x + b y, each in bf16. */
__global__ static void __launch_bounds__(CU_BLOCK)
    muon_mix(uint16_t *to, float a, const uint16_t *x, float b, const uint16_t *y, int64_t n) {
    const int64_t step = (int64_t)gridDim.x * CU_BLOCK;
    for (int64_t i = (int64_t)blockIdx.x * CU_BLOCK + threadIdx.x; i < n; i += step)
        to[i] = mz_to_bf16(
            __fadd_rn(__fmul_rn(a, mz_from_bf16(x[i])), __fmul_rn(b, mz_from_bf16(y[i]))));
}

__global__ static void __launch_bounds__(CU_BLOCK) muon_write(muon_work w) {
    const int64_t values = w.a.rows * w.a.cols, step = (int64_t)gridDim.x * QUADS;
    mz_random random = w.random;
    for (int64_t i = (int64_t)blockIdx.x * QUADS + 4 * threadIdx.x; i < values; i += step) {
        const int n = count_of(i, values);
        quad update = {{0, 0, 0, 0}};
        UNROLLED_QUAD(l) if (l < n) update.at[l] = mz_from_bf16(w.x[turned(w.a, i + l)]);
        write_values(w.a, &random, w.matrix * values + i, n, update, w.a.rate * w.a.update_scale);
    }
}

/* The one group of a product whose weight is `weight`. */
__global__ static void __launch_bounds__(1)
    muon_group(int64_t *begin, int64_t rows, void **to, void *weight) {
    begin[0] = 0;
    begin[1] = rows;
    *to = weight;
}

/* c = a b^T (forward: b [n][k]) or a b (dgrad: b [n][k], a [rows][n]). */
static int muon_product(const mz_cuda_device *d, void *stream, const muon_work *w, mz_product op,
                        int64_t rows, int64_t n, int64_t k, const uint16_t *a, uint16_t *b,
                        uint16_t *c, void *workspace) {
    int error = CU_LAUNCH(muon_group, 1, 1, 0, stream, w->begin, rows, w->weight, (void *)b);
    if (error)
        return error;
    mz_product_args args = {};
    args.op = op;
    args.groups.begin = w->begin;
    args.groups.groups = 1;
    args.groups.rows_max = rows;
    args.n = n;
    args.k = k;
    args.type = MZ_BF16;
    args.a = a;
    args.weight = w->weight;
    args.c = c;
    return mz_cuda_grouped_gemm(d, stream, &args, workspace);
}

/* X <- 3.4445 X + (-4.7750 A + 2.0315 A A) X with A = X X^T. */
static int newton_schulz(const mz_cuda_device *d, void *stream, const muon_work *w,
                         void *workspace) {
    const int64_t s = muon_short(w->a), l = muon_long(w->a);
    const unsigned square = cu_blocks(d, s * s, CU_BLOCK), all = cu_blocks(d, s * l, CU_BLOCK);
    int error =
        muon_product(d, stream, w, MZ_PRODUCT_FORWARD, s, s, l, w->x, w->x, w->gram, workspace);
    if (!error)
        error = muon_product(d, stream, w, MZ_PRODUCT_DGRAD, s, s, s, w->gram, w->gram, w->poly,
                             workspace);
    if (!error)
        error = CU_LAUNCH(muon_mix, square, CU_BLOCK, 0, stream, w->poly, -4.7750f,
                          (const uint16_t *)w->gram, 2.0315f, (const uint16_t *)w->poly, s * s);
    if (!error)
        error =
            muon_product(d, stream, w, MZ_PRODUCT_DGRAD, s, s, l, w->poly, w->x, w->y, workspace);
    if (!error)
        error = CU_LAUNCH(muon_mix, all, CU_BLOCK, 0, stream, w->x, 3.4445f, (const uint16_t *)w->x,
                          1.0f, (const uint16_t *)w->y, s * l);
    return error;
}

/* ---- launching ----------------------------------------------------------------------------------
 */

static bool has_clip(const mz_update *a) {
    return a->kind == MZ_UPDATE_SKEWADAM || a->kind == MZ_UPDATE_ADAFACTOR;
}

static void set_blocks(step_work *w) {
    const mz_update *a = &w->a;
    const int64_t values = a->rows * a->cols;
    w->blocks = (values + BLOCK_VALUES - 1) / BLOCK_VALUES;
    w->block = BLOCK_VALUES;
    w->tiles = (a->cols + CU_BLOCK - 1) / CU_BLOCK;
    if (!mz_keeps_factors(a))
        return;
    if (w->blocks > BLOCKS_MOST)
        w->blocks = BLOCKS_MOST;
    if (w->blocks > a->rows)
        w->blocks = a->rows;
    if (w->blocks < 1)
        w->blocks = 1;
    w->block = (a->rows + w->blocks - 1) / w->blocks;
}

static int64_t wave_of(const mz_update *a, int64_t first) {
    return a->matrices - first < WAVE ? a->matrices - first : (int64_t)WAVE;
}

/* Places the parts of the scratch and returns its size. */
static size_t place(step_work *w, char *workspace) {
    const mz_update *a = &w->a;
    if (!has_clip(a))
        return 0;
    const int64_t sums = a->matrices * (mz_keeps_factors(a) ? w->tiles : w->blocks);
    const int64_t parts = mz_keeps_factors(a) ? wave_of(a, 0) * w->blocks * 2 * a->cols : 0;
    size_t used = 0;
    w->sum = (float *)mz_take(workspace, &used, sizeof(float) * (size_t)sums);
    w->clip = (float *)mz_take(workspace, &used, sizeof(float) * (size_t)a->matrices);
    w->part = (float *)mz_take(workspace, &used, sizeof(float) * (size_t)parts);
    if (mz_keeps_factors(a))
        w->bound = (float *)mz_take(workspace, &used, sizeof(float) * (size_t)a->matrices);
    return used;
}

static step_work work_of(const mz_update *a) {
    step_work w = {};
    w.a = *a;
    w.r = mz_update_rates_of(a);
    w.random = mz_random_of(a->seed, a->tensor, (uint64_t)a->step);
    /* Settings without momentum read none. */
    if (!mz_keeps_momentum(a))
        w.a.m = NULL;
    set_blocks(&w);
    return w;
}

static int write_clip(void *stream, const step_work *w, int64_t sums, int64_t matrices) {
    return w->a.clip_tensor
               ? CU_LAUNCH(clip_kernel, 1, CU_BLOCK, 0, stream, *w, sums, true)
               : CU_LAUNCH(clip_kernel, (unsigned)matrices, CU_BLOCK, 0, stream, *w, sums, false);
}

/* The most that kernels of this file ask for; beyond it columns' sums live in the scratch. */
static int allow_shared(const mz_cuda_device *d, step_work *w, size_t *statistics, size_t *write) {
    *statistics = *write = 0;
    w->in_shared = 2 * sizeof(float) * (size_t)w->a.cols <= (size_t)d->shared_most / 2;
    if (!w->in_shared)
        return 0;
    *statistics = 2 * sizeof(float) * (size_t)w->a.cols;
    *write = sizeof(float) * (size_t)w->a.cols;
    int error = cu_allow_shared(factored_statistics, (int)*statistics);
    return error ? error : cu_allow_shared(factored_write, (int)*write);
}

static int update_factored(const mz_cuda_device *d, void *stream, step_work *w) {
    const mz_update *a = &w->a;
    size_t statistics, write;
    int error = allow_shared(d, w, &statistics, &write);
    if (!error)
        error = CU_LAUNCH(factored_bounds, (unsigned)a->matrices, CU_BLOCK, 0, stream, *w);
    for (w->first = 0; !error && w->first < a->matrices; w->first += WAVE) {
        const int64_t wave = wave_of(a, w->first);
        error = CU_LAUNCH(factored_statistics, (unsigned)(wave * w->blocks), CU_BLOCK, statistics,
                          stream, *w);
        if (!error)
            error =
                CU_LAUNCH(factored_columns, (unsigned)(wave * w->tiles), CU_BLOCK, 0, stream, *w);
        if (!error && !a->clip_tensor)
            error = write_clip(stream, w, w->tiles, wave);
        if (!error && !a->clip_tensor)
            error = CU_LAUNCH(factored_write, (unsigned)(wave * w->blocks), CU_BLOCK, write, stream,
                              *w);
    }
    if (error || !a->clip_tensor)
        return error;
    error = write_clip(stream, w, w->tiles, a->matrices);
    for (w->first = 0; !error && w->first < a->matrices; w->first += WAVE)
        error = CU_LAUNCH(factored_write, (unsigned)(wave_of(a, w->first) * w->blocks), CU_BLOCK,
                          write, stream, *w);
    return error;
}

static int update_full(void *stream, step_work *w) {
    const unsigned blocks = (unsigned)(w->a.matrices * w->blocks);
    int error = CU_LAUNCH(full_statistics, blocks, CU_BLOCK, 0, stream, *w);
    w->first = 0;
    if (!error)
        error = write_clip(stream, w, w->blocks, w->a.matrices);
    return error ? error : CU_LAUNCH(full_write, blocks, CU_BLOCK, 0, stream, *w);
}

/* Places Muon's parts; `products` is the scratch of the grouped GEMM. */
static size_t place_muon(const mz_cuda_device *d, muon_work *w, char *workspace, void **products) {
    const int64_t s = muon_short(w->a), l = muon_long(w->a);
    size_t used = 0;
    w->x = (uint16_t *)mz_take(workspace, &used, 2 * (size_t)(s * l));
    w->y = (uint16_t *)mz_take(workspace, &used, 2 * (size_t)(s * l));
    w->gram = (uint16_t *)mz_take(workspace, &used, 2 * (size_t)(s * s));
    w->poly = (uint16_t *)mz_take(workspace, &used, 2 * (size_t)(s * s));
    w->norm2 = (float *)mz_take(workspace, &used, sizeof(float) * NORM_BLOCKS);
    w->begin = (int64_t *)mz_take(workspace, &used, 2 * sizeof(int64_t));
    w->weight = (void **)mz_take(workspace, &used, sizeof(void *));
    mz_product_args args = {};
    args.groups.groups = 1;
    args.groups.rows_max = s;
    args.n = s;
    args.k = l;
    args.type = MZ_BF16;
    *products = mz_take(workspace, &used, mz_cuda_grouped_gemm_workspace(d, &args));
    return used;
}

static int update_muon(const mz_cuda_device *d, void *stream, const mz_update *a, char *workspace) {
    muon_work w = {};
    w.a = *a;
    w.random = mz_random_of(a->seed, a->tensor, (uint64_t)a->step);
    void *products;
    place_muon(d, &w, workspace, &products);
    const int64_t values = a->rows * a->cols;
    const unsigned blocks = cu_blocks(d, values, CU_BLOCK);
    const unsigned sums = blocks < NORM_BLOCKS ? blocks : (unsigned)NORM_BLOCKS;
    int error = 0;
    for (w.matrix = 0; !error && w.matrix < a->matrices; w.matrix++) {
        error = (int)cudaMemsetAsync(w.x, 0, 2 * (size_t)(muon_short(*a) * muon_long(*a)),
                                     (cudaStream_t)stream);
        if (!error)
            error = CU_LAUNCH(muon_momentum, sums, CU_BLOCK, 0, stream, w);
        if (!error)
            error = CU_LAUNCH(muon_normalize, blocks, CU_BLOCK, 0, stream, w, (int64_t)sums);
        for (int32_t i = 0; !error && i < a->newton_schulz; i++)
            error = newton_schulz(d, stream, &w, products);
        if (!error)
            error = CU_LAUNCH(muon_write, blocks, CU_BLOCK, 0, stream, w);
    }
    return error;
}

extern "C" size_t mz_cuda_update_step_workspace(const mz_cuda_device *d, const mz_update *a) {
    if (a->kind == MZ_UPDATE_MUON) {
        muon_work w = {};
        w.a = *a;
        void *products;
        return place_muon(d, &w, NULL, &products);
    }
    step_work w = work_of(a);
    return place(&w, NULL);
}

extern "C" int mz_cuda_update_step(const mz_cuda_device *d, void *stream, const mz_update *a,
                                   void *workspace) {
    if (a->kind == MZ_UPDATE_MUON)
        return update_muon(d, stream, a, (char *)workspace);
    step_work w = work_of(a);
    place(&w, (char *)workspace);
    if (w.blocks * a->matrices > INT32_MAX || w.tiles * a->matrices > INT32_MAX)
        return (int)cudaErrorInvalidValue;
    const unsigned blocks = (unsigned)(a->matrices * w.blocks);
    if (a->kind == MZ_UPDATE_ADAMW)
        return CU_LAUNCH(adamw_kernel, blocks, CU_BLOCK, 0, stream, w);
    if (a->kind == MZ_UPDATE_LION)
        return CU_LAUNCH(lion_kernel, blocks, CU_BLOCK, 0, stream, w);
    return mz_keeps_factors(a) ? update_factored(d, stream, &w) : update_full(stream, &w);
}
