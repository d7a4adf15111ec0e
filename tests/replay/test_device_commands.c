/* Commands as they run where there is a GPU, on the emulated one: a calibration, a prediction with
 * its profile, a replay. The emulator takes a second for what a GPU does in some microseconds, so
 * of a calibration's operations those run that are small, once for each kind of size, and of a
 * replay's all but its probes; the others take the time of a slow device. All that any of them
 * names must lie in memory of the device. */
#include "analysis/cmd.h"
#include "kernels/backend.h"
#include "replay/cmd.h"
#include "sim/cluster/cluster.h"
#include "sim/model/optimizer.h"
#include "tests/replay/command.h"

#include <jansson.h>
#include <math.h>

/* ---- a device that is watched -------------------------------------------------------------------
 */

enum { BLOCKS_MOST = 256, SEEN_MOST = 1 << 14, KEY = 6 };

static struct {
    mz_backend_ops ops;
    const mz_backend_ops *real;
    struct {
        char *at;
        size_t bytes;
    } block[BLOCKS_MOST];
    int blocks, blocks_all, closed; /* live, ever, contexts */
    int64_t seen[SEEN_MOST][KEY];   /* of operations that ran: which one, its sizes */
    int64_t ran, skipped;
    bool once; /* an operation of each kind of size */
} device;

static mz_kstatus watched_alloc(mz_kernels *k, size_t bytes, void **memory) {
    const mz_kstatus status = device.real->alloc(k, bytes, memory);
    if (status != MZ_K_OK)
        return status;
    assert_true(device.blocks < BLOCKS_MOST);
    device.block[device.blocks].at = *memory;
    device.block[device.blocks++].bytes = bytes;
    device.blocks_all++;
    return status;
}

static void watched_free(mz_kernels *k, void *memory) {
    int i = 0;
    while (i < device.blocks && device.block[i].at != memory)
        i++;
    if (memory && i == device.blocks)
        fail_msg("memory is freed that is not there");
    if (memory)
        device.block[i] = device.block[--device.blocks];
    device.real->free(k, memory);
}

static void watched_close(mz_kernels *k) {
    assert_int_equal(device.blocks, 0);
    device.closed++;
    device.real->close(k);
}

/* [memory, memory + bytes) is within one live block. */
static void lies(const char *what, const void *memory, int64_t bytes) {
    const char *at = memory;
    for (int i = 0; bytes > 0 && i < device.blocks; i++)
        if (at >= device.block[i].at &&
            at + bytes <= device.block[i].at + (int64_t)device.block[i].bytes)
            return;
    if (bytes > 0)
        fail_msg("%s: %lld bytes are not the device's", what, (long long)bytes);
}

enum { SMALL_FLOPS = 1 << 20, PRODUCT = 1 }; /* the latter: first of a product's key */
static const double device_flops = 1e11, call_s = 2e-6;

/* Whether it is to run; if not, some time has passed. */
static bool runs(const int64_t key[KEY], double flops) {
    const bool small = flops <= SMALL_FLOPS;
    int64_t i = 0;
    while (device.once && i < device.ran && memcmp(device.seen[i], key, sizeof device.seen[i]) != 0)
        i++;
    if (!device.once && (small || key[0] != PRODUCT))
        return true;
    if (small && i == device.ran) {
        assert_true(device.ran < SEEN_MOST);
        memcpy(device.seen[device.ran++], key, sizeof device.seen[i]);
        return true;
    }
    device.skipped++;
    for (const double end = mz_now() + call_s + flops / device_flops; mz_now() < end;)
        continue;
    return false;
}

/* Products take whole tiles: of each operation some that differ in how many, not all sizes. */
enum { TILE = 128, PRODUCT_PARTS = 256 };

static int64_t whole_tiles(int64_t side) {
    return (side + TILE - 1) / TILE * TILE;
}

