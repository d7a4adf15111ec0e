/* eplb: replicas and a full re-placement from the load of past steps (balancing-systems.md 10.3).
 *
 * Source: EPLB, DeepSeek's repository; training use as in UltraEP's evaluation (8.7). Sees history:
 * the mean of `window` steps that ended `lag` steps ago. Decides every `interval` steps; all calls
 * until then keep the placement. lag=0 is "EPLB+": the exact current counts, every call.
 * Rule: every expert one slot, each further slot to the largest load per replica; slots packed on
 * ranks, heaviest first on the lightest rank with a free slot. Hierarchical: groups of experts are
 * packed on nodes first, then each node replicates and packs its own (one node too: its experts are
 * then ordered by the load of their groups, which decides among equal ones). There are no fixed
 * mains; a rank may hold an expert twice. Pairs are dealt evenly over the replicas of their expert.
 * Moves: gradients of replicated experts are all-reduced over their hosts (ring), once per step
 * under the work of other layers. A new host costs `bytes` per parameter (weights 2, optimizer 16)
 * after the step that decided it, blocking; with optimizer=decoupled, where the optimizer state
 * lies elsewhere, the weights alone. With lag=0 the new hosts are filled with weights before the
 * products of the call, blocking, gradients are reduced per call, and backward counts as if it
 * found the placement of its forward; its optimizer is decoupled unless stated.
 * Options and the source's values: slots (mains plus two), mode auto (hierarchical where the groups
 * divide by the nodes), groups (those of the router), lag 1, window (the interval), interval 3
 * (UltraEP's training; DeepSeek's serving re-places every few minutes), bytes 18, optimizer.
 * Departures: before there is history experts lie in order of slots (slot p holds expert p mod E),
 * as serving systems start; a history without load counts as equal load, where the code gives all
 * slots to the first expert; ties go to the lower index, the code's sort leaves them open. */
#include "sim/policy/eplb.h"

#include <string.h>

typedef struct eplb_options {
    int64_t slots, groups, lag, window, interval;
    double bytes;
    int mode, optimizer;
} eplb_options;

enum { MODE_AUTO, MODE_HIERARCHICAL, MODE_GLOBAL };
enum { OPTIMIZER_AUTO, OPTIMIZER_REPLICATED, OPTIMIZER_DECOUPLED };

static const mz_opt eplb_table[] = {
    {"slots", 0, MZ_OPT_INT, offsetof(eplb_options, slots), "0", "N",
     "expert slots per rank; 0: ceil(E/R) plus two", 0, 1e6, MZ_UNIT_NONE},
    {"mode", 0, MZ_OPT_ENUM, offsetof(eplb_options, mode), "auto", "auto|hierarchical|global",
     "groups to nodes first, or all slots at once; auto: hierarchical where it is possible", 0, 0,
     MZ_UNIT_NONE},
    {"groups", 0, MZ_OPT_INT, offsetof(eplb_options, groups), "0", "N",
     "groups of consecutive experts; 0: those of the router", 0, 1e6, MZ_UNIT_NONE},
    {"lag", 0, MZ_OPT_INT, offsetof(eplb_options, lag), "1", "STEPS",
     "age of the newest step seen; 0: the exact counts of this call", 0, 1e6, MZ_UNIT_NONE},
    {"window", 0, MZ_OPT_INT, offsetof(eplb_options, window), "0", "STEPS",
     "steps averaged; 0: as many as the interval", 0, 1e6, MZ_UNIT_NONE},
    {"interval", 0, MZ_OPT_INT, offsetof(eplb_options, interval), "0", "STEPS",
     "steps between placements; 0: 3, with lag=0 every call", 0, 1e6, MZ_UNIT_NONE},
    {"bytes", 0, MZ_OPT_REAL, offsetof(eplb_options, bytes), "18", "B",
     "bytes per parameter that a new host receives", 0, 1e3, MZ_UNIT_NONE},
    {"optimizer", 0, MZ_OPT_ENUM, offsetof(eplb_options, optimizer), "auto",
     "auto|replicated|decoupled",
     "replicas have optimizer state, or it lies elsewhere; auto: replicated, with lag=0 decoupled",
     0, 0, MZ_UNIT_NONE},
};

/* ---- the planner -------------------------------------------------------------------------------
 */

struct mz_eplb {
    int32_t ranks, experts, groups, nodes; /* both 1: global */
    int32_t *room, *first;                 /* [R], [R+1] slots of a rank, its first slot */
    int32_t *member;                       /* [R] ranks by node, R/nodes each */
    int32_t *order;                        /* [E] experts by node, E/nodes each */
    int32_t *bin, *place;                  /* [slots] of the packing */
    int32_t *item;                         /* [slots] */
    int32_t *count, *extra;                /* [E], [slots] */
    int32_t *free;                         /* [R] */
    int64_t *load;                         /* [E] of a node's experts */
    double *weight, *carried;              /* [slots], [R] */
    mz_pack *pack;
};

