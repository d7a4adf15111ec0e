/* The operations of kernels.h, each on the buffers of a layer: it enqueues itself once and says
 * what it costs at least. The whole backward pass is in backward.c. */
#include "tests/gpu/gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
                          s->hidden, s->hidden, s->hidden, l->dot};
    c->bytes = rows_of(l) * ((double)s->hidden * 4 + 4);
    return mz_row_dots(l->kernels, 0, &args);
}

static mz_kstatus widen(layer *l, cost *c) {
    const int64_t n = l->pairs * l->shape.intermediate;
    c->bytes = 6 * (double)n;
    return mz_convert(l->kernels, 0, MZ_F32, l->dgate_up, MZ_BF16, l->hidden, n);
}

static mz_kstatus narrow(layer *l, cost *c) {
    const int64_t n = l->pairs * l->shape.intermediate;
    c->bytes = 6 * (double)n;
    return mz_convert(l->kernels, 0, MZ_BF16, l->dhidden, MZ_F32, l->dgate_up, n);
}

static mz_kstatus zero(layer *l, cost *c) {
    const size_t bytes = (size_t)l->pairs * (size_t)l->shape.hidden * 2;
    c->bytes = (double)bytes;
    return mz_kernels_zero(l->kernels, 0, l->out, bytes);
}

mz_score_args scores_of(const layer *l, mz_score kind) {
    return (mz_score_args){.kind = kind,
                           .tokens = l->shape.tokens,
                           .pairs = l->pairs,
                           .k = l->shape.k,
                           .weight = l->router_weight,
                           .grad_norm2 = l->norm,
                           .hidden_norm2 = l->score,
                           .seed = DRAW_SEED,
                           .score = kind == MZ_SCORED_SAMPLE ? l->drawn : l->dgate_up};
}
static mz_kstatus scored(layer *l, cost *c, mz_score kind) {
    const mz_score_args args = scores_of(l, kind);
    c->bytes = rows_of(l) * 12 + (double)l->shape.tokens * 4;
    return mz_score_pairs(l->kernels, 0, &args);
}
static mz_kstatus score_pairs(layer *l, cost *c) {
    return scored(l, c, MZ_SCORED_DOWN);
}
static mz_kstatus draw_scores(layer *l, cost *c) {
    return scored(l, c, MZ_SCORED_SAMPLE);
}

/* Sums of as many counts as there are pairs. */
static mz_kstatus prefix_sums(layer *l, cost *c) {
    c->bytes = rows_of(l) * 16;
    if (!scratch_fits(l, mz_prefix_sums_workspace(l->kernels, l->pairs)))
        return MZ_K_EINVAL;
    return mz_prefix_sums(l->kernels, 0, l->length, l->pairs, l->sums, l->workspace);
}

static mz_kstatus arrange(layer *l, cost *c) {
    c->bytes = rows_of(l) * 16;
    return mz_arrange(l->kernels, 0, l->segment, 2 * (int64_t)l->shape.experts, l->order,
                      l->arranged);
}

static mz_kstatus invert(layer *l, cost *c) {
    c->bytes = rows_of(l) * 16;
    return mz_invert(l->kernels, 0, l->order, l->pairs, l->pairs, l->position);
}

static mz_kstatus grouped(layer *l, cost *c, bool counts_alone) {
    const mz_grouping args = {.expert = l->expert,
                              .pairs = l->pairs,
                              .experts = l->shape.experts,
                              .count = counts_alone ? l->count : NULL,
                              .begin = counts_alone ? NULL : l->begin,
                              .order = counts_alone ? NULL : l->order};
    c->bytes = rows_of(l) * (counts_alone ? 4 : 12);
    if (!scratch_fits(l, mz_group_pairs_workspace(l->kernels, &args)))
        return MZ_K_EINVAL;
    return mz_group_pairs(l->kernels, 0, &args, l->workspace);
}
static mz_kstatus group_pairs(layer *l, cost *c) {
    return grouped(l, c, false);
}
static mz_kstatus count_pairs(layer *l, cost *c) {
    return grouped(l, c, true);
}

