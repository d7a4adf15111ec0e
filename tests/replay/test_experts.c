/* What moves experts, under the real policies: every instance computes with the owner's weights,
 * the owner's gradient is the sum of all instances', the optimizer's step is that of plain loops in
 * double precision, and memory is what the policy asks for. */
#include "tests/harness.h"

#include "replay/experts_inside.h"
#include "tests/policy/fixture.h"

#include <math.h>

enum { LAYERS = 2, HIDDEN = 16, INTER = 8, ALL = 3 * HIDDEN * INTER, STEPS = 3, BATCHES = 2 };

typedef struct bench {
    const char *text;
    int32_t ranks, experts;
    rig policy[LAYERS]; /* one per layer: each keeps its plan until backward */
    mz_optimizer optimizer;
    mz_replay_job job;
    mz_kernels *kernels;
    mz_transport *transport;
    mz_heap *heap;
    mz_engine *engine;
    mz_experts *x;
    mz_load *load[LAYERS], *history[LAYERS];
    float *now;       /* [LAYERS][E][ALL] weights as they must be */
    float *gradient;  /* [LAYERS][E][ALL] sum of what was put in */
    double *state[3]; /* the same: master weights, m, v */
    int64_t stated;   /* bytes that the plans of the step move, as the simulator counts them */
    mz_err err;
} bench;

static int64_t at(const bench *b, int32_t layer, int32_t expert) {
    return ((int64_t)layer * b->experts + expert) * ALL;
}

static void reference_start(bench *b) {
    const size_t n = (size_t)LAYERS * (size_t)b->experts * ALL;
    b->now = calloc(n, sizeof *b->now);
    b->gradient = calloc(n, sizeof *b->gradient);
    for (int i = 0; i < 3; i++)
        b->state[i] = calloc(n, sizeof *b->state[i]);
    for (int32_t l = 0; l < LAYERS; l++)
        for (int32_t e = 0; e < b->experts; e++) {
            float *w = b->now + at(b, l, e);
            mz_data_weights(&b->job, l, e, MZ_DATA_UP, w);
            mz_data_weights(&b->job, l, e, MZ_DATA_DOWN, w + 2 * HIDDEN * INTER);
        }
    for (size_t i = 0; i < n; i++)
        b->state[0][i] = b->now[i];
}

static mz_code bench_try(bench *b, const char *text, int32_t ranks, int32_t experts, int32_t domain,
                         mz_dtype type, const char *optimizer) {
    *b = (bench){.text = text, .ranks = ranks, .experts = experts};
    assert_ok(mz_optimizer_parse(optimizer, &b->optimizer, &b->err), &b->err);
    for (int32_t l = 0; l < LAYERS; l++) {
        rig *r = &b->policy[l];
        rig_prepare(r, ranks, experts, domain);
        r->env.layers = LAYERS;
        r->env.hidden = HIDDEN;
        r->env.intermediate = INTER;
        r->env.expert_parameters = ALL;
        r->env.weight_bytes = 2 * ALL;
        r->env.token_bytes = 2 * HIDDEN;
        r->env.expert_state_bytes = 12 * ALL;
        r->layer = l;
        assert_ok(rig_start(r, text), &r->err);
        b->load[l] = b->history[l] = NULL;
    }
    b->job = (mz_replay_job){.ranks = ranks,
                             .layers = LAYERS,
                             .experts = experts,
                             .top_k = 2,
                             .hidden = HIDDEN,
                             .intermediate = INTER,
                             .type = type,
                             .traits = &b->policy[0].traits,
                             .optimizer = &b->optimizer,
                             .instances = b->policy[0].plan->instance_cap,
                             .seed = 11};
    const mz_kernels_options options = {.backend = MZ_BACKEND_HOST, .threads = 1, .streams = 1};
    char message[256];
    if (mz_kernels_open(&options, &b->kernels, message, sizeof message) != MZ_K_OK)
        fail_msg("%s", message);
    const mz_transport_options link = {.name = "local", .ranks = ranks, .timeout_s = 30};
    assert_ok(mz_transport_open(&link, &b->transport, &b->err), &b->err);
    assert_ok(mz_transport_attach(b->transport, b->kernels, &b->err), &b->err);
    assert_ok(mz_heap_create(b->kernels, 0, ranks, &b->heap, &b->err), &b->err);
    const mz_code code =
        mz_engine_create(&b->job, b->kernels, b->transport, b->heap, &b->engine, &b->err);
    if (code == MZ_OK) {
        b->x = mz_engine_experts(b->engine);
        reference_start(b);
    }
    return code;
}

