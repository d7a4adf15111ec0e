/* lplb: fixed partners, one replica of each rank's heaviest experts, and a linear programme per
 * call that says how much of them the replica takes (balancing-systems.md 10.4).
 *
 * Source: LPLB, DeepSeek's repository. decide sees history, the mean of `window` steps that ended
 * `lag` steps ago, and runs every `interval` steps: experts are reordered by EPLB without
 * redundancy (with as many expert groups as the graph has groups of ranks, as the source does;
 * reorder=no: they stay in blocks), then the d = slots - ceil(E/R) heaviest experts of each rank
 * get one replica each, the j-th on the rank that the partner graph names for column j mod width.
 * route sees the exact counts and runs at every call: rows of the busiest rank of each group are
 * made least over the shares that originals keep.
 * Graphs (rank g, in groups of consecutive ranks; "holds" names the rank whose j-th expert it
 * copies): ring, groups of 8 or all: g holds g+1; cube, groups of 8: the two columns of the source;
 * hypercube, groups of 16; torus, nodes x ranks of a node (one node: the most even two factors): g
 * holds its neighbour of the next node, and the next of its node. circulant, for other numbers of
 * ranks: g holds g+1 and g+round(sqrt R). auto: 8 divides R: ring for d=1, else cube; otherwise
 * circulant. A rank is never its own partner; it then has one replica less.
 * Solver: exact, the optimum as a maximum flow, in whole rows, for every replica by itself;
 * interior, the source's affine scaling of each group: 5 iterations from ones, steps of 0.999/max
 * d, Big-M 1000, loads over the largest load, replicas of one column of a rank share one unknown;
 * where it has not converged (last max d below 0.1, artificial unknown below 1e-4, residual below
 * 0.05) originals keep half. Pairs: `hash`, pair number n of a source's c pairs of an expert goes
 * to the replica where (n*499+41) mod c is at least the rows kept of c; `exact`, totals as solved,
 * own rank first.
 * Moves: every replica gets W of fresh weights after each optimizer step and sends W of gradients
 * to its original after the step's last micro-batch, under the work of other layers. An original
 * that changes its rank costs `bytes` per parameter (weights 2, optimizer 16), blocking.
 * Options and the source's values: slots (mains plus two; 1 and 2 replicas in its tests), graph
 * auto, solver exact (source: interior), map hash, reorder yes, lag 1, window (the interval),
 * interval 3 (as in UltraEP's comparison; the source leaves it to its user), bytes 18.
 * Departures: double precision; the maximum of d is taken over all unknowns, the source's kernel
 * skips some; interior is for groups of at most 64 ranks. */
#include "sim/policy/eplb.h"

#include <math.h>
#include <string.h>

enum { INTERIOR_RANKS = 64, WIDTH = 2, STEPS = 5 };

typedef struct lplb_options {
    int64_t slots, lag, window, interval;
    double bytes;
    int graph, solver, map;
    bool reorder;
} lplb_options;

enum { GRAPH_AUTO, GRAPH_RING, GRAPH_CUBE, GRAPH_HYPERCUBE, GRAPH_TORUS, GRAPH_CIRCULANT };
enum { SOLVER_EXACT, SOLVER_INTERIOR };
enum { MAP_HASH, MAP_EXACT };

