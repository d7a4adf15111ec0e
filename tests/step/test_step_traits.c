/* What policies state about themselves (mz_policy_traits, moves) and what it does to a step; times
 * added up by hand. */
#include "tests/step/tiny.h"

#include <math.h>

static const double row_bytes = 2 * TINY_H, inside = 1e10, outside = 1e9, memory = 1e11;

/* 64 pairs of 4 experts: 16 each. */
static const int64_t even[4 * TINY_EXPERTS] = {16, 16, 16, 16, 16, 16, 16, 16,
                                               16, 16, 16, 16, 16, 16, 16, 16};
/* Rows stay inside the domains {0, 1} and {2, 3}: transfers between them meet nobody. */
static const int64_t apart[4 * TINY_EXPERTS] = {16, 16, 0,  0,  16, 16, 0,  0,
                                                0,  0,  16, 16, 0,  0,  16, 16};

static double forward_time(double rows) {
    return tiny_gemm(rows, 2 * TINY_I, TINY_H) + tiny_gemm(rows, TINY_H, TINY_I) +
           rows * 2 * (2 * TINY_I + TINY_I) / memory;
}

static double backward_time(double rows) {
    return 2 * (tiny_gemm(rows, 2 * TINY_I, TINY_H) + tiny_gemm(rows, TINY_H, TINY_I)) +
           rows * 2 * (TINY_I + 4 * TINY_I) / memory;
}

static double router(double tokens, double products) {
    return products * tiny_gemm(tokens, TINY_EXPERTS, TINY_H) +
           tokens * (8 * TINY_EXPERTS + 16 * 2) / memory;
}

/* One step; layer `only` alone has the plan's moves (-1: all). */
static mz_step_outcome run_moves(tiny *t, int32_t micro_batches, int32_t only) {
    const mz_step_head head = {0, micro_batches, t->model.moe_layers, t->tokens};
    const int32_t moves = t->plan->moves;
    mz_step *step;
    mz_step_outcome o;
    mz_err err;
    assert_ok(
        mz_step_create(&t->model, &t->cluster, &t->options, "static", &t->traits, &step, &err),
        &err);
    assert_ok(mz_step_begin(step, &head, &err), &err);
    for (int32_t b = 0; b < micro_batches; b++)
        for (int32_t l = 0; l < t->model.moe_layers; l++)
            for (int32_t g = 0; g < t->cluster.ranks / t->ep; g++) {
                t->plan->moves = only < 0 || only == l ? moves : 0;
                assert_ok(mz_step_add_call(step, g, b, l, &t->load, NULL, t->plan, &err), &err);
            }
    assert_ok(mz_step_finish(step, &o, &err), &err);
    mz_step_free(&step);
    t->plan->moves = moves;
    return o;
}

/* ---- moves ---- */

/* Three micro-batches: gradients of each, or those summed over all; fresh weights once. */
static void test_once_per_step(void **state) {
    tiny t;
    tiny_make(&t, 2, 2, "m");
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const double base = tiny_run(&t, 3).time_s, sent = 100000 / inside, move = sent + 1e-6;
    t.plan->moves = 1;
    t.plan->move[0] =
        (mz_move){MZ_MOVE_GRADIENTS, MZ_MOVE_REDUCE, MZ_HIDE_NOTHING, 0, 0, 1, 100000, 0};
    mz_step_outcome o = tiny_run(&t, 3);
    assert_int_equal(o.transfer_bytes, 300000);
    assert_close(o.time_s - base, 3 * sent); /* its latency beside that of the combine */
    t.plan->move[0].phase = MZ_MOVE_REDUCE_STEP;
    o = tiny_run(&t, 3);
    assert_int_equal(o.transfer_bytes, 100000);
    assert_close(o.time_s - base, sent);
    assert_true(o.phase_s[tiny_phase("replica_reduce")] > sent);
    t.plan->move[0].phase = MZ_MOVE_STEP;
    o = tiny_run(&t, 3);
    assert_int_equal(o.transfer_bytes, 100000);
    assert_close(o.time_s - base, move);
    tiny_free(&t);
}

/* Summed gradients hide under the layers whose backward is still to come: two layers' transfers
 * begin with the end of the last layer's products in the last micro-batch. */
