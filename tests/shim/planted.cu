/* Kernels with and without mistakes for the test of the emulation itself. A barrier is left out
 * where LEAVE_OUT names it. */
#include "kernels/cuda/portable.h"
#include "kernels/cuda/warpgroup.cuh"
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
    return CU_LAUNCH(neighbours_kernel, 1, THREADS, 0, cudaStreamLegacy, from, to, rounds);
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
    return CU_LAUNCH(divergent_kernel, 1, THREADS, 0, cudaStreamLegacy, to);
}

/* Blocks that count themselves, atomically or not. */
__global__ static void blocks_kernel(unsigned *to, bool atomic) {
    if (threadIdx.x > 0)
        return;
    if (atomic)
        atomicAdd(to, 1u);
    else
        *to += 1;
}

extern "C" int planted_blocks(unsigned *to, int blocks, bool atomic) {
    return CU_LAUNCH(blocks_kernel, (unsigned)blocks, 32, 0, cudaStreamLegacy, to, atomic);
}

/* Launched on a stream, or on the default one. */
__global__ static void write_kernel(float *to) {
    to[threadIdx.x] = 1;
}

extern "C" int planted_write(float *to, bool default_stream) {
    return CU_LAUNCH(write_kernel, 1, 32, 0, default_stream ? NULL : cudaStreamLegacy, to);
}

/* A mask that names lanes which never come. */
__global__ static void absent_kernel(float *to) {
    if (threadIdx.x < 16)
        to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, to[threadIdx.x], 1);
}

extern "C" int planted_absent(float *to) {
    return CU_LAUNCH(absent_kernel, 1, 32, 0, cudaStreamLegacy, to);
}

/* Each thread copies 16 bytes through shared memory in the background, with or without waiting. */
__global__ static void copy_kernel(const float *from, float *to, bool wait) {
    CU_SHARED(float4, pieces, [32]);
    float *tile = reinterpret_cast<float *>(pieces);
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
    return CU_LAUNCH(copy_kernel, 1, 32, 0, cudaStreamLegacy, from, to, wait);
}

/* What ldmatrix gives each lane of four tiles of 8 x 8. */
__global__ static void matrices_kernel(const unsigned *from, unsigned *to, bool transposed) {
    CU_SHARED(uint4, pieces, [32]);
    unsigned *tile = reinterpret_cast<unsigned *>(pieces);
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
    return CU_LAUNCH(matrices_kernel, 1, 32, 0, cudaStreamLegacy, from, to, transposed);
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
    return CU_LAUNCH(past_end_kernel, 1, 32, 0, cudaStreamLegacy, to);
}

/* ---- a pipeline of copies and products of a warpgroup -------------------------------------------
 */

enum : int { ROW = 128, SLOT = (PLANTED_LINES + PLANTED_COLS) * ROW, GROUP = 128 };

/* Rows of 64 values of `from` into the slot, chunk by chunk. */
__device__ static void fill(char *slot, const unsigned short *from, int rows, bool swizzled) {
    for (int i = (int)threadIdx.x; i < rows * 8; i += GROUP) {
        const int row = i / 8, chunk = i % 8;
        cu_copy_async16(slot + row * ROW + (swizzled ? chunk ^ (row & 7) : chunk) * 16,
                        from + row * PLANTED_DEPTH + chunk * 8, true);
    }
}

__device__ static void produce(char *slot, uint64_t *full, uint64_t *empty, const unsigned short *a,
                               const unsigned short *b, planted_mistake mistake) {
    for (int round = 0; round < PLANTED_ROUNDS; round++) {
        if (mistake != NO_EMPTY_WAIT)
            cu_barrier_wait(empty, (unsigned)(round + 1) % 2);
        fill(slot, a + round * PLANTED_LINES * PLANTED_DEPTH, PLANTED_LINES, mistake != NO_SWIZZLE);
        fill(slot + PLANTED_LINES * ROW, b + round * PLANTED_COLS * PLANTED_DEPTH, PLANTED_COLS,
             mistake != NO_SWIZZLE);
        if (mistake != MISSING_ARRIVAL || threadIdx.x > 0)
            cu_barrier_arrive_copied(full);
    }
}

