/* What every rank allocates in one step, in program order.
 *
 * Token buffers are all that grows with pairs: send buffers, received rows, gate/up, activations,
 * expert outputs, and their gradients. Per pair of H and I (balancing-systems section 2): forward
 * x 2H, gate and up 4I, activation 2I, output 2H; backward dY 2H, d(activation) 2I, d(gate, up) 4I,
 * dX 2H, and where x is re-sent x 2H, gate and up 4I, activation 2I once more. */
#include "sim/step/inside.h"

#include <stdio.h>
#include <string.h>

typedef struct rank_timeline {
    const mz_step *s;
    mz_memory memory;
    int32_t rank, micro_batch;
    int64_t tokens;
    mz_code code;
    mz_err *err;
} rank_timeline;

static void take(rank_timeline *t, mz_memcat category, int64_t bytes, const char *label,
                 int32_t layer) {
    if (t->code == MZ_OK && bytes > 0)
        t->code = mz_memory_take(&t->memory, category, bytes, -1, label, layer, t->err);
}

static void give(rank_timeline *t, mz_memcat category, int64_t bytes) {
    if (t->code == MZ_OK && bytes > 0)
        t->code = mz_memory_give(&t->memory, category, bytes, -1, t->err);
}

static bool selective(const mz_step *s) {
    return s->options.recompute == MZ_RECOMPUTE_SELECTIVE;
}

static bool resent(const mz_step *s, const step_call *call) {
    return call->lossy && s->traits.resend;
}

/* ---- what stays from forward to backward
 * --------------------------------------------------------- */

static int64_t ffn_per_token(const mz_step *s, int32_t layer) {
    return s->model->is_moe[layer] ? s->sizes.router + s->sizes.shared : s->sizes.dense;
}

int64_t step_saved_per_token(const mz_step *s, int32_t layer) {
    const step_sizes *z = &s->sizes;
    if (s->options.recompute == MZ_RECOMPUTE_FULL)
        return z->input;
    return z->input + z->attention + ffn_per_token(s, layer);
}

int64_t step_saved_per_pair(const mz_step *s) {
    const step_sizes *z = &s->sizes;
    if (s->options.recompute == MZ_RECOMPUTE_FULL)
        return 0;
    return z->row + z->gate_up + (selective(s) ? 0 : z->act);
}

int64_t step_saved_of_call(const mz_step *s, const step_call *call, const step_rank_work *work) {
    const step_sizes *z = &s->sizes;
    int64_t bytes = work->hosted * z->replica_slot;
    if (!resent(s, call))
        bytes += work->rows * step_saved_per_pair(s);
    if (s->traits.router_gradient_kept && s->options.recompute != MZ_RECOMPUTE_FULL)
        bytes += work->packed * z->row;
    return bytes;
}

int64_t step_back_bytes_per_pair(const mz_step *s, bool again) {
    const step_sizes *z = &s->sizes;
    const int64_t gradients = z->row + z->act + z->gate_up + z->row;
    return gradients + (again ? z->row + z->gate_up + z->act : selective(s) ? z->act : 0);
}

/* ---- one layer
 * ----------------------------------------------------------------------------------- */

/* Rows from the layer's input to the combined rows; what backward needs stays, unless `keep` is
 * false (full recomputation, or the source sends x again). */
static void pairs_forward(rank_timeline *t, const step_call *call, const step_rank_work *w,
                          int32_t layer, bool keep) {
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const bool stay = keep && !resent(s, call), act_stays = stay && !selective(s);
    const int64_t sent = w->packed * z->row, out = w->rows * z->row;
    take(t, MZ_MEM_TOKEN_BUFFERS, sent, "layer %d dispatch send buffer", layer);
    take(t, MZ_MEM_TOKEN_BUFFERS, w->rows * z->row, "layer %d received rows", layer);
    give(t, MZ_MEM_TOKEN_BUFFERS, sent);
    take(t, MZ_MEM_TOKEN_BUFFERS, w->rows * z->gate_up, "layer %d gate and up", layer);
    take(t, MZ_MEM_TOKEN_BUFFERS, w->rows * z->act, "layer %d expert activations", layer);
    take(t, MZ_MEM_TOKEN_BUFFERS, out, "layer %d expert outputs", layer);
    give(t, MZ_MEM_TOKEN_BUFFERS, act_stays ? 0 : w->rows * z->act);
    give(t, MZ_MEM_TOKEN_BUFFERS, stay ? 0 : w->rows * z->gate_up);
    give(t, MZ_MEM_TOKEN_BUFFERS, stay ? 0 : w->rows * z->row);
    take(t, MZ_MEM_TOKEN_BUFFERS, sent, "layer %d combined rows", layer);
    give(t, MZ_MEM_TOKEN_BUFFERS, out);
    give(t, MZ_MEM_TOKEN_BUFFERS, keep && s->traits.router_gradient_kept ? 0 : sent);
}

