/* Grouped GEMM in its three forms, the up-projection with SwiGLU, and the gradients of a whole
 * expert by finite differences. */
#include "tests/kernels/reference.h"
#include "tests/kernels/rig.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Rows of each group. */
typedef struct layout {
    int32_t groups;
    int64_t n, k;
    int64_t row[8]; /* of group g: row[g % 8] */
} layout;
/* Empty groups, one row, one group with everything, rows and columns that fill no tile, many
 * experts, wide rows. All rows start at multiples of 16 bytes. */
static const layout layouts[] = {
    {1, 8, 8, {1}},
    {3, 24, 40, {0, 5, 0}},
    {4, 72, 136, {17, 0, 33, 64}},
    {5, 32, 16, {0, 0, 150, 0, 0}},
    {8, 264, 40, {3, 1, 2, 5, 1, 1, 2, 4}}, /* several tiles for every block */
    {2, 136, 520, {70, 3}},
    {2, 40, 72, {90, 75}}, /* more than 64 rows a group: higher tiles */
    {1, 304, 200, {140}},  /* several of them, and several stages */
    {384, 8, 16, {1, 0, 2, 0, 0, 0, 3, 1}},
    {70, 8, 8, {0, 1, 0, 0, 0, 0, 2, 0}}, /* more groups than a warp looks at at once */
    {2, 8, 7168, {2, 1}},
    {2, 7168, 8, {1, 2}},
    {2, 48, 32, {600, 530}},
    {0, 16, 16, {0}},
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

typedef struct problem {
    const layout *at;
    mz_dtype type;
    int64_t *begin, rows;
    double *x, *y;     /* [rows][k], [rows][n] */
    double *weight;    /* [groups][n][k] */
    void **given;      /* [groups] context memory, one piece each */
    bool skipped[512]; /* groups whose pointer is NULL */
    void *pointers;    /* the array of them, context memory */
} problem;

static problem make_problem(rig *r, const layout *at, mz_dtype type, bool skip) {
    problem p = {.at = at, .type = type};
    p.begin = rig_host(r, 8 * (size_t)(at->groups + 1));
    for (int32_t g = 0; g < at->groups; g++)
        p.begin[g + 1] = p.begin[g] + at->row[g % 8];
    p.rows = p.begin[at->groups];
    p.x = rig_normals(r, type, p.rows * at->k, 1);
    p.y = rig_normals(r, type, p.rows * at->n, 1);
    p.weight = rig_normals(r, type, at->groups * at->n * at->k, 0.3);
    for (int32_t g = 0; g < at->groups; g++)
        p.skipped[g] = skip && rig_below(r, 3) == 0;
    return p;
}

/* Weights to context memory: as they are, or poisoned room for gradients. */
static void give_weights(rig *r, problem *p, mz_dtype type, bool room) {
    const int64_t each = p->at->n * p->at->k;
    p->given = rig_host(r, sizeof *p->given * (size_t)p->at->groups);
    for (int32_t g = 0; g < p->at->groups; g++)
        if (!p->skipped[g])
            p->given[g] =
                room ? rig_room(r, type, each) : rig_put(r, type, p->weight + g * each, each);
    p->pointers = rig_in(r, p->given, sizeof *p->given * (size_t)p->at->groups);
}

static mz_product_args args_of(rig *r, const problem *p, mz_product op, mz_product_engine engine) {
    const int64_t *begin = rig_in(r, p->begin, 8 * (size_t)(p->at->groups + 1));
    return (mz_product_args){.op = op,
                             .engine = engine,
                             .groups = {begin, p->at->groups, p->rows + 5, p->begin},
                             .n = p->at->n,
                             .k = p->at->k,
                             .type = p->type,
                             .gradient_type = MZ_F32,
                             .weight = p->pointers};
}

static void multiply(rig *r, const mz_product_args *args) {
    void *workspace = rig_workspace(r, mz_grouped_gemm_workspace(r->kernels, args));
    RIG_OK(r, mz_grouped_gemm(r->kernels, 0, args, workspace));
}

/* fp32 sums of n products of this size, then one rounding. */
static double error_of(mz_dtype type, int64_t n) {
    return 4e-6 * sqrt((double)n) * (1 + 0.02 * sqrt((double)n)) + (type == MZ_BF16 ? 0 : 1e-7);
}

static void product_rows(rig *r, const layout *at, mz_dtype type, mz_product op, int engine) {
    problem p = make_problem(r, at, type, true);
    give_weights(r, &p, type, false);
    const bool forward = op == MZ_PRODUCT_FORWARD;
    const int64_t in = forward ? at->k : at->n, out = forward ? at->n : at->k;
    const double *a = forward ? p.x : p.y;
    double *want = rig_host(r, 8 * (size_t)(p.rows * out));
    mz_product_args args = args_of(r, &p, op, engine);
    args.a = rig_put(r, type, a, p.rows * in);
    args.c = rig_room(r, type, p.rows * out);
    multiply(r, &args);
    for (int32_t g = 0; g < at->groups; g++)
        (forward ? ref_forward : ref_dgrad)(p.begin[g + 1] - p.begin[g], at->n, at->k,
                                            a + p.begin[g] * in, p.weight + g * at->n * at->k,
                                            want + p.begin[g] * out);
    const double *got = rig_values(r, type, args.c);
    for (int32_t g = 0; g < at->groups; g++) {
        const int64_t first = p.begin[g] * out, n = p.begin[g + 1] * out - first;
        if (!p.skipped[g])
            rig_near(r, forward ? "forward" : "dgrad", got + first, want + first, n,
                     type == MZ_BF16 ? 0x1p-8 : 0, error_of(type, in));
        for (int64_t i = 0; p.skipped[g] && i < n; i++)
            RIG_TRUE(r, isnan(got[first + i]));
    }
}

/* Engines differ in bf16 alone. */
static mz_dtype first_type(const rig *r) {
    return r->engine == MZ_ENGINE_OWN ? MZ_F32 : MZ_BF16;
}

/* On an emulated device, where every group with rows costs a tile, most of many groups are empty.
 */
static layout layout_of(const rig *r, int i) {
    layout l = layouts[i];
    if (r->small && l.groups > 100)
        l.row[0] = l.row[6] = l.row[7] = 0;
    return l;
}

/* There the widest layouts take the types in turn: of two operations that follow each other, fp32
 * is for one and bf16 for the other, and the other way round with rows and columns exchanged. */
static bool left_out(const rig *r, const layout *l, mz_dtype type, int operation) {
    const bool wide = l->n > 2048 || l->k > 2048;
    return r->small && wide && (operation + (l->n > l->k)) % 2 != (int)type;
}

static void each_layout(rig *r, void (*one)(rig *, const layout *, mz_dtype, mz_product, int),
                        mz_product op) {
    for (int i = 0; i < LAYOUTS; i++)
        for (int type = first_type(r); type <= MZ_BF16; type++) {
            const layout l = layout_of(r, i);
            if (left_out(r, &l, type, op))
                continue;
            one(r, &l, type, op, (int)r->engine);
            rig_clear(r);
            if (mz_kernels_backend(r->kernels) == MZ_BACKEND_HOST)
                one(r, &l, type, op, MZ_ENGINE_VENDOR);
            rig_clear(r);
        }
}

static void check_forward(rig *r) {
    each_layout(r, product_rows, MZ_PRODUCT_FORWARD);
}
static void check_dgrad(rig *r) {
    each_layout(r, product_rows, MZ_PRODUCT_DGRAD);
}

static void weight_gradients(rig *r, const layout *at, mz_dtype type, mz_product op, int engine) {
    const mz_dtype gradient_type = rig_below(r, 2) ? MZ_BF16 : MZ_F32;
    const bool accumulate = rig_below(r, 2);
    problem p = make_problem(r, at, type, true);
    for (int64_t i = 0; i < at->groups * at->n * at->k; i++)
        p.weight[i] = ref_stored(gradient_type, p.weight[i]);
    give_weights(r, &p, gradient_type, !accumulate);
    mz_product_args args = args_of(r, &p, op, engine);
    args.a = rig_put(r, type, p.y, p.rows * at->n);
    args.c = rig_put(r, type, p.x, p.rows * at->k);
    args.gradient_type = gradient_type;
    args.accumulate = accumulate;
    multiply(r, &args);
    const int64_t each = at->n * at->k;
    for (int32_t g = 0; g < at->groups; g++) {
        double *want = p.weight + g * each;
        if (p.skipped[g])
            continue;
        if (!accumulate)
            memset(want, 0, 8 * (size_t)each); /* also where the group is empty */
        const int64_t m = p.begin[g + 1] - p.begin[g];
        ref_wgrad(m, at->n, at->k, p.y + p.begin[g] * at->n, p.x + p.begin[g] * at->k, want);
        rig_near(r, "wgrad", rig_values(r, gradient_type, p.given[g]), want, each,
                 gradient_type == MZ_BF16 ? 0x1p-8 : 1e-7, error_of(gradient_type, m));
    }
}
static void check_wgrad(rig *r) {
    each_layout(r, weight_gradients, MZ_PRODUCT_WGRAD);
}

/* ---- up-projection ------------------------------------------------------------------------------
 */

static mz_expert_up up_of(rig *r, const problem *p, bool keep) {
    const mz_product_args a = args_of(r, p, MZ_PRODUCT_FORWARD, MZ_ENGINE_OWN);
    const int64_t cols = p->at->n;
    return (mz_expert_up){.groups = a.groups,
                          .hidden = p->at->k,
                          .intermediate = cols / 2,
                          .type = p->type,
                          .x = rig_put(r, p->type, p->x, p->rows * p->at->k),
                          .weight = p->pointers,
                          .gate_up = keep ? rig_room(r, p->type, p->rows * cols) : NULL,
                          .h = rig_room(r, p->type, p->rows * cols / 2),
                          .norm2 = rig_room(r, MZ_F32, p->rows),
                          .engine = r->engine};
}

static void up(rig *r, const layout *at, mz_dtype type, mz_product op, int keep) {
    (void)op;
    problem p = make_problem(r, at, type, false);
    give_weights(r, &p, type, false);
    const int64_t cols = at->n, half = cols / 2;
    const mz_expert_up args = up_of(r, &p, keep);
    void *workspace = rig_workspace(r, mz_expert_up_workspace(r->kernels, &args));
    RIG_OK(r, mz_expert_up_forward(r->kernels, 0, &args, workspace));
    double *gate_up = rig_host(r, 8 * (size_t)(p.rows * cols));
    double *norm2 = rig_host(r, 8 * (size_t)p.rows);
    for (int32_t g = 0; g < at->groups; g++)
        ref_forward(p.begin[g + 1] - p.begin[g], cols, at->k, p.x + p.begin[g] * at->k,
                    p.weight + g * cols * at->k, gate_up + p.begin[g] * cols);
    const double *h = rig_values(r, type, args.h), step = type == MZ_BF16 ? 0x1p-8 : 1e-6;
    const double slack = error_of(type, at->k);
    if (keep)
        rig_near(r, "gate, up", rig_values(r, type, args.gate_up), gate_up, p.rows * cols,
                 type == MZ_BF16 ? 0x1p-8 : 0, slack);
    for (int64_t i = 0; i < p.rows; i++) {
        for (int64_t j = 0; j < half; j++) {
            const double u = gate_up[i * cols + j], v = gate_up[i * cols + half + j];
            const double want = ref_silu(u) * v;
            /* u and v may have been rounded before the activation. */
            const double bound =
                step * (fabs(want) * 2 + fabs(u * v) * 1.2) + slack * (fabs(u) + fabs(v) + 1) * 1.2;
            rig_near(r, "h", h + i * half + j, &want, 1, 0, bound);
        }
        norm2[i] = ref_dot(h + i * half, h + i * half, half);
    }
    rig_near(r, "||h||^2", rig_values(r, MZ_F32, args.norm2), norm2, p.rows,
             1e-6 + 1e-8 * (double)half, 1e-30);
}

static void check_up(rig *r) {
    for (int i = 0; i < LAYOUTS; i++)
        for (int type = first_type(r); type <= MZ_BF16; type++) {
            layout l = layout_of(r, i);
            l.n *= 2; /* so that rows of h start at multiples of 16 bytes too */
            for (int keep = 0; keep < 2; keep++)
                if (!left_out(r, &l, type, keep))
                    up(r, &l, type, MZ_PRODUCT_FORWARD, keep);
            rig_clear(r);
        }
}

/* ---- experts ------------------------------------------------------------------------------------
 * Loss: sum over rows of w <dy, y> with y = down(silu(gate x) * (up x)) and w the pair's weight;
 * every gradient of it by central differences of the loss in double, at random coordinates. */

enum { MOST_EXPERTS = 3, SLOPES = 6 };

typedef struct experts {
    int32_t groups;
    int64_t begin[MOST_EXPERTS + 1], hidden, width;
    mz_dtype type;
    double *x, *dy, *weight; /* by row */
    double *up, *down;       /* by group */
    double *gate_up, *h, *y; /* of the group with the most rows */
} experts;

static int64_t rows_of(const experts *e) {
    return e->begin[e->groups];
}

static double loss_of(const experts *e) {
    const int64_t H = e->hidden, I = e->width;
    double loss = 0;
    for (int32_t g = 0; g < e->groups; g++) {
        const int64_t first = e->begin[g], rows = e->begin[g + 1] - first;
        ref_forward(rows, 2 * I, H, e->x + first * H, e->up + g * 2 * I * H, e->gate_up);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < I; j++)
                e->h[i * I + j] =
                    ref_silu(e->gate_up[2 * i * I + j]) * e->gate_up[(2 * i + 1) * I + j];
        ref_forward(rows, H, I, e->h, e->down + g * H * I, e->y);
        for (int64_t i = 0; i < rows; i++)
            loss += e->weight[first + i] * ref_dot(e->y + i * H, e->dy + (first + i) * H, H);
    }
    return loss;
}

