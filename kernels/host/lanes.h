/* Vectors of fp32 for the files that are compiled once per instruction set, with MZ_SIMD naming it:
 * LANES values, as many as one register has. Sums are kept in 16 partial sums whatever the width,
 * so that every instruction set gives the same bits. Ends of rows that do not
 * fill a register go through a copy padded with zeros, so that they take the same arithmetic. */
#ifndef MIZAN_KERNELS_HOST_LANES_H
#define MIZAN_KERNELS_HOST_LANES_H

#include "kernels/arithmetic.h"
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MZ_TABLE_OF(name, simd) name##_##simd
#define MZ_TABLE_OF_(name, simd) MZ_TABLE_OF(name, simd)
#define MZ_TABLE(name) MZ_TABLE_OF_(name, MZ_SIMD)
#define MZ_TEXT_OF(simd) #simd
#define MZ_TEXT_OF_(simd) MZ_TEXT_OF(simd)
#define MZ_SIMD_TEXT MZ_TEXT_OF_(MZ_SIMD)

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define SUMS 16 /* partial sums */
#define PER_SUM (SUMS / LANES)

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef float quad __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

INLINE lanes load_f32(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_f32(float *p, lanes v) {
    memcpy(p, &v, sizeof v);
}
/* By intrinsics: gcc 12 takes general conversions apart. */
INLINE bits load_u16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
#elif defined(__AVX2__)
    return (bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#else
    halves h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, bits);
#endif
}
INLINE lanes load_bf16(const uint16_t *p) {
    return (lanes)(load_u16(p) << 16);
}
/* Stores the upper halves of the lanes; two registers at a time are cheaper. */
INLINE void store_upper(uint16_t *p, bits v) {
#if defined(__AVX512F__) || !defined(__AVX2__)
    const halves h = __builtin_convertvector(v >> 16, halves);
    memcpy(p, &h, sizeof h);
#else
    const __m256i upper = (__m256i)(v >> 16), both = _mm256_packus_epi32(upper, upper);
    _mm_storeu_si128((__m128i *)(void *)p,
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x08)));
#endif
}
INLINE void store_upper2(uint16_t *p, bits v, bits w) {
#if defined(__AVX512F__) || !defined(__x86_64__)
    store_upper(p, v);
    store_upper(p + LANES, w);
#elif defined(__AVX2__)
    const __m256i both = _mm256_packus_epi32((__m256i)(v >> 16), (__m256i)(w >> 16));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permute4x64_epi64(both, 0xd8));
#else
    const __m128i both = _mm_packs_epi32((__m128i)((ints)v >> 16), (__m128i)((ints)w >> 16));
    _mm_storeu_si128((__m128i *)(void *)p, both);
#endif
}
/* The nearest bf16, ties to even, in the upper halves; the lower halves are left over. A NaN whose
 * lower half is zero stays one: what comes from bf16, or from an operation on numbers. */
INLINE bits round_number(lanes v) {
    const bits u = (bits)v;
    return u + (0x7fffu + (u >> 16 & 1u));
}
/* The same for any NaN that arithmetic leaves (quiet): it is cut. */
INLINE bits round_bf16(lanes v) {
    const bits u = (bits)v, nan = (bits)(v != v);
    return u + ((0x7fffu + (u >> 16 & 1u)) & ~nan);
}
/* As mz_to_bf16, any NaN becoming a quiet one. */
INLINE bits round_any(lanes v) {
    return round_bf16(v) | (0x400000u & (bits)(v != v));
}

