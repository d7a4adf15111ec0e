/* Transfers: pieces of which stated bytes are charged, and weights that go to replicas of a call.
 */
#include "replay/experts_inside.h"

#include <string.h>

/* ---- pieces
 * --------------------------------------------------------------------------------------*/

mz_code experts_add_piece(mz_experts *x, int32_t from, int32_t to, const char *send, char *receive,
                          int64_t bytes, int64_t *budget, mz_err *err) {
    x->uncharged = x->uncharged || (bytes > 0 && bytes > *budget);
    if (bytes <= 0 || (!experts_local(x, from) && !experts_local(x, to))) {
        *budget -= bytes < *budget ? bytes : *budget;
        return MZ_OK;
    }
    if (!mz_grow((void **)&x->piece, &x->piece_cap, (size_t)x->pieces + 1, sizeof *x->piece))
        return mz_fail_nomem(err, "transfers of experts");
    const int64_t charged = bytes < *budget ? bytes : *budget;
    x->piece[x->pieces++] = (experts_piece){from, to, send, receive, bytes, charged};
    *budget -= charged;
    return MZ_OK;
}

mz_code experts_add_values(mz_experts *x, int32_t from, int32_t to, char *const *send,
                           char *const *receive, int64_t value_bytes, int64_t low, int64_t high,
                           int64_t *budget, mz_err *err) {
    int64_t first = 0;
    mz_code code = MZ_OK;
    for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++) {
        const int64_t end = first + x->values[k];
        const int64_t a = low > first ? low : first, b = high < end ? high : end;
        if (a < b)
            code = experts_add_piece(x, from, to, experts_at(send[k], (a - first) * value_bytes),
                                     experts_at(receive[k], (a - first) * value_bytes),
                                     (b - a) * value_bytes, budget, err);
        first = end;
    }
    return code;
}

mz_code experts_add_line(mz_experts *x, int32_t from, int32_t to, experts_direction direction,
                         char *const *part, char *line, int64_t low, int64_t high, int64_t *budget,
                         mz_err *err) {
    const int64_t size = x->value_bytes;
    int64_t first = 0;
    mz_code code = MZ_OK;
    for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++) {
        const int64_t end = first + x->values[k];
        const int64_t a = low > first ? low : first, b = high < end ? high : end;
        first = end;
        if (a >= b)
            continue;
        const bool collect = direction == EXPERTS_COLLECT;
        char *in_part = experts_at(part[k], (a - end + x->values[k]) * size);
        char *in_line = experts_at(line, (a - low) * size);
        code = experts_add_piece(x, from, to, collect ? in_part : in_line,
                                 collect ? in_line : in_part, (b - a) * size, budget, err);
    }
    return code;
}

/* Memory of one end of a piece without content. */
static mz_code take_padding(mz_experts *x, int32_t rank, int64_t bytes, int32_t layer,
                            char **memory, mz_err *err) {
    *memory = NULL;
    if (!experts_local(x, rank))
        return MZ_OK;
    if (!mz_grow((void **)&x->padding, &x->padding_cap, (size_t)x->paddings + 1,
                 sizeof *x->padding))
        return mz_fail_nomem(err, "transfers of experts");
    mz_buffer *b = &x->padding[x->paddings];
    *b = (mz_buffer){0};
    const mz_code code = mz_heap_take(x->e->heap, rank, MZ_MEM_TEMPORARIES, bytes,
                                      "layer %d stated bytes beyond the run's", layer, b, err);
    x->paddings += code == MZ_OK;
    *memory = b->memory;
    return code == MZ_OK ? experts_zero(x, b->memory, bytes, rank, layer, err) : code;
}

