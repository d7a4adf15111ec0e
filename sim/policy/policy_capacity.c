/* capacity: static homes, pairs beyond a capacity are dropped (balancing-systems.md 10.2).
 *
 * Source: GShard, Switch; numbers and defaults as DeepSpeed's general top-k gate. Sees the current
 * counts of each rank, as the gate itself does; runs every call at no cost; moves nothing.
 * Capacity C = max(ceil(T k / E * cf), min_cap) rows per (source, expert), T tokens of the source
 * (one gate per rank). Buffers and messages have E*C rows from every source whatever is used
 * (traits.capacity_padded; mz_capacity_rows gives C).
 * Options: cf (1.0), min_cap (4), drop = probs (default: the largest gate weights stay) | position
 * (the first stay) | none (C is the largest count of any (source, expert), nothing is dropped).
 * Which pairs stay decides what is learnt, not what is computed: counts are equal for probs and
 * position. A dropped pair contributes nothing; its token's residual passes.
 * Departures: DeepSpeed asks for equal token counts on all ranks; here each source has its own C.
 * Not modelled: random token selection of top-1, GShard's random second expert. */
#include "sim/policy/parts.h"

#include <string.h>

typedef struct capacity_options {
    double factor;
    int64_t minimum;
    int drop;
} capacity_options;

enum { DROP_PROBS, DROP_POSITION, DROP_NONE };

static const mz_opt capacity_table[] = {
    {"cf", 0, MZ_OPT_REAL, offsetof(capacity_options, factor), "1.0", "X",
     "capacity factor: rows per expert over an even share", 1e-6, 1e6, MZ_UNIT_NONE},
    {"min_cap", 0, MZ_OPT_INT, offsetof(capacity_options, minimum), "4", "ROWS",
     "smallest capacity of an expert per source rank", 0, 1e9, MZ_UNIT_NONE},
    {"drop", 0, MZ_OPT_ENUM, offsetof(capacity_options, drop), "probs", "probs|position|none",
     "which pairs stay: largest gate weights, first ones, or all (capacity = largest count)", 0, 0,
     MZ_UNIT_NONE},
};

typedef struct capacity_state {
    mz_policy_traits traits;
    int32_t *main_rank;
    mz_expand *expand;
} capacity_state;

int64_t mz_capacity_rows(const mz_policy_traits *traits, const mz_load *load, int32_t source) {
    if (traits->capacity_factor > 0) {
        double even = (double)load->source[source] / load->experts * traits->capacity_factor;
        int64_t rows = mz_rows_up(even);
        return rows > traits->capacity_min ? rows : traits->capacity_min;
    }
    int64_t most = traits->capacity_min;
    for (int64_t i = 0; i < (int64_t)load->sources * load->experts; i++)
        most = load->count[i] > most ? load->count[i] : most;
    return most;
}

static mz_code capacity_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                             void **out, mz_policy_traits *traits, mz_err *err) {
    const capacity_options *o = options;
    capacity_state *state = MZ_NEW(arena, capacity_state, 1);
    if (!state || !(state->main_rank = MZ_NEW(arena, int32_t, env->experts)))
        return mz_fail_nomem(err, "the state of a policy");
    mz_layout_mains(env->ranks, env->experts, state->main_rank);
    state->traits = (mz_policy_traits){.interval = 1,
                                       .lossy = o->drop != DROP_NONE,
                                       .slots = mz_mains_per_rank(env->ranks, env->experts),
                                       .capacity_padded = true,
                                       .drop_by_weight = o->drop == DROP_PROBS,
                                       .capacity_factor = o->drop == DROP_NONE ? 0 : o->factor,
                                       .capacity_min = o->minimum,
                                       .score_source = ""};
    *traits = state->traits;
    *out = state;
    return mz_expand_create(arena, env, 1, &state->expand, err);
}

static mz_code capacity_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    mz_plan_mains(plan, ((capacity_state *)self)->main_rank);
    return MZ_OK;
}

static void drop_beyond_capacity(const capacity_state *state, const mz_load *load, mz_plan *plan) {
    plan->has_drops = true;
    for (int32_t s = 0; s < plan->ranks; s++) {
        int64_t cap = mz_capacity_rows(&state->traits, load, s);
        for (int32_t e = 0; e < plan->experts; e++) {
            int64_t cell = (int64_t)s * plan->experts + e;
            int64_t drop = load->count[cell] > cap ? load->count[cell] - cap : 0;
            plan->dropped[cell] = drop;
            plan->dropped_pairs += drop;
            plan->quota[e] -= drop;
        }
    }
    plan->kept_pairs -= plan->dropped_pairs;
}

static mz_code capacity_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    capacity_state *state = self;
    mz_plan_lossless(plan, call->load);
    if (state->traits.capacity_factor > 0)
        drop_beyond_capacity(state, call->load, plan);
    mz_code code = mz_expand_rows(state->expand, plan, call->load->count,
                                  plan->has_drops ? plan->dropped : NULL, plan->target,
                                  MZ_SPREAD_EXACT, mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    snprintf(plan->why, sizeof plan->why, "capacity %lld rows per expert from rank 0",
             (long long)mz_capacity_rows(&state->traits, call->load, 0));
    return code;
}

const mz_policy mz_policy_capacity = {
    .name = "capacity",
    .summary = "static homes; pairs beyond a capacity per source and expert are dropped",
    .options = capacity_table,
    .option_count = sizeof capacity_table / sizeof *capacity_table,
    .options_size = sizeof(capacity_options),
    .init = capacity_init,
    .decide = capacity_decide,
    .route = capacity_route,
};
