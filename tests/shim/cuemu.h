/* CUDA's names for kernels compiled as C++ for the CPU; the twin of what kernels/cuda/portable.h
 * has for nvcc. */
#ifndef MIZAN_TESTS_SHIM_CUEMU_H
#define MIZAN_TESTS_SHIM_CUEMU_H

#include "emulator.h"
#include "warp.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) alignas(n)
#define warpSize 32

/* ---- vector types, aligned as on the device -----------------------------------------------------
 */
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) {
    return float2{x, y};
}
static inline float4 make_float4(float x, float y, float z, float w) {
    return float4{x, y, z, w};
}
static inline uint2 make_uint2(unsigned x, unsigned y) {
    return uint2{x, y};
}
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return uint4{x, y, z, w};
}

/* ---- indices, barriers, shared memory, launches -------------------------------------------------
 */
#define threadIdx (::cuemu::current->thread)
#define blockIdx (::cuemu::block_index)
#define blockDim (::cuemu::block_dim)
#define gridDim (::cuemu::grid_dim)

/* The place in the source: copies that the compiler makes of a barrier compare equal. */
#define CUEMU_TEXT_(x) #x
#define CUEMU_TEXT(x) CUEMU_TEXT_(x)
#define CUEMU_SITE __FILE__ ":" CUEMU_TEXT(__LINE__)
#define __syncthreads() ::cuemu::barrier(CUEMU_SITE)
#define __syncthreads_count(p) ::cuemu::barrier_count(CUEMU_SITE, (p) != 0, ::cuemu::COUNT)
#define __syncthreads_and(p) ::cuemu::barrier_count(CUEMU_SITE, (p) != 0, ::cuemu::ALL)
#define __syncthreads_or(p) ::cuemu::barrier_count(CUEMU_SITE, (p) != 0, ::cuemu::ANY)

#define CU_SHARED(T, name, dims)                                                                   \
    static char name##_tag_;                                                                       \
    T(&name)                                                                                       \
    dims = *reinterpret_cast<T(*) dims>(::cuemu::shared_variable(&name##_tag_, sizeof(T dims)))
#define CU_DYN_SHARED(T, name) T *name = reinterpret_cast<T *>(::cuemu::dynamic_shared())
#define CU_LAUNCH(kernel, grid, block, bytes, stream, ...)                                         \
    ::cuemu::launch(#kernel, (stream), dim3(grid), dim3(block), (size_t)(bytes), (kernel),         \
                    ##__VA_ARGS__)

template <class... P> static inline int cu_allow_shared(void (*kernel)(P...), int bytes) {
    return cuemu::allow_shared(reinterpret_cast<const void *>(kernel), bytes);
}

/* ---- warp collectives ---------------------------------------------------------------------------
 */
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return cuemu::shuffle(mask, value, source, width, cuemu::SHUFFLE);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return cuemu::shuffle(mask, value, (int)delta, width, cuemu::SHUFFLE_UP);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return cuemu::shuffle(mask, value, (int)delta, width, cuemu::SHUFFLE_DOWN);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
    return cuemu::shuffle(mask, value, with, width, cuemu::SHUFFLE_XOR);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return cuemu::ballot(mask, predicate);
}
static inline int __any_sync(unsigned mask, int predicate) {
    return cuemu::ballot(mask, predicate) != 0;
}
static inline int __all_sync(unsigned mask, int predicate) {
    return cuemu::ballot(mask, predicate) == mask;
}
static inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return cuemu::reduce(mask, value, cuemu::SUM);
}
static inline int __reduce_add_sync(unsigned mask, int value) {
    return cuemu::reduce(mask, value, cuemu::SUM);
}
static inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return cuemu::reduce(mask, value, cuemu::LEAST);
}
static inline int __reduce_min_sync(unsigned mask, int value) {
    return cuemu::reduce(mask, value, cuemu::LEAST);
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return cuemu::reduce(mask, value, cuemu::MOST);
}
static inline int __reduce_max_sync(unsigned mask, int value) {
    return cuemu::reduce(mask, value, cuemu::MOST);
}
static inline unsigned __reduce_and_sync(unsigned mask, unsigned value) {
    return cuemu::reduce(mask, value, cuemu::BITS_AND);
}
static inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    return cuemu::reduce(mask, value, cuemu::BITS_OR);
}
template <class T> unsigned __match_any_sync(unsigned mask, T value) {
    return cuemu::match_any(mask, value);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) {
    cuemu::sync_warp(mask);
}
static inline void cu_mma_m16n8k16_bf16(float d[4], const unsigned a[4], const unsigned b[2]) {
    cuemu::Mma m;
    memcpy(m.a, a, sizeof m.a);
    memcpy(m.b, b, sizeof m.b);
    memcpy(m.d, d, sizeof m.d);
    cuemu::collective("mma", cuemu::resolve_mma, 0xffffffffu, &m, false);
    memcpy(d, m.d, sizeof m.d);
}
static inline void cu_ldmatrix_x4(unsigned r[4], const void *row) {
    cuemu::load_matrices(r, row, false);
}
static inline void cu_ldmatrix_x4_transposed(unsigned r[4], const void *row) {
    cuemu::load_matrices(r, row, true);
}

