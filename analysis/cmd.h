/* Subcommands of this room. */
#ifndef MIZAN_ANALYSIS_CMD_H
#define MIZAN_ANALYSIS_CMD_H

#include "common/base/app.h"

/* mizan place: a placement for given loads, by any policy. */
mz_code mz_cmd_place(mz_app *app, int argc, char **argv, mz_err *err);
/* mizan sim: policies compared on a recorded trace. */
mz_code mz_cmd_sim(mz_app *app, int argc, char **argv, mz_err *err);
/* mizan check: a prediction against a measurement. */
mz_code mz_cmd_check(mz_app *app, int argc, char **argv, mz_err *err);
/* mizan model: parameters, tensors, optimizer state of a model. */
mz_code mz_cmd_model(mz_app *app, int argc, char **argv, mz_err *err);
/* mizan memory: resident and peak memory of a rank, the largest micro-batch that fits. */
mz_code mz_cmd_memory(mz_app *app, int argc, char **argv, mz_err *err);

#endif
