#include "sim/engine/flow.h"

#include "sim/engine/share.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

mz_code mz_flow_create(const mz_topology *topology, double accuracy, mz_flow **flow, mz_err *err) {
    *flow = NULL;
    mz_flow *made = calloc(1, sizeof *made);
    size_t links = (size_t)topology->links + 1;
    if (made != NULL) {
        made->links = topology->links;
        made->accuracy = fmax(accuracy / 4, SHARE_TOLERANCE); /* the rest: knock-on, see tests */
        made->link = calloc(links, sizeof *made->link);
        made->fixed = calloc(links, sizeof *made->fixed);
        made->seen = calloc(links, sizeof *made->seen);
        made->limit = calloc(links, sizeof *made->limit);
        made->is_idle = calloc(links, sizeof *made->is_idle);
        made->due = calloc(links, sizeof *made->due);
        made->order = calloc(links, sizeof *made->order);
        made->touched = calloc(links, sizeof *made->touched);
        made->share = calloc(links, sizeof *made->share);
        made->heap = calloc(links, sizeof *made->heap);
        made->unfrozen = calloc(links, sizeof *made->unfrozen);
    }
    if (made == NULL || made->link == NULL || made->fixed == NULL || made->seen == NULL ||
        made->limit == NULL || made->is_idle == NULL || made->due == NULL || made->order == NULL ||
        made->touched == NULL || made->share == NULL || made->heap == NULL ||
        made->unfrozen == NULL) {
        mz_flow_free(&made);
        return mz_fail_nomem(err, "network links");
    }
    mz_code code = MZ_OK;
    for (int32_t l = 0; l < topology->links && code == MZ_OK; l++) {
        made->link[l].capacity = topology->link_bytes_per_s[l];
        if (!(topology->link_bytes_per_s[l] > 0) || !isfinite(topology->link_bytes_per_s[l])) {
            code = mz_fail(err, MZ_EINPUT, "network link %d has a bandwidth of %g bytes/s", (int)l,
                           topology->link_bytes_per_s[l]);
        }
    }
    if (code != MZ_OK) {
        mz_flow_free(&made);
        return code;
    }
    mz_flow_clear(made);
    *flow = made;
    return MZ_OK;
}

static void free_flows(mz_flow *flow) {
    free(flow->slot);
    free(flow->started);
    free(flow->ended);
    free(flow->pool);
    free(flow->table);
    flow->slot = NULL;
    flow->started = flow->ended = NULL;
    flow->pool = NULL;
    flow->table = NULL;
    flow->slots = 0;
}

void mz_flow_free(mz_flow **flow) {
    mz_flow *old = *flow;
    if (old == NULL) {
        return;
    }
    void *const arrays[] = {old->link, old->fixed,    old->seen,    old->limit,
                            old->due,  old->order,    old->touched, old->share,
                            old->heap, old->unfrozen, old->is_idle};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        free(arrays[i]);
    }
    free_flows(old);
    free(old);
    *flow = NULL;
}

void mz_flow_clear(mz_flow *flow) {
    for (int32_t l = 0; l < flow->links; l++) {
        link_state *link = &flow->link[l];
        *link = (link_state){.capacity = link->capacity,
                             .root = SHARE_NONE,
                             .flows = SHARE_NONE,
                             .lone = SHARE_NONE,
                             .many = SHARE_NONE,
                             .rank = SHARE_NONE,
                             .cover = SHARE_NONE};
        flow->fixed[l] = flow->seen[l] = 0;
        flow->limit[l] = link->capacity * (1 + SHARE_TOLERANCE);
        flow->is_idle[l] = false;
        flow->due[l] = INFINITY;
    }
    if (flow->table != NULL) {
        for (int64_t i = 0; i <= flow->table_mask; i++) {
            flow->table[i].key = SHARE_NONE;
        }
    }
    flow->now = 0;
    flow->next = INFINITY;
    flow->solved = flow->known = true;
    flow->ordered = flow->lowest = flow->touched_count = 0;
    flow->fresh = flow->active = flow->started_count = flow->ended_count = 0;
    flow->pool_fresh = 0;
    flow->free = flow->pool_free = SHARE_NONE;
    flow->work = (mz_flow_work){0};
}

/* Every event reads and writes all over these arrays: on large pages, where the system has them,
 * the addresses of more of it are at hand. */
static void *allocate(size_t size) {
    const size_t page = (size_t)2 << 20;
    if (size < 2 * page) {
        return malloc(size);
    }
    size = (size + page - 1) / page * page;
    void *memory = aligned_alloc(page, size);
    if (memory != NULL) {
        madvise(memory, size, MADV_HUGEPAGE);
    }
    return memory;
}

