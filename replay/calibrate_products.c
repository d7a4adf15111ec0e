/* Products: several equal groups per worker, so that all of them are busy to the end; what a call
 * takes beside its tiles is measured on a product too small to matter. */
#include "replay/calibrate_inside.h"

#include "common/base/stat.h"

#include <string.h>

/* Groups: two tiles for every worker of any GPU; where tiles are small, so many that their call is
 * a small part of the sample, up to MANY_PER_WORKER. */
enum { GROUPS_MOST = 384, GROUPS_PER_WORKER = 2, MANY_PER_WORKER = 16, SMALL_FLOPS = 16 << 20 };
enum { UP_INTERMEDIATE_MOST = 1024 };

typedef struct product_sizes {
    mz_work work;
    int64_t m, n, k; /* rows of a group; weights [n][k] */
    int32_t groups;
    int64_t *begin; /* context memory [groups+1] */
    void **weight;  /* context memory [groups] */
} product_sizes;

enum { VALUE = 2 };

static int64_t weight_bytes(const product_sizes *p) {
    return p->n * p->k * VALUE;
}

/* [weights][rows of a]; wgrad: [rows of a][rows of c]. Whether a cache holds them makes no product
 * faster. */
static int64_t in_bytes(const product_sizes *p) {
    const int64_t rows = p->m * p->groups;
    if (p->work == MZ_WORK_WGRAD)
        return rows * (p->n + p->k) * VALUE + 512;
    return p->groups * weight_bytes(p) + rows * (p->work == MZ_WORK_DGRAD ? p->n : p->k) * VALUE;
}

static int64_t out_bytes(const product_sizes *p) {
    const int64_t rows = p->m * p->groups;
    switch (p->work) {
    case MZ_WORK_WGRAD:
        return p->groups * weight_bytes(p);
    case MZ_WORK_UP: /* gate and up, then h, then norms */
        return rows * (p->n + p->n / 2) * VALUE + rows * 4 + 512;
    case MZ_WORK_DGRAD:
        return rows * p->k * VALUE;
    default:
        return rows * p->n * VALUE;
    }
}

static char *aligned(char *p) {
    return p + (256 - (uintptr_t)p % 256) % 256;
}

/* Weights, or wgrad's gradients, of the groups. */
static mz_kstatus set_weights(calibration *c, const void *sizes, char *in, char *out) {
    const product_sizes *p = sizes;
    char *first = p->work == MZ_WORK_WGRAD ? out : in;
    void *weight[GROUPS_MOST];
    for (int32_t g = 0; g < p->groups; g++)
        weight[g] = first + g * weight_bytes(p);
    return mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, p->weight, weight,
                           sizeof weight[0] * (size_t)p->groups);
}

static mz_product_args product_args(const product_sizes *p, char *in, char *out) {
    const int64_t rows = p->m * p->groups;
    mz_product_args a = {.groups = {p->begin, p->groups, rows, NULL},
                         .n = p->n,
                         .k = p->k,
                         .type = MZ_BF16,
                         .gradient_type = MZ_BF16,
                         .weight = p->weight};
    if (p->work == MZ_WORK_WGRAD) {
        a.op = MZ_PRODUCT_WGRAD;
        a.accumulate = true;
        a.a = in;
        a.c = aligned(in + rows * p->n * VALUE);
        return a;
    }
    a.op = p->work == MZ_WORK_DGRAD ? MZ_PRODUCT_DGRAD : MZ_PRODUCT_FORWARD;
    a.a = in + p->groups * weight_bytes(p);
    a.c = out;
    return a;
}

static mz_expert_up up_args(const product_sizes *p, char *in, char *out) {
    const int64_t rows = p->m * p->groups;
    char *h = aligned(out + rows * p->n * VALUE);
    return (mz_expert_up){.groups = {p->begin, p->groups, rows, NULL},
                          .hidden = p->k,
                          .intermediate = p->n / 2,
                          .type = MZ_BF16,
                          .x = in + p->groups * weight_bytes(p),
                          .weight = p->weight,
                          .gate_up = out,
                          .h = h,
                          .norm2 = (float *)(void *)aligned(h + rows * p->n / 2 * VALUE)};
}

