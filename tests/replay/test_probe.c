/* A probe's time is the mean over processes, its rows are really packed, and what fails around it
 * is passed on. The transport of these tests has this process's ranks and others that answer at
 * once. */
#include "replay/probe.h"

#include "common/base/log.h"
#include "tests/harness.h"

/* 0.54 GFLOP, 32 MiB and 256 KiB take longer on any one core; the upper end is whatever else the
 * machine does. */
static const double least_s[MZ_SPEEDS] = {
    [MZ_SPEED_PRODUCT] = 1e-5, [MZ_SPEED_MEMORY] = 1e-4, [MZ_SPEED_CACHE] = 1e-7};
static mz_speed asked;

/* Of the others: what each says, and how often all met. */
static double others_s;
static mz_code at_barrier, at_gather;
static int barriers;

mz_code mz_transport_barrier(mz_transport *transport, mz_err *err) {
    barriers++;
    return at_barrier == MZ_OK ? MZ_OK : mz_fail(err, at_barrier, "a peer is gone");
}

mz_code mz_transport_gather(mz_transport *transport, const void *mine, size_t bytes, void *all,
                            mz_err *err) {
    assert_int_equal(bytes, sizeof(double));
    double *out = all;
    for (int32_t r = 0; r < transport->ranks; r++)
        out[r] = others_s;
    for (int32_t r = 0; r < transport->end - transport->first; r++)
        assert_true(((const double *)mine)[r] > least_s[asked]);
    memcpy(out + transport->first, mine, bytes * (size_t)(transport->end - transport->first));
    return at_gather == MZ_OK ? MZ_OK : mz_fail(err, at_gather, "a peer is late");
}

static mz_kernels *host(void) {
    const mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .threads = 1, .streams = 1};
    mz_kernels *kernels = NULL;
    char why[256] = "";
    if (mz_kernels_open(&options, &kernels, why, sizeof why) != MZ_K_OK)
        fail_msg("%s", why);
    return kernels;
}

static void the_mean_is_over_processes(void **state) {
    static const struct { int32_t ranks, first, end; } shapes[] = {{1, 0, 1}, {4, 2, 4}, {8, 0, 2}};
    mz_kernels *kernels = host();
    mz_err err = {0};
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        mz_transport transport = {
            .ranks = shapes[i].ranks, .first = shapes[i].first, .end = shapes[i].end};
        mz_probe *probe = NULL;
        assert_ok(mz_probe_create(kernels, &transport, NULL, &probe, &err), &err);
        const double others = (double)(shapes[i].ranks - shapes[i].end + shapes[i].first);
        others_s = 4096; /* more than this process takes by far */
        barriers = 0;
        for (int run = 1; run <= 2 * MZ_SPEEDS; run++) {
            double seconds = -1;
            const double start = mz_now();
            asked = (mz_speed)(run % MZ_SPEEDS);
            assert_ok(mz_probe_run(probe, asked, &seconds, &err), &err);
            const double took = mz_now() - start;
            const double own =
                (seconds * shapes[i].ranks - others * others_s) / (shapes[i].end - shapes[i].first);
            assert_true(own > least_s[asked] - 1e-9 &&
                        own <= took + 1e-9); /* differences of 4096 s are that exact */
            assert_int_equal(barriers, run);
        }
        mz_probe_free(&probe);
        assert_null(probe);
    }
    mz_kernels_close(&kernels);
}

enum { LONG_ROW = 2048, SHORT_ROW = 512, VALUES = MZ_PROBE_ROOM / 2 };

static uint16_t value_of(int64_t row) {
    return (uint16_t)(0x3f80 + row % 128);
}

/* Long rows come from the next part of the room and go to the next one, twice in a run; short ones
 * go on from there, from one place to another that is packed in turn. The room is lent: it is not
 * freed. */
