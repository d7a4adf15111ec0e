/* A plan: storage, reset, legality. */
#include "sim/policy/parts.h"

#include <stdlib.h>
#include <string.h>

/* Experts whose columns are checked or spread together: one cache line of a row of counts. */
enum { BLOCK = 8 };

static void *array(size_t count, size_t size, bool *failed) {
    void *p = mz_calloc(count, size);
    *failed = *failed || !p;
    return p;
}

mz_code mz_plan_create(int32_t ranks, int32_t experts, int32_t slots, mz_plan **out, mz_err *err) {
    *out = NULL;
    /* Every slot holds an instance (SYMI), or mains and free replicas: a policy that fills ranks to
     * a level adds at most one instance per expert or rank exhausted, on either side. */
    int64_t filled = (int64_t)ranks * slots, free_form = 3 * (int64_t)experts + 2 * (int64_t)ranks;
    int64_t instances = filled > free_form ? filled : free_form;
    if (ranks < 1 || experts < 1 || slots < 0 || instances > INT32_MAX / 4)
        return mz_fail(err, MZ_EINTERNAL, "no plan for %d ranks, %d experts, %d slots", ranks,
                       experts, slots);
    mz_plan *plan = mz_calloc(1, sizeof *plan);
    if (!plan)
        return mz_fail_nomem(err, "a plan");
    plan->ranks = ranks;
    plan->experts = experts;
    plan->instance_cap = (int32_t)instances;
    plan->move_cap = (int32_t)(3 * instances + 16);
    plan->entry_cap = (int64_t)ranks * instances;
    size_t i = (size_t)instances, n = (size_t)plan->entry_cap;
    size_t cells = (size_t)ranks * (size_t)experts;
    bool failed = false;
    plan->begin = array((size_t)experts + 1, sizeof(int32_t), &failed);
    plan->rank = array(i, sizeof(int32_t), &failed);
    plan->target = array(i, sizeof(int64_t), &failed);
    plan->forward = array(i, sizeof(int64_t), &failed);
    plan->entry_begin = array(i + 1, sizeof(int64_t), &failed);
    plan->entry_source = array(n, sizeof(int32_t), &failed);
    plan->entry_pairs = array(n, sizeof(int64_t), &failed);
    plan->backward = array(i, sizeof(int64_t), &failed);
    plan->back_begin = array(i + 1, sizeof(int64_t), &failed);
    plan->back_source = array(n, sizeof(int32_t), &failed);
    plan->back_pairs = array(n, sizeof(int64_t), &failed);
    plan->quota = array((size_t)experts, sizeof(int64_t), &failed);
    plan->kept = array(cells, sizeof(int64_t), &failed);
    plan->dropped = array(cells, sizeof(int64_t), &failed);
    plan->move = array((size_t)plan->move_cap, sizeof(mz_move), &failed);
    plan->scratch = array((size_t)ranks * BLOCK, sizeof(int64_t), &failed);
    if (failed) {
        mz_plan_free(&plan);
        return mz_fail_nomem(err, "a plan");
    }
    *out = plan;
    return MZ_OK;
}

void mz_plan_free(mz_plan **plan) {
    if (!*plan)
        return;
    void *arrays[] = {
        (*plan)->begin,       (*plan)->rank,         (*plan)->target,      (*plan)->forward,
        (*plan)->entry_begin, (*plan)->entry_source, (*plan)->entry_pairs, (*plan)->backward,
        (*plan)->back_begin,  (*plan)->back_source,  (*plan)->back_pairs,  (*plan)->quota,
        (*plan)->kept,        (*plan)->dropped,      (*plan)->move,        (*plan)->scratch};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    free(*plan);
    *plan = NULL;
}

void mz_plan_reset(mz_plan *plan) {
    memset(plan->begin, 0, sizeof(int32_t) * ((size_t)plan->experts + 1));
    plan->entry_begin[0] = plan->back_begin[0] = 0;
    plan->has_backward = plan->has_drops = plan->over_budget = false;
    plan->pairs = plan->dropped_pairs = plan->kept_pairs = 0;
    plan->kept_score = plan->total_score = 0;
    plan->moves = 0;
    plan->peak_forward = plan->peak_backward = 0;
    plan->why[0] = 0;
}

