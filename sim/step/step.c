#include "sim/step/inside.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

mz_step_options mz_step_defaults(int32_t ranks) {
    int optimizers;
    return (mz_step_options){.zero = 1,
                             .ep = ranks,
                             .dispatch = MZ_DISPATCH_PAIR,
                             .recompute = MZ_RECOMPUTE_NONE,
                             .temporaries = MZ_TEMPORARIES_FUSED,
                             .network = MZ_NETWORK_PORT,
                             .allocator = MZ_ALLOCATOR_EXACT,
                             .optimizer = mz_optimizers(&optimizers)[0],
                             .effects = {.launches = true,
                                         .fifo = true,
                                         .tiles = true,
                                         .other_work = true,
                                         .recompute_exchange = true,
                                         .planner = true},
                             .budget_memory_bytes = -1,
                             .budget_network_bytes = -1};
}

/* ---- create and free
 * ----------------------------------------------------------------------------- */

/* What a replay does not do. */
static mz_code check_layers(const mz_cluster *cluster, const mz_step_options *o, mz_err *err) {
    const struct {
        bool asked;
        const char *what;
    } not_replayed[] = {
        {o->ep != cluster->ranks, "has one expert-parallel group: leave --ep out"},
        {o->dispatch != MZ_DISPATCH_PAIR, "sends a row per pair: pass --dispatch pair"},
        {o->network != MZ_NETWORK_PORT, "needs --network port"},
        {o->recompute == MZ_RECOMPUTE_SELECTIVE,
         "recomputes all or nothing: pass --recompute full"},
        {o->allocator != MZ_ALLOCATOR_EXACT, "counts requested bytes: pass --allocator exact"},
        {o->memory_only, "counts memory while it counts time"},
    };
    for (size_t i = 0; i < sizeof not_replayed / sizeof *not_replayed; i++)
        if (not_replayed[i].asked)
            return mz_fail(err, MZ_EINPUT, "--scope layers, which predicts a replay, %s",
                           not_replayed[i].what);
    return MZ_OK;
}

static mz_code check_options(const mz_model *model, const mz_cluster *cluster,
                             const mz_step_options *o, mz_err *err) {
    if (o->zero < 0 || o->zero > 3)
        return mz_fail(err, MZ_EINPUT, "ZeRO stage %d: there are 0, 1, 2 and 3", o->zero);
    if (o->ep < 1 || cluster->ranks % o->ep != 0)
        return mz_fail(err, MZ_EINPUT,
                       "--ep %d does not divide %d ranks; give a divisor of the ranks", o->ep,
                       cluster->ranks);
    if (model->moe_layers < 1)
        return mz_fail(err, MZ_EINPUT, "model %s has no mixture-of-experts layer", model->name);
    if (!o->optimizer)
        return mz_fail(err, MZ_EINTERNAL, "a step without an optimizer");
    return o->scope == MZ_SCOPE_LAYERS ? check_layers(cluster, o, err) : MZ_OK;
}

static void find_layers(mz_step *s) {
    int32_t moe = 0;
    s->full_layer = s->window_layer = -1;
    for (int32_t l = 0; l < s->layers; l++) {
        const bool window = s->model->is_sliding && s->model->is_sliding[l];
        if (window && s->window_layer < 0)
            s->window_layer = l;
        if (!window && s->full_layer < 0)
            s->full_layer = l;
        if (s->model->is_moe[l])
            s->moe_layer[moe++] = l;
    }
    if (s->full_layer < 0)
        s->full_layer = s->window_layer;
    if (s->window_layer < 0)
        s->window_layer = s->full_layer;
}

/* Other devices of the rank's group, inside its domain and outside. */
static void count_peers(mz_step *s) {
    const mz_topology *t = &s->cluster->topology;
    for (int32_t first = 0; first < s->ranks; first += s->ep) {
        const int32_t end = first + s->ep;
        for (int32_t low = first, high; low < end; low = high) {
            for (high = low; high < end && t->domain[high] == t->domain[low];)
                high++;
            for (int32_t a = low, b; a < high; a = b) {
                for (b = a; b < high && t->device[b] == t->device[a];)
                    b++;
                for (int32_t r = a; r < b; r++) {
                    s->peers_in[r] = high - low - (b - a);
                    s->peers_out[r] = s->ep - (high - low);
                }
            }
        }
    }
}

