#include "sim/engine/graph.h"

#include "common/base/arena.h"
#include "sim/engine/exchange.h"
#include "sim/engine/state.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { OWNERS_MAX = 1 << 30 };

#define GROW(graph, array, cap, need)                                                              \
    mz_grow((void **)&(graph)->array, &(graph)->cap, (size_t)(need), sizeof *(graph)->array)

static bool grow_tasks(mz_graph *graph, int64_t need) {
    return GROW(graph, task, task_cap, need) && GROW(graph, tag, tag_cap, need) &&
           GROW(graph, start, start_cap, need) && GROW(graph, finish, finish_cap, need);
}

mz_code mz_graph_create(int32_t hosts, const mz_topology *topology, mz_network_model network,
                        double flow_accuracy, int64_t tasks_hint, mz_graph **graph, mz_err *err) {
    *graph = NULL;
    if (hosts < 1 || hosts > OWNERS_MAX) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: %d hosts", (int)hosts);
    }
    mz_graph *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return mz_fail_nomem(err, "a task graph");
    }
    made->topology = topology;
    made->network = network;
    made->hosts = hosts;
    made->host = malloc((size_t)hosts * sizeof *made->host);
    mz_code code = MZ_OK;
    if (made->host == NULL || (tasks_hint > 0 && !grow_tasks(made, tasks_hint))) {
        code = mz_fail_nomem(err, "a task graph");
    } else if (topology != NULL && network == MZ_NETWORK_PORT) {
        code = mz_ports_create(topology, &made->ports, err);
    } else if (topology != NULL) {
        code = mz_flow_create(topology, flow_accuracy, &made->flow, err);
    }
    if (code != MZ_OK) {
        mz_graph_free(&made);
        return code;
    }
    mz_graph_clear(made);
    *graph = made;
    return MZ_OK;
}

void mz_graph_free(mz_graph **graph) {
    mz_graph *old = *graph;
    if (old == NULL) {
        return;
    }
    mz_evq_free(&old->events);
    mz_ports_free(&old->ports);
    mz_flow_free(&old->flow);
    for (int i = 0; i < 4; i++) {
        free(old->bytes[i]);
    }
    void *const arrays[] = {old->task,        old->tag,         old->start,       old->finish,
                            old->edge,        old->host,        old->queue,       old->exchange,
                            old->member_rank, old->member_task, old->member_flow, old->message,
                            old->incoming,    old->ready,       old->leave,       old->tied};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        free(arrays[i]);
    }
    free(old);
    *graph = NULL;
}

void mz_graph_clear(mz_graph *graph) {
    graph->tasks = graph->edges = graph->members = graph->messages = 0;
    graph->concurrent = 0;
    graph->longest_route = 0;
    graph->exchanges = 0;
    graph->largest = 0;
    for (int32_t i = 0; i < graph->hosts; i++) {
        graph->host[i] = (host_state){.first = NONE, .last = NONE};
    }
    for (int32_t i = 0; i < graph->queues; i++) {
        graph->queue[i].last = NONE;
        graph->queue[i].sends = 0;
    }
}

static bool is_host(const mz_graph *graph, int32_t host) {
    return host >= 0 && host < graph->hosts;
}

mz_code mz_graph_queue(mz_graph *graph, int32_t host, mz_queue *queue, mz_err *err) {
    if (!is_host(graph, host) || graph->queues == OWNERS_MAX) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: queue %d for host %d of %d",
                       (int)graph->queues, (int)host, (int)graph->hosts);
    }
    if (!GROW(graph, queue, queue_cap, graph->queues + 1)) {
        return mz_fail_nomem(err, "device queues");
    }
    *queue = graph->queues++;
    graph->queue[*queue] = (queue_state){.host = host, .last = NONE};
    return MZ_OK;
}

/* A task at the end of the host's program; its place in a queue is the caller's. */
static mz_code add_task(mz_graph *graph, int32_t host_index, task_state made, uint32_t tag,
                        mz_task *index, mz_err *err) {
    if (graph->tasks == INT32_MAX) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: more than %d tasks", INT32_MAX);
    }
    if (!grow_tasks(graph, graph->tasks + 1)) {
        return mz_fail_nomem(err, "tasks");
    }
    host_state *issuer = &graph->host[host_index];
    int32_t at = (int32_t)graph->tasks++;
    made.waits = 1; /* its issue */
    made.host_next = made.queue_next = made.edges = NONE;
    graph->task[at] = made;
    graph->tag[at] = tag;
    if (issuer->first == NONE) {
        issuer->first = at;
    } else {
        graph->task[issuer->last].host_next = at;
    }
    issuer->last = at;
    *index = at;
    return MZ_OK;
}

