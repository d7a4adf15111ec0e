/* symi: replica counts follow the popularity of the previous step (balancing-systems.md section 4).
 *
 * Source: SYMI / SwiftMoE, arXiv 2504.19925 (NSDI'26). Sees the counts of the previous step, summed
 * over micro-batches; decides every step and layer (all micro-batches of a step get the same
 * placement). Before there is history all experts count as equally popular.
 * Placement: counts by Algorithm 1, experts in id order take consecutive slots, several replicas of
 * one expert may share a rank. Pairs are dealt round robin over the replicas; what exceeds
 * slot_capacity * replicas is dropped, slot_capacity = cf * pairs / all slots, with the *current*
 * counts; a cut expert drops from each source in proportion (largest remainder).
 * Moves, once per step and layer: gradients are all-reduced over the ranks that host an expert
 * (ring; replicas of one rank are summed before) behind the last micro-batch's products, under the
 * work of other layers, then each rank
 * reads its shard of every expert's gradient, from itself or from a host; after the optimizer the
 * fresh weights of every slot come from all shards (S*R*W in all). The next placement is free
 * because of that. Static expert parallelism with one copy of each expert has its optimizer at home
 * and moves neither; the paper compares with a static system of as many slots
 * (mz_symi_phase_bytes). Options: slots (mains plus two; the paper has 4 slots per rank for 16
 * experts on 16 ranks), cf 1.0, drop yes (no: lossless). Departures: capacity of an expert is
 * rounded up to whole pairs. The paper counts S*R*G gradient bytes, one read per slot; its
 * Algorithm 2 reads one gradient per expert, which is what is moved here beside the all-reduce.
 * Gradients are bf16 (G = W). Optimizer state lies in GPU memory. */
#include "sim/policy/parts.h"

#include <string.h>

typedef struct symi_options {
    int64_t slots;
    double factor;
    bool drop;
} symi_options;

static const mz_opt symi_table[] = {
    {"slots", 0, MZ_OPT_INT, offsetof(symi_options, slots), "0", "N",
     "expert slots per rank; 0: ceil(E/R) plus two", 0, 1e6, MZ_UNIT_NONE},
    {"cf", 0, MZ_OPT_REAL, offsetof(symi_options, factor), "1.0", "X",
     "capacity factor of a slot; 0: nothing is dropped", 0, 1e6, MZ_UNIT_NONE},
    {"drop", 0, MZ_OPT_FLAG, offsetof(symi_options, drop), "yes", NULL,
     "drop pairs beyond the capacity of their expert's slots", 0, 0, MZ_UNIT_NONE},
};

typedef struct symi_state {
    int32_t ranks, experts, slots;
    double factor; /* 0: no drops */
    int64_t weight_bytes;
    int64_t *popularity, *diff; /* [E] */
    int64_t *column, *share;    /* [R] */
    uint64_t *scratch;          /* [R] */
    int32_t *count;             /* [E] */
    mz_expand *expand;
} symi_state;

void mz_symi_counts(const int64_t *popularity, int32_t experts, int32_t slots, int32_t *count,
                    int64_t *diff) {
    int64_t sum = 0, given = 0;
    for (int32_t e = 0; e < experts; e++)
        sum += popularity[e];
    bool equal = sum == 0;
    if (equal)
        sum = experts;
    /* diff is (count - goal) * sum: whole numbers, so that ties are exact. */
    for (int32_t e = 0; e < experts; e++) {
        int64_t goal = (equal ? 1 : popularity[e]) * slots;
        count[e] = goal < sum ? 1 : (int32_t)(goal / sum);
        diff[e] = count[e] * sum - goal;
        given += count[e];
    }
    /* The algorithm also visits experts that are down to one replica, which lowers their diff and
     * changes nothing else: the next one cut is always the largest diff among the others. */
    for (; given > slots; given--) {
        int32_t i = -1;
        for (int32_t e = 0; e < experts; e++)
            if (count[e] > 1 && (i < 0 || diff[e] > diff[i]))
                i = e;
        count[i]--;
        diff[i] -= sum;
    }
    for (; given < slots; given++) {
        int32_t i = 0;
        for (int32_t e = 1; e < experts; e++)
            i = diff[e] < diff[i] ? e : i;
        count[i]++;
        diff[i] += sum;
    }
}

