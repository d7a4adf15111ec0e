/* Every policy of the table on the eight synthetic loads, step after step, with exactly the history
 * that it would have: legal plans, no plan below the bound over all placements, and how often the
 * busiest rank is busier than with fixed homes, which stale and heuristic rules may be. */
#include "checker.h"
#include "traces/synth.h"

enum { RANKS = 16, EXPERTS = 64, TOP_K = 4, TOKENS = 512, STEPS = 24, NODE = 8, LOADS = 8 };

static mz_load *loads[LOADS][STEPS];
static int64_t fixed_peak[LOADS][STEPS];

static void make_load(int which) {
    static uint16_t expert[7 * TOKENS * TOP_K];
    static float weight[7 * TOKENS * TOP_K];
    mz_synth *synth;
    mz_err err;
    mz_synth_options options = {.load = mz_synth_loads[which]->name,
                                .layers = 1,
                                .experts = EXPERTS,
                                .top_k = TOP_K,
                                .ranks = RANKS,
                                .tokens = TOKENS,
                                .sequence = TOKENS,
                                .steps = STEPS,
                                .micro_batches = 1,
                                .seed = 3,
                                .kind = MZ_TRACE_COUNTS};
    if (mz_synth_open(&options, &synth, &err) != MZ_OK)
        fail_msg("%s: %s", options.load, err.msg);
    for (int t = 0; t < STEPS; t++) {
        mz_load *load = loads[which][t] = load_new(RANKS, EXPERTS);
        for (int32_t s = 0; s < RANKS; s++) {
            const int64_t n = mz_synth_tokens(synth, s) * TOP_K;
            mz_synth_call(synth, t, 0, 0, s, expert, weight);
            for (int64_t i = 0; i < n; i++)
                load->count[(int64_t)s * EXPERTS + expert[i]]++;
        }
        mz_load_sum(load);
        int64_t rows[RANKS] = {0};
        int32_t home[EXPERTS];
        mz_layout_mains(RANKS, EXPERTS, home);
        for (int32_t e = 0; e < EXPERTS; e++)
            rows[home[e]] += load->total[e];
        for (int32_t g = 0; g < RANKS; g++)
            if (rows[g] > fixed_peak[which][t])
                fixed_peak[which][t] = rows[g];
    }
    mz_synth_close(&synth);
}

static int make_loads(void **unused) {
    for (int w = 0; w < LOADS; w++)
        make_load(w);
    return 0;
}

static int free_loads(void **unused) {
    for (int w = 0; w < LOADS; w++)
        for (int t = 0; t < STEPS; t++)
            load_free(loads[w][t]);
    return 0;
}

/* The mean of `window` steps ending `lag` steps ago, as far as there are any; false: none. */
static bool history_of(const mz_policy_traits *traits, int which, int step, mz_load *history) {
    const int lag = traits->lag > 1 ? traits->lag : 1;
    const int window = traits->window > 1 ? traits->window : 1, last = step - lag;
    if (last < 0)
        return false;
    const int first = last - window + 1 > 0 ? last - window + 1 : 0;
    for (int64_t c = 0; c < RANKS * EXPERTS; c++) {
        int64_t sum = 0;
        for (int t = first; t <= last; t++)
            sum += loads[which][t]->count[c];
        history->count[c] = sum / (last - first + 1);
    }
    mz_load_sum(history);
    return true;
}

typedef struct outcome {
    double imbalance; /* mean over the steps */
    int worse;        /* steps busier than fixed homes */
} outcome;

