/* Bounds on the rows of the busiest rank: how far a plan is from the best there is.
 *
 * For a plan's own hosts the optimum is a maximum flow (balance.c), exact in whole rows.
 * Over all placements: let L be the rows of the busiest rank of any plan that computes every pair.
 * Then R * L is at least the sum of all rows; an expert of n rows has at least ceil(n / L) hosts,
 * each a slot of a rank of its own, so none needs more than R, and as every expert has a host, the
 * sum over experts of max(1, ceil(n / L)) is at most the R * slots there are. All three conditions
 * hold for every greater L too, so the least L that meets them is found by bisection; no plan lies
 * below it. */
#include "sim/policy/parts.h"

mz_code mz_bound_hosts(mz_balance *b, const mz_plan *plan, const mz_load *load, int64_t *rows,
                       mz_err *err) {
    mz_code code = mz_balance_hosts(b, plan->ranks, plan->experts, plan->begin, plan->rank, err);
    return code == MZ_OK
               ? mz_balance_spread(b, load->total, NULL, NULL, NULL, NULL, NULL, rows, err)
               : code;
}

/* O(E). */
static bool may_fit(const mz_load *load, int64_t rows, int32_t ranks, int64_t slots) {
    for (int32_t e = 0; e < load->experts; e++) {
        const int64_t hosts = (load->total[e] + rows - 1) / rows;
        if (hosts > ranks)
            return false;
        slots -= hosts > 1 ? hosts : 1;
    }
    return slots >= 0;
}

int64_t mz_bound_any(const mz_load *load, int32_t ranks, int32_t slots) {
    if (load->pairs == 0)
        return 0;
    const int64_t all = slots > 0 ? (int64_t)ranks * slots : INT64_MAX;
    int64_t low = (load->pairs + ranks - 1) / ranks, high = load->pairs;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (may_fit(load, middle, ranks, all))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}
