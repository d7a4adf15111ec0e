/* Traffic when a token crosses once per destination rank or node (DESIGN section 4, --dispatch).
 *
 * Plans assign numbers of pairs, not pairs. Which pair goes where is fixed by one rule: the pairs
 * of (source, expert), in token order, fill that source's entries of the expert's instances in
 * order; when fewer are assigned than there are (drops, quotas), those left out are spread evenly
 * over the order: pair j of n takes part when floor((j+1) a / n) > floor(j a / n), a being the
 * number assigned. Where the policy strides its pairs (traits.strided_pairs) and all are assigned,
 * the pairs fill the entries in that order instead.
 *
 * Dispatch by node: a token crosses once to each other domain, to the rank there with the sender's
 * place in its domain (its rail), and goes on from there inside the domain, once per rank. */
#include "sim/step/inside.h"

#include <stdlib.h>
#include <string.h>

/* Entries by (source, expert) in instance order. */
static mz_code sort_entries(mz_step *s, const mz_plan *plan, step_entries in, mz_err *err) {
    const int64_t cells = (int64_t)s->ep * plan->experts;
    const int32_t instances = plan->begin[plan->experts];
    const size_t entries = (size_t)in.begin[instances];
    size_t cap = s->entry_cap;
    if (!mz_grow((void **)&s->cell, &s->cell_cap, (size_t)cells + 2, sizeof *s->cell) ||
        !mz_grow((void **)&s->cell_rank, &cap, entries, sizeof *s->cell_rank) ||
        !mz_grow((void **)&s->cell_pairs, &s->entry_cap, entries, sizeof *s->cell_pairs))
        return mz_fail_nomem(err, "the assignment of pairs to ranks");
    int64_t *cell = s->cell + 1;
    memset(s->cell, 0, sizeof *cell * (size_t)(cells + 2));
    for (int32_t e = 0; e < plan->experts; e++)
        for (int64_t k = in.begin[plan->begin[e]]; k < in.begin[plan->begin[e + 1]]; k++)
            cell[(int64_t)in.source[k] * plan->experts + e + 1]++;
    for (int64_t c = 0; c < cells; c++)
        cell[c + 1] += cell[c];
    /* cell[c] is where cell c starts; filling moves it to where c + 1 starts, which s->cell[c + 1]
     * (the same array, one later) then names. */
    for (int32_t e = 0; e < plan->experts; e++)
        for (int32_t i = plan->begin[e]; i < plan->begin[e + 1]; i++)
            for (int64_t k = in.begin[i]; k < in.begin[i + 1]; k++) {
                const int64_t at = cell[(int64_t)in.source[k] * plan->experts + e]++;
                s->cell_rank[at] = plan->rank[i];
                s->cell_pairs[at] = in.pairs[k];
            }
    return MZ_OK;
}

/* Walks one source's pairs: what is left of the current entry of each expert. */
typedef struct cursor {
    int64_t entry, end, left; /* entry in use, end of the cell, pairs left in the entry */
    int64_t seen, all, assigned;
    mz_stride stride; /* pairs 0: in order */
} cursor;

static void open_cursors(const mz_step *s, const mz_load *load, int32_t source, cursor *at) {
    for (int32_t e = 0; e < load->experts; e++) {
        const int64_t c = (int64_t)source * load->experts + e;
        cursor *u = &at[e];
        *u = (cursor){.entry = s->cell[c], .end = s->cell[c + 1], .all = load->count[c]};
        for (int64_t k = u->entry; k < u->end; k++)
            u->assigned += s->cell_pairs[k];
        u->left = u->entry < u->end ? s->cell_pairs[u->entry] : 0;
        if (s->traits.strided_pairs && u->end - u->entry > 1 && u->assigned == u->all)
            u->stride = mz_stride_of(u->all, e);
    }
}

static int32_t strided_rank(const mz_step *s, const cursor *u, int64_t pair) {
    int64_t place = mz_stride_place(&u->stride, pair), k = u->entry;
    for (; k + 1 < u->end && place >= s->cell_pairs[k]; k++)
        place -= s->cell_pairs[k];
    return s->cell_rank[k];
}

/* Rank of the expert's next pair, -1 when it takes no part. */
static inline int32_t next_rank(const mz_step *s, cursor *u) {
    const int64_t j = u->seen++;
    if (u->stride.pairs > 0)
        return strided_rank(s, u, j);
    if (u->all <= 0 || (j + 1) * u->assigned / u->all <= j * u->assigned / u->all)
        return -1;
    while (u->left == 0 && u->entry + 1 < u->end)
        u->left = s->cell_pairs[++u->entry];
    if (u->left == 0)
        return -1;
    u->left--;
    return s->cell_rank[u->entry];
}

