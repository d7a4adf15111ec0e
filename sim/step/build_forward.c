/* Forward of one micro-batch: embedding, layers, head and loss.
 *
 * One MoE layer call: router; count exchange; host synchronisation and planning; transfers that the
 * plan asks for before the products; pack; dispatch; experts; combine; unpack. Shared experts run
 * on the compute stream while rows travel. A transfer that hides behind other layers is issued when
 * the call before begins, so that it has one layer's time. */
#include "sim/step/inside.h"

#include <string.h>

void step_need_each(mz_step *s, int32_t first, int32_t end, const mz_task *task) {
    for (int32_t r = first; r < end; r++)
        step_need(s, r, task[r]);
}

void step_keep_joined(mz_step *s, const step_at *at, int32_t members, mz_task *to) {
    for (int32_t r = at->first; r < at->end; r++)
        to[r] = members > 0 ? s->joined[r] : -1;
}

void step_build_attention(mz_step *s, int32_t layer) {
    const bool window = s->model->is_sliding && s->model->is_sliding[layer];
    for (int32_t r = 0; r < s->ranks; r++) {
        const step_token_times *t = &s->times[r];
        step_emit_other(s, r, MZ_PHASE_ATTENTION, layer,
                        t->attention + (window ? t->window_scores : t->scores),
                        s->launches.attention);
    }
}

void step_build_dense(mz_step *s, int32_t layer) {
    for (int32_t r = 0; r < s->ranks; r++)
        step_emit_other(s, r, MZ_PHASE_DENSE, layer, s->times[r].dense, s->launches.ffn);
}

/* Sent rows are read from the layer's input and written to the send buffer. */
static double pack_time(const mz_step *s, int64_t rows) {
    return step_row_copies(s, rows, rows);
}

/* Rows come back per pair or per destination and are summed per token, with the residual. */
static double unpack_time(const mz_step *s, int64_t rows, int64_t tokens) {
    return step_row_copies(s, rows + tokens, tokens);
}

/* Plans made from current counts are known once the counts are here: their transfers neither start
 * before that nor run ahead in an earlier layer. */
static bool plans_ahead(const mz_step *s) {
    return !(s->traits.sees & MZ_SEES_CURRENT);
}

static void count_stage(mz_step *s, const step_at *at) {
    /* Planners that see current counts need every rank's; others only how many rows arrive. */
    const bool all = s->traits.sees & MZ_SEES_CURRENT;
    const int64_t experts = s->model->experts;
    step_build_counts(s, at, 4 * (all ? experts : (experts + s->ep - 1) / s->ep));
    if (s->ep > 1)
        step_keep_joined(s, at, 1, s->counted);
    const bool decided = step_decided(s, at->micro_batch);
    const double planner = (decided ? s->decide_cost : 0) + s->route_cost;
    const double sync = s->options.effects.launches ? s->cluster->device.sync_s : 0;
    if (!s->options.effects.launches && planner == 0)
        return;
    for (int32_t r = at->first; r < at->end; r++)
        step_host_sync(s, r, s->ep > 1 ? s->joined[r] : s->last[r], sync + planner, at->layer);
}

void step_build_early_moves(mz_step *s, const step_at *at, mz_move_phase phase,
                            const mz_task *also) {
    if (step_build_moves(s, at, phase, MZ_HIDE_NOTHING, also) > 0)
        step_need_each(s, at->first, at->end, s->joined);
    step_keep_joined(s, at, step_build_moves(s, at, phase, MZ_HIDE_PACK, also), s->before_dispatch);
    step_keep_joined(s, at, step_build_moves(s, at, phase, MZ_HIDE_DISPATCH, also),
                     s->before_products);
}

void step_prefetch(mz_step *s, int32_t micro_batch, int32_t moe, int32_t group,
                   mz_move_phase phase) {
    if (moe < 0 || moe >= s->moe)
        return;
    const step_at at = step_at_of(s, micro_batch, moe, group);
    step_keep_joined(s, &at, step_build_moves(s, &at, phase, MZ_HIDE_LAYERS, NULL),
                     s->prefetched[moe % 2]);
}

