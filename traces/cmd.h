/* Subcommands of this room. */
#ifndef MIZAN_TRACES_CMD_H
#define MIZAN_TRACES_CMD_H

#include "common/base/app.h"

/* MZ_EINPUT when both paths are the same file, whatever they are called. */
mz_code mz_keep_input(const char *input, const char *output, mz_err *err);

/* mizan trace: info, compare, check, synth, import, export, cut. */
mz_code mz_cmd_trace(mz_app *app, int argc, char **argv, mz_err *err);

#endif
