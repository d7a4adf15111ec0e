/* Routed experts alone: times and bytes of every phase added up by hand on two ranks.
 *
 * H = 64, I = 32, 4 experts, 2 layers; bytes at 1e11 B/s, a copy reads and writes; FLOPs at 1e12/s.
 * Without launches and tiles. Tokens are half a source's pairs. */
#include "sim/policy/parts.h"
#include "tests/step/tiny.h"

#include <math.h>

enum { H = TINY_H, I = TINY_I, E = TINY_EXPERTS, ROW = 2 * H };

/* Source 0 sends 8 of 24 pairs to rank 1, source 1 10 of 16 to rank 0. */
static const int64_t skewed[2 * E] = {10, 6, 5, 3, 4, 6, 2, 4};

static void make(tiny *t, const char *layers, int32_t each) {
    tiny_make(t, 2, 2, layers);
    mz_model *m = &t->model;
    m->tensors = 0;
    for (int32_t l = 0; l < m->layers; l++) {
        for (int k = 0; k < 2; k++)
            t->tensor[m->tensors++] = (mz_tensor){.name = "experts",
                                                  .rows = k == 0 ? 2 * I : H,
                                                  .cols = k == 0 ? H : I,
                                                  .count = E,
                                                  .layer = l,
                                                  .tier = MZ_TIER_EXPERT,
                                                  .bytes_per_value = 2,
                                                  .trainable = true};
    }
    t->options.scope = MZ_SCOPE_LAYERS;
    t->options.effects = (mz_step_effects){.other_work = true, .recompute_exchange = true};
    if (each == 2) {
        t->cluster.gpus = 1;
        t->cluster.ranks_per_device = 2;
        t->device[1] = 0;
    }
    tiny_load(t, skewed);
    tiny_static_plan(t);
}

static double memory(double bytes) {
    return bytes / 1e11;
}

static double of(const mz_step_outcome *o, int layer, int rank, int phase) {
    return o->detail_s[(layer * 2 + rank) * MZ_PHASES + phase];
}

/* Rows of a rank's experts: rank 0 has 0 and 1 (14 + 12 of both sources), rank 1 2 and 3 (7 + 7).
 */
static const int64_t rows[2] = {26, 14}, sent[2] = {24, 16}, tokens[2] = {12, 8};

/* Phases of a layer on a rank where both share a device. */
static void assert_layer(const mz_step_outcome *o, int l, int r) {
    const double n = (double)rows[r], p = (double)sent[r], T = (double)tokens[r];
    /* experts in, order out, counts and begins */
    assert_close(of(o, l, r, MZ_PHASE_ROUTER), memory(12 * p + 16 * E));
    /* one copy of E 8-byte counts */
    assert_close(of(o, l, r, MZ_PHASE_COUNT_EXCHANGE), memory(2 * 8 * E));
    /* order, places: 16 B each; rows out, of tokens in */
    assert_close(of(o, l, r, MZ_PHASE_PACK), memory((16 + 16 + ROW) * p + ROW * T));
    /* every row of the rank's experts is copied to it, its own too */
    assert_close(of(o, l, r, MZ_PHASE_DISPATCH), memory(2 * ROW * n));
    assert_close(of(o, l, r, MZ_PHASE_EXPERTS), 6 * n * H * I / 1e12 + memory(6 * n * I));
    assert_close(of(o, l, r, MZ_PHASE_COMBINE), memory(2 * ROW * p));
    assert_close(of(o, l, r, MZ_PHASE_UNPACK), memory(ROW * (p + T)));
    /* grouped and ordered once more, scaled rows */
    assert_close(of(o, l, r, MZ_PHASE_BACKWARD_PACK),
                 memory((12 + 16 + 16 + ROW) * p + ROW * T + 16 * E));
    assert_close(of(o, l, r, MZ_PHASE_BACKWARD_DISPATCH), memory(2 * ROW * n));
    assert_close(of(o, l, r, MZ_PHASE_BACKWARD_EXPERTS),
                 12 * n * H * I / 1e12 + memory(10 * n * I));
    /* the gate weight's gradient comes with every row */
    assert_close(of(o, l, r, MZ_PHASE_BACKWARD_COMBINE), memory(2 * (ROW + 4) * p));
    assert_close(of(o, l, r, MZ_PHASE_BACKWARD_OTHER), memory(ROW * (p + T)));
    assert_true(of(o, l, r, MZ_PHASE_SCORE) == 0);
}

