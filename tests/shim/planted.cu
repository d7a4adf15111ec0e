/* Kernels with and without mistakes for the test of the emulation itself. A barrier is left out
 * where LEAVE_OUT names it. */
#include "kernels/cuda/portable.h"
#include "tests/shim/planted.h"

/* Two barriers of one kernel, told apart so that a build can leave one out. */
#if LEAVE_OUT == 1
#define FIRST_BARRIER() (void)0
#else
#define FIRST_BARRIER() __syncthreads()
#endif
#if LEAVE_OUT == 2
#define SECOND_BARRIER() (void)0
#else
#define SECOND_BARRIER() __syncthreads()
#endif

enum { THREADS = 64 };

/* to[i] = the sum of the two neighbours' values, twice over shared memory. */
__global__ static void neighbours_kernel(const float *from, float *to, int rounds) {
    CU_SHARED(float, tile, [THREADS]);
    const int t = (int)threadIdx.x;
    float value = from[t];
    for (int r = 0; r < rounds; r++) {
        tile[t] = value;
        FIRST_BARRIER();
        value = tile[(t + 1) % THREADS] + tile[(t + THREADS - 1) % THREADS];
        SECOND_BARRIER();
    }
    to[t] = value;
}

extern "C" int planted_neighbours(const float *from, float *to, int rounds) {
    return CU_LAUNCH(neighbours_kernel, 1, THREADS, 0, NULL, from, to, rounds);
}

/* Threads of one block wait at different barriers. */
__global__ static void divergent_kernel(float *to) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        to[threadIdx.x] = 1;
        __syncthreads();
    }
}

extern "C" int planted_divergent(float *to) {
    return CU_LAUNCH(divergent_kernel, 1, THREADS, 0, NULL, to);
}

/* A mask that names lanes which never come. */
__global__ static void absent_kernel(float *to) {
    if (threadIdx.x < 16)
        to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, to[threadIdx.x], 1);
}

extern "C" int planted_absent(float *to) {
    return CU_LAUNCH(absent_kernel, 1, 32, 0, NULL, to);
}

/* Each thread copies 16 bytes through shared memory in the background, with or without waiting. */
__global__ static void copy_kernel(const float *from, float *to, bool wait) {
    CU_SHARED(alignas(16) float, tile, [4 * 32]);
    const int t = (int)threadIdx.x;
    cu_copy_async16(tile + 4 * t, from + 4 * t, t != 31);
    cu_copy_commit();
    if (wait)
        cu_copy_wait<0>();
    __syncthreads();
    for (int i = 0; i < 4; i++)
        to[4 * t + i] = tile[4 * t + i];
}

extern "C" int planted_copy(const float *from, float *to, bool wait) {
    return CU_LAUNCH(copy_kernel, 1, 32, 0, NULL, from, to, wait);
}

/* What ldmatrix gives each lane of four tiles of 8 x 8. */
__global__ static void matrices_kernel(const unsigned *from, unsigned *to, bool transposed) {
    CU_SHARED(alignas(16) unsigned, tile, [32 * 4]);
    const int t = (int)threadIdx.x;
    for (int i = 0; i < 4; i++)
        tile[4 * t + i] = from[4 * t + i];
    __syncthreads();
    unsigned r[4];
    if (transposed)
        cu_ldmatrix_x4_transposed(r, tile + 4 * t);
    else
        cu_ldmatrix_x4(r, tile + 4 * t);
    for (int i = 0; i < 4; i++)
        to[4 * t + i] = r[i];
}

extern "C" int planted_matrices(const unsigned *from, unsigned *to, bool transposed) {
    return CU_LAUNCH(matrices_kernel, 1, 32, 0, NULL, from, to, transposed);
}

/* One number of shared memory asked for and past its end. */
__global__ static void past_end_kernel(float *to) {
    CU_SHARED(float, tile, [32]);
    tile[threadIdx.x] = 1;
    __syncthreads();
    const float *from = tile; /* a pointer: the size is not known where it is read */
    to[threadIdx.x] = from[threadIdx.x + 1];
}

extern "C" int planted_past_end(float *to) {
    return CU_LAUNCH(past_end_kernel, 1, 32, 0, NULL, to);
}
