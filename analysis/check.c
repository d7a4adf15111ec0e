/* What is judged. */
#include "analysis/check.h"

#include "common/io/result_match.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- evidence ----------------------------------------------------------------------------------
 */

bool check_validated(const check_result *r, mz_phase phase) {
    if (r->transport[0] == 0)
        return false;
    if (mz_phase_computes(phase) || phase == MZ_PHASE_PLANNER)
        return true;
    /* Ranks of one process: copies in its memory, no network, nobody to wait for. */
    return phase != MZ_PHASE_LAUNCH_WAIT && strcmp(r->transport, "local") != 0;
}

/* ---- targets -----------------------------------------------------------------------------------
 */

static check_target *add_target(check_result *r, bool passed, const char *what) {
    check_target *t = &r->target[r->targets];
    r->targets += r->targets + 1 < CHECK_TARGETS_MOST;
    t->passed = passed;
    r->passed = r->passed && passed;
    snprintf(t->what, sizeof t->what, "%s", what);
    return t;
}

/* What has no error, as nothing was measured, is worst of all. */
static double size_of(double error) {
    return isnan(error) ? INFINITY : fabs(error);
}

static void judge_steps(check_result *r) {
    double sum = 0;
    int worst = 0;
    for (int i = 0; i < r->policies; i++) {
        const double error = fabs(r->policy[i].step.error);
        sum += error;
        worst = error > fabs(r->policy[worst].step.error) ? i : worst;
    }
    for (int i = 0; i < r->policies; i++) {
        const double error = fabs(r->policy[i].at_speed);
        r->mean_at_speed += error / r->policies;
        r->worst_at_speed = fmax(r->worst_at_speed, error);
    }
    r->mean_error = sum / r->policies;
    r->worst_error = fabs(r->policy[worst].step.error);
    check_target *t =
        add_target(r, r->mean_error <= CHECK_MEAN, "step time, mean error at most 3 %");
    snprintf(t->found, sizeof t->found, "%.2f %%", r->mean_error * 100);
    t = add_target(r, r->worst_error <= CHECK_WORST, "step time, worst error at most 5 %");
    snprintf(t->found, sizeof t->found, "%+.2f %% (%.100s)", r->policy[worst].step.error * 100,
             r->policy[worst].name);
}

/* A phase's part of the predicted time of all of them. */
static double predicted_share(const check_policy *q, int phase) {
    double sum = 0;
    for (int p = 0; p < MZ_PHASES; p++)
        if (p != MZ_PHASE_LAUNCH_WAIT)
            sum += q->phase[p].predicted;
    return sum > 0 ? q->phase[phase].predicted / sum : 0;
}

/* What was predicted and did not happen is as wrong as what happened and was not predicted. */
static void judge_phases(check_result *r) {
    double worst = 0;
    int policy = 0, phase = -1;
    for (int i = 0; i < r->policies; i++)
        for (int p = 0; p < MZ_PHASES; p++) {
            const check_policy *q = &r->policy[i];
            const double error = size_of(q->phase[p].error);
            const bool large = q->share[p] >= CHECK_SHARE || predicted_share(q, p) >= CHECK_SHARE;
            if (p != MZ_PHASE_LAUNCH_WAIT && large && error >= worst) {
                worst = error;
                policy = i;
                phase = p;
            }
        }
    check_target *t =
        add_target(r, worst <= CHECK_PHASE, "phases of at least 5 % of a step within 10 %");
    if (phase >= 0)
        snprintf(t->found, sizeof t->found, "%+.2f %% (%s of %.90s)",
                 r->policy[policy].phase[phase].error * 100, mz_phase_name((mz_phase)phase),
                 r->policy[policy].name);
}

