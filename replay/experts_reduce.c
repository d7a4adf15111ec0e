/* Gradients of replicas: along trees to the main, by rings to all hosts, in parts to all ranks. */
#include "replay/experts_inside.h"

#include <string.h>

/* ---- sums
 * ----------------------------------------------------------------------------------------*/

/* Positions for `rows` sums over `count` buffers of `rows` rows each. */
static mz_code make_positions(mz_experts *x, int64_t rows, int64_t count, int32_t rank,
                              int32_t layer, mz_buffer *buffer, mz_err *err) {
    const int64_t n = rows * count;
    if (!mz_grow((void **)&x->position, &x->position_cap, (size_t)n, sizeof *x->position))
        return mz_fail_nomem(err, "positions of a reduction");
    for (int64_t t = 0; t < rows; t++)
        for (int64_t j = 0; j < count; j++)
            x->position[t * count + j] = j * rows + t;
    const int64_t bytes = n * (int64_t)sizeof *x->position;
    mz_code code = mz_heap_take(x->e->heap, rank, MZ_MEM_TEMPORARIES, bytes,
                                "layer %d positions of a reduction", layer, buffer, err);
    if (code != MZ_OK)
        return code;
    return engine_kernel(
        x->e,
        mz_kernels_copy(x->e->kernels, 0, MZ_COPY_IN, buffer->memory, x->position, (size_t)bytes),
        "positions of a reduction", rank, layer, err);
}

/* Rows [low, high) of an expert, each H values, counted through both matrices: to += (or =) the sum
 * over `count` buffers [high-low][H] that follow each other in `from`. */
static mz_code add_rows(mz_experts *x, int32_t layer, int32_t rank, char *const to[], mz_dtype type,
                        const void *from, int64_t count, int64_t low, int64_t high, bool accumulate,
                        mz_err *err) {
    const int64_t H = x->e->job.hidden, size = type == MZ_F32 ? 4 : 2;
    mz_buffer positions = {0};
    mz_code code = make_positions(x, high - low, count, rank, layer, &positions, err);
    int64_t first = 0;
    for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++) {
        const int64_t end = first + x->values[k] / H;
        const int64_t a = low > first ? low : first, b = high < end ? high : end;
        if (a < b) {
            const mz_combine sum = {.type = type,
                                    .row = from,
                                    .hidden = H,
                                    .tokens = b - a,
                                    .k = (int32_t)count,
                                    .position =
                                        (const int64_t *)positions.memory + (a - low) * count,
                                    .accumulate = accumulate,
                                    .out = to[k] + (a - first) * H * size};
            code = engine_kernel(x->e, mz_combine_rows(x->e->kernels, 0, &sum), "sum of gradients",
                                 rank, layer, err);
        }
        first = end;
    }
    mz_heap_give(x->e->heap, &positions);
    return code;
}

static mz_code convert(mz_experts *x, int32_t layer, int32_t rank, mz_dtype to_type,
                       char *const to[], mz_dtype from_type, char *const from[], mz_err *err) {
    mz_kstatus status = MZ_K_OK;
    for (int k = 0; status == MZ_K_OK && k < EXPERTS_MATRICES; k++)
        status = mz_convert(x->e->kernels, 0, to_type, to[k], from_type, from[k], x->values[k]);
    return engine_kernel(x->e, status, "conversion of gradients", rank, layer, err);
}

/* A node's gradient plus what it received, in fp32 where that is what came. */
static mz_code add_received(mz_experts *x, int32_t layer, const experts_memory *node,
                            const experts_sum *sum, mz_err *err) {
    const int64_t rows = x->all / x->e->job.hidden;
    if (node->gradient_type == x->replica_type)
        return add_rows(x, layer, sum->rank, node->gradient, x->replica_type, sum->received.memory,
                        sum->count, 0, rows, true, err);
    mz_buffer wide = {0};
    char *part[EXPERTS_MATRICES];
    mz_code code =
        mz_heap_take(x->e->heap, sum->rank, MZ_MEM_TEMPORARIES, x->all * (int64_t)sizeof(float),
                     "layer %d gradient in fp32", layer, &wide, err);
    if (code != MZ_OK)
        return code;
    experts_parts(x, wide.memory, (int64_t)sizeof(float), part);
    code = convert(x, layer, sum->rank, MZ_F32, part, node->gradient_type, node->gradient, err);
    if (code == MZ_OK)
        code = add_rows(x, layer, sum->rank, part, MZ_F32, sum->received.memory, sum->count, 0,
                        rows, true, err);
    if (code == MZ_OK)
        code = convert(x, layer, sum->rank, node->gradient_type, node->gradient, MZ_F32, part, err);
    mz_heap_give(x->e->heap, &wide);
    return code;
}

