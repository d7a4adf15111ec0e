/* What every rank takes and gives back in one step of its routed experts alone, in the order in
 * which a replay does (replay/README.md). Per pair: its expert and gate weight 4 B each, its place
 * in the list by expert 8, the pair of a row 8, the row of a pair 8; norms and gradients of gate
 * weights 4; beside a rank's products where each instance's rows begin. Scratch of kernels is no
 * part of it. */
#include "sim/step/timeline.h"

#include <stddef.h>

enum { NUMBER = 4, PLACE = 8 };

static void gone(rank_timeline *t, const buffer *list, size_t count, int32_t layer) {
    for (size_t i = 0; i < count; i++)
        step_give(t, list[i], layer);
}

static int64_t counts_bytes(const mz_step *s) {
    return PLACE * (2 * (int64_t)s->model->experts + 1);
}

static int64_t places_bytes(const rank_timeline *t, const step_rank_work *w) {
    return PLACE * (w->pairs > 0 ? w->pairs : t->tokens > 0);
}

static int64_t groups_bytes(const step_rank_work *w) {
    return PLACE * (w->instances + 1);
}

static bool resent(const rank_timeline *t, layer_call in) {
    return in.call->lossy && t->s->traits.resend;
}

static bool recomputed(const rank_timeline *t, layer_call in) {
    return t->s->options.recompute == MZ_RECOMPUTE_FULL && !resent(t, in);
}

static bool has_norms(const rank_timeline *t, layer_call in) {
    return in.call->lossy && t->s->traits.score_combine_bytes > 0;
}

/* Gate weights and, where tokens have any number of pairs, where they begin and whose they are. */
static void take_weights(rank_timeline *t, layer_call in) {
    const int64_t pairs = in.work->pairs;
    step_take(t, BUFFER_PAIR_WEIGHTS, in.layer, NUMBER * pairs);
    step_take(t, BUFFER_TOKENS, in.layer,
              t->s->model->top_k == 0 ? PLACE * (t->tokens + 1) + NUMBER * pairs : 0);
}

static void take_list(rank_timeline *t, layer_call in) {
    step_take(t, BUFFER_LIST, in.layer, PLACE * in.work->pairs);
    step_take(t, BUFFER_COUNTS, in.layer, counts_bytes(t->s));
    step_give(t, BUFFER_EXPERTS, in.layer);
}

static void take_order(rank_timeline *t, layer_call in) {
    step_take(t, BUFFER_ROW_PAIRS, in.layer, PLACE * in.work->packed);
    step_give(t, BUFFER_LIST, in.layer);
    step_give(t, BUFFER_COUNTS, in.layer);
}

/* ---- forward -----------------------------------------------------------------------------------
 */

/* Rows and products; `again`: in backward, which has no use for outputs. */
static void rows_to_experts(rank_timeline *t, layer_call in, bool again) {
    const step_sizes *z = &t->s->sizes;
    const step_rank_work *w = in.work;
    const int32_t l = in.layer;
    take_order(t, in);
    step_take(t, BUFFER_PLACES, l, again ? 0 : places_bytes(t, w));
    step_take(t, BUFFER_SEND, l, w->packed * z->row);
    step_give(t, BUFFER_ROW_PAIRS, l);
    step_take(t, BUFFER_ROWS, l, w->rows * z->row);
    step_give(t, BUFFER_SEND, l);
    step_take(t, BUFFER_GATE_UP, l, w->rows * z->gate_up);
    step_take(t, BUFFER_ACT, l, w->rows * z->act);
    step_take(t, BUFFER_OUTPUTS, l, again ? 0 : w->rows * z->row);
    step_take(t, BUFFER_ROW_NORMS, l, !again && has_norms(t, in) ? NUMBER * w->rows : 0);
    step_take_and_give(t, BUFFER_GROUPS, l, groups_bytes(w));
}

