/* Policies of the user's own: Mizan's side (plugin.h is what their authors see).
 *
 * The shared object is loaded in a child process per group, never here. This side writes the loads
 * into shared memory, asks, and checks whatever comes back as it would check a file: hosts, slots,
 * moves, assignment. Everything wrong is MZ_EINPUT with the plug-in's name. */
#include "sim/policy/plugin_table.h"
#include "sim/policy/plugin_wire.h"

#include "common/base/child.h"
#include "common/base/units.h"
#include "sim/policy/parts.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OPTIONS_MAX = 64, WINDOW_MAX = 10000, INTERVAL_MAX = 1000000, PARTING_MS = 5000 };

typedef struct plugin_options {
    const char *path; /* as the user wrote it */
    mz_plugin_child start;
    int patience_ms;
} plugin_options;

typedef struct plugin_state {
    const char *path;
    char name[MZ_PLUGIN_NAME];
    mz_child child;
    int memory;
    void *base;
    mz_plugin_area area;
    mz_plugin_traits traits;
    bool has_route;
    mz_policy_traits rules; /* what plans are checked against */
    int32_t ranks, experts, layers;
    int64_t weight_bytes, state_bytes;
    int32_t *home;
    int32_t *used;      /* [R] */
    int32_t *next;      /* [E+1] */
    int64_t *quota;     /* [layers][E] of the last decide, -1: none */
    int64_t *target;    /* [layers][instances] the same, COPIES_LAST */
    int64_t *share;     /* [instances] */
    int64_t *weight;    /* [instances] */
    int64_t *column;    /* [R] */
    int64_t *sent;      /* [R] */
    uint64_t *scratch;  /* [max(R, instances)] */
    int64_t *back_rows; /* [instances][R], lossy only */
    const int64_t **row;
    mz_expand *expand;
    mz_placement *placement;
    mz_replica_moves moves;
} plugin_state;

/* ---- the name and its options ------------------------------------------------------------------
 */

bool mz_plugin_is_path(const char *name) {
    const size_t length = strlen(name);
    return strchr(name, '/') || (length > 3 && strcmp(name + length - 3, ".so") == 0);
}

static mz_code take_timeout(const char *path, const char *text, int *milliseconds, mz_err *err) {
    double seconds;
    mz_code code = mz_unit_parse(text, MZ_UNIT_SECONDS, "timeout", &seconds, err);
    if (code == MZ_OK && !(seconds >= 0.01 && seconds <= 86400))
        code = mz_fail(err, MZ_EINPUT, "timeout=%s: give 0.01 to 86400 seconds", text);
    if (code != MZ_OK)
        return mz_err_prefix(err, "plug-in %s", path);
    *milliseconds = (int)(seconds * 1000);
    return MZ_OK;
}

/* "a=1,fast" into option[]; timeout is ours. */
static mz_code split_options(char *text, plugin_options *o, mz_plugin_option *option, mz_err *err) {
    o->start.option = option;
    for (char *at = text, *end; *at; at = end) {
        end = at + strcspn(at, ",");
        if (*end)
            *end++ = 0;
        char *value = at + strcspn(at, "=");
        if (*value)
            *value++ = 0;
        if (!*at)
            return mz_fail(err, MZ_EINPUT, "plug-in %s: an option without a name", o->path);
        if (strcmp(at, "timeout") == 0) {
            mz_code code = take_timeout(o->path, value, &o->patience_ms, err);
            if (code != MZ_OK)
                return code;
            continue;
        }
        if (o->start.options == OPTIONS_MAX)
            return mz_fail(err, MZ_EINPUT, "plug-in %s: more than %d options", o->path,
                           OPTIONS_MAX);
        option[o->start.options++] = (mz_plugin_option){at, value};
    }
    return MZ_OK;
}

/* "dir/mine.so" is "mine". */
static char *short_name(mz_arena *arena, const char *path) {
    const char *slash = strrchr(path, '/');
    char *name = mz_arena_strdup(arena, slash ? slash + 1 : path);
    const size_t length = name ? strlen(name) : 0;
    if (length > 3 && strcmp(name + length - 3, ".so") == 0)
        name[length - 3] = 0;
    return name;
}

