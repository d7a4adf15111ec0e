/* llep: least-loaded expert parallelism, ranges of pairs and weights spill to the least loaded
 * ranks (balancing-systems.md section 10.5).
 *
 * Source: LLEP, ICML'26 (PMLR v306), and its repository LeastLoadedEP. Sees the exact current
 * counts and runs every layer call, forward and backward. Experts by falling load: the native rank
 * keeps what fits under cap = alpha * pairs / R beside the experts it still has to take, the rest
 * goes in chunks to the rank of least load; a chunk below `m` pairs is not worth its weights unless
 * it is the last one, and what finds no room goes to the least loaded rank over its cap. The native
 * rank keeps the first pairs in (source rank, position) order, helpers follow in order of choice.
 * Where the imbalance is below `lambda` nothing is done. Moves: W per (expert, helper) forward, its
 * gradient (bf16, W) back after the products of backward; nobody says that either hides behind
 * anything, so by default both block. Weights stay with the activations from forward to backward.
 * There is no limit of slots.
 *
 * Options, those of the paper first: alpha 1, m 1024, lambda 1.3, measure=experts (the imbalance
 * that lambda is held against: max/mean of expert loads; ranks: of rank loads, as the code),
 * resort yes (no: the code's order, not sorted again between the chunks of an expert of which
 * nothing stays native: what finds no room then goes to the rank that was least loaded at first),
 * variant=paper. variant=code is the repository as it runs: cap = floor(alpha * floor(pairs / R)),
 * resort no, and always balancing; alpha is then 1.1 unless given. Departures: the paper's cap is
 * rounded up to whole pairs, so that the caps of all ranks carry all pairs. */
#include "sim/policy/parts.h"

#include <string.h>

typedef struct llep_options {
    double alpha, lambda;
    int64_t rows_min;
    int measure, variant, hide;
    bool resort;
} llep_options;

enum { MEASURE_EXPERTS, MEASURE_RANKS };
enum { VARIANT_PAPER, VARIANT_CODE };

#define FIELD(name) offsetof(llep_options, name)
static const mz_opt llep_table[] = {
    {"alpha", 0, MZ_OPT_REAL, FIELD(alpha), "0", "X",
     "cap of a rank over the mean; 0: 1, and 1.1 with variant=code", 0, 1e6, MZ_UNIT_NONE},
    {"m", 0, MZ_OPT_INT, FIELD(rows_min), "1024", "ROWS",
     "smallest chunk that is sent to a helper unless it is the last one", 0, 1e12, MZ_UNIT_NONE},
    {"lambda", 0, MZ_OPT_REAL, FIELD(lambda), "1.3", "X",
     "do nothing below this imbalance; not used with variant=code", 0, 1e6, MZ_UNIT_NONE},
    {"measure", 0, MZ_OPT_ENUM, FIELD(measure), "experts", "experts|ranks",
     "loads whose max/mean is held against lambda", 0, 0, MZ_UNIT_NONE},
    {"variant", 0, MZ_OPT_ENUM, FIELD(variant), "paper", "paper|code",
     "the rule of the paper, or the repository's", 0, 0, MZ_UNIT_NONE},
    {"resort", 0, MZ_OPT_FLAG, FIELD(resort), "yes", NULL,
     "sort the ranks again after every chunk; always no with variant=code", 0, 0, MZ_UNIT_NONE},
    {"hide", 0, MZ_OPT_ENUM, FIELD(hide), "nothing", "nothing|dispatch",
     "what weights hide behind; with dispatch, gradients behind other layers", 0, 0, MZ_UNIT_NONE},
};

typedef struct llep_state {
    int32_t ranks, experts;
    double alpha, lambda;
    int64_t rows_min;
    bool code_cap, by_rank, always, resort;
    mz_replica_moves moves;
    int32_t *main_rank, *count, *order, *merge;
    int64_t *load; /* [R] rows assigned, and those of mains still to come */
    int64_t *sent;
    double *key;         /* [E] */
    mz_replica *replica; /* [E + R]: every copy ends its expert or fills its rank */
    int32_t replicas;
    mz_expand *expand;
} llep_state;

static mz_code llep_init(const mz_policy_env *env, const void *options, mz_arena *arena, void **out,
                         mz_policy_traits *traits, mz_err *err) {
    const llep_options *o = options;
    llep_state *state = MZ_NEW(arena, llep_state, 1);
    if (!state)
        return mz_fail_nomem(err, "the state of a policy");
    const bool code_rule = o->variant == VARIANT_CODE;
    const int32_t R = env->ranks, E = env->experts;
    *state = (llep_state){.ranks = R,
                          .experts = E,
                          .alpha = o->alpha > 0 ? o->alpha : (code_rule ? 1.1 : 1.0),
                          .lambda = o->lambda,
                          .rows_min = o->rows_min,
                          .code_cap = code_rule,
                          .by_rank = o->measure == MEASURE_RANKS,
                          .always = code_rule,
                          .resort = o->resort && !code_rule};
    state->moves = (mz_replica_moves){.weight_bytes = env->weight_bytes,
                                      .gradient_bytes = env->weight_bytes,
                                      .hide = o->hide ? MZ_HIDE_DISPATCH : MZ_HIDE_NOTHING,
                                      .hide_gradients = o->hide ? MZ_HIDE_LAYERS : MZ_HIDE_NOTHING};
    state->main_rank = MZ_NEW(arena, int32_t, E);
    state->count = MZ_NEW(arena, int32_t, E);
    state->order = MZ_NEW(arena, int32_t, E);
    state->merge = MZ_NEW(arena, int32_t, E);
    state->key = MZ_NEW(arena, double, E);
    state->load = MZ_NEW(arena, int64_t, R);
    state->sent = MZ_NEW(arena, int64_t, R);
    state->replica = MZ_NEW(arena, mz_replica, (int64_t)E + R);
    if (!state->main_rank || !state->count || !state->order || !state->merge || !state->load ||
        !state->key || !state->sent || !state->replica)
        return mz_fail_nomem(err, "the state of a policy");
    mz_layout_mains(R, E, state->main_rank);
    *traits = (mz_policy_traits){.sees = MZ_SEES_CURRENT,
                                 .interval = 1,
                                 .slots = mz_mains_per_rank(R, E) + 1,
                                 .open_slots = true,
                                 .replica_memory = MZ_REPLICAS_PER_LAYER,
                                 .replica_gradient_bytes = env->weight_bytes,
                                 .score_source = ""};
    *out = state;
    return mz_expand_create(arena, env, R, &state->expand, err);
}