static int64_t replica_value_bytes(const mz_experts *x) {
    return x->replica_type == MZ_F32 ? (int64_t)sizeof(float) : 2;
}

/* A place for `count` gradients of an expert, or for `values` values of each, on `rank`. */
static mz_code open_sum(mz_experts *x, int32_t layer, int32_t e, int32_t rank, int32_t count,
                        int64_t values, mz_err *err) {
    if (!mz_grow((void **)&x->sum, &x->sum_cap, (size_t)x->sums + 1, sizeof *x->sum))
        return mz_fail_nomem(err, "a reduction of gradients");
    experts_sum *s = &x->sum[x->sums++];
    *s = (experts_sum){.expert = e, .rank = rank, .count = count};
    if (!experts_local(x, rank))
        return MZ_OK;
    return mz_heap_take(x->e->heap, rank, MZ_MEM_TEMPORARIES,
                        count * values * replica_value_bytes(x), "layer %d received gradients",
                        layer, &s->received, err);
}

static void close_sums(mz_experts *x) {
    for (int64_t i = 0; i < x->sums; i++)
        mz_heap_give(x->e->heap, &x->sum[i].received);
    x->sums = 0;
}

/* The j-th place of the newest sum. */
static void place_of_sum(const mz_experts *x, int64_t j, char *part[]) {
    char *base = x->sum[x->sums - 1].received.memory;
    const int64_t size = replica_value_bytes(x);
    experts_parts(x, experts_at(base, j * x->all * size), size, part);
}

/* Runs what was collected for the sums, adds it up and closes them. */
static mz_code run_sums(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err) {
    mz_engine *e = x->e;
    mz_code code = experts_run_pieces(x, MZ_PHASE_REPLICA_REDUCE, layer, layer, err);
    for (int64_t i = 0; code == MZ_OK && i < x->sums; i++) {
        const experts_sum *s = &x->sum[i];
        if (!experts_local(x, s->rank))
            continue;
        const double start = mz_now();
        const experts_memory node = experts_node(x, layer, plan, s->expert, s->rank);
        code = add_received(x, layer, &node, s, err);
        if (code == MZ_OK)
            code = engine_charge(e, s->rank, MZ_PHASE_REPLICA_REDUCE, layer, start, err);
    }
    close_sums(x);
    return code;
}

/* ---- instances of one rank
 * -----------------------------------------------------------------------*/

/* Further instances of an expert on a rank are added to what the rank exchanges, and start anew. */
static mz_code add_further(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; code == MZ_OK && i < plan->begin[e + 1]; i++) {
            const int32_t rank = plan->rank[i];
            int32_t n = 0;
            if (x->instance[i].first != i)
                continue;
            for (int32_t k = i + 1; k < plan->begin[e + 1]; k++)
                n += plan->rank[k] == rank;
            if (n == 0)
                continue;
            code = open_sum(x, layer, e, rank, n, x->all, err);
            int64_t at = 0, all = x->all * replica_value_bytes(x);
            for (int32_t k = i + 1; code == MZ_OK && k < plan->begin[e + 1]; k++) {
                if (plan->rank[k] != rank)
                    continue;
                const experts_memory m = experts_instance_memory(x, layer, plan, k);
                char *to[EXPERTS_MATRICES];
                int64_t budget = all;
                place_of_sum(x, at++, to);
                code = experts_add_values(x, rank, rank, m.gradient, to, replica_value_bytes(x), 0,
                                          x->all, &budget, err);
            }
        }
    if (code == MZ_OK)
        code = run_sums(x, layer, plan, err);
    const double start = mz_now();
    bool any = false;
    for (int32_t i = 0; code == MZ_OK && i < plan->begin[plan->experts]; i++) {
        any = any || x->instance[i].first != i;
        if (x->instance[i].first != i && experts_local(x, plan->rank[i])) {
            const experts_memory m = experts_instance_memory(x, layer, plan, i);
            for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++)
                code = experts_zero(x, m.gradient[k], x->values[k] * replica_value_bytes(x),
                                    plan->rank[i], layer, err);
        }
    }
    engine_untimed(x->e, start);
    return code == MZ_OK && any ? engine_meet(x->e, err) : code;
}

