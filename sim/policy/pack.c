/* Balanced packing and replica counts, as EPLB defines them (balancing-systems.md 10.3); FlexMoE,
 * SmartMoE and LPLB pack the same way.
 *
 * Both rules take the best of a changing set many times, ties to the lower index: a binary heap of
 * indices. Shares load/count are compared as doubles, which round equal fractions equally. */
#include "sim/policy/parts.h"

struct mz_pack {
    int32_t items, bins;
    int32_t *order, *scratch; /* [items] */
    int32_t *heap;            /* [max(items, bins)] indices, least key on top */
    double *key;              /* [max(items, bins)] by index */
    int32_t *taken;           /* [bins] */
};

mz_code mz_pack_create(mz_arena *arena, int32_t items, int32_t bins, mz_pack **out, mz_err *err) {
    mz_pack *p = MZ_NEW(arena, mz_pack, 1);
    if (!p)
        return mz_fail_nomem(err, "the packing");
    const int32_t most = items > bins ? items : bins;
    p->items = items;
    p->bins = bins;
    p->order = MZ_NEW(arena, int32_t, items);
    p->scratch = MZ_NEW(arena, int32_t, items);
    p->heap = MZ_NEW(arena, int32_t, most);
    p->key = MZ_NEW(arena, double, most);
    p->taken = MZ_NEW(arena, int32_t, bins);
    if (!p->order || !p->scratch || !p->heap || !p->key || !p->taken)
        return mz_fail_nomem(err, "the packing");
    *out = p;
    return MZ_OK;
}

static bool before(const mz_pack *p, int32_t a, int32_t b) {
    return p->key[a] < p->key[b] || (p->key[a] == p->key[b] && a < b);
}

static void sift_down(mz_pack *p, int32_t at, int32_t n) {
    const int32_t moving = p->heap[at];
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= n)
            break;
        child += child + 1 < n && before(p, p->heap[child + 1], p->heap[child]);
        if (!before(p, p->heap[child], moving))
            break;
        p->heap[at] = p->heap[child];
        at = child;
    }
    p->heap[at] = moving;
}

static void make_heap(mz_pack *p, int32_t n) {
    for (int32_t at = n / 2 - 1; at >= 0; at--)
        sift_down(p, at, n);
}

mz_code mz_pack_lpt(mz_pack *p, const double *weight, int32_t items, const int32_t *room,
                    double *load, int32_t bins, int32_t *bin, int32_t *place, mz_err *err) {
    if (items > p->items || bins > p->bins)
        return mz_fail(err, MZ_EINTERNAL, "%d items in %d bins in a packing for %d, %d", items,
                       bins, p->items, p->bins);
    mz_order_falling(weight, items, p->order, p->scratch);
    int32_t open = 0;
    for (int32_t b = 0; b < bins; b++) {
        p->key[b] = load[b];
        p->taken[b] = 0;
        if (room[b] > 0)
            p->heap[open++] = b;
    }
    make_heap(p, open);
    for (int32_t k = 0; k < items; k++) {
        if (open == 0)
            return mz_fail(err, MZ_EINTERNAL, "%d items do not fit into %d bins", items, bins);
        const int32_t i = p->order[k], b = p->heap[0];
        bin[i] = b;
        place[i] = p->taken[b]++;
        p->key[b] += weight[i];
        if (p->taken[b] == room[b])
            p->heap[0] = p->heap[--open];
        if (open > 0)
            sift_down(p, 0, open);
    }
    for (int32_t b = 0; b < bins; b++)
        load[b] = p->key[b];
    return MZ_OK;
}

void mz_pack_replicate(mz_pack *p, const int64_t *load, int32_t experts, int32_t slots,
                       int32_t *count, int32_t *extra) {
    for (int32_t e = 0; e < experts; e++) {
        count[e] = 1;
        p->key[e] = -(double)load[e];
        p->heap[e] = e;
    }
    make_heap(p, experts);
    for (int32_t s = experts; s < slots; s++) {
        const int32_t e = p->heap[0];
        if (extra)
            extra[s - experts] = e;
        count[e]++;
        p->key[e] = -(double)load[e] / count[e];
        sift_down(p, 0, experts);
    }
}
