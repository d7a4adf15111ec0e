/* Memory of a step written out by hand, ZeRO's shares, budgets that fit exactly, what does not fit.
 *
 * One rank, T = 32 tokens, 64 pairs, H = 64, I = 32: per token x 128 B; attention 2 (H + 2H + 4 *
 * 64) + 4 * 2 heads = 904 B; router 4 * 4 + 8 * 2 = 32 B; ids and targets 16 B; per pair a row 128
 * B, gate and up 128 B, the activation 64 B. Parameters: embedding and head 2 * 8192, attention
 * 16384, router 256, experts 4 * 6144. */
#include "tests/step/tiny.h"

static const int64_t even[4 * TINY_EXPERTS] = {16, 16, 16, 16, 16, 16, 16, 16,
                                               16, 16, 16, 16, 16, 16, 16, 16};
enum {
    T = 32,
    PAIRS = 64,
    INPUT = 128 * T,
    ATTENTION = 904 * T,
    ROUTER = 32 * T,
    TOKENS = INPUT + ATTENTION + ROUTER, /* of one MoE layer */
    ROW = 128 * PAIRS,
    GATE_UP = 128 * PAIRS,
    ACT = 64 * PAIRS,
    SAVED = ROW + GATE_UP + ACT,
    HIDDEN = 2 * 128 * T, /* gradients of two hidden rows per token */
    DENSE_WEIGHTS = 2 * (2 * 8192 + 16384 + 256),
    EXPERT_WEIGHTS = 2 * 4 * 6144,
    FIXED = 1000 + 2 * 10, /* context, workspaces of forward and backward */
    IDS = 16 * T           /* ids and targets of a micro-batch */
};

static int64_t resident(int64_t weights) { /* weights, gradients, AdamW's 12 bytes a parameter */
    return FIXED + weights + weights + 6 * weights;
}

static void make(tiny *t, int32_t ranks, const char *layers) {
    tiny_make(t, ranks, ranks, layers);
    tiny_load(t, even);
    tiny_static_plan(t);
}

static void test_one_layer(void **state) {
    tiny t;
    make(&t, 1, "m");
    const mz_step_outcome o = tiny_run(&t, 1);
    const int64_t base = resident(DENSE_WEIGHTS + EXPERT_WEIGHTS);
    /* forward: + outputs and combined rows; loss: + logits 2V and their work 4V + 4H; backward: +
     * dY, d(act), d(gate, up), dX */
    const int64_t forward = TOKENS + SAVED + ROW + ROW;
    const int64_t loss = TOKENS + SAVED + T * (2 * 128 + 4 * 128 + 4 * 64);
    const int64_t backward = TOKENS + SAVED + HIDDEN + ROW + ACT + GATE_UP + ROW;
    assert_true(backward > loss && loss > forward);
    assert_int_equal(o.resident_bytes, base);
    assert_int_equal(o.peak_bytes, base + IDS + backward);
    assert_int_equal(o.at_peak[MZ_MEM_ACTIVATIONS], IDS + TOKENS + HIDDEN);
    assert_int_equal(o.at_peak[MZ_MEM_TOKEN_BUFFERS], SAVED + 2 * ROW + ACT + GATE_UP);
    assert_int_equal(o.at_peak[MZ_MEM_WEIGHTS], DENSE_WEIGHTS + EXPERT_WEIGHTS);
    assert_int_equal(o.at_peak[MZ_MEM_OPTIMIZER_STATE], 6 * (DENSE_WEIGHTS + EXPERT_WEIGHTS));
    assert_int_equal(o.at_peak[MZ_MEM_CONTEXT], 1000);
    assert_string_equal(o.peak_label, "layer 0 input gradients of experts");
    assert_true(o.fits);
    /* micro-batches follow each other; the step's ids are there from the start */
    assert_int_equal(tiny_run(&t, 3).peak_bytes, o.peak_bytes + 2 * IDS);
    tiny_free(&t);
}

/* Two layers keep both layers' activations; selective and full recomputation keep less. */
static void test_recomputation(void **state) {
    tiny t;
    make(&t, 1, "mm");
    const int64_t base =
        IDS + resident(DENSE_WEIGHTS + EXPERT_WEIGHTS + 2 * (16384 + 256) + EXPERT_WEIGHTS);
    const int64_t work = HIDDEN + 2 * ROW + ACT + GATE_UP;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, base + 2 * (TOKENS + SAVED) + work);
    /* selective: norm outputs 4H a token and activations are made again, one layer's at a time */
    t.options.recompute = MZ_RECOMPUTE_SELECTIVE;
    assert_int_equal(tiny_run(&t, 1).peak_bytes,
                     base + 2 * (TOKENS - 4 * 64 * T + SAVED - ACT) + work + ACT);
    t.options.recompute = MZ_RECOMPUTE_FULL;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, base + INPUT + TOKENS + SAVED + work);
    tiny_free(&t);
}

