/* Backward of one layer call, phase by phase. */
#include "replay/layer.h"

#include "common/base/rng.h"

#include <string.h>

enum { DOT_BYTES = 4, SCORE_BYTES = 4, PLACE_BYTES = 8 };

/* Rows of gradients: forward's own where nothing is left out. */
static const layer_layout *rows_of(const layer_call *c) {
    return c->lossy ? &c->e->shared->backward : &c->e->shared->forward;
}

/* Lossy, and activations are where forward made them. */
static bool is_saved(const layer_call *c) {
    return c->lossy && !c->resent;
}

static int64_t kept_of(const layer_call *c, int32_t rank) {
    return rows_of(c)->sent[rank];
}

/* ---- data, recomputation
 * --------------------------------------------------------------------------- */

/* The gradient of the output, and room for that of the input behind it. */
static mz_code data_part(const layer_call *c, int32_t rank) {
    mz_code code = layer_take(c, rank, CALL_GRADIENTS, 2 * layer_rank(c, rank)->tokens * c->row);
    if (code == MZ_OK)
        code = layer_make_rows(c, rank, MZ_DATA_GRADIENT, layer_memory(c, rank, CALL_GRADIENTS));
    return code == MZ_OK ? layer_put_weights(c, rank) : code;
}

static mz_code recompute(layer_call *c) {
    c->again = c->stay = true;
    mz_code code = layer_data(c, layer_put_experts);
    if (code == MZ_OK)
        code = layer_forward_rows(c);
    c->again = false;
    return code;
}

/* ---- scores, selection
 * ------------------------------------------------------------------------------- */

static bool needs_gradient(mz_score kind) {
    return kind == MZ_SCORED_DOWN || kind == MZ_SCORED_UP || kind == MZ_SCORED_G ||
           kind == MZ_SCORED_SAMPLE;
}

static mz_code norms_of(const layer_call *c, int32_t rank, const void *x, layer_buffer out) {
    const int64_t tokens = layer_rank(c, rank)->tokens;
    const mz_code code = layer_take(c, rank, out, (int64_t)sizeof(float) * tokens);
    const mz_norms args = {.type = c->e->job.type,
                           .x = x,
                           .rows = tokens,
                           .cols = c->H,
                           .stride = c->H,
                           .out = layer_memory(c, rank, out)};
    return code == MZ_OK ? layer_kernel(c, rank, "norms", mz_row_norms(c->e->kernels, 0, &args))
                         : code;
}

/* The selection buffer holds the list of kept pairs, then the scores. */
static float *scores_of(const layer_call *c, int32_t rank) {
    return (float *)((int64_t *)layer_memory(c, rank, CALL_SELECTION) + layer_rank(c, rank)->pairs);
}

/* The draws of a call, and the number in it of a rank's first pair. */
static uint64_t draw_seed(const layer_call *c) {
    return mz_rng_stream(c->e->job.seed, (uint64_t)c->call->step, (uint64_t)c->call->micro_batch,
                         (uint64_t)c->call->layer);
}

static uint64_t first_pair(const layer_call *c, int32_t rank) {
    const int64_t *begin = c->call->pairs.pair_begin;
    return (uint64_t)(begin[rank] - begin[0]);
}

static bool is_drawn(const layer_call *c) {
    return c->lossy && mz_data_score(&c->e->job) == MZ_SCORED_SAMPLE;
}

static mz_code score_pairs(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    const mz_score kind = mz_data_score(&c->e->job);
    mz_code code = MZ_OK;
    if (needs_gradient(kind))
        code = norms_of(c, rank, layer_memory(c, rank, CALL_GRADIENTS), CALL_GRADIENT_NORMS);
    if (code == MZ_OK && kind == MZ_SCORED_UP)
        code = norms_of(c, rank, layer_memory(c, rank, HELD_INPUT), CALL_INPUT_NORMS);
    if (code != MZ_OK || r->pairs == 0)
        return code;
    const mz_score_args args = {.kind = kind,
                                .tokens = r->tokens,
                                .pairs = r->pairs,
                                .token_begin = layer_token_begin(c, rank),
                                .k = c->k,
                                .weight = layer_memory(c, rank, CALL_WEIGHTS),
                                .grad_norm2 = layer_memory(c, rank, CALL_GRADIENT_NORMS),
                                .input_norm2 = layer_memory(c, rank, CALL_INPUT_NORMS),
                                .hidden_norm2 = layer_memory(c, rank, HELD_NORMS),
                                .seed = draw_seed(c),
                                .first_pair = first_pair(c, rank),
                                .score = scores_of(c, rank)};
    return layer_kernel(c, rank, "scores", mz_score_pairs(c->e->kernels, 0, &args));
}

