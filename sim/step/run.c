#include "sim/step/run.h"

#include "sim/policy/planner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One policy of the run: its planner, one step builder, and what it adds up. */
typedef struct sim_policy {
    mz_planner *planner;
    const mz_policy_traits *traits; /* the planner's */
    mz_step *step;
    /* sums over the run */
    double *step_s; /* [steps], grows */
    size_t step_cap;
    double *imbalance; /* [calls], grows */
    size_t imbalance_cap;
    double *bound_hosts, *bound_any; /* the same, where bounds are wanted */
    size_t hosts_cap, any_cap;
    mz_balance *balance;
    int64_t calls;
    double moe_s, planner_s, planner_hidden_s, phase_s[MZ_PHASES], time_s;
    int64_t tokens, dispatch, combine, backward_dispatch, backward_combine, transfer, between;
    int64_t pairs, kept, dropped;
    double kept_score, total_score;
    int64_t peak, at_peak[MZ_MEM_CATEGORIES];
    char peak_label[128];
    bool overflowed;
    char oom[256];
    int64_t over_budget_calls;
    char over_budget[192];
    double *detail; /* [steps][detail_layers][ranks][MZ_PHASES], grows; where wanted */
    size_t detail_cap;
    int64_t *rank_memory; /* [ranks][MZ_MEM_CATEGORIES] maxima */
    double *rank_busy;    /* [ranks] sums */
    double *rank_mean;    /* [ranks] sums / steps */
    int64_t *rank_peak;   /* [ranks] maxima */
    mz_sizing replicas, token_buffers;
} sim_policy;

struct mz_sim {
    const mz_model *model;
    const mz_cluster *cluster;
    mz_step_options options;
    int32_t ranks, groups, experts, layers;
    sim_policy *policy;
    int policies;
    int64_t steps;
    mz_history *history;
    mz_rows_met met;
    int64_t *rows; /* [ranks] computed pairs of one call */
    bool bounds;
    mz_load computed; /* with bounds: totals of the pairs that a group computes */
    int64_t *scratch; /* [experts] */
    mz_arena arena;
};

static mz_code alloc_load(mz_arena *arena, int32_t sources, int32_t experts, mz_load *load,
                          mz_err *err) {
    *load = (mz_load){.sources = sources, .experts = experts};
    load->count = MZ_NEW(arena, int64_t, (int64_t)sources * experts);
    load->total = MZ_NEW(arena, int64_t, experts);
    load->source = MZ_NEW(arena, int64_t, sources);
    if (!load->count || !load->total || !load->source)
        return mz_fail_nomem(err, "a load matrix");
    return MZ_OK;
}

static void note_rows(void *self, const mz_step_charge *charge) {
    mz_sim *sim = self;
    mz_rows_meet(&sim->met, sim->cluster->device.measured, charge->work, charge->rows);
}

static mz_code init_policy(mz_sim *sim, sim_policy *p, const char *text, mz_err *err) {
    p->rank_busy = MZ_NEW(&sim->arena, double, sim->ranks);
    p->rank_mean = MZ_NEW(&sim->arena, double, sim->ranks);
    p->rank_peak = MZ_NEW(&sim->arena, int64_t, sim->ranks);
    p->rank_memory = MZ_NEW(&sim->arena, int64_t, (int64_t)sim->ranks * MZ_MEM_CATEGORIES);
    if (!p->rank_memory || !mz_sizing_init(&p->replicas, sim->ranks, &sim->arena) ||
        !mz_sizing_init(&p->token_buffers, sim->ranks, &sim->arena) || !p->rank_busy ||
        !p->rank_mean || !p->rank_peak)
        return mz_fail_nomem(err, "a policy");
    const mz_policy_job job = {.model = sim->model,
                               .cluster = sim->cluster,
                               .optimizer = sim->options.optimizer,
                               .ep = sim->options.ep,
                               .recompute = sim->options.recompute != MZ_RECOMPUTE_NONE,
                               .seed = sim->options.seed,
                               .stop = sim->options.stop};
    mz_code code = mz_planner_create(text, &job, &p->planner, err);
    if (code != MZ_OK)
        return code;
    p->traits = mz_planner_traits(p->planner);
    code = mz_step_create(sim->model, sim->cluster, &sim->options,
                          mz_planner_policy(p->planner)->name, p->traits, &p->step, err);
    if (code == MZ_OK && sim->cluster->device.measured)
        mz_step_watch(p->step, note_rows, sim);
    return code == MZ_OK ? MZ_OK : mz_err_prefix(err, "policy %s", text);
}

