#include "tests/gpu/gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Qwen3-30B-A3B's experts at two batch sizes and with skewed counts; GLM-4.5-Air's. What has a goal
 * first. */
static const shape shapes[] = {{"qwen3-30b 32768", 32768, 2048, 768, 128, 8, false, true},
                               {"qwen3-30b 32768 skewed", 32768, 2048, 768, 128, 8, true, true},
                               {"qwen3-30b 8192", 8192, 2048, 768, 128, 8, false, false},
                               {"qwen3-30b 8192 skewed", 8192, 2048, 768, 128, 8, true, false},
                               {"glm-4.5-air 8192", 8192, 4096, 1408, 128, 8, false, false}};
static const shape small_shapes[] = {{"small", 24, 64, 32, 8, 2, false, true},
                                     {"small skewed", 24, 64, 32, 8, 2, true, true}};

double now_seconds(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- operations ---------------------------------------------------------------------------------
 * Each enqueues itself once and says what it costs at least. */

typedef struct cost {
    double flops, bytes;
} cost;
typedef mz_kstatus operation(layer *l, cost *c);

static double rows_of(const layer *l) {
    return (double)l->pairs;
}

static mz_kstatus copy(layer *l, cost *c) {
    const size_t bytes = (size_t)l->pairs * (size_t)l->shape.hidden * 2;
    c->bytes = 2 * (double)bytes;
    return mz_kernels_copy(l->kernels, 0, MZ_COPY_INSIDE, l->out, l->packed, bytes);
}

static mz_kstatus row_norms(layer *l, cost *c) {
    const shape *s = &l->shape;
    c->bytes = rows_of(l) * ((double)s->hidden * 2 + 4);
    return mz_row_norms(l->kernels, 0,
                        &(mz_norms){MZ_BF16, l->packed, l->pairs, s->hidden, s->hidden, l->norm});
}

static mz_kstatus row_dots(layer *l, cost *c) {
    const shape *s = &l->shape;
    const mz_dots args = {MZ_BF16,   l->packed, l->out,    l->pairs,
                          s->hidden, s->hidden, s->hidden, l->norm};
    c->bytes = rows_of(l) * ((double)s->hidden * 4 + 4);
    return mz_row_dots(l->kernels, 0, &args);
}

static mz_kstatus widen(layer *l, cost *c) {
    const int64_t n = l->pairs * l->shape.intermediate;
    c->bytes = 6 * (double)n;
    return mz_convert(l->kernels, 0, MZ_F32, l->gate_up, MZ_BF16, l->hidden, n);
}

static mz_kstatus score_pairs(layer *l, cost *c) {
    const mz_score_args args = {.kind = MZ_SCORED_DOWN,
                                .tokens = l->shape.tokens,
                                .pairs = l->pairs,
                                .k = l->shape.k,
                                .weight = l->router_weight,
                                .grad_norm2 = l->norm,
                                .hidden_norm2 = l->score,
                                .score = l->dgate_up};
    c->bytes = rows_of(l) * 12 + (double)l->shape.tokens * 4;
    return mz_score_pairs(l->kernels, 0, &args);
}

static mz_kstatus invert(layer *l, cost *c) {
    c->bytes = rows_of(l) * 16;
    return mz_invert(l->kernels, 0, l->order, l->pairs, l->pairs, l->position);
}

static mz_kstatus group_pairs(layer *l, cost *c) {
    const mz_grouping args = {.expert = l->expert,
                              .pairs = l->pairs,
                              .experts = l->shape.experts,
                              .begin = l->begin,
                              .order = l->order};
    c->bytes = rows_of(l) * 12;
    return mz_group_pairs(l->kernels, 0, &args, l->workspace);
}

static mz_kstatus select_pairs(layer *l, cost *c) {
    const mz_selection args = {.score = l->score,
                               .order = l->order,
                               .begin = l->begin,
                               .quota = l->quota,
                               .pairs = l->pairs,
                               .experts = l->shape.experts,
                               .kept = l->kept,
                               .kept_begin = l->kept_begin};
    c->bytes = rows_of(l) * 16;
    if (mz_select_workspace(l->kernels, &args) > l->workspace_bytes)
        return MZ_K_ENOMEM;
    return mz_select_pairs(l->kernels, 0, &args, l->workspace);
}

static mz_kstatus pack_rows(layer *l, cost *c) {
    const mz_pack args = {.type = MZ_BF16,
                          .x = l->x,
                          .hidden = l->shape.hidden,
                          .rows = l->pairs,
                          .row_pair = l->order,
                          .k = l->shape.k,
                          .out = l->packed};
    c->bytes = 2.0 * (double)l->shape.hidden * (rows_of(l) + (double)l->shape.tokens);
    return mz_pack_rows(l->kernels, 0, &args);
}

static mz_kstatus unpack_rows(layer *l, cost *c) {
    const mz_unpack args = {MZ_BF16, l->packed, l->shape.hidden, l->pairs, l->position, l->out};
    c->bytes = 4.0 * (double)l->shape.hidden * rows_of(l);
    return mz_unpack_rows(l->kernels, 0, &args);
}

static mz_kstatus combine_rows(layer *l, cost *c) {
    const mz_combine args = {.type = MZ_BF16,
                             .row = l->packed,
                             .hidden = l->shape.hidden,
                             .tokens = l->shape.tokens,
                             .k = l->shape.k,
                             .position = l->position,
                             .scale = l->router_weight,
                             .out = l->out};
    c->bytes = 2.0 * (double)l->shape.hidden * (rows_of(l) + (double)l->shape.tokens);
    return mz_combine_rows(l->kernels, 0, &args);
}

static mz_kstatus swiglu(layer *l, cost *c, bool backward) {
    const mz_swiglu args = {.type = MZ_BF16,
                            .rows = l->pairs,
                            .intermediate = l->shape.intermediate,
                            .gate_up = l->gate_up,
                            .h = backward ? NULL : l->hidden,
                            .norm2 = backward ? NULL : l->norm,
                            .dh = l->dhidden,
                            .dgate_up = l->dgate_up};
    c->bytes = rows_of(l) * (double)l->shape.intermediate * 2 * (backward ? 5 : 3);
    return backward ? mz_swiglu_backward(l->kernels, 0, &args)
                    : mz_swiglu_forward(l->kernels, 0, &args);
}
static mz_kstatus swiglu_forward(layer *l, cost *c) {
    return swiglu(l, c, false);
}
static mz_kstatus swiglu_backward(layer *l, cost *c) {
    return swiglu(l, c, true);
}

static mz_groups groups_of(const layer *l) {
    return (mz_groups){l->begin, l->shape.experts, l->pairs, l->begin_host};
}

/* Of the up-projection: [2I][H] for every expert. */
static mz_kstatus up_product(layer *l, cost *c, mz_product op, mz_product_engine engine,
                             mz_dtype gradient_type) {
    const int64_t n = 2 * l->shape.intermediate, k = l->shape.hidden;
    const bool wgrad = op == MZ_PRODUCT_WGRAD;
    const mz_product_args args = {.op = op,
                                  .engine = engine,
                                  .groups = groups_of(l),
                                  .n = n,
                                  .k = k,
                                  .type = MZ_BF16,
                                  .gradient_type = gradient_type,
                                  .a = op == MZ_PRODUCT_FORWARD ? l->packed : l->gate_up,
                                  .weight = !wgrad                    ? l->up
                                            : gradient_type == MZ_F32 ? l->wide_gradient
                                                                      : l->gradient,
                                  .c = op == MZ_PRODUCT_FORWARD ? l->dgate_up
                                       : wgrad                  ? l->packed
                                                                : l->out};
    const double weight_bytes = wgrad && gradient_type == MZ_F32 ? 4 : 2;
    c->flops = 2 * rows_of(l) * (double)n * (double)k;
    c->bytes = 2 * rows_of(l) * (double)(n + k) +
               weight_bytes * (double)l->shape.experts * (double)n * (double)k;
    if (mz_grouped_gemm_workspace(l->kernels, &args) > l->workspace_bytes)
        return MZ_K_ENOMEM;
    return mz_grouped_gemm(l->kernels, 0, &args, l->workspace);
}
static mz_kstatus up_forward(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_FORWARD, MZ_ENGINE_OWN, MZ_BF16);
}
static mz_kstatus up_dgrad(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_DGRAD, MZ_ENGINE_OWN, MZ_BF16);
}
static mz_kstatus up_wgrad(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_WGRAD, MZ_ENGINE_OWN, MZ_BF16);
}
static mz_kstatus up_wgrad_wide(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_WGRAD, MZ_ENGINE_OWN, MZ_F32);
}
static mz_kstatus up_forward_mma(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_FORWARD, MZ_ENGINE_OWN_MMA, MZ_BF16);
}
static mz_kstatus up_dgrad_mma(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_DGRAD, MZ_ENGINE_OWN_MMA, MZ_BF16);
}
static mz_kstatus up_wgrad_mma(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_WGRAD, MZ_ENGINE_OWN_MMA, MZ_BF16);
}
static mz_kstatus cublas_forward(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_FORWARD, MZ_ENGINE_VENDOR, MZ_BF16);
}
static mz_kstatus cublas_dgrad(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_DGRAD, MZ_ENGINE_VENDOR, MZ_BF16);
}
static mz_kstatus cublas_wgrad(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_WGRAD, MZ_ENGINE_VENDOR, MZ_BF16);
}
static mz_kstatus cublas_wgrad_wide(layer *l, cost *c) {
    return up_product(l, c, MZ_PRODUCT_WGRAD, MZ_ENGINE_VENDOR, MZ_F32);
}

