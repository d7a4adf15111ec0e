/* Memory of expert weights, gradients and state; pointers of a call's groups. */
#include "replay/experts_inside.h"

#include "sim/policy/parts.h"

#include <stdlib.h>
#include <string.h>

mz_code experts_bug(int32_t layer, int32_t expert, int32_t rank, const char *what, mz_err *err) {
    return mz_fail(err, MZ_EINTERNAL, "layer %d: expert %d, rank %d: %s", layer, expert, rank,
                   what);
}

/* ---- settings
 * ------------------------------------------------------------------------------------*/

static mz_code choose_mode(mz_experts *x, mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    const mz_policy_traits *t = job->traits;
    if (t->sharded_weights)
        return mz_fail(err, MZ_EINPUT, "a replay does not shard expert weights over the ranks");
    if (t->free_replicas)
        return mz_fail(err, MZ_EINPUT,
                       "replicas that cost nothing are a bound and cannot be replayed");
    x->mode =
        t->sharded_optimizer ? EXPERTS_CUT
        : t->replica_memory == MZ_REPLICAS_SHARED || t->replica_memory == MZ_REPLICAS_PER_LAYER
            ? EXPERTS_CALL
            : EXPERTS_LAST;
    if (x->mode == EXPERTS_CUT && !mz_update_is_elementwise(job->optimizer))
        return mz_fail(err, MZ_EINPUT,
                       "its optimizer is cut over the ranks, which takes one that works value by "
                       "value; pass --optimizer adamw, adamw-bf16 or lion");
    return mz_update_supported(job->optimizer, err);
}

/* Where gradients of replicas lie and of which type they are. */
static mz_code choose_gradients(mz_experts *x, mz_err *err) {
    const mz_policy_traits *t = x->e->job.traits;
    const int64_t weight = 2 * x->all, gradient = t->replica_gradient_bytes;
    x->replica_type = x->e->job.type;
    x->replica_bytes = x->value_bytes;
    if (t->slots <= x->mains && !t->open_slots && x->mode != EXPERTS_CALL)
        return MZ_OK;
    if (gradient == 2 * weight && x->mode == EXPERTS_CALL) {
        x->replica_type = MZ_F32;
        x->replica_bytes = (int64_t)sizeof(float);
    } else if (gradient == 0 && x->mode == EXPERTS_CALL &&
               t->buffer_bytes >= x->e->job.experts * weight) {
        x->replica_bytes = 0;
    } else if (gradient != weight) {
        return mz_fail(err, MZ_EINPUT, "%s",
                       x->mode == EXPERTS_CALL
                           ? "gradients of its replicas are neither bf16 nor fp32"
                           : "a replay keeps gradients of resident replicas in bf16 alone");
    }
    return MZ_OK;
}

static void choose_sizes(mz_experts *x) {
    const mz_replay_job *job = &x->e->job;
    const int64_t H = job->hidden, I = job->intermediate;
    x->rows[EXPERTS_UP] = 2 * I;
    x->cols[EXPERTS_UP] = H;
    x->rows[EXPERTS_DOWN] = H;
    x->cols[EXPERTS_DOWN] = I;
    x->values[EXPERTS_UP] = 2 * I * H;
    x->values[EXPERTS_DOWN] = H * I;
    x->all = 3 * H * I;
    x->value_bytes = x->e->value_bytes;
    x->mains = mz_mains_per_rank(job->ranks, job->experts);
    const int32_t slots = job->traits->slots > x->mains ? job->traits->slots : x->mains;
    x->extra = slots - x->mains;
    x->slots = x->mode == EXPERTS_CALL ? x->mains : slots;
    x->state_slots = job->traits->replica_optimizer ? x->slots : x->mains;
    /* Parts start at multiples of 16 bytes where there are enough values. */
    const int64_t part = (x->all + job->ranks - 1) / job->ranks;
    x->cut = part < 8 ? part : (part + 7) / 8 * 8;
}

/* Places of mains on a rank: those that it owns, or, where any of them may come, as many as the
 * fullest has. */
int32_t experts_mains(const mz_experts *x, int32_t rank) {
    const int32_t experts = x->e->job.experts, ranks = x->e->job.ranks;
    return x->mode == EXPERTS_CALL ? experts / ranks + (rank < experts % ranks) : x->mains;
}