/* As deep as some policy looks, and no deeper than there are steps (0: not known). */
static mz_code init_history(mz_sim *sim, int64_t steps_expected, mz_err *err) {
    int64_t steps = 0, calls = 0;
    for (int i = 0; i < sim->policies; i++)
        mz_planner_reach(sim->policy[i].planner, &steps, &calls);
    if (steps_expected > 0 && steps > steps_expected)
        steps = steps_expected;
    return mz_history_create(&sim->arena, sim->layers, sim->ranks, sim->options.ep, sim->experts,
                             steps, calls, &sim->history, err);
}

mz_code mz_sim_create(const mz_model *model, const mz_cluster *cluster,
                      const mz_step_options *options, char **policies, int count, mz_sim **out,
                      mz_err *err) {
    mz_sim *sim = mz_calloc(1, sizeof *sim);
    if (!sim)
        return mz_fail_nomem(err, "a simulation");
    sim->model = model;
    sim->cluster = cluster;
    sim->options = *options;
    sim->ranks = cluster->ranks;
    sim->groups = sim->ranks / options->ep;
    sim->experts = model->experts;
    sim->layers = model->moe_layers;
    sim->policies = count;
    sim->policy = MZ_NEW(&sim->arena, sim_policy, count);
    mz_code code = sim->policy ? MZ_OK : mz_fail_nomem(err, "policies");
    for (int i = 0; code == MZ_OK && i < count; i++)
        code = init_policy(sim, &sim->policy[i], policies[i], err);
    sim->rows = MZ_NEW(&sim->arena, int64_t, sim->ranks);
    if (code == MZ_OK && !sim->rows)
        code = mz_fail_nomem(err, "scratch rows");
    if (code != MZ_OK) {
        mz_sim_free(&sim);
        return code;
    }
    *out = sim;
    return MZ_OK;
}

void mz_sim_free(mz_sim **out) {
    mz_sim *sim = *out;
    if (!sim)
        return;
    for (int i = 0; sim->policy && i < sim->policies; i++) {
        sim_policy *p = &sim->policy[i];
        mz_planner_free(&p->planner);
        mz_step_free(&p->step);
        free(p->step_s);
        free(p->imbalance);
        free(p->bound_hosts);
        free(p->bound_any);
        free(p->detail);
    }
    mz_arena_free(&sim->arena);
    free(sim);
    *out = NULL;
}

mz_code mz_sim_want_bounds(mz_sim *sim, mz_err *err) {
    sim->computed = (mz_load){.sources = sim->options.ep, .experts = sim->experts};
    sim->computed.total = MZ_NEW(&sim->arena, int64_t, sim->experts);
    sim->scratch = MZ_NEW(&sim->arena, int64_t, sim->experts);
    mz_code code =
        sim->computed.total && sim->scratch ? MZ_OK : mz_fail_nomem(err, "totals of experts");
    for (int i = 0; code == MZ_OK && i < sim->policies; i++) {
        sim_policy *p = &sim->policy[i];
        code = mz_balance_create(&sim->arena, sim->options.ep, sim->experts,
                                 mz_planner_instances(p->planner), &p->balance, err);
    }
    sim->bounds = code == MZ_OK;
    return code;
}

bool mz_sim_wants_weights(const mz_sim *sim) {
    for (int i = 0; i < sim->policies; i++)
        if (sim->policy[i].traits->needs_weights)
            return true;
    return false;
}

bool mz_sim_wants_pairs(const mz_sim *sim) {
    return sim->options.dispatch != MZ_DISPATCH_PAIR || mz_sim_wants_weights(sim);
}

/* ---- one layer call ----------------------------------------------------------------------------
 */

typedef struct group_call {
    mz_load load;   /* the group's rows of the job's load; sums in the sim's own arrays */
    mz_pairs pairs; /* the group's slice; offsets stay absolute */
    bool has_pairs;
} group_call;