/* Of a sample also what each kept pair counts for: half of the weights read, as many written. */
static mz_kstatus selected(layer *l, cost *c, bool scaled) {
    const mz_selection args = {.score = scaled ? l->drawn : l->score,
                               .order = l->order,
                               .begin = l->begin,
                               .quota = l->quota,
                               .pairs = l->pairs,
                               .experts = l->shape.experts,
                               .kept = l->kept,
                               .kept_begin = l->kept_begin,
                               .scaled = scaled ? l->dot : NULL,
                               .weight = scaled ? l->router_weight : NULL,
                               .seed = DRAW_SEED};
    c->bytes = rows_of(l) * (scaled ? 20 : 16);
    if (!scratch_fits(l, mz_select_workspace(l->kernels, &args)))
        return MZ_K_EINVAL;
    return mz_select_pairs(l->kernels, 0, &args, l->workspace);
}
static mz_kstatus select_pairs(layer *l, cost *c) {
    return selected(l, c, false);
}
static mz_kstatus select_sample(layer *l, cost *c) {
    return selected(l, c, true);
}

/* Inputs of the pairs, or weighted gradients of their outputs. */
static mz_kstatus packed(layer *l, cost *c, const void *x, const float *scale, void *out) {
    const mz_pack args = {.type = MZ_BF16,
                          .x = x,
                          .hidden = l->shape.hidden,
                          .rows = l->pairs,
                          .row_pair = l->order,
                          .k = l->shape.k,
                          .scale = scale,
                          .out = out};
    c->bytes = 2.0 * (double)l->shape.hidden * (rows_of(l) + (double)l->shape.tokens);
    return mz_pack_rows(l->kernels, 0, &args);
}
static mz_kstatus pack_rows(layer *l, cost *c) {
    return packed(l, c, l->x, NULL, l->packed);
}
static mz_kstatus pack_scaled(layer *l, cost *c) {
    return packed(l, c, l->dy, l->router_weight, l->rows_x);
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
    return run_product(l, &args);
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

/* Of the down-projection: [H][I]. The gradient of its output lies in `out`. */
static mz_kstatus down_product(layer *l, cost *c, mz_product op) {
    const int64_t n = l->shape.hidden, k = l->shape.intermediate;
    const mz_product_args args = {.op = op,
                                  .groups = groups_of(l),
                                  .n = n,
                                  .k = k,
                                  .type = MZ_BF16,
                                  .gradient_type = MZ_BF16,
                                  .a = op == MZ_PRODUCT_FORWARD ? l->hidden : l->out,
                                  .weight = op == MZ_PRODUCT_WGRAD ? l->down_gradient : l->down,
                                  .c = op == MZ_PRODUCT_FORWARD ? l->out
                                       : op == MZ_PRODUCT_DGRAD ? l->dhidden
                                                                : l->hidden};
    c->flops = 2 * rows_of(l) * (double)n * (double)k;
    c->bytes = 2 * (rows_of(l) * (double)(n + k) + (double)l->shape.experts * (double)(n * k));
    return run_product(l, &args);
}
static mz_kstatus down_forward(layer *l, cost *c) {
    return down_product(l, c, MZ_PRODUCT_FORWARD);
}
static mz_kstatus down_dgrad(layer *l, cost *c) {
    return down_product(l, c, MZ_PRODUCT_DGRAD);
}
static mz_kstatus down_wgrad(layer *l, cost *c) {
    return down_product(l, c, MZ_PRODUCT_WGRAD);
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
    if (!scratch_fits(l, mz_expert_up_workspace(l->kernels, &args)))
        return MZ_K_EINVAL;
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
    c->bytes =
        2 * ((double)l->shape.tokens * (double)(args.n + args.k) + (double)args.n * (double)args.k);
    if (!scratch_fits(l, mz_grouped_gemm_workspace(l->kernels, &args)))
        return MZ_K_EINVAL;
    mz_kstatus status =
        mz_kernels_copy(l->kernels, 0, MZ_COPY_IN, l->kept_begin, begin, sizeof begin);
    return status == MZ_K_OK ? mz_grouped_gemm(l->kernels, 0, &args, l->workspace) : status;
}

/* ---- gates and routers --------------------------------------------------------------------------
 */

/* Values of a gate's activation; those of the layer's `gate_up` stand for all of them. */
int64_t gate_rank(const layer *l) {
    const int64_t most = l->shape.k * 2 * l->shape.intermediate / l->shape.experts;
    return most < 32 ? most : 32;
}
static mz_kstatus gate_norms(layer *l, cost *c, bool backward) {
    const shape *s = &l->shape;
    const int64_t r = gate_rank(l);
    const double all = (double)s->tokens * s->experts;
    c->bytes = all * (backward ? 4 * (double)r + 8 : 2 * (double)r + 4);
    return backward ? mz_gate_norms_backward(l->kernels, 0, MZ_BF16, l->gate_up, l->gate_norm,
                                             l->logits, s->tokens, s->experts, r, l->dgate_up)
                    : mz_gate_norms(l->kernels, 0, MZ_BF16, l->gate_up, s->tokens, s->experts, r,
                                    l->gate_norm);
}
static mz_kstatus gate_norms_forward(layer *l, cost *c) {
    return gate_norms(l, c, false);
}
static mz_kstatus gate_norms_backward(layer *l, cost *c) {
    return gate_norms(l, c, true);
}

/* DeepSeek-V3's form of the sigmoid router: eight groups, the best four. Of AoE and routing-free
 * the logits stand for the norms: about k of a token's experts are above theta. */
mz_router router_of(const layer *l, mz_router_kind kind) {
    const bool listed = kind == MZ_ROUTER_RELU || kind == MZ_ROUTER_ROUTING_FREE;
    const int32_t groups = l->shape.experts >= 64 ? 8 : 4;
    return (mz_router){.kind = kind,
                       .tokens = l->shape.tokens,
                       .experts = l->shape.experts,
                       .k = l->shape.k,
                       .normalize = true,
                       .scale = kind == MZ_ROUTER_SIGMOID ? 2.5F : 1,
                       .n_group = kind == MZ_ROUTER_SIGMOID ? groups : 1,
                       .topk_group = kind == MZ_ROUTER_SIGMOID ? groups / 2 : 1,
                       .theta = 0.1F,
                       .logits = kind == MZ_ROUTER_RELU ? l->few_logits : l->logits,
                       .bias = kind == MZ_ROUTER_SIGMOID ? l->bias : NULL,
                       .count = l->count,
                       .expert = listed ? l->listed : l->chosen,
                       .weight = listed ? l->listed_weight : l->router_weight,
                       .token_begin = listed ? l->token_begin : NULL,
                       .dweight = listed ? l->gate_norm : l->score,
                       .dlogits = l->dgate_up};
}

static mz_kstatus router(layer *l, cost *c, mz_router_kind kind, bool backward) {
    const mz_router args = router_of(l, kind);
    const double dense = (double)l->shape.tokens * l->shape.experts;
    /* backward of the kinds that normalise over the chosen reads their pairs alone and writes all
     */
    c->bytes = dense * 4 * (backward ? 2 : 1) + rows_of(l) * 8;
    if (!scratch_fits(l, mz_router_workspace(l->kernels, &args)))
        return MZ_K_EINVAL;
    return backward ? mz_router_backward(l->kernels, 0, &args, l->workspace)
                    : mz_router_forward(l->kernels, 0, &args, l->workspace);
}
#define ROUTER(name, kind)                                                                         \
    static mz_kstatus name(layer *l, cost *c) {                                                    \
        return router(l, c, kind, false);                                                          \
    }                                                                                              \
    static mz_kstatus name##_backward(layer *l, cost *c) {                                         \
        return router(l, c, kind, true);                                                           \
    }
