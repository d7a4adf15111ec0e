/* finemoe: every expert on d ranks or more, and the least possible peak of each call by routing
 * alone (balancing-systems.md 11, FineMoE / MicroMoE).
 *
 * Source: FineMoE (MicroMoE), arXiv 2511.16947. Merging d expert-parallel groups gives every expert
 * d hosts. decide sees history, the mean of `window` steps that ended `lag` steps ago, and runs
 * every `interval` steps; route sees the exact counts and runs at every call: pairs are split over
 * the hosts so that the busiest rank has as few rows as these hosts allow (the linear programme,
 * solved exactly in whole rows as a maximum flow), rows whose source hosts their expert first.
 * Placements: symmetric, before there is history and with placement=symmetric: rank g's j-th block
 * expert lies on g, g+s_j, ..., g+(d-1)s_j mod R, a Cayley graph of Z_R with the generators s_j in
 * geometric progression up to R/2; experts beyond R*floor(E/R) go to the d emptiest ranks.
 * Adaptive: replica counts by largest load per replica over all slots, at most R, and the best of
 * `samples` random placements, judged by the largest density of an induced set of ranks (rows of
 * experts hosted in the set alone, over its size), which is the flow's peak. It is taken when its
 * peak on the history is below that of the placement there is.
 * Moves: gradients of all replicas are all-reduced over their hosts (ring) once per step under the
 * work of other layers; replicas have optimizer state. A new host costs `bytes` per parameter
 * (weights 2, optimizer 16), blocking.
 * Options and the source's values: d 2, slots (as d needs), placement adaptive, samples 32 (its
 * Monte-Carlo constants were not seen), seed (the run's), lag 1, window 10 (a moving average),
 * interval 50 ("about"), bytes 18. Departures: generators and samples are ours; the first sample
 * packs replicas by load instead of at random; the source warm-starts a general solver. */
#include "common/base/rng.h"
#include "sim/policy/parts.h"

#include <math.h>
#include <string.h>

typedef struct finemoe_options {
    int64_t hosts, slots, samples, seed, lag, window, interval;
    double bytes;
    int placement;
} finemoe_options;

enum { PLACEMENT_ADAPTIVE, PLACEMENT_SYMMETRIC };

static const mz_opt finemoe_table[] = {
    {"d", 0, MZ_OPT_INT, offsetof(finemoe_options, hosts), "2", "N",
     "hosts of every expert in the symmetric placement", 1, 64, MZ_UNIT_NONE},
    {"slots", 0, MZ_OPT_INT, offsetof(finemoe_options, slots), "0", "N",
     "expert slots per rank; 0: ceil(d*E/R)", 0, 1e6, MZ_UNIT_NONE},
    {"placement", 0, MZ_OPT_ENUM, offsetof(finemoe_options, placement), "adaptive",
     "adaptive|symmetric", "re-placed after past load, or symmetric for good", 0, 0, MZ_UNIT_NONE},
    {"samples", 0, MZ_OPT_INT, offsetof(finemoe_options, samples), "32", "N",
     "placements tried by each decision", 1, 1e6, MZ_UNIT_NONE},
    {"seed", 0, MZ_OPT_INT, offsetof(finemoe_options, seed), "0", "N",
     "of the placements tried; 0: the run's", 0, 9e15, MZ_UNIT_NONE},
    {"lag", 0, MZ_OPT_INT, offsetof(finemoe_options, lag), "1", "STEPS",
     "age of the newest step seen", 1, 1e6, MZ_UNIT_NONE},
    {"window", 0, MZ_OPT_INT, offsetof(finemoe_options, window), "10", "STEPS", "steps averaged", 1,
     1e6, MZ_UNIT_NONE},
    {"interval", 0, MZ_OPT_INT, offsetof(finemoe_options, interval), "50", "STEPS",
     "steps between placements", 1, 1e6, MZ_UNIT_NONE},
    {"bytes", 0, MZ_OPT_REAL, offsetof(finemoe_options, bytes), "18", "B",
     "bytes per parameter that a new host receives", 0, 1e3, MZ_UNIT_NONE},
};

/* Hosts of all experts, as in a plan. */
typedef struct hosts {
    int32_t *begin, *rank; /* [E+1], [slots] */
} hosts;

typedef struct finemoe_state {
    int32_t ranks, experts, slots; /* slots per rank */
    int32_t samples;
    uint64_t seed;
    bool adaptive;
    int64_t change_bytes, gradient_bytes;
    hosts symmetric, best, trial;
    int32_t *count;           /* [E] replicas */
    int32_t *order, *scratch; /* [E] experts by falling load per replica */
    int32_t *room, *holds;    /* [R] free slots; e + 1 where the rank hosts expert e */
    int64_t *load;            /* [E] */
    int64_t *local, *rows;    /* [slots of all ranks] */
    double *share, *carried;  /* [E], [R] */
    mz_pack *pack;
    mz_placement *placement;
    mz_balance *balance;
    mz_expand *expand;
} finemoe_state;

