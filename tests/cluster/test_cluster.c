/* Profiles, specs, routes and ports of clusters. */
#include "tests/harness.h"

#include "common/io/json.h"
#include "sim/cluster/cluster.h"

#include <math.h>

static mz_cluster *load(const char *spec) {
    mz_cluster *cluster;
    mz_err err;
    if (mz_cluster_load(spec, MZ_SOURCE_DIR, &cluster, &err))
        fail_msg("%s: %s", spec, err.msg);
    return cluster;
}

static void near(double value, double expected) {
    if (fabs(value - expected) > 1e-12 * fabs(expected))
        fail_msg("%.17g is not %.17g", value, expected);
}

static int route(const mz_cluster *cluster, int32_t src, int32_t dst, int32_t *links) {
    return cluster->topology.route(cluster->topology.self, src, dst, links);
}

/* Data-sheet values, written again from the sheets. */
static void shipped_profiles(void **state) {
    static const struct {
        const char *name;
        double memory_gb, bandwidth, tflops, inside, nic;
        int sms, gpus;
    } sheet[] = {
        {"a100-80gb", 80, 2039e9, 312, 300e9, 25e9, 108, 8},
        {"gb200-nvl72", 186, 8e12, 2500, 900e9, 50e9, 148, 72},
        {"h100-80gb", 80, 3.35e12, 989.4, 450e9, 50e9, 132, 8},
        {"h200", 141, 4.8e12, 989.4, 450e9, 50e9, 132, 8},
        {"rtx4090-pcie", 24, 1008e9, 165.2, 31.5e9, 12.5e9, 128, 8},
    };
    mz_arena arena = {0};
    char **names;
    int count;
    mz_err err;
    assert_int_equal(mz_cluster_list(MZ_SOURCE_DIR, &arena, &names, &count, &err), MZ_OK);
    assert_int_equal(count, 5);
    for (int i = 0; i < count; i++) {
        char spec[64];
        assert_string_equal(names[i], sheet[i].name);
        snprintf(spec, sizeof spec, "%s:%d", names[i], 2 * sheet[i].gpus);
        mz_cluster *cluster = load(spec);
        const mz_device *device = &cluster->device;
        assert_string_equal(cluster->name, names[i]);
        near(device->memory_bytes_per_s, sheet[i].bandwidth);
        near(device->bf16_flops, sheet[i].tflops * 1e12);
        assert_int_equal(device->sms, sheet[i].sms);
        assert_int_equal(cluster->gpus_per_node, sheet[i].gpus);
        assert_int_equal(cluster->nodes, 2);
        /* What the runtime reports lies a little below what is sold, in GiB or in GB. */
        assert_true(device->memory_bytes < sheet[i].memory_gb * 1.0737418240e9 + 13e9);
        assert_true(device->memory_bytes > sheet[i].memory_gb * 0.98e9);
        const json_t *node = json_object_get(cluster->resolved, "node");
        near(json_number_value(json_object_get(node, "bandwidth")), sheet[i].inside);
        const json_t *out = json_object_get(cluster->resolved, "scale_out");
        near(json_number_value(json_object_get(out, "nic_bandwidth")), sheet[i].nic);
        assert_true(cluster->planners >= 6);
        mz_cluster_free(&cluster);
    }
    mz_arena_free(&arena);
}

/* Latency of a route, all its links together. */
static double route_latency(const mz_cluster *cluster, int32_t src, int32_t dst) {
    int32_t links[MZ_ROUTE_MAX];
    double latency = 0;
    for (int i = route(cluster, src, dst, links) - 1; i >= 0; i--)
        latency += cluster->topology.link_latency_s[links[i]];
    return latency;
}

