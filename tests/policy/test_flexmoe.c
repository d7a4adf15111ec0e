/* flexmoe: the published vector and slot sweep of its Scale-EPLB port (balancing-systems.md 5.2,
 * 9.6, 15), its recommended form by hand, all forms against plain re-computations. */
#include "near.h"
#include "sweep.h"

#include <math.h>

/* ---- scale-eplb
 * ----------------------------------------------------------------------------------*/

static void published_vector(void **unused) {
    const int64_t total[] = {900, 100, 300, 100, 50, 50, 60, 40}, rows[] = {490, 450, 400, 260};
    rig r;
    mz_load *load = load_even(4, 8, total);
    rig_open(&r, "flexmoe[form=scale-eplb,slots=3]", 4, 8, 0);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->begin[8], 9); /* one Expand */
    assert_int_equal(r.plan->begin[1], 2);
    for (int32_t g = 0; g < 4; g++)
        assert_int_equal(rank_rows(r.plan, r.plan->forward, g), rows[g]);
    rig_close(&r);
    load_free(load);
}

static void slot_sweep(void **unused) {
    static const double published[] = {1.45, 1.395, 1.34, 1.30}; /* 9.6, "FlexMoE port" */
    mz_load *load = sweep_load(1.5, SWEEP_MODULO, 1);
    for (int slots = 1; slots <= 4; slots++) {
        rig r;
        char text[64];
        snprintf(text, sizeof text, "flexmoe[form=scale-eplb,slots=%d]", 20 + slots);
        rig_open(&r, text, SWEEP_RANKS, SWEEP_EXPERTS, SWEEP_NODE);
        rig_call(&r, load, NULL, NULL, NULL);
        const double ours = sweep_imbalance(r.plan, load);
        print_message("FlexMoE port, %d slots: %.3f (%.3f)\n", slots, ours, published[slots - 1]);
        assert_true(fabs(ours - published[slots - 1]) < 0.015); /* other random draws */
        rig_close(&r);
    }
    load_free(load);
}

/* Two equal maxima: the first Expand lowers nothing, the search ends; with one row less both grow.
 */
static void a_tie_ends_the_search(void **unused) {
    for (int64_t less = 0; less < 2; less++) {
        rig r;
        const int64_t total[] = {1000, 1000 - less, 10, 10};
        mz_load *load = load_even(4, 4, total);
        rig_open(&r, "flexmoe[form=scale-eplb]", 4, 4, 0);
        rig_call(&r, load, NULL, NULL, NULL);
        assert_int_equal(r.plan->begin[4], less ? 6 : 4);
        rig_close(&r);
        load_free(load);
    }
}

/* With sync bytes in the objective an Expand must gain more than they cost: 400 rows at 1e6 a
 * second are 400 us, W at 6.25 GB/s 1.966 us. */
static void sync_bytes_weigh(void **unused) {
    const int64_t total[] = {1200, 400, 300, 100};
    mz_load *load = load_even(4, 4, total);
    for (int heavy = 0; heavy < 2; heavy++) {
        rig r;
        rig_open(&r,
                 heavy ? "flexmoe[form=scale-eplb,sync=306]" : "flexmoe[form=scale-eplb,sync=305]",
                 4, 4, 0);
        rig_call(&r, load, NULL, NULL, NULL);
        /* 1200 to 600 gains 600 us: 305 copies' time are 599.7 us, 306 are 601.6. */
        assert_int_equal(r.plan->begin[4] > 4, !heavy);
        rig_close(&r);
    }
    load_free(load);
}

/* Mains are not kept: every host but the home fetches W twice and returns W. */
static void fetches(void **unused) {
    rig r;
    mz_load *load = load_random(LOAD_ZIPF, 8, 16, 3);
    rig_open(&r, "flexmoe[form=scale-eplb]", 8, 16, 4);
    rig_call(&r, load, NULL, NULL, NULL);
    int32_t home[16], fetched = 0;
    mz_layout_mains(8, 16, home);
    for (int32_t e = 0; e < 16; e++)
        for (int32_t g = 0; g < 8; g++) {
            bool host = false;
            int64_t bytes[3] = {0};
            for (int32_t i = r.plan->begin[e]; i < r.plan->begin[e + 1]; i++)
                host = host || r.plan->rank[i] == g;
            for (int32_t i = 0; i < r.plan->moves; i++) {
                const mz_move *m = &r.plan->move[i];
                const bool back = m->phase == MZ_MOVE_REDUCE;
                if (m->expert != e || (back ? m->src : m->dst) != g)
                    continue;
                assert_int_equal(back ? m->dst : m->src, home[e]);
                bytes[m->phase] += m->bytes;
            }
            for (int k = 0; k < 3; k++)
                assert_int_equal(bytes[k], host && g != home[e] ? r.env.weight_bytes : 0);
            fetched += host && g != home[e];
        }
    assert_true(fetched > 0);
    assert_int_equal(r.plan->moves, 3 * fetched);
    rig_close(&r);
    load_free(load);
}

