/* lrmoe: a quota for the load of the backward pass ("LRMoE (our reading)", lrmoe.md).
 *
 * Source: an article about the LRMoE paper; where it is silent the choices are ours, each an
 * option. Sees the exact current counts, runs every layer call before dispatch. Forward computes
 * every pair. Backward keeps q_e pairs of expert e, fixed from counts and budgets before the
 * computation, chosen by score when gradients arrive, and spread over the replicas that exist so
 * that the busiest rank's rows are least (exact). If q_e = n_e for all e the call takes the
 * ordinary path, so ample budgets and quota=none give the same plan.
 *
 * Quota and placement are separate parts: quota.c, select.c, and replicate.c (ultraep),
 * policy_symi.c (symi) or fixed mains (static). Moves: with placement=ultraep W per replica beside
 * packing and gradients back to the main under other layers; lifetime=resend_weights adds W again
 * in backward. With placement=symi what SYMI moves, on the previous step's counts. Not moved:
 * optimizer state (ultraep, static).
 *
 * Options (defaults are those of lrmoe.md section 2): see the table. `keep` limits the kept pairs
 * of a call to that part of all pairs and replaces the budgets of the simulator; rows, memory,
 * network and time are budgets of their own and always hold. Forward is spread exactly as backward
 * is; forward=placement leaves ultraep's own quotas (made for this call's counts, within eps), so
 * that full quotas give ultraep's plan. Memory of a backward row: dY, dX (2H each), d(act) 2I,
 * d(gate, up) 4I, with resend also x, gate, up and act. Network: a source sends g (resend: x and g)
 * of its kept pairs, a host returns dX of its rows; each must fit. Time: 12 H I FLOPs a row
 * (resend: 16 H I) at the rate of `flops`. joint: the number of replicas per rank that leaves room
 * for the highest expected kept score (before there are scores: the most pairs) when slots and rows
 * share one memory; of equal choices the most replicas. Scores: where the trace lacks the norms of
 * a kind, gate weights alone. Without gate weights only counts are known: shares of the sources
 * stand in for the selection, also with scope=global. Departures: `network` does not count saved
 * activations that follow their pair to another replica; `rescale` changes learning, not load: it
 * is accepted and recorded, with no effect here. */
#include "sim/policy/lrmoe.h"

#include <math.h>
#include <string.h>

typedef struct lrmoe_options {
    double keep, memory, network, time, flops;
    int64_t rows, rows_min, slots, start;
    int quota, scope, score, activations, placement, replicas, lifetime, forward, gradient,
        router_gradient;
    int rescale;
} lrmoe_options;

enum { QUOTA_WATERFILL, QUOTA_RATIO, QUOTA_VALUE, QUOTA_JOINT, QUOTA_NONE };
enum { SCOPE_PER_SOURCE, SCOPE_GLOBAL };
enum { PLACE_ULTRAEP, PLACE_SYMI, PLACE_STATIC };
enum { FORWARD_PLACEMENT, FORWARD_EXACT };
enum { COLUMNS = 8, DIRECT_DOMAIN = 8 /* ranks; see policy_ultraep.c */ };

