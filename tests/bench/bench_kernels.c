/* Host kernels against this machine's own ceilings, measured in the same run: copies of memory, and
 * one large OpenBLAS product, both with as many threads as the kernels have. Beside each kernel
 * stand the bytes that it cannot avoid to move, or its FLOPs; ratios are of best runs, which
 * alternate with those of the ceiling. "In cache" is what the same loops do on the same threads
 * with data that fit the last-level cache, as a share of the same ceiling: arithmetic alone holds a
 * kernel up where this is below what is wanted. What was timed is checked (bench_kernels_check.c).
 */
#include "tests/bench/bench_kernels.h"

#include <cblas.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern void openblas_set_num_threads(int threads);
extern int openblas_get_num_threads(void);

enum { RUNS = 9, THREADS_MOST = 256 };

double bench_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void bench_must(const bench *b, mz_kstatus status) {
    if (status == MZ_K_OK)
        return;
    fprintf(stderr, "bench_kernels: %s\n", mz_kernels_error(b->kernels));
    exit(4);
}

void *bench_room(const bench *b, size_t bytes, int fill) {
    void *memory;
    bench_must(b, mz_kernels_alloc(b->kernels, bytes, &memory));
    memset(memory, fill, bytes);
    return memory;
}

float *bench_floats(const bench *b, int64_t n) {
    float *x = bench_room(b, sizeof *x * (size_t)n, 0);
    uint32_t state = 1;
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-24f - 0.5f;
    }
    return x;
}

void *bench_halves(const bench *b, int64_t n) {
    float *x = bench_floats(b, n);
    void *h = bench_room(b, 2 * (size_t)n, 0);
    bench_must(b, mz_convert(b->kernels, 0, MZ_BF16, h, MZ_F32, x, n));
    mz_kernels_free(b->kernels, x);
    return h;
}

/* ---- ceilings -----------------------------------------------------------------------------------
 */

enum { COPY_BYTES = 96 << 20 };

typedef struct ceilings {
    int threads;
    char *from, *to;
    float *a, *b, *c; /* of the product */
} ceilings;

typedef struct copying {
    const ceilings *all;
    int part;
} copying;

static void *copy_part(void *argument) {
    const copying *c = argument;
    const size_t size = (size_t)COPY_BYTES / (size_t)c->all->threads, at = (size_t)c->part * size;
    memcpy(c->all->to + at, c->all->from + at, size);
    return NULL;
}

static double copy_once(const ceilings *top) {
    pthread_t thread[THREADS_MOST];
    copying part[THREADS_MOST];
    const double start = bench_seconds();
    for (int i = 0; i < top->threads; i++) {
        part[i] = (copying){top, i};
        if (i > 0)
            pthread_create(&thread[i], NULL, copy_part, &part[i]);
    }
    copy_part(&part[0]);
    for (int i = 1; i < top->threads; i++)
        pthread_join(thread[i], NULL);
    return bench_seconds() - start;
}

enum { ROWS = 2048, WIDE = 1024, EXPERTS = 8, SPIN_MS = 100 };

/* OpenBLAS's threads look for work some 20 ms after a product: until they sleep, the threads of
 * the kernels would share what cores are left. */
static double product_once(const ceilings *top) {
    openblas_set_num_threads(top->threads);
    const double start = bench_seconds();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, ROWS, WIDE, WIDE, 1, top->a, WIDE, top->b,
                WIDE, 0, top->c, WIDE);
    const double time = bench_seconds() - start;
    openblas_set_num_threads(1); /* as the kernels want it */
    nanosleep(&(struct timespec){0, SPIN_MS * 1000000L}, NULL);
    return time;
}

/* ---- one row of the table -----------------------------------------------------------------------
 */

typedef mz_kstatus (*operation)(mz_kernels *kernels, const void *args, void *workspace);

typedef struct table {
    const bench *b;
    ceilings top;
} table;

static double once(const bench *b, mz_kernels *kernels, operation run, const void *args,
                   void *workspace) {
    const double start = bench_seconds();
    bench_must(b, run(kernels, args, workspace));
    return bench_seconds() - start;
}

typedef struct kernel {
    const char *name;
    operation run;
    const void *args;
    size_t scratch;
    double amount; /* bytes or FLOPs */
    const char *note;
    const void *small; /* arguments whose data fit the caches; NULL: none */
    double small_amount;
} kernel;