static void test_summed_gradients_hide(void **state) {
    const double move = 300000 / outside + 5e-6, rows = 16 * row_bytes / inside + 1e-6;
    const double after = rows + router(16, 2) + rows + backward_time(32) + rows + router(16, 2);
    for (int32_t micro = 1; micro <= 3; micro++) {
        tiny t;
        tiny_make(&t, 4, 2, "mm");
        tiny_load(&t, apart);
        tiny_static_plan(&t);
        const double base = tiny_run(&t, micro).time_s;
        t.plan->move[0] = (mz_move){.phase = MZ_MOVE_REDUCE_STEP,
                                    .hide = MZ_HIDE_LAYERS,
                                    .src = 0,
                                    .dst = 2,
                                    .bytes = 300000};
        t.plan->moves = 1;
        const mz_step_outcome o = tiny_run(&t, micro);
        assert_int_equal(o.transfer_bytes, 2 * 300000);
        assert_close(o.time_s - base, 2 * move - after);
        tiny_free(&t);
    }
}

/* A plan that lasts: decided in the first micro-batch of every second step. Its change is made
 * there, in whichever phase; what it moves for every call or step it moves every time. */
static void test_lasting_plan(void **state) {
    tiny t;
    tiny_make(&t, 2, 2, "m");
    t.options.effects.planner = true;
    t.traits.interval = 2;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const mz_move moves[] = {
        {.phase = MZ_MOVE_STEP, .src = 0, .dst = 1, .bytes = 1, .change = true},
        {.phase = MZ_MOVE_FORWARD, .src = 0, .dst = 1, .bytes = 10, .change = true},
        {.phase = MZ_MOVE_STEP, .src = 0, .dst = 1, .bytes = 100},
        {.phase = MZ_MOVE_REDUCE_STEP, .src = 0, .dst = 1, .bytes = 1000},
        {.phase = MZ_MOVE_BACKWARD, .src = 0, .dst = 1, .bytes = 10000},
    };
    memcpy(t.plan->move, moves, sizeof moves);
    t.plan->moves = 5;
    const mz_step_head head = {0, 3, 1, t.tokens};
    mz_step *step;
    mz_step_outcome o[3];
    mz_err err;
    assert_ok(mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
              &err);
    for (int i = 0; i < 3; i++) {
        assert_ok(mz_step_begin(step, &head, &err), &err);
        for (int32_t b = 0; b < 3; b++)
            assert_ok(mz_step_add_call(step, 0, b, 0, &t.load, NULL, t.plan, &err), &err);
        assert_ok(mz_step_finish(step, &o[i], &err), &err);
        assert_int_equal(o[i].transfer_bytes, 31100 + (i == 1 ? 0 : 11));
        assert_close(o[i].planner_s, i == 1 ? 0 : 7e-6);
    }
    mz_step_free(&step);
    tiny_free(&t);
}

/* Restored two layers ahead, a transfer of the last layer has one more layer's time to hide under;
 * in backward that of the first. The layer between: router, counts, rows there and back. */
static void test_prefetch(void **state) {
    const double rows = 16 * row_bytes / inside + 1e-6, counts = 4 * 2 / outside + 5e-6;
    const double layer = router(16, 1) + counts + rows + forward_time(32) + rows;
    const double back = rows + backward_time(32) + rows + router(16, 2);
    tiny t;
    tiny_make(&t, 4, 2, "mmm");
    tiny_load(&t, apart);
    tiny_static_plan(&t);
    const double base = tiny_run(&t, 1).time_s;
    t.plan->move[0] = (mz_move){
        .phase = MZ_MOVE_FORWARD, .hide = MZ_HIDE_LAYERS, .src = 0, .dst = 2, .bytes = 300000};
    t.plan->moves = 1;
    t.options.network = MZ_NETWORK_FLOW; /* counts share the link instead of queueing */
    t.traits.prefetch = 1;
    double one = run_moves(&t, 1, 2).time_s;
    t.traits.prefetch = 2;
    double two = run_moves(&t, 1, 2).time_s;
    assert_near(one - two, layer, 0.1e-6);
    assert_true(two > base + 1e-4);
    t.options.network = MZ_NETWORK_PORT;
    t.plan->move[0].phase = MZ_MOVE_BACKWARD;
    two = run_moves(&t, 1, 0).time_s;
    assert_close(two - base, 300000 / outside + 5e-6 - 2 * back - rows);
    t.traits.prefetch = 0;
    one = run_moves(&t, 1, 0).time_s;
    assert_close(one - base, 300000 / outside + 5e-6 - back - rows);
    tiny_free(&t);
}

