/* flexmoe: experts grow and shrink in units of a slot, a "vExpert" (balancing-systems.md section
 * 5).
 *
 * Source: FlexMoE, arXiv 2304.03946 (SIGMOD'23); its full text and code are not public, so what is
 * here rests on descriptions by others and on two ports. An expert's pairs are split evenly over
 * its vExperts.
 *
 * form=recommended: sees the counts of the last step (lag, window), decides every `interval` steps.
 * Training starts with the mains alone. While the busiest rank is more than `threshold` times the
 * mean: the expert of most rows per vExpert gets one more, on the least loaded rank with a free
 * slot, or where there is none in the place of a vExpert of the expert of fewest rows per vExpert
 * that has several (its one on the least loaded rank); it stays if the modelled time of the step
 * falls, otherwise this ends. (As written: where the hottest expert is not on the busiest rank it
 * ends with slots free.) Then vExperts migrate: each may change places with the vExpert nearest in
 * load on the least loaded other host of its expert, where that lowers all-reduce time in sum and
 * raises neither the step's time nor the busier of the two ranks; an expert whose vExperts end up
 * on one rank keeps one of them. Modelled time: the rank of most (3, with recomputation 4) products
 * + 4 exchanges + all-reduces of its experts. Moves: 2 + `state` bytes per parameter for every
 * vExpert on a rank that did not host the expert, from the nearest host, after the optimizer step,
 * blocking; every step a ring all-reduce of bf16 gradients over the hosts of each expert, beside
 * other layers. All slots are resident, with optimizer state.
 *
 * form=scale-eplb (the port in Scale-EPLB's repository): sees current counts, runs every call from
 * one vExpert each. While slots are free and the largest share is over `threshold` times the mean
 * rank, its expert gets one more if max(largest share, mean) / tps + sync * replica bytes / bps
 * falls, otherwise this ends: with two equal maxima at once. Then all are packed, heaviest first.
 * Nothing stays at home, so every host but the home fetches W before forward (beside pack and
 * dispatch) and before backward and returns W of gradients, as that repository's own back end does;
 * fetched experts use shared slots beside the resident mains.
 *
 * form=laer (the `flex` planner in LAER-MoE's code, inside its sharded experts): sees the mean of
 * the last 5 calls, plans every call beside the step, from the placement before. At most `rounds`
 * times while max/min of the ranks' rows is over 1: in every domain the expert of most rows per
 * replica takes a slot from the one of fewest that has more replicas than there are domains, on
 * that one's least loaded rank there; where another rank of the domain has the hot expert and a
 * slot without it, the new replica joins it and that rank's heaviest other expert takes the freed
 * slot. Kept if the busiest rank or the ratio falls, else this ends. Routing and moves are laer's.
 *
 * Options: form, interval 10 (the SYMI paper's port: 10, 50, 100), threshold 1.2, slots (mains plus
 * two), state 16, migrate yes, lag 1, window (1; laer 5), rounds 10, tps 1e6, bps 6.25 GB/s, sync
 * 0. Departures: rates of the modelled time are the simulated machine's instead of a profile;
 * migrations block like the other copies; domains stand for nodes of 8 ranks. */
#include "sim/policy/parts.h"

#include <math.h>
#include <string.h>

typedef struct flexmoe_options {
    int form;
    int64_t interval, lag, window, slots, rounds;
    double threshold, state_bytes, tps, bps, sync;
    bool migrate;
} flexmoe_options;

enum { FORM_RECOMMENDED, FORM_SCALE_EPLB, FORM_LAER };

#define FIELD(name) offsetof(flexmoe_options, name)
static const mz_opt flexmoe_table[] = {
    {"form", 0, MZ_OPT_ENUM, FIELD(form), "recommended", "recommended|scale-eplb|laer",
     "the descriptions' rule, or one of two ports", 0, 0, MZ_UNIT_NONE},
    {"interval", 0, MZ_OPT_INT, FIELD(interval), "10", "STEPS",
     "steps between decisions of form=recommended", 1, 1e9, MZ_UNIT_NONE},
    {"lag", 0, MZ_OPT_INT, FIELD(lag), "1", "N",
     "steps (form=laer: calls) between the counts seen and this one", 1, 1e6, MZ_UNIT_NONE},
    {"window", 0, MZ_OPT_INT, FIELD(window), "0", "N",
     "steps (form=laer: calls) whose mean is seen; 0: 1, with form=laer 5", 0, 1e6, MZ_UNIT_NONE},
    {"threshold", 0, MZ_OPT_REAL, FIELD(threshold), "1.2", "X",
     "do nothing while the busiest rank is below this times the mean", 1, 1e6, MZ_UNIT_NONE},
    {"slots", 0, MZ_OPT_INT, FIELD(slots), "0", "N", "vExperts per rank; 0: ceil(E/R) plus two", 0,
     1e6, MZ_UNIT_NONE},
    {"state", 0, MZ_OPT_REAL, FIELD(state_bytes), "16", "BYTES",
     "optimizer state per parameter that moves with a vExpert", 0, 1e3, MZ_UNIT_BYTES},
    {"migrate", 0, MZ_OPT_FLAG, FIELD(migrate), "yes", NULL,
     "vExperts change places where that shrinks all-reduces", 0, 0, MZ_UNIT_NONE},
    {"rounds", 0, MZ_OPT_INT, FIELD(rounds), "10", "N", "rounds of form=laer", 0, 1e6,
     MZ_UNIT_NONE},
    {"tps", 0, MZ_OPT_REAL, FIELD(tps), "1e6", "PAIRS/S", "compute rate of form=scale-eplb", 1e-9,
     1e18, MZ_UNIT_NONE},
    {"bps", 0, MZ_OPT_REAL, FIELD(bps), "6.25 GB/s", "RATE", "all-reduce rate of form=scale-eplb",
     1, 1e18, MZ_UNIT_RATE},
    {"sync", 0, MZ_OPT_REAL, FIELD(sync), "0", "X", "weight of replica bytes in form=scale-eplb", 0,
     1e9, MZ_UNIT_NONE},
};

