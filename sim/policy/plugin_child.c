/* The plug-in's side: loads the shared object and calls it. Whatever it does to this process, the
 * other side only sees an answer that is missing or wrong. */
#include "sim/policy/plugin_wire.h"

#include "common/base/child.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct server {
    const mz_plugin_child *start;
    const mz_plugin *plugin;
    void *state;
    mz_plugin_area area;
    mz_plugin_reply *reply; /* of the request under way */
    mz_plugin_traits traits;
    mz_plugin_load load[2]; /* current or the call's, history */
} server;

mz_plugin_area mz_plugin_area_at(void *base, int32_t ranks, int32_t experts, int32_t slots) {
    const size_t R = (size_t)ranks, E = (size_t)experts, I = R * (size_t)slots;
    mz_plugin_area a = {.instances = (int32_t)I, .moves = (int32_t)(2 * I + E)};
    char *at = base;
    size_t used = 0;
#define TAKE(field, elements)                                                                      \
    do {                                                                                           \
        a.field = at ? (void *)(at + used) : NULL;                                                 \
        used += ((elements) * sizeof *a.field + 63) / 64 * 64;                                     \
    } while (0)
    for (int i = 0; i < 2; i++) {
        TAKE(count[i], R * E);
        TAKE(total[i], E);
    }
    TAKE(host_expert, I);
    TAKE(host_rank, I);
    TAKE(host_pairs, I);
    TAKE(quota, E);
    TAKE(move, (size_t)a.moves);
    TAKE(begin, E + 1);
    TAKE(rank, I);
    TAKE(target, I);
    TAKE(sent, I * R);
    TAKE(dropped, R * E);
#undef TAKE
    a.size = used;
    return a;
}

/* The first fault is the one to tell. */
static bool fault(server *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static bool fault(server *s, const char *fmt, ...) {
    va_list args;
    if (!s->reply->failed) {
        va_start(args, fmt);
        vsnprintf(s->reply->text, sizeof s->reply->text, fmt, args);
        va_end(args);
    }
    s->reply->failed = 1;
    return false;
}

/* ---- what decide may call ----------------------------------------------------------------------
 */

static bool add_host(mz_plugin_plan *plan, int32_t expert, int32_t rank, int64_t pairs) {
    server *s = plan->inside;
    const mz_plugin_env *env = &s->start->env;
    const int32_t at = s->reply->instances;
    if (expert < 0 || expert >= env->experts || rank < 0 || rank >= env->ranks || pairs < -1)
        return fault(
            s, "calls host(expert %d, rank %d, %lld pairs): there are %d experts and %d ranks",
            expert, rank, (long long)pairs, env->experts, env->ranks);
    if (at >= s->area.instances)
        return fault(s, "gives more than %d hosts: the slots of all ranks are full",
                     s->area.instances);
    s->area.host_expert[at] = expert;
    s->area.host_rank[at] = rank;
    s->area.host_pairs[at] = pairs;
    s->reply->instances++;
    return true;
}

static bool set_quota(mz_plugin_plan *plan, int32_t expert, int64_t pairs) {
    server *s = plan->inside;
    if (expert < 0 || expert >= s->start->env.experts || pairs < 0)
        return fault(s, "calls quota(expert %d, %lld pairs): there are %d experts", expert,
                     (long long)pairs, s->start->env.experts);
    if (!s->traits.lossy)
        return fault(s, "calls quota(), and its traits do not say lossy");
    s->area.quota[expert] = pairs;
    return true;
}

static bool add_move(mz_plugin_plan *plan, const mz_plugin_move *move) {
    server *s = plan->inside;
    if (s->traits.copies != MZ_PLUGIN_COPIES_STATED)
        return fault(s, "calls move(), and its traits do not say MZ_PLUGIN_COPIES_STATED");
    if (s->reply->moves >= s->area.moves)
        return fault(s, "gives more than %d moves", s->area.moves);
    s->area.move[s->reply->moves++] = *move;
    return true;
}

static void set_why(mz_plugin_plan *plan, const char *text) {
    server *s = plan->inside;
    snprintf(s->reply->why, sizeof s->reply->why, "%s", text);
}

/* ---- what route may call -----------------------------------------------------------------------
 */

static bool send_pairs(mz_plugin_call *call, int32_t source, int32_t host, int64_t pairs) {
    server *s = call->inside;
    const mz_plugin_env *env = &s->start->env;
    if (source < 0 || source >= env->ranks || host < 0 || host >= call->begin[env->experts] ||
        pairs < 0)
        return fault(
            s, "calls send(source %d, host %d, %lld pairs): there are %d sources and %d hosts",
            source, host, (long long)pairs, env->ranks, call->begin[env->experts]);
    int64_t *sent = &s->area.sent[(size_t)host * (size_t)env->ranks + (size_t)source];
    if (pairs > call->load->pairs - *sent)
        return fault(s, "sends more pairs from source %d to host %d than the %lld of the call",
                     source, host, (long long)call->load->pairs);
    *sent += pairs;
    return true;
}

static bool drop_pairs(mz_plugin_call *call, int32_t source, int32_t expert, int64_t pairs) {
    server *s = call->inside;
    const mz_plugin_env *env = &s->start->env;
    if (source < 0 || source >= env->ranks || expert < 0 || expert >= env->experts || pairs < 0)
        return fault(
            s, "calls drop(source %d, expert %d, %lld pairs): there are %d sources and %d experts",
            source, expert, (long long)pairs, env->ranks, env->experts);
    if (!s->traits.lossy)
        return fault(s, "calls drop(), and its traits do not say lossy");
    int64_t *dropped = &s->area.dropped[(size_t)source * (size_t)env->experts + (size_t)expert];
    if (pairs > call->load->pairs - *dropped)
        return fault(s, "drops more pairs of expert %d than the %lld of the call", expert,
                     (long long)call->load->pairs);
    *dropped += pairs;
    return true;
}

/* ---- requests ----------------------------------------------------------------------------------
 */

static void said(server *s, const char *text) {
    if (text)
        fault(s, "says: %s", text);
}

static bool one_word(const char *name) {
    size_t n = name ? strnlen(name, MZ_PLUGIN_NAME) : 0;
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)name[i]) && name[i] != '_' && name[i] != '-' && name[i] != '.')
            return false;
    return n > 0 && n < MZ_PLUGIN_NAME;
}

