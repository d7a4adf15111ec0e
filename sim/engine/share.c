/* The solution after flows began or ended, found from the one before.
 *
 * Links with own flows stand in `order` by level. What is kept at every moment: a link k with flows
 * bottlenecked at it that pass l (a pair) stands before l, if l has own flows. A link whose level
 * no longer fits (dirty) takes its new level and moves in the order; where it passes another link,
 * the flows of their pair change sides - below the new level they are held by the other link, above
 * it by this one. Dirty links are taken from the lowest up, since levels depend on lower levels
 * only. */
#include "sim/engine/share.h"

#include <limits.h>
#include <stddef.h>

static inline bool is_dirty(const mz_flow *flow, int32_t l) {
    return flow->fixed[l] != flow->seen[l];
}

/* The level of a link with own flows is no longer right. */
static void mark(mz_flow *flow, int32_t l) {
    flow->seen[l] = NAN;
    int32_t rank = flow->link[l].rank;
    flow->lowest = rank < flow->lowest ? rank : flow->lowest;
}

static void add_load(mz_flow *flow, int32_t l, double rate) {
    flow->fixed[l] += rate;
    int32_t rank = flow->link[l].rank;
    if (rank != SHARE_NONE && rank < flow->lowest) {
        flow->lowest = rank;
    }
}

void mz_share_touch(mz_flow *flow, int32_t l) {
    if (!flow->link[l].touched) {
        flow->link[l].touched = true;
        flow->touched[flow->touched_count++] = l;
    }
}

/* A link gets its first own flow: it comes last in the order, where no pair can contradict. */
static void activate(mz_flow *flow, int32_t l, double level) {
    link_state *link = &flow->link[l];
    link->level = level;
    link->at = flow->now;
    link->rank = flow->ordered;
    flow->order[flow->ordered++] = l;
    flow->limit[l] = INFINITY;
    flow->seen[l] = NAN;
}

/* The links at rank - 1 and rank have become neighbours because one between them went. It was
 * compared with each, they were not with one another. */
static void meet(mz_flow *flow, int32_t rank) {
    if (rank < 1 || rank >= flow->ordered) {
        return;
    }
    int32_t a = flow->order[rank - 1], b = flow->order[rank];
    if (flow->link[a].level > flow->link[b].level * (1 + SHARE_TOLERANCE)) {
        mark(flow, b);
    }
}

/* A link lost its last own flow. */
static void deactivate(mz_flow *flow, int32_t l) {
    link_state *link = &flow->link[l];
    int32_t rank = link->rank;
    flow->ordered--;
    for (int32_t i = rank; i < flow->ordered; i++) {
        flow->order[i] = flow->order[i + 1];
        flow->link[flow->order[i]].rank = i;
    }
    flow->lowest = rank < flow->lowest ? rank : flow->lowest;
    link->rank = SHARE_NONE;
    flow->limit[l] = link->capacity * (1 + SHARE_TOLERANCE);
    meet(flow, rank);
}

/* Gives an own flow of `from` to `to`; both have a rank. */
static void move_flow(mz_flow *flow, int32_t index, int32_t from, int32_t to) {
    link_state *old = &flow->link[from], *new = &flow->link[to];
    flow_slot *slot = &flow->slot[index];
    double change = new->level - old->level;
    mz_heap_remove(flow, old, index);
    slot->ends += new->service - old->service;
    slot->bottleneck = to;
    mz_heap_insert(flow, new, index);
    for (int i = 0; i < slot->count; i++) {
        int32_t other = slot->link[i];
        if (flow->is_idle[other]) {
            continue;
        }
        mz_list_entry(flow, slot->place[i])->b = to;
        if (other != from) {
            mz_pair_drop(flow, from, other);
        }
        if (other != to) {
            mz_pair_add(flow, to, other, index);
        }
        if (other != from && other != to) {
            add_load(flow, other, change);
        }
    }
    old->own--;
    new->own++;
    flow->fixed[from] += new->level;
    flow->fixed[to] -= old->level;
    flow->work.moves++;
}

static bool passes(const flow_slot *slot, int32_t l) {
    for (int i = 0; i < slot->count; i++) {
        if (slot->link[i] == l) {
            return true;
        }
    }
    return false;
}

