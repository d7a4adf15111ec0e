/* What compute capability 9.0 has for warp-specialised products, each instruction in a function of
 * its own: barriers in shared memory that copies arrive at (mbarrier), products of a warpgroup
 * (wgmma), the fence between the proxies, registers moved between warpgroups. The emulation of the
 * tests has twins of all of it. For nvcc only files compiled for sm_90a alone may include it.
 *
 * The rules, by section of the PTX ISA 9.x:
 *   Parallel synchronisation, mbarrier: `count` arrivals complete a phase, and the next begins at
 *     once. Waiting for parity p passes when the phase of that parity has completed; of a fresh
 *     barrier a wait for parity 1 passes. Arriving releases, waiting acquires, within the block.
 *   cp.async.mbarrier.arrive.noinc: makes one of those arrivals when all cp.async that the thread
 *     has issued so far are complete.
 *   9.7.15.1  A warpgroup is four warps that follow each other, the first one's number a multiple
 *     of four; all its 128 threads run the same wgmma.
 *   9.7.15.4  wgmma reads shared memory through the async proxy: what others wrote (cp.async too)
 *     needs fence.proxy.async in between. Its completion fences the other way by itself.
 *   9.7.15.5.1.1  Sums: warp w of the four has lines 16 w to 16 w + 15; its lane l has of line l /
 * 4 d[j][0..1] and of line l / 4 + 8 d[j][2..3], at columns 8 j + 2 (l mod 4) and the next.
 *   9.7.15.5.1.2  Operands in shared memory, here with 128-byte swizzle: bits 4 to 6 of an address
 *     are flipped by bits 7 to 9. K-major (memory runs along the depth): lines of 128 bytes,
 *     `stride` bytes from eight lines to the next eight; the leading offset is not used. MN-major
 *     (memory runs along lines or columns): 128 bytes are 64 lines of one depth, depth follows
 *     depth, `stride` bytes from eight depths to the next eight, `leading` bytes from 64 lines to
 *     the next 64. Canonical layouts, elements of bf16, T = 8: ((8,m),(T,2k)):((8T,SBO),(1,T)) and
 *     ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO)).
 *   9.7.15.5.1.2.2  Descriptor: bits 0-13 start address, 16-29 leading offset, 32-45 stride, each
 * in units of 16 bytes; 49-51 base offset, 0 where the swizzle's pattern starts at a multiple of
 *     1,024 bytes; 62-63 swizzle, 1 for 128 bytes.
 *   9.7.15.7.1  wgmma.fence before the first wgmma and between any other access to its registers
 * and the next; wgmmas of one shape on the same sums need none among themselves. Miscellaneous,
 * setmaxnreg: a multiple of 8 from 24 to 256, by all warps of a warpgroup; more registers wait
 * until others have given back enough. */
#ifndef MIZAN_KERNELS_CUDA_WARPGROUP_CUH
#define MIZAN_KERNELS_CUDA_WARPGROUP_CUH

#include "kernels/cuda/portable.h"

#if defined(__CUDACC__)
#include <stdint.h>

__device__ static inline unsigned cu_shared_address(const void *shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}

/* ---- barriers -----------------------------------------------------------------------------------
 */
__device__ static inline void cu_barrier_init(uint64_t *barrier, unsigned count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cu_shared_address(barrier)),
                 "r"(count)
                 : "memory");
}
__device__ static inline void cu_barrier_arrive(uint64_t *barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(
                     cu_shared_address(barrier))
                 : "memory");
}
/* Arrives when the copies that this thread has started are complete. */
__device__ static inline void cu_barrier_arrive_copied(uint64_t *barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cu_shared_address(barrier))
        : "memory");
}
__device__ static inline void cu_barrier_wait(uint64_t *barrier, unsigned parity) {
    unsigned done;
    do
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(cu_shared_address(barrier)), "r"(parity)
                     : "memory");
    while (!done);
}
/* Orders what this thread wrote, or has seen written, before what its wgmmas read. */
__device__ static inline void cu_fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- registers ----------------------------------------------------------------------------------
 */
template <int n> __device__ static inline void cu_fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n> __device__ static inline void cu_more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

/* ---- products -----------------------------------------------------------------------------------
 */
__device__ static inline void cu_wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ static inline void cu_wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most n groups are in flight. */
template <int n> __device__ static inline void cu_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

#define CU_D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define CU_D16(j) CU_D4(j), CU_D4(j + 1), CU_D4(j + 2), CU_D4(j + 3)
#define CU_D64(j) CU_D16(j), CU_D16(j + 4), CU_D16(j + 8), CU_D16(j + 12)
#define CU_FIRST_64                                                                                \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                       \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                             \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                             \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define CU_SECOND_64                                                                               \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                             \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"                             \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"                 \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

/* d (fp32, 64 x 128 or 64 x 256) += a (bf16, 64 x 16) b (bf16, 16 columns deep) by descriptors; in
 * flight until waited for. a_lines, b_lines: the operand is MN-major. */
template <bool a_lines, bool b_lines>
__device__ static inline void cu_wgmma(float (&d)[16][4], uint64_t a, uint64_t b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CU_FIRST_64 "},"
                 "%64, %65, p, 1, 1, %67, %68;}"
                 : CU_D64(0)
                 : "l"(a), "l"(b), "r"(1), "n"(a_lines), "n"(b_lines));
}
template <bool a_lines, bool b_lines>
__device__ static inline void cu_wgmma(float (&d)[32][4], uint64_t a, uint64_t b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0;"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" CU_FIRST_64
                 "," CU_SECOND_64 "},"
                 "%128, %129, p, 1, 1, %131, %132;}"
                 : CU_D64(0), CU_D64(16)
                 : "l"(a), "l"(b), "r"(1), "n"(a_lines), "n"(b_lines));
}
/* Waits for all of them; names the sums, so that no use of these moves before it. */
__device__ static inline void cu_wgmma_finish(float (&d)[16][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : CU_D64(0)::"memory");
}
__device__ static inline void cu_wgmma_finish(float (&d)[32][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : CU_D64(0), CU_D64(16)::"memory");
}
#else
#include <cuemu_warpgroup.h> /* of the build that emulates */
#endif

#endif
