/* One optimizer update outside the engine: state is what the simulator counts, matrices do not know
 * their neighbours, master weights are converted. The rules themselves are checked with the kernels
 * and, in double precision, with the experts. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "replay/update.h"

enum { MATRICES = 5, ROWS = 6, COLS = 10, VALUES = ROWS * COLS };

static const char *const supported[] = {"adamw",
                                        "adamw-bf16",
                                        "skewadam",
                                        "skewadam[experts=momentum]",
                                        "skewadam[uniform=yes]",
                                        "skewadam[master=fp32]",
                                        "adafactor",
                                        "adafactor[master=fp32]",
                                        "lion",
                                        "lion[master=fp32]",
                                        "muon[iterations=3]",
                                        "muon[state=tabulated]"};

static mz_optimizer optimizer_of(const char *text) {
    mz_optimizer o;
    mz_err err;
    assert_ok(mz_optimizer_parse(text, &o, &err), &err);
    return o;
}

static void test_state_bytes(void **state) {
    static const int64_t shape[][2] = {{2 * 768, 2048}, {2048, 768}, {64, 32}, {3, 5}};
    for (int i = 0; i < COUNT_OF(supported); i++)
        for (int k = 0; k < COUNT_OF(shape); k++)
            for (int bytes = 2; bytes <= 4; bytes += 2) {
                const mz_optimizer o = optimizer_of(supported[i]);
                const mz_tensor t = {.rows = shape[k][0],
                                     .cols = shape[k][1],
                                     .count = 128,
                                     .tier = MZ_TIER_EXPERT,
                                     .role = MZ_ROLE_MAP,
                                     .bytes_per_value = bytes,
                                     .trainable = true};
                const mz_dtype type = bytes == 2 ? MZ_BF16 : MZ_F32;
                const int64_t want =
                    mz_optimizer_update(&o, &t, 16, 1, MZ_TEMPORARIES_FUSED).state_bytes;
                const int64_t is = mz_update_block_bytes(&o, type, 16, t.rows, t.cols);
                if (is != want)
                    fail_msg("%s, %d bytes a value, %lld x %lld: %lld, not %lld", supported[i],
                             bytes, (long long)t.rows, (long long)t.cols, (long long)is,
                             (long long)want);
            }
}

/* Parts lie one after the other and fill the block. */
static void test_layout(void **state) {
    float *block = calloc(16 * MATRICES * VALUES, sizeof *block);
    for (int i = 0; i < COUNT_OF(supported); i++) {
        const mz_optimizer o = optimizer_of(supported[i]);
        const mz_update_state s = mz_update_state_of(&o, MZ_BF16, MATRICES, ROWS, COLS, block);
        float *const part[MZ_UPDATE_STATES] = {s.master, s.m, s.v, s.row, s.col};
        const int64_t size[MZ_UPDATE_STATES] = {VALUES, VALUES, VALUES, ROWS, COLS};
        int64_t values[MZ_UPDATE_STATES];
        float *next = block;
        mz_update_parts(&o, MZ_BF16, ROWS, COLS, values);
        for (int k = 0; k < MZ_UPDATE_STATES; k++) {
            assert_int_equal(values[k], part[k] ? size[k] : 0);
            assert_true(!part[k] || part[k] == next);
            next += MATRICES * values[k];
        }
        assert_int_equal((next - block) * 4,
                         mz_update_block_bytes(&o, MZ_BF16, MATRICES, ROWS, COLS));
        assert_int_equal(s.master != NULL, mz_update_has_master(&o, MZ_BF16));
        assert_true(!mz_update_has_master(&o, MZ_F32));
    }
    free(block);
}

typedef struct bench {
    mz_kernels *kernels;
    mz_optimizer o;
    mz_dtype type;
    void *weights, *gradient, *block, *scratch;
} bench;

static void fill(bench *b) {
    mz_rng rng = mz_rng_make(4, 4);
    const mz_update_state s = mz_update_state_of(&b->o, b->type, MATRICES, ROWS, COLS, b->block);
    float value[MATRICES * VALUES];
    memset(b->block, 0, 16 * MATRICES * VALUES * sizeof *value);
    for (int k = 0; k < 2; k++) {
        void *to = k ? b->gradient : b->weights;
        for (int i = 0; i < MATRICES * VALUES; i++)
            value[i] = (float)((int)mz_rng_below(&rng, 255) - 127) / 128; /* bf16 holds it */
        assert_int_equal(mz_convert(b->kernels, 0, b->type, to, MZ_F32, value, MATRICES * VALUES),
                         MZ_K_OK);
        if (k == 0 && s.master)
            memcpy(s.master, value, sizeof value);
    }
}

