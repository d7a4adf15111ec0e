/* gpu check|time|counts|plan OPTION...: see usage. The checks are those of tests/kernels. */
#include "tests/gpu/gpu.h"
#include "tests/kernels/rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    const char *mode, *only, *json, *peers, *library_dir, *failed;
    uint64_t seed;
    double seconds;
    bool small;
} settings;

static const char usage[] =
    "usage: gpu check|time|counts|plan [--seed N] [--seconds N] [--only LIST] [--small] [--json "
    "FILE]\n"
    "                             [--peers FILE] [--library-dir DIR] [--failed \" LIST LIST \"]\n";

static bool read_settings(int argc, char **argv, settings *s) {
    *s = (settings){.seed = 1, .seconds = 300, .failed = ""};
    if (argc < 2)
        return false;
    s->mode = argv[1];
    for (int i = 2; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        const bool is_small = strcmp(argv[i], "--small") == 0;
        s->small |= is_small;
        if (is_small)
            continue;
        if (!value)
            return false;
        if (strcmp(argv[i], "--seed") == 0)
            s->seed = strtoull(value, NULL, 10);
        else if (strcmp(argv[i], "--seconds") == 0)
            s->seconds = strtod(value, NULL);
        else if (strcmp(argv[i], "--only") == 0)
            s->only = value;
        else if (strcmp(argv[i], "--json") == 0)
            s->json = value;
        else if (strcmp(argv[i], "--peers") == 0)
            s->peers = value;
        else if (strcmp(argv[i], "--library-dir") == 0)
            s->library_dir = value;
        else if (strcmp(argv[i], "--failed") == 0)
            s->failed = value;
        else
            return false;
        i++;
    }
    return true;
}

/* ---- checks -------------------------------------------------------------------------------------
 */

static const struct {
    const char *name;
    const check *list;
    mz_product_engine engine;
} lists[] = {{"rows", checks_of_rows, MZ_ENGINE_OWN},
             {"pairs", checks_of_pairs, MZ_ENGINE_OWN},
             {"products-mma", checks_of_products, MZ_ENGINE_OWN_MMA},
             {"products", checks_of_products, MZ_ENGINE_OWN},
             {"routers", checks_of_routers, MZ_ENGINE_OWN},
             {"updates", checks_of_updates, MZ_ENGINE_OWN},
             {"arguments", checks_of_arguments, MZ_ENGINE_OWN},
             {"offsets", checks_of_offsets, MZ_ENGINE_OWN},
             {"vendor", checks_of_vendor, MZ_ENGINE_OWN}};
enum { LISTS = sizeof lists / sizeof *lists };

static void note_check(FILE *json, bool first, const char *list, const char *name, uint64_t seed,
                       bool passed, const char *message) {
    if (!json)
        return;
    fprintf(json, "%s{\"list\": \"%s\", \"name\": ", first ? "" : ",\n ", list);
    print_text(json, name);
    fprintf(json, ", \"seed\": %llu, \"passed\": %s", (unsigned long long)seed,
            passed ? "true" : "false");
    if (!passed) {
        fputs(", \"message\": ", json);
        print_text(json, message);
    }
    fputc('}', json);
}

/* Every list once, then again on further seeds while time is left, three rounds at most. 0: all
 * passed. */
static int run_checks(rig *r, const settings *s, FILE *json) {
    const double deadline = now_seconds() + s->seconds;
    int passed = 0, failed = 0, skipped = 0;
    for (uint64_t round = 0; round < 3; round++)
        for (int i = 0; i < LISTS; i++)
            for (const check *c = lists[i].list; c->name; c++) {
                if (s->only && strcmp(s->only, lists[i].name) != 0)
                    continue;
                if (now_seconds() > deadline) {
                    skipped += round == 0;
                    continue;
                }
                const uint64_t seed = s->seed + round;
                r->engine = lists[i].engine;
                const bool good = rig_run(r, c, seed);
                if (!good) /* at once: what follows may hang */
                    printf("FAILED %s: %s, seed %llu: %s\n", lists[i].name, c->name,
                           (unsigned long long)seed, r->message);
                fflush(stdout);
                note_check(json, passed + failed == 0, lists[i].name, c->name, seed, good,
                           r->message);
                passed += good;
                failed += !good;
            }
    printf("checks%s%s: %d passed, %d failed, %d not run for want of time; seeds %llu on\n",
           s->only ? " of " : "", s->only ? s->only : "", passed, failed, skipped,
           (unsigned long long)s->seed);
    return failed > 0 || skipped > 0 ? 1 : 0;
}

/* ---- timings ------------------------------------------------------------------------------------
 */

static int run_timings(rig *r, const settings *s, FILE *json) {
    timings *t = calloc(1, sizeof *t);
    if (!t)
        return 4;
    const mz_kstatus status =
        time_all(r->kernels, s->small, s->seed, now_seconds() + s->seconds, s->failed, t);
    print_table(stdout, t, s->peers, s->small);
    if (json)
        print_json(json, t, s->small);
    if (status != MZ_K_OK)
        printf("gpu: %s\n", mz_kernels_error(r->kernels));
    const int code = status == MZ_K_OK ? exit_of(t, s->small) : 1;
    free(t);
    return code;
}

/* ---- main ---------------------------------------------------------------------------------------
 */

static int run_mode(rig *r, const settings *s, FILE *json) {
    printf("%s\n", mz_kernels_describe(r->kernels));
    fflush(stdout);
    if (strcmp(s->mode, "time") == 0)
        return run_timings(r, s, json);
    if (json)
        fputs("[", json);
    const int code = run_checks(r, s, json);
    if (json)
        fputs("]\n", json);
    return code;
}

int main(int argc, char **argv) {
    settings s;
    if (!read_settings(argc, argv, &s)) {
        fputs(usage, stderr);
        return 2;
    }
    if (strcmp(s.mode, "counts") == 0)
        return write_counts(s.small, s.seed, stdout) ? 0 : 4;
    if (strcmp(s.mode, "plan") == 0) {
        int rows;
        const double seconds = time_planned(s.small, s.seed, &rows);
        printf("%.0f %d\n", ceil(seconds), rows);
        return 0;
    }
    const mz_kernels_options options = {
        .backend = MZ_BACKEND_CUDA, .streams = 2, .library_dir = s.library_dir};
    rig r = {.small = s.small};
    char message[300];
    const mz_kstatus status = mz_kernels_open(&options, &r.kernels, message, sizeof message);
    if (status != MZ_K_OK) {
        fprintf(stderr, "gpu: %s\n", message);
        return status == MZ_K_EHARDWARE ? 3 : 4;
    }
    FILE *json = s.json ? fopen(s.json, "w") : NULL;
    if (s.json && !json)
        fprintf(stderr, "gpu: %s cannot be written\n", s.json);
    int code = s.json && !json ? 2 : run_mode(&r, &s, json);
    if (json && fclose(json) != 0)
        code = 4;
    mz_kernels_close(&r.kernels);
    return code;
}
