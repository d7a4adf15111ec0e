/* Optimizer steps.
 *
 * Factored kinds (SkewAdam's factored tiers, Adafactor). With row factors R, column factors C of
 * one matrix after this step, M = max(mean R, 1e-15), in Adafactor mean R, a_i = 1 / max(R_i / M,
 * eps), b_j = 1 / max(C_j, eps), the update is u_ij = base_ij sqrt(a_i b_j), base the momentum or
 * the gradient, times a bias correction. The clip needs sum u^2 = sum_j b_j sum_i a_i base_ij^2
 * before anything is written. R_i is known when row i has been read, so sweep 1 sums base_ij^2 /
 * R_i by column while the row is in the cache; a_i is M / R_i but for rows below the floor. Those
 * that are below it whatever M becomes (mz_row_bound) are left out, their terms added afterwards.
 * Of those that M of this step puts there, terms that are too large by far may hide the others:
 * the matrix is then summed again. So two sweeps over the gradient do: statistics, then the write.
 * Scratch is a few rows per block of rows and per thread; nothing has the size of the tensor.
 *
 * Blocks follow from the shape alone and are summed in order: results do not depend on threads. */
#include "kernels/host/host.h"
#include "kernels/settings.h"

#include <stdlib.h>

/* WAVE_BYTES: what sweep 2 of a wave reads again should still be in a last-level cache. */
enum { BLOCK_VALUES = 1 << 16, BLOCKS_MOST = 32, WAVE_MOST = 16, WAVE_BYTES = 8 << 20 };

typedef struct wave {
    int64_t first, n; /* matrices */
} wave;

typedef struct updating updating;
struct updating {
    const mz_update *args;
    const mz_update_simd *simd;
    float scale;
    mz_update_rates rates;
    mz_random random; /* of the tensor at this step; threads take copies */
    /* factored: blocks of rows per matrix; others: blocks of values */
    int64_t blocks, block;
    /* Sweep 1 of one block of a wave's matrices, sweep 2 of a block of the wave before it: in one
     * run of the pool, so that threads seldom wait for each other. */
    void (*gather)(updating *u, int64_t matrix, int64_t block, int32_t thread);
    void (*write)(const updating *u, int64_t matrix, int64_t block);
    wave gathering, writing;
    int32_t left[WAVE_MOST]; /* atomic: blocks of the wave's matrices that sweep 1 has not done */
    bool by_place;           /* see mz_update_row */
    int64_t width;           /* of what stands by column below: cols, or whole groups of 16 */
    float *part;             /* [wave][blocks][2][width]: columns' g^2, columns' weighted squares */
    float *line;             /* [threads][MZ_ROWS][width] */
    float *bound;            /* [matrices]: mz_row_bound of this step */
    float *mean;             /* [matrices]: M */
    float *col_factor;       /* [matrices][width]: sqrt(b_j) */
    float *sum; /* [matrices] or [matrices][blocks]: sums of u^2, before the correction */
    float clip; /* clip_tensor: of all matrices */
};

static const void *gradient_at(const mz_update *a, int64_t element) {
    return (const char *)a->gradient + element * (a->gradient_type == MZ_BF16 ? 2 : 4);
}

static mz_update_row row_of(const updating *u, int64_t element, int64_t n) {
    const mz_update *a = u->args;
    const bool rounded = a->type == MZ_BF16 && a->kind != MZ_UPDATE_ADAFACTOR;
    float keep = 1 - a->rate * a->decay;
    if (keep != keep)
        keep = NAN; /* without a lower half, as writers of bf16 want it */
    /* What loses less than half of its last place is rounded back to what it was. */
    if (rounded && keep > 1 - 0x1p-9f && keep < 1)
        keep = 1;
    return (mz_update_row){.args = a,
                           .scale = u->scale,
                           .rate = a->rate * u->rates.correction,
                           .keep = keep,
                           .by_place = u->by_place,
                           .decay_first = rounded && keep != 1,
                           .beta1 = a->beta1,
                           .beta2 = u->rates.beta2,
                           .floor = u->rates.floor,
                           .least = u->rates.least,
                           .eps = a->eps,
                           .element = element,
                           .n = n,
                           .parameter =
                               (char *)a->parameter + element * (a->type == MZ_BF16 ? 2 : 4),
                           .gradient = gradient_at(a, element),
                           .m = mz_keeps_momentum(a) ? a->m + element : NULL,
                           .v = a->v ? a->v + element : NULL};
}

