/* topoep: replicas where they save bytes between domains, then balance inside each domain
 * (balancing-systems.md section 9).
 *
 * Source: TopoEP ("Scale-EPLB"), the paper and its repository's CUDA solver and CPU reference. Sees
 * the exact current counts and runs every layer call. Stage 1: for every domain and expert whose
 * main lies elsewhere the copy saves 2 * D * S_tok - W bytes (D pairs from that domain); those that
 * save something, largest first, get a copy on the domain's rank of fewest used slots. Pairs then
 * go to the host inside their domain where there is one, else evenly to all hosts. Stage 2, in each
 * domain alone: the most loaded rank hands rows of one expert to a less loaded one, which hosts the
 * expert or has a free slot, as many as even the two out at most, largest first; one that can hand
 * over nothing is stuck until the next success. What is uneven between domains stays.
 * Moves: W per copy forward, beside a token pipeline of two chunks; W again for backward, because
 * the slots are shared by all layers, and bf16 gradients W back to the main. Optimizer state never
 * moves. Resident: the copies' slots and a gradient accumulator of E * W on every rank.
 *
 * Options and the source's values: slots (mains included, as in its solver; its paper has two extra
 * ones), solver=cuda (cpu: the first routing takes the (source, expert) cells by size and fills the
 * least loaded hosts), rounds (0: 64 in every domain, or 4096 in all with solver=cpu), u_min 1,
 * chunks 2. Departures: mains in blocks (its benchmark: e mod R); "lower cost" among equal choices
 * is read as the bytes of a copy (none where the target hosts the expert); a copy that ends without
 * pairs is not sent; its stop after 8 rounds without gain, for larger scales, is not taken over. */
#include "sim/policy/parts.h"

#include <string.h>

typedef struct topoep_options {
    int64_t slots, rounds, rows_min, chunks;
    int solver;
} topoep_options;

enum { SOLVER_CUDA, SOLVER_CPU };
enum { ROUNDS_DOMAIN = 64, ROUNDS_ALL = 4096 };

#define FIELD(name) offsetof(topoep_options, name)
static const mz_opt topoep_table[] = {
    {"slots", 0, MZ_OPT_INT, FIELD(slots), "0", "N",
     "expert slots per rank, mains included; 0: mains plus two", 0, 1e6, MZ_UNIT_NONE},
    {"solver", 0, MZ_OPT_ENUM, FIELD(solver), "cuda", "cuda|cpu",
     "first routing: even over the hosts, or by size to the least loaded", 0, 0, MZ_UNIT_NONE},
    {"rounds", 0, MZ_OPT_INT, FIELD(rounds), "0", "N",
     "rounds of balancing; 0: 64 in every domain, with solver=cpu 4096 in all", 0, 1e9,
     MZ_UNIT_NONE},
    {"u_min", 0, MZ_OPT_INT, FIELD(rows_min), "1", "ROWS", "fewest pairs that balancing hands over",
     1, 1e12, MZ_UNIT_NONE},
    {"chunks", 0, MZ_OPT_INT, FIELD(chunks), "2", "N",
     "parts of the token pipeline that copies hide behind", 1, 64, MZ_UNIT_NONE},
};

/* Instances: main of expert e is number e, copies follow in order of choice. */
typedef struct instance {
    int32_t expert, rank;
    int32_t next; /* of the same expert, -1 none */
    int32_t row;  /* of the split, -1: the only host takes all */
    int64_t rows;
} instance;

typedef struct topoep_state {
    int32_t ranks, experts, domains, slots, mains;
    int64_t weight_bytes, token_bytes, rows_min, rounds;
    bool fill;
    mz_replica_moves moves;
    int32_t *domain, *main_rank, *member, *member_begin;
    /* stage 1 */
    int64_t *from;   /* [domains][E] pairs of a domain */
    double *benefit; /* candidates, or cells of the first routing by size */
    int32_t *cell, *order, *scratch;
    /* the plan being made */
    instance *instance;
    int32_t instances;
    int32_t *last;  /* [E] */
    int32_t *used;  /* [R] */
    int32_t *slot;  /* [R][slots] */
    int32_t *at;    /* [R][E] instance plus one, 0 none */
    int64_t *load;  /* [R] */
    int64_t *split; /* rows by source of the instances that share an expert, [][R] */
    int32_t splits;
    int32_t *local; /* [domains] the host of an expert inside */
    int32_t *hosts; /* [R] of one expert, by rank */
    bool *stuck;    /* [R] */
    mz_replica *replica;
    const int64_t **given; /* [instances] in order of the plan */
    int32_t *count;
    int64_t *sent;
    mz_expand *expand;
} topoep_state;

