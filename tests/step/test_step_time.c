/* Times of a step that can be added up by hand, bytes against the plan, moves, rings. */
#include "tests/step/tiny.h"

#include <math.h>

static const double row_bytes = 2 * TINY_H, inside = 1e10, outside = 1e9, memory = 1e11;

/* 64 pairs of 4 experts: 16 each. */
static const int64_t even[4 * TINY_EXPERTS] = {16, 16, 16, 16, 16, 16, 16, 16,
                                               16, 16, 16, 16, 16, 16, 16, 16};

/* Products of 64 x 64 and 64 x 32 for `rows` pairs and the activation's bytes. */
static double experts_forward(double rows) {
    return tiny_gemm(rows, 2 * TINY_I, TINY_H) + tiny_gemm(rows, TINY_H, TINY_I) +
           rows * 2 * (2 * TINY_I + TINY_I) / memory;
}

static double experts_backward(double rows) {
    return 2 * (tiny_gemm(rows, 2 * TINY_I, TINY_H) + tiny_gemm(rows, TINY_H, TINY_I)) +
           rows * 2 * (TINY_I + 4 * TINY_I) / memory;
}

static double router(double tokens, double products) {
    return products * tiny_gemm(tokens, TINY_EXPERTS, TINY_H) +
           tokens * (8 * TINY_EXPERTS + 16 * 2) / memory;
}

/* Everything but routed experts: embedding and head, attention, router; bf16. */
static const double dense_bytes =
    2.0 * (2 * TINY_VOCAB * TINY_H + 4 * TINY_H * TINY_H + TINY_EXPERTS * TINY_H);
static const double expert_bytes = 2.0 * 3 * TINY_I * TINY_H * TINY_EXPERTS;

/* Two ranks, one MoE layer, no launches and no other work: one chain of kernels and exchanges. */
static void test_critical_path(void **state) {
    tiny t;
    tiny_make(&t, 2, 2, "m");
    tiny_load(&t, even);
    tiny_static_plan(&t);
    mz_step *step;
    mz_step_outcome o;
    tiny_step(&t, 1, &step, &o);
    assert_close(o.rank_busy_s[1],
                 router(32, 3) + 32.0 * 64 / memory + experts_forward(64) + experts_backward(64));
    mz_step_free(&step);
    const double counts = 4 * 2 / inside + 1e-6, rows = 32 * row_bytes / inside + 1e-6;
    const double tail = 2 * (dense_bytes / 2 / inside + 1e-6);
    const double moe = router(32, 1) + counts + rows + experts_forward(64) + rows;
    const double back = rows + experts_backward(64) + rows + router(32, 2);
    assert_close(o.time_s, moe + back + tail);
    assert_close(o.moe_s, moe + back);
    assert_close(o.phase_s[tiny_phase("experts")], experts_forward(64));
    assert_close(o.phase_s[tiny_phase("backward_experts")], experts_backward(64));
    assert_close(o.phase_s[tiny_phase("dispatch")], rows);
    assert_close(o.phase_s[tiny_phase("backward_combine")], rows);
    assert_close(o.phase_s[tiny_phase("gradient_reduce")], tail / 2);
    assert_close(o.phase_s[tiny_phase("parameter_gather")], tail / 2);
    /* Nobody ever waits: kernels or exchanges cover the step. */
    assert_near(o.phase_s[tiny_phase("launch_wait")], 0, 1e-15);
    assert_int_equal(o.tokens, 64);
    tiny_free(&t);
}

/* The same chain twice: layers and micro-batches repeat it, the tail comes once. */
static void test_layers_and_micro_batches(void **state) {
    tiny t;
    tiny_make(&t, 2, 2, "mm");
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const mz_step_outcome o = tiny_run(&t, 3);
    const double counts = 4 * 2 / inside + 1e-6, rows = 32 * row_bytes / inside + 1e-6;
    const double layer = router(32, 1) + counts + 4 * rows + experts_forward(64) +
                         experts_backward(64) + router(32, 2);
    const double weights = dense_bytes + 2.0 * (4 * TINY_H * TINY_H + TINY_EXPERTS * TINY_H);
    assert_close(o.time_s, 6 * layer + 2 * (weights / 2 / inside + 1e-6));
    assert_int_equal(o.tokens, 3 * 64);
    assert_int_equal(o.dispatch_bytes, 6 * 64 * row_bytes);
    tiny_free(&t);
}

/* The worst rank decides: an expert with all pairs. */
static void test_skew(void **state) {
    const int64_t count[] = {64, 0, 0, 0, 64, 0, 0, 0};
    tiny t;
    tiny_make(&t, 2, 2, "m");
    tiny_load(&t, count);
    tiny_static_plan(&t);
    const mz_step_outcome o = tiny_run(&t, 1);
    const double counts = 4 * 2 / inside + 1e-6, rows = 64 * row_bytes / inside + 1e-6;
    const double tail = 2 * (dense_bytes / 2 / inside + 1e-6);
    assert_close(o.time_s, router(32, 1) + counts + 4 * rows + experts_forward(128) +
                               experts_backward(128) + router(32, 2) + tail);
    /* Rank 1 computes nothing meanwhile. */
    assert_true(o.phase_s[tiny_phase("launch_wait")] > experts_forward(128));
    tiny_free(&t);
}