static void forward_call(rank_timeline *t, layer_call in) {
    static const buffer passing[] = {BUFFER_ACT, BUFFER_GATE_UP, BUFFER_ROWS};
    static const buffer unpacked[] = {BUFFER_COMBINED, BUFFER_SENT_NORMS, BUFFER_PAIR_WEIGHTS,
                                      BUFFER_TOKENS,   BUFFER_PLACES,     BUFFER_OUTPUT};
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const step_rank_work *w = in.work;
    const int32_t l = in.layer;
    step_take(t, BUFFER_INPUT, l, z->input * t->tokens);
    take_weights(t, in);
    step_take(t, BUFFER_EXPERTS, l, NUMBER * w->pairs);
    take_list(t, in);
    step_take_and_give(t, BUFFER_ARRIVED, l,
                       layers_work_at(s, t->micro_batch, in.moe)[t->rank].arrived_bytes);
    step_take(t, BUFFER_REPLICAS, l, w->hosted * z->replica_weights);
    rows_to_experts(t, in, false);
    if (resent(t, in) || recomputed(t, in))
        gone(t, passing, sizeof passing / sizeof *passing, l);
    step_take(t, BUFFER_COMBINED, l, w->packed * z->row);
    step_take(t, BUFFER_SENT_NORMS, l, has_norms(t, in) ? NUMBER * w->packed : 0);
    step_give(t, BUFFER_OUTPUTS, l);
    step_give(t, BUFFER_ROW_NORMS, l);
    step_take(t, BUFFER_OUTPUT, l, z->input * t->tokens);
    step_take(t, BUFFER_NORMS, l, has_norms(t, in) ? NUMBER * w->pairs : 0);
    gone(t, unpacked, sizeof unpacked / sizeof *unpacked, l);
}

/* ---- backward ----------------------------------------------------------------------------------
 */

/* The list of kept pairs becomes the rows of pairs. */
static void score_pairs(rank_timeline *t, layer_call in) {
    const int64_t least = places_bytes(t, in.work), all = in.work->pairs * SELECTION_BYTES;
    step_take(t, BUFFER_SELECTION, in.layer, all > least ? all : least);
    take_list(t, in);
    step_take_and_give(t, BUFFER_GRADIENT_NORMS, in.layer, NUMBER * t->tokens + counts_bytes(t->s));
    step_give(t, BUFFER_COUNTS, in.layer);
    if (t->s->traits.resend)
        step_give(t, BUFFER_LIST, in.layer);
}

static void pack_rows(rank_timeline *t, layer_call in) {
    const step_rank_work *w = in.work;
    const bool saved = in.call->lossy && !t->s->traits.resend;
    const int64_t row = t->s->sizes.row, kept = w->back_packed, again = w->again_packed;
    const int32_t l = in.layer;
    if (!in.call->lossy) {
        take_list(t, in);
        take_order(t, in);
        step_take(t, BUFFER_PLACES, l, places_bytes(t, w));
    } else {
        step_take(t, BUFFER_ROW_PAIRS, l, PLACE * (kept + (saved ? again : 0)));
        step_take(t, BUFFER_SAVED, l, saved ? PLACE * kept : 0);
        step_give(t, BUFFER_LIST, l);
    }
    step_take(t, BUFFER_BACK_SEND, l, (kept + again) * row);
    step_give(t, BUFFER_ROW_PAIRS, l);
    step_give(t, BUFFER_PAIR_WEIGHTS, l);
}

