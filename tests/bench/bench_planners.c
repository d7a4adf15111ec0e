/* Planning time of every policy: decide (hosts, quotas, totals per host) and route (the sparse
 * expansion to sources), per layer call, on one core.
 *
 *   bench_planners [POLICY]   table on stdout, or only the rows of texts that hold POLICY
 *
 * Times are CPU time of the thread, so that other work on the machine does not count; reading that
 * clock takes some 0.2 us itself.
 * The load is a Zipf-like one over experts with noise over sources; lrmoe keeps half. A last line
 * measures the selection of lrmoe on 2 million recorded pairs. */
#include "common/base/rng.h"
#include "sim/policy/policy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int make_load(int32_t ranks, int32_t experts, int64_t pairs_per_rank, mz_load *load) {
    *load = (mz_load){.sources = ranks, .experts = experts};
    load->count = mz_calloc((size_t)ranks * (size_t)experts, sizeof(int64_t));
    load->total = mz_calloc((size_t)experts, sizeof(int64_t));
    load->source = mz_calloc((size_t)ranks, sizeof(int64_t));
    if (!load->count || !load->total || !load->source)
        return 0;
    mz_rng rng = mz_rng_make(1, 2);
    for (int32_t e = 0; e < experts; e++) {
        int32_t place = (int32_t)((int64_t)e * 7919 % experts); /* hot experts spread over ranks */
        double share = pow(1 + place, -0.6);
        for (int32_t s = 0; s < ranks; s++)
            load->count[(int64_t)s * experts + e] =
                (int64_t)(share * (0.8 + 0.4 * mz_rng_uniform(&rng)) * (double)pairs_per_rank *
                          0.4 / pow(experts, 0.4));
    }
    mz_load_sum(load);
    return 1;
}

typedef struct subject {
    mz_arena arena;
    const mz_policy *policy;
    void *options, *state;
    mz_policy_traits traits;
    mz_plan *plan;
} subject;

static mz_code open_subject(subject *x, const char *text, const mz_policy_env *env, mz_err *err) {
    *x = (subject){0};
    mz_code code = mz_policy_parse(text, &x->arena, &x->policy, &x->options, err);
    if (code == MZ_OK)
        code = x->policy->init(env, x->options, &x->arena, &x->state, &x->traits, err);
    return code == MZ_OK ? mz_plan_create(env->ranks, env->experts, x->traits.slots, &x->plan, err)
                         : code;
}

static void close_subject(subject *x) {
    mz_plan_free(&x->plan);
    mz_arena_free(&x->arena);
}

static int by_time(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Medians over the calls of about 0.15 s, at least 5: other work on the machine stretches few
 * calls. */
static mz_code measure(subject *x, const mz_load *load, const mz_pairs *pairs, double *decide_us,
                       double *route_us, mz_err *err) {
    enum { MOST = 4000 };
    static double decide[MOST], route[MOST];
    mz_view view = {.current = load, .history = load};
    mz_call call = {.load = load, .pairs = pairs};
    double start = now_us();
    int calls = 0;
    while (calls < 5 || (calls < MOST && now_us() - start < 150000)) {
        double t0 = now_us();
        mz_code code = x->policy->decide(x->state, &view, x->plan, err);
        double t1 = now_us();
        if (code == MZ_OK)
            code = x->policy->route(x->state, &call, x->plan, err);
        if (code != MZ_OK)
            return code;
        decide[calls] = t1 - t0;
        route[calls++] = now_us() - t1;
    }
    qsort(decide, (size_t)calls, sizeof *decide, by_time);
    qsort(route, (size_t)calls, sizeof *route, by_time);
    *decide_us = decide[calls / 2];
    *route_us = route[calls / 2];
    return mz_plan_check(x->plan, load, &x->traits, err);
}

/* One line: decide and route of a policy at a size. */
static mz_code bench_policy(const char *text, const mz_policy_env *env, const mz_load *load,
                            mz_err *err) {
    subject x;
    double decide, route;
    mz_code code = open_subject(&x, text, env, err);
    if (code == MZ_OK)
        code = measure(&x, load, NULL, &decide, &route, err);
    if (code == MZ_OK)
        printf("%-28s %6d %8d %12.1f %12.1f%s\n", text, env->ranks, env->experts, decide, route,
               x.traits.route_plans ? "  (plans in route)" : "");
    fflush(stdout);
    close_subject(&x);
    return code == MZ_OK ? MZ_OK : mz_err_prefix(err, "%s", text);
}

/* Every policy of the table as it is by default, and options that plan otherwise. */
static mz_code bench_size(int32_t ranks, int32_t experts, int32_t domain_size, const char *only,
                          mz_err *err) {
    static const char *const variants[] = {"lrmoe[keep=0.5]", "lrmoe[keep=0.5,quota=value]",
                                           "lrmoe[rows=20000]"};
    enum { VARIANTS = sizeof variants / sizeof *variants };
    mz_load load;
    int32_t *domain = mz_calloc((size_t)ranks, sizeof *domain);
    if (!domain || !make_load(ranks, experts, 65536, &load))
        return mz_fail_nomem(err, "a load");
    for (int32_t r = 0; r < ranks; r++)
        domain[r] = r / domain_size;
    mz_policy_env env = {.ranks = ranks,
                         .experts = experts,
                         .top_k = 8,
                         .layers = 1,
                         .domain = domain,
                         .domains = (ranks - 1) / domain_size + 1,
                         .hidden = 7168,
                         .intermediate = 2048,
                         .expert_parameters = 44040192,
                         .weight_bytes = 88080384,
                         .token_bytes = 14336,
                         .expert_groups = 8,
                         .expert_state_bytes = 528482304,
                         .pair_seconds = 1.27e-7,
                         .inside_bytes_s = 351e9,
                         .outside_bytes_s = 44.5e9};
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && mz_policies[i]; i++)
        if (strstr(mz_policies[i]->name, only))
            code = bench_policy(mz_policies[i]->name, &env, &load, err);
    for (int i = 0; code == MZ_OK && i < VARIANTS; i++)
        if (strstr(variants[i], only))
            code = bench_policy(variants[i], &env, &load, err);
    free(load.count);
    free(load.total);
    free(load.source);
    free(domain);
    return code;
}

