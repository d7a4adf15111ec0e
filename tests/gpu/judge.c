/* What timings are worth: floors, goals and verdicts, as a table and as JSON. Needs libc alone, so
 * that a test can hold it against timings that no device made. */
#include "tests/gpu/gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- verdicts -----------------------------------------------------------------------------------
 */

double floor_of(const timings *t, const timing *one) {
    const double compute = t->matrix_rate > 0 ? one->flops / t->matrix_rate : 0;
    const double memory = t->copy_rate > 0 ? one->bytes / t->copy_rate : 0;
    return one->flops > 0 && t->matrix_rate <= 0 ? 0 : fmax(compute, memory);
}

/* Of another operation on the same shape; NaN: it has no time, or none that counts. */
static double seconds_of(const timings *t, const char *name, const char *of) {
    for (int i = 0; i < t->n; i++)
        if (strcmp(t->at[i].operation, name) == 0 && strcmp(t->at[i].shape, of) == 0)
            return t->at[i].held ? t->at[i].seconds : NAN;
    return NAN;
}

double reached(const timings *t, const timing *one) {
    switch (one->seconds > 0 ? one->goal.kind : GOAL_NONE) {
    case GOAL_COPY_SHARE:
        return t->copy_rate > 0 ? one->bytes / one->seconds / t->copy_rate : NAN;
    case GOAL_FLOPS:
        return one->flops / one->seconds;
    case GOAL_TIME_SHARE: {
        const double other = seconds_of(t, one->goal.of, one->shape);
        return other > 0 ? one->seconds / other : NAN;
    }
    default:
        return NAN;
    }
}

static bool reaches(const goal *g, double x) {
    return g->kind == GOAL_TIME_SHARE ? x <= g->value : x >= g->value;
}

const char *verdict(const timings *t, const timing *one) {
    const double x = reached(t, one);
    if (one->wrong)
        return "wrong";
    if (!(one->seconds > 0))
        return "not run";
    if (!one->held)
        return "not held";
    if (one->goal.kind == GOAL_NONE)
        return "no goal";
    return isnan(x) ? "not known" : reaches(&one->goal, x) ? "met" : "missed";
}

int count_verdicts(const timings *t, const char *which, bool with_goal) {
    int n = 0;
    for (int i = 0; i < t->n; i++)
        n += (!with_goal || t->at[i].goal.kind != GOAL_NONE) &&
             strcmp(verdict(t, &t->at[i]), which) == 0;
    return n;
}

int exit_of(const timings *t, bool small) {
    const bool missed = !small && count_verdicts(t, "missed", true) > 0;
    const int bad = count_verdicts(t, "wrong", false) + count_verdicts(t, "not held", false);
    return missed || bad > 0 ? 1 : 0;
}

/* ---- the table ----------------------------------------------------------------------------------
 */

static void print_goal(FILE *file, const timings *t, const timing *one) {
    char text[60] = "-";
    const goal *g = &one->goal;
    const double x = reached(t, one);
    if (g->kind == GOAL_COPY_SHARE)
        snprintf(text, sizeof text, ">= %.0f%% copy: %.0f%%", 100 * g->value, 100 * x);
    if (g->kind == GOAL_FLOPS)
        snprintf(text, sizeof text, ">= %.0f TFLOP/s", 1e-12 * g->value);
    if (g->kind == GOAL_TIME_SHARE)
        snprintf(text, sizeof text, "<= %.2f full: %.3f", g->value, x);
    fprintf(file, " %-19s %-9s", text, verdict(t, one));
}

/* Lines "operation shape peer milliseconds", tab-separated, that name this operation. */
static void print_peers(FILE *to, const char *path, const timing *one) {
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
        fprintf(to, "  %s %.3f ms (%.2f x)", field[2], ms, ms / (1e3 * one->seconds));
    }
    if (file)
        fclose(file);
}

static void print_row(FILE *file, const timings *t, const timing *one, const char *peers) {
    fprintf(file, "%-32s %-24s ", one->operation, one->shape);
    if (!one->held || !(one->seconds > 0)) {
        fprintf(file, "%s: %s\n", verdict(t, one), one->message);
        return;
    }
    fprintf(file, "%9.4f %9.4f %9.4f %8.1f %7.3f %5.0f%% %5d", 1e-12 * one->flops,
            1e-9 * one->bytes, 1e3 * one->seconds, 1e-12 * one->flops / one->seconds,
            1e-12 * one->bytes / one->seconds, 100 * floor_of(t, one) / one->seconds, one->checked);
    print_goal(file, t, one);
    print_peers(file, peers, one);
    fputc('\n', file);
}

