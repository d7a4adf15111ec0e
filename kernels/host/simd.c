/* Inner loops on rows, compiled once per instruction set with MZ_SIMD naming the table. Each loop
 * is written once, with its choices as constants, and compiled for each of them. */
#include "kernels/host/host.h"
#include "kernels/host/lanes.h"

/* ---- conversion ---------------------------------------------------------------------------------
 */

static void widen(float *to, const uint16_t *from, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_f32(to + i, load_bf16(from + i));
    if (i < n)
        store_some_f32(to + i, load_some_bf16(from + i, n - i), n - i);
}

static void narrow(uint16_t *to, const float *from, int64_t n) {
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        store_upper2(to + i, round_any(load_f32(from + i)), round_any(load_f32(from + i + LANES)));
    for (; i < n; i += LANES) {
        const int64_t some = n - i < LANES ? n - i : LANES;
        store_some_upper(to + i, round_any(load_some_f32(from + i, some)), some);
    }
}

/* ---- sums ---------------------------------------------------------------------------------------
 */

INLINE void add_products(sums *sum, sums a, sums b) {
    for (int s = 0; s < PER_SUM; s++)
        sum->part[s] += a.part[s] * b.part[s];
}

INLINE float dot_of(mz_dtype type, const void *a, const void *b, int64_t n) {
    sums sum = {0};
    int64_t i = 0;
    for (; i + SUMS <= n; i += SUMS)
        add_products(&sum, load16(type, a, i, SUMS), load16(type, b, i, SUMS));
    if (i < n)
        add_products(&sum, load16(type, a, i, n - i), load16(type, b, i, n - i));
    return total(&sum);
}

static float dot(mz_dtype type, const void *a, const void *b, int64_t n) {
    return type == MZ_BF16 ? dot_of(MZ_BF16, a, b, n) : dot_of(MZ_F32, a, b, n);
}

INLINE float norm2_of(mz_dtype type, const void *x, int64_t n) {
    sums sum = {0};
    int64_t i = 0;
    for (; i + SUMS <= n; i += SUMS) {
        const sums v = load16(type, x, i, SUMS);
        add_products(&sum, v, v);
    }
    if (i < n) {
        const sums v = load16(type, x, i, n - i);
        add_products(&sum, v, v);
    }
    return total(&sum);
}

static float norm2(mz_dtype type, const void *x, int64_t n) {
    return type == MZ_BF16 ? norm2_of(MZ_BF16, x, n) : norm2_of(MZ_F32, x, n);
}

/* A factor that is NaN keeps nothing below its upper half, as round_number wants it. */
INLINE float factor_of(float x) {
    return x == x ? x : NAN;
}

/* ---- moving rows --------------------------------------------------------------------------------
 * Rows come from anywhere: while one is read, the next one is fetched line by line. */

enum { LINE = 64 };

/* The line `at` bytes from `row`, which need not be anyone's. */
INLINE void fetch(const void *row, int64_t at) {
    __builtin_prefetch((const void *)((uintptr_t)row + (uintptr_t)at));
}

/* Columns [i, i + 32) of the row that begins `ahead` bytes further on. */
INLINE void fetch32(mz_dtype type, const void *row, int64_t ahead, int64_t i) {
    const int64_t at = ahead + i * (type == MZ_BF16 ? 2 : 4);
    fetch(row, at);
    if (type == MZ_F32)
        fetch(row, at + LINE);
}

/* Streaming writes whole lines. */
INLINE mz_way way_of(const void *to, size_t bytes, bool stream) {
#if defined(__AVX2__)
    return stream && (uintptr_t)to % LINE == 0 && bytes % LINE == 0 ? STREAM : CACHED;
#else
    (void)to, (void)bytes, (void)stream;
    return CACHED;
#endif
}

static void copy(void *to, const void *from, const void *next, size_t bytes, bool stream) {
    if (way_of(to, bytes, stream) == CACHED) {
        if (from)
            memcpy(to, from, bytes);
        else
            memset(to, 0, bytes);
        return;
    }
    for (size_t i = 0; i < bytes; i += LINE) {
        fetch(next, (int64_t)i);
        for (size_t j = i; j < i + LINE; j += SUMS * sizeof(float)) {
            const sums zero = {0};
            const sums v = from ? load16_f32((const void *)((const char *)from + j)) : zero;
            put16_f32((void *)((char *)to + j), v, STREAM);
        }
    }
}

INLINE void scale16(mz_dtype type, void *to, const void *from, float factor, int64_t i, int64_t n,
                    mz_way way) {
    sums v = load16(type, from, i, n);
    for (int s = 0; s < PER_SUM; s++)
        v.part[s] *= factor;
    store16(type, to, i, round16(type, v), n, way);
}