/* One rank: no exchange at all. The host issues 4 kernels of the router, waits for the counts,
 * issues 3 of the experts, 5 of their backward, 3 of the router's. */
static void test_host(void **state) {
    tiny t;
    tiny_make(&t, 1, 1, "m");
    t.options.effects.launches = true;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const mz_step_outcome o = tiny_run(&t, 1);
    const double launch = 2e-6;
    const double synced = 4 * launch + router(32, 1) + 10e-6;
    const double forward = synced + 3 * launch + experts_forward(64);
    const double issued = synced + 8 * launch;
    const double back = fmax(forward, issued) + experts_backward(64);
    const double end = fmax(back, issued + 3 * launch) + router(32, 2);
    assert_close(o.time_s, end);
    assert_int_equal(o.sent_bytes, 0);
    tiny_free(&t);
}

/* Off-rank rows of a plan, counted from its entries. */
static int64_t off_rank(const mz_plan *p, bool back) {
    int64_t rows = 0;
    const int64_t *begin = back ? p->back_begin : p->entry_begin;
    for (int32_t i = 0; i < p->begin[p->experts]; i++)
        for (int64_t k = begin[i]; k < begin[i + 1]; k++)
            if ((back ? p->back_source : p->entry_source)[k] != p->rank[i])
                rows += (back ? p->back_pairs : p->entry_pairs)[k];
    return rows;
}

