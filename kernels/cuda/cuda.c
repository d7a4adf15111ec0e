/* Context, memory, streams and errors of the CUDA backend; operations go to the launchers. */
#include "kernels/cuda/cuda.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct cuda_context {
    mz_cuda_device device;
    int32_t ordinal;
    cudaStream_t stream[MZ_KERNEL_STREAMS_MAX];
    cudaEvent_t order[MZ_KERNEL_STREAMS_MAX]; /* of mz_kernels_wait */
    cudaEvent_t mark[MZ_KERNEL_MARKS];
    bool marked[MZ_KERNEL_MARKS];
    char library_dir[512];
    mz_vendor *vendor; /* opened when first asked for */
} cuda_context;

static cuda_context *context_of(const mz_kernels *k) {
    return (cuda_context *)k->self;
}

static void *stream_of(const mz_kernels *k, mz_kstream stream) {
    return (void *)context_of(k)->stream[stream];
}

static const mz_cuda_device *device_of(const mz_kernels *k) {
    return &context_of(k)->device;
}

mz_kstatus mz_cuda_check(mz_kernels *k, int error, const char *what) {
    if (error == cudaSuccess)
        return MZ_K_OK;
    cudaGetLastError(); /* or the next launch would report it once more */
    mz_kstatus status = MZ_K_EFAILED;
    if (error == cudaErrorMemoryAllocation)
        status = MZ_K_ENOMEM;
    else if (error == cudaErrorInvalidValue || error == cudaErrorInvalidConfiguration)
        status = MZ_K_EINVAL;
    return mz_kernels_fail(k, status, "%s: CUDA error %d, %s", what, error,
                           cudaGetErrorString((cudaError_t)error));
}

static mz_kstatus check(mz_kernels *k, int error, const char *what) {
    return mz_cuda_check(k, error, what);
}

/* ---- opening ------------------------------------------------------------------------------------
 */

static mz_kstatus find_device(mz_kernels *k, int32_t ordinal) {
    int driver = 0, devices = 0; /* left untouched by a call that fails */
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        return mz_kernels_fail(k, MZ_K_EHARDWARE,
                               "no NVIDIA driver on this machine; use the host backend");
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess)
        return mz_kernels_fail(k, MZ_K_EHARDWARE, "no usable GPU: CUDA error %d, %s", (int)error,
                               cudaGetErrorString(error));
    if (ordinal < 0 || ordinal >= devices)
        return mz_kernels_fail(k, MZ_K_EHARDWARE, "GPU %d of %d on this machine", (int)ordinal,
                               devices);
    return MZ_K_OK;
}

static mz_kstatus read_facts(mz_kernels *k, cuda_context *c) {
    int driver = 0, value[4] = {0};
    const enum cudaDeviceAttr what[4] = {
        cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor,
        cudaDevAttrComputeCapabilityMinor, cudaDevAttrMaxSharedMemoryPerBlockOptin};
    for (int i = 0; i < 4; i++) {
        mz_kstatus status =
            check(k, cudaDeviceGetAttribute(&value[i], what[i], c->ordinal), "device attributes");
        if (status != MZ_K_OK)
            return status;
    }
    c->device = (mz_cuda_device){value[0], 10 * value[1] + value[2], value[3]};
    if (c->device.capability < 80)
        return mz_kernels_fail(k, MZ_K_EHARDWARE,
                               "GPU %d has compute capability %d.%d; 8.0 is needed",
                               (int)c->ordinal, value[1], value[2]);
    struct cudaDeviceProp facts;
    mz_kstatus status = check(k, cudaGetDeviceProperties(&facts, c->ordinal), "device properties");
    if (status != MZ_K_OK)
        return status;
    cudaDriverGetVersion(&driver);
    snprintf(k->describe, sizeof k->describe, "%.80s, sm_%d, driver for CUDA %d.%d", facts.name,
             (int)c->device.capability, driver / 1000, driver % 1000 / 10);
    return MZ_K_OK;
}

static mz_kstatus make_streams(mz_kernels *k, cuda_context *c) {
    for (int32_t i = 0; i < k->streams; i++) {
        mz_kstatus status =
            check(k, cudaStreamCreateWithFlags(&c->stream[i], cudaStreamNonBlocking), "a stream");
        if (status == MZ_K_OK)
            status = check(k, cudaEventCreateWithFlags(&c->order[i], cudaEventDisableTiming),
                           "an event");
        if (status != MZ_K_OK)
            return status;
    }
    return MZ_K_OK;
}

