/* What a result file says of a replay, against sums over the records that went in. Times are
 * multiples of 2^-10 s, so that sums are exact in any order and every comparison is of equals. */
#include "replay/measure.h"

#include "common/base/rng.h"
#include "common/io/phase.h"
#include "tests/harness.h"

#include <math.h>

/* The planner of these tests: says what a test sets. */
struct mz_planner {
    const char *text;
    mz_policy_traits traits;
};

const char *mz_planner_text(const mz_planner *p) {
    return p->text;
}

const mz_policy_traits *mz_planner_traits(const mz_planner *p) {
    return &p->traits;
}

static const mz_planner plain = {.text = "static", .traits = {.score_source = ""}};

/* ---- records -----------------------------------------------------------------------------------
 */

enum { CALLS_MAX = 6 };

/* Everything that is fed, kept beside the measure. */
typedef struct world {
    int32_t ranks, processes, layers;
    int64_t steps;
    mz_measure *measure;
    mz_measure_step *step;          /* [steps] */
    double (*imbalance)[CALLS_MAX]; /* [steps] */
    char *records;                  /* [steps][ranks] */
    mz_err err;
} world;

static void world_open(world *w, int32_t ranks, int32_t processes, int32_t layers, int64_t steps) {
    *w = (world){.ranks = ranks, .processes = processes, .layers = layers, .steps = steps};
    assert_ok(mz_measure_create(ranks, layers, &w->measure, &w->err), &w->err);
    w->step = calloc((size_t)steps + 1, sizeof *w->step);
    w->imbalance = calloc((size_t)steps + 1, sizeof *w->imbalance);
    w->records = calloc((size_t)(steps * ranks) + 1, mz_measure_size(w->measure));
    assert_true(w->step && w->imbalance && w->records);
    for (int64_t s = 0; s < steps; s++)
        w->step[s] = (mz_measure_step){.ordinal = s, .imbalance = w->imbalance[s]};
}

static void world_close(world *w) {
    mz_measure_free(&w->measure);
    assert_null(w->measure);
    free(w->step);
    free(w->imbalance);
    free(w->records);
}

static mz_measure_rank *record(const world *w, int64_t step, int32_t rank) {
    return (mz_measure_rank *)(w->records +
                               (size_t)(step * w->ranks + rank) * mz_measure_size(w->measure));
}

static double *cell(const world *w, int64_t step, int32_t layer, int32_t rank, int phase) {
    return mz_measure_detail(record(w, step, rank)) + layer * MZ_PHASES + phase;
}

/* Adds step s from memory that is overwritten afterwards: nothing may be read later. */
static void add(world *w, int64_t s) {
    const size_t bytes = mz_measure_size(w->measure) * (size_t)w->ranks;
    char *copy = malloc(bytes);
    double imbalance[CALLS_MAX];
    mz_measure_step step = w->step[s];
    memcpy(copy, record(w, s, 0), bytes);
    memcpy(imbalance, w->imbalance[s], sizeof imbalance);
    step.imbalance = step.calls ? imbalance : NULL;
    assert_int_equal(mz_measure_steps(w->measure), s);
    assert_ok(mz_measure_add(w->measure, &step, copy, &w->err), &w->err);
    memset(copy, 0x5a, bytes);
    memset(imbalance, 0x5a, sizeof imbalance);
    memset(&step, 0x5a, sizeof step);
    free(copy);
}

static mz_run run_of(world *w, const mz_planner *planner) {
    mz_run run;
    memset(&run, 0x5a, sizeof run);
    for (int64_t s = mz_measure_steps(w->measure); s < w->steps; s++)
        add(w, s);
    assert_ok(mz_measure_run(w->measure, planner, &run, &w->err), &w->err);
    return run;
}

static double draw_s(mz_rng *rng, uint64_t most) {
    return (double)mz_rng_below(rng, most) / 1024;
}

