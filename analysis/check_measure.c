/* Times and memory of every policy, predicted and measured. */
#include "analysis/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double check_median(double *value, int64_t count) {
    if (count < 1)
        return NAN;
    qsort(value, (size_t)count, sizeof *value, by_value);
    return count % 2 ? value[count / 2] : (value[count / 2 - 1] + value[count / 2]) / 2;
}

/* The number of values below the median is binomial (n, 1/2): the k-th smallest and the k-th
 * largest hold it unless fewer than k values lie on one side (David and Nagaraja, Order Statistics,
 * section 7.1). The largest k with at most 2.5 % on either side. */
bool check_interval(int64_t n, int64_t *low, int64_t *high) {
    double tail = 0, logarithm = -(double)n * log(2); /* of one outcome: n over i, over 2^n */
    int64_t k = 0;
    if (n < CHECK_RECORDS)
        return false;
    for (int64_t i = 0; i < n; i++) {
        tail += exp(logarithm);
        if (tail > 0.025)
            break;
        k = i + 1;
        logarithm += log((double)(n - i)) - log((double)(i + 1));
    }
    *low = k;
    *high = n + 1 - k;
    return k >= 1;
}

static check_value value_of(double predicted, double measured) {
    const double error = measured > 0 ? (predicted - measured) / measured : predicted > 0 ? NAN : 0;
    return (check_value){predicted, measured, error};
}

/* ---- records by step of the window -------------------------------------------------------------
 */

/* One number of a record. */
typedef double (*record_figure)(const check_policy *p, const mz_run_file *run, int64_t record,
                                int64_t index);

/* Runs of a policy in the measurement, one after another: the next after `run`; NULL: the first. */
static const mz_run_file *next_run(const mz_result_file *file, const char *name,
                                   const mz_run_file *run) {
    for (const mz_run_file *r = run ? run + 1 : file->run; r < file->run + file->runs; r++)
        if (strcmp(r->policy, name) == 0)
            return r;
    return NULL;
}

static double predicted_at(const check_policy *p, int64_t ordinal, record_figure figure,
                           int64_t index) {
    for (int64_t i = 0; i < p->predicted->steps; i++)
        if (p->predicted->ordinal[i] == ordinal)
            return figure(p, p->predicted, i, index);
    return NAN;
}

/* Per step the median of its records, mean over the steps that were measured. */
static check_value compare(const check_result *r, const check_policy *p, record_figure figure,
                           int64_t index, double *value) {
    double predicted = 0, measured = 0;
    int64_t steps = 0;
    for (int64_t o = 0; o < p->predicted->steps; o++) {
        int64_t n = 0;
        for (const mz_run_file *run = NULL; (run = next_run(r->measured, p->name, run));)
            for (int64_t i = 0; i < run->steps; i++)
                if (run->ordinal[i] == o)
                    value[n++] = figure(p, run, i, index);
        if (n == 0)
            continue;
        predicted += predicted_at(p, o, figure, index);
        measured += check_median(value, n);
        steps++;
    }
    return value_of(predicted / (double)steps, measured / (double)steps);
}

static double step_time(const check_policy *p, const mz_run_file *run, int64_t record,
                        int64_t index) {
    return run->step_s[record];
}

static const double *cell_at(const mz_run_file *run, int64_t record, int64_t layer, int64_t rank) {
    return run->detail_s + ((record * run->layers + layer) * run->ranks + rank) * MZ_PHASES;
}

static double phase_time(const check_policy *p, const mz_run_file *run, int64_t record,
                         int64_t phase) {
    double sum = 0;
    for (int32_t l = 0; l < run->layers; l++)
        for (int32_t k = 0; k < run->ranks; k++)
            sum += cell_at(run, record, l, k)[phase];
    return phase == MZ_PHASE_PLANNER ? sum / (double)p->ranks_each : sum;
}

