/* The layer engine against the same layer in double precision: outputs, gradients of inputs,
 * weights and gates, which pairs stay, bytes between ranks, bytes in memory. Linked once with
 * experts that stand still (fake_experts.c) and once with those of the replay. */
#include "replay/experts.h"
#include "tests/harness.h"
#include "tests/replay/scene.h"

#include <math.h>

/* ---- comparisons --------------------------------------------------------------------------------
 */

static double root(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (a[i] - (b ? b[i] : 0)) * (a[i] - (b ? b[i] : 0));
    return sqrt(sum);
}

/* Row by row, against its own norm and `part` of the usual row's. */
static void near(const scene *s, const char *what, int32_t layer, const double *got,
                 const double *want, int64_t rows, int64_t cols, double part) {
    const double tolerance = s->o.type == MZ_BF16 ? 0.04 : 2e-5;
    const double usual = rows > 0 ? root(want, NULL, rows * cols) / sqrt((double)rows) : 0;
    for (int64_t i = 0; i < rows; i++) {
        const double norm = root(want + i * cols, NULL, cols);
        const double error = root(got + i * cols, want + i * cols, cols);
        if (!(error <= tolerance * (norm > part * usual ? norm : part * usual)))
            fail_msg("%s, layer %d: %s, row %lld is off by %g of %g", s->o.policy, layer, what,
                     (long long)i, error, norm);
    }
}

/* How many pairs of (source, expert) are marked. */
static int64_t marked(const scene *s, int32_t l, const uint8_t *mark, int32_t rank, int32_t e) {
    int64_t n = 0;
    for (int64_t p = s->pair_begin[rank]; p < s->pair_begin[rank + 1]; p++)
        n += s->expert[l][p] == e && mark[p];
    return n;
}

/* The marked pairs are those of largest value, or the first ones where value is NULL. */
static void largest_stay(const scene *s, int32_t l, const uint8_t *all, const uint8_t *mark,
                         const double *value, int32_t rank, int32_t e, const char *what) {
    const double slack = s->o.type == MZ_BF16 ? 0.03 : 1e-5;
    double least = INFINITY, most = 0;
    for (int64_t p = s->pair_begin[rank]; p < s->pair_begin[rank + 1]; p++) {
        if (s->expert[l][p] != e || (all && !all[p]))
            continue;
        const double v = value ? value[p] : (double)(s->pair_begin[rank + 1] - p);
        if (mark[p])
            least = v < least ? v : least;
        else
            most = v > most ? v : most;
    }
    if (!(least >= most * (1 - slack)))
        fail_msg("%s, layer %d, rank %d, expert %d: %s: %g is in, %g is not", s->o.policy, l, rank,
                 e, what, least, most);
}

static void check_choices(const scene *s, int32_t l) {
    const scene_call *at = &s->at[l];
    const mz_plan *plan = at->plan;
    const bool ordered = s->job.traits->score_kind != MZ_SCORE_RANDOM;
    double *gate = calloc((size_t)at->call.pairs.pairs + 1, sizeof *gate);
    for (int64_t p = 0; p < at->call.pairs.pairs; p++)
        gate[p] = s->gate[l][p];
    for (int32_t r = 0; r < plan->ranks; r++)
        for (int32_t e = 0; e < plan->experts; e++) {
            const int64_t cell = (int64_t)r * plan->experts + e;
            const int64_t computed =
                s->load[l]->count[cell] - (plan->has_drops ? plan->dropped[cell] : 0);
            assert_int_equal(marked(s, l, at->computed, r, e), computed);
            assert_int_equal(marked(s, l, at->kept, r, e),
                             plan->has_backward ? plan->kept[cell] : computed);
            largest_stay(s, l, NULL, at->computed,
                         s->job.traits->drop_by_weight && s->o.weights ? gate : NULL, r, e,
                         "drops");
            if (plan->has_backward && ordered)
                largest_stay(s, l, at->computed, at->kept, at->score, r, e, "selection");
        }
    free(gate);
}

