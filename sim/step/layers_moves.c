/* Scope layers: what a policy moves, in the order of a replay's experts_move.c, experts_reduce.c
 * and experts_update.c. Weights and gradients travel along trees, wave by wave, each wave an
 * exchange; gradients of placements that last also around rings, or in parts to all ranks. */
#include "sim/step/inside.h"

#include <string.h>

enum { VALUE_BYTES = 2, MATRICES = 2, PLACE_BYTES = 8 };

static int64_t values_of(const mz_step *s) {
    return 3 * s->model->hidden * s->model->expert_intermediate;
}

bool layers_per_call(const mz_step *s) {
    return !s->traits.sharded_optimizer && (s->traits.replica_memory == MZ_REPLICAS_SHARED ||
                                            s->traits.replica_memory == MZ_REPLICAS_PER_LAYER);
}

bool layers_wide(const mz_step *s) {
    return layers_per_call(s) && s->traits.replica_gradient_bytes == 4 * values_of(s);
}

mz_code layers_create_moves(mz_step *s, mz_err *err) {
    const int64_t cells = (int64_t)s->model->experts * s->ep;
    mz_arena *a = &s->arena;
    s->depth = MZ_NEW(a, int32_t, cells);
    s->in = MZ_NEW(a, int32_t, cells);
    s->out = MZ_NEW(a, int32_t, cells);
    s->done = MZ_NEW(a, int64_t, s->model->experts);
    s->ring = MZ_NEW(a, bool, s->model->experts);
    s->held_sums = MZ_NEW(a, int64_t, s->ranks);
    s->held_sum = MZ_NEW(a, int64_t, s->ranks);
    if (!s->depth || !s->in || !s->out || !s->done || !s->ring || !s->held_sums || !s->held_sum)
        return mz_fail_nomem(err, "a step");
    return layers_create_places(s, err);
}

/* Where an optimizer is cut over the group: values [begin, end) of an expert are the rank's; parts
 * start at multiples of 16 bytes where there are enough values. */
int64_t layers_cut(const mz_step *s, int32_t rank) {
    const int64_t all = values_of(s), part = (all + s->ep - 1) / s->ep;
    const int64_t at = rank * (part < 8 ? part : (part + 7) / 8 * 8);
    return at < all ? at : all;
}

int64_t layers_cut_bytes(const mz_step *s, int32_t rank) {
    return VALUE_BYTES * s->model->experts * (layers_cut(s, rank + 1) - layers_cut(s, rank));
}

/* Pieces of values [low, high) of an expert: gate and up end at two thirds. */
static int64_t pieces(const mz_step *s, int64_t low, int64_t high) {
    const int64_t up = values_of(s) / 3 * 2;
    return (low < high) + (low < up && up < high);
}

/* What a policy moves: not a rank's own copies. */
static void transfer(mz_step *s, int32_t src, int32_t dst, int64_t messages, int64_t bytes) {
    const int32_t *device = s->cluster->topology.device;
    layers_message(s, src, dst, messages, (double)bytes);
    s->transfer_bytes += src != dst ? bytes : 0;
    s->between_bytes += device[src] != device[dst] ? bytes : 0;
}

static void message(mz_step *s, int32_t src, int32_t dst, int64_t low, int64_t high) {
    transfer(s, src, dst, pieces(s, low, high), VALUE_BYTES * (high - low));
}

/* ---- moves of one phase ------------------------------------------------------------------------
 */

/* The moves of a call that are made in `phase`; or change: those of a change of its placement,
 * which are made before its forward whatever their phase. */
typedef struct move_set {
    mz_step *s;
    const step_at *at;
    mz_move_phase phase;
    bool change;
} move_set;

static const mz_move *next_move(const move_set *x, int64_t *i) {
    const step_call *call = x->at->call;
    while (*i < call->moves) {
        const mz_move *m = &x->s->move[call->move + (*i)++];
        if (m->change == x->change && (m->change || m->phase == x->phase))
            return m;
    }
    return NULL;
}

static int64_t cell(const mz_step *s, const mz_move *m, int32_t rank) {
    return (int64_t)m->expert * s->ep + rank;
}

static bool between_two(const mz_move *m) {
    return m->src != MZ_EVERY_RANK && m->dst != MZ_EVERY_RANK;
}

/* Fills s->in, s->out, and s->ring: where nobody ends the way of an expert's moves, every receiver
 * sends. */
