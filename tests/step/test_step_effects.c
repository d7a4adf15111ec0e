/* Every switch of mz_step_effects changes the step in the direction and by the size of its formula.
 */
#include "tests/step/tiny.h"

#include <math.h>

static const double row_bytes = 2 * TINY_H, inside = 1e10, memory = 1e11;
static const int64_t even[8 * TINY_EXPERTS] = {16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16,
                                               16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16,
                                               16, 16, 16, 16, 16, 16, 16, 16, 16, 16};

static void make(tiny *t, int32_t ranks, const char *layers) {
    tiny_make(t, ranks, ranks, layers);
    tiny_load(t, even);
    tiny_static_plan(t);
}

/* 7 us per layer call and micro-batch, on the host while the device has nothing to do. */
static void test_planner(void **state) {
    tiny t;
    make(&t, 2, "mm");
    const double off = tiny_run(&t, 3).time_s;
    t.options.effects.planner = true;
    const mz_step_outcome on = tiny_run(&t, 3);
    assert_close(on.time_s - off, 6 * 7e-6);
    assert_close(on.planner_s, 6 * 7e-6);
    assert_close(on.phase_s[tiny_phase("planner")], 6 * 7e-6);
    tiny_free(&t);
}

/* A policy that decides every 2nd step is charged every 2nd step, and a change of its placement
 * moves then; what its standing placement moves once per step it moves in every step. */
static void test_planner_interval(void **state) {
    tiny t;
    make(&t, 2, "m");
    t.options.effects.planner = true;
    t.traits.interval = 2;
    t.plan->move[0] = (mz_move){MZ_MOVE_OPTIMIZER, MZ_MOVE_STEP, MZ_HIDE_NOTHING, 0, 0, 1, 100, 0};
    t.plan->move[1] =
        (mz_move){.phase = MZ_MOVE_STEP, .src = 1, .dst = 0, .bytes = 3000, .change = true};
    t.plan->moves = 2;
    mz_step *step;
    mz_step_outcome o[3];
    mz_err err;
    const mz_step_head head = {0, 1, 1, t.tokens};
    assert_ok(mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
              &err);
    for (int i = 0; i < 3; i++) {
        assert_ok(mz_step_begin(step, &head, &err), &err);
        assert_ok(mz_step_add_call(step, 0, 0, 0, &t.load, NULL, t.plan, &err), &err);
        assert_ok(mz_step_finish(step, &o[i], &err), &err);
    }
    assert_close(o[0].planner_s, 7e-6);
    assert_near(o[1].planner_s, 0, 0);
    assert_close(o[2].planner_s, 7e-6);
    assert_int_equal(o[0].transfer_bytes, 3100);
    assert_int_equal(o[1].transfer_bytes, 100);
    assert_int_equal(o[2].transfer_bytes, 3100);
    mz_step_free(&step);
    tiny_free(&t);
}

/* 32 rows of each of two experts fill one 128 x 128 tile each, on two of four SMs: one wave of a
 * tile of depth 64 (up and gate) and one of depth 32 (down), at a quarter of the device's rate. */
static void test_tiles(void **state) {
    tiny t;
    make(&t, 2, "m");
    const double off = tiny_run(&t, 1).phase_s[tiny_phase("experts")];
    t.options.effects.tiles = true;
    const double on = tiny_run(&t, 1).phase_s[tiny_phase("experts")];
    const double wave = 2.0 * 128 * 128 * (64 + 32) / (1e12 / 4);
    const double products = tiny_gemm(64, 64, 64) + tiny_gemm(64, 64, 32);
    assert_close(on - off, wave - products);
    tiny_free(&t);
}

/* Device noise of 2 % and jitter of 1 %: over many seeds the one kernel's time has the right mean
 * and spread; kernels of one device share the persistent part. */
static void test_noise(void **state) {
    enum { SEEDS = 400 };
    tiny t;
    make(&t, 1, "m");
    const int experts = tiny_phase("experts"), back = tiny_phase("backward_experts");
    const mz_step_outcome exact = tiny_run(&t, 1);
    double sum = 0, squares = 0, together = 0;
    t.options.effects.noise = true;
    for (int i = 0; i < SEEDS; i++) {
        t.options.seed = (uint64_t)i;
        const mz_step_outcome o = tiny_run(&t, 1);
        const double x = o.phase_s[experts] / exact.phase_s[experts] - 1;
        const double y = o.phase_s[back] / exact.phase_s[back] - 1;
        sum += x;
        squares += x * x;
        together += x * y;
    }
    const double spread = sqrt(squares / SEEDS), expected = sqrt(0.02 * 0.02 + 0.01 * 0.01);
    assert_near(sum / SEEDS, 0, 4 * expected / sqrt(SEEDS));
    assert_near(spread, expected, 0.15 * expected);
    assert_near(together / SEEDS, 0.02 * 0.02, 0.3 * 0.02 * 0.02);
    tiny_free(&t);
}

