/* Optimizer steps: every kind against double precision over a few steps (update.py does 200, bit
 * by bit where the bits are the formula's), what the state weighs, and the statistics of writing.
 */
#include "tests/kernels/reference.h"
#include "tests/kernels/rig.h"
#include "kernels/arithmetic.h"

#include <math.h>
#include <string.h>

typedef struct tensor {
    int64_t matrices, rows, cols;
} tensor;

/* ---- steps --------------------------------------------------------------------------------------
 */

static ref_update make_state(rig *r, mz_update *a, tensor at) {
    const int64_t n = at.matrices * at.rows * at.cols;
    ref_update s = {.args = a, .p = rig_normals(r, a->type, n, 0.02)};
    double **list[] = {&s.g, &s.m, &s.v, &s.u};
    for (int i = 0; i < 4; i++)
        *list[i] = rig_host(r, 8 * (size_t)n);
    s.row = rig_host(r, 8 * (size_t)(at.matrices * at.rows));
    s.col = rig_host(r, 8 * (size_t)(at.matrices * at.cols));
    a->matrices = at.matrices;
    a->rows = at.rows;
    a->cols = at.cols;
    a->parameter = rig_put(r, a->type, s.p, n);
    return s;
}

/* Zeroed state where these settings keep it; all else stays NULL. */
static void give_state(rig *r, mz_update *a, const ref_update *s) {
    const int64_t n = s->args->matrices * s->args->rows * s->args->cols;
    const bool factors = s->args->cols > 1 && (a->kind == MZ_UPDATE_ADAFACTOR ||
                                               (a->kind == MZ_UPDATE_SKEWADAM && a->factored));
    const bool full =
        a->kind == MZ_UPDATE_ADAMW ||
        (!factors && (a->kind == MZ_UPDATE_ADAFACTOR || a->kind == MZ_UPDATE_SKEWADAM));
    const bool momentum =
        a->kind == MZ_UPDATE_SKEWADAM ? a->momentum : a->kind != MZ_UPDATE_ADAFACTOR;
    a->m = momentum ? rig_put_floats(r, s->m, n) : NULL;
    a->v = full ? rig_put_floats(r, s->v, n) : NULL;
    a->row = factors ? rig_put_floats(r, s->row, s->args->matrices * s->args->rows) : NULL;
    a->col = factors ? rig_put_floats(r, s->col, s->args->matrices * s->args->cols) : NULL;
    size_t bytes = 0;
    const void *all[] = {a->m, a->v, a->row, a->col};
    for (int i = 0; i < 4; i++)
        bytes += all[i] ? rig_size(r, all[i]) : 0;
    RIG_TRUE(r, (int64_t)bytes == mz_update_state_bytes(a));
}

/* What gradients are multiplied with before they are scaled. */
typedef double (*relief)(tensor at, int64_t matrix, int64_t row, int64_t col, int64_t t);

/* Columns of very different size; of each matrix row 2 is far below the others, under the floor of
 * its factor, and row 3 has no gradient at first. */
static double rough(tensor at, int64_t matrix, int64_t row, int64_t col, int64_t t) {
    (void)at, (void)matrix;
    return (row == 2 ? 0x1p-20 : row == 3 && t < 3 ? 0 : 1) * exp2((double)(col % 7) - 3);
}

/* Upper rows live in the left columns, lower rows in the right ones. From the second step on, when
 * the upper rows grow, the lower are far under the floor of their factors: these would make the
 * squares of their updates ten million times what the floor makes them. */
static double apart(tensor at, int64_t matrix, int64_t row, int64_t col, int64_t t) {
    (void)matrix;
    const bool lower = row >= (at.rows + 1) / 2, right = col >= at.cols / 2;
    return lower != right ? 0 : lower ? 0x1p-26 : t < 2 ? 0x1p-20 : 1;
}