int32_t experts_state_slots(const mz_experts *x, int32_t rank) {
    const int32_t own = experts_mains(x, rank);
    return x->mode == EXPERTS_CALL ? own : x->state_slots;
}

static mz_code allocate_tables(mz_experts *x, mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    const int64_t R = job->ranks, E = job->experts, L = job->layers, local = x->e->local;
    mz_arena *a = &x->arena;
    x->home = MZ_NEW(a, int32_t, E);
    x->held = MZ_NEW(a, int32_t, L * R * x->slots);
    x->owner = MZ_NEW(a, int32_t, L * E);
    x->placed = MZ_NEW(a, bool, L);
    x->layer = MZ_NEW(a, experts_layer, L * local);
    x->shared = MZ_NEW(a, mz_buffer, local);
    x->spare = MZ_NEW(a, mz_buffer, local);
    x->arrays = MZ_NEW(a, mz_buffer, local);
    x->instance = MZ_NEW(a, experts_instance, job->instances);
    x->replicas = MZ_NEW(a, int32_t, R);
    x->groups = MZ_NEW(a, mz_expert_groups, local);
    x->group_instance = MZ_NEW(a, int32_t, local * job->instances);
    x->group_expert = MZ_NEW(a, int32_t, local * job->instances);
    x->pointer = MZ_NEW(a, void *, (int64_t)EXPERTS_POINTERS * job->instances);
    x->edge_begin = MZ_NEW(a, int32_t, E + 1);
    x->depth = MZ_NEW(a, int32_t, R);
    x->once = MZ_NEW(a, mz_move *, L);
    x->once_cap = MZ_NEW(a, size_t, L);
    x->onces = MZ_NEW(a, int32_t, L);
    x->former = MZ_NEW(a, int32_t, R * x->slots);
    x->norm2 = MZ_NEW(a, double, R + local);
    x->fresh = MZ_NEW(a, mz_buffer, local);
    if (!x->home || !x->held || !x->owner || !x->placed || !x->layer || !x->shared || !x->spare ||
        !x->arrays || !x->instance || !x->replicas || !x->groups || !x->group_instance ||
        !x->group_expert || !x->pointer || !x->edge_begin || !x->depth || !x->once ||
        !x->once_cap || !x->onces || !x->former || !x->norm2 || !x->fresh)
        return mz_fail_nomem(err, "the tables of a replay's experts");
    return MZ_OK;
}

/* ---- memory
 * --------------------------------------------------------------------------------------*/

int32_t experts_slot(const mz_experts *x, int32_t layer, int32_t rank, int32_t expert) {
    const int32_t *held = experts_held(x, layer, rank);
    for (int32_t j = 0; j < x->slots; j++)
        if (held[j] == expert)
            return j;
    return -1;
}

/* Matrices of place `i` of a block [n] up, [n] down. */
static void place_in(const mz_experts *x, char *block, int64_t n, int64_t i, int64_t value_bytes,
                     char *part[EXPERTS_MATRICES]) {
    part[EXPERTS_UP] = experts_at(block, i * x->values[EXPERTS_UP] * value_bytes);
    part[EXPERTS_DOWN] =
        experts_at(block, (n * x->values[EXPERTS_UP] + i * x->values[EXPERTS_DOWN]) * value_bytes);
}

experts_memory experts_slot_memory(const mz_experts *x, int32_t layer, int32_t rank, int32_t slot) {
    experts_memory m = {.gradient_type = x->e->job.type};
    if (!experts_local(x, rank))
        return m;
    const experts_layer *l = experts_layer_of(x, layer, rank);
    const int32_t mains = experts_mains(x, rank);
    if (slot < mains) {
        place_in(x, l->weights.memory, mains, slot, x->value_bytes, m.weight);
        place_in(x, l->gradients.memory, mains, slot, x->value_bytes, m.gradient);
        return m;
    }
    const int64_t half = x->extra * x->all * x->value_bytes;
    place_in(x, l->extra.memory, x->extra, slot - mains, x->value_bytes, m.weight);
    place_in(x, experts_at(l->extra.memory, half), x->extra, slot - mains, x->value_bytes,
             m.gradient);
    return m;
}

