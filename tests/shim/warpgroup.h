/* Warpgroups: wgmma from its descriptors, as section 9.7.15 of the PTX ISA has it (the rules stand
 * in kernels/cuda/warpgroup.cuh). Products run when they are waited for; until then their sums hold
 * NaNs and their operands must stay. Reported before abort: a product whose operand a copy still
 * writes, or whose operand was copied without a fence.proxy.async since, by the reader or by the
 * writer; a copy that overwrites the operand of a product in flight; a product without wgmma.fence
 * since its sums were last delivered; sums written in flight; warps of a warpgroup whose products
 * differ; threads that exit with products in flight; descriptors with reserved bits or a base
 * offset, operands outside dynamic shared memory; register counts of setmaxnreg that are no
 * multiple of 8, or that no one gives back; any of it but on compute capability 9.0. Stores to
 * shared memory other than copies are not followed. */
#ifndef MIZAN_TESTS_SHIM_WARPGROUP_H
#define MIZAN_TESTS_SHIM_WARPGROUP_H

#include "emulator.h"

namespace cuemu {

/* Eight values of an operand that lie together: from (line, depth) on, along the lines where the
 * operand is MN-major. */
struct Chunk {
    const char *at;
    int line, depth;
    bool of_b;
};

/* Which 2 n + 32 chunks the four warps' lanes share out: the lane's own, one of A's and n / 16 of
 * B's. */
struct Chunks {
    Chunk chunk[1 + 16];
    int n;
};
Chunks chunks_of_lane(const Wgmma &product);

void wgmma_start(float *sums, const Wgmma &product); /* the bookkeeping of the calling lane */
void wgmma_reads(const Chunk &chunk, bool start);    /* its product starts or ends to read it */
void wgmma_operand(const Chunk &chunk, bool along_lines, const uint16_t value[8]);
void wgmma_multiply(const Wgmma &product); /* after all lanes' wgmma_operand; a collective */
void wgmma_deliver();                      /* sums to their registers once nothing is in flight */
void wgmma_commit();
void wgmma_fence();
void set_registers(int n, bool more);
void fence_async_proxy();

/* The reads stand here, in the sight of the sanitizers: when the product starts and when it is
 * waited for. */
inline void wgmma(float *sums, const Wgmma &product) {
    wgmma_start(sums, product);
    const Chunks mine = chunks_of_lane(product);
    for (int i = 0; i < mine.n; i++) {
        wgmma_reads(mine.chunk[i], true);
        (void)*static_cast<const volatile char *>(mine.chunk[i].at);
    }
}

inline void wgmma_wait(size_t groups_left) {
    Warpgroup &w = current->warpgroup;
    const size_t done = w.groups.size() > groups_left ? w.groups.size() - groups_left : 0;
    const size_t products = done ? w.groups[done - 1] : 0;
    for (size_t p = 0; p < products; p++) {
        const Wgmma product = w.products[p];
        const Chunks mine = chunks_of_lane(product);
        for (int i = 0; i < mine.n; i++) {
            uint16_t value[8];
            for (int v = 0; v < 8; v++)
                value[v] = reinterpret_cast<const uint16_t *>(mine.chunk[i].at)[v];
            wgmma_operand(mine.chunk[i], mine.chunk[i].of_b ? product.b_lines : product.a_lines,
                          value);
            wgmma_reads(mine.chunk[i], false);
        }
        wgmma_multiply(product);
    }
    w.products.erase(w.products.begin(), w.products.begin() + (ptrdiff_t)products);
    w.groups.erase(w.groups.begin(), w.groups.begin() + (ptrdiff_t)done);
    for (size_t &end : w.groups)
        end -= products;
    wgmma_deliver();
}

} /* namespace cuemu */

#endif
