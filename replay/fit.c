#include "replay/calibrate.h"

#include <gsl/gsl_errno.h>
#include <gsl/gsl_multifit.h>

/* Least squares over the terms in `used`, errors relative to the samples. */
static int solve(const mz_fit *fit, mz_work work, const bool *used, int32_t terms, int32_t count,
                 double *term) {
    const size_t samples = (size_t)fit->samples, columns = (size_t)count;
    gsl_error_handler_t *handler = gsl_set_error_handler_off(); /* statuses are looked at */
    gsl_matrix *x = gsl_matrix_alloc(samples, columns);
    gsl_vector *y = gsl_vector_alloc(samples), *c = gsl_vector_alloc(columns);
    gsl_matrix *cov = gsl_matrix_alloc(columns, columns);
    gsl_multifit_linear_workspace *space = gsl_multifit_linear_alloc(samples, columns);
    int status = x && y && c && cov && space ? GSL_SUCCESS : GSL_ENOMEM;
    for (size_t i = 0; status == GSL_SUCCESS && i < samples; i++) {
        double feature[MZ_FIT_TERMS];
        size_t column = 0;
        mz_fit_features(work, fit->sample[i].size, feature);
        for (int32_t t = 0; t < terms; t++)
            if (used[t])
                gsl_matrix_set(x, i, column++, feature[t] / fit->sample[i].seconds);
        gsl_vector_set(y, i, 1);
    }
    double chi = 0;
    if (status == GSL_SUCCESS)
        status = gsl_multifit_linear(x, y, c, cov, &chi, space);
    size_t column = 0;
    for (int32_t t = 0; status == GSL_SUCCESS && t < terms; t++)
        term[t] = used[t] ? gsl_vector_get(c, column++) : 0;
    gsl_multifit_linear_free(space);
    gsl_matrix_free(cov);
    gsl_vector_free(c);
    gsl_vector_free(y);
    gsl_matrix_free(x);
    gsl_set_error_handler(handler);
    return status;
}

/* With fewer samples than terms the mean rate of the last feature is all that can be said. */
static void fit_rate(mz_fit *fit, mz_work work, int32_t terms) {
    double sum = 0, feature[MZ_FIT_TERMS];
    for (int32_t i = 0; i < fit->samples; i++) {
        mz_fit_features(work, fit->sample[i].size, feature);
        sum += feature[terms - 1] > 0 ? fit->sample[i].seconds / feature[terms - 1] : 0;
    }
    for (int32_t t = 0; t < terms; t++)
        fit->term[t] = t == terms - 1 ? sum / fit->samples : 0;
}

/* Of the samples, over their seconds. */
static double mean_feature(const mz_fit *fit, mz_work work, int32_t term) {
    double sum = 0, feature[MZ_FIT_TERMS];
    for (int32_t i = 0; i < fit->samples; i++) {
        mz_fit_features(work, fit->sample[i].size, feature);
        sum += feature[term] / fit->sample[i].seconds;
    }
    return sum / fit->samples;
}

mz_code mz_fit_terms(mz_fit *fit, mz_work work, mz_err *err) {
    double feature[MZ_FIT_TERMS], term[MZ_FIT_TERMS] = {0};
    bool used[MZ_FIT_TERMS] = {true, true, true, true};
    const int32_t terms = mz_fit_features(work, fit->sample[0].size, feature);
    int32_t count = terms;
    if (fit->samples < terms)
        fit_rate(fit, work, terms);
    while (fit->samples >= terms && count > 0) {
        const int status = solve(fit, work, used, terms, count, term);
        if (status == GSL_ENOMEM)
            return mz_fail_nomem(err, "a fit");
        if (status != GSL_SUCCESS)
            return mz_fail(err, MZ_EINTERNAL, "fit of %s: %s", mz_work_name(work),
                           gsl_strerror(status));
        double lowest = 0;
        int32_t worst = -1; /* the term that takes most from the samples */
        for (int32_t t = 0; t < terms; t++) {
            const double share = term[t] * mean_feature(fit, work, t);
            fit->term[t] = used[t] && term[t] > 0 ? term[t] : 0;
            if (used[t] && share < lowest) {
                lowest = share;
                worst = t;
            }
        }
        if (worst < 0)
            break;
        used[worst] = false;
        count--;
    }
    if (count == 0)
        fit_rate(fit, work, terms);
    mz_fit_finish(fit, work);
    return MZ_OK;
}