static void one_node(void **state) {
    mz_cluster *cluster = load("a100-80gb:4");
    const mz_topology *t = &cluster->topology;
    int32_t links[MZ_ROUTE_MAX], back[MZ_ROUTE_MAX];
    assert_int_equal(t->ranks, 4);
    assert_int_equal(t->domains, 1);
    assert_int_equal(t->links, 8); /* in and out of each GPU; no NICs where nothing leaves */
    assert_int_equal(route(cluster, 2, 2, links), 0);
    assert_int_equal(route(cluster, 0, 3, links), 2);
    assert_int_equal(route(cluster, 3, 0, back), 2);
    for (int i = 0; i < 2; i++) {
        near(t->link_bytes_per_s[links[i]], 300e9 * 0.72);
        for (int j = 0; j < 2; j++)
            assert_int_not_equal(links[i], back[j]);
    }
    near(route_latency(cluster, 0, 3), 5e-6);
    near(t->inside_bytes_per_s[3], 300e9 * 0.72);
    assert_true(t->outside_bytes_per_s[3] == 0);
    assert_true(t->spine_bytes_per_s == 0);
    mz_cluster_free(&cluster);
}

/* The links of two routes that are the same. */
static int shared(const mz_cluster *cluster, int a, int b, int c, int d) {
    int32_t first[MZ_ROUTE_MAX], second[MZ_ROUTE_MAX];
    int n = route(cluster, a, b, first), m = route(cluster, c, d, second), same = 0;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < m; j++)
            same += first[i] == second[j];
    return same;
}

static void rails_and_spine(void **state) {
    mz_cluster *cluster = load("h100-80gb:32");
    int32_t links[MZ_ROUTE_MAX];
    /* Same rail, one pod: NIC out, NIC in. Another rail: up and down the spine between. */
    assert_int_equal(route(cluster, 0, 8, links), 2);
    assert_int_equal(route(cluster, 0, 9, links), 4);
    assert_int_equal(route(cluster, 1, 25, links), 2);
    near(cluster->topology.link_bytes_per_s[links[0]], 50e9 * 0.89);
    near(route_latency(cluster, 1, 25), 10e-6);
    assert_int_equal(shared(cluster, 0, 8, 0, 16), 1); /* one NIC sends both */
    assert_int_equal(shared(cluster, 0, 8, 1, 9), 0);  /* other rails, other NICs */
    assert_int_equal(shared(cluster, 0, 9, 8, 17), 2); /* the same leaf pair */
    assert_int_equal(shared(cluster, 0, 1, 0, 8), 0);  /* NVLink and NIC apart */
    near(cluster->topology.uplink_bytes_per_s[1], 8 * 50e9 * 0.89);
    mz_cluster_free(&cluster);
}

static void pcie_tree(void **state) {
    mz_cluster *cluster = load("rtx4090-pcie:16");
    const mz_topology *t = &cluster->topology;
    int32_t links[MZ_ROUTE_MAX];
    assert_true(t->inside_half_duplex);
    assert_int_equal(route(cluster, 0, 5, links), 4); /* card, bridge up, bridge down, card */
    near(t->link_bytes_per_s[links[0]], 31.5e9 * 0.8);
    near(t->link_bytes_per_s[links[1]], 100e9);
    assert_int_equal(shared(cluster, 0, 5, 5, 0), 2); /* half duplex: both card links */
    assert_int_equal(shared(cluster, 0, 1, 2, 3), 2); /* one bridge, up and down */
    assert_int_equal(shared(cluster, 0, 1, 4, 5), 0); /* the other socket */
    /* Card, bridge, NIC, NIC, bridge, card; both nodes hang on one leaf. */
    assert_int_equal(route(cluster, 0, 15, links), 6);
    assert_int_equal(shared(cluster, 0, 8, 7, 12), 2); /* the one NIC of each node */
    near(route_latency(cluster, 0, 5), 20e-6);
    near(route_latency(cluster, 0, 15), 30e-6);
    near(t->inside_bytes_per_s[0], 25e9); /* a quarter of the bridge is less than the card's link */
    near(t->outside_bytes_per_s[0], 12.5e9 * 0.89);
    near(t->uplink_bytes_per_s[0], 12.5e9 * 0.89);
    assert_true(t->spine_bytes_per_s == 0);
    mz_cluster_free(&cluster);
    cluster = load("rtx4090-pcie:512"); /* 64 nodes on two leaves, 2:1 above them */
    near(cluster->topology.spine_bytes_per_s, 64 * 12.5e9 * 0.89 / 2);
    assert_int_equal(route(cluster, 0, 511, links), 8);
    near(cluster->topology.link_bytes_per_s[links[3]], 32 * 12.5e9 * 0.89 / 2);
    mz_cluster_free(&cluster);
}

