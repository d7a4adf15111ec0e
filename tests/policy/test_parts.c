/* Shared parts: shares, layout, redistribution, spreading, moves, table, legality. */
#include "fixture.h"

/* ---- largest remainder ------------------------------------------------------------------------*/

static void brute_shares(int64_t total, const int64_t *w, int32_t n, int64_t *share) {
    __int128 sum = 0;
    int64_t given = 0;
    for (int32_t i = 0; i < n; i++)
        sum += w[i];
    for (int32_t i = 0; i < n; i++) {
        share[i] = (int64_t)((__int128)total * w[i] / sum);
        given += share[i];
    }
    bool *done = calloc((size_t)n, sizeof(bool));
    for (; given < total; given++) {
        int32_t best = -1;
        __int128 most = -1;
        for (int32_t i = 0; i < n; i++) {
            __int128 rest = (__int128)total * w[i] % sum;
            if (!done[i] && rest > most) {
                most = rest;
                best = i;
            }
        }
        done[best] = true;
        share[best]++;
    }
    free(done);
}

static void shares_equal_the_rule(void **unused) {
    mz_rng rng = mz_rng_make(1, 1);
    int64_t w[70], mine[70], want[70];
    uint64_t scratch[70];
    for (int trial = 0; trial < 3000; trial++) {
        int32_t n = 1 + (int32_t)mz_rng_below(&rng, 70);
        /* the last kind leaves the fast path: products beyond 63 bits */
        uint64_t size = (uint64_t[]){3, 50, 1000000, 1ull << 50}[trial % 4];
        int64_t sum = 0;
        for (int32_t i = 0; i < n; i++)
            sum += w[i] = (int64_t)mz_rng_below(&rng, size);
        w[0] += sum == 0;
        sum += sum == 0;
        int64_t total = (int64_t)mz_rng_below(&rng, (uint64_t)sum + 1);
        brute_shares(total, w, n, want);
        mz_largest_remainder(total, w, n, mine, scratch);
        assert_memory_equal(mine, want, (size_t)n * sizeof *mine);
        mz_largest_remainder(total, w, n, w, scratch); /* in place */
        assert_memory_equal(w, want, (size_t)n * sizeof *w);
    }
    int64_t zero[4] = {0}, got[4];
    mz_largest_remainder(6, zero, 4, got, scratch);
    assert_memory_equal(got, ((int64_t[]){2, 2, 1, 1}), sizeof got);
    int64_t tie[3] = {1, 1, 1}; /* ties to the lower index */
    mz_largest_remainder(2, tie, 3, got, scratch);
    assert_memory_equal(got, ((int64_t[]){1, 1, 0}), 3 * sizeof *got);
}

/* ---- layout -----------------------------------------------------------------------------------*/

static void block_layout(void **unused) {
    int32_t main_rank[7];
    mz_layout_mains(2, 4, main_rank);
    assert_memory_equal(main_rank, ((int32_t[]){0, 0, 1, 1}), 4 * sizeof(int32_t));
    mz_layout_mains(3, 7, main_rank); /* the first E mod R ranks hold one more */
    assert_memory_equal(main_rank, ((int32_t[]){0, 0, 0, 1, 1, 2, 2}), sizeof main_rank);
    mz_layout_mains(5, 3, main_rank); /* more ranks than experts */
    assert_memory_equal(main_rank, ((int32_t[]){0, 1, 2}), 3 * sizeof(int32_t));
    assert_int_equal(mz_mains_per_rank(3, 7), 3);
    assert_int_equal(mz_mains_per_rank(5, 3), 1);
}

/* ---- redistribution ---------------------------------------------------------------------------*/

static void redistribution_vector(void **unused) {
    mz_arena arena = {0};
    mz_err err;
    mz_balance *b;
    int32_t begin[] = {0, 2, 3, 5}, rank[] = {0, 1, 1, 1, 2};
    int64_t quota[] = {10, 4, 7}, x[5], peak;
    assert_int_equal(mz_balance_create(&arena, 3, 3, 5, &b, &err), MZ_OK);
    assert_int_equal(mz_balance_solve(b, 3, 3, begin, rank, quota, NULL, x, &peak, &err), MZ_OK);
    assert_int_equal(peak, 7);
    assert_memory_equal(x, ((int64_t[]){7, 3, 4, 0, 7}), sizeof x);
    mz_arena_free(&arena);
}

