/* What serving and training programs read for an initial placement.
 *
 * sglang: --init-expert-location FILE.json, python/sglang/srt/eplb/expert_location.py: an object
 * with the one key physical_to_logical_map [all layers of the model][all slots], slots of rank 0
 * first; every rank has equally many; dense layers have a row too, which is not used.
 * vllm: EPLB of vLLM itself reads no file, it begins with the experts in order. Its plug-in for
 * Ascend does (additional_config eplb_config.expert_map_path, vllm_ascend/eplb): moe_layer_count
 * and layer_list [layer_id, device_count, device_list [device_id, device_expert]], MoE layers only,
 * no expert twice on a device. physical_to_logical_map [MoE layers][slots] beside them is the
 * matrix that vLLM's EplbState holds, for code that sets it.
 * tensorrt-llm: moe_config.load_balancer FILE.yaml, examples/wide_ep/ep_load_balancer: num_slots,
 * initial_global_assignments {layer of the model: experts of all slots}, layer_updates_per_iter 0
 * (static).
 * deepspeed: reads no placement: deepspeed.moe.layer.MoE gives rank r of a group the experts
 * r*E/ep_size and following. What a script would need to number experts anew, or to form one
 * expert-data-parallel group per expert, is written as JSON.
 * None of the first three has quotas: they share an expert's tokens evenly among its copies. */
#include "analysis/place.h"

#include "common/io/json.h"

#include <stdlib.h>
#include <string.h>

/* One layer as slots: expert[r * slots + i], ascending within a rank, empty ones filled. */
typedef struct slot_map {
    int32_t slots;
    int32_t *expert; /* [layers][R * slots] */
    int64_t filled;  /* slots that the placement left empty */
    double even;     /* imbalance, mean over layers, when copies share evenly */
    double planned;
} slot_map;

static const char *const format_name[] = {"", "sglang", "vllm", "tensorrt-llm", "deepspeed"};

static mz_code needed_slots(const place_result *p, place_format format, int32_t *slots,
                            mz_err *err) {
    int32_t most = 0, busiest = 0, layer = 0;
    for (int32_t l = 0; l < p->layers; l++)
        for (int32_t r = 0; r < p->ranks; r++)
            if (p->layer[l].rank_used[r] > most) {
                most = p->layer[l].rank_used[r];
                busiest = r;
                layer = p->layer[l].number;
            }
    const int32_t limit = p->slots_given ? p->slots_given : p->slots;
    *slots = limit > most ? limit : most;
    if (limit > 0 && most > limit)
        return mz_fail(err, MZ_EINPUT,
                       "--format %s: policy %s puts %d experts on rank %d in layer %d, more than "
                       "%d slots: its copies live for one call in as many slots as it likes",
                       format_name[format], p->policy, most, busiest, layer, limit);
    return MZ_OK;
}

/* The expert of most load per copy that rank r does not hold (any, when it holds all). */
static int32_t busiest_absent(const place_result *p, const place_layer *l, const int32_t *copies,
                              const bool *held) {
    int32_t best = -1;
    for (int pass = 0; pass < 2 && best < 0; pass++)
        for (int32_t e = 0; e < p->experts; e++)
            if ((pass > 0 || !held[e]) &&
                (best < 0 || l->load->total[e] * copies[best] > l->load->total[best] * copies[e]))
                best = e;
    return best;
}

