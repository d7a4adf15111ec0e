/* Backward of one micro-batch, layer by layer from the last.
 *
 * One MoE layer call: scores and selection and the exchange of kept counts (lossy plans); transfers
 * that the plan asks for; pack of gradient rows (and of x where it is re-sent); dispatch; expert
 * products; combine; replica gradients to their mains; sum per token and router; then attention.
 * Full recomputation repeats the layer's forward first; where the policy re-sends x and recomputes
 * gate and up of the kept pairs, the routed experts need no further repetition. */
#include "sim/step/inside.h"

#include <string.h>

static void select_stage(mz_step *s, const step_at *at) {
    const int64_t experts = s->model->experts;
    for (int32_t r = at->first; r < at->end; r++)
        s->span_first[r] = step_emit_other(s, r, MZ_PHASE_SCORE, at->layer, s->times[r].score, 1);
    if (s->traits.score_home_bytes > 0 && s->ep > 1) {
        step_build_rows(s, at, TRAFFIC_SCORES, MZ_PHASE_SCORE, WHOLE_CALL, NULL);
        step_need_each(s, at->first, at->end, s->joined);
    }
    for (int32_t r = 0; r < s->ep; r++)
        step_emit_other(s, at->first + r, MZ_PHASE_SCORE, at->layer,
                        step_select_time(s, at->work[r].pairs), 2);
    /* Totals are known since forward: the host does not wait for these counts, dispatch does. */
    step_build_counts(s, at, 4 * ((experts + s->ep - 1) / s->ep));
    if (s->ep > 1)
        step_keep_joined(s, at, 1, s->counted);
}

static void back_pack_stage(mz_step *s, const step_at *at) {
    for (int32_t r = 0; r < s->ep; r++) {
        const int64_t rows = at->work[r].back_packed + at->work[r].again_packed;
        const mz_task task = step_emit_other(s, at->first + r, MZ_PHASE_BACKWARD_PACK, at->layer,
                                             step_row_copies(s, rows, rows), 1);
        if (!at->call->lossy)
            s->span_first[at->first + r] = task;
    }
}

static void begin_back_experts(mz_step *s, const step_at *at) {
    const bool shared = s->model->shared_intermediate > 0;
    for (int32_t r = at->first; r < at->end; r++) {
        s->beside[r] = shared ? step_emit_aside(s, r, MZ_PHASE_BACKWARD_OTHER, at->layer,
                                                s->times[r].shared_back, s->launches.ffn_back)
                              : -1;
        step_need(s, r, s->before_products[r]);
        step_need(s, r, s->due[r]);
    }
}

static void back_products(mz_step *s, const step_at *at, int32_t chunk) {
    for (int32_t r = 0; r < s->ep; r++) {
        const step_rank_work *w = &at->work[r];
        const step_chunk *part =
            chunk == WHOLE_CALL ? NULL : &at->chunk[(int64_t)r * s->chunks + chunk];
        const int64_t rows = part ? part->rows : w->back_rows;
        if (s->options.dispatch != MZ_DISPATCH_PAIR)
            step_emit_other(s, at->first + r, MZ_PHASE_BACKWARD_PACK, at->layer,
                            step_row_copies(s, rows, rows), 1);
        step_emit(s, at->first + r, MZ_PHASE_BACKWARD_EXPERTS, at->layer,
                  part ? part->back_expert_s : w->back_expert_s, w->again_rows > 0 ? 7 : 5);
    }
}

