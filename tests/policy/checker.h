/* A second opinion on plans, written from policy.h alone: what mz_plan_check looks at, and more.
 * The sets of options that every policy of the table is tested with. */
#ifndef MIZAN_TESTS_POLICY_CHECKER_H
#define MIZAN_TESTS_POLICY_CHECKER_H

#include "fixture.h"

#define REQUIRE(r, condition)                                                                      \
    do {                                                                                           \
        if (!(condition))                                                                          \
            fail_msg("%s, %d ranks, %d experts, line %d: %s", (r)->policy->name, (r)->env.ranks,   \
                     (r)->env.experts, __LINE__, #condition);                                      \
    } while (0)

static inline void check_hosts_of(const rig *r, const mz_load *load) {
    const mz_plan *p = r->plan;
    const mz_policy_traits *t = &r->traits;
    int64_t *used = calloc((size_t)p->ranks, sizeof *used);
    REQUIRE(r, p->begin[0] == 0 && p->begin[p->experts] <= p->instance_cap);
    for (int32_t e = 0; e < p->experts; e++) {
        REQUIRE(r, p->begin[e + 1] > p->begin[e]); /* its weights live somewhere */
        for (int32_t i = p->begin[e]; i < p->begin[e + 1]; i++) {
            REQUIRE(r, p->rank[i] >= 0 && p->rank[i] < p->ranks);
            used[p->rank[i]]++;
        }
    }
    for (int32_t g = 0; g < p->ranks && !t->free_replicas && !t->open_slots; g++)
        REQUIRE(r, used[g] <= t->slots);
    free(used);
}

/* Adds a phase's entries to cell[s][e] and instance totals; returns the rows of the busiest rank.
 */
static inline int64_t add_phase(const rig *r, bool backward, int64_t *cell) {
    const mz_plan *p = r->plan;
    const int64_t *begin = backward ? p->back_begin : p->entry_begin;
    const int32_t *source = backward ? p->back_source : p->entry_source;
    const int64_t *pairs = backward ? p->back_pairs : p->entry_pairs;
    const int64_t *total = backward ? p->backward : p->forward;
    int64_t *rows = calloc((size_t)p->ranks, sizeof *rows), peak = 0, at = 0;
    for (int32_t e = 0; e < p->experts; e++)
        for (int32_t i = p->begin[e]; i < p->begin[e + 1]; i++) {
            int64_t sum = 0;
            REQUIRE(r, begin[i] == at && begin[i + 1] >= at);
            for (; at < begin[i + 1]; at++) {
                REQUIRE(r, source[at] >= 0 && source[at] < p->ranks && pairs[at] >= 0);
                cell[(int64_t)source[at] * p->experts + e] += pairs[at];
                sum += pairs[at];
            }
            REQUIRE(r, sum == total[i]);
            rows[p->rank[i]] += sum;
        }
    for (int32_t g = 0; g < p->ranks; g++)
        peak = rows[g] > peak ? rows[g] : peak;
    free(rows);
    return peak;
}

/* Every pair is computed once or dropped, kept ones are among the computed. */
static inline void check_pairs(const rig *r, const mz_load *load) {
    const mz_plan *p = r->plan;
    const int64_t cells = (int64_t)p->ranks * p->experts;
    int64_t *forward = calloc((size_t)cells, sizeof *forward), dropped = 0, kept = 0;
    int64_t *backward = calloc((size_t)cells, sizeof *backward);
    int64_t *quota = calloc((size_t)p->experts, sizeof *quota);
    REQUIRE(r, add_phase(r, false, forward) == p->peak_forward);
    REQUIRE(r, add_phase(r, p->has_backward, backward) == p->peak_backward);
    for (int64_t c = 0; c < cells; c++) {
        const int64_t drop = p->has_drops ? p->dropped[c] : 0;
        REQUIRE(r, drop >= 0 && forward[c] + drop == load->count[c]);
        REQUIRE(r, backward[c] <= forward[c]);
        REQUIRE(r, !p->has_backward || backward[c] == p->kept[c]);
        dropped += drop;
        kept += backward[c];
        quota[c % p->experts] += backward[c];
    }
    for (int32_t e = 0; e < p->experts; e++)
        REQUIRE(r, p->quota[e] == quota[e] && quota[e] <= load->total[e]);
    REQUIRE(r, p->pairs == load->pairs && p->dropped_pairs == dropped && p->kept_pairs == kept);
    REQUIRE(r, r->traits.lossy || (kept == load->pairs && dropped == 0));
    REQUIRE(r, p->total_score > 0 || p->kept_score == 0);
    REQUIRE(r, p->kept_score <= p->total_score * (1 + 1e-9));
    free(forward);
    free(backward);
    free(quota);
}

static inline bool weights_arrive(const mz_plan *p, int32_t expert, int32_t rank) {
    for (int32_t k = 0; k < p->moves; k++) {
        const mz_move *m = &p->move[k];
        if (m->kind == MZ_MOVE_WEIGHTS && m->expert == expert && m->dst == rank && m->bytes > 0)
            return true;
    }
    return false;
}

/* Moves have ends; and copies that a policy makes anew for every call do not come for free. */
static inline void check_moves_of(const rig *r) {
    const mz_plan *p = r->plan;
    const mz_policy_traits *t = &r->traits;
    for (int32_t k = 0; k < p->moves; k++) {
        const mz_move *m = &p->move[k];
        REQUIRE(r, m->src >= MZ_EVERY_RANK && m->src < p->ranks);
        REQUIRE(r, m->dst >= MZ_EVERY_RANK && m->dst < p->ranks && m->src != m->dst);
        REQUIRE(r, m->expert >= 0 && m->expert < p->experts && m->bytes >= 0 && m->round >= 0);
    }
    const bool anew =
        t->sees == MZ_SEES_CURRENT && t->interval == 1 && !t->free_replicas &&
        (t->replica_memory == MZ_REPLICAS_SHARED || t->replica_memory == MZ_REPLICAS_PER_LAYER);
    for (int32_t e = 0; e < p->experts && anew; e++)
        for (int32_t i = p->begin[e] + 1; i < p->begin[e + 1]; i++)
            REQUIRE(r, p->rank[i] == p->rank[p->begin[e]] || weights_arrive(p, e, p->rank[i]));
}

static inline void check_plan(const rig *r, const mz_load *load) {
    mz_err err;
    check_hosts_of(r, load);
    check_pairs(r, load);
    check_moves_of(r);
    if (mz_plan_check(r->plan, load, &r->traits, &err) != MZ_OK)
        fail_msg("%s: %s", r->policy->name, err.msg);
}

/* ---- calls ------------------------------------------------------------------------------------*/

/* Decides where the policy's interval says so, then routes. hidden: given in place of what the
 * policy did not declare (NULL: nothing). False: the set of options needs recorded pairs and says
 * so. */
static inline bool call_step(rig *r, int64_t step, const mz_load *load, const mz_load *history,
                             const mz_load *hidden, const mz_budget *budget) {
    mz_view view = {.step = step,
                    .current = r->traits.sees & MZ_SEES_CURRENT ? load : hidden,
                    .history = r->traits.sees & MZ_SEES_HISTORY ? history : hidden,
                    .budget = budget};
    mz_call call = {.step = step, .load = load};
    mz_code code = MZ_OK;
    if (r->traits.interval <= 1 || step % r->traits.interval == 0)
        code = r->policy->decide(r->state, &view, r->plan, &r->err);
    if (code == MZ_OK)
        code = r->policy->route(r->state, &call, r->plan, &r->err);
    if (code == MZ_EINPUT && strstr(r->err.msg, "this load has counts only"))
        return false;
    if (code != MZ_OK)
        fail_msg("%s: %s", r->policy->name, r->err.msg);
    return true;
}

/* ---- sets of options --------------------------------------------------------------------------*/

enum { TEXT_SIZE = 128, TEXTS_MOST = 64 };

/* Combinations beside the single changes of add_texts. */
static const char *const combinations[] = {
    "capacity[cf=0.7,min_cap=0]",
    "symi[slots=101,drop=no]",
    "ultraep[eps=0,zero_main=yes,locality=no,scope=group,relay=no]",
    "ultraep[slots=101,u_min=1]",
    "topoep[solver=cpu,slots=101]",
    "topoep[u_min=50,rounds=5]",
    "llep[alpha=0.7,m=1,lambda=0]",
    "llep[variant=code,m=100]",
    "eplb[lag=0]",
    "eplb[mode=global,slots=101]",
    "finemoe[d=3]",
    "lrmoe[keep=0.5]",
    "lrmoe[keep=0.25,quota=ratio,scope=global]",
    "lrmoe[keep=0.5,quota=value]",
    "lrmoe[placement=symi,keep=0.5]",
    "lrmoe[placement=static,keep=0.1,q_min=0]",
    "lrmoe[forward=placement,keep=0.5,activations=resend]",
};

static inline int add_choices(const mz_policy *policy, const mz_opt *o, char texts[][TEXT_SIZE],
                              int n) {
    const char *at = o->meta;
    while (at && *at && n < TEXTS_MOST) {
        const int length = (int)strcspn(at, "|");
        if (strncmp(o->dflt, at, (size_t)length) != 0 || o->dflt[length])
            snprintf(texts[n++], TEXT_SIZE, "%s[%s=%.*s]", policy->name, o->name, length, at);
        at += length + (at[length] == '|');
    }
    return n;
}

/* The defaults, every choice of every option, every flag turned round, many slots, and the
 * combinations of that policy. */
static inline int add_texts(const mz_policy *policy, char texts[][TEXT_SIZE]) {
    int n = 0;
    snprintf(texts[n++], TEXT_SIZE, "%s", policy->name);
    for (int i = 0; i < policy->option_count && n < TEXTS_MOST; i++) {
        const mz_opt *o = &policy->options[i];
        if (o->type == MZ_OPT_ENUM)
            n = add_choices(policy, o, texts, n);
        else if (o->type == MZ_OPT_FLAG)
            snprintf(texts[n++], TEXT_SIZE, "%s[%s=%s]", policy->name, o->name,
                     o->dflt && strcmp(o->dflt, "yes") == 0 ? "no" : "yes");
        else if (strcmp(o->name, "slots") == 0)
            snprintf(texts[n++], TEXT_SIZE, "%s[slots=101]", policy->name);
    }
    for (size_t i = 0; i < sizeof combinations / sizeof *combinations && n < TEXTS_MOST; i++) {
        const size_t length = strlen(policy->name);
        if (strncmp(combinations[i], policy->name, length) == 0 && combinations[i][length] == '[')
            snprintf(texts[n++], TEXT_SIZE, "%s", combinations[i]);
    }
    assert_true(n < TEXTS_MOST);
    return n;
}

#endif