static const mz_opt lplb_table[] = {
    {"slots", 0, MZ_OPT_INT, offsetof(lplb_options, slots), "0", "N",
     "expert slots per rank, mains included; 0: mains plus two", 0, 1e6, MZ_UNIT_NONE},
    {"graph", 0, MZ_OPT_ENUM, offsetof(lplb_options, graph), "auto",
     "auto|ring|cube|hypercube|torus|circulant", "which rank holds whose replicas", 0, 0,
     MZ_UNIT_NONE},
    {"solver", 0, MZ_OPT_ENUM, offsetof(lplb_options, solver), "exact", "exact|interior",
     "the optimum of each call, or the source's five interior-point iterations", 0, 0,
     MZ_UNIT_NONE},
    {"map", 0, MZ_OPT_ENUM, offsetof(lplb_options, map), "hash", "hash|exact",
     "which pairs go to the replica: the source's hash, or rows exactly as solved", 0, 0,
     MZ_UNIT_NONE},
    {"reorder", 0, MZ_OPT_FLAG, offsetof(lplb_options, reorder), "yes", NULL,
     "experts change ranks after past load", 0, 0, MZ_UNIT_NONE},
    {"lag", 0, MZ_OPT_INT, offsetof(lplb_options, lag), "1", "STEPS", "age of the newest step seen",
     1, 1e6, MZ_UNIT_NONE},
    {"window", 0, MZ_OPT_INT, offsetof(lplb_options, window), "0", "STEPS",
     "steps averaged; 0: as many as the interval", 0, 1e6, MZ_UNIT_NONE},
    {"interval", 0, MZ_OPT_INT, offsetof(lplb_options, interval), "3", "STEPS",
     "steps between placements", 1, 1e6, MZ_UNIT_NONE},
    {"bytes", 0, MZ_OPT_REAL, offsetof(lplb_options, bytes), "18", "B",
     "bytes per parameter of an original that moves", 0, 1e3, MZ_UNIT_NONE},
};

/* The dense programme of one group of G ranks: G + n constraints (n shares: one per rank and
 * column), 2n + G + 2 unknowns: shares kept, shares sent, slacks, the peak, the artificial one. */
typedef struct interior {
    int32_t rows, unknowns;
    double *a;              /* [rows][unknowns] */
    double *normal;         /* [rows][rows] */
    double *b, *y;          /* [rows] */
    double *x, *d, *cost;   /* [unknowns] */
    double *moving, *fixed; /* [G*WIDTH], [G] loads over the largest */
} interior;

typedef struct lplb_state {
    int32_t ranks, experts, slots, extra, width, group;
    int solver, map;
    bool reorder;
    int64_t change_bytes, weight_bytes;
    int32_t *partner; /* [R][WIDTH] rank that holds the replica of its column; itself: none */
    int32_t *order;   /* [layers][E] place among its rank's experts where replicated, else -1 */
    int32_t *main, *slot, *first, *count; /* [E], [E] experts by rank, [R+1], [E] */
    int32_t *sorted, *scratch;            /* [E] */
    double *key;                          /* [E] */
    int64_t *zero, *quota;                /* [E] */
    int64_t *solved, *rows;               /* [instances] */
    double *share;                        /* [E] kept by the original, of the interior solver */
    int64_t *split;                       /* [replicated][2][R] */
    const int64_t **given;                /* [instances] */
    mz_replica *replica;
    interior lp;
    mz_eplb *planner;
    mz_placement *placement;
    mz_balance *balance;
    mz_expand *expand;
} lplb_state;

/* ---- partner graphs ----------------------------------------------------------------------------
 */

/* Members of node i in rank order are node[i * size ...]. */
static void torus_partners(const mz_policy_env *env, int32_t nodes, int32_t *node,
                           int32_t *partner) {
    const int32_t R = env->ranks, size = R / nodes;
    int32_t at = 0;
    const bool domains = env->domains == nodes && env->domains > 1;
    for (int32_t i = 0; i < nodes; i++)
        for (int32_t r = 0; r < R; r++)
            if (domains ? env->domain[r] == i : r / size == i)
                node[at++] = r;
    for (int32_t i = 0; i < nodes; i++)
        for (int32_t j = 0; j < size; j++) {
            const int32_t holder = node[i * size + j];
            partner[node[(i + 1) % nodes * size + j] * WIDTH] = holder;
            partner[node[i * size + (j + 1) % size] * WIDTH + 1] = holder;
        }
}

/* Nodes of the torus; 0: it has none. */
static int32_t torus_nodes(const mz_policy_env *env) {
    const int32_t R = env->ranks;
    if (env->domains > 1 && R % env->domains == 0 && mz_largest_domain(env) == R / env->domains)
        return R / env->domains > 1 ? env->domains : 0;
    int32_t nodes = 1;
    for (int32_t m = 2; (int64_t)m * m <= R; m++)
        nodes = R % m == 0 ? m : nodes;
    return nodes > 1 ? nodes : 0;
}

