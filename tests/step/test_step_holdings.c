/* What ranks hold for their policy, by its traits; sums that must hold at every allocation; shards
 * that add up to the whole; more tokens never need less.
 *
 * The tiny model: an expert of 3 * 32 * 64 = 6144 parameters, W = 12288 B, AdamW 12 B a parameter;
 * 2 heads; vocabulary 128. */
#include "tests/step/tiny.h"

#include "common/base/rng.h"
#include "sim/step/sizing.h"

enum { W = 2 * 6144, STATE = 12 * 6144, T = 32 };

static const int64_t even[4 * TINY_EXPERTS] = {16, 16, 16, 16, 16, 16, 16, 16,
                                               16, 16, 16, 16, 16, 16, 16, 16};

static void make(tiny *t, int32_t ranks, int32_t ep, const char *layers) {
    tiny_make(t, ranks, ranks, layers);
    t->options.ep = ep;
    tiny_load(t, even);
    tiny_static_plan(t);
}

static void resident(tiny *t, int64_t bytes[MZ_MEM_CATEGORIES]) {
    mz_step *step;
    mz_err err;
    assert_ok(
        mz_step_create(&t->model, &t->cluster, &t->options, "static", &t->traits, &step, &err),
        &err);
    mz_step_resident(step, bytes);
    mz_step_free(&step);
}

/* The timeline of a rank with its events; the caller frees it. */
static void timeline(tiny *t, int32_t micro_batches, int32_t rank, mz_memory *memory) {
    mz_step *step;
    mz_step_outcome outcome;
    mz_err err;
    tiny_step(t, micro_batches, &step, &outcome);
    mz_memory_init(memory, (int64_t)t->cluster.device.memory_bytes, t->options.allocator, true);
    assert_ok(mz_step_timeline(step, rank, memory, &err), &err);
    assert_int_equal(memory->peak, outcome.rank_peak_bytes[rank]);
    assert_int_equal(memory->most[MZ_MEM_REPLICAS], outcome.rank_replica_bytes[rank]);
    assert_int_equal(memory->most[MZ_MEM_TOKEN_BUFFERS], outcome.rank_token_buffer_bytes[rank]);
    mz_step_free(&step);
}

/* ---- policies ----------------------------------------------------------------------------------
 */

/* Slots beyond the mains of every layer: weights, gradients and, where replicas are updated on
 * their own, optimizer state. */
static void test_lasting_replicas(void **state) {
    int64_t before[MZ_MEM_CATEGORIES], after[MZ_MEM_CATEGORIES];
    tiny t;
    make(&t, 2, 2, "mdm");
    resident(&t, before);
    t.traits.slots = 3;
    t.traits.replica_memory = MZ_REPLICAS_RESIDENT;
    t.traits.replica_gradient_bytes = W;
    resident(&t, after);
    assert_int_equal(after[MZ_MEM_REPLICAS], 2 * 2 * W);
    assert_int_equal(after[MZ_MEM_OPTIMIZER_STATE], before[MZ_MEM_OPTIMIZER_STATE]);
    t.traits.replica_optimizer = true;
    resident(&t, after);
    assert_int_equal(after[MZ_MEM_OPTIMIZER_STATE], before[MZ_MEM_OPTIMIZER_STATE] + 2 * STATE);
    t.traits.slots = 4;
    resident(&t, after);
    assert_int_equal(after[MZ_MEM_REPLICAS], 2 * 2 * 2 * W);
    assert_int_equal(after[MZ_MEM_OPTIMIZER_STATE], before[MZ_MEM_OPTIMIZER_STATE] + 4 * STATE);
    t.traits.free_replicas = true;
    resident(&t, after);
    assert_int_equal(after[MZ_MEM_REPLICAS], 0);
    tiny_free(&t);
}

/* Most bytes of a category that were held while the label's buffer was. */
static int64_t most_of(const mz_memory *m, mz_memcat category, const char *from, const char *to) {
    int64_t now = 0, most = 0;
    bool inside = false;
    for (int64_t i = 0; i < m->events; i++) {
        const mz_memory_event *e = &m->event[i];
        now += e->category == category ? e->delta : 0;
        inside = inside || strcmp(e->label, from) == 0;
        if (inside && strcmp(e->label, to) == 0)
            break;
        most = inside && now > most ? now : most;
    }
    return most;
}