static uint64_t draw(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* A random plan with replicas: every expert has its main and perhaps one more host. */
static void random_plan(tiny *t, uint64_t seed, bool lossy) {
    int32_t expert[2 * TINY_EXPERTS], rank[2 * TINY_EXPERTS];
    int64_t count[TINY_RANKS * TINY_EXPERTS] = {0}, pairs[2 * TINY_RANKS * TINY_EXPERTS] = {0};
    int64_t back[2 * TINY_RANKS * TINY_EXPERTS] = {0};
    const int32_t ep = t->options.ep;
    int n = 0;
    for (int32_t e = 0; e < TINY_EXPERTS; e++)
        for (int32_t k = 0; k < 1 + (int32_t)(draw(&seed) % 2); k++) {
            expert[n] = e;
            rank[n++] = k == 0 ? e * ep / TINY_EXPERTS : (int32_t)(draw(&seed) % (uint64_t)ep);
        }
    for (int32_t s = 0; s < ep; s++)
        for (int32_t e = 0; e < TINY_EXPERTS; e++)
            count[s * TINY_EXPERTS + e] = (int64_t)(draw(&seed) % 20);
    tiny_load(t, count);
    for (int32_t s = 0; s < ep; s++)
        for (int i = 0; i < n; i++) {
            const int64_t all = t->count[s * TINY_EXPERTS + expert[i]];
            const bool two =
                (i + 1 < n && expert[i + 1] == expert[i]) || (i > 0 && expert[i - 1] == expert[i]);
            const bool second = i > 0 && expert[i - 1] == expert[i];
            pairs[s * n + i] = !two ? all : second ? all - all / 3 : all / 3;
            back[s * n + i] = !two ? all / 2 : second ? all / 4 : all / 2; /* some move */
        }
    t->traits.slots = 2 * TINY_EXPERTS;
    tiny_plan(t, n, expert, rank, pairs, lossy ? back : NULL);
}

static void test_conservation(void **state) {
    for (uint64_t seed = 0; seed < 24; seed++) {
        tiny t;
        tiny_make(&t, 4, seed % 3 == 0 ? 1 : 2, "md");
        t.options.network = seed % 2 ? MZ_NETWORK_FLOW : MZ_NETWORK_PORT;
        t.options.zero = (int32_t)(seed / 2 % 4);
        const bool lossy = seed % 5 < 2;
        random_plan(&t, seed, lossy);
        const mz_step_outcome o = tiny_run(&t, 2);
        const int64_t forward = 2 * off_rank(t.plan, false) * (int64_t)row_bytes;
        const int64_t back = 2 * off_rank(t.plan, lossy);
        assert_int_equal(o.sent_bytes, o.received_bytes);
        assert_int_equal(o.dispatch_bytes, forward);
        assert_int_equal(o.combine_bytes, forward);
        assert_int_equal(o.backward_combine_bytes, back * (int64_t)(row_bytes + (lossy ? 4 : 0)));
        if (!lossy)
            assert_int_equal(o.backward_dispatch_bytes, back * (int64_t)row_bytes);
        /* All that was sent: rows, counts (4 B of one expert to each of 3 peers, kept ones too),
         * and two rings of 3/4 of the weights per rank (a layer is 2 x 16640 B dense, 2 x 34816 B
         * else). */
        const int64_t rows = o.dispatch_bytes + o.combine_bytes + o.backward_dispatch_bytes +
                             o.backward_combine_bytes;
        const int64_t weights = (int64_t)dense_bytes + 2 * (4 + 3) * 64 * 64 + 2 * 64 * 96;
        if (t.options.zero < 2)
            assert_int_equal(o.sent_bytes, rows + 2 * (lossy ? 2 : 1) * 4 * 3 * 4 +
                                               2 * 3 * (weights - 2 * 3 * 64 * 64 + 4 * 64 * 96));
        tiny_free(&t);
    }
}

/* What rides with the rows of a lossy plan: ||h||^2 with combine, scores to the expert's rank, and
 * the router's gradient unless the outputs stayed. */
static void test_scores_on_the_wire(void **state) {
    const int32_t expert[] = {0, 1, 2, 3}, rank[] = {0, 0, 1, 1};
    const int64_t half[] = {8, 8, 8, 8, 8, 8, 8, 8};
    tiny t;
    tiny_make(&t, 2, 2, "m");
    tiny_load(&t, even);
    tiny_plan(&t, 4, expert, rank, even, half);
    const mz_step_outcome plain = tiny_run(&t, 1);
    t.traits.score_combine_bytes = 4;
    t.traits.score_home_bytes = 4;
    mz_step_outcome o = tiny_run(&t, 1);
    assert_int_equal(o.combine_bytes - plain.combine_bytes, 4 * 64);
    assert_int_equal(o.sent_bytes - plain.sent_bytes, 2 * 4 * 64);
    assert_close(o.time_s - plain.time_s, 4 * 32 / inside + (4 * 32 / inside + 1e-6));
    assert_int_equal(plain.backward_combine_bytes, 32 * (row_bytes + 4));
    t.traits.router_gradient_kept = true;
    o = tiny_run(&t, 1);
    assert_int_equal(o.backward_combine_bytes, 32 * row_bytes);
    /* a lossless plan has none of it */
    tiny_static_plan(&t);
    o = tiny_run(&t, 1);
    assert_int_equal(o.combine_bytes, 64 * row_bytes);
    assert_int_equal(o.backward_combine_bytes, 64 * row_bytes);
    tiny_free(&t);
}

/* Free replicas: the products are those of the rank's own number of experts with even rows. Two SMs
 * run two tiles in one wave and four in two. */
static void test_free_replicas(void **state) {
    const int32_t expert[] = {0, 0, 1, 1, 2, 2, 3, 3}, rank[] = {0, 1, 0, 1, 0, 1, 0, 1};
    int64_t pairs[16];
    for (int i = 0; i < 16; i++)
        pairs[i] = 8;
    tiny t;
    tiny_make(&t, 2, 2, "m");
    t.options.effects.tiles = true;
    t.cluster.device.sms = 2;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const int phase = tiny_phase("experts"), back = tiny_phase("backward_experts");
    const mz_step_outcome mains = tiny_run(&t, 1);
    tiny_plan(&t, 8, expert, rank, pairs, NULL);
    assert_true(tiny_run(&t, 1).phase_s[phase] > 1.5 * mains.phase_s[phase]);
    t.traits.free_replicas = true;
    const mz_step_outcome o = tiny_run(&t, 1);
    assert_close(o.phase_s[phase], mains.phase_s[phase]);
    assert_close(o.phase_s[back], mains.phase_s[back]);
    tiny_free(&t);
}

/* Rows that a kept pair cannot find where it is computed: with saved activations only those that
 * moved, with re-sent ones all. */
static void test_moved_and_resent_rows(void **state) {
    const int32_t expert[] = {0, 0, 1, 2, 3}, rank[] = {0, 1, 0, 1, 1};
    /* source 0 has 10 pairs of expert 0; forward 10 on rank 0, backward 2 there and 4 on rank 1 */
    const int64_t count[] = {10, 0, 0, 0, 0, 0, 0, 0};
    const int64_t forward[] = {10, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const int64_t back[] = {2, 4, 0, 0, 0, 0, 0, 0, 0, 0};
    tiny t;
    tiny_make(&t, 2, 2, "m");
    t.traits.slots = 4;
    tiny_load(&t, count);
    tiny_plan(&t, 5, expert, rank, forward, back);
    mz_step_outcome o = tiny_run(&t, 1);
    /* 4 gradient rows and 4 rows of x cross; nothing crossed in forward */
    assert_int_equal(o.dispatch_bytes, 0);
    assert_int_equal(o.backward_dispatch_bytes, 8 * row_bytes);
    const double again = tiny_gemm(4, 2 * TINY_I, TINY_H) + 4 * 2 * 3 * TINY_I / memory;
    assert_close(o.phase_s[tiny_phase("backward_experts")], experts_backward(4) + again);
    t.traits.resend = true;
    o = tiny_run(&t, 1);
    assert_int_equal(o.backward_dispatch_bytes, 4 * (2 * row_bytes + 4));
    assert_int_equal(o.backward_combine_bytes, 4 * (row_bytes + 4));
    tiny_free(&t);
}

/* ---- moves ---- */

static double with_move(tiny *t, mz_move_phase phase, mz_move_hide hide, int64_t bytes) {
    t->plan->move[0] = (mz_move){MZ_MOVE_WEIGHTS, phase, hide, 0, 0, 1, bytes, 0};
    t->plan->moves = bytes > 0;
    const mz_step_outcome o = tiny_run(t, 1);
    assert_int_equal(o.transfer_bytes, hide == MZ_HIDE_FREE ? 0 : bytes * t->model.moe_layers);
    return o.time_s;
}

/* 100 kB from rank 0 to rank 1 take 11 us, planned from the counts of the call itself. */
static void test_moves(void **state) {
    tiny t;
    tiny_make(&t, 2, 2, "m");
    t.traits.sees = MZ_SEES_CURRENT;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const double base = with_move(&t, MZ_MOVE_FORWARD, MZ_HIDE_NOTHING, 0);
    const double move = 100000 / inside + 1e-6;
    assert_close(with_move(&t, MZ_MOVE_FORWARD, MZ_HIDE_NOTHING, 100000) - base, move);
    assert_close(with_move(&t, MZ_MOVE_FORWARD, MZ_HIDE_PACK, 100000) - base, move);
    /* A port serves one exchange after another: the move, then the rows, whose latency overlaps. */
    assert_close(with_move(&t, MZ_MOVE_FORWARD, MZ_HIDE_DISPATCH, 100000) - base, 100000 / inside);
    assert_close(with_move(&t, MZ_MOVE_FORWARD, MZ_HIDE_LAYERS, 100000) - base, 100000 / inside);
    assert_close(with_move(&t, MZ_MOVE_FORWARD, MZ_HIDE_FREE, 100000), base);
    assert_close(with_move(&t, MZ_MOVE_BACKWARD, MZ_HIDE_NOTHING, 100000) - base, move);
    assert_close(with_move(&t, MZ_MOVE_REDUCE, MZ_HIDE_NOTHING, 100000) - base, 100000 / inside);
    /* After the optimizer, beside the parameter gather. */
    assert_close(with_move(&t, MZ_MOVE_STEP, MZ_HIDE_NOTHING, 100000) - base, move);
    tiny_free(&t);
}

/* Planned ahead and hidden behind other layers, or awaited by the optimizer alone: 10 bytes cost no
 * latency; those that block cost it in every layer. */
static void test_hidden_move(void **state) {
    tiny t;
    tiny_make(&t, 2, 2, "mm");
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const double base = with_move(&t, MZ_MOVE_FORWARD, MZ_HIDE_LAYERS, 0), sent = 10 / inside;
    assert_near(with_move(&t, MZ_MOVE_FORWARD, MZ_HIDE_LAYERS, 10) - base, 0, 2 * sent);
    assert_near(with_move(&t, MZ_MOVE_BACKWARD, MZ_HIDE_LAYERS, 10) - base, 0, 2 * sent);
    assert_near(with_move(&t, MZ_MOVE_REDUCE, MZ_HIDE_LAYERS, 10) - base, 0, 2 * sent);
    assert_close(with_move(&t, MZ_MOVE_BACKWARD, MZ_HIDE_NOTHING, 10) - base, 2 * (sent + 1e-6));
    t.traits.sees = MZ_SEES_CURRENT; /* 8 B more counts to the peer in each of 2 layers */
    const double counted = base + 2 * 8 / inside;
    assert_close(with_move(&t, MZ_MOVE_FORWARD, MZ_HIDE_NOTHING, 10) - counted, 2 * (sent + 1e-6));
    tiny_free(&t);
}

/* A move between domains while all rows stay inside theirs, so that they meet on no port: products
 * wait for it, and for nothing else. 4 ranks, an expert each. */
static void test_awaited_move(void **state) {
    const int64_t count[] = {16, 16, 0, 0, 16, 16, 0, 0, 0, 0, 16, 16, 0, 0, 16, 16};
    const double counts = 4 * 2 / outside + 5e-6, rows = 16 * row_bytes / inside + 1e-6;
    const double move = 300000 / outside + 5e-6, idle = router(16, 1);
    tiny t;
    tiny_make(&t, 4, 2, "m");
    tiny_load(&t, count);
    tiny_static_plan(&t);
    t.plan->move[0] = (mz_move){.phase = MZ_MOVE_FORWARD, .src = 0, .dst = 2, .bytes = 300000};
    const double base = tiny_run(&t, 1).time_s;
    t.plan->moves = 1;
    t.plan->move[0].hide = MZ_HIDE_DISPATCH; /* from the router on, behind two counts of 4 B */
    assert_close(tiny_run(&t, 1).time_s - base, move + 8 / outside - counts - rows);
    /* From the start of the step on; the counts share the link with it, not its fate. */
    t.plan->move[0].hide = MZ_HIDE_LAYERS;
    t.options.network = MZ_NETWORK_FLOW;
    assert_near(tiny_run(&t, 1).time_s - base, move - counts - rows - idle, 0.1e-6);
    t.options.network = MZ_NETWORK_PORT;
    t.plan->move[0].phase = MZ_MOVE_BACKWARD; /* from the end of forward on */
    assert_close(tiny_run(&t, 1).time_s - base, move - rows);
    t.plan->move[0].hide = MZ_HIDE_DISPATCH;
    assert_close(tiny_run(&t, 1).time_s - base, move - rows);
    t.plan->move[0].hide = MZ_HIDE_PACK;
    assert_close(tiny_run(&t, 1).time_s - base, move);
    /* From the products on: the combine and the router's backward run beside it. */
    t.plan->move[0].phase = MZ_MOVE_REDUCE;
    assert_close(tiny_run(&t, 1).time_s - base, move - rows - router(16, 2));
    t.plan->move[0].hide = MZ_HIDE_NOTHING;
    assert_close(tiny_run(&t, 1).time_s - base, move - rows);
    tiny_free(&t);
}

/* Replica gradients that hide behind their own layer hold up the next one. */
static void test_move_before_next_layer(void **state) {
    const int64_t count[] = {16, 16, 0, 0, 16, 16, 0, 0, 0, 0, 16, 16, 0, 0, 16, 16};
    const double move = 300000 / outside + 5e-6, rows = 16 * row_bytes / inside + 1e-6;
    tiny t;
    tiny_make(&t, 4, 2, "mm");
    tiny_load(&t, count);
    tiny_static_plan(&t);
    const double base = tiny_run(&t, 1).time_s;
    t.plan->move[0] = (mz_move){.phase = MZ_MOVE_REDUCE, .src = 0, .dst = 2, .bytes = 300000};
    t.plan->moves = 1;
    for (int hide = MZ_HIDE_PACK; hide <= MZ_HIDE_DISPATCH; hide++) {
        t.plan->move[0].hide = (mz_move_hide)hide;
        assert_close(tiny_run(&t, 1).time_s - base, 2 * (move - rows - router(16, 2)));
    }
    tiny_free(&t);
}

/* On queues of their own, too, the optimizer waits for replica gradients (here 200,000 rounds, a
 * second that occupies no port) and for scattered ones. */
static void test_optimizer_waits(void **state) {
    tiny t;
    tiny_make(&t, 4, 2, "m");
    t.options.effects.other_work = true;
    t.options.effects.fifo = false;
    t.options.zero = 2;
    t.tensor[0].rows = 1 << 18; /* 2^24 values: an update of more than a millisecond */
    tiny_load(&t, even);
    tiny_static_plan(&t);
    t.plan->move[0] = (mz_move){.kind = MZ_MOVE_GRADIENTS,
                                .phase = MZ_MOVE_REDUCE,
                                .hide = MZ_HIDE_LAYERS,
                                .src = 0,
                                .dst = 2,
                                .bytes = 1,
                                .round = 199999};
    t.plan->moves = 1;
    mz_step_outcome o = tiny_run(&t, 1);
    assert_true(o.phase_s[tiny_phase("optimizer")] > 1e-3);
    assert_true(o.time_s > 200000 * 5e-6 + o.phase_s[tiny_phase("optimizer")]);
    /* Without other work all is one chain, in one queue or in many. */
    t.plan->moves = 0;
    t.options.effects.other_work = false;
    t.cluster.topology.outside_latency_s = 1;
    const double apart = tiny_run(&t, 1).time_s;
    t.options.effects.fifo = true;
    assert_close(apart, tiny_run(&t, 1).time_s);
    tiny_free(&t);
}

/* State spread over the group: each of 4 ranks sends a quarter of 4000 B to rank 2, its own part
 * stays; both networks and, message by message, the same bytes. */
static void test_every_rank(void **state) {
    for (int flow = 0; flow < 2; flow++) {
        tiny t;
        tiny_make(&t, 4, 2, "m");
        t.options.network = flow ? MZ_NETWORK_FLOW : MZ_NETWORK_PORT;
        const int64_t count[16] = {0};
        tiny_load(&t, count);
        tiny_static_plan(&t);
        const mz_step_outcome base = tiny_run(&t, 1);
        t.plan->move[0] =
            (mz_move){MZ_MOVE_WEIGHTS, MZ_MOVE_STEP, MZ_HIDE_NOTHING, 0, MZ_EVERY_RANK, 2, 4000, 0};
        t.plan->move[1] =
            (mz_move){MZ_MOVE_WEIGHTS, MZ_MOVE_STEP, MZ_HIDE_NOTHING, 1, 1, MZ_EVERY_RANK, 400, 0};
        t.plan->moves = 2;
        const mz_step_outcome o = tiny_run(&t, 1);
        assert_int_equal(o.transfer_bytes, 3000 + 300);
        assert_int_equal(o.sent_bytes - base.sent_bytes, 3300);
        assert_int_equal(o.received_bytes, o.sent_bytes);
        if (!flow) /* rank 2's NIC: two parts of 1000 B and one of 100 B come in */
            assert_close(o.time_s - base.time_s, 2100 / outside + 5e-6);
        tiny_free(&t);
    }
}

/* ---- rings ---- */

/* Stages 0, 1: one ring in the tail; 2, 3: per layer. Ring of n: (n-1)/n of the buffer, n-1 rounds.
 */
static void test_zero_stages(void **state) {
    const double layer = 2.0 * (4 * TINY_H * TINY_H + TINY_EXPERTS * TINY_H);
    const double outer = 2.0 * 2 * TINY_VOCAB * TINY_H;
    const double ring = 3 * 1e-6, part = 0.75 / inside;
    for (int32_t zero = 0; zero < 4; zero++) {
        tiny t;
        tiny_make(&t, 4, 4, "m");
        t.options.zero = zero;
        tiny_load(&t, even);
        tiny_static_plan(&t);
        const mz_step_outcome o = tiny_run(&t, 1);
        const double reduce[] = {2 * (dense_bytes * part + ring), dense_bytes * part + ring,
                                 (layer + outer) * part + 2 * ring,
                                 (layer + outer) * part + 2 * ring};
        const double gather[] = {0, dense_bytes * part + ring, dense_bytes * part + ring,
                                 (2 * layer + outer) * part + 3 * ring};
        assert_close(o.phase_s[tiny_phase("gradient_reduce")], reduce[zero]);
        assert_close(o.phase_s[tiny_phase("parameter_gather")], gather[zero]);
        tiny_free(&t);
    }
}

/* Two domains of two: the ring's bytes leave a domain over both NICs, half each. */
static void test_ring_over_domains(void **state) {
    tiny t;
    tiny_make(&t, 4, 2, "m");
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const mz_step_outcome o = tiny_run(&t, 1);
    assert_close(o.phase_s[tiny_phase("gradient_reduce")],
                 dense_bytes * 0.75 / 2 / outside + 3 * 5e-6);
    /* whatever the way, each of 4 ranks sends 3/4 in each ring */
    assert_int_equal(o.sent_bytes, 4 * o.dispatch_bytes + 4 * 3 * 4 + 2 * 3 * dense_bytes);
    tiny_free(&t);
}

/* Groups: rows stay inside, an expert's gradient is reduced over its copies. */
static void test_expert_groups(void **state) {
    tiny t;
    tiny_make(&t, 4, 4, "m");
    t.options.ep = 2;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const mz_step_outcome o = tiny_run(&t, 1);
    assert_int_equal(o.dispatch_bytes, 2 * 64 * row_bytes);
    assert_close(o.phase_s[tiny_phase("experts")], experts_forward(64));
    assert_close(o.phase_s[tiny_phase("gradient_reduce")],
                 dense_bytes * 0.75 / inside + 3e-6 + expert_bytes / 2 / 2 / inside + 1e-6);
    tiny_free(&t);
}

/* ---- tokens that cross once ---- */

/* Ranks 0, 1 in one domain, 2, 3 in another; expert e on rank e. Source 0 has three tokens:
 * (0, 1), (2, 3), (2, 3); the others none. */
static void test_dispatch_by_rank_and_node(void **state) {
    const int64_t count[] = {1, 1, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const int64_t token_begin[] = {0, 3, 3, 3, 3}, pair_begin[] = {0, 6, 6, 6, 6};
    const uint16_t expert[] = {0, 1, 2, 3, 2, 3};
    const mz_pairs pairs = {.sources = 4,
                            .top_k = 2,
                            .tokens = 3,
                            .pairs = 6,
                            .token_begin = token_begin,
                            .pair_begin = pair_begin,
                            .expert = expert};
    /* off-rank rows; bytes out of rank 0's NIC */
    const int64_t rows[] = {5, 5, 5};
    const double leaving[] = {4, 4, 2};
    for (int d = 0; d < 3; d++)
        for (int flow = 0; flow < 2; flow++) {
            tiny t;
            mz_step *step;
            mz_step_outcome o;
            mz_err err;
            tiny_make(&t, 4, 2, "m");
            t.options.dispatch = (mz_dispatch)d;
            t.options.network = flow ? MZ_NETWORK_FLOW : MZ_NETWORK_PORT;
            tiny_load(&t, count);
            tiny_static_plan(&t);
            const mz_step_head head = {0, 1, 1, t.tokens};
            assert_ok(
                mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
                &err);
            assert_ok(mz_step_begin(step, &head, &err), &err);
            assert_ok(mz_step_add_call(step, 0, 0, 0, &t.load, &pairs, t.plan, &err), &err);
            assert_ok(mz_step_finish(step, &o, &err), &err);
            assert_int_equal(o.dispatch_bytes, rows[d] * row_bytes);
            assert_int_equal(o.sent_bytes, o.received_bytes);
            if (!flow)
                assert_close(o.phase_s[tiny_phase("dispatch")],
                             leaving[d] * row_bytes / outside + 5e-6);
            mz_step_free(&step);
            tiny_free(&t);
        }
}

/* A token with two experts on one rank: two rows by pair, one by rank. */
static void test_dispatch_once_per_rank(void **state) {
    const int64_t count[] = {0, 0, 3, 3, 0, 0, 0, 0};
    const int64_t token_begin[] = {0, 3, 3}, pair_begin[] = {0, 6, 6};
    const uint16_t expert[] = {2, 3, 2, 3, 2, 3};
    const mz_pairs pairs = {.sources = 2,
                            .top_k = 2,
                            .tokens = 3,
                            .pairs = 6,
                            .token_begin = token_begin,
                            .pair_begin = pair_begin,
                            .expert = expert};
    mz_err err;
    for (int d = 0; d < 2; d++) {
        tiny t;
        mz_step *step;
        mz_step_outcome o;
        tiny_make(&t, 2, 2, "m");
        t.options.dispatch = d ? MZ_DISPATCH_RANK : MZ_DISPATCH_PAIR;
        tiny_load(&t, count);
        tiny_static_plan(&t);
        const mz_step_head head = {0, 1, 1, t.tokens};
        assert_ok(
            mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
            &err);
        assert_ok(mz_step_begin(step, &head, &err), &err);
        if (d)
            assert_fails(mz_step_add_call(step, 0, 0, 0, &t.load, NULL, t.plan, &err), MZ_EINPUT,
                         "--dispatch", &err);
        assert_ok(mz_step_add_call(step, 0, 0, 0, &t.load, &pairs, t.plan, &err), &err);
        assert_ok(mz_step_finish(step, &o, &err), &err);
        assert_int_equal(o.dispatch_bytes, (d ? 3 : 6) * row_bytes);
        assert_int_equal(o.backward_combine_bytes, (d ? 3 : 6) * row_bytes);
        mz_step_free(&step);
        tiny_free(&t);
    }
}

/* Of 4 pairs to expert 2 the 2nd and the 4th are kept, of 2 to expert 3 the 2nd. Tokens choose (0,
 * 2), (0, 2), (2, 3), (2, 3), so the 2nd and the 4th token cross, once each. */
static void test_kept_tokens_cross_once(void **state) {
    const int64_t count[] = {2, 0, 4, 2, 0, 0, 0, 0}, kept[] = {2, 0, 2, 1, 0, 0, 0, 0};
    const int32_t host_expert[] = {0, 1, 2, 3}, host_rank[] = {0, 0, 1, 1};
    const int64_t token_begin[] = {0, 4, 4}, pair_begin[] = {0, 8, 8};
    const uint16_t expert[] = {0, 2, 0, 2, 2, 3, 2, 3};
    const mz_pairs pairs = {.sources = 2,
                            .top_k = 2,
                            .tokens = 4,
                            .pairs = 8,
                            .token_begin = token_begin,
                            .pair_begin = pair_begin,
                            .expert = expert};
    tiny t;
    mz_err err;
    mz_step *step;
    mz_step_outcome o;
    for (int resend = 0; resend < 2; resend++) {
        tiny_make(&t, 2, 2, "m");
        t.options.dispatch = MZ_DISPATCH_RANK;
        t.traits.resend = resend;
        tiny_load(&t, count);
        tiny_plan(&t, 4, host_expert, host_rank, count, kept);
        const mz_step_head head = {0, 1, 1, t.tokens};
        assert_ok(
            mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
            &err);
        assert_ok(mz_step_begin(step, &head, &err), &err);
        assert_ok(mz_step_add_call(step, 0, 0, 0, &t.load, &pairs, t.plan, &err), &err);
        assert_ok(mz_step_finish(step, &o, &err), &err);
        assert_int_equal(o.dispatch_bytes, 4 * row_bytes);
        assert_int_equal(o.backward_dispatch_bytes, 2 * (resend ? 2 * row_bytes + 4 : row_bytes));
        mz_step_free(&step);
        tiny_free(&t);
    }
}

/* Rank 0 has 6 tokens for experts 2 and 3, both on ranks 1 and 0, 3 pairs each. In order the first
 * 3 tokens cross with both. Strided (balancing-systems.md 8.4: stride 5) expert 2's pairs take
 * places 2 1 0 5 4 3 and expert 3's 3 2 1 0 5 4, so tokens 0 to 2 cross for one, 1 to 3 for the
 * other. */
static void test_strided_pairs_cross_elsewhere(void **state) {
    const int64_t count[] = {0, 0, 6, 6, 0, 0, 0, 0};
    const int32_t host_expert[] = {0, 1, 2, 2, 3, 3}, host_rank[] = {0, 0, 1, 0, 1, 0};
    const int64_t spread[] = {0, 0, 3, 3, 3, 3, 0, 0, 0, 0, 0, 0};
    const int64_t token_begin[] = {0, 6, 6}, pair_begin[] = {0, 12, 12};
    const uint16_t expert[] = {2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3};
    const mz_pairs pairs = {.sources = 2,
                            .top_k = 2,
                            .tokens = 6,
                            .pairs = 12,
                            .token_begin = token_begin,
                            .pair_begin = pair_begin,
                            .expert = expert};
    for (int strided = 0; strided < 2; strided++) {
        tiny t;
        mz_err err;
        mz_step *step;
        mz_step_outcome o;
        tiny_make(&t, 2, 2, "m");
        t.options.dispatch = MZ_DISPATCH_RANK;
        t.traits.strided_pairs = strided;
        t.traits.slots = 4;
        tiny_load(&t, count);
        tiny_plan(&t, 6, host_expert, host_rank, spread, NULL);
        const mz_step_head head = {0, 1, 1, t.tokens};
        assert_ok(
            mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
            &err);
        assert_ok(mz_step_begin(step, &head, &err), &err);
        assert_ok(mz_step_add_call(step, 0, 0, 0, &t.load, &pairs, t.plan, &err), &err);
        assert_ok(mz_step_finish(step, &o, &err), &err);
        assert_int_equal(o.dispatch_bytes, (strided ? 4 : 3) * row_bytes);
        mz_step_free(&step);
        tiny_free(&t);
    }
}

/* ---- edges ---- */

static void test_nothing_to_do(void **state) {
    const int64_t none[16] = {0}, one[16] = {[4] = 2};
    tiny t;
    tiny_make(&t, 4, 2, "md");
    t.options.effects = mz_step_defaults(4).effects;
    tiny_load(&t, none);
    tiny_static_plan(&t);
    mz_step_outcome o = tiny_run(&t, 1);
    assert_int_equal(o.tokens, 0);
    assert_int_equal(o.dispatch_bytes, 0);
    assert_true(o.time_s > 0 && o.fits);
    tiny_load(&t, one); /* one source, one expert */
    tiny_static_plan(&t);
    o = tiny_run(&t, 1);
    assert_int_equal(o.tokens, 1);
    assert_int_equal(o.dispatch_bytes, 2 * row_bytes);
    tiny_free(&t);
}

static void test_same_bytes_twice(void **state) {
    tiny t;
    tiny_make(&t, 4, 2, "mmd");
    t.options.effects = mz_step_defaults(4).effects;
    t.options.effects.noise = true;
    t.options.recompute = MZ_RECOMPUTE_FULL;
    random_plan(&t, 5, true);
    mz_step *step;
    mz_step_outcome first, second;
    mz_err err;
    tiny_step(&t, 2, &step, &first);
    const mz_step_head head = {3, 2, 2, t.tokens};
    const double time = first.time_s;
    assert_ok(mz_step_begin(step, &head, &err), &err);
    for (int32_t b = 0; b < 2; b++)
        for (int32_t l = 0; l < 2; l++)
            assert_ok(mz_step_add_call(step, 0, b, l, &t.load, NULL, t.plan, &err), &err);
    assert_ok(mz_step_finish(step, &second, &err), &err);
    assert_true(second.time_s == time);
    mz_step_free(&step);
    second = tiny_run(&t, 2);
    assert_true(second.time_s == time);
    t.options.seed = 1;
    second = tiny_run(&t, 2);
    assert_true(second.time_s != time);
    tiny_free(&t);
}

static void test_refusals(void **state) {
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    mz_err err;
    tiny_make(&t, 4, 2, "m");
    t.options.ep = 3;
    assert_fails(mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
                 MZ_EINPUT, "--ep 3", &err);
    t.options.ep = 4;
    assert_fails(mz_step_create(&t.model, &t.cluster, &t.options, "nobody", &t.traits, &step, &err),
                 MZ_EINPUT, "nobody", &err);
    tiny_load(&t, even);
    tiny_static_plan(&t);
    assert_ok(mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
              &err);
    mz_step_head head = {0, 1, 2, t.tokens};
    assert_fails(mz_step_begin(step, &head, &err), MZ_EINPUT, "2 MoE layers", &err);
    head.layers = 1;
    assert_ok(mz_step_begin(step, &head, &err), &err);
    assert_fails(mz_step_finish(step, &o, &err), MZ_EINTERNAL, "without group 0", &err);
    assert_fails(mz_step_add_call(step, 1, 0, 0, &t.load, NULL, t.plan, &err), MZ_EINTERNAL,
                 "group 1", &err);
    mz_step_free(&step);
    tiny_free(&t);
}

/* Four ranks on two devices, links and memory that cost nothing: a device works for one rank after
 * the other, so the step is both ranks' work; the same with a queue per phase. */
static void test_ranks_of_one_device(void **state) {
    tiny t;
    tiny_make(&t, 4, 4, "m");
    t.cluster.topology.inside_latency_s = 0;
    t.cluster.device.memory_bytes_per_s = 1e30;
    for (int32_t r = 0; r < 4; r++)
        t.inside[r] = 1e30;
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const mz_step_outcome apart = tiny_run(&t, 1);
    for (int32_t r = 0; r < 4; r++)
        t.device[r] = r / 2;
    t.cluster.gpus = 2;
    t.cluster.ranks_per_device = 2;
    for (int fifo = 0; fifo < 2; fifo++) {
        t.options.effects.fifo = fifo;
        const mz_step_outcome shared = tiny_run(&t, 1);
        assert_close(shared.time_s, 2 * apart.time_s);
        assert_close(shared.phase_s[tiny_phase("experts")], apart.phase_s[tiny_phase("experts")]);
    }
    tiny_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_critical_path),
        cmocka_unit_test(test_ranks_of_one_device),
        cmocka_unit_test(test_layers_and_micro_batches),
        cmocka_unit_test(test_skew),
        cmocka_unit_test(test_host),
        cmocka_unit_test(test_conservation),
        cmocka_unit_test(test_moved_and_resent_rows),
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_hidden_move),
        cmocka_unit_test(test_scores_on_the_wire),
        cmocka_unit_test(test_free_replicas),
        cmocka_unit_test(test_optimizer_waits),
        cmocka_unit_test(test_awaited_move),
        cmocka_unit_test(test_move_before_next_layer),
        cmocka_unit_test(test_every_rank),
        cmocka_unit_test(test_zero_stages),
        cmocka_unit_test(test_ring_over_domains),
        cmocka_unit_test(test_expert_groups),
        cmocka_unit_test(test_dispatch_by_rank_and_node),
        cmocka_unit_test(test_dispatch_once_per_rank),
        cmocka_unit_test(test_kept_tokens_cross_once),
        cmocka_unit_test(test_strided_pairs_cross_elsewhere),
        cmocka_unit_test(test_nothing_to_do),
        cmocka_unit_test(test_same_bytes_twice),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