static void one_device(void **state) {
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    make(&t, "mm", 2);
    tiny_step(&t, 1, &step, &o);
    double sum = 0;
    for (int l = 0; l < 2; l++)
        for (int r = 0; r < 2; r++)
            assert_layer(&o, l, r);
    /* 2 experts a rank of 2 layers, 3 H I values: norms 2 B and 4 a row; AdamW with master weights
     */
    const double values = 2.0 * 2 * 3 * H * I, norm_rows = 2.0 * 2 * (2 * I + H);
    assert_close(of(&o, 2, 0, MZ_PHASE_OPTIMIZER),
                 memory(2 * values + 4 * norm_rows + 28 * values));
    for (int i = 0; i < 3 * 2 * MZ_PHASES; i++)
        sum += i % MZ_PHASES == MZ_PHASE_LAUNCH_WAIT ? 0 : o.detail_s[i];
    assert_close(o.time_s, sum); /* one after another */
    double own = 0;              /* a rank waits while the other one runs */
    for (int i = 0; i < 3; i++)
        for (int p = 0; p < MZ_PHASES; p++)
            own += p == MZ_PHASE_LAUNCH_WAIT ? 0 : of(&o, i, 0, p);
    assert_close(of(&o, 2, 0, MZ_PHASE_LAUNCH_WAIT), o.time_s - own);
    assert_close(o.moe_s, sum - of(&o, 2, 0, MZ_PHASE_OPTIMIZER) -
                              of(&o, 2, 1, MZ_PHASE_OPTIMIZER) -
                              of(&o, 2, 0, MZ_PHASE_GRADIENT_REDUCE) -
                              of(&o, 2, 1, MZ_PHASE_GRADIENT_REDUCE));
    assert_int_equal(o.dispatch_bytes, 2 * ROW * (8 + 10));
    assert_int_equal(o.backward_combine_bytes, 2 * (ROW + 4) * (8 + 10));
    assert_int_equal(o.sent_bytes, 0); /* nothing leaves the device */
    double busy = 0;
    for (int l = 0; l < 3; l++)
        for (int p = 0; p < MZ_PHASES; p++)
            busy += mz_phase_computes((mz_phase)p) ? of(&o, l, 1, p) : 0;
    assert_close(o.rank_busy_s[1], busy);
    assert_close(o.phase_s[MZ_PHASE_DISPATCH], 2 * memory(2 * ROW * 26));
    mz_step_free(&step);
    tiny_free(&t);
}

/* Launches and a wait for every rank and phase: 2 + 10 us, and 2 us for every further kernel that
 * takes less. */
static void launches(void **state) {
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    make(&t, "m", 2);
    t.options.effects.launches = true;
    tiny_step(&t, 1, &step, &o);
    assert_close(of(&o, 0, 0, MZ_PHASE_ROUTER), 12e-6 + memory(12 * 24 + 16 * E));
    assert_close(of(&o, 0, 0, MZ_PHASE_PACK), 12e-6 + 4e-6);
    /* four messages, of two sources for two experts: three more launches */
    assert_close(of(&o, 0, 0, MZ_PHASE_DISPATCH), 12e-6 + 6e-6);
    mz_step_free(&step);
    tiny_free(&t);
}

/* A device each: own rows are copied, the others cross the port after both have entered; rank 1 is
 * done with its part earlier and waits. */
static void two_devices(void **state) {
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    make(&t, "m", 1);
    tiny_step(&t, 1, &step, &o);
    const double group[2] = {memory(12 * 24 + 16 * E), memory(12 * 16 + 16 * E)};
    const double own = memory(2 * 8 * E), counts = 8 * E / 1e10 + 1e-6;
    assert_close(of(&o, 0, 0, MZ_PHASE_COUNT_EXCHANGE), own + counts);
    assert_close(of(&o, 0, 1, MZ_PHASE_COUNT_EXCHANGE), own + counts + group[0] - group[1]);
    const double pack[2] = {memory((32 + ROW) * 24 + ROW * 12), memory((32 + ROW) * 16 + ROW * 8)};
    const double copy[2] = {memory(2 * ROW * 16), memory(2 * ROW * 6)};
    const double ready =
        pack[0] + copy[0] > pack[1] + copy[1] ? pack[0] + copy[0] : pack[1] + copy[1];
    /* 8 rows from 0 to 1, 10 back */
    assert_close(of(&o, 0, 1, MZ_PHASE_DISPATCH), ready - pack[1] + 10 * ROW / 1e10 + 1e-6);
    assert_close(of(&o, 0, 0, MZ_PHASE_DISPATCH), ready - pack[0] + 10 * ROW / 1e10 + 1e-6);
    double sum = 0;
    for (int l = 0; l < 2; l++)
        for (int p = 0; p < MZ_PHASES; p++)
            sum += p == MZ_PHASE_LAUNCH_WAIT ? 0 : of(&o, l, 0, p);
    assert_true(o.time_s >= sum - 1e-15);
    /* the last exchange is the norm's sum; the update follows it on both */
    assert_close(o.time_s, sum);
    assert_true(o.sent_bytes > 0 && o.sent_bytes == o.received_bytes);
    mz_step_free(&step);
    tiny_free(&t);
}