/* One rank, launches off: a chain, so that what the switch adds is the sum of its formulas. T = 32
 * tokens in sequences of 16, H = 64, q = k = v = out = 64, vocabulary 128, dense 96. */
static void test_other_work(void **state) {
    const double T = 32, H = 64, V = 128, D = 96, pairs = 64;
    tiny t;
    make(&t, 1, "md");
    const double off = tiny_run(&t, 1).time_s;
    t.options.effects.other_work = true;
    const mz_step_outcome o = tiny_run(&t, 1);
    const double projections = tiny_gemm(T, 3 * H, H) + tiny_gemm(T, H, H);
    /* causal scores and values: half of 2 products of 2 T S H */
    const double scores = 2 * (2 * T * 16 * H) / 2 / 1e12;
    const double attention = projections + scores + T * (12 * H + 4 * 2 * H) / memory;
    const double attention_back =
        2 * projections + 2.5 * scores + T * (16 * H + 4 * 2 * H) / memory;
    const double dense =
        tiny_gemm(T, 2 * D, H) + tiny_gemm(T, H, D) + T * (2 * 3 * D + 6 * H) / memory;
    const double dense_back =
        2 * (tiny_gemm(T, 2 * D, H) + tiny_gemm(T, H, D)) + T * (2 * 5 * D + 4 * H) / memory;
    const double loss = 3 * tiny_gemm(T, V, H) + T * (12 * V + 10 * H) / memory;
    const double embedding = (2 + 3) * T * 2 * H / memory;
    const double pack = 2 * pairs * 2 * H / memory, unpack = (pairs + 2 * T) * 2 * H / memory;
    const double weights = 2.0 * (2 * V * H + 2 * 4 * H * H + 4 * H + 3 * D * H);
    const double experts = 2.0 * 4 * 3 * 32 * H;
    const double norm = (weights + experts) / memory;
    double update = 0;
    for (int64_t i = 0; i < t.model.tensors; i++)
        update += mz_optimizer_update(t.options.optimizer, &t.tensor[i], t.tensor[i].count, 1,
                                      MZ_TEMPORARIES_FUSED)
                      .traffic_bytes;
    assert_close(o.phase_s[tiny_phase("attention")], 2 * attention);
    assert_close(o.phase_s[tiny_phase("loss")], loss);
    assert_close(o.phase_s[tiny_phase("pack")], pack);
    assert_close(o.phase_s[tiny_phase("unpack")], unpack);
    assert_close(o.phase_s[tiny_phase("optimizer")], norm + update / memory);
    assert_close(o.time_s - off, 2 * (attention + attention_back) + dense + dense_back + loss +
                                     embedding + 2 * (pack + unpack) + norm + update / memory);
    tiny_free(&t);
}

/* One rank, as above. 2 sequences of 16: 2 * 256 pairs of (query, key) for each of 2 heads of 32.
 * Products over all of them, two in forward and four in backward, where flash attention's are
 * causal and count 1 and 2.5; 8 and 14 B through memory. Selective recomputation: one product, 6 B.
 */
static void test_eager_attention(void **state) {
    const double cells = 2 * 256 * 2, product = 2 * cells * 32 / 1e12;
    for (int selective = 0; selective < 2; selective++) {
        tiny t;
        make(&t, 1, "md");
        t.options.effects.other_work = true;
        t.options.recompute = selective ? MZ_RECOMPUTE_SELECTIVE : MZ_RECOMPUTE_NONE;
        const mz_step_outcome flash = tiny_run(&t, 1);
        t.options.attention = MZ_ATTENTION_EAGER;
        const mz_step_outcome eager = tiny_run(&t, 1);
        const double forward = product + 8 * cells / memory;
        const double again = selective ? product + 6 * cells / memory : 0;
        const double back = (4 - 2.5) * product + 14 * cells / memory + again;
        const int attention = tiny_phase("attention"), other = tiny_phase("backward_other");
        assert_close(eager.phase_s[attention] - flash.phase_s[attention], 2 * forward);
        assert_close(eager.phase_s[other] - flash.phase_s[other], 2 * back);
        assert_close(eager.time_s - flash.time_s, 2 * (forward + back));
        tiny_free(&t);
    }
}

/* 32 tokens, 10 at a time: three pieces more, each with the head's gradient (128 x 64) in and out
 * and six launches. */