static void check_values(machine *m, const scene *s, int32_t l) {
    const scene_call *at = &s->at[l];
    const int64_t H = s->o.hidden, I = s->o.intermediate;
    near(s, "y", l, at->y_got, at->y, at->call.pairs.tokens, H, 0.3);
    near(s, "dx", l, at->dx_got, at->dx, at->call.pairs.tokens, H, 0.3);
    near(s, "gate gradient", l, at->dweight_got, at->dweight, at->call.pairs.pairs, 1, 1);
    float *value = calloc((size_t)(3 * H * I), sizeof *value);
    double *got = calloc((size_t)(s->o.experts * 3 * H * I), sizeof *got);
    for (int32_t e = 0; e < s->o.experts; e++) {
        assert_ok(mz_experts_read(mz_engine_experts(m->engine), l, e, true, value, &m->err),
                  &m->err);
        for (int64_t i = 0; i < 3 * H * I; i++)
            got[e * 3 * H * I + i] = value[i];
    }
    near(s, "weight gradients", l, got, at->gradient, s->o.experts * 3, H * I, 0.3);
    free(value);
    free(got);
}

/* ---- bytes between ranks ------------------------------------------------------------------------
 */

static int64_t off_rank(const mz_plan *plan, const int64_t *begin, const int32_t *source,
                        const int64_t *pairs) {
    int64_t sum = 0;
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
        for (int64_t k = begin[i]; k < begin[i + 1]; k++)
            sum += source[k] != plan->rank[i] ? pairs[k] : 0;
    return sum;
}

static int64_t padded_rows(const scene *s, int32_t l) {
    int64_t sum = 0;
    for (int32_t e = 0; e < s->o.experts; e++)
        for (int32_t r = 0; r < s->o.ranks; r++)
            if (s->at[l].plan->rank[e] != r)
                sum += mz_capacity_rows(s->job.traits, s->load[l], r);
    return sum;
}

/* Kept pairs that find no room on the instance that computed them, off their source's rank. */
static int64_t moved_rows(const scene *s, int32_t l) {
    const scene_call *at = &s->at[l];
    const mz_plan *plan = at->plan;
    int64_t sum = 0;
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
        for (int64_t k = plan->back_begin[i]; k < plan->back_begin[i + 1]; k++) {
            const int32_t source = plan->back_source[k];
            int64_t here = 0;
            for (int64_t p = s->pair_begin[source]; p < s->pair_begin[source + 1]; p++)
                here += at->kept[p] && scene_instance(s, l, source, p) == i;
            if (source != plan->rank[i] && plan->back_pairs[k] > here)
                sum += plan->back_pairs[k] - here;
        }
    return sum;
}

static void check_bytes(const scene *s, const mz_engine *engine) {
    const int64_t row = s->o.hidden * (s->o.type == MZ_BF16 ? 2 : 4);
    const mz_policy_traits *t = s->job.traits;
    mz_engine_figures want = {0};
    for (int32_t l = 0; l < SCENE_LAYERS; l++) {
        const mz_plan *plan = s->at[l].plan;
        const bool lossy = plan->has_backward, saved = lossy && !t->resend;
        int64_t rows = off_rank(plan, plan->entry_begin, plan->entry_source, plan->entry_pairs);
        if (t->capacity_padded)
            rows = padded_rows(s, l);
        const int64_t back =
            lossy ? off_rank(plan, plan->back_begin, plan->back_source, plan->back_pairs) : rows;
        const int64_t again = saved ? moved_rows(s, l) : lossy ? back : 0;
        const bool repeated = s->o.recompute && !(lossy && t->resend);
        want.dispatch_bytes += rows * row * (repeated ? 2 : 1);
        want.combine_bytes += rows * (row + (lossy ? t->score_combine_bytes : 0));
        want.backward_dispatch_bytes += (back + again) * row + (saved ? 8 * back : 0);
        want.backward_combine_bytes += back * (row + 4);
        want.pairs += s->load[l]->pairs;
        want.kept_pairs += plan->kept_pairs;
        want.dropped_pairs += plan->dropped_pairs;
    }
    const mz_engine_figures got = mz_engine_figures_of(engine);
    assert_int_equal(got.dispatch_bytes, want.dispatch_bytes);
    assert_int_equal(got.combine_bytes, want.combine_bytes);
    assert_int_equal(got.backward_dispatch_bytes, want.backward_dispatch_bytes);
    assert_int_equal(got.backward_combine_bytes, want.backward_combine_bytes);
    /* One process: all of it by copies, weights and gradients, too. */
    assert_int_equal(got.moved.within, got.dispatch_bytes + got.combine_bytes +
                                           got.backward_dispatch_bytes +
                                           got.backward_combine_bytes + got.transfer_bytes);
    assert_int_equal(got.moved.between, 0);
    assert_int_equal(got.pairs, want.pairs);
    assert_int_equal(got.kept_pairs, want.kept_pairs);
    assert_int_equal(got.dropped_pairs, want.dropped_pairs);
}

