/* How fast a trace is read: pairs per second of one core, checksums verified, validation and
 * conversion included, and the loads of one large step through the stream.
 *
 *   bench_trace [PAIRS in millions, default 48] [FILE, default in /tmp]
 *
 * CPU time is the program's own; the HDF5 child's is printed beside it. */
#include "common/base/arena.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "traces/stream.h"
#include "traces/trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { LAYERS = 48, RANKS = 64, EXPERTS = 128, TOP_K = 8 };

typedef struct timing {
    double wall, own, child;
} timing;

static double seconds(const struct rusage *usage) {
    return (double)usage->ru_utime.tv_sec + (double)usage->ru_stime.tv_sec +
           1e-6 * (double)(usage->ru_utime.tv_usec + usage->ru_stime.tv_usec);
}

static timing now(void) {
    struct rusage own, child;
    getrusage(RUSAGE_SELF, &own);
    getrusage(RUSAGE_CHILDREN, &child);
    return (timing){mz_now(), seconds(&own), seconds(&child)};
}

static void report(const char *what, int64_t pairs, timing from) {
    timing to = now();
    double own = to.own - from.own, child = to.child - from.child;
    printf("%-46s %7.1f M pairs/s per core   wall %.3f s, CPU %.3f s + HDF5 child %.3f s\n", what,
           1e-6 * (double)pairs / (own + child), to.wall - from.wall, own, child);
}

/* Experts with a skewed popularity; weights are noise, which compresses worst. */
static void draw_pairs(mz_rng *rng, int64_t pairs, uint16_t *expert, float *weight) {
    for (int64_t i = 0; i < pairs; i++) {
        uint32_t bits = mz_rng_u32(rng), u = bits & 0xffff;
        expert[i] = (uint16_t)((uint64_t)u * u * EXPERTS >> 32);
        weight[i] = 1e-5f * (float)(bits >> 16);
    }
}

static mz_code write_trace(const char *path, int64_t tokens, int deflate, mz_err *err) {
    mz_trace_facts facts = {.name = "bench",
                            .kind = MZ_TRACE_PAIRS,
                            .layers = LAYERS,
                            .experts = EXPERTS,
                            .top_k = TOP_K,
                            .ranks = RANKS,
                            .step_stride = 1,
                            .has_weight = true};
    mz_trace_write_options options = {.deflate = deflate, .half_weights = true};
    mz_trace_writer *writer;
    int64_t pairs = tokens * TOP_K;
    uint16_t *expert = mz_calloc((size_t)pairs, sizeof *expert);
    float *weight = mz_calloc((size_t)pairs, sizeof *weight);
    if (!expert || !weight)
        return mz_fail_nomem(err, "the benchmark");
    mz_rng rng = mz_rng_make(7, 0);
    mz_code code = mz_trace_create(path, &facts, &options, &writer, err);
    for (int l = 0; l < LAYERS && code == MZ_OK; l++)
        for (int r = 0; r < RANKS && code == MZ_OK; r++) {
            mz_trace_call_data call = {.layer = l,
                                       .rank = r,
                                       .token_begin = r * tokens,
                                       .tokens = tokens,
                                       .pairs = pairs,
                                       .expert = expert,
                                       .weight = weight};
            draw_pairs(&rng, pairs, expert, weight);
            code = mz_trace_write_call(writer, &call, err);
        }
    if (code == MZ_OK)
        code = mz_trace_writer_close(&writer, err);
    free(expert);
    free(weight);
    return code;
}

