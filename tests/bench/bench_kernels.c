/* Host kernels against this machine's own ceilings, measured in the same run: copies of memory, and
 * one large OpenBLAS product, both with as many threads as the kernels have. Beside each kernel
 * stand the bytes that it cannot avoid to move, or its FLOPs; ratios are of best runs, which
 * alternate with those of the ceiling. */
#include "kernels/kernels.h"

#include <cblas.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern void openblas_set_num_threads(int threads);
extern int openblas_get_num_threads(void);

enum { RUNS = 7, THREADS_MOST = 256 };

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static mz_kernels *kernels;
static int threads;

/* ---- memory: one arena of the program's life, touched ------------------------------------------
 */

static void *room(size_t bytes, int fill) {
    void *memory;
    if (mz_kernels_alloc(kernels, bytes, &memory) != MZ_K_OK) {
        fprintf(stderr, "bench_kernels: %s\n", mz_kernels_error(kernels));
        exit(4);
    }
    memset(memory, fill, bytes);
    return memory;
}

static float *floats(int64_t n) {
    float *x = room(sizeof *x * (size_t)n, 0);
    uint32_t state = 1;
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-24f - 0.5f;
    }
    return x;
}

static void *halves(int64_t n) {
    float *x = floats(n);
    void *h = room(2 * (size_t)n, 0);
    mz_convert(kernels, 0, MZ_BF16, h, MZ_F32, x, n);
    mz_kernels_free(kernels, x);
    return h;
}

/* ---- ceilings -----------------------------------------------------------------------------------
 */

enum { COPY_BYTES = 96 << 20 };
static char *copy_from, *copy_to;

static void *copy_part(void *part) {
    const size_t size = (size_t)COPY_BYTES / (size_t)threads, at = *(const int *)part * size;
    memcpy(copy_to + at, copy_from + at, size);
    return NULL;
}

static double copy_once(void) {
    pthread_t thread[THREADS_MOST];
    int part[THREADS_MOST];
    const double start = seconds();
    for (int i = 1; i < threads; i++) {
        part[i] = i;
        pthread_create(&thread[i], NULL, copy_part, &part[i]);
    }
    part[0] = 0;
    copy_part(&part[0]);
    for (int i = 1; i < threads; i++)
        pthread_join(thread[i], NULL);
    return seconds() - start;
}

enum { ROWS = 2048, WIDE = 1024, EXPERTS = 8 };
static float *dense_a, *dense_b, *dense_c;

static double product_once(void) {
    openblas_set_num_threads(threads);
    const double start = seconds();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, ROWS, WIDE, WIDE, 1, dense_a, WIDE,
                dense_b, WIDE, 0, dense_c, WIDE);
    const double time = seconds() - start;
    openblas_set_num_threads(1); /* as the kernels want it */
    return time;
}

/* ---- one row of the table -----------------------------------------------------------------------
 */

typedef mz_kstatus (*operation)(const void *args, void *workspace);

static double once(operation run, const void *args, void *workspace) {
    const double start = seconds();
    if (run(args, workspace) != MZ_K_OK) {
        fprintf(stderr, "bench_kernels: %s\n", mz_kernels_error(kernels));
        exit(4);
    }
    return seconds() - start;
}

/* amount: bytes or FLOPs of the kernel; ceiling: of one run of the ceiling. */
static void measure(const char *name, operation run, const void *args, size_t scratch,
                    double amount, double (*ceiling)(void), double ceiling_amount, const char *unit,
                    int wanted, const char *note) {
    void *workspace = scratch > 0 ? room(scratch, 0) : NULL;
    double best = 1e30, top = 1e30;
    for (int i = 0; i < RUNS; i++) {
        const double c = ceiling(), t = once(run, args, workspace);
        best = t < best ? t : best;
        top = c < top ? c : top;
    }
    mz_kernels_free(kernels, workspace);
    const double rate = amount / best, most = ceiling_amount / top;
    printf("%-34s %8.2f ms %7.1f %s of %7.1f: %4.0f %% (wanted: %d %%)  %s\n", name, 1e3 * best,
           rate / 1e9, unit, most / 1e9, 100 * rate / most, wanted, note);
    fflush(stdout);
}

