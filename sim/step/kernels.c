/* Kernel times of one rank. Bytes are bf16 rows through device memory, each input read once and
 * each output written once; T tokens, H hidden, I intermediate. Matrix products: 2mnk FLOPs,
 * backward is one product for the input and one for the weight gradient. */
#include "sim/step/inside.h"

/* Flash attention's backward makes five products of the score's size where forward makes two
 * (Dao, FlashAttention-2, 2023, section 3.2). */
static const double ATTENTION_BACKWARD = 2.5;
/* Radix selection reads 4-byte scores in four passes of 8 bits. */
enum { SCORE_BYTES = 4, SELECT_PASSES = 4 };

step_widths step_widths_of(const mz_model *m) {
    const bool latent = m->kv_lora > 0; /* MLA: keys and values are expanded per head */
    const int64_t value = m->v_head_dim > 0 ? m->v_head_dim : m->head_dim;
    const int64_t key = latent ? m->nope_dim + m->rope_dim : m->head_dim;
    const int64_t holders = latent ? m->heads : m->kv_heads;
    return (step_widths){.query = m->heads * key,
                         .key = holders * key,
                         .value = holders * value,
                         .output = m->heads * value,
                         .up = (m->gated ? 2 : 1) * m->expert_intermediate};
}

/* Projections of attention as (n, k); returns how many. */
static int projections(const mz_model *m, int64_t n[5], int64_t k[5]) {
    const step_widths w = step_widths_of(m);
    const int64_t h = m->hidden;
    int count = 0;
    if (m->kv_lora == 0) {
        n[count] = w.query + w.key + w.value, k[count++] = h;
    } else {
        if (m->q_lora > 0) {
            n[count] = m->q_lora, k[count++] = h;
            n[count] = w.query, k[count++] = m->q_lora;
        } else {
            n[count] = w.query, k[count++] = h;
        }
        n[count] = m->kv_lora + m->rope_dim, k[count++] = h;
        n[count] = m->heads * m->nope_dim + w.value, k[count++] = m->kv_lora;
    }
    n[count] = h, k[count++] = w.output;
    return count;
}

/* Launches: forward norm, projections, rotary embedding, attention, residual with the next norm;
 * backward the same with two products per projection. Eager attention is product, softmax, product,
 * backward four products and one kernel. Router: product, softmax and top-k, histogram, sort.
 * Feed-forward: up/gate, activation, down, residual. Loss: norm, product, cross entropy, backward;
 * but for the norms as many more for every further piece. */
step_launches step_count_launches(const mz_step *s) {
    int64_t n[5], k[5];
    const int p = projections(s->model, n, k);
    const bool eager = s->options.attention == MZ_ATTENTION_EAGER;
    return (step_launches){.attention = 4 + p + (eager ? 2 : 0),
                           .attention_back = 4 + 2 * p + (eager ? 4 : 0),
                           .router = 4,
                           .router_back = 3,
                           .ffn = 4,
                           .ffn_back = 6};
}

static double gemm(const mz_step *s, int64_t m, int64_t n, int64_t k) {
    if (m <= 0 || n <= 0 || k <= 0)
        return 0;
    return mz_cost_gemm(&s->cluster->device, s->cost, (double)m, (double)n, (double)k);
}

static double gemm_back(const mz_step *s, int64_t tokens, int64_t n, int64_t k) {
    return tokens <= 0 ? 0 : gemm(s, tokens, k, n) + gemm(s, k, n, tokens);
}

static double bytes(const mz_step *s, double amount) {
    return amount > 0 ? mz_cost_memory(&s->cluster->device, amount) : 0;
}

double step_kernel(const mz_step *s, mz_work work, int64_t rows, int64_t cols, int64_t tokens) {
    if (!s->options.effects.other_work)
        return 0;
    return mz_cost_work(&s->cluster->device, work, rows, cols,
                        mz_work_bytes(work, rows, cols, tokens));
}

double step_row_copies(const mz_step *s, int64_t read, int64_t written) {
    return bytes(s, 2.0 * (double)s->model->hidden * (double)(read + written));
}

double step_score_flops(const mz_step *s, int32_t layer, int64_t tokens, const int64_t *length,
                        int64_t count) {
    double flops = 0;
    for (int64_t i = 0; i < count; i++) {
        const double l = (double)length[i];
        flops += mz_model_attention_flops(s->model, layer, l, l);
        tokens -= length[i];
    }
    if (tokens <= 0)
        return flops;
    const int64_t usual = s->sequence < tokens ? s->sequence : tokens;
    return flops + mz_model_attention_flops(s->model, layer, (double)tokens, (double)usual);
}

static double score_time(const mz_step *s, double flops, bool backward) {
    if (flops <= 0)
        return 0;
    return mz_cost_attention(&s->cluster->device, backward ? flops * ATTENTION_BACKWARD : flops,
                             backward);
}

