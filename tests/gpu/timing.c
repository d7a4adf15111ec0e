/* Times every operation on every shape (operations.c), then holds what it wrote at that size
 * against double precision (sampled.c). */
#include "tests/gpu/gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Qwen3-30B-A3B's experts at two batch sizes and with skewed counts; GLM-4.5-Air's. What has a goal
 * first. */
static const shape shapes[] = {{"qwen3-30b 32768", 32768, 2048, 768, 128, 8, false, true},
                               {"qwen3-30b 32768 skewed", 32768, 2048, 768, 128, 8, true, true},
                               {"qwen3-30b 8192", 8192, 2048, 768, 128, 8, false, false},
                               {"qwen3-30b 8192 skewed", 8192, 2048, 768, 128, 8, true, false},
                               {"glm-4.5-air 8192", 8192, 4096, 1408, 128, 8, false, false}};
static const shape small_shapes[] = {{"small", 24, 64, 32, 8, 2, false, true},
                                     {"small skewed", 24, 64, 32, 8, 2, true, true}};

double now_seconds(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- timing -------------------------------------------------------------------------------------
 */

/* Seconds of one of `calls` calls in a row. */
static mz_kstatus stretch(layer *l, operation_run *run, int calls, cost *c, double *seconds) {
    mz_kstatus status = mz_kernels_mark(l->kernels, 0, 0);
    for (int i = 0; i < calls && status == MZ_K_OK; i++)
        status = run(l, c);
    if (status == MZ_K_OK)
        status = mz_kernels_mark(l->kernels, 0, 1);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(l->kernels, 0);
    if (status == MZ_K_OK)
        status = mz_kernels_elapsed(l->kernels, 0, 1, seconds);
    *seconds /= calls;
    return status;
}

/* The median of three stretches of about 50 ms after a call to warm up. */
static mz_kstatus measure(layer *l, operation_run *run, bool small, timing *t) {
    cost c = {0, 0};
    double once = NAN, s[3] = {NAN, NAN, NAN};
    mz_kstatus status = stretch(l, run, 1, &c, &once);
    if (status == MZ_K_OK && !small)
        status = stretch(l, run, 1, &c, &once);
    const int calls = small || !(once < 0.05) ? 1 : (int)(0.05 / fmax(once, 1e-4));
    for (int i = 0; i < 3 && status == MZ_K_OK; i++)
        status = stretch(l, run, calls, &c, &s[i]);
    t->flops = c.flops;
    t->bytes = c.bytes;
    t->seconds = status == MZ_K_OK ? fmax(fmin(s[0], s[1]), fmin(fmax(s[0], s[1]), s[2])) : NAN;
    return status;
}

static void note_ceiling(timings *t, const timing *one) {
    if (isnan(one->seconds) || !one->held)
        return;
    if (strcmp(one->operation, "copy (ceiling)") == 0)
        t->copy_rate = fmax(t->copy_rate, one->bytes / one->seconds);
    if (strcmp(one->operation, "cuBLAS plain product (ceiling)") == 0)
        t->matrix_rate = fmax(t->matrix_rate, one->flops / one->seconds);
}

/* `names`: a list of names, each with a space around it. */
static bool among(const char *names, const char *name) {
    char spaced[40];
    snprintf(spaced, sizeof spaced, " %s ", name);
    return strstr(names, spaced) != NULL;
}

/* A new row of the table, without a time yet. */
static timing *add_row(timings *t, const char *name, const char *of) {
    timing *one = &t->at[t->n++];
    *one = (timing){.operation = name, .shape = of, .seconds = NAN};
    return one;
}

/* What the operation writes at this size, against double precision. */
static mz_kstatus hold(layer *l, const operation *o, uint64_t seed, timing *one) {
    probe p = {.l = l, .run = o->run, .random = seed};
    o->check(&p);
    for (int i = 0; i < p.copies; i++)
        free(p.host[i]);
    one->checked = p.checked;
    one->wrong = p.wrong;
    one->held = p.status == MZ_K_OK && !p.wrong && p.checked > 0;
    if (p.wrong)
        snprintf(one->message, sizeof one->message, "%s", p.message);
    else if (p.status == MZ_K_ENOMEM)
        snprintf(one->message, sizeof one->message, "no room for copies of its results");
    else if (p.status == MZ_K_OK && p.checked == 0)
        snprintf(one->message, sizeof one->message, "nothing of its results was checked");
    return p.status;
}

/* Why there is no time, or why nothing holds it. Only for want of memory may an operation be left
 * out, and the vendor's by the vendor; what else is refused is wrong. `own`: not the vendor's. */
static void note_refusal(const layer *l, mz_kstatus status, bool own, timing *one) {
    one->wrong |= l->short_of > 0 || status == MZ_K_EFAILED || (status != MZ_K_ENOMEM && own);
    if (one->message[0])
        return;
    if (l->short_of > 0)
        snprintf(one->message, sizeof one->message, "needs %zu bytes of scratch, which has %zu",
                 l->short_of, l->workspace_bytes);
    else
        snprintf(one->message, sizeof one->message, "%s",
                 status == MZ_K_ENOMEM ? "needs more memory" : mz_kernels_error(l->kernels));
}

static bool is_own(const operation *o) {
    return !o->list || strcmp(o->list, "vendor") != 0;
}

/* A refusal is a line of the table; a device that fails ends the run. */
static mz_kstatus time_layer(layer *l, bool small, double deadline, const char *failed,
                             timings *t) {
    uint64_t seed = (uint64_t)l->begin_host[1]; /* differs with the run's seed */
    for (int i = 0; i < operations_count && t->n < TIMINGS_MOST; i++) {
        timing *one = add_row(t, operations[i].name, l->shape.name);
        one->goal = goal_of(l, &operations[i]);
        t->cut |= now_seconds() > deadline;
        const bool wrong = operations[i].list && among(failed, operations[i].list);
        if (t->cut || wrong) {
            snprintf(one->message, sizeof one->message, "not timed: %s",
                     wrong ? "its checks failed" : "the time is up");
            continue;
        }
        l->short_of = 0;
        mz_kstatus status = measure(l, operations[i].run, small, one);
        if (status == MZ_K_OK)
            status = hold(l, &operations[i], seed++, one);
        if (status != MZ_K_OK)
            note_refusal(l, status, is_own(&operations[i]), one);
        if (status == MZ_K_EFAILED)
            return status;
        note_ceiling(t, one);
    }
    return MZ_K_OK;
}

static int shapes_of(bool small, const shape **s) {
    *s = small ? small_shapes : shapes;
    return small ? (int)(sizeof small_shapes / sizeof *small_shapes)
                 : (int)(sizeof shapes / sizeof *shapes);
}

mz_kstatus time_all(mz_kernels *k, bool small, uint64_t seed, double deadline, const char *failed,
                    timings *t) {
    const shape *s;
    const int n = shapes_of(small, &s);
    mz_kstatus status = MZ_K_OK;
    for (int i = 0; i < n && status != MZ_K_EFAILED && t->n < TIMINGS_MOST; i++) {
        layer l = {.kernels = k};
        timing *all = NULL; /* the row of a shape that is left out */
        status = t->cut ? MZ_K_OK : layer_open(k, &s[i], seed, &l);
        if (t->cut || status != MZ_K_OK)
            all = add_row(t, "all", s[i].name);
        if (t->cut)
            snprintf(all->message, sizeof all->message, "not timed: the time is up");
        else if (all)
            note_refusal(&l, status, true, all);
        else
            status = time_layer(&l, small, deadline, failed, t);
        layer_close(&l);
    }
    return status == MZ_K_EFAILED ? status : MZ_K_OK; /* all else is in the rows */
}

/* ---- the plan -----------------------------------------------------------------------------------
 */

/* Seconds of one row on a device like an H200 at a third of its copy rate and of the products'
 * goals: two calls, three stretches, one more call that is checked on the host. */
static double planned_row(layer *l, const operation *o) {
    cost c = {0, 0};
    o->run(l, &c); /* without a context it is refused, once it has said what it costs */
    const double once = fmax(c.bytes / 1.4e12, c.flops / 1e14);
    const double holding = 0.1 + 2e-9 * (double)(l->shape.hidden * l->shape.intermediate) * 20;
    return 3 * once + 3 * fmax(0.05, once) + holding;
}

double time_planned(bool small, uint64_t seed, int *rows) {
    const shape *s;
    const int n = shapes_of(small, &s);
    double seconds = 0;
    *rows = 0;
    for (int i = 0; i < n; i++) {
        layer l = {.shape = s[i], .pairs = s[i].tokens * s[i].k};
        int32_t *expert = malloc(sizeof *expert * (size_t)l.pairs);
        l.begin_host = malloc(sizeof *l.begin_host * ((size_t)s[i].experts + 1));
        const bool drawn = expert && l.begin_host && draw_pairs(&s[i], &seed, expert, l.begin_host);
        for (int j = 0; j < operations_count && drawn; j++)
            seconds += planned_row(&l, &operations[j]);
        seconds += 3; /* random inputs */
        *rows += operations_count;
        free(expert);
        free(l.begin_host);
    }
    return seconds;
}

static bool write_shape(const shape *s, uint64_t seed, FILE *file) {
    int32_t *expert = malloc(sizeof *expert * (size_t)(s->tokens * s->k));
    int64_t *begin = malloc(sizeof *begin * ((size_t)s->experts + 1));
    const bool drawn = expert && begin && draw_pairs(s, &seed, expert, begin);
    if (drawn) {
        fprintf(file, "%s\t%lld\t%lld", s->name, (long long)s->hidden, (long long)s->intermediate);
        for (int32_t e = 0; e < s->experts; e++)
            fprintf(file, "\t%lld", (long long)(begin[e + 1] - begin[e]));
        fputc('\n', file);
    }
    free(expert);
    free(begin);
    return drawn;
}

bool write_counts(bool small, uint64_t seed, FILE *file) {
    const shape *s;
    const int n = shapes_of(small, &s);
    bool written = true;
    for (int i = 0; i < n && written; i++)
        written = write_shape(&s[i], seed, file);
    return written;
}