static void memory_row(const char *name, operation run, const void *args, size_t scratch,
                       double bytes, const char *note) {
    measure(name, run, args, scratch, bytes, copy_once, 2.0 * COPY_BYTES, "GB/s", 75, note);
}

/* ---- products -----------------------------------------------------------------------------------
 */

static mz_kstatus run_product(const void *args, void *workspace) {
    return mz_grouped_gemm(kernels, 0, args, workspace);
}

static mz_kstatus run_up(const void *args, void *workspace) {
    return mz_expert_up_forward(kernels, 0, args, workspace);
}

static void products(mz_dtype type, const int64_t *begin, const char *load) {
    const int64_t each = (int64_t)WIDE * WIDE;
    void *weight[EXPERTS], *gradient[EXPERTS];
    for (int e = 0; e < EXPERTS; e++) {
        weight[e] = type == MZ_BF16 ? halves(each) : floats(each);
        gradient[e] = room(4 * (size_t)each, 0);
    }
    void *a = type == MZ_BF16 ? halves((int64_t)ROWS * WIDE) : floats((int64_t)ROWS * WIDE);
    void *c = room(4 * (size_t)ROWS * WIDE, 0);
    const char *names[] = {"forward", "dgrad", "wgrad"};
    for (int op = MZ_PRODUCT_FORWARD; op <= MZ_PRODUCT_WGRAD; op++) {
        const mz_product_args args = {.op = op,
                                      .groups = {begin, EXPERTS, ROWS, begin},
                                      .n = WIDE,
                                      .k = WIDE,
                                      .type = type,
                                      .gradient_type = MZ_F32,
                                      .a = a,
                                      .weight = op == MZ_PRODUCT_WGRAD ? gradient : weight,
                                      .c = c};
        char name[80], note[80];
        const double flops = 2.0 * ROWS * WIDE * WIDE;
        snprintf(name, sizeof name, "%s, %s, %s", names[op], type == MZ_BF16 ? "bf16" : "fp32",
                 load);
        snprintf(note, sizeof note, "2 rows n k = %.2f GFLOP", flops / 1e9);
        measure(name, run_product, &args, mz_grouped_gemm_workspace(kernels, &args), flops,
                product_once, flops, "GF/s", 85, note);
    }
    const mz_expert_up up = {.groups = {begin, EXPERTS, ROWS, begin},
                             .hidden = WIDE,
                             .intermediate = WIDE / 2,
                             .type = type,
                             .x = a,
                             .weight = weight,
                             .h = c};
    const double flops = 2.0 * ROWS * WIDE * WIDE;
    char name[80];
    snprintf(name, sizeof name, "up with SwiGLU, %s, %s", type == MZ_BF16 ? "bf16" : "fp32", load);
    measure(name, run_up, &up, mz_expert_up_workspace(kernels, &up), flops, product_once, flops,
            "GF/s", 85, "4 rows H I, activation included");
    for (int e = 0; e < EXPERTS; e++) {
        mz_kernels_free(kernels, weight[e]);
        mz_kernels_free(kernels, gradient[e]);
    }
    mz_kernels_free(kernels, a);
    mz_kernels_free(kernels, c);
}

/* ---- rows ---------------------------------------------------------------------------------------
 */

enum { TOKENS = 8192, K = 4, HIDDEN = 2048, PAIRS = TOKENS * K };

static mz_kstatus run_norms(const void *args, void *workspace) {
    (void)workspace;
    return mz_row_norms(kernels, 0, args);
}
static mz_kstatus run_score(const void *args, void *workspace) {
    (void)workspace;
    return mz_score_pairs(kernels, 0, args);
}
static mz_kstatus run_select(const void *args, void *workspace) {
    return mz_select_pairs(kernels, 0, args, workspace);
}
static mz_kstatus run_pack(const void *args, void *workspace) {
    (void)workspace;
    return mz_pack_rows(kernels, 0, args);
}
static mz_kstatus run_unpack(const void *args, void *workspace) {
    (void)workspace;
    return mz_unpack_rows(kernels, 0, args);
}
static mz_kstatus run_combine(const void *args, void *workspace) {
    (void)workspace;
    return mz_combine_rows(kernels, 0, args);
}
static mz_kstatus run_swiglu(const void *args, void *workspace) {
    (void)workspace;
    return mz_swiglu_forward(kernels, 0, args);
}
static mz_kstatus run_swiglu_back(const void *args, void *workspace) {
    (void)workspace;
    return mz_swiglu_backward(kernels, 0, args);
}