/* Best rate on the small arguments. */
static double in_cache(const table *t, const kernel *k, void *workspace) {
    double best = 1e30;
    for (int i = 0; i < 5 * RUNS; i++) {
        const double time = once(t->b, t->b->kernels, k->run, k->small, workspace);
        best = time < best ? time : best;
    }
    return k->small_amount / best;
}

static void measure(const table *t, kernel k, double (*ceiling)(const ceilings *), double most,
                    const char *unit, int wanted) {
    void *workspace = k.scratch > 0 ? bench_room(t->b, k.scratch, 0) : NULL;
    /* first: small and large arguments write to the same memory, and the large are checked */
    const double cached = k.small ? in_cache(t, &k, workspace) : 0;
    double best = 1e30, top = 1e30;
    for (int i = 0; i < RUNS; i++) {
        const double c = ceiling(&t->top),
                     time = once(t->b, t->b->kernels, k.run, k.args, workspace);
        best = time < best ? time : best;
        top = c < top ? c : top;
    }
    const double rate = k.amount / best;
    most /= top;
    printf("%-34s %8.2f ms %7.1f %s of %7.1f: %4.0f %% (wanted: %d %%", k.name, 1e3 * best,
           rate / 1e9, unit, most / 1e9, 100 * rate / most, wanted);
    if (k.small)
        printf("; in cache: %.0f %%", 100 * cached / most);
    printf(")  %s\n", k.note);
    fflush(stdout);
    mz_kernels_free(t->b->kernels, workspace);
}

static void memory_row(const table *t, kernel k) {
    measure(t, k, copy_once, 2.0 * COPY_BYTES, "GB/s", 75);
}

/* ---- products -----------------------------------------------------------------------------------
 */

static mz_kstatus run_product(mz_kernels *kernels, const void *args, void *workspace) {
    return mz_grouped_gemm(kernels, 0, args, workspace);
}

static mz_kstatus run_up(mz_kernels *kernels, const void *args, void *workspace) {
    return mz_expert_up_forward(kernels, 0, args, workspace);
}

/* What both kinds of product work on: operands of one load. */
typedef struct operands {
    const char *load;
    const int64_t *begin; /* [EXPERTS + 1] */
    mz_dtype type;
    void *a, *c;
    void *weight[EXPERTS], *gradient[EXPERTS];
} operands;

static void make_operands(const bench *b, operands *o) {
    const int64_t each = (int64_t)WIDE * WIDE, rows = (int64_t)ROWS * WIDE;
    for (int e = 0; e < EXPERTS; e++) {
        o->weight[e] = o->type == MZ_BF16 ? bench_halves(b, each) : bench_floats(b, each);
        o->gradient[e] = bench_room(b, 4 * (size_t)each, 0);
    }
    o->a = o->type == MZ_BF16 ? bench_halves(b, rows) : bench_floats(b, rows);
    o->c = bench_room(b, 4 * (size_t)rows, 0);
}

static void free_operands(const bench *b, operands *o) {
    for (int e = 0; e < EXPERTS; e++) {
        mz_kernels_free(b->kernels, o->weight[e]);
        mz_kernels_free(b->kernels, o->gradient[e]);
    }
    mz_kernels_free(b->kernels, o->a);
    mz_kernels_free(b->kernels, o->c);
}

static const double product_flops = 2.0 * ROWS * WIDE * WIDE;

/* `k`: what is run, but for its name and its amount. */
static void measure_product(const table *t, const operands *o, const char *what, kernel k) {
    char name[80];
    snprintf(name, sizeof name, "%s, %s, %s", what, o->type == MZ_BF16 ? "bf16" : "fp32", o->load);
    k.name = name;
    k.amount = product_flops;
    measure(t, k, product_once, product_flops, "GF/s", 85);
}

