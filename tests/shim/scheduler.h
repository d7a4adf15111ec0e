/* What the parts of the emulator share: internal to tests/shim. */
#ifndef MIZAN_TESTS_SHIM_SCHEDULER_H
#define MIZAN_TESTS_SHIM_SCHEDULER_H

#include "emulator.h"

#include <random>

namespace cuemu {

/* emulator.cpp */
std::vector<Fiber> &fibers_of_block();
void give_up_turn(State state);
void order_release(char *order); /* to the race detector */
void order_acquire(char *order);
/* While one lives the race detector does not see this thread's memory come and go: what one thread
 * allocates for the emulation another may free. */
struct Unwatched {
    Unwatched();
    ~Unwatched();
    Unwatched(const Unwatched &) = delete;
    Unwatched &operator=(const Unwatched &) = delete;
};

/* async.cpp: of the block that runs */
void async_begin(void *dynamic, size_t bytes, unsigned seed, bool first);
/* Lets copies that threads wait for complete until one of these can go on; false: none can. */
bool async_progress();
void async_end();

/* warpgroup.cpp */
void warpgroups_begin();
void warpgroup_thread_begins(Warpgroup &w);
void warpgroup_thread_ends();
void warpgroups_end();

} /* namespace cuemu */

#endif
