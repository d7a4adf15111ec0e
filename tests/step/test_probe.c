/* What a policy is shown, and when: a policy of this test writes down every view that it gets, and
 * each is compared with what its declaration allows, computed here from the loads alone.
 *
 * The table of policies below takes the place of the simulator's own. */
#include "common/base/rng.h"
#include "sim/step/run.h"
#include "tests/step/tiny.h"

enum { RANKS = 8, EP = 4, GROUPS = 2, E = TINY_EXPERTS, LAYERS = 2, MICRO = 3, STEPS = 7 };

/* ---- loads ---- */

/* A pure function of its arguments; some rows are empty. */
static int64_t count_of(int64_t step, int32_t micro, int32_t layer, int32_t rank, int32_t e) {
    mz_rng rng = mz_rng_make(3, mz_rng_stream((uint64_t)(step * MICRO + micro), (uint64_t)layer,
                                              (uint64_t)rank, (uint64_t)e));
    return rank == 5 && step % 2 ? 0 : (int64_t)mz_rng_below(&rng, 9) * (e == step % E ? 7 : 1);
}

typedef struct source {
    int64_t step, tokens[MICRO * RANKS];
    int32_t call;
    mz_load load;
    int64_t count[RANKS * E], total[E], source[RANKS];
} source;

static mz_code next_step(void *self, mz_step_head *head, bool *end, mz_err *err) {
    source *from = self;
    *end = from->step == STEPS;
    *head = (mz_step_head){from->step++, MICRO, LAYERS, from->tokens};
    from->call = 0;
    return MZ_OK;
}

static mz_code next_call(void *self, mz_layer_call *call, mz_err *err) {
    source *from = self;
    const int32_t micro = from->call / LAYERS, layer = from->call++ % LAYERS;
    for (int i = 0; i < RANKS * E; i++)
        from->count[i] = count_of(from->step - 1, micro, layer, i / E, i % E);
    mz_load_sum(&from->load);
    *call = (mz_layer_call){micro, layer, &from->load, NULL};
    return MZ_OK;
}

/* ---- the probe ---- */

typedef struct seen {
    bool asked, current, history;
    int64_t count[EP * E], now[EP * E];
} seen;

static struct {
    mz_policy_traits traits;
    seen view[STEPS][MICRO][LAYERS][GROUPS];
    int groups; /* inits so far */
} probe;

static mz_code probe_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                          void **state, mz_policy_traits *traits, mz_err *err) {
    int *group = MZ_NEW(arena, int, 1);
    assert_true(group && probe.groups < GROUPS && env->ranks == EP && env->experts == E);
    *group = probe.groups++;
    *state = group;
    *traits = probe.traits;
    return MZ_OK;
}

static void copy_load(const mz_load *load, bool *there, int64_t *count) {
    *there = load != NULL;
    if (!load)
        return;
    assert_true(load->sources == EP && load->experts == E);
    memcpy(count, load->count, sizeof(int64_t) * EP * E);
    int64_t pairs = 0;
    for (int i = 0; i < EP * E; i++)
        pairs += count[i];
    assert_int_equal(load->pairs, pairs);
}

static mz_code probe_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    seen *s = &probe.view[view->step][view->micro_batch][view->layer][*(int *)self];
    assert_false(s->asked);
    s->asked = true;
    copy_load(view->current, &s->current, s->now);
    copy_load(view->history, &s->history, s->count);
    mz_plan_reset(plan);
    for (int32_t e = 0; e < E; e++) {
        plan->rank[e] = e;
        plan->begin[e + 1] = e + 1;
    }
    return MZ_OK;
}

static mz_code probe_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    int64_t entry = 0;
    plan->pairs = plan->kept_pairs = call->load->pairs;
    for (int32_t e = 0; e < E; e++) {
        plan->forward[e] = plan->quota[e] = call->load->total[e];
        plan->entry_begin[e] = entry;
        for (int32_t s = 0; s < EP; s++) {
            if (call->load->count[s * E + e] == 0)
                continue;
            plan->entry_source[entry] = s;
            plan->entry_pairs[entry++] = call->load->count[s * E + e];
        }
        plan->entry_begin[e + 1] = entry;
    }
    return MZ_OK;
}

static const mz_policy mz_policy_probe = {
    .name = "static", .init = probe_init, .decide = probe_decide, .route = probe_route};
const mz_policy *const mz_policies[] = {&mz_policy_probe, NULL};

mz_code mz_policy_parse(const char *text, mz_arena *arena, const mz_policy **policy, void **options,
                        mz_err *err) {
    *policy = &mz_policy_probe;
    *options = NULL;
    return MZ_OK;
}