/* Row 2 is under the floor of its factor by about a quarter, on wide matrices. */
static double near_floor(tensor at, int64_t matrix, int64_t row, int64_t col, int64_t t) {
    (void)at, (void)matrix, (void)col, (void)t;
    return row == 2 ? 0.87e-4 : 1;
}

/* In the second step one value of the last matrix is not a number, or infinite. */
static bool is_spoilt(tensor at, int64_t matrix, int64_t row, int64_t col, int64_t t) {
    return t == 2 && matrix == at.matrices - 1 && row == at.rows / 2 && col == at.cols / 3;
}
static double one_nan(tensor at, int64_t matrix, int64_t row, int64_t col, int64_t t) {
    return is_spoilt(at, matrix, row, col, t) ? NAN : 1;
}
static double one_infinite(tensor at, int64_t matrix, int64_t row, int64_t col, int64_t t) {
    return is_spoilt(at, matrix, row, col, t) ? INFINITY : 1;
}

static void compare_state(rig *r, const ref_update *s, double size) {
    const mz_update *a = s->args;
    const struct {
        const float *got;
        const double *want;
    } parts[] = {{a->m, s->m}, {a->v, s->v}, {a->row, s->row}, {a->col, s->col}};
    for (int i = 0; i < 4; i++) {
        const double *got = parts[i].got ? rig_values(r, MZ_F32, parts[i].got) : NULL;
        const int64_t n = got ? (int64_t)(rig_size(r, parts[i].got) / 4) : 0;
        for (int64_t j = 0; j < n; j++)
            if (!rig_same(got[j], parts[i].want[j],
                          4e-6 * fabs(parts[i].want[j]) + 1e-6 * size * (i == 0 ? 1 : size)))
                rig_fail(r, "kind %d, state %d: [%lld] is %.9g, not %.9g", (int)a->kind, i,
                         (long long)j, got[j], parts[i].want[j]);
    }
}

static void steps(rig *r, mz_update a, tensor at, double size, relief part) {
    const int64_t n = at.matrices * at.rows * at.cols;
    ref_update s = make_state(r, &a, at);
    give_state(r, &a, &s);
    const double scale = 0.5;
    a.grad_scale = rig_put_floats(r, &scale, 1);
    void *workspace = rig_workspace(r, mz_update_workspace(r->kernels, &a));
    double *drift = rig_host(r, 8 * (size_t)n);
    const double place = a.type == MZ_BF16 ? 0x1p-8 : 1.3e-7;
    for (int64_t t = 1; t <= 3; t++) {
        const double *g = rig_normals(r, a.gradient_type, n, size);
        for (int64_t i = 0; i < n; i++) {
            const double here =
                part(at, i / at.cols / at.rows, i / at.cols % at.rows, i % at.cols, t);
            s.g[i] = ref_stored(a.gradient_type, g[i] * here);
        }
        a.gradient = rig_put(r, a.gradient_type, s.g, n);
        a.step = t;
        for (int64_t i = 0; i < n; i++)
            s.g[i] *= scale;
        RIG_OK(r, mz_update_step(r->kernels, 0, &a, workspace));
        for (int64_t i = 0; a.type == MZ_BF16 && i < n; i++) /* rounded when it has decayed */
            drift[i] += place * fabs(s.p[i]);
        ref_step(&s, t);
        for (int64_t i = 0; i < n; i++) /* of one fp32 step, relative to its size and p's */
            drift[i] +=
                4e-6 * (double)a.rate * fabs(s.u[i]) + place * fabs(s.p[i]) + 1e-6 * (double)a.rate;
    }
    const double *p = rig_values(r, a.type, a.parameter);
    for (int64_t i = 0; i < n; i++)
        if (!rig_same(p[i], s.p[i], drift[i]))
            rig_fail(r, "kind %d, %lld x %lld x %lld, size %g: p[%lld] is %.9g, not %.9g (+- %.2g)",
                     (int)a.kind, (long long)at.matrices, (long long)at.rows, (long long)at.cols,
                     size, (long long)i, p[i], s.p[i], drift[i]);
    compare_state(r, &s, size);
}

