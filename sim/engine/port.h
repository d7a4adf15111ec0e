/* The port model in progress: every port is a first-in first-out server.
 *
 * An exchange is ready when its last member has entered. Its bytes on a port are served in one
 * piece, from the later of (ready, port free) on, at the port's full bandwidth; the port is free
 * again when they are through. Two exchanges in progress therefore never get more than the port
 * has, and an exchange that became ready later waits for the earlier one where their ports meet,
 * and only there. A member leaves when its own ports, its domain's uplink and the spine are through
 * with the exchange, plus latency times rounds; a member without traffic leaves when the exchange
 * is ready.
 *
 * Ports: inside out and in, outside out and in of each device (out and in of the inside port are
 * one where inside_half_duplex); uplink out and in of each domain; the spine, which carries the sum
 * of all bytes between domains. A bandwidth of 0 for an uplink or the spine means "not a limit". */
#ifndef MIZAN_SIM_ENGINE_PORT_H
#define MIZAN_SIM_ENGINE_PORT_H

#include "sim/engine/network.h"

typedef struct mz_ports mz_ports;

mz_code mz_ports_create(const mz_topology *topology, mz_ports **ports, mz_err *err);
void mz_ports_free(mz_ports **ports);
void mz_ports_clear(mz_ports *ports); /* all ports free at time 0 */

/* Serves `exchange` (aggregates present), ready at `ready`; calls must come in order of `ready`.
 * finish: [members] when each member leaves. O(members), allocates nothing. */
void mz_ports_serve(mz_ports *ports, const mz_exchange *exchange, double ready, double *finish);

#endif
