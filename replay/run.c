#include "replay/run.h"

#include "replay/experts.h"
#include "replay/inside.h"
#include "replay/kernel_code.h"
#include "replay/probe.h"
#include "replay/steps.h"
#include "common/base/digest.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One policy at work. */
typedef struct replay_policy {
    mz_replay *replay;
    const char *text;
    mz_planner *planner;
    mz_heap *heap; /* outlives the passes: what a pass got, the next one has */
    mz_engine *engine;
    mz_verify *verify;
    mz_verified verified;     /* of the passes that are over */
    mz_engine_watch verifies; /* with digest: what verification had set */
    void *verifier;
    mz_history *history;
    mz_arena past;  /* of the history */
    mz_plan **kept; /* [layers] of the micro-batch at hand */
    bool named;     /* the error of the step at hand says which policy and step */
    mz_measure *measure;
    char (*digest)[MZ_DIGEST_TEXT]; /* [records] */
    size_t digest_cap;
    double aside_s; /* of the step at hand: what is nobody's */
    mz_measure_step now;
    double *imbalance; /* [calls] of the step at hand */
    size_t imbalance_cap;
} replay_policy;

struct mz_replay {
    mz_replay_options options;
    mz_kernels *kernels;
    mz_transport *transport;
    replay_policy *policy;
    int policies;
    int32_t ranks, local, layers, experts;
    mz_replay_steps *steps;
    mz_probe *probe;
    int64_t executed; /* steps of all policies and passes */
    int64_t reserved; /* by all heaps together: the most */
    int64_t device;   /* bytes in use on the device: the most; 0: none seen */
    bool dealt, side_by_side;
    bool repeated;    /* the fault that was asked for: an update was done twice */
    bool stopped;     /* ... this process was killed or stopped, and goes on */
    char *mine, *all; /* records of this process's ranks, of all */
    int64_t *rows;    /* [ranks] scratch */
    /* with digest */
    mz_digest *seen; /* [local] of the step at hand */
    unsigned char *bytes;
    size_t bytes_cap;
    float *weights;
};

/* ---- what happens inside an engine -------------------------------------------------------------
 */

/* Verification looks at one layer of a step: a fault of another one would prove nothing. `layers`:
 * what is of all layers at once, that one among them. */
static void corrupt(replay_policy *p, int32_t layer) {
    mz_replay *r = p->replay;
    const mz_fault *f = &r->options.fault;
    if (p->verify && layer < r->layers && layer != mz_verify_layer(p->verify))
        return;
    if (f->phase == MZ_PHASE_OPTIMIZER)
        mz_experts_repeat_update(mz_engine_experts(p->engine));
    else
        r->transport->corrupt = !r->transport->corrupted;
}

/* Called at every phase of every rank: the place for faults, and for interrupts. */
static mz_code notice(void *self, int32_t rank, mz_phase phase, int32_t layer, int32_t row,
                      mz_err *err) {
    replay_policy *p = self;
    mz_replay *r = p->replay;
    const mz_fault *f = &r->options.fault;
    if (r->options.stop && *r->options.stop)
        return mz_fail(err, MZ_EABORTED, "interrupted in %s of layer %d", mz_phase_name(phase),
                       layer);
    if (f->kind == MZ_FAULT_NONE || f->kind == MZ_FAULT_MEMORY || f->phase != phase ||
        f->step != r->executed || !mz_transport_holds(r->transport, f->rank))
        return MZ_OK;
    if (f->kind == MZ_FAULT_CORRUPT)
        corrupt(p, layer);
    else if (!r->stopped && (rank == f->rank || rank == r->transport->first)) {
        r->stopped = true;
        kill(getpid(), f->kind == MZ_FAULT_KILL ? SIGKILL : SIGSTOP);
    }
    return MZ_OK;
}

static mz_code digest_rows(mz_replay *r, int32_t rank, const void *rows, size_t bytes,
                           mz_err *err) {
    if (!mz_grow((void **)&r->bytes, &r->bytes_cap, bytes, 1))
        return mz_fail_nomem(err, "a digest");
    mz_kstatus status = mz_kernels_copy(r->kernels, 0, MZ_COPY_OUT, r->bytes, rows, bytes);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(r->kernels, 0);
    if (status == MZ_K_OK)
        mz_digest_add(&r->seen[rank - r->transport->first], r->bytes, bytes);
    return mz_kernel_code(r->kernels, status, err);
}

