/* A check as text and as JSON. */
#include "analysis/check.h"

#include "common/io/json.h"

#include <math.h>
#include <string.h>

/* ---- text --------------------------------------------------------------------------------------
 */

static void percent(double value, FILE *out) {
    if (isfinite(value))
        fprintf(out, " %+8.2f", value * 100);
    else
        fprintf(out, " %8s", "-");
}

/* In brackets what decides nothing. */
static void print_noise(const check_result *r, const check_policy *p, FILE *out) {
    char text[24];
    snprintf(text, sizeof text, "(%+.2f)", p->noise * 100);
    if (check_beside(r, p))
        fprintf(out, " %8s", text);
    else
        percent(p->noise, out);
}

static void print_steps(const check_result *r, FILE *out) {
    fprintf(out, "%-34s %10s %10s %21s %8s %8s %8s %8s %7s\n", "policy", "predicted", "measured",
            "95 % of it", "error", "at speed", "peak", "noise", "steps");
    fprintf(out, "%-34s %10s %10s %21s %8s %8s %8s %8s\n", "", "ms", "ms", "ms", "%", "%", "%",
            "%");
    for (int i = 0; i < r->policies; i++) {
        const check_policy *p = &r->policy[i];
        fprintf(out, "%-34s %10.4g %10.4g ", p->name, p->step.predicted * 1e3,
                p->step.measured * 1e3);
        if (isfinite(p->interval.low))
            fprintf(out, "%10.4g %10.4g", p->interval.low * 1e3, p->interval.high * 1e3);
        else
            fprintf(out, "%21s", "-");
        percent(p->step.error, out);
        percent(check_probed(r) ? p->at_speed : NAN, out);
        percent(p->peak.error, out);
        print_noise(r, p, out);
        fprintf(out, " %7lld\n", (long long)p->records);
    }
    fputs("error: predicted less measured, over measured\n", out);
    for (int i = 0; i < r->policies; i++)
        if (check_beside(r, &r->policy[i])) {
            fputs("noise in brackets: of the halves of a policy's records, which have the "
                  "machine's drift in them; two runs of one decide\n",
                  out);
            break;
        }
}

static bool has_phase(const check_result *r, int phase) {
    for (int i = 0; i < r->policies; i++)
        if (r->policy[i].phase[phase].predicted > 0 || r->policy[i].phase[phase].measured > 0)
            return true;
    return false;
}

/* Of a column of phases, layers or ranks, which has room for an interval. */
enum { COLUMN = 15 };

/* "-0.41..+0.92": the error against either end of the measured time's interval; "" without one. */
static void interval_text(const check_value *v, check_interval i, char text[32]) {
    text[0] = 0;
    if (isfinite(i.low) && i.low > 0)
        snprintf(text, 32, "%+.2f..%+.2f", (v->predicted / i.high - 1) * 100,
                 (v->predicted / i.low - 1) * 100);
}

/* One value of every policy, and its interval. */
typedef const check_value *(*value_at)(const check_policy *p, int64_t index,
                                       check_interval *interval);

static const check_value *at_phase(const check_policy *p, int64_t index, check_interval *i) {
    *i = p->phase_interval[index];
    return &p->phase[index];
}

static const check_value *at_layer(const check_policy *p, int64_t index, check_interval *i) {
    *i = p->layer_interval[index];
    return &p->layer[index];
}

static const check_value *at_rank(const check_policy *p, int64_t index, check_interval *i) {
    *i = p->rank_interval[index];
    return &p->rank[index];
}

/* The row below a row of errors, where some policy has an interval. */
static void print_intervals(const check_result *r, value_at at, int64_t index, FILE *out) {
    bool some = false;
    check_interval interval;
    for (int i = 0; i < r->policies; i++) {
        at(&r->policy[i], index, &interval);
        some = some || isfinite(interval.low);
    }
    if (!some)
        return;
    fprintf(out, "%-22s", "  95 % of it");
    for (int i = 0; i < r->policies; i++) {
        char text[32];
        const check_value *v = at(&r->policy[i], index, &interval);
        interval_text(v, interval, text);
        fprintf(out, " %*s", COLUMN, text);
    }
    fputc('\n', out);
}

/* Numbers of the policies above columns of that width. */
static void print_numbers(const check_result *r, int width, FILE *out) {
    fprintf(out, "%-22s", "");
    for (int i = 0; i < r->policies; i++)
        fprintf(out, " %*s(%d)", width - 3, "", i + 1);
    fputc('\n', out);
}

