/* Speed of whole training steps: loads in memory, planning, the task graph, its run, memory.
 *
 *   bench_step [POLICY]     default ultraep
 *
 * Prints one row per target of the design: seconds per step (the second of two, so that memory is
 * there) by the wall clock and of CPU, and the exponents of cost growth, fitted by least squares on
 * logarithms of CPU time.
 * Loads are Zipf-like, one permutation of experts per group and layer; they are made before the
 * clock starts. */
#include "common/base/log.h"
#include "common/base/rng.h"
#include "sim/step/run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { VARIANTS = 4 };

typedef struct bench_case {
    const char *label, *model, *cluster;
    int32_t layers; /* of the model; 0: as shipped */
    int32_t ep;     /* 0: all ranks */
    mz_network_model network;
    int64_t tokens; /* per rank */
} bench_case;

typedef struct source {
    mz_load load[VARIANTS];
    int64_t *tokens;
    int32_t ranks, layers, next, step;
} source;

static void check(mz_code code, const mz_err *err) {
    if (code == MZ_OK)
        return;
    fprintf(stderr, "bench_step: %s\n", err->msg);
    exit(mz_exit_code(code));
}

static void *zeroed(size_t count, size_t size) {
    void *p = calloc(count, size);
    if (!p) {
        fprintf(stderr, "bench_step: out of memory\n");
        exit(4);
    }
    return p;
}

/* One source's row: shares of a Zipf law with exponent 0.6 over a permutation, jittered by rank. */
static void fill_row(int64_t *row, const double *weight, int32_t experts, int64_t pairs,
                     mz_rng *rng) {
    double sum = 0;
    int64_t left = pairs;
    for (int32_t e = 0; e < experts; e++)
        sum += weight[e];
    for (int32_t e = 0; e < experts; e++) {
        row[e] = (int64_t)((double)pairs * weight[e] / sum * (0.8 + 0.2 * mz_rng_uniform(rng)));
        left -= row[e];
    }
    for (int32_t e = 0; left > 0; e = (e + 1) % experts, left--)
        row[e]++;
}

static void make_load(mz_load *load, int32_t ranks, int32_t ep, int32_t experts, int64_t pairs,
                      uint64_t variant) {
    double *weight = zeroed((size_t)experts, sizeof *weight);
    *load = (mz_load){.sources = ranks, .experts = experts};
    load->count = zeroed((size_t)ranks * (size_t)experts, sizeof(int64_t));
    load->total = zeroed((size_t)experts, sizeof(int64_t));
    load->source = zeroed((size_t)ranks, sizeof(int64_t));
    for (int32_t s = 0; s < ranks; s++) {
        mz_rng group = mz_rng_make(7, mz_rng_stream(variant, (uint64_t)(s / ep), 0, 0));
        mz_rng rng = mz_rng_make(8, mz_rng_stream(variant, (uint64_t)s, 0, 0));
        for (int32_t e = 0; e < experts; e++)
            weight[e] = pow(e + 1, -0.6);
        for (int32_t e = experts - 1; e > 0; e--) {
            const int32_t other = (int32_t)mz_rng_below(&group, (uint64_t)e + 1);
            const double w = weight[e];
            weight[e] = weight[other];
            weight[other] = w;
        }
        fill_row(load->count + (int64_t)s * experts, weight, experts, pairs, &rng);
    }
    mz_load_sum(load);
    free(weight);
}

static mz_code next_step(void *self, mz_step_head *head, bool *end, mz_err *err) {
    source *from = self;
    *end = from->step == 1;
    *head = (mz_step_head){from->step++, 1, from->layers, from->tokens};
    from->next = 0;
    return MZ_OK;
}

static mz_code next_call(void *self, mz_layer_call *call, mz_err *err) {
    source *from = self;
    *call = (mz_layer_call){0, from->next, &from->load[from->next % VARIANTS], NULL};
    from->next++;
    return MZ_OK;
}

/* The shipped config with another number of layers, under a temporary name. */
static void load_model(const bench_case *c, mz_model **model) {
    mz_err err;
    if (c->layers == 0) {
        check(mz_model_load(c->model, MZ_SOURCE_DIR, model, &err), &err);
        return;
    }
    char from[1024], to[1024];
    const char *folder = getenv("TMPDIR");
    snprintf(to, sizeof to, "%s/bench_step_XXXXXX", folder && *folder ? folder : P_tmpdir);
    snprintf(from, sizeof from, "%s/sim/model/configs/%s.json", MZ_SOURCE_DIR, c->model);
    json_t *config = json_load_file(from, 0, NULL);
    const int fd = mkstemp(to);
    FILE *out = fd < 0 ? NULL : fdopen(fd, "w");
    if (!config || !out ||
        json_object_set_new(config, "num_hidden_layers", json_integer(c->layers)) ||
        json_dumpf(config, out, 0) || fclose(out)) {
        fprintf(stderr, "bench_step: no config from %s\n", from);
        exit(4);
    }
    const mz_code code = mz_model_load(to, MZ_SOURCE_DIR, model, &err);
    remove(to);
    json_decref(config);
    check(code, &err);
}

