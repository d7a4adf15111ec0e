/* fastermoe: hot experts are broadcast to all ranks for one call (balancing-systems.md 6.1-6.4).
 *
 * Source: FasterMoE (PPoPP'22), the FastMoE v1.x code, the FasterMoE prototype, and the port in
 * Scale-EPLB's repository. Sees the exact current counts and runs every layer call, before
 * dispatch. A shadowed expert lies on every rank for this call: each source computes its own pairs
 * of it. Mains stay. Moves: W around a ring of all ranks from the main, R - 1 transfers, before the
 * products of forward (with the smart schedule beside pack and dispatch, otherwise blocking), and W
 * of bf16 gradients back along the same ring after those of backward (beside other layers, or
 * blocking). Shadows and their gradients stay from forward to the layer's backward; optimizer
 * state stays at home.
 *
 * Which experts, all greedy from the largest load (ties: lower number) while a model of the time
 * falls, R > 1. Lmax: rows of the busiest rank.
 *   rule=model      the simulator's own rates: (3, with recomputation 4) products of Lmax pairs, 4
 *                   exchanges as long as the busiest port needs (inside or between domains), and
 *                   two transfers of W per shadow at the slowest link of the ring. The default.
 *   rule=fastmoe    FastMoE v1.x: (3 comp + 4 feat) B + shadows * model, B the load of the next
 *                   expert in the list, for one expert per rank, two-matrix fp32 experts:
 *                   comp = 4 a / flops, feat = 4 d / bw, model = 8 a / bw, a = alpha d^2.
 *   rule=prototype  whole ranks are shadowed: 12 (4 a) Lmax / flops + transfers against
 *                   12 (4 a) B / flops + 4 feat B without any; 4 a is the prototype's slip (bytes
 *                   where elements belong). It goes on through equal times, and never takes the
 *                   last rank. A transfer is twice 8 a E/R / bw.
 *   rule=port       comp Lmax + 2 shadows W / bw against comp Lmax + 4 Lmax token_bytes / bw,
 *                   comp = 6 W / flops, at most `slots` - mains shadows on a rank.
 * Options and the sources' values: bw 50 Gb/s, flops 11.5e12, alpha 2 and d 2048 for fastmoe (I/H
 * and H of the model for the prototype); fraction 0.14; group 4. slots: port mains plus two, as
 * the others in this simulator; the other rules take as many as a plan of 2^25 entries holds, which
 * stops them only at hundreds of ranks.
 * gate=top2 and gate=topology (6.2) choose two of each token's recorded choices by their recorded
 * weights; pairs not chosen count as dropped, and the rules above see what is left. Shadows do not
 * count as inside, as in the released code. A token of which fewer than two inside choices were
 * recorded keeps those: the real gate would look further, so traces should hold more choices than
 * the model uses. The weights' softmax and the gate's auxiliary loss have no effect on load.
 * schedule=smart: dispatch, products and combine overlap in ceil(R / group) parts. Departures:
 * shadow products are not placed at either end of the schedule, and parts are even in rows where
 * the code's steps are pairs of rank groups; the code leaves out ranks when group does not divide
 * R. Versions of the prototype differ in the weight of a transfer: 2, or 1 + 2 (R-1)/R. */
#include "sim/policy/parts.h"

#include <math.h>
#include <string.h>

typedef struct fastermoe_options {
    int rule, gate, schedule;
    int64_t slots, group;
    double fraction, bandwidth, flops, alpha, width;
} fastermoe_options;

enum { RULE_MODEL, RULE_FASTMOE, RULE_PROTOTYPE, RULE_PORT };
enum { GATE_RECORDED, GATE_TOP2, GATE_TOPOLOGY };
enum { SCHEDULE_SMART, SCHEDULE_NONE };
enum { ENTRIES_DEFAULT = 1 << 25, FP32 = 4 };