static mz_code slice_group(mz_sim *sim, const mz_layer_call *call, int32_t group, mz_load *sums,
                           group_call *slice, mz_err *err) {
    const int32_t n = sim->options.ep;
    slice->has_pairs = call->pairs != NULL;
    if (call->pairs) {
        slice->pairs = *call->pairs;
        slice->pairs.sources = n;
        slice->pairs.token_begin += (int64_t)group * n;
        slice->pairs.pair_begin += (int64_t)group * n;
        slice->pairs.tokens = slice->pairs.token_begin[n] - slice->pairs.token_begin[0];
        slice->pairs.pairs = slice->pairs.pair_begin[n] - slice->pairs.pair_begin[0];
    }
    if (sim->groups == 1) {
        slice->load = *call->load;
        return MZ_OK;
    }
    if (!sums->total) {
        mz_code code = alloc_load(&sim->arena, 0, sim->experts, sums, err);
        sums->source = MZ_NEW(&sim->arena, int64_t, n);
        if (code != MZ_OK || !sums->source)
            return mz_fail_nomem(err, "a group's load");
        sums->sources = n;
    }
    slice->load = *sums;
    slice->load.count = call->load->count + (int64_t)group * n * sim->experts;
    mz_load_sum(&slice->load);
    return MZ_OK;
}

static void add_rows(mz_sim *sim, const mz_plan *plan, int32_t group) {
    int64_t *rows = sim->rows + (int64_t)group * sim->options.ep;
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
        rows[plan->rank[i]] += plan->forward[i];
}

/* Rows of the busiest rank in the best case, over all groups of one call. */
typedef struct best_rows {
    int64_t hosts, any;
} best_rows;

static mz_code add_bounds(mz_sim *sim, sim_policy *p, const mz_plan *plan, best_rows *best,
                          mz_err *err) {
    const bool unlimited = p->traits->free_replicas || p->traits->open_slots;
    mz_load *load = &sim->computed;
    load->pairs = 0;
    for (int32_t e = 0; e < plan->experts; e++) {
        load->total[e] = 0;
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            load->total[e] += plan->forward[i];
        load->pairs += load->total[e];
    }
    int64_t hosts = 0;
    mz_code code = mz_bound_hosts(p->balance, plan, load, &hosts, err);
    const int64_t any =
        mz_bound_any(load, plan->ranks, unlimited ? 0 : p->traits->slots, sim->scratch);
    best->hosts = hosts > best->hosts ? hosts : best->hosts;
    best->any = any > best->any ? any : best->any;
    return code;
}

/* max/mean over the ranks of the job. */
static mz_code note_imbalance(mz_sim *sim, sim_policy *p, best_rows best, mz_err *err) {
    int64_t most = 0, sum = 0;
    for (int32_t r = 0; r < sim->ranks; r++) {
        most = sim->rows[r] > most ? sim->rows[r] : most;
        sum += sim->rows[r];
    }
    if (sum == 0)
        return MZ_OK;
    const size_t calls = (size_t)p->calls + 1, kept = sim->bounds ? calls : 0;
    if (!mz_grow((void **)&p->imbalance, &p->imbalance_cap, calls, sizeof(double)) ||
        !mz_grow((void **)&p->bound_hosts, &p->hosts_cap, kept, sizeof(double)) ||
        !mz_grow((void **)&p->bound_any, &p->any_cap, kept, sizeof(double)))
        return mz_fail_nomem(err, "imbalance figures");
    const double mean = (double)sum / sim->ranks;
    p->imbalance[p->calls] = (double)most / mean;
    if (sim->bounds) {
        p->bound_hosts[p->calls] = (double)best.hosts / mean;
        p->bound_any[p->calls] = (double)best.any / mean;
    }
    p->calls++;
    return MZ_OK;
}

static void note_plan(sim_policy *p, const mz_plan *plan) {
    if (plan->over_budget && p->over_budget_calls++ == 0)
        memcpy(p->over_budget, plan->why, sizeof p->over_budget);
    p->pairs += plan->pairs;
    p->kept += plan->kept_pairs;
    p->dropped += plan->dropped_pairs;
    p->kept_score += plan->kept_score;
    p->total_score += plan->total_score;
}

static mz_code plan_group(mz_sim *sim, sim_policy *p, const mz_layer_call *call, int64_t step,
                          int32_t group, group_call *slice, best_rows *best, mz_err *err) {
    mz_budget budget = {.backward_rows = -1, .backward_send_rows = -1};
    mz_planned_call now = {.step = step,
                           .ordinal = sim->steps,
                           .micro_batch = call->micro_batch,
                           .layer = call->layer,
                           .group = group,
                           .load = &slice->load,
                           .pairs = slice->has_pairs ? &slice->pairs : NULL,
                           .history = sim->history};
    const mz_plan *plan = NULL;
    mz_code code = MZ_OK;
    if (p->traits->lossy && mz_planner_asked(p->planner, sim->steps, call->micro_batch)) {
        now.budget = &budget;
        code = mz_step_budget(p->step, group, call->micro_batch, call->layer, &slice->load, &budget,
                              err);
    }
    if (code == MZ_OK)
        code = mz_planner_plan(p->planner, &now, &plan, err);
    if (code == MZ_OK)
        code = mz_step_add_call(p->step, group, call->micro_batch, call->layer, &slice->load,
                                now.pairs, plan, err);
    if (code != MZ_OK)
        return code;
    add_rows(sim, plan, group);
    note_plan(p, plan);
    return sim->bounds ? add_bounds(sim, p, plan, best, err) : MZ_OK;
}

