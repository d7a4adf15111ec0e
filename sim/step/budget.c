/* How many kept pairs fit into the backward of a layer, told to policies with quotas before they
 * plan it. The moment is the layer's backward products: capacity less all that is held then
 * (timeline.c), over what one kept pair needs. */
#include "sim/step/inside.h"

/* Bytes alive per kept pair at the peak of a layer's backward products. */
static int64_t back_bytes_per_pair(const mz_step *s, bool again) {
    const step_sizes *z = &s->sizes;
    const bool selective = s->options.recompute == MZ_RECOMPUTE_SELECTIVE;
    const int64_t gradients = z->row + z->act + z->gate_up + z->row;
    return gradients + (again ? z->row + z->gate_up + z->act : selective ? z->act : 0);
}

/* Forward rows that this call will leave on a local rank, before its plan is known: its own
 * experts' pairs, or the mean where the policy spreads them over replicas. */
static int64_t expected_rows(const mz_step *s, const mz_load *load, int32_t rank) {
    if (s->traits.slots > s->mains)
        return (load->pairs + s->ep - 1) / s->ep;
    /* Block layout of mains (policy.h): the first E mod R ranks hold one more. */
    const int32_t each = load->experts / s->ep, more = load->experts % s->ep;
    const int32_t first = rank * each + (rank < more ? rank : more);
    int64_t rows = 0;
    for (int32_t e = first; e < first + each + (rank < more); e++)
        rows += load->total[e];
    return rows;
}

/* What a caching allocator may lose in the step's buffers: a remainder of up to 1 MiB that is not
 * split off in each of up to eight buffers a layer, and a segment. An allowance, not a bound. */
static int64_t allocator_margin(const mz_step *s, int32_t layer) {
    if (s->options.allocator == MZ_ALLOCATOR_EXACT)
        return 0;
    return ((int64_t)8 << 20) * (layer + 3);
}

/* Slots of this call beyond the resident ones, all in use. */
static int64_t slots_in_use(const mz_step *s) {
    const step_sizes *z = &s->sizes;
    const int64_t extra = s->traits.slots > s->mains ? s->traits.slots - s->mains : 0;
    return extra * (z->replica_weights + z->replica_gradients) + (1 + z->ahead) * z->slot_weights +
           z->slot_gradients;
}

/* Bytes in use when the backward products of model layer `layer` begin, without those products. */
static int64_t held_at_backward(const mz_step *s, int32_t micro_batch, int32_t rank,
                                int32_t layer) {
    const step_sizes *z = &s->sizes;
    const int64_t tokens = s->tokens[(int64_t)micro_batch * s->ranks + rank];
    const int64_t pairs = step_score_pairs(s, micro_batch, rank);
    const bool full = s->options.recompute == MZ_RECOMPUTE_FULL;
    int64_t bytes = z->resident + step_held_all_step(s, micro_batch, rank) + 2 * z->input * tokens +
                    s->saved[rank] + slots_in_use(s);
    for (int32_t l = 0; l <= layer; l++)
        bytes += full ? z->input * tokens : step_layer_tokens(s, l, tokens) + z->scores * pairs;
    if (full)
        bytes += step_layer_tokens(s, layer, tokens) - z->input * tokens + z->scores * pairs;
    bytes += step_unscattered(s, layer) + step_gathered(s, layer);
    if (layer > 0)
        bytes += step_gathered(s, layer - 1);
    return bytes + allocator_margin(s, layer);
}

int64_t step_rank_budget(const mz_step *s, int32_t group, int32_t micro_batch, int32_t layer,
                         const mz_load *load, int32_t rank) {
    const int32_t global = group * s->ep + rank;
    const int64_t pair = back_bytes_per_pair(s, s->traits.resend);
    if (s->options.budget_memory_bytes >= 0)
        return (int64_t)(s->options.budget_memory_bytes / (double)pair);
    int64_t left = step_capacity(s) -
                   held_at_backward(s, micro_batch, global, s->moe_layer[layer]) -
                   load->source[rank] * step_selection_per_pair(s);
    if (!s->traits.resend) {
        const step_sizes *z = &s->sizes;
        const bool full = s->options.recompute == MZ_RECOMPUTE_FULL;
        const int64_t kept = full ? z->row + z->gate_up + z->act : step_saved_per_pair(s);
        left -= expected_rows(s, load, rank) * kept;
    }
    return left > 0 ? left / pair : 0;
}