bool mz_eplb_hierarchy(const mz_policy_env *env, int32_t groups) {
    const int32_t nodes = env->domains > 1 ? env->domains : 1;
    if (groups < 1 || groups % nodes != 0 || env->experts % groups != 0 || env->ranks % nodes != 0)
        return false;
    return mz_largest_domain(env) == env->ranks / nodes; /* all are equal then */
}

static bool allocate(mz_eplb *p, mz_arena *arena, int32_t slots) {
    p->room = MZ_NEW(arena, int32_t, p->ranks);
    p->first = MZ_NEW(arena, int32_t, p->ranks + 1);
    p->member = MZ_NEW(arena, int32_t, p->ranks);
    p->order = MZ_NEW(arena, int32_t, p->experts);
    p->bin = MZ_NEW(arena, int32_t, slots);
    p->place = MZ_NEW(arena, int32_t, slots);
    p->item = MZ_NEW(arena, int32_t, slots);
    p->count = MZ_NEW(arena, int32_t, p->experts);
    p->extra = MZ_NEW(arena, int32_t, slots);
    p->free = MZ_NEW(arena, int32_t, p->ranks);
    p->load = MZ_NEW(arena, int64_t, p->experts);
    p->weight = MZ_NEW(arena, double, slots);
    p->carried = MZ_NEW(arena, double, p->ranks);
    return p->room && p->first && p->member && p->order && p->bin && p->place && p->item &&
           p->count && p->extra && p->free && p->load && p->weight && p->carried;
}

mz_code mz_eplb_create(mz_arena *arena, const mz_policy_env *env, int32_t groups,
                       const int32_t *room, mz_eplb **out, mz_err *err) {
    mz_eplb *p = MZ_NEW(arena, mz_eplb, 1);
    int32_t slots = 0;
    for (int32_t r = 0; r < env->ranks; r++)
        slots += room[r];
    if (slots < env->experts)
        return mz_fail(err, MZ_EINTERNAL, "%d slots for %d experts", slots, env->experts);
    if (!p)
        return mz_fail_nomem(err, "the planner of eplb");
    p->ranks = env->ranks;
    p->experts = env->experts;
    p->groups = groups > 0 ? groups : 1;
    p->nodes = groups > 0 && env->domains > 1 ? env->domains : 1;
    if (!allocate(p, arena, slots))
        return mz_fail_nomem(err, "the planner of eplb");
    int32_t at = 0;
    for (int32_t node = 0; node < p->nodes; node++)
        for (int32_t r = 0; r < p->ranks; r++)
            if (p->nodes == 1 || env->domain[r] == node)
                p->member[at++] = r;
    for (int32_t r = 0; r < p->ranks; r++) {
        p->room[r] = room[r];
        p->first[r + 1] = p->first[r] + room[r];
    }
    *out = p;
    return mz_pack_create(arena, slots, p->ranks, &p->pack, err);
}

/* Balanced packing of the source: where there are no more items than bins of one place each, item
 * i goes to the i-th of them; otherwise heaviest first. weight, room: of these items and bins. */
static mz_code pack(mz_eplb *p, int32_t items, const int32_t *room, int32_t bins, mz_err *err) {
    int32_t places = 0, widest = 0;
    for (int32_t b = 0; b < bins; b++) {
        places += room[b];
        widest = room[b] > widest ? room[b] : widest;
        p->carried[b] = 0;
    }
    if (widest > 1 || items != places)
        return mz_pack_lpt(p->pack, p->weight, items, room, p->carried, bins, p->bin, p->place,
                           err);
    for (int32_t b = 0, i = 0; b < bins; b++)
        if (room[b] > 0) {
            p->bin[i] = b;
            p->place[i++] = 0;
        }
    return MZ_OK;
}

/* Fills order: the experts of each node, group by group as they were packed. */
static mz_code pack_groups(mz_eplb *p, const int64_t *total, mz_err *err) {
    const int32_t size = p->experts / p->groups, each = p->groups / p->nodes;
    for (int32_t g = 0; g < p->groups; g++) {
        p->weight[g] = 0;
        for (int32_t e = g * size; e < (g + 1) * size; e++)
            p->weight[g] += (double)total[e];
    }
    for (int32_t node = 0; node < p->nodes; node++)
        p->free[node] = each;
    mz_code code = pack(p, p->groups, p->free, p->nodes, err);
    for (int32_t g = 0; code == MZ_OK && g < p->groups; g++)
        for (int32_t k = 0; k < size; k++)
            p->order[(p->bin[g] * each + p->place[g]) * size + k] = g * size + k;
    return code;
}