#define FIELD(name) offsetof(fastermoe_options, name)
static const mz_opt fastermoe_table[] = {
    {"rule", 0, MZ_OPT_ENUM, FIELD(rule), "model", "model|fastmoe|prototype|port",
     "which experts are shadowed: this simulator's rates, or a published rule", 0, 0, MZ_UNIT_NONE},
    {"gate", 0, MZ_OPT_ENUM, FIELD(gate), "recorded", "recorded|top2|topology",
     "pairs as recorded, or two of each token's recorded choices", 0, 0, MZ_UNIT_NONE},
    {"fraction", 0, MZ_OPT_REAL, FIELD(fraction), "0.14", "RATIO",
     "tokens of a source that gate=topology lets out of the domain", 0, 1, MZ_UNIT_NONE},
    {"schedule", 0, MZ_OPT_ENUM, FIELD(schedule), "smart", "smart|none",
     "overlap exchanges and products in parts", 0, 0, MZ_UNIT_NONE},
    {"group", 0, MZ_OPT_INT, FIELD(group), "4", "RANKS", "ranks per part of the smart schedule", 1,
     1e6, MZ_UNIT_NONE},
    {"slots", 0, MZ_OPT_INT, FIELD(slots), "0", "N",
     "expert slots per rank, mains included; 0: mains plus two with rule=port, else no limit", 0,
     1e6, MZ_UNIT_NONE},
    {"bw", 0, MZ_OPT_REAL, FIELD(bandwidth), "50 Gb/s", "RATE",
     "network of the published rules, per rank", 1, 1e18, MZ_UNIT_RATE},
    {"flops", 0, MZ_OPT_REAL, FIELD(flops), "11.5 TFLOP/s", "RATE",
     "compute rate of the published rules", 1, 1e21, MZ_UNIT_FLOPS},
    {"alpha", 0, MZ_OPT_REAL, FIELD(alpha), "0", "X",
     "inner over outer width of an expert; 0: 2 with rule=fastmoe, the model's with prototype", 0,
     1e6, MZ_UNIT_NONE},
    {"d", 0, MZ_OPT_REAL, FIELD(width), "0", "N",
     "outer width of an expert; 0: 2048 with rule=fastmoe, the model's with prototype", 0, 1e9,
     MZ_UNIT_NONE},
};

/* Seconds of the rule's model. */
typedef struct shadow_costs {
    double row;           /* products, per row of the busiest rank */
    double exchanged_row; /* exchanges per row of the busiest rank; rule=model: not used */
    double inside, outside /* rule=model: exchanges per row of the busiest port */;
    double shadow; /* transfers of one expert */
} shadow_costs;

typedef struct fastermoe_state {
    int32_t ranks, experts, extra, units;
    int rule;
    shadow_costs cost;
    int64_t weight_bytes;
    mz_move_hide hide, hide_back;
    int32_t *domain, *main_rank;
    int32_t *first;           /* [units+1] experts shadowed together: one, or all mains of a rank */
    double *load;             /* [units] rows of a unit */
    int32_t *order, *scratch; /* [units] */
    int64_t *rows;            /* [R] computed */
    int64_t *send_in, *recv_in;   /* [R] rows that travel inside the domain */
    int64_t *send_out, *recv_out; /* [R] between domains */
    int32_t *held;                /* [R] mains that are shadowed */
    bool *shadowed;               /* [E] */
    int32_t shadows;
    bool full; /* the rule would have gone on */
    mz_kept kept;
    int64_t *kept_total; /* [E] */
    char source[16];
    mz_gate *gate; /* NULL: pairs as recorded */
    mz_expand *expand;
} fastermoe_state;

/* ---- init
 * ----------------------------------------------------------------------------------------*/

static shadow_costs costs_of(const mz_policy_env *env, const fastermoe_options *o) {
    const bool port = o->rule == RULE_PORT, prototype = o->rule == RULE_PROTOTYPE;
    const double W = (double)env->weight_bytes;
    if (o->rule == RULE_MODEL) {
        const double token = 4 * (double)env->token_bytes;
        const double ring = env->domains > 1 ? env->outside_bytes_s : env->inside_bytes_s;
        return (shadow_costs){.row = (env->recompute ? 4 : 3) * env->pair_seconds,
                              .inside = token / env->inside_bytes_s,
                              .outside = token / env->outside_bytes_s,
                              .shadow = 2 * W / ring};
    }
    if (port)
        return (shadow_costs){.row = 6 * W / o->flops,
                              .exchanged_row = 4 * (double)env->token_bytes / o->bandwidth,
                              .shadow = 2 * W / o->bandwidth};
    const double ratio = (double)env->intermediate / (double)env->hidden;
    const double alpha = o->alpha > 0 ? o->alpha : (prototype ? ratio : 2);
    const double d = o->width > 0 ? o->width : (prototype ? (double)env->hidden : 2048);
    const double a = alpha * d * d;
    return (shadow_costs){.row = 12 * a * (prototype ? FP32 : 1) / o->flops,
                          .exchanged_row = 4 * d * FP32 / o->bandwidth,
                          .shadow = 2 * a * FP32 / o->bandwidth * (prototype ? 2 : 1)};
}

