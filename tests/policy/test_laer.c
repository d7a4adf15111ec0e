/* laer: counts, placement, routing and modelled time of balancing-systems.md section 7 by hand and
 * against a plain re-computation; its transfers (section 12). */
#include "near.h"

#include <math.h>

/* ---- by hand
 * -------------------------------------------------------------------------------------*/

static void expect_counts(const char *text, int32_t ranks, int32_t domain, int32_t experts,
                          const int64_t *total, const int32_t *counts) {
    rig r;
    mz_load *load = load_even(ranks, experts, total);
    rig_open(&r, text, ranks, experts, domain);
    rig_call(&r, load, load, NULL, NULL);
    for (int32_t e = 0; e < experts; e++)
        assert_int_equal(r.plan->begin[e + 1] - r.plan->begin[e], counts[e]);
    rig_close(&r);
    load_free(load);
}

static void queue_by_hand(void **unused) {
    /* Twelve slots, one replica per domain to start with; then expert 0 (50 rows each) and expert 1
     * (30) get two more. */
    expect_counts("laer[even=no,slots=3]", 4, 2, 4, (int64_t[]){100, 60, 25, 25},
                  (int32_t[]){4, 4, 2, 2});
    /* Two domains times six experts are more than eight slots: one each. Expert 0 gets its second,
     * two more do not fit, so it is done; the last slot goes to expert 1. */
    expect_counts("laer[even=no,slots=2]", 4, 2, 6, (int64_t[]){90, 10, 10, 10, 10, 10},
                  (int32_t[]){2, 2, 1, 1, 1, 1});
    /* Three slots, one expert, domains of two and one rank: the third slot stays empty. */
    expect_counts("laer[even=no,slots=1]", 3, 2, 1, (int64_t[]){90}, (int32_t[]){2});
    expect_counts("laer[queue=no,slots=3]", 4, 2, 4, (int64_t[]){100, 60, 25, 25},
                  (int32_t[]){3, 3, 3, 3});
}

/* The first case above: rows per replica 25, 15, 12.5, 12.5. Experts 0 and 1 go to all ranks; the
 * first replica of expert 2 to rank 0, its second to the other domain's first; expert 3 to the two
 * ranks left. */
static void placement_by_hand(void **unused) {
    rig r;
    mz_load *load = load_even(4, 4, (int64_t[]){100, 60, 25, 25});
    rig_open(&r, "laer[even=no,slots=3]", 4, 4, 2);
    rig_call(&r, load, load, NULL, NULL);
    const int32_t hosts[] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 2, 1, 3};
    assert_memory_equal(r.plan->rank, hosts, sizeof hosts);
    /* Expert 0 has 25 rows at each source: 13 and 12 on the two replicas of its domain. */
    for (int i = 0; i < 4; i++)
        assert_int_equal(r.plan->forward[i], i % 2 ? 24 : 26);
    rig_close(&r);
    load_free(load);
}

/* Two ranks of one domain, two experts, two slots each; all 40 pairs are of expert 0 and rank 0.
 * Even counts: 20 rows on each rank, 20 travel. The queue gives expert 0 three slots, two of them
 * on rank 0: 27 rows there, 13 travel. A row's products take longer than its way, so even counts
 * win. */