/* ---- cases --------------------------------------------------------------------------------------
 */

static void run_scene(const scene_options *o, uint64_t seed) {
    scene s;
    machine m;
    scene_open(&s, o, seed);
    machine_open(&m, &s, 1);
    machine_engine(&m, &s);
    scene_watcher watcher = {&s, m.kernels};
    mz_engine_set_watch(m.engine, scene_watch, &watcher);
    assert_ok(scene_run(&s, m.engine, &m.err), &m.err);
    for (int32_t l = 0; l < SCENE_LAYERS; l++) {
        scene_reference(&s, l);
        check_choices(&s, l);
        check_values(&m, &s, l);
    }
    check_bytes(&s, m.engine);
    machine_close(&m);
    scene_close(&s);
}

static const char *const policies[] = {
    "static",
    "ultraep[slots=4,u_min=1]",
    "lrmoe[keep=1]",
    "lrmoe[keep=0.5]",
    "lrmoe[keep=0.5,activations=resend]",
    "lrmoe[keep=0.3,slots=4,forward=placement]",
    "lrmoe[keep=0.5,placement=static]",
    "lrmoe[keep=0.5,placement=static,activations=resend]",
    "lrmoe[keep=0.000001,q_min=0]",
    "lrmoe[keep=0.000001,q_min=0,activations=resend]",
    "capacity[cf=0.8,min_cap=1]",
    "capacity[cf=0.8,min_cap=1,drop=position]",
    "capacity[drop=none]",
    "llep",
    "symi[cf=0.9]",
    "topoep[chunks=1]",
};

static void every_policy_f32(void **state) {
    for (int i = 0; i < COUNT_OF(policies); i++) {
        const scene_options o = scene_usual(policies[i], MZ_F32);
        run_scene(&o, (uint64_t)(10 + i));
    }
}

static void every_policy_bf16(void **state) {
    for (int i = 0; i < COUNT_OF(policies); i++) {
        const scene_options o = scene_usual(policies[i], MZ_BF16);
        run_scene(&o, (uint64_t)(30 + i));
    }
}

static void every_policy_recomputed(void **state) {
    for (int i = 0; i < COUNT_OF(policies); i++) {
        scene_options o = scene_usual(policies[i], MZ_F32);
        o.recompute = true;
        run_scene(&o, (uint64_t)(50 + i));
    }
}

static void every_score(void **state) {
    static const char *const score[] = {"down", "up", "w", "wh", "g", "h", "random", "sample"};
    for (int i = 0; i < COUNT_OF(score); i++) {
        char text[96];
        snprintf(text, sizeof text, "lrmoe[keep=0.4,score=%s%s]", score[i],
                 i % 2 ? ",activations=resend" : "");
        const scene_options o = scene_usual(text, MZ_F32);
        run_scene(&o, (uint64_t)(70 + i));
    }
}