/* Exactly kept[source][expert] pairs stay, those of largest score. Of a sample their gate weights
 * become what they count for: gradients go through the expert scaled so. */
static mz_code select_pairs(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    const int32_t E = c->e->job.experts;
    int64_t *quota = layer_scratch(c, SCRATCH_ROWS, 2 * E + 1, sizeof *quota);
    if (!quota)
        return MZ_ENOMEM;
    memcpy(quota, c->plan->kept + (int64_t)rank * E, sizeof *quota * (size_t)E);
    memset(quota + E, 0, sizeof *quota * (size_t)(E + 1));
    mz_code code = layer_put(c, rank, CALL_QUOTA, quota, (int64_t)sizeof *quota * (2 * E + 1));
    if (code != MZ_OK || r->list_begin[E] == 0)
        return code;
    int64_t *quotas = layer_memory(c, rank, CALL_QUOTA);
    float *weight = is_drawn(c) ? layer_memory(c, rank, CALL_WEIGHTS) : NULL;
    const mz_selection args = {.score = scores_of(c, rank),
                               .order = layer_memory(c, rank, CALL_LIST),
                               .begin = layer_memory(c, rank, CALL_LIST_BEGIN),
                               .quota = quotas,
                               .pairs = r->pairs,
                               .experts = E,
                               .kept = layer_memory(c, rank, CALL_SELECTION),
                               .kept_begin = quotas + E,
                               .scaled = weight,
                               .weight = weight,
                               .seed = draw_seed(c),
                               .first_pair = first_pair(c, rank)};
    void *work;
    code = layer_workspace(c, rank, mz_select_workspace(c->e->kernels, &args), &work);
    if (code == MZ_OK)
        code = layer_kernel(c, rank, "selection", mz_select_pairs(c->e->kernels, 0, &args, work));
    layer_give(c, rank, CALL_WORKSPACE);
    return code;
}

static mz_code score_part(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    const int64_t least = layer_position_bytes(r), all = (PLACE_BYTES + SCORE_BYTES) * r->pairs;
    mz_code code = layer_take(c, rank, CALL_SELECTION, all > least ? all : least);
    if (code == MZ_OK)
        code = layer_group(c, rank);
    if (code == MZ_OK)
        code = layer_drop(c, rank);
    if (code == MZ_OK)
        code = score_pairs(c, rank);
    if (code == MZ_OK)
        code = select_pairs(c, rank);
    layer_give(c, rank, CALL_QUOTA);
    layer_give(c, rank, CALL_GRADIENT_NORMS);
    layer_give(c, rank, CALL_INPUT_NORMS);
    layer_give(c, rank, CALL_LIST_BEGIN);
    if (!is_saved(c))
        layer_give(c, rank, CALL_LIST);
    return code;
}

/* For those who watch: the weights are gone when they do. */
static mz_code note_weights(const layer_call *c, int32_t rank) {
    struct engine_rank *r = layer_rank(c, rank);
    const size_t bytes = sizeof *r->drawn * (size_t)r->pairs;
    if (!mz_grow((void **)&r->drawn, &r->drawn_cap, bytes, 1))
        return mz_fail_nomem(c->err, "weights of a sample");
    return layer_get(c, rank, r->drawn, layer_memory(c, rank, CALL_WEIGHTS), (int64_t)bytes);
}

/* ---- kept pairs where their activations are
 * ----------------------------------------------------------
 * A kept pair stays on the instance that computed it in forward as long as backward has room for it
 * there; the others move to instances with room, in order. */

typedef struct kept_pairs {
    int64_t n;             /* of the source */
    const int64_t *pair;   /* [n] by expert */
    const int64_t *expert; /* [E+1] begins */
    int64_t *row;          /* [n] row of the saved activations on their rank */
    int32_t *home;         /* [n] instance that holds them */
} kept_pairs;

/* Begins of the kept pairs of each expert, in the first E + 1 items of the scratch of rows. */
static int64_t *kept_begins(const layer_call *c, int32_t rank) {
    const int32_t E = c->e->job.experts;
    int64_t *begin = layer_scratch(c, SCRATCH_ROWS, E + 1, sizeof *begin);
    if (!begin)
        return NULL;
    begin[0] = 0;
    for (int32_t e = 0; e < E; e++)
        begin[e + 1] = begin[e] + c->plan->kept[(int64_t)rank * E + e];
    return begin;
}

/* Blocks [*at, result) of the source are those of `expert`, when any are. */
static int64_t blocks_of(const layer_call *c, const layer_layout *l, int64_t *at, int64_t end,
                         int32_t expert) {
    const int32_t *expert_of = c->e->shared->expert_of;
    while (*at < end && expert_of[l->block[l->of_source[*at]].instance] < expert)
        ++*at;
    int64_t next = *at;
    while (next < end && expert_of[l->block[l->of_source[next]].instance] == expert)
        next++;
    return next;
}

