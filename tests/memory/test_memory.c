/* A timeline written out by hand, rounding, what did not fit, and invariants on random sequences.
 */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "sim/memory/memory.h"

static void take(mz_memory *memory, mz_memcat category, int64_t bytes, const char *label,
                 int32_t layer) {
    mz_err err;
    if (mz_memory_take(memory, category, bytes, -1, label, layer, &err))
        fail_msg("%s", err.msg);
}

static void give(mz_memory *memory, mz_memcat category, int64_t bytes) {
    mz_err err;
    if (mz_memory_give(memory, category, bytes, -1, &err))
        fail_msg("%s", err.msg);
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
    take(&memory, MZ_MEM_WEIGHTS, 1000, "weights", -1);
    take(&memory, MZ_MEM_ACTIVATIONS, 300, "layer %d activations", 0);
    take(&memory, MZ_MEM_TOKEN_BUFFERS, 500, "layer %d dispatch buffer", 0);
    give(&memory, MZ_MEM_TOKEN_BUFFERS, 500);
    take(&memory, MZ_MEM_ACTIVATIONS, 300, "layer %d activations", 1);
    assert_false(memory.overflowed);
    take(&memory, MZ_MEM_TOKEN_BUFFERS, 700, "layer %d dispatch buffer", 1);
    give(&memory, MZ_MEM_TOKEN_BUFFERS, 700);
    give(&memory, MZ_MEM_ACTIVATIONS, 300);
    take(&memory, MZ_MEM_TEMPORARIES, 1000, "optimizer temporaries", -1);
    give(&memory, MZ_MEM_TEMPORARIES, 1000);
    give(&memory, MZ_MEM_ACTIVATIONS, 300);

    assert_int_equal(memory.events, 11);
    for (int i = 0; i < 11; i++) {
        assert_int_equal(memory.event[i].order, i);
        assert_int_equal(memory.event[i].total, total[i]);
    }
    assert_int_equal(memory.event[5].delta, 700);
    assert_int_equal(memory.event[6].delta, -700);
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
    mz_memory_free_events(&memory);
    assert_null(memory.event);
}

static void rounding(void **state) {
    static const int64_t mib = 1 << 20;
    assert_int_equal(mz_memory_rounded(MZ_ALLOCATOR_EXACT, 12345), 12345);
    assert_int_equal(mz_memory_rounded(MZ_ALLOCATOR_ROUNDED, 0), 0);
    assert_int_equal(mz_memory_rounded(MZ_ALLOCATOR_ROUNDED, 1), 512);
    assert_int_equal(mz_memory_rounded(MZ_ALLOCATOR_ROUNDED, 512), 512);
    assert_int_equal(mz_memory_rounded(MZ_ALLOCATOR_ROUNDED, 513), 1024);
    assert_int_equal(mz_memory_rounded(MZ_ALLOCATOR_ROUNDED, mib), mib);
    assert_int_equal(mz_memory_rounded(MZ_ALLOCATOR_ROUNDED, mib + 1), 2 * mib);
    assert_int_equal(mz_memory_rounded(MZ_ALLOCATOR_ROUNDED, 2 * mib + 1), 4 * mib);
    mz_memory memory;
    mz_memory_init(&memory, 1 << 30, MZ_ALLOCATOR_ROUNDED, false);
    take(&memory, MZ_MEM_ACTIVATIONS, 3 * mib, "a", -1);
    assert_int_equal(memory.total, 4 * mib);
    give(&memory, MZ_MEM_ACTIVATIONS, 3 * mib);
    assert_int_equal(memory.total, 0);
    assert_int_equal(memory.events, 0);
    assert_int_equal(memory.order, 2);
}

static void at_capacity_fits(void **state) {
    mz_memory memory;
    mz_memory_init(&memory, 100, MZ_ALLOCATOR_EXACT, false);
    take(&memory, MZ_MEM_WEIGHTS, 100, "weights", -1);
    assert_false(memory.overflowed);
    take(&memory, MZ_MEM_WEIGHTS, 0, "nothing", -1);
    assert_string_equal(memory.peak_label, "weights");
    take(&memory, MZ_MEM_CONTEXT, 1, "context", -1);
    take(&memory, MZ_MEM_CONTEXT, 5, "more context", -1);
    assert_int_equal(memory.overflow_total, 101); /* the first that did not fit */
    assert_string_equal(memory.overflow_label, "context");
    assert_string_equal(memory.peak_label, "more context");
}

static void misuse(void **state) {
    mz_memory memory;
    mz_err err;
    mz_memory_init(&memory, 100, MZ_ALLOCATOR_EXACT, false);
    take(&memory, MZ_MEM_WEIGHTS, 10, "weights", -1);
    assert_int_equal(mz_memory_give(&memory, MZ_MEM_WEIGHTS, 11, -1, &err), MZ_EINTERNAL);
    assert_non_null(strstr(err.msg, "weights"));
    assert_int_equal(mz_memory_give(&memory, MZ_MEM_REPLICAS, 1, -1, &err), MZ_EINTERNAL);
    assert_int_equal(mz_memory_take(&memory, MZ_MEM_WEIGHTS, -1, -1, "x", 0, &err), MZ_EINTERNAL);
    assert_int_equal(mz_memory_take(&memory, MZ_MEM_WEIGHTS, INT64_MAX, -1, "x", 0, &err),
                     MZ_EINTERNAL);
    assert_int_equal(memory.total, 10);
}

/* Random takes and gives: the total is the sum of the categories and of what a list of live blocks
 * holds, the peak is the largest total seen, nothing is negative, and all given back leaves 0. */
static void random_sequences(void **state) {
    for (uint64_t seed = 0; seed < 20; seed++) {
        mz_rng rng = mz_rng_make(seed, 1);
        mz_allocator allocator = seed % 2 ? MZ_ALLOCATOR_ROUNDED : MZ_ALLOCATOR_EXACT;
        mz_memory memory;
        mz_memory_init(&memory, INT64_MAX, allocator, false);
        int64_t live[256], peak = 0, held = 0;
        int category[256], n = 0;
        for (int i = 0; i < 2000; i++) {
            if (n < 256 && (n == 0 || mz_rng_below(&rng, 2))) {
                live[n] = (int64_t)mz_rng_below(&rng, 4 << 20);
                category[n] = (int)mz_rng_below(&rng, MZ_MEM_CATEGORIES);
                take(&memory, (mz_memcat)category[n], live[n], "block", i);
                held += mz_memory_rounded(allocator, live[n++]);
            } else {
                int k = (int)mz_rng_below(&rng, (uint64_t)n);
                give(&memory, (mz_memcat)category[k], live[k]);
                held -= mz_memory_rounded(allocator, live[k]);
                live[k] = live[--n];
                category[k] = category[n];
            }
            int64_t sum = 0, at_peak = 0;
            for (int c = 0; c < MZ_MEM_CATEGORIES; c++) {
                assert_true(memory.now[c] >= 0);
                sum += memory.now[c];
                at_peak += memory.at_peak[c];
            }
            peak = held > peak ? held : peak;
            assert_true(sum == held && memory.total == held);
            assert_true(memory.peak == peak && at_peak == peak);
        }
        while (n--)
            give(&memory, (mz_memcat)category[n], live[n]);
        assert_int_equal(memory.total, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(by_hand),          cmocka_unit_test(rounding),
        cmocka_unit_test(at_capacity_fits), cmocka_unit_test(misuse),
        cmocka_unit_test(random_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