/* ---- trees
 * ---------------------------------------------------------------------------------------*/

static int64_t stated_gradient(const mz_experts *x, int64_t bytes) {
    const int64_t stated = x->e->job.traits->replica_gradient_bytes;
    const double part = (double)bytes / (double)(stated > 0 ? stated : 2 * x->all);
    return (int64_t)(part * (double)(x->all * replica_value_bytes(x)));
}

/* Waves of one expert's gradients: a rank sends when it has received everything. 0: a circle. */
static int32_t order_tree(mz_experts *x, int32_t e) {
    int32_t *depth = x->depth, last = 0;
    const int32_t first = x->edge_begin[e], end = x->edge_begin[e + 1];
    memset(depth, 0, sizeof *depth * (size_t)x->e->job.ranks);
    bool more = true;
    for (int32_t pass = 0; more && pass <= end - first; pass++) {
        more = false;
        for (int32_t i = first; i < end; i++) {
            const experts_edge *edge = &x->edge[i];
            if (depth[edge->dst] > depth[edge->src])
                continue;
            depth[edge->dst] = depth[edge->src] + 1;
            more = true;
        }
    }
    for (int32_t i = first; i < end; i++) {
        x->edge[i].wave = depth[x->edge[i].dst];
        last = x->edge[i].wave > last ? x->edge[i].wave : last;
    }
    return more ? 0 : last;
}

/* Every host but the root sends once, and the root has the expert's gradient. */
static mz_code check_tree(const mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e,
                          int32_t root, mz_err *err) {
    for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
        const int32_t rank = plan->rank[i];
        int32_t sent = 0;
        if (x->instance[i].first != i)
            continue;
        for (int32_t k = x->edge_begin[e]; k < x->edge_begin[e + 1]; k++)
            sent += x->edge[k].src == rank;
        if (rank != root && sent == 1 && x->mode == EXPERTS_LAST &&
            x->e->job.traits->replica_optimizer)
            return experts_bug(layer, e, rank,
                               "it updates its own copy, but no move brings it the gradients of "
                               "the other hosts",
                               err);
        if (sent != (rank != root))
            return experts_bug(layer, e, rank,
                               sent == 0  ? "no move takes its gradient to the main"
                               : sent > 1 ? "its gradient is sent twice"
                                          : "the main's gradient is sent away",
                               err);
    }
    for (int32_t k = x->edge_begin[e]; k < x->edge_begin[e + 1]; k++)
        if (x->edge[k].dst != root && experts_first(plan, e, x->edge[k].dst) < 0)
            return experts_bug(layer, e, x->edge[k].dst, "gradients are sent to no host", err);
    return MZ_OK;
}

/* Sender of the next instance after `after` whose rank sends to `rank`; its edge, or -1. */
static int32_t next_child(const mz_experts *x, const mz_plan *plan, int32_t e, int32_t rank,
                          int32_t *after) {
    for (int32_t i = *after + 1; i < plan->begin[e + 1]; i++) {
        if (x->instance[i].first != i)
            continue;
        for (int32_t k = x->edge_begin[e]; k < x->edge_begin[e + 1]; k++)
            if (x->edge[k].src == plan->rank[i] && x->edge[k].dst == rank) {
                *after = i;
                return k;
            }
    }
    return -1;
}

/* All that `rank` receives of expert e. */
static mz_code receive_children(mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e,
                                int32_t rank, mz_err *err) {
    int32_t n = 0, after = plan->begin[e] - 1, k;
    for (int32_t i = x->edge_begin[e]; i < x->edge_begin[e + 1]; i++)
        n += x->edge[i].dst == rank;
    mz_code code = open_sum(x, layer, e, rank, n, x->all, err);
    for (int64_t j = 0; code == MZ_OK && (k = next_child(x, plan, e, rank, &after)) >= 0; j++) {
        const experts_edge *edge = &x->edge[k];
        const experts_memory from = experts_node(x, layer, plan, e, edge->src);
        int64_t budget = edge->free ? 0 : stated_gradient(x, edge->bytes);
        char *to[EXPERTS_MATRICES];
        place_of_sum(x, j, to);
        code = experts_add_values(x, edge->src, rank, from.gradient, to, replica_value_bytes(x), 0,
                                  x->all, &budget, err);
        if (code == MZ_OK)
            code = experts_add_padding(x, edge->src, rank, budget, layer, err);
    }
    return code;
}

