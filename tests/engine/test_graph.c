/* Task graphs: chains added up by hand, a reference by relaxation, what cannot finish. */
#include "tests/engine/pod.h"
#include "tests/harness.h"

#include "sim/engine/graph.h"

#include <math.h>

#define US 1e-6

static mz_err err;

static mz_graph *make(int32_t hosts, const mz_topology *topology, mz_network_model network) {
    mz_graph *graph;
    assert_ok(mz_graph_create(hosts, topology, network, 0, 0, &graph, &err), &err);
    return graph;
}

static mz_queue queue_of(mz_graph *graph, int32_t host) {
    mz_queue queue;
    assert_ok(mz_graph_queue(graph, host, &queue, &err), &err);
    return queue;
}

static mz_task kernel(mz_graph *graph, mz_queue queue, double seconds, double launch) {
    mz_task task;
    assert_ok(mz_graph_task(graph, queue, seconds, launch, 0, &task, &err), &err);
    return task;
}

static mz_task join(mz_graph *graph, mz_queue queue, int32_t exchange, int32_t member,
                    double launch) {
    mz_task task;
    assert_ok(mz_graph_join(graph, queue, exchange, member, launch, 0, &task, &err), &err);
    return task;
}

static void wait_for(mz_graph *graph, mz_task task, mz_task dep) {
    assert_ok(mz_graph_wait(graph, task, dep, &err), &err);
}

static int32_t exchange(mz_graph *graph, const mz_exchange *what) {
    int32_t id;
    assert_ok(mz_graph_exchange(graph, what, &id, &err), &err);
    return id;
}

static mz_graph_result run(mz_graph *graph) {
    mz_graph_result result;
    assert_ok(mz_graph_run(graph, &result, &err), &err);
    return result;
}

static void assert_time(double got, double want) {
    if (!(fabs(got - want) <= 1e-12 * fmax(fabs(want), 1e-6))) {
        fail_msg("time %.15g, want %.15g", got, want);
    }
}

/* 2 us kernels, 5 us launches: kernel i starts when its launch is over, the device idles between.
 */
static void test_launch_bound(void **state) {
    (void)state;
    mz_graph *graph = make(1, NULL, MZ_NETWORK_PORT);
    mz_queue queue = queue_of(graph, 0);
    for (int i = 0; i < 10; i++) {
        kernel(graph, queue, 2 * US, 5 * US);
    }
    mz_graph_result result = run(graph);
    for (int i = 0; i < 10; i++) {
        assert_time(result.start_s[i], (i + 1) * 5 * US);
        assert_time(result.finish_s[i], (i + 1) * 5 * US + 2 * US);
    }
    assert_time(result.end_s, 52 * US);
    assert_int_equal(result.events, 10);
    mz_graph_free(&graph);
}

/* 20 us kernels, 5 us launches: only the first launch shows. */
static void test_device_bound(void **state) {
    (void)state;
    mz_graph *graph = make(1, NULL, MZ_NETWORK_PORT);
    mz_queue queue = queue_of(graph, 0);
    for (int i = 0; i < 10; i++) {
        kernel(graph, queue, 20 * US, 5 * US);
    }
    assert_time(run(graph).end_s, (5 + 10 * 20) * US);
    mz_graph_free(&graph);
}

/* a2 waits for b1 and keeps a3, which could run, behind it: streams are first-in first-out.
 * issue: a1 1, a2 2, a3 3, b1 4, b2 5; a1 1-11, b1 4-34, b2 34-39, a2 34-35, a3 35-42 */
static void test_fifo(void **state) {
    (void)state;
    mz_graph *graph = make(1, NULL, MZ_NETWORK_PORT);
    mz_queue a = queue_of(graph, 0), b = queue_of(graph, 0);
    mz_task a1 = kernel(graph, a, 10 * US, US), a2 = kernel(graph, a, US, US),
            a3 = kernel(graph, a, 7 * US, US), b1 = kernel(graph, b, 30 * US, US),
            b2 = kernel(graph, b, 5 * US, US);
    wait_for(graph, a2, b1);
    mz_graph_result result = run(graph);
    assert_time(result.finish_s[a1], 11 * US);
    assert_time(result.finish_s[b1], 34 * US);
    assert_time(result.start_s[b2], 34 * US);
    assert_time(result.start_s[a2], 34 * US);
    assert_time(result.start_s[a3], 35 * US);
    assert_time(result.end_s, 42 * US);
    mz_graph_free(&graph);
}

