/* Order and means of doubles; no NaN among them. Pure, O(n log n). */
#ifndef MIZAN_BASE_STAT_H
#define MIZAN_BASE_STAT_H

#include <stdint.h>

/* Ascending, in place; value may be NULL where count is 0. */
void mz_sort(double *value, int64_t count);
/* Mean without the `off` least and the `off` greatest; sorts. Equal values are their own mean,
 * exactly. NaN where none is left. */
double mz_middle_mean(double *value, int64_t count, int64_t off);

#endif
