#include "sim/cost/schedule.h"

#include <math.h>

mz_schedule mz_schedule_start(int64_t sms) {
    mz_schedule schedule = {.count = 1};
    schedule.sms[0] = sms;
    return schedule;
}

static void insert(mz_schedule *s, double free_at, int64_t sms) {
    int at = s->count;
    while (at > 0 && s->free_at[at - 1] > free_at)
        at--;
    if (at > 0 && s->free_at[at - 1] == free_at) {
        s->sms[at - 1] += sms;
        return;
    }
    for (int i = s->count; i > at; i--) {
        s->free_at[i] = s->free_at[i - 1];
        s->sms[i] = s->sms[i - 1];
    }
    s->free_at[at] = free_at;
    s->sms[at] = sms;
    s->count++;
}

static void remove_level(mz_schedule *s, int at) {
    s->count--;
    for (int i = at; i < s->count; i++) {
        s->free_at[i] = s->free_at[i + 1];
        s->sms[i] = s->sms[i + 1];
    }
}

static void merge_nearest(mz_schedule *s) {
    int best = 0;
    for (int i = 1; i + 1 < s->count; i++)
        if (s->free_at[i + 1] - s->free_at[i] < s->free_at[best + 1] - s->free_at[best])
            best = i;
    int64_t sms = s->sms[best] + s->sms[best + 1];
    s->free_at[best] +=
        (s->free_at[best + 1] - s->free_at[best]) * (double)s->sms[best + 1] / (double)sms;
    s->sms[best] = sms;
    remove_level(s, best + 1);
}

/* List scheduling starts the `tiles` earliest of the possible starts free_at + i * length. Poured
 * as water they would reach `level`; every start below level - length is among them. Gives these
 * out and returns the tiles that are left, at most about one per SM. */
static int64_t fill_below_water(mz_schedule *s, int64_t tiles, double length) {
    double volume = (double)tiles * length, level = 0;
    int64_t sms = 0;
    int wet = 0;
    while (wet < s->count && (wet == 0 || level > s->free_at[wet])) {
        volume += (double)s->sms[wet] * s->free_at[wet];
        sms += s->sms[wet];
        level = volume / (double)sms;
        wet++;
    }
    mz_schedule filled = {0};
    for (int i = 0; i < s->count; i++) {
        double whole = 0;
        if (i < wet) /* a hair less than the quotient: rounding must not give out too many */
            whole = floor((level - s->free_at[i]) / length - 1e-9);
        if (whole > 0)
            tiles -= (int64_t)whole * s->sms[i];
        insert(&filled, s->free_at[i] + (whole > 0 ? whole * length : 0), s->sms[i]);
    }
    *s = filled;
    return tiles;
}

void mz_schedule_add(mz_schedule *s, int64_t tiles, double length) {
    int64_t left = fill_below_water(s, tiles, length);
    while (left > 0) {
        double free_at = s->free_at[0];
        int64_t taken = left < s->sms[0] ? left : s->sms[0];
        s->sms[0] -= taken;
        left -= taken;
        if (s->sms[0] == 0)
            remove_level(s, 0);
        insert(s, free_at + length, taken);
        if (s->count > MZ_SCHEDULE_LEVELS)
            merge_nearest(s);
    }
}

double mz_schedule_end(const mz_schedule *s) {
    return s->free_at[s->count - 1];
}

double mz_schedule_end_alone(const mz_schedule *s, double alone) {
    int64_t all = 0, busy;
    for (int i = 0; i < s->count; i++)
        all += s->sms[i];
    double end = s->free_at[0];
    busy = all;
    for (int i = 0; i + 1 < s->count; i++) {
        busy -= s->sms[i];
        const double idle = (double)(all - busy) / (double)(all - 1);
        end += (s->free_at[i + 1] - s->free_at[i]) / (1 + (1 / alone - 1) * idle);
    }
    return end;
}
