/* What every rank allocates in one step, in program order.
 *
 * Token buffers are all that grows with pairs: send buffers, received rows, gate/up, activations,
 * expert outputs, and their gradients. Per pair of H and I (balancing-systems section 2): forward
 * x 2H, gate and up 4I, activation 2I, output 2H; backward dY 2H, d(activation) 2I, d(gate, up) 4I,
 * dX 2H, and where x is re-sent x 2H, gate and up 4I, activation 2I once more. Where a quota binds,
 * a source keeps 4 B per pair for ||h||^2 if its score has that, and in backward its score and a
 * place in the list of kept pairs.
 *
 * Gradients are reduced where they lie with ZeRO 0 and 1 (their buffers are the buckets); with 2
 * and 3 a layer's full gradient is the bucket that is scattered. */
#include "sim/step/timeline.h"

#include <stdio.h>
#include <string.h>

static const struct {
    mz_memcat category;
    const char *label;
} about[BUFFERS] = {
    [BUFFER_INPUT] = {MZ_MEM_ACTIVATIONS, "layer %d input"},
    [BUFFER_ATTENTION] = {MZ_MEM_ACTIVATIONS, "layer %d attention activations"},
    [BUFFER_SCORES] = {MZ_MEM_ACTIVATIONS, "layer %d attention probabilities"},
    [BUFFER_SCORES_WORK] = {MZ_MEM_TEMPORARIES, "layer %d attention scores"},
    [BUFFER_DENSE] = {MZ_MEM_ACTIVATIONS, "layer %d dense activations"},
    [BUFFER_SHARED] = {MZ_MEM_ACTIVATIONS, "layer %d router and shared expert activations"},
    [BUFFER_REPLICAS] = {MZ_MEM_REPLICAS, "layer %d replicas"},
    [BUFFER_REPLICA_GRADIENTS] = {MZ_MEM_REPLICAS, "layer %d replica gradients"},
    [BUFFER_SLOTS] = {MZ_MEM_REPLICAS, "layer %d restored expert slots"},
    [BUFFER_SLOT_GRADIENTS] = {MZ_MEM_REPLICAS, "layer %d gradients of restored slots"},
    [BUFFER_GATHERED] = {MZ_MEM_WEIGHTS, "layer %d gathered weights"},
    [BUFFER_BUCKET] = {MZ_MEM_TEMPORARIES, "layer %d gradients to scatter"},
    [BUFFER_SEND] = {MZ_MEM_TOKEN_BUFFERS, "layer %d dispatch send buffer"},
    [BUFFER_ROWS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d received rows"},
    [BUFFER_GATE_UP] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate and up"},
    [BUFFER_ACT] = {MZ_MEM_TOKEN_BUFFERS, "layer %d expert activations"},
    [BUFFER_OUTPUTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d expert outputs"},
    [BUFFER_COMBINED] = {MZ_MEM_TOKEN_BUFFERS, "layer %d combined rows"},
    [BUFFER_NORMS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d norms of pairs"},
    [BUFFER_SELECTION] = {MZ_MEM_TOKEN_BUFFERS, "layer %d scores and kept pairs"},
    [BUFFER_BACK_SEND] = {MZ_MEM_TOKEN_BUFFERS, "layer %d backward send buffer"},
    [BUFFER_ROWS_AGAIN] = {MZ_MEM_TOKEN_BUFFERS, "layer %d rows received again"},
    [BUFFER_BACK_ROWS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d received gradient rows"},
    [BUFFER_UP_AGAIN] = {MZ_MEM_TOKEN_BUFFERS, "layer %d recomputed gate, up and activations"},
    [BUFFER_ACT_AGAIN] = {MZ_MEM_TOKEN_BUFFERS, "layer %d recomputed activations"},
    [BUFFER_ACT_BACK] = {MZ_MEM_TOKEN_BUFFERS, "layer %d activation gradients"},
    [BUFFER_GATE_UP_BACK] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate and up gradients"},
    [BUFFER_INPUT_BACK] = {MZ_MEM_TOKEN_BUFFERS, "layer %d input gradients of experts"},
    [BUFFER_COMBINED_BACK] = {MZ_MEM_TOKEN_BUFFERS, "layer %d combined input gradients"},
    [BUFFER_FFN_BACK] = {MZ_MEM_TEMPORARIES, "layer %d feed-forward gradients"},
    [BUFFER_ATTENTION_BACK] = {MZ_MEM_TEMPORARIES, "layer %d attention gradients"},
    [BUFFER_IDS] = {MZ_MEM_ACTIVATIONS, "token ids and targets"},
    [BUFFER_NORM] = {MZ_MEM_TEMPORARIES, "final norm"},
    [BUFFER_LOGITS] = {MZ_MEM_ACTIVATIONS, "logits"},
    [BUFFER_KEPT_LOGITS] = {MZ_MEM_ACTIVATIONS, "logits of the micro-batch before"},
    [BUFFER_LOSS] = {MZ_MEM_TEMPORARIES, "fp32 logits of the loss"},
    [BUFFER_HIDDEN] = {MZ_MEM_ACTIVATIONS, "hidden gradients"},
    [BUFFER_UPDATE] = {MZ_MEM_TEMPORARIES, "temporaries of the optimizer's update"},
    [BUFFER_EXPERTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d experts of pairs"},
    [BUFFER_PAIR_WEIGHTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate weights"},
    [BUFFER_TOKENS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d tokens of pairs"},
    [BUFFER_LIST] = {MZ_MEM_TOKEN_BUFFERS, "layer %d pairs by expert"},
    [BUFFER_COUNTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d counts"},
    [BUFFER_ROW_PAIRS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d pairs of rows"},
    [BUFFER_PLACES] = {MZ_MEM_TOKEN_BUFFERS, "layer %d rows of pairs"},
    [BUFFER_ROW_NORMS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d norms of rows"},
    [BUFFER_SENT_NORMS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d norms of sent rows"},
    [BUFFER_OUTPUT] = {MZ_MEM_ACTIVATIONS, "layer %d output"},
    [BUFFER_GRADIENT] = {MZ_MEM_ACTIVATIONS, "layer %d gradients of output and input"},
    [BUFFER_GRADIENT_NORMS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d norms of gradients"},
    [BUFFER_SAVED] = {MZ_MEM_TOKEN_BUFFERS, "layer %d places of saved rows to send"},
    [BUFFER_SAVED_ROWS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d places of saved rows"},
    [BUFFER_DOTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate gradients of rows"},
    [BUFFER_SENT_DOTS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d gate gradients"},
    [BUFFER_GROUPS] = {MZ_MEM_TOKEN_BUFFERS, "layer %d rows by expert"},
    [BUFFER_ARRIVED] = {MZ_MEM_TEMPORARIES, "layer %d experts that arrive"},
    [BUFFER_REDUCED] = {MZ_MEM_TEMPORARIES, "layer %d received gradients"},
};

/* Ids and targets are 64-bit. */
enum { ID_BYTES = 16 };

static mz_block *held(const rank_timeline *t, buffer b, int32_t layer) {
    return t->s->held + (int64_t)layer * BUFFERS + b;
}

void step_take(rank_timeline *t, buffer b, int32_t layer, int64_t bytes) {
    if (t->code == MZ_OK && bytes > 0)
        t->code = mz_memory_take(t->memory, about[b].category, bytes, -1, about[b].label, layer,
                                 held(t, b, layer), t->err);
}

void step_give(rank_timeline *t, buffer b, int32_t layer) {
    if (t->code == MZ_OK)
        t->code = mz_memory_give(t->memory, held(t, b, layer), -1, t->err);
}

void step_take_and_give(rank_timeline *t, buffer b, int32_t layer, int64_t bytes) {
    step_take(t, b, layer, bytes);
    step_give(t, b, layer);
}

mz_code step_timeline_init(mz_step *s, mz_err *err) {
    s->held = MZ_NEW(&s->arena, mz_block, (int64_t)(s->layers + 1) * BUFFERS);
    s->rank_replicas = MZ_NEW(&s->arena, int64_t, s->ranks);
    s->rank_buffers = MZ_NEW(&s->arena, int64_t, s->ranks);
    s->rank_memory = MZ_NEW(&s->arena, int64_t, (int64_t)s->ranks * MZ_MEM_CATEGORIES);
    return s->held && s->rank_replicas && s->rank_buffers && s->rank_memory
               ? MZ_OK
               : mz_fail_nomem(err, "the blocks of a timeline");
}

static bool selective(const mz_step *s) {
    return s->options.recompute == MZ_RECOMPUTE_SELECTIVE;
}

static bool recomputed(const mz_step *s) {
    return s->options.recompute == MZ_RECOMPUTE_FULL;
}

static bool resent(const mz_step *s, const step_call *call) {
    return call->lossy && s->traits.resend;
}

/* ---- what stays from forward to backward -------------------------------------------------------
 */

static int64_t ffn_per_token(const mz_step *s, int32_t layer) {
    return s->model->is_moe[layer] ? s->sizes.router + s->sizes.shared : s->sizes.dense;
}

int64_t step_layer_tokens(const mz_step *s, int32_t layer, int64_t tokens) {
    const step_sizes *z = &s->sizes;
    return (z->input + z->attention + ffn_per_token(s, layer)) * tokens;
}

/* Causal scores of a sequence of n tokens take n * n * heads * (head_dim + v_head_dim) FLOPs in a
 * layer without a window, and have n * n pairs in memory, masked or not. */
static double score_pairs(const mz_step *s, int64_t row) {
    const mz_model *m = s->model;
    if (s->options.attention == MZ_ATTENTION_FLASH)
        return 0;
    if (m->is_sliding[s->full_layer])
        return (double)s->tokens[row] * (double)s->sequence;
    return s->score_flops[2 * row] / ((double)m->heads * (double)(m->head_dim + m->v_head_dim));
}

int64_t step_score_pairs(const mz_step *s, int32_t micro_batch, int32_t rank) {
    return (int64_t)score_pairs(s, (int64_t)micro_batch * s->ranks + rank);
}

double step_most_token_bytes(const mz_step *s, int64_t row) {
    const step_sizes *z = &s->sizes;
    const int64_t kept = z->input + z->attention + z->dense + z->router + z->shared;
    const int64_t work = z->attention_work + z->dense_work + z->shared_work + z->logits * 2 +
                         z->loss_work + 4 * z->input + ID_BYTES;
    return (double)s->tokens[row] * ((double)s->layers * (double)kept + (double)work) +
           score_pairs(s, row) *
               ((double)s->layers * (double)z->scores + (double)(z->scores_work + z->scores_back));
}

double step_most_pair_bytes(const mz_step *s, int64_t pairs) {
    const step_sizes *z = &s->sizes;
    return (double)pairs * (double)(s->moe + 4) * (double)(2 * (z->row + z->gate_up) + z->act);
}

/* Ids of the whole step; logits that the training loop still holds. */
int64_t step_held_all_step(const mz_step *s, int32_t micro_batch, int32_t rank) {
    int64_t bytes = 0;
    for (int32_t b = 0; b < s->micro_batches; b++)
        bytes += ID_BYTES * s->tokens[(int64_t)b * s->ranks + rank];
    if (s->options.keep_logits)
        bytes += s->sizes.logits * s->tokens[(int64_t)micro_batch * s->ranks + rank];
    return bytes;
}

int64_t step_saved_per_pair(const mz_step *s) {
    const step_sizes *z = &s->sizes;
    if (recomputed(s))
        return 0;
    return z->row + z->gate_up + (selective(s) ? 0 : z->act);
}

int64_t step_selection_per_pair(const mz_step *s) {
    return s->traits.score_combine_bytes + SELECTION_BYTES;
}

static int64_t norms_of_call(const mz_step *s, const step_call *call, const step_rank_work *work) {
    return call->lossy ? work->pairs * s->traits.score_combine_bytes : 0;
}

int64_t step_saved_of_call(const mz_step *s, const step_call *call, const step_rank_work *work) {
    const step_sizes *z = &s->sizes;
    int64_t bytes = work->hosted * z->replica_weights + norms_of_call(s, call, work);
    if (!resent(s, call))
        bytes += work->rows * step_saved_per_pair(s);
    if (s->traits.router_gradient_kept && !recomputed(s))
        bytes += work->packed * z->row;
    return bytes;
}

/* ---- pairs of one layer ------------------------------------------------------------------------
 */

layer_call step_layer_call(const rank_timeline *t, int32_t layer, int32_t moe) {
    const mz_step *s = t->s;
    if (!s->model->is_moe[layer])
        return (layer_call){.layer = layer, .moe = moe};
    return (layer_call){.call = step_call_at(s, t->micro_batch, moe, t->rank / s->ep),
                        .work = step_work_at(s, t->micro_batch, moe) + t->rank,
                        .layer = layer,
                        .moe = moe};
}

/* Rows from the layer's input to the combined rows; what backward needs stays, unless `keep` is
 * false (full recomputation) or the source sends x again. */
static void pairs_forward(rank_timeline *t, layer_call in, bool keep) {
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const int64_t rows = in.work->rows, sent = in.work->packed * z->row;
    const bool stay = keep && !resent(s, in.call);
    const int32_t l = in.layer;
    step_take(t, BUFFER_SEND, l, sent);
    step_take(t, BUFFER_ROWS, l, rows * z->row);
    step_give(t, BUFFER_SEND, l);
    step_take(t, BUFFER_GATE_UP, l, rows * z->gate_up);
    step_take(t, BUFFER_ACT, l, rows * z->act);
    step_take(t, BUFFER_OUTPUTS, l, rows * z->row);
    if (!stay || selective(s))
        step_give(t, BUFFER_ACT, l);
    if (!stay) {
        step_give(t, BUFFER_GATE_UP, l);
        step_give(t, BUFFER_ROWS, l);
    }
    step_take(t, BUFFER_COMBINED, l, sent);
    step_give(t, BUFFER_OUTPUTS, l);
    if (!keep || !s->traits.router_gradient_kept)
        step_give(t, BUFFER_COMBINED, l);
}

static void pairs_backward(rank_timeline *t, layer_call in) {
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const step_rank_work *w = in.work;
    const int32_t l = in.layer;
    if (in.call->lossy)
        step_take(t, BUFFER_SELECTION, l, w->pairs * SELECTION_BYTES);
    step_take(t, BUFFER_BACK_SEND, l, (w->back_packed + w->again_packed) * z->row);
    step_take(t, BUFFER_ROWS_AGAIN, l, w->again_rows * z->row);
    step_take(t, BUFFER_BACK_ROWS, l, w->back_rows * z->row);
    step_give(t, BUFFER_BACK_SEND, l);
    step_take(t, BUFFER_UP_AGAIN, l, w->again_rows * (z->gate_up + z->act));
    if (selective(s))
        step_take(t, BUFFER_ACT_AGAIN, l, (w->back_rows - w->again_rows) * z->act);
    step_take(t, BUFFER_ACT_BACK, l, w->back_rows * z->act);
    step_take(t, BUFFER_GATE_UP_BACK, l, w->back_rows * z->gate_up);
    step_take(t, BUFFER_INPUT_BACK, l, w->back_rows * z->row);
    static const buffer done[] = {BUFFER_ROWS_AGAIN, BUFFER_UP_AGAIN,     BUFFER_ACT_AGAIN,
                                  BUFFER_ACT_BACK,   BUFFER_GATE_UP_BACK, BUFFER_BACK_ROWS,
                                  BUFFER_ROWS,       BUFFER_GATE_UP,      BUFFER_ACT};
    for (size_t i = 0; i < sizeof done / sizeof *done; i++)
        step_give(t, done[i], l);
    step_take(t, BUFFER_COMBINED_BACK, l, w->back_packed * z->row);
    step_give(t, BUFFER_INPUT_BACK, l);
    step_give(t, BUFFER_COMBINED_BACK, l);
    step_give(t, BUFFER_SELECTION, l);
    step_give(t, BUFFER_NORMS, l);
    step_give(t, BUFFER_COMBINED, l);
}

/* ---- weights that come and go ------------------------------------------------------------------
 */

/* Bytes of a layer that all ranks hold alike, and of its experts where other groups have copies of
 * them and they are not sharded within the group. */
static int64_t shared_bytes(const mz_step *s, int32_t layer) {
    const bool copies = s->groups > 1 && !s->traits.sharded_weights;
    return s->sizes.dense_layer[layer] + (copies ? s->sizes.expert_layer[layer] : 0);
}

int64_t step_gathered(const mz_step *s, int32_t layer) {
    return s->options.zero < 3 || s->ranks == 1 ? 0 : shared_bytes(s, layer);
}

int64_t step_unscattered(const mz_step *s, int32_t layer) {
    return s->options.zero < 2 || s->ranks == 1 ? 0 : shared_bytes(s, layer);
}

/* The layer after `layer` in the direction of travel is gathered while it runs. */
static void gather(rank_timeline *t, int32_t layer) {
    step_take(t, BUFFER_GATHERED, layer, step_gathered(t->s, layer));
}

/* Slots of this call and of the next ones in the direction of travel. */
static void restore_slots(rank_timeline *t, int32_t moe, int32_t direction) {
    const mz_step *s = t->s;
    for (int32_t i = 0; i <= s->sizes.ahead; i++, moe += direction) {
        if (moe < 0 || moe >= s->moe)
            return;
        const int32_t layer = s->moe_layer[moe];
        if (held(t, BUFFER_SLOTS, layer)->bytes == 0)
            step_take(t, BUFFER_SLOTS, layer, s->sizes.slot_weights);
    }
}

/* ---- one layer ---------------------------------------------------------------------------------
 */

/* Attention's activations, its scores where they are kept, and the router's, the shared experts' or
 * the dense layer's. */
static void token_forward(rank_timeline *t, layer_call in) {
    const step_sizes *z = &t->s->sizes;
    const int32_t l = in.layer;
    step_take(t, BUFFER_ATTENTION, l, z->attention * t->tokens);
    step_take(t, BUFFER_SCORES, l, z->scores * t->score_pairs);
    step_take_and_give(t, BUFFER_SCORES_WORK, l, z->scores_work * t->score_pairs);
    step_take(t, in.call ? BUFFER_SHARED : BUFFER_DENSE, l, ffn_per_token(t->s, l) * t->tokens);
}

static void layer_forward(rank_timeline *t, layer_call in) {
    const mz_step *s = t->s;
    const int32_t l = in.layer;
    if (in.call) {
        restore_slots(t, in.moe, 1);
        step_take(t, BUFFER_REPLICAS, l, in.work->hosted * s->sizes.replica_weights);
    }
    step_take(t, BUFFER_INPUT, l, s->sizes.input * t->tokens);
    token_forward(t, in);
    if (in.call) {
        pairs_forward(t, in, !recomputed(s));
        step_take(t, BUFFER_NORMS, l, norms_of_call(s, in.call, in.work));
    }
    if (recomputed(s)) {
        step_give(t, BUFFER_ATTENTION, l);
        step_give(t, BUFFER_SCORES, l);
        step_give(t, in.call ? BUFFER_SHARED : BUFFER_DENSE, l);
    }
    step_give(t, BUFFER_SLOTS, l);
    step_give(t, BUFFER_GATHERED, l);
}

/* Full recomputation brings the layer's activations back; routed experts only where x is not sent
 * again anyway. */
static void recompute(rank_timeline *t, layer_call in) {
    token_forward(t, in);
    if (in.call && !resent(t->s, in.call))
        pairs_forward(t, in, true);
}

static void layer_backward(rank_timeline *t, layer_call in) {
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const int32_t l = in.layer;
    step_take(t, BUFFER_BUCKET, l, step_unscattered(s, l));
    if (in.call) {
        restore_slots(t, in.moe, -1);
        step_take(t, BUFFER_SLOT_GRADIENTS, l, z->slot_gradients);
        step_take(t, BUFFER_REPLICA_GRADIENTS, l, in.work->hosted * z->replica_gradients);
    }
    if (recomputed(s))
        recompute(t, in);
    if (in.call)
        pairs_backward(t, in);
    step_take_and_give(t, BUFFER_FFN_BACK, l,
                       (in.call ? z->shared_work : z->dense_work) * t->tokens);
    step_give(t, in.call ? BUFFER_SHARED : BUFFER_DENSE, l);
    step_take(t, BUFFER_ATTENTION_BACK, l, z->attention_work * t->tokens);
    step_take_and_give(t, BUFFER_SCORES_WORK, l, z->scores_back * t->score_pairs);
    static const buffer done[] = {
        BUFFER_ATTENTION_BACK, BUFFER_SCORES,  BUFFER_ATTENTION,      BUFFER_INPUT,
        BUFFER_REPLICAS,       BUFFER_SLOTS,   BUFFER_SLOT_GRADIENTS, BUFFER_REPLICA_GRADIENTS,
        BUFFER_BUCKET,         BUFFER_GATHERED};
    for (size_t i = 0; i < sizeof done / sizeof *done; i++)
        step_give(t, done[i], l);
}

/* ---- one step ----------------------------------------------------------------------------------
 */

/* Input and output of the final norm; logits in bf16 and, with their exponentials and gradients in
 * place, in fp32 (Megatron-LM's cross entropy). The logits become those of the micro-batch before
 * when a training loop holds on to them. */
static void loss(rank_timeline *t) {
    const mz_step *s = t->s;
    const int32_t top = s->layers;
    const int64_t tokens = t->tokens, at_once = step_loss_piece(s, tokens);
    step_take(t, BUFFER_NORM, top, 2 * s->sizes.input * tokens);
    step_take(t, BUFFER_LOGITS, top, s->sizes.logits * at_once);
    step_take_and_give(t, BUFFER_LOSS, top, s->sizes.loss_work * at_once);
    step_give(t, BUFFER_NORM, top);
    step_give(t, BUFFER_KEPT_LOGITS, top);
    if (s->options.keep_logits && t->code == MZ_OK) {
        *held(t, BUFFER_KEPT_LOGITS, top) = *held(t, BUFFER_LOGITS, top);
        *held(t, BUFFER_LOGITS, top) = (mz_block){0};
    }
    step_give(t, BUFFER_LOGITS, top);
    step_give(t, BUFFER_GATHERED, top);
}

static void forward(rank_timeline *t) {
    const mz_step *s = t->s;
    int32_t moe = 0;
    gather(t, s->layers);
    gather(t, 0);
    for (int32_t l = 0; l < s->layers; l++) {
        if (l + 1 < s->layers)
            gather(t, l + 1);
        layer_forward(t, step_layer_call(t, l, moe));
        moe += s->model->is_moe[l];
    }
    loss(t);
}

static void backward(rank_timeline *t) {
    const mz_step *s = t->s;
    const int32_t top = s->layers;
    int32_t moe = s->moe - 1;
    step_take(t, BUFFER_HIDDEN, top, 2 * s->sizes.input * t->tokens);
    gather(t, s->layers - 1);
    for (int32_t l = s->layers - 1; l >= 0; l--) {
        if (l > 0)
            gather(t, l - 1);
        layer_backward(t, step_layer_call(t, l, moe));
        moe -= s->model->is_moe[l];
    }
    step_take_and_give(t, BUFFER_BUCKET, top, step_unscattered(s, top));
    step_give(t, BUFFER_HIDDEN, top);
}

static void keep(rank_timeline *t, mz_memcat category, int64_t bytes, const char *label) {
    if (t->code == MZ_OK)
        t->code = mz_memory_take(t->memory, category, bytes, -1, label, -1, NULL, t->err);
}

/* A caching allocator sees every tensor on its own: the experts of a layer, which grouped products
 * want side by side, as one. */
static void resident(rank_timeline *t) {
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const bool each = s->options.allocator == MZ_ALLOCATOR_CACHING;
    int64_t state = z->optimizer; /* that of replicas, where each tensor's own is taken apart */
    keep(t, MZ_MEM_CONTEXT, z->context, "device context");
    keep(t, MZ_MEM_COMMUNICATION, z->communication, "communicators");
    keep(t, MZ_MEM_WORKSPACE, z->workspace, "library workspaces");
    keep(t, MZ_MEM_WEIGHTS, each ? 0 : z->weights, "weights");
    keep(t, MZ_MEM_GRADIENTS, each ? z->buffers : z->gradients, "gradients");
    for (int64_t i = 0; each && i < s->model->tensors; i++) {
        const step_tensor size = step_tensor_of(s, &s->model->tensor[i]);
        keep(t, MZ_MEM_WEIGHTS, size.weights, "weights");
        keep(t, MZ_MEM_GRADIENTS, size.gradients, "gradients");
        keep(t, MZ_MEM_OPTIMIZER_STATE, size.optimizer, "optimizer state");
        state -= size.optimizer;
    }
    keep(t, MZ_MEM_OPTIMIZER_STATE, state, "optimizer state");
    keep(t, MZ_MEM_REPLICAS, z->replicas, "replica slots");
}

void step_start_micro_batch(rank_timeline *t, int32_t micro_batch) {
    t->micro_batch = micro_batch;
    t->tokens = t->s->tokens[(int64_t)micro_batch * t->s->ranks + t->rank];
    t->score_pairs = step_score_pairs(t->s, micro_batch, t->rank);
}

static void whole_step(rank_timeline *t) {
    const mz_step *s = t->s;
    if (step_alone(s)) {
        layers_timeline(t);
        return;
    }
    const int32_t top = s->layers;
    step_start_micro_batch(t, 0);
    const int64_t kept = s->options.keep_logits ? s->sizes.logits * t->tokens : 0;
    step_take(t, BUFFER_IDS, top, step_held_all_step(s, 0, t->rank) - kept);
    step_take(t, BUFFER_KEPT_LOGITS, top, kept);
    for (int32_t b = 0; b < s->micro_batches; b++) {
        step_start_micro_batch(t, b);
        forward(t);
        backward(t);
    }
    step_take_and_give(t, BUFFER_UPDATE, top, s->sizes.temporaries);
    step_give(t, BUFFER_KEPT_LOGITS, top);
    step_give(t, BUFFER_IDS, top);
}

/* Bytes in blocks; what a caching allocator reserves beyond them stays. */
static int64_t in_blocks(const mz_memory *memory) {
    return memory->total - memory->idle;
}

mz_code mz_step_timeline(mz_step *s, int32_t rank, mz_memory *memory, mz_err *err) {
    rank_timeline t = {.s = s, .memory = memory, .rank = rank, .err = err};
    resident(&t);
    const int64_t level = in_blocks(memory);
    whole_step(&t);
    if (t.code == MZ_OK && in_blocks(memory) != level)
        t.code =
            mz_fail(err, MZ_EINTERNAL, "rank %d holds %lld bytes after the step, %lld before it",
                    rank, (long long)in_blocks(memory), (long long)level);
    if (t.code != MZ_OK)
        memset(s->held, 0, sizeof *s->held * (size_t)(s->layers + 1) * BUFFERS);
    return t.code;
}

int64_t step_capacity(const mz_step *s) {
    return (int64_t)(s->cluster->device.memory_bytes / s->cluster->ranks_per_device);
}

/* What would have to shrink, of what this job has not shrunk yet. */
static void remedy(const mz_step *s, mz_memcat category, char *text, size_t size) {
    const mz_step_options *o = &s->options;
    const bool rows = category == MZ_MEM_ACTIVATIONS || category == MZ_MEM_TOKEN_BUFFERS;
    const bool state = category <= MZ_MEM_OPTIMIZER_STATE || rows;
    text[0] = 0;
    const struct {
        bool fits;
        const char *what;
    } choice[] = {
        {category == MZ_MEM_REPLICAS, "fewer slots"},
        {category == MZ_MEM_TEMPORARIES && o->temporaries != MZ_TEMPORARIES_FUSED,
         "--temporaries fused"},
        {rows && o->recompute != MZ_RECOMPUTE_FULL, "--recompute full"},
        {state && o->zero < 3, "a higher --zero"},
        {rows && s->traits.lossy, "a smaller quota"},
        {rows || category == MZ_MEM_TEMPORARIES, "fewer tokens per rank"},
        {category <= MZ_MEM_OPTIMIZER_STATE, "a leaner --optimizer"},
        {category <= MZ_MEM_OPTIMIZER_STATE || category >= MZ_MEM_WORKSPACE, "more GPUs"},
    };
    for (size_t i = 0; i < sizeof choice / sizeof *choice; i++) {
        const size_t used = strlen(text);
        if (choice[i].fits)
            snprintf(text + used, size - used, "%s%s", used ? ", " : "", choice[i].what);
    }
}

static void describe_overflow(const mz_step *s, const mz_memory *m, int32_t rank,
                              mz_step_outcome *o) {
    char label[128], want[32], peak[32], room[32], over[32], try[128];
    mz_memory_label(m->overflow_label, m->overflow_layer, label, sizeof label);
    remedy(s, m->overflow_category, try, sizeof try);
    snprintf(o->oom, sizeof o->oom,
             "%s: %s (%s) on rank %d goes beyond %s; the peak is %s, %s too much; try %s",
             mz_memcat_name(m->overflow_category), label,
             mz_format_bytes((double)m->overflow_bytes, want, sizeof want), rank,
             mz_format_bytes((double)m->capacity, room, sizeof room),
             mz_format_bytes((double)m->peak, peak, sizeof peak),
             mz_format_bytes((double)(m->peak - m->capacity), over, sizeof over), try);
}

static void keep_peak(const mz_memory *m, int32_t rank, mz_step_outcome *o) {
    o->peak_bytes = m->peak;
    o->idle_at_peak = m->idle_at_peak;
    o->worst_rank = rank;
    memcpy(o->at_peak, m->at_peak, sizeof o->at_peak);
    mz_memory_label(m->peak_label, m->peak_layer, o->peak_label, sizeof o->peak_label);
}

mz_code step_memory(mz_step *s, mz_step_outcome *o, mz_err *err) {
    const int32_t ranks = s->options.one_group ? s->ep : s->ranks;
    o->fits = true;
    o->peak_bytes = -1;
    o->resident_bytes = s->sizes.resident;
    for (int32_t r = 0; r < ranks; r++) {
        mz_memory memory;
        mz_memory_init(&memory, step_capacity(s), s->options.allocator, false);
        const mz_code code = mz_step_timeline(s, r, &memory, err);
        mz_memory_free(&memory);
        if (code != MZ_OK)
            return code;
        s->rank_peak[r] = memory.peak;
        memcpy(s->rank_memory + (int64_t)r * MZ_MEM_CATEGORIES, memory.most, sizeof memory.most);
        s->rank_replicas[r] = memory.most[MZ_MEM_REPLICAS];
        s->rank_buffers[r] = memory.most[MZ_MEM_TOKEN_BUFFERS];
        if (memory.overflowed && o->fits) {
            o->fits = false;
            describe_overflow(s, &memory, r, o);
        }
        if (memory.peak > o->peak_bytes)
            keep_peak(&memory, r, o);
    }
    for (int32_t r = ranks; r < s->ranks; r++) {
        s->rank_peak[r] = s->rank_peak[r % s->ep];
        s->rank_replicas[r] = s->rank_replicas[r % s->ep];
        s->rank_buffers[r] = s->rank_buffers[r % s->ep];
        memcpy(s->rank_memory + (int64_t)r * MZ_MEM_CATEGORIES,
               s->rank_memory + (int64_t)(r % s->ep) * MZ_MEM_CATEGORIES,
               sizeof *s->rank_memory * MZ_MEM_CATEGORIES);
    }
    o->rank_peak_bytes = s->rank_peak;
    o->rank_replica_bytes = s->rank_replicas;
    o->rank_token_buffer_bytes = s->rank_buffers;
    o->rank_memory_bytes = s->rank_memory;
    return MZ_OK;
}