/* Rows and homes of the kept pairs of one expert, whose forward blocks are [at, end). */
static void find_homes(const layer_call *c, const int64_t *place, int64_t first, int32_t e,
                       int64_t at, int64_t end, kept_pairs *k) {
    const layer_layout *l = &c->e->shared->forward;
    for (int64_t i = k->expert[e]; i < k->expert[e + 1]; i++) {
        const int64_t index = place[k->pair[i]] - first;
        k->home[i] = -1;
        for (int64_t j = at; j < end; j++) {
            const layer_block *b = &l->block[l->of_source[j]];
            if (index < b->from || index >= b->from + b->pairs)
                continue;
            k->home[i] = b->instance;
            k->row[i] = b->receive + index - b->from;
            break;
        }
    }
}

static mz_code locate_kept(const layer_call *c, int32_t rank, kept_pairs *k) {
    const struct engine_rank *r = layer_rank(c, rank);
    const layer_layout *l = &c->e->shared->forward;
    const int32_t E = c->e->job.experts;
    const int64_t listed = r->list_begin[E];
    const int64_t *begin = kept_begins(c, rank);
    const int64_t n = begin ? begin[E] : 0;
    int64_t *list = layer_scratch(c, SCRATCH_LIST, listed, sizeof *list);
    int64_t *place = layer_scratch(c, SCRATCH_PLACES, r->pairs, sizeof *place);
    int64_t *pair = layer_scratch(c, SCRATCH_KEPT, n, sizeof *pair);
    int64_t *row = layer_scratch(c, SCRATCH_HOMES, 2 * n, sizeof *row);
    if (!begin || !list || !place || !pair || !row)
        return MZ_ENOMEM;
    *k = (kept_pairs){n, pair, begin, row, (int32_t *)(row + n)};
    mz_code code =
        layer_get(c, rank, list, layer_memory(c, rank, CALL_LIST), (int64_t)sizeof *list * listed);
    if (code == MZ_OK)
        code = layer_get(c, rank, pair, layer_memory(c, rank, CALL_SELECTION),
                         (int64_t)sizeof *pair * n);
    if (code != MZ_OK)
        return code;
    for (int64_t i = 0; i < listed; i++)
        place[list[i]] = i;
    int64_t at = l->source_begin[rank];
    const int64_t end = l->source_begin[rank + 1];
    for (int32_t e = 0; e < E; e++) {
        const int64_t next = blocks_of(c, l, &at, end, e);
        find_homes(c, place, r->list_begin[e], e, at, next, k);
        at = next;
    }
    for (int64_t i = 0; i < n; i++)
        if (k->home[i] < 0)
            return mz_fail(c->err, MZ_EINTERNAL,
                           "layer %d: kept pair %lld of rank %d was in none of its messages",
                           c->call->layer, (long long)pair[i], rank);
    return MZ_OK;
}

/* moved[instance]: kept pairs of the source that come to it from another instance. */
static mz_code count_moved(const layer_call *c, int32_t rank) {
    const mz_plan *plan = c->plan;
    const int32_t instances = plan->begin[plan->experts];
    int64_t *moved = c->e->shared->moved + (int64_t)(rank - c->e->first) * instances;
    kept_pairs k;
    const mz_code code = locate_kept(c, rank, &k);
    if (code != MZ_OK)
        return code;
    memset(moved, 0, sizeof *moved * (size_t)instances);
    for (int64_t i = 0; i < k.n; i++)
        moved[k.home[i]]--;
    /* So far minus the pairs that are there already; other instances get none. */
    const layer_layout *l = &c->e->shared->backward;
    for (int64_t j = l->source_begin[rank]; j < l->source_begin[rank + 1]; j++) {
        const layer_block *b = &l->block[l->of_source[j]];
        if (!b->moved)
            moved[b->instance] += b->pairs;
    }
    for (int32_t i = 0; i < instances; i++)
        moved[i] = moved[i] > 0 ? moved[i] : 0;
    return MZ_OK;
}

/* How many move is told to all ranks: the instances' ranks take as much room. Where every expert
 * has one instance none does. */
static mz_code place_kept(const layer_call *c) {
    mz_engine *e = c->e;
    struct engine_shared *s = e->shared;
    const int32_t instances = c->plan->begin[c->plan->experts];
    int64_t *all = s->moved + (int64_t)e->local * instances;
    mz_code code = MZ_OK;
    if (instances > c->plan->experts) {
        code = layer_each(c, MZ_PHASE_SCORE, count_moved);
        const double start = mz_now();
        if (code == MZ_OK)
            code = engine_gather(e, s->moved, sizeof *all * (size_t)instances, all,
                                 MZ_PHASE_COUNT_EXCHANGE, c->call->layer, start, c->err);
    } else {
        memset(all, 0, sizeof *all * (size_t)instances * (size_t)e->job.ranks);
    }
    if (code != MZ_OK)
        return code;
    const double start = mz_now();
    layout_place(e, c->plan, all, &s->backward);
    engine_charge_shared(e, MZ_PHASE_BACKWARD_PACK, c->call->layer, start);
    return MZ_OK;
}