/* issue k1 at 5, runs 5-105; the host waits, plans 105-145, issues k2 at 150: 150-160. Another host
 * goes its own way and waits for the planning. */
static void test_sync(void **state) {
    (void)state;
    mz_graph *graph = make(2, NULL, MZ_NETWORK_PORT);
    mz_queue mine = queue_of(graph, 0), other = queue_of(graph, 1);
    mz_task k1 = kernel(graph, mine, 100 * US, 5 * US);
    assert_ok(mz_graph_sync(graph, 0, k1, 40 * US, 77, &err), &err);
    mz_task plan = (mz_task)mz_graph_tasks(graph) - 1;
    mz_task k2 = kernel(graph, mine, 10 * US, 5 * US);
    assert_ok(mz_graph_sync(graph, 1, -1, 3 * US, 0, &err), &err);
    mz_task k3 = kernel(graph, other, 1 * US, 5 * US);
    mz_task k4 = kernel(graph, other, 1 * US, 5 * US);
    wait_for(graph, k4, plan);
    mz_graph_result result = run(graph);
    assert_time(result.start_s[plan], 105 * US);
    assert_time(result.finish_s[plan], 145 * US);
    assert_int_equal(mz_graph_tag(graph, plan), 77);
    assert_int_equal(mz_graph_host_of(graph, plan), 0);
    assert_int_equal(mz_graph_host_of(graph, k3), 1);
    assert_time(result.start_s[k2], 150 * US);
    assert_time(result.start_s[k3], 8 * US);
    assert_time(result.start_s[k4], 145 * US);
    assert_time(result.end_s, 160 * US);
    mz_graph_free(&graph);
}

static mz_exchange two_ways(const int32_t *rank, const mz_message *message) {
    return (mz_exchange){
        .members = 2, .rank = rank, .messages = 2, .message = message, .rounds = 1};
}

/* Both networks: the collective waits for the last member, and its queue with it. 450 GB/s, two
 * links of 1 us; 450 kB take 1 us, 900 kB 2 us; members enter at 10 and 50 us. */
static void test_last_member(void **state) {
    (void)state;
    pod *p = pod_make(1, 2, 450e9, 50e9, 1e12, US);
    int32_t rank[] = {0, 1};
    mz_message message[] = {{0, 1, 450e3}, {1, 0, 900e3}};
    mz_exchange what = two_ways(rank, message);
    for (int network = 0; network < 2; network++) {
        mz_graph *graph = make(2, &p->topology, (mz_network_model)network);
        mz_queue compute[2], link[2];
        mz_task enter[2], behind[2];
        int32_t id = exchange(graph, &what);
        for (int32_t r = 0; r < 2; r++) {
            compute[r] = queue_of(graph, r);
            link[r] = queue_of(graph, r);
            mz_task before = kernel(graph, compute[r], r == 0 ? 10 * US : 50 * US, 0);
            enter[r] = join(graph, link[r], id, r, 0);
            wait_for(graph, enter[r], before);
            behind[r] = kernel(graph, link[r], US, 0);
        }
        mz_graph_result result = run(graph);
        assert_time(result.start_s[enter[0]], 10 * US);
        assert_time(result.start_s[enter[1]], 50 * US);
        /* each sends one message and receives the other: both leave with the longer */
        assert_time(result.finish_s[enter[0]], (50 + 2 + 2) * US);
        assert_time(result.finish_s[enter[1]], (50 + 2 + 2) * US);
        assert_time(result.start_s[behind[0]], 54 * US);
        mz_graph_free(&graph);
    }
    pod_free(p);
}

