/* topoep against the vectors and figures of balancing-systems.md sections 9.6 and 15, and against
 * the rule written down a second time over the full matrix of (source, expert, rank). */
#include "sweep.h"

static const int64_t small_rows[4][8] = {{300, 20, 30, 10, 10, 10, 10, 10},
                                         {250, 30, 60, 20, 10, 10, 10, 10},
                                         {200, 20, 100, 30, 20, 10, 20, 10},
                                         {150, 30, 110, 40, 10, 20, 20, 10}};

/* Section 15: domains {0,1}, {2,3}, W = 1000, S_tok = 2, 3 slots. */
static mz_load *open_small(rig *r, const char *text) {
    mz_load *load = load_new(4, 8);
    memcpy(load->count, small_rows, sizeof small_rows);
    mz_load_sum(load);
    rig_prepare(r, 4, 8, 2);
    r->env.weight_bytes = 1000;
    r->env.token_bytes = 2;
    if (rig_start(r, text) != MZ_OK)
        fail_msg("%s", r->err.msg);
    rig_call(r, load, NULL, NULL, NULL);
    return load;
}

static int64_t pairs_between_domains(const rig *r) {
    const mz_plan *p = r->plan;
    int64_t sum = 0;
    for (int32_t i = 0; i < p->begin[p->experts]; i++)
        for (int64_t j = p->entry_begin[i]; j < p->entry_begin[i + 1]; j++)
            sum += r->domain[p->entry_source[j]] != r->domain[p->rank[i]] ? p->entry_pairs[j] : 0;
    return sum;
}

static void small_vector(void **unused) {
    rig r;
    mz_load *load = open_small(&r, "topoep[slots=3]");
    static const int64_t rows[] = {525, 525, 275, 275};
    for (int32_t g = 0; g < 4; g++)
        assert_int_equal(rank_rows(r.plan, r.plan->forward, g), rows[g]);
    assert_int_equal(r.plan->begin[8] - 8, 3);
    assert_string_equal(r.plan->why, "3 replicas, 1 chosen to save bytes between domains");
    const double between = 100.0 * (double)pairs_between_domains(&r) / (double)load->pairs;
    assert_true(between > 25.55 && between < 25.65);
    rig_close(&r);
    load_free(load);
}

/* Section 9.5: W forward, W again and W of bf16 gradients; E * W of accumulators; two chunks. */
static void movement(void **unused) {
    rig r;
    mz_load *load = open_small(&r, "topoep[slots=3]");
    int64_t bytes[MZ_MOVE_REDUCE_STEP + 1] = {0};
    for (int32_t i = 0; i < r.plan->moves; i++)
        bytes[r.plan->move[i].phase] += r.plan->move[i].bytes;
    assert_int_equal(bytes[MZ_MOVE_FORWARD], 3000);
    assert_int_equal(bytes[MZ_MOVE_BACKWARD], 3000);
    assert_int_equal(bytes[MZ_MOVE_REDUCE], 3000);
    assert_int_equal(r.plan->moves, 9);
    assert_int_equal(r.traits.buffer_bytes, 8 * 1000);
    assert_int_equal(r.traits.chunks, 2);
    assert_int_equal(r.traits.replica_memory, MZ_REPLICAS_SHARED);
    assert_int_equal(r.traits.replica_gradient_bytes, 0);
    rig_close(&r);
    load_free(load);
}

/* A copy pays from 2 * D * S_tok > W on: with W = 6HI and S_tok = 2H from D > 1.5 I = 48 pairs. */
static void break_even(void **unused) {
    for (int64_t pairs = 48; pairs <= 49; pairs++) {
        rig r;
        mz_load *load = load_new(2, 2);
        load->count[0] = 1000;
        load->count[2] = pairs;
        load->count[3] = 1000; /* rank 1 is busy: balancing would send nothing there */
        mz_load_sum(load);
        rig_open(&r, "topoep", 2, 2, 1);
        rig_call(&r, load, NULL, NULL, NULL);
        assert_int_equal(r.plan->begin[1], pairs > 48 ? 2 : 1);
        assert_int_equal(pairs_between_domains(&r), pairs > 48 ? 0 : pairs);
        rig_close(&r);
        load_free(load);
    }
}

/* ---- the rule a second time
 * ---------------------------------------------------------------------*/
enum { R_MOST = 16, E_MOST = 64 };
typedef struct reference {
    int32_t ranks, experts, slots, domain[R_MOST], home[E_MOST], used[R_MOST];
    bool hosts[E_MOST][R_MOST];
    int64_t q[R_MOST][E_MOST][R_MOST], load[R_MOST];
} reference;