static void candidates_by_hand(void **unused) {
    mz_load *load = load_new(2, 2);
    load->count[0] = 40;
    mz_load_sum(load);
    static const struct {
        const char *options;
        int32_t instances; /* of expert 0 */
    } cases[] = {
        {"slots=2", 2}, /* products of 20 rows beat those of 27 or 26 */
        {"slots=2,even=no", 3},
        {"slots=2,rates=code", 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig r;
        char text[64];
        snprintf(text, sizeof text, "laer[%s]", cases[i].options);
        rig_open(&r, text, 2, 2, 0);
        rig_call(&r, load, load, NULL, NULL);
        assert_int_equal(r.plan->begin[1], cases[i].instances);
        rig_close(&r);
    }
    load_free(load);
}

/* ---- a plain re-computation
 * ----------------------------------------------------------------------*/

static void naive_queue(const machine *m, const int64_t *total, int32_t *count) {
    const int32_t all = m->ranks * m->slots;
    bool done[64] = {0};
    int32_t given = m->domains * m->experts <= all ? m->domains * m->experts : m->experts;
    for (int32_t e = 0; e < m->experts; e++)
        count[e] = given / m->experts;
    while (given < all) {
        int32_t best = -1;
        for (int32_t e = 0; e < m->experts; e++)
            if (!done[e] &&
                (best < 0 || (double)total[e] / count[e] > (double)total[best] / count[best]))
                best = e;
        if (best < 0)
            return;
        const int32_t more = count[best] >= m->domains ? m->domains : 1;
        if (given + more > all) {
            done[best] = true;
            continue;
        }
        count[best] += more;
        given += more;
    }
}

/* a[e * R + g]: replicas. */
static void naive_place(const machine *m, const int64_t *total, const int32_t *count, int32_t *a) {
    bool placed[64] = {0};
    double *load = calloc((size_t)m->ranks, sizeof *load);
    int32_t *used = calloc((size_t)m->ranks, sizeof *used);
    memset(a, 0, sizeof *a * (size_t)(m->experts * m->ranks));
    for (int32_t turn = 0; turn < m->experts; turn++) {
        int32_t e = -1;
        for (int32_t i = 0; i < m->experts; i++)
            if (!placed[i] && (e < 0 || (double)total[i] / count[i] > (double)total[e] / count[e]))
                e = i;
        placed[e] = true;
        for (int32_t k = 0; k < count[e]; k++) {
            int32_t copies[64] = {0}, best = -1;
            for (int32_t g = 0; g < m->ranks; g++)
                copies[m->domain[g]] += a[e * m->ranks + g];
            int32_t fewest = copies[0];
            for (int32_t d = 1; d < m->domains; d++)
                fewest = copies[d] < fewest ? copies[d] : fewest;
            for (int pass = 0; pass < 2 && best < 0; pass++)
                for (int32_t g = 0; g < m->ranks; g++)
                    if (used[g] < m->slots && (pass == 1 || copies[m->domain[g]] == fewest) &&
                        (best < 0 || load[g] < load[best]))
                        best = g;
            a[e * m->ranks + best]++;
            used[best]++;
            load[best] += (double)total[e] / count[e];
        }
    }
    free(load);
    free(used);
}

static double naive_time(const machine *m, const mz_load *load, const int32_t *a) {
    double sum = 0, longest = 0, products = 0;
    for (int32_t g = 0; g < m->ranks; g++) {
        int64_t rows = 0, inside = 0, outside = 0;
        for (int32_t s = 0; s < m->ranks; s++)
            for (int32_t e = 0; e < m->experts; e++) {
                const int64_t n = naive_rows(m, a, load->count[s * m->experts + e], s, e, g);
                rows += n;
                inside += s != g && m->domain[s] == m->domain[g] ? n : 0;
                outside += m->domain[s] != m->domain[g] ? n : 0;
            }
        const double t = (double)inside * m->inside + (double)outside * m->outside;
        sum += t;
        longest = t > longest ? t : longest;
        products = (double)rows * m->product > products ? (double)rows * m->product : products;
    }
    return 4 * (m->busiest ? longest : sum) + products;
}

static void check_hosts_and_rows(const rig *r, const machine *m, const mz_load *now,
                                 const int32_t *a) {
    const mz_plan *p = r->plan;
    int64_t *rows = calloc((size_t)(m->ranks * m->ranks), sizeof *rows);
    for (int32_t e = 0; e < m->experts; e++) {
        memset(rows, 0, sizeof *rows * (size_t)(m->ranks * m->ranks));
        int32_t at = p->begin[e];
        for (int32_t g = 0; g < m->ranks; g++)
            for (int32_t k = 0; k < a[e * m->ranks + g]; k++, at++) {
                assert_int_equal(p->rank[at], g);
                for (int64_t j = p->entry_begin[at]; j < p->entry_begin[at + 1]; j++)
                    rows[p->entry_source[j] * m->ranks + g] += p->entry_pairs[j];
            }
        assert_int_equal(at, p->begin[e + 1]);
        for (int32_t s = 0; s < m->ranks; s++)
            for (int32_t g = 0; g < m->ranks; g++)
                assert_int_equal(rows[s * m->ranks + g],
                                 naive_rows(m, a, now->count[s * m->experts + e], s, e, g));
    }
    free(rows);
}

static void one_machine(int32_t ranks, int32_t experts, int32_t domain, int32_t slots, int kind,
                        bool code, bool busiest, int *wins) {
    rig r;
    char text[96];
    snprintf(text, sizeof text, "laer[slots=%d,rates=%s,comm=%s]", slots, code ? "code" : "model",
             busiest ? "max" : "sum");
    rig_prepare(&r, ranks, experts, domain);
    r.env.recompute = kind % 2 == 0;
    r.env.token_bytes = 4096;
    assert_int_equal(rig_start(&r, text), MZ_OK);
    mz_load *history = load_random(kind, ranks, experts, 41),
            *now = load_random(kind, ranks, experts, 42);
    rig_call(&r, now, history, NULL, NULL);
    const double passes = r.env.recompute ? 4 : 3;
    const machine m = {.ranks = ranks,
                       .experts = experts,
                       .slots = slots,
                       .domains = r.env.domains,
                       .domain = r.domain,
                       .inside = 4096 / (code ? 216.269e9 : r.env.inside_bytes_s),
                       .outside = 4096 / (code ? 88.9539e9 : r.env.outside_bytes_s),
                       .product = passes * (code ? 1.484375e-6 : r.env.pair_seconds),
                       .busiest = busiest};
    const size_t cells = (size_t)(ranks * experts);
    int64_t *total = calloc((size_t)experts, sizeof *total);
    for (int32_t e = 0; e < experts; e++)
        total[e] = history->pairs > 0 ? history->total[e] : 1;
    int32_t *count = calloc((size_t)experts, sizeof *count);
    int32_t *even = calloc(cells, sizeof *even), *queue = calloc(cells, sizeof *queue);
    const bool divides = ranks * slots % experts == 0;
    naive_queue(&m, total, count);
    naive_place(&m, total, count, queue);
    for (int32_t e = 0; e < experts; e++)
        count[e] = ranks * slots / experts;
    if (divides)
        naive_place(&m, total, count, even);
    const double t_even = divides ? naive_time(&m, history, even) : INFINITY;
    const double t_queue = naive_time(&m, history, queue);
    /* Rounding differs with the order of sums: near ties may go either way. */
    const bool even_wins = t_even <= t_queue;
    const bool close = fabs(t_even - t_queue) <= 1e-12 * t_queue;
    if (!close || memcmp(even, queue, cells * sizeof *even) == 0)
        check_hosts_and_rows(&r, &m, now, even_wins ? even : queue);
    wins[even_wins] += divides;
    free(total);
    free(count);
    free(even);
    free(queue);
    load_free(history);
    load_free(now);
    rig_close(&r);
}

static void plans_match_a_plain_computation(void **unused) {
    static const int32_t shapes[][4] = {{1, 1, 0, 2}, {4, 8, 2, 4},  {4, 6, 2, 3},  {3, 7, 0, 5},
                                        {7, 3, 2, 1}, {8, 12, 4, 3}, {5, 13, 2, 4}, {6, 4, 3, 2}};
    int wins[2] = {0};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int kind = 0; kind < LOAD_KINDS; kind++)
            for (int variant = 0; variant < 4; variant++)
                one_machine(shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], kind,
                            variant & 1, variant & 2, wins);
    print_message("the queue's counts win %d times, even ones %d times\n", wins[0], wins[1]);
    assert_true(wins[0] > 0 && wins[1] > 0);
}