/* Seconds of form=recommended's model. */
typedef struct flexmoe_rates {
    double product;                   /* per pair */
    double inside, outside;           /* four exchanges, per pair */
    double sync_inside, sync_outside; /* per all-reduce of an expert, without 2 (m-1)/m */
} flexmoe_rates;

typedef struct flexmoe_state {
    flexmoe_options o;
    int32_t ranks, experts, domains, slots;
    int64_t weight_bytes, state_bytes;
    flexmoe_rates rates;
    int32_t *domain, *main_rank;
    double *cap;   /* [E] rows per vExpert */
    double *load;  /* [R] rows */
    int32_t *used; /* [R] slots */
    mz_expand *expand;
    /* recommended: hosts being planned, as those of a plan, and what they were before a trial */
    mz_placement *placement;
    int32_t *begin, *rank, *former_begin, *former;
    const int64_t *total, *count; /* seen: [E], [S][E] */
    int64_t *near;                /* [E][D] rows of the domain's sources */
    double *time;                 /* [R] */
    int32_t *hosted;              /* [R] e + 1: hosts expert e */
    int32_t *at_rank, *by_rank;   /* vExperts by rank: [R+1], [R * slots] */
    int32_t *owner;               /* [R * slots] expert of a vExpert */
    double sync_time;             /* all all-reduces */
    /* scale-eplb */
    mz_pack *pack;
    double *weight;       /* [R * slots] */
    int32_t *room;        /* [R] */
    int32_t *bin, *place; /* [R * slots] */
    int32_t *replicas;    /* [E] */
    /* laer */
    int32_t *slot;            /* [layers][R][slots] expert */
    int32_t *trial;           /* [R][slots] */
    int32_t *order, *scratch; /* [E] */
} flexmoe_state;

/* ---- init
 * ----------------------------------------------------------------------------------------*/

static mz_code alloc_recommended(const mz_policy_env *env, mz_arena *arena, flexmoe_state *state,
                                 mz_err *err) {
    const int64_t all = (int64_t)state->ranks * state->slots;
    state->begin = MZ_NEW(arena, int32_t, state->experts + 1);
    state->former_begin = MZ_NEW(arena, int32_t, state->experts + 1);
    state->rank = MZ_NEW(arena, int32_t, all);
    state->former = MZ_NEW(arena, int32_t, all);
    state->near = MZ_NEW(arena, int64_t, (int64_t)state->experts * state->domains);
    state->time = MZ_NEW(arena, double, state->ranks);
    state->hosted = MZ_NEW(arena, int32_t, state->ranks);
    state->at_rank = MZ_NEW(arena, int32_t, state->ranks + 1);
    state->by_rank = MZ_NEW(arena, int32_t, all);
    state->owner = MZ_NEW(arena, int32_t, all);
    if (!state->begin || !state->former_begin || !state->rank || !state->former || !state->near ||
        !state->time || !state->hosted || !state->at_rank || !state->by_rank || !state->owner)
        return mz_fail_nomem(err, "the state of a policy");
    return mz_placement_create(arena, env, state->slots, &state->placement, err);
}

static mz_code alloc_scale_eplb(mz_arena *arena, flexmoe_state *state, mz_err *err) {
    const int32_t all = state->ranks * state->slots;
    state->weight = MZ_NEW(arena, double, all);
    state->room = MZ_NEW(arena, int32_t, state->ranks);
    state->bin = MZ_NEW(arena, int32_t, all);
    state->place = MZ_NEW(arena, int32_t, all);
    if (!state->weight || !state->room || !state->bin || !state->place)
        return mz_fail_nomem(err, "the state of a policy");
    return mz_pack_create(arena, all, state->ranks, &state->pack, err);
}