static void copy_entries(const int64_t *rows, const int64_t *begin, const int32_t *source,
                         const int64_t *pairs, int32_t instances, mz_entries to) {
    const size_t n = (size_t)instances, entries = (size_t)begin[n];
    memcpy(to.total, rows, sizeof *rows * n);
    memcpy(to.begin, begin, sizeof *begin * (n + 1));
    memcpy(to.source, source, sizeof *source * entries);
    memcpy(to.pairs, pairs, sizeof *pairs * entries);
}

mz_code mz_plan_copy(const mz_plan *from, mz_plan *to, mz_err *err) {
    const int32_t instances = from->begin[from->experts];
    const size_t cells = (size_t)from->ranks * (size_t)from->experts;
    if (to->ranks != from->ranks || to->experts != from->experts ||
        to->instance_cap != from->instance_cap)
        return mz_fail(err, MZ_EINTERNAL,
                       "a plan for %d ranks, %d experts copied to one for %d, %d", from->ranks,
                       from->experts, to->ranks, to->experts);
    /* The arrays of `to` under the figures of `from`. */
    mz_plan copy = *from;
    copy.begin = to->begin, copy.rank = to->rank, copy.target = to->target;
    copy.forward = to->forward, copy.entry_begin = to->entry_begin;
    copy.entry_source = to->entry_source, copy.entry_pairs = to->entry_pairs;
    copy.backward = to->backward, copy.back_begin = to->back_begin;
    copy.back_source = to->back_source, copy.back_pairs = to->back_pairs;
    copy.quota = to->quota, copy.kept = to->kept, copy.dropped = to->dropped;
    copy.move = to->move, copy.scratch = to->scratch;
    *to = copy;
    memcpy(to->begin, from->begin, sizeof *to->begin * ((size_t)from->experts + 1));
    memcpy(to->rank, from->rank, sizeof *to->rank * (size_t)instances);
    memcpy(to->target, from->target, sizeof *to->target * (size_t)instances);
    memcpy(to->quota, from->quota, sizeof *to->quota * (size_t)from->experts);
    memcpy(to->move, from->move, sizeof *to->move * (size_t)from->moves);
    copy_entries(from->forward, from->entry_begin, from->entry_source, from->entry_pairs, instances,
                 mz_plan_forward_entries(to));
    if (from->has_backward) {
        copy_entries(from->backward, from->back_begin, from->back_source, from->back_pairs,
                     instances, mz_plan_backward_entries(to));
        memcpy(to->kept, from->kept, sizeof *to->kept * cells);
    }
    if (from->has_drops)
        memcpy(to->dropped, from->dropped, sizeof *to->dropped * cells);
    return MZ_OK;
}

mz_code mz_plan_add_move(mz_plan *plan, mz_move move, mz_err *err) {
    if (plan->moves >= plan->move_cap)
        return mz_fail(err, MZ_EINTERNAL, "a plan with room for %d moves is full", plan->move_cap);
    plan->move[plan->moves++] = move;
    return MZ_OK;
}

void mz_plan_lossless(mz_plan *plan, const mz_load *load) {
    plan->pairs = plan->kept_pairs = load->pairs;
    memcpy(plan->quota, load->total, sizeof(int64_t) * (size_t)plan->experts);
}

static int64_t peak_of(const mz_plan *plan, const int64_t *total) {
    int64_t *load = plan->scratch, peak = 0;
    memset(load, 0, sizeof(int64_t) * (size_t)plan->ranks);
    for (int32_t i = 0; i < plan->begin[plan->experts]; i++)
        load[plan->rank[i]] += total[i];
    for (int32_t r = 0; r < plan->ranks; r++)
        peak = load[r] > peak ? load[r] : peak;
    return peak;
}

void mz_plan_peaks(mz_plan *plan) {
    plan->peak_forward = peak_of(plan, plan->forward);
    plan->peak_backward = plan->has_backward ? peak_of(plan, plan->backward) : plan->peak_forward;
}

mz_entries mz_plan_forward_entries(mz_plan *plan) {
    return (mz_entries){plan->forward, plan->entry_begin, plan->entry_source, plan->entry_pairs};
}

