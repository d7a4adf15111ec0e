/* What a policy is told about the machine: the numbers of the simulator's own models. */
#include "sim/policy/policy.h"

#include "sim/cost/cost.h"
#include "sim/model/optimizer.h"

#include <math.h>

/* Rows at which a product is long enough that tiles and launches no longer show. */
enum { MANY_ROWS = 1 << 16 };
/* AdamW beside bf16 weights: fp32 master weight and two moments. */
enum { ADAMW_BYTES = 12 };

static double pair_seconds(const mz_model *m, const mz_device *device) {
    const int64_t rows = MANY_ROWS, up = (m->gated ? 2 : 1) * m->expert_intermediate;
    const mz_cost_effects all = {true, true};
    mz_cost_turn turn;
    return (mz_cost_grouped_gemm(device, all, MZ_GEMM_FORWARD, &rows, 1, up, m->hidden, &turn) +
            mz_cost_grouped_gemm(device, all, MZ_GEMM_FORWARD, &rows, 1, m->hidden,
                                 m->expert_intermediate, &turn)) /
           MANY_ROWS;
}

/* Optimizer state of one expert of one layer: that of the layer's expert tensors, shared evenly. */
static int64_t state_bytes(const mz_policy_job *job) {
    const mz_model *m = job->model;
    if (!job->optimizer)
        return ADAMW_BYTES * mz_model_expert_parameters(m);
    int64_t bytes = 0;
    int32_t layer = -1;
    for (int64_t i = 0; i < m->tensors; i++) {
        const mz_tensor *t = &m->tensor[i];
        if (t->tier != MZ_TIER_EXPERT || (layer >= 0 && t->layer != layer))
            continue;
        layer = t->layer;
        bytes += mz_optimizer_state_bytes(job->optimizer, t) * t->count;
    }
    return (bytes + m->experts - 1) / m->experts;
}

static mz_code domains_of(const mz_topology *t, int32_t first, int32_t ranks, mz_arena *arena,
                          mz_policy_env *env, mz_err *err) {
    int32_t *domain = MZ_NEW(arena, int32_t, ranks);
    if (!domain)
        return mz_fail_nomem(err, "domains of a group");
    int32_t count = 0;
    for (int32_t r = 0; r < ranks; r++) {
        /* Ranks of one domain are consecutive, so a change of number is a new domain. */
        if (r > 0 && t->domain[first + r] != t->domain[first + r - 1])
            count++;
        domain[r] = count;
    }
    env->domain = domain;
    env->domains = count + 1;
    return MZ_OK;
}

/* Bytes/s in one direction of the group's first rank when all ranks are busy: ports are shared by
 * the ranks of a device, uplinks by those of a domain. Where a whole domain is one device, rows
 * between its ranks are copied in its memory, read and written once. */
static void rates_of(const mz_cluster *c, int32_t first, mz_policy_env *env) {
    const mz_topology *t = &c->topology;
    const double sharing = c->ranks_per_device;
    int32_t inside = 0;
    bool one_device = true;
    for (int32_t r = first; r < first + env->ranks && t->domain[r] == t->domain[first]; r++) {
        inside++;
        one_device = one_device && t->device[r] == t->device[first];
    }
    const double port = t->inside_bytes_per_s[first] / (sharing * (t->inside_half_duplex ? 2 : 1));
    const double copy = c->device.memory_bytes_per_s * c->device.memory_efficiency / 2;
    env->inside_bytes_s = one_device && inside > 1 ? copy / sharing : port;
    env->outside_bytes_s = env->inside_bytes_s;
    if (env->domains == 1)
        return;
    const double uplink = t->uplink_bytes_per_s ? t->uplink_bytes_per_s[t->domain[first]] : 0;
    env->outside_bytes_s = t->outside_bytes_per_s[first] / sharing;
    if (uplink > 0)
        env->outside_bytes_s = fmin(env->outside_bytes_s, uplink / inside);
}

mz_code mz_policy_env_of(const mz_policy_job *job, int32_t group, mz_arena *arena,
                         mz_policy_env *env, mz_err *err) {
    const mz_model *m = job->model;
    const int32_t first = group * job->ep;
    *env = (mz_policy_env){.ranks = job->ep,
                           .experts = m->experts,
                           .top_k = m->top_k,
                           .layers = m->moe_layers,
                           .hidden = m->hidden,
                           .intermediate = m->expert_intermediate,
                           .expert_parameters = mz_model_expert_parameters(m),
                           .weight_bytes = 2 * mz_model_expert_parameters(m),
                           .token_bytes = 2 * m->hidden,
                           .recompute = job->recompute,
                           .seed = job->seed,
                           .stop = job->stop,
                           .expert_groups = m->router_groups,
                           .expert_state_bytes = state_bytes(job),
                           .pair_seconds = pair_seconds(m, &job->cluster->device)};
    mz_code code = domains_of(&job->cluster->topology, first, job->ep, arena, env, err);
    if (code == MZ_OK)
        rates_of(job->cluster, first, env);
    return code;
}
