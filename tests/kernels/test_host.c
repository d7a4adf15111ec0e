/* The host backend from inside: the same bits on any number of threads and with every instruction
 * set that this processor has, and that each part of a pool's run is done once. */
#include "tests/harness.h"

#include "kernels/arithmetic.h"
#include "kernels/host/host.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/rig.h"

/* ---- one program of all operations --------------------------------------------------------------
 * Shapes that split into several pieces and blocks; lengths that fill no register. */

enum { T = 1500, K = 4, E = 24, H = 360, I = 136, PAIRS = T * K };

typedef struct record {
    unsigned char *bytes;
    size_t size, room;
} record;

static void keep(rig *r, record *all, const void *memory) {
    const size_t n = rig_size(r, memory);
    assert_true(all->size + n <= all->room);
    memcpy(all->bytes + all->size, rig_get(r, memory), n);
    all->size += n;
}

static void keep_each(rig *r, record *all, const void *const *out, int count) {
    for (int i = 0; i < count; i++)
        keep(r, all, out[i]);
}

static void *values(rig *r, mz_dtype type, int64_t n) {
    return rig_put(r, type, rig_normals(r, type, n, 1), n);
}

static void route(rig *r, record *all, int32_t *expert) {
    const mz_router_kind kinds[] = {MZ_ROUTER_SOFTMAX, MZ_ROUTER_SIGMOID, MZ_ROUTER_ROUTING_FREE};
    for (int i = 2; i >= 0; i--) {
        const double half[E] = {0.5};
        int64_t count[E];
        for (int e = 0; e < E; e++)
            count[e] = 7 * e;
        mz_router a = {.kind = kinds[i],
                       .tokens = T,
                       .experts = E,
                       .k = K,
                       .normalize = true,
                       .scale = 1,
                       .n_group = 4,
                       .topk_group = 2,
                       .theta = 0.5f,
                       .balance_mix = 0.5f,
                       .aux_factor = 0.1f,
                       .logits = values(r, MZ_F32, (int64_t)T * E),
                       .bias = rig_put_floats(r, half, E),
                       .expert = kinds[i] == MZ_ROUTER_SOFTMAX ? expert : rig_out(r, 4 * T * E),
                       .weight = rig_room(r, MZ_F32, T * E),
                       .token_begin = rig_out(r, 8 * (T + 1)),
                       .dweight = values(r, MZ_F32, T * E),
                       .count = rig_in(r, count, sizeof count),
                       .dlogits = rig_room(r, MZ_F32, T * E),
                       .dbias = rig_put_floats(r, half, E),
                       .dgain = rig_put_floats(r, half, E)};
        void *workspace = rig_workspace(r, mz_router_workspace(r->kernels, &a));
        float *loss = rig_room(r, MZ_F32, 3);
        RIG_OK(r, mz_router_forward(r->kernels, 0, &a, workspace));
        RIG_OK(r, mz_router_backward(r->kernels, 0, &a, workspace));
        RIG_OK(r, mz_router_losses(r->kernels, 0, &a, loss, workspace));
        keep_each(r, all, (const void *[]){a.weight, a.dlogits, a.dbias, a.dgain, loss}, 5);
    }
}

/* The pairs that are kept, and what their rows become. */
typedef struct kept_rows {
    mz_dtype type;
    const void *x;
    const float *scale;
    int64_t *kept, *begin, rows;
    void *packed, *gate_up;
} kept_rows;