static bool alloc_builder(mz_step *s) {
    mz_arena *a = &s->arena;
    const int32_t n = s->ranks;
    mz_task **tasks[] = {&s->last,          &s->joined,          &s->span_first,
                         &s->beside,        &s->before_dispatch, &s->before_products,
                         &s->due,           &s->gathered,        &s->reduced,
                         &s->scattered,     &s->counted,         &s->device_last,
                         &s->prefetched[0], &s->prefetched[1]};
    for (size_t i = 0; i < sizeof tasks / sizeof *tasks; i++)
        if (!(*tasks[i] = MZ_NEW(a, mz_task, n)))
            return false;
    for (int i = 0; i < 4; i++)
        if (!(s->lane[i] = MZ_NEW(a, double, n)) || !(s->lane_out[i] = MZ_NEW(a, double, n)))
            return false;
    for (int i = 0; i < 2; i++)
        if (!(s->every[i] = MZ_NEW(a, double, n)))
            return false;
    s->arrived = MZ_NEW(a, mz_task, (int64_t)n * s->chunks);
    s->copied = MZ_NEW(a, double, n);
    s->times = MZ_NEW(a, step_token_times, n);
    s->persistent = MZ_NEW(a, double, n);
    s->drawn = MZ_NEW(a, int64_t, n);
    s->needs = MZ_NEW(a, step_needs, n);
    s->all_ranks = MZ_NEW(a, int32_t, n);
    s->member = MZ_NEW(a, int32_t, n);
    s->peers_in = MZ_NEW(a, int32_t, n);
    s->peers_out = MZ_NEW(a, int32_t, n);
    s->touched = MZ_NEW(a, bool, n);
    s->busy = MZ_NEW(a, double, n);
    s->phase = MZ_NEW(a, double, (int64_t)n *MZ_PHASES);
    s->moe_span = MZ_NEW(a, double, n);
    s->rank_peak = MZ_NEW(a, int64_t, n);
    s->order_begin = MZ_NEW(a, int64_t, n + 1);
    s->queue = MZ_NEW(a, mz_queue, (int64_t)n * s->queues);
    if (s->options.detail || step_alone(s)) {
        s->detail = MZ_NEW(a, double, (int64_t)(s->layers + 1) * n * MZ_PHASES);
        if (!s->detail)
            return false;
    }
    return s->arrived && s->copied && s->times && s->persistent && s->drawn && s->needs &&
           s->all_ranks && s->member && s->peers_in && s->peers_out && s->touched && s->busy &&
           s->phase && s->moe_span && s->rank_peak && s->order_begin && s->queue;
}

static bool alloc_condense(mz_step *s) {
    mz_arena *a = &s->arena;
    const int64_t cells = (int64_t)s->ep * s->ep;
    const bool matrix = s->options.network == MZ_NETWORK_FLOW;
    s->moe_layer = MZ_NEW(a, int32_t, s->moe);
    s->rank_begin = MZ_NEW(a, int32_t, s->ep + 1);
    s->source_rows = MZ_NEW(a, int64_t, s->ep);
    s->capacity = MZ_NEW(a, int64_t, s->ep);
    s->tally.packed = MZ_NEW(a, int64_t, s->ep);
    s->tally.send_in = MZ_NEW(a, int64_t, s->ep);
    s->tally.send_out = MZ_NEW(a, int64_t, s->ep);
    s->tally.copied = MZ_NEW(a, int64_t, s->ep);
    s->stamp = MZ_NEW(a, int64_t, 2 * (int64_t)s->ep);
    s->caps = MZ_NEW(a, int64_t, s->ep);
    s->saved = MZ_NEW(a, int64_t, s->ranks);
    if (matrix) {
        s->matrix = MZ_NEW(a, int64_t, cells);
        s->matrix_again = MZ_NEW(a, int64_t, cells);
    }
    return s->moe_layer && s->rank_begin && s->tally.copied && s->source_rows && s->capacity &&
           s->tally.packed && s->tally.send_in && s->tally.send_out && s->stamp && s->caps &&
           s->saved && (!matrix || (s->matrix && s->matrix_again));
}

static void fill_constants(mz_step *s) {
    const mz_device *d = &s->cluster->device;
    for (int32_t r = 0; r < s->ranks; r++) {
        const uint64_t device = (uint64_t)s->cluster->topology.device[r];
        mz_rng rng = mz_rng_make(s->options.seed, mz_rng_stream(device, 0, 0, 2));
        const double factor = 1 + d->noise_persistent * mz_rng_normal(&rng);
        s->persistent[r] = factor < 0.5 ? 0.5 : factor;
        s->all_ranks[r] = r;
    }
    find_layers(s);
    count_peers(s);
    s->launches = step_count_launches(s);
    s->width = step_widths_of(s->model);
}

