/* From rows per instance to rows per (source, instance): the sparse assignment q of a plan. */
#include "sim/policy/parts.h"

#include <string.h>

/* Columns of the row matrix are copied BLOCK at a time: one cache line per source. */
enum { BLOCK = 8 };

struct mz_expand {
    int32_t ranks, experts, domains, hosts;
    int32_t *domain;
    int32_t *member, *member_begin; /* ranks by domain */
    int64_t *block;                 /* [BLOCK][S] */
    int64_t *matrix;                /* [hosts][S] rows of one expert */
    int64_t *room, *share, *sorted; /* [hosts] */
    uint64_t *key, *scratch;        /* [hosts] */
};

mz_code mz_expand_create(mz_arena *arena, const mz_policy_env *env, int32_t hosts, mz_expand **out,
                         mz_err *err) {
    mz_expand *x = MZ_NEW(arena, mz_expand, 1);
    if (!x)
        return mz_fail_nomem(err, "the expansion to sources");
    x->ranks = env->ranks;
    x->experts = env->experts;
    x->domains = env->domains > 1 ? env->domains : 1;
    x->hosts = hosts;
    x->member = MZ_NEW(arena, int32_t, env->ranks);
    x->member_begin = MZ_NEW(arena, int32_t, x->domains + 2);
    x->block = MZ_NEW(arena, int64_t, (int64_t)BLOCK * env->ranks);
    x->matrix = MZ_NEW(arena, int64_t, (int64_t)hosts * env->ranks);
    x->room = MZ_NEW(arena, int64_t, hosts);
    x->share = MZ_NEW(arena, int64_t, hosts);
    x->sorted = MZ_NEW(arena, int64_t, hosts);
    x->key = MZ_NEW(arena, uint64_t, hosts);
    x->scratch = MZ_NEW(arena, uint64_t, hosts);
    if (!x->member || !x->member_begin || !x->block || !x->matrix || !x->room || !x->share ||
        !x->sorted || !x->key || !x->scratch)
        return mz_fail_nomem(err, "the expansion to sources");
    mz_code code = mz_copy_domains(env, arena, &x->domain, err);
    if (code != MZ_OK)
        return code;
    int32_t *begin = x->member_begin + 1; /* counting sort with the usual shift by one */
    for (int32_t r = 0; r < x->ranks; r++)
        begin[x->domain[r]]++;
    for (int32_t d = 0, at = 0; d < x->domains; d++) {
        int32_t n = begin[d];
        begin[d] = at;
        at += n;
    }
    for (int32_t r = 0; r < x->ranks; r++)
        x->member[begin[x->domain[r]]++] = r;
    *out = x;
    return MZ_OK;
}

/* Moves up to *need rows of source s to a host. */
static void take(int64_t *rest, int64_t *need, int64_t *cell) {
    int64_t n = *rest < *need ? *rest : *need;
    *rest -= n;
    *need -= n;
    *cell += n;
}

/* First the rows whose source is the host itself; room[j] becomes what host j still takes. */
static void own_rows(mz_expand *x, const int32_t *host, int32_t m, int64_t *rest) {
    for (int32_t j = 0; j < m; j++)
        take(&rest[host[j]], &x->room[j], &x->matrix[(int64_t)j * x->ranks + host[j]]);
}

/* What the hosts still take, source after source. */
static void in_order(mz_expand *x, int32_t m, int64_t *rest) {
    int32_t s = 0;
    for (int32_t j = 0; j < m; j++)
        while (x->room[j] > 0 && s < x->ranks) {
            take(&rest[s], &x->room[j], &x->matrix[(int64_t)j * x->ranks + s]);
            s += rest[s] == 0;
        }
}

static void spread_exact(mz_expand *x, const int32_t *host, int32_t m, int64_t *rest) {
    own_rows(x, host, m, rest);
    for (int32_t j = 0; j < m && x->domains > 1; j++) {
        int32_t d = x->domain[host[j]];
        for (int32_t k = x->member_begin[d]; k < x->member_begin[d + 1] && x->room[j] > 0; k++) {
            int32_t s = x->member[k];
            take(&rest[s], &x->room[j], &x->matrix[(int64_t)j * x->ranks + s]);
        }
    }
    in_order(x, m, rest);
}

/* Ties go to the lower host rank, then the lower instance (8.4); hosts are in instance order, so
 * the shares are taken over the hosts sorted by rank. */
