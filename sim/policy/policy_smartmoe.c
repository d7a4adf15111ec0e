/* smartmoe: which rank holds which experts follows past load; no replicas (balancing-systems.md
 * 6.5).
 *
 * Source: SmartMoE, ATC'23, its online part; its repository has no planner. Sees history: the mean
 * of `window` steps that ended `lag` steps ago; decides every `interval` steps. Training starts
 * with block mains. At most ceil(E/R) experts a rank, least rows on the busiest one. mode greedy:
 * experts by load, each to the least loaded rank with room. exact: dynamic programme over subsets,
 * at most 16 experts (its table has 2^E entries). hybrid: greedy to groups of consecutive ranks,
 * exact inside each; the groups are the largest whose experts fit that table.
 * The new placement is taken when what it gains until the next decision exceeds what the switch
 * costs: gain = rows that the busiest rank loses x interval x (3 expert products + 4 all-to-alls of
 * one row), cost = bytes that the busiest rank sends or receives over its links. Without a model's
 * times (pair_seconds 0) every gain is taken, and so is the first placement, which moves nothing.
 * variant mindspeed (Ascend): greedy or other mode on a moving average of the counts, one update
 * per decision, taken when the coefficient of variation of the ranks' loads falls by `cv` or more.
 * Moves: `bytes` per parameter of each expert that changes its rank (weights 2, master weights and
 * moments 12; 18 with SYMI's accounting) after the step that decided it, blocking. Gradients and
 * optimizer state live with the expert, so nothing else moves.
 * Options and the source's values: mode greedy, interval 10, lag 1, window (the interval; "recent
 * counts"), bytes 14, variant paper, theta 0.9, cv 0.08. Departures: the paper's threshold of the
 * switch is not published; its offline search over parallel strategies is not part of a placement;
 * where R does not divide E any rank may hold ceil(E/R). */
#include "sim/policy/parts.h"

#include <math.h>
#include <string.h>

enum { EXACT_EXPERTS = 16 };

typedef struct smartmoe_options {
    int64_t lag, window, interval;
    double bytes, theta, cv;
    int mode, variant;
} smartmoe_options;

enum { MODE_GREEDY, MODE_EXACT, MODE_HYBRID };

static const mz_opt smartmoe_table[] = {
    {"mode", 0, MZ_OPT_ENUM, offsetof(smartmoe_options, mode), "greedy", "greedy|exact|hybrid",
     "how experts are assigned to ranks", 0, 0, MZ_UNIT_NONE},
    {"lag", 0, MZ_OPT_INT, offsetof(smartmoe_options, lag), "1", "STEPS",
     "age of the newest step seen", 1, 1e6, MZ_UNIT_NONE},
    {"window", 0, MZ_OPT_INT, offsetof(smartmoe_options, window), "0", "STEPS",
     "steps averaged; 0: as many as the interval", 0, 1e6, MZ_UNIT_NONE},
    {"interval", 0, MZ_OPT_INT, offsetof(smartmoe_options, interval), "10", "STEPS",
     "steps between decisions", 1, 1e6, MZ_UNIT_NONE},
    {"bytes", 0, MZ_OPT_REAL, offsetof(smartmoe_options, bytes), "14", "B",
     "bytes per parameter of an expert that moves", 0, 1e3, MZ_UNIT_NONE},
    {"variant", 0, MZ_OPT_ENUM, offsetof(smartmoe_options, variant), "paper", "paper|mindspeed",
     "when a placement is taken: gain above cost, or variation falls by cv", 0, 0, MZ_UNIT_NONE},
    {"theta", 0, MZ_OPT_REAL, offsetof(smartmoe_options, theta), "0.9", "X",
     "mindspeed: weight of the past in the moving average", 0, 1, MZ_UNIT_NONE},
    {"cv", 0, MZ_OPT_REAL, offsetof(smartmoe_options, cv), "0.08", "X",
     "mindspeed: least fall of the coefficient of variation", 0, 1e3, MZ_UNIT_NONE},
};

