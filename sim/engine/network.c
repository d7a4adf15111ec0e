#include "sim/engine/network.h"

#include "sim/engine/exchange.h"
#include "sim/engine/graph.h"
#include "sim/engine/port.h"

#include <stdlib.h>

mz_code mz_port_time(const mz_topology *topology, const mz_exchange *exchange, double *finish,
                     mz_err *err) {
    mz_exchange whole = *exchange;
    mz_ports *ports = NULL;
    double *bytes = NULL;
    if (whole.send_inside != NULL || whole.message == NULL) {
        whole.messages = 0; /* not needed, so not looked at */
    }
    mz_code code = mz_exchange_check(topology, &whole, err);
    if (code == MZ_OK && whole.send_inside == NULL) {
        size_t members = (size_t)whole.members;
        bytes = malloc(4 * members * sizeof *bytes);
        if (bytes == NULL) {
            return mz_fail_nomem(err, "bytes per port");
        }
        mz_exchange_aggregate(topology, &whole, bytes, bytes + members, bytes + 2 * members,
                              bytes + 3 * members);
        whole.messages = 0; /* checked before */
        code = mz_exchange_check(topology, &whole, err);
    }
    if (code == MZ_OK) {
        code = mz_ports_create(topology, &ports, err);
    }
    if (code == MZ_OK) {
        mz_ports_serve(ports, &whole, 0, finish);
    }
    free(bytes);
    mz_ports_free(&ports);
    return code;
}

/* A graph of one exchange: every member has a host and a queue of its own. */
static mz_code one_exchange(mz_graph *graph, const mz_exchange *exchange, double *finish,
                            mz_err *err) {
    int32_t id;
    mz_graph_result result;
    mz_code code = mz_graph_exchange(graph, exchange, &id, err);
    for (int32_t m = 0; m < exchange->members && code == MZ_OK; m++) {
        mz_queue queue;
        mz_task task;
        code = mz_graph_queue(graph, m, &queue, err);
        if (code == MZ_OK) {
            code = mz_graph_join(graph, queue, id, m, 0, 0, &task, err);
        }
    }
    if (code == MZ_OK) {
        code = mz_graph_run(graph, &result, err);
    }
    for (int32_t m = 0; m < exchange->members && code == MZ_OK; m++) {
        finish[m] = result.finish_s[m];
    }
    return code;
}

mz_code mz_flow_time(const mz_topology *topology, const mz_exchange *exchange, double accuracy,
                     double *finish, mz_err *err) {
    mz_graph *graph = NULL;
    mz_code code = mz_graph_create(exchange->members, topology, MZ_NETWORK_FLOW, accuracy,
                                   exchange->members, &graph, err);
    if (code == MZ_OK) {
        code = one_exchange(graph, exchange, finish, err);
    }
    mz_graph_free(&graph);
    return code;
}