static void test_dense_layer(void **state) {
    tiny t;
    make(&t, 1, "dm");
    const int64_t dense = INPUT + ATTENTION + 2 * 3 * 96 * T;
    const int64_t base = IDS + resident(DENSE_WEIGHTS + EXPERT_WEIGHTS + 2 * (16384 + 3 * 96 * 64));
    assert_int_equal(tiny_run(&t, 1).peak_bytes,
                     base + dense + TOKENS + SAVED + HIDDEN + 2 * ROW + ACT + GATE_UP);
    tiny_free(&t);
}

/* A wide dense layer: its activations 2 (2D + D) and, in backward, d(act) 2D and d(gate, up) 4D. */
static void test_wide_dense_layer(void **state) {
    const int64_t D = 4096;
    tiny t;
    make(&t, 1, "md");
    t.model.dense_intermediate = D;
    const int64_t base = IDS + resident(DENSE_WEIGHTS + EXPERT_WEIGHTS + 2 * (16384 + 3 * 96 * 64));
    const mz_step_outcome o = tiny_run(&t, 1);
    assert_int_equal(o.peak_bytes,
                     base + TOKENS + SAVED + INPUT + ATTENTION + 6 * D * T + HIDDEN + 6 * D * T);
    assert_string_equal(o.peak_label, "layer 1 feed-forward gradients");
    tiny_free(&t);
}

/* Kept half: the workspace of backward halves; with re-sent x the saved rows go and those of the
 * kept pairs come back, twice the rows on the sender. Norms of all pairs, 4 B, stay from forward
 * on; in backward every pair has a score, 4 B, and a place in the list of kept ones, 8 B. */
static void test_quota(void **state) {
    const int32_t expert[] = {0, 1, 2, 3}, rank[] = {0, 0, 0, 0};
    const int64_t half[] = {8, 8, 8, 8};
    tiny t;
    make(&t, 1, "m");
    t.traits.score_combine_bytes = 4;
    tiny_plan(&t, 4, expert, rank, even, half);
    const int64_t base = IDS + resident(DENSE_WEIGHTS + EXPERT_WEIGHTS);
    const int64_t norms = 4 * PAIRS, selection = 12 * PAIRS;
    const int64_t loss = TOKENS + norms + T * (2 * 128 + 4 * 128 + 4 * 64);
    const int64_t work = norms + selection + (2 * ROW + ACT + GATE_UP) / 2;
    const int64_t saved = TOKENS + SAVED + HIDDEN + work;
    const int64_t first = loss + SAVED > saved ? loss + SAVED : saved;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, base + first);
    t.traits.resend = true;
    const int64_t forward = TOKENS + SAVED + ROW;
    const int64_t resend = TOKENS + HIDDEN + work + (ROW + GATE_UP + ACT) / 2;
    int64_t most = forward > loss ? forward : loss;
    most = resend > most ? resend : most;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, base + most);
    tiny_free(&t);
}

/* The router's gradient of dropped pairs needs the combined rows until backward. */
static void test_router_gradient_kept(void **state) {
    tiny t;
    make(&t, 1, "m");
    const int64_t without = tiny_run(&t, 1).peak_bytes;
    t.traits.router_gradient_kept = true;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, without + ROW);
    tiny_free(&t);
}

/* Shares of ZeRO over 4 ranks, experts over 2 groups of 2; the communicators are three. */
static void test_zero(void **state) {
    for (int32_t zero = 0; zero < 4; zero++) {
        tiny t;
        tiny_make(&t, 4, 4, "m");
        t.options.ep = 2;
        t.options.zero = zero;
        tiny_load(&t, even);
        tiny_static_plan(&t);
        const mz_step_outcome o = tiny_run(&t, 1);
        const int64_t dense = DENSE_WEIGHTS, experts = EXPERT_WEIGHTS / 2;
        const int64_t whole = dense + experts, shard = dense / 4 + experts / 2;
        assert_int_equal(o.resident_bytes, FIXED + 300 + (zero < 3 ? whole : shard) +
                                               (zero < 2 ? whole : shard) +
                                               6 * (zero < 1 ? whole : shard));
        tiny_free(&t);
    }
}

/* ZeRO 3 at the first layer of two: its weights and the next one's are gathered beside the shards.
 */