static int64_t count_moves(const move_set *x) {
    mz_step *s = x->s;
    const size_t cells = (size_t)s->model->experts * (size_t)s->ep;
    const mz_move *m;
    int64_t n = 0;
    memset(s->in, 0, sizeof *s->in * cells);
    memset(s->out, 0, sizeof *s->out * cells);
    for (int32_t e = 0; e < s->model->experts; e++)
        s->ring[e] = !layers_per_call(s);
    for (int64_t i = 0; (m = next_move(x, &i)); n++)
        if (between_two(m)) {
            s->in[cell(s, m, m->dst)]++;
            s->out[cell(s, m, m->src)]++;
        }
    for (int64_t i = 0; (m = next_move(x, &i));)
        if (between_two(m) && s->out[cell(s, m, m->dst)] == 0)
            s->ring[m->expert] = false;
    return n;
}

/* s->depth of ranks in trees; returns the deepest. */
static int32_t order_waves(const move_set *x) {
    mz_step *s = x->s;
    const mz_move *m;
    int32_t last = 0;
    bool more = true;
    memset(s->depth, 0, sizeof *s->depth * (size_t)s->model->experts * (size_t)s->ep);
    for (int32_t pass = 0; more && pass <= s->ep; pass++) {
        more = false;
        for (int64_t i = 0; (m = next_move(x, &i));) {
            if (!between_two(m) || s->ring[m->expert])
                continue;
            int32_t *to = &s->depth[cell(s, m, m->dst)];
            const int32_t deep = s->depth[cell(s, m, m->src)] + 1;
            more = more || *to < deep;
            *to = *to < deep ? deep : *to;
            last = *to > last ? *to : last;
        }
    }
    return last;
}

/* Both matrices of an expert go apart. */
static void whole(mz_step *s, const mz_move *m) {
    transfer(s, m->src, m->dst, MATRICES, m->bytes);
}

/* ---- weights -----------------------------------------------------------------------------------
 */

/* Weights of a slot from the parts that all ranks have. */
static void fill_slot(mz_step *s, const mz_move *m) {
    for (int32_t q = 0; q < s->ep; q++)
        message(s, q, m->dst, layers_cut(s, q), layers_cut(s, q + 1));
}

static void collect_weights(mz_step *s, const mz_move *m) {
    if (m->src == MZ_EVERY_RANK)
        fill_slot(s, m);
    else if (m->dst != MZ_EVERY_RANK)
        whole(s, m);
}

void layers_place(mz_step *s, const step_at *at) {
    const move_set x = {.s = s, .at = at, .change = true};
    int32_t layer = at->layer;
    const mz_move *m;
    int64_t n = 0;
    layers_no_lanes(s);
    for (int64_t i = 0; (m = next_move(&x, &i)); n++) {
        layer = m->phase == MZ_MOVE_STEP ? s->layers : layer;
        collect_weights(s, m);
    }
    if (n == 0)
        return;
    layers_exchange(s, MZ_PHASE_WEIGHT_MOVE, layer);
    for (int64_t i = 0; (m = next_move(&x, &i));)
        if (m->dst != MZ_EVERY_RANK)
            layers_kernel(s, m->dst, MZ_PHASE_WEIGHT_MOVE, layer, MZ_WORK_COPY, MATRICES, m->bytes);
}

void layers_move_weights(mz_step *s, const step_at *at, mz_move_phase phase) {
    const move_set x = {s, at, phase, false};
    const mz_move *m;
    if (count_moves(&x) == 0)
        return;
    const int32_t last = order_waves(&x);
    for (int32_t wave = 1; wave <= last; wave++) {
        layers_no_lanes(s);
        for (int64_t i = 0; (m = next_move(&x, &i));)
            if (between_two(m) && s->depth[cell(s, m, m->dst)] == wave)
                collect_weights(s, m);
        layers_exchange(s, MZ_PHASE_WEIGHT_MOVE, at->layer);
    }
}

void layers_refresh(mz_step *s, int32_t first, int32_t end) {
    int64_t n = 0;
    layers_no_lanes(s);
    for (int32_t l = first; l < end; l++) {
        const step_at at = step_at_of(s, 0, l, 0);
        const move_set x = {s, &at, MZ_MOVE_STEP, false};
        const mz_move *m;
        for (int64_t i = 0; (m = next_move(&x, &i)); n++)
            collect_weights(s, m);
    }
    if (n > 0)
        layers_exchange(s, MZ_PHASE_WEIGHT_MOVE, s->layers);
}

/* ---- gradients ---------------------------------------------------------------------------------
 */

/* A rank holds `buffers` of `values` that it received, until all sums of this exchange are made;
 * and for the time of one sum the place of every row of H values in them and, where the gradient is
 * widened for it, that. */