/* ---- pack ---------------------------------------------------------------------------------------
 */

typedef struct kept_rows {
    int64_t *row_pair;   /* [kept] in send order */
    int64_t *again_pair; /* [moved] */
    int64_t *saved;      /* [kept] row of the saved activations on the instance's rank; -1: moved */
} kept_rows;

/* Send order of one expert's kept pairs; [at, end): its backward blocks. */
static void order_expert(const layer_layout *l, const kept_pairs *k, int32_t e, int64_t at,
                         int64_t end, kept_rows *out, int64_t *used) {
    for (int64_t j = at; j < end; j++)
        used[j - at] = 0;
    for (int64_t i = k->expert[e]; i < k->expert[e + 1]; i++) {
        const layer_block *to = NULL;
        int64_t slot = 0;
        for (int64_t j = at; j < end; j++) { /* where it is, else the first with room */
            const layer_block *b = &l->block[l->of_source[j]];
            const bool fits = b->moved ? !to : b->instance == k->home[i];
            if (!fits || used[j - at] == b->pairs)
                continue;
            to = b;
            slot = j - at;
            if (!b->moved)
                break;
        }
        if (!to)
            continue;
        const int64_t n = used[slot]++;
        out->row_pair[to->send + n] = k->pair[i];
        out->saved[to->send + n] = to->moved ? -1 : k->row[i];
        if (to->moved)
            out->again_pair[to->again_send + n] = k->pair[i];
    }
}

/* Saved activations: CALL_ROW_PAIR (kept pairs, then those whose x is sent again) and CALL_SAVED.
 */
static mz_code order_saved(const layer_call *c, int32_t rank) {
    const layer_layout *l = &c->e->shared->backward;
    const int64_t kept = l->sent[rank], again = l->again_sent[rank];
    const int64_t first = l->source_begin[rank], end = l->source_begin[rank + 1];
    kept_pairs k;
    mz_code code = locate_kept(c, rank, &k);
    int64_t *rows = NULL;
    if (code == MZ_OK)
        rows = layer_scratch(c, SCRATCH_SEGMENTS, 2 * kept + again + (end - first), sizeof *rows);
    if (!rows)
        return code != MZ_OK ? code : MZ_ENOMEM;
    kept_rows out = {rows, rows + kept, rows + kept + again};
    int64_t at = first;
    for (int32_t e = 0; e < c->e->job.experts; e++) {
        const int64_t next = blocks_of(c, l, &at, end, e);
        order_expert(l, &k, e, at, next, &out, out.saved + kept);
        at = next;
    }
    code = layer_put(c, rank, CALL_ROW_PAIR, rows, PLACE_BYTES * (kept + again));
    return code == MZ_OK ? layer_put(c, rank, CALL_SAVED, out.saved, PLACE_BYTES * kept) : code;
}

static mz_code order_resent(const layer_call *c, int32_t rank) {
    const layer_layout *l = &c->e->shared->backward;
    const mz_code code = layer_take(c, rank, CALL_ROW_PAIR, PLACE_BYTES * l->sent[rank]);
    const int64_t *begin = code == MZ_OK ? kept_begins(c, rank) : NULL;
    if (!begin)
        return code != MZ_OK ? code : MZ_ENOMEM;
    return layer_segments(c, rank, l, true, begin, layer_memory(c, rank, CALL_SELECTION),
                          layer_memory(c, rank, CALL_ROW_PAIR));
}

static mz_code order_all(const layer_call *c, int32_t rank) {
    mz_code code = layer_group(c, rank);
    if (code == MZ_OK)
        code = layer_drop(c, rank);
    if (code == MZ_OK)
        code = layer_arrange(c, rank);
    layer_give(c, rank, CALL_LIST_BEGIN);
    return code;
}

/* Where each pair's row lies: the list of kept pairs is not needed any more, its memory is. */
static int64_t *position_of(const layer_call *c, int32_t rank) {
    return layer_memory(c, rank, c->lossy ? CALL_SELECTION : CALL_POSITION);
}