/* bf16 rounds every value between: what it may be off is measured by the gradient's size. */
static void compare_slopes(rig *r, const experts *e, const char *what, double *values, int64_t n,
                           const double *got) {
    char name[96];
    double square = 0;
    for (int64_t i = 0; i < n; i++)
        square += got[i] * got[i] / (double)n;
    const double share = e->type == MZ_BF16 ? 4e-2 : 1e-4;
    snprintf(name, sizeof name, "%s of %d experts, %lld rows of %lld, width %lld", what,
             (int)e->groups, (long long)rows_of(e), (long long)e->hidden, (long long)e->width);
    for (int i = 0; i < SLOPES && n > 0; i++) {
        const int64_t at = rig_below(r, n);
        const double was = values[at], step = 1e-4;
        values[at] = was + step;
        const double after = loss_of(e);
        values[at] = was - step;
        const double want = (after - loss_of(e)) / (2 * step);
        values[at] = was;
        rig_near(r, name, got + at, &want, 1, share, share * sqrt(square) + 1e-8);
    }
}

/* Groups of no, one and some rows, which are seldom a multiple of a tile's. */
static experts make_experts(rig *r, mz_dtype type, int64_t hidden, int64_t width, int64_t most) {
    experts e = {.groups = 1 + (int32_t)rig_below(r, MOST_EXPERTS),
                 .hidden = hidden,
                 .width = width,
                 .type = type};
    int64_t largest = 1;
    for (int32_t g = 0; g < e.groups; g++) {
        const int64_t kind = rig_below(r, 4), rows = kind < 2 ? kind : 1 + rig_below(r, most);
        e.begin[g + 1] = e.begin[g] + rows;
        largest = rows > largest ? rows : largest;
    }
    e.x = rig_normals(r, type, rows_of(&e) * hidden, 1);
    e.dy = rig_normals(r, type, rows_of(&e) * hidden, 1);
    e.weight = rig_normals(r, MZ_F32, rows_of(&e), 1);
    e.up = rig_normals(r, type, e.groups * 2 * width * hidden, 1.5 / sqrt((double)hidden));
    e.down = rig_normals(r, type, e.groups * hidden * width, 1.5 / sqrt((double)width));
    e.gate_up = rig_host(r, 8 * (size_t)(largest * 2 * width));
    e.h = rig_host(r, 8 * (size_t)(largest * width));
    e.y = rig_host(r, 8 * (size_t)(largest * hidden));
    return e;
}

