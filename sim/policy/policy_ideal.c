/* ideal: perfect balance, free replication, full work - the bound of the lossless policies.
 *
 * Sees the exact current counts, runs every call at no cost. Every rank computes pairs/R rows
 * (floor, the first pairs mod R ranks one more). Mains keep what fits; what is above the level
 * goes, largest expert first, to ranks below it, inside the domain first. Weights, gradients and
 * slots of the replicas cost nothing. A source's pairs stay on its own rank where their expert is
 * hosted there, then in its domain. No options. What it bounds: the rows of the busiest rank, and
 * with them the expert products of every policy that does all the work. Its dispatch is that of a
 * placement near the mains, not a lower bound of traffic: a policy with free copies everywhere
 * would send nothing. It is no bound for policies that drop pairs or keep only part of backward. */
#include "sim/policy/parts.h"

#include <string.h>

typedef struct ideal_state {
    int32_t ranks, experts, domains;
    int32_t *domain, *main_rank, *count;
    int32_t *first; /* [R+1] mains of a rank are consecutive experts */
    int64_t *room;  /* [R] rows below the level; negative: above it */
    int64_t *left;  /* [E] rows that the main still holds */
    mz_replica *replica;
    int32_t replicas;
    mz_expand *expand;
} ideal_state;

static mz_code ideal_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                          void **out, mz_policy_traits *traits, mz_err *err) {
    ideal_state *state = MZ_NEW(arena, ideal_state, 1);
    if (!state)
        return mz_fail_nomem(err, "the state of a policy");
    state->ranks = env->ranks;
    state->experts = env->experts;
    state->domains = env->domains;
    state->main_rank = MZ_NEW(arena, int32_t, env->experts);
    state->count = MZ_NEW(arena, int32_t, env->experts);
    state->first = MZ_NEW(arena, int32_t, env->ranks + 1);
    state->room = MZ_NEW(arena, int64_t, env->ranks);
    state->left = MZ_NEW(arena, int64_t, env->experts);
    state->replica = MZ_NEW(arena, mz_replica, 2 * ((int64_t)env->experts + env->ranks));
    if (!state->main_rank || !state->count || !state->first || !state->room || !state->left ||
        !state->replica)
        return mz_fail_nomem(err, "the state of a policy");
    mz_layout_mains(env->ranks, env->experts, state->main_rank);
    for (int32_t e = 0; e < env->experts; e++)
        state->first[state->main_rank[e] + 1] = e + 1;
    for (int32_t r = 0; r < env->ranks; r++)
        if (state->first[r + 1] == 0)
            state->first[r + 1] = state->first[r];
    *traits = (mz_policy_traits){.sees = MZ_SEES_CURRENT,
                                 .interval = 1,
                                 .slots = mz_mains_per_rank(env->ranks, env->experts),
                                 .free_replicas = true,
                                 .score_source = ""};
    *out = state;
    mz_code code = mz_copy_domains(env, arena, &state->domain, err);
    return code == MZ_OK ? mz_expand_create(arena, env, env->ranks, &state->expand, err) : code;
}

static int32_t largest_main(const ideal_state *state, int32_t r) {
    int32_t best = state->first[r];
    for (int32_t e = best + 1; e < state->first[r + 1]; e++)
        if (state->left[e] > state->left[best])
            best = e;
    return best;
}

/* Sends rows of one expert of rank r to rank t; false when nothing is to be done. */
static void export_rows(ideal_state *state, int32_t r, int32_t e, int32_t t) {
    int64_t rows = -state->room[r];
    if (rows > state->room[t])
        rows = state->room[t];
    if (rows > state->left[e])
        rows = state->left[e];
    state->room[r] += rows;
    state->room[t] -= rows;
    state->left[e] -= rows;
    state->replica[state->replicas++] = (mz_replica){e, t, rows};
}

/* Evens out rank r with the ranks below the level, only those of its domain when `inside`. One
 * expert is finished, one receiver filled or r done with every replica. */
static void even_rank(ideal_state *state, int32_t r, bool inside, int32_t *receiver) {
    for (int32_t t = inside ? 0 : *receiver; t < state->ranks && state->room[r] < 0; t++) {
        if (inside && state->domain[t] != state->domain[r])
            continue;
        while (state->room[t] > 0 && state->room[r] < 0)
            export_rows(state, r, largest_main(state, r), t);
        if (!inside)
            *receiver = t;
    }
}

static mz_code ideal_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    ideal_state *state = self;
    const mz_load *load = view->current;
    mz_plan_reset(plan);
    memcpy(state->left, load->total, sizeof(int64_t) * (size_t)state->experts);
    for (int32_t r = 0; r < state->ranks; r++)
        state->room[r] = load->pairs / state->ranks + (r < load->pairs % state->ranks);
    for (int32_t e = 0; e < state->experts; e++)
        state->room[state->main_rank[e]] -= load->total[e];
    state->replicas = 0;
    int32_t receiver = 0;
    for (int32_t r = 0; r < state->ranks && state->domains > 1; r++)
        even_rank(state, r, true, &receiver);
    for (int32_t r = 0; r < state->ranks; r++)
        even_rank(state, r, false, &receiver);
    snprintf(plan->why, sizeof plan->why, "every rank computes %lld or one row more",
             (long long)(load->pairs / state->ranks));
    return mz_plan_hosts(plan, state->main_rank, load->total, state->replica, state->replicas,
                         state->count, err);
}

static mz_code ideal_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    ideal_state *state = self;
    mz_plan_lossless(plan, call->load);
    mz_code code = mz_expand_rows(state->expand, plan, call->load->count, NULL, plan->target,
                                  MZ_SPREAD_EXACT, mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_ideal = {
    .name = "ideal",
    .summary = "perfect balance with free replicas: the bound of the lossless policies",
    .options_size = 1,
    .init = ideal_init,
    .decide = ideal_decide,
    .route = ideal_route,
};