/* A shadow's weights live from forward to backward, its gradients in backward alone. */
static void test_transient_replicas(void **state) {
    const int32_t expert[] = {0, 0, 1, 2, 3}, rank[] = {0, 1, 0, 1, 1};
    const int64_t pairs[] = {16, 0, 16, 16, 16, 16, 0, 16, 16, 16};
    mz_memory m;
    tiny t;
    make(&t, 2, 2, "mm");
    t.traits.slots = 4;
    t.traits.replica_memory = MZ_REPLICAS_PER_LAYER;
    t.traits.replica_gradient_bytes = 2 * W;
    tiny_plan(&t, 5, expert, rank, pairs, NULL);
    timeline(&t, 1, 1, &m);
    assert_int_equal(most_of(&m, MZ_MEM_REPLICAS, "weights", "logits"), 2 * W);
    assert_int_equal(most_of(&m, MZ_MEM_REPLICAS, "logits", "none"), 2 * W + 2 * W);
    mz_memory_free(&m);
    timeline(&t, 1, 0, &m); /* hosts nothing besides its own */
    assert_int_equal(most_of(&m, MZ_MEM_REPLICAS, "weights", "none"), 0);
    mz_memory_free(&m);
    tiny_free(&t);
}

/* Sharded experts: a rank holds its part of each, gradients and state alike; all slots of a layer
 * are filled while it runs, those of the next one or two ahead. */
static void test_sharded_weights(void **state) {
    int64_t before[MZ_MEM_CATEGORIES], after[MZ_MEM_CATEGORIES];
    mz_memory m;
    tiny t;
    make(&t, 4, 4, "mmm");
    resident(&t, before);
    t.traits.slots = 2;
    t.traits.sharded_weights = true;
    resident(&t, after);
    for (int c = 0; c < MZ_MEM_COMMUNICATION; c++)
        assert_int_equal(after[c], before[c]); /* 4 experts on 4 ranks: a quarter of each */
    assert_int_equal(after[MZ_MEM_COMMUNICATION], before[MZ_MEM_COMMUNICATION] + 100);
    for (int ahead = 0; ahead < 3; ahead++) {
        t.traits.prefetch = ahead;
        timeline(&t, 1, 0, &m);
        assert_int_equal(most_of(&m, MZ_MEM_REPLICAS, "weights", "logits"), 2 * W * (1 + ahead));
        assert_int_equal(most_of(&m, MZ_MEM_REPLICAS, "logits", "none"), 2 * W * (2 + ahead));
        mz_memory_free(&m);
    }
    /* two groups: state is shared by both, weights are each group's own, whatever the ZeRO stage */
    t.options.ep = 2;
    tiny_static_plan(&t);
    t.options.zero = 3;
    resident(&t, after);
    const int64_t dense = 2 * (2 * 8192 + 3 * (16384 + 256));
    assert_int_equal(after[MZ_MEM_WEIGHTS], dense / 4 + 3 * 2 * W);
    assert_int_equal(after[MZ_MEM_GRADIENTS], dense / 4 + 3 * 2 * W);
    assert_int_equal(after[MZ_MEM_OPTIMIZER_STATE], 6 * dense / 4 + 3 * STATE);
    tiny_free(&t);
}

static void test_buffer_bytes(void **state) {
    int64_t before[MZ_MEM_CATEGORIES], after[MZ_MEM_CATEGORIES];
    tiny t;
    make(&t, 2, 2, "m");
    resident(&t, before);
    t.traits.buffer_bytes = 4 * W;
    resident(&t, after);
    assert_int_equal(after[MZ_MEM_GRADIENTS], before[MZ_MEM_GRADIENTS] + 4 * W);
    assert_int_equal(tiny_run(&t, 1).at_peak[MZ_MEM_GRADIENTS], after[MZ_MEM_GRADIENTS]);
    tiny_free(&t);
}