/* ---- symmetric placement -----------------------------------------------------------------------
 */

/* The next generator: in geometric progression up to R/2, larger than the last, and with d
 * different multiples; 1 where there is none left. */
static int32_t next_generator(int32_t ranks, int32_t d, int32_t j, int32_t mains, int32_t last) {
    int32_t s = (int32_t)(pow(ranks / 2.0, (double)j / mains) + 0.5);
    s = s > last ? s : last + 1;
    while (s <= ranks / 2 && ranks / mz_common_divisor(ranks, s) < d)
        s++;
    return s <= ranks / 2 ? s : 1;
}

/* The emptiest rank that does not host the expert, from `start` on; most room wins. */
static int32_t emptiest(const finemoe_state *s, int32_t expert, int32_t start) {
    int32_t best = -1;
    for (int32_t k = 0; k < s->ranks; k++) {
        const int32_t r = start + k < s->ranks ? start + k : start + k - s->ranks;
        if (s->holds[r] != expert + 1 && (best < 0 || s->room[r] > s->room[best]))
            best = r;
    }
    return best;
}

static void take(finemoe_state *s, int32_t expert, int32_t rank) {
    s->holds[rank] = expert + 1;
    s->room[rank]--;
}

static void clear(finemoe_state *s) {
    memset(s->holds, 0, sizeof(int32_t) * (size_t)s->ranks);
    for (int32_t r = 0; r < s->ranks; r++)
        s->room[r] = s->slots;
}

static void place_symmetric(finemoe_state *s, int32_t d) {
    const int32_t mains = s->experts / s->ranks;
    hosts *h = &s->symmetric;
    clear(s);
    for (int32_t e = 0; e < s->experts; e++)
        h->begin[e + 1] = (e + 1) * d;
    for (int32_t j = 0, step = 0; j < mains; j++) {
        step = next_generator(s->ranks, d, j, mains, step);
        for (int32_t g = 0; g < s->ranks; g++)
            for (int32_t i = 0; i < d; i++) {
                const int32_t r = (int32_t)((g + (int64_t)i * step) % s->ranks);
                h->rank[(g * mains + j) * d + i] = r;
                s->room[r]--;
            }
    }
    for (int32_t e = mains * s->ranks; e < s->experts; e++)
        for (int32_t i = 0; i < d; i++) {
            const int32_t r = emptiest(s, e, 0);
            h->rank[e * d + i] = r;
            take(s, e, r);
        }
}

/* ---- adaptive placement ------------------------------------------------------------------------
 */

/* Replica counts on all slots, none above R: what an expert cannot use goes to the others. */
static void count_replicas(finemoe_state *s, const int64_t *total) {
    int32_t capped = 0;
    memcpy(s->load, total, sizeof(int64_t) * (size_t)s->experts);
    memset(s->scratch, 0, sizeof(int32_t) * (size_t)s->experts); /* 1: has all ranks */
    for (int32_t more = 1; more > 0; capped += more) {
        more = 0;
        mz_pack_replicate(s->pack, s->load, s->experts,
                          s->slots * s->ranks - capped * (s->ranks - 1), s->count, NULL);
        for (int32_t e = 0; e < s->experts; e++)
            if (s->scratch[e] == 0 && s->count[e] > s->ranks && capped + more < s->experts) {
                s->scratch[e] = 1;
                s->load[e] = -1; /* behind those without load */
                more++;
            }
    }
    for (int32_t e = 0; e < s->experts; e++)
        if (s->scratch[e] == 1 || s->count[e] > s->ranks)
            s->count[e] = s->ranks;
}

/* The rank with room that carries least and does not host the expert; -1: none. */
static int32_t lightest(const finemoe_state *s, int32_t expert) {
    int32_t best = -1;
    for (int32_t r = 0; r < s->ranks; r++)
        if (s->holds[r] != expert + 1 && s->room[r] > 0 &&
            (best < 0 || s->carried[r] < s->carried[best]))
            best = r;
    return best;
}

/* Every expert in turn to the emptiest ranks, which fits whatever the order; among ranks equally
 * empty the first from a random one on. Without rng: heavy replicas first, each to the lightest
 * rank, which may end where only ranks that host the expert have room: false. */