static mz_code read_all(const char *path, const char *what, int64_t *counted, mz_err *err) {
    mz_trace *trace;
    timing from = now();
    mz_code code = mz_trace_open(path, &trace, err);
    if (code != MZ_OK)
        return code;
    const mz_trace_call *calls;
    int64_t n = mz_trace_calls(trace, &calls), most = 0, pairs = 0;
    for (int64_t i = 0; i < n; i++) {
        most = calls[i].pairs > most ? calls[i].pairs : most;
        pairs += calls[i].pairs;
    }
    uint16_t *expert = mz_calloc((size_t)most, sizeof *expert);
    float *weight = mz_calloc((size_t)most, sizeof *weight);
    mz_trace_pairs_out out = {.expert = expert, .weight = weight};
    if (!expert || !weight)
        code = mz_fail_nomem(err, "the benchmark");
    for (int64_t i = 0; i < n && code == MZ_OK; i++)
        code = mz_trace_read_pairs(trace, i, 0, calls[i].tokens, &out, err);
    mz_trace_close(&trace);
    report(what, pairs, from);
    *counted = pairs;
    free(expert);
    free(weight);
    return code;
}

static mz_code stream_all(const char *path, const char *what, mz_stream_options options,
                          int64_t pairs, mz_err *err) {
    mz_trace *trace;
    mz_stream *stream = NULL;
    timing from = now();
    mz_code code = mz_trace_open(path, &trace, err);
    if (code != MZ_OK)
        return code;
    code = mz_stream_open(trace, &options, &stream, err);
    if (code == MZ_OK) {
        mz_load_source source = mz_stream_source(stream);
        mz_step_head head;
        mz_layer_call call;
        bool end;
        code = source.next_step(source.self, &head, &end, err);
        for (int i = 0; i < head.micro_batches * head.layers && code == MZ_OK; i++)
            code = source.next_call(source.self, &call, err);
    }
    mz_stream_close(&stream);
    mz_trace_close(&trace);
    report(what, pairs, from);
    return code;
}

static mz_code measure(const char *path, int deflate, int64_t tokens, mz_err *err) {
    int64_t pairs = 0;
    char what[64];
    const char *kind = deflate ? "compressed" : "uncompressed";
    timing from = now();
    mz_code code = write_trace(path, tokens, deflate, err);
    snprintf(what, sizeof what, "write (and make up), %s", kind);
    report(what, tokens * TOP_K * LAYERS * RANKS, from);
    snprintf(what, sizeof what, "read ids and weights, %s", kind);
    for (int i = 0; i < 2 && code == MZ_OK; i++)
        code = read_all(path, what, &pairs, err);
    mz_stream_options options = {0};
    snprintf(what, sizeof what, "loads of one step, %s", kind);
    if (code == MZ_OK)
        code = stream_all(path, what, options, pairs, err);
    options.read_ahead = true;
    snprintf(what, sizeof what, "loads of one step, %s, reading ahead", kind);
    if (code == MZ_OK)
        code = stream_all(path, what, options, pairs, err);
    options.want_pairs = options.want_weights = true;
    snprintf(what, sizeof what, "loads and pairs, %s, reading ahead", kind);
    if (code == MZ_OK)
        code = stream_all(path, what, options, pairs, err);
    options.ranks = 48;
    snprintf(what, sizeof what, "... dealt to 48 ranks, %s", kind);
    if (code == MZ_OK)
        code = stream_all(path, what, options, pairs, err);
    return code;
}

int main(int argc, char **argv) {
    mz_err err;
    char path[4096];
    double millions = argc > 1 ? atof(argv[1]) : 48;
    int64_t tokens = (int64_t)(millions * 1e6) / ((int64_t)LAYERS * RANKS * TOP_K);
    if (tokens < 1)
        tokens = 1;
    snprintf(path, sizeof path, "%s", argc > 2 ? argv[2] : P_tmpdir "/mizan-bench-trace.h5");
    printf("%d layers, %d ranks, %d experts, top-%d, %.1f M pairs (uint8 id, float16 weight)\n",
           LAYERS, RANKS, EXPERTS, TOP_K, 1e-6 * (double)(tokens * TOP_K * LAYERS * RANKS));
    mz_code code = measure(path, 0, tokens, &err);
    if (code == MZ_OK)
        code = measure(path, 4, tokens, &err);
    unlink(path);
    if (code != MZ_OK)
        fprintf(stderr, "bench_trace: %s\n", err.msg);
    return mz_exit_code(code);
}