/* Three ranks, two steps: 5 1 3 and 2 4 3. */
static void test_sizing(void **state) {
    const int64_t first[] = {5, 1, 3}, second[] = {2, 4, 3};
    mz_arena arena = {0};
    mz_sizing sizing;
    assert_true(mz_sizing_init(&sizing, 3, &arena));
    mz_sized sized = mz_sizing_result(&sizing);
    assert_true(sized.dynamic_sum == 0 && sized.provisioned_sum == 0);
    mz_sizing_add(&sizing, first);
    mz_sizing_add(&sizing, second);
    sized = mz_sizing_result(&sizing);
    assert_near(sized.dynamic_sum, 9, 0);
    assert_near(sized.dynamic_worst, 4.5, 0);
    assert_int_equal(sized.highwater_sum, 5 + 4 + 3);
    assert_int_equal(sized.highwater_worst, 5);
    assert_int_equal(sized.provisioned_sum, 15);
    assert_int_equal(sized.provisioned_worst, 5);
    mz_arena_free(&arena);
}

/* ---- activations -------------------------------------------------------------------------------
 */

/* Sequences of 16 tokens: 32 tokens make 2 * 16 * 16 = 512 pairs of (query, key), 2 heads, 2 B
 * each. No log-sum-exp (4 B a head); the model has as many keys as queries. */
static void test_eager_attention(void **state) {
    enum { PAIRS = 2 * 16 * 16, KEPT = 2 * 2 * PAIRS, LSE = 8 * T };
    mz_memory m;
    tiny t;
    make(&t, 1, 1, "mm");
    const int64_t flash = tiny_run(&t, 1).peak_bytes;
    t.options.attention = MZ_ATTENTION_EAGER;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, flash + 2 * (KEPT - LSE));
    /* selective recomputation keeps none of it; full one layer's */
    t.options.recompute = MZ_RECOMPUTE_SELECTIVE;
    const int64_t eager = tiny_run(&t, 1).peak_bytes;
    timeline(&t, 1, 0, &m); /* scores and probabilities; in backward both and their gradients */
    assert_int_equal(most_of(&m, MZ_MEM_TEMPORARIES, "layer %d attention scores",
                             "layer %d router and shared expert activations"),
                     2 * KEPT);
    assert_int_equal(most_of(&m, MZ_MEM_TEMPORARIES, "layer %d attention gradients", "none"),
                     2 * 4 * 64 * T + 3 * KEPT);
    mz_memory_free(&m);
    t.options.attention = MZ_ATTENTION_FLASH;
    assert_int_equal(eager, tiny_run(&t, 1).peak_bytes - 2 * LSE);
    t.options.recompute = MZ_RECOMPUTE_FULL;
    const int64_t full = tiny_run(&t, 1).peak_bytes;
    t.options.attention = MZ_ATTENTION_EAGER;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, full + KEPT - LSE);
    /* fewer keys than queries: they are repeated for every query head */
    t.options.recompute = MZ_RECOMPUTE_NONE;
    const int64_t equal = tiny_run(&t, 1).peak_bytes;
    t.model.kv_heads = 1;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, equal);
    tiny_free(&t);
}

/* 32 tokens, queries and keys of 64: with norms of their own both are there twice; latents of 24
 * and 16 and 8 rotary values, the latents twice. Selective recomputation keeps the norms' inputs.
 */
static void test_norms_of_queries(void **state) {
    tiny t;
    make(&t, 1, 1, "mm");
    const int64_t plain = tiny_run(&t, 1).peak_bytes;
    t.options.recompute = MZ_RECOMPUTE_SELECTIVE;
    const int64_t selective = tiny_run(&t, 1).peak_bytes;
    t.model.qk_norm = true;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, selective);
    t.options.recompute = MZ_RECOMPUTE_NONE;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, plain + 2 * 2 * (64 + 64) * T);
    t.model.qk_norm = false;
    t.model.q_lora = 24;
    t.model.kv_lora = 16;
    t.model.rope_dim = 8;
    t.model.nope_dim = 24; /* with the rotary part 32 a head, as before */
    assert_int_equal(tiny_run(&t, 1).peak_bytes, plain + 2 * 2 * (2 * (24 + 16) + 8) * T);
    t.options.recompute = MZ_RECOMPUTE_SELECTIVE;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, selective + 2 * 2 * (24 + 16 + 8) * T);
    tiny_free(&t);
}

