/* The scheduler of emulator.h. Never built with -fsanitize=thread: it must be invisible to the race
 * detector, which it tells about fibers and barriers where CUEMU_TSAN is defined. */
#include "scheduler.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUEMU_ASAN
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define CUEMU_ASAN
#endif
#if defined(CUEMU_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

/* ---- the race detector --------------------------------------------------------------------------
 */
#if defined(CUEMU_TSAN)
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
}
#else
static void *__tsan_get_current_fiber(void) {
    return nullptr;
}
static void *__tsan_create_fiber(unsigned) {
    return nullptr;
}
static void __tsan_destroy_fiber(void *) {
}
static void __tsan_switch_to_fiber(void *, unsigned) {
}
static void __tsan_acquire(void *) {
}
static void __tsan_release(void *) {
}
static void AnnotateIgnoreReadsBegin(const char *, int) {
}
static void AnnotateIgnoreReadsEnd(const char *, int) {
}
#endif

namespace cuemu {

#if defined(CUEMU_TSAN)
static const bool watched = true;
#else
static const bool watched = false;
#endif

Fiber *current;
uint3 block_index;
dim3 block_dim, grid_dim;

enum : size_t { GUARD = 4096, STACK = 128 * 1024, INTERBLOCK_MOST = 7000, SHARED_VARIABLES = 64 };

struct Variable {
    const void *tag;
    void *memory;
};

/* Objects that barriers release and acquire for the race detector. Each barrier has its own: a
 * fiber that resumes late must not pick up what others already released at the next one, or missing
 * barriers would be hidden. */
struct Ordering {
    char start, end, barrier[64], warp[32][64];
    unsigned barriers, collectives[32];
};

static struct Scheduler {
    std::vector<Fiber> fibers;
    Fiber host;
#if !defined(__x86_64__)
    std::vector<ucontext_t> contexts;
    ucontext_t host_context;
#endif
    void (*call)(void *);
    void *argument;
    const char *kernel;
    char *stacks;
    size_t stacks_of; /* fibers that `stacks` has room for */
    std::map<const void *, size_t> allowed;
    /* of the block that runs */
    std::vector<Variable> variables;
    size_t static_bytes, dynamic_bytes;
    void *dynamic;
    char *arena; /* static shared memory of a block under the race detector */
    size_t arena_used;
    /* of the launch, under the race detector */
    bool interblock;
    Ordering ordering;
    std::vector<void *> pool;  /* fibers of the race detector, used again */
    std::vector<void *> spent; /* kept until the launch ends: a reused one would hide a race */
    std::vector<void *> later; /* memory to free when the launch ends, for the same reason */
} S;

[[noreturn]] void die(const char *what) {
    fprintf(stderr, "cuemu: kernel %s, block (%u,%u,%u): %s\n", S.kernel, block_index.x,
            block_index.y, block_index.z, what);
    int shown = 0;
    for (const Fiber &f : S.fibers) {
        if (f.state == DONE || shown++ == 8)
            continue;
        const char *where = f.state == AT_BARRIER    ? "at __syncthreads "
                            : f.state == AT_MBARRIER ? "at an mbarrier"
                            : f.state == IN_WARP     ? "in warp collective "
                                                     : "running";
        fprintf(stderr, "  thread (%u,%u,%u) lane %u: %s%s\n", f.thread.x, f.thread.y, f.thread.z,
                f.number & 31, where,
                f.state == AT_BARRIER ? f.site
                : f.state == IN_WARP  ? f.name
                                      : "");
        if (shown == 8)
            break;
    }
    abort();
}

/* ---- switching ----------------------------------------------------------------------------------
 */

#if defined(__x86_64__)
/* Saves the callee's registers on the stack that is left and takes those of the other. */
extern "C" void cuemu_switch(void **from, void *to);
__asm__(".text\n"
        ".globl cuemu_switch\n"
        ".type cuemu_switch,@function\n"
        "cuemu_switch:\n"
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp,(%rdi)\n"
        "movq %rsi,%rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n"
        ".size cuemu_switch,.-cuemu_switch\n");
#endif

static void finish_switch(Fiber *fiber) {
#if defined(CUEMU_ASAN)
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(fiber ? fiber->fake_stack : nullptr, &bottom, &size);
    if (fiber != &S.host) { /* only the host switches to fibers */
        S.host.stack = static_cast<char *>(const_cast<void *>(bottom));
        S.host.stack_size = size;
    }
#else
    (void)fiber;
#endif
}

static void switch_to(Fiber *from, Fiber *to, bool for_good) {
#if defined(CUEMU_ASAN)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from->fake_stack, to->stack,
                                   to->stack_size);
#else
    (void)for_good;
#endif
    __tsan_switch_to_fiber(to->race_detector, 1);
#if defined(__x86_64__)
    cuemu_switch(&from->stack_pointer, to->stack_pointer);
#else
    swapcontext(from == &S.host ? &S.host_context : &S.contexts[from->number],
                to == &S.host ? &S.host_context : &S.contexts[to->number]);
#endif
    finish_switch(from);
}

