/* Grouped GEMM on OpenBLAS: one product per tile, tiles spread over the pool's threads.
 *
 * Tiles follow from the shapes alone, and every element of a result is computed within one tile, so
 * results do not depend on the number of threads. Forward and dgrad: TILE_ROWS rows of one group;
 * wgrad: TILE_COLS rows of one group's weight, over all rows of the group. bf16 operands are
 * widened into the thread's scratch panel by panel; products of bf16 values are exact in fp32. */
#include "kernels/host/host.h"
#include "kernels/arithmetic.h"

#include <cblas.h>
#include <stdlib.h>

enum { TILE_ROWS = 512, TILE_COLS = 256 };

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ---- the tiles of a grouped product -------------------------------------------------------------
 */

typedef struct tiling {
    const mz_simd *simd;
    const mz_product_args *args;
    float *scratch; /* [threads][per_thread] */
    int64_t per_thread;
    const int64_t *begin;
    int64_t tile; /* rows of a group that are taken at a time */
} tiling;

static int64_t tiles_of(const tiling *t, int32_t group) {
    if (t->args->op == MZ_PRODUCT_WGRAD)
        return t->args->weight[group] ? (t->args->n + TILE_COLS - 1) / TILE_COLS : 0;
    return (t->begin[group + 1] - t->begin[group] + t->tile - 1) / t->tile;
}

static int64_t all_tiles(const tiling *t) {
    int64_t tiles = 0;
    for (int32_t g = 0; g < t->args->groups.groups; g++)
        tiles += tiles_of(t, g);
    return tiles;
}

/* The group of tile number `*part`, which becomes the number inside the group. */
static int32_t group_of(const tiling *t, int64_t *part) {
    int32_t g = 0;
    for (int64_t n = tiles_of(t, g); *part >= n; n = tiles_of(t, ++g))
        *part -= n;
    return g;
}

static const void *at(const void *x, mz_dtype type, int64_t element) {
    return (const char *)x + element * (type == MZ_BF16 ? 2 : 4);
}

static void *at_out(void *x, mz_dtype type, int64_t element) {
    return (char *)x + element * (type == MZ_BF16 ? 2 : 4);
}

static float *scratch_of(const tiling *t, int32_t thread) {
    return t->per_thread > 0 ? t->scratch + thread * t->per_thread : NULL;
}

/* ---- forward and dgrad --------------------------------------------------------------------------
 */

static void multiply(mz_product op, int64_t rows, int64_t n, int64_t k, const float *a,
                     int64_t a_stride, const float *w, float beta, float *c, int64_t c_stride) {
    if (op == MZ_PRODUCT_FORWARD)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)n, (int)k, 1, a,
                    (int)a_stride, w, (int)k, beta, c, (int)c_stride);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)k, (int)n, 1, a,
                    (int)a_stride, w, (int)k, beta, c, (int)c_stride);
}

/* bf16: a and c whole, the weight in panels of TILE_COLS of its rows. Forward writes columns panel
 * by panel; dgrad sums over the panels. */
static void rows_bf16(const tiling *t, const uint16_t *a, const uint16_t *w, uint16_t *c,
                      int64_t rows, float *scratch) {
    const int64_t n = t->args->n, k = t->args->k;
    const bool forward = t->args->op == MZ_PRODUCT_FORWARD;
    const int64_t inner = forward ? k : n, outer = forward ? n : k;
    float *wide_a = scratch, *wide_c = wide_a + rows * inner, *wide_w = wide_c + rows * outer;
    t->simd->widen(wide_a, a, rows * inner);
    for (int64_t p = 0; p < n; p += TILE_COLS) {
        const int64_t cols = smaller(TILE_COLS, n - p);
        t->simd->widen(wide_w, w + p * k, cols * k);
        if (forward)
            multiply(MZ_PRODUCT_FORWARD, rows, cols, k, wide_a, k, wide_w, 0, wide_c + p, n);
        else
            multiply(MZ_PRODUCT_DGRAD, rows, cols, k, wide_a + p, n, wide_w, p > 0, wide_c, k);
    }
    t->simd->narrow(c, wide_c, rows * outer);
}

/* dgrad sums over panels of the weight's rows: OpenBLAS is slow on deep products of untransposed
 * operands (half of the rate here). */
static void rows_f32(const mz_product_args *p, const float *a, const float *w, float *c,
                     int64_t rows) {
    if (p->op == MZ_PRODUCT_FORWARD) {
        multiply(p->op, rows, p->n, p->k, a, p->k, w, 0, c, p->n);
        return;
    }
    for (int64_t n = 0; n < p->n; n += TILE_COLS)
        multiply(p->op, rows, smaller(TILE_COLS, p->n - n), p->k, a + n, p->n, w + n * p->k, n > 0,
                 c, p->k);
}

