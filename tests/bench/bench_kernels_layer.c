/* The whole backward pass of a layer's experts from the gradient of their output to those of the
 * input and the weights: of all pairs, and of the pairs that a budget keeps. Both start from the
 * same saved activations (gate and up products of every pair and their norms, from the forward
 * pass). The kept case scores and selects pairs, gathers what was saved of them, and does the rest
 * on fewer rows. The mixed case saved nothing: it computes gate and up of the kept pairs again. */
#include "tests/bench/bench_kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 1024, I = 512, E = 4, K = 2, TOKENS = 2048, PAIRS = TOKENS * K, RUNS = 5, QUARTERS = 4 };

/* bf16 matrices, in context memory; rows are pairs, expert by expert. */
typedef struct layer {
    const bench *b;
    void *x, *dy;          /* [tokens][H] */
    void *up[E], *down[E]; /* [2I][H], [H][I] */
    float *up_gradient[E], *down_gradient[E];
    float *weight;          /* [pairs] of the router */
    int32_t *expert;        /* [pairs] */
    int64_t *order, *begin; /* of all pairs */
    int32_t *place;         /* [pairs] in expert order */
    /* from the forward pass, in expert order; norms by pair */
    void *packed, *gate_up; /* [pairs][H], [pairs][2I] */
    float *hidden_norm2;
    /* of the backward pass */
    float *grad_norm2, *score, *dot; /* [tokens], [pairs], [rows] */
    int64_t *quota, *kept, *kept_begin, *position;
    uint8_t *keep;
    void *rows_x, *rows_dy, *rows_gate_up, *h, *dh, *dx_rows, *dx;
    void *workspace;
} layer;

static mz_groups groups_of(const int64_t *begin) {
    return (mz_groups){begin, E, PAIRS, NULL};
}

static void product(const layer *l, mz_product op, const int64_t *begin, int64_t n, int64_t k,
                    const void *a, void *const *weight, void *c) {
    const mz_product_args args = {.op = op,
                                  .groups = groups_of(begin),
                                  .n = n,
                                  .k = k,
                                  .type = MZ_BF16,
                                  .gradient_type = MZ_F32,
                                  .a = a,
                                  .weight = weight,
                                  .c = c};
    bench_must(l->b, mz_grouped_gemm(l->b->kernels, 0, &args, l->workspace));
}

static mz_expert_up up_of(const layer *l, const int64_t *begin, const void *x, void *gate_up,
                          float *norm2) {
    return (mz_expert_up){.groups = groups_of(begin),
                          .hidden = H,
                          .intermediate = I,
                          .type = MZ_BF16,
                          .x = x,
                          .weight = l->up,
                          .gate_up = gate_up,
                          .h = l->h,
                          .norm2 = norm2};
}

/* Rows of the listed pairs: those of their tokens, or, with `place`, of the pairs themselves. */
static void gather(const layer *l, const void *from, int64_t cols, const int32_t *place,
                   const int64_t *list, int64_t rows, const float *scale, void *to) {
    const mz_pack args = {.type = MZ_BF16,
                          .x = from,
                          .hidden = cols,
                          .rows = rows,
                          .row_pair = list,
                          .k = K,
                          .token = place,
                          .scale = scale,
                          .out = to};
    bench_must(l->b, mz_pack_rows(l->b->kernels, 0, &args));
}

/* From the rows' gradient on: `x` and `gate_up` are those of the rows; gate_up is left alone. */
static void backward_rows(const layer *l, const int64_t *list, const int64_t *begin, const void *x,
                          const void *gate_up, const float *weight) {
    mz_kernels *k = l->b->kernels;
    const int64_t rows = begin[E];
    gather(l, l->dy, H, NULL, list, rows, weight, l->rows_dy);
    bench_must(l->b, mz_invert(k, 0, list, rows, PAIRS, l->position));
    product(l, MZ_PRODUCT_DGRAD, begin, H, I, l->rows_dy, l->down, l->dh);
    const mz_swiglu back = {.type = MZ_BF16,
                            .rows = rows,
                            .intermediate = I,
                            .gate_up = gate_up,
                            .h = l->h,
                            .dh = l->dh,
                            .dot = l->dot,
                            .dgate_up = l->rows_gate_up};
    bench_must(l->b, mz_swiglu_backward(k, 0, &back));
    product(l, MZ_PRODUCT_WGRAD, begin, H, I, l->rows_dy, (void *const *)l->down_gradient, l->h);
    product(l, MZ_PRODUCT_WGRAD, begin, 2 * I, H, l->rows_gate_up, (void *const *)l->up_gradient,
            (void *)(uintptr_t)x);
    product(l, MZ_PRODUCT_DGRAD, begin, 2 * I, H, l->rows_gate_up, l->up, l->dx_rows);
    const mz_combine combine = {.type = MZ_BF16,
                                .row = l->dx_rows,
                                .hidden = H,
                                .tokens = TOKENS,
                                .k = K,
                                .position = l->position,
                                .out = l->dx};
    bench_must(l->b, mz_combine_rows(k, 0, &combine));
}

