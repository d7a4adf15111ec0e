/* What is allocated when, on one device: categories, peak, what made the peak, what did not fit.
 *
 * Allocations come in the program order of the rank (a stream-ordered caching allocator sees them
 * so), not in simulated time. Two allocators: exact (requested bytes) and caching (caching.h: what
 * the device has to give for the same sequence; context and communicators do not pass through it).
 * Reserved bytes that no block uses count as `workspace`, so categories add up to the total at any
 * time with both. Threads: one mz_memory belongs to one thread. */
#ifndef MIZAN_SIM_MEMORY_MEMORY_H
#define MIZAN_SIM_MEMORY_MEMORY_H

#include "common/base/err.h"
#include "common/io/memcat.h"
#include "sim/memory/caching.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum mz_allocator { MZ_ALLOCATOR_EXACT, MZ_ALLOCATOR_CACHING } mz_allocator;

/* One allocation; zeroed: none. */
typedef struct mz_block {
    int64_t bytes; /* really taken, rounding included */
    mz_memcat category;
    int32_t number; /* in the caching allocator; -1: not there */
} mz_block;

typedef struct mz_memory_event {
    int64_t order; /* 0, 1, 2, ... program order, counted with or without a record */
    int32_t task;  /* caller's mark, for a timeline in simulated time; -1 none */
    mz_memcat category;
    int64_t delta; /* bytes, negative when freed */
    int64_t idle;  /* after it: reserved by the caching allocator and used by no block */
    int64_t total; /* after it: sum of all deltas so far, and idle */
    const char *label;
    int32_t layer; /* of the label, when taken; "" when freed */
} mz_memory_event;

typedef struct mz_memory {
    mz_allocator allocator;
    mz_caching caching;
    int64_t capacity;
    int64_t now[MZ_MEM_CATEGORIES], total;
    int64_t most[MZ_MEM_CATEGORIES]; /* of each category, whenever that was */
    int64_t idle;                    /* counted in now[MZ_MEM_WORKSPACE] */
    int64_t peak, at_peak[MZ_MEM_CATEGORIES];
    int64_t idle_at_peak;
    const char *peak_label; /* of the allocation that made the peak; "" before the first */
    int32_t peak_layer;
    bool overflowed; /* some allocation went beyond capacity: the first one is kept below */
    mz_memcat overflow_category;
    int64_t overflow_bytes, overflow_total; /* of the request as taken; all that is held with it */
    const char *overflow_label;
    int32_t overflow_layer;
    mz_memory_event *event; /* recorded only when asked for */
    int64_t events, order;
    size_t event_cap;
    bool record;
} mz_memory;

/* Empty and ready; allocates nothing. */
void mz_memory_init(mz_memory *memory, int64_t capacity, mz_allocator allocator, bool record);
void mz_memory_free(mz_memory *memory); /* events and allocator; figures stay */
/* Never fails for lack of capacity: going beyond it is recorded as a result. label: what it is, a
 * string that outlives `memory` and may hold "%d" once for the layer ("layer %d dispatch buffer");
 * only the pointer is kept. block: must hold nothing; NULL for what is never given back. 0 bytes:
 * nothing happens. MZ_ENOMEM only when the event record or the allocator's lists cannot grow;
 * MZ_EINTERNAL for negative or uncountable bytes and for a block in use. */
mz_code mz_memory_take(mz_memory *memory, mz_memcat category, int64_t bytes, int32_t task,
                       const char *label, int32_t layer, mz_block *block, mz_err *err);
/* Empties the block; nothing happens when it holds nothing. */
mz_code mz_memory_give(mz_memory *memory, mz_block *block, int32_t task, mz_err *err);
/* Text of a label with its layer; returns `buffer`. */
const char *mz_memory_label(const char *label, int32_t layer, char *buffer, size_t size);

#endif
