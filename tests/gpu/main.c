/* gpu check|time|counts OPTION...: see usage. The checks are those of tests/kernels. */
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
    "usage: gpu check|time|counts [--seed N] [--seconds N] [--only LIST] [--small] [--json FILE]\n"
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

static void print_text(FILE *file, const char *text) {
    fputc('"', file);
    for (; *text; text++)
        if (*text == '"' || *text == '\\')
            fprintf(file, "\\%c", *text);
        else if ((unsigned char)*text >= ' ')
            fputc(*text, file);
    fputc('"', file);
}

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

/* Seconds that the ceilings allow at least; 0: they say nothing. */
static double floor_of(const timings *t, const timing *one) {
    const double compute = t->matrix_rate > 0 ? one->flops / t->matrix_rate : 0;
    const double memory = t->copy_rate > 0 ? one->bytes / t->copy_rate : 0;
    return one->flops > 0 && t->matrix_rate <= 0 ? 0 : fmax(compute, memory);
}

/* How much of its goal's quantity an operation shows; NaN: not timed, or what it is held against.
 */
static double shown(const timings *t, const timing *one) {
    switch (one->goal.kind) {
    case GOAL_COPY_SHARE:
        return t->copy_rate > 0 ? one->bytes / one->seconds / t->copy_rate : NAN;
    case GOAL_FLOPS:
        return one->flops / one->seconds;
    default:
        return NAN;
    }
}

static const char *verdict(const timings *t, const timing *one) {
    const double x = shown(t, one);
    return isnan(x) ? "not known" : x >= one->goal.value ? "met" : "missed";
}

static void print_goal(const timings *t, const timing *one) {
    char text[60] = "-";
    const goal *g = &one->goal;
    const double x = shown(t, one);
    if (g->kind == GOAL_COPY_SHARE)
        snprintf(text, sizeof text, ">= %.0f%% copy: %.0f%%", 100 * g->value, 100 * x);
    if (g->kind == GOAL_FLOPS)
        snprintf(text, sizeof text, ">= %.0f TFLOP/s", 1e-12 * g->value);
    printf(" %-19s %-9s", text, g->kind == GOAL_NONE ? "" : verdict(t, one));
}

/* Operations with a goal that have this verdict. */
static int count_verdicts(const timings *t, const char *which) {
    int n = 0;
    for (int i = 0; i < t->n; i++)
        n += t->at[i].goal.kind != GOAL_NONE && strcmp(verdict(t, &t->at[i]), which) == 0;
    return n;
}

/* Lines "operation shape peer milliseconds", tab-separated, that name this operation. */
static void print_peers(const char *path, const timing *one) {
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[400];
    while (file && fgets(line, sizeof line, file)) {
        char *field[4] = {line, NULL, NULL, NULL};
        for (int i = 1; i < 4 && field[i - 1]; i++) {
            field[i] = strchr(field[i - 1], '\t');
            if (field[i])
                *field[i]++ = 0;
        }
        if (!field[3] || strcmp(field[0], one->operation) != 0 || strcmp(field[1], one->shape) != 0)
            continue;
        const double ms = strtod(field[3], NULL);
        printf("  %s %.3f ms (%.2f x)", field[2], ms, ms / (1e3 * one->seconds));
    }
    if (file)
        fclose(file);
}

static void print_table(const timings *t, const settings *s) {
    printf("%-32s %-24s %9s %9s %9s %8s %7s %6s %-19s %-9s  %s\n", "operation", "shape", "TFLOP",
           "GB", "ms", "TFLOP/s", "TB/s", "floor", "goal", "", "peers (their time / ours)");
    for (int i = 0; i < t->n; i++) {
        const timing *one = &t->at[i];
        printf("%-32s %-24s ", one->operation, one->shape);
        if (isnan(one->seconds)) {
            printf("%s\n", one->message);
            continue;
        }
        printf("%9.4f %9.4f %9.4f %8.1f %7.3f %5.0f%%", 1e-12 * one->flops, 1e-9 * one->bytes,
               1e3 * one->seconds, 1e-12 * one->flops / one->seconds,
               1e-12 * one->bytes / one->seconds, 100 * floor_of(t, one) / one->seconds);
        print_goal(t, one);
        print_peers(s->peers, one);
        putchar('\n');
    }
    printf("TFLOP, GB: the least that the operation can do and move. Ceilings: copy %.2f TB/s, "
           "cuBLAS product %.0f TFLOP/s; floor: least time by these over "
           "time taken%s\n",
           1e-12 * t->copy_rate, 1e-12 * t->matrix_rate, t->cut ? "; cut short by the clock" : "");
    printf("goals: %d met, %d missed, %d not known%s\n", count_verdicts(t, "met"),
           count_verdicts(t, "missed"), count_verdicts(t, "not known"),
           s->small ? " (small shapes, emulated: this says nothing of a GPU)" : "");
}

static void print_json_goal(FILE *json, const timings *t, const timing *one) {
    static const char *const unit[] = {NULL, "share of copy bytes/s, at least", "FLOP/s, at least"};
    const double x = shown(t, one);
    if (one->goal.kind == GOAL_NONE)
        return;
    fprintf(json, ", \"goal\": %.6g, \"goal_is\": \"%s\"", one->goal.value, unit[one->goal.kind]);
    if (!isnan(x))
        fprintf(json, ", \"reached\": %.6g", x);
    fprintf(json, ", \"verdict\": \"%s\"", verdict(t, one));
}

static void print_json(FILE *json, const timings *t, bool small) {
    fprintf(json, "{\"emulated\": %s, \"goals_met\": %d, \"goals_missed\": %d,\n",
            small ? "true" : "false", count_verdicts(t, "met"), count_verdicts(t, "missed"));
    fprintf(json, "\"copy_bytes_per_second\": %.6g, \"matrix_flops_per_second\": %.6g,\n",
            t->copy_rate, t->matrix_rate);
    fprintf(json, "\"complete\": %s, \"operations\": [\n", t->cut ? "false" : "true");
    for (int i = 0; i < t->n; i++) {
        const timing *one = &t->at[i];
        fprintf(json, "%s {\"operation\": \"%s\", \"shape\": \"%s\"", i ? ",\n" : "",
                one->operation, one->shape);
        if (isnan(one->seconds)) {
            fputs(", \"message\": ", json);
            print_text(json, one->message);
        } else {
            fprintf(
                json,
                ", \"seconds\": %.9g, \"flops\": %.9g, \"bytes\": %.9g, \"floor_seconds\": %.9g",
                one->seconds, one->flops, one->bytes, floor_of(t, one));
        }
        print_json_goal(json, t, one);
        fputc('}', json);
    }
    fputs("]}\n", json);
}

static int run_timings(rig *r, const settings *s, FILE *json) {
    timings *t = calloc(1, sizeof *t);
    if (!t)
        return 4;
    const mz_kstatus status =
        time_all(r->kernels, s->small, s->seed, now_seconds() + s->seconds, s->failed, t);
    print_table(t, s);
    if (json)
        print_json(json, t, s->small);
    if (status != MZ_K_OK)
        printf("gpu: %s\n", mz_kernels_error(r->kernels));
    free(t);
    return status == MZ_K_OK ? 0 : 1;
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
