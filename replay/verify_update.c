#include "replay/verify_update.h"

#include "replay/data.h"
#include "replay/update.h"
#include "replay/verify.h"

#include <math.h>
#include <string.h>

/* Of every rule; single precision, as an optimizer is given them. */
typedef struct rule {
    float beta1, beta2, eps, decay;
    bool whole;          /* weights, too */
    bool plain_sum;      /* m = beta1 m + g, without 1 - beta1 */
    bool sign;           /* lion */
    float m_beta;        /* that m goes on with */
    double seen1, seen2; /* 1 - beta^t, what moments that began at 0 have of their mean */
} rule;

static const float rate = 1e-4F;

/* step: t, from 1. */
static rule rule_of(const mz_optimizer *o, int64_t step) {
    const float beta1 = 0.9F, beta2 = 0.999F;
    switch (o->rule) {
    case MZ_RULE_ADAMW:
        return (rule){.beta1 = beta1,
                      .beta2 = beta2,
                      .eps = 1e-8F,
                      .decay = 0.01F,
                      .whole = true,
                      .m_beta = beta1,
                      .seen1 = 1 - pow(beta1, (double)step),
                      .seen2 = 1 - pow(beta2, (double)step)};
    case MZ_RULE_LION:
        return (rule){.beta1 = 0.9F, .whole = true, .sign = true, .m_beta = 0.99F};
    case MZ_RULE_MUON:
        return (rule){.plain_sum = true, .m_beta = 0.95F};
    default:
        return (rule){.m_beta = 0.9F}; /* SkewAdam, where it has a momentum */
    }
}

mz_code verify_update_create(const mz_replay_job *job, mz_arena *arena, verify_update *u,
                             mz_err *err) {
    int64_t part[MZ_UPDATE_STATES];
    const int64_t rows = 2 * job->intermediate, cols = job->hidden;
    *u = (verify_update){.job = job, .values = 3 * job->hidden * job->intermediate};
    mz_update_parts(job->optimizer, job->type, rows, cols, part);
    bool all = true;
    for (int k = 0; k < VERIFY_STATES; k++)
        if (part[k] == rows * cols)
            all = (u->state[k] = MZ_NEW(arena, float, u->values)) && all;
    if (all && !verify_update_looks(u))
        return MZ_OK;
    u->weight = MZ_NEW(arena, float, u->values);
    u->after = MZ_NEW(arena, float, u->values);
    u->wanted = MZ_NEW(arena, double, u->values);
    u->allowed = MZ_NEW(arena, double, u->values);
    return all && u->weight && u->after && u->wanted && u->allowed
               ? MZ_OK
               : mz_fail_nomem(err, "the verification of an update");
}

bool mz_verify_sees_updates(const mz_optimizer *optimizer, mz_dtype type, int64_t hidden,
                            int64_t intermediate) {
    int64_t part[MZ_UPDATE_STATES];
    const int64_t rows = 2 * intermediate;
    mz_update_parts(optimizer, type, rows, hidden, part);
    return part[VERIFY_M] == rows * hidden || part[VERIFY_V] == rows * hidden;
}

bool verify_update_looks(const verify_update *u) {
    return u->state[VERIFY_MASTER] || u->state[VERIFY_M] || u->state[VERIFY_V];
}

mz_code verify_update_begin(verify_update *u, mz_experts *experts, int32_t layer, int32_t expert,
                            const float *weight, mz_err *err) {
    mz_code code = MZ_OK;
    memcpy(u->weight, weight, sizeof *weight * (size_t)u->values);
    for (int k = 0; code == MZ_OK && k < VERIFY_STATES; k++)
        if (u->state[k])
            code = mz_experts_read_state(experts, layer, expert, k, u->state[k], err);
    return code;
}

/* ---- the formulas ------------------------------------------------------------------------------
 */

static void want_m(verify_update *u, const rule *r, const float *g) {
    for (int64_t i = 0; i < u->values; i++) {
        const double old = (double)r->m_beta * u->state[VERIFY_M][i];
        const double more = (r->plain_sum ? 1 : 1 - (double)r->m_beta) * g[i];
        u->wanted[i] = old + more;
        u->allowed[i] = 0x1p-20 * (fabs(old) + fabs(more));
    }
}

static void want_v(verify_update *u, const rule *r, const float *g) {
    for (int64_t i = 0; i < u->values; i++) {
        u->wanted[i] = (double)r->beta2 * u->state[VERIFY_V][i] +
                       (1 - (double)r->beta2) * ((double)g[i] * g[i]);
        u->allowed[i] = 0x1p-20 * u->wanted[i];
    }
}

/* By how much a value moves at a rate of 1. *doubt: by how much that may be off. */
static double direction(const verify_update *u, const rule *r, double g, int64_t i, double *doubt) {
    const double old = (double)r->beta1 * u->state[VERIFY_M][i], more = (1 - (double)r->beta1) * g;
    const double m = old + more, size = fabs(old) + fabs(more);
    if (r->sign) {
        *doubt = fabs(m) <= 0x1p-20 * size ? 2 : 0;
        return (m > 0) - (m < 0);
    }
    const double v = (double)r->beta2 * u->state[VERIFY_V][i] + (1 - (double)r->beta2) * g * g;
    const double root = sqrt(v / r->seen2) + (double)r->eps;
    *doubt = 0x1p-12 * size / r->seen1 / root;
    return m / r->seen1 / root;
}