static mz_code plugin_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                           void **out, mz_policy_traits *traits, mz_err *err);
static mz_code plugin_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err);
static mz_code plugin_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err);
static void plugin_release(void *self);

mz_code mz_plugin_parse(char *path, char *text, mz_arena *arena, const mz_policy **policy,
                        void **options, mz_err *err) {
    mz_policy *p = MZ_NEW(arena, mz_policy, 1);
    plugin_options *o = MZ_NEW(arena, plugin_options, 1);
    mz_plugin_option *option = MZ_NEW(arena, mz_plugin_option, OPTIONS_MAX);
    if (!p || !o || !option)
        return mz_fail_nomem(err, "a plug-in");
    *p = (mz_policy){.name = short_name(arena, path),
                     .summary = "a plug-in",
                     .init = plugin_init,
                     .decide = plugin_decide,
                     .route = plugin_route,
                     .release = plugin_release};
    o->path = path;
    o->patience_ms = 60000;
    /* Without a slash dlopen would look among the system's libraries. */
    o->start.path = strchr(path, '/') ? path : mz_arena_printf(arena, "./%s", path);
    if (!p->name || !o->start.path)
        return mz_fail_nomem(err, "a plug-in");
    if (access(o->start.path, R_OK) != 0)
        return mz_fail(err, MZ_EINPUT, "plug-in %s: %s", path, strerror(errno));
    *policy = p;
    *options = o;
    return split_options(text, o, option, err);
}

/* ---- asking ------------------------------------------------------------------------------------
 */

static const char *verb(int32_t op) {
    return op == MZ_PLUGIN_OP_DECIDE  ? "in decide"
           : op == MZ_PLUGIN_OP_ROUTE ? "in route"
                                      : "while it was loaded";
}

static mz_code ask(plugin_state *s, const mz_plugin_request *request, mz_plugin_reply *reply,
                   mz_err *err) {
    if (!mz_child_send(&s->child, request, sizeof *request) ||
        !mz_child_receive(&s->child, reply, sizeof *reply)) {
        if (s->child.stop && *s->child.stop)
            return mz_fail(err, MZ_EABORTED, "plug-in %s: interrupted %s", s->path,
                           verb(request->op));
        return mz_fail(err, MZ_EINPUT, "plug-in %s: it ended %s (%s)", s->path, verb(request->op),
                       s->child.death);
    }
    reply->text[MZ_PLUGIN_TEXT - 1] = reply->why[MZ_PLUGIN_TEXT - 1] = 0;
    reply->name[MZ_PLUGIN_NAME - 1] = 0;
    if (reply->failed)
        return mz_fail(err, MZ_EINPUT, "plug-in %s: it %s%s%s", s->path, reply->text,
                       request->op >= MZ_PLUGIN_OP_DECIDE ? " - " : "",
                       request->op >= MZ_PLUGIN_OP_DECIDE ? verb(request->op) : "");
    return MZ_OK;
}

static void show_load(plugin_state *s, const mz_load *load, int which, mz_plugin_request *request) {
    request->has_load[which] = load != NULL;
    if (!load)
        return;
    request->pairs[which] = load->pairs;
    memcpy(s->area.count[which], load->count,
           sizeof(int64_t) * (size_t)s->ranks * (size_t)s->experts);
    memcpy(s->area.total[which], load->total, sizeof(int64_t) * (size_t)s->experts);
}

/* ---- starting ----------------------------------------------------------------------------------
 */

static mz_code default_traits(const mz_policy_env *env, mz_plugin_traits *traits, mz_err *err) {
    *traits =
        (mz_plugin_traits){.sees = MZ_PLUGIN_SEES_CURRENT, .lag = 1, .window = 1, .interval = 1};
    return mz_slots("of a plug-in", env, 0, &traits->slots, err);
}

