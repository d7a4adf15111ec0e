/* The flow model in progress: messages as fluids over their routes, links shared max-min fairly.
 *
 * Time only moves forward: `now` of a call is never earlier than that of the calls before. Flows
 * that begin or end at one time are solved together when the next time is asked for. */
#ifndef MIZAN_SIM_ENGINE_FLOW_H
#define MIZAN_SIM_ENGINE_FLOW_H

#include "sim/engine/network.h"

typedef struct mz_flow mz_flow;

mz_code mz_flow_create(const mz_topology *topology, double accuracy, mz_flow **flow, mz_err *err);
void mz_flow_free(mz_flow **flow);
void mz_flow_clear(mz_flow *flow); /* idle network at time 0, memory kept */
/* Room for `flows` flows at once, of at most `route` links each; everything after allocates
 * nothing. */
mz_code mz_flow_reserve(mz_flow *flow, int64_t flows, int route, mz_err *err);

/* `bytes` > 0 over `links` (at least one, no link twice) from `now` on; `id` comes back at the end.
 */
void mz_flow_begin(mz_flow *flow, double now, const int32_t *links, int count, double bytes,
                   int32_t id);
/* When the next flow ends: infinity when there is none. */
double mz_flow_next(mz_flow *flow);
/* Moves to mz_flow_next, which is finite, and takes one flow that ends there: its id. */
int32_t mz_flow_end(mz_flow *flow);

/* Rate of a flow in progress, after mz_flow_next; 0: no such id. O(flows), for tests. */
double mz_flow_rate(const mz_flow *flow, int32_t id);

/* Work done since the last clear. */
typedef struct mz_flow_work {
    uint64_t solutions;
    uint64_t fills;     /* of these from scratch, because many flows began at once */
    uint64_t unsettled; /* of these from scratch, because the update did not come to an end */
    uint64_t levels;    /* of links, set by updates */
    uint64_t moves;     /* flows whose bottleneck changed */
} mz_flow_work;
mz_flow_work mz_flow_worked(const mz_flow *flow);

#endif
