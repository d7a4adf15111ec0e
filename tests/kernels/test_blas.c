/* Beside GSL, which brings a cblas of its own, products are OpenBLAS's: the reference BLAS takes
 * seventeen times as long and no message says so. */
#include "tests/harness.h"

#include "kernels/kernels.h"

#include <dlfcn.h>
#include <gsl/gsl_math.h>
#include <gsl/gsl_sf_gamma.h>

#include <cblas.h>

static void test_cblas_is_openblas(void **state) {
    (void)state;
    assert_true(fabs(gsl_sf_gamma(5) - 24) < 1e-9); /* GSL is in the program */
    union { /* a function's address as an object's, which POSIX allows */
        void *object;
        void (*function)(const enum CBLAS_ORDER, const enum CBLAS_TRANSPOSE,
                         const enum CBLAS_TRANSPOSE, const blasint, const blasint, const blasint,
                         const float, const float *, const blasint, const float *, const blasint,
                         const float, float *, const blasint);
    } address = {.function = cblas_sgemm};
    Dl_info where;
    assert_true(dladdr(dlsym(RTLD_DEFAULT, "cblas_sgemm"), &where) != 0);
    if (!strstr(where.dli_fname, "openblas"))
        fail_msg("cblas_sgemm comes from %s", where.dli_fname);
    assert_true(dladdr(address.object, &where) != 0);
}

static void test_kernels_product(void **state) {
    (void)state;
    const mz_kernels_options options = {.threads = 1, .streams = 1};
    mz_kernels *k;
    assert_int_equal(mz_kernels_open(&options, &k, NULL, 0), MZ_K_OK);
    float a[2] = {2, 3}, w[2] = {5, 7}, c = 0;
    const int64_t begin[2] = {0, 1};
    void *weight = w;
    const mz_product_args args = {
        .groups = {begin, 1, 1, NULL}, .n = 1, .k = 2, .a = a, .weight = &weight, .c = &c};
    void *workspace = malloc(mz_grouped_gemm_workspace(k, &args));
    assert_int_equal(mz_grouped_gemm(k, 0, &args, workspace), MZ_K_OK);
    free(workspace);
    assert_true(c == 31);
    mz_kernels_close(&k);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cblas_is_openblas),
                                       cmocka_unit_test(test_kernels_product)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
