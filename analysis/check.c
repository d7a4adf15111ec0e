/* What is judged. */
#include "analysis/check.h"

#include "common/io/result_match.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- evidence ----------------------------------------------------------------------------------
 */

static const char *setting(const mz_result_file *m, const char *key) {
    const char *text =
        json_string_value(json_object_get(json_object_get(m->root, "settings"), key));
    return text ? text : "";
}

/* A prediction from a data sheet, or calibrated elsewhere, may be right by chance. */
static void note_elsewhere(check_result *r) {
    static const char *const key[] = {"machine", "backend", "transport"};
    const json_t *cluster = json_object_get(r->predicted->root, "cluster");
    const json_t *calibrated = json_object_get(cluster, "measured");
    if (!calibrated) {
        snprintf(r->elsewhere, sizeof r->elsewhere,
                 "the prediction is of a cluster that was not calibrated (mizan calibrate)");
        return;
    }
    for (size_t i = 0; i < sizeof key / sizeof *key && !r->elsewhere[0]; i++) {
        const char *then = json_string_value(json_object_get(calibrated, key[i]));
        const char *now = setting(r->measured, key[i]);
        if (!then || !now[0] || strcmp(then, now) != 0)
            snprintf(r->elsewhere, sizeof r->elsewhere,
                     "the %s that was calibrated for the prediction is %.100s, the one that was "
                     "measured %.100s",
                     key[i], then ? then : "unknown", now[0] ? now : "unknown");
    }
}

const char *check_unproven(const check_result *r, mz_phase phase) {
    if (r->elsewhere[0])
        return r->elsewhere;
    if (phase == MZ_PHASE_LAUNCH_WAIT)
        return "waiting is what is left of a step";
    if (mz_phase_computes(phase) || phase == MZ_PHASE_PLANNER)
        return NULL;
    return strcmp(r->transport, "local") == 0
               ? "ranks of one process copy in its memory: no network, nobody to wait for"
               : NULL;
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

/* Which kept pairs a lossy policy has to send again depends on values, too. */
static bool good_traffic(const check_policy *p, int kind) {
    const double error = size_of(p->traffic[kind].error);
    return kind >= CHECK_KINDS && p->exact ? error == 0 : error <= CHECK_BYTES;
}

/* Bytes follow from the plans: more than rounding apart, other plans were replayed. The worst is
 * one that is missed, if any is. */
static void judge_traffic(check_result *r) {
    const check_policy *worst = &r->policy[0];
    int kind = 0;
    for (const check_policy *p = r->policy; p < r->policy + r->policies; p++)
        for (int t = 0; t < CHECK_TRAFFIC; t++) {
            const bool good = good_traffic(p, t), before = good_traffic(worst, kind);
            const bool larger = size_of(p->traffic[t].error) > size_of(worst->traffic[kind].error);
            if (good == before ? larger : before) {
                worst = p;
                kind = t;
            }
        }
    const check_value *v = &worst->traffic[kind];
    const bool good = good_traffic(worst, kind);
    check_target *t = add_target(r, good, "bytes of every kind within 1 %, by process the same");
    if (good || kind < CHECK_KINDS)
        snprintf(t->found, sizeof t->found, "%+.2f %% (%s of %.60s)%s", v->error * 100,
                 check_traffic[kind], worst->name, good ? "" : ": other plans? same --cluster?");
    else
        snprintf(t->found, sizeof t->found, "%.0f predicted, %.0f measured (%s of %.60s)",
                 v->predicted, v->measured, check_traffic[kind], worst->name);
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

/* Which noise decides: the largest of two runs of a policy; where none was run twice, of halves,
 * and then some of every policy. Too much of one is too much whatever is known of the others. */
static void find_noise(check_result *r) {
    bool whole = true;
    r->noise = NAN;
    r->noise_of = -1;
    for (int i = 0; i < r->policies; i++)
        r->noise_runs = r->noise_runs || (r->policy[i].repeated && !isnan(r->policy[i].noise));
    for (int i = 0; i < r->policies; i++) {
        const check_policy *p = &r->policy[i];
        whole = whole && !isnan(p->noise);
        if (p->repeated == r->noise_runs && !isnan(p->noise) && !(p->noise <= r->noise)) {
            r->noise = p->noise;
            r->noise_of = i;
        }
    }
    r->noisy = r->noise > CHECK_NOISE;
    if (!r->noisy && !r->noise_runs && !whole) {
        r->noise = NAN;
        r->noise_of = -1;
    }
}

/* "two runs of static". */
static void noise_text(const check_result *r, char *text, size_t size) {
    snprintf(text, size, "%s of %.90s", r->noise_runs ? "two runs" : "halves of the records",
             r->policy[r->noise_of].name);
}

static void judge_noise(check_result *r) {
    char what[128];
    find_noise(r);
    check_target *t =
        add_target(r, r->noise <= CHECK_NOISE, "noise of the same policy repeated at most 1.5 %");
    if (r->noise_of < 0) {
        snprintf(t->found, sizeof t->found, "unknown: steps were not repeated (--repeat)");
        return;
    }
    noise_text(r, what, sizeof what);
    snprintf(t->found, sizeof t->found, "%.2f %% (%s)", r->noise * 100, what);
}

static void judge_records(check_result *r) {
    int64_t least = r->policy[0].records;
    for (int i = 0; i < r->policies; i++)
        least = r->policy[i].records < least ? r->policy[i].records : least;
    check_target *t = add_target(r, least >= CHECK_RECORDS, "at least 15 steps of every policy");
    snprintf(t->found, sizeof t->found, "%lld", (long long)least);
    judge_noise(r);
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

static void give_verdict(check_result *r) {
    int missed = 0;
    char noise[128];
    for (int i = 0; i < r->targets; i++)
        missed += !r->target[i].passed;
    if (r->noisy) {
        noise_text(r, noise, sizeof noise);
        snprintf(r->verdict, sizeof r->verdict,
                 "machine too noisy: %s differ by %.2f %%, 1.5 %% are allowed", noise,
                 r->noise * 100);
    } else if (!r->passed && fabs(check_farthest(r) - 1) > CHECK_SPEED &&
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

void check_judge(check_result *r) {
    r->passed = true;
    judge_steps(r);
    judge_phases(r);
    judge_memory(r);
    judge_traffic(r);
    judge_order(r);
    judge_records(r);
    give_verdict(r);
}

/* ---- all of it ---------------------------------------------------------------------------------
 */

mz_code check_files(const mz_result_file *p, const mz_result_file *m, check_result *r,
                    mz_err *err) {
    *r = (check_result){.predicted = p, .measured = m};
    const char *known = json_string_value(json_object_get(m->root, "prediction_digest"));
    r->fixed = known && strcmp(known, p->digest) == 0;
    r->old_digest = known && strncmp(known, "sha256:", 7) == 0;
    r->transport = setting(m, "transport");
    r->backend = setting(m, "backend");
    note_elsewhere(r);
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