/* Logits of a micro-batch stay until the next ones are made, and through the update. */
static void test_kept_logits(void **state) {
    enum { LOGITS = 2 * TINY_VOCAB * T };
    tiny t;
    make(&t, 1, 1, "m");
    const int64_t freed = tiny_run(&t, 1).peak_bytes;
    t.options.keep_logits = true;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, freed + LOGITS);
    t.cluster.device.memory_bytes = 1e12;
    t.options.temporaries = MZ_TEMPORARIES_UNFUSED;
    t.tensor[0].rows = 1 << 20;
    mz_step_outcome o = tiny_run(&t, 1);
    assert_string_equal(o.peak_label, "temporaries of the optimizer's update");
    assert_int_equal(o.at_peak[MZ_MEM_ACTIVATIONS], LOGITS + 16 * T);
    t.options.keep_logits = false;
    assert_int_equal(tiny_run(&t, 1).at_peak[MZ_MEM_ACTIVATIONS], 16 * T);
    tiny_free(&t);
}

/* Logits 2V and their fp32 4V for 8 of 32 tokens at a time; the final norm's 4H for all. */
static void test_loss_in_pieces(void **state) {
    tiny t;
    make(&t, 1, 1, "m");
    t.model.vocab = 1 << 16; /* the loss makes the peak */
    const mz_step_outcome whole = tiny_run(&t, 1);
    assert_string_equal(whole.peak_label, "fp32 logits of the loss");
    t.options.loss_tokens = 8;
    const mz_step_outcome pieces = tiny_run(&t, 1);
    assert_string_equal(pieces.peak_label, "fp32 logits of the loss");
    assert_int_equal(whole.peak_bytes - pieces.peak_bytes, 6 * t.model.vocab * (T - 8));
    assert_int_equal(pieces.at_peak[MZ_MEM_TEMPORARIES], 4 * t.model.vocab * 8 + 4 * 64 * T);
    t.options.loss_tokens = 1000;
    assert_int_equal(tiny_run(&t, 1).peak_bytes, whole.peak_bytes);
    tiny_free(&t);
}

/* ---- properties --------------------------------------------------------------------------------
 */

/* A machine, options and a plan drawn at random; some experts have a second host. */
static void draw(tiny *t, uint64_t seed) {
    static const char *const shapes[] = {"m", "mm", "dm", "mdm", "mmd", "mmmm"};
    mz_rng rng = mz_rng_make(seed, 7);
    const int32_t ep = 1 << mz_rng_below(&rng, 3), groups = 1 + (int32_t)mz_rng_below(&rng, 3);
    tiny_make(t, ep * groups, ep * groups, shapes[mz_rng_below(&rng, COUNT_OF(shapes))]);
    t->options.ep = ep;
    t->options.zero = (int32_t)mz_rng_below(&rng, 4);
    t->options.recompute = (mz_recompute)mz_rng_below(&rng, 3);
    t->options.attention = (mz_attention)mz_rng_below(&rng, 2);
    t->options.keep_logits = mz_rng_below(&rng, 2) != 0;
    if (!t->options.keep_logits)
        t->options.loss_tokens = (int64_t)mz_rng_below(&rng, 3) * 700;
    t->options.temporaries = (mz_temporaries)mz_rng_below(&rng, 3);
    t->options.allocator = (mz_allocator)mz_rng_below(&rng, 2);
    int64_t count[TINY_RANKS * TINY_EXPERTS];
    for (int i = 0; i < ep * TINY_EXPERTS; i++)
        count[i] = (int64_t)mz_rng_below(&rng, 3000);
    tiny_load(t, count);
    for (int i = 0; i < 4 * t->cluster.ranks; i++)
        t->tokens[i] = (int64_t)mz_rng_below(&rng, 5000);
    tiny_static_plan(t);
    t->traits.slots = TINY_EXPERTS / ep + (int32_t)mz_rng_below(&rng, 3);
    t->traits.replica_memory = (mz_replica_memory)mz_rng_below(&rng, 4);
    t->traits.replica_gradient_bytes = (int64_t)mz_rng_below(&rng, 3) * W;
    t->traits.replica_optimizer = mz_rng_below(&rng, 2) != 0;
    t->traits.sharded_optimizer = mz_rng_below(&rng, 2) != 0;
    t->traits.sharded_weights = mz_rng_below(&rng, 4) == 0;
    t->traits.prefetch = (int32_t)mz_rng_below(&rng, 3);
    t->traits.buffer_bytes = (int64_t)mz_rng_below(&rng, 1000);
    t->traits.router_gradient_kept = mz_rng_below(&rng, 2) != 0;
}

