/* Execution of a task graph.
 *
 * A task's start is the latest of its conditions: issue, the task before in its queue,
 * dependencies. Where a task runs on something of its own, its finish follows from its start alone,
 * so tasks are followed ahead of the clock as far as they go, without an event (ready stack,
 * `drain`). What shares something with others - the network today - is entered through the event
 * queue, in order of time. This is exact: whatever an event at time t sets off happens at t or
 * later. */
#include "common/base/arena.h"
#include "common/base/sort.h"
#include "sim/engine/graph.h"
#include "sim/engine/state.h"

#include <math.h>
#include <string.h>

typedef enum event_kind {
    EVENT_SERVE, /* port: an exchange is ready */
    EVENT_ENTER, /* flow: a task enters its exchange */
    EVENT_DATA   /* flow: a message's first byte is on its way */
} event_kind;

typedef struct run_state {
    mz_graph *graph;
    int32_t stacked; /* tasks on graph->ready */
    int64_t done;
    double now;
    double end;
    uint64_t flows;
} run_state;

/* Seconds that a kernel starting now takes: the one place that knows a device's rate. A device
 * whose kernels slow each other down would enter them through the event queue instead, as the
 * network's. */
static inline double kernel_seconds(const task_state *kernel) {
    return kernel->work.seconds;
}

/* One of the things `index` waits for has happened at `time`. */
static inline void release(run_state *run, int32_t index, double time) {
    mz_graph *graph = run->graph;
    if (graph->start[index] < time) {
        graph->start[index] = time;
    }
    if (--graph->task[index].pending == 0) {
        graph->ready[run->stacked++] = index;
    }
}

/* The host issues its program up to the next point where it waits. */
static void issue(run_state *run, int32_t host_index) {
    mz_graph *graph = run->graph;
    host_state *issuer = &graph->host[host_index];
    double time = issuer->time;
    for (int32_t i = issuer->cursor; i != NONE;) {
        const task_state *next = &graph->task[i];
        int32_t after = next->host_next;
        time += next->launch_s;
        release(run, i, time);
        if (kind_of(next) == TASK_SYNC) {
            issuer->cursor = after;
            return;
        }
        i = after;
    }
    issuer->cursor = NONE;
}

static void finish(run_state *run, int32_t index, double time) {
    mz_graph *graph = run->graph;
    const task_state *ended = &graph->task[index];
    graph->finish[index] = time;
    run->done++;
    run->end = time > run->end ? time : run->end;
    if (ended->queue_next != NONE) {
        release(run, ended->queue_next, time);
    }
    for (int32_t e = ended->edges; e != NONE; e = graph->edge[e].next) {
        release(run, graph->edge[e].target, time);
    }
    if (kind_of(ended) == TASK_SYNC) {
        int32_t host_index = owner_of(ended);
        graph->host[host_index].time = time;
        issue(run, host_index);
    }
}

static mz_code push(run_state *run, double time, event_kind kind, int32_t subject, mz_err *err) {
    mz_event event = {time, (uint32_t)kind, (uint32_t)subject};
    if (!mz_evq_push(run->graph->events, event)) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: event of kind %d at %g s does not fit",
                       (int)kind, time);
    }
    return MZ_OK;
}

/* A member is at the head of its queue and ready: from here the network decides. */
static mz_code join(run_state *run, int32_t index, mz_err *err) {
    mz_graph *graph = run->graph;
    if (graph->network == MZ_NETWORK_FLOW) {
        return push(run, graph->start[index], EVENT_ENTER, index, err);
    }
    int32_t id = graph->task[index].work.join.exchange;
    exchange_state *joined = &graph->exchange[id];
    joined->ready = fmax(joined->ready, graph->start[index]);
    if (++joined->entered == joined->members) {
        return push(run, joined->ready, EVENT_SERVE, id, err);
    }
    return MZ_OK;
}

/* Follows every task that can be followed without the network. */
static mz_code drain(run_state *run, mz_err *err) {
    mz_graph *graph = run->graph;
    while (run->stacked > 0) {
        int32_t index = graph->ready[--run->stacked];
        const task_state *ready = &graph->task[index];
        if (kind_of(ready) == TASK_JOIN) {
            mz_code code = join(run, index, err);
            if (code != MZ_OK) {
                return code;
            }
        } else {
            finish(run, index, graph->start[index] + kernel_seconds(ready));
        }
    }
    return MZ_OK;
}

static void serve(run_state *run, int32_t id) {
    mz_graph *graph = run->graph;
    const exchange_state *ready = &graph->exchange[id];
    int64_t first = ready->first_member;
    mz_exchange view = {.members = ready->members,
                        .rank = graph->member_rank + first,
                        .send_inside = graph->bytes[0] + first,
                        .recv_inside = graph->bytes[1] + first,
                        .send_outside = graph->bytes[2] + first,
                        .recv_outside = graph->bytes[3] + first,
                        .rounds = ready->rounds};
    mz_ports_serve(graph->ports, &view, ready->ready, graph->leave);
    for (int32_t m = 0; m < ready->members; m++) {
        finish(run, graph->member_task[first + m], graph->leave[m]);
    }
}

