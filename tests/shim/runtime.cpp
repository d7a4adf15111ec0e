/* The CUDA runtime API of cuda_runtime_api.h on the host's memory. */
#include "cuda_runtime_api.h"
#include "emulator.h"

#include <map>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUEMU_ASAN
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define CUEMU_ASAN
#endif
#if defined(CUEMU_ASAN)
#include <sanitizer/asan_interface.h>
#else
#define __asan_poison_memory_region(p, n) ((void)(p), (void)(n))
#define __asan_unpoison_memory_region(p, n) ((void)(p), (void)(n))
#endif

struct CUstream_st {
    int device;
};
struct CUevent_st {
    int device;
    unsigned flags;
    bool recorded;
    double seconds;
};

namespace {

enum : size_t { ALIGNMENT = 256, GUARD = 256, DEVICE_BYTES = (size_t)8 << 30 };
enum : unsigned char { UNWRITTEN = 0xff, GUARDED = 0xa5 };
enum : int { DEVICES = 2, PROCESSORS = 4, VERSION = 13000 };

struct Allocation {
    size_t bytes;
    int device;
};
std::map<uintptr_t, Allocation> allocations;
size_t allocated[DEVICES];
/* Of the calling thread, as CUDA has them. */
thread_local cudaError_t last_error;
thread_local int current_device;

cudaError_t said(cudaError_t error) {
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

/* True if [p, p + bytes) lies within one allocation. */
bool on_device(const void *p, size_t bytes) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(p);
    auto after = allocations.upper_bound(at);
    if (after == allocations.begin())
        return false;
    const auto it = --after;
    const size_t offset = at - it->first;
    return offset <= it->second.bytes && bytes <= it->second.bytes - offset;
}

/* Work on this stream may begin: it is one of the current device. */
cudaError_t entered(cudaStream_t stream) {
    if (!stream) {
        fprintf(stderr, "cuemu: work on the default stream, which waits for all others\n");
        abort();
    }
    return said(stream == cudaStreamLegacy || stream->device == current_device
                    ? cudaSuccess
                    : cudaErrorInvalidResourceHandle);
}

/* The guard after an allocation starts at its last byte, not at a round address. */
void check_guards(const char *memory, size_t bytes) {
    for (size_t i = 0; i < GUARD; i++) {
        const bool before = (unsigned char)memory[-(ptrdiff_t)i - 1] != GUARDED;
        if (!before && (unsigned char)memory[bytes + i] == GUARDED)
            continue;
        fprintf(stderr, "cuemu: device memory of %zu bytes was written %zu bytes %s\n", bytes,
                i + 1, before ? "before its start" : "past its end");
        abort();
    }
}

double now() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

} /* namespace */

/* CUDA C++ Programming Guide, technical specifications per compute capability. */
const cuemu::Device &cuemu::device() {
    static const Device devices[] = {
        {80, 163 * 1024}, {89, 99 * 1024}, {90, 227 * 1024}, {100, 227 * 1024}};
    const char *named = getenv("CUEMU_CAPABILITY");
    const int capability = named ? atoi(named) : 90;
    for (const Device &d : devices)
        if (d.capability == capability)
            return d;
    fprintf(stderr, "cuemu: CUEMU_CAPABILITY=%s is none of 80, 89, 90, 100\n", named);
    abort();
}

/* ---- errors -------------------------------------------------------------------------------------
 */

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorInvalidValue:
        return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
        return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver:
        return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
        return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
        return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
        return "cudaErrorInvalidResourceHandle";
    case cudaErrorLaunchOutOfResources:
        return "cudaErrorLaunchOutOfResources";
    case cudaErrorLaunchFailure:
        return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported:
        return "cudaErrorNotSupported";
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    return cudaGetErrorName(error);
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

