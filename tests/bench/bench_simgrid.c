/* The flow network against SimGrid's network solver on one uneven all-to-all.
 *
 * SimGrid runs its CM02 model as plain max-min sharing: factors 1, no TCP window, no cross traffic,
 * no latencies (it weighs shares by latency, we do not). The same topology goes to it as an
 * explicit route for every pair; every rank sends all its messages at once and receives all of its
 * own. Prints both times and the largest relative difference of a rank's finish. Usage:
 * bench_simgrid [nodes of 8 GPUs [spread of sizes]] */
#include "tests/engine/pod.h"

#include <simgrid/actor.h>
#include <simgrid/comm.h>
#include <simgrid/engine.h>
#include <simgrid/host.h>
#include <simgrid/mailbox.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 8 };

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int write_platform(const pod *p, FILE *file) {
    const mz_topology *t = &p->topology;
    fprintf(file, "<?xml version='1.0'?>\n"
                  "<!DOCTYPE platform SYSTEM \"https://simgrid.org/simgrid.dtd\">\n"
                  "<platform version=\"4.1\">\n<zone id=\"all\" routing=\"Full\">\n");
    for (int32_t r = 0; r < t->ranks; r++) {
        fprintf(file, "<host id=\"r%d\" speed=\"1Gf\"/>\n", (int)r);
    }
    for (int32_t l = 0; l < t->links; l++) {
        fprintf(file, "<link id=\"l%d\" bandwidth=\"%.17gBps\" latency=\"0s\"/>\n", (int)l,
                t->link_bytes_per_s[l]);
    }
    for (int32_t s = 0; s < t->ranks; s++) {
        for (int32_t d = 0; d < t->ranks; d++) {
            int32_t links[MZ_ROUTE_MAX];
            int count = t->route(t->self, s, d, links);
            if (s == d) {
                continue;
            }
            fprintf(file, "<route src=\"r%d\" dst=\"r%d\" symmetrical=\"NO\">", (int)s, (int)d);
            for (int k = 0; k < count; k++) {
                fprintf(file, "<link_ctn id=\"l%d\"/>", (int)links[k]);
            }
            fprintf(file, "</route>\n");
        }
    }
    fprintf(file, "</zone>\n</platform>\n");
    return ferror(file) || fclose(file) != 0;
}

/* SimGrid's actors get text alone, so the case lies here. */
static const pod *shared_pod;
static double *shared_finish; /* [2 * ranks]: end of sending, of receiving */

static sg_mailbox_t mailbox_of(const mz_message *message) {
    char name[32];
    snprintf(name, sizeof name, "%d-%d", (int)message->src, (int)message->dst);
    return sg_mailbox_by_name(name);
}

/* argv: which side, rank. Sends or receives everything of the rank at once. */
static void act(int argc, char **argv) {
    bool sends = strcmp(argv[1], "send") == 0;
    int32_t rank = argc > 2 ? atoi(argv[2]) : 0, n = shared_pod->topology.ranks;
    sg_comm_t *comms = malloc((size_t)n * sizeof *comms);
    void **data = calloc((size_t)n, sizeof *data);
    size_t count = 0;
    for (int64_t i = 0; i < shared_pod->exchange.messages; i++) {
        mz_message *message = &shared_pod->message[i];
        if ((sends ? message->src : message->dst) != rank) {
            continue;
        }
        sg_mailbox_t mailbox = mailbox_of(message);
        comms[count] = sends ? sg_mailbox_put_async(mailbox, message, (long)message->bytes)
                             : sg_mailbox_get_async(mailbox, &data[count]);
        count++;
    }
    sg_comm_wait_all(comms, count);
    shared_finish[2 * rank + (sends ? 0 : 1)] = simgrid_get_clock();
    free(comms);
    free(data);
}

static void start_actors(int32_t ranks) {
    for (int32_t r = 0; r < ranks; r++) {
        char number[16], name[16];
        snprintf(number, sizeof number, "%d", (int)r);
        snprintf(name, sizeof name, "r%d", (int)r);
        const char *send[] = {"actor", "send", number}, *receive[] = {"actor", "receive", number};
        sg_host_t host = sg_host_by_name(name);
        sg_actor_create_("send", host, act, 3, send);
        sg_actor_create_("receive", host, act, 3, receive);
    }
}

static int load_platform(const pod *p) {
    char path[] = P_tmpdir "/mizan-platform-XXXXXX.xml";
    int descriptor = mkstemps(path, 4);
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "w");
    if (file == NULL || write_platform(p, file) != 0) {
        fprintf(stderr, "bench_simgrid: the platform file %s cannot be written\n", path);
        return 1;
    }
    simgrid_load_platform(path);
    unlink(path);
    return 0;
}

int main(int argc, char **argv) {
    static char *configuration[] = {"bench_simgrid",
                                    "--cfg=network/model:CM02",
                                    "--cfg=network/bandwidth-factor:1",
                                    "--cfg=network/latency-factor:1",
                                    "--cfg=network/weight-S:0",
                                    "--cfg=network/crosstraffic:0",
                                    "--cfg=network/TCP-gamma:1e30",
                                    "--cfg=surf/precision:1e-12",
                                    "--cfg=maxmin/precision:1e-12",
                                    "--log=root.threshold:error",
                                    NULL};
    int32_t nodes = argc > 1 ? atoi(argv[1]) : 4;
    double spread = argc > 2 ? atof(argv[2]) : 0.5;
    pod *p = pod_make(nodes < 1 ? 1 : nodes, GPUS, 450e9, 50e9, 40e9 * GPUS * nodes, 0);
    pod_draw(p, 1, 1e6, spread, 0.5, 1);
    int32_t n = p->topology.ranks, count = 10;
    mz_err err;
    double *finish = malloc((size_t)n * sizeof *finish), begin = seconds();
    if (mz_flow_time(&p->topology, &p->exchange, 0, finish, &err) != MZ_OK) {
        fprintf(stderr, "bench_simgrid: %s\n", err.msg);
        return 1;
    }
    double ours = seconds() - begin, worst = 0;
    shared_pod = p;
    shared_finish = calloc(2 * (size_t)n, sizeof *shared_finish);
    simgrid_init(&count, configuration);
    if (load_platform(p) != 0) {
        return 1;
    }
    start_actors(n);
    begin = seconds();
    simgrid_run();
    double theirs = seconds() - begin;
    for (int32_t r = 0; r < n; r++) {
        double other = fmax(shared_finish[2 * r], shared_finish[2 * r + 1]);
        worst = fmax(worst, fabs(finish[r] - other) / other);
    }
    printf("%d ranks, %lld messages: flow %.4f s, SimGrid %.4f s; largest relative difference of a "
           "finish %.3g\n",
           (int)n, (long long)p->exchange.messages, ours, theirs, worst);
    free(shared_finish);
    free(finish);
    pod_free(p);
    return worst > 1e-6;
}