ROUTER(softmax, MZ_ROUTER_SOFTMAX)
ROUTER(sigmoid, MZ_ROUTER_SIGMOID)
ROUTER(aoe, MZ_ROUTER_AOE)
ROUTER(relu, MZ_ROUTER_RELU)
ROUTER(routing_free, MZ_ROUTER_ROUTING_FREE)
#undef ROUTER

static mz_kstatus losses(layer *l, cost *c) {
    mz_router args = router_of(l, MZ_ROUTER_SOFTMAX);
    args.aux_factor = args.z_factor = 1;
    c->bytes = (double)l->shape.tokens * l->shape.experts * 4;
    if (!scratch_fits(l, mz_router_workspace(l->kernels, &args)))
        return MZ_K_EINVAL;
    return mz_router_losses(l->kernels, 0, &args, l->loss, l->workspace);
}

/* ---- optimizers ---------------------------------------------------------------------------------
 */

/* Of all experts, or of as many as `args` says. */
static mz_kstatus update(layer *l, cost *c, mz_update args, double bytes_each) {
    args.matrices = args.matrices > 0 ? args.matrices : l->shape.experts;
    args.rows = 2 * l->shape.intermediate;
    args.cols = l->shape.hidden;
    args.type = MZ_BF16;
    args.gradient_type = MZ_BF16;
    args.parameter = l->parameters;
    args.gradient = l->gradients;
    args.rate = l->rate;
    args.step = 1000;
    c->bytes = bytes_each * (double)args.matrices * (double)args.rows * (double)args.cols;
    if (!scratch_fits(l, mz_update_workspace(l->kernels, &args)))
        return MZ_K_EINVAL;
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

/* ---- the table ----------------------------------------------------------------------------------
 * Goals of DESIGN section 9; the products' of the large shapes, with wgmma and with mma.sync. */
static const goal copy_70 = {GOAL_COPY_SHARE, 0.7, NULL}, copy_80 = {GOAL_COPY_SHARE, 0.8, NULL},
                  wgmma_450 = {GOAL_FLOPS, 450e12, NULL}, mma_300 = {GOAL_FLOPS, 300e12, NULL},
                  kept_60 = {GOAL_TIME_SHARE, 0.6, "LRMoE whole backward, all pairs"};

const operation operations[] = {
    {"copy (ceiling)", NULL, copy, check_copy, NULL},
    {"cuBLAS plain product (ceiling)", "vendor", cublas_plain, check_plain, NULL},
    {"up forward", "products", up_forward, check_up_forward, &wgmma_450},
    {"up forward + SwiGLU + norms", "products", expert_up, check_expert_up, &wgmma_450},
    {"down forward", "products", down_forward, check_down_forward, &wgmma_450},
    {"down dgrad", "products", down_dgrad, check_down_dgrad, &wgmma_450},
    {"down wgrad", "products", down_wgrad, check_down_wgrad, &wgmma_450},
    {"up dgrad", "products", up_dgrad, check_up_dgrad, &wgmma_450},
    {"up wgrad", "products", up_wgrad, check_up_wgrad, &wgmma_450},
    {"up wgrad, fp32", "products", up_wgrad_wide, check_up_wgrad_wide, &wgmma_450},
    {"up forward, mma.sync", "products-mma", up_forward_mma, check_up_forward, &mma_300},
    {"up fwd + SwiGLU, mma.sync", "products-mma", expert_up_mma, check_expert_up, &mma_300},
    {"up dgrad, mma.sync", "products-mma", up_dgrad_mma, check_up_dgrad, &mma_300},
    {"up wgrad, mma.sync", "products-mma", up_wgrad_mma, check_up_wgrad, &mma_300},
    {"cuBLAS grouped up forward", "vendor", cublas_forward, check_up_forward, NULL},
    {"cuBLAS grouped up dgrad", "vendor", cublas_dgrad, check_up_dgrad, NULL},
    {"cuBLAS grouped up wgrad", "vendor", cublas_wgrad, check_up_wgrad, NULL},
    {"cuBLAS grouped up wgrad, fp32", "vendor", cublas_wgrad_wide, check_up_wgrad_wide, NULL},
    {"row norms", "rows", row_norms, check_norms, &copy_80},
    {"row dots", "rows", row_dots, check_dots, NULL},
    {"pack", "rows", pack_rows, check_packed, &copy_70},
    {"pack, weighted", "rows", pack_scaled, check_scaled, &copy_70},
    {"unpack", "rows", unpack_rows, check_unpacked, NULL},
    {"combine", "rows", combine_rows, check_combined, &copy_70},
    {"swiglu forward", "rows", swiglu_forward, check_swiglu_forward, NULL},
    {"swiglu backward", "rows", swiglu_backward, check_swiglu_backward, NULL},
    {"bf16 to fp32", "rows", widen, check_widen, NULL},
    {"fp32 to bf16", "rows", narrow, check_narrow, NULL},
    {"zeros", "rows", zero, check_zero, NULL},
    {"score pairs", "pairs", score_pairs, check_scores, NULL},
    {"score pairs, sampling", "pairs", draw_scores, check_drawn_scores, NULL},
    {"group pairs", "pairs", group_pairs, check_grouping, NULL},
    {"count pairs", "pairs", count_pairs, check_counts, NULL},
    {"prefix sums", "pairs", prefix_sums, check_sums, NULL},
    {"where pairs lie", "pairs", invert, check_places, NULL},
    {"arrange by destination", "pairs", arrange, check_arranged, NULL},
    {"select half of the pairs", "pairs", select_pairs, check_selection, NULL},
    {"select, scaled sample", "pairs", select_sample, check_scaled_selection, NULL},
    {"gate norms", "rows", gate_norms_forward, check_gate_norms, &copy_80},
    {"gate norms backward", "rows", gate_norms_backward, check_gate_norms_backward, NULL},
    {"router softmax top-k", "routers", softmax, check_softmax, NULL},
    {"router backward", "routers", softmax_backward, check_softmax_backward, NULL},
    {"router losses", "routers", losses, check_losses, NULL},
    {"sigmoid router, bias, groups", "routers", sigmoid, check_sigmoid, NULL},
    {"sigmoid router backward", "routers", sigmoid_backward, check_sigmoid_backward, NULL},
    {"AoE router", "routers", aoe, check_aoe, NULL},
    {"AoE router backward", "routers", aoe_backward, check_aoe_backward, NULL},
    {"ReLU router", "routers", relu, check_relu, NULL},
    {"ReLU router backward", "routers", relu_backward, check_relu_backward, NULL},
    {"routing-free router", "routers", routing_free, check_routing_free, NULL},
    {"routing-free router backward", "routers", routing_free_backward, check_routing_free_backward,
     NULL},
    {"LRMoE whole backward, all pairs", "products", backward_full, check_backward_full, NULL},
    {"LRMoE whole backward, keep 1/2", "products", backward_kept, check_backward_kept, &kept_60},
    {"LRMoE keep 1/2, resend (mixed)", "products", backward_resend, check_backward_resend, NULL},
    {"skewadam, factored", "updates", skewadam_factored, check_skewadam_factored, &copy_80},
    {"skewadam, factored + momentum", "updates", skewadam_momentum, check_skewadam_momentum,
     &copy_80},
    {"skewadam, full", "updates", skewadam_full, check_skewadam_full, &copy_80},
    {"adamw", "updates", adamw, check_adamw, &copy_80},
    {"adafactor", "updates", adafactor, check_adafactor, &copy_80},
    {"lion", "updates", lion, check_lion, &copy_80},
    {"muon, 8 matrices", "updates", muon, check_muon, NULL}};
const int operations_count = sizeof operations / sizeof *operations;

/* Every expert keeps at least 256 rows, or the shape stands for one where they do. */
static bool many_kept(const layer *l) {
    bool many = true;
    for (int32_t e = 0; e < l->shape.experts; e++)
        many &= l->begin_host[e + 1] - l->begin_host[e] >= 2 * 256;
    return many || l->shape.tokens < 1024;
}

/* Without wgmma the default engine runs mma.sync. */
goal goal_of(const layer *l, const operation *o) {
    const goal *g = o->goal, none = {GOAL_NONE, 0, NULL};
    const bool wgmma = strstr(mz_kernels_describe(l->kernels), " sm_90,") != NULL;
    if (g == &wgmma_450 && !wgmma)
        g = &mma_300;
    const bool here = g && (g->kind == GOAL_COPY_SHARE ||
                            (g->kind == GOAL_FLOPS ? l->shape.large : many_kept(l)));
    return here ? *g : none;
}