cudaError_t cudaGetLastError(void) {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

/* ---- the device ---------------------------------------------------------------------------------
 */

cudaError_t cudaDriverGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = DEVICES;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= DEVICES)
        return said(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

int cuemu_device_of(const void *memory) {
    const auto it = allocations.find(reinterpret_cast<uintptr_t>(memory));
    return it == allocations.end() ? -1 : it->second.device;
}

int cuemu::enter_stream(const void *stream) {
    entered(static_cast<cudaStream_t>(const_cast<void *>(stream)));
    return cudaGetLastError();
}

cudaError_t cudaDeviceSynchronize(void) {
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= DEVICES)
        return said(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = cuemu::SHARED_STATIC_MOST;
        return cudaSuccess;
    case cudaDevAttrWarpSize:
        *value = 32;
        return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
        *value = PROCESSORS;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = cuemu::device().capability / 10;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = cuemu::device().capability % 10;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = (int)cuemu::device().shared_most;
        return cudaSuccess;
    }
    return said(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *facts, int device) {
    if (device < 0 || device >= DEVICES)
        return said(cudaErrorInvalidDevice);
    *facts = {};
    snprintf(facts->name, sizeof facts->name, "emulated device");
    facts->totalGlobalMem = DEVICE_BYTES;
    facts->sharedMemPerBlock = cuemu::SHARED_STATIC_MOST;
    facts->sharedMemPerBlockOptin = cuemu::device().shared_most;
    facts->warpSize = 32;
    facts->maxThreadsPerBlock = 1024;
    facts->major = cuemu::device().capability / 10;
    facts->minor = cuemu::device().capability % 10;
    facts->multiProcessorCount = PROCESSORS;
    return cudaSuccess;
}

/* ---- memory -------------------------------------------------------------------------------------
 */

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    *memory = nullptr;
    if (bytes > DEVICE_BYTES - allocated[current_device])
        return said(cudaErrorMemoryAllocation);
    void *whole = nullptr;
    if (posix_memalign(&whole, ALIGNMENT, GUARD + bytes + GUARD))
        return said(cudaErrorMemoryAllocation);
    char *start = static_cast<char *>(whole) + GUARD;
    memset(whole, GUARDED, GUARD);
    memset(start, UNWRITTEN, bytes);
    memset(start + bytes, GUARDED, GUARD);
    __asan_poison_memory_region(whole, GUARD);
    __asan_poison_memory_region(start + bytes, GUARD);
    allocations[reinterpret_cast<uintptr_t>(start)] = {bytes, current_device};
    allocated[current_device] += bytes;
    *memory = start;
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
    if (!memory)
        return cudaSuccess;
    const auto it = allocations.find(reinterpret_cast<uintptr_t>(memory));
    if (it == allocations.end())
        return said(cudaErrorInvalidValue);
    char *start = static_cast<char *>(memory);
    const size_t bytes = it->second.bytes;
    __asan_unpoison_memory_region(start - GUARD, GUARD);
    __asan_unpoison_memory_region(start + bytes, GUARD);
    check_guards(start, bytes);
    allocated[it->second.device] -= bytes;
    allocations.erase(it);
    free(start - GUARD);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all) {
    *free_bytes = DEVICE_BYTES - allocated[current_device];
    *all = DEVICE_BYTES;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    if (const cudaError_t error = entered(stream))
        return error;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault &&
        (to_device != on_device(to, bytes) || from_device != on_device(from, bytes)))
        return said(cudaErrorInvalidValue);
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    if (const cudaError_t error = entered(stream))
        return error;
    if (!on_device(memory, bytes))
        return said(cudaErrorInvalidValue);
    memset(memory, value, bytes);
    return cudaSuccess;
}

/* ---- streams and events -------------------------------------------------------------------------
 */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    *stream = static_cast<cudaStream_t>(malloc(sizeof **stream));
    if (!*stream)
        return said(cudaErrorMemoryAllocation);
    (*stream)->device = current_device;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)stream, (void)flags;
    return said(event ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = static_cast<cudaEvent_t>(malloc(sizeof **event));
    if (!*event)
        return said(cudaErrorMemoryAllocation);
    **event = {current_device, flags, false, 0};
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (const cudaError_t error = entered(stream))
        return error;
    if (!event || event->device != current_device)
        return said(cudaErrorInvalidResourceHandle);
    event->recorded = true;
    event->seconds = now();
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return said(event ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    if (!from || !to || !from->recorded || !to->recorded ||
        ((from->flags | to->flags) & cudaEventDisableTiming))
        return said(cudaErrorInvalidResourceHandle);
    *ms = (float)(1e3 * (to->seconds - from->seconds));
    return cudaSuccess;
}
