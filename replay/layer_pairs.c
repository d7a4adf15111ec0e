/* A source's pairs: rows made for them, their order by expert, their order in the send buffer. */
#include "replay/layer.h"

#include "common/base/arena.h"
#include "common/base/rng.h"

#include <stdlib.h>
#include <string.h>

/* ---- rows ---------------------------------------------------------------------------------------
 */

void layer_free_rows(mz_engine *e) {
    struct engine_shared *s = e->shared;
    mz_kernels_free(e->kernels, s->made_row);
    mz_kernels_free(e->kernels, s->made_token);
    mz_kernels_free(e->kernels, s->made_scale);
    s->made_row = s->made_token = s->made_scale = NULL;
    s->made_cap = 0;
}

/* Room for what the rows of `tokens` tokens are made from; row i is pair i. */
static mz_code room_for_rows(const layer_call *c, int32_t rank, int64_t tokens) {
    struct engine_shared *s = c->e->shared;
    if (tokens <= s->made_cap)
        return MZ_OK;
    mz_kernels *k = c->e->kernels;
    const int64_t cap = tokens + tokens / 4;
    layer_free_rows(c->e);
    int64_t *row = layer_scratch(c, SCRATCH_ROWS, cap, sizeof *row);
    if (!row)
        return MZ_ENOMEM;
    for (int64_t i = 0; i < cap; i++)
        row[i] = i;
    mz_kstatus status = mz_kernels_alloc(k, sizeof(int64_t) * (size_t)cap, &s->made_row);
    if (status == MZ_K_OK)
        status = mz_kernels_alloc(k, sizeof(int32_t) * (size_t)cap, &s->made_token);
    if (status == MZ_K_OK)
        status = mz_kernels_alloc(k, sizeof(float) * (size_t)cap, &s->made_scale);
    if (status != MZ_K_OK)
        return layer_kernel(c, rank, "memory for data", status);
    s->made_cap = cap;
    return layer_copy_in(c, rank, s->made_row, row, (int64_t)sizeof *row * cap);
}

mz_code layer_make_rows(const layer_call *c, int32_t rank, mz_data_kind kind, void *out) {
    const int64_t tokens = layer_rank(c, rank)->tokens;
    struct engine_shared *s = c->e->shared;
    mz_code code = room_for_rows(c, rank, tokens);
    int32_t *base = code == MZ_OK ? layer_scratch(c, SCRATCH_EXPERTS, tokens, sizeof *base) : NULL;
    float *scale = base ? layer_scratch(c, SCRATCH_WEIGHTS, tokens, sizeof *scale) : NULL;
    if (!scale)
        return code != MZ_OK ? code : MZ_ENOMEM;
    for (int64_t t = 0; t < tokens; t++) {
        const mz_data_row row = mz_data_of(&c->e->job, c->call, kind, rank, t);
        base[t] = (int32_t)row.base;
        scale[t] = row.scale;
    }
    code = layer_copy_in(c, rank, s->made_token, base, (int64_t)sizeof *base * tokens);
    if (code == MZ_OK)
        code = layer_copy_in(c, rank, s->made_scale, scale, (int64_t)sizeof *scale * tokens);
    const mz_pack args = {.type = c->e->job.type,
                          .x = s->base,
                          .hidden = c->H,
                          .rows = tokens,
                          .row_pair = s->made_row,
                          .token = s->made_token,
                          .scale = s->made_scale,
                          .out = out};
    if (code == MZ_OK && tokens > 0)
        code = layer_kernel(c, rank, "data", mz_pack_rows(c->e->kernels, 0, &args));
    return code;
}

/* ---- what the router says
 * -------------------------------------------------------------------------- */

mz_code layer_put_experts(const layer_call *c, int32_t rank) {
    const int64_t n = layer_rank(c, rank)->pairs;
    int32_t *expert = layer_scratch(c, SCRATCH_EXPERTS, n, sizeof *expert);
    if (!expert)
        return MZ_ENOMEM;
    const uint16_t *from = c->call->pairs.expert + c->call->pairs.pair_begin[rank];
    for (int64_t i = 0; i < n; i++)
        expert[i] = from[i];
    return layer_put(c, rank, CALL_EXPERTS, expert, (int64_t)sizeof *expert * n);
}

