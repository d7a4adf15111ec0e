/* What calibration makes of the times of products, on devices whose times are known: tiles of known
 * length taken in turn by the workers, a call that costs something beside them. */
#include "common/base/rng.h"
#include "common/base/stat.h"
#include "replay/calibrate_inside.h"
#include "tests/harness.h"

#include <math.h>

static const double call_s = 20e-6, single_s = 1e-6, alone = 0.75;

static void assert_near(double value, double wanted) {
    if (!(fabs(value - wanted) <= 1e-6 * wanted))
        fail_msg("%.17g instead of %.17g", value, wanted);
}

typedef struct fake_device {
    mz_product_tiles rows, wgrad, up; /* of forward and dgrad */
    const char *backend;
} fake_device;

/* Two threads of a host; its grouped products' tiles. A GPU of 132 multiprocessors. */
static const fake_device host = {{512, 0, 0, 2}, {0, 256, 0, 2}, {256, 0, 0, 2}, "host"},
                         many_cores = {{512, 0, 0, 24}, {0, 256, 0, 24}, {256, 0, 0, 24}, "host"},
                         gpu = {{128, 256, 0, 132}, {0, 128, 256, 132}, {128, 256, 0, 132}, "cuda"};

static struct {
    const fake_device *device;
    double clock;
    int32_t most_groups; /* of one call, a tile each */
    int32_t calls;
    bool few;         /* groups, in a small pool: a tile alone is faster than one of many */
    bool held_out;    /* a shape was called that must not be */
    int64_t rests[8]; /* groups of samples of 64 rows by what 8 leaves of their rows */
} fake;

static double tile_s(double m, double n, double k) {
    return 0.4e-6 + 2e-10 * n * k + 3e-10 * m * (n + k) + 2e-11 * m * n * k;
}

static int64_t parts(int64_t side, int32_t most) {
    return most > 0 && side > most ? (side + most - 1) / most : 1;
}

/* The first tile's part of a side; on a host they are as equal as multiples of 8 let them be. */
static int64_t part(int64_t side, int32_t most) {
    if (most <= 0 || side <= most)
        return side;
    return fake.device == &gpu ? most
                               : (side + 8 * parts(side, most) - 1) / (8 * parts(side, most)) * 8;
}

static bool comes_out_even(int64_t side, int32_t most) {
    return side == 0 || side % part(side, most) == 0;
}

/* Groups differ by a few rows where one tile holds each. Returns the mean time of a tile. */
static double mean_tile_s(const mz_product_tiles *t, const mz_groups *g, int64_t m, int64_t n,
                          int64_t k) {
    double sum = 0;
    assert_int_equal(g->begin[g->groups], m * g->groups);
    for (int32_t i = 0; i < g->groups; i++) {
        const int64_t rows = g->begin[i + 1] - g->begin[i];
        assert_true(rows == m || (m >= 8 && (t->rows == 0 || rows <= t->rows)));
        assert_true(rows - m >= -4 && rows - m <= 4);
        sum += tile_s((double)part(rows, t->rows), (double)part(n, t->n), (double)part(k, t->k));
        fake.rests[rows % 8] += m == 64;
    }
    return sum / g->groups;
}

static mz_kstatus product(const mz_product_tiles *t, const mz_groups *g, int64_t n, int64_t k) {
    const int64_t m = g->begin[g->groups] / g->groups;
    const int64_t tiles = parts(m, t->rows) * parts(n, t->n) * parts(k, t->k) * g->groups;
    const double each = mean_tile_s(t, g, m, n, k);
    assert_true(comes_out_even(m, t->rows) && comes_out_even(n, t->n) && comes_out_even(k, t->k));
    if (tiles == 1)
        fake.clock += single_s + (t->workers > 1 ? alone : 1) * each;
    else
        fake.clock += call_s + (double)((tiles + t->workers - 1) / t->workers) * each;
    if (tiles == g->groups && tiles > fake.most_groups)
        fake.most_groups = g->groups;
    fake.calls++;
    return MZ_K_OK;
}

static void look_for_held_out(int64_t n, int64_t k) {
    static const int64_t shapes[][2] = {{128, 96}, {512, 384}, {384, 256}, {192, 128}};
    for (int i = 0; i < COUNT_OF(shapes); i++)
        fake.held_out = fake.held_out || (n == shapes[i][0] && k == shapes[i][1]);
}