static void pairs_backward(rank_timeline *t, const step_call *call, const step_rank_work *w,
                           int32_t layer, bool kept) {
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const int64_t sent = (w->back_packed + w->again_packed) * z->row;
    const int64_t row = w->back_rows * z->row, act = w->back_rows * z->act;
    const int64_t again_row = w->again_rows * z->row;
    const int64_t again = w->again_rows * (z->gate_up + z->act);
    const int64_t act_again = selective(s) ? (w->back_rows - w->again_rows) * z->act : 0;
    take(t, MZ_MEM_TOKEN_BUFFERS, sent, "layer %d backward send buffer", layer);
    take(t, MZ_MEM_TOKEN_BUFFERS, again_row, "layer %d rows received again", layer);
    take(t, MZ_MEM_TOKEN_BUFFERS, row, "layer %d received gradient rows", layer);
    give(t, MZ_MEM_TOKEN_BUFFERS, sent);
    take(t, MZ_MEM_TOKEN_BUFFERS, again, "layer %d recomputed gate, up and activations", layer);
    take(t, MZ_MEM_TOKEN_BUFFERS, act_again, "layer %d recomputed activations", layer);
    take(t, MZ_MEM_TOKEN_BUFFERS, act, "layer %d activation gradients", layer);
    take(t, MZ_MEM_TOKEN_BUFFERS, w->back_rows * z->gate_up, "layer %d gate and up gradients",
         layer);
    take(t, MZ_MEM_TOKEN_BUFFERS, row, "layer %d input gradients of experts", layer);
    give(t, MZ_MEM_TOKEN_BUFFERS, again_row);
    give(t, MZ_MEM_TOKEN_BUFFERS, again);
    give(t, MZ_MEM_TOKEN_BUFFERS, act_again);
    give(t, MZ_MEM_TOKEN_BUFFERS, act);
    give(t, MZ_MEM_TOKEN_BUFFERS, w->back_rows * z->gate_up);
    give(t, MZ_MEM_TOKEN_BUFFERS, row);
    if (kept && !resent(s, call)) {
        give(t, MZ_MEM_TOKEN_BUFFERS, w->rows * z->row);
        give(t, MZ_MEM_TOKEN_BUFFERS, w->rows * z->gate_up);
        give(t, MZ_MEM_TOKEN_BUFFERS, selective(s) ? 0 : w->rows * z->act);
    }
    take(t, MZ_MEM_TOKEN_BUFFERS, w->back_packed * z->row, "layer %d combined input gradients",
         layer);
    give(t, MZ_MEM_TOKEN_BUFFERS, row);
    give(t, MZ_MEM_TOKEN_BUFFERS, w->back_packed * z->row);
    if (kept && s->traits.router_gradient_kept)
        give(t, MZ_MEM_TOKEN_BUFFERS, w->packed * z->row);
}

typedef struct layer_call {
    const step_call *call; /* NULL: a dense layer */
    const step_rank_work *work;
} layer_call;

static layer_call call_of(const rank_timeline *t, int32_t layer, int32_t moe) {
    const mz_step *s = t->s;
    if (!s->model->is_moe[layer])
        return (layer_call){NULL, NULL};
    return (layer_call){step_call_at(s, t->micro_batch, moe, t->rank / s->ep),
                        step_work_at(s, t->micro_batch, moe) + t->rank};
}

static void layer_forward(rank_timeline *t, int32_t layer, layer_call in, bool keep) {
    const step_sizes *z = &t->s->sizes;
    take(t, MZ_MEM_ACTIVATIONS, z->input * t->tokens, "layer %d input", layer);
    take(t, MZ_MEM_ACTIVATIONS, z->attention * t->tokens, "layer %d attention activations", layer);
    take(t, MZ_MEM_ACTIVATIONS, ffn_per_token(t->s, layer) * t->tokens,
         in.call ? "layer %d router and shared expert activations" : "layer %d dense activations",
         layer);
    if (in.call)
        pairs_forward(t, in.call, in.work, layer, keep);
}