typedef struct spreader {
    mz_step *s;
    step_spread to;
} spreader;

static step_lanes *lanes_of(const spreader *p, int32_t rank) {
    if (p->to.part)
        return &p->to.part[(int64_t)rank * p->s->chunks + p->to.chunk].lanes;
    return p->to.backward ? &p->to.work[rank].backward : &p->to.work[rank].forward;
}

/* Rows src -> dst (global ranks) on the ports they use. */
static void lane_rows(const mz_step *s, int32_t src, int32_t dst, int64_t rows, step_lanes *from,
                      step_lanes *to) {
    const mz_topology *t = &s->cluster->topology;
    if (t->device[src] == t->device[dst]) {
        from->copied += rows;
    } else if (t->domain[src] == t->domain[dst]) {
        from->send_in += rows;
        to->recv_in += rows;
    } else {
        from->send_out += rows;
        to->recv_out += rows;
    }
}

static void hop(const spreader *p, int32_t from, int32_t to) {
    if (from == to)
        return;
    lane_rows(p->s, p->to.first + from, p->to.first + to, 1, lanes_of(p, from), lanes_of(p, to));
    if (!p->to.part)
        *(p->to.backward ? &p->to.call->back_off_rows : &p->to.call->off_rows) += 1;
    if (p->s->matrix)
        p->s->matrix[(int64_t)from * p->s->ep + to]++;
}

/* A row of `source` in its send buffer. */
static void packed(const spreader *p, int32_t source) {
    if (!p->to.part)
        *(p->to.backward ? &p->to.work[source].back_packed : &p->to.work[source].packed) += 1;
}

/* First rank (local) of the domain of `rank` and how many of the group's ranks are in it. */
static void domain_range(const mz_step *s, int32_t first, int32_t rank, int32_t *low,
                         int32_t *count) {
    const int32_t *domain = s->cluster->topology.domain + first;
    int32_t a = rank, b = rank;
    while (a > 0 && domain[a - 1] == domain[rank])
        a--;
    while (b + 1 < s->ep && domain[b + 1] == domain[rank])
        b++;
    *low = a;
    *count = b - a + 1;
}

/* The token of `source` goes to `rank`; `mark` is this token's stamp. */
static void reach(const spreader *p, int32_t source, int32_t rank, int64_t mark) {
    mz_step *s = p->s;
    if (s->stamp[rank] == mark)
        return;
    s->stamp[rank] = mark;
    const int32_t *domain = s->cluster->topology.domain + p->to.first;
    if (s->options.dispatch == MZ_DISPATCH_RANK || domain[source] == domain[rank]) {
        packed(p, source);
        hop(p, source, rank);
        return;
    }
    int32_t low, count, own_low, own_count;
    domain_range(s, p->to.first, rank, &low, &count);
    domain_range(s, p->to.first, source, &own_low, &own_count);
    const int32_t entry = low + (source - own_low) % count;
    int64_t *node = s->stamp + s->ep;
    if (node[low] != mark) {
        node[low] = mark;
        packed(p, source);
        hop(p, source, entry);
    }
    hop(p, entry, rank);
}

mz_code step_spread_tokens(mz_step *s, const mz_load *load, const mz_pairs *pairs,
                           const mz_plan *plan, step_entries entries, const step_spread *to,
                           mz_err *err) {
    mz_code code = sort_entries(s, plan, entries, err);
    if (code != MZ_OK)
        return code;
    cursor *at = mz_calloc((size_t)load->experts, sizeof *at);
    if (!at)
        return mz_fail_nomem(err, "the assignment of pairs to ranks");
    const spreader p = {s, *to};
    int64_t mark = 0;
    memset(s->stamp, 0, sizeof *s->stamp * (size_t)(2 * s->ep));
    for (int32_t source = 0; source < s->ep; source++) {
        open_cursors(s, load, source, at);
        int64_t pair = pairs->pair_begin[source];
        const int64_t first = pairs->token_begin[source], end = pairs->token_begin[source + 1];
        const int64_t from = to->part ? first + (end - first) * to->chunk / s->chunks : first;
        const int64_t until = to->part ? first + (end - first) * (to->chunk + 1) / s->chunks : end;
        for (int64_t t = first; t < until; t++) {
            const int32_t chosen = pairs->top_k > 0 ? pairs->top_k : pairs->token_pairs[t];
            mark++;
            for (int32_t k = 0; k < chosen; k++, pair++) {
                const int32_t rank = next_rank(s, &at[pairs->expert[pair]]);
                if (rank >= 0 && t >= from)
                    reach(&p, source, rank, mark);
            }
        }
    }
    free(at);
    return MZ_OK;
}
