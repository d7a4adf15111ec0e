/* Device functions that the kernels share: rows in pieces of 16 bytes, sums over the threads of a
 * row, grids. C++ for nvcc and for the emulation. */
#ifndef MIZAN_KERNELS_CUDA_DEVICE_CUH
#define MIZAN_KERNELS_CUDA_DEVICE_CUH

#include "kernels/arithmetic.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/portable.h"

#define CU_FULL 0xffffffffu

enum { CU_BLOCK = 256, CU_WARPS = CU_BLOCK / 32 };

/* ---- storage types ------------------------------------------------------------------------------
 */
__device__ static inline float cu_widen(float x) {
    return x;
}
__device__ static inline float cu_widen(uint16_t x) {
    return mz_from_bf16(x);
}
__device__ static inline void cu_narrow(float *to, float x) {
    *to = x;
}
__device__ static inline void cu_narrow(uint16_t *to, float x) {
    *to = mz_to_bf16(x);
}

/* ---- pieces of a row ----------------------------------------------------------------------------
 * V values starting at `i` of a row of n, a thread's part at a time. `aligned`: the row starts at a
 * multiple of 16 bytes, so whole pieces move 16 bytes at once; the values and their order are the
 * same without. */
template <class T> struct cu_piece {
    static constexpr int values = 16 / (int)sizeof(T);
    alignas(16) T at[values];
};

template <class T>
__device__ static inline void cu_read(cu_piece<T> *piece, const T *row, int64_t i, int64_t n,
                                      bool aligned) {
    constexpr int V = cu_piece<T>::values;
    if (aligned && i + V <= n) {
        const uint4 whole = *reinterpret_cast<const uint4 *>(row + i);
        memcpy(piece->at, &whole, sizeof whole);
        return;
    }
#pragma unroll
    for (int j = 0; j < V; j++)
        piece->at[j] = i + j < n ? row[i + j] : (T)0;
}

template <class T>
__device__ static inline void cu_write(T *row, const cu_piece<T> *piece, int64_t i, int64_t n,
                                       bool aligned) {
    constexpr int V = cu_piece<T>::values;
    if (aligned && i + V <= n) {
        uint4 whole;
        memcpy(&whole, piece->at, sizeof whole);
        *reinterpret_cast<uint4 *>(row + i) = whole;
        return;
    }
#pragma unroll
    for (int j = 0; j < V; j++)
        if (i + j < n)
            row[i + j] = piece->at[j];
}

/* ---- threads of a row ---------------------------------------------------------------------------
 * A row is worked on by THREADS threads of a block of CU_BLOCK: one warp (several rows a block), or
 * the whole block. */
template <int THREADS> __device__ static inline int64_t cu_first_row() {
    return (int64_t)blockIdx.x * (CU_BLOCK / THREADS) + (int)threadIdx.x / THREADS;
}
template <int THREADS> __device__ static inline int64_t cu_row_step() {
    return (int64_t)gridDim.x * (CU_BLOCK / THREADS);
}

__device__ static inline float cu_warp_sum(float v) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2)
        v += __shfl_xor_sync(CU_FULL, v, apart);
    return v;
}

/* The sum over the threads of a row, in all of them; the tree is fixed. Threads of a block that
 * work on one row must all call it. */
template <int THREADS> __device__ static inline float cu_row_sum(float v) {
    v = cu_warp_sum(v);
    if (THREADS == 32)
        return v;
    CU_SHARED(float, part, [CU_WARPS]);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < CU_WARPS; w++)
        sum += part[w];
    __syncthreads();
    return sum;
}

/* ---- grids --------------------------------------------------------------------------------------
 */

/* Blocks for `items` of which a block takes `each`: two waves at most, kernels loop over the rest.
 */
static inline unsigned cu_blocks(const mz_cuda_device *d, int64_t items, int64_t each) {
    const int64_t wanted = (items + each - 1) / each, most = (int64_t)d->multiprocessors * 16;
    return (unsigned)(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

static inline bool cu_aligned(const void *p) {
    return (uintptr_t)p % 16 == 0;
}

#endif