static void want_weights(verify_update *u, const rule *r, const float *before, const float *g) {
    const double keep = 1 - (double)rate * (double)r->decay;
    for (int64_t i = 0; i < u->values; i++) {
        double doubt;
        const double moves = direction(u, r, g[i], i, &doubt);
        u->wanted[i] = before[i] * keep - (double)rate * moves;
        u->allowed[i] = 0x1p-22 * fabs((double)before[i]) + (double)rate * doubt;
    }
}

/* ---- bf16 weights that are written with random bits --------------------------------------------
 *
 * q is written as q + d, d equally likely anywhere in +-|q| 2^-8, rounded to the nearest. */

/* Distance of neighbours around q. */
static double unit_of(double q) {
    int exponent;
    frexp(q, &exponent);
    return ldexp(1, exponent - 8);
}

/* Mean and variance of what is written for q. */
static void written(double q, double *mean, double *variance) {
    const double half = fabs(q) * 0x1p-8, unit = unit_of(q);
    const double first = rint((q - half) / unit) * unit;
    double sum = 0, square = 0;
    *mean = q;
    *variance = 0;
    if (half <= 0)
        return;
    for (double at = first; at - unit / 2 < q + half; at += unit) {
        const double low = fmax(at - unit / 2, q - half), high = fmin(at + unit / 2, q + half);
        const double chance = high > low ? (high - low) / (2 * half) : 0;
        sum += chance * (at - q);
        square += chance * (at - q) * (at - q);
    }
    *mean = q + sum;
    *variance = square - sum * sum;
}

/* Errors over all values along the update, in standard deviations over six. Around powers of two
 * neighbours are not equally far apart: these are left out. */
static double mean_error(const verify_update *u) {
    double sum = 0, variance = 0;
    for (int64_t i = 0; i < u->values; i++) {
        const double q = u->wanted[i], unit = unit_of(q), moves = q - u->weight[i];
        double mean, own;
        if (q == 0 || unit_of(fabs(q) + unit) != unit || unit_of(fabs(q) - unit) != unit)
            continue;
        written(q, &mean, &own);
        const double weight = fmax(-1, fmin(1, moves / unit)) / unit;
        sum += weight * (u->after[i] - mean);
        variance += weight * weight * own;
    }
    return variance > 0 ? fabs(sum) / sqrt(variance) / 6 : 0;
}

/* ---- comparing ----------------------------------------------------------------------------------
 */

static void compare(const verify_update *u, const char *what, verify_difference *found,
                    int64_t *compared) {
    for (int64_t i = 0; i < u->values && !found->what; i++) {
        const double ratio = fabs(u->after[i] - u->wanted[i]) / (u->allowed[i] + 1e-37);
        const double error = isnan(ratio) ? INFINITY : ratio;
        if (error > 1)
            *found = (verify_difference){what, i, u->after[i], u->wanted[i], error};
        else
            found->error = error > found->error ? error : found->error;
        (*compared)++;
    }
}

/* The state's part k after the step. */
static mz_code check_state(verify_update *u, mz_experts *experts, int32_t layer, int32_t expert,
                           int k, const float *gradient, int64_t step, bool own,
                           verify_difference *found, int64_t *compared, mz_err *err) {
    static const char *const name[] = {"master weight", "first moment", "second moment"};
    const rule r = rule_of(u->job->optimizer, step);
    if (!u->state[k])
        return MZ_OK;
    const mz_code code = mz_experts_read_state(experts, layer, expert, k, u->after, err);
    if (code != MZ_OK || !own || (k == VERIFY_MASTER && !r.whole))
        return code;
    if (k == VERIFY_MASTER)
        want_weights(u, &r, u->state[k], gradient);
    else if (k == VERIFY_M)
        want_m(u, &r, gradient);
    else
        want_v(u, &r, gradient);
    compare(u, name[k], found, compared);
    return code;
}

/* Weights are the master weights, rounded, which `after` still holds. */
static void want_rounded(verify_update *u) {
    for (int64_t i = 0; i < u->values; i++) {
        u->wanted[i] = mz_data_round(u->job->type, u->after[i]);
        u->allowed[i] = 0;
    }
}

static void want_written(verify_update *u, const rule *r, const float *gradient) {
    want_weights(u, r, u->weight, gradient);
    if (mz_update_is_dithered(u->job->optimizer, u->job->type))
        for (int64_t i = 0; i < u->values; i++)
            u->allowed[i] += 0x1.04p-7 * fabs(u->wanted[i]);
}

mz_code verify_update_end(verify_update *u, mz_experts *experts, int32_t layer, int32_t expert,
                          const float *gradient, int64_t step, bool own, verify_difference *found,
                          int64_t *compared, mz_err *err) {
    const rule r = rule_of(u->job->optimizer, step);
    mz_code code = MZ_OK;
    *found = (verify_difference){.place = -1};
    *compared = 0;
    /* The master weights last: `after` then still has them. */
    for (int k = VERIFY_STATES - 1; code == MZ_OK && k >= 0; k--)
        code = check_state(u, experts, layer, expert, k, gradient, step, own, found, compared, err);
    if (code == MZ_OK && own && u->state[VERIFY_MASTER])
        want_rounded(u);
    else if (code == MZ_OK && own && r.whole)
        want_written(u, &r, gradient);
    if (code == MZ_OK)
        code = mz_experts_read(experts, layer, expert, false, u->after, err);
    if (code != MZ_OK || !own || !(u->state[VERIFY_MASTER] || r.whole))
        return code;
    compare(u, "weight", found, compared);
    if (found->what || u->state[VERIFY_MASTER] ||
        !mz_update_is_dithered(u->job->optimizer, u->job->type))
        return code;
    const double error = mean_error(u);
    if (error > 1)
        *found = (verify_difference){"weights' mean error", -1, 6 * error, 0, error};
    return code;
}
