/* The flow network against progressive filling written down naively, on random networks. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "sim/engine/flow.h"

#include <math.h>

enum { LINKS_MAX = 41, FLOWS_MAX = 160, ROUTE = 5 };

typedef struct case_flow {
    double begin, bytes, end;
    int links[ROUTE], count;
    double left, rate; /* reference */
} case_flow;

typedef struct net_case {
    int links, flows;
    double capacity[LINKS_MAX], latency[LINKS_MAX];
    case_flow flow[FLOWS_MAX];
} net_case;

/* Reference: rates of all flows in progress, by raising all rates together. */
static void reference_rates(net_case *net, double now) {
    double spare[LINKS_MAX];
    memcpy(spare, net->capacity, sizeof spare);
    for (int i = 0; i < net->flows; i++) {
        net->flow[i].rate = -1;
    }
    for (;;) {
        int users[LINKS_MAX] = {0}, tight = -1;
        for (int i = 0; i < net->flows; i++) {
            const case_flow *f = &net->flow[i];
            for (int k = 0; k < f->count && f->begin <= now && f->left > 0 && f->rate < 0; k++) {
                users[f->links[k]]++;
            }
        }
        for (int l = 0; l < net->links; l++) {
            if (users[l] > 0 && (tight < 0 || spare[l] / users[l] < spare[tight] / users[tight])) {
                tight = l;
            }
        }
        if (tight < 0) {
            return;
        }
        double share = spare[tight] / users[tight];
        for (int i = 0; i < net->flows; i++) {
            case_flow *f = &net->flow[i];
            bool here = false;
            for (int k = 0; k < f->count; k++) {
                here |= f->links[k] == tight;
            }
            if (here && f->begin <= now && f->left > 0 && f->rate < 0) {
                f->rate = share;
                for (int k = 0; k < f->count; k++) {
                    spare[f->links[k]] -= share;
                }
            }
        }
    }
}

/* Reference: every flow's end, event by event. */
static void reference_ends(net_case *net) {
    double now = 0;
    for (int i = 0; i < net->flows; i++) {
        net->flow[i].left = net->flow[i].bytes;
    }
    for (;;) {
        double next = INFINITY;
        reference_rates(net, now);
        for (int i = 0; i < net->flows; i++) {
            const case_flow *f = &net->flow[i];
            if (f->left > 0) {
                next = fmin(next, f->begin > now ? f->begin : now + f->left / f->rate);
            }
        }
        if (next == INFINITY) {
            return;
        }
        for (int i = 0; i < net->flows; i++) {
            case_flow *f = &net->flow[i];
            if (f->left > 0 && f->begin <= now) {
                f->left -= f->rate * (next - now);
                if (f->left <= 1e-11 * f->bytes) {
                    f->left = 0;
                    f->end = next;
                }
            }
        }
        now = next;
    }
}

static int by_begin(const void *a, const void *b) {
    double x = ((const case_flow *)a)->begin, y = ((const case_flow *)b)->begin;
    return (x > y) - (x < y);
}

/* Kind 3: two nodes of 5 GPUs, each with a switch port and a NIC either way, and a spine: routes
 * inside a node over 2 links, between nodes over 5. A link behind a tighter one has nothing to say
 * until a flow inside the node comes. */
static void draw_node_route(case_flow *f, mz_rng *rng) {
    int src = (int)mz_rng_below(rng, 10), dst = (src + 1 + (int)mz_rng_below(rng, 9)) % 10;
    int inside[] = {src, 10 + dst}, outside[] = {src, 20 + src, 40, 30 + dst, 10 + dst};
    bool one_node = src / 5 == dst / 5;
    f->count = one_node ? 2 : 5;
    memcpy(f->links, one_node ? inside : outside, (size_t)f->count * sizeof *inside);
}

static void set_node_links(net_case *net, mz_rng *rng) {
    double spine = 1e9 * (0.3 + mz_rng_uniform(rng));
    net->links = 41;
    for (int l = 0; l < net->links; l++) {
        net->capacity[l] = l < 20 ? 1e9 : l < 40 ? 1.2e8 : spine;
    }
}

/* Kinds: 0 random routes; 1 equal capacities and sizes (ties); 2 two sides, as in an all-to-all; 3
 * nodes. */