static float clip_of(const updating *u, double sum, double values) {
    if (!u->args->clip_rms)
        return 1;
    const float rms = (float)sqrt(sum / values) * u->rates.correction;
    return mz_clip_of(rms);
}

/* ---- factored -----------------------------------------------------------------------------------
 */

static float *part_of(const updating *u, int64_t matrix, int64_t block, int which) {
    const int64_t place = matrix - u->gathering.first;
    return u->part + ((place * u->blocks + block) * 2 + which) * u->width;
}

static int64_t place_of(const updating *u, int64_t col) {
    return u->by_place ? col / 16 * 16 + MZ_PLACE(col % 16) : col;
}

static int64_t block_end(const updating *u, int64_t block) {
    const int64_t end = (block + 1) * u->block;
    return end < u->args->rows ? end : u->args->rows;
}

/* Four sums at a time hide what an addition takes. */
static float row_mean(const updating *u, int64_t matrix) {
    const float *x = u->args->row + matrix * u->args->rows;
    const int64_t n = u->args->rows;
    double sum[4] = {0};
    for (int64_t i = 0; i < n; i++)
        sum[i % 4] += x[i];
    const float mean = (float)(((sum[0] + sum[1]) + (sum[2] + sum[3])) / (double)n);
    return mz_at_least(mean, u->rates.mean_least);
}

static void factored_statistics(const updating *u, int64_t matrix, int64_t block, float *square) {
    const mz_update *a = u->args;
    float *col = part_of(u, matrix, block, 0), *weighted = part_of(u, matrix, block, 1);
    memset(col, 0, sizeof *col * (size_t)u->width);
    memset(weighted, 0, sizeof *weighted * (size_t)u->width);
    int64_t rows;
    for (int64_t i = block * u->block; i < block_end(u, block); i += rows) {
        const int64_t element = (matrix * a->rows + i) * a->cols, left = block_end(u, block) - i;
        mz_update_row row = row_of(u, element, a->cols);
        float g2[MZ_ROWS], weight[MZ_ROWS];
        rows = u->by_place && left >= MZ_ROWS ? MZ_ROWS : 1;
        row.next = left >= 2 * rows ? gradient_at(a, element + rows * a->cols) : row.gradient;
        u->simd->statistics(&row, rows, square, col, g2);
        for (int64_t k = 0; k < rows; k++) {
            float *factor = &a->row[matrix * a->rows + i + k];
            *factor = *factor * u->rates.beta2 + (g2[k] / (float)a->cols) * (1 - u->rates.beta2);
            weight[k] = *factor >= u->bound[matrix] ? 1 / *factor : 0;
        }
        u->simd->weigh(weighted, square, weight, rows, u->width);
    }
}

/* Below half its floor, what a row has added may be many times what it should have. */
static bool hides_others(const updating *u, int64_t matrix) {
    const float *row = u->args->row + matrix * u->args->rows;
    const float half = 0.5f * u->rates.least * u->mean[matrix];
    for (int64_t i = 0; i < u->args->rows; i++)
        if (row[i] >= u->bound[matrix] && row[i] < half)
            return true;
    return false;
}

/* Terms of rows below the floor with the factor they really get; where they hide the others, those
 * of all rows. */
static void mend_floored(const updating *u, int64_t matrix, float *weighted, float *square) {
    const mz_update *a = u->args;
    const int64_t first = matrix * a->rows;
    const float mean = u->mean[matrix];
    const bool again = hides_others(u, matrix);
    if (again)
        memset(weighted, 0, sizeof *weighted * (size_t)u->width);
    for (int64_t i = 0; i < a->rows; i++) {
        const float r = a->row[first + i];
        const bool counted = !again && r >= u->bound[matrix];
        if ((counted && r / mean >= u->rates.least) || (r == 0 && !mz_keeps_momentum(a)))
            continue; /* of a row without a gradient, or with one whose square underflows: its terms
                         are 0 or far below the clip */
        const float bounded = mz_at_least(r / mean, u->rates.least);
        if (bounded <= 0)
            continue;
        const mz_update_row row = row_of(u, (first + i) * a->cols, a->cols);
        u->simd->squares(&row, square);
        const float missing = 1 / (bounded * mean) - (counted ? 1 / r : 0);
        u->simd->weigh(weighted, square, &missing, 1, u->width);
    }
}