static const tensor tensors[] = {{1, 1, 8},   {1, 40, 1},  {3, 24, 40},  {2, 7, 72},
                                 {1, 300, 8}, {17, 4, 16}, {1, 65, 136}, {2, 5, 1032}};

static void each_tensor(rig *r, mz_update a, double size) {
    for (int i = 0; i < 8; i++)
        for (int type = MZ_F32; type <= MZ_BF16; type++) {
            if (r->small && tensors[i].rows * tensors[i].cols > 4000)
                continue;
            a.gradient_type = type;
            a.clip_tensor = rig_below(r, 2);
            steps(r, a, tensors[i], size, rough);
            rig_clear(r);
        }
}

static mz_update settings_of(mz_update_kind kind) {
    return (mz_update){.kind = kind,
                       .type = MZ_F32,
                       .rate = 1e-2f,
                       .beta1 = 0.9f,
                       .beta2 = kind == MZ_UPDATE_LION ? 0.99f : 0.999f,
                       .decay = 0.05f,
                       .eps = kind == MZ_UPDATE_ADAFACTOR ? 1e-30f : 1e-8f,
                       .clip_rms = kind == MZ_UPDATE_SKEWADAM || kind == MZ_UPDATE_ADAFACTOR,
                       .update_scale = 1};
}

/* Gradients far below, near and above the floor inside the roots. */
static void check_skewadam(rig *r) {
    const double sizes[] = {1e-6, 1e-3, 1};
    for (int i = 0; i < 3; i++)
        for (int tier = 0; tier < 4; tier++) {
            mz_update a = settings_of(MZ_UPDATE_SKEWADAM);
            a.momentum = tier & 1;
            a.factored = tier & 2;
            a.clip_rms = rig_below(r, 4) > 0;
            each_tensor(r, a, sizes[i]);
        }
}
/* The sum that the clip is made of must not lose its digits to rows below their floor. */
static void check_floors(rig *r) {
    for (int i = 0; i < 8; i++)
        for (int tier = 2; tier < 4; tier++) {
            mz_update a = settings_of(MZ_UPDATE_SKEWADAM);
            a.factored = true;
            a.momentum = tier & 1;
            a.gradient_type = (mz_dtype)rig_below(r, 2);
            if (r->small && tensors[i].rows * tensors[i].cols > 4000)
                continue;
            steps(r, a, tensors[i], 64, apart);
            steps(r, a, tensors[i], 1, near_floor);
            rig_clear(r);
        }
}
/* Columns whose sums and factors do not fit the shared memory of a CUDA block. */
static void check_wide(rig *r) {
    mz_update a = settings_of(MZ_UPDATE_SKEWADAM);
    a.factored = true;
    a.gradient_type = MZ_BF16;
    steps(r, a, (tensor){1, 3, 14603}, 1, rough);
}
static void check_adamw(rig *r) {
    each_tensor(r, settings_of(MZ_UPDATE_ADAMW), 1e-3);
}
static void check_adafactor(rig *r) {
    each_tensor(r, settings_of(MZ_UPDATE_ADAFACTOR), 1e-3);
}
static void check_lion(rig *r) {
    each_tensor(r, settings_of(MZ_UPDATE_LION), 1e-3);
}

/* What depends on a NaN or an infinity of the gradient becomes what the formulas make of it, in
 * these steps and those that follow; other matrices go on. */
