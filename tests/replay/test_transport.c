/* The transport of one process: lanes arrive, times and bytes are counted, mistakes are named. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "replay/transport_kind.h"

enum { RANKS = 6, LANES = 400, AREA = 1 << 16 };

static mz_kernels *open_kernels(void) {
    const mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .threads = 1, .streams = 1};
    mz_kernels *kernels = NULL;
    assert_int_equal(mz_kernels_open(&options, &kernels, NULL, 0), MZ_K_OK);
    return kernels;
}

static mz_transport *open_local(mz_kernels *kernels) {
    const mz_transport_options options = {.name = "local", .ranks = RANKS, .timeout_s = 3};
    mz_transport *t = NULL;
    mz_err err;
    assert_ok(mz_transport_open(&options, &t, &err), &err);
    assert_ok(mz_transport_attach(t, kernels, &err), &err);
    return t;
}

static void test_one_process_holds_all(void **state) {
    mz_kernels *kernels = open_kernels();
    mz_transport *t = open_local(kernels);
    assert_int_equal(t->processes, 1);
    assert_int_equal(t->first, 0);
    assert_int_equal(t->end, RANKS);
    assert_string_equal(t->name, "local");
    mz_err err;
    int64_t mine[RANKS], all[RANKS] = {0};
    for (int r = 0; r < RANKS; r++)
        mine[r] = 10 * r;
    assert_ok(mz_transport_gather(t, mine, sizeof mine[0], all, &err), &err);
    assert_memory_equal(mine, all, sizeof mine);
    assert_ok(mz_transport_barrier(t, &err), &err);
    mz_transport_abort(t); /* nobody to end */
    mz_transport_close(&t);
    assert_null(t);
    mz_kernels_close(&kernels);
}

/* Random lanes, empty ones and ranks sending to themselves among them, against memcpy in order. */
static void test_lanes_arrive(void **state) {
    mz_kernels *kernels = open_kernels();
    mz_transport *t = open_local(kernels);
    static unsigned char source[AREA], target[AREA + 1], expected[AREA + 1];
    static mz_lane lane[LANES];
    mz_rng rng = mz_rng_make(7, 1);
    for (int i = 0; i < AREA; i++)
        source[i] = (unsigned char)mz_rng_u32(&rng);
    int64_t within = 0, received[RANKS] = {0};
    size_t at = 0;
    for (int i = 0; i < LANES; i++) {
        const size_t bytes = i % 5 ? mz_rng_u32(&rng) % (AREA / LANES) : 0;
        const int32_t from = (int32_t)(mz_rng_u32(&rng) % RANKS);
        const int32_t to = (int32_t)(mz_rng_u32(&rng) % RANKS);
        const size_t begin = mz_rng_u32(&rng) % (AREA - bytes);
        lane[i] = (mz_lane){from, to, source + begin, target + at, bytes};
        memcpy(expected + at, source + begin, bytes);
        at += bytes;
        within += from == to ? 0 : (int64_t)bytes;
        received[to] += (int64_t)bytes;
    }
    double seconds[RANKS];
    for (int r = 0; r < RANKS; r++)
        seconds[r] = 100;
    mz_err err;
    assert_ok(mz_transport_exchange(t, lane, LANES, seconds, &err), &err);
    assert_memory_equal(target, expected, AREA + 1);
    assert_int_equal(t->moved.within, within);
    assert_int_equal(t->moved.between, 0);
    for (int r = 0; r < RANKS; r++)
        assert_true(seconds[r] > 100 && seconds[r] < 110); /* added to */
    assert_ok(mz_transport_exchange(t, NULL, 0, NULL, &err), &err);
    mz_transport_close(&t);
    mz_kernels_close(&kernels);
}

/* A rank that receives all but nothing takes less than one that receives megabytes. */
static void test_time_belongs_to_the_receiver(void **state) {
    mz_kernels *kernels = open_kernels();
    mz_transport *t = open_local(kernels);
    enum { LONG = 32 << 20 };
    unsigned char *from = calloc(1, LONG), *to = calloc(1, LONG);
    assert_non_null(from);
    assert_non_null(to);
    const mz_lane lane[] = {{0, 1, from, to, LONG}, {1, 2, from, to, 8}};
    double seconds[RANKS] = {0};
    mz_err err;
    assert_ok(mz_transport_exchange(t, lane, 2, seconds, &err), &err);
    assert_true(seconds[1] > 2 * seconds[2]);
    assert_true(seconds[2] < 2 * seconds[0] + 1e-3);
    free(from);
    free(to);
    mz_transport_close(&t);
    mz_kernels_close(&kernels);
}

/* Signs of the long lanes that are received in the next exchange, and of nothing else. */
static void test_corruption(void **state) {
    mz_kernels *kernels = open_kernels();
    mz_transport *t = open_local(kernels);
    uint16_t from[64], to[64], other[64], few[4];
    for (int i = 0; i < 64; i++)
        from[i] = (uint16_t)(i * 777);
    const mz_lane lane[] = {{0, 0, from, to, 0},
                            {0, 1, from, to, sizeof to},
                            {1, 2, from, other, sizeof other},
                            {1, 3, from, few, sizeof few}};
    mz_err err;
    t->corrupt = true;
    assert_ok(mz_transport_exchange(t, lane, 1, NULL, &err), &err); /* receives nothing */
    assert_true(t->corrupt);
    assert_ok(mz_transport_exchange(t, lane, 4, NULL, &err), &err);
    assert_false(t->corrupt);
    for (int i = 0; i < 64; i++) {
        assert_int_equal(from[i] ^ 0x8000, to[i]);
        assert_int_equal(from[i] ^ 0x8000, other[i]);
    }
    assert_memory_equal(from, few, sizeof few);
    assert_ok(mz_transport_exchange(t, lane, 4, NULL, &err), &err);
    assert_memory_equal(from, to, sizeof to);
    mz_transport_close(&t);
    mz_kernels_close(&kernels);
}