static mz_kstatus down_forward(layer *l, cost *c) {
    const int64_t n = l->shape.hidden, k = l->shape.intermediate;
    const mz_product_args args = {.op = MZ_PRODUCT_FORWARD,
                                  .groups = groups_of(l),
                                  .n = n,
                                  .k = k,
                                  .type = MZ_BF16,
                                  .a = l->hidden,
                                  .weight = l->down,
                                  .c = l->out};
    c->flops = 2 * rows_of(l) * (double)n * (double)k;
    c->bytes = 2 * (rows_of(l) * (double)(n + k) + (double)l->shape.experts * (double)(n * k));
    return mz_grouped_gemm(l->kernels, 0, &args, l->workspace);
}

static mz_kstatus fused_up(layer *l, cost *c, mz_product_engine engine) {
    const double n = 2 * (double)l->shape.intermediate, k = (double)l->shape.hidden;
    const mz_expert_up args = {.groups = groups_of(l),
                               .hidden = l->shape.hidden,
                               .intermediate = l->shape.intermediate,
                               .type = MZ_BF16,
                               .x = l->packed,
                               .weight = l->up,
                               .gate_up = l->dgate_up,
                               .h = l->dhidden,
                               .norm2 = l->norm,
                               .engine = engine};
    c->flops = 2 * rows_of(l) * n * k;
    c->bytes = 2 * (rows_of(l) * (1.5 * n + k) + (double)l->shape.experts * n * k);
    if (mz_expert_up_workspace(l->kernels, &args) > l->workspace_bytes)
        return MZ_K_ENOMEM;
    return mz_expert_up_forward(l->kernels, 0, &args, l->workspace);
}
static mz_kstatus expert_up(layer *l, cost *c) {
    return fused_up(l, c, MZ_ENGINE_OWN);
}
static mz_kstatus expert_up_mma(layer *l, cost *c) {
    return fused_up(l, c, MZ_ENGINE_OWN_MMA);
}