/* Columns of the source, by rank of the group: whose expert it holds. */
static const int8_t cube[2][8] = {{3, 0, 1, 2, 7, 4, 5, 6}, {6, 7, 4, 5, 0, 1, 2, 3}};
static const int8_t hypercube[2][16] = {{3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14},
                                        {12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}};

static mz_code choose_graph(const mz_policy_env *env, int graph, int32_t extra, int32_t *node,
                            lplb_state *s, mz_err *err) {
    const int32_t R = env->ranks;
    if (graph == GRAPH_AUTO)
        graph = R % 8 != 0 ? GRAPH_CIRCULANT : extra < 2 ? GRAPH_RING : GRAPH_CUBE;
    const int32_t unit = graph == GRAPH_CUBE ? 8 : graph == GRAPH_HYPERCUBE ? 16 : 1;
    const int32_t nodes = graph == GRAPH_TORUS ? torus_nodes(env) : 0;
    if (R % unit != 0)
        return mz_fail(err, MZ_EINPUT,
                       "policy lplb: graph=%s needs a multiple of %d ranks, here are %d; give "
                       "graph=circulant",
                       graph == GRAPH_CUBE ? "cube" : "hypercube", unit, R);
    if (graph == GRAPH_TORUS && nodes == 0)
        return mz_fail(err, MZ_EINPUT,
                       "policy lplb: graph=torus needs nodes of equal size and two ranks or more, "
                       "or a number of ranks with two factors, here are %d; give graph=circulant",
                       R);
    s->group = unit > 1 ? unit : graph == GRAPH_RING && R % 8 == 0 ? 8 : R;
    s->width = graph == GRAPH_RING ? 1 : 2;
    if (graph == GRAPH_TORUS) {
        torus_partners(env, nodes, node, s->partner);
        return MZ_OK;
    }
    const int32_t far = (int32_t)(sqrt((double)R) + 0.5);
    for (int32_t r = 0; r < R; r++)
        for (int32_t j = 0; j < s->width; j++) {
            const int32_t base = r / s->group * s->group, g = r - base;
            const int32_t step = j == 0 ? 1 : far > 1 ? far : 2;
            const int32_t holds = graph == GRAPH_CUBE        ? cube[j][g]
                                  : graph == GRAPH_HYPERCUBE ? hypercube[j][g]
                                                             : (g + step) % s->group;
            s->partner[(base + holds) * WIDTH + j] = r;
        }
    return MZ_OK;
}

/* ---- placement ---------------------------------------------------------------------------------
 */

/* Experts of each rank, heaviest first, from s->slot (by rank) and the loads seen; notes which get
 * replicas. */
static void choose_replicated(lplb_state *s, const int64_t *total, int32_t *order) {
    for (int32_t r = 0; r < s->ranks; r++) {
        const int32_t first = s->first[r], n = s->first[r + 1] - first;
        for (int32_t i = 0; i < n; i++)
            s->key[i] = total ? (double)total[s->slot[first + i]] : 0;
        mz_order_falling(s->key, n, s->sorted, s->scratch);
        for (int32_t i = 0; i < n; i++) {
            const int32_t e = s->slot[first + s->sorted[i]];
            const bool has = i < s->extra && s->partner[r * WIDTH + i % s->width] != r;
            s->main[e] = r;
            order[e] = has ? i : -1;
        }
    }
}

static mz_code place(lplb_state *s, const mz_load *history, int32_t *order, mz_err *err) {
    mz_code code = MZ_OK;
    if (history && s->reorder)
        code = mz_eplb_solve(s->planner, history->total, s->slot, err);
    else
        for (int32_t e = 0; e < s->experts; e++)
            s->slot[e] = e;
    if (code == MZ_OK)
        choose_replicated(s, history ? history->total : NULL, order);
    return code;
}