static void spoil(rig *r, mz_update a) {
    const tensor at[] = {{3, 7, 40}, {2, 24, 1}};
    for (int i = 0; i < 2 * 2 * 2 * 3; i++) {
        a.type = (mz_dtype)(i / 2 % 2);
        a.gradient_type = (mz_dtype)(i / 4 % 2);
        a.clip_rms = i / 8 > 0;
        a.clip_tensor = i / 8 > 1;
        steps(r, a, at[i % 2], 1, one_nan);
        steps(r, a, at[i % 2], 1, one_infinite);
        rig_clear(r);
    }
}
static void check_spoilt(rig *r) {
    for (int tier = 0; tier < 4; tier++) {
        mz_update a = settings_of(MZ_UPDATE_SKEWADAM);
        a.momentum = tier & 1;
        a.factored = tier & 2;
        spoil(r, a);
    }
    spoil(r, settings_of(MZ_UPDATE_ADAFACTOR));
    spoil(r, settings_of(MZ_UPDATE_ADAMW));
    spoil(r, settings_of(MZ_UPDATE_LION));
}

/* A column's factor that is no number is part of its matrix's RMS: the clip spreads it. */
static void check_spoilt_factors(rig *r) {
    enum { ROWS = 9, COLS = 40, N = ROWS * COLS };
    for (int i = 0; i < 4; i++) {
        mz_update a = settings_of(i % 2 ? MZ_UPDATE_ADAFACTOR : MZ_UPDATE_SKEWADAM);
        a.factored = true;
        a.clip_rms = true;
        a.step = 3;
        a.gradient_type = MZ_F32;
        a.type = (mz_dtype)(i / 2);
        ref_update s = make_state(r, &a, (tensor){2, ROWS, COLS});
        s.col[COLS + 17] = NAN;
        give_state(r, &a, &s);
        a.gradient = rig_put_floats(r, rig_normals(r, MZ_F32, 2 * N, 1), 2 * N);
        void *workspace = rig_workspace(r, mz_update_workspace(r->kernels, &a));
        RIG_OK(r, mz_update_step(r->kernels, 0, &a, workspace));
        const double *p = rig_values(r, a.type, a.parameter);
        for (int e = 0; e < 2 * N; e++)
            RIG_TRUE(r, e < N ? isfinite(p[e]) : isnan(p[e]));
    }
}

/* ---- Muon: the update is orthogonal up to what the iteration promises --------------------------
 */

static void muon(rig *r, int64_t rows, int64_t cols, bool nesterov) {
    const int64_t n = rows * cols, s = rows < cols ? rows : cols, l = rows < cols ? cols : rows;
    mz_update a = settings_of(MZ_UPDATE_MUON);
    a.rate = 1;
    a.decay = 0;
    a.newton_schulz = 8;
    a.nesterov = nesterov;
    a.step = 1;
    ref_update x = make_state(r, &a, (tensor){1, rows, cols});
    give_state(r, &a, &x);
    const double *g = rig_normals(r, MZ_F32, n, 1e-3);
    a.gradient = rig_put_floats(r, g, n);
    void *workspace = rig_workspace(r, mz_update_workspace(r->kernels, &a));
    RIG_OK(r, mz_update_step(r->kernels, 0, &a, workspace));
    rig_near(r, "momentum", rig_values(r, MZ_F32, a.m), g, n, 1e-6, 0);
    const double *p = rig_values(r, MZ_F32, a.parameter);
    double along = 0;
    for (int64_t i = 0; i < s; i++)
        for (int64_t j = 0; j <= i; j++) {
            double dot = 0;
            for (int64_t k = 0; k < l; k++) {
                const int64_t b = rows < cols ? i * cols + k : k * cols + i;
                const int64_t c = rows < cols ? j * cols + k : k * cols + j;
                dot += (x.p[b] - p[b]) * (x.p[c] - p[c]);
                along += i == j ? (x.p[b] - p[b]) * g[b] : 0;
            }
            /* singular values end between 0.68 and 1.14 for this polynomial */
            RIG_TRUE(r, i == j ? dot > 0.4 && dot < 1.4 : fabs(dot) < 0.5);
        }
    RIG_TRUE(r, along > 0);
}
static void check_muon(rig *r) {
    muon(r, 16, 40, false);
    muon(r, 40, 16, true);
    muon(r, 24, 24, false);
}