#define FIELD(name) offsetof(lrmoe_options, name)
static const mz_opt lrmoe_table[] = {
    {"keep", 0, MZ_OPT_REAL, FIELD(keep), "0", "RATIO",
     "part of all pairs that stays in backward, instead of budgets; 0: budgets decide", 0, 1,
     MZ_UNIT_NONE},
    {"quota", 0, MZ_OPT_ENUM, FIELD(quota), "waterfill", "waterfill|ratio|value|joint|none",
     "rule of the quotas", 0, 0, MZ_UNIT_NONE},
    {"rows", 0, MZ_OPT_INT, FIELD(rows), "0", "ROWS",
     "most kept pairs on a rank in a layer's backward; 0: no limit", 0, 1e15, MZ_UNIT_NONE},
    {"memory", 0, MZ_OPT_REAL, FIELD(memory), "0", "BYTES",
     "memory of a rank for the kept pairs of a layer's backward; 0: what is left", 0, 1e18,
     MZ_UNIT_BYTES},
    {"network", 0, MZ_OPT_REAL, FIELD(network), "0", "BYTES",
     "bytes a rank may send in a layer's backward exchange; 0: no limit", 0, 1e18, MZ_UNIT_BYTES},
    {"time", 0, MZ_OPT_REAL, FIELD(time), "0", "TIME",
     "time of a rank for the expert products of a layer's backward; 0: no limit", 0, 1e6,
     MZ_UNIT_SECONDS},
    {"flops", 0, MZ_OPT_REAL, FIELD(flops), "300 TFLOP/s", "RATE",
     "rate at which `time` is turned into rows", 1, 1e21, MZ_UNIT_FLOPS},
    {"q_min", 0, MZ_OPT_INT, FIELD(rows_min), "1", "ROWS",
     "smallest quota of an expert (or all its pairs)", 0, 1e12, MZ_UNIT_NONE},
    {"scope", 0, MZ_OPT_ENUM, FIELD(scope), "per_source", "per_source|global",
     "each source keeps its share of a quota, or the best pairs of all sources stay", 0, 0,
     MZ_UNIT_NONE},
    {"score", 0, MZ_OPT_ENUM, FIELD(score), "down", "down|up|w|wh|g|h|random|sample",
     "what a pair is worth", 0, 0, MZ_UNIT_NONE},
    {"activations", 0, MZ_OPT_ENUM, FIELD(activations), "saved", "saved|resend",
     "kept from forward for all pairs, or sent again and recomputed for kept pairs", 0, 0,
     MZ_UNIT_NONE},
    {"rescale", 0, MZ_OPT_ENUM, FIELD(rescale), "none", "none|ratio",
     "scale kept gradients by n_e/q_e (no effect on load)", 0, 0, MZ_UNIT_NONE},
    {"router_gradient", 0, MZ_OPT_ENUM, FIELD(router_gradient), "dropped", "dropped|kept",
     "router gradient of pairs that do not stay", 0, 0, MZ_UNIT_NONE},
    {"placement", 0, MZ_OPT_ENUM, FIELD(placement), "ultraep", "ultraep|symi|static",
     "rule of the replicas", 0, 0, MZ_UNIT_NONE},
    {"replicas", 0, MZ_OPT_ENUM, FIELD(replicas), "domain", "domain|group",
     "where ultraep's rule may put them: in the main's scale-up domain, or anywhere", 0, 0,
     MZ_UNIT_NONE},
    {"slots", 0, MZ_OPT_INT, FIELD(slots), "0", "N",
     "expert slots per rank, mains included; 0: mains plus two", 0, 1e6, MZ_UNIT_NONE},
    {"lifetime", 0, MZ_OPT_ENUM, FIELD(lifetime), "persist", "persist|resend_weights",
     "replicas stay until their layer's backward, or are freed and sent again", 0, 0, MZ_UNIT_NONE},
    {"gradient", 0, MZ_OPT_ENUM, FIELD(gradient), "bf16", "bf16|fp32",
     "replica gradients on their way to the main", 0, 0, MZ_UNIT_NONE},
    {"forward", 0, MZ_OPT_ENUM, FIELD(forward), "exact", "placement|exact",
     "forward pairs by the placement's own quotas, or spread exactly", 0, 0, MZ_UNIT_NONE},
    {"start", 0, MZ_OPT_INT, FIELD(start), "0", "STEPS", "full backward for the first N steps", 0,
     1e15, MZ_UNIT_NONE},
};

typedef struct lrmoe_state {
    lrmoe_options o;
    int32_t ranks, experts, slots, extra;
    mz_replicate_rule rule;
    mz_replica_moves moves;
    int64_t row_memory, row_flops, token_bytes, slot_bytes;
    int32_t *domain, domains;
    int32_t *count;           /* [E] symi */
    int64_t *equal, *diff;    /* [E] symi */
    int64_t *sent;            /* [R] */
    int64_t *cap, *joint_cap; /* [R] */
    int64_t *local, *near;    /* [instances] */
    int64_t *best;            /* [E] joint */
    int64_t *column;          /* [COLUMNS][R] */
    uint64_t *word;           /* [R] */
    mz_replicate *replicate;
    mz_expand *expand;
    mz_balance *balance;
    mz_quota_scratch quota;
    mz_select *select;
} lrmoe_state;

