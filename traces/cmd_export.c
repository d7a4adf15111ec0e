/* mizan trace export. */
#include "traces/cmd.h"

#include "traces/exporter.h"
#include "traces/schema.h"

#include <string.h>

typedef struct export_args {
    const char *format, *output;
    mz_export_options export;
    int64_t seed;
    bool list, quiet, verbose;
} export_args;

#define AT(field) offsetof(export_args, field)
#define EX(field) offsetof(export_args, export.field)
static const mz_opt export_table[] = {
    {"format", 'f', MZ_OPT_STR, AT(format), NULL, "NAME", "which format; --list describes them"},
    {"list", 0, MZ_OPT_FLAG, AT(list), NULL, NULL, "describe the formats"},
    {"first-step", 0, MZ_OPT_INT, EX(first_step), "0", "I", "skip this many recorded steps", 0,
     1e15},
    {"steps", 'n', MZ_OPT_INT, EX(steps), "0", "N", "take this many steps; 0: to the end", 0, 1e15},
    {"micro-batch", 0, MZ_OPT_INT, EX(micro_batch), "0", "M", "which one (nccl-alltoallv)", 0, 1e9},
    {"layer", 0, MZ_OPT_INT, EX(layer), "0", "L", "which MoE layer (nccl-alltoallv)", 0,
     MZ_LAYERS_MAX},
    {"sum", 0, MZ_OPT_FLAG, EX(sum), NULL, NULL, "one matrix over all steps (sglang-json)"},
    {"ranks", 'r', MZ_OPT_INT, EX(ranks), "0", "R",
     "ranks that hold experts (nccl-alltoallv, smpi-ti, perfetto); 0: as recorded", 0,
     MZ_RANKS_MAX},
    {"step-tokens", 0, MZ_OPT_INT, EX(step_tokens), "0", "T",
     "tokens of a step, where the trace has no steps (nccl-alltoallv, smpi-ti)", 0, 1e15},
    {"hidden", 0, MZ_OPT_INT, EX(hidden), "0", "H",
     "elements of a row that is sent (nccl-alltoallv, smpi-ti); 0: in the trace", 0, 1e9},
    {"element-bytes", 0, MZ_OPT_INT, EX(element_bytes), "2", "N", "bytes of one element of a row",
     1, 16},
    {"seed", 0, MZ_OPT_INT, AT(seed), "1", "N", "of draws that re-shaping to --ranks may need", 0,
     1e15},
    {"output", 'o', MZ_OPT_STR, AT(output), NULL, "PATH", "the file or folder to write"},
    MZ_OPT_COMMON_ROWS(export_args),
};
#undef EX
#undef AT

static const mz_opt_spec export_spec = {
    .command = "mizan trace export",
    .synopsis = "--format NAME [OPTIONS] TRACE -o PATH",
    .about = "Writes a trace in the formats of other programs.",
    .example = "mizan trace export --format npy trace.h5 -o arrays",
    .table = export_table,
    .count = sizeof export_table / sizeof export_table[0],
    .max_args = 1,
};

static mz_code choose_exporter(const char *format, const mz_exporter **found, mz_err *err) {
    const char *names[64];
    int count = 0;
    if (!format)
        return mz_fail(err, MZ_EINPUT,
                       "no format given: pass --format NAME (--list describes "
                       "them)");
    for (int i = 0; mz_exporters[i]; i++) {
        names[count++] = mz_exporters[i]->name;
        if (strcmp(format, mz_exporters[i]->name) == 0) {
            *found = mz_exporters[i];
            return MZ_OK;
        }
    }
    const char *near = mz_nearest(format, names, count);
    return mz_fail(err, MZ_EINPUT, "--format: there is no format '%.40s'%s%s%s", format,
                   near ? "; did you mean '" : " (--list describes them)", near ? near : "",
                   near ? "'?" : "");
}

/* Refuses options that the format does not read. */
static mz_code check_options(const mz_exporter *exporter, const bool *seen, mz_err *err) {
    const char *name =
        mz_unread_option(&export_spec, seen, "format list output quiet verbose", exporter->options);
    if (!name)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT, "--%s: has no meaning with format %s: leave it out", name,
                   exporter->name);
}

static bool begins(const char *text, const char *with) {
    return strncmp(text, with, strlen(with)) == 0;
}

static mz_code export_trace(mz_app *app, const export_args *args, const bool *seen,
                            const char *path, mz_err *err) {
    const mz_exporter *exporter = NULL;
    mz_export_report report = {0};
    mz_trace *trace = NULL;
    mz_code code = choose_exporter(args->format, &exporter, err);
    if (!code)
        code = check_options(exporter, seen, err);
    if (!code)
        code = mz_trace_open(path, &trace, err);
    if (code)
        return code;
    code = exporter->export(app, trace, &args->export, args->output, &report, err);
    mz_trace_close(&trace);
    if (code)
        return err->msg[0] && !begins(err->msg, path) && !begins(err->msg, args->output)
                   ? mz_err_prefix(err, "%s", path)
                   : code;
    if (report.lost[0])
        mz_warn(&app->log, "%s does not carry: %s", exporter->name, report.lost);
    if (report.note[0])
        mz_info(&app->log, "%s", report.note);
    mz_info(&app->log, "wrote %s: %lld calls, %lld tokens, %lld pairs", args->output,
            (long long)report.calls, (long long)report.tokens, (long long)report.pairs);
    return MZ_OK;
}

mz_code mz_cmd_trace_export(mz_app *app, int argc, char **argv, mz_err *err) {
    export_args args;
    int nargs;
    bool help = false, seen[sizeof export_table / sizeof export_table[0]];
    mz_code code =
        mz_opt_parse(&export_spec, &args, argc, argv, &nargs, &help, seen, app->out, err);
    if (code || help)
        return code;
    mz_log_choose(&app->log, args.quiet, args.verbose);
    args.export.seed = (uint64_t)args.seed;
    for (int i = 0; args.list && mz_exporters[i]; i++)
        fprintf(app->out, "%-15s %s\n", mz_exporters[i]->name, mz_exporters[i]->summary);
    if (args.list)
        return MZ_OK;
    if (nargs == 0)
        return mz_fail(err, MZ_EINPUT, "no trace to export: pass TRACE");
    if (!args.output)
        return mz_fail(err, MZ_EINPUT, "no output: pass -o PATH");
    code = mz_keep_input(argv[1], args.output, err);
    return code ? code : export_trace(app, &args, seen, argv[1], err);
}
