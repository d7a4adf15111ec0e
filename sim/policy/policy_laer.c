/* laer: fully sharded experts, restored wherever the last micro-batches say (balancing-systems.md
 * section 7).
 *
 * Source: LAER-MoE (FSEP), arXiv 2602.11686 (ASPLOS'26), and its code in Hetu-Galvatron (branch
 * laer-moe). Sees the mean counts by source of the last 5 calls of the layer before this one, never
 * this call's; plans every call, on a CPU worker beside the step, so planning costs no time. Before
 * there is history all experts count as equally loaded.
 * Replica counts: (a) the same for all experts, where E divides all slots; (b) a queue: one replica
 * each, or one per domain where those fit, then again and again to the expert of most rows per
 * replica one more, or one per domain more once it has so many (an expert for which these do not
 * fit is done; slots may stay empty). Placement: replicas by falling rows, each on the least loaded
 * rank with a free slot in the domains with the fewest copies of its expert, or anywhere where
 * those are full. Both counts are placed and the better one by a modelled time is taken:
 * 4 exchanges + (3, with recomputation 4) products of the busiest rank.
 * Routing ("lite", with this call's counts): each source evenly over its domain's replicas, or over
 * all where there are none.
 * Moves: parameters, gradients and optimizer state are sharded over all ranks once. Every slot's
 * W comes from all ranks before forward and again before backward, under the work of other layers
 * `prefetch` layers ahead; its gradients (bf16, W) go back to all ranks after backward. A new
 * placement therefore moves nothing more.
 *
 * Options and the code's values: slots (C; mains plus two here, the paper has 2 and 4), window 5,
 * lag 1, even yes, queue yes, trials 0 (random changes of both counts, coded but off; seed 2333),
 * prefetch 1, rates=model (the rates of the simulated machine, as the code reads profiles of its
 * machine; code: its constants 216.269 and 88.9539 GB/s and 1.484375 us a pair), comm=sum (the code
 * adds exchanges over ranks; max: the paper's text). Departures: nodes are the machine's domains
 * instead of 8 ranks; ties go to the lower expert (the code's heap and sort leave them open); rows
 * are split in whole numbers for the modelled time too; results of the worker are always in time;
 * random changes draw from this program's generator. */
#include "sim/policy/parts.h"

#include "common/base/rng.h"

#include <string.h>

typedef struct laer_options {
    int64_t slots, window, lag, trials, prefetch;
    bool even, queue;
    int rates, comm;
} laer_options;

enum { RATES_MODEL, RATES_CODE };
enum { COMM_SUM, COMM_MAX };
enum { SEED = 2333 };

#define FIELD(name) offsetof(laer_options, name)
static const mz_opt laer_table[] = {
    {"slots", 0, MZ_OPT_INT, FIELD(slots), "0", "N",
     "experts that a rank restores per layer; 0: ceil(E/R) plus two", 0, 1e6, MZ_UNIT_NONE},
    {"window", 0, MZ_OPT_INT, FIELD(window), "5", "CALLS",
     "micro-batches of the layer whose mean counts are seen", 1, 1e4, MZ_UNIT_NONE},
    {"lag", 0, MZ_OPT_INT, FIELD(lag), "1", "CALLS", "calls before this one where they end", 1, 1e4,
     MZ_UNIT_NONE},
    {"even", 0, MZ_OPT_FLAG, FIELD(even), "yes", NULL, "try equal replica counts", 0, 0,
     MZ_UNIT_NONE},
    {"queue", 0, MZ_OPT_FLAG, FIELD(queue), "yes", NULL, "try replica counts in proportion to load",
     0, 0, MZ_UNIT_NONE},
    {"trials", 0, MZ_OPT_INT, FIELD(trials), "0", "N",
     "random changes of the replica counts to try", 0, 1e4, MZ_UNIT_NONE},
    {"rates", 0, MZ_OPT_ENUM, FIELD(rates), "model", "model|code",
     "rates of the modelled time: this machine's, or the constants of the code", 0, 0,
     MZ_UNIT_NONE},
    {"comm", 0, MZ_OPT_ENUM, FIELD(comm), "sum", "sum|max",
     "exchanges of all ranks together, or of the busiest one", 0, 0, MZ_UNIT_NONE},
    {"prefetch", 0, MZ_OPT_INT, FIELD(prefetch), "1", "LAYERS", "layers restored ahead", 1, 2,
     MZ_UNIT_NONE},
};