/* Groups the pairs, scores and selects half of them. */
static kept_rows choose_half(rig *r, record *all, mz_dtype type, const int32_t *expert) {
    mz_kernels *k = r->kernels;
    int64_t quota[E], *order = rig_out(r, 8 * PAIRS), *begin = rig_out(r, 8 * (E + 1));
    for (int e = 0; e < E; e++)
        quota[e] = T * K / E / 2;
    const mz_grouping grouping = {expert, PAIRS, E, NULL, begin, order};
    RIG_OK(r, mz_group_pairs(k, 0, &grouping,
                             rig_workspace(r, mz_group_pairs_workspace(k, &grouping))));
    void *x = values(r, type, (int64_t)T * H);
    float *norm = rig_room(r, MZ_F32, T), *score = rig_room(r, MZ_F32, PAIRS);
    double *hidden = rig_host(r, 8 * PAIRS);
    for (int i = 0; i < PAIRS; i++)
        hidden[i] = rig_uniform(r);
    const mz_norms norms = {type, x, T, H, H, norm};
    RIG_OK(r, mz_row_norms(k, 0, &norms));
    const mz_score_args scoring = {.kind = MZ_SCORED_SAMPLE,
                                   .tokens = T,
                                   .pairs = PAIRS,
                                   .k = K,
                                   .weight = values(r, MZ_F32, PAIRS),
                                   .grad_norm2 = norm,
                                   .hidden_norm2 = rig_put_floats(r, hidden, PAIRS),
                                   .score = score};
    RIG_OK(r, mz_score_pairs(k, 0, &scoring));
    const mz_selection selection = {.score = score,
                                    .order = order,
                                    .begin = begin,
                                    .quota = rig_in(r, quota, sizeof quota),
                                    .pairs = PAIRS,
                                    .experts = E,
                                    .kept = rig_in(r, rig_host(r, 8 * PAIRS), 8 * PAIRS),
                                    .kept_begin = rig_out(r, 8 * (E + 1)),
                                    .scaled = rig_put_floats(r, rig_host(r, 8 * PAIRS), PAIRS),
                                    .weight = scoring.weight};
    RIG_OK(r, mz_select_pairs(k, 0, &selection, NULL));
    const int64_t *ends = rig_get(r, selection.kept_begin);
    keep_each(r, all, (const void *[]){order, score, selection.kept, selection.scaled}, 4);
    return (kept_rows){.type = type,
                       .x = x,
                       .scale = scoring.weight,
                       .kept = selection.kept,
                       .begin = selection.kept_begin,
                       .rows = ends[E]};
}

/* Packs, multiplies and activates. `weight`: [E], two matrices in turn. */
static void forward_half(rig *r, record *all, kept_rows *c, void *const *weight) {
    mz_kernels *k = r->kernels;
    void *h = rig_room(r, c->type, c->rows * I);
    c->packed = rig_room(r, c->type, c->rows * H);
    c->gate_up = rig_room(r, c->type, c->rows * 2 * I);
    const mz_pack pack = {.type = c->type,
                          .x = c->x,
                          .hidden = H,
                          .rows = c->rows,
                          .row_pair = c->kept,
                          .k = K,
                          .scale = c->scale,
                          .out = c->packed};
    RIG_OK(r, mz_pack_rows(k, 0, &pack));
    const mz_expert_up up = {{c->begin, E, c->rows, NULL},
                             H,
                             I,
                             c->type,
                             c->packed,
                             rig_in(r, weight, E * sizeof *weight),
                             c->gate_up,
                             h,
                             rig_room(r, MZ_F32, c->rows)};
    RIG_OK(r, mz_expert_up_forward(k, 0, &up, rig_workspace(r, mz_expert_up_workspace(k, &up))));
    keep_each(r, all, (const void *[]){c->packed, h, up.norm2}, 3);
}

static void multiply(rig *r, const mz_product_args *a) {
    void *workspace = rig_workspace(r, mz_grouped_gemm_workspace(r->kernels, a));
    RIG_OK(r, mz_grouped_gemm(r->kernels, 0, a, workspace));
}