static mz_code add_to_queue(mz_graph *graph, mz_queue queue, task_state made, uint32_t tag,
                            mz_task *index, mz_err *err) {
    if (queue < 0 || queue >= graph->queues) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: queue %d of %d", (int)queue,
                       (int)graph->queues);
    }
    if (!(made.launch_s >= 0) || !isfinite(made.launch_s)) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: a launch of %g s", made.launch_s);
    }
    made.owner |= (uint32_t)queue << 2;
    queue_state *in = &graph->queue[queue];
    mz_code code = add_task(graph, in->host, made, tag, index, err);
    if (code != MZ_OK) {
        return code;
    }
    if (in->last != NONE) {
        graph->task[in->last].queue_next = *index;
        graph->task[*index].waits++;
    }
    in->last = *index;
    return MZ_OK;
}

mz_code mz_graph_task(mz_graph *graph, mz_queue queue, double seconds, double launch_s,
                      uint32_t tag, mz_task *task, mz_err *err) {
    if (!(seconds >= 0) || !isfinite(seconds)) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: a task of %g s", seconds);
    }
    task_state made = {.work.seconds = seconds, .launch_s = launch_s, .owner = TASK_KERNEL};
    return add_to_queue(graph, queue, made, tag, task, err);
}

mz_code mz_graph_wait(mz_graph *graph, mz_task waiter, mz_task dep, mz_err *err) {
    if (waiter < 0 || waiter >= graph->tasks || dep < 0 || dep >= graph->tasks || waiter == dep) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: task %d waits for task %d of %lld",
                       (int)waiter, (int)dep, (long long)graph->tasks);
    }
    if (graph->edges == INT32_MAX) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: more than %d dependencies", INT32_MAX);
    }
    if (!GROW(graph, edge, edge_cap, graph->edges + 1)) {
        return mz_fail_nomem(err, "dependencies");
    }
    int32_t at = (int32_t)graph->edges++;
    graph->edge[at] = (edge){waiter, graph->task[dep].edges};
    graph->task[dep].edges = at;
    graph->task[waiter].waits++;
    return MZ_OK;
}

mz_code mz_graph_sync(mz_graph *graph, int32_t host, mz_task after, double seconds, uint32_t tag,
                      mz_err *err) {
    if (!is_host(graph, host) || !(seconds >= 0) || !isfinite(seconds) || after < NONE ||
        after >= graph->tasks) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: host %d of %d waits for task %d, then %g s",
                       (int)host, (int)graph->hosts, (int)after, seconds);
    }
    task_state made = {.work.seconds = seconds, .owner = TASK_SYNC | (uint32_t)host << 2};
    mz_task index;
    mz_code code = add_task(graph, host, made, tag, &index, err);
    if (code == MZ_OK && after != NONE) {
        code = mz_graph_wait(graph, index, after, err);
    }
    return code;
}

/* Port: the bytes per port, given or summed here. */
static mz_code copy_bytes(mz_graph *graph, const mz_exchange *from, mz_err *err) {
    int64_t need = graph->members + from->members;
    double *at[4];
    for (int i = 0; i < 4; i++) {
        if (!GROW(graph, bytes[i], bytes_cap[i], need)) {
            return mz_fail_nomem(err, "bytes of an exchange");
        }
        at[i] = graph->bytes[i] + graph->members;
    }
    if (from->send_inside == NULL) {
        mz_exchange whole = *from;
        mz_exchange_aggregate(graph->topology, &whole, at[0], at[1], at[2], at[3]);
        whole.messages = 0; /* checked before */
        return mz_exchange_check(graph->topology, &whole, err);
    }
    size_t size = (size_t)from->members * sizeof(double);
    memcpy(at[0], from->send_inside, size);
    memcpy(at[1], from->recv_inside, size);
    memcpy(at[2], from->send_outside, size);
    memcpy(at[3], from->recv_outside, size);
    return MZ_OK;
}

/* Finds each member's messages and lists them by (destination, source): a counting sort, as they
 * come by (source, destination). Members and messages of one exchange are consecutive. */
static void list_messages(mz_graph *graph, int32_t members, int32_t messages) {
    member_flow *first = graph->member_flow + graph->members;
    int32_t begin = (int32_t)graph->messages;
    for (int32_t i = begin; i < begin + messages; i++) {
        graph->member_flow[graph->message[i].src].sends++;
        graph->member_flow[graph->message[i].dst].receives++;
    }
    int32_t out = begin, in = begin;
    for (member_flow *m = first; m < first + members; m++) {
        m->out_begin = out;
        m->in_begin = in;
        out += m->sends;
        in += m->receives;
    }
    for (int32_t i = begin; i < begin + messages; i++) {
        member_flow *to = &graph->member_flow[graph->message[i].dst];
        graph->incoming[to->in_begin + to->left++] = i;
    }
}