static void naive_port(const mz_load *load, int32_t ranks, int32_t slots, int32_t *n,
                       double *rank) {
    const int32_t E = load->experts;
    const double mean = (double)load->pairs / ranks;
    double *cap = calloc((size_t)E, sizeof *cap);
    int32_t *left = calloc((size_t)E, sizeof *left), *used = calloc((size_t)ranks, sizeof *used);
    int32_t free_slots = ranks * slots - E;
    for (int32_t e = 0; e < E; e++)
        n[e] = 1;
    for (;;) {
        int32_t hot = 0;
        for (int32_t e = 0; e < E; e++) {
            cap[e] = (double)load->total[e] / n[e];
            hot = cap[e] > cap[hot] ? e : hot;
        }
        const double before = cap[hot] > mean ? cap[hot] : mean;
        if (free_slots == 0 || mean == 0 || cap[hot] / mean <= 1.2)
            break;
        cap[hot] = (double)load->total[hot] / (n[hot] + 1);
        double after = mean;
        for (int32_t e = 0; e < E; e++)
            after = cap[e] > after ? cap[e] : after;
        if (!(after < before))
            break;
        n[hot]++;
        free_slots--;
    }
    for (int32_t e = 0; e < E; e++) {
        cap[e] = (double)load->total[e] / n[e];
        left[e] = n[e];
    }
    for (int32_t g = 0; g < ranks; g++)
        rank[g] = 0;
    for (;;) { /* heaviest first, the lower expert first */
        int32_t e = -1, best = -1;
        for (int32_t i = 0; i < E; i++)
            if (left[i] > 0 && (e < 0 || cap[i] > cap[e]))
                e = i;
        if (e < 0)
            break;
        for (int32_t g = 0; g < ranks; g++)
            if (used[g] < slots && (best < 0 || rank[g] < rank[best]))
                best = g;
        left[e]--;
        used[best]++;
        rank[best] += cap[e];
    }
    free(cap);
    free(left);
    free(used);
}

static void port_matches_a_plain_computation(void **unused) {
    static const int32_t shapes[][3] = {{1, 5, 5}, {4, 8, 4},   {3, 7, 3},
                                        {7, 3, 2}, {8, 64, 10}, {13, 5, 1}};
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
        for (int kind = 0; kind < LOAD_KINDS; kind++) {
            const int32_t R = shapes[k][0], E = shapes[k][1], C = shapes[k][2];
            rig r;
            char text[64];
            snprintf(text, sizeof text, "flexmoe[form=scale-eplb,slots=%d]", C);
            mz_load *load = load_random(kind, R, E, 17);
            rig_open(&r, text, R, E, 0);
            rig_call(&r, load, NULL, NULL, NULL);
            int32_t n[64];
            double rank[13];
            naive_port(load, R, C, n, rank);
            for (int32_t e = 0; e < E; e++)
                assert_int_equal(r.plan->begin[e + 1] - r.plan->begin[e], n[e]);
            for (int32_t g = 0; g < R; g++) /* shares are whole rows: less than one off each */
                assert_true(fabs((double)rank_rows(r.plan, r.plan->forward, g) - rank[g]) <= C);
            rig_close(&r);
            load_free(load);
        }
}

/* ---- recommended
 * ---------------------------------------------------------------------------------*/

/* Four ranks, two slots, mains 0 to 3 on ranks 0 to 3. */
static void open_four(rig *r, const char *text) {
    rig_open(r, text, 4, 4, 0);
    assert_int_equal(r->traits.interval, 10);
    mz_load *any = load_even(4, 4, (int64_t[]){100, 100, 100, 100});
    rig_call(r, any, NULL, NULL, NULL); /* the first step has no history: mains */
    assert_int_equal(r->plan->begin[4], 4);
    assert_int_equal(r->plan->moves, 0);
    load_free(any);
}