mz_code mz_flow_reserve(mz_flow *flow, int64_t flows, int route, mz_err *err) {
    /* every flow stands in a list of each of its links and in a pair with all but one of them; a
     * link's three lists have a partly filled chunk each */
    int64_t links = flow->links, pairs = flows * (route > 1 ? route - 1 : 1);
    int64_t pool = (flows * route + pairs) / CHUNK + 3 * links + 2;
    int64_t table = 1024;
    pairs = pairs < links * links ? pairs : links * links;
    while (table < 2 * pairs) {
        table *= 2;
    }
    if (flows <= flow->slots && pool <= flow->pool_size && table <= flow->table_mask + 1) {
        return MZ_OK;
    }
    if (flows > INT32_MAX || pool > INT32_MAX / 32) {
        return mz_fail(err, MZ_EINPUT,
                       "%lld messages on their way at once are too many for the flow network; use "
                       "the port network",
                       (long long)flows);
    }
    free_flows(flow);
    flow->slot = allocate((size_t)flows * sizeof *flow->slot);
    flow->started = malloc((size_t)flows * sizeof *flow->started);
    flow->ended = malloc((size_t)flows * sizeof *flow->ended);
    flow->pool = allocate((size_t)pool * sizeof *flow->pool);
    flow->table = allocate((size_t)table * sizeof *flow->table);
    if (flow->slot == NULL || flow->started == NULL || flow->ended == NULL || flow->pool == NULL ||
        flow->table == NULL) {
        free_flows(flow);
        return mz_fail_nomem(err, "flows");
    }
    flow->slots = (int32_t)flows;
    flow->pool_size = (int32_t)pool;
    flow->table_mask = table - 1;
    mz_flow_clear(flow);
    return MZ_OK;
}

/* A neighbour of links[at] on the route with less capacity: what it carries can never fill
 * links[at]. */
static int32_t cover_of(const mz_flow *flow, const int32_t *links, int count, int at) {
    double capacity = flow->link[links[at]].capacity;
    if (at + 1 < count && flow->link[links[at + 1]].capacity < capacity) {
        return links[at + 1];
    }
    if (at > 0 && flow->link[links[at - 1]].capacity < capacity) {
        return links[at - 1];
    }
    return SHARE_NONE;
}

static inline bool beside(const int32_t *links, int count, int at, int32_t l) {
    return l != SHARE_NONE &&
           ((at + 1 < count && links[at + 1] == l) || (at > 0 && links[at - 1] == l));
}

static void elect_cover(mz_flow *flow, int32_t l, int32_t cover) {
    link_state *link = &flow->link[l];
    link->cover = cover;
    link->uncovered = 0;
    for (int32_t c = link->flows; c != SHARE_NONE; c = flow->pool[c].next) {
        for (int32_t i = 0; i < flow->pool[c].used; i++) {
            const flow_slot *slot = &flow->slot[flow->pool[c].entry[i].a];
            int at = 0;
            while (slot->link[at] != l) {
                at++;
            }
            link->uncovered += !beside(slot->link, slot->count, at, cover);
        }
    }
}

void mz_flow_begin(mz_flow *flow, double now, const int32_t *links, int count, double bytes,
                   int32_t id) {
    int32_t index = flow->free;
    if (index != SHARE_NONE) {
        flow->free = flow->slot[index].next;
    } else {
        index = flow->fresh++;
    }
    flow_slot *slot = &flow->slot[index];
    *slot = (flow_slot){
        .ends = bytes, .began = now, .bottleneck = SHARE_NONE, .id = id, .count = count};
    memcpy(slot->link, links, (size_t)count * sizeof *links);
    for (int i = 0; i < count; i++) {
        link_state *link = &flow->link[links[i]];
        slot->place[i] = mz_list_add(flow, &link->flows, (pair_entry){index, SHARE_NONE});
        link->degree++;
        if (beside(links, count, i, link->cover)) {
            continue;
        }
        link->uncovered++;
        /* each time the flows have doubled, the newest may name another cover */
        if ((link->degree & (link->degree - 1)) == 0) {
            elect_cover(flow, links[i], cover_of(flow, links, count, i));
        }
    }
    flow->now = now;
    flow->started[flow->started_count++] = index;
    flow->active++;
    flow->solved = false;
}

/* The flow leaves the lists of its links. */
static void unlist(mz_flow *flow, int32_t index) {
    flow_slot *slot = &flow->slot[index];
    for (int i = 0; i < slot->count; i++) {
        int32_t l = slot->link[i], place = slot->place[i];
        if (mz_list_remove(flow, &flow->link[l].flows, place) != place) {
            flow_slot *moved = &flow->slot[mz_list_entry(flow, place)->a];
            int k = 0;
            while (moved->link[k] != l) {
                k++;
            }
            moved->place[k] = place;
        }
        link_state *link = &flow->link[l];
        link->uncovered -= !beside(slot->link, slot->count, i, link->cover);
        if (--link->degree == 0) {
            flow->fixed[l] = 0; /* what rounding has left */
            flow->is_idle[l] = false;
        } else if (link->uncovered == 0 && !flow->is_idle[l]) {
            mz_share_cover(flow, l);
        }
    }
}