static void test_gathered_weights(void **state) {
    tiny t;
    make(&t, 4, "mm");
    t.options.zero = 3;
    const mz_step_outcome three = tiny_run(&t, 1);
    const int64_t layer = 2 * (16384 + 256);
    /* at the peak (backward products of layer 1) both layers' weights are there */
    assert_int_equal(three.at_peak[MZ_MEM_WEIGHTS],
                     (2 * 2 * 8192 + 2 * layer) / 4 + 2 * (EXPERT_WEIGHTS / 4) + 2 * layer);
    assert_int_equal(three.at_peak[MZ_MEM_TEMPORARIES], layer); /* gradients to scatter */
    tiny_free(&t);
}

static void test_replicas(void **state) {
    const int32_t expert[] = {0, 0, 1, 2, 3}, rank[] = {0, 1, 0, 1, 1};
    const int64_t pairs[] = {16, 0, 16, 16, 16, 16, 0, 16, 16, 16};
    const int64_t weights = 2 * 6144;
    tiny t;
    tiny_make(&t, 2, 2, "m");
    tiny_load(&t, even);
    tiny_static_plan(&t);
    const int64_t none = tiny_run(&t, 1).resident_bytes;
    t.traits.slots = 4; /* two mains and two more */
    t.traits.replica_gradient_bytes = 2 * weights;
    t.traits.replica_memory = MZ_REPLICAS_SHARED;
    tiny_plan(&t, 5, expert, rank, pairs, NULL);
    mz_step_outcome o = tiny_run(&t, 1);
    assert_int_equal(o.resident_bytes, none + 100 + 2 * 3 * weights); /* a communicator more */
    /* per layer: only the one that is used, on rank 1 */
    t.traits.replica_memory = MZ_REPLICAS_PER_LAYER;
    o = tiny_run(&t, 1);
    assert_int_equal(o.resident_bytes, none + 100);
    assert_int_equal(o.worst_rank, 1);
    assert_int_equal(o.at_peak[MZ_MEM_REPLICAS], 3 * weights);
    t.traits.free_replicas = true;
    assert_int_equal(tiny_run(&t, 1).at_peak[MZ_MEM_REPLICAS], 0);
    tiny_free(&t);
}

/* State spread over the group: a rank holds its share of every expert's. */
static void test_sharded_optimizer(void **state) {
    tiny t;
    make(&t, 2, "m");
    t.options.zero = 0;
    const int64_t plain = tiny_run(&t, 1).at_peak[MZ_MEM_OPTIMIZER_STATE];
    assert_int_equal(plain, 6 * (DENSE_WEIGHTS + EXPERT_WEIGHTS / 2));
    t.traits.sharded_optimizer = true;
    assert_int_equal(tiny_run(&t, 1).at_peak[MZ_MEM_OPTIMIZER_STATE], plain);
    tiny_free(&t);
}

/* The update's temporaries: fp32 copies of the largest tensor, of its shard, of a chunk. */
static void test_update_temporaries(void **state) {
    tiny t;
    make(&t, 1, "m");
    t.options.temporaries = MZ_TEMPORARIES_UNFUSED;
    t.tensor[0].rows = 1 << 20; /* an embedding of 2^26 values dwarfs all else */
    t.cluster.device.memory_bytes = 1e12;
    const int64_t copies = 3; /* AdamW with master weights: gradient, denominator, update */
    mz_step_outcome o = tiny_run(&t, 1);
    assert_int_equal(o.at_peak[MZ_MEM_TEMPORARIES], copies * 4 * (1 << 26));
    assert_string_equal(o.peak_label, "temporaries of the optimizer's update");
    t.options.temporaries = MZ_TEMPORARIES_CHUNKED;
    assert_int_equal(tiny_run(&t, 1).at_peak[MZ_MEM_TEMPORARIES], copies * 4 * (16 << 20));
    tiny_free(&t);
}

typedef struct budget_case {
    const char *layers;
    int32_t ranks, ep, zero;
    bool resend;
    mz_recompute recompute;
    mz_allocator allocator;
} budget_case;