static bool alloc_state(topoep_state *x, mz_arena *arena) {
    const int64_t R = x->ranks, E = x->experts, D = x->domains;
    /* A copy fills a slot, and is made for an expert and domain or by a round. */
    const int64_t made = (D > 1 ? D * E : 0) + (x->fill ? 1 : D) * x->rounds;
    const int64_t copies = R * x->slots - E < made ? R * x->slots - E : made;
    const int64_t cells = x->fill ? R * E : D * E;
    x->main_rank = MZ_NEW(arena, int32_t, E);
    x->member = MZ_NEW(arena, int32_t, R);
    x->member_begin = MZ_NEW(arena, int32_t, D + 2);
    x->from = MZ_NEW(arena, int64_t, D * E);
    x->benefit = MZ_NEW(arena, double, cells);
    x->cell = MZ_NEW(arena, int32_t, cells);
    x->order = MZ_NEW(arena, int32_t, cells);
    x->scratch = MZ_NEW(arena, int32_t, cells);
    x->instance = MZ_NEW(arena, instance, E + copies);
    x->last = MZ_NEW(arena, int32_t, E);
    x->used = MZ_NEW(arena, int32_t, R);
    x->slot = MZ_NEW(arena, int32_t, R * x->slots);
    x->at = MZ_NEW(arena, int32_t, R * E);
    x->load = MZ_NEW(arena, int64_t, R);
    x->split = MZ_NEW(arena, int64_t, 2 * copies * R + 1);
    x->local = MZ_NEW(arena, int32_t, D);
    x->hosts = MZ_NEW(arena, int32_t, R);
    x->stuck = MZ_NEW(arena, bool, R);
    x->replica = MZ_NEW(arena, mz_replica, copies + 1);
    x->given = MZ_NEW(arena, const int64_t *, E + copies);
    x->count = MZ_NEW(arena, int32_t, E);
    x->sent = MZ_NEW(arena, int64_t, R);
    return x->main_rank && x->member && x->member_begin && x->from && x->benefit && x->cell &&
           x->order && x->scratch && x->instance && x->last && x->used && x->slot && x->at &&
           x->load && x->split && x->local && x->hosts && x->stuck && x->replica && x->given &&
           x->count && x->sent;
}

static void fill_constants(topoep_state *x) {
    mz_layout_mains(x->ranks, x->experts, x->main_rank);
    int32_t *begin = x->member_begin + 1; /* counting sort with the usual shift by one */
    for (int32_t r = 0; r < x->ranks; r++)
        begin[x->domain[r]]++;
    for (int32_t d = 0, at = 0; d < x->domains; d++) {
        const int32_t n = begin[d];
        begin[d] = at;
        at += n;
    }
    for (int32_t r = 0; r < x->ranks; r++)
        x->member[begin[x->domain[r]]++] = r;
    for (int32_t e = 0; e < x->experts; e++) {
        x->instance[e] = (instance){.expert = e, .rank = x->main_rank[e]};
        x->at[(int64_t)x->main_rank[e] * x->experts + e] = e + 1;
    }
    x->instances = x->experts;
}

static mz_code topoep_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                           void **out, mz_policy_traits *traits, mz_err *err) {
    const topoep_options *o = options;
    topoep_state *x = MZ_NEW(arena, topoep_state, 1);
    if (!x)
        return mz_fail_nomem(err, "the state of a policy");
    mz_code code = mz_slots("topoep", env, o->slots, &x->slots, err);
    if (code != MZ_OK)
        return code;
    x->ranks = env->ranks;
    x->experts = env->experts;
    x->domains = env->domains > 1 ? env->domains : 1;
    x->weight_bytes = env->weight_bytes;
    x->token_bytes = env->token_bytes;
    x->rows_min = o->rows_min;
    x->fill = o->solver == SOLVER_CPU;
    x->rounds = o->rounds > 0 ? o->rounds : (x->fill ? ROUNDS_ALL : ROUNDS_DOMAIN);
    x->moves = (mz_replica_moves){.weight_bytes = env->weight_bytes,
                                  .gradient_bytes = env->weight_bytes,
                                  .again = true,
                                  .hide = MZ_HIDE_DISPATCH,
                                  .hide_again = MZ_HIDE_DISPATCH,
                                  .hide_gradients = MZ_HIDE_LAYERS};
    code = mz_copy_domains(env, arena, &x->domain, err);
    if (code != MZ_OK)
        return code;
    if (!alloc_state(x, arena))
        return mz_fail_nomem(err, "the state of a policy");
    fill_constants(x);
    *traits = (mz_policy_traits){.sees = MZ_SEES_CURRENT,
                                 .interval = 1,
                                 .slots = x->slots,
                                 .replica_memory = MZ_REPLICAS_SHARED,
                                 .buffer_bytes = env->experts * env->weight_bytes,
                                 .chunks = (int32_t)o->chunks,
                                 .score_source = ""};
    *out = x;
    return mz_expand_create(arena, env, env->ranks, &x->expand, err);
}