static mz_kstatus run_product(calibration *c, const void *sizes, char *in, char *out) {
    const product_sizes *p = sizes;
    if (p->work == MZ_WORK_UP) {
        const mz_expert_up up = up_args(p, in, out);
        return mz_expert_up_forward(c->kernels, 0, &up, c->scratch);
    }
    const mz_product_args a = product_args(p, in, out);
    return mz_grouped_gemm(c->kernels, 0, &a, c->scratch);
}

enum { UNEVEN_MOST = 4 };

/* By how many rows the groups of pair `pair` differ from the sample's, one up, one down. Experts
 * rarely have a multiple of the 4 or 8 rows that a product's inner loop takes at once, and what is
 * left of them costs as much as several rows: over the pairs and rounds of a sample every rest of 8
 * comes equally often. None where a tile would then hold more rows or none. */
static int64_t uneven_rows(const calibration *c, const product_sizes *p, int32_t pair) {
    static const int64_t by[] = {1, 2, 3, UNEVEN_MOST, 1, 2, 3, 0};
    const int32_t pairs = p->groups > 1 ? p->groups / 2 : 1;
    const int64_t most = c->measured->tiling[p->work].rows;
    if (p->m < 2 * UNEVEN_MOST || (most > 0 && p->m + UNEVEN_MOST > most))
        return 0;
    return by[(pair + (int64_t)c->round * pairs) % (int64_t)(sizeof by / sizeof by[0])];
}

static mz_code time_product(calibration *c, product_sizes *p, double *seconds, mz_err *err) {
    int64_t begin[GROUPS_MOST + 1];
    for (int32_t g = 0; g <= p->groups; g++) /* the odd ends lie within a pair */
        begin[g] = g * p->m + (g % 2 > 0 && g < p->groups ? uneven_rows(c, p, g / 2) : 0);
    if (mz_kernels_copy(c->kernels, 0, MZ_COPY_IN, p->begin, begin,
                        sizeof begin[0] * (size_t)(p->groups + 1)) != MZ_K_OK)
        return calibrate_failed(c, "products", err);
    const mz_product_args a = product_args(p, c->inputs, c->results);
    const mz_expert_up up = up_args(p, c->inputs, c->results);
    const size_t scratch = p->work == MZ_WORK_UP ? mz_expert_up_workspace(c->kernels, &up)
                                                 : mz_grouped_gemm_workspace(c->kernels, &a);
    const calibrate_call call = {.bind = set_weights,
                                 .run = run_product,
                                 .sizes = p,
                                 .in_bytes = in_bytes(p),
                                 .out_bytes = out_bytes(p)};
    mz_code code = calibrate_scratch(c, scratch, err);
    return code == MZ_OK ? calibrate_time(c, &call, seconds, err) : code;
}

static int32_t groups_of(const product_sizes *p, int64_t workers) {
    const double flops = 2 * (double)(p->m + 1) * (double)p->n * (double)p->k;
    int64_t each = (int64_t)(SMALL_FLOPS / flops);
    each = each < GROUPS_PER_WORKER ? GROUPS_PER_WORKER
           : each > MANY_PER_WORKER ? MANY_PER_WORKER
                                    : each;
    return each * workers < GROUPS_MOST ? (int32_t)(each * workers) : GROUPS_MOST;
}

static bool fits_pools(const calibration *c, const product_sizes *p) {
    return in_bytes(p) <= c->options.pool_bytes && out_bytes(p) <= c->options.pool_bytes;
}

