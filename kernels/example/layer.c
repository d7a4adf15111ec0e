/* A layer of experts trained for one step with a quota in backward, on the host, with nothing but
 * the installed library: route, group, pack, products, SwiGLU, combine; score, select, and the
 * backward pass of the pairs that stay; one SkewAdam step. Every result is held against plain loops
 * in double precision.
 *
 *     cc layer.c $(pkg-config --cflags --libs mizan-kernels) -lm && ./a.out */
#include <mizan/kernels.h>

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { T = 50, H = 24, I = 12, E = 6, K = 2, P = T * K, QUOTA = 9 };

static mz_kernels *kernels;
static bool failed; /* a call, or a comparison; what follows works on zeros, and main says so */

/* What the library computes. On the host, context memory is any memory. Arrays are by pair (the
 * number of a token's choice, token * K + i) or by row (a place in a buffer grouped by expert). */
static float x[T][H], logits[T][E], w_up[E][2 * I][H], w_down[E][H][I], g[T][H]; /* g: dL/dy */
static int32_t expert[P];
static float weight[P];
static int64_t count[E], begin[E + 1], order[P], position[P]; /* row -> pair, pair -> row */
static float rows_x[P][H], gate_up[P][2 * I], h[P][I], rows_y[P][H], y[T][H];
static float h_norm_row[P], h_norm[P], g_norm[T], score[P];
static int64_t quota[E], kept[P], kept_begin[E + 1], kept_row[P], kept_position[P];
static uint8_t keep[P];
static float kept_x[P][H], kept_gu[P][2 * I], kept_h[P][I], kept_g[P][H], kept_gw[P][H];
static float kept_w[P], dh[P][I], dgu[P][2 * I], dot[P], dx_rows[P][H], dx[T][H];
static float dw_up[E][2 * I][H], dw_down[E][H][I], dweight[P], dlogits[T][E];
static float state_row[E][2 * I], state_col[E][H];

static void must(mz_kstatus status) {
    if (status != MZ_K_OK)
        fprintf(stderr, "layer: %s\n", mz_kernels_error(kernels));
    failed = failed || status != MZ_K_OK;
}

static void *scratch(size_t bytes) {
    void *memory = NULL;
    if (bytes > 0)
        must(mz_kernels_alloc(kernels, bytes, &memory));
    return memory;
}

static void product(mz_product op, int64_t n, int64_t k, const int64_t *groups, const void *a,
                    void *const *w, void *c) {
    const mz_product_args args = {.op = op,
                                  .engine = MZ_ENGINE_OWN,
                                  .groups = {groups, E, P, NULL},
                                  .n = n,
                                  .k = k,
                                  .type = MZ_F32,
                                  .gradient_type = MZ_F32,
                                  .a = a,
                                  .weight = w,
                                  .c = c};
    void *workspace = scratch(mz_grouped_gemm_workspace(kernels, &args));
    must(mz_grouped_gemm(kernels, 0, &args, workspace));
    mz_kernels_free(kernels, workspace);
}

/* out[i] = scale[p] * from[p / k], p = list[i]. */
static void pack(int64_t hidden, const void *from, const int64_t *list, int64_t n, int32_t k,
                 const float *scale, void *out) {
    const mz_pack args = {.type = MZ_F32,
                          .x = from,
                          .hidden = hidden,
                          .rows = n,
                          .row_pair = list,
                          .k = k,
                          .scale = scale,
                          .out = out};
    must(mz_pack_rows(kernels, 0, &args));
}

static void unpack(const float *row, const int64_t *where, float *pair) {
    const mz_unpack args = {
        .type = MZ_F32, .row = row, .hidden = 1, .pairs = P, .position = where, .out = pair};
    must(mz_unpack_rows(kernels, 0, &args));
}

static void combine(const void *row, const int64_t *where, const float *scale, void *out) {
    const mz_combine args = {.type = MZ_F32,
                             .row = row,
                             .hidden = H,
                             .tokens = T,
                             .k = K,
                             .position = where,
                             .scale = scale,
                             .out = out};
    must(mz_combine_rows(kernels, 0, &args));
}

static mz_router router(void) {
    return (mz_router){.kind = MZ_ROUTER_SOFTMAX,
                       .tokens = T,
                       .experts = E,
                       .k = K,
                       .normalize = true,
                       .scale = 1,
                       .logits = &logits[0][0],
                       .expert = expert,
                       .weight = weight,
                       .dweight = dweight,
                       .keep = keep,
                       .dlogits = &dlogits[0][0]};
}

