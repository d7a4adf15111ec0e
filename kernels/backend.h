/* What a backend implements: one function per operation of kernels.h, called with arguments that
 * kernels.c has checked. Internal to kernels/. */
#ifndef MIZAN_KERNELS_BACKEND_H
#define MIZAN_KERNELS_BACKEND_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MZ_KERNEL_MARKS = 64, MZ_KERNEL_STREAMS_MAX = 16, MZ_KERNEL_THREADS_MAX = 1024 };

/* Operations that return a status set the context's message with mz_kernels_fail. Sizes are not
 * negative, pointers that must be there are, streams and dtypes are in range; rows of 0 and groups
 * of 0 reach the backend and must work. Workspace sizes may be 0. */
typedef struct mz_backend_ops {
    const char *name;
    mz_kstatus (*open)(mz_kernels *k, const mz_kernels_options *options);
    void (*close)(mz_kernels *k);
    mz_kstatus (*bind)(mz_kernels *k); /* before each of what follows; NULL: nothing to choose */
    void *(*native_stream)(const mz_kernels *k, mz_kstream stream); /* NULL: streams are numbers */
    mz_kstatus (*alloc)(mz_kernels *k, size_t bytes, void **memory);
    void (*free)(mz_kernels *k, void *memory);
    mz_kstatus (*memory)(mz_kernels *k, size_t *all, size_t *available);
    mz_kstatus (*copy)(mz_kernels *k, mz_kstream stream, mz_copy kind, void *to, const void *from,
                       size_t bytes);
    mz_kstatus (*zero)(mz_kernels *k, mz_kstream stream, void *memory, size_t bytes);
    mz_kstatus (*sync)(mz_kernels *k, mz_kstream stream);
    mz_kstatus (*wait)(mz_kernels *k, mz_kstream waiter, mz_kstream stream);
    mz_kstatus (*mark)(mz_kernels *k, mz_kstream stream, int32_t slot);
    mz_kstatus (*elapsed)(mz_kernels *k, int32_t from_slot, int32_t to_slot, double *seconds);
    mz_kstatus (*convert)(mz_kernels *k, mz_kstream stream, mz_dtype to_type, void *to,
                          mz_dtype from_type, const void *from, int64_t n);
    mz_kstatus (*row_norms)(mz_kernels *k, mz_kstream stream, const mz_norms *args);
    mz_kstatus (*row_dots)(mz_kernels *k, mz_kstream stream, const mz_dots *args);
    mz_kstatus (*score_pairs)(mz_kernels *k, mz_kstream stream, const mz_score_args *args);
    size_t (*group_pairs_workspace)(const mz_kernels *k, const mz_grouping *args);
    mz_kstatus (*group_pairs)(mz_kernels *k, mz_kstream stream, const mz_grouping *args,
                              void *workspace);
    size_t (*prefix_sums_workspace)(const mz_kernels *k, int64_t n);
    mz_kstatus (*prefix_sums)(mz_kernels *k, mz_kstream stream, const int64_t *count, int64_t n,
                              int64_t *begin, void *workspace);
    size_t (*select_workspace)(const mz_kernels *k, const mz_selection *args);
    mz_kstatus (*select_pairs)(mz_kernels *k, mz_kstream stream, const mz_selection *args,
                               void *workspace);
    mz_kstatus (*arrange)(mz_kernels *k, mz_kstream stream, const mz_segment *segment,
                          int64_t segments, const int64_t *in, int64_t *out);
    mz_kstatus (*invert)(mz_kernels *k, mz_kstream stream, const int64_t *row_pair, int64_t rows,
                         int64_t pairs, int64_t *position);
    mz_kstatus (*pack_rows)(mz_kernels *k, mz_kstream stream, const mz_pack *args);
    mz_kstatus (*unpack_rows)(mz_kernels *k, mz_kstream stream, const mz_unpack *args);
    mz_kstatus (*combine_rows)(mz_kernels *k, mz_kstream stream, const mz_combine *args);
    mz_product_tiles (*tiles)(const mz_kernels *k, mz_product op);
    mz_product_tiles (*up_tiles)(const mz_kernels *k, int64_t intermediate);
    size_t (*grouped_gemm_workspace)(const mz_kernels *k, const mz_product_args *args);
    mz_kstatus (*grouped_gemm)(mz_kernels *k, mz_kstream stream, const mz_product_args *args,
                               void *workspace);
    size_t (*expert_up_workspace)(const mz_kernels *k, const mz_expert_up *args);
    mz_kstatus (*expert_up_forward)(mz_kernels *k, mz_kstream stream, const mz_expert_up *args,
                                    void *workspace);
    mz_kstatus (*swiglu_forward)(mz_kernels *k, mz_kstream stream, const mz_swiglu *args);
    mz_kstatus (*swiglu_backward)(mz_kernels *k, mz_kstream stream, const mz_swiglu *args);
    size_t (*router_workspace)(const mz_kernels *k, const mz_router *args);
    mz_kstatus (*router_forward)(mz_kernels *k, mz_kstream stream, const mz_router *args,
                                 void *workspace);
    mz_kstatus (*router_backward)(mz_kernels *k, mz_kstream stream, const mz_router *args,
                                  void *workspace);
    mz_kstatus (*router_losses)(mz_kernels *k, mz_kstream stream, const mz_router *args,
                                float *loss, void *workspace);
    mz_kstatus (*gate_norms)(mz_kernels *k, mz_kstream stream, mz_dtype type, const void *z,
                             int64_t tokens, int32_t experts, int64_t r, float *norm);
    mz_kstatus (*gate_norms_backward)(mz_kernels *k, mz_kstream stream, mz_dtype type,
                                      const void *z, const float *norm, const float *dnorm,
                                      int64_t tokens, int32_t experts, int64_t r, void *dz);
    size_t (*update_workspace)(const mz_kernels *k, const mz_update *args);
    mz_kstatus (*update_step)(mz_kernels *k, mz_kstream stream, const mz_update *args,
                              void *workspace);
} mz_backend_ops;

struct mz_kernels {
    const mz_backend_ops *ops;
    mz_backend backend;
    int32_t streams;
    bool failed; /* MZ_K_EFAILED was returned: only closing is left */
    void *self;  /* of the backend */
    char describe[160];
    char error[320];
    mz_kstatus failure; /* what error tells */
};

/* Sets the context's message, one line, and returns `status`. */
mz_kstatus mz_kernels_fail(mz_kernels *k, mz_kstatus status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

extern const mz_backend_ops mz_host_ops;
/* NULL in a build without the CUDA sources. */
const mz_backend_ops *mz_cuda_ops(void);

#ifdef __cplusplus
}
#endif
#endif