/* Verification looks first, where there is some. */
static mz_code watch(void *self, const mz_engine_seen *seen, mz_err *err) {
    replay_policy *p = self;
    mz_replay *r = p->replay;
    if (p->verify) {
        const mz_code code = p->verifies(p->verifier, seen, err);
        if (code != MZ_OK)
            return code;
    }
    const size_t bytes = (size_t)seen->tokens * (size_t)r->options.model->hidden *
                         (r->options.type == MZ_F32 ? 4 : 2);
    const void *rows = seen->y ? seen->y : seen->dx;
    return bytes > 0 && rows ? digest_rows(r, seen->rank, rows, bytes, err) : MZ_OK;
}

/* ---- create and free ---------------------------------------------------------------------------
 */

static mz_code create_plans(mz_replay *r, replay_policy *p, mz_err *err) {
    const int32_t slots = mz_planner_traits(p->planner)->slots;
    p->kept = mz_calloc((size_t)r->layers, sizeof *p->kept);
    if (!p->kept)
        return mz_fail_nomem(err, "plans");
    mz_code code = MZ_OK;
    for (int32_t l = 0; code == MZ_OK && l < r->layers; l++)
        code = mz_plan_create(r->ranks, r->experts, slots, &p->kept[l], err);
    return code;
}

static mz_code create_planner(mz_replay *r, replay_policy *p, mz_err *err) {
    const mz_policy_job job = {.model = r->options.model,
                               .cluster = r->options.cluster,
                               .optimizer = r->options.optimizer,
                               .ep = r->ranks,
                               .recompute = r->options.recompute,
                               .seed = r->options.seed,
                               .stop = r->options.stop};
    mz_planner_free(&p->planner);
    return mz_planner_create(p->text, &job, &p->planner, err);
}

static mz_code create_policy(mz_replay *r, replay_policy *p, const char *text, mz_err *err) {
    const mz_transport *t = r->transport;
    p->replay = r;
    p->text = text;
    mz_code code = create_planner(r, p, err);
    if (code != MZ_OK)
        return code;
    code = create_plans(r, p, err);
    if (code == MZ_OK)
        code = mz_heap_create(r->kernels, t->first, r->local, &p->heap, err);
    if (code == MZ_OK && p > r->policy)
        mz_heap_join(p->heap, r->policy->heap);
    if (code == MZ_OK)
        code = mz_measure_create(r->ranks, r->layers, &p->measure, err);
    if (code != MZ_OK)
        return mz_err_prefix(err, "policy %s", text);
    const mz_fault *f = &r->options.fault;
    if (f->kind == MZ_FAULT_MEMORY && p == r->policy && mz_transport_holds(r->transport, f->rank))
        mz_heap_fail_at(p->heap, f->step);
    return code;
}

static mz_code create_scratch(mz_replay *r, mz_err *err) {
    const size_t record = mz_measure_size(r->policy[0].measure);
    const mz_model *m = r->options.model;
    r->mine = mz_calloc((size_t)r->local, record);
    r->all = mz_calloc((size_t)r->ranks, record);
    r->rows = mz_calloc((size_t)r->ranks, sizeof *r->rows);
    if (r->options.digest) {
        r->seen = mz_calloc((size_t)r->local, sizeof *r->seen);
        r->weights = mz_calloc((size_t)(3 * m->hidden * m->expert_intermediate), sizeof(float));
    }
    if (!r->mine || !r->all || !r->rows || (r->options.digest && (!r->seen || !r->weights)))
        return mz_fail_nomem(err, "a replay");
    return MZ_OK;
}

/* Can it happen, and would it be found? */
static mz_code check_fault(const mz_replay_options *o, mz_err *err) {
    const mz_fault *f = &o->fault;
    if (f->kind == MZ_FAULT_NONE)
        return MZ_OK;
    if (f->rank >= o->cluster->ranks)
        return mz_fail(err, MZ_EINPUT, "MIZAN_REPLAY_FAULT: rank %d of %d ranks", f->rank,
                       o->cluster->ranks);
    if (f->kind == MZ_FAULT_CORRUPT && f->phase == MZ_PHASE_OPTIMIZER && o->verify &&
        !mz_verify_sees_updates(o->optimizer, o->type, o->model->hidden,
                                o->model->expert_intermediate))
        return mz_fail(err, MZ_EINPUT,
                       "MIZAN_REPLAY_FAULT: verification compares nothing of the updates of "
                       "--optimizer %s; corrupt:optimizer takes adamw, adamw-bf16, lion, muon or "
                       "skewadam[experts=momentum]",
                       o->optimizer->name);
    return MZ_OK;
}