/* Slots per rank, mains included. */
static mz_code slots_of(const mz_policy_env *env, const fastermoe_options *o, int32_t *slots,
                        mz_err *err) {
    if (o->slots > 0 || o->rule == RULE_PORT)
        return mz_slots("fastermoe", env, o->slots, slots, err);
    const int64_t room = ENTRIES_DEFAULT / env->ranks / env->ranks;
    const int64_t mains = mz_mains_per_rank(env->ranks, env->experts);
    const int64_t all = mains + (env->ranks > 1 ? env->experts : 0);
    return mz_slots("fastermoe", env, all <= room ? all : (room > mains ? room : mains + 1), slots,
                    err);
}

static mz_code alloc_state(const mz_policy_env *env, mz_arena *arena, fastermoe_state *state,
                           mz_err *err) {
    const int32_t R = env->ranks, E = env->experts;
    const bool by_rank = state->rule == RULE_PROTOTYPE;
    state->units = by_rank ? R : E;
    state->main_rank = MZ_NEW(arena, int32_t, E);
    state->first = MZ_NEW(arena, int32_t, state->units + 1);
    state->load = MZ_NEW(arena, double, state->units);
    state->order = MZ_NEW(arena, int32_t, state->units);
    state->scratch = MZ_NEW(arena, int32_t, state->units);
    state->rows = MZ_NEW(arena, int64_t, R);
    state->send_in = MZ_NEW(arena, int64_t, R);
    state->recv_in = MZ_NEW(arena, int64_t, R);
    state->send_out = MZ_NEW(arena, int64_t, R);
    state->recv_out = MZ_NEW(arena, int64_t, R);
    state->held = MZ_NEW(arena, int32_t, R);
    state->shadowed = MZ_NEW(arena, bool, E);
    if (!state->main_rank || !state->first || !state->load || !state->order || !state->scratch ||
        !state->rows || !state->send_in || !state->recv_in || !state->send_out ||
        !state->recv_out || !state->held || !state->shadowed)
        return mz_fail_nomem(err, "the state of a policy");
    mz_layout_mains(R, E, state->main_rank);
    for (int32_t e = 0, u = 0; u < state->units; u++) {
        while (e < E && (by_rank ? state->main_rank[e] : e) == u)
            e++;
        state->first[u + 1] = e;
    }
    mz_code code = mz_copy_domains(env, arena, &state->domain, err);
    return code == MZ_OK ? mz_expand_create(arena, env, R, &state->expand, err) : code;
}

static mz_code alloc_gate(const mz_policy_env *env, const fastermoe_options *o, mz_arena *arena,
                          fastermoe_state *state, mz_err *err) {
    state->kept.pairs = MZ_NEW(arena, int64_t, (int64_t)env->ranks * env->experts);
    state->kept_total = MZ_NEW(arena, int64_t, env->experts);
    if (!state->kept.pairs || !state->kept_total)
        return mz_fail_nomem(err, "the state of a policy");
    return mz_gate_create(arena, env, o->gate == GATE_TOPOLOGY, o->fraction, &state->gate, err);
}

