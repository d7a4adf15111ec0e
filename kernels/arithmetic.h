/* Arithmetic that the host and the CUDA backend share, so that both do the same: bf16, random bits,
 * scores, SwiGLU, the factored update. Pure functions; C11, C++ and CUDA. Products that must agree
 * bit by bit use explicit operations only (build without contraction on the host; __fmul_rn and
 * friends on the device through MZ_MUL, MZ_ADD). */
#ifndef MIZAN_KERNELS_ARITHMETIC_H
#define MIZAN_KERNELS_ARITHMETIC_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define MZ_HD __host__ __device__ static inline
#else
#define MZ_HD static inline
#endif
#if defined(__CUDA_ARCH__)
#define MZ_MUL(a, b) __fmul_rn((a), (b))
#define MZ_ADD(a, b) __fadd_rn((a), (b))
#else
#define MZ_MUL(a, b) ((a) * (b))
#define MZ_ADD(a, b) ((a) + (b))
#endif

/* ---- bits and bf16 ------------------------------------------------------------------------------
 */
MZ_HD uint32_t mz_float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}
MZ_HD float mz_bits_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
MZ_HD float mz_from_bf16(uint16_t h) {
    return mz_bits_float((uint32_t)h << 16);
}
/* Nearest even; NaN stays a (quiet) NaN. */
MZ_HD uint16_t mz_to_bf16(float f) {
    uint32_t u = mz_float_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* ---- random bits: Philox4x32-10 (Salmon et al., SC'11), the generator of common/base/rng.h
 * -------- A draw is a pure function of (seed, a, b, c): key = seed, counter = (a low, a high, b,
 * c). */
MZ_HD uint32_t mz_mulhi32(uint32_t a, uint32_t b) {
    return (uint32_t)(((uint64_t)a * b) >> 32);
}
MZ_HD void mz_philox_at(uint64_t seed, uint64_t a, uint32_t b, uint32_t c, uint32_t out[4]) {
    uint32_t x0 = (uint32_t)a, x1 = (uint32_t)(a >> 32), x2 = b, x3 = c;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < 10; i++) {
        const uint32_t h0 = mz_mulhi32(0xD2511F53u, x0), l0 = 0xD2511F53u * x0;
        const uint32_t h1 = mz_mulhi32(0xCD9E8D57u, x2), l1 = 0xCD9E8D57u * x2;
        x0 = h1 ^ x1 ^ k0;
        x1 = l1;
        x2 = h0 ^ x3 ^ k1;
        x3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = x0;
    out[1] = x1;
    out[2] = x2;
    out[3] = x3;
}
/* The 16 bits of one element of a tensor at one step. Eight neighbours share a block, the lower
 * half of a word before its upper half. */
MZ_HD uint32_t mz_element_bits(uint64_t seed, uint64_t step, uint64_t tensor, uint64_t element) {
    uint32_t four[4];
    mz_philox_at(seed, element / 8, (uint32_t)tensor, (uint32_t)step, four);
    return four[element % 8 / 2] >> (16 * (element % 2)) & 0xffffu;
}
/* The bits of one pair of a batch. */
MZ_HD uint32_t mz_pair_bits(uint64_t seed, uint64_t pair) {
    uint32_t four[4];
    mz_philox_at(seed, pair, 0x70616972u, 0, four);
    return four[0];
}
/* (0, 1], 24 bits. */
MZ_HD float mz_unit_float(uint32_t bits) {
    return (float)((bits >> 8) + 1u) * 0x1p-24f;
}

/* ---- SwiGLU -------------------------------------------------------------------------------------
 * Forward h = silu(u) v. Backward for dh: du = dh v silu'(u), dv = dh silu(u). */
MZ_HD float mz_sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}
MZ_HD float mz_silu(float u) {
    return u * mz_sigmoid(u);
}
MZ_HD float mz_silu_slope(float u) {
    const float s = mz_sigmoid(u);
    return s * (1.0f + u * (1.0f - s));
}

/* ---- scores (lrmoe.md sections 1 and 2) ---------------------------------------------------------
 */
MZ_HD float mz_finite_score(float s) {
    return s <= FLT_MAX ? s : FLT_MAX; /* infinity, and NaN, to the largest */
}
MZ_HD float mz_product3(float a, float b, float c) {
    return MZ_MUL(MZ_MUL(a, b), c);
}

/* ---- writing a bf16 parameter (moe-variants-and-optimizers.md 6.3) ------------------------------
 */
/* From 16 random bits. Reference dither: q + s |q| 2^-7, s in [-1/2, 1/2) their value as a signed
 * number over 2^16, then nearest even. */
MZ_HD uint16_t mz_bf16_dither(float q, uint32_t bits) {
    const float s = (float)(int16_t)(uint16_t)bits * 0x1p-23f;
    return mz_to_bf16(MZ_ADD(q, MZ_MUL(s, fabsf(q))));
}
/* Unbiased: 16 random bits below the mantissa, then cut. */
MZ_HD uint16_t mz_bf16_stochastic(float q, uint32_t bits) {
    const uint32_t u = mz_float_bits(q);
    if ((u & 0x7f800000u) == 0x7f800000u)
        return mz_to_bf16(q);
    return (uint16_t)((u + bits) >> 16);
}

#endif