/* The k-th replica of a call on a local rank. */
static experts_memory replica_memory(const mz_experts *x, int32_t layer, int32_t rank, int32_t k,
                                     int32_t expert) {
    const experts_layer *l = experts_layer_of(x, layer, rank);
    const int64_t weights = x->all * x->value_bytes, gradients = x->all * x->replica_bytes;
    const int32_t local = rank - x->e->first;
    char *weight, *gradient;
    if (x->e->job.traits->replica_memory == MZ_REPLICAS_SHARED) {
        const bool beyond = k >= x->extra;
        weight = beyond ? x->spare[local].memory : x->shared[local].memory;
        weight += (k - (beyond ? x->extra : 0)) * (weights + gradients);
        gradient = weight + weights;
    } else {
        weight = k < l->replicas ? l->replica[k].memory : NULL;
        gradient = k < l->gradients_held ? l->replica_gradient[k].memory : NULL;
    }
    if (x->replica_bytes == 0)
        gradient = (char *)x->spare[local].memory + expert * weights;
    experts_memory m = {.gradient_type = x->replica_type};
    experts_parts(x, weight, x->value_bytes, m.weight);
    experts_parts(x, gradient, x->replica_bytes ? x->replica_bytes : x->value_bytes, m.gradient);
    return m;
}

static experts_memory own_memory(const mz_experts *x, int32_t layer, const mz_plan *plan,
                                 int32_t i) {
    const experts_instance *at = &x->instance[i];
    if (at->slot >= 0)
        return experts_slot_memory(x, layer, plan->rank[i], at->slot);
    return replica_memory(x, layer, plan->rank[i], at->replica, at->expert);
}

experts_memory experts_instance_memory(const mz_experts *x, int32_t layer, const mz_plan *plan,
                                       int32_t i) {
    experts_memory m = {.gradient_type = x->replica_type};
    if (!experts_local(x, plan->rank[i]))
        return m;
    m = own_memory(x, layer, plan, i);
    const experts_memory first = own_memory(x, layer, plan, x->instance[i].first);
    memcpy(m.weight, first.weight, sizeof m.weight);
    return m;
}

int32_t experts_first(const mz_plan *plan, int32_t expert, int32_t rank) {
    for (int32_t i = plan->begin[expert]; i < plan->begin[expert + 1]; i++)
        if (plan->rank[i] == rank)
            return i;
    return -1;
}

experts_memory experts_node(const mz_experts *x, int32_t layer, const mz_plan *plan, int32_t expert,
                            int32_t rank) {
    const int32_t slot = experts_slot(x, layer, rank, expert);
    if (slot >= 0)
        return experts_slot_memory(x, layer, rank, slot);
    const int32_t i = experts_first(plan, expert, rank);
    return i < 0 ? (experts_memory){.gradient_type = x->replica_type}
                 : experts_instance_memory(x, layer, plan, i);
}

/* ---- instances of a plan
 * -------------------------------------------------------------------------*/

/* The slot of the n-th further instance of an expert on a rank. */
static int32_t further_slot(const mz_experts *x, int32_t layer, int32_t rank, int32_t expert,
                            int32_t n) {
    const int32_t *held = experts_held(x, layer, rank);
    for (int32_t j = 0; j < x->slots; j++)
        if (held[j] == -2 - expert && n-- == 0)
            return j;
    return -1;
}

static mz_code resolve_instance(mz_experts *x, int32_t layer, const mz_plan *plan, int32_t e,
                                int32_t i, mz_err *err) {
    const int32_t rank = plan->rank[i], first = experts_first(plan, e, rank);
    int32_t further = -1;
    for (int32_t k = first; k < i; k++)
        further += plan->rank[k] == rank;
    experts_instance *at = &x->instance[i];
    *at = (experts_instance){.expert = e, .slot = -1, .replica = -1, .first = first};
    if (first == i)
        at->slot = experts_slot(x, layer, rank, e);
    else if (x->mode != EXPERTS_CALL)
        at->slot = further_slot(x, layer, rank, e, further);
    if (at->slot >= 0)
        return MZ_OK;
    if (x->mode != EXPERTS_CALL)
        return experts_bug(layer, e, rank, "the plan moved it within the step", err);
    at->replica = x->replicas[rank]++;
    const mz_policy_traits *t = x->e->job.traits;
    const int64_t bytes = 2 * x->all + t->replica_gradient_bytes;
    const int64_t spare = x->replica_bytes ? t->buffer_bytes / bytes : 0;
    if (t->replica_memory == MZ_REPLICAS_SHARED && at->replica >= x->extra + spare)
        return experts_bug(layer, e, rank, "there is no slot for its replica", err);
    return MZ_OK;
}