static void draw_rank(mz_measure_rank *k, bool first, mz_rng *rng) {
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++) {
        k->at_peak[c] = (int64_t)mz_rng_below(rng, 1000000);
        k->most[c] = k->at_peak[c] + (int64_t)mz_rng_below(rng, 1000);
        k->peak += k->at_peak[c];
    }
    k->peak_layer = (int32_t)mz_rng_below(rng, 100);
    snprintf(k->peak_label, sizeof k->peak_label, "%s of layer %%d",
             mz_rng_below(rng, 2) ? "rows" : "h");
    if (!first)
        return;
    int64_t *const bytes[] = {&k->dispatch_bytes,          &k->combine_bytes,
                              &k->backward_dispatch_bytes, &k->backward_combine_bytes,
                              &k->transfer_bytes,          &k->within_process_bytes,
                              &k->between_process_bytes};
    for (int i = 0; i < COUNT_OF(bytes); i++)
        *bytes[i] = (int64_t)mz_rng_below(rng, (uint64_t)1 << 40);
    k->pairs = 1 + (int64_t)mz_rng_below(rng, 100000);
    k->dropped_pairs = (int64_t)mz_rng_below(rng, (uint64_t)k->pairs);
    k->kept_pairs = (int64_t)mz_rng_below(rng, (uint64_t)(k->pairs - k->dropped_pairs + 1));
}

/* A step as processes report it: clocks, traffic and pairs are theirs; planning is the same on all
 * of a process's ranks; every rank has its own memory and phases, launch_wait excepted. */
static void draw_step(world *w, int64_t s, mz_rng *rng) {
    mz_measure_step *step = &w->step[s];
    const int32_t each = w->ranks / w->processes;
    *step = (mz_measure_step){.ordinal = (int64_t)mz_rng_below(rng, 50),
                              .tokens = (int64_t)mz_rng_below(rng, 10000),
                              .probe_s = {draw_s(rng, 8), draw_s(rng, 8), draw_s(rng, 8)},
                              .kept_score = draw_s(rng, 500),
                              .total_score = 1 + draw_s(rng, 500),
                              .over_budget_calls = (int64_t)mz_rng_below(rng, 3),
                              .imbalance = w->imbalance[s],
                              .calls = (int64_t)mz_rng_below(rng, CALLS_MAX + 1)};
    if (step->over_budget_calls)
        snprintf(step->over_budget, sizeof step->over_budget, "budget of step %lld", (long long)s);
    for (int64_t c = 0; c < step->calls; c++)
        w->imbalance[s][c] = 1 + draw_s(rng, 3000);
    for (int32_t r = 0; r < w->ranks; r++) {
        mz_measure_rank *k = record(w, s, r), *head = record(w, s, r - r % each);
        k->step_s = r % each ? head->step_s : 1 + draw_s(rng, 4000);
        k->moe_s = r % each ? head->moe_s : draw_s(rng, 1000);
        draw_rank(k, r % each == 0, rng);
        for (int32_t l = 0; l <= w->layers; l++)
            for (int p = 0; p < MZ_PHASE_LAUNCH_WAIT; p++)
                *cell(w, s, l, r, p) = p == MZ_PHASE_PLANNER && r % each
                                           ? *cell(w, s, l, r - r % each, p)
                                           : draw_s(rng, mz_rng_below(rng, 2) ? 100 : 1);
    }
}

/* ---- the same figures, from their definitions --------------------------------------------------
 */

static double phase_sum(const world *w, int64_t s, int32_t r, int phase) {
    double sum = 0;
    for (int32_t l = 0; l <= w->layers; l++)
        sum += *cell(w, s, l, r, phase);
    return sum;
}

static double longest(const world *w, int64_t s) {
    double most = 0;
    for (int32_t r = 0; r < w->ranks; r++)
        most = record(w, s, r)->step_s > most ? record(w, s, r)->step_s : most;
    return most;
}

/* What no kernel and no exchange of the rank accounts for. */
static double waiting(const world *w, int64_t s, int32_t r) {
    double left = longest(w, s);
    for (int p = 0; p < MZ_PHASE_LAUNCH_WAIT; p++)
        left -= p == MZ_PHASE_PLANNER ? 0 : phase_sum(w, s, r, p);
    return left > 0 ? left : 0;
}

/* Values at most x, of n. */
static int64_t up_to(const double *v, int64_t n, double x) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        count += v[i] <= x;
    return count;
}

/* The k-th smallest, from 1: the smallest value that k of them do not exceed. */
static double smallest(const double *v, int64_t n, int64_t k) {
    double best = INFINITY;
    for (int64_t i = 0; i < n; i++)
        if (v[i] < best && up_to(v, n, v[i]) >= k)
            best = v[i];
    return best;
}

