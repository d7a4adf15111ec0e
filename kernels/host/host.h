/* The host backend: work in ranges over a pool of threads, inner loops compiled once per
 * instruction set. Internal to kernels/host. */
#ifndef MIZAN_KERNELS_HOST_HOST_H
#define MIZAN_KERNELS_HOST_HOST_H

#include "kernels/arithmetic.h"
#include "kernels/backend.h"

/* ---- pool.c: threads
 * ----------------------------------------------------------------------------- mz_pool_run calls
 * part(argument, i) for i in [0, parts), each once, in any order, on any thread of the pool, the
 * caller's included, and returns when all are done. A part writes only what is its own, so results
 * do not depend on the number of threads. Parts must not call mz_pool_run. */
typedef struct mz_pool mz_pool;
mz_pool *mz_pool_create(int32_t threads); /* NULL: no memory or no threads */
void mz_pool_free(mz_pool *pool);
int32_t mz_pool_threads(const mz_pool *pool);
typedef void (*mz_part)(void *argument, int64_t part, int32_t thread);
void mz_pool_run(mz_pool *pool, mz_part part, void *argument, int64_t parts);

/* Calls range(argument, first, end) over [0, n) in pieces of a size that follows from n and
 * `bytes`, the memory touched per item, alone: never from the number of threads. */
typedef void (*mz_range)(void *argument, int64_t first, int64_t end);
void mz_pool_range(mz_pool *pool, mz_range range, void *argument, int64_t n, int64_t bytes);

/* ---- simd.c: inner loops, one table per instruction set
 * ------------------------------------------- Every loop sums in the same order in all of them (16
 * partial sums, then pairwise), and nothing is contracted, so the tables give
 * the same bits. Buffers may have any alignment. n: values; widen and narrow convert bf16 rows.
 *
 * `stream`: the row written is not read soon; where it consists of whole cache lines it goes past
 * the caches, and `settle` must follow on the same thread. `next`: the row that will be read after
 * this one, or this one again. */
enum { MZ_STREAM_BYTES = 16 << 20 }; /* results from here on find no room in the caches */
typedef struct mz_row_sum {          /* to = from + sum over k of factor[k] row[k] */
    mz_dtype type;                   /* of the rows */
    mz_dtype from_type, to_type; /* type, or MZ_F32: sums that wait, room for whole 16 columns */
    void *to;
    const void *from;       /* may be `to`; NULL: 0 */
    const void *const *row; /* [rows] */
    const float *factor;    /* [rows]; a NaN is NAN: bf16 keep an upper half */
    int64_t rows;
    const void *const *next; /* [next_rows] that will be read after these */
    int64_t next_rows, n;
    bool stream;
} mz_row_sum;
typedef struct mz_swiglu_row {
    void *du, *dv, *h; /* h may be NULL; du and dv may be u and v */
    const void *u, *v, *dh;
    float factor; /* of dh */
    int64_t n;
} mz_swiglu_row;
typedef struct mz_simd {
    const char *name;
    void (*widen)(float *to, const uint16_t *from, int64_t n);
    void (*narrow)(uint16_t *to, const float *from, int64_t n);
    float (*norm2)(mz_dtype type, const void *x, int64_t n);
    float (*dot)(mz_dtype type, const void *a, const void *b, int64_t n);
    void (*copy)(void *to, const void *from, const void *next, size_t bytes,
                 bool stream); /* from NULL: zeros */
    void (*scale)(mz_dtype type, void *to, const void *from, const void *next, float factor,
                  int64_t n, bool stream);
    void (*combine)(const mz_row_sum *sum);
    /* h = silu(u) v; returns ||h||^2 of h as stored. */
    float (*swiglu)(mz_dtype type, void *h, const void *u, const void *v, int64_t n, bool stream);
    /* du, dv of dh * factor, h again; returns <dh, h> before the factor. */
    float (*swiglu_back)(const mz_swiglu_row *row, mz_dtype type, bool stream);
    /* score = w^2 a b from left to right, at most FLT_MAX */
    void (*products)(float *score, const float *w, const float *a, const float *b, int64_t n);
    /* u of pairs `first` and on: mz_unit_float of mz_pair_bits */
    void (*draws)(float *u, uint64_t seed, uint64_t first, int64_t n);
    /* score = sqrt(score) / u, at most FLT_MAX */
    void (*priorities)(float *score, const float *u, int64_t n);
    void (*settle)(void);
} mz_simd;
extern const mz_simd mz_simd_base, mz_simd_avx2, mz_simd_avx512;