/* Every value of an orthogonal matrix depends on every value of the gradient. */
static void check_spoilt_muon(rig *r) {
    enum { ROWS = 16, COLS = 24, N = ROWS * COLS };
    for (int i = 0; i < 4; i++) {
        mz_update a = settings_of(MZ_UPDATE_MUON);
        a.newton_schulz = 3;
        a.step = 1;
        a.type = (mz_dtype)(i % 2);
        const ref_update s = make_state(r, &a, (tensor){2, ROWS, COLS});
        give_state(r, &a, &s);
        double *g = rig_normals(r, MZ_F32, 2 * N, 1);
        g[N + 100] = i < 2 ? NAN : INFINITY;
        a.gradient = rig_put_floats(r, g, 2 * N);
        void *workspace = rig_workspace(r, mz_update_workspace(r->kernels, &a));
        RIG_OK(r, mz_update_step(r->kernels, 0, &a, workspace));
        const double *p = rig_values(r, a.type, a.parameter);
        for (int e = 0; e < 2 * N; e++)
            RIG_TRUE(r, e < N ? isfinite(p[e]) : isnan(p[e]));
    }
}

/* ---- writing bf16 parameters --------------------------------------------------------------------
 */

/* One step of Lion with rate x from p: the write of p - x, many times. Mean error in units of the
 * last place of what is written. */
static double write_error(rig *r, mz_rounding rounding, double p, double x, int64_t n) {
    mz_update a = settings_of(MZ_UPDATE_LION);
    a.type = MZ_BF16;
    a.decay = 0;
    a.rate = (float)x;
    a.rounding = rounding;
    a.step = 1 + rig_below(r, 1000);
    a.seed = rig_bits(r);
    a.tensor = rig_bits(r);
    double *one = rig_host(r, 8 * (size_t)n), *start = rig_host(r, 8 * (size_t)n), sum = 0;
    for (int64_t i = 0; i < n; i++) {
        one[i] = 1;
        start[i] = p;
    }
    a.matrices = 1;
    a.rows = n;
    a.cols = 1;
    a.parameter = rig_put(r, MZ_BF16, start, n);
    a.gradient = rig_put_floats(r, one, n);
    a.m = rig_put_floats(r, rig_host(r, 8 * (size_t)n), n);
    RIG_OK(r, mz_update_step(r->kernels, 0, &a, NULL));
    const double *got = rig_values(r, MZ_BF16, a.parameter), want = (float)p - (float)x;
    int exponent;
    frexp(want, &exponent);
    for (int64_t i = 0; i < n; i++)
        sum += (got[i] - want) / ldexp(1, exponent - 8);
    return sum / (double)n;
}

/* Dither of width w, one to two units in the last place, is off by (w - 1) (2 - w) / (2 w) at most,
 * w = sqrt 2 the worst; where the unit changes, at powers of two, by more: these are left out. */
static void check_bias(rig *r) {
    const int64_t n = r->small ? 4000 : 40000;
    const double dither = 1.5 - sqrt(2);
    const double noise = 5 * 0.75 / sqrt((double)n); /* five standard deviations */
    for (int i = 0; i < 24; i++) {
        const double p = ref_bf16((1.05 + 0.9 * rig_uniform(r)) * (i % 2 ? 1 : -1)),
                     x = rig_uniform(r) * 0.02;
        RIG_TRUE(r, fabs(write_error(r, MZ_ROUND_STOCHASTIC, p, x, n)) < noise);
        RIG_TRUE(r, fabs(write_error(r, MZ_ROUND_DITHER, p, x, n)) < dither + noise);
        const double nearest = write_error(r, MZ_ROUND_NEAREST, p, x, 8),
                     want = (float)p - (float)x;
        RIG_TRUE(r, fabs(nearest) <= 0.5 && (nearest == 0) == (ref_bf16(want) == want));
    }
}