/* Busy time of one layer and rank: without planning, which no rank does alone, and waiting. */
static double cell_time(const check_policy *p, const mz_run_file *run, int64_t record,
                        int64_t cell) {
    const double *phase = cell_at(run, record, cell / run->ranks, cell % run->ranks);
    double sum = 0;
    for (int k = 0; k < MZ_PHASES; k++)
        sum += k == MZ_PHASE_PLANNER || k == MZ_PHASE_LAUNCH_WAIT ? 0 : phase[k];
    return sum;
}

static double layer_time(const check_policy *p, const mz_run_file *run, int64_t record,
                         int64_t layer) {
    double sum = 0;
    for (int32_t k = 0; k < run->ranks; k++)
        sum += cell_time(p, run, record, layer * run->ranks + k);
    return sum;
}

static double rank_time(const check_policy *p, const mz_run_file *run, int64_t record,
                        int64_t rank) {
    double sum = 0;
    for (int32_t l = 0; l < run->layers; l++)
        sum += cell_time(p, run, record, (int64_t)l * run->ranks + rank);
    return sum;
}

/* ---- one policy --------------------------------------------------------------------------------
 */

static mz_code check_detail(const check_result *r, const mz_run_file *p, mz_err *err) {
    if (!p->step_s || !p->detail_s)
        return mz_fail(err, MZ_EINPUT,
                       "the prediction has no times by step, layer, rank and phase of %s: write it "
                       "with --output, or with --json --detail",
                       p->policy);
    for (const mz_run_file *m = NULL; (m = next_run(r->measured, p->policy, m));) {
        if (!m->step_s || !m->detail_s)
            return mz_fail(err, MZ_EINPUT,
                           "the measurement has no times by step, layer, rank and phase of %s: "
                           "write it with --output, or with --json --detail",
                           p->policy);
        if (m->ranks != p->ranks || m->layers != p->layers)
            return mz_fail(err, MZ_EINPUT,
                           "the files do not belong together: %s has %d layers and %d ranks in the "
                           "prediction, %d and %d in the measurement",
                           p->policy, p->layers - 1, p->ranks, m->layers - 1, m->ranks);
        for (int64_t i = 0; i < m->steps; i++) {
            bool known = false;
            for (int64_t k = 0; k < p->steps && !known; k++)
                known = p->ordinal[k] == m->ordinal[i];
            if (!known)
                return mz_fail(err, MZ_EINPUT,
                               "the files do not belong together: step %lld of %s was measured and "
                               "not predicted",
                               (long long)m->ordinal[i], p->policy);
        }
    }
    return MZ_OK;
}

/* Ratios of all records, run after run, and what they say about the median and noise. */
static mz_code note_ratios(check_result *r, check_policy *p, mz_err *err) {
    int64_t n = 0, first = 0, low, high;
    int runs = 0;
    p->ratio = MZ_NEW(&r->arena, double, p->records);
    double *sorted = MZ_NEW(&r->arena, double, p->records);
    if (!p->ratio || !sorted)
        return mz_fail_nomem(err, "the records of a policy");
    for (const mz_run_file *m = NULL; (m = next_run(r->measured, p->name, m)); runs++) {
        for (int64_t i = 0; i < m->steps; i++) {
            const double predicted = predicted_at(p, m->ordinal[i], step_time, 0);
            p->ratio[n++] = predicted > 0 ? m->step_s[i] / predicted : 1;
        }
        first = runs == 0 ? n : first;
    }
    p->repeated = runs > 1;
    const int64_t half = p->repeated ? first : n / 2;
    p->noise = p->low = p->high = NAN;
    if (half >= 1) {
        memcpy(sorted, p->ratio, sizeof *sorted * (size_t)n);
        const double a = check_median(sorted, half), b = check_median(sorted + half, n - half);
        p->noise = fabs(a / b - 1);
    }
    memcpy(sorted, p->ratio, sizeof *sorted * (size_t)n);
    const double median = check_median(sorted, n);
    if (check_interval(n, &low, &high)) {
        p->low = p->step.measured * sorted[low - 1] / median;
        p->high = p->step.measured * sorted[high - 1] / median;
    }
    return MZ_OK;
}

