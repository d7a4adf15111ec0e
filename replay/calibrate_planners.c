/* Planning time of every policy as a replay pays it: decide and route of one call, on three
 * sizes, when everything else of a layer has gone through the caches since the call before; two
 * numbers fitted to them. Loads fall off as 1/(1 + place of the expert) from source to
 * source with a seeded tenth of noise. */
#include "replay/calibrate_planners.h"

#include "common/base/log.h"
#include "common/base/rng.h"
#include "common/base/stat.h"
#include "sim/policy/policy.h"

#include <stdlib.h>
#include <string.h>

enum { PLANNER_SIZES = 3, PLANNER_CALLS = 7 };
/* What is swept before a call: beyond the last cache of most processors. */
enum { SWEPT = 64 << 20, LINE = 64 };
static const int32_t planner_ranks[PLANNER_SIZES] = {4, 8, 16};
static const int32_t planner_experts[PLANNER_SIZES] = {16, 64, 128};

static mz_code make_load(int32_t ranks, int32_t experts, mz_arena *arena, mz_load *load,
                         mz_err *err) {
    enum { PAIRS_OF_FIRST = 20000 };
    *load = (mz_load){.sources = ranks,
                      .experts = experts,
                      .count = MZ_NEW(arena, int64_t, (int64_t)ranks * experts),
                      .total = MZ_NEW(arena, int64_t, experts),
                      .source = MZ_NEW(arena, int64_t, ranks)};
    if (!load->count || !load->total || !load->source)
        return mz_fail_nomem(err, "a load");
    mz_rng rng = mz_rng_make(1, 4);
    for (int64_t i = 0; i < (int64_t)ranks * experts; i++) {
        const int64_t place = i % experts * 7919 % experts;
        load->count[i] =
            PAIRS_OF_FIRST / ((1 + place) * ranks) * (90 + mz_rng_u32(&rng) % 21) / 100;
    }
    mz_load_sum(load);
    return MZ_OK;
}

static mz_policy_env env_of(int32_t ranks, int32_t experts, mz_arena *arena) {
    return (mz_policy_env){.ranks = ranks,
                           .experts = experts,
                           .top_k = 2,
                           .layers = 1,
                           .domain = MZ_NEW(arena, int32_t, ranks),
                           .domains = 1,
                           .hidden = 1024,
                           .intermediate = 512,
                           .expert_parameters = 3 * 1024 * 512,
                           .weight_bytes = 6 * 1024 * 512,
                           .token_bytes = 2048,
                           .seed = 1,
                           .expert_groups = 1,
                           .expert_state_bytes = 36 * 1024 * 512,
                           .pair_seconds = 1e-5,
                           .inside_bytes_s = 5e9,
                           .outside_bytes_s = 5e9};
}

typedef struct subject {
    const mz_policy *policy;
    void *state;
    mz_policy_traits traits;
    mz_plan *plan;
} subject;

static mz_code plan_once(subject *x, const mz_load *load, int64_t step, double *seconds,
                         mz_err *err) {
    /* Where there is a choice half of the pairs stay: quotas cost time only where they bind. */
    const mz_budget half = {.backward_rows = load->pairs / (2 * load->sources),
                            .backward_send_rows = -1};
    const mz_view view = {
        .step = step, .current = load, .history = load, .budget = x->traits.lossy ? &half : NULL};
    const mz_call call = {.step = step, .load = load};
    const double start = mz_now();
    mz_code code = x->policy->decide(x->state, &view, x->plan, err);
    if (code == MZ_OK)
        code = x->policy->route(x->state, &call, x->plan, err);
    *seconds = mz_now() - start;
    return code == MZ_OK ? mz_plan_check(x->plan, load, &x->traits, err) : code;
}

/* Every line is read and written: stores alone may go past the caches. */
static void sweep(unsigned char *memory) {
    for (size_t at = 0; at < SWEPT; at += LINE)
        memory[at]++;
}

static mz_code median_of(subject *x, const mz_load *load, unsigned char *swept, double *seconds,
                         mz_err *err) {
    double times[PLANNER_CALLS];
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < PLANNER_CALLS; i++) {
        sweep(swept);
        code = plan_once(x, load, i, &times[i], err);
    }
    mz_sort(times, PLANNER_CALLS);
    *seconds = times[PLANNER_CALLS / 2];
    return code;
}

static mz_code time_policy(const char *name, int size, unsigned char *swept, double *seconds,
                           mz_err *err) {
    mz_arena arena = {0};
    subject x = {0};
    void *options = NULL;
    mz_load load;
    const mz_policy_env env = env_of(planner_ranks[size], planner_experts[size], &arena);
    mz_code code = env.domain ? make_load(env.ranks, env.experts, &arena, &load, err)
                              : mz_fail_nomem(err, "a planner");
    if (code == MZ_OK)
        code = mz_policy_parse(name, &arena, &x.policy, &options, err);
    if (code == MZ_OK)
        code = x.policy->init(&env, options, &arena, &x.state, &x.traits, err);
    const bool started = code == MZ_OK;
    if (code == MZ_OK)
        code = mz_plan_create(env.ranks, env.experts, x.traits.slots, &x.plan, err);
    if (code == MZ_OK)
        code = median_of(&x, &load, swept, seconds, err);
    mz_plan_free(&x.plan);
    if (started && x.policy->release)
        x.policy->release(x.state);
    mz_arena_free(&arena);
    return code;
}

/* fixed + per_cell * ranks * experts through the first and the last size, neither negative. */
static json_t *line_through(const double *seconds) {
    const int last = PLANNER_SIZES - 1;
    const double a = (double)planner_ranks[0] * planner_experts[0];
    const double b = (double)planner_ranks[last] * planner_experts[last];
    double slope = (seconds[last] - seconds[0]) / (b - a);
    slope = slope > 0 ? slope : 0;
    const double fixed = seconds[0] - slope * a;
    return json_pack("{s:f,s:f,s:s}", "fixed", fixed > 0 ? fixed : 0, "per_cell", slope, "source",
                     "mizan calibrate: decide and route of one call, medians at 4 x 16, 8 x "
                     "64 and 16 x 128 ranks x experts");
}

/* What route solves is in the policy's own number. */
static json_t *nothing(void) {
    return json_pack("{s:f,s:f,s:s}", "fixed", 0.0, "per_cell", 0.0, "source",
                     "mizan calibrate: counted with the policy");
}

static mz_code time_sizes(const char *name, unsigned char *swept, json_t *table, mz_err *err) {
    double seconds[PLANNER_SIZES];
    char route[64];
    mz_code code = MZ_OK;
    for (int i = 0; code == MZ_OK && i < PLANNER_SIZES; i++)
        code = time_policy(name, i, swept, &seconds[i], err);
    if (code != MZ_OK)
        return mz_err_prefix(err, "planning time of %s", name);
    snprintf(route, sizeof route, "%s.route", name);
    return json_object_set_new(table, name, line_through(seconds)) == 0 &&
                   json_object_set_new(table, route, nothing()) == 0
               ? MZ_OK
               : mz_fail_nomem(err, "planning times");
}

mz_code mz_calibrate_planners(json_t *table, mz_err *err) {
    unsigned char *swept = mz_calloc(SWEPT, 1);
    mz_code code = swept ? MZ_OK : mz_fail_nomem(err, "planning times");
    for (const mz_policy *const *p = mz_policies; code == MZ_OK && *p; p++)
        code = time_sizes((*p)->name, swept, table, err);
    free(swept);
    return code;
}