/* Ranks that receive in this wave; each once. */
static mz_code collect_wave(mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e,
                            int32_t wave, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t i = x->edge_begin[e]; code == MZ_OK && i < x->edge_begin[e + 1]; i++) {
        bool before = x->edge[i].wave != wave;
        for (int32_t k = x->edge_begin[e]; !before && k < i; k++)
            before = x->edge[k].dst == x->edge[i].dst;
        if (!before)
            code = receive_children(x, layer, plan, e, x->edge[i].dst, err);
    }
    return code;
}

/* ---- rings
 * ---------------------------------------------------------------------------------------*/

/* Distinct hosts of an expert in order of their first instances, into x->depth. */
static int32_t hosts_of(const mz_experts *x, const mz_plan *plan, int32_t e) {
    int32_t m = 0;
    for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
        if (x->instance[i].first == i)
            x->depth[m++] = plan->rank[i];
    return m;
}

/* One edge out of and into every host. */
static mz_code check_ring(const mz_experts *x, int32_t layer, int32_t e, int32_t hosts,
                          mz_err *err) {
    for (int32_t h = 0; h < hosts; h++) {
        int32_t out = 0, in = 0;
        for (int32_t k = x->edge_begin[e]; k < x->edge_begin[e + 1]; k++) {
            out += x->edge[k].src == x->depth[h] && x->edge[k].dst >= 0;
            in += x->edge[k].dst == x->depth[h];
        }
        if (out != 1 || in != 1)
            return experts_bug(layer, e, x->depth[h], "its gradients' ring is not closed", err);
    }
    return MZ_OK;
}

/* Chunks of all hosts' gradients to their owners: host j sums rows [3I j/m, 3I (j+1)/m). */
static mz_code scatter_ring(mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e,
                            mz_err *err) {
    const int32_t m = hosts_of(x, plan, e);
    const int64_t H = x->e->job.hidden, rows = x->all / H, size = x->value_bytes;
    mz_code code = MZ_OK;
    for (int32_t j = 0; code == MZ_OK && j < m; j++) {
        const int64_t low = rows * j / m * H, high = rows * (j + 1) / m * H;
        code = open_sum(x, layer, e, x->depth[j], m, high - low, err);
        char *base = code == MZ_OK ? x->sum[x->sums - 1].received.memory : NULL;
        for (int32_t i = 0; code == MZ_OK && i < m; i++) {
            const experts_memory from = experts_node(x, layer, plan, e, x->depth[i]);
            int64_t budget = (high - low) * size;
            code = experts_add_line(x, x->depth[i], x->depth[j], EXPERTS_COLLECT, from.gradient,
                                    experts_at(base, i * (high - low) * size), low, high, &budget,
                                    err);
        }
    }
    return code;
}

/* Which chunk a host owns among its expert's. */
static int32_t chunk_of(const mz_experts *x, int32_t hosts, int32_t rank) {
    for (int32_t j = 0; j < hosts; j++)
        if (x->depth[j] == rank)
            return j;
    return 0;
}

static mz_code sum_chunks(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err) {
    const int64_t rows = x->all / x->e->job.hidden;
    mz_code code = experts_run_pieces(x, MZ_PHASE_REPLICA_REDUCE, layer, layer, err);
    for (int64_t i = 0; code == MZ_OK && i < x->sums; i++) {
        const experts_sum *s = &x->sum[i];
        if (!experts_local(x, s->rank))
            continue;
        const double start = mz_now();
        const experts_memory node = experts_node(x, layer, plan, s->expert, s->rank);
        const int32_t j = chunk_of(x, hosts_of(x, plan, s->expert), s->rank);
        const int64_t low = rows * j / s->count, high = rows * (j + 1) / s->count;
        if (low < high)
            code = add_rows(x, layer, s->rank, node.gradient, x->e->job.type, s->received.memory,
                            s->count, low, high, false, err);
        if (code == MZ_OK)
            code = engine_charge(x->e, s->rank, MZ_PHASE_REPLICA_REDUCE, layer, start, err);
    }
    close_sums(x);
    return code;
}