/* ZeRO 3: full weights of a layer; the experts' too where copies share them. */
static int64_t gathered(const mz_step *s, int32_t layer) {
    if (s->options.zero < 3 || layer < 0 || layer > s->layers || s->ranks == 1)
        return 0;
    return s->sizes.dense_layer[layer] + (s->groups > 1 ? s->sizes.expert_layer[layer] : 0);
}

/* ZeRO 2, 3: the layer's full gradient before it is scattered. */
static int64_t unscattered(const mz_step *s, int32_t layer) {
    if (s->options.zero < 2 || s->ranks == 1)
        return 0;
    return s->sizes.dense_layer[layer] + (s->groups > 1 ? s->sizes.expert_layer[layer] : 0);
}

/* The layer after `layer` in the direction of travel is gathered while it runs. */
static void gather(rank_timeline *t, int32_t layer) {
    take(t, MZ_MEM_WEIGHTS, gathered(t->s, layer), "layer %d gathered weights", layer);
}

static void forward(rank_timeline *t) {
    const mz_step *s = t->s;
    const bool full = s->options.recompute == MZ_RECOMPUTE_FULL;
    int32_t moe = 0;
    gather(t, s->layers);
    gather(t, 0);
    for (int32_t l = 0; l < s->layers; l++) {
        const layer_call in = call_of(t, l, moe);
        if (l + 1 < s->layers)
            gather(t, l + 1);
        if (in.call)
            take(t, MZ_MEM_REPLICAS, in.work->hosted * s->sizes.replica_slot, "layer %d replicas",
                 l);
        layer_forward(t, l, in, !full);
        if (full) {
            give(t, MZ_MEM_ACTIVATIONS, s->sizes.attention * t->tokens);
            give(t, MZ_MEM_ACTIVATIONS, ffn_per_token(s, l) * t->tokens);
        }
        give(t, MZ_MEM_WEIGHTS, gathered(s, l));
        moe += s->model->is_moe[l];
    }
    take(t, MZ_MEM_ACTIVATIONS, s->sizes.logits * t->tokens, "logits", -1);
    take(t, MZ_MEM_TEMPORARIES, s->sizes.loss_work * t->tokens, "fp32 logits of the loss", -1);
    give(t, MZ_MEM_TEMPORARIES, s->sizes.loss_work * t->tokens);
    give(t, MZ_MEM_ACTIVATIONS, s->sizes.logits * t->tokens);
    give(t, MZ_MEM_WEIGHTS, gathered(s, s->layers));
}

/* Full recomputation brings the layer's activations back; routed experts only where x is not sent
 * again anyway. */
static void recompute(rank_timeline *t, int32_t layer, layer_call in) {
    const mz_step *s = t->s;
    layer_call again = in;
    if (in.call && resent(s, in.call))
        again.call = NULL;
    take(t, MZ_MEM_ACTIVATIONS, s->sizes.attention * t->tokens, "layer %d attention activations",
         layer);
    take(t, MZ_MEM_ACTIVATIONS, ffn_per_token(s, layer) * t->tokens,
         "layer %d recomputed activations", layer);
    if (again.call)
        pairs_forward(t, in.call, in.work, layer, true);
}

static void layer_backward(rank_timeline *t, int32_t layer, layer_call in) {
    const mz_step *s = t->s;
    const step_sizes *z = &s->sizes;
    const bool full = s->options.recompute == MZ_RECOMPUTE_FULL;
    const int64_t work = in.call ? z->shared_work : z->dense_work;
    take(t, MZ_MEM_TEMPORARIES, unscattered(s, layer), "layer %d gradients to scatter", layer);
    if (full)
        recompute(t, layer, in);
    if (in.call)
        pairs_backward(t, in.call, in.work, layer, !full || !resent(s, in.call));
    take(t, MZ_MEM_TEMPORARIES, work * t->tokens, "layer %d feed-forward gradients", layer);
    give(t, MZ_MEM_TEMPORARIES, work * t->tokens);
    give(t, MZ_MEM_ACTIVATIONS, ffn_per_token(s, layer) * t->tokens);
    take(t, MZ_MEM_TEMPORARIES, z->attention_work * t->tokens, "layer %d attention gradients",
         layer);
    give(t, MZ_MEM_TEMPORARIES, z->attention_work * t->tokens);
    give(t, MZ_MEM_ACTIVATIONS, z->attention * t->tokens);
    give(t, MZ_MEM_ACTIVATIONS, z->input * t->tokens);
    if (in.call)
        give(t, MZ_MEM_REPLICAS, in.work->hosted * z->replica_slot);
    give(t, MZ_MEM_TEMPORARIES, unscattered(s, layer));
}