static void step_on(rig *r, const int64_t *seen) {
    mz_load *load = load_even(r->env.ranks, r->env.experts, seen);
    rig_call(r, load, load, NULL, NULL);
    load_free(load);
}

static void expect_hosts(const rig *r, int32_t e, const int32_t *host, int32_t n) {
    assert_int_equal(r->plan->begin[e + 1] - r->plan->begin[e], n);
    for (int32_t k = 0; k < n; k++) {
        int32_t found = 0, wanted = 0;
        for (int32_t i = 0; i < n; i++) {
            found += r->plan->rank[r->plan->begin[e] + i] == host[k];
            wanted += host[i] == host[k];
        }
        assert_int_equal(found, wanted);
    }
}

/* Copies in this plan: count, and the last one's ends. */
static int32_t copies(const rig *r, int32_t *src, int32_t *dst) {
    int32_t n = 0;
    for (int32_t i = 0; i < r->plan->moves; i++) {
        const mz_move *m = &r->plan->move[i];
        if (m->phase != MZ_MOVE_STEP)
            continue;
        assert_true(m->change && m->hide == MZ_HIDE_NOTHING);
        assert_int_equal(m->bytes, 18 * r->env.expert_parameters); /* 2 weight + 16 optimizer */
        *src = m->src;
        *dst = m->dst;
        n++;
    }
    return n;
}

/* Bytes that each host of an expert sends into its all-reduce. */
static int64_t ring_bytes(const rig *r, int32_t e) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < r->plan->moves; i++) {
        const mz_move *m = &r->plan->move[i];
        if (m->phase == MZ_MOVE_REDUCE_STEP && m->expert == e) {
            assert_true(m->kind == MZ_MOVE_GRADIENTS && m->hide == MZ_HIDE_LAYERS && !m->change);
            bytes += m->bytes;
        }
    }
    return bytes;
}

static void expand_and_shrink_by_hand(void **unused) {
    rig r;
    int32_t src = -1, dst = -1;
    open_four(&r, "flexmoe[slots=2,migrate=no]");
    const int64_t W = r.env.weight_bytes;
    /* Expert 0: 400 rows, then 200 + 200 (ranks 0, 1), 133 on three, 100 on all four: the busiest
     * has 400, 300, 233, 200 rows, the mean is 175. */
    step_on(&r, (int64_t[]){400, 100, 100, 100});
    expect_hosts(&r, 0, (int32_t[]){0, 1, 2, 3}, 4);
    assert_int_equal(r.plan->begin[4], 7);
    assert_int_equal(copies(&r, &src, &dst), 3);
    assert_int_equal(src, 0);
    assert_int_equal(ring_bytes(&r, 0), 4 * (2 * 3 * W / 4));
    for (int32_t g = 0; g < 4; g++)
        assert_int_equal(rank_rows(r.plan, r.plan->forward, g), g == 0 ? 100 : 200);
    /* Now expert 3: its second vExpert takes the free slot of rank 0 (225 on ranks 0 and 3). A
     * third in the place of expert 0's on rank 1 would leave 233 there: undone. */
    step_on(&r, (int64_t[]){100, 100, 100, 400});
    expect_hosts(&r, 0, (int32_t[]){0, 1, 2, 3}, 4);
    expect_hosts(&r, 3, (int32_t[]){3, 0}, 2);
    assert_int_equal(copies(&r, &src, &dst), 1);
    assert_true(src == 3 && dst == 0);
    assert_int_equal(ring_bytes(&r, 3), 2 * W);
    /* All slots full, ranks at 310, 20, 110, 310: expert 0 gives up rank 1, the least loaded. */
    step_on(&r, (int64_t[]){40, 10, 100, 600});
    expect_hosts(&r, 0, (int32_t[]){0, 2, 3}, 3);
    expect_hosts(&r, 3, (int32_t[]){3, 0, 1}, 3);
    assert_int_equal(copies(&r, &src, &dst), 1);
    assert_true(src == 0 && dst == 1); /* one domain: the lowest host */
    /* Below the threshold nothing changes. */
    step_on(&r, (int64_t[]){150, 50, 150, 450});
    assert_int_equal(copies(&r, &src, &dst), 0);
    rig_close(&r);
}

/* Two ranks, both experts on both. With equal loads each may as well have a rank of its own: no
 * all-reduce is left, and one vExpert each. Nothing is copied: both are there already. */
