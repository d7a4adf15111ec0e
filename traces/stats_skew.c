/* Skew of the loads of a layer: definitions in stats.h. */
#include "traces/stats_private.h"

#include <gsl/gsl_fit.h>
#include <stdlib.h>

/* sorted: ascending, with sum > 0. x, y: room for `experts` values each. */
static double zipf_exponent(const int64_t *sorted, int32_t experts, double sum, double *x,
                            double *y) {
    double c0, c1, cov00, cov01, cov11, sumsq;
    size_t n = 0;
    for (int32_t i = 0; i < experts * 3 / 4; i++) {
        int64_t load = sorted[experts - 1 - i];
        if (load <= 0)
            break;
        x[n] = log(i + 1.0);
        y[n++] = log((double)load / sum);
    }
    if (n < 2)
        return NAN;
    gsl_fit_linear(x, 1, y, 1, n, &c0, &c1, &cov00, &cov01, &cov11, &sumsq);
    return -c1;
}

static double log_sigma(const int64_t *sorted, int32_t experts) {
    double mean = 0, squares = 0;
    int32_t used = 0;
    for (int32_t e = 0; e < experts; e++)
        if (sorted[e] > 0) {
            double value = log((double)sorted[e]), before = mean;
            mean += (value - mean) / ++used;
            squares += (value - before) * (value - mean);
        }
    return used ? sqrt(squares / used) : NAN;
}

void mz_stats_skew(const int64_t *total, int32_t experts, int32_t ranks, int64_t *scratch,
                   double *metric) {
    mz_spread spread = mz_spread_of(total, experts, scratch);
    double sum = 0, most = 0;
    metric[MZ_SKEW_MAX_OVER_MEAN] = spread.max_over_mean;
    metric[MZ_SKEW_MAXVIO] = spread.max_over_mean - 1;
    metric[MZ_SKEW_BALANCEDNESS] = 1 / spread.max_over_mean;
    metric[MZ_SKEW_TOP1] = spread.top1_share;
    metric[MZ_SKEW_CV] = spread.cv;
    metric[MZ_SKEW_GINI] = spread.gini;
    metric[MZ_SKEW_ENTROPY] = spread.entropy;
    metric[MZ_SKEW_COLD] = spread.cold;
    for (int32_t e = 0; e < experts; e++)
        sum += (double)total[e];
    if (!(sum > 0))
        return;
    for (int64_t e = 0, r = 0; r < ranks; r++) {
        double load = 0;
        for (; e < experts && e * ranks / experts == r; e++)
            load += (double)total[e];
        most = load > most ? load : most;
    }
    metric[MZ_SKEW_RANKS] = most * ranks / sum;
    metric[MZ_SKEW_RANK_BALANCEDNESS] = sum / (most * ranks);
    metric[MZ_SKEW_SIGMA] = log_sigma(scratch, experts);
    double *line = mz_calloc((size_t)experts * 2, sizeof *line);
    if (line)
        metric[MZ_SKEW_ZIPF] = zipf_exponent(scratch, experts, sum, line, line + experts);
    free(line);
}