static double most_of(const mz_run_file *run, int category) {
    int64_t most = 0;
    for (int32_t k = 0; run->rank_memory && k < run->ranks; k++) {
        const int64_t bytes = run->rank_memory[(int64_t)k * MZ_MEM_CATEGORIES + category];
        most = bytes > most ? bytes : most;
    }
    return (double)most;
}

static void note_memory(const check_result *r, check_policy *p) {
    const char *key = "peak_memory_bytes";
    double peak = 0, most[MZ_MEM_CATEGORIES] = {0};
    for (const mz_run_file *m = NULL; (m = next_run(r->measured, p->name, m));) {
        peak = fmax(peak, json_number_value(json_object_get(m->json, key)));
        for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
            most[c] = fmax(most[c], most_of(m, c));
    }
    p->peak = value_of(json_number_value(json_object_get(p->predicted->json, key)), peak);
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
        p->memory[c] = value_of(most_of(p->predicted, c), most[c]);
}

static mz_code note_places(check_result *r, check_policy *p, double *value, mz_err *err) {
    const int64_t cells = (int64_t)p->layers * p->ranks;
    p->layer = MZ_NEW(&r->arena, check_value, p->layers);
    p->rank = MZ_NEW(&r->arena, check_value, p->ranks);
    p->cell = MZ_NEW(&r->arena, check_value, cells);
    if (!p->layer || !p->rank || !p->cell)
        return mz_fail_nomem(err, "errors by layer and rank");
    for (int32_t l = 0; l < p->layers; l++)
        p->layer[l] = compare(r, p, layer_time, l, value);
    for (int32_t k = 0; k < p->ranks; k++)
        p->rank[k] = compare(r, p, rank_time, k, value);
    for (int64_t c = 0; c < cells; c++)
        p->cell[c] = compare(r, p, cell_time, c, value);
    return MZ_OK;
}

static mz_code measure_policy(check_result *r, check_policy *p, mz_err *err) {
    double all = 0;
    p->name = p->predicted->policy;
    p->lossy = json_is_true(json_object_get(p->predicted->json, "lossy"));
    p->layers = p->predicted->layers;
    p->ranks = p->predicted->ranks;
    p->ranks_each = json_integer_value(
        json_object_get(json_object_get(r->predicted->root, "cluster"), "ranks_per_device"));
    p->ranks_each = p->ranks_each < 1 ? 1 : p->ranks_each;
    for (const mz_run_file *m = NULL; (m = next_run(r->measured, p->name, m));)
        p->records += m->steps;
    double *value = MZ_NEW(&r->arena, double, p->records);
    if (!value)
        return mz_fail_nomem(err, "the records of a policy");
    p->step = compare(r, p, step_time, 0, value);
    for (int k = 0; k < MZ_PHASES; k++) {
        p->phase[k] = compare(r, p, phase_time, k, value);
        all += k == MZ_PHASE_LAUNCH_WAIT ? 0 : p->phase[k].measured;
    }
    for (int k = 0; k < MZ_PHASES; k++)
        p->share[k] = all > 0 && k != MZ_PHASE_LAUNCH_WAIT ? p->phase[k].measured / all : 0;
    note_memory(r, p);
    const mz_code code = note_ratios(r, p, err);
    return code == MZ_OK ? note_places(r, p, value, err) : code;
}

/* Policies of the prediction, each once. */
mz_code check_measure(check_result *r, mz_err *err) {
    const mz_result_file *p = r->predicted;
    r->policy = MZ_NEW(&r->arena, check_policy, p->runs);
    if (!r->policy)
        return mz_fail_nomem(err, "the policies of a check");
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < p->runs; i++) {
        if (next_run(p, p->run[i].policy, NULL) != &p->run[i])
            continue;
        check_policy *to = &r->policy[r->policies];
        to->predicted = &p->run[i];
        code = check_detail(r, to->predicted, err);
        if (code == MZ_OK)
            code = measure_policy(r, to, err);
        r->policies++;
    }
    return code;
}