/* The arrays of the environment outlive the child's start: fork copies them. */
static mz_code fill_start(const mz_policy_env *env, mz_arena *arena, plugin_state *s,
                          mz_plugin_child *start, mz_err *err) {
    int32_t *domain;
    mz_layout_mains(env->ranks, env->experts, s->home);
    mz_code code = mz_copy_domains(env, arena, &domain, err);
    if (code != MZ_OK)
        return code;
    start->memory = s->memory;
    start->env = (mz_plugin_env){.ranks = env->ranks,
                                 .experts = env->experts,
                                 .layers = s->layers,
                                 .top_k = env->top_k,
                                 .domains = env->domains > 1 ? env->domains : 1,
                                 .domain = domain,
                                 .home = s->home,
                                 .mains_per_rank = mz_mains_per_rank(env->ranks, env->experts),
                                 .expert_groups = env->expert_groups > 1 ? env->expert_groups : 1,
                                 .hidden = env->hidden,
                                 .intermediate = env->intermediate,
                                 .expert_parameters = env->expert_parameters,
                                 .weight_bytes = env->weight_bytes,
                                 .state_bytes = env->expert_state_bytes,
                                 .token_bytes = env->token_bytes,
                                 .pair_seconds = env->pair_seconds,
                                 .inside_bytes_s = env->inside_bytes_s,
                                 .outside_bytes_s = env->outside_bytes_s,
                                 .seed = env->seed};
    return default_traits(env, &start->traits, err);
}

static mz_code check_traits(const plugin_state *s, const mz_policy_env *env, mz_err *err) {
    const mz_plugin_traits *t = &s->traits;
    const char *wrong = NULL;
    if (t->sees & ~(unsigned)(MZ_PLUGIN_SEES_CURRENT | MZ_PLUGIN_SEES_HISTORY))
        wrong = "sees is neither MZ_PLUGIN_SEES_CURRENT nor MZ_PLUGIN_SEES_HISTORY";
    else if (t->lag < 1 || t->lag > WINDOW_MAX || t->window < 1 || t->window > WINDOW_MAX)
        wrong = "lag and window are whole numbers from 1 to 10000";
    else if (t->interval < 1 || t->interval > INTERVAL_MAX)
        wrong = "interval is a whole number from 1 to 1000000";
    else if (!(t->planner_seconds >= 0 && t->planner_seconds < 1e6))
        wrong = "planner_seconds is not a time";
    else if (t->copies < MZ_PLUGIN_COPIES_CALL || t->copies > MZ_PLUGIN_COPIES_STATED)
        wrong = "copies is none of MZ_PLUGIN_COPIES_CALL, _LAST, _STATED";
    if (wrong)
        return mz_fail(err, MZ_EINPUT, "plug-in %s: its traits: %s", s->path, wrong);
    int32_t slots;
    mz_code code = t->slots < 1 ? mz_fail(err, MZ_EINPUT, "slots=%d: give at least %d, its mains",
                                          t->slots, mz_mains_per_rank(env->ranks, env->experts))
                                : mz_slots(s->name, env, t->slots, &slots, err);
    return code == MZ_OK ? MZ_OK : mz_err_prefix(err, "plug-in %s: its traits", s->path);
}

static mz_code load_plugin(const mz_policy_env *env, const plugin_options *o, mz_arena *arena,
                           plugin_state *s, mz_err *err) {
    mz_plugin_child *start = MZ_NEW(arena, mz_plugin_child, 1);
    if (!start || !(s->home = MZ_NEW(arena, int32_t, env->experts)))
        return mz_fail_nomem(err, "a plug-in");
    *start = o->start;
    s->memory = memfd_create("mizan-plug-in", MFD_CLOEXEC);
    if (s->memory < 0)
        return mz_fail(err, MZ_EINTERNAL, "cannot make shared memory: %s", strerror(errno));
    mz_code code = fill_start(env, arena, s, start, err);
    if (code == MZ_OK)
        code = mz_child_start(&s->child, mz_plugin_serve, start, s->memory, o->patience_ms, err);
    s->child.stop = env->stop;
    mz_plugin_request request = {.op = MZ_PLUGIN_OP_LOAD};
    mz_plugin_reply reply;
    if (code == MZ_OK)
        code = ask(s, &request, &reply, err);
    if (code != MZ_OK)
        return code;
    memcpy(s->name, reply.name, sizeof s->name);
    s->traits = reply.traits;
    s->has_route = reply.has_route != 0;
    return check_traits(s, env, err);
}