/* Kept rows of saved activations lie in the buffers of their gradients. */
static void backward_rows(rank_timeline *t, layer_call in) {
    static const buffer done[] = {BUFFER_ROWS_AGAIN,   BUFFER_UP_AGAIN,  BUFFER_ACT_BACK,
                                  BUFFER_GATE_UP_BACK, BUFFER_BACK_ROWS, BUFFER_ROWS,
                                  BUFFER_GATE_UP,      BUFFER_ACT,       BUFFER_SAVED_ROWS};
    const step_sizes *z = &t->s->sizes;
    const step_rank_work *w = in.work;
    const int64_t rows = w->back_rows, again = w->again_rows;
    const int32_t l = in.layer;
    step_take(t, BUFFER_ROWS_AGAIN, l, again * z->row);
    step_take(t, BUFFER_BACK_ROWS, l, rows * z->row);
    step_take(t, BUFFER_SAVED_ROWS, l, in.call->lossy && !t->s->traits.resend ? PLACE * rows : 0);
    step_give(t, BUFFER_BACK_SEND, l);
    step_give(t, BUFFER_SAVED, l);
    step_take(t, BUFFER_UP_AGAIN, l, again * (z->gate_up + z->act));
    step_take(t, BUFFER_ACT_BACK, l, rows * z->act);
    step_take(t, BUFFER_GATE_UP_BACK, l, rows * z->gate_up);
    step_take(t, BUFFER_INPUT_BACK, l, rows * z->row);
    step_take(t, BUFFER_DOTS, l, NUMBER * rows);
    step_take_and_give(t, BUFFER_GROUPS, l, (in.call->lossy ? 2 : 1) * groups_bytes(w));
    gone(t, done, sizeof done / sizeof *done, l);
    step_take(t, BUFFER_COMBINED_BACK, l, w->back_packed * z->row);
    step_take(t, BUFFER_SENT_DOTS, l, NUMBER * w->back_packed);
    step_give(t, BUFFER_INPUT_BACK, l);
    step_give(t, BUFFER_DOTS, l);
    step_give(t, BUFFER_COMBINED_BACK, l);
}

/* Gradients of a call, and after the last micro-batch those of the step, whose moves the first
 * one's plan has. */
static void reduce(rank_timeline *t, layer_call in) {
    const layers_work *call = layers_work_at(t->s, t->micro_batch, in.moe) + t->rank;
    const layers_work *step = layers_work_at(t->s, 0, in.moe) + t->rank;
    step_take_and_give(t, BUFFER_REDUCED, in.layer, call->reduced_bytes[0]);
    if (t->micro_batch + 1 == t->s->micro_batches)
        step_take_and_give(t, BUFFER_REDUCED, in.layer, step->reduced_bytes[1]);
}

static void backward_call(rank_timeline *t, layer_call in) {
    static const buffer done[] = {BUFFER_REPLICA_GRADIENTS,
                                  BUFFER_REPLICAS,
                                  BUFFER_SENT_DOTS,
                                  BUFFER_SELECTION,
                                  BUFFER_PLACES,
                                  BUFFER_TOKENS,
                                  BUFFER_NORMS,
                                  BUFFER_INPUT,
                                  BUFFER_GRADIENT};
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const int32_t l = in.layer;
    step_take(t, BUFFER_GRADIENT, l, 2 * z->input * t->tokens);
    take_weights(t, in);
    step_take(t, BUFFER_REPLICA_GRADIENTS, l, in.work->hosted * z->replica_gradients);
    step_take(t, BUFFER_EXPERTS, l, NUMBER * in.work->pairs);
    if (recomputed(t, in)) {
        take_list(t, in);
        rows_to_experts(t, in, true);
        step_take(t, BUFFER_EXPERTS, l, NUMBER * in.work->pairs);
    }
    if (in.call->lossy)
        score_pairs(t, in);
    pack_rows(t, in);
    backward_rows(t, in);
    reduce(t, in);
    gone(t, done, sizeof done / sizeof *done, l);
}

/* ---- the step ----------------------------------------------------------------------------------
 */

/* Norms of the gradient rows of one matrix kind of a layer; a cut optimizer holds a layer's fresh
 * weights in the parts that it updates. */
static int64_t update_bytes(const mz_step *s, int32_t rank) {
    const mz_model *m = s->model;
    const int64_t most =
        m->hidden > 2 * m->expert_intermediate ? m->hidden : 2 * m->expert_intermediate;
    return s->traits.sharded_optimizer ? layers_cut_bytes(s, rank) : NUMBER * s->mains * most;
}

void layers_timeline(rank_timeline *t) {
    const mz_step *s = t->s;
    for (int32_t b = 0; b < s->micro_batches; b++) {
        step_start_micro_batch(t, b);
        for (int32_t l = 0; l < s->layers; l++)
            forward_call(t, step_layer_call(t, l, l));
        for (int32_t l = s->layers - 1; l >= 0; l--)
            backward_call(t, step_layer_call(t, l, l));
    }
    step_take_and_give(t, BUFFER_UPDATE, s->layers, update_bytes(s, t->rank));
}