/* Replicates the node's experts to its slots and packs them on its ranks. */
static mz_code plan_node(mz_eplb *p, const int64_t *total, int32_t node, int32_t *slot,
                         mz_err *err) {
    const int32_t n = p->experts / p->nodes, bins = p->ranks / p->nodes;
    const int32_t *order = p->order + node * n, *member = p->member + node * bins;
    int32_t slots = 0;
    for (int32_t b = 0; b < bins; b++) {
        p->free[b] = p->room[member[b]];
        slots += p->free[b];
    }
    for (int32_t k = 0; k < n; k++)
        p->load[k] = total[order[k]];
    mz_pack_replicate(p->pack, p->load, n, slots, p->count, p->extra);
    for (int32_t i = 0; i < slots; i++) {
        p->item[i] = i < n ? i : p->extra[i - n];
        p->weight[i] = (double)p->load[p->item[i]] / p->count[p->item[i]];
    }
    mz_code code = pack(p, slots, p->free, bins, err);
    for (int32_t i = 0; code == MZ_OK && i < slots; i++)
        slot[p->first[member[p->bin[i]]] + p->place[i]] = order[p->item[i]];
    return code;
}

mz_code mz_eplb_solve(mz_eplb *p, const int64_t *total, int32_t *slot, mz_err *err) {
    for (int32_t e = 0; e < p->experts; e++)
        p->order[e] = e;
    mz_code code = p->groups > 1 ? pack_groups(p, total, err) : MZ_OK;
    for (int32_t node = 0; code == MZ_OK && node < p->nodes; node++)
        code = plan_node(p, total, node, slot, err);
    return code;
}

void mz_eplb_hosts(const mz_eplb *p, const int32_t *slot, mz_plan *plan) {
    int32_t *begin = plan->begin, *at = p->count;
    const int32_t slots = p->first[p->ranks];
    memset(begin, 0, sizeof(int32_t) * ((size_t)p->experts + 1));
    for (int32_t i = 0; i < slots; i++)
        begin[slot[i] + 1]++;
    for (int32_t e = 0; e < p->experts; e++) {
        begin[e + 1] += begin[e];
        at[e] = begin[e];
    }
    for (int32_t r = 0; r < p->ranks; r++)
        for (int32_t i = p->first[r]; i < p->first[r + 1]; i++) {
            plan->rank[at[slot[i]]] = r;
            plan->target[at[slot[i]]++] = -1;
        }
}

/* ---- the policy --------------------------------------------------------------------------------
 */

typedef struct eplb_state {
    int32_t experts, slots; /* slots: of all ranks */
    bool current;           /* lag=0 */
    int64_t change_bytes, gradient_bytes;
    int64_t *equal; /* [E] ones */
    int32_t *slot;  /* [slots] */
    mz_eplb *planner;
    mz_placement *placement;
    mz_expand *expand;
} eplb_state;

/* Groups for the hierarchy; 0: global. */
static mz_code choose_mode(const mz_policy_env *env, const eplb_options *o, int32_t *groups,
                           mz_err *err) {
    const int64_t wanted = o->groups > 0 ? o->groups : env->expert_groups;
    *groups = 0;
    if (o->groups > env->experts || (o->groups > 0 && env->experts % o->groups != 0))
        return mz_fail(err, MZ_EINPUT,
                       "policy eplb: groups=%lld does not divide the %d experts; give a divisor",
                       (long long)o->groups, env->experts);
    const bool possible = mz_eplb_hierarchy(env, (int32_t)wanted);
    if (o->mode == MODE_HIERARCHICAL && !possible)
        return mz_fail(err, MZ_EINPUT,
                       "policy eplb: mode=hierarchical needs nodes of equal size and a multiple of "
                       "their number of expert groups; here are %d nodes for %d ranks, "
                       "%lld groups; give mode=global or groups=N",
                       env->domains, env->ranks, (long long)wanted);
    if (possible && o->mode != MODE_GLOBAL)
        *groups = (int32_t)wanted;
    return MZ_OK;
}

static void describe(const mz_policy_env *env, const eplb_options *o, const eplb_state *state,
                     bool decoupled, mz_policy_traits *traits) {
    int64_t interval = o->interval > 0 ? o->interval : state->current ? 1 : 3;
    *traits = (mz_policy_traits){.sees = state->current ? MZ_SEES_CURRENT : MZ_SEES_HISTORY,
                                 .lag = (int32_t)o->lag,
                                 .window = (int32_t)(o->window > 0 ? o->window : interval),
                                 .interval = (int32_t)interval,
                                 .slots = state->slots / env->ranks,
                                 .replica_memory = MZ_REPLICAS_RESIDENT,
                                 .replica_gradient_bytes = env->weight_bytes,
                                 .replica_optimizer = !decoupled,
                                 .score_source = ""};
}