/* A kind that reaches others, as far as it is asked. */
typedef struct fake_kind {
    int started, finished, ended;
    bool fails_to_start, fails_to_finish;
} fake_kind;

static mz_code fake_start(mz_transport *t, const mz_lane *lane, int64_t lanes, mz_err *err) {
    fake_kind *fake = t->self;
    fake->started++;
    return fake->fails_to_start ? mz_fail(err, MZ_EINTERNAL, "no start") : MZ_OK;
}

static mz_code fake_finish(mz_transport *t, mz_err *err) {
    fake_kind *fake = t->self;
    fake->finished++;
    return fake->fails_to_finish ? mz_fail(err, MZ_EINTERNAL, "no end") : MZ_OK;
}

static void fake_end_others(mz_transport *t) {
    ((fake_kind *)t->self)->ended++;
}

/* What was started and is not waited for: the others are ended, whatever failed, and the error says
 * which process it was. Alone there are no others. */
static void test_failure_after_a_start(void **state) {
    static const mz_transport_kind kind = {
        .start = fake_start, .finish = fake_finish, .end_others = fake_end_others};
    mz_kernels *kernels = open_kernels();
    uint16_t from[8] = {0}, to[8];
    const mz_lane good = {0, 1, from, to, sizeof to}, bad = {0, 1, NULL, to, sizeof to};
    const struct {
        const mz_lane *lane;
        fake_kind fake;
        int processes, finished, ended;
        const char *said;
    } cases[] = {{&good, {0}, 2, 1, 0, NULL},
                 {&bad, {0}, 2, 0, 1, "copy"},
                 {&bad, {0}, 1, 0, 0, "copy"},
                 {&good, {.fails_to_finish = true}, 2, 1, 1, "no end"},
                 {&good, {.fails_to_start = true}, 2, 0, 0, "no start"}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        mz_transport *t = open_local(kernels);
        const mz_transport_kind *local = t->kind;
        fake_kind fake = cases[i].fake;
        mz_err err;
        t->kind = &kind;
        t->self = &fake;
        t->processes = cases[i].processes;
        const mz_code code = mz_transport_exchange(t, cases[i].lane, 1, NULL, &err);
        assert_int_equal(code, cases[i].said ? MZ_EINTERNAL : MZ_OK);
        assert_int_equal(fake.started, 1);
        assert_int_equal(fake.finished, cases[i].finished);
        assert_int_equal(fake.ended, cases[i].ended);
        assert_int_equal(t->placed, cases[i].said && cases[i].processes > 1);
        if (cases[i].said && (!strstr(err.msg, cases[i].said) ||
                              (strstr(err.msg, "process 0 of 2") == err.msg) != t->placed))
            fail_msg("%s", err.msg);
        t->kind = local;
        t->self = NULL;
        mz_transport_close(&t);
    }
    mz_kernels_close(&kernels);
}

static void test_mistakes_are_named(void **state) {
    mz_transport *t = NULL;
    mz_err err;
    mz_transport_options options = {.name = "nccll", .ranks = RANKS, .timeout_s = 3};
    assert_fails(mz_transport_open(&options, &t, &err), MZ_EINPUT, "did you mean nccl?", &err);
    assert_null(t);
    options.name = "pigeon";
    assert_fails(mz_transport_open(&options, &t, &err), MZ_EINPUT, mz_transport_names(), &err);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    options.name = "local";
    assert_fails(mz_transport_open(&options, &t, &err), MZ_EINPUT, "--transport mpi", &err);
    unsetenv("OMPI_COMM_WORLD_SIZE");
}

/* No module anywhere: one line and the code for missing libraries. */
static void test_missing_module(void **state) {
    char folder[256];
    make_directory(folder, sizeof folder);
    mz_transport *t = NULL;
    mz_err err;
    const mz_transport_options options = {
        .name = "mpi", .ranks = RANKS, .timeout_s = 3, .lib_dir = folder};
    assert_fails(mz_transport_open(&options, &t, &err), MZ_EHARDWARE, "needs Open MPI", &err);
    assert_null(t);
    char path[300];
    snprintf(path, sizeof path, "%s/mizan-mpi.so", folder);
    write_bytes(path, "no library", 10);
    assert_fails(mz_transport_open(&options, &t, &err), MZ_EHARDWARE, "could not be loaded", &err);
    remove_directory(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_process_holds_all),        cmocka_unit_test(test_lanes_arrive),
        cmocka_unit_test(test_time_belongs_to_the_receiver), cmocka_unit_test(test_corruption),
        cmocka_unit_test(test_mistakes_are_named),           cmocka_unit_test(test_missing_module),
        cmocka_unit_test(test_failure_after_a_start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
