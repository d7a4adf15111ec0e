#include "tests/harness.h"

#include "common/base/opt.h"

typedef struct options {
    const char *trace;
    int64_t ranks, plain;
    double keep, wait;
    int network;
    bool json, quiet, verbose;
} options;

static const mz_opt table[] = {
    {"trace", 't', MZ_OPT_STR, offsetof(options, trace), NULL, "FILE", "recorded routing"},
    {"ranks", 'r', MZ_OPT_INT, offsetof(options, ranks), "8", "R", "ranks of the job", 1, 1024},
    {"plain", 0, MZ_OPT_INT, offsetof(options, plain), NULL, "N", "without bounds"},
    {"keep", 'k', MZ_OPT_REAL, offsetof(options, keep), "1", "X", "keep ratio", -1, 1},
    {"wait", 0, MZ_OPT_REAL, offsetof(options, wait), "5 us", "T", "latency", 0, 0,
     MZ_UNIT_SECONDS},
    {"network", 0, MZ_OPT_ENUM, offsetof(options, network), "port", "flow|port", "network model"},
    {"json", 0, MZ_OPT_FLAG, offsetof(options, json), NULL, NULL, "print JSON"},
    MZ_OPT_COMMON_ROWS(options),
};

enum { ROWS = sizeof table / sizeof table[0] };

static const mz_opt_spec spec = {.command = "mizan try",
                                 .synopsis = "--trace FILE [FILE...]",
                                 .about = "Tries options.",
                                 .example = "mizan try --trace a.h5",
                                 .table = table,
                                 .count = ROWS,
                                 .max_args = 2};

/* Parses "a b c" (words at spaces); keeps the words alive for the strings that point into them. */
static mz_code parse(const char *line, options *o, int *nargs, char **argv, bool *seen,
                     mz_err *err) {
    static char words[512];
    int argc = 0;
    bool help;
    snprintf(words, sizeof words, "try %s", line);
    for (char *w = strtok(words, " "); w; w = strtok(NULL, " "))
        argv[argc++] = w;
    argv[argc] = NULL;
    return mz_opt_parse(&spec, o, argc, argv, nargs, &help, seen, stdout, err);
}

static void defaults(void **state) {
    options o;
    memset(&o, 0xff, sizeof o);
    char *argv[32];
    bool seen[ROWS];
    int nargs;
    mz_err err = {0};
    assert_ok(parse("", &o, &nargs, argv, seen, &err), &err);
    assert_null(o.trace);
    assert_int_equal(o.ranks, 8);
    assert_int_equal(o.plain, 0);
    assert_true(o.keep == 1);
    assert_true(o.wait == 5e-6);
    assert_int_equal(o.network, 1);
    assert_false(o.json || o.quiet || o.verbose);
    assert_int_equal(nargs, 0);
    for (int i = 0; i < ROWS; i++)
        assert_false(seen[i]);
}

static void spellings_and_positionals(void **state) {
    options o;
    char *argv[32];
    bool seen[ROWS];
    int nargs;
    mz_err err = {0};
    assert_ok(parse("one --trace a.h5 --ranks=16 -k -0.5 two --network flow --json -v", &o, &nargs,
                    argv, seen, &err),
              &err);
    assert_string_equal(o.trace, "a.h5");
    assert_int_equal(o.ranks, 16);
    assert_true(o.keep == -0.5);
    assert_int_equal(o.network, 0);
    assert_true(o.json && o.verbose && !o.quiet);
    assert_int_equal(nargs, 2);
    assert_string_equal(argv[1], "one");
    assert_string_equal(argv[2], "two");
    assert_true(seen[0] && seen[1] && !seen[2] && seen[3] && !seen[4] && seen[5] && seen[6]);
    assert_ok(parse("--trace - -- --json -", &o, &nargs, argv, seen, &err), &err);
    assert_string_equal(o.trace, "-");
    assert_false(o.json);
    assert_int_equal(nargs, 2);
    assert_string_equal(argv[1], "--json");
    assert_string_equal(argv[2], "-");
    assert_int_equal(parse("--trace= -r 1k --wait=300us", &o, &nargs, argv, seen, &err), MZ_OK);
    assert_string_equal(o.trace, "");
    assert_int_equal(o.ranks, 1000);
    assert_true(o.wait == 300e-6);
}

static void bad_lines(void **state) {
    static const struct {
        const char *line, *message;
    } bad[] = {
        {"--trce a", "did you mean --trace?"},
        {"-trace a", "did you mean --trace?"},
        {"--zzzzzz", "'mizan try --help' lists"},
        {"-z", "unknown option '-z'"},
        {"--trace", "--trace needs a value: FILE"},
        {"--trace --json", "--trace needs a value: FILE"},
        {"--json=yes", "--json takes no value"},
        {"--ranks 0", "outside [1, 1024]"},
        {"--ranks 2.5", "not a whole number"},
        {"--ranks=", "not a whole number"},
        {"--plain 9007199254740994", "outside"},
        {"--keep 1.5", "outside [-1, 1]"},
        {"--keep nan", "not a number"},
        {"--wait 5parsec", "a time like"},
        {"--network tree", "not one of flow|port"},
        {"a b c", "unexpected argument 'c'"},
    };
    for (int i = 0; i < COUNT_OF(bad); i++) {
        options o;
        char *argv[32];
        int nargs;
        mz_err err;
        assert_fails(parse(bad[i].line, &o, &nargs, argv, NULL, &err), MZ_EINPUT, bad[i].message,
                     &err);
    }
}

