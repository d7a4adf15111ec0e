/* The engine: what it refuses, clocks, lanes, the order of calls. Layer calls are in layer*.c. */
#include "replay/engine.h"

#include "common/base/arena.h"
#include "common/base/log.h"
#include "replay/data.h"
#include "replay/kernel_code.h"
#include "replay/layer.h"

#include <stdlib.h>
#include <string.h>

/* ---- time
 * ----------------------------------------------------------------------------------------- */

static double *detail_at(mz_engine *e, int32_t rank, mz_phase phase, int32_t layer) {
    return e->detail_s + ((int64_t)layer * e->local + (rank - e->first)) * MZ_PHASES + phase;
}

static mz_code notify(mz_engine *e, int32_t rank, mz_phase phase, int32_t layer, int32_t row,
                      mz_err *err) {
    return e->notice ? e->notice(e->noticer, rank, phase, layer, row, err) : MZ_OK;
}

/* What was asked to be corrupted in a phase is nothing that comes later. */
static mz_code phase_over(mz_engine *e, mz_code code) {
    e->transport->corrupt = false;
    return code;
}

mz_code engine_charge(mz_engine *e, int32_t rank, mz_phase phase, int32_t layer, double start,
                      mz_err *err) {
    const mz_kstatus status = mz_kernels_sync(e->kernels, 0);
    if (status != MZ_K_OK)
        return engine_kernel(e, status, mz_phase_name(phase), rank, layer, err);
    *detail_at(e, rank, phase, layer) += mz_now() - start;
    return phase_over(e, notify(e, rank, phase, layer, layer, err));
}

void engine_charge_shared(mz_engine *e, mz_phase phase, int32_t layer, double start) {
    const double part = (mz_now() - start) / e->local;
    for (int32_t r = e->first; r < e->end; r++)
        *detail_at(e, r, phase, layer) += part;
}

void engine_untimed(mz_engine *e, double start) {
    /* What is still under way must not run into what is timed next; an operation that failed is
     * found by the next one that is waited for. */
    mz_kernels_sync(e->kernels, 0);
    e->figures.untimed_s += mz_now() - start;
}

mz_code engine_meet(mz_engine *e, mz_err *err) {
    const double start = mz_now();
    const mz_code code =
        e->transport->processes > 1 ? mz_transport_barrier(e->transport, err) : MZ_OK;
    engine_untimed(e, start);
    return code;
}

void mz_engine_charge_all(mz_engine *e, mz_phase phase, int32_t layer, double seconds) {
    for (int32_t r = e->first; r < e->end; r++)
        *detail_at(e, r, phase, layer) += seconds;
}

/* ---- failures, lanes
 * ------------------------------------------------------------------------------- */

mz_code engine_kernel(mz_engine *e, mz_kstatus status, const char *what, int32_t rank,
                      int32_t layer, mz_err *err) {
    if (mz_kernel_code(e->kernels, status, err) == MZ_OK)
        return MZ_OK;
    return mz_err_prefix(err, "%s of layer %d on rank %d", what, layer, rank);
}

mz_code engine_add_lane(mz_engine *e, int32_t from, int32_t to, const void *send, void *receive,
                        int64_t bytes, int64_t *counter, mz_err *err) {
    const bool sends = from >= e->first && from < e->end, receives = to >= e->first && to < e->end;
    if (bytes == 0 || (!sends && !receives))
        return MZ_OK;
    engine_lanes *l = &e->lanes;
    if (!mz_grow((void **)&l->lane, &l->cap, (size_t)l->count + 1, sizeof *l->lane))
        return mz_fail_nomem(err, "the lanes of an exchange");
    l->lane[l->count++] = (mz_lane){from, to, send, receive, (size_t)bytes};
    if (counter && sends && from != to)
        *counter += bytes;
    return MZ_OK;
}

/* For messages: what is of all layers names none. */
static void say_doing(mz_engine *e, mz_phase phase, int32_t layer) {
    e->transport->doing = mz_phase_name(phase);
    e->transport->layer = layer < e->job.layers ? layer : -1;
}

mz_code engine_exchange(mz_engine *e, mz_phase phase, int32_t layer, int32_t row, mz_err *err) {
    const mz_transport_bytes before = e->transport->moved;
    memset(e->exchange_s, 0, sizeof *e->exchange_s * (size_t)e->local);
    say_doing(e, phase, layer);
    mz_code code = notify(e, e->first, phase, layer, row, err);
    if (code == MZ_OK)
        code =
            mz_transport_exchange(e->transport, e->lanes.lane, e->lanes.count, e->exchange_s, err);
    e->lanes.count = 0;
    e->figures.moved.within += e->transport->moved.within - before.within;
    e->figures.moved.between += e->transport->moved.between - before.between;
    for (int32_t i = 0; i < e->local; i++)
        *detail_at(e, e->first + i, phase, row) += e->exchange_s[i];
    return phase_over(e, code);
}