static outcome run(const char *text, int which) {
    rig r;
    outcome result = {0};
    int64_t scratch[EXPERTS];
    mz_load *history = load_new(RANKS, EXPERTS);
    /* Experts of the size of Qwen3-30B-A3B's: weights and pairs weigh against each other. */
    rig_prepare(&r, RANKS, EXPERTS, NODE);
    r.env.hidden = 2048;
    r.env.intermediate = 768;
    r.env.expert_parameters = 3 * 2048 * 768;
    r.env.weight_bytes = 2 * r.env.expert_parameters;
    r.env.token_bytes = 4096;
    r.env.expert_state_bytes = 12 * r.env.expert_parameters;
    r.env.pair_seconds = 2.4e-8;
    if (rig_start(&r, text) != MZ_OK)
        fail_msg("%s: %s", text, r.err.msg);
    const bool any_slots = r.traits.free_replicas || r.traits.open_slots;
    for (int t = 0; t < STEPS; t++) {
        mz_load *load = loads[which][t];
        const bool known = history_of(&r.traits, which, t, history);
        call_step(&r, t, load, known ? history : NULL, NULL, NULL);
        check_plan(&r, load);
        const int64_t peak = r.plan->peak_forward;
        const int64_t bound = mz_bound_any(load, RANKS, any_slots ? 0 : r.traits.slots, scratch);
        assert_true(r.plan->has_drops || peak >= bound);
        result.imbalance += (double)peak * RANKS / (double)load->pairs / STEPS;
        result.worse += peak > fixed_peak[which][t];
    }
    rig_close(&r);
    load_free(history);
    return result;
}

static int find_load(const char *name) {
    for (int w = 0; w < LOADS; w++)
        if (strcmp(mz_synth_loads[w]->name, name) == 0)
            return w;
    fail_msg("no load %s", name);
    return -1;
}

static void every_policy_on_every_load(void **unused) {
    print_message("mean imbalance (steps of %d busier than fixed homes)\n%-10s", STEPS, "");
    for (int w = 0; w < LOADS; w++)
        print_message(" %13s", mz_synth_loads[w]->name);
    for (int p = 0; mz_policies[p]; p++) {
        print_message("\n%-10s", mz_policies[p]->name);
        for (int w = 0; w < LOADS; w++) {
            const outcome x = run(mz_policies[p]->name, w);
            print_message("    %5.2f (%2d)", x.imbalance, x.worse);
        }
    }
    print_message("\n");
}

/* Rules that promise never to be busier than their start, fixed homes: exact spreading over homes
 * and copies, and the optimum of a linear programme in which homes may keep everything. */
static void gains_only(void **unused) {
    static const char *const texts[] = {"static", "lrmoe[quota=none]", "ideal",
                                        "lplb[reorder=no,map=exact]"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        for (int w = 0; w < LOADS; w++)
            assert_int_equal(run(texts[i], w).worse, 0);
}

/* Nobody does nothing in silence: where one rank is hot and stays hot, rules with copies and exact
 * counts even it out, those with history help, and a hot spot that moves on or comes and goes is
 * evened out by exact counts alone. */
static void nobody_falls_back(void **unused) {
    static const char *const exact[] = {"ultraep[scope=group]", "lrmoe[quota=none,replicas=group]",
                                        "llep[m=1]", "topoep"};
    static const char *const stale[] = {"symi[drop=no]", "eplb"};
    const int hot = find_load("hot-rank"), moving = find_load("rotating"),
              burst = find_load("burst");
    const double fixed = run("static", hot).imbalance;
    assert_true(fixed > 3);
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
        const double most = strcmp(exact[i], "topoep") == 0 ? 0.5 * fixed : 1.05;
        assert_true(run(exact[i], hot).imbalance < most);
        assert_true(run(exact[i], moving).imbalance < most);
        assert_true(run(exact[i], burst).imbalance < 0.8 * run("static", burst).imbalance);
    }
    for (size_t i = 0; i < sizeof stale / sizeof *stale; i++) {
        assert_true(run(stale[i], hot).imbalance < 0.6 * fixed);
        assert_true(run(stale[i], moving).imbalance > 0.3 + run(stale[i], hot).imbalance);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy_on_every_load),
        cmocka_unit_test(gains_only),
        cmocka_unit_test(nobody_falls_back),
    };
    return cmocka_run_group_tests(tests, make_loads, free_loads);
}
