/* The replay's heap against a model that only counts: random takes and gives, reuse, peaks, and a
 * failure at every take. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "kernels/backend.h"
#include "replay/heap.h"

typedef struct rig {
    mz_kernels *kernels;
    mz_heap *heap;
    mz_err err;
} rig;

static void rig_open(rig *r, int32_t first, int32_t ranks) {
    *r = (rig){0};
    const mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .threads = 1, .streams = 1};
    char message[256];
    if (mz_kernels_open(&options, &r->kernels, message, sizeof message) != MZ_K_OK)
        fail_msg("%s", message);
    assert_ok(mz_heap_create(r->kernels, first, ranks, &r->heap, &r->err), &r->err);
}

static void rig_close(rig *r) {
    mz_heap_free(&r->heap);
    assert_null(r->heap);
    mz_kernels_close(&r->kernels);
}

static mz_code take(rig *r, int32_t rank, mz_memcat category, int64_t bytes, mz_buffer *buffer) {
    return mz_heap_take(r->heap, rank, category, bytes, "layer %d rows", 3, buffer, &r->err);
}

/* ---- reuse
 * ---------------------------------------------------------------------------------------*/

static void test_reuse(void **state) {
    rig r;
    rig_open(&r, 0, 2);
    mz_buffer a = {0}, b = {0}, c = {0};
    assert_ok(take(&r, 0, MZ_MEM_REPLICAS, 4096, &a), &r.err);
    assert_ok(take(&r, 0, MZ_MEM_REPLICAS, 8192, &b), &r.err);
    assert_int_equal((uintptr_t)a.memory % 256, 0);
    assert_int_equal(mz_heap_reserved(r.heap), 12288);
    void *small = a.memory, *large = b.memory;
    mz_heap_give(r.heap, &a);
    mz_heap_give(r.heap, &b);
    assert_null(a.memory);
    mz_heap_give(r.heap, &a); /* holds nothing: nothing happens */
    /* Best fit, also for another rank and category. */
    assert_ok(take(&r, 1, MZ_MEM_TOKEN_BUFFERS, 4000, &c), &r.err);
    assert_ptr_equal(c.memory, small);
    assert_int_equal(mz_heap_of(r.heap, 1)->now[MZ_MEM_TOKEN_BUFFERS], 4000);
    mz_heap_give(r.heap, &c);
    assert_ok(take(&r, 1, MZ_MEM_TOKEN_BUFFERS, 4097, &c), &r.err);
    assert_ptr_equal(c.memory, large);
    mz_heap_give(r.heap, &c);
    /* A block of more than twice the size is not wasted on it. */
    assert_ok(take(&r, 1, MZ_MEM_TOKEN_BUFFERS, 1024, &c), &r.err);
    assert_true(c.memory != small && c.memory != large);
    assert_int_equal(mz_heap_reserved(r.heap), 12288 + 1024);
    rig_close(&r); /* with c still taken */
}

static void test_peak(void **state) {
    rig r;
    rig_open(&r, 4, 2);
    mz_buffer a = {0}, b = {0}, none = {0};
    assert_string_equal(mz_heap_of(r.heap, 4)->peak_label, "");
    assert_ok(take(&r, 5, MZ_MEM_WEIGHTS, 1000, &a), &r.err);
    assert_ok(mz_heap_take(r.heap, 5, MZ_MEM_REPLICAS, 500, "slots", 7, &b, &r.err), &r.err);
    assert_ok(take(&r, 5, MZ_MEM_REPLICAS, 0, &none), &r.err);
    assert_null(none.memory);
    mz_heap_give(r.heap, &none);
    mz_heap_give(r.heap, &b);
    const mz_heap_rank *rank = mz_heap_of(r.heap, 5);
    assert_int_equal(rank->total, 1000);
    assert_int_equal(rank->peak, 1500);
    assert_int_equal(rank->at_peak[MZ_MEM_WEIGHTS], 1000);
    assert_int_equal(rank->at_peak[MZ_MEM_REPLICAS], 500);
    assert_int_equal(rank->most[MZ_MEM_REPLICAS], 500);
    assert_string_equal(rank->peak_label, "slots");
    assert_int_equal(rank->peak_layer, 7);
    assert_int_equal(mz_heap_of(r.heap, 4)->peak, 0);
    mz_heap_start_step(r.heap);
    assert_int_equal(rank->peak, 1000);
    assert_int_equal(rank->most[MZ_MEM_REPLICAS], 0);
    assert_int_equal(rank->at_peak[MZ_MEM_WEIGHTS], 1000);
    assert_int_equal(mz_heap_takes(r.heap), 2);
    rig_close(&r);
}