/* Seconds per pair. */
typedef struct laer_rates {
    double inside, outside; /* one exchange */
    double product;         /* all products of the step */
    bool busiest;           /* the busiest rank's exchanges instead of the sum */
} laer_rates;

/* Hosts of every expert, ranks ascending. */
typedef struct laer_hosts {
    int32_t *begin, *rank; /* [E+1], [R * slots] */
} laer_hosts;

typedef struct laer_state {
    int32_t ranks, experts, domains, slots;
    int64_t weight_bytes;
    bool even, queue;
    int32_t trials;
    laer_rates rates;
    int32_t *domain;
    int32_t *count, *base;      /* [E] replicas being placed; before random changes */
    double *key;                /* [E] rows per replica */
    int32_t *order, *scratch;   /* [E] */
    int32_t *used, *tally;      /* [R] slots in use; replicas of one expert */
    double *load;               /* [R] rows while placing */
    int32_t *copies;            /* [D] of one expert */
    int64_t *rows;              /* [R] computed, of the modelled time */
    double *exchange;           /* [R] */
    int64_t *total;             /* [E] */
    int32_t *near, *near_begin; /* hosts by (expert, domain): [R * slots], [E * D + 1] */
    laer_hosts hosts, best;
    double best_time;
    mz_expand *expand;
} laer_state;

/* ---- init
 * ----------------------------------------------------------------------------------------*/

static laer_rates rates_of(const mz_policy_env *env, const laer_options *o) {
    const double token = (double)env->token_bytes, passes = env->recompute ? 4 : 3;
    if (o->rates == RATES_CODE)
        return (laer_rates){.inside = token / 216.269e9,
                            .outside = token / 88.9539e9,
                            .product = passes * 0.001484375e-3,
                            .busiest = o->comm == COMM_MAX};
    return (laer_rates){.inside = token / env->inside_bytes_s,
                        .outside = token / env->outside_bytes_s,
                        .product = passes * env->pair_seconds,
                        .busiest = o->comm == COMM_MAX};
}

static mz_code alloc_hosts(const laer_state *state, mz_arena *arena, laer_hosts *hosts,
                           mz_err *err) {
    hosts->begin = MZ_NEW(arena, int32_t, state->experts + 1);
    hosts->rank = MZ_NEW(arena, int32_t, (int64_t)state->ranks * state->slots);
    return hosts->begin && hosts->rank ? MZ_OK : mz_fail_nomem(err, "the hosts of a policy");
}

static mz_code alloc_state(const mz_policy_env *env, mz_arena *arena, laer_state *state,
                           mz_err *err) {
    const int32_t R = state->ranks, E = state->experts, D = state->domains;
    state->count = MZ_NEW(arena, int32_t, E);
    state->base = MZ_NEW(arena, int32_t, E);
    state->key = MZ_NEW(arena, double, E);
    state->order = MZ_NEW(arena, int32_t, E);
    state->scratch = MZ_NEW(arena, int32_t, E);
    state->total = MZ_NEW(arena, int64_t, E);
    state->used = MZ_NEW(arena, int32_t, R);
    state->tally = MZ_NEW(arena, int32_t, R);
    state->load = MZ_NEW(arena, double, R);
    state->rows = MZ_NEW(arena, int64_t, R);
    state->exchange = MZ_NEW(arena, double, R);
    state->copies = MZ_NEW(arena, int32_t, D);
    state->near = MZ_NEW(arena, int32_t, (int64_t)R * state->slots);
    state->near_begin = MZ_NEW(arena, int32_t, (int64_t)E * D + 1);
    if (!state->count || !state->base || !state->key || !state->order || !state->scratch ||
        !state->total || !state->used || !state->tally || !state->load || !state->rows ||
        !state->exchange || !state->copies || !state->near || !state->near_begin)
        return mz_fail_nomem(err, "the state of a policy");
    mz_code code = mz_copy_domains(env, arena, &state->domain, err);
    if (code == MZ_OK)
        code = alloc_hosts(state, arena, &state->hosts, err);
    if (code == MZ_OK)
        code = alloc_hosts(state, arena, &state->best, err);
    const int32_t most = R * state->slots - E + 1; /* instances of one expert */
    return code == MZ_OK ? mz_expand_create(arena, env, most, &state->expand, err) : code;
}

