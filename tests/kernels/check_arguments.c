/* Bad arguments: MZ_K_EINVAL, one line that names the operation, nothing written. */
#include "tests/kernels/rig.h"

#include <stdio.h>
#include <string.h>

typedef struct scene { /* something of everything, all valid, tiny */
    float *f, *out;
    int64_t *begin, *list;
    void *pointers, *workspace;
} scene;

static scene make_scene(rig *r) {
    enum { N = 256 };
    const int64_t begin[] = {0, 2, 4};
    int64_t list[N];
    for (int i = 0; i < N; i++)
        list[i] = i % 4;
    scene s = {.f = rig_put_floats(r, rig_host(r, 8 * N), N), .out = rig_out(r, 4096)};
    s.begin = rig_in(r, begin, sizeof begin);
    s.list = rig_in(r, list, sizeof list);
    void *const weight[] = {s.f, s.f};
    s.pointers = rig_in(r, weight, sizeof weight);
    s.workspace = rig_out(r, 1 << 20);
    return s;
}

static void refused(rig *r, const scene *s, const char *word, const char *call, mz_kstatus status) {
    const char *error = mz_kernels_error(r->kernels);
    if (status != MZ_K_EINVAL)
        rig_fail(r, "%.100s: status %d", call, (int)status);
    if (!strstr(error, word) || strchr(error, '\n') || strlen(error) < 8)
        rig_fail(r, "%.100s: message '%s'", call, error);
    if (!rig_untouched(r, s->out))
        rig_fail(r, "%.100s: something was written", call);
}

