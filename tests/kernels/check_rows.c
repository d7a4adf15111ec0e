/* Operations on rows: conversion, norms and dots, pack, unpack, combine, SwiGLU, memory. */
#include "tests/kernels/reference.h"
#include "tests/kernels/rig.h"

#include <float.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

static const mz_dtype types[] = {MZ_F32, MZ_BF16};

/* Rows x columns: none, one, no multiple of any tile, the widest hidden size on few rows. Columns
 * stay multiples of 8: rows start at multiples of 16 bytes. */
static const int64_t shapes[][2] = {{0, 64},   {1, 8},     {1, 7168}, {7, 24},  {33, 136},
                                    {65, 512}, {129, 200}, {3, 4096}, {300, 8}, {5, 2056}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Relative error of an fp32 sum of n products, and one rounding to the stored type. */
static double sum_error(int64_t n) {
    return 1e-7 * (4 + 0.1 * (double)n);
}
static double store_error(mz_dtype type) {
    return type == MZ_BF16 ? 0x1p-8 : 0x1p-23;
}

static void run_shapes(rig *r, void (*one)(rig *, mz_dtype, int64_t rows, int64_t cols)) {
    for (int i = 0; i < SHAPES; i++)
        for (int t = 0; t < 2; t++)
            if (!r->small || shapes[i][0] * shapes[i][1] <= 8192) {
                one(r, types[t], shapes[i][0], shapes[i][1]);
                rig_clear(r);
            }
}

/* ---- conversion ---------------------------------------------------------------------------------
 */

static uint16_t expected_bf16(float f) {
    const float value = (float)ref_bf16(f);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static void check_narrow(rig *r) {
    enum { N = 4099 };
    const uint32_t special[] = {0,          0x80000000, 1,          0x007fffff, 0x00800000,
                                0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0x7f800000, 0xff800000,
                                0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0x00008000,
                                0x00018000, 0x80008001};
    uint32_t *bits = rig_host(r, sizeof *bits * N);
    for (int i = 0; i < N; i++) {
        bits[i] = (uint32_t)rig_bits(r);
        if ((bits[i] & 0x7f800000) == 0x7f800000)
            bits[i] &= 0xff800000;
    }
    memcpy(bits, special, sizeof special);
    void *from = rig_in(r, bits, sizeof *bits * N), *to = rig_room(r, MZ_BF16, N);
    RIG_OK(r, mz_convert(r->kernels, 0, MZ_BF16, to, MZ_F32, from, N));
    const uint16_t *got = rig_get(r, to);
    for (int i = 0; i < N; i++) {
        float f;
        memcpy(&f, &bits[i], sizeof f);
        if (got[i] != expected_bf16(f))
            rig_fail(r, "0x%08x became 0x%04x, not 0x%04x", bits[i], got[i], expected_bf16(f));
    }
}

static void check_not_a_number(rig *r) {
    const uint32_t bits[] = {0x7f800001, 0x7fc00000, 0xffffffff, 0x7f80ffff, 0xff800001};
    void *from = rig_in(r, bits, sizeof bits), *to = rig_room(r, MZ_BF16, 5);
    RIG_OK(r, mz_kernels_zero(r->kernels, 0, to, 10));
    RIG_OK(r, mz_convert(r->kernels, 0, MZ_BF16, to, MZ_F32, from, 5));
    const double *got = rig_values(r, MZ_BF16, to);
    for (int i = 0; i < 5; i++)
        RIG_TRUE(r, isnan(got[i]));
}

static void check_widen(rig *r) {
    const int64_t lengths[] = {0, 1, 5, 16, 17, 333, 4096};
    for (int i = 0; i < 7; i++) {
        const int64_t n = lengths[i];
        const double *x = rig_normals(r, MZ_BF16, n, 3);
        void *from = rig_put(r, MZ_BF16, x, n), *wide = rig_room(r, MZ_F32, n);
        void *same = rig_room(r, MZ_BF16, n);
        RIG_OK(r, mz_convert(r->kernels, 0, MZ_F32, wide, MZ_BF16, from, n));
        RIG_OK(r, mz_convert(r->kernels, 0, MZ_BF16, same, MZ_BF16, from, n));
        rig_near(r, "widened", rig_values(r, MZ_F32, wide), x, n, 0, 0);
        rig_near(r, "copied", rig_values(r, MZ_BF16, same), x, n, 0, 0);
    }
}

/* ---- norms and dots -----------------------------------------------------------------------------
 */

static void norms(rig *r, mz_dtype type, int64_t rows, int64_t cols) {
    const int64_t stride = cols + 8 * rig_below(r, 3);
    double *x = rig_normals(r, type, rows * stride, 2);
    double *want = rig_host(r, sizeof *want * (size_t)rows);
    for (int64_t i = 0; i < rows; i++)
        want[i] = ref_dot(x + i * stride, x + i * stride, cols);
    float *out = rig_room(r, MZ_F32, rows);
    const mz_norms args = {type, rig_put(r, type, x, rows * stride), rows, cols, stride, out};
    RIG_OK(r, mz_row_norms(r->kernels, 0, &args));
    rig_near(r, "norms", rig_values(r, MZ_F32, out), want, rows, sum_error(cols), 0);
}
static void check_norms(rig *r) {
    run_shapes(r, norms);
}

static void dots(rig *r, mz_dtype type, int64_t rows, int64_t cols) {
    const int64_t as = cols + 8 * rig_below(r, 3), bs = cols + 8 * rig_below(r, 3);
    double *a = rig_normals(r, type, rows * as, 2), *b = rig_normals(r, type, rows * bs, 1);
    double *want = rig_host(r, sizeof *want * (size_t)rows);
    for (int64_t i = 0; i < rows; i++)
        want[i] = ref_dot(a + i * as, b + i * bs, cols);
    float *out = rig_room(r, MZ_F32, rows);
    const mz_dots args = {
        type, rig_put(r, type, a, rows * as), rig_put(r, type, b, rows * bs), rows, cols, as, bs,
        out};
    RIG_OK(r, mz_row_dots(r->kernels, 0, &args));
    rig_near(r, "dots", rig_values(r, MZ_F32, out), want, rows, 0,
             2 * sum_error(cols) * sqrt((double)cols));
}
static void check_dots(rig *r) {
    run_shapes(r, dots);
}

static void gate_norms(rig *r, mz_dtype type, int64_t tokens, int64_t width) {
    const int32_t experts = 3;
    const int64_t n = tokens * experts;
    double *z = rig_normals(r, type, n * width, 1), *dnorm = rig_normals(r, MZ_F32, n, 1);
    double *want = rig_host(r, sizeof *want * (size_t)n);
    double *want_dz = rig_host(r, sizeof *want_dz * (size_t)(n * width));
    for (int64_t i = 0; i < width && n > 1; i++)
        z[width + i] = 0; /* a norm of 0 has no direction */
    for (int64_t i = 0; i < n; i++) {
        want[i] = sqrt(ref_dot(z + i * width, z + i * width, width));
        for (int64_t j = 0; j < width && want[i] > 0; j++)
            want_dz[i * width + j] = z[i * width + j] * dnorm[i] / want[i];
    }
    void *in = rig_put(r, type, z, n * width), *dz = rig_room(r, type, n * width);
    float *norm = rig_room(r, MZ_F32, n);
    RIG_OK(r, mz_gate_norms(r->kernels, 0, type, in, tokens, experts, width, norm));
    rig_near(r, "gate norms", rig_values(r, MZ_F32, norm), want, n, sum_error(width), 0);
    RIG_OK(r, mz_gate_norms_backward(r->kernels, 0, type, in, norm, rig_put_floats(r, dnorm, n),
                                     tokens, experts, width, dz));
    rig_near(r, "gate norms' gradient", rig_values(r, type, dz), want_dz, n * width,
             sum_error(width) + store_error(type), 1e-30);
}
/* The backward is the slope of the norms: central differences of sum dnorm |z| in double, of what a
 * device computed for z that it stores. */
static void gate_slopes(rig *r, mz_dtype type) {
    const int64_t tokens = rig_below(r, 9), width = 8 * (1 + rig_below(r, 9)), n = 2 * tokens;
    double *z = rig_normals(r, type, n * width, 1), *dnorm = rig_normals(r, MZ_F32, n, 1);
    void *in = rig_put(r, type, z, n * width), *dz = rig_room(r, type, n * width);
    float *norm = rig_room(r, MZ_F32, n);
    RIG_OK(r, mz_gate_norms(r->kernels, 0, type, in, tokens, 2, width, norm));
    RIG_OK(r, mz_gate_norms_backward(r->kernels, 0, type, in, norm, rig_put_floats(r, dnorm, n),
                                     tokens, 2, width, dz));
    const double *got = rig_values(r, type, dz);
    for (int i = 0; i < 20 && n > 0; i++) {
        const int64_t at = rig_below(r, n * width), row = at / width;
        const double was = z[at], step = 1e-5;
        double side[2];
        for (int k = 0; k < 2; k++) {
            z[at] = k ? was - step : was + step;
            side[k] = dnorm[row] * sqrt(ref_dot(z + row * width, z + row * width, width));
        }
        z[at] = was;
        const double want = (side[0] - side[1]) / (2 * step);
        rig_near(r, "slope of a gate norm", got + at, &want, 1, type == MZ_BF16 ? 5e-3 : 1e-5,
                 1e-6);
    }
}

static void check_gate_norms(rig *r) {
    for (int t = 0; t < 2; t++) {
        gate_norms(r, types[t], 0, 8);
        gate_norms(r, types[t], 1, 8);
        gate_norms(r, types[t], 37, 32);
        gate_norms(r, types[t], 21, 72);
        for (int i = 0; i < 6; i++)
            gate_slopes(r, types[t]);
    }
}

/* ---- pack, unpack, combine ----------------------------------------------------------------------
 */

/* k distinct pairs a token; rows: a random subset of the pairs in random order, some empty. */
static void packing(rig *r, mz_dtype type, int64_t tokens, int64_t hidden) {
    const int32_t k = 1 + (int32_t)rig_below(r, 8);
    const int64_t pairs = tokens * k, rows = pairs > 0 ? rig_below(r, pairs + 1) : 0;
    double *x = rig_normals(r, type, tokens * hidden, 1), *scale = rig_normals(r, MZ_F32, pairs, 1);
    int64_t *shuffled = rig_host(r, 8 * (size_t)pairs), *row_pair = rig_host(r, 8 * (size_t)rows);
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t j = rig_below(r, i + 1);
        shuffled[i] = shuffled[j];
        shuffled[j] = i;
    }
    for (int64_t i = 0; i < rows; i++)
        row_pair[i] = rig_below(r, 10) == 0 ? -1 : shuffled[i];
    double *want = rig_host(r, 8 * (size_t)(rows * hidden));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < hidden && row_pair[i] >= 0; j++)
            want[i * hidden + j] =
                ref_stored(type, (float)(scale[row_pair[i]] * x[row_pair[i] / k * hidden + j]));
    int32_t *token = rig_host(r, 4 * (size_t)pairs);
    for (int64_t i = 0; i < pairs; i++)
        token[i] = (int32_t)(i / k);
    const int64_t used = rows - rows / 3;
    void *in = rig_put(r, type, x, tokens * hidden), *full = rig_room(r, type, rows * hidden);
    void *part = rig_room(r, type, rows * hidden);
    mz_pack args = {.type = type,
                    .x = in,
                    .hidden = hidden,
                    .rows = rows,
                    .row_pair = rig_in(r, row_pair, 8 * (size_t)rows),
                    .k = k,
                    .scale = rig_put_floats(r, scale, pairs),
                    .out = full};
    RIG_OK(r, mz_pack_rows(r->kernels, 0, &args));
    rig_near(r, "packed", rig_values(r, type, full), want, rows * hidden, 0, 0);
    args.k = 0;
    args.token = rig_in(r, token, 4 * (size_t)pairs);
    args.rows_used = rig_in(r, &used, sizeof used);
    args.out = part;
    RIG_OK(r, mz_pack_rows(r->kernels, 0, &args));
    const double *got = rig_values(r, type, part);
    rig_near(r, "packed part", got, want, used * hidden, 0, 0);
    for (int64_t i = used * hidden; i < rows * hidden; i++)
        RIG_TRUE(r, isnan(got[i]));
}
static void check_pack(rig *r) {
    run_shapes(r, packing);
}