mz_entries mz_plan_backward_entries(mz_plan *plan) {
    return (mz_entries){plan->backward, plan->back_begin, plan->back_source, plan->back_pairs};
}

/* ---- legality
 * ----------------------------------------------------------------------------------*/

static mz_code check_hosts(const mz_plan *plan, const mz_policy_traits *traits, mz_err *err) {
    int32_t instances = plan->begin[plan->experts];
    if (plan->begin[0] != 0 || instances > plan->instance_cap)
        return mz_fail(err, MZ_EINTERNAL, "%d instances in a plan with room for %d", instances,
                       plan->instance_cap);
    for (int32_t e = 0; e < plan->experts; e++)
        if (plan->begin[e + 1] < plan->begin[e])
            return mz_fail(err, MZ_EINTERNAL, "expert %d has a negative number of hosts", e);
    int64_t *used = plan->scratch;
    memset(used, 0, sizeof(int64_t) * (size_t)plan->ranks);
    for (int32_t i = 0; i < instances; i++) {
        int32_t r = plan->rank[i];
        if (r < 0 || r >= plan->ranks)
            return mz_fail(err, MZ_EINTERNAL, "instance %d is on rank %d of %d", i, r, plan->ranks);
        used[r]++;
    }
    for (int32_t r = 0; r < plan->ranks && !traits->free_replicas && !traits->open_slots; r++)
        if (used[r] > traits->slots)
            return mz_fail(err, MZ_EINTERNAL, "rank %d holds %lld instances in %d slots", r,
                           (long long)used[r], traits->slots);
    return MZ_OK;
}

/* Adds the entries of one expert to seen[s * BLOCK + column]; their sums must be `total`. */
static mz_code add_entries(const mz_plan *plan, mz_entries in, int32_t e, int32_t column,
                           const char *phase, mz_err *err) {
    int64_t *seen = plan->scratch;
    for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++) {
        int64_t sum = 0;
        if (in.begin[i + 1] < in.begin[i] || in.begin[i + 1] > plan->entry_cap)
            return mz_fail(err, MZ_EINTERNAL, "instance %d has a broken %s entry list", i, phase);
        for (int64_t j = in.begin[i]; j < in.begin[i + 1]; j++) {
            if (in.source[j] < 0 || in.source[j] >= plan->ranks || in.pairs[j] < 0)
                return mz_fail(err, MZ_EINTERNAL, "%s entry of expert %d: source %d, %lld pairs",
                               phase, e, in.source[j], (long long)in.pairs[j]);
            seen[in.source[j] * BLOCK + column] += in.pairs[j];
            sum += in.pairs[j];
        }
        if (sum != in.total[i])
            return mz_fail(err, MZ_EINTERNAL,
                           "%s entries of instance %d (expert %d) sum to %lld, its total is %lld",
                           phase, i, e, (long long)sum, (long long)in.total[i]);
    }
    return MZ_OK;
}

/* Every pair of experts [e0, e1) is carried once in `in`, or dropped (forward), or not kept. */
static mz_code check_block(const mz_plan *plan, const mz_load *load, mz_entries in, int32_t e0,
                           int32_t e1, bool backward, mz_err *err) {
    int64_t *seen = plan->scratch;
    const char *phase = backward ? "backward" : "forward";
    memset(seen, 0, sizeof(int64_t) * (size_t)plan->ranks * BLOCK);
    for (int32_t e = e0; e < e1; e++) {
        mz_code code = add_entries(plan, in, e, e - e0, phase, err);
        if (code != MZ_OK)
            return code;
    }
    for (int32_t s = 0; s < plan->ranks; s++)
        for (int32_t e = e0; e < e1; e++) {
            int64_t cell = (int64_t)s * plan->experts + e;
            int64_t drop = plan->has_drops ? plan->dropped[cell] : 0;
            int64_t want = backward ? plan->kept[cell] : load->count[cell] - drop;
            int64_t got = seen[(int64_t)s * BLOCK + (e - e0)];
            if (drop < 0 || drop > load->count[cell])
                return mz_fail(err, MZ_EINTERNAL, "source %d drops %lld of %lld pairs of expert %d",
                               s, (long long)drop, (long long)load->count[cell], e);
            if (backward && (want < 0 || want > load->count[cell] - drop))
                return mz_fail(err, MZ_EINTERNAL, "source %d keeps %lld of %lld pairs of expert %d",
                               s, (long long)want, (long long)(load->count[cell] - drop), e);
            if (got != want)
                return mz_fail(err, MZ_EINTERNAL,
                               "%s: source %d, expert %d: %lld pairs assigned, %lld to assign",
                               phase, s, e, (long long)got, (long long)want);
        }
    return MZ_OK;
}