static void check_stat(mz_stat got, const double *v, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += v[i];
    if (n == 0) {
        assert_true(isnan(got.mean) && isnan(got.p50) && isnan(got.p95) && isnan(got.max));
        return;
    }
    assert_true(got.mean == sum / (double)n);
    assert_true(got.p50 == (smallest(v, n, (n + 1) / 2) + smallest(v, n, n / 2 + 1)) / 2);
    assert_true(got.p95 == smallest(v, n, (95 * n + 99) / 100));
    assert_true(got.max == smallest(v, n, n));
}

static void check_times(const world *w, const mz_run *run) {
    double *step_s = calloc((size_t)w->steps, sizeof *step_s), time = 0, moe = 0;
    int64_t tokens = 0, calls = 0;
    for (int64_t s = 0; s < w->steps; s++) {
        double most = 0;
        for (int32_t r = 0; r < w->ranks; r++)
            most = record(w, s, r)->moe_s > most ? record(w, s, r)->moe_s : most;
        moe += most;
        time += step_s[s] = longest(w, s);
        tokens += w->step[s].tokens;
        calls += w->step[s].calls;
        assert_true(run->step_s[s] == step_s[s]);
        for (int k = 0; k < MZ_SPEEDS; k++)
            assert_true(run->probe_s[k][s] == w->step[s].probe_s[k]);
        assert_int_equal(run->step_ordinal[s], w->step[s].ordinal);
    }
    check_stat(run->step_time_s, step_s, w->steps);
    assert_int_equal(run->steps, w->steps);
    assert_true(run->moe_time_s == moe / (double)w->steps);
    assert_true(run->tokens_per_s == (double)tokens / time);
    assert_true(run->layer_calls == (double)calls / (double)w->steps);
    free(step_s);
}

static void check_phases(const world *w, const mz_run *run) {
    assert_int_equal(run->phases, MZ_PHASES);
    for (int p = 0; p < MZ_PHASES; p++) {
        double sum = 0;
        for (int64_t s = 0; s < w->steps; s++) {
            double most = 0;
            for (int32_t r = 0; r < w->ranks; r++) {
                const double own =
                    p == MZ_PHASE_LAUNCH_WAIT ? waiting(w, s, r) : phase_sum(w, s, r, p);
                most = own > most ? own : most;
            }
            sum += most;
        }
        assert_string_equal(run->phase_name[p], mz_phase_name((mz_phase)p));
        assert_true(run->phase_s[p] == sum / (double)w->steps);
    }
    assert_true(run->planner_s == run->phase_s[MZ_PHASE_PLANNER]);
    assert_true(run->planner_measured_s == run->planner_s);
    assert_true(run->planner_hidden_s == 0);
}

static void check_detail(const world *w, const mz_run *run) {
    int64_t at = 0;
    assert_int_equal(run->detail_layers, w->layers + 1);
    for (int64_t s = 0; s < w->steps; s++)
        for (int32_t l = 0; l <= w->layers; l++)
            for (int32_t r = 0; r < w->ranks; r++)
                for (int p = 0; p < MZ_PHASES; p++, at++)
                    assert_true(run->detail_s[at] == (p == MZ_PHASE_LAUNCH_WAIT && l == w->layers
                                                          ? waiting(w, s, r)
                                                          : *cell(w, s, l, r, p)));
}

static void check_ranks(const world *w, const mz_run *run) {
    assert_int_equal(run->ranks, w->ranks);
    for (int32_t r = 0; r < w->ranks; r++) {
        /* Kernels: exchanges, planning and waiting are not the rank's own work. */
        static const int kernels[] = {MZ_PHASE_ATTENTION,      MZ_PHASE_ROUTER,
                                      MZ_PHASE_PACK,           MZ_PHASE_EXPERTS,
                                      MZ_PHASE_UNPACK,         MZ_PHASE_DENSE,
                                      MZ_PHASE_LOSS,           MZ_PHASE_SCORE,
                                      MZ_PHASE_BACKWARD_PACK,  MZ_PHASE_BACKWARD_EXPERTS,
                                      MZ_PHASE_BACKWARD_OTHER, MZ_PHASE_OPTIMIZER};
        double busy = 0;
        int64_t peak = 0;
        for (int64_t s = 0; s < w->steps; s++) {
            peak = record(w, s, r)->peak > peak ? record(w, s, r)->peak : peak;
            for (int i = 0; i < COUNT_OF(kernels); i++)
                busy += phase_sum(w, s, r, kernels[i]);
        }
        assert_true(run->rank_busy_s[r] == busy / (double)w->steps);
        assert_int_equal(run->rank_peak_bytes[r], peak);
        for (int c = 0; c < MZ_MEM_CATEGORIES; c++) {
            int64_t most = 0;
            for (int64_t s = 0; s < w->steps; s++)
                most = record(w, s, r)->most[c] > most ? record(w, s, r)->most[c] : most;
            assert_int_equal(run->rank_memory_bytes[r * MZ_MEM_CATEGORIES + c], most);
        }
    }
}

