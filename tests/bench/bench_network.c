/* One uneven all-to-all on both networks (DESIGN section 9).
 *
 * Pods of 8 GPUs with a NIC each; message sizes differ by source and destination. Usage:
 * bench_network */
#include "sim/engine/network.h"
#include "tests/engine/pod.h"

#include <stdio.h>
#include <time.h>

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int fail(const mz_err *err) {
    fprintf(stderr, "bench_network: %s\n", err->msg);
    return 1;
}

static int run(const char *name, int32_t nodes, double oversubscription, double spread, double skew,
               double whole, double accuracy) {
    mz_err err;
    double spine = 50e9 * 8 * nodes / oversubscription;
    pod *p = pod_make(nodes, 8, 450e9, 50e9, spine, 1e-6);
    pod_draw(p, 1, 1e6, spread, skew, whole);
    int32_t n = p->topology.ranks;
    double *finish = malloc((size_t)n * sizeof *finish), *port = malloc((size_t)n * sizeof *port);
    double begin = seconds();
    if (mz_flow_time(&p->topology, &p->exchange, accuracy, finish, &err) != MZ_OK) {
        return fail(&err);
    }
    double flow_s = seconds() - begin;
    enum { PORT_RUNS = 100 };
    begin = seconds();
    for (int i = 0; i < PORT_RUNS; i++) {
        if (mz_port_time(&p->topology, &p->exchange, port, &err) != MZ_OK) {
            return fail(&err);
        }
    }
    double port_s = (seconds() - begin) / PORT_RUNS;
    double last = 0, last_port = 0;
    for (int32_t m = 0; m < n; m++) {
        last = fmax(last, finish[m]);
        last_port = fmax(last_port, port[m]);
    }
    printf(
        "%-34s %4d ranks %6lld messages  flow %8.4f s  port %8.6f s  (ends after %.6g, %.6g ms)\n",
        name, (int)n, (long long)p->exchange.messages, flow_s, port_s, 1e3 * last, 1e3 * last_port);
    free(finish);
    free(port);
    pod_free(p);
    return 0;
}

int main(void) {
    return run("routed, skewed destinations", 8, 1, 0.3, 0.7, 8192, 0) ||
           run("routed, skewed destinations", 32, 1, 0.3, 0.7, 8192, 0) ||
           run("the same, spine 2:1", 32, 2, 0.3, 0.7, 8192, 0) ||
           run("the same, spine not a limit", 32, 0.1, 0.3, 0.7, 8192, 0) ||
           run("the same, accuracy 0.001", 32, 1, 0.3, 0.7, 8192, 0.001) ||
           run("random sizes, no structure", 8, 1, 1, 0, 0, 0) ||
           run("random sizes, no structure", 32, 1, 1, 0, 0, 0) ||
           run("the same, accuracy 0.001", 32, 1, 1, 0, 0, 0.001);
}