static mz_code gather_ring(mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e,
                           mz_err *err) {
    const int32_t m = hosts_of(x, plan, e);
    const int64_t H = x->e->job.hidden, rows = x->all / H;
    mz_code code = MZ_OK;
    for (int32_t j = 0; j < m; j++) {
        const experts_memory from = experts_node(x, layer, plan, e, x->depth[j]);
        const int64_t low = rows * j / m * H, high = rows * (j + 1) / m * H;
        for (int32_t i = 0; code == MZ_OK && i < m; i++) {
            if (i == j)
                continue;
            const experts_memory to = experts_node(x, layer, plan, e, x->depth[i]);
            int64_t budget = (high - low) * x->value_bytes;
            code = experts_add_values(x, x->depth[j], x->depth[i], from.gradient, to.gradient,
                                      x->value_bytes, low, high, &budget, err);
        }
    }
    return code;
}

/* A ring's first host sends, a tree's root does not. */
static bool is_ring(const mz_experts *x, const mz_plan *plan, int32_t e) {
    for (int32_t k = x->edge_begin[e]; k < x->edge_begin[e + 1]; k++)
        if (x->edge[k].dst >= 0 && x->edge[k].src == plan->rank[plan->begin[e]])
            return x->mode != EXPERTS_CALL;
    return false;
}

static mz_code run_rings(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++) {
        if (!is_ring(x, plan, e))
            continue;
        code = check_ring(x, layer, e, hosts_of(x, plan, e), err);
        if (code == MZ_OK)
            code = scatter_ring(x, layer, plan, e, err);
    }
    if (code == MZ_OK && x->sums > 0)
        code = sum_chunks(x, layer, plan, err);
    for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++)
        if (is_ring(x, plan, e))
            code = gather_ring(x, layer, plan, e, err);
    return code == MZ_OK ? experts_run_pieces(x, MZ_PHASE_REPLICA_REDUCE, layer, layer, err) : code;
}

static mz_code run_trees(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err) {
    int32_t last = 0;
    mz_code code = MZ_OK;
    for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++) {
        const int32_t root = x->mode == EXPERTS_CALL ? x->home[e] : plan->rank[plan->begin[e]];
        if (x->mode == EXPERTS_CUT || is_ring(x, plan, e))
            continue;
        for (int32_t k = x->edge_begin[e]; k < x->edge_begin[e + 1]; k++)
            if (x->edge[k].src < 0 || x->edge[k].dst < 0)
                return experts_bug(layer, e, root,
                                   "a move between all ranks, but nothing of it is sharded", err);
        code = check_tree(x, layer, plan, e, root, err);
        const int32_t waves = code == MZ_OK ? order_tree(x, e) : 0;
        if (code == MZ_OK && waves == 0 && x->edge_begin[e] < x->edge_begin[e + 1])
            return experts_bug(layer, e, root, "its gradients travel in a circle", err);
        last = waves > last ? waves : last;
    }
    for (int32_t wave = 1; code == MZ_OK && wave <= last; wave++) {
        for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++)
            if (!is_ring(x, plan, e))
                code = collect_wave(x, layer, plan, e, wave, err);
        if (code == MZ_OK)
            code = run_sums(x, layer, plan, err);
    }
    return code;
}

/* ---- parts
 * ---------------------------------------------------------------------------------------*/

char *experts_cut_gradient(const mz_experts *x, int32_t layer, int32_t rank) {
    return experts_layer_of(x, layer, rank)->gradients.memory;
}

/* The part of e's gradient that `rank` updates, from its hosts as the moves to all ranks have it;
 * what these leave out comes uncharged. */
static mz_code send_part(mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e, int32_t rank,
                         char *to, mz_err *err) {
    const int64_t low = experts_cut_begin(x, rank), n = experts_cut_begin(x, rank + 1) - low;
    const int32_t ranks = x->e->job.ranks, own = experts_first(plan, e, rank);
    const int32_t rest = own >= 0 ? rank : plan->rank[plan->begin[e]];
    int64_t done = 0, none = 0;
    mz_code code = MZ_OK;
    for (int32_t k = x->edge_begin[e]; code == MZ_OK && k < x->edge_begin[e + 1]; k++) {
        const experts_edge *edge = &x->edge[k];
        if (edge->dst >= 0)
            continue;
        const int64_t stated = edge->bytes / 2 / ranks;
        const int64_t values = stated < n - done ? stated : n - done;
        int64_t budget = edge->free ? 0 : values * x->value_bytes;
        const experts_memory from = experts_node(x, layer, plan, e, edge->src);
        if (edge->src != rank)
            code = experts_add_line(x, edge->src, rank, EXPERTS_COLLECT, from.gradient,
                                    experts_at(to, done * x->value_bytes), low + done,
                                    low + done + values, &budget, err);
        done += values;
    }
    const experts_memory from = experts_node(x, layer, plan, e, rest);
    const int64_t at = own >= 0 ? 0 : done;
    if (code == MZ_OK)
        code = experts_add_line(x, rest, rank, EXPERTS_COLLECT, from.gradient,
                                experts_at(to, at * x->value_bytes), low + at, low + n, &none, err);
    return code;
}

