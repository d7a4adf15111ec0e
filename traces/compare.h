/* In which statistics two traces differ, and by how much. */
#ifndef MIZAN_TRACES_COMPARE_H
#define MIZAN_TRACES_COMPARE_H

#include "traces/stats.h"

/* One metric of two traces, means over layers. Within: they differ by no more than
 * mz_stats_names[m].tolerance (relative ones: of the larger magnitude), or neither has it. A metric
 * that only one trace has is not compared. */
typedef struct mz_stats_difference {
    double a, b, difference; /* b - a */
    bool compared, within;
} mz_stats_difference;

/* differences[MZ_STATS_METRICS]; returns how many compared metrics are not within. */
int mz_stats_compare(const mz_trace_stats *a, const mz_trace_stats *b,
                     mz_stats_difference *differences);

void mz_stats_compare_print(const mz_stats_difference *differences, FILE *out);
/* Schema "mizan-trace-compare/1"; NULL when memory is short. */
json_t *mz_stats_compare_json(const char *path_a, const char *path_b,
                              const mz_stats_difference *differences, int outside);

#endif
