/* Networks: how long an exchange of messages between ranks takes.
 *
 * An exchange is one collective call: `members` ranks enter it, each when it is ready, and leave
 * when everything they send and receive has arrived. All-reduce, all-gather and reduce-scatter are
 * exchanges of ring messages built by sim/step (bytes per neighbour, number of rounds).
 *
 * Two models behind one interface:
 *
 * flow: every message is a flow over its route; concurrent flows (of all exchanges in progress)
 * share links max-min fairly, exact by progressive filling; only the part of the system that a
 * start or an end touches is solved again. With rounds <= 1 a message starts once both its ends
 * have entered; with more, every member's data depend on all others', and messages start once all
 * have entered. Its first byte moves after the latencies of its links, once a round; a member
 * without messages leaves when it enters. `accuracy` is the relative error
 * that the finish of a flow, counted from its start, may have because flows that would end close
 * together end together; a quarter of it is spent on a flow's own end, the rest is for what that
 * does to others, which no bound covers: tests/engine/test_flow measures 0.0027 for 0.01 (0:
 * exact).
 *
 * port: no flows, only bytes per port: scale-up out and in and scale-out out and in of every
 * device, uplink out and in of every domain, the spine. All members start when the last has
 * entered. A member leaves when its own ports, its domain's uplink and the spine have moved the
 * exchange's bytes at full bandwidth, plus latency times rounds. Ports are first-in first-out: an
 * exchange's bytes on a port begin when those of exchanges that were ready earlier are through, so
 * two exchanges in progress never get more than the port has. With equal starts the end of an
 * exchange on ports is a lower bound of that on flows (a port needs its bytes / bandwidth in both)
 * and exact when one port is busy throughout. Above, a max-min fair flow always has a saturated
 * link, so flows end within the sum over the links of one route of (bytes on the link / bandwidth).
 * Measured on 60 random all-to-alls (tests/engine/test_network): at most 1.37 times the ports' end,
 * the worst where the spine is the bottleneck first and a hot destination afterwards. */
#ifndef MIZAN_SIM_ENGINE_NETWORK_H
#define MIZAN_SIM_ENGINE_NETWORK_H

#include "common/base/err.h"

#include <stdbool.h>
#include <stdint.h>

enum { MZ_ROUTE_MAX = 12 };

/* The machine as the network sees it; filled by sim/cluster, borrowed here. */
typedef struct mz_topology {
    int32_t ranks;
    /* flow model: directed links */
    int32_t links;
    const double *link_bytes_per_s, *link_latency_s; /* [links] */
    const void *self;
    /* Links from src to dst in order, at most MZ_ROUTE_MAX; returns how many (0: same device,
     * free). Pure function: called often, must be cheap. */
    int (*route)(const void *self, int32_t src, int32_t dst, int32_t *links);
    /* port model: two classes of traffic, inside a domain (scale-up) and between domains */
    const int32_t *domain; /* [ranks] scale-up domain of each rank */
    int32_t domains;
    const int32_t *device;             /* [ranks] below `ranks`; same device: free, ports shared */
    const double *inside_bytes_per_s;  /* [ranks] each direction; 0: none */
    const double *outside_bytes_per_s; /* [ranks] each direction: the rank's NIC */
    const double *uplink_bytes_per_s;  /* [domains] each direction: all NICs of the domain; 0: not
                                        * a limit */
    double spine_bytes_per_s;          /* carries all bytes between domains; 0: not a limit */
    double inside_latency_s, outside_latency_s;
    bool inside_half_duplex; /* PCIe trees through one host bridge: in+out share */
} mz_topology;

typedef struct mz_message {
    int32_t src, dst; /* ranks; src == dst is free */
    double bytes;
} mz_message;

/* Per-member aggregates, what `port` needs; `flow` needs the messages. A builder gives both where
 * it can; with messages == NULL only `port` can run it. */
typedef struct mz_exchange {
    int32_t members;
    const int32_t *rank; /* [members] ascending */
    int64_t messages;
    const mz_message *message; /* sorted by (src, dst), or NULL */
    const double *send_inside, *recv_inside, *send_outside, *recv_outside; /* [members] bytes */
    double rounds; /* latency terms: all-to-all 1, ring n-1, ... */
} mz_exchange;

/* Time on an idle machine when all members enter at 0: finish[m] for every member (caller's array).
 * Used by closed-form tests, by policies' cost models and by `port` in the engine. */
mz_code mz_port_time(const mz_topology *topology, const mz_exchange *exchange, double *finish,
                     mz_err *err);
mz_code mz_flow_time(const mz_topology *topology, const mz_exchange *exchange, double accuracy,
                     double *finish, mz_err *err);
/* Fills the aggregates of `exchange` from its messages (arrays allocated by the caller). */
void mz_exchange_aggregate(const mz_topology *topology, mz_exchange *exchange, double *send_inside,
                           double *recv_inside, double *send_outside, double *recv_outside);

#endif
