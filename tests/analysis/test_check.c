/* Pairs of result files whose every number is known by hand.
 *
 * Two ranks on one device; one layer and the whole step's row; policy i of scale f takes, on each
 * rank, in step o of two: experts (10 + 2 o) f, dispatch 4 f, optimizer 1 f ms, and planning of 0.5
 * ms stands at both ranks. A step is what its ranks do one after another: (30 + 4 o) f + 0.5 ms. A
 * measurement repeats both steps eight times, pass by pass. */
#include "tests/harness.h"

#include "analysis/check.h"
#include "common/base/rng.h"

#include <math.h>

enum { LAYERS = 2, RANKS = 2, CELLS = LAYERS * RANKS * MZ_PHASES, PASSES = 8, MOST = 6 };

typedef struct made_run {
    const char *policy;
    double scale, dispatch; /* dispatch times this */
    double second_half;     /* records from the middle on times this; 0: 1 */
    int64_t peak, buffers;
    double imbalance, most; /* mean, max */
    int64_t bytes;          /* of dispatch */
    double wait;            /* of each rank, ms */
} made_run;

typedef struct made {
    const char *kind, *transport;
    int64_t passes;
    int runs;
    made_run run[MOST];
} made;

static void near(double got, double want, const char *what, int line) {
    if (!(fabs(got - want) <= 1e-9 + 1e-9 * fabs(want)))
        fail_msg("line %d: %s is %.12g, not %.12g", line, what, got, want);
}
#define assert_near(got, want) near(got, want, #got, __LINE__)

static void fill_record(const made_run *in, int64_t ordinal, double factor, double *cell,
                        double *step) {
    *step = 0.5e-3 * factor;
    for (int r = 0; r < RANKS; r++) {
        double *layer = cell + r * MZ_PHASES, *whole = cell + (RANKS + r) * MZ_PHASES;
        layer[MZ_PHASE_PLANNER] = 0.5e-3 * factor;
        layer[MZ_PHASE_EXPERTS] = (10 + 2 * (double)ordinal) * in->scale * factor * 1e-3;
        layer[MZ_PHASE_DISPATCH] = 4 * in->scale * in->dispatch * factor * 1e-3;
        whole[MZ_PHASE_OPTIMIZER] = in->scale * factor * 1e-3;
        whole[MZ_PHASE_LAUNCH_WAIT] = in->wait * 1e-3;
        *step += layer[MZ_PHASE_EXPERTS] + layer[MZ_PHASE_DISPATCH] + whole[MZ_PHASE_OPTIMIZER];
    }
}

static void fill_run(mz_result_file *file, const made *m, const made_run *in, mz_run_file *run) {
    run->policy = in->policy;
    run->steps = 2 * m->passes;
    run->ranks = RANKS;
    run->layers = LAYERS;
    run->step_s = MZ_NEW(&file->arena, double, run->steps);
    run->ordinal = MZ_NEW(&file->arena, int64_t, run->steps);
    run->detail_s = MZ_NEW(&file->arena, double, run->steps *CELLS);
    run->rank_memory = MZ_NEW(&file->arena, int64_t, RANKS * MZ_MEM_CATEGORIES);
    for (int64_t i = 0; i < run->steps; i++) {
        run->ordinal[i] = i % 2;
        const bool late = i >= run->steps / 2 && in->second_half > 0;
        fill_record(in, i % 2, late ? in->second_half : 1, run->detail_s + i * CELLS,
                    &run->step_s[i]);
    }
    run->rank_memory[MZ_MEM_CATEGORIES + MZ_MEM_TOKEN_BUFFERS] = in->buffers;
    /* 1000 tokens a step */
    run->json =
        json_pack("{s:s, s:b, s:i, s:I, s:{s:f, s:f, s:f}, s:f, s:f, s:{s:f}, s:f, s:I}", "policy",
                  in->policy, "lossy", 0, "steps", (int)run->steps, "peak_memory_bytes",
                  (json_int_t)in->peak, "rank_imbalance", "mean", in->imbalance, "p95", in->most,
                  "max", in->most, "dropped_pairs_fraction", 0.0, "kept_pairs_fraction", 1.0,
                  "step_time_s", "mean", run->step_s[0], "tokens_per_s", 1000 / run->step_s[0],
                  "dispatch_bytes", (json_int_t)in->bytes);
    assert_non_null(run->json);
}

static mz_result_file make(const made *m) {
    mz_err err;
    mz_result_file file = {.runs = m->runs};
    json_t *runs = json_array();
    file.run = MZ_NEW(&file.arena, mz_run_file, m->runs);
    for (int i = 0; i < m->runs; i++) {
        fill_run(&file, m, &m->run[i], &file.run[i]);
        json_array_append_new(runs, file.run[i].json);
    }
    file.root = json_pack(
        "{s:s, s:s, s:{s:s, s:s}, s:{s:s, s:i, s:i, s:i, s:i}, s:{s:i, s:{s:f, s:f, s:f}, s:{s:f, "
        "s:f}}, s:{s:i, s:i, s:s}, s:o}",
        "schema", "mizan-result/1", "kind", m->kind, "trace", "path", m->kind, "digest", "sha256:1",
        "model", "name", "tiny", "hidden", 64, "expert_intermediate", 32, "top_k", 2, "moe_layers",
        1, "cluster", "ranks_per_device", RANKS, "node", "bandwidth", 1e9, "efficiency", 1.0,
        "latency", 0.0, "device", "bf16", 1e12, "gemm_efficiency", 1.0, "settings", "ranks", RANKS,
        "seed", 1, "transport", m->transport ? m->transport : "local", "runs", runs);
    assert_non_null(file.root);
    assert_ok(mz_result_digest(&file, file.digest, &err), &err);
    return file;
}

/* The measurement names the prediction. */
static void name(mz_result_file *measured, const char *digest) {
    mz_err err;
    json_object_set_new(measured->root, "prediction_digest", json_string(digest));
    assert_ok(mz_result_digest(measured, measured->digest, &err), &err);
}

/* A probe of the machine while it was calibrated, under its median's or its mean's key; room for
 * those of the measurement. */
static void probe(mz_result_file *predicted, mz_speed speed, const char *key, double seconds,
                  mz_result_file *measured) {
    mz_err err;
    json_object_set_new(json_object_get(predicted->root, "cluster"), key, json_real(seconds));
    assert_ok(mz_result_digest(predicted, predicted->digest, &err), &err);
    for (int i = 0; i < measured->runs; i++)
        measured->run[i].probe_s[speed] = MZ_NEW(&measured->arena, double, measured->run[i].steps);
}

typedef struct checked {
    mz_result_file predicted, measured;
    check_result result;
} checked;

static const made plain = {.kind = "prediction",
                           .passes = 1,
                           .runs = 3,
                           .run = {{"a", 1, 1, 0, 1000, 500, 1.1, 2},
                                   {"b", 1.2, 1, 0, 1000, 500, 1.1, 2},
                                   {"c", 1.1, 1, 0, 1000, 500, 1.1, 2}}};

static made measurement_of(const made *prediction) {
    made m = *prediction;
    m.kind = "measurement";
    m.passes = PASSES;
    return m;
}

static checked check(const made *predicted, const made *measured) {
    mz_err err;
    checked c = {.predicted = make(predicted), .measured = make(measured)};
    name(&c.measured, c.predicted.digest);
    assert_ok(check_files(&c.predicted, &c.measured, &c.result, &err), &err);
    c.result.predicted = NULL; /* the files move when the struct is returned */
    return c;
}

static void done(checked *c) {
    check_free(&c->result);
    mz_result_file_free(&c->predicted);
    mz_result_file_free(&c->measured);
}

