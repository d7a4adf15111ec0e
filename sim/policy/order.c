/* Indices by falling key: a merge sort from the bottom up, stable and without memory of its own. */
#include "sim/policy/parts.h"

void mz_order_falling(const double *key, int32_t n, int32_t *order, int32_t *scratch) {
    int32_t *from = order, *to = scratch;
    for (int32_t i = 0; i < n; i++)
        order[i] = i;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t begin = 0; begin < n; begin += 2 * width) {
            const int64_t middle = begin + width < n ? begin + width : n;
            const int64_t end = middle + width < n ? middle + width : n;
            int64_t a = begin, b = middle;
            for (int64_t at = begin; at < end; at++) {
                const bool left = b >= end || (a < middle && key[from[a]] >= key[from[b]]);
                to[at] = from[left ? a++ : b++];
            }
        }
        int32_t *t = from;
        from = to;
        to = t;
    }
    for (int32_t i = 0; from != order && i < n; i++)
        order[i] = from[i];
}