static mz_code make_graph(mz_step *s, mz_err *err) {
    const int64_t hint = (int64_t)s->ranks * s->layers * 16;
    mz_code code = mz_graph_create(s->ranks, &s->cluster->topology, s->options.network,
                                   s->options.flow_accuracy, hint, &s->graph, err);
    for (int64_t i = 0; code == MZ_OK && i < (int64_t)s->ranks * s->queues; i++)
        code = mz_graph_queue(s->graph, (int32_t)(i / s->queues), &s->queue[i], err);
    return code;
}

/* What planning one call costs, and where: decide before the call or beside the step, a solver in
 * route at every call. A policy that states its time has it for both. */
static mz_code planner_costs(mz_step *s, const char *policy, mz_err *err) {
    const mz_policy_traits *t = &s->traits;
    const int32_t experts = s->model->experts;
    double decide = t->planner_seconds, route = t->planner_seconds;
    char name[64];
    mz_code code = MZ_OK;
    if (t->planner_stated && !(isfinite(decide) && decide >= 0))
        return mz_fail(err, MZ_EINTERNAL, "a planning time of %g s", decide);
    if (!t->planner_stated)
        code = mz_cost_planner(s->cluster, policy, s->ep, experts, &decide, err);
    if (code == MZ_OK && t->route_plans && !t->planner_stated) {
        snprintf(name, sizeof name, "%s.route", policy);
        code = mz_cost_planner(s->cluster, name, s->ep, experts, &route, err);
    }
    if (code != MZ_OK || !s->options.effects.planner)
        return code;
    s->route_cost = t->route_plans ? route : 0;
    *(t->plan_hidden ? &s->hidden_cost : &s->decide_cost) = decide;
    return MZ_OK;
}

mz_code mz_step_create(const mz_model *model, const mz_cluster *cluster,
                       const mz_step_options *options, const char *policy_name,
                       const mz_policy_traits *traits, mz_step **step, mz_err *err) {
    mz_code code = check_options(model, cluster, options, err);
    mz_step *s = code == MZ_OK ? mz_calloc(1, sizeof *s) : NULL;
    if (code != MZ_OK || !s)
        return code != MZ_OK ? code : mz_fail_nomem(err, "a step");
    s->model = model;
    s->cluster = cluster;
    s->options = *options;
    s->traits = *traits;
    s->ranks = cluster->ranks;
    s->ep = options->ep;
    s->groups = s->ranks / s->ep;
    s->layers = model->layers;
    s->moe = model->moe_layers;
    s->mains = (model->experts + s->ep - 1) / s->ep;
    s->sequence = options->sequence_length > 0 ? options->sequence_length : 4096;
    s->cost = (mz_cost_effects){options->effects.tiles, options->effects.tiles};
    s->queues = options->effects.fifo ? (int32_t)STREAMS : (int32_t)MZ_PHASES;
    s->chunks = traits->chunks > 1 && !step_alone(s) ? traits->chunks : 1;
    s->prefetch = traits->prefetch > 1 ? 2 : 1;
    s->saved_micro_batch = -1;
    if (alloc_builder(s) && alloc_condense(s))
        fill_constants(s);
    else
        code = mz_fail_nomem(err, "a step");
    if (code == MZ_OK && !options->memory_only)
        code = planner_costs(s, policy_name, err);
    if (code == MZ_OK)
        code = step_sizes_of(s, err);
    if (code == MZ_OK && !options->memory_only && step_alone(s))
        code = layers_create(s, err);
    else if (code == MZ_OK && !options->memory_only)
        code = make_graph(s, err);
    if (code != MZ_OK)
        mz_step_free(&s);
    *step = s;
    return code;
}

void mz_step_watch(mz_step *s, mz_step_charged charged, void *self) {
    s->charged = charged;
    s->charged_self = self;
}

void mz_step_watch_events(mz_step *s, mz_step_happened happened, void *self) {
    s->happened = happened;
    s->happened_self = self;
}

void mz_step_free(mz_step **step) {
    mz_step *s = *step;
    if (!s)
        return;
    mz_graph_free(&s->graph);
    mz_ports_free(&s->ports);
    void *const arrays[] = {
        s->tokens,      s->score_flops,    s->call,       s->work,      s->message, s->move,
        s->cell,        s->cell_rank,      s->cell_pairs, s->sending,   s->mark,    s->span,
        s->begin,       s->interval,       s->order,      s->chunk,     s->by_rank, s->expert_rows,
        s->expert_turn, s->instance_again, s->chunk_rows, s->chunk_end, s->alone,   s->further};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    mz_arena_free(&s->arena);
    free(s);
    *step = NULL;
}

/* ---- one step
 * ------------------------------------------------------------------------------------ */

