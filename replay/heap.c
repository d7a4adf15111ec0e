#include "replay/heap.h"

#include "common/base/arena.h"
#include "common/base/units.h"
#include "replay/kernel_code.h"
#include "sim/memory/memory.h"

#include <stdlib.h>
#include <string.h>

enum { GRANULE = 256 }; /* the context's alignment; blocks are whole granules */

typedef struct block {
    void *memory;  /* NULL: the place is free for a new block */
    int64_t bytes; /* without memory: of the block that lay here and idled too long; else 0 */
    int64_t step;  /* the last one in which it was taken or given back */
} block;

struct mz_heap {
    mz_kernels *kernels;
    mz_heap *next; /* the ring of those that were joined */
    int32_t first, ranks;
    mz_heap_rank *rank; /* [ranks] */
    block *block;       /* [blocks] */
    size_t block_cap;
    int64_t blocks;
    int64_t *idle; /* [idles] given back, by size, of equal size by number */
    size_t idle_cap;
    int64_t idles;
    int64_t *empty; /* [empties] places of `block` without memory */
    size_t empty_cap;
    int64_t empties;
    int64_t takes, fail_at, reserved;
    int64_t step, patience; /* whole steps that a block idles before it goes */
    int64_t regretted;      /* the last step that wanted a block which had gone */
};

mz_code mz_heap_create(mz_kernels *kernels, int32_t first, int32_t ranks, mz_heap **heap,
                       mz_err *err) {
    *heap = NULL;
    if (ranks < 1)
        return mz_fail(err, MZ_EINTERNAL, "a heap for %d ranks", ranks);
    mz_heap *h = mz_calloc(1, sizeof *h);
    mz_heap_rank *rank = mz_calloc((size_t)ranks, sizeof *rank);
    if (!h || !rank) {
        free(h);
        free(rank);
        return mz_fail_nomem(err, "a heap");
    }
    *h = (mz_heap){.kernels = kernels, .first = first, .ranks = ranks, .rank = rank, .patience = 1};
    h->next = h;
    *heap = h;
    mz_heap_start_step(h);
    return MZ_OK;
}

void mz_heap_join(mz_heap *h, mz_heap *other) {
    mz_heap *next = h->next;
    h->next = other->next;
    other->next = next;
}

void mz_heap_free(mz_heap **heap) {
    mz_heap *h = *heap;
    if (!h)
        return;
    mz_heap *before = h;
    while (before->next != h)
        before = before->next;
    before->next = h->next;
    for (int64_t i = 0; i < h->blocks; i++)
        if (h->block[i].memory)
            mz_kernels_free(h->kernels, h->block[i].memory);
    free(h->block);
    free(h->idle);
    free(h->empty);
    free(h->rank);
    free(h);
    *heap = NULL;
}

void mz_heap_fail_at(mz_heap *h, int64_t n) {
    h->fail_at = n > 0 ? h->takes + n : 0;
}

int64_t mz_heap_takes(const mz_heap *h) {
    return h->takes;
}

int64_t mz_heap_reserved(const mz_heap *h) {
    return h->reserved;
}

const mz_heap_rank *mz_heap_of(const mz_heap *h, int32_t rank) {
    return &h->rank[rank - h->first];
}

static void keep_peak(mz_heap_rank *rank) {
    memcpy(rank->at_peak, rank->now, sizeof rank->now);
    rank->at_peak[MZ_MEM_WORKSPACE] = 0;
}

/* Gives idle blocks to the context that were last used before step `since`; the others stay in
 * their order. */
static void release_before(mz_heap *h, int64_t since, bool idled) {
    int64_t stay = 0;
    for (int64_t k = 0; k < h->idles; k++) {
        const int64_t i = h->idle[k];
        block *b = &h->block[i];
        if (b->step >= since) {
            h->idle[stay++] = i;
            continue;
        }
        mz_kernels_free(h->kernels, b->memory);
        h->reserved -= b->bytes;
        *b = (block){.bytes = idled ? b->bytes : 0};
        h->empty[h->empties++] = i;
    }
    h->idles = stay;
}

void mz_heap_release(mz_heap *h) {
    release_before(h, INT64_MAX, false);
}