/* The code's start: slot i of rank j holds expert i * n + j mod n, n = E / slots (rounded up here,
 * numbers beyond E starting over). */
static mz_code alloc_laer(const mz_policy_env *env, mz_arena *arena, flexmoe_state *state,
                          mz_err *err) {
    const int32_t R = state->ranks, C = state->slots, E = state->experts, n = (E + C - 1) / C;
    state->slot = MZ_NEW(arena, int32_t, (int64_t)env->layers * R * C);
    state->trial = MZ_NEW(arena, int32_t, (int64_t)R * C);
    state->order = MZ_NEW(arena, int32_t, E);
    state->scratch = MZ_NEW(arena, int32_t, E);
    if (!state->slot || !state->trial || !state->order || !state->scratch)
        return mz_fail_nomem(err, "the state of a policy");
    for (int64_t k = 0; k < (int64_t)env->layers * R; k++)
        for (int32_t i = 0; i < C; i++)
            state->slot[k * C + i] = (int32_t)(((int64_t)i * n + k % R % n) % E);
    return MZ_OK;
}

static mz_code alloc_state(const mz_policy_env *env, mz_arena *arena, flexmoe_state *state,
                           mz_err *err) {
    state->main_rank = MZ_NEW(arena, int32_t, state->experts);
    state->cap = MZ_NEW(arena, double, state->experts);
    state->replicas = MZ_NEW(arena, int32_t, state->experts);
    state->load = MZ_NEW(arena, double, state->ranks);
    state->used = MZ_NEW(arena, int32_t, state->ranks);
    if (!state->main_rank || !state->cap || !state->replicas || !state->load || !state->used)
        return mz_fail_nomem(err, "the state of a policy");
    mz_layout_mains(state->ranks, state->experts, state->main_rank);
    mz_code code = mz_copy_domains(env, arena, &state->domain, err);
    if (code == MZ_OK && state->o.form == FORM_RECOMMENDED)
        code = alloc_recommended(env, arena, state, err);
    if (code == MZ_OK && state->o.form == FORM_SCALE_EPLB)
        code = alloc_scale_eplb(arena, state, err);
    if (code == MZ_OK && state->o.form == FORM_LAER)
        code = alloc_laer(env, arena, state, err);
    const int32_t most = state->ranks * state->slots - state->experts + 1;
    return code == MZ_OK ? mz_expand_create(arena, env, most, &state->expand, err) : code;
}

static mz_policy_traits traits_of(const mz_policy_env *env, const flexmoe_state *state) {
    const flexmoe_options *o = &state->o;
    mz_policy_traits t = {.sees = MZ_SEES_HISTORY,
                          .lag = (int32_t)o->lag,
                          .window = (int32_t)o->window,
                          .interval = 1,
                          .slots = state->slots,
                          .replica_gradient_bytes = env->weight_bytes,
                          .score_source = ""};
    switch (o->form) {
    case FORM_RECOMMENDED:
        t.interval = (int32_t)o->interval;
        t.replica_memory = MZ_REPLICAS_RESIDENT;
        t.replica_optimizer = true;
        break;
    case FORM_SCALE_EPLB:
        t.sees = MZ_SEES_CURRENT;
        t.replica_memory = MZ_REPLICAS_SHARED;
        /* Slots may all be fetched: mains are resident beside them. */
        t.buffer_bytes = 2 * env->weight_bytes * mz_mains_per_rank(env->ranks, env->experts);
        break;
    default:
        t.history_calls = true;
        t.plan_hidden = true;
        t.sharded_weights = true;
        t.prefetch = 1;
        break;
    }
    return t;
}

static mz_code flexmoe_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                            void **out, mz_policy_traits *traits, mz_err *err) {
    const flexmoe_options *o = options;
    int32_t slots;
    mz_code code = mz_slots("flexmoe", env, o->slots, &slots, err);
    if (code != MZ_OK)
        return code;
    flexmoe_state *state = MZ_NEW(arena, flexmoe_state, 1);
    if (!state)
        return mz_fail_nomem(err, "the state of a policy");
    const double token = 4 * (double)env->token_bytes, W = (double)env->weight_bytes;
    *state = (flexmoe_state){.o = *o,
                             .ranks = env->ranks,
                             .experts = env->experts,
                             .domains = env->domains > 1 ? env->domains : 1,
                             .slots = slots,
                             .weight_bytes = env->weight_bytes,
                             .state_bytes =
                                 (int64_t)llround(o->state_bytes * (double)env->expert_parameters),
                             .rates = {.product = (env->recompute ? 4 : 3) * env->pair_seconds,
                                       .inside = token / env->inside_bytes_s,
                                       .outside = token / env->outside_bytes_s,
                                       .sync_inside = W / env->inside_bytes_s,
                                       .sync_outside = W / env->outside_bytes_s}};
    if (state->o.window == 0)
        state->o.window = o->form == FORM_LAER ? 5 : 1;
    *traits = traits_of(env, state);
    *out = state;
    return alloc_state(env, arena, state, err);
}