/* Either of the two may be the slow one, by a tenth of the time since both met, and the other one
 * is as much faster: the mean of both cases. */
static double slower_of(double a, double b) {
    return (fmax(1.1 * a, 0.9 * b) + fmax(0.9 * a, 1.1 * b)) / 2;
}

static void two_uneven_devices(void **state) {
    tiny t;
    mz_step *step;
    mz_step_outcome even, uneven;
    mz_measured measured = {.processes = 2, .workers = 1, .alone = 1, .uneven = 0.1};
    make(&t, "m", 1);
    tiny_step(&t, 1, &step, &even);
    const double counted = of(&even, 0, 0, MZ_PHASE_COUNT_EXCHANGE);
    const double dispatched = of(&even, 0, 0, MZ_PHASE_DISPATCH), step_s = even.time_s;
    mz_step_free(&step);
    t.cluster.device.measured = &measured;
    tiny_step(&t, 1, &step, &uneven);
    const double own = memory(2 * 8 * E);
    const double group[2] = {memory(12 * 24 + 16 * E) + own, memory(12 * 16 + 16 * E) + own};
    assert_close(of(&uneven, 0, 0, MZ_PHASE_COUNT_EXCHANGE),
                 counted + slower_of(group[0], group[1]) - group[0]);
    /* So unequal that it is always the same one: no more than its own time. */
    const double pack[2] = {memory((32 + ROW) * 24 + ROW * 12 + 2 * ROW * 16),
                            memory((32 + ROW) * 16 + ROW * 8 + 2 * ROW * 6)};
    assert_true(0.9 * pack[0] > 1.1 * pack[1]);
    assert_close(of(&uneven, 0, 0, MZ_PHASE_DISPATCH), dispatched);
    /* As equal as they are after the norms' sum the end comes a tenth of the update later. */
    assert_true(uneven.time_s > step_s && uneven.time_s < 1.1 * step_s);
    mz_step_free(&step);
    tiny_free(&t);
}

/* Processes meet off the clock where a layer's data is made and where its results are looked at:
 * what one was ahead then, it need not wait for at the next exchange. The update is after the last
 * one: the step ends with the slow one.
 */
static void off_the_clock(void **state) {
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    mz_measured measured = {.processes = 2, .workers = 1, .alone = 1, .uneven = 0.1};
    make(&t, "mm", 1);
    tiny_step(&t, 1, &step, &o);
    const double group[2] = {memory(12 * 24 + 16 * E), memory(12 * 16 + 16 * E)};
    const double own = memory(2 * 8 * E), counts = 8 * E / 1e10 + 1e-6;
    for (int l = 0; l < 2; l++) {
        assert_true(of(&o, l, 0, MZ_PHASE_UNPACK) > of(&o, l, 1, MZ_PHASE_UNPACK));
        assert_close(of(&o, l, 1, MZ_PHASE_COUNT_EXCHANGE), own + counts + group[0] - group[1]);
    }
    const double plain = o.time_s;
    double ahead = 0; /* of rank 1, of its part of the layers: what it met off the clock with */
    for (int l = 0; l < 2; l++) {
        ahead += of(&o, l, 0, MZ_PHASE_UNPACK) - of(&o, l, 1, MZ_PHASE_UNPACK);
        ahead += of(&o, l, 0, MZ_PHASE_BACKWARD_OTHER) - of(&o, l, 1, MZ_PHASE_BACKWARD_OTHER);
    }
    double sum[2] = {0};
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 3 * MZ_PHASES; i++)
            sum[r] +=
                i % MZ_PHASES == MZ_PHASE_LAUNCH_WAIT ? 0 : of(&o, i / MZ_PHASES, r, i % MZ_PHASES);
    assert_close(sum[0] - sum[1], ahead);
    assert_close(plain, sum[0]);
    mz_step_free(&step);
    t.cluster.device.measured = &measured;
    tiny_step(&t, 1, &step, &o);
    double late = 0; /* without the end's own lag */
    for (int i = 0; i < 3 * MZ_PHASES; i++)
        late += i % MZ_PHASES == MZ_PHASE_LAUNCH_WAIT ? 0 : of(&o, i / MZ_PHASES, 0, i % MZ_PHASES);
    const double values = 2.0 * 2 * 3 * H * I, update = memory(28 * values);
    /* Rank 1's clock is behind by what it met with: the mean of rank 0 slow and rank 1 slow. */
    const double slow = late + 0.1 * update,
                 other = fmax(late - 0.1 * update, late - ahead + 0.1 * update);
    assert_close(o.time_s, (slow + other) / 2);
    mz_step_free(&step);
    tiny_free(&t);
}