static void run(mz_policy_traits traits) {
    tiny t;
    source from = {0};
    mz_sim *sim;
    mz_err err;
    char name[] = "static", *names[] = {name};
    mz_app app = {.log = mz_log_make(NULL, -1)};
    tiny_make(&t, RANKS, EP, "mm");
    t.options.ep = EP;
    from.load = (mz_load){RANKS, E, from.count, from.total, from.source, 0};
    const mz_load_source loads = {&from, RANKS, E, LAYERS, next_step, next_call};
    memset(&probe, 0, sizeof probe);
    probe.traits = traits;
    probe.traits.slots = 1;
    probe.traits.score_source = "";
    assert_ok(mz_sim_create(&t.model, &t.cluster, &t.options, names, 1, &sim, &err), &err);
    assert_ok(mz_sim_run(sim, &loads, &app, STEPS, &err), &err);
    mz_sim_free(&sim);
    tiny_free(&t);
}

/* ---- what it may see ---- */

/* `total` in proportion to the weights, largest remainder, ties to the lower index: by sorting. */
static void share_out(int64_t total, int64_t *row) {
    int64_t sum = 0, left = total, rest[E];
    for (int e = 0; e < E; e++)
        sum += row[e];
    for (int e = 0; e < E; e++) {
        const int64_t weight = sum ? row[e] : 1, all = sum ? sum : E;
        rest[e] = total * weight % all;
        left -= row[e] = total * weight / all;
    }
    for (; left > 0; left--) {
        int best = 0;
        for (int e = 1; e < E; e++)
            best = rest[e] > rest[best] ? e : best;
        row[best]++;
        rest[best] = -1;
    }
}

/* Mean of what unit `last` and `window` - 1 before it held; a unit is a step or a call. */
static void expect_history(bool calls, int64_t last, int64_t window, int32_t layer, int32_t group,
                           int64_t *count) {
    const int64_t used = window > last + 1 ? last + 1 : window;
    memset(count, 0, sizeof(int64_t) * EP * E);
    for (int64_t unit = last - used + 1; unit <= last; unit++)
        for (int i = 0; i < EP * E; i++)
            for (int32_t m = 0; m < (calls ? 1 : MICRO); m++)
                count[i] += count_of(calls ? unit / MICRO : unit, calls ? unit % MICRO : m, layer,
                                     group * EP + i / E, i % E);
    for (int s = 0; s < EP && used > 1; s++) {
        int64_t sum = 0;
        for (int e = 0; e < E; e++)
            sum += count[s * E + e];
        share_out((sum + used / 2) / used, count + (ptrdiff_t)s * E);
    }
}

static void check_view(const mz_policy_traits *t, int64_t step, int32_t micro, int32_t layer,
                       int32_t group) {
    const seen *s = &probe.view[step][micro][layer][group];
    const bool asked = t->interval <= 1 || (micro == 0 && step % t->interval == 0);
    assert_int_equal(s->asked, asked);
    if (!asked)
        return;
    assert_int_equal(s->current, (t->sees & MZ_SEES_CURRENT) != 0);
    for (int i = 0; s->current && i < EP * E; i++)
        assert_int_equal(s->now[i], count_of(step, micro, layer, group * EP + i / E, i % E));
    const int64_t now = t->history_calls ? step * MICRO + micro : step;
    const int64_t last = now - (t->lag > 1 ? t->lag : 1);
    assert_int_equal(s->history, (t->sees & MZ_SEES_HISTORY) != 0 && last >= 0);
    if (!s->history)
        return;
    int64_t want[EP * E];
    expect_history(t->history_calls, last, t->window > 1 ? t->window : 1, layer, group, want);
    for (int i = 0; i < EP * E; i++)
        assert_int_equal(s->count[i], want[i]);
}

/* All lags, windows and intervals up to 4, by steps and by calls, with and without the current
 * counts: every view of every call of both groups. */
static void test_views(void **state) {
    for (int calls = 0; calls < 2; calls++)
        for (int32_t lag = 0; lag <= 4; lag++)
            for (int32_t window = 0; window <= 4; window++)
                for (int32_t interval = 1; interval <= 4; interval++) {
                    const unsigned sees =
                        MZ_SEES_HISTORY | ((lag + window) % 2 ? MZ_SEES_CURRENT : 0);
                    const mz_policy_traits t = {.sees = sees,
                                                .lag = lag,
                                                .window = window,
                                                .interval = interval,
                                                .history_calls = calls};
                    run(t);
                    for (int i = 0; i < STEPS * MICRO * LAYERS * GROUPS; i++)
                        check_view(&t, i / GROUPS / LAYERS / MICRO, i / GROUPS / LAYERS % MICRO,
                                   i / GROUPS % LAYERS, i % GROUPS);
                }
}

/* Who declares nothing sees nothing. */
static void test_blind(void **state) {
    const mz_policy_traits t = {.lag = 1, .window = 2, .interval = 1};
    run(t);
    for (int i = 0; i < STEPS * MICRO * LAYERS * GROUPS; i++) {
        const seen *s = &probe.view[0][0][0][0] + i;
        assert_true(s->asked && !s->current && !s->history);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_views),
        cmocka_unit_test(test_blind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