static mz_code create_parts(const mz_policy_env *env, int32_t groups, mz_arena *arena,
                            eplb_state *state, mz_err *err) {
    const int32_t each = state->slots / env->ranks;
    int32_t *room = MZ_NEW(arena, int32_t, env->ranks);
    state->equal = MZ_NEW(arena, int64_t, env->experts);
    state->slot = MZ_NEW(arena, int32_t, state->slots);
    if (!room || !state->equal || !state->slot)
        return mz_fail_nomem(err, "the state of a policy");
    for (int32_t r = 0; r < env->ranks; r++)
        room[r] = each;
    for (int32_t e = 0; e < env->experts; e++)
        state->equal[e] = 1;
    mz_code code = mz_eplb_create(arena, env, groups, room, &state->planner, err);
    if (code == MZ_OK)
        code = mz_placement_create(arena, env, each, &state->placement, err);
    return code == MZ_OK ? mz_expand_create(arena, env, state->slots, &state->expand, err) : code;
}

static mz_code eplb_init(const mz_policy_env *env, const void *options, mz_arena *arena, void **out,
                         mz_policy_traits *traits, mz_err *err) {
    const eplb_options *o = options;
    int32_t slots, groups;
    mz_code code = mz_slots("eplb", env, o->slots, &slots, err);
    if (code == MZ_OK)
        code = choose_mode(env, o, &groups, err);
    if (code != MZ_OK)
        return code;
    eplb_state *state = MZ_NEW(arena, eplb_state, 1);
    if (!state)
        return mz_fail_nomem(err, "the state of a policy");
    state->experts = env->experts;
    state->slots = slots * env->ranks;
    state->current = o->lag == 0;
    const bool decoupled =
        o->optimizer == OPTIMIZER_DECOUPLED || (o->optimizer == OPTIMIZER_AUTO && state->current);
    state->change_bytes =
        decoupled ? env->weight_bytes : mz_rows_up(o->bytes * (double)env->expert_parameters);
    state->gradient_bytes = env->weight_bytes;
    describe(env, o, state, decoupled, traits);
    *out = state;
    return create_parts(env, groups, arena, state, err);
}

/* Hosts from the loads seen. */
static mz_code place(eplb_state *state, const mz_load *seen, mz_plan *plan, mz_err *err) {
    mz_code code = MZ_OK;
    if (seen)
        code = mz_eplb_solve(state->planner, seen->pairs > 0 ? seen->total : state->equal,
                             state->slot, err);
    else
        for (int32_t p = 0; p < state->slots; p++)
            state->slot[p] = p % state->experts;
    if (code == MZ_OK)
        mz_eplb_hosts(state->planner, state->slot, plan);
    return code;
}

static mz_code eplb_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    eplb_state *state = self;
    const bool current = state->current;
    int32_t moved = 0;
    mz_code code = MZ_OK;
    mz_plan_reset(plan);
    if (current || view->micro_batch == 0 ||
        !mz_placement_restore(state->placement, view->layer, plan)) {
        code = place(state, current ? view->current : view->history, plan, err);
        if (code == MZ_OK)
            code = mz_placement_change(state->placement, view->layer, state->change_bytes, 0,
                                       current ? MZ_MOVE_FORWARD : MZ_MOVE_STEP, MZ_HIDE_NOTHING,
                                       plan, &moved, err);
    }
    if (code != MZ_OK)
        return code;
    snprintf(plan->why, sizeof plan->why, "%d slots for %d experts, %d copies moved", state->slots,
             state->experts, moved);
    return mz_plan_ring_moves(plan, state->gradient_bytes,
                              current ? MZ_MOVE_REDUCE : MZ_MOVE_REDUCE_STEP, MZ_HIDE_LAYERS, err);
}

static mz_code eplb_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    eplb_state *state = self;
    mz_plan_lossless(plan, call->load);
    mz_code code = mz_expand_rows(state->expand, plan, call->load->count, NULL, plan->target,
                                  MZ_SPREAD_DEAL, mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_eplb = {
    .name = "eplb",
    .summary = "replicas and re-placement from the load of past steps; lag=0: from this call's",
    .options = eplb_table,
    .option_count = sizeof eplb_table / sizeof *eplb_table,
    .options_size = sizeof(eplb_options),
    .init = eplb_init,
    .decide = eplb_decide,
    .route = eplb_route,
};