static void migrate_by_hand(void **unused) {
    for (int migrate = 0; migrate < 2; migrate++) {
        rig r;
        int32_t src, dst;
        rig_open(&r, migrate ? "flexmoe[slots=2]" : "flexmoe[slots=2,migrate=no]", 2, 2, 0);
        step_on(&r, (int64_t[]){400, 100});
        expect_hosts(&r, 0, (int32_t[]){0, 1}, 2);
        step_on(&r, (int64_t[]){100, 400});
        expect_hosts(&r, 1, (int32_t[]){0, 1}, 2);
        step_on(&r, (int64_t[]){250, 250});
        assert_int_equal(copies(&r, &src, &dst), 0);
        expect_hosts(&r, 0, migrate ? (int32_t[]){1} : (int32_t[]){0, 1}, migrate ? 1 : 2);
        expect_hosts(&r, 1, migrate ? (int32_t[]){0} : (int32_t[]){0, 1}, migrate ? 1 : 2);
        assert_int_equal(ring_bytes(&r, 0), migrate ? 0 : 2 * r.env.weight_bytes);
        assert_int_equal(rank_rows(r.plan, r.plan->forward, 0), 250);
        rig_close(&r);
    }
}

/* The model of a step for a plan's hosts, from the counts: busiest rank, and all all-reduces. */
static double plain_time(const rig *r, const mz_load *load, double *sync_time) {
    const mz_plan *p = r->plan;
    double worst = 0;
    *sync_time = 0;
    for (int32_t g = 0; g < p->ranks; g++) {
        double t = 0;
        for (int32_t e = 0; e < p->experts; e++) {
            bool host[16] = {0}, apart = false;
            double here = 0, n = p->begin[e + 1] - p->begin[e], m = 0;
            for (int32_t i = p->begin[e]; i < p->begin[e + 1]; i++) {
                m += !host[p->rank[i]];
                host[p->rank[i]] = true;
                here += p->rank[i] == g;
                apart = apart || r->domain[p->rank[i]] != r->domain[p->rank[p->begin[e]]];
            }
            for (int32_t s = 0; s < p->ranks; s++) {
                const double rows = (double)load->count[s * p->experts + e] * here / n;
                const double bw =
                    r->domain[s] == r->domain[g] ? r->env.inside_bytes_s : r->env.outside_bytes_s;
                t += rows * 3 * r->env.pair_seconds;
                t += s == g ? 0 : rows * 4 * (double)r->env.token_bytes / bw;
            }
            const double sync = 2 * (m - 1) / m * (double)r->env.weight_bytes /
                                (apart ? r->env.outside_bytes_s : r->env.inside_bytes_s);
            t += host[g] ? sync : 0;
            *sync_time += g == 0 ? sync : 0;
        }
        worst = t > worst ? t : worst;
    }
    return worst;
}

static double plain_ratio(const rig *r, const mz_load *load) {
    const mz_plan *p = r->plan;
    double most = 0;
    for (int32_t g = 0; g < p->ranks; g++) {
        double rows = 0;
        for (int32_t e = 0; e < p->experts; e++)
            for (int32_t i = p->begin[e]; i < p->begin[e + 1]; i++)
                rows +=
                    p->rank[i] == g ? (double)load->total[e] / (p->begin[e + 1] - p->begin[e]) : 0;
        most = rows > most ? rows : most;
    }
    return most * p->ranks / (double)load->pairs;
}

/* Every decision lowers the modelled time of what it saw, or leaves everything as it is; below the
 * threshold, or without a gain, it stops: deciding again changes nothing. */
