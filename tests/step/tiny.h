/* A machine and a model small enough to compute on paper, and plans made by hand.
 *
 * Every rank is a device of 1e12 FLOP/s and 1e11 B/s, all efficiencies 1; links 1e10 B/s inside a
 * domain and 1e9 B/s outside, latencies 1 and 5 us; a launch 2 us, a synchronisation 10 us. The
 * model has hidden 64, experts of intermediate 32, 4 experts, 2 heads of 32, vocabulary 128. */
#ifndef MIZAN_TESTS_STEP_TINY_H
#define MIZAN_TESTS_STEP_TINY_H

#include "sim/step/step.h"
#include "tests/harness.h"

enum { TINY_RANKS = 16, TINY_EXPERTS = 4, TINY_H = 64, TINY_I = 32, TINY_VOCAB = 128 };

typedef struct tiny {
    mz_model model;
    mz_tensor tensor[64];
    bool is_moe[8], is_sliding[8];
    mz_cluster cluster;
    int32_t domain[TINY_RANKS], device[TINY_RANKS];
    double inside[TINY_RANKS], outside[TINY_RANKS], uplink[TINY_RANKS];
    double link_bytes_per_s[4 * TINY_RANKS], link_latency_s[4 * TINY_RANKS];
    mz_planner_cost planner[1];
    mz_policy_traits traits;
    mz_step_options options;
    /* one call */
    int32_t ep;
    int64_t count[TINY_RANKS * TINY_EXPERTS], total[TINY_EXPERTS], source[TINY_RANKS];
    mz_load load;
    mz_plan *plan;
    int64_t tokens[4 * TINY_RANKS];
} tiny;

/* ranks_per_domain ranks share a domain; layers: 'm' for MoE, 'd' for dense. Options: defaults with
 * every effect off and no optimizer traffic. */
void tiny_make(tiny *t, int32_t ranks, int32_t ranks_per_domain, const char *layers);
/* Loads of one group from count[source][expert] (row-major, ep x 4). */
void tiny_load(tiny *t, const int64_t *count);
/* Block placement: expert e on rank e*ep/4 (of the group), everything forward and backward. */
void tiny_static_plan(tiny *t);
/* Hosts given as (expert, rank) pairs in expert order; pairs[source][instance] in forward, and in
 * backward where `back` is not NULL. */
void tiny_plan(tiny *t, int instances, const int32_t *expert, const int32_t *rank,
               const int64_t *pairs, const int64_t *back);
/* Builds and runs one step in which every layer call of every group has the current plan and each
 * rank holds tokens[micro_batch][rank]. */
void tiny_step(tiny *t, int32_t micro_batches, mz_step **step, mz_step_outcome *outcome);
mz_step_outcome tiny_run(tiny *t, int32_t micro_batches); /* the same, step freed: no pointers */
void tiny_free(tiny *t);
double tiny_gemm(double m, double n, double k); /* seconds */
int tiny_phase(const char *name);

/* Fails, naming both numbers, unless |got - want| <= tolerance. */
#define assert_near(got, want, tolerance)                                                          \
    do {                                                                                           \
        const double got_ = (got), want_ = (want);                                                 \
        if (!(got_ - want_ <= (tolerance) && want_ - got_ <= (tolerance)))                         \
            fail_msg("%s is %.12g, not %.12g", #got, got_, want_);                                 \
    } while (0)
/* The same number up to rounding of sums. */
#define assert_close(got, want)                                                                    \
    assert_near(got, want, 1e-9 * ((want) < 0 ? -(want) : (want)) + 1e-15)

#endif