/* Gradients of the activation, of the rows (returned) and of the weights. */
static void *backward_half(rig *r, record *all, const kept_rows *c, void *const *weight) {
    void *gradient[E], *dx = rig_room(r, c->type, c->rows * H);
    for (int e = 0; e < E; e++)
        gradient[e] = rig_room(r, c->type, 2 * I * H);
    const mz_swiglu back = {.type = c->type,
                            .rows = c->rows,
                            .intermediate = I,
                            .gate_up = c->gate_up,
                            .dh = values(r, c->type, c->rows * I),
                            .dot = rig_room(r, MZ_F32, c->rows),
                            .dgate_up = c->gate_up};
    RIG_OK(r, mz_swiglu_backward(r->kernels, 0, &back));
    mz_product_args product = {.op = MZ_PRODUCT_DGRAD,
                               .groups = {c->begin, E, c->rows, NULL},
                               .n = 2 * I,
                               .k = H,
                               .type = c->type,
                               .gradient_type = c->type,
                               .a = c->gate_up,
                               .weight = rig_in(r, weight, E * sizeof *weight),
                               .c = dx};
    multiply(r, &product);
    product.op = MZ_PRODUCT_WGRAD;
    product.weight = rig_in(r, gradient, sizeof gradient);
    product.c = c->packed;
    multiply(r, &product);
    keep_each(r, all, (const void *[]){c->gate_up, back.dot, dx, gradient[3], gradient[E - 1]}, 5);
    return dx;
}

/* One layer's kept half there and back, and combined. */
static void layer(rig *r, record *all, mz_dtype type, const int32_t *expert) {
    kept_rows c = choose_half(r, all, type, expert);
    void *weight[E];
    for (int e = 0; e < E; e++)
        weight[e] = e > 1 ? weight[e % 2] : values(r, type, 2 * I * H);
    forward_half(r, all, &c, weight);
    const void *dx = backward_half(r, all, &c, weight);
    int64_t *position = rig_out(r, 8 * PAIRS);
    RIG_OK(r, mz_invert(r->kernels, 0, c.kept, c.rows, PAIRS, position));
    const mz_combine combine = {.type = type,
                                .row = dx,
                                .hidden = H,
                                .tokens = T,
                                .k = K,
                                .position = position,
                                .scale = c.scale,
                                .out = rig_room(r, type, T * H)};
    RIG_OK(r, mz_combine_rows(r->kernels, 0, &combine));
    keep(r, all, combine.out);
}

/* Groups whose rows and weights are cut, others that are not, and one without a weight. */
static void uneven_groups(rig *r, record *all, mz_dtype type) {
    enum { GROUPS = 7, ROWS = 2948, N = 264, DEPTH = 40 };
    const int64_t begin[GROUPS + 1] = {0, 0, 700, 830, 1930, 1935, 2435, ROWS};
    void *weight[GROUPS], *gradient[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
        weight[g] = g == 5 ? NULL : values(r, type, (int64_t)N * DEPTH);
        gradient[g] = g == 5 ? NULL : rig_room(r, type, (int64_t)N * DEPTH);
    }
    mz_product_args a = {.groups = {rig_in(r, begin, sizeof begin), GROUPS, ROWS, NULL},
                         .n = N,
                         .k = DEPTH,
                         .type = type,
                         .gradient_type = type};
    void *const rows_n = values(r, type, (int64_t)ROWS * N);
    void *const rows_k = values(r, type, (int64_t)ROWS * DEPTH);
    for (int op = MZ_PRODUCT_FORWARD; op <= MZ_PRODUCT_WGRAD; op++) {
        const bool wgrad = op == MZ_PRODUCT_WGRAD, forward = op == MZ_PRODUCT_FORWARD;
        a.op = op;
        a.a = forward ? rows_k : rows_n;
        a.weight = rig_in(r, wgrad ? gradient : weight, sizeof weight);
        a.c = wgrad ? rows_k : rig_room(r, type, (int64_t)ROWS * (forward ? N : DEPTH));
        RIG_OK(r, mz_grouped_gemm(r->kernels, 0, &a,
                                  rig_workspace(r, mz_grouped_gemm_workspace(r->kernels, &a))));
        if (!wgrad)
            keep(r, all, a.c);
    }
    for (int g = 0; g < GROUPS; g++)
        if (gradient[g])
            keep(r, all, gradient[g]);
    const mz_expert_up up = {.groups = a.groups,
                             .hidden = DEPTH,
                             .intermediate = N / 2,
                             .type = type,
                             .x = rows_k,
                             .weight = rig_in(r, weight, sizeof weight),
                             .h = rig_room(r, type, (int64_t)ROWS * N / 2)};
    RIG_OK(r, mz_expert_up_forward(r->kernels, 0, &up,
                                   rig_workspace(r, mz_expert_up_workspace(r->kernels, &up))));
    keep(r, all, up.h);
}