static void judge_memory(check_result *r) {
    int worst = 0;
    for (int i = 0; i < r->policies; i++)
        if (size_of(r->policy[i].peak.error) > size_of(r->policy[worst].peak.error))
            worst = i;
    const double error = r->policy[worst].peak.error;
    check_target *t = add_target(r, size_of(error) <= CHECK_MEMORY, "peak memory within 1 %");
    snprintf(t->found, sizeof t->found, "%+.2f %% (%.100s)", error * 100, r->policy[worst].name);
}

/* Bytes follow from the plans: more than rounding apart, other plans were replayed. */
static void judge_traffic(check_result *r) {
    int policy = 0, kind = 0;
    for (int i = 0; i < r->policies; i++)
        for (int t = 0; t < CHECK_TRAFFIC; t++)
            if (size_of(r->policy[i].traffic[t].error) >
                size_of(r->policy[policy].traffic[kind].error)) {
                policy = i;
                kind = t;
            }
    const double error = r->policy[policy].traffic[kind].error;
    const bool good = size_of(error) <= CHECK_BYTES;
    check_target *t = add_target(r, good, "bytes of every kind of traffic within 1 %");
    snprintf(t->found, sizeof t->found, "%+.2f %% (%s of %.60s)%s", error * 100,
             check_traffic[kind], r->policy[policy].name,
             good ? "" : ": other plans? same --cluster?");
}

/* Does a rule that knows little tell any two policies apart? */
static bool rules_differ(const check_result *r) {
    for (int k = 1; k < CHECK_RULES; k++)
        for (int i = 1; i < r->policies; i++) {
            const double *value = r->rule[k].value;
            if (fabs(value[i] - value[0]) > CHECK_TIE * fabs(value[0]))
                return true;
        }
    return false;
}

/* Where there is nothing to tell, to be nearer is no merit and no fault; where these rules tell
 * nothing, it is no merit. */
static void judge_rules(check_result *r, int apart) {
    double best = INFINITY;
    for (int i = 1; i < CHECK_RULES; i++)
        best = fmin(best, r->rule[i].log_error);
    const bool nearer = r->rule[0].log_error < best;
    const char *untold = r->pairs == 0                ? "one policy"
                         : apart == 0                 ? "no two policies differ by more than 3 %"
                         : nearer && !rules_differ(r) ? "the rules say the same of all policies"
                                                      : NULL;
    check_target *t =
        add_target(r, nearer || untold, "null predictors lose (mean error of log Ta/Tb)");
    if (untold)
        snprintf(t->found, sizeof t->found, "nothing can be told: %s", untold);
    else
        snprintf(t->found, sizeof t->found, "%.4f against %.4f", r->rule[0].log_error, best);
}

static void judge_order(check_result *r) {
    int apart = 0, wrong = 0;
    const check_pair *first = NULL;
    for (int i = 0; i < r->pairs; i++) {
        const check_pair *p = &r->pair[i];
        apart += p->apart;
        if (p->apart && !p->agrees && wrong++ == 0)
            first = p;
    }
    check_target *t =
        add_target(r, wrong == 0, "same order of policies that differ by more than 3 %");
    if (apart == 0)
        snprintf(t->found, sizeof t->found, "nothing to order: no two differ by more");
    else
        snprintf(t->found, sizeof t->found, "%d of %d pairs", apart - wrong, apart);
    if (first) {
        const size_t used = strlen(t->found);
        snprintf(t->found + used, sizeof t->found - used, "; not %.50s and %.50s",
                 r->policy[first->a].name, r->policy[first->b].name);
    }
    judge_rules(r, apart);
}