static void cuda_close(mz_kernels *k) {
    cuda_context *c = context_of(k);
    mz_vendor_close(&c->vendor);
    for (int32_t i = 0; i < MZ_KERNEL_STREAMS_MAX; i++) {
        if (c->order[i])
            cudaEventDestroy(c->order[i]);
        if (c->stream[i])
            cudaStreamDestroy(c->stream[i]);
    }
    for (int32_t i = 0; i < MZ_KERNEL_MARKS; i++)
        if (c->mark[i])
            cudaEventDestroy(c->mark[i]);
    free(c);
}

/* The current device is the thread's, and the context may have come from another thread. */
static mz_kstatus cuda_bind(mz_kernels *k) {
    return check(k, cudaSetDevice(context_of(k)->ordinal), "the device");
}

static mz_kstatus cuda_open(mz_kernels *k, const mz_kernels_options *options) {
    mz_kstatus status = find_device(k, options->device);
    if (status != MZ_K_OK)
        return status;
    const char *library_dir = options->library_dir ? options->library_dir : "";
    if (strlen(library_dir) >= sizeof((cuda_context *)0)->library_dir)
        return mz_kernels_fail(k, MZ_K_EINVAL, "library_dir: a path of more than %zu bytes",
                               sizeof((cuda_context *)0)->library_dir - 1);
    cuda_context *c = calloc(1, sizeof *c);
    if (!c)
        return mz_kernels_fail(k, MZ_K_ENOMEM, "no memory for a CUDA context");
    k->self = c;
    c->ordinal = options->device;
    memcpy(c->library_dir, library_dir, strlen(library_dir) + 1);
    status = cuda_bind(k);
    if (status == MZ_K_OK)
        status = read_facts(k, c);
    if (status == MZ_K_OK)
        status = make_streams(k, c);
    if (status != MZ_K_OK) {
        cuda_close(k);
        /* What cannot be opened is not there, whatever CUDA calls it. */
        if (status == MZ_K_EFAILED)
            status = MZ_K_EHARDWARE;
    }
    return status;
}

/* ---- memory and streams -------------------------------------------------------------------------
 */

static mz_kstatus cuda_alloc(mz_kernels *k, size_t bytes, void **memory) {
    const cudaError_t error = cudaMalloc(memory, bytes);
    if (error != cudaSuccess)
        *memory = NULL;
    const mz_kstatus status = check(k, error, "alloc");
    return status == MZ_K_ENOMEM
               ? mz_kernels_fail(k, status, "alloc: no %zu bytes on the device", bytes)
               : status;
}

static void cuda_free(mz_kernels *k, void *memory) {
    (void)k;
    cudaFree(memory);
}

static mz_kstatus cuda_memory(mz_kernels *k, size_t *all, size_t *available) {
    return check(k, cudaMemGetInfo(available, all), "memory");
}

static mz_kstatus cuda_copy(mz_kernels *k, mz_kstream stream, mz_copy kind, void *to,
                            const void *from, size_t bytes) {
    const enum cudaMemcpyKind direction = kind == MZ_COPY_IN    ? cudaMemcpyHostToDevice
                                          : kind == MZ_COPY_OUT ? cudaMemcpyDeviceToHost
                                                                : cudaMemcpyDeviceToDevice;
    return check(k, cudaMemcpyAsync(to, from, bytes, direction, context_of(k)->stream[stream]),
                 "copy");
}

static mz_kstatus cuda_zero(mz_kernels *k, mz_kstream stream, void *memory, size_t bytes) {
    return check(k, cudaMemsetAsync(memory, 0, bytes, context_of(k)->stream[stream]), "zero");
}

static mz_kstatus cuda_sync(mz_kernels *k, mz_kstream stream) {
    return check(k, cudaStreamSynchronize(context_of(k)->stream[stream]), "sync");
}

static mz_kstatus cuda_wait(mz_kernels *k, mz_kstream waiter, mz_kstream stream) {
    cuda_context *c = context_of(k);
    mz_kstatus status = check(k, cudaEventRecord(c->order[stream], c->stream[stream]), "wait");
    return status == MZ_K_OK
               ? check(k, cudaStreamWaitEvent(c->stream[waiter], c->order[stream], 0), "wait")
               : status;
}

