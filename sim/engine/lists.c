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

/* Open addressing with linear probing; removal shifts back, so there are no tombstones. */
static inline int64_t home_of(const mz_flow *flow, int64_t key) {
    return (int64_t)(((uint64_t)key * 0x9e3779b97f4a7c15u) >> 20) & flow->table_mask;
}

static inline int64_t find(const mz_flow *flow, int64_t key) {
    int64_t at = home_of(flow, key);
    while (flow->table[at].key != key && flow->table[at].key != SHARE_NONE) {
        at = (at + 1) & flow->table_mask;
    }
    return at;
}

static void erase(mz_flow *flow, int64_t at) {
    pair_slot *table = flow->table;
    int64_t hole = at;
    for (;;) {
        at = (at + 1) & flow->table_mask;
        if (table[at].key == SHARE_NONE) {
            break;
        }
        int64_t home = home_of(flow, table[at].key);
        /* may move into the hole unless its home lies cyclically in (hole, at] */
        if (((at - home) & flow->table_mask) >= ((at - hole) & flow->table_mask)) {
            table[hole] = table[at];
            hole = at;
        }
    }
    table[hole].key = SHARE_NONE;
}

int32_t mz_pair_count(const mz_flow *flow, int32_t k, int32_t l) {
    const pair_slot *found = &flow->table[find(flow, (int64_t)k * flow->links + l)];
    if (found->key == SHARE_NONE) {
        return 0;
    }
    return flow->pool[found->place >> 5].entry[found->place & 31].b;
}

void mz_pair_change(mz_flow *flow, int32_t k, int32_t l, int32_t by) {
    int64_t key = (int64_t)k * flow->links + l;
    int64_t at = find(flow, key);
    int32_t *list = &flow->link[k].pairs;
    if (flow->table[at].key == SHARE_NONE) {
        flow->table[at] = (pair_slot){key, mz_list_add(flow, list, (pair_entry){l, by})};
        return;
    }
    int32_t place = flow->table[at].place;
    pair_entry *entry = mz_list_entry(flow, place);
    entry->b += by;
    if (entry->b != 0) {
        return;
    }
    erase(flow, at);
    if (mz_list_remove(flow, list, place) != place) {
        int64_t moved = (int64_t)k * flow->links + mz_list_entry(flow, place)->a;
        flow->table[find(flow, moved)].place = place;
    }
}

void mz_pair_clear(mz_flow *flow) {
    for (int32_t k = 0; k < flow->links; k++) {
        mz_list_drop(flow, &flow->link[k].pairs);
    }
    for (int64_t i = 0; i <= flow->table_mask; i++) {
        flow->table[i].key = SHARE_NONE;
    }
}