/* Pack, then unpack: kept rows come back, all others are exactly zero. */
static void round_trip(rig *r, mz_dtype type, int64_t pairs, int64_t hidden) {
    const double *x = rig_normals(r, type, pairs * hidden, 1);
    int64_t *row_pair = rig_host(r, 8 * (size_t)pairs), rows = 0;
    int64_t *want_position = rig_host(r, 8 * (size_t)pairs);
    double *want = rig_host(r, 8 * (size_t)(pairs * hidden));
    for (int64_t i = 0; i < pairs; i++)
        want_position[i] = -1;
    for (int64_t i = pairs - 1; i >= 0; i--) /* falling: positions are not pairs */
        if (rig_below(r, 2)) {
            want_position[i] = rows;
            row_pair[rows++] = i;
            memcpy(want + i * hidden, x + i * hidden, 8 * (size_t)hidden);
        }
    void *in = rig_put(r, type, x, pairs * hidden);
    void *packed = rig_room(r, type, rows * hidden), *out = rig_room(r, type, pairs * hidden);
    int64_t *listed = rig_in(r, row_pair, 8 * (size_t)rows);
    int64_t *position = rig_out(r, 8 * (size_t)pairs);
    const mz_pack pack = {.type = type,
                          .x = in,
                          .hidden = hidden,
                          .rows = rows,
                          .row_pair = listed,
                          .k = 1,
                          .out = packed};
    const mz_unpack unpack = {type, packed, hidden, pairs, position, out};
    RIG_OK(r, mz_pack_rows(r->kernels, 0, &pack));
    RIG_OK(r, mz_invert(r->kernels, 0, listed, rows, pairs, position));
    RIG_OK(r, mz_unpack_rows(r->kernels, 0, &unpack));
    RIG_TRUE(r, pairs == 0 || memcmp(rig_get(r, position), want_position, 8 * (size_t)pairs) == 0);
    const double *got = rig_values(r, type, out);
    rig_near(r, "unpacked", got, want, pairs * hidden, 0, 0);
    for (int64_t i = 0; i < pairs * hidden; i++)
        RIG_TRUE(r, want[i] != 0 || !signbit(got[i]) || x[i] == 0);
}
static void check_round_trip(rig *r) {
    run_shapes(r, round_trip);
}

