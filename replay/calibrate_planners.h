/* The "planner" table of a measured profile. */
#ifndef MIZAN_REPLAY_CALIBRATE_PLANNERS_H
#define MIZAN_REPLAY_CALIBRATE_PLANNERS_H

#include "common/base/err.h"

#include <jansson.h>

/* Adds "NAME" and "NAME.route" of every policy to `table`. A few seconds. */
mz_code mz_calibrate_planners(json_t *table, mz_err *err);

#endif