static void rows(void) {
    const double row = 2.0 * HIDDEN;
    void *x = halves((int64_t)PAIRS * HIDDEN), *out = room((size_t)PAIRS * HIDDEN * 2, 0);
    float *factor = floats(PAIRS), *score = room(4 * PAIRS, 0);
    int64_t *list = room(8 * PAIRS, 0);
    for (int64_t i = 0; i < PAIRS; i++) /* as grouped by expert: scattered */
        list[i] = i * 4099 % PAIRS;
    const mz_norms norms = {MZ_BF16, x, PAIRS, HIDDEN, HIDDEN, score};
    memory_row("row norms, bf16", run_norms, &norms, 0, PAIRS * (row + 4), "rows (2 H + 4)");
    const mz_score_args scoring = {.kind = MZ_SCORED_DOWN,
                                   .tokens = PAIRS / 4,
                                   .pairs = PAIRS,
                                   .k = 4,
                                   .weight = factor,
                                   .grad_norm2 = factor,
                                   .hidden_norm2 = factor,
                                   .score = score};
    memory_row("scores", run_score, &scoring, 0, PAIRS * 13.0, "13 a pair (in cache)");
    const int64_t begin[2] = {0, PAIRS}, quota[1] = {PAIRS / 2};
    const mz_selection selection = {.score = score,
                                    .order = list,
                                    .begin = begin,
                                    .quota = quota,
                                    .pairs = PAIRS,
                                    .experts = 1,
                                    .kept = room(8 * PAIRS, 0),
                                    .kept_begin = room(16, 0)};
    memory_row("selection, one expert", run_select, &selection,
               mz_select_workspace(kernels, &selection), PAIRS * 16.0,
               "16 a pair (in cache, one thread; no target)");
    mz_pack pack = {.type = MZ_BF16,
                    .x = x,
                    .hidden = HIDDEN,
                    .rows = PAIRS,
                    .row_pair = list,
                    .k = 1,
                    .out = out};
    memory_row("pack, bf16", run_pack, &pack, 0, PAIRS * 2 * row, "rows 4 H");
    pack.scale = factor;
    memory_row("pack with weights, bf16", run_pack, &pack, 0, PAIRS * 2 * row, "rows 4 H");
    const mz_unpack unpack = {MZ_BF16, x, HIDDEN, PAIRS, list, out};
    memory_row("unpack, bf16", run_unpack, &unpack, 0, PAIRS * 2 * row, "pairs 4 H");
    const mz_combine combine = {.type = MZ_BF16,
                                .row = x,
                                .hidden = HIDDEN,
                                .tokens = TOKENS,
                                .k = K,
                                .position = list,
                                .scale = factor,
                                .out = out};
    memory_row("combine of 4, bf16", run_combine, &combine, 0, TOKENS * (K + 1) * row,
               "tokens (k + 1) 2 H");
    mz_swiglu activation = {.type = MZ_BF16,
                            .rows = PAIRS,
                            .intermediate = HIDDEN / 2,
                            .gate_up = x,
                            .h = out,
                            .norm2 = score};
    memory_row("SwiGLU, bf16", run_swiglu, &activation, 0, PAIRS * row * 1.5, "rows 6 I");
    activation.h = NULL;
    activation.dh = out;
    activation.dgate_up = x;
    memory_row("SwiGLU backward, bf16", run_swiglu_back, &activation, 0, PAIRS * row * 2.5,
               "rows 10 I");
    void *all[] = {x, out, factor, score, list, selection.kept, selection.kept_begin};
    for (int i = 0; i < 7; i++)
        mz_kernels_free(kernels, all[i]);
}

/* ---- optimizers ---------------------------------------------------------------------------------
 */

static mz_kstatus run_update(const void *args, void *workspace) {
    return mz_update_step(kernels, 0, args, workspace);
}