mz_kstatus mz_grouped_gemm(mz_kernels *kernels, mz_kstream stream, const mz_product_args *a,
                           void *workspace) {
    const bool wgrad = a->op == MZ_PRODUCT_WGRAD;
    look_for_held_out(a->n, a->k);
    return product(wgrad ? &fake.device->wgrad : &fake.device->rows, &a->groups, a->n, a->k);
}

mz_kstatus mz_expert_up_forward(mz_kernels *kernels, mz_kstream stream, const mz_expert_up *a,
                                void *workspace) {
    look_for_held_out(2 * a->intermediate, a->hidden);
    return product(&fake.device->up, &a->groups, 2 * a->intermediate, a->hidden);
}

size_t mz_grouped_gemm_workspace(const mz_kernels *kernels, const mz_product_args *args) {
    return 0;
}

size_t mz_expert_up_workspace(const mz_kernels *kernels, const mz_expert_up *args) {
    return 0;
}

mz_product_tiles mz_kernels_tiles(const mz_kernels *kernels, mz_product op) {
    return op == MZ_PRODUCT_WGRAD ? fake.device->wgrad : fake.device->rows;
}

mz_product_tiles mz_kernels_up_tiles(const mz_kernels *kernels, int64_t intermediate) {
    return fake.device->up;
}

mz_kstatus mz_kernels_alloc(mz_kernels *kernels, size_t bytes, void **memory) {
    *memory = calloc(1, bytes);
    return *memory ? MZ_K_OK : MZ_K_ENOMEM;
}

void mz_kernels_free(mz_kernels *kernels, void *memory) {
    free(memory);
}

mz_kstatus mz_kernels_copy(mz_kernels *kernels, mz_kstream stream, mz_copy kind, void *to,
                           const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    return MZ_K_OK;
}

/* ---- the rest of calibration -------------------------------------------------------------------
 */

static mz_fit *fit_of(calibration *c, int kind) {
    return kind >= MZ_WORKS ? &c->beside[kind - MZ_WORKS] : &c->measured->fit[kind];
}

mz_code calibrate_begin(calibration *c, int kind, int32_t most, mz_err *err) {
    mz_fit *fit = fit_of(c, kind);
    if (!fit->sample) {
        fit->sample = MZ_NEW(c->arena, mz_fit_sample, most);
        c->series[kind].most = most;
    }
    return fit->sample ? MZ_OK : mz_fail_nomem(err, "samples");
}

/* Whatever the shape that a tile comes from, its time is the same one. */
void calibrate_add(calibration *c, int kind, double a, double b, double bytes, double seconds) {
    mz_fit *fit = fit_of(c, kind);
    int32_t i = 0;
    while (i < fit->samples && (fit->sample[i].size[0] != a || fit->sample[i].size[1] != b ||
                                fit->sample[i].size[2] != bytes))
        i++;
    assert_true(i < c->series[kind].most);
    if (i == fit->samples)
        fit->sample[fit->samples++] = (mz_fit_sample){.size = {a, b, bytes}, .seconds = seconds};
    if (!fake.few)
        assert_near(seconds, fit->sample[i].seconds);
}

double calibrate_mean(calibration *c, int kind, int32_t i) {
    return fit_of(c, kind)->sample[i].seconds;
}

mz_code calibrate_scratch(calibration *c, size_t bytes, mz_err *err) {
    return MZ_OK;
}

mz_code calibrate_failed(calibration *c, const char *what, mz_err *err) {
    return mz_fail(err, MZ_EINTERNAL, "%s", what);
}

mz_code calibrate_time(calibration *c, const calibrate_call *call, double *seconds, mz_err *err) {
    assert_true(call->in_bytes <= c->options.pool_bytes &&
                call->out_bytes <= c->options.pool_bytes);
    assert_true(!call->each_rank && call->made_bytes == 0);
    const double start = fake.clock;
    assert_int_equal(call->bind(c, call->sizes, c->inputs, c->results), MZ_K_OK);
    assert_int_equal(call->run(c, call->sizes, c->inputs, c->results), MZ_K_OK);
    *seconds = fake.clock - start;
    return MZ_OK;
}

/* ---- tests --------------------------------------------------------------------------------------
 */

static bool has_sample(const mz_fit *fit, int64_t n, int64_t k) {
    for (int32_t i = 0; i < fit->samples; i++)
        if (fit->sample[i].size[1] == (double)n && fit->sample[i].size[2] == (double)k)
            return true;
    return false;
}