static mz_code plan_call(mz_sim *sim, const mz_layer_call *call, int64_t step, mz_load *sums,
                         mz_err *err) {
    for (int i = 0; i < sim->policies; i++) {
        sim_policy *p = &sim->policy[i];
        best_rows best = {0, 0};
        memset(sim->rows, 0, sizeof(int64_t) * (size_t)sim->ranks);
        for (int32_t g = 0; g < (sim->options.one_group ? 1 : sim->groups); g++) {
            group_call slice;
            mz_code code = slice_group(sim, call, g, sums, &slice, err);
            if (code == MZ_OK)
                code = plan_group(sim, p, call, step, g, &slice, &best, err);
            if (code != MZ_OK)
                return code;
        }
        mz_code code = note_imbalance(sim, p, best, err);
        if (code != MZ_OK)
            return code;
    }
    mz_history_add(sim->history, call);
    return MZ_OK;
}

/* ---- steps -------------------------------------------------------------------------------------
 */

static void note_memory(mz_sim *sim, sim_policy *p, const mz_step_outcome *o) {
    for (int32_t r = 0; r < sim->ranks; r++)
        if (o->rank_peak_bytes[r] > p->rank_peak[r])
            p->rank_peak[r] = o->rank_peak_bytes[r];
    for (int64_t i = 0; i < (int64_t)sim->ranks * MZ_MEM_CATEGORIES; i++)
        if (o->rank_memory_bytes[i] > p->rank_memory[i])
            p->rank_memory[i] = o->rank_memory_bytes[i];
    mz_sizing_add(&p->replicas, o->rank_replica_bytes);
    mz_sizing_add(&p->token_buffers, o->rank_token_buffer_bytes);
    if (o->peak_bytes > p->peak) {
        p->peak = o->peak_bytes;
        memcpy(p->at_peak, o->at_peak, sizeof p->at_peak);
        memcpy(p->peak_label, o->peak_label, sizeof p->peak_label);
    }
    if (!o->fits && !p->overflowed) {
        p->overflowed = true;
        memcpy(p->oom, o->oom, sizeof p->oom);
    }
}

static int32_t detail_layers(const mz_sim *sim) {
    return sim->model->layers + 1;
}

static mz_code note_detail(mz_sim *sim, sim_policy *p, const double *detail, mz_err *err) {
    const size_t one = (size_t)detail_layers(sim) * (size_t)sim->ranks * MZ_PHASES;
    if (!detail)
        return MZ_OK;
    if (!mz_grow((void **)&p->detail, &p->detail_cap, one * ((size_t)sim->steps + 1),
                 sizeof *p->detail))
        return mz_fail_nomem(err, "times by layer, rank and phase; leave --detail out");
    memcpy(p->detail + one * (size_t)sim->steps, detail, sizeof *detail * one);
    return MZ_OK;
}

static mz_code finish_step(mz_sim *sim, sim_policy *p, mz_err *err) {
    mz_step_outcome o;
    mz_code code = mz_step_finish(p->step, &o, err);
    if (code != MZ_OK)
        return mz_err_prefix(err, "policy %s", mz_planner_text(p->planner));
    if (!mz_grow((void **)&p->step_s, &p->step_cap, (size_t)sim->steps + 1, sizeof(double)))
        return mz_fail_nomem(err, "step times");
    p->step_s[sim->steps] = o.time_s;
    p->time_s += o.time_s;
    p->moe_s += o.moe_s;
    p->planner_s += o.planner_s;
    p->planner_hidden_s += o.planner_hidden_s;
    for (int k = 0; k < MZ_PHASES; k++)
        p->phase_s[k] += o.phase_s[k];
    p->tokens += o.tokens;
    p->dispatch += o.dispatch_bytes;
    p->combine += o.combine_bytes;
    p->backward_dispatch += o.backward_dispatch_bytes;
    p->backward_combine += o.backward_combine_bytes;
    p->transfer += o.transfer_bytes;
    p->between += o.between_bytes;
    for (int32_t r = 0; o.rank_busy_s && r < sim->ranks; r++)
        p->rank_busy[r] += o.rank_busy_s[r];
    note_memory(sim, p, &o);
    return note_detail(sim, p, o.detail_s, err);
}

