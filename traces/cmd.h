/* Subcommands of this room. */
#ifndef MIZAN_TRACES_CMD_H
#define MIZAN_TRACES_CMD_H

#include "common/base/app.h"

/* mizan trace: info, check, synth, import, export, cut. */
mz_code mz_cmd_trace(mz_app *app, int argc, char **argv, mz_err *err);

#endif
