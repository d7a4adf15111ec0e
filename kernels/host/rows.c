/* Operations on rows: each row is one item of work, done by one thread. */
#include "kernels/host/host.h"
#include "kernels/arithmetic.h"

#include <stdlib.h>

static int64_t size_of(mz_dtype type) {
    return type == MZ_BF16 ? 2 : 4;
}

/* Row i of a matrix of `stride` values a row. */
static const void *row_at(const void *x, mz_dtype type, int64_t i, int64_t stride) {
    return (const char *)x + i * stride * size_of(type);
}

static void *row_of(void *x, mz_dtype type, int64_t i, int64_t stride) {
    return (char *)x + i * stride * size_of(type);
}

/* ---- conversion ---------------------------------------------------------------------------------
 */

typedef struct conversion {
    const mz_simd *simd;
    mz_dtype to_type, from_type;
    void *to;
    const void *from;
} conversion;

static void convert_range(void *argument, int64_t first, int64_t end) {
    const conversion *c = argument;
    void *to = row_of(c->to, c->to_type, first, 1);
    const void *from = row_at(c->from, c->from_type, first, 1);
    if (c->to_type == c->from_type)
        memmove(to, from, (size_t)((end - first) * size_of(c->to_type)));
    else if (c->to_type == MZ_F32)
        c->simd->widen(to, from, end - first);
    else
        c->simd->narrow(to, from, end - first);
}

mz_kstatus mz_host_convert(mz_kernels *k, mz_kstream stream, mz_dtype to_type, void *to,
                           mz_dtype from_type, const void *from, int64_t n) {
    (void)stream;
    conversion c = {mz_host_of(k)->simd, to_type, from_type, to, from};
    mz_pool_range(mz_host_of(k)->pool, convert_range, &c, n, size_of(to_type) + size_of(from_type));
    return MZ_K_OK;
}

/* ---- norms and dots -----------------------------------------------------------------------------
 */

typedef struct reduction {
    const mz_simd *simd;
    const mz_dots *dots;
} reduction;

static void norms_range(void *argument, int64_t first, int64_t end) {
    const reduction *r = argument;
    const mz_dots *d = r->dots;
    for (int64_t i = first; i < end; i++) {
        const void *x = row_at(d->a, d->type, i, d->a_stride);
        d->out[i] =
            d->type == MZ_BF16 ? r->simd->norm2_bf16(x, d->cols) : r->simd->norm2_f32(x, d->cols);
    }
}

static void dots_range(void *argument, int64_t first, int64_t end) {
    const reduction *r = argument;
    const mz_dots *d = r->dots;
    for (int64_t i = first; i < end; i++) {
        const void *a = row_at(d->a, d->type, i, d->a_stride);
        const void *b = row_at(d->b, d->type, i, d->b_stride);
        d->out[i] =
            d->type == MZ_BF16 ? r->simd->dot_bf16(a, b, d->cols) : r->simd->dot_f32(a, b, d->cols);
    }
}

mz_kstatus mz_host_row_norms(mz_kernels *k, mz_kstream stream, const mz_norms *a) {
    (void)stream;
    const mz_dots dots = {.type = a->type,
                          .a = a->x,
                          .rows = a->rows,
                          .cols = a->cols,
                          .a_stride = a->stride,
                          .out = a->out};
    reduction r = {mz_host_of(k)->simd, &dots};
    mz_pool_range(mz_host_of(k)->pool, norms_range, &r, a->rows, a->cols * size_of(a->type));
    return MZ_K_OK;
}

mz_kstatus mz_host_row_dots(mz_kernels *k, mz_kstream stream, const mz_dots *a) {
    (void)stream;
    reduction r = {mz_host_of(k)->simd, a};
    mz_pool_range(mz_host_of(k)->pool, dots_range, &r, a->rows, 2 * a->cols * size_of(a->type));
    return MZ_K_OK;
}

/* ---- pack, unpack, combine ----------------------------------------------------------------------
 */

typedef struct packing {
    const mz_simd *simd;
    const mz_pack *pack;
} packing;

static void pack_range(void *argument, int64_t first, int64_t end) {
    const packing *p = argument;
    const mz_pack *a = p->pack;
    const size_t bytes = (size_t)(a->hidden * size_of(a->type));
    for (int64_t i = first; i < end; i++) {
        void *to = row_of(a->out, a->type, i, a->hidden);
        const int64_t pair = a->row_pair[i];
        if (pair < 0) {
            memset(to, 0, bytes);
            continue;
        }
        const int64_t token = a->token ? a->token[pair] : pair / a->k;
        const void *from = row_at(a->x, a->type, token, a->hidden);
        if (!a->scale)
            memcpy(to, from, bytes);
        else if (a->type == MZ_BF16)
            p->simd->scale_bf16(to, from, a->scale[pair], a->hidden);
        else
            p->simd->scale_f32(to, from, a->scale[pair], a->hidden);
    }
}

mz_kstatus mz_host_pack_rows(mz_kernels *k, mz_kstream stream, const mz_pack *a) {
    (void)stream;
    packing p = {mz_host_of(k)->simd, a};
    const int64_t rows = a->rows_used && *a->rows_used < a->rows ? *a->rows_used : a->rows;
    mz_pool_range(mz_host_of(k)->pool, pack_range, &p, rows, 2 * a->hidden * size_of(a->type));
    return MZ_K_OK;
}

static void unpack_range(void *argument, int64_t first, int64_t end) {
    const mz_unpack *a = argument;
    const size_t bytes = (size_t)(a->hidden * size_of(a->type));
    for (int64_t pair = first; pair < end; pair++) {
        void *to = row_of(a->out, a->type, pair, a->hidden);
        if (a->position[pair] < 0)
            memset(to, 0, bytes);
        else
            memcpy(to, row_at(a->row, a->type, a->position[pair], a->hidden), bytes);
    }
}