mz_code experts_resolve(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err) {
    if (plan->begin[plan->experts] > x->e->job.instances)
        return mz_fail(err, MZ_EINTERNAL, "layer %d: a plan of %d instances, at most %d were said",
                       layer, plan->begin[plan->experts], x->e->job.instances);
    memset(x->replicas, 0, sizeof *x->replicas * (size_t)x->e->job.ranks);
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
            const mz_code code = resolve_instance(x, layer, plan, e, i, err);
            if (code != MZ_OK)
                return code;
        }
    return MZ_OK;
}

/* Pointers of a local rank's groups, gradients too where `backward`. */
static mz_code point(mz_experts *x, int32_t layer, const mz_plan *plan, int32_t rank, bool backward,
                     mz_err *err) {
    const int32_t local = rank - x->e->first;
    const int64_t most = x->e->job.instances;
    void **to = x->arrays[local].memory, **p = x->pointer;
    int32_t *instance = x->group_instance + local * most, *expert = x->group_expert + local * most;
    int32_t n = 0;
    bool wide = false;
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++) {
        if (plan->rank[i] != rank)
            continue;
        const experts_memory m = experts_instance_memory(x, layer, plan, i);
        const bool is_wide = m.gradient_type != x->e->job.type;
        for (int k = 0; k < EXPERTS_MATRICES; k++) {
            p[k * most + n] = m.weight[k];
            p[(2 + k) * most + n] = backward && !is_wide ? m.gradient[k] : NULL;
            p[(4 + k) * most + n] = backward && is_wide ? m.gradient[k] : NULL;
        }
        instance[n] = i;
        expert[n++] = x->instance[i].expert;
        wide = wide || is_wide;
    }
    x->groups[local] = (mz_expert_groups){.count = n,
                                          .instance = instance,
                                          .expert = expert,
                                          .up = to,
                                          .down = to + most,
                                          .grad_up = backward ? to + 2 * most : NULL,
                                          .grad_down = backward ? to + 3 * most : NULL,
                                          .wide_up = backward && wide ? to + 4 * most : NULL,
                                          .wide_down = backward && wide ? to + 5 * most : NULL};
    return engine_kernel(x->e,
                         mz_kernels_copy(x->e->kernels, 0, MZ_COPY_IN, to, p,
                                         sizeof *p * EXPERTS_POINTERS * (size_t)most),
                         "pointers of experts", rank, layer, err);
}

static mz_code point_all(mz_experts *x, int32_t layer, const mz_plan *plan, bool backward,
                         mz_err *err) {
    const double start = mz_now();
    mz_code code = MZ_OK;
    for (int32_t r = x->e->first; code == MZ_OK && r < x->e->end; r++)
        code = point(x, layer, plan, r, backward, err);
    engine_untimed(x->e, start);
    return code;
}

const mz_expert_groups *mz_experts_groups(const mz_experts *x, int32_t rank) {
    return &x->groups[rank - x->e->first];
}

/* ---- start
 * ---------------------------------------------------------------------------------------*/

mz_code experts_zero(mz_experts *x, void *memory, int64_t bytes, int32_t rank, int32_t layer,
                     mz_err *err) {
    if (bytes == 0)
        return MZ_OK;
    return engine_kernel(x->e, mz_kernels_zero(x->e->kernels, 0, memory, (size_t)bytes),
                         "zeros of experts", rank, layer, err);
}

/* n host values into context memory as the job's type and, where master is not NULL, as fp32. */
static mz_code put_values(mz_experts *x, int32_t layer, int32_t rank, const float *from, int64_t n,
                          void *to, float *master, mz_err *err) {
    mz_kernels *k = x->e->kernels;
    mz_buffer wide = {0};
    mz_code code = mz_heap_take(x->e->heap, rank, MZ_MEM_TEMPORARIES, n * (int64_t)sizeof *from,
                                "layer %d initial weights", layer, &wide, err);
    if (code != MZ_OK)
        return code;
    mz_kstatus status =
        mz_kernels_copy(k, 0, MZ_COPY_IN, wide.memory, from, sizeof *from * (size_t)n);
    if (status == MZ_K_OK && to)
        status = mz_convert(k, 0, x->e->job.type, to, MZ_F32, wide.memory, n);
    if (status == MZ_K_OK && master)
        status =
            mz_kernels_copy(k, 0, MZ_COPY_INSIDE, master, wide.memory, sizeof *from * (size_t)n);
    code = engine_kernel(x->e, status, "initial weights", rank, layer, err);
    mz_heap_give(x->e->heap, &wide);
    return code;
}

