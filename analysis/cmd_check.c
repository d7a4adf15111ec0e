/* mizan check: a prediction against a measurement. */
#include "analysis/check.h"
#include "analysis/cmd.h"
#include "common/base/opt.h"
#include "common/io/input.h"
#include "common/io/json.h"
#include "traces/cmd.h"

#include <errno.h>
#include <string.h>

typedef struct check_args {
    const char *html;
    bool json, quiet, verbose;
} check_args;

#define AT(field) offsetof(check_args, field)

static const mz_opt check_options[] = {
    {"json", 0, MZ_OPT_FLAG, AT(json), NULL, NULL, "one JSON object on stdout (mizan-check/1)"},
    {"html", 0, MZ_OPT_STR, AT(html), NULL, "FILE", "write a page that opens offline"},
    MZ_OPT_COMMON_ROWS(check_args),
};

static const mz_opt_spec check_spec = {
    .command = "mizan check",
    .synopsis = "PREDICTED MEASURED [options]",
    .about = "Holds what mizan sim --scope layers predicted against what mizan replay measured.\n"
             "Exit code 1 where a target is missed.",
    .example = "mizan check predicted.h5 measured.h5 --html check.html",
    .table = check_options,
    .count = sizeof check_options / sizeof check_options[0],
    .min_args = 2,
    .max_args = 2,
};

static mz_code write_html(const check_result *result, const char *path, char **files, mz_err *err) {
    mz_output output;
    mz_code code = mz_output_begin(&output, path, err);
    if (code != MZ_OK)
        return code;
    FILE *file = fopen(output.partial, "w");
    bool good = file != NULL;
    if (file) {
        check_html(result, files[0], files[1], file);
        good = !ferror(file);
        good = fclose(file) == 0 && good;
    }
    code = good ? mz_output_commit(&output, err)
                : mz_fail(err, MZ_EINTERNAL, "%s: cannot write: %s", path, strerror(errno));
    mz_output_abandon(&output);
    return code;
}

static mz_code report(const check_args *args, mz_app *app, const check_result *result, char **files,
                      mz_err *err) {
    mz_code code = args->html ? write_html(result, args->html, files, err) : MZ_OK;
    if (code == MZ_OK && args->json) {
        json_t *json = check_json(result);
        code = json ? mz_json_write(json, app->out, err) : mz_fail_nomem(err, "a check as JSON");
        json_decref(json);
    } else if (code == MZ_OK) {
        check_print(result, app->out);
    }
    if (code == MZ_OK && !result->passed)
        code = mz_fail(err, MZ_ECHECK, "%s", result->verdict);
    return code;
}

mz_code mz_cmd_check(mz_app *app, int argc, char **argv, mz_err *err) {
    check_args args;
    mz_result_file file[2] = {{0}};
    check_result result = {0};
    int nargs = 0;
    bool help = false;
    mz_code code = mz_opt_parse(&check_spec, &args, argc, argv, &nargs, &help, NULL, app->out, err);
    if (code != MZ_OK || help)
        return code;
    mz_log_choose(&app->log, args.quiet, args.verbose);
    code = mz_keep_inputs((const char *const *)argv + 1, 2, args.html, err);
    for (int i = 0; code == MZ_OK && i < 2; i++)
        code = mz_result_load(argv[1 + i], &file[i], err);
    if (code == MZ_OK)
        code = check_files(&file[0], &file[1], &result, err);
    if (code == MZ_OK)
        code = report(&args, app, &result, argv + 1, err);
    check_free(&result);
    for (int i = 0; i < 2; i++)
        mz_result_file_free(&file[i]);
    return code;
}
