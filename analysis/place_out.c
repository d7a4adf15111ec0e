/* The report of a placement: JSON for programs, a table for people. */
#include "analysis/place.h"

#include "common/io/json.h"

#include <string.h>

json_t *place_int_list(const int32_t *value, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer(value[i]));
    return list;
}

static json_t *long_list(const int64_t *value, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer(value[i]));
    return list;
}

static json_t *experts_json(const place_layer *l, int32_t experts) {
    json_t *list = json_array();
    for (int32_t e = 0; e < experts; e++) {
        const int32_t first = l->begin[e], n = l->begin[e + 1] - first;
        json_array_append_new(list, json_pack("{s:i, s:I, s:i, s:o, s:o}", "id", e, "load",
                                              (json_int_t)l->load->total[e], "replicas", n, "hosts",
                                              place_int_list(l->rank + first, n), "pairs",
                                              long_list(l->pairs + first, n)));
    }
    return list;
}

static json_t *ranks_json(const place_layer *l, int32_t ranks) {
    json_t *list = json_array();
    for (int32_t r = 0; r < ranks; r++)
        json_array_append_new(list, json_pack("{s:i, s:I, s:i}", "id", r, "load",
                                              (json_int_t)l->rank_load[r], "slots_used",
                                              l->rank_used[r]));
    return list;
}

static json_t *layer_json(const place_result *p, const place_layer *l) {
    json_t *o = json_pack("{s:i, s:f, s:f, s:f, s:f, s:o, s:o}", "layer", l->number, "imbalance",
                          l->imbalance, "imbalance_bound", l->bound, "imbalance_bound_hosts",
                          l->bound_hosts, "imbalance_static", l->imbalance_static, "experts",
                          experts_json(l, p->experts), "ranks", ranks_json(l, p->ranks));
    if (p->lossy) {
        json_object_set_new(o, "quota", long_list(l->quota, p->experts));
        json_object_set_new(o, "dropped_pairs", json_integer(l->dropped));
    }
    if (l->why[0])
        json_object_set_new(o, "why", mz_json_text(l->why));
    return o;
}

mz_code place_print_json(const place_result *p, FILE *out, mz_err *err) {
    json_t *layers = json_array();
    for (int32_t l = 0; l < p->layers; l++)
        json_array_append_new(layers, layer_json(p, &p->layer[l]));
    json_t *root = json_pack("{s:s, s:o, s:i, s:i, s:i, s:o, s:i, s:s, s:b, s:o, s:f}", "schema",
                             "mizan-place/1", "policy", mz_json_text(p->policy), "ranks", p->ranks,
                             "nodes", p->nodes, "experts", p->experts, "slots",
                             p->slots > 0 ? json_integer(p->slots) : json_null(), "groups",
                             p->groups, "shown", p->shown, "reshaped", (int)p->reshaped, "layers",
                             layers, "planner_measured_s", p->planner_measured_s);
    mz_code code = root ? mz_json_write(root, out, err) : mz_fail_nomem(err, "the report");
    json_decref(root);
    return code;
}

/* ---- the table ---------------------------------------------------------------------------------
 */

/* "0: 3 5 17" for every rank: the experts in its slots, ascending. */
static void print_hosts(const place_result *p, const place_layer *l, FILE *out) {
    for (int32_t r = 0; r < p->ranks; r++) {
        fprintf(out, "  rank %3d  %10lld pairs  experts", r, (long long)l->rank_load[r]);
        for (int32_t e = 0; e < p->experts; e++)
            for (int32_t i = l->begin[e]; i < l->begin[e + 1]; i++)
                if (l->rank[i] == r)
                    fprintf(out, " %d", e);
        fputc('\n', out);
    }
}

static void print_head(const place_result *p, FILE *out) {
    fprintf(out, "%s: %d experts on %d ranks", p->policy, p->experts, p->ranks);
    if (p->nodes > 1)
        fprintf(out, " of %d nodes", p->nodes);
    if (p->slots > 0)
        fprintf(out, ", %d slots each", p->slots);
    fprintf(out, "; decided on %s%s\n\n", p->shown, p->reshaped ? " (trace reshaped)" : "");
    fprintf(out, "imbalance: pairs of the busiest rank over the mean%s\n",
            p->lossy ? "; placed: of the pairs computed, the others of all" : "");
    fprintf(out, "%6s %12s %8s %9s %10s %11s%s\n", "layer", "pairs", "static", "placed",
            "best here", "best of all", p->lossy ? "    computed and kept" : "     copies");
}

void place_print_table(const place_result *p, bool hosts, FILE *out) {
    print_head(p, out);
    double sum[4] = {0};
    for (int32_t k = 0; k < p->layers; k++) {
        const place_layer *l = &p->layer[k];
        fprintf(out, "%6d %12lld %8.3f %9.3f %10.3f %11.3f", l->number, (long long)l->load->pairs,
                l->imbalance_static, l->imbalance, l->bound_hosts, l->bound);
        int64_t kept = 0;
        for (int32_t e = 0; e < p->experts; e++)
            kept += l->quota[e];
        if (p->lossy)
            fprintf(out, "%21lld\n", (long long)kept);
        else
            fprintf(out, "%11d\n", l->begin[p->experts] - p->experts);
        sum[0] += l->imbalance_static;
        sum[1] += l->imbalance;
        sum[2] += l->bound_hosts;
        sum[3] += l->bound;
    }
    if (p->layers > 1)
        fprintf(out, "%6s %12s %8.3f %9.3f %10.3f %11.3f\n", "mean", "", sum[0] / p->layers,
                sum[1] / p->layers, sum[2] / p->layers, sum[3] / p->layers);
    for (int32_t k = 0; k < p->layers && (hosts || p->layers == 1); k++) {
        fprintf(out, "\nlayer %d\n", p->layer[k].number);
        print_hosts(p, &p->layer[k], out);
    }
    if (p->layers > 1 && !hosts)
        fprintf(out, "\nwhere every expert lies: --hosts, --json or --format\n");
}