static void test_loss_in_pieces(void **state) {
    tiny t;
    make(&t, 1, "m");
    t.options.effects.other_work = true;
    const double whole = tiny_run(&t, 1).time_s;
    t.options.loss_tokens = 32;
    assert_close(tiny_run(&t, 1).time_s, whole);
    t.options.loss_tokens = 10;
    assert_close(tiny_run(&t, 1).time_s - whole, 3 * 4 * 128 * 64 / memory);
    t.cluster.device.launch_s = 1e-3; /* the host makes the step */
    t.options.effects.launches = true;
    const double pieces = tiny_run(&t, 1).time_s;
    t.options.loss_tokens = 0;
    assert_near(pieces - tiny_run(&t, 1).time_s, 3 * 6 * 1e-3, 1e-4);
    tiny_free(&t);
}

/* By how much longer the optimizer's phase is with Muon than with the usual one, less what its
 * updates take: a matrix of an expert, of which a rank updates `experts`, is cut into
 * `expert_parts`, a dense one into `dense_parts`. */
static double muon_exchange(tiny *t, int32_t expert_parts, int32_t dense_parts, int32_t experts) {
    const mz_optimizer *const usual = t->options.optimizer;
    mz_optimizer muon;
    mz_err err;
    assert_ok(mz_optimizer_parse("muon", &muon, &err), &err);
    double rest[2];
    for (int i = 0; i < 2; i++) {
        const mz_optimizer *o = t->options.optimizer = i ? &muon : usual;
        double update = 0;
        for (int64_t k = 0; k < t->model.tensors; k++) {
            const bool expert = t->tensor[k].tier == MZ_TIER_EXPERT;
            const mz_update_cost u = mz_optimizer_update(
                o, &t->tensor[k], 1, expert ? expert_parts : dense_parts, MZ_TEMPORARIES_FUSED);
            update += (expert ? experts : 1) * (u.traffic_bytes / memory + u.flops / 1e12);
        }
        rest[i] = tiny_run(t, 1).phase_s[tiny_phase("optimizer")] - update;
    }
    t->options.optimizer = usual;
    return rest[1] - rest[0];
}

/* Muon under ZeRO 1, 8 ranks in 2 groups: of every dense matrix (embedding, attention, head: 32768
 * values) a rank holds an eighth and needs the rest in bf16, of its expert's 6144 values a half;
 * trees of 3 rounds and of 1, 1 us each. */
static void test_cut_matrices(void **state) {
    tiny t;
    make(&t, 8, "m");
    t.options.ep = 4;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    t.options.effects.other_work = true;
    const double more = muon_exchange(&t, 2, 8, 1);
    const double exchange = (2 * 7.0 / 8 * 32768 + 6144) / 1e10 + 4e-6;
    assert_close(more, exchange);
    tiny_free(&t);
}

/* The same without ZeRO, where a policy cuts every expert's state over its group of 4: nothing is
 * cut between groups, so a rank needs three quarters of all four experts from its group, in a tree
 * of 2 rounds, and nothing of dense matrices. */
static void test_cut_inside_groups(void **state) {
    tiny t;
    make(&t, 8, "m");
    t.options.ep = 4;
    t.options.zero = 0;
    t.traits.sharded_optimizer = true;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    t.options.effects.other_work = true;
    const double more = muon_exchange(&t, 4, 1, TINY_EXPERTS);
    const double exchange = 2 * 0.75 * TINY_EXPERTS * 6144 / 1e10 + 2e-6;
    assert_close(more, exchange);
    tiny_free(&t);
}

/* Full recomputation repeats dispatch and combine of every MoE layer, unless told not to. */
static void test_recompute_exchange(void **state) {
    tiny t;
    make(&t, 2, "mm");
    const double none = tiny_run(&t, 1).time_s;
    t.options.recompute = MZ_RECOMPUTE_FULL;
    const mz_step_outcome off = tiny_run(&t, 1);
    t.options.effects.recompute_exchange = true;
    const mz_step_outcome on = tiny_run(&t, 1);
    const double rows = 32 * row_bytes / inside + 1e-6;
    const double router = tiny_gemm(32, 4, 64) + 32 * 64 / memory;
    const double experts = tiny_gemm(64, 64, 64) + tiny_gemm(64, 64, 32) + 64 * 2 * 96 / memory;
    assert_close(off.time_s - none, 2 * (router + experts));
    assert_close(on.time_s - off.time_s, 2 * 2 * rows);
    assert_int_equal(on.dispatch_bytes, 2 * off.dispatch_bytes);
    assert_int_equal(on.backward_dispatch_bytes, off.backward_dispatch_bytes);
    tiny_free(&t);
}

