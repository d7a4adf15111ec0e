/* Subcommands of this room. */
#ifndef MIZAN_REPLAY_CMD_H
#define MIZAN_REPLAY_CMD_H

#include "common/base/app.h"

/* mizan calibrate: this machine as a hardware profile. */
mz_code mz_cmd_calibrate(mz_app *app, int argc, char **argv, mz_err *err);
/* mizan replay: the MoE layers of a trace executed under each policy. */
mz_code mz_cmd_replay(mz_app *app, int argc, char **argv, mz_err *err);

#endif