typedef struct hosts {
    int32_t ranks, experts;
    int32_t begin[9], rank[32];
    int64_t quota[8], base[6];
} hosts;

static hosts random_hosts(mz_rng *rng, int32_t ranks, int32_t experts, uint64_t rows) {
    hosts h = {.ranks = ranks, .experts = experts};
    for (int32_t e = 0; e < experts; e++) {
        int32_t at = h.begin[e];
        uint32_t mask = 1 + (uint32_t)mz_rng_below(rng, (1u << ranks) - 1);
        if (mz_rng_below(rng, 3) == 0)
            mask = 1u << mz_rng_below(rng, (uint64_t)ranks);
        for (int32_t r = 0; r < ranks && at < h.begin[e] + 4; r++)
            if (mask >> r & 1)
                h.rank[at++] = r;
        h.begin[e + 1] = at;
        h.quota[e] = (int64_t)mz_rng_below(rng, rows);
    }
    for (int32_t r = 0; r < ranks; r++)
        h.base[r] = (int64_t)mz_rng_below(rng, 1 + rows / 3);
    return h;
}

/* The optimum by the formula of the specification, over all subsets of ranks. */
static int64_t subset_bound(const hosts *h) {
    int64_t best = 0;
    for (uint32_t set = 1; set < 1u << h->ranks; set++) {
        int64_t rows = 0, size = 0;
        for (int32_t r = 0; r < h->ranks; r++)
            if (set >> r & 1) {
                rows += h->base[r];
                size++;
            }
        for (int32_t e = 0; e < h->experts; e++) {
            bool inside = true;
            for (int32_t i = h->begin[e]; i < h->begin[e + 1]; i++)
                inside = inside && (set >> h->rank[i] & 1);
            rows += inside ? h->quota[e] : 0;
        }
        int64_t bound = (rows + size - 1) / size;
        best = bound > best ? bound : best;
    }
    return best;
}

/* With limits per rank: the least peak is the first level at which min(level, limit) carries all.
 */
static void limited_redistribution(mz_balance *b, const hosts *h, mz_rng *rng) {
    int64_t limit[6], cap[6], x[32], peak, load[6];
    int64_t rows = 0;
    mz_err err;
    for (int32_t e = 0; e < h->experts; e++)
        rows += h->quota[e];
    if (rows > 60)
        return;
    for (int32_t r = 0; r < h->ranks; r++)
        limit[r] = h->base[r] + (int64_t)mz_rng_below(rng, 30);
    mz_code code = mz_balance_spread(b, h->quota, h->base, limit, NULL, NULL, x, &peak, &err);
    int64_t level = 0;
    bool fits = false;
    for (; level <= 100 && !fits; level++) {
        for (int32_t r = 0; r < h->ranks; r++)
            cap[r] = limit[r] < level ? limit[r] : level;
        fits = mz_balance_fits(b, h->quota, h->base, cap);
    }
    assert_int_equal(code, fits ? MZ_OK : MZ_EINTERNAL);
    if (!fits)
        return;
    memcpy(load, h->base, sizeof load);
    for (int32_t i = 0; i < h->begin[h->experts]; i++)
        load[h->rank[i]] += x[i];
    for (int32_t r = 0; r < h->ranks; r++)
        assert_true(load[r] <= limit[r] && load[r] <= level - 1);
    int64_t most = 0;
    for (int32_t r = 0; r < h->ranks; r++)
        most = load[r] > most ? load[r] : most;
    assert_int_equal(most, level - 1);
}