/* ZeRO 3 over two groups of two: what restores experts from its group's shards has no gather over
 * the copies in every pass, but these are brought up to date once. */
static void test_sharded_weights(void **state) {
    const double experts = 2.0 * 3 * TINY_I * TINY_H * TINY_EXPERTS;
    tiny t;
    tiny_make(&t, 4, 4, "m");
    t.options.ep = 2;
    t.options.zero = 3;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const mz_step_outcome plain = tiny_run(&t, 1);
    t.traits.sharded_weights = t.traits.sharded_optimizer = true;
    t.traits.prefetch = 1;
    t.plan->moves = 4;
    for (int i = 0; i < 4; i++) /* both experts of each rank, in forward and in backward */
        t.plan->move[i] = (mz_move){.phase = i < 2 ? MZ_MOVE_FORWARD : MZ_MOVE_BACKWARD,
                                    .hide = MZ_HIDE_LAYERS,
                                    .src = MZ_EVERY_RANK,
                                    .dst = i % 2,
                                    .bytes = (int64_t)experts / 2};
    const mz_step_outcome sharded = tiny_run(&t, 1);
    /* 4 ranks sent half of their 2 experts twice; now once, and half of the restored ones stay. */
    const double gathers = 4 * experts / 2 / 2, restored = 2 * 4 * experts / 2 / 2;
    assert_int_equal(sharded.transfer_bytes, (int64_t)restored);
    assert_close((double)(sharded.sent_bytes - plain.sent_bytes), restored - gathers);
    tiny_free(&t);
}

/* ZeRO 3: what a policy moves in a layer waits for a quarter of the next layer's gather at most,
 * which takes as long as before but for the rows in between. Two ranks, 2^20 values more per layer:
 * 105 us a gather. */
static void test_moves_beside_gathers(void **state) {
    tiny t;
    tiny_make(&t, 2, 2, "mm");
    t.options.zero = 3;
    for (int64_t i = 0; i < t.model.tensors; i++)
        if (strcmp(t.tensor[i].name, "attention") == 0)
            t.tensor[i].rows += (1 << 20) / TINY_H;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const double layer = 2.0 * (4 * TINY_H * TINY_H + TINY_EXPERTS * TINY_H + (1 << 20));
    const double ends = 2.0 * 2 * TINY_VOCAB * TINY_H, gather = layer / 2 / inside + 1e-6;
    const int gathers = tiny_phase("parameter_gather"), moved = tiny_phase("weight_move");
    mz_step_outcome o = tiny_run(&t, 1);
    /* and the rows of a layer, sent in between */
    assert_near(o.phase_s[gathers], 4 * gather + ends / 2 / inside + 1e-6,
                8 * 32 * row_bytes / inside);
    t.plan->move[0] = (mz_move){.phase = MZ_MOVE_FORWARD, .src = 0, .dst = 1, .bytes = 10000};
    t.plan->moves = 1;
    o = run_moves(&t, 1, 0);
    const double move = 10000 / inside + 1e-6;
    assert_true(o.phase_s[moved] > move && o.phase_s[moved] < move + gather / 4);
    tiny_free(&t);
}

/* 8 ms of weights for the second layer, on their way since the first began, in 16 pieces: each of
 * two layers' count exchanges, of microseconds, waits for two pieces at most, not for the transfer.
 */
static void test_transfers_let_counts_in(void **state) {
    tiny t;
    tiny_make(&t, 4, 2, "mm");
    tiny_load(&t, apart);
    tiny_static_plan(&t);
    t.plan->move[0] = (mz_move){.phase = MZ_MOVE_FORWARD,
                                .hide = MZ_HIDE_LAYERS,
                                .src = 0,
                                .dst = 2,
                                .bytes = (int64_t)(8e-3 * outside)};
    t.plan->moves = 1;
    const mz_step_outcome o = tiny_run(&t, 1);
    const double piece = 8e-3 / 16;
    assert_true(o.phase_s[tiny_phase("count_exchange")] < 2 * 2 * piece);
    assert_true(o.phase_s[tiny_phase("weight_move")] > 2 * 8e-3);
    assert_int_equal(o.transfer_bytes, 2 * t.plan->move[0].bytes);
    tiny_free(&t);
}

