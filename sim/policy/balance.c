/* Redistribution as a flow: experts send their rows to their hosts, ranks have caps.
 *
 * An expert with one host has no choice: its rows are fixed load of that rank. The others are
 * placed greedily and then completed by breadth-first augmenting paths, on which rows of other
 * experts move from a full rank to another of their hosts. Where no path exists, the ranks seen by
 * the search form a set A that is full, and every expert seen has all its hosts in A: no plan has a
 * peak below ceil((base(A) + rows of those experts) / |A|). So the least peak is found by starting
 * at the bound of the mean and raising it to the bound of each violated set: every value tried is a
 * lower bound, the first that can be carried is the optimum. */
#include "sim/policy/parts.h"

#include <string.h>

struct mz_balance {
    int32_t rank_cap, expert_cap, instance_cap;
    int32_t ranks, experts;
    const int32_t *begin, *rank;
    int32_t *expert;  /* [instances] */
    int32_t *several; /* experts with more than one host, ascending */
    int32_t severals;
    int32_t *by_rank;    /* instances of those experts, by rank */
    int32_t *rank_begin; /* [R+2] */
    int64_t *x;          /* [instances] */
    int64_t *cap, *room; /* [R] */
    int64_t *rest;       /* [E] rows of an expert not placed yet */
    /* search */
    int32_t *queue;  /* [R] */
    int32_t *into;   /* [R] instance through which a rank was reached, -1 not reached */
    int32_t *out_of; /* [E] instance whose rows would move, -1 not reached */
    int32_t reached;
};

mz_code mz_balance_create(mz_arena *arena, int32_t ranks, int32_t experts, int32_t instances,
                          mz_balance **out, mz_err *err) {
    mz_balance *b = MZ_NEW(arena, mz_balance, 1);
    if (!b)
        return mz_fail_nomem(err, "the redistribution");
    b->rank_cap = ranks;
    b->expert_cap = experts;
    b->instance_cap = instances;
    b->expert = MZ_NEW(arena, int32_t, instances);
    b->several = MZ_NEW(arena, int32_t, experts);
    b->by_rank = MZ_NEW(arena, int32_t, instances);
    b->rank_begin = MZ_NEW(arena, int32_t, ranks + 2);
    b->x = MZ_NEW(arena, int64_t, instances);
    b->cap = MZ_NEW(arena, int64_t, ranks);
    b->room = MZ_NEW(arena, int64_t, ranks);
    b->rest = MZ_NEW(arena, int64_t, experts);
    b->queue = MZ_NEW(arena, int32_t, ranks);
    b->into = MZ_NEW(arena, int32_t, ranks);
    b->out_of = MZ_NEW(arena, int32_t, experts);
    if (!b->expert || !b->several || !b->by_rank || !b->rank_begin || !b->x || !b->cap ||
        !b->room || !b->rest || !b->queue || !b->into || !b->out_of)
        return mz_fail_nomem(err, "the redistribution");
    *out = b;
    return MZ_OK;
}

mz_code mz_balance_hosts(mz_balance *b, int32_t ranks, int32_t experts, const int32_t *begin,
                         const int32_t *rank, mz_err *err) {
    if (ranks > b->rank_cap || experts > b->expert_cap || begin[experts] > b->instance_cap)
        return mz_fail(err, MZ_EINTERNAL,
                       "redistribution of %d ranks, %d experts, %d instances in a scratch for %d, "
                       "%d, %d",
                       ranks, experts, begin[experts], b->rank_cap, b->expert_cap, b->instance_cap);
    b->ranks = ranks;
    b->experts = experts;
    b->begin = begin;
    b->rank = rank;
    b->severals = 0;
    int32_t *at = b->rank_begin + 1; /* counting sort, shifted by one */
    memset(b->rank_begin, 0, sizeof(int32_t) * ((size_t)ranks + 2));
    for (int32_t e = 0; e < experts; e++) {
        for (int32_t i = begin[e]; i < begin[e + 1]; i++)
            b->expert[i] = e;
        if (begin[e + 1] - begin[e] < 2)
            continue;
        b->several[b->severals++] = e;
        for (int32_t i = begin[e]; i < begin[e + 1]; i++)
            at[rank[i] + 1]++;
    }
    for (int32_t r = 0; r < ranks; r++)
        at[r + 1] += at[r];
    for (int32_t k = 0; k < b->severals; k++)
        for (int32_t i = begin[b->several[k]]; i < begin[b->several[k] + 1]; i++)
            b->by_rank[at[rank[i]]++] = i;
    return MZ_OK;
}

