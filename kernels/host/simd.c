/* Inner loops on 16 lanes, compiled once per instruction set with MZ_SIMD naming the table: the
 * compiler splits the lanes over what registers there are. Ends of rows that do not fill 16 lanes
 * go through a padded copy, so that they take the same path. */
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

/* The loops below exist for both storage types; `kind` is f32 or bf16. */
#define LOOPS(kind, type)                                                                          \
    static float dot_##kind(const type *a, const type *b, int64_t n) {                             \
        lanes sum = {0};                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + LANES <= n; i += LANES)                                                         \
            sum += load_##kind(a + i) * load_##kind(b + i);                                        \
        if (i < n)                                                                                 \
            sum += load_some_##kind(a + i, n - i) * load_some_##kind(b + i, n - i);                \
        return sum_of(sum);                                                                        \
    }                                                                                              \
    static float norm2_##kind(const type *x, int64_t n) {                                          \
        return dot_##kind(x, x, n);                                                                \
    }                                                                                              \
    static void scale_##kind(type *to, const type *from, float factor, int64_t n) {                \
        int64_t i = 0;                                                                             \
        for (; i + LANES <= n; i += LANES)                                                         \
            store_##kind(to + i, load_##kind(from + i) * factor);                                  \
        if (i < n)                                                                                 \
            store_some_##kind(to + i, load_some_##kind(from + i, n - i) * factor, n - i);          \
    }                                                                                              \
    static void add_##kind(float *sum, const type *row, float factor, int64_t n) {                 \
        int64_t i = 0;                                                                             \
        for (; i + LANES <= n; i += LANES)                                                         \
            store_f32(sum + i, load_f32(sum + i) + load_##kind(row + i) * factor);                 \
        if (i < n)                                                                                 \
            store_some_f32(                                                                        \
                sum + i,                                                                           \
                load_some_f32(sum + i, n - i) + load_some_##kind(row + i, n - i) * factor, n - i); \
    }

LOOPS(f32, float)
LOOPS(bf16, uint16_t)

INLINE lanes gated(lanes u, lanes v) {
    return u * sigmoid_of(u) * v;
}

static float swiglu_f32(float *h, const float *u, const float *v, int64_t n) {
    lanes sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const lanes y = gated(load_f32(u + i), load_f32(v + i));
        store_f32(h + i, y);
        sum += y * y;
    }
    if (i < n) {
        const lanes y = gated(load_some_f32(u + i, n - i), load_some_f32(v + i, n - i));
        store_some_f32(h + i, y, n - i);
        sum += y * y;
    }
    return sum_of(sum);
}

static float swiglu_bf16(uint16_t *h, const uint16_t *u, const uint16_t *v, int64_t n) {
    lanes sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        store_bf16(h + i, gated(load_bf16(u + i), load_bf16(v + i)));
        const lanes y = load_bf16(h + i);
        sum += y * y;
    }
    if (i < n) {
        store_some_bf16(h + i, gated(load_some_bf16(u + i, n - i), load_some_bf16(v + i, n - i)),
                        n - i);
        const lanes y = load_some_bf16(h + i, n - i);
        sum += y * y;
    }
    return sum_of(sum);
}

typedef struct gated_back {
    lanes du, dv, h;
} gated_back;

INLINE gated_back back_of(lanes u, lanes v, lanes dh) {
    const lanes s = sigmoid_of(u), silu = u * s;
    return (gated_back){dh * v * (s * (1.0f + u * (1.0f - s))), dh * silu, silu * v};
}

#define SWIGLU_BACK(kind, type)                                                                    \
    static float swiglu_back_##kind(type *du, type *dv, type *h, const type *u, const type *v,     \
                                    const type *dh, float factor, int64_t n) {                     \
        lanes sum = {0};                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + LANES <= n; i += LANES) {                                                       \
            const lanes d = load_##kind(dh + i);                                                   \
            const gated_back g = back_of(load_##kind(u + i), load_##kind(v + i), d * factor);      \
            sum += d * g.h;                                                                        \
            store_##kind(du + i, g.du);                                                            \
            store_##kind(dv + i, g.dv);                                                            \
            if (h)                                                                                 \
                store_##kind(h + i, g.h);                                                          \
        }                                                                                          \
        const int64_t rest = n - i;                                                                \
        if (rest > 0) {                                                                            \
            const lanes d = load_some_##kind(dh + i, rest);                                        \
            const gated_back g =                                                                   \
                back_of(load_some_##kind(u + i, rest), load_some_##kind(v + i, rest), d * factor); \
            sum += d * g.h;                                                                        \
            store_some_##kind(du + i, g.du, rest);                                                 \
            store_some_##kind(dv + i, g.dv, rest);                                                 \
            if (h)                                                                                 \
                store_some_##kind(h + i, g.h, rest);                                               \
        }                                                                                          \
        return sum_of(sum);                                                                        \
    }

SWIGLU_BACK(f32, float)
SWIGLU_BACK(bf16, uint16_t)

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
