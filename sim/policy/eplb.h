/* The planner of policy eplb (policy_eplb.c), for the policies that use it and for tests. */
#ifndef MIZAN_SIM_POLICY_EPLB_H
#define MIZAN_SIM_POLICY_EPLB_H

#include "sim/policy/parts.h"

typedef struct mz_eplb mz_eplb;

/* Can `groups` of consecutive experts be packed on the nodes (domains) of the environment: nodes of
 * equal size, groups a multiple of their number and a divisor of E? */
bool mz_eplb_hierarchy(const mz_policy_env *env, int32_t groups);

/* room[r]: slots of rank r, at least E in all; they are numbered rank by rank. groups > 0 (where
 * mz_eplb_hierarchy allows it and all ranks have equal room): hierarchical; 0: global. */
mz_code mz_eplb_create(mz_arena *arena, const mz_policy_env *env, int32_t groups,
                       const int32_t *room, mz_eplb **eplb, mz_err *err);

/* slot[p]: expert of slot p. O(slots log slots). */
mz_code mz_eplb_solve(mz_eplb *eplb, const int64_t *total, int32_t *slot, mz_err *err);

/* The plan's hosts, instances of an expert by ascending slot, targets -1. */
void mz_eplb_hosts(const mz_eplb *eplb, const int32_t *slot, mz_plan *plan);

#endif
