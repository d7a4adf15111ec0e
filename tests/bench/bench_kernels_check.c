#include "tests/bench/bench_kernels.h"
#include "kernels/arithmetic.h"

#include <stdio.h>
#include <stdlib.h>

static double value(mz_dtype type, const void *x, int64_t i) {
    return type == MZ_BF16 ? mz_from_bf16(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

static void near(const char *what, int64_t i, double got, double want, double bound) {
    if (fabs(got - want) <= bound)
        return;
    fprintf(stderr, "bench_kernels: wrong result: %s[%lld] is %.9g, not %.9g\n", what, (long long)i,
            got, want);
    exit(1);
}

/* Of a value that was rounded to `type`, computed from terms of this size. */
static double slack(mz_dtype type, double want, double size) {
    return (type == MZ_BF16 ? 0x1p-8 : 0x1p-22) * fabs(want) + 2e-6 * size;
}

enum { LOOKED_AT = 61 }; /* every so many rows */

/* ---- products -----------------------------------------------------------------------------------
 */

/* One element: row i of group g's rows, or of its weight, column j. */
static void product_element(const mz_product_args *a, int32_t g, int64_t i, int64_t j) {
    const int64_t first = a->groups.begin[g], end = a->groups.begin[g + 1], n = a->n, k = a->k;
    const bool wgrad = a->op == MZ_PRODUCT_WGRAD, forward = a->op == MZ_PRODUCT_FORWARD;
    const int64_t depth = wgrad ? end - first : forward ? k : n;
    double want = 0, size = 0;
    for (int64_t d = 0; d < depth; d++) {
        const int64_t left = wgrad ? (first + d) * n + i : (first + i) * (forward ? k : n) + d;
        const int64_t right = wgrad ? (first + d) * k + j : forward ? j * k + d : d * k + j;
        const double term =
            value(a->type, a->a, left) * value(a->type, wgrad ? a->c : a->weight[g], right);
        want += term;
        size += fabs(term);
    }
    const mz_dtype type = wgrad ? a->gradient_type : a->type;
    const double got = value(type, wgrad ? a->weight[g] : a->c,
                             wgrad ? i * k + j : (first + i) * (forward ? n : k) + j);
    near("product", i, got, want, slack(type, want, size));
}

void check_product(const mz_product_args *a) {
    for (int32_t g = 0; g < a->groups.groups; g++) {
        const int64_t rows =
            a->op == MZ_PRODUCT_WGRAD ? a->n : a->groups.begin[g + 1] - a->groups.begin[g];
        const int64_t cols = a->op == MZ_PRODUCT_FORWARD ? a->n : a->k;
        for (int64_t i = 0; i < rows; i += LOOKED_AT)
            product_element(a, g, i, (i * 7 + g) % cols);
    }
}

/* ---- rows ---------------------------------------------------------------------------------------
 */

void check_norms(const mz_norms *a) {
    for (int64_t i = 0; i < a->rows; i += LOOKED_AT) {
        double want = 0;
        for (int64_t j = 0; j < a->cols; j++)
            want += pow(value(a->type, a->x, i * a->stride + j), 2);
        near("norm", i, a->out[i], want, 1e-5 * want);
    }
}

/* MZ_SCORED_DOWN, k pairs a token. */
void check_scores(const mz_score_args *a) {
    for (int64_t p = 0; p < a->pairs; p++) {
        const double want = pow(a->weight[p], 2) * a->grad_norm2[p / a->k] * a->hidden_norm2[p];
        near("score", p, a->score[p], want, 1e-6 * fabs(want));
    }
}

/* One expert: no score that stays lies below one that is left out. */
void check_selection(const mz_selection *a) {
    uint8_t *stays = calloc((size_t)a->pairs, 1);
    float least = INFINITY, most = 0;
    if (!stays)
        exit(4);
    for (int64_t i = 0; i < a->quota[0]; i++)
        stays[a->kept[i]]++;
    for (int64_t p = 0; p < a->pairs; p++) {
        near("times a pair is kept", p, stays[p] > 1, 0, 0);
        const float score = a->score[p];
        if (stays[p])
            least = score < least ? score : least;
        else
            most = score > most ? score : most;
    }
    free(stays);
    near("largest score left out, above the least kept", 0, most > least, 0, 0);
}

void check_pack(const mz_pack *a) {
    for (int64_t i = 0; i < a->rows; i += LOOKED_AT) {
        const int64_t pair = a->row_pair[i];
        for (int64_t j = 0; j < a->hidden; j++) {
            const double want = (a->scale ? (double)a->scale[pair] : 1) *
                                value(a->type, a->x, pair / a->k * a->hidden + j);
            near("packed", i, value(a->type, a->out, i * a->hidden + j), want,
                 a->scale ? slack(a->type, want, 0) : 0);
        }
    }
}

void check_unpack(const mz_unpack *a) {
    for (int64_t p = 0; p < a->pairs; p += LOOKED_AT)
        for (int64_t j = 0; j < a->hidden; j++)
            near("unpacked", p, value(a->type, a->out, p * a->hidden + j),
                 value(a->type, a->row, a->position[p] * a->hidden + j), 0);
}

void check_combine(const mz_combine *a) {
    for (int64_t t = 0; t < a->tokens; t += LOOKED_AT)
        for (int64_t j = 0; j < a->hidden; j++) {
            double want = 0, size = 0;
            for (int64_t p = t * a->k; p < (t + 1) * a->k; p++) {
                const double term =
                    a->scale[p] * value(a->type, a->row, a->position[p] * a->hidden + j);
                want += term;
                size += fabs(term);
            }
            near("combined", t, value(a->type, a->out, t * a->hidden + j), want,
                 slack(a->type, want, size));
        }
}

void check_swiglu(const mz_swiglu *a) {
    const int64_t n = a->intermediate;
    for (int64_t i = 0; i < a->rows; i += LOOKED_AT) {
        double norm2 = 0;
        for (int64_t j = 0; j < n; j++) {
            const double u = value(a->type, a->gate_up, 2 * i * n + j);
            const double v = value(a->type, a->gate_up, (2 * i + 1) * n + j);
            const double want = u / (1 + exp(-u)) * v, got = value(a->type, a->h, i * n + j);
            near("h", i, got, want, slack(a->type, want, fabs(want)));
            norm2 += got * got;
        }
        near("||h||^2", i, a->norm2[i], norm2, 1e-5 * norm2);
    }
}

void check_swiglu_back(const mz_swiglu *a, const uint16_t *gate_up) {
    const int64_t n = a->intermediate;
    for (int64_t i = 0; i < a->rows; i += LOOKED_AT)
        for (int64_t j = 0; j < n; j++) {
            const double u = value(MZ_BF16, gate_up, 2 * i * n + j);
            const double v = value(MZ_BF16, gate_up, (2 * i + 1) * n + j);
            const double dh = value(MZ_BF16, a->dh, i * n + j), s = 1 / (1 + exp(-u));
            const double du = dh * v * s * (1 + u * (1 - s)), dv = dh * u * s;
            near("du", i, value(MZ_BF16, a->dgate_up, 2 * i * n + j), du,
                 slack(MZ_BF16, du, 8 * fabs(dh * v)));
            near("dv", i, value(MZ_BF16, a->dgate_up, (2 * i + 1) * n + j), dv,
                 slack(MZ_BF16, dv, 8 * fabs(dh * u)));
        }
}

/* ---- optimizers ---------------------------------------------------------------------------------
 */

/* Sums of g^2 + floor of one matrix over rows and columns, each divided by their number. */
static void means(const mz_update *a, const uint16_t *g, double floor, double *row, double *col) {
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->cols; j++) {
            const double g2 = pow(mz_from_bf16(g[i * a->cols + j]), 2) + floor;
            row[i] += g2 / (double)a->cols;
            col[j] += g2 / (double)a->rows;
        }
}

/* Updates of one matrix before the rate, from no state: m = (1 - b1) g, v = (1 - b2) g^2. */
static void updates_of(const mz_update *a, const uint16_t *g, double *u) {
    const int64_t n = a->rows * a->cols;
    const double t = (double)a->step, b1 = a->beta1;
    const bool adafactor = a->kind == MZ_UPDATE_ADAFACTOR, skew = a->kind == MZ_UPDATE_SKEWADAM;
    const double b2 = adafactor ? 1 - pow(t, -0.8) : (double)a->beta2;
    const double least = skew ? (double)a->eps : 0;
    double *row = calloc((size_t)(a->rows + a->cols), sizeof *row), *col = row + a->rows;
    double mean = 0, u2 = 0;
    if (!row)
        exit(4);
    means(a, g, adafactor ? (double)a->eps : 0, row, col);
    for (int64_t i = 0; i < a->rows; i++)
        mean += (1 - b2) * row[i] / (double)a->rows;
    for (int64_t i = 0; i < n; i++) {
        const double x = mz_from_bf16(g[i]), v = (1 - b2) * x * x;
        const double factors = fmax((1 - b2) * row[i / a->cols] / mean, least) *
                               fmax((1 - b2) * col[i % a->cols], least);
        const double base =
            a->kind == MZ_UPDATE_ADAMW ? x
            : !skew                    ? x
                    : sqrt(1 - pow(b2, t)) * (a->momentum ? (1 - b1) * x / (1 - pow(b1, t)) : x);
        if (a->kind == MZ_UPDATE_LION)
            u[i] = (x > 0) - (x < 0);
        else if (a->kind == MZ_UPDATE_ADAMW)
            u[i] = (1 - b1) * x / (1 - pow(b1, t)) / (sqrt(v / (1 - pow(b2, t))) + (double)a->eps);
        else
            u[i] = base / sqrt(adafactor || a->factored ? factors : fmax(v, least));
        u2 += u[i] * u[i] / (double)n;
    }
    const double clip = a->clip_rms && (skew || adafactor) && u2 > 1 ? 1 / sqrt(u2) : 1;
    for (int64_t i = 0; i < n; i++)
        u[i] *= clip;
    free(row);
}

void check_update(const mz_update *a, const uint16_t *before) {
    const int64_t n = a->rows * a->cols;
    double *u = malloc(sizeof *u * (size_t)n);
    if (!u)
        exit(4);
    for (int64_t z = 0; z<a->matrices; z += a->matrices> 1 ? a->matrices - 1 : 1) {
        const uint16_t *g = (const uint16_t *)a->gradient + z * n;
        const uint16_t *p = (const uint16_t *)a->parameter + z * n;
        updates_of(a, g, u);
        for (int64_t i = 0; i < n; i++) {
            const double start = mz_from_bf16(before[z * n + i]) * (1 - (double)a->rate * a->decay);
            const double want = start - (double)a->rate * u[i];
            /* two roundings to bf16, the second by up to a whole unit and a half */
            near("parameter", i, mz_from_bf16(p[i]), want,
                 0x1p-8 * fabs(start) + 0x1.8p-7 * fabs(want) + 1e-5 * a->rate);
        }
    }
    free(u);
}
