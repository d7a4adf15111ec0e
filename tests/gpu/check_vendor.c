/* The vendor's grouped GEMM gives what the own one gives, which the other checks compare with
 * double precision. Passes on a device where the library is not there; the emulated one has a
 * stand-in. */
#include "tests/kernels/rig.h"

#include <math.h>

typedef struct vendor_case {
    mz_dtype type;
    int32_t groups;
    int64_t n, k, rows_each; /* at most, of a group; every third is empty */
} vendor_case;

/* More groups than one call takes, and sizes that fill no tile. */
static const vendor_case cases[] = {
    {MZ_BF16, 150, 16, 24, 4}, {MZ_F32, 7, 40, 72, 30}, {MZ_BF16, 5, 136, 264, 90}};

typedef struct result {
    mz_kstatus status;
    double *value; /* rows, or gradients one after the other */
} result;

static result product(rig *r, const vendor_case *c, const mz_product_args *common, bool vendor,
                      const double *weight) {
    mz_product_args args = *common;
    const bool wgrad = args.op == MZ_PRODUCT_WGRAD;
    const int64_t all = c->groups * c->n * c->k;
    const int64_t out = args.op == MZ_PRODUCT_FORWARD ? c->n : c->k;
    char *piece =
        wgrad && !args.accumulate ? rig_room(r, c->type, all) : rig_put(r, c->type, weight, all);
    void **pointer = rig_host(r, sizeof *pointer * (size_t)c->groups);
    for (int32_t g = 0; g < c->groups; g++)
        pointer[g] = piece + (size_t)(g * c->n * c->k) * rig_width(c->type);
    args.weight = rig_in(r, pointer, sizeof *pointer * (size_t)c->groups);
    if (!wgrad)
        args.c = rig_room(r, c->type, args.groups.rows_max * out);
    args.engine = vendor ? MZ_ENGINE_VENDOR : MZ_ENGINE_OWN;
    void *workspace = rig_workspace(r, mz_grouped_gemm_workspace(r->kernels, &args));
    const mz_kstatus status = mz_grouped_gemm(r->kernels, 0, &args, workspace);
    if (status != MZ_K_OK)
        return (result){status, NULL};
    return (result){status, rig_values(r, c->type, wgrad ? (void *)piece : args.c)};
}

static void compare(rig *r, const vendor_case *c, mz_product op) {
    int64_t *begin = rig_host(r, 8 * (size_t)(c->groups + 1));
    for (int32_t g = 0; g < c->groups; g++)
        begin[g + 1] = begin[g] + (g % 3 == 1 ? 0 : 1 + rig_below(r, c->rows_each));
    const int64_t rows = begin[c->groups], all = c->groups * c->n * c->k;
    const int64_t in = op == MZ_PRODUCT_FORWARD ? c->k : c->n;
    mz_product_args args = {
        .op = op,
        .groups = {rig_in(r, begin, 8 * (size_t)(c->groups + 1)), c->groups, rows, begin},
        .n = c->n,
        .k = c->k,
        .type = c->type,
        .gradient_type = c->type,
        .accumulate = op == MZ_PRODUCT_WGRAD && rig_below(r, 2),
        .a = rig_put(r, c->type, rig_normals(r, c->type, rows * in, 1), rows * in)};
    if (op == MZ_PRODUCT_WGRAD)
        args.c = rig_put(r, c->type, rig_normals(r, c->type, rows * c->k, 1), rows * c->k);
    const double *weight = rig_normals(r, c->type, all, 1);
    const result own = product(r, c, &args, false, weight);
    const result vendor = product(r, c, &args, true, weight);
    RIG_OK(r, own.status);
    if (vendor.status == MZ_K_EHARDWARE && !r->small)
        return;
    RIG_OK(r, vendor.status);
    const int64_t n = op == MZ_PRODUCT_WGRAD     ? all
                      : op == MZ_PRODUCT_FORWARD ? rows * c->n
                                                 : rows * c->k;
    rig_near(r, "vendor", vendor.value, own.value, n, c->type == MZ_BF16 ? 0x1p-7 : 1e-5, 1e-3);
}

static void check_vendor(rig *r) {
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++)
        for (int op = MZ_PRODUCT_FORWARD; op <= MZ_PRODUCT_WGRAD; op++) {
            compare(r, &cases[i], (mz_product)op);
            rig_clear(r);
        }
}

/* Whether cuBLAS takes bf16 operands with fp32 gradients is its business: where it does not, that
 * is a refusal, and the context goes on. */
static void check_refusal(rig *r) {
    enum { N = 16, ROWS = 4 };
    const double *x = rig_normals(r, MZ_BF16, ROWS * N, 1);
    const int64_t begin[] = {0, ROWS};
    float *gradient = rig_room(r, MZ_F32, N * N);
    void *const pointer[] = {gradient};
    mz_product_args args = {.op = MZ_PRODUCT_WGRAD,
                            .engine = MZ_ENGINE_VENDOR,
                            .groups = {rig_in(r, begin, sizeof begin), 1, ROWS, begin},
                            .n = N,
                            .k = N,
                            .type = MZ_BF16,
                            .a = rig_put(r, MZ_BF16, x, ROWS * N),
                            .weight = rig_in(r, pointer, sizeof pointer),
                            .c = rig_put(r, MZ_BF16, x, ROWS * N)};
    void *workspace = rig_workspace(r, mz_grouped_gemm_workspace(r->kernels, &args));
    const mz_kstatus status = mz_grouped_gemm(r->kernels, 0, &args, workspace);
    RIG_TRUE(r, r->small ? status == MZ_K_EINVAL : status != MZ_K_EFAILED);
    args.engine = MZ_ENGINE_OWN;
    RIG_OK(r, mz_grouped_gemm(r->kernels, 0, &args, workspace));
    double want[N * N] = {0};
    for (int i = 0; i < ROWS * N * N; i++)
        want[i % (N * N)] += x[i / (N * N) * N + i / N % N] * x[i / (N * N) * N + i % N];
    rig_near(r, "wgrad", rig_values(r, MZ_F32, gradient), want, N * N, 1e-5, 1e-5);
}

const check checks_of_vendor[] = {
    {"vendor's grouped GEMM", check_vendor}, {"refusal", check_refusal}, {NULL, NULL}};