static void redistribution_reaches_the_subset_bound(void **unused) {
    mz_arena arena = {0};
    mz_err err;
    mz_balance *b;
    mz_rng rng = mz_rng_make(3, 9);
    assert_int_equal(mz_balance_create(&arena, 6, 8, 32, &b, &err), MZ_OK);
    for (int trial = 0; trial < 6000; trial++) {
        hosts h = random_hosts(&rng, 1 + (int32_t)mz_rng_below(&rng, 6),
                               1 + (int32_t)mz_rng_below(&rng, 8), trial % 2 ? 12 : 100000);
        int64_t x[32], local[32], peak, load[6], most = 0;
        for (int32_t i = 0; i < h.begin[h.experts]; i++)
            local[i] = (int64_t)mz_rng_below(&rng, 20);
        assert_int_equal(mz_balance_hosts(b, h.ranks, h.experts, h.begin, h.rank, &err), MZ_OK);
        assert_int_equal(mz_balance_spread(b, h.quota, h.base, NULL, trial % 3 ? local : NULL,
                                           trial % 5 ? local : NULL, x, &peak, &err),
                         MZ_OK);
        memcpy(load, h.base, sizeof load);
        for (int32_t e = 0; e < h.experts; e++) {
            int64_t sum = 0;
            for (int32_t i = h.begin[e]; i < h.begin[e + 1]; i++) {
                assert_true(x[i] >= 0);
                sum += x[i];
                load[h.rank[i]] += x[i];
            }
            assert_int_equal(sum, h.quota[e]);
        }
        for (int32_t r = 0; r < h.ranks; r++)
            most = load[r] > most ? load[r] : most;
        int64_t bound = subset_bound(&h);
        assert_int_equal(peak, bound);
        assert_int_equal(most, bound);
        int64_t cap[6];
        for (int32_t r = 0; r < h.ranks; r++)
            cap[r] = bound;
        assert_true(mz_balance_fits(b, h.quota, h.base, cap));
        for (int32_t r = 0; r < h.ranks; r++)
            cap[r] = bound - 1;
        assert_false(bound > 0 && mz_balance_fits(b, h.quota, h.base, cap));
        limited_redistribution(b, &h, &rng);
    }
    mz_arena_free(&arena);
}

static void redistribution_prefers_local_rows(void **unused) {
    mz_arena arena = {0};
    mz_err err;
    mz_balance *b;
    /* One expert on three ranks, 6 rows, peak 2 for any plan of 2 each; with base 0 0 4 the peak is
     * 4 and there is a choice between ranks 0 and 1. */
    int32_t begin[] = {0, 3}, rank[] = {0, 1, 2};
    int64_t quota[] = {5}, base[] = {0, 0, 4}, local[] = {0, 4, 9}, x[3], peak;
    assert_int_equal(mz_balance_create(&arena, 3, 1, 3, &b, &err), MZ_OK);
    assert_int_equal(mz_balance_hosts(b, 3, 1, begin, rank, &err), MZ_OK);
    assert_int_equal(mz_balance_spread(b, quota, base, NULL, local, NULL, x, &peak, &err), MZ_OK);
    assert_int_equal(peak, 4);
    assert_memory_equal(x, ((int64_t[]){1, 4, 0}), sizeof x);
    int64_t none[] = {0, 0, 0}; /* no wish: lowest rank first */
    assert_int_equal(mz_balance_spread(b, quota, base, NULL, none, NULL, x, &peak, &err), MZ_OK);
    assert_memory_equal(x, ((int64_t[]){4, 1, 0}), sizeof x);
    mz_arena_free(&arena);
}

static void redistribution_refuses_homeless_rows(void **unused) {
    mz_arena arena = {0};
    mz_err err;
    mz_balance *b;
    int32_t begin[] = {0, 0, 1}, rank[] = {0};
    int64_t quota[] = {1, 1}, x[1], peak;
    assert_int_equal(mz_balance_create(&arena, 1, 2, 1, &b, &err), MZ_OK);
    assert_int_equal(mz_balance_solve(b, 1, 2, begin, rank, quota, NULL, x, &peak, &err),
                     MZ_EINTERNAL);
    mz_arena_free(&arena);
}

/* ---- spreading --------------------------------------------------------------------------------*/

