/* The vendor's grouped GEMM: cublasGemmGroupedBatchedEx, found with dlopen when it is first asked
 * for, so that a program that never asks needs no cuBLAS. The few declarations it needs are here,
 * with the numbers of cuBLAS's interface.
 *
 * cuBLAS is column-major: a row-major matrix is its transpose there, and a product's operands
 * change places. Sizes of groups come from begin_host; empty groups are left out of the call. */
#include "kernels/cuda/cuda.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

typedef int cublas_status; /* 0: done */
typedef struct cublasContext *cublas_handle;
enum {
    CUBLAS_NOT_INITIALIZED = 1,
    CUBLAS_ALLOC_FAILED = 3,
    CUBLAS_INVALID_VALUE = 7,
    CUBLAS_ARCH_MISMATCH = 8,
    CUBLAS_NOT_SUPPORTED = 15,
    CUBLAS_AS_IT_IS = 0,
    CUBLAS_TRANSPOSED = 1,
    CUBLAS_FLOAT = 0,
    CUBLAS_BF16 = 14,
    CUBLAS_SUM_FLOAT = 68
};

struct mz_vendor {
    void *library;
    cublas_handle handle;
    cublas_status (*create)(cublas_handle *handle);
    cublas_status (*destroy)(cublas_handle handle);
    cublas_status (*set_stream)(cublas_handle handle, void *stream);
    const char *(*status_string)(cublas_status status);
    cublas_status (*grouped)(cublas_handle handle, const int transpose_a[], const int transpose_b[],
                             const int m[], const int n[], const int k[], const void *alpha,
                             const void *const a[], int a_type, const int lda[],
                             const void *const b[], int b_type, const int ldb[], const void *beta,
                             void *const c[], int c_type, const int ldc[], int groups,
                             const int group_size[], int compute_type);
};

/* ---- finding the library ------------------------------------------------------------------------
 */

static const char *const library_names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};