/* Random changes are tried beside both counts, so the modelled time never rises; the same seed
 * gives the same plan. */
static void trials_never_hurt(void **unused) {
    for (int kind = 0; kind < LOAD_KINDS; kind++) {
        rig a, b, c;
        mz_load *load = load_random(kind, 6, 9, 7);
        rig_open(&a, "laer[slots=3]", 6, 9, 2);
        rig_open(&b, "laer[slots=3,trials=40]", 6, 9, 2);
        rig_open(&c, "laer[slots=3,trials=40]", 6, 9, 2);
        rig *all[] = {&a, &b, &c};
        double t[3];
        for (int i = 0; i < 3; i++) {
            rig_call(all[i], load, load, NULL, NULL);
            const machine m = {.ranks = 6,
                               .experts = 9,
                               .slots = 3,
                               .domains = 3,
                               .domain = a.domain,
                               .inside = 128 / a.env.inside_bytes_s,
                               .outside = 128 / a.env.outside_bytes_s,
                               .product = 3 * a.env.pair_seconds};
            int32_t hosts[6 * 9] = {0};
            for (int32_t e = 0; e < 9; e++)
                for (int32_t k = all[i]->plan->begin[e]; k < all[i]->plan->begin[e + 1]; k++)
                    hosts[e * 6 + all[i]->plan->rank[k]]++;
            t[i] = naive_time(&m, load, hosts);
        }
        assert_true(t[1] <= t[0] * (1 + 1e-12));
        assert_same_plan(b.plan, c.plan);
        for (int i = 0; i < 3; i++)
            rig_close(all[i]);
        load_free(load);
    }
}