__device__ static void multiply(float (&sum)[PLANTED_COLS / 8][4], unsigned start,
                                planted_mistake mistake) {
    const uint64_t stride = mistake == WRONG_STRIDE ? 4 * ROW / 16 : 8 * ROW / 16;
    const uint64_t high = stride << 32 | (uint64_t)1 << 62;
    const uint64_t second = mistake == WARPS_DIFFER && threadIdx.x / 32 == 5 ? 2 : 0;
    for (uint64_t i = 0; i < PLANTED_DEPTH / 16; i++)
        cu_wgmma<false, false>(sum, high | (start / 16 + 2 * i + second),
                               high | (start / 16 + PLANTED_LINES * ROW / 16 + 2 * i));
    if (mistake != NO_COMMIT)
        cu_wgmma_commit();
}

__device__ static void consume(unsigned start, uint64_t *full, uint64_t *empty, float *to,
                               planted_mistake mistake) {
    float sum[PLANTED_COLS / 8][4] = {};
    float early = 0;
    for (int round = 0; round < PLANTED_ROUNDS; round++) {
        if (mistake != NO_FULL_WAIT)
            cu_barrier_wait(full, (unsigned)round % 2);
        if (mistake != NO_PROXY_FENCE)
            cu_fence_async_proxy();
        if (mistake != NO_WGMMA_FENCE)
            cu_wgmma_fence();
        multiply(sum, start, mistake);
        if (mistake == EARLY_RELEASE && threadIdx.x % 32 == 0)
            cu_barrier_arrive(empty);
        if (mistake == EARLY_RELEASE)
            cu_barrier_wait(full, (unsigned)(round + 1) % 2);
        if (mistake == EARLY_READ)
            early += sum[0][0];
        if (mistake == EARLY_WRITE)
            sum[0][0] = 0;
        cu_wgmma_finish(sum);
        if (mistake != EARLY_RELEASE && threadIdx.x % 32 == 0)
            cu_barrier_arrive(empty);
    }
    const int line = (int)threadIdx.x % GROUP / 32 * 16 + (int)threadIdx.x % 32 / 4;
    for (int j = 0; j < PLANTED_COLS / 8; j++)
        for (int i = 0; i < 4; i++)
            to[(line + i / 2 * 8) * PLANTED_COLS + 8 * j + (int)threadIdx.x % 4 * 2 + i % 2] =
                sum[j][i] + (mistake == EARLY_READ ? early : 0);
}

__global__ static void product_kernel(const unsigned short *a, const unsigned short *b, float *to,
                                      planted_mistake mistake) {
    CU_SHARED(uint64_t, barrier, [2]);
    CU_DYN_SHARED(char, shared);
    char *slot =
        shared +
        (mistake == MISALIGNED_SLOT ? 16 : (1024 - cu_shared_address(shared) % 1024) % 1024);
    if (threadIdx.x == 0) {
        cu_barrier_init(&barrier[0], GROUP);
        cu_barrier_init(&barrier[1], GROUP / 32);
    }
    if (mistake != NO_SYNC_OF_BARRIERS)
        __syncthreads();
    if (threadIdx.x < GROUP) {
        if (mistake != TOO_MANY_REGISTERS)
            cu_fewer_registers<40>();
        produce(slot, &barrier[0], &barrier[1], a, b, mistake);
    } else {
        cu_more_registers<256>();
        consume(cu_shared_address(slot), &barrier[0], &barrier[1], to, mistake);
    }
}

extern "C" int planted_product(const unsigned short *a, const unsigned short *b, float *to,
                               planted_mistake mistake) {
    return CU_LAUNCH(product_kernel, 1, 2 * GROUP, SLOT + 1024, cudaStreamLegacy, a, b, to,
                     mistake);
}