/* Attention by sequence bounds, once per (micro-batch, rank) of a step. */
static void note_sequences(mz_step *s, const mz_step_head *head, int64_t rows) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t first = head->sequence_begin ? head->sequence_begin[i] : 0;
        const int64_t count = head->sequence_begin ? head->sequence_begin[i + 1] - first : 0;
        const int64_t *length = count > 0 ? head->sequence_tokens + first : NULL;
        double *flops = s->score_flops + 2 * i;
        flops[0] = step_score_flops(s, s->full_layer, head->tokens[i], length, count);
        flops[1] = s->window_layer == s->full_layer
                       ? flops[0]
                       : step_score_flops(s, s->window_layer, head->tokens[i], length, count);
    }
}

/* Sums of bytes are 63-bit numbers; what the model itself takes is below half of that (model.c). */
static const double BYTES_MAX = 1e18;

static mz_code check_countable(double bytes, const char *what, mz_err *err) {
    if (bytes <= BYTES_MAX)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "%s of a micro-batch take %.3g bytes, more than can be counted (1e18): fewer "
                   "tokens per rank or shorter sequences",
                   what, bytes);
}

mz_code mz_step_begin(mz_step *s, const mz_step_head *head, mz_err *err) {
    if (head->layers != s->moe)
        return mz_fail(err, MZ_EINPUT,
                       "the trace has %d MoE layers, model %s has %d; pass the model it was "
                       "recorded from",
                       head->layers, s->model->name, s->moe);
    const int64_t rows = (int64_t)head->micro_batches * s->ranks;
    const int64_t calls = (int64_t)head->micro_batches * s->moe * s->groups;
    const int64_t works = rows * s->moe;
    const int64_t parts = s->chunks > 1 ? s->chunks : 0;
    if (!mz_grow((void **)&s->chunk, &s->chunk_cap, (size_t)(works * parts), sizeof *s->chunk) ||
        !mz_grow((void **)&s->chunk_end, &s->chunk_end_cap, (size_t)(calls * parts),
                 sizeof *s->chunk_end) ||
        !mz_grow((void **)&s->tokens, &s->tokens_cap, (size_t)rows, sizeof *s->tokens) ||
        !mz_grow((void **)&s->score_flops, &s->score_flops_cap, 2 * (size_t)rows,
                 sizeof *s->score_flops) ||
        !mz_grow((void **)&s->call, &s->call_cap, (size_t)calls, sizeof *s->call) ||
        !mz_grow((void **)&s->work, &s->work_cap, (size_t)works, sizeof *s->work))
        return mz_fail_nomem(err, "the calls of a step");
    if (step_alone(s) && layers_begin(s, works, err) != MZ_OK)
        return err->code;
    memcpy(s->tokens, head->tokens, sizeof *s->tokens * (size_t)rows);
    note_sequences(s, head, rows);
    for (int64_t i = 0; i < rows; i++) {
        const mz_code code = check_countable(step_most_token_bytes(s, i), "activations", err);
        if (code != MZ_OK)
            return code;
    }
    for (int64_t i = 0; i < calls; i++)
        s->call[i].present = false;
    s->number = head->step;
    s->micro_batches = head->micro_batches;
    s->messages = s->moves = s->furthers = 0;
    s->saved_micro_batch = -1;
    return MZ_OK;
}

static mz_code check_call(const mz_step *s, int32_t group, int32_t micro_batch, int32_t layer,
                          const mz_load *load, mz_err *err) {
    if (group < 0 || group >= s->groups || micro_batch < 0 || micro_batch >= s->micro_batches ||
        layer < 0 || layer >= s->moe)
        return mz_fail(err, MZ_EINTERNAL, "no call of group %d, micro-batch %d, layer %d in a step",
                       group, micro_batch, layer);
    if (load->sources != s->ep || load->experts != s->model->experts)
        return mz_fail(err, MZ_EINTERNAL, "a load of %d sources and %d experts for %d ranks and %d",
                       load->sources, load->experts, s->ep, s->model->experts);
    return check_countable(step_most_pair_bytes(s, load->pairs), "routed rows", err);
}

static void start_saving(mz_step *s, int32_t micro_batch) {
    if (s->saved_micro_batch == micro_batch)
        return;
    memset(s->saved, 0, sizeof *s->saved * (size_t)s->ranks);
    s->saved_micro_batch = micro_batch;
}