/* The hosts of e have the sum: their ring is there, and moves to all ranks. */
static mz_code check_cut(const mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e,
                         mz_err *err) {
    const int32_t hosts = hosts_of(x, plan, e);
    bool parts = x->e->job.ranks == hosts;
    for (int32_t k = x->edge_begin[e]; k < x->edge_begin[e + 1]; k++) {
        parts = parts || x->edge[k].dst < 0;
        if (x->edge[k].src < 0 || experts_first(plan, e, x->edge[k].src) < 0)
            return experts_bug(layer, e, x->edge[k].src,
                               "it is to send a gradient that it does not have", err);
    }
    if (hosts > 1 && !is_ring(x, plan, e))
        return experts_bug(layer, e, x->depth[1], "no move adds its gradient to the others", err);
    if (!parts)
        return experts_bug(layer, e, x->depth[0], "no move takes its gradient to all ranks", err);
    return MZ_OK;
}

static mz_code take_parts(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t r = 0; code == MZ_OK && r < x->e->job.ranks; r++) {
        const int64_t n = experts_cut_begin(x, r + 1) - experts_cut_begin(x, r);
        code = open_sum(x, layer, 0, r, plan->experts, n, err);
        char *base = code == MZ_OK ? x->sum[x->sums - 1].received.memory : NULL;
        for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++)
            code = send_part(x, layer, plan, e, r, experts_at(base, e * n * x->value_bytes), err);
    }
    return code == MZ_OK ? experts_run_pieces(x, MZ_PHASE_REPLICA_REDUCE, layer, layer, err) : code;
}

/* Every rank's parts, in the place of the slots' gradients, which are used up. */
static mz_code cut(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++)
        code = check_cut(x, layer, plan, e, err);
    if (code == MZ_OK)
        code = take_parts(x, layer, plan, err);
    for (int64_t i = 0; code == MZ_OK && i < x->sums; i++) {
        const experts_sum *s = &x->sum[i];
        if (!experts_local(x, s->rank) || s->received.bytes == 0)
            continue;
        const double start = mz_now();
        code = engine_kernel(x->e,
                             mz_kernels_copy(x->e->kernels, 0, MZ_COPY_INSIDE,
                                             experts_cut_gradient(x, layer, s->rank),
                                             s->received.memory, (size_t)s->received.bytes),
                             "parts of gradients", s->rank, layer, err);
        if (code == MZ_OK)
            code = engine_charge(x->e, s->rank, MZ_PHASE_REPLICA_REDUCE, layer, start, err);
    }
    close_sums(x);
    return code;
}

/* ---- a call
 * --------------------------------------------------------------------------------------*/

static bool has_phase(const mz_plan *plan, mz_move_phase phase) {
    for (int32_t m = 0; m < plan->moves; m++)
        if (plan->move[m].kind == MZ_MOVE_GRADIENTS && plan->move[m].phase == phase)
            return true;
    return false;
}

mz_code experts_reduce_moves(mz_experts *x, int32_t layer, const mz_plan *plan, const mz_move *move,
                             int32_t moves, mz_move_phase phase, mz_err *err) {
    const bool once = phase == MZ_MOVE_REDUCE_STEP;
    mz_code code = experts_collect(x, move, moves, MZ_MOVE_GRADIENTS, phase, err);
    if (code != MZ_OK)
        return code;
    /* Placements that last reduce per call or per step. Per call, a rank's own instances may be all
     * there is to add. */
    if (x->mode != EXPERTS_CALL && x->edges == 0 && (!once || has_phase(plan, MZ_MOVE_REDUCE)))
        return !once && (x->e->job.traits->sees & MZ_SEES_CURRENT)
                   ? add_further(x, layer, plan, err)
                   : MZ_OK;
    code = add_further(x, layer, plan, err);
    if (code == MZ_OK)
        code = run_rings(x, layer, plan, err);
    if (code == MZ_OK)
        code = run_trees(x, layer, plan, err);
    return code == MZ_OK && x->mode == EXPERTS_CUT && once ? cut(x, layer, plan, err) : code;
}