/* Tokens have any number of pairs: begins [T+1], then the token of each pair. */
static mz_code put_tokens(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    const uint16_t *many = c->call->pairs.token_pairs + c->call->pairs.token_begin[rank];
    int64_t *begin =
        layer_scratch(c, SCRATCH_ROWS, r->tokens + 1 + (r->pairs + 1) / 2, sizeof *begin);
    if (!begin)
        return MZ_ENOMEM;
    int32_t *token = (int32_t *)(begin + r->tokens + 1);
    int64_t pair = 0;
    for (int64_t t = 0; t < r->tokens; t++) {
        begin[t] = pair;
        for (int64_t end = pair + many[t]; pair < end; pair++)
            token[pair] = (int32_t)t;
    }
    begin[r->tokens] = pair;
    return layer_put(c, rank, CALL_TOKENS, begin,
                     (int64_t)sizeof *begin * (r->tokens + 1) + (int64_t)sizeof *token * r->pairs);
}

mz_code layer_put_weights(const layer_call *c, int32_t rank) {
    const int64_t n = layer_rank(c, rank)->pairs;
    float *weight = layer_scratch(c, SCRATCH_WEIGHTS, n, sizeof *weight);
    if (!weight)
        return MZ_ENOMEM;
    const int64_t first = c->call->pairs.pair_begin[rank];
    for (int64_t i = 0; i < n; i++)
        weight[i] = mz_data_weight(&c->e->job, c->call, first + i);
    const mz_code code = layer_put(c, rank, CALL_WEIGHTS, weight, (int64_t)sizeof *weight * n);
    return code == MZ_OK && c->k == 0 ? put_tokens(c, rank) : code;
}

const int64_t *layer_token_begin(const layer_call *c, int32_t rank) {
    return c->k == 0 ? layer_memory(c, rank, CALL_TOKENS) : NULL;
}

mz_code layer_pack(const layer_call *c, int32_t rank, const void *x, const int64_t *row_pair,
                   int64_t rows, const float *scale, void *out) {
    const int64_t *begin = layer_token_begin(c, rank);
    const mz_pack args = {
        .type = c->e->job.type,
        .x = x,
        .hidden = c->H,
        .rows = rows,
        .row_pair = row_pair,
        .k = c->k,
        .token = begin ? (const int32_t *)(begin + layer_rank(c, rank)->tokens + 1) : NULL,
        .scale = scale,
        .out = out};
    if (layer_rank(c, rank)->tokens > 0)
        return layer_kernel(c, rank, "pack", mz_pack_rows(c->e->kernels, 0, &args));
    /* Without tokens there are padded rows alone. */
    return layer_kernel(c, rank, "pack",
                        mz_kernels_zero(c->e->kernels, 0, out, (size_t)(rows * c->row)));
}

/* ---- pairs by expert
 * ------------------------------------------------------------------------------- */

/* Places behind the list that padded rows read: -1, no pair. */
static int64_t pad_of(const layer_call *c, int32_t rank) {
    const mz_policy_traits *t = c->e->job.traits;
    return t->capacity_padded ? mz_capacity_rows(t, &c->call->load, rank) : 0;
}

static mz_code put_pad(const layer_call *c, int32_t rank, layer_buffer list, int64_t pairs) {
    const int64_t pad = pad_of(c, rank);
    int64_t *none = pad > 0 ? layer_scratch(c, SCRATCH_ROWS, pad, sizeof *none) : NULL;
    if (!none)
        return pad > 0 ? MZ_ENOMEM : MZ_OK;
    memset(none, 0xff, sizeof *none * (size_t)pad);
    return layer_copy_in(c, rank, (int64_t *)layer_memory(c, rank, list) + pairs, none,
                         (int64_t)sizeof *none * pad);
}

static mz_code take_list(const layer_call *c, int32_t rank, layer_buffer list, int64_t pairs) {
    const mz_code code =
        layer_take(c, rank, list, (int64_t)sizeof(int64_t) * (pairs + pad_of(c, rank)));
    return code == MZ_OK ? put_pad(c, rank, list, pairs) : code;
}

mz_code layer_group(const layer_call *c, int32_t rank) {
    const int32_t E = c->e->job.experts;
    const int64_t pairs = layer_rank(c, rank)->pairs;
    mz_code code = take_list(c, rank, CALL_LIST, pairs);
    if (code == MZ_OK)
        code = layer_take(c, rank, CALL_LIST_BEGIN, (int64_t)sizeof(int64_t) * (2 * E + 1));
    if (code != MZ_OK)
        return code;
    int64_t *begin = layer_memory(c, rank, CALL_LIST_BEGIN);
    const mz_grouping args = {.expert = layer_memory(c, rank, CALL_EXPERTS),
                              .pairs = pairs,
                              .experts = E,
                              .count = begin + E + 1,
                              .begin = begin,
                              .order = layer_memory(c, rank, CALL_LIST)};
    void *work;
    code = layer_workspace(c, rank, mz_group_pairs_workspace(c->e->kernels, &args), &work);
    if (code == MZ_OK)
        code = layer_kernel(c, rank, "grouping", mz_group_pairs(c->e->kernels, 0, &args, work));
    layer_give(c, rank, CALL_WORKSPACE);
    layer_give(c, rank, CALL_EXPERTS);
    return code;
}