static mz_code share_memory(plugin_state *s, mz_err *err) {
    const size_t size = mz_plugin_area_at(NULL, s->ranks, s->experts, s->traits.slots).size;
    if (ftruncate(s->memory, (off_t)size) != 0)
        return mz_fail(err, MZ_EINTERNAL, "cannot make shared memory: %s", strerror(errno));
    s->base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, s->memory, 0);
    if (s->base == MAP_FAILED) {
        s->base = NULL;
        return mz_fail_nomem(err, "the memory shared with a plug-in");
    }
    s->area = mz_plugin_area_at(s->base, s->ranks, s->experts, s->traits.slots);
    mz_plugin_request request = {.op = MZ_PLUGIN_OP_MAP, .slots = s->traits.slots};
    mz_plugin_reply reply;
    return ask(s, &request, &reply, err);
}

static mz_code allocate(const mz_policy_env *env, mz_arena *arena, plugin_state *s, mz_err *err) {
    const int64_t I = s->area.instances, R = s->ranks, E = s->experts, L = s->layers;
    s->used = MZ_NEW(arena, int32_t, R);
    s->next = MZ_NEW(arena, int32_t, E + 1);
    s->quota = MZ_NEW(arena, int64_t, L * E);
    s->share = MZ_NEW(arena, int64_t, I);
    s->weight = MZ_NEW(arena, int64_t, I);
    s->column = MZ_NEW(arena, int64_t, R);
    s->sent = MZ_NEW(arena, int64_t, R);
    s->scratch = MZ_NEW(arena, uint64_t, I > R ? I : R);
    s->row = MZ_NEW(arena, const int64_t *, I);
    const bool lasts = s->traits.copies == MZ_PLUGIN_COPIES_LAST, lossy = s->traits.lossy != 0;
    s->target = lasts ? MZ_NEW(arena, int64_t, L * I) : NULL;
    s->back_rows = lossy ? MZ_NEW(arena, int64_t, I * R) : NULL;
    if (!s->used || !s->next || !s->quota || !s->share || !s->weight || !s->column || !s->sent ||
        !s->scratch || !s->row || (lasts && !s->target) || (lossy && !s->back_rows))
        return mz_fail_nomem(err, "the state of a plug-in");
    mz_code code = mz_expand_create(arena, env, (int32_t)I, &s->expand, err);
    if (code == MZ_OK && lasts)
        code = mz_placement_create(arena, env, s->traits.slots, &s->placement, err);
    return code;
}

/* Memory and movement follow from what becomes of copies. */
static mz_policy_traits rules_of(const plugin_state *s) {
    const mz_plugin_traits *t = &s->traits;
    const bool lasts = t->copies == MZ_PLUGIN_COPIES_LAST;
    mz_policy_traits rules = {.sees = t->sees,
                              .lag = t->lag,
                              .window = t->window,
                              .interval = t->interval,
                              .planner_seconds = t->planner_seconds,
                              .planner_stated = true,
                              .lossy = t->lossy != 0,
                              .slots = t->slots,
                              .score_source = ""};
    rules.replica_memory = lasts ? MZ_REPLICAS_RESIDENT : MZ_REPLICAS_SHARED;
    rules.replica_gradient_bytes = lasts ? s->weight_bytes : 2 * s->weight_bytes;
    rules.replica_optimizer = lasts;
    return rules;
}