mz_code engine_gather(mz_engine *e, const void *mine, size_t bytes, void *all, mz_phase phase,
                      int32_t layer, double start, mz_err *err) {
    say_doing(e, phase, layer);
    mz_code code = notify(e, e->first, phase, layer, layer, err);
    if (code == MZ_OK)
        code = mz_transport_gather(e->transport, mine, bytes, all, err);
    engine_charge_shared(e, phase, layer, start);
    return phase_over(e, code);
}

/* ---- create
 * --------------------------------------------------------------------------------------- */

static mz_code check_traits(const mz_policy_traits *t, mz_err *err) {
    const struct {
        bool asked;
        const char *what;
    } beyond[] = {
        {t->chunks > 1, "overlaps parts of a layer call (chunks)"},
        {t->sharded_weights, "shards the experts' weights over the group"},
        {t->free_replicas, "has hosts that cost nothing, which no machine has"},
        {t->router_gradient_kept, "keeps the router's gradient of pairs without one of their own "
                                  "(router_gradient=kept)"},
    };
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++)
        if (beyond[i].asked)
            return mz_fail(err, MZ_EINPUT,
                           "the policy %s: a replay cannot do that; choose another policy or "
                           "option, or simulate",
                           beyond[i].what);
    return MZ_OK;
}

/* The rows that all data is made of, in context memory. */
static mz_code make_base(mz_engine *e, mz_err *err) {
    const int64_t values = MZ_DATA_ROWS * e->job.hidden;
    float *base = mz_calloc((size_t)values, sizeof *base);
    if (!base)
        return mz_fail_nomem(err, "the rows that data is made of");
    mz_data_base(&e->job, base);
    mz_kernels *k = e->kernels;
    void *wide = NULL;
    mz_kstatus status = mz_kernels_alloc(k, (size_t)(values * e->value_bytes), &e->shared->base);
    if (status == MZ_K_OK)
        status = mz_kernels_alloc(k, sizeof *base * (size_t)values, &wide);
    if (status == MZ_K_OK)
        status = mz_kernels_copy(k, 0, MZ_COPY_IN, wide, base, sizeof *base * (size_t)values);
    if (status == MZ_K_OK)
        status = mz_convert(k, 0, e->job.type, e->shared->base, MZ_F32, wide, values);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(k, 0);
    mz_kernels_free(k, wide);
    free(base);
    return engine_kernel(e, status, "data", e->first, 0, err);
}

static void *array(int64_t n, size_t size, bool *failed) {
    void *memory = mz_calloc((size_t)(n > 0 ? n : 1), size);
    *failed = *failed || !memory;
    return memory;
}

static mz_code make_arrays(mz_engine *e, mz_err *err) {
    const mz_replay_job *j = &e->job;
    const int64_t ranks = (int64_t)e->local + j->ranks;
    bool failed = false;
    e->exchange_s = array(e->local, sizeof *e->exchange_s, &failed);
    e->detail_s =
        array((int64_t)(j->layers + 1) * e->local * MZ_PHASES, sizeof *e->detail_s, &failed);
    e->rank = array(e->local, sizeof *e->rank, &failed);
    struct engine_shared *s = e->shared = array(1, sizeof *s, &failed);
    if (failed)
        return mz_fail_nomem(err, "the engine");
    s->expert_of = array(j->instances, sizeof *s->expert_of, &failed);
    s->counts = array(ranks * j->experts, sizeof *s->counts, &failed);
    s->moved = array(ranks * j->instances, sizeof *s->moved, &failed);
    s->taken = array(j->ranks, sizeof *s->taken, &failed);
    for (int i = 0; i < 2; i++)
        s->group_begin[i] = array(j->instances + 1, sizeof *s->group_begin[i], &failed);
    for (int32_t r = 0; r < e->local; r++) {
        e->rank[r].held = array((int64_t)j->layers * LAYER_HELD, sizeof *e->rank[r].held, &failed);
        e->rank[r].list_begin = array(j->experts + 1, sizeof *e->rank[r].list_begin, &failed);
    }
    return failed ? mz_fail_nomem(err, "the engine") : MZ_OK;
}

mz_code mz_engine_create(const mz_replay_job *job, mz_kernels *kernels, mz_transport *transport,
                         mz_heap *heap, mz_engine **out, mz_err *err) {
    *out = NULL;
    mz_code code = check_traits(job->traits, err);
    if (code != MZ_OK)
        return code;
    mz_engine *e = mz_calloc(1, sizeof *e);
    if (!e)
        return mz_fail_nomem(err, "the engine");
    *e = (mz_engine){.job = *job,
                     .kernels = kernels,
                     .transport = transport,
                     .heap = heap,
                     .first = transport->first,
                     .end = transport->end,
                     .local = transport->end - transport->first,
                     .value_bytes = job->type == MZ_BF16 ? 2 : 4};
    code = make_arrays(e, err);
    if (code == MZ_OK)
        code = make_base(e, err);
    if (code == MZ_OK)
        code = mz_experts_create(e, &e->experts, err);
    if (code != MZ_OK) {
        mz_engine_free(&e);
        return code;
    }
    *out = e;
    return MZ_OK;
}

