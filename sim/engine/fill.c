/* Progressive filling from scratch: all rates rise together; the link with the smallest share
 * (capacity left / flows still rising) saturates first, its flows stop there, and so on. Shares
 * only grow, so a heap with keys that are brought up to date when they surface finds the smallest.
 */
#include "sim/engine/share.h"

static bool sooner(const mz_flow *flow, int32_t a, int32_t b) {
    return flow->share[a] < flow->share[b] || (flow->share[a] == flow->share[b] && a < b);
}

static void sift_down(mz_flow *flow, int32_t at) {
    int32_t *heap = flow->heap, link = heap[at];
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= flow->heap_count) {
            break;
        }
        if (child + 1 < flow->heap_count && sooner(flow, heap[child + 1], heap[child])) {
            child++;
        }
        if (!sooner(flow, heap[child], link)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = link;
}

static double share_of(const mz_flow *flow, int32_t link) {
    double left = flow->link[link].capacity - flow->fixed[link];
    return fmax(left, 0) / flow->unfrozen[link];
}

/* Forgets the old solution; flows keep, in `ends`, the bytes they still have to move. */
static void reset(mz_flow *flow) {
    for (int32_t i = 0; i < flow->fresh; i++) {
        flow_slot *slot = &flow->slot[i];
        if (slot->bottleneck >= 0) {
            link_state *link = &flow->link[slot->bottleneck];
            mz_share_settle(flow, link);
            slot->ends = fmax(slot->ends - link->service, 0);
        }
    }
    mz_pair_clear(flow);
    flow->heap_count = 0;
    for (int32_t l = 0; l < flow->links; l++) {
        link_state *link = &flow->link[l];
        link->own = 0;
        link->root = link->rank = SHARE_NONE;
        link->service = 0;
        link->at = flow->now;
        flow->fixed[l] = flow->seen[l] = 0;
        flow->limit[l] = link->capacity * (1 + SHARE_TOLERANCE);
        flow->unfrozen[l] = link->degree;
        flow->is_idle[l] = link->degree > 0 && link->uncovered == 0;
        if (link->degree > 0 && !flow->is_idle[l]) {
            flow->share[l] = share_of(flow, l);
            flow->heap[flow->heap_count++] = l;
        }
        mz_share_touch(flow, l);
    }
    for (int32_t i = flow->heap_count / 2 - 1; i >= 0; i--) {
        sift_down(flow, i);
    }
    flow->ordered = 0;
}

/* Stops every flow of `l` that still rises. `unfrozen` is -1 for links that are done. */
static void saturate(mz_flow *flow, int32_t l) {
    link_state *link = &flow->link[l];
    link->level = share_of(flow, l);
    link->rank = flow->ordered;
    flow->order[flow->ordered++] = l;
    flow->unfrozen[l] = SHARE_NONE;
    for (int32_t c = link->flows; c != SHARE_NONE; c = flow->pool[c].next) {
        for (int32_t i = 0; i < flow->pool[c].used; i++) {
            int32_t index = flow->pool[c].entry[i].a;
            flow_slot *slot = &flow->slot[index];
            if (slot->bottleneck != SHARE_NONE) {
                continue;
            }
            slot->bottleneck = l;
            link->own++;
            for (int k = 0; k < slot->count; k++) {
                int32_t other = slot->link[k];
                if (flow->is_idle[other]) {
                    continue;
                }
                mz_list_entry(flow, slot->place[k])->b = l;
                if (other != l) {
                    flow->fixed[other] += link->level;
                    flow->unfrozen[other]--;
                    mz_pair_add(flow, l, other, index);
                }
            }
            mz_heap_insert(flow, link, index);
        }
    }
    flow->seen[l] = flow->fixed[l];
    flow->limit[l] = INFINITY;
}

void mz_share_fill(mz_flow *flow) {
    reset(flow);
    for (int32_t i = 0; i < flow->fresh; i++) {
        if (flow->slot[i].id != SHARE_NONE) {
            flow->slot[i].bottleneck = SHARE_NONE;
        }
    }
    while (flow->heap_count > 0) {
        int32_t l = flow->heap[0];
        double share = flow->unfrozen[l] > 0 ? share_of(flow, l) : INFINITY;
        if (flow->unfrozen[l] > 0 && share > flow->share[l]) {
            flow->share[l] = share;
            sift_down(flow, 0);
            continue;
        }
        flow->heap[0] = flow->heap[--flow->heap_count];
        sift_down(flow, 0);
        if (flow->unfrozen[l] > 0) {
            saturate(flow, l);
        }
    }
    flow->lowest = flow->ordered;
}
