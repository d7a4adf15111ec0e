/* Bounds on the rows of the busiest rank: how far a plan is from the best there is.
 *
 * For a plan's own hosts the optimum is a maximum flow (balance.c), exact in whole rows.
 *
 * Over all placements of R ranks with S slots each: let L be the rows of the busiest rank of a plan
 * that computes every pair, where every expert has a host and a piece is what one instance computes
 * of its expert. Necessary for such a plan:
 *  1. R * L is at least the sum of all rows.
 *  2. An expert of n rows has at least ceil(n / L) pieces, on ranks of their own (so at most
 *     R), and at least one; all pieces together are at most R * S.
 *  3. Of those slots, the experts above L take what 2 says, and every other expert one; x are
 *     left over, so at most x experts of at most L rows are in several pieces. Among j * R + 1
 *     experts in one piece some rank holds j + 1 of them. Taking any x experts away from the
 *     falling order leaves an i-th largest of at least the (x + i)-th, so the j + 1 smallest of
 *     places x + 1 to x + j * R + 1 add up to at most L.
 * A plan for L is one for L + 1 too. So where a level fails a test, all plans lie above it; the
 * search only ever raises the bound past a level that failed, whatever other levels do. */
#include "sim/policy/parts.h"

#include <string.h>

mz_code mz_bound_hosts(mz_balance *b, const mz_plan *plan, const mz_load *load, int64_t *rows,
                       mz_err *err) {
    mz_code code = mz_balance_hosts(b, plan->ranks, plan->experts, plan->begin, plan->rank, err);
    return code == MZ_OK
               ? mz_balance_spread(b, load->total, NULL, NULL, NULL, NULL, NULL, rows, err)
               : code;
}

typedef struct all_placements {
    const int64_t *rows; /* [E] falling */
    int32_t experts, ranks;
    int64_t slots; /* of all ranks */
} all_placements;

static int64_t up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* Steps 2 and 3. */
static bool may_fit(const all_placements *p, int64_t L) {
    int32_t above = 0;
    int64_t left = p->slots - p->experts;
    for (; above < p->experts && p->rows[above] > L; above++) {
        const int64_t pieces = up(p->rows[above], L);
        if (pieces > p->ranks)
            return false;
        left -= pieces - 1;
    }
    if (left < 0)
        return false;
    for (int64_t j = 1; above + left + j * p->ranks < p->experts; j++) {
        int64_t sum = 0;
        for (int64_t i = 0; i <= j; i++)
            sum += p->rows[above + left + j * p->ranks - i];
        if (sum > L)
            return false;
    }
    return true;
}

/* Shell's sort, falling. */
static void sort_rows(int64_t *rows, int32_t n) {
    static const int32_t gaps[] = {1750, 701, 301, 132, 57, 23, 10, 4, 1};
    for (size_t k = 0; k < sizeof gaps / sizeof *gaps; k++)
        for (int32_t i = gaps[k]; i < n; i++) {
            const int64_t x = rows[i];
            int32_t at = i;
            for (; at >= gaps[k] && rows[at - gaps[k]] < x; at -= gaps[k])
                rows[at] = rows[at - gaps[k]];
            rows[at] = x;
        }
}

int64_t mz_bound_any(const mz_load *load, int32_t ranks, int32_t slots, int64_t *scratch) {
    int64_t low = (load->pairs + ranks - 1) / ranks, high = load->pairs;
    if (load->pairs == 0 || slots <= 0)
        return low;
    memcpy(scratch, load->total, sizeof(int64_t) * (size_t)load->experts);
    sort_rows(scratch, load->experts);
    const all_placements p = {scratch, load->experts, ranks, (int64_t)ranks * slots};
    if (may_fit(&p, low)) /* the common case */
        return low;
    for (low++; low < high;) {
        const int64_t middle = low + (high - low) / 2;
        if (may_fit(&p, middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}