static mz_code fastermoe_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                              void **out, mz_policy_traits *traits, mz_err *err) {
    const fastermoe_options *o = options;
    int32_t slots;
    mz_code code = slots_of(env, o, &slots, err);
    if (code != MZ_OK)
        return code;
    fastermoe_state *state = MZ_NEW(arena, fastermoe_state, 1);
    if (!state)
        return mz_fail_nomem(err, "the state of a policy");
    const bool smart = o->schedule == SCHEDULE_SMART, gated = o->gate != GATE_RECORDED;
    *state = (fastermoe_state){.ranks = env->ranks,
                               .experts = env->experts,
                               .extra = slots - mz_mains_per_rank(env->ranks, env->experts),
                               .rule = o->rule,
                               .cost = costs_of(env, o),
                               .weight_bytes = env->weight_bytes,
                               .hide = smart ? MZ_HIDE_DISPATCH : MZ_HIDE_NOTHING,
                               .hide_back = smart ? MZ_HIDE_LAYERS : MZ_HIDE_NOTHING};
    const int64_t parts = (env->ranks + o->group - 1) / o->group;
    *traits = (mz_policy_traits){.sees = MZ_SEES_CURRENT,
                                 .interval = 1,
                                 .lossy = gated,
                                 .route_plans = gated,
                                 .needs_weights = gated,
                                 .slots = slots,
                                 .replica_memory = MZ_REPLICAS_PER_LAYER,
                                 .replica_gradient_bytes = env->weight_bytes,
                                 .chunks = smart && parts > 1 ? (int32_t)parts : 0,
                                 .score_source = state->source};
    *out = state;
    code = alloc_state(env, arena, state, err);
    return code == MZ_OK && gated ? alloc_gate(env, o, arena, state, err) : code;
}

/* ---- which experts
 * -------------------------------------------------------------------------------*/

/* Rows of one source for an expert of rank `home` are added to, or taken from, what travels. */
static void count_travel(fastermoe_state *state, int32_t s, int32_t home, int64_t rows) {
    if (s == home)
        return;
    const bool inside = state->domain[s] == state->domain[home];
    *(inside ? &state->send_in[s] : &state->send_out[s]) += rows;
    *(inside ? &state->recv_in[home] : &state->recv_out[home]) += rows;
}

/* Mains alone: rows of units and ranks, and for rule=model what travels. */
static void start_counts(fastermoe_state *state, const int64_t *count, const int64_t *total) {
    int64_t *const by_rank[] = {state->rows, state->send_in, state->recv_in, state->send_out,
                                state->recv_out};
    for (size_t i = 0; i < sizeof by_rank / sizeof *by_rank; i++)
        memset(by_rank[i], 0, sizeof(int64_t) * (size_t)state->ranks);
    memset(state->held, 0, sizeof *state->held * (size_t)state->ranks);
    memset(state->shadowed, 0, sizeof *state->shadowed * (size_t)state->experts);
    state->shadows = 0;
    state->full = false;
    for (int32_t u = 0; u < state->units; u++) {
        state->load[u] = 0;
        for (int32_t e = state->first[u]; e < state->first[u + 1]; e++)
            state->load[u] += (double)total[e];
    }
    for (int32_t e = 0; e < state->experts; e++)
        state->rows[state->main_rank[e]] += total[e];
    for (int32_t s = 0; state->rule == RULE_MODEL && s < state->ranks; s++)
        for (int32_t e = 0; e < state->experts; e++)
            count_travel(state, s, state->main_rank[e], count[(int64_t)s * state->experts + e]);
    mz_order_falling(state->load, state->units, state->order, state->scratch);
}

/* Every source computes its own rows of a unit. */
static void localise(fastermoe_state *state, const int64_t *count, int32_t unit) {
    for (int32_t e = state->first[unit]; e < state->first[unit + 1]; e++) {
        const int32_t home = state->main_rank[e];
        for (int32_t s = 0; s < state->ranks; s++) {
            const int64_t rows = count[(int64_t)s * state->experts + e];
            state->rows[home] -= rows;
            state->rows[s] += rows;
            if (state->rule == RULE_MODEL)
                count_travel(state, s, home, -rows);
        }
    }
}

static double largest(const int64_t *value, int32_t n) {
    int64_t most = 0;
    for (int32_t i = 0; i < n; i++)
        most = value[i] > most ? value[i] : most;
    return (double)most;
}

/* Exchanges of rule=model: as long as the busiest port needs. */
static double exchange_time(const fastermoe_state *state) {
    const int32_t R = state->ranks;
    const double in = fmax(largest(state->recv_in, R), largest(state->send_in, R));
    const double out = fmax(largest(state->recv_out, R), largest(state->send_out, R));
    return fmax(state->cost.inside * in, state->cost.outside * out);
}

/* Seconds of a call whose busiest rank computes `peak` rows, with that many experts shadowed. The
 * prototype and its port count exchanges only where nothing is. */
