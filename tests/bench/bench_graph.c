/* Task graphs: building and running steps of many ranks on the port network.
 *
 * Per rank and layer 26 kernels in two queues, 4 exchanges of groups of 64 ranks, one
 * synchronisation and a dependency for every third task: the shape of a mixture-of-experts layer,
 * forward and backward. Prints million tasks/s. Usage: bench_graph [ranks [layers]] */
#include "sim/engine/graph.h"
#include "tests/engine/pod.h"

#include <stdio.h>
#include <time.h>

enum { GROUP = 64, KERNELS = 26, EXCHANGES = 4 };

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct bench {
    mz_graph *graph;
    pod *pod;
    mz_queue *queue; /* [ranks][2] */
    mz_rng rng;
    mz_err err;
} bench;

static mz_code add_exchanges(bench *b, int32_t first, int32_t *ids) {
    mz_exchange group = {.members = GROUP,
                         .rank = b->pod->rank + first,
                         .send_inside = b->pod->bytes[0] + first,
                         .recv_inside = b->pod->bytes[1] + first,
                         .send_outside = b->pod->bytes[2] + first,
                         .recv_outside = b->pod->bytes[3] + first,
                         .rounds = 1};
    mz_code code = MZ_OK;
    for (int e = 0; e < EXCHANGES && code == MZ_OK; e++) {
        code = mz_graph_exchange(b->graph, &group, &ids[e], &b->err);
    }
    return code;
}

/* One rank's part of a layer: kernels around four exchanges. */
static mz_code add_rank(bench *b, int32_t rank, const int32_t *ids) {
    mz_task task = -1, before = -1;
    mz_code code = MZ_OK;
    mz_queue compute = b->queue[2 * rank], link = b->queue[2 * rank + 1];
    for (int i = 0; i < KERNELS && code == MZ_OK; i++) {
        double length = 1e-5 * (0.5 + mz_rng_uniform(&b->rng));
        code = mz_graph_task(b->graph, compute, length, 5e-6, (uint32_t)i, &task, &b->err);
        if (code == MZ_OK && before >= 0) {
            code = mz_graph_wait(b->graph, task, before, &b->err);
            before = -1;
        }
        if (code == MZ_OK && i % 7 == 3) {
            code = mz_graph_join(b->graph, link, ids[i / 7], rank % GROUP, 5e-6, 100, &before,
                                 &b->err);
            if (code == MZ_OK) {
                code = mz_graph_wait(b->graph, before, task, &b->err);
            }
        }
    }
    return code == MZ_OK ? mz_graph_sync(b->graph, rank, task, 1e-5, 200, &b->err) : code;
}

static mz_code build(bench *b, int layers) {
    mz_code code = MZ_OK;
    for (int layer = 0; layer < layers; layer++) {
        for (int32_t first = 0; first < b->pod->topology.ranks; first += GROUP) {
            int32_t ids[EXCHANGES];
            code = add_exchanges(b, first, ids);
            for (int32_t rank = first; rank < first + GROUP && code == MZ_OK; rank++) {
                code = add_rank(b, rank, ids);
            }
            if (code != MZ_OK) {
                return code;
            }
        }
    }
    return code;
}

static mz_code measure(bench *b, int32_t ranks, int layers) {
    mz_code code =
        mz_graph_create(ranks, &b->pod->topology, MZ_NETWORK_PORT, 0, 0, &b->graph, &b->err);
    for (int32_t q = 0; q < 2 * ranks && code == MZ_OK; q++) {
        code = mz_graph_queue(b->graph, q / 2, &b->queue[q], &b->err);
    }
    for (int pass = 0; pass < 2 && code == MZ_OK; pass++) { /* the second reuses the memory */
        mz_graph_result result = {0};
        mz_graph_clear(b->graph);
        double begin = seconds();
        code = build(b, layers);
        double built = seconds();
        if (code == MZ_OK) {
            code = mz_graph_run(b->graph, &result, &b->err);
        }
        double ran = seconds();
        double tasks = (double)mz_graph_tasks(b->graph);
        printf("%6d ranks %3d layers %9.0f tasks  build %6.2f  run %6.2f  both %6.2f million "
               "tasks/s  (%.3f s, end %.9g s)\n",
               (int)ranks, layers, tasks, 1e-6 * tasks / (built - begin),
               1e-6 * tasks / (ran - built), 1e-6 * tasks / (ran - begin), ran - begin,
               result.end_s);
    }
    mz_graph_free(&b->graph);
    return code;
}

static int run(int32_t ranks, int layers) {
    bench b = {.rng = mz_rng_make(1, 0)};
    b.pod = pod_make(ranks / 8, 8, 450e9, 50e9, 50e9 * ranks, 1e-6);
    b.queue = malloc(2 * (size_t)ranks * sizeof *b.queue);
    for (int32_t r = 0; r < ranks; r++) {
        for (int k = 0; k < 4; k++) {
            b.pod->bytes[k][r] = 1e6 * (0.5 + mz_rng_uniform(&b.rng));
        }
    }
    mz_code code = measure(&b, ranks, layers);
    if (code != MZ_OK) {
        fprintf(stderr, "bench_graph: %s\n", b.err.msg);
    }
    free(b.queue);
    pod_free(b.pod);
    return code != MZ_OK;
}

int main(int argc, char **argv) {
    if (argc > 1) {
        return run((int32_t)(atoi(argv[1]) / GROUP * GROUP), argc > 2 ? atoi(argv[2]) : 8);
    }
    return run(64, 60) || run(1024, 16) || run(10240, 8);
}
