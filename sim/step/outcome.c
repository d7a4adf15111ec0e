/* From start and finish times to the figures of a step.
 *
 * Busy time of a phase on a rank: for a kernel from start to finish; for an exchange from the
 * moment its last member has entered (until then a member waits for others) to the moment this
 * member may leave. Planning is charged time, the same on every rank. "launch_wait" is the time in
 * which a rank neither computes nor takes part in an exchange that has begun: launches, host
 * synchronisation, planning, and waiting for other ranks. Each phase is reported for the rank on
 * which it is longest, so phases of one step need not add up to the step. */
#include "sim/step/inside.h"

#include "common/base/sort.h"

#include <string.h>

/* Begin of every task: kernels when they start, members of an exchange when all have entered. */
static mz_code find_begins(mz_step *s, const mz_graph_result *result, mz_err *err) {
    const int64_t tasks = mz_graph_tasks(s->graph);
    if (!mz_grow((void **)&s->begin, &s->begin_cap, (size_t)tasks, sizeof *s->begin))
        return mz_fail_nomem(err, "the times of a step");
    if (tasks > 0)
        memcpy(s->begin, result->start_s, sizeof *s->begin * (size_t)tasks);
    for (size_t i = 0; i < s->marks; i++) {
        const step_exchange_mark *x = &s->mark[i];
        double entered = 0;
        for (mz_task t = x->first; t < x->first + x->members; t++)
            if (result->start_s[t] > entered)
                entered = result->start_s[t];
        /* With the flow network a member may leave before the last one enters. */
        for (mz_task t = x->first; t < x->first + x->members; t++)
            s->begin[t] = entered < result->finish_s[t] ? entered : result->finish_s[t];
    }
    return MZ_OK;
}

void step_clear_detail(mz_step *s) {
    memset(s->detail, 0,
           sizeof *s->detail * (size_t)(s->layers + 1) * (size_t)s->ranks * MZ_PHASES);
}

static mz_phase phase_of(const mz_step *s, mz_task task) {
    return (mz_phase)(mz_graph_tag(s->graph, task) & 255u);
}

static int32_t layer_of(const mz_step *s, mz_task task) {
    return (int32_t)(mz_graph_tag(s->graph, task) >> 8);
}

static void add_phases(mz_step *s, const mz_graph_result *result) {
    const mz_task tasks = (mz_task)mz_graph_tasks(s->graph);
    if (s->detail)
        step_clear_detail(s);
    memset(s->phase, 0, sizeof *s->phase * (size_t)s->ranks * MZ_PHASES);
    memset(s->busy, 0, sizeof *s->busy * (size_t)s->ranks);
    memset(s->order_begin, 0, sizeof *s->order_begin * (size_t)(s->ranks + 1));
    for (mz_task t = 0; t < tasks; t++) {
        const mz_phase phase = phase_of(s, t);
        const int32_t rank = mz_graph_host_of(s->graph, t);
        if (phase == MZ_PHASE_LAUNCH_WAIT)
            continue; /* the host's own work */
        const double time = result->finish_s[t] - s->begin[t];
        s->phase[(int64_t)rank * MZ_PHASES + phase] += time;
        if (s->detail)
            *step_detail_at(s, layer_of(s, t), rank, phase) += time;
        s->busy[rank] += mz_phase_computes(phase) ? time : 0;
        s->order_begin[rank + 1]++;
    }
}

/* Tasks of each rank together, in order of creation. */
static mz_code sort_by_rank(mz_step *s, mz_err *err) {
    const mz_task tasks = (mz_task)mz_graph_tasks(s->graph);
    int64_t most = 0;
    if (!mz_grow((void **)&s->order, &s->order_cap, (size_t)tasks, sizeof *s->order))
        return mz_fail_nomem(err, "the order of tasks");
    for (int32_t r = 0; r < s->ranks; r++) {
        most = s->order_begin[r + 1] > most ? s->order_begin[r + 1] : most;
        s->order_begin[r + 1] += s->order_begin[r];
    }
    if (!mz_grow((void **)&s->interval, &s->interval_cap, (size_t)most, sizeof *s->interval))
        return mz_fail_nomem(err, "busy intervals");
    for (mz_task t = 0; t < tasks; t++)
        if (phase_of(s, t) != MZ_PHASE_LAUNCH_WAIT)
            s->order[s->order_begin[mz_graph_host_of(s->graph, t)]++] = t;
    for (int32_t r = s->ranks; r > 0; r--)
        s->order_begin[r] = s->order_begin[r - 1];
    s->order_begin[0] = 0;
    return MZ_OK;
}