/* Where messages between processes were measured by number and bytes, that is what an exchange
 * takes. */
static void measured_messages(void **state) {
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    mz_fit_sample sample[] = {{.size = {1, 100, 200}, .seconds = 7e-6},
                              {.size = {2, 100, 200}, .seconds = 9e-6},
                              {.size = {1, 10100, 20200}, .seconds = 17e-6}};
    mz_measured measured = {.processes = 2, .workers = 1, .alone = 1};
    mz_fit *fit = &measured.fit[MZ_WORK_EXCHANGE];
    /* 5 us, 2 us a message, 1 us per 1000 B (twice as much read and written) */
    *fit = (mz_fit){.term = {4.9e-6, 2e-6, 0.5e-9}, .samples = 3, .sample = sample};
    mz_fit_finish(fit, MZ_WORK_EXCHANGE);
    make(&t, "m", 1);
    tiny_step(&t, 1, &step, &o);
    const double wait = 1e-6 + 8 * E / 1e10; /* of the cluster's own port */
    const double counted = of(&o, 0, 0, MZ_PHASE_COUNT_EXCHANGE) - wait;
    const double sent_s = of(&o, 0, 0, MZ_PHASE_DISPATCH) - 1e-6 - 10 * ROW / 1e10;
    const double back_s = of(&o, 0, 0, MZ_PHASE_BACKWARD_COMBINE) - 1e-6 - 10 * (ROW + 4) / 1e10;
    mz_step_free(&step);
    t.cluster.device.measured = &measured;
    tiny_step(&t, 1, &step, &o);
    assert_close(of(&o, 0, 0, MZ_PHASE_COUNT_EXCHANGE), counted + 4.9e-6 + 2e-6 + 1e-9 * 8 * E);
    /* 10 rows from rank 1 for two experts; back the other way, with numbers of pairs in a third */
    assert_close(of(&o, 0, 0, MZ_PHASE_DISPATCH), sent_s + 4.9e-6 + 2 * 2e-6 + 1e-9 * 10 * ROW);
    assert_close(of(&o, 0, 0, MZ_PHASE_BACKWARD_COMBINE),
                 back_s + 4.9e-6 + 3 * 2e-6 + 1e-9 * 10 * (ROW + 4));
    mz_step_free(&step);
    tiny_free(&t);
}

/* Half of every entry kept: 5 of 10 of expert 0 of source 0 and so on, none where one pair is odd.
 */