/* Reaches all hosts of expert e that were not reached; returns one with room, or -1. */
static int32_t reach_hosts(mz_balance *b, int32_t e) {
    for (int32_t i = b->begin[e]; i < b->begin[e + 1]; i++) {
        int32_t r = b->rank[i];
        if (b->into[r] >= 0)
            continue;
        b->into[r] = i;
        if (b->room[r] > 0)
            return r;
        b->queue[b->reached++] = r;
    }
    return -1;
}

/* Breadth first from expert e0 to a rank with room; -1: none, and the ranks in queue[0..reached)
 * are a full set that holds every host of every expert reached. */
static int32_t find_room(mz_balance *b, int32_t e0) {
    memset(b->into, 0xff, sizeof(int32_t) * (size_t)b->ranks);
    memset(b->out_of, 0xff, sizeof(int32_t) * (size_t)b->experts);
    b->reached = 0;
    b->out_of[e0] = INT32_MAX;
    int32_t found = reach_hosts(b, e0);
    for (int32_t head = 0; found < 0 && head < b->reached; head++) {
        int32_t r = b->queue[head];
        for (int32_t k = b->rank_begin[r]; found < 0 && k < b->rank_begin[r + 1]; k++) {
            int32_t i = b->by_rank[k], e = b->expert[i];
            if (b->x[i] == 0 || b->out_of[e] >= 0)
                continue;
            b->out_of[e] = i;
            found = reach_hosts(b, e);
        }
    }
    return found;
}

/* Moves as many of `rows` as the path to rank `end` carries. */
static int64_t augment(mz_balance *b, int32_t e0, int32_t end, int64_t rows) {
    int64_t amount = rows < b->room[end] ? rows : b->room[end];
    int32_t r = end;
    for (int32_t e = b->expert[b->into[r]]; e != e0; e = b->expert[b->into[r]]) {
        int32_t from = b->out_of[e];
        amount = b->x[from] < amount ? b->x[from] : amount;
        r = b->rank[from];
    }
    b->room[end] -= amount;
    r = end;
    for (int32_t e = b->expert[b->into[r]];; e = b->expert[b->into[r]]) {
        b->x[b->into[r]] += amount;
        if (e == e0)
            return amount;
        b->x[b->out_of[e]] -= amount;
        r = b->rank[b->out_of[e]];
    }
}

int64_t mz_balance_push(mz_balance *b, int32_t e, int64_t rows) {
    int64_t left = rows;
    for (int32_t i = b->begin[e]; i < b->begin[e + 1] && left > 0; i++) {
        int64_t *room = &b->room[b->rank[i]];
        int64_t n = left < *room ? left : *room;
        b->x[i] += n;
        *room -= n;
        left -= n;
    }
    while (left > 0) {
        int32_t end = find_room(b, e);
        if (end < 0)
            break;
        left -= augment(b, e, end, left);
    }
    return rows - left;
}

void mz_balance_start(mz_balance *b, const int64_t *cap) {
    memcpy(b->room, cap, sizeof(int64_t) * (size_t)b->ranks);
    memset(b->x, 0, sizeof(int64_t) * (size_t)b->begin[b->experts]);
}

/* Caps minus base and the rows without choice; false, with that rank as the set reached, when they
 * alone are too much somewhere. */
static bool place_fixed(mz_balance *b, const int64_t *quota, const int64_t *base,
                        const int64_t *cap) {
    mz_balance_start(b, cap);
    for (int32_t r = 0; base && r < b->ranks; r++)
        b->room[r] -= base[r];
    for (int32_t e = 0; e < b->experts; e++) {
        if (b->begin[e + 1] - b->begin[e] != 1)
            continue;
        b->x[b->begin[e]] = quota[e];
        b->room[b->rank[b->begin[e]]] -= quota[e];
    }
    for (int32_t r = 0; r < b->ranks; r++)
        if (b->room[r] < 0)
            return false;
    for (int32_t k = 0; k < b->severals; k++)
        b->rest[b->several[k]] = quota[b->several[k]];
    return true;
}

/* Greedy stage: every host gets what it wishes (NULL: anything), rank by rank. */
static void place_wishes(mz_balance *b, const int64_t *wish) {
    for (int32_t r = 0; r < b->ranks; r++)
        for (int32_t k = b->rank_begin[r]; k < b->rank_begin[r + 1] && b->room[r] > 0; k++) {
            int32_t i = b->by_rank[k];
            int64_t n = b->rest[b->expert[i]];
            n = n < b->room[r] ? n : b->room[r];
            if (wish && wish[i] - b->x[i] < n)
                n = wish[i] > b->x[i] ? wish[i] - b->x[i] : 0;
            b->x[i] += n;
            b->rest[b->expert[i]] -= n;
            b->room[r] -= n;
        }
}

