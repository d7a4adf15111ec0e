#include "traces/importers/runs.h"

#include <stdio.h>
#include <string.h>

static const char *field_of(const mz_csv *csv, int column) {
    return column >= 0 ? csv->field[column] : "";
}

mz_code mz_runs_take(mz_runs *runs, const mz_csv *csv, const mz_import_options *options,
                     bool *wanted, mz_err *err) {
    const char *method = field_of(csv, runs->method), *model = field_of(csv, runs->model);
    *wanted = !(runs->method >= 0 && options->method && strcmp(method, options->method) != 0) &&
              !(runs->model >= 0 && options->model_name && strcmp(model, options->model_name) != 0);
    if (!*wanted)
        return MZ_OK;
    for (int i = runs->count - 1; i >= 0; i--)
        if (strcmp(runs->run[i].method, method) == 0 && strcmp(runs->run[i].model, model) == 0)
            return MZ_OK;
    if (strlen(method) >= MZ_RUN_NAME || strlen(model) >= MZ_RUN_NAME || runs->count == MZ_RUNS_MAX)
        return mz_fail(err, MZ_EINPUT,
                       "%s: line %lld: more than %d methods and models, or a name longer than %d",
                       mz_input_path(csv->input), (long long)mz_input_line_number(csv->input),
                       MZ_RUNS_MAX, MZ_RUN_NAME - 1);
    strcpy(runs->run[runs->count].method, method);
    strcpy(runs->run[runs->count++].model, model);
    return MZ_OK;
}

mz_code mz_runs_one(const mz_runs *runs, const char *path, const mz_import_options *options,
                    mz_err *err) {
    char list[512] = "";
    if (runs->count == 1)
        return MZ_OK;
    if (runs->count == 0 && !options->method && !options->model_name)
        return mz_fail(err, MZ_EINPUT, "%s: no row", path);
    if (runs->count == 0)
        return mz_fail(err, MZ_EINPUT, "%s: no row has --method %s and --model-name %s", path,
                       options->method ? options->method : "(any)",
                       options->model_name ? options->model_name : "(any)");
    for (int i = 0; i < runs->count; i++) {
        const mz_run *run = &runs->run[i];
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s%s%s", i ? ", " : "", run->method,
                 run->method[0] && run->model[0] ? " " : "", run->model);
    }
    return mz_fail(err, MZ_EINPUT,
                   "%s: several runs: choose with --method and --model-name one of: %s", path,
                   list);
}
