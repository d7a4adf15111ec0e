#include "sim/engine/share.h"

static int32_t new_chunk(mz_flow *flow) {
    int32_t index = flow->pool_free;
    if (index != SHARE_NONE) {
        flow->pool_free = flow->pool[index].next;
    } else {
        index = flow->pool_fresh++;
    }
    flow->pool[index].used = 0;
    return index;
}

int32_t mz_list_add(mz_flow *flow, int32_t *list, pair_entry entry) {
    if (*list == SHARE_NONE || flow->pool[*list].used == CHUNK) {
        int32_t added = new_chunk(flow);
        flow->pool[added].next = *list;
        *list = added;
    }
    chunk *head = &flow->pool[*list];
    head->entry[head->used] = entry;
    return *list << 5 | head->used++;
}

int32_t mz_list_remove(mz_flow *flow, int32_t *list, int32_t place) {
    int32_t head_index = *list;
    chunk *head = &flow->pool[head_index];
    int32_t last = head_index << 5 | --head->used;
    *mz_list_entry(flow, place) = head->entry[head->used];
    if (head->used == 0) {
        *list = head->next;
        head->next = flow->pool_free;
        flow->pool_free = head_index;
    }
    return last;
}

void mz_list_drop(mz_flow *flow, int32_t *list) {
    while (*list != SHARE_NONE) {
        int32_t dropped = *list;
        *list = flow->pool[dropped].next;
        flow->pool[dropped].next = flow->pool_free;
        flow->pool_free = dropped;
    }
}

/* Open addressing; removal shifts back, so there are no tombstones. One link is looked up with many
 * others in turn: keys of GROUP neighbours lie side by side, and probing leaves the group at once.
 * The stride is odd, so that it comes by every slot; STRIDE * UNSTRIDE is 1 modulo 2^64. */
enum { GROUP = 16, STRIDE = GROUP + 1 };
static const uint64_t UNSTRIDE = 0xf0f0f0f0f0f0f0f1u;

static inline int64_t home_of(const mz_flow *flow, int64_t key) {
    uint64_t group = (uint64_t)key / GROUP * 0x9e3779b97f4a7c15u >> 20;
    return (int64_t)(group * GROUP + (uint64_t)key % GROUP) & flow->table_mask;
}

/* How many strides lie between. */
static inline int64_t strides(const mz_flow *flow, int64_t from, int64_t to) {
    return (int64_t)((uint64_t)(to - from) * UNSTRIDE) & flow->table_mask;
}

static inline int64_t find(const mz_flow *flow, int64_t key) {
    int64_t at = home_of(flow, key);
    while (flow->table[at].key != key && flow->table[at].key != SHARE_NONE) {
        at = (at + STRIDE) & flow->table_mask;
    }
    return at;
}

static void erase(mz_flow *flow, int64_t at) {
    pair_slot *table = flow->table;
    int64_t hole = at;
    for (;;) {
        at = (at + STRIDE) & flow->table_mask;
        if (table[at].key == SHARE_NONE) {
            break;
        }
        int64_t home = home_of(flow, table[at].key);
        /* may move into the hole unless its home lies cyclically in (hole, at] */
        if (strides(flow, home, at) >= strides(flow, hole, at)) {
            table[hole] = table[at];
            hole = at;
        }
    }
    table[hole].key = SHARE_NONE;
}

int32_t mz_pair_count(const mz_flow *flow, int32_t k, int32_t l, int32_t *lone) {
    const pair_slot *found = &flow->table[find(flow, (int64_t)k * flow->links + l)];
    *lone = SHARE_NONE;
    if (found->key == SHARE_NONE) {
        return 0;
    }
    int32_t b = flow->pool[found->place >> 5].entry[found->place & 31].b;
    if (found->many) {
        return b;
    }
    *lone = b;
    return 1;
}

/* Removes a pair of k from its list. */
static void unlist(mz_flow *flow, int32_t k, int32_t place, bool many) {
    link_state *link = &flow->link[k];
    if (mz_list_remove(flow, many ? &link->many : &link->lone, place) != place) {
        int64_t moved = (int64_t)k * flow->links + mz_list_entry(flow, place)->a;
        flow->table[find(flow, moved)].place = place;
    }
}

void mz_pair_add(mz_flow *flow, int32_t k, int32_t l, int32_t index) {
    int64_t key = (int64_t)k * flow->links + l;
    pair_slot *pair = &flow->table[find(flow, key)];
    link_state *link = &flow->link[k];
    if (pair->key == SHARE_NONE) {
        *pair = (pair_slot){key, mz_list_add(flow, &link->lone, (pair_entry){l, index}), false};
    } else if (pair->many) {
        mz_list_entry(flow, pair->place)->b++;
    } else {
        unlist(flow, k, pair->place, false);
        *pair = (pair_slot){key, mz_list_add(flow, &link->many, (pair_entry){l, 2}), true};
    }
}

void mz_pair_drop(mz_flow *flow, int32_t k, int32_t l) {
    int64_t at = find(flow, (int64_t)k * flow->links + l);
    pair_slot pair = flow->table[at];
    if (pair.many && --mz_list_entry(flow, pair.place)->b > 0) {
        return;
    }
    erase(flow, at);
    unlist(flow, k, pair.place, pair.many);
}

void mz_pair_clear(mz_flow *flow) {
    for (int32_t k = 0; k < flow->links; k++) {
        mz_list_drop(flow, &flow->link[k].lone);
        mz_list_drop(flow, &flow->link[k].many);
    }
    for (int64_t i = 0; i <= flow->table_mask; i++) {
        flow->table[i].key = SHARE_NONE;
    }
}