static int by_id(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static double even_imbalance(const place_result *p, const place_layer *l, const int32_t *map,
                             int32_t slots, const int32_t *copies) {
    double most = 0;
    for (int32_t r = 0; r < p->ranks; r++) {
        double sum = 0;
        for (int32_t i = 0; i < slots; i++) {
            const int32_t e = map[(int64_t)r * slots + i];
            sum += (double)l->load->total[e] / copies[e];
        }
        most = sum > most ? sum : most;
    }
    return l->load->pairs > 0 ? most * p->ranks / (double)l->load->pairs : 1;
}

static void map_layer(const place_result *p, const place_layer *l, int32_t slots, int32_t *copies,
                      bool *held, int32_t *map, slot_map *all) {
    for (int32_t e = 0; e < p->experts; e++)
        copies[e] = l->begin[e + 1] - l->begin[e];
    for (int32_t r = 0; r < p->ranks; r++) {
        int32_t *rank = map + (int64_t)r * slots, used = 0;
        memset(held, 0, (size_t)p->experts * sizeof *held);
        for (int32_t e = 0; e < p->experts; e++)
            for (int32_t i = l->begin[e]; i < l->begin[e + 1]; i++)
                if (l->rank[i] == r) {
                    rank[used++] = e;
                    held[e] = true;
                }
        for (; used < slots; all->filled++) {
            const int32_t e = busiest_absent(p, l, copies, held);
            rank[used++] = e;
            held[e] = true;
            copies[e]++;
        }
        qsort(rank, (size_t)slots, sizeof *rank, by_id);
    }
    all->even += even_imbalance(p, l, map, slots, copies) / p->layers;
    all->planned += l->imbalance / p->layers;
}

static mz_code map_slots(const place_result *p, place_format format, slot_map *map, mz_err *err) {
    *map = (slot_map){0};
    mz_code code = needed_slots(p, format, &map->slots, err);
    if (code != MZ_OK)
        return code;
    const size_t row = (size_t)p->ranks * (size_t)map->slots;
    int32_t *copies = mz_calloc((size_t)p->experts, sizeof *copies);
    bool *held = mz_calloc((size_t)p->experts, sizeof *held);
    map->expert = mz_calloc((size_t)p->layers * row, sizeof *map->expert);
    if (!copies || !held || !map->expert)
        code = mz_fail_nomem(err, "the map of slots");
    for (int32_t l = 0; code == MZ_OK && l < p->layers; l++)
        map_layer(p, &p->layer[l], map->slots, copies, held, map->expert + (size_t)l * row, map);
    free(copies);
    free(held);
    return code;
}

static void tell(const place_result *p, place_format format, const slot_map *map,
                 const mz_log *log) {
    if (map->filled > 0)
        mz_info(log, "%lld of %lld slots were empty and hold further copies of busy experts",
                (long long)map->filled, (long long)p->layers * p->ranks * map->slots);
    if (map->even > map->planned * 1.01 || map->even < map->planned * 0.99)
        mz_info(log,
                "copies share evenly in %s: imbalance %.3f, mean over layers (the policy's own "
                "split: %.3f)",
                format == PLACE_SGLANG ? "SGLang"
                : format == PLACE_VLLM ? "vLLM"
                                       : "TensorRT-LLM",
                map->even, map->planned);
}

/* ---- one function per program ------------------------------------------------------------------
 */

/* Layers that were not placed keep the experts in order. */
static json_t *plain_row(const place_result *p, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer(i % p->experts));
    return list;
}

static json_t *sglang_json(const place_result *p, const slot_map *map) {
    const int64_t n = (int64_t)p->ranks * map->slots;
    json_t *rows = json_array();
    for (int32_t number = 0, l = 0; number < p->rows; number++) {
        const bool placed = l < p->layers && p->layer[l].number == number;
        json_array_append_new(rows,
                              placed ? place_int_list(map->expert + l * n, n) : plain_row(p, n));
        l += placed;
    }
    return json_pack("{s:o}", "physical_to_logical_map", rows);
}

static mz_code check_vllm(const place_result *p, const slot_map *map, mz_err *err) {
    const int64_t n = (int64_t)p->ranks * map->slots;
    for (int64_t i = 1; i < p->layers * n; i++)
        if (i % map->slots > 0 && map->expert[i] == map->expert[i - 1])
            return mz_fail(err, MZ_EINPUT,
                           "--format vllm: layer %d has expert %d twice on rank %lld, which "
                           "vLLM's file cannot say: use another policy, or fewer slots",
                           p->layer[i / n].number, map->expert[i], (long long)(i % n / map->slots));
    return MZ_OK;
}

static json_t *vllm_json(const place_result *p, const slot_map *map) {
    const int64_t n = (int64_t)p->ranks * map->slots;
    json_t *layers = json_array(), *rows = json_array();
    for (int32_t l = 0; l < p->layers; l++) {
        json_t *devices = json_array();
        for (int32_t r = 0; r < p->ranks; r++)
            json_array_append_new(
                devices, json_pack("{s:i, s:o}", "device_id", r, "device_expert",
                                   place_int_list(map->expert + l * n + (int64_t)r * map->slots,
                                                  map->slots)));
        json_array_append_new(layers, json_pack("{s:i, s:i, s:o}", "layer_id", l, "device_count",
                                                p->ranks, "device_list", devices));
        json_array_append_new(rows, place_int_list(map->expert + l * n, n));
    }
    return json_pack("{s:i, s:o, s:o}", "moe_layer_count", p->layers, "layer_list", layers,
                     "physical_to_logical_map", rows);
}