static void only_gains(void **unused) {
    static const int32_t shapes[][3] = {{4, 8, 2}, {3, 7, 0}, {8, 16, 4}, {7, 3, 2}, {5, 13, 2}};
    int32_t changed = 0;
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
        for (int migrate = 0; migrate < 2; migrate++) {
            rig r;
            rig_open(&r, migrate ? "flexmoe" : "flexmoe[migrate=no]", shapes[k][0], shapes[k][1],
                     shapes[k][2]);
            for (int step = 0; step < 12; step++) {
                mz_load *load =
                    load_random(step % LOAD_KINDS, shapes[k][0], shapes[k][1], (uint64_t)step);
                double sync;
                rig_call(&r, load, NULL, NULL, NULL); /* hosts as they are */
                const double before = plain_time(&r, load, &sync);
                const double ratio = load->pairs > 0 ? plain_ratio(&r, load) : 1;
                rig_call(&r, load, load, NULL, NULL);
                const double after = plain_time(&r, load, &sync);
                assert_true(after <= before * (1 + 1e-9));
                if (ratio <= 1.2 && load->pairs > 0 && !migrate)
                    assert_true(after == before);
                changed += after < before * (1 - 1e-9);
                const int32_t n = r.plan->begin[shapes[k][1]];
                int32_t hosts[64];
                memcpy(hosts, r.plan->rank, sizeof *hosts * (size_t)n);
                rig_call(&r, load, migrate ? NULL : load, NULL, NULL);
                assert_int_equal(r.plan->begin[shapes[k][1]], n);
                assert_memory_equal(hosts, r.plan->rank, sizeof *hosts * (size_t)n);
                load_free(load);
            }
            rig_close(&r);
        }
    print_message("%d decisions changed something\n", changed);
    assert_true(changed > 20);
}

static void what_lasts(void **unused) {
    rig r;
    rig_open(&r, "flexmoe[interval=50]", 4, 8, 2);
    assert_int_equal(r.traits.interval, 50);
    assert_true(r.traits.sees == MZ_SEES_HISTORY && r.traits.lag == 1 && r.traits.window == 1);
    assert_true(r.traits.replica_memory == MZ_REPLICAS_RESIDENT && r.traits.replica_optimizer);
    assert_false(r.traits.lossy || r.traits.sharded_weights);
    /* Layers are planned apart; later micro-batches keep the step's placement. */
    const int64_t hot[] = {900, 10, 10, 10, 10, 10, 10, 10};
    step_on(&r, hot);
    const int32_t n = r.plan->begin[8];
    assert_true(n > 8);
    r.micro_batch = 1;
    step_on(&r, (int64_t[]){10, 10, 10, 10, 10, 10, 10, 900});
    assert_int_equal(r.plan->begin[8], n);
    r.micro_batch = 0;
    r.layer = 1;
    mz_load *load = load_even(4, 8, hot);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->begin[8], 8);
    load_free(load);
    rig_close(&r);
}

/* ---- laer
 * ----------------------------------------------------------------------------------------*/

/* One round of the port on counts a[e * R + g]; false where there is nothing to trade. */
static bool naive_round(const machine *m, const mz_load *seen, int32_t *a) {
    const int32_t R = m->ranks, E = m->experts;
    int64_t share[64], rows[16];
    int32_t n[64] = {0}, hot = 0, cold = -1;
    for (int32_t e = 0; e < E; e++) {
        for (int32_t g = 0; g < R; g++)
            n[e] += a[e * R + g];
        share[e] = seen->total[e] / n[e];
        hot = share[e] > share[hot] ? e : hot;
    }
    for (int32_t e = 0; e < E; e++) /* the last of the falling order: lowest, then highest number */
        if (n[e] > m->domains && (cold < 0 || share[e] <= share[cold]))
            cold = e;
    if (cold < 0 || cold == hot)
        return false;
    for (int32_t g = 0; g < R; g++)
        rows[g] = naive_rank_rows(m, seen, a, g);
    for (int32_t d = 0; d < m->domains; d++) {
        int32_t from = -1, with = -1, other = -1;
        for (int32_t g = 0; g < R; g++) {
            if (m->domain[g] != d)
                continue;
            if (a[cold * R + g] > 0 && (from < 0 || rows[g] < rows[from]))
                from = g;
            if (with < 0 && a[hot * R + g] > 0 && a[hot * R + g] < m->slots)
                with = g;
        }
        if (from < 0)
            continue;
        a[cold * R + from]--;
        if (with < 0 || with == from) {
            a[hot * R + from]++;
            continue;
        }
        for (int32_t e = 0; e < E; e++)
            if (e != hot && a[e * R + with] > 0 && (other < 0 || share[e] > share[other]))
                other = e;
        a[hot * R + with]++;
        a[other * R + with]--;
        a[other * R + from]++;
    }
    return true;
}

