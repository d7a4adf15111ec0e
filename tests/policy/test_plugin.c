/* HOTTEST and PLUGINS (a folder) come from the build.
 *
 * Plug-ins: the example against what its rule must give, every fault reported with the plug-in's
 * name, and nothing of it left behind. */
#include "fixture.h"
#include "tests/harness.h"

#include "sim/policy/parts.h"

#include <sys/wait.h>
#include <unistd.h>

static void free_slots_are_mains_plus_two(void **state) {
    rig r;
    rig_open(&r, HOTTEST, 4, 8, 0);
    assert_int_equal(r.traits.slots, 4);
    assert_int_equal(r.traits.sees, MZ_SEES_CURRENT);
    assert_int_equal(r.traits.interval, 1);
    assert_true(r.traits.planner_stated);
    assert_true(r.traits.planner_seconds == 0);
    assert_string_equal(r.policy->name, "hottest");
    rig_close(&r);
}

/* By hand: ranks carry 1000 400 100 100; expert 0 (900) gets rank 2 and then rank 3 beside rank 0:
 * three shares of 300. */
static void hottest_by_hand(void **state) {
    const int64_t total[] = {900, 100, 300, 100, 50, 50, 60, 40};
    mz_load *load = load_even(4, 8, total);
    rig r;
    rig_open(&r, HOTTEST "[copies=2]", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->begin[1], 3);
    assert_int_equal(r.plan->begin[8], 10);
    const int32_t rank[] = {0, 2, 3};
    assert_memory_equal(r.plan->rank, rank, sizeof rank);
    const int64_t loads[] = {400, 400, 400, 400};
    for (int32_t k = 0; k < 4; k++)
        assert_int_equal(rank_rows(r.plan, r.plan->forward, k), loads[k]);
    /* W to each copy, W again, 2W of fp32 gradients back. */
    assert_int_equal(r.plan->moves, 6);
    int64_t bytes = 0;
    for (int32_t i = 0; i < r.plan->moves; i++)
        bytes += r.plan->move[i].bytes;
    assert_int_equal(bytes, 2 * 4 * r.env.weight_bytes);
    rig_close(&r);
    load_free(load);
}

/* Fast or slow, alone or twice: the same plan. */
static void same_plan_from_two_processes(void **state) {
    for (int kind = 0; kind < LOAD_KINDS; kind++) {
        mz_load *load = load_random(kind, 5, 13, 3);
        rig a, b;
        rig_open(&a, HOTTEST "[copies=3]", 5, 13, 0);
        rig_open(&b, HOTTEST "[timeout=5,copies=3]", 5, 13, 0);
        rig_call(&a, load, NULL, NULL, NULL);
        rig_call(&b, load, NULL, NULL, NULL);
        rig_call(&b, load, NULL, NULL, NULL);
        assert_same_plan(a.plan, b.plan);
        rig_close(&a);
        rig_close(&b);
        load_free(load);
    }
}