/* A row's last lanes, the missing ones zero. */
INLINE lanes load_some_f32(const float *p, int64_t n) {
    float padded[LANES] = {0};
    memcpy(padded, p, sizeof *p * (size_t)n);
    return load_f32(padded);
}
INLINE lanes load_some_bf16(const uint16_t *p, int64_t n) {
    uint16_t padded[LANES] = {0};
    memcpy(padded, p, sizeof *p * (size_t)n);
    return load_bf16(padded);
}
INLINE void store_some_f32(float *p, lanes v, int64_t n) {
    float padded[LANES];
    store_f32(padded, v);
    memcpy(p, padded, sizeof *p * (size_t)n);
}
INLINE void store_some_upper(uint16_t *p, bits v, int64_t n) {
    uint16_t padded[LANES];
    store_upper(padded, v);
    memcpy(p, padded, sizeof *p * (size_t)n);
}
/* Columns [i, i + n) of a row, at most LANES. */
INLINE lanes load(mz_dtype type, const void *p, int64_t i, int64_t n) {
    if (type == MZ_BF16) {
        const uint16_t *h = (const uint16_t *)p + i;
        return n >= LANES ? load_bf16(h) : load_some_bf16(h, n);
    }
    const float *f = (const float *)p + i;
    return n >= LANES ? load_f32(f) : load_some_f32(f, n);
}
INLINE void store(float *p, int64_t i, lanes v, int64_t n) {
    if (n >= LANES)
        store_f32(p + i, v);
    else
        store_some_f32(p + i, v, n);
}

/* ---- 16 columns ---------------------------------------------------------------------------------
 * As many as there are partial sums. bf16 are taken apart into even and odd columns, which costs
 * one operation a register: place i / 2 + 8 (i % 2) has column i (MZ_PLACE). Partial sums are by
 * place. */
typedef struct sums {
    lanes part[PER_SUM];
} sums;

INLINE sums load16_bf16(const uint16_t *p) {
    sums v;
#if defined(__AVX512F__)
    const __m256i both = _mm256_loadu_si256((const __m256i *)(const void *)p);
    const __m256i odd = _mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000u));
    v.part[0] =
        (lanes)_mm512_inserti64x4(_mm512_castsi256_si512(_mm256_slli_epi32(both, 16)), odd, 1);
#else
    for (int s = 0; s < PER_SUM / 2; s++) {
        bits both;
        memcpy(&both, p + 2 * s * LANES, sizeof both);
        v.part[s] = (lanes)(both << 16);
        v.part[s + PER_SUM / 2] = (lanes)(both & 0xffff0000u);
    }
#endif
    return v;
}
/* 16 numbers of 16 bits in the lower halves, `upper` above them. */
INLINE sums load16_u16(const uint16_t *p, uint32_t upper) {
    sums v;
#if defined(__AVX512F__)
    const __m256i both = _mm256_loadu_si256((const __m256i *)(const void *)p);
    const __m256i even = _mm256_blend_epi16(both, _mm256_setzero_si256(), 0xaa);
    v.part[0] = (lanes)((bits)_mm512_inserti64x4(_mm512_castsi256_si512(even),
                                                 _mm256_srli_epi32(both, 16), 1) |
                        upper);
#else
    for (int s = 0; s < PER_SUM / 2; s++) {
        bits both;
        memcpy(&both, p + 2 * s * LANES, sizeof both);
#if defined(__AVX2__)
        const __m256i above = _mm256_set1_epi32((int)upper);
        v.part[s] = (lanes)_mm256_blend_epi16((__m256i)both, above, 0xaa);
#else
        v.part[s] = (lanes)((both & 0xffffu) | upper);
#endif
        v.part[s + PER_SUM / 2] = (lanes)(both >> 16 | upper);
    }
#endif
    return v;
}
INLINE sums load16_f32(const float *p) {
    sums v;
    for (int s = 0; s < PER_SUM; s++)
        v.part[s] = load_f32(p + s * LANES);
    return v;
}
/* Columns [i, i + n) of a row, n <= 16, the others zero. */
INLINE sums load16(mz_dtype type, const void *p, int64_t i, int64_t n) {
    char padded[SUMS * sizeof(float)] = {0};
    const size_t size = type == MZ_BF16 ? 2 : 4;
    const void *from = (const char *)p + (size_t)i * size;
    if (n < SUMS)
        from = memcpy(padded, from, size * (size_t)n);
    return type == MZ_BF16 ? load16_bf16(from) : load16_f32(from);
}

/* v as it is stored; of bf16 the lower halves are zero. */
INLINE sums round16(mz_dtype type, sums v) {
    for (int s = 0; s < PER_SUM && type == MZ_BF16; s++)
        v.part[s] = (lanes)(round_number(v.part[s]) & 0xffff0000u);
    return v;
}

/* How a row is written: `STREAM` past the caches, where nobody reads it soon. */
typedef enum mz_way { CACHED, STREAM } mz_way;

