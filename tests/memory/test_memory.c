/* A timeline written out by hand, what did not fit, the caching allocator behind it, and invariants
 * on random sequences. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "sim/memory/memory.h"

static void take(mz_memory *memory, mz_memcat category, int64_t bytes, const char *label,
                 int32_t layer, mz_block *block) {
    mz_err err;
    assert_ok(mz_memory_take(memory, category, bytes, -1, label, layer, block, &err), &err);
}

static void give(mz_memory *memory, mz_block *block) {
    mz_err err;
    assert_ok(mz_memory_give(memory, block, -1, &err), &err);
    assert_int_equal(block->bytes, 0);
}

/*  order  what                    delta   total
 *    0    weights                 +1000    1000
 *    1    activations, layer 0     +300    1300
 *    2    token buffer, layer 0    +500    1800
 *    3    token buffer freed       -500    1300
 *    4    activations, layer 1     +300    1600
 *    5    token buffer, layer 1    +700    2300   peak; capacity 2000: does not fit
 *    6    token buffer freed       -700    1600
 *    7    activations, layer 1     -300    1300
 *    8    temporaries             +1000    2300   equals the peak: the first keeps it
 *    9    temporaries freed       -1000    1300
 *   10    activations, layer 0     -300    1000   the resident level */
static void by_hand(void **state) {
    static const int64_t total[] = {1000, 1300, 1800, 1300, 1600, 2300,
                                    1600, 1300, 2300, 1300, 1000};
    mz_memory memory;
    char text[64];
    mz_memory_init(&memory, 2000, MZ_ALLOCATOR_EXACT, true);
    mz_block layer[2] = {{0}}, token = {0}, work = {0};
    take(&memory, MZ_MEM_WEIGHTS, 1000, "weights", -1, NULL);
    take(&memory, MZ_MEM_ACTIVATIONS, 300, "layer %d activations", 0, &layer[0]);
    take(&memory, MZ_MEM_TOKEN_BUFFERS, 500, "layer %d dispatch buffer", 0, &token);
    give(&memory, &token);
    take(&memory, MZ_MEM_ACTIVATIONS, 300, "layer %d activations", 1, &layer[1]);
    assert_false(memory.overflowed);
    take(&memory, MZ_MEM_TOKEN_BUFFERS, 700, "layer %d dispatch buffer", 1, &token);
    give(&memory, &token);
    give(&memory, &layer[1]);
    take(&memory, MZ_MEM_TEMPORARIES, 1000, "optimizer temporaries", -1, &work);
    give(&memory, &work);
    give(&memory, &layer[0]);
    give(&memory, &layer[0]); /* holds nothing: nothing happens */

    assert_int_equal(memory.events, 11);
    for (int i = 0; i < 11; i++) {
        assert_int_equal(memory.event[i].order, i);
        assert_int_equal(memory.event[i].total, total[i]);
    }
    assert_int_equal(memory.event[5].delta, 700);
    assert_int_equal(memory.event[6].delta, -700);
    assert_int_equal(memory.event[5].layer, 1);
    assert_string_equal(memory.event[5].label, "layer %d dispatch buffer");
    assert_int_equal(memory.event[6].category, MZ_MEM_TOKEN_BUFFERS);
    assert_int_equal(memory.event[5].category, MZ_MEM_TOKEN_BUFFERS);
    assert_int_equal(memory.total, 1000);
    assert_int_equal(memory.peak, 2300);
    assert_string_equal(mz_memory_label(memory.peak_label, memory.peak_layer, text, sizeof text),
                        "layer 1 dispatch buffer");
    assert_int_equal(memory.at_peak[MZ_MEM_WEIGHTS], 1000);
    assert_int_equal(memory.at_peak[MZ_MEM_ACTIVATIONS], 600);
    assert_int_equal(memory.at_peak[MZ_MEM_TOKEN_BUFFERS], 700);
    assert_int_equal(memory.at_peak[MZ_MEM_TEMPORARIES], 0);
    assert_true(memory.overflowed);
    assert_int_equal(memory.overflow_category, MZ_MEM_TOKEN_BUFFERS);
    assert_int_equal(memory.overflow_bytes, 700);
    assert_int_equal(memory.overflow_total, 2300);
    mz_memory_label(memory.overflow_label, memory.overflow_layer, text, sizeof text);
    assert_string_equal(text, "layer 1 dispatch buffer");
    mz_memory_free(&memory);
    assert_null(memory.event);
}

/* What the device gives: context outside the allocator, 1 B in a 2 MiB segment, 3 MiB in one of 20,
 * the rest idle workspace; freed blocks leave their segments reserved. */
