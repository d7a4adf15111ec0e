#include "common/base/arena.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARENA_ALIGN = 16, ARENA_BLOCK = 1 << 16 };

struct mz_arena_block {
    mz_arena_block *next;
    size_t used, size;
    size_t pad; /* keeps the payload aligned to 16 bytes */
    unsigned char data[];
};

_Static_assert(sizeof(mz_arena_block) % ARENA_ALIGN == 0, "arena payload must stay aligned");

static mz_arena_block *new_block(mz_arena *arena, size_t need) {
    size_t size = need > ARENA_BLOCK ? need : ARENA_BLOCK;
    if (size > SIZE_MAX - sizeof(mz_arena_block))
        return NULL;
    mz_arena_block *block = calloc(1, sizeof *block + size);
    if (!block)
        return NULL;
    block->size = size;
    arena->total += sizeof *block + size;
    /* A large object gets a block of its own behind the head, so the head keeps its free space. */
    if (arena->head && need > ARENA_BLOCK / 4) {
        block->next = arena->head->next;
        arena->head->next = block;
    } else {
        block->next = arena->head;
        arena->head = block;
    }
    return block;
}

void *mz_arena_alloc(mz_arena *arena, size_t count, size_t size) {
    if (size && count > (SIZE_MAX - ARENA_ALIGN) / size)
        return NULL;
    size_t need = (count * size + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
    if (need == 0)
        need = ARENA_ALIGN;
    mz_arena_block *block = arena->head;
    if (!block || block->size - block->used < need) {
        block = new_block(arena, need);
        if (!block)
            return NULL;
    }
    void *p = block->data + block->used;
    block->used += need;
    return p;
}

char *mz_arena_strdup(mz_arena *arena, const char *text) {
    size_t n = strlen(text) + 1;
    char *copy = mz_arena_alloc(arena, n, 1);
    if (copy)
        memcpy(copy, text, n);
    return copy;
}

char *mz_arena_printf(mz_arena *arena, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0)
        return NULL;
    char *text = mz_arena_alloc(arena, (size_t)n + 1, 1);
    if (!text)
        return NULL;
    va_start(args, fmt);
    vsnprintf(text, (size_t)n + 1, fmt, args);
    va_end(args);
    return text;
}

void mz_arena_free(mz_arena *arena) {
    for (mz_arena_block *block = arena->head; block;) {
        mz_arena_block *next = block->next;
        free(block);
        block = next;
    }
    *arena = (mz_arena){0};
}

void *mz_calloc(size_t count, size_t size) {
    if (size && count > SIZE_MAX / size)
        return NULL;
    return calloc(count ? count : 1, size ? size : 1);
}

int mz_grow(void **data, size_t *cap, size_t need, size_t elem_size) {
    if (need <= *cap)
        return 1;
    size_t want = *cap ? *cap : 16;
    while (want < need) {
        if (want > SIZE_MAX / 2)
            return 0;
        want *= 2;
    }
    if (want > SIZE_MAX / elem_size)
        return 0;
    void *grown = realloc(*data, want * elem_size);
    if (!grown)
        return 0;
    *data = grown;
    *cap = want;
    return 1;
}