static void check_peak(const world *w, const mz_run *run) {
    const mz_measure_rank *worst = record(w, 0, 0);
    int32_t rank = 0;
    int64_t sum = 0;
    char at[256];
    for (int64_t i = 0; i < w->steps * w->ranks; i++)
        if (record(w, i / w->ranks, (int32_t)(i % w->ranks))->peak > worst->peak) {
            rank = (int32_t)(i % w->ranks);
            worst = record(w, i / w->ranks, rank);
        }
    assert_int_equal(run->peak_memory_bytes, worst->peak);
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++) {
        assert_int_equal(run->memory_bytes[c], worst->at_peak[c]);
        sum += run->memory_bytes[c];
    }
    assert_int_equal(sum, worst->peak);
    snprintf(at, sizeof at, "%s of layer %d on rank %d", worst->peak_label[0] == 'r' ? "rows" : "h",
             worst->peak_layer, rank);
    assert_string_equal(run->peak_at, at);
}

/* Sum of a field of all records. */
static int64_t total(const world *w, size_t field) {
    int64_t sum = 0;
    for (int64_t s = 0; s < w->steps; s++)
        for (int32_t r = 0; r < w->ranks; r++)
            sum += *(const int64_t *)((const char *)record(w, s, r) + field);
    return sum;
}

#define TOTAL(field) total(w, offsetof(mz_measure_rank, field))
/* The nearest whole number of bytes to the mean; halves go up. */
#define MEAN(field) ((int64_t)floorl((long double)TOTAL(field) / w->steps + 0.5L))

static void check_counts(const world *w, const mz_run *run) {
    double kept = 0, score = 0, ratio[400];
    int64_t calls = 0, over = 0, first = -1;
    char text[64] = "";
    for (int64_t s = 0; s < w->steps; s++) {
        kept += w->step[s].kept_score;
        score += w->step[s].total_score;
        over += w->step[s].over_budget_calls;
        first = first < 0 && w->step[s].over_budget_calls ? s : first;
        for (int64_t c = 0; c < w->step[s].calls; c++)
            ratio[calls++] = w->imbalance[s][c];
    }
    assert_int_equal(run->dispatch_bytes, MEAN(dispatch_bytes));
    assert_int_equal(run->combine_bytes, MEAN(combine_bytes));
    assert_int_equal(run->backward_dispatch_bytes, MEAN(backward_dispatch_bytes));
    assert_int_equal(run->backward_combine_bytes, MEAN(backward_combine_bytes));
    assert_int_equal(run->transfer_bytes, MEAN(transfer_bytes));
    assert_true(run->split);
    assert_int_equal(run->within_process_bytes, MEAN(within_process_bytes));
    assert_int_equal(run->between_process_bytes, MEAN(between_process_bytes));
    assert_true(run->kept_pairs_fraction == (double)TOTAL(kept_pairs) / (double)TOTAL(pairs));
    assert_true(run->dropped_pairs_fraction == (double)TOTAL(dropped_pairs) / (double)TOTAL(pairs));
    assert_true(run->kept_score_mass == kept / score);
    assert_int_equal(run->over_budget_calls, over);
    if (first >= 0)
        snprintf(text, sizeof text, "budget of step %lld", (long long)first);
    assert_string_equal(run->over_budget, text);
    check_stat(run->rank_imbalance, ratio, calls);
}

static void check_all(const world *w, const mz_run *run) {
    check_times(w, run);
    check_phases(w, run);
    check_detail(w, run);
    check_ranks(w, run);
    check_peak(w, run);
    check_counts(w, run);
    assert_true(run->fits && !run->bounds);
    assert_string_equal(run->oom, "");
}

/* ---- tests -------------------------------------------------------------------------------------
 */