static int by_begin(const void *a, const void *b) {
    const step_interval *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Insertion sort: intervals come nearly sorted; far from it, heapsort takes over. */
static void sort_intervals(step_interval *v, int64_t n) {
    int64_t moved = 0;
    for (int64_t i = 1; i < n; i++) {
        const step_interval x = v[i];
        int64_t j = i;
        for (; j > 0 && v[j - 1].begin > x.begin; j--, moved++)
            v[j] = v[j - 1];
        v[j] = x;
        if (moved > 16 * n) {
            mz_sort_in_place(v, (size_t)n, sizeof *v, by_begin);
            return;
        }
    }
}

/* Time covered by at least one of the rank's tasks. */
static double covered(mz_step *s, const mz_graph_result *result, int32_t rank) {
    int64_t n = 0;
    for (int64_t i = s->order_begin[rank]; i < s->order_begin[rank + 1]; i++)
        s->interval[n++] = (step_interval){s->begin[s->order[i]], result->finish_s[s->order[i]]};
    sort_intervals(s->interval, n);
    double sum = 0, reached = 0;
    for (int64_t i = 0; i < n; i++) {
        const step_interval v = s->interval[i];
        if (v.end <= reached)
            continue;
        sum += v.end - (v.begin > reached ? v.begin : reached);
        reached = v.end;
    }
    return sum;
}

static double worst_span(mz_step *s, const mz_graph_result *result) {
    double worst = 0;
    memset(s->moe_span, 0, sizeof *s->moe_span * (size_t)s->ranks);
    for (size_t i = 0; i < s->spans; i++)
        s->moe_span[mz_graph_host_of(s->graph, s->span[i].first)] +=
            result->finish_s[s->span[i].last] - result->start_s[s->span[i].first];
    for (int32_t r = 0; r < s->ranks; r++)
        worst = s->moe_span[r] > worst ? s->moe_span[r] : worst;
    return worst;
}

void step_fill_traffic(const mz_step *s, mz_step_outcome *o) {
    o->dispatch_bytes = s->traffic_bytes[TRAFFIC_DISPATCH];
    o->combine_bytes = s->traffic_bytes[TRAFFIC_COMBINE];
    o->backward_dispatch_bytes = s->traffic_bytes[TRAFFIC_BACK_DISPATCH];
    o->backward_combine_bytes = s->traffic_bytes[TRAFFIC_BACK_COMBINE];
    o->transfer_bytes = s->transfer_bytes;
    o->between_bytes = s->between_bytes;
    o->sent_bytes = (int64_t)(s->sent + 0.5);
    o->received_bytes = (int64_t)(s->received + 0.5);
}

/* Where the planner's time and what is left of the step stand: planning in its layer, waiting in
 * the row of the whole step. */
static void finish_detail(mz_step *s, int32_t rank) {
    for (int32_t b = 0; b < s->micro_batches; b++)
        for (int32_t m = 0; m < s->moe; m++)
            *step_detail_at(s, s->moe_layer[m], rank, MZ_PHASE_PLANNER) +=
                (step_decided(s, b) ? s->decide_cost : 0) + s->route_cost;
    *step_detail_at(s, s->layers, rank, MZ_PHASE_LAUNCH_WAIT) =
        s->phase[(int64_t)rank * MZ_PHASES + MZ_PHASE_LAUNCH_WAIT];
}

mz_code step_collect_outcome(mz_step *s, const mz_graph_result *result, mz_step_outcome *o,
                             mz_err *err) {
    mz_code code = find_begins(s, result, err);
    if (code != MZ_OK)
        return code;
    add_phases(s, result);
    code = sort_by_rank(s, err);
    if (code != MZ_OK)
        return code;
    o->time_s = result->end_s;
    o->events = result->events;
    o->moe_s = worst_span(s, result);
    o->planner_s = s->planner_s;
    o->planner_hidden_s = s->hidden_s;
    o->rank_busy_s = s->busy;
    for (int32_t r = 0; r < s->ranks; r++) {
        double *phase = s->phase + (int64_t)r * MZ_PHASES;
        phase[MZ_PHASE_PLANNER] = s->planner_s;
        phase[MZ_PHASE_LAUNCH_WAIT] = result->end_s - covered(s, result, r);
        for (int p = 0; p < MZ_PHASES; p++)
            o->phase_s[p] = phase[p] > o->phase_s[p] ? phase[p] : o->phase_s[p];
        if (s->detail)
            finish_detail(s, r);
    }
    o->detail_s = s->detail;
    for (int64_t i = 0; i < (int64_t)s->micro_batches * s->ranks; i++)
        o->tokens += s->tokens[i];
    step_fill_traffic(s, o);
    return MZ_OK;
}