INLINE void scale_of(mz_dtype type, void *to, const void *from, const void *next, float factor,
                     int64_t n, mz_way way) {
    const int64_t size = type == MZ_BF16 ? 2 : 4;
    int64_t i = 0;
    factor = factor_of(factor);
    for (; i + 2 * SUMS <= n; i += 2 * SUMS) {
        fetch(next, i * size);
        scale16(type, to, from, factor, i, SUMS, way);
        scale16(type, to, from, factor, i + SUMS, SUMS, way);
    }
    for (; i < n; i += SUMS)
        scale16(type, to, from, factor, i, n - i < SUMS ? n - i : SUMS, CACHED);
}

static void scale(mz_dtype type, void *to, const void *from, const void *next, float factor,
                  int64_t n, bool stream) {
    const mz_way way = way_of(to, (size_t)n * (type == MZ_BF16 ? 2 : 4), stream);
    if (type == MZ_BF16) {
        if (way == STREAM)
            scale_of(MZ_BF16, to, from, next, factor, n, STREAM);
        else
            scale_of(MZ_BF16, to, from, next, factor, n, CACHED);
    } else if (way == STREAM) {
        scale_of(MZ_F32, to, from, next, factor, n, STREAM);
    } else {
        scale_of(MZ_F32, to, from, next, factor, n, CACHED);
    }
}

/* ---- combining rows -----------------------------------------------------------------------------
 */

/* Columns [i, i + n), n <= 32, 16 at a time. A sum of bf16 rows that waits in fp32 has them by
 * place, all 16 of them. */
INLINE void combine32(const mz_row_sum *r, mz_dtype type, int64_t i, int64_t n, mz_way way) {
    const int64_t some[2] = {n < SUMS ? n : SUMS, n < SUMS ? 0 : n - SUMS};
    sums sum[2] = {0};
    for (int g = 0; g < 2; g++)
        if (r->from && some[g] > 0)
            sum[g] =
                load16(r->from_type, r->from, i + g * SUMS, r->from_type == type ? some[g] : SUMS);
    for (int64_t k = 0; k < r->rows; k++)
        for (int g = 0; g < 2; g++) {
            if (some[g] == 0)
                continue;
            const sums v = load16(type, r->row[k], i + g * SUMS, some[g]);
            for (int s = 0; s < PER_SUM; s++)
                sum[g].part[s] += v.part[s] * r->factor[k];
        }
    for (int g = 0; g < 2; g++)
        if (some[g] > 0 && r->to_type == MZ_BF16)
            store16(MZ_BF16, r->to, i + g * SUMS, round16(MZ_BF16, sum[g]), some[g], way);
        else if (some[g] > 0)
            store16(MZ_F32, r->to, i + g * SUMS, sum[g], type == MZ_F32 ? some[g] : SUMS, way);
}

INLINE void combine_of(const mz_row_sum *r, mz_dtype type, mz_way way) {
    int64_t i = 0;
    for (; i + 2 * SUMS <= r->n; i += 2 * SUMS) {
        for (int64_t k = 0; k < r->next_rows; k++)
            fetch32(type, r->next[k], 0, i);
        combine32(r, type, i, 2 * SUMS, way);
    }
    if (i < r->n)
        combine32(r, type, i, r->n - i, CACHED);
}

static void combine(const mz_row_sum *r) {
    const mz_way way = way_of(r->to, (size_t)r->n * (r->to_type == MZ_BF16 ? 2 : 4), r->stream);
    if (r->type == MZ_BF16 && way == STREAM)
        combine_of(r, MZ_BF16, STREAM);
    else if (r->type == MZ_BF16)
        combine_of(r, MZ_BF16, CACHED);
    else if (way == STREAM)
        combine_of(r, MZ_F32, STREAM);
    else
        combine_of(r, MZ_F32, CACHED);
}

/* ---- SwiGLU -------------------------------------------------------------------------------------
 */

/* Columns that are done at once: what a loop leaves to the next fits the first-level cache. */
enum { PIECE = 1024 };
typedef struct piece {
    _Alignas(LINE) float sigmoid[PIECE]; /* first what `reduce` leaves, as load16 places it */
    _Alignas(LINE) uint32_t power[PIECE];
} piece;

INLINE void reduce16(piece *p, mz_dtype type, const void *u, int64_t i, int64_t n, int64_t at) {
    const sums x = load16(type, u, i, n);
    for (int s = 0; s < PER_SUM; s++) {
        const reduced r = reduce(type, x.part[s]);
        store_f32(p->sigmoid + at + s * LANES, r.rest);
        memcpy(p->power + at + s * LANES, &r.power, sizeof r.power);
    }
}