/* As an operation that moves values counts them: a product is PRODUCT_PARTS times as fast. */
static double tile_flops(const mz_groups *g, int64_t n, int64_t k) {
    const int64_t rows = g->groups * whole_tiles((g->rows_max + g->groups - 1) / g->groups);
    return 2.0 * (double)(rows * whole_tiles(n) * k) / PRODUCT_PARTS;
}

static mz_kstatus watched_product(mz_kernels *k, mz_kstream stream, const mz_product_args *a,
                                  void *workspace) {
    const int64_t rows = a->groups.rows_max, value = 2, groups = a->groups.groups;
    const int64_t key[KEY] = {PRODUCT, a->op, a->n > TILE, a->k > TILE, groups > 1};
    lies("ends of groups", a->groups.begin, (groups + 1) * (int64_t)sizeof *a->groups.begin);
    lies("weights", a->weight, groups * (int64_t)sizeof *a->weight);
    for (int64_t g = 0; g < groups; g++)
        lies("a weight", a->weight[g], a->n * a->k * value);
    lies("a", a->a, rows * (a->op == MZ_PRODUCT_FORWARD ? a->k : a->n) * value);
    lies("c", a->c, rows * (a->op == MZ_PRODUCT_FORWARD ? a->n : a->k) * value);
    lies("workspace", workspace, (int64_t)device.real->grouped_gemm_workspace(k, a));
    return runs(key, tile_flops(&a->groups, a->n, a->k))
               ? device.real->grouped_gemm(k, stream, a, workspace)
               : MZ_K_OK;
}

static mz_kstatus watched_up(mz_kernels *k, mz_kstream stream, const mz_expert_up *a,
                             void *workspace) {
    const int64_t rows = a->groups.rows_max, value = 2, groups = a->groups.groups;
    const int64_t key[KEY] = {2, a->hidden > TILE, a->intermediate > TILE};
    lies("ends of groups", a->groups.begin, (groups + 1) * (int64_t)sizeof *a->groups.begin);
    lies("weights", a->weight, groups * (int64_t)sizeof *a->weight);
    for (int64_t g = 0; g < groups; g++)
        lies("a weight", a->weight[g], 2 * a->hidden * a->intermediate * value);
    lies("x", a->x, rows * a->hidden * value);
    lies("gate and up", a->gate_up, a->gate_up ? 2 * rows * a->intermediate * value : 0);
    lies("h", a->h, rows * a->intermediate * value);
    lies("norms", a->norm2, a->norm2 ? rows * (int64_t)sizeof *a->norm2 : 0);
    lies("workspace", workspace, (int64_t)device.real->expert_up_workspace(k, a));
    return runs(key, tile_flops(&a->groups, 2 * a->intermediate, a->hidden))
               ? device.real->expert_up_forward(k, stream, a, workspace)
               : MZ_K_OK;
}

static mz_kstatus watched_update(mz_kernels *k, mz_kstream stream, const mz_update *a,
                                 void *workspace) {
    const int64_t values = a->matrices * a->rows * a->cols;
    const int64_t key[KEY] = {3, a->kind, values, a->factored, a->momentum};
    const double products = a->kind == MZ_UPDATE_MUON ? 100 * (double)a->rows : 20;
    lies("parameters", a->parameter, values * 2);
    lies("gradients", a->gradient, values * 2);
    lies("momentum", a->m, a->m ? values * 4 : 0);
    lies("second moment", a->v, a->v ? values * 4 : 0);
    lies("rows of it", a->row, a->row ? a->matrices * a->rows * 4 : 0);
    lies("columns of it", a->col, a->col ? a->matrices * a->cols * 4 : 0);
    lies("factor of gradients", a->grad_scale, a->grad_scale ? 4 : 0);
    lies("workspace", workspace, (int64_t)device.real->update_workspace(k, a));
    return runs(key, (double)values * products) ? device.real->update_step(k, stream, a, workspace)
                                                : MZ_K_OK;
}