mz_code experts_add_padding(mz_experts *x, int32_t from, int32_t to, int64_t bytes, int32_t layer,
                            mz_err *err) {
    char *send, *receive;
    if (bytes <= 0)
        return MZ_OK;
    mz_code code = take_padding(x, from, bytes, layer, &send, err);
    if (code == MZ_OK)
        code = take_padding(x, to, bytes, layer, &receive, err);
    int64_t budget = bytes;
    return code == MZ_OK ? experts_add_piece(x, from, to, send, receive, bytes, &budget, err)
                         : code;
}

static mz_code run_charged(mz_experts *x, mz_phase phase, int32_t layer, int32_t row, mz_err *err) {
    mz_engine *e = x->e;
    int64_t lanes = 0;
    mz_code code = MZ_OK;
    for (int64_t i = 0; code == MZ_OK && i < x->pieces; i++) {
        const experts_piece *p = &x->piece[i];
        lanes += p->charged > 0;
        if (p->charged > 0)
            code = engine_add_lane(e, p->from, p->to, p->send, p->receive, p->charged,
                                   &e->figures.transfer_bytes, err);
    }
    return code == MZ_OK && lanes > 0 ? engine_exchange(e, phase, layer, row, err) : code;
}

static void drop_pieces(mz_experts *x) {
    for (int64_t i = 0; i < x->paddings; i++)
        mz_heap_give(x->e->heap, &x->padding[i]);
    x->pieces = x->paddings = 0;
    x->uncharged = false;
}

mz_code experts_run_uncharged(mz_experts *x, mz_err *err) {
    mz_engine *e = x->e;
    mz_code code = MZ_OK;
    const double start = mz_now();
    for (int64_t i = 0; code == MZ_OK && i < x->pieces; i++) {
        const experts_piece *p = &x->piece[i];
        if (p->charged < p->bytes)
            code = engine_add_lane(e, p->from, p->to, experts_at((char *)p->send, p->charged),
                                   experts_at(p->receive, p->charged), p->bytes - p->charged, NULL,
                                   err);
    }
    if (code == MZ_OK && e->lanes.count > 0)
        code = mz_transport_exchange(e->transport, e->lanes.lane, e->lanes.count, NULL, err);
    e->lanes.count = 0;
    engine_untimed(e, start);
    if (code == MZ_OK && x->uncharged)
        code = engine_meet(e, err);
    drop_pieces(x);
    return code;
}

mz_code experts_run_pieces(mz_experts *x, mz_phase phase, int32_t layer, int32_t row, mz_err *err) {
    const mz_code code = run_charged(x, phase, layer, row, err);
    if (code == MZ_OK)
        return experts_run_uncharged(x, err);
    drop_pieces(x);
    return code;
}

/* ---- moves by expert
 * -----------------------------------------------------------------------------*/

mz_code experts_collect(mz_experts *x, const mz_move *move, int32_t moves, mz_move_kind kind,
                        mz_move_phase phase, mz_err *err) {
    const int32_t experts = x->e->job.experts;
    int32_t *begin = x->edge_begin;
    memset(begin, 0, sizeof *begin * ((size_t)experts + 1));
    x->edges = 0;
    for (int32_t m = 0; m < moves; m++)
        if (move[m].kind == kind && move[m].phase == phase && !move[m].change) {
            begin[move[m].expert + 1]++;
            x->edges++;
        }
    if (!mz_grow((void **)&x->edge, &x->edge_cap, (size_t)x->edges, sizeof *x->edge))
        return mz_fail_nomem(err, "moves by expert");
    for (int32_t e = 0; e < experts; e++)
        begin[e + 1] += begin[e];
    for (int32_t m = moves; m-- > 0;) {
        const mz_move *v = &move[m];
        if (v->kind != kind || v->phase != phase || v->change)
            continue;
        x->edge[--begin[v->expert + 1]] = (experts_edge){.expert = v->expert,
                                                         .src = v->src,
                                                         .dst = v->dst,
                                                         .bytes = v->bytes,
                                                         .free = v->hide == MZ_HIDE_FREE};
    }
    /* Filled from the back, begin[e+1] is now where e starts. */
    memmove(begin, begin + 1, sizeof *begin * (size_t)experts);
    begin[experts] = (int32_t)x->edges;
    return MZ_OK;
}