static void rack_scale(void **state) {
    mz_cluster *cluster = load("gb200-nvl72:144");
    int32_t links[MZ_ROUTE_MAX];
    assert_int_equal(cluster->topology.domains, 2);
    assert_int_equal(route(cluster, 0, 71, links), 2);
    near(cluster->topology.link_bytes_per_s[links[0]], 900e9 * 0.78);
    assert_int_equal(route(cluster, 5, 77, links), 2);
    assert_int_equal(route(cluster, 5, 78, links), 4);
    mz_cluster_free(&cluster);
}

static void ranks_on_one_device(void **state) {
    mz_cluster *cluster = load("h200:1x8");
    int32_t links[MZ_ROUTE_MAX];
    assert_int_equal(cluster->gpus, 1);
    assert_int_equal(cluster->ranks, 8);
    assert_int_equal(cluster->ranks_per_device, 8);
    for (int32_t a = 0; a < 8; a++) {
        assert_int_equal(cluster->topology.device[a], 0);
        assert_int_equal(cluster->topology.domain[a], 0);
        for (int32_t b = 0; b < 8; b++)
            assert_int_equal(route(cluster, a, b, links), 0);
    }
    mz_cluster_free(&cluster);
    cluster = load("h200:2x4");
    assert_int_equal(route(cluster, 3, 4, links), 2);
    assert_int_equal(shared(cluster, 0, 4, 1, 5), 2); /* ranks of a device share its links */
    mz_cluster_free(&cluster);
    cluster = load("h200:16x2");
    assert_int_equal(cluster->topology.domain[15], 0);
    assert_int_equal(cluster->topology.domain[16], 1);
    mz_cluster_free(&cluster);
}

/* Routes of a large cluster stay within the link list, and memory within a few hundred bytes a
 * rank. */
static void ten_thousand_gpus(void **state) {
    mz_cluster *cluster = load("h100-80gb:10240");
    const mz_topology *t = &cluster->topology;
    assert_int_equal(t->ranks, 10240);
    assert_true(t->links < 5 * 10240);
    assert_true(cluster->arena.total < (size_t)10240 * 300);
    for (int32_t src = 0; src < 10240; src += 331)
        for (int32_t dst = 0; dst < 10240; dst += 17) {
            int32_t links[MZ_ROUTE_MAX];
            int n = route(cluster, src, dst, links);
            assert_true(n <= MZ_ROUTE_MAX && (n > 0) == (src != dst));
            for (int i = 0; i < n; i++) {
                assert_true(links[i] >= 0 && links[i] < t->links);
                assert_true(t->link_bytes_per_s[links[i]] > 0);
            }
            if (n)
                near(route_latency(cluster, src, dst),
                     src / 8 == dst / 8 ? t->inside_latency_s : t->outside_latency_s);
        }
    mz_cluster_free(&cluster);
}

