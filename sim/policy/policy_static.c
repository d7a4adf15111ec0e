/* static: every expert has one home and stays there (balancing-systems.md 10.1).
 *
 * Source: expert parallelism as in GShard and Megatron. Sees nothing, runs once per call at no
 * cost, moves nothing: dispatch and combine are its only traffic. No options. Departure: where R
 * does not divide E the block layout gives the first E mod R ranks one expert more (papers assume
 * that R divides E). */
#include "sim/policy/parts.h"

typedef struct static_state {
    int32_t *main_rank;
    mz_expand *expand;
} static_state;

static mz_code static_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                           void **out, mz_policy_traits *traits, mz_err *err) {
    static_state *state = MZ_NEW(arena, static_state, 1);
    if (!state || !(state->main_rank = MZ_NEW(arena, int32_t, env->experts)))
        return mz_fail_nomem(err, "the state of a policy");
    mz_layout_mains(env->ranks, env->experts, state->main_rank);
    *traits = (mz_policy_traits){
        .interval = 1, .slots = mz_mains_per_rank(env->ranks, env->experts), .score_source = ""};
    *out = state;
    return mz_expand_create(arena, env, 1, &state->expand, err);
}

static mz_code static_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    mz_plan_mains(plan, ((static_state *)self)->main_rank);
    return MZ_OK;
}

static mz_code static_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    static_state *state = self;
    mz_plan_lossless(plan, call->load);
    mz_code code = mz_expand_rows(state->expand, plan, call->load->count, NULL, plan->target,
                                  MZ_SPREAD_EXACT, mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_static = {
    .name = "static",
    .summary = "every expert on its home rank, nothing moves",
    .options_size = 1,
    .init = static_init,
    .decide = static_decide,
    .route = static_route,
};
