/* Grouped GEMM on OpenBLAS: one product per tile, tiles taken by the pool's threads in turn.
 *
 * Tiles follow from the shapes alone, and every element of a result is computed within one tile, so
 * results do not depend on the number of threads. Forward and dgrad: at most TILE_ROWS rows of one
 * group; wgrad: at most TILE_COLS rows of one group's weight, over all rows of the group. The
 * longest come first, so that little is left to do when the first thread finds no more. bf16
 * operands are widened into the thread's scratch panel by panel; products of bf16 values are exact
 * in fp32. */
#include "kernels/host/host.h"
#include "kernels/arithmetic.h"

#include <cblas.h>
#include <stdlib.h>

enum { TILE_ROWS = 512, TILE_COLS = 256, TILE_GRAIN = 8 };

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ---- the tiles of a grouped product -------------------------------------------------------------
 */

static int64_t parts_of(int64_t side, int64_t most) {
    return (side + most - 1) / most;
}

/* A side in as few parts as can be, as equal as whole grains let them be: a short rest would cost
 * as much per row as a small product. The last part is what is left. */
static int64_t part_of(int64_t side, int64_t most) {
    if (side <= most)
        return side;
    const int64_t even = parts_of(side, parts_of(side, most));
    return smaller(most, parts_of(even, TILE_GRAIN) * TILE_GRAIN);
}

static int64_t rows_of(const mz_host_tiling *t, int32_t group) {
    return t->begin[group + 1] - t->begin[group];
}

static int64_t tiles_of(const mz_host_tiling *t, int32_t group) {
    const int64_t side = t->cols > 0 ? t->cols : rows_of(t, group);
    return side > 0 && t->weight[group] ? parts_of(side, part_of(side, t->most)) : 0;
}

static bool comes_before(const mz_host_turn *a, const mz_host_turn *b) {
    return a->length > b->length || (a->length == b->length && a->group < b->group);
}

/* The turn at `root` goes down to where none below it comes later. */
static void sift_down(mz_host_turn *turn, int64_t root, int64_t count) {
    const mz_host_turn moved = turn[root];
    for (int64_t child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && comes_before(&turn[child], &turn[child + 1]))
            child++;
        if (!comes_before(&moved, &turn[child]))
            break;
        turn[root] = turn[child];
        turn[child] = moved;
    }
}

/* Heapsort: the library's qsort may allocate. */
static void sort_turns(mz_host_turn *turn, int64_t count) {
    for (int64_t root = count / 2; root-- > 0;)
        sift_down(turn, root, count);
    for (int64_t last = count - 1; last > 0; last--) {
        const mz_host_turn latest = turn[0];
        turn[0] = turn[last];
        turn[last] = latest;
        sift_down(turn, 0, last);
    }
}

int64_t mz_host_order_tiles(const mz_host_tiling *t) {
    int64_t tiles = 0;
    for (int32_t g = 0; g < t->groups; g++) {
        const int64_t rows = rows_of(t, g);
        t->turn[g] =
            (mz_host_turn){.length = t->cols > 0 ? rows : part_of(rows, t->most), .group = g};
    }
    sort_turns(t->turn, t->groups);
    for (int32_t i = 0; i < t->groups; i++)
        t->turn[i].end = tiles += tiles_of(t, t->turn[i].group);
    return tiles;
}

mz_host_tile mz_host_tile_at(const mz_host_tiling *t, int64_t number) {
    int32_t low = 0, high = t->groups - 1;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (t->turn[middle].end > number)
            high = middle;
        else
            low = middle + 1;
    }
    const int32_t g = t->turn[low].group;
    const int64_t side = t->cols > 0 ? t->cols : rows_of(t, g), part = part_of(side, t->most);
    const int64_t first = (number - (low > 0 ? t->turn[low - 1].end : 0)) * part;
    return (mz_host_tile){g, first, smaller(part, side - first)};
}

typedef struct product_run {
    const mz_simd *simd;
    const mz_product_args *args;
    mz_host_tiling tiles;
    float *scratch; /* [threads][per_thread] */
    int64_t per_thread;
    int64_t rows; /* most that are taken at a time */
} product_run;

