#include "tests/replay/nomem.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
char *__real_strdup(const char *text);
FILE *__real_open_memstream(char **text, size_t *size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *memory, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
char *__wrap_strdup(const char *text);
FILE *__wrap_open_memstream(char **text, size_t *size);

/* A stream of loads is read by a thread of its own. */
static atomic_llong counted, refused, buffers;
static long long fails_at;
static bool counting, for_good;

void nomem_start(long long at, bool good) {
    counted = refused = buffers = 0;
    fails_at = at;
    for_good = good;
    counting = true;
}

long long nomem_end(void) {
    counting = false;
    return counted;
}

long long nomem_refused(void) {
    return refused;
}

long long nomem_buffers(void) {
    return buffers;
}

bool nomem_refuses(void) {
    if (!counting)
        return false;
    const long long now = atomic_fetch_add(&counted, 1) + 1;
    if (fails_at == 0 || (now != fails_at && !(for_good && now > fails_at)))
        return false;
    atomic_fetch_add(&refused, 1);
    errno = ENOMEM;
    return true;
}

void *__wrap_malloc(size_t size) {
    return nomem_refuses() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size) {
    return nomem_refuses() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *memory, size_t size) {
    return nomem_refuses() ? NULL : __real_realloc(memory, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    const bool no = nomem_refuses();
    if (no)
        atomic_fetch_add(&buffers, 1);
    return no ? NULL : __real_aligned_alloc(alignment, size);
}

char *__wrap_strdup(const char *text) {
    return nomem_refuses() ? NULL : __real_strdup(text);
}

FILE *__wrap_open_memstream(char **text, size_t *size) {
    return nomem_refuses() ? NULL : __real_open_memstream(text, size);
}