/* Least peak of n experts on at most `devices` ranks of `cap` experts. best[k][set]: of the experts
 * in set on k ranks. Ranks are alike, so the k-th may be taken to hold the lowest expert left. */
typedef struct subsets {
    int32_t n, cap;
    double load[EXACT_EXPERTS];
    double *best, *former; /* [2^16] of this and the former number of ranks */
    uint16_t *choice;      /* [min(R, 16)][2^16] what the k-th rank takes */
    int32_t fewest, most;  /* experts that may be left for the former ranks */
    uint32_t left;         /* the set being solved */
    double least;
    uint32_t taken;
} subsets;

typedef struct smartmoe_state {
    int32_t ranks, experts, interval;
    int32_t groups, cap; /* groups of consecutive ranks, 0: greedy; experts per rank */
    bool mindspeed;
    double theta, cv;
    double row_seconds, inside_s, outside_s; /* of one row; seconds per byte */
    int64_t expert_bytes;
    int32_t *domain, *mains;           /* [R], [E] */
    int32_t *fresh, *bin, *place;      /* [E] candidate ranks; packing */
    int32_t *room, *member;            /* [R], [16] */
    double *load, *average;            /* [E], [layers][E] moving averages */
    bool *averaged;                    /* [layers] */
    double *old_rank, *new_rank;       /* [R] loads */
    double *sent, *received, *carried; /* [R] seconds; packing */
    mz_pack *pack;
    subsets exact;
    mz_placement *placement;
    mz_expand *expand;
} smartmoe_state;

/* ---- assignment --------------------------------------------------------------------------------
 */

/* Considers `set`, whose load is `load`, and every larger one with up to `more` experts of `rest`,
 * which holds n. `others` experts of those left are not in set. */
static void try_sets(subsets *x, uint32_t set, double load, int32_t others, uint32_t rest,
                     int32_t n, int32_t more) {
    if (load >= x->least)
        return;
    if (others >= x->fewest && others <= x->most) {
        const double former = x->former[x->left & ~set];
        const double peak = load > former ? load : former;
        if (peak < x->least) {
            x->least = peak;
            x->taken = set;
        }
    }
    for (; more > 0 && n > 0 && others - (more < n ? more : n) <= x->most; n--) {
        const int e = __builtin_ctz(rest);
        rest &= rest - 1;
        try_sets(x, set | 1U << e, load + x->load[e], others - 1, rest, n - 1, more - 1);
    }
}

/* taken[k] for k = devices-1 down to 0; sets of one rank each, the first holds the lowest expert.
 */
static void solve_subsets(subsets *x, int32_t devices, uint16_t *taken) {
    const uint32_t all = (1U << x->n) - 1;
    devices = devices < x->n ? devices : x->n;
    for (uint32_t set = 0; set <= all; set++)
        x->best[set] = set == 0 ? 0 : INFINITY;
    for (int32_t k = 1; k <= devices; k++) {
        double *t = x->best;
        x->best = x->former;
        x->former = t;
        x->fewest = x->n - (devices - k + 1) * x->cap;
        x->most = (k - 1) * x->cap;
        for (x->left = 0; x->left <= all; x->left++) {
            const int32_t size = __builtin_popcount(x->left);
            x->least = x->left == 0 ? 0 : INFINITY;
            x->taken = 0;
            if (x->left != 0 && size <= k * x->cap && size >= x->n - (devices - k) * x->cap) {
                const int e = __builtin_ctz(x->left);
                try_sets(x, 1U << e, x->load[e], size - 1, x->left & (x->left - 1), size - 1,
                         x->cap - 1);
            }
            x->best[x->left] = x->least;
            x->choice[((uint32_t)(k - 1) << EXACT_EXPERTS) + x->left] = (uint16_t)x->taken;
        }
    }
    uint32_t left = all;
    for (int32_t k = devices; k > 0; k--) {
        const uint16_t set = x->choice[((uint32_t)(k - 1) << EXACT_EXPERTS) + left];
        taken[devices - k] = set;
        left &= ~(uint32_t)set;
    }
}