static void bench_close(bench *b) {
    mz_engine_free(&b->engine);
    for (int32_t r = 0; r < b->ranks; r++)
        assert_int_equal(mz_heap_of(b->heap, r)->total, 0);
    mz_heap_free(&b->heap);
    mz_transport_close(&b->transport);
    mz_kernels_close(&b->kernels);
    for (int32_t l = 0; l < LAYERS; l++) {
        if (b->load[l])
            load_free(b->load[l]);
        if (b->history[l])
            load_free(b->history[l]);
        rig_close(&b->policy[l]);
    }
    for (int i = 0; i < 3; i++)
        free(b->state[i]);
    free(b->now);
    free(b->gradient);
}

static void bench_open(bench *b, const char *text, int32_t ranks, int32_t experts, int32_t domain,
                       mz_dtype type, const char *optimizer) {
    if (bench_try(b, text, ranks, experts, domain, type, optimizer) != MZ_OK)
        fail_msg("%s: %s", text, b->err.msg);
}

static mz_replay_call call_of(bench *b, int32_t step, int32_t micro_batch, int32_t layer) {
    return (mz_replay_call){
        .step = step, .micro_batch = micro_batch, .layer = layer, .load = *b->load[layer]};
}

/* ---- one call
 * ------------------------------------------------------------------------------------*/

