/* Arena: many allocations, one release.
 *
 * Memory comes zeroed, aligned to 16 bytes, and lives until mz_arena_free.
 * A failed allocation returns NULL; callers report it with mz_fail_nomem.
 * Threads: an arena belongs to one thread at a time. Cost: a bump per allocation. */
#ifndef MIZAN_BASE_ARENA_H
#define MIZAN_BASE_ARENA_H

#include <stddef.h>

typedef struct mz_arena_block mz_arena_block;

typedef struct mz_arena {
    mz_arena_block *head; /* block being filled; {0} is an empty arena */
    size_t total;         /* bytes obtained from the system */
} mz_arena;

/* `count` objects of `size` bytes, zeroed; NULL when memory is short or count*size overflows. */
void *mz_arena_alloc(mz_arena *arena, size_t count, size_t size);

/* Copies of a string; NULL when memory is short. */
char *mz_arena_strdup(mz_arena *arena, const char *text);
char *mz_arena_printf(mz_arena *arena, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Releases everything; the arena is empty and usable again. */
void mz_arena_free(mz_arena *arena);

#define MZ_NEW(arena, type, count) ((type *)mz_arena_alloc((arena), (size_t)(count), sizeof(type)))

/* calloc with the overflow check of every libc, and a growable-array helper:
 * makes room for `need` elements in *data (capacity *cap), doubling; 0 when memory is short. */
void *mz_calloc(size_t count, size_t size);
int mz_grow(void **data, size_t *cap, size_t need, size_t elem_size);

#endif
