/* Inner loops of the optimizers, compiled once per instruction set with MZ_SIMD naming the table.
 *
 * The random bits of 4 * LANES neighbouring values are made at once: lane i of the generator makes
 * the four words of the block that elements 4i .. 4i+3 share (mz_element_bits). */
#include "kernels/host/host.h"
#include "kernels/host/lanes.h"

enum { DRAWN = 4 * LANES };

typedef uint64_t wide_bits __attribute__((vector_size(4 * LANES)));
typedef uint32_t quad __attribute__((vector_size(16)));

/* Products of the even-numbered lanes. */
INLINE wide_bits multiply_even(wide_bits x, uint32_t factor) {
#if defined(__AVX512F__)
    return (wide_bits)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    return (wide_bits)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#elif defined(__x86_64__)
    return (wide_bits)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(factor));
#else
    return (x & 0xffffffffu) * factor;
#endif
}

INLINE void multiply_wide(bits x, uint32_t factor, bits *high, bits *low) {
    const wide_bits even = multiply_even((wide_bits)x, factor);
    const wide_bits odd = multiply_even((wide_bits)x >> 32, factor);
    *low = (bits)((even & 0xffffffffu) | odd << 32);
    *high = (bits)(even >> 32 | (odd & ~UINT64_C(0xffffffff)));
}

/* to[4i + j] = from[j][i] */
INLINE void interleave(uint32_t to[DRAWN], uint32_t from[4][LANES]) {
    for (int i = 0; i < LANES; i += 4) {
        quad a, b, c, d;
        memcpy(&a, &from[0][i], sizeof a);
        memcpy(&b, &from[1][i], sizeof b);
        memcpy(&c, &from[2][i], sizeof c);
        memcpy(&d, &from[3][i], sizeof d);
        const quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
        const quad ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        const quad cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
        const quad cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
        const quad row[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5),
                             __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                             __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5),
                             __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
        memcpy(to + 4 * i, row, sizeof row);
    }
}