static mz_code order_part(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    mz_code code = !c->lossy   ? order_all(c, rank)
                   : c->resent ? order_resent(c, rank)
                               : order_saved(c, rank);
    layer_give(c, rank, CALL_LIST);
    if (code == MZ_OK && !c->lossy)
        code = layer_take(c, rank, CALL_POSITION, layer_position_bytes(r));
    if (code != MZ_OK)
        return code;
    return layer_kernel(c, rank, "places of rows",
                        mz_invert(c->e->kernels, 0, layer_memory(c, rank, CALL_ROW_PAIR),
                                  kept_of(c, rank), r->pairs, position_of(c, rank)));
}

static mz_code pack_part(const layer_call *c, int32_t rank) {
    const layer_layout *l = rows_of(c);
    const int64_t kept = l->sent[rank], again = l->again_sent[rank];
    mz_code code = order_part(c, rank);
    if (code == MZ_OK)
        code = layer_take(c, rank, CALL_BACK_SEND, (kept + again) * c->row);
    if (code != MZ_OK)
        return code;
    const int64_t *row_pair = layer_memory(c, rank, CALL_ROW_PAIR);
    char *send = layer_memory(c, rank, CALL_BACK_SEND);
    if (kept > 0)
        code = layer_pack(c, rank, layer_memory(c, rank, CALL_GRADIENTS), row_pair, kept,
                          layer_memory(c, rank, CALL_WEIGHTS), send);
    if (code == MZ_OK && again > 0)
        code =
            layer_pack(c, rank, layer_memory(c, rank, HELD_INPUT),
                       c->resent ? row_pair : row_pair + kept, again, NULL, send + kept * c->row);
    layer_give(c, rank, CALL_ROW_PAIR);
    return code;
}

/* ---- dispatch
 * ------------------------------------------------------------------------------------- */

static mz_code take_received(const layer_call *c, int32_t rank) {
    const layer_layout *l = rows_of(c);
    mz_code code = layer_take(c, rank, CALL_ROWS_AGAIN, l->again_rows[rank] * c->row);
    if (code == MZ_OK)
        code = layer_take(c, rank, CALL_BACK_ROWS, l->rows[rank] * c->row);
    if (code == MZ_OK && is_saved(c))
        code = layer_take(c, rank, CALL_SAVED_ROWS, l->rows[rank] * PLACE_BYTES);
    return code;
}

static mz_code dispatch(const layer_call *c) {
    mz_engine *e = c->e;
    mz_code code = MZ_OK;
    for (int32_t r = e->first; code == MZ_OK && r < e->end; r++)
        code = take_received(c, r);
    layer_rows rows = {.layout = rows_of(c),
                       .at_source = CALL_BACK_SEND,
                       .at_rank = CALL_BACK_ROWS,
                       .bytes = c->row,
                       .counter = &e->figures.backward_dispatch_bytes};
    if (code == MZ_OK)
        code = layer_lanes(c, &rows);
    rows.at_rank = CALL_ROWS_AGAIN;
    rows.again = true;
    if (code == MZ_OK && c->lossy)
        code = layer_lanes(c, &rows);
    rows.at_source = CALL_SAVED;
    rows.at_rank = CALL_SAVED_ROWS;
    rows.bytes = PLACE_BYTES;
    rows.again = false;
    if (code == MZ_OK && is_saved(c))
        code = layer_lanes(c, &rows);
    if (code == MZ_OK)
        code =
            engine_exchange(e, MZ_PHASE_BACKWARD_DISPATCH, c->call->layer, c->call->layer, c->err);
    layer_give_each(c, CALL_BACK_SEND);
    layer_give_each(c, CALL_SAVED);
    return code;
}

/* ---- products -----------------------------------------------------------------------------------
 */

/* What the products of backward read, wherever it comes from. */
typedef struct saved_rows {
    void *x, *gate_up, *h;
} saved_rows;

static mz_code up_again(const layer_call *c, int32_t rank, const mz_expert_groups *hosted,
                        saved_rows *again) {
    const layer_layout *l = rows_of(c);
    const int64_t rows = l->again_rows[rank];
    mz_groups groups;
    const mz_code code = layer_groups(c, rank, l, true, &groups);
    *again = (saved_rows){.x = layer_memory(c, rank, CALL_ROWS_AGAIN),
                          .gate_up = layer_memory(c, rank, CALL_UP_AGAIN)};
    if (code != MZ_OK || rows == 0)
        return code;
    again->h = (char *)again->gate_up + rows * c->gate_up;
    const mz_expert_up args = {.groups = groups,
                               .hidden = c->H,
                               .intermediate = c->I,
                               .type = c->e->job.type,
                               .x = again->x,
                               .weight = hosted->up,
                               .gate_up = again->gate_up,
                               .h = again->h};
    return layer_up(c, rank, &args);
}

