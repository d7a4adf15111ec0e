/* Bytes that a rank holds, from the model's tensors and the settings of the step.
 *
 * Weights and gradients have the tensor's own type (bf16; fp32 where the checkpoint has it so).
 * "Dense" means all that is not a routed expert: every rank holds it, ZeRO shards it over all
 * ranks. A rank's routed experts are shared by one rank of every other group: ZeRO shards them over
 * the groups. ZeRO 1 shards the optimizer state, 2 gradients too, 3 weights too (Rajbhandari et
 * al., 2020). */
#include "sim/step/inside.h"

static int64_t share(int64_t amount, int64_t parts) {
    return (amount + parts - 1) / parts;
}

static bool expert_of(const mz_tensor *t) {
    return t->tier == MZ_TIER_EXPERT;
}

/* Of all experts' copies in a tensor row, those of the fullest rank. */
static int64_t rank_part(const mz_step *s, const mz_tensor *t, int64_t amount) {
    return expert_of(t) ? share(amount, s->model->experts) * s->mains : amount;
}

/* Over how many ranks the optimizer spreads what a rank would otherwise update. */
static int64_t update_parts(const mz_step *s, const mz_tensor *t) {
    if (s->options.zero < 1)
        return 1;
    return expert_of(t) ? s->groups : s->ranks;
}

/* A policy with a sharded optimizer cuts every expert's state over the whole group. */
static bool cut_over_group(const mz_step *s, const mz_tensor *t) {
    return expert_of(t) && (s->traits.sharded_optimizer || s->traits.sharded_weights);
}

static void size_update(const mz_step *s, const mz_tensor *t, step_tensor *size) {
    const bool cut = cut_over_group(s, t);
    const int64_t copies = cut ? 1 : rank_part(s, t, t->count);
    const int64_t parts = update_parts(s, t) * (cut ? s->ep : 1), times = cut ? t->count : 1;
    const mz_update_cost u =
        mz_optimizer_update(s->options.optimizer, t, copies, parts, s->options.temporaries);
    size->optimizer = times * u.state_bytes;
    size->update_bytes = (double)times * u.traffic_bytes;
    size->update_flops = (double)times * u.flops;
    size->update_exchange = (double)times * u.exchange_bytes;
    size->temporaries = u.temporary_bytes;
}

/* Where expert weights are sharded over the group, a rank holds its part of every expert, and ZeRO
 * does not cut them once more: every group restores its slots from its own ranks. */
step_tensor step_tensor_of(const mz_step *s, const mz_tensor *t) {
    const int64_t bytes = t->rows * t->cols * t->count * t->bytes_per_value;
    const bool cut = expert_of(t) && s->traits.sharded_weights;
    const int64_t held = cut ? share(bytes, s->ep) : rank_part(s, t, bytes);
    const int64_t parts = cut ? 1 : expert_of(t) ? s->groups : s->ranks;
    step_tensor size = {.weights = s->options.zero >= 3 ? share(held, parts) : held};
    if (t->trainable)
        size.gradients = s->options.zero >= 2 ? share(held, parts) : held;
    size_update(s, t, &size);
    return size;
}

/* Where the pieces of the tensor's matrices are: without ZeRO a policy's cut ends with the group.
 */
static double *exchange_of(mz_step *s, const mz_tensor *t) {
    step_sizes *z = &s->sizes;
    if (expert_of(t) && !cut_over_group(s, t))
        return &z->exchange_copies;
    return expert_of(t) && s->options.zero < 1 ? &z->exchange_group : &z->exchange_all;
}

static void add_tensors(mz_step *s) {
    step_sizes *z = &s->sizes;
    for (int64_t i = 0; i < s->model->tensors; i++) {
        const mz_tensor *t = &s->model->tensor[i];
        const int64_t bytes = t->rows * t->cols * t->count * t->bytes_per_value;
        const int32_t layer = t->layer < 0 ? s->layers : t->layer;
        const step_tensor size = step_tensor_of(s, t);
        (expert_of(t) ? z->expert_layer : z->dense_layer)[layer] += rank_part(s, t, bytes);
        z->weights += size.weights;
        z->gradients += size.gradients;
        if (expert_of(t))
            z->own_experts += size.weights + size.gradients;
        z->optimizer += size.optimizer;
        z->update_bytes += size.update_bytes;
        z->update_flops += size.update_flops;
        *exchange_of(s, t) += size.update_exchange;
        if (size.temporaries > z->temporaries)
            z->temporaries = size.temporaries;
    }
    for (int32_t l = 0; l <= s->layers; l++) {
        z->dense_weights += z->dense_layer[l];
        z->expert_weights += z->expert_layer[l];
    }
    z->shard_gradients = s->options.zero >= 1 ? share(z->dense_weights, s->ranks) +
                                                    share(z->expert_weights, s->groups)
                                              : z->dense_weights + z->expert_weights;
}