/* Muon multiplies matrices: the update takes its bytes and its FLOPs, behind the gradient norm. */
static void test_update_products(void **state) {
    mz_optimizer muon;
    mz_err err;
    tiny t;
    double bytes = 0, flops = 0, gradients = 0;
    tiny_make(&t, 1, 1, "m");
    assert_ok(mz_optimizer_parse("muon", &muon, &err), &err);
    t.options.optimizer = &muon;
    t.options.effects.other_work = true;
    t.options.zero = 0;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    for (int64_t i = 0; i < t.model.tensors; i++) {
        const mz_tensor *x = &t.tensor[i];
        const mz_update_cost u = mz_optimizer_update(&muon, x, x->count, 1, MZ_TEMPORARIES_FUSED);
        bytes += u.traffic_bytes;
        flops += u.flops;
        gradients += (double)(x->rows * x->cols * x->count * x->bytes_per_value);
    }
    assert_true(flops > 0);
    const mz_step_outcome o = tiny_run(&t, 1);
    assert_close(o.phase_s[tiny_phase("optimizer")], (bytes + gradients) / memory + flops / 1e12);
    tiny_free(&t);
}

/* Replicas with optimizer state of their own: what is updated are those that there are, while state
 * lies in every slot. Two slots a rank beside its two experts; one copy, on rank 1. */
static void test_update_of_replicas(void **state) {
    static const int32_t expert[] = {0, 0, 1, 2, 3}, rank[] = {0, 1, 0, 1, 1};
    static const int32_t alone[] = {0, 1, 2, 3}, home[] = {0, 0, 1, 1};
    static const int64_t pairs[] = {16, 0, 16, 16, 16, 16, 0, 16, 16, 16};
    static const int64_t at_home[] = {16, 16, 16, 16, 16, 16, 16, 16};
    const int update = tiny_phase("optimizer");
    mz_optimizer adamw;
    mz_err err;
    tiny t;
    double one_expert = 0;
    tiny_make(&t, 2, 2, "m");
    assert_ok(mz_optimizer_parse("adamw", &adamw, &err), &err);
    t.options.optimizer = &adamw;
    t.options.effects.other_work = true;
    t.options.zero = 0;
    for (int64_t i = 0; i < t.model.tensors; i++)
        if (t.tensor[i].tier == MZ_TIER_EXPERT)
            one_expert += mz_optimizer_update(&adamw, &t.tensor[i], t.tensor[i].count / 4, 1,
                                              MZ_TEMPORARIES_FUSED)
                              .traffic_bytes;
    tiny_load(&t, even);
    tiny_plan(&t, 4, alone, home, at_home, NULL);
    const double none = tiny_run(&t, 1).phase_s[update];
    t.traits.slots = 4;
    t.traits.replica_memory = MZ_REPLICAS_RESIDENT;
    t.traits.replica_optimizer = true;
    tiny_plan(&t, 4, alone, home, at_home, NULL);
    assert_close(tiny_run(&t, 1).phase_s[update], none);
    tiny_plan(&t, 5, expert, rank, pairs, NULL);
    assert_true(one_expert > 0);
    assert_close(tiny_run(&t, 1).phase_s[update], none + one_expert / memory);
    tiny_free(&t);
}

/* ---- planning ---- */

static mz_step_outcome planned(tiny *t, int32_t steps) {
    const mz_step_head head = {0, 2, 2, t->tokens};
    mz_step *step;
    mz_step_outcome o;
    mz_err err;
    assert_ok(
        mz_step_create(&t->model, &t->cluster, &t->options, "static", &t->traits, &step, &err),
        &err);
    for (int i = 0; i < steps; i++) {
        assert_ok(mz_step_begin(step, &head, &err), &err);
        for (int32_t c = 0; c < 4; c++)
            assert_ok(mz_step_add_call(step, 0, c / 2, c % 2, &t->load, NULL, t->plan, &err), &err);
        assert_ok(mz_step_finish(step, &o, &err), &err);
    }
    mz_step_free(&step);
    return o;
}