static mz_code check_candidates(const laer_options *o, const mz_policy_env *env, int32_t slots,
                                mz_err *err) {
    const int64_t all = (int64_t)slots * env->ranks;
    if (!o->even && !o->queue)
        return mz_fail(err, MZ_EINPUT,
                       "policy laer: even=no and queue=no leave no replica counts to try; "
                       "allow one of them");
    if (!o->queue && all % env->experts != 0)
        return mz_fail(err, MZ_EINPUT,
                       "policy laer: equal replica counts need a number of slots that %d experts "
                       "divide; there are %lld (slots=%d on %d ranks)",
                       env->experts, (long long)all, slots, env->ranks);
    return MZ_OK;
}

static mz_code laer_init(const mz_policy_env *env, const void *options, mz_arena *arena, void **out,
                         mz_policy_traits *traits, mz_err *err) {
    const laer_options *o = options;
    int32_t slots;
    mz_code code = mz_slots("laer", env, o->slots, &slots, err);
    if (code == MZ_OK)
        code = check_candidates(o, env, slots, err);
    if (code != MZ_OK)
        return code;
    laer_state *state = MZ_NEW(arena, laer_state, 1);
    if (!state)
        return mz_fail_nomem(err, "the state of a policy");
    *state = (laer_state){.ranks = env->ranks,
                          .experts = env->experts,
                          .domains = env->domains > 1 ? env->domains : 1,
                          .slots = slots,
                          .weight_bytes = env->weight_bytes,
                          .even = o->even && (int64_t)slots * env->ranks % env->experts == 0,
                          .queue = o->queue,
                          .trials = (int32_t)o->trials,
                          .rates = rates_of(env, o)};
    *traits = (mz_policy_traits){.sees = MZ_SEES_HISTORY,
                                 .lag = (int32_t)o->lag,
                                 .window = (int32_t)o->window,
                                 .interval = 1,
                                 .history_calls = true,
                                 .plan_hidden = true,
                                 .slots = slots,
                                 .replica_gradient_bytes = env->weight_bytes,
                                 .sharded_weights = true,
                                 .prefetch = (int32_t)o->prefetch,
                                 .score_source = ""};
    *out = state;
    return alloc_state(env, arena, state, err);
}

/* ---- replica counts
 * ------------------------------------------------------------------------------*/

/* Rows per replica of the expert that gets the next ones; those that are done have key -1. */
static int32_t neediest(const laer_state *state) {
    int32_t best = 0;
    for (int32_t e = 1; e < state->experts; e++)
        best = state->key[e] > state->key[best] ? e : best;
    return state->key[best] < 0 ? -1 : best;
}

static void queue_counts(laer_state *state) {
    const int64_t all = (int64_t)state->ranks * state->slots;
    const int64_t each = (int64_t)state->domains * state->experts <= all ? state->domains : 1;
    int64_t given = each * state->experts;
    for (int32_t e = 0; e < state->experts; e++) {
        state->count[e] = (int32_t)each;
        state->key[e] = (double)state->total[e] / (double)each;
    }
    while (given < all) {
        const int32_t e = neediest(state);
        if (e < 0)
            return;
        const int32_t more = state->count[e] >= state->domains ? state->domains : 1;
        if (given + more > all) {
            state->key[e] = -1;
            continue;
        }
        given += more;
        state->count[e] += more;
        state->key[e] = (double)state->total[e] / state->count[e];
    }
}

static void even_counts(laer_state *state) {
    const int64_t each = (int64_t)state->ranks * state->slots / state->experts;
    for (int32_t e = 0; e < state->experts; e++)
        state->count[e] = (int32_t)each;
}

/* One random transfer of replicas from the counts in `base`; false when it would empty an expert.
 */
static bool change_counts(laer_state *state, mz_rng *rng) {
    const uint64_t E = (uint64_t)state->experts;
    const int32_t from = (int32_t)mz_rng_below(rng, E);
    const int32_t to = (int32_t)(((uint64_t)from + 1 + mz_rng_below(rng, E - 1)) % E);
    const bool whole =
        state->base[from] % state->domains == 0 && state->base[to] % state->domains == 0;
    const int32_t moved = whole ? state->domains : 1;
    if (state->base[from] <= moved)
        return false;
    memcpy(state->count, state->base, sizeof *state->count * (size_t)state->experts);
    state->count[from] -= moved;
    state->count[to] += moved;
    return true;
}

/* ---- placement
 * -----------------------------------------------------------------------------------*/