/* flow, one round: 0 and 1 talk as soon as both are there, 2 comes later and holds up only its own
 * partner 1. With more rounds all wait for the last, and 1 receives two messages at once. port: all
 * start with the last, and each leaves when its own ports are through. */
static void test_pairs_of_ends(void **state) {
    (void)state;
    pod *p = pod_make(1, 3, 450e9, 50e9, 1e12, 0);
    int32_t rank[] = {0, 1, 2};
    mz_message message[] = {{0, 1, 450e3}, {2, 1, 450e3}};
    const double want[3][3] = {{3, 101, 101}, {102, 102, 102}, {101, 102, 101}};
    for (int c = 0; c < 3; c++) { /* flow with one round, with two, port */
        mz_exchange what = {.members = 3, .rank = rank, .messages = 2, .message = message};
        what.rounds = c == 1 ? 2 : 1;
        mz_graph *graph = make(3, &p->topology, c == 2 ? MZ_NETWORK_PORT : MZ_NETWORK_FLOW);
        int32_t id = exchange(graph, &what);
        mz_task enter[3];
        for (int32_t r = 0; r < 3; r++) {
            double entry[] = {1, 2, 100};
            mz_task before = kernel(graph, queue_of(graph, r), entry[r] * US, 0);
            enter[r] = join(graph, queue_of(graph, r), id, r, 0);
            wait_for(graph, enter[r], before);
        }
        mz_graph_result result = run(graph);
        for (int r = 0; r < 3; r++) {
            assert_time(result.finish_s[enter[r]], want[c][r] * US);
        }
        mz_graph_free(&graph);
    }
    pod_free(p);
}

/* Two exchanges at once: over the same ports they queue up on the port network and share on the
 * flow network; over different ports they do not meet. Each alone takes 1 us. */
static void test_two_exchanges(void **state) {
    (void)state;
    pod *p = pod_make(1, 4, 450e9, 50e9, 1e12, 0);
    int32_t rank[2][2] = {{0, 1}, {2, 3}};
    mz_message message[2][1] = {{{0, 1, 450e3}}, {{2, 3, 450e3}}};
    for (int c = 0; c < 4; c++) {
        bool same = c % 2 == 0;
        mz_network_model network = c < 2 ? MZ_NETWORK_PORT : MZ_NETWORK_FLOW;
        mz_graph *graph = make(4, &p->topology, network);
        mz_task last[2][2];
        for (int e = 0; e < 2; e++) {
            int which = same ? 0 : e;
            mz_exchange what = {.members = 2,
                                .rank = rank[which],
                                .messages = 1,
                                .message = message[which],
                                .rounds = 1};
            int32_t id = exchange(graph, &what);
            for (int m = 0; m < 2; m++) {
                last[e][m] = join(graph, queue_of(graph, rank[which][m]), id, m, 0);
            }
        }
        mz_graph_result result = run(graph);
        double first = same && network == MZ_NETWORK_FLOW ? 2 : 1, second = same ? 2 : 1;
        for (int m = 0; m < 2; m++) {
            assert_time(result.finish_s[last[0][m]], first * US);
            assert_time(result.finish_s[last[1][m]], second * US);
        }
        mz_graph_free(&graph);
    }
    pod_free(p);
}

enum { R_HOSTS = 4, R_QUEUES = 8, R_TASKS = 300 };

typedef struct plan {
    int kind[R_TASKS], queue[R_TASKS], after[R_TASKS], waits[R_TASKS], dep[R_TASKS][3];
    int exchange[R_TASKS], tasks;
    double seconds[R_TASKS], launch[R_TASKS];
} plan;

