/* The CUDA backend: host glue in C (cuda.c), launchers in .cu files behind C functions. Internal to
 * kernels/cuda.
 *
 * A launcher takes the context's device facts, a stream, and arguments that kernels.c and cuda.c
 * have checked, launches, and returns a cudaError as int (0: enqueued; cudaErrorInvalidValue: more
 * than the hardware takes). It neither allocates nor waits. Grids are sized from host-side upper
 * bounds; row counts that only the device knows are read by the kernels. */
#ifndef MIZAN_KERNELS_CUDA_CUDA_H
#define MIZAN_KERNELS_CUDA_CUDA_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What launchers may know of the device. */
typedef struct mz_cuda_device {
    int32_t multiprocessors;
    int32_t capability;  /* 10 * major + minor: 80, 90 */
    int32_t shared_most; /* bytes of shared memory a block may ask for */
} mz_cuda_device;

/* rows.cu */
int mz_cuda_convert(const mz_cuda_device *d, void *stream, mz_dtype to_type, void *to,
                    mz_dtype from_type, const void *from, int64_t n);
int mz_cuda_row_norms(const mz_cuda_device *d, void *stream, const mz_norms *args);
int mz_cuda_row_dots(const mz_cuda_device *d, void *stream, const mz_dots *args);
int mz_cuda_pack_rows(const mz_cuda_device *d, void *stream, const mz_pack *args);
int mz_cuda_unpack_rows(const mz_cuda_device *d, void *stream, const mz_unpack *args);
int mz_cuda_combine_rows(const mz_cuda_device *d, void *stream, const mz_combine *args);
int mz_cuda_swiglu_forward(const mz_cuda_device *d, void *stream, const mz_swiglu *args);
int mz_cuda_swiglu_backward(const mz_cuda_device *d, void *stream, const mz_swiglu *args);
/* pairs.cu */
int mz_cuda_score_pairs(const mz_cuda_device *d, void *stream, const mz_score_args *args);
size_t mz_cuda_group_pairs_workspace(const mz_cuda_device *d, const mz_grouping *args);
int mz_cuda_group_pairs(const mz_cuda_device *d, void *stream, const mz_grouping *args,
                        void *workspace);
size_t mz_cuda_prefix_sums_workspace(const mz_cuda_device *d, int64_t n);
int mz_cuda_prefix_sums(const mz_cuda_device *d, void *stream, const int64_t *count, int64_t n,
                        int64_t *begin, void *workspace);
size_t mz_cuda_select_pairs_workspace(const mz_cuda_device *d, const mz_selection *args);
int mz_cuda_select_pairs(const mz_cuda_device *d, void *stream, const mz_selection *args,
                         void *workspace);
int mz_cuda_arrange(const mz_cuda_device *d, void *stream, const mz_segment *segment,
                    int64_t segments, const int64_t *in, int64_t *out);
int mz_cuda_invert(const mz_cuda_device *d, void *stream, const int64_t *row_pair, int64_t rows,
                   int64_t pairs, int64_t *position);
/* product.cu */
size_t mz_cuda_grouped_gemm_workspace(const mz_cuda_device *d, const mz_product_args *args);
int mz_cuda_grouped_gemm(const mz_cuda_device *d, void *stream, const mz_product_args *args,
                         void *workspace);
size_t mz_cuda_expert_up_workspace(const mz_cuda_device *d, const mz_expert_up *args);
int mz_cuda_expert_up(const mz_cuda_device *d, void *stream, const mz_expert_up *args,
                      void *workspace);
/* router.cu */
size_t mz_cuda_router_workspace(const mz_cuda_device *d, const mz_router *args);
int mz_cuda_router_forward(const mz_cuda_device *d, void *stream, const mz_router *args,
                           void *workspace);
int mz_cuda_router_backward(const mz_cuda_device *d, void *stream, const mz_router *args,
                            void *workspace);
int mz_cuda_router_losses(const mz_cuda_device *d, void *stream, const mz_router *args, float *loss,
                          void *workspace);
int mz_cuda_gate_norms(const mz_cuda_device *d, void *stream, mz_dtype type, const void *z,
                       int64_t tokens, int32_t experts, int64_t r, float *norm);
int mz_cuda_gate_norms_backward(const mz_cuda_device *d, void *stream, mz_dtype type, const void *z,
                                const float *norm, const float *dnorm, int64_t tokens,
                                int32_t experts, int64_t r, void *dz);
/* update.cu */
size_t mz_cuda_update_step_workspace(const mz_cuda_device *d, const mz_update *args);
int mz_cuda_update_step(const mz_cuda_device *d, void *stream, const mz_update *args,
                        void *workspace);

/* product.cu, for vendor.c: three arrays of pointers, first operands, second operands and results
 * as cuBLAS names them, of the groups that are not empty; zeroes gradients of those that are. */
int mz_cuda_vendor_pointers(void *stream, const mz_product_args *args, void *workspace);
/* cuda.c: MZ_K_OK, or the status that fits a cudaError, with its message: no memory, an argument
 * that was refused, or a device that is lost. */
mz_kstatus mz_cuda_check(mz_kernels *k, int error, const char *what);
/* vendor.c: cuBLAS, opened with dlopen the first time it is asked for. */
typedef struct mz_vendor mz_vendor;
mz_kstatus mz_vendor_open(mz_kernels *k, const char *library_dir, mz_vendor **vendor);
void mz_vendor_close(mz_vendor **vendor);
size_t mz_vendor_grouped_gemm_workspace(const mz_product_args *args);
mz_kstatus mz_vendor_grouped_gemm(mz_kernels *k, mz_vendor *vendor, void *stream,
                                  const mz_product_args *args, void *workspace);

#ifdef __cplusplus
}
#endif
#endif