/* Values of a matrix in (host) context memory. */
static float value_of(mz_dtype type, const void *matrix, int64_t i) {
    uint32_t bits;
    float value;
    if (type == MZ_F32)
        return ((const float *)matrix)[i];
    bits = (uint32_t)((const uint16_t *)matrix)[i] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void put_value(mz_dtype type, void *matrix, int64_t i, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (type == MZ_F32)
        ((float *)matrix)[i] = value;
    else
        ((uint16_t *)matrix)[i] = (uint16_t)(bits >> 16);
}

/* All groups are there, in order, and have the weights that the expert has. */
static void check_weights(bench *b, int32_t layer, const char *when) {
    const mz_plan *plan = b->policy[layer].plan;
    int32_t seen = 0;
    for (int32_t r = 0; r < b->ranks; r++) {
        const mz_expert_groups *g = mz_experts_groups(b->x, r);
        for (int32_t n = 0; n < g->count; n++) {
            const int32_t e = g->expert[n], i = g->instance[n];
            assert_true(n == 0 || e >= g->expert[n - 1]);
            assert_int_equal(plan->rank[i], r);
            assert_true(i >= plan->begin[e] && i < plan->begin[e + 1]);
            const float *want = b->now + at(b, layer, e);
            for (int64_t j = 0; j < ALL; j++) {
                const bool up = j < 2 * HIDDEN * INTER;
                const float is = value_of(b->job.type, up ? g->up[n] : g->down[n],
                                          up ? j : j - 2 * HIDDEN * INTER);
                if (is != want[j])
                    fail_msg("%s, %s: layer %d, expert %d on rank %d: value %lld is %g, not %g",
                             b->text, when, layer, e, r, (long long)j, is, want[j]);
            }
        }
        seen += g->count;
    }
    assert_int_equal(seen, plan->begin[b->experts]);
}

/* Small whole numbers: their sums are exact in bf16. */
static void put_gradients(bench *b, int32_t layer, mz_rng *rng) {
    for (int32_t r = 0; r < b->ranks; r++) {
        const mz_expert_groups *g = mz_experts_groups(b->x, r);
        for (int32_t n = 0; n < g->count; n++) {
            float *sum = b->gradient + at(b, layer, g->expert[n]);
            const bool wide = g->wide_up && g->wide_up[n];
            assert_true(wide != (g->grad_up[n] != NULL));
            const mz_dtype type = wide ? MZ_F32 : b->job.type;
            for (int64_t j = 0; j < ALL; j++) {
                const bool up = j < 2 * HIDDEN * INTER;
                void *m = wide ? (up ? g->wide_up[n] : g->wide_down[n])
                               : (up ? g->grad_up[n] : g->grad_down[n]);
                const int64_t k = up ? j : j - 2 * HIDDEN * INTER;
                const float add = (float)((int)mz_rng_below(rng, 5) - 2);
                put_value(type, m, k, value_of(type, m, k) + add);
                sum[j] += add;
            }
        }
    }
}

/* Bytes between ranks (sim/step/traffic.c: a move to or from all ranks leaves out its own part). */
static void count_stated(bench *b, const mz_plan *plan, int32_t micro_batch, bool decided) {
    for (int32_t i = 0; i < plan->moves; i++) {
        const mz_move *m = &plan->move[i];
        const bool once = m->phase == MZ_MOVE_STEP || m->phase == MZ_MOVE_REDUCE_STEP;
        const bool every = m->src < 0 || m->dst < 0;
        if ((once && micro_batch > 0) || (m->change && !decided) || m->src == m->dst)
            continue;
        b->stated += m->bytes - (every ? m->bytes / b->ranks : 0);
    }
}

static void plan_call(bench *b, int32_t step, int32_t micro_batch, int32_t layer, mz_rng *rng) {
    static const int kinds[] = {LOAD_RANDOM, LOAD_ZIPF, LOAD_ONE_EXPERT, LOAD_SPARSE};
    rig *r = &b->policy[layer];
    const int kind = kinds[mz_rng_below(rng, COUNT_OF(kinds))];
    if (b->load[layer] && micro_batch == 0) {
        if (b->history[layer])
            load_free(b->history[layer]);
        b->history[layer] = b->load[layer];
    } else if (b->load[layer]) {
        load_free(b->load[layer]);
    }
    b->load[layer] = load_random(kind, b->ranks, b->experts, mz_rng_u64(rng));
    r->step = step;
    r->micro_batch = micro_batch;
    const int32_t interval = r->traits.interval;
    const bool decides = interval <= 1 || (micro_batch == 0 && step % interval == 0);
    const mz_call now = {
        .step = step, .micro_batch = micro_batch, .layer = layer, .load = b->load[layer]};
    if (decides)
        rig_call(r, b->load[layer], b->history[layer], NULL, NULL);
    else
        assert_ok(r->policy->route(r->state, &now, r->plan, &r->err), &r->err);
    count_stated(b, r->plan, micro_batch, decides);
}

static mz_code forward(bench *b, int32_t step, int32_t micro_batch, int32_t layer) {
    const mz_replay_call call = call_of(b, step, micro_batch, layer);
    const mz_code code = mz_experts_forward(b->x, &call, b->policy[layer].plan, &b->err);
    if (code != MZ_OK)
        return code;
    check_weights(b, layer, "forward");
    return MZ_OK;
}

static mz_code backward(bench *b, int32_t step, int32_t micro_batch, int32_t layer, mz_rng *rng) {
    const mz_replay_call call = call_of(b, step, micro_batch, layer);
    const mz_plan *plan = b->policy[layer].plan;
    mz_code code = mz_experts_backward(b->x, &call, plan, &b->err);
    if (code != MZ_OK)
        return code;
    check_weights(b, layer, "backward");
    put_gradients(b, layer, rng);
    return mz_experts_reduce(b->x, &call, plan, micro_batch == BATCHES - 1, &b->err);
}

/* ---- one step
 * ------------------------------------------------------------------------------------*/

static void check_gradients(bench *b) {
    float is[ALL];
    for (int32_t l = 0; l < LAYERS; l++)
        for (int32_t e = 0; e < b->experts; e++) {
            assert_ok(mz_experts_read(b->x, l, e, true, is, &b->err), &b->err);
            const float *want = b->gradient + at(b, l, e);
            for (int64_t j = 0; j < ALL; j++)
                if (is[j] != want[j])
                    fail_msg("%s: gradient %lld of layer %d, expert %d is %g, not %g", b->text,
                             (long long)j, l, e, is[j], want[j]);
        }
}

/* AdamW of the study, section 6.3, with decay 0.01 and rate 1e-4. */
static double adamw(bench *b, int64_t i, int64_t step) {
    const double g = b->gradient[i], rate = 1e-4;
    double *w = &b->state[0][i], *m = &b->state[1][i], *v = &b->state[2][i];
    *w -= rate * 0.01 * *w;
    *m = 0.9 * *m + 0.1 * g;
    *v = 0.999 * *v + 0.001 * g * g;
    const double c = sqrt(1 - pow(0.999, (double)step)), d = 1 - pow(0.9, (double)step);
    *w -= rate / d * *m / (sqrt(*v) / c + 1e-8);
    return *w;
}

/* SkewAdam's expert tier on one matrix: row and column means in state[1], state[2]. */
static void skewadam(bench *b, int64_t first, int64_t rows, int64_t cols, int64_t step) {
    double *w = b->state[0] + first, *R = b->state[1] + first, *C = b->state[2] + first;
    const float *g = b->gradient + first;
    double *u = calloc((size_t)(rows * cols), sizeof *u), mean = 0, squares = 0;
    for (int64_t i = 0; i < rows; i++) {
        double sum = 0;
        for (int64_t j = 0; j < cols; j++)
            sum += (double)g[i * cols + j] * g[i * cols + j];
        R[i] = 0.999 * R[i] + 0.001 * sum / (double)cols;
        mean += R[i] / (double)rows;
    }
    for (int64_t j = 0; j < cols; j++) {
        double sum = 0;
        for (int64_t i = 0; i < rows; i++)
            sum += (double)g[i * cols + j] * g[i * cols + j];
        C[j] = 0.999 * C[j] + 0.001 * sum / (double)rows;
    }
    for (int64_t i = 0; i < rows * cols; i++) {
        const double r = R[i / cols] / fmax(mean, 1e-15);
        u[i] = g[i] * sqrt(1 - pow(0.999, (double)step)) /
               (sqrt(fmax(r, 1e-8)) * sqrt(fmax(C[i % cols], 1e-8)));
        squares += u[i] * u[i];
    }
    const double rms = sqrt(squares / (double)(rows * cols));
    for (int64_t i = 0; i < rows * cols; i++)
        w[i] -= 1e-4 * u[i] / fmax(1, rms);
    free(u);
}

static void reference_step(bench *b, int64_t step) {
    const int64_t n = (int64_t)LAYERS * b->experts * ALL, up = 2 * HIDDEN * INTER;
    for (int64_t i = 0; b->optimizer.rule == MZ_RULE_ADAMW && i < n; i++)
        adamw(b, i, step);
    for (int64_t i = 0; b->optimizer.rule == MZ_RULE_SKEWADAM && i < n; i += ALL) {
        skewadam(b, i, 2 * INTER, HIDDEN, step);
        skewadam(b, i + up, HIDDEN, INTER, step);
    }
}

/* Weights as they are must be the reference's; where it does not know the rule, others than before
 * where there was a gradient. */
static void check_value(const bench *b, int64_t i, float is) {
    const mz_optimizer_rule rule = b->optimizer.rule;
    const double want = b->state[0][i], off = fabs(is - want);
    const bool fp32 = b->job.type == MZ_F32;
    if ((rule != MZ_RULE_ADAMW && rule != MZ_RULE_SKEWADAM) ||
        mz_update_is_dithered(&b->optimizer, b->job.type))
        return;
    if (off > (fp32 ? 1e-6 : fabs(want) * 0x1p-8 + 1e-7))
        fail_msg("%s, %s: weight %lld is %.9g, not %.9g", b->text, b->optimizer.name, (long long)i,
                 is, want);
}

static void check_update(bench *b, int32_t step) {
    float is[ALL];
    int64_t changed = 0, graded = 0;
    reference_step(b, step + 1);
    for (int32_t l = 0; l < LAYERS; l++)
        for (int32_t e = 0; e < b->experts; e++) {
            assert_ok(mz_experts_read(b->x, l, e, false, is, &b->err), &b->err);
            for (int64_t j = 0; j < ALL; j++) {
                const int64_t i = at(b, l, e) + j;
                check_value(b, i, is[j]);
                graded += b->gradient[i] != 0;
                changed += b->gradient[i] != 0 && is[j] != b->now[i];
            }
            memcpy(b->now + at(b, l, e), is, sizeof is);
        }
    if (b->job.type == MZ_F32 && changed * 10 < graded * 9)
        fail_msg("%s: %lld of %lld weights changed", b->text, (long long)changed,
                 (long long)graded);
}

static mz_code run_step(bench *b, int32_t step, mz_rng *rng) {
    mz_code code = mz_experts_begin_step(b->x, &b->err);
    b->engine->ordinal = step;
    b->engine->figures.transfer_bytes = b->stated = 0;
    memset(b->gradient, 0, sizeof *b->gradient * (size_t)LAYERS * (size_t)b->experts * ALL);
    for (int32_t m = 0; m < BATCHES; m++) {
        for (int32_t l = 0; code == MZ_OK && l < LAYERS; l++) {
            plan_call(b, step, m, l, rng);
            code = forward(b, step, m, l);
        }
        for (int32_t l = LAYERS; code == MZ_OK && l-- > 0;)
            code = backward(b, step, m, l, rng);
    }
    if (code != MZ_OK)
        return code;
    check_gradients(b);
    code = mz_experts_update(b->x, &b->err);
    if (code == MZ_OK)
        check_gradients(b); /* they stay */
    if (code == MZ_OK)
        check_update(b, step);
    return code;
}

/* What was charged is what the plans state. Parts of rings and shards are whole values. */
static void check_bytes(const bench *b, bool exact) {
    const int64_t moved = b->engine->figures.transfer_bytes, off = llabs(moved - b->stated);
    const int64_t part = b->x->mode == EXPERTS_LAST ? 1000 : 50;
    if (b->job.type == MZ_BF16 && (exact ? off != 0 : off * part > b->stated))
        fail_msg("%s: %lld bytes were moved, the plans state %lld", b->text, (long long)moved,
                 (long long)b->stated);
}

/* The norm that the step found, against the reference's gradient. */
static void check_norm(const bench *b) {
    double sum = 0;
    for (int64_t i = 0; i < (int64_t)LAYERS * b->experts * ALL; i++)
        sum += (double)b->gradient[i] * b->gradient[i];
    assert_true(fabs(b->x->norm - sqrt(sum)) <= 1e-6 * sqrt(sum));
}

static void run_steps(const char *text, int32_t ranks, int32_t experts, int32_t domain,
                      mz_dtype type, const char *optimizer) {
    bench b;
    bench_open(&b, text, ranks, experts, domain, type, optimizer);
    mz_rng rng = mz_rng_make(5, (uint64_t)ranks);
    for (int32_t step = 0; step < STEPS; step++) {
        if (run_step(&b, step, &rng) != MZ_OK)
            fail_msg("%s, %d experts on %d ranks: %s", text, experts, ranks, b.err.msg);
        check_norm(&b);
        check_bytes(&b, b.x->mode == EXPERTS_CALL);
    }
    bench_close(&b);
}

static void test_policies(void **state) {
    static const char *policies[] = {
        "static",
        "capacity",
        "ultraep[u_min=1]",
        "ultraep[u_min=1,slots=5]",
        "lrmoe[keep=0.5]",
        "lrmoe[keep=0.5,gradient=fp32]",
        "lrmoe[keep=0.5,lifetime=resend_weights]",
        "lrmoe[keep=0.5,placement=symi]",
        "llep",
        "topoep[chunks=1]",
        "fastermoe[schedule=none]",
        "symi",
        "symi[slots=6,drop=no]",
        "eplb[interval=1]",
        "eplb[interval=2]",
        "smartmoe[interval=1]",
        "flexmoe[interval=1,threshold=1]",
        "flexmoe[form=scale-eplb]",
        "finemoe[interval=1]",
        "lplb[interval=1]",
        "eplb[lag=0,optimizer=replicated]",
    };
    for (int i = 0; i < COUNT_OF(policies); i++) {
        run_steps(policies[i], 4, 8, 0, MZ_BF16, "adamw");
        run_steps(policies[i], 6, 12, 3, MZ_F32, "adamw");
    }
}

/* Groups that do not divide, one rank, ranks without experts, relays. */
static void test_shapes(void **state) {
    static const struct {
        int32_t ranks, experts, domain;
    } shape[] = {{1, 4, 0}, {5, 8, 0}, {8, 6, 4}, {16, 16, 0}, {12, 32, 0}};
    static const char *policies[] = {
        "static",
        "ultraep[u_min=1,slots=6]",
        "lrmoe[keep=0.5,slots=6]",
        "llep",
        "fastermoe[schedule=none]",
        "symi",
        "flexmoe[interval=1,threshold=1]",
        "flexmoe[form=scale-eplb]",
        "eplb[interval=1]",
        "smartmoe[interval=1]",
    };
    for (int i = 0; i < COUNT_OF(policies); i++)
        for (int k = 0; k < COUNT_OF(shape); k++)
            run_steps(policies[i], shape[k].ranks, shape[k].experts, shape[k].domain,
                      k % 2 ? MZ_F32 : MZ_BF16, "adamw");
}

/* Copies that are updated each for itself stay equal, however their weights are rounded. */
static void test_optimizers(void **state) {
    static const char *optimizers[] = {
        "adamw", "adamw-bf16", "skewadam",          "skewadam[master=fp32]",
        "lion",  "adafactor",  "muon[iterations=3]"};
    static const char *policies[] = {"static", "ultraep[u_min=1]",
                                     "flexmoe[interval=1,threshold=1]", "eplb[interval=1]"};
    for (int i = 0; i < COUNT_OF(policies); i++)
        for (int k = 0; k < COUNT_OF(optimizers); k++) {
            run_steps(policies[i], 4, 8, 0, MZ_F32, optimizers[k]);
            run_steps(policies[i], 4, 8, 0, MZ_BF16, optimizers[k]);
        }
    run_steps("symi", 4, 8, 0, MZ_BF16, "adamw-bf16");
    run_steps("symi", 4, 8, 0, MZ_BF16, "lion");
    run_steps("symi", 4, 8, 0, MZ_F32, "lion");
}

/* ---- plans that are wrong
 * ------------------------------------------------------------------------*/

typedef void (*spoil)(mz_plan *plan);

static int32_t move_of(const mz_plan *plan, mz_move_kind kind, mz_move_phase phase) {
    for (int32_t i = 0; i < plan->moves; i++)
        if (plan->move[i].kind == kind && plan->move[i].phase == phase)
            return i;
    fail_msg("the plan has no such move");
    return -1;
}

static void remove_move(mz_plan *plan, int32_t i) {
    plan->moves--;
    memmove(plan->move + i, plan->move + i + 1, sizeof *plan->move * (size_t)(plan->moves - i));
}

static void lose_weights(mz_plan *plan) {
    remove_move(plan, move_of(plan, MZ_MOVE_WEIGHTS, MZ_MOVE_FORWARD));
}

static void lose_weights_again(mz_plan *plan) {
    remove_move(plan, move_of(plan, MZ_MOVE_WEIGHTS, MZ_MOVE_BACKWARD));
}

static void lose_gradient(mz_plan *plan) {
    remove_move(plan, move_of(plan, MZ_MOVE_GRADIENTS, MZ_MOVE_REDUCE));
}

static void send_twice(mz_plan *plan) {
    const int32_t i = move_of(plan, MZ_MOVE_GRADIENTS, MZ_MOVE_REDUCE);
    plan->move[plan->moves - 1] = plan->move[i];
    assert_true(i < plan->moves - 1);
}

static void borrow(mz_plan *plan) { /* a replica sends, and gets nothing */
    for (int32_t i = 0; i < plan->moves; i++)
        for (int32_t k = 0; k < plan->moves; k++) {
            mz_move *a = &plan->move[i], *b = &plan->move[k];
            if (a->kind != MZ_MOVE_WEIGHTS || a->phase != MZ_MOVE_FORWARD || b->kind != a->kind ||
                b->phase != a->phase || a->expert != b->expert || a->dst == b->dst)
                continue;
            a->src = b->dst;
            b->src = a->dst;
            return;
        }
    fail_msg("no expert has two replicas");
}

static void circle(mz_plan *plan) { /* two replicas send their gradients to each other */
    for (int32_t i = 0; i < plan->moves; i++)
        for (int32_t k = 0; k < i; k++) {
            mz_move *a = &plan->move[i], *b = &plan->move[k];
            if (a->kind != MZ_MOVE_GRADIENTS || b->kind != MZ_MOVE_GRADIENTS ||
                a->expert != b->expert || a->src == b->src)
                continue;
            a->dst = b->src;
            b->dst = a->src;
            return;
        }
    fail_msg("no expert has two replicas");
}

static void open_ring(mz_plan *plan) {
    remove_move(plan, move_of(plan, MZ_MOVE_GRADIENTS, MZ_MOVE_REDUCE_STEP));
}

static void lose_gradients(mz_plan *plan) {
    for (int32_t i = plan->moves; i-- > 0;)
        if (plan->move[i].kind == MZ_MOVE_GRADIENTS)
            remove_move(plan, i);
}

static void lose_all(mz_plan *plan) {
    plan->moves = 0;
}

static void lose_fresh(mz_plan *plan) {
    for (int32_t i = 0; i < plan->moves; i++)
        if (plan->move[i].phase == MZ_MOVE_STEP && !plan->move[i].change) {
            remove_move(plan, i);
            return;
        }
    fail_msg("no move brings fresh weights");
}

static void lose_change(mz_plan *plan) {
    for (int32_t i = plan->moves; i-- > 0;)
        if (plan->move[i].change)
            remove_move(plan, i);
}

/* Steps of `policy`, the plan of layer 0 spoiled in step `step`; the error. */
static void check_spoiled(const char *policy, int32_t ranks, int32_t step, spoil how,
                          const char *said) {
    bench b;
    bench_open(&b, policy, ranks, 8, 0, MZ_BF16, "adamw");
    mz_rng rng = mz_rng_make(3, 1);
    mz_code code = MZ_OK;
    const int64_t load[8] = {9000, 100, 100, 90, 70, 30, 20, 10};
    for (int32_t s = 0; code == MZ_OK && s <= step; s++) {
        assert_ok(mz_experts_begin_step(b.x, &b.err), &b.err);
        for (int32_t l = 0; l < LAYERS; l++) {
            plan_call(&b, s, 0, l, &rng);
            int64_t total[8];
            for (int32_t e = 0; e < 8; e++)
                total[e] = load[(e + 3 * s) % 8];
            load_free(b.load[l]);
            b.load[l] = load_even(ranks, 8, total);
            rig_call(&b.policy[l], b.load[l], b.load[l], NULL, NULL);
        }
        if (s == step)
            how(b.policy[0].plan);
        for (int32_t l = 0; code == MZ_OK && l < LAYERS; l++)
            code = forward(&b, s, 0, l);
        for (int32_t l = LAYERS; code == MZ_OK && l-- > 0;)
            code = backward(&b, s, BATCHES - 1, l, &rng);
        if (code == MZ_OK)
            code = mz_experts_update(b.x, &b.err);
        for (int32_t l = 0; code == MZ_OK && l < LAYERS; l++)
            for (int32_t e = 0; e < 8; e++)
                assert_ok(mz_experts_read(b.x, l, e, false, b.now + at(&b, l, e), &b.err), &b.err);
    }
    if (code != MZ_EINTERNAL)
        fail_msg("%s, %s: code %d: %s", policy, said, code, b.err.msg);
    /* Which policy it was, and in which step, a run says. */
    if (!strstr(b.err.msg, said) || strstr(b.err.msg, "layer 0: expert ") != b.err.msg ||
        !strstr(b.err.msg, ", rank "))
        fail_msg("%s: not \"%s\": %s", policy, said, b.err.msg);
    bench_close(&b);
}

static void test_wrong_plans(void **state) {
    const char *ultraep = "ultraep[u_min=1]", *flexmoe = "flexmoe[interval=1,threshold=1]";
    check_spoiled(ultraep, 4, 0, lose_weights, "no move brings it the weights");
    check_spoiled(ultraep, 4, 0, lose_weights_again, "no move brings it the weights");
    check_spoiled(ultraep, 4, 0, lose_gradient, "no move takes its gradient to the main");
    check_spoiled(ultraep, 4, 0, send_twice, "sent twice");
    check_spoiled(ultraep, 8, 0, borrow, "weights that it does not get");
    check_spoiled(ultraep, 4, 0, circle, "in a circle");
    check_spoiled(flexmoe, 4, 2, open_ring, "gradients");
    check_spoiled(flexmoe, 4, 2, lose_gradients, "no move takes its gradient to the main");
    check_spoiled(flexmoe, 4, 1, lose_all, "nothing moves it");
    check_spoiled("symi", 4, 1, lose_fresh, "no move brings fresh weights");
    check_spoiled("symi", 4, 1, lose_all, "nothing moves it");
    check_spoiled("lplb[interval=1]", 4, 1, lose_fresh, "nothing moves it");
    check_spoiled("lplb[interval=1]", 4, 1, lose_change, "moves");
    check_spoiled("eplb[interval=1]", 4, 1, lose_change, "nothing moves it");
    check_spoiled("smartmoe[interval=1]", 4, 2, lose_change, "nothing moves it");
}

/* ---- memory
 * --------------------------------------------------------------------------------------*/

enum { W = 2 * ALL }; /* one expert in bf16 */

/* Resident bytes of a rank by the rules of replica memory: 8 experts on 4 ranks, 2 mains and (where
 * there are any) 2 further slots, 2 layers; AdamW with master weights has 12 bytes a parameter. */
static void test_memory(void **state) {
    static const struct {
        const char *policy, *optimizer;
        int64_t weights, gradients, optimizer_state, replicas;
    } want[] = {
        {"static", "adamw", 4 * W, 4 * W, 4 * 12 * ALL, 0},
        {"static", "adamw-bf16", 4 * W, 4 * W, 4 * 8 * ALL, 0},
        {"static", "lion", 4 * W, 4 * W, 4 * 4 * ALL, 0},
        {"static", "skewadam", 4 * W, 4 * W, 4 * 4 * (2 * INTER + HIDDEN + HIDDEN + INTER), 0},
        /* one set of slots for both layers, gradients in fp32 */
        {"ultraep", "adamw", 4 * W, 4 * W, 4 * 12 * ALL, 2 * (W + 2 * W)},
        /* nothing stays */
        {"lrmoe[keep=0.5]", "adamw", 4 * W, 4 * W, 4 * 12 * ALL, 0},
        {"llep", "adamw", 4 * W, 4 * W, 4 * 12 * ALL, 0},
        /* gradients of every expert in a buffer */
        {"topoep[chunks=1]", "adamw", 4 * W, 4 * W + 8 * W, 4 * 12 * ALL, 2 * W},
        {"flexmoe[form=scale-eplb]", "adamw", 4 * W, 4 * W + 2 * 2 * W, 4 * 12 * ALL, 2 * 2 * W},
        /* slots of each layer, with state or, where one of four parts is a rank's, without */
        {"flexmoe", "adamw", 4 * W, 4 * W, 8 * 12 * ALL, 2 * 2 * 2 * W},
        {"eplb", "adamw", 4 * W, 4 * W, 8 * 12 * ALL, 2 * 2 * 2 * W},
        {"lplb", "adamw", 4 * W, 4 * W, 4 * 12 * ALL, 2 * 2 * 2 * W},
        {"symi", "adamw", 4 * W, 4 * W, 2 * 8 * 12 * ALL / 4, 2 * 2 * 2 * W},
    };
    for (int i = 0; i < COUNT_OF(want); i++) {
        bench b;
        bench_open(&b, want[i].policy, 4, 8, 0, MZ_BF16, want[i].optimizer);
        const int64_t *now = mz_heap_of(b.heap, 1)->now;
        if (now[MZ_MEM_WEIGHTS] != want[i].weights || now[MZ_MEM_GRADIENTS] != want[i].gradients ||
            now[MZ_MEM_OPTIMIZER_STATE] != want[i].optimizer_state ||
            now[MZ_MEM_REPLICAS] != want[i].replicas || now[MZ_MEM_TEMPORARIES] != 0)
            fail_msg("%s: %lld, %lld, %lld, %lld", want[i].policy, (long long)now[MZ_MEM_WEIGHTS],
                     (long long)now[MZ_MEM_GRADIENTS], (long long)now[MZ_MEM_OPTIMIZER_STATE],
                     (long long)now[MZ_MEM_REPLICAS]);
        bench_close(&b);
    }
}

static int32_t hosted(const mz_plan *plan, int32_t rank) {
    int32_t n = 0;
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e] + 1; i < plan->begin[e + 1]; i++)
            n += plan->rank[i] == rank;
    return n;
}