mz_code mz_replay_create(const mz_replay_options *options, char **policies, int count,
                         mz_kernels *kernels, mz_transport *transport, mz_replay **replay,
                         mz_err *err) {
    mz_replay *r = *replay = mz_calloc(1, sizeof *r);
    if (!r)
        return mz_fail_nomem(err, "a replay");
    r->options = *options;
    r->kernels = kernels;
    r->transport = transport;
    r->ranks = options->cluster->ranks;
    r->local = transport->end - transport->first;
    r->layers = options->model->moe_layers;
    r->experts = options->model->experts;
    r->policies = count;
    mz_code code = check_fault(options, err);
    r->policy = mz_calloc((size_t)count, sizeof *r->policy);
    if (code == MZ_OK && !r->policy)
        code = mz_fail_nomem(err, "policies");
    for (int i = 0; code == MZ_OK && i < count; i++)
        code = create_policy(r, &r->policy[i], policies[i], err);
    if (code == MZ_OK)
        code = mz_replay_steps_create(options->model->top_k > 0 ? options->model->top_k : 1,
                                      &r->steps, err);
    if (code == MZ_OK)
        code = create_scratch(r, err);
    if (code == MZ_OK)
        code = mz_probe_create(kernels, transport, NULL, &r->probe, err);
    if (code != MZ_OK)
        mz_replay_free(replay);
    return code;
}

static void free_policy(mz_replay *r, replay_policy *p) {
    mz_verify_free(&p->verify);
    mz_engine_free(&p->engine);
    mz_heap_free(&p->heap);
    mz_planner_free(&p->planner);
    mz_measure_free(&p->measure);
    mz_arena_free(&p->past);
    for (int32_t l = 0; p->kept && l < r->layers; l++)
        mz_plan_free(&p->kept[l]);
    free(p->kept);
    free(p->digest);
    free(p->imbalance);
}

void mz_replay_free(mz_replay **replay) {
    mz_replay *r = *replay;
    if (!r)
        return;
    for (int i = 0; r->policy && i < r->policies; i++)
        free_policy(r, &r->policy[i]);
    free(r->policy);
    mz_replay_steps_free(&r->steps);
    mz_probe_free(&r->probe);
    free(r->mine);
    free(r->all);
    free(r->rows);
    free(r->seen);
    free(r->bytes);
    free(r->weights);
    free(r);
    *replay = NULL;
}

/* ---- one step ----------------------------------------------------------------------------------
 */

static void note_plan(mz_replay *r, replay_policy *p, const mz_plan *plan) {
    int64_t most = 0, sum = 0;
    memset(r->rows, 0, sizeof *r->rows * (size_t)r->ranks);
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
        r->rows[plan->rank[i]] += plan->forward[i];
    for (int32_t g = 0; g < r->ranks; g++) {
        most = r->rows[g] > most ? r->rows[g] : most;
        sum += r->rows[g];
    }
    if (sum > 0)
        p->imbalance[p->now.calls++] = (double)most * r->ranks / (double)sum;
    p->now.kept_score += plan->kept_score;
    p->now.total_score += plan->total_score;
    if (plan->over_budget && p->now.over_budget_calls++ == 0)
        memcpy(p->now.over_budget, plan->why, sizeof p->now.over_budget - 1);
}

/* Plans a call and keeps the plan. What the planner took is the phase's time; what is around it,
 * checks and the copy, is nobody's. */