/* Completes the plan; the expert that does not fit, or -1. */
static int32_t place_rest(mz_balance *b) {
    for (int32_t k = 0; k < b->severals; k++) {
        int32_t e = b->several[k];
        b->rest[e] -= mz_balance_push(b, e, b->rest[e]);
        if (b->rest[e] > 0)
            return e;
    }
    return -1;
}

bool mz_balance_fits(mz_balance *b, const int64_t *quota, const int64_t *base, const int64_t *cap) {
    if (!place_fixed(b, quota, base, cap))
        return false;
    place_wishes(b, NULL);
    return place_rest(b) < 0;
}

/* The bound of the full set A that the failed search left (see the head of this file): the least
 * level at which its ranks, each up to its limit, take `unplaced` rows more; -1: there is none. */
static int64_t bound_of_set(const mz_balance *b, const int64_t *limit, int64_t level) {
    int64_t unplaced = 0;
    for (int32_t k = 0; k < b->severals; k++)
        if (b->out_of[b->several[k]] >= 0)
            unplaced += b->rest[b->several[k]];
    while (unplaced > 0) {
        int64_t growing = 0, step = INT64_MAX;
        for (int32_t k = 0; k < b->reached; k++) {
            int64_t more = limit ? limit[b->queue[k]] - level : INT64_MAX;
            growing += more > 0;
            step = more > 0 && more < step ? more : step;
        }
        if (growing == 0)
            return -1;
        int64_t even = (unplaced + growing - 1) / growing;
        step = even < step ? even : step;
        unplaced -= step * growing;
        level += step;
    }
    return level;
}

static int64_t lower_bound(const mz_balance *b, const int64_t *quota, const int64_t *base) {
    int64_t sum = 0, most = 0;
    for (int32_t r = 0; r < b->ranks; r++)
        sum += base ? base[r] : 0;
    for (int32_t e = 0; e < b->experts; e++)
        sum += quota[e];
    for (int32_t r = 0; r < b->ranks; r++) /* room holds minus the fixed rows: see caller */
        most = -b->room[r] > most ? -b->room[r] : most;
    int64_t mean = (sum + b->ranks - 1) / b->ranks;
    return mean > most ? mean : most;
}

mz_code mz_balance_spread(mz_balance *b, const int64_t *quota, const int64_t *base,
                          const int64_t *limit, const int64_t *local, const int64_t *near,
                          int64_t *x, int64_t *peak, mz_err *err) {
    for (int32_t e = 0; e < b->experts; e++)
        if (quota[e] < 0 || (quota[e] > 0 && b->begin[e + 1] == b->begin[e]))
            return mz_fail(err, MZ_EINTERNAL, "expert %d has %lld rows and %d hosts", e,
                           (long long)quota[e], b->begin[e + 1] - b->begin[e]);
    memset(b->cap, 0, sizeof(int64_t) * (size_t)b->ranks);
    place_fixed(b, quota, base, b->cap);
    int64_t level = lower_bound(b, quota, base);
    for (;;) {
        for (int32_t r = 0; r < b->ranks; r++)
            b->cap[r] = limit && limit[r] < level ? limit[r] : level;
        if (!place_fixed(b, quota, base, b->cap))
            return mz_fail(err, MZ_EINTERNAL, "redistribution beyond the limit of a rank");
        if (local)
            place_wishes(b, local);
        if (near)
            place_wishes(b, near);
        place_wishes(b, NULL);
        if (place_rest(b) < 0)
            break;
        level = bound_of_set(b, limit, level);
        if (level < 0)
            return mz_fail(err, MZ_EINTERNAL, "redistribution beyond the limits of the ranks");
    }
    if (x)
        memcpy(x, b->x, sizeof(int64_t) * (size_t)b->begin[b->experts]);
    *peak = level;
    return MZ_OK;
}

mz_code mz_balance_solve(mz_balance *b, int32_t ranks, int32_t experts, const int32_t *begin,
                         const int32_t *rank, const int64_t *quota, const int64_t *base, int64_t *x,
                         int64_t *peak, mz_err *err) {
    mz_code code = mz_balance_hosts(b, ranks, experts, begin, rank, err);
    return code == MZ_OK ? mz_balance_spread(b, quota, base, NULL, NULL, NULL, x, peak, err) : code;
}