static void update(bench *b, int64_t first, int64_t matrices, int64_t step) {
    const int64_t size = b->type == MZ_BF16 ? 2 : 4;
    const mz_update_call call = {.optimizer = &b->o,
                                 .type = b->type,
                                 .held = MATRICES,
                                 .first = first,
                                 .matrices = matrices,
                                 .rows = ROWS,
                                 .cols = COLS,
                                 .step = step,
                                 .seed = 1,
                                 .weights = (char *)b->weights + first * VALUES * size,
                                 .gradient = (char *)b->gradient + first * VALUES * size,
                                 .block = b->block};
    assert_true(mz_update_scratch(b->kernels, &call) <= 1 << 20);
    assert_int_equal(mz_update_run(b->kernels, &call, b->scratch), MZ_K_OK);
}

/* All matrices in one call, and in three, two steps each: the same weights and state. */
static void check_runs(bench *b) {
    static char once[16 * MATRICES * VALUES * 4], weights[MATRICES * VALUES * 4];
    const size_t size = MATRICES * VALUES * (b->type == MZ_BF16 ? 2 : 4);
    const size_t state = (size_t)mz_update_block_bytes(&b->o, b->type, MATRICES, ROWS, COLS);
    fill(b);
    memcpy(weights, b->weights, size);
    for (int64_t step = 1; step <= 2; step++)
        update(b, 0, MATRICES, step);
    assert_true(memcmp(weights, b->weights, size) != 0);
    memcpy(weights, b->weights, size);
    memcpy(once, b->block, state);
    fill(b);
    for (int64_t step = 1; step <= 2; step++) {
        update(b, 0, 2, step);
        update(b, 2, 1, step);
        update(b, 3, 2, step);
    }
    assert_memory_equal(once, b->block, state);
    /* Random bits of a dithered write belong to an element's place in its call. */
    if (!mz_update_is_dithered(&b->o, b->type))
        assert_memory_equal(weights, b->weights, size);
}

/* Weights are the master weights, rounded to nearest even. */
static void check_master(const bench *b) {
    const mz_update_state s = mz_update_state_of(&b->o, b->type, MATRICES, ROWS, COLS, b->block);
    const uint16_t *w = b->weights;
    for (int i = 0; s.master && i < MATRICES * VALUES; i++) {
        uint32_t bits;
        memcpy(&bits, &s.master[i], sizeof bits);
        const uint32_t half = 0x7FFF + (bits >> 16 & 1);
        assert_int_equal(w[i], (bits + half) >> 16);
    }
}

static void test_runs(void **state) {
    const mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .threads = 2, .streams = 1};
    bench b = {0};
    char message[256];
    if (mz_kernels_open(&options, &b.kernels, message, sizeof message) != MZ_K_OK)
        fail_msg("%s", message);
    void **memory[] = {&b.weights, &b.gradient, &b.block, &b.scratch};
    const size_t bytes[] = {MATRICES * VALUES * 4, MATRICES * VALUES * 4,
                            16 * MATRICES * VALUES * 4, 1 << 20};
    for (int i = 0; i < COUNT_OF(bytes); i++)
        assert_int_equal(mz_kernels_alloc(b.kernels, bytes[i], memory[i]), MZ_K_OK);
    for (int i = 0; i < COUNT_OF(supported); i++)
        for (int type = 0; type < 2; type++) {
            b.o = optimizer_of(supported[i]);
            b.type = type ? MZ_BF16 : MZ_F32;
            check_runs(&b);
            check_master(&b);
        }
    for (int i = 0; i < COUNT_OF(bytes); i++)
        mz_kernels_free(b.kernels, *memory[i]);
    mz_kernels_close(&b.kernels);
}

static void test_support(void **state) {
    static const char *const refused[] = {"galore", "adam8bit", "sgdm", "adamw[moments=bf16]"};
    mz_err err;
    for (int i = 0; i < COUNT_OF(supported); i++) {
        const mz_optimizer o = optimizer_of(supported[i]);
        assert_ok(mz_update_supported(&o, &err), &err);
        assert_int_equal(mz_update_is_elementwise(&o),
                         strstr(supported[i], "adamw") == supported[i] ||
                             strstr(supported[i], "lion") == supported[i]);
    }
    for (int i = 0; i < COUNT_OF(refused); i++) {
        const mz_optimizer o = optimizer_of(refused[i]);
        assert_fails(mz_update_supported(&o, &err), MZ_EINPUT, refused[i], &err);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_state_bytes),
                                       cmocka_unit_test(test_layout), cmocka_unit_test(test_runs),
                                       cmocka_unit_test(test_support)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