/* One piece of context memory, groups behind each other, and a pointer to each. */
static void *pointers_to(rig *r, const experts *e, void *memory, int64_t values) {
    void *to[MOST_EXPERTS];
    for (int32_t g = 0; g < e->groups; g++)
        to[g] = (char *)memory + (size_t)(g * values) * rig_width(e->type);
    return rig_in(r, to, sizeof *to * (size_t)e->groups);
}

/* What the passes leave behind. */
typedef struct passes {
    void *x, *dy, *gate_up, *h, *dh, *dx, *up, *down, *dup, *ddown, *scaled_dy;
    float *weight, *dot;
    mz_groups groups;
} passes;

static passes expert_forward(rig *r, const experts *e) {
    const int64_t H = e->hidden, I = e->width, rows = rows_of(e), each = 2 * I * H;
    passes p = {
        .x = rig_put(r, e->type, e->x, rows * H),
        .dy = rig_put(r, e->type, e->dy, rows * H),
        .gate_up = rig_room(r, e->type, rows * 2 * I),
        .h = rig_room(r, e->type, rows * I),
        .weight = rig_put_floats(r, e->weight, rows),
        .groups = {rig_in(r, e->begin, 8 * (size_t)(e->groups + 1)), e->groups, rows, e->begin}};
    p.up = pointers_to(r, e, rig_put(r, e->type, e->up, e->groups * each), each);
    p.down = pointers_to(r, e, rig_put(r, e->type, e->down, e->groups * H * I), H * I);
    const mz_expert_up up = {p.groups, H, I, e->type, p.x, p.up, p.gate_up, p.h, NULL, r->engine};
    RIG_OK(r, mz_expert_up_forward(r->kernels, 0, &up,
                                   rig_workspace(r, mz_expert_up_workspace(r->kernels, &up))));
    return p;
}