/* As in forward; what a lossy plan keeps is not cut. */
static void back_exchange_stage(mz_step *s, const step_at *at) {
    const bool cut = s->chunks > 1 && !at->call->lossy;
    const int32_t chunks = cut ? s->chunks : 1;
    for (int32_t c = 0; c < chunks; c++) {
        step_build_rows(s, at, TRAFFIC_BACK_DISPATCH, MZ_PHASE_BACKWARD_DISPATCH,
                        cut ? c : WHOLE_CALL, c == 0 ? s->before_dispatch : NULL);
        step_keep_joined(s, at, s->ep > 1, s->arrived + (int64_t)c * s->ranks);
    }
    begin_back_experts(s, at);
    for (int32_t c = 0; c < chunks; c++) {
        step_need_each(s, at->first, at->end, s->arrived + (int64_t)c * s->ranks);
        back_products(s, at, cut ? c : WHOLE_CALL);
        step_build_rows(s, at, TRAFFIC_BACK_COMBINE, MZ_PHASE_BACKWARD_COMBINE,
                        cut ? c : WHOLE_CALL, NULL);
    }
    if (s->ep > 1)
        step_need_each(s, at->first, at->end, s->joined);
}

/* Replica gradients: nothing of this rank, the next layer, or only the optimizer waits for them. */
static void reduce_moves(mz_step *s, const step_at *at, mz_move_phase phase) {
    if (step_build_moves(s, at, phase, MZ_HIDE_NOTHING, NULL) > 0)
        step_need_each(s, at->first, at->end, s->joined);
    for (int hide = MZ_HIDE_PACK; hide <= MZ_HIDE_DISPATCH; hide++)
        if (step_build_moves(s, at, phase, (mz_move_hide)hide, NULL) > 0)
            step_keep_joined(s, at, 1,
                             hide == MZ_HIDE_PACK ? s->before_dispatch : s->before_products);
    if (step_build_moves(s, at, phase, MZ_HIDE_LAYERS, NULL) > 0)
        for (int32_t r = at->first; r < at->end; r++)
            s->reduced[r] = s->joined[r] >= 0 ? s->joined[r] : s->reduced[r];
}

/* After the products: the gradients of this micro-batch, and behind the last one those that were
 * summed over all, as the plan of the first one says. */
static void reduce_stage(mz_step *s, const step_at *at) {
    for (int32_t r = at->first; r < at->end; r++)
        s->before_dispatch[r] = s->before_products[r] = -1;
    reduce_moves(s, at, MZ_MOVE_REDUCE);
    if (at->micro_batch + 1 < s->micro_batches)
        return;
    const step_at first = step_at_of(s, 0, at->moe, at->group);
    reduce_moves(s, &first, MZ_MOVE_REDUCE_STEP);
}

/* Input gradients summed per token; the router's products follow. */
static void back_unpack_stage(mz_step *s, const step_at *at) {
    const int64_t *tokens = s->tokens + (int64_t)at->micro_batch * s->ranks;
    for (int32_t r = at->first; r < at->end; r++) {
        step_need(s, r, s->beside[r]);
        const int64_t rows = at->work[r - at->first].back_packed;
        step_emit_other(s, r, MZ_PHASE_BACKWARD_OTHER, at->layer,
                        step_row_copies(s, rows + tokens[r], tokens[r]), 1);
        const mz_task last = step_emit(s, r, MZ_PHASE_BACKWARD_OTHER, at->layer,
                                       s->times[r].router_back, s->launches.router_back);
        step_span_add(s, s->span_first[r], last);
        step_need(s, r, s->before_dispatch[r]);
        step_need(s, r, s->before_products[r]);
    }
}

static void backward_moe(mz_step *s, const step_at *at) {
    step_take_prefetched(s, at);
    for (int32_t r = at->first; r < at->end; r++)
        s->counted[r] = -1;
    step_prefetch(s, at->micro_batch, at->moe - s->prefetch, at->group, MZ_MOVE_BACKWARD);
    if (at->call->lossy)
        select_stage(s, at);
    step_build_early_moves(s, at, MZ_MOVE_BACKWARD, NULL);
    back_pack_stage(s, at);
    back_exchange_stage(s, at);
    reduce_stage(s, at);
    back_unpack_stage(s, at);
}

/* Router and shared experts again, without the routed ones. */
static void recompute_without_pairs(mz_step *s, const step_at *at) {
    for (int32_t r = at->first; r < at->end; r++) {
        step_emit(s, r, MZ_PHASE_ROUTER, at->layer, s->times[r].router, s->launches.router);
        if (s->model->shared_intermediate > 0)
            step_emit_other(s, r, MZ_PHASE_DENSE, at->layer, s->times[r].shared, s->launches.ffn);
    }
}

