/* hottest: the busiest expert gets more hosts, on the ranks with least work. A plug-in to copy
 * from; sim/policy/README.md says how to build and run it. */
#include "sim/policy/plugin.h"

#include <stdlib.h>
#include <string.h>

static const mz_plugin_env *env;
static int copies = 1;
static int64_t *load; /* [ranks] */

static const char *init(const mz_plugin_env *told, const mz_plugin_option *option, int32_t options,
                        mz_plugin_traits *traits, void **state) {
    for (int32_t i = 0; i < options; i++)
        if (strcmp(option[i].key, "copies") != 0 || (copies = atoi(option[i].value)) < 1)
            return "its only option is copies=N, N at least 1";
    env = told; /* sees the current counts and has mains plus two slots: the defaults */
    load = malloc((size_t)env->ranks * sizeof *load);
    return load ? NULL : "no memory";
}

static const char *decide(void *state, const mz_plugin_view *view, mz_plugin_plan *plan) {
    const int64_t *total = view->current->total;
    int32_t hot = 0;
    memset(load, 0, (size_t)env->ranks * sizeof *load);
    for (int32_t e = 0; e < env->experts; e++) {
        hot = total[e] > total[hot] ? e : hot;
        load[env->home[e]] += total[e];
        plan->host(plan, e, env->home[e], -1); /* -1: an equal share */
    }
    load[env->home[hot]] = INT64_MAX;
    for (int i = 0; i < copies && i < env->ranks - 1; i++) {
        int32_t to = 0;
        for (int32_t r = 1; r < env->ranks; r++)
            to = load[r] < load[to] ? r : to;
        load[to] = INT64_MAX;
        plan->host(plan, hot, to, -1);
    }
    return NULL;
}

MZ_PLUGIN_EXPORT const mz_plugin mizan_plugin = {
    .abi = MZ_PLUGIN_ABI, .name = "hottest", .init = init, .decide = decide};