/* dy times the pairs' weights, by the rows' own pack. */
static void scale_rows(rig *r, const experts *e, passes *p) {
    const int64_t rows = rows_of(e);
    int64_t *pair = rig_host(r, 8 * (size_t)rows);
    for (int64_t i = 0; i < rows; i++)
        pair[i] = i;
    p->scaled_dy = rig_room(r, e->type, rows * e->hidden);
    const mz_pack pack = {.type = e->type,
                          .x = p->dy,
                          .hidden = e->hidden,
                          .rows = rows,
                          .row_pair = rig_in(r, pair, 8 * (size_t)rows),
                          .k = 1,
                          .scale = p->weight,
                          .out = p->scaled_dy};
    RIG_OK(r, mz_pack_rows(r->kernels, 0, &pack));
}

static void expert_backward(rig *r, const experts *e, passes *p) {
    const int64_t H = e->hidden, I = e->width, rows = rows_of(e);
    p->dh = rig_room(r, e->type, rows * I);
    p->dx = rig_room(r, e->type, rows * H);
    p->dot = rig_room(r, MZ_F32, rows);
    p->dup = rig_room(r, e->type, e->groups * 2 * I * H);
    p->ddown = rig_room(r, e->type, e->groups * H * I);
    void *to_up = pointers_to(r, e, p->dup, 2 * I * H);
    void *to_down = pointers_to(r, e, p->ddown, H * I);
    scale_rows(r, e, p);
    const mz_product_args back[] = {
        {.op = MZ_PRODUCT_DGRAD, .n = H, .k = I, .a = p->dy, .weight = p->down, .c = p->dh},
        {.op = MZ_PRODUCT_WGRAD, .n = H, .k = I, .a = p->scaled_dy, .weight = to_down, .c = p->h},
        {.op = MZ_PRODUCT_DGRAD, .n = 2 * I, .k = H, .a = p->gate_up, .weight = p->up, .c = p->dx},
        {.op = MZ_PRODUCT_WGRAD, .n = 2 * I, .k = H, .a = p->gate_up, .weight = to_up, .c = p->x}};
    const mz_swiglu activation = {.type = e->type,
                                  .rows = rows,
                                  .intermediate = I,
                                  .gate_up = p->gate_up,
                                  .dh = p->dh,
                                  .scale = p->weight,
                                  .dot = p->dot,
                                  .dgate_up = p->gate_up};
    for (int i = 0; i < 4; i++) {
        mz_product_args args = back[i];
        args.groups = p->groups;
        args.type = args.gradient_type = e->type;
        args.engine = r->engine;
        if (i == 2)
            RIG_OK(r, mz_swiglu_backward(r->kernels, 0, &activation));
        multiply(r, &args);
    }
}