/* One product of [2I E][H] weights with the tokens' rows, by cuBLAS: what matrices can reach. */
static mz_kstatus cublas_plain(layer *l, cost *c) {
    const int64_t begin[2] = {0, l->shape.tokens};
    const mz_product_args args = {.op = MZ_PRODUCT_FORWARD,
                                  .engine = MZ_ENGINE_VENDOR,
                                  .groups = {l->kept_begin, 1, l->shape.tokens, begin},
                                  .n = 2 * l->shape.intermediate * l->shape.k,
                                  .k = l->shape.hidden,
                                  .type = MZ_BF16,
                                  .a = l->x,
                                  .weight = l->up,
                                  .c = l->dgate_up};
    c->flops = 2 * (double)l->shape.tokens * (double)args.n * (double)args.k;
    mz_kstatus status =
        mz_kernels_copy(l->kernels, 0, MZ_COPY_IN, l->kept_begin, begin, sizeof begin);
    return status == MZ_K_OK ? mz_grouped_gemm(l->kernels, 0, &args, l->workspace) : status;
}

static mz_kstatus router(layer *l, cost *c, bool backward) {
    const mz_router args = {.kind = MZ_ROUTER_SOFTMAX,
                            .tokens = l->shape.tokens,
                            .experts = l->shape.experts,
                            .k = l->shape.k,
                            .normalize = true,
                            .scale = 1,
                            .logits = l->logits,
                            .expert = l->chosen,
                            .weight = l->router_weight,
                            .dweight = l->score,
                            .dlogits = l->dgate_up};
    c->bytes = (double)l->shape.tokens * l->shape.experts * 4 * (backward ? 2 : 1) + rows_of(l) * 8;
    if (mz_router_workspace(l->kernels, &args) > l->workspace_bytes)
        return MZ_K_ENOMEM;
    return backward ? mz_router_backward(l->kernels, 0, &args, l->workspace)
                    : mz_router_forward(l->kernels, 0, &args, l->workspace);
}
static mz_kstatus router_forward(layer *l, cost *c) {
    return router(l, c, false);
}
static mz_kstatus router_backward(layer *l, cost *c) {
    return router(l, c, true);
}

