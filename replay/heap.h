/* Memory of a replay, really allocated and counted: by logical rank and by the categories of
 * common/io/memcat.h, in requested bytes. Blocks come from the kernels' context and are kept for
 * reuse when given back (best fit among blocks of at most twice the size); what is kept is counted
 * as reserved. Bytes requested are what peak memory means; reserved bytes and the process's own
 * peak are reported beside it.
 *
 * What lay idle for a whole step goes back to the context when the next one starts, so that steps
 * of many sizes do not leave a block of each. Steps that are like those before allocate nothing:
 * when a block would have fitted that was given back so, blocks stay for twice as many steps from
 * then on.
 *
 * Threads: one heap belongs to one thread at a time. */
#ifndef MIZAN_REPLAY_HEAP_H
#define MIZAN_REPLAY_HEAP_H

#include "common/base/err.h"
#include "common/io/memcat.h"
#include "kernels/kernels.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct mz_heap mz_heap;

/* Zeroed: holds nothing. */
typedef struct mz_buffer {
    void *memory;  /* context memory, 256-byte aligned */
    int64_t bytes; /* requested */
    int64_t block; /* the heap's own mark */
    int32_t rank;
    mz_memcat category;
} mz_buffer;

/* What one logical rank holds and held. Scratch of kernels depends on a backend's tiles and
 * threads: MZ_MEM_WORKSPACE is counted in now and most, and is no part of total and peak. */
typedef struct mz_heap_rank {
    int64_t now[MZ_MEM_CATEGORIES], total;
    int64_t most[MZ_MEM_CATEGORIES]; /* of each category, whenever that was */
    int64_t peak, at_peak[MZ_MEM_CATEGORIES];
    const char *peak_label; /* of the allocation that made the peak; "" before the first */
    int32_t peak_layer;
} mz_heap_rank;

/* Ranks first .. first+ranks-1 are this process's. */
mz_code mz_heap_create(mz_kernels *kernels, int32_t first, int32_t ranks, mz_heap **heap,
                       mz_err *err);
void mz_heap_free(mz_heap **heap); /* and everything that is still taken */
/* Two heaps of one context, each perhaps with others that it was joined with before: when memory is
 * short for one, what lies idle in any of them goes back to the context first. They belong to one
 * thread at a time together. A heap is joined with another once. */
void mz_heap_join(mz_heap *heap, mz_heap *other);

/* Fault injection: the n-th take from now (1: the next) fails as if memory were short; 0: none. */
void mz_heap_fail_at(mz_heap *heap, int64_t n);

/* label: a string that outlives the heap; may hold "%d" once for the layer. buffer must hold
 * nothing. 0 bytes: memory NULL. Contents are undefined. MZ_ENOMEM names label, layer, rank, bytes,
 * what the rank holds and what would help; a device that failed is no shortage and has its own code
 * and message. */
mz_code mz_heap_take(mz_heap *heap, int32_t rank, mz_memcat category, int64_t bytes,
                     const char *label, int32_t layer, mz_buffer *buffer, mz_err *err);
/* Empties the buffer; nothing happens when it holds nothing. The caller sees to it that no
 * operation still uses the memory: operations of the same stream that follow may reuse it. */
void mz_heap_give(mz_heap *heap, mz_buffer *buffer);

const mz_heap_rank *mz_heap_of(const mz_heap *heap, int32_t rank);
/* Peaks and mosts start again from what is held now; blocks that lay idle too long go back to the
 * context. */
void mz_heap_start_step(mz_heap *heap);
int64_t mz_heap_takes(const mz_heap *heap);    /* so far; fault tests count with it */
int64_t mz_heap_reserved(const mz_heap *heap); /* bytes got from the context */
void mz_heap_release(mz_heap *heap);           /* gives blocks that lie idle back to the context */

#endif