/* 1000 pairs to each expert from all sources of a group alike. */
static void budget_plan(tiny *t, int64_t rows) {
    const int32_t ep = t->options.ep, each = TINY_EXPERTS / ep;
    int32_t expert[TINY_EXPERTS], rank[TINY_EXPERTS];
    int64_t kept[TINY_RANKS * TINY_EXPERTS];
    for (int32_t e = 0; e < TINY_EXPERTS; e++) {
        expert[e] = e;
        rank[e] = e / each;
        /* a rank's rows spread over its experts and their sources */
        for (int32_t s = 0; s < ep; s++) {
            const int64_t cell = (int64_t)s * each + e % each;
            const int64_t n = rows / (each * ep) + (cell < rows % (each * ep));
            kept[s * TINY_EXPERTS + e] =
                n < t->count[s * TINY_EXPERTS + e] ? n : t->count[s * TINY_EXPERTS + e];
        }
    }
    tiny_plan(t, TINY_EXPERTS, expert, rank, t->count, kept);
}

static void budget_machine(tiny *t, const budget_case *c) {
    int64_t count[TINY_RANKS * TINY_EXPERTS];
    tiny_make(t, c->ranks, c->ranks, c->layers);
    t->options.ep = c->ep;
    t->options.zero = c->zero;
    t->options.recompute = c->recompute;
    t->options.allocator = c->allocator;
    t->traits.resend = c->resend;
    t->traits.lossy = true;
    t->traits.score_combine_bytes = 4;
    for (int i = 0; i < c->ep * TINY_EXPERTS; i++)
        count[i] = 1000 / c->ep;
    tiny_load(t, count);
    for (int i = 0; i < 4 * c->ranks; i++)
        t->tokens[i] = T; /* few tokens, so that pairs decide */
    t->cluster.device.memory_bytes = 1e12;
    budget_plan(t, 1);
    const double rounding = c->allocator == MZ_ALLOCATOR_CACHING ? 64 << 20 : 0;
    const double room = 400e3 / c->ep;
    t->cluster.device.memory_bytes = (double)tiny_run(t, 1).peak_bytes + room + rounding;
}

/* Every call keeps what its budget allows, the last one `more` on top. */
static mz_step_outcome budget_run(tiny *t, int64_t more, int64_t *last) {
    const int32_t moe = t->model.moe_layers, groups = t->cluster.ranks / t->options.ep;
    const mz_step_head head = {0, 1, moe, t->tokens};
    mz_step *step;
    mz_step_outcome o;
    mz_err err;
    assert_ok(
        mz_step_create(&t->model, &t->cluster, &t->options, "static", &t->traits, &step, &err),
        &err);
    assert_ok(mz_step_begin(step, &head, &err), &err);
    for (int32_t l = 0; l < moe; l++)
        for (int32_t g = 0; g < groups; g++) {
            mz_budget budget;
            assert_ok(mz_step_budget(step, g, 0, l, &t->load, &budget, &err), &err);
            assert_int_equal(budget.backward_rows, budget.rank_rows[t->options.ep - 1]);
            *last = budget.backward_rows;
            assert_true(*last > 0);
            budget_plan(t, *last + (l == moe - 1 ? more : 0));
            assert_ok(mz_step_add_call(step, g, 0, l, &t->load, NULL, t->plan, &err), &err);
        }
    assert_ok(mz_step_finish(step, &o, &err), &err);
    mz_step_free(&step);
    return o;
}

/* What the budget allows fits, one pair a rank more does not. */
static void budget_is_exact(budget_case c) {
    tiny t;
    int64_t last;
    budget_machine(&t, &c);
    assert_true(budget_run(&t, 0, &last).fits);
    if (c.allocator == MZ_ALLOCATOR_EXACT) {
        assert_in_range(last, 2, 4000 / c.ep - 1); /* the last layer was tight */
        assert_false(budget_run(&t, 1, &last).fits);
    }
    tiny_free(&t);
}

static void test_budget(void **state) {
    const mz_recompute none = MZ_RECOMPUTE_NONE, full = MZ_RECOMPUTE_FULL;
    const mz_allocator exact = MZ_ALLOCATOR_EXACT;
    const budget_case cases[] = {
        {"m", 1, 1, 0, false, none, exact},
        {"mdm", 1, 1, 0, false, none, exact},
        {"m", 1, 1, 0, true, none, exact},
        {"mm", 1, 1, 0, false, MZ_RECOMPUTE_SELECTIVE, exact},
        {"mm", 1, 1, 0, false, full, exact},
        {"mmd", 1, 1, 0, true, full, exact},
        {"mdm", 1, 1, 0, false, none, MZ_ALLOCATOR_CACHING},
        {"dmm", 2, 2, 1, false, none, exact},
        {"mm", 4, 2, 1, false, none, exact},
        {"mm", 4, 4, 2, false, none, exact},
        {"mm", 4, 2, 2, true, none, exact},
        {"mmm", 4, 2, 3, false, full, exact},
        {"mm", 4, 4, 3, true, none, exact},
    };
    for (int i = 0; i < COUNT_OF(cases); i++)
        budget_is_exact(cases[i]);
}