/* Gives to `to` all own flows of `from` that pass it; returns how many. */
static int32_t move_flows(mz_flow *flow, int32_t from, int32_t to) {
    int32_t lone, count = mz_pair_count(flow, from, to, &lone), left = count;
    if (count == 0) {
        return 0;
    }
    link_state *old = &flow->link[from], *new = &flow->link[to];
    mz_share_settle(flow, old);
    mz_share_settle(flow, new);
    mz_share_touch(flow, from);
    mz_share_touch(flow, to);
    if (lone != SHARE_NONE) {
        move_flow(flow, lone, from, to);
        return 1;
    }
    /* either list has them all; on a link's own list only its own flows need a look at their route
     */
    bool own = new->degree > 8 * (int64_t)old->degree;
    for (int32_t c = own ? old->flows : new->flows; c != SHARE_NONE &&left > 0;
         c = flow->pool[c].next) {
        for (int32_t i = 0; i < flow->pool[c].used && left > 0; i++) {
            pair_entry entry = flow->pool[c].entry[i];
            if (entry.b == from && (!own || passes(&flow->slot[entry.a], to))) {
                move_flow(flow, entry.a, from, to);
                left--;
            }
        }
    }
    return count;
}

static inline double wanted(const mz_flow *flow, int32_t l) {
    const link_state *link = &flow->link[l];
    return link->own > 0 ? (link->capacity - flow->fixed[l]) / link->own : -INFINITY;
}

/* The level to compare with: what it will be, where that is known to change. A dirty link stays so
 * then, even if its load comes back to what it was. */
static inline double level_of(mz_flow *flow, int32_t l) {
    if (!is_dirty(flow, l)) {
        return flow->link[l].level;
    }
    flow->seen[l] = NAN;
    return wanted(flow, l);
}

static void swap_ranks(mz_flow *flow, int32_t rank) {
    int32_t a = flow->order[rank], b = flow->order[rank + 1];
    flow->order[rank] = b;
    flow->order[rank + 1] = a;
    flow->link[b].rank = rank;
    flow->link[a].rank = rank + 1;
    if (rank < flow->lowest && is_dirty(flow, b)) {
        flow->lowest = rank;
    }
}

/* Moves `l`, which wants `level`, before links of higher level, taking the flows they held on it.
 * Returns the level it wants then. */
static double sink(mz_flow *flow, int32_t l, double level) {
    const link_state *link = &flow->link[l];
    while (link->rank > 0) {
        int32_t other = flow->order[link->rank - 1];
        if (!(level_of(flow, other) > level * (1 + SHARE_TOLERANCE))) {
            break;
        }
        swap_ranks(flow, link->rank - 1);
        if (move_flows(flow, other, l) > 0) {
            if (flow->link[other].own == 0) {
                deactivate(flow, other);
            } else {
                mark(flow, other);
            }
            level = wanted(flow, l);
        }
    }
    return level;
}

/* Moves `l` behind links of lower level, leaving them the flows they hold back. They would take
 * them themselves when they sink, but by then `l` would have had too high a level for nothing. */
static double rise(mz_flow *flow, int32_t l, double level) {
    const link_state *link = &flow->link[l];
    while (link->own > 0 && link->rank + 1 < flow->ordered) {
        int32_t other = flow->order[link->rank + 1];
        if (!(level > level_of(flow, other) * (1 + SHARE_TOLERANCE))) {
            break;
        }
        swap_ranks(flow, link->rank);
        if (move_flows(flow, l, other) > 0) {
            mark(flow, other);
            level = wanted(flow, l);
        }
    }
    return level;
}

static inline void prefetch(const mz_flow *flow, int32_t c) {
    if (c != SHARE_NONE) {
        const char *part = (const char *)&flow->pool[c];
        for (size_t line = 0; line < sizeof(chunk); line += 64) {
            __builtin_prefetch(part + line);
        }
    }
}

static void set_level(mz_flow *flow, int32_t l, double level) {
    link_state *link = &flow->link[l];
    double change = level - link->level;
    flow->seen[l] = flow->fixed[l];
    if (fabs(change) <= 1e-15 * level) {
        return;
    }
    mz_share_settle(flow, link);
    mz_share_touch(flow, l);
    link->level = level;
    flow->work.levels++;
    double *fixed = flow->fixed; /* of links that stand behind: `lowest` stays right */
    for (int32_t c = link->lone; c != SHARE_NONE;) {
        const chunk *part = &flow->pool[c];
        c = part->next;
        prefetch(flow, c);
        const pair_entry *end = part->entry + part->used;
        for (const pair_entry *pair = part->entry; pair < end; pair++) {
            fixed[pair->a] += change;
        }
    }
    for (int32_t c = link->many; c != SHARE_NONE; c = flow->pool[c].next) {
        const chunk *part = &flow->pool[c];
        const pair_entry *end = part->entry + part->used;
        for (const pair_entry *pair = part->entry; pair < end; pair++) {
            fixed[pair->a] += pair->b * change;
        }
    }
}