/* ---- init
 * --------------------------------------------------------------------------------------*/

static mz_code make_arrays(lrmoe_state *state, mz_arena *arena, int32_t instances, mz_err *err) {
    int32_t R = state->ranks, E = state->experts;
    state->count = MZ_NEW(arena, int32_t, E);
    state->equal = MZ_NEW(arena, int64_t, E);
    state->diff = MZ_NEW(arena, int64_t, E);
    state->best = MZ_NEW(arena, int64_t, E);
    state->sent = MZ_NEW(arena, int64_t, R);
    state->cap = MZ_NEW(arena, int64_t, R);
    state->joint_cap = MZ_NEW(arena, int64_t, R);
    state->column = MZ_NEW(arena, int64_t, (int64_t)COLUMNS * R);
    state->word = MZ_NEW(arena, uint64_t, R);
    state->local = MZ_NEW(arena, int64_t, instances);
    state->near = MZ_NEW(arena, int64_t, instances);
    if (!state->count || !state->equal || !state->diff || !state->best || !state->sent ||
        !state->cap || !state->joint_cap || !state->column || !state->word || !state->local ||
        !state->near)
        return mz_fail_nomem(err, "the state of a policy");
    return MZ_OK;
}

/* Rules that weigh what pairs are worth by the scores of the layer's call before. */
static bool sees_scores(const lrmoe_options *o) {
    return o->quota == QUOTA_VALUE || o->quota == QUOTA_JOINT;
}

static mz_code make_parts(lrmoe_state *state, const mz_policy_env *env, mz_arena *arena,
                          mz_err *err) {
    int32_t R = env->ranks, E = env->experts;
    int32_t instances = R * state->slots > E ? R * state->slots : E;
    bool symi = state->o.placement == PLACE_SYMI;
    mz_code code = make_arrays(state, arena, instances, err);
    if (code == MZ_OK)
        code = mz_copy_domains(env, arena, &state->domain, err);
    if (code == MZ_OK)
        code = mz_replicate_create(arena, env, state->slots, &state->replicate, err);
    if (code == MZ_OK)
        code = mz_expand_create(arena, env, symi ? instances : R, &state->expand, err);
    if (code == MZ_OK)
        code = mz_balance_create(arena, R, E, instances, &state->balance, err);
    if (code == MZ_OK)
        code = mz_quota_create(arena, R, E, &state->quota, err);
    return code == MZ_OK ? mz_select_create(arena, env, (mz_score_kind)state->o.score,
                                            state->o.scope == SCOPE_GLOBAL, sees_scores(&state->o),
                                            &state->select, err)
                         : code;
}

static mz_policy_traits traits_of(const lrmoe_state *state, const mz_policy_env *env) {
    const lrmoe_options *o = &state->o;
    bool quotas = o->quota != QUOTA_NONE, symi = o->placement == PLACE_SYMI;
    bool returns_norm = o->score == MZ_SCORE_DOWN || o->score == MZ_SCORE_WH ||
                        o->score == MZ_SCORE_H || o->score == MZ_SCORE_SAMPLE;
    mz_policy_traits t = {.sees = MZ_SEES_CURRENT | (symi ? MZ_SEES_HISTORY : 0),
                          .lag = symi,
                          .window = symi,
                          .interval = 1,
                          .lossy = quotas,
                          .slots = state->slots,
                          .sharded_optimizer = symi,
                          .resend = o->activations == 1,
                          .needs_weights = quotas,
                          .score_combine_bytes = quotas && returns_norm ? 4 : 0,
                          .score_home_bytes = quotas && o->scope == SCOPE_GLOBAL ? 4 : 0,
                          .router_gradient_kept = quotas && o->router_gradient == 1,
                          .score_kind = o->score,
                          .score_source = mz_select_source(state->select),
                          .label = "LRMoE (our reading)"};
    if (o->placement == PLACE_STATIC)
        return t;
    t.replica_memory = !symi && o->lifetime == 1 ? MZ_REPLICAS_SHARED : MZ_REPLICAS_PER_LAYER;
    t.replica_gradient_bytes = state->moves.gradient_bytes;
    return t;
}