static void reference_stage1(reference *x, const mz_load *load, int64_t W, int64_t token) {
    bool done[E_MOST][R_MOST] = {0};
    for (;;) {
        int64_t most = 0;
        int32_t be = -1, bd = -1;
        for (int32_t e = 0; e < x->experts; e++)
            for (int32_t d = 0; d <= x->domain[x->ranks - 1]; d++) {
                int64_t pairs = 0;
                for (int32_t s = 0; s < x->ranks; s++)
                    pairs += x->domain[s] == d ? load->count[s * x->experts + e] : 0;
                int64_t saved = 2 * pairs * token - W;
                if (!done[e][d] && d != x->domain[x->home[e]] && saved > most) {
                    most = saved;
                    be = e;
                    bd = d;
                }
            }
        if (be < 0)
            return;
        done[be][bd] = true;
        int32_t g = -1;
        for (int32_t r = 0; r < x->ranks; r++)
            if (x->domain[r] == bd && x->used[r] < x->slots && (g < 0 || x->used[r] < x->used[g]))
                g = r;
        if (g >= 0) {
            x->hosts[be][g] = true;
            x->used[g]++;
        }
    }
}

/* One cell; fill: pair after pair to the least loaded host, which is what filling levels is. */
static void reference_first(reference *x, int32_t s, int32_t e, int64_t rows, bool fill) {
    int32_t list[R_MOST], n = 0;
    for (int pass = 0; pass < 2 && n == 0; pass++)
        for (int32_t g = 0; g < x->ranks; g++)
            if (x->hosts[e][g] && (pass == 1 || x->domain[g] == x->domain[s]))
                list[n++] = g;
    for (int64_t k = 0; k < rows; k++) {
        int32_t g = list[k % n];
        for (int32_t j = 0; fill && j < n; j++)
            if (x->load[list[j]] < x->load[g] || (x->load[list[j]] == x->load[g] && list[j] < g))
                g = list[j];
        x->q[s][e][g]++;
        x->load[g]++;
    }
}

static int64_t reference_pairs(const reference *x, int32_t e, int32_t g) {
    int64_t sum = 0;
    for (int32_t s = 0; s < x->ranks; s++)
        sum += x->q[s][e][g];
    return sum;
}

/* One round in domain d; false: the busiest rank could hand over nothing. */
static bool reference_round(reference *x, int32_t d, int32_t b, int64_t u_min) {
    int64_t key[5], best[5] = {0};
    bool any = false;
    for (int32_t e = 0; e < x->experts; e++)
        for (int32_t t = 0; t < x->ranks; t++) {
            int64_t pairs = reference_pairs(x, e, b), half = (x->load[b] - x->load[t]) / 2;
            if (x->domain[t] != d || x->load[t] >= x->load[b] || pairs == 0 ||
                (!x->hosts[e][t] && x->used[t] >= x->slots))
                continue;
            key[0] = pairs < half ? -pairs : -half;
            key[1] = x->load[t];
            key[2] = x->hosts[e][t] ? 0 : 1 + (x->domain[x->home[e]] != d);
            key[3] = e;
            key[4] = t;
            int order = 0;
            for (int i = 0; any && i < 5 && order == 0; i++)
                order = (key[i] > best[i]) - (key[i] < best[i]);
            if (-key[0] >= u_min && (!any || order < 0)) {
                any = true;
                memcpy(best, key, sizeof best);
            }
        }
    if (!any)
        return false;
    int32_t e = (int32_t)best[3], t = (int32_t)best[4];
    int64_t left = -best[0];
    x->used[t] += !x->hosts[e][t];
    x->hosts[e][t] = true;
    x->load[b] -= left;
    x->load[t] += left;
    for (int32_t s = 0; s < x->ranks; s++)
        for (; left > 0 && x->q[s][e][b] > 0; left--) {
            x->q[s][e][b]--;
            x->q[s][e][t]++;
        }
    return true;
}

static void reference_stage2(reference *x, int64_t u_min, int each, int in_all) {
    for (int32_t d = 0; d <= x->domain[x->ranks - 1]; d++) {
        bool stuck[R_MOST] = {0};
        for (int k = 0; k < each && in_all > 0; k++, in_all--) {
            int32_t b = -1;
            for (int32_t r = 0; r < x->ranks; r++)
                if (x->domain[r] == d && !stuck[r] && (b < 0 || x->load[r] > x->load[b]))
                    b = r;
            if (b < 0)
                break;
            if (reference_round(x, d, b, u_min))
                memset(stuck, 0, sizeof stuck);
            else
                stuck[b] = true;
        }
    }
}

