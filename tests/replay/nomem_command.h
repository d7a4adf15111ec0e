/* One run of a command from its arguments to its files, with allocations failing (nomem.h). */
#ifndef MIZAN_TESTS_REPLAY_NOMEM_COMMAND_H
#define MIZAN_TESTS_REPLAY_NOMEM_COMMAND_H

#include "tests/replay/command.h"

typedef struct outcome {
    mz_code code;
    mz_err err;
    char *text; /* what went to stdout; caller frees */
    long long allocations, refusals, buffers;
} outcome;

/* line: words a space apart. The at-th allocation fails (0: none), with for_good all from it on. */
outcome run_command(command_function run, const char *line, long long at, bool for_good);
/* Memory was short, and one line says so; nothing else was said. */
bool is_short_of_memory(const outcome *o);

/* What a command could leave behind: files of this folder, descriptors, processes. */
typedef struct belongings {
    int files, open;
} belongings;
belongings belongings_now(void);
void assert_nothing_left(const belongings *before);

#endif