static void combining(rig *r, mz_dtype type, int64_t tokens, int64_t hidden) {
    const bool variable = rig_below(r, 2), accumulate = rig_below(r, 2), scaled = rig_below(r, 2);
    const int32_t k = (int32_t)rig_below(r, 5);
    int64_t *begin = rig_host(r, 8 * (size_t)(tokens + 1));
    for (int64_t t = 0; t < tokens; t++) /* some tokens with more rows than fit any list */
        begin[t + 1] = begin[t] + (!variable              ? k
                                   : rig_below(r, 8) == 0 ? 30 + rig_below(r, 40)
                                                          : rig_below(r, 6));
    const int64_t pairs = begin[tokens], rows = pairs + 3;
    double *row = rig_normals(r, type, rows * hidden, 1), *scale = rig_normals(r, MZ_F32, pairs, 1);
    double *before = rig_normals(r, type, tokens * hidden, 1);
    int64_t *position = rig_host(r, 8 * (size_t)pairs);
    double *want = rig_host(r, 8 * (size_t)(tokens * hidden));
    double *bound = rig_host(r, 8 * (size_t)(tokens * hidden)), *got;
    for (int64_t p = 0; p < pairs; p++)
        position[p] = rig_below(r, 4) ? rig_below(r, rows) : -1;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t j = 0; j < hidden; j++) {
            double sum = accumulate ? before[t * hidden + j] : 0, size = fabs(sum);
            for (int64_t p = begin[t]; p < begin[t + 1]; p++) {
                const double term =
                    position[p] < 0 ? 0 : (scaled ? scale[p] : 1) * row[position[p] * hidden + j];
                sum += term;
                size += fabs(term);
            }
            want[t * hidden + j] = sum;
            bound[t * hidden + j] = store_error(type) * fabs(sum) + 1e-6 * size;
        }
    void *out =
        accumulate ? rig_put(r, type, before, tokens * hidden) : rig_room(r, type, tokens * hidden);
    const mz_combine args = {.type = type,
                             .row = rig_put(r, type, row, rows * hidden),
                             .hidden = hidden,
                             .tokens = tokens,
                             .token_begin =
                                 variable ? rig_in(r, begin, 8 * (size_t)(tokens + 1)) : NULL,
                             .k = k,
                             .position = rig_in(r, position, 8 * (size_t)pairs),
                             .scale = scaled ? rig_put_floats(r, scale, pairs) : NULL,
                             .accumulate = accumulate,
                             .out = out};
    RIG_OK(r, mz_combine_rows(r->kernels, 0, &args));
    got = rig_values(r, type, out);
    for (int64_t i = 0; i < tokens * hidden; i++)
        rig_near(r, "combined", got + i, want + i, 1, 0, bound[i]);
}
static void check_combine(rig *r) {
    for (int i = 0; i < 3; i++)
        run_shapes(r, combining);
}