/* Two layers, two micro-batches; decide takes 7 us, a solver in route 3 us. */
static void test_planning(void **state) {
    mz_planner_cost table[] = {{"static", 7e-6, 0}, {"static.route", 3e-6, 0}};
    tiny t;
    tiny_make(&t, 2, 2, "mm");
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const double free = planned(&t, 1).time_s;
    t.cluster.planner = table;
    t.cluster.planners = 2;
    t.options.effects.planner = true;
    mz_step_outcome o = planned(&t, 1);
    assert_close(o.planner_s, 4 * 7e-6);
    assert_close(o.time_s - free, 4 * 7e-6);
    t.traits.route_plans = true;
    o = planned(&t, 1);
    assert_close(o.planner_s, 4 * 10e-6);
    assert_close(o.time_s - free, 4 * 10e-6);
    t.traits.plan_hidden = true;
    o = planned(&t, 1);
    assert_close(o.planner_s, 4 * 3e-6);
    assert_close(o.planner_hidden_s, 4 * 7e-6);
    assert_close(o.time_s - free, 4 * 3e-6);
    t.traits.plan_hidden = false;
    t.traits.interval = 3; /* once per layer, in the first micro-batch of the first step */
    assert_close(planned(&t, 1).planner_s, 2 * 7e-6 + 4 * 3e-6);
    assert_close(planned(&t, 3).planner_s, 4 * 3e-6);
    assert_close(planned(&t, 4).planner_s, 2 * 7e-6 + 4 * 3e-6);
    t.traits.interval = 1;
    t.traits.route_plans = false;
    t.traits.planner_stated = true; /* whatever the profile has */
    t.traits.planner_seconds = 2e-6;
    t.cluster.planners = 0;
    assert_close(planned(&t, 1).planner_s, 4 * 2e-6);
    tiny_free(&t);
}

static void test_route_needs_an_entry(void **state) {
    tiny t;
    mz_step *step;
    mz_err err;
    tiny_make(&t, 2, 2, "m");
    t.traits.route_plans = true;
    assert_fails(mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
                 MZ_EINPUT, "static.route", &err);
    tiny_free(&t);
}

/* ---- chunks ---- */

/* Dispatch d, products e, combine d per chunk; one comm stream, one compute stream: all dispatches,
 * then each combine as soon as its products are done. */
static double pipeline(int chunks, double d, double e) {
    double product = 0, comm = chunks * d;
    for (int c = 0; c < chunks; c++) {
        product = fmax(product, (c + 1) * d) + e;
        comm = fmax(comm, product) + d;
    }
    return comm;
}

/* Where rows or products are the longer part: max(products, rows) and the first and last part. */
static void test_chunks(void **state) {
    for (int chunks = 1; chunks <= 4; chunks *= 2)
        for (int slow = 0; slow < 2; slow++) {
            tiny t;
            tiny_make(&t, 2, 2, "m");
            t.traits.chunks = chunks;
            if (slow)
                t.cluster.device.bf16_flops = 1e11;
            const double work = slow ? 10 : 1;
            const double flops = 64 * 6.0 * TINY_H * TINY_I / 1e12 * work;
            const double ahead = flops + 64 * 2 * 3 * TINY_I / memory;
            const double back = 2 * flops + 64 * 2 * 5 * TINY_I / memory;
            const double d = 32.0 / chunks * row_bytes / inside + 1e-6;
            const double route = 32 * 64 / memory, product = tiny_gemm(32, 4, TINY_H) * work;
            const double dense =
                2.0 * (2 * TINY_VOCAB * TINY_H + 4 * TINY_H * TINY_H + TINY_EXPERTS * TINY_H);
            tiny_load(&t, even);
            tiny_static_plan(&t);
            const mz_step_outcome o = tiny_run(&t, 1);
            const double others =
                2 * route + 3 * product + 4 * 2 / inside + 1e-6 + 2 * (dense / 2 / inside + 1e-6);
            const double layer = pipeline(chunks, d, ahead / chunks);
            assert_close(o.time_s - others, layer + pipeline(chunks, d, back / chunks));
            assert_close(o.phase_s[tiny_phase("experts")], ahead);
            assert_close(o.phase_s[tiny_phase("dispatch")], chunks * d);
            if (chunks == 4 && slow)
                assert_close(layer, ahead + 2 * d);
            if (chunks == 4 && !slow)
                assert_close(layer, fmax(8 * d, 5 * d + ahead / 4));
            tiny_free(&t);
        }
}

/* Every row is in one chunk, whatever the number of chunks: same bytes, same products; both
 * networks. A chunk costs a launch of each exchange and its products' own launches. */