/* Any number of ranks, processes, layers and steps; a run may be asked for before the last step. */
static void figures_are_those_of_the_records(void **state) {
    static const struct {
        int32_t ranks, processes, layers;
        int64_t steps;
    } shapes[] = {{1, 1, 1, 1},  {1, 1, 3, 2}, {2, 1, 1, 1}, {2, 2, 0, 3},  {4, 2, 2, 5},
                  {6, 3, 2, 20}, {8, 4, 1, 7}, {8, 1, 4, 1}, {3, 3, 2, 21}, {4, 4, 3, 40}};
    for (int i = 0; i < COUNT_OF(shapes); i++)
        for (uint64_t seed = 0; seed < 4; seed++) {
            mz_rng rng = mz_rng_make(seed, (uint64_t)i);
            world w;
            world_open(&w, shapes[i].ranks, shapes[i].processes, shapes[i].layers, shapes[i].steps);
            for (int64_t s = 0; s < w.steps; s++)
                draw_step(&w, s, &rng);
            w.steps = (shapes[i].steps + 1) / 2;
            mz_run run = run_of(&w, &plain);
            check_all(&w, &run);
            w.steps = shapes[i].steps;
            run = run_of(&w, &plain);
            check_all(&w, &run);
            world_close(&w);
        }
}

/* Two processes of two ranks, one layer, two steps, worked out on paper: what belongs to a process
 * stands at ranks 0 and 2. */
static void processes_count_once(void **state) {
    world w;
    world_open(&w, 4, 2, 1, 2);
    for (int64_t s = 0; s < 2; s++) {
        w.step[s].tokens = 120;
        for (int32_t r = 0; r < 4; r++) {
            mz_measure_rank *k = record(&w, s, r);
            k->step_s = r < 2 ? 4 : 3;
            k->moe_s = r < 2 ? 1 : 2.5;
            *cell(&w, s, 0, r, MZ_PHASE_PLANNER) = r < 2 ? 0.25 : 0.125 + (double)s;
            *cell(&w, s, 0, r, MZ_PHASE_EXPERTS) = 0.5 * (r + 1);
            *cell(&w, s, 0, r, MZ_PHASE_DISPATCH) = 0.25;
            *cell(&w, s, 1, r, MZ_PHASE_OPTIMIZER) = r == 1 ? 1 : 0.5;
        }
        for (int32_t r = 0; r < 4; r += 2) {
            mz_measure_rank *k = record(&w, s, r);
            k->dispatch_bytes = 100 + s;
            k->transfer_bytes = 7;
            k->pairs = 80;
            k->kept_pairs = 60;
            k->dropped_pairs = r == 2 ? 8 : 0;
        }
    }
    const mz_run run = run_of(&w, &plain);
    assert_true(run.step_time_s.mean == 4 && run.step_time_s.p50 == 4 && run.step_time_s.p95 == 4);
    assert_true(run.moe_time_s == 2.5);
    assert_true(run.tokens_per_s == 30);
    /* Step 0: process 0 plans for 0.25 s, step 1: process 1 for 1.125 s. */
    assert_true(run.planner_s == 0.6875 && run.phase_s[MZ_PHASE_PLANNER] == 0.6875);
    assert_true(run.phase_s[MZ_PHASE_EXPERTS] == 2);
    assert_true(run.phase_s[MZ_PHASE_OPTIMIZER] == 1);
    /* Rank 0 works longest of all for 0.5 + 0.25 + 0.5 of 4 s: planning is waiting. */
    assert_true(run.phase_s[MZ_PHASE_LAUNCH_WAIT] == 2.75);
    const double *last = run.detail_s + 4 * MZ_PHASES + MZ_PHASE_LAUNCH_WAIT;
    assert_true(last[0] == 2.75 && last[MZ_PHASES] == 1.75 && last[2 * MZ_PHASES] == 1.75 &&
                last[3 * MZ_PHASES] == 1.25);
    assert_true(run.rank_busy_s[0] == 1 && run.rank_busy_s[1] == 2 && run.rank_busy_s[3] == 2.5);
    assert_int_equal(run.dispatch_bytes, 201);
    assert_int_equal(run.transfer_bytes, 14);
    assert_int_equal(run.combine_bytes, 0);
    assert_true(run.kept_pairs_fraction == 0.75);
    assert_true(run.dropped_pairs_fraction == 0.05);
    world_close(&w);
}