mz_code mz_symi_place(const int32_t *count, int32_t slots_per_rank, mz_plan *plan, mz_err *err) {
    int32_t slot = 0;
    for (int32_t e = 0; e < plan->experts; e++) {
        if (slot + count[e] > plan->instance_cap)
            return mz_fail(err, MZ_EINTERNAL, "more replicas than slots");
        for (int32_t k = 0; k < count[e]; k++, slot++) {
            plan->rank[slot] = slot / slots_per_rank;
            plan->target[slot] = -1;
        }
        plan->begin[e + 1] = slot;
    }
    return MZ_OK;
}

/* Replicas of an expert are consecutive, so equal ranks stand side by side. */
static int32_t distinct_hosts(const mz_plan *plan, int32_t e) {
    int32_t hosts = 0;
    for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
        hosts += i == plan->begin[e] || plan->rank[i] != plan->rank[i - 1];
    return hosts;
}

/* The ring over the hosts of e and the shards of its gradient. A host reads its shard from itself;
 * a move to every rank counts the other hosts as receivers too, so its bytes are scaled to what the
 * ranks that host nothing of e read. */
static mz_code gradient_moves(mz_plan *plan, int32_t e, int64_t bytes, mz_err *err) {
    int32_t hosts = distinct_hosts(plan, e), seen = 0;
    int64_t read = plan->ranks > 1 ? bytes * (plan->ranks - hosts) / (plan->ranks - 1) : 0;
    int32_t first = plan->rank[plan->begin[e]];
    mz_code code = MZ_OK;
    for (int32_t i = plan->begin[e]; code == MZ_OK && i < plan->begin[e + 1]; i++) {
        int32_t src = plan->rank[i];
        if (i + 1 < plan->begin[e + 1] && plan->rank[i + 1] == src)
            continue;
        int32_t dst = i + 1 < plan->begin[e + 1] ? plan->rank[i + 1] : first;
        mz_move ring = {MZ_MOVE_GRADIENTS,
                        MZ_MOVE_REDUCE_STEP,
                        MZ_HIDE_LAYERS,
                        e,
                        src,
                        dst,
                        2 * (hosts - 1) * bytes / hosts,
                        0};
        mz_move shard = {MZ_MOVE_GRADIENTS,
                         MZ_MOVE_REDUCE_STEP,
                         MZ_HIDE_LAYERS,
                         e,
                         src,
                         MZ_EVERY_RANK,
                         read / hosts + (seen < read % hosts),
                         1};
        seen++;
        if (hosts > 1)
            code = mz_plan_add_move(plan, ring, err);
        if (code == MZ_OK && read > 0)
            code = mz_plan_add_move(plan, shard, err);
    }
    return code;
}

mz_code mz_symi_moves(mz_plan *plan, int64_t weight_bytes, int64_t gradient_bytes, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++) {
        code = gradient_moves(plan, e, gradient_bytes, err);
        for (int32_t i = plan->begin[e]; code == MZ_OK && i < plan->begin[e + 1]; i++) {
            mz_move fresh = {MZ_MOVE_WEIGHTS, MZ_MOVE_STEP,  MZ_HIDE_NOTHING, e,
                             MZ_EVERY_RANK,   plan->rank[i], weight_bytes,    0};
            code = mz_plan_add_move(plan, fresh, err);
        }
    }
    return code;
}

mz_symi_traffic mz_symi_phase_bytes(int32_t experts, int32_t ranks, int32_t slots_per_rank,
                                    double expert_bytes) {
    double N = ranks, all = (double)slots_per_rank * N;
    return (mz_symi_traffic){.host = experts / N * expert_bytes,
                             .network_static = (all - experts) / N * expert_bytes,
                             .network_symi = (all - slots_per_rank) / N * expert_bytes};
}

