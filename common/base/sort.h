/* Sorting without memory of its own: the library's qsort may allocate, which an event loop must
 * not. Pure; threads do not matter. */
#ifndef MIZAN_BASE_SORT_H
#define MIZAN_BASE_SORT_H

#include <stddef.h>

/* As qsort: `count` elements of `size` > 0 bytes at `base` (may be NULL where count is 0),
 * ascending by `compare`. Heapsort, O(count log count) at worst, O(count) when sorted already; not
 * stable: for an order that does not depend on where elements stood, `compare` is 0 only for
 * elements that may stand for one another. */
void mz_sort_in_place(void *base, size_t count, size_t size,
                      int (*compare)(const void *, const void *));

#endif