/* What sweep 2 needs of a matrix besides the rows' factors. */
static void factored_factors(const updating *u, int64_t matrix) {
    const int64_t cols = u->args->cols;
    const float *c = u->args->col + matrix * cols;
    float *factor = u->col_factor + matrix * u->width;
    u->mean[matrix] = row_mean(u, matrix);
    memset(factor, 0, sizeof *factor * (size_t)u->width);
    for (int64_t j = 0; j < cols; j++)
        factor[place_of(u, j)] = mz_inverse_root(c[j], u->rates.least);
}

/* Sums the blocks, moves C on, and leaves the matrix's sum of u^2. */
static void factored_matrix(const updating *u, int64_t matrix, float *square) {
    const mz_update *a = u->args;
    float *col = part_of(u, matrix, 0, 0), *weighted = part_of(u, matrix, 0, 1);
    const float whole = 1;
    for (int64_t b = 1; b < u->blocks; b++) {
        u->simd->weigh(col, part_of(u, matrix, b, 0), &whole, 1, u->width);
        u->simd->weigh(weighted, part_of(u, matrix, b, 1), &whole, 1, u->width);
    }
    float *c = a->col + matrix * a->cols;
    for (int64_t j = 0; j < a->cols; j++)
        c[j] =
            c[j] * u->rates.beta2 + (col[place_of(u, j)] / (float)a->rows) * (1 - u->rates.beta2);
    factored_factors(u, matrix);
    const float mean = u->mean[matrix], *factor = u->col_factor + matrix * u->width;
    mend_floored(u, matrix, weighted, square);
    double sum = 0;
    for (int64_t j = 0; j < u->width; j++)
        sum += (double)(weighted[j] * mean * factor[j]) * factor[j];
    u->sum[matrix] = (float)sum;
}

/* Whoever does the last block of a matrix finishes it. */
static void factored_gather(updating *u, int64_t matrix, int64_t block, int32_t thread) {
    float *square = u->line + thread * MZ_ROWS * u->width;
    factored_statistics(u, matrix, block, square);
    int32_t *left = &u->left[matrix - u->gathering.first];
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0)
        factored_matrix(u, matrix, square);
}

static void factored_write(const updating *u, int64_t matrix, int64_t block) {
    const mz_update *a = u->args;
    const float clip =
        a->clip_tensor ? u->clip : clip_of(u, u->sum[matrix], (double)a->rows * (double)a->cols);
    mz_random random = u->random;
    for (int64_t i = block * u->block; i < block_end(u, block); i++) {
        const int64_t at = matrix * a->rows + i;
        mz_update_row row = row_of(u, at * a->cols, a->cols);
        row.random = &random;
        row.rate *= clip * mz_row_root(a->row[at], u->mean[matrix], u->rates.least);
        u->simd->apply_factored(&row, u->col_factor + matrix * u->width);
    }
}

/* Matrices of a wave, by what sweep 2 reads again: m or the gradient, and v. Follows from the shape
 * alone. */
static int64_t wave_most(const mz_update *a) {
    const int64_t value = (mz_keeps_momentum(a) || a->gradient_type == MZ_F32 ? 4 : 2) +
                          (mz_keeps_factors(a) ? 0 : 4);
    const int64_t bytes = value * a->rows * a->cols;
    const int64_t fit = bytes > 0 ? WAVE_BYTES / bytes : WAVE_MOST;
    const int64_t most = fit < 1 ? 1 : fit < WAVE_MOST ? fit : WAVE_MOST;
    return most < a->matrices ? most : a->matrices;
}

static double sum_of_all(const float *sum, int64_t n) {
    double all = 0;
    for (int64_t i = 0; i < n; i++)
        all += sum[i];
    return all;
}