mz_kstatus mz_host_unpack_rows(mz_kernels *k, mz_kstream stream, const mz_unpack *a) {
    (void)stream;
    mz_unpack args = *a;
    mz_pool_range(mz_host_of(k)->pool, unpack_range, &args, a->pairs,
                  2 * a->hidden * size_of(a->type));
    return MZ_K_OK;
}

typedef struct combination {
    const mz_simd *simd;
    const mz_combine *combine;
} combination;

/* Sums of this many columns stay on the stack; rows are taken in such pieces. */
enum { PIECE = 2048 };

static void combine_piece(const combination *c, int64_t token, int64_t col, int64_t n, float *sum) {
    const mz_combine *a = c->combine;
    const int64_t begin = a->token_begin ? a->token_begin[token] : token * a->k;
    const int64_t end = a->token_begin ? a->token_begin[token + 1] : begin + a->k;
    void *to = row_of(a->out, a->type, token * a->hidden + col, 1);
    if (!a->accumulate)
        memset(sum, 0, sizeof *sum * (size_t)n);
    else if (a->type == MZ_BF16)
        c->simd->widen(sum, to, n);
    else
        memcpy(sum, to, sizeof *sum * (size_t)n);
    for (int64_t pair = begin; pair < end; pair++) {
        if (a->position[pair] < 0)
            continue;
        const float factor = a->scale ? a->scale[pair] : 1;
        const void *row = row_at(a->row, a->type, a->position[pair] * a->hidden + col, 1);
        if (a->type == MZ_BF16)
            c->simd->add_bf16(sum, row, factor, n);
        else
            c->simd->add_f32(sum, row, factor, n);
    }
    if (a->type == MZ_BF16)
        c->simd->narrow(to, sum, n);
    else
        memcpy(to, sum, sizeof *sum * (size_t)n);
}

static void combine_range(void *argument, int64_t first, int64_t end) {
    const combination *c = argument;
    const int64_t hidden = c->combine->hidden;
    float sum[PIECE];
    for (int64_t token = first; token < end; token++)
        for (int64_t col = 0; col < hidden; col += PIECE)
            combine_piece(c, token, col, hidden - col < PIECE ? hidden - col : PIECE, sum);
}

mz_kstatus mz_host_combine_rows(mz_kernels *k, mz_kstream stream, const mz_combine *a) {
    (void)stream;
    combination c = {mz_host_of(k)->simd, a};
    mz_pool_range(mz_host_of(k)->pool, combine_range, &c, a->tokens,
                  ((a->token_begin ? 1 : a->k) + 1) * a->hidden * size_of(a->type));
    return MZ_K_OK;
}

/* ---- SwiGLU -------------------------------------------------------------------------------------
 */

typedef struct gating {
    const mz_simd *simd;
    const mz_swiglu *args;
} gating;

static void swiglu_range(void *argument, int64_t first, int64_t end) {
    const gating *g = argument;
    const mz_swiglu *a = g->args;
    const int64_t n = a->intermediate;
    for (int64_t i = first; i < end; i++) {
        const void *u = row_at(a->gate_up, a->type, 2 * i, n);
        const void *v = row_at(a->gate_up, a->type, 2 * i + 1, n);
        void *h = row_of(a->h, a->type, i, n);
        const float norm2 =
            a->type == MZ_BF16 ? g->simd->swiglu_bf16(h, u, v, n) : g->simd->swiglu_f32(h, u, v, n);
        if (a->norm2)
            a->norm2[i] = norm2;
    }
}

static void swiglu_back_range(void *argument, int64_t first, int64_t end) {
    const gating *g = argument;
    const mz_swiglu *a = g->args;
    const int64_t n = a->intermediate;
    for (int64_t i = first; i < end; i++) {
        const void *u = row_at(a->gate_up, a->type, 2 * i, n);
        const void *v = row_at(a->gate_up, a->type, 2 * i + 1, n);
        const void *dh = row_at(a->dh, a->type, i, n);
        void *du = row_of(a->dgate_up, a->type, 2 * i, n);
        void *dv = row_of(a->dgate_up, a->type, 2 * i + 1, n);
        void *h = a->h ? row_of(a->h, a->type, i, n) : NULL;
        const float factor = a->scale ? a->scale[i] : 1;
        const float dot = a->type == MZ_BF16
                              ? g->simd->swiglu_back_bf16(du, dv, h, u, v, dh, factor, n)
                              : g->simd->swiglu_back_f32(du, dv, h, u, v, dh, factor, n);
        if (a->dot)
            a->dot[i] = dot;
    }
}

static int64_t rows_of(const mz_swiglu *a) {
    return a->rows_used && *a->rows_used < a->rows ? *a->rows_used : a->rows;
}

mz_kstatus mz_host_swiglu_forward(mz_kernels *k, mz_kstream stream, const mz_swiglu *a) {
    (void)stream;
    gating g = {mz_host_of(k)->simd, a};
    mz_pool_range(mz_host_of(k)->pool, swiglu_range, &g, rows_of(a),
                  3 * a->intermediate * size_of(a->type));
    return MZ_K_OK;
}

mz_kstatus mz_host_swiglu_backward(mz_kernels *k, mz_kstream stream, const mz_swiglu *a) {
    (void)stream;
    gating g = {mz_host_of(k)->simd, a};
    mz_pool_range(mz_host_of(k)->pool, swiglu_back_range, &g, rows_of(a),
                  5 * a->intermediate * size_of(a->type));
    return MZ_K_OK;
}