/* Seconds of the emulator for a value that is moved, in FLOPs. */
enum { MOVED = 40 };

/* How many tokens there are, its arguments do not say: as many as the rows' pairs have at least, or
 * one. */
static mz_kstatus watched_pack(mz_kernels *k, mz_kstream stream, const mz_pack *a) {
    const int64_t key[KEY] = {4, a->rows, a->hidden, a->k, a->scale != NULL};
    lies("pairs of rows", a->row_pair, a->rows * (int64_t)sizeof *a->row_pair);
    lies("rows", a->out, a->rows * a->hidden * 2);
    lies("x", a->x, (a->token ? 1 : (a->rows + a->k - 1) / a->k) * a->hidden * 2);
    lies("tokens of pairs", a->token, a->token ? a->rows * (int64_t)sizeof *a->token : 0);
    lies("factors of pairs", a->scale, a->scale ? a->rows * (int64_t)sizeof *a->scale : 0);
    lies("how many rows", a->rows_used, a->rows_used ? (int64_t)sizeof *a->rows_used : 0);
    return runs(key, MOVED * (double)(a->rows * a->hidden)) ? device.real->pack_rows(k, stream, a)
                                                            : MZ_K_OK;
}

static mz_kstatus watched_combine(mz_kernels *k, mz_kstream stream, const mz_combine *a) {
    const int64_t key[KEY] = {5, a->tokens, a->hidden, a->k, a->scale != NULL};
    lies("positions", a->position, a->tokens * a->k * (int64_t)sizeof *a->position);
    lies("tokens", a->out, a->tokens * a->hidden * 2);
    lies("rows", a->row, a->row ? a->hidden * 2 : 0); /* the positions say how many */
    lies("factors of pairs", a->scale, a->scale ? a->tokens * a->k * 4 : 0);
    lies("pairs of tokens", a->token_begin, a->token_begin ? (a->tokens + 1) * 8 : 0);
    return runs(key, MOVED * (double)(a->tokens * a->k * a->hidden))
               ? device.real->combine_rows(k, stream, a)
               : MZ_K_OK;
}

static mz_kstatus watched_norms(mz_kernels *k, mz_kstream stream, const mz_norms *a) {
    const int64_t key[KEY] = {6, a->rows, a->cols};
    lies("x", a->x, a->rows * a->cols * 2);
    lies("norms", a->out, a->rows * (int64_t)sizeof *a->out);
    return runs(key, MOVED * (double)(a->rows * a->cols)) ? device.real->row_norms(k, stream, a)
                                                          : MZ_K_OK;
}

static mz_kstatus watched_score(mz_kernels *k, mz_kstream stream, const mz_score_args *a) {
    const int64_t key[KEY] = {7, a->pairs};
    lies("weights of pairs", a->weight, a->pairs * (int64_t)sizeof *a->weight);
    lies("norms of gradients", a->grad_norm2, a->grad_norm2 ? a->tokens * 4 : 0);
    lies("norms of inputs", a->input_norm2, a->input_norm2 ? a->tokens * 4 : 0);
    lies("norms of h", a->hidden_norm2, a->hidden_norm2 ? a->pairs * 4 : 0);
    lies("pairs of tokens", a->token_begin, a->token_begin ? (a->tokens + 1) * 8 : 0);
    lies("scores", a->score, a->pairs * (int64_t)sizeof *a->score);
    return runs(key, MOVED * (double)a->pairs) ? device.real->score_pairs(k, stream, a) : MZ_K_OK;
}

