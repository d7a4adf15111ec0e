/* Placements that last: hosts of every layer as its last plan left them, and what a change moves.
 *
 * Instances of one expert on one rank share their weights, so only new (expert, rank) pairs are
 * copied. */
#include "sim/policy/parts.h"

#include <string.h>

struct mz_placement {
    int32_t ranks, experts, layers, instances; /* instances: room of one layer */
    int32_t *begin;                            /* [layers][E+1] */
    int32_t *rank;                             /* [layers][instances] */
    bool *known;                               /* [layers] */
    int32_t *domain;                           /* [R] */
    int32_t *hosted;                           /* [R] e + 1: rank holds expert e already */
};

mz_code mz_placement_create(mz_arena *arena, const mz_policy_env *env, int32_t slots,
                            mz_placement **out, mz_err *err) {
    mz_placement *p = MZ_NEW(arena, mz_placement, 1);
    if (!p)
        return mz_fail_nomem(err, "the placements of a policy");
    p->ranks = env->ranks;
    p->experts = env->experts;
    p->layers = env->layers;
    p->instances = env->ranks * slots;
    p->begin = MZ_NEW(arena, int32_t, (int64_t)env->layers * (env->experts + 1));
    p->rank = MZ_NEW(arena, int32_t, (int64_t)env->layers * p->instances);
    p->known = MZ_NEW(arena, bool, env->layers);
    p->hosted = MZ_NEW(arena, int32_t, env->ranks);
    if (!p->begin || !p->rank || !p->known || !p->hosted)
        return mz_fail_nomem(err, "the placements of a policy");
    *out = p;
    return mz_copy_domains(env, arena, &p->domain, err);
}

const int32_t *mz_placement_hosts(const mz_placement *p, int32_t layer, const int32_t **begin) {
    if (!p->known[layer])
        return NULL;
    *begin = p->begin + (int64_t)layer * (p->experts + 1);
    return p->rank + (int64_t)layer * p->instances;
}

bool mz_placement_restore(const mz_placement *p, int32_t layer, mz_plan *plan) {
    const int32_t *begin, *rank = mz_placement_hosts(p, layer, &begin);
    if (!rank)
        return false;
    memcpy(plan->begin, begin, sizeof(int32_t) * ((size_t)p->experts + 1));
    memcpy(plan->rank, rank, sizeof(int32_t) * (size_t)begin[p->experts]);
    for (int32_t i = 0; i < begin[p->experts]; i++)
        plan->target[i] = -1;
    return true;
}

/* The former host nearest to `dst`: of its domain first, then the lowest rank. */
static int32_t nearest_host(const mz_placement *p, const int32_t *rank, int32_t hosts,
                            int32_t dst) {
    int32_t best = rank[0];
    for (int32_t i = 1; i < hosts; i++) {
        const bool near = p->domain[rank[i]] == p->domain[dst];
        const bool best_near = p->domain[best] == p->domain[dst];
        if (near != best_near ? near : rank[i] < best)
            best = rank[i];
    }
    return best;
}

/* Copies of expert e to ranks that did not hold it. */
static mz_code move_expert(mz_placement *p, int32_t e, const int32_t *former, int32_t hosts,
                           const mz_move *how, mz_plan *plan, int32_t *moved, mz_err *err) {
    for (int32_t i = 0; i < hosts; i++)
        p->hosted[former[i]] = e + 1;
    for (int32_t i = plan->begin[e]; hosts > 0 && i < plan->begin[e + 1]; i++) {
        const int32_t dst = plan->rank[i];
        if (p->hosted[dst] == e + 1)
            continue;
        p->hosted[dst] = e + 1;
        mz_move copy = *how;
        copy.expert = e;
        copy.src = nearest_host(p, former, hosts, dst);
        copy.dst = dst;
        mz_code code = mz_plan_add_move(plan, copy, err);
        if (code != MZ_OK)
            return code;
        ++*moved;
    }
    return MZ_OK;
}

mz_code mz_placement_change(mz_placement *p, int32_t layer, int64_t weight_bytes,
                            int64_t state_bytes, mz_move_phase phase, mz_move_hide hide,
                            mz_plan *plan, int32_t *moved, mz_err *err) {
    const int32_t instances = plan->begin[p->experts];
    *moved = 0;
    if (layer < 0 || layer >= p->layers || instances > p->instances)
        return mz_fail(err, MZ_EINTERNAL, "%d instances of layer %d in placements of %d, %d layers",
                       instances, layer, p->instances, p->layers);
    const mz_move how = {.kind = MZ_MOVE_WEIGHTS,
                         .phase = phase,
                         .hide = hide,
                         .bytes = weight_bytes + state_bytes,
                         .change = true};
    int32_t *begin = p->begin + (int64_t)layer * (p->experts + 1);
    int32_t *rank = p->rank + (int64_t)layer * p->instances;
    memset(p->hosted, 0, sizeof(int32_t) * (size_t)p->ranks);
    mz_code code = MZ_OK;
    for (int32_t e = 0; code == MZ_OK && p->known[layer] && e < p->experts; e++)
        code = move_expert(p, e, rank + begin[e], begin[e + 1] - begin[e], &how, plan, moved, err);
    if (code != MZ_OK)
        return code;
    memcpy(begin, plan->begin, sizeof(int32_t) * ((size_t)p->experts + 1));
    memcpy(rank, plan->rank, sizeof(int32_t) * (size_t)instances);
    p->known[layer] = true;
    return MZ_OK;
}