static void judge_records(check_result *r) {
    int64_t least = r->policy[0].records;
    bool repeated = true, again = false; /* steps; a whole policy */
    for (int i = 0; i < r->policies; i++) {
        least = r->policy[i].records < least ? r->policy[i].records : least;
        repeated = repeated && !isnan(r->policy[i].noise);
        again = again || r->policy[i].repeated;
    }
    for (int i = 0; i < r->policies; i++)
        if (r->policy[i].noise > r->noise && r->policy[i].repeated == again)
            r->noise = r->policy[i].noise;
    check_target *t = add_target(r, least >= CHECK_RECORDS, "at least 15 steps of every policy");
    snprintf(t->found, sizeof t->found, "%lld", (long long)least);
    r->noisy = r->noise > CHECK_NOISE;
    t = add_target(r, repeated && !r->noisy, "noise of the same policy repeated at most 1.5 %");
    if (repeated)
        snprintf(t->found, sizeof t->found, "%.2f %%", r->noise * 100);
    else
        snprintf(t->found, sizeof t->found, "unknown: steps were not repeated (--repeat)");
    t = add_target(r, r->fixed, "the prediction was fixed before the replay");
    snprintf(t->found, sizeof t->found, "%s",
             r->fixed ? "its digest stands in the measurement"
             : r->old_digest
                 ? "digest of an older mizan, of the summary alone: predict and replay anew"
                 : "prediction was not fixed before the replay");
}

double check_farthest(const check_result *r) {
    double speed = 1;
    for (int k = 0; k < MZ_SPEEDS; k++)
        if (r->probed[k] && fabs(log(r->speed[k])) > fabs(log(speed)))
            speed = r->speed[k];
    return speed;
}

void check_judge(check_result *r) {
    r->passed = true;
    judge_steps(r);
    judge_phases(r);
    judge_memory(r);
    judge_traffic(r);
    judge_order(r);
    judge_records(r);
    int missed = 0;
    for (int i = 0; i < r->targets; i++)
        missed += !r->target[i].passed;
    if (r->noisy)
        snprintf(r->verdict, sizeof r->verdict,
                 "machine too noisy: the same policy differs by %.2f %%, 1.5 %% are allowed",
                 r->noise * 100);
    else if (!r->passed && fabs(check_farthest(r) - 1) > CHECK_SPEED &&
             fmax(r->mean_error - CHECK_MEAN, r->worst_error - CHECK_WORST) > 0)
        snprintf(r->verdict, sizeof r->verdict,
                 "fail: %d of %d targets are missed, on a machine at %.3f of its calibrated speed "
                 "(calibrate again)",
                 missed, r->targets, check_farthest(r));
    else if (r->passed)
        snprintf(r->verdict, sizeof r->verdict, "pass: all %d targets are met", r->targets);
    else
        snprintf(r->verdict, sizeof r->verdict, "fail: %d of %d targets are missed", missed,
                 r->targets);
}

/* ---- all of it ---------------------------------------------------------------------------------
 */

static const char *setting(const mz_result_file *m, const char *key) {
    const char *text =
        json_string_value(json_object_get(json_object_get(m->root, "settings"), key));
    return text ? text : "";
}

mz_code check_files(const mz_result_file *p, const mz_result_file *m, check_result *r,
                    mz_err *err) {
    *r = (check_result){.predicted = p, .measured = m};
    const char *known = json_string_value(json_object_get(m->root, "prediction_digest"));
    r->fixed = known && strcmp(known, p->digest) == 0;
    r->old_digest = known && strncmp(known, "sha256:", 7) == 0;
    r->transport = setting(m, "transport");
    r->backend = setting(m, "backend");
    const json_t *measured = json_object_get(json_object_get(p->root, "cluster"), "measured");
    const char *outside = json_string_value(json_object_get(measured, "outside"));
    r->extrapolated = json_is_true(json_object_get(measured, "extrapolated"));
    r->outside = outside ? outside : "";
    mz_code code = mz_result_belong(p->root, m->root, err);
    if (code == MZ_OK)
        code = check_measure(r, err);
    if (code == MZ_OK)
        code = check_order(r, err);
    if (code == MZ_OK)
        check_judge(r);
    else
        check_free(r);
    return code;
}

void check_free(check_result *r) {
    mz_arena_free(&r->arena);
    *r = (check_result){0};
}