/* "+1.2 ", in brackets what is less than 5 % of the step; "+1.2/-0.3 " where the speed is known. */
static void phase_text(const check_result *r, const check_policy *p, int phase, char text[48]) {
    const bool large = p->share[phase] >= CHECK_SHARE;
    char at_speed[24] = "";
    snprintf(text, 48, "-");
    if (!isfinite(p->phase[phase].error))
        return;
    if (check_probed(r))
        snprintf(at_speed, sizeof at_speed, "/%+.1f", p->phase_at_speed[phase] * 100);
    snprintf(text, 48, "%s%+.1f%s%s", large ? "" : "(", p->phase[phase].error * 100, at_speed,
             large ? " " : ")");
}

static void put_text(const char *text, FILE *out) {
    fputs(text, out);
}

void check_reasons(const check_result *r, const char *before, const char *after,
                   void (*put)(const char *, FILE *), FILE *out) {
    bool told[MZ_PHASES] = {false};
    for (int k = 0; k < MZ_PHASES; k++) {
        const char *reason = check_unproven(r, (mz_phase)k);
        if (!reason || told[k] || !has_phase(r, k))
            continue;
        fprintf(out, "%sextrapolated: %s", before, r->elsewhere[0] ? "every phase" : "");
        for (int i = k; i < MZ_PHASES; i++) {
            const char *its = check_unproven(r, (mz_phase)i);
            const bool same = its && strcmp(its, reason) == 0;
            told[i] = told[i] || same;
            if (same && !r->elsewhere[0] && has_phase(r, i))
                fprintf(out, "%s%s", i > k ? ", " : "", mz_phase_name((mz_phase)i));
        }
        fputs(": ", out);
        put(reason, out);
        fputs(after, out);
    }
}

/* Errors of phases. */
static void print_phases(const check_result *r, FILE *out) {
    fprintf(out, "\nphase, error in %%%s (in brackets: less than 5 %% of the step)\n",
            check_probed(r) ? ", and at the calibrated speed" : "");
    print_numbers(r, COLUMN, out);
    for (int k = 0; k < MZ_PHASES; k++) {
        if (!has_phase(r, k))
            continue;
        fprintf(out, "%-22s", mz_phase_name((mz_phase)k));
        for (int i = 0; i < r->policies; i++) {
            char text[48];
            phase_text(r, &r->policy[i], k, text);
            fprintf(out, " %*s", COLUMN, text);
        }
        fprintf(out, "  %s\n", check_unproven(r, (mz_phase)k) ? "extrapolated" : "validated");
        print_intervals(r, at_phase, k, out);
    }
    check_reasons(r, "", "\n", put_text, out);
}

/* The rows of one place for all policies. */
static void print_place(const check_result *r, const char *name, int64_t index, value_at at,
                        FILE *out) {
    fprintf(out, "%-22s", name);
    for (int i = 0; i < r->policies; i++) {
        check_interval interval;
        fprintf(out, "%*s", COLUMN - 8, "");
        percent(at(&r->policy[i], index, &interval)->error, out);
    }
    fputc('\n', out);
    print_intervals(r, at, index, out);
}

static void print_places(const check_result *r, FILE *out) {
    char name[32];
    const int32_t layers = r->policy[0].layers, ranks = r->policy[0].ranks;
    fputs("\nlayer, rank: error of busy time in %\n", out);
    print_numbers(r, COLUMN, out);
    for (int32_t l = 0; l < layers; l++) {
        snprintf(name, sizeof name, "layer %d", (int)l);
        print_place(r, l + 1 < layers ? name : "whole step", l, at_layer, out);
    }
    for (int32_t k = 0; k < ranks; k++) {
        snprintf(name, sizeof name, "rank %d", (int)k);
        print_place(r, name, k, at_rank, out);
    }
}

static void print_memory(const check_result *r, FILE *out) {
    fputs("\nmost memory on any rank, error in %\n", out);
    print_numbers(r, 8, out);
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++) {
        bool some = false;
        for (int i = 0; i < r->policies; i++)
            some =
                some || r->policy[i].memory[c].predicted > 0 || r->policy[i].memory[c].measured > 0;
        if (!some)
            continue;
        fprintf(out, "%-22s", mz_memcat_name((mz_memcat)c));
        for (int i = 0; i < r->policies; i++)
            percent(r->policy[i].memory[c].error, out);
        fputc('\n', out);
    }
}

static void print_rules(const check_result *r, FILE *out) {
    fprintf(out, "\n%-12s %8s %10s %16s\n", "order by", "tau", "regret, %", "error of log");
    for (int k = 0; k < CHECK_RULES; k++) {
        const check_rule *rule = &r->rule[k];
        fprintf(out, "%-12s", rule->name);
        if (isfinite(rule->tau))
            fprintf(out, " %8.3f", rule->tau);
        else
            fprintf(out, " %8s", "-");
        fprintf(out, " %10.2f", rule->regret * 100);
        if (isfinite(rule->log_error))
            fprintf(out, " %16.4f", rule->log_error);
        else
            fprintf(out, " %16s", "-");
        fprintf(out, "  %s\n", rule->what);
    }
}

