/* List scheduling of equal tiles over SMs: each next tile goes to the SM that is free first. */
#ifndef MIZAN_SIM_COST_SCHEDULE_H
#define MIZAN_SIM_COST_SCHEDULE_H

#include <stdint.h>

enum { MZ_SCHEDULE_LEVELS = 32 };

/* SMs that become free at the same time, by time. */
typedef struct mz_schedule {
    int count;
    double free_at[MZ_SCHEDULE_LEVELS + 1];
    int64_t sms[MZ_SCHEDULE_LEVELS + 1];
} mz_schedule;

mz_schedule mz_schedule_start(int64_t sms);
/* Adds `tiles` tiles of equal `length` (> 0) behind what is there. O(levels^2) at worst,
 * independent of `tiles`. Exact while there are at most MZ_SCHEDULE_LEVELS different end times;
 * beyond, the two nearest become one at their weighted mean, which keeps the total work. */
void mz_schedule_add(mz_schedule *schedule, int64_t tiles, double length);
/* When the last SM is done. */
double mz_schedule_end(const mz_schedule *schedule);
/* The same where an SM runs faster while others idle: lengths are those of tiles while all are
 * busy; with a of S busy a tile takes 1 / (1 + (1 / alone - 1) (S - a) / (S - 1)) of its length, so
 * `alone` of it on the last one (0 < alone <= 1). */
double mz_schedule_end_alone(const mz_schedule *schedule, double alone);

#endif
