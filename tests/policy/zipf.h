/* The loads of UltraEP's micro-benchmark (balancing-systems.md 8.8): 64 ranks, top-8, 8,192 tokens
 * a rank (every fourth is drawn and counts four times). Popularity of the main number l of rank r
 * is (r+1)^-a * (l+1)^-4, with the a that gives the ranks the wanted max/mean. */
#ifndef MIZAN_TESTS_POLICY_ZIPF_H
#define MIZAN_TESTS_POLICY_ZIPF_H

#include "fixture.h"

#include <math.h>

enum { ZIPF_RANKS = 64, ZIPF_TOP_K = 8, ZIPF_TOKENS = 8192 };

static inline void zipf_weights(double a, int32_t experts, double *w) {
    int32_t mains = experts / ZIPF_RANKS;
    for (int32_t r = 0; r < ZIPF_RANKS; r++)
        for (int32_t l = 0; l < mains; l++)
            w[r * mains + l] = pow(r + 1, -a) * (mains > 1 ? pow(l + 1, -4) : 1);
}

/* max/mean over ranks of the sums of inclusion probabilities 1 - exp(-t w), with sum k. */
static inline double zipf_predicted(const double *w, int32_t experts) {
    double low = 0, high = 1;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < 200; i++) {
            double t = pass == 0 ? high : 0.5 * (low + high), sum = 0;
            for (int32_t e = 0; e < experts; e++)
                sum += 1 - exp(-t * w[e]);
            if (pass == 0 && sum >= ZIPF_TOP_K)
                break;
            if (pass == 0)
                high *= 2;
            else if (sum < ZIPF_TOP_K)
                low = t;
            else
                high = t;
        }
    double most = 0;
    for (int32_t r = 0; r < ZIPF_RANKS; r++) {
        double sum = 0;
        for (int32_t e = r * (experts / ZIPF_RANKS); e < (r + 1) * (experts / ZIPF_RANKS); e++)
            sum += 1 - exp(-high * w[e]);
        most = sum > most ? sum : most;
    }
    return most / (ZIPF_TOP_K / (double)ZIPF_RANKS);
}

/* Draws of k experts without replacement: rejected repetitions are exactly that. */
static inline mz_load *zipf_load(int32_t experts, double imbalance, uint64_t seed) {
    double *w = calloc((size_t)experts, sizeof *w), *sum = calloc((size_t)experts + 1, sizeof *sum);
    double low = 0, high = 8;
    for (int i = 0; i < 60; i++) {
        double a = 0.5 * (low + high);
        zipf_weights(a, experts, w);
        *(zipf_predicted(w, experts) < imbalance ? &low : &high) = a;
    }
    for (int32_t e = 0; e < experts; e++)
        sum[e + 1] = sum[e] + w[e];
    mz_load *load = load_new(ZIPF_RANKS, experts);
    mz_rng rng = mz_rng_make(seed, 0);
    for (int32_t s = 0; s < ZIPF_RANKS; s++)
        for (int32_t t = 0; t < ZIPF_TOKENS / 4; t++) {
            int32_t chosen[ZIPF_TOP_K], n = 0;
            while (n < ZIPF_TOP_K) {
                double u = mz_rng_uniform(&rng) * sum[experts];
                int32_t a = 0, b = experts;
                while (b - a > 1)
                    *(sum[(a + b) / 2] <= u ? &a : &b) = (a + b) / 2;
                bool again = false;
                for (int32_t i = 0; i < n; i++)
                    again = again || chosen[i] == a;
                if (!again)
                    chosen[n++] = a;
            }
            for (int32_t i = 0; i < ZIPF_TOP_K; i++)
                load->count[(int64_t)s * experts + chosen[i]] += 4; /* a quarter of the draws */
        }
    mz_load_sum(load);
    free(w);
    free(sum);
    return load;
}

/* Rows of the busiest rank over the mean. */
static inline double zipf_imbalance(const mz_plan *plan, const mz_load *load) {
    return (double)plan->peak_forward * ZIPF_RANKS / (double)load->pairs;
}

#endif