static void a_mean_of_bytes_is_the_nearest_number(void **state) {
    static const int64_t sums[][2] = {{0, 0}, {1, 0}, {2, 1}, {3, 1}, {4, 1}, {5, 1}, {6, 2}};
    for (int i = 0; i < COUNT_OF(sums); i++) {
        world w;
        world_open(&w, 1, 1, 1, 4);
        record(&w, 2, 0)->combine_bytes = sums[i][0];
        assert_int_equal(run_of(&w, &plain).combine_bytes, sums[i][1]);
        world_close(&w);
    }
}

static void no_step_is_no_result(void **state) {
    world w;
    world_open(&w, 2, 1, 2, 0);
    mz_run run;
    assert_int_equal(mz_measure_steps(w.measure), 0);
    assert_fails(mz_measure_run(w.measure, &plain, &run, &w.err), MZ_EINPUT, "no step", &w.err);
    world_close(&w);
    mz_measure_free(&w.measure); /* of none */
}

/* Steps without pairs, time, scores, calls or memory have fractions and rates all the same. */
static void nothing_happened(void **state) {
    world w;
    world_open(&w, 2, 2, 2, 3);
    const mz_planner scored = {.text = "x", .traits = {.score_source = "trace"}};
    const mz_run run = run_of(&w, &scored);
    assert_true(run.tokens_per_s == 0 && run.moe_time_s == 0 && run.step_time_s.mean == 0);
    assert_true(run.kept_pairs_fraction == 1 && run.dropped_pairs_fraction == 0);
    assert_true(isnan(run.kept_score_mass));
    assert_string_equal(run.score_source, "");
    check_stat(run.rank_imbalance, NULL, 0);
    assert_int_equal(run.peak_memory_bytes, 0);
    assert_string_equal(run.peak_at, "");
    for (int64_t s = 0; s < 3; s++)
        for (int k = 0; k < MZ_SPEEDS; k++)
            assert_true(run.probe_s[k][s] == 0 && run.step_s[s] == 0);
    world_close(&w);
}

/* A window of two steps three times over: every record stands alone, in the order it came. */
static void windows_repeat(void **state) {
    static const double step_s[] = {4, 1, 6, 2, 5, 3}, probe_s[] = {0.5, 0, 0.25, 0.5, 0, 0};
    world w;
    world_open(&w, 1, 1, 1, 6);
    for (int64_t s = 0; s < 6; s++) {
        w.step[s].ordinal = s % 2;
        for (int k = 0; k < MZ_SPEEDS; k++)
            w.step[s].probe_s[k] = probe_s[s] * (k + 1);
        w.step[s].tokens = s % 2 ? 100 : 40;
        record(&w, s, 0)->step_s = step_s[s];
    }
    const mz_run run = run_of(&w, &plain);
    assert_int_equal(run.steps, 6);
    for (int64_t s = 0; s < 6; s++) {
        assert_int_equal(run.step_ordinal[s], s % 2);
        for (int k = 0; k < MZ_SPEEDS; k++)
            assert_true(run.step_s[s] == step_s[s] && run.probe_s[k][s] == probe_s[s] * (k + 1));
    }
    assert_true(run.step_time_s.mean == 3.5 && run.step_time_s.p50 == 3.5);
    assert_true(run.step_time_s.p95 == 6 && run.step_time_s.max == 6);
    assert_true(run.tokens_per_s == 20);
    world_close(&w);
}

/* Clocks of a rank's work may add up to a little more than the step: it waited for nothing. */
static void nobody_waits_less_than_nothing(void **state) {
    world w;
    world_open(&w, 2, 1, 1, 1);
    record(&w, 0, 0)->step_s = record(&w, 0, 1)->step_s = 1;
    *cell(&w, 0, 0, 0, MZ_PHASE_EXPERTS) = 0.75;
    *cell(&w, 0, 1, 0, MZ_PHASE_OPTIMIZER) = 0.5;
    *cell(&w, 0, 0, 1, MZ_PHASE_EXPERTS) = 0.875;
    const mz_run run = run_of(&w, &plain);
    assert_true(run.phase_s[MZ_PHASE_LAUNCH_WAIT] == 0.125);
    const double *last = run.detail_s + 2 * MZ_PHASES + MZ_PHASE_LAUNCH_WAIT;
    assert_true(last[0] == 0 && last[MZ_PHASES] == 0.125);
    world_close(&w);
}