/* Mains alone, no rows. */
static void start(topoep_state *x) {
    for (int32_t i = x->experts; i < x->instances; i++)
        x->at[(int64_t)x->instance[i].rank * x->experts + x->instance[i].expert] = 0;
    x->instances = x->experts;
    x->splits = 0;
    memset(x->load, 0, sizeof(int64_t) * (size_t)x->ranks);
    memset(x->used, 0, sizeof(int32_t) * (size_t)x->ranks);
    for (int32_t e = 0; e < x->experts; e++) {
        const int32_t r = x->main_rank[e];
        x->instance[e].rows = 0;
        x->instance[e].next = x->instance[e].row = -1;
        x->last[e] = e;
        x->slot[(int64_t)r * x->slots + x->used[r]++] = e;
    }
}

static int64_t *rows_of(const topoep_state *x, int32_t i) {
    return x->split + (int64_t)x->instance[i].row * x->ranks;
}

static void open_split(topoep_state *x, int32_t i) {
    x->instance[i].row = x->splits++;
    memset(rows_of(x, i), 0, sizeof(int64_t) * (size_t)x->ranks);
}

/* A copy of e on rank r, without rows. */
static int32_t add_copy(topoep_state *x, int32_t e, int32_t r) {
    const int32_t i = x->instances++;
    x->instance[i] = (instance){.expert = e, .rank = r, .next = -1};
    x->instance[x->last[e]].next = i;
    x->last[e] = i;
    x->slot[(int64_t)r * x->slots + x->used[r]++] = i;
    x->at[(int64_t)r * x->experts + e] = i + 1;
    open_split(x, i);
    return i;
}

/* Stage 1. Candidates are listed by expert, then domain, which is the order among equal ones. */
static void save_bytes(topoep_state *x, const mz_load *load) {
    const int32_t E = x->experts;
    memset(x->from, 0, sizeof(int64_t) * (size_t)x->domains * (size_t)E);
    for (int32_t s = 0; s < x->ranks; s++) {
        int64_t *from = x->from + (int64_t)x->domain[s] * E;
        const int64_t *row = load->count + (int64_t)s * E;
        for (int32_t e = 0; e < E; e++)
            from[e] += row[e];
    }
    int32_t n = 0;
    for (int32_t e = 0; e < E; e++)
        for (int32_t d = 0; d < x->domains; d++) {
            const int64_t pairs = x->from[(int64_t)d * E + e];
            const double saved =
                2.0 * (double)pairs * (double)x->token_bytes - (double)x->weight_bytes;
            if (pairs == 0 || saved <= 0 || d == x->domain[x->main_rank[e]])
                continue;
            x->benefit[n] = saved;
            x->cell[n++] = d * E + e;
        }
    mz_order_falling(x->benefit, n, x->order, x->scratch);
    for (int32_t k = 0; k < n; k++) {
        const int32_t d = x->cell[x->order[k]] / E, e = x->cell[x->order[k]] % E;
        int32_t best = -1;
        for (int32_t j = x->member_begin[d]; j < x->member_begin[d + 1]; j++) {
            const int32_t r = x->member[j];
            if (x->used[r] < x->slots && (best < 0 || x->used[r] < x->used[best]))
                best = r;
        }
        if (best >= 0)
            add_copy(x, e, best);
    }
}

/* The hosts of e by rank into x->hosts, and by domain into x->local: stage 1 leaves one at most. */
static int32_t list_hosts(topoep_state *x, int32_t e) {
    int32_t n = 0;
    for (int32_t d = 0; d < x->domains; d++)
        x->local[d] = -1;
    for (int32_t i = e; i >= 0; i = x->instance[i].next) {
        int32_t at = n++;
        for (; at > 0 && x->instance[x->hosts[at - 1]].rank > x->instance[i].rank; at--)
            x->hosts[at] = x->hosts[at - 1];
        x->hosts[at] = i;
        x->local[x->domain[x->instance[i].rank]] = i;
    }
    return n;
}

static void add_rows(topoep_state *x, int32_t i, int32_t source, int64_t rows) {
    rows_of(x, i)[source] += rows;
    x->instance[i].rows += rows;
    x->load[x->instance[i].rank] += rows;
}

