/* A phase's time is the sum over layers of a rank's, a step reports the rank on which it is longest
 * (as sim/step/outcome.c does). A rank's launch_wait is what is left of the step when its kernels
 * and exchanges are taken away: planning, and the turns of other ranks of its process. */
#include "replay/measure.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct mz_measure {
    int32_t ranks, layers;
    int64_t steps, calls;
    double *step_s, *probe_s[MZ_SPEEDS], *imbalance, *detail;
    int64_t *ordinal;
    size_t step_cap, probe_cap[MZ_SPEEDS], imbalance_cap, detail_cap, ordinal_cap;
    double time_s, moe_s, planner_s, phase_s[MZ_PHASES];
    double kept_score, total_score;
    int64_t tokens, dispatch, combine, backward_dispatch, backward_combine, transfer;
    int64_t within, between; /* processes */
    int64_t pairs, kept, dropped;
    int64_t peak, at_peak[MZ_MEM_CATEGORIES];
    char peak_at[128];
    int64_t over_budget_calls;
    char over_budget[192];
    double *busy, *busy_mean;  /* [ranks] */
    int64_t *rank_peak, *most; /* [ranks], [ranks][categories] */
    mz_arena arena;
};

mz_code mz_measure_create(int32_t ranks, int32_t layers, mz_measure **measure, mz_err *err) {
    mz_measure *m = *measure = mz_calloc(1, sizeof *m);
    if (!m)
        return mz_fail_nomem(err, "measurements");
    m->ranks = ranks;
    m->layers = layers;
    m->busy = MZ_NEW(&m->arena, double, ranks);
    m->busy_mean = MZ_NEW(&m->arena, double, ranks);
    m->rank_peak = MZ_NEW(&m->arena, int64_t, ranks);
    m->most = MZ_NEW(&m->arena, int64_t, (int64_t)ranks * MZ_MEM_CATEGORIES);
    if (!m->busy || !m->busy_mean || !m->rank_peak || !m->most) {
        mz_measure_free(measure);
        return mz_fail_nomem(err, "measurements");
    }
    return MZ_OK;
}

void mz_measure_free(mz_measure **measure) {
    mz_measure *m = *measure;
    if (!m)
        return;
    free(m->step_s);
    for (int k = 0; k < MZ_SPEEDS; k++)
        free(m->probe_s[k]);
    free(m->imbalance);
    free(m->detail);
    free(m->ordinal);
    mz_arena_free(&m->arena);
    free(m);
    *measure = NULL;
}

size_t mz_measure_size(const mz_measure *m) {
    return sizeof(mz_measure_rank) + sizeof(double) * (size_t)(m->layers + 1) * MZ_PHASES;
}

double *mz_measure_detail(void *record) {
    return (double *)((mz_measure_rank *)record + 1);
}

int64_t mz_measure_steps(const mz_measure *m) {
    return m->steps;
}

static const mz_measure_rank *record_of(const mz_measure *m, const void *records, int32_t rank) {
    return (const mz_measure_rank *)((const char *)records + mz_measure_size(m) * (size_t)rank);
}

static void add_memory(mz_measure *m, const void *records) {
    for (int32_t r = 0; r < m->ranks; r++) {
        const mz_measure_rank *k = record_of(m, records, r);
        m->rank_peak[r] = k->peak > m->rank_peak[r] ? k->peak : m->rank_peak[r];
        int64_t *most = m->most + (int64_t)r * MZ_MEM_CATEGORIES;
        for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
            most[c] = k->most[c] > most[c] ? k->most[c] : most[c];
        if (k->peak <= m->peak)
            continue;
        m->peak = k->peak;
        memcpy(m->at_peak, k->at_peak, sizeof m->at_peak);
        char label[96]; /* a label may have a place for the layer */
        const char *place = strstr(k->peak_label, "%d");
        if (place)
            snprintf(label, sizeof label, "%.*s%d%s", (int)(place - k->peak_label), k->peak_label,
                     k->peak_layer, place + 2);
        else
            snprintf(label, sizeof label, "%s", k->peak_label);
        snprintf(m->peak_at, sizeof m->peak_at, "%s on rank %d", label, r);
    }
}

/* Seconds of one rank by phase, over all layers, into phase; what its kernels took. */
static double sum_phases(const mz_measure *m, const double *detail, double phase[MZ_PHASES]) {
    double busy = 0;
    memset(phase, 0, sizeof *phase * MZ_PHASES);
    for (int32_t l = 0; l <= m->layers; l++)
        for (int p = 0; p < MZ_PHASES; p++)
            phase[p] += detail[(int64_t)l * MZ_PHASES + p];
    for (int p = 0; p < MZ_PHASES; p++)
        busy += mz_phase_computes((mz_phase)p) ? phase[p] : 0;
    return busy;
}