static void nobody_is_left(void) {
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

/* Runs one plug-in until it fails; the message must name it and say `want`. */
static void fails_with(const char *text, const char *want) {
    mz_load *load = load_random(LOAD_RANDOM, 4, 8, 1);
    rig r;
    mz_code code = rig_try(&r, text, 4, 8, 2);
    if (code == MZ_OK) {
        mz_view view = {.current = r.traits.sees & MZ_SEES_CURRENT ? load : NULL};
        mz_call call = {.load = load};
        code = r.policy->decide(r.state, &view, r.plan, &r.err);
        if (code == MZ_OK)
            code = r.policy->route(r.state, &call, r.plan, &r.err);
    }
    if (code != MZ_EINPUT || !strstr(r.err.msg, want) || !strstr(r.err.msg, "plug-in ") ||
        strchr(r.err.msg, '\n'))
        fail_msg("%s: code %d, wanted \"%s\", got \"%s\"", text, code, want,
                 code == MZ_OK ? "" : r.err.msg);
    rig_close(&r);
    load_free(load);
    nobody_is_left();
}

static void faults_that_end_it(void **state) {
    const struct {
        const char *what, *want;
    } fault[] = {{"crash", "(signal 11)"},    {"abort", "(signal 6)"},
                 {"exit", "(exit status 7)"}, {"quick-exit", "(exit status 0)"},
                 {"kill", "(signal 9)"},      {"loop", "(no answer for 1.5 s)"},
                 {"hang-up", "it ended "},    {"refuse", "says: not?with me"}};
    const char *const when[] = {"init", "decide", "route"};
    const char *const where[] = {"while it was loaded", "in decide", "in route"};
    for (size_t i = 0; i < sizeof fault / sizeof *fault; i++)
        for (int w = 0; w < 3; w++) {
            char text[512], want[96];
            const bool loop = strcmp(fault[i].what, "loop") == 0;
            snprintf(text, sizeof text, "%sfaulty_route.so[what=%s,when=%s%s]", PLUGINS,
                     fault[i].what, when[w], loop ? ",timeout=1500ms" : "");
            if (fault[i].want[0] == '(')
                snprintf(want, sizeof want, "it ended %s %s", where[w], fault[i].want);
            else
                snprintf(want, sizeof want, "%s", fault[i].want);
            fails_with(text, want);
        }
}

static void plans_that_are_wrong(void **state) {
    const struct {
        const char *what, *want;
    } fault[] = {
        {"no-host", "expert 0 has no host"},
        {"rank", "it calls host(expert 0, rank 4, -1 pairs): there are 8 experts and 4 ranks"},
        {"expert", "host(expert 8, rank 0"},
        {"slots", "rank 0 hosts more than its 4 slots"},
        {"endless", "it gives more than 16 hosts: the slots of all ranks are full"},
        {"uncounted", "expert 0 has more pairs on its hosts than can be counted"},
        {"half", "expert 0 states pairs for some of its hosts only"},
        {"elsewhere", "expert 0 begins with rank 1, its home is rank 0"},
        {"moves", "it calls move(), and its traits do not say MZ_PLUGIN_COPIES_STATED"},
        {"move,copies=2",
         "move 0 is out of range: kind 0, phase 0, hide 0, expert 8, rank 0 to 0, -1 bytes"},
        {"quota", "it calls quota(), and its traits do not say lossy"},
        {"copies,copies=9", "its traits: copies is none"},
        {"sees,sees=4", "its traits: sees is neither"},
        {"slots,slots=1", "slots=1 is too few"},
        {"slots,slots=-7", "slots=-7: give at least 2, its mains"},
        {"slots,slots=2000000000", "is too many"},
        {"interval,interval=0", "interval is a whole number"},
        {"window,window=0", "lag and window"},
        {"seconds,seconds=-1", "planner_seconds is not a time"},
        {"seconds,seconds=nan", "planner_seconds is not a time"},
    };
    for (size_t i = 0; i < sizeof fault / sizeof *fault; i++) {
        char text[512];
        snprintf(text, sizeof text, "%sfaulty.so[what=%s]", PLUGINS, fault[i].what);
        fails_with(text, fault[i].want);
    }
    const struct {
        const char *what, *want;
    } route[] = {
        {"lose", "pairs assigned"},
        {"negative", "it calls send(source 0, host 0, -1 pairs)"},
        {"nobody", "send(source 4, host 0"},
        {"too-many", "pairs assigned"},
        {"wrap", "it sends more pairs from source 0 to host 0 than the "},
        {"drop", "it calls drop(), and its traits do not say lossy"},
        {"drop,lossy=1", "plan is invalid: source 0 drops"},
        {"drop-all,lossy=1", "it drops more pairs of expert 0 than the "},
    };
    for (size_t i = 0; i < sizeof route / sizeof *route; i++) {
        char text[512];
        snprintf(text, sizeof text, "%sfaulty_route.so[what=%s]", PLUGINS, route[i].what);
        fails_with(text, route[i].want);
    }
}

static void files_that_are_no_plug_ins(void **state) {
    fails_with(PLUGINS "nowhere.so", "No such file");
    fails_with(PLUGINS "faulty_old.so", "was built for plug-in interface 0, this program has 1");
    fails_with(PLUGINS "faulty_new.so", "was built for plug-in interface 99, this program has 1");
    fails_with(PLUGINS "faulty_symbol.so", "exports no variable mizan_plugin");
    fails_with(PLUGINS "faulty_name.so", "has no name of one word");
    fails_with(HOTTEST "[timeout=soon]", "timeout");
    fails_with(HOTTEST "[timeout=0]", "timeout=0");
    fails_with(HOTTEST "[copies=0]", "says: its only option is copies=N");
    fails_with(HOTTEST "[=3]", "an option without a name");
    char folder[256], path[sizeof folder + 16];
    make_directory(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/text.so", folder);
    FILE *file = fopen(path, "w");
    fputs("this is no shared object\n", file);
    fclose(file);
    fails_with(path, "cannot be loaded");
    fails_with(folder, "cannot be loaded");
    remove_directory(folder);
}

/* The table's own names are not mistaken for paths, nor paths for names. */
static void names_and_paths(void **state) {
    mz_arena arena = {0};
    mz_err err;
    const mz_policy *policy;
    void *options;
    assert_int_equal(mz_policy_parse("hottest", &arena, &policy, &options, &err), MZ_EINPUT);
    assert_non_null(strstr(err.msg, "unknown policy"));
    assert_int_equal(mz_policy_parse("hottest.so", &arena, &policy, &options, &err), MZ_EINPUT);
    assert_non_null(strstr(err.msg, "plug-in hottest.so: No such file"));
    assert_int_equal(mz_policy_parse(HOTTEST "[a=1", &arena, &policy, &options, &err), MZ_EINPUT);
    mz_arena_free(&arena);
}

/* Everything to the first hosts, a tenth of every cell dropped: checked by hand against the load.
 */
static void own_route_with_drops(void **state) {
    mz_load *load = load_random(LOAD_RANDOM, 4, 8, 5);
    rig r;
    rig_open(&r, PLUGINS "faulty_route.so[lossy=1]", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    int64_t dropped = 0;
    for (int32_t i = 0; i < 32; i++)
        dropped += load->count[i] / 10;
    assert_true(r.traits.lossy && dropped > 0);
    assert_int_equal(r.plan->dropped_pairs, dropped);
    assert_int_equal(r.plan->kept_pairs, load->pairs - dropped);
    assert_int_equal(r.plan->forward[1], 0); /* the second host of expert 0 */
    for (int32_t e = 0; e < 8; e++) {
        int64_t left = 0;
        for (int32_t s = 0; s < 4; s++)
            left += load->count[s * 8 + e] - load->count[s * 8 + e] / 10;
        assert_int_equal(r.plan->forward[r.plan->begin[e]], left);
        assert_int_equal(r.plan->quota[e], left);
    }
    rig_close(&r);
    load_free(load);
}

/* A third of every expert's pairs takes part in backward; no host gets more than it computed. */
static void quotas(void **state) {
    for (int kind = 0; kind < LOAD_KINDS; kind++) {
        mz_load *load = load_random(kind, 4, 8, 9);
        rig r;
        rig_open(&r, PLUGINS "faulty.so[what=quota,lossy=1]", 4, 8, 0);
        rig_call(&r, load, NULL, NULL, NULL);
        int64_t kept = 0;
        for (int32_t e = 0; e < 8; e++) {
            assert_int_equal(r.plan->quota[e], load->total[e] / 3);
            kept += load->total[e] / 3;
        }
        assert_int_equal(r.plan->kept_pairs, kept);
        assert_int_equal(r.plan->has_backward, load->pairs > 0);
        for (int32_t i = 0; r.plan->has_backward && i < r.plan->begin[8]; i++)
            assert_true(r.plan->backward[i] <= r.plan->forward[i]);
        rig_close(&r);
        load_free(load);
    }
}

/* Copies that last: the first placement is free, an unchanged one too, gradients travel each step.
 * The second micro-batch keeps the placement of the first. */
static void copies_that_last(void **state) {
    mz_load *load = load_random(LOAD_RANDOM, 4, 8, 2);
    rig r;
    rig_open(&r, PLUGINS "faulty.so[what=elsewhere,copies=1]", 4, 8, 0);
    assert_int_equal(r.traits.replica_memory, MZ_REPLICAS_RESIDENT);
    assert_true(r.traits.replica_optimizer);
    for (int step = 0; step < 2; step++)
        for (r.micro_batch = 0; r.micro_batch < 2; r.micro_batch++) {
            rig_call(&r, load, NULL, NULL, NULL);
            assert_int_equal(r.plan->rank[0], 1);
            /* Expert 0 lies on ranks 1 and 3: a ring of two moves of 2 (2-1)/2 W. */
            assert_int_equal(r.plan->moves, 2);
            for (int i = 0; i < 2; i++) {
                assert_int_equal(r.plan->move[i].phase, MZ_MOVE_REDUCE_STEP);
                assert_int_equal(r.plan->move[i].bytes, r.env.weight_bytes);
            }
        }
    rig_close(&r);
    load_free(load);
}

static void stated_moves(void **state) {
    mz_load *load = load_random(LOAD_RANDOM, 4, 8, 2);
    rig r;
    rig_open(&r, PLUGINS "faulty.so[what=good-move,copies=2]", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->moves, 1);
    assert_int_equal(r.plan->move[0].phase, MZ_MOVE_STEP);
    assert_int_equal(r.plan->move[0].src, 0);
    assert_int_equal(r.plan->move[0].dst, 3);
    assert_int_equal(r.plan->move[0].bytes, r.env.weight_bytes);
    assert_string_equal(r.plan->why, "because");
    rig_close(&r);
    load_free(load);
}

/* An expert's shares follow the loads of each call, whatever decide saw: no pair is lost on any
 * shape. */
static void every_shape(void **state) {
    const int32_t shape[][2] = {{1, 1}, {1, 7}, {3, 2}, {7, 13}, {16, 16}, {64, 24}};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
        for (int kind = 0; kind < LOAD_KINDS; kind++) {
            mz_load *load = load_random(kind, shape[i][0], shape[i][1], 4);
            rig r;
            rig_open(&r, HOTTEST "[copies=5]", shape[i][0], shape[i][1], 3);
            rig_call(&r, load, NULL, NULL, NULL);
            assert_int_equal(r.plan->kept_pairs, load->pairs);
            rig_close(&r);
            load_free(load);
        }
    nobody_is_left();
}

/* A plug-in that does not let go is left behind after a while: bounded by its timeout. */
static void release_that_hangs(void **state) {
    rig r;
    rig_open(&r, PLUGINS "faulty.so[what=hang-on-release,timeout=2]", 4, 8, 0);
    rig_close(&r);
    nobody_is_left();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(free_slots_are_mains_plus_two),
        cmocka_unit_test(hottest_by_hand),
        cmocka_unit_test(same_plan_from_two_processes),
        cmocka_unit_test(faults_that_end_it),
        cmocka_unit_test(plans_that_are_wrong),
        cmocka_unit_test(files_that_are_no_plug_ins),
        cmocka_unit_test(names_and_paths),
        cmocka_unit_test(own_route_with_drops),
        cmocka_unit_test(quotas),
        cmocka_unit_test(copies_that_last),
        cmocka_unit_test(stated_moves),
        cmocka_unit_test(every_shape),
        cmocka_unit_test(release_that_hangs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