/* Shared experts S longer than dispatch D hold up the routed experts X on one compute stream; on
 * queues of their own they do not: max(D, S) + X + C against max(D + X + C, S). */
static void test_fifo(void **state) {
    tiny t;
    make(&t, 2, "m");
    t.model.shared_intermediate = 4096;
    t.options.effects.other_work = true;
    t.options.effects.fifo = true;
    const mz_step_outcome on = tiny_run(&t, 1);
    t.options.effects.fifo = false;
    const mz_step_outcome off = tiny_run(&t, 1);
    const double rows = 32 * row_bytes / inside + 1e-6, pairs = 64;
    const double forward = tiny_gemm(pairs, 64, 64) + tiny_gemm(pairs, 64, 32);
    const double experts = forward + pairs * 2 * 96 / memory;
    const double back = 2 * forward + pairs * 2 * 160 / memory;
    const double product = tiny_gemm(32, 2 * 4096, 64) + tiny_gemm(32, 64, 4096);
    const double shared = product + 32.0 * (2 * 3 * 4096 + 6 * 64) / memory;
    const double shared_back = 2 * product + 32.0 * (2 * 5 * 4096 + 4 * 64) / memory;
    assert_true(shared > rows && shared_back > rows);
    const double first = fmax(rows, shared) + experts + rows - fmax(2 * rows + experts, shared);
    const double second =
        fmax(rows, shared_back) + back + rows - fmax(2 * rows + back, shared_back);
    assert_close(on.time_s - off.time_s, first + second);
    assert_true(first > 0 && second > 0);
    tiny_free(&t);
}

/* What is a chain by its data stays a chain when every kind of task has a queue of its own. */
static void test_chain_without_order(void **state) {
    const int32_t expert[] = {0, 1, 2, 3}, rank[] = {0, 0, 1, 1};
    const int64_t half[] = {8, 8, 8, 8, 8, 8, 8, 8};
    for (int i = 0; i < 24; i++) {
        tiny t;
        make(&t, 2, "mdm");
        t.options.zero = i % 2;
        t.options.recompute = (mz_recompute)(i / 2 % 3);
        t.options.effects.recompute_exchange = true;
        t.options.effects.other_work = i / 12;
        if (i / 6 % 2)
            tiny_plan(&t, 4, expert, rank, even, half);
        const double ordered = tiny_run(&t, 2).time_s;
        t.options.effects.fifo = false;
        assert_close(tiny_run(&t, 2).time_s, ordered);
        tiny_free(&t);
    }
}

/* Host costs of a kernel-bound step vanish behind the kernels but for the first launch and the
 * synchronisations, where the queue has run dry: counts, and the norm before the update. */
static void test_launches(void **state) {
    tiny t;
    make(&t, 1, "m");
    t.cluster.device.bf16_flops = 1e9; /* kernels of milliseconds */
    t.options.effects.other_work = true;
    const double off = tiny_run(&t, 1).time_s;
    t.options.effects.launches = true;
    const mz_step_outcome on = tiny_run(&t, 1);
    const double launch = 2e-6, sync = 10e-6;
    /* embedding: 1 launch before anything runs, and its run is shorter than attention's 6 launches;
     * after the counts: pack 1; after the norm: the update's 4 */
    const double embedding = 2 * 32 * 128 / memory;
    const double start = launch + fmax(embedding, 6 * launch) - embedding;
    const double counts = sync + launch, pack = 2 * 64 * 128 / memory;
    const double after_pack = fmax(0, 3 * launch - pack);
    assert_close(on.time_s - off, start + counts + after_pack + sync + 4 * launch);
    tiny_free(&t);
}

/* Selective recomputation: both norms and the activations again, in memory-bound kernels. */
static void test_selective(void **state) {
    tiny t;
    make(&t, 1, "m");
    t.options.effects.other_work = true;
    const double none = tiny_run(&t, 1).time_s;
    t.options.recompute = MZ_RECOMPUTE_SELECTIVE;
    assert_close(tiny_run(&t, 1).time_s - none, (32.0 * 8 * 64 + 64.0 * 2 * 96) / memory);
    tiny_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_planner),
        cmocka_unit_test(test_planner_interval),
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_noise),
        cmocka_unit_test(test_other_work),
        cmocka_unit_test(test_cut_matrices),
        cmocka_unit_test(test_cut_inside_groups),
        cmocka_unit_test(test_eager_attention),
        cmocka_unit_test(test_loss_in_pieces),
        cmocka_unit_test(test_recompute_exchange),
        cmocka_unit_test(test_fifo),
        cmocka_unit_test(test_chain_without_order),
        cmocka_unit_test(test_launches),
        cmocka_unit_test(test_selective),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