static mz_code gather(const layer_call *c, int32_t rank, const void *from, int64_t width,
                      const int64_t *place, int64_t rows, void *to) {
    const mz_pack args = {.type = c->e->job.type,
                          .x = from,
                          .hidden = width,
                          .rows = rows,
                          .row_pair = place,
                          .k = 1,
                          .out = to};
    return layer_kernel(c, rank, "kept activations", mz_pack_rows(c->e->kernels, 0, &args));
}

static mz_code copy_rows(const layer_call *c, int32_t rank, void *to, int64_t to_row,
                         const void *from, int64_t from_row, int64_t rows, int64_t bytes) {
    return layer_kernel(
        c, rank, "recomputed activations",
        mz_kernels_copy(c->e->kernels, 0, MZ_COPY_INSIDE, (char *)to + to_row * bytes,
                        (const char *)from + from_row * bytes, (size_t)(rows * bytes)));
}

/* Rows that were computed again lie at the end of their instance's. */
static mz_code copy_again(const layer_call *c, int32_t rank, const saved_rows *again,
                          const saved_rows *to) {
    const layer_layout *l = rows_of(c);
    mz_code code = MZ_OK;
    for (int32_t j = l->rank_begin[rank]; code == MZ_OK && j < l->rank_begin[rank + 1]; j++) {
        const bool last = j + 1 == l->rank_begin[rank + 1];
        const int32_t i = l->by_rank[j], next = last ? i : l->by_rank[j + 1];
        const int64_t end = last ? l->rows[rank] : l->row[next];
        const int64_t rows = (last ? l->again_rows[rank] : l->again_row[next]) - l->again_row[i];
        if (rows == 0)
            continue;
        const int64_t at = end - rows, from = l->again_row[i];
        code = copy_rows(c, rank, to->x, at, again->x, from, rows, c->row);
        if (code == MZ_OK)
            code = copy_rows(c, rank, to->gate_up, at, again->gate_up, from, rows, c->gate_up);
        if (code == MZ_OK)
            code = copy_rows(c, rank, to->h, at, again->h, from, rows, c->act);
    }
    return code;
}

/* The kept rows of saved activations, side by side, in the buffers of their gradients: each is read
 * for the last time by the product before the one that overwrites it. */
static mz_code gather_kept(const layer_call *c, int32_t rank, const saved_rows *again,
                           saved_rows *kept) {
    const int64_t rows = rows_of(c)->rows[rank];
    const int64_t *place = layer_memory(c, rank, CALL_SAVED_ROWS);
    *kept = (saved_rows){.x = layer_memory(c, rank, CALL_INPUT_BACK),
                         .gate_up = layer_memory(c, rank, CALL_GATE_UP_BACK),
                         .h = layer_memory(c, rank, CALL_ACT_BACK)};
    if (rows == 0)
        return MZ_OK;
    mz_code code = MZ_OK;
    if (layer_memory(c, rank, HELD_ROWS)) {
        code = gather(c, rank, layer_memory(c, rank, HELD_ROWS), c->H, place, rows, kept->x);
        if (code == MZ_OK)
            code = gather(c, rank, layer_memory(c, rank, HELD_GATE_UP), 2 * c->I, place, rows,
                          kept->gate_up);
        if (code == MZ_OK)
            code = gather(c, rank, layer_memory(c, rank, HELD_ACT), c->I, place, rows, kept->h);
    }
    return code == MZ_OK ? copy_again(c, rank, again, kept) : code;
}

static mz_code take_products(const layer_call *c, int32_t rank) {
    const layer_layout *l = rows_of(c);
    const int64_t rows = l->rows[rank];
    mz_code code = layer_take(c, rank, CALL_UP_AGAIN, l->again_rows[rank] * (c->gate_up + c->act));
    if (code == MZ_OK)
        code = layer_take(c, rank, CALL_ACT_BACK, rows * c->act);
    if (code == MZ_OK)
        code = layer_take(c, rank, CALL_GATE_UP_BACK, rows * c->gate_up);
    if (code == MZ_OK)
        code = layer_take(c, rank, CALL_INPUT_BACK, rows * c->row);
    if (code == MZ_OK)
        code = layer_take(c, rank, CALL_DOTS, rows * DOT_BYTES);
    return code;
}

/* Gradients of one weight matrix: fp32 ones of replicas beside bf16 ones of mains. */
static mz_code weight_gradients(const layer_call *c, int32_t rank, const char *what,
                                mz_product_args args, void *const *narrow, void *const *wide) {
    args.op = MZ_PRODUCT_WGRAD;
    args.accumulate = true;
    args.gradient_type = c->e->job.type;
    args.weight = narrow;
    const mz_code code = layer_product(c, rank, what, &args);
    args.gradient_type = MZ_F32;
    args.weight = wide;
    return code == MZ_OK && wide ? layer_product(c, rank, what, &args) : code;
}

