/* Runs one list of checks on one backend: test_checks LIST [host|cuda|cuda-mma [SEED]]. The host
 * backend uses 3 threads; "cuda" is for a library whose CUDA backend is emulated, "cuda-mma" has
 * its products on mma.sync. */
#include "tests/harness.h"
#include "tests/kernels/rig.h"

static const struct {
    const char *name;
    const check *list;
} lists[] = {{"rows", checks_of_rows},         {"pairs", checks_of_pairs},
             {"products", checks_of_products}, {"routers", checks_of_routers},
             {"updates", checks_of_updates},   {"arguments", checks_of_arguments},
             {"offsets", checks_of_offsets}};

static rig bench;
static uint64_t first_seed = 1, seeds = 2;

static void run(void **state) {
    const check *c = *state;
    for (uint64_t seed = first_seed; seed < first_seed + seeds; seed++)
        if (!rig_run(&bench, c, seed))
            fail_msg("%s, seed %llu: %s", c->name, (unsigned long long)seed, bench.message);
}

int main(int argc, char **argv) {
    const check *list = NULL;
    for (int i = 0; i < COUNT_OF(lists); i++)
        if (argc > 1 && strcmp(argv[1], lists[i].name) == 0)
            list = lists[i].list;
    if (!list) {
        fprintf(stderr, "usage: test_checks LIST [host|cuda [SEED]]\n");
        return 2;
    }
    const bool mma = argc > 2 && strcmp(argv[2], "cuda-mma") == 0;
    const bool cuda = mma || (argc > 2 && strcmp(argv[2], "cuda") == 0);
    if (argc > 3)
        first_seed = strtoull(argv[3], NULL, 10);
    const mz_kernels_options options = {
        .backend = cuda ? MZ_BACKEND_CUDA : MZ_BACKEND_HOST, .threads = 3, .streams = 2};
    char message[300];
    if (mz_kernels_open(&options, &bench.kernels, message, sizeof message) != MZ_K_OK) {
        fprintf(stderr, "test_checks: %s\n", message);
        return 4;
    }
    bench.small = cuda;
    if (cuda && list == checks_of_products) /* their wide layouts take long there */
        seeds = 1;
    bench.engine = mma ? MZ_ENGINE_OWN_MMA : MZ_ENGINE_OWN;
    struct CMUnitTest tests[32] = {{0}};
    size_t n = 0;
    for (; list[n].name && n < 32; n++) {
        void *state = (void *)(uintptr_t)&list[n];
        tests[n] = (struct CMUnitTest){list[n].name, run, NULL, NULL, state};
    }
    const int failed = _cmocka_run_group_tests(argv[1], tests, n, NULL, NULL);
    mz_kernels_close(&bench.kernels);
    return failed;
}