static void test_errors(void **state) {
    rig r;
    rig_open(&r, 2, 1);
    mz_buffer a = {0};
    assert_fails(take(&r, 0, MZ_MEM_WEIGHTS, 8, &a), MZ_EINTERNAL, "not of this process", &r.err);
    assert_fails(take(&r, 2, MZ_MEM_WEIGHTS, -1, &a), MZ_EINTERNAL, "-1 bytes", &r.err);
    assert_ok(take(&r, 2, MZ_MEM_WEIGHTS, 8, &a), &r.err);
    assert_fails(take(&r, 2, MZ_MEM_WEIGHTS, 8, &a), MZ_EINTERNAL, "holds some", &r.err);
    mz_buffer b = {0};
    assert_fails(take(&r, 2, MZ_MEM_REPLICAS, (int64_t)1 << 60, &b), MZ_ENOMEM, "layer 3 rows",
                 &r.err);
    const char *said[] = {"layer 3", "rank 2", "1152921504606846976", "8 B", "slots", "replicas"};
    for (int i = 0; i < COUNT_OF(said); i++)
        if (!strstr(r.err.msg, said[i]))
            fail_msg("no %s: %s", said[i], r.err.msg);
    assert_null(b.memory);
    assert_int_equal(b.bytes, 0);
    rig_close(&r);
}

/* ---- random use
 * ----------------------------------------------------------------------------------*/

enum { BUFFERS = 40, MOVES = 4000, RANKS = 3 };

typedef struct counts {
    int64_t now[RANKS][MZ_MEM_CATEGORIES], most[RANKS][MZ_MEM_CATEGORIES];
    int64_t total[RANKS], peak[RANKS];
} counts;

static void count_take(counts *m, int32_t rank, mz_memcat c, int64_t bytes) {
    m->now[rank][c] += bytes;
    m->total[rank] += c == MZ_MEM_WORKSPACE ? 0 : bytes;
    if (m->now[rank][c] > m->most[rank][c])
        m->most[rank][c] = m->now[rank][c];
    if (m->total[rank] > m->peak[rank])
        m->peak[rank] = m->total[rank];
}

static void check_counts(const rig *r, const counts *m) {
    for (int32_t rank = 0; rank < RANKS; rank++) {
        const mz_heap_rank *h = mz_heap_of(r->heap, rank);
        assert_memory_equal(h->now, m->now[rank], sizeof h->now);
        assert_memory_equal(h->most, m->most[rank], sizeof h->most);
        assert_int_equal(h->total, m->total[rank]);
        assert_int_equal(h->peak, m->peak[rank]);
        int64_t sum = 0;
        for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
            sum += h->at_peak[c];
        assert_int_equal(sum, h->peak);
    }
}

/* Every buffer holds its own number throughout: two that overlapped would show. */
static void check_contents(const mz_buffer *buffer, int i) {
    const unsigned char *bytes = buffer->memory;
    if (buffer->bytes > 0 && (bytes[0] != i || bytes[buffer->bytes - 1] != i))
        fail_msg("buffer %d was written by another", i);
}

static void test_random(void **state) {
    for (uint64_t seed = 1; seed <= 4; seed++) {
        rig r;
        rig_open(&r, 0, RANKS);
        mz_buffer buffer[BUFFERS] = {0};
        counts m = {0};
        mz_rng rng = mz_rng_make(seed, 0);
        int64_t held = 0;
        for (int move = 0; move < MOVES; move++) {
            const int i = (int)mz_rng_below(&rng, BUFFERS);
            check_contents(&buffer[i], i);
            if (buffer[i].bytes > 0) {
                count_take(&m, buffer[i].rank, buffer[i].category, -buffer[i].bytes);
                held -= buffer[i].bytes;
                mz_heap_give(r.heap, &buffer[i]);
            } else {
                const int32_t rank = (int32_t)mz_rng_below(&rng, RANKS);
                const mz_memcat c = (mz_memcat)mz_rng_below(&rng, MZ_MEM_CATEGORIES);
                const int64_t bytes = (int64_t)mz_rng_below(&rng, 1 << mz_rng_below(&rng, 14));
                assert_ok(take(&r, rank, c, bytes, &buffer[i]), &r.err);
                count_take(&m, rank, c, bytes);
                held += bytes;
                if (bytes > 0)
                    memset(buffer[i].memory, i, (size_t)bytes);
            }
            check_counts(&r, &m);
            assert_true(mz_heap_reserved(r.heap) >= held);
        }
        rig_close(&r);
    }
}