static void backward(rank_timeline *t) {
    const mz_step *s = t->s;
    int32_t moe = s->moe - 1;
    take(t, MZ_MEM_ACTIVATIONS, 2 * s->sizes.input * t->tokens, "hidden gradients", -1);
    gather(t, s->layers - 1);
    for (int32_t l = s->layers - 1; l >= 0; l--) {
        if (l > 0)
            gather(t, l - 1);
        layer_backward(t, l, call_of(t, l, moe));
        give(t, MZ_MEM_WEIGHTS, gathered(s, l));
        moe -= s->model->is_moe[l];
    }
    take(t, MZ_MEM_TEMPORARIES, unscattered(s, s->layers), "embedding gradients to scatter", -1);
    give(t, MZ_MEM_TEMPORARIES, unscattered(s, s->layers));
    give(t, MZ_MEM_ACTIVATIONS, 2 * s->sizes.input * t->tokens);
}

static void resident(rank_timeline *t) {
    const step_sizes *z = &t->s->sizes;
    take(t, MZ_MEM_CONTEXT, z->context, "device context", -1);
    take(t, MZ_MEM_COMMUNICATION, z->communication, "communicators", -1);
    take(t, MZ_MEM_WORKSPACE, z->workspace, "library workspace", -1);
    take(t, MZ_MEM_WEIGHTS, z->weights, "weights", -1);
    take(t, MZ_MEM_GRADIENTS, z->gradients, "gradients", -1);
    take(t, MZ_MEM_OPTIMIZER_STATE, z->optimizer, "optimizer state", -1);
    take(t, MZ_MEM_REPLICAS, z->replicas, "replica slots", -1);
}

static mz_code rank_step(rank_timeline *t) {
    const mz_step *s = t->s;
    resident(t);
    const int64_t level = t->memory.total;
    for (int32_t b = 0; b < s->micro_batches; b++) {
        t->micro_batch = b;
        t->tokens = s->tokens[(int64_t)b * s->ranks + t->rank];
        forward(t);
        backward(t);
    }
    take(t, MZ_MEM_TEMPORARIES, s->sizes.temporaries, "temporaries of the optimizer's update", -1);
    give(t, MZ_MEM_TEMPORARIES, s->sizes.temporaries);
    if (t->code == MZ_OK && t->memory.total != level)
        return mz_fail(t->err, MZ_EINTERNAL,
                       "rank %d holds %lld bytes after the step, %lld before it", t->rank,
                       (long long)t->memory.total, (long long)level);
    return t->code;
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

mz_code step_memory(mz_step *s, mz_step_outcome *o, mz_err *err) {
    o->fits = true;
    o->peak_bytes = -1;
    o->resident_bytes = s->sizes.resident;
    for (int32_t r = 0; r < s->ranks; r++) {
        rank_timeline t = {.s = s, .rank = r, .err = err};
        mz_memory_init(&t.memory, step_capacity(s), s->options.allocator, false);
        mz_code code = rank_step(&t);
        mz_memory_free_events(&t.memory);
        if (code != MZ_OK)
            return code;
        s->rank_peak[r] = t.memory.peak;
        if (t.memory.overflowed && o->fits) {
            o->fits = false;
            describe_overflow(s, &t.memory, r, o);
        }
        if (t.memory.peak <= o->peak_bytes)
            continue;
        o->peak_bytes = t.memory.peak;
        o->worst_rank = r;
        memcpy(o->at_peak, t.memory.at_peak, sizeof o->at_peak);
        mz_memory_label(t.memory.peak_label, t.memory.peak_layer, o->peak_label,
                        sizeof o->peak_label);
    }
    o->rank_peak_bytes = s->rank_peak;
    return MZ_OK;
}
