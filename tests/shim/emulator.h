/* Runs the threads of CUDA blocks on the CPU: every thread of a block is a fiber on one host
 * thread, blocks run one after another. A fiber runs until it meets a barrier or a warp collective,
 * so a run is deterministic for a given seed; the order of blocks, warps and lanes follows
 * CUEMU_SEED (0: natural, 1: reversed, else shuffled), which exposes missing synchronisation.
 *
 * What is reported, with the kernel, the block and where its threads stand, before abort: barriers
 * in divergent code, barriers that threads which have exited would miss, collectives whose mask
 * names lanes that never come, lanes not in their own mask, waits at an mbarrier that nothing will
 * complete, copies into memory that a product in flight reads, instructions that the device does
 * not have, and what warpgroup.h lists.
 *
 * Built with -DCUEMU_TSAN and without -fsanitize=thread, beside kernels built with it, the
 * scheduler announces fibers and barriers to the thread sanitizer, which then reports races between
 * the threads of a block, and with CUEMU_INTERBLOCK=1 also between blocks (at most 7000 threads a
 * launch, slow). */
#ifndef MIZAN_TESTS_SHIM_EMULATOR_H
#define MIZAN_TESTS_SHIM_EMULATOR_H

#include "cuda_runtime_api.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <type_traits>
#include <vector>

/* Code of the emulation itself: invisible to the race detector. */
#define CUEMU_RUNTIME __attribute__((no_sanitize("thread")))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {
    }
};

namespace cuemu {

enum : size_t { SHARED_STATIC_MOST = 48 * 1024 };

/* What differs from device to device. */
struct Device {
    int capability;     /* 10 * major + minor */
    size_t shared_most; /* bytes that a block may ask for */
};
const Device &device(); /* as CUEMU_CAPABILITY is now */

enum State : uint8_t { RUNNING, AT_BARRIER, AT_MBARRIER, IN_WARP, DONE };

/* Serves all lanes of a collective at once; data[lane] for lanes in the mask. */
typedef void (*Resolve)(void *const data[32], unsigned mask);

/* A copy to shared memory that has been asked for and not yet waited for. */
struct Copy {
    void *to;
    const void *from; /* NULL: zeros */
    unsigned thread;  /* whose it is */
};

/* A wgmma: descriptors of its operands, columns, and whether an operand is MN-major. */
struct Wgmma {
    uint64_t a, b;
    int n;
    bool a_lines, b_lines;
};

/* A thread's part of a warpgroup's state. */
struct Warpgroup {
    std::vector<Wgmma> products; /* in flight */
    std::vector<size_t> groups;  /* for each committed group, how many of `products` came by then */
    float *sums;                 /* of the products in flight: the registers, poisoned meanwhile */
    std::vector<float> shadow;   /* their true values */
    size_t issued;               /* wgmmas so far */
    uint64_t proxy_fence;        /* when it last called fence.proxy.async */
    int registers;               /* by setmaxnreg; 0: as launched */
    bool fenced;                 /* wgmma.fence since the sums were delivered */
};

/* One CUDA thread. */
struct Fiber {
    void *stack_pointer;
    uint3 thread;
    unsigned number; /* in the block */
    State state;
    bool counts;         /* its barrier asks how many have `predicate` */
    int predicate;       /* after the barrier: how many did << 16 | how many came */
    const char *site;    /* file:line of the barrier it waits at */
    const char *name;    /* of the collective it waits in */
    Resolve resolve;     /* of that collective */
    unsigned mask;       /* of that collective */
    void *data;          /* its part of that collective */
    char *stack;         /* lowest address */
    size_t stack_size;   /* bytes */
    void *fake_stack;    /* of the address sanitizer */
    void *race_detector; /* the thread sanitizer's fiber */
    std::vector<Copy> copies;
    std::vector<size_t> groups; /* for each committed group, how many of `copies` came by then */
    const uint64_t *waits;      /* the mbarrier it waits at */
    Warpgroup warpgroup;
};

extern Fiber *current;
extern uint3 block_index;
extern dim3 block_dim, grid_dim;

void barrier(const char *site);
enum Count { COUNT, ALL, ANY };
int barrier_count(const char *site, int predicate, Count what);
/* Waits until all lanes of the mask are in the same collective. */
void collective(const char *name, Resolve resolve, unsigned mask, void *data, bool orders_memory);
void yield();
[[noreturn]] void die(const char *what);

/* ---- mbarriers and copies that arrive at them ---------------------------------------------------
 * Copies that arrive at an mbarrier complete when no thread can go on without them, in an order of
 * the seed; from the start until then their target counts as unreadable. */
void mbarrier_init(const uint64_t *barrier, unsigned count);
void mbarrier_arrive(const uint64_t *barrier);
void mbarrier_arrive_copied(const uint64_t *barrier);
void mbarrier_wait(const uint64_t *barrier, unsigned parity);
void copy_started(void *shared);
void copy_done(const Copy &copy); /* after its bytes were written */

/* Dynamic shared memory as the 32-bit addresses of PTX; where it starts depends on the seed and is
 * a multiple of 16 alone. */
unsigned shared_address(const void *shared);
const char *shared_pointer(unsigned address);

/* The block's copy of the static shared variable that `tag` stands for. */
void *shared_variable(const void *tag, size_t bytes);
void *dynamic_shared();

int run(const char *name, const void *kernel, dim3 grid, dim3 block, size_t shared,
        void (*call)(void *), void *argument);
int allow_shared(const void *kernel, int bytes);

/* runtime.cpp: 0, or why nothing can be launched there now. Like cudaGetLastError an error of an
 * earlier call that nobody has asked for counts. */
int enter_stream(const void *stream);

/* Arguments are copied when the kernel is launched, as on a device. */
template <class... P, class... A>
int launch(const char *name, const void *stream, dim3 grid, dim3 block, size_t shared,
           void (*kernel)(P...), A &&...arguments) {
    if (const int error = enter_stream(stream))
        return error;
    struct Call {
        void (*kernel)(P...);
        std::tuple<std::decay_t<P>...> arguments;
    } call{kernel, std::tuple<std::decay_t<P>...>(arguments...)};
    return run(
        name, reinterpret_cast<const void *>(kernel), grid, block, shared,
        [](void *p) {
            Call *c = static_cast<Call *>(p);
            std::apply(c->kernel, c->arguments);
        },
        &call);
}

} /* namespace cuemu */

#endif