/* Random program: kernels, syncs and barriers (exchanges of four ranks that move nothing). */
static void draw(plan *p, mz_rng *rng) {
    int exchanges = 0;
    for (p->tasks = 0; p->tasks + R_HOSTS < R_TASKS;) {
        int i = p->tasks;
        int what = (int)mz_rng_below(rng, 10);
        int members = what == 0 ? R_HOSTS : 1;
        for (int m = 0; m < members; m++, i++, p->tasks++) {
            p->kind[i] = what < 2 ? what : 2; /* 0 barrier, 1 sync, 2 kernel */
            p->queue[i] = what == 0 ? 2 * m : (int)mz_rng_below(rng, R_QUEUES);
            p->exchange[i] = exchanges;
            p->seconds[i] = mz_rng_below(rng, 5) == 0 ? 0 : mz_rng_uniform(rng);
            p->launch[i] = what == 1 || mz_rng_below(rng, 2) == 0 ? 0 : 0.3 * mz_rng_uniform(rng);
            p->after[i] = i == 0 ? -1 : (int)mz_rng_below(rng, (uint64_t)p->tasks + 1) - 1;
            p->waits[i] = what == 1 ? 0 : (int)mz_rng_below(rng, 3);
            for (int k = 0; k < p->waits[i]; k++) {
                /* members of one barrier must not wait for one another */
                int earlier = p->tasks - (what == 0 ? m : 0);
                if (earlier == 0) {
                    p->waits[i] = 0;
                    break;
                }
                p->dep[i][k] = (int)mz_rng_below(rng, (uint64_t)earlier);
            }
        }
        exchanges += what == 0;
    }
}

/* Starts and finishes by relaxation to a fixed point, straight from the rules in graph.h. */
static void relax(const plan *p, double *start, double *finish) {
    bool changed = true;
    memset(start, 0, R_TASKS * sizeof *start);
    memset(finish, 0, R_TASKS * sizeof *finish);
    while (changed) {
        double host[R_HOSTS] = {0}, queue[R_QUEUES] = {0};
        changed = false;
        for (int i = 0; i < p->tasks; i++) {
            int h = p->queue[i] / 2, q = p->queue[i];
            host[h] += p->launch[i];
            double begin = host[h];
            if (p->kind[i] == 1) {
                begin = fmax(begin, p->after[i] < 0 ? 0 : finish[p->after[i]]);
            } else {
                begin = fmax(begin, queue[q]);
                for (int k = 0; k < p->waits[i]; k++) {
                    begin = fmax(begin, finish[p->dep[i][k]]);
                }
            }
            double end = begin + p->seconds[i];
            if (p->kind[i] == 0) {
                end = begin;
                for (int j = 0; j < p->tasks; j++) {
                    bool peer = p->kind[j] == 0 && p->exchange[j] == p->exchange[i];
                    end = peer ? fmax(end, start[j]) : end;
                }
            }
            changed |= begin != start[i] || end != finish[i];
            start[i] = begin;
            finish[i] = end;
            if (p->kind[i] == 1) {
                host[h] = end;
            } else {
                queue[q] = end;
            }
        }
    }
}

static void build(mz_graph *graph, const plan *p, const mz_queue *queues) {
    static const int32_t rank[] = {0, 1, 2, 3};
    mz_exchange barrier = {.members = R_HOSTS, .rank = rank, .rounds = 1};
    int32_t id = -1;
    int member = 0;
    for (int i = 0; i < p->tasks; i++) {
        mz_task task = i;
        if (p->kind[i] == 1) {
            assert_ok(mz_graph_sync(graph, p->queue[i] / 2, p->after[i], p->seconds[i], (uint32_t)i,
                                    &err),
                      &err);
            continue;
        }
        if (p->kind[i] == 0) {
            if (i == 0 || p->kind[i - 1] != 0 || p->exchange[i - 1] != p->exchange[i]) {
                id = exchange(graph, &barrier);
                member = 0;
            }
            task = join(graph, queues[p->queue[i]], id, member++, p->launch[i]);
        } else {
            task = kernel(graph, queues[p->queue[i]], p->seconds[i], p->launch[i]);
        }
        assert_int_equal(task, i);
        for (int k = 0; k < p->waits[i]; k++) {
            wait_for(graph, task, p->dep[i][k]);
        }
    }
}

