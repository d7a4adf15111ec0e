#include "sim/memory/memory.h"

#include "common/base/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void mz_memory_init(mz_memory *memory, int64_t capacity, mz_allocator allocator, bool record) {
    *memory = (mz_memory){.allocator = allocator,
                          .capacity = capacity,
                          .record = record,
                          .peak_label = "",
                          .overflow_label = ""};
}

void mz_memory_free(mz_memory *memory) {
    free(memory->event);
    memory->event = NULL;
    memory->events = 0;
    memory->event_cap = 0;
    mz_caching_free(&memory->caching);
}

static mz_code record(mz_memory *memory, mz_memory_event event, mz_err *err) {
    event.order = memory->order++;
    event.idle = memory->idle;
    event.total = memory->total;
    if (!memory->record)
        return MZ_OK;
    if (!mz_grow((void **)&memory->event, &memory->event_cap, (size_t)memory->events + 1,
                 sizeof *memory->event))
        return mz_fail_nomem(err, "the memory timeline");
    memory->event[memory->events++] = event;
    return MZ_OK;
}

/* Context and communicators come from the driver and its libraries. */
static bool passes_allocator(const mz_memory *memory, mz_memcat category) {
    return memory->allocator == MZ_ALLOCATOR_CACHING && category != MZ_MEM_CONTEXT &&
           category != MZ_MEM_COMMUNICATION;
}

/* Adds `bytes` of a category (negative: takes away) and brings idle and total up to date. */
static void count(mz_memory *memory, mz_memcat category, int64_t bytes) {
    const int64_t idle = memory->caching.reserved - memory->caching.allocated;
    memory->now[category] += bytes;
    if (memory->now[category] > memory->most[category])
        memory->most[category] = memory->now[category];
    memory->now[MZ_MEM_WORKSPACE] += idle - memory->idle;
    memory->total += bytes + idle - memory->idle;
    memory->idle = idle;
}

static void note_peak(mz_memory *memory, const char *label, int32_t layer) {
    if (memory->total <= memory->peak)
        return;
    memory->peak = memory->total;
    memcpy(memory->at_peak, memory->now, sizeof memory->now);
    memory->idle_at_peak = memory->idle;
    memory->peak_label = label;
    memory->peak_layer = layer;
}

static void note_overflow(mz_memory *memory, mz_memcat category, int64_t taken, const char *label,
                          int32_t layer) {
    if (memory->total <= memory->capacity || memory->overflowed)
        return;
    memory->overflowed = true;
    memory->overflow_category = category;
    memory->overflow_bytes = taken;
    memory->overflow_total = memory->total;
    memory->overflow_label = label;
    memory->overflow_layer = layer;
}

mz_code mz_memory_take(mz_memory *memory, mz_memcat category, int64_t bytes, int32_t task,
                       const char *label, int32_t layer, mz_block *block, mz_err *err) {
    if (bytes == 0)
        return MZ_OK;
    if (bytes < 0 || bytes > INT64_MAX / 2 - memory->total || (block && block->bytes)) {
        char name[128];
        return mz_fail(err, MZ_EINTERNAL, "%s: %lld bytes cannot be allocated on top of %lld%s",
                       mz_memory_label(label, layer, name, sizeof name), (long long)bytes,
                       (long long)memory->total,
                       block && block->bytes ? ": it is there already" : "");
    }
    mz_block taken = {.bytes = bytes, .category = category, .number = -1};
    if (passes_allocator(memory, category)) {
        const mz_code code = mz_caching_take(&memory->caching, bytes,
                                             memory->capacity - memory->total, &taken.number, err);
        if (code != MZ_OK)
            return code;
        taken.bytes = memory->caching.block[taken.number].bytes;
    }
    if (block)
        *block = taken;
    count(memory, category, taken.bytes);
    note_peak(memory, label, layer);
    note_overflow(memory, category, taken.bytes, label, layer);
    return record(memory,
                  (mz_memory_event){.task = task,
                                    .category = category,
                                    .delta = taken.bytes,
                                    .label = label,
                                    .layer = layer},
                  err);
}

mz_code mz_memory_give(mz_memory *memory, mz_block *block, int32_t task, mz_err *err) {
    const mz_block held = *block;
    if (held.bytes == 0)
        return MZ_OK;
    if (held.number >= 0)
        mz_caching_give(&memory->caching, held.number);
    *block = (mz_block){0};
    count(memory, held.category, -held.bytes);
    return record(memory,
                  (mz_memory_event){
                      .task = task, .category = held.category, .delta = -held.bytes, .label = ""},
                  err);
}

const char *mz_memory_label(const char *label, int32_t layer, char *buffer, size_t size) {
    const char *mark = strstr(label, "%d");
    if (mark)
        snprintf(buffer, size, "%.*s%d%s", (int)(mark - label), label, layer, mark + 2);
    else
        snprintf(buffer, size, "%s", label);
    return buffer;
}