/* Options that another one makes idle are refused: a figure must not bear a setting that it does
 * not have. */
static mz_code check_options(const lrmoe_options *o, mz_err *err) {
    const bool none = o->quota == QUOTA_NONE, placed = o->placement != PLACE_ULTRAEP;
    const struct {
        bool idle;
        const char *option, *beside;
    } rule[] = {
        {none && o->keep > 0, "keep", "quota=none"},
        {none && o->rows > 0, "rows", "quota=none"},
        {none && o->memory > 0, "memory", "quota=none"},
        {none && o->network > 0, "network", "quota=none"},
        {none && o->time > 0, "time", "quota=none"},
        {none && o->start > 0, "start", "quota=none"},
        {none && o->rows_min != 1, "q_min", "quota=none"},
        {none && o->scope != SCOPE_PER_SOURCE, "scope", "quota=none"},
        {none && o->score != 0, "score", "quota=none"},
        {none && o->activations != 0, "activations", "quota=none"},
        {none && o->rescale != 0, "rescale", "quota=none"},
        {none && o->router_gradient != 0, "router_gradient", "quota=none"},
        {placed && o->quota == QUOTA_JOINT, "quota=joint", "another placement than ultraep"},
        {placed && o->replicas != 0, "replicas", "another placement than ultraep"},
        {placed && o->lifetime != 0, "lifetime", "another placement than ultraep"},
        {o->placement == PLACE_STATIC && o->slots > 0, "slots", "placement=static"},
        {o->placement == PLACE_STATIC && o->gradient != 0, "gradient", "placement=static"},
    };
    for (size_t i = 0; i < sizeof rule / sizeof *rule; i++)
        if (rule[i].idle)
            return mz_fail(err, MZ_EINPUT, "%s has no effect with %s: leave one of them out",
                           rule[i].option, rule[i].beside);
    return MZ_OK;
}

static mz_code lrmoe_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                          void **out, mz_policy_traits *traits, mz_err *err) {
    const lrmoe_options *o = options;
    mz_code code = check_options(o, err);
    lrmoe_state *state = code == MZ_OK ? MZ_NEW(arena, lrmoe_state, 1) : NULL;
    if (!state)
        return code != MZ_OK ? code : mz_fail_nomem(err, "the state of a policy");
    state->o = *o;
    state->ranks = env->ranks;
    state->experts = env->experts;
    state->domains = env->domains;
    int32_t mains = mz_mains_per_rank(env->ranks, env->experts);
    state->slots = mains;
    if (o->placement != PLACE_STATIC) {
        code = mz_slots("lrmoe", env, o->slots, &state->slots, err);
        if (code != MZ_OK)
            return code;
    }
    state->extra = state->slots - mains;
    state->rule = mz_replicate_defaults();
    state->rule.whole_group = o->replicas == 1;
    int64_t H = env->hidden, I = env->intermediate, W = env->weight_bytes;
    bool resend = o->activations == 1;
    state->moves = (mz_replica_moves){.weight_bytes = W,
                                      .gradient_bytes = o->gradient == 1 ? 2 * W : W,
                                      .again = o->lifetime == 1,
                                      .relay = mz_largest_domain(env) > DIRECT_DOMAIN,
                                      .hide = MZ_HIDE_PACK,
                                      .hide_again = MZ_HIDE_LAYERS,
                                      .hide_gradients = MZ_HIDE_LAYERS};
    state->row_memory = 4 * H + 6 * I + (resend ? 2 * H + 6 * I : 0);
    state->row_flops = (resend ? 16 : 12) * H * I;
    state->token_bytes = env->token_bytes;
    state->slot_bytes = W + state->moves.gradient_bytes;
    *out = state;
    code = make_parts(state, env, arena, err);
    if (code == MZ_OK)
        *traits = traits_of(state, env);
    return code;
}