static mz_code plan_call(mz_replay *r, replay_policy *p, const mz_replay_step *step,
                         const mz_replay_call *call, int64_t ordinal, mz_plan *keep, mz_err *err) {
    const mz_budget none = {.backward_rows = -1, .backward_send_rows = -1};
    const mz_policy_traits *traits = mz_planner_traits(p->planner);
    const bool asked = mz_planner_asked(p->planner, ordinal, call->micro_batch);
    const mz_planned_call now = {.step = call->step,
                                 .ordinal = ordinal,
                                 .micro_batch = call->micro_batch,
                                 .layer = call->layer,
                                 .load = &call->load,
                                 .pairs =
                                     traits->needs_weights && !step->dealt ? &call->pairs : NULL,
                                 .history = p->history,
                                 .budget = traits->lossy && asked ? &none : NULL};
    const double start = mz_now(), before = mz_planner_measured_s(p->planner);
    const mz_plan *plan = NULL;
    mz_code code = mz_planner_plan(p->planner, &now, &plan, err);
    p->named = code != MZ_OK;
    if (code == MZ_OK)
        code = mz_plan_copy(plan, keep, err);
    if (code != MZ_OK)
        return code;
    const double took = mz_planner_measured_s(p->planner) - before;
    const mz_layer_call past = {call->micro_batch, call->layer, &call->load, NULL};
    mz_history_add(p->history, &past);
    note_plan(r, p, keep);
    mz_engine_charge_all(p->engine, MZ_PHASE_PLANNER, call->layer, took);
    p->aside_s += mz_now() - start - took;
    return notice(p, r->transport->first, MZ_PHASE_PLANNER, call->layer, call->layer, err);
}

static mz_code run_micro_batch(mz_replay *r, replay_policy *p, const mz_replay_step *step,
                               int32_t micro_batch, int64_t ordinal, mz_err *err) {
    const mz_replay_call *call = step->call + (int64_t)micro_batch * step->layers;
    mz_code code = MZ_OK;
    for (int32_t l = 0; code == MZ_OK && l < step->layers; l++) {
        code = plan_call(r, p, step, &call[l], ordinal, p->kept[l], err);
        if (code == MZ_OK)
            code = mz_engine_forward(p->engine, &call[l], p->kept[l], err);
    }
    const bool last = micro_batch + 1 == step->micro_batches;
    for (int32_t l = step->layers - 1; code == MZ_OK && l >= 0; l--)
        code = mz_engine_backward(p->engine, &call[l], p->kept[l], last, err);
    return code;
}

static void fill_record(const mz_replay *r, const replay_policy *p, int32_t rank, double step_s,
                        double moe_s) {
    const mz_engine_figures f = mz_engine_figures_of(p->engine);
    const mz_heap_rank *h = mz_heap_of(p->heap, rank);
    const int32_t at = rank - r->transport->first;
    mz_measure_rank *k = (void *)(r->mine + mz_measure_size(p->measure) * (size_t)at);
    *k = (mz_measure_rank){
        .step_s = step_s, .moe_s = moe_s, .peak = h->peak, .peak_layer = h->peak_layer};
    memcpy(k->at_peak, h->at_peak, sizeof k->at_peak);
    memcpy(k->most, h->most, sizeof k->most);
    snprintf(k->peak_label, sizeof k->peak_label, "%s", h->peak_label);
    if (at == 0) {
        k->dispatch_bytes = f.dispatch_bytes;
        k->combine_bytes = f.combine_bytes;
        k->backward_dispatch_bytes = f.backward_dispatch_bytes;
        k->backward_combine_bytes = f.backward_combine_bytes;
        k->transfer_bytes = f.transfer_bytes;
        k->within_process_bytes = f.moved.within;
        k->between_process_bytes = f.moved.between;
        k->pairs = f.pairs;
        k->kept_pairs = f.kept_pairs;
        k->dropped_pairs = f.dropped_pairs;
    }
    for (int32_t l = 0; l <= r->layers; l++)
        memcpy(mz_measure_detail(k) + (int64_t)l * MZ_PHASES,
               f.detail_s + ((int64_t)l * r->local + at) * MZ_PHASES, sizeof(double) * MZ_PHASES);
}

/* The digest of a step: every rank's rows in order of ranks, then gradients and weights in order of
 * layer and expert. */