static void caching(void **state) {
    static const int64_t mib = 1 << 20;
    mz_memory memory;
    mz_block small = {0}, large = {0};
    mz_memory_init(&memory, 30 * mib, MZ_ALLOCATOR_CACHING, true);
    take(&memory, MZ_MEM_CONTEXT, 1000, "context", -1, NULL);
    assert_int_equal(memory.total, 1000);
    take(&memory, MZ_MEM_WEIGHTS, 1, "weights", -1, &small);
    assert_int_equal(small.bytes, 512);
    assert_int_equal(memory.now[MZ_MEM_WEIGHTS], 512);
    assert_int_equal(memory.now[MZ_MEM_WORKSPACE], 2 * mib - 512);
    take(&memory, MZ_MEM_ACTIVATIONS, 3 * mib, "input", -1, &large);
    assert_int_equal(memory.total, 1000 + 22 * mib);
    assert_int_equal(memory.idle, 22 * mib - 512 - 3 * mib);
    give(&memory, &large);
    assert_int_equal(memory.total, 1000 + 22 * mib);
    assert_int_equal(memory.event[3].delta, -3 * mib);
    assert_int_equal(memory.event[3].idle, 22 * mib - 512);
    /* no room beside 22 MiB: the free segment of 20 goes back, and 28 MiB fit */
    take(&memory, MZ_MEM_ACTIVATIONS, 27 * mib + 1, "logits", -1, &large);
    assert_int_equal(memory.total, 1000 + 30 * mib);
    assert_true(memory.overflowed); /* by the context's 1000 B */
    assert_int_equal(memory.peak, memory.total);
    assert_int_equal(large.bytes, 28 * mib); /* 1 MiB - 512 B are not split off */
    assert_int_equal(memory.idle_at_peak, 2 * mib - 512);
    assert_int_equal(memory.at_peak[MZ_MEM_WORKSPACE], memory.idle_at_peak);
    assert_string_equal(memory.peak_label, "logits");
    mz_memory_free(&memory);
}

static void at_capacity_fits(void **state) {
    mz_memory memory;
    mz_memory_init(&memory, 100, MZ_ALLOCATOR_EXACT, false);
    take(&memory, MZ_MEM_WEIGHTS, 100, "weights", -1, NULL);
    assert_false(memory.overflowed);
    take(&memory, MZ_MEM_WEIGHTS, 0, "nothing", -1, NULL);
    assert_string_equal(memory.peak_label, "weights");
    take(&memory, MZ_MEM_CONTEXT, 1, "context", -1, NULL);
    take(&memory, MZ_MEM_CONTEXT, 5, "more context", -1, NULL);
    assert_int_equal(memory.overflow_total, 101); /* the first that did not fit */
    assert_string_equal(memory.overflow_label, "context");
    assert_string_equal(memory.peak_label, "more context");
}

static void misuse(void **state) {
    for (int a = 0; a < 2; a++) {
        mz_memory memory;
        mz_err err;
        mz_block block = {0};
        mz_memory_init(&memory, 100, a ? MZ_ALLOCATOR_CACHING : MZ_ALLOCATOR_EXACT, false);
        take(&memory, MZ_MEM_WEIGHTS, 10, "weights", -1, &block);
        const int64_t total = memory.total;
        assert_fails(mz_memory_take(&memory, MZ_MEM_WEIGHTS, 1, -1, "x", 0, &block, &err),
                     MZ_EINTERNAL, "there already", &err);
        assert_fails(mz_memory_take(&memory, MZ_MEM_WEIGHTS, -1, -1, "x", 0, NULL, &err),
                     MZ_EINTERNAL, "-1 bytes", &err);
        assert_fails(mz_memory_take(&memory, MZ_MEM_WEIGHTS, INT64_MAX, -1, "x", 0, NULL, &err),
                     MZ_EINTERNAL, "cannot be allocated", &err);
        assert_int_equal(memory.total, total);
        mz_memory_free(&memory);
    }
}

enum { LIVE = 256 };

/* Sums that must hold after every operation; bytes in blocks are `held`. */
static void check_sums(const mz_memory *memory, int64_t held) {
    int64_t sum = 0, at_peak = 0;
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++) {
        assert_true(memory->now[c] >= 0);
        sum += memory->now[c];
        at_peak += memory->at_peak[c];
    }
    assert_true(memory->idle >= 0 && memory->total - memory->idle == held);
    assert_true(sum == memory->total && at_peak == memory->peak && memory->peak >= memory->total);
}

/* Random takes and gives: the total is the sum of the categories and of what a list of live blocks
 * holds, the peak is the largest total seen, nothing is negative, and all given back leaves nothing
 * in blocks. */
static void random_sequences(void **state) {
    for (uint64_t seed = 0; seed < 20; seed++) {
        mz_rng rng = mz_rng_make(seed, 1);
        mz_memory memory;
        mz_memory_init(&memory, seed % 4 < 2 ? INT64_MAX / 4 : 100 << 20,
                       seed % 2 ? MZ_ALLOCATOR_CACHING : MZ_ALLOCATOR_EXACT, true);
        mz_block live[LIVE] = {{0}};
        int64_t peak = 0, held = 0, recorded = 0;
        for (int i = 0; i < 2000; i++) {
            mz_block *b = &live[mz_rng_below(&rng, LIVE)];
            if (b->bytes) {
                held -= b->bytes;
                give(&memory, b);
            } else {
                const int64_t bytes = 1 + (int64_t)mz_rng_below(&rng, 4 << 20);
                take(&memory, (mz_memcat)mz_rng_below(&rng, MZ_MEM_CATEGORIES), bytes, "block", i,
                     b);
                assert_true(b->bytes >= bytes && b->bytes < bytes + (2 << 20));
                held += b->bytes;
            }
            peak = memory.total > peak ? memory.total : peak;
            assert_true(memory.peak == peak);
            check_sums(&memory, held);
        }
        for (int64_t i = 0; i < memory.events; i++) {
            recorded += memory.event[i].delta;
            assert_true(memory.event[i].total == recorded + memory.event[i].idle);
        }
        for (int i = 0; i < LIVE; i++)
            give(&memory, &live[i]);
        check_sums(&memory, 0);
        mz_memory_free(&memory);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(by_hand),          cmocka_unit_test(caching),
        cmocka_unit_test(at_capacity_fits), cmocka_unit_test(misuse),
        cmocka_unit_test(random_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