static void budgeted(void **state) {
    static const int32_t expert[] = {0, 1, 2, 3}, rank[] = {0, 0, 1, 1};
    static const int64_t back[2 * E] = {5, 3, 2, 1, 2, 3, 1, 2}; /* 11 and 8; rows 13 and 6 */
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    make(&t, "m", 2);
    tiny_plan(&t, 4, expert, rank, skewed, back);
    t.traits.lossy = true;
    t.traits.score_combine_bytes = 4;
    t.traits.score_kind = 0;
    tiny_step(&t, 1, &step, &o);
    assert_close(of(&o, 0, 0, MZ_PHASE_COMBINE), memory(2 * (ROW + 4) * 24));
    /* an fp32 norm a pair read and written */
    assert_close(of(&o, 0, 0, MZ_PHASE_UNPACK), memory(ROW * (24 + 12) + 8 * 24));
    /* grouping; norms of g; scores 20, selection 24 B a pair */
    assert_close(of(&o, 0, 0, MZ_PHASE_SCORE), memory(12 * 24 + 16 * E + (ROW + 4) * 12 + 44 * 24));
    /* a look-up per pair, four per kept one; 11 rows noted for 24 pairs */
    assert_close(of(&o, 0, 0, MZ_PHASE_BACKWARD_PACK),
                 memory(16 * (24 + 4 * 11) + 8 * (11 + 24) + 2 * ROW * 11));
    assert_close(of(&o, 0, 0, MZ_PHASE_BACKWARD_DISPATCH), memory(2 * (ROW + 8) * 13));
    /* kept x, gate and up, h side by side */
    assert_close(of(&o, 0, 0, MZ_PHASE_BACKWARD_EXPERTS),
                 12.0 * 13 * H * I / 1e12 + memory(4 * 13 * (H + 3 * I) + 10 * 13 * I));
    assert_int_equal(o.backward_dispatch_bytes, (ROW + 8) * (3 + 5));
    mz_step_free(&step);
    /* x again: sent once more, ordered by the device, gate and up computed again */
    t.traits.resend = true;
    tiny_step(&t, 1, &step, &o);
    assert_close(of(&o, 0, 0, MZ_PHASE_BACKWARD_PACK), memory((16 + 8 + 4 * ROW) * 11 + 8 * 24));
    assert_close(of(&o, 0, 0, MZ_PHASE_BACKWARD_DISPATCH), memory(2 * 2 * ROW * 13));
    assert_close(of(&o, 0, 0, MZ_PHASE_BACKWARD_EXPERTS),
                 16.0 * 13 * H * I / 1e12 + memory(6 * 13 * I + 10 * 13 * I));
    mz_step_free(&step);
    tiny_free(&t);
}

/* The only layer's backward products: its input, both gradients; rows, gate and up, activation of
 * forward; rows of gradients and the products' results; places of pairs, gradients of gate weights;
 * where the rows of either expert begin. */
static void memory_of_one_layer(void **state) {
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    make(&t, "m", 2);
    tiny_step(&t, 1, &step, &o);
    const int64_t weights = 2 * 2 * 3 * H * I, T = 12, n = 26, p = 24;
    const int64_t resident = weights + weights + 6 * weights;
    const int64_t activations = 3 * ROW * T;
    const int64_t buffers =
        8 * p + 8 * (2 + 1) + n * (ROW + 4 * I + 2 * I) + n * (ROW + 2 * I + 4 * I + ROW + 4);
    assert_int_equal(o.resident_bytes, resident);
    assert_int_equal(o.peak_bytes, resident + activations + buffers);
    assert_int_equal(o.at_peak[MZ_MEM_ACTIVATIONS], activations);
    assert_int_equal(o.at_peak[MZ_MEM_TOKEN_BUFFERS], buffers);
    assert_int_equal(o.at_peak[MZ_MEM_WORKSPACE] + o.at_peak[MZ_MEM_CONTEXT] +
                         o.at_peak[MZ_MEM_COMMUNICATION],
                     0);
    assert_string_equal(o.peak_label, "layer 0 rows by expert");
    assert_int_equal(o.rank_memory_bytes[MZ_MEM_TOKEN_BUFFERS], buffers);
    mz_step_free(&step);
    tiny_free(&t);
}

/* Full recomputation keeps the input alone of a layer; in backward the rows come again. */
static void recomputed(void **state) {
    tiny t;
    mz_step *step;
    mz_step_outcome none, full;
    make(&t, "mm", 2);
    tiny_step(&t, 1, &step, &none);
    const int64_t peak = none.peak_bytes;
    const double dispatch = none.phase_s[MZ_PHASE_DISPATCH];
    const double combine = none.phase_s[MZ_PHASE_COMBINE];
    const double experts = none.phase_s[MZ_PHASE_EXPERTS];
    mz_step_free(&step);
    t.options.recompute = MZ_RECOMPUTE_FULL;
    tiny_step(&t, 1, &step, &full);
    assert_int_equal(peak - full.peak_bytes, 26 * (ROW + 4 * I + 2 * I)); /* of one layer */
    assert_close(full.phase_s[MZ_PHASE_DISPATCH], 2 * dispatch);
    assert_close(full.phase_s[MZ_PHASE_COMBINE], combine);
    /* gate and up once more, not down */
    assert_close(full.phase_s[MZ_PHASE_EXPERTS] - experts,
                 2 * (4.0 * 26 * H * I / 1e12 + memory(6 * 26 * I)));
    mz_step_free(&step);
    tiny_free(&t);
}