static mz_code products(const layer_call *c, int32_t rank, const mz_expert_groups *hosted,
                        const mz_groups *groups, const saved_rows *saved) {
    void *dh = layer_memory(c, rank, CALL_ACT_BACK);
    void *dgate_up = layer_memory(c, rank, CALL_GATE_UP_BACK);
    mz_product_args args = {.groups = *groups,
                            .type = c->e->job.type,
                            .n = c->H,
                            .k = c->I,
                            .a = layer_memory(c, rank, CALL_BACK_ROWS),
                            .c = saved->h};
    mz_code code =
        weight_gradients(c, rank, "gradient of down", args, hosted->grad_down, hosted->wide_down);
    args.op = MZ_PRODUCT_DGRAD;
    args.weight = hosted->down;
    args.c = dh;
    if (code == MZ_OK)
        code = layer_product(c, rank, "gradient of activations", &args);
    const mz_swiglu act = {.type = c->e->job.type,
                           .rows = groups->rows_max,
                           .intermediate = c->I,
                           .gate_up = saved->gate_up,
                           .dh = dh,
                           .dot = layer_memory(c, rank, CALL_DOTS),
                           .dgate_up = dgate_up};
    if (code == MZ_OK)
        code = layer_kernel(c, rank, "gradient of gate and up",
                            mz_swiglu_backward(c->e->kernels, 0, &act));
    args.n = 2 * c->I;
    args.k = c->H;
    args.a = dgate_up;
    args.c = saved->x;
    if (code == MZ_OK)
        code = weight_gradients(c, rank, "gradient of gate and up's weights", args, hosted->grad_up,
                                hosted->wide_up);
    args.weight = hosted->up;
    args.c = layer_memory(c, rank, CALL_INPUT_BACK);
    return code == MZ_OK ? layer_product(c, rank, "gradient of inputs", &args) : code;
}

static mz_code experts_part(const layer_call *c, int32_t rank) {
    const mz_expert_groups *hosted = mz_experts_groups(c->e->experts, rank);
    saved_rows saved = {.x = layer_memory(c, rank, HELD_ROWS),
                        .gate_up = layer_memory(c, rank, HELD_GATE_UP),
                        .h = layer_memory(c, rank, HELD_ACT)};
    saved_rows again = {0};
    mz_groups groups;
    mz_code code = take_products(c, rank);
    if (code == MZ_OK && c->lossy)
        code = up_again(c, rank, hosted, &again);
    if (code == MZ_OK && is_saved(c))
        code = gather_kept(c, rank, &again, &saved);
    if (code == MZ_OK)
        code = layer_groups(c, rank, rows_of(c), false, &groups);
    if (code == MZ_OK)
        code = products(c, rank, hosted, &groups, c->resent ? &again : &saved);
    static const layer_buffer done[] = {CALL_ROWS_AGAIN,   CALL_UP_AGAIN,    CALL_ACT_BACK,
                                        CALL_GATE_UP_BACK, CALL_BACK_ROWS,   HELD_ROWS,
                                        HELD_GATE_UP,      HELD_ACT,         CALL_SAVED_ROWS,
                                        CALL_GROUPS,       CALL_GROUPS_AGAIN};
    for (size_t i = 0; i < sizeof done / sizeof *done; i++)
        layer_give(c, rank, done[i]);
    return code;
}

/* ---- combine, sums of tokens
 * ------------------------------------------------------------------------- */

static mz_code combine(const layer_call *c) {
    mz_engine *e = c->e;
    mz_code code = MZ_OK;
    for (int32_t r = e->first; code == MZ_OK && r < e->end; r++) {
        code = layer_take(c, r, CALL_COMBINED_BACK, kept_of(c, r) * c->row);
        if (code == MZ_OK)
            code = layer_take(c, r, CALL_SENT_DOTS, kept_of(c, r) * DOT_BYTES);
    }
    layer_rows rows = {.layout = rows_of(c),
                       .at_source = CALL_COMBINED_BACK,
                       .at_rank = CALL_INPUT_BACK,
                       .bytes = c->row,
                       .back = true,
                       .counter = &e->figures.backward_combine_bytes};
    if (code == MZ_OK)
        code = layer_lanes(c, &rows);
    rows.at_source = CALL_SENT_DOTS;
    rows.at_rank = CALL_DOTS;
    rows.bytes = DOT_BYTES;
    if (code == MZ_OK)
        code = layer_lanes(c, &rows);
    if (code == MZ_OK)
        code =
            engine_exchange(e, MZ_PHASE_BACKWARD_COMBINE, c->call->layer, c->call->layer, c->err);
    layer_give_each(c, CALL_INPUT_BACK);
    layer_give_each(c, CALL_DOTS);
    return code;
}

