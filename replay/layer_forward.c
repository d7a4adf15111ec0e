/* Forward of one layer call, phase by phase. */
#include "replay/layer.h"

#include <stdio.h>
#include <string.h>

enum { NORM_BYTES = 4 };

/* Does ||h||^2 of every pair go back to its source? */
static bool returns_norms(const layer_call *c) {
    return c->lossy && !c->again && c->e->job.traits->score_combine_bytes > 0;
}

/* ---- data, router, counts
 * -------------------------------------------------------------------------- */

static mz_code data_part(const layer_call *c, int32_t rank) {
    struct engine_rank *r = layer_rank(c, rank);
    mz_code code = layer_take(c, rank, HELD_INPUT, r->tokens * c->row);
    if (code == MZ_OK)
        code = layer_make_rows(c, rank, MZ_DATA_INPUT, layer_memory(c, rank, HELD_INPUT));
    if (code == MZ_OK)
        code = layer_put_weights(c, rank);
    return code == MZ_OK ? layer_put_experts(c, rank) : code;
}

static mz_code check_counts(const layer_call *c, const int64_t *all) {
    const mz_load *load = &c->call->load;
    for (int32_t s = 0; s < load->sources; s++)
        for (int32_t e = 0; e < load->experts; e++) {
            const int64_t cell = (int64_t)s * load->experts + e;
            if (all[cell] != load->count[cell])
                return mz_fail(c->err, MZ_EINPUT,
                               "step %lld, micro-batch %d, layer %d: rank %d has %lld pairs of "
                               "expert %d, the trace counts %lld",
                               (long long)c->call->step, c->call->micro_batch, c->call->layer, s,
                               (long long)all[cell], e, (long long)load->count[cell]);
        }
    return MZ_OK;
}

static mz_code exchange_counts(const layer_call *c) {
    mz_engine *e = c->e;
    const int32_t E = e->job.experts;
    int64_t *mine = e->shared->counts, *all = mine + (int64_t)e->local * E;
    mz_code code = MZ_OK;
    const double start = mz_now();
    for (int32_t r = e->first; code == MZ_OK && r < e->end; r++)
        code = layer_get(c, r, mine + (int64_t)(r - e->first) * E,
                         (const int64_t *)layer_memory(c, r, CALL_LIST_BEGIN) + E + 1,
                         (int64_t)sizeof *mine * E);
    if (code == MZ_OK)
        code = engine_gather(e, mine, sizeof *mine * (size_t)E, all, MZ_PHASE_COUNT_EXCHANGE,
                             c->call->layer, start, c->err);
    const double checked = mz_now();
    if (code == MZ_OK)
        code = check_counts(c, all);
    engine_untimed(e, checked);
    return code;
}

/* ---- pack, dispatch, products
 * ---------------------------------------------------------------------- */

static mz_code pack_part(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    const int64_t sent = c->e->shared->forward.sent[rank];
    mz_code code = c->again ? layer_group(c, rank) : MZ_OK;
    if (code == MZ_OK)
        code = layer_drop(c, rank);
    if (code == MZ_OK)
        code = layer_arrange(c, rank);
    layer_give(c, rank, CALL_LIST);
    layer_give(c, rank, CALL_LIST_BEGIN);
    const int64_t *row_pair = layer_memory(c, rank, CALL_ROW_PAIR);
    if (code == MZ_OK && !c->again)
        code = layer_take(c, rank, CALL_POSITION, layer_position_bytes(r));
    if (code == MZ_OK && !c->again)
        code = layer_kernel(c, rank, "places of rows",
                            mz_invert(c->e->kernels, 0, row_pair, sent, r->pairs,
                                      layer_memory(c, rank, CALL_POSITION)));
    if (code == MZ_OK)
        code = layer_take(c, rank, CALL_SEND, sent * c->row);
    if (code == MZ_OK)
        code = layer_pack(c, rank, layer_memory(c, rank, HELD_INPUT), row_pair, sent, NULL,
                          layer_memory(c, rank, CALL_SEND));
    layer_give(c, rank, CALL_ROW_PAIR);
    return code;
}