static mz_kstatus cuda_mark(mz_kernels *k, mz_kstream stream, int32_t slot) {
    cuda_context *c = context_of(k);
    if (!c->mark[slot]) {
        mz_kstatus status =
            check(k, cudaEventCreateWithFlags(&c->mark[slot], cudaEventDefault), "mark");
        if (status != MZ_K_OK)
            return status;
    }
    c->marked[slot] = true;
    return check(k, cudaEventRecord(c->mark[slot], c->stream[stream]), "mark");
}

static mz_kstatus cuda_elapsed(mz_kernels *k, int32_t from_slot, int32_t to_slot, double *seconds) {
    const cuda_context *c = context_of(k);
    float ms = 0;
    if (!c->marked[from_slot] || !c->marked[to_slot])
        return mz_kernels_fail(k, MZ_K_EINVAL, "elapsed: slot %d was not marked",
                               (int)(c->marked[from_slot] ? to_slot : from_slot));
    mz_kstatus status =
        check(k, cudaEventElapsedTime(&ms, c->mark[from_slot], c->mark[to_slot]), "elapsed");
    *seconds = 1e-3 * (double)ms;
    return status;
}

/* ---- operations ---------------------------------------------------------------------------------
 */

#define LAUNCH(name, type)                                                                         \
    static mz_kstatus cuda_##name(mz_kernels *k, mz_kstream stream, const type *args) {            \
        return check(k, mz_cuda_##name(device_of(k), stream_of(k, stream), args), #name);          \
    }