static mz_code symi_init(const mz_policy_env *env, const void *options, mz_arena *arena, void **out,
                         mz_policy_traits *traits, mz_err *err) {
    const symi_options *o = options;
    int32_t slots;
    if (!o->drop && o->factor != 1)
        return mz_fail(err, MZ_EINPUT, "cf has no effect with drop=no: leave one of them out");
    mz_code code = mz_slots("symi", env, o->slots, &slots, err);
    if (code != MZ_OK)
        return code;
    symi_state *state = MZ_NEW(arena, symi_state, 1);
    if (!state)
        return mz_fail_nomem(err, "the state of a policy");
    state->ranks = env->ranks;
    state->experts = env->experts;
    state->slots = slots;
    state->factor = o->drop ? o->factor : 0;
    state->weight_bytes = env->weight_bytes;
    state->popularity = MZ_NEW(arena, int64_t, env->experts);
    state->diff = MZ_NEW(arena, int64_t, env->experts);
    state->count = MZ_NEW(arena, int32_t, env->experts);
    state->column = MZ_NEW(arena, int64_t, env->ranks);
    state->share = MZ_NEW(arena, int64_t, env->ranks);
    state->scratch = MZ_NEW(arena, uint64_t, env->ranks);
    if (!state->popularity || !state->diff || !state->count || !state->column || !state->share ||
        !state->scratch)
        return mz_fail_nomem(err, "the state of a policy");
    *traits = (mz_policy_traits){.sees = MZ_SEES_HISTORY,
                                 .lag = 1,
                                 .window = 1,
                                 .interval = 1,
                                 .lossy = state->factor > 0,
                                 .slots = slots,
                                 .replica_memory = MZ_REPLICAS_PER_LAYER,
                                 .replica_gradient_bytes = env->weight_bytes,
                                 .sharded_optimizer = true,
                                 .score_source = ""};
    *out = state;
    return mz_expand_create(arena, env, slots * env->ranks, &state->expand, err);
}

static mz_code symi_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    symi_state *state = self;
    mz_plan_reset(plan);
    const int64_t *popularity = view->history ? view->history->total : state->popularity;
    mz_symi_counts(popularity, state->experts, state->slots * state->ranks, state->count,
                   state->diff);
    mz_code code = mz_symi_place(state->count, state->slots, plan, err);
    if (code != MZ_OK || view->micro_batch > 0)
        return code;
    return mz_symi_moves(plan, state->weight_bytes, state->weight_bytes, err);
}

/* Expert e may keep `limit` pairs; the rest is dropped by its sources in proportion. */
static void drop_excess(symi_state *state, const mz_load *load, int32_t e, int64_t limit,
                        mz_plan *plan) {
    int64_t excess = load->total[e] - limit;
    if (excess <= 0)
        return;
    for (int32_t s = 0; s < state->ranks; s++)
        state->column[s] = load->count[(int64_t)s * state->experts + e];
    mz_largest_remainder(excess, state->column, state->ranks, state->share, state->scratch);
    for (int32_t s = 0; s < state->ranks; s++)
        plan->dropped[(int64_t)s * state->experts + e] = state->share[s];
    plan->dropped_pairs += excess;
    plan->kept_pairs -= excess;
    plan->quota[e] -= excess;
}

static mz_code symi_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    symi_state *state = self;
    const mz_load *load = call->load;
    double slot = state->factor * (double)load->pairs / ((double)state->slots * state->ranks);
    mz_plan_lossless(plan, load);
    plan->has_drops = state->factor > 0;
    if (plan->has_drops)
        memset(plan->dropped, 0, sizeof(int64_t) * (size_t)state->ranks * (size_t)state->experts);
    for (int32_t e = 0; e < state->experts && plan->has_drops; e++) {
        double limit = slot * (plan->begin[e + 1] - plan->begin[e]);
        drop_excess(state, load, e, limit < 1e18 ? mz_rows_up(limit) : INT64_MAX, plan);
    }
    mz_code code =
        mz_expand_rows(state->expand, plan, load->count, plan->has_drops ? plan->dropped : NULL,
                       plan->target, MZ_SPREAD_DEAL, mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    snprintf(plan->why, sizeof plan->why, "slot capacity %.1f rows, %lld pairs dropped", slot,
             (long long)plan->dropped_pairs);
    return code;
}

const mz_policy mz_policy_symi = {
    .name = "symi",
    .summary = "replica counts follow the previous step's popularity; drops beyond capacity",
    .options = symi_table,
    .option_count = sizeof symi_table / sizeof *symi_table,
    .options_size = sizeof(symi_options),
    .init = symi_init,
    .decide = symi_decide,
    .route = symi_route,
};