/* Every number of bf16 decays alone, with factors on both sides of what a rounding hides. */
static void check_decay(rig *r) {
    enum { N = 1 << 16 };
    const float lost[] = {1.5e-5f, 0x1.fffp-10f, 0x1p-9f, 0x1.001p-9f, 0.01f, -1e-3f};
    double *p = rig_host(r, 8 * N), *zero = rig_host(r, 8 * N);
    for (uint32_t i = 0; i < N; i++) /* of infinities and NaNs zeros */
        p[i] = (i & 0x7f80u) == 0x7f80u ? 0 : mz_from_bf16((uint16_t)i);
    for (int k = 0; k < 6; k++) {
        mz_update a = settings_of(MZ_UPDATE_LION);
        a.type = MZ_BF16;
        a.rate = 0.5f;
        a.decay = 2 * lost[k];
        a.step = 1;
        a.matrices = 1;
        a.rows = N;
        a.cols = 1;
        a.parameter = rig_put(r, MZ_BF16, p, N);
        a.gradient = rig_put_floats(r, zero, N);
        a.m = rig_put_floats(r, zero, N);
        RIG_OK(r, mz_update_step(r->kernels, 0, &a, NULL));
        const uint16_t *got = rig_get(r, a.parameter);
        for (int i = 0; i < N; i++)
            if (got[i] != mz_to_bf16((float)p[i] * (1 - lost[k])))
                rig_fail(r, "decay by %g: %g becomes 0x%04x", (double)lost[k], p[i], got[i]);
    }
}

/* Bits belong to (seed, step, tensor, element): cutting a tensor into matrices changes nothing. */
static void check_bits(rig *r) {
    enum { N = 20580 }; /* two substreams end within */
    const double *p = rig_normals(r, MZ_BF16, N, 1), *g = rig_normals(r, MZ_F32, N, 1);
    const tensor cuts[] = {{1, N, 1}, {1, 3, 6860}, {6, 5, 686}, {30, 7, 98}};
    unsigned char *want = NULL;
    for (int i = 0; i < 4; i++) {
        mz_update a = settings_of(MZ_UPDATE_ADAMW);
        a.type = MZ_BF16;
        a.rounding = MZ_ROUND_STOCHASTIC;
        a.step = 3;
        a.seed = 5;
        a.matrices = cuts[i].matrices;
        a.rows = cuts[i].rows;
        a.cols = cuts[i].cols;
        a.parameter = rig_put(r, MZ_BF16, p, N);
        a.gradient = rig_put_floats(r, g, N);
        a.m = rig_put_floats(r, rig_host(r, 8 * N), N);
        a.v = rig_put_floats(r, rig_host(r, 8 * N), N);
        RIG_OK(r, mz_update_step(r->kernels, 0, &a, NULL));
        unsigned char *got = rig_get(r, a.parameter);
        RIG_TRUE(r, !want || memcmp(got, want, 2 * N) == 0);
        want = got;
    }
}

/* Parameters after a factored step, of one type or the other. */
static void *factored_step(rig *r, mz_update a, mz_dtype type, const double *p, const double *g) {
    const int64_t n = a.matrices * a.rows * a.cols;
    a.type = type;
    a.parameter = rig_put(r, type, p, n);
    a.gradient = rig_put(r, a.gradient_type, g, n);
    a.row = rig_put_floats(r, rig_host(r, 8 * (size_t)n), a.matrices * a.rows);
    a.col = rig_put_floats(r, rig_host(r, 8 * (size_t)n), a.matrices * a.cols);
    RIG_OK(r, mz_update_step(r->kernels, 0, &a,
                             rig_workspace(r, mz_update_workspace(r->kernels, &a))));
    return a.parameter;
}