static void row_tile(void *argument, int64_t part, int32_t thread) {
    const tiling *t = argument;
    const mz_product_args *p = t->args;
    const int32_t g = group_of(t, &part);
    const int64_t first = t->begin[g] + part * t->tile;
    const int64_t rows = smaller(t->tile, t->begin[g + 1] - first);
    const int64_t inner = p->op == MZ_PRODUCT_FORWARD ? p->k : p->n;
    const int64_t outer = p->op == MZ_PRODUCT_FORWARD ? p->n : p->k;
    const void *a = at(p->a, p->type, first * inner);
    void *c = at_out(p->c, p->type, first * outer);
    if (!p->weight[g])
        return;
    if (p->type == MZ_F32)
        rows_f32(p, a, p->weight[g], c, rows);
    else
        rows_bf16(t, a, p->weight[g], c, rows, scratch_of(t, thread));
}

/* ---- wgrad --------------------------------------------------------------------------------------
 */

/* sum[cols][k] (+)= a[rows][cols]^T * c[rows][k] over all rows of the group, in pieces. */
static void weight_sum(const tiling *t, int32_t g, int64_t col, int64_t cols, float beta,
                       float *sum, float *scratch) {
    const mz_product_args *p = t->args;
    const bool wide = p->type == MZ_F32;
    const int64_t step = wide ? INT64_C(1) << 20 : t->tile;
    float *wide_a = scratch, *wide_c = wide ? NULL : scratch + step * smaller(TILE_COLS, p->n);
    for (int64_t r = t->begin[g]; r < t->begin[g + 1]; r += step) {
        const int64_t rows = smaller(step, t->begin[g + 1] - r);
        const void *a = at(p->a, p->type, r * p->n + col), *c = at(p->c, p->type, r * p->k);
        if (!wide) {
            for (int64_t i = 0; i < rows; i++)
                t->simd->widen(wide_a + i * cols, at(a, p->type, i * p->n), cols);
            t->simd->widen(wide_c, c, rows * p->k);
        }
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)cols, (int)p->k, (int)rows, 1,
                    wide ? a : wide_a, (int)(wide ? p->n : cols), wide ? c : wide_c, (int)p->k,
                    beta, sum, (int)p->k);
        beta = 1;
    }
    if (beta == 0)
        memset(sum, 0, sizeof *sum * (size_t)(cols * p->k));
}

static void weight_tile(void *argument, int64_t part, int32_t thread) {
    const tiling *t = argument;
    const mz_product_args *p = t->args;
    const int32_t g = group_of(t, &part);
    const int64_t col = part * TILE_COLS, cols = smaller(TILE_COLS, p->n - col);
    float *scratch = scratch_of(t, thread);
    void *w = at_out(p->weight[g], p->gradient_type, col * p->k);
    if (p->gradient_type == MZ_F32) {
        weight_sum(t, g, col, cols, p->accumulate ? 1 : 0, w, scratch);
        return;
    }
    float *sum = scratch; /* before the product's scratch */
    scratch += smaller(TILE_COLS, p->n) * p->k;
    if (p->accumulate)
        t->simd->widen(sum, w, cols * p->k);
    weight_sum(t, g, col, cols, p->accumulate ? 1 : 0, sum, scratch);
    t->simd->narrow(w, sum, cols * p->k);
}

/* ---- grouped GEMM -------------------------------------------------------------------------------
 */

/* Rows of a tile, at most `most`, and no more than there can be. */
static int64_t tile_rows(const mz_groups *g, int64_t most) {
    return g->rows_max < 1 ? 1 : smaller(g->rows_max, most);
}

mz_product_tiles mz_host_tiles(const mz_kernels *k, mz_product op) {
    const int32_t threads = mz_pool_threads(mz_host_of(k)->pool);
    if (op == MZ_PRODUCT_WGRAD)
        return (mz_product_tiles){0, TILE_COLS, 0, threads};
    return (mz_product_tiles){TILE_ROWS, 0, 0, threads};
}

static int64_t scratch_floats(const mz_product_args *a) {
    const int64_t rows = tile_rows(&a->groups, TILE_ROWS), cols = smaller(TILE_COLS, a->n);
    if (a->op == MZ_PRODUCT_WGRAD)
        return (a->gradient_type == MZ_BF16 ? cols * a->k : 0) +
               (a->type == MZ_BF16 ? rows * (cols + a->k) : 0);
    return a->type == MZ_BF16 ? rows * (a->n + a->k) + cols * a->k : 0;
}

/* OpenBLAS counts in 32 bits. */
static bool blas_takes(int64_t a, int64_t b) {
    return a <= INT32_MAX && b <= INT32_MAX;
}

size_t mz_host_grouped_gemm_workspace(const mz_kernels *k, const mz_product_args *a) {
    if (!blas_takes(a->n, a->k))
        return 0;
    return sizeof(float) * (size_t)(mz_pool_threads(mz_host_of(k)->pool) * scratch_floats(a));
}

static mz_kstatus check_blas(mz_kernels *k, const char *name, int64_t a, int64_t b) {
    if (!blas_takes(a, b))
        return mz_kernels_fail(k, MZ_K_EINVAL, "%s: %lld x %lld is beyond OpenBLAS's sizes", name,
                               (long long)a, (long long)b);
    return MZ_K_OK;
}

