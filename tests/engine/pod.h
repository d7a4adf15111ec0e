/* A cluster for tests and benchmarks: nodes of GPUs on a switch, a NIC per GPU, a spine.
 *
 * Routes: gpu-out, gpu-in inside a node; gpu-out, nic-out, spine, nic-in, gpu-in between nodes. */
#ifndef MIZAN_TESTS_ENGINE_POD_H
#define MIZAN_TESTS_ENGINE_POD_H

#include "common/base/rng.h"
#include "sim/engine/network.h"

#include <math.h>
#include <stdlib.h>

typedef struct pod {
    mz_topology topology;
    int32_t gpus;
    double *bandwidth, *latency, *inside, *outside, *uplink;
    int32_t *domain, *device;
    double *bytes[4];
    int32_t *rank;
    mz_message *message;
    mz_exchange exchange;
} pod;

enum { POD_GPU_OUT, POD_GPU_IN, POD_NIC_OUT, POD_NIC_IN, POD_LINKS };

static inline int pod_route(const void *self, int32_t src, int32_t dst, int32_t *links) {
    const pod *p = self;
    int32_t n = p->topology.ranks;
    if (src == dst) {
        return 0;
    }
    if (src / p->gpus == dst / p->gpus) {
        links[0] = POD_GPU_OUT * n + src;
        links[1] = POD_GPU_IN * n + dst;
        return 2;
    }
    links[0] = POD_GPU_OUT * n + src;
    links[1] = POD_NIC_OUT * n + src;
    links[2] = POD_LINKS * n;
    links[3] = POD_NIC_IN * n + dst;
    links[4] = POD_GPU_IN * n + dst;
    return 5;
}

/* inside, outside: bytes/s of a GPU's switch port and NIC; spine: of all traffic between nodes. The
 * spine must be positive; latencies are for each link of a route. */
static inline pod *pod_make(int32_t nodes, int32_t gpus, double inside, double outside,
                            double spine, double latency) {
    pod *p = calloc(1, sizeof *p);
    int32_t n = nodes * gpus, links = POD_LINKS * n + 1;
    p->gpus = gpus;
    p->bandwidth = malloc((size_t)links * sizeof(double));
    p->latency = malloc((size_t)links * sizeof(double));
    p->inside = malloc((size_t)n * sizeof(double));
    p->outside = malloc((size_t)n * sizeof(double));
    p->uplink = calloc((size_t)nodes, sizeof(double));
    p->domain = malloc((size_t)n * sizeof(int32_t));
    p->device = malloc((size_t)n * sizeof(int32_t));
    p->rank = malloc((size_t)n * sizeof(int32_t));
    p->message = n <= 1024 ? malloc((size_t)n * (size_t)n * sizeof(mz_message)) : NULL;
    for (int32_t l = 0; l < links; l++) {
        p->bandwidth[l] = l < POD_NIC_OUT * n ? inside : l < POD_LINKS * n ? outside : spine;
        p->latency[l] = latency;
    }
    for (int32_t r = 0; r < n; r++) {
        p->inside[r] = inside;
        p->outside[r] = outside;
        p->domain[r] = r / gpus;
        p->device[r] = r;
        p->rank[r] = r;
    }
    for (int k = 0; k < 4; k++) {
        p->bytes[k] = malloc((size_t)n * sizeof(double));
    }
    p->topology = (mz_topology){.ranks = n,
                                .links = links,
                                .link_bytes_per_s = p->bandwidth,
                                .link_latency_s = p->latency,
                                .self = p,
                                .route = pod_route,
                                .domain = p->domain,
                                .domains = nodes,
                                .device = p->device,
                                .inside_bytes_per_s = p->inside,
                                .outside_bytes_per_s = p->outside,
                                .uplink_bytes_per_s = p->uplink,
                                .spine_bytes_per_s = spine,
                                .inside_latency_s = 2 * latency,
                                .outside_latency_s = 5 * latency};
    p->exchange = (mz_exchange){.members = n, .rank = p->rank, .message = p->message, .rounds = 1};
    return p;
}

static inline void pod_free(pod *p) {
    void *arrays[] = {p->bandwidth, p->latency, p->inside, p->outside, p->uplink,
                      p->domain,    p->device,  p->rank,   p->message};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        free(arrays[i]);
    }
    for (int k = 0; k < 4; k++) {
        free(p->bytes[k]);
    }
    free(p);
}

/* The exchange becomes an all-to-all. spread: how the sizes of single messages differ (standard
 * deviation of their logarithm); skew: the same for what a destination is worth to everybody; mean
 * bytes. whole > 0: sizes are multiples of it (tokens). */
static inline void pod_draw(pod *p, uint64_t seed, double mean, double spread, double skew,
                            double whole) {
    int32_t n = p->topology.ranks;
    mz_rng rng = mz_rng_make(seed, 0);
    double *worth = malloc((size_t)n * sizeof *worth);
    p->exchange.messages = 0;
    for (int32_t r = 0; r < n; r++) {
        worth[r] = mean * exp(skew * mz_rng_normal(&rng));
    }
    for (int32_t s = 0; s < n; s++) {
        for (int32_t d = 0; d < n; d++) {
            double bytes = worth[d] * exp(spread * mz_rng_normal(&rng));
            if (whole > 0) {
                bytes = whole * floor(bytes / whole + mz_rng_uniform(&rng));
            }
            if (s != d && bytes > 0) {
                p->message[p->exchange.messages++] = (mz_message){s, d, bytes};
            }
        }
    }
    free(worth);
    mz_exchange_aggregate(&p->topology, &p->exchange, p->bytes[0], p->bytes[1], p->bytes[2],
                          p->bytes[3]);
}

#endif