static mz_code finish_digest(mz_replay *r, replay_policy *p, mz_err *err) {
    const mz_model *m = r->options.model;
    const size_t values = (size_t)(3 * m->hidden * m->expert_intermediate);
    unsigned char(*of)[MZ_DIGEST_BYTES] = mz_calloc((size_t)(r->local + r->ranks), sizeof *of);
    mz_digest whole = mz_digest_start();
    if (!of)
        return mz_fail_nomem(err, "a digest");
    for (int32_t i = 0; i < r->local; i++)
        mz_digest_of(&r->seen[i], of[i]);
    mz_code code = mz_transport_gather(r->transport, of, sizeof *of, of + r->local, err);
    mz_digest_add(&whole, of + r->local, sizeof *of * (size_t)r->ranks);
    free(of);
    for (int32_t i = 0; code == MZ_OK && i < 2 * r->layers * r->experts; i++) {
        const int32_t cell = i / 2;
        code = mz_experts_read(mz_engine_experts(p->engine), cell / r->experts, cell % r->experts,
                               i % 2 == 0, r->weights, err);
        if (code == MZ_OK)
            mz_digest_add(&whole, r->weights, sizeof(float) * values);
    }
    const size_t record = (size_t)mz_measure_steps(p->measure);
    unsigned char out[MZ_DIGEST_BYTES];
    if (code == MZ_OK &&
        !mz_grow((void **)&p->digest, &p->digest_cap, record + 1, sizeof *p->digest))
        code = mz_fail_nomem(err, "a digest");
    if (code == MZ_OK) {
        mz_digest_of(&whole, out);
        mz_digest_text(out, p->digest[record]);
    }
    return code;
}

/* Figures of the step to all processes. */
static mz_code collect(mz_replay *r, replay_policy *p, double step_s, double moe_s, bool record,
                       mz_err *err) {
    mz_code code = MZ_OK;
    r->transport->doing = "figures of a step";
    r->transport->layer = -1;
    for (int32_t g = r->transport->first; g < r->transport->end; g++)
        fill_record(r, p, g, step_s, moe_s);
    if (record && r->options.digest)
        code = finish_digest(r, p, err);
    if (code == MZ_OK)
        code = mz_transport_gather(r->transport, r->mine, mz_measure_size(p->measure), r->all, err);
    return code == MZ_OK && record ? mz_measure_add(p->measure, &p->now, r->all, err) : code;
}

/* Of rows first: they leave nothing of the step before in a cache, and the product nothing of
 * theirs. */
static mz_code run_probes(mz_replay *r, double seconds[MZ_SPEEDS], mz_err *err) {
    mz_code code = MZ_OK;
    for (int k = MZ_SPEEDS - 1; code == MZ_OK && k >= 0; k--)
        code = mz_probe_run(r->probe, (mz_speed)k, &seconds[k], err);
    return code;
}

static mz_code run_step(mz_replay *r, replay_policy *p, const mz_replay_step *step, int64_t ordinal,
                        bool record, mz_err *err) {
    const size_t calls = (size_t)step->micro_batches * (size_t)step->layers;
    p->now = (mz_measure_step){.ordinal = ordinal, .tokens = step->tokens};
    p->aside_s = 0;
    if (!mz_grow((void **)&p->imbalance, &p->imbalance_cap, calls, sizeof *p->imbalance))
        return mz_fail_nomem(err, "imbalance figures");
    for (int32_t i = 0; r->seen && i < r->local; i++)
        r->seen[i] = mz_digest_start();
    r->transport->doing = "start of a step";
    r->transport->layer = -1;
    mz_code code = record ? run_probes(r, p->now.probe_s, err) : MZ_OK;
    if (code == MZ_OK)
        code = mz_transport_barrier(r->transport, err);
    const double start = mz_now();
    if (code == MZ_OK)
        code = mz_engine_begin_step(p->engine, ordinal, err);
    /* Of the verification's time the engine leaves its own part, reading weights, out itself. */
    const double begun = mz_now(), untimed = mz_engine_figures_of(p->engine).untimed_s;
    if (code == MZ_OK && p->verify)
        code = mz_verify_begin_step(p->verify, ordinal, step->micro_batches, err);
    p->aside_s += mz_now() - begun - (mz_engine_figures_of(p->engine).untimed_s - untimed);
    for (int32_t b = 0; code == MZ_OK && b < step->micro_batches; b++)
        code = run_micro_batch(r, p, step, b, ordinal, err);
    if (code != MZ_OK)
        return code;
    const double moe_s = mz_now() - start - mz_engine_figures_of(p->engine).untimed_s - p->aside_s;
    code = mz_engine_update(p->engine, err);
    if (code != MZ_OK)
        return code;
    r->repeated = r->repeated || mz_experts_repeated(mz_engine_experts(p->engine));
    const double step_s = mz_now() - start - mz_engine_figures_of(p->engine).untimed_s - p->aside_s;
    p->now.imbalance = p->imbalance;
    if (p->verify)
        code = mz_verify_end_step(p->verify, step->call, err);
    if (code == MZ_OK)
        code = collect(r, p, step_s, moe_s, record, err);
    mz_history_end_step(p->history);
    r->executed++;
    return code;
}