/* At every allocation: nothing negative, categories add up to the total; after the step only what
 * was there before it is in blocks. */
static void test_sums_at_every_event(void **state) {
    for (uint64_t seed = 0; seed < 60; seed++) {
        int64_t now[MZ_MEM_CATEGORIES] = {0}, most[MZ_MEM_CATEGORIES] = {0};
        int64_t held[MZ_MEM_CATEGORIES], sum = 0;
        mz_memory m;
        tiny t;
        draw(&t, seed);
        resident(&t, held);
        timeline(&t, 1 + (int32_t)(seed % 3), (int32_t)(seed % (uint64_t)t.cluster.ranks), &m);
        assert_true(m.events > 20);
        for (int64_t i = 0; i < m.events; i++) {
            const mz_memory_event *e = &m.event[i];
            now[e->category] += e->delta;
            sum += e->delta;
            if (now[e->category] > most[e->category])
                most[e->category] = now[e->category];
            assert_true(now[e->category] >= 0 && e->idle >= 0);
            assert_true(e->total == sum + e->idle && e->total <= m.peak);
        }
        for (int c = 0; c < MZ_MEM_CATEGORIES; c++) {
            assert_true(c == MZ_MEM_WORKSPACE || m.most[c] == most[c]);
            assert_true(now[c] >= held[c]);
            if (t.options.allocator == MZ_ALLOCATOR_EXACT)
                assert_int_equal(now[c], held[c]);
        }
        mz_memory_free(&m);
        tiny_free(&t);
    }
}

/* A caching allocator never reserves less than what is asked for, and its total is segments. */
static void test_caching_against_exact(void **state) {
    for (uint64_t seed = 0; seed < 40; seed++) {
        tiny t;
        draw(&t, seed);
        t.cluster.device.memory_bytes = 1e12;
        t.options.allocator = MZ_ALLOCATOR_EXACT;
        const mz_step_outcome exact = tiny_run(&t, 2);
        t.options.allocator = MZ_ALLOCATOR_CACHING;
        const mz_step_outcome caching = tiny_run(&t, 2);
        assert_true(caching.peak_bytes >= exact.peak_bytes && exact.idle_at_peak == 0);
        const int64_t segments = caching.peak_bytes - caching.at_peak[MZ_MEM_CONTEXT] -
                                 caching.at_peak[MZ_MEM_COMMUNICATION];
        assert_int_equal(segments % (2 << 20), 0);
        tiny_free(&t);
    }
}

/* Ranks times what each holds is the unsharded total; every share is rounded up to a byte, so the
 * sum exceeds it by less than a byte per rank and tensor (sharded experts: and expert). */
static void shards(int32_t ranks, int32_t ep, int32_t zero, bool cut_state, bool cut_weights) {
    int64_t held[MZ_MEM_CATEGORIES];
    tiny t;
    make(&t, ranks, ep, "mdm");
    t.options.zero = zero;
    t.traits.sharded_optimizer = cut_state;
    t.traits.sharded_weights = cut_weights;
    t.traits.slots = cut_weights ? TINY_EXPERTS / ep : 0;
    resident(&t, held);
    int64_t dense = 0, experts = 0;
    for (int64_t i = 0; i < t.model.tensors; i++) {
        const mz_tensor *x = &t.model.tensor[i];
        *(x->tier == MZ_TIER_EXPERT ? &experts : &dense) += x->rows * x->cols * x->count;
    }
    const int64_t groups = ranks / ep, slack = ranks * t.model.tensors * TINY_EXPERTS;
    const struct {
        mz_memcat category;
        int32_t stage;
        int64_t bytes;
    } of[] = {{MZ_MEM_WEIGHTS, 3, 2}, {MZ_MEM_GRADIENTS, 2, 2}, {MZ_MEM_OPTIMIZER_STATE, 1, 12}};
    for (int i = 0; i < COUNT_OF(of); i++) {
        const bool cut = zero >= of[i].stage, own = cut_weights && i < 2;
        const int64_t copies = cut ? 1 : ranks, expert_copies = cut && !own ? 1 : groups;
        const int64_t whole = of[i].bytes * (copies * dense + expert_copies * experts);
        const int64_t sum = ranks * held[of[i].category];
        if (sum < whole || sum >= whole + slack)
            fail_msg("%d ranks, EP %d, ZeRO %d: %s add up to %lld, not %lld", ranks, ep, zero,
                     mz_memcat_name(of[i].category), (long long)sum, (long long)whole);
    }
    tiny_free(&t);
}