/* Sums of u^2 that a matrix has. */
static int64_t sums_each(const updating *u) {
    return mz_keeps_factors(u->args) ? 1 : u->blocks;
}

/* One of either kind in turn, as long as there are both: threads that gather wait for memory, those
 * that write for arithmetic. */
static void sweep_block(void *argument, int64_t p, int32_t thread) {
    updating *u = argument;
    const int64_t writes = u->writing.n * u->blocks, gathers = u->gathering.n * u->blocks;
    const int64_t both = 2 * (writes < gathers ? writes : gathers);
    const int64_t i = p < both ? p / 2 : p - both / 2; /* of either kind */
    if (p < both ? p % 2 == 0 : writes > gathers)
        u->write(u, u->writing.first + i / u->blocks, i % u->blocks);
    else
        u->gather(u, u->gathering.first + i / u->blocks, i % u->blocks, thread);
}

static void start_wave(updating *u, int64_t first) {
    const int64_t most = wave_most(u->args), left = u->args->matrices - first;
    u->gathering = (wave){first, left < most ? left : most};
    for (int64_t i = 0; mz_keeps_factors(u->args) && i < u->gathering.n; i++) {
        u->left[i] = (int32_t)u->blocks;
        u->bound[first + i] = mz_row_bound(u->rates, row_mean(u, first + i));
    }
}

/* The clip of the tensor wants all sums before the first write. */
static void two_sweeps(mz_pool *pool, updating *u) {
    const mz_update *a = u->args;
    for (int64_t first = 0; first < a->matrices; first += u->gathering.n) {
        start_wave(u, first);
        mz_pool_run(pool, sweep_block, u, (u->writing.n + u->gathering.n) * u->blocks);
        if (!a->clip_tensor)
            u->writing = u->gathering;
    }
    if (a->clip_tensor) {
        u->clip = clip_of(u, sum_of_all(u->sum, a->matrices * sums_each(u)),
                          (double)a->matrices * (double)a->rows * (double)a->cols);
        u->writing = (wave){0, a->matrices};
    }
    u->gathering.n = 0;
    mz_pool_run(pool, sweep_block, u, u->writing.n * u->blocks);
}

/* ---- value by value -----------------------------------------------------------------------------
 */

static mz_update_row values_of(const updating *u, int64_t matrix, int64_t block) {
    const int64_t values = u->args->rows * u->args->cols, first = block * u->block;
    const int64_t n = values - first < u->block ? values - first : u->block;
    return row_of(u, matrix * values + first, n > 0 ? n : 0);
}

static void full_gather(updating *u, int64_t matrix, int64_t block, int32_t thread) {
    (void)thread;
    const mz_update_row row = values_of(u, matrix, block);
    u->sum[matrix * u->blocks + block] = u->simd->statistics_full(&row);
}

static void full_write(const updating *u, int64_t matrix, int64_t block) {
    mz_random random = u->random;
    mz_update_row row = values_of(u, matrix, block);
    row.random = &random;
    row.rate *= u->args->clip_tensor
                    ? u->clip
                    : clip_of(u, sum_of_all(u->sum + matrix * u->blocks, u->blocks),
                              (double)u->args->rows * (double)u->args->cols);
    u->simd->apply_full(&row);
}

static void adamw_values(void *argument, int64_t p, int32_t thread) {
    (void)thread;
    const updating *u = argument;
    mz_random random = u->random;
    mz_update_row row = values_of(u, p / u->blocks, p % u->blocks);
    row.random = &random;
    u->simd->adamw(&row, u->rates.floor);
}

static void lion_values(void *argument, int64_t p, int32_t thread) {
    (void)thread;
    const updating *u = argument;
    mz_random random = u->random;
    mz_update_row row = values_of(u, p / u->blocks, p % u->blocks);
    row.random = &random;
    u->simd->lion(&row);
}

/* ---- settings -----------------------------------------------------------------------------------
 */

