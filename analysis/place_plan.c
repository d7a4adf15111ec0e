/* Placements of all layers by one policy, and how far each is from the best there is. */
#include "analysis/place.h"

#include "sim/policy/parts.h"

#include <string.h>

typedef struct planner {
    const mz_policy *policy;
    void *state;
    const mz_policy_traits *traits;
    mz_plan *plan;
    mz_balance *balance;
    int32_t *home;    /* [E] */
    int64_t *scratch; /* [max(E, R)] */
    int32_t bound_slots;
    const volatile sig_atomic_t *stop;
    mz_arena *arena;
    double measured_s;
} planner;

static double ratio(int64_t most, int64_t sum, int32_t ranks) {
    return sum > 0 ? (double)most * ranks / (double)sum : 1;
}

/* What planning costs: decide, and route where it solves too. */
static mz_code run_policy(planner *p, int32_t layer, const mz_load *current, const mz_load *history,
                          mz_err *err) {
    const mz_view view = {.layer = layer,
                          .current = p->traits->sees & MZ_SEES_CURRENT ? current : NULL,
                          .history = p->traits->sees & MZ_SEES_HISTORY ? history : NULL};
    const mz_call call = {.layer = layer, .load = current};
    double started = mz_now();
    mz_code code = p->policy->decide(p->state, &view, p->plan, err);
    p->measured_s += mz_now() - started;
    if (code != MZ_OK)
        return code;
    started = mz_now();
    code = p->policy->route(p->state, &call, p->plan, err);
    if (p->traits->route_plans)
        p->measured_s += mz_now() - started;
    return code == MZ_OK ? mz_plan_check(p->plan, current, p->traits, err) : code;
}

static mz_code keep_plan(planner *p, place_layer *out, mz_err *err) {
    const mz_plan *plan = p->plan;
    const int64_t E = plan->experts, R = plan->ranks, n = plan->begin[E];
    out->begin = MZ_NEW(p->arena, int32_t, E + 1);
    out->rank = MZ_NEW(p->arena, int32_t, n);
    out->pairs = MZ_NEW(p->arena, int64_t, n);
    out->quota = MZ_NEW(p->arena, int64_t, E);
    out->rank_load = MZ_NEW(p->arena, int64_t, R);
    out->rank_used = MZ_NEW(p->arena, int32_t, R);
    if (!out->begin || !out->rank || !out->pairs || !out->quota || !out->rank_load ||
        !out->rank_used)
        return mz_fail_nomem(err, "a placement");
    memcpy(out->begin, plan->begin, sizeof(int32_t) * (size_t)(E + 1));
    memcpy(out->rank, plan->rank, sizeof(int32_t) * (size_t)n);
    memcpy(out->pairs, plan->forward, sizeof(int64_t) * (size_t)n);
    memcpy(out->quota, plan->quota, sizeof(int64_t) * (size_t)E);
    for (int64_t i = 0; i < n; i++) {
        out->rank_load[plan->rank[i]] += plan->forward[i];
        out->rank_used[plan->rank[i]]++;
    }
    out->dropped = plan->dropped_pairs;
    memcpy(out->why, plan->why, sizeof out->why);
    return MZ_OK;
}

/* Busiest rank if every expert stayed at home. rank_load: scratch of R elements. */
static int64_t static_peak(const mz_load *load, const int32_t *home, int32_t ranks,
                           int64_t *rank_load) {
    int64_t most = 0;
    memset(rank_load, 0, sizeof(int64_t) * (size_t)ranks);
    for (int32_t e = 0; e < load->experts; e++) {
        rank_load[home[e]] += load->total[e];
        most = rank_load[home[e]] > most ? rank_load[home[e]] : most;
    }
    return most;
}

static mz_code judge(planner *p, place_layer *out, mz_err *err) {
    const mz_load *load = out->load;
    const int32_t R = p->plan->ranks;
    int64_t most = 0, own = 0;
    for (int32_t r = 0; r < R; r++)
        most = out->rank_load[r] > most ? out->rank_load[r] : most;
    out->imbalance = ratio(most, load->pairs - out->dropped, R);
    out->imbalance_static = ratio(static_peak(load, p->home, R, p->scratch), load->pairs, R);
    out->bound = ratio(mz_bound_any(load, R, p->bound_slots, p->scratch), load->pairs, R);
    mz_code code = mz_bound_hosts(p->balance, p->plan, load, &own, err);
    out->bound_hosts = ratio(own, load->pairs, R);
    return code;
}

static mz_code plan_layers(planner *p, const place_loads *loads, place_result *result,
                           mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t l = 0; code == MZ_OK && l < loads->layers; l++) {
        place_layer *layer = &result->layer[l];
        layer->load = &loads->current[l];
        if (p->stop && *p->stop)
            return mz_fail(err, MZ_EABORTED, "interrupted");
        code = run_policy(p, l, &loads->current[l], &loads->history[l], err);
        if (code == MZ_OK)
            code = keep_plan(p, layer, err);
        if (code == MZ_OK)
            code = judge(p, layer, err);
        if (code != MZ_OK)
            return mz_err_prefix(err, "policy %s, layer %d", result->policy, layer->number);
    }
    return code;
}

mz_code place_plan(const mz_policy *policy, void *state, const mz_policy_traits *traits,
                   const mz_policy_env *env, const place_loads *loads,
                   const volatile sig_atomic_t *stop, mz_arena *arena, place_result *result,
                   mz_err *err) {
    planner p = {.policy = policy,
                 .state = state,
                 .traits = traits,
                 .bound_slots = result->slots,
                 .stop = stop,
                 .arena = arena};
    p.home = MZ_NEW(arena, int32_t, env->experts);
    p.scratch = MZ_NEW(arena, int64_t, env->experts > env->ranks ? env->experts : env->ranks);
    if (!p.home || !p.scratch)
        return mz_fail_nomem(err, "a placement");
    mz_layout_mains(env->ranks, env->experts, p.home);
    mz_code code = mz_plan_create(env->ranks, env->experts, traits->slots, &p.plan, err);
    if (code == MZ_OK)
        code = mz_balance_create(arena, env->ranks, env->experts, p.plan->instance_cap, &p.balance,
                                 err);
    if (code == MZ_OK)
        code = plan_layers(&p, loads, result, err);
    mz_plan_free(&p.plan);
    result->planner_measured_s = p.measured_s;
    return code;
}
