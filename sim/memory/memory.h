/* What is allocated when, on one device: categories, peak, what made the peak, what did not fit.
 *
 * Allocations come in the program order of the rank (a stream-ordered caching allocator sees them so),
 * not in simulated time. Two allocators: exact (requested bytes) and caching (PyTorch-like rounding:
 * 512 B up to 1 MiB requests, 2 MiB segments above; see memory.c).
 * Threads: one mz_memory belongs to one thread. */
#ifndef MIZAN_SIM_MEMORY_MEMORY_H
#define MIZAN_SIM_MEMORY_MEMORY_H

#include "common/base/err.h"
#include "common/io/memcat.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum mz_allocator { MZ_ALLOCATOR_EXACT, MZ_ALLOCATOR_ROUNDED } mz_allocator;

typedef struct mz_memory_event {
    int64_t order;      /* 0, 1, 2, ... program order; task: index for a timeline in time */
    int32_t task;       /* caller's mark, -1 none */
    mz_memcat category;
    int64_t delta;      /* bytes, negative when freed */
    int64_t total;      /* after it */
} mz_memory_event;

typedef struct mz_memory {
    mz_allocator allocator;
    int64_t capacity;
    int64_t now[MZ_MEM_CATEGORIES], total;
    int64_t peak, at_peak[MZ_MEM_CATEGORIES];
    char peak_label[128];     /* label of the allocation that made the peak */
    bool overflowed;          /* some allocation went beyond capacity: the first one is kept below */
    mz_memcat overflow_category;
    int64_t overflow_bytes, overflow_total;
    char overflow_label[128];
    mz_memory_event *event;   /* recorded only when asked for */
    int64_t events, event_cap, order;
    bool record;
} mz_memory;

void mz_memory_init(mz_memory *memory, int64_t capacity, mz_allocator allocator, bool record);
void mz_memory_free_events(mz_memory *memory);
/* Bytes really taken for a request. */
int64_t mz_memory_rounded(mz_allocator allocator, int64_t bytes);
/* Never fails for lack of capacity: going beyond it is recorded as a result. label: what it is
 * ("layer 12 dispatch buffer"), copied only when it makes a peak or an overflow, so pass a format.
 * MZ_ENOMEM only when the event record cannot grow. */
mz_code mz_memory_take(mz_memory *memory, mz_memcat category, int64_t bytes, int32_t task,
                       const char *label, int32_t layer, mz_err *err);
/* MZ_EINTERNAL when more is returned than is held in the category. */
mz_code mz_memory_give(mz_memory *memory, mz_memcat category, int64_t bytes, int32_t task,
                       mz_err *err);

#endif
