/* What samples say of the seconds of any size (sim/cluster/measured.h). */
#include "sim/cluster/measured.h"

#include <math.h>

int32_t mz_fit_features(mz_work work, const double size[MZ_FIT_SIZES],
                        double feature[MZ_FIT_TERMS]) {
    feature[0] = 1;
    if (mz_work_is_product(work)) {
        const double m = size[0], n = size[1], k = size[2];
        feature[1] = n * k;
        feature[2] = m * (n + k);
        feature[3] = m * n * k;
        return 4;
    }
    feature[1] = size[0];
    feature[2] = size[2];
    return 3;
}

static double fitted(const mz_fit *fit, mz_work work, const double *size) {
    double feature[MZ_FIT_TERMS], sum = 0;
    const int32_t terms = mz_fit_features(work, size, feature);
    for (int32_t i = 0; i < terms; i++)
        sum += fit->term[i] * feature[i];
    return sum;
}

static double distance2(const double *one, const double *other) {
    double sum = 0;
    for (int k = 0; k < MZ_FIT_SIZES; k++)
        sum += (one[k] - other[k]) * (one[k] - other[k]);
    return sum;
}

/* `without`: a sample that is left out, -1: none. */
static double interpolated(const mz_fit *fit, const double *place, int32_t without) {
    double weights = 0, sum = 0;
    for (int32_t i = 0; i < fit->samples; i++) {
        const mz_fit_sample *s = &fit->sample[i];
        const double d2 = distance2(place, s->place);
        if (i == without)
            continue;
        if (d2 < 1e-12)
            return s->ratio;
        const double weight = 1 / (d2 * d2);
        weights += weight;
        sum += weight * s->ratio;
    }
    return sum / weights;
}

enum { UNKNOWNS = MZ_FIT_SIZES + 1 };

/* Weighted least squares: the level here and a slope for every size. */
typedef struct normal_equations {
    double a[UNKNOWNS][UNKNOWNS], b[UNKNOWNS];
} normal_equations;

static void add_sample(normal_equations *e, const mz_fit_sample *s, const double *place) {
    double x[UNKNOWNS] = {1}, d2 = 0;
    for (int k = 0; k < MZ_FIT_SIZES; k++) {
        x[k + 1] = s->place[k] - place[k];
        d2 += x[k + 1] * x[k + 1];
    }
    const double near = 1 / (1 + d2), weight = near * near;
    for (int i = 0; i < UNKNOWNS; i++) {
        for (int j = 0; j <= i; j++)
            e->a[i][j] += weight * x[i] * x[j];
        e->b[i] += weight * x[i] * s->log_ratio;
    }
}

/* The level, by elimination from the last unknown up. Sizes of samples need not differ in every
 * direction: slopes that nothing tells of are held at none. */
static double level_of(normal_equations *e) {
    static const double held = 1e-3;
    const double weights = e->a[0][0];
    for (int i = UNKNOWNS - 1; i > 0; i--) {
        e->a[i][i] += held * weights;
        for (int row = 0; row < i; row++) {
            const double factor = e->a[i][row] / e->a[i][i];
            for (int j = 0; j <= row; j++)
                e->a[row][j] -= factor * e->a[i][j];
            e->b[row] -= factor * e->b[i];
        }
    }
    return e->b[0] / e->a[0][0];
}

/* Far outside a slope leads anywhere: as at the border of the sizes, within the ratios of all. */
static double smoothed(const mz_fit *fit, const double *place, int32_t without) {
    normal_equations e = {0};
    double within[MZ_FIT_SIZES], least = INFINITY, most = -INFINITY;
    for (int k = 0; k < MZ_FIT_SIZES; k++)
        within[k] = fmin(fmax(place[k], fit->least[k]), fit->most[k]);
    for (int32_t i = 0; i < fit->samples; i++) {
        const mz_fit_sample *s = &fit->sample[i];
        if (i == without)
            continue;
        add_sample(&e, s, within);
        least = fmin(least, s->log_ratio);
        most = fmax(most, s->log_ratio);
    }
    return exp(fmin(fmax(level_of(&e), least), most));
}

/* How far every sample's logarithm is from what the others say of it. */
static double error2(const mz_fit *fit, double (*told)(const mz_fit *, const double *, int32_t)) {
    double sum = 0;
    for (int32_t i = 0; i < fit->samples; i++) {
        const mz_fit_sample *s = &fit->sample[i];
        const double off = log(told(fit, s->place, i)) - s->log_ratio;
        sum += off * off;
    }
    return sum;
}

static void place_samples(mz_fit *fit, mz_work work) {
    for (int k = 0; k < MZ_FIT_SIZES; k++) {
        fit->least[k] = INFINITY;
        fit->most[k] = 0;
    }
    for (int32_t i = 0; i < fit->samples; i++) {
        mz_fit_sample *s = &fit->sample[i];
        const double model = fitted(fit, work, s->size);
        for (int k = 0; k < MZ_FIT_SIZES; k++) {
            s->place[k] = log1p(s->size[k]);
            fit->least[k] = fmin(fit->least[k], s->place[k]);
            fit->most[k] = fmax(fit->most[k], s->place[k]);
        }
        s->ratio = model > 0 && s->seconds > 0 ? s->seconds / model : 1;
        s->log_ratio = log(s->ratio);
    }
}

/* Of two ways that tell as well the one that averages. */
void mz_fit_finish(mz_fit *fit, mz_work work) {
    static const double as_well = 1.05 * 1.05;
    place_samples(fit, work);
    fit->smooth = fit->samples >= MZ_FIT_SMOOTHED_LEAST &&
                  error2(fit, smoothed) <= as_well * error2(fit, interpolated);
}

double mz_fit_seconds(const mz_fit *fit, mz_work work, const double size[MZ_FIT_SIZES]) {
    double place[MZ_FIT_SIZES];
    for (int k = 0; k < MZ_FIT_SIZES; k++)
        place[k] = log1p(size[k]);
    return fitted(fit, work, size) * (fit->smooth ? smoothed : interpolated)(fit, place, -1);
}