static void print_tensorrt(const place_result *p, const slot_map *map, FILE *out) {
    const int64_t n = (int64_t)p->ranks * map->slots;
    fprintf(out, "num_slots: %lld\ninitial_global_assignments:\n", (long long)n);
    for (int32_t l = 0; l < p->layers; l++) {
        fprintf(out, "  %d: [", p->layer[l].number);
        for (int64_t i = 0; i < n; i++)
            fprintf(out, "%s%d", i > 0 ? ", " : "", map->expert[l * n + i]);
        fprintf(out, "]\n");
    }
    fprintf(out, "layer_updates_per_iter: 0\n");
}

/* Does every rank host E/R experts, and no expert twice? */
static bool is_permutation(const place_result *p, const place_layer *l) {
    for (int32_t r = 0; r < p->ranks; r++)
        if (l->rank_used[r] * (int64_t)p->ranks != p->experts)
            return false;
    return l->begin[p->experts] == p->experts;
}

static json_t *deepspeed_layer(const place_result *p, const place_layer *l) {
    json_t *ranks = json_array(), *groups = json_array(), *order = json_array();
    for (int32_t r = 0; r < p->ranks; r++) {
        json_t *local = json_array();
        for (int32_t e = 0; e < p->experts; e++)
            for (int32_t i = l->begin[e]; i < l->begin[e + 1]; i++)
                if (l->rank[i] == r) {
                    json_array_append_new(local, json_integer(e));
                    json_array_append_new(order, json_integer(e));
                }
        json_array_append_new(ranks, local);
    }
    for (int32_t e = 0; e < p->experts; e++) {
        json_t *hosts = json_array();
        for (int32_t r = 0; r < p->ranks; r++)
            for (int32_t i = l->begin[e]; i < l->begin[e + 1]; i++)
                if (l->rank[i] == r) {
                    json_array_append_new(hosts, json_integer(r));
                    break;
                }
        json_array_append_new(groups, hosts);
    }
    if (!is_permutation(p, l)) {
        json_decref(order);
        order = json_null();
    }
    return json_pack("{s:i, s:o, s:o, s:o}", "layer", l->number, "local_experts", ranks,
                     "expert_order", order, "expert_data_parallel_ranks", groups);
}

static json_t *deepspeed_json(const place_result *p, const mz_log *log) {
    json_t *layers = json_array();
    bool permutation = true;
    for (int32_t l = 0; l < p->layers; l++) {
        json_array_append_new(layers, deepspeed_layer(p, &p->layer[l]));
        permutation = permutation && is_permutation(p, &p->layer[l]);
    }
    mz_info(log,
            "DeepSpeed reads no placement: rank r holds experts r*E/ep_size and following; "
            "this mapping is for the script that numbers experts or forms groups%s",
            permutation ? "" : "; with copies, or uneven ranks, it takes more than numbering");
    return json_pack("{s:i, s:i, s:o}", "ep_size", p->ranks, "num_experts", p->experts, "layers",
                     layers);
}

mz_code place_print_format(const place_result *p, place_format format, const mz_log *log, FILE *out,
                           mz_err *err) {
    slot_map map = {0};
    json_t *root = NULL;
    if (!p->lasting)
        return mz_fail(err, MZ_EINPUT,
                       "--format %s: policy %s places more copies than slots could hold: it is a "
                       "bound, not a placement",
                       format_name[format], p->policy);
    mz_code code = format == PLACE_DEEPSPEED ? MZ_OK : map_slots(p, format, &map, err);
    if (code == MZ_OK && format == PLACE_VLLM)
        code = check_vllm(p, &map, err);
    if (code == MZ_OK && format == PLACE_TENSORRT)
        print_tensorrt(p, &map, out);
    else if (code == MZ_OK)
        root = format == PLACE_SGLANG ? sglang_json(p, &map)
               : format == PLACE_VLLM ? vllm_json(p, &map)
                                      : deepspeed_json(p, log);
    if (code == MZ_OK && format != PLACE_TENSORRT)
        code = root ? mz_json_write(root, out, err) : mz_fail_nomem(err, "the placement");
    if (code == MZ_OK && format == PLACE_VLLM)
        mz_info(log, "vLLM itself reads no initial placement; its Ascend plug-in reads this file "
                     "(eplb_config.expert_map_path)");
    if (code == MZ_OK && format != PLACE_DEEPSPEED)
        tell(p, format, &map, log);
    json_decref(root);
    free(map.expert);
    return code;
}
