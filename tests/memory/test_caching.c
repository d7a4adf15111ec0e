/* The caching allocator on sequences worked out by hand. */
#include "tests/harness.h"

#include "sim/memory/caching.h"

enum { KIB = 1 << 10, MIB = 1 << 20 };

static const int64_t room = INT64_MAX / 8;

static int32_t take_in(mz_caching *c, int64_t bytes, int64_t left) {
    mz_err err;
    int32_t block = -1;
    assert_ok(mz_caching_take(c, bytes, left, &block, &err), &err);
    return block;
}

static int32_t take(mz_caching *c, int64_t bytes) {
    return take_in(c, bytes, room);
}

static void state_is(const mz_caching *c, int64_t reserved, int64_t allocated) {
    assert_int_equal(c->reserved, reserved);
    assert_int_equal(c->allocated, allocated);
}

/* Requests are multiples of 512; up to 1 MiB they share segments of 2 MiB. */
static void small_pool(void **state) {
    mz_caching c = {0};
    const int32_t a = take(&c, 1);
    state_is(&c, 2 * MIB, 512);
    assert_int_equal(c.block[a].address, 0);
    const int32_t b = take(&c, 513);
    state_is(&c, 2 * MIB, 512 + 1024);
    assert_int_equal(c.block[b].address, 512);
    const int32_t d = take(&c, MIB); /* the rest of the segment is 2 MiB - 1536 B */
    state_is(&c, 2 * MIB, MIB + 1536);
    const int32_t e = take(&c, MIB); /* 1 MiB - 1536 B are left: a new segment */
    state_is(&c, 4 * MIB, 2 * MIB + 1536);
    assert_int_equal(c.block[e].address, 2 * MIB);
    /* a and b merge to 1536 B and serve 1500 */
    mz_caching_give(&c, a);
    mz_caching_give(&c, b);
    const int32_t f = take(&c, 1500);
    assert_int_equal(c.block[f].address, 0);
    state_is(&c, 4 * MIB, 2 * MIB + 1536);
    mz_caching_give(&c, d);
    mz_caching_give(&c, e);
    mz_caching_give(&c, f);
    state_is(&c, 4 * MIB, 0); /* nothing goes back by itself */
    assert_int_equal(c.pool[1].blocks, 2);
    mz_caching_free(&c);
}

/* Above 1 MiB: below 10 MiB from segments of 20 MiB, from there on of the request rounded up to 2
 * MiB; a remainder is split off only when it exceeds 1 MiB. */
static void large_pool(void **state) {
    mz_caching c = {0};
    take(&c, MIB + 1); /* a block of 1 MiB + 512 B */
    state_is(&c, 20 * MIB, MIB + 512);
    take(&c, 10 * MIB - 1); /* rounded to 10 MiB; 9 MiB - 512 B remain of the 20 */
    state_is(&c, 20 * MIB, 11 * MIB + 512);
    take(&c, 10 * MIB - 512); /* below 10 MiB, no hole is large enough: 20 MiB */
    state_is(&c, 40 * MIB, 21 * MIB);
    take(&c, 10 * MIB); /* fits what the last one left, 10 MiB + 512 B: not split */
    state_is(&c, 40 * MIB, 31 * MIB + 512);
    take(&c, 11 * MIB); /* its own segment of 12 MiB; 1 MiB more is not split off */
    state_is(&c, 52 * MIB, 43 * MIB + 512);
    take(&c, 32 * MIB + 1); /* 34 MiB; 2 MiB - 512 B are */
    state_is(&c, 86 * MIB, 75 * MIB + 1024);
    mz_caching_free(&c);
}

/* Of three holes of 4, 3 and 3 MiB the first of 3 is taken for 2.5; 1.2 MiB then splits that of 4
 * unless the other of 3 is nearer. */