/* Of all experts, or of as many as `args` says. */
static mz_kstatus update(layer *l, cost *c, mz_update args, double bytes_each) {
    args.matrices = args.matrices > 0 ? args.matrices : l->shape.experts;
    args.rows = 2 * l->shape.intermediate;
    args.cols = l->shape.hidden;
    args.type = MZ_BF16;
    args.gradient_type = MZ_BF16;
    args.parameter = l->parameters;
    args.gradient = l->gradients;
    args.rate = 1e-6F;
    args.step = 1000;
    c->bytes = bytes_each * (double)args.matrices * (double)args.rows * (double)args.cols;
    if (mz_update_workspace(l->kernels, &args) > l->workspace_bytes)
        return MZ_K_ENOMEM;
    return mz_update_step(l->kernels, 0, &args, l->workspace);
}
/* Two sweeps over the gradient (2 + 2), the parameter read and written (2 + 2). */
static mz_kstatus skewadam_factored(layer *l, cost *c) {
    return update(l, c,
                  (mz_update){.kind = MZ_UPDATE_SKEWADAM,
                              .factored = true,
                              .clip_rms = true,
                              .beta2 = 0.999F,
                              .eps = 1e-8F,
                              .rounding = MZ_ROUND_STOCHASTIC,
                              .row = l->row,
                              .col = l->col},
                  8);
}
/* The gradient once (2), the momentum read, written and read again (4 + 4 + 4), the parameter (2 +
 * 2). */