static void update(rig *r, record *all, mz_update_kind kind, int tier) {
    enum { M = 3, R = 200, C = 360, N = M * R * C };
    const double *zero = rig_host(r, 8 * N);
    mz_update a = {.kind = kind,
                   .matrices = M,
                   .rows = R,
                   .cols = C,
                   .type = MZ_BF16,
                   .gradient_type = tier & 5 ? MZ_BF16 : MZ_F32,
                   .parameter = values(r, MZ_BF16, N),
                   .gradient = values(r, tier & 5 ? MZ_BF16 : MZ_F32, N),
                   .rate = 0.01f,
                   .beta1 = 0.9f,
                   .beta2 = 0.99f,
                   .decay = 0.5f, /* 0.005 of a parameter: bf16 sees it */
                   .eps = 1e-8f,
                   .step = 2,
                   .momentum = tier & 1,
                   .factored = tier & 2,
                   .clip_rms = true,
                   .clip_tensor = tier & 1,
                   .newton_schulz = 2,
                   .update_scale = 1,
                   .rounding = tier & 2 ? MZ_ROUND_DITHER : MZ_ROUND_STOCHASTIC,
                   .seed = 4,
                   .m = rig_put_floats(r, zero, N),
                   .v = rig_put_floats(r, zero, N),
                   .row = rig_put_floats(r, zero, M * R),
                   .col = rig_put_floats(r, zero, M * C)};
    void *workspace = rig_workspace(r, mz_update_workspace(r->kernels, &a));
    RIG_OK(r, mz_update_step(r->kernels, 0, &a, workspace));
    keep_each(r, all, (const void *[]){a.parameter, a.m, a.v, a.row, a.col}, 5);
}

static record *into; /* of the program that runs */

static void everything(rig *r) {
    int32_t *expert = rig_out(r, 4 * PAIRS);
    route(r, into, expert);
    for (int type = MZ_F32; type <= MZ_BF16; type++) {
        layer(r, into, type, expert);
        uneven_groups(r, into, type);
    }
    rig_clear(r);
    for (int tier = 0; tier < 7; tier++) /* momentum, factors, bf16 gradients: by bits */
        for (int kind = MZ_UPDATE_SKEWADAM; kind <= MZ_UPDATE_MUON; kind++) {
            if (kind == MZ_UPDATE_SKEWADAM || tier == 1)
                update(r, into, kind, tier);
            rig_clear(r);
        }
}

/* ---- threads and instruction sets ---------------------------------------------------------------
 */

typedef struct instructions {
    const mz_simd *simd;
    const mz_update_simd *update;
} instructions;

static int tables(instructions list[3]) {
    int n = 0;
    list[n++] = (instructions){&mz_simd_base, &mz_update_simd_base};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        list[n++] = (instructions){&mz_simd_avx2, &mz_update_simd_avx2};
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        list[n++] = (instructions){&mz_simd_avx512, &mz_update_simd_avx512};
#endif
    return n;
}

static mz_kernels *open_host(int32_t threads) {
    const mz_kernels_options options = {.threads = threads, .streams = 1};
    mz_kernels *k;
    assert_int_equal(mz_kernels_open(&options, &k, NULL, 0), MZ_K_OK);
    return k;
}

static record run_everything(int32_t threads, const instructions *set) {
    const size_t room = (size_t)64 << 20;
    record all = {.bytes = malloc(room), .room = room};
    assert_non_null(all.bytes);
    rig r = {.kernels = open_host(threads)};
    if (set) {
        mz_host_of(r.kernels)->simd = set->simd;
        mz_host_of(r.kernels)->update = set->update;
    }
    into = &all;
    const check program = {"everything", everything};
    if (!rig_run(&r, &program, 11))
        fail_msg("%s", r.message);
    mz_kernels_close(&r.kernels);
    return all;
}