static void draw(net_case *net, mz_rng *rng, int kind) {
    memset(net, 0, sizeof *net);
    net->links = 1 + (int)mz_rng_below(rng, LINKS_MAX);
    net->flows = 1 + (int)mz_rng_below(rng, FLOWS_MAX);
    if (kind == 2) {
        net->links = 4 * (1 + (int)mz_rng_below(rng, LINKS_MAX / 4));
    }
    bool together = mz_rng_below(rng, 2) == 0;
    for (int l = 0; l < net->links; l++) {
        net->capacity[l] = kind == 1 ? 1e9 : 1e9 * exp(mz_rng_normal(rng));
    }
    if (kind == 3) {
        set_node_links(net, rng);
    }
    for (int i = 0; i < net->flows; i++) {
        case_flow *f = &net->flow[i];
        f->begin = together ? 0 : 1e-3 * (double)mz_rng_below(rng, 60);
        f->bytes = 1e6 * (kind == 1 ? (double)(1 + mz_rng_below(rng, 4)) : exp(mz_rng_normal(rng)));
        if (kind == 2) {
            int half = net->links / 2;
            f->links[0] = (int)mz_rng_below(rng, (uint64_t)half);
            f->links[1] = half + (int)mz_rng_below(rng, (uint64_t)half);
            f->count = 2;
            continue;
        }
        if (kind == 3) {
            draw_node_route(f, rng);
            continue;
        }
        int want = 1 + (int)mz_rng_below(rng, ROUTE);
        for (int k = 0; k < want; k++) {
            int link = (int)mz_rng_below(rng, (uint64_t)net->links);
            bool there = false;
            for (int j = 0; j < f->count; j++) {
                there |= f->links[j] == link;
            }
            if (!there) {
                f->links[f->count++] = link;
            }
        }
    }
    qsort(net->flow, (size_t)net->flows, sizeof *net->flow, by_begin);
}

static mz_flow *make(const net_case *net, double accuracy) {
    mz_topology topology = {
        .links = net->links, .link_bytes_per_s = net->capacity, .link_latency_s = net->latency};
    mz_err err;
    mz_flow *flow;
    assert_ok(mz_flow_create(&topology, accuracy, &flow, &err), &err);
    assert_ok(mz_flow_reserve(flow, net->flows, ROUTE, &err), &err);
    return flow;
}

/* Feasible, and every flow has a saturated link where nobody is faster: max-min. */
static void check_fair(mz_flow *flow, const net_case *net, const bool *active) {
    double load[LINKS_MAX] = {0}, top[LINKS_MAX] = {0}, rate[FLOWS_MAX];
    for (int i = 0; i < net->flows; i++) {
        rate[i] = active[i] ? mz_flow_rate(flow, i) : 0;
        for (int k = 0; k < net->flow[i].count; k++) {
            int l = net->flow[i].links[k];
            load[l] += rate[i];
            top[l] = fmax(top[l], rate[i]);
        }
    }
    for (int l = 0; l < net->links; l++) {
        assert_true(load[l] <= net->capacity[l] * (1 + 1e-9));
    }
    for (int i = 0; i < net->flows; i++) {
        bool held = !active[i];
        for (int k = 0; k < net->flow[i].count; k++) {
            int l = net->flow[i].links[k];
            held |= load[l] >= net->capacity[l] * (1 - 1e-9) && rate[i] >= top[l] * (1 - 1e-9);
        }
        assert_true(held);
        assert_true(!active[i] || rate[i] > 0);
    }
}

/* Runs the network under test; `end` and the bytes moved per flow, integrated from its rates. */
static mz_flow_work run_case(const net_case *net, double accuracy, double *end, double *moved,
                             bool check) {
    mz_flow *flow = make(net, accuracy);
    bool active[FLOWS_MAX] = {false};
    double now = 0;
    memset(moved, 0, FLOWS_MAX * sizeof *moved);
    for (int begun = 0, ended = 0; ended < net->flows;) {
        double next = mz_flow_next(flow);
        bool begins = begun < net->flows && net->flow[begun].begin <= next;
        double time = begins ? net->flow[begun].begin : next;
        assert_true(time >= now && isfinite(time));
        if (check && time > now) {
            check_fair(flow, net, active);
        }
        for (int i = 0; i < net->flows && time > now; i++) {
            moved[i] += active[i] ? mz_flow_rate(flow, i) * (time - now) : 0;
        }
        now = time;
        /* all of one time before the next solution */
        while (begun < net->flows && net->flow[begun].begin <= now) {
            const case_flow *f = &net->flow[begun];
            mz_flow_begin(flow, now, f->links, f->count, f->bytes, begun);
            active[begun++] = true;
        }
        if (!begins) {
            int id = mz_flow_end(flow);
            assert_true(active[id]);
            active[id] = false;
            end[id] = now;
            ended++;
        }
    }
    assert_true(mz_flow_next(flow) == INFINITY);
    mz_flow_work work = mz_flow_worked(flow);
    assert_int_equal(work.unsettled, 0);
    mz_flow_free(&flow);
    return work;
}

