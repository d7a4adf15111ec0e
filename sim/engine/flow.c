#include "sim/engine/flow.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct flow_state {
    double left, rate;
    int32_t links[MZ_ROUTE_MAX];
    int32_t count, id;
} flow_state;

struct mz_flow {
    const mz_topology *topology;
    flow_state *flows;
    int64_t active, capacity;
    double now, next;
    bool solved;
    double *spare;  /* [links] capacity not given away while filling */
    int32_t *users; /* [links] flows without a rate while filling */
};

mz_code mz_flow_create(const mz_topology *topology, double accuracy, mz_flow **flow, mz_err *err) {
    mz_flow *made = calloc(1, sizeof *made);
    *flow = NULL;
    (void)accuracy;
    if (made != NULL) {
        made->topology = topology;
        made->spare = malloc(((size_t)topology->links + 1) * sizeof *made->spare);
        made->users = malloc(((size_t)topology->links + 1) * sizeof *made->users);
    }
    if (made == NULL || made->spare == NULL || made->users == NULL) {
        mz_flow_free(&made);
        return mz_fail_nomem(err, "network links");
    }
    *flow = made;
    return MZ_OK;
}

void mz_flow_free(mz_flow **flow) {
    if (*flow != NULL) {
        free((*flow)->flows);
        free((*flow)->spare);
        free((*flow)->users);
        free(*flow);
        *flow = NULL;
    }
}

void mz_flow_clear(mz_flow *flow) {
    flow->active = 0;
    flow->now = 0;
    flow->solved = false;
}

mz_code mz_flow_reserve(mz_flow *flow, int64_t flows, mz_err *err) {
    if (flows > flow->capacity) {
        flow_state *grown = realloc(flow->flows, (size_t)flows * sizeof *grown);
        if (grown == NULL) {
            return mz_fail_nomem(err, "flows");
        }
        flow->flows = grown;
        flow->capacity = flows;
    }
    return MZ_OK;
}

static void advance(mz_flow *flow, double now) {
    for (int64_t i = 0; i < flow->active && now > flow->now; i++) {
        flow->flows[i].left -= flow->flows[i].rate * (now - flow->now);
    }
    flow->now = now;
}

void mz_flow_begin(mz_flow *flow, double now, const int32_t *links, int count, double bytes,
                   int32_t id) {
    if (now > flow->now) {
        mz_flow_next(flow);
    }
    advance(flow, now);
    flow_state *made = &flow->flows[flow->active++];
    *made = (flow_state){.left = bytes, .count = count, .id = id};
    memcpy(made->links, links, (size_t)count * sizeof *links);
    flow->solved = false;
}

static void fill(mz_flow *flow) {
    for (int32_t l = 0; l < flow->topology->links; l++) {
        flow->spare[l] = flow->topology->link_bytes_per_s[l];
        flow->users[l] = 0;
    }
    for (int64_t i = 0; i < flow->active; i++) {
        flow->flows[i].rate = -1;
        for (int k = 0; k < flow->flows[i].count; k++) {
            flow->users[flow->flows[i].links[k]]++;
        }
    }
    for (int64_t given = 0; given < flow->active;) {
        int32_t tight = -1;
        double share = INFINITY;
        for (int32_t l = 0; l < flow->topology->links; l++) {
            if (flow->users[l] > 0 && flow->spare[l] / flow->users[l] < share) {
                share = flow->spare[l] / flow->users[l];
                tight = l;
            }
        }
        for (int64_t i = 0; i < flow->active; i++) {
            flow_state *f = &flow->flows[i];
            bool here = false;
            for (int k = 0; k < f->count; k++) {
                here |= f->links[k] == tight;
            }
            if (f->rate >= 0 || !here) {
                continue;
            }
            f->rate = share;
            given++;
            for (int k = 0; k < f->count; k++) {
                flow->spare[f->links[k]] -= share;
                flow->users[f->links[k]]--;
            }
        }
    }
}

double mz_flow_next(mz_flow *flow) {
    if (!flow->solved) {
        fill(flow);
        flow->next = INFINITY;
        for (int64_t i = 0; i < flow->active; i++) {
            const flow_state *f = &flow->flows[i];
            flow->next = fmin(flow->next, flow->now + fmax(f->left, 0) / f->rate);
        }
        flow->solved = true;
    }
    return flow->next;
}

int32_t mz_flow_end(mz_flow *flow) {
    int64_t first = 0;
    for (int64_t i = 1; i < flow->active; i++) {
        const flow_state *f = &flow->flows[i], *best = &flow->flows[first];
        if (f->left / f->rate < best->left / best->rate) {
            first = i;
        }
    }
    int32_t id = flow->flows[first].id;
    advance(flow, flow->next);
    flow->flows[first] = flow->flows[--flow->active];
    flow->solved = false;
    return id;
}