static void forward(void *const *up, void *const *down) {
    const mz_router route = router();
    void *workspace = scratch(mz_router_workspace(kernels, &route));
    must(mz_router_forward(kernels, 0, &route, workspace));
    mz_kernels_free(kernels, workspace);
    const mz_grouping group = {expert, P, E, count, begin, order};
    workspace = scratch(mz_group_pairs_workspace(kernels, &group));
    must(mz_group_pairs(kernels, 0, &group, workspace));
    mz_kernels_free(kernels, workspace);
    must(mz_invert(kernels, 0, order, P, P, position));
    pack(H, x, order, P, K, NULL, rows_x);
    product(MZ_PRODUCT_FORWARD, 2 * I, H, begin, rows_x, up, gate_up);
    const mz_swiglu swiglu = {.type = MZ_F32,
                              .rows = P,
                              .intermediate = I,
                              .gate_up = gate_up,
                              .h = h,
                              .norm2 = h_norm_row};
    must(mz_swiglu_forward(kernels, 0, &swiglu));
    product(MZ_PRODUCT_FORWARD, H, I, begin, h, down, rows_y);
    combine(rows_y, position, weight, y);
}

static void choose(void) {
    const mz_norms norms = {MZ_F32, g, T, H, H, g_norm};
    must(mz_row_norms(kernels, 0, &norms));
    unpack(h_norm_row, position, h_norm); /* norms are by row, scores by pair */
    const mz_score_args scores = {.kind = MZ_SCORED_DOWN,
                                  .tokens = T,
                                  .pairs = P,
                                  .k = K,
                                  .weight = weight,
                                  .grad_norm2 = g_norm,
                                  .hidden_norm2 = h_norm,
                                  .score = score};
    must(mz_score_pairs(kernels, 0, &scores));
    for (int e = 0; e < E; e++)
        quota[e] = QUOTA;
    const mz_selection select = {.score = score,
                                 .order = order,
                                 .begin = begin,
                                 .quota = quota,
                                 .pairs = P,
                                 .experts = E,
                                 .kept = kept,
                                 .kept_begin = kept_begin,
                                 .keep = keep};
    void *workspace = scratch(mz_select_workspace(kernels, &select));
    must(mz_select_pairs(kernels, 0, &select, workspace));
    mz_kernels_free(kernels, workspace);
}

static void backward(void *const *up, void *const *down, void *const *d_up, void *const *d_down) {
    const int64_t n = kept_begin[E];
    for (int64_t i = 0; i < n; i++)
        kept_row[i] = position[kept[i]];
    must(mz_invert(kernels, 0, kept, n, P, kept_position));
    pack(H, x, kept, n, K, NULL, kept_x);
    pack(H, g, kept, n, K, NULL, kept_g);
    pack(H, g, kept, n, K, weight, kept_gw);
    pack(1, weight, kept, n, 1, NULL, kept_w);
    pack(2 * I, gate_up, kept_row, n, 1, NULL, kept_gu);
    product(MZ_PRODUCT_DGRAD, H, I, kept_begin, kept_g, down, dh);
    const mz_swiglu swiglu = {.type = MZ_F32,
                              .rows = n,
                              .intermediate = I,
                              .gate_up = kept_gu,
                              .h = kept_h,
                              .dh = dh,
                              .scale = kept_w,
                              .dot = dot,
                              .dgate_up = dgu};
    must(mz_swiglu_backward(kernels, 0, &swiglu));
    product(MZ_PRODUCT_WGRAD, H, I, kept_begin, kept_gw, d_down, kept_h);
    product(MZ_PRODUCT_WGRAD, 2 * I, H, kept_begin, dgu, d_up, kept_x);
    product(MZ_PRODUCT_DGRAD, 2 * I, H, kept_begin, dgu, up, dx_rows);
    combine(dx_rows, kept_position, NULL, dx);
    unpack(dot, kept_position, dweight);
    const mz_router route = router();
    void *workspace = scratch(mz_router_workspace(kernels, &route));
    must(mz_router_backward(kernels, 0, &route, workspace));
    mz_kernels_free(kernels, workspace);
}

