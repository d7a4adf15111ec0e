/* The tiles that the simulator times for a host's products are those that the kernels cut, in the
 * order in which the pool's threads take them. */
#include "kernels/host/host.h"
#include "sim/cost/work.h"
#include "tests/harness.h"

#include <math.h>

enum { GROUPS_MOST = 12, WORKERS_MOST = 5 };

/* A product of random sizes, and what the kernels make of it. */
typedef struct scene {
    mz_work work;
    int32_t groups;
    int64_t rows[GROUPS_MOST], begin[GROUPS_MOST + 1], n, k;
    void *weight[GROUPS_MOST];
    mz_host_turn turn[GROUPS_MOST];
} scene;

static scene draw(mz_work work) {
    scene s = {.work = work, .groups = 1 + rand() % GROUPS_MOST};
    s.n = 2 + rand() % 1200 / 2 * 2;
    s.k = 1 + rand() % 600;
    for (int32_t g = 0; g < s.groups; g++) {
        static const int64_t known[] = {0, 1, 128, 512, 640};
        s.rows[g] = rand() % 3 ? rand() % 1800 : known[rand() % COUNT_OF(known)];
        s.begin[g + 1] = s.begin[g] + s.rows[g];
        s.weight[g] = s.rows;
    }
    return s;
}

static mz_host_tiling tiling_of(scene *s) {
    const mz_groups groups = {s->begin, s->groups, s->begin[s->groups], NULL};
    const mz_expert_up up = {.groups = groups, .intermediate = s->n / 2, .weight = s->weight};
    const mz_product_args product = {.op = s->work == MZ_WORK_WGRAD   ? MZ_PRODUCT_WGRAD
                                           : s->work == MZ_WORK_DGRAD ? MZ_PRODUCT_DGRAD
                                                                      : MZ_PRODUCT_FORWARD,
                                     .groups = groups,
                                     .n = s->n,
                                     .weight = s->weight};
    return s->work == MZ_WORK_UP ? mz_host_up_tiling(&up, s->turn)
                                 : mz_host_product_tiling(&product, s->turn);
}

/* Every next tile of the kernels' to the thread that is free first. */
static double by_the_kernels(const mz_measured *m, scene *s) {
    const mz_host_tiling t = tiling_of(s);
    const int64_t tiles = mz_host_order_tiles(&t);
    double busy[WORKERS_MOST] = {0}, end = 0;
    for (int64_t i = 0; i < tiles; i++) {
        const mz_host_tile tile = mz_host_tile_at(&t, i);
        const bool wgrad = s->work == MZ_WORK_WGRAD;
        const double size[MZ_FIT_SIZES] = {(double)(wgrad ? s->rows[tile.group] : tile.count),
                                           (double)(wgrad ? tile.count : s->n), (double)s->k};
        int32_t first = 0;
        for (int32_t w = 1; w < m->workers; w++)
            first = busy[w] < busy[first] ? w : first;
        busy[first] += mz_fit_seconds(&m->fit[s->work], s->work, size);
        end = fmax(end, busy[first]);
    }
    return m->call_s + end;
}

static double by_the_simulator(const mz_measured *m, const scene *s) {
    const mz_device device = {.speed = 1, .measured = (mz_measured *)(uintptr_t)m};
    mz_cost_turn turn[GROUPS_MOST];
    double seconds = 0;
    assert_true(mz_cost_tiles(&device, s->work, s->rows, s->groups, s->n, s->k, turn, &seconds));
    return seconds;
}

/* A tile's time is no multiple of its sizes, so that every cut has a time of its own. */
static void set_fit(mz_measured *m, mz_work work, mz_product_tiles tiles, mz_fit_sample *sample) {
    *sample = (mz_fit_sample){.size = {64, 64, 64}, .seconds = 5};
    m->fit[work] = (mz_fit){.term = {0.7, 3e-6, 2e-6, 1e-8}, .samples = 1, .sample = sample};
    mz_fit_finish(&m->fit[work], work);
    m->tiling[work] = (mz_tiling){tiles.rows, tiles.n, tiles.k};
    m->workers = tiles.workers;
}

static void test_tiles_are_the_kernels(void **state) {
    (void)state;
    static const mz_work works[] = {MZ_WORK_FORWARD, MZ_WORK_DGRAD, MZ_WORK_WGRAD, MZ_WORK_UP};
    for (int32_t workers = 1; workers <= WORKERS_MOST; workers++) {
        const mz_kernels_options options = {.threads = workers, .streams = 1};
        mz_measured m = {.backend = "host", .alone = 1, .call_s = 0.25};
        mz_fit_sample sample;
        mz_kernels *k;
        assert_int_equal(mz_kernels_open(&options, &k, NULL, 0), MZ_K_OK);
        for (int trial = 0; trial < 400; trial++) {
            scene s = draw(works[trial % COUNT_OF(works)]);
            const mz_product op = s.work == MZ_WORK_WGRAD   ? MZ_PRODUCT_WGRAD
                                  : s.work == MZ_WORK_DGRAD ? MZ_PRODUCT_DGRAD
                                                            : MZ_PRODUCT_FORWARD;
            set_fit(&m, s.work,
                    s.work == MZ_WORK_UP ? mz_kernels_up_tiles(k, s.n / 2)
                                         : mz_kernels_tiles(k, op),
                    &sample);
            assert_int_equal(m.workers, workers);
            const double wanted = by_the_kernels(&m, &s), got = by_the_simulator(&m, &s);
            if (!(fabs(got - wanted) <= 1e-9 * wanted))
                fail_msg("%s, %d groups, %d threads: %.17g instead of %.17g", mz_work_name(s.work),
                         (int)s.groups, (int)workers, got, wanted);
        }
        mz_kernels_close(&k);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_tiles_are_the_kernels)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