static void help_names_every_option_and_default(void **state) {
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    char *argv[] = {"try", "--ranks", "bad", "--help", NULL};
    options o;
    int nargs;
    bool help;
    mz_err err = {0};
    assert_ok(mz_opt_parse(&spec, &o, 4, argv, &nargs, &help, NULL, out, &err), &err);
    fclose(out);
    assert_true(help);
    for (int i = 0; i < ROWS; i++) {
        char want[64];
        snprintf(want, sizeof want, "--%s", table[i].name);
        assert_non_null(strstr(text, want));
    }
    assert_non_null(strstr(text, "usage: mizan try --trace FILE"));
    assert_non_null(strstr(text, "(default: 5 us)"));
    assert_non_null(strstr(text, "-r, --ranks R"));
    assert_non_null(strstr(text, "mizan try --trace a.h5"));
    free(text);
}

static mz_code list(const char *text, options *o, mz_err *err) {
    static char copy[256];
    snprintf(copy, sizeof copy, "%s", text);
    return mz_opt_parse_list(table, ROWS, "lrmoe", copy, o, err);
}

static void brackets(void **state) {
    options o;
    mz_err err = {0};
    assert_ok(list("", &o, &err), &err);
    assert_int_equal(o.ranks, 8);
    assert_ok(list("keep=0.5, network = flow,json,quiet=no,verbose=yes,trace=x", &o, &err), &err);
    assert_true(o.keep == 0.5);
    assert_int_equal(o.network, 0);
    assert_true(o.json && !o.quiet && o.verbose);
    assert_string_equal(o.trace, "x");
    static const char *const bad[][2] = {
        {"kep=0.5", "lrmoe: unknown option 'kep'; did you mean 'keep'?"},
        {"zzzzzzzz=1", "it has trace, ranks, plain, keep"},
        {"keep", "lrmoe: option 'keep' needs a value"},
        {"keep=", "lrmoe: keep: '' is not"},
        {"keep=2", "lrmoe: keep: 2 is outside [-1, 1]"},
        {"json=maybe", "is not yes or no"},
        {"keep=1,", "ends with a comma"},
        {",", "unknown option ''"},
        {"keep=1,json,keep=0.5", "lrmoe: option 'keep' is given twice"},
    };
    for (int i = 0; i < COUNT_OF(bad); i++)
        assert_fails(list(bad[i][0], &o, &err), MZ_EINPUT, bad[i][1], &err);
}

static void broken_default_is_our_bug(void **state) {
    static const mz_opt wrong[] = {{"n", 0, MZ_OPT_INT, 0, "many", "N", ""}};
    int64_t n;
    char text[] = "";
    mz_err err;
    assert_fails(mz_opt_parse_list(wrong, 1, "policy", text, &n, &err), MZ_EINTERNAL, "option n",
                 &err);
}

static void lists(void **state) {
    char text[] = "static, lrmoe[keep=0.5,quota=ratio] ,./mine.so";
    char *parts[3];
    int count;
    mz_err err = {0};
    assert_ok(mz_split_list(text, parts, 3, &count, &err), &err);
    assert_int_equal(count, 3);
    assert_string_equal(parts[0], "static");
    assert_string_equal(parts[1], "lrmoe[keep=0.5,quota=ratio]");
    assert_string_equal(parts[2], "./mine.so");
    static const char *const bad[][2] = {
        {"", "empty item 1"},       {"a,,b", "empty item 2"}, {"a,", "empty item 2"},
        {"a[b", "unbalanced"},      {"a]b", "unbalanced"},    {"a[b[c]]", "unbalanced"},
        {"a,b,c,d", "more than 3"},
    };
    for (int i = 0; i < COUNT_OF(bad); i++) {
        char copy[64];
        snprintf(copy, sizeof copy, "%s", bad[i][0]);
        assert_fails(mz_split_list(copy, parts, 3, &count, &err), MZ_EINPUT, bad[i][1], &err);
    }
}

static void nearest_names(void **state) {
    static const char *const names[] = {"static", "capacity", "symi", "ultraep", "qwen3-30b-a3b"};
    const int n = COUNT_OF(names);
    assert_string_equal(mz_nearest("statik", names, n), "static");
    assert_string_equal(mz_nearest("sttaic", names, n), "static");
    assert_string_equal(mz_nearest("SYMI", names, n), "symi");
    assert_string_equal(mz_nearest("ultra-ep", names, n), "ultraep");
    assert_string_equal(mz_nearest("qwen3", names, n), "qwen3-30b-a3b");
    static const char *const clusters[] = {"h200", "h100-pcie", "h100"};
    assert_string_equal(mz_nearest("h100", clusters, 2), "h100-pcie"); /* though h200 is one edit */
    assert_string_equal(mz_nearest("h10", clusters, 3), "h100");
    assert_null(mz_nearest("mixtral", names, n));
    assert_null(mz_nearest("", names, n));
    assert_null(mz_nearest("x", names, n));
    char longer[300];
    memset(longer, 'a', sizeof longer);
    longer[sizeof longer - 1] = 0;
    assert_null(mz_nearest(longer, names, n));
    const char *const one[] = {longer};
    assert_null(mz_nearest("aaa", one, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),  cmocka_unit_test(spellings_and_positionals),
        cmocka_unit_test(bad_lines), cmocka_unit_test(help_names_every_option_and_default),
        cmocka_unit_test(brackets),  cmocka_unit_test(broken_default_is_our_bug),
        cmocka_unit_test(lists),     cmocka_unit_test(nearest_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