/* Experts with bin[e] = group on the group's ranks, exactly. */
static void assign_group(smartmoe_state *s, int32_t group) {
    const int32_t size = s->ranks / s->groups, first = group * size;
    subsets *x = &s->exact;
    x->n = 0;
    x->cap = s->cap;
    for (int32_t e = 0; e < s->experts; e++)
        if (s->bin[e] == group) {
            s->fresh[e] = first;
            if (size == 1)
                continue;
            s->member[x->n] = e;
            x->load[x->n++] = s->load[e];
        }
    if (x->n == 0)
        return;
    uint16_t taken[EXACT_EXPERTS];
    solve_subsets(x, size, taken);
    for (int32_t k = 0; k < size && k < x->n; k++)
        for (int32_t i = 0; i < x->n; i++)
            if (taken[k] >> i & 1)
                s->fresh[s->member[i]] = first + k;
}

/* Fills fresh from load. */
static mz_code assign(smartmoe_state *s, mz_err *err) {
    const int32_t bins = s->groups > 0 ? s->groups : s->ranks;
    for (int32_t b = 0; b < bins; b++) {
        s->room[b] = s->cap * (s->ranks / bins);
        s->carried[b] = 0;
    }
    mz_code code = mz_pack_lpt(s->pack, s->load, s->experts, s->room, s->carried, bins,
                               s->groups > 0 ? s->bin : s->fresh, s->place, err);
    for (int32_t g = 0; code == MZ_OK && g < s->groups; g++)
        assign_group(s, g);
    return code;
}

/* ---- the switch --------------------------------------------------------------------------------
 */

/* Loads of the ranks; returns the largest. */
static double rank_loads(const smartmoe_state *s, const int32_t *rank, double *load) {
    double peak = 0;
    memset(load, 0, sizeof(double) * (size_t)s->ranks);
    for (int32_t e = 0; e < s->experts; e++)
        load[rank[e]] += s->load[e];
    for (int32_t r = 0; r < s->ranks; r++)
        peak = load[r] > peak ? load[r] : peak;
    return peak;
}

/* Standard deviation over mean. */
static double variation(const double *load, int32_t n) {
    double sum = 0, squares = 0;
    for (int32_t r = 0; r < n; r++)
        sum += load[r];
    const double mean = sum / n;
    for (int32_t r = 0; r < n; r++)
        squares += (load[r] - mean) * (load[r] - mean);
    return sum > 0 ? sqrt(squares / n) / mean : 0;
}

/* Seconds of the busiest rank. */
static double switch_seconds(smartmoe_state *s, const int32_t *from, const int32_t *to) {
    memset(s->sent, 0, sizeof(double) * (size_t)s->ranks);
    memset(s->received, 0, sizeof(double) * (size_t)s->ranks);
    for (int32_t e = 0; e < s->experts; e++) {
        if (from[e] == to[e])
            continue;
        const bool inside = s->domain[from[e]] == s->domain[to[e]];
        const double seconds = (double)s->expert_bytes * (inside ? s->inside_s : s->outside_s);
        s->sent[from[e]] += seconds;
        s->received[to[e]] += seconds;
    }
    double most = 0;
    for (int32_t r = 0; r < s->ranks; r++)
        most = fmax(most, fmax(s->sent[r], s->received[r]));
    return most;
}