static mz_kstatus skewadam_momentum(layer *l, cost *c) {
    return update(l, c,
                  (mz_update){.kind = MZ_UPDATE_SKEWADAM,
                              .factored = true,
                              .momentum = true,
                              .clip_rms = true,
                              .beta1 = 0.9F,
                              .beta2 = 0.999F,
                              .eps = 1e-8F,
                              .rounding = MZ_ROUND_STOCHASTIC,
                              .m = l->m,
                              .row = l->row,
                              .col = l->col},
                  18);
}
/* The second moment written and read again. */
static mz_kstatus skewadam_full(layer *l, cost *c) {
    return update(l, c,
                  (mz_update){.kind = MZ_UPDATE_SKEWADAM,
                              .clip_rms = true,
                              .beta2 = 0.999F,
                              .eps = 1e-8F,
                              .rounding = MZ_ROUND_STOCHASTIC,
                              .v = l->v},
                  20);
}
static mz_kstatus adafactor(layer *l, cost *c) {
    return update(l, c,
                  (mz_update){.kind = MZ_UPDATE_ADAFACTOR,
                              .clip_rms = true,
                              .eps = 1e-30F,
                              .row = l->row,
                              .col = l->col},
                  8);
}
static mz_kstatus lion(layer *l, cost *c) {
    return update(
        l, c, (mz_update){.kind = MZ_UPDATE_LION, .beta1 = 0.9F, .beta2 = 0.99F, .m = l->m}, 14);
}
/* Three iterations of XX^T, its square and a product with X, on the shorter side. */
static mz_kstatus muon(layer *l, cost *c) {
    const double a = 2 * (double)l->shape.intermediate, b = (double)l->shape.hidden;
    const double few = fmin(a, b), many = fmax(a, b);
    const int64_t matrices = l->shape.experts < 8 ? l->shape.experts : 8;
    c->flops = (double)matrices * 3 * few * few * (4 * many + 2 * few);
    return update(l, c,
                  (mz_update){.kind = MZ_UPDATE_MUON,
                              .matrices = matrices,
                              .beta1 = 0.95F,
                              .newton_schulz = 3,
                              .update_scale = 1,
                              .m = l->m},
                  14);
}
static mz_kstatus adamw(layer *l, cost *c) {
    return update(l, c,
                  (mz_update){.kind = MZ_UPDATE_ADAMW,
                              .beta1 = 0.9F,
                              .beta2 = 0.999F,
                              .eps = 1e-8F,
                              .m = l->m,
                              .v = l->v},
                  22);
}

/* Of DESIGN section 9; the products' of the large shapes, with wgmma and with mma.sync. */
static const goal copy_70 = {GOAL_COPY_SHARE, 0.7}, copy_80 = {GOAL_COPY_SHARE, 0.8},
                  wgmma_450 = {GOAL_FLOPS, 450e12}, mma_300 = {GOAL_FLOPS, 300e12};