/* ---- decide: placement
 * -------------------------------------------------------------------------*/

static mz_code place(lrmoe_state *state, const mz_view *view, int32_t extra, mz_plan *plan,
                     mz_err *err) {
    if (state->o.placement != PLACE_SYMI)
        return mz_replicate_plan(state->replicate, &state->rule,
                                 state->o.placement == PLACE_STATIC ? 0 : extra,
                                 view->current->total, plan, err);
    const int64_t *popularity = view->history ? view->history->total : state->equal;
    mz_symi_counts(popularity, state->experts, state->slots * state->ranks, state->count,
                   state->diff);
    return mz_symi_place(state->count, state->slots, plan, err);
}

static mz_code take_hosts(lrmoe_state *state, const mz_plan *plan, mz_err *err) {
    return mz_balance_hosts(state->balance, plan->ranks, plan->experts, plan->begin, plan->rank,
                            err);
}

/* Rows of each instance whose source is its rank, and its domain, when quota[e] of n_e pairs stay;
 * only for experts with a choice. */
static void wishes(lrmoe_state *state, const mz_load *load, const mz_plan *plan,
                   const int64_t *quota) {
    for (int32_t e = 0; e < plan->experts; e++) {
        int32_t first = plan->begin[e], last = plan->begin[e + 1];
        if (last - first < 2)
            continue;
        double part = load->total[e] > 0 ? (double)quota[e] / (double)load->total[e] : 0;
        for (int32_t i = first; i < last; i++) {
            int32_t r = plan->rank[i];
            bool again = i > first && plan->rank[i - 1] == r; /* same rank: its rows are taken */
            int64_t own = load->count[(int64_t)r * plan->experts + e];
            int64_t around = 0;
            for (int32_t s = 0; s < plan->ranks && state->domains > 1; s++)
                if (state->domain[s] == state->domain[r])
                    around += load->count[(int64_t)s * plan->experts + e];
            state->local[i] = again ? 0 : (int64_t)((double)own * part);
            state->near[i] = (int64_t)((double)around * part);
        }
    }
}

static mz_code spread(lrmoe_state *state, const mz_load *load, const mz_plan *plan,
                      const int64_t *quota, const int64_t *limit, int64_t *x, int64_t *peak,
                      mz_err *err) {
    wishes(state, load, plan, quota);
    return mz_balance_spread(state->balance, quota, NULL, limit, state->local,
                             state->domains > 1 ? state->near : NULL, x, peak, err);
}

/* ---- decide: budgets
 * ---------------------------------------------------------------------------*/

static void lower(int64_t *limit, double value) {
    int64_t rows = value < 9e18 ? (int64_t)value : INT64_MAX;
    if (*limit < 0 || rows < *limit)
        *limit = rows;
}

/* The limits of this call; caps go to state->cap. Which one is tightest is for the reader of `why`.
 */
static mz_limits limits_of(lrmoe_state *state, const mz_view *view) {
    const lrmoe_options *o = &state->o;
    const mz_budget *b = o->keep > 0 ? NULL : view->budget;
    mz_limits l = {
        .total = -1, .send = -1, .rows_min = o->rows_min, .any_source = o->scope == SCOPE_GLOBAL};
    bool per_rank = b && b->rank_rows; /* backward_rows is then no more than the least of them */
    int64_t rows = b && !per_rank && b->backward_rows >= 0 ? b->backward_rows : -1;
    if (o->keep > 0)
        l.total = (int64_t)(o->keep * (double)view->current->pairs + 1e-9);
    if (o->rows > 0)
        lower(&rows, (double)o->rows);
    if (o->memory > 0)
        lower(&rows, o->memory / (double)state->row_memory);
    if (o->time > 0)
        lower(&rows, o->time * o->flops / (double)state->row_flops);
    if (b && b->backward_send_rows >= 0)
        l.send = b->backward_send_rows;
    if (o->network > 0) {
        double returned = o->network / (double)state->token_bytes;
        lower(&rows, returned);
        lower(&l.send, o->activations == 1 ? returned / 2 : returned);
    }
    for (int32_t r = 0; r < state->ranks; r++) {
        int64_t cap = rows;
        if (per_rank && b->rank_rows[r] >= 0 && (cap < 0 || b->rank_rows[r] < cap))
            cap = b->rank_rows[r];
        state->cap[r] = cap < 0 || cap > INT64_MAX / 4 ? INT64_MAX / 4 : cap;
    }
    if (rows >= 0 || per_rank)
        l.cap = state->cap;
    return l;
}