/* Is the candidate worth it? `free`: the first placement, which moves nothing. */
static bool worth(smartmoe_state *s, const int32_t *now, bool free, mz_plan *plan) {
    const double old_peak = rank_loads(s, now, s->old_rank);
    const double new_peak = rank_loads(s, s->fresh, s->new_rank);
    bool take;
    if (s->mindspeed) {
        const double a = variation(s->old_rank, s->ranks), b = variation(s->new_rank, s->ranks);
        take = a - b >= s->cv;
        snprintf(plan->why, sizeof plan->why, "%s: variation %.3f, candidate %.3f",
                 take ? "switched" : "kept", a, b);
        return take;
    }
    const double cost = free || s->row_seconds == 0 ? 0 : switch_seconds(s, now, s->fresh);
    const double row = s->row_seconds == 0 ? 1 : s->row_seconds;
    const double gain = (old_peak - new_peak) * row * s->interval;
    take = gain > cost;
    snprintf(plan->why, sizeof plan->why, "%s: busiest rank %.0f rows, candidate %.0f",
             take ? "switched" : "kept", old_peak, new_peak);
    return take;
}

/* The loads to plan on: the history, or its moving average. */
static void see(smartmoe_state *s, const mz_load *history, int32_t layer) {
    double *average = s->average + (int64_t)layer * s->experts;
    const double theta = s->averaged[layer] ? s->theta : 0;
    for (int32_t e = 0; e < s->experts; e++) {
        s->load[e] = (double)history->total[e];
        if (s->mindspeed)
            s->load[e] = average[e] = theta * average[e] + (1 - theta) * s->load[e];
    }
    s->averaged[layer] = true;
}

/* ---- the policy --------------------------------------------------------------------------------
 */

/* Groups for the exact stage: as few as the table allows. */
static mz_code choose_groups(smartmoe_state *s, int mode, mz_err *err) {
    s->groups = 0;
    if (mode == MODE_EXACT && s->experts > EXACT_EXPERTS)
        return mz_fail(err, MZ_EINPUT,
                       "policy smartmoe: mode=exact takes at most %d experts, here are %d; give "
                       "mode=hybrid",
                       EXACT_EXPERTS, s->experts);
    if (mode == MODE_EXACT)
        s->groups = 1;
    if (mode == MODE_HYBRID)
        for (s->groups = 1; s->groups < s->ranks; s->groups++)
            if (s->ranks % s->groups == 0 &&
                (int64_t)s->cap * (s->ranks / s->groups) <= EXACT_EXPERTS)
                break;
    return MZ_OK;
}

static bool allocate(smartmoe_state *s, const mz_policy_env *env, mz_arena *arena) {
    const int64_t R = env->ranks, E = env->experts;
    s->mains = MZ_NEW(arena, int32_t, E);
    s->fresh = MZ_NEW(arena, int32_t, E);
    s->bin = MZ_NEW(arena, int32_t, E);
    s->place = MZ_NEW(arena, int32_t, E);
    s->room = MZ_NEW(arena, int32_t, R);
    s->member = MZ_NEW(arena, int32_t, EXACT_EXPERTS);
    s->load = MZ_NEW(arena, double, E);
    s->average = MZ_NEW(arena, double, E * env->layers);
    s->averaged = MZ_NEW(arena, bool, env->layers);
    s->old_rank = MZ_NEW(arena, double, R);
    s->new_rank = MZ_NEW(arena, double, R);
    s->sent = MZ_NEW(arena, double, R);
    s->received = MZ_NEW(arena, double, R);
    s->carried = MZ_NEW(arena, double, R);
    if (!s->mains || !s->fresh || !s->bin || !s->place || !s->room || !s->member || !s->load ||
        !s->average || !s->averaged || !s->old_rank || !s->new_rank || !s->sent || !s->received ||
        !s->carried)
        return false;
    if (s->groups == 0 || s->groups == s->ranks)
        return true;
    const int32_t devices =
        s->ranks / s->groups < EXACT_EXPERTS ? s->ranks / s->groups : EXACT_EXPERTS;
    s->exact.best = MZ_NEW(arena, double, 1 << EXACT_EXPERTS);
    s->exact.former = MZ_NEW(arena, double, 1 << EXACT_EXPERTS);
    s->exact.choice = MZ_NEW(arena, uint16_t, (int64_t)devices << EXACT_EXPERTS);
    return s->exact.best && s->exact.former && s->exact.choice;
}