/* Replicas that live from a layer's forward to its backward, gradients during that. */
static void test_memory_of_calls(void **state) {
    bench b;
    bench_open(&b, "lrmoe[keep=0.5]", 4, 8, 0, MZ_BF16, "adamw");
    mz_rng rng = mz_rng_make(8, 2);
    int64_t held[4] = {0}, seen = 0;
    assert_ok(mz_experts_begin_step(b.x, &b.err), &b.err);
    mz_heap_start_step(b.heap);
    for (int32_t l = 0; l < LAYERS; l++) {
        plan_call(&b, 0, 0, l, &rng);
        assert_ok(forward(&b, 0, 0, l), &b.err);
        for (int32_t r = 0; r < 4; r++) {
            held[r] += hosted(b.policy[l].plan, r);
            assert_int_equal(mz_heap_of(b.heap, r)->now[MZ_MEM_REPLICAS], held[r] * W);
        }
    }
    for (int32_t l = LAYERS; l-- > 0;) {
        assert_ok(backward(&b, 0, 0, l, &rng), &b.err);
        for (int32_t r = 0; r < 4; r++) {
            const mz_heap_rank *h = mz_heap_of(b.heap, r);
            const int32_t own = hosted(b.policy[l].plan, r);
            assert_true(h->most[MZ_MEM_REPLICAS] >= (held[r] + own) * W);
            held[r] -= own;
            seen += own;
            assert_int_equal(h->now[MZ_MEM_REPLICAS], held[r] * W);
            assert_int_equal(h->now[MZ_MEM_TEMPORARIES], 0);
        }
    }
    assert_true(seen > 0);
    bench_close(&b);
}

