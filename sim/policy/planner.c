#include "sim/policy/planner.h"

#include "common/base/log.h"
#include "sim/cluster/cluster.h"
#include "sim/model/model.h"

#include <stdlib.h>

struct mz_planner {
    const char *text;
    const mz_policy *policy;
    mz_policy_traits traits;
    int32_t groups, layers;
    void **state;    /* [groups] */
    int32_t started; /* of these */
    mz_plan **plan;  /* one, or [layers][groups] where hosts must outlive a step (interval > 1) */
    int64_t plans;
    double measured_s;
    mz_arena arena;
};

static mz_code start_groups(mz_planner *p, const mz_policy_job *job, mz_err *err) {
    void *options = NULL;
    mz_code code = mz_policy_parse(p->text, &p->arena, &p->policy, &options, err);
    for (int32_t g = 0; code == MZ_OK && g < p->groups; g++) {
        mz_policy_env env;
        code = mz_policy_env_of(job, g, &p->arena, &env, err);
        if (code == MZ_OK)
            code = p->policy->init(&env, options, &p->arena, &p->state[g], &p->traits, err);
        p->started += code == MZ_OK;
    }
    if (code == MZ_OK && (p->traits.sees & MZ_SEES_HISTORY)) {
        p->traits.lag = p->traits.lag < 1 ? 1 : p->traits.lag;
        p->traits.window = p->traits.window < 1 ? 1 : p->traits.window;
    }
    return code;
}

static mz_code make_plans(mz_planner *p, const mz_policy_job *job, mz_err *err) {
    p->plans = p->traits.interval > 1 ? (int64_t)p->layers * p->groups : 1;
    p->plan = MZ_NEW(&p->arena, mz_plan *, p->plans);
    if (!p->plan)
        return mz_fail_nomem(err, "plans");
    mz_code code = MZ_OK;
    for (int64_t i = 0; code == MZ_OK && i < p->plans; i++)
        code = mz_plan_create(job->ep, job->model->experts, p->traits.slots, &p->plan[i], err);
    return code;
}

mz_code mz_planner_create(const char *text, const mz_policy_job *job, mz_planner **planner,
                          mz_err *err) {
    *planner = NULL;
    mz_planner *p = mz_calloc(1, sizeof *p);
    if (!p)
        return mz_fail_nomem(err, "a planner");
    p->groups = job->cluster->ranks / job->ep;
    p->layers = job->model->moe_layers;
    p->text = mz_arena_strdup(&p->arena, text);
    p->state = MZ_NEW(&p->arena, void *, p->groups);
    mz_code code = p->text && p->state ? MZ_OK : mz_fail_nomem(err, "a planner");
    if (code == MZ_OK)
        code = start_groups(p, job, err);
    if (code == MZ_OK)
        code = make_plans(p, job, err);
    if (code != MZ_OK) {
        mz_planner_free(&p);
        return mz_err_prefix(err, "policy %s", text);
    }
    *planner = p;
    return MZ_OK;
}

void mz_planner_free(mz_planner **planner) {
    mz_planner *p = *planner;
    if (!p)
        return;
    for (int32_t g = 0; p->policy && p->policy->release && g < p->started; g++)
        p->policy->release(p->state[g]);
    for (int64_t i = 0; p->plan && i < p->plans; i++)
        mz_plan_free(&p->plan[i]);
    mz_arena_free(&p->arena);
    free(p);
    *planner = NULL;
}

const char *mz_planner_text(const mz_planner *p) {
    return p->text;
}

const mz_policy *mz_planner_policy(const mz_planner *p) {
    return p->policy;
}

const mz_policy_traits *mz_planner_traits(const mz_planner *p) {
    return &p->traits;
}

int32_t mz_planner_instances(const mz_planner *p) {
    return p->plan[0]->instance_cap;
}

void mz_planner_reach(const mz_planner *p, int64_t *steps, int64_t *calls) {
    const mz_policy_traits *t = &p->traits;
    if (!(t->sees & MZ_SEES_HISTORY))
        return;
    int64_t *most = t->history_calls ? calls : steps;
    const int64_t need = (int64_t)t->lag + t->window - 1;
    *most = need > *most ? need : *most;
}

bool mz_planner_asked(const mz_planner *p, int64_t ordinal, int32_t micro_batch) {
    return p->traits.interval <= 1 || (micro_batch == 0 && ordinal % p->traits.interval == 0);
}

/* Everything that decide may see of this call. */
static mz_view view_of(const mz_planner *p, const mz_planned_call *call) {
    const mz_policy_traits *t = &p->traits;
    mz_view view = {.step = call->step, .micro_batch = call->micro_batch, .layer = call->layer};
    if (t->sees & MZ_SEES_CURRENT)
        view.current = call->load;
    if ((t->sees & MZ_SEES_HISTORY) && call->history)
        view.history = mz_history_view(call->history, t->history_calls, t->lag, t->window,
                                       call->group, call->layer);
    view.budget = t->lossy ? call->budget : NULL;
    return view;
}

static mz_code ask(mz_planner *p, const mz_planned_call *call, mz_plan *plan, mz_err *err) {
    mz_code code = MZ_OK;
    const bool decides = mz_planner_asked(p, call->ordinal, call->micro_batch);
    const mz_view view = decides ? view_of(p, call) : (mz_view){0};
    const mz_call now = {.step = call->step,
                         .micro_batch = call->micro_batch,
                         .layer = call->layer,
                         .load = call->load,
                         .pairs = call->pairs};
    const double started = mz_now();
    if (decides)
        code = p->policy->decide(p->state[call->group], &view, plan, err);
    if (code == MZ_OK)
        code = p->policy->route(p->state[call->group], &now, plan, err);
    p->measured_s += mz_now() - started;
    if (code == MZ_OK && p->policy->account)
        code = p->policy->account(p->state[call->group], &now, plan, err);
    return code == MZ_OK ? mz_plan_check(plan, call->load, &p->traits, err) : code;
}

mz_code mz_planner_plan(mz_planner *p, const mz_planned_call *call, const mz_plan **plan,
                        mz_err *err) {
    mz_plan *own = p->plan[p->plans == 1 ? 0 : (int64_t)call->layer * p->groups + call->group];
    const mz_code code = ask(p, call, own, err);
    *plan = own;
    if (code == MZ_OK)
        return MZ_OK;
    return mz_err_prefix(err, "policy %s, step %lld, micro-batch %d, layer %d", p->text,
                         (long long)call->step, call->micro_batch, call->layer);
}

double mz_planner_measured_s(const mz_planner *p) {
    return p->measured_s;
}