/* Every rank sends `bytes` to every other: finish time of rank 0 under both networks. */
static void all_to_all(const mz_cluster *cluster, double bytes, double *port, double *flow) {
    const mz_topology *t = &cluster->topology;
    int32_t n = t->ranks;
    int64_t count = 0;
    mz_message *message = calloc((size_t)n * (size_t)n, sizeof *message);
    int32_t *rank = calloc((size_t)n, sizeof *rank);
    double *sums = calloc((size_t)n * 5, sizeof *sums);
    mz_err err;
    assert_true(message && rank && sums);
    for (int32_t src = 0; src < n; src++) {
        rank[src] = src;
        for (int32_t dst = 0; dst < n; dst++)
            if (src != dst)
                message[count++] = (mz_message){src, dst, bytes};
    }
    mz_exchange exchange = {
        .members = n, .rank = rank, .messages = count, .message = message, .rounds = 1};
    mz_exchange_aggregate(t, &exchange, sums, sums + n, sums + 2 * n, sums + 3 * n);
    double *finish = sums + 4 * n;
    assert_ok(mz_port_time(t, &exchange, finish, &err), &err);
    *port = finish[0];
    assert_ok(mz_flow_time(t, &exchange, 0, finish, &err), &err);
    *flow = finish[0];
    free(message);
    free(rank);
    free(sums);
}

/* Each GPU of a node sends 7 x 100 MB at 0.78 x 450 GB/s. On two nodes its NIC sends 8 x 100 MB at
 * 0.89 x 50 GB/s, more than its share of anything else. Cards on
 * PCIe move 14 x 10 MB each over one link: 25.2 GB/s, or a quarter of the bridge for `port`. */
static void exchanges_on_clusters(void **state) {
    double port, flow;
    mz_cluster *cluster = load("h100-80gb:8");
    all_to_all(cluster, 1e8, &port, &flow);
    near(port, 7e8 / (0.78 * 450e9) + 5e-6);
    near(flow, port);
    mz_cluster_free(&cluster);
    cluster = load("h100-80gb:16");
    all_to_all(cluster, 1e8, &port, &flow);
    near(port, 8e8 / (0.89 * 50e9) + 10e-6);
    near(flow, port);
    mz_cluster_free(&cluster);
    cluster = load("rtx4090-pcie:8");
    all_to_all(cluster, 1e7, &port, &flow);
    near(port, 14e7 / 25e9 + 20e-6);
    near(flow, 14e7 / (0.8 * 31.5e9) + 20e-6);
    mz_cluster_free(&cluster);
}

static void bad_spec(const char *spec, const char *word, const char *other) {
    mz_cluster *cluster;
    mz_err err = {0};
    assert_int_equal(mz_cluster_load(spec, MZ_SOURCE_DIR, &cluster, &err), MZ_EINPUT);
    assert_null(cluster);
    if (!strstr(err.msg, word) || !strstr(err.msg, other) || strchr(err.msg, '\n'))
        fail_msg("%s: message lacks \"%s\" or \"%s\": %s", spec, word, other, err.msg);
}

static void bad_specs(void **state) {
    bad_spec("h100-80gb", "how many", "h100-80gb:64");
    bad_spec("h100-80gb:", "how many", "h100-80gb");
    bad_spec("h100-80gb:0", "GPUs", "0");
    bad_spec("h100-80gb:12", "whole nodes of 8", "use 8 or 16");
    bad_spec("h100-80gb:many", "GPUs", "many");
    bad_spec("h100-80gb:8x0", "ranks", "0");
    bad_spec("h100:8", "h100-80gb", "cluster profile");
    bad_spec("./none.json:8", "none.json", "cannot read");
}

