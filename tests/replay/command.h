/* A command of the program from a line as one would type it, in a folder of the tests' own. */
#ifndef MIZAN_TESTS_REPLAY_COMMAND_H
#define MIZAN_TESTS_REPLAY_COMMAND_H

#include "common/base/app.h"
#include "tests/harness.h"

typedef mz_code (*command_function)(mz_app *app, int argc, char **argv, mz_err *err);

enum { COMMAND_WORDS = 48 };

typedef struct command_line {
    mz_app app;
    int argc;
    char *argv[COMMAND_WORDS], words[1024];
    char *text; /* what goes to stdout, whole once it is closed; the caller frees it */
    size_t size;
} command_line;

/* line: words a space apart. Neither moves nor is copied until it is closed. */
static inline void command_open(command_line *c, const char *line) {
    char *rest = NULL;
    *c = (command_line){0};
    snprintf(c->words, sizeof c->words, "%s", line);
    for (char *word = strtok_r(c->words, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        c->argv[c->argc++] = word;
    c->app = (mz_app){.out = open_memstream(&c->text, &c->size),
                      .log = mz_log_make(NULL, -1),
                      .data_dir = MZ_SOURCE_DIR,
                      .version = "0"};
}

static inline void command_close(command_line *c) {
    assert_int_equal(fclose(c->app.out), 0);
}

/* Of a group of tests: a new folder to be in, gone after them. */
static inline int enter_folder(void **state) {
    static char folder[4096];
    make_directory(folder, sizeof folder);
    *state = folder;
    return chdir(folder);
}

static inline int leave_folder(void **state) {
    assert_int_equal(chdir("/"), 0);
    remove_directory(*state);
    return 0;
}

#endif