/* ---- passes ------------------------------------------------------------------------------------
 */

static mz_code start_engine(mz_replay *r, replay_policy *p, mz_err *err) {
    const mz_model *m = r->options.model;
    const mz_replay_job job = {.ranks = r->ranks,
                               .layers = r->layers,
                               .experts = r->experts,
                               .top_k = m->top_k,
                               .hidden = m->hidden,
                               .intermediate = m->expert_intermediate,
                               .norm_hidden = r->options.norm_hidden,
                               .type = r->options.type,
                               .recompute = r->options.recompute,
                               .traits = mz_planner_traits(p->planner),
                               .optimizer = r->options.optimizer,
                               .instances = mz_planner_instances(p->planner),
                               .seed = r->options.seed};
    mz_code code = mz_engine_create(&job, r->kernels, r->transport, p->heap, &p->engine, err);
    if (code != MZ_OK)
        return code;
    mz_engine_set_notice(p->engine, notice, p);
    const mz_verify_options verify = mz_verify_defaults();
    if (r->options.verify)
        code = mz_verify_create(&job, p->engine, r->transport, &verify, &p->verify, err);
    if (code == MZ_OK && r->options.digest) {
        p->verifies = p->engine->watch;
        p->verifier = p->engine->watcher;
        mz_engine_set_watch(p->engine, watch, p);
    }
    return code;
}

static void end_engine(replay_policy *p) {
    if (p->verify) {
        const mz_verified v = mz_verify_figures(p->verify);
        p->verified.tokens += v.tokens;
        p->verified.values += v.values;
        p->verified.selections += v.selections;
        p->verified.largest = v.largest > p->verified.largest ? v.largest : p->verified.largest;
    }
    mz_verify_free(&p->verify);
    mz_engine_free(&p->engine);
}

static mz_code start_pass(mz_replay *r, replay_policy *p, int64_t window, mz_err *err) {
    int64_t steps = 0, calls = 0;
    mz_code code = create_planner(r, p, err);
    if (code != MZ_OK)
        return code;
    code = start_engine(r, p, err);
    if (code != MZ_OK)
        return mz_err_prefix(err, "policy %s", p->text);
    mz_planner_reach(p->planner, &steps, &calls);
    steps = window > 0 && steps > window ? window : steps;
    mz_arena_free(&p->past);
    return mz_history_create(&p->past, r->layers, r->ranks, r->ranks, r->experts, steps, calls,
                             &p->history, err);
}

/* After a step, in which heaps grow but at its start: what all hold now may be the most so far. */
static void note_reserved(mz_replay *r) {
    int64_t bytes = 0;
    for (int i = 0; i < r->policies; i++)
        bytes += mz_heap_reserved(r->policy[i].heap);
    r->reserved = bytes > r->reserved ? bytes : r->reserved;
}

/* What is in use on the device, the library's own memory and other programs' included, as the
 * device tells; blocks live on past the end of a step. */
static void note_device(mz_replay *r) {
    size_t all = 0, available = 0;
    if (mz_kernels_backend(r->kernels) == MZ_BACKEND_HOST ||
        mz_kernels_memory(r->kernels, &all, &available) != MZ_K_OK)
        return;
    const int64_t used = (int64_t)(all - available);
    r->device = used > r->device ? used : r->device;
}