static void set_blocks(updating *u) {
    const mz_update *a = u->args;
    const int64_t values = a->rows * a->cols;
    if (!mz_keeps_factors(a)) {
        u->block = BLOCK_VALUES;
        u->blocks = (values + BLOCK_VALUES - 1) / BLOCK_VALUES;
        return;
    }
    u->by_place = a->type == MZ_BF16 && a->gradient_type == MZ_BF16 && !mz_keeps_momentum(a);
    u->width = u->by_place ? (a->cols + 15) / 16 * 16 : a->cols;
    u->blocks = (values + BLOCK_VALUES - 1) / BLOCK_VALUES;
    if (u->blocks > BLOCKS_MOST)
        u->blocks = BLOCKS_MOST;
    if (u->blocks > a->rows)
        u->blocks = a->rows;
    if (u->blocks < 1)
        u->blocks = 1;
    u->block = (a->rows + u->blocks - 1) / u->blocks;
}

/* ---- Muon ---------------------------------------------------------------------------------------
 * X = bf16(buf), transposed where there are more rows than columns, divided by its norm; then
 * X <- a X + (b A + c A A) X with A = X X^T. Every product's result is rounded to bf16, as where it
 * is computed in bf16. */

static const float NS_A = 3.4445f, NS_B = -4.7750f, NS_C = 2.0315f;

static int64_t muon_short(const mz_update *a) {
    return a->rows < a->cols ? a->rows : a->cols;
}

static int64_t muon_long(const mz_update *a) {
    return a->rows < a->cols ? a->cols : a->rows;
}

/* x [s][l], y [s][l], A [s][s], B [s][s] */
static int64_t muon_floats(const mz_update *a) {
    const int64_t s = muon_short(a);
    return 2 * s * muon_long(a) + 2 * s * s;
}

static void round_all(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] = mz_from_bf16(mz_to_bf16(x[i]));
}

/* c[m][n] = a[m][k] b[n][k]^T, or with op dgrad c[m][k] = a[m][n] b[n][k]. */
static mz_kstatus product(mz_kernels *k, mz_product op, int64_t m, int64_t n, int64_t depth,
                          const float *a, float *b, float *c) {
    const int64_t begin[2] = {0, m};
    void *weight = b;
    mz_host_turn turn; /* all the workspace that one group of fp32 needs */
    const mz_product_args args = {.op = op,
                                  .groups = {.begin = begin, .groups = 1, .rows_max = m},
                                  .n = n,
                                  .k = depth,
                                  .type = MZ_F32,
                                  .a = a,
                                  .weight = &weight,
                                  .c = c};
    return mz_host_grouped_gemm(k, 0, &args, &turn);
}

/* Momentum, then X: of the momentum, or with Nesterov of g + beta1 * momentum. */
static void muon_start(const updating *u, int64_t matrix, float *x) {
    const mz_update *a = u->args;
    const bool turn = a->rows > a->cols;
    double norm2 = 0;
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->cols; j++) {
            const int64_t at = (matrix * a->rows + i) * a->cols + j;
            const float g = u->scale * (a->gradient_type == MZ_BF16
                                            ? mz_from_bf16(((const uint16_t *)a->gradient)[at])
                                            : ((const float *)a->gradient)[at]);
            a->m[at] = a->m[at] * a->beta1 + g;
            const float used = a->nesterov ? g + a->m[at] * a->beta1 : a->m[at];
            const float value = mz_from_bf16(mz_to_bf16(used));
            x[turn ? j * a->rows + i : i * a->cols + j] = value;
            norm2 += (double)value * value;
        }
    const float norm = (float)sqrt(norm2) + 1e-7f;
    for (int64_t i = 0; i < a->rows * a->cols; i++)
        x[i] = mz_from_bf16(mz_to_bf16(x[i] / norm));
}

static mz_kstatus newton_schulz(mz_kernels *k, const mz_update *a, float *x, float *y, float *gram,
                                float *poly) {
    const int64_t s = muon_short(a), l = muon_long(a);
    mz_kstatus status = product(k, MZ_PRODUCT_FORWARD, s, s, l, x, x, gram);
    if (status != MZ_K_OK)
        return status;
    round_all(gram, s * s);
    status = product(k, MZ_PRODUCT_DGRAD, s, s, s, gram, gram, poly);
    if (status != MZ_K_OK)
        return status;
    round_all(poly, s * s);
    for (int64_t i = 0; i < s * s; i++)
        poly[i] = NS_B * gram[i] + NS_C * poly[i];
    round_all(poly, s * s);
    status = product(k, MZ_PRODUCT_DGRAD, s, s, l, poly, x, y);
    round_all(y, s * l);
    for (int64_t i = 0; i < s * l; i++)
        x[i] = NS_A * x[i] + y[i];
    round_all(x, s * l);
    return status;
}

