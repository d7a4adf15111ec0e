/* Buffers of a rank, kernels, time: what every part of a layer call uses. */
#include "replay/layer.h"

#include "common/base/arena.h"

#include <stdlib.h>

static const struct {
    mz_memcat category;
    const char *label;
} about[LAYER_BUFFERS] = {
    [HELD_INPUT] = {MZ_MEM_ACTIVATIONS, "layer %d input"},
    [HELD_ROWS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d received rows"},
    [HELD_GATE_UP] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate and up"},
    [HELD_ACT] = {MZ_MEM_TOKEN_BUFFERS, "layer %d expert activations"},
    [HELD_NORMS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d norms of pairs"},
    [CALL_EXPERTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d experts of pairs"},
    [CALL_WEIGHTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate weights"},
    [CALL_TOKENS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d tokens of pairs"},
    [CALL_LIST] = {MZ_MEM_TOKEN_BUFFERS, "layer %d pairs by expert"},
    [CALL_LIST_LEFT] = {MZ_MEM_TOKEN_BUFFERS, "layer %d pairs not dropped"},
    [CALL_LIST_BEGIN] = {MZ_MEM_TOKEN_BUFFERS, "layer %d counts"},
    [CALL_QUOTA] = {MZ_MEM_TOKEN_BUFFERS, "layer %d quotas"},
    [CALL_SEGMENTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d order of the send buffer"},
    [CALL_ROW_PAIR] = {MZ_MEM_TOKEN_BUFFERS, "layer %d pairs of rows"},
    [CALL_POSITION] = {MZ_MEM_TOKEN_BUFFERS, "layer %d rows of pairs"},
    [CALL_SEND] = {MZ_MEM_TOKEN_BUFFERS, "layer %d dispatch send buffer"},
    [CALL_OUTPUTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d expert outputs"},
    [CALL_COMBINED] = {MZ_MEM_TOKEN_BUFFERS, "layer %d combined rows"},
    [CALL_ROW_NORMS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d norms of rows"},
    [CALL_SENT_NORMS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d norms of sent rows"},
    [CALL_GROUPS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d rows by expert"},
    [CALL_GROUPS_AGAIN] = {MZ_MEM_TOKEN_BUFFERS, "layer %d rows by expert again"},
    [CALL_OUTPUT] = {MZ_MEM_ACTIVATIONS, "layer %d output"},
    [CALL_GRADIENTS] = {MZ_MEM_ACTIVATIONS, "layer %d gradients of output and input"},
    [CALL_GRADIENT_NORMS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d norms of gradients"},
    [CALL_INPUT_NORMS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d norms of inputs"},
    [CALL_SELECTION] = {MZ_MEM_TOKEN_BUFFERS, "layer %d scores and kept pairs"},
    [CALL_SAVED] = {MZ_MEM_TOKEN_BUFFERS, "layer %d places of saved rows to send"},
    [CALL_SAVED_ROWS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d places of saved rows"},
    [CALL_BACK_SEND] = {MZ_MEM_TOKEN_BUFFERS, "layer %d backward send buffer"},
    [CALL_ROWS_AGAIN] = {MZ_MEM_TOKEN_BUFFERS, "layer %d rows received again"},
    [CALL_BACK_ROWS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d received gradient rows"},
    [CALL_UP_AGAIN] = {MZ_MEM_TOKEN_BUFFERS, "layer %d recomputed gate, up and activations"},
    [CALL_ACT_BACK] = {MZ_MEM_TOKEN_BUFFERS, "layer %d activation gradients"},
    [CALL_GATE_UP_BACK] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate and up gradients"},
    [CALL_INPUT_BACK] = {MZ_MEM_TOKEN_BUFFERS, "layer %d input gradients of experts"},
    [CALL_COMBINED_BACK] = {MZ_MEM_TOKEN_BUFFERS, "layer %d combined input gradients"},
    [CALL_DOTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate gradients of rows"},
    [CALL_SENT_DOTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate gradients"},
    [CALL_WORKSPACE] = {MZ_MEM_WORKSPACE, "layer %d workspace of a kernel"},
};

static mz_buffer *buffer_at(mz_engine *e, int32_t rank, layer_buffer b, int32_t layer) {
    struct engine_rank *r = &e->rank[rank - e->first];
    return b < LAYER_HELD ? &r->held[(int64_t)layer * LAYER_HELD + b] : &r->now[b];
}

mz_buffer *layer_buffer_of(const layer_call *c, int32_t rank, layer_buffer b) {
    const bool local = rank >= c->e->first && rank < c->e->end;
    return local ? buffer_at(c->e, rank, b, c->call->layer) : NULL;
}

void *layer_memory(const layer_call *c, int32_t rank, layer_buffer b) {
    return buffer_at(c->e, rank, b, c->call->layer)->memory;
}

mz_code layer_take(const layer_call *c, int32_t rank, layer_buffer b, int64_t bytes) {
    return mz_heap_take(c->e->heap, rank, about[b].category, bytes, about[b].label, c->call->layer,
                        buffer_at(c->e, rank, b, c->call->layer), c->err);
}

void layer_give(const layer_call *c, int32_t rank, layer_buffer b) {
    mz_heap_give(c->e->heap, buffer_at(c->e, rank, b, c->call->layer));
}

void layer_give_each(const layer_call *c, layer_buffer b) {
    for (int32_t r = c->e->first; r < c->e->end; r++)
        layer_give(c, r, b);
}

void layer_give_all(mz_engine *e) {
    for (int32_t i = 0; i < e->local; i++) {
        struct engine_rank *r = &e->rank[i];
        for (int64_t b = 0; r->held && b < (int64_t)e->job.layers * LAYER_HELD; b++)
            mz_heap_give(e->heap, &r->held[b]);
        for (int b = LAYER_HELD; b < LAYER_BUFFERS; b++)
            mz_heap_give(e->heap, &r->now[b]);
    }
}

mz_code layer_kernel(const layer_call *c, int32_t rank, const char *what, mz_kstatus status) {
    return status == MZ_K_OK ? MZ_OK
                             : engine_kernel(c->e, status, what, rank, c->call->layer, c->err);
}

mz_code layer_copy_in(const layer_call *c, int32_t rank, void *memory, const void *data,
                      int64_t bytes) {
    return layer_kernel(c, rank, "copy to the device",
                        mz_kernels_copy(c->e->kernels, 0, MZ_COPY_IN, memory, data, (size_t)bytes));
}

mz_code layer_put(const layer_call *c, int32_t rank, layer_buffer b, const void *data,
                  int64_t bytes) {
    const mz_code code = layer_take(c, rank, b, bytes);
    return code == MZ_OK ? layer_copy_in(c, rank, layer_memory(c, rank, b), data, bytes) : code;
}

mz_code layer_get(const layer_call *c, int32_t rank, void *data, const void *memory,
                  int64_t bytes) {
    mz_kstatus status = mz_kernels_copy(c->e->kernels, 0, MZ_COPY_OUT, data, memory, (size_t)bytes);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(c->e->kernels, 0);
    return layer_kernel(c, rank, "copy to the host", status);
}

void *layer_scratch(const layer_call *c, layer_scratch_use use, int64_t n, size_t size) {
    struct engine_shared *s = c->e->shared;
    const size_t bytes = (size_t)(n > 0 ? n : 1) * size;
    if (mz_grow(&s->scratch[use], &s->scratch_cap[use], bytes, 1))
        return s->scratch[use];
    mz_fail_nomem(c->err, "index arrays of a layer call");
    return NULL;
}

mz_code layer_each(const layer_call *c, mz_phase phase, layer_part part) {
    mz_code code = MZ_OK;
    for (int32_t r = c->e->first; code == MZ_OK && r < c->e->end; r++) {
        const double start = mz_now();
        code = part(c, r);
        if (code == MZ_OK)
            code = engine_charge(c->e, r, phase, c->call->layer, start, c->err);
    }
    return code;
}

mz_code layer_each_untimed(const layer_call *c, layer_part part) {
    mz_code code = MZ_OK;
    const double start = mz_now();
    for (int32_t r = c->e->first; code == MZ_OK && r < c->e->end; r++)
        code = part(c, r);
    if (code == MZ_OK)
        code = layer_kernel(c, c->e->first, "data", mz_kernels_sync(c->e->kernels, 0));
    engine_untimed(c->e, start);
    return code;
}

mz_code layer_data(const layer_call *c, layer_part part) {
    const mz_code code = layer_each_untimed(c, part);
    return code == MZ_OK ? engine_meet(c->e, c->err) : code;
}

layer_call layer_call_of(mz_engine *e, const mz_replay_call *call, const mz_plan *plan,
                         mz_err *err) {
    const int64_t b = e->value_bytes, H = e->job.hidden, I = e->job.intermediate;
    const bool lossy = plan->has_backward;
    for (int32_t i = 0; i < e->local; i++) {
        struct engine_rank *r = &e->rank[i];
        const int32_t rank = e->first + i;
        r->tokens = call->pairs.token_begin[rank + 1] - call->pairs.token_begin[rank];
        r->pairs = call->pairs.pair_begin[rank + 1] - call->pairs.pair_begin[rank];
    }
    for (int32_t x = 0; x < plan->experts; x++)
        for (int32_t i = plan->begin[x]; i < plan->begin[x + 1]; i++)
            e->shared->expert_of[i] = x;
    return (layer_call){.e = e,
                        .call = call,
                        .plan = plan,
                        .lossy = lossy,
                        .resent = lossy && e->job.traits->resend,
                        .k = call->pairs.top_k,
                        .H = H,
                        .I = I,
                        .row = H * b,
                        .gate_up = 2 * I * b,
                        .act = I * b,
                        .err = err};
}

/* Where row `row` of a buffer lies; nothing on ranks of other processes. */
static char *row_of(const layer_call *c, int32_t rank, layer_buffer b, int64_t row, int64_t bytes) {
    const mz_buffer *buffer = layer_buffer_of(c, rank, b);
    return buffer && buffer->memory ? (char *)buffer->memory + row * bytes : NULL;
}

mz_code layer_lanes(const layer_call *c, const layer_rows *x) {
    const layer_layout *l = x->layout;
    mz_code code = MZ_OK;
    for (int64_t i = 0; code == MZ_OK && i < l->begin[l->instances]; i++) {
        const layer_block *b = &l->block[i];
        const int32_t rank = c->plan->rank[b->instance];
        if (b->rows == 0 || (x->again && !b->moved))
            continue;
        const int64_t at = x->again ? l->sent[b->source] + b->again_send : b->send;
        void *source = row_of(c, b->source, x->at_source, at, x->bytes);
        void *there =
            row_of(c, rank, x->at_rank, x->again ? b->again_receive : b->receive, x->bytes);
        const int64_t bytes = b->rows * x->bytes;
        code =
            x->back
                ? engine_add_lane(c->e, rank, b->source, there, source, bytes, x->counter, c->err)
                : engine_add_lane(c->e, b->source, rank, source, there, bytes, x->counter, c->err);
    }
    return code;
}

int64_t layer_position_bytes(const struct engine_rank *r) {
    return (int64_t)sizeof(int64_t) * (r->pairs > 0 ? r->pairs : r->tokens > 0);
}

mz_code layer_keep_of(const layer_call *c, int32_t rank, const int64_t *position,
                      const uint8_t **keep) {
    const int64_t n = layer_rank(c, rank)->pairs;
    int64_t *place = layer_scratch(c, SCRATCH_PLACES, n, sizeof *place);
    uint8_t *kept = place ? layer_scratch(c, SCRATCH_KEPT, n, sizeof *kept) : NULL;
    if (!kept)
        return MZ_ENOMEM;
    const mz_code code = layer_get(c, rank, place, position, (int64_t)sizeof *place * n);
    for (int64_t i = 0; code == MZ_OK && i < n; i++)
        kept[i] = place[i] >= 0;
    *keep = kept;
    return code;
}

mz_code layer_layouts(const layer_call *c, bool backward) {
    mz_engine *e = c->e;
    struct engine_shared *s = e->shared;
    const double start = mz_now();
    mz_code code = layout_forward(e, c->call, c->plan, &s->forward, c->err);
    if (code == MZ_OK && backward && c->lossy)
        code = layout_backward(e, c->plan, &s->backward, c->err);
    if (code == MZ_OK && backward && c->resent)
        layout_place(e, c->plan, NULL, &s->backward);
    engine_charge_shared(e, backward ? MZ_PHASE_BACKWARD_PACK : MZ_PHASE_PACK, c->call->layer,
                         start);
    return code;
}