/* A step repeated, with sizes that differ a little, takes nothing new from the context. */
static void test_steady(void **state) {
    rig r;
    rig_open(&r, 0, 1);
    int64_t reserved = 0;
    for (int step = 0; step < 5; step++) {
        mz_buffer buffer[16] = {0};
        for (int i = 0; i < 16; i++)
            assert_ok(take(&r, 0, MZ_MEM_TOKEN_BUFFERS, 9000 * (i + 1) - step * 16, &buffer[i]),
                      &r.err);
        for (int i = 0; i < 16; i++)
            mz_heap_give(r.heap, &buffer[(i + step) % 16]);
        reserved = step == 0 ? mz_heap_reserved(r.heap) : reserved;
        assert_int_equal(mz_heap_reserved(r.heap), reserved);
    }
    assert_int_equal(mz_heap_of(r.heap, 0)->total, 0);
    rig_close(&r);
}

/* What a step uses that has buffers of these sizes: the memory that the heap has then. */
static int64_t step_of(rig *r, const int64_t *bytes, int count) {
    mz_buffer buffer[8] = {0};
    mz_heap_start_step(r->heap);
    for (int i = 0; i < count; i++)
        assert_ok(take(r, 0, MZ_MEM_TOKEN_BUFFERS, bytes[i], &buffer[i]), &r->err);
    for (int i = 0; i < count; i++)
        mz_heap_give(r->heap, &buffer[i]);
    return mz_heap_reserved(r->heap);
}

/* Idle for a whole step, a block goes; what a step used, or still holds, stays. */
static void test_idle_blocks_go(void **state) {
    static const int64_t sizes[] = {1 << 20, 1 << 14, 1 << 17, 1 << 11};
    rig r;
    rig_open(&r, 0, 1);
    mz_buffer held = {0};
    assert_ok(take(&r, 0, MZ_MEM_WEIGHTS, 512, &held), &r.err);
    for (int i = 0; i < 4; i++)
        assert_int_equal(step_of(&r, &sizes[i], 1), 512 + sizes[i] + (i > 0 ? sizes[i - 1] : 0));
    assert_int_equal(step_of(&r, &sizes[3], 1), 512 + sizes[3]);
    mz_heap_give(r.heap, &held); /* in this step: it stays for the next, and is taken */
    mz_heap_start_step(r.heap);
    assert_ok(take(&r, 0, MZ_MEM_WEIGHTS, 512, &held), &r.err);
    assert_int_equal(mz_heap_reserved(r.heap), 512 + sizes[3]);
    mz_heap_start_step(r.heap); /* sizes[3] was idle throughout */
    assert_int_equal(mz_heap_reserved(r.heap), 512);
    rig_close(&r);
}

/* A window of unlike steps again and again: after two passes nothing comes or goes. Steps that grow
 * and grow want nothing back: their blocks go as soon as ever. */
static void test_steps_that_come_back(void **state) {
    static const int64_t window[][3] = {
        {1 << 20, 1 << 12, 1 << 12}, {1 << 8, 1 << 16, 1 << 14}, {1 << 18, 1 << 9, 1 << 20}};
    rig r;
    rig_open(&r, 0, 1);
    int64_t reserved = 0;
    for (int pass = 0; pass < 6; pass++)
        for (int s = 0; s < 3; s++) {
            const int64_t now = step_of(&r, window[s], 3);
            if (pass > 2)
                assert_int_equal(now, reserved);
            reserved = now;
        }
    rig_close(&r);
    rig_open(&r, 0, 1);
    for (int64_t bytes = 1 << 10; bytes <= 1 << 24; bytes *= 4)
        assert_int_equal(step_of(&r, &bytes, 1), bytes + (bytes > 1 << 10 ? bytes / 4 : 0));
    rig_close(&r);
}

/* ---- faults
 * --------------------------------------------------------------------------------------*/

/* Linked so that memory of the kernels' context is asked for here (meson.build: --wrap): `short_by`
 * requests are refused first, with `status`. */
static int short_by;
static mz_kstatus refusal;
mz_kstatus __real_mz_kernels_alloc(mz_kernels *kernels, size_t bytes, void **memory);
mz_kstatus __wrap_mz_kernels_alloc(mz_kernels *kernels, size_t bytes, void **memory);