static void free_shared(mz_engine *e) {
    struct engine_shared *s = e->shared;
    if (!s)
        return;
    layer_free_rows(e);
    mz_kernels_free(e->kernels, s->base);
    layout_free(&s->forward);
    layout_free(&s->backward);
    free(s->expert_of);
    free(s->counts);
    free(s->moved);
    free(s->taken);
    for (int i = 0; i < 2; i++)
        free(s->group_begin[i]);
    for (int i = 0; i < LAYER_SCRATCH; i++)
        free(s->scratch[i]);
    free(s);
}

void mz_engine_free(mz_engine **engine) {
    mz_engine *e = *engine;
    if (!e)
        return;
    if (e->experts)
        mz_experts_free(&e->experts);
    if (e->rank)
        layer_give_all(e);
    for (int32_t r = 0; e->rank && r < e->local; r++) {
        free(e->rank[r].held);
        free(e->rank[r].list_begin);
        free(e->rank[r].drawn);
    }
    free_shared(e);
    free(e->rank);
    free(e->lanes.lane);
    free(e->exchange_s);
    free(e->detail_s);
    free(e);
    *engine = NULL;
}

/* ---- a step
 * --------------------------------------------------------------------------------------- */

mz_code mz_engine_begin_step(mz_engine *e, int64_t ordinal, mz_err *err) {
    e->ordinal = ordinal;
    memset(e->detail_s, 0,
           sizeof *e->detail_s * (size_t)(e->job.layers + 1) * (size_t)e->local * MZ_PHASES);
    e->figures = (mz_engine_figures){.detail_s = e->detail_s};
    const double start = mz_now();
    mz_heap_start_step(e->heap);
    engine_untimed(e, start);
    return mz_experts_begin_step(e->experts, err);
}

static mz_code check_call(const mz_engine *e, const mz_replay_call *call, const mz_plan *plan,
                          mz_err *err) {
    const mz_replay_job *j = &e->job;
    if (call->layer < 0 || call->layer >= j->layers || call->load.sources != j->ranks ||
        call->load.experts != j->experts || plan->ranks != j->ranks ||
        plan->experts != j->experts || plan->begin[plan->experts] > j->instances)
        return mz_fail(err, MZ_EINTERNAL,
                       "layer %d: a call of %d ranks and %d experts with %d instances does not fit "
                       "a job of %d layers, %d ranks, %d experts, %d instances",
                       call->layer, call->load.sources, call->load.experts,
                       plan->begin[plan->experts], j->layers, j->ranks, j->experts, j->instances);
    if (j->traits->strided_pairs && plan->has_backward)
        return mz_fail(err, MZ_EINTERNAL,
                       "layer %d: which pairs stay is not found again where pairs are dealt in "
                       "strides: such policies go with a full backward",
                       call->layer);
    for (int32_t r = 0; r < j->ranks; r++) {
        const int64_t n = call->pairs.pair_begin[r + 1] - call->pairs.pair_begin[r];
        if (n != call->load.source[r])
            return mz_fail(err, MZ_EINPUT,
                           "step %lld, micro-batch %d, layer %d: rank %d has %lld pairs, the trace "
                           "counts %lld",
                           (long long)call->step, call->micro_batch, call->layer, r, (long long)n,
                           (long long)call->load.source[r]);
    }
    return MZ_OK;
}

mz_code mz_engine_forward(mz_engine *e, const mz_replay_call *call, const mz_plan *plan,
                          mz_err *err) {
    mz_code code = check_call(e, call, plan, err);
    if (code != MZ_OK)
        return code;
    layer_call c = layer_call_of(e, call, plan, err);
    for (int32_t r = e->first; r < e->end; r++) {
        e->figures.pairs += call->load.source[r];
        for (int32_t x = 0; plan->has_drops && x < plan->experts; x++)
            e->figures.dropped_pairs += plan->dropped[(int64_t)r * plan->experts + x];
    }
    return layer_forward(&c);
}

mz_code mz_engine_backward(mz_engine *e, const mz_replay_call *call, const mz_plan *plan,
                           bool last_micro_batch, mz_err *err) {
    mz_code code = check_call(e, call, plan, err);
    if (code != MZ_OK)
        return code;
    layer_call c = layer_call_of(e, call, plan, err);
    for (int32_t r = e->first; r < e->end; r++)
        for (int32_t x = 0; x < plan->experts; x++) {
            const int64_t cell = (int64_t)r * plan->experts + x;
            e->figures.kept_pairs +=
                plan->has_backward
                    ? plan->kept[cell]
                    : call->load.count[cell] - (plan->has_drops ? plan->dropped[cell] : 0);
        }
    return layer_backward(&c, last_micro_batch);
}

mz_code mz_engine_update(mz_engine *e, mz_err *err) {
    return mz_experts_update(e->experts, err);
}

mz_engine_figures mz_engine_figures_of(const mz_engine *e) {
    return e->figures;
}

void mz_engine_set_watch(mz_engine *e, mz_engine_watch watch, void *self) {
    e->watch = watch;
    e->watcher = self;
}

void mz_engine_set_notice(mz_engine *e, mz_engine_notice notice, void *self) {
    e->notice = notice;
    e->noticer = self;
}

mz_experts *mz_engine_experts(mz_engine *e) {
    return e->experts;
}
