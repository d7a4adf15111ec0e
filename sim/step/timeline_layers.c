/* What every rank takes and gives back in one step of its routed experts alone, in the order of the
 * phases (replay/README.md): rows come and go as in timeline.c. Lists of a call are made for its
 * pairs and stay until its backward is done: pairs by expert, those of the send buffer, the place
 * of each pair in it, 8 bytes each. */
#include "sim/step/timeline.h"

#include <stddef.h>

static int64_t lists_of(const mz_step *s, const step_rank_work *w) {
    return 8 * (2 * w->pairs + w->packed) + 8 * (2 * (int64_t)s->model->experts + 1);
}

static void gone(rank_timeline *t, const buffer *list, size_t count, int32_t layer) {
    for (size_t i = 0; i < count; i++)
        step_give(t, list[i], layer);
}

/* From the layer's input to the experts' activations. */
static void rows_to_experts(rank_timeline *t, layer_call in) {
    const step_sizes *z = &t->s->sizes;
    const int64_t rows = in.work->rows;
    const int32_t l = in.layer;
    step_take(t, BUFFER_SEND, l, in.work->packed * z->row);
    step_take(t, BUFFER_ROWS, l, rows * z->row);
    step_give(t, BUFFER_SEND, l);
    step_take(t, BUFFER_GATE_UP, l, rows * z->gate_up);
    step_take(t, BUFFER_ACT, l, rows * z->act);
}

static void forward_call(rank_timeline *t, layer_call in) {
    static const buffer passing[] = {BUFFER_ACT, BUFFER_GATE_UP, BUFFER_ROWS};
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const bool resent = in.call->lossy && s->traits.resend;
    const bool stay = s->options.recompute != MZ_RECOMPUTE_FULL && !resent;
    const int32_t l = in.layer;
    step_take(t, BUFFER_INPUT, l, z->input * t->tokens);
    step_take(t, BUFFER_LISTS, l, lists_of(s, in.work));
    step_take(t, BUFFER_REPLICAS, l, in.work->hosted * z->replica_weights);
    rows_to_experts(t, in);
    step_take(t, BUFFER_OUTPUTS, l, in.work->rows * z->row);
    if (!stay)
        gone(t, passing, sizeof passing / sizeof *passing, l);
    step_take(t, BUFFER_COMBINED, l, in.work->packed * z->row);
    step_give(t, BUFFER_OUTPUTS, l);
    step_take(t, BUFFER_NORMS, l,
              in.call->lossy ? in.work->pairs * s->traits.score_combine_bytes : 0);
    step_take_and_give(t, BUFFER_OUTPUT, l, z->input * t->tokens);
    if (!stay || !s->traits.router_gradient_kept)
        step_give(t, BUFFER_COMBINED, l);
}

/* Kept rows of what was saved, side by side. */
static int64_t gathered(const mz_step *s, layer_call in) {
    const step_rank_work *w = in.work;
    const int64_t kept = w->back_rows - w->again_rows;
    return in.call->lossy && !s->traits.resend && kept < w->rows
               ? kept * (s->sizes.row + s->sizes.gate_up + s->sizes.act)
               : 0;
}

static void backward_rows(rank_timeline *t, layer_call in) {
    static const buffer done[] = {BUFFER_ROWS_AGAIN, BUFFER_UP_AGAIN,     BUFFER_KEPT,
                                  BUFFER_ACT_BACK,   BUFFER_GATE_UP_BACK, BUFFER_BACK_ROWS,
                                  BUFFER_ROWS,       BUFFER_GATE_UP,      BUFFER_ACT};
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const step_rank_work *w = in.work;
    const int32_t l = in.layer;
    step_take(t, BUFFER_BACK_SEND, l, (w->back_packed + w->again_packed) * z->row);
    step_take(t, BUFFER_ROWS_AGAIN, l, w->again_rows * z->row);
    step_take(t, BUFFER_BACK_ROWS, l, w->back_rows * z->row);
    step_give(t, BUFFER_BACK_SEND, l);
    step_take(t, BUFFER_UP_AGAIN, l, w->again_rows * (z->gate_up + z->act));
    step_take(t, BUFFER_KEPT, l, gathered(s, in));
    step_take(t, BUFFER_ACT_BACK, l, w->back_rows * z->act);
    step_take(t, BUFFER_GATE_UP_BACK, l, w->back_rows * z->gate_up);
    step_take(t, BUFFER_INPUT_BACK, l, w->back_rows * z->row);
    gone(t, done, sizeof done / sizeof *done, l);
    step_take(t, BUFFER_COMBINED_BACK, l, w->back_packed * z->row);
    step_give(t, BUFFER_INPUT_BACK, l);
    step_take(t, BUFFER_ROUTER_BACK, l,
              in.call->lossy && !s->traits.router_gradient_kept
                  ? w->back_packed * (int64_t)PAIR_NUMBER_BYTES
                  : 0);
}

static void backward_call(rank_timeline *t, layer_call in) {
    static const buffer done[] = {
        BUFFER_COMBINED_BACK, BUFFER_ROUTER_BACK, BUFFER_SELECTION,         BUFFER_NORMS,
        BUFFER_COMBINED,      BUFFER_GRADIENT,    BUFFER_REPLICA_GRADIENTS, BUFFER_REPLICAS,
        BUFFER_LISTS,         BUFFER_INPUT};
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const int32_t l = in.layer;
    step_take(t, BUFFER_GRADIENT, l, 2 * z->input * t->tokens);
    if (s->options.recompute == MZ_RECOMPUTE_FULL && !(in.call->lossy && s->traits.resend))
        rows_to_experts(t, in);
    if (in.call->lossy)
        step_take(t, BUFFER_SELECTION, l, in.work->pairs * SELECTION_BYTES);
    step_take(t, BUFFER_REPLICA_GRADIENTS, l, in.work->hosted * z->replica_gradients);
    backward_rows(t, in);
    gone(t, done, sizeof done / sizeof *done, l);
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
    step_take_and_give(t, BUFFER_UPDATE, s->layers, s->sizes.temporaries);
}
