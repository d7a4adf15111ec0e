/* Pairing heap (Fredman, Sedgewick, Sleator and Tarjan, "The pairing heap", Algorithmica 1986):
 * flows come into a link's heap all at once and many leave without being first. `before` is the
 * parent of a first child and the sibling before of any other. */
#include "sim/engine/share.h"

static inline int32_t meld(flow_slot *slot, int32_t a, int32_t b) {
    if (a == SHARE_NONE) {
        return b;
    }
    if (b == SHARE_NONE) {
        return a;
    }
    /* equal ends go by slot, so that the order does not depend on the history of the heap */
    if (slot[b].ends < slot[a].ends || (slot[b].ends == slot[a].ends && b < a)) {
        int32_t swap = a;
        a = b;
        b = swap;
    }
    int32_t first = slot[a].child;
    slot[b].next = first;
    slot[b].before = a;
    if (first != SHARE_NONE) {
        slot[first].before = b;
    }
    slot[a].child = b;
    return a;
}

/* Melds the children of a removed root: pairs from left to right, then those from right to left. */
static int32_t meld_children(flow_slot *slot, int32_t child) {
    int32_t pairs = SHARE_NONE;
    while (child != SHARE_NONE) {
        int32_t a = child, b = slot[a].next;
        child = b == SHARE_NONE ? SHARE_NONE : slot[b].next;
        slot[a].next = SHARE_NONE;
        if (b != SHARE_NONE) {
            slot[b].next = SHARE_NONE;
        }
        int32_t both = meld(slot, a, b);
        slot[both].next = pairs;
        pairs = both;
    }
    int32_t root = SHARE_NONE;
    while (pairs != SHARE_NONE) {
        int32_t next = slot[pairs].next;
        slot[pairs].next = SHARE_NONE;
        root = meld(slot, root, pairs);
        pairs = next;
    }
    return root;
}

void mz_heap_insert(mz_flow *flow, link_state *link, int32_t index) {
    flow_slot *added = &flow->slot[index];
    added->child = added->next = added->before = SHARE_NONE;
    link->root = meld(flow->slot, link->root, index);
}

void mz_heap_remove(mz_flow *flow, link_state *link, int32_t index) {
    flow_slot *slot = flow->slot;
    int32_t rest = meld_children(slot, slot[index].child);
    if (link->root == index) {
        link->root = rest;
    } else {
        int32_t before = slot[index].before, next = slot[index].next;
        if (slot[before].child == index) {
            slot[before].child = next;
        } else {
            slot[before].next = next;
        }
        if (next != SHARE_NONE) {
            slot[next].before = before;
        }
        link->root = meld(slot, link->root, rest);
    }
    if (link->root != SHARE_NONE) {
        slot[link->root].before = slot[link->root].next = SHARE_NONE;
    }
}
