/* The whole backward pass of a layer's experts, from the gradient of the layer's output to those of
 * its input and of the weights: of all pairs, and of half of every expert's. Both start from the
 * gate and up products that the forward pass saved, and from their rows' norms. The kept case
 * scores and selects pairs, gathers what was saved of them, and does the rest on fewer rows. The
 * mixed case saved nothing: it computes gate and up of the kept pairs again. */
#include "tests/gpu/gpu.h"

static mz_groups groups_of(const layer *l, const int64_t *begin, int64_t most) {
    return (mz_groups){begin, l->shape.experts, most, NULL};
}

/* At most this many pairs stay; how many do, the device knows. */
static int64_t kept_most(const layer *l) {
    int64_t sum = 0;
    for (int32_t e = 0; e < l->shape.experts; e++)
        sum += (l->begin_host[e + 1] - l->begin_host[e] + 1) / 2;
    return sum;
}

static mz_kstatus gather(layer *l, const void *from, int64_t cols, const int32_t *place,
                         const int64_t *list, int64_t rows, const float *scale, void *to) {
    const mz_pack args = {.type = MZ_BF16,
                          .x = from,
                          .hidden = cols,
                          .rows = rows,
                          .row_pair = list,
                          .k = l->shape.k,
                          .token = place,
                          .scale = scale,
                          .out = to};
    return mz_pack_rows(l->kernels, 0, &args);
}

static mz_kstatus product(layer *l, mz_product op, mz_groups groups, int64_t n, int64_t k,
                          const void *a, void *const *weight, void *c) {
    const mz_product_args args = {.op = op,
                                  .groups = groups,
                                  .n = n,
                                  .k = k,
                                  .type = MZ_BF16,
                                  .gradient_type = MZ_BF16,
                                  .a = a,
                                  .weight = weight,
                                  .c = c};
    return run_product(l, &args);
}

/* What the rows of one pass are. */
typedef struct rows_of_pass {
    const int64_t *list, *begin;
    int64_t rows;
    void *x, *gate_up;
} rows_of_pass;

/* Weighted gradients of the rows, through the down-projection and SwiGLU. */
static mz_kstatus through_down(layer *l, const rows_of_pass *r) {
    const int64_t H = l->shape.hidden, I = l->shape.intermediate;
    const mz_groups groups = groups_of(l, r->begin, r->rows);
    mz_kstatus s = gather(l, l->dy, H, NULL, r->list, r->rows, l->router_weight, l->out);
    if (s == MZ_K_OK)
        s = product(l, MZ_PRODUCT_DGRAD, groups, H, I, l->out, l->down, l->dhidden);
    const mz_swiglu back = {.type = MZ_BF16,
                            .rows = r->rows,
                            .intermediate = I,
                            .gate_up = r->gate_up,
                            .h = l->hidden,
                            .dh = l->dhidden,
                            .dot = l->dot,
                            .dgate_up = l->dgate_up};
    if (s == MZ_K_OK)
        s = mz_swiglu_backward(l->kernels, 0, &back);
    return s == MZ_K_OK
               ? product(l, MZ_PRODUCT_WGRAD, groups, H, I, l->out, l->down_gradient, l->hidden)
               : s;
}

/* From there to the weights of the up-projection and the input; rows_x is free for the input's rows
 * once the weights' gradients have read it. */
static mz_kstatus through_up(layer *l, const rows_of_pass *r) {
    const int64_t H = l->shape.hidden, I = l->shape.intermediate;
    const mz_groups groups = groups_of(l, r->begin, r->rows);
    mz_kstatus s = product(l, MZ_PRODUCT_WGRAD, groups, 2 * I, H, l->dgate_up, l->gradient, r->x);
    if (s == MZ_K_OK)
        s = product(l, MZ_PRODUCT_DGRAD, groups, 2 * I, H, l->dgate_up, l->up, l->rows_x);
    if (s == MZ_K_OK)
        s = mz_invert(l->kernels, 0, r->list, r->rows, l->pairs, l->row_position);
    const mz_combine combine = {.type = MZ_BF16,
                                .row = l->rows_x,
                                .hidden = H,
                                .tokens = l->shape.tokens,
                                .k = l->shape.k,
                                .position = l->row_position,
                                .out = l->dx};
    return s == MZ_K_OK ? mz_combine_rows(l->kernels, 0, &combine) : s;
}