static mz_kstatus watched_group(mz_kernels *k, mz_kstream stream, const mz_grouping *a,
                                void *workspace) {
    const int64_t key[KEY] = {8, a->pairs, a->experts};
    lies("experts of pairs", a->expert, a->pairs * (int64_t)sizeof *a->expert);
    lies("order", a->order, a->order ? a->pairs * (int64_t)sizeof *a->order : 0);
    lies("ends of groups", a->begin, a->begin ? (a->experts + 1) * (int64_t)sizeof *a->begin : 0);
    lies("counts", a->count, a->count ? a->experts * (int64_t)sizeof *a->count : 0);
    lies("workspace", workspace, (int64_t)device.real->group_pairs_workspace(k, a));
    return runs(key, MOVED * (double)a->pairs) ? device.real->group_pairs(k, stream, a, workspace)
                                               : MZ_K_OK;
}

static mz_kstatus watched_select(mz_kernels *k, mz_kstream stream, const mz_selection *a,
                                 void *workspace) {
    const int64_t key[KEY] = {9, a->pairs, a->experts};
    lies("scores", a->score, a->pairs * (int64_t)sizeof *a->score);
    lies("order", a->order, a->pairs * (int64_t)sizeof *a->order);
    lies("ends of groups", a->begin, (a->experts + 1) * (int64_t)sizeof *a->begin);
    lies("quotas", a->quota, a->experts * (int64_t)sizeof *a->quota);
    lies("pairs kept", a->kept, a->kept ? a->pairs * (int64_t)sizeof *a->kept : 0);
    lies("ends of those", a->kept_begin, a->kept_begin ? (a->experts + 1) * 8 : 0);
    lies("what is kept", a->keep, a->keep ? a->pairs : 0);
    lies("thresholds", a->threshold, a->threshold ? a->experts * 4 : 0);
    lies("weights of pairs", a->weight, a->weight ? a->pairs * 4 : 0);
    lies("those of a sample", a->scaled, a->scaled ? a->pairs * 4 : 0);
    lies("workspace", workspace, (int64_t)device.real->select_workspace(k, a));
    return runs(key, MOVED * (double)a->pairs) ? device.real->select_pairs(k, stream, a, workspace)
                                               : MZ_K_OK;
}

static void swiglu_lies(const mz_swiglu *a) {
    const int64_t values = a->rows * a->intermediate;
    lies("gate and up", a->gate_up, 2 * values * 2);
    lies("their gradient", a->dgate_up, a->dgate_up ? 2 * values * 2 : 0);
    lies("gradient of h", a->dh, a->dh ? values * 2 : 0);
    lies("h", a->h, a->h ? values * 2 : 0);
    lies("norms", a->norm2, a->norm2 ? a->rows * 4 : 0);
    lies("factors of rows", a->scale, a->scale ? a->rows * 4 : 0);
    lies("dots of rows", a->dot, a->dot ? a->rows * 4 : 0);
}

static mz_kstatus watched_swiglu_forward(mz_kernels *k, mz_kstream stream, const mz_swiglu *a) {
    swiglu_lies(a);
    return device.real->swiglu_forward(k, stream, a);
}

static mz_kstatus watched_swiglu_backward(mz_kernels *k, mz_kstream stream, const mz_swiglu *a) {
    const int64_t values = a->rows * a->intermediate, key[KEY] = {10, a->rows, a->intermediate};
    swiglu_lies(a);
    return runs(key, MOVED * (double)values) ? device.real->swiglu_backward(k, stream, a) : MZ_K_OK;
}

static mz_kstatus watched_copy(mz_kernels *k, mz_kstream stream, mz_copy kind, void *to,
                               const void *from, size_t bytes) {
    lies("what is copied to", to, kind == MZ_COPY_OUT ? 0 : (int64_t)bytes);
    lies("what is copied", from, kind == MZ_COPY_IN ? 0 : (int64_t)bytes);
    return device.real->copy(k, stream, kind, to, from, bytes);
}

static mz_kstatus watched_zero(mz_kernels *k, mz_kstream stream, void *memory, size_t bytes) {
    lies("what is cleared", memory, (int64_t)bytes);
    return device.real->zero(k, stream, memory, bytes);
}

