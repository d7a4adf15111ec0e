/* UltraEP's quota solver: which replicas, where, for how many rows (balancing-systems.md 8.2). */
#include "sim/policy/parts.h"

#include <string.h>

struct mz_replicate {
    int32_t ranks, experts, domains;
    int32_t *domain, *main_rank, *count;
    int32_t *first;           /* [R+1] mains of a rank are consecutive experts */
    int32_t *order;           /* [E] the mains of each rank by falling load */
    int64_t *load;            /* [R] */
    int32_t *member, members; /* ranks of the domain being solved, by falling load */
    /* one build */
    int64_t *slack;       /* [R] */
    int32_t *room;        /* [R] free replica slots */
    int32_t *hosts;       /* [R] the last expert placed on the rank */
    int32_t *open, opens; /* ranks with slack and a free slot */
    mz_replica *replica;
    int32_t replicas; /* of all domains */
};

mz_replicate_rule mz_replicate_defaults(void) {
    return (mz_replicate_rule){.eps = 0.01, .threshold = 1, .rows_min = 1024};
}

mz_code mz_replicate_create(mz_arena *arena, const mz_policy_env *env, int32_t slots,
                            mz_replicate **out, mz_err *err) {
    mz_replicate *p = MZ_NEW(arena, mz_replicate, 1);
    if (!p)
        return mz_fail_nomem(err, "the replica solver");
    int32_t R = env->ranks, E = env->experts;
    p->ranks = R;
    p->experts = E;
    p->domains = env->domains > 1 ? env->domains : 1;
    p->main_rank = MZ_NEW(arena, int32_t, E);
    p->count = MZ_NEW(arena, int32_t, E);
    p->first = MZ_NEW(arena, int32_t, R + 1);
    p->order = MZ_NEW(arena, int32_t, E);
    p->load = MZ_NEW(arena, int64_t, R);
    p->member = MZ_NEW(arena, int32_t, R);
    p->slack = MZ_NEW(arena, int64_t, R);
    p->room = MZ_NEW(arena, int32_t, R);
    p->hosts = MZ_NEW(arena, int32_t, R);
    p->open = MZ_NEW(arena, int32_t, R);
    p->replica = MZ_NEW(arena, mz_replica, (int64_t)R * slots + 1);
    if (!p->main_rank || !p->count || !p->first || !p->order || !p->load || !p->member ||
        !p->slack || !p->room || !p->hosts || !p->open || !p->replica)
        return mz_fail_nomem(err, "the replica solver");
    mz_layout_mains(R, E, p->main_rank);
    for (int32_t e = 0; e < E; e++)
        p->first[p->main_rank[e] + 1] = e + 1;
    for (int32_t r = 0; r < R; r++)
        if (p->first[r + 1] == 0)
            p->first[r + 1] = p->first[r];
    *out = p;
    return mz_copy_domains(env, arena, &p->domain, err);
}

/* Ranks of the domain and the mains of each, by falling load, ties by lower id. */
static void sort_loads(mz_replicate *p, int32_t domain, const int64_t *total) {
    p->members = 0;
    for (int32_t r = 0; r < p->ranks; r++) {
        if (domain >= 0 && p->domain[r] != domain)
            continue;
        p->load[r] = 0;
        for (int32_t e = p->first[r]; e < p->first[r + 1]; e++) {
            p->load[r] += total[e];
            int32_t at = e;
            for (; at > p->first[r] && total[p->order[at - 1]] < total[e]; at--)
                p->order[at] = p->order[at - 1];
            p->order[at] = e;
        }
        int32_t at = p->members++;
        for (; at > 0 && p->load[p->member[at - 1]] < p->load[r]; at--)
            p->member[at] = p->member[at - 1];
        p->member[at] = r;
    }
}

/* The open rank of largest slack (ties: lower id) that does not host e; -1 none. *candidates counts
 * all of them, *where is its place in the open list. */