static void test_shards_add_up(void **state) {
    static const int32_t sizes[][2] = {{1, 1}, {2, 1}, {3, 1},  {4, 2}, {6, 2},
                                       {4, 4}, {8, 4}, {12, 4}, {14, 2}};
    for (int i = 0; i < COUNT_OF(sizes); i++)
        for (int32_t zero = 0; zero < 4; zero++)
            for (int cut = 0; cut < 3; cut++)
                shards(sizes[i][0], sizes[i][1], zero, cut == 1, cut == 2);
}

/* More pairs and tokens never lower the peak of static with the exact allocator. */
static void test_peak_grows_with_tokens(void **state) {
    for (uint64_t seed = 0; seed < 40; seed++) {
        mz_rng rng = mz_rng_make(seed, 9);
        int64_t before = 0;
        tiny t;
        draw(&t, seed);
        t.traits = (mz_policy_traits){.interval = 1, .score_source = ""};
        t.options.allocator = MZ_ALLOCATOR_EXACT;
        for (int more = 0; more < 6; more++) {
            int64_t count[TINY_RANKS * TINY_EXPERTS];
            for (int i = 0; i < t.ep * TINY_EXPERTS; i++)
                count[i] = t.count[i] + (int64_t)mz_rng_below(&rng, 40);
            tiny_free(&t);
            tiny_load(&t, count);
            tiny_static_plan(&t);
            const int64_t peak = tiny_run(&t, 1).peak_bytes;
            assert_true(peak >= before && peak > 0);
            before = peak;
        }
        tiny_free(&t);
    }
}

/* Without the clock, and with one group in place of all, the memory is the same. */
static void test_memory_alone(void **state) {
    for (uint64_t seed = 0; seed < 40; seed++) {
        mz_step *step;
        mz_err err;
        mz_step_outcome alone;
        tiny t;
        draw(&t, seed);
        for (int i = 0; i < 4 * t.cluster.ranks; i++)
            t.tokens[i] = t.tokens[i % t.ep]; /* groups alike */
        const mz_step_outcome whole = tiny_run(&t, 1);
        t.options.memory_only = t.options.one_group = true;
        const mz_step_head head = {0, 1, t.model.moe_layers, t.tokens};
        assert_ok(
            mz_step_create(&t.model, &t.cluster, &t.options, "unknown", &t.traits, &step, &err),
            &err);
        assert_ok(mz_step_begin(step, &head, &err), &err);
        for (int32_t l = 0; l < t.model.moe_layers; l++)
            assert_ok(mz_step_add_call(step, 0, 0, l, &t.load, NULL, t.plan, &err), &err);
        assert_ok(mz_step_finish(step, &alone, &err), &err);
        assert_int_equal(alone.peak_bytes, whole.peak_bytes);
        assert_memory_equal(alone.at_peak, whole.at_peak, sizeof whole.at_peak);
        assert_string_equal(alone.peak_label, whole.peak_label);
        for (int32_t r = 0; r < t.cluster.ranks; r++)
            assert_int_equal(alone.rank_peak_bytes[r], alone.rank_peak_bytes[r % t.ep]);
        mz_step_free(&step);
        tiny_free(&t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lasting_replicas),
        cmocka_unit_test(test_transient_replicas),
        cmocka_unit_test(test_sharded_weights),
        cmocka_unit_test(test_buffer_bytes),
        cmocka_unit_test(test_sizing),
        cmocka_unit_test(test_eager_attention),
        cmocka_unit_test(test_norms_of_queries),
        cmocka_unit_test(test_kept_logits),
        cmocka_unit_test(test_loss_in_pieces),
        cmocka_unit_test(test_sums_at_every_event),
        cmocka_unit_test(test_caching_against_exact),
        cmocka_unit_test(test_shards_add_up),
        cmocka_unit_test(test_peak_grows_with_tokens),
        cmocka_unit_test(test_memory_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