static void *open_in(const char *dir) {
    void *library = NULL;
    for (int i = 0; i < 3 && !library; i++) {
        char path[640];
        const int length =
            snprintf(path, sizeof path, "%s%s%s", dir ? dir : "", dir ? "/" : "", library_names[i]);
        if (length > 0 && (size_t)length < sizeof path)
            library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return library;
}

/* POSIX lets a data pointer stand for a function here; C does not. */
static bool find_symbol(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    *(void **)function = symbol;
    return symbol != NULL;
}

static const char *missing_symbol(mz_vendor *v) {
    const struct {
        const char *name;
        void *function;
    } symbols[] = {{"cublasCreate_v2", &v->create},
                   {"cublasDestroy_v2", &v->destroy},
                   {"cublasSetStream_v2", &v->set_stream},
                   {"cublasGetStatusString", &v->status_string},
                   {"cublasGemmGroupedBatchedEx", &v->grouped}};
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
        if (!find_symbol(v->library, symbols[i].name, symbols[i].function))
            return symbols[i].name;
    return NULL;
}

/* A refusal says nothing about the device; what is left of it is unknown after any other error. */
static mz_kstatus check(mz_kernels *k, const mz_vendor *v, cublas_status status, const char *what) {
    if (status == 0)
        return MZ_K_OK;
    mz_kstatus code = MZ_K_EFAILED;
    if (status == CUBLAS_INVALID_VALUE || status == CUBLAS_NOT_SUPPORTED)
        code = MZ_K_EINVAL;
    else if (status == CUBLAS_NOT_INITIALIZED || status == CUBLAS_ARCH_MISMATCH)
        code = MZ_K_EHARDWARE;
    else if (status == CUBLAS_ALLOC_FAILED)
        code = MZ_K_ENOMEM;
    return mz_kernels_fail(k, code, "%s: cuBLAS status %d, %s", what, status,
                           v->status_string(status));
}

mz_kstatus mz_vendor_open(mz_kernels *k, const char *library_dir, mz_vendor **vendor) {
    mz_vendor *v = calloc(1, sizeof *v);
    if (!v)
        return mz_kernels_fail(k, MZ_K_ENOMEM, "no memory for cuBLAS");
    mz_kstatus status = MZ_K_OK;
    v->library = library_dir ? open_in(library_dir) : NULL;
    if (!v->library)
        v->library = open_in(NULL);
    const char *missing = v->library ? missing_symbol(v) : NULL;
    if (!v->library)
        status = mz_kernels_fail(k, MZ_K_EHARDWARE,
                                 "grouped_gemm: no %s, .12 or .so in %.150s%sthe loader's folders; "
                                 "name its folder as library_dir or use the own engine",
                                 library_names[0], library_dir ? library_dir : "",
                                 library_dir ? " or " : "");
    else if (missing)
        status = mz_kernels_fail(k, MZ_K_EHARDWARE,
                                 "grouped_gemm: this cuBLAS has no %s; 12.5 or later is needed",
                                 missing);
    else
        status = check(k, v, v->create(&v->handle), "grouped_gemm: opening cuBLAS");
    *vendor = v;
    if (status != MZ_K_OK)
        mz_vendor_close(vendor);
    return status;
}

void mz_vendor_close(mz_vendor **vendor) {
    mz_vendor *v = *vendor;
    if (!v)
        return;
    if (v->handle)
        v->destroy(v->handle);
    if (v->library)
        dlclose(v->library);
    free(v);
    *vendor = NULL;
}

/* ---- the product --------------------------------------------------------------------------------
 */

enum { CHUNK = 128 }; /* groups of one call to cuBLAS */

typedef struct shapes {
    int n;
    int transpose_a[CHUNK], transpose_b[CHUNK], m[CHUNK], cols[CHUNK], depth[CHUNK];
    int lda[CHUNK], ldb[CHUNK], ldc[CHUNK], size[CHUNK];
    float alpha[CHUNK], beta[CHUNK];
} shapes;

/* forward: c^T = w a^T; dgrad: c^T = w^T a^T; wgrad: w^T = c^T a, each seen by columns. */
static void add_shape(shapes *s, const mz_product_args *args, int rows) {
    const int i = s->n++, n = (int)args->n, k = (int)args->k;
    const bool forward = args->op == MZ_PRODUCT_FORWARD, wgrad = args->op == MZ_PRODUCT_WGRAD;
    s->transpose_a[i] = forward ? CUBLAS_TRANSPOSED : CUBLAS_AS_IT_IS;
    s->transpose_b[i] = wgrad ? CUBLAS_TRANSPOSED : CUBLAS_AS_IT_IS;
    s->m[i] = forward ? n : k;
    s->cols[i] = wgrad ? n : rows;
    s->depth[i] = forward ? k : wgrad ? rows : n;
    s->lda[i] = k;
    s->ldb[i] = forward ? k : n;
    s->ldc[i] = forward ? n : k;
    s->size[i] = 1;
    s->alpha[i] = 1;
    s->beta[i] = args->accumulate ? 1 : 0;
}

/* Pointers `first`.. of the workspace's three arrays. */
static mz_kstatus multiply(mz_kernels *k, const mz_vendor *v, const mz_product_args *args,
                           const shapes *s, void *workspace, int64_t first) {
    const int64_t groups = args->groups.groups;
    const void **a = (const void **)workspace + first, **b = a + groups;
    void **c = (void **)workspace + 2 * groups + first;
    const int type = args->type == MZ_BF16 ? CUBLAS_BF16 : CUBLAS_FLOAT;
    const mz_dtype out = args->op == MZ_PRODUCT_WGRAD ? args->gradient_type : args->type;
    if (s->n == 0)
        return MZ_K_OK;
    return check(k, v,
                 v->grouped(v->handle, s->transpose_a, s->transpose_b, s->m, s->cols, s->depth,
                            s->alpha, a, type, s->lda, b, type, s->ldb, s->beta, c,
                            out == MZ_BF16 ? CUBLAS_BF16 : CUBLAS_FLOAT, s->ldc, s->n, s->size,
                            CUBLAS_SUM_FLOAT),
                 "grouped_gemm");
}

size_t mz_vendor_grouped_gemm_workspace(const mz_product_args *args) {
    return 3 * sizeof(void *) * (size_t)args->groups.groups;
}

mz_kstatus mz_vendor_grouped_gemm(mz_kernels *k, mz_vendor *vendor, void *stream,
                                  const mz_product_args *args, void *workspace) {
    const int64_t *begin = args->groups.begin_host;
    if (args->n > INT_MAX || args->k > INT_MAX || args->groups.rows_max > INT_MAX)
        return mz_kernels_fail(k, MZ_K_EINVAL, "grouped_gemm: cuBLAS counts in 32 bits");
    mz_kstatus status =
        mz_cuda_check(k, mz_cuda_vendor_pointers(stream, args, workspace), "grouped_gemm");
    if (status == MZ_K_OK)
        status = check(k, vendor, vendor->set_stream(vendor->handle, stream), "stream");
    shapes s = {.n = 0};
    int64_t first = 0;
    for (int32_t g = 0; g < args->groups.groups && status == MZ_K_OK; g++) {
        if (begin[g + 1] > begin[g])
            add_shape(&s, args, (int)(begin[g + 1] - begin[g]));
        if (s.n == CHUNK) {
            status = multiply(k, vendor, args, &s, workspace, first);
            first += CHUNK;
            s.n = 0;
        }
    }
    return status == MZ_K_OK ? multiply(k, vendor, args, &s, workspace, first) : status;
}