/* All tiles of a sample are equal: sizes that are not are left out. */
static mz_code sample_product(calibration *c, product_sizes *p, mz_err *err) {
    const mz_tiling *t = &c->measured->tiling[p->work];
    const int64_t workers = c->measured->workers;
    const mz_cut m = mz_cut_side(c->measured, p->m, t->rows);
    const mz_cut n = mz_cut_side(c->measured, p->n, t->n);
    const mz_cut k = mz_cut_side(c->measured, p->k, t->k);
    const int64_t each = m.count[0] * n.count[0] * k.count[0];
    double seconds = 0;
    if (m.count[1] > 0 || n.count[1] > 0 || k.count[1] > 0)
        return MZ_OK;
    p->groups = groups_of(p, workers);
    while (p->groups > 1 && !fits_pools(c, p))
        p->groups--;
    if (!fits_pools(c, p))
        return MZ_OK;
    mz_code code = time_product(c, p, &seconds, err);
    if (code != MZ_OK)
        return code;
    const double rounds = (double)((each * p->groups + workers - 1) / workers);
    if (seconds <= 2 * c->measured->call_s) /* nothing but the call */
        return MZ_OK;
    calibrate_add(c, p->work, (double)m.part[0], (double)n.part[0], (double)k.part[0],
                  (seconds - c->measured->call_s) / rounds);
    return MZ_OK;
}

/* n a multiple of the tile's columns or below them; m what is cut in equal tiles. Fine grain where
 * products are small and quickly timed: sides of 64 to 256 as of small experts. */
static const int64_t shapes[][2] = {
    {64, 64},    {96, 96},     {128, 64},   {64, 128},    {128, 128},   {256, 64},   {64, 256},
    {256, 128},  {128, 256},   {256, 256},  {512, 256},   {256, 512},   {768, 512},  {1024, 512},
    {512, 1024}, {1024, 1024}, {768, 2048}, {2048, 1024}, {1024, 2048}, {2048, 2048}};
static const int64_t depths[] = {1, 8, 24, 64, 160, 256, 384, 512, 2048, 8192};

enum { SHAPES = sizeof shapes / sizeof shapes[0], DEPTHS = sizeof depths / sizeof depths[0] };
enum { LARGE = 1 << 20, SMALL = 1 << 17, SMALLEST = 1 << 15, ROWS_MOST = 512 };

/* Large products take most of the time and change least between depths. Beyond ROWS_MOST there are
 * more tiles, but where a tile takes all rows. */
static bool wanted(const product_sizes *p) {
    const int64_t values = p->n * p->k;
    if (p->m > ROWS_MOST)
        return p->work == MZ_WORK_WGRAD && values <= (p->m > 4 * ROWS_MOST ? SMALLEST : SMALL);
    return values <= LARGE || (p->m != 24 && p->m != 256 && p->m != 384);
}

static mz_code sample_shape(calibration *c, product_sizes *p, mz_err *err) {
    mz_code code = MZ_OK;
    if (p->work == MZ_WORK_WGRAD) {
        p->m = 0;
        code = sample_product(c, p, err);
    }
    for (int i = 0; code == MZ_OK && i < DEPTHS; i++) {
        p->m = depths[i];
        if (wanted(p))
            code = sample_product(c, p, err);
    }
    return code;
}

/* A side as its whole tiles and, where it does not come out even, their rest. */
static int even_sides(const calibration *c, int64_t side, int32_t most, int64_t even[2]) {
    const mz_cut cut = mz_cut_side(c->measured, side, most);
    even[0] = cut.count[0] * cut.part[0];
    even[1] = cut.part[1];
    return cut.count[1] > 0 ? 2 : 1;
}

enum { ASKED_SHAPES = 4 };

/* The shape that was asked for, in parts whose tiles are equal. */
static mz_code sample_asked(calibration *c, product_sizes *p, mz_err *err) {
    const mz_calibration_options *o = &c->options;
    const mz_tiling *t = &c->measured->tiling[p->work];
    const bool up = p->work == MZ_WORK_UP;
    int64_t n[2], k[2];
    const int ns = even_sides(c, up ? 2 * o->intermediate : o->hidden, t->n, n);
    const int ks = even_sides(c, up ? o->hidden : o->intermediate, t->k, k);
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < ns * ks; i++) {
        p->n = n[i / ks];
        p->k = k[i % ks];
        code = sample_shape(c, p, err);
    }
    return code;
}