static void sort_hosts(const int32_t *host, int32_t m, uint64_t *key) {
    for (int32_t j = 0; j < m; j++) {
        uint64_t k = (uint64_t)host[j] << 32 | (uint32_t)j;
        int32_t at = j;
        for (; at > 0 && key[at - 1] > k; at--)
            key[at] = key[at - 1];
        key[at] = k;
    }
}

static void spread_share(mz_expand *x, const int32_t *host, int32_t m, int64_t *rest, bool local) {
    uint64_t *key = x->key;
    if (local)
        own_rows(x, host, m, rest);
    sort_hosts(host, m, key);
    for (int32_t j = 0; j < m; j++)
        x->sorted[j] = x->room[(uint32_t)key[j]];
    mz_shares shares = mz_shares_of(x->sorted, m);
    for (int32_t s = 0; s < x->ranks; s++) {
        if (rest[s] == 0)
            continue;
        mz_shares_split(&shares, rest[s], x->share, x->scratch);
        for (int32_t j = 0; j < m; j++)
            x->matrix[(int64_t)(uint32_t)key[j] * x->ranks + s] += x->share[j];
    }
}

static void spread_deal(mz_expand *x, int32_t m, const int64_t *rest) {
    int32_t first = 0; /* host of the source's first row */
    double inverse = 1.0 / m;
    for (int32_t s = 0; s < x->ranks; s++) {
        int64_t each = (int64_t)((double)rest[s] * inverse); /* off by one at most */
        each -= each * m > rest[s];
        each += (each + 1) * m <= rest[s];
        int32_t more = (int32_t)(rest[s] - each * m);
        for (int32_t j = 0; j < m; j++) {
            int32_t turn = j >= first ? j - first : j - first + m;
            x->matrix[(int64_t)j * x->ranks + s] = each + (turn < more);
        }
        first = first + more < m ? first + more : first + more - m;
    }
}

/* Every source alone: evenly over the hosts of its domain, or over all where there are none. */
static void spread_near(mz_expand *x, const int32_t *host, int32_t m, const int64_t *rest) {
    for (int32_t s = 0; s < x->ranks; s++) {
        if (rest[s] == 0)
            continue;
        int32_t near = 0;
        for (int32_t j = 0; j < m; j++)
            near += x->domain[host[j]] == x->domain[s];
        const int64_t each = rest[s] / (near > 0 ? near : m);
        int64_t more = rest[s] % (near > 0 ? near : m);
        for (int32_t j = 0; j < m; j++)
            if (near == 0 || x->domain[host[j]] == x->domain[s])
                x->matrix[(int64_t)j * x->ranks + s] = each + (more-- > 0);
    }
}

/* Copies columns e0.. of rows - minus into x->block, one column after the other. */
static void load_block(mz_expand *x, const int64_t *rows, const int64_t *minus, int32_t e0,
                       int32_t columns) {
    for (int32_t s = 0; s < x->ranks; s++) {
        const int64_t *row = rows + (int64_t)s * x->experts + e0;
        const int64_t *off = minus ? minus + (int64_t)s * x->experts + e0 : NULL;
        for (int32_t c = 0; c < columns; c++)
            x->block[(int64_t)c * x->ranks + s] = row[c] - (off ? off[c] : 0);
    }
}

/* Appends the non-zero rows of one instance; returns the new end of the list. */
static int64_t emit(const int64_t *rows, int32_t sources, int64_t at, int32_t instance,
                    mz_entries out) {
    int64_t sum = 0;
    out.begin[instance] = at;
    for (int32_t s = 0; s < sources; s++) {
        out.source[at] = s;
        out.pairs[at] = rows[s];
        sum += rows[s];
        at += rows[s] != 0;
    }
    out.total[instance] = sum;
    out.begin[instance + 1] = at;
    return at;
}

/* Every host takes the rows of its own rank: one entry each, no matrix. */
static int64_t emit_own(const int64_t *rows, const int32_t *host, int32_t m, int64_t at,
                        int32_t first, mz_entries out) {
    for (int32_t j = 0; j < m; j++) {
        out.begin[first + j] = at;
        out.source[at] = host[j];
        out.pairs[at] = out.total[first + j] = rows[host[j]];
        at += rows[host[j]] != 0;
        out.begin[first + j + 1] = at;
    }
    return at;
}