/* Detail of the step, [layers+1][ranks][phases], and the sums that follow from it. */
static void add_times(mz_measure *m, const void *records, double step_s) {
    const int64_t row = (int64_t)m->ranks * MZ_PHASES;
    double *detail = m->detail + m->steps * (m->layers + 1) * row, worst[MZ_PHASES] = {0};
    for (int32_t r = 0; r < m->ranks; r++) {
        double phase[MZ_PHASES], covered = 0;
        const double *own = (const double *)(record_of(m, records, r) + 1);
        m->busy[r] += sum_phases(m, own, phase);
        for (int32_t l = 0; l <= m->layers; l++)
            memcpy(detail + l * row + (int64_t)r * MZ_PHASES, own + (int64_t)l * MZ_PHASES,
                   sizeof *own * MZ_PHASES);
        for (int p = 0; p < MZ_PHASES; p++)
            covered += p == MZ_PHASE_PLANNER ? 0 : phase[p];
        phase[MZ_PHASE_LAUNCH_WAIT] = fmax(step_s - covered, 0);
        detail[m->layers * row + (int64_t)r * MZ_PHASES + MZ_PHASE_LAUNCH_WAIT] =
            phase[MZ_PHASE_LAUNCH_WAIT];
        for (int p = 0; p < MZ_PHASES; p++)
            worst[p] = fmax(worst[p], phase[p]);
    }
    for (int p = 0; p < MZ_PHASES; p++)
        m->phase_s[p] += worst[p];
    m->planner_s += worst[MZ_PHASE_PLANNER]; /* of the slowest process */
}

static void add_counts(mz_measure *m, const mz_measure_step *step, const void *records) {
    for (int32_t r = 0; r < m->ranks; r++) {
        const mz_measure_rank *k = record_of(m, records, r);
        m->dispatch += k->dispatch_bytes;
        m->combine += k->combine_bytes;
        m->backward_dispatch += k->backward_dispatch_bytes;
        m->backward_combine += k->backward_combine_bytes;
        m->transfer += k->transfer_bytes;
        m->within += k->within_process_bytes;
        m->between += k->between_process_bytes;
        m->pairs += k->pairs;
        m->kept += k->kept_pairs;
        m->dropped += k->dropped_pairs;
    }
    m->tokens += step->tokens;
    m->kept_score += step->kept_score;
    m->total_score += step->total_score;
    if (step->over_budget_calls > 0 && m->over_budget_calls == 0)
        snprintf(m->over_budget, sizeof m->over_budget, "%s", step->over_budget);
    m->over_budget_calls += step->over_budget_calls;
}

mz_code mz_measure_add(mz_measure *m, const mz_measure_step *step, const void *records,
                       mz_err *err) {
    const size_t steps = (size_t)m->steps + 1, calls = (size_t)(m->calls + step->calls);
    const size_t cells = (size_t)(m->layers + 1) * (size_t)m->ranks * MZ_PHASES;
    if (!mz_grow((void **)&m->step_s, &m->step_cap, steps, sizeof *m->step_s) ||
        !mz_grow((void **)&m->ordinal, &m->ordinal_cap, steps, sizeof *m->ordinal) ||
        !mz_grow((void **)&m->imbalance, &m->imbalance_cap, calls, sizeof *m->imbalance) ||
        !mz_grow((void **)&m->detail, &m->detail_cap, steps * cells, sizeof *m->detail))
        return mz_fail_nomem(err, "measurements");
    for (int k = 0; k < MZ_SPEEDS; k++)
        if (!mz_grow((void **)&m->probe_s[k], &m->probe_cap[k], steps, sizeof *m->probe_s[k]))
            return mz_fail_nomem(err, "measurements");
    double step_s = 0, moe_s = 0;
    for (int32_t r = 0; r < m->ranks; r++) {
        step_s = fmax(step_s, record_of(m, records, r)->step_s);
        moe_s = fmax(moe_s, record_of(m, records, r)->moe_s);
    }
    add_times(m, records, step_s);
    add_memory(m, records);
    add_counts(m, step, records);
    if (step->calls > 0)
        memcpy(m->imbalance + m->calls, step->imbalance,
               sizeof *m->imbalance * (size_t)step->calls);
    m->calls += step->calls;
    m->ordinal[m->steps] = step->ordinal;
    for (int k = 0; k < MZ_SPEEDS; k++)
        m->probe_s[k][m->steps] = step->probe_s[k];
    m->step_s[m->steps++] = step_s;
    m->time_s += step_s;
    m->moe_s += moe_s;
    return MZ_OK;
}