/* ---- recommended
 * ---------------------------------------------------------------------------------*/

static int32_t argmax(const double *value, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        best = value[i] > value[best] ? i : best;
    return best;
}

/* Rows per vExpert, rows and slots per rank; the busiest rank over the mean. */
static double weigh(flexmoe_state *state) {
    double sum = 0;
    memset(state->load, 0, sizeof *state->load * (size_t)state->ranks);
    memset(state->used, 0, sizeof *state->used * (size_t)state->ranks);
    for (int32_t e = 0; e < state->experts; e++) {
        state->cap[e] = (double)state->total[e] / (state->begin[e + 1] - state->begin[e]);
        sum += (double)state->total[e];
        for (int32_t i = state->begin[e]; i < state->begin[e + 1]; i++) {
            state->load[state->rank[i]] += state->cap[e];
            state->used[state->rank[i]]++;
        }
    }
    return sum > 0 ? state->load[argmax(state->load, state->ranks)] * state->ranks / sum : 1;
}

/* Rows of expert e by source domain. */
static void count_domains(flexmoe_state *state) {
    const int32_t E = state->experts, D = state->domains;
    memset(state->near, 0, sizeof *state->near * (size_t)E * (size_t)D);
    for (int32_t s = 0; s < state->ranks; s++)
        for (int32_t e = 0; e < E; e++)
            state->near[(int64_t)e * D + state->domain[s]] += state->count[(int64_t)s * E + e];
}

/* Products and exchanges of one vExpert of expert e on rank g, which takes an n-th of every
 * source's rows. */
static double work_time(const flexmoe_state *state, int32_t e, int32_t g, int32_t n) {
    const double near = (double)state->near[(int64_t)e * state->domains + state->domain[g]];
    const double own = (double)state->count[(int64_t)g * state->experts + e];
    const double all = (double)state->total[e];
    return (state->rates.product * all + state->rates.inside * (near - own) +
            state->rates.outside * (all - near)) /
           n;
}

/* Modelled time of the busiest rank; fills `time` and `sync_time`. O(vExperts + R). */
static double step_time(flexmoe_state *state) {
    memset(state->time, 0, sizeof *state->time * (size_t)state->ranks);
    memset(state->hosted, 0, sizeof *state->hosted * (size_t)state->ranks);
    state->sync_time = 0;
    for (int32_t e = 0; e < state->experts; e++) {
        const int32_t first = state->begin[e], n = state->begin[e + 1] - first;
        int32_t m = 0;
        bool apart = false;
        for (int32_t i = first; i < first + n; i++) {
            const int32_t g = state->rank[i];
            state->time[g] += work_time(state, e, g, n);
            m += state->hosted[g] != e + 1;
            state->hosted[g] = e + 1;
            apart = apart || state->domain[g] != state->domain[state->rank[first]];
        }
        if (m < 2)
            continue;
        const double sync =
            2.0 * (m - 1) / m * (apart ? state->rates.sync_outside : state->rates.sync_inside);
        state->sync_time += sync;
        for (int32_t i = first; i < first + n; i++) /* once per rank: the mark goes */
            if (state->hosted[state->rank[i]] == e + 1) {
                state->time[state->rank[i]] += sync;
                state->hosted[state->rank[i]] = 0;
            }
    }
    return state->time[argmax(state->time, state->ranks)];
}

static void keep_hosts(flexmoe_state *state) {
    const size_t n = (size_t)state->begin[state->experts];
    memcpy(state->former_begin, state->begin, sizeof *state->begin * ((size_t)state->experts + 1));
    memcpy(state->former, state->rank, sizeof *state->rank * n);
}

static void undo(flexmoe_state *state) {
    const size_t n = (size_t)state->former_begin[state->experts];
    memcpy(state->begin, state->former_begin, sizeof *state->begin * ((size_t)state->experts + 1));
    memcpy(state->rank, state->former, sizeof *state->rank * n);
}

static void expand_on(flexmoe_state *state, int32_t e, int32_t g) {
    const int32_t at = state->begin[e + 1], n = state->begin[state->experts] - at;
    memmove(state->rank + at + 1, state->rank + at, sizeof *state->rank * (size_t)n);
    state->rank[at] = g;
    for (int32_t i = e + 1; i <= state->experts; i++)
        state->begin[i]++;
}

static void shrink(flexmoe_state *state, int32_t e, int32_t at) {
    const int32_t n = state->begin[state->experts] - at - 1;
    memmove(state->rank + at, state->rank + at + 1, sizeof *state->rank * (size_t)n);
    for (int32_t i = e + 1; i <= state->experts; i++)
        state->begin[i]--;
}