/* ---- memory that runs out
 * ------------------------------------------------------------------------*/

/* One step of `policy`; the n-th take fails (0: none). Returns the takes that there were. */
static int64_t step_with_failure(const char *policy, int64_t n) {
    bench b;
    bench_open(&b, policy, 4, 8, 0, MZ_BF16, "adamw");
    mz_rng rng = mz_rng_make(5, 4);
    mz_code code = run_step(&b, 0, &rng);
    const int64_t before = mz_heap_takes(b.heap);
    if (code == MZ_OK) {
        mz_heap_fail_at(b.heap, n);
        code = run_step(&b, 1, &rng);
    }
    const int64_t takes = mz_heap_takes(b.heap) - before;
    if (code != (n > 0 ? MZ_ENOMEM : MZ_OK))
        fail_msg("%s, take %lld: code %d, %s", policy, (long long)n, code, b.err.msg);
    if (n > 0)
        assert_int_equal(takes, n);
    bench_close(&b); /* everything is given back */
    return takes;
}

static void test_faults(void **state) {
    static const char *policies[] = {"ultraep[u_min=1]", "lrmoe[keep=0.5]", "symi",
                                     "eplb[interval=1]", "lplb[interval=1]"};
    for (int i = 0; i < COUNT_OF(policies); i++) {
        const int64_t takes = step_with_failure(policies[i], 0);
        assert_true(takes > 0);
        for (int64_t n = 1; n <= takes; n += 1 + takes / 60)
            step_with_failure(policies[i], n);
    }
}

