/* Times and memory of every policy, predicted and measured. */
#include "analysis/check.h"

#include "common/base/rng.h"
#include "common/base/stat.h"
#include "common/io/result_match.h"
#include "sim/cost/work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

double check_middle_mean(double *value, int64_t count) {
    return mz_middle_mean(value, count, count / 7);
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

/* Which records: all, or those of the first or second side of a comparison with itself. */
typedef enum check_side { SIDE_ALL, SIDE_FIRST, SIDE_SECOND } check_side;

/* The records of one step of the window: of the first run against the others where a policy was run
 * again, else the earlier half against the later. */
static int64_t collect(const check_result *r, const check_policy *p, int64_t ordinal,
                       check_side side, record_figure figure, int64_t index, double *value) {
    int64_t n = 0, first = 0;
    int runs = 0;
    for (const mz_run_file *run = NULL; (run = next_run(r->measured, p->name, run)); runs++) {
        for (int64_t i = 0; i < run->steps; i++)
            if (run->ordinal[i] == ordinal)
                value[n++] = figure(p, run, i, index);
        first = runs == 0 ? n : first;
    }
    if (side == SIDE_ALL)
        return n;
    const int64_t cut = runs > 1 ? first : n / 2;
    if (side == SIDE_FIRST)
        return cut;
    memmove(value, value + cut, sizeof *value * (size_t)(n - cut));
    return n - cut;
}

/* Per step the middle mean of its records, mean over the steps that were measured. */
static check_value compare(const check_result *r, const check_policy *p, record_figure figure,
                           int64_t index, double *value) {
    double predicted = 0, measured = 0;
    int64_t steps = 0;
    for (int64_t o = 0; o < p->predicted->steps; o++) {
        const int64_t n = collect(r, p, o, SIDE_ALL, figure, index, value);
        if (n == 0)
            continue;
        predicted += predicted_at(p, o, figure, index);
        measured += check_middle_mean(value, n);
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

/* What a phase's kernels do most of (replay/README.md): products; whole experts' weights, which
 * come from memory; rows and lists that the phase before has just written and short messages, which
 * lie in a cache where they fit. Planning is arithmetic. What no replay has, and waiting, which is
 * what is left, goes with products, too. */
static const mz_speed phase_speed[MZ_PHASES] = {
    [MZ_PHASE_ROUTER] = MZ_SPEED_CACHE,           [MZ_PHASE_COUNT_EXCHANGE] = MZ_SPEED_CACHE,
    [MZ_PHASE_WEIGHT_MOVE] = MZ_SPEED_MEMORY,     [MZ_PHASE_PACK] = MZ_SPEED_CACHE,
    [MZ_PHASE_DISPATCH] = MZ_SPEED_CACHE,         [MZ_PHASE_COMBINE] = MZ_SPEED_CACHE,
    [MZ_PHASE_UNPACK] = MZ_SPEED_CACHE,           [MZ_PHASE_SCORE] = MZ_SPEED_CACHE,
    [MZ_PHASE_BACKWARD_PACK] = MZ_SPEED_CACHE,    [MZ_PHASE_BACKWARD_DISPATCH] = MZ_SPEED_CACHE,
    [MZ_PHASE_BACKWARD_COMBINE] = MZ_SPEED_CACHE, [MZ_PHASE_BACKWARD_OTHER] = MZ_SPEED_CACHE,
    [MZ_PHASE_REPLICA_REDUCE] = MZ_SPEED_MEMORY,  [MZ_PHASE_GRADIENT_REDUCE] = MZ_SPEED_CACHE,
    [MZ_PHASE_OPTIMIZER] = MZ_SPEED_MEMORY,       [MZ_PHASE_PARAMETER_GATHER] = MZ_SPEED_MEMORY,
};

/* One call of one rank, on the average: what it has of them. */
typedef struct call_sizes {
    int64_t tokens, computed, kept; /* the latter two: pairs */
    int64_t hidden, experts;
    double sent_back; /* rows that backward sends out for one that comes back: 2 with x again */
} call_sizes;

/* A file may say anything. */
static int64_t count_of(double n) {
    return n >= 0 && n < 1e15 ? llround(n) : 0;
}

static call_sizes sizes_of(const check_result *r, const check_policy *p) {
    const json_t *model = json_object_get(r->predicted->root, "model"), *run = p->predicted->json;
    const double layers = fmax(p->layers - 1, 1), said = check_number(run, "layer_calls");
    const double calls = said > 0 ? said : layers; /* results of before do not say */
    const double tokens = check_tokens(p) * layers / (calls * p->ranks);
    const double pairs = tokens * check_number(model, "top_k");
    const double out = check_number(run, "backward_dispatch_bytes");
    const double back = check_number(run, "backward_combine_bytes");
    return (call_sizes){.tokens = count_of(tokens),
                        .computed =
                            count_of(pairs * (1 - check_number(run, "dropped_pairs_fraction"))),
                        .kept = count_of(pairs * check_number(run, "kept_pairs_fraction")),
                        .hidden = json_integer_value(json_object_get(model, "hidden")),
                        .experts = json_integer_value(json_object_get(model, "experts")),
                        .sent_back = out > 0 && back > 0 ? out / back : 1};
}

/* Bytes in and out of what a phase's call does to rows, as calibration and simulator count them, of
 * a message as of a gather; 0 of phases that have but a few numbers. */
static double bytes_of(const call_sizes *s, int phase) {
    switch (phase) {
    case MZ_PHASE_ROUTER:
        return mz_work_bytes(MZ_WORK_GROUP_PAIRS, s->computed, s->experts, 0);
    case MZ_PHASE_PACK:
        return mz_work_bytes(MZ_WORK_PACK, s->computed, s->hidden, s->tokens);
    case MZ_PHASE_DISPATCH:
    case MZ_PHASE_COMBINE:
        return mz_work_bytes(MZ_WORK_GATHER, s->computed, s->hidden, 0);
    case MZ_PHASE_UNPACK:
        return mz_work_bytes(MZ_WORK_COMBINE, s->computed, s->hidden, s->tokens);
    case MZ_PHASE_SCORE:
        return mz_work_bytes(MZ_WORK_ROW_NORMS, s->tokens, s->hidden, 0);
    case MZ_PHASE_BACKWARD_PACK:
        return mz_work_bytes(MZ_WORK_PACK_SCALED, s->kept, s->hidden, s->tokens);
    case MZ_PHASE_BACKWARD_DISPATCH:
        return s->sent_back * mz_work_bytes(MZ_WORK_GATHER, s->kept, s->hidden, 0);
    case MZ_PHASE_BACKWARD_COMBINE:
        return mz_work_bytes(MZ_WORK_GATHER, s->kept, s->hidden, 0);
    case MZ_PHASE_BACKWARD_OTHER:
        return mz_work_bytes(MZ_WORK_COMBINE, s->kept, s->hidden, s->tokens);
    default:
        return 0;
    }
}

/* By how much longer a phase takes than on the calibrated machine. Muon's update is products. */
static double slower(const check_result *r, const call_sizes *sizes, int phase) {
    const char *optimizer = json_string_value(
        json_object_get(json_object_get(r->predicted->root, "settings"), "optimizer"));
    const bool products =
        phase == MZ_PHASE_OPTIMIZER && optimizer && strncmp(optimizer, "muon", strlen("muon")) == 0;
    const mz_speed speed = products ? MZ_SPEED_PRODUCT : phase_speed[phase];
    return speed == MZ_SPEED_CACHE
               ? mz_speed_factor(bytes_of(sizes, phase), 1 / r->speed[MZ_SPEED_CACHE],
                                 1 / r->speed[MZ_SPEED_MEMORY])
               : 1 / r->speed[speed];
}

/* What errors would be of a prediction for the speeds that the machine had. */
static void note_at_speed(const check_result *r, check_policy *p) {
    const call_sizes sizes = sizes_of(r, p);
    double predicted = 0, at_speed = 0;
    for (int k = 0; k < MZ_PHASES; k++) {
        const double now = p->phase[k].predicted * slower(r, &sizes, k);
        p->phase_at_speed[k] = value_of(now, p->phase[k].measured).error;
        predicted += k == MZ_PHASE_LAUNCH_WAIT ? 0 : p->phase[k].predicted;
        at_speed += k == MZ_PHASE_LAUNCH_WAIT ? 0 : now;
    }
    const double factor = predicted > 0 ? at_speed / predicted : 1 / r->speed[MZ_SPEED_PRODUCT];
    p->at_speed = value_of(p->step.predicted * factor, p->step.measured).error;
}

/* ---- one policy --------------------------------------------------------------------------------
 */

static mz_code check_detail(const check_result *r, const mz_run_file *p, mz_err *err) {
    mz_code code = mz_result_detailed(p, "prediction", err);
    if (code != MZ_OK)
        return code;
    for (const mz_run_file *m = NULL; (m = next_run(r->measured, p->policy, m));) {
        code = mz_result_detailed(m, "measurement", err);
        if (code != MZ_OK)
            return code;
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

/* Ratios of all records, run after run. */
static void note_ratios(const check_result *r, check_policy *p) {
    int64_t n = 0;
    int runs = 0;
    for (const mz_run_file *m = NULL; (m = next_run(r->measured, p->name, m)); runs++)
        for (int64_t i = 0; i < m->steps; i++) {
            const double predicted = predicted_at(p, m->ordinal[i], step_time, 0);
            p->ratio[n++] = predicted > 0 ? m->step_s[i] / predicted : 1;
        }
    p->repeated = runs > 1;
}

/* Over the steps of the window that both sides have. */
static double noise_of(const check_result *r, const check_policy *p, double *value) {
    double side[2] = {0};
    for (int64_t o = 0; o < p->predicted->steps; o++) {
        double mean[2];
        int64_t n[2];
        for (int k = 0; k < 2; k++) {
            n[k] = collect(r, p, o, k == 0 ? SIDE_FIRST : SIDE_SECOND, step_time, 0, value);
            mean[k] = n[k] > 0 ? check_middle_mean(value, n[k]) : 0;
        }
        for (int k = 0; k < 2 && n[0] > 0 && n[1] > 0; k++)
            side[k] += mean[k];
    }
    return side[1] > 0 ? fabs(side[0] / side[1] - 1) : NAN;
}

enum { BOOTSTRAPS = 999 };

/* A policy's time with every step's records, [begin[o], begin[o + 1]) of value, drawn anew, with
 * replacement. */
static double drawn_time(const double *value, const int64_t *begin, int64_t window, mz_rng *rng,
                         double *drawn) {
    double sum = 0;
    int64_t steps = 0;
    for (int64_t o = 0; o < window; o++) {
        const int64_t n = begin[o + 1] - begin[o];
        for (int64_t i = 0; i < n; i++)
            drawn[i] = value[begin[o] + (int64_t)mz_rng_below(rng, (uint64_t)n)];
        sum += n > 0 ? check_middle_mean(drawn, n) : 0;
        steps += n > 0;
    }
    return sum / (double)steps;
}

/* Room for one interval after another. */
typedef struct bootstrap {
    double *time, *drawn, *value; /* [BOOTSTRAPS], [records] twice */
    int64_t *begin;               /* [window + 1] */
} bootstrap;

static check_interval interval_of(const check_result *r, const check_policy *p, bootstrap *b,
                                  record_figure figure, int64_t index) {
    const int64_t window = p->predicted->steps;
    if (p->records < CHECK_RECORDS)
        return (check_interval){NAN, NAN};
    for (int64_t o = 0; o < window; o++)
        b->begin[o + 1] =
            b->begin[o] + collect(r, p, o, SIDE_ALL, figure, index, b->value + b->begin[o]);
    mz_rng rng = mz_rng_make(1, 6);
    for (int i = 0; i < BOOTSTRAPS; i++)
        b->time[i] = drawn_time(b->value, b->begin, window, &rng, b->drawn);
    mz_sort(b->time, BOOTSTRAPS);
    return (check_interval){b->time[(BOOTSTRAPS + 1) / 40 - 1],
                            b->time[BOOTSTRAPS - (BOOTSTRAPS + 1) / 40]};
}

/* Of the step, the phases that are judged, layers and ranks. */
static mz_code note_intervals(check_result *r, check_policy *p, double *value, mz_err *err) {
    bootstrap b = {MZ_NEW(&r->arena, double, BOOTSTRAPS), MZ_NEW(&r->arena, double, p->records),
                   value, MZ_NEW(&r->arena, int64_t, p->predicted->steps + 1)};
    p->layer_interval = MZ_NEW(&r->arena, check_interval, p->layers);
    p->rank_interval = MZ_NEW(&r->arena, check_interval, p->ranks);
    if (!b.time || !b.drawn || !b.begin || !p->layer_interval || !p->rank_interval)
        return mz_fail_nomem(err, "the records of a policy");
    p->interval = interval_of(r, p, &b, step_time, 0);
    for (int k = 0; k < MZ_PHASES; k++)
        p->phase_interval[k] = p->share[k] >= CHECK_SHARE ? interval_of(r, p, &b, phase_time, k)
                                                          : (check_interval){NAN, NAN};
    for (int32_t l = 0; l < p->layers; l++)
        p->layer_interval[l] = interval_of(r, p, &b, layer_time, l);
    for (int32_t k = 0; k < p->ranks; k++)
        p->rank_interval[k] = interval_of(r, p, &b, rank_time, k);
    return MZ_OK;
}

const char *const check_traffic[CHECK_TRAFFIC] = {
    "dispatch_bytes", "combine_bytes",        "backward_dispatch_bytes", "backward_combine_bytes",
    "transfer_bytes", "within_process_bytes", "between_process_bytes"};

/* Whether every step of the window has as many records as the others. */
static bool even_records(const check_policy *p, const mz_run_file *run) {
    int64_t most = 0, least = run->steps;
    for (int64_t o = 0; o < p->predicted->steps; o++) {
        int64_t n = 0;
        for (int64_t i = 0; i < run->steps; i++)
            n += run->ordinal[i] == o;
        most = n > most ? n : most;
        least = n < least ? n : least;
    }
    return most == least;
}

/* Of the first run: all runs of a policy move the same. A key that one file lacks is not compared.
 */
static void note_traffic(const check_result *r, check_policy *p) {
    const mz_run_file *run = next_run(r->measured, p->name, NULL);
    for (int t = 0; t < CHECK_TRAFFIC; t++) {
        const json_t *predicted = json_object_get(p->predicted->json, check_traffic[t]),
                     *measured = json_object_get(run->json, check_traffic[t]);
        if (t < CHECK_KINDS || (predicted && measured))
            p->traffic[t] = value_of(json_number_value(predicted), json_number_value(measured));
    }
    p->exact = !p->lossy && even_records(p, run);
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
    p->ratio = MZ_NEW(&r->arena, double, p->records);
    if (!value || !p->ratio)
        return mz_fail_nomem(err, "the records of a policy");
    p->step = compare(r, p, step_time, 0, value);
    for (int k = 0; k < MZ_PHASES; k++) {
        p->phase[k] = compare(r, p, phase_time, k, value);
        all += k == MZ_PHASE_LAUNCH_WAIT ? 0 : p->phase[k].measured;
    }
    for (int k = 0; k < MZ_PHASES; k++)
        p->share[k] = all > 0 && k != MZ_PHASE_LAUNCH_WAIT ? p->phase[k].measured / all : 0;
    note_at_speed(r, p);
    note_memory(r, p);
    note_traffic(r, p);
    note_ratios(r, p);
    p->noise = noise_of(r, p, value);
    const mz_code code = note_places(r, p, value, err);
    return code == MZ_OK ? note_intervals(r, p, value, err) : code;
}

static double calibrated_probe(const check_result *r, const char *key) {
    return json_number_value(json_object_get(json_object_get(r->predicted->root, "cluster"), key));
}

/* Probes of one kind of all records that have one; returns their number. value: of all records. */
static int64_t probes_of(const mz_result_file *m, mz_speed speed, double *value) {
    int64_t n = 0;
    for (int i = 0; i < m->runs; i++) {
        const double *probe_s = m->run[i].probe_s[speed];
        for (int64_t k = 0; probe_s && k < m->run[i].steps; k++)
            if (probe_s[k] > 0)
                value[n++] = probe_s[k];
    }
    return n;
}

/* How fast the machine was, against its calibration, by the same probes, which are 0 where a record
 * has none: middle means, as of the times that this is held against. Where the prediction has no
 * mean of the product, medians. */
static mz_code note_speed(check_result *r, mz_err *err) {
    const double median = calibrated_probe(r, mz_speed_key(MZ_SPEED_PRODUCT));
    int64_t all = 0;
    for (int i = 0; i < r->measured->runs; i++)
        all += r->measured->run[i].steps;
    double *value = MZ_NEW(&r->arena, double, all + 1);
    if (!value)
        return mz_fail_nomem(err, "the probes of a measurement");
    for (int k = 0; k < MZ_SPEEDS; k++) {
        const double mean = calibrated_probe(r, mz_speed_mean_key((mz_speed)k));
        const bool by_median = k == MZ_SPEED_PRODUCT && !(mean > 0) && median > 0;
        const int64_t n = probes_of(r->measured, (mz_speed)k, value);
        r->probed[k] = n > 0 && (mean > 0 || by_median) && (k == 0 || check_probed(r));
        r->speed[k] = k == 0 ? 1 : r->speed[MZ_SPEED_PRODUCT];
        if (!r->probed[k])
            continue;
        const double now = check_middle_mean(value, n); /* sorts */
        r->speed[k] = by_median ? median / value[n / 2] : mean / now;
    }
    return MZ_OK;
}

/* Policies of the prediction, each once. */
mz_code check_measure(check_result *r, mz_err *err) {
    const mz_result_file *p = r->predicted;
    r->policy = MZ_NEW(&r->arena, check_policy, p->runs);
    if (!r->policy)
        return mz_fail_nomem(err, "the policies of a check");
    mz_code code = note_speed(r, err);
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