static void step(void) {
    const mz_update args = {.kind = MZ_UPDATE_SKEWADAM,
                            .matrices = E,
                            .rows = 2 * I,
                            .cols = H,
                            .type = MZ_F32,
                            .gradient_type = MZ_F32,
                            .parameter = w_up,
                            .gradient = dw_up,
                            .rate = 1e-3f,
                            .beta1 = 0.9f,
                            .beta2 = 0.999f,
                            .decay = 0.1f,
                            .eps = 1e-8f,
                            .step = 1,
                            .factored = true,
                            .clip_rms = true,
                            .row = &state_row[0][0],
                            .col = &state_col[0][0]};
    void *workspace = scratch(mz_update_workspace(kernels, &args));
    must(mz_update_step(kernels, 0, &args, workspace));
    mz_kernels_free(kernels, workspace);
}

/* ---- the same in plain loops --------------------------------------------------------------------
 */

typedef struct plain {
    int expert[P];
    double weight[P], u[P][2 * I], h[P][I], o[P][H], y[T][H], score[P];
    int keep[P];
    double dx[T][H], dw_up[E][2 * I][H], dw_down[E][H][I], dweight[P], dlogits[T][E];
} plain;

static double worst;

/* The larger; a NaN stays one. */
static double larger(double a, double b) {
    return a > b || a != a ? a : b;
}

static void near(const char *what, const float *got, const double *want, int n) {
    double size = 1e-30, off = 0;
    for (int i = 0; i < n; i++) {
        size = larger(size, fabs(want[i]));
        off = larger(off, fabs(got[i] - want[i]));
    }
    worst = larger(worst, off / size);
    if (!(off <= 1e-5 * size))
        fprintf(stderr, "layer: %s is off by %g of %g\n", what, off, size);
    failed = failed || !(off <= 1e-5 * size);
}

static void plain_route(plain *p) {
    for (int t = 0; t < T; t++) {
        int used[E] = {0};
        double sum = 0;
        for (int i = 0; i < K; i++) {
            int best = -1;
            for (int e = 0; e < E; e++)
                if (!used[e] && (best < 0 || logits[t][e] > logits[t][best]))
                    best = e;
            used[best] = 1;
            p->expert[t * K + i] = best;
            sum += p->weight[t * K + i] = exp((double)logits[t][best]);
        }
        for (int i = 0; i < K; i++)
            p->weight[t * K + i] /= sum;
    }
}

static double silu(double u) {
    return u / (1 + exp(-u));
}

static void plain_forward(plain *p) {
    for (int i = 0; i < P; i++) {
        const int e = p->expert[i], t = i / K;
        double hh = 0, gg = 0;
        for (int c = 0; c < 2 * I; c++)
            for (int d = 0; d < H; d++)
                p->u[i][c] += (double)x[t][d] * w_up[e][c][d];
        for (int c = 0; c < I; c++) {
            p->h[i][c] = silu(p->u[i][c]) * p->u[i][I + c];
            hh += p->h[i][c] * p->h[i][c];
        }
        for (int d = 0; d < H; d++) {
            for (int c = 0; c < I; c++)
                p->o[i][d] += p->h[i][c] * w_down[e][d][c];
            p->y[t][d] += p->weight[i] * p->o[i][d];
            gg += (double)g[t][d] * g[t][d];
        }
        p->score[i] = p->weight[i] * p->weight[i] * gg * hh;
    }
    for (int i = 0; i < P; i++) {
        int better = 0;
        for (int j = 0; j < P; j++)
            better += p->expert[j] == p->expert[i] && p->score[j] > p->score[i];
        p->keep[i] = better < QUOTA;
    }
}

static void plain_backward(plain *p) {
    for (int i = 0; i < P; i++) {
        const int e = p->expert[i], t = i / K;
        for (int d = 0; p->keep[i] && d < H; d++)
            p->dweight[i] += g[t][d] * p->o[i][d];
        for (int c = 0; p->keep[i] && c < I; c++) {
            const double u = p->u[i][c], v = p->u[i][I + c], s = 1 / (1 + exp(-u));
            double d_h = 0;
            for (int d = 0; d < H; d++) {
                d_h += p->weight[i] * g[t][d] * w_down[e][d][c];
                p->dw_down[e][d][c] += p->weight[i] * g[t][d] * p->h[i][c];
            }
            const double du = d_h * v * s * (1 + u * (1 - s)), dv = d_h * silu(u);
            for (int d = 0; d < H; d++) {
                p->dw_up[e][c][d] += du * x[t][d];
                p->dw_up[e][I + c][d] += dv * x[t][d];
                p->dx[t][d] += du * w_up[e][c][d] + dv * w_up[e][I + c][d];
            }
        }
    }
    /* weights are exp(l) / (sum over the chosen) */
    for (int t = 0; t < T; t++)
        for (int i = t * K; i < t * K + K; i++)
            for (int j = t * K; j < t * K + K; j++)
                p->dlogits[t][p->expert[j]] +=
                    p->dweight[i] * p->weight[i] * ((i == j) - p->weight[j]);
}