/* What stays from forward to backward besides the layer's input: the inputs of every product and of
 * attention, its output and log-sum-exp (fp32 per head), both norms' outputs, the inputs of norms
 * of queries and keys or of their latents besides the outputs, the router's logits and choices.
 * Selective recomputation drops norm outputs and activations, which memory-bound kernels make
 * again. */
static void token_sizes(mz_step *s) {
    const mz_model *m = s->model;
    const step_widths w = s->width;
    step_sizes *z = &s->sizes;
    const int64_t h = m->hidden, gates = m->gated ? 2 : 1;
    const bool selective = s->options.recompute == MZ_RECOMPUTE_SELECTIVE;
    const int64_t norms = selective ? 0 : 2 * h, acts = selective ? 0 : 1;
    const int64_t latent = m->kv_lora > 0 ? m->q_lora + m->kv_lora : 0;
    const int64_t normed = selective ? 0 : latent + (m->qk_norm ? w.query + w.key : 0);
    z->input = 2 * h;
    z->attention = 2 * (h + norms + w.query + w.key + w.value + w.output) + 4 * m->heads +
                   2 * (normed + latent + (m->kv_lora > 0 ? m->rope_dim : 0));
    z->dense = 2 * (gates + acts) * m->dense_intermediate;
    z->shared = 2 * (gates + acts) * m->shared_intermediate;
    z->router = 4 * (int64_t)m->experts + 8 * (int64_t)m->top_k;
    z->attention_work = 2 * (w.query + w.key + w.value + w.output);
    z->dense_work = 2 * (gates + 1) * m->dense_intermediate;
    z->shared_work = 2 * (gates + 1) * m->shared_intermediate;
    z->logits = 2 * m->vocab;
    z->loss_work = 4 * m->vocab;
    z->row = 2 * h;
    z->gate_up = 2 * w.up;
    z->act = 2 * m->expert_intermediate;
}

/* Eager attention (Korthikanti et al., 2022, arXiv 2205.05198, section 4.1, without dropout) keeps
 * the softmax's output, 2 B per head and pair of (query, key), where flash attention keeps its
 * log-sum-exp; keys and values are repeated for every query head. Beside it live the scores before
 * the softmax, in backward the gradients of both; selective recomputation makes scores and softmax
 * again. */
static void eager_sizes(mz_step *s) {
    const mz_model *m = s->model;
    const step_widths w = s->width;
    const bool selective = s->options.recompute == MZ_RECOMPUTE_SELECTIVE;
    step_sizes *z = &s->sizes;
    z->attention += 2 * (w.query + w.output - w.key - w.value) - 4 * m->heads;
    z->scores = selective ? 0 : 2 * m->heads;
    z->scores_work = selective ? 4 * m->heads : 2 * m->heads;
    z->scores_back = selective ? 6 * m->heads : 4 * m->heads;
}

/* Routed experts alone keep their layers' inputs and nothing else per token. */
static void alone_sizes(mz_step *s) {
    step_sizes *z = &s->sizes;
    z->attention = z->dense = z->shared = z->router = 0;
    z->attention_work = z->dense_work = z->shared_work = z->logits = z->loss_work = 0;
}

/* Optimizer state of resident replicas that have their own, and what the update of one moves: state
 * is held for all slots, empty ones are not updated. */
static void replica_optimizer(mz_step *s, int64_t extra) {
    step_sizes *z = &s->sizes;
    const double slots = (double)extra * s->moe;
    for (int64_t i = 0; i < s->model->tensors; i++) {
        const mz_tensor *t = &s->model->tensor[i];
        if (!expert_of(t))
            continue;
        const int64_t copies = extra * share(t->count, s->model->experts);
        const mz_update_cost u = mz_optimizer_update(s->options.optimizer, t, copies,
                                                     update_parts(s, t), s->options.temporaries);
        z->optimizer += u.state_bytes;
        z->slot_update_bytes += u.traffic_bytes / slots;
        z->slot_update_flops += u.flops / slots;
        z->exchange_copies += u.exchange_bytes;
    }
}