static mz_code dispatch(const layer_call *c) {
    mz_engine *e = c->e;
    const layer_layout *l = &e->shared->forward;
    mz_code code = MZ_OK;
    for (int32_t r = e->first; code == MZ_OK && r < e->end; r++)
        code = layer_take(c, r, HELD_ROWS, l->rows[r] * c->row);
    if (code == MZ_OK)
        code = layer_lanes(c, &(layer_rows){.layout = l,
                                            .at_source = CALL_SEND,
                                            .at_rank = HELD_ROWS,
                                            .bytes = c->row,
                                            .counter = &e->figures.dispatch_bytes});
    if (code == MZ_OK)
        code = engine_exchange(e, MZ_PHASE_DISPATCH, c->call->layer, c->call->layer, c->err);
    layer_give_each(c, CALL_SEND);
    return code;
}

static mz_code take_products(const layer_call *c, int32_t rank, int64_t rows) {
    mz_code code = layer_take(c, rank, HELD_GATE_UP, rows * c->gate_up);
    if (code == MZ_OK)
        code = layer_take(c, rank, HELD_ACT, rows * c->act);
    if (code == MZ_OK && !c->again)
        code = layer_take(c, rank, CALL_OUTPUTS, rows * c->row);
    if (code == MZ_OK && returns_norms(c))
        code = layer_take(c, rank, CALL_ROW_NORMS, rows * NORM_BYTES);
    return code;
}

/* Backward needs no outputs. */
static mz_code run_products(const layer_call *c, int32_t rank, mz_groups groups) {
    const mz_expert_groups *hosted = mz_experts_groups(c->e->experts, rank);
    const mz_expert_up up = {.groups = groups,
                             .hidden = c->H,
                             .intermediate = c->I,
                             .type = c->e->job.type,
                             .x = layer_memory(c, rank, HELD_ROWS),
                             .weight = hosted->up,
                             .gate_up = layer_memory(c, rank, HELD_GATE_UP),
                             .h = layer_memory(c, rank, HELD_ACT),
                             .norm2 = layer_memory(c, rank, CALL_ROW_NORMS)};
    const mz_product_args down = {.op = MZ_PRODUCT_FORWARD,
                                  .groups = groups,
                                  .n = c->H,
                                  .k = c->I,
                                  .type = c->e->job.type,
                                  .a = up.h,
                                  .weight = hosted->down,
                                  .c = layer_memory(c, rank, CALL_OUTPUTS)};
    const mz_code code = layer_up(c, rank, &up);
    return code == MZ_OK && !c->again ? layer_product(c, rank, "down", &down) : code;
}

static mz_code experts_part(const layer_call *c, int32_t rank) {
    const layer_layout *l = &c->e->shared->forward;
    mz_groups groups;
    mz_code code = take_products(c, rank, l->rows[rank]);
    if (code == MZ_OK)
        code = layer_groups(c, rank, l, false, &groups);
    if (code == MZ_OK)
        code = run_products(c, rank, groups);
    layer_give(c, rank, CALL_GROUPS);
    if (!c->stay) {
        layer_give(c, rank, HELD_ACT);
        layer_give(c, rank, HELD_GATE_UP);
        layer_give(c, rank, HELD_ROWS);
    }
    return code;
}

mz_code layer_forward_rows(const layer_call *c) {
    mz_code code = layer_each(c, MZ_PHASE_PACK, pack_part);
    if (code == MZ_OK)
        code = dispatch(c);
    return code == MZ_OK ? layer_each(c, MZ_PHASE_EXPERTS, experts_part) : code;
}

/* ---- combine, unpack
 * ------------------------------------------------------------------------------- */

static mz_code combine(const layer_call *c) {
    mz_engine *e = c->e;
    const layer_layout *l = &e->shared->forward;
    mz_code code = MZ_OK;
    for (int32_t r = e->first; code == MZ_OK && r < e->end; r++) {
        code = layer_take(c, r, CALL_COMBINED, l->sent[r] * c->row);
        if (code == MZ_OK && returns_norms(c))
            code = layer_take(c, r, CALL_SENT_NORMS, l->sent[r] * NORM_BYTES);
    }
    layer_rows rows = {.layout = l,
                       .at_source = CALL_COMBINED,
                       .at_rank = CALL_OUTPUTS,
                       .bytes = c->row,
                       .back = true,
                       .counter = &e->figures.combine_bytes};
    if (code == MZ_OK)
        code = layer_lanes(c, &rows);
    rows.at_source = CALL_SENT_NORMS;
    rows.at_rank = CALL_ROW_NORMS;
    rows.bytes = NORM_BYTES;
    if (code == MZ_OK && returns_norms(c))
        code = layer_lanes(c, &rows);
    if (code == MZ_OK)
        code = engine_exchange(e, MZ_PHASE_COMBINE, c->call->layer, c->call->layer, c->err);
    layer_give_each(c, CALL_OUTPUTS);
    layer_give_each(c, CALL_ROW_NORMS);
    return code;
}

