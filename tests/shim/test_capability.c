/* Which grouped GEMM the default engine takes on devices of each compute capability, and that its
 * results are right there. The emulated device has wgmma on 9.0 alone, and each one's shared
 * memory. */
#include "tests/harness.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/rig.h"
#include "tests/shim/cuda_runtime_api.h"

#include <math.h>

enum { GROUPS = 2, N = 144, K = 72 };

/* bf16 operands of all four products, at first the same for each. */
typedef struct problem {
    mz_groups groups;
    int64_t begin[GROUPS + 1];
    double *x, *y, *weight; /* [rows][K], [rows][N], [GROUPS][N][K] */
    void *given[GROUPS];
} problem;

static problem make_problem(rig *r, const int64_t rows[GROUPS]) {
    problem p = {.begin = {0, rows[0], rows[0] + rows[1]}};
    p.x = rig_normals(r, MZ_BF16, p.begin[GROUPS] * K, 1);
    p.y = rig_normals(r, MZ_BF16, p.begin[GROUPS] * N, 1);
    p.weight = rig_normals(r, MZ_BF16, GROUPS * N * K, 0.3);
    for (int g = 0; g < GROUPS; g++)
        p.given[g] = rig_put(r, MZ_BF16, p.weight + g * N * K, N * K);
    p.groups = (mz_groups){
        .begin = rig_in(r, p.begin, sizeof p.begin), .groups = GROUPS, .rows_max = p.begin[GROUPS]};
    return p;
}

/* The products' sums run over at most 165 terms, then one rounding to bf16. */
static void compare(rig *r, const char *what, const void *got, const double *want, int64_t n) {
    rig_near(r, what, rig_values(r, MZ_BF16, got), want, n, 0x1p-8, 1e-4);
}

static void multiply(rig *r, problem *p, mz_product op, void *a, void *c) {
    const mz_product_args args = {.op = op,
                                  .engine = r->engine,
                                  .groups = p->groups,
                                  .n = N,
                                  .k = K,
                                  .type = MZ_BF16,
                                  .gradient_type = MZ_BF16,
                                  .a = a,
                                  .weight = rig_in(r, p->given, sizeof p->given),
                                  .c = c};
    RIG_OK(r, mz_grouped_gemm(r->kernels, 0, &args, NULL));
}

typedef void (*reference)(int64_t m, int64_t n, int64_t k, const double *a, const double *w,
                          double *c);

static void rows_of(rig *r, problem *p, mz_product op, reference ref) {
    const bool forward = op == MZ_PRODUCT_FORWARD;
    const int64_t in = forward ? K : N, out = forward ? N : K, rows = p->begin[GROUPS];
    const double *a = forward ? p->x : p->y;
    double *want = rig_host(r, 8 * (size_t)(rows * out));
    void *c = rig_room(r, MZ_BF16, rows * out);
    multiply(r, p, op, rig_put(r, MZ_BF16, a, rows * in), c);
    for (int g = 0; g < GROUPS; g++)
        ref(p->begin[g + 1] - p->begin[g], N, K, a + p->begin[g] * in, p->weight + g * N * K,
            want + p->begin[g] * out);
    compare(r, forward ? "forward" : "dgrad", c, want, rows * out);
}

static void forward(rig *r, problem *p) {
    rows_of(r, p, MZ_PRODUCT_FORWARD, ref_forward);
}

static void dgrad(rig *r, problem *p) {
    rows_of(r, p, MZ_PRODUCT_DGRAD, ref_dgrad);
}

static void wgrad(rig *r, problem *p) {
    const int64_t rows = p->begin[GROUPS];
    multiply(r, p, MZ_PRODUCT_WGRAD, rig_put(r, MZ_BF16, p->y, rows * N),
             rig_put(r, MZ_BF16, p->x, rows * K));
    for (int g = 0; g < GROUPS; g++) {
        double *want = rig_host(r, 8 * N * K);
        ref_wgrad(p->begin[g + 1] - p->begin[g], N, K, p->y + p->begin[g] * N,
                  p->x + p->begin[g] * K, want);
        compare(r, "wgrad", p->given[g], want, N * K);
    }
}