mz_code experts_start_slot(mz_experts *x, int32_t layer, int32_t rank, int32_t slot, int32_t expert,
                           mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    const experts_memory m = experts_slot_memory(x, layer, rank, slot);
    const int32_t held = experts_state_slots(x, rank);
    float *value = mz_calloc((size_t)x->values[EXPERTS_UP], sizeof *value);
    mz_code code = value ? MZ_OK : mz_fail_nomem(err, "initial weights");
    for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++) {
        const mz_buffer *block = &experts_layer_of(x, layer, rank)->state[k];
        float *master = x->mode == EXPERTS_CUT || slot >= held
                            ? NULL
                            : mz_update_state_of(job->optimizer, job->type, held, x->rows[k],
                                                 x->cols[k], block->memory)
                                  .master;
        mz_data_weights(job, layer, expert, k == EXPERTS_UP ? MZ_DATA_UP : MZ_DATA_DOWN, value);
        code = put_values(x, layer, rank, value, x->values[k], m.weight[k],
                          master ? master + slot * x->values[k] : NULL, err);
    }
    free(value);
    return code;
}

/* EXPERTS_CUT: every rank's part of the master weights of one expert. */
static mz_code start_parts(mz_experts *x, int32_t layer, int32_t expert, float *value,
                           mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    mz_data_weights(job, layer, expert, MZ_DATA_UP, value);
    mz_data_weights(job, layer, expert, MZ_DATA_DOWN, value + x->values[EXPERTS_UP]);
    mz_code code = MZ_OK;
    for (int32_t r = x->e->first; code == MZ_OK && r < x->e->end; r++) {
        const int64_t low = experts_cut_begin(x, r), n = experts_cut_begin(x, r + 1) - low;
        float *master = mz_update_state_of(job->optimizer, job->type, 1, n * job->experts, 1,
                                           experts_layer_of(x, layer, r)->state[0].memory)
                            .master;
        if (master && n > 0)
            code = put_values(x, layer, r, value + low, n, NULL, master + expert * n, err);
    }
    return code;
}

static mz_code start_layer(mz_experts *x, int32_t layer, float *value, mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    mz_code code = MZ_OK;
    for (int32_t r = 0; r < job->ranks; r++) {
        int32_t *held = experts_held(x, layer, r), slot = 0;
        for (int32_t j = 0; j < x->slots; j++)
            held[j] = -1;
        for (int32_t e = 0; code == MZ_OK && e < job->experts; e++) {
            if (x->home[e] != r)
                continue;
            x->owner[(int64_t)layer * job->experts + e] = r;
            if (experts_local(x, r))
                code = experts_start_slot(x, layer, r, slot, e, err);
            held[slot++] = e;
        }
    }
    for (int32_t e = 0; code == MZ_OK && x->mode == EXPERTS_CUT && e < job->experts; e++)
        code = start_parts(x, layer, e, value, err);
    return code;
}

static int64_t state_bytes(const mz_experts *x, int32_t rank, int k) {
    const mz_replay_job *job = &x->e->job;
    if (x->mode != EXPERTS_CUT)
        return mz_update_block_bytes(job->optimizer, job->type, experts_state_slots(x, rank),
                                     x->rows[k], x->cols[k]);
    const int64_t n = experts_cut_begin(x, rank + 1) - experts_cut_begin(x, rank);
    return k > 0 ? 0 : mz_update_block_bytes(job->optimizer, job->type, 1, n * job->experts, 1);
}