INLINE void sigmoid16(piece *p, mz_dtype type, int64_t at) {
    for (int64_t i = at; i < at + SUMS; i += LANES) {
        reduced r = {.rest = load_f32(p->sigmoid + i)};
        memcpy(&r.power, p->power + i, sizeof r.power);
        store_f32(p->sigmoid + i, sigmoid(type, r));
    }
}

/* Of columns [i, i + n) of u, n <= PIECE. Those of the next row's u and v, `next` bytes further on,
 * are fetched meanwhile: memory has to do in every loop. */
INLINE void sigmoids(piece *p, mz_dtype type, const void *u, const void *v, int64_t i, int64_t n,
                     int64_t next) {
    int64_t j = 0;
    for (; j + 2 * SUMS <= n; j += 2 * SUMS) {
        fetch32(type, u, next, i + j);
        reduce16(p, type, u, i + j, SUMS, j);
        reduce16(p, type, u, i + j + SUMS, SUMS, j + SUMS);
    }
    for (; j < n; j += SUMS)
        reduce16(p, type, u, i + j, n - j < SUMS ? n - j : SUMS, j);
    for (j = 0; j + SUMS < n; j += 2 * SUMS) {
        fetch32(type, v, next, i + j);
        sigmoid16(p, type, j);
        sigmoid16(p, type, j + SUMS);
    }
    if (j < n)
        sigmoid16(p, type, j);
}

/* h is summed as stored. */
INLINE void swiglu16(sums *sum, mz_dtype type, void *h, const void *u, const void *v,
                     const float *sigmoid, int64_t i, int64_t n, mz_way way) {
    const sums gate = load16(type, u, i, n), up = load16(type, v, i, n);
    sums out;
    for (int s = 0; s < PER_SUM; s++)
        out.part[s] = gate.part[s] * load_f32(sigmoid + s * LANES) * up.part[s];
    const sums stored = round16(type, out);
    store16(type, h, i, stored, n, way);
    add_products(sum, stored, stored);
}

INLINE float swiglu_of(mz_dtype type, void *h, const void *u, const void *v, int64_t n,
                       mz_way way) {
    const int64_t next = 2 * n * (type == MZ_BF16 ? 2 : 4); /* bytes */
    sums sum = {0};
    piece p;
    for (int64_t i = 0; i < n;) {
        const int64_t begin = i, end = n - i < PIECE ? n : i + PIECE;
        sigmoids(&p, type, u, v, begin, end - begin, next);
        for (; i + 2 * SUMS <= end; i += 2 * SUMS) {
            swiglu16(&sum, type, h, u, v, p.sigmoid + (i - begin), i, SUMS, way);
            swiglu16(&sum, type, h, u, v, p.sigmoid + (i - begin + SUMS), i + SUMS, SUMS, way);
        }
        for (; i < end; i += SUMS)
            swiglu16(&sum, type, h, u, v, p.sigmoid + (i - begin), i,
                     end - i < SUMS ? end - i : SUMS, CACHED);
        i = end;
    }
    return total(&sum);
}

static float swiglu(mz_dtype type, void *h, const void *u, const void *v, int64_t n, bool stream) {
    const mz_way way = way_of(h, (size_t)n * (type == MZ_BF16 ? 2 : 4), stream);
    if (type == MZ_BF16)
        return way == STREAM ? swiglu_of(MZ_BF16, h, u, v, n, STREAM)
                             : swiglu_of(MZ_BF16, h, u, v, n, CACHED);
    return way == STREAM ? swiglu_of(MZ_F32, h, u, v, n, STREAM)
                         : swiglu_of(MZ_F32, h, u, v, n, CACHED);
}

INLINE void swiglu_back16(sums *sum, const mz_swiglu_row *r, mz_dtype type, float factor,
                          const float *sigmoid, int64_t i, int64_t n, mz_way way) {
    const sums u = load16(type, r->u, i, n), v = load16(type, r->v, i, n);
    const sums dh = load16(type, r->dh, i, n);
    sums du, dv, h;
    for (int s = 0; s < PER_SUM; s++) {
        const lanes share = load_f32(sigmoid + s * LANES), silu = u.part[s] * share;
        const lanes slope = share + silu * (1.0f - share), d = dh.part[s] * factor;
        du.part[s] = d * v.part[s] * slope;
        dv.part[s] = d * silu;
        h.part[s] = silu * v.part[s];
    }
    store16(type, r->du, i, round16(type, du), n, way);
    store16(type, r->dv, i, round16(type, dv), n, way);
    if (r->h)
        store16(type, r->h, i, round16(type, h), n, CACHED);
    add_products(sum, dh, h);
}