static const void *at(const void *x, mz_dtype type, int64_t element) {
    return (const char *)x + element * (type == MZ_BF16 ? 2 : 4);
}

static void *at_out(void *x, mz_dtype type, int64_t element) {
    return (char *)x + element * (type == MZ_BF16 ? 2 : 4);
}

static float *scratch_of(const product_run *t, int32_t thread) {
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
static void rows_bf16(const product_run *t, const uint16_t *a, const uint16_t *w, uint16_t *c,
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
    const product_run *t = argument;
    const mz_product_args *p = t->args;
    const mz_host_tile tile = mz_host_tile_at(&t->tiles, part);
    const int64_t first = p->groups.begin[tile.group] + tile.first, rows = tile.count;
    const int64_t inner = p->op == MZ_PRODUCT_FORWARD ? p->k : p->n;
    const int64_t outer = p->op == MZ_PRODUCT_FORWARD ? p->n : p->k;
    const void *a = at(p->a, p->type, first * inner);
    void *c = at_out(p->c, p->type, first * outer);
    if (p->type == MZ_F32)
        rows_f32(p, a, p->weight[tile.group], c, rows);
    else
        rows_bf16(t, a, p->weight[tile.group], c, rows, scratch_of(t, thread));
}

/* ---- wgrad --------------------------------------------------------------------------------------
 */

/* sum[cols][k] (+)= a[rows][cols]^T * c[rows][k] over all rows of the group, in pieces. */
static void weight_sum(const product_run *t, int32_t g, int64_t col, int64_t cols, float beta,
                       float *sum, float *scratch) {
    const mz_product_args *p = t->args;
    const bool wide = p->type == MZ_F32;
    const int64_t step = wide ? INT64_C(1) << 20 : t->rows;
    const int64_t *begin = p->groups.begin;
    float *wide_a = scratch, *wide_c = wide ? NULL : scratch + step * smaller(TILE_COLS, p->n);
    for (int64_t r = begin[g]; r < begin[g + 1]; r += step) {
        const int64_t rows = smaller(step, begin[g + 1] - r);
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
    const product_run *t = argument;
    const mz_product_args *p = t->args;
    const mz_host_tile tile = mz_host_tile_at(&t->tiles, part);
    const int32_t g = tile.group;
    const int64_t col = tile.first, cols = tile.count;
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

/* The threads' scratch, whole lines of it, then the order of the groups. */
static size_t scratch_bytes(const mz_kernels *k, int64_t floats) {
    const size_t line = 64;
    const int64_t all = mz_pool_threads(mz_host_of(k)->pool) * floats;
    return (sizeof(float) * (size_t)all + line - 1) / line * line;
}

static size_t workspace_bytes(const mz_kernels *k, int32_t groups, int64_t floats) {
    return scratch_bytes(k, floats) + sizeof(mz_host_turn) * (size_t)groups;
}

static mz_host_turn *turns_of(const mz_kernels *k, void *workspace, int64_t floats) {
    return (mz_host_turn *)(void *)((char *)workspace + scratch_bytes(k, floats));
}

mz_host_tiling mz_host_product_tiling(const mz_product_args *a, mz_host_turn *turn) {
    const bool wgrad = a->op == MZ_PRODUCT_WGRAD;
    return (mz_host_tiling){.begin = a->groups.begin,
                            .groups = a->groups.groups,
                            .weight = a->weight,
                            .cols = wgrad ? a->n : 0,
                            .most = wgrad ? TILE_COLS : TILE_ROWS,
                            .turn = turn};
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
    return workspace_bytes(k, a->groups.groups, scratch_floats(a));
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
    const int64_t floats = scratch_floats(a);
    product_run run = {.simd = mz_host_of(k)->simd,
                       .args = a,
                       .tiles = mz_host_product_tiling(a, turns_of(k, workspace, floats)),
                       .scratch = workspace,
                       .per_thread = floats,
                       .rows = tile_rows(&a->groups, TILE_ROWS)};
    mz_pool_run(mz_host_of(k)->pool, a->op == MZ_PRODUCT_WGRAD ? weight_tile : row_tile, &run,
                mz_host_order_tiles(&run.tiles));
    return MZ_K_OK;
}

/* ---- up-projection with SwiGLU ------------------------------------------------------------------
 * A tile's gate and up rows are still in the cache when the activation reads them. */

enum { UP_FLOATS = 1 << 19, UP_ROWS_MOST = 256 };

static int64_t up_rows_most(int64_t intermediate) {
    const int64_t rows = UP_FLOATS / (2 * intermediate) / TILE_GRAIN * TILE_GRAIN;
    return rows < 16 ? 16 : smaller(rows, UP_ROWS_MOST);
}

static int64_t up_rows(const mz_expert_up *a) {
    return tile_rows(&a->groups, up_rows_most(a->intermediate));
}

mz_product_tiles mz_host_up_tiles(const mz_kernels *k, int64_t intermediate) {
    return (mz_product_tiles){(int32_t)up_rows_most(intermediate), 0, 0,
                              mz_pool_threads(mz_host_of(k)->pool)};
}

mz_host_tiling mz_host_up_tiling(const mz_expert_up *a, mz_host_turn *turn) {
    return (mz_host_tiling){.begin = a->groups.begin,
                            .groups = a->groups.groups,
                            .weight = a->weight,
                            .most = up_rows_most(a->intermediate),
                            .turn = turn};
}

typedef struct up_run {
    product_run run;
    mz_product_args product;
    const mz_expert_up *args;
} up_run;

static void up_rows_of(const up_run *u, int64_t first, int64_t rows, void *gate_up) {
    const mz_expert_up *a = u->args;
    const mz_simd *simd = u->run.simd;
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
    const up_run *u = argument;
    const mz_expert_up *a = u->args;
    const product_run *t = &u->run;
    const mz_host_tile tile = mz_host_tile_at(&t->tiles, part);
    const int64_t first = a->groups.begin[tile.group] + tile.first;
    const int64_t rows = tile.count, cols = 2 * a->intermediate;
    const void *weight = a->weight[tile.group];
    float *scratch = scratch_of(t, thread);
    /* The tile's own gate and up where the caller keeps none, before the product's scratch. */
    void *gate_up = a->gate_up ? at_out(a->gate_up, a->type, first * cols) : (void *)scratch;
    if (!a->gate_up)
        scratch += t->rows * cols;
    const void *x = at(a->x, a->type, first * a->hidden);
    if (a->type == MZ_F32)
        multiply(MZ_PRODUCT_FORWARD, rows, cols, a->hidden, x, a->hidden, weight, 0, gate_up, cols);
    else
        rows_bf16(t, x, weight, gate_up, rows, scratch);
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
    return workspace_bytes(k, a->groups.groups, up_scratch_floats(a));
}

mz_kstatus mz_host_expert_up_forward(mz_kernels *k, mz_kstream stream, const mz_expert_up *a,
                                     void *workspace) {
    (void)stream;
    mz_kstatus status = check_blas(k, "expert_up", 2 * a->intermediate, a->hidden);
    if (status != MZ_K_OK)
        return status;
    up_run u = {.args = a,
                .product = {.op = MZ_PRODUCT_FORWARD,
                            .groups = a->groups,
                            .n = 2 * a->intermediate,
                            .k = a->hidden,
                            .type = a->type,
                            .weight = a->weight}};
    const int64_t floats = up_scratch_floats(a);
    u.run = (product_run){.simd = mz_host_of(k)->simd,
                          .args = &u.product,
                          .tiles = mz_host_up_tiling(a, turns_of(k, workspace, floats)),
                          .scratch = workspace,
                          .per_thread = floats,
                          .rows = up_rows(a)};
    mz_pool_run(mz_host_of(k)->pool, up_tile, &u, mz_host_order_tiles(&u.run.tiles));
    return MZ_K_OK;
}
