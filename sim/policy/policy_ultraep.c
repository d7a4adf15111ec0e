/* ultraep: replicas and integer quotas for every layer call (balancing-systems.md section 8).
 *
 * Source: UltraEP, arXiv 2606.04101v3, and its repository (v1.0.0). Sees the exact current counts
 * and runs every layer call, before dispatch. Mains stay; hot experts get replicas in spare slots
 * of less loaded ranks, with quotas that bring every rank to 1.01 times the mean where that is
 * possible. Moves: weights W per replica beside packing (forward = max(re-routing, weights) + ...);
 * in backward W again, because the slots are shared by all layers, and fp32 gradients 2W back to
 * the main, both under the work of other layers. Optimizer state never moves. Options and the
 * source's values: slots (mains plus two; the paper uses 2 and 4 extra ones), eps 0.01, threshold
 * 1, u_min 1024, zero_main no, locality yes, relay yes, scope domain. Scope: the paper solves
 * inside one scale-up domain. Where the group spans several, `domain` solves each by itself, so
 * experts never leave their main's domain and imbalance between domains stays; `group` solves once
 * for all ranks. Which of a source's pairs go where follows the source's stride (mz_stride).
 * Departures: the kernel's limits (512 experts, 72 ranks, 512 replicas per domain) are not
 * enforced; its four parallel probes run one after the other; tiles and SM counts of its transfers
 * belong to calibration. Where R does not divide E all ranks have slots - ceil(E/R) replica slots,
 * those with a main less too. */
#include "sim/policy/parts.h"

enum { DIRECT_DOMAIN = 8 }; /* domains of at most this many ranks never relay */

typedef struct ultraep_options {
    int64_t slots, rows_min;
    double eps, threshold;
    bool zero_main, locality, relay;
    int scope;
} ultraep_options;

static const mz_opt ultraep_table[] = {
    {"slots", 0, MZ_OPT_INT, offsetof(ultraep_options, slots), "0", "N",
     "expert slots per rank, mains included; 0: mains plus two", 0, 1e6, MZ_UNIT_NONE},
    {"eps", 0, MZ_OPT_REAL, offsetof(ultraep_options, eps), "0.01", "X",
     "aimed load of the busiest rank above the mean", 0, 1e3, MZ_UNIT_NONE},
    {"threshold", 0, MZ_OPT_REAL, offsetof(ultraep_options, threshold), "1", "X",
     "do nothing below this ratio of the busiest rank to the mean", 1, 1e6, MZ_UNIT_NONE},
    {"u_min", 0, MZ_OPT_INT, offsetof(ultraep_options, rows_min), "1024", "ROWS",
     "smallest quota of a replica outside the fast path", 1, 1e12, MZ_UNIT_NONE},
    {"zero_main", 0, MZ_OPT_FLAG, offsetof(ultraep_options, zero_main), "no", NULL,
     "a main may give away all its pairs", 0, 0, MZ_UNIT_NONE},
    {"locality", 0, MZ_OPT_FLAG, offsetof(ultraep_options, locality), "yes", NULL,
     "pairs stay on their source rank where it hosts their expert", 0, 0, MZ_UNIT_NONE},
    {"relay", 0, MZ_OPT_FLAG, offsetof(ultraep_options, relay), "yes", NULL,
     "send experts with four replicas and more in two rounds", 0, 0, MZ_UNIT_NONE},
    {"scope", 0, MZ_OPT_ENUM, offsetof(ultraep_options, scope), "domain", "domain|group",
     "solve per scale-up domain, or once for the whole group", 0, 0, MZ_UNIT_NONE},
};

typedef struct ultraep_state {
    mz_replicate_rule rule;
    mz_replica_moves moves;
    int32_t extra;
    mz_spread spread;
    int64_t *sent;
    mz_replicate *replicate;
    mz_expand *expand;
} ultraep_state;

static mz_code ultraep_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                            void **out, mz_policy_traits *traits, mz_err *err) {
    const ultraep_options *o = options;
    int32_t slots;
    mz_code code = mz_slots("ultraep", env, o->slots, &slots, err);
    if (code != MZ_OK)
        return code;
    ultraep_state *state = MZ_NEW(arena, ultraep_state, 1);
    if (!state || !(state->sent = MZ_NEW(arena, int64_t, env->ranks)))
        return mz_fail_nomem(err, "the state of a policy");
    state->rule =
        (mz_replicate_rule){o->eps, o->threshold, o->rows_min, o->zero_main, o->scope == 1};
    state->moves = (mz_replica_moves){.weight_bytes = env->weight_bytes,
                                      .gradient_bytes = 2 * env->weight_bytes,
                                      .again = true,
                                      .relay = o->relay && mz_largest_domain(env) > DIRECT_DOMAIN,
                                      .hide = MZ_HIDE_PACK,
                                      .hide_again = MZ_HIDE_LAYERS,
                                      .hide_gradients = MZ_HIDE_LAYERS};
    state->extra = slots - mz_mains_per_rank(env->ranks, env->experts);
    state->spread = o->locality ? MZ_SPREAD_SHARE_LOCAL : MZ_SPREAD_SHARE;
    *traits = (mz_policy_traits){.sees = MZ_SEES_CURRENT,
                                 .interval = 1,
                                 .slots = slots,
                                 .replica_memory = MZ_REPLICAS_SHARED,
                                 .replica_gradient_bytes = 2 * env->weight_bytes,
                                 .strided_pairs = true,
                                 .score_source = ""};
    *out = state;
    code = mz_replicate_create(arena, env, slots, &state->replicate, err);
    return code == MZ_OK ? mz_expand_create(arena, env, env->ranks, &state->expand, err) : code;
}

static mz_code ultraep_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    ultraep_state *state = self;
    mz_plan_reset(plan);
    mz_code code = mz_replicate_plan(state->replicate, &state->rule, state->extra,
                                     view->current->total, plan, err);
    if (code != MZ_OK)
        return code;
    snprintf(plan->why, sizeof plan->why, "%d replicas",
             plan->begin[plan->experts] - plan->experts);
    return mz_plan_replica_moves(plan, &state->moves, state->sent, err);
}

static mz_code ultraep_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    ultraep_state *state = self;
    mz_plan_lossless(plan, call->load);
    mz_code code = mz_expand_rows(state->expand, plan, call->load->count, NULL, plan->target,
                                  state->spread, mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_ultraep = {
    .name = "ultraep",
    .summary = "replicas and integer quotas on this call's counts, weights beside packing",
    .options = ultraep_table,
    .option_count = sizeof ultraep_table / sizeof *ultraep_table,
    .options_size = sizeof(ultraep_options),
    .init = ultraep_init,
    .decide = ultraep_decide,
    .route = ultraep_route,
};