static void explain(const lrmoe_state *state, const mz_limits *l, const char *rule, bool fits,
                    int64_t level, mz_plan *plan) {
    int64_t cap = l->cap ? l->cap[0] : -1;
    for (int32_t r = 0; l->cap && r < state->ranks; r++)
        cap = l->cap[r] < cap ? l->cap[r] : cap;
    char text[3][48] = {"", "", ""};
    if (l->total >= 0)
        snprintf(text[0], sizeof text[0], " at most %lld pairs;", (long long)l->total);
    if (cap >= 0)
        snprintf(text[1], sizeof text[1], " %lld rows on the tightest rank;", (long long)cap);
    if (l->send >= 0)
        snprintf(text[2], sizeof text[2], " %lld rows sent per source;", (long long)l->send);
    snprintf(plan->why, sizeof plan->why, "%s%s:%s%s%s largest quota %lld",
             fits ? "" : "OVER BUDGET, even the smallest quotas do not fit; ", rule, text[0],
             text[1], text[2], (long long)level);
    plan->over_budget = !fits;
}

/* ---- decide: quotas
 * ----------------------------------------------------------------------------*/

static int64_t largest(const int64_t *q, int32_t n) {
    int64_t most = 0;
    for (int32_t e = 0; e < n; e++)
        most = q[e] > most ? q[e] : most;
    return most;
}

/* One rule on the hosts that the balance holds; *value ranks results for `joint`. */
static bool apply_rule(lrmoe_state *state, const mz_view *view, const mz_plan *plan,
                       const mz_limits *l, int64_t *q, double *value) {
    const mz_load *load = view->current;
    double bin_value[MZ_SCORE_BINS];
    const uint32_t *histogram = mz_select_histogram(state->select, view->layer, bin_value);
    int64_t level;
    bool fits;
    if (state->o.quota == QUOTA_RATIO)
        return mz_quota_ratio(&state->quota, state->balance, plan, load, l, q);
    if (state->o.quota != QUOTA_WATERFILL && histogram)
        return mz_quota_value(&state->quota, state->balance, plan, load, l, histogram, bin_value, q,
                              value);
    fits = mz_quota_waterfill(&state->quota, state->balance, plan, load, l, q, &level);
    *value = 0;
    for (int32_t e = 0; e < plan->experts; e++)
        *value += (double)q[e];
    return fits;
}

/* Caps when slots that stay empty give their memory to rows. */
static void trade_slots(lrmoe_state *state, const mz_plan *plan, const mz_limits *l) {
    int64_t rows = state->slot_bytes / (state->row_memory > 0 ? state->row_memory : 1);
    for (int32_t r = 0; r < state->ranks; r++)
        state->joint_cap[r] = l->cap[r] + state->extra * rows;
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e] + 1; i < plan->begin[e + 1]; i++)
            state->joint_cap[plan->rank[i]] -= rows;
}

/* Tries every number of replicas per rank, most first, so that of equal ones the most balanced
 * stays, and leaves the best one's hosts in the plan and its quotas in plan->quota. */