/* One step from no state: R, C = (1 - beta2) means of g^2; u = g sqrt(1 - beta2) / (sqrt(max(R /
 * mean R, eps)) sqrt(max(C, eps))), divided by its RMS over the matrix where that is above 1. */
static void plain_step(const double *before, const float *gradient, double *after) {
    const double beta2 = 0.999f, eps = 1e-8f, rate = 1e-3f, decay = 0.1f;
    double R[2 * I] = {0}, C[H] = {0}, u[2 * I][H], mean = 0, square = 0;
    for (int i = 0; i < 2 * I; i++)
        for (int j = 0; j < H; j++) {
            const double gg = (1 - beta2) * gradient[i * H + j] * gradient[i * H + j];
            R[i] += gg / H;
            C[j] += gg / (2 * I);
            mean += gg / H / (2 * I);
        }
    for (int i = 0; i < 2 * I; i++)
        for (int j = 0; j < H; j++) {
            u[i][j] = gradient[i * H + j] * sqrt(1 - beta2) /
                      sqrt(fmax(R[i] / fmax(mean, 1e-15), eps)) / sqrt(fmax(C[j], eps));
            square += u[i][j] * u[i][j];
        }
    const double rms = sqrt(square / (2 * I * H));
    for (int i = 0; i < 2 * I; i++)
        for (int j = 0; j < H; j++)
            after[i * H + j] =
                before[i * H + j] * (1 - rate * decay) - rate * u[i][j] / fmax(1, rms);
}

static void fill(float *to, int n, double size) {
    for (int i = 0; i < n; i++)
        to[i] = (float)(size * (2.0 * rand() / RAND_MAX - 1));
}

int main(void) {
    static plain p;
    static double before[E][2 * I][H], after[E][2 * I][H];
    const mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .threads = 2, .streams = 1};
    char message[200];
    void *up[E], *down[E], *d_up[E], *d_down[E];
    if (mz_kernels_open(&options, &kernels, message, sizeof message) != MZ_K_OK) {
        fprintf(stderr, "layer: %s\n", message);
        return 1;
    }
    srand(1);
    fill(&x[0][0], T * H, 1), fill(&logits[0][0], T * E, 2), fill(&g[0][0], T * H, 1);
    fill(&w_up[0][0][0], E * 2 * I * H, 0.5), fill(&w_down[0][0][0], E * H * I, 0.5);
    for (int e = 0; e < E; e++) {
        up[e] = w_up[e], down[e] = w_down[e];
        d_up[e] = dw_up[e], d_down[e] = dw_down[e];
    }
    plain_route(&p);
    plain_forward(&p);
    plain_backward(&p);
    forward(up, down);
    choose();
    backward(up, down, d_up, d_down);
    for (int i = 0; i < P; i++)
        if (expert[i] != p.expert[i] || keep[i] != p.keep[i]) {
            fprintf(stderr, "layer: pair %d differs\n", i);
            failed = true;
        }
    near("weight", weight, p.weight, P);
    near("y", &y[0][0], &p.y[0][0], T * H);
    near("score", score, p.score, P);
    near("dx", &dx[0][0], &p.dx[0][0], T * H);
    near("dw_up", &dw_up[0][0][0], &p.dw_up[0][0][0], E * 2 * I * H);
    near("dw_down", &dw_down[0][0][0], &p.dw_down[0][0][0], E * H * I);
    near("dweight", dweight, p.dweight, P);
    near("dlogits", &dlogits[0][0], &p.dlogits[0][0], T * E);
    for (int i = 0; i < E * 2 * I * H; i++)
        (&before[0][0][0])[i] = (&w_up[0][0][0])[i];
    for (int e = 0; e < E; e++)
        plain_step(&before[e][0][0], &dw_up[e][0][0], &after[e][0][0]);
    step();
    near("parameter", &w_up[0][0][0], &after[0][0][0], E * 2 * I * H);
    if (!failed)
        printf("%s: %d of %d pairs in backward, everything within %.1e of plain loops\n",
               mz_kernels_describe(kernels), (int)kept_begin[E], P, worst);
    mz_kernels_close(&kernels);
    return failed;
}