static mz_code take_layer(mz_experts *x, int32_t layer, int32_t rank, mz_err *err) {
    mz_heap *heap = x->e->heap;
    experts_layer *l = experts_layer_of(x, layer, rank);
    const int64_t W = x->all * x->value_bytes, own = experts_mains(x, rank) * W;
    const int64_t parts = x->mode == EXPERTS_CUT ? x->e->job.experts * x->cut * x->value_bytes : 0;
    const int64_t extra = x->mode == EXPERTS_CALL ? 0 : x->extra * 2 * W;
    mz_code code = mz_heap_take(heap, rank, MZ_MEM_WEIGHTS, own, "layer %d expert weights", layer,
                                &l->weights, err);
    if (code == MZ_OK)
        code = mz_heap_take(heap, rank, MZ_MEM_GRADIENTS, own > parts ? own : parts,
                            "layer %d expert gradients", layer, &l->gradients, err);
    if (code == MZ_OK)
        code = mz_heap_take(heap, rank, MZ_MEM_REPLICAS, extra, "layer %d replica slots", layer,
                            &l->extra, err);
    for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++) {
        code = mz_heap_take(heap, rank, MZ_MEM_OPTIMIZER_STATE, state_bytes(x, rank, k),
                            "layer %d optimizer state", layer, &l->state[k], err);
        if (code == MZ_OK)
            code = experts_zero(x, l->state[k].memory, l->state[k].bytes, rank, layer, err);
    }
    /* Slots without an expert hold zeros, as all of them may be read in one pass. */
    if (code == MZ_OK)
        code = experts_zero(x, l->weights.memory, l->weights.bytes, rank, layer, err);
    if (code == MZ_OK)
        code = experts_zero(x, l->extra.memory, l->extra.bytes, rank, layer, err);
    return code == MZ_OK
               ? experts_zero(x, l->gradients.memory, l->gradients.bytes, rank, layer, err)
               : code;
}

static mz_code take_rank(mz_experts *x, int32_t rank, mz_err *err) {
    const mz_replay_job *job = &x->e->job;
    mz_heap *heap = x->e->heap;
    const int32_t local = rank - x->e->first, whole = job->layers;
    const bool shared =
        x->mode == EXPERTS_CALL && job->traits->replica_memory == MZ_REPLICAS_SHARED;
    const int64_t each = x->all * (x->value_bytes + x->replica_bytes);
    mz_code code = MZ_OK;
    for (int32_t l = 0; code == MZ_OK && l < job->layers; l++)
        code = take_layer(x, l, rank, err);
    if (code == MZ_OK)
        code = mz_heap_take(heap, rank, MZ_MEM_REPLICAS, shared ? x->extra * each : 0,
                            "replica slots", whole, &x->shared[local], err);
    if (code == MZ_OK)
        code = mz_heap_take(heap, rank, MZ_MEM_GRADIENTS,
                            job->traits->buffer_bytes / 2 * x->value_bytes, "gradient accumulators",
                            whole, &x->spare[local], err);
    if (code == MZ_OK)
        code = mz_heap_take(heap, rank, MZ_MEM_WORKSPACE,
                            (int64_t)sizeof(void *) * EXPERTS_POINTERS * job->instances,
                            "pointers of experts", whole, &x->arrays[local], err);
    return code;
}

static mz_code start(mz_experts *x, mz_err *err) {
    float *value = mz_calloc((size_t)x->all, sizeof *value);
    mz_code code = value ? MZ_OK : mz_fail_nomem(err, "initial weights");
    for (int32_t r = x->e->first; code == MZ_OK && r < x->e->end; r++)
        code = take_rank(x, r, err);
    for (int32_t l = 0; code == MZ_OK && l < x->e->job.layers; l++)
        code = start_layer(x, l, value, err);
    free(value);
    return code;
}

mz_code mz_experts_create(mz_engine *engine, mz_experts **experts, mz_err *err) {
    *experts = NULL;
    mz_experts *x = mz_calloc(1, sizeof *x);
    if (!x)
        return mz_fail_nomem(err, "a replay's experts");
    x->e = engine;
    mz_code code = choose_mode(x, err);
    if (code == MZ_OK) {
        choose_sizes(x);
        code = choose_gradients(x, err);
    }
    if (code == MZ_OK)
        code = allocate_tables(x, err);
    if (code == MZ_OK) {
        mz_layout_mains(engine->job.ranks, engine->job.experts, x->home);
        code = start(x, err);
    }
    if (code != MZ_OK) {
        mz_experts_free(&x);
        return code;
    }
    *experts = x;
    return MZ_OK;
}

static void give_replicas(mz_experts *x, experts_layer *l) {
    for (int32_t k = 0; k < l->replicas; k++)
        mz_heap_give(x->e->heap, &l->replica[k]);
    for (int32_t k = 0; k < l->gradients_held; k++)
        mz_heap_give(x->e->heap, &l->replica_gradient[k]);
    l->replicas = l->gradients_held = 0;
}