/* One expert on ranks 2, 0, 3 of four ranks; two domains {0,1}, {2,3}. */
static void spread_case(mz_spread spread, const int64_t *rows, const int64_t *target,
                        const int64_t want[3][4]) {
    mz_arena arena = {0};
    mz_err err;
    mz_expand *x;
    mz_plan *plan;
    int32_t domain[] = {0, 0, 1, 1};
    mz_policy_env env = {.ranks = 4, .experts = 1, .domain = domain, .domains = 2};
    assert_int_equal(mz_plan_create(4, 1, 1, &plan, &err), MZ_OK);
    assert_int_equal(mz_expand_create(&arena, &env, 3, &x, &err), MZ_OK);
    plan->begin[1] = 3;
    memcpy(plan->rank, ((int32_t[]){2, 0, 3}), 3 * sizeof(int32_t));
    assert_int_equal(
        mz_expand_rows(x, plan, rows, NULL, target, spread, mz_plan_forward_entries(plan), &err),
        MZ_OK);
    for (int32_t i = 0; i < 3; i++) {
        int64_t got[4] = {0}, sum = 0;
        for (int64_t j = plan->entry_begin[i]; j < plan->entry_begin[i + 1]; j++)
            got[plan->entry_source[j]] += plan->entry_pairs[j];
        for (int s = 0; s < 4; s++)
            sum += want[i][s];
        assert_memory_equal(got, want[i], sizeof got);
        assert_int_equal(plan->forward[i], sum);
    }
    mz_plan_free(&plan);
    mz_arena_free(&arena);
}

static void spreading_by_hand(void **unused) {
    /* Own rows first (2 on rank 2, 3 on rank 0, 2 on rank 3), then inside the domain (source 3's
     * other 2 to rank 2, 4 of source 1 to rank 0); what is left (source 1's last 2) goes in order.
     */
    spread_case(MZ_SPREAD_EXACT, (int64_t[]){3, 6, 2, 4}, (int64_t[]){6, 7, 2},
                (const int64_t[3][4]){{0, 2, 2, 2}, {3, 4, 0, 0}, {0, 0, 0, 2}});
    /* 8.4: own rows leave room 3, 2, 0; source 1's three rows split as 1.8, 1.2 -> 2, 1, source 3's
     * other two as 1.2, 0.8 -> 1, 1. */
    spread_case(MZ_SPREAD_SHARE_LOCAL, (int64_t[]){1, 3, 1, 4}, (int64_t[]){4, 3, 2},
                (const int64_t[3][4]){{0, 2, 1, 1}, {1, 1, 0, 1}, {0, 0, 0, 2}});
    /* Not local: every source splits in proportion to 4:3:2 (9 rows): source 0's one row goes to
     * the largest share, source 1's three are 1.33, 1, 0.67 -> 1, 1, 1. */
    spread_case(MZ_SPREAD_SHARE, (int64_t[]){1, 3, 1, 4}, (int64_t[]){4, 3, 2},
                (const int64_t[3][4]){{1, 1, 1, 2}, {0, 1, 0, 1}, {0, 1, 0, 1}});
    /* In order: the first 6 rows are sources 0, 1 and half of 2, the next 7, then 2. */
    spread_case(MZ_SPREAD_ORDER, (int64_t[]){1, 4, 2, 8}, (int64_t[]){6, 7, 2},
                (const int64_t[3][4]){{1, 4, 1, 0}, {0, 0, 1, 6}, {0, 0, 0, 2}});
    /* Dealt like cards: 1, then 3, 1, 4 go on where the last source stopped. */
    spread_case(MZ_SPREAD_DEAL, (int64_t[]){1, 3, 1, 4}, NULL,
                (const int64_t[3][4]){{1, 1, 0, 1}, {0, 1, 1, 1}, {0, 1, 0, 2}});
}

/* 8.4 by hand: n = 6 gives stride 4, not coprime, so 5, offset 7 mod 6 = 1; n = 8 stride 5; n = 2
 * and 1: n - 1. Every place is taken once. */