static void row_bits(rig *r, mz_rounding rounding, mz_dtype gradient, int64_t rows, int64_t cols) {
    mz_update a = settings_of(MZ_UPDATE_SKEWADAM);
    a.factored = true;
    a.momentum = false;
    a.decay = 0;
    a.rounding = rounding;
    a.gradient_type = gradient;
    a.step = 4 + (rig_below(r, 2) << 32);
    a.seed = rig_bits(r);
    a.tensor = rig_bits(r);
    a.matrices = 2;
    a.rows = rows;
    a.cols = cols;
    const int64_t n = a.matrices * a.rows * a.cols;
    const double *p = rig_normals(r, MZ_BF16, n, 1), *g = rig_normals(r, gradient, n, 1);
    const float *whole = rig_get(r, factored_step(r, a, MZ_F32, p, g));
    const uint16_t *rounded = rig_get(r, factored_step(r, a, MZ_BF16, p, g));
    for (int64_t e = 0; e < n; e++) {
        const uint32_t bits = ref_element_bits(a.seed, a.tensor, (uint64_t)a.step, (uint64_t)e);
        const uint16_t want = rounding == MZ_ROUND_DITHER ? mz_bf16_dither(whole[e], bits)
                                                          : mz_bf16_stochastic(whole[e], bits);
        if (rounded[e] != want)
            rig_fail(r, "rounding %d, %lld x %lld: p[%lld] is 0x%04x, not 0x%04x of %.9g and 0x%x",
                     (int)rounding, (long long)rows, (long long)cols, (long long)e, rounded[e],
                     want, (double)whole[e], bits);
    }
    rig_clear(r);
}

/* What is written in bf16 is what is written in fp32, rounded with the element's own bits, also
 * where rows start in the middle of a word, and where substreams end inside of rows. The host takes
 * bf16 gradients three rows at a time, of the last shape in two blocks, neither a multiple. */
static void check_row_bits(rig *r) {
    const int64_t shape[][2] = {{9, 7}, {10, 13}, {11, 30}, {2, 4099}, {3, 2050}, {35, 2050}};
    for (int i = 0; i < 6; i++)
        for (int gradient = MZ_F32; gradient <= MZ_BF16; gradient++) {
            const bool large = shape[i][1] > 30;
            if (r->small && large && (gradient == MZ_F32 || shape[i][0] > 3))
                continue;
            row_bits(r, MZ_ROUND_STOCHASTIC, gradient, shape[i][0], shape[i][1]);
            row_bits(r, MZ_ROUND_DITHER, gradient, shape[i][0], shape[i][1]);
        }
}

/* A parameter whose update is NaN becomes NaN, whatever the bits of that NaN. */
static void check_nan(rig *r) {
    enum { N = 2 * 5 * 37 };
    const float nan_of[] = {mz_bits_float(0x7fffffffu), mz_bits_float(0xffffffffu), NAN};
    for (int i = 0; i < 3 * 6; i++) {
        mz_update a = settings_of(MZ_UPDATE_SKEWADAM);
        a.momentum = i / 3 >= 3;
        a.factored = true;
        a.rounding = (mz_rounding)(i / 3 % 3);
        a.step = 1;
        a.matrices = 2;
        a.rows = 5;
        a.cols = 37;
        a.gradient_type = MZ_BF16;
        a.grad_scale = rig_in(r, &nan_of[i % 3], sizeof(float));
        a.m = rig_put_floats(r, rig_host(r, 8 * N), N);
        const double *p = rig_normals(r, MZ_BF16, N, 1);
        const uint16_t *got = rig_get(r, factored_step(r, a, MZ_BF16, p, p));
        for (int e = 0; e < N; e++)
            RIG_TRUE(r, (got[e] & 0x7fff) > 0x7f80);
        rig_clear(r);
    }
}

/* ---- state of the study's model (spec 6.4), bytes -----------------------------------------------
 */