static void compare(const record *want, record got, const char *what, int which) {
    assert_int_equal(want->size, got.size);
    for (size_t i = 0; i < got.size; i++)
        if (want->bytes[i] != got.bytes[i])
            fail_msg("%s %d: byte %zu of %zu differs", what, which, i, got.size);
    free(got.bytes);
}

static void test_same_bits(void **state) {
    (void)state;
    const int32_t threads[] = {2, 3, 7};
    instructions set[3];
    record want = run_everything(1, NULL);
    assert_true(want.size > 1 << 20);
    for (int i = 0; i < COUNT_OF(threads); i++)
        compare(&want, run_everything(threads[i], NULL), "threads", threads[i]);
    for (int i = 0, n = tables(set); i < n; i++)
        compare(&want, run_everything(2, &set[i]), set[i].simd->name, i);
    free(want.bytes);
}

/* All lengths up to a few registers, any alignment, every kind of number. */
static void test_loops(void **state) {
    (void)state;
    enum { MOST = 70 };
    instructions set[3];
    const int sets = tables(set);
    rig r = {.random = 3};
    uint16_t half[MOST + 8], narrow[3][MOST];
    float single[MOST + 8], wide[3][MOST], other[3][MOST];
    for (int64_t n = 0; n <= MOST; n++) {
        for (int64_t i = 0; i < MOST + 8; i++) {
            const uint32_t bits = (uint32_t)rig_bits(&r);
            half[i] = (uint16_t)(bits >> 16);
            memcpy(&single[i], &bits, sizeof bits);
        }
        const uint16_t *h = half + n % 8;
        const float *f = single + n % 8;
        float norm[3];
        memset(narrow, 0, sizeof narrow);
        memset(wide, 0, sizeof wide);
        memset(other, 0, sizeof other);
        for (int s = 0; s < sets; s++) {
            set[s].simd->widen(wide[s], h, n);
            set[s].simd->narrow(narrow[s], f, n);
            set[s].simd->swiglu(MZ_F32, other[s], f, f, n, false);
            norm[s] = set[s].simd->norm2(MZ_F32, f, n);
            for (int64_t i = 0; i < n; i++) { /* which NaN is nobody's business */
                other[s][i] = other[s][i] == other[s][i] ? other[s][i] : 0;
                wide[s][i] = wide[s][i] == wide[s][i] ? wide[s][i] : 0;
            }
            assert_memory_equal(wide[s], wide[0], sizeof *wide);
            assert_memory_equal(narrow[s], narrow[0], sizeof *narrow);
            assert_memory_equal(other[s], other[0], sizeof *other);
            assert_true(norm[s] == norm[0] || (norm[s] != norm[s] && norm[0] != norm[0]));
        }
    }
}

/* Rows that go past the caches have the same bits; `n` values whose rows are whole lines or not. */
static void compare_ways(const mz_simd *simd, mz_dtype type, int64_t n, const void *const row[3]) {
    enum { ROW = 4 * 160 };
    _Alignas(64) static char out[2][3 * ROW];
    const float factor[3] = {0.5f, -3, 7};
    const size_t bytes = rig_width(type) * (size_t)n;
    float sum[2][2];
    memset(out, 0, sizeof out);
    for (int way = 0; way < 2; way++) {
        char *to = out[way];
        const bool stream = way == 1;
        simd->copy(to, row[0], row[1], bytes, stream);
        simd->copy(to + ROW, NULL, row[1], bytes, stream);
        simd->scale(type, to + 2 * ROW, row[2], row[0], 3, n, stream);
    }
    simd->settle();
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_memory_equal(out[1], row[0], bytes);
    for (int way = 0; way < 2; way++) {
        char *to = out[way];
        const mz_swiglu_row back = {to + ROW, to + 2 * ROW, NULL, row[0], row[1], row[2], 2, n};
        sum[way][0] = simd->swiglu(type, to, row[0], row[1], n, way == 1);
        sum[way][1] = simd->swiglu_back(&back, type, way == 1);
    }
    simd->settle();
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_memory_equal(sum[0], sum[1], sizeof sum[0]);
    for (int way = 0; way < 2; way++) {
        const mz_row_sum rows = {type,   type, type, out[way], row[0], row,
                                 factor, 3,    row,  3,        n,      way == 1};
        simd->combine(&rows);
    }
    simd->settle();
    assert_memory_equal(out[0], out[1], sizeof out[0]);
}

