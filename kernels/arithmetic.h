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

/* Bits of the elements of a parameter: 16 each, a pure function of (seed, tensor, step, number of
 * the element in its tensor). A block of Philox for every eight elements would cost more than all
 * else that a step does, so Philox makes keys alone, and words are counted and mixed:
 *
 * stream: Philox at (tensor, step) under the seed gives a key and half of a counter. All 128 bits
 *     of both coordinates count.
 * substream, of MZ_SUBSTREAM elements: Philox at (its number, that half) under that key gives four
 *     words.
 * word i of it: start + i * increment, as in SplitMix (Steele, Lea and Flood, OOPSLA'14; start and
 *     the odd increment are the substream's own), through the finaliser of three products with the
 *     least known bias, 2e-4 of an avalanche (triple32 of Wellons' search for such, public domain).
 *     The other two words of the substream enter between its products: substreams whose counters
 *     meet are no copies of each other.
 *
 * Two elements share a word, the even one its lower half. A word does not repeat within a
 * substream, which 4096 draws out of 2^32 do not show. tests/kernels/test_random.c has the
 * statistics. */
enum { MZ_SUBSTREAM = 8192 };
typedef struct mz_substream {
    uint64_t number; /* of elements from number * MZ_SUBSTREAM on */
    uint32_t start, increment, mask[2];
} mz_substream;
typedef struct mz_random {
    uint64_t key;
    uint32_t counter[2];
    mz_substream at; /* the one that was reached last */
} mz_random;
MZ_HD void mz_random_enter(mz_random *r, uint64_t number) {
    uint32_t four[4];
    mz_philox_at(r->key, number, r->counter[0], r->counter[1], four);
    r->at.number = number;
    r->at.start = four[0];
    r->at.increment = four[1] | 1u;
    r->at.mask[0] = four[2];
    r->at.mask[1] = four[3];
}
MZ_HD mz_random mz_random_of(uint64_t seed, uint64_t tensor, uint64_t step) {
    mz_random r;
    uint32_t four[4];
    mz_philox_at(seed, tensor, (uint32_t)step, (uint32_t)(step >> 32), four);
    r.key = (uint64_t)four[1] << 32 | four[0];
    r.counter[0] = four[2];
    r.counter[1] = four[3];
    mz_random_enter(&r, 0);
    return r;
}
/* Enters the substream of an element unless it is there. */
MZ_HD void mz_random_reach(mz_random *r, uint64_t element) {
    if (element / MZ_SUBSTREAM != r->at.number)
        mz_random_enter(r, element / MZ_SUBSTREAM);
}
/* Of elements 2 i and 2 i + 1 of the substream. */
MZ_HD uint32_t mz_random_word(const mz_substream *s, uint32_t i) {
    uint32_t x = s->start + i * s->increment;
    x = (x ^ x >> 17) * 0xed5ad4bbu;
    x = (x ^ x >> 11 ^ s->mask[0]) * 0xac4c1b51u;
    x = (x ^ x >> 15 ^ s->mask[1]) * 0x31848babu;
    return x ^ x >> 14;
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
/* From 16 random bits. Reference dither: q (1 + s 2^-7), s in [-1/2, 1/2) the bits over 2^16 less a
 * half, then nearest even. That is q + s |q| 2^-7 with the draw mirrored for a negative q. The
 * factor is exact: the bits are the lower ones of a number in [1, 1 + 2^-7). */
#define MZ_DITHER_ONE 0x3f800000u
MZ_HD uint16_t mz_bf16_dither(float q, uint32_t bits) {
    const float factor = mz_bits_float(MZ_DITHER_ONE | (bits & 0xffffu)) - 0x1p-8f;
    return mz_to_bf16(MZ_MUL(q, factor));
}
/* Unbiased: 16 random bits below the mantissa, then cut. */
MZ_HD uint16_t mz_bf16_stochastic(float q, uint32_t bits) {
    const uint32_t u = mz_float_bits(q);
    if ((u & 0x7f800000u) == 0x7f800000u)
        return mz_to_bf16(q);
    return (uint16_t)((u + bits) >> 16);
}

#endif