static void updates(void) {
    enum { MATRICES = 8, TALL = 2048, SHORT = 768 };
    const int64_t n = (int64_t)MATRICES * TALL * SHORT;
    const struct {
        const char *name;
        mz_update_kind kind;
        bool momentum, factored;
        mz_rounding rounding;
        double bytes;
        const char *note;
    } list[] = {
        {"SkewAdam, experts, nearest", MZ_UPDATE_SKEWADAM, false, true, MZ_ROUND_NEAREST, 8,
         "8 a value: g twice, p"},
        {"SkewAdam, experts, dither", MZ_UPDATE_SKEWADAM, false, true, MZ_ROUND_DITHER, 8,
         "8 a value: g twice, p"},
        {"SkewAdam, experts, stochastic", MZ_UPDATE_SKEWADAM, false, true, MZ_ROUND_STOCHASTIC, 8,
         "8 a value: g twice, p"},
        {"SkewAdam, backbone, dither", MZ_UPDATE_SKEWADAM, true, true, MZ_ROUND_DITHER, 18,
         "18 a value: g, m in and out, m, p"},
        {"SkewAdam, full v, nearest", MZ_UPDATE_SKEWADAM, false, false, MZ_ROUND_NEAREST, 20,
         "20 a value: g twice, v in and out, v, p"},
        {"AdamW, nearest", MZ_UPDATE_ADAMW, true, false, MZ_ROUND_NEAREST, 22,
         "22 a value: g, m, v, p"},
        {"AdamW, dither", MZ_UPDATE_ADAMW, true, false, MZ_ROUND_DITHER, 22,
         "22 a value: g, m, v, p"},
        {"Adafactor", MZ_UPDATE_ADAFACTOR, false, true, MZ_ROUND_NEAREST, 8,
         "8 a value: g twice, p"},
        {"Lion, nearest", MZ_UPDATE_LION, true, false, MZ_ROUND_NEAREST, 14, "14 a value: g, m, p"},
    };
    mz_update a = {.matrices = MATRICES,
                   .rows = TALL,
                   .cols = SHORT,
                   .type = MZ_BF16,
                   .gradient_type = MZ_BF16,
                   .parameter = halves(n),
                   .gradient = halves(n),
                   .rate = 1e-5f,
                   .beta1 = 0.9f,
                   .beta2 = 0.999f,
                   .eps = 1e-8f,
                   .step = 5,
                   .clip_rms = true,
                   .m = room(4 * (size_t)n, 0),
                   .v = room(4 * (size_t)n, 0),
                   .row = room(4 * MATRICES * TALL, 0),
                   .col = room(4 * MATRICES * SHORT, 0)};
    float *const m = a.m, *const v = a.v;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        a.kind = list[i].kind;
        a.momentum = list[i].momentum;
        a.factored = list[i].factored;
        a.rounding = list[i].rounding;
        a.m = list[i].momentum ? m : NULL;
        a.v = list[i].factored ? NULL : v;
        memory_row(list[i].name, run_update, &a, mz_update_workspace(kernels, &a),
                   list[i].bytes * (double)n, list[i].note);
    }
}

int main(void) {
    const mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .streams = 1};
    char message[300];
    threads = openblas_get_num_threads();
    threads = threads > THREADS_MOST ? THREADS_MOST : threads;
    mz_kernels_options o = options;
    o.threads = threads;
    if (mz_kernels_open(&o, &kernels, message, sizeof message) != MZ_K_OK) {
        fprintf(stderr, "bench_kernels: %s\n", message);
        return 4;
    }
    printf("%s\n", mz_kernels_describe(kernels));
    copy_from = room(COPY_BYTES, 1);
    copy_to = room(COPY_BYTES, 2);
    dense_a = floats((int64_t)ROWS * WIDE);
    dense_b = floats((int64_t)WIDE * WIDE);
    dense_c = floats((int64_t)ROWS * WIDE);
    const int64_t even[EXPERTS + 1] = {0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048};
    const int64_t skewed[EXPERTS + 1] = {0, 128, 256, 384, 512, 1152, 1280, 1408, 2048};
    products(MZ_F32, even, "even");
    products(MZ_F32, skewed, "skewed");
    products(MZ_BF16, even, "even");
    rows();
    updates();
    mz_kernels_close(&kernels);
    return 0;
}