/* ---- SwiGLU -------------------------------------------------------------------------------------
 */

static void swiglu(rig *r, mz_dtype type, int64_t rows, int64_t width) {
    double *gate_up = rig_normals(r, type, rows * 2 * width, 4);
    const double extreme[] = {-200, -88.5, -87.2, 88.5, 87.2, 200, 0, -1e-30};
    for (int i = 0; i < 8 && rows > 0; i++)
        gate_up[i] = ref_stored(type, extreme[i]);
    double *want = rig_host(r, 8 * (size_t)(rows * width)), *norm = rig_host(r, 8 * (size_t)rows);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j++)
            want[i * width + j] =
                ref_silu(gate_up[2 * i * width + j]) * gate_up[(2 * i + 1) * width + j];
    float *norm2 = rig_room(r, MZ_F32, rows);
    mz_swiglu args = {.type = type,
                      .rows = rows,
                      .intermediate = width,
                      .gate_up = rig_put(r, type, gate_up, 2 * rows * width),
                      .h = rig_room(r, type, rows * width),
                      .norm2 = norm2};
    RIG_OK(r, mz_swiglu_forward(r->kernels, 0, &args));
    const double *h = rig_values(r, type, args.h);
    rig_near(r, "h", h, want, rows * width, 1e-6 + store_error(type), 1e-30);
    for (int64_t i = 0; i < rows; i++) /* of the stored h */
        norm[i] = ref_dot(h + i * width, h + i * width, width);
    rig_near(r, "||h||^2", rig_values(r, MZ_F32, norm2), norm, rows, sum_error(width), 1e-30);
}
static void check_swiglu(rig *r) {
    run_shapes(r, swiglu);
}

