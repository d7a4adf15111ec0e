/* The statistics as a table and as JSON. */
#include "traces/stats_private.h"

#include "common/io/json.h"

const mz_stats_name mz_stats_names[MZ_STATS_METRICS] = {
    {"expert_max_over_mean", "max/mean", "experts' loads, whole window", false, 2, true, 0.15},
    {"expert_max_violation", "MaxVio = max/mean - 1", "experts' loads, whole window", false, 2,
     true, 0.25},
    {"expert_balancedness", "balancedness = mean/max", "experts' loads, whole window", false, 3,
     true, 0.15},
    {"expert_top1_share", "share of the busiest", "experts' loads, whole window", true, 1, true,
     0.15},
    {"expert_cv", "CV", "experts' loads, whole window", false, 2, true, 0.15},
    {"expert_gini", "Gini", "experts' loads, whole window", false, 2, true, 0.15},
    {"expert_entropy_over_log", "entropy / log E", "experts' loads, whole window", false, 3, false,
     0.03},
    {"expert_zipf_exponent", "Zipf exponent, top 75 %", "experts' loads, whole window", false, 2,
     true, 0.25},
    {"expert_log_sigma", "sigma of log(load/mean)", "experts' loads, whole window", false, 2, true,
     0.25},
    {"expert_cold_fraction", "experts under 0.1 x mean", "experts' loads, whole window", true, 1,
     false, 0.05},
    {"rank_max_over_mean", "ranks: max/mean", "experts' loads, whole window", false, 2, true, 0.1},
    {"rank_balancedness", "ranks: balancedness", "experts' loads, whole window", false, 3, true,
     0.1},
    {"step_correlation_lag_1", "load correlation, lag 1", "drift over recorded steps", false, 3,
     false, 0.05},
    {"step_correlation_lag_5", "load correlation, lag 5", "drift over recorded steps", false, 3,
     false, 0.05},
    {"step_correlation_lag_10", "load correlation, lag 10", "drift over recorded steps", false, 3,
     false, 0.05},
    {"step_correlation_lag_20", "load correlation, lag 20", "drift over recorded steps", false, 3,
     false, 0.05},
    {"step_correlation_lag_50", "load correlation, lag 50", "drift over recorded steps", false, 3,
     false, 0.08},
    {"step_correlation_lag_100", "load correlation, lag 100", "drift over recorded steps", false, 3,
     false, 0.08},
    {"forecast_error_last", "wrong expert, last value", "drift over recorded steps", true, 1, true,
     0.3},
    {"forecast_error_mean", "wrong expert, mean of 10", "drift over recorded steps", true, 1, true,
     0.3},
    {"busiest_same_lag_1", "busiest the same, lag 1", "drift over recorded steps", true, 1, false,
     0.15},
    {"busiest_same_lag_5", "busiest the same, lag 5", "drift over recorded steps", true, 1, false,
     0.15},
    {"busiest_same_lag_10", "busiest the same, lag 10", "drift over recorded steps", true, 1, false,
     0.15},
    {"busiest_same_lag_20", "busiest the same, lag 20", "drift over recorded steps", true, 1, false,
     0.15},
    {"busiest_same_lag_50", "busiest the same, lag 50", "drift over recorded steps", true, 1, false,
     0.15},
    {"busiest_same_lag_100", "busiest the same, lag 100", "drift over recorded steps", true, 1,
     false, 0.15},
    {"scatter_rank_micro_batch", "per rank and micro-batch",
     "scatter between sources, over binomial", false, 2, true, 0.3},
    {"scatter_rank", "per rank", "scatter between sources, over binomial", false, 2, true, 0.3},
    {"reuse_uniform", "k / E", "same expert later in the sequence, over k", false, 3, true, 0.05},
    {"reuse_independent", "independent draws", "same expert later in the sequence, over k", false,
     3, true, 0.15},
    {"reuse_lag_1", "lag 1", "same expert later in the sequence, over k", false, 3, true, 0.15},
    {"reuse_lag_2", "lag 2", "same expert later in the sequence, over k", false, 3, true, 0.15},
    {"reuse_lag_4", "lag 4", "same expert later in the sequence, over k", false, 3, true, 0.15},
    {"reuse_lag_16", "lag 16", "same expert later in the sequence, over k", false, 3, true, 0.15},
    {"reuse_lag_64", "lag 64", "same expert later in the sequence, over k", false, 3, true, 0.15},
    {"reuse_lag_128", "lag 128", "same expert later in the sequence, over k", false, 3, true, 0.15},
    {"window_inflation_64", "variance over independent, 64 tokens", "windows of a sequence", false,
     1, true, 0.35},
    {"window_inflation_256", "variance over independent, 256 tokens", "windows of a sequence",
     false, 1, true, 0.35},
    {"distinct_experts_8", "distinct experts in 8 tokens", "windows of a sequence", false, 1, true,
     0.1},
    {"distinct_experts_16", "distinct experts in 16 tokens", "windows of a sequence", false, 1,
     true, 0.1},
    {"distinct_experts_32", "distinct experts in 32 tokens", "windows of a sequence", false, 1,
     true, 0.1},
    {"distinct_experts_64", "distinct experts in 64 tokens", "windows of a sequence", false, 1,
     true, 0.1},
    {"distinct_experts_128", "distinct experts in 128 tokens", "windows of a sequence", false, 1,
     true, 0.1},
    {"distinct_independent_8", "... 8 independent tokens", "windows of a sequence", false, 1, true,
     0.1},
    {"distinct_independent_16", "... 16 independent tokens", "windows of a sequence", false, 1,
     true, 0.1},
    {"distinct_independent_32", "... 32 independent tokens", "windows of a sequence", false, 1,
     true, 0.1},
    {"distinct_independent_64", "... 64 independent tokens", "windows of a sequence", false, 1,
     true, 0.1},
    {"distinct_independent_128", "... 128 independent tokens", "windows of a sequence", false, 1,
     true, 0.1},
    {"half_correlation_same", "correlation of its halves", "windows of a sequence", false, 2, false,
     0.15},
    {"half_correlation_other", "... of different sequences", "windows of a sequence", false, 2,
     false, 0.1},
    {"layer_information_bits", "mutual information, bits",
     "first expert of a token, from the layer before", false, 2, true, 0.25},
    {"layer_information_share", "... over entropy",
     "first expert of a token, from the layer before", true, 1, false, 0.08},
    {"layer_hit_rate", "guessed right, knowing it",
     "first expert of a token, from the layer before", true, 1, false, 0.08},
    {"layer_guess_rate", "guessed right, not knowing it",
     "first expert of a token, from the layer before", true, 1, false, 0.05},
    {"team_best_partner", "best partner present", "pairs within a token", true, 1, false, 0.1},
    {"team_lift_p99", "99th percentile of the lift", "pairs within a token", false, 1, true, 0.35},
    {"gate_weight_1", "mean of rank 1", "gate weights", false, 3, true, 0.1},
    {"gate_weight_2", "mean of rank 2", "gate weights", false, 3, true, 0.1},
    {"gate_weight_3", "mean of rank 3", "gate weights", false, 3, true, 0.1},
    {"gate_weight_4", "mean of rank 4", "gate weights", false, 3, true, 0.1},
    {"gate_weight_5", "mean of rank 5", "gate weights", false, 3, true, 0.1},
    {"gate_weight_6", "mean of rank 6", "gate weights", false, 3, true, 0.1},
    {"gate_weight_7", "mean of rank 7", "gate weights", false, 3, true, 0.1},
    {"gate_weight_8", "mean of rank 8", "gate weights", false, 3, true, 0.1},
    {"gate_weight_1_p10", "rank 1, 10th percentile", "gate weights", false, 2, true, 0.15},
    {"gate_weight_1_p90", "rank 1, 90th percentile", "gate weights", false, 2, true, 0.15},
};