void check_speed(const check_result *r, const char *before, const char *after, FILE *out) {
    char memory[40] = "", cache[40] = "";
    if (r->probed[MZ_SPEED_MEMORY])
        snprintf(memory, sizeof memory, ", its memory at %.3f", r->speed[MZ_SPEED_MEMORY]);
    if (r->probed[MZ_SPEED_CACHE])
        snprintf(cache, sizeof cache, ", rows in a cache at %.3f", r->speed[MZ_SPEED_CACHE]);
    if (check_probed(r))
        fprintf(out,
                "%sthe machine ran at %.3f of its calibrated speed%s%s; at that speed: mean error "
                "%.2f %%, worst %.2f %%%s",
                before, r->speed[MZ_SPEED_PRODUCT], memory, cache, r->mean_at_speed * 100,
                r->worst_at_speed * 100, after);
}

void check_extrapolated(const check_result *r, const char *before, const char *after,
                        void (*put)(const char *, FILE *), FILE *out) {
    if (!r->extrapolated)
        return;
    fprintf(out, "%sthe prediction is extrapolated: it has sizes far from all that was calibrated",
            before);
    fputs(r->outside[0] ? ": " : "", out);
    put(r->outside, out);
    fputs(after, out);
}

void check_print(const check_result *r, FILE *out) {
    print_steps(r, out);
    check_extrapolated(r, "", "\n", put_text, out);
    check_speed(r, "", "\n", out);
    print_phases(r, out);
    print_places(r, out);
    print_memory(r, out);
    for (int i = 0; i < r->policies; i++)
        fprintf(out, "(%d) %s\n", i + 1, r->policy[i].name);
    print_rules(r, out);
    fputc('\n', out);
    for (int i = 0; i < r->targets; i++)
        fprintf(out, "%s  %s: %s\n", r->target[i].passed ? "pass" : "FAIL", r->target[i].what,
                r->target[i].found);
    fprintf(out, "%s\n", r->verdict);
}

/* ---- JSON --------------------------------------------------------------------------------------
 */

static void put(json_t *object, const char *key, json_t *value, bool *failed) {
    *failed |= json_object_set_new(object, key, value) != 0;
}

static void append(json_t *list, json_t *value, bool *failed) {
    *failed |= json_array_append_new(list, value) != 0;
}

