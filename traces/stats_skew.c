/* Skew of the loads of a layer: definitions in stats.h. */
#include "traces/stats_private.h"

/* Minus the slope of the least-squares line of log load on log rank; the total moves the line, not
 * its slope. sorted: ascending. */
static double zipf_exponent(const int64_t *sorted, int32_t experts) {
    double x_mean = 0, y_mean = 0, xx = 0, xy = 0;
    int32_t n = 0;
    for (; n < experts * 3 / 4 && sorted[experts - 1 - n] > 0; n++) {
        double x = log(n + 1.0), y = log((double)sorted[experts - 1 - n]), away = x - x_mean;
        x_mean += away / (n + 1);
        y_mean += (y - y_mean) / (n + 1);
        xx += away * (x - x_mean);
        xy += away * (y - y_mean);
    }
    return n < 2 ? (double)NAN : (0 - xy) / xx; /* level loads: 0, not -0 */
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
    double imbalance = mz_block_imbalance(total, experts, ranks);
    metric[MZ_SKEW_MAX_OVER_MEAN] = spread.max_over_mean;
    metric[MZ_SKEW_MAXVIO] = spread.max_over_mean - 1;
    metric[MZ_SKEW_BALANCEDNESS] = 1 / spread.max_over_mean;
    metric[MZ_SKEW_TOP1] = spread.top1_share;
    metric[MZ_SKEW_CV] = spread.cv;
    metric[MZ_SKEW_GINI] = spread.gini;
    metric[MZ_SKEW_ENTROPY] = spread.entropy;
    metric[MZ_SKEW_COLD] = spread.cold;
    metric[MZ_SKEW_RANKS] = imbalance;
    metric[MZ_SKEW_RANK_BALANCEDNESS] = 1 / imbalance;
    metric[MZ_SKEW_SIGMA] = log_sigma(scratch, experts);
    metric[MZ_SKEW_ZIPF] = zipf_exponent(scratch, experts);
}