static void swiglu_back(rig *r, mz_dtype type, int64_t rows, int64_t width) {
    const bool scaled = rig_below(r, 2), in_place = rig_below(r, 2);
    const double *gu = rig_normals(r, type, rows * 2 * width, 2);
    const double *dh = rig_normals(r, type, rows * width, 1),
                 *scale = rig_normals(r, MZ_F32, rows, 1);
    double *want = rig_host(r, 8 * (size_t)(rows * 2 * width));
    double *h = rig_host(r, 8 * (size_t)(rows * width)), *dot = rig_host(r, 8 * (size_t)rows);
    double *size = rig_host(r, 8 * (size_t)rows); /* sums of magnitudes: terms may cancel */
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j++) {
            const double u = gu[2 * i * width + j], v = gu[(2 * i + 1) * width + j];
            const double d = dh[i * width + j], f = scaled ? scale[i] : 1;
            want[2 * i * width + j] = d * f * v * ref_silu_slope(u);
            want[(2 * i + 1) * width + j] = d * f * ref_silu(u);
            h[i * width + j] = ref_silu(u) * v;
            dot[i] += d * h[i * width + j];
            size[i] += fabs(d * h[i * width + j]);
        }
    void *gate_up = rig_put(r, type, gu, 2 * rows * width);
    const mz_swiglu args = {.type = type,
                            .rows = rows,
                            .intermediate = width,
                            .gate_up = gate_up,
                            .h = rig_room(r, type, rows * width),
                            .dh = rig_put(r, type, dh, rows * width),
                            .scale = scaled ? rig_put_floats(r, scale, rows) : NULL,
                            .dot = rig_room(r, MZ_F32, rows),
                            .dgate_up = in_place ? gate_up : rig_room(r, type, 2 * rows * width)};
    RIG_OK(r, mz_swiglu_backward(r->kernels, 0, &args));
    rig_near(r, "d gate, up", rig_values(r, type, args.dgate_up), want, 2 * rows * width,
             4e-6 + store_error(type), 4e-6);
    rig_near(r, "h again", rig_values(r, type, args.h), h, rows * width, 1e-6 + store_error(type),
             1e-30);
    const double *got = rig_values(r, MZ_F32, args.dot);
    for (int64_t i = 0; i < rows; i++)
        rig_near(r, "<dh, h>", got + i, dot + i, 1, 0, (4e-6 + sum_error(width)) * size[i] + 1e-30);
}
static void check_swiglu_back(rig *r) {
    run_shapes(r, swiglu_back);
}