static void recompute_layer(mz_step *s, int32_t micro_batch, int32_t layer, int32_t moe) {
    step_build_attention(s, layer);
    if (!s->model->is_moe[layer]) {
        step_build_dense(s, layer);
        return;
    }
    for (int32_t g = 0; g < s->groups; g++) {
        const step_at at = step_at_of(s, micro_batch, moe, g);
        if (at.call->lossy && s->traits.resend)
            recompute_without_pairs(s, &at);
        else
            step_build_moe(s, &at, true);
    }
}

static void backward_attention(mz_step *s, int32_t layer) {
    const bool window = s->model->is_sliding && s->model->is_sliding[layer];
    for (int32_t r = 0; r < s->ranks; r++) {
        const step_token_times *t = &s->times[r];
        step_emit_other(s, r, MZ_PHASE_BACKWARD_OTHER, layer,
                        t->attention_back + (window ? t->window_scores_back : t->scores_back),
                        s->launches.attention_back);
    }
}

void step_build_layer_reduce(mz_step *s, int32_t layer) {
    const double n = s->ranks, copies = s->groups;
    const step_join join = {STREAM_STATE, MZ_PHASE_GRADIENT_REDUCE, layer, true, NULL, NULL};
    if (step_ring_beside(s, 0, 1, s->ranks, (double)s->sizes.dense_layer[layer] * (n - 1) / n,
                         n - 1, join) > 0)
        memcpy(s->scattered, s->joined, sizeof *s->scattered * (size_t)s->ranks);
    for (int32_t r = 0; r < s->ep; r++) {
        const double bytes = (double)s->sizes.expert_layer[layer] * (copies - 1) / copies;
        if (step_ring_beside(s, r, s->ep, s->groups, bytes, copies - 1, join) > 0)
            for (int32_t g = 0; g < s->groups; g++)
                s->scattered[r + g * s->ep] = s->joined[r + g * s->ep];
    }
}

static void dense_backward(mz_step *s, int32_t layer) {
    for (int32_t r = 0; r < s->ranks; r++)
        step_emit_other(s, r, MZ_PHASE_BACKWARD_OTHER, layer, s->times[r].dense_back,
                        s->launches.ffn_back);
}

static void backward_layer(mz_step *s, int32_t micro_batch, int32_t layer, int32_t moe) {
    if (s->options.zero >= 3) {
        step_need_each(s, 0, s->ranks, s->gathered);
        if (layer > 0)
            step_build_layer_gather(s, layer - 1);
    }
    if (s->options.recompute == MZ_RECOMPUTE_FULL)
        recompute_layer(s, micro_batch, layer, moe);
    if (s->model->is_moe[layer]) {
        for (int32_t g = 0; g < s->groups; g++) {
            const step_at at = step_at_of(s, micro_batch, moe, g);
            backward_moe(s, &at);
        }
    } else {
        dense_backward(s, layer);
    }
    backward_attention(s, layer);
    if (s->options.zero >= 2)
        step_build_layer_reduce(s, layer);
}

void step_build_backward(mz_step *s, int32_t micro_batch) {
    int32_t moe = s->moe - 1;
    for (int32_t g = 0; g < s->groups; g++)
        for (int32_t m = moe; m > moe - s->prefetch; m--)
            step_prefetch(s, micro_batch, m, g, MZ_MOVE_BACKWARD);
    if (s->options.zero >= 3)
        step_build_layer_gather(s, s->layers - 1);
    for (int32_t l = s->layers - 1; l >= 0; l--) {
        backward_layer(s, micro_batch, l, moe);
        moe -= s->model->is_moe[l];
    }
    for (int32_t r = 0; r < s->ranks; r++)
        step_emit_other(s, r, MZ_PHASE_BACKWARD_OTHER, s->layers, s->times[r].embed_back, 1);
    if (s->options.zero >= 2)
        step_build_layer_reduce(s, s->layers);
}