/* ---- copies in the background -------------------------------------------------------------------
 * Until the wait the target holds NaNs: a missing wait shows, and so does a copy into a buffer that
 * others still read. */
static inline void cu_copy_async16(void *shared, const void *global, bool valid) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16)
        cuemu::die("cp.async: an address that is not a multiple of 16 bytes");
    cuemu::copy_started(shared);
    for (int i = 0; i < 2; i++) /* not memset, which the race detector does not see */
        static_cast<volatile uint64_t *>(shared)[i] = UINT64_MAX;
    cuemu::current->copies.push_back({shared, valid ? global : nullptr, cuemu::current->number});
}
static inline void cu_copy_commit() {
    cuemu::current->groups.push_back(cuemu::current->copies.size());
}
template <int n> static inline void cu_copy_wait() {
    cuemu::Fiber *f = cuemu::current;
    if (f->groups.size() <= (size_t)n)
        return;
    const size_t done = f->groups.size() - (size_t)n, copies = f->groups[done - 1];
    for (size_t i = 0; i < copies; i++) {
        if (f->copies[i].from)
            memcpy(f->copies[i].to, f->copies[i].from, 16);
        else
            memset(f->copies[i].to, 0, 16);
        cuemu::copy_done(f->copies[i]);
    }
    f->copies.erase(f->copies.begin(), f->copies.begin() + (ptrdiff_t)copies);
    f->groups.erase(f->groups.begin(), f->groups.begin() + (ptrdiff_t)done);
    for (size_t &end : f->groups)
        end -= copies;
}

/* ---- arithmetic ---------------------------------------------------------------------------------
 */
static inline int __popc(unsigned v) {
    return __builtin_popcount(v);
}
static inline int __popcll(unsigned long long v) {
    return __builtin_popcountll(v);
}
static inline int __ffs(int v) {
    return __builtin_ffs(v);
}
static inline int __clz(int v) {
    return v ? __builtin_clz((unsigned)v) : 32;
}
static inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++)
        r |= (v >> i & 1u) << (31 - i);
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}
static inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, sizeof u);
    return u;
}
static inline float __int_as_float(int i) {
    return __uint_as_float((unsigned)i);
}
static inline int __float_as_int(float f) {
    return (int)__float_as_uint(f);
}
static inline float __fmul_rn(float a, float b) {
    return a * b;
}
static inline float __fadd_rn(float a, float b) {
    return a + b;
}
static inline float __fsqrt_rn(float a) {
    return sqrtf(a);
}
static inline float __fdiv_rn(float a, float b) {
    return a / b;
}
static inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
template <class T> T __ldg(const T *p) {
    return *p;
}

/* ---- fences and atomics -------------------------------------------------------------------------
 */
static inline void __threadfence() {
    cuemu::yield();
}
static inline void __threadfence_block() {
}
static inline void __nanosleep(unsigned) {
    cuemu::yield();
}

template <class T> struct cuemu_same { typedef T type; };
/* Replaces *p by what `next` makes of it; answers what was there. */
template <class T, class Next> T cuemu_replace(T *p, Next next) {
    T old, made;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do
        made = next(old);
    while (!__atomic_compare_exchange(p, &old, &made, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
template <class T> T atomicAdd(T *p, typename cuemu_same<T>::type v) {
    return cuemu_replace(p, [v](T old) { return (T)(old + v); });
}
template <class T> T atomicMax(T *p, typename cuemu_same<T>::type v) {
    return cuemu_replace(p, [v](T old) { return old > v ? old : v; });
}
template <class T> T atomicMin(T *p, typename cuemu_same<T>::type v) {
    return cuemu_replace(p, [v](T old) { return old < v ? old : v; });
}
template <class T> T atomicOr(T *p, typename cuemu_same<T>::type v) {
    return cuemu_replace(p, [v](T old) { return (T)(old | v); });
}
template <class T> T atomicAnd(T *p, typename cuemu_same<T>::type v) {
    return cuemu_replace(p, [v](T old) { return (T)(old & v); });
}
template <class T> T atomicExch(T *p, typename cuemu_same<T>::type v) {
    return cuemu_replace(p, [v](T) { return v; });
}
/* Yields: kernels may spin on it. */
template <class T>
T atomicCAS(T *p, typename cuemu_same<T>::type expected, typename cuemu_same<T>::type v) {
    T old = expected, made = v;
    __atomic_compare_exchange(p, &old, &made, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    cuemu::yield();
    return old;
}

#endif