double step_product_rate(const mz_step *s) {
    const mz_device *d = &s->cluster->device;
    return d->bf16_flops * d->gemm_efficiency * d->speed;
}

/* Eager attention takes the whole square of scores, masked or not, in every layer: two products in
 * forward, four in backward, at the rate of large ones. Through memory go, 2 B per head and pair of
 * (query, key): the scores out and in, probabilities out and in; in backward the probabilities'
 * gradients out, both in and the scores' gradients out, these in twice and probabilities once.
 * Selective recomputation makes scores and probabilities again: out, in, out. */
static void eager_times(const mz_step *s, double pairs, step_token_times *t) {
    enum { FORWARD = 8, BACKWARD = 14, AGAIN = 6 };
    const mz_model *m = s->model;
    const double cells = pairs * m->heads, rate = step_product_rate(s);
    const double one = 2 * cells * (double)m->head_dim / rate;
    const double both = one + 2 * cells * (double)m->v_head_dim / rate;
    t->scores = both + bytes(s, FORWARD * cells);
    t->scores_back = 2 * both + bytes(s, BACKWARD * cells);
    if (s->options.recompute == MZ_RECOMPUTE_SELECTIVE)
        t->scores_back += one + bytes(s, AGAIN * cells);
    t->window_scores = t->scores;
    t->window_scores_back = t->scores_back;
}

/* Layers with a window attend to less; the two kinds of a model are kept apart. */
void step_score_times_of(const mz_step *s, int32_t micro_batch, int32_t rank, step_token_times *t) {
    const double *flops = s->score_flops + 2 * ((int64_t)micro_batch * s->ranks + rank);
    if (s->options.attention == MZ_ATTENTION_EAGER) {
        eager_times(s, (double)step_score_pairs(s, micro_batch, rank), t);
        return;
    }
    t->scores = score_time(s, flops[0], false);
    t->scores_back = score_time(s, flops[0], true);
    t->window_scores = score_time(s, flops[1], false);
    t->window_scores_back = score_time(s, flops[1], true);
}

/* Everything of attention but the scores, which depend on the layer's window. */
static void attention_times(const mz_step *s, int64_t tokens, step_token_times *t) {
    const mz_model *m = s->model;
    const double rows = (double)tokens, h = (double)m->hidden;
    const double rotary = (double)(s->width.query + s->width.key);
    int64_t n[5], k[5];
    const int p = projections(m, n, k);
    /* norm: x in, normed out; rotary: in and out; residual and next norm: two in, two out */
    t->attention = bytes(s, rows * (4 * h + 4 * rotary + 8 * h));
    t->attention_back = bytes(s, rows * (6 * h + 4 * rotary + 10 * h));
    t->selective = bytes(s, rows * 8 * h); /* both norms again */
    for (int i = 0; i < p; i++) {
        t->attention += gemm(s, tokens, n[i], k[i]);
        t->attention_back += gemm_back(s, tokens, n[i], k[i]);
    }
}

static double ffn(const mz_step *s, int64_t tokens, int64_t inter) {
    const mz_model *m = s->model;
    const int64_t up = m->gated ? 2 * inter : inter;
    return gemm(s, tokens, up, m->hidden) + gemm(s, tokens, m->hidden, inter) +
           bytes(s, (double)tokens * (double)(2 * (up + inter) + 6 * m->hidden));
}

static double ffn_back(const mz_step *s, int64_t tokens, int64_t inter) {
    const mz_model *m = s->model;
    const int64_t up = m->gated ? 2 * inter : inter;
    double time = gemm_back(s, tokens, up, m->hidden) + gemm_back(s, tokens, m->hidden, inter) +
                  bytes(s, (double)tokens * (double)(2 * (inter + 2 * up) + 4 * m->hidden));
    if (s->options.recompute == MZ_RECOMPUTE_SELECTIVE)
        time += bytes(s, (double)tokens * (double)(2 * (up + inter)));
    return time;
}

static void router_times(const mz_step *s, int64_t tokens, step_token_times *t) {
    const mz_model *m = s->model;
    const double per_token =
        8.0 * m->experts + 16.0 * m->top_k; /* logits and choices, in and out */
    t->router = gemm(s, tokens, m->experts, m->hidden) + bytes(s, (double)tokens * per_token);
    t->router_back =
        gemm_back(s, tokens, m->experts, m->hidden) + bytes(s, (double)tokens * per_token);
}

/* Head product, cross entropy over bf16 logits through an fp32 copy (2V in, 4V out, 4V in, 2V out),
 * both backward products, final norm. */
static double loss_of_piece(const mz_step *s, int64_t tokens) {
    const mz_model *m = s->model;
    return gemm(s, tokens, m->vocab, m->hidden) + gemm_back(s, tokens, m->vocab, m->hidden) +
           bytes(s, (double)tokens * (12.0 * (double)m->vocab + 10.0 * (double)m->hidden));
}

