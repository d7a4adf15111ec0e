/* What the machine's speed is told by (replay/probe.h): calibration keeps the mean of each probe, a
 * replay takes each before every step that it records, `mizan check` holds the two against each
 * other. A shared machine's arithmetic, memory and caches get slower and faster apart from one
 * another. */
#ifndef MIZAN_IO_SPEED_H
#define MIZAN_IO_SPEED_H

#include <stdint.h>

typedef enum mz_speed {
    MZ_SPEED_PRODUCT, /* arithmetic */
    MZ_SPEED_MEMORY,  /* long rows packed from memory to memory */
    MZ_SPEED_CACHE,   /* short rows packed where they have just been written */
    MZ_SPEEDS
} mz_speed;

/* Bytes in and out of one call of the two probes of rows. */
#define MZ_SPEED_MEMORY_BYTES (INT64_C(2) * 4096 * 4096)
#define MZ_SPEED_CACHE_BYTES (INT64_C(2) * 128 * 1024)

/* What the seconds of a kernel of rows are to be multiplied with where those of a kernel in a cache
 * are with `cache` and those of one in memory with `memory`; bytes: in and out of one call on one
 * rank, whose operands have just been written. They lie in a cache where they are short; those
 * beyond the last cache come from memory however they were made; between the two the part that
 * comes from memory grows with the logarithm of the size, as caches lie one behind the other. The
 * bounds are the sizes of the two probes, so that at either one a call gets the probe's own. */
double mz_speed_factor(double bytes, double cache, double memory);

/* Of a record in a result file: "probe_s", ... */
const char *mz_speed_key(mz_speed speed);
/* Of the calibration's mean in a resolved cluster: "probe_mean_s", ... */
const char *mz_speed_mean_key(mz_speed speed);
/* For readers of a dataset. */
const char *mz_speed_what(mz_speed speed);

#endif