static mz_code sample_kind(calibration *c, product_sizes *p, mz_err *err) {
    mz_code code = calibrate_begin(c, p->work, (SHAPES + ASKED_SHAPES) * (DEPTHS + 1), err);
    for (int i = 0; code == MZ_OK && i < SHAPES; i++) {
        p->n = shapes[i][0];
        p->k = shapes[i][1];
        code = sample_shape(c, p, err);
    }
    return code == MZ_OK && c->options.hidden > 0 ? sample_asked(c, p, err) : code;
}

enum { ALONE_ROWS = 160, ALONE_MOST = 16 };
static const int64_t alone_shapes[][2] = {{256, 512}, {256, 1024}, {512, 512}, {1024, 1024}};
enum { ALONE_SHAPES = sizeof alone_shapes / sizeof alone_shapes[0] };

/* A depth of the samples that one tile holds. */
static int64_t alone_rows(const mz_tiling *t) {
    int64_t rows = ALONE_ROWS;
    for (int i = DEPTHS - 1; t->rows > 0 && rows > t->rows && i >= 0; i--)
        rows = depths[i] < rows ? depths[i] : rows;
    return rows;
}

static int64_t alone_side(int i, int side, int32_t most) {
    return most > 0 && most < alone_shapes[i][side] ? most : alone_shapes[i][side];
}

static bool alone_before(const mz_tiling *t, int i) {
    for (int j = 0; j < i; j++)
        if (alone_side(j, 0, t->n) == alone_side(i, 0, t->n) &&
            alone_side(j, 1, t->k) == alone_side(i, 1, t->k))
            return true;
    return false;
}

/* A single group's rows vary as those of a pair do, where the pools hold more. */
static mz_code time_alone(calibration *c, const product_sizes *p, double *seconds, mz_err *err) {
    const int64_t by = uneven_rows(c, p, 0);
    product_sizes less = *p, more = *p;
    more.m += by;
    if (fits_pools(c, &more))
        less.m -= by;
    else
        more.m = p->m;
    double one = 0, other = 0;
    mz_code code = time_product(c, &less, &one, err);
    if (code == MZ_OK)
        code = time_product(c, &more, &other, err);
    *seconds = (one + other) / 2;
    return code;
}

/* One tile: the other workers have nothing to do. Its time stands beside that of the same tile
 * while all workers are busy. */
static mz_code sample_alone(calibration *c, product_sizes *p, mz_err *err) {
    const mz_tiling *t = &c->measured->tiling[p->work];
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < ALONE_SHAPES; i++) {
        double seconds = 0;
        p->m = alone_rows(t);
        p->n = alone_side(i, 0, t->n);
        p->k = alone_side(i, 1, t->k);
        p->groups = 1;
        if (alone_before(t, i) || !fits_pools(c, p))
            continue;
        code = time_alone(c, p, &seconds, err);
        if (code == MZ_OK && seconds > 2 * c->single_call_s)
            calibrate_add(c, CALIBRATE_ALONE, p->work, (double)p->n, (double)p->k,
                          seconds - c->single_call_s);
    }
    return code;
}

/* Median over the shapes; a worker alone is not slower. */
void calibrate_alone(calibration *c) {
    const mz_fit *alone = &c->beside[CALIBRATE_ALONE - MZ_WORKS];
    double ratio[ALONE_MOST];
    int32_t n = 0;
    for (int32_t i = 0; c->measured->workers > 1 && i < alone->samples; i++) {
        const double *of = alone->sample[i].size;
        const mz_fit *fit = &c->measured->fit[(int)of[0]];
        const double rows = (double)alone_rows(&c->measured->tiling[(int)of[0]]);
        for (int32_t k = 0; k < fit->samples; k++)
            if (fit->sample[k].size[0] == rows && fit->sample[k].size[1] == of[1] &&
                fit->sample[k].size[2] == of[2])
                ratio[n++] = alone->sample[i].seconds / fit->sample[k].seconds;
    }
    mz_sort(ratio, n);
    c->measured->alone = n > 0 && ratio[n / 2] < 1 ? ratio[n / 2] : 1;
}

/* One group of one row and the least sizes: nothing but the call, which one worker may run alone.
 */