/* All pairs go to rank 0's experts: it keeps them all from forward, so it has less room for
 * backward; where the policy spreads them over replicas, both ranks keep the mean. */
static void test_budget_by_rank(void **state) {
    const int64_t count[] = {16, 16, 0, 0, 16, 16, 0, 0};
    const mz_step_head head = {0, 1, 1, (int64_t[]){32, 32}};
    int64_t caps[2][2];
    for (int replicas = 0; replicas < 2; replicas++) {
        tiny t;
        mz_step *step;
        mz_budget budget;
        mz_err err;
        tiny_make(&t, 2, 2, "m");
        t.traits.slots = 2 + replicas;
        tiny_load(&t, count);
        assert_ok(
            mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
            &err);
        assert_ok(mz_step_begin(step, &head, &err), &err);
        assert_ok(mz_step_budget(step, 0, 0, 0, &t.load, &budget, &err), &err);
        memcpy(caps[replicas], budget.rank_rows, sizeof caps[replicas]);
        assert_int_equal(budget.backward_rows, caps[replicas][0]);
        mz_step_free(&step);
    }
    const int64_t pair = 128 + 64 + 128 + 128, saved = 128 + 128 + 64;
    assert_in_range(caps[0][1] - caps[0][0], 64 * saved / pair, 64 * saved / pair + 1);
    assert_int_equal(caps[1][0], caps[1][1]);
    assert_true(caps[1][0] > caps[0][0] && caps[1][0] < caps[0][1]);
}

/* Given budgets replace what memory leaves: 4480 B are 10 pairs of dY 128, d(act) 64, d(gate, up)
 * 128, dX 128; 1280 B a source may send are 10 rows. */
static void test_given_budgets(void **state) {
    tiny t;
    mz_err err;
    mz_step *step;
    mz_budget budget;
    make(&t, 2, "m");
    t.options.budget_memory_bytes = 4480;
    t.options.budget_network_bytes = 1280;
    const mz_step_head head = {0, 1, 1, t.tokens};
    assert_ok(mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
              &err);
    assert_ok(mz_step_begin(step, &head, &err), &err);
    assert_ok(mz_step_budget(step, 0, 0, 0, &t.load, &budget, &err), &err);
    assert_int_equal(budget.backward_rows, 10);
    assert_int_equal(budget.rank_rows[1], 10);
    assert_int_equal(budget.backward_send_rows, 10);
    mz_step_free(&step);
    tiny_free(&t);
}

/* What does not fit is a result that names category, buffer, rank and what to do. */
static void test_overflow(void **state) {
    tiny t;
    make(&t, 2, "m");
    const mz_step_outcome fits = tiny_run(&t, 1);
    t.cluster.device.memory_bytes = (double)fits.peak_bytes - 1;
    mz_step_outcome o = tiny_run(&t, 1);
    assert_false(o.fits);
    assert_non_null(strstr(o.oom, "token_buffers: layer 0 input gradients of experts"));
    assert_non_null(strstr(o.oom, "rank 0"));
    assert_non_null(strstr(o.oom, "too much; try "));
    assert_int_equal(o.peak_bytes, fits.peak_bytes);
    t.cluster.device.memory_bytes = (double)fits.peak_bytes;
    assert_true(tiny_run(&t, 1).fits);
    t.cluster.device.memory_bytes = 100000;
    o = tiny_run(&t, 1);
    assert_non_null(strstr(o.oom, "gradients: gradients"));
    assert_non_null(strstr(o.oom, "--zero"));
    /* several ranks on one device share its memory */
    t.cluster.ranks_per_device = 2;
    t.cluster.device.memory_bytes = 2.0 * (double)fits.peak_bytes - 2;
    assert_true(tiny_run(&t, 1).fits); /* half a context each */
    tiny_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_layer),
        cmocka_unit_test(test_recomputation),
        cmocka_unit_test(test_wide_dense_layer),
        cmocka_unit_test(test_dense_layer),
        cmocka_unit_test(test_quota),
        cmocka_unit_test(test_router_gradient_kept),
        cmocka_unit_test(test_zero),
        cmocka_unit_test(test_gathered_weights),
        cmocka_unit_test(test_replicas),
        cmocka_unit_test(test_sharded_optimizer),
        cmocka_unit_test(test_update_temporaries),
        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_budget_by_rank),
        cmocka_unit_test(test_given_budgets),
        cmocka_unit_test(test_overflow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