static double time_of(const fastermoe_state *state, double peak, int32_t shadows) {
    const shadow_costs *c = &state->cost;
    const double products = c->row * peak + c->shadow * shadows;
    if (state->rule == RULE_MODEL)
        return products + exchange_time(state);
    return products + (state->rule == RULE_FASTMOE || shadows == 0 ? c->exchanged_row * peak : 0);
}

/* Shadows a unit unless a rank would hold more than its extra slots. */
static bool shadow(fastermoe_state *state, int32_t unit) {
    const int32_t e0 = state->first[unit], e1 = state->first[unit + 1];
    for (int32_t r = 0; r < state->ranks; r++) {
        const int32_t own = state->held[r] + (state->main_rank[e0] == r ? e1 - e0 : 0);
        state->full = state->full || state->shadows + e1 - e0 - own > state->extra;
    }
    if (state->full)
        return false;
    for (int32_t e = e0; e < e1; e++)
        state->shadowed[e] = true;
    state->held[state->main_rank[e0]] += e1 - e0;
    state->shadows += e1 - e0;
    return true;
}

/* One unit after the other while the modelled time falls. */
static void choose_falling(fastermoe_state *state, const int64_t *count) {
    const bool listed = state->rule == RULE_FASTMOE; /* the peak is the next of the list */
    double best = time_of(
        state, listed ? state->load[state->order[0]] : largest(state->rows, state->ranks), 0);
    for (int32_t k = 0; k + (listed ? 1 : 0) < state->units; k++) {
        const int32_t unit = state->order[k];
        if (state->load[unit] == 0)
            return;
        localise(state, count, unit);
        const double peak =
            listed ? state->load[state->order[k + 1]] : largest(state->rows, state->ranks);
        const double now = time_of(state, peak, state->shadows + 1);
        if (!(now < best) || !shadow(state, unit))
            return;
        best = now;
    }
}

/* The prototype goes on while the time does not rise and takes what came before the rise, or all
 * ranks but the last. */
static void choose_prototype(fastermoe_state *state, const int64_t *count) {
    const double none = time_of(state, largest(state->rows, state->ranks), 0);
    double best = INFINITY;
    int32_t taken = 0, experts = 0;
    for (; taken < state->ranks - 1; taken++) {
        const int32_t unit = state->order[taken];
        localise(state, count, unit);
        experts += state->first[unit + 1] - state->first[unit];
        const double now = time_of(state, largest(state->rows, state->ranks), experts);
        if (now > best)
            break;
        best = now;
    }
    for (int32_t k = 0; none > best && k < taken; k++)
        if (state->load[state->order[k]] > 0 && !shadow(state, state->order[k]))
            return;
}

static void choose_shadows(fastermoe_state *state, const int64_t *count, const int64_t *total) {
    start_counts(state, count, total);
    if (state->ranks == 1)
        return;
    if (state->rule == RULE_PROTOTYPE)
        choose_prototype(state, count);
    else
        choose_falling(state, count);
}

/* ---- the plan
 * ------------------------------------------------------------------------------------*/

/* Main first, then all other ranks in order; a shadow's rows are those of its own rank. */
static mz_code place(const fastermoe_state *state, const int64_t *count, const int64_t *total,
                     mz_plan *plan, mz_err *err) {
    int32_t at = 0;
    for (int32_t e = 0; e < state->experts; e++) {
        const int32_t home = state->main_rank[e], hosts = state->shadowed[e] ? state->ranks : 1;
        if (at > plan->instance_cap - hosts)
            return mz_fail(err, MZ_EINTERNAL, "no room for %d shadows", state->shadows);
        plan->begin[e] = at;
        for (int32_t k = 0; k < hosts; k++, at++) {
            const int32_t r = k == 0 ? home : k - (k <= home);
            plan->rank[at] = r;
            plan->target[at] = hosts == 1 ? total[e] : count[(int64_t)r * state->experts + e];
        }
    }
    plan->begin[state->experts] = at;
    return MZ_OK;
}

