/* Tables that hold several runs, told apart by a column for the method and one for the model: which
 * are in it, and the one that --method and --model-name choose. */
#ifndef MIZAN_TRACES_IMPORTERS_RUNS_H
#define MIZAN_TRACES_IMPORTERS_RUNS_H

#include "traces/csv.h"
#include "traces/importer.h"

enum { MZ_RUNS_MAX = 64, MZ_RUN_NAME = 128 };

typedef struct mz_run {
    char method[MZ_RUN_NAME], model[MZ_RUN_NAME];
} mz_run;

typedef struct mz_runs {
    int method, model;       /* columns, -1: none */
    mz_run run[MZ_RUNS_MAX]; /* the different ones that were taken */
    int count;
} mz_runs;

/* Whether the current row is of a run that the user wants, which is then remembered. MZ_EINPUT: too
 * many runs, or names too long. */
mz_code mz_runs_take(mz_runs *runs, const mz_csv *csv, const mz_import_options *options,
                     bool *wanted, mz_err *err);
/* MZ_EINPUT unless exactly one run was taken: run[0]. */
mz_code mz_runs_one(const mz_runs *runs, const char *path, const mz_import_options *options,
                    mz_err *err);

#endif