static void split_even(topoep_state *x, int32_t n, int32_t source, int64_t rows) {
    for (int32_t k = 0; k < n; k++)
        add_rows(x, x->hosts[k], source, rows / n + (k < rows % n));
}

/* Rows to the least loaded of n hosts until all are equal, then evenly (rest: lower ranks). */
static void split_fill(topoep_state *x, int32_t n, int32_t source, int64_t rows) {
    while (rows > 0) {
        int64_t low = INT64_MAX, next = INT64_MAX;
        int32_t lowest = 0;
        for (int32_t k = 0; k < n; k++) {
            const int64_t load = x->load[x->instance[x->hosts[k]].rank];
            if (load < low) {
                next = low;
                low = load;
                lowest = 0;
            } else if (load > low && load < next) {
                next = load;
            }
            lowest += load == low;
        }
        int64_t more = next < INT64_MAX ? (next - low) * lowest : rows;
        more = more < rows ? more : rows;
        rows -= more;
        for (int32_t k = 0, turn = 0; k < n; k++)
            if (x->load[x->instance[x->hosts[k]].rank] == low) {
                add_rows(x, x->hosts[k], source, more / lowest + (turn < more % lowest));
                turn++;
            }
    }
}

static void all_to_main(topoep_state *x, int32_t e, int64_t rows) {
    x->instance[e].rows += rows;
    x->load[x->main_rank[e]] += rows;
}

static void first_even(topoep_state *x, const mz_load *load) {
    for (int32_t e = 0; e < x->experts; e++) {
        if (x->instance[e].next < 0) {
            all_to_main(x, e, load->total[e]);
            continue;
        }
        const int32_t n = list_hosts(x, e);
        open_split(x, e);
        for (int32_t s = 0; s < x->ranks; s++) {
            const int64_t rows = load->count[(int64_t)s * x->experts + e];
            const int32_t local = x->local[x->domain[s]];
            if (local >= 0)
                add_rows(x, local, s, rows);
            else
                split_even(x, n, s, rows);
        }
    }
}

static void first_fill(topoep_state *x, const mz_load *load) {
    int32_t n = 0;
    for (int32_t s = 0; s < x->ranks; s++)
        for (int32_t e = 0; e < x->experts; e++) {
            const int32_t cell = s * x->experts + e;
            if (load->count[cell] == 0)
                continue;
            x->benefit[n] = (double)load->count[cell];
            x->cell[n++] = cell;
        }
    for (int32_t e = 0; e < x->experts; e++)
        if (x->instance[e].next >= 0)
            open_split(x, e);
    mz_order_falling(x->benefit, n, x->order, x->scratch);
    for (int32_t k = 0; k < n; k++) {
        const int32_t cell = x->cell[x->order[k]], s = cell / x->experts, e = cell % x->experts;
        if (x->instance[e].next < 0) {
            all_to_main(x, e, load->count[cell]);
            continue;
        }
        const int32_t hosts = list_hosts(x, e), local = x->local[x->domain[s]];
        if (local >= 0)
            add_rows(x, local, s, load->count[cell]);
        else
            split_fill(x, hosts, s, load->count[cell]);
    }
}

/* ---- stage 2 ---------------------------------------------------------------------------------*/

typedef struct handover {
    int64_t rows, load;
    int32_t cost, expert, from, target;
} handover;

/* Largest first, then the less loaded target, the cheaper copy, the lower expert and rank. */
static bool better(const handover *a, const handover *b) {
    if (a->rows != b->rows)
        return a->rows > b->rows;
    if (a->load != b->load)
        return a->load < b->load;
    if (a->cost != b->cost)
        return a->cost < b->cost;
    return a->expert != b->expert ? a->expert < b->expert : a->target < b->target;
}

static int32_t busiest(const topoep_state *x, int32_t d) {
    int32_t b = -1;
    for (int32_t j = x->member_begin[d]; j < x->member_begin[d + 1]; j++) {
        const int32_t r = x->member[j];
        if (!x->stuck[r] && (b < 0 || x->load[r] > x->load[b]))
            b = r;
    }
    return b;
}

