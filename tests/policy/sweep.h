/* The loads of the slot sweep of balancing-systems.md 9.6: 32 ranks on 4 nodes, 640 experts, 32768
 * independent draws per rank. Popularity of the expert of place p is (p+1)^-exponent on the first 8
 * ranks and half of that plus half uniform on the others. The sweep's own load has exponent 1.5;
 * policies that plan on history get one with 1.3.
 *
 * The sweep's mains lie on rank p mod 32, this program's in blocks. SWEEP_MODULO numbers experts so
 * that the block layout gives place p to rank p mod 32; SWEEP_PLACE keeps id = place, for rules
 * that group experts by id and keep no mains. */
#ifndef MIZAN_TESTS_POLICY_SWEEP_H
#define MIZAN_TESTS_POLICY_SWEEP_H

#include "fixture.h"

#include <math.h>

enum {
    SWEEP_RANKS = 32,
    SWEEP_EXPERTS = 640,
    SWEEP_NODE = 8, /* ranks per node */
    SWEEP_DRAWS = 32768,
    SWEEP_TOKEN_BYTES = 14336,
    SWEEP_WEIGHT_BYTES = 44000000,
    SWEEP_LINK_RATIO = 8 /* a byte between nodes costs as much as so many inside one */
};

typedef enum sweep_ids { SWEEP_PLACE, SWEEP_MODULO } sweep_ids;

static inline int32_t sweep_id(sweep_ids ids, int32_t place) {
    return ids == SWEEP_PLACE
               ? place
               : place % SWEEP_RANKS * (SWEEP_EXPERTS / SWEEP_RANKS) + place / SWEEP_RANKS;
}

/* sum[p+1] - sum[p] is the popularity of place p on the ranks of one kind. */
static inline void sweep_popularity(double exponent, bool skewed, double *sum) {
    double all = 0;
    for (int32_t p = 0; p < SWEEP_EXPERTS; p++)
        all += pow(p + 1, -exponent);
    sum[0] = 0;
    for (int32_t p = 0; p < SWEEP_EXPERTS; p++) {
        const double share = pow(p + 1, -exponent) / all;
        sum[p + 1] = sum[p] + (skewed ? share : 0.5 * share + 0.5 / SWEEP_EXPERTS);
    }
}

static inline mz_load *sweep_load(double exponent, sweep_ids ids, uint64_t seed) {
    static double sum[SWEEP_EXPERTS + 1];
    mz_load *load = load_new(SWEEP_RANKS, SWEEP_EXPERTS);
    mz_rng rng = mz_rng_make(seed, 0);
    for (int32_t s = 0; s < SWEEP_RANKS; s++) {
        sweep_popularity(exponent, s < SWEEP_NODE, sum);
        for (int32_t draw = 0; draw < SWEEP_DRAWS; draw++) {
            const double u = mz_rng_uniform(&rng) * sum[SWEEP_EXPERTS];
            int32_t a = 0, b = SWEEP_EXPERTS;
            while (b - a > 1)
                *(sum[(a + b) / 2] <= u ? &a : &b) = (a + b) / 2;
            load->count[(int64_t)s * SWEEP_EXPERTS + sweep_id(ids, a)]++;
        }
    }
    mz_load_sum(load);
    return load;
}

/* Rows of the busiest rank over the mean. */
static inline double sweep_imbalance(const mz_plan *plan, const mz_load *load) {
    return (double)plan->peak_forward * SWEEP_RANKS / (double)load->pairs;
}

#endif