/* `list`: the checks that an operation must have passed. */
static const struct {
    const char *name, *list;
    operation *run;
    const goal *goal; /* or NULL */
} operations[] = {{"copy (ceiling)", NULL, copy},
                  {"cuBLAS plain product (ceiling)", "vendor", cublas_plain},
                  {"up forward", "products", up_forward, &wgmma_450},
                  {"up forward + SwiGLU + norms", "products", expert_up, &wgmma_450},
                  {"down forward", "products", down_forward, &wgmma_450},
                  {"up dgrad", "products", up_dgrad, &wgmma_450},
                  {"up wgrad", "products", up_wgrad, &wgmma_450},
                  {"up wgrad, fp32", "products", up_wgrad_wide, &wgmma_450},
                  {"up forward, mma.sync", "products-mma", up_forward_mma, &mma_300},
                  {"up fwd + SwiGLU, mma.sync", "products-mma", expert_up_mma, &mma_300},
                  {"up dgrad, mma.sync", "products-mma", up_dgrad_mma, &mma_300},
                  {"up wgrad, mma.sync", "products-mma", up_wgrad_mma, &mma_300},
                  {"cuBLAS grouped up forward", "vendor", cublas_forward},
                  {"cuBLAS grouped up dgrad", "vendor", cublas_dgrad},
                  {"cuBLAS grouped up wgrad", "vendor", cublas_wgrad},
                  {"cuBLAS grouped up wgrad, fp32", "vendor", cublas_wgrad_wide},
                  {"row norms", "rows", row_norms, &copy_80},
                  {"row dots", "rows", row_dots},
                  {"bf16 to fp32", "rows", widen},
                  {"pack", "rows", pack_rows, &copy_70},
                  {"unpack", "rows", unpack_rows},
                  {"combine", "rows", combine_rows, &copy_70},
                  {"swiglu forward", "rows", swiglu_forward},
                  {"swiglu backward", "rows", swiglu_backward},
                  {"score pairs", "pairs", score_pairs},
                  {"group pairs", "pairs", group_pairs},
                  {"where pairs lie", "pairs", invert},
                  {"select half of the pairs", "pairs", select_pairs},
                  {"router softmax top-k", "routers", router_forward},
                  {"router backward", "routers", router_backward},
                  {"skewadam, factored", "updates", skewadam_factored, &copy_80},
                  {"skewadam, factored + momentum", "updates", skewadam_momentum, &copy_80},
                  {"skewadam, full", "updates", skewadam_full, &copy_80},
                  {"adamw", "updates", adamw, &copy_80},
                  {"adafactor", "updates", adafactor, &copy_80},
                  {"lion", "updates", lion, &copy_80},
                  {"muon, 8 matrices", "updates", muon}};
enum { OPERATIONS = sizeof operations / sizeof *operations };

/* ---- timing -------------------------------------------------------------------------------------
 */

/* Seconds of one of `calls` calls in a row. */
static mz_kstatus stretch(layer *l, operation *run, int calls, cost *c, double *seconds) {
    mz_kstatus status = mz_kernels_mark(l->kernels, 0, 0);
    for (int i = 0; i < calls && status == MZ_K_OK; i++)
        status = run(l, c);
    if (status == MZ_K_OK)
        status = mz_kernels_mark(l->kernels, 0, 1);
    if (status == MZ_K_OK)
        status = mz_kernels_sync(l->kernels, 0);
    if (status == MZ_K_OK)
        status = mz_kernels_elapsed(l->kernels, 0, 1, seconds);
    *seconds /= calls;
    return status;
}

/* The median of three stretches of about 50 ms after a call to warm up. */
static mz_kstatus measure(layer *l, operation *run, bool small, timing *t) {
    cost c = {0, 0};
    double once = NAN, s[3] = {NAN, NAN, NAN};
    mz_kstatus status = stretch(l, run, 1, &c, &once);
    if (status == MZ_K_OK && !small)
        status = stretch(l, run, 1, &c, &once);
    const int calls = small || !(once < 0.05) ? 1 : (int)(0.05 / fmax(once, 1e-4));
    for (int i = 0; i < 3 && status == MZ_K_OK; i++)
        status = stretch(l, run, calls, &c, &s[i]);
    t->flops = c.flops;
    t->bytes = c.bytes;
    t->seconds = status == MZ_K_OK ? fmax(fmin(s[0], s[1]), fmin(fmax(s[0], s[1]), s[2])) : NAN;
    return status;
}

static void note_ceiling(timings *t, const timing *one) {
    if (isnan(one->seconds))
        return;
    if (strcmp(one->operation, "copy (ceiling)") == 0)
        t->copy_rate = fmax(t->copy_rate, one->bytes / one->seconds);
    if (strcmp(one->operation, "cuBLAS plain product (ceiling)") == 0)
        t->matrix_rate = fmax(t->matrix_rate, one->flops / one->seconds);
}

/* `names`: a list of names, each with a space around it. */
static bool among(const char *names, const char *name) {
    char spaced[40];
    snprintf(spaced, sizeof spaced, " %s ", name);
    return strstr(names, spaced) != NULL;
}