static mz_code decide_joint(lrmoe_state *state, const mz_view *view, mz_limits *l, mz_plan *plan,
                            bool *fits, mz_err *err) {
    int32_t best = -1;
    double best_value = 0;
    *fits = false;
    for (int32_t n = state->extra; n >= 0; n--) {
        double value = 0;
        mz_code code = place(state, view, n, plan, err);
        if (code == MZ_OK)
            code = take_hosts(state, plan, err);
        if (code != MZ_OK)
            return code;
        trade_slots(state, plan, l);
        mz_limits trial = *l;
        trial.cap = state->joint_cap;
        bool ok = apply_rule(state, view, plan, &trial, plan->quota, &value);
        if (best < 0 || (ok && !*fits) || (ok == *fits && value > best_value)) {
            best = n;
            best_value = value;
            *fits = ok;
            memcpy(state->best, plan->quota, sizeof(int64_t) * (size_t)plan->experts);
        }
    }
    mz_code code = place(state, view, best, plan, err);
    if (code == MZ_OK)
        code = take_hosts(state, plan, err);
    trade_slots(state, plan, l);
    l->cap = state->joint_cap;
    memcpy(plan->quota, state->best, sizeof(int64_t) * (size_t)plan->experts);
    return code;
}

static mz_code decide_quotas(lrmoe_state *state, const mz_view *view, mz_limits *l, mz_plan *plan,
                             mz_err *err) {
    static const char *const rule[] = {"waterfill", "ratio", "value", "joint"};
    const mz_load *load = view->current;
    bool full = state->o.quota == QUOTA_NONE || view->step < state->o.start;
    *l = (mz_limits){.total = -1, .send = -1};
    if (!full)
        *l = limits_of(state, view);
    full = full || (l->total < 0 && !l->cap && l->send < 0);
    bool fits = true;
    memcpy(plan->quota, load->total, sizeof(int64_t) * (size_t)plan->experts);
    if (!full && state->o.quota == QUOTA_JOINT && l->cap && state->o.placement == PLACE_ULTRAEP) {
        mz_code code = decide_joint(state, view, l, plan, &fits, err);
        if (code != MZ_OK)
            return code;
    } else if (!full) {
        double value = 0;
        if (!mz_quota_fits(&state->quota, state->balance, plan, load, l, load->total))
            fits = apply_rule(state, view, plan, l, plan->quota, &value);
    }
    for (int32_t e = 0; e < plan->experts; e++)
        plan->has_backward = plan->has_backward || plan->quota[e] < load->total[e];
    if (plan->has_backward || !fits)
        explain(state, l, rule[state->o.quota], fits, largest(plan->quota, plan->experts), plan);
    else
        snprintf(plan->why, sizeof plan->why, "every pair stays in backward");
    return MZ_OK;
}

/* Would backward on forward's own spread go beyond a cap? Shares rounded per source can exceed an
 * instance's target by less than one row per source. */
static bool forward_exceeds(lrmoe_state *state, const mz_limits *l, const mz_plan *plan) {
    int64_t *rows = state->sent;
    memset(rows, 0, sizeof(int64_t) * (size_t)plan->ranks);
    for (int32_t e = 0; e < plan->experts; e++) {
        int64_t slack = plan->begin[e + 1] - plan->begin[e] > 1 ? plan->ranks : 0;
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            rows[plan->rank[i]] += plan->target[i] + slack;
    }
    for (int32_t r = 0; r < plan->ranks; r++)
        if (rows[r] > l->cap[r])
            return true;
    return false;
}

static mz_code lrmoe_moves(lrmoe_state *state, const mz_view *view, mz_plan *plan, mz_err *err) {
    if (state->o.placement == PLACE_ULTRAEP)
        return mz_plan_replica_moves(plan, &state->moves, state->sent, err);
    if (state->o.placement == PLACE_SYMI && view->micro_batch == 0)
        return mz_symi_moves(plan, state->moves.weight_bytes, state->moves.gradient_bytes, err);
    return MZ_OK;
}

static mz_code lrmoe_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    lrmoe_state *state = self;
    const mz_load *load = view->current;
    mz_limits l;
    mz_plan_reset(plan);
    mz_code code = place(state, view, state->extra, plan, err);
    if (code == MZ_OK)
        code = take_hosts(state, plan, err);
    if (code == MZ_OK)
        code = decide_quotas(state, view, &l, plan, err);
    if (code == MZ_OK && (state->o.forward == FORWARD_EXACT || state->o.placement == PLACE_SYMI))
        code = spread(state, load, plan, load->total, NULL, plan->target, &plan->peak_forward, err);
    if (code == MZ_OK && l.cap && !plan->over_budget && !plan->has_backward &&
        forward_exceeds(state, &l, plan)) {
        plan->has_backward = true;
        snprintf(plan->why, sizeof plan->why,
                 "every pair stays in backward, spread anew under the ranks' caps");
    }
    if (code == MZ_OK && plan->has_backward)
        code = spread(state, load, plan, plan->quota, plan->over_budget ? NULL : l.cap,
                      plan->backward, &plan->peak_backward, err);
    return code == MZ_OK ? lrmoe_moves(state, view, plan, err) : code;
}