int64_t step_loss_piece(const mz_step *s, int64_t tokens) {
    const int64_t piece = s->options.loss_tokens;
    return piece > 0 && piece < tokens ? piece : tokens;
}

int step_loss_launches(const mz_step *s, int64_t tokens) {
    enum { LAUNCHES = 8, OF_NORM = 2 };
    if (tokens <= 0)
        return LAUNCHES;
    const int64_t piece = step_loss_piece(s, tokens);
    return LAUNCHES + (int)((tokens - 1) / piece) * (LAUNCHES - OF_NORM);
}

/* In pieces: the products of each, and the head's gradient read and written once more for every
 * piece but the first. */
static double loss_time(const mz_step *s, int64_t tokens) {
    const int64_t piece = step_loss_piece(s, tokens), whole = tokens / piece, rest = tokens % piece;
    const double head = 4.0 * (double)s->model->vocab * (double)s->model->hidden;
    return (double)whole * loss_of_piece(s, piece) + loss_of_piece(s, rest) +
           bytes(s, (double)((tokens - 1) / piece) * head);
}

void step_token_times_of(const mz_step *s, int64_t tokens, step_token_times *t) {
    *t = (step_token_times){0};
    if (tokens <= 0)
        return;
    const mz_model *m = s->model;
    const double row = 2.0 * (double)m->hidden * (double)tokens;
    attention_times(s, tokens, t);
    router_times(s, tokens, t);
    t->dense = ffn(s, tokens, m->dense_intermediate);
    t->dense_back = ffn_back(s, tokens, m->dense_intermediate);
    t->shared = m->shared_intermediate > 0 ? ffn(s, tokens, m->shared_intermediate) : 0;
    t->shared_back = m->shared_intermediate > 0 ? ffn_back(s, tokens, m->shared_intermediate) : 0;
    t->embed = bytes(s, 2 * row);
    t->embed_back = bytes(s, 3 * row); /* gradient rows in, table rows in and out */
    t->loss = loss_time(s, tokens);
    t->score = bytes(s, row); /* ||g||^2: g once */
    if (s->options.recompute == MZ_RECOMPUTE_SELECTIVE)
        t->attention_back += t->selective;
}

double step_select_time(const mz_step *s, int64_t pairs) {
    return bytes(s, (double)pairs * SCORE_BYTES * (1.0 + SELECT_PASSES));
}

/* ---- routed experts: rows of each instance on the rank
 * ------------------------------------------- */

static double grouped(const mz_step *s, mz_gemm_kind kind, const int64_t *rows, int32_t groups,
                      int64_t n, int64_t k) {
    return mz_cost_grouped_gemm(&s->cluster->device, s->cost, kind, rows, groups, n, k,
                                s->expert_turn);
}

double step_expert_forward(const mz_step *s, const int64_t *rows, int32_t groups, int64_t total) {
    const mz_model *m = s->model;
    const int64_t h = m->hidden, inter = m->expert_intermediate, up = s->width.up;
    if (total == 0)
        return 0;
    double time = grouped(s, MZ_GEMM_FORWARD, rows, groups, up, h) +
                  grouped(s, MZ_GEMM_FORWARD, rows, groups, h, inter);
    return time + bytes(s, (double)total * (double)(2 * (up + inter)));
}

/* dgrad and wgrad of down, activation backward, dgrad and wgrad of up/gate. */
double step_expert_backward(const mz_step *s, const int64_t *rows, int32_t groups, int64_t total) {
    const mz_model *m = s->model;
    const int64_t h = m->hidden, inter = m->expert_intermediate, up = s->width.up;
    double time = grouped(s, MZ_GEMM_WGRAD, rows, groups, h, inter) +
                  grouped(s, MZ_GEMM_WGRAD, rows, groups, up, h);
    if (total > 0)
        time += grouped(s, MZ_GEMM_DGRAD, rows, groups, inter, h) +
                grouped(s, MZ_GEMM_DGRAD, rows, groups, h, up);
    double activation = (double)(2 * (inter + 2 * up));
    if (s->options.recompute == MZ_RECOMPUTE_SELECTIVE)
        activation += (double)(2 * (up + inter));
    return time + bytes(s, (double)total * activation);
}

/* Gate, up and activation again for rows whose activations are not here. */
double step_expert_again(const mz_step *s, const int64_t *rows, int32_t groups, int64_t total) {
    const mz_model *m = s->model;
    const int64_t inter = m->expert_intermediate, up = s->width.up;
    if (total == 0)
        return 0;
    return grouped(s, MZ_GEMM_FORWARD, rows, groups, up, m->hidden) +
           bytes(s, (double)total * (double)(2 * (up + inter)));
}