void step_take_prefetched(mz_step *s, const step_at *at) {
    for (int32_t r = at->first; r < at->end; r++) {
        s->due[r] = s->prefetched[at->moe % 2][r];
        s->prefetched[at->moe % 2][r] = -1;
    }
}

static void router_stage(mz_step *s, const step_at *at) {
    for (int32_t r = at->first; r < at->end; r++)
        s->span_first[r] =
            step_emit(s, r, MZ_PHASE_ROUTER, at->layer, s->times[r].router, s->launches.router);
}

static void pack_stage(mz_step *s, const step_at *at) {
    for (int32_t r = 0; r < s->ep; r++)
        step_emit_other(s, at->first + r, MZ_PHASE_PACK, at->layer,
                        pack_time(s, at->work[r].packed), 1);
}

/* Rows that came once for several experts of this rank are written once per pair. */
static void expand_rows(mz_step *s, const step_at *at, int32_t r, int64_t rows) {
    if (s->options.dispatch != MZ_DISPATCH_PAIR)
        step_emit_other(s, at->first + r, MZ_PHASE_PACK, at->layer, step_row_copies(s, rows, rows),
                        1);
}

/* What the first products of the call wait for besides the rows; shared experts run before. */
static void begin_experts(mz_step *s, const step_at *at) {
    const bool shared = s->model->shared_intermediate > 0;
    for (int32_t r = at->first; r < at->end; r++) {
        s->beside[r] = shared ? step_emit_aside(s, r, MZ_PHASE_DENSE, at->layer, s->times[r].shared,
                                                s->launches.ffn)
                              : -1;
        step_need(s, r, s->before_products[r]);
        step_need(s, r, s->due[r]);
    }
}

/* Dispatch, products, combine. With chunks all dispatches are issued first, so that the rows of the
 * next travel while products of this one run, and its results beside the products of the next. */
static void exchange_stage(mz_step *s, const step_at *at, bool exchange) {
    const bool cut = s->chunks > 1;
    for (int32_t c = 0; c < s->chunks && exchange; c++) {
        step_build_rows(s, at, TRAFFIC_DISPATCH, MZ_PHASE_DISPATCH, cut ? c : WHOLE_CALL,
                        c == 0 ? s->before_dispatch : NULL);
        step_keep_joined(s, at, 1, s->arrived + (int64_t)c * s->ranks);
    }
    begin_experts(s, at);
    for (int32_t c = 0; c < s->chunks; c++) {
        if (exchange)
            step_need_each(s, at->first, at->end, s->arrived + (int64_t)c * s->ranks);
        for (int32_t r = 0; r < s->ep; r++) {
            const step_rank_work *w = &at->work[r];
            const step_chunk *part = cut ? &at->chunk[(int64_t)r * s->chunks + c] : NULL;
            expand_rows(s, at, r, cut ? part->rows : w->rows);
            step_emit(s, at->first + r, MZ_PHASE_EXPERTS, at->layer,
                      cut ? part->expert_s : w->expert_s, 3);
        }
        if (exchange)
            step_build_rows(s, at, TRAFFIC_COMBINE, MZ_PHASE_COMBINE, cut ? c : WHOLE_CALL, NULL);
    }
}

static void unpack_stage(mz_step *s, const step_at *at, bool exchange) {
    const int64_t *tokens = s->tokens + (int64_t)at->micro_batch * s->ranks;
    for (int32_t r = at->first; r < at->end; r++) {
        if (exchange)
            step_need(s, r, s->joined[r]);
        step_need(s, r, s->beside[r]);
        const mz_task last =
            step_emit_other(s, r, MZ_PHASE_UNPACK, at->layer,
                            unpack_time(s, at->work[r - at->first].packed, tokens[r]), 1);
        step_span_add(s, s->span_first[r], last);
    }
}

static void no_moves(mz_step *s, const step_at *at) {
    for (int32_t r = at->first; r < at->end; r++)
        s->before_dispatch[r] = s->before_products[r] = s->due[r] = s->counted[r] = -1;
}

