/* Vectors of fp32 for the files that are compiled once per instruction set, with MZ_SIMD naming it:
 * LANES values, as many as one register has. Sums are kept in 16 partial sums whatever the width,
 * by column modulo 16, so that every instruction set gives the same bits. Ends of rows that do not
 * fill a register go through a padded copy, so that they take the same arithmetic. */
#ifndef MIZAN_KERNELS_HOST_LANES_H
#define MIZAN_KERNELS_HOST_LANES_H

#include "kernels/arithmetic.h"

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
INLINE ints load_i16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#else
    return (ints)(load_u16(p) << 16) >> 16;
#endif
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
/* The nearest bf16, ties to even, in the upper halves; the lower halves are left over. Not for
 * NaN. */
INLINE bits round_number(lanes v) {
    const bits u = (bits)v;
    return u + (0x7fffu + (u >> 16 & 1u));
}
/* The same, for a NaN too as arithmetic leaves it (quiet): it is cut, so it stays one. */
INLINE bits round_bf16(lanes v) {
    const bits u = (bits)v, nan = (bits)(v != v);
    return u + ((0x7fffu + (u >> 16 & 1u)) & ~nan);
}
/* As mz_to_bf16, any NaN becoming a quiet one. */
INLINE void store_bf16(uint16_t *p, lanes v) {
    store_upper(p, round_bf16(v) | (0x400000u & (bits)(v != v)));
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
INLINE void store_some_bf16(uint16_t *p, lanes v, int64_t n) {
    uint16_t padded[LANES];
    store_bf16(padded, v);
    memcpy(p, padded, sizeof *p * (size_t)n);
}

/* ---- 16 partial sums ----------------------------------------------------------------------------
 * In registers while whole rounds of 16 columns last (sums), then in memory for the end of the row
 * (tail): column i adds to partial sum i % 16. */
typedef struct sums {
    lanes part[PER_SUM];
} sums;
typedef struct tail {
    float part[SUMS];
} tail;
INLINE tail tail_of(const sums *s) {
    tail t;
    for (int i = 0; i < PER_SUM; i++)
        store_f32(t.part + i * LANES, s->part[i]);
    return t;
}
/* The first n lanes of v, columns i and on. */
INLINE void tail_add(tail *t, int64_t i, lanes v, int64_t n) {
    float value[LANES];
    store_f32(value, v);
    for (int64_t l = 0; l < LANES && l < n; l++)
        t->part[(i + l) % SUMS] += value[l];
}
/* Halves are added until one sum is left. */
INLINE float tail_sum(const tail *t) {
    quad q[SUMS / 4];
    memcpy(q, t->part, sizeof q);
    q[0] = (q[0] + q[2]) + (q[1] + q[3]);
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
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

/* e^x to about one unit in the last place for x in [-87.3, 88.3], where the result and the power of
 * two in it are normal numbers; 0 below, infinity above. Cody and Waite's reduction, then the
 * series of degree 7 on [-ln 2 / 2, ln 2 / 2]. */
INLINE lanes exp_of(lanes x) {
    const ints over = x > 88.3f, under = x < -87.3f, nan = x != x;
    const lanes shift = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* nearest whole number */
    const lanes r = (x - shift * 0.693359375f) + shift * 2.12194440e-4f;
    lanes y = 1.0f / 5040 + 0 * r;
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    const ints clear = over | under | nan;
    const lanes whole = (lanes)((ints)shift & ~clear); /* no conversion of what does not fit */
    const ints power = (__builtin_convertvector(whole, ints) + 127) << 23;
    const lanes value = y * (lanes)power;
    return (lanes)(((bits)value & ~(bits)clear) | (0x7f800000u & (bits)over) |
                   ((bits)x & (bits)nan));
}
INLINE lanes sigmoid_of(lanes x) {
    return 1.0f / (1.0f + exp_of(-x));
}

#endif