/* One metric, null where no layer has it; NULL when memory is short. */
static json_t *metric_json(const mz_trace_stats *stats, int m) {
    if (isnan(stats->mean[m]))
        return json_null();
    json_t *layers = json_array();
    int bad = 0;
    for (int32_t l = 0; l < stats->layers; l++)
        bad |= json_array_append_new(
            layers, mz_json_number(stats->layer[(int64_t)l * MZ_STATS_METRICS + m]));
    json_t *metric = json_pack("{s:o, s:o, s:o, s:o}", "mean", mz_json_number(stats->mean[m]),
                               "low", mz_json_number(stats->low[m]), "high",
                               mz_json_number(stats->high[m]), "layers", layers);
    if (!bad)
        return metric;
    json_decref(metric);
    return NULL;
}

json_t *mz_trace_stats_json(const mz_trace_stats *stats) {
    json_t *all = json_object();
    for (int m = 0; m < MZ_STATS_METRICS; m++)
        if (json_object_set_new(all, mz_stats_names[m].key, metric_json(stats, m))) {
            json_decref(all);
            return NULL;
        }
    return all;
}

static void print_value(const mz_stats_name *name, double value, FILE *out) {
    if (name->percent)
        fprintf(out, "%10.*f%%", name->digits, 100 * value);
    else
        fprintf(out, "%10.*f ", name->digits, value);
}

void mz_trace_stats_print(const mz_trace_stats *stats, bool all, FILE *out) {
    const char *group = "";
    for (int m = all ? 0 : MZ_SKEW_MAXVIO; m < MZ_STATS_METRICS; m++) {
        const mz_stats_name *name = &mz_stats_names[m];
        if (isnan(stats->mean[m]))
            continue;
        if (strcmp(group, name->group) != 0)
            fprintf(out, "\n%-44s      mean     lowest    highest\n", name->group);
        group = name->group;
        fprintf(out, "  %-40s", name->label);
        print_value(name, stats->mean[m], out);
        print_value(name, stats->low[m], out);
        print_value(name, stats->high[m], out);
        fputc('\n', out);
    }
}