static void fiber_main() {
    finish_switch(nullptr);
    __tsan_acquire(&S.ordering.start);
    S.call(S.argument);
    warpgroup_thread_ends();
    __tsan_release(&S.ordering.end);
    current->state = DONE;
    switch_to(current, &S.host, true);
    abort();
}

static void make_context(Fiber &f) {
#if defined(__x86_64__)
    /* 16-byte aligned, so that fiber_main sees the stack as after a call; six registers. */
    void **top = reinterpret_cast<void **>(f.stack + f.stack_size - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(fiber_main);
    for (int i = 0; i < 6; i++)
        *--top = nullptr;
    f.stack_pointer = top;
#else
    ucontext_t &c = S.contexts[f.number];
    getcontext(&c);
    c.uc_stack.ss_sp = f.stack + GUARD;
    c.uc_stack.ss_size = f.stack_size - GUARD;
    c.uc_link = nullptr;
    makecontext(&c, fiber_main, 0);
#endif
}

void give_up_turn(State state) {
    Fiber *me = current;
    me->state = state;
    switch_to(me, &S.host, false);
}

void yield() {
    give_up_turn(RUNNING);
}

std::vector<Fiber> &fibers_of_block() {
    return S.fibers;
}
void order_release(char *order) {
    __tsan_release(order);
}
void order_acquire(char *order) {
    __tsan_acquire(order);
}
Unwatched::Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
}
Unwatched::~Unwatched() {
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

/* ---- barriers and collectives -------------------------------------------------------------------
 */

static void wait_at_barrier() {
    char *order = &S.ordering.barrier[S.ordering.barriers & 63];
    __tsan_release(order);
    give_up_turn(AT_BARRIER);
    __tsan_acquire(order);
}

void barrier(const char *site) {
    current->site = site;
    current->counts = false;
    wait_at_barrier();
}

int barrier_count(const char *site, int predicate, Count what) {
    current->site = site;
    current->counts = true;
    current->predicate = predicate;
    wait_at_barrier();
    const int with = current->predicate >> 16, all = current->predicate & 0xffff;
    return what == COUNT ? with : what == ALL ? with == all : with != 0;
}

/* True when every lane of the mask is in this collective. Looks at the lanes after the own one
 * first: these are the likely ones to be missing. */
static bool all_arrived(const Fiber *me) {
    const size_t warp = me->number & ~31u;
    for (unsigned i = 1; i <= 32; i++) {
        const unsigned lane = (me->number + i) % 32;
        if (!(me->mask >> lane & 1))
            continue;
        if (warp + lane >= S.fibers.size())
            die("a warp collective's mask names a lane beyond the block");
        const Fiber &other = S.fibers[warp + lane];
        if (other.state == DONE)
            die("a warp collective's mask names a lane that has exited");
        if (other.state != IN_WARP || other.mask != me->mask || other.resolve != me->resolve ||
            other.name != me->name)
            return false;
    }
    return true;
}

void collective(const char *name, Resolve resolve, unsigned mask, void *data, bool orders_memory) {
    Fiber *me = current;
    const unsigned warp = me->number / 32;
    if (!(mask >> (me->number & 31) & 1))
        die("a lane calls a warp collective with a mask that does not name it");
    me->name = name;
    me->resolve = resolve;
    me->mask = mask;
    me->data = data;
    me->state = IN_WARP;
    char *order = &S.ordering.warp[warp][S.ordering.collectives[warp] & 63];
    if (orders_memory)
        __tsan_release(order);
    if (all_arrived(me)) {
        void *parts[32];
        for (unsigned lane = 0; lane < 32; lane++)
            parts[lane] = mask >> lane & 1 ? S.fibers[warp * 32 + lane].data : nullptr;
        resolve(parts, mask);
        S.ordering.collectives[warp]++;
        for (unsigned lane = 0; lane < 32; lane++)
            if (parts[lane])
                S.fibers[warp * 32 + lane].state = RUNNING;
    } else {
        switch_to(me, &S.host, false);
    }
    if (orders_memory)
        __tsan_acquire(order);
}

/* ---- shared memory ------------------------------------------------------------------------------
 */

/* Shared memory starts undefined: NaN for floats, -1 for integers. */
static void *fresh(size_t bytes) {
    void *memory = nullptr;
    if (posix_memalign(&memory, 128, bytes ? bytes : 1))
        abort();
    memset(memory, 0xff, bytes);
    return memory;
}

void *shared_variable(const void *tag, size_t bytes) {
    for (const Variable &v : S.variables)
        if (v.tag == tag)
            return v.memory;
    S.static_bytes += bytes;
    if (S.static_bytes > SHARED_STATIC_MOST)
        die("more than 48 KiB of static shared memory");
    if (S.static_bytes + S.dynamic_bytes > device().shared_most)
        die("more shared memory than a block of this device has");
    if (S.variables.size() == SHARED_VARIABLES)
        die("more than 64 shared variables");
    void *memory;
    if (watched) { /* an allocation inside a fiber would look like a write by that fiber */
        memory = S.arena + S.arena_used;
        S.arena_used += (bytes + 127) / 128 * 128;
    } else {
        memory = fresh(bytes);
    }
    S.variables.push_back({tag, memory});
    return memory;
}

void *dynamic_shared() {
    return S.dynamic;
}

int allow_shared(const void *kernel, int bytes) {
    if (bytes < 0 || (size_t)bytes > device().shared_most)
        return cudaErrorInvalidValue;
    S.allowed[kernel] = (size_t)bytes;
    return cudaSuccess;
}

/* ---- blocks -------------------------------------------------------------------------------------
 */

static void map_stacks(size_t fibers) {
    if (S.stacks)
        munmap(S.stacks, S.stacks_of * STACK);
    void *memory = mmap(nullptr, fibers * STACK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    S.stacks = static_cast<char *>(memory);
    S.stacks_of = fibers;
    for (size_t i = 0; i < fibers; i++)
        mprotect(S.stacks + i * STACK, GUARD, PROT_NONE);
}

static void *race_detector_of(size_t i) {
    if (!watched)
        return nullptr;
    if (S.interblock) { /* takes milliseconds: only where blocks must be unordered */
        if (S.spent.size() >= INTERBLOCK_MOST)
            die("CUEMU_INTERBLOCK=1 takes at most 7000 threads a launch");
        S.spent.push_back(__tsan_create_fiber(0));
        return S.spent.back();
    }
    while (S.pool.size() <= i)
        S.pool.push_back(__tsan_create_fiber(0));
    return S.pool[i];
}

static void prepare(size_t i) {
    Fiber &f = S.fibers[i];
    f.state = RUNNING;
    f.counts = false;
    f.site = f.name = "";
    f.mask = 0;
    f.fake_stack = nullptr;
    f.copies.clear();
    f.groups.clear();
    f.waits = nullptr;
    warpgroup_thread_begins(f.warpgroup);
    f.number = (unsigned)i;
    f.thread = {(unsigned)(i % block_dim.x), (unsigned)(i / block_dim.x % block_dim.y),
                (unsigned)(i / block_dim.x / block_dim.y)};
    f.stack = S.stacks + i * STACK;
    f.stack_size = STACK;
#if defined(CUEMU_ASAN)
    __asan_unpoison_memory_region(f.stack + GUARD, STACK - GUARD);
#endif
    make_context(f);
    f.race_detector = race_detector_of(i);
}

/* Runs the warp's fibers until none can run; true if one has. */
static bool run_warp(unsigned warp, const std::vector<unsigned> &lanes) {
    bool any = false;
    for (bool moved = true; moved; any |= moved) {
        moved = false;
        for (unsigned lane : lanes) {
            const size_t i = warp * 32 + lane;
            if (i >= S.fibers.size() || S.fibers[i].state != RUNNING)
                continue;
            current = &S.fibers[i];
            switch_to(&S.host, current, false);
            moved = true;
        }
    }
    return any;
}

/* Runs every fiber that can run, until none can; one warp may wake another at an mbarrier. */
static void run_turn(const std::vector<unsigned> &warps, const std::vector<unsigned> &lanes) {
    for (bool any = true; any;) {
        any = false;
        for (unsigned warp : warps)
            any |= run_warp(warp, lanes);
    }
}

/* Lets the fibers past their barrier; false when all have exited. */
static bool pass_barrier() {
    int waiting = 0, with = 0;
    size_t done = 0;
    const char *site = nullptr;
    for (const Fiber &f : S.fibers) {
        if (f.state == DONE) {
            done++;
            continue;
        }
        if (f.state == AT_MBARRIER)
            die("deadlock: threads wait at an mbarrier for a phase that nothing completes");
        if (f.state != AT_BARRIER)
            die("deadlock: threads wait in a warp collective that its mask can never complete");
        if (site && strcmp(site, f.site))
            die("threads of one block wait at different __syncthreads()");
        site = f.site;
        waiting++;
        with += f.counts && f.predicate;
    }
    if (!waiting)
        return false;
    if (done)
        die("some threads exited while others wait at __syncthreads()");
    S.ordering.barriers++;
    for (Fiber &f : S.fibers) {
        f.state = RUNNING;
        if (f.counts)
            f.predicate = with << 16 | waiting;
    }
    return true;
}

static void begin_block(size_t shared, unsigned seed, bool first) {
    S.static_bytes = 0;
    S.dynamic_bytes = shared;
    S.dynamic = shared ? fresh(shared) : nullptr;
    async_begin(S.dynamic, shared, seed, first);
    warpgroups_begin();
    if (watched) {
        S.arena = static_cast<char *>(fresh(SHARED_STATIC_MOST + SHARED_VARIABLES * 128));
        S.arena_used = 0;
        if (S.interblock && !first)
            map_stacks(S.stacks_of); /* no traces of the last block's fibers */
    }
    if (!S.interblock || first)
        __tsan_release(&S.ordering.start);
    for (size_t i = 0; i < S.fibers.size(); i++)
        prepare(i);
}

static void end_block() {
    async_end();
    warpgroups_end();
    std::vector<void *> memory{S.dynamic};
    if (watched)
        memory.push_back(S.arena);
    else
        for (const Variable &v : S.variables)
            memory.push_back(v.memory);
    if (S.interblock) {
        S.later.insert(S.later.end(), memory.begin(), memory.end());
    } else {
        __tsan_acquire(&S.ordering.end);
        for (void *m : memory)
            free(m);
    }
    S.variables.clear();
    S.dynamic = nullptr;
}

static void end_launch() {
    __tsan_acquire(&S.ordering.end);
    for (void *m : S.later)
        free(m);
    for (void *fiber : S.spent)
        __tsan_destroy_fiber(fiber);
    S.later.clear();
    S.spent.clear();
    current = nullptr;
}

/* ---- launches -----------------------------------------------------------------------------------
 */

static int check_launch(const void *kernel, dim3 grid, dim3 block, size_t shared) {
    const size_t threads = (size_t)block.x * block.y * block.z;
    if (threads == 0 || threads > 1024 || block.z > 64)
        return cudaErrorInvalidConfiguration;
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    const auto allowed = S.allowed.find(kernel);
    if (shared > (allowed == S.allowed.end() ? SHARED_STATIC_MOST : allowed->second))
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

/* In which order blocks, warps and lanes run. */
struct Order {
    unsigned seed;
    std::mt19937 random;
    std::vector<unsigned> blocks, warps, lanes;

    Order(unsigned seed_, size_t block_count, size_t threads)
        : seed(seed_), random(seed_), warps((threads + 31) / 32), lanes(32) {
        std::iota(warps.begin(), warps.end(), 0u);
        std::iota(lanes.begin(), lanes.end(), 0u);
        if (seed > 1) {
            blocks.resize(block_count);
            std::iota(blocks.begin(), blocks.end(), 0u);
            std::shuffle(blocks.begin(), blocks.end(), random);
        } else if (seed == 1) {
            std::reverse(warps.begin(), warps.end());
            std::reverse(lanes.begin(), lanes.end());
        }
    }
    size_t block(size_t i, size_t block_count) {
        if (seed <= 1)
            return seed == 1 ? block_count - 1 - i : i;
        std::shuffle(warps.begin(), warps.end(), random);
        std::shuffle(lanes.begin(), lanes.end(), random);
        return blocks[i];
    }
};

int run(const char *name, const void *kernel, dim3 grid, dim3 block, size_t shared,
        void (*call)(void *), void *argument) {
    if (const int error = check_launch(kernel, grid, block, shared))
        return error;
    S.kernel = name;
    if (current)
        die("a kernel launches a kernel");
    const size_t threads = (size_t)block.x * block.y * block.z;
    const size_t blocks = (size_t)grid.x * grid.y * grid.z;
    const char *seed = getenv("CUEMU_SEED"), *interblock = getenv("CUEMU_INTERBLOCK");
    S.interblock = watched && interblock && *interblock == '1';
    if (S.stacks_of < threads)
        map_stacks(threads);
    S.fibers.assign(threads, Fiber{});
#if !defined(__x86_64__)
    S.contexts.resize(threads);
#endif
    S.call = call;
    S.argument = argument;
    block_dim = block;
    grid_dim = grid;
    S.host.race_detector = __tsan_get_current_fiber();
    Order order(seed ? (unsigned)strtoul(seed, nullptr, 0) : 0, blocks, threads);
    for (size_t q = 0; q < blocks; q++) {
        const size_t i = order.block(q, blocks);
        block_index = {(unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y),
                       (unsigned)(i / grid.x / grid.y)};
        begin_block(shared, order.seed, q == 0);
        do
            run_turn(order.warps, order.lanes);
        while (async_progress() || pass_barrier());
        end_block();
    }
    end_launch();
    return cudaSuccess;
}

} /* namespace cuemu */
