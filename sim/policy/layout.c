#include "sim/policy/parts.h"

#include <string.h>

int32_t mz_mains_per_rank(int32_t ranks, int32_t experts) {
    return (int32_t)(((int64_t)experts + ranks - 1) / ranks);
}

void mz_layout_mains(int32_t ranks, int32_t experts, int32_t *main_rank) {
    int32_t each = experts / ranks, more = experts % ranks;
    int32_t e = 0;
    for (int32_t r = 0; r < ranks; r++)
        for (int32_t i = 0; i < each + (r < more); i++)
            main_rank[e++] = r;
}

enum { ENTRIES_MAX = 1 << 28 };

mz_code mz_slots(const char *policy, const mz_policy_env *env, int64_t wanted, int32_t *slots,
                 mz_err *err) {
    int32_t mains = mz_mains_per_rank(env->ranks, env->experts);
    if (wanted == 0)
        wanted = (int64_t)mains + 2;
    if (wanted < mains)
        return mz_fail(err, MZ_EINPUT,
                       "policy %s: slots=%lld is too few for %d experts on %d ranks; give at "
                       "least %d (mains included)",
                       policy, (long long)wanted, env->experts, env->ranks, mains);
    /* Spreading holds an entry per source and slot of the group. */
    const int64_t most = ENTRIES_MAX / env->ranks / env->ranks;
    if (wanted > most)
        return mz_fail(err, MZ_EINPUT,
                       "policy %s: slots=%lld is too many for %d ranks; give at most %lld", policy,
                       (long long)wanted, env->ranks, (long long)most);
    *slots = (int32_t)wanted;
    return MZ_OK;
}

mz_code mz_copy_domains(const mz_policy_env *env, mz_arena *arena, int32_t **domain, mz_err *err) {
    *domain = MZ_NEW(arena, int32_t, env->ranks);
    if (!*domain)
        return mz_fail_nomem(err, "the domains of a policy");
    if (env->domain && env->domains > 1)
        memcpy(*domain, env->domain, sizeof(int32_t) * (size_t)env->ranks);
    return MZ_OK;
}

void mz_plan_mains(mz_plan *plan, const int32_t *main_rank) {
    mz_plan_reset(plan);
    for (int32_t e = 0; e < plan->experts; e++) {
        plan->begin[e + 1] = e + 1;
        plan->rank[e] = main_rank[e];
        plan->target[e] = -1;
    }
}

mz_code mz_plan_hosts(mz_plan *plan, const int32_t *main_rank, const int64_t *total,
                      const mz_replica *replica, int32_t replicas, int32_t *count, mz_err *err) {
    int32_t experts = plan->experts;
    if ((int64_t)experts + replicas > plan->instance_cap)
        return mz_fail(err, MZ_EINTERNAL, "a plan with room for %d instances cannot hold %d",
                       plan->instance_cap, experts + replicas);
    memset(count, 0, sizeof(int32_t) * (size_t)experts);
    for (int32_t i = 0; i < replicas; i++)
        count[replica[i].expert]++;
    plan->begin[0] = 0;
    for (int32_t e = 0; e < experts; e++) {
        int32_t at = plan->begin[e];
        plan->begin[e + 1] = at + 1 + count[e];
        plan->rank[at] = main_rank[e];
        plan->target[at] = total[e];
        count[e] = at + 1;
    }
    for (int32_t i = 0; i < replicas; i++) {
        int32_t e = replica[i].expert, at = count[e]++;
        plan->rank[at] = replica[i].rank;
        plan->target[at] = replica[i].rows;
        plan->target[plan->begin[e]] -= replica[i].rows;
    }
    return MZ_OK;
}