static void test_random_graphs(void **state) {
    (void)state;
    static plan p;
    static double start[R_TASKS], finish[R_TASKS];
    pod *cluster = pod_make(1, R_HOSTS, 450e9, 50e9, 1e12, US);
    mz_graph *graph = make(R_HOSTS, &cluster->topology, MZ_NETWORK_PORT);
    mz_queue queues[R_QUEUES];
    for (int q = 0; q < R_QUEUES; q++) {
        queues[q] = queue_of(graph, q / 2);
    }
    for (int c = 0; c < 200; c++) {
        mz_rng rng = mz_rng_make(3, (uint64_t)c);
        draw(&p, &rng);
        relax(&p, start, finish);
        mz_graph_clear(graph);
        build(graph, &p, queues);
        mz_graph_result result = run(graph);
        for (int i = 0; i < p.tasks; i++) {
            assert_time(result.start_s[i], start[i]);
            assert_time(result.finish_s[i], finish[i]);
        }
    }
    mz_graph_free(&graph);
    pod_free(cluster);
}

/* A graph with skewed exchanges on both communication queues. */
static void build_step(mz_graph *graph, pod *p, const mz_queue *queues, uint64_t seed) {
    mz_rng rng = mz_rng_make(seed, 1);
    int32_t n = p->topology.ranks;
    for (int layer = 0; layer < 4; layer++) {
        pod_draw(p, seed + (uint64_t)layer, 1e5, 0.5, 0.5, 0);
        int32_t id[2] = {exchange(graph, &p->exchange), exchange(graph, &p->exchange)};
        for (int32_t r = 0; r < n; r++) {
            mz_task work = kernel(graph, queues[3 * r], 1e-4 * mz_rng_uniform(&rng), 5 * US);
            mz_task first = join(graph, queues[3 * r + 1], id[0], r, 5 * US);
            join(graph, queues[3 * r + 2], id[1], r, 5 * US);
            wait_for(graph, first, work);
            assert_ok(mz_graph_sync(graph, r, first, US, 0, &err), &err);
            wait_for(graph, kernel(graph, queues[3 * r], 5e-5, 5 * US), first);
        }
    }
}

static void check_repeats(mz_network_model network) {
    enum { HOSTS = 16 };
    pod *p = pod_make(4, HOSTS / 4, 450e9, 50e9, 400e9, US);
    mz_graph *graph[2];
    mz_queue queues[2][3 * HOSTS];
    for (int g = 0; g < 2; g++) {
        graph[g] = make(HOSTS, &p->topology, network);
        for (int q = 0; q < 3 * HOSTS; q++) {
            queues[g][q] = queue_of(graph[g], q / 3);
        }
    }
    build_step(graph[0], p, queues[0], 5); /* another step first, then cleared */
    run(graph[0]);
    mz_graph_clear(graph[0]);
    assert_int_equal(mz_graph_tasks(graph[0]), 0);
    for (int g = 0; g < 2; g++) {
        build_step(graph[g], p, queues[g], 9);
    }
    mz_graph_result fresh = run(graph[1]);
    size_t size = (size_t)mz_graph_tasks(graph[1]) * sizeof(double);
    for (int again = 0; again < 2; again++) {
        mz_graph_result cleared = run(graph[0]);
        assert_memory_equal(cleared.start_s, fresh.start_s, size);
        assert_memory_equal(cleared.finish_s, fresh.finish_s, size);
        assert_true(cleared.end_s == fresh.end_s && cleared.events == fresh.events);
    }
    mz_graph_free(&graph[0]);
    mz_graph_free(&graph[1]);
    pod_free(p);
}

static void test_repeats(void **state) {
    (void)state;
    check_repeats(MZ_NETWORK_PORT);
    check_repeats(MZ_NETWORK_FLOW);
}