static void rows_are_packed(void **state) {
    mz_kernels *kernels = host();
    mz_transport transport = {.ranks = 1, .end = 1};
    mz_probe_room room = {.bytes = MZ_PROBE_ROOM};
    mz_probe *probe = NULL;
    mz_err err = {0};
    double seconds = 0;
    assert_int_equal(mz_kernels_alloc(kernels, MZ_PROBE_ROOM, (void **)&room.in), MZ_K_OK);
    assert_int_equal(mz_kernels_alloc(kernels, MZ_PROBE_ROOM, (void **)&room.out), MZ_K_OK);
    uint16_t *in = (uint16_t *)(void *)room.in, *out = (uint16_t *)(void *)room.out;
    const int64_t part = MZ_PROBE_LONG / 4; /* values */
    for (int64_t i = 0; i < VALUES; i++)
        in[i] = value_of(i / part); /* says which part it is of */
    memset(out, 0, MZ_PROBE_ROOM);
    assert_ok(mz_probe_create(kernels, &transport, &room, &probe, &err), &err);
    for (int run = 0; run < 5; run++) {
        asked = MZ_SPEED_MEMORY;
        assert_ok(mz_probe_run(probe, asked, &seconds, &err), &err);
        const int64_t at = run % 2 * 2 * part; /* two of the four, then the other two */
        for (int64_t i = 0; i < VALUES; i += LONG_ROW) {
            const uint16_t wanted = i >= at && i < at + 2 * part ? value_of(i / part) : 0;
            assert_true(out[i] == wanted && out[i + LONG_ROW - 1] == wanted);
        }
        memset(out + at, 0, MZ_PROBE_LONG);
    }
    asked = MZ_SPEED_CACHE;
    assert_ok(mz_probe_run(probe, asked, &seconds, &err), &err);
    for (int64_t i = 0; i < VALUES; i += SHORT_ROW) { /* thrice 16 calls of 128 rows */
        const bool packed = i >= 2 * part && i < 2 * part + 3 * 16 * MZ_PROBE_SHORT / 4;
        if (out[i] != (packed ? value_of(2) : 0) || out[i + SHORT_ROW - 1] != out[i])
            fail_msg("row %lld", (long long)(i / SHORT_ROW));
    }
    mz_probe_free(&probe);
    mz_kernels_free(kernels, room.in);
    mz_kernels_free(kernels, room.out);
    mz_kernels_close(&kernels);
}

static void failures_pass(void **state) {
    mz_kernels *kernels = host();
    mz_transport transport = {.ranks = 2, .end = 1};
    mz_probe *probe = NULL;
    mz_err err = {0};
    double seconds = 0;
    assert_ok(mz_probe_create(kernels, &transport, NULL, &probe, &err), &err);
    asked = MZ_SPEED_PRODUCT;
    at_barrier = MZ_EABORTED;
    assert_fails(mz_probe_run(probe, MZ_SPEED_PRODUCT, &seconds, &err), MZ_EABORTED,
                 "a peer is gone", &err);
    at_barrier = MZ_OK;
    at_gather = MZ_EINTERNAL;
    assert_fails(mz_probe_run(probe, MZ_SPEED_PRODUCT, &seconds, &err), MZ_EINTERNAL,
                 "a peer is late", &err);
    at_gather = MZ_OK;
    assert_ok(mz_probe_run(probe, MZ_SPEED_PRODUCT, &seconds, &err), &err);
    mz_probe_free(&probe);
    mz_probe_free(&probe); /* of none */
    mz_kernels_close(&kernels);
}

/* Read as bf16 or, two of them, as fp32: finite, of ordinary size. */
static void operands_are_ordinary_numbers(void **state) {
    mz_rng rng = mz_rng_make(1, 1);
    for (int i = 0; i < 100000; i++) {
        const uint16_t low = mz_probe_operand(&rng), high = mz_probe_operand(&rng);
        const uint32_t one = (uint32_t)high << 16, both = one | low;
        float bf16, fp32;
        memcpy(&bf16, &one, sizeof bf16);
        memcpy(&fp32, &both, sizeof fp32);
        const float size = bf16 < 0 ? -bf16 : bf16, whole = fp32 < 0 ? -fp32 : fp32;
        assert_true(size >= 0.125f && size < 2);
        assert_true(whole >= 0.125f && whole < 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_mean_is_over_processes),
        cmocka_unit_test(rows_are_packed),
        cmocka_unit_test(failures_pass),
        cmocka_unit_test(operands_are_ordinary_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