static void end_flow(mz_flow *flow, int32_t index) {
    flow_slot *slot = &flow->slot[index];
    mz_share_detach(flow, index);
    unlist(flow, index);
    flow->ended[flow->ended_count++] = slot->id;
    slot->id = slot->bottleneck = SHARE_NONE;
    slot->next = flow->free;
    flow->free = index;
    flow->active--;
    flow->solved = false;
}

/* Sums rounding errors of `fixed` away. */
static void refresh(mz_flow *flow) {
    for (int32_t l = 0; l < flow->links; l++) {
        flow->fixed[l] = 0;
    }
    for (int32_t k = 0; k < flow->links; k++) {
        const link_state *link = &flow->link[k];
        for (int32_t c = link->lone; c != SHARE_NONE; c = flow->pool[c].next) {
            for (int32_t i = 0; i < flow->pool[c].used; i++) {
                flow->fixed[flow->pool[c].entry[i].a] += link->level;
            }
        }
        for (int32_t c = link->many; c != SHARE_NONE; c = flow->pool[c].next) {
            for (int32_t i = 0; i < flow->pool[c].used; i++) {
                pair_entry pair = flow->pool[c].entry[i];
                flow->fixed[pair.a] += pair.b * link->level;
            }
        }
    }
    flow->lowest = 0; /* any link may differ from `seen` now */
}

static void solve(mz_flow *flow) {
    enum { REFRESH = 4096 };
    if (++flow->work.solutions % REFRESH == 0) {
        refresh(flow);
    }
    /* many at once are quicker from scratch */
    if (4 * (int64_t)flow->started_count > flow->active) {
        flow->work.fills++;
        mz_share_fill(flow);
    } else {
        for (int32_t i = 0; i < flow->started_count; i++) {
            const flow_slot *slot = &flow->slot[flow->started[i]];
            for (int k = 0; k < slot->count; k++) {
                mz_share_cover(flow, slot->link[k]);
            }
        }
        for (int32_t i = 0; i < flow->started_count; i++) {
            mz_share_attach(flow, flow->started[i]);
        }
        if (!mz_share_update(flow)) {
            flow->work.unsettled++;
            mz_share_fill(flow);
        }
    }
    flow->started_count = 0;
    for (int32_t i = 0; i < flow->touched_count; i++) {
        int32_t l = flow->touched[i];
        link_state *link = &flow->link[l];
        link->touched = false;
        flow->due[l] = INFINITY;
        if (link->own > 0) {
            mz_share_settle(flow, link);
            double left = flow->slot[link->root].ends - link->service;
            flow->due[l] = flow->now + fmax(left, 0) / link->level;
        }
    }
    flow->touched_count = 0;
    flow->solved = true;
    flow->known = false;
}

double mz_flow_next(mz_flow *flow) {
    if (flow->ended_count > 0) {
        return flow->now;
    }
    if (!flow->solved) {
        solve(flow);
    }
    if (!flow->known) {
        flow->next = INFINITY;
        for (int32_t i = 0; i < flow->ordered; i++) {
            double due = flow->due[flow->order[i]];
            flow->next = due < flow->next ? due : flow->next;
        }
        flow->known = true;
    }
    return flow->next;
}

/* Ends all flows that end now: at least the first of `l` when its time is exactly now. */
static void end_flows_of(mz_flow *flow, int32_t l) {
    link_state *link = &flow->link[l];
    bool first = flow->due[l] <= flow->now;
    mz_share_settle(flow, link);
    while (link->own > 0) {
        const flow_slot *root = &flow->slot[link->root];
        double part = flow->accuracy * (flow->now - root->began) * link->level;
        if (!first && root->ends - link->service > part) {
            break;
        }
        first = false;
        end_flow(flow, link->root);
    }
}

int32_t mz_flow_end(mz_flow *flow) {
    if (flow->ended_count == 0) {
        flow->now = mz_flow_next(flow);
        double last = flow->now * (1 + flow->accuracy);
        /* from the highest rank down, as links that lose their last own flow leave the order */
        for (int32_t i = flow->ordered - 1; i >= 0; i--) {
            if (flow->due[flow->order[i]] <= last) {
                end_flows_of(flow, flow->order[i]);
            }
        }
    }
    return flow->ended[--flow->ended_count];
}

double mz_flow_rate(const mz_flow *flow, int32_t id) {
    for (int32_t i = 0; i < flow->fresh; i++) {
        if (flow->slot[i].id == id) {
            return flow->link[flow->slot[i].bottleneck].level;
        }
    }
    return 0;
}

mz_flow_work mz_flow_worked(const mz_flow *flow) {
    return flow->work;
}