mz_code mz_step_budget(mz_step *s, int32_t group, int32_t micro_batch, int32_t layer,
                       const mz_load *load, mz_budget *budget, mz_err *err) {
    mz_code code = check_call(s, group, micro_batch, layer, load, err);
    if (code != MZ_OK)
        return code;
    start_saving(s, micro_batch);
    *budget = (mz_budget){.backward_rows = -1, .backward_send_rows = -1};
    if (!step_alone(s) || s->options.budget_memory_bytes >= 0)
        budget->rank_rows = s->caps;
    for (int32_t r = 0; budget->rank_rows && r < s->ep; r++) {
        s->caps[r] = step_rank_budget(s, group, micro_batch, layer, load, r);
        if (budget->backward_rows < 0 || s->caps[r] < budget->backward_rows)
            budget->backward_rows = s->caps[r];
    }
    const double row = (double)s->sizes.row;
    const double sent = s->traits.resend ? 2 * row + PAIR_NUMBER_BYTES : row;
    if (s->options.budget_network_bytes >= 0)
        budget->backward_send_rows = (int64_t)(s->options.budget_network_bytes / sent);
    return MZ_OK;
}

mz_code mz_step_add_call(mz_step *s, int32_t group, int32_t micro_batch, int32_t layer,
                         const mz_load *load, const mz_pairs *pairs, const mz_plan *plan,
                         mz_err *err) {
    mz_code code = check_call(s, group, micro_batch, layer, load, err);
    if (code != MZ_OK)
        return code;
    if (plan->ranks != s->ep || plan->experts != load->experts)
        return mz_fail(err, MZ_EINTERNAL, "a plan of %d ranks and %d experts for %d and %d",
                       plan->ranks, plan->experts, s->ep, load->experts);
    start_saving(s, micro_batch);
    const step_at at = step_at_of(s, micro_batch, layer, group);
    code = step_condense(s, load, pairs, plan, &at, err);
    for (int32_t r = 0; code == MZ_OK && r < s->ep; r++)
        s->saved[group * s->ep + r] += step_saved_of_call(s, at.call, &at.work[r]);
    return code;
}

static mz_code check_complete(const mz_step *s, mz_err *err) {
    const int64_t calls = (int64_t)s->micro_batches * s->moe * s->groups;
    for (int64_t i = 0; i < calls; i++)
        if (!s->call[i].present && !(s->options.one_group && i % s->groups))
            return mz_fail(err, MZ_EINTERNAL,
                           "step %lld was finished without group %lld of micro-batch %lld, layer "
                           "%lld",
                           (long long)s->number, (long long)(i % s->groups),
                           (long long)(i / s->groups / s->moe),
                           (long long)(i / s->groups % s->moe));
    return MZ_OK;
}

static void clear_builder(mz_step *s, mz_err *err) {
    if (s->graph)
        mz_graph_clear(s->graph);
    s->code = MZ_OK;
    s->err = err;
    s->marks = s->spans = 0;
    s->sent = s->received = 0;
    s->transfer_bytes = s->between_bytes = 0;
    memset(s->traffic_bytes, 0, sizeof s->traffic_bytes);
    for (int32_t r = 0; r < s->ranks; r++) {
        s->device_last[r] = -1;
        s->last[r] = s->reduced[r] = s->scattered[r] = s->gathered[r] = -1;
        s->prefetched[0][r] = s->prefetched[1][r] = -1;
        s->needs[r].count = 0;
        s->drawn[r] = 0;
    }
    int32_t decided = 0;
    for (int32_t b = 0; b < s->micro_batches; b++)
        decided += step_decided(s, b);
    s->planner_s = s->moe * (decided * s->decide_cost + s->micro_batches * s->route_cost);
    s->hidden_s = s->moe * decided * s->hidden_cost;
}

static mz_code run_graph(mz_step *s, mz_step_outcome *outcome, mz_err *err) {
    for (int32_t b = 0; b < s->micro_batches; b++) {
        step_build_forward(s, b);
        step_build_backward(s, b);
    }
    step_build_tail(s);
    if (s->code != MZ_OK)
        return s->code;
    mz_graph_result result;
    const mz_code code = mz_graph_run(s->graph, &result, err);
    return code == MZ_OK ? step_collect_outcome(s, &result, outcome, err) : code;
}

mz_code mz_step_finish(mz_step *s, mz_step_outcome *outcome, mz_err *err) {
    mz_code code = check_complete(s, err);
    if (code != MZ_OK)
        return code;
    *outcome = (mz_step_outcome){0};
    if (s->options.memory_only)
        return step_memory(s, outcome, err);
    clear_builder(s, err);
    if (step_alone(s))
        layers_run(s, outcome);
    else
        code = run_graph(s, outcome, err);
    if (code == MZ_OK)
        code = step_memory(s, outcome, err);
    s->ordinal++;
    return code;
}
