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

/* Of all experts' copies in a tensor row, those of the fullest rank. */
static int64_t rank_part(const mz_step *s, const mz_tensor *t, int64_t amount) {
    return t->tier == MZ_TIER_EXPERT ? share(amount, s->model->experts) * s->mains : amount;
}

/* Over how many ranks the optimizer spreads what a rank would otherwise update. */
static int64_t update_parts(const mz_step *s, const mz_tensor *t) {
    if (s->options.zero < 1)
        return 1;
    return t->tier == MZ_TIER_EXPERT ? s->groups : s->ranks;
}

/* A policy with a sharded optimizer cuts every expert's state over the whole group. */
static void add_optimizer(mz_step *s, const mz_tensor *t) {
    step_sizes *z = &s->sizes;
    const bool expert = t->tier == MZ_TIER_EXPERT, cut = expert && s->traits.sharded_optimizer;
    const int64_t copies = cut ? 1 : rank_part(s, t, t->count);
    const int64_t parts = update_parts(s, t) * (cut ? s->ep : 1), times = cut ? t->count : 1;
    const mz_update u =
        mz_optimizer_update(s->options.optimizer, t, copies, parts, s->options.temporaries);
    z->optimizer += times * u.state_bytes;
    z->update_bytes += (double)times * u.traffic_bytes;
    if (u.temporary_bytes > z->temporaries)
        z->temporaries = u.temporary_bytes;
}

static void add_tensors(mz_step *s) {
    step_sizes *z = &s->sizes;
    for (int64_t i = 0; i < s->model->tensors; i++) {
        const mz_tensor *t = &s->model->tensor[i];
        const int64_t bytes = t->rows * t->cols * t->count * t->bytes_per_value;
        const int64_t held = rank_part(s, t, bytes);
        const bool expert = t->tier == MZ_TIER_EXPERT;
        const int64_t parts = expert ? s->groups : s->ranks;
        const int32_t layer = t->layer < 0 ? s->layers : t->layer;
        (expert ? z->expert_layer : z->dense_layer)[layer] += held;
        z->weights += s->options.zero >= 3 ? share(held, parts) : held;
        if (t->trainable)
            z->gradients += s->options.zero >= 2 ? share(held, parts) : held;
        add_optimizer(s, t);
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
 * attention, its output and log-sum-exp (fp32 per head), both norms' outputs, the router's logits
 * and choices. Selective recomputation drops norm outputs and activations, which memory-bound
 * kernels make again. */
static void token_sizes(mz_step *s) {
    const mz_model *m = s->model;
    const step_widths w = s->width;
    step_sizes *z = &s->sizes;
    const int64_t h = m->hidden, gates = m->gated ? 2 : 1;
    const bool selective = s->options.recompute == MZ_RECOMPUTE_SELECTIVE;
    const int64_t norms = selective ? 0 : 2 * h, acts = selective ? 0 : 1;
    z->input = 2 * h;
    z->attention = 2 * (h + norms + w.query + w.key + w.value + w.output) + 4 * m->heads +
                   2 * (m->kv_lora > 0 ? m->q_lora + m->kv_lora + m->rope_dim : 0);
    z->dense = 2 * (gates + acts) * m->dense_intermediate;
    z->shared = 2 * (gates + acts) * m->shared_intermediate;
    z->router = 4 * (int64_t)m->experts + 8 * (int64_t)m->top_k;
    z->attention_work = 2 * (w.query + w.key + w.value + w.output);
    z->dense_work = 2 * (gates + 1) * m->dense_intermediate;
    z->shared_work = 2 * (gates + 1) * m->shared_intermediate;
    z->logits = 2 * m->vocab;
    z->loss_work = 4 * m->vocab + 4 * h;
    z->row = 2 * h;
    z->gate_up = 2 * w.up;
    z->act = 2 * m->expert_intermediate;
}

/* Replica slots beyond the mains. Shared: one set for all layers. Per layer: those in use live from
 * forward to the layer's backward; with a sharded optimizer the slots are where weights live. */
static void replica_sizes(mz_step *s) {
    const mz_policy_traits *t = &s->traits;
    step_sizes *z = &s->sizes;
    const int64_t extra = t->slots > s->mains ? t->slots - s->mains : 0;
    if (t->free_replicas || t->replica_memory == MZ_REPLICAS_NONE)
        return;
    const int64_t slot = 2 * mz_model_expert_parameters(s->model) + t->replica_gradient_bytes;
    if (t->replica_memory == MZ_REPLICAS_SHARED)
        z->replicas = extra * slot;
    else if (t->sharded_optimizer)
        z->replicas = extra * slot * s->moe;
    else
        z->replica_slot = slot;
}

/* Communicators: the data-parallel ranks, the expert group, an expert's copies in other groups, and
 * one for weight traffic beside the token traffic. */
static int64_t communicators(const mz_step *s) {
    if (s->ranks == 1)
        return 0;
    const bool weights = s->traits.slots > s->mains && !s->traits.free_replicas;
    return 1 + (s->ep > 1) + (s->groups > 1 && s->ep > 1) + (weights && s->ep > 1);
}

mz_code step_sizes_of(mz_step *s, mz_err *err) {
    const mz_device *d = &s->cluster->device;
    step_sizes *z = &s->sizes;
    z->dense_layer = MZ_NEW(&s->arena, int64_t, s->layers + 1);
    z->expert_layer = MZ_NEW(&s->arena, int64_t, s->layers + 1);
    if (!z->dense_layer || !z->expert_layer)
        return mz_fail_nomem(err, "layer sizes");
    add_tensors(s);
    token_sizes(s);
    replica_sizes(s);
    z->workspace = (int64_t)d->workspace_bytes;
    z->communication = communicators(s) * (int64_t)d->communicator_bytes;
    z->context = (int64_t)d->context_bytes / s->cluster->ranks_per_device;
    z->resident = z->weights + z->gradients + z->optimizer + z->replicas + z->workspace +
                  z->communication + z->context;
    return MZ_OK;
}