/* Policies [from, to) over the first `most` steps of the window (0: all). */
static mz_code run_pass(mz_replay *r, const mz_replay_window *window, int from, int to,
                        int64_t most, bool record, mz_progress *progress, mz_err *err) {
    mz_load_source source;
    bool end = false;
    mz_code code = window->restart(window->self, &source, err);
    for (int i = from; code == MZ_OK && i < to; i++)
        code = start_pass(r, &r->policy[i], window->steps, err);
    for (int64_t s = 0; code == MZ_OK && (most == 0 || s < most); s++) {
        mz_replay_step step;
        code = mz_replay_steps_next(r->steps, &source, &step, &end, err);
        if (code != MZ_OK || end)
            break;
        r->dealt = r->dealt || step.dealt;
        for (int i = from; code == MZ_OK && i < to; i++) {
            code = run_step(r, &r->policy[i], &step, s, record, err);
            note_reserved(r);
            if (code == MZ_OK)
                note_device(r);
            if (code != MZ_OK && !r->policy[i].named)
                mz_err_prefix(err, "policy %s, step %lld", r->policy[i].text, (long long)step.step);
            mz_progress_update(progress, r->executed);
        }
    }
    for (int i = from; i < to; i++)
        end_engine(&r->policy[i]);
    return code;
}

/* Bytes of one policy's weights, gradients and optimizer state on this process; what a step takes
 * besides is of the same order at most. */
static double resident_bytes(const mz_replay *r) {
    const mz_model *m = r->options.model;
    const double value_bytes = r->options.type == MZ_F32 ? 4 : 2;
    double bytes = 0;
    for (int64_t i = 0; i < m->tensors; i++) {
        const mz_tensor *t = &m->tensor[i];
        const double values = (double)t->rows * (double)t->cols * (double)t->count;
        bytes += 2 * values * value_bytes +
                 (double)mz_optimizer_state_bytes(r->options.optimizer, t) * (double)t->count;
    }
    return bytes / r->transport->processes;
}

/* Of the process with the least available; known: every process can tell. */
typedef struct replay_room {
    double need; /* bytes of one policy, by all processes that share what is available */
    double available;
    bool known;
} replay_room;

/* All processes get the same answer, so that they decide alike. */
static mz_code look_for_room(const mz_replay *r, replay_room *room, mz_err *err) {
    size_t available = 0; /* where that cannot be told, too */
    mz_kernels_memory(r->kernels, NULL, &available);
    double(*own)[2] = mz_calloc((size_t)(r->local + r->ranks), sizeof *own);
    if (!own)
        return mz_fail_nomem(err, "a replay");
    for (int32_t i = 0; i < r->local; i++) {
        own[i][0] = resident_bytes(r) * mz_transport_sharing(r->transport);
        own[i][1] = (double)available;
    }
    double(*all)[2] = own + r->local;
    const mz_code code = mz_transport_gather(r->transport, own, sizeof *own, all, err);
    *room = (replay_room){.need = own[0][0], .available = INFINITY, .known = true};
    for (int32_t g = 0; code == MZ_OK && g < r->ranks; g++) {
        const bool known = all[g][1] > 0;
        room->known = room->known && known;
        if (known && all[g][1] / all[g][0] < room->available / room->need) {
            room->need = all[g][0];
            room->available = all[g][1];
        }
    }
    free(own);
    return code;
}

static bool takes_turns(const mz_replay *r, const replay_room *room) {
    if (r->policies == 1 || r->options.order != MZ_ORDER_AUTO)
        return r->policies > 1 && r->options.order == MZ_ORDER_STEPS;
    return room->known && 2 * room->need * r->policies < 0.7 * room->available;
}

/* What is held throughout must be there before the work: the system gives out more than it has and
 * then ends a process without a word. */
static mz_code must_fit(const mz_replay *r, const replay_room *room, mz_err *err) {
    const int together = r->side_by_side ? r->policies : 1;
    const double need = room->need * together;
    if (need <= room->available)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "weights, gradients and optimizer state of the experts take %.1f GiB here, %.1f "
                   "GiB are free: give smaller --hidden and --inter or fewer --layers%s",
                   need / 1073741824.0, room->available / 1073741824.0,
                   together > 1 ? ", or --order policies" : "");
}

/* Policies that are done leave their memory to those that follow. */
static void release(mz_replay *r, int from, int to) {
    for (int i = from; i < to; i++)
        mz_heap_release(r->policy[i].heap);
}

/* What of a policy's backward is not done as it is meant. */
static void warn_of_limits(const mz_replay *r, mz_app *app) {
    for (int i = 0; r->transport->process == 0 && i < r->policies; i++) {
        const mz_policy_traits *t = mz_planner_traits(r->policy[i].planner);
        if (t->score_home_bytes > 0)
            mz_warn(&app->log,
                    "policy %s: scores do not travel to the experts here; sources keep as many "
                    "pairs as the plan says",
                    r->policy[i].text);
    }
}