/* 2 M pairs (64 ranks, 4,096 tokens each, top-8 of 128 experts), half kept. */
static mz_code bench_selection(const char *text, mz_err *err) {
    enum { R = 64, E = 128, K = 8, T = 4096 };
    int64_t n = (int64_t)R * T * K;
    uint16_t *expert = mz_calloc((size_t)n, sizeof *expert);
    float *weight = mz_calloc((size_t)n, sizeof *weight);
    int64_t token_begin[R + 1], pair_begin[R + 1];
    mz_load load;
    if (!expert || !weight || !make_load(R, E, 1, &load))
        return mz_fail_nomem(err, "pairs");
    memset(load.count, 0, sizeof(int64_t) * R * E);
    mz_rng rng = mz_rng_make(5, 5);
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = mz_rng_u32(&rng);
        expert[i] = (uint16_t)((word >> 9) % E * (word % 512) / 512);
        weight[i] = (float)mz_rng_uniform(&rng);
        load.count[i / (T * K) * E + expert[i]]++;
    }
    mz_load_sum(&load);
    for (int s = 0; s <= R; s++) {
        token_begin[s] = (int64_t)s * T;
        pair_begin[s] = (int64_t)s * T * K;
    }
    mz_pairs pairs = {.sources = R,
                      .top_k = K,
                      .tokens = (int64_t)R * T,
                      .pairs = n,
                      .token_begin = token_begin,
                      .pair_begin = pair_begin,
                      .expert = expert,
                      .weight = weight};
    mz_policy_env env = {.ranks = R,
                         .experts = E,
                         .top_k = K,
                         .layers = 1,
                         .domains = 1,
                         .hidden = 2048,
                         .intermediate = 768,
                         .weight_bytes = 9437184,
                         .token_bytes = 4096};
    subject x;
    double decide, route;
    mz_code code = open_subject(&x, text, &env, err);
    if (code == MZ_OK)
        code = measure(&x, &load, &pairs, &decide, &route, err);
    if (code == MZ_OK)
        printf("%-44s 2.1 M pairs: %.1f ms a call, %.1f ns a pair\n", text, route / 1e3,
               route * 1e3 / (double)n);
    close_subject(&x);
    free(expert);
    free(weight);
    free(load.count);
    free(load.total);
    free(load.source);
    return code;
}

int main(int argc, char **argv) {
    const char *only = argc > 1 ? argv[1] : "";
    mz_err err = {0};
    printf("%-28s %6s %8s %12s %12s\n", "policy", "ranks", "experts", "decide us", "route us");
    mz_code code = bench_size(8, 64, 8, only, &err);
    if (code == MZ_OK)
        code = bench_size(64, 256, 64, only, &err);
    if (code == MZ_OK)
        code = bench_size(1024, 384, 1024, only, &err);
    static const char *const selections[] = {"lrmoe[keep=0.5]", "lrmoe[keep=0.5,quota=ratio]",
                                             "lrmoe[keep=0.5,quota=ratio,scope=global]",
                                             "lrmoe[keep=0.5,quota=ratio,score=sample]"};
    for (int i = 0; code == MZ_OK && i < 4; i++)
        if (strstr(selections[i], only))
            code = bench_selection(selections[i], &err);
    if (code != MZ_OK)
        fprintf(stderr, "bench_planners: %s\n", err.msg);
    return mz_exit_code(code);
}