static void expert_slopes(rig *r, experts *e) {
    const int64_t H = e->hidden, I = e->width, rows = rows_of(e);
    passes p = expert_forward(r, e);
    expert_backward(r, e, &p);
    compare_slopes(r, e, "dx", e->x, rows * H, rig_values(r, e->type, p.dx));
    compare_slopes(r, e, "d up", e->up, e->groups * 2 * I * H, rig_values(r, e->type, p.dup));
    compare_slopes(r, e, "d down", e->down, e->groups * H * I, rig_values(r, e->type, p.ddown));
    compare_slopes(r, e, "d weight", e->weight, rows, rig_values(r, MZ_F32, p.dot));
}

/* Random shapes; on the host, where rows may start anywhere, sides of any length. */
static void check_expert(rig *r) {
    const bool host = mz_kernels_backend(r->kernels) == MZ_BACKEND_HOST;
    const int shapes = r->small ? 4 : 12;
    for (int i = 0; i < shapes; i++)
        for (int type = first_type(r); type <= MZ_BF16; type++) {
            const int64_t longest = r->small ? 72 : i == 0 ? 257 : 120;
            int64_t H = i == 0 ? longest : 8 + rig_below(r, longest - 7);
            int64_t I = 8 + rig_below(r, r->small ? 40 : 80);
            if (!host) {
                H = H / 8 * 8;
                I = I / 8 * 8;
            }
            experts e = make_experts(r, (mz_dtype)type, H, I, r->small ? 70 : 150);
            expert_slopes(r, &e);
            rig_clear(r);
        }
}

const check checks_of_products[] = {{"forward", check_forward}, {"dgrad", check_dgrad},
                                    {"wgrad", check_wgrad},     {"up-projection", check_up},
                                    {"expert", check_expert},   {NULL, NULL}};