/* What rank b of domain d best hands over; rows 0: nothing. */
static handover choose(const topoep_state *x, int32_t d, int32_t b) {
    handover best = {0};
    for (int32_t k = 0; k < x->used[b]; k++) {
        const int32_t i = x->slot[(int64_t)b * x->slots + k], e = x->instance[i].expert;
        const int64_t most = x->instance[i].rows;
        if (most < x->rows_min || most < best.rows)
            continue;
        for (int32_t j = x->member_begin[d]; j < x->member_begin[d + 1]; j++) {
            const int32_t t = x->member[j];
            const int64_t half = (x->load[b] - x->load[t]) / 2;
            const int64_t rows = most < half ? most : half;
            if (x->load[t] >= x->load[b] || rows < x->rows_min || rows < best.rows)
                continue;
            const bool hosted = x->at[(int64_t)t * x->experts + e] > 0;
            if (!hosted && x->used[t] >= x->slots)
                continue;
            const int32_t cost = hosted ? 0 : 1 + (x->domain[x->main_rank[e]] != d);
            const handover h = {rows, x->load[t], cost, e, i, t};
            if (better(&h, &best))
                best = h;
        }
    }
    return best;
}

static void hand_over(topoep_state *x, const mz_load *load, const handover *h) {
    if (x->instance[h->expert].row < 0) { /* the main was the only host so far */
        open_split(x, h->expert);
        for (int32_t s = 0; s < x->ranks; s++)
            rows_of(x, h->expert)[s] = load->count[(int64_t)s * x->experts + h->expert];
    }
    int32_t to = x->at[(int64_t)h->target * x->experts + h->expert] - 1;
    if (to < 0)
        to = add_copy(x, h->expert, h->target);
    int64_t *give = rows_of(x, h->from), *take = rows_of(x, to), left = h->rows;
    for (int32_t s = 0; left > 0; s++) {
        const int64_t n = give[s] < left ? give[s] : left;
        give[s] -= n;
        take[s] += n;
        left -= n;
    }
    x->instance[h->from].rows -= h->rows;
    x->instance[to].rows += h->rows;
    x->load[x->instance[h->from].rank] -= h->rows;
    x->load[h->target] += h->rows;
}

static void balance_domain(topoep_state *x, const mz_load *load, int32_t d, int64_t *rounds) {
    memset(x->stuck, 0, sizeof(bool) * (size_t)x->ranks);
    for (; *rounds > 0; --*rounds) {
        const int32_t b = busiest(x, d);
        if (b < 0)
            return;
        const handover h = choose(x, d, b);
        if (h.rows == 0) {
            x->stuck[b] = true;
            continue;
        }
        hand_over(x, load, &h);
        memset(x->stuck, 0, sizeof(bool) * (size_t)x->ranks);
    }
}

/* Hosts of the plan; copies without rows are left out. */
static mz_code set_hosts(topoep_state *x, const mz_load *load, mz_plan *plan, mz_err *err) {
    int32_t replicas = 0, i = 0;
    for (int32_t e = 0; e < x->experts; e++)
        for (int32_t k = e; k >= 0; k = x->instance[k].next) {
            const instance *at = &x->instance[k];
            if (k >= x->experts && at->rows == 0)
                continue;
            if (k >= x->experts)
                x->replica[replicas++] = (mz_replica){e, at->rank, at->rows};
            x->given[i++] = at->row >= 0 ? rows_of(x, k) : NULL;
        }
    snprintf(plan->why, sizeof plan->why, "%d replicas", replicas);
    return mz_plan_hosts(plan, x->main_rank, load->total, x->replica, replicas, x->count, err);
}

static mz_code topoep_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    topoep_state *x = self;
    mz_plan_reset(plan);
    start(x);
    if (x->domains > 1)
        save_bytes(x, view->current);
    const int32_t remote = x->instances - x->experts;
    if (x->fill)
        first_fill(x, view->current);
    else
        first_even(x, view->current);
    int64_t left = x->rounds;
    for (int32_t d = 0; d < x->domains; d++) {
        left = x->fill ? left : x->rounds;
        balance_domain(x, view->current, d, &left);
    }
    mz_code code = set_hosts(x, view->current, plan, err);
    if (code != MZ_OK)
        return code;
    size_t used = strlen(plan->why);
    snprintf(plan->why + used, sizeof plan->why - used, ", %d chosen to save bytes between domains",
             remote);
    return mz_plan_replica_moves(plan, &x->moves, x->sent, err);
}

static mz_code topoep_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    topoep_state *x = self;
    mz_plan_lossless(plan, call->load);
    mz_code code = mz_expand_given(x->expand, plan, call->load->count, x->given,
                                   mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    return code;
}

const mz_policy mz_policy_topoep = {
    .name = "topoep",
    .summary = "replicas where they save bytes between domains, then balance inside each",
    .needs_sizes = true,
    .options = topoep_table,
    .option_count = sizeof topoep_table / sizeof *topoep_table,
    .options_size = sizeof(topoep_options),
    .init = topoep_init,
    .decide = topoep_decide,
    .route = topoep_route,
};