static mz_kstatus watched_convert(mz_kernels *k, mz_kstream stream, mz_dtype to_type, void *to,
                                  mz_dtype from_type, const void *from, int64_t n) {
    lies("what is converted", from, n * (from_type == MZ_F32 ? 4 : 2));
    lies("what to", to, n * (to_type == MZ_F32 ? 4 : 2));
    return device.real->convert(k, stream, to_type, to, from_type, from, n);
}

static mz_kstatus watched_arrange(mz_kernels *k, mz_kstream stream, const mz_segment *segment,
                                  int64_t segments, const int64_t *in, int64_t *out) {
    lies("segments", segment, segments * (int64_t)sizeof *segment);
    lies("what is arranged", in, segments > 0 ? (int64_t)sizeof *in : 0); /* they say how much */
    lies("where to", out, segments > 0 ? (int64_t)sizeof *out : 0);
    return device.real->arrange(k, stream, segment, segments, in, out);
}

static mz_kstatus watched_invert(mz_kernels *k, mz_kstream stream, const int64_t *row_pair,
                                 int64_t rows, int64_t pairs, int64_t *position) {
    lies("pairs of rows", row_pair, rows * (int64_t)sizeof *row_pair);
    lies("positions", position, pairs * (int64_t)sizeof *position);
    return device.real->invert(k, stream, row_pair, rows, pairs, position);
}

static mz_kstatus watched_unpack(mz_kernels *k, mz_kstream stream, const mz_unpack *a) {
    const int64_t value = a->type == MZ_F32 ? 4 : 2;
    lies("positions", a->position, a->pairs * (int64_t)sizeof *a->position);
    lies("rows", a->row, a->row ? a->hidden * value : 0); /* the positions say how many */
    lies("rows of pairs", a->out, a->pairs * a->hidden * value);
    return device.real->unpack_rows(k, stream, a);
}

mz_kstatus __real_mz_kernels_open(const mz_kernels_options *options, mz_kernels **kernels,
                                  char *message, size_t size);
mz_kstatus __wrap_mz_kernels_open(const mz_kernels_options *options, mz_kernels **kernels,
                                  char *message, size_t size);

mz_kstatus __wrap_mz_kernels_open(const mz_kernels_options *options, mz_kernels **kernels,
                                  char *message, size_t size) {
    const mz_kstatus status = __real_mz_kernels_open(options, kernels, message, size);
    if (status != MZ_K_OK)
        return status;
    assert_int_equal(mz_kernels_backend(*kernels), MZ_BACKEND_CUDA);
    device.real = (*kernels)->ops;
    device.ops = *device.real;
    device.ops.alloc = watched_alloc;
    device.ops.free = watched_free;
    device.ops.close = watched_close;
    device.ops.grouped_gemm = watched_product;
    device.ops.expert_up_forward = watched_up;
    device.ops.update_step = watched_update;
    device.ops.pack_rows = watched_pack;
    device.ops.combine_rows = watched_combine;
    device.ops.row_norms = watched_norms;
    device.ops.score_pairs = watched_score;
    device.ops.group_pairs = watched_group;
    device.ops.select_pairs = watched_select;
    device.ops.copy = watched_copy;
    device.ops.zero = watched_zero;
    device.ops.convert = watched_convert;
    device.ops.arrange = watched_arrange;
    device.ops.invert = watched_invert;
    device.ops.unpack_rows = watched_unpack;
    device.ops.swiglu_forward = watched_swiglu_forward;
    device.ops.swiglu_backward = watched_swiglu_backward;
    (*kernels)->ops = &device.ops;
    return status;
}

/* ---- commands ----------------------------------------------------------------------------------
 */

/* The JSON it prints, NULL if it prints none; caller decrefs. */
static json_t *run_line(command_function run, const char *line) {
    command_line c;
    mz_err err = {0};
    command_open(&c, line);
    assert_ok(run(&c.app, c.argc, c.argv, &err), &err);
    command_close(&c);
    json_t *json = json_loads(c.text, 0, NULL);
    free(c.text);
    return json;
}