/* Where a shape is asked for, every size of its tiles is sampled: `n` of the wgrad's. */
static void samples_are_tiles_of(const fake_device *device, int64_t hidden, int64_t inter,
                                 const int64_t n[2]) {
    static const mz_work works[] = {MZ_WORK_FORWARD, MZ_WORK_DGRAD, MZ_WORK_WGRAD, MZ_WORK_UP};
    static char pool[2];
    mz_arena arena = {0};
    mz_measured measured = {0};
    mz_err err;
    calibration c = {.options = {.hidden = hidden,
                                 .intermediate = inter,
                                 .rounds = 2,
                                 .pool_bytes = INT64_C(256) << 20},
                     .arena = &arena,
                     .measured = &measured,
                     .inputs = pool,
                     .results = pool + 1};
    memset(&fake, 0, sizeof fake);
    fake.device = device;
    snprintf(measured.backend, sizeof measured.backend, "%s", device->backend);
    for (; c.round < 2; c.round++)
        assert_ok(calibrate_products(&c, &err), &err);
    for (int i = 0; i < 2 && n[i] > 0; i++)
        assert_true(has_sample(&measured.fit[MZ_WORK_WGRAD], n[i], inter));
    for (int rest = 0; rest < COUNT_OF(fake.rests); rest++)
        assert_true(fake.rests[rest] > 0);
    assert_near(measured.call_s, call_s);
    assert_true(fake.most_groups >= 2 * device->rows.workers); /* all are busy, and twice */
    for (int w = 0; w < COUNT_OF(works); w++) {
        const mz_fit *fit = &measured.fit[works[w]];
        double least = 1e9, most = 0;
        assert_true(fit->samples > 20);
        for (int32_t i = 0; i < fit->samples; i++) {
            const double *size = fit->sample[i].size;
            assert_near(fit->sample[i].seconds, tile_s(size[0], size[1], size[2]));
            least = fmin(least, fmin(size[1], size[2]));
            most = fmax(most, fmax(size[1], size[2]));
        }
        assert_true(least == 64 && most >= 256);
    }
    calibrate_alone(&c);
    /* what stands for the call alone has a tile of its own, if a small one */
    assert_true(fabs(measured.alone - alone) < 0.01 * alone);
    mz_arena_free(&arena);
}

static void samples_are_tiles(const fake_device *device, int64_t hidden, int64_t inter) {
    samples_are_tiles_of(device, hidden, inter, (const int64_t[2]){0});
}

static void a_host(void **state) {
    (void)state;
    samples_are_tiles(&host, 0, 0);
    assert_false(fake.held_out);
    samples_are_tiles(&many_cores, 0, 0);
}

static void a_gpu(void **state) {
    (void)state;
    samples_are_tiles(&gpu, 0, 0);
    assert_false(fake.held_out);
}

/* 160 rows and a weight of the largest product alone fill the pool: some rows more do not fit. */
static void a_full_pool(void **state) {
    (void)state;
    static char pool[2];
    mz_arena arena = {0};
    mz_measured measured = {.backend = "host"};
    mz_err err;
    calibration c = {.options = {.rounds = 2, .pool_bytes = 2 * (1024 * 1024 + 160 * 1024)},
                     .arena = &arena,
                     .measured = &measured,
                     .inputs = pool,
                     .results = pool + 1};
    memset(&fake, 0, sizeof fake);
    fake.device = &host;
    fake.few = true;
    for (; c.round < 2; c.round++)
        assert_ok(calibrate_products(&c, &err), &err);
    assert_true(c.beside[CALIBRATE_ALONE - MZ_WORKS].samples > 4);
    mz_arena_free(&arena);
}

static void a_shape_more(void **state) {
    (void)state;
    samples_are_tiles(&host, 0, 0);
    const int32_t calls = fake.calls;
    samples_are_tiles(&host, 384, 256);
    assert_true(fake.calls > calls && fake.held_out);
    samples_are_tiles(&gpu, 384, 256);
}

/* 600 columns are three tiles of 200 on a host; 1000 are three of 256 and one of 232. */
static void tiles_of_a_shape(void **state) {
    (void)state;
    samples_are_tiles_of(&host, 600, 200, (const int64_t[2]){200});
    samples_are_tiles_of(&host, 1000, 200, (const int64_t[2]){256, 232});
    samples_are_tiles_of(&gpu, 600, 200, (const int64_t[2]){128, 88});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_host),           cmocka_unit_test(a_gpu),
        cmocka_unit_test(a_full_pool),      cmocka_unit_test(a_shape_more),
        cmocka_unit_test(tiles_of_a_shape),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