/* The first of equal peaks, and only a higher one after it. */
static void the_peak_names_what_made_it(void **state) {
    world w;
    world_open(&w, 3, 1, 1, 4);
    static const struct {
        int64_t peak;
        const char *label, *at;
    } peaks[] = {{50, "gate and up, layer %d", "gate and up, layer 7 on rank 1"},
                 {50, "other", "gate and up, layer 7 on rank 1"},
                 {60, "100% of it", "100% of it on rank 1"},
                 {70, "%d", "7 on rank 1"}};
    for (int64_t s = 0; s < 4; s++) {
        mz_measure_rank *k = record(&w, s, 1);
        k->peak = k->at_peak[MZ_MEM_TOKEN_BUFFERS] = peaks[s].peak;
        k->peak_layer = 7;
        strcpy(k->peak_label, peaks[s].label);
        *record(&w, s, 2) = *k; /* the same on the next rank, which does not count */
        strcpy(record(&w, s, 2)->peak_label, "late");
        w.steps = s + 1;
        const mz_run run = run_of(&w, &plain);
        assert_string_equal(run.peak_at, peaks[s].at);
        assert_int_equal(run.memory_bytes[MZ_MEM_TOKEN_BUFFERS], peaks[s].peak);
        assert_int_equal(run.rank_peak_bytes[0], 0);
        assert_int_equal(run.rank_peak_bytes[2], peaks[s].peak);
    }
    world_close(&w);
}

static void long_texts_fit(void **state) {
    world w;
    world_open(&w, 1, 1, 1, 2);
    mz_measure_rank *k = record(&w, 0, 0);
    k->peak = 1;
    memset(k->peak_label, 'l', sizeof k->peak_label - 1);
    memcpy(k->peak_label + sizeof k->peak_label - 3, "%d", 2);
    k->peak_layer = INT32_MAX;
    w.step[0].over_budget_calls = 0; /* a text without a call is no text */
    strcpy(w.step[0].over_budget, "none");
    w.step[1].over_budget_calls = 2;
    memset(w.step[1].over_budget, 'b', sizeof w.step[1].over_budget - 1);
    w.steps = 1;
    mz_run run = run_of(&w, &plain);
    assert_string_equal(run.over_budget, "");
    w.steps = 2;
    run = run_of(&w, &plain);
    char at[128];
    snprintf(at, sizeof at, "%.57s2147483647 on rank 0",
             "lllllllllllllllllllllllllllllllllllllllllllllllllllllllllllllll");
    assert_string_equal(run.peak_at, at);
    assert_string_equal(run.over_budget, w.step[1].over_budget);
    assert_int_equal(run.over_budget_calls, 2);
    world_close(&w);
}

static void the_policy_is_named(void **state) {
    static const mz_planner lossy = {
        .text = "lrmoe[keep=0.5]",
        .traits = {.lossy = true, .score_source = "gate weights", .label = "LRMoE (our reading)"}};
    static const mz_planner bare = {.text = "static"}; /* neither label nor source */
    world w;
    world_open(&w, 1, 1, 1, 2);
    w.step[0].total_score = 4;
    w.step[0].kept_score = 1;
    w.step[1].total_score = 4;
    w.step[1].kept_score = 3;
    mz_run run = run_of(&w, &lossy);
    assert_string_equal(run.policy, "lrmoe[keep=0.5]");
    assert_string_equal(run.system, "LRMoE (our reading)");
    assert_string_equal(run.score_source, "gate weights");
    assert_true(run.lossy && run.kept_score_mass == 0.5);
    run = run_of(&w, &bare);
    assert_string_equal(run.policy, "static");
    assert_string_equal(run.system, "");
    assert_string_equal(run.score_source, "");
    assert_false(run.lossy);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(figures_are_those_of_the_records),
        cmocka_unit_test(processes_count_once),
        cmocka_unit_test(a_mean_of_bytes_is_the_nearest_number),
        cmocka_unit_test(no_step_is_no_result),
        cmocka_unit_test(nothing_happened),
        cmocka_unit_test(windows_repeat),
        cmocka_unit_test(nobody_waits_less_than_nothing),
        cmocka_unit_test(the_peak_names_what_made_it),
        cmocka_unit_test(long_texts_fit),
        cmocka_unit_test(the_policy_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