static void test_ways(void **state) {
    (void)state;
    static const int64_t lengths[] = {0, 16, 32, 40, 64, 96, 100, 160};
    instructions set[3];
    const int sets = tables(set);
    rig r = {.random = 5};
    for (int t = MZ_F32; t <= MZ_BF16; t++)
        for (int i = 0; i < COUNT_OF(lengths); i++) {
            const double *value[3];
            void *row[3];
            for (int j = 0; j < 3; j++) {
                value[j] = rig_normals(&r, t, 160, 2);
                row[j] = rig_host(&r, 4 * 160);
                for (int k = 0; k < 160 && t == MZ_F32; k++)
                    ((float *)row[j])[k] = (float)value[j][k];
                for (int k = 0; k < 160 && t == MZ_BF16; k++)
                    ((uint16_t *)row[j])[k] = mz_to_bf16((float)value[j][k]);
            }
            for (int s = 0; s < sets; s++)
                compare_ways(set[s].simd, t, lengths[i], (const void *const *)row);
        }
    rig_clear(&r);
}

/* ---- tiles of products --------------------------------------------------------------------------
 */

enum { GROUPS_MOST = 12 };

typedef struct tiles_case {
    int64_t begin[GROUPS_MOST + 1];
    void *weight[GROUPS_MOST];
    mz_host_turn turn[GROUPS_MOST];
    mz_product_args args;
} tiles_case;

static void set_rows(tiles_case *c, const int64_t *rows, int32_t groups, int64_t n) {
    for (int32_t g = 0; g < groups; g++) {
        c->begin[g + 1] = c->begin[g] + rows[g];
        c->weight[g] = c;
    }
    c->args = (mz_product_args){
        .groups = {c->begin, groups, c->begin[groups], NULL}, .n = n, .k = 8, .weight = c->weight};
}

static void expect_tiles(const mz_host_tiling *t, const mz_host_tile *want, int count) {
    assert_int_equal(mz_host_order_tiles(t), count);
    for (int i = 0; i < count; i++) {
        const mz_host_tile tile = mz_host_tile_at(t, i);
        if (tile.group != want[i].group || tile.first != want[i].first ||
            tile.count != want[i].count)
            fail_msg("tile %d: group %d, %d + %d", i, (int)tile.group, (int)tile.first,
                     (int)tile.count);
    }
}

/* By hand: 640 rows are two tiles of 320; 1030 three, of 344, 344 and 342: 1030 / 3 up to a
 * multiple of 8. Longest first, of equal ones the lower number. */
static void test_tiles_by_hand(void **state) {
    (void)state;
    const int64_t rows[] = {128, 640, 0, 1030, 128, 640, 300};
    const mz_host_tile by_rows[] = {{3, 0, 344},   {3, 344, 344}, {3, 688, 342},
                                    {1, 0, 320},   {1, 320, 320}, {5, 0, 320},
                                    {5, 320, 320}, {0, 0, 128},   {4, 0, 128}};
    /* 500 columns: two tiles of 256 and 244; an empty group has them too */
    const mz_host_tile by_cols[] = {{3, 0, 256}, {3, 256, 244}, {1, 0, 256}, {1, 256, 244},
                                    {5, 0, 256}, {5, 256, 244}, {0, 0, 256}, {0, 256, 244},
                                    {4, 0, 256}, {4, 256, 244}, {2, 0, 256}, {2, 256, 244}};
    tiles_case c = {0};
    set_rows(&c, rows, COUNT_OF(rows), 500);
    c.weight[6] = NULL;
    c.args.op = MZ_PRODUCT_DGRAD;
    mz_host_tiling t = mz_host_product_tiling(&c.args, c.turn);
    expect_tiles(&t, by_rows, COUNT_OF(by_rows));
    c.args.op = MZ_PRODUCT_WGRAD;
    t = mz_host_product_tiling(&c.args, c.turn);
    expect_tiles(&t, by_cols, COUNT_OF(by_cols));
}

