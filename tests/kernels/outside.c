/* A program that knows the installed library alone: packs two rows, multiplies them with one
 * expert. */
#include <mizan/kernels.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void) {
    struct mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .threads = 2, .streams = 1};
    mz_kernels *k;
    char why[200];

    if (mz_kernels_open(&options, &k, why, sizeof why)) {
        fprintf(stderr, "outside: %s\n", why);
        return 1;
    }
    float x[3][2] = {{1, 2}, {3, 4}, {5, 6}}, rows[2][2], out[2][3];
    float w[3][2] = {{1, 0}, {0, 1}, {10, 100}};
    int64_t pair[2] = {2, 0}, begin[2] = {0, 2};
    void *weight[1] = {w};
    mz_pack pack = {
        .type = MZ_F32, .x = x, .hidden = 2, .rows = 2, .row_pair = pair, .k = 1, .out = rows};
    mz_product_args product = {.op = MZ_PRODUCT_FORWARD,
                               .groups = {begin, 1, 2, NULL},
                               .n = 3,
                               .k = 2,
                               .a = rows,
                               .weight = weight,
                               .c = out};
    const float want[2][3] = {{5, 6, 650}, {1, 2, 210}};

    void *workspace = malloc(mz_grouped_gemm_workspace(k, &product));
    if (mz_pack_rows(k, 0, &pack) || mz_grouped_gemm(k, 0, &product, workspace)) {
        fprintf(stderr, "outside: %s\n", mz_kernels_error(k));
        return 1;
    }
    product.n = -1;
    int refused = mz_grouped_gemm(k, 0, &product, workspace);
    printf("%s; refused: %s\n", mz_kernels_describe(k), mz_kernels_error(k));
    free(workspace);
    mz_kernels_close(&k);
    return memcmp(out, want, sizeof want) != 0 || refused != MZ_K_EINVAL;
}