static void full(const layer *l, const float *weight) {
    backward_rows(l, l->order, l->begin, l->packed, l->gate_up, weight);
}

/* Norms, scores, and the pairs that stay. */
static void choose(const layer *l) {
    mz_kernels *k = l->b->kernels;
    const mz_norms norms = {MZ_BF16, l->dy, TOKENS, H, H, l->grad_norm2};
    bench_must(l->b, mz_row_norms(k, 0, &norms));
    const mz_score_args scoring = {.kind = MZ_SCORED_DOWN,
                                   .tokens = TOKENS,
                                   .pairs = PAIRS,
                                   .k = K,
                                   .weight = l->weight,
                                   .grad_norm2 = l->grad_norm2,
                                   .hidden_norm2 = l->hidden_norm2,
                                   .score = l->score};
    bench_must(l->b, mz_score_pairs(k, 0, &scoring));
    const mz_selection selection = {.score = l->score,
                                    .order = l->order,
                                    .begin = l->begin,
                                    .quota = l->quota,
                                    .pairs = PAIRS,
                                    .experts = E,
                                    .kept = l->kept,
                                    .kept_begin = l->kept_begin,
                                    .keep = l->keep};
    bench_must(l->b, mz_select_pairs(k, 0, &selection, l->workspace));
}

static void kept(const layer *l, const float *weight) {
    choose(l);
    const int64_t rows = l->kept_begin[E];
    gather(l, l->x, H, NULL, l->kept, rows, NULL, l->rows_x);
    gather(l, l->gate_up, 2 * I, l->place, l->kept, rows, NULL, l->rows_gate_up);
    backward_rows(l, l->kept, l->kept_begin, l->rows_x, l->rows_gate_up, weight);
}

static void mixed(const layer *l, const float *weight) {
    choose(l);
    gather(l, l->x, H, NULL, l->kept, l->kept_begin[E], NULL, l->rows_x);
    const mz_expert_up up = up_of(l, l->kept_begin, l->rows_x, l->rows_gate_up, NULL);
    bench_must(l->b, mz_expert_up_forward(l->b->kernels, 0, &up, l->workspace));
    backward_rows(l, l->kept, l->kept_begin, l->rows_x, l->rows_gate_up, weight);
}

/* ---- the layer ----------------------------------------------------------------------------------
 */

/* Scratch enough for each of the products, with all pairs. */
static size_t scratch_of(const layer *l) {
    size_t most = 256;
    for (int op = MZ_PRODUCT_FORWARD; op <= MZ_PRODUCT_WGRAD; op++) {
        const mz_product_args args = {.op = op,
                                      .groups = groups_of(l->begin),
                                      .n = 2 * I > H ? 2 * I : H,
                                      .k = 2 * I > H ? 2 * I : H,
                                      .type = MZ_BF16,
                                      .gradient_type = MZ_F32};
        const size_t bytes = mz_grouped_gemm_workspace(l->b->kernels, &args);
        most = bytes > most ? bytes : most;
    }
    const mz_expert_up up = up_of(l, l->begin, l->packed, l->gate_up, NULL);
    const size_t bytes = mz_expert_up_workspace(l->b->kernels, &up);
    return bytes > most ? bytes : most;
}

/* Every expert has the same number of pairs. */
static void route(layer *l) {
    const bench *b = l->b;
    l->expert = bench_room(b, sizeof *l->expert * PAIRS, 0);
    l->place = bench_room(b, sizeof *l->place * PAIRS, 0);
    l->order = bench_room(b, sizeof *l->order * PAIRS, 0);
    l->begin = bench_room(b, sizeof *l->begin * (E + 1), 0);
    for (int32_t p = 0; p < PAIRS; p++)
        l->expert[p] = (p / K + p % K) % E;
    const mz_grouping grouping = {l->expert, PAIRS, E, NULL, l->begin, l->order};
    void *scratch = bench_room(b, mz_group_pairs_workspace(b->kernels, &grouping), 0);
    bench_must(b, mz_group_pairs(b->kernels, 0, &grouping, scratch));
    mz_kernels_free(b->kernels, scratch);
    for (int32_t i = 0; i < PAIRS; i++)
        l->place[l->order[i]] = i;
}

static void make_room(layer *l) {
    const bench *b = l->b;
    for (int e = 0; e < E; e++) {
        l->up[e] = bench_halves(b, 2 * I * H);
        l->down[e] = bench_halves(b, H * I);
        l->up_gradient[e] = bench_room(b, sizeof(float) * 2 * I * H, 0);
        l->down_gradient[e] = bench_room(b, sizeof(float) * H * I, 0);
    }
    l->x = bench_halves(b, (int64_t)TOKENS * H);
    l->dy = bench_halves(b, (int64_t)TOKENS * H);
    l->weight = bench_floats(b, PAIRS);
    void **const half[] = {&l->packed, &l->rows_x,  &l->rows_dy, &l->gate_up, &l->rows_gate_up,
                           &l->h,      &l->dx_rows, &l->dh,      &l->dx};
    for (int i = 0; i < 9; i++) /* H or 2I values a row, the same */
        *half[i] = bench_room(b, 2 * (size_t)PAIRS * H, 0);
    float **const single[] = {&l->hidden_norm2, &l->grad_norm2, &l->score, &l->dot};
    for (int i = 0; i < 4; i++)
        *single[i] = bench_room(b, sizeof(float) * PAIRS, 0);
    int64_t **const list[] = {&l->kept, &l->position, &l->kept_begin, &l->quota};
    for (int i = 0; i < 4; i++)
        *list[i] = bench_room(b, sizeof(int64_t) * PAIRS, 0);
    l->keep = bench_room(b, PAIRS, 0);
    l->workspace = bench_room(b, scratch_of(l), 0);
}