/* Weights around the ring of ranks from the main, gradients back. */
static mz_code add_moves(const fastermoe_state *state, mz_plan *plan, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t e = 0; e < state->experts; e++)
        for (int32_t k = 1; code == MZ_OK && state->shadowed[e] && k < state->ranks; k++) {
            const int32_t near = (state->main_rank[e] + k - 1) % state->ranks;
            const int32_t far = (near + 1) % state->ranks;
            code = mz_plan_add_move(plan,
                                    (mz_move){.kind = MZ_MOVE_WEIGHTS,
                                              .phase = MZ_MOVE_FORWARD,
                                              .hide = state->hide,
                                              .expert = e,
                                              .src = near,
                                              .dst = far,
                                              .bytes = state->weight_bytes},
                                    err);
            if (code == MZ_OK)
                code = mz_plan_add_move(plan,
                                        (mz_move){.kind = MZ_MOVE_GRADIENTS,
                                                  .phase = MZ_MOVE_REDUCE,
                                                  .hide = state->hide_back,
                                                  .expert = e,
                                                  .src = far,
                                                  .dst = near,
                                                  .bytes = state->weight_bytes},
                                        err);
        }
    return code;
}

static mz_code plan_shadows(fastermoe_state *state, const int64_t *count, const int64_t *total,
                            mz_plan *plan, mz_err *err) {
    mz_plan_reset(plan);
    choose_shadows(state, count, total);
    mz_code code = place(state, count, total, plan, err);
    if (code != MZ_OK)
        return code;
    snprintf(plan->why, sizeof plan->why, "%d shadows%s", state->shadows,
             state->full ? ", no slot for the next" : "");
    return add_moves(state, plan, err);
}

/* With a gate nothing is known before the pairs are. */
static mz_code fastermoe_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    fastermoe_state *state = self;
    if (!state->gate)
        return plan_shadows(state, view->current->count, view->current->total, plan, err);
    mz_plan_mains(plan, state->main_rank);
    return MZ_OK;
}

/* Chooses pairs, then shadows for them; what was not chosen is dropped. */
static mz_code gate_pairs(fastermoe_state *state, const mz_call *call, mz_plan *plan, mz_err *err) {
    const mz_load *load = call->load;
    const int64_t cells = (int64_t)state->ranks * state->experts;
    mz_code code = mz_gate_choose(state->gate, call->pairs, &state->kept, err);
    if (code != MZ_OK)
        return code;
    memset(state->kept_total, 0, sizeof *state->kept_total * (size_t)state->experts);
    for (int64_t i = 0; i < cells; i++)
        state->kept_total[i % state->experts] += state->kept.pairs[i];
    code = plan_shadows(state, state->kept.pairs, state->kept_total, plan, err);
    if (code != MZ_OK)
        return code;
    mz_plan_lossless(plan, load);
    plan->has_drops = true;
    for (int64_t i = 0; i < cells; i++)
        plan->dropped[i] = load->count[i] - state->kept.pairs[i];
    plan->kept_pairs = 0;
    for (int32_t e = 0; e < state->experts; e++) {
        plan->quota[e] = state->kept_total[e];
        plan->kept_pairs += state->kept_total[e];
    }
    plan->dropped_pairs = load->pairs - plan->kept_pairs;
    plan->kept_score = state->kept.score;
    plan->total_score = state->kept.total_score;
    if (call->pairs->weight)
        snprintf(state->source, sizeof state->source, "gate weights");
    const size_t used = strlen(plan->why);
    snprintf(plan->why + used, sizeof plan->why - used,
             ", %lld pairs not chosen, %lld tokens short of choices",
             (long long)plan->dropped_pairs, (long long)state->kept.short_tokens);
    return MZ_OK;
}

static mz_code fastermoe_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    fastermoe_state *state = self;
    const int64_t *rows = state->gate ? state->kept.pairs : call->load->count;
    mz_code code = MZ_OK;
    if (state->gate)
        code = gate_pairs(state, call, plan, err);
    else
        mz_plan_lossless(plan, call->load);
    if (code == MZ_OK)
        code = mz_expand_rows(state->expand, plan, rows, NULL, NULL, MZ_SPREAD_OWN,
                              mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_fastermoe = {
    .name = "fastermoe",
    .summary = "broadcasts the hottest experts for one call while a time model says it pays",
    .needs_sizes = true,
    .options = fastermoe_table,
    .option_count = sizeof fastermoe_table / sizeof *fastermoe_table,
    .options_size = sizeof(fastermoe_options),
    .init = fastermoe_init,
    .decide = fastermoe_decide,
    .route = fastermoe_route,
};