static void one_product(const table *t, operands *o, mz_product op) {
    static const char *const names[] = {"forward", "dgrad", "wgrad"};
    const mz_product_args args = {.op = op,
                                  .groups = {o->begin, EXPERTS, ROWS, o->begin},
                                  .n = WIDE,
                                  .k = WIDE,
                                  .type = o->type,
                                  .gradient_type = MZ_F32,
                                  .a = o->a,
                                  .weight = op == MZ_PRODUCT_WGRAD ? o->gradient : o->weight,
                                  .c = o->c};
    char note[80];
    snprintf(note, sizeof note, "2 rows n k = %.2f GFLOP", product_flops / 1e9);
    measure_product(t, o, names[op],
                    (kernel){.run = run_product,
                             .args = &args,
                             .scratch = mz_grouped_gemm_workspace(t->b->kernels, &args),
                             .note = note});
    check_product(&args);
}

static void up_product(const table *t, operands *o) {
    const mz_expert_up up = {.groups = {o->begin, EXPERTS, ROWS, o->begin},
                             .hidden = WIDE,
                             .intermediate = WIDE / 2,
                             .type = o->type,
                             .x = o->a,
                             .weight = o->weight,
                             .h = o->c};
    measure_product(t, o, "up with SwiGLU",
                    (kernel){.run = run_up,
                             .args = &up,
                             .scratch = mz_expert_up_workspace(t->b->kernels, &up),
                             .note = "4 rows H I, activation included"});
}

static void products(const table *t, mz_dtype type, const int64_t *begin, const char *load) {
    operands o = {.load = load, .begin = begin, .type = type};
    make_operands(t->b, &o);
    for (int op = MZ_PRODUCT_FORWARD; op <= MZ_PRODUCT_WGRAD; op++)
        one_product(t, &o, (mz_product)op);
    up_product(t, &o);
    free_operands(t->b, &o);
}

/* ---- rows ---------------------------------------------------------------------------------------
 */

enum { TOKENS = 8192, K = 4, HIDDEN = 2048, PAIRS = TOKENS * K };

static mz_kstatus run_norms(mz_kernels *kernels, const void *args, void *workspace) {
    (void)workspace;
    return mz_row_norms(kernels, 0, args);
}
static mz_kstatus run_score(mz_kernels *kernels, const void *args, void *workspace) {
    (void)workspace;
    return mz_score_pairs(kernels, 0, args);
}
static mz_kstatus run_select(mz_kernels *kernels, const void *args, void *workspace) {
    return mz_select_pairs(kernels, 0, args, workspace);
}
static mz_kstatus run_pack(mz_kernels *kernels, const void *args, void *workspace) {
    (void)workspace;
    return mz_pack_rows(kernels, 0, args);
}
static mz_kstatus run_unpack(mz_kernels *kernels, const void *args, void *workspace) {
    (void)workspace;
    return mz_unpack_rows(kernels, 0, args);
}
static mz_kstatus run_combine(mz_kernels *kernels, const void *args, void *workspace) {
    (void)workspace;
    return mz_combine_rows(kernels, 0, args);
}
static mz_kstatus run_swiglu(mz_kernels *kernels, const void *args, void *workspace) {
    (void)workspace;
    return mz_swiglu_forward(kernels, 0, args);
}
static mz_kstatus run_swiglu_back(mz_kernels *kernels, const void *args, void *workspace) {
    (void)workspace;
    return mz_swiglu_backward(kernels, 0, args);
}

/* What the rows of the table are about; a few of the rows fit the caches. */
typedef struct rows_data {
    void *x, *out;
    float *factor, *score;
    int64_t *list;       /* all numbers below PAIRS, scattered as if grouped by expert */
    int64_t *small_list; /* those below FEW */
} rows_data;

enum { FEW = 512 };

static float *magnitudes(const bench *b, int64_t n) {
    float *x = bench_floats(b, n);
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] < 0 ? -x[i] : x[i];
    return x;
}

static rows_data make_rows(const bench *b) {
    rows_data d = {.x = bench_halves(b, (int64_t)PAIRS * HIDDEN),
                   .out = bench_room(b, (size_t)PAIRS * HIDDEN * 2, 0),
                   .factor = magnitudes(b, PAIRS),
                   .score = bench_room(b, 4 * PAIRS, 0),
                   .list = bench_room(b, 8 * PAIRS, 0),
                   .small_list = bench_room(b, 8 * FEW, 0)};
    for (int64_t i = 0; i < PAIRS; i++)
        d.list[i] = i * 4099 % PAIRS;
    for (int64_t i = 0; i < FEW; i++)
        d.small_list[i] = i * 37 % FEW;
    return d;
}

