/* Inside of the flow network: flows, links, and who limits whom.
 *
 * In a max-min fair allocation every flow has a bottleneck: a saturated link on which no flow is
 * faster. All flows bottlenecked at a link have one rate, the link's level
 *     level = (capacity - fixed) / own,
 * where own counts these flows and fixed sums the rates of the link's other flows, bottlenecked
 * elsewhere at lower levels. An allocation in which every link with own > 0 has this level, no flow
 * bottlenecked elsewhere on it is faster than its level, and no link carries more than its capacity
 * is the max-min fair one (Bertsekas and Gallager, "Data Networks", 6.5.2: the allocation is
 * max-min fair exactly when every flow has a bottleneck).
 *
 * So what is stored is the bottleneck of each flow, the levels, and for every pair of links (k, l)
 * how many flows bottlenecked at k pass l: a change of k's level changes `fixed` of those l alone.
 * Flows of one bottleneck drain at one rate and end in order of (service of the link when they
 * began there + bytes), so an event touches the links whose level changes and no flow that stays.
 */
#ifndef MIZAN_SIM_ENGINE_SHARE_H
#define MIZAN_SIM_ENGINE_SHARE_H

#include "sim/engine/flow.h"

#include <math.h>

enum { SHARE_NONE = -1, CHUNK = 31 };

/* Levels that differ by less than this part are equal, and flows that would end within this part of
 * their time end together: what rounding leaves of equal numbers. */
#define SHARE_TOLERANCE 1e-12

typedef struct pair_entry {
    int32_t a, b;
} pair_entry;

/* Lists of (a, b), in chunks of one pool so that they are scanned in order and grow without
 * allocation. The first chunk of a list is the one being filled. */
typedef struct chunk {
    int32_t next, used;
    pair_entry entry[CHUNK];
} chunk;

typedef struct flow_slot {
    double ends; /* service of its bottleneck at which it is through */
    double began;
    int32_t child, next, before; /* heap of its bottleneck: pairing heap */
    int32_t bottleneck;          /* SHARE_NONE: slot not in use */
    int32_t id, count;
    int32_t link[MZ_ROUTE_MAX];
    int32_t place[MZ_ROUTE_MAX]; /* of its entry in each link's list */
} flow_slot;

typedef struct link_state {
    double capacity, level;
    double service, at; /* bytes given to each own flow until time `at` */
    int32_t own;        /* flows bottlenecked here */
    int32_t degree;     /* flows on the link */
    int32_t root;       /* heap of own flows by `ends` */
    int32_t flows;      /* list of (flow, its bottleneck) */
    int32_t lone;       /* list of (l, flow): the one own flow on link l */
    int32_t many;  /* list of (l, count): own flows on link l that are, or were, more than one */
    int32_t rank;  /* place in `order`; SHARE_NONE: no own flows */
    int32_t cover; /* a neighbour with less capacity on the route of a flow here, or
                      SHARE_NONE */
    int32_t uncovered; /* flows that do not pass `cover` */
    bool touched;      /* in `touched` */
} link_state;

typedef struct pair_slot {
    int64_t key; /* k * links + l, or SHARE_NONE */
    int32_t place;
    bool many; /* which list of k has it */
} pair_slot;

struct mz_flow {
    double accuracy, now, next;
    bool solved, known; /* no flow began or ended since the last solution; `next` is right */
    int32_t links;
    link_state *link;
    double *fixed; /* [links] rates of its flows that are bottlenecked elsewhere */
    double *seen;  /* [links] `fixed` when the level was found. A link with own flows where the two
                    * differ (dirty) needs a new level; NAN: for another reason */
    double *limit; /* [links] greatest `fixed` of a link without own flows; else infinity */
    bool *is_idle; /* [links] all flows pass a link with less capacity, so that this one never
                    * saturates: `fixed`, pairs and the list's bottlenecks are not kept up */
    double *due;   /* [links] when the first own flow ends */
    int32_t *order, ordered;         /* links with own flows by level */
    int32_t lowest;                  /* no dirty link stands before this place in `order` */
    int32_t *touched, touched_count; /* links whose level or first flow changed */
    double *share;                   /* filling: heap of links by share */
    int32_t *heap, *unfrozen, heap_count;
    flow_slot *slot;
    int32_t slots, fresh, free, active;
    int32_t *started, started_count; /* flows that wait for the next solution */
    int32_t *ended, ended_count;     /* flows that end now, not yet taken */
    chunk *pool;
    int32_t pool_size, pool_fresh, pool_free;
    pair_slot *table;
    int64_t table_mask;
    mz_flow_work work;
};

/* lists.c: lists in chunks, and the table that finds a pair's entry. */
int32_t mz_list_add(mz_flow *flow, int32_t *list, pair_entry entry); /* its place */
/* Removes by moving the last added entry there; returns the moved entry's old place (== place when
 * nothing moved). */
int32_t mz_list_remove(mz_flow *flow, int32_t *list, int32_t place);
void mz_list_drop(mz_flow *flow, int32_t *list);
static inline pair_entry *mz_list_entry(mz_flow *flow, int32_t place) {
    return &flow->pool[place >> 5].entry[place & 31];
}
/* Own flows of k on l; *lone is the flow if there is one and it is known, else SHARE_NONE. */
int32_t mz_pair_count(const mz_flow *flow, int32_t k, int32_t l, int32_t *lone);
void mz_pair_add(mz_flow *flow, int32_t k, int32_t l, int32_t slot);
void mz_pair_drop(mz_flow *flow, int32_t k, int32_t l);
void mz_pair_clear(mz_flow *flow);

/* heap.c: own flows of a link by `ends`. */
void mz_heap_insert(mz_flow *flow, link_state *link, int32_t slot);
void mz_heap_remove(mz_flow *flow, link_state *link, int32_t slot);

/* fill.c: everything from scratch, by progressive filling. */
void mz_share_fill(mz_flow *flow);

/* share.c: only what begins and ends set off. false: it did not settle; fill. */
bool mz_share_update(mz_flow *flow);
void mz_share_attach(mz_flow *flow, int32_t slot);
void mz_share_detach(mz_flow *flow, int32_t slot);
void mz_share_touch(mz_flow *flow, int32_t link);

/* A link's list is right again after flows came or went: is_idle follows `uncovered`. */
void mz_share_cover(mz_flow *flow, int32_t link);

/* Brings a link's service to the present. */
static inline void mz_share_settle(const mz_flow *flow, link_state *link) {
    if (link->own > 0) {
        link->service += link->level * (flow->now - link->at);
    }
    link->at = flow->now;
}

#endif