/* Bits of elements [4 * block, 4 * block + DRAWN). */
static void draw(const mz_update *a, uint64_t block, uint32_t drawn[DRAWN]) {
    uint32_t word[4][LANES];
    for (int i = 0; i < LANES; i++) {
        word[0][i] = (uint32_t)(block + (uint64_t)i);
        word[1][i] = (uint32_t)((block + (uint64_t)i) >> 32);
    }
    bits x0, x1, x2 = {0}, x3 = {0};
    memcpy(&x0, word[0], sizeof x0);
    memcpy(&x1, word[1], sizeof x1);
    x2 += (uint32_t)a->tensor;
    x3 += (uint32_t)a->step;
    uint32_t k0 = (uint32_t)a->seed, k1 = (uint32_t)(a->seed >> 32);
    for (int round = 0; round < 10; round++) {
        bits h0, l0, h1, l1;
        multiply_wide(x0, 0xD2511F53u, &h0, &l0);
        multiply_wide(x2, 0xCD9E8D57u, &h1, &l1);
        x0 = h1 ^ x1 ^ k0;
        x1 = l1;
        x2 = h0 ^ x3 ^ k1;
        x3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    memcpy(word[0], &x0, sizeof x0);
    memcpy(word[1], &x1, sizeof x1);
    memcpy(word[2], &x2, sizeof x2);
    memcpy(word[3], &x3, sizeof x3);
    interleave(drawn, word);
}

/* ---- loading and writing ------------------------------------------------------------------------
 */

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

INLINE lanes at_least(lanes x, float least) {
    const ints low = x < least;
    const lanes floor = 0 * x + least;
    return (lanes)(((ints)x & ~low) | ((ints)floor & low));
}

/* Random bits of one row, drawn for DRAWN elements at a time. */
typedef struct drawing {
    const mz_update *args;
    uint64_t element; /* of the row's first value */
    uint64_t first;   /* element of drawn[0], a multiple of 4 */
    bool any;         /* something is drawn */
    uint32_t drawn[DRAWN];
} drawing;

/* Of LANES elements from column i on. */
INLINE bits bits_of(drawing *d, int64_t i) {
    const uint64_t e = d->element + (uint64_t)i;
    if (!d->any || e + LANES > d->first + DRAWN) {
        d->first = e & ~UINT64_C(3);
        d->any = true;
        draw(d->args, e / 4, d->drawn);
    }
    bits b;
    memcpy(&b, d->drawn + (e - d->first), sizeof b);
    return b;
}

/* q + (u - 1/2) |q| 2^-7, u in [0, 1); rounding to nearest follows. */
INLINE lanes dithered(lanes q, bits random) {
    const lanes u = __builtin_convertvector((ints)(random >> 8), lanes) * 0x1p-24f;
    const lanes size = (lanes)((bits)q & 0x7fffffffu);
    return q + ((u + -0.5f) * size) * 0x1p-7f;
}

/* The sum is cut to its upper half, so storing it afterwards rounds nothing. */
INLINE lanes cut(lanes q, bits random) {
    const bits special = (bits)(((bits)q & 0x7f800000u) == 0x7f800000u);
    return (lanes)((((bits)q + (random & 0xffffu & ~special)) & (0xffff0000u | special)));
}

/* Decay, rounded to the parameter's type (but by Adafactor, which rounds once), then p - rate * u.
 */
INLINE void write_lanes(const mz_update_row *r, drawing *d, int64_t i, lanes u) {
    const int64_t n = r->n - i;
    if (r->args->type == MZ_F32) {
        float *p = (float *)r->parameter;
        store(p, i, load(MZ_F32, p, i, n) * r->keep - u * r->rate, n);
        return;
    }
    uint16_t *p = (uint16_t *)r->parameter + i;
    lanes q = load(MZ_BF16, r->parameter, i, n) * r->keep;
    if (r->args->kind != MZ_UPDATE_ADAFACTOR) {
        uint16_t decayed[LANES];
        store_bf16(decayed, q);
        q = load_bf16(decayed);
    }
    q = q - u * r->rate;
    if (r->args->rounding == MZ_ROUND_DITHER)
        q = dithered(q, bits_of(d, i));
    else if (r->args->rounding == MZ_ROUND_STOCHASTIC)
        q = cut(q, bits_of(d, i));
    if (n >= LANES)
        store_bf16(p, q);
    else
        store_some_bf16(p, q, n);
}

INLINE drawing drawing_of(const mz_update_row *r) {
    drawing d;
    d.args = r->args;
    d.element = (uint64_t)r->element;
    d.first = 0;
    d.any = false;
    return d;
}

INLINE lanes gradient_of(const mz_update_row *r, int64_t i) {
    return load(r->args->gradient_type, r->gradient, i, r->n - i) * r->scale;
}

/* m <- beta m + (1 - beta) g, stored. */
INLINE lanes average(float *at, int64_t i, int64_t n, float beta, lanes g) {
    const lanes value = load(MZ_F32, at, i, n) * beta + g * (1 - beta);
    store(at, i, value, n);
    return value;
}

/* ---- the loops ----------------------------------------------------------------------------------
 */

/* Of columns i and on: m and the columns' sums take g, `square` what the update is made of. Returns
 * g^2 + floor. */
INLINE lanes statistics_at(const mz_update_row *r, float *square, float *col, int64_t i) {
    const int64_t n = r->n - i;
    const lanes g = gradient_of(r, i);
    const lanes g2 = g * g + r->floor;
    store(col, i, load(MZ_F32, col, i, n) + g2, n);
    const lanes base = r->m ? average(r->m, i, n, r->args->beta1, g) : g;
    store(square, i, base * base, n);
    return g2;
}

static float statistics(const mz_update_row *r, float *square, float *col) {
    sums sum = {0};
    int64_t i = 0;
    for (; i + SUMS <= r->n; i += SUMS)
        for (int s = 0; s < PER_SUM; s++)
            sum.part[s] += statistics_at(r, square, col, i + s * LANES);
    tail t = tail_of(&sum);
    for (; i < r->n; i += LANES)
        tail_add(&t, i, statistics_at(r, square, col, i), r->n - i);
    return tail_sum(&t);
}

static void squares(const mz_update_row *r, float *square) {
    for (int64_t i = 0; i < r->n; i += LANES) {
        const lanes base = r->m ? load(MZ_F32, r->m, i, r->n - i) : gradient_of(r, i);
        store(square, i, base * base, r->n - i);
    }
}

static void weigh(float *weighted, const float *square, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        store(weighted, i,
              load(MZ_F32, weighted, i, n - i) + load(MZ_F32, square, i, n - i) * factor, n - i);
}

static void apply_factored(const mz_update_row *r, const float *col_factor) {
    drawing d = drawing_of(r);
    for (int64_t i = 0; i < r->n; i += LANES) {
        const lanes base = r->m ? load(MZ_F32, r->m, i, r->n - i) : gradient_of(r, i);
        write_lanes(r, &d, i, base * load(MZ_F32, col_factor, i, r->n - i));
    }
}

INLINE lanes statistics_full_at(const mz_update_row *r, int64_t i) {
    const int64_t n = r->n - i;
    const lanes g = gradient_of(r, i);
    const lanes v = average(r->v, i, n, r->beta2, g * g + r->floor);
    const lanes base = r->m ? average(r->m, i, n, r->args->beta1, g) : g;
    return base * base / at_least(v, r->least);
}

static float statistics_full(const mz_update_row *r) {
    sums sum = {0};
    int64_t i = 0;
    for (; i + SUMS <= r->n; i += SUMS)
        for (int s = 0; s < PER_SUM; s++)
            sum.part[s] += statistics_full_at(r, i + s * LANES);
    tail t = tail_of(&sum);
    for (; i < r->n; i += LANES)
        tail_add(&t, i, statistics_full_at(r, i), r->n - i);
    return tail_sum(&t);
}

static void apply_full(const mz_update_row *r) {
    drawing d = drawing_of(r);
    for (int64_t i = 0; i < r->n; i += LANES) {
        const int64_t n = r->n - i;
        const lanes base = r->m ? load(MZ_F32, r->m, i, n) : gradient_of(r, i);
        write_lanes(r, &d, i, base / root_of(at_least(load(MZ_F32, r->v, i, n), r->least)));
    }
}

static void adamw(const mz_update_row *r, float root) {
    drawing d = drawing_of(r);
    for (int64_t i = 0; i < r->n; i += LANES) {
        const int64_t n = r->n - i;
        const lanes g = gradient_of(r, i);
        const lanes m = average(r->m, i, n, r->args->beta1, g);
        const lanes v = average(r->v, i, n, r->beta2, g * g);
        write_lanes(r, &d, i, m / (root_of(v) * root + r->args->eps));
    }
}

INLINE lanes sign_of(lanes x) {
    const ints up = x > 0.0f, down = x < 0.0f;
    return __builtin_convertvector(down - up, lanes); /* true is -1 */
}

static void lion(const mz_update_row *r) {
    drawing d = drawing_of(r);
    for (int64_t i = 0; i < r->n; i += LANES) {
        const int64_t n = r->n - i;
        const lanes g = gradient_of(r, i), m = load(MZ_F32, r->m, i, n);
        const lanes mixed = m * r->args->beta1 + g * (1 - r->args->beta1);
        store(r->m, i, m * r->args->beta2 + g * (1 - r->args->beta2), n);
        write_lanes(r, &d, i, sign_of(mixed));
    }
}

static void apply(const mz_update_row *r, const float *update) {
    drawing d = drawing_of(r);
    for (int64_t i = 0; i < r->n; i += LANES)
        write_lanes(r, &d, i, load(MZ_F32, update, i, r->n - i));
}

const mz_update_simd MZ_TABLE(mz_update_simd) = {.statistics = statistics,
                                                 .squares = squares,
                                                 .weigh = weigh,
                                                 .apply_factored = apply_factored,
                                                 .statistics_full = statistics_full,
                                                 .apply_full = apply_full,
                                                 .adamw = adamw,
                                                 .lion = lion,
                                                 .apply = apply};
