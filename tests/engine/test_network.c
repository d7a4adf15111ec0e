/* Ports by closed form; the flow network against the ports on random all-to-alls. */
#include "tests/engine/pod.h"
#include "tests/harness.h"

#include <math.h>

static mz_err err;

static void assert_time(double got, double want) {
    if (!(fabs(got - want) <= 1e-12 * fabs(want))) {
        fail_msg("time %.15g, want %.15g", got, want);
    }
}

/* Replaces the pod's exchange by `count` messages among all its ranks. */
static void set_messages(pod *p, const mz_message *message, int count) {
    memcpy(p->message, message, (size_t)count * sizeof *message);
    p->exchange.messages = count;
    p->exchange.send_inside = NULL;
}

static void port_time(const pod *p, double *finish) {
    assert_ok(mz_port_time(&p->topology, &p->exchange, finish, &err), &err);
}

static void flow_time(const pod *p, double *finish) {
    assert_ok(mz_flow_time(&p->topology, &p->exchange, 0, finish, &err), &err);
}

/* One message: bytes / bandwidth + the latencies of its links, on both networks. */
static void test_one_message(void **state) {
    (void)state;
    pod *p = pod_make(2, 2, 400e9, 50e9, 1e12, 1e-6);
    const mz_message inside[] = {{0, 1, 8e6}}, outside[] = {{0, 3, 8e6}};
    double finish[4];
    for (int network = 0; network < 2; network++) {
        set_messages(p, inside, 1);
        (network == 0 ? port_time : flow_time)(p, finish);
        assert_time(finish[0], 8e6 / 400e9 + 2e-6);
        assert_time(finish[1], 8e6 / 400e9 + 2e-6);
        assert_true(finish[2] == 0 && finish[3] == 0);
        set_messages(p, outside, 1);
        (network == 0 ? port_time : flow_time)(p, finish);
        assert_time(finish[0], 8e6 / 50e9 + 5e-6);
        assert_time(finish[3], 8e6 / 50e9 + 5e-6);
    }
    pod_free(p);
}

/* An all-to-all in one node whose bottleneck is known: everybody sends 1 MB to everybody, rank 2
 * receives 5 MB from each: its port takes 3 * 5 MB, the others 1 + 1 + 1 in, 1 + 1 + 5 out. */
static void test_known_bottleneck(void **state) {
    (void)state;
    pod *p = pod_make(1, 4, 100e9, 50e9, 1e12, 1e-6);
    mz_message message[12];
    int count = 0;
    for (int s = 0; s < 4; s++) {
        for (int d = 0; d < 4; d++) {
            if (s != d) {
                message[count++] = (mz_message){s, d, d == 2 ? 5e6 : 1e6};
            }
        }
    }
    set_messages(p, message, count);
    double port[4], flow[4];
    port_time(p, port);
    flow_time(p, flow);
    assert_time(port[2], 15e6 / 100e9 + 2e-6);
    assert_time(port[0], 7e6 / 100e9 + 2e-6);
    for (int m = 0; m < 4; m++) {
        /* rank 2's port is busy from the first to the last byte, and everybody sends to it */
        assert_time(flow[m], 15e6 / 100e9 + 2e-6);
    }
    pod_free(p);
}

/* n messages that end on one port, all equal: each takes n times as long. */
static void test_sharing(void **state) {
    (void)state;
    pod *p = pod_make(1, 8, 100e9, 50e9, 1e12, 0);
    mz_message message[7];
    for (int s = 1; s < 8; s++) {
        message[s - 1] = (mz_message){s, 0, 1e6};
    }
    double port[8], flow[8];
    set_messages(p, message, 7);
    port_time(p, port);
    flow_time(p, flow);
    for (int m = 0; m < 8; m++) {
        assert_time(flow[m], 7e6 / 100e9);
        assert_time(port[m], (m == 0 ? 7e6 : 1e6) / 100e9);
    }
    pod_free(p);
}

static void test_uplink_spine_duplex(void **state) {
    (void)state;
    pod *p = pod_make(2, 2, 100e9, 50e9, 80e9, 0);
    const mz_message out[] = {{0, 2, 10e6}, {1, 3, 20e6}, {2, 0, 5e6}};
    double finish[4];
    set_messages(p, out, 3);
    p->topology.spine_bytes_per_s = 0;
    port_time(p, finish);
    assert_time(finish[0], 10e6 / 50e9);
    assert_time(finish[1], 20e6 / 50e9);
    p->uplink[0] = p->uplink[1] = 60e9; /* 30 MB leave node 0 */
    port_time(p, finish);
    for (int m = 0; m < 4; m++) {
        assert_time(finish[m], 30e6 / 60e9);
    }
    p->topology.spine_bytes_per_s = 50e9; /* 35 MB cross it */
    port_time(p, finish);
    assert_time(finish[3], 35e6 / 50e9);
    const mz_message inside[] = {{0, 1, 10e6}, {1, 0, 4e6}};
    set_messages(p, inside, 2);
    port_time(p, finish);
    assert_time(finish[0], 10e6 / 100e9);
    p->topology.inside_half_duplex = true;
    port_time(p, finish);
    assert_time(finish[0], 14e6 / 100e9);
    pod_free(p);
}