/* The targets that are missed, by the start of their text, separated by '|'. */
static void assert_missed(const check_result *r, const char *const *want, int count) {
    int missed = 0;
    for (int i = 0; i < r->targets; i++) {
        if (r->target[i].passed)
            continue;
        bool expected = false;
        for (int k = 0; k < count; k++)
            expected = expected || strstr(r->target[i].what, want[k]) == r->target[i].what;
        if (!expected)
            fail_msg("missed: %s: %s", r->target[i].what, r->target[i].found);
        missed++;
    }
    assert_int_equal(missed, count);
    assert_int_equal(r->passed, count == 0);
}

/* What was printed; the caller frees it. */
static char *printed(FILE *file) {
    const long size = ftell(file);
    assert_true(size > 0);
    char *text = calloc(1, (size_t)size + 1);
    assert_non_null(text);
    rewind(file);
    assert_int_equal(fread(text, 1, (size_t)size, file), size);
    fclose(file);
    return text;
}

static char *html_of(const check_result *r, const char *prediction) {
    FILE *out = tmpfile();
    assert_non_null(out);
    check_html(r, prediction, "m.h5", out);
    return printed(out);
}

static char *text_of(const check_result *r) {
    FILE *out = tmpfile();
    assert_non_null(out);
    check_print(r, out);
    return printed(out);
}

static void perfect(void **state) {
    const made m = measurement_of(&plain);
    checked c = check(&plain, &m);
    const check_result *r = &c.result;
    assert_missed(r, NULL, 0);
    assert_int_equal(r->policies, 3);
    /* (30 + 34) / 2 * f + 0.5 ms */
    assert_near(r->policy[1].step.measured, 38.9e-3);
    assert_near(r->policy[1].step.predicted, 38.9e-3);
    assert_true(r->mean_error == 0 && r->worst_error == 0 && r->noise == 0);
    for (int i = 0; i < 3; i++) {
        const check_policy *p = &r->policy[i];
        assert_int_equal(p->records, 16);
        assert_true(p->step.error == 0 && p->peak.error == 0);
        assert_near(p->interval.low, p->step.measured);
        assert_near(p->interval.high, p->step.measured);
    }
    /* Experts 22 f of 32 f + 0.5 a step on both ranks; planning once. */
    const check_policy *a = &r->policy[0];
    assert_near(a->phase[MZ_PHASE_EXPERTS].measured, 22e-3);
    assert_near(a->phase[MZ_PHASE_PLANNER].measured, 0.5e-3);
    assert_near(a->share[MZ_PHASE_EXPERTS], 22 / 32.5);
    /* Busy time leaves planning out: 11 + 4 in the layer, 1 beside. */
    assert_near(a->layer[0].measured, 30e-3);
    assert_near(a->layer[1].measured, 2e-3);
    assert_near(a->rank[1].measured, 16e-3);
    assert_near(a->cell[0].measured, 15e-3);
    assert_near(a->memory[MZ_MEM_TOKEN_BUFFERS].measured, 500);
    assert_int_equal(r->pairs, 3);
    assert_near(r->rule[0].tau, 1);
    assert_near(r->rule[0].regret, 0);
    assert_near(r->rule[0].log_error, 0);
    assert_string_equal(r->verdict, "pass: all 10 targets are met");
    done(&c);
}

/* 9.6 ms predicted of b's dispatch, 11 % less measured: 0.9514 of 37.95 ms, 2.5 % of the step. */
static void one_phase_off(void **state) {
    static const char *const missed[] = {"phases of at least 5 %"};
    made m = measurement_of(&plain);
    m.run[1].dispatch = 1 / 1.11;
    checked c = check(&plain, &m);
    const check_policy *b = &c.result.policy[1];
    assert_missed(&c.result, missed, 1);
    assert_near(b->phase[MZ_PHASE_DISPATCH].error, 0.11);
    assert_near(b->phase[MZ_PHASE_EXPERTS].error, 0);
    assert_near(b->step.error, (9.6 - 9.6 / 1.11) / (38.9 - 9.6 + 9.6 / 1.11));
    assert_near(c.result.mean_error, b->step.error / 3);
    assert_near(c.result.worst_error, b->step.error);
    assert_non_null(strstr(c.result.target[1].found, "+2.5"));
    assert_non_null(strstr(c.result.target[1].found, "(b)"));
    assert_non_null(strstr(c.result.target[2].found, "+11.00 % (dispatch of b)"));
    assert_string_equal(c.result.verdict, "fail: 1 of 10 targets are missed");
    done(&c);
    m.run[1].dispatch = 1 / 1.09;
    c = check(&plain, &m);
    assert_missed(&c.result, NULL, 0);
    done(&c);
}

/* Predicted 1, 1.035, 0.99, measured 1, 1, 1.035 (of 32 ms, and 0.5 of planning). */
static void order_swapped(void **state) {
    static const char *const missed[] = {"same order", "null predictors"};
    made p = plain, m;
    p.run[1].scale = 1.035;
    p.run[2].scale = 0.99;
    m = measurement_of(&p);
    m.run[1].scale = 1;
    m.run[2].scale = 1.035;
    checked c = check(&p, &m);
    const check_result *r = &c.result;
    const double slow = (32 * 1.035 + 0.5) / 32.5, fast = (32 * 0.99 + 0.5) / 32.5;
    assert_missed(r, missed, 2);
    assert_near(r->rule[0].tau, -1);
    assert_near(r->rule[0].regret, slow - 1);
    /* pairs ab, ac, bc: log of what was said less that of what was measured */
    assert_near(r->pair[0].error, log(1 / slow));
    assert_near(r->pair[1].error, log(1 / fast) - log(1 / slow));
    assert_near(r->pair[2].error, log(slow / fast) - log(1 / slow));
    assert_false(r->pair[0].apart);
    assert_true(r->pair[1].apart && !r->pair[1].agrees);
    /* Equal imbalance says nothing: no pair for or against, error 0, log(slow), log(slow). */
    assert_near(r->rule[1].tau, 0);
    assert_near(r->rule[1].log_error, 2 * log(slow) / 3);
    done(&c);
}

/* The rules that know little, where they are right. */
static void simple_rules(void **state) {
    made p = plain;
    p.run[0].imbalance = 1, p.run[1].imbalance = 1.2, p.run[2].imbalance = 1.1;
    p.run[0].most = 3, p.run[1].most = 2, p.run[2].most = 1;
    p.run[1].bytes = 1000000;
    made m = measurement_of(&p);
    checked c = check(&p, &m);
    assert_near(c.result.rule[1].tau, 1);
    assert_near(c.result.rule[2].tau, (-1 - 1 + 1) / 3.0);
    assert_near(c.result.rule[2].regret, 35.7 / 32.5 - 1); /* it would take c */
    /* 2000 pairs x 64 x 32 x 18 FLOPs at 1e12 a second, a megabyte at 1e9 */
    assert_near(c.result.rule[3].value[0], 73.728e-6);
    assert_near(c.result.rule[3].value[1], 1073.728e-6);
    done(&c);
}

/* Waiting is no work: however long, it is in no target, layer or rank. */
static void waiting(void **state) {
    made m = measurement_of(&plain);
    m.run[0].wait = 50;
    checked c = check(&plain, &m);
    const check_policy *a = &c.result.policy[0];
    assert_missed(&c.result, NULL, 0);
    assert_near(a->phase[MZ_PHASE_LAUNCH_WAIT].measured, 100e-3);
    assert_near(a->share[MZ_PHASE_EXPERTS], 22 / 32.5);
    assert_true(a->share[MZ_PHASE_LAUNCH_WAIT] == 0 && a->layer[1].error == 0);
    assert_near(a->rank[0].measured, 16e-3);
    done(&c);
}