/* Frees a slot: the coldest expert of several vExperts other than `hot` loses the one on the least
 * loaded rank. Returns that rank, or -1. */
static int32_t shrink_coldest(flexmoe_state *state, int32_t hot) {
    int32_t cold = -1;
    for (int32_t e = 0; e < state->experts; e++)
        if (e != hot && state->begin[e + 1] - state->begin[e] > 1 &&
            (cold < 0 || state->cap[e] < state->cap[cold]))
            cold = e;
    if (cold < 0)
        return -1;
    int32_t at = state->begin[cold];
    for (int32_t i = at + 1; i < state->begin[cold + 1]; i++)
        at = state->load[state->rank[i]] < state->load[state->rank[at]] ? i : at;
    const int32_t g = state->rank[at];
    shrink(state, cold, at);
    return g;
}

/* One Expand, with a Shrink where no slot is free; false and nothing changed where it does not pay.
 * `load` and `cap` are those of the hosts as they are; *best is their time. */
static bool expand_hottest(flexmoe_state *state, double *best) {
    const int32_t hot = argmax(state->cap, state->experts);
    int32_t g = -1;
    for (int32_t r = 0; r < state->ranks; r++)
        if (state->used[r] < state->slots && (g < 0 || state->load[r] < state->load[g]))
            g = r;
    keep_hosts(state);
    g = g >= 0 ? g : shrink_coldest(state, hot);
    if (g < 0)
        return false;
    expand_on(state, hot, g);
    const double now = step_time(state);
    if (!(now < *best)) {
        undo(state);
        return false;
    }
    *best = now;
    return true;
}

/* Lists vExperts by rank. */
static void list_by_rank(flexmoe_state *state) {
    int32_t *at = state->at_rank;
    memset(at, 0, sizeof *at * ((size_t)state->ranks + 1));
    for (int32_t i = 0; i < state->begin[state->experts]; i++)
        at[state->rank[i] + 1]++;
    for (int32_t r = 0; r < state->ranks; r++)
        at[r + 1] += at[r];
    for (int32_t e = 0; e < state->experts; e++)
        for (int32_t i = state->begin[e]; i < state->begin[e + 1]; i++) {
            state->by_rank[at[state->rank[i]]++] = i;
            state->owner[i] = e;
        }
    for (int32_t r = state->ranks; r > 0; r--) /* counting moved every begin to its end */
        at[r] = at[r - 1];
    at[0] = 0;
}

/* Of the vExperts of other experts on rank g, the one nearest in load to those of e; -1: none. */
static int32_t nearest_other(const flexmoe_state *state, int32_t e, int32_t g) {
    int32_t best = -1;
    for (int32_t k = state->at_rank[g]; k < state->at_rank[g + 1]; k++) {
        const int32_t i = state->by_rank[k], other = state->owner[i];
        if (other != e && (best < 0 || fabs(state->cap[other] - state->cap[e]) <
                                           fabs(state->cap[state->owner[best]] - state->cap[e])))
            best = i;
    }
    return best;
}

/* vExpert i of expert e changes places to join the one on the least loaded of e's other hosts, if
 * that lowers all-reduce time in sum and raises neither the step's time nor the rows of the busier
 * of both ranks. */
static bool migrate_one(flexmoe_state *state, int32_t e, int32_t i, double *best) {
    const double sync = state->sync_time, *load = state->load;
    const int32_t from = state->rank[i];
    int32_t to = -1;
    for (int32_t j = state->begin[e]; j < state->begin[e + 1]; j++)
        if (state->rank[j] != from && (to < 0 || load[state->rank[j]] < load[to]))
            to = state->rank[j];
    const int32_t k = to < 0 ? -1 : nearest_other(state, e, to);
    if (k < 0)
        return false;
    const double gain = state->cap[e] - state->cap[state->owner[k]]; /* of rank `to` */
    if (fmax(load[to] + gain, load[from] - gain) > fmax(load[to], load[from]))
        return false;
    state->rank[i] = to;
    state->rank[k] = from;
    const double now = step_time(state);
    if (now <= *best && state->sync_time < sync) {
        *best = now;
        return true;
    }
    state->rank[i] = from;
    state->rank[k] = to;
    state->sync_time = sync;
    return false;
}

/* vExperts that all share one rank serve as one would: the others free their slots. */
static void shrink_idle(flexmoe_state *state, int32_t e) {
    const int32_t first = state->begin[e];
    for (int32_t i = first + 1; i < state->begin[e + 1]; i++)
        if (state->rank[i] != state->rank[first])
            return;
    while (state->begin[e + 1] - first > 1)
        shrink(state, e, first + 1);
}

