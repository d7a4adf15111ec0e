/* The program: finds the subcommand, gives it what it needs, turns its error into one line and an
 * exit code. */
#include "analysis/cmd.h"
#include "common/base/app.h"
#include "common/base/opt.h"
#include "replay/cmd.h"
#include "traces/cmd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static const mz_command commands[] = {
    {"trace", "look at, compare, check, make, import, export and cut routing traces", mz_cmd_trace},
    {"place", "place experts on ranks for given loads, for serving or training", mz_cmd_place},
    {"sim", "compare policies on a recorded trace by simulation", mz_cmd_sim},
    {"check", "hold a prediction against what mizan replay measured", mz_cmd_check},
    {"model", "show a model's parameters, tensors and optimizer state", mz_cmd_model},
    {"memory", "say what a rank holds in a step, and the largest micro-batch that fits",
     mz_cmd_memory},
    {"replay", "run the routed experts of a recorded trace under policies, for real",
     mz_cmd_replay},
    {"calibrate", "measure this machine: a hardware profile for sim and check", mz_cmd_calibrate},
};

enum { COMMANDS = sizeof commands / sizeof commands[0] };

typedef struct main_options {
    bool quiet, verbose, version;
} main_options;

static const mz_opt main_table[] = {
    MZ_OPT_COMMON_ROWS(main_options),
    {"version", 0, MZ_OPT_FLAG, offsetof(main_options, version), NULL, NULL, "print the version"},
};

static const mz_opt_spec main_spec = {
    .command = "mizan",
    .synopsis = "[-q|-v] COMMAND [ARGUMENT...]",
    .about = "Predicts what placement, replication and backward-quota policies do to the step time "
             "and memory\nof mixture-of-experts training, from recorded routing.",
    .example = "mizan sim --list",
    .table = main_table,
    .count = sizeof main_table / sizeof main_table[0],
    .max_args = -1,
};

/* A signal handler can reach nothing else. */
static volatile sig_atomic_t stop_requested;

static void request_stop(int signal_number) {
    (void)signal_number;
    stop_requested = 1;
}

/* The first interrupt asks, the second one kills; a hang-up asks too, unless nohup has it ignored.
 * A closed pipe or a file beyond the size limit is an error of write, not a signal. */
static void catch_signals(void) {
    struct sigaction stop = {.sa_handler = request_stop, .sa_flags = SA_RESETHAND};
    sigemptyset(&stop.sa_mask);
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    struct sigaction hangup;
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &stop, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

/* With a closed stdout the next file opened would become it and receive our output. Read-only, so
 * that writing there still fails. */
static bool hold_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", O_RDONLY) != fd)
            return false;
    return true;
}

static bool holds_data(const char *directory) {
    char path[4096];
    struct stat info;
    int n = snprintf(path, sizeof path, "%s/sim/cluster/profiles", directory);
    return n > 0 && (size_t)n < sizeof path && stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static const char *find_data(void) {
    const char *chosen = getenv("MIZAN_DATA");
    if (chosen && *chosen)
        return chosen;
    return holds_data(MZ_SOURCE_DIR) ? MZ_SOURCE_DIR : MZ_DATA_DIR;
}

/* The second half of --help; the first is the table of options. */
static void print_commands(FILE *out) {
    fprintf(out, "\ncommands ('mizan COMMAND --help' says more):\n");
    for (int i = 0; i < COMMANDS; i++)
        fprintf(out, "  %-9s %s\n", commands[i].name, commands[i].summary);
    fprintf(out,
            "\nexit codes: 0 done, 1 a check failed, 2 bad input, 3 missing hardware or library, "
            "4 internal error\n");
}

static const mz_command *find_command(const char *name, mz_err *err) {
    const char *names[COMMANDS];
    for (int i = 0; i < COMMANDS; i++) {
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
        names[i] = commands[i].name;
    }
    const char *near = mz_nearest(name, names, COMMANDS);
    if (near)
        mz_fail(err, MZ_EINPUT, "unknown command '%s'; did you mean '%s'?", name, near);
    else
        mz_fail(err, MZ_EINPUT, "unknown command '%s'; 'mizan --help' lists the commands", name);
    return NULL;
}

/* Index of the command in argv: options before it are the program's own. */
static int command_index(int argc, char **argv) {
    int i = 1;
    while (i < argc && argv[i][0] == '-')
        i++;
    return i;
}

static mz_code run_main(mz_app *app, int argc, char **argv, const char **name, mz_err *err) {
    main_options options;
    int at = command_index(argc, argv), nargs;
    bool help;
    mz_code code = mz_opt_parse(&main_spec, &options, at, argv, &nargs, &help, NULL, app->out, err);
    if (code)
        return code;
    mz_log_choose(&app->log, options.quiet, options.verbose);
    if (options.version) {
        fprintf(app->out, "mizan %s\n", app->version);
        return MZ_OK;
    }
    bool asked = at + 1 == argc && strcmp(argv[at], "help") == 0;
    if (asked)
        mz_opt_help(&main_spec, app->out);
    if (asked || help) {
        print_commands(app->out);
        return MZ_OK;
    }
    if (at == argc)
        return mz_fail(err, MZ_EINPUT, "no command given; 'mizan --help' lists the commands");
    const mz_command *command = find_command(argv[at], err);
    if (!command)
        return err->code;
    *name = command->name;
    return command->run(app, argc - at, argv + at, err);
}

/* Output that did not arrive is an error, whatever the command thinks. */
static mz_code flush_output(FILE *out, mz_err *err) {
    errno = 0;
    bool failed = ferror(out);
    if (fflush(out) == 0 && !failed)
        return MZ_OK;
    return mz_fail(err, MZ_EINTERNAL, "cannot write to standard output%s%s", errno ? ": " : "",
                   errno ? strerror(errno) : "");
}

static void print_error(const mz_log *log, const char *command, const mz_err *err) {
    fprintf(stderr, "%s%smizan%s%s:%s %s\n", log->tty ? "\r\033[K" : "",
            log->color ? "\033[31m" : "", command ? ": " : "", command ? command : "",
            log->color ? "\033[0m" : "", err->msg);
}

static void leave(int status, void *unused) {
    (void)unused;
    fflush(NULL);
    _exit(status);
}

/* Where address space is limited a thread that OpenBLAS starts at load may find none and ask for it
 * for ever; at a normal exit OpenBLAS would wait for that thread. What registers its end later than
 * this, as MPI's does, is called before. */
static void leave_threads_alone(void) {
    struct rlimit space;
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY)
        on_exit(leave, NULL);
}

int main(int argc, char **argv) {
    if (!hold_standard_streams())
        return MZ_EINTERNAL;
    leave_threads_alone();
    catch_signals();
    mz_app app = {.out = stdout,
                  .log = mz_log_make(stderr, 0),
                  .stop = &stop_requested,
                  .data_dir = find_data(),
                  .version = MZ_VERSION};
    mz_err err = {0};
    const char *command = NULL;
    mz_code code = run_main(&app, argc, argv, &command, &err);
    mz_err write_err = {0};
    if (flush_output(app.out, &write_err) && code == MZ_OK) {
        code = write_err.code;
        err = write_err;
    }
    if (code)
        print_error(&app.log, command, &err);
    return mz_exit_code(code);
}
