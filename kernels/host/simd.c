/* Inner loops on rows, compiled once per instruction set with MZ_SIMD naming the table. */
#include "kernels/host/host.h"
#include "kernels/host/lanes.h"

static void widen(float *to, const uint16_t *from, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_f32(to + i, load_bf16(from + i));
    if (i < n)
        store_some_f32(to + i, load_some_bf16(from + i, n - i), n - i);
}

static void narrow(uint16_t *to, const float *from, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_bf16(to + i, load_f32(from + i));
    if (i < n)
        store_some_bf16(to + i, load_some_f32(from + i, n - i), n - i);
}

/* The loops below exist for both storage types; `kind` is f32 or bf16. LOAD reads what there is. */
#define LOAD(kind, p, n) ((n) >= LANES ? load_##kind(p) : load_some_##kind(p, n))
#define STORE(kind, p, v, n) ((n) >= LANES ? store_##kind(p, v) : store_some_##kind(p, v, n))

#define LOOPS(kind, type)                                                                          \
    static float dot_##kind(const type *a, const type *b, int64_t n) {                             \
        sums sum = {0};                                                                            \
        int64_t i = 0;                                                                             \
        for (; i + SUMS <= n; i += SUMS)                                                           \
            for (int s = 0; s < PER_SUM; s++)                                                      \
                sum.part[s] += load_##kind(a + i + s * LANES) * load_##kind(b + i + s * LANES);    \
        tail t = tail_of(&sum);                                                                    \
        for (; i < n; i += LANES)                                                                  \
            tail_add(&t, i, LOAD(kind, a + i, n - i) * LOAD(kind, b + i, n - i), n - i);           \
        return tail_sum(&t);                                                                       \
    }                                                                                              \
    static float norm2_##kind(const type *x, int64_t n) {                                          \
        return dot_##kind(x, x, n);                                                                \
    }                                                                                              \
    static void scale_##kind(type *to, const type *from, float factor, int64_t n) {                \
        for (int64_t i = 0; i < n; i += LANES)                                                     \
            STORE(kind, to + i, LOAD(kind, from + i, n - i) * factor, n - i);                      \
    }                                                                                              \
    static void add_##kind(float *sum, const type *row, float factor, int64_t n) {                 \
        for (int64_t i = 0; i < n; i += LANES)                                                     \
            STORE(f32, sum + i, LOAD(f32, sum + i, n - i) + LOAD(kind, row + i, n - i) * factor,   \
                  n - i);                                                                          \
    }

LOOPS(f32, float)
LOOPS(bf16, uint16_t)

INLINE lanes gated(lanes u, lanes v) {
    return u * sigmoid_of(u) * v;
}

typedef struct gated_back {
    lanes du, dv, h;
} gated_back;

INLINE gated_back back_of(lanes u, lanes v, lanes dh) {
    const lanes s = sigmoid_of(u), silu = u * s;
    return (gated_back){dh * v * (s * (1.0f + u * (1.0f - s))), dh * silu, silu * v};
}

/* `_one` takes up to LANES columns and returns what they add to the sum. h is summed as stored. */
#define SWIGLU(kind, type)                                                                         \
    INLINE lanes swiglu_one_##kind(type *h, const type *u, const type *v, int64_t n) {             \
        STORE(kind, h, gated(LOAD(kind, u, n), LOAD(kind, v, n)), n);                              \
        const lanes y = LOAD(kind, h, n);                                                          \
        return y * y;                                                                              \
    }                                                                                              \
    static float swiglu_##kind(type *h, const type *u, const type *v, int64_t n) {                 \
        sums sum = {0};                                                                            \
        int64_t i = 0;                                                                             \
        for (; i + SUMS <= n; i += SUMS)                                                           \
            for (int s = 0; s < PER_SUM; s++) {                                                    \
                const int64_t j = i + s * LANES;                                                   \
                sum.part[s] += swiglu_one_##kind(h + j, u + j, v + j, LANES);                      \
            }                                                                                      \
        tail t = tail_of(&sum);                                                                    \
        for (; i < n; i += LANES)                                                                  \
            tail_add(&t, i, swiglu_one_##kind(h + i, u + i, v + i, n - i), n - i);                 \
        return tail_sum(&t);                                                                       \
    }                                                                                              \
    INLINE lanes swiglu_back_one_##kind(type *du, type *dv, type *h, const type *u, const type *v, \
                                        const type *dh, float factor, int64_t n) {                 \
        const lanes d = LOAD(kind, dh, n);                                                         \
        const gated_back g = back_of(LOAD(kind, u, n), LOAD(kind, v, n), d * factor);              \
        STORE(kind, du, g.du, n);                                                                  \
        STORE(kind, dv, g.dv, n);                                                                  \
        if (h)                                                                                     \
            STORE(kind, h, g.h, n);                                                                \
        return d * g.h;                                                                            \
    }                                                                                              \
    static float swiglu_back_##kind(type *du, type *dv, type *h, const type *u, const type *v,     \
                                    const type *dh, float factor, int64_t n) {                     \
        sums sum = {0};                                                                            \
        int64_t i = 0;                                                                             \
        for (; i + SUMS <= n; i += SUMS)                                                           \
            for (int s = 0; s < PER_SUM; s++) {                                                    \
                const int64_t j = i + s * LANES;                                                   \
                sum.part[s] += swiglu_back_one_##kind(du + j, dv + j, h ? h + j : NULL, u + j,     \
                                                      v + j, dh + j, factor, LANES);               \
            }                                                                                      \
        tail t = tail_of(&sum);                                                                    \
        for (; i < n; i += LANES)                                                                  \
            tail_add(&t, i,                                                                        \
                     swiglu_back_one_##kind(du + i, dv + i, h ? h + i : NULL, u + i, v + i,        \
                                            dh + i, factor, n - i),                                \
                     n - i);                                                                       \
        return tail_sum(&t);                                                                       \
    }

SWIGLU(f32, float)
SWIGLU(bf16, uint16_t)

const mz_simd MZ_TABLE(mz_simd) = {.name = MZ_SIMD_TEXT,
                                   .widen = widen,
                                   .narrow = narrow,
                                   .norm2_f32 = norm2_f32,
                                   .norm2_bf16 = norm2_bf16,
                                   .dot_f32 = dot_f32,
                                   .dot_bf16 = dot_bf16,
                                   .scale_f32 = scale_f32,
                                   .scale_bf16 = scale_bf16,
                                   .add_f32 = add_f32,
                                   .add_bf16 = add_bf16,
                                   .swiglu_f32 = swiglu_f32,
                                   .swiglu_bf16 = swiglu_bf16,
                                   .swiglu_back_f32 = swiglu_back_f32,
                                   .swiglu_back_bf16 = swiglu_back_bf16};