void mz_heap_start_step(mz_heap *h) {
    release_before(h, h->step + 1 - h->patience, true);
    h->step++;
    for (int32_t r = 0; r < h->ranks; r++) {
        mz_heap_rank *rank = &h->rank[r];
        memcpy(rank->most, rank->now, sizeof rank->now);
        keep_peak(rank);
        rank->peak = rank->total;
        rank->peak_label = "";
        rank->peak_layer = -1;
    }
}

/* ---- blocks
 * --------------------------------------------------------------------------------------*/

/* The first of the idle blocks that has at least `bytes`; of those that have as many, from number
 * `from` on. */
static int64_t idle_place(const mz_heap *h, int64_t bytes, int64_t from) {
    int64_t low = 0, high = h->idles;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2, i = h->idle[middle];
        const bool before = h->block[i].bytes < bytes || (h->block[i].bytes == bytes && i < from);
        low = before ? middle + 1 : low;
        high = before ? high : middle;
    }
    return low;
}

static int64_t reuse(mz_heap *h, int64_t bytes) {
    const int64_t place = idle_place(h, bytes, 0);
    if (place == h->idles || h->block[h->idle[place]].bytes / 2 > bytes)
        return -1;
    const int64_t i = h->idle[place];
    h->idles--;
    memmove(h->idle + place, h->idle + place + 1, sizeof *h->idle * (size_t)(h->idles - place));
    return i;
}

/* Room in the lists for one block more, so that giving back and releasing cannot fail. */
static bool make_room(mz_heap *h) {
    const size_t need = (size_t)h->blocks + 1;
    return mz_grow((void **)&h->block, &h->block_cap, need, sizeof *h->block) &&
           mz_grow((void **)&h->idle, &h->idle_cap, need, sizeof *h->idle) &&
           mz_grow((void **)&h->empty, &h->empty_cap, need, sizeof *h->empty);
}

/* The place for a new block: where one lay that would have fitted had it not gone, or any. */
static int64_t empty_place(mz_heap *h, int64_t bytes) {
    int64_t found = -1;
    for (int64_t k = 0; found < 0 && k < h->empties; k++) {
        const int64_t had = h->block[h->empty[k]].bytes;
        found = had >= bytes && had / 2 <= bytes ? k : -1;
    }
    if (found < 0 && h->empties == 0)
        return h->blocks++;
    if (found >= 0 && h->regretted != h->step) {
        h->regretted = h->step;
        h->patience *= 2;
    }
    found = found < 0 ? h->empties - 1 : found;
    const int64_t i = h->empty[found];
    h->empty[found] = h->empty[--h->empties];
    return i;
}

/* Whether anything lay idle in the heap or those joined with it; it has gone then. */
static bool release_all(mz_heap *h) {
    bool any = false;
    mz_heap *each = h;
    do {
        any = any || each->idles > 0;
        mz_heap_release(each);
        each = each->next;
    } while (each != h);
    return any;
}

/* A new block; what lies idle is given to the context before memory is called short. -1: none, and
 * *why tells. */
static int64_t obtain(mz_heap *h, int64_t bytes, mz_kstatus *why) {
    *why = MZ_K_ENOMEM;
    if (!make_room(h))
        return -1;
    void *memory = NULL;
    mz_kstatus status = mz_kernels_alloc(h->kernels, (size_t)bytes, &memory);
    if (status == MZ_K_ENOMEM && release_all(h))
        status = mz_kernels_alloc(h->kernels, (size_t)bytes, &memory);
    *why = status;
    if (status != MZ_K_OK)
        return -1;
    const int64_t i = empty_place(h, bytes);
    h->block[i] = (block){.memory = memory, .bytes = bytes};
    h->reserved += bytes;
    return i;
}

/* ---- taking and giving
 * ---------------------------------------------------------------------------*/

static const char *remedy(mz_memcat category) {
    switch (category) {
    case MZ_MEM_WEIGHTS:
    case MZ_MEM_GRADIENTS:
        return "take fewer layers or a smaller --hidden or --inter";
    case MZ_MEM_OPTIMIZER_STATE:
    case MZ_MEM_TEMPORARIES:
        return "take a leaner --optimizer or a smaller --hidden or --inter";
    case MZ_MEM_REPLICAS:
        return "shrink the policy's slots";
    case MZ_MEM_ACTIVATIONS:
    case MZ_MEM_TOKEN_BUFFERS:
        return "shrink the tokens of a rank, --hidden or --inter, or pass --recompute full";
    default:
        return "take a smaller --hidden or --inter";
    }
}