INLINE void put_register(void *p, bits v, mz_way way) {
#if defined(__AVX512F__)
    if (way == STREAM) {
        _mm512_stream_si512((__m512i *)p, (__m512i)v);
        return;
    }
#elif defined(__AVX2__)
    if (way == STREAM) {
        _mm256_stream_si256((__m256i *)p, (__m256i)v);
        return;
    }
#endif
    memcpy(p, &v, sizeof v);
}
INLINE void put16_f32(float *p, sums v, mz_way way) {
    for (int s = 0; s < PER_SUM; s++)
        put_register(p + s * LANES, (bits)v.part[s], way);
}
/* The upper halves. */
INLINE void put16_bf16(uint16_t *p, sums v, mz_way way) {
#if defined(__AVX512F__)
    const __m256i even = _mm512_castsi512_si256((__m512i)v.part[0]);
    const __m256i odd = _mm512_extracti64x4_epi64((__m512i)v.part[0], 1);
    const __m256i both = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
    if (way == STREAM)
        _mm256_stream_si256((__m256i *)(void *)p, both);
    else
        _mm256_storeu_si256((__m256i *)(void *)p, both);
#else
    for (int s = 0; s < PER_SUM / 2; s++) {
        const bits even = (bits)v.part[s] >> 16, odd = (bits)v.part[s + PER_SUM / 2];
#if defined(__AVX2__)
        const bits both = (bits)_mm256_blend_epi16((__m256i)even, (__m256i)odd, 0xaa);
#else
        const bits both = even | (odd & 0xffff0000u);
#endif
        put_register(p + 2 * s * LANES, both, way);
    }
#endif
}
/* Writes columns [i, i + n) of a row, n <= 16, of bf16 the upper halves; fewer are never streamed.
 */
INLINE void store16(mz_dtype type, void *p, int64_t i, sums v, int64_t n, mz_way way) {
    char padded[SUMS * sizeof(float)];
    const size_t size = type == MZ_BF16 ? 2 : 4;
    void *row = (char *)p + (size_t)i * size, *to = n < SUMS ? padded : row;
    if (type == MZ_BF16)
        put16_bf16(to, v, n < SUMS ? CACHED : way);
    else
        put16_f32(to, v, n < SUMS ? CACHED : way);
    if (n < SUMS)
        memcpy(row, padded, size * (size_t)n);
}

/* Halves are added until one is left. */
INLINE float total(const sums *s) {
    quad q[SUMS / 4];
    memcpy(q, s->part, sizeof q);
    q[0] = (q[0] + q[2]) + (q[1] + q[3]);
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}

/* The larger or smaller of both; b where either is NaN. */
#if defined(__AVX512F__)
#define LANES_OF(op, a, b) ((lanes)_mm512_##op##_ps((__m512)(a), (__m512)(b)))
#elif defined(__AVX2__)
#define LANES_OF(op, a, b) ((lanes)_mm256_##op##_ps((__m256)(a), (__m256)(b)))
#elif defined(__x86_64__)
#define LANES_OF(op, a, b) ((lanes)_mm_##op##_ps((__m128)(a), (__m128)(b)))
#endif
INLINE lanes larger(lanes a, lanes b) {
#if defined(LANES_OF)
    return LANES_OF(max, a, b);
#else
    const ints yes = a > b;
    return (lanes)(((ints)a & yes) | ((ints)b & ~yes));
#endif
}
INLINE lanes smaller(lanes a, lanes b) {
#if defined(LANES_OF)
    return LANES_OF(min, a, b);
#else
    const ints yes = a < b;
    return (lanes)(((ints)a & yes) | ((ints)b & ~yes));
#endif
}
INLINE lanes all_lanes(float x) {
    return (lanes){0} + x;
}

INLINE lanes root_of(lanes x) {
#if defined(__AVX512F__)
    return (lanes)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (lanes)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (lanes)_mm_sqrt_ps((__m128)x);
#else
    lanes y = x;
    for (int i = 0; i < LANES; i++)
        y[i] = sqrtf(x[i]);
    return y;
#endif
}

/* ---- 1 / (1 + e^-x) -----------------------------------------------------------------------------
 * In two steps, for loops of their own: one chain of so many operations would let a processor find
 * too few of them that are independent. -x is `rest` and a whole number of ln 2, whose power of two
 * is added to an exponent. 0 where e^-x is beyond FLT_MAX, 1 where it vanishes beside 1. Of NaN any
 * number: what it is multiplied with is NaN itself. */