/* A trace's counts by source, chosen over all of them. */
static void over_all_sources(void **state) {
    const scene_options o = scene_usual("lrmoe[keep=0.4,scope=global]", MZ_F32);
    run_scene(&o, 80);
}

static void shapes(void **state) {
    for (int i = 0; i < COUNT_OF(policies); i++) {
        const scene_options usual = scene_usual(policies[i], MZ_F32);
        scene_options o[] = {usual, usual, usual, usual, usual, usual};
        o[0].idle_rank = 2;
        o[1].one_expert = 5;
        o[2].lone_rank = 1;
        o[3].tokens = 0;
        o[4].k = 0;
        o[5].norms = o[5].weights = false;
        for (int j = 0; j < COUNT_OF(o); j++)
            run_scene(&o[j], (uint64_t)(100 + 10 * i + j));
    }
}

/* Gradients of weights add up over micro-batches, whose rows differ. */
static void micro_batches(void **state) {
    static const char *const some[] = {"static", "ultraep[slots=4,u_min=1]", "lrmoe[keep=0.5]",
                                       "symi[cf=0.9]", "capacity[cf=0.8]"};
    for (int i = 0; i < COUNT_OF(some); i++) {
        scene s;
        machine m;
        const scene_options o = scene_usual(some[i], MZ_F32);
        scene_open(&s, &o, (uint64_t)(200 + i));
        machine_open(&m, &s, 1);
        machine_engine(&m, &s);
        scene_watcher watcher = {&s, m.kernels};
        mz_engine_set_watch(m.engine, scene_watch, &watcher);
        assert_ok(mz_engine_begin_step(m.engine, 0, &m.err), &m.err);
        for (int b = 0; b < 2; b++) {
            for (int32_t l = 0; l < SCENE_LAYERS; l++) {
                s.at[l].call.micro_batch = b;
                assert_ok(mz_engine_forward(m.engine, &s.at[l].call, s.at[l].plan, &m.err), &m.err);
            }
            for (int32_t l = SCENE_LAYERS - 1; l >= 0; l--) {
                assert_ok(mz_engine_backward(m.engine, &s.at[l].call, s.at[l].plan, b == 1, &m.err),
                          &m.err);
                scene_reference(&s, l);
            }
        }
        for (int32_t l = 0; l < SCENE_LAYERS; l++)
            check_values(&m, &s, l);
        machine_close(&m);
        scene_close(&s);
    }
}

static void one_rank(void **state) {
    static const char *const some[] = {"static", "lrmoe[keep=0.5]",
                                       "lrmoe[keep=0.5,activations=resend]", "capacity[cf=0.8]"};
    for (int i = 0; i < COUNT_OF(some); i++) {
        scene_options o = scene_usual(some[i], MZ_F32);
        o.ranks = 1;
        o.hidden = 20; /* rows that are no multiple of a vector */
        o.intermediate = 7;
        run_scene(&o, (uint64_t)(300 + i));
    }
}

/* ---- what else ----------------------------------------------------------------------------------
 */

static void chunks_and_shards_are_refused(void **state) {
    const struct {
        const char *policy, *text;
    } refused[] = {{"laer", "shards"},
                   {"ideal", "cost nothing"},
                   {"topoep", "parts of a layer call"},
                   {"lrmoe[keep=0.5,router_gradient=kept]", "router_gradient=kept"}};
    for (int i = 0; i < COUNT_OF(refused); i++) {
        scene s;
        machine m;
        const scene_options o = scene_usual(refused[i].policy, MZ_F32);
        scene_open(&s, &o, 1);
        machine_open(&m, &s, 1);
        assert_fails(mz_engine_create(&s.job, m.kernels, m.transport, m.heap, &m.engine, &m.err),
                     MZ_EINPUT, refused[i].text, &m.err);
        assert_null(m.engine);
        machine_close(&m);
        scene_close(&s);
    }
}