static bool balanced(const llep_state *state, const mz_load *load) {
    if (state->always || load->pairs == 0)
        return load->pairs == 0;
    const int64_t *rows = state->by_rank ? state->load : load->total;
    const int32_t n = state->by_rank ? state->ranks : state->experts;
    int64_t most = 0;
    for (int32_t i = 0; i < n; i++)
        most = rows[i] > most ? rows[i] : most;
    return (double)most * n < state->lambda * (double)load->pairs;
}

static int32_t least_loaded(const llep_state *state, int32_t native) {
    int32_t best = -1;
    for (int32_t r = 0; r < state->ranks; r++)
        if (r != native && (best < 0 || state->load[r] < state->load[best]))
            best = r;
    return best;
}

/* first: where the copies of e begin; a rank that helps already gets the rows beside its others. */
static void give(llep_state *state, int32_t e, int32_t rank, int64_t rows, int32_t first) {
    state->load[rank] += rows;
    for (int32_t i = first; i < state->replicas; i++)
        if (state->replica[i].rank == rank) {
            state->replica[i].rows += rows;
            return;
        }
    state->replica[state->replicas++] = (mz_replica){e, rank, rows};
}

/* The least loaded rank has the most room, so where it must be skipped all others must be too: one
 * look per chunk stands for the walk over the sorted ranks. */
static void spill(llep_state *state, int32_t e, int64_t rest, int64_t cap, bool resort) {
    const int32_t native = state->main_rank[e], first = state->replicas;
    const int32_t at_first = least_loaded(state, native);
    while (rest > 0) {
        const int32_t g = least_loaded(state, native);
        const int64_t room = cap - state->load[g];
        const int64_t chunk = rest < room ? rest : room;
        if (room <= 0 || (chunk < state->rows_min && rest > chunk)) {
            give(state, e, resort ? g : at_first, rest, first);
            return;
        }
        give(state, e, g, chunk, first);
        rest -= chunk;
    }
}

static void solve(llep_state *state, const mz_load *load, int64_t cap) {
    const int32_t *order = state->order;
    for (int32_t e = 0; e < state->experts; e++)
        state->key[e] = (double)load->total[e];
    mz_order_falling(state->key, state->experts, state->order, state->merge);
    for (int32_t k = 0; k < state->experts && load->total[order[k]] > 0; k++) {
        const int32_t e = order[k], native = state->main_rank[e];
        const int64_t rows = load->total[e];
        /* load[native] holds the rows of e, which are still to come. */
        const int64_t room = cap - (state->load[native] - rows);
        if (room >= rows || state->ranks == 1)
            continue;
        const int64_t stay = room > 0 ? room : 0;
        state->load[native] -= rows - stay;
        spill(state, e, rows - stay, cap, state->resort || stay > 0);
    }
}

static int64_t cap_of(const llep_state *state, int64_t pairs) {
    if (state->code_cap)
        return (int64_t)(state->alpha * (double)(pairs / state->ranks));
    return mz_rows_up(state->alpha * ((double)pairs / state->ranks));
}

static mz_code llep_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    llep_state *state = self;
    const mz_load *load = view->current;
    mz_plan_reset(plan);
    state->replicas = 0;
    memset(state->load, 0, sizeof(int64_t) * (size_t)state->ranks);
    for (int32_t e = 0; e < state->experts; e++)
        state->load[state->main_rank[e]] += load->total[e];
    const bool idle = balanced(state, load);
    if (!idle)
        solve(state, load, cap_of(state, load->pairs));
    mz_code code = mz_plan_hosts(plan, state->main_rank, load->total, state->replica,
                                 state->replicas, state->count, err);
    if (code != MZ_OK)
        return code;
    snprintf(plan->why, sizeof plan->why, idle ? "balanced enough" : "%d copies", state->replicas);
    return mz_plan_replica_moves(plan, &state->moves, state->sent, err);
}

static mz_code llep_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    llep_state *state = self;
    mz_plan_lossless(plan, call->load);
    mz_code code = mz_expand_rows(state->expand, plan, call->load->count, NULL, plan->target,
                                  MZ_SPREAD_ORDER, mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_llep = {
    .name = "llep",
    .summary = "ranges of pairs and their experts' weights spill to the least loaded ranks",
    .options = llep_table,
    .option_count = sizeof llep_table / sizeof *llep_table,
    .options_size = sizeof(llep_options),
    .init = llep_init,
    .decide = llep_decide,
    .route = llep_route,
};
