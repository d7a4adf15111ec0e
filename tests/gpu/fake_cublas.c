/* A stand-in for cuBLAS on the emulated device: the functions that vendor.c looks for, with plain
 * loops over column-major matrices in memory that is the host's. */
#include "kernels/arithmetic.h"

#include <stddef.h>

enum { BF16 = 14, FLOAT = 0, SUM_FLOAT = 68, DONE = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };

int cublasCreate_v2(void **handle);
int cublasDestroy_v2(void *handle);
int cublasSetStream_v2(void *handle, void *stream);
const char *cublasGetStatusString(int status);
int cublasGemmGroupedBatchedEx(void *handle, const int transpose_a[], const int transpose_b[],
                               const int m[], const int n[], const int k[], const void *alpha,
                               const void *const a[], int a_type, const int lda[],
                               const void *const b[], int b_type, const int ldb[], const void *beta,
                               void *const c[], int c_type, const int ldc[], int groups,
                               const int group_size[], int compute_type);

int cublasCreate_v2(void **handle) {
    static char there;
    *handle = &there;
    return DONE;
}
int cublasDestroy_v2(void *handle) {
    return handle ? DONE : INVALID_VALUE;
}
int cublasSetStream_v2(void *handle, void *stream) {
    (void)stream;
    return handle ? DONE : INVALID_VALUE;
}
const char *cublasGetStatusString(int status) {
    return status == NOT_SUPPORTED ? "not supported" : "an invalid value";
}

static float get(const void *matrix, int type, long long at) {
    return type == BF16 ? mz_from_bf16(((const uint16_t *)matrix)[at])
                        : ((const float *)matrix)[at];
}

/* Element (row, col) of a matrix as it is or transposed. */
static float element(const void *matrix, int type, int transposed, int ld, int row, int col) {
    return get(matrix, type, transposed ? col + (long long)row * ld : row + (long long)col * ld);
}

int cublasGemmGroupedBatchedEx(void *handle, const int transpose_a[], const int transpose_b[],
                               const int m[], const int n[], const int k[], const void *alpha,
                               const void *const a[], int a_type, const int lda[],
                               const void *const b[], int b_type, const int ldb[], const void *beta,
                               void *const c[], int c_type, const int ldc[], int groups,
                               const int group_size[], int compute_type) {
    if (!handle || compute_type != SUM_FLOAT || a_type != b_type)
        return INVALID_VALUE;
    if (a_type != c_type) /* as the library's table of types is remembered */
        return NOT_SUPPORTED;
    for (int g = 0; g < groups; g++) {
        if (group_size[g] != 1 || m[g] <= 0 || n[g] <= 0 || k[g] <= 0 || ldc[g] < m[g] ||
            lda[g] < (transpose_a[g] ? k[g] : m[g]) || ldb[g] < (transpose_b[g] ? n[g] : k[g]))
            return INVALID_VALUE;
        for (long long i = 0; i < (long long)m[g] * n[g]; i++) {
            const int row = (int)(i % m[g]), col = (int)(i / m[g]);
            const long long at = row + (long long)col * ldc[g];
            float sum = 0;
            for (int d = 0; d < k[g]; d++)
                sum += element(a[g], a_type, transpose_a[g], lda[g], row, d) *
                       element(b[g], b_type, transpose_b[g], ldb[g], d, col);
            const float factor = ((const float *)beta)[g];
            sum = ((const float *)alpha)[g] * sum +
                  (factor != 0 ? factor * get(c[g], c_type, at) : 0);
            if (c_type == BF16)
                ((uint16_t *)c[g])[at] = mz_to_bf16(sum);
            else
                ((float *)c[g])[at] = sum;
        }
    }
    return DONE;
}
