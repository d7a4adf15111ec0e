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
        d->out[i] = r->simd->norm2(d->type, x, d->cols);
    }
}

static void dots_range(void *argument, int64_t first, int64_t end) {
    const reduction *r = argument;
    const mz_dots *d = r->dots;
    for (int64_t i = first; i < end; i++) {
        const void *a = row_at(d->a, d->type, i, d->a_stride);
        const void *b = row_at(d->b, d->type, i, d->b_stride);
        d->out[i] = r->simd->dot(d->type, a, b, d->cols);
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
 * Rows are read wherever they are, and written one after the other. */

/* The results of n rows find no room in the caches. */
static bool streams(int64_t n, int64_t cols, mz_dtype type) {
    return n * cols * size_of(type) >= MZ_STREAM_BYTES;
}

typedef struct packing {
    const mz_simd *simd;
    const mz_pack *pack;
    bool stream;
} packing;

/* Where row i comes from; NULL: it is zeros. */
static const void *packed_from(const mz_pack *a, int64_t i) {
    const int64_t pair = a->row_pair[i];
    if (pair < 0)
        return NULL;
    return row_at(a->x, a->type, a->token ? a->token[pair] : pair / a->k, a->hidden);
}

static void pack_range(void *argument, int64_t first, int64_t end) {
    const packing *p = argument;
    const mz_pack *a = p->pack;
    const size_t bytes = (size_t)(a->hidden * size_of(a->type));
    const void *next = first < end ? packed_from(a, first) : NULL;
    for (int64_t i = first; i < end; i++) {
        const void *from = next;
        void *to = row_of(a->out, a->type, i, a->hidden);
        next = i + 1 < end ? packed_from(a, i + 1) : from;
        if (a->scale && from)
            p->simd->scale(a->type, to, from, next, a->scale[a->row_pair[i]], a->hidden, p->stream);
        else
            p->simd->copy(to, from, next, bytes, p->stream);
    }
    p->simd->settle();
}

mz_kstatus mz_host_pack_rows(mz_kernels *k, mz_kstream stream, const mz_pack *a) {
    (void)stream;
    const int64_t rows = a->rows_used && *a->rows_used < a->rows ? *a->rows_used : a->rows;
    packing p = {mz_host_of(k)->simd, a, streams(rows, a->hidden, a->type)};
    mz_pool_range(mz_host_of(k)->pool, pack_range, &p, rows, 2 * a->hidden * size_of(a->type));
    return MZ_K_OK;
}

typedef struct unpacking {
    const mz_simd *simd;
    const mz_unpack *unpack;
    bool stream;
} unpacking;

static const void *unpacked_from(const mz_unpack *a, int64_t pair) {
    const int64_t position = a->position[pair];
    return position < 0 ? NULL : row_at(a->row, a->type, position, a->hidden);
}

static void unpack_range(void *argument, int64_t first, int64_t end) {
    const unpacking *u = argument;
    const mz_unpack *a = u->unpack;
    const size_t bytes = (size_t)(a->hidden * size_of(a->type));
    const void *next = first < end ? unpacked_from(a, first) : NULL;
    for (int64_t pair = first; pair < end; pair++) {
        const void *from = next;
        next = pair + 1 < end ? unpacked_from(a, pair + 1) : from;
        u->simd->copy(row_of(a->out, a->type, pair, a->hidden), from, next, bytes, u->stream);
    }
    u->simd->settle();
}

mz_kstatus mz_host_unpack_rows(mz_kernels *k, mz_kstream stream, const mz_unpack *a) {
    (void)stream;
    unpacking u = {mz_host_of(k)->simd, a, streams(a->pairs, a->hidden, a->type)};
    mz_pool_range(mz_host_of(k)->pool, unpack_range, &u, a->pairs,
                  2 * a->hidden * size_of(a->type));
    return MZ_K_OK;
}

/* Rows of a token that are added at once; columns of a sum that waits for more of them. */
enum { ADDED = 32, PIECE = 2048 };

/* Some of a token's rows, from column `col` on. */
typedef struct gathered {
    const void *row[ADDED];
    float factor[ADDED];
    int64_t rows;
    int64_t begin, pair, end; /* of the token's pairs; those before `pair` are gathered */
} gathered;

static void gather(const mz_combine *a, int64_t col, gathered *g) {
    g->rows = 0;
    for (; g->pair < g->end && g->rows < ADDED; g->pair++) {
        const int64_t position = a->position[g->pair];
        if (position < 0)
            continue;
        g->row[g->rows] = row_at(a->row, a->type, position * a->hidden + col, 1);
        const float factor = a->scale ? a->scale[g->pair] : 1;
        g->factor[g->rows++] = factor == factor ? factor : NAN;
    }
}

static void gather_token(const mz_combine *a, int64_t token, gathered *g) {
    g->begin = a->token_begin ? a->token_begin[token] : token * a->k;
    g->end = a->token_begin ? a->token_begin[token + 1] : g->begin + a->k;
    g->pair = g->begin;
    gather(a, 0, g);
}

typedef struct combination {
    const mz_simd *simd;
    const mz_combine *combine;
    bool stream;
} combination;

/* A token with more rows than are added at once: sums wait in fp32, some columns at a time. */
static void combine_many(const combination *c, int64_t token, gathered *g) {
    const mz_combine *a = c->combine;
    float sum[PIECE];
    for (int64_t col = 0; col < a->hidden; col += PIECE) {
        void *to = row_of(a->out, a->type, token * a->hidden + col, 1);
        mz_row_sum r = {.type = a->type,
                        .from_type = a->type,
                        .from = a->accumulate ? to : NULL,
                        .row = g->row,
                        .factor = g->factor,
                        .n = a->hidden - col < PIECE ? a->hidden - col : PIECE};
        g->pair = g->begin;
        do {
            gather(a, col, g);
            const bool last = g->pair == g->end;
            r.rows = g->rows;
            r.to = last ? to : sum;
            r.to_type = last ? a->type : MZ_F32;
            c->simd->combine(&r);
            r.from = sum;
            r.from_type = MZ_F32;
        } while (g->pair < g->end);
    }
}

static void combine_range(void *argument, int64_t first, int64_t end) {
    const combination *c = argument;
    const mz_combine *a = c->combine;
    gathered list[2] = {0};
    if (first < end)
        gather_token(a, first, &list[first % 2]);
    for (int64_t token = first; token < end; token++) {
        gathered *g = &list[token % 2], *next = &list[(token + 1) % 2];
        next->rows = 0;
        if (token + 1 < end)
            gather_token(a, token + 1, next);
        if (g->pair < g->end) {
            combine_many(c, token, g);
            continue;
        }
        void *to = row_of(a->out, a->type, token, a->hidden);
        const mz_row_sum r = {.type = a->type,
                              .from_type = a->type,
                              .to_type = a->type,
                              .to = to,
                              .from = a->accumulate ? to : NULL,
                              .row = g->row,
                              .factor = g->factor,
                              .rows = g->rows,
                              .next = next->row,
                              .next_rows = next->rows,
                              .n = a->hidden,
                              .stream = c->stream};
        c->simd->combine(&r);
    }
    c->simd->settle();
}

mz_kstatus mz_host_combine_rows(mz_kernels *k, mz_kstream stream, const mz_combine *a) {
    (void)stream;
    combination c = {mz_host_of(k)->simd, a,
                     !a->accumulate && streams(a->tokens, a->hidden, a->type)};
    mz_pool_range(mz_host_of(k)->pool, combine_range, &c, a->tokens,
                  ((a->token_begin ? 1 : a->k) + 1) * a->hidden * size_of(a->type));
    return MZ_K_OK;
}

/* ---- SwiGLU -------------------------------------------------------------------------------------
 */

typedef struct gating {
    const mz_simd *simd;
    const mz_swiglu *args;
    bool stream;
} gating;

static void swiglu_range(void *argument, int64_t first, int64_t end) {
    const gating *g = argument;
    const mz_swiglu *a = g->args;
    const int64_t n = a->intermediate;
    for (int64_t i = first; i < end; i++) {
        const void *u = row_at(a->gate_up, a->type, 2 * i, n);
        const void *v = row_at(a->gate_up, a->type, 2 * i + 1, n);
        const float norm2 =
            g->simd->swiglu(a->type, row_of(a->h, a->type, i, n), u, v, n, g->stream);
        if (a->norm2)
            a->norm2[i] = norm2;
    }
    g->simd->settle();
}

static void swiglu_back_range(void *argument, int64_t first, int64_t end) {
    const gating *g = argument;
    const mz_swiglu *a = g->args;
    const int64_t n = a->intermediate;
    for (int64_t i = first; i < end; i++) {
        const mz_swiglu_row row = {.du = row_of(a->dgate_up, a->type, 2 * i, n),
                                   .dv = row_of(a->dgate_up, a->type, 2 * i + 1, n),
                                   .h = a->h ? row_of(a->h, a->type, i, n) : NULL,
                                   .u = row_at(a->gate_up, a->type, 2 * i, n),
                                   .v = row_at(a->gate_up, a->type, 2 * i + 1, n),
                                   .dh = row_at(a->dh, a->type, i, n),
                                   .factor = a->scale ? a->scale[i] : 1,
                                   .n = n};
        const float dot = g->simd->swiglu_back(&row, a->type, g->stream);
        if (a->dot)
            a->dot[i] = dot;
    }
    g->simd->settle();
}

static int64_t rows_of(const mz_swiglu *a) {
    return a->rows_used && *a->rows_used < a->rows ? *a->rows_used : a->rows;
}

mz_kstatus mz_host_swiglu_forward(mz_kernels *k, mz_kstream stream, const mz_swiglu *a) {
    (void)stream;
    gating g = {mz_host_of(k)->simd, a, streams(rows_of(a), a->intermediate, a->type)};
    mz_pool_range(mz_host_of(k)->pool, swiglu_range, &g, rows_of(a),
                  3 * a->intermediate * size_of(a->type));
    return MZ_K_OK;
}

/* In place the lines that are written have just been read. */
mz_kstatus mz_host_swiglu_backward(mz_kernels *k, mz_kstream stream, const mz_swiglu *a) {
    (void)stream;
    gating g = {mz_host_of(k)->simd, a,
                a->dgate_up != a->gate_up && streams(rows_of(a), 2 * a->intermediate, a->type)};
    mz_pool_range(mz_host_of(k)->pool, swiglu_back_range, &g, rows_of(a),
                  5 * a->intermediate * size_of(a->type));
    return MZ_K_OK;
}
