#include "sim/engine/port.h"

#include <math.h>
#include <stdlib.h>

enum { INSIDE_OUT, INSIDE_IN, OUTSIDE_OUT, OUTSIDE_IN, RANK_PORTS };

/* A domain's uplink in one exchange: bytes summed first, then the time they are through. */
typedef struct uplink {
    double free_out, free_in;
    double bytes_out, bytes_in;
    double done;
} uplink;

struct mz_ports {
    const mz_topology *topology;
    double (*free_at)[RANK_PORTS]; /* [devices] */
    uplink *uplinks;               /* [domains] */
    double spine_free;
};

mz_code mz_ports_create(const mz_topology *topology, mz_ports **ports, mz_err *err) {
    mz_ports *made = calloc(1, sizeof *made);
    *ports = NULL;
    if (made != NULL) {
        made->topology = topology;
        made->free_at = calloc((size_t)topology->ranks + 1, sizeof *made->free_at);
        made->uplinks = calloc((size_t)topology->domains + 1, sizeof *made->uplinks);
    }
    if (made == NULL || made->free_at == NULL || made->uplinks == NULL) {
        mz_ports_free(&made);
        return mz_fail_nomem(err, "network ports");
    }
    *ports = made;
    return MZ_OK;
}

void mz_ports_free(mz_ports **ports) {
    if (*ports != NULL) {
        free((*ports)->free_at);
        free((*ports)->uplinks);
        free(*ports);
        *ports = NULL;
    }
}

void mz_ports_clear(mz_ports *ports) {
    const mz_topology *topology = ports->topology;
    for (int32_t rank = 0; rank < topology->ranks; rank++) {
        for (int port = 0; port < RANK_PORTS; port++) {
            ports->free_at[rank][port] = 0;
        }
    }
    for (int32_t domain = 0; domain < topology->domains; domain++) {
        ports->uplinks[domain] = (uplink){0};
    }
    ports->spine_free = 0;
}

/* Serves `bytes` on one port; when they are through (`ready` when there are none). */
static inline double serve(double *free_at, double ready, double bytes, double bytes_per_s) {
    if (!(bytes > 0) || !(bytes_per_s > 0)) {
        return ready;
    }
    double begin = *free_at > ready ? *free_at : ready;
    *free_at = begin + bytes / bytes_per_s;
    return *free_at;
}

/* Sums the bytes between domains per uplink and serves the spine, once per exchange. */
static double serve_spine(mz_ports *ports, const mz_exchange *exchange, double ready) {
    const mz_topology *topology = ports->topology;
    double total = 0;
    for (int32_t m = 0; m < exchange->members; m++) {
        uplink *up = &ports->uplinks[topology->domain[exchange->rank[m]]];
        up->bytes_out += exchange->send_outside[m];
        up->bytes_in += exchange->recv_outside[m];
        total += exchange->send_outside[m];
    }
    return serve(&ports->spine_free, ready, total, topology->spine_bytes_per_s);
}

/* When the uplink of `domain` is through; the first member of a domain to ask has it served. */
static double serve_uplink(mz_ports *ports, int32_t domain, double ready) {
    uplink *up = &ports->uplinks[domain];
    if (up->bytes_out > 0 || up->bytes_in > 0) {
        double bytes_per_s = ports->topology->uplink_bytes_per_s[domain];
        double out = serve(&up->free_out, ready, up->bytes_out, bytes_per_s);
        double in = serve(&up->free_in, ready, up->bytes_in, bytes_per_s);
        up->done = fmax(out, in);
        up->bytes_out = up->bytes_in = 0;
    }
    return up->done;
}

static double serve_inside(mz_ports *ports, int32_t rank, double send, double recv, double ready) {
    const mz_topology *topology = ports->topology;
    double bytes_per_s = topology->inside_bytes_per_s[rank];
    double *free_at = ports->free_at[topology->device[rank]];
    if (topology->inside_half_duplex) {
        return serve(&free_at[INSIDE_OUT], ready, send + recv, bytes_per_s);
    }
    return fmax(serve(&free_at[INSIDE_OUT], ready, send, bytes_per_s),
                serve(&free_at[INSIDE_IN], ready, recv, bytes_per_s));
}

void mz_ports_serve(mz_ports *ports, const mz_exchange *exchange, double ready, double *finish) {
    const mz_topology *topology = ports->topology;
    double spine = serve_spine(ports, exchange, ready);
    for (int32_t m = 0; m < exchange->members; m++) {
        int32_t rank = exchange->rank[m];
        double send_in = exchange->send_inside[m], recv_in = exchange->recv_inside[m];
        double send_out = exchange->send_outside[m], recv_out = exchange->recv_outside[m];
        finish[m] = ready;
        if (send_in > 0 || recv_in > 0) {
            finish[m] = serve_inside(ports, rank, send_in, recv_in, ready) +
                        exchange->rounds * topology->inside_latency_s;
        }
        if (send_out > 0 || recv_out > 0) {
            double *free_at = ports->free_at[topology->device[rank]];
            double bytes_per_s = topology->outside_bytes_per_s[rank];
            double out = serve(&free_at[OUTSIDE_OUT], ready, send_out, bytes_per_s);
            double in = serve(&free_at[OUTSIDE_IN], ready, recv_out, bytes_per_s);
            double up = serve_uplink(ports, topology->domain[rank], ready);
            double through = fmax(fmax(out, in), fmax(up, spine));
            finish[m] = fmax(finish[m], through + exchange->rounds * topology->outside_latency_s);
        }
    }
}