static mz_code smartmoe_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                             void **out, mz_policy_traits *traits, mz_err *err) {
    const smartmoe_options *o = options;
    smartmoe_state *s = MZ_NEW(arena, smartmoe_state, 1);
    if (!s)
        return mz_fail_nomem(err, "the state of a policy");
    s->ranks = env->ranks;
    s->experts = env->experts;
    s->interval = (int32_t)o->interval;
    s->cap = mz_mains_per_rank(env->ranks, env->experts);
    s->mindspeed = o->variant == 1;
    s->theta = o->theta;
    s->cv = o->cv;
    s->inside_s = env->inside_bytes_s > 0 ? 1 / env->inside_bytes_s : 0;
    s->outside_s = env->outside_bytes_s > 0 ? 1 / env->outside_bytes_s : 0;
    if (env->pair_seconds > 0)
        s->row_seconds =
            3 * env->pair_seconds +
            4 * (double)env->token_bytes * (env->domains > 1 ? s->outside_s : s->inside_s);
    s->expert_bytes = mz_rows_up(o->bytes * (double)env->expert_parameters);
    mz_code code = choose_groups(s, o->mode, err);
    if (code == MZ_OK && !allocate(s, env, arena))
        code = mz_fail_nomem(err, "the state of a policy");
    if (code != MZ_OK)
        return code;
    mz_layout_mains(env->ranks, env->experts, s->mains);
    *traits = (mz_policy_traits){.sees = MZ_SEES_HISTORY,
                                 .lag = (int32_t)o->lag,
                                 .window = (int32_t)(o->window > 0 ? o->window : o->interval),
                                 .interval = s->interval,
                                 .slots = s->cap,
                                 .score_source = ""};
    *out = s;
    code = mz_copy_domains(env, arena, &s->domain, err);
    if (code == MZ_OK)
        code = mz_pack_create(arena, env->experts, env->ranks, &s->pack, err);
    if (code == MZ_OK)
        code = mz_placement_create(arena, env, s->cap, &s->placement, err);
    return code == MZ_OK ? mz_expand_create(arena, env, 1, &s->expand, err) : code;
}

static mz_code smartmoe_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    smartmoe_state *s = self;
    const int32_t *begin, *known = mz_placement_hosts(s->placement, view->layer, &begin);
    const int32_t *rank = known ? known : s->mains;
    char why[sizeof plan->why];
    mz_plan_reset(plan);
    if (view->micro_batch == 0 && view->history) {
        see(s, view->history, view->layer);
        mz_code code = assign(s, err);
        if (code != MZ_OK)
            return code;
        if (worth(s, rank, !known, plan))
            rank = s->fresh;
    }
    memcpy(why, plan->why, sizeof why);
    mz_plan_mains(plan, rank);
    int32_t moved;
    mz_code code = mz_placement_change(s->placement, view->layer, s->expert_bytes, 0, MZ_MOVE_STEP,
                                       MZ_HIDE_NOTHING, plan, &moved, err);
    snprintf(plan->why, sizeof plan->why, "%.200s; %d experts moved", why[0] ? why : "no history",
             moved);
    return code;
}

static mz_code smartmoe_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    smartmoe_state *s = self;
    mz_plan_lossless(plan, call->load);
    mz_code code = mz_expand_rows(s->expand, plan, call->load->count, NULL, plan->target,
                                  MZ_SPREAD_EXACT, mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_smartmoe = {
    .name = "smartmoe",
    .summary = "moves experts between ranks after past load where the gain exceeds the cost",
    .options = smartmoe_table,
    .option_count = sizeof smartmoe_table / sizeof *smartmoe_table,
    .options_size = sizeof(smartmoe_options),
    .init = smartmoe_init,
    .decide = smartmoe_decide,
    .route = smartmoe_route,
};
