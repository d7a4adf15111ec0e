/* What is allocated when, on one device: categories, peak, what made the peak, what did not fit.
 *
 * Allocations come in the program order of the rank (a stream-ordered caching allocator sees them
 * so), not in simulated time. Two allocators: exact (requested bytes) and rounded (a caching
 * allocator's blocks: multiples of 512 B up to 1 MiB, of 2 MiB above). Rounding is per request and
 * so the same when it is freed; splitting and fragmentation of segments are not modelled. Threads:
 * one mz_memory belongs to one thread. */
#ifndef MIZAN_SIM_MEMORY_MEMORY_H
#define MIZAN_SIM_MEMORY_MEMORY_H

#include "common/base/err.h"
#include "common/io/memcat.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum mz_allocator { MZ_ALLOCATOR_EXACT, MZ_ALLOCATOR_ROUNDED } mz_allocator;

typedef struct mz_memory_event {
    int64_t order; /* 0, 1, 2, ... program order, counted with or without a record */
    int32_t task;  /* caller's mark, for a timeline in simulated time; -1 none */
    mz_memcat category;
    int64_t delta; /* bytes, negative when freed */
    int64_t total; /* after it */
} mz_memory_event;

typedef struct mz_memory {
    mz_allocator allocator;
    int64_t capacity;
    int64_t now[MZ_MEM_CATEGORIES], total;
    int64_t peak, at_peak[MZ_MEM_CATEGORIES];
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
void mz_memory_free_events(mz_memory *memory);
/* Bytes really taken for a request. */
int64_t mz_memory_rounded(mz_allocator allocator, int64_t bytes);
/* Never fails for lack of capacity: going beyond it is recorded as a result. label: what it is, a
 * string that outlives `memory` and may hold "%d" once for the layer ("layer %d dispatch buffer");
 * only the pointer is kept. 0 bytes: nothing happens. MZ_ENOMEM only when the event record cannot
 * grow; MZ_EINTERNAL for negative or uncountable bytes. */
mz_code mz_memory_take(mz_memory *memory, mz_memcat category, int64_t bytes, int32_t task,
                       const char *label, int32_t layer, mz_err *err);
/* `bytes` as they were asked for. MZ_EINTERNAL when more is returned than the category holds. */
mz_code mz_memory_give(mz_memory *memory, mz_memcat category, int64_t bytes, int32_t task,
                       mz_err *err);
/* Text of a label with its layer; returns `buffer`. */
const char *mz_memory_label(const char *label, int32_t layer, char *buffer, size_t size);

#endif