/* Adds the replicas to a plan of mains, and what they move in every step. */
static mz_code add_replicas(lplb_state *s, const int32_t *order, mz_plan *plan, mz_err *err) {
    int32_t n = 0;
    for (int32_t e = 0; e < s->experts; e++)
        if (order[e] >= 0)
            s->replica[n++] =
                (mz_replica){e, s->partner[s->main[e] * WIDTH + order[e] % s->width], 0};
    mz_code code = mz_plan_hosts(plan, s->main, s->zero, s->replica, n, s->count, err);
    for (int32_t i = 0; code == MZ_OK && i < plan->begin[s->experts]; i++)
        plan->target[i] = -1;
    for (int32_t i = 0; code == MZ_OK && i < n; i++) {
        const int32_t e = s->replica[i].expert, host = s->replica[i].rank;
        mz_move fresh = {.kind = MZ_MOVE_WEIGHTS,
                         .phase = MZ_MOVE_STEP,
                         .hide = MZ_HIDE_NOTHING,
                         .expert = e,
                         .src = s->main[e],
                         .dst = host,
                         .bytes = s->weight_bytes};
        mz_move gradients = {.kind = MZ_MOVE_GRADIENTS,
                             .phase = MZ_MOVE_REDUCE_STEP,
                             .hide = MZ_HIDE_LAYERS,
                             .expert = e,
                             .src = host,
                             .dst = s->main[e],
                             .bytes = s->weight_bytes};
        code = mz_plan_add_move(plan, fresh, err);
        if (code == MZ_OK)
            code = mz_plan_add_move(plan, gradients, err);
    }
    return code;
}

static mz_code lplb_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    lplb_state *s = self;
    int32_t *order = s->order + (int64_t)view->layer * s->experts, moved = 0;
    const int32_t *begin, *known = mz_placement_hosts(s->placement, view->layer, &begin);
    mz_code code = MZ_OK;
    if (known && view->micro_batch > 0)
        memcpy(s->main, known, sizeof(int32_t) * (size_t)s->experts);
    else
        code = place(s, view->history, order, err);
    if (code != MZ_OK)
        return code;
    mz_plan_mains(plan, s->main);
    code = mz_placement_change(s->placement, view->layer, s->change_bytes, 0, MZ_MOVE_STEP,
                               MZ_HIDE_NOTHING, plan, &moved, err);
    if (code == MZ_OK)
        code = add_replicas(s, order, plan, err);
    snprintf(plan->why, sizeof plan->why, "%d replicas, %d originals moved",
             plan->begin[s->experts] - s->experts, moved);
    return code;
}

/* ---- exact shares ------------------------------------------------------------------------------
 */

/* Least peak of every group by itself: rows of its experts on its instances. */
static mz_code solve_exact(lplb_state *s, const mz_load *load, const mz_plan *plan, mz_err *err) {
    mz_code code = mz_balance_hosts(s->balance, s->ranks, s->experts, plan->begin, plan->rank, err);
    for (int32_t base = 0; code == MZ_OK && base < s->ranks; base += s->group) {
        int64_t peak;
        for (int32_t e = 0; e < s->experts; e++) {
            const int32_t main = plan->rank[plan->begin[e]];
            s->quota[e] = main >= base && main < base + s->group ? load->total[e] : 0;
        }
        code = mz_balance_spread(s->balance, s->quota, NULL, NULL, NULL, NULL, s->rows, &peak, err);
        for (int32_t e = 0; e < s->experts; e++) {
            const int32_t i = plan->begin[e], main = plan->rank[i];
            if (main >= base && main < base + s->group)
                memcpy(s->solved + i, s->rows + i,
                       sizeof(int64_t) * (size_t)(plan->begin[e + 1] - i));
        }
    }
    return code;
}

/* ---- the source's interior point ---------------------------------------------------------------
 */