/* ---- drops --------------------------------------------------------------------------------------
 */

/* The pairs of largest gate weight stay. */
static mz_code drop_by_weight(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    const int32_t E = c->e->job.experts;
    int64_t *quota = layer_scratch(c, SCRATCH_ROWS, 2 * E + 1, sizeof *quota);
    if (!quota)
        return MZ_ENOMEM;
    for (int32_t e = 0; e < E; e++)
        quota[e] = r->list_begin[e + 1] - r->list_begin[e];
    memset(quota + E, 0, sizeof *quota * (size_t)(E + 1));
    mz_code code = layer_put(c, rank, CALL_QUOTA, quota, (int64_t)sizeof *quota * (2 * E + 1));
    if (code != MZ_OK)
        return code;
    int64_t *quotas = layer_memory(c, rank, CALL_QUOTA);
    const mz_selection args = {.score = layer_memory(c, rank, CALL_WEIGHTS),
                               .order = layer_memory(c, rank, CALL_LIST),
                               .begin = layer_memory(c, rank, CALL_LIST_BEGIN),
                               .quota = quotas,
                               .pairs = r->pairs,
                               .experts = E,
                               .kept = layer_memory(c, rank, CALL_LIST_LEFT),
                               .kept_begin = quotas + E};
    void *work;
    code = layer_workspace(c, rank, mz_select_workspace(c->e->kernels, &args), &work);
    if (code == MZ_OK)
        code = layer_kernel(c, rank, "drops", mz_select_pairs(c->e->kernels, 0, &args, work));
    layer_give(c, rank, CALL_WORKSPACE);
    layer_give(c, rank, CALL_QUOTA);
    return code;
}

static mz_code run_segments(const layer_call *c, int32_t rank, const mz_segment *segment,
                            int64_t segments, const void *in, void *out) {
    if (segments == 0)
        return MZ_OK;
    mz_code code = layer_put(c, rank, CALL_SEGMENTS, segment, (int64_t)sizeof *segment * segments);
    if (code == MZ_OK)
        code = layer_kernel(
            c, rank, "order of rows",
            mz_arrange(c->e->kernels, 0, layer_memory(c, rank, CALL_SEGMENTS), segments, in, out));
    layer_give(c, rank, CALL_SEGMENTS);
    return code;
}

/* The first pairs of each expert stay. */
static mz_code drop_last(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    const int32_t E = c->e->job.experts;
    mz_segment *segment = layer_scratch(c, SCRATCH_SEGMENTS, E, sizeof *segment);
    if (!segment)
        return MZ_ENOMEM;
    const int64_t *count = c->call->load.count + (int64_t)rank * E;
    int64_t from = 0, n = 0;
    for (int32_t e = 0; e < E; from += count[e++]) {
        const int64_t left = r->list_begin[e + 1] - r->list_begin[e];
        if (left > 0)
            segment[n++] = (mz_segment){from, r->list_begin[e], left};
    }
    return run_segments(c, rank, segment, n, layer_memory(c, rank, CALL_LIST),
                        layer_memory(c, rank, CALL_LIST_LEFT));
}

mz_code layer_drop(const layer_call *c, int32_t rank) {
    struct engine_rank *r = layer_rank(c, rank);
    const int32_t E = c->e->job.experts;
    const int64_t *count = c->call->load.count + (int64_t)rank * E;
    const int64_t *dropped = c->plan->has_drops ? c->plan->dropped + (int64_t)rank * E : NULL;
    for (int32_t e = 0; e < E; e++)
        r->list_begin[e + 1] = r->list_begin[e] + count[e] - (dropped ? dropped[e] : 0);
    if (r->list_begin[E] == r->pairs)
        return MZ_OK;
    const bool by_weight = c->e->job.traits->drop_by_weight && c->call->pairs.weight;
    mz_code code = take_list(c, rank, CALL_LIST_LEFT, r->list_begin[E]);
    if (code == MZ_OK && r->list_begin[E] > 0)
        code = by_weight ? drop_by_weight(c, rank) : drop_last(c, rank);
    if (code == MZ_OK)
        code = layer_copy_in(c, rank, layer_memory(c, rank, CALL_LIST_BEGIN), r->list_begin,
                             (int64_t)sizeof(int64_t) * (E + 1));
    if (code != MZ_OK)
        return code;
    mz_buffer *list = layer_buffer_of(c, rank, CALL_LIST);
    mz_buffer *left = layer_buffer_of(c, rank, CALL_LIST_LEFT);
    const mz_buffer all = *list;
    *list = *left;
    *left = all;
    layer_give(c, rank, CALL_LIST_LEFT);
    return MZ_OK;
}