static void wrong_counts_are_told(void **state) {
    scene s;
    machine m;
    const scene_options o = scene_usual("static", MZ_F32);
    scene_open(&s, &o, 4);
    machine_open(&m, &s, 1);
    machine_engine(&m, &s);
    int64_t p = s.pair_begin[2];
    s.expert[1][p] = (uint16_t)(s.expert[1][p] == 7 ? 6 : 7); /* the plan is of the old counts */
    assert_ok(mz_engine_begin_step(m.engine, 0, &m.err), &m.err);
    assert_ok(mz_engine_forward(m.engine, &s.at[0].call, s.at[0].plan, &m.err), &m.err);
    assert_fails(mz_engine_forward(m.engine, &s.at[1].call, s.at[1].plan, &m.err), MZ_EINPUT,
                 "layer 1: rank 2 has", &m.err);
    machine_close(&m);
    scene_close(&s);
}

/* Strides deal a source's pairs anew; which of them a quota kept would not be found again. */
static void strides_and_quotas_are_refused(void **state) {
    scene s;
    machine m;
    const scene_options o = scene_usual("lrmoe[keep=0.5]", MZ_F32);
    scene_open(&s, &o, 5);
    mz_policy_traits strided = *s.job.traits;
    strided.strided_pairs = true;
    s.job.traits = &strided;
    machine_open(&m, &s, 1);
    machine_engine(&m, &s);
    assert_fails(scene_run(&s, m.engine, &m.err), MZ_EINTERNAL, "strides", &m.err);
    machine_close(&m);
    scene_close(&s);
}

/* Every allocation fails once: an error that names it, and nothing is left behind. */
static void short_memory(void **state) {
    static const char *const some[] = {"lrmoe[keep=0.5]", "lrmoe[keep=0.5,activations=resend]",
                                       "capacity[cf=0.8]"};
    for (int i = 0; i < COUNT_OF(some); i++) {
        scene_options o = scene_usual(some[i], MZ_F32);
        o.tokens = 6;
        o.recompute = i == 0;
        int64_t fails = 0;
        for (int64_t n = 1; n == fails + 1; n++) {
            scene s;
            machine m;
            scene_open(&s, &o, 7);
            machine_open(&m, &s, 1);
            machine_engine(&m, &s);
            mz_heap_fail_at(m.heap, n);
            const mz_code code = scene_run(&s, m.engine, &m.err);
            if (code != MZ_OK) {
                assert_int_equal(code, MZ_ENOMEM);
                assert_non_null(strstr(m.err.msg, "rank"));
                fails++;
            }
            mz_engine_free(&m.engine);
            for (int32_t r = 0; r < o.ranks; r++)
                assert_int_equal(mz_heap_of(m.heap, r)->total, 0);
            machine_close(&m);
            scene_close(&s);
        }
        assert_true(fails > 100);
    }
}

static mz_code stop_in_experts(void *self, int32_t rank, mz_phase phase, int32_t layer, int32_t row,
                               mz_err *err) {
    int *left = self;
    if (phase == MZ_PHASE_BACKWARD_EXPERTS && layer == 0 && rank == 1 && --*left == 0)
        return mz_fail(err, MZ_EABORTED, "stopped");
    return MZ_OK;
}

static void notices(void **state) {
    scene s;
    machine m;
    const scene_options o = scene_usual("lrmoe[keep=0.5]", MZ_F32);
    scene_open(&s, &o, 8);
    machine_open(&m, &s, 1);
    machine_engine(&m, &s);
    int left = 1;
    mz_engine_set_notice(m.engine, stop_in_experts, &left);
    assert_fails(scene_run(&s, m.engine, &m.err), MZ_EABORTED, "stopped", &m.err);
    machine_close(&m);
    scene_close(&s);
}