static void test_against_reference(void **state) {
    (void)state;
    static net_case net;
    double end[FLOWS_MAX], moved[FLOWS_MAX];
    uint64_t updates = 0, moves = 0;
    for (int c = 0; c < 240; c++) {
        mz_rng rng = mz_rng_make(7, (uint64_t)c);
        draw(&net, &rng, c % 4);
        reference_ends(&net);
        mz_flow_work work = run_case(&net, 0, end, moved, true);
        updates += work.solutions - work.fills;
        moves += work.moves;
        for (int i = 0; i < net.flows; i++) {
            assert_true(fabs(end[i] - net.flow[i].end) <= 1e-9 * net.flow[i].end);
            assert_true(fabs(moved[i] - net.flow[i].bytes) <= 1e-9 * net.flow[i].bytes);
        }
    }
    /* the cases reach what they are for: solutions from the one before, changes of bottleneck */
    assert_true(updates > 1000 && moves > 1000);
}

static void test_one_link(void **state) {
    (void)state;
    static net_case net = {.links = 1, .flows = 4, .capacity = {1e9}};
    double end[FLOWS_MAX], moved[FLOWS_MAX];
    for (int i = 0; i < 4; i++) {
        net.flow[i] = (case_flow){.bytes = 1e6 * (i + 1), .count = 1};
    }
    run_case(&net, 0, end, moved, true);
    /* shares 1/4, 1/3, 1/2, 1: 4, 4 + 3, 7 + 2, 9 + 1 ms */
    const double want[] = {4e-3, 7e-3, 9e-3, 10e-3};
    for (int i = 0; i < 4; i++) {
        assert_true(fabs(end[i] - want[i]) < 1e-15);
    }
}

/* The textbook line: one long flow over links of 1 and 2 GB/s, a short one on each. The long flow
 * and the first short one get 0.5; the second short one the rest of its link, 1.5. */
static void test_line(void **state) {
    (void)state;
    static net_case net = {.links = 2, .flows = 3, .capacity = {1e9, 2e9}};
    net.flow[0] = (case_flow){.bytes = 1e6, .links = {0, 1}, .count = 2};
    net.flow[1] = (case_flow){.bytes = 1e6, .links = {0}, .count = 1};
    net.flow[2] = (case_flow){.bytes = 1e6, .links = {1}, .count = 1};
    mz_flow *flow = make(&net, 0);
    for (int i = 0; i < 3; i++) {
        mz_flow_begin(flow, 0, net.flow[i].links, net.flow[i].count, net.flow[i].bytes, i);
    }
    assert_true(fabs(mz_flow_next(flow) - 1e6 / 1.5e9) < 1e-15);
    assert_true(fabs(mz_flow_rate(flow, 0) - 0.5e9) < 1);
    assert_true(fabs(mz_flow_rate(flow, 1) - 0.5e9) < 1);
    assert_true(fabs(mz_flow_rate(flow, 2) - 1.5e9) < 1);
    mz_flow_free(&flow);
}

static void test_accuracy(void **state) {
    (void)state;
    static net_case net;
    double exact[FLOWS_MAX], end[FLOWS_MAX], moved[FLOWS_MAX];
    double worst = 0;
    uint64_t solutions = 0, merged = 0;
    for (int c = 0; c < 60; c++) {
        mz_rng rng = mz_rng_make(11, (uint64_t)c);
        draw(&net, &rng, 2);
        solutions += run_case(&net, 0, exact, moved, false).solutions;
        merged += run_case(&net, 0.01, end, moved, false).solutions;
        for (int i = 0; i < net.flows; i++) {
            double took = exact[i] - net.flow[i].begin;
            worst = fmax(worst, fabs(end[i] - exact[i]) / took);
        }
    }
    print_message("accuracy 0.01: %llu solutions instead of %llu, worst error %.4f\n",
                  (unsigned long long)merged, (unsigned long long)solutions, worst);
    assert_true(merged < solutions);
    assert_true(worst <= 0.01);
}

static void test_refuses_links(void **state) {
    (void)state;
    mz_err err;
    mz_flow *flow;
    double capacity[] = {1e9, 0}, latency[] = {0, 0};
    mz_topology topology = {.links = 2, .link_bytes_per_s = capacity, .link_latency_s = latency};
    assert_fails(mz_flow_create(&topology, 0, &flow, &err), MZ_EINPUT, "link 1", &err);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_link),          cmocka_unit_test(test_line),
        cmocka_unit_test(test_against_reference), cmocka_unit_test(test_accuracy),
        cmocka_unit_test(test_refuses_links),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