static mz_kstatus backward_rows(layer *l, const rows_of_pass *r) {
    const mz_kstatus s = through_down(l, r);
    return s == MZ_K_OK ? through_up(l, r) : s;
}

/* Norms, scores, and the pairs that stay. */
static mz_kstatus choose(layer *l) {
    const shape *p = &l->shape;
    const mz_norms norms = {MZ_BF16, l->dy, p->tokens, p->hidden, p->hidden, l->grad_norm2};
    const mz_score_args scoring = {.kind = MZ_SCORED_DOWN,
                                   .tokens = p->tokens,
                                   .pairs = l->pairs,
                                   .k = p->k,
                                   .weight = l->router_weight,
                                   .grad_norm2 = l->grad_norm2,
                                   .hidden_norm2 = l->norm,
                                   .score = l->score};
    const mz_selection selection = {.score = l->score,
                                    .order = l->order,
                                    .begin = l->begin,
                                    .quota = l->quota,
                                    .pairs = l->pairs,
                                    .experts = p->experts,
                                    .kept = l->kept,
                                    .kept_begin = l->kept_begin};
    if (!scratch_fits(l, mz_select_workspace(l->kernels, &selection)))
        return MZ_K_EINVAL;
    mz_kstatus s = mz_row_norms(l->kernels, 0, &norms);
    if (s == MZ_K_OK)
        s = mz_score_pairs(l->kernels, 0, &scoring);
    return s == MZ_K_OK ? mz_select_pairs(l->kernels, 0, &selection, l->workspace) : s;
}

/* Four products of each row with a matrix [2I][H] or two halves of one, and what they move at
 * least: inputs, gradients and weights once, the weights' gradients written. */
static void charge(const layer *l, cost *c, double rows) {
    const double H = (double)l->shape.hidden, I = (double)l->shape.intermediate;
    c->flops = 12 * rows * H * I;
    c->bytes = 2 * (rows * (H + 2 * I) + 2 * (double)l->shape.tokens * H) +
               2 * 2 * 3 * (double)l->shape.experts * H * I;
}

mz_kstatus backward_full(layer *l, cost *c) {
    charge(l, c, (double)l->pairs);
    const rows_of_pass all = {l->order, l->begin, l->pairs, l->packed, l->gate_up};
    return backward_rows(l, &all);
}

mz_kstatus backward_kept(layer *l, cost *c) {
    const rows_of_pass kept = {l->kept, l->kept_begin, kept_most(l), l->rows_x, l->rows_gate_up};
    charge(l, c, (double)kept.rows);
    mz_kstatus s = choose(l);
    if (s == MZ_K_OK)
        s = gather(l, l->x, l->shape.hidden, NULL, l->kept, kept.rows, NULL, l->rows_x);
    if (s == MZ_K_OK)
        s = gather(l, l->gate_up, 2 * l->shape.intermediate, l->place, l->kept, kept.rows, NULL,
                   l->rows_gate_up);
    return s == MZ_K_OK ? backward_rows(l, &kept) : s;
}

mz_kstatus backward_resend(layer *l, cost *c) {
    const rows_of_pass kept = {l->kept, l->kept_begin, kept_most(l), l->rows_x, l->rows_gate_up};
    const mz_expert_up up = {.groups = groups_of(l, l->kept_begin, kept.rows),
                             .hidden = l->shape.hidden,
                             .intermediate = l->shape.intermediate,
                             .type = MZ_BF16,
                             .x = l->rows_x,
                             .weight = l->up,
                             .gate_up = l->rows_gate_up,
                             .h = l->hidden};
    charge(l, c, (double)kept.rows);
    c->flops *= 4.0 / 3;
    if (!scratch_fits(l, mz_expert_up_workspace(l->kernels, &up)))
        return MZ_K_EINVAL;
    mz_kstatus s = choose(l);
    if (s == MZ_K_OK)
        s = gather(l, l->x, l->shape.hidden, NULL, l->kept, kept.rows, NULL, l->rows_x);
    if (s == MZ_K_OK)
        s = mz_expert_up_forward(l->kernels, 0, &up, l->workspace);
    return s == MZ_K_OK ? backward_rows(l, &kept) : s;
}