INLINE float swiglu_back_of(const mz_swiglu_row row, mz_dtype type, mz_way way) {
    const int64_t n = row.n;
    const int64_t next = 2 * n * (type == MZ_BF16 ? 2 : 4); /* bytes */
    const float factor = factor_of(row.factor);
    sums sum = {0};
    piece p;
    for (int64_t i = 0; i < n;) {
        const int64_t begin = i, end = n - i < PIECE ? n : i + PIECE;
        sigmoids(&p, type, row.u, row.v, begin, end - begin, next);
        for (; i + 2 * SUMS <= end; i += 2 * SUMS) {
            fetch32(type, row.dh, next / 2, i);
            swiglu_back16(&sum, &row, type, factor, p.sigmoid + (i - begin), i, SUMS, way);
            swiglu_back16(&sum, &row, type, factor, p.sigmoid + (i - begin + SUMS), i + SUMS, SUMS,
                          way);
        }
        for (; i < end; i += SUMS)
            swiglu_back16(&sum, &row, type, factor, p.sigmoid + (i - begin), i,
                          end - i < SUMS ? end - i : SUMS, CACHED);
        i = end;
    }
    return total(&sum);
}

static float swiglu_back(const mz_swiglu_row *r, mz_dtype type, bool stream) {
    const size_t bytes = (size_t)r->n * (type == MZ_BF16 ? 2 : 4);
    const mz_way way =
        way_of(r->du, bytes, stream) == STREAM ? way_of(r->dv, bytes, stream) : CACHED;
    if (type == MZ_BF16)
        return way == STREAM ? swiglu_back_of(*r, MZ_BF16, STREAM)
                             : swiglu_back_of(*r, MZ_BF16, CACHED);
    return way == STREAM ? swiglu_back_of(*r, MZ_F32, STREAM) : swiglu_back_of(*r, MZ_F32, CACHED);
}

/* ---- scores -------------------------------------------------------------------------------------
 */

/* As mz_finite_score. */
INLINE lanes bounded(lanes x) {
    return smaller(x, all_lanes(FLT_MAX));
}

static void products(float *score, const float *w, const float *a, const float *b, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const lanes v = load_f32(w + i);
        store_f32(score + i, bounded(v * v * load_f32(a + i) * load_f32(b + i)));
    }
    if (i < n) {
        const lanes v = load_some_f32(w + i, n - i);
        store_some_f32(score + i,
                       bounded(v * v * load_some_f32(a + i, n - i) * load_some_f32(b + i, n - i)),
                       n - i);
    }
}

/* The first words of 2 * BLOCKS blocks, as mz_unit_float reads them. */
INLINE void unit_floats(const round_keys *keys, uint64_t pair, float u[2 * BLOCKS]) {
    words lane, x[2][4];
    for (int i = 0; i < BLOCKS; i++)
        lane[i] = (uint64_t)i;
    philox_twice(keys, lane + pair, 0x70616972u, 0, x);
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < BLOCKS; i++)
            u[s * BLOCKS + i] = mz_unit_float((uint32_t)x[s][0][i]);
}

static void draws(float *u, uint64_t seed, uint64_t first, int64_t n) {
    const round_keys keys = keys_of(seed);
    int64_t i = 0;
    for (; i + 2 * BLOCKS <= n; i += 2 * BLOCKS)
        unit_floats(&keys, first + (uint64_t)i, u + i);
    if (i < n) {
        float some[2 * BLOCKS];
        unit_floats(&keys, first + (uint64_t)i, some);
        memcpy(u + i, some, sizeof *u * (size_t)(n - i));
    }
}

static void priorities(float *score, const float *u, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_f32(score + i, bounded(root_of(load_f32(score + i)) / load_f32(u + i)));
    for (; i < n; i++)
        score[i] = mz_finite_score(sqrtf(score[i]) / u[i]);
}

/* What was streamed is in memory before what follows. */
static void settle(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

const mz_simd MZ_TABLE(mz_simd) = {.name = MZ_SIMD_TEXT,
                                   .widen = widen,
                                   .narrow = narrow,
                                   .norm2 = norm2,
                                   .dot = dot,
                                   .copy = copy,
                                   .scale = scale,
                                   .combine = combine,
                                   .swiglu = swiglu,
                                   .swiglu_back = swiglu_back,
                                   .products = products,
                                   .draws = draws,
                                   .priorities = priorities,
                                   .settle = settle};