/* Replica slots beyond the mains. Shared: one set for all layers. Per layer: weights of those in
 * use live from forward to the layer's backward, gradients during it; with a sharded optimizer the
 * slots are where weights live, so they are resident. With sharded weights (LAER, arXiv 2602.11686)
 * every slot of a layer is filled for its forward and again for its backward, the next ones' ahead
 * of time; gradients leave it when the layer is done. */
static void replica_sizes(mz_step *s) {
    const mz_policy_traits *t = &s->traits;
    step_sizes *z = &s->sizes;
    const int64_t extra = t->slots > s->mains ? t->slots - s->mains : 0;
    const int64_t weights = 2 * mz_model_expert_parameters(s->model);
    const int64_t gradients = t->replica_gradient_bytes;
    if (t->free_replicas)
        return;
    if (t->sharded_weights) {
        z->slot_weights = t->slots * weights;
        z->slot_gradients = t->slots * (gradients > 0 ? gradients : weights);
        z->ahead = t->prefetch;
    } else if (t->replica_memory == MZ_REPLICAS_SHARED) {
        z->replicas = extra * (weights + gradients);
    } else if (t->replica_memory == MZ_REPLICAS_RESIDENT ||
               (t->replica_memory == MZ_REPLICAS_PER_LAYER && t->sharded_optimizer)) {
        z->replicas = extra * (weights + gradients) * s->moe;
        if (t->replica_optimizer && extra > 0)
            replica_optimizer(s, extra);
    } else if (t->replica_memory == MZ_REPLICAS_PER_LAYER) {
        z->replica_weights = weights;
        z->replica_gradients = gradients;
    }
}

/* Communicators: the data-parallel ranks, the expert group, an expert's copies in other groups, and
 * one for weight traffic beside the token traffic. */
static int64_t communicators(const mz_step *s) {
    if (s->ranks == 1)
        return 0;
    const bool weights =
        (s->traits.slots > s->mains && !s->traits.free_replicas) || s->traits.sharded_weights;
    return 1 + (s->ep > 1) + (s->groups > 1 && s->ep > 1) + (weights && s->ep > 1);
}

/* Frameworks keep a workspace per handle and stream of the GEMM library, and backward, which runs
 * in a thread of its own, has its own handle. */
enum { GEMM_WORKSPACES = 2 };

mz_code step_sizes_of(mz_step *s, mz_err *err) {
    const mz_device *d = &s->cluster->device;
    step_sizes *z = &s->sizes;
    z->dense_layer = MZ_NEW(&s->arena, int64_t, s->layers + 1);
    z->expert_layer = MZ_NEW(&s->arena, int64_t, s->layers + 1);
    if (!z->dense_layer || !z->expert_layer)
        return mz_fail_nomem(err, "layer sizes");
    add_tensors(s);
    token_sizes(s);
    if (s->options.attention == MZ_ATTENTION_EAGER)
        eager_sizes(s);
    if (step_alone(s))
        alone_sizes(s);
    replica_sizes(s);
    z->buffers = s->traits.buffer_bytes;
    z->gradients += z->buffers;
    if (!step_alone(s)) { /* a replay counts what it takes itself */
        z->workspace = GEMM_WORKSPACES * (int64_t)d->workspace_bytes;
        z->communication = communicators(s) * (int64_t)d->communicator_bytes;
        z->context = (int64_t)d->context_bytes / s->cluster->ranks_per_device;
    }
    int64_t held[MZ_MEM_CATEGORIES];
    mz_step_resident(s, held);
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
        z->resident += held[c];
    return step_timeline_init(s, err);
}

int64_t mz_step_own_experts(const mz_step *s) {
    return s->sizes.own_experts;
}

void mz_step_resident(const mz_step *s, int64_t bytes[MZ_MEM_CATEGORIES]) {
    const step_sizes *z = &s->sizes;
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
        bytes[c] = 0;
    bytes[MZ_MEM_WEIGHTS] = z->weights;
    bytes[MZ_MEM_GRADIENTS] = z->gradients;
    bytes[MZ_MEM_OPTIMIZER_STATE] = z->optimizer;
    bytes[MZ_MEM_REPLICAS] = z->replicas;
    bytes[MZ_MEM_WORKSPACE] = z->workspace;
    bytes[MZ_MEM_COMMUNICATION] = z->communication;
    bytes[MZ_MEM_CONTEXT] = z->context;
}
