/* Bounds against the optimum over all placements, found by trying every one of them. */
#include "fixture.h"

enum { MOST = 8 };
typedef struct search {
    int32_t ranks, experts, used[MOST], slots;
    int64_t total[MOST];
    uint32_t hosts[MOST];
    int64_t best;
} search;

/* Least peak for the hosts chosen, by Hall's condition over all sets of ranks: the experts whose
 * hosts all lie in a set load it. */
static int64_t peak_of(const search *x) {
    int64_t peak = 0;
    for (uint32_t set = 1; set < 1u << x->ranks; set++) {
        int64_t rows = 0, size = 0;
        for (int32_t r = 0; r < x->ranks; r++)
            size += set >> r & 1;
        for (int32_t e = 0; e < x->experts; e++)
            rows += (x->hosts[e] & ~set) == 0 ? x->total[e] : 0;
        const int64_t least = (rows + size - 1) / size;
        peak = least > peak ? least : peak;
    }
    return peak;
}

static void try_all(search *x, int32_t e) {
    if (e == x->experts) {
        const int64_t peak = peak_of(x);
        x->best = peak < x->best ? peak : x->best;
        return;
    }
    for (uint32_t set = 1; set < 1u << x->ranks; set++) {
        bool fits = true;
        for (int32_t r = 0; r < x->ranks; r++) {
            x->used[r] += set >> r & 1;
            fits = fits && x->used[r] <= x->slots;
        }
        x->hosts[e] = set;
        if (fits)
            try_all(x, e + 1);
        for (int32_t r = 0; r < x->ranks; r++)
            x->used[r] -= set >> r & 1;
    }
}

static void draw(mz_rng *rng, search *x) {
    static const int32_t shapes[][3] = {/* ranks, experts, slots */
                                        {1, 3, 3}, {2, 2, 1}, {2, 4, 2}, {2, 5, 3}, {2, 6, 4},
                                        {3, 3, 1}, {3, 4, 2}, {3, 5, 2}, {3, 6, 2}, {3, 6, 3},
                                        {4, 4, 1}, {4, 5, 2}, {4, 4, 2}, {2, 7, 4}, {3, 7, 3}};
    const int32_t *s = shapes[mz_rng_below(rng, sizeof shapes / sizeof *shapes)];
    *x = (search){.ranks = s[0], .experts = s[1], .slots = s[2], .best = INT64_MAX};
    const uint64_t kind = mz_rng_below(rng, 4);
    for (int32_t e = 0; e < x->experts; e++) {
        const int64_t n = (int64_t)mz_rng_below(rng, kind == 0 ? 8 : 1000);
        x->total[e] = kind == 2 ? n / (1 + e * e) : kind == 3 && e % 2 ? n / 50 : n;
    }
}

static int64_t bound_of(const search *x, int64_t *scratch) {
    mz_load load = {.sources = x->ranks, .experts = x->experts, .total = (int64_t *)x->total};
    for (int32_t e = 0; e < x->experts; e++)
        load.pairs += x->total[e];
    return mz_bound_any(&load, x->ranks, x->slots, scratch);
}

/* Never above the optimum; and near it, which is measured against the bound of sum and pieces
 * alone. */
static void never_above_the_optimum(void **unused) {
    mz_rng rng = mz_rng_make(17, 2);
    double gap = 0, gap_of_mean = 0, worst = 1;
    int reached = 0, cases = 0;
    for (int trial = 0; trial < 1500; trial++) {
        search x;
        int64_t scratch[MOST];
        draw(&rng, &x);
        try_all(&x, 0);
        const int64_t bound = bound_of(&x, scratch);
        if (bound > x.best)
            fail_msg("trial %d: %d ranks, %d experts, %d slots: bound %lld, optimum %lld", trial,
                     x.ranks, x.experts, x.slots, (long long)bound, (long long)x.best);
        if (x.best == 0)
            continue;
        int64_t sum = 0;
        for (int32_t e = 0; e < x.experts; e++)
            sum += x.total[e];
        const double part = (double)bound / (double)x.best;
        cases++;
        reached += bound == x.best;
        gap += 1 - part;
        worst = part < worst ? part : worst;
        gap_of_mean += 1 - (double)((sum + x.ranks - 1) / x.ranks) / (double)x.best;
    }
    print_message("%d placements of small groups: bound is the optimum in %.1f %%, on average %.2f "
                  "%% below it (the mean: %.2f %%), at worst %.1f %%\n",
                  cases, 100.0 * reached / cases, 100 * gap / cases, 100 * gap_of_mean / cases,
                  100 * (1 - worst));
    assert_true(gap < 0.2 * gap_of_mean);
    assert_true(reached > 0.8 * cases);
}

/* One step of the proof each, where the others give less. */
static void by_hand(void **unused) {
    int64_t scratch[MOST];
    static const struct {
        search x;
        int64_t bound;
    } cases[] = {
        /* 1: the mean */
        {{.ranks = 2, .experts = 2, .slots = 2, .total = {7, 2}}, 5},
        /* 2: one spare slot, so the largest has two pieces at most, or it and the next one */
        {{.ranks = 3, .experts = 5, .slots = 2, .total = {100, 0, 0, 0, 0}}, 50},
        /* 3, j = 1: no spare slot; of three experts two share a rank */
        {{.ranks = 2, .experts = 4, .slots = 2, .total = {60, 50, 45, 0}}, 95},
        /* 3, x = 1: the largest may be split, of the next three two share a rank */
        {{.ranks = 2, .experts = 5, .slots = 3, .total = {20, 80, 81, 79, 78}}, 169},
        /* 3, j = 2: of five equal experts three share a rank */
        {{.ranks = 2, .experts = 6, .slots = 3, .total = {10, 10, 10, 10, 10, 0}}, 30},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        search x = cases[i].x;
        x.best = INT64_MAX;
        try_all(&x, 0);
        print_message("case %zu: bound %lld, optimum %lld\n", i, (long long)bound_of(&x, scratch),
                      (long long)x.best);
        assert_int_equal(bound_of(&x, scratch), cases[i].bound);
        assert_true(bound_of(&x, scratch) <= x.best);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(never_above_the_optimum),
        cmocka_unit_test(by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
