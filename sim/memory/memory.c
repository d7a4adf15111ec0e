#include "sim/memory/memory.h"

#include "common/base/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SMALL_BLOCK = 512, SMALL_LIMIT = 1 << 20, LARGE_BLOCK = 2 << 20 };

void mz_memory_init(mz_memory *memory, int64_t capacity, mz_allocator allocator, bool record) {
    *memory = (mz_memory){.allocator = allocator,
                          .capacity = capacity,
                          .record = record,
                          .peak_label = "",
                          .overflow_label = ""};
}

void mz_memory_free_events(mz_memory *memory) {
    free(memory->event);
    memory->event = NULL;
    memory->events = 0;
    memory->event_cap = 0;
}

int64_t mz_memory_rounded(mz_allocator allocator, int64_t bytes) {
    int64_t block = bytes > SMALL_LIMIT ? LARGE_BLOCK : SMALL_BLOCK;
    if (allocator == MZ_ALLOCATOR_EXACT || bytes > INT64_MAX - block)
        return bytes;
    return (bytes + block - 1) / block * block;
}

static mz_code record(mz_memory *memory, mz_memcat category, int64_t delta, int32_t task,
                      mz_err *err) {
    int64_t order = memory->order++;
    if (!memory->record)
        return MZ_OK;
    if (!mz_grow((void **)&memory->event, &memory->event_cap, (size_t)memory->events + 1,
                 sizeof *memory->event))
        return mz_fail_nomem(err, "the memory timeline");
    memory->event[memory->events++] = (mz_memory_event){
        .order = order, .task = task, .category = category, .delta = delta, .total = memory->total};
    return MZ_OK;
}

mz_code mz_memory_take(mz_memory *memory, mz_memcat category, int64_t bytes, int32_t task,
                       const char *label, int32_t layer, mz_err *err) {
    int64_t taken = mz_memory_rounded(memory->allocator, bytes);
    if (taken == 0)
        return MZ_OK;
    if (taken < 0 || taken > INT64_MAX - memory->total)
        return mz_fail(err, MZ_EINTERNAL, "%s: %lld bytes cannot be allocated on top of %lld",
                       label, (long long)bytes, (long long)memory->total);
    memory->now[category] += taken;
    memory->total += taken;
    if (memory->total > memory->peak) {
        memory->peak = memory->total;
        memcpy(memory->at_peak, memory->now, sizeof memory->now);
        memory->peak_label = label;
        memory->peak_layer = layer;
    }
    if (memory->total > memory->capacity && !memory->overflowed) {
        memory->overflowed = true;
        memory->overflow_category = category;
        memory->overflow_bytes = taken;
        memory->overflow_total = memory->total;
        memory->overflow_label = label;
        memory->overflow_layer = layer;
    }
    return record(memory, category, taken, task, err);
}

mz_code mz_memory_give(mz_memory *memory, mz_memcat category, int64_t bytes, int32_t task,
                       mz_err *err) {
    int64_t given = mz_memory_rounded(memory->allocator, bytes);
    if (given == 0)
        return MZ_OK;
    if (given < 0 || given > memory->now[category])
        return mz_fail(err, MZ_EINTERNAL, "%lld bytes of %s freed, %lld are held", (long long)given,
                       mz_memcat_name(category), (long long)memory->now[category]);
    memory->now[category] -= given;
    memory->total -= given;
    return record(memory, category, -given, task, err);
}

const char *mz_memory_label(const char *label, int32_t layer, char *buffer, size_t size) {
    const char *mark = strstr(label, "%d");
    if (mark)
        snprintf(buffer, size, "%.*s%d%s", (int)(mark - label), label, layer, mark + 2);
    else
        snprintf(buffer, size, "%s", label);
    return buffer;
}
