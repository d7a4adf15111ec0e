/* A profile that `mizan calibrate` wrote, taken to the speed that the machine has now. The object
 * stays what it was but for seconds and rates. */
#ifndef MIZAN_REPLAY_REFRESH_H
#define MIZAN_REPLAY_REFRESH_H

#include "common/base/arena.h"
#include "replay/calibrate.h"

#include <jansson.h>

typedef struct mz_refresh {
    const char *path; /* lives as long */
    json_t *profile;
    mz_measured *measured; /* in the arena */
    double memory;         /* bytes of a device */
    int64_t ranks;
} mz_refresh;

/* How this run measures; texts live as long. */
typedef struct mz_refresh_here {
    const char *machine, *backend, *transport;
    int64_t processes, workers, ranks;
    double memory; /* bytes of a device */
} mz_refresh_here;

/* MZ_EINPUT: no profile, one without measurements or without a probe. */
mz_code mz_refresh_load(const char *path, mz_arena *arena, mz_refresh *refresh, mz_err *err);
/* MZ_EINPUT with what differs: the profile is of another machine, or was measured otherwise. */
mz_code mz_refresh_same(const mz_refresh *refresh, const mz_refresh_here *here, mz_err *err);
/* now: of mz_calibrate_speed. at: the time, UTC, shorter than mz_rescaled has room for. */
mz_code mz_refresh_apply(mz_refresh *refresh, const mz_measured *now, const char *at,
                         mz_factors *factors, mz_err *err);
void mz_refresh_free(mz_refresh *refresh);

#endif