static mz_code fail_short(const mz_heap *h, const mz_buffer *wanted, const char *label,
                          int32_t layer, mz_err *err) {
    char name[128], bytes[32], held[32];
    mz_memory_label(label, layer, name, sizeof name);
    return mz_fail(err, MZ_ENOMEM,
                   "no memory for %s (%s, layer %d) of rank %d: %s (%lld bytes) beside the %s that "
                   "the rank holds; %s",
                   name, mz_memcat_name(wanted->category), layer, wanted->rank,
                   mz_format_bytes((double)wanted->bytes, bytes, sizeof bytes),
                   (long long)wanted->bytes,
                   mz_format_bytes((double)mz_heap_of(h, wanted->rank)->total, held, sizeof held),
                   remedy(wanted->category));
}

/* No shortage: the device failed. */
static mz_code fail_otherwise(const mz_heap *h, int32_t rank, const char *label, int32_t layer,
                              mz_err *err) {
    char name[128];
    mz_kernel_code(h->kernels, mz_kernels_failure(h->kernels), err);
    return mz_err_prefix(err, "%s of rank %d", mz_memory_label(label, layer, name, sizeof name),
                         rank);
}

static void count(mz_heap_rank *rank, const mz_buffer *taken, const char *label, int32_t layer) {
    const mz_memcat c = taken->category;
    rank->now[c] += taken->bytes;
    if (rank->now[c] > rank->most[c])
        rank->most[c] = rank->now[c];
    if (c == MZ_MEM_WORKSPACE)
        return;
    rank->total += taken->bytes;
    if (rank->total <= rank->peak)
        return;
    rank->peak = rank->total;
    keep_peak(rank);
    rank->peak_label = label;
    rank->peak_layer = layer;
}

mz_code mz_heap_take(mz_heap *h, int32_t rank, mz_memcat category, int64_t bytes, const char *label,
                     int32_t layer, mz_buffer *buffer, mz_err *err) {
    const bool there = rank >= h->first && rank < h->first + h->ranks;
    if (!there || bytes < 0 || bytes > INT64_MAX / 4 || buffer->bytes > 0) {
        char name[128];
        return mz_fail(err, MZ_EINTERNAL, "%s: %lld bytes for rank %d%s%s",
                       mz_memory_label(label, layer, name, sizeof name), (long long)bytes, rank,
                       there ? "" : ", which is not of this process",
                       buffer->bytes > 0 ? ", into a buffer that holds some" : "");
    }
    *buffer = (mz_buffer){.bytes = bytes, .block = -1, .rank = rank, .category = category};
    if (bytes == 0)
        return MZ_OK;
    h->takes++;
    mz_kstatus why = MZ_K_ENOMEM;
    const bool fails = h->fail_at == h->takes;
    const int64_t whole = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    buffer->block = fails ? -1 : reuse(h, whole);
    if (!fails && buffer->block < 0)
        buffer->block = obtain(h, whole, &why);
    if (buffer->block < 0) {
        const mz_buffer wanted = *buffer;
        *buffer = (mz_buffer){0};
        return why != MZ_K_EFAILED ? fail_short(h, &wanted, label, layer, err)
                                   : fail_otherwise(h, rank, label, layer, err);
    }
    h->block[buffer->block].step = h->step;
    buffer->memory = h->block[buffer->block].memory;
    count(&h->rank[rank - h->first], buffer, label, layer);
    return MZ_OK;
}

void mz_heap_give(mz_heap *h, mz_buffer *buffer) {
    if (buffer->bytes > 0) {
        mz_heap_rank *rank = &h->rank[buffer->rank - h->first];
        h->block[buffer->block].step = h->step;
        const int64_t place = idle_place(h, h->block[buffer->block].bytes, buffer->block);
        memmove(h->idle + place + 1, h->idle + place, sizeof *h->idle * (size_t)(h->idles - place));
        h->idle[place] = buffer->block;
        h->idles++;
        rank->now[buffer->category] -= buffer->bytes;
        rank->total -= buffer->category == MZ_MEM_WORKSPACE ? 0 : buffer->bytes;
    }
    *buffer = (mz_buffer){0};
}
