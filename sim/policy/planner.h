/* One policy at work on one job: a state per expert-parallel group, the plans that outlive a step,
 * and the order in which a policy is asked. Simulator and replay plan through this file, so that
 * the same trace gives the same plans in both.
 *
 * Threads: one planner belongs to one thread at a time. */
#ifndef MIZAN_SIM_POLICY_PLANNER_H
#define MIZAN_SIM_POLICY_PLANNER_H

#include "sim/policy/history.h"
#include "sim/policy/policy.h"

typedef struct mz_planner mz_planner;

/* text: "lrmoe[keep=0.5]". What `job` points to outlives the planner. MZ_EINPUT, prefixed with the
 * policy's text, as mz_policy_parse and the policy's init have it. */
mz_code mz_planner_create(const char *text, const mz_policy_job *job, mz_planner **planner,
                          mz_err *err);
void mz_planner_free(mz_planner **planner);

const char *mz_planner_text(const mz_planner *planner);
const mz_policy *mz_planner_policy(const mz_planner *planner);
const mz_policy_traits *mz_planner_traits(const mz_planner *planner);
/* Instances that a plan may have; every plan of the planner has room for so many. */
int32_t mz_planner_instances(const mz_planner *planner);

/* Raises *steps or *calls to how far back the policy looks (mz_history_create). */
void mz_planner_reach(const mz_planner *planner, int64_t *steps, int64_t *calls);

typedef struct mz_planned_call {
    int64_t step, ordinal; /* as the trace numbers it; 0, 1, 2, ... of the run */
    int32_t micro_batch, layer, group;
    const mz_load *load;     /* the group's rows */
    const mz_pairs *pairs;   /* the group's slice, or NULL */
    mz_history *history;     /* of the whole job; NULL: nobody looks back */
    const mz_budget *budget; /* of a lossy policy that is asked; else NULL */
} mz_planned_call;

/* Does the policy decide in this micro-batch of this step? With an interval its plan of a layer
 * lasts for so many steps, so it is asked in the first micro-batch of the first of them. */
bool mz_planner_asked(const mz_planner *planner, int64_t ordinal, int32_t micro_batch);

/* Decides where the policy is asked, routes, and checks. *plan belongs to the planner and lives
 * until the next call (of this layer and group, where plans outlive a step). A policy sees what its
 * traits say and nothing else. Errors name policy, step, micro-batch and layer. */
mz_code mz_planner_plan(mz_planner *planner, const mz_planned_call *call, const mz_plan **plan,
                        mz_err *err);

/* Wall time spent in decide and route so far; never part of a result that must repeat. */
double mz_planner_measured_s(const mz_planner *planner);

#endif