static void free_layer(mz_experts *x, experts_layer *l) {
    mz_heap *heap = x->e->heap;
    give_replicas(x, l);
    mz_heap_give(heap, &l->weights);
    mz_heap_give(heap, &l->gradients);
    mz_heap_give(heap, &l->extra);
    for (int k = 0; k < EXPERTS_MATRICES; k++)
        mz_heap_give(heap, &l->state[k]);
    free(l->replica);
    free(l->replica_gradient);
}

void mz_experts_free(mz_experts **experts) {
    mz_experts *x = *experts;
    if (!x)
        return;
    const mz_engine *e = x->e;
    for (int64_t i = 0; x->layer && i < (int64_t)e->job.layers * e->local; i++)
        free_layer(x, &x->layer[i]);
    for (int32_t r = 0; r < e->local; r++) {
        mz_buffer *own[] = {x->shared ? &x->shared[r] : NULL, x->spare ? &x->spare[r] : NULL,
                            x->arrays ? &x->arrays[r] : NULL, x->fresh ? &x->fresh[r] : NULL};
        for (size_t i = 0; i < sizeof own / sizeof *own; i++)
            if (own[i])
                mz_heap_give(e->heap, own[i]);
    }
    for (int64_t i = 0; i < x->paddings; i++)
        mz_heap_give(e->heap, &x->padding[i]);
    for (int64_t i = 0; i < x->sums; i++)
        mz_heap_give(e->heap, &x->sum[i].received);
    for (int64_t i = 0; i < x->arrivals; i++)
        mz_heap_give(e->heap, &x->arrival[i].received);
    for (int32_t l = 0; x->once && l < e->job.layers; l++)
        free(x->once[l]);
    free(x->piece);
    free(x->padding);
    free(x->edge);
    free(x->sum);
    free(x->arrival);
    free(x->position);
    free(x->row_norm);
    mz_arena_free(&x->arena);
    free(x);
    *experts = NULL;
}

/* ---- a call
 * --------------------------------------------------------------------------------------*/

mz_code mz_experts_begin_step(mz_experts *x, mz_err *err) {
    const double start_s = mz_now();
    mz_code code = MZ_OK;
    for (int32_t l = 0; l < x->e->job.layers; l++)
        for (int32_t r = x->e->first; code == MZ_OK && r < x->e->end; r++) {
            const experts_layer *at = experts_layer_of(x, l, r);
            code = experts_zero(x, at->gradients.memory, at->gradients.bytes, r, l, err);
            if (code == MZ_OK && at->extra.bytes > 0)
                code = experts_zero(x, (char *)at->extra.memory + at->extra.bytes / 2,
                                    at->extra.bytes / 2, r, l, err);
        }
    engine_untimed(x->e, start_s);
    return code;
}

/* Buffers of PER_LAYER replicas: weights in forward, gradients in backward. */
static mz_code take_replicas(mz_experts *x, int32_t layer, bool gradients, mz_err *err) {
    if (x->mode != EXPERTS_CALL || x->e->job.traits->replica_memory != MZ_REPLICAS_PER_LAYER)
        return MZ_OK;
    const int64_t bytes = x->all * (gradients ? x->replica_bytes : x->value_bytes);
    mz_code code = MZ_OK;
    for (int32_t r = x->e->first; code == MZ_OK && r < x->e->end; r++) {
        experts_layer *l = experts_layer_of(x, layer, r);
        const int32_t n = x->replicas[r];
        mz_buffer **list = gradients ? &l->replica_gradient : &l->replica;
        int32_t *held = gradients ? &l->gradients_held : &l->replicas;
        size_t *cap = gradients ? &l->gradient_cap : &l->replica_cap;
        if (!mz_grow((void **)list, cap, (size_t)n, sizeof **list))
            return mz_fail_nomem(err, "replicas of a layer");
        for (int32_t k = *held; code == MZ_OK && k < n; k++) {
            (*list)[k] = (mz_buffer){0};
            code = mz_heap_take(x->e->heap, r, MZ_MEM_REPLICAS, bytes,
                                gradients ? "layer %d replica gradients" : "layer %d replicas",
                                layer, &(*list)[k], err);
            *held += code == MZ_OK;
        }
    }
    return code;
}