mz_kstatus __wrap_mz_kernels_alloc(mz_kernels *kernels, size_t bytes, void **memory) {
    return short_by > 0 && short_by-- ? refusal : __real_mz_kernels_alloc(kernels, bytes, memory);
}

/* Of three heaps that were joined, one is short: the others' idle blocks go, what is taken stays,
 * and a heap that has left the ring is not asked. */
static void test_joined(void **state) {
    rig r;
    rig_open(&r, 0, 1);
    mz_heap *other[3];
    mz_buffer idle[3] = {0}, taken[3] = {0}, a = {0};
    for (int i = 0; i < 3; i++) {
        assert_ok(mz_heap_create(r.kernels, 0, 1, &other[i], &r.err), &r.err);
        mz_heap_join(other[i], r.heap);
        for (int b = 0; b < 2; b++)
            assert_ok(mz_heap_take(other[i], 0, MZ_MEM_WEIGHTS, 1024, "rows", 0,
                                   b ? &taken[i] : &idle[i], &r.err),
                      &r.err);
        mz_heap_give(other[i], &idle[i]);
    }
    mz_heap_free(&other[1]);
    refusal = MZ_K_ENOMEM;
    short_by = 1;
    assert_ok(take(&r, 0, MZ_MEM_WEIGHTS, 4096, &a), &r.err);
    for (int i = 0; i < 3; i += 2)
        assert_int_equal(mz_heap_reserved(other[i]), 1024);
    memset(taken[2].memory, 1, 1024);
    /* Nothing is idle any more: the next shortage is one. */
    mz_buffer b = {0};
    short_by = 1;
    assert_fails(take(&r, 0, MZ_MEM_WEIGHTS, 8192, &b), MZ_ENOMEM, "no memory for", &r.err);
    mz_heap_free(&other[0]);
    mz_heap_free(&other[2]);
    short_by = 1;
    assert_fails(take(&r, 0, MZ_MEM_WEIGHTS, 8192, &b), MZ_ENOMEM, "no memory for", &r.err);
    rig_close(&r);
}

/* A device that failed is not short of memory. */
static void test_failed_device(void **state) {
    rig r;
    rig_open(&r, 0, 1);
    mz_buffer a = {0};
    refusal = mz_kernels_fail(r.kernels, MZ_K_EFAILED, "launch: the device is gone");
    short_by = 1;
    assert_fails(take(&r, 0, MZ_MEM_WEIGHTS, 4096, &a), MZ_EINTERNAL,
                 "layer 3 rows of rank 0: launch: the device is gone", &r.err);
    rig_close(&r);
}

/* Takes eight buffers and gives them back, whatever happens; code of the first failure. */
static mz_code use(rig *r) {
    mz_buffer buffer[8] = {0};
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < 8; i++)
        code = take(r, i % 2, MZ_MEM_REPLICAS, 100 * (i + 1), &buffer[i]);
    for (int i = 0; i < 8; i++)
        mz_heap_give(r->heap, &buffer[i]);
    return code;
}

static void test_faults(void **state) {
    rig r;
    rig_open(&r, 0, 2);
    assert_ok(use(&r), &r.err);
    const int64_t takes = mz_heap_takes(r.heap);
    assert_int_equal(takes, 8);
    for (int64_t n = 1; n <= takes; n++) {
        const int64_t before = mz_heap_takes(r.heap);
        mz_heap_fail_at(r.heap, n);
        assert_fails(use(&r), MZ_ENOMEM, "no memory for layer 3 rows", &r.err);
        assert_int_equal(mz_heap_takes(r.heap) - before, n);
        for (int32_t rank = 0; rank < 2; rank++)
            assert_int_equal(mz_heap_of(r.heap, rank)->total, 0);
        assert_ok(use(&r), &r.err); /* once only */
    }
    mz_heap_fail_at(r.heap, 3);
    mz_heap_fail_at(r.heap, 0);
    assert_ok(use(&r), &r.err);
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reuse),          cmocka_unit_test(test_peak),
        cmocka_unit_test(test_errors),         cmocka_unit_test(test_random),
        cmocka_unit_test(test_steady),         cmocka_unit_test(test_faults),
        cmocka_unit_test(test_idle_blocks_go), cmocka_unit_test(test_steps_that_come_back),
        cmocka_unit_test(test_joined),         cmocka_unit_test(test_failed_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
