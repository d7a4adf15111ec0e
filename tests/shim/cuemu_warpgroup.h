/* The twin of kernels/cuda/warpgroup.cuh. */
#ifndef MIZAN_TESTS_SHIM_CUEMU_WARPGROUP_H
#define MIZAN_TESTS_SHIM_CUEMU_WARPGROUP_H

#include "warpgroup.h"

static inline unsigned cu_shared_address(const void *shared) {
    return cuemu::shared_address(shared);
}

/* The barrier's own bytes are touched so that the sanitizers see who uses it before it is ready. */
static inline void cu_barrier_init(uint64_t *barrier, unsigned count) {
    *barrier = count;
    cuemu::mbarrier_init(barrier, count);
}
static inline void cuemu_touch(const uint64_t *barrier) {
    (void)*static_cast<const volatile uint64_t *>(barrier);
}
static inline void cu_barrier_arrive(uint64_t *barrier) {
    cuemu_touch(barrier);
    cuemu::mbarrier_arrive(barrier);
}
static inline void cu_barrier_arrive_copied(uint64_t *barrier) {
    cuemu_touch(barrier);
    cuemu::mbarrier_arrive_copied(barrier);
}
static inline void cu_barrier_wait(uint64_t *barrier, unsigned parity) {
    cuemu_touch(barrier);
    cuemu::mbarrier_wait(barrier, parity);
}
static inline void cu_fence_async_proxy() {
    cuemu::fence_async_proxy();
}

template <int n> static inline void cu_fewer_registers() {
    cuemu::set_registers(n, false);
}
template <int n> static inline void cu_more_registers() {
    cuemu::set_registers(n, true);
}

static inline void cu_wgmma_fence() {
    cuemu::wgmma_fence();
}
static inline void cu_wgmma_commit() {
    cuemu::wgmma_commit();
}
template <int n> static inline void cu_wgmma_wait() {
    cuemu::wgmma_wait(n);
}
template <bool a_lines, bool b_lines, int BLOCKS>
static inline void cu_wgmma(float (&d)[BLOCKS][4], uint64_t a, uint64_t b) {
    cuemu::wgmma(&d[0][0], cuemu::Wgmma{a, b, 8 * BLOCKS, a_lines, b_lines});
}
template <int BLOCKS> static inline void cu_wgmma_finish(float (&)[BLOCKS][4]) {
    cuemu::wgmma_wait(0);
}

#endif
