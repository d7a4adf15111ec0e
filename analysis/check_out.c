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

static void print_steps(const check_result *r, FILE *out) {
    fprintf(out, "%-34s %10s %10s %21s %8s %8s %8s %8s %7s\n", "policy", "predicted", "measured",
            "95 % of it", "error", "at speed", "peak", "noise", "steps");
    fprintf(out, "%-34s %10s %10s %21s %8s %8s %8s %8s\n", "", "ms", "ms", "ms", "%", "%", "%",
            "%");
    for (int i = 0; i < r->policies; i++) {
        const check_policy *p = &r->policy[i];
        fprintf(out, "%-34s %10.4g %10.4g ", p->name, p->step.predicted * 1e3,
                p->step.measured * 1e3);
        if (isfinite(p->low))
            fprintf(out, "%10.4g %10.4g", p->low * 1e3, p->high * 1e3);
        else
            fprintf(out, "%21s", "-");
        percent(p->step.error, out);
        percent(check_probed(r) ? p->at_speed : NAN, out);
        percent(p->peak.error, out);
        percent(p->noise, out);
        fprintf(out, " %7lld\n", (long long)p->records);
    }
}

static bool has_phase(const check_result *r, int phase) {
    for (int i = 0; i < r->policies; i++)
        if (r->policy[i].phase[phase].predicted > 0 || r->policy[i].phase[phase].measured > 0)
            return true;
    return false;
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

/* Errors of phases. */
static void print_phases(const check_result *r, FILE *out) {
    const int width = check_probed(r) ? 15 : 8;
    fprintf(out, "\nphase, error in %%%s (in brackets: less than 5 %% of the step)\n",
            check_probed(r) ? ", and at the calibrated speed" : "");
    print_numbers(r, width, out);
    for (int k = 0; k < MZ_PHASES; k++) {
        if (!has_phase(r, k))
            continue;
        fprintf(out, "%-22s", mz_phase_name((mz_phase)k));
        for (int i = 0; i < r->policies; i++) {
            char text[48];
            phase_text(r, &r->policy[i], k, text);
            fprintf(out, " %*s", width, text);
        }
        fprintf(out, "  %s\n", check_validated(r, (mz_phase)k) ? "validated" : "extrapolated");
    }
}

/* The row of one place for all policies. */
static void print_place(const check_result *r, const char *name, int64_t index, bool layers,
                        FILE *out) {
    fprintf(out, "%-22s", name);
    for (int i = 0; i < r->policies; i++) {
        const check_policy *p = &r->policy[i];
        percent(layers ? p->layer[index].error : p->rank[index].error, out);
    }
    fputc('\n', out);
}

static void print_places(const check_result *r, FILE *out) {
    char name[32];
    const int32_t layers = r->policy[0].layers, ranks = r->policy[0].ranks;
    fputs("\nlayer, rank: error of busy time in %\n", out);
    print_numbers(r, 8, out);
    for (int32_t l = 0; l < layers; l++) {
        snprintf(name, sizeof name, "layer %d", (int)l);
        print_place(r, l + 1 < layers ? name : "whole step", l, true, out);
    }
    for (int32_t k = 0; k < ranks; k++) {
        snprintf(name, sizeof name, "rank %d", (int)k);
        print_place(r, name, k, false, out);
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

static void put_text(const char *text, FILE *out) {
    fputs(text, out);
}

void check_print(const check_result *r, FILE *out) {
    print_steps(r, out);
    fputs("error: predicted less measured, over measured\n", out);
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

static json_t *values_json(const check_value *v, int64_t count, bool *failed) {
    json_t *list = json_array();
    for (int64_t i = 0; i < count; i++)
        append(list, value_json(&v[i], failed), failed);
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
        put(phase, "error_at_speed", real(check_probed(r) ? p->phase_at_speed[k] : NAN), failed);
        put(phase, "share", real(p->share[k]), failed);
        put(phase, "validated", json_boolean(check_validated(r, (mz_phase)k)), failed);
        put(o, mz_phase_name((mz_phase)k), phase, failed);
    }
    return o;
}

static json_t *policy_json(const check_result *r, const check_policy *p, bool *failed) {
    json_t *o = json_object(), *memory = json_object(), *cells = json_array();
    put(o, "policy", mz_json_text(p->name), failed);
    put(o, "lossy", json_boolean(p->lossy), failed);
    put(o, "records", json_integer(p->records), failed);
    put(o, "step_time_s", value_json(&p->step, failed), failed);
    put(o, "interval_s", json_pack("[o, o]", real(p->low), real(p->high)), failed);
    put(o, "error_at_speed", real(check_probed(r) ? p->at_speed : NAN), failed);
    put(o, "noise", real(p->noise), failed);
    put(o, "noise_of", json_string(p->repeated ? "two runs" : "halves"), failed);
    put(o, "peak_memory_bytes", value_json(&p->peak, failed), failed);
    for (int c = 0; c < MZ_MEM_CATEGORIES; c++)
        put(memory, mz_memcat_name((mz_memcat)c), value_json(&p->memory[c], failed), failed);
    put(o, "memory_bytes", memory, failed);
    put(o, "phases_s", phases_json(r, p, failed), failed);
    put(o, "layers_s", values_json(p->layer, p->layers, failed), failed);
    put(o, "ranks_s", values_json(p->rank, p->ranks, failed), failed);
    for (int32_t l = 0; l < p->layers; l++)
        append(cells, values_json(p->cell + (int64_t)l * p->ranks, p->ranks, failed), failed);
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