static mz_code begin_step(mz_sim *sim, const mz_step_head *head, mz_err *err) {
    for (int i = 0; i < sim->policies; i++) {
        mz_code code = mz_step_begin(sim->policy[i].step, head, err);
        if (code != MZ_OK)
            return mz_err_prefix(err, "policy %s", mz_planner_text(sim->policy[i].planner));
    }
    return MZ_OK;
}

static mz_code run_step(mz_sim *sim, const mz_load_source *source, const mz_step_head *head,
                        mz_app *app, mz_load *sums, mz_err *err) {
    const int64_t calls = (int64_t)head->micro_batches * head->layers;
    for (int64_t c = 0; c < calls; c++) {
        mz_layer_call call;
        if (app->stop && *app->stop)
            return mz_fail(err, MZ_EABORTED, "interrupted in step %lld", (long long)head->step);
        mz_code code = source->next_call(source->self, &call, err);
        if (code == MZ_OK)
            code = plan_call(sim, &call, head->step, sums, err);
        if (code != MZ_OK)
            return code;
    }
    for (int i = 0; i < sim->policies; i++) {
        mz_code code = finish_step(sim, &sim->policy[i], err);
        if (code != MZ_OK)
            return mz_err_prefix(err, "step %lld", (long long)head->step);
    }
    sim->steps++;
    mz_history_end_step(sim->history);
    return MZ_OK;
}

mz_code mz_sim_run(mz_sim *sim, const mz_load_source *source, mz_app *app, int64_t steps_expected,
                   mz_err *err) {
    if (source->ranks != sim->ranks || source->experts != sim->experts ||
        source->layers != sim->layers)
        return mz_fail(err, MZ_EINTERNAL,
                       "loads have %d ranks, %d experts, %d layers; the simulation %d, %d, %d",
                       source->ranks, source->experts, source->layers, sim->ranks, sim->experts,
                       sim->layers);
    mz_progress progress = mz_progress_start(&app->log, "simulating", "steps", steps_expected);
    mz_load sums = {0};
    mz_code code = init_history(sim, steps_expected, err);
    while (code == MZ_OK) {
        mz_step_head head;
        bool end = false;
        code = source->next_step(source->self, &head, &end, err);
        if (code != MZ_OK || end)
            break;
        code = begin_step(sim, &head, err);
        if (code == MZ_OK)
            code = run_step(sim, source, &head, app, &sums, err);
        mz_progress_update(&progress, sim->steps);
    }
    mz_progress_end(&progress);
    return code;
}

/* ---- results -----------------------------------------------------------------------------------
 */

const mz_step *mz_sim_step(const mz_sim *sim, int policy) {
    return sim->policy[policy].step;
}

const mz_rows_met *mz_sim_rows_met(const mz_sim *sim) {
    return &sim->met;
}

void mz_sim_sizing(const mz_sim *sim, int policy, mz_sized *replicas, mz_sized *token_buffers) {
    *replicas = mz_sizing_result(&sim->policy[policy].replicas);
    *token_buffers = mz_sizing_result(&sim->policy[policy].token_buffers);
}

static void put_phases(const sim_policy *p, double steps, mz_run *run) {
    run->phases = 0;
    for (int k = 0; k < MZ_PHASES; k++) {
        run->phase_name[k] = mz_phase_name((mz_phase)k);
        run->phase_s[k] = p->phase_s[k] / steps;
        run->phases++;
    }
}

static void put_quality(const sim_policy *p, mz_run *run) {
    const double pairs = p->pairs > 0 ? (double)p->pairs : 1;
    run->lossy = p->traits->lossy;
    run->kept_pairs_fraction = p->pairs > 0 ? (double)p->kept / pairs : 1;
    run->dropped_pairs_fraction = (double)p->dropped / pairs;
    run->kept_score_mass = p->total_score > 0 ? p->kept_score / p->total_score : NAN;
    snprintf(run->score_source, sizeof run->score_source, "%s",
             p->total_score > 0 && p->traits->score_source ? p->traits->score_source : "");
}