static int32_t migrate(flexmoe_state *state, double best) {
    int32_t moved = 0;
    list_by_rank(state);
    for (int32_t e = 0; e < state->experts; e++)
        for (int32_t i = state->begin[e];
             state->begin[e + 1] - state->begin[e] > 1 && i < state->begin[e + 1]; i++)
            if (migrate_one(state, e, i, &best)) {
                moved++;
                weigh(state);
                list_by_rank(state);
            }
    for (int32_t e = 0; e < state->experts; e++)
        shrink_idle(state, e);
    return moved;
}

/* Plans from the hosts as they are. */
static void adjust(flexmoe_state *state, const mz_load *seen, mz_plan *plan) {
    state->total = seen->total;
    state->count = seen->count;
    count_domains(state);
    const double before = weigh(state);
    double best = step_time(state), ratio = before;
    int32_t changes = 0;
    while (ratio > state->o.threshold && expand_hottest(state, &best)) {
        ratio = weigh(state);
        changes++;
    }
    step_time(state);
    const int32_t moved = state->o.migrate ? migrate(state, best) : 0;
    snprintf(plan->why, sizeof plan->why,
             "%d expansions, %d migrations, imbalance seen %.3f, now %.3f", changes, moved, before,
             moved > 0 ? weigh(state) : ratio);
}

static void set_hosts(mz_plan *plan, const int32_t *begin, const int32_t *rank) {
    memcpy(plan->begin, begin, sizeof *begin * ((size_t)plan->experts + 1));
    for (int32_t i = 0; i < begin[plan->experts]; i++) {
        plan->rank[i] = rank[i];
        plan->target[i] = -1;
    }
}

/* The layer's hosts as they are, to be changed; mains before the first plan. */
static mz_code start_hosts(flexmoe_state *state, int32_t layer, mz_plan *plan, mz_err *err) {
    const int32_t *begin, *rank = mz_placement_hosts(state->placement, layer, &begin);
    int32_t none;
    if (rank) {
        memcpy(state->begin, begin, sizeof *begin * ((size_t)state->experts + 1));
        memcpy(state->rank, rank, sizeof *rank * (size_t)begin[state->experts]);
        return MZ_OK;
    }
    mz_plan_mains(plan, state->main_rank);
    memcpy(state->begin, plan->begin, sizeof *state->begin * ((size_t)state->experts + 1));
    memcpy(state->rank, plan->rank, sizeof *state->rank * (size_t)state->experts);
    return mz_placement_change(state->placement, layer, 0, 0, MZ_MOVE_STEP, MZ_HIDE_NOTHING, plan,
                               &none, err);
}

static mz_code decide_recommended(flexmoe_state *state, const mz_view *view, mz_plan *plan,
                                  mz_err *err) {
    int32_t copies;
    mz_plan_reset(plan);
    mz_code code = start_hosts(state, view->layer, plan, err);
    if (code != MZ_OK)
        return code;
    if (view->history && view->history->pairs > 0 && view->micro_batch == 0)
        adjust(state, view->history, plan);
    set_hosts(plan, state->begin, state->rank);
    code =
        mz_placement_change(state->placement, view->layer, state->weight_bytes, state->state_bytes,
                            MZ_MOVE_STEP, MZ_HIDE_NOTHING, plan, &copies, err);
    return code == MZ_OK ? mz_plan_ring_moves(plan, state->weight_bytes, MZ_MOVE_REDUCE_STEP,
                                              MZ_HIDE_LAYERS, err)
                         : code;
}

/* ---- scale-eplb
 * ----------------------------------------------------------------------------------*/

/* vExperts per expert: one more to the largest share while that pays. Returns their number. */
static int32_t grow(flexmoe_state *state, const mz_load *load) {
    const int32_t E = state->experts, all = state->ranks * state->slots;
    const double mean = (double)load->pairs / state->ranks;
    const double copy = state->o.sync * (double)state->weight_bytes / state->o.bps;
    int32_t given = E;
    for (int32_t e = 0; e < E; e++) {
        state->replicas[e] = 1;
        state->cap[e] = (double)load->total[e];
    }
    for (int32_t hot = argmax(state->cap, E); given < all && mean > 0;) {
        const double share = state->cap[hot];
        if (share / mean <= state->o.threshold)
            break;
        state->cap[hot] = (double)load->total[hot] / (state->replicas[hot] + 1);
        const int32_t next = argmax(state->cap, E);
        const double rows = fmax(state->cap[next], mean) - fmax(share, mean);
        if (!(rows / state->o.tps + copy < 0)) {
            state->cap[hot] = share;
            break;
        }
        state->replicas[hot]++;
        given++;
        hot = next;
    }
    return given;
}