/* What the forward pass leaves. */
static void forward(const layer *l) {
    gather(l, l->x, H, NULL, l->order, PAIRS, NULL, l->packed);
    const mz_expert_up up = up_of(l, l->begin, l->packed, l->gate_up, l->dot);
    bench_must(l->b, mz_expert_up_forward(l->b->kernels, 0, &up, l->workspace));
    for (int64_t i = 0; i < PAIRS; i++)
        l->hidden_norm2[l->order[i]] = l->dot[i];
}

static void set_keep(const layer *l, int quarters) {
    for (int e = 0; e < E; e++)
        l->quota[e] = (l->begin[e + 1] - l->begin[e]) * quarters / QUARTERS;
}

/* ---- checks -------------------------------------------------------------------------------------
 */

/* Root of the squared difference of two passes' results, relative to the second's. */
static double distance(const float *a, const float *b, int64_t n) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += pow((double)a[i] - (double)b[i], 2);
        size += pow((double)b[i], 2);
    }
    return sqrt(difference / size);
}

static float *results(const layer *l) {
    const int64_t n = (int64_t)TOKENS * H;
    float *all = bench_room(l->b, sizeof *all * (size_t)(n + 3 * I * H), 0);
    bench_must(l->b, mz_convert(l->b->kernels, 0, MZ_F32, all, MZ_BF16, l->dx, n));
    memcpy(all + n, l->up_gradient[E - 1], sizeof *all * 2 * I * H);
    memcpy(all + n + 2 * I * H, l->down_gradient[E - 1], sizeof *all * I * H);
    return all;
}

/* The kept pairs' pass is the full one with the weights of the others 0. */
static void check_pass(const layer *l, void (*pass)(const layer *, const float *),
                       const char *name) {
    float *weight = bench_floats(l->b, PAIRS);
    pass(l, l->weight);
    float *got = results(l);
    for (int64_t p = 0; p < PAIRS; p++)
        weight[p] = l->keep[p] ? weight[p] : 0;
    full(l, weight);
    float *want = results(l);
    const int64_t n = (int64_t)TOKENS * H;
    const double dx = distance(got, want, n), dw = distance(got + n, want + n, 3 * I * H);
    if (!(dx < 4e-3 && dw < 4e-3)) {
        fprintf(stderr, "bench_kernels: wrong result: %s: off by %g, gradients of weights by %g\n",
                name, dx, dw);
        exit(1);
    }
    void *const buffers[] = {weight, got, want};
    for (int i = 0; i < 3; i++)
        mz_kernels_free(l->b->kernels, buffers[i]);
}

/* ---- the table ----------------------------------------------------------------------------------
 */

static double best_time(const layer *l, void (*pass)(const layer *, const float *), double *all) {
    double best = 1e30;
    for (int i = 0; i < RUNS; i++) {
        const double start = bench_seconds();
        full(l, l->weight);
        const double between = bench_seconds();
        pass(l, l->weight);
        const double time = bench_seconds() - between;
        best = time < best ? time : best;
        *all = between - start < *all ? between - start : *all;
    }
    return best;
}

void bench_layer(const bench *b) {
    layer l = {.b = b};
    double all = 1e30, time[QUARTERS], again = 0;
    route(&l);
    make_room(&l);
    forward(&l);
    for (int q = QUARTERS; q >= 1; q--) {
        set_keep(&l, q);
        check_pass(&l, kept, "kept");
        time[q - 1] = best_time(&l, kept, &all);
        if (q == QUARTERS / 2) {
            check_pass(&l, mixed, "mixed");
            again = best_time(&l, mixed, &all);
        }
    }
    printf("whole backward of %d pairs, %d experts, H %d, I %d, bf16: full %.1f ms, %.1f GF/s\n",
           PAIRS, E, H, I, 1e3 * all, 12.0 * PAIRS * H * I / all / 1e9);
    for (int q = QUARTERS; q >= 1; q--)
        printf("  kept %.2f of it, scoring and packing included: %8.1f ms, %.3f of the time%s\n",
               (double)q / QUARTERS, 1e3 * time[q - 1], time[q - 1] / all,
               q == QUARTERS / 2 ? " (wanted: at most 0.6)" : "");
    printf("  kept 0.50, gate and up computed again (mixed): %8.1f ms, %.3f (FLOPs alone 0.67)\n",
           1e3 * again, again / all);
}