static void hold(mz_step *s, int32_t rank, int64_t buffers, int64_t values, bool wide) {
    const int64_t one = PLACE_BYTES * buffers * (values / s->model->hidden) +
                        (wide ? (int64_t)sizeof(float) * values : 0);
    s->held_sums[rank] += buffers * values * (wide ? (int64_t)sizeof(float) : VALUE_BYTES);
    s->held_sum[rank] = one > s->held_sum[rank] ? one : s->held_sum[rank];
}

/* The exchange's sums are made: what was held for them is noted and given back. */
static void give_back(const move_set *x) {
    mz_step *s = x->s;
    const bool once = x->phase == MZ_MOVE_REDUCE_STEP;
    for (int32_t r = 0; r < s->ranks; r++) {
        int64_t *most = &layers_work_at(s, x->at->micro_batch, x->at->moe)[r].reduced_bytes[once];
        const int64_t bytes = s->held_sums[r] + s->held_sum[r];
        *most = bytes > *most ? bytes : *most;
        s->held_sums[r] = s->held_sum[r] = 0;
    }
}

/* Adds `buffers` received values [low, high) of an expert to a rank's, matrix by matrix; in fp32
 * where that is what replicas have and the main has not. */
static void sum(mz_step *s, int32_t rank, int32_t layer, int64_t buffers, int64_t low, int64_t high,
                bool wide) {
    const int64_t all = values_of(s), side[MATRICES + 1] = {0, all / 3 * 2, all};
    layers_burst b = layers_burst_of(s, rank, MZ_PHASE_REPLICA_REDUCE, layer);
    for (int k = 0; k < MATRICES; k++) {
        const int64_t a = low > side[k] ? low : side[k];
        const int64_t n = (high < side[k + 1] ? high : side[k + 1]) - a;
        for (int i = 0; wide && i < 2; i++) /* there and back */
            layers_add(&b, MZ_WORK_CONVERT, 1, n, 0);
        layers_add(&b, MZ_WORK_ADD, buffers, (wide ? 2 : 1) * n, 0);
    }
    layers_end(&b);
}

/* A rank's further instances of an expert go into its first. */
static void add_further(const move_set *x) {
    mz_step *s = x->s;
    const step_at *at = x->at;
    const step_call *call = at->call;
    const int64_t all = values_of(s);
    const bool wide = layers_wide(s);
    layers_no_lanes(s);
    for (int64_t i = call->further; i < call->further + call->furthers; i++) {
        const layers_further *f = &s->further[i];
        layers_message(s, f->rank, f->rank, (int64_t)MATRICES * f->count,
                       (double)((wide ? 4 : VALUE_BYTES) * all * f->count));
    }
    if (call->furthers > 0)
        layers_exchange(s, MZ_PHASE_REPLICA_REDUCE, at->layer);
    for (int64_t i = call->further; i < call->further + call->furthers; i++) {
        const layers_further *f = &s->further[i];
        hold(s, f->rank, f->count, all, wide);
        sum(s, f->rank, at->layer, f->count, 0, all, wide);
    }
    if (call->furthers > 0) /* they start anew, off the clock */
        layers_meet(s);
    give_back(x);
}

/* Values of an expert that the j-th of m hosts of a ring adds up: whole rows. */
static int64_t chunk_begin(const mz_step *s, int64_t j, int64_t m) {
    const int64_t h = s->model->hidden;
    return values_of(s) / h * j / m * h;
}

typedef enum ring_part { RING_SCATTER, RING_SUM, RING_GATHER } ring_part;

/* The ring that starts with move `first`, m hosts in all: chunks to their hosts, each host's own
 * among them; their sums; the sums to the others. */
static void run_ring(const move_set *x, const mz_move *first, int32_t m, ring_part part) {
    mz_step *s = x->s;
    const mz_move *to, *from;
    int32_t j = 0;
    for (int64_t i = 0; (to = next_move(x, &i));) {
        if (to->expert != first->expert || !between_two(to))
            continue;
        const int64_t low = chunk_begin(s, j, m), high = chunk_begin(s, j + 1, m);
        j++;
        if (part == RING_SUM) {
            hold(s, to->src, m, high - low, false);
            sum(s, to->src, x->at->layer, m - 1, low, high, false);
        }
        for (int64_t k = 0; part != RING_SUM && (from = next_move(x, &k));) {
            if (from->expert != first->expert || !between_two(from))
                continue;
            if (part == RING_SCATTER)
                message(s, from->src, to->src, low, high);
            else if (from->src != to->src)
                message(s, to->src, from->src, low, high);
        }
    }
}