typedef struct reduced {
    lanes rest;
    bits power;
} reduced;

/* Of fp32 by Cody and Waite, of bf16 in units of ln 2. e^-x has reached infinity at the upper
 * bound, of bf16 with nothing left. */
INLINE reduced reduce(mz_dtype type, lanes x) {
    const float round = 12582912.0f; /* added: the nearest whole number, in the low bits */
    if (type == MZ_BF16) {
        const lanes y = larger(smaller(x * -1.44269504f, all_lanes(128.0f)), all_lanes(-126.0f));
        const lanes n = y + round;
        return (reduced){y - (n - round), (bits)n << 23};
    }
    const lanes y = larger(smaller(-x, all_lanes(89.0f)), all_lanes(-87.0f));
    const lanes n = y * 1.44269504f + round, whole = n - round;
    return (reduced){(y - whole * 0.693359375f) + whole * 2.12194440e-4f, (bits)n << 23};
}

/* e^r = (even + odd) / (even - odd), odd / even the hyperbolic tangent of r / 2 as near as its
 * degree allows on [-ln 2 / 2, ln 2 / 2]: to 5e-10 in fp32, to 5e-7 for bf16. Exact with roundings
 * to 2.5 units in the last place of fp32; for bf16, which rounds to 4e-3, to 5e-6. */
INLINE lanes sigmoid(mz_dtype type, reduced x) {
    const lanes r = x.rest, r2 = r * r;
    if (type == MZ_BF16) {
        const lanes even = 1.0f + r2 * 0.039937526f, odd = r * 0.34657142f, under = even - odd;
        return under / (under + (lanes)((bits)(even + odd) + x.power));
    }
    const lanes even = 1.0f + r2 * (0.0833330889f + r2 * -0.001382996962f), odd = r * 0.5f;
    const lanes under = even - odd, over = (lanes)((bits)(even + odd) + x.power);
    return under / (under + smaller(over, all_lanes(INFINITY)));
}

/* ---- Philox -------------------------------------------------------------------------------------
 * Words are kept in the lower halves of 64-bit lanes, a block of mz_philox_at in each: what a
 * product leaves in the upper halves disturbs neither products nor exclusive ors. */
enum { BLOCKS = LANES / 2, ROUNDS = 10 };

typedef uint64_t words __attribute__((vector_size(4 * LANES)));

/* Products of the lower halves. */
INLINE words multiply(words x, uint32_t factor) {
#if defined(__AVX512F__)
    return (words)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    return (words)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#elif defined(__x86_64__)
    return (words)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(factor));
#else
    return (x & 0xffffffffu) * factor;
#endif
}

typedef struct round_keys {
    words first[ROUNDS], second[ROUNDS];
} round_keys;
INLINE round_keys keys_of(uint64_t seed) {
    round_keys keys;
    uint64_t k0 = seed, k1 = seed >> 32;
    for (int i = 0; i < ROUNDS; i++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        keys.first[i] = (words){0} + k0;
        keys.second[i] = (words){0} + k1;
    }
    return keys;
}

/* The words of blocks `counter`, and of those BLOCKS further on: one set works while the other
 * waits for its products. Upper halves are left over. */
INLINE void philox_twice(const round_keys *keys, words counter, uint64_t b, uint64_t c,
                         words x[2][4]) {
    for (int s = 0; s < 2; s++) {
        const words at = counter + (uint64_t)(s * BLOCKS);
        x[s][0] = at;
        x[s][1] = at >> 32;
        x[s][2] = 0 * at + b;
        x[s][3] = 0 * at + c;
    }
    for (int i = 0; i < ROUNDS; i++)
        for (int s = 0; s < 2; s++) {
            const words first = multiply(x[s][0], 0xD2511F53u);
            const words second = multiply(x[s][2], 0xCD9E8D57u);
            x[s][0] = second >> 32 ^ (x[s][1] ^ keys->first[i]);
            x[s][1] = second;
            x[s][2] = first >> 32 ^ (x[s][3] ^ keys->second[i]);
            x[s][3] = first;
        }
}

#endif