static mz_code plugin_init(const mz_policy_env *env, const void *options, mz_arena *arena,
                           void **out, mz_policy_traits *traits, mz_err *err) {
    const plugin_options *o = options;
    plugin_state *s = MZ_NEW(arena, plugin_state, 1);
    if (!s)
        return mz_fail_nomem(err, "the state of a plug-in");
    s->path = o->path;
    s->memory = -1;
    s->ranks = env->ranks;
    s->experts = env->experts;
    s->layers = env->layers > 1 ? env->layers : 1;
    s->weight_bytes = env->weight_bytes;
    s->state_bytes = env->expert_state_bytes;
    s->moves = (mz_replica_moves){.weight_bytes = env->weight_bytes,
                                  .gradient_bytes = 2 * env->weight_bytes,
                                  .again = true,
                                  .hide = MZ_HIDE_PACK,
                                  .hide_again = MZ_HIDE_LAYERS,
                                  .hide_gradients = MZ_HIDE_LAYERS};
    mz_code code = load_plugin(env, o, arena, s, err);
    if (code == MZ_OK)
        code = share_memory(s, err);
    if (code == MZ_OK)
        code = allocate(env, arena, s, err);
    if (code != MZ_OK) {
        plugin_release(s);
        return code;
    }
    s->rules = *traits = rules_of(s);
    *out = s;
    return MZ_OK;
}

static void plugin_release(void *self) {
    plugin_state *s = self;
    if (s->base && s->child.pid > 0) {
        mz_plugin_request request = {.op = MZ_PLUGIN_OP_RELEASE};
        mz_plugin_reply reply;
        mz_err ignored;
        s->child.stop = NULL; /* a plug-in that is not busy may say goodbye */
        if (s->child.patience_ms > PARTING_MS)
            s->child.patience_ms = PARTING_MS;
        ask(s, &request, &reply, &ignored);
    }
    mz_child_stop(&s->child);
    if (s->base)
        munmap(s->base, s->area.size);
    if (s->memory >= 0)
        close(s->memory);
    s->base = NULL;
    s->memory = -1;
}

/* ---- decide ------------------------------------------------------------------------------------
 */