/* One field of valid arguments changed, then refused. `stmt` changes `a`. */
#define REFUSED(type, name, valid, stmt, call)                                                     \
    do {                                                                                           \
        type a = valid;                                                                            \
        stmt;                                                                                      \
        refused(r, &s, name, #stmt, call);                                                         \
    } while (0)

static void check_rows(rig *r) {
    const scene s = make_scene(r);
    mz_kernels *k = r->kernels;
    const mz_norms norms = {MZ_F32, s.f, 2, 4, 4, s.out};
#define NORMS(stmt) REFUSED(mz_norms, "row_norms", norms, stmt, mz_row_norms(k, 0, &a))
    NORMS(a.type = 7);
    NORMS(a.rows = -1);
    NORMS(a.cols = -1);
    NORMS(a.stride = 3);
    NORMS(a.rows = INT64_MAX);
    NORMS(a.x = NULL);
    REFUSED(mz_norms, "row_norms", norms, (void)a, mz_row_norms(k, 2, &a));
    REFUSED(mz_norms, "row_norms", norms, (void)a, mz_row_norms(k, -1, &a));
    const mz_dots dots = {MZ_F32, s.f, s.f, 2, 4, 4, 4, s.out};
#define DOTS(stmt) REFUSED(mz_dots, "row_dots", dots, stmt, mz_row_dots(k, 0, &a))
    DOTS(a.b_stride = 1);
    DOTS(a.b = NULL);
    DOTS(a.rows = INT64_C(1) << 62);
    const mz_pack pack = {
        .x = s.f, .hidden = 4, .rows = 2, .row_pair = s.list, .k = 1, .out = s.out};
#define PACK(stmt) REFUSED(mz_pack, "pack_rows", pack, stmt, mz_pack_rows(k, 0, &a))
    PACK(a.k = 0);
    PACK(a.hidden = -4);
    PACK(a.row_pair = NULL);
    PACK(a.type = -1);
    const mz_unpack unpack = {MZ_F32, s.f, 4, 2, s.list, s.out};
#define UNPACK(stmt) REFUSED(mz_unpack, "unpack_rows", unpack, stmt, mz_unpack_rows(k, 0, &a))
    UNPACK(a.pairs = -1);
    UNPACK(a.position = NULL);
    const mz_combine combine = {
        .row = s.f, .hidden = 4, .tokens = 2, .k = 1, .position = s.list, .out = s.out};
#define COMBINE(stmt) REFUSED(mz_combine, "combine_rows", combine, stmt, mz_combine_rows(k, 0, &a))
    COMBINE(a.k = -1);
    COMBINE(a.position = NULL);
    COMBINE(a.tokens = INT64_MAX / 2);
    COMBINE((a.tokens = INT64_C(1) << 50, a.k = 1 << 20));
    const mz_swiglu swiglu = {
        .rows = 2, .intermediate = 4, .gate_up = s.f, .h = s.out, .dh = s.f, .dgate_up = s.out};
#define SWIGLU(stmt)                                                                               \
    REFUSED(mz_swiglu, "swiglu_forward", swiglu, stmt, mz_swiglu_forward(k, 0, &a));               \
    REFUSED(mz_swiglu, "swiglu_backward", swiglu, stmt, mz_swiglu_backward(k, 0, &a))
    SWIGLU(a.rows = -2);
    SWIGLU(a.intermediate = INT64_MAX);
    SWIGLU(a.gate_up = NULL);
    SWIGLU((a.h = NULL, a.dh = NULL));
    refused(r, &s, "convert", "unknown type", mz_convert(k, 0, 5, s.out, MZ_F32, s.f, 4));
    refused(r, &s, "convert", "negative", mz_convert(k, 0, MZ_F32, s.out, MZ_F32, s.f, -4));
    refused(r, &s, "gate_norms", "r < 0", mz_gate_norms(k, 0, MZ_F32, s.f, 2, 2, -1, s.out));
    refused(r, &s, "gate_norms", "NULL", mz_gate_norms(k, 0, MZ_F32, NULL, 2, 2, 4, s.out));
    refused(r, &s, "copy", "NULL", mz_kernels_copy(k, 0, MZ_COPY_IN, s.out, NULL, 4));
    refused(r, &s, "copy", "kind", mz_kernels_copy(k, 0, 9, s.out, s.f, 4));
    refused(r, &s, "mark", "slot", mz_kernels_mark(k, 0, 64));
    double seconds;
    refused(r, &s, "elapsed", "not marked", mz_kernels_elapsed(k, 60, 61, &seconds));
}

static void check_pairs(rig *r) {
    const scene s = make_scene(r);
    mz_kernels *k = r->kernels;
    int64_t *out64 = (int64_t *)(void *)s.out;
    const mz_score_args score = {.kind = MZ_SCORED_UP,
                                 .tokens = 2,
                                 .pairs = 4,
                                 .k = 2,
                                 .weight = s.f,
                                 .grad_norm2 = s.f,
                                 .input_norm2 = s.f,
                                 .score = s.out};
#define SCORE(stmt) REFUSED(mz_score_args, "score_pairs", score, stmt, mz_score_pairs(k, 0, &a))
    SCORE(a.kind = 99);
    SCORE(a.kind = MZ_SCORED_DOWN);
    SCORE(a.weight = NULL);
    SCORE(a.input_norm2 = NULL);
    SCORE(a.k = 3);
    SCORE(a.tokens = -1);
    const mz_grouping grouping = {(int32_t *)(void *)s.list, 4, 2, out64, out64, out64};
#define GROUP(stmt)                                                                                \
    REFUSED(mz_grouping, "group_pairs", grouping, stmt, mz_group_pairs(k, 0, &a, s.workspace))
    GROUP(a.pairs = -1);
    GROUP(a.experts = -1);
    GROUP(a.expert = NULL);
    refused(r, &s, "prefix_sums", "n < 0", mz_prefix_sums(k, 0, s.list, -1, out64, s.workspace));
    refused(r, &s, "prefix_sums", "in place", mz_prefix_sums(k, 0, out64, 3, out64, s.workspace));
    const mz_selection selection = {.score = s.f,
                                    .order = s.list,
                                    .begin = s.begin,
                                    .quota = s.list,
                                    .pairs = 4,
                                    .experts = 2,
                                    .kept = out64,
                                    .kept_begin = out64};
#define SELECT(stmt)                                                                               \
    REFUSED(mz_selection, "select_pairs", selection, stmt, mz_select_pairs(k, 0, &a, s.workspace))
    SELECT(a.kept = NULL);
    SELECT(a.kept_begin = NULL);
    SELECT(a.quota = NULL);
    SELECT(a.begin = NULL);
    SELECT(a.pairs = -3);
    SELECT((a.scaled = s.f, a.kept = a.kept_begin = NULL));
    const mz_segment segment = {0, 0, 1};
    const mz_segment *in = rig_in(r, &segment, sizeof segment);
    refused(r, &s, "arrange", "segments", mz_arrange(k, 0, in, -1, s.list, out64));
    refused(r, &s, "arrange", "NULL", mz_arrange(k, 0, in, 1, NULL, out64));
    refused(r, &s, "invert", "rows", mz_invert(k, 0, s.list, -1, 4, out64));
    refused(r, &s, "invert", "NULL", mz_invert(k, 0, NULL, 1, 4, out64));
}

static void check_products(rig *r) {
    const scene s = make_scene(r);
    mz_kernels *k = r->kernels;
    const int64_t falling[] = {0, 3, 2}, late[] = {1, 2, 4};
    const mz_product_args product = {.groups = {s.begin, 2, 4, NULL},
                                     .n = 8,
                                     .k = 8,
                                     .a = s.f,
                                     .weight = s.pointers,
                                     .c = s.out};
#define PRODUCT(stmt)                                                                              \
    REFUSED(mz_product_args, "grouped_gemm", product, stmt, mz_grouped_gemm(k, 0, &a, s.workspace))
    PRODUCT(a.op = 3);
    PRODUCT(a.engine = 3);
    PRODUCT(a.type = 2);
    PRODUCT(a.gradient_type = 2);
    PRODUCT(a.n = 0);
    PRODUCT(a.k = -8);
    PRODUCT(a.n = INT64_C(1) << 57);
    PRODUCT(a.accumulate = true);
    PRODUCT(a.groups.groups = -1);
    PRODUCT(a.groups.begin = NULL);
    PRODUCT(a.groups.rows_max = -1);
    PRODUCT(a.groups.begin_host = falling);
    PRODUCT(a.groups.begin_host = late);
    PRODUCT((a.groups.begin_host = (const int64_t[]){0, 2, 4}, a.groups.rows_max = 3));
    PRODUCT(a.weight = NULL);
    PRODUCT(a.c = NULL);
    const mz_expert_up up = {.groups = {s.begin, 2, 4, NULL},
                             .hidden = 8,
                             .intermediate = 8,
                             .x = s.f,
                             .weight = s.pointers,
                             .h = s.out};
#define UP(stmt)                                                                                   \
    REFUSED(mz_expert_up, "expert_up", up, stmt, mz_expert_up_forward(k, 0, &a, s.workspace))
    UP(a.intermediate = 0);
    UP(a.hidden = -1);
    UP(a.intermediate = INT64_MAX);
    UP(a.type = 4);
    UP(a.engine = MZ_ENGINE_VENDOR);
    UP(a.engine = 3);
    UP(a.h = NULL);
    /* Sizes of scratch for what is refused are 0, whatever the arguments. */
    mz_expert_up bad = up;
    bad.intermediate = 0;
    RIG_TRUE(r, mz_expert_up_workspace(k, &bad) == 0);
    mz_product_args wrong = product;
    wrong.n = -1;
    RIG_TRUE(r, mz_grouped_gemm_workspace(k, &wrong) == 0);
    wrong.n = INT64_C(1) << 57;
    wrong.k = 1;
    wrong.groups.rows_max = 1;
    wrong.type = MZ_BF16;
    RIG_TRUE(r, mz_grouped_gemm_workspace(k, &wrong) == 0);
}

static void check_routers(rig *r) {
    const scene s = make_scene(r);
    mz_kernels *k = r->kernels;
    const mz_router router = {.kind = MZ_ROUTER_SIGMOID,
                              .tokens = 2,
                              .experts = 8,
                              .k = 2,
                              .scale = 1,
                              .n_group = 2,
                              .topk_group = 1,
                              .logits = s.f,
                              .expert = (int32_t *)(void *)s.out,
                              .weight = s.out,
                              .dweight = s.f,
                              .dlogits = s.out};
#define ROUTER(stmt)                                                                               \
    REFUSED(mz_router, "router_forward", router, stmt, mz_router_forward(k, 0, &a, s.workspace));  \
    REFUSED(mz_router, "router_backward", router, stmt, mz_router_backward(k, 0, &a, s.workspace))
    ROUTER(a.kind = 5);
    ROUTER(a.experts = 0);
    ROUTER(a.tokens = -1);
    ROUTER(a.k = 0);
    ROUTER(a.k = 5);
    ROUTER(a.n_group = 3);
    ROUTER(a.topk_group = 0);
    ROUTER(a.topk_group = 3);
    ROUTER(a.logits = NULL);
    ROUTER(a.weight = NULL);
    ROUTER(a.kind = MZ_ROUTER_RELU); /* no token_begin */
#define BACK(stmt)                                                                                 \
    REFUSED(mz_router, "router_backward", router, stmt, mz_router_backward(k, 0, &a, s.workspace))
    BACK(a.dweight = NULL);
    BACK(a.aux_factor = 1);
    BACK((a.kind = MZ_ROUTER_RELU, a.token_begin = s.list, a.k = 0, a.aux_factor = 1,
          a.count = s.list));
    REFUSED(mz_router, "router_losses", router, a.kind = MZ_ROUTER_SOFTMAX,
            mz_router_losses(k, 0, &a, s.out, s.workspace));
}

static void check_updates(rig *r) {
    const scene s = make_scene(r);
    mz_kernels *k = r->kernels;
    const mz_update update = {.kind = MZ_UPDATE_SKEWADAM,
                              .matrices = 1,
                              .rows = 2,
                              .cols = 8,
                              .parameter = s.out,
                              .gradient = s.f,
                              .rate = 1,
                              .step = 1,
                              .momentum = true,
                              .factored = true,
                              .m = s.out,
                              .row = s.out,
                              .col = s.out};
#define UPDATE(stmt)                                                                               \
    REFUSED(mz_update, "update_step", update, stmt, mz_update_step(k, 0, &a, s.workspace))
    UPDATE(a.kind = 5);
    UPDATE(a.type = 2);
    UPDATE(a.rounding = 3);
    UPDATE(a.cols = 0);
    UPDATE(a.rows = -1);
    UPDATE(a.matrices = INT64_C(1) << 60);
    UPDATE(a.step = 0);
    UPDATE(a.m = NULL);
    UPDATE(a.row = NULL);
    UPDATE(a.factored = false); /* v is missing */
    UPDATE(a.kind = MZ_UPDATE_ADAMW);
    UPDATE(a.gradient = NULL);
    UPDATE((a.kind = MZ_UPDATE_MUON, a.newton_schulz = -1));
    UPDATE((a.kind = MZ_UPDATE_MUON, a.cols = 1));
    refused(r, &s, "workspace", "no workspace", mz_update_step(k, 0, &update, NULL));
    mz_update huge = update;
    huge.matrices = INT64_MAX;
    RIG_TRUE(r, mz_update_state_bytes(&huge) == 0 && mz_update_workspace(k, &huge) == 0);
    huge.rows = 0; /* nothing in it, but factors of every matrix */
    RIG_TRUE(r, mz_update_state_bytes(&huge) == 0 && mz_update_workspace(k, &huge) == 0);
    RIG_TRUE(r, mz_update_state_bytes(&update) == 4 * (2 * 8 + 2 + 8));
}

/* On CUDA rows are whole pieces of 16 bytes, whatever the engine, and a refusal is no failure: the
 * context goes on. */
static void check_pieces(rig *r) {
    const scene s = make_scene(r);
    mz_kernels *k = r->kernels;
    if (mz_kernels_backend(k) == MZ_BACKEND_HOST)
        return;
    const int64_t begin[] = {0, 2, 4};
    const mz_product_args product = {.groups = {s.begin, 2, 4, begin},
                                     .n = 8,
                                     .k = 8,
                                     .type = MZ_BF16,
                                     .a = s.f,
                                     .weight = s.pointers,
                                     .c = s.out};
    PRODUCT(a.n = 12);
    PRODUCT(a.k = 4);
    PRODUCT((a.k = 12, a.engine = MZ_ENGINE_VENDOR));
    PRODUCT((a.k = 12, a.engine = MZ_ENGINE_OWN_MMA));
    PRODUCT((a.op = MZ_PRODUCT_WGRAD, a.type = MZ_F32, a.gradient_type = MZ_BF16, a.k = 4));
    PRODUCT((a.type = MZ_F32, a.n = 2));
    PRODUCT(a.a = s.f + 1);
    PRODUCT(a.c = s.out + 2);
    const mz_expert_up up = {.groups = {s.begin, 2, 4, NULL},
                             .hidden = 8,
                             .intermediate = 8,
                             .type = MZ_BF16,
                             .x = s.f,
                             .weight = s.pointers,
                             .h = s.out};
    UP(a.hidden = 4);
    UP(a.intermediate = 12);
    UP(a.x = s.f + 1);
    UP(a.h = s.out + 1);
    UP(a.gate_up = s.out + 1);
    const mz_selection selection = {.score = s.f,
                                    .order = s.list,
                                    .begin = s.begin,
                                    .quota = s.list,
                                    .pairs = INT64_C(1) << 32,
                                    .experts = 2,
                                    .keep = (uint8_t *)s.out};
    SELECT((void)a);
    const mz_router router = {.kind = MZ_ROUTER_SOFTMAX,
                              .tokens = 2,
                              .experts = 1 << 20,
                              .k = 2,
                              .logits = s.f,
                              .expert = (int32_t *)(void *)s.out,
                              .weight = s.out,
                              .dweight = s.f,
                              .dlogits = s.out};
    ROUTER((void)a);
    /* What the run-time refuses is not reported again by what comes next. */
    void *memory = NULL;
    RIG_TRUE(r, mz_kernels_alloc(k, (size_t)1 << 50, &memory) == MZ_K_ENOMEM && !memory);
    const mz_norms norms = {MZ_F32, s.f, 2, 4, 4, s.out};
    RIG_OK(r, mz_row_norms(k, 0, &norms));
    RIG_OK(r, mz_kernels_sync(k, 0));
}

/* No arguments, or no place for an answer. */
static void check_absent(rig *r) {
    const scene s = make_scene(r);
    mz_kernels *k = r->kernels;
#define ABSENT(name, call) refused(r, &s, name, #call, call)
    ABSENT("row_norms", mz_row_norms(k, 0, NULL));
    ABSENT("row_dots", mz_row_dots(k, 0, NULL));
    ABSENT("score_pairs", mz_score_pairs(k, 0, NULL));
    ABSENT("group_pairs", mz_group_pairs(k, 0, NULL, s.workspace));
    ABSENT("select_pairs", mz_select_pairs(k, 0, NULL, s.workspace));
    ABSENT("pack_rows", mz_pack_rows(k, 0, NULL));
    ABSENT("unpack_rows", mz_unpack_rows(k, 0, NULL));
    ABSENT("combine_rows", mz_combine_rows(k, 0, NULL));
    ABSENT("grouped_gemm", mz_grouped_gemm(k, 0, NULL, s.workspace));
    ABSENT("expert_up", mz_expert_up_forward(k, 0, NULL, s.workspace));
    ABSENT("swiglu_forward", mz_swiglu_forward(k, 0, NULL));
    ABSENT("swiglu_backward", mz_swiglu_backward(k, 0, NULL));
    ABSENT("router_forward", mz_router_forward(k, 0, NULL, s.workspace));
    ABSENT("router_backward", mz_router_backward(k, 0, NULL, s.workspace));
    ABSENT("router_losses", mz_router_losses(k, 0, NULL, s.out, s.workspace));
    ABSENT("update_step", mz_update_step(k, 0, NULL, s.workspace));
    ABSENT("alloc", mz_kernels_alloc(k, 4, NULL));
    ABSENT("elapsed", mz_kernels_elapsed(k, 0, 0, NULL));
    RIG_TRUE(r, mz_group_pairs_workspace(k, NULL) == 0 && mz_select_workspace(k, NULL) == 0);
    RIG_TRUE(r, mz_grouped_gemm_workspace(k, NULL) == 0 && mz_expert_up_workspace(k, NULL) == 0);
    RIG_TRUE(r, mz_router_workspace(k, NULL) == 0 && mz_update_workspace(k, NULL) == 0);
    RIG_TRUE(r, mz_update_state_bytes(NULL) == 0);
    /* Tiles of what there is no product of. */
    RIG_TRUE(r, mz_kernels_up_tiles(k, 0).rows == 0 && mz_kernels_up_tiles(k, -4).rows == 0);
    RIG_TRUE(r, mz_kernels_up_tiles(k, INT64_MAX).rows == 0 && mz_kernels_tiles(k, 3).workers == 0);
}

/* No context at all. */
static void check_nobody(rig *r) {
    int64_t count = 1, begin[2];
    float value[4] = {0};
    void *memory = &memory;
    double seconds = 1;
    char message[80] = "";
    RIG_TRUE(r, mz_kernels_open(NULL, NULL, message, sizeof message) == MZ_K_EINVAL && *message);
    RIG_TRUE(r, strlen(mz_kernels_error(NULL)) > 8 && strlen(mz_kernels_describe(NULL)) > 8);
    RIG_TRUE(r, mz_kernels_failure(NULL) == MZ_K_EINVAL);
    RIG_TRUE(r, mz_kernels_backend(NULL) == MZ_BACKEND_HOST);
    RIG_TRUE(r, !mz_kernels_native_stream(NULL, 0));
    RIG_TRUE(r, mz_kernels_alloc(NULL, 1, &memory) == MZ_K_EINVAL && !memory);
    RIG_TRUE(r, mz_kernels_memory(NULL, NULL, NULL) == MZ_K_EINVAL);
    RIG_TRUE(r, mz_kernels_sync(NULL, 0) == MZ_K_EINVAL);
    RIG_TRUE(r, mz_kernels_copy(NULL, 0, MZ_COPY_IN, value, value, 4) == MZ_K_EINVAL);
    RIG_TRUE(r, mz_kernels_elapsed(NULL, 0, 0, &seconds) == MZ_K_EINVAL && seconds == 0);
    RIG_TRUE(r, mz_convert(NULL, 0, MZ_F32, value, MZ_F32, value, 1) == MZ_K_EINVAL);
    RIG_TRUE(r, mz_prefix_sums_workspace(NULL, 1) == 0);
    RIG_TRUE(r, mz_prefix_sums(NULL, 0, &count, 1, begin, NULL) == MZ_K_EINVAL);
    RIG_TRUE(r, mz_row_norms(NULL, 0, &(mz_norms){.x = value, .out = value}) == MZ_K_EINVAL);
    RIG_TRUE(r, mz_kernels_tiles(NULL, MZ_PRODUCT_FORWARD).workers == 0);
    mz_kernels_free(NULL, NULL);
    mz_kernels_close(NULL);
    mz_kernels *closed = NULL;
    mz_kernels_close(&closed);
}

/* Scratch that does not begin where it should. */
static void check_workspace(rig *r) {
    const scene s = make_scene(r);
    const mz_grouping grouping = {(int32_t *)(void *)s.list, 4,    2,
                                  (int64_t *)(void *)s.out,  NULL, NULL};
    RIG_TRUE(r, mz_group_pairs_workspace(r->kernels, &grouping) > 0);
    refused(r, &s, "aligned", "8 bytes on",
            mz_group_pairs(r->kernels, 0, &grouping, (char *)s.workspace + 8));
}

static void check_open(rig *r) {
    const mz_kernels_options bad[] = {{.streams = 0},
                                      {.streams = 17},
                                      {.streams = 1, .threads = -1},
                                      {.streams = 1, .threads = 1025},
                                      {.streams = 1, .backend = 9}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        mz_kernels *k = r->kernels;
        char message[200] = "";
        RIG_TRUE(r, mz_kernels_open(&bad[i], &k, message, sizeof message) == MZ_K_EINVAL);
        RIG_TRUE(r, !k && strlen(message) > 8 && !strchr(message, '\n'));
        RIG_TRUE(r, mz_kernels_open(&bad[i], &k, NULL, 0) == MZ_K_EINVAL);
        mz_kernels_close(&k);
    }
}

const check checks_of_arguments[] = {{"rows", check_rows},
                                     {"pairs", check_pairs},
                                     {"products", check_products},
                                     {"routers", check_routers},
                                     {"updates", check_updates},
                                     {"pieces", check_pieces},
                                     {"absent", check_absent},
                                     {"nobody", check_nobody},
                                     {"workspace", check_workspace},
                                     {"open", check_open},
                                     {NULL, NULL}};
