/* Task graphs and their execution: the machine of one training step.
 *
 * Model of one rank: a host thread that issues tasks in program order, and device queues (compute
 * stream, communication streams, copy engine) that run them first-in first-out.
 *
 * - A task starts when (a) the host has issued it, (b) it is at the head of its queue, (c) every
 *   task it was told to wait for has finished. A task's launch costs the host `launch_s` (0: part
 * of a CUDA graph or of the launch before); it is issued when its launch is over.
 * - mz_graph_sync(host, task): the host issues nothing more until `task` has finished (a count copy
 *   to the host, a stream synchronisation), then pays `seconds` itself (planning on the CPU).
 * - An exchange (collective) is one task per member, on that member's communication queue, which it
 *   occupies from its start (the member enters) to its finish; see network.h for when that is.
 *
 * Durations are work at nominal speed; the executor reads a kernel's rate in one function. Kernels
 * that have a queue to themselves need no event; what is shared (today the network, and devices
 * once their kernels slow each other down) is entered through the event queue in order of time.
 *
 * All tasks are added before the run; the loop of a run allocates nothing. Ties go by
 * (time, sequence), exchanges that become ready at one time in order of creation: same graph, same
 * bytes. Cost: tests/bench/bench_graph; memory about 60 bytes a task, 8 a dependency, 40 a member
 * of an exchange. Threads: a graph belongs to one thread. */
#ifndef MIZAN_SIM_ENGINE_GRAPH_H
#define MIZAN_SIM_ENGINE_GRAPH_H

#include "common/base/err.h"
#include "sim/engine/network.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct mz_graph mz_graph;
typedef int32_t mz_task;  /* index, from 0 in order of creation; -1: none */
typedef int32_t mz_queue; /* device queue */

typedef enum mz_network_model { MZ_NETWORK_PORT, MZ_NETWORK_FLOW } mz_network_model;

/* hosts: host threads (one per rank). Capacities grow by doubling while building; `tasks_hint` only
 * saves copies. topology is borrowed and may be NULL when there are no exchanges. */
mz_code mz_graph_create(int32_t hosts, const mz_topology *topology, mz_network_model network,
                        double flow_accuracy, int64_t tasks_hint, mz_graph **graph, mz_err *err);
void mz_graph_free(mz_graph **graph);
void mz_graph_clear(mz_graph *graph); /* no tasks, same queues, memory kept for the next step */

/* A queue issued by `host`. */
mz_code mz_graph_queue(mz_graph *graph, int32_t host, mz_queue *queue, mz_err *err);

/* A kernel or copy. tag is the builder's (phase and layer); it comes back untouched. */
mz_code mz_graph_task(mz_graph *graph, mz_queue queue, double seconds, double launch_s,
                      uint32_t tag, mz_task *task, mz_err *err);
/* `task` waits for `dep` (already created; any queue of any host). */
mz_code mz_graph_wait(mz_graph *graph, mz_task task, mz_task dep, mz_err *err);
/* Host waits for `after` (may be -1), then works for `seconds`; both occupy the host in program
 * order. A sync is a task of its own (it takes the next index, its start is when the host's own
 * work begins), which other tasks may wait for: it is task mz_graph_tasks() - 1 after the call. */
mz_code mz_graph_sync(mz_graph *graph, int32_t host, mz_task after, double seconds, uint32_t tag,
                      mz_err *err);
/* Adds one exchange (contents copied into the graph; for the port network the aggregates if given,
 * else sums of the messages); then each member joins it once with a task. */
mz_code mz_graph_exchange(mz_graph *graph, const mz_exchange *exchange, int32_t *id, mz_err *err);
mz_code mz_graph_join(mz_graph *graph, mz_queue queue, int32_t exchange, int32_t member,
                      double launch_s, uint32_t tag, mz_task *task, mz_err *err);

typedef struct mz_graph_result {
    double end_s;           /* when the last task finished */
    uint64_t events;        /* tasks finished, network events and flows ended */
    const double *start_s;  /* [tasks] of an exchange: when the member entered (it may then wait) */
    const double *finish_s; /* [tasks] */
} mz_graph_result;

/* MZ_EINTERNAL with the first stuck task when the graph cannot finish (a cycle, a member that never
 * joins). The result borrows from the graph until the next run, clear or free. */
mz_code mz_graph_run(mz_graph *graph, mz_graph_result *result, mz_err *err);

int64_t mz_graph_tasks(const mz_graph *graph);
uint32_t mz_graph_tag(const mz_graph *graph, mz_task task);
int32_t mz_graph_host_of(const mz_graph *graph, mz_task task);

#endif