/* Where a group of 16 columns keeps its column i when bf16 are taken apart: the even ones first. */
#define MZ_PLACE(i) ((i) / 2 + (i) % 2 * 8)

/* ---- update_simd.c: inner loops of the optimizers, one table per instruction set
 * ------------------- A row of n values that are elements [element, element + n) of the tensor. */
typedef struct mz_update_row {
    const mz_update *args;
    float scale; /* of the gradient */
    float rate;  /* what the update is multiplied with: includes bias correction and clip */
    float keep;  /* 1 - learning rate * decay */
    /* bf16 gradients and parameters, no momentum: squares, columns' sums and factors stand by
     * place, in whole groups of 16, those of no column 0 */
    bool by_place;
    bool decay_first; /* a bf16 parameter is rounded when it has decayed */
    float beta1;
    float beta2;     /* of this step */
    float floor;     /* added to g^2 */
    float least;     /* of the second moment in a denominator */
    float eps;       /* AdamW: added to the root */
    int64_t element; /* number of the row's first value in the tensor */
    int64_t n;
    void *parameter;
    const void *gradient;
    const void *next;  /* gradient that sweep 1 will read after these rows, or this one again */
    float *m, *v;      /* of the row, or NULL */
    mz_random *random; /* of the tensor at this step; the thread's own. Read where bits are drawn */
} mz_update_row;
enum { MZ_ROWS = 3 }; /* that sweep 1 takes at once, so that columns' sums are stored less often */
typedef struct mz_update_simd {
    /* Sweep 1 of the factored kinds, `row` the first of `rows`, 1 or MZ_ROWS (by place alone): m
     * (where there is one) takes g; square[row][j] = m^2, or g^2 without momentum; col[j] += g^2 +
     * floor; g2[row]: the sum of g^2 + floor. */
    void (*statistics)(const mz_update_row *row, int64_t rows, float *square, float *col,
                       float *g2);
    /* square alone, of m as it stands, or of g. */
    void (*squares)(const mz_update_row *row, float *square);
    /* weighted[j] += factor[row] * square[row][j], 1 or MZ_ROWS rows after each other */
    void (*weigh)(float *weighted, const float *square, const float *factor, int64_t rows,
                  int64_t n);
    /* Sweep 2: the update is base * rate * col_factor[j], base m or g. */
    void (*apply_factored)(const mz_update_row *row, const float *col_factor);
    /* Sweep 1 with a full v: v takes g^2 + floor, m takes g; the sum of base^2 / max(v, least). */
    float (*statistics_full)(const mz_update_row *row);
    /* Sweep 2: the update is base * rate / sqrt(max(v, least)). */
    void (*apply_full)(const mz_update_row *row);
    /* One sweep: u = m / (sqrt(v) * root + eps), root = 1 / sqrt(1 - beta2^t). */
    void (*adamw)(const mz_update_row *row, float root);
    void (*lion)(const mz_update_row *row);
    /* Writes an update that stands in `update`. */
    void (*apply)(const mz_update_row *row, const float *update);
} mz_update_simd;
extern const mz_update_simd mz_update_simd_base, mz_update_simd_avx2, mz_update_simd_avx512;

/* ---- the context's own part
 * ----------------------------------------------------------------------
 */
typedef struct mz_host {
    mz_pool *pool;
    const mz_simd *simd;
    const mz_update_simd *update;
    double mark[MZ_KERNEL_MARKS]; /* seconds */
    bool marked[MZ_KERNEL_MARKS];
} mz_host;
static inline mz_host *mz_host_of(const mz_kernels *k) {
    return (mz_host *)k->self;
}

/* rows.c */
mz_kstatus mz_host_convert(mz_kernels *k, mz_kstream stream, mz_dtype to_type, void *to,
                           mz_dtype from_type, const void *from, int64_t n);
mz_kstatus mz_host_row_norms(mz_kernels *k, mz_kstream stream, const mz_norms *args);
mz_kstatus mz_host_row_dots(mz_kernels *k, mz_kstream stream, const mz_dots *args);
mz_kstatus mz_host_pack_rows(mz_kernels *k, mz_kstream stream, const mz_pack *args);
mz_kstatus mz_host_unpack_rows(mz_kernels *k, mz_kstream stream, const mz_unpack *args);
mz_kstatus mz_host_combine_rows(mz_kernels *k, mz_kstream stream, const mz_combine *args);
mz_kstatus mz_host_swiglu_forward(mz_kernels *k, mz_kstream stream, const mz_swiglu *args);
mz_kstatus mz_host_swiglu_backward(mz_kernels *k, mz_kstream stream, const mz_swiglu *args);
/* pairs.c: scores, grouping, prefix sums, selection, arrangement */
mz_kstatus mz_host_score_pairs(mz_kernels *k, mz_kstream stream, const mz_score_args *args);
size_t mz_host_group_pairs_workspace(const mz_kernels *k, const mz_grouping *args);
mz_kstatus mz_host_group_pairs(mz_kernels *k, mz_kstream stream, const mz_grouping *args,
                               void *workspace);