/* Solves normal * y = y in place by Cholesky; false: not positive definite. */
static bool cholesky(interior *lp) {
    const int32_t n = lp->rows;
    double *m = lp->normal, *y = lp->y;
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j <= i; j++) {
            double sum = m[(int64_t)i * n + j];
            for (int32_t k = 0; k < j; k++)
                sum -= m[(int64_t)i * n + k] * m[(int64_t)j * n + k];
            if (i == j && !(sum > 0))
                return false;
            m[(int64_t)i * n + j] = i == j ? sqrt(sum) : sum / m[(int64_t)j * n + j];
        }
    for (int32_t i = 0; i < n; i++) {
        for (int32_t k = 0; k < i; k++)
            y[i] -= m[(int64_t)i * n + k] * y[k];
        y[i] /= m[(int64_t)i * n + i];
    }
    for (int32_t i = n - 1; i >= 0; i--) {
        for (int32_t k = i + 1; k < n; k++)
            y[i] -= m[(int64_t)k * n + i] * y[k];
        y[i] /= m[(int64_t)i * n + i];
    }
    return true;
}

/* Constraints of one group from moving, fixed and the partners (ranks from `base` on). */
static void set_up(const lplb_state *s, int32_t base, interior *lp) {
    const int32_t G = s->group, n = G * s->width, peak = 2 * n + G, artificial = peak + 1;
    lp->rows = G + n;
    lp->unknowns = artificial + 1;
    memset(lp->a, 0, sizeof(double) * (size_t)lp->rows * (size_t)lp->unknowns);
    memset(lp->cost, 0, sizeof(double) * (size_t)lp->unknowns);
    for (int32_t v = 0; v < n; v++) {
        const int32_t g = v / s->width, j = v % s->width;
        const int32_t holder = s->partner[(base + g) * WIDTH + j] - base;
        lp->a[(int64_t)g * lp->unknowns + v] += lp->moving[v];
        lp->a[(int64_t)holder * lp->unknowns + n + v] += lp->moving[v];
        lp->a[(int64_t)(G + v) * lp->unknowns + v] = 1;
        lp->a[(int64_t)(G + v) * lp->unknowns + n + v] = 1;
        lp->b[G + v] = 1;
    }
    for (int32_t g = 0; g < G; g++) {
        lp->a[(int64_t)g * lp->unknowns + 2 * n + g] = 1;
        lp->a[(int64_t)g * lp->unknowns + peak] = -1;
        lp->b[g] = -lp->fixed[g];
    }
    for (int32_t i = 0; i < lp->rows; i++) {
        double *row = lp->a + (int64_t)i * lp->unknowns, sum = lp->b[i];
        for (int32_t v = 0; v < artificial; v++)
            sum -= row[v];
        row[artificial] = sum;
    }
    lp->cost[peak] = 1;
    lp->cost[artificial] = 1000;
}

/* One step of affine scaling; returns max d, or infinity where it cannot go on. */
static double scaling_step(interior *lp) {
    const int32_t rows = lp->rows, n = lp->unknowns;
    for (int32_t i = 0; i < rows; i++) {
        const double *ai = lp->a + (int64_t)i * n;
        lp->y[i] = 0;
        for (int32_t v = 0; v < n; v++) {
            lp->d[v] = ai[v] * lp->x[v] * lp->x[v];
            lp->y[i] += lp->d[v] * lp->cost[v];
        }
        for (int32_t j = 0; j <= i; j++) {
            const double *aj = lp->a + (int64_t)j * n;
            double sum = 0;
            for (int32_t v = 0; v < n; v++)
                sum += lp->d[v] * aj[v];
            lp->normal[(int64_t)i * rows + j] = sum;
        }
    }
    if (!cholesky(lp))
        return INFINITY;
    double most = 0;
    for (int32_t v = 0; v < n; v++) {
        double reduced = lp->cost[v];
        for (int32_t i = 0; i < rows; i++)
            reduced -= lp->y[i] * lp->a[(int64_t)i * n + v];
        lp->d[v] = lp->x[v] * reduced;
        most = lp->d[v] > most ? lp->d[v] : most;
    }
    for (int32_t v = 0; v < n && most > 0; v++)
        lp->x[v] *= 1 - 0.999 / most * lp->d[v];
    return most;
}