/* Writes the A100 profile after `change`, loads it, and checks the message. */
static void refused(void (*change)(json_t *), const char *word, const char *other) {
    json_t *root;
    mz_err err = {0};
    char folder[256], path[300], spec[320];
    assert_ok(mz_json_load(MZ_SOURCE_DIR "/sim/cluster/profiles/a100-80gb.json", &root, &err),
              &err);
    change(root);
    make_directory(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/wrong.json", folder);
    assert_int_equal(json_dump_file(root, path, 0), 0);
    json_decref(root);
    snprintf(spec, sizeof spec, "%s:16", path);
    mz_cluster *cluster;
    assert_fails(mz_cluster_load(spec, MZ_SOURCE_DIR, &cluster, &err), MZ_EINPUT, word, &err);
    remove_directory(folder);
    assert_null(cluster);
    if (!strstr(err.msg, other) || !strstr(err.msg, "wrong.json"))
        fail_msg("message lacks \"%s\" or the file: %s", other, err.msg);
}

static json_t *field(json_t *root, const char *section, const char *key) {
    return json_object_get(json_object_get(root, section), key);
}

static void misspell(json_t *root) {
    json_t *device = json_object_get(root, "device");
    json_object_set(device, "memory_bandwith", json_object_get(device, "memory_bandwidth"));
    json_object_del(device, "memory_bandwidth");
}
static void drop_field(json_t *root) {
    json_object_del(json_object_get(root, "device"), "sms");
}
static void drop_section(json_t *root) {
    json_object_del(root, "scale_out");
}
static void drop_source(json_t *root) {
    json_object_del(field(root, "node", "latency"), "source");
}
static void wrong_unit(json_t *root) {
    json_object_set_new(field(root, "device", "bf16"), "value", json_string("312 GB/s"));
}
static void too_efficient(json_t *root) {
    json_object_set_new(field(root, "device", "gemm_efficiency"), "value", json_real(1.5));
}
static void broken_count(json_t *root) {
    json_object_set_new(field(root, "device", "sms"), "value", json_real(107.5));
}
static void not_a_switch(json_t *root) {
    json_object_set_new(field(root, "scale_out", "rails"), "value", json_integer(1));
}
static void no_nics(json_t *root) {
    json_object_set_new(field(root, "scale_out", "nics"), "value", json_integer(0));
}
static void odd_nics(json_t *root) {
    json_object_set_new(field(root, "scale_out", "nics"), "value", json_integer(3));
}
static void quick_bridge(json_t *root) {
    json_object_set_new(field(root, "node", "gpus_per_bridge"), "value", json_integer(4));
    json_object_set_new(field(root, "node", "bridge_bandwidth"), "value", json_string("1 GB/s"));
    json_object_set_new(field(root, "node", "latency"), "value", json_string("1 ms"));
}
static void bridge_of_three(json_t *root) {
    json_object_set_new(field(root, "node", "gpus_per_bridge"), "value", json_integer(3));
}
static void bad_planner(json_t *root) {
    json_object_del(field(root, "planner", "symi"), "fixed");
}
static void endless_planner(json_t *root) {
    json_object_set_new(field(root, "planner", "symi"), "fixed", json_real(1e300));
}
static void extra_key(json_t *root) {
    json_object_set_new(root, "planers", json_object());
}

static void bad_profiles(void **state) {
    refused(misspell, "memory_bandwith", "memory_bandwidth");
    refused(drop_field, "device", "sms");
    refused(drop_section, "scale_out", "missing");
    refused(drop_source, "node.latency", "source");
    refused(wrong_unit, "device.bf16", "312 GB/s");
    refused(too_efficient, "device.gemm_efficiency", "1.5");
    refused(broken_count, "device.sms", "whole number");
    refused(not_a_switch, "scale_out.rails", "true or false");
    refused(no_nics, "nics", "one node");
    refused(odd_nics, "nics", "divide");
    refused(quick_bridge, "scale_out.latency", "node.latency");
    refused(bridge_of_three, "gpus_per_bridge", "divide");
    refused(bad_planner, "planner.symi", "fixed");
    refused(endless_planner, "planner.symi", "1e+300 s");
    refused(extra_key, "planers", "planner");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shipped_profiles),  cmocka_unit_test(one_node),
        cmocka_unit_test(rails_and_spine),   cmocka_unit_test(pcie_tree),
        cmocka_unit_test(rack_scale),        cmocka_unit_test(ranks_on_one_device),
        cmocka_unit_test(ten_thousand_gpus), cmocka_unit_test(exchanges_on_clusters),
        cmocka_unit_test(bad_specs),         cmocka_unit_test(bad_profiles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