typedef struct measured {
    double seconds;
    uint64_t cells; /* ranks x experts */
} measured;

static measured run_case(const bench_case *c, char *policy) {
    mz_err err;
    mz_model *model;
    mz_cluster *cluster;
    mz_sim *sim;
    load_model(c, &model);
    check(mz_cluster_load(c->cluster, MZ_SOURCE_DIR, &cluster, &err), &err);
    mz_step_options options = mz_step_defaults(cluster->ranks);
    options.ep = c->ep ? c->ep : cluster->ranks;
    options.network = c->network;
    source from = {.ranks = cluster->ranks, .layers = model->moe_layers};
    from.tokens = zeroed((size_t)from.ranks, sizeof *from.tokens);
    for (int32_t r = 0; r < from.ranks; r++)
        from.tokens[r] = c->tokens;
    for (uint64_t v = 0; v < VARIANTS; v++)
        make_load(&from.load[v], from.ranks, options.ep, model->experts, c->tokens * model->top_k,
                  v);
    const mz_load_source loads = {&from,       from.ranks, model->experts,
                                  from.layers, next_step,  next_call};
    mz_app app = {.log = mz_log_make(NULL, -1)};
    check(mz_sim_create(model, cluster, &options, &policy, 1, &sim, &err), &err);
    double wall = 0, seconds = 0;
    for (int i = 0; i < 2; i++) {
        from.step = 0;
        const double start = mz_now();
        const clock_t used = clock();
        check(mz_sim_run(sim, &loads, &app, 1, &err), &err);
        wall = mz_now() - start;
        seconds = (double)(clock() - used) / CLOCKS_PER_SEC;
    }
    mz_run run;
    check(mz_sim_results(sim, &run, &err), &err);
    printf("%-50s %8.3f s  (CPU %.3f s)  simulated %.3f s\n", c->label, wall, seconds,
           run.step_time_s.mean);
    fflush(stdout);
    const measured m = {seconds, (uint64_t)from.ranks * (uint64_t)model->experts};
    mz_sim_free(&sim);
    for (int v = 0; v < VARIANTS; v++) {
        free(from.load[v].count);
        free(from.load[v].total);
        free(from.load[v].source);
    }
    free(from.tokens);
    mz_cluster_free(&cluster);
    mz_model_free(&model);
    return m;
}

/* Slope of log(seconds) over log(size). */
static double exponent(const measured *m, int n) {
    double x = 0, y = 0, xx = 0, xy = 0;
    for (int i = 0; i < n; i++) {
        const double a = log((double)m[i].cells), b = log(m[i].seconds);
        x += a, y += b, xx += a * a, xy += a * b;
    }
    return (n * xy - x * y) / (n * xx - x * x);
}

static void growth(const char *what, const bench_case *cases, int n, char *policy) {
    measured m[8];
    for (int i = 0; i < 3 * n; i++) { /* the fastest of three: other work only adds */
        const measured again = run_case(&cases[i % n], policy);
        if (i < n || again.seconds < m[i % n].seconds)
            m[i % n] = again;
    }
    printf("%-50s %8.2f\n", what, exponent(m, n));
}

int main(int argc, char **argv) {
    char fallback[] = "ultraep";
    char *policy = argc > 1 ? argv[1] : fallback;
    const mz_network_model port = MZ_NETWORK_PORT;
    const char *v3 = "deepseek-v3";
    const bench_case target[] = {
        {"64 ranks, 48 layers, 128 experts, counts, port", "qwen3-30b-a3b", "h100-80gb:64", 0, 0,
         port, 4096},
        {"1024 ranks in one group, 58 layers, port", v3, "h100-80gb:1024", 0, 0, port, 4096},
        {"10240 ranks as 160 groups, 60 layers, port", v3, "h100-80gb:10240", 63, 64, port, 4096},
    };
    const bench_case ranks[] = {
        {"  128 ranks in one group", v3, "h100-80gb:128", 0, 0, port, 4096},
        {"  256", v3, "h100-80gb:256", 0, 0, port, 4096},
        {"  512", v3, "h100-80gb:512", 0, 0, port, 4096},
        {"  1024", v3, "h100-80gb:1024", 0, 0, port, 4096},
    };
    const bench_case events[] = {
        {"  64 ranks, one group", v3, "h100-80gb:64", 0, 64, port, 4096},
        {"  256, 4 groups", v3, "h100-80gb:256", 0, 64, port, 4096},
        {"  1024, 16 groups", v3, "h100-80gb:1024", 0, 64, port, 4096},
    };
    const bench_case flow = {
        "64 ranks, 58 layers, 256 experts, flow", v3, "h100-80gb:64", 0, 0, MZ_NETWORK_FLOW, 4096};
    for (size_t i = 0; i < sizeof target / sizeof *target; i++)
        run_case(&target[i], policy);
    growth("exponent in ranks x experts", ranks, 4, policy);
    growth("exponent in events", events, 3, policy);
    run_case(&flow, policy);
    return 0;
}
