#include "sim/memory/caching.h"

#include "common/base/arena.h"

#include <stdlib.h>
#include <string.h>

enum {
    MIB = 1 << 20,
    GRAIN = 512,
    SMALL_LIMIT = MIB,
    SMALL_SEGMENT = 2 * MIB,
    LARGE_LIMIT = 10 * MIB, /* requests from here on get a segment of their own size */
    LARGE_SEGMENT = 20 * MIB,
    SEGMENT_GRAIN = 2 * MIB
};

static int64_t round_up(int64_t bytes, int64_t grain) {
    return (bytes + grain - 1) / grain * grain;
}

static int64_t segment_bytes(int64_t bytes) {
    if (bytes <= SMALL_LIMIT)
        return SMALL_SEGMENT;
    return bytes < LARGE_LIMIT ? LARGE_SEGMENT : round_up(bytes, SEGMENT_GRAIN);
}

/* ---- free blocks -------------------------------------------------------------------------------
 */

/* First free block that is not below (bytes, address) in the pool's order. */
static int32_t find(const mz_caching *c, const mz_caching_pool *pool, int64_t bytes,
                    int64_t address) {
    int32_t low = 0, high = pool->blocks;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        const mz_caching_block *b = &c->block[pool->block[middle]];
        if (b->bytes < bytes || (b->bytes == bytes && b->address < address))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static mz_caching_pool *pool_of(mz_caching *c, int32_t number) {
    return &c->pool[c->block[number].small];
}

static void put_free(mz_caching *c, int32_t number) {
    mz_caching_pool *pool = pool_of(c, number);
    const int32_t at = find(c, pool, c->block[number].bytes, c->block[number].address);
    memmove(pool->block + at + 1, pool->block + at,
            sizeof *pool->block * (size_t)(pool->blocks - at));
    pool->block[at] = number;
    pool->blocks++;
}

static void take_free(mz_caching *c, int32_t number) {
    mz_caching_pool *pool = pool_of(c, number);
    const int32_t at = find(c, pool, c->block[number].bytes, c->block[number].address);
    pool->blocks--;
    memmove(pool->block + at, pool->block + at + 1,
            sizeof *pool->block * (size_t)(pool->blocks - at));
}

/* ---- blocks ------------------------------------------------------------------------------------
 */

/* Room for two more blocks, the most that one request makes; lists can then hold every block. */
static mz_code grow(mz_caching *c, mz_err *err) {
    const size_t need = (size_t)c->blocks + 2;
    if (!mz_grow((void **)&c->block, &c->block_cap, need, sizeof *c->block) ||
        !mz_grow((void **)&c->pool[0].block, &c->pool[0].cap, need, sizeof *c->pool[0].block) ||
        !mz_grow((void **)&c->pool[1].block, &c->pool[1].cap, need, sizeof *c->pool[1].block))
        return mz_fail_nomem(err, "the allocator's blocks");
    return MZ_OK;
}

static int32_t make_block(mz_caching *c, mz_caching_block block) {
    int32_t number = c->spare - 1;
    if (number >= 0)
        c->spare = c->block[number].after + 1;
    else
        number = c->blocks++;
    c->block[number] = block;
    return number;
}

static void drop_block(mz_caching *c, int32_t number) {
    c->block[number].after = c->spare - 1;
    c->spare = number + 1;
}

/* Takes `next`, which follows `number`, into it. */
static void join(mz_caching *c, int32_t number, int32_t next) {
    const int32_t after = c->block[next].after;
    c->block[number].bytes += c->block[next].bytes;
    c->block[number].after = after;
    if (after >= 0)
        c->block[after].before = number;
    drop_block(c, next);
}

/* What a request leaves of a free block becomes a free block of its own where it is worth it. */
static void split(mz_caching *c, int32_t number, int64_t bytes) {
    mz_caching_block *b = &c->block[number];
    const int64_t left = b->bytes - bytes;
    if (b->small ? left < GRAIN : left <= SMALL_LIMIT)
        return;
    const int32_t rest = make_block(c, (mz_caching_block){.address = b->address + bytes,
                                                          .bytes = left,
                                                          .before = number,
                                                          .after = b->after,
                                                          .small = b->small});
    if (b->after >= 0)
        c->block[b->after].before = rest;
    b->after = rest;
    b->bytes = bytes;
    put_free(c, rest);
}

/* ---- segments ----------------------------------------------------------------------------------
 */

/* Free blocks that are whole segments go back to the device. */
static void return_segments(mz_caching *c) {
    for (int p = 0; p < 2; p++) {
        mz_caching_pool *pool = &c->pool[p];
        int32_t kept = 0;
        for (int32_t i = 0; i < pool->blocks; i++) {
            const int32_t number = pool->block[i];
            const mz_caching_block *b = &c->block[number];
            if (b->before >= 0 || b->after >= 0) {
                pool->block[kept++] = number;
                continue;
            }
            c->reserved -= b->bytes;
            c->returned++;
            drop_block(c, number);
        }
        pool->blocks = kept;
    }
}

static int32_t new_segment(mz_caching *c, int64_t bytes, int64_t room) {
    const int64_t segment = segment_bytes(bytes);
    if (segment > room)
        return_segments(c);
    const int32_t number = make_block(c, (mz_caching_block){.address = c->end,
                                                            .bytes = segment,
                                                            .before = -1,
                                                            .after = -1,
                                                            .small = bytes <= SMALL_LIMIT});
    c->end += segment;
    c->reserved += segment;
    return number;
}

mz_code mz_caching_take(mz_caching *c, int64_t bytes, int64_t room, int32_t *block, mz_err *err) {
    if (bytes <= 0 || bytes > INT64_MAX / 4 - c->end)
        return mz_fail(err, MZ_EINTERNAL, "%lld bytes cannot be allocated", (long long)bytes);
    mz_code code = grow(c, err);
    if (code != MZ_OK)
        return code;
    bytes = round_up(bytes, GRAIN);
    const mz_caching_pool *pool = &c->pool[bytes <= SMALL_LIMIT];
    const int32_t at = find(c, pool, bytes, 0);
    if (at < pool->blocks) {
        *block = pool->block[at];
        take_free(c, *block);
    } else {
        *block = new_segment(c, bytes, room);
    }
    split(c, *block, bytes);
    c->block[*block].used = true;
    c->allocated += c->block[*block].bytes;
    return MZ_OK;
}

void mz_caching_give(mz_caching *c, int32_t number) {
    mz_caching_block *b = &c->block[number];
    const int32_t before = b->before, after = b->after;
    b->used = false;
    c->allocated -= b->bytes;
    if (after >= 0 && !c->block[after].used) {
        take_free(c, after);
        join(c, number, after);
    }
    if (before >= 0 && !c->block[before].used) {
        take_free(c, before);
        join(c, before, number);
        number = before;
    }
    put_free(c, number);
}

void mz_caching_free(mz_caching *c) {
    free(c->block);
    free(c->pool[0].block);
    free(c->pool[1].block);
    *c = (mz_caching){0};
}