static void naive_flex(const machine *m, const mz_load *seen, int32_t *a) {
    const size_t cells = (size_t)(m->experts * m->ranks);
    int32_t *trial = calloc(cells, sizeof *trial);
    for (int round = 0; round <= 10; round++) {
        double most[2] = {0}, least[2] = {INFINITY, INFINITY};
        memcpy(trial, a, sizeof *a * cells);
        if (!naive_round(m, seen, trial))
            break;
        for (int32_t g = 0; g < m->ranks; g++)
            for (int k = 0; k < 2; k++) {
                const double rows = (double)naive_rank_rows(m, seen, k ? trial : a, g);
                most[k] = rows > most[k] ? rows : most[k];
                least[k] = rows < least[k] ? rows : least[k];
            }
        const double now = least[0] > 0 ? most[0] / least[0] : INFINITY;
        const double then = least[1] > 0 ? most[1] / least[1] : INFINITY;
        if (round == 10 || !(now > 1) || !(most[1] < most[0] || then < now))
            break;
        memcpy(a, trial, sizeof *a * cells);
    }
    free(trial);
}

static void one_group(int32_t ranks, int32_t experts, int32_t domain, int32_t slots, int *changes) {
    rig r;
    char text[64];
    snprintf(text, sizeof text, "flexmoe[form=laer,slots=%d]", slots);
    rig_open(&r, text, ranks, experts, domain);
    assert_true(r.traits.sharded_weights && r.traits.history_calls && r.traits.plan_hidden);
    assert_true(r.traits.window == 5 && r.traits.lag == 1 && r.traits.interval == 1);
    const machine m = {.ranks = ranks,
                       .experts = experts,
                       .slots = slots,
                       .domains = r.env.domains,
                       .domain = r.domain};
    int32_t *a = calloc((size_t)(experts * ranks), sizeof *a), n = (experts + slots - 1) / slots;
    for (int32_t g = 0; g < ranks; g++)
        for (int32_t i = 0; i < slots; i++)
            a[(i * n + g % n) % experts * ranks + g]++;
    for (int call = 0; call < 8; call++) {
        mz_load *seen = load_random(call % LOAD_KINDS, ranks, experts, (uint64_t)(50 + call));
        mz_load *now = load_random(LOAD_RANDOM, ranks, experts, (uint64_t)(70 + call));
        rig_call(&r, now, call > 0 ? seen : NULL, NULL, NULL);
        if (call > 0 && seen->pairs > 0)
            naive_flex(&m, seen, a);
        for (int32_t e = 0; e < experts; e++)
            for (int32_t g = 0; g < ranks; g++) {
                int32_t held = 0;
                int64_t rows = 0, wanted = 0;
                for (int32_t i = r.plan->begin[e]; i < r.plan->begin[e + 1]; i++) {
                    held += r.plan->rank[i] == g;
                    rows += r.plan->rank[i] == g ? r.plan->forward[i] : 0;
                }
                for (int32_t s = 0; s < ranks; s++)
                    wanted += naive_rows(&m, a, now->count[s * experts + e], s, e, g);
                assert_int_equal(held, a[e * ranks + g]);
                assert_int_equal(rows, wanted);
            }
        assert_int_equal(r.plan->moves, ranks > 1 ? 3 * ranks * slots : 0);
        *changes += strcmp(r.plan->why, "0 rounds") != 0;
        load_free(seen);
        load_free(now);
    }
    free(a);
    rig_close(&r);
}

static void laer_port_matches_a_plain_computation(void **unused) {
    static const int32_t shapes[][4] = {{1, 5, 0, 7}, {4, 8, 2, 4},  {4, 8, 0, 3}, {8, 8, 4, 2},
                                        {6, 9, 3, 4}, {7, 3, 2, 2},  {4, 2, 2, 3}, {2, 3, 0, 4},
                                        {3, 2, 0, 2}, {5, 13, 0, 6}, {8, 32, 2, 9}};
    int changes = 0;
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
        one_group(shapes[k][0], shapes[k][1], shapes[k][2], shapes[k][3], &changes);
    print_message("%d calls changed the placement\n", changes);
    assert_true(changes > 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_vector),
        cmocka_unit_test(slot_sweep),
        cmocka_unit_test(a_tie_ends_the_search),
        cmocka_unit_test(sync_bytes_weigh),
        cmocka_unit_test(fetches),
        cmocka_unit_test(port_matches_a_plain_computation),
        cmocka_unit_test(expand_and_shrink_by_hand),
        cmocka_unit_test(migrate_by_hand),
        cmocka_unit_test(only_gains),
        cmocka_unit_test(what_lasts),
        cmocka_unit_test(laer_port_matches_a_plain_computation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