static mz_code check_quotas(const mz_plan *plan, const mz_load *load, mz_err *err) {
    mz_entries in = plan->has_backward ? mz_plan_backward_entries((mz_plan *)plan) /* read only */
                                       : mz_plan_forward_entries((mz_plan *)plan);
    int64_t kept = 0;
    for (int32_t e = 0; e < plan->experts; e++) {
        int64_t sum = 0;
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            sum += in.total[i];
        if (plan->quota[e] != sum || sum > load->total[e])
            return mz_fail(err, MZ_EINTERNAL,
                           "expert %d: quota %lld, %lld pairs in backward, %lld in the load", e,
                           (long long)plan->quota[e], (long long)sum, (long long)load->total[e]);
        kept += sum;
    }
    if (plan->kept_pairs != kept)
        return mz_fail(err, MZ_EINTERNAL, "kept_pairs is %lld, the plan keeps %lld",
                       (long long)plan->kept_pairs, (long long)kept);
    return MZ_OK;
}

static mz_code check_totals(const mz_plan *plan, const mz_load *load, mz_err *err) {
    int64_t dropped = 0;
    for (int64_t i = 0; plan->has_drops && i < (int64_t)plan->ranks * plan->experts; i++)
        dropped += plan->dropped[i];
    if (plan->pairs != load->pairs || plan->dropped_pairs != dropped)
        return mz_fail(err, MZ_EINTERNAL,
                       "the plan counts %lld pairs, %lld dropped; it is %lld, %lld",
                       (long long)plan->pairs, (long long)plan->dropped_pairs,
                       (long long)load->pairs, (long long)dropped);
    return MZ_OK;
}

static mz_code check_moves(const mz_plan *plan, mz_err *err) {
    for (int32_t i = 0; i < plan->moves; i++) {
        const mz_move *m = &plan->move[i];
        bool ends = m->src >= MZ_EVERY_RANK && m->src < plan->ranks && m->dst >= MZ_EVERY_RANK &&
                    m->dst < plan->ranks && !(m->src == MZ_EVERY_RANK && m->dst == MZ_EVERY_RANK);
        if (!ends || m->bytes < 0 || m->expert < 0 || m->expert >= plan->experts || m->round < 0)
            return mz_fail(err, MZ_EINTERNAL, "move %d: expert %d, rank %d to %d, %lld bytes", i,
                           m->expert, m->src, m->dst, (long long)m->bytes);
    }
    return MZ_OK;
}

mz_code mz_plan_check(const mz_plan *plan, const mz_load *load, const mz_policy_traits *traits,
                      mz_err *err) {
    if (load->sources != plan->ranks || load->experts != plan->experts)
        return mz_fail(err, MZ_EINTERNAL, "a plan for %d ranks, %d experts; a load of %d, %d",
                       plan->ranks, plan->experts, load->sources, load->experts);
    mz_code code = check_hosts(plan, traits, err);
    mz_entries forward = mz_plan_forward_entries((mz_plan *)plan); /* read only */
    mz_entries backward = mz_plan_backward_entries((mz_plan *)plan);
    for (int32_t e0 = 0; code == MZ_OK && e0 < plan->experts; e0 += BLOCK) {
        int32_t e1 = e0 + BLOCK < plan->experts ? e0 + BLOCK : plan->experts;
        code = check_block(plan, load, forward, e0, e1, false, err);
        if (code == MZ_OK && plan->has_backward)
            code = check_block(plan, load, backward, e0, e1, true, err);
    }
    if (code == MZ_OK)
        code = check_quotas(plan, load, err);
    if (code == MZ_OK)
        code = check_totals(plan, load, err);
    return code == MZ_OK ? check_moves(plan, err) : code;
}