static int32_t widest(const mz_replicate *p, int32_t e, int32_t *candidates, int32_t *where) {
    int32_t best = -1;
    *candidates = 0;
    for (int32_t k = 0; k < p->opens; k++) {
        int32_t r = p->open[k];
        if (p->hosts[r] == e)
            continue;
        ++*candidates;
        if (best < 0 || p->slack[r] > p->slack[best] ||
            (p->slack[r] == p->slack[best] && r < best)) {
            best = r;
            *where = k;
        }
    }
    return best;
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Gives away rows of expert e while its rank needs it; what the rank still needs afterwards. */
static int64_t export_expert(mz_replicate *p, int32_t e, int64_t avail, int64_t need,
                             int64_t floor_rows) {
    while (need > 0 && avail > 0) {
        int32_t candidates, where = 0;
        int32_t t = widest(p, e, &candidates, &where);
        if (t < 0)
            break;
        int64_t least_rows =
            floor_rows ? floor_rows : (need + candidates - 1) / candidates; /* dynamic */
        int64_t rows = least(least(need, p->slack[t]), avail);
        if (rows < least_rows)
            break;
        p->replica[p->replicas++] = (mz_replica){e, t, rows};
        p->slack[t] -= rows;
        p->hosts[t] = e;
        if (--p->room[t] == 0 || p->slack[t] == 0)
            p->open[where] = p->open[--p->opens];
        need -= rows;
        avail -= rows;
    }
    return need;
}

/* The feasibility oracle: a plan with no rank above T. floor_rows 0: the dynamic floor. Replicas
 * are appended; on failure they are taken back. */
static bool build(mz_replicate *p, const mz_replicate_rule *rule, int32_t extra,
                  const int64_t *total, int64_t T, int64_t floor_rows) {
    int32_t start = p->replicas;
    int64_t excess = 0, slack = 0;
    p->opens = 0;
    for (int32_t k = 0; k < p->members; k++) {
        int32_t r = p->member[k];
        int64_t over = p->load[r] - T;
        excess += over > 0 ? over : 0;
        p->slack[r] = over < 0 ? -over : 0;
        slack += p->slack[r];
        p->room[r] = extra;
        p->hosts[r] = -1;
        if (p->slack[r] > 0 && extra > 0)
            p->open[p->opens++] = r;
    }
    if (excess > slack)
        return false;
    for (int32_t k = 0; k < p->members && p->load[p->member[k]] > T; k++) {
        int32_t r = p->member[k];
        int64_t need = p->load[r] - T;
        for (int32_t i = p->first[r]; i < p->first[r + 1] && need > 0; i++) {
            int32_t e = p->order[i];
            int64_t avail = total[e] - (total[e] > 0 && !rule->empty_mains);
            need = export_expert(p, e, avail, need, floor_rows);
        }
        if (need > 0) {
            p->replicas = start;
            return false;
        }
    }
    return true;
}

/* Lowest feasible level in (low, high] by the source's four probes per round; high is feasible. */
static void probe_levels(mz_replicate *p, const mz_replicate_rule *rule, int32_t extra,
                         const int64_t *total, int64_t low, int64_t high) {
    int32_t start = p->replicas;
    while (high - low > 1) {
        int64_t range = high - low, base = low;
        for (int w = 1; w <= 4; w++) {
            int64_t T = range <= 4 ? base + w : base + range * w / 5;
            if (T >= high)
                break;
            p->replicas = start;
            if (build(p, rule, extra, total, T, rule->rows_min)) {
                high = T;
                break;
            }
            low = T;
        }
    }
    p->replicas = start;
    build(p, rule, extra, total, high, rule->rows_min);
}

static void solve_domain(mz_replicate *p, const mz_replicate_rule *rule, int32_t extra,
                         const int64_t *total) {
    int64_t sum = 0;
    for (int32_t k = 0; k < p->members; k++)
        sum += p->load[p->member[k]];
    double ratio = rule->threshold > 1 ? rule->threshold : 1;
    int64_t low = (sum + p->members - 1) / p->members;
    if (ratio > 1)
        low = mz_rows_up((double)sum / p->members * ratio);
    int64_t high = p->load[p->member[0]] > low ? p->load[p->member[0]] : low;
    if (high == p->load[p->member[p->members - 1]] || high == low)
        return; /* nobody is above the level */
    int64_t T = mz_rows_up((double)low * (1 + rule->eps));
    for (int i = 0; i < 3; i++) {
        T = T < high ? T : high;
        if (build(p, rule, extra, total, T, 0))
            return;
        T += (high + 99) / 100;
    }
    /* Excess fits slack from the mean on, so the source's coarse search ends at `low`. */
    if (!build(p, rule, extra, total, low, rule->rows_min))
        probe_levels(p, rule, extra, total, low, high);
}

int32_t mz_replicate_solve(mz_replicate *p, const mz_replicate_rule *rule, int32_t extra,
                           const int64_t *total, const mz_replica **replica) {
    p->replicas = 0;
    int32_t domains = rule->whole_group ? 1 : p->domains;
    for (int32_t d = 0; d < domains && extra > 0; d++) {
        sort_loads(p, domains > 1 ? d : -1, total);
        if (p->members > 0)
            solve_domain(p, rule, extra, total);
    }
    *replica = p->replica;
    return p->replicas;
}

mz_code mz_replicate_plan(mz_replicate *p, const mz_replicate_rule *rule, int32_t extra,
                          const int64_t *total, mz_plan *plan, mz_err *err) {
    const mz_replica *replica;
    int32_t replicas = mz_replicate_solve(p, rule, extra, total, &replica);
    return mz_plan_hosts(plan, p->main_rank, total, replica, replicas, p->count, err);
}