/* ---- route
 * -------------------------------------------------------------------------------------*/

/* kept[s][e]: the sources' largest-remainder shares of each quota. COLUMNS experts at a time: one
 * cache line of a source's row. */
static void share_quotas(lrmoe_state *state, const mz_load *load, mz_plan *plan) {
    int32_t E = plan->experts, R = plan->ranks;
    memcpy(plan->kept, load->count, sizeof(int64_t) * (size_t)R * (size_t)E);
    for (int32_t e0 = 0; e0 < E; e0 += COLUMNS) {
        int32_t columns = E - e0 < COLUMNS ? E - e0 : COLUMNS;
        for (int32_t s = 0; s < R; s++)
            for (int32_t c = 0; c < columns; c++)
                state->column[c * R + s] = plan->kept[(int64_t)s * E + e0 + c];
        for (int32_t c = 0; c < columns; c++)
            if (plan->quota[e0 + c] < load->total[e0 + c])
                mz_largest_remainder(plan->quota[e0 + c], state->column + c * R, R,
                                     state->column + c * R, state->word);
        for (int32_t s = 0; s < R; s++)
            for (int32_t c = 0; c < columns; c++)
                plan->kept[(int64_t)s * E + e0 + c] = state->column[c * R + s];
    }
}

/* Selection over all sources says how many pairs each keeps. */
static bool plans_by_scores(const lrmoe_state *state) {
    return state->o.scope == SCOPE_GLOBAL || sees_scores(&state->o);
}

static mz_code sum_scores(lrmoe_state *state, const mz_call *call, mz_plan *plan, mz_err *err) {
    if (state->o.quota == QUOTA_NONE || !mz_select_possible(call->pairs))
        return MZ_OK;
    return mz_select_run(state->select, call, plan, NULL, err);
}

static mz_code lrmoe_account(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    lrmoe_state *state = self;
    return plans_by_scores(state) ? MZ_OK : sum_scores(state, call, plan, err);
}

static mz_code lrmoe_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    lrmoe_state *state = self;
    const mz_load *load = call->load;
    plan->pairs = load->pairs;
    plan->kept_pairs = 0;
    for (int32_t e = 0; e < plan->experts; e++)
        plan->kept_pairs += plan->quota[e];
    if (plan->has_backward)
        share_quotas(state, load, plan);
    mz_code code = MZ_OK;
    if (plans_by_scores(state))
        code = sum_scores(state, call, plan, err);
    bool exact = state->o.forward == FORWARD_EXACT || state->o.placement != PLACE_ULTRAEP;
    if (code == MZ_OK)
        code = mz_expand_rows(state->expand, plan, load->count, NULL, plan->target,
                              exact ? MZ_SPREAD_EXACT : MZ_SPREAD_SHARE_LOCAL,
                              mz_plan_forward_entries(plan), err);
    if (code == MZ_OK && plan->has_backward)
        code = mz_expand_rows(state->expand, plan, plan->kept, NULL, plan->backward,
                              MZ_SPREAD_EXACT, mz_plan_backward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_lrmoe = {
    .name = "lrmoe",
    .summary = "LRMoE (our reading): full forward, quotas on the pairs of backward, replicas",
    .options = lrmoe_table,
    .option_count = sizeof lrmoe_table / sizeof *lrmoe_table,
    .options_size = sizeof(lrmoe_options),
    .init = lrmoe_init,
    .decide = lrmoe_decide,
    .route = lrmoe_route,
    .account = lrmoe_account,
};