static void *input_gradient(const layer_call *c, int32_t rank) {
    char *g = layer_memory(c, rank, CALL_GRADIENTS);
    return g ? g + layer_rank(c, rank)->tokens * c->row : NULL;
}

static mz_code unpack_part(const layer_call *c, int32_t rank) {
    const mz_code code = layer_sum_tokens(c, rank, CALL_COMBINED_BACK, position_of(c, rank), NULL,
                                          input_gradient(c, rank));
    layer_give(c, rank, CALL_COMBINED_BACK);
    return code;
}

/* Rows of g travelled multiplied by w (of a sample by more, and so is the gradient), so <dh, h> has
 * come back so. */
static mz_code gate_gradients(const layer_call *c, int32_t rank, const int64_t *place,
                              const float **out) {
    const int64_t n = layer_rank(c, rank)->pairs, kept = kept_of(c, rank);
    const int64_t first = c->call->pairs.pair_begin[rank];
    float *dot = layer_scratch(c, SCRATCH_HOMES, kept + n, sizeof *dot), *dweight = dot + kept;
    if (!dot)
        return MZ_ENOMEM;
    const mz_code code =
        layer_get(c, rank, dot, layer_memory(c, rank, CALL_SENT_DOTS), (int64_t)sizeof *dot * kept);
    for (int64_t p = 0; code == MZ_OK && p < n; p++) {
        const float w = mz_data_weight(&c->e->job, c->call, first + p);
        dweight[p] = place[p] >= 0 && w > 0 ? dot[place[p]] / w : 0;
    }
    *out = dweight;
    return code;
}

static mz_code watch_part(const layer_call *c, int32_t rank) {
    const struct engine_rank *r = layer_rank(c, rank);
    mz_engine_seen seen = {.call = c->call,
                           .plan = c->plan,
                           .rank = rank,
                           .tokens = r->tokens,
                           .dx = input_gradient(c, rank),
                           .drawn = is_drawn(c) ? r->drawn : NULL};
    const uint8_t *keep;
    mz_code code = layer_keep_of(c, rank, position_of(c, rank), &keep);
    if (code == MZ_OK)
        code = gate_gradients(c, rank, c->e->shared->scratch[SCRATCH_PLACES], &seen.dweight);
    seen.keep = c->lossy || c->plan->has_drops ? keep : NULL;
    return code == MZ_OK ? c->e->watch(c->e->watcher, &seen, c->err) : code;
}

/* ---- the whole call
 * --------------------------------------------------------------------------------- */

static mz_code prepare(layer_call *c) {
    mz_engine *e = c->e;
    mz_code code = layer_data(c, data_part);
    if (code == MZ_OK)
        code = layer_layouts(c, true);
    if (code == MZ_OK)
        code = mz_experts_backward(e->experts, c->call, c->plan, c->err);
    if (code == MZ_OK && e->job.recompute && !c->resent)
        code = recompute(c);
    if (code == MZ_OK)
        code = layer_data(c, layer_put_experts);
    if (code == MZ_OK && c->lossy)
        code = layer_each(c, MZ_PHASE_SCORE, score_part);
    if (code == MZ_OK && e->watch && is_drawn(c))
        code = layer_each_untimed(c, note_weights);
    return code == MZ_OK && is_saved(c) ? place_kept(c) : code;
}

mz_code layer_backward(layer_call *c, bool last_micro_batch) {
    mz_engine *e = c->e;
    mz_code code = prepare(c);
    if (code == MZ_OK)
        code = layer_each(c, MZ_PHASE_BACKWARD_PACK, pack_part);
    layer_give_each(c, CALL_WEIGHTS);
    if (code == MZ_OK)
        code = dispatch(c);
    if (code == MZ_OK)
        code = layer_each(c, MZ_PHASE_BACKWARD_EXPERTS, experts_part);
    if (code == MZ_OK)
        code = combine(c);
    if (code == MZ_OK)
        code = layer_each(c, MZ_PHASE_BACKWARD_OTHER, unpack_part);
    if (code == MZ_OK && e->watch)
        code = layer_each_untimed(c, watch_part);
    if (code == MZ_OK) /* whether somebody watches or not */
        code = engine_meet(e, c->err);
    static const layer_buffer done[] = {CALL_SENT_DOTS, CALL_SELECTION, CALL_POSITION, CALL_TOKENS,
                                        HELD_NORMS,     HELD_INPUT,     CALL_GRADIENTS};
    if (code == MZ_OK)
        code = mz_experts_reduce(e->experts, c->call, c->plan, last_micro_batch, c->err);
    for (size_t i = 0; i < sizeof done / sizeof *done; i++)
        layer_give_each(c, done[i]);
    return code;
}