static mz_code invalid(const plugin_state *s, mz_err *err, const char *fmt, ...) MZ_PRINTF(3, 4);
static mz_code invalid(const plugin_state *s, mz_err *err, const char *fmt, ...) {
    char text[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return mz_fail(err, MZ_EINPUT, "plug-in %s: its plan is invalid: %s", s->path, text);
}

/* Hosts in the order of experts, in the order given within one; the shared lists are read once. */
static mz_code take_hosts(plugin_state *s, int32_t instances, mz_plan *plan, mz_err *err) {
    const int32_t E = s->experts;
    if (instances < 0 || instances > s->area.instances || instances > plan->instance_cap)
        return invalid(s, err, "%d hosts", instances);
    memset(s->next, 0, sizeof(int32_t) * ((size_t)E + 1));
    int32_t *expert = (int32_t *)s->scratch;
    for (int32_t i = 0; i < instances; i++) {
        expert[i] = s->area.host_expert[i];
        if (expert[i] < 0 || expert[i] >= E)
            return invalid(s, err, "a host of expert %d of %d", expert[i], E);
        s->next[expert[i] + 1]++;
    }
    for (int32_t e = 0; e < E; e++) {
        if (s->next[e + 1] == 0)
            return invalid(s, err, "expert %d has no host", e);
        s->next[e + 1] += s->next[e];
    }
    memcpy(plan->begin, s->next, sizeof(int32_t) * ((size_t)E + 1));
    for (int32_t i = 0; i < instances; i++) {
        const int32_t at = s->next[expert[i]]++;
        plan->rank[at] = s->area.host_rank[i];
        plan->target[at] = s->area.host_pairs[i];
    }
    return MZ_OK;
}

static mz_code check_hosts(plugin_state *s, const mz_plan *plan, mz_err *err) {
    memset(s->used, 0, sizeof(int32_t) * (size_t)s->ranks);
    for (int32_t e = 0; e < s->experts; e++) {
        const int32_t first = plan->begin[e];
        int32_t unset = 0;
        int64_t meant = 0;
        for (int32_t i = first; i < plan->begin[e + 1]; i++) {
            const int32_t r = plan->rank[i];
            if (r < 0 || r >= s->ranks || plan->target[i] < -1)
                return invalid(s, err, "expert %d has %lld pairs on rank %d of %d", e,
                               (long long)plan->target[i], r, s->ranks);
            if (++s->used[r] > s->traits.slots)
                return invalid(s, err, "rank %d hosts more than its %d slots", r, s->traits.slots);
            if (plan->target[i] > INT64_MAX - meant)
                return invalid(s, err, "expert %d has more pairs on its hosts than can be counted",
                               e);
            meant += plan->target[i] > 0 ? plan->target[i] : 0;
            unset += plan->target[i] < 0;
        }
        if (unset > 0 && unset < plan->begin[e + 1] - first)
            return invalid(s, err, "expert %d states pairs for some of its hosts only", e);
        if (s->traits.copies == MZ_PLUGIN_COPIES_CALL && plan->rank[first] != s->home[e])
            return invalid(s, err,
                           "expert %d begins with rank %d, its home is rank %d (where copies live "
                           "for a call, mains stay)",
                           e, plan->rank[first], s->home[e]);
    }
    return MZ_OK;
}

static mz_code take_moves(plugin_state *s, int32_t moves, mz_plan *plan, mz_err *err) {
    mz_code code = moves < 0 || moves > s->area.moves ? invalid(s, err, "%d moves", moves) : MZ_OK;
    for (int32_t i = 0; code == MZ_OK && i < moves; i++) {
        const mz_plugin_move m = s->area.move[i];
        if (m.kind < 0 || m.kind > MZ_PLUGIN_OPTIMIZER || m.phase < 0 ||
            m.phase > MZ_PLUGIN_REDUCE_STEP || m.hide < 0 || m.hide > MZ_PLUGIN_HIDE_FREE ||
            m.expert < 0 || m.expert >= s->experts || m.src < -1 || m.src >= s->ranks ||
            m.dst < -1 || m.dst >= s->ranks || (m.src < 0 && m.dst < 0) || m.bytes < 0 ||
            m.bytes > (int64_t)1 << 50 || m.round < 0 || m.round > 1 << 20)
            return invalid(s, err,
                           "move %d is out of range: kind %d, phase %d, hide %d, expert %d, rank "
                           "%d to %d, %lld bytes in round %d",
                           i, m.kind, m.phase, m.hide, m.expert, m.src, m.dst, (long long)m.bytes,
                           m.round);
        code = mz_plan_add_move(plan,
                                (mz_move){.kind = (mz_move_kind)m.kind,
                                          .phase = (mz_move_phase)m.phase,
                                          .hide = (mz_move_hide)m.hide,
                                          .expert = m.expert,
                                          .src = m.src,
                                          .dst = m.dst,
                                          .bytes = m.bytes,
                                          .round = m.round,
                                          .change = m.change != 0},
                                err);
    }
    return code;
}

/* Copies that last: the change is paid in the first micro-batch, the all-reduce in every step. */
static mz_code lasting_moves(plugin_state *s, const mz_view *view, mz_plan *plan, mz_err *err) {
    int32_t moved;
    mz_code code = MZ_OK;
    if (view->micro_batch == 0)
        code = mz_placement_change(s->placement, view->layer, s->weight_bytes, s->state_bytes,
                                   MZ_MOVE_STEP, MZ_HIDE_NOTHING, plan, &moved, err);
    return code == MZ_OK
               ? mz_plan_ring_moves(plan, s->weight_bytes, MZ_MOVE_REDUCE_STEP, MZ_HIDE_LAYERS, err)
               : code;
}

static mz_code ask_decide(plugin_state *s, const mz_view *view, mz_plan *plan, mz_err *err) {
    mz_plugin_request request = {.op = MZ_PLUGIN_OP_DECIDE,
                                 .step = view->step,
                                 .micro_batch = view->micro_batch,
                                 .layer = view->layer};
    mz_plugin_reply reply;
    show_load(s, view->current, 0, &request);
    show_load(s, view->history, 1, &request);
    mz_code code = ask(s, &request, &reply, err);
    if (code == MZ_OK)
        code = take_hosts(s, reply.instances, plan, err);
    if (code == MZ_OK)
        code = check_hosts(s, plan, err);
    if (code != MZ_OK)
        return code;
    memcpy(plan->why, reply.why, sizeof plan->why);
    int64_t *quota = s->quota + (int64_t)view->layer * s->experts;
    for (int32_t e = 0; e < s->experts; e++)
        quota[e] = s->traits.lossy ? s->area.quota[e] : -1;
    return s->traits.copies == MZ_PLUGIN_COPIES_STATED ? take_moves(s, reply.moves, plan, err)
                                                       : MZ_OK;
}

static mz_code plugin_decide(void *self, const mz_view *view, mz_plan *plan, mz_err *err) {
    plugin_state *s = self;
    if (view->layer < 0 || view->layer >= s->layers)
        return mz_fail(err, MZ_EINTERNAL, "layer %d of %d", view->layer, s->layers);
    mz_plan_reset(plan);
    const bool lasts = s->traits.copies == MZ_PLUGIN_COPIES_LAST;
    const size_t instances = sizeof(int64_t) * (size_t)s->area.instances;
    int64_t *target = lasts ? s->target + (int64_t)view->layer * s->area.instances : NULL;
    mz_code code = MZ_OK;
    if (lasts && view->micro_batch > 0 && mz_placement_restore(s->placement, view->layer, plan)) {
        memcpy(plan->target, target, instances);
    } else {
        code = ask_decide(s, view, plan, err);
        if (code == MZ_OK && lasts)
            memcpy(target, plan->target, instances);
    }
    if (code == MZ_OK && lasts)
        code = lasting_moves(s, view, plan, err);
    else if (code == MZ_OK && s->traits.copies == MZ_PLUGIN_COPIES_CALL)
        code = mz_plan_replica_moves(plan, &s->moves, s->sent, err);
    return code;
}

/* ---- route -------------------------------------------------------------------------------------
 */

/* The plug-in's own assignment. Cells beyond the load are wrong whatever else they are. */
static mz_code ask_route(plugin_state *s, const mz_call *call, mz_plan *plan, mz_err *err) {
    const int32_t instances = plan->begin[s->experts];
    const int64_t R = s->ranks, E = s->experts;
    mz_plugin_request request = {.op = MZ_PLUGIN_OP_ROUTE,
                                 .step = call->step,
                                 .micro_batch = call->micro_batch,
                                 .layer = call->layer};
    mz_plugin_reply reply;
    show_load(s, call->load, 0, &request);
    memcpy(s->area.begin, plan->begin, sizeof(int32_t) * ((size_t)E + 1));
    memcpy(s->area.rank, plan->rank, sizeof(int32_t) * (size_t)instances);
    memcpy(s->area.target, plan->target, sizeof(int64_t) * (size_t)instances);
    mz_code code = ask(s, &request, &reply, err);
    for (int64_t i = 0; code == MZ_OK && i < instances * R; i++)
        if (s->area.sent[i] < 0 || s->area.sent[i] > call->load->pairs)
            code = invalid(s, err, "%lld pairs sent from source %lld to host %lld",
                           (long long)s->area.sent[i], (long long)(i % R), (long long)(i / R));
    plan->has_drops = s->traits.lossy != 0;
    for (int64_t i = 0; code == MZ_OK && plan->has_drops && i < R * E; i++) {
        const int64_t drop = s->area.dropped[i];
        if (drop < 0 || drop > call->load->count[i])
            return invalid(s, err, "source %lld drops %lld of %lld pairs of expert %lld",
                           (long long)(i / E), (long long)drop, (long long)call->load->count[i],
                           (long long)(i % E));
        plan->dropped[i] = drop;
        plan->dropped_pairs += drop;
        plan->kept_pairs -= drop;
        plan->quota[i % E] -= drop;
    }
    if (code != MZ_OK)
        return code;
    for (int32_t i = 0; i < instances; i++)
        s->row[i] = s->area.sent + i * R;
    return mz_expand_given(s->expand, plan, call->load->count, s->row,
                           mz_plan_forward_entries(plan), err);
}

/* This call's pairs in proportion to what decide meant, or evenly. */
static mz_code share_out(plugin_state *s, const mz_load *load, mz_plan *plan, mz_err *err) {
    for (int32_t e = 0; e < s->experts; e++) {
        const int32_t first = plan->begin[e], n = plan->begin[e + 1] - first;
        for (int32_t i = first; i < first + n; i++)
            s->weight[i] = plan->target[i] < 0 ? 1 : plan->target[i];
        mz_largest_remainder(load->total[e], s->weight + first, n, s->share + first, s->scratch);
    }
    return mz_expand_rows(s->expand, plan, load->count, NULL, s->share, MZ_SPREAD_EXACT,
                          mz_plan_forward_entries(plan), err);
}

/* Rows of one (source, expert) over its hosts, scaled from forward to what backward keeps. */
static void scale_cell(plugin_state *s, const mz_plan *plan, int32_t e, int32_t source,
                       int64_t kept) {
    const int32_t first = plan->begin[e], n = plan->begin[e + 1] - first;
    for (int32_t j = 0; j < n; j++)
        s->weight[j] = s->back_rows[(int64_t)(first + j) * s->ranks + source];
    mz_largest_remainder(kept, s->weight, n, s->share, s->scratch);
    for (int32_t j = 0; j < n; j++)
        s->back_rows[(int64_t)(first + j) * s->ranks + source] = kept > 0 ? s->share[j] : 0;
}

/* Quotas: each source keeps in proportion to its pairs, each host to what it computed. */
static mz_code keep_quotas(plugin_state *s, const mz_load *load, const int64_t *quota,
                           mz_plan *plan, mz_err *err) {
    const int64_t R = s->ranks, E = s->experts;
    memset(s->back_rows, 0, sizeof(int64_t) * (size_t)plan->begin[E] * (size_t)R);
    for (int32_t i = 0; i < plan->begin[E]; i++) {
        for (int64_t j = plan->entry_begin[i]; j < plan->entry_begin[i + 1]; j++)
            s->back_rows[i * R + plan->entry_source[j]] = plan->entry_pairs[j];
        s->row[i] = s->back_rows + i * R;
    }
    for (int32_t e = 0; e < E; e++) {
        for (int32_t r = 0; r < R; r++)
            s->column[r] =
                load->count[r * E + e] - (plan->has_drops ? plan->dropped[r * E + e] : 0);
        if (quota[e] >= 0 && quota[e] < plan->quota[e]) {
            plan->kept_pairs -= plan->quota[e] - quota[e];
            plan->quota[e] = quota[e];
            mz_largest_remainder(quota[e], s->column, s->ranks, s->column, s->scratch);
        }
        for (int32_t r = 0; r < R; r++) {
            plan->kept[r * E + e] = s->column[r];
            scale_cell(s, plan, e, r, s->column[r]);
        }
    }
    plan->has_backward = true;
    return mz_expand_given(s->expand, plan, load->count, s->row, mz_plan_backward_entries(plan),
                           err);
}

static mz_code plugin_route(void *self, const mz_call *call, mz_plan *plan, mz_err *err) {
    plugin_state *s = self;
    const int64_t *quota = s->quota + (int64_t)call->layer * s->experts;
    bool any = false;
    plan->has_drops = plan->has_backward = false;
    plan->dropped_pairs = 0;
    mz_plan_lossless(plan, call->load);
    mz_code code =
        s->has_route ? ask_route(s, call, plan, err) : share_out(s, call->load, plan, err);
    for (int32_t e = 0; e < s->experts; e++)
        any = any || (quota[e] >= 0 && quota[e] < plan->quota[e]);
    if (code == MZ_OK && any)
        code = keep_quotas(s, call->load, quota, plan, err);
    if (code != MZ_OK)
        return code;
    mz_plan_peaks(plan);
    /* Wrong here is wrong input; the caller's own check would call it a bug. */
    if (mz_plan_check(plan, call->load, &s->rules, err) == MZ_OK)
        return MZ_OK;
    err->code = MZ_EINPUT;
    return mz_err_prefix(err, "plug-in %s: its plan is invalid", s->path);
}
