/* What both networks need to know of an exchange before it runs. */
#ifndef MIZAN_SIM_ENGINE_EXCHANGE_H
#define MIZAN_SIM_ENGINE_EXCHANGE_H

#include "sim/engine/network.h"

/* MZ_EINPUT when `exchange` cannot run on this machine: ranks not ascending or out of range, bytes
 * that are negative or not finite, messages not sorted or of ranks that are no members, traffic
 * over a port that the machine does not have. */
mz_code mz_exchange_check(const mz_topology *topology, const mz_exchange *exchange, mz_err *err);

/* Index of the member with `rank`, -1: none. `guess` is tried first, so that ranks asked in order
 * cost O(1), others O(log members). */
static inline int32_t mz_exchange_member(const mz_exchange *exchange, int32_t rank, int32_t guess) {
    if (guess >= 0 && guess < exchange->members && exchange->rank[guess] == rank) {
        return guess;
    }
    int32_t low = 0, high = exchange->members - 1;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (exchange->rank[middle] < rank) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return exchange->rank[low] == rank ? low : -1;
}

#endif
