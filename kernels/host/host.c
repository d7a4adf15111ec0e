/* The host backend's context and table. */
#include "kernels/host/host.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* OpenBLAS's own threads would compete with the pool, which already runs a product per thread. A
 * weak reference: another BLAS behind the same interface may not have it. */
extern void openblas_set_num_threads(int threads) __attribute__((weak));

static int32_t processors(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    const int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

/* The best tables for this processor. */
static void choose_simd(mz_host *host) {
    host->simd = &mz_simd_base;
    host->update = &mz_update_simd_base;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        host->simd = &mz_simd_avx512;
        host->update = &mz_update_simd_avx512;
    } else if (__builtin_cpu_supports("avx2")) {
        host->simd = &mz_simd_avx2;
        host->update = &mz_update_simd_avx2;
    }
#endif
}

static mz_kstatus host_open(mz_kernels *k, const mz_kernels_options *options) {
    mz_host *host = calloc(1, sizeof *host);
    if (!host)
        return mz_kernels_fail(k, MZ_K_ENOMEM, "no memory for a host context");
    const int32_t threads = options->threads > 0 ? options->threads : processors();
    host->pool = mz_pool_create(threads);
    if (!host->pool) {
        free(host);
        return mz_kernels_fail(
            k, MZ_K_ENOMEM, "cannot start %d threads: memory or processes are short", (int)threads);
    }
    choose_simd(host);
    if (openblas_set_num_threads)
        openblas_set_num_threads(1);
    k->self = host;
    snprintf(k->describe, sizeof k->describe, "host, %d thread%s, %s", (int)threads,
             threads == 1 ? "" : "s", host->simd->name);
    return MZ_K_OK;
}

static void host_close(mz_kernels *k) {
    mz_pool_free(mz_host_of(k)->pool);
    free(k->self);
}

/* What finds no room in the caches gets huge pages, where there are any: rows that are read
 * wherever they are would each wait for their page's address. The last one, not filled, stays as it
 * is. */
static mz_kstatus host_alloc(mz_kernels *k, size_t bytes, void **memory) {
    enum { HUGE_PAGE = 2 << 20 };
    const size_t unit = bytes >= MZ_STREAM_BYTES ? HUGE_PAGE : 256;
    const size_t rounded = (bytes + unit - 1) & ~(unit - 1);
    *memory = rounded >= bytes ? aligned_alloc(unit, rounded) : NULL;
    if (*memory && unit == HUGE_PAGE)
        (void)madvise(*memory, bytes & ~(unit - 1), MADV_HUGEPAGE); /* else it is slower, no more */
    return *memory ? MZ_K_OK
                   : mz_kernels_fail(k, MZ_K_ENOMEM, "alloc: no memory of %zu bytes", bytes);
}

static void host_free(mz_kernels *k, void *memory) {
    (void)k;
    free(memory);
}

/* MemTotal and MemAvailable of the system, in KiB. */
static mz_kstatus host_memory(mz_kernels *k, size_t *all, size_t *available) {
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long long kib = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemTotal: %llu kB", &kib) == 1)
            *all = (size_t)kib << 10;
        else if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            *available = (size_t)kib << 10;
    if (file)
        fclose(file);
    return *all > 0 && *available > 0
               ? MZ_K_OK
               : mz_kernels_fail(k, MZ_K_EHARDWARE,
                                 "memory: /proc/meminfo does not say how much there is");
}

static mz_kstatus host_copy(mz_kernels *k, mz_kstream stream, mz_copy kind, void *to,
                            const void *from, size_t bytes) {
    (void)k, (void)stream, (void)kind;
    memmove(to, from, bytes);
    return MZ_K_OK;
}

static mz_kstatus host_zero(mz_kernels *k, mz_kstream stream, void *memory, size_t bytes) {
    (void)k, (void)stream;
    memset(memory, 0, bytes);
    return MZ_K_OK;
}

static mz_kstatus host_sync(mz_kernels *k, mz_kstream stream) {
    (void)k, (void)stream;
    return MZ_K_OK;
}

static mz_kstatus host_wait(mz_kernels *k, mz_kstream waiter, mz_kstream stream) {
    (void)k, (void)waiter, (void)stream;
    return MZ_K_OK;
}

static mz_kstatus host_mark(mz_kernels *k, mz_kstream stream, int32_t slot) {
    (void)stream;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    mz_host_of(k)->mark[slot] = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    mz_host_of(k)->marked[slot] = true;
    return MZ_K_OK;
}

static mz_kstatus host_elapsed(mz_kernels *k, int32_t from_slot, int32_t to_slot, double *seconds) {
    const mz_host *host = mz_host_of(k);
    if (!host->marked[from_slot] || !host->marked[to_slot])
        return mz_kernels_fail(k, MZ_K_EINVAL, "elapsed: slot %d was not marked",
                               (int)(host->marked[from_slot] ? to_slot : from_slot));
    *seconds = host->mark[to_slot] - host->mark[from_slot];
    return MZ_K_OK;
}

const mz_backend_ops mz_host_ops = {
    .name = "host",
    .open = host_open,
    .close = host_close,
    .alloc = host_alloc,
    .free = host_free,
    .memory = host_memory,
    .copy = host_copy,
    .zero = host_zero,
    .sync = host_sync,
    .wait = host_wait,
    .mark = host_mark,
    .elapsed = host_elapsed,
    .convert = mz_host_convert,
    .row_norms = mz_host_row_norms,
    .row_dots = mz_host_row_dots,
    .score_pairs = mz_host_score_pairs,
    .group_pairs_workspace = mz_host_group_pairs_workspace,
    .group_pairs = mz_host_group_pairs,
    .prefix_sums_workspace = mz_host_prefix_sums_workspace,
    .prefix_sums = mz_host_prefix_sums,
    .select_workspace = mz_host_select_workspace,
    .select_pairs = mz_host_select_pairs,
    .arrange = mz_host_arrange,
    .invert = mz_host_invert,
    .pack_rows = mz_host_pack_rows,
    .unpack_rows = mz_host_unpack_rows,
    .combine_rows = mz_host_combine_rows,
    .tiles = mz_host_tiles,
    .up_tiles = mz_host_up_tiles,
    .grouped_gemm_workspace = mz_host_grouped_gemm_workspace,
    .grouped_gemm = mz_host_grouped_gemm,
    .expert_up_workspace = mz_host_expert_up_workspace,
    .expert_up_forward = mz_host_expert_up_forward,
    .swiglu_forward = mz_host_swiglu_forward,
    .swiglu_backward = mz_host_swiglu_backward,
    .router_workspace = mz_host_router_workspace,
    .router_forward = mz_host_router_forward,
    .router_backward = mz_host_router_backward,
    .router_losses = mz_host_router_losses,
    .gate_norms = mz_host_gate_norms,
    .gate_norms_backward = mz_host_gate_norms_backward,
    .update_workspace = mz_host_update_workspace,
    .update_step = mz_host_update_step,
};