void step_build_moe(mz_step *s, const step_at *at, bool again) {
    const bool exchange = s->ep > 1 && (!again || s->options.effects.recompute_exchange);
    no_moves(s, at);
    if (!again && plans_ahead(s)) {
        step_take_prefetched(s, at);
        step_prefetch(s, at->micro_batch, at->moe + s->prefetch, at->group, MZ_MOVE_FORWARD);
    }
    router_stage(s, at);
    if (!again) {
        count_stage(s, at);
        if (!plans_ahead(s))
            step_keep_joined(s, at,
                             step_build_moves(s, at, MZ_MOVE_FORWARD, MZ_HIDE_LAYERS, s->counted),
                             s->due);
        step_build_early_moves(s, at, MZ_MOVE_FORWARD, plans_ahead(s) ? NULL : s->counted);
    }
    pack_stage(s, at);
    exchange_stage(s, at, exchange);
    unpack_stage(s, at, exchange);
}

/* Weights of both families; on one stream, so the last exchange ends last. May start when the layer
 * before the one being computed is done: one layer ahead. */
void step_build_layer_gather(mz_step *s, int32_t layer) {
    const double n = s->ranks, copies = s->groups;
    const step_join join = {STREAM_STATE, MZ_PHASE_PARAMETER_GATHER, layer, true, NULL, NULL};
    for (int32_t r = 0; r < s->ranks; r++)
        s->gathered[r] = -1;
    if (step_ring_beside(s, 0, 1, s->ranks, (double)s->sizes.dense_layer[layer] * (n - 1) / n,
                         n - 1, join) > 0)
        memcpy(s->gathered, s->joined, sizeof *s->gathered * (size_t)s->ranks);
    /* Experts that are restored from shards in their own group have no gather besides. */
    for (int32_t r = 0; r < s->ep && !s->traits.sharded_weights; r++) {
        const double bytes = (double)s->sizes.expert_layer[layer] * (copies - 1) / copies;
        if (step_ring_beside(s, r, s->ep, s->groups, bytes, copies - 1, join) > 0)
            for (int32_t g = 0; g < s->groups; g++)
                s->gathered[r + g * s->ep] = s->joined[r + g * s->ep];
    }
}

static void next_gather(mz_step *s, int32_t layer) {
    if (s->options.zero < 3)
        return;
    step_need_each(s, 0, s->ranks, s->gathered);
    step_build_layer_gather(s, layer);
}

static void start_micro_batch(mz_step *s, int32_t micro_batch) {
    const int64_t *tokens = s->tokens + (int64_t)micro_batch * s->ranks;
    for (int32_t r = 0; r < s->ranks; r++) {
        if (r > 0 && tokens[r] == tokens[r - 1])
            s->times[r] = s->times[r - 1];
        else
            step_token_times_of(s, tokens[r], &s->times[r]);
        step_score_times_of(s, micro_batch, r, &s->times[r]);
    }
}

void step_build_forward(mz_step *s, int32_t micro_batch) {
    int32_t moe = 0;
    start_micro_batch(s, micro_batch);
    for (int32_t g = 0; plans_ahead(s) && g < s->groups; g++)
        for (int32_t m = 0; m < s->prefetch; m++)
            step_prefetch(s, micro_batch, m, g, MZ_MOVE_FORWARD);
    if (s->options.zero >= 3)
        step_build_layer_gather(s, s->layers); /* embedding and head */
    next_gather(s, 0);
    for (int32_t r = 0; r < s->ranks; r++)
        step_emit_other(s, r, MZ_PHASE_DENSE, s->layers, s->times[r].embed, 1);
    for (int32_t l = 0; l < s->layers; l++) {
        if (l + 1 < s->layers)
            next_gather(s, l + 1);
        else if (s->options.zero >= 3)
            step_need_each(s, 0, s->ranks, s->gathered);
        step_build_attention(s, l);
        if (!s->model->is_moe[l]) {
            step_build_dense(s, l);
            continue;
        }
        for (int32_t g = 0; g < s->groups; g++) {
            const step_at at = step_at_of(s, micro_batch, moe, g);
            step_build_moe(s, &at, false);
        }
        moe++;
    }
    const int64_t *tokens = s->tokens + (int64_t)micro_batch * s->ranks;
    for (int32_t r = 0; r < s->ranks; r++)
        step_emit_other(s, r, MZ_PHASE_LOSS, s->layers, s->times[r].loss,
                        step_loss_launches(s, tokens[r]));
}