static void noisy(void **state) {
    static const char *const missed[] = {"noise"};
    made m = measurement_of(&plain);
    m.runs = 4;
    m.run[3] = m.run[0];
    m.run[3].scale = 1.02; /* 33.14 / 32.5 */
    checked c = check(&plain, &m);
    assert_missed(&c.result, missed, 1);
    assert_true(c.result.noisy && c.result.policy[0].repeated && !c.result.policy[1].repeated);
    assert_near(c.result.policy[0].noise, 1 - (30.5 + 34.5) / (31.1 + 35.18));
    assert_int_equal(c.result.policy[0].records, 32);
    assert_true(strstr(c.result.verdict, "machine too noisy") == c.result.verdict);
    done(&c);
    m = measurement_of(&plain);
    m.run[2].second_half = 1.016;
    c = check(&plain, &m);
    assert_missed(&c.result, missed, 1);
    assert_near(c.result.noise, 1 - 1 / 1.016);
    done(&c);
    m.run[2].second_half = 1.014;
    c = check(&plain, &m);
    assert_missed(&c.result, NULL, 0);
    done(&c);
}

/* What is said of noise is of what decides, and so is the verdict. */
static void assert_noise(const check_result *r, const char *found, bool noisy, const char *column) {
    char *text = text_of(r);
    const check_target *t = &r->target[8];
    assert_string_equal(t->found, found);
    assert_int_equal(r->noisy, noisy);
    if (noisy)
        assert_false(t->passed || r->passed);
    assert_int_equal(strstr(r->verdict, "machine too noisy: ") == r->verdict, noisy);
    if (column)
        assert_non_null(strstr(text, column));
    assert_int_equal(strstr(text, "noise in brackets") != NULL, column && column[0] == '(');
    free(text);
}

/* Two runs decide where there are some, whatever halves of other policies say; where the machine is
 * too noisy, what is not known of others is no excuse. */
static void which_noise(void **state) {
    static const char *const few[] = {"at least 15", "noise"};
    made m = measurement_of(&plain);
    m.runs = 4;
    m.run[3] = m.run[0];
    m.run[2].second_half = 1.1;
    checked c = check(&plain, &m);
    assert_noise(&c.result, "0.00 % (two runs of a)", false, "(+9.09)");
    done(&c);
    /* Two runs of one pass: of the others nothing is known. */
    m = measurement_of(&plain);
    m.passes = 1;
    m.runs = 4;
    m.run[3] = m.run[0];
    c = check(&plain, &m);
    assert_noise(&c.result, "0.00 % (two runs of a)", false, NULL);
    done(&c);
    m.run[3].scale = 1.02;
    c = check(&plain, &m);
    assert_missed(&c.result, few, 2);
    assert_noise(&c.result, "1.93 % (two runs of a)", true, NULL);
    done(&c);
    /* Halves, of c none: enough where a's are too far apart, else unknown. */
    for (int apart = 0; apart < 2; apart++) {
        mz_err err;
        m = measurement_of(&plain);
        m.run[0].second_half = apart ? 1.02 : 1;
        mz_result_file p = make(&plain), q = make(&m);
        check_result r;
        q.run[2].steps = 2;
        name(&q, p.digest);
        assert_ok(check_files(&p, &q, &r, &err), &err);
        assert_missed(&r, few, 2);
        assert_noise(&r,
                     apart ? "1.96 % (halves of the records of a)"
                           : "unknown: steps were not repeated (--repeat)",
                     apart, NULL);
        check_free(&r);
        mz_result_file_free(&p);
        mz_result_file_free(&q);
    }
}

/* Two runs are two sides even where one of them was cut short. */
static void runs_are_sides(void **state) {
    made m = measurement_of(&plain);
    mz_err err;
    check_result r;
    m.runs = 4;
    m.run[3] = m.run[0];
    m.run[3].scale = 1.02;
    mz_result_file p = make(&plain), q = make(&m);
    q.run[3].steps = 8;
    name(&q, p.digest);
    assert_ok(check_files(&p, &q, &r, &err), &err);
    assert_int_equal(r.policy[0].records, 24);
    assert_near(r.policy[0].noise, 1 - (30.5 + 34.5) / (31.1 + 35.18));
    check_free(&r);
    mz_result_file_free(&p);
    mz_result_file_free(&q);
}

static void memory_off(void **state) {
    static const char *const missed[] = {"peak memory"};
    made p = plain, m = measurement_of(&plain);
    p.run[2].peak = 1015;
    p.run[2].buffers = 600;
    checked c = check(&p, &m);
    assert_missed(&c.result, missed, 1);
    assert_near(c.result.policy[2].peak.error, 0.015);
    assert_near(c.result.policy[2].memory[MZ_MEM_TOKEN_BUFFERS].error, 0.2);
    done(&c);
    p.run[2].peak = 1009;
    c = check(&p, &m);
    assert_missed(&c.result, NULL, 0);
    done(&c);
}

/* Other plans move other bytes. */
static void traffic_off(void **state) {
    static const char *const missed[] = {"bytes of every kind"};
    made m = measurement_of(&plain);
    m.run[1].bytes = 4;
    checked c = check(&plain, &m);
    assert_missed(&c.result, missed, 1);
    assert_near(c.result.policy[1].traffic[0].error, -1);
    done(&c);
}

static void set_bytes(mz_run_file *run, int64_t within, int64_t between) {
    json_object_set_new(run->json, "within_process_bytes", json_integer(within));
    json_object_set_new(run->json, "between_process_bytes", json_integer(between));
}

/* Who sends to whom follows from a lossless policy's plans, to the byte; a lossy one's kept pairs
 * go by values, too, and where a file does not say, or has one step more often, nothing is exact.
 */