static void test_refusals(void **state) {
    static const struct {
        const char *policy, *optimizer, *said;
    } refused[] = {
        {"static", "galore", "no kernel"},
        {"static", "adam8bit", "no kernel"},
        {"static", "sgdm", "no kernel"},
        {"static", "adamw[moments=bf16]", "moments in fp32"},
        {"symi", "skewadam", "value by value"},
        {"symi", "muon", "value by value"},
        {"lrmoe[keep=0.5,placement=symi,gradient=fp32]", "adamw", "in bf16 alone"},
        {"laer", "adamw", "shard"},
        {"ideal", "adamw", "cost nothing"},
    };
    for (int i = 0; i < COUNT_OF(refused); i++) {
        bench b;
        const mz_code code =
            bench_try(&b, refused[i].policy, 4, 8, 0, MZ_BF16, refused[i].optimizer);
        assert_int_equal(code, MZ_EINPUT);
        if (!strstr(b.err.msg, refused[i].said))
            fail_msg("not \"%s\": %s", refused[i].said, b.err.msg);
        bench_close(&b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_policies),   cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_optimizers), cmocka_unit_test(test_wrong_plans),
        cmocka_unit_test(test_memory),     cmocka_unit_test(test_memory_of_calls),
        cmocka_unit_test(test_faults),     cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
