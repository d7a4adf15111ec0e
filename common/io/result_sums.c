/* Does the detail of a run add up to what its summary says? */
#include "common/io/result_file.h"

#include "common/io/result.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Sums of the same numbers in another order. */
static bool same(double a, double b) {
    return fabs(a - b) <= 1e-9 * fmax(fabs(a), fabs(b)) + 1e-15;
}

static mz_code apart(const mz_run_file *run, const char *key, const char *of, double says,
                     double has, mz_err *err) {
    return mz_fail(err, MZ_EINPUT,
                   "%.60s of %.120s is %.9g, and its detail adds up to %.9g%s: the file was "
                   "changed after it was written",
                   key, run->policy, says, has, of);
}

/* Mean, median and 95th percentile of step times. */
static mz_code check_steps(const mz_run_file *run, mz_err *err) {
    const json_t *says = json_object_get(run->json, "step_time_s");
    double *copy = run->step_s && says ? malloc(sizeof *copy * (size_t)run->steps) : NULL;
    if (!run->step_s || !says)
        return MZ_OK;
    if (!copy)
        return mz_fail_nomem(err, "the steps of a result");
    memcpy(copy, run->step_s, sizeof *copy * (size_t)run->steps);
    const mz_stat has = mz_stat_of(copy, run->steps);
    free(copy);
    const struct {
        const char *key;
        double value;
    } all[] = {{"mean", has.mean}, {"p50", has.p50}, {"p95", has.p95}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const json_t *number = json_object_get(says, all[i].key);
        if (json_is_number(number) && !same(json_number_value(number), all[i].value))
            return apart(run, "step_time_s", " s", json_number_value(number), all[i].value, err);
    }
    return MZ_OK;
}

/* Mean over records of the rank that is longest in the phase, all layers together. */
static double phase_of(const mz_run_file *run, int phase) {
    double sum = 0;
    for (int64_t i = 0; i < run->steps; i++) {
        double worst = 0;
        for (int32_t r = 0; r < run->ranks; r++) {
            double all = 0;
            for (int32_t l = 0; l < run->layers; l++)
                all += run->detail_s[((i * run->layers + l) * run->ranks + r) * MZ_PHASES + phase];
            worst = fmax(worst, all);
        }
        sum += worst;
    }
    return sum / (double)run->steps;
}

static mz_code check_phases(const mz_run_file *run, mz_err *err) {
    const json_t *says = json_object_get(run->json, "phases_s");
    for (int p = 0; run->detail_s && p < MZ_PHASES; p++) {
        const char *name = mz_phase_name((mz_phase)p);
        const json_t *number = json_object_get(says, name);
        const double has = json_is_number(number) ? phase_of(run, p) : 0;
        if (json_is_number(number) && !same(json_number_value(number), has))
            return apart(run, name, " s", json_number_value(number), has, err);
    }
    return MZ_OK;
}

/* What a rank held at the peak is in every category at most the most that it ever held of it. */
static mz_code check_memory(const mz_run_file *run, mz_err *err) {
    const json_t *says = json_object_get(run->json, "memory_bytes");
    if (!run->rank_memory || !says)
        return MZ_OK;
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++) {
        const char *name = mz_memcat_name((mz_memcat)c);
        const double held = json_number_value(json_object_get(says, name));
        double most = 0;
        for (int32_t r = 0; r < run->ranks; r++)
            most = fmax(most, (double)run->rank_memory[(int64_t)r * MZ_MEM_CATEGORIES + c]);
        if (held > most)
            return apart(run, name, " bytes at most", held, most, err);
    }
    return MZ_OK;
}

mz_code mz_result_adds_up(const mz_run_file *run, mz_err *err) {
    mz_code code = check_steps(run, err);
    if (code == MZ_OK)
        code = check_phases(run, err);
    return code == MZ_OK ? check_memory(run, err) : code;
}