mz_kstatus mz_host_grouped_gemm(mz_kernels *k, mz_kstream stream, const mz_product_args *a,
                                void *workspace) {
    (void)stream;
    mz_kstatus status = check_blas(k, "grouped_gemm", a->n, a->k);
    if (status != MZ_K_OK)
        return status;
    tiling t = {.simd = mz_host_of(k)->simd,
                .args = a,
                .scratch = workspace,
                .per_thread = scratch_floats(a),
                .begin = a->groups.begin,
                .tile = tile_rows(&a->groups, TILE_ROWS)};
    mz_pool_run(mz_host_of(k)->pool, a->op == MZ_PRODUCT_WGRAD ? weight_tile : row_tile, &t,
                all_tiles(&t));
    return MZ_K_OK;
}

/* ---- up-projection with SwiGLU ------------------------------------------------------------------
 * A tile's gate and up rows are still in the cache when the activation reads them. */

enum { UP_FLOATS = 1 << 19, UP_ROWS_MOST = 256 };

static int64_t up_rows_most(int64_t intermediate) {
    const int64_t rows = UP_FLOATS / (2 * intermediate);
    return rows < 16 ? 16 : smaller(rows, UP_ROWS_MOST);
}

static int64_t up_rows(const mz_expert_up *a) {
    return tile_rows(&a->groups, up_rows_most(a->intermediate));
}

mz_product_tiles mz_host_up_tiles(const mz_kernels *k, int64_t intermediate) {
    return (mz_product_tiles){(int32_t)up_rows_most(intermediate), 0, 0,
                              mz_pool_threads(mz_host_of(k)->pool)};
}

typedef struct up_tiling {
    tiling tiles;
    mz_product_args product;
    const mz_expert_up *args;
} up_tiling;

static void up_rows_of(const up_tiling *u, int64_t first, int64_t rows, void *gate_up) {
    const mz_expert_up *a = u->args;
    const mz_simd *simd = u->tiles.simd;
    const int64_t n = a->intermediate;
    for (int64_t i = 0; i < rows; i++) {
        const void *gate = at(gate_up, a->type, 2 * i * n);
        const void *up = at(gate_up, a->type, (2 * i + 1) * n);
        void *h = at_out(a->h, a->type, (first + i) * n);
        const float norm2 = simd->swiglu(a->type, h, gate, up, n, false);
        if (a->norm2)
            a->norm2[first + i] = norm2;
    }
}

static void up_tile(void *argument, int64_t part, int32_t thread) {
    const up_tiling *u = argument;
    const mz_expert_up *a = u->args;
    const tiling *t = &u->tiles;
    const int32_t g = group_of(t, &part);
    const int64_t first = t->begin[g] + part * t->tile;
    const int64_t rows = smaller(t->tile, t->begin[g + 1] - first), cols = 2 * a->intermediate;
    if (!a->weight[g])
        return;
    float *scratch = scratch_of(t, thread);
    /* The tile's own gate and up where the caller keeps none, before the product's scratch. */
    void *gate_up = a->gate_up ? at_out(a->gate_up, a->type, first * cols) : (void *)scratch;
    if (!a->gate_up)
        scratch += t->tile * cols;
    const void *x = at(a->x, a->type, first * a->hidden);
    if (a->type == MZ_F32)
        multiply(MZ_PRODUCT_FORWARD, rows, cols, a->hidden, x, a->hidden, a->weight[g], 0, gate_up,
                 cols);
    else
        rows_bf16(t, x, a->weight[g], gate_up, rows, scratch);
    up_rows_of(u, first, rows, gate_up);
}

static int64_t up_scratch_floats(const mz_expert_up *a) {
    const int64_t rows = up_rows(a), cols = 2 * a->intermediate;
    return (a->gate_up ? 0 : rows * cols) +
           (a->type == MZ_BF16 ? rows * (cols + a->hidden) + smaller(TILE_COLS, cols) * a->hidden
                               : 0);
}

size_t mz_host_expert_up_workspace(const mz_kernels *k, const mz_expert_up *a) {
    if (!blas_takes(2 * a->intermediate, a->hidden))
        return 0;
    return sizeof(float) * (size_t)(mz_pool_threads(mz_host_of(k)->pool) * up_scratch_floats(a));
}

mz_kstatus mz_host_expert_up_forward(mz_kernels *k, mz_kstream stream, const mz_expert_up *a,
                                     void *workspace) {
    (void)stream;
    mz_kstatus status = check_blas(k, "expert_up", 2 * a->intermediate, a->hidden);
    if (status != MZ_K_OK)
        return status;
    up_tiling u = {.args = a,
                   .product = {.op = MZ_PRODUCT_FORWARD,
                               .groups = a->groups,
                               .n = 2 * a->intermediate,
                               .k = a->hidden,
                               .type = a->type,
                               .weight = a->weight}};
    u.tiles = (tiling){.simd = mz_host_of(k)->simd,
                       .args = &u.product,
                       .scratch = workspace,
                       .per_thread = up_scratch_floats(a),
                       .begin = a->groups.begin,
                       .tile = up_rows(a)};
    mz_pool_run(mz_host_of(k)->pool, up_tile, &u, all_tiles(&u.tiles));
    return MZ_K_OK;
}
