#include "common/io/speed.h"

#include <math.h>

static const struct {
    const char *key, *mean_key, *what;
} speeds[MZ_SPEEDS] = {
    [MZ_SPEED_PRODUCT] = {"probe_s", "probe_mean_s", "a fixed product just before each step"},
    [MZ_SPEED_MEMORY] = {"memory_probe_s", "rows_mean_s",
                         "long rows packed from memory to memory just before each step"},
    [MZ_SPEED_CACHE] = {"cache_probe_s", "cache_mean_s",
                        "short rows packed out of a cache just before each step"},
};

const char *mz_speed_key(mz_speed speed) {
    return speeds[speed].key;
}

const char *mz_speed_mean_key(mz_speed speed) {
    return speeds[speed].mean_key;
}

const char *mz_speed_what(mz_speed speed) {
    return speeds[speed].what;
}

double mz_speed_factor(double bytes, double cache, double memory) {
    static const double least = MZ_SPEED_CACHE_BYTES, most = MZ_SPEED_MEMORY_BYTES;
    const double part = bytes <= least ? 0 : fmin(log(bytes / least) / log(most / least), 1);
    return cache + part * (memory - cache);
}