/* Rank 1 has a replica of expert 0, whose gradient comes back as `gradient` bytes. */
static void with_replica(tiny *t, int64_t gradient) {
    static const int32_t expert[] = {0, 0, 1, 2, 3}, rank[] = {0, 1, 0, 1, 1};
    static const int64_t pairs[2 * 5] = {10, 0, 6, 5, 3, 0, 4, 6, 2, 4};
    mz_err err;
    make(t, "m", 2);
    t->traits.slots = 3;
    t->traits.replica_memory = MZ_REPLICAS_PER_LAYER;
    t->traits.replica_gradient_bytes = gradient;
    tiny_plan(t, 5, expert, rank, pairs, NULL);
    const mz_move back = {MZ_MOVE_GRADIENTS, MZ_MOVE_REDUCE, MZ_HIDE_LAYERS, 0, 1, 0, gradient, 0};
    assert_ok(mz_plan_add_move(t->plan, back, &err), &err);
}

/* A replica of expert 0 on rank 1: weights there before forward, its gradient back afterwards and
 * added to rows of the main's. */
static void replica(void **state) {
    const int64_t W = 2 * 3 * H * I;
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    mz_err err;
    with_replica(&t, W);
    const mz_move there = {MZ_MOVE_WEIGHTS, MZ_MOVE_FORWARD, MZ_HIDE_DISPATCH, 0, 0, 1, W, 0};
    assert_ok(mz_plan_add_move(t.plan, there, &err), &err);
    tiny_step(&t, 1, &step, &o);
    assert_true(of(&o, 0, 0, MZ_PHASE_WEIGHT_MOVE) == 0);
    assert_close(of(&o, 0, 1, MZ_PHASE_WEIGHT_MOVE), memory(2.0 * (double)W));
    assert_close(of(&o, 0, 0, MZ_PHASE_REPLICA_REDUCE), memory(2.0 * (double)W + 3.0 * (double)W));
    assert_int_equal(o.transfer_bytes, 2 * W);
    assert_int_equal(o.rank_replica_bytes[1], 2 * W);
    /* received, and the place of every row that is added */
    assert_int_equal(o.rank_memory_bytes[MZ_MEM_TEMPORARIES], W + 8 * 3 * I);
    mz_step_free(&step);
    tiny_free(&t);
}

/* The same with gradients of replicas in fp32: its products write them in a call of their own, 2
 * bytes more a value, out and in; the sum takes the main's there and back. */
static void wide_replica(void **state) {
    const int64_t W = 2 * 3 * H * I;
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    with_replica(&t, 2 * W);
    tiny_step(&t, 1, &step, &o);
    const double n = 4 + 7 + 7; /* rows of rank 1 */
    assert_close(of(&o, 0, 1, MZ_PHASE_BACKWARD_EXPERTS),
                 12 * n * H * I / 1e12 + memory(10 * n * I + 4.0 * 3 * H * I));
    /* copied, converted twice 6 B a value, added 12 B a value */
    assert_close(of(&o, 0, 0, MZ_PHASE_REPLICA_REDUCE),
                 memory(2.0 * 2 * (double)W + (6 + 6 + 12) * 3.0 * H * I));
    mz_step_free(&step);
    tiny_free(&t);
}

/* Experts 1 and 2 change places. What arrives of either are weights and AdamW's state, six times as
 * much; a plan that states more, but no weights, does not say who holds the rest. */
