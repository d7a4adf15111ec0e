/* Elements beyond the 2^32nd of an array: a few rows that lie far apart, in memory of which only
 * they are ever touched. An offset of 32 bits would end at a row of zeros, or nowhere. */
#include "tests/kernels/reference.h"
#include "tests/kernels/rig.h"

#include <string.h>
#include <sys/mman.h>

/* Zeros; of the host's memory, and so of an emulated device's, pages are there once touched. */
typedef struct far_memory {
    char *at;
    size_t bytes;
    mz_dtype type;
} far_memory;

static bool is_mapped(const rig *r) {
    return r->small || mz_kernels_backend(r->kernels) == MZ_BACKEND_HOST;
}

static far_memory make_far(rig *r, mz_dtype type, int64_t n) {
    far_memory m = {NULL, rig_width(type) * (size_t)n, type};
    if (is_mapped(r)) {
        void *memory = mmap(NULL, m.bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            rig_fail(r, "no room for %zu bytes that will not be used", m.bytes);
        m.at = memory;
        return m;
    }
    void *memory;
    RIG_OK(r, mz_kernels_alloc(r->kernels, m.bytes, &memory));
    RIG_OK(r, mz_kernels_zero(r->kernels, 0, memory, m.bytes));
    m.at = memory;
    return m;
}

static void drop(rig *r, far_memory *m) {
    if (is_mapped(r))
        munmap(m->at, m->bytes);
    else
        mz_kernels_free(r->kernels, m->at);
}

/* Values for the elements from `first` on. */
static void put_far(rig *r, const far_memory *m, int64_t first, const double *values, int64_t n) {
    const size_t width = rig_width(m->type);
    const void *image = rig_get(r, rig_put(r, m->type, values, n));
    char *to = m->at + width * (size_t)first;
    if (is_mapped(r)) {
        memcpy(to, image, width * (size_t)n);
        return;
    }
    RIG_OK(r, mz_kernels_copy(r->kernels, 0, MZ_COPY_IN, to, image, width * (size_t)n));
    RIG_OK(r, mz_kernels_sync(r->kernels, 0));
}

static const double *get_far(rig *r, const far_memory *m, int64_t first, int64_t n) {
    const size_t width = rig_width(m->type);
    void *image = rig_host(r, width * (size_t)n);
    const char *from = m->at + width * (size_t)first;
    RIG_OK(r, mz_kernels_sync(r->kernels, 0));
    if (is_mapped(r)) {
        memcpy(image, from, width * (size_t)n);
    } else {
        RIG_OK(r, mz_kernels_copy(r->kernels, 0, MZ_COPY_OUT, image, from, width * (size_t)n));
        RIG_OK(r, mz_kernels_sync(r->kernels, 0));
    }
    return rig_values(r, m->type, rig_in(r, image, width * (size_t)n));
}

/* ---- rows ---------------------------------------------------------------------------------------
 */

enum { H = 64 };
static const int64_t FAR_ROW = (INT64_C(1) << 32) / H + 3;

static void check_strides(rig *r) {
    enum { ROWS = 3 };
    const int64_t stride = (INT64_C(1) << 31) + H;
    far_memory x = make_far(r, MZ_BF16, stride * (ROWS - 1) + H);
    const double *value = rig_normals(r, MZ_BF16, ROWS * H, 1);
    double want[ROWS];
    for (int i = 0; i < ROWS; i++) {
        put_far(r, &x, i * stride, value + i * H, H);
        want[i] = ref_dot(value + i * H, value + i * H, H);
    }
    const mz_norms norms = {MZ_BF16, x.at, ROWS, H, stride, rig_room(r, MZ_F32, ROWS)};
    const mz_dots dots = {MZ_BF16, x.at, x.at, ROWS, H, stride, stride, rig_room(r, MZ_F32, ROWS)};
    RIG_OK(r, mz_row_norms(r->kernels, 0, &norms));
    RIG_OK(r, mz_row_dots(r->kernels, 0, &dots));
    rig_near(r, "norms", rig_values(r, MZ_F32, norms.out), want, ROWS, 1e-5, 0);
    rig_near(r, "dots", rig_values(r, MZ_F32, dots.out), want, ROWS, 1e-5, 0);
    drop(r, &x);
}

static void check_rows_by_number(rig *r) {
    const int64_t number[] = {FAR_ROW, 2, FAR_ROW - 1, 5};
    enum { ROWS = 4 };
    far_memory x = make_far(r, MZ_BF16, (FAR_ROW + 1) * H);
    const double *value = rig_normals(r, MZ_BF16, ROWS * H, 1);
    for (int i = 0; i < ROWS; i++)
        put_far(r, &x, number[i] * H, value + i * H, H);
    const int64_t *numbers = rig_in(r, number, sizeof number);
    const mz_pack pack = {.type = MZ_BF16,
                          .x = x.at,
                          .hidden = H,
                          .rows = ROWS,
                          .row_pair = numbers,
                          .k = 1,
                          .out = rig_room(r, MZ_BF16, ROWS * H)};
    const mz_unpack unpack = {MZ_BF16, x.at, H, ROWS, numbers, rig_room(r, MZ_BF16, ROWS * H)};
    const mz_combine combine = {.type = MZ_BF16,
                                .row = x.at,
                                .hidden = H,
                                .tokens = ROWS,
                                .k = 1,
                                .position = numbers,
                                .out = rig_room(r, MZ_BF16, ROWS * H)};
    RIG_OK(r, mz_pack_rows(r->kernels, 0, &pack));
    RIG_OK(r, mz_unpack_rows(r->kernels, 0, &unpack));
    RIG_OK(r, mz_combine_rows(r->kernels, 0, &combine));
    rig_near(r, "pack", rig_values(r, MZ_BF16, pack.out), value, ROWS * H, 0, 0);
    rig_near(r, "unpack", rig_values(r, MZ_BF16, unpack.out), value, ROWS * H, 0, 0);
    rig_near(r, "combine", rig_values(r, MZ_BF16, combine.out), value, ROWS * H, 0, 0);
    drop(r, &x);
}

/* ---- pairs --------------------------------------------------------------------------------------
 */

/* Of four pairs the two with the largest scores, by their numbers. */
static void check_pair_numbers(rig *r) {
    enum { N = 4 };
    const int64_t pairs = (INT64_C(1) << 31) + 100, begin[] = {0, N}, quota = 2;
    const int64_t order[N] = {3, pairs - 1, 5, pairs - 2};
    const double score[N] = {1, 4, 2, 8};
    far_memory scores = make_far(r, MZ_F32, pairs), keep = make_far(r, MZ_BF16, pairs / 2);
    for (int i = 0; i < N; i++)
        put_far(r, &scores, order[i], score + i, 1);
    const mz_selection args = {.score = (const float *)(void *)scores.at,
                               .order = rig_in(r, order, sizeof order),
                               .begin = rig_in(r, begin, sizeof begin),
                               .quota = rig_in(r, &quota, sizeof quota),
                               .pairs = pairs,
                               .experts = 1,
                               .kept = rig_out(r, 2 * sizeof *order),
                               .kept_begin = rig_out(r, sizeof begin),
                               .keep = (uint8_t *)keep.at};
    RIG_TRUE(r, mz_select_workspace(r->kernels, &args) == 0);
    RIG_OK(r, mz_select_pairs(r->kernels, 0, &args, NULL));
    const int64_t *kept = rig_get(r, args.kept);
    RIG_TRUE(r, kept[0] == pairs - 1 && kept[1] == pairs - 2);
    /* keep[pairs - 2] and keep[pairs - 1] as the two bytes of one bf16. */
    const double both = get_far(r, &keep, (pairs - 2) / 2, 1)[0];
    RIG_TRUE(r, both == 0x1.02p-125);
    drop(r, &keep);
    drop(r, &scores);
}

/* ---- products -----------------------------------------------------------------------------------
 * The first of two groups has no weight and is skipped, whatever its rows. */

enum { N = 16, K = 16, LAST = 3 };
static const int64_t SKIPPED = (INT64_C(1) << 32) / N + 5;

static mz_groups far_groups(rig *r) {
    const int64_t begin[] = {0, SKIPPED, SKIPPED + LAST};
    return (mz_groups){rig_in(r, begin, sizeof begin), 2, SKIPPED + LAST, NULL};
}

static void *second_weight(rig *r, void *weight) {
    void *const pointers[] = {NULL, weight};
    return rig_in(r, pointers, sizeof pointers);
}

static void far_product(rig *r, mz_dtype type, mz_product_engine engine, mz_product op) {
    const int64_t rows = SKIPPED + LAST, first = SKIPPED * N;
    const double *x = rig_normals(r, type, LAST * N, 1), *y = rig_normals(r, type, LAST * N, 1);
    const double *w = rig_normals(r, type, N * K, 1);
    far_memory a = make_far(r, type, rows * N), c = make_far(r, type, rows * N);
    const bool wgrad = op == MZ_PRODUCT_WGRAD;
    void *weight = wgrad ? rig_room(r, MZ_F32, N * K) : rig_put(r, type, w, N * K);
    put_far(r, &a, first, x, LAST * N);
    if (wgrad)
        put_far(r, &c, first, y, LAST * N);
    const mz_product_args args = {.op = op,
                                  .engine = engine,
                                  .groups = far_groups(r),
                                  .n = N,
                                  .k = K,
                                  .type = type,
                                  .a = a.at,
                                  .weight = second_weight(r, weight),
                                  .c = c.at};
    RIG_OK(r, mz_grouped_gemm(r->kernels, 0, &args,
                              rig_workspace(r, mz_grouped_gemm_workspace(r->kernels, &args))));
    double want[N * K] = {0};
    if (wgrad)
        ref_wgrad(LAST, N, K, x, y, want);
    else
        (op == MZ_PRODUCT_FORWARD ? ref_forward : ref_dgrad)(LAST, N, K, x, w, want);
    rig_near(r, "product", wgrad ? rig_values(r, MZ_F32, weight) : get_far(r, &c, first, LAST * N),
             want, wgrad ? N * K : LAST * N, 0x1p-8, 1e-4);
    drop(r, &c);
    drop(r, &a);
    rig_clear(r);
}

/* Both types, on CUDA with both engines for bf16. */
static void check_products(rig *r) {
    for (int op = MZ_PRODUCT_FORWARD; op <= MZ_PRODUCT_WGRAD; op++) {
        far_product(r, MZ_F32, MZ_ENGINE_OWN, (mz_product)op);
        far_product(r, MZ_BF16, MZ_ENGINE_OWN, (mz_product)op);
        far_product(r, MZ_BF16, MZ_ENGINE_OWN_MMA, (mz_product)op);
    }
}

static void far_up(rig *r, mz_dtype type, mz_product_engine engine) {
    enum { I = N / 2 };
    const int64_t rows = SKIPPED + LAST;
    const double *x = rig_normals(r, type, LAST * K, 1), *w = rig_normals(r, type, N * K, 1);
    far_memory in = make_far(r, type, rows * K), h = make_far(r, type, rows * I);
    far_memory gate_up = make_far(r, type, rows * N), norm2 = make_far(r, MZ_F32, rows);
    put_far(r, &in, SKIPPED * K, x, LAST * K);
    const mz_expert_up args = {.groups = far_groups(r),
                               .hidden = K,
                               .intermediate = I,
                               .type = type,
                               .x = in.at,
                               .weight = second_weight(r, rig_put(r, type, w, N * K)),
                               .gate_up = gate_up.at,
                               .h = h.at,
                               .norm2 = (float *)(void *)norm2.at,
                               .engine = engine};
    const size_t bytes = mz_expert_up_workspace(r->kernels, &args);
    far_memory workspace = make_far(r, MZ_F32, (int64_t)bytes / 4 + 1);
    RIG_OK(r, mz_expert_up_forward(r->kernels, 0, &args, workspace.at));
    double want[LAST * N];
    ref_forward(LAST, N, K, x, w, want);
    rig_near(r, "gate, up", get_far(r, &gate_up, SKIPPED * N, LAST * N), want, LAST * N, 0x1p-8,
             1e-4);
    const double *got = get_far(r, &h, SKIPPED * I, LAST * I);
    double squares[LAST];
    for (int i = 0; i < LAST; i++)
        squares[i] = ref_dot(got + i * I, got + i * I, I);
    RIG_TRUE(r, squares[0] > 0 && squares[LAST - 1] > 0);
    rig_near(r, "||h||^2", get_far(r, &norm2, SKIPPED, LAST), squares, LAST, 1e-5, 0);
    far_memory *all[] = {&workspace, &norm2, &gate_up, &h, &in};
    for (int i = 0; i < 5; i++)
        drop(r, all[i]);
    rig_clear(r);
}

static void check_up(rig *r) {
    far_up(r, MZ_F32, MZ_ENGINE_OWN);
    far_up(r, MZ_BF16, MZ_ENGINE_OWN);
    far_up(r, MZ_BF16, MZ_ENGINE_OWN_MMA);
}

const check checks_of_offsets[] = {
    {"strides", check_strides},           {"rows by number", check_rows_by_number},
    {"pair numbers", check_pair_numbers}, {"products", check_products},
    {"up-projection", check_up},          {NULL, NULL}};
