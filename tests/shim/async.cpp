/* Barriers in shared memory, copies that arrive at them, and who reads and writes dynamic shared
 * memory in the background. Never built with -fsanitize=thread. */
#include "scheduler.h"
#include "warpgroup.h"

#include <map>

namespace cuemu {

enum : unsigned { DYNAMIC_FIRST = 1024, ORDERS = 64 };

/* The arrivals of each phase release to an object of their own, as at __syncthreads. */
struct Barrier {
    unsigned count, pending;
    uint64_t phases; /* that have completed */
    char order[ORDERS];
};

/* 16 bytes of dynamic shared memory. */
struct Piece {
    uint64_t written; /* by a copy, when; 0: by none */
    unsigned writer;  /* the thread whose copy it was */
    unsigned readers; /* lanes whose product in flight reads it */
    bool pending;     /* a copy into it is in flight */
};

/* Copies that arrive at a barrier when they are complete. */
struct Arrival {
    unsigned thread;
    const uint64_t *barrier;
    std::vector<Copy> copies;
};

static struct Async {
    std::map<const uint64_t *, Barrier> barriers;
    std::vector<Piece> pieces;
    std::vector<Arrival> arrivals; /* in the order asked for */
    char *dynamic;
    size_t bytes;
    unsigned address; /* of dynamic shared memory */
    unsigned seed;
    std::mt19937 random;
    uint64_t clock;
} A;

/* ---- barriers -----------------------------------------------------------------------------------
 */

static Barrier &barrier_at(const uint64_t *at) {
    const auto found = A.barriers.find(at);
    if (found == A.barriers.end())
        die("an mbarrier that has not been initialised");
    return found->second;
}

void mbarrier_init(const uint64_t *at, unsigned count) {
    const Unwatched unwatched;
    if (reinterpret_cast<uintptr_t>(at) % 8 || count == 0 || count >= 1u << 20)
        die("mbarrier.init: an address that is not a multiple of 8, or no such count");
    if (A.barriers.count(at))
        die("mbarrier.init of a barrier that is in use");
    A.barriers[at] = Barrier{count, count, 0, {}};
}

/* One arrival; true if it completed the phase and woke a thread. */
static bool arrive(const uint64_t *at) {
    Barrier &b = barrier_at(at);
    bool woken = false;
    if (--b.pending > 0)
        return false;
    b.pending = b.count;
    b.phases++;
    for (Fiber &f : fibers_of_block())
        if (f.state == AT_MBARRIER && f.waits == at) {
            f.state = RUNNING;
            woken = true;
        }
    return woken;
}

static void release(const uint64_t *at) {
    Barrier &b = barrier_at(at);
    order_release(&b.order[b.phases % ORDERS]);
}

void mbarrier_arrive(const uint64_t *at) {
    release(at);
    arrive(at);
}

void mbarrier_wait(const uint64_t *at, unsigned parity) {
    Barrier &b = barrier_at(at);
    if (parity > 1)
        die("mbarrier.try_wait: a parity that is neither 0 nor 1");
    while (b.phases % 2 == parity) {
        current->waits = at;
        give_up_turn(AT_MBARRIER);
    }
    if (b.phases > 0)
        order_acquire(&b.order[(b.phases - 1) % ORDERS]);
}

/* ---- copies -------------------------------------------------------------------------------------
 */

static Piece *piece_at(const void *shared) {
    const size_t offset = (size_t)(static_cast<const char *>(shared) - A.dynamic);
    return A.dynamic && offset < A.bytes ? &A.pieces[offset / 16] : nullptr;
}

void copy_started(void *shared) {
    Piece *p = piece_at(shared);
    if (!p)
        return;
    if (p->readers)
        die("a copy overwrites shared memory that a wgmma in flight reads");
    p->pending = true;
}

void copy_done(const Copy &copy) {
    if (Piece *p = piece_at(copy.to)) {
        p->pending = false;
        p->written = ++A.clock;
        p->writer = copy.thread;
    }
}

/* Completes an arrival and those that its thread asked for before; true if a thread was woken. */
static bool complete(size_t chosen) {
    const unsigned thread = A.arrivals[chosen].thread;
    bool woken = false;
    for (size_t i = 0, left = chosen + 1; left > 0; left--) {
        if (A.arrivals[i].thread != thread) {
            i++;
            continue;
        }
        const Arrival done = A.arrivals[i];
        A.arrivals.erase(A.arrivals.begin() + (ptrdiff_t)i);
        for (const Copy &copy : done.copies) {
            if (copy.from)
                memcpy(copy.to, copy.from, 16);
            else
                memset(copy.to, 0, 16);
            copy_done(copy);
        }
        woken |= arrive(done.barrier);
    }
    return woken;
}

void mbarrier_arrive_copied(const uint64_t *at) {
    const Unwatched unwatched;
    if (!current->groups.empty())
        die("copies of one thread both committed and arriving, which this emulation does not have");
    release(at);
    A.arrivals.push_back(Arrival{current->number, at, current->copies});
    current->copies.clear();
    if (A.seed > 1 && A.random() % 4 == 0)
        complete(A.arrivals.size() - 1);
}

bool async_progress() {
    const Unwatched unwatched;
    bool woken = false;
    while (!woken && !A.arrivals.empty()) {
        const size_t n = A.arrivals.size();
        woken = complete(A.seed == 0 ? 0 : A.seed == 1 ? n - 1 : A.random() % n);
    }
    return woken;
}

/* ---- products -----------------------------------------------------------------------------------
 */

unsigned shared_address(const void *shared) {
    const size_t offset = (size_t)(static_cast<const char *>(shared) - A.dynamic);
    if (!A.dynamic || offset >= A.bytes)
        die("the address of something that is not dynamic shared memory");
    return A.address + (unsigned)offset;
}

const char *shared_pointer(unsigned address) {
    if (!A.dynamic || address < A.address || address - A.address + 16 > A.bytes)
        die("a wgmma reads outside of dynamic shared memory");
    return A.dynamic + (address - A.address);
}

void fence_async_proxy() {
    current->warpgroup.proxy_fence = ++A.clock;
}

void wgmma_reads(const Chunk &chunk, bool start) {
    Piece *p = piece_at(chunk.at);
    if (!start) {
        p->readers--;
        return;
    }
    if (p->pending)
        die("a wgmma reads shared memory that a copy in flight writes");
    if (p->written > current->warpgroup.proxy_fence &&
        p->written > fibers_of_block()[p->writer].warpgroup.proxy_fence)
        die("a wgmma reads copied shared memory without a fence.proxy.async in between");
    p->readers++;
}

/* ---- blocks -------------------------------------------------------------------------------------
 */

void async_begin(void *dynamic, size_t bytes, unsigned seed, bool first) {
    A.barriers.clear();
    A.arrivals.clear();
    A.pieces.assign((bytes + 15) / 16, Piece{});
    A.dynamic = static_cast<char *>(dynamic);
    A.bytes = bytes;
    A.address = DYNAMIC_FIRST + 16 * ((5 + 29 * seed) % 64);
    if (first)
        A.random.seed(seed);
    A.seed = seed;
}

void async_end() {
    if (!A.arrivals.empty())
        die("a block ends while copies that it started are in flight");
}

} /* namespace cuemu */