static void norm_rows(const table *t, const rows_data *d) {
    const double row = 2.0 * HIDDEN;
    const mz_norms norms = {MZ_BF16, d->x, PAIRS, HIDDEN, HIDDEN, d->score};
    mz_norms few = norms;
    few.rows = FEW;
    memory_row(t, (kernel){"row norms, bf16", run_norms, &norms, 0, PAIRS * (row + 4),
                           "rows (2 H + 4)", &few, FEW * (row + 4)});
    check_norms(&norms);
}

/* Pairs of a step of 131072 tokens. Those of 8192 would be scored before a thread is awake. */
enum { STEP_K = 8, STEP_PAIRS = 131072 * STEP_K, STEP_FEW = STEP_PAIRS / 16 };

static void scoring_rows(const table *t, const rows_data *d) {
    const bench *b = t->b;
    const double pair = 12 + 4.0 / STEP_K;
    const mz_score_args scoring = {.kind = MZ_SCORED_DOWN,
                                   .tokens = STEP_PAIRS / STEP_K,
                                   .pairs = STEP_PAIRS,
                                   .k = STEP_K,
                                   .weight = magnitudes(b, STEP_PAIRS),
                                   .grad_norm2 = magnitudes(b, STEP_PAIRS / STEP_K),
                                   .hidden_norm2 = magnitudes(b, STEP_PAIRS),
                                   .score = bench_room(b, 4 * STEP_PAIRS, 0)};
    mz_score_args few = scoring;
    few.tokens = STEP_FEW / STEP_K;
    few.pairs = STEP_FEW;
    memory_row(t, (kernel){"scores", run_score, &scoring, 0, STEP_PAIRS * pair,
                           "12 + 4 / k a pair, k 8", &few, STEP_FEW * pair});
    check_scores(&scoring);
    const int64_t begin[2] = {0, PAIRS}, quota[1] = {PAIRS / 2};
    const mz_selection selection = {.score = scoring.score,
                                    .order = d->list,
                                    .begin = begin,
                                    .quota = quota,
                                    .pairs = PAIRS,
                                    .experts = 1,
                                    .kept = bench_room(b, 8 * PAIRS, 0),
                                    .kept_begin = bench_room(b, 16, 0)};
    memory_row(t, (kernel){"selection, one expert", run_select, &selection,
                           mz_select_workspace(b->kernels, &selection), PAIRS * 16.0,
                           "16 a pair (in cache, one thread; no target)", NULL, 0});
    check_selection(&selection);
    void *const buffers[] = {(void *)(uintptr_t)scoring.weight,
                             (void *)(uintptr_t)scoring.grad_norm2,
                             (void *)(uintptr_t)scoring.hidden_norm2,
                             scoring.score,
                             selection.kept,
                             selection.kept_begin};
    for (int i = 0; i < 6; i++)
        mz_kernels_free(b->kernels, buffers[i]);
}

static void moving_rows(const table *t, const rows_data *d) {
    const double row = 2.0 * HIDDEN;
    mz_pack pack = {.type = MZ_BF16,
                    .x = d->x,
                    .hidden = HIDDEN,
                    .rows = PAIRS,
                    .row_pair = d->list,
                    .k = 1,
                    .out = d->out};
    mz_pack few = pack;
    few.rows = FEW;
    few.row_pair = d->small_list;
    for (int weighted = 0; weighted < 2; weighted++) {
        pack.scale = few.scale = weighted ? d->factor : NULL;
        memory_row(t, (kernel){weighted ? "pack with weights, bf16" : "pack, bf16", run_pack, &pack,
                               0, PAIRS * 2 * row, "rows 4 H", &few, FEW * 2 * row});
        check_pack(&pack);
    }
    const mz_unpack unpack = {MZ_BF16, d->x, HIDDEN, PAIRS, d->list, d->out};
    mz_unpack some = unpack;
    some.pairs = FEW;
    some.position = d->small_list;
    memory_row(t, (kernel){"unpack, bf16", run_unpack, &unpack, 0, PAIRS * 2 * row, "pairs 4 H",
                           &some, FEW * 2 * row});
    check_unpack(&unpack);
    const mz_combine combine = {.type = MZ_BF16,
                                .row = d->x,
                                .hidden = HIDDEN,
                                .tokens = TOKENS,
                                .k = K,
                                .position = d->list,
                                .scale = d->factor,
                                .out = d->out};
    mz_combine small = combine;
    small.tokens = FEW / K;
    small.position = d->small_list;
    memory_row(t, (kernel){"combine of 4, bf16", run_combine, &combine, 0, TOKENS * (K + 1) * row,
                           "tokens (k + 1) 2 H", &small, FEW / K * (K + 1) * row});
    check_combine(&combine);
}

