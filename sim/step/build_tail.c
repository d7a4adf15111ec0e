/* After the last micro-batch: gradient reduction (ZeRO 0: all-reduce, 1: reduce-scatter; 2 and 3
 * did it layer by layer in backward), gradient norm, what the update needs of matrices that are cut
 * between ranks, optimizer (its bytes, and its matrix products at the rate of large ones),
 * parameter gather (ZeRO 1, 2), and the transfers that a policy makes once per step. A ring
 * collective over n ranks sends (n-1)/n of the buffer to the neighbour in n-1 rounds, an all-reduce
 * twice that (Patarasuk and Yuan, 2009). */
#include "sim/step/inside.h"

#include <math.h>

static void among_all(mz_step *s, double sent, double rounds, mz_phase phase) {
    const step_join join = {STREAM_MOVE, phase, s->layers, true, NULL, NULL};
    if (step_ring(s, 0, 1, s->ranks, sent, rounds, join) > 0)
        step_need_each(s, 0, s->ranks, s->joined);
}

static void among_groups(mz_step *s, double sent, double rounds, mz_phase phase) {
    const step_join join = {STREAM_MOVE, phase, s->layers, true, NULL, NULL};
    for (int32_t first = 0; first < s->ranks; first += s->ep)
        if (step_ring(s, first, 1, s->ep, sent, rounds, join) > 0)
            step_need_each(s, first, first + s->ep, s->joined);
}

static void among_copies(mz_step *s, double sent, double rounds, mz_phase phase) {
    const step_join join = {STREAM_MOVE, phase, s->layers, true, NULL, NULL};
    for (int32_t r = 0; r < s->ep; r++)
        if (step_ring(s, r, s->ep, s->groups, sent, rounds, join) > 0)
            for (int32_t g = 0; g < s->groups; g++)
                step_need(s, r + g * s->ep, s->joined[r + g * s->ep]);
}

static void ring_all(mz_step *s, double bytes, double passes, mz_phase phase) {
    const double n = s->ranks;
    among_all(s, passes * bytes * (n - 1) / n, passes * (n - 1), phase);
}

static void ring_copies(mz_step *s, double bytes, double passes, mz_phase phase) {
    const double n = s->groups;
    among_copies(s, passes * bytes * (n - 1) / n, passes * (n - 1), phase);
}

/* Rest of the matrices of which a rank updates a piece, sums of their rows: every rank receives as
 * many bytes as the fullest, in the rounds of a tree. */
static void exchange_cut_matrices(mz_step *s) {
    const step_sizes *z = &s->sizes;
    if (!s->options.effects.other_work)
        return;
    among_all(s, z->exchange_all, ceil(log2((double)s->ranks)), MZ_PHASE_OPTIMIZER);
    among_groups(s, z->exchange_group, ceil(log2((double)s->ep)), MZ_PHASE_OPTIMIZER);
    among_copies(s, z->exchange_copies, ceil(log2((double)s->groups)), MZ_PHASE_OPTIMIZER);
}

/* Norm of the gradients: one pass, a scalar all-reduce (a tree: 2 log2 n rounds), and the host
 * reads it before it issues the update. */
static void gradient_norm(mz_step *s) {
    const double time = mz_cost_memory(&s->cluster->device, (double)s->sizes.shard_gradients);
    for (int32_t r = 0; r < s->ranks; r++)
        step_emit_other(s, r, MZ_PHASE_OPTIMIZER, s->layers, time, 2);
    if (!s->options.effects.other_work)
        return;
    const step_join join = {STREAM_MOVE, MZ_PHASE_GRADIENT_REDUCE, s->layers, true, NULL, NULL};
    const int32_t members = step_ring(s, 0, 1, s->ranks, 4, 2 * ceil(log2((double)s->ranks)), join);
    for (int32_t r = 0; r < s->ranks && s->options.effects.launches; r++)
        step_host_sync(s, r, members > 0 ? s->joined[r] : s->last[r], s->cluster->device.sync_s,
                       s->layers);
    if (members > 0)
        step_need_each(s, 0, s->ranks, s->joined);
}

/* The rank's own parameters, and the replicas that it holds where these have optimizer state. */
static double update_seconds(const mz_step *s, int32_t rank) {
    const step_sizes *z = &s->sizes;
    int64_t replicas = 0;
    for (int32_t l = 0; l < s->moe; l++) {
        const int32_t instances = step_work_at(s, 0, l)[rank].instances;
        replicas += instances > s->mains ? instances - s->mains : 0;
    }
    return mz_cost_memory(&s->cluster->device,
                          z->update_bytes + (double)replicas * z->slot_update_bytes) +
           (z->update_flops + (double)replicas * z->slot_update_flops) / step_product_rate(s);
}

void step_build_tail(mz_step *s) {
    const step_sizes *z = &s->sizes;
    const double passes = s->options.zero == 0 ? 2 : 1;
    step_need_each(s, 0, s->ranks, s->reduced);
    step_need_each(s, 0, s->ranks, s->scattered);
    if (s->options.zero < 2) {
        ring_all(s, (double)z->dense_weights, passes, MZ_PHASE_GRADIENT_REDUCE);
        ring_copies(s, (double)z->expert_weights, passes, MZ_PHASE_GRADIENT_REDUCE);
    }
    gradient_norm(s);
    exchange_cut_matrices(s);
    for (int32_t r = 0; r < s->ranks; r++)
        step_emit_other(s, r, MZ_PHASE_OPTIMIZER, s->layers, update_seconds(s, r), 4);
    if (s->options.zero == 1 || s->options.zero == 2) {
        ring_all(s, (double)z->dense_weights, 1, MZ_PHASE_PARAMETER_GATHER);
        ring_copies(s, (double)z->expert_weights, 1, MZ_PHASE_PARAMETER_GATHER);
    } else if (s->options.zero == 3 && s->traits.sharded_weights) {
        /* Sharded inside each group alone: the copies are brought up to date here. */
        ring_copies(s, (double)z->expert_weights, 1, MZ_PHASE_PARAMETER_GATHER);
    }
    for (int32_t g = 0; g < s->groups; g++)
        step_build_step_moves(s, g);
}