static mz_code sorted_stat(const double *values, int64_t count, mz_stat *stat, mz_err *err) {
    double *copy = malloc(sizeof(double) * (size_t)(count ? count : 1));
    if (!copy)
        return mz_fail_nomem(err, "a statistic");
    memcpy(copy, values, sizeof(double) * (size_t)count);
    *stat = mz_stat_of(copy, count);
    free(copy);
    return MZ_OK;
}

static int64_t per_step(int64_t total, int64_t steps) {
    return (total + steps / 2) / steps;
}

/* Which ranks share a process is known of routed experts alone: a replay's processes are devices.
 */
static void put_traffic(const mz_sim *sim, const sim_policy *p, mz_run *run) {
    const int64_t all =
        p->dispatch + p->combine + p->backward_dispatch + p->backward_combine + p->transfer;
    run->dispatch_bytes = per_step(p->dispatch, sim->steps);
    run->combine_bytes = per_step(p->combine, sim->steps);
    run->backward_dispatch_bytes = per_step(p->backward_dispatch, sim->steps);
    run->backward_combine_bytes = per_step(p->backward_combine, sim->steps);
    run->transfer_bytes = per_step(p->transfer, sim->steps);
    run->split = sim->options.scope == MZ_SCOPE_LAYERS;
    run->within_process_bytes = per_step(all - p->between, sim->steps);
    run->between_process_bytes = per_step(p->between, sim->steps);
}

static mz_code put_run(mz_sim *sim, sim_policy *p, mz_run *run, mz_err *err) {
    const double steps = (double)sim->steps;
    *run = (mz_run){.moe_time_s = p->moe_s / steps,
                    .tokens_per_s = p->time_s > 0 ? (double)p->tokens / p->time_s : 0,
                    .layer_calls = (double)p->calls / steps,
                    .peak_memory_bytes = p->peak,
                    .capacity_bytes = (int64_t)(sim->cluster->device.memory_bytes /
                                                sim->cluster->ranks_per_device),
                    .fits = !p->overflowed,
                    .planner_s = p->planner_s / steps,
                    .planner_hidden_s = p->planner_hidden_s / steps,
                    .bounds = sim->bounds,
                    .planner_measured_s = mz_planner_measured_s(p->planner) / steps,
                    .steps = sim->steps,
                    .step_s = p->step_s,
                    .ranks = sim->ranks,
                    .rank_busy_s = p->rank_mean,
                    .rank_peak_bytes = p->rank_peak,
                    .rank_memory_bytes = p->rank_memory,
                    .detail_layers = p->detail ? detail_layers(sim) : 0,
                    .detail_s = p->detail};
    snprintf(run->policy, sizeof run->policy, "%s", mz_planner_text(p->planner));
    snprintf(run->system, sizeof run->system, "%s", p->traits->label ? p->traits->label : "");
    snprintf(run->oom, sizeof run->oom, "%s", p->oom);
    run->over_budget_calls = p->over_budget_calls;
    memcpy(run->over_budget, p->over_budget, sizeof run->over_budget);
    snprintf(run->peak_at, sizeof run->peak_at, "%s", p->peak_label);
    memcpy(run->memory_bytes, p->at_peak, sizeof run->memory_bytes);
    put_traffic(sim, p, run);
    put_phases(p, steps, run);
    put_quality(p, run);
    mz_code code = sorted_stat(p->step_s, sim->steps, &run->step_time_s, err);
    if (code == MZ_OK)
        code = sorted_stat(p->imbalance, p->calls, &run->rank_imbalance, err);
    if (code == MZ_OK && sim->bounds)
        code = sorted_stat(p->bound_hosts, p->calls, &run->imbalance_bound_hosts, err);
    if (code == MZ_OK && sim->bounds)
        code = sorted_stat(p->bound_any, p->calls, &run->imbalance_bound_any, err);
    return code;
}

mz_code mz_sim_results(mz_sim *sim, mz_run *runs, mz_err *err) {
    if (sim->steps == 0)
        return mz_fail(err, MZ_EINPUT, "no step was completed, so there is no result");
    for (int i = 0; i < sim->policies; i++) {
        sim_policy *p = &sim->policy[i];
        for (int32_t r = 0; r < sim->ranks; r++)
            p->rank_mean[r] = p->rank_busy[r] / (double)sim->steps;
        mz_code code = put_run(sim, p, &runs[i], err);
        if (code != MZ_OK)
            return code;
    }
    return MZ_OK;
}