size_t mz_host_prefix_sums_workspace(const mz_kernels *k, int64_t n);
mz_kstatus mz_host_prefix_sums(mz_kernels *k, mz_kstream stream, const int64_t *count, int64_t n,
                               int64_t *begin, void *workspace);
size_t mz_host_select_workspace(const mz_kernels *k, const mz_selection *args);
mz_kstatus mz_host_select_pairs(mz_kernels *k, mz_kstream stream, const mz_selection *args,
                                void *workspace);
mz_kstatus mz_host_arrange(mz_kernels *k, mz_kstream stream, const mz_segment *segment,
                           int64_t segments, const int64_t *in, int64_t *out);
mz_kstatus mz_host_invert(mz_kernels *k, mz_kstream stream, const int64_t *row_pair, int64_t rows,
                          int64_t pairs, int64_t *position);
/* product.c. A grouped product's tiles in the order in which the pool's threads take them: group by
 * group, those whose tiles are longest first, of equal ones in the order of their numbers. A tile
 * is as long as it has rows; of weight gradients as its group has. */
typedef struct mz_host_turn {
    int64_t length, end; /* of the group's tiles; how many there are up to its last one */
    int32_t group;
} mz_host_turn;
typedef struct mz_host_tiling {
    const int64_t *begin; /* [groups+1] */
    int32_t groups;
    void *const *weight; /* [groups]; NULL: no tiles */
    int64_t cols;        /* of every group, that are cut; 0: its rows are */
    int64_t most;        /* rows or cols of a tile */
    mz_host_turn *turn;  /* [groups], written by mz_host_order_tiles */
} mz_host_tiling;
typedef struct mz_host_tile {
    int32_t group;
    int64_t first, count; /* rows or cols of the group */
} mz_host_tile;
/* As the products below cut; `turn` takes their order. */
mz_host_tiling mz_host_product_tiling(const mz_product_args *args, mz_host_turn *turn);
mz_host_tiling mz_host_up_tiling(const mz_expert_up *args, mz_host_turn *turn);
int64_t mz_host_order_tiles(const mz_host_tiling *tiling); /* how many; O(groups log groups) */
mz_host_tile mz_host_tile_at(const mz_host_tiling *tiling, int64_t number); /* O(log groups) */
mz_product_tiles mz_host_tiles(const mz_kernels *k, mz_product op);
mz_product_tiles mz_host_up_tiles(const mz_kernels *k, int64_t intermediate);
size_t mz_host_grouped_gemm_workspace(const mz_kernels *k, const mz_product_args *args);
mz_kstatus mz_host_grouped_gemm(mz_kernels *k, mz_kstream stream, const mz_product_args *args,
                                void *workspace);
size_t mz_host_expert_up_workspace(const mz_kernels *k, const mz_expert_up *args);
mz_kstatus mz_host_expert_up_forward(mz_kernels *k, mz_kstream stream, const mz_expert_up *args,
                                     void *workspace);
/* router.c */
size_t mz_host_router_workspace(const mz_kernels *k, const mz_router *args);
mz_kstatus mz_host_router_forward(mz_kernels *k, mz_kstream stream, const mz_router *args,
                                  void *workspace);
mz_kstatus mz_host_router_backward(mz_kernels *k, mz_kstream stream, const mz_router *args,
                                   void *workspace);
mz_kstatus mz_host_router_losses(mz_kernels *k, mz_kstream stream, const mz_router *args,
                                 float *loss, void *workspace);
mz_kstatus mz_host_gate_norms(mz_kernels *k, mz_kstream stream, mz_dtype type, const void *z,
                              int64_t tokens, int32_t experts, int64_t r, float *norm);
mz_kstatus mz_host_gate_norms_backward(mz_kernels *k, mz_kstream stream, mz_dtype type,
                                       const void *z, const float *norm, const float *dnorm,
                                       int64_t tokens, int32_t experts, int64_t r, void *dz);
/* update.c */
size_t mz_host_update_workspace(const mz_kernels *k, const mz_update *args);
mz_kstatus mz_host_update_step(mz_kernels *k, mz_kstream stream, const mz_update *args,
                               void *workspace);

#endif
