/* Does the prediction order the policies as the measurement does, and does a rule that knows little
 * do as well? */
#include "analysis/check.h"

#include <math.h>

static mz_code make_pairs(check_result *r, mz_err *err) {
    const int n = r->policies;
    r->pair = MZ_NEW(&r->arena, check_pair, (int64_t)n * (n - 1) / 2 + 1);
    if (!r->pair)
        return mz_fail_nomem(err, "pairs of policies");
    for (int a = 0; a < n; a++)
        for (int b = a + 1; b < n; b++) {
            const check_value *x = &r->policy[a].step, *y = &r->policy[b].step;
            const double measured = log(x->measured / y->measured);
            const double predicted = log(x->predicted / y->predicted);
            r->pair[r->pairs++] = (check_pair){.a = a,
                                               .b = b,
                                               .predicted = predicted,
                                               .measured = measured,
                                               .error = predicted - measured,
                                               .apart = fabs(measured) > log(1 + CHECK_APART),
                                               .agrees = predicted * measured > 0};
        }
    return MZ_OK;
}

/* ---- rules -------------------------------------------------------------------------------------
 */

static double imbalance_of(const check_policy *p) {
    return check_number(json_object_get(p->predicted->json, "rank_imbalance"), "mean");
}

/* Rows of the fullest rank where they are most: in units of a rank's mean without drops. */
static double rows_of(const check_policy *p) {
    return check_number(json_object_get(p->predicted->json, "rank_imbalance"), "max") *
           (1 - check_number(p->predicted->json, "dropped_pairs_fraction"));
}

/* Latency of four exchanges a layer, bytes at the link's rate, FLOPs at the device's: 6HI a
 * computed pair in forward, 12HI a kept one in backward. */
static double sum_of(const check_result *r, const check_policy *p) {
    static const char *const bytes_key[] = {"dispatch_bytes", "combine_bytes",
                                            "backward_dispatch_bytes", "backward_combine_bytes",
                                            "transfer_bytes"};
    const json_t *run = p->predicted->json, *model = json_object_get(r->predicted->root, "model");
    const json_t *cluster = json_object_get(r->predicted->root, "cluster");
    const json_t *node = json_object_get(cluster, "node");
    const json_t *device = json_object_get(cluster, "device");
    const double layers = check_number(model, "moe_layers");
    const double pairs = check_tokens(p) * check_number(model, "top_k") * layers;
    const double one = check_number(model, "hidden") * check_number(model, "expert_intermediate");
    const double flops = pairs * one *
                         (6 * (1 - check_number(run, "dropped_pairs_fraction")) +
                          12 * check_number(run, "kept_pairs_fraction"));
    const double rate = check_number(device, "bf16") * check_number(device, "gemm_efficiency");
    const double link = check_number(node, "bandwidth") * check_number(node, "efficiency");
    double bytes = 0;
    for (int i = 0; i < 5; i++)
        bytes += check_number(run, bytes_key[i]);
    return 4 * layers * check_number(node, "latency") + (link > 0 ? bytes / link : 0) +
           (rate > 0 ? flops / rate : 0);
}

static double value_of(const check_result *r, int rule, const check_policy *p) {
    switch (rule) {
    case 0:
        return p->step.predicted;
    case 1:
        return imbalance_of(p);
    case 2:
        return rows_of(p);
    default:
        return sum_of(r, p);
    }
}

/* Kendall's tau over the pairs that are apart; a tie of the rule counts neither for nor against. */
static void score_rule(const check_result *r, check_rule *rule) {
    double agree = 0, apart = 0, error = 0;
    int best = 0, fastest = 0;
    for (int i = 0; i < r->pairs; i++) {
        const check_pair *p = &r->pair[i];
        const double x = rule->value[p->a], y = rule->value[p->b];
        const double said = x > 0 && y > 0 ? log(x / y) : 0;
        error += fabs(said - p->measured);
        if (!p->apart)
            continue;
        apart++;
        agree += said * p->measured > 0 ? 1 : said * p->measured < 0 ? -1 : 0;
    }
    rule->tau = apart > 0 ? agree / apart : NAN;
    rule->log_error = r->pairs > 0 ? error / r->pairs : NAN;
    for (int i = 1; i < r->policies; i++) {
        best = rule->value[i] < rule->value[best] ? i : best;
        fastest = r->policy[i].step.measured < r->policy[fastest].step.measured ? i : fastest;
    }
    rule->regret = r->policy[best].step.measured / r->policy[fastest].step.measured - 1;
}

mz_code check_order(check_result *r, mz_err *err) {
    static const struct {
        const char *name, *what;
    } about[CHECK_RULES] = {
        {"prediction", "the step times of the first file"},
        {"imbalance", "mean imbalance of computed rows"},
        {"largest", "rows of the fullest rank at its fullest"},
        {"sum", "latency, bytes and FLOPs added up"},
    };
    mz_code code = make_pairs(r, err);
    for (int k = 0; code == MZ_OK && k < CHECK_RULES; k++) {
        check_rule *rule = &r->rule[k];
        *rule = (check_rule){.name = about[k].name, .what = about[k].what};
        rule->value = MZ_NEW(&r->arena, double, r->policies);
        if (!rule->value)
            return mz_fail_nomem(err, "the rules of a check");
        for (int i = 0; i < r->policies; i++)
            rule->value[i] = value_of(r, k, &r->policy[i]);
        score_rule(r, rule);
    }
    return code;
}
