/* Subcommands of this room. */
#ifndef MIZAN_TRACES_CMD_H
#define MIZAN_TRACES_CMD_H

#include "common/base/app.h"
#include "common/base/opt.h"

/* MZ_EINPUT when both paths are the same file, whatever they are called. NULL: none. */
mz_code mz_keep_input(const char *input, const char *output, mz_err *err);
/* The same of several inputs, each a path or NULL. */
mz_code mz_keep_inputs(const char *const *input, int count, const char *output, mz_err *err);

/* What a job reads. */
typedef struct mz_job_inputs {
    const char *const *file; /* [files] paths or NULL */
    int files;
    const char *cluster; /* PROFILE:GPUS, or NULL */
    char *const *policy; /* [policies] NAME or PLUG-IN, each perhaps with [options] */
    int policies;
} mz_job_inputs;
/* The same of all that is a file in it: profiles and plug-ins, too. */
mz_code mz_keep_job(const mz_job_inputs *in, const char *output, mz_err *err);

/* The first option that the user gave and that is a word of neither list, or NULL. seen: as
 * mz_opt_parse fills it; words: names of options, a space apart. */
const char *mz_unread_option(const mz_opt_spec *spec, const bool *seen, const char *of_all,
                             const char *of_format);

/* mizan trace: info, compare, check, synth, import, export, cut. */
mz_code mz_cmd_trace(mz_app *app, int argc, char **argv, mz_err *err);

#endif