/* The home stands first among the hosts where it is one, as mains do. */
static void home_first(const flexmoe_state *state, mz_plan *plan) {
    for (int32_t e = 0; e < state->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            if (plan->rank[i] == state->main_rank[e]) {
                plan->rank[i] = plan->rank[plan->begin[e]];
                plan->rank[plan->begin[e]] = state->main_rank[e];
                break;
            }
}

/* What every host but the home moves. */
static mz_code fetch_moves(const flexmoe_state *state, mz_plan *plan, mz_err *err) {
    static const struct {
        mz_move_kind kind;
        mz_move_phase phase;
        mz_move_hide hide;
    } pass[] = {{MZ_MOVE_WEIGHTS, MZ_MOVE_FORWARD, MZ_HIDE_DISPATCH},
                {MZ_MOVE_WEIGHTS, MZ_MOVE_BACKWARD, MZ_HIDE_DISPATCH},
                {MZ_MOVE_GRADIENTS, MZ_MOVE_REDUCE, MZ_HIDE_LAYERS}};
    mz_code code = MZ_OK;
    memset(state->used, 0, sizeof *state->used * (size_t)state->ranks);
    for (int32_t e = 0; e < state->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
            const int32_t home = state->main_rank[e], g = plan->rank[i];
            const bool known = g == home || state->used[g] == e + 1;
            state->used[g] = e + 1; /* fetched */
            for (size_t k = 0; !known && code == MZ_OK && k < sizeof pass / sizeof *pass; k++) {
                const bool back = pass[k].phase == MZ_MOVE_REDUCE;
                code = mz_plan_add_move(plan,
                                        (mz_move){.kind = pass[k].kind,
                                                  .phase = pass[k].phase,
                                                  .hide = pass[k].hide,
                                                  .expert = e,
                                                  .src = back ? g : home,
                                                  .dst = back ? home : g,
                                                  .bytes = state->weight_bytes},
                                        err);
            }
        }
    return code;
}

static mz_code decide_scale_eplb(flexmoe_state *state, const mz_load *load, mz_plan *plan,
                                 mz_err *err) {
    const int32_t items = grow(state, load);
    int32_t at = 0;
    mz_plan_reset(plan);
    for (int32_t e = 0; e < state->experts; e++) {
        for (int32_t k = 0; k < state->replicas[e]; k++)
            state->weight[at++] = state->cap[e];
        plan->begin[e + 1] = at;
    }
    for (int32_t r = 0; r < state->ranks; r++) {
        state->load[r] = 0;
        state->room[r] = state->slots;
    }
    mz_code code = mz_pack_lpt(state->pack, state->weight, items, state->room, state->load,
                               state->ranks, state->bin, state->place, err);
    for (int32_t i = 0; code == MZ_OK && i < items; i++) {
        plan->rank[i] = state->bin[i];
        plan->target[i] = -1;
    }
    if (code != MZ_OK)
        return code;
    home_first(state, plan);
    snprintf(plan->why, sizeof plan->why, "%d expansions", items - state->experts);
    return fetch_moves(state, plan, err);
}

/* ---- laer
 * ----------------------------------------------------------------------------------------*/

/* Slots to hosts of a plan, ranks ascending. */
static void hosts_of_slots(const flexmoe_state *state, const int32_t *slot, mz_plan *plan) {
    const int32_t E = state->experts, all = state->ranks * state->slots;
    int32_t *next = state->scratch;
    memset(plan->begin, 0, sizeof *plan->begin * ((size_t)E + 1));
    for (int32_t i = 0; i < all; i++)
        plan->begin[slot[i] + 1]++;
    for (int32_t e = 0; e < E; e++) {
        next[e] = plan->begin[e];
        plan->begin[e + 1] += plan->begin[e];
    }
    for (int32_t i = 0; i < all; i++) {
        const int32_t at = next[slot[i]]++;
        plan->rank[at] = i / state->slots;
        plan->target[at] = -1;
    }
}

/* Rows of every rank under laer's routing; the plan serves as scratch. */
static mz_code rows_of_slots(flexmoe_state *state, const int32_t *slot, const mz_load *seen,
                             mz_plan *plan, double *most, double *ratio, mz_err *err) {
    hosts_of_slots(state, slot, plan);
    mz_code code = mz_expand_rows(state->expand, plan, seen->count, NULL, NULL, MZ_SPREAD_NEAR,
                                  mz_plan_forward_entries(plan), err);
    memset(state->load, 0, sizeof *state->load * (size_t)state->ranks);
    for (int32_t i = 0; code == MZ_OK && i < plan->begin[state->experts]; i++)
        state->load[plan->rank[i]] += (double)plan->forward[i];
    *most = *ratio = state->load[0];
    double least = state->load[0];
    for (int32_t r = 1; r < state->ranks; r++) {
        *most = fmax(*most, state->load[r]);
        least = fmin(least, state->load[r]);
    }
    *ratio = least > 0 ? *most / least : INFINITY;
    return code;
}

/* A slot of rank r that holds expert e; -1: none. */
static int32_t slot_of(const flexmoe_state *state, const int32_t *slot, int32_t r, int32_t e) {
    for (int32_t i = r * state->slots; i < (r + 1) * state->slots; i++)
        if (slot[i] == e)
            return i;
    return -1;
}

/* One domain's exchange of a replica of `cold` for one of `hot`. */
static void trade(flexmoe_state *state, int32_t *slot, int32_t d, int32_t hot, int32_t cold) {
    int32_t loser = -1, partner = -1, heaviest = -1;
    for (int32_t r = 0; r < state->ranks; r++) {
        if (state->domain[r] != d)
            continue;
        if (slot_of(state, slot, r, cold) >= 0 &&
            (loser < 0 || state->load[r] < state->load[loser]))
            loser = r;
        int32_t held = 0;
        for (int32_t i = r * state->slots; i < (r + 1) * state->slots; i++)
            held += slot[i] == hot;
        if (partner < 0 && held > 0 && held < state->slots)
            partner = r;
    }
    if (loser < 0)
        return;
    const int32_t freed = slot_of(state, slot, loser, cold);
    if (partner < 0) {
        slot[freed] = hot;
        return;
    }
    for (int32_t i = partner * state->slots; i < (partner + 1) * state->slots; i++)
        if (slot[i] != hot &&
            (heaviest < 0 || state->cap[slot[i]] > state->cap[slot[heaviest]] ||
             (state->cap[slot[i]] == state->cap[slot[heaviest]] && slot[i] < slot[heaviest])))
            heaviest = i;
    slot[freed] = slot[heaviest];
    slot[heaviest] = hot;
}

/* The next trial from `slot`; false where nothing can be traded. */
static bool trade_everywhere(flexmoe_state *state, const int32_t *slot, const mz_load *seen) {
    const int32_t E = state->experts, all = state->ranks * state->slots;
    memset(state->replicas, 0, sizeof *state->replicas * (size_t)E);
    for (int32_t i = 0; i < all; i++)
        state->replicas[slot[i]]++;
    for (int32_t e = 0; e < E; e++)
        state->cap[e] = (double)(seen->total[e] / state->replicas[e]);
    mz_order_falling(state->cap, E, state->order, state->scratch);
    int32_t k = E - 1;
    while (k > 0 && state->replicas[state->order[k]] <= state->domains)
        k--;
    if (k == 0)
        return false;
    memcpy(state->trial, slot, sizeof *slot * (size_t)all);
    for (int32_t d = 0; d < state->domains; d++)
        trade(state, state->trial, d, state->order[0], state->order[k]);
    return true;
}

static mz_code decide_laer(flexmoe_state *state, const mz_view *view, mz_plan *plan, mz_err *err) {
    const size_t all = (size_t)state->ranks * (size_t)state->slots;
    int32_t *slot = state->slot + (size_t)view->layer * all, round = 0;
    const mz_load *seen = view->history && view->history->pairs > 0 ? view->history : NULL;
    double most = 0, ratio = 0, now_most, now_ratio;
    mz_plan_reset(plan);
    mz_code code = seen ? rows_of_slots(state, slot, seen, plan, &most, &ratio, err) : MZ_OK;
    for (; code == MZ_OK && seen && round < state->o.rounds && ratio > 1; round++) {
        if (!trade_everywhere(state, slot, seen))
            break;
        code = rows_of_slots(state, state->trial, seen, plan, &now_most, &now_ratio, err);
        if (code != MZ_OK || !(now_most < most || now_ratio < ratio))
            break;
        memcpy(slot, state->trial, sizeof *slot * all);
        most = now_most;
        ratio = now_ratio;
    }
    if (code != MZ_OK)
        return code;
    hosts_of_slots(state, slot, plan);
    snprintf(plan->why, sizeof plan->why, "%d rounds", round);
    return mz_restore_moves(plan, state->weight_bytes, err);
}

/* ---- the policy
 * ----------------------------------------------------------------------------------*/

static mz_code flexmoe_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    flexmoe_state *state = self;
    switch (state->o.form) {
    case FORM_RECOMMENDED:
        return decide_recommended(state, view, plan, err);
    case FORM_SCALE_EPLB:
        return decide_scale_eplb(state, view->current, plan, err);
    default:
        return decide_laer(state, view, plan, err);
    }
}

static mz_code flexmoe_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    flexmoe_state *state = self;
    const mz_spread spread = state->o.form == FORM_LAER ? MZ_SPREAD_NEAR : MZ_SPREAD_DEAL;
    mz_plan_lossless(plan, call->load);
    mz_code code = mz_expand_rows(state->expand, plan, call->load->count, NULL, NULL, spread,
                                  mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_flexmoe = {
    .name = "flexmoe",
    .summary = "experts grow and shrink by slots every few steps; optimizer state moves along",
    .needs_sizes = true,
    .options = flexmoe_table,
    .option_count = sizeof flexmoe_table / sizeof *flexmoe_table,
    .options_size = sizeof(flexmoe_options),
    .init = flexmoe_init,
    .decide = flexmoe_decide,
    .route = flexmoe_route,
};