/* ---- order of the send buffer
 * ---------------------------------------------------------------------- */

/* Blocks [at, end) of a source that belong to the expert of the first. */
static int64_t end_of_expert(const layer_call *c, const layer_layout *l, int64_t at, int64_t end) {
    const int32_t *expert_of = c->e->shared->expert_of;
    const int32_t expert = expert_of[l->block[l->of_source[at]].instance];
    while (at < end && expert_of[l->block[l->of_source[at]].instance] == expert)
        at++;
    return at;
}

/* Where the policy strides its pairs an expert with several hosts takes them in that order, when
 * all of them are assigned (sim/step's rule). */
static mz_code stride_list(const layer_call *c, int32_t rank, const layer_layout *l) {
    const struct engine_rank *r = layer_rank(c, rank);
    const int64_t n = r->list_begin[c->e->job.experts];
    int64_t *list = layer_scratch(c, SCRATCH_LIST, n, sizeof *list);
    int64_t *places = layer_scratch(c, SCRATCH_PLACES, n, sizeof *places);
    if (!list || !places)
        return MZ_ENOMEM;
    mz_code code =
        layer_get(c, rank, list, layer_memory(c, rank, CALL_LIST), (int64_t)sizeof *list * n);
    if (code != MZ_OK)
        return code;
    memcpy(places, list, sizeof *list * (size_t)n);
    const int64_t end = l->source_begin[rank + 1];
    for (int64_t at = l->source_begin[rank], next; at < end; at = next) {
        next = end_of_expert(c, l, at, end);
        const int32_t e = c->e->shared->expert_of[l->block[l->of_source[at]].instance];
        const int64_t first = r->list_begin[e], pairs = r->list_begin[e + 1] - first;
        if (next - at < 2 || pairs != c->call->load.count[(int64_t)rank * c->e->job.experts + e] ||
            pairs == 0)
            continue;
        const mz_stride stride = mz_stride_of(pairs, e);
        for (int64_t j = 0; j < pairs; j++)
            places[first + mz_stride_place(&stride, j)] = list[first + j];
    }
    return layer_copy_in(c, rank, layer_memory(c, rank, CALL_LIST), places,
                         (int64_t)sizeof *places * n);
}

mz_code layer_segments(const layer_call *c, int32_t rank, const layer_layout *l, bool moved,
                       const int64_t *begin, const void *list, void *out) {
    const int64_t first = l->source_begin[rank], end = l->source_begin[rank + 1];
    mz_segment *segment = layer_scratch(c, SCRATCH_SEGMENTS, 2 * (end - first), sizeof *segment);
    if (!segment)
        return MZ_ENOMEM;
    const int64_t pad = begin[c->e->job.experts]; /* behind the list */
    int64_t n = 0;
    for (int64_t i = first; i < end; i++) {
        const layer_block *b = &l->block[l->of_source[i]];
        const int64_t from = begin[c->e->shared->expert_of[b->instance]] + b->from;
        if (b->moved != moved)
            continue;
        if (b->pairs > 0)
            segment[n++] = (mz_segment){from, b->send, b->pairs};
        if (b->rows > b->pairs)
            segment[n++] = (mz_segment){pad, b->send + b->pairs, b->rows - b->pairs};
    }
    return run_segments(c, rank, segment, n, list, out);
}

mz_code layer_arrange(const layer_call *c, int32_t rank) {
    const layer_layout *l = &c->e->shared->forward;
    mz_code code = layer_take(c, rank, CALL_ROW_PAIR, (int64_t)sizeof(int64_t) * l->sent[rank]);
    const bool several = l->instances > c->e->job.experts;
    if (code == MZ_OK && c->e->job.traits->strided_pairs && several)
        code = stride_list(c, rank, l);
    if (code != MZ_OK)
        return code;
    return layer_segments(c, rank, l, false, layer_rank(c, rank)->list_begin,
                          layer_memory(c, rank, CALL_LIST), layer_memory(c, rank, CALL_ROW_PAIR));
}