/* u and v are kept; h is compared with what follows from those. */
static void up(rig *r, problem *p) {
    const int64_t rows = p->begin[GROUPS], half = N / 2;
    const mz_expert_up args = {.groups = p->groups,
                               .hidden = K,
                               .intermediate = half,
                               .type = MZ_BF16,
                               .x = rig_put(r, MZ_BF16, p->x, rows * K),
                               .weight = rig_in(r, p->given, sizeof p->given),
                               .gate_up = rig_room(r, MZ_BF16, rows * N),
                               .h = rig_room(r, MZ_BF16, rows * half),
                               .engine = r->engine};
    RIG_OK(r, mz_expert_up_forward(r->kernels, 0, &args, NULL));
    double *want = rig_host(r, 8 * (size_t)(rows * N));
    for (int g = 0; g < GROUPS; g++)
        ref_forward(p->begin[g + 1] - p->begin[g], N, K, p->x + p->begin[g] * K,
                    p->weight + g * N * K, want + p->begin[g] * N);
    compare(r, "gate, up", args.gate_up, want, rows * N);
    const double *h = rig_values(r, MZ_BF16, args.h);
    for (int64_t i = 0; i < rows * half; i++) {
        const double u = want[i / half * N + i % half], v = want[i / half * N + half + i % half];
        /* u and v may have been rounded before the activation, whose slope is at most 1.1. */
        const double bound = 0x1p-8 * (2 * fabs(ref_silu(u) * v) + 1.1 * fabs(u * v));
        RIG_TRUE(r, fabs(h[i] - ref_silu(u) * v) <= bound + 1e-4 * (2 + fabs(u) + fabs(v)));
    }
}

/* Each product: right, and with wgmma or without. Tiles of few lines, then of many. */
static void check_products(rig *r) {
    void (*const products[])(rig *, problem *) = {forward, dgrad, wgrad, up};
    const int64_t rows[][GROUPS] = {{70, 3}, {90, 75}};
    const bool wgmma =
        strstr(mz_kernels_describe(r->kernels), "sm_90") && r->engine == MZ_ENGINE_OWN;
    for (int i = 0; i < COUNT_OF(rows) * COUNT_OF(products); i++) {
        problem p = make_problem(r, rows[i % 2]);
        const size_t before = cuemu_wgmmas();
        products[i / 2](r, &p);
        RIG_TRUE(r, (cuemu_wgmmas() > before) == wgmma);
        rig_clear(r);
    }
}

static void run_on(const char *capability, mz_product_engine engine) {
    const check all = {"products", check_products};
    const mz_kernels_options options = {.backend = MZ_BACKEND_CUDA, .streams = 1};
    rig r = {.small = true, .engine = engine};
    char message[300], model[16];
    setenv("CUEMU_CAPABILITY", capability, 1);
    if (mz_kernels_open(&options, &r.kernels, message, sizeof message) != MZ_K_OK)
        fail_msg("capability %s: %s", capability, message);
    snprintf(model, sizeof model, "sm_%s,", capability);
    assert_non_null(strstr(mz_kernels_describe(r.kernels), model));
    /* Tiles of wgmma are twice as wide. */
    const int32_t width = strcmp(capability, "90") == 0 ? 256 : 128;
    assert_int_equal(mz_kernels_tiles(r.kernels, MZ_PRODUCT_FORWARD).n, width);
    assert_int_equal(mz_kernels_tiles(r.kernels, MZ_PRODUCT_DGRAD).k, width);
    assert_int_equal(mz_kernels_tiles(r.kernels, MZ_PRODUCT_WGRAD).k, width);
    const bool passed = rig_run(&r, &all, 1);
    mz_kernels_close(&r.kernels);
    if (!passed)
        fail_msg("capability %s: %s", capability, r.message);
}

static void default_engine(void **state) {
    const char *capabilities[] = {"80", "89", "90", "100"};
    for (int i = 0; i < COUNT_OF(capabilities); i++)
        run_on(capabilities[i], MZ_ENGINE_OWN);
}

static void mma_where_it_is_asked_for(void **state) {
    run_on("90", MZ_ENGINE_OWN_MMA);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(default_engine),
                                       cmocka_unit_test(mma_where_it_is_asked_for)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