/* A new row of the table, without a time yet. */
static timing *add_row(timings *t, const char *operation, const char *shape) {
    timing *one = &t->at[t->n++];
    *one = (timing){.operation = operation, .shape = shape, .seconds = NAN};
    return one;
}

/* Without wgmma the default engine runs mma.sync. */
static goal goal_of(const layer *l, int operation) {
    const goal *g = operations[operation].goal, none = {GOAL_NONE, 0};
    const bool wgmma = strstr(mz_kernels_describe(l->kernels), " sm_90,") != NULL;
    if (g == &wgmma_450 && !wgmma)
        g = &mma_300;
    return g && (g->kind == GOAL_COPY_SHARE || l->shape.large) ? *g : none;
}

/* A refusal is a line of the table; a device that fails ends the run. */
static mz_kstatus time_layer(layer *l, bool small, double deadline, const char *failed,
                             timings *t) {
    for (int i = 0; i < OPERATIONS && t->n < TIMINGS_MOST; i++) {
        timing *one = add_row(t, operations[i].name, l->shape.name);
        one->goal = goal_of(l, i);
        t->cut |= now_seconds() > deadline;
        const bool wrong = operations[i].list && among(failed, operations[i].list);
        if (t->cut || wrong) {
            snprintf(one->message, sizeof one->message, "not timed: %s",
                     wrong ? "its checks failed" : "the time is up");
            continue;
        }
        const mz_kstatus status = measure(l, operations[i].run, small, one);
        if (status != MZ_K_OK)
            snprintf(one->message, sizeof one->message, "%s",
                     status == MZ_K_ENOMEM ? "needs more memory" : mz_kernels_error(l->kernels));
        if (status == MZ_K_EFAILED)
            return status;
        note_ceiling(t, one);
    }
    return MZ_K_OK;
}

static int shapes_of(bool small, const shape **s) {
    *s = small ? small_shapes : shapes;
    return small ? (int)(sizeof small_shapes / sizeof *small_shapes)
                 : (int)(sizeof shapes / sizeof *shapes);
}

mz_kstatus time_all(mz_kernels *k, bool small, uint64_t seed, double deadline, const char *failed,
                    timings *t) {
    const shape *s;
    const int n = shapes_of(small, &s);
    mz_kstatus status = MZ_K_OK;
    for (int i = 0; i < n && status != MZ_K_EFAILED && t->n < TIMINGS_MOST; i++) {
        layer l = {.kernels = k};
        status = t->cut ? MZ_K_OK : layer_open(k, &s[i], seed, &l);
        if (t->cut || status != MZ_K_OK)
            snprintf(add_row(t, "all", s[i].name)->message, sizeof t->at->message, "not timed: %s",
                     t->cut                  ? "the time is up"
                     : status == MZ_K_ENOMEM ? "too little memory for this shape"
                                             : mz_kernels_error(k));
        else
            status = time_layer(&l, small, deadline, failed, t);
        layer_close(&l);
    }
    return status == MZ_K_ENOMEM ? MZ_K_OK : status;
}

static bool write_shape(const shape *s, uint64_t seed, FILE *file) {
    int32_t *expert = malloc(sizeof *expert * (size_t)(s->tokens * s->k));
    int64_t *begin = malloc(sizeof *begin * ((size_t)s->experts + 1));
    const bool drawn = expert && begin && draw_pairs(s, &seed, expert, begin);
    if (drawn) {
        fprintf(file, "%s\t%lld\t%lld", s->name, (long long)s->hidden, (long long)s->intermediate);
        for (int32_t e = 0; e < s->experts; e++)
            fprintf(file, "\t%lld", (long long)(begin[e + 1] - begin[e]));
        fputc('\n', file);
    }
    free(expert);
    free(begin);
    return drawn;
}

bool write_counts(bool small, uint64_t seed, FILE *file) {
    const shape *s;
    const int n = shapes_of(small, &s);
    bool written = true;
    for (int i = 0; i < n && written; i++)
        written = write_shape(&s[i], seed, file);
    return written;
}