static bool place_trial(finemoe_state *s, const int64_t *total, mz_rng *rng) {
    hosts *h = &s->trial;
    clear(s);
    memset(s->carried, 0, sizeof(double) * (size_t)s->ranks);
    for (int32_t e = 0; e < s->experts; e++) {
        s->share[e] = (double)total[e] / s->count[e];
        h->begin[e + 1] = h->begin[e] + s->count[e];
    }
    mz_order_falling(s->share, s->experts, s->order, s->scratch);
    for (int32_t k = 0; k < s->experts; k++) {
        const int32_t e = s->order[k];
        for (int32_t i = h->begin[e]; i < h->begin[e + 1]; i++) {
            const int32_t r = rng ? emptiest(s, e, (int32_t)mz_rng_below(rng, (uint64_t)s->ranks))
                                  : lightest(s, e);
            if (r < 0)
                return false;
            h->rank[i] = r;
            take(s, e, r);
            s->carried[r] += s->share[e];
        }
    }
    return true;
}

static mz_code peak_of(finemoe_state *s, const int32_t *begin, const int32_t *rank,
                       const int64_t *total, int64_t *peak, mz_err *err) {
    mz_code code = mz_balance_hosts(s->balance, s->ranks, s->experts, begin, rank, err);
    return code == MZ_OK
               ? mz_balance_spread(s->balance, total, NULL, NULL, NULL, NULL, NULL, peak, err)
               : code;
}

/* Leaves the best placement found in s->best, and its peak; *peak is that of the placement there
 * is, and only lower ones count. */
static mz_code search(finemoe_state *s, const mz_view *view, int64_t *peak, bool *found,
                      mz_err *err) {
    const int64_t *total = view->history->total;
    mz_rng rng =
        mz_rng_make(s->seed, mz_rng_stream((uint64_t)view->step, (uint64_t)view->layer, 0, 0));
    *found = false;
    count_replicas(s, total);
    for (int32_t sample = 0; sample < s->samples; sample++) {
        int64_t got;
        if (!place_trial(s, total, sample > 0 ? &rng : NULL))
            continue;
        mz_code code = peak_of(s, s->trial.begin, s->trial.rank, total, &got, err);
        if (code != MZ_OK)
            return code;
        if (got < *peak) {
            const hosts t = s->best;
            s->best = s->trial;
            s->trial = t;
            *peak = got;
            *found = true;
        }
    }
    return MZ_OK;
}

/* ---- the policy --------------------------------------------------------------------------------
 */

static void set_hosts(const finemoe_state *s, const hosts *h, mz_plan *plan) {
    memcpy(plan->begin, h->begin, sizeof(int32_t) * ((size_t)s->experts + 1));
    memcpy(plan->rank, h->rank, sizeof(int32_t) * (size_t)h->begin[s->experts]);
    for (int32_t i = 0; i < plan->begin[s->experts]; i++)
        plan->target[i] = -1;
}

/* The placement there is, or a better one for the history. */
static mz_code replace(finemoe_state *s, const mz_view *view, mz_plan *plan, mz_err *err) {
    int64_t peak, was;
    bool found;
    mz_code code = peak_of(s, plan->begin, plan->rank, view->history->total, &peak, err);
    was = peak;
    if (code == MZ_OK)
        code = search(s, view, &peak, &found, err);
    if (code == MZ_OK && found)
        set_hosts(s, &s->best, plan);
    if (code == MZ_OK)
        snprintf(plan->why, sizeof plan->why, "on past load %lld rows instead of %lld at the peak",
                 (long long)peak, (long long)was);
    return code;
}

static mz_code finemoe_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    finemoe_state *s = self;
    int32_t moved;
    mz_code code = MZ_OK;
    mz_plan_reset(plan);
    if (!mz_placement_restore(s->placement, view->layer, plan))
        set_hosts(s, &s->symmetric, plan);
    if (s->adaptive && view->history && view->micro_batch == 0)
        code = replace(s, view, plan, err);
    if (code == MZ_OK)
        code = mz_placement_change(s->placement, view->layer, s->change_bytes, 0, MZ_MOVE_STEP,
                                   MZ_HIDE_NOTHING, plan, &moved, err);
    if (code == MZ_OK)
        code =
            mz_plan_ring_moves(plan, s->gradient_bytes, MZ_MOVE_REDUCE_STEP, MZ_HIDE_LAYERS, err);
    return code;
}