static int64_t state_of(mz_update_kind kind, bool momentum, bool fact, int64_t matrices,
                        int64_t rows, int64_t cols) {
    const mz_update a = {.kind = kind,
                         .momentum = momentum,
                         .factored = fact,
                         .matrices = matrices,
                         .rows = rows,
                         .cols = cols};
    return mz_update_state_bytes(&a);
}

static void check_state(rig *r) {
    enum { D = 4096 };
    const int64_t shape[][3] = {{1, 50304, D}, {1, 256, D}, {4, D, D}, {4, 1024, D}, {3, D, D}};
    int64_t skew = 0, adafactor = 0, lion = 0, adamw = 0;
    for (int i = 0; i < 5; i++) {
        const int64_t m = shape[i][0], n = shape[i][1], k = shape[i][2];
        skew += state_of(MZ_UPDATE_SKEWADAM, true, true, m, n, k);
        adafactor += state_of(MZ_UPDATE_ADAFACTOR, false, false, m, n, k);
        lion += state_of(MZ_UPDATE_LION, false, false, m, n, k);
        adamw += state_of(MZ_UPDATE_ADAMW, false, false, m, n, k);
    }
    skew += state_of(MZ_UPDATE_SKEWADAM, true, true, 10, D, 1);
    adafactor += state_of(MZ_UPDATE_ADAFACTOR, false, false, 10, D, 1);
    lion += state_of(MZ_UPDATE_LION, false, false, 10, D, 1);
    adamw += state_of(MZ_UPDATE_ADAMW, false, false, 10, D, 1);
    RIG_TRUE(r, lion == 1365409792 && adamw == 2 * lion);
    RIG_TRUE(r, skew == 1365409792 + 217600 + 17408 + 212992 + 98304 + 163840);
    const int64_t experts = state_of(MZ_UPDATE_SKEWADAM, false, true, 3 * 128, D, D);
    RIG_TRUE(r, experts == 12582912);
    RIG_TRUE(r, state_of(MZ_UPDATE_SKEWADAM, true, true, 384, D, D) - experts == INT64_C(24) << 30);
    const int64_t router = state_of(MZ_UPDATE_SKEWADAM, false, false, 1, 128, D);
    RIG_TRUE(r, router == 2097152 && skew + experts + router == 1380800000);
    const int64_t router_factors = state_of(MZ_UPDATE_ADAFACTOR, false, false, 1, 128, D);
    RIG_TRUE(r, adafactor + experts + router_factors == 13309952);
    RIG_TRUE(r, state_of(MZ_UPDATE_MUON, false, false, 384, D, D) == INT64_C(24) << 30);
}

static void check_no_values(rig *r) {
    for (int kind = MZ_UPDATE_SKEWADAM; kind <= MZ_UPDATE_MUON; kind++) {
        mz_update a = settings_of(kind);
        a.cols = 8;
        a.step = 1;
        a.matrices = 2;
        RIG_OK(r, mz_update_step(r->kernels, 0, &a,
                                 rig_workspace(r, mz_update_workspace(r->kernels, &a))));
    }
}

const check checks_of_updates[] = {{"skewadam", check_skewadam},
                                   {"rows below their floor", check_floors},
                                   {"wide rows", check_wide},
                                   {"adamw", check_adamw},
                                   {"adafactor", check_adafactor},
                                   {"lion", check_lion},
                                   {"spoilt gradients", check_spoilt},
                                   {"muon", check_muon},
                                   {"spoilt factors", check_spoilt_factors},
                                   {"spoilt gradients of muon", check_spoilt_muon},
                                   {"bias of writing", check_bias},
                                   {"decay of bf16", check_decay},
                                   {"random bits", check_bits},
                                   {"bits of rows", check_row_bits},
                                   {"nan", check_nan},
                                   {"state", check_state},
                                   {"no values", check_no_values},
                                   {NULL, NULL}};