static int by_id(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Exchanges that are ready at one time go in order of creation, however they were found. */
static void serve_tied(run_state *run, int32_t first) {
    mz_graph *graph = run->graph;
    mz_event event;
    size_t count = 0;
    graph->tied[count++] = first;
    while (mz_evq_next(graph->events) == run->now && mz_evq_pop(graph->events, &event)) {
        graph->tied[count++] = (int32_t)event.subject;
    }
    if (count > 1) {
        mz_sort_in_place(graph->tied, count, sizeof *graph->tied, by_id);
    }
    for (size_t i = 0; i < count; i++) {
        serve(run, graph->tied[i]);
    }
}

/* The message's links, and when its first byte moves: the latencies of its route, once a round. */
static int route_of(const mz_graph *graph, const message_copy *message, int32_t *links,
                    double *latency) {
    const mz_topology *topology = graph->topology;
    int32_t src = graph->member_rank[message->src], dst = graph->member_rank[message->dst];
    int count = message->bytes > 0 ? topology->route(topology->self, src, dst, links) : 0;
    double sum = 0;
    for (int i = 0; i < count; i++) {
        sum += topology->link_latency_s[links[i]];
    }
    const member_flow *from = &graph->member_flow[message->src];
    *latency = sum * fmax(graph->exchange[from->exchange].rounds, 1);
    return count;
}

static void arrive(run_state *run, int32_t id) {
    mz_graph *graph = run->graph;
    const int32_t ends[2] = {graph->message[id].src, graph->message[id].dst};
    for (int i = 0; i < 2; i++) {
        if (--graph->member_flow[ends[i]].left == 0) {
            finish(run, graph->member_task[ends[i]], run->now);
        }
    }
}

static void begin_data(run_state *run, int32_t id) {
    mz_graph *graph = run->graph;
    int32_t links[MZ_ROUTE_MAX];
    double latency;
    int count = route_of(graph, &graph->message[id], links, &latency);
    mz_flow_begin(graph->flow, run->now, links, count, graph->message[id].bytes, id);
}

/* Both ends are there: the message may start. */
static mz_code begin_message(run_state *run, int32_t id, mz_err *err) {
    int32_t links[MZ_ROUTE_MAX];
    double latency;
    if (route_of(run->graph, &run->graph->message[id], links, &latency) == 0) {
        arrive(run, id);
        return MZ_OK;
    }
    return push(run, run->now + latency, EVENT_DATA, id, err);
}

/* Starts what `m` sends to (`sent`) or receives from members that are there. */
static mz_code begin_messages(run_state *run, const member_flow *m, bool sent, mz_err *err) {
    const mz_graph *graph = run->graph;
    int32_t begin = sent ? m->out_begin : m->in_begin;
    int32_t end = begin + (sent ? m->sends : m->receives);
    mz_code code = MZ_OK;
    for (int32_t i = begin; i < end && code == MZ_OK; i++) {
        int32_t id = sent ? i : graph->incoming[i];
        int32_t other = sent ? graph->message[id].dst : graph->message[id].src;
        if (graph->member_flow[other].entered) {
            code = begin_message(run, id, err);
        }
    }
    return code;
}

/* One round: a message needs its two ends. More: every member's data depend on all the others', so
 * all must be there. */
static mz_code enter(run_state *run, int32_t index, mz_err *err) {
    mz_graph *graph = run->graph;
    exchange_state *joined = &graph->exchange[graph->task[index].work.join.exchange];
    int64_t first = joined->first_member;
    member_flow *m = &graph->member_flow[first + graph->task[index].work.join.member];
    m->entered = true;
    joined->entered++;
    if (m->left == 0) {
        finish(run, index, run->now);
    }
    if (joined->rounds <= 1) {
        mz_code code = begin_messages(run, m, true, err);
        return code == MZ_OK ? begin_messages(run, m, false, err) : code;
    }
    mz_code code = MZ_OK;
    for (int32_t i = 0; i < joined->members && joined->entered == joined->members; i++) {
        code = begin_messages(run, &graph->member_flow[first + i], true, err);
        if (code != MZ_OK) {
            break;
        }
    }
    return code;
}

static mz_code handle(run_state *run, const mz_event *event, mz_err *err) {
    run->now = event->time;
    switch ((event_kind)event->kind) {
    case EVENT_SERVE:
        serve_tied(run, (int32_t)event->subject);
        return MZ_OK;
    case EVENT_ENTER:
        return enter(run, (int32_t)event->subject, err);
    default:
        begin_data(run, (int32_t)event->subject);
        return MZ_OK;
    }
}

/* Ends the next flow if it ends before the next event. What happens now comes first, so that flows
 * are solved once for all that begin together. */
static bool end_flow(run_state *run) {
    mz_graph *graph = run->graph;
    double limit = mz_evq_next(graph->events);
    if (limit <= run->now || !(mz_flow_next(graph->flow) < limit)) {
        return false;
    }
    run->now = mz_flow_next(graph->flow);
    run->flows++;
    arrive(run, mz_flow_end(graph->flow));
    return true;
}

static mz_code loop(run_state *run, mz_err *err) {
    mz_graph *graph = run->graph;
    for (;;) {
        mz_code code = drain(run, err);
        if (code != MZ_OK) {
            return code;
        }
        if (graph->flow != NULL && end_flow(run)) {
            continue;
        }
        mz_event event;
        if (!mz_evq_pop(graph->events, &event)) {
            return MZ_OK;
        }
        code = handle(run, &event, err);
        if (code != MZ_OK) {
            return code;
        }
    }
}

/* Everything a run needs, so that the loop allocates nothing. */
static mz_code prepare(mz_graph *graph, mz_err *err) {
    int64_t events = (int64_t)graph->queues + graph->concurrent + 1;
    if (events > graph->events_cap) {
        mz_evq_free(&graph->events);
        graph->events_cap = 0;
        mz_code code = mz_evq_create(events, &graph->events, err);
        if (code != MZ_OK) {
            return code;
        }
        graph->events_cap = events;
    }
    /* At most one task per queue and one synchronisation per host can be ready at a time. */
    size_t ready = (size_t)graph->queues + (size_t)graph->hosts;
    if (!mz_grow((void **)&graph->ready, &graph->ready_cap, ready, sizeof *graph->ready) ||
        !mz_grow((void **)&graph->tied, &graph->tied_cap, ready, sizeof *graph->tied) ||
        !mz_grow((void **)&graph->leave, &graph->leave_cap, (size_t)graph->largest,
                 sizeof *graph->leave)) {
        return mz_fail_nomem(err, "the run of a task graph");
    }
    return graph->flow == NULL
               ? MZ_OK
               : mz_flow_reserve(graph->flow, graph->concurrent, graph->longest_route, err);
}

static void reset(mz_graph *graph) {
    for (int64_t i = 0; i < graph->tasks; i++) {
        graph->task[i].pending = graph->task[i].waits;
        graph->start[i] = graph->finish[i] = 0;
    }
    for (int32_t i = 0; i < graph->hosts; i++) {
        graph->host[i].cursor = graph->host[i].first;
        graph->host[i].time = 0;
    }
    for (int32_t i = 0; i < graph->exchanges; i++) {
        graph->exchange[i].entered = 0;
        graph->exchange[i].ready = 0;
    }
    mz_evq_clear(graph->events);
    if (graph->ports != NULL) {
        mz_ports_clear(graph->ports);
    }
    if (graph->flow != NULL) {
        mz_flow_clear(graph->flow);
        for (int64_t i = 0; i < graph->members; i++) {
            member_flow *m = &graph->member_flow[i];
            m->left = m->sends + m->receives;
            m->entered = false;
        }
    }
}

static mz_code check_joins(const mz_graph *graph, mz_err *err) {
    for (int32_t i = 0; i < graph->exchanges; i++) {
        const exchange_state *checked = &graph->exchange[i];
        for (int32_t m = 0; m < checked->members && checked->joined < checked->members; m++) {
            if (graph->member_task[checked->first_member + m] == NONE) {
                return mz_fail(err, MZ_EINTERNAL,
                               "task graph: member %d (rank %d) of exchange %d never joins it",
                               (int)m, (int)graph->member_rank[checked->first_member + m], (int)i);
            }
        }
    }
    return MZ_OK;
}

/* The first task in order of creation that did not finish. */
static mz_code report_stuck(const mz_graph *graph, int64_t done, mz_err *err) {
    int64_t index = 0;
    /* A task that finished has nothing pending; so has one that waits inside an exchange, but then
     * some other member is stuck with something pending, or the network is. */
    while (index < graph->tasks && graph->task[index].pending == 0) {
        index++;
    }
    return mz_fail(err, MZ_EINTERNAL,
                   "task graph: stuck with %lld of %lld tasks done; task %lld (host %d, tag %u) "
                   "waits for %d more things that never happen: a cycle of dependencies, queue "
                   "order and exchanges",
                   (long long)done, (long long)graph->tasks, (long long)index,
                   (int)mz_graph_host_of(graph, (mz_task)index), (unsigned)graph->tag[index],
                   (int)graph->task[index].pending);
}

mz_code mz_graph_run(mz_graph *graph, mz_graph_result *result, mz_err *err) {
    mz_code code = check_joins(graph, err);
    if (code == MZ_OK) {
        code = prepare(graph, err);
    }
    if (code != MZ_OK) {
        return code;
    }
    reset(graph);
    run_state run = {.graph = graph};
    for (int32_t i = 0; i < graph->hosts && code == MZ_OK; i++) {
        issue(&run, i);
        code = drain(&run, err);
    }
    if (code == MZ_OK) {
        code = loop(&run, err);
    }
    if (code == MZ_OK && run.done < graph->tasks) {
        code = report_stuck(graph, run.done, err);
    }
    if (code != MZ_OK) {
        return code;
    }
    *result =
        (mz_graph_result){.end_s = run.end,
                          .events = (uint64_t)run.done + mz_evq_popped(graph->events) + run.flows,
                          .start_s = graph->start,
                          .finish_s = graph->finish};
    return MZ_OK;
}
