/* What a command reads is not what it writes: inputs whose option says more than a path. */
#include "traces/cmd.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

/* The file that `spec` names before its last `mark`, or with all of it where there is none. A name
 * without a slash or a dot is that of something shipped or built in. */
static mz_code keep_spec(const char *spec, char mark, const char *output, mz_err *err) {
    char path[PATH_MAX];
    if (!spec)
        return MZ_OK;
    const char *end = mark == ':' ? strrchr(spec, mark) : strchr(spec, mark);
    const int length = (int)(end ? end - spec : (long)strlen(spec));
    snprintf(path, sizeof path, "%.*s", length, spec);
    return strpbrk(path, "/.") ? mz_keep_input(path, output, err) : MZ_OK;
}

mz_code mz_keep_job(const mz_job_inputs *in, const char *output, mz_err *err) {
    mz_code code = mz_keep_inputs(in->file, in->files, output, err);
    if (code == MZ_OK)
        code = keep_spec(in->cluster, ':', output, err);
    for (int i = 0; code == MZ_OK && i < in->policies; i++)
        code = keep_spec(in->policy[i], '[', output, err);
    return code;
}