static int64_t each_ring(const move_set *x, ring_part part) {
    mz_step *s = x->s;
    const mz_move *m;
    int64_t rings = 0;
    int32_t done = -1;
    for (int64_t i = 0; (m = next_move(x, &i));) {
        if (m->expert <= done || !between_two(m) || !s->ring[m->expert])
            continue;
        int32_t hosts = 0;
        for (int32_t r = 0; r < s->ep; r++)
            hosts += s->out[cell(s, m, r)];
        done = m->expert;
        run_ring(x, m, hosts, part);
        rings++;
    }
    return rings;
}

static void run_rings(const move_set *x) {
    layers_no_lanes(x->s);
    if (each_ring(x, RING_SCATTER) == 0)
        return;
    layers_exchange(x->s, MZ_PHASE_REPLICA_REDUCE, x->at->layer);
    each_ring(x, RING_SUM);
    give_back(x);
    layers_no_lanes(x->s);
    each_ring(x, RING_GATHER);
    layers_exchange(x->s, MZ_PHASE_REPLICA_REDUCE, x->at->layer);
}

static void run_trees(const move_set *x) {
    mz_step *s = x->s;
    const mz_move *m;
    const int32_t last = order_waves(x);
    const bool wide = layers_wide(s);
    for (int32_t wave = 1; wave <= last; wave++) {
        layers_no_lanes(s);
        for (int64_t i = 0; (m = next_move(x, &i));)
            if (between_two(m) && s->depth[cell(s, m, m->dst)] == wave)
                whole(s, m);
        layers_exchange(s, MZ_PHASE_REPLICA_REDUCE, x->at->layer);
        for (int64_t i = 0; (m = next_move(x, &i));) {
            if (!between_two(m) || s->depth[cell(s, m, m->dst)] != wave)
                continue;
            int32_t *in = &s->in[cell(s, m, m->dst)];
            if (*in > 0) {
                hold(s, m->dst, *in, values_of(s), wide);
                sum(s, m->dst, x->at->layer, *in, 0, values_of(s), wide);
            }
            *in = 0;
        }
        give_back(x);
    }
}

/* Every rank gets its part of every expert's gradient, from the hosts as the moves to all ranks
 * have it, but for what it has itself; then all parts are copied to where the update reads them. */
static void run_parts(const move_set *x) {
    mz_step *s = x->s;
    const mz_move *m;
    int64_t n = 0;
    layers_no_lanes(s);
    for (int32_t r = 0; r < s->ep; r++) {
        const int64_t low = layers_cut(s, r), all = layers_cut(s, r + 1) - low;
        memset(s->done, 0, sizeof *s->done * (size_t)s->model->experts);
        for (int64_t i = 0; (m = next_move(x, &i));) {
            if (m->dst != MZ_EVERY_RANK)
                continue;
            int64_t *done = &s->done[m->expert];
            const int64_t stated = m->bytes / VALUE_BYTES / s->ep;
            const int64_t values = stated < all - *done ? stated : all - *done;
            if (m->src != r)
                message(s, m->src, r, low + *done, low + *done + values);
            *done += values;
            n++;
        }
    }
    if (n > 0)
        layers_exchange(s, MZ_PHASE_REPLICA_REDUCE, x->at->layer);
    for (int32_t r = 0; r < s->ep; r++) {
        const int64_t bytes = layers_cut_bytes(s, r);
        s->held_sums[r] = bytes;
        layers_kernel(s, r, MZ_PHASE_REPLICA_REDUCE, x->at->layer, MZ_WORK_COPY, 1, bytes);
    }
    give_back(x);
}

static bool has_phase(const mz_step *s, const step_call *call, mz_move_phase phase) {
    for (int64_t i = call->move; i < call->move + call->moves; i++)
        if (s->move[i].phase == phase)
            return true;
    return false;
}

void layers_reduce(mz_step *s, const step_at *at, mz_move_phase phase) {
    const move_set x = {s, at, phase, false};
    const bool once = phase == MZ_MOVE_REDUCE_STEP, last = !layers_per_call(s);
    const int64_t moves = count_moves(&x);
    if (once && !last)
        return;
    /* Placements that last reduce per call or per step; a call's own further instances may be all
     * there is to add. */
    if (last && moves == 0 && (!once || has_phase(s, at->call, MZ_MOVE_REDUCE))) {
        if (!once && (s->traits.sees & MZ_SEES_CURRENT))
            add_further(&x);
        return;
    }
    add_further(&x);
    run_rings(&x);
    run_trees(&x);
    if (s->traits.sharded_optimizer && once)
        run_parts(&x);
}
