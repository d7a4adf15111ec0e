/* What a subcommand gets: where results go, where people read, and whether to stop.
 * mizan.c lists the subcommands; each lives in its room as cmd_NAME.c. */
#ifndef MIZAN_BASE_APP_H
#define MIZAN_BASE_APP_H

#include "common/base/err.h"
#include "common/base/log.h"

#include <signal.h>
#include <stdio.h>

typedef struct mz_app {
    FILE *out;                         /* results: stdout */
    mz_log log;                        /* people: stderr */
    const volatile sig_atomic_t *stop; /* set by SIGINT, SIGTERM or SIGHUP; commands write what is
                                          complete and return MZ_EABORTED */
    const char *data_dir;              /* installed or source directory with sim/cluster/profiles,
                                          sim/model/configs, traces/example */
    const char *version;               /* "0.1.0" */
} mz_app;

typedef struct mz_command {
    const char *name, *summary;
    mz_code (*run)(mz_app *app, int argc, char **argv, mz_err *err); /* argv[0] is the name */
} mz_command;

#endif