static bool has_node(const mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e,
                     int32_t rank) {
    return experts_slot(x, layer, rank, e) >= 0 || experts_first(plan, e, rank) >= 0;
}

/* Waves of one expert's weights: a rank that has them after wave w sends in wave w + 1. */
static mz_code order_weights(mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e,
                             bool needed, int32_t *last, mz_err *err) {
    int32_t *depth = x->depth;
    memset(depth, 0, sizeof *depth * (size_t)x->e->job.ranks);
    depth[x->home[e]] = 1;
    for (bool more = true; more;) {
        more = false;
        for (int32_t i = x->edge_begin[e]; i < x->edge_begin[e + 1]; i++) {
            experts_edge *edge = &x->edge[i];
            if (edge->src < 0 || edge->dst < 0)
                return experts_bug(layer, e, edge->src < 0 ? edge->dst : edge->src,
                                   "a move between all ranks, but nothing of it is sharded", err);
            if (edge->wave > 0 || depth[edge->src] == 0)
                continue;
            more = true;
            edge->wave = depth[edge->src];
            if (depth[edge->dst] == 0)
                depth[edge->dst] = edge->wave + 1;
            if (!has_node(x, layer, plan, e, edge->dst))
                return experts_bug(layer, e, edge->dst, "weights are sent to no host", err);
            *last = edge->wave > *last ? edge->wave : *last;
        }
    }
    for (int32_t i = x->edge_begin[e]; i < x->edge_begin[e + 1]; i++)
        if (x->edge[i].wave == 0)
            return experts_bug(layer, e, x->edge[i].src,
                               "it is to send weights that it does not get", err);
    for (int32_t i = plan->begin[e]; needed && i < plan->begin[e + 1]; i++)
        if (depth[plan->rank[i]] == 0)
            return experts_bug(layer, e, plan->rank[i], "no move brings it the weights", err);
    return MZ_OK;
}

static mz_code send_wave(mz_experts *x, int32_t layer, const mz_plan *plan, int32_t wave,
                         mz_err *err) {
    mz_code code = MZ_OK;
    for (int64_t i = 0; code == MZ_OK && i < x->edges; i++) {
        const experts_edge *edge = &x->edge[i];
        if (edge->wave != wave)
            continue;
        const experts_memory from = experts_node(x, layer, plan, edge->expert, edge->src);
        const experts_memory to = experts_node(x, layer, plan, edge->expert, edge->dst);
        int64_t budget = edge->free ? 0 : edge->bytes / 2 * x->value_bytes;
        code = experts_add_values(x, edge->src, edge->dst, from.weight, to.weight, x->value_bytes,
                                  0, x->all, &budget, err);
        if (code == MZ_OK)
            code = experts_add_padding(x, edge->src, edge->dst, budget, layer, err);
    }
    return code == MZ_OK ? experts_run_pieces(x, MZ_PHASE_WEIGHT_MOVE, layer, layer, err) : code;
}

mz_code experts_send_weights(mz_experts *x, int32_t layer, const mz_plan *plan, mz_move_phase phase,
                             mz_err *err) {
    /* Replicas that stay until backward have their weights. */
    const bool needed =
        phase == MZ_MOVE_FORWARD || x->e->job.traits->replica_memory == MZ_REPLICAS_SHARED;
    int32_t last = 0;
    mz_code code = experts_collect(x, plan->move, plan->moves, MZ_MOVE_WEIGHTS, phase, err);
    for (int32_t e = 0; code == MZ_OK && e < plan->experts; e++)
        code = order_weights(x, layer, plan, e, needed, &last, err);
    for (int32_t wave = 1; code == MZ_OK && wave <= last; wave++)
        code = send_wave(x, layer, plan, wave, err);
    return code;
}
