/* The inside of a graph: filled by graph.c, run by run.c. */
#ifndef MIZAN_SIM_ENGINE_STATE_H
#define MIZAN_SIM_ENGINE_STATE_H

#include "sim/engine/evq.h"
#include "sim/engine/flow.h"
#include "sim/engine/graph.h"
#include "sim/engine/port.h"

#include <stddef.h>

enum { NONE = -1 };

typedef enum task_kind { TASK_KERNEL, TASK_JOIN, TASK_SYNC } task_kind;

/* What a run touches of a task, in one piece; lists are indices of the next element. */
typedef struct task_state {
    union {
        double seconds; /* kernel: work at nominal speed; sync: the host's own work */
        struct {
            int32_t exchange, member;
        } join;
    } work;
    double launch_s;
    uint32_t owner;  /* kind in the low 2 bits, then the queue (sync: the host) */
    int32_t waits;   /* what must happen first: issue, the task before in the queue, dependencies */
    int32_t pending; /* of those, still to come in this run */
    int32_t host_next, queue_next;
    int32_t edges; /* list of those that wait for this one */
} task_state;

typedef struct edge {
    int32_t target, next;
} edge;

typedef struct host_state {
    int32_t first, last; /* program */
    int32_t cursor;      /* next to issue in this run */
    double time;         /* when the host is free to issue it */
} host_state;

typedef struct queue_state {
    int32_t host, last;
    int32_t sends; /* flow: most messages that one of its tasks sends */
} queue_state;

typedef struct exchange_state {
    int64_t first_member;
    int32_t members, joined;
    double rounds;
    int32_t entered; /* in this run */
    double ready;    /* latest entry so far */
} exchange_state;

/* A member in the flow model. */
typedef struct member_flow {
    int32_t exchange;
    int32_t out_begin, sends;   /* its messages, which come by (source, destination) */
    int32_t in_begin, receives; /* ... and in `incoming` */
    int32_t left;               /* of both, not yet arrived in this run */
    bool entered;
} member_flow;

typedef struct message_copy {
    double bytes;     /* 0: between ranks of one device */
    int32_t src, dst; /* members, counted over all exchanges */
} message_copy;

struct mz_graph {
    const mz_topology *topology;
    mz_network_model network;
    int64_t tasks, edges, members, messages;
    int32_t hosts, queues, exchanges;
    task_state *task;
    uint32_t *tag;
    double *start, *finish;
    edge *edge;
    host_state *host;
    queue_state *queue;
    exchange_state *exchange;
    int32_t *member_rank, *member_task;
    double *bytes[4]; /* port: send/recv inside, send/recv outside */
    member_flow *member_flow;
    message_copy *message;
    int32_t *incoming; /* messages of each exchange by (destination, source) */
    int longest_route;
    int64_t concurrent; /* at most this many messages are on their way at once */
    size_t task_cap, tag_cap, start_cap, finish_cap, edge_cap, queue_cap, exchange_cap;
    size_t rank_cap, member_task_cap, bytes_cap[4], member_flow_cap, message_cap, incoming_cap;
    /* for runs */
    mz_evq *events;
    int64_t events_cap;
    mz_ports *ports;
    mz_flow *flow;
    int32_t *ready; /* stack of tasks that may start */
    int32_t *tied;  /* exchanges that are ready at one time */
    double *leave;  /* [largest exchange] */
    size_t ready_cap, tied_cap, leave_cap;
    int32_t largest; /* members of the largest exchange */
};

static inline task_kind kind_of(const task_state *t) {
    return (task_kind)(t->owner & 3u);
}

static inline int32_t owner_of(const task_state *t) {
    return (int32_t)(t->owner >> 2);
}

#endif