static void test_stuck(void **state) {
    (void)state;
    pod *p = pod_make(1, 2, 450e9, 50e9, 1e12, US);
    int32_t rank[] = {0, 1};
    mz_message message[] = {{0, 1, 450e3}, {1, 0, 900e3}};
    mz_exchange what = two_ways(rank, message);
    mz_graph_result result;
    for (int network = 0; network < 2; network++) {
        mz_graph *graph = make(2, &p->topology, (mz_network_model)network);
        mz_queue queue[2] = {queue_of(graph, 0), queue_of(graph, 1)};
        mz_task first = kernel(graph, queue[0], US, 0), second = kernel(graph, queue[0], US, 0);
        wait_for(graph, first, second);
        assert_fails(mz_graph_run(graph, &result, &err), MZ_EINTERNAL, "task 0 (host 0", &err);
        /* the same two exchanges in opposite order: nobody can leave the first */
        mz_graph_clear(graph);
        int32_t id[2] = {exchange(graph, &what), exchange(graph, &what)};
        for (int m = 0; m < 2; m++) {
            join(graph, queue[m], id[m], m, 0);
            join(graph, queue[m], id[1 - m], m, 0);
        }
        assert_fails(mz_graph_run(graph, &result, &err), MZ_EINTERNAL, "0 of 4 tasks", &err);
        mz_graph_clear(graph);
        int32_t lonely = exchange(graph, &what);
        join(graph, queue[0], lonely, 0, 0);
        assert_fails(mz_graph_run(graph, &result, &err), MZ_EINTERNAL,
                     "member 1 (rank 1) of exchange 0 never joins", &err);
        mz_graph_free(&graph);
    }
    pod_free(p);
}

static void test_refuses(void **state) {
    (void)state;
    pod *p = pod_make(1, 2, 450e9, 50e9, 1e12, US);
    int32_t rank[] = {0, 1};
    mz_message message[] = {{0, 1, 450e3}, {1, 0, 900e3}};
    mz_exchange what = two_ways(rank, message);
    mz_task task;
    int32_t id;
    mz_graph *graph = make(1, NULL, MZ_NETWORK_PORT);
    mz_queue queue = queue_of(graph, 0);
    assert_fails(mz_graph_exchange(graph, &what, &id, &err), MZ_EINTERNAL, "topology", &err);
    assert_fails(mz_graph_task(graph, queue, -1, 0, 0, &task, &err), MZ_EINTERNAL, "-1 s", &err);
    assert_fails(mz_graph_task(graph, queue, NAN, 0, 0, &task, &err), MZ_EINTERNAL, "nan", &err);
    assert_fails(mz_graph_task(graph, queue + 1, 1, 0, 0, &task, &err), MZ_EINTERNAL, "queue 1",
                 &err);
    kernel(graph, queue, 1, 0);
    assert_fails(mz_graph_wait(graph, 0, 1, &err), MZ_EINTERNAL, "task 1", &err);
    assert_fails(mz_graph_sync(graph, 1, -1, 0, 0, &err), MZ_EINTERNAL, "host 1", &err);
    mz_graph_free(&graph);
    graph = make(2, &p->topology, MZ_NETWORK_FLOW);
    queue = queue_of(graph, 0);
    id = exchange(graph, &what);
    join(graph, queue, id, 0, 0);
    assert_fails(mz_graph_join(graph, queue, id, 0, 0, 0, &task, &err), MZ_EINTERNAL, "member 0",
                 &err);
    double bytes[] = {1, 1};
    what = (mz_exchange){.members = 2,
                         .rank = rank,
                         .send_inside = bytes,
                         .recv_inside = bytes,
                         .send_outside = bytes,
                         .recv_outside = bytes,
                         .rounds = 1};
    assert_fails(mz_graph_exchange(graph, &what, &id, &err), MZ_EINPUT, "flow network", &err);
    mz_graph_free(&graph);
    pod_free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_launch_bound),  cmocka_unit_test(test_device_bound),
        cmocka_unit_test(test_fifo),          cmocka_unit_test(test_sync),
        cmocka_unit_test(test_last_member),   cmocka_unit_test(test_pairs_of_ends),
        cmocka_unit_test(test_two_exchanges), cmocka_unit_test(test_random_graphs),
        cmocka_unit_test(test_repeats),       cmocka_unit_test(test_stuck),
        cmocka_unit_test(test_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