/* Flow: the messages that move something, between members. */
static mz_code copy_messages(mz_graph *graph, const mz_exchange *from, int32_t *kept, mz_err *err) {
    const mz_topology *topology = graph->topology;
    if (from->message == NULL && from->send_inside != NULL) {
        return mz_fail(err, MZ_EINPUT,
                       "the flow network needs the messages of an exchange, not "
                       "only its bytes per port");
    }
    if (graph->messages + from->messages > INT32_MAX ||
        graph->members + from->members > INT32_MAX) {
        return mz_fail(err, MZ_EINPUT, "more than %d messages in one step; use the port network",
                       INT32_MAX);
    }
    if (!GROW(graph, message, message_cap, graph->messages + from->messages) ||
        !GROW(graph, incoming, incoming_cap, graph->messages + from->messages) ||
        !GROW(graph, member_flow, member_flow_cap, graph->members + from->members)) {
        return mz_fail_nomem(err, "messages of an exchange");
    }
    int32_t first = (int32_t)graph->members;
    for (int32_t m = 0; m < from->members; m++) {
        graph->member_flow[first + m] = (member_flow){.exchange = graph->exchanges};
    }
    message_copy *into = graph->message + graph->messages;
    int32_t count = 0, src = 0, dst = 0;
    for (int64_t i = 0; i < from->messages; i++) {
        const mz_message *message = &from->message[i];
        if (message->src == message->dst || message->bytes == 0) {
            continue;
        }
        src = mz_exchange_member(from, message->src, src);
        dst = mz_exchange_member(from, message->dst, dst + 1);
        int32_t links[MZ_ROUTE_MAX];
        int route = topology->device[message->src] == topology->device[message->dst]
                        ? 0
                        : topology->route(topology->self, message->src, message->dst, links);
        graph->longest_route = route > graph->longest_route ? route : graph->longest_route;
        into[count++] = (message_copy){route > 0 ? message->bytes : 0, first + src, first + dst};
    }
    list_messages(graph, from->members, count);
    *kept = count;
    return MZ_OK;
}

mz_code mz_graph_exchange(mz_graph *graph, const mz_exchange *given, int32_t *id, mz_err *err) {
    if (graph->topology == NULL) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: an exchange without a topology");
    }
    mz_exchange from = *given;
    if (from.message == NULL) {
        from.messages = 0;
    }
    if (graph->network == MZ_NETWORK_PORT && from.send_inside != NULL) {
        from.messages = 0; /* not needed, so not looked at */
    }
    mz_code code = mz_exchange_check(graph->topology, &from, err);
    if (code != MZ_OK) {
        return code;
    }
    if (graph->exchanges == INT32_MAX ||
        !GROW(graph, exchange, exchange_cap, graph->exchanges + 1) ||
        !GROW(graph, member_rank, rank_cap, graph->members + from.members) ||
        !GROW(graph, member_task, member_task_cap, graph->members + from.members)) {
        return mz_fail_nomem(err, "an exchange");
    }
    int32_t messages = 0;
    code = graph->network == MZ_NETWORK_PORT ? copy_bytes(graph, &from, err)
                                             : copy_messages(graph, &from, &messages, err);
    if (code != MZ_OK) {
        return code;
    }
    graph->exchange[graph->exchanges] = (exchange_state){
        .first_member = graph->members, .members = from.members, .rounds = from.rounds};
    for (int32_t m = 0; m < from.members; m++) {
        graph->member_rank[graph->members + m] = from.rank[m];
        graph->member_task[graph->members + m] = NONE;
    }
    graph->members += from.members;
    graph->messages += messages;
    graph->largest = from.members > graph->largest ? from.members : graph->largest;
    *id = graph->exchanges++;
    return MZ_OK;
}

mz_code mz_graph_join(mz_graph *graph, mz_queue queue, int32_t exchange, int32_t member,
                      double launch_s, uint32_t tag, mz_task *task, mz_err *err) {
    if (exchange < 0 || exchange >= graph->exchanges) {
        return mz_fail(err, MZ_EINTERNAL, "task graph: exchange %d of %d", (int)exchange,
                       (int)graph->exchanges);
    }
    exchange_state *joined = &graph->exchange[exchange];
    if (member < 0 || member >= joined->members ||
        graph->member_task[joined->first_member + member] != NONE) {
        return mz_fail(err, MZ_EINTERNAL,
                       "task graph: exchange %d has no member %d of %d that is still to join",
                       (int)exchange, (int)member, (int)joined->members);
    }
    task_state made = {.launch_s = launch_s, .owner = TASK_JOIN};
    made.work.join.exchange = exchange;
    made.work.join.member = member;
    mz_code code = add_to_queue(graph, queue, made, tag, task, err);
    if (code == MZ_OK) {
        graph->member_task[joined->first_member + member] = *task;
        joined->joined++;
    }
    if (code == MZ_OK && graph->network == MZ_NETWORK_FLOW) {
        /* A message is on its way only while its sender's task is at the head of its queue. */
        int32_t sends = graph->member_flow[joined->first_member + member].sends;
        queue_state *in = &graph->queue[queue];
        if (sends > in->sends) {
            graph->concurrent += sends - in->sends;
            in->sends = sends;
        }
    }
    return code;
}

int64_t mz_graph_tasks(const mz_graph *graph) {
    return graph->tasks;
}

uint32_t mz_graph_tag(const mz_graph *graph, mz_task index) {
    return graph->tag[index];
}

int32_t mz_graph_host_of(const mz_graph *graph, mz_task index) {
    const task_state *of = &graph->task[index];
    int32_t owner = owner_of(of);
    return kind_of(of) == TASK_SYNC ? owner : graph->queue[owner].host;
}