/* Shares kept are in x[0..G*width); false: not converged. */
static bool affine_scaling(interior *lp) {
    double most = INFINITY, residual = 0;
    for (int32_t v = 0; v < lp->unknowns; v++)
        lp->x[v] = 1;
    for (int step = 0; step < STEPS; step++) {
        most = scaling_step(lp);
        if (!(most < INFINITY))
            return false;
    }
    for (int32_t i = 0; i < lp->rows; i++) {
        double sum = -lp->b[i];
        for (int32_t v = 0; v < lp->unknowns; v++)
            sum += lp->a[(int64_t)i * lp->unknowns + v] * lp->x[v];
        residual = fmax(residual, fabs(sum));
    }
    return most < 0.1 && lp->x[lp->unknowns - 1] < 1e-4 && residual < 0.05;
}

/* Sets share of every expert; returns the number of groups that did not converge. */
static int32_t solve_interior(lplb_state *s, const mz_load *load, const mz_plan *plan,
                              const int32_t *order) {
    int64_t largest = 1;
    int32_t failed = 0;
    for (int32_t e = 0; e < s->experts; e++)
        largest = load->total[e] > largest ? load->total[e] : largest;
    for (int32_t base = 0; base < s->ranks; base += s->group) {
        memset(s->lp.moving, 0, sizeof(double) * (size_t)s->group * WIDTH);
        memset(s->lp.fixed, 0, sizeof(double) * (size_t)s->group);
        for (int32_t e = 0; e < s->experts; e++) {
            const int32_t g = plan->rank[plan->begin[e]] - base;
            if (g < 0 || g >= s->group)
                continue;
            double *sum =
                order[e] < 0 ? &s->lp.fixed[g] : &s->lp.moving[g * s->width + order[e] % s->width];
            *sum += (double)load->total[e] / (double)largest;
        }
        set_up(s, base, &s->lp);
        const bool converged = affine_scaling(&s->lp);
        failed += !converged;
        for (int32_t e = 0; e < s->experts; e++) {
            const int32_t g = plan->rank[plan->begin[e]] - base;
            if (g >= 0 && g < s->group && order[e] >= 0)
                s->share[e] = converged ? s->lp.x[g * s->width + order[e] % s->width] : 0.5;
        }
    }
    return failed;
}

/* ---- pairs -------------------------------------------------------------------------------------
 */

/* How many n in [0, c) have (n*499 + 41) mod c below `kept`: the hash is a permutation of [0, c),
 * unless 499 divides c: then it takes every value 499 k + 41 below c, 499 times. */
static int64_t hashed_below(int64_t c, int64_t kept) {
    if (kept <= 0 || kept >= c)
        return kept <= 0 ? 0 : c;
    if (c % 499 != 0)
        return kept;
    return kept <= 41 ? 0 : ((kept - 42) / 499 + 1) * 499;
}

/* floor(part * rows / whole). */
static int64_t scaled(int64_t part, int64_t rows, int64_t whole) {
    if ((part | rows) >> 31 == 0)
        return part * rows / whole;
    return (int64_t)((__int128)part * rows / whole); /* slow */
}

static void split_pairs(lplb_state *s, const mz_load *load, const mz_plan *plan) {
    int64_t *to = s->split;
    for (int32_t e = 0; e < s->experts; e++) {
        const int32_t i = plan->begin[e];
        s->given[i] = NULL;
        if (plan->begin[e + 1] - i < 2)
            continue;
        s->given[i] = to;
        s->given[i + 1] = to + s->ranks;
        for (int32_t r = 0; r < s->ranks; r++) {
            const int64_t c = load->count[(int64_t)r * s->experts + e];
            const int64_t kept = c == 0 ? 0
                                 : s->solver == SOLVER_INTERIOR
                                     ? (int64_t)(s->share[e] * (double)c)
                                     : scaled(s->solved[i], c, load->total[e]);
            to[r] = hashed_below(c, kept);
            to[s->ranks + r] = c - to[r];
        }
        to += 2 * (int64_t)s->ranks;
    }
}