static void test_chunks_keep_rows(void **state) {
    static const int64_t uneven[] = {17, 1, 0, 5, 3, 29, 2, 1, 1, 1, 1, 1, 0, 8, 40, 2};
    for (int flow = 0; flow < 2; flow++) {
        tiny t;
        tiny_make(&t, 4, 2, "mm");
        t.options.network = flow ? MZ_NETWORK_FLOW : MZ_NETWORK_PORT;
        tiny_load(&t, uneven);
        tiny_static_plan(&t);
        const mz_step_outcome whole = tiny_run(&t, 1);
        for (t.traits.chunks = 2; t.traits.chunks < 6; t.traits.chunks++) {
            const mz_step_outcome cut = tiny_run(&t, 1);
            assert_int_equal(cut.sent_bytes, whole.sent_bytes);
            assert_int_equal(cut.received_bytes, whole.received_bytes);
            assert_int_equal(cut.dispatch_bytes, whole.dispatch_bytes);
            assert_int_equal(cut.backward_combine_bytes, whole.backward_combine_bytes);
            const int experts = tiny_phase("experts"), back = tiny_phase("backward_experts");
            assert_close(cut.phase_s[experts], whole.phase_s[experts]);
            assert_close(cut.phase_s[back], whole.phase_s[back]);
        }
        t.options.effects.launches = true;
        t.cluster.device.launch_s = 1;
        t.traits.chunks = 1;
        const double once = tiny_run(&t, 1).time_s;
        t.traits.chunks = 3;
        assert_near(tiny_run(&t, 1).time_s - once, 2 * 2 * (2 + 3 + 2 + 5), 1e-3);
        tiny_free(&t);
    }
}

/* The products of a chunk have the tiles of its own rows: 64 rows and 32 rows are a tile each. */
static void test_chunks_have_tiles(void **state) {
    tiny t;
    tiny_make(&t, 2, 2, "m");
    t.options.effects.tiles = true;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const int experts = tiny_phase("experts");
    const double bytes = 64 * 2.0 * 3 * TINY_I / memory;
    const double one = tiny_run(&t, 1).phase_s[experts] - bytes;
    t.traits.chunks = 2;
    assert_close(tiny_run(&t, 1).phase_s[experts] - bytes, 2 * one);
    tiny_free(&t);
}

/* ---- ranks of one device ---- */

/* Two ranks on one device: 32 rows of each are copied in its memory, read and written, before the
 * experts and after; one rank after the other. */
static void test_copies_on_one_device(void **state) {
    const double copy = 2 * 32 * row_bytes / memory;
    tiny t;
    tiny_make(&t, 2, 2, "m");
    tiny_load(&t, even);
    tiny_static_plan(&t);
    t.device[1] = 0;
    t.cluster.gpus = 1;
    t.cluster.ranks_per_device = 2;
    t.cluster.topology.inside_latency_s = 0;
    for (int fifo = 0; fifo < 2; fifo++) {
        t.options.effects.fifo = fifo;
        t.plan->moves = 0;
        const double dense =
            2.0 * (2 * TINY_VOCAB * TINY_H + 4 * TINY_H * TINY_H + TINY_EXPERTS * TINY_H);
        const mz_step_outcome o = tiny_run(&t, 1);
        assert_close(o.phase_s[tiny_phase("dispatch")], copy);
        assert_close(o.phase_s[tiny_phase("backward_combine")], copy);
        /* The data-parallel rings copy too: half of the dense bytes per rank and ring. */
        assert_close(o.time_s, 2 * (router(32, 1) + router(32, 2) + forward_time(64) +
                                    backward_time(64) + 4 * copy + 2 * dense / memory));
        assert_int_equal(o.sent_bytes, 0);
        t.plan->moves = 2;
        t.plan->move[0] = (mz_move){.phase = MZ_MOVE_STEP, .src = 0, .dst = 1, .bytes = 50000};
        t.plan->move[1] =
            (mz_move){.phase = MZ_MOVE_STEP, .src = MZ_EVERY_RANK, .dst = 0, .bytes = 20000};
        assert_close(tiny_run(&t, 1).time_s - o.time_s, 2 * (50000 + 10000) / memory);
    }
    tiny_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_once_per_step),        cmocka_unit_test(test_summed_gradients_hide),
        cmocka_unit_test(test_lasting_plan),         cmocka_unit_test(test_prefetch),
        cmocka_unit_test(test_sharded_weights),      cmocka_unit_test(test_planning),
        cmocka_unit_test(test_moves_beside_gathers), cmocka_unit_test(test_transfers_let_counts_in),
        cmocka_unit_test(test_update_products),      cmocka_unit_test(test_update_of_replicas),
        cmocka_unit_test(test_route_needs_an_entry), cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_chunks_keep_rows),     cmocka_unit_test(test_chunks_have_tiles),
        cmocka_unit_test(test_copies_on_one_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