/* At the end of a run. A fault that did not happen proves nothing of what would have found it. One
 * that kills or lacks memory ends the run where it happens. */
static mz_code fault_happened(mz_replay *r, mz_err *err) {
    const mz_fault *f = &r->options.fault;
    if (f->kind == MZ_FAULT_NONE)
        return MZ_OK;
    unsigned char *all = mz_calloc((size_t)(r->local + r->ranks), 1);
    if (!all)
        return mz_fail_nomem(err, "a fault");
    memset(all + r->ranks, r->transport->corrupted || r->repeated || r->stopped, (size_t)r->local);
    mz_code code = mz_transport_gather(r->transport, all + r->ranks, 1, all, err);
    const bool happened = all[f->rank] != 0;
    free(all);
    if (code != MZ_OK || happened)
        return code;
    if (f->kind == MZ_FAULT_MEMORY)
        return mz_fail(err, MZ_EINPUT,
                       "the fault asked for (MIZAN_REPLAY_FAULT) did not happen: rank %d's process "
                       "had fewer than %lld allocations for policy %s",
                       f->rank, (long long)f->step, r->policy[0].text);
    return mz_fail(
        err, MZ_EINPUT,
        "the fault asked for (MIZAN_REPLAY_FAULT) did not happen: of %lld steps executed "
        "step %lld had no %s%s on rank %d",
        (long long)r->executed, (long long)f->step, mz_phase_name(f->phase),
        f->kind == MZ_FAULT_CORRUPT ? " that receives anything" : "", f->rank);
}

mz_code mz_replay_run(mz_replay *r, const mz_replay_window *window, mz_app *app, mz_err *err) {
    warn_of_limits(r, app);
    replay_room room = {0};
    mz_code code = look_for_room(r, &room, err);
    if (code == MZ_OK) {
        r->side_by_side = takes_turns(r, &room);
        code = must_fit(r, &room, err);
    }
    const int batch = r->side_by_side ? r->policies : 1;
    const int64_t passes = window->steps * r->options.repeat + r->options.warmup;
    mz_progress progress = mz_progress_start(&app->log, "replaying", "steps", passes * r->policies);
    for (int from = 0; code == MZ_OK && from < r->policies; from += batch) {
        if (r->options.warmup > 0)
            code =
                run_pass(r, window, from, from + batch, r->options.warmup, false, &progress, err);
        for (int64_t k = 0; code == MZ_OK && k < r->options.repeat; k++)
            code = run_pass(r, window, from, from + batch, 0, true, &progress, err);
        release(r, from, from + batch);
    }
    mz_progress_end(&progress);
    return code == MZ_OK ? fault_happened(r, err) : code;
}

/* ---- results -----------------------------------------------------------------------------------
 */

int64_t mz_replay_records(const mz_replay *r, int policy) {
    return mz_measure_steps(r->policy[policy].measure);
}

mz_code mz_replay_result(mz_replay *r, int policy, mz_run *run, mz_err *err) {
    double room = 0;
    mz_code code = mz_measure_run(r->policy[policy].measure, r->policy[policy].planner, run, err);
    if (code == MZ_OK)
        code = mz_transport_room(r->transport, &room, err);
    run->capacity_bytes = (int64_t)(room / r->local);
    return code;
}

const char *mz_replay_digest(const mz_replay *r, int policy, int64_t record) {
    return r->policy[policy].digest[record];
}

mz_verified mz_replay_verified(const mz_replay *r) {
    mz_verified sum = {0};
    for (int i = 0; i < r->policies; i++) {
        const mz_verified *v = &r->policy[i].verified;
        sum.tokens += v->tokens;
        sum.values += v->values;
        sum.selections += v->selections;
        sum.largest = v->largest > sum.largest ? v->largest : sum.largest;
    }
    return sum;
}

bool mz_replay_dealt(const mz_replay *r) {
    return r->dealt;
}

bool mz_replay_side_by_side(const mz_replay *r) {
    return r->side_by_side;
}

int64_t mz_replay_reserved(const mz_replay *r) {
    return r->reserved;
}

int64_t mz_replay_device_bytes(const mz_replay *r) {
    return r->device;
}