static void stated_without_weights(void **state) {
    static const int32_t before[] = {0, 0, 1, 1}, after[] = {0, 1, 0, 1}, expert[] = {0, 1, 2, 3};
    const int64_t W = 2 * 3 * H * I;
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    mz_err err;
    make(&t, "m", 2);
    const mz_step_head head = {0, 1, 1, t.tokens};
    t.tokens[0] = tokens[0];
    t.tokens[1] = tokens[1];
    assert_ok(mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
              &err);
    for (int i = 0; i < 2; i++) {
        const mz_move move = {.kind = MZ_MOVE_OPTIMIZER,
                              .phase = MZ_MOVE_STEP,
                              .expert = 1,
                              .src = 0,
                              .dst = 1,
                              .bytes = 20 * W,
                              .change = true};
        tiny_plan(&t, 4, expert, i == 0 ? before : after, skewed, NULL);
        if (i == 1)
            assert_ok(mz_plan_add_move(t.plan, move, &err), &err);
        assert_ok(mz_step_begin(step, &head, &err), &err);
        assert_ok(mz_step_add_call(step, 0, 0, 0, &t.load, NULL, t.plan, &err), &err);
        assert_ok(mz_step_finish(step, &o, &err), &err);
    }
    for (int r = 0; r < 2; r++)
        assert_int_equal(o.rank_memory_bytes[r * MZ_MEM_CATEGORIES + MZ_MEM_TEMPORARIES], 7 * W);
    mz_step_free(&step);
    tiny_free(&t);
}

/* Buffers of 4 rows for every source and expert, whatever they hold: 2 sources, 2 experts a rank.
 */
static void padded(void **state) {
    static const int64_t kept[2 * E] = {4, 4, 4, 3, 4, 4, 2, 4}; /* 15 and 14 */
    static const int32_t expert[] = {0, 1, 2, 3}, rank[] = {0, 0, 1, 1};
    tiny t;
    mz_step *step;
    mz_step_outcome o;
    make(&t, "m", 2);
    t.traits.capacity_padded = true;
    t.traits.capacity_factor = 1e-9;
    t.traits.capacity_min = 4;
    t.traits.drop_by_weight = true;
    tiny_plan(&t, 4, expert, rank, kept, NULL);
    t.plan->has_drops = true;
    for (int i = 0; i < 2 * E; i++)
        t.plan->dropped[i] = skewed[i] - kept[i];
    tiny_step(&t, 1, &step, &o);
    for (int r = 0; r < 2; r++) {
        const double p = (double)sent[r], T = (double)tokens[r], n = 16;
        /* selection of what stays; 16 rows, padded ones zeros */
        assert_close(of(&o, 0, r, MZ_PHASE_PACK),
                     memory(24 * p + 16 * n + 8 * (n + p) + ROW * (n + T)));
        assert_close(of(&o, 0, r, MZ_PHASE_DISPATCH), memory(2 * ROW * n));
        assert_close(of(&o, 0, r, MZ_PHASE_EXPERTS), 6 * n * H * I / 1e12 + memory(6 * n * I));
        assert_close(of(&o, 0, r, MZ_PHASE_COMBINE), memory(2 * ROW * n));
        assert_close(of(&o, 0, r, MZ_PHASE_UNPACK), memory(ROW * (n + T)));
        assert_close(of(&o, 0, r, MZ_PHASE_BACKWARD_EXPERTS),
                     12 * n * H * I / 1e12 + memory(10 * n * I));
    }
    mz_step_free(&step);
    tiny_free(&t);
}

static void what_a_replay_does_not_do(void **state) {
    tiny t;
    mz_step *step;
    mz_err err;
    make(&t, "m", 2);
    const mz_step_options good = t.options;
    for (int i = 0; i < 5; i++) {
        t.options = good;
        if (i == 0)
            t.options.ep = 1;
        else if (i == 1)
            t.options.network = MZ_NETWORK_FLOW;
        else if (i == 2)
            t.options.dispatch = MZ_DISPATCH_RANK;
        else if (i == 3)
            t.options.recompute = MZ_RECOMPUTE_SELECTIVE;
        else
            t.options.allocator = MZ_ALLOCATOR_CACHING;
        assert_int_equal(
            mz_step_create(&t.model, &t.cluster, &t.options, "static", &t.traits, &step, &err),
            MZ_EINPUT);
        assert_non_null(strstr(err.msg, "--scope layers"));
    }
    tiny_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_device),    cmocka_unit_test(launches),
        cmocka_unit_test(two_devices),   cmocka_unit_test(two_uneven_devices),
        cmocka_unit_test(off_the_clock), cmocka_unit_test(measured_messages),
        cmocka_unit_test(budgeted),      cmocka_unit_test(memory_of_one_layer),
        cmocka_unit_test(recomputed),    cmocka_unit_test(replica),
        cmocka_unit_test(wide_replica),  cmocka_unit_test(stated_without_weights),
        cmocka_unit_test(padded),        cmocka_unit_test(what_a_replay_does_not_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