/* Of one group's side: all of it once, in order, in as few tiles as can be, nearly equal. */
static void check_group(const mz_host_tiling *t, int32_t group, int64_t side, int64_t tiles) {
    int64_t next = 0, parts = 0, part = 0;
    for (int64_t i = 0; i < tiles; i++) {
        const mz_host_tile tile = mz_host_tile_at(t, i);
        if (tile.group != group)
            continue;
        assert_int_equal(tile.first, next);
        part = parts++ == 0 ? tile.count : part;
        next += tile.count;
        assert_true(tile.count > 0 && tile.count <= t->most && part % 8 * (side - part) == 0);
        assert_true(tile.count == part || (tile.count < part && next == side));
    }
    assert_int_equal(next, side);
    assert_int_equal(parts, (side + t->most - 1) / t->most);
    assert_true(side == 0 || part < (side + parts - 1) / parts + 8);
}

static void test_tiles(void **state) {
    (void)state;
    rig r = {.random = 9};
    for (int trial = 0; trial < 400; trial++) {
        const int32_t groups = 1 + (int32_t)(rig_bits(&r) % GROUPS_MOST);
        int64_t rows[GROUPS_MOST];
        for (int32_t g = 0; g < groups; g++)
            rows[g] = (int64_t)(rig_bits(&r) % 4 ? rig_bits(&r) % 40 * (rig_bits(&r) % 70) : 64);
        tiles_case c = {0};
        set_rows(&c, rows, groups, 1 + (int64_t)(rig_bits(&r) % 900));
        c.args.op = trial % 2 ? MZ_PRODUCT_FORWARD : MZ_PRODUCT_WGRAD;
        const mz_expert_up up = {.groups = c.args.groups,
                                 .intermediate = 1 + (int64_t)(rig_bits(&r) % 3000),
                                 .weight = c.weight};
        const mz_host_tiling t = trial % 4 == 3 ? mz_host_up_tiling(&up, c.turn)
                                                : mz_host_product_tiling(&c.args, c.turn);
        const int64_t tiles = mz_host_order_tiles(&t);
        for (int32_t g = 0; g < groups; g++)
            check_group(&t, g, t.cols > 0 ? t.cols : rows[g], tiles);
        for (int32_t i = 1; i < groups; i++)
            assert_true(c.turn[i - 1].length > c.turn[i].length ||
                        (c.turn[i - 1].length == c.turn[i].length &&
                         c.turn[i - 1].group < c.turn[i].group));
    }
}

/* ---- pool ---------------------------------------------------------------------------------------
 */

enum { PARTS = 1000 };
static void count_part(void *argument, int64_t part, int32_t thread) {
    assert_true(thread >= 0 && thread < 5);
    ((int *)argument)[part]++;
}

static void test_pool(void **state) {
    (void)state;
    mz_pool *pool = mz_pool_create(5);
    assert_non_null(pool);
    int done[PARTS] = {0};
    for (int run = 0; run < 300; run++)
        mz_pool_run(pool, count_part, done, run % 3 ? run : PARTS);
    for (int i = 0; i < PARTS; i++) {
        int want = 0;
        for (int run = 0; run < 300; run++)
            want += i < (run % 3 ? run : PARTS);
        assert_int_equal(done[i], want);
    }
    mz_pool_free(pool);
    mz_pool_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),     cmocka_unit_test(test_loops),
        cmocka_unit_test(test_ways),          cmocka_unit_test(test_pool),
        cmocka_unit_test(test_tiles_by_hand), cmocka_unit_test(test_tiles)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