static void traffic_by_process(void **state) {
    static const char *const missed[] = {"bytes of every kind"};
    const made m = measurement_of(&plain);
    const struct {
        int64_t within, between;
        bool lossy, uneven, silent, good;
    } cases[] = {
        {1000000, 500, .good = true},           {1000001, 500, .good = false},
        {1000000, 501, .good = false},          {1000001, 500, .lossy = true, .good = true},
        {1020000, 500, .lossy = true},          {1000001, 500, .uneven = true, .good = true},
        {3, 500, .silent = true, .good = true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mz_err err;
        mz_result_file p = make(&plain), q = make(&m);
        check_result r;
        set_bytes(&q.run[1], cases[i].within, cases[i].between);
        if (!cases[i].silent)
            set_bytes(&p.run[1], 1000000, 500);
        json_object_set_new(p.run[1].json, "lossy", json_boolean(cases[i].lossy));
        q.run[1].steps -= cases[i].uneven; /* 15 */
        assert_ok(mz_result_digest(&p, p.digest, &err), &err);
        name(&q, p.digest);
        assert_ok(check_files(&p, &q, &r, &err), &err);
        assert_missed(&r, missed, !cases[i].good);
        if (i == 1)
            assert_string_equal(r.target[4].found, "1000000 predicted, 1000001 measured "
                                                   "(within_process_bytes of b)");
        check_free(&r);
        mz_result_file_free(&p);
        mz_result_file_free(&q);
    }
}

/* A machine at 0.9 of its speed: every record and probe takes 1 / 0.9. Errors are as they are, and
 * nothing at the calibrated speed. */
static void slow_machine(void **state) {
    made m = measurement_of(&plain);
    mz_err err;
    mz_result_file p = make(&plain), q = make(&m);
    check_result r;
    probe(&p, MZ_SPEED_PRODUCT, "probe_s", 4.5e-3, &q);
    for (int i = 0; i < q.runs; i++)
        for (int64_t k = 0; k < q.run[i].steps; k++) {
            q.run[i].step_s[k] /= 0.9;
            q.run[i].probe_s[MZ_SPEED_PRODUCT][k] =
                k % 5 == 0 ? 1 : 5e-3; /* now and then a probe is disturbed */
        }
    name(&q, p.digest);
    assert_ok(check_files(&p, &q, &r, &err), &err);
    assert_true(check_probed(&r) && !r.passed);
    assert_near(r.speed[MZ_SPEED_PRODUCT], 0.9);
    assert_near(r.mean_error, 0.1);
    assert_true(r.mean_at_speed < 1e-9 && r.worst_at_speed < 1e-9);
    assert_non_null(strstr(r.verdict, "0.900 of its calibrated speed"));
    /* phases as they were predicted, 1 / 0.9 - 1 too long at that speed */
    assert_near(r.policy[2].phase_at_speed[MZ_PHASE_EXPERTS], 1 / 0.9 - 1);
    assert_near(r.policy[2].phase_at_speed[MZ_PHASE_ROUTER], 0);
    char *page = html_of(&r, "p.h5"), *text = text_of(&r);
    assert_non_null(
        strstr(page, "0.900 of its calibrated speed; at that speed: mean error 0.00 %"));
    /* of a policy's time -10 % and nothing; of its phases nothing and +11 % */
    assert_non_null(strstr(page, "<td>-10.00</td><td>+0.00</td>"));
    assert_non_null(strstr(page, "<td>+0.00</td><td>+11.11</td>"));
    assert_non_null(strstr(text, " +0.0/+11.1 "));
    json_t *json = check_json(&r);
    const json_t *experts = json_object_get(
        json_object_get(json_array_get(json_object_get(json, "policies"), 0), "phases_s"),
        "experts");
    assert_near(json_real_value(json_object_get(experts, "error_at_speed")), 1 / 0.9 - 1);
    json_decref(json);
    free(page);
    free(text);
    check_free(&r);
    mz_result_file_free(&p);
    mz_result_file_free(&q);
}

/* A record without a probe holds 0: it says nothing of the machine, however many there are. */
static void records_without_probe(void **state) {
    made m = measurement_of(&plain);
    mz_err err;
    for (int all = 0; all < 2; all++) {
        mz_result_file p = make(&plain), q = make(&m);
        check_result r;
        probe(&p, MZ_SPEED_PRODUCT, "probe_s", 4.5e-3, &q);
        for (int i = 0; i < q.runs; i++)
            for (int64_t k = 0; k < q.run[i].steps; k++)
                q.run[i].probe_s[MZ_SPEED_PRODUCT][k] = all || k % 3 > 0 ? 0 : k % 2 ? 4e-3 : 5e-3;
        name(&q, p.digest);
        assert_ok(check_files(&p, &q, &r, &err), &err);
        assert_int_equal(check_probed(&r), !all);
        assert_near(r.speed[MZ_SPEED_PRODUCT], all ? 1 : 0.9);
        check_free(&r);
        mz_result_file_free(&p);
        mz_result_file_free(&q);
    }
}

/* Every record of the measurement, and its probes, as long as a machine of these speeds takes. */
static void run_at(mz_result_file *q, const double speed[MZ_SPEEDS], bool old, bool muon) {
    const double product = speed[MZ_SPEED_PRODUCT];
    const double rows = old ? product : speed[MZ_SPEED_CACHE];
    const double update = old || muon ? product : speed[MZ_SPEED_MEMORY];
    for (int i = 0; i < q->runs; i++)
        for (int64_t k = 0; k < q->run[i].steps; k++) {
            for (int s = 0; s < (old ? 1 : MZ_SPEEDS); s++)
                q->run[i].probe_s[s][k] = 1e-3 * (s + 1) / speed[s];
            double *cell = q->run[i].detail_s + k * CELLS, sum = 0;
            for (int c = 0; c < LAYERS * RANKS; c++, cell += MZ_PHASES) {
                cell[MZ_PHASE_PLANNER] /= product;
                cell[MZ_PHASE_EXPERTS] /= product;
                cell[MZ_PHASE_DISPATCH] /= rows;
                cell[MZ_PHASE_OPTIMIZER] /= update;
                sum += cell[MZ_PHASE_PLANNER] / RANKS + cell[MZ_PHASE_EXPERTS] +
                       cell[MZ_PHASE_DISPATCH] + cell[MZ_PHASE_OPTIMIZER];
            }
            q->run[i].step_s[k] = sum;
        }
}

/* Arithmetic at 0.9 of its speed, memory at 0.8, caches at 1.25: experts, the optimizer and rows
 * that are measured as long as that makes them are without error at the speed, each by its own, and
 * so is a step of nothing but them. Muon's update is products; records of before have one probe,
 * and all goes by that. */
static void speeds_apart(void **state) {
    static const char *const optimizers[] = {"adamw", "muon[lr=0.1]"};
    static const double speed[MZ_SPEEDS] = {0.9, 0.8, 1.25};
    made m = measurement_of(&plain);
    mz_err err;
    for (int one = 0; one < 4; one++) {
        const bool muon = one % 2, old = one >= 2;
        mz_result_file p = make(&plain), q = make(&m);
        check_result r;
        json_object_set_new(json_object_get(p.root, "settings"), "optimizer",
                            json_string(optimizers[muon]));
        json_object_set_new(json_object_get(q.root, "settings"), "optimizer",
                            json_string(optimizers[muon]));
        for (int k = 0; k < (old ? 1 : MZ_SPEEDS); k++)
            probe(&p, (mz_speed)k, mz_speed_mean_key((mz_speed)k), 1e-3 * (k + 1), &q);
        run_at(&q, speed, old, muon);
        name(&q, p.digest);
        assert_ok(check_files(&p, &q, &r, &err), &err);
        for (int k = 0; k < MZ_SPEEDS; k++) {
            assert_int_equal(r.probed[k], k == 0 || !old);
            assert_near(r.speed[k], old ? 0.9 : speed[k]);
        }
        assert_near(check_farthest(&r), old ? 0.9 : 1.25);
        for (int i = 0; i < r.policies; i++) {
            const check_policy *policy = &r.policy[i];
            assert_near(policy->phase[MZ_PHASE_DISPATCH].error, (old ? 0.9 : 1.25) - 1);
            assert_near(policy->phase_at_speed[MZ_PHASE_PLANNER], 0);
            assert_near(policy->phase_at_speed[MZ_PHASE_EXPERTS], 0);
            assert_near(policy->phase_at_speed[MZ_PHASE_DISPATCH], 0);
            assert_near(policy->phase_at_speed[MZ_PHASE_OPTIMIZER], 0);
            assert_near(policy->at_speed, 0);
        }
        char *page = html_of(&r, "p.h5"), *text = text_of(&r);
        const char *line =
            old ? "ran at 0.900 of its calibrated speed; at that speed"
                : "ran at 0.900 of its calibrated speed, its memory at 0.800, rows in a "
                  "cache at 1.250; at that speed: mean error 0.00 %";
        assert_non_null(strstr(page, line));
        assert_non_null(strstr(text, line));
        json_t *json = check_json(&r);
        assert_near(json_real_value(json_object_get(json, "speed")), 0.9);
        assert_true(json_is_null(json_object_get(json, "memory_speed")) == old);
        if (!old) {
            assert_near(json_real_value(json_object_get(json, "memory_speed")), 0.8);
            assert_near(json_real_value(json_object_get(json, "cache_speed")), 1.25);
        }
        json_decref(json);
        free(page);
        free(text);
        check_free(&r);
        mz_result_file_free(&p);
        mz_result_file_free(&q);
    }
}

/* Seconds of rows whose calls touch so many bytes, at a machine whose caches are at 1.25 of their
 * speed and whose memory is at 0.8: between 256 KiB and 32 MiB by the logarithm of the size. */
static double rows_slower(double bytes) {
    const double part = log2(bytes / (256 << 10)) / log2(128);
    return 1 / 1.25 + fmin(fmax(part, 0), 1) * (1 / 0.8 - 1 / 1.25);
}

/* A millisecond in every phase of the layer, predicted and measured. */
static void fill_phases(mz_result_file *file) {
    for (int i = 0; i < file->runs; i++)
        for (int64_t k = 0; k < file->run[i].steps; k++)
            for (int c = 0; c < RANKS * MZ_PHASES; c++)
                file->run[i].detail_s[k * CELLS + c] = 1e-3;
}

/* A prediction of 1,000 tokens a step on two ranks, with two experts a token, a tenth of the pairs
 * dropped, three quarters kept, rows of x sent again; layer_calls 0: it does not say. */
static void say_sizes(mz_result_file *file, int64_t hidden, double layer_calls) {
    json_object_set_new(json_object_get(file->root, "model"), "hidden", json_integer(hidden));
    json_object_set_new(json_object_get(file->root, "model"), "experts", json_integer(8));
    for (int i = 0; i < file->runs; i++) {
        json_t *run = file->run[i].json;
        json_object_set_new(run, "dropped_pairs_fraction", json_real(0.1));
        json_object_set_new(run, "kept_pairs_fraction", json_real(0.75));
        json_object_set_new(run, "backward_dispatch_bytes", json_integer(2000));
        json_object_set_new(run, "backward_combine_bytes", json_integer(1000));
        if (layer_calls > 0)
            json_object_set_new(run, "layer_calls", json_real(layer_calls));
    }
}

/* Bytes in and out of a rank's call by the table of replay/README.md: 500 tokens, 900 computed
 * pairs, 750 kept ones; as many calls share them as there are micro-batches. Rows in a cache go
 * with the caches, those beyond it with memory, what has only numbers with the caches whatever the
 * rows are, whole experts with memory, products with arithmetic. */
static void rows_by_size(void **state) {
    static const double speed[MZ_SPEEDS] = {0.9, 0.8, 1.25};
    static const struct {
        mz_phase phase;
        double values, numbers; /* of bf16, by hidden; bytes besides */
    } rows[] = {
        {MZ_PHASE_PACK, 500 + 900, 0},
        {MZ_PHASE_DISPATCH, 2 * 900, 0},
        {MZ_PHASE_COMBINE, 2 * 900, 0},
        {MZ_PHASE_UNPACK, 900 + 500, 0},
        {MZ_PHASE_SCORE, 500, 4 * 500},
        {MZ_PHASE_BACKWARD_PACK, 500 + 750, 0},
        {MZ_PHASE_BACKWARD_DISPATCH, 2 * 2 * 750, 0},
        {MZ_PHASE_BACKWARD_COMBINE, 2 * 750, 0},
        {MZ_PHASE_BACKWARD_OTHER, 750 + 500, 0},
    };
    static const int64_t hidden[] = {64, 512, 65536};
    made m = measurement_of(&plain);
    mz_err err;
    for (int one = 0; one < 9; one++) {
        const double batches = one % 3 == 0 ? 1 : one % 3;
        const int64_t h = hidden[one / 3];
        mz_result_file p = make(&plain), q = make(&m);
        check_result r;
        say_sizes(&p, h, one % 3);
        say_sizes(&q, h, one % 3);
        for (int k = 0; k < MZ_SPEEDS; k++)
            probe(&p, (mz_speed)k, mz_speed_mean_key((mz_speed)k), 1e-3 * (k + 1), &q);
        run_at(&q, speed, false, false);
        fill_phases(&p);
        fill_phases(&q);
        assert_ok(mz_result_digest(&p, p.digest, &err), &err);
        name(&q, p.digest);
        assert_ok(check_files(&p, &q, &r, &err), &err);
        for (int i = 0; i < r.policies; i++) {
            const double *error = r.policy[i].phase_at_speed;
            for (int k = 0; k < COUNT_OF(rows); k++) {
                const double bytes = 2 * rows[k].values * (double)h + rows[k].numbers;
                assert_near(error[rows[k].phase], rows_slower(bytes / batches) - 1);
            }
            assert_near(error[MZ_PHASE_ROUTER], 1 / 1.25 - 1);
            assert_near(error[MZ_PHASE_COUNT_EXCHANGE], 1 / 1.25 - 1);
            assert_near(error[MZ_PHASE_GRADIENT_REDUCE], 1 / 1.25 - 1);
            assert_near(error[MZ_PHASE_WEIGHT_MOVE], 1 / 0.8 - 1);
            assert_near(error[MZ_PHASE_REPLICA_REDUCE], 1 / 0.8 - 1);
            assert_near(error[MZ_PHASE_BACKWARD_EXPERTS], 1 / 0.9 - 1);
        }
        check_free(&r);
        mz_result_file_free(&p);
        mz_result_file_free(&q);
    }
}

/* A machine that is slow half of the time: times are means, so the speed is that of mean probes
 * where the calibration has their mean, whatever its median is. */
static void slow_half_of_the_time(void **state) {
    made m = measurement_of(&plain);
    mz_err err;
    mz_result_file p = make(&plain), q = make(&m);
    check_result r;
    int64_t n = 0;
    double value[64], sum = 0;
    probe(&p, MZ_SPEED_PRODUCT, "probe_s", 4e-3, &q);
    probe(&p, MZ_SPEED_PRODUCT, "probe_mean_s", 6e-3, &q);
    for (int i = 0; i < q.runs; i++)
        for (int64_t k = 0; k < q.run[i].steps; k++) {
            q.run[i].probe_s[MZ_SPEED_PRODUCT][k] = n == 1 ? 9 : n % 2 ? 1e-2 : 4e-3;
            assert_true(n < 64);
            value[n++] = q.run[i].probe_s[MZ_SPEED_PRODUCT][k];
        }
    for (int64_t i = 0; i < n; i++) /* the seventh part is left out at either end */
        for (int64_t k = i + 1; k < n; k++)
            if (value[k] < value[i]) {
                const double less = value[k];
                value[k] = value[i];
                value[i] = less;
            }
    assert_true(n >= 7);
    for (int64_t i = n / 7; i < n - n / 7; i++)
        sum += value[i] / (double)(n - 2 * (n / 7));
    name(&q, p.digest);
    assert_ok(check_files(&p, &q, &r, &err), &err);
    assert_true(check_probed(&r));
    assert_near(r.speed[MZ_SPEED_PRODUCT], 6e-3 / sum);
    check_free(&r);
    mz_result_file_free(&p);
    mz_result_file_free(&q);
}

/* Where no two policies differ, or no rule that knows little tells any two apart, beating such
 * rules is no evidence, and is not said to be. A tie where there is something to tell is no win. */
static void rules_without_a_say(void **state) {
    static const char *const missed[] = {"null predictors"};
    const char *untold = "nothing can be told: ";
    made p = plain, m;
    p.run[1].scale = 1.01, p.run[2].scale = 1.02;
    m = measurement_of(&p);
    checked c = check(&p, &m);
    assert_missed(&c.result, NULL, 0);
    assert_true(strstr(c.result.target[6].found, untold) == c.result.target[6].found);
    done(&c);
    /* Equal as measured, 4 % apart as predicted: the rules that know nothing are right by chance.
     */
    m.run[1].scale = 1, m.run[2].scale = 1;
    c = check(&p, &m);
    assert_missed(&c.result, NULL, 0);
    assert_non_null(strstr(c.result.target[6].found, "no two policies differ by more"));
    done(&c);
    /* Apart as measured; imbalance, fullest rank and bytes are those of all. */
    m = measurement_of(&plain);
    c = check(&plain, &m);
    assert_missed(&c.result, NULL, 0);
    assert_non_null(strstr(c.result.target[6].found, "same of all policies"));
    /* A rule that says of every pair what was measured, as the prediction does. */
    p = plain;
    for (int i = 0; i < 3; i++)
        p.run[i].imbalance = c.result.policy[i].step.predicted;
    done(&c);
    c = check(&p, &m);
    assert_missed(&c.result, missed, 1);
    done(&c);
}

/* One pass says nothing of noise; nor do two halves that share no step. */
static void not_repeated(void **state) {
    static const char *const missed[] = {"at least 15", "noise"};
    made m = measurement_of(&plain);
    m.passes = 1;
    checked c = check(&plain, &m);
    assert_missed(&c.result, missed, 2);
    assert_true(isnan(c.result.policy[0].noise) && !c.result.passed && !c.result.noisy);
    done(&c);
}

static void few_records(void **state) {
    static const char *const missed[] = {"at least 15"};
    made m = measurement_of(&plain);
    m.passes = 7;
    checked c = check(&plain, &m);
    assert_missed(&c.result, missed, 1);
    const check_policy *a = &c.result.policy[0];
    assert_true(isnan(a->interval.low) && isnan(a->phase_interval[MZ_PHASE_EXPERTS].low));
    assert_true(isnan(a->layer_interval[0].low) && isnan(a->rank_interval[0].low));
    done(&c);
}

/* A measurement that names this digest: the check fails, and says why. */
static void assert_not_fixed(const char *digest, const char *found) {
    static const char *const missed[] = {"the prediction was fixed"};
    const made m = measurement_of(&plain);
    mz_err err;
    mz_result_file p = make(&plain), q = make(&m);
    check_result r;
    name(&q, digest);
    assert_ok(check_files(&p, &q, &r, &err), &err);
    assert_missed(&r, missed, 1);
    assert_string_equal(r.target[9].found, found);
    check_free(&r);
    mz_result_file_free(&p);
    mz_result_file_free(&q);
}

static void not_fixed_before(void **state) {
    assert_not_fixed(MZ_RESULT_DIGEST "other", "prediction was not fixed before the replay");
}

/* A digest of the time when only a prediction's text was digested fixes none of its times. */
static void digest_of_before(void **state) {
    assert_not_fixed("sha256:e7090e67d5244b9fe2e2ef914afa3cbed19bd22a8579b89c7712344e098d03ae",
                     "digest of an older mizan, of the summary alone: predict and replay anew");
}

/* Whatever check reads of a prediction was fixed before, or the check fails. */
static void rewritten_after(void **state) {
    static const char *const missed[] = {"the prediction was fixed"};
    const made m = measurement_of(&plain);
    for (int i = 0; i < 3; i++) {
        mz_err err;
        mz_result_file p = make(&plain), q = make(&m);
        check_result r;
        name(&q, p.digest);
        mz_run_file *run = &p.run[1];
        if (i == 0)
            run->step_s[0] *= 1.0001;
        else if (i == 1)
            run->detail_s[MZ_PHASE_EXPERTS] *= 1.0001;
        else
            run->rank_memory[MZ_MEM_TOKEN_BUFFERS]++;
        assert_ok(mz_result_digest(&p, p.digest, &err), &err);
        assert_ok(check_files(&p, &q, &r, &err), &err);
        assert_false(r.fixed);
        assert_missed(&r, missed, 1);
        check_free(&r);
        mz_result_file_free(&p);
        mz_result_file_free(&q);
    }
}

/* The simulator's mark of sizes that were not calibrated is told in every form, and which they are
 * where it says so; without it nothing is. */
static void sizes_not_calibrated(void **state) {
    for (int way = 0; way < 3; way++) {
        const int marked = way > 0, named = way > 1;
        const made m = measurement_of(&plain);
        mz_err err;
        mz_result_file p = make(&plain), q = make(&m);
        check_result r;
        json_object_set_new(
            json_object_get(p.root, "cluster"), "measured",
            named ? json_pack("{s:b, s:s}", "extrapolated", marked, "outside", "packs <&> sums")
                  : json_pack("{s:b}", "extrapolated", marked));
        assert_ok(mz_result_digest(&p, p.digest, &err), &err);
        name(&q, p.digest);
        assert_ok(check_files(&p, &q, &r, &err), &err);
        assert_int_equal(r.extrapolated, marked);
        char *page = html_of(&r, "p.h5"), *text = text_of(&r);
        json_t *json = check_json(&r);
        const char *said = "the prediction is extrapolated: ";
        assert_int_equal(strstr(text, said) != NULL, marked);
        assert_int_equal(strstr(page, said) != NULL, marked);
        assert_int_equal(json_is_true(json_object_get(json, "extrapolated")), marked);
        assert_int_equal(strstr(text, " was calibrated: packs <&> sums\n") != NULL, named);
        assert_int_equal(strstr(page, " was calibrated: packs &lt;&amp;&gt; sums</p>") != NULL,
                         named);
        const char *outside = json_string_value(json_object_get(json, "outside"));
        assert_int_equal(outside && strcmp(outside, "packs <&> sums") == 0, named);
        json_decref(json);
        free(page);
        free(text);
        check_free(&r);
        mz_result_file_free(&p);
        mz_result_file_free(&q);
    }
}

static void refuse(mz_result_file *p, mz_result_file *q, const char *said) {
    mz_err err;
    check_result r;
    assert_int_equal(check_files(p, q, &r, &err), MZ_EINPUT);
    if (!strstr(err.msg, said))
        fail_msg("'%s' does not say '%s'", err.msg, said);
}

/* A measurement in fp32, or by other processes than the prediction has devices. */
static void other_machines(void **state) {
    static const char *const said[] = {"--type f32",
                                       "2 ranks on each of 1 devices, the measurement "
                                       "ran in 2 processes"};
    for (int i = 0; i < 2; i++) {
        const made m = measurement_of(&plain);
        mz_result_file p = make(&plain), q = make(&m);
        json_t *settings = json_object_get(q.root, "settings");
        json_object_set_new(settings, "type", json_string(i == 0 ? "f32" : "bf16"));
        json_object_set_new(settings, "processes", json_integer(i == 0 ? 1 : 2));
        name(&q, p.digest);
        refuse(&p, &q, said[i]);
        mz_result_file_free(&p);
        mz_result_file_free(&q);
    }
}

static void other_files(void **state) {
    const made m = measurement_of(&plain);
    static const struct {
        const char *object, *key, *said;
    } change[] = {{"trace", "digest", "trace.digest"},
                  {"model", "hidden", "model.hidden"},
                  {"settings", "seed", "settings.seed"}};
    for (int i = 0; i < 3; i++) {
        mz_result_file p = make(&plain), q = make(&m);
        json_object_set_new(json_object_get(q.root, change[i].object), change[i].key,
                            json_integer(96));
        refuse(&p, &q, change[i].said);
        mz_result_file_free(&p);
        mz_result_file_free(&q);
    }
    made fewer = m, more = plain, whole = plain;
    fewer.runs = 2;
    more.run[1].policy = "d";
    whole.kind = "simulation";
    mz_result_file p = make(&plain), q = make(&m), two = make(&fewer), d = make(&more),
                   other = make(&whole);
    refuse(&p, &two, "policy c is in the prediction alone");
    refuse(&d, &q, "policy d is in the prediction alone");
    refuse(&q, &p, "first file is a measurement");
    refuse(&p, &d, "second file is a prediction, nothing was measured in it");
    refuse(&p, &p, "second file is a prediction, nothing was measured in it");
    refuse(&other, &q, "pass what mizan sim --scope layers wrote");
    q.run[0].ordinal[3] = 2;
    refuse(&p, &q, "step 2 of a was measured and not predicted");
    q.run[0].ordinal[3] = 1;
    q.run[2].layers = 3;
    refuse(&p, &q, "1 layers and 2 ranks");
    q.run[2].detail_s = NULL;
    refuse(&p, &q, "--json --detail");
    mz_result_file *all[] = {&p, &q, &two, &d, &other};
    for (int i = 0; i < 5; i++)
        mz_result_file_free(all[i]);
}

/* An interval that is the other one but for a part of every record between least and most. */
static void assert_within(check_interval got, const check_interval *other, double least,
                          double most) {
    const double slack = 1e-9;
    assert_true(got.low >= other->low + least - slack && got.low <= other->low + most + slack);
    assert_true(got.high >= other->high + least - slack && got.high <= other->high + most + slack);
}

static double interval_end(const json_t *value, size_t end) {
    return json_real_value(json_array_get(json_object_get(value, "interval_s"), end));
}

/* Of a phase, a layer and a rank of the first policy, in all three forms. */
static void assert_intervals_shown(const check_result *r) {
    const check_policy *a = &r->policy[0];
    const struct {
        const char *key;
        const check_value *value;
        check_interval interval;
    } places[] = {
        {"phases_s", &a->phase[MZ_PHASE_EXPERTS], a->phase_interval[MZ_PHASE_EXPERTS]},
        {"layers_s", &a->layer[0], a->layer_interval[0]},
        {"ranks_s", &a->rank[0], a->rank_interval[0]},
    };
    char *page = html_of(r, "p.h5"), *text = text_of(r);
    json_t *json = check_json(r);
    const json_t *policy = json_array_get(json_object_get(json, "policies"), 0);
    assert_near(interval_end(policy, 0), a->interval.low);
    for (int i = 0; i < 3; i++) {
        char cell[64], range[64];
        const json_t *in = json_object_get(policy, places[i].key);
        const json_t *value =
            json_is_array(in) ? json_array_get(in, 0) : json_object_get(in, "experts");
        const check_interval v = places[i].interval;
        assert_near(interval_end(value, 0), v.low);
        assert_near(interval_end(value, 1), v.high);
        snprintf(cell, sizeof cell, "<td>%.5g</td><td>%.5g</td>", v.low * 1e3, v.high * 1e3);
        assert_non_null(strstr(page, cell));
        /* of the error: at the upper end of what was measured the lower one */
        snprintf(range, sizeof range, " %+.2f..%+.2f",
                 (places[i].value->predicted - v.high) / v.high * 100,
                 (places[i].value->predicted - v.low) / v.low * 100);
        assert_non_null(strstr(text, range));
    }
    json_decref(json);
    free(page);
    free(text);
}

/* The middle mean by hand; the interval against the normal one of a trimmed mean, whose variance is
 * that of the winsorized records (Tukey and McLaughlin, 1963). */
static void intervals(void **state) {
    double six[] = {3, 1, 2, 30, 5, 7}, seven[] = {100, 6, 4, 5, 3, 2, -90};
    assert_near(check_middle_mean(six, 6), 8);
    assert_near(check_middle_mean(seven, 7), 4);
    /* Records 1 .. 16 of one step: two go on either side, winsorized variance 264 / 15. */
    made p = plain, m = measurement_of(&plain);
    mz_err err;
    mz_result_file f = make(&p), g = make(&m);
    for (int64_t i = 0; i < 16; i++) {
        g.run[0].ordinal[i] = 0;
        g.run[0].step_s[i] = (double)((i * 7) % 16 + 1);
        g.run[0].detail_s[i * CELLS + MZ_PHASE_EXPERTS] = g.run[0].step_s[i]; /* of rank 0 */
    }
    check_result r;
    name(&g, f.digest);
    assert_ok(check_files(&f, &g, &r, &err), &err);
    const check_policy *a = &r.policy[0];
    assert_near(a->step.measured, 8.5);
    assert_near(a->step.predicted, 30.5e-3);
    const double half = 1.96 * sqrt(264.0 / 15) / (0.75 * 4);
    assert_true(fabs(a->interval.low - (8.5 - half)) < 0.5);
    assert_true(fabs(a->interval.high - (8.5 + half)) < 0.5);
    /* What varies besides is 10 and 12 ms of rank 1's experts. */
    assert_within(a->phase_interval[MZ_PHASE_EXPERTS], &a->interval, 10e-3, 12e-3);
    assert_within(a->layer_interval[0], &a->interval, 10e-3 + 8e-3, 12e-3 + 8e-3);
    assert_within(a->rank_interval[0], &a->interval, 5e-3, 5e-3);
    assert_true(a->rank_interval[1].low >= 15e-3 && a->rank_interval[1].high <= 17e-3);
    assert_true(a->rank_interval[1].low < a->rank_interval[1].high);
    assert_near(a->layer_interval[1].low, 2e-3);
    assert_near(a->layer_interval[1].high, 2e-3);
    /* 8 ms of dispatch in seconds of experts are no 5 %. */
    assert_true(isnan(a->phase_interval[MZ_PHASE_DISPATCH].low));
    assert_intervals_shown(&r);
    check_free(&r);
    mz_result_file_free(&f);
    mz_result_file_free(&g);
}

typedef struct place {
    const char *machine, *backend, *transport; /* NULL: the file does not say */
} place;

/* A prediction whose cluster was calibrated at one place (NULL: it was not), measured at another.
 */
static void check_places(const place *calibrated, const place *measured,
                         void (*look)(check_result *, const void *), const void *want) {
    made m = measurement_of(&plain);
    m.run[0].wait = 1;
    mz_err err;
    mz_result_file p = make(&plain), q = make(&m);
    check_result r;
    if (calibrated)
        json_object_set_new(json_object_get(p.root, "cluster"), "measured",
                            json_pack("{s:s*, s:s*, s:s*}", "machine", calibrated->machine,
                                      "backend", calibrated->backend, "transport",
                                      calibrated->transport));
    json_t *settings = json_object_get(q.root, "settings");
    json_object_del(settings, "transport");
    json_object_update_new(settings,
                           json_pack("{s:s*, s:s*, s:s*}", "machine", measured->machine, "backend",
                                     measured->backend, "transport", measured->transport));
    assert_ok(mz_result_digest(&p, p.digest, &err), &err);
    name(&q, p.digest);
    assert_ok(check_files(&p, &q, &r, &err), &err);
    look(&r, want);
    check_free(&r);
    mz_result_file_free(&p);
    mz_result_file_free(&q);
}

/* Is a text in all three forms, and `validated` of experts in JSON that? */
static void assert_tags_shown(const check_result *r, const char *line, bool experts) {
    char *page = html_of(r, "p.h5"), *text = text_of(r);
    json_t *json = check_json(r);
    assert_non_null(strstr(text, line));
    assert_non_null(strstr(page, line));
    assert_int_equal(strstr(text, "  validated\n") != NULL, experts);
    assert_int_equal(strstr(page, "<td>validated</td>") != NULL, experts);
    const json_t *policy = json_array_get(json_object_get(json, "policies"), 0);
    const json_t *phase = json_object_get(json_object_get(policy, "phases_s"), "experts");
    assert_int_equal(json_is_true(json_object_get(phase, "validated")), experts);
    const char *reason = json_string_value(json_object_get(phase, "reason"));
    assert_int_equal(reason == NULL, experts);
    assert_true(experts || strstr(line, reason) || strstr(reason, line));
    json_decref(json);
    free(page);
    free(text);
}

static void look_local(check_result *r, const void *want) {
    assert_null(check_unproven(r, MZ_PHASE_EXPERTS));
    assert_non_null(check_unproven(r, MZ_PHASE_DISPATCH));
    assert_non_null(check_unproven(r, MZ_PHASE_LAUNCH_WAIT));
    assert_tags_shown(r, "extrapolated: dispatch: ranks of one process", true);
    assert_tags_shown(r, "extrapolated: launch_wait: waiting is what is left of a step", true);
}

static void look_apart(check_result *r, const void *want) {
    assert_null(check_unproven(r, MZ_PHASE_EXPERTS));
    assert_null(check_unproven(r, MZ_PHASE_DISPATCH));
    assert_non_null(check_unproven(r, MZ_PHASE_LAUNCH_WAIT));
}

static void look_elsewhere(check_result *r, const void *want) {
    for (int k = 0; k < MZ_PHASES; k++)
        assert_non_null(check_unproven(r, (mz_phase)k));
    assert_tags_shown(r, want, false);
}

/* A phase is validated where the replay ran on what the prediction was calibrated on: the same
 * machine, backend and transport, each of them said by both files. */
static void tags(void **state) {
    const place here = {"host, 2 threads", "host", "local"},
                mpi = {"host, 2 threads", "host", "mpi"};
    check_places(&here, &here, look_local, NULL);
    check_places(&mpi, &mpi, look_apart, NULL);
    const struct {
        place calibrated, measured;
        const char *said;
    } other[] = {
        {here,
         {"host, 1 thread", "host", "local"},
         "extrapolated: every phase: the machine that was calibrated for the prediction is host, 2 "
         "threads, the one that was measured host, 1 thread"},
        {{"host, 2 threads", "cuda", "local"},
         here,
         "extrapolated: every phase: the backend that was calibrated for the prediction is cuda, "
         "the one that was measured host"},
        {mpi, here,
         "extrapolated: every phase: the transport that was calibrated for the prediction is mpi, "
         "the one that was measured local"},
        {here,
         {NULL, "host", "local"},
         "the machine that was calibrated for the prediction is host, 2 threads, the one that was "
         "measured unknown"},
        {{NULL, "host", "local"},
         here,
         "the machine that was calibrated for the prediction is unknown, the one that was measured "
         "host, 2 threads"},
        {here, {"host, 2 threads", "host", NULL}, "the one that was measured unknown"},
    };
    for (size_t i = 0; i < sizeof other / sizeof *other; i++)
        check_places(&other[i].calibrated, &other[i].measured, look_elsewhere, other[i].said);
    check_places(NULL, &here, look_elsewhere,
                 "extrapolated: every phase: the prediction is of a cluster that was not "
                 "calibrated (mizan calibrate)");
}

/* What was predicted is what was measured: no error, whatever it is. */
static void all_as_predicted(void **state) {
    mz_err err;
    for (uint64_t seed = 0; seed < 60; seed++) {
        mz_rng rng = mz_rng_make(seed, 7);
        static const char *const names[MOST] = {"a", "b<&>", "c", "d", "e", "f"};
        made m = {.kind = "measurement",
                  .passes = PASSES + (int64_t)mz_rng_below(&rng, 9),
                  .runs = 1 + (int)mz_rng_below(&rng, MOST)};
        for (int i = 0; i < m.runs; i++)
            m.run[i] = (made_run){.policy = names[i],
                                  .scale = mz_rng_uniform(&rng),
                                  .dispatch = mz_rng_uniform(&rng) * 3,
                                  .peak = (int64_t)mz_rng_below(&rng, 1000),
                                  .buffers = (int64_t)mz_rng_below(&rng, 1000),
                                  .imbalance = 1 + mz_rng_uniform(&rng),
                                  .most = 2 + mz_rng_uniform(&rng)};
        made once = m;
        once.kind = "prediction";
        once.passes = 1;
        mz_result_file x = make(&once), y = make(&m);
        check_result r;
        name(&y, x.digest);
        assert_ok(check_files(&x, &y, &r, &err), &err);
        assert_missed(&r, NULL, 0);
        for (int i = 0; i < r.policies; i++) {
            assert_true(r.policy[i].step.error == 0);
            for (int k = 0; k < MZ_PHASES; k++)
                assert_true(r.policy[i].phase[k].error == 0);
        }
        check_free(&r);
        mz_result_file_free(&x);
        mz_result_file_free(&y);
    }
}

/* The page stands alone and shows every number's table; text, page and JSON are written whole. */
static void output(void **state) {
    made p = plain;
    p.run[1].policy = "b<&>";
    mz_err err;
    const made m = measurement_of(&p);
    mz_result_file f = make(&p), g = make(&m);
    check_result r;
    name(&g, f.digest);
    assert_ok(check_files(&f, &g, &r, &err), &err);
    char *page = html_of(&r, "p<1>.h5"), *text = text_of(&r);
    assert_null(strstr(page, "http"));
    assert_null(strstr(page, "<script"));
    assert_null(strstr(page, "b<&>"));
    assert_non_null(strstr(page, "b&lt;&amp;&gt;"));
    assert_non_null(strstr(page, "p&lt;1&gt;.h5"));
    assert_non_null(strstr(page, "</html>"));
    int svgs = 0;
    for (const char *at = page; (at = strstr(at, "<svg")); at++)
        svgs++;
    assert_int_equal(svgs, 1 + 2 * 3);
    assert_string_equal(text + strlen(text) - strlen("pass: all 10 targets are met\n"),
                        "pass: all 10 targets are met\n");
    json_t *json = check_json(&r);
    assert_non_null(json);
    assert_int_equal(json_array_size(json_object_get(json, "policies")), 3);
    assert_true(json_is_true(json_object_get(json, "passed")));
    json_decref(json);
    free(page);
    free(text);
    check_free(&r);
    mz_result_file_free(&f);
    mz_result_file_free(&g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(perfect),
        cmocka_unit_test(one_phase_off),
        cmocka_unit_test(order_swapped),
        cmocka_unit_test(simple_rules),
        cmocka_unit_test(waiting),
        cmocka_unit_test(noisy),
        cmocka_unit_test(memory_off),
        cmocka_unit_test(few_records),
        cmocka_unit_test(not_fixed_before),
        cmocka_unit_test(digest_of_before),
        cmocka_unit_test(rewritten_after),
        cmocka_unit_test(other_files),
        cmocka_unit_test(sizes_not_calibrated),
        cmocka_unit_test(runs_are_sides),
        cmocka_unit_test(which_noise),
        cmocka_unit_test(traffic_off),
        cmocka_unit_test(traffic_by_process),
        cmocka_unit_test(slow_machine),
        cmocka_unit_test(records_without_probe),
        cmocka_unit_test(speeds_apart),
        cmocka_unit_test(rows_by_size),
        cmocka_unit_test(slow_half_of_the_time),
        cmocka_unit_test(rules_without_a_say),
        cmocka_unit_test(other_machines),
        cmocka_unit_test(not_repeated),
        cmocka_unit_test(intervals),
        cmocka_unit_test(tags),
        cmocka_unit_test(all_as_predicted),
        cmocka_unit_test(output),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
