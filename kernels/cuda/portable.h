/* One spelling for nvcc and for the emulation of the tests (tests/shim): kernels touch CUDA only
 * through this header and the names that both know. C++.
 *
 *   CU_SHARED(float, tile, [32][33]);      static shared array
 *   CU_DYN_SHARED(float, buffer);          dynamic shared memory, 16-byte aligned
 *   CU_LAUNCH(kernel, grid, block, bytes, stream, args...)   0, or a cudaError
 *   cu_allow_shared(kernel, bytes)         more than 48 KiB of dynamic shared memory; 0 or an error
 *   cu_mma_m16n8k16_bf16, cu_copy_async16, cu_copy_commit, cu_copy_wait<n>, cu_ldmatrix_x4 */
#ifndef MIZAN_KERNELS_CUDA_PORTABLE_H
#define MIZAN_KERNELS_CUDA_PORTABLE_H

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#define CU_SHARED(T, name, dims) __shared__ T name dims
#define CU_DYN_SHARED(T, name)                                                                     \
    extern __shared__ __align__(16) unsigned char cu_dynamic_[];                                   \
    T *name = reinterpret_cast<T *>(cu_dynamic_)
/* It would take the brackets of a launch apart. */
/* clang-format off */
#define CU_LAUNCH(kernel, grid, block, bytes, stream, ...)                                         \
    ((kernel)<<<(grid), (block), (bytes), (cudaStream_t)(stream)>>>(__VA_ARGS__),                  \
     (int)cudaGetLastError())
/* clang-format on */

template <class Kernel> static inline int cu_allow_shared(Kernel kernel, int bytes) {
    return (int)cudaFuncSetAttribute((const void *)kernel,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

/* d (fp32, 16 x 8) += a (bf16, 16 x 16, row) b (bf16, 16 x 8, col); fragments as PTX's manual has
 * them. */
__device__ static inline void cu_mma_m16n8k16_bf16(float d[4], const unsigned a[4],
                                                   const unsigned b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* 16 bytes from global to shared memory, in the background; `valid` false writes zeros. */
__device__ static inline void cu_copy_async16(void *shared, const void *global, bool valid) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(bytes));
}
__device__ static inline void cu_copy_commit() {
    asm volatile("cp.async.commit_group;" ::);
}
/* Waits until at most n of this thread's groups are outstanding. */
template <int n> __device__ static inline void cu_copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n));
}

/* Four 8 x 8 tiles of 2-byte values; lane l gives the address of row l % 8 of tile l / 8. */
__device__ static inline void cu_ldmatrix_x4(unsigned r[4], const void *row) {
    const unsigned from = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
__device__ static inline void cu_ldmatrix_x4_transposed(unsigned r[4], const void *row) {
    const unsigned from = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
#else
#include <cuemu.h> /* of the build that emulates */
#endif

#endif