/* ---- what it sees and moves
 * ----------------------------------------------------------------------*/

static void every_slot_is_restored(void **unused) {
    rig r;
    mz_load *load = load_random(LOAD_ZIPF, 8, 16, 3);
    rig_open(&r, "laer[prefetch=2]", 8, 16, 4);
    rig_call(&r, load, load, NULL, NULL);
    const int64_t W = r.env.weight_bytes;
    int64_t bytes[8][3] = {{0}};
    for (int32_t i = 0; i < r.plan->moves; i++) {
        const mz_move *m = &r.plan->move[i];
        const bool back = m->phase == MZ_MOVE_REDUCE;
        assert_int_equal(back ? m->dst : m->src, MZ_EVERY_RANK);
        assert_int_equal(m->hide, MZ_HIDE_LAYERS);
        assert_int_equal(m->kind, back ? MZ_MOVE_GRADIENTS : MZ_MOVE_WEIGHTS);
        assert_in_range(m->phase, MZ_MOVE_FORWARD, MZ_MOVE_REDUCE);
        bytes[back ? m->src : m->dst][m->phase] += m->bytes;
    }
    for (int32_t g = 0; g < 8; g++)
        for (int k = 0; k < 3; k++)
            assert_int_equal(bytes[g][k], 4 * W); /* C = 4: C*W(N-1)/N travel */
    assert_int_equal(r.plan->moves, 8 * 4 * 3);
    assert_true(r.traits.sharded_weights && r.traits.plan_hidden && r.traits.history_calls);
    assert_true(r.traits.window == 5 && r.traits.lag == 1 && r.traits.interval == 1);
    assert_int_equal(r.traits.prefetch, 2);
    assert_int_equal(r.traits.sees, MZ_SEES_HISTORY);
    rig_close(&r);
    rig_open(&r, "laer", 1, 3, 0);
    mz_load *small = load_random(LOAD_RANDOM, 1, 3, 3);
    rig_call(&r, small, small, NULL, NULL);
    assert_int_equal(r.plan->moves, 0); /* one rank holds everything */
    rig_close(&r);
    load_free(small);
    load_free(load);
}

/* The placement follows the history and nothing else. */
static void current_counts_do_not_matter(void **unused) {
    rig a, b;
    mz_load *history = load_random(LOAD_ZIPF, 6, 10, 3);
    mz_load *one = load_random(LOAD_RANDOM, 6, 10, 4),
            *other = load_random(LOAD_ONE_EXPERT, 6, 10, 5);
    rig_open(&a, "laer", 6, 10, 2);
    rig_open(&b, "laer", 6, 10, 2);
    for (int seen = 0; seen < 2; seen++) {
        rig_call(&a, one, seen ? history : NULL, NULL, NULL);
        rig_call(&b, other, seen ? history : NULL, NULL, NULL);
        assert_memory_equal(a.plan->begin, b.plan->begin, 11 * sizeof(int32_t));
        assert_memory_equal(a.plan->rank, b.plan->rank,
                            (size_t)a.plan->begin[10] * sizeof(int32_t));
    }
    rig_close(&a);
    rig_close(&b);
    load_free(history);
    load_free(one);
    load_free(other);
}

static void impossible_options(void **unused) {
    static const char *const texts[] = {"laer[even=no,queue=no]", "laer[queue=no,slots=3]",
                                        "laer[slots=1]"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        rig r;
        assert_int_equal(rig_try(&r, texts[i], 4, 7, 0), MZ_EINPUT);
        print_message("%s\n", r.err.msg);
        rig_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queue_by_hand),
        cmocka_unit_test(placement_by_hand),
        cmocka_unit_test(candidates_by_hand),
        cmocka_unit_test(plans_match_a_plain_computation),
        cmocka_unit_test(trials_never_hurt),
        cmocka_unit_test(every_slot_is_restored),
        cmocka_unit_test(current_counts_do_not_matter),
        cmocka_unit_test(impossible_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
