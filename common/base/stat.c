#include "common/base/stat.h"

#include <math.h>
#include <stdlib.h>

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void mz_sort(double *value, int64_t count) {
    if (count > 0)
        qsort(value, (size_t)count, sizeof *value, by_value);
}

double mz_middle_mean(double *value, int64_t count, int64_t off) {
    double sum = 0; /* over the middle value */
    if (count <= 2 * off)
        return NAN;
    mz_sort(value, count);
    for (int64_t i = off; i < count - off; i++)
        sum += value[i] - value[count / 2];
    return value[count / 2] + sum / (double)(count - 2 * off);
}