/* What micro-batch 0's plan moves once per step, kept until it is time. */
static mz_code keep_once(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                         mz_err *err) {
    const int32_t l = call->layer;
    if (call->micro_batch > 0)
        return MZ_OK;
    x->onces[l] = 0;
    for (int32_t m = 0; m < plan->moves; m++) {
        const mz_move_phase phase = plan->move[m].phase;
        if (phase != MZ_MOVE_STEP && phase != MZ_MOVE_REDUCE_STEP)
            continue;
        if (!mz_grow((void **)&x->once[l], &x->once_cap[l], (size_t)x->onces[l] + 1,
                     sizeof *x->once[l]))
            return mz_fail_nomem(err, "moves of a step");
        x->once[l][x->onces[l]++] = plan->move[m];
    }
    return MZ_OK;
}

mz_code mz_experts_forward(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                           mz_err *err) {
    mz_code code = keep_once(x, call, plan, err);
    if (code == MZ_OK && x->mode != EXPERTS_CALL)
        code = experts_place(x, call, plan, err);
    if (code == MZ_OK)
        code = experts_resolve(x, call->layer, plan, err);
    if (code == MZ_OK)
        code = take_replicas(x, call->layer, false, err);
    if (code == MZ_OK && x->mode == EXPERTS_CALL)
        code = experts_send_weights(x, call->layer, plan, MZ_MOVE_FORWARD, err);
    return code == MZ_OK ? point_all(x, call->layer, plan, false, err) : code;
}

/* Does the plan reduce this call's gradients by themselves? Then only the first instances add up
 * those of several calls. */
static bool reduced_per_call(const mz_plan *plan) {
    for (int32_t m = 0; m < plan->moves; m++)
        if (plan->move[m].phase == MZ_MOVE_REDUCE)
            return true;
    return false;
}

static mz_code clear_gradients(mz_experts *x, int32_t layer, const mz_plan *plan, mz_err *err) {
    const double start_s = mz_now();
    const bool per_call = x->mode == EXPERTS_CALL || reduced_per_call(plan);
    mz_code code = MZ_OK;
    for (int32_t i = 0; per_call && code == MZ_OK && i < plan->begin[plan->experts]; i++) {
        const experts_instance *at = &x->instance[i];
        const bool first = i == plan->begin[at->expert];
        if (!experts_local(x, plan->rank[i]) || (at->slot >= 0 && first) ||
            (x->mode == EXPERTS_CALL ? at->slot >= 0 : at->first != i))
            continue;
        const experts_memory m = experts_instance_memory(x, layer, plan, i);
        const int64_t bytes = m.gradient_type == MZ_F32 ? 4 : 2;
        for (int k = 0; code == MZ_OK && k < EXPERTS_MATRICES; k++)
            code = experts_zero(x, m.gradient[k], x->values[k] * bytes, plan->rank[i], layer, err);
    }
    engine_untimed(x->e, start_s);
    return code;
}

mz_code mz_experts_backward(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                            mz_err *err) {
    mz_code code = experts_resolve(x, call->layer, plan, err);
    if (code == MZ_OK && x->mode == EXPERTS_CALL)
        code = experts_send_weights(x, call->layer, plan, MZ_MOVE_BACKWARD, err);
    if (code == MZ_OK)
        code = take_replicas(x, call->layer, true, err);
    if (code == MZ_OK)
        code = clear_gradients(x, call->layer, plan, err);
    return code == MZ_OK ? point_all(x, call->layer, plan, true, err) : code;
}

mz_code mz_experts_reduce(mz_experts *x, const mz_replay_call *call, const mz_plan *plan,
                          bool last_micro_batch, mz_err *err) {
    const int32_t l = call->layer;
    mz_code code = experts_resolve(x, l, plan, err);
    if (code == MZ_OK)
        code = experts_reduce_moves(x, l, plan, plan->move, plan->moves, MZ_MOVE_REDUCE, err);
    if (code == MZ_OK && last_micro_batch && x->mode != EXPERTS_CALL)
        code = experts_reduce_moves(x, l, plan, x->once[l], x->onces[l], MZ_MOVE_REDUCE_STEP, err);
    for (int32_t r = x->e->first; r < x->e->end; r++)
        give_replicas(x, experts_layer_of(x, l, r));
    return code;
}