static void best_fit(void **state) {
    mz_caching c = {0};
    int32_t hole[3], wall[3];
    const int64_t size[3] = {4 * MIB, 3 * MIB, 3 * MIB};
    for (int i = 0; i < 3; i++) {
        hole[i] = take(&c, size[i]);
        wall[i] = take(&c, 2 * MIB);
    }
    take(&c, 4 * MIB); /* 16 of 20 MiB are used: the segment is full */
    state_is(&c, 20 * MIB, 20 * MIB);
    for (int i = 0; i < 3; i++)
        mz_caching_give(&c, hole[i]);
    const int32_t a = take(&c, 2 * MIB + 512 * KIB);
    assert_int_equal(c.block[a].address, 6 * MIB);
    assert_int_equal(c.block[a].bytes, 3 * MIB); /* half a MiB is not split off */
    const int32_t b = take(&c, MIB + 200 * KIB);
    assert_int_equal(c.block[b].address, 11 * MIB);
    assert_int_equal(c.block[b].bytes, MIB + 200 * KIB);
    /* 1 MiB + 824 KiB are left there; 4 MiB is the only hole for 2 */
    const int32_t d = take(&c, 2 * MIB);
    assert_int_equal(c.block[d].address, 0);
    /* the wall between hole 0's rest and a: freeing all three merges */
    mz_caching_give(&c, d);
    mz_caching_give(&c, wall[0]);
    mz_caching_give(&c, a);
    const int32_t e = take(&c, 9 * MIB);
    assert_int_equal(c.block[e].address, 0);
    state_is(&c, 20 * MIB, 20 * MIB - (3 * MIB - MIB - 200 * KIB));
    mz_caching_free(&c);
}

/* Fragmentation: 30 MiB are free in two holes, but 24 MiB need a segment of their own. */
static void fragmentation(void **state) {
    mz_caching c = {0};
    const int32_t a = take(&c, 16 * MIB), b = take(&c, 14 * MIB);
    mz_caching_give(&c, a);
    mz_caching_give(&c, b);
    take(&c, 24 * MIB);
    state_is(&c, 54 * MIB, 24 * MIB);
    mz_caching_free(&c);
}

/* No room for a segment: those that are wholly free go back first, split ones stay. */
static void under_pressure(void **state) {
    mz_caching c = {0};
    const int32_t a = take(&c, 16 * MIB), b = take(&c, 4 * MIB), d = take(&c, 4 * MIB);
    state_is(&c, 36 * MIB, 24 * MIB);
    mz_caching_give(&c, a);
    mz_caching_give(&c, b); /* its segment still holds d */
    const int32_t small = take(&c, 100);
    mz_caching_give(&c, small); /* a free small segment goes back too */
    state_is(&c, 38 * MIB, 4 * MIB);
    take_in(&c, 30 * MIB, 20 * MIB);
    state_is(&c, 50 * MIB, 34 * MIB);
    assert_int_equal(c.returned, 2);
    /* still too little room: reserved all the same, for the caller to see */
    take_in(&c, 40 * MIB, 0);
    state_is(&c, 90 * MIB, 74 * MIB);
    assert_int_equal(c.returned, 2);
    mz_caching_give(&c, d);
    take_in(&c, 50 * MIB, 0);
    assert_int_equal(c.returned, 3);
    state_is(&c, 120 * MIB, 120 * MIB);
    mz_caching_free(&c);
}

static void refused(void **state) {
    mz_caching c = {0};
    mz_err err;
    int32_t block;
    assert_fails(mz_caching_take(&c, 0, room, &block, &err), MZ_EINTERNAL, "0 bytes", &err);
    assert_fails(mz_caching_take(&c, -5, room, &block, &err), MZ_EINTERNAL, "-5 bytes", &err);
    assert_fails(mz_caching_take(&c, INT64_MAX, room, &block, &err), MZ_EINTERNAL, "bytes", &err);
    state_is(&c, 0, 0);
    mz_caching_free(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_pool),     cmocka_unit_test(large_pool),
        cmocka_unit_test(best_fit),       cmocka_unit_test(fragmentation),
        cmocka_unit_test(under_pressure), cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