static mz_code sample_single_call(calibration *c, product_sizes *p, mz_err *err) {
    if (c->round > 0)
        return MZ_OK;
    *p = (product_sizes){MZ_WORK_FORWARD, 1, 16, 16, 1, p->begin, p->weight};
    return time_product(c, p, &c->single_call_s, err);
}

/* What a call takes beside its tiles where it wakes all workers: what few tiles take more than
 * their part of many. Means of what was timed so far: products of this round need it. */
static mz_code sample_call(calibration *c, product_sizes *p, mz_err *err) {
    enum { SIDE = 128, ROWS = 64 };
    const int64_t workers = c->measured->workers;
    int64_t most = GROUPS_MOST / workers;
    *p = (product_sizes){MZ_WORK_FORWARD, ROWS, SIDE, SIDE, 0, p->begin, p->weight};
    for (most = most < MANY_PER_WORKER ? most : MANY_PER_WORKER; most > 0; most--) {
        p->groups = (int32_t)(most * workers);
        if (fits_pools(c, p))
            break;
    }
    if (most < 2) { /* too many workers to tell */
        c->measured->call_s = c->single_call_s;
        return MZ_OK;
    }
    const int64_t each[2] = {most > 4 ? most / 4 : 1, most};
    double mean[2] = {0};
    mz_code code = calibrate_begin(c, CALIBRATE_CALL, 2, err);
    for (int i = 0; code == MZ_OK && i < 2; i++) {
        double seconds = 0;
        p->groups = (int32_t)(each[i] * workers);
        code = time_product(c, p, &seconds, err);
        if (code == MZ_OK) {
            calibrate_add(c, CALIBRATE_CALL, (double)each[i], 1, 1, seconds);
            mean[i] = calibrate_mean(c, CALIBRATE_CALL, i);
        }
    }
    if (code != MZ_OK)
        return code;
    const double tiles = (mean[1] - mean[0]) * (double)each[0] / (double)(each[1] - each[0]);
    c->measured->call_s = mean[0] > tiles ? mean[0] - tiles : 0;
    return MZ_OK;
}

mz_code calibrate_products(calibration *c, mz_err *err) {
    static const mz_product ops[] = {MZ_PRODUCT_FORWARD, MZ_PRODUCT_DGRAD, MZ_PRODUCT_WGRAD};
    static const mz_work kinds[] = {MZ_WORK_FORWARD, MZ_WORK_DGRAD, MZ_WORK_WGRAD, MZ_WORK_UP};
    product_sizes p = {0};
    mz_code code = MZ_OK;
    if (mz_kernels_alloc(c->kernels, (GROUPS_MOST + 1) * sizeof *p.begin, (void **)&p.begin) !=
            MZ_K_OK ||
        mz_kernels_alloc(c->kernels, GROUPS_MOST * sizeof *p.weight, (void **)&p.weight) != MZ_K_OK)
        code = calibrate_failed(c, "products", err);
    for (int i = 0; i < 4; i++) {
        /* The up product's tiles get lower where experts are wide: those of the widest sampled. */
        const mz_product_tiles t = kinds[i] == MZ_WORK_UP
                                       ? mz_kernels_up_tiles(c->kernels, UP_INTERMEDIATE_MOST)
                                       : mz_kernels_tiles(c->kernels, ops[i]);
        c->measured->tiling[kinds[i]] = (mz_tiling){t.rows, t.n, t.k};
        c->measured->workers = t.workers;
    }
    if (code == MZ_OK)
        code = sample_single_call(c, &p, err);
    if (code == MZ_OK)
        code = calibrate_begin(c, CALIBRATE_ALONE, ALONE_MOST, err);
    for (int i = 0; code == MZ_OK && i < 4; i++) {
        code = sample_call(c, &p, err);
        p.work = kinds[i];
        if (code == MZ_OK)
            code = sample_kind(c, &p, err);
        if (code == MZ_OK)
            code = sample_alone(c, &p, err);
    }
    mz_kernels_free(c->kernels, p.begin);
    mz_kernels_free(c->kernels, p.weight);
    return code;
}