static void activation_rows(const table *t, const rows_data *d) {
    const double row = 2.0 * HIDDEN;
    mz_swiglu args = {.type = MZ_BF16,
                      .rows = PAIRS,
                      .intermediate = HIDDEN / 2,
                      .gate_up = d->x,
                      .h = d->out,
                      .norm2 = d->score};
    mz_swiglu few = args;
    few.rows = FEW;
    memory_row(t, (kernel){"SwiGLU, bf16", run_swiglu, &args, 0, PAIRS * row * 1.5, "rows 6 I",
                           &few, FEW * row * 1.5});
    check_swiglu(&args);
    args.h = few.h = NULL;
    args.dh = few.dh = d->out;
    args.dgate_up = few.dgate_up = d->x;
    const size_t bytes = (size_t)PAIRS * HIDDEN * 2;
    memory_row(t, (kernel){"SwiGLU backward, bf16", run_swiglu_back, &args, 0, PAIRS * row * 2.5,
                           "rows 10 I, in place", &few, FEW * row * 2.5});
    void *before = bench_halves(t->b, (int64_t)PAIRS * HIDDEN);
    memcpy(d->x, before, bytes);
    bench_must(t->b, mz_swiglu_backward(t->b->kernels, 0, &args));
    check_swiglu_back(&args, before);
    mz_kernels_free(t->b->kernels, before);
}

static void rows(const table *t) {
    rows_data d = make_rows(t->b);
    norm_rows(t, &d);
    scoring_rows(t, &d);
    moving_rows(t, &d);
    activation_rows(t, &d);
    void *all[] = {d.x, d.out, d.factor, d.score, d.list, d.small_list};
    for (int i = 0; i < 6; i++)
        mz_kernels_free(t->b->kernels, all[i]);
}

/* ---- optimizers ---------------------------------------------------------------------------------
 */

enum { MATRICES = 8, TALL = 2048, SHORT = 768, VALUES = TALL * SHORT };

static mz_kstatus run_update(mz_kernels *kernels, const void *args, void *workspace) {
    return mz_update_step(kernels, 0, args, workspace);
}

typedef struct update_case {
    const char *name;
    mz_update_kind kind;
    bool momentum, factored;
    mz_rounding rounding;
    int bytes; /* a value */
    const char *note;
} update_case;

static const update_case update_cases[] = {
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
    {"AdamW, dither", MZ_UPDATE_ADAMW, true, false, MZ_ROUND_DITHER, 22, "22 a value: g, m, v, p"},
    {"Adafactor", MZ_UPDATE_ADAFACTOR, false, true, MZ_ROUND_NEAREST, 8, "8 a value: g twice, p"},
    {"Lion, nearest", MZ_UPDATE_LION, true, false, MZ_ROUND_NEAREST, 14, "14 a value: g, m, p"}};

/* The state of one kind, zeroed; only what it keeps. */
static void clear_state(mz_update *a, const mz_update *all) {
    const size_t n = (size_t)MATRICES * VALUES * sizeof(float);
    a->m = a->momentum ? all->m : NULL;
    a->v = a->factored ? NULL : all->v;
    memset(all->m, 0, n);
    memset(all->v, 0, n);
    memset(all->row, 0, sizeof(float) * MATRICES * TALL);
    memset(all->col, 0, sizeof(float) * MATRICES * SHORT);
}