static json_t *real(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *value_json(const check_value *v, bool *failed) {
    json_t *o = json_object();
    put(o, "predicted", real(v->predicted), failed);
    put(o, "measured", real(v->measured), failed);
    put(o, "error", real(v->error), failed);
    return o;
}

static json_t *interval_json(check_interval i) {
    return json_pack("[o, o]", real(i.low), real(i.high));
}

/* interval: of each, or NULL: there are none. */
static json_t *values_json(const check_value *v, const check_interval *interval, int64_t count,
                           bool *failed) {
    json_t *list = json_array();
    for (int64_t i = 0; i < count; i++) {
        json_t *value = value_json(&v[i], failed);
        if (interval)
            put(value, "interval_s", interval_json(interval[i]), failed);
        append(list, value, failed);
    }
    return list;
}

static const char *const speed_keys[MZ_SPEEDS] = {[MZ_SPEED_PRODUCT] = "speed",
                                                  [MZ_SPEED_MEMORY] = "memory_speed",
                                                  [MZ_SPEED_CACHE] = "cache_speed"};

static json_t *phases_json(const check_result *r, const check_policy *p, bool *failed) {
    json_t *o = json_object();
    for (int k = 0; k < MZ_PHASES; k++) {
        if (!has_phase(r, k))
            continue;
        json_t *phase = value_json(&p->phase[k], failed);
        const char *reason = check_unproven(r, (mz_phase)k);
        put(phase, "interval_s", interval_json(p->phase_interval[k]), failed);
        put(phase, "error_at_speed", real(check_probed(r) ? p->phase_at_speed[k] : NAN), failed);
        put(phase, "share", real(p->share[k]), failed);
        put(phase, "validated", json_boolean(!reason), failed);
        put(phase, "reason", reason ? mz_json_text(reason) : json_null(), failed);
        put(o, mz_phase_name((mz_phase)k), phase, failed);
    }
    return o;
}

static const char *noise_kind(bool runs) {
    return runs ? "two runs" : "halves";
}

static json_t *policy_json(const check_result *r, const check_policy *p, bool *failed) {
    json_t *o = json_object(), *memory = json_object(), *cells = json_array();
    put(o, "policy", mz_json_text(p->name), failed);
    put(o, "lossy", json_boolean(p->lossy), failed);
    put(o, "records", json_integer(p->records), failed);
    put(o, "step_time_s", value_json(&p->step, failed), failed);
    put(o, "interval_s", interval_json(p->interval), failed);
    put(o, "error_at_speed", real(check_probed(r) ? p->at_speed : NAN), failed);
    put(o, "noise", real(p->noise), failed);
    put(o, "noise_of", json_string(noise_kind(p->repeated)), failed);
    put(o, "peak_memory_bytes", value_json(&p->peak, failed), failed);
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
        put(memory, mz_memcat_name((mz_memcat)c), value_json(&p->memory[c], failed), failed);
    put(o, "memory_bytes", memory, failed);
    put(o, "phases_s", phases_json(r, p, failed), failed);
    put(o, "layers_s", values_json(p->layer, p->layer_interval, p->layers, failed), failed);
    put(o, "ranks_s", values_json(p->rank, p->rank_interval, p->ranks, failed), failed);
    for (int32_t l = 0; l < p->layers; l++)
        append(cells, values_json(p->cell + (int64_t)l * p->ranks, NULL, p->ranks, failed), failed);
    put(o, "cells_s", cells, failed);
    return o;
}

static json_t *pair_json(const check_result *r, const check_pair *p, bool *failed) {
    json_t *o = json_object();
    put(o, "a", mz_json_text(r->policy[p->a].name), failed);
    put(o, "b", mz_json_text(r->policy[p->b].name), failed);
    put(o, "log_predicted", real(p->predicted), failed);
    put(o, "log_measured", real(p->measured), failed);
    put(o, "error", real(p->error), failed);
    put(o, "apart", json_boolean(p->apart), failed);
    put(o, "agrees", json_boolean(p->agrees), failed);
    return o;
}

static json_t *rule_json(const check_rule *rule, bool *failed) {
    json_t *o = json_object();
    put(o, "rule", json_string(rule->name), failed);
    put(o, "tau", real(rule->tau), failed);
    put(o, "regret", real(rule->regret), failed);
    put(o, "log_error", real(rule->log_error), failed);
    return o;
}

static json_t *target_json(const check_target *t, bool *failed) {
    json_t *o = json_object();
    put(o, "target", json_string(t->what), failed);
    put(o, "found", mz_json_text(t->found), failed);
    put(o, "passed", json_boolean(t->passed), failed);
    return o;
}

json_t *check_json(const check_result *r) {
    bool failed = false;
    json_t *root = json_object(), *policies = json_array(), *pairs = json_array();
    json_t *rules = json_array(), *targets = json_array();
    put(root, "schema", json_string("mizan-check/1"), &failed);
    put(root, "prediction_digest", json_string(r->predicted->digest), &failed);
    put(root, "fixed_before", json_boolean(r->fixed), &failed);
    put(root, "extrapolated", json_boolean(r->extrapolated), &failed);
    put(root, "outside", r->outside[0] ? mz_json_text(r->outside) : json_null(), &failed);
    put(root, "transport", r->transport[0] ? mz_json_text(r->transport) : json_null(), &failed);
    put(root, "backend", r->backend[0] ? mz_json_text(r->backend) : json_null(), &failed);
    for (int i = 0; i < r->policies; i++)
        append(policies, policy_json(r, &r->policy[i], &failed), &failed);
    put(root, "policies", policies, &failed);
    for (int i = 0; i < r->pairs; i++)
        append(pairs, pair_json(r, &r->pair[i], &failed), &failed);
    put(root, "pairs", pairs, &failed);
    for (int i = 0; i < CHECK_RULES; i++)
        append(rules, rule_json(&r->rule[i], &failed), &failed);
    put(root, "rules", rules, &failed);
    put(root, "mean_error", real(r->mean_error), &failed);
    put(root, "worst_error", real(r->worst_error), &failed);
    put(root, "noise", real(r->noise), &failed);
    put(root, "noise_of", r->noise_of < 0 ? json_null() : json_string(noise_kind(r->noise_runs)),
        &failed);
    put(root, "noise_policy",
        r->noise_of < 0 ? json_null() : mz_json_text(r->policy[r->noise_of].name), &failed);
    for (int k = 0; k < MZ_SPEEDS; k++)
        put(root, speed_keys[k], real(r->probed[k] ? r->speed[k] : NAN), &failed);
    put(root, "mean_error_at_speed", real(check_probed(r) ? r->mean_at_speed : NAN), &failed);
    put(root, "worst_error_at_speed", real(check_probed(r) ? r->worst_at_speed : NAN), &failed);
    for (int i = 0; i < r->targets; i++)
        append(targets, target_json(&r->target[i], &failed), &failed);
    put(root, "targets", targets, &failed);
    put(root, "noisy", json_boolean(r->noisy), &failed);
    put(root, "passed", json_boolean(r->passed), &failed);
    put(root, "verdict", mz_json_text(r->verdict), &failed);
    if (failed) {
        json_decref(root);
        return NULL;
    }
    return root;
}
