/* A plug-in that does what its options say: a plain round robin of hosts with the default route, or
 * one of many faults. ABI, NAME and SYMBOL are set by the build. */
#include "sim/policy/plugin.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef ABI
#define ABI MZ_PLUGIN_ABI
#endif
#ifndef NAME
#define NAME "faulty"
#endif
#ifndef SYMBOL
#define SYMBOL mizan_plugin
#endif

static mz_plugin_env env;
static int *volatile nowhere;
static mz_plugin_traits own;
static char what[64] = "", when[16] = "decide";

static const char *misbehave(const char *now) {
    if (strcmp(when, now) != 0)
        return NULL;
    if (strcmp(what, "crash") == 0)
        *nowhere = 1;
    if (strcmp(what, "abort") == 0)
        abort();
    if (strcmp(what, "exit") == 0)
        exit(7);
    if (strcmp(what, "quick-exit") == 0)
        _exit(0);
    if (strcmp(what, "kill") == 0)
        raise(SIGKILL);
    if (strcmp(what, "busy") == 0)
        puts("a plug-in is busy");
    for (volatile int forever = strcmp(what, "loop") == 0 || strcmp(what, "busy") == 0; forever;)
        ;
    if (strcmp(what, "hang-up") == 0)
        for (int fd = 3; fd < 64; fd++)
            close(fd);
    if (strcmp(what, "print") == 0)
        puts("a plug-in prints");
    return strcmp(what, "refuse") == 0 ? "not\nwith me" : NULL;
}

static bool is(const char *word) {
    return strcmp(what, word) == 0;
}

static const char *init(const mz_plugin_env *told, const mz_plugin_option *option, int32_t options,
                        mz_plugin_traits *traits, void **state) {
    env = *told;
    for (int32_t i = 0; i < options; i++) {
        const char *key = option[i].key, *value = option[i].value;
        if (strcmp(key, "what") == 0)
            snprintf(what, sizeof what, "%s", value);
        else if (strcmp(key, "when") == 0)
            snprintf(when, sizeof when, "%s", value);
        else if (strcmp(key, "lossy") == 0)
            traits->lossy = 1;
        else if (strcmp(key, "copies") == 0)
            traits->copies = atoi(value);
        else if (strcmp(key, "sees") == 0)
            traits->sees = (unsigned)atoi(value);
        else if (strcmp(key, "slots") == 0)
            traits->slots = atoi(value);
        else if (strcmp(key, "interval") == 0)
            traits->interval = atoi(value);
        else if (strcmp(key, "window") == 0)
            traits->window = atoi(value);
        else if (strcmp(key, "seconds") == 0)
            traits->planner_seconds = atof(value);
        else
            return "unknown option";
    }
    own = *traits;
    return misbehave("init");
}

static const char *decide(void *state, const mz_plugin_view *view, mz_plugin_plan *plan) {
    const char *text = misbehave("decide");
    for (int32_t e = is("no-host"); e < env.experts; e++) {
        plan->host(plan, e, is("elsewhere") ? (env.home[e] + 1) % env.ranks : env.home[e],
                   is("half") && e == 0 ? 3
                   : is("uncounted")    ? INT64_MAX
                                        : -1);
        if (e == 0 && env.ranks > 1 && !is("alone"))
            plan->host(plan, 0, env.ranks - 1, is("uncounted") ? 1 : -1);
    }
    if (is("rank"))
        plan->host(plan, 0, env.ranks, -1);
    if (is("expert"))
        plan->host(plan, env.experts, 0, -1);
    if (is("slots"))
        for (int32_t i = 0; i < own.slots; i++)
            plan->host(plan, 1, 0, -1);
    if (is("endless"))
        for (int32_t i = 0; i < 1000000; i++)
            plan->host(plan, 1, 0, -1);
    if (is("move"))
        plan->move(plan, &(mz_plugin_move){.expert = env.experts, .bytes = -1});
    if (is("moves") || is("good-move"))
        plan->move(plan, &(mz_plugin_move){.phase = MZ_PLUGIN_STEP,
                                           .dst = env.ranks - 1,
                                           .bytes = env.weight_bytes});
    if (is("quota"))
        for (int32_t e = 0; e < env.experts; e++)
            plan->quota(plan, e, view->current->total[e] / 3);
    plan->why(plan, "because");
    return text;
}

#ifdef ROUTE
/* Everything to the first host; a tenth is dropped where the plug-in is lossy. */
static const char *route(void *state, mz_plugin_call *call) {
    const char *text = misbehave("route");
    for (int32_t s = 0; s < env.ranks; s++)
        for (int32_t e = 0; e < env.experts; e++) {
            int64_t n = call->load->count[(int64_t)s * env.experts + e];
            int64_t drop = own.lossy ? n / 10 : 0;
            if (drop > 0)
                call->drop(call, s, e, drop);
            call->send(call, s, call->begin[e], n - drop - (is("lose") && n > drop && s == 1));
        }
    if (is("negative"))
        call->send(call, 0, 0, -1);
    if (is("nobody"))
        call->send(call, env.ranks, 0, 1);
    if (is("too-many"))
        call->send(call, 0, 0, 1);
    if (is("wrap")) /* 2^64 pairs too many are none too many */
        for (int i = 0; i < 4; i++)
            call->send(call, 0, 0, i < 2 ? INT64_MAX : 1);
    if (is("drop"))
        call->drop(call, 0, 0, call->load->total[0]);
    if (is("drop-all"))
        call->drop(call, 0, 0, INT64_MAX);
    return text;
}
#endif

static void end(void *state) {
    if (is("hang-on-release"))
        for (;;)
            pause();
}

MZ_PLUGIN_EXPORT const mz_plugin SYMBOL = {.abi = ABI,
                                           .name = NAME,
                                           .init = init,
                                           .decide = decide,
#ifdef ROUTE
                                           .route = route,
#endif
                                           .release = end};