/* The least loaded rank with a free slot, in domains with `fewest` copies where that is >= 0. */
static int32_t lightest(const laer_state *state, int32_t fewest) {
    int32_t best = -1;
    for (int32_t r = 0; r < state->ranks; r++)
        if (state->used[r] < state->slots &&
            (fewest < 0 || state->copies[state->domain[r]] == fewest) &&
            (best < 0 || state->load[r] < state->load[best]))
            best = r;
    return best;
}

static void place_expert(laer_state *state, int32_t e) {
    memset(state->copies, 0, sizeof *state->copies * (size_t)state->domains);
    memset(state->tally, 0, sizeof *state->tally * (size_t)state->ranks);
    for (int32_t k = 0; k < state->count[e]; k++) {
        int32_t fewest = state->copies[0];
        for (int32_t d = 1; d < state->domains; d++)
            fewest = state->copies[d] < fewest ? state->copies[d] : fewest;
        int32_t r = lightest(state, fewest);
        r = r >= 0 ? r : lightest(state, -1);
        state->tally[r]++;
        state->used[r]++;
        state->load[r] += state->key[e];
        state->copies[state->domain[r]]++;
    }
    int32_t at = state->hosts.begin[e];
    for (int32_t r = 0; r < state->ranks; r++)
        for (int32_t k = 0; k < state->tally[r]; k++)
            state->hosts.rank[at++] = r;
}

/* Places the counts into state->hosts. */
static void place(laer_state *state) {
    memset(state->used, 0, sizeof *state->used * (size_t)state->ranks);
    memset(state->load, 0, sizeof *state->load * (size_t)state->ranks);
    for (int32_t e = 0; e < state->experts; e++) {
        state->hosts.begin[e + 1] = state->hosts.begin[e] + state->count[e];
        state->key[e] = (double)state->total[e] / state->count[e];
    }
    mz_order_falling(state->key, state->experts, state->order, state->scratch);
    for (int32_t k = 0; k < state->experts; k++)
        place_expert(state, state->order[k]);
}

/* ---- modelled time
 * -------------------------------------------------------------------------------*/

/* Hosts by expert and domain. */
static void group_hosts(laer_state *state) {
    const laer_hosts *h = &state->hosts;
    const int32_t D = state->domains;
    for (int32_t e = 0; e < state->experts; e++) {
        int32_t *begin = state->near_begin + (int64_t)e * D;
        memset(state->copies, 0, sizeof *state->copies * (size_t)D);
        for (int32_t i = h->begin[e]; i < h->begin[e + 1]; i++)
            state->copies[state->domain[h->rank[i]]]++;
        begin[0] = h->begin[e];
        for (int32_t d = 0; d < D; d++) {
            begin[d + 1] = begin[d] + state->copies[d];
            state->copies[d] = begin[d];
        }
        for (int32_t i = h->begin[e]; i < h->begin[e + 1]; i++)
            state->near[state->copies[state->domain[h->rank[i]]]++] = h->rank[i];
    }
}

/* Rows of one source over `n` hosts, the first rows % n of them one more. */
static void split_rows(laer_state *state, int32_t s, int64_t rows, const int32_t *host, int32_t n) {
    const int64_t each = n == 1 ? rows : rows / n, more = n == 1 ? 0 : rows % n;
    for (int32_t k = 0; k < n; k++) {
        const int32_t r = host[k];
        const int64_t part = each + (k < more);
        state->rows[r] += part;
        if (r != s)
            state->exchange[r] +=
                (double)part *
                (state->domain[r] == state->domain[s] ? state->rates.inside : state->rates.outside);
    }
}

static double time_of(laer_state *state, const mz_load *load) {
    const int32_t D = state->domains;
    memset(state->rows, 0, sizeof *state->rows * (size_t)state->ranks);
    memset(state->exchange, 0, sizeof *state->exchange * (size_t)state->ranks);
    group_hosts(state);
    for (int32_t s = 0; s < state->ranks; s++) {
        const int64_t *row = load->count + (int64_t)s * state->experts;
        for (int32_t e = 0; e < state->experts; e++) {
            const int32_t *own = state->near_begin + (int64_t)e * D + state->domain[s];
            const int32_t inside = own[1] - own[0], first = state->hosts.begin[e];
            if (row[e] > 0 && inside > 0)
                split_rows(state, s, row[e], state->near + own[0], inside);
            else if (row[e] > 0)
                split_rows(state, s, row[e], state->hosts.rank + first,
                           state->hosts.begin[e + 1] - first);
        }
    }
    int64_t most = 0;
    double sum = 0, longest = 0;
    for (int32_t r = 0; r < state->ranks; r++) {
        most = state->rows[r] > most ? state->rows[r] : most;
        sum += state->exchange[r];
        longest = state->exchange[r] > longest ? state->exchange[r] : longest;
    }
    return 4 * (state->rates.busiest ? longest : sum) + state->rates.product * (double)most;
}

