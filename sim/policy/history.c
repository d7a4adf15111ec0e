#include "sim/policy/history.h"

#include "sim/policy/policy.h"

#include <string.h>

/* The last `slots` entries, oldest overwritten: entry n of a layer in slot n % slots. */
typedef struct ring {
    int64_t *count; /* [slots][layers][ranks][experts], or NULL */
    int64_t slots;
} ring;

struct mz_history {
    int32_t layers, ranks, group, experts;
    ring steps; /* finished ones and the one being read */
    ring calls;
    int64_t finished;  /* steps */
    int64_t *call;     /* [layers] calls so far */
    mz_load seen;      /* what a view shows */
    uint64_t *scratch; /* [experts] */
};

static int64_t *slot(const mz_history *h, const ring *r, int64_t entry, int32_t layer,
                     int32_t rank) {
    const int64_t row = ((entry % r->slots) * h->layers + layer) * h->ranks + rank;
    return r->count + row * h->experts;
}

static mz_code make_ring(const mz_history *h, mz_arena *arena, int64_t slots, ring *r,
                         mz_err *err) {
    r->slots = slots;
    if (slots == 0)
        return MZ_OK;
    r->count = MZ_NEW(arena, int64_t, slots * h->layers * h->ranks * h->experts);
    return r->count ? MZ_OK : mz_fail_nomem(err, "the history of loads");
}

mz_code mz_history_create(mz_arena *arena, int32_t layers, int32_t ranks, int32_t group,
                          int32_t experts, int64_t steps, int64_t calls, mz_history **out,
                          mz_err *err) {
    mz_history *h = MZ_NEW(arena, mz_history, 1);
    if (!h)
        return mz_fail_nomem(err, "the history of loads");
    h->layers = layers;
    h->ranks = ranks;
    h->group = group;
    h->experts = experts;
    h->seen = (mz_load){.sources = group, .experts = experts};
    h->seen.count = MZ_NEW(arena, int64_t, (int64_t)group * experts);
    h->seen.total = MZ_NEW(arena, int64_t, experts);
    h->seen.source = MZ_NEW(arena, int64_t, group);
    h->scratch = MZ_NEW(arena, uint64_t, experts);
    h->call = MZ_NEW(arena, int64_t, layers);
    if (!h->seen.count || !h->seen.total || !h->seen.source || !h->scratch || !h->call)
        return mz_fail_nomem(err, "the history of loads");
    mz_code code = make_ring(h, arena, steps > 0 ? steps + 1 : 0, &h->steps, err);
    if (code == MZ_OK)
        code = make_ring(h, arena, calls, &h->calls, err);
    *out = h;
    return code;
}

void mz_history_add(mz_history *h, const mz_layer_call *call) {
    const int64_t n = (int64_t)h->ranks * h->experts;
    const size_t size = sizeof(int64_t) * (size_t)n;
    if (h->calls.count)
        memcpy(slot(h, &h->calls, h->call[call->layer], call->layer, 0), call->load->count, size);
    h->call[call->layer]++;
    if (!h->steps.count)
        return;
    int64_t *sum = slot(h, &h->steps, h->finished, call->layer, 0);
    if (call->micro_batch == 0)
        memcpy(sum, call->load->count, size);
    else
        for (int64_t i = 0; i < n; i++)
            sum[i] += call->load->count[i];
}

void mz_history_end_step(mz_history *h) {
    h->finished++;
}

/* Sums become means. */
static void divide_rows(mz_history *h, int64_t by) {
    for (int32_t s = 0; s < h->group; s++) {
        int64_t *row = h->seen.count + (int64_t)s * h->experts, sum = 0;
        for (int32_t e = 0; e < h->experts; e++)
            sum += row[e];
        mz_largest_remainder((sum + by / 2) / by, row, h->experts, row, h->scratch);
    }
}

const mz_load *mz_history_view(mz_history *h, bool by_calls, int64_t lag, int64_t window,
                               int32_t group, int32_t layer) {
    const ring *r = by_calls ? &h->calls : &h->steps;
    const int64_t last = (by_calls ? h->call[layer] : h->finished) - lag;
    const int64_t n = (int64_t)h->group * h->experts, used = window > last + 1 ? last + 1 : window;
    if (last < 0)
        return NULL;
    memcpy(h->seen.count, slot(h, r, last, layer, group * h->group), sizeof(int64_t) * (size_t)n);
    for (int64_t back = 1; back < used; back++) {
        const int64_t *older = slot(h, r, last - back, layer, group * h->group);
        for (int64_t i = 0; i < n; i++)
            h->seen.count[i] += older[i];
    }
    if (used > 1)
        divide_rows(h, used);
    mz_load_sum(&h->seen);
    return &h->seen;
}