void print_table(FILE *file, const timings *t, const char *peers, bool small) {
    fprintf(file, "%-32s %-24s %9s %9s %9s %8s %7s %6s %5s %-19s %-9s  %s\n", "operation", "shape",
            "TFLOP", "GB", "ms", "TFLOP/s", "TB/s", "floor", "held", "goal", "",
            "peers (their time / ours)");
    for (int i = 0; i < t->n; i++)
        print_row(file, t, &t->at[i], peers);
    fprintf(file,
            "TFLOP, GB: the least that the operation can do and move. Ceilings: copy %.2f TB/s, "
            "cuBLAS product %.0f TFLOP/s; floor: least time by these over time taken; held: values "
            "of its results at this size that were held against double precision%s\n",
            1e-12 * t->copy_rate, 1e-12 * t->matrix_rate, t->cut ? "; cut short by the clock" : "");
    fprintf(
        file,
        "goals: %d met, %d missed, %d not known, %d not run; %d operations wrong, %d not held%s\n",
        count_verdicts(t, "met", true), count_verdicts(t, "missed", true),
        count_verdicts(t, "not known", true), count_verdicts(t, "not run", true),
        count_verdicts(t, "wrong", false), count_verdicts(t, "not held", false),
        small ? " (small shapes, emulated: its times say nothing of a GPU)" : "");
}

/* ---- JSON ---------------------------------------------------------------------------------------
 */

void print_text(FILE *json, const char *text) {
    fputc('"', json);
    for (; *text; text++)
        if (*text == '"' || *text == '\\')
            fprintf(json, "\\%c", *text);
        else if ((unsigned char)*text >= ' ')
            fputc(*text, json);
    fputc('"', json);
}

/* JSON has neither NaN nor infinities. */
static void print_number(FILE *json, const char *key, double x) {
    if (isfinite(x))
        fprintf(json, ", \"%s\": %.9g", key, x);
    else
        fprintf(json, ", \"%s\": null", key);
}

static void print_json_row(FILE *json, const timings *t, const timing *one) {
    static const char *const unit[] = {"", "share of copy bytes/s, at least", "FLOP/s, at least",
                                       "share of the full backward's time, at most"};
    const goal *g = &one->goal;
    fputs(" {\"operation\": ", json);
    print_text(json, one->operation);
    fputs(", \"shape\": ", json);
    print_text(json, one->shape);
    const bool timed = one->seconds > 0, has_goal = g->kind != GOAL_NONE;
    print_number(json, "seconds", timed ? one->seconds : NAN);
    print_number(json, "flops", timed ? one->flops : NAN);
    print_number(json, "bytes", timed ? one->bytes : NAN);
    print_number(json, "floor_seconds", timed ? floor_of(t, one) : NAN);
    fprintf(json, ", \"values_checked\": %d", one->checked);
    print_number(json, "goal", has_goal ? g->value : NAN);
    if (has_goal)
        fprintf(json, ", \"goal_is\": \"%s\"", unit[g->kind]);
    print_number(json, "reached", reached(t, one));
    fprintf(json, ", \"verdict\": \"%s\"", verdict(t, one));
    if (one->message[0]) {
        fputs(", \"message\": ", json);
        print_text(json, one->message);
    }
    fputc('}', json);
}

void print_json(FILE *json, const timings *t, bool small) {
    fprintf(json, "{\"emulated\": %s, \"goals_met\": %d, \"goals_missed\": %d,\n",
            small ? "true" : "false", count_verdicts(t, "met", true),
            count_verdicts(t, "missed", true));
    fprintf(json,
            "\"goals_not_known\": %d, \"goals_not_run\": %d, \"operations_wrong\": %d, "
            "\"operations_not_held\": %d,\n",
            count_verdicts(t, "not known", true), count_verdicts(t, "not run", true),
            count_verdicts(t, "wrong", false), count_verdicts(t, "not held", false));
    fprintf(json, "\"copy_bytes_per_second\": %.6g, \"matrix_flops_per_second\": %.6g,\n",
            t->copy_rate, t->matrix_rate);
    fprintf(json, "\"complete\": %s, \"operations\": [\n", t->cut ? "false" : "true");
    for (int i = 0; i < t->n; i++) {
        fputs(i ? ",\n" : "", json);
        print_json_row(json, t, &t->at[i]);
    }
    fputs("]}\n", json);
}
