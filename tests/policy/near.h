/* Routing by domain from nothing but replica counts, for the tests of laer and of flexmoe's port in
 * it: each source evenly over the replicas of its domain, or over all where there are none, rows
 * left over to the lowest ranks. */
#ifndef MIZAN_TESTS_POLICY_NEAR_H
#define MIZAN_TESTS_POLICY_NEAR_H

#include "fixture.h"

typedef struct machine {
    int32_t ranks, experts, slots, domains;
    const int32_t *domain;
    double inside, outside, product; /* seconds per pair */
    bool busiest;
} machine;

/* Rows of (s, e) on rank g; a[e * R + g]: replicas. */
static inline int64_t naive_rows(const machine *m, const int32_t *a, int64_t rows, int32_t s,
                                 int32_t e, int32_t g) {
    int64_t near = 0, all = 0, before = 0;
    for (int32_t i = 0; i < m->ranks; i++) {
        all += a[e * m->ranks + i];
        near += m->domain[i] == m->domain[s] ? a[e * m->ranks + i] : 0;
    }
    const int64_t n = near > 0 ? near : all, w = a[e * m->ranks + g];
    if (near > 0 && m->domain[g] != m->domain[s])
        return 0;
    for (int32_t i = 0; i < g; i++)
        before += near == 0 || m->domain[i] == m->domain[s] ? a[e * m->ranks + i] : 0;
    const int64_t extra = rows % n - before;
    return rows / n * w + (extra < 0 ? 0 : (extra < w ? extra : w));
}

/* Rows of rank g. */
static inline int64_t naive_rank_rows(const machine *m, const mz_load *load, const int32_t *a,
                                      int32_t g) {
    int64_t rows = 0;
    for (int32_t s = 0; s < m->ranks; s++)
        for (int32_t e = 0; e < m->experts; e++)
            rows += naive_rows(m, a, load->count[s * m->experts + e], s, e, g);
    return rows;
}

#endif