/* Rows of the originals by the shares of the interior solver, for map=exact. */
static void rows_of_shares(lplb_state *s, const mz_load *load, const mz_plan *plan) {
    for (int32_t e = 0; e < s->experts; e++) {
        const int32_t i = plan->begin[e];
        s->solved[i] = load->total[e];
        if (plan->begin[e + 1] - i < 2)
            continue;
        const double kept = s->share[e] * (double)load->total[e];
        s->solved[i] = kept < (double)load->total[e] ? (int64_t)kept : load->total[e];
        s->solved[i + 1] = load->total[e] - s->solved[i];
    }
}

static mz_code lplb_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    lplb_state *s = self;
    const mz_load *load = call->load;
    const int32_t *order = s->order + (int64_t)call->layer * s->experts;
    int32_t failed = 0;
    mz_code code = MZ_OK;
    mz_plan_lossless(plan, load);
    if (s->solver == SOLVER_EXACT)
        code = solve_exact(s, load, plan, err);
    else {
        failed = solve_interior(s, load, plan, order);
        rows_of_shares(s, load, plan);
    }
    if (code != MZ_OK)
        return code;
    if (s->map == MAP_HASH) {
        split_pairs(s, load, plan);
        code = mz_expand_given(s->expand, plan, load->count, s->given,
                               mz_plan_forward_entries(plan), err);
    } else
        code = mz_expand_rows(s->expand, plan, load->count, NULL, s->solved, MZ_SPREAD_EXACT,
                              mz_plan_forward_entries(plan), err);
    mz_plan_peaks(plan);
    if (failed > 0)
        snprintf(plan->why, sizeof plan->why, "%d of %d groups not converged: shares of half",
                 failed, s->ranks / s->group);
    return code;
}

/* ---- start -------------------------------------------------------------------------------------
 */

static bool allocate_interior(lplb_state *s, mz_arena *arena) {
    const int64_t n = (int64_t)s->group * s->width, rows = s->group + n;
    const int64_t unknowns = 2 * n + s->group + 2;
    interior *lp = &s->lp;
    lp->a = MZ_NEW(arena, double, rows *unknowns);
    lp->normal = MZ_NEW(arena, double, rows *rows);
    lp->b = MZ_NEW(arena, double, rows);
    lp->y = MZ_NEW(arena, double, rows);
    lp->x = MZ_NEW(arena, double, unknowns);
    lp->d = MZ_NEW(arena, double, unknowns);
    lp->cost = MZ_NEW(arena, double, unknowns);
    lp->moving = MZ_NEW(arena, double, (int64_t)s->group *WIDTH);
    lp->fixed = MZ_NEW(arena, double, s->group);
    return lp->a && lp->normal && lp->b && lp->y && lp->x && lp->d && lp->cost && lp->moving &&
           lp->fixed;
}

static bool allocate(lplb_state *s, const mz_policy_env *env, mz_arena *arena) {
    const int64_t E = env->experts, R = env->ranks, replicas = R * s->extra;
    const int64_t replicated = replicas < E ? replicas : E;
    s->partner = MZ_NEW(arena, int32_t, R * WIDTH);
    s->order = MZ_NEW(arena, int32_t, E * env->layers);
    s->main = MZ_NEW(arena, int32_t, E);
    s->slot = MZ_NEW(arena, int32_t, E);
    s->first = MZ_NEW(arena, int32_t, R + 1);
    s->count = MZ_NEW(arena, int32_t, E);
    s->sorted = MZ_NEW(arena, int32_t, E);
    s->scratch = MZ_NEW(arena, int32_t, E);
    s->key = MZ_NEW(arena, double, E);
    s->zero = MZ_NEW(arena, int64_t, E);
    s->quota = MZ_NEW(arena, int64_t, E);
    s->solved = MZ_NEW(arena, int64_t, E + replicated);
    s->rows = MZ_NEW(arena, int64_t, E + replicated);
    s->share = MZ_NEW(arena, double, E);
    s->split = MZ_NEW(arena, int64_t, 2 * replicated * R + 1);
    s->given = MZ_NEW(arena, const int64_t *, E + replicated);
    s->replica = MZ_NEW(arena, mz_replica, replicated + 1);
    return s->partner && s->order && s->main && s->slot && s->first && s->count && s->sorted &&
           s->scratch && s->key && s->zero && s->quota && s->solved && s->rows && s->share &&
           s->split && s->given && s->replica;
}