/* Ranks of one device exchange for nothing and share the device's port towards others. */
static void test_shared_device(void **state) {
    (void)state;
    pod *p = pod_make(1, 4, 100e9, 50e9, 1e12, 1e-6);
    p->device[1] = 0;
    const mz_message message[] = {{0, 1, 9e6}, {0, 2, 1e6}, {1, 3, 2e6}};
    double finish[4];
    set_messages(p, message, 3);
    port_time(p, finish);
    assert_time(fmax(finish[0], finish[1]), 3e6 / 100e9 + 2e-6);
    set_messages(p, message, 1);
    port_time(p, finish);
    assert_true(finish[0] == 0 && finish[1] == 0);
    flow_time(p, finish);
    assert_true(finish[0] == 0 && finish[1] == 0);
    pod_free(p);
}

static double largest(const double *finish, int32_t n) {
    double last = 0;
    for (int32_t m = 0; m < n; m++) {
        last = fmax(last, finish[m]);
    }
    return last;
}

/* Longest of the messages' bounds: the sum over its links of (bytes on the link / bandwidth), since
 * a max-min fair flow has a saturated link at every moment, plus its latencies. */
static double upper_bound(const pod *p) {
    const mz_topology *t = &p->topology;
    double *busy = calloc((size_t)t->links, sizeof *busy), bound = 0;
    int32_t links[MZ_ROUTE_MAX];
    for (int64_t i = 0; i < p->exchange.messages; i++) {
        const mz_message *m = &p->exchange.message[i];
        int count = t->route(t->self, m->src, m->dst, links);
        for (int k = 0; k < count; k++) {
            busy[links[k]] += m->bytes / t->link_bytes_per_s[links[k]];
        }
    }
    for (int64_t i = 0; i < p->exchange.messages; i++) {
        const mz_message *m = &p->exchange.message[i];
        int count = t->route(t->self, m->src, m->dst, links);
        double sum = 0;
        for (int k = 0; k < count; k++) {
            sum += busy[links[k]] + t->link_latency_s[links[k]];
        }
        bound = fmax(bound, sum);
    }
    free(busy);
    return bound;
}

static void test_flow_against_port(void **state) {
    (void)state;
    double worst = 1;
    for (int c = 0; c < 60; c++) {
        mz_rng rng = mz_rng_make(17, (uint64_t)c);
        int32_t nodes = 1 + (int32_t)mz_rng_below(&rng, 5);
        double latency = c % 2 == 0 ? 0 : 1e-6;
        double spine = 50e9 * 4 * nodes / (1 + (double)mz_rng_below(&rng, 4));
        pod *p = pod_make(nodes, 4, 400e9, 50e9, spine, latency);
        int32_t n = p->topology.ranks;
        double port[20], flow[20], sent[2] = {0}, received[2] = {0};
        pod_draw(p, (uint64_t)c, 1e6, mz_rng_uniform(&rng), mz_rng_uniform(&rng), c % 3 ? 0 : 8192);
        for (int32_t m = 0; m < n; m++) {
            sent[0] += p->exchange.send_inside[m];
            received[0] += p->exchange.recv_inside[m];
            sent[1] += p->exchange.send_outside[m];
            received[1] += p->exchange.recv_outside[m];
        }
        for (int k = 0; k < 2; k++) {
            assert_true(fabs(sent[k] - received[k]) <= 1e-12 * sent[k]);
        }
        port_time(p, port);
        flow_time(p, flow);
        double last_port = largest(port, n), last_flow = largest(flow, n);
        assert_true(last_flow >= last_port * (1 - 1e-12));
        assert_true(last_flow <= upper_bound(p) * (1 + 1e-12));
        worst = fmax(worst, last_flow / last_port);
        pod_free(p);
    }
    print_message("flow / port on 60 random all-to-alls: at most %.4f\n", worst);
    assert_true(worst < 1.5);
}

static void test_refuses(void **state) {
    (void)state;
    pod *p = pod_make(1, 4, 100e9, 0, 1e12, 1e-6);
    double finish[4], bytes[4] = {0, 0, 1, 0}, none[4] = {0}, bad[4] = {0, NAN, 0, 0};
    const mz_message unsorted[] = {{1, 0, 1}, {0, 1, 1}}, stranger[] = {{0, 7, 1}},
                     negative[] = {{0, 1, -1}};
    set_messages(p, unsorted, 2);
    assert_fails(mz_port_time(&p->topology, &p->exchange, finish, &err), MZ_EINPUT, "message 1",
                 &err);
    set_messages(p, stranger, 1);
    assert_fails(mz_port_time(&p->topology, &p->exchange, finish, &err), MZ_EINPUT, "0 to 7", &err);
    set_messages(p, negative, 1);
    assert_fails(mz_port_time(&p->topology, &p->exchange, finish, &err), MZ_EINPUT, "-1 bytes",
                 &err);
    mz_exchange given = {.members = 4,
                         .rank = p->rank,
                         .send_inside = none,
                         .recv_inside = none,
                         .send_outside = bytes,
                         .recv_outside = none,
                         .rounds = 1};
    assert_fails(mz_port_time(&p->topology, &given, finish, &err), MZ_EINPUT, "rank 2", &err);
    given.send_outside = none;
    given.recv_inside = bad;
    assert_fails(mz_port_time(&p->topology, &given, finish, &err), MZ_EINPUT, "rank 1", &err);
    given.recv_inside = none;
    p->rank[2] = 1;
    assert_fails(mz_port_time(&p->topology, &given, finish, &err), MZ_EINPUT, "ascend", &err);
    pod_free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_message),   cmocka_unit_test(test_known_bottleneck),
        cmocka_unit_test(test_sharing),       cmocka_unit_test(test_uplink_spine_duplex),
        cmocka_unit_test(test_shared_device), cmocka_unit_test(test_flow_against_port),
        cmocka_unit_test(test_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