static void update_row(const table *t, const update_case *c, const mz_update *all,
                       const uint16_t *before) {
    mz_update a = *all;
    a.kind = c->kind;
    a.momentum = c->momentum;
    a.factored = c->factored;
    a.rounding = c->rounding;
    clear_state(&a, all);
    mz_update small = a;
    small.matrices = 1;
    small.rows = 512;
    const size_t scratch = mz_update_workspace(t->b->kernels, &a);
    memory_row(t, (kernel){c->name, run_update, &a, scratch, (double)c->bytes * MATRICES * VALUES,
                           c->note, &small, (double)c->bytes * (double)small.rows * SHORT});
    a.rate = 0.05f; /* so that it is seen in bf16 */
    a.decay = 0.1f;
    clear_state(&a, all);
    memcpy(a.parameter, before, 2 * (size_t)MATRICES * VALUES);
    void *workspace = scratch > 0 ? bench_room(t->b, scratch, 0) : NULL;
    bench_must(t->b, mz_update_step(t->b->kernels, 0, &a, workspace));
    check_update(&a, before);
    mz_kernels_free(t->b->kernels, workspace);
}

static void updates(const table *t) {
    const bench *b = t->b;
    const int64_t n = (int64_t)MATRICES * VALUES;
    uint16_t *before = bench_halves(b, n);
    const mz_update a = {.matrices = MATRICES,
                         .rows = TALL,
                         .cols = SHORT,
                         .type = MZ_BF16,
                         .gradient_type = MZ_BF16,
                         .parameter = bench_halves(b, n),
                         .gradient = bench_halves(b, n),
                         .rate = 3e-4f,
                         .beta1 = 0.9f,
                         .beta2 = 0.999f,
                         .decay = 0.05f,
                         .eps = 1e-8f,
                         .step = 5,
                         .clip_rms = true,
                         .m = bench_room(b, 4 * (size_t)n, 0),
                         .v = bench_room(b, 4 * (size_t)n, 0),
                         .row = bench_room(b, 4 * MATRICES * TALL, 0),
                         .col = bench_room(b, 4 * MATRICES * SHORT, 0)};
    for (size_t i = 0; i < sizeof update_cases / sizeof *update_cases; i++)
        update_row(t, &update_cases[i], &a, before);
    void *buffers[] = {before, a.parameter, (void *)(uintptr_t)a.gradient, a.m, a.v, a.row, a.col};
    for (int i = 0; i < 7; i++)
        mz_kernels_free(b->kernels, buffers[i]);
}

/* ---- the table ----------------------------------------------------------------------------------
 */

static mz_kernels *open_host(int threads) {
    const mz_kernels_options options = {
        .backend = MZ_BACKEND_HOST, .threads = threads, .streams = 1};
    mz_kernels *kernels;
    char message[300];
    if (mz_kernels_open(&options, &kernels, message, sizeof message) == MZ_K_OK)
        return kernels;
    fprintf(stderr, "bench_kernels: %s\n", message);
    exit(4);
}

static bool wants(int argc, char **argv, const char *part) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], part) == 0)
            return true;
    return argc < 2;
}

/* Arguments: the parts that are wanted, of products, rows, updates, layer; none: all. */
int main(int argc, char **argv) {
    const int all = openblas_get_num_threads();
    bench b = {.threads = all > THREADS_MOST ? THREADS_MOST : all};
    b.kernels = open_host(b.threads);
    printf("%s\n", mz_kernels_describe(b.kernels));
    const table t = {&b,
                     {.threads = b.threads,
                      .from = bench_room(&b, COPY_BYTES, 1),
                      .to = bench_room(&b, COPY_BYTES, 2),
                      .a = bench_floats(&b, (int64_t)ROWS * WIDE),
                      .b = bench_floats(&b, (int64_t)WIDE * WIDE),
                      .c = bench_floats(&b, (int64_t)ROWS * WIDE)}};
    const int64_t even[EXPERTS + 1] = {0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048};
    const int64_t skewed[EXPERTS + 1] = {0, 128, 256, 384, 512, 1152, 1280, 1408, 2048};
    if (wants(argc, argv, "products")) {
        products(&t, MZ_F32, even, "even");
        products(&t, MZ_F32, skewed, "skewed");
        products(&t, MZ_BF16, even, "even");
        products(&t, MZ_BF16, skewed, "skewed");
    }
    if (wants(argc, argv, "rows"))
        rows(&t);
    if (wants(argc, argv, "updates"))
        updates(&t);
    if (wants(argc, argv, "layer"))
        bench_layer(&b);
    void *const buffers[] = {t.top.from, t.top.to, t.top.a, t.top.b, t.top.c};
    for (int i = 0; i < 5; i++)
        mz_kernels_free(b.kernels, buffers[i]);
    mz_kernels_close(&b.kernels);
    return 0;
}