static void strided_places(void **unused) {
    static const struct {
        int64_t pairs;
        int32_t expert;
        int64_t place[8];
    } cases[] = {
        {6, 7, {1, 0, 5, 4, 3, 2}}, {8, 3, {3, 0, 5, 2, 7, 4, 1, 6}}, {2, 3, {1, 0}}, {1, 5, {0}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mz_stride stride = mz_stride_of(cases[i].pairs, cases[i].expert);
        for (int64_t k = 0; k < cases[i].pairs; k++)
            assert_int_equal(mz_stride_place(&stride, k), cases[i].place[k]);
    }
    for (int64_t n = 1; n < 300; n++) {
        const mz_stride stride = mz_stride_of(n, 17);
        bool taken[300] = {0};
        for (int64_t k = 0; k < n; k++) {
            const int64_t place = mz_stride_place(&stride, k);
            assert_true(place >= 0 && place < n && !taken[place]);
            taken[place] = true;
        }
    }
}

/* ---- moves ------------------------------------------------------------------------------------*/

static void relay_in_two_rounds(void **unused) {
    mz_err err;
    mz_plan *plan;
    enum { R = 12 };
    int64_t sent[R];
    assert_int_equal(mz_plan_create(R, R, 3, &plan, &err), MZ_OK);
    /* Expert 0 (main on rank 0) has 9 replicas on ranks 1-9; expert 1 (main on rank 1) one on 0. */
    int32_t main_rank[R];
    int32_t count[R];
    int64_t total[R] = {1000, 100};
    mz_replica replica[10];
    for (int32_t e = 0; e < R; e++)
        main_rank[e] = e;
    for (int32_t k = 0; k < 9; k++)
        replica[k] = (mz_replica){0, k + 1, 10};
    replica[9] = (mz_replica){1, 0, 5};
    assert_int_equal(mz_plan_hosts(plan, main_rank, total, replica, 10, count, &err), MZ_OK);
    assert_int_equal(plan->target[0], 910);
    mz_replica_moves how = {.weight_bytes = 100,
                            .gradient_bytes = 200,
                            .again = true,
                            .relay = true,
                            .hide = MZ_HIDE_PACK,
                            .hide_again = MZ_HIDE_LAYERS,
                            .hide_gradients = MZ_HIDE_LAYERS};
    assert_int_equal(mz_plan_replica_moves(plan, &how, sent, &err), MZ_OK);
    /* floor(sqrt 9) = 3 relays; rank 1 sends already, so ranks 2, 3, 4 relay, two others each. */
    int64_t first = 0, second = 0, back_main = 0, back_relay = 0, from_main = 0;
    for (int32_t i = 0; i < plan->moves; i++) {
        const mz_move *m = &plan->move[i];
        if (m->expert != 0)
            continue;
        if (m->phase == MZ_MOVE_FORWARD) {
            first += m->round == 0;
            second += m->round == 1;
            from_main += m->src == 0;
            assert_true(m->round == 0 ? m->src == 0 && m->dst >= 2 && m->dst <= 4
                                      : m->src >= 2 && m->src <= 4);
            assert_int_equal(m->bytes, 100);
            assert_int_equal(m->hide, MZ_HIDE_PACK);
        }
        if (m->phase == MZ_MOVE_REDUCE) {
            back_main += m->dst == 0 && m->round == 1;
            back_relay += m->dst != 0 && m->round == 0;
            assert_int_equal(m->bytes, 200);
        }
    }
    assert_int_equal(first, 3);
    assert_int_equal(second, 6);
    assert_int_equal(from_main, 3);
    assert_int_equal(back_main, 3);
    assert_int_equal(back_relay, 6);
    assert_int_equal(plan->moves, 3 * 10);
    mz_plan_free(&plan);
}

/* ---- table and legality -----------------------------------------------------------------------*/

static void parse_fails(const char *text, const char *word) {
    mz_arena arena = {0};
    const mz_policy *policy;
    void *options;
    mz_err err = {0};
    assert_int_equal(mz_policy_parse(text, &arena, &policy, &options, &err), MZ_EINPUT);
    if (!strstr(err.msg, word))
        fail_msg("\"%s\" gives \"%s\", expected \"%s\" in it", text, err.msg, word);
    mz_arena_free(&arena);
}

static void parsing(void **unused) {
    parse_fails("ultrapep", "\"ultraep\"");
    parse_fails("nothing-like-it", "static, capacity");
    parse_fails("", "unknown policy");
    parse_fails("lrmoe[keep=2]", "policy lrmoe");
    parse_fails("lrmoe[keep=2]", "keep");
    parse_fails("lrmoe[quota=waterfil]", "quota");
    parse_fails("lrmoe[kep=0.5]", "keep");
    parse_fails("static[x=1]", "policy static");
    parse_fails("lrmoe[keep=0.5", "lrmoe[keep=0.5");
    parse_fails("lrmoe]", "']'");
    parse_fails("./mine.so", "plug-in ./mine.so");
    mz_arena arena = {0};
    const mz_policy *policy;
    void *options;
    mz_err err = {0};
    for (int i = 0; mz_policies[i]; i++) {
        assert_int_equal(mz_policy_parse(mz_policies[i]->name, &arena, &policy, &options, &err),
                         MZ_OK);
        assert_ptr_equal(policy, mz_policies[i]);
        assert_non_null(policy->summary);
    }
    mz_arena_free(&arena);
    rig r;
    assert_int_equal(rig_try(&r, "symi[slots=1]", 2, 8, 0), MZ_EINPUT);
    assert_non_null(strstr(r.err.msg, "symi: slots=1"));
    rig_close(&r);
}

static void expect_illegal(rig *r, const mz_load *load, const char *word) {
    mz_err err;
    assert_int_equal(mz_plan_check(r->plan, load, &r->traits, &err), MZ_EINTERNAL);
    if (!strstr(err.msg, word))
        fail_msg("\"%s\" lacks \"%s\"", err.msg, word);
}

static void legality_finds_violations(void **unused) {
    rig r;
    mz_load *load = load_random(LOAD_ZIPF, 4, 8, 5);
    mz_budget budget = {.backward_rows = load->pairs / 8, .backward_send_rows = -1};
    rig_open(&r, "lrmoe", 4, 8, 0);
    rig_call(&r, load, NULL, &budget, NULL);
    mz_plan *p = r.plan;
    assert_true(p->has_backward);
    p->entry_pairs[0]++;
    expect_illegal(&r, load, "sum to");
    p->forward[0]++;
    expect_illegal(&r, load, "to assign");
    p->forward[0]--;
    p->entry_pairs[0]--;
    int32_t rank = p->rank[0];
    p->rank[0] = 4;
    expect_illegal(&r, load, "on rank 4");
    p->rank[0] = rank;
    p->quota[2]++;
    expect_illegal(&r, load, "quota");
    p->quota[2]--;
    p->kept_pairs++;
    expect_illegal(&r, load, "kept_pairs");
    p->kept_pairs--;
    p->pairs--;
    expect_illegal(&r, load, "counts");
    p->pairs++;
    p->kept[0] = load->count[0] + 1;
    expect_illegal(&r, load, "keeps");
    rig_call(&r, load, NULL, &budget, NULL);
    r.traits.slots = 1;
    expect_illegal(&r, load, "slots");
    rig_close(&r);
    load_free(load);
}

static void bounds(void **unused) {
    rig r;
    mz_err err;
    mz_balance *b;
    int64_t total[] = {900, 100, 300, 100, 50, 50, 60, 40}, rows;
    mz_load *load = load_even(4, 8, total);
    rig_open(&r, "static", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(mz_balance_create(&r.arena, 4, 8, 16, &b, &err), MZ_OK);
    assert_int_equal(mz_bound_hosts(b, r.plan, load, &rows, &err), MZ_OK);
    assert_int_equal(rows, 1000);
    assert_int_equal(mz_bound_any(load, 4, 0, NULL), 400);
    rig_close(&r);
    load_free(load);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares_equal_the_rule),
        cmocka_unit_test(block_layout),
        cmocka_unit_test(redistribution_vector),
        cmocka_unit_test(redistribution_reaches_the_subset_bound),
        cmocka_unit_test(redistribution_prefers_local_rows),
        cmocka_unit_test(redistribution_refuses_homeless_rows),
        cmocka_unit_test(spreading_by_hand),
        cmocka_unit_test(strided_places),
        cmocka_unit_test(relay_in_two_rounds),
        cmocka_unit_test(parsing),
        cmocka_unit_test(legality_finds_violations),
        cmocka_unit_test(bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
