/* What the machine's speed is told by (replay/probe.h): calibration keeps the mean of each probe, a
 * replay takes each before every step that it records, `mizan check` holds the two against each
 * other. A shared machine's arithmetic, memory and caches get slower and faster apart from one
 * another. */
#ifndef MIZAN_IO_SPEED_H
#define MIZAN_IO_SPEED_H

typedef enum mz_speed {
    MZ_SPEED_PRODUCT, /* arithmetic */
    MZ_SPEED_MEMORY,  /* long rows packed from memory to memory */
    MZ_SPEED_CACHE,   /* short rows packed where they have just been written */
    MZ_SPEEDS
} mz_speed;

/* Of a record in a result file: "probe_s", ... */
const char *mz_speed_key(mz_speed speed);
/* Of the calibration's mean in a resolved cluster: "probe_mean_s", ... */
const char *mz_speed_mean_key(mz_speed speed);
/* For readers of a dataset. */
const char *mz_speed_what(mz_speed speed);

#endif