/* NaN, infinity of a sign, or a number near the one wanted. */
static void same_kind(rig *r, const char *what, mz_dtype type, double u, double got, double want) {
    if (!rig_same(got, want, (4e-6 + store_error(type)) * fabs(want) + 1e-30))
        rig_fail(r, "%s of a gate of %g is %g, not %g", what, u, got, want);
}

/* Gates without bounds, each of them in every column. */
static void check_swiglu_limits(rig *r) {
    static const double gate[] = {INFINITY, -INFINITY, NAN,  3e38, -3e38, 1e38, -1e38, 1e9,
                                  -1e9,     -89,       89.5, 128,  -128,  -0.0, 1e-38};
    enum { ROWS = sizeof gate / sizeof *gate, WIDTH = 40 };
    for (int t = 0; t < 2; t++) {
        double gate_up[2 * ROWS * WIDTH], one[ROWS * WIDTH];
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < WIDTH; j++) {
                gate_up[2 * i * WIDTH + j] = ref_stored(types[t], gate[(i + j) % ROWS]);
                gate_up[(2 * i + 1) * WIDTH + j] = j % 2 ? 1 : -0.5;
                one[i * WIDTH + j] = 1;
            }
        const mz_swiglu args = {.type = types[t],
                                .rows = ROWS,
                                .intermediate = WIDTH,
                                .gate_up = rig_put(r, types[t], gate_up, 2 * ROWS * WIDTH),
                                .h = rig_room(r, types[t], ROWS * WIDTH),
                                .dh = rig_put(r, types[t], one, ROWS * WIDTH),
                                .dgate_up = rig_room(r, types[t], 2 * ROWS * WIDTH)};
        RIG_OK(r, mz_swiglu_forward(r->kernels, 0, &args));
        const double *h = rig_values(r, types[t], args.h);
        RIG_OK(r, mz_swiglu_backward(r->kernels, 0, &args));
        const double *again = rig_values(r, types[t], args.h);
        const double *d = rig_values(r, types[t], args.dgate_up);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < WIDTH; j++) {
                const int at = 2 * i * WIDTH + j;
                const double u = gate_up[at], v = gate_up[at + WIDTH];
                same_kind(r, "h", types[t], u, h[i * WIDTH + j], ref_silu(u) * v);
                same_kind(r, "h again", types[t], u, again[i * WIDTH + j], ref_silu(u) * v);
                same_kind(r, "du", types[t], u, d[at], v * ref_silu_slope(u));
                same_kind(r, "dv", types[t], u, d[at + WIDTH], ref_silu(u));
            }
    }
}