/* Every kind that has kernels, each sample of a time that a device could have. */
static void check_samples(const mz_measured *m) {
    const int unmeasured = MZ_WORK_UPDATE + MZ_RULE_GALORE; /* no kernels from here on */
    assert_string_equal(m->backend, "cuda");
    assert_int_equal(m->workers, 4);
    for (int w = 0; w < MZ_WORKS; w++) {
        const mz_fit *fit = &m->fit[w];
        if ((w >= unmeasured && w < MZ_WORK_FORWARD) || w == MZ_WORK_EXCHANGE) /* one process */
            continue;
        if (fit->samples == 0)
            fail_msg("%s was not measured", mz_work_name((mz_work)w));
        for (int32_t i = 0; i < fit->samples; i++)
            if (!(fit->sample[i].seconds > 0 && fit->sample[i].seconds < 60))
                fail_msg("%s: %g s", mz_work_name((mz_work)w), fit->sample[i].seconds);
    }
}

static void a_calibration_that_a_prediction_takes(void **state) {
    mz_cluster *cluster = NULL;
    mz_err err;
    device.once = true;
    json_decref(run_line(mz_cmd_calibrate, "calibrate -q --backend cuda --repeats 3 --pool 1MiB "
                                           "--ranks 8 -o device.json"));
    device.once = false;
    print_message("%lld operations ran, %lld did not\n", (long long)device.ran,
                  (long long)device.skipped);
    assert_true(device.ran > 50 && device.blocks_all > 10);
    assert_int_equal(device.closed, 1);
    assert_ok(mz_cluster_load("device.json:1x8", MZ_SOURCE_DIR, &cluster, &err), &err);
    assert_non_null(cluster->device.measured);
    check_samples(cluster->device.measured);
    mz_cluster_free(&cluster);
    json_t *json =
        run_line(mz_cmd_sim, "sim -q --json --scope layers -t " MZ_SOURCE_DIR
                             "/traces/example/olmoe-8r.h5 -m olmoe-1b-7b --ranks 8 "
                             "-p static,lrmoe[keep=0.5] -c device.json:1x8 --hidden 64 --inter 32 "
                             "--layers 1 --steps 1 --tokens-per-rank 16");
    const json_t *runs = json_object_get(json, "runs");
    assert_int_equal(json_array_size(runs), 2);
    for (size_t i = 0; i < json_array_size(runs); i++) {
        const double s = json_number_value(json_object_get(json_array_get(runs, i), "moe_time_s"));
        assert_true(isfinite(s) && s > 0 && s < 60);
    }
    json_decref(json);
}

/* What the device says is in use covers the buffers; both are of the process's end of steps. */
static void a_replay_tells_device_memory(void **state) {
    json_t *json =
        run_line(mz_cmd_replay, "replay -q --json --backend cuda -t " MZ_SOURCE_DIR
                                "/traces/example/olmoe-8r.h5 -m olmoe-1b-7b --ranks 8 "
                                "-p lrmoe[keep=0.5] --hidden 64 --inter 32 --layers 1 --steps 1 "
                                "--warmup 0 --repeat 1 --tokens-per-rank 16 --verify off");
    const json_t *settings = json_object_get(json, "settings");
    const int64_t reserved = json_integer_value(json_object_get(settings, "reserved_bytes"));
    const json_t *used = json_object_get(settings, "device_bytes");
    assert_true(json_is_integer(used) && reserved > 0);
    assert_true(json_integer_value(used) >= reserved);
    assert_true(json_integer_value(used) < INT64_C(8) << 30);
    assert_int_equal(device.blocks, 0);
    json_decref(json);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_calibration_that_a_prediction_takes),
        cmocka_unit_test(a_replay_tells_device_memory),
    };
    return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