/* The graph, the interior solver's matrices and the shared parts. room: mains of each rank. */
static mz_code create_parts(lplb_state *s, const mz_policy_env *env, int graph, mz_arena *arena,
                            mz_err *err) {
    const int32_t R = env->ranks, each = env->experts / R, more = env->experts % R;
    int32_t *room = MZ_NEW(arena, int32_t, R), *node = MZ_NEW(arena, int32_t, R);
    if (!room || !node)
        return mz_fail_nomem(err, "the state of a policy");
    for (int32_t r = 0; r < R; r++) {
        room[r] = each + (r < more);
        s->first[r + 1] = s->first[r] + room[r];
    }
    mz_code code = choose_graph(env, graph, s->extra, node, s, err);
    if (code != MZ_OK)
        return code;
    if (s->solver == SOLVER_INTERIOR && s->group > INTERIOR_RANKS)
        return mz_fail(err, MZ_EINPUT,
                       "policy lplb: solver=interior takes groups of at most %d ranks, the graph "
                       "makes one of %d; give solver=exact, or graph=cube or ring where 8 divides "
                       "the ranks",
                       INTERIOR_RANKS, s->group);
    if (s->solver == SOLVER_INTERIOR && !allocate_interior(s, arena))
        return mz_fail_nomem(err, "the state of a policy");
    const int32_t groups = R / s->group;
    const bool hierarchical = more == 0 && mz_eplb_hierarchy(env, groups);
    code = mz_eplb_create(arena, env, hierarchical ? groups : 0, room, &s->planner, err);
    if (code == MZ_OK)
        code = mz_placement_create(arena, env, s->slots - s->extra, &s->placement, err);
    if (code == MZ_OK)
        code = mz_balance_create(arena, R, env->experts, 2 * env->experts, &s->balance, err);
    return code == MZ_OK ? mz_expand_create(arena, env, 2, &s->expand, err) : code;
}

static mz_code lplb_init(const mz_policy_env *env, const void *options, mz_arena *arena, void **out,
                         mz_policy_traits *traits, mz_err *err) {
    const lplb_options *o = options;
    int32_t slots;
    mz_code code = mz_slots("lplb", env, o->slots, &slots, err);
    if (code != MZ_OK)
        return code;
    lplb_state *s = MZ_NEW(arena, lplb_state, 1);
    if (!s)
        return mz_fail_nomem(err, "the state of a policy");
    s->ranks = env->ranks;
    s->experts = env->experts;
    s->slots = slots;
    s->extra = slots - mz_mains_per_rank(env->ranks, env->experts);
    s->solver = o->solver;
    s->map = o->map;
    s->reorder = o->reorder;
    s->weight_bytes = env->weight_bytes;
    s->change_bytes = mz_rows_up(o->bytes * (double)env->expert_parameters);
    if (!allocate(s, env, arena))
        return mz_fail_nomem(err, "the state of a policy");
    *traits = (mz_policy_traits){.sees = MZ_SEES_HISTORY,
                                 .lag = (int32_t)o->lag,
                                 .window = (int32_t)(o->window > 0 ? o->window : o->interval),
                                 .interval = (int32_t)o->interval,
                                 .route_plans = true,
                                 .slots = slots,
                                 .replica_memory = MZ_REPLICAS_RESIDENT,
                                 .replica_gradient_bytes = env->weight_bytes,
                                 .score_source = ""};
    *out = s;
    return create_parts(s, env, o->graph, arena, err);
}

const mz_policy mz_policy_lplb = {
    .name = "lplb",
    .summary = "one replica of each rank's heaviest experts, shares solved at every call",
    .options = lplb_table,
    .option_count = sizeof lplb_table / sizeof *lplb_table,
    .options_size = sizeof(lplb_options),
    .init = lplb_init,
    .decide = lplb_decide,
    .route = lplb_route,
};
