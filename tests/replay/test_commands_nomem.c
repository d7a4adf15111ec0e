/* Commands from their arguments to their files, with allocations failing once, and with all failing
 * from one on: an error of memory in one line, nothing half-written, no file, descriptor or process
 * left behind; and a run that could do without has the result that it always has. jansson's
 * allocations count, too; of many every so-many-th fails, so that all sites do over the
 * commands. */
#include "analysis/cmd.h"
#include "common/io/result_file.h"
#include "replay/cmd.h"
#include "tests/harness.h"
#include "tests/replay/nomem_command.h"
#include "traces/cmd.h"

#include <jansson.h>

/* The digests of a result, its part that does not hang on time. */
static bool same_digests(const char *a, const char *b) {
    const char *x = strstr(a, "\"digests\""), *y = strstr(b, "\"digests\"");
    const char *end = x ? strstr(x, "\"runs\"") : NULL;
    return end && y && strncmp(x, y, (size_t)(end - x)) == 0;
}

static void check_refused(const char *line, long long at, const outcome *o, const outcome *whole) {
    if (is_short_of_memory(o))
        return;
    /* Heaps give back what lies idle and ask again; other memory is not to be done without. */
    const bool spared = o->code == whole->code && o->buffers == o->refusals && o->buffers == 1 &&
                        same_digests(o->text, whole->text);
    if (!spared)
        fail_msg("%s: allocation %lld: code %d, \"%s\", %zu characters of output", line, at,
                 o->code, o->err.msg, strlen(o->text));
}

/* A result that was there before memory for the text on stdout was short is a whole one. */
static void drop_output(const outcome *o, const outcome *whole) {
    mz_result_file file = {0};
    mz_err err;
    if (access("out", F_OK) == 0 && o->code != whole->code)
        assert_ok(mz_result_load("out", &file, &err), &err);
    mz_result_file_free(&file);
    unlink("out");
}

/* Every stride-th allocation of a command that may write a file named out. */
static void refuse_some(command_function run, const char *line, long long stride) {
    outcome whole = run_command(run, line, 0, false);
    if (whole.code != MZ_OK && whole.code != MZ_ECHECK)
        fail_msg("%s: %s", line, whole.err.msg);
    unlink("out");
    const belongings before = belongings_now();
    for (int good = 0; good < 2; good++)
        for (long long at = 1 + good * stride / 2; at <= whole.allocations; at += stride) {
            outcome o = run_command(run, line, at, good);
            assert_true(o.refusals > 0);
            check_refused(line, at, &o, &whole);
            drop_output(&o, &whole);
            assert_nothing_left(&before);
            free(o.text);
        }
    print_message("%s: %lld allocations\n", line, whole.allocations);
    free(whole.text);
}

/* ---- commands ----------------------------------------------------------------------------------
 */

static void good_run(command_function run, const char *line) {
    outcome o = run_command(run, line, 0, false);
    assert_ok(o.code, &o.err);
    free(o.text);
}

#define JOB "--trace trace.h5 --model config.json --steps 1 --policy "
#define REPLAY "replay -q --threads 1 --warmup 0 " JOB
#define SIM "sim -q --scope layers --cluster a100-80gb:1x2 " JOB

static int enter(void **state) {
    static const char config[] =
        "{\"model_type\": \"mixtral\", \"hidden_size\": 16, \"intermediate_size\": 8, "
        "\"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"num_key_value_heads\": 4, "
        "\"num_local_experts\": 4, \"num_experts_per_tok\": 2, \"vocab_size\": 100}";
    assert_int_equal(enter_folder(state), 0);
    write_bytes("config.json", config, sizeof config - 1);
    good_run(mz_cmd_trace, "trace synth -q --load hot-rank --ranks 2 --experts 4 --layers 1 "
                           "--steps 1 --tokens 16 --top-k 2 -o trace.h5");
    good_run(mz_cmd_sim, SIM "static -o sim.h5");
    good_run(mz_cmd_replay, REPLAY "static --repeat 2 -o replay.h5");
    return 0;
}

static void replays(void **state) {
    refuse_some(mz_cmd_replay, REPLAY "lrmoe[keep=0.5],symi --digest --json -o out", 29);
    refuse_some(mz_cmd_replay, REPLAY "static --prediction sim.h5 --digest --json", 31);
}

static void simulations(void **state) {
    refuse_some(mz_cmd_sim, SIM "static,lrmoe[keep=0.5] -o out", 31);
}

static void checks(void **state) {
    refuse_some(mz_cmd_check, "check sim.h5 replay.h5 --html out", 13);
}

int main(void) {
    json_set_alloc_funcs(malloc, free);
    const struct CMUnitTest tests[] = {cmocka_unit_test(replays), cmocka_unit_test(simulations),
                                       cmocka_unit_test(checks)};
    return cmocka_run_group_tests(tests, enter, leave_folder);
}