/* Phases that a plan has take time on every rank, the others take none. */
static void times(void **state) {
    scene s;
    machine m;
    const scene_options o = scene_usual("lrmoe[keep=0.5,activations=resend]", MZ_F32);
    scene_open(&s, &o, 9);
    machine_open(&m, &s, 1);
    machine_engine(&m, &s);
    assert_ok(scene_run(&s, m.engine, &m.err), &m.err);
    mz_engine_charge_all(m.engine, MZ_PHASE_PLANNER, 1, 0.25);
    const mz_engine_figures f = mz_engine_figures_of(m.engine);
    static const mz_phase used[] = {MZ_PHASE_ROUTER,
                                    MZ_PHASE_COUNT_EXCHANGE,
                                    MZ_PHASE_PACK,
                                    MZ_PHASE_DISPATCH,
                                    MZ_PHASE_EXPERTS,
                                    MZ_PHASE_COMBINE,
                                    MZ_PHASE_UNPACK,
                                    MZ_PHASE_SCORE,
                                    MZ_PHASE_BACKWARD_PACK,
                                    MZ_PHASE_BACKWARD_EXPERTS,
                                    MZ_PHASE_BACKWARD_DISPATCH,
                                    MZ_PHASE_BACKWARD_COMBINE,
                                    MZ_PHASE_BACKWARD_OTHER};
    for (int32_t l = 0; l < SCENE_LAYERS; l++)
        for (int32_t r = 0; r < o.ranks; r++) {
            const double *detail = f.detail_s + (l * o.ranks + r) * MZ_PHASES;
            for (int i = 0; i < COUNT_OF(used); i++)
                assert_true(detail[used[i]] > 0);
            assert_true(detail[MZ_PHASE_ATTENTION] == 0 && detail[MZ_PHASE_DENSE] == 0);
            assert_true(detail[MZ_PHASE_PLANNER] == (l == 1 ? 0.25 : 0));
        }
    assert_true(f.untimed_s > 0);
    assert_ok(mz_engine_begin_step(m.engine, 1, &m.err), &m.err);
    assert_true(mz_engine_figures_of(m.engine).detail_s[MZ_PHASE_ROUTER] == 0);
    assert_int_equal(mz_engine_figures_of(m.engine).pairs, 0);
    machine_close(&m);
    scene_close(&s);
}

/* What a step leaves: outputs, gradients of inputs and of gates, kept pairs, an expert's gradient.
 */
typedef struct bytes_of_step {
    double *y, *dx, *dweight;
    uint8_t *kept;
    float *gradient;
    size_t rows, pairs, values; /* bytes, pairs, bytes */
} bytes_of_step;

static void *copied(const void *from, size_t bytes) {
    void *to = malloc(bytes + 1);
    assert_non_null(to);
    return memcpy(to, from, bytes);
}

static bytes_of_step keep_bytes(machine *m, const scene *s) {
    const scene_call *first = &s->at[0], *last = &s->at[SCENE_LAYERS - 1];
    bytes_of_step b = {.rows = sizeof(double) * (size_t)(s->token_begin[s->o.ranks] * s->o.hidden),
                       .pairs = (size_t)s->pair_begin[s->o.ranks],
                       .values = sizeof(float) * (size_t)(3 * s->o.hidden * s->o.intermediate)};
    b.gradient = malloc(b.values);
    assert_ok(mz_experts_read(mz_engine_experts(m->engine), 0, 1, true, b.gradient, &m->err),
              &m->err);
    b.y = copied(last->y_got, b.rows);
    b.dx = copied(first->dx_got, b.rows);
    b.dweight = copied(first->dweight_got, sizeof(double) * b.pairs);
    b.kept = copied(first->kept, b.pairs);
    return b;
}

static void free_bytes(bytes_of_step *b) {
    void *const all[] = {b->y, b->dx, b->dweight, b->kept, b->gradient};
    for (int i = 0; i < COUNT_OF(all); i++)
        free(all[i]);
}