static void check_rows_used(rig *r) {
    enum { ROWS = 9, WIDTH = 40 };
    const int64_t used = 4;
    for (int t = 0; t < 2; t++) {
        const mz_dtype type = types[t];
        mz_swiglu args = {
            .type = type,
            .rows = ROWS,
            .intermediate = WIDTH,
            .rows_used = rig_in(r, &used, sizeof used),
            .gate_up =
                rig_put(r, type, rig_normals(r, type, 2 * ROWS * WIDTH, 1), 2 * ROWS * WIDTH),
            .h = rig_room(r, type, ROWS * WIDTH),
            .dh = rig_put(r, type, rig_normals(r, type, ROWS * WIDTH, 1), ROWS * WIDTH),
            .dgate_up = rig_room(r, type, 2 * ROWS * WIDTH)};
        RIG_OK(r, mz_swiglu_forward(r->kernels, 0, &args));
        const double *h = rig_values(r, type, args.h);
        RIG_OK(r, mz_swiglu_backward(r->kernels, 0, &args));
        const double *d = rig_values(r, type, args.dgate_up);
        for (int64_t i = 0; i < ROWS * WIDTH; i++) {
            RIG_TRUE(r, isnan(h[i]) == (i >= used * WIDTH));
            RIG_TRUE(r, isnan(d[2 * i]) == (2 * i >= 2 * used * WIDTH));
        }
    }
}

/* ---- memory, streams ----------------------------------------------------------------------------
 */

static void check_memory(rig *r) {
    enum { LARGE = 24 << 20 }; /* more than the caches have */
    mz_kernels *k = r->kernels;
    const char text[] = "twenty-one characters";
    char *a = rig_in(r, text, sizeof text), *b = rig_out(r, sizeof text), back[sizeof text];
    RIG_TRUE(r, (uintptr_t)a % 256 == 0);
    RIG_OK(r, mz_kernels_copy(k, 0, MZ_COPY_INSIDE, b, a, sizeof text));
    RIG_OK(r, mz_kernels_copy(k, 0, MZ_COPY_OUT, back, b, sizeof text));
    RIG_OK(r, mz_kernels_sync(k, 0));
    RIG_TRUE(r, strcmp(back, text) == 0);
    RIG_OK(r, mz_kernels_zero(k, 0, b, 3));
    const char *zeroed = rig_get(r, b);
    RIG_TRUE(r, zeroed[0] == 0 && zeroed[2] == 0 && zeroed[3] == text[3]);
    double seconds = -1;
    RIG_OK(r, mz_kernels_mark(k, 0, 3));
    RIG_OK(r, mz_kernels_mark(k, 0, 63));
    RIG_OK(r, mz_kernels_wait(k, 0, 0));
    RIG_OK(r, mz_kernels_sync(k, 0));
    RIG_OK(r, mz_kernels_elapsed(k, 3, 63, &seconds));
    RIG_TRUE(r, seconds >= 0 && seconds < 60);
    void *nothing;
    RIG_OK(r, mz_kernels_alloc(k, 0, &nothing));
    RIG_TRUE(r, nothing != NULL);
    mz_kernels_free(k, nothing);
    mz_kernels_free(k, NULL);
    RIG_TRUE(r, mz_kernels_alloc(k, SIZE_MAX, &nothing) == MZ_K_EINVAL && !nothing);
    RIG_OK(r, mz_kernels_alloc(k, LARGE + 5, &nothing));
    RIG_TRUE(r, (uintptr_t)nothing % 256 == 0);
    RIG_OK(r, mz_kernels_zero(k, 0, (char *)nothing + LARGE, 5));
    RIG_OK(r, mz_kernels_sync(k, 0));
    mz_kernels_free(k, nothing);
    RIG_TRUE(r, strlen(mz_kernels_describe(k)) > 0);
}