static void muon_write(const updating *u, int64_t matrix, const float *x, float *line) {
    const mz_update *a = u->args;
    mz_random random = u->random;
    for (int64_t i = 0; i < a->rows; i++) {
        mz_update_row row = row_of(u, (matrix * a->rows + i) * a->cols, a->cols);
        row.random = &random;
        row.rate *= a->update_scale;
        const float *update = x + i * a->cols;
        if (a->rows > a->cols) {
            for (int64_t j = 0; j < a->cols; j++)
                line[j] = x[j * a->rows + i];
            update = line;
        }
        u->simd->apply(&row, update);
    }
}

static mz_kstatus update_muon(mz_kernels *k, const updating *u, float *scratch) {
    const mz_update *a = u->args;
    const int64_t s = muon_short(a), l = muon_long(a);
    float *x = scratch, *y = x + s * l, *gram = y + s * l, *poly = gram + s * s;
    mz_kstatus status = MZ_K_OK;
    for (int64_t matrix = 0; status == MZ_K_OK && matrix < a->matrices; matrix++) {
        muon_start(u, matrix, x);
        for (int32_t i = 0; status == MZ_K_OK && i < a->newton_schulz; i++)
            status = newton_schulz(k, a, x, y, gram, poly);
        if (status == MZ_K_OK)
            muon_write(u, matrix, x, y);
    }
    return status;
}

/* ---- the step -----------------------------------------------------------------------------------
 */

size_t mz_host_update_workspace(const mz_kernels *k, const mz_update *a) {
    updating u = {.args = a};
    set_blocks(&u);
    if (a->kind == MZ_UPDATE_MUON)
        return sizeof(float) * (size_t)muon_floats(a);
    if (a->kind == MZ_UPDATE_ADAMW || a->kind == MZ_UPDATE_LION)
        return 0;
    int64_t floats = a->matrices * sums_each(&u);
    if (mz_keeps_factors(a)) {
        const int64_t threads = mz_pool_threads(mz_host_of(k)->pool);
        floats += (wave_most(a) * 2 * u.blocks + threads * MZ_ROWS + a->matrices) * u.width;
        floats += 2 * a->matrices;
    }
    return sizeof(float) * (size_t)floats;
}

mz_kstatus mz_host_update_step(mz_kernels *k, mz_kstream stream, const mz_update *a,
                               void *workspace) {
    (void)stream;
    mz_host *host = mz_host_of(k);
    updating u = {.args = a,
                  .simd = host->update,
                  .scale = a->grad_scale ? *a->grad_scale : 1,
                  .rates = mz_update_rates_of(a),
                  .random = mz_random_of(a->seed, a->tensor, (uint64_t)a->step)};
    set_blocks(&u);
    if (a->kind == MZ_UPDATE_MUON)
        return update_muon(k, &u, workspace);
    if (a->kind == MZ_UPDATE_ADAMW || a->kind == MZ_UPDATE_LION) {
        mz_pool_run(host->pool, a->kind == MZ_UPDATE_ADAMW ? adamw_values : lion_values, &u,
                    a->matrices * u.blocks);
        return MZ_K_OK;
    }
    u.sum = workspace;
    u.gather = mz_keeps_factors(a) ? factored_gather : full_gather;
    u.write = mz_keeps_factors(a) ? factored_write : full_write;
    if (mz_keeps_factors(a)) {
        u.line = u.sum + a->matrices;
        u.col_factor = u.line + mz_pool_threads(host->pool) * MZ_ROWS * u.width;
        u.part = u.col_factor + a->matrices * u.width;
        u.mean = u.part + wave_most(a) * u.blocks * 2 * u.width;
        u.bound = u.mean + a->matrices;
    }
    two_sweeps(host->pool, &u);
    return MZ_K_OK;
}