/* ||h||^2 by pair, for the scores of backward. */
static mz_code keep_norms(const layer_call *c, int32_t rank) {
    const int64_t pairs = layer_rank(c, rank)->pairs;
    const mz_code code = layer_take(c, rank, HELD_NORMS, pairs * NORM_BYTES);
    if (code != MZ_OK || pairs == 0)
        return code;
    const mz_unpack args = {.type = MZ_F32,
                            .row = layer_memory(c, rank, CALL_SENT_NORMS),
                            .hidden = 1,
                            .pairs = pairs,
                            .position = layer_memory(c, rank, CALL_POSITION),
                            .out = layer_memory(c, rank, HELD_NORMS)};
    return layer_kernel(c, rank, "norms of pairs", mz_unpack_rows(c->e->kernels, 0, &args));
}

static mz_code unpack_part(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    mz_code code = layer_take(c, rank, CALL_OUTPUT, r->tokens * c->row);
    if (code == MZ_OK && returns_norms(c))
        code = keep_norms(c, rank);
    if (code == MZ_OK)
        code = layer_sum_tokens(c, rank, CALL_COMBINED, layer_memory(c, rank, CALL_POSITION),
                                layer_memory(c, rank, CALL_WEIGHTS),
                                layer_memory(c, rank, CALL_OUTPUT));
    layer_give(c, rank, CALL_COMBINED);
    layer_give(c, rank, CALL_SENT_NORMS);
    layer_give(c, rank, CALL_WEIGHTS);
    layer_give(c, rank, CALL_TOKENS);
    return code;
}

mz_code layer_sum_tokens(const layer_call *c, int32_t rank, layer_buffer rows,
                         const int64_t *position, const float *scale, void *out) {
    const mz_combine args = {.type = c->e->job.type,
                             .row = layer_memory(c, rank, rows),
                             .hidden = c->H,
                             .tokens = layer_rank(c, rank)->tokens,
                             .token_begin = layer_token_begin(c, rank),
                             .k = c->k,
                             .position = position,
                             .scale = scale,
                             .out = out};
    return args.tokens > 0
               ? layer_kernel(c, rank, "sums of tokens", mz_combine_rows(c->e->kernels, 0, &args))
               : MZ_OK;
}

static mz_code watch_part(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    mz_engine_seen seen = {.call = c->call,
                           .plan = c->plan,
                           .rank = rank,
                           .tokens = r->tokens,
                           .y = layer_memory(c, rank, CALL_OUTPUT)};
    mz_code code = MZ_OK;
    if (c->plan->has_drops)
        code = layer_keep_of(c, rank, layer_memory(c, rank, CALL_POSITION), &seen.keep);
    return code == MZ_OK ? c->e->watch(c->e->watcher, &seen, c->err) : code;
}

mz_code layer_forward(layer_call *c) {
    mz_engine *e = c->e;
    const mz_replay_call *call = c->call;
    c->stay = !e->job.recompute && !c->resent;
    mz_code code = layer_data(c, data_part);
    if (code == MZ_OK)
        code = layer_each(c, MZ_PHASE_ROUTER, layer_group);
    if (code == MZ_OK)
        code = exchange_counts(c);
    if (code == MZ_OK)
        code = layer_layouts(c, false);
    if (code == MZ_OK)
        code = mz_experts_forward(e->experts, call, c->plan, c->err);
    if (code == MZ_OK)
        code = layer_forward_rows(c);
    if (code == MZ_OK)
        code = combine(c);
    if (code == MZ_OK)
        code = layer_each(c, MZ_PHASE_UNPACK, unpack_part);
    if (code == MZ_OK && e->watch)
        code = layer_each_untimed(c, watch_part);
    layer_give_each(c, CALL_POSITION);
    layer_give_each(c, CALL_OUTPUT);
    return code;
}