static void process(mz_flow *flow, int32_t l) {
    int32_t rank = flow->link[l].rank;
    prefetch(flow, flow->link[l].lone);
    double level = rise(flow, l, sink(flow, l, wanted(flow, l)));
    if (flow->link[l].own == 0) {
        deactivate(flow, l);
    } else {
        set_level(flow, l, level);
    }
    meet(flow, rank);
    meet(flow, rank + 1);
}

/* A link without own flows that carries more than its capacity takes flows from the fastest. */
static bool process_overload(mz_flow *flow) {
    for (int32_t l = 0; l < flow->links; l++) {
        if (flow->fixed[l] > flow->limit[l]) {
            activate(flow, l, 0);
            process(flow, l);
            return true;
        }
    }
    return false;
}

/* The link's flows load it again (`by` 1) or no longer (-1). */
static void load_flows(mz_flow *flow, int32_t l, int32_t by) {
    for (int32_t c = flow->link[l].flows; c != SHARE_NONE; c = flow->pool[c].next) {
        for (int32_t i = 0; i < flow->pool[c].used; i++) {
            pair_entry *entry = &flow->pool[c].entry[i];
            entry->b = flow->slot[entry->a].bottleneck;
            if (entry->b != SHARE_NONE) {
                if (by > 0) {
                    mz_pair_add(flow, entry->b, l, entry->a);
                } else {
                    mz_pair_drop(flow, entry->b, l);
                }
                add_load(flow, l, by * flow->link[entry->b].level);
            }
        }
    }
}

void mz_share_cover(mz_flow *flow, int32_t l) {
    const link_state *link = &flow->link[l];
    bool idle = link->uncovered == 0 && link->degree > 0;
    if (idle == flow->is_idle[l] || (idle && link->own > 0)) {
        return; /* a link with own flows stays in the order until they have gone */
    }
    flow->is_idle[l] = idle;
    load_flows(flow, l, idle ? -1 : 1);
    if (idle) {
        flow->fixed[l] = 0;
    }
}

void mz_share_attach(mz_flow *flow, int32_t index) {
    flow_slot *slot = &flow->slot[index];
    int32_t at = SHARE_NONE, spare = SHARE_NONE;
    for (int i = 0; i < slot->count; i++) {
        int32_t l = slot->link[i];
        const link_state *link = &flow->link[l];
        if (flow->is_idle[l]) {
            continue;
        }
        if (link->own > 0) {
            at = at == SHARE_NONE || link->rank < flow->link[at].rank ? l : at;
        } else if (spare == SHARE_NONE || link->capacity - flow->fixed[l] <
                                              flow->link[spare].capacity - flow->fixed[spare]) {
            spare = l;
        }
    }
    if (at == SHARE_NONE) {
        at = spare;
        activate(flow, at, fmax(flow->link[at].capacity - flow->fixed[at], 0));
    }
    link_state *link = &flow->link[at];
    mz_share_settle(flow, link);
    slot->ends += link->service;
    slot->bottleneck = at;
    link->own++;
    mz_heap_insert(flow, link, index);
    for (int i = 0; i < slot->count; i++) {
        if (flow->is_idle[slot->link[i]]) {
            continue;
        }
        mz_list_entry(flow, slot->place[i])->b = at;
        if (slot->link[i] != at) {
            mz_pair_add(flow, at, slot->link[i], index);
            add_load(flow, slot->link[i], link->level);
        }
    }
    mark(flow, at);
    mz_share_touch(flow, at);
}

void mz_share_detach(mz_flow *flow, int32_t index) {
    flow_slot *slot = &flow->slot[index];
    int32_t at = slot->bottleneck;
    link_state *link = &flow->link[at];
    mz_share_settle(flow, link);
    mz_heap_remove(flow, link, index);
    mz_share_touch(flow, at);
    for (int i = 0; i < slot->count; i++) {
        int32_t l = slot->link[i];
        if (l != at && !flow->is_idle[l]) {
            mz_pair_drop(flow, at, l);
            add_load(flow, l, -link->level);
        }
    }
    if (--link->own > 0) {
        mark(flow, at);
    } else {
        deactivate(flow, at);
    }
}

bool mz_share_update(mz_flow *flow) {
    int64_t steps = 64 * ((int64_t)flow->links + 16);
    for (;;) {
        int32_t rank = flow->lowest;
        while (rank < flow->ordered && !is_dirty(flow, flow->order[rank])) {
            rank++;
        }
        flow->lowest = rank;
        if (steps-- == 0) {
            return false;
        }
        if (rank < flow->ordered) {
            process(flow, flow->order[rank]);
        } else if (!process_overload(flow)) {
            flow->lowest = INT_MAX;
            return true;
        }
    }
}