/* ---- the run -----------------------------------------------------------------------------------
 */

static mz_code sorted_stat(const double *values, int64_t count, mz_stat *stat, mz_err *err) {
    double *copy = mz_calloc((size_t)count + 1, sizeof *copy);
    if (!copy)
        return mz_fail_nomem(err, "a statistic");
    if (count > 0)
        memcpy(copy, values, sizeof *copy * (size_t)count);
    *stat = mz_stat_of(copy, count);
    free(copy);
    return MZ_OK;
}

static int64_t mean_of(int64_t total, int64_t steps) {
    return (total + steps / 2) / steps;
}

static void put_traffic(const mz_measure *m, mz_run *run) {
    run->dispatch_bytes = mean_of(m->dispatch, m->steps);
    run->combine_bytes = mean_of(m->combine, m->steps);
    run->backward_dispatch_bytes = mean_of(m->backward_dispatch, m->steps);
    run->backward_combine_bytes = mean_of(m->backward_combine, m->steps);
    run->transfer_bytes = mean_of(m->transfer, m->steps);
    run->split = true;
    run->within_process_bytes = mean_of(m->within, m->steps);
    run->between_process_bytes = mean_of(m->between, m->steps);
}

static void put_policy(const mz_measure *m, const mz_planner *planner, mz_run *run) {
    const mz_policy_traits *t = mz_planner_traits(planner);
    const double pairs = m->pairs > 0 ? (double)m->pairs : 1;
    run->lossy = t->lossy;
    run->kept_pairs_fraction = m->pairs > 0 ? (double)m->kept / pairs : 1;
    run->dropped_pairs_fraction = (double)m->dropped / pairs;
    run->kept_score_mass = m->total_score > 0 ? m->kept_score / m->total_score : NAN;
    snprintf(run->policy, sizeof run->policy, "%s", mz_planner_text(planner));
    snprintf(run->system, sizeof run->system, "%s", t->label ? t->label : "");
    snprintf(run->score_source, sizeof run->score_source, "%s",
             m->total_score > 0 && t->score_source ? t->score_source : "");
}

mz_code mz_measure_run(mz_measure *m, const mz_planner *planner, mz_run *run, mz_err *err) {
    if (m->steps == 0)
        return mz_fail(err, MZ_EINPUT, "no step was completed, so there is no result");
    const double steps = (double)m->steps;
    for (int32_t r = 0; r < m->ranks; r++)
        m->busy_mean[r] = m->busy[r] / steps;
    *run = (mz_run){.moe_time_s = m->moe_s / steps,
                    .tokens_per_s = m->time_s > 0 ? (double)m->tokens / m->time_s : 0,
                    .layer_calls = (double)m->calls / steps,
                    .peak_memory_bytes = m->peak,
                    .fits = true,
                    .over_budget_calls = m->over_budget_calls,
                    .planner_s = m->planner_s / steps,
                    .planner_measured_s = m->planner_s / steps,
                    .phases = MZ_PHASES,
                    .steps = m->steps,
                    .step_s = m->step_s,
                    .step_ordinal = m->ordinal,
                    .ranks = m->ranks,
                    .rank_busy_s = m->busy_mean,
                    .rank_peak_bytes = m->rank_peak,
                    .rank_memory_bytes = m->most,
                    .detail_layers = m->layers + 1,
                    .detail_s = m->detail};
    for (int k = 0; k < MZ_SPEEDS; k++)
        run->probe_s[k] = m->probe_s[k];
    memcpy(run->memory_bytes, m->at_peak, sizeof run->memory_bytes);
    snprintf(run->peak_at, sizeof run->peak_at, "%s", m->peak_at);
    snprintf(run->over_budget, sizeof run->over_budget, "%s", m->over_budget);
    put_traffic(m, run);
    put_policy(m, planner, run);
    for (int p = 0; p < MZ_PHASES; p++) {
        run->phase_name[p] = mz_phase_name((mz_phase)p);
        run->phase_s[p] = m->phase_s[p] / steps;
    }
    mz_code code = sorted_stat(m->step_s, m->steps, &run->step_time_s, err);
    if (code == MZ_OK)
        code = sorted_stat(m->imbalance, m->calls, &run->rank_imbalance, err);
    return code;
}
