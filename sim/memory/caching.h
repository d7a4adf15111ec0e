/* A caching allocator as PyTorch's for CUDA: what it reserves from the device for a sequence of
 * requests.
 *
 * Facts: the comment at the head of c10/cuda/CUDACachingAllocator.cpp, the notes "CUDA semantics:
 * memory management" of PyTorch's documentation, and Z. DeVito, "A guide to PyTorch's CUDA Caching
 * Allocator" (2022). With default settings and one stream:
 * - a request is a multiple of 512 B, at least 512 B;
 * - requests up to 1 MiB share a pool of 2 MiB segments, larger ones the large pool, whose segments
 *   are 20 MiB for requests below 10 MiB and otherwise the request rounded up to 2 MiB;
 * - the smallest free block of the pool that is large enough is taken (of equal ones that of the
 *   lowest address), and split when at least 512 B (small) or more than 1 MiB (large) remain; a new
 *   segment is treated the same way;
 * - a freed block is merged with free neighbours of its segment; segments stay reserved;
 * - when the device has no room for a new segment, all wholly free segments are returned first.
 * Segments get ascending addresses, as one after another from the device.
 *
 * Threads: one mz_caching belongs to one thread. */
#ifndef MIZAN_SIM_MEMORY_CACHING_H
#define MIZAN_SIM_MEMORY_CACHING_H

#include "common/base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A part of a segment; numbers of neighbours in address order, -1 at its ends. */
typedef struct mz_caching_block {
    int64_t address, bytes;
    int32_t before, after;
    bool small, used;
} mz_caching_block;

/* Free blocks of one pool, ascending by (bytes, address). */
typedef struct mz_caching_pool {
    int32_t *block; /* [blocks] */
    int32_t blocks;
    size_t cap;
} mz_caching_pool;

/* Starts zeroed; ends with mz_caching_free. */
typedef struct mz_caching {
    int64_t reserved;  /* bytes of all segments */
    int64_t allocated; /* bytes of blocks in use, rounding included */
    int64_t returned;  /* segments given back to the device so far */
    int64_t end;       /* first address never handed out */
    mz_caching_block *block;
    int32_t blocks, spare; /* entries made so far; 1 + the first unused one, 0 none */
    size_t block_cap;
    mz_caching_pool pool[2]; /* large, small */
} mz_caching;

/* Number of the block for `bytes` > 0, in *block. room: bytes of the device that are neither
 * reserved nor otherwise used; a segment that does not fit even after free ones are returned is
 * reserved all the same (the caller sees reserved grow beyond the device). MZ_ENOMEM. */
mz_code mz_caching_take(mz_caching *caching, int64_t bytes, int64_t room, int32_t *block,
                        mz_err *err);
/* block: from take, not yet given. */
void mz_caching_give(mz_caching *caching, int32_t block);
void mz_caching_free(mz_caching *caching);

#endif