/* What a stream has copied another one copies on, once it has waited. That it must wait shows on a
 * GPU alone: the host and an emulated device have done what they were asked when the call returns,
 * and there only copies and refusals are checked. */
static void check_streams(rig *r) {
    const int64_t n = r->small ? 1000 : 4 << 20;
    mz_kernels *k = r->kernels;
    const double *values = rig_normals(r, MZ_F32, n, 1);
    const void *from = rig_put_floats(r, values, n);
    void *between = rig_room(r, MZ_F32, n), *to = rig_room(r, MZ_F32, n);
    const size_t bytes = sizeof(float) * (size_t)n;
    RIG_OK(r, mz_kernels_copy(k, 0, MZ_COPY_INSIDE, between, from, bytes));
    RIG_OK(r, mz_kernels_wait(k, 1, 0));
    RIG_OK(r, mz_kernels_copy(k, 1, MZ_COPY_INSIDE, to, between, bytes));
    RIG_OK(r, mz_kernels_sync(k, 1));
    RIG_TRUE(r, memcmp(rig_get(r, to), rig_get(r, from), bytes) == 0);
    RIG_TRUE(r, mz_kernels_wait(k, 2, 0) == MZ_K_EINVAL && mz_kernels_wait(k, 0, 2) == MZ_K_EINVAL);
    RIG_TRUE(r, mz_kernels_wait(k, -1, 0) == MZ_K_EINVAL);
}

/* All of it stays; what is free shrinks by what is taken. Of the machine's memory others take, too.
 */
static void check_room(rig *r) {
    enum { TAKEN = 64 << 20 };
    mz_kernels *k = r->kernels;
    size_t all, available, again, left;
    RIG_OK(r, mz_kernels_memory(k, &all, &available));
    RIG_TRUE(r, available > 0 && available <= all);
    RIG_OK(r, mz_kernels_memory(k, NULL, NULL));
    if (mz_kernels_backend(k) == MZ_BACKEND_HOST) {
        RIG_TRUE(r, all / 1024 ==
                        (size_t)sysconf(_SC_PHYS_PAGES) * ((size_t)sysconf(_SC_PAGESIZE) / 1024));
        return;
    }
    if (r->small)
        RIG_TRUE(r, all == (size_t)8 << 30); /* tests/shim/runtime.cpp */
    void *memory;
    RIG_OK(r, mz_kernels_alloc(k, TAKEN, &memory));
    RIG_OK(r, mz_kernels_memory(k, &again, &left));
    mz_kernels_free(k, memory);
    RIG_TRUE(r, again == all && left + TAKEN / 2 < available);
}

const check checks_of_rows[] = {{"memory", check_memory},
                                {"streams (their order on a GPU alone)", check_streams},
                                {"room", check_room},
                                {"narrow", check_narrow},
                                {"not a number", check_not_a_number},
                                {"widen", check_widen},
                                {"row norms", check_norms},
                                {"row dots", check_dots},
                                {"gate norms", check_gate_norms},
                                {"pack", check_pack},
                                {"pack and unpack", check_round_trip},
                                {"combine", check_combine},
                                {"swiglu", check_swiglu},
                                {"swiglu backward", check_swiglu_back},
                                {"swiglu's limits", check_swiglu_limits},
                                {"rows used", check_rows_used},
                                {NULL, NULL}};