/* dlerror names the file first; the message already does. */
static const char *dl_reason(const char *path) {
    const char *reason = dlerror();
    const size_t n = strlen(path);
    if (!reason)
        return "no reason given";
    return strncmp(reason, path, n) == 0 && strncmp(reason + n, ": ", 2) == 0 ? reason + n + 2
                                                                              : reason;
}

static void load(server *s) {
    const mz_plugin_child *start = s->start;
    void *object = dlopen(start->path, RTLD_NOW | RTLD_LOCAL);
    if (!object) {
        fault(s, "cannot be loaded: %s", dl_reason(start->path));
        return;
    }
    const mz_plugin *p = dlsym(object, "mizan_plugin");
    if (!p)
        fault(s, "exports no variable mizan_plugin (see sim/policy/plugin.h)");
    else if (p->abi < MZ_PLUGIN_ABI)
        fault(s,
              "was built for plug-in interface %d, this program has %d: build it again with the "
              "plugin.h of this version",
              p->abi, MZ_PLUGIN_ABI);
    else if (p->abi > MZ_PLUGIN_ABI)
        fault(s,
              "was built for plug-in interface %d, this program has %d only: use a newer program, "
              "or build it with the plugin.h of this version",
              p->abi, MZ_PLUGIN_ABI);
    else if (!one_word(p->name))
        fault(s, "has no name of one word (letters, digits, . _ -, at most %d)",
              MZ_PLUGIN_NAME - 1);
    else if (!p->init || !p->decide)
        fault(s, "lacks %s", p->init ? "decide" : "init");
    if (s->reply->failed)
        return;
    s->plugin = p;
    s->traits = start->traits;
    said(s, p->init(&start->env, start->option, start->options, &s->traits, &s->state));
    snprintf(s->reply->name, sizeof s->reply->name, "%s", p->name);
    s->reply->traits = s->traits;
    s->reply->has_route = p->route != NULL;
}

static void map(server *s, const mz_plugin_request *request) {
    const mz_plugin_env *env = &s->start->env;
    const size_t size = mz_plugin_area_at(NULL, env->ranks, env->experts, request->slots).size;
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, s->start->memory, 0);
    if (base == MAP_FAILED) {
        fault(s, "cannot share memory");
        return;
    }
    s->area = mz_plugin_area_at(base, env->ranks, env->experts, request->slots);
    for (int i = 0; i < 2; i++)
        s->load[i] = (mz_plugin_load){.sources = env->ranks,
                                      .experts = env->experts,
                                      .count = s->area.count[i],
                                      .total = s->area.total[i]};
}

static void decide(server *s, const mz_plugin_request *request) {
    mz_plugin_plan plan = {s, add_host, set_quota, add_move, set_why};
    mz_plugin_view view = {.step = request->step,
                           .micro_batch = request->micro_batch,
                           .layer = request->layer,
                           .current = request->has_load[0] ? &s->load[0] : NULL,
                           .history = request->has_load[1] ? &s->load[1] : NULL};
    for (int i = 0; i < 2; i++)
        s->load[i].pairs = request->pairs[i];
    for (int32_t e = 0; e < s->start->env.experts; e++)
        s->area.quota[e] = -1;
    said(s, s->plugin->decide(s->state, &view, &plan));
}

static void route(server *s, const mz_plugin_request *request) {
    mz_plugin_call call = {.inside = s,
                           .step = request->step,
                           .micro_batch = request->micro_batch,
                           .layer = request->layer,
                           .load = &s->load[0],
                           .begin = s->area.begin,
                           .rank = s->area.rank,
                           .pairs = s->area.target,
                           .send = send_pairs,
                           .drop = drop_pairs};
    const mz_plugin_env *env = &s->start->env;
    s->load[0].pairs = request->pairs[0];
    memset(s->area.sent, 0,
           sizeof(int64_t) * (size_t)s->area.begin[env->experts] * (size_t)env->ranks);
    memset(s->area.dropped, 0, sizeof(int64_t) * (size_t)env->ranks * (size_t)env->experts);
    said(s, s->plugin->route(s->state, &call));
}

void mz_plugin_serve(void *context, int fd) {
    server s = {.start = context};
    mz_plugin_request request;
    mz_plugin_reply reply;
    __fpurge(stdout); /* the parent's, which it prints itself */
    setvbuf(stdout, NULL, _IOLBF, 0);
    dup2(STDERR_FILENO, STDOUT_FILENO);
    do {
        if (!mz_parent_receive(fd, &request, sizeof request))
            return;
        memset(&reply, 0, sizeof reply);
        s.reply = &reply;
        switch (request.op) {
        case MZ_PLUGIN_OP_LOAD:
            load(&s);
            break;
        case MZ_PLUGIN_OP_MAP:
            map(&s, &request);
            break;
        case MZ_PLUGIN_OP_DECIDE:
            decide(&s, &request);
            break;
        case MZ_PLUGIN_OP_ROUTE:
            route(&s, &request);
            break;
        default:
            if (s.plugin && s.plugin->release)
                s.plugin->release(s.state);
        }
    } while (mz_parent_send(fd, &reply, sizeof reply));
}