static mz_code finemoe_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    finemoe_state *s = self;
    const mz_load *load = call->load;
    int64_t peak;
    mz_plan_lossless(plan, load);
    for (int32_t e = 0; e < s->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            s->local[i] = load->count[(int64_t)plan->rank[i] * s->experts + e];
    mz_code code = mz_balance_hosts(s->balance, s->ranks, s->experts, plan->begin, plan->rank, err);
    if (code == MZ_OK)
        code = mz_balance_spread(s->balance, load->total, NULL, NULL, s->local, NULL, s->rows,
                                 &peak, err);
    if (code == MZ_OK)
        code = mz_expand_rows(s->expand, plan, load->count, NULL, s->rows, MZ_SPREAD_EXACT,
                              mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

static bool allocate(finemoe_state *s, mz_arena *arena) {
    const int64_t E = s->experts, R = s->ranks, slots = R * s->slots;
    hosts *all[] = {&s->symmetric, &s->best, &s->trial};
    bool good = true;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        all[i]->begin = MZ_NEW(arena, int32_t, E + 1);
        all[i]->rank = MZ_NEW(arena, int32_t, slots);
        good = good && all[i]->begin && all[i]->rank;
    }
    s->count = MZ_NEW(arena, int32_t, E);
    s->order = MZ_NEW(arena, int32_t, E);
    s->scratch = MZ_NEW(arena, int32_t, E);
    s->room = MZ_NEW(arena, int32_t, R);
    s->holds = MZ_NEW(arena, int32_t, R);
    s->load = MZ_NEW(arena, int64_t, E);
    s->local = MZ_NEW(arena, int64_t, slots);
    s->rows = MZ_NEW(arena, int64_t, slots);
    s->share = MZ_NEW(arena, double, E);
    s->carried = MZ_NEW(arena, double, R);
    return good && s->count && s->order && s->scratch && s->room && s->holds && s->load &&
           s->local && s->rows && s->share && s->carried;
}

/* Hosts per expert and slots per rank. */
static mz_code choose_slots(const mz_policy_env *env, const finemoe_options *o, int32_t *d,
                            int32_t *slots, mz_err *err) {
    *d = (int32_t)(o->hosts < env->ranks ? o->hosts : env->ranks);
    const int64_t need = ((int64_t)*d * env->experts + env->ranks - 1) / env->ranks;
    if (o->slots > 0 && o->slots < need)
        return mz_fail(err, MZ_EINPUT,
                       "policy finemoe: slots=%lld is too few for %d experts on %d hosts each and "
                       "%d ranks; give at least %lld, or a lower d",
                       (long long)o->slots, env->experts, *d, env->ranks, (long long)need);
    return mz_slots("finemoe", env, o->slots > 0 ? o->slots : need, slots, err);
}

static mz_code finemoe_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                            void **out, mz_policy_traits *traits, mz_err *err) {
    const finemoe_options *o = options;
    int32_t d, slots;
    mz_code code = choose_slots(env, o, &d, &slots, err);
    if (code != MZ_OK)
        return code;
    finemoe_state *s = MZ_NEW(arena, finemoe_state, 1);
    if (!s)
        return mz_fail_nomem(err, "the state of a policy");
    s->ranks = env->ranks;
    s->experts = env->experts;
    s->slots = slots;
    s->samples = (int32_t)o->samples;
    s->seed = o->seed > 0 ? (uint64_t)o->seed : env->seed;
    s->adaptive = o->placement == PLACEMENT_ADAPTIVE;
    s->gradient_bytes = env->weight_bytes;
    s->change_bytes = mz_rows_up(o->bytes * (double)env->expert_parameters);
    if (!allocate(s, arena))
        return mz_fail_nomem(err, "the state of a policy");
    place_symmetric(s, d);
    *traits = (mz_policy_traits){.sees = s->adaptive ? MZ_SEES_HISTORY : 0,
                                 .lag = (int32_t)o->lag,
                                 .window = (int32_t)o->window,
                                 .interval = (int32_t)o->interval,
                                 .route_plans = true,
                                 .slots = slots,
                                 .replica_memory = MZ_REPLICAS_RESIDENT,
                                 .replica_gradient_bytes = env->weight_bytes,
                                 .replica_optimizer = true,
                                 .score_source = ""};
    *out = s;
    const int32_t all = slots * env->ranks;
    code =
        mz_pack_create(arena, all > env->experts ? all : env->experts, env->ranks, &s->pack, err);
    if (code == MZ_OK)
        code = mz_placement_create(arena, env, slots, &s->placement, err);
    if (code == MZ_OK)
        code = mz_balance_create(arena, env->ranks, env->experts, all, &s->balance, err);
    return code == MZ_OK ? mz_expand_create(arena, env, env->ranks, &s->expand, err) : code;
}

const mz_policy mz_policy_finemoe = {
    .name = "finemoe",
    .summary = "every expert on several ranks; least peak of each call by routing alone",
    .options = finemoe_table,
    .option_count = sizeof finemoe_table / sizeof *finemoe_table,
    .options_size = sizeof(finemoe_options),
    .init = finemoe_init,
    .decide = finemoe_decide,
    .route = finemoe_route,
};