/* ---- the plan
 * ------------------------------------------------------------------------------------*/

/* Places the counts and keeps them where they are the first or better. Nothing seen: all equal. */
static void try_counts(laer_state *state, const mz_load *load) {
    place(state);
    const double now = load ? time_of(state, load) : 0;
    if (state->best_time >= 0 && now >= state->best_time)
        return;
    state->best_time = now;
    const laer_hosts t = state->best;
    state->best = state->hosts;
    state->hosts = t;
}

static void try_changes(laer_state *state, const mz_load *load, uint64_t stream) {
    mz_rng rng = mz_rng_make(SEED, stream);
    memcpy(state->base, state->count, sizeof *state->base * (size_t)state->experts);
    for (int32_t i = 0; i < state->trials && state->experts > 1; i++)
        if (change_counts(state, &rng))
            try_counts(state, load);
}

static void choose(laer_state *state, const mz_load *load) {
    state->best_time = -1;
    if (state->even) {
        even_counts(state);
        try_counts(state, load);
    }
    if (state->queue) {
        queue_counts(state);
        try_counts(state, load);
        try_changes(state, load, 0);
    }
    if (state->even && state->trials > 0) {
        even_counts(state);
        try_changes(state, load, 1);
    }
}

mz_code mz_restore_moves(mz_plan *plan, int64_t weight_bytes, mz_err *err) {
    static const struct {
        mz_move_kind kind;
        mz_move_phase phase;
    } pass[] = {{MZ_MOVE_WEIGHTS, MZ_MOVE_FORWARD},
                {MZ_MOVE_WEIGHTS, MZ_MOVE_BACKWARD},
                {MZ_MOVE_GRADIENTS, MZ_MOVE_REDUCE}};
    mz_code code = MZ_OK;
    for (int32_t e = 0; plan->ranks > 1 && e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            for (size_t k = 0; code == MZ_OK && k < sizeof pass / sizeof *pass; k++) {
                const bool back = pass[k].phase == MZ_MOVE_REDUCE;
                code = mz_plan_add_move(plan,
                                        (mz_move){.kind = pass[k].kind,
                                                  .phase = pass[k].phase,
                                                  .hide = MZ_HIDE_LAYERS,
                                                  .expert = e,
                                                  .src = back ? plan->rank[i] : MZ_EVERY_RANK,
                                                  .dst = back ? MZ_EVERY_RANK : plan->rank[i],
                                                  .bytes = weight_bytes},
                                        err);
            }
    return code;
}

static mz_code laer_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    laer_state *state = self;
    const bool seen = view->history && view->history->pairs > 0;
    for (int32_t e = 0; e < state->experts; e++)
        state->total[e] = seen ? view->history->total[e] : 1;
    choose(state, seen ? view->history : NULL);
    const int32_t instances = state->best.begin[state->experts];
    mz_plan_reset(plan);
    if (instances > plan->instance_cap)
        return mz_fail(err, MZ_EINTERNAL, "more replicas than slots");
    memcpy(plan->begin, state->best.begin, sizeof *plan->begin * ((size_t)state->experts + 1));
    memcpy(plan->rank, state->best.rank, sizeof *plan->rank * (size_t)instances);
    for (int32_t i = 0; i < instances; i++)
        plan->target[i] = -1;
    snprintf(plan->why, sizeof plan->why, "%d of %lld slots%s", instances,
             (long long)state->ranks * state->slots, seen ? "" : ", nothing seen yet");
    return mz_restore_moves(plan, state->weight_bytes, err);
}

static mz_code laer_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    laer_state *state = self;
    mz_plan_lossless(plan, call->load);
    mz_code code = mz_expand_rows(state->expand, plan, call->load->count, NULL, NULL,
                                  MZ_SPREAD_NEAR, mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_laer = {
    .name = "laer",
    .summary = "sharded experts restored for every layer where the last micro-batches say",
    .needs_sizes = true,
    .options = laer_table,
    .option_count = sizeof laer_table / sizeof *laer_table,
    .options_size = sizeof(laer_options),
    .init = laer_init,
    .decide = laer_decide,
    .route = laer_route,
};