#define LAUNCH_WITH_WORKSPACE(name, type)                                                          \
    static size_t cuda_##name##_workspace(const mz_kernels *k, const type *args) {                 \
        return mz_cuda_##name##_workspace(device_of(k), args);                                     \
    }                                                                                              \
    static mz_kstatus cuda_##name(mz_kernels *k, mz_kstream stream, const type *args,              \
                                  void *workspace) {                                               \
        return check(k, mz_cuda_##name(device_of(k), stream_of(k, stream), args, workspace),       \
                     #name);                                                                       \
    }

LAUNCH(row_norms, mz_norms)
LAUNCH(row_dots, mz_dots)
LAUNCH(pack_rows, mz_pack)
LAUNCH(unpack_rows, mz_unpack)
LAUNCH(combine_rows, mz_combine)
LAUNCH(swiglu_forward, mz_swiglu)
LAUNCH(swiglu_backward, mz_swiglu)

static mz_kstatus cuda_convert(mz_kernels *k, mz_kstream stream, mz_dtype to_type, void *to,
                               mz_dtype from_type, const void *from, int64_t n) {
    return check(
        k, mz_cuda_convert(device_of(k), stream_of(k, stream), to_type, to, from_type, from, n),
        "convert");
}

LAUNCH(score_pairs, mz_score_args)
LAUNCH_WITH_WORKSPACE(group_pairs, mz_grouping)

static size_t cuda_select_pairs_workspace(const mz_kernels *k, const mz_selection *args) {
    return mz_cuda_select_pairs_workspace(device_of(k), args);
}

static mz_kstatus cuda_select_pairs(mz_kernels *k, mz_kstream stream, const mz_selection *args,
                                    void *workspace) {
    if (args->pairs > UINT32_MAX) /* a block's bins count in 32 bits */
        return mz_kernels_fail(k, MZ_K_EINVAL, "select_pairs: %lld pairs; on CUDA fewer than 2^32",
                               (long long)args->pairs);
    return check(k, mz_cuda_select_pairs(device_of(k), stream_of(k, stream), args, workspace),
                 "select_pairs");
}

static size_t cuda_prefix_sums_workspace(const mz_kernels *k, int64_t n) {
    return mz_cuda_prefix_sums_workspace(device_of(k), n);
}

static mz_kstatus cuda_prefix_sums(mz_kernels *k, mz_kstream stream, const int64_t *count,
                                   int64_t n, int64_t *begin, void *workspace) {
    return check(
        k, mz_cuda_prefix_sums(device_of(k), stream_of(k, stream), count, n, begin, workspace),
        "prefix_sums");
}

static mz_kstatus cuda_arrange(mz_kernels *k, mz_kstream stream, const mz_segment *segment,
                               int64_t segments, const int64_t *in, int64_t *out) {
    return check(k, mz_cuda_arrange(device_of(k), stream_of(k, stream), segment, segments, in, out),
                 "arrange");
}

static mz_kstatus cuda_invert(mz_kernels *k, mz_kstream stream, const int64_t *row_pair,
                              int64_t rows, int64_t pairs, int64_t *position) {
    return check(
        k, mz_cuda_invert(device_of(k), stream_of(k, stream), row_pair, rows, pairs, position),
        "invert");
}

/* Pieces of 16 bytes are what products copy: rows are whole pieces, and matrices start at one. The
 * pointers to weights lie on the device. */
static mz_kstatus check_pieces(mz_kernels *k, const char *name, mz_dtype type,
                               const int64_t side[2], const void *const matrix[3]) {
    const int values = type == MZ_BF16 ? 8 : 4;
    if (side[0] % values || side[1] % values)
        return mz_kernels_fail(k, MZ_K_EINVAL,
                               "%s: rows of %lld and %lld values; on CUDA multiples of %d", name,
                               (long long)side[0], (long long)side[1], values);
    for (int i = 0; i < 3; i++)
        if ((uintptr_t)matrix[i] % 16)
            return mz_kernels_fail(
                k, MZ_K_EINVAL, "%s: a matrix that does not start at a multiple of 16 bytes", name);
    return MZ_K_OK;
}

static size_t cuda_expert_up_workspace(const mz_kernels *k, const mz_expert_up *args) {
    return mz_cuda_expert_up_workspace(device_of(k), args);
}

static mz_kstatus cuda_expert_up(mz_kernels *k, mz_kstream stream, const mz_expert_up *args,
                                 void *workspace) {
    const mz_kstatus status =
        check_pieces(k, "expert_up", args->type, (int64_t[]){args->hidden, args->intermediate},
                     (const void *[]){args->x, args->gate_up, args->h});
    return status == MZ_K_OK
               ? check(k, mz_cuda_expert_up(device_of(k), stream_of(k, stream), args, workspace),
                       "expert_up")
               : status;
}

/* Output tiles of the own engine: rows by a side of the weight, of wgrad both its sides; those of
 * wgmma are twice as wide. */
enum { TILE_SIDE = 128 };

static mz_product_tiles cuda_tiles(const mz_kernels *k, mz_product op) {
    const int32_t workers = device_of(k)->multiprocessors;
    const int32_t width = device_of(k)->capability == 90 ? 2 * TILE_SIDE : TILE_SIDE;
    if (op == MZ_PRODUCT_WGRAD)
        return (mz_product_tiles){0, TILE_SIDE, width, workers};
    return op == MZ_PRODUCT_DGRAD ? (mz_product_tiles){TILE_SIDE, 0, width, workers}
                                  : (mz_product_tiles){TILE_SIDE, width, 0, workers};
}

static mz_product_tiles cuda_up_tiles(const mz_kernels *k, int64_t intermediate) {
    (void)intermediate;
    return cuda_tiles(k, MZ_PRODUCT_FORWARD);
}

static size_t cuda_grouped_gemm_workspace(const mz_kernels *k, const mz_product_args *args) {
    return args->engine == MZ_ENGINE_VENDOR ? mz_vendor_grouped_gemm_workspace(args)
                                            : mz_cuda_grouped_gemm_workspace(device_of(k), args);
}

static mz_kstatus cuda_grouped_gemm(mz_kernels *k, mz_kstream stream, const mz_product_args *args,
                                    void *workspace) {
    cuda_context *c = context_of(k);
    const bool half =
        args->type == MZ_BF16 || (args->op == MZ_PRODUCT_WGRAD && args->gradient_type == MZ_BF16);
    const mz_kstatus aligned =
        check_pieces(k, "grouped_gemm", half ? MZ_BF16 : MZ_F32, (int64_t[]){args->n, args->k},
                     (const void *[]){args->a, args->c, NULL});
    if (aligned != MZ_K_OK)
        return aligned;
    if (args->engine != MZ_ENGINE_VENDOR)
        return check(k, mz_cuda_grouped_gemm(&c->device, stream_of(k, stream), args, workspace),
                     "grouped_gemm");
    if (!c->vendor) {
        mz_kstatus status =
            mz_vendor_open(k, c->library_dir[0] ? c->library_dir : NULL, &c->vendor);
        if (status != MZ_K_OK)
            return status;
    }
    return mz_vendor_grouped_gemm(k, c->vendor, stream_of(k, stream), args, workspace);
}

LAUNCH_WITH_WORKSPACE(update_step, mz_update)

static size_t cuda_router_workspace(const mz_kernels *k, const mz_router *args) {
    return mz_cuda_router_workspace(device_of(k), args);
}

/* A warp keeps a token's experts in shared memory. */
static mz_kstatus check_router(mz_kernels *k, int error, const mz_router *args, const char *what) {
    return error == cudaErrorInvalidValue
               ? mz_kernels_fail(k, MZ_K_EINVAL, "%s: %d experts are too many for this device",
                                 what, (int)args->experts)
               : check(k, error, what);
}

#define LAUNCH_ROUTER(name)                                                                        \
    static mz_kstatus cuda_router_##name(mz_kernels *k, mz_kstream stream, const mz_router *args,  \
                                         void *workspace) {                                        \
        return check_router(                                                                       \
            k, mz_cuda_router_##name(device_of(k), stream_of(k, stream), args, workspace), args,   \
            "router_" #name);                                                                      \
    }
LAUNCH_ROUTER(forward)
LAUNCH_ROUTER(backward)

static mz_kstatus cuda_router_losses(mz_kernels *k, mz_kstream stream, const mz_router *args,
                                     float *loss, void *workspace) {
    return check_router(
        k, mz_cuda_router_losses(device_of(k), stream_of(k, stream), args, loss, workspace), args,
        "router_losses");
}

static mz_kstatus cuda_gate_norms(mz_kernels *k, mz_kstream stream, mz_dtype type, const void *z,
                                  int64_t tokens, int32_t experts, int64_t r, float *norm) {
    return check(
        k,
        mz_cuda_gate_norms(device_of(k), stream_of(k, stream), type, z, tokens, experts, r, norm),
        "gate_norms");
}

static mz_kstatus cuda_gate_norms_backward(mz_kernels *k, mz_kstream stream, mz_dtype type,
                                           const void *z, const float *norm, const float *dnorm,
                                           int64_t tokens, int32_t experts, int64_t r, void *dz) {
    return check(k,
                 mz_cuda_gate_norms_backward(device_of(k), stream_of(k, stream), type, z, norm,
                                             dnorm, tokens, experts, r, dz),
                 "gate_norms_backward");
}

static const mz_backend_ops cuda_ops = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .bind = cuda_bind,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .memory = cuda_memory,
    .copy = cuda_copy,
    .zero = cuda_zero,
    .native_stream = stream_of,
    .sync = cuda_sync,
    .wait = cuda_wait,
    .mark = cuda_mark,
    .elapsed = cuda_elapsed,
    .convert = cuda_convert,
    .row_norms = cuda_row_norms,
    .row_dots = cuda_row_dots,
    .pack_rows = cuda_pack_rows,
    .unpack_rows = cuda_unpack_rows,
    .combine_rows = cuda_combine_rows,
    .swiglu_forward = cuda_swiglu_forward,
    .swiglu_backward = cuda_swiglu_backward,
    .score_pairs = cuda_score_pairs,
    .group_pairs_workspace = cuda_group_pairs_workspace,
    .group_pairs = cuda_group_pairs,
    .prefix_sums_workspace = cuda_prefix_sums_workspace,
    .prefix_sums = cuda_prefix_sums,
    .select_workspace = cuda_select_pairs_workspace,
    .select_pairs = cuda_select_pairs,
    .arrange = cuda_arrange,
    .invert = cuda_invert,
    .tiles = cuda_tiles,
    .up_tiles = cuda_up_tiles,
    .grouped_gemm_workspace = cuda_grouped_gemm_workspace,
    .grouped_gemm = cuda_grouped_gemm,
    .expert_up_workspace = cuda_expert_up_workspace,
    .expert_up_forward = cuda_expert_up,
    .router_workspace = cuda_router_workspace,
    .router_forward = cuda_router_forward,
    .router_backward = cuda_router_backward,
    .router_losses = cuda_router_losses,
    .gate_norms = cuda_gate_norms,
    .gate_norms_backward = cuda_gate_norms_backward,
    .update_workspace = cuda_update_step_workspace,
    .update_step = cuda_update_step,
};

const mz_backend_ops *mz_cuda_ops(void) {
    return &cuda_ops;
}