static void assert_same(const bytes_of_step *a, const bytes_of_step *b) {
    assert_memory_equal(a->y, b->y, a->rows);
    assert_memory_equal(a->dx, b->dx, a->rows);
    assert_memory_equal(a->dweight, b->dweight, sizeof(double) * a->pairs);
    assert_memory_equal(a->kept, b->kept, a->pairs);
    assert_memory_equal(a->gradient, b->gradient, a->values);
}

/* The same bytes with one thread and with three, on the emulated device in another order
 * of its blocks and threads; and in a second step of the same engine. */
static void same_bytes(void **state) {
    static const char *const some[] = {"lrmoe[keep=0.5]", "lrmoe[keep=0.3,activations=resend]",
                                       "capacity[cf=0.8,min_cap=1]", "ultraep[slots=4,u_min=1]"};
    for (int i = 0; i < COUNT_OF(some); i++) {
        const scene_options o = scene_usual(some[i], MZ_BF16);
        bytes_of_step first = {0};
        for (int run = 0; run < 2; run++) {
            scene s;
            machine m;
            setenv("CUEMU_SEED", run == 0 ? "0" : "7", 1);
            scene_open(&s, &o, 11);
            machine_open(&m, &s, run == 0 ? 1 : 3);
            machine_engine(&m, &s);
            scene_watcher watcher = {&s, m.kernels};
            mz_engine_set_watch(m.engine, scene_watch, &watcher);
            for (int step = 0; step < 2; step++) {
                assert_ok(scene_run(&s, m.engine, &m.err), &m.err);
                bytes_of_step got = keep_bytes(&m, &s);
                if (first.y) {
                    assert_same(&first, &got);
                    free_bytes(&got);
                } else {
                    first = got;
                }
            }
            machine_close(&m);
            scene_close(&s);
        }
        free_bytes(&first);
    }
    unsetenv("CUEMU_SEED");
}

/* Of four processes of a machine each has a quarter of its memory, or a device of its own. */
static void memory_of_a_process(void **state) {
    scene s;
    machine m;
    const scene_options o = scene_usual("static", MZ_F32);
    scene_open(&s, &o, 3);
    machine_open(&m, &s, 1);
    size_t all = 0;
    double bytes = 0;
    assert_int_equal(mz_kernels_memory(m.kernels, &all, NULL), MZ_K_OK);
    assert_true(all > 1 << 20);
    m.transport->neighbours = 4;
    assert_ok(mz_transport_room(m.transport, &bytes, &m.err), &m.err);
    assert_true(bytes == (double)all / (SCENE_BACKEND == MZ_BACKEND_HOST ? 4 : 1));
    machine_close(&m);
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy_f32),
        cmocka_unit_test(every_policy_bf16),
        cmocka_unit_test(every_policy_recomputed),
        cmocka_unit_test(every_score),
        cmocka_unit_test(over_all_sources),
        cmocka_unit_test(shapes),
        cmocka_unit_test(micro_batches),
        cmocka_unit_test(one_rank),
        cmocka_unit_test(chunks_and_shards_are_refused),
        cmocka_unit_test(wrong_counts_are_told),
        cmocka_unit_test(strides_and_quotas_are_refused),
        cmocka_unit_test(short_memory),
        cmocka_unit_test(notices),
        cmocka_unit_test(times),
        cmocka_unit_test(same_bytes),
        cmocka_unit_test(memory_of_a_process),
    };
    const struct CMUnitTest device[] = {
        cmocka_unit_test(every_policy_bf16), cmocka_unit_test(every_policy_recomputed),
        cmocka_unit_test(over_all_sources),  cmocka_unit_test(micro_batches),
        cmocka_unit_test(same_bytes),        cmocka_unit_test(memory_of_a_process),
    };
    return SCENE_BACKEND == MZ_BACKEND_HOST ? cmocka_run_group_tests(tests, NULL, NULL)
                                            : cmocka_run_group_tests(device, NULL, NULL);
}