static void reference_plan(reference *x, const rig *r, const mz_load *load, int32_t slots,
                           int64_t u_min, bool fill, int each, int in_all) {
    memset(x, 0, sizeof *x);
    x->ranks = load->sources;
    x->experts = load->experts;
    x->slots = slots;
    memcpy(x->domain, r->domain, sizeof(int32_t) * (size_t)x->ranks);
    mz_layout_mains(x->ranks, x->experts, x->home);
    for (int32_t e = 0; e < x->experts; e++) {
        x->hosts[e][x->home[e]] = true;
        x->used[x->home[e]]++;
    }
    reference_stage1(x, load, r->env.weight_bytes, r->env.token_bytes);
    bool done[R_MOST][E_MOST] = {0};
    for (int32_t k = 0; k < x->ranks * x->experts; k++) {
        int32_t bs = -1, be = -1;
        for (int32_t s = 0; s < x->ranks; s++)
            for (int32_t e = 0; e < x->experts; e++)
                if (!done[s][e] && (bs < 0 || (fill && load->count[s * x->experts + e] >
                                                           load->count[bs * x->experts + be]))) {
                    bs = s;
                    be = e;
                }
        done[bs][be] = true;
        reference_first(x, bs, be, load->count[bs * x->experts + be], fill);
    }
    reference_stage2(x, u_min, each, in_all);
}

static void compare(const rig *r, const reference *x) {
    const mz_plan *p = r->plan;
    int64_t seen = 0, all = 0;
    for (int32_t e = 0; e < x->experts; e++)
        for (int32_t i = p->begin[e]; i < p->begin[e + 1]; i++)
            for (int64_t j = p->entry_begin[i]; j < p->entry_begin[i + 1]; j++) {
                assert_int_equal(p->entry_pairs[j], x->q[p->entry_source[j]][e][p->rank[i]]);
                seen += p->entry_pairs[j];
            }
    for (int32_t g = 0; g < x->ranks; g++)
        all += x->load[g];
    assert_int_equal(seen, all);
}

static void equals_the_rule(void **unused) {
    static const struct {
        const char *text;
        int64_t u_min;
        bool fill;
        int each, in_all;
    } variants[] = {{"topoep", 1, false, 64, 1 << 20},
                    {"topoep[u_min=40]", 40, false, 64, 1 << 20},
                    {"topoep[rounds=3]", 1, false, 3, 1 << 20},
                    {"topoep[solver=cpu]", 1, true, 1 << 20, 4096},
                    {"topoep[solver=cpu,rounds=5]", 1, true, 1 << 20, 5}};
    static const int32_t shapes[][3] = {{1, 5, 0},  {3, 7, 0},  {7, 3, 2},
                                        {8, 12, 4}, {4, 16, 2}, {16, 20, 8}};
    static reference x;
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++)
        for (int trial = 0; trial < 6 * LOAD_KINDS; trial++) {
            const int32_t *shape = shapes[trial % 6];
            mz_load *load = load_random(trial / 6, shape[0], shape[1], 70 + (uint64_t)trial);
            rig r;
            rig_open(&r, variants[v].text, shape[0], shape[1], shape[2]);
            for (int call = 0; call < 2; call++)
                rig_call(&r, load, NULL, NULL, NULL);
            reference_plan(&x, &r, load, r.traits.slots, variants[v].u_min, variants[v].fill,
                           variants[v].each, variants[v].in_all);
            compare(&r, &x);
            rig_close(&r);
            load_free(load);
        }
}

/* Section 9.6: none 8.38, then 3.80, 1.30, 1.30, 1.30 with one to four extra slots. */
static void slot_sweep(void **unused) {
    static const double published[] = {3.80, 1.30, 1.30, 1.30};
    static const char *const texts[] = {"topoep[slots=21]", "topoep[slots=22]", "topoep[slots=23]",
                                        "topoep[slots=24]"};
    mz_load *load = sweep_load(1.5, SWEEP_MODULO, 5);
    for (int i = 0; i < 4; i++) {
        rig r;
        rig_prepare(&r, SWEEP_RANKS, SWEEP_EXPERTS, SWEEP_NODE);
        r.env.weight_bytes = SWEEP_WEIGHT_BYTES;
        r.env.token_bytes = SWEEP_TOKEN_BYTES;
        assert_int_equal(rig_start(&r, texts[i]), MZ_OK);
        rig_call(&r, load, NULL, NULL, NULL);
        const double imbalance = sweep_imbalance(r.plan, load);
        print_message("%d extra slots: %.3f (published %.2f), %s, %.1f %% between nodes\n", i + 1,
                      imbalance, published[i], r.plan->why,
                      100.0 * (double)pairs_between_domains(&r) / (double)load->pairs);
        assert_true(imbalance > 0.99 * published[i] && imbalance < 1.01 * published[i]);
        rig_close(&r);
    }
    load_free(load);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_vector), cmocka_unit_test(movement),
        cmocka_unit_test(break_even),   cmocka_unit_test(equals_the_rule),
        cmocka_unit_test(slot_sweep),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
