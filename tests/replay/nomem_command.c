#include "tests/replay/nomem_command.h"

#include "tests/replay/nomem.h"

#include <dirent.h>
#include <sys/wait.h>

outcome run_command(command_function run, const char *line, long long at, bool for_good) {
    command_line c;
    outcome o = {0};
    command_open(&c, line);
    nomem_start(at, for_good);
    o.code = run(&c.app, c.argc, c.argv, &o.err);
    o.allocations = nomem_end();
    command_close(&c);
    o.text = c.text;
    o.refusals = nomem_refused();
    o.buffers = nomem_buffers();
    return o;
}

static int entries_of(const char *folder) {
    DIR *dir = opendir(folder);
    int count = 0;
    assert_non_null(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

bool is_short_of_memory(const outcome *o) {
    return o->code == MZ_ENOMEM && o->err.code == o->code && strstr(o->err.msg, "memory") &&
           !strchr(o->err.msg, '\n') && !o->text[0];
}

belongings belongings_now(void) {
    return (belongings){entries_of("."), entries_of("/proc/self/fd")};
}

void assert_nothing_left(const belongings *before) {
    assert_int_equal(entries_of("."), before->files);
    assert_int_equal(entries_of("/proc/self/fd"), before->open);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}