/* Fills the matrix of an expert with several hosts. */
static void spread_expert(mz_expand *x, const int32_t *host, int32_t m, int64_t *rest,
                          const int64_t *target, mz_spread spread) {
    memset(x->matrix, 0, sizeof(int64_t) * (size_t)m * (size_t)x->ranks);
    if (spread != MZ_SPREAD_DEAL && spread != MZ_SPREAD_NEAR)
        memcpy(x->room, target, sizeof(int64_t) * (size_t)m);
    switch (spread) {
    case MZ_SPREAD_EXACT:
        spread_exact(x, host, m, rest);
        break;
    case MZ_SPREAD_SHARE_LOCAL:
    case MZ_SPREAD_SHARE:
        spread_share(x, host, m, rest, spread == MZ_SPREAD_SHARE_LOCAL);
        break;
    case MZ_SPREAD_ORDER:
        in_order(x, m, rest);
        break;
    case MZ_SPREAD_NEAR:
        spread_near(x, host, m, rest);
        break;
    case MZ_SPREAD_DEAL:
        spread_deal(x, m, rest);
        break;
    case MZ_SPREAD_OWN: /* emitted without the matrix */
        break;
    }
}

static mz_code room_for(const mz_expand *x, const mz_plan *plan, int32_t e, int64_t at,
                        mz_err *err) {
    const int32_t m = plan->begin[e + 1] - plan->begin[e];
    if (m > x->hosts || at > plan->entry_cap - (int64_t)m * x->ranks)
        return mz_fail(err, MZ_EINTERNAL, "expert %d has %d hosts, more than expected", e, m);
    return MZ_OK;
}

mz_code mz_expand_rows(mz_expand *x, const mz_plan *plan, const int64_t *rows, const int64_t *minus,
                       const int64_t *target, mz_spread spread, mz_entries out, mz_err *err) {
    int64_t at = 0;
    out.begin[0] = 0;
    for (int32_t e0 = 0; e0 < x->experts; e0 += BLOCK) {
        int32_t columns = x->experts - e0 < BLOCK ? x->experts - e0 : BLOCK;
        load_block(x, rows, minus, e0, columns);
        for (int32_t c = 0; c < columns; c++) {
            int32_t first = plan->begin[e0 + c], m = plan->begin[e0 + c + 1] - first;
            int64_t *rest = x->block + (int64_t)c * x->ranks;
            mz_code code = room_for(x, plan, e0 + c, at, err);
            if (code != MZ_OK)
                return code;
            if (m > 1 && spread == MZ_SPREAD_OWN) {
                at = emit_own(rest, plan->rank + first, m, at, first, out);
                continue;
            }
            if (m > 1)
                spread_expert(x, plan->rank + first, m, rest, target ? target + first : NULL,
                              spread);
            for (int32_t j = 0; j < m; j++)
                at = emit(m > 1 ? x->matrix + (int64_t)j * x->ranks : rest, x->ranks, at, first + j,
                          out);
        }
    }
    return MZ_OK;
}

mz_code mz_expand_given(mz_expand *x, const mz_plan *plan, const int64_t *rows,
                        const int64_t *const *given, mz_entries out, mz_err *err) {
    int64_t at = 0;
    out.begin[0] = 0;
    for (int32_t e0 = 0; e0 < x->experts; e0 += BLOCK) {
        int32_t columns = x->experts - e0 < BLOCK ? x->experts - e0 : BLOCK;
        load_block(x, rows, NULL, e0, columns);
        for (int32_t c = 0; c < columns; c++) {
            mz_code code = room_for(x, plan, e0 + c, at, err);
            if (code != MZ_OK)
                return code;
            for (int32_t i = plan->begin[e0 + c]; i < plan->begin[e0 + c + 1]; i++)
                at = emit(given[i] ? given[i] : x->block + (int64_t)c * x->ranks, x->ranks, at, i,
                          out);
        }
    }
    return MZ_OK;
}

int64_t mz_common_divisor(int64_t a, int64_t b) {
    while (b > 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

mz_stride mz_stride_of(int64_t pairs, int32_t expert) {
    int64_t stride = pairs / 2 + 1 < pairs ? pairs / 2 + 1 : pairs - 1;
    while (mz_common_divisor(pairs, stride) != 1)
        stride++;
    return (mz_stride){pairs, stride, expert % pairs};
}

int64_t mz_stride_place(const mz_stride *stride, int64_t index) {
    return (index * stride->stride + stride->offset) % stride->pairs;
}
