#include "traces/split.h"

#include <math.h>

static double log_factorial(double n) {
    int sign;
    return lgamma_r(n + 1, &sign);
}

static double log_choose(double n, double k) {
    return log_factorial(n) - log_factorial(k) - log_factorial(n - k);
}

/* Inversion outwards from the mode: expected work is a few standard deviations. */
int64_t mz_hypergeometric(mz_rng *rng, int64_t good, int64_t total, int64_t draws) {
    int64_t bad = total - good;
    int64_t low = draws > bad ? draws - bad : 0, high = draws < good ? draws : good;
    if (low >= high)
        return low;
    double g = (double)good, b = (double)bad, n = (double)draws;
    int64_t mode = (int64_t)floor((n + 1) * (g + 1) / (g + b + 2));
    mode = mode < low ? low : mode > high ? high : mode;
    double m = (double)mode;
    double up = exp(log_choose(g, m) + log_choose(b, n - m) - log_choose(g + b, n)), down = up;
    double u = mz_rng_uniform(rng) - up;
    int64_t above = mode, below = mode;
    while (u >= 0 && (above < high || below > low)) {
        if (above < high) {
            double x = (double)above++;
            up *= (g - x) * (n - x) / ((x + 1) * (b - n + x + 1));
            u -= up;
            if (u < 0)
                return above;
        }
        if (below > low) {
            double x = (double)below--;
            down *= x * (b - n + x) / ((g - x + 1) * (n - x + 1));
            u -= down;
            if (u < 0)
                return below;
        }
        if (up < 1e-300 && down < 1e-300)
            break; /* rounding left a speck of probability: the mode gets it */
    }
    return mode;
}

void mz_split_counts(mz_rng *rng, int64_t *urn, int32_t n, int64_t total, int64_t draws,
                     int64_t *part) {
    for (int32_t e = 0; e < n && draws > 0; e++) {
        int64_t taken = mz_hypergeometric(rng, urn[e], total, draws);
        total -= urn[e];
        draws -= taken;
        urn[e] -= taken;
        part[e] += taken;
    }
}
