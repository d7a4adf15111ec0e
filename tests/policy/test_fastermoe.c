/* fastermoe: its rules against a plain re-computation and the slot sweep of balancing-systems.md
 * 9.6, its transfers (section 12), its gates (6.2) against sorted lists. */
#include "sweep.h"

#include <math.h>

/* ---- rules -------------------------------------------------------------------------------------
 * The model of each rule as balancing-systems.md 6.1 words it, for a set of shadowed experts, from
 * nothing but the counts. */

typedef struct rule_case {
    const mz_policy_env *env;
    const mz_load *load;
    const char *rule;
    int32_t *home; /* [E] */
} rule_case;

static int64_t count_at(const rule_case *c, int32_t s, int32_t e) {
    return c->load->count[(int64_t)s * c->env->experts + e];
}

/* Rows of the busiest rank. */
static int64_t busiest(const rule_case *c, const bool *shadowed) {
    int64_t most = 0;
    for (int32_t r = 0; r < c->env->ranks; r++) {
        int64_t rows = 0;
        for (int32_t e = 0; e < c->env->experts; e++)
            rows += shadowed[e] ? count_at(c, r, e) : (c->home[e] == r ? c->load->total[e] : 0);
        most = rows > most ? rows : most;
    }
    return most;
}

/* Rows in or out of the busiest rank, between or inside domains. */
static int64_t busiest_port(const rule_case *c, const bool *shadowed, bool inside) {
    int64_t most = 0;
    for (int32_t r = 0; r < c->env->ranks; r++) {
        int64_t sent = 0, received = 0;
        for (int32_t e = 0; e < c->env->experts; e++)
            for (int32_t s = 0; s < c->env->ranks && !shadowed[e]; s++) {
                const int32_t h = c->home[e];
                if (s == h || (c->env->domain[s] == c->env->domain[h]) != inside)
                    continue;
                sent += s == r ? count_at(c, s, e) : 0;
                received += h == r ? count_at(c, s, e) : 0;
            }
        most = sent > most ? sent : most;
        most = received > most ? received : most;
    }
    return most;
}

static double seconds(const rule_case *c, const bool *shadowed) {
    int32_t n = 0;
    for (int32_t e = 0; e < c->env->experts; e++)
        n += shadowed[e];
    const double bw = 50e9 / 8, flops = 11.5e12, peak = (double)busiest(c, shadowed);
    const double W = (double)c->env->weight_bytes, H = (double)c->env->hidden;
    const double a = (double)c->env->intermediate / H * H * H;
    if (strcmp(c->rule, "port") == 0)
        return n == 0 ? 3 * 4 * (W / 2) / flops * peak + 4 * peak * (double)c->env->token_bytes / bw
                      : 3 * 4 * (W / 2) / flops * peak + 2 * (n * W) / bw;
    if (strcmp(c->rule, "prototype") == 0)
        return n == 0 ? 12 * a * 4 * peak / flops + 4 * peak * H * 4 / bw
                      : 12 * a * 4 * peak / flops + n * 2 * a * 4 / bw * 2;
    const double in = (double)busiest_port(c, shadowed, true) / c->env->inside_bytes_s;
    const double out = (double)busiest_port(c, shadowed, false) / c->env->outside_bytes_s;
    const double slowest = fmin(c->env->inside_bytes_s, c->env->outside_bytes_s);
    return 3 * c->env->pair_seconds * peak +
           4 * (double)c->env->token_bytes * (in > out ? in : out) + n * 2 * W / slowest;
}

/* The largest load (an expert's, or a rank's) after which `done` says nothing. */
static int32_t next_largest(const int64_t *load, const bool *done, int32_t n) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++)
        if (!done[i] && (best < 0 || load[i] > load[best]))
            best = i;
    return best;
}

/* One expert after the other while the time falls and every rank has a slot. */
static void greedy(const rule_case *c, int32_t extra, bool *shadowed) {
    const int32_t E = c->env->experts;
    double best = seconds(c, shadowed);
    for (;;) {
        const int32_t e = next_largest(c->load->total, shadowed, E);
        if (e < 0 || c->env->ranks == 1)
            return;
        shadowed[e] = true;
        const double now = seconds(c, shadowed);
        bool room = true;
        for (int32_t r = 0; r < c->env->ranks; r++) {
            int32_t held = 0;
            for (int32_t i = 0; i < E; i++)
                held += shadowed[i] && c->home[i] != r;
            room = room && held <= extra;
        }
        if (!(now < best) || !room) {
            shadowed[e] = false;
            return;
        }
        best = now;
    }
}

/* FastMoE: (3 comp + 4 feat) B[i] over the sorted list, plus one transfer per shadow. */
static void greedy_list(const rule_case *c, bool *shadowed) {
    const double d = 2048, a = 2 * d * d, bw = 50e9 / 8, flops = 11.5e12;
    const double row = 3 * (4 * a / flops) + 4 * (d * 4 / bw), transfer = 2 * a * 4 / bw;
    int32_t n = 0, e = next_largest(c->load->total, shadowed, c->env->experts);
    double best = row * (double)c->load->total[e];
    while (c->env->ranks > 1) {
        shadowed[e] = true;
        const int32_t next = next_largest(c->load->total, shadowed, c->env->experts);
        if (next < 0 || !(row * (double)c->load->total[next] + (n + 1) * transfer < best)) {
            shadowed[e] = false;
            return;
        }
        best = row * (double)c->load->total[next] + ++n * transfer;
        e = next;
    }
}

/* The prototype on ranks: the longest prefix whose times never rise, if its best beats none. */
static void greedy_ranks(const rule_case *c, bool *shadowed) {
    const int32_t R = c->env->ranks, E = c->env->experts;
    int64_t *load = calloc((size_t)R, sizeof *load);
    bool *done = calloc((size_t)R, sizeof *done), *before = calloc((size_t)E, sizeof *before);
    for (int32_t e = 0; e < E; e++)
        load[c->home[e]] += c->load->total[e];
    const double none = seconds(c, shadowed);
    double best = INFINITY;
    for (int32_t k = 0; k < R - 1; k++) {
        const int32_t rank = next_largest(load, done, R);
        memcpy(before, shadowed, sizeof *before * (size_t)E);
        done[rank] = true;
        for (int32_t e = 0; e < E; e++)
            shadowed[e] = shadowed[e] || c->home[e] == rank;
        const double now = seconds(c, shadowed);
        if (now > best) {
            memcpy(shadowed, before, sizeof *before * (size_t)E);
            break;
        }
        best = now;
    }
    if (!(none > best))
        memset(shadowed, 0, sizeof *shadowed * (size_t)E);
    free(load);
    free(done);
    free(before);
}

static void one_rule(const char *rule, int32_t ranks, int32_t experts, int32_t domain, int kind,
                     double scale, int32_t *stopped) {
    rig r;
    char text[64];
    snprintf(text, sizeof text, "fastermoe[rule=%s]", rule);
    rig_prepare(&r, ranks, experts, domain);
    r.env.weight_bytes = (int64_t)(scale * (double)r.env.weight_bytes);
    r.env.intermediate = (int64_t)(scale * (double)r.env.intermediate);
    assert_int_equal(rig_start(&r, text), MZ_OK);
    mz_load *load = load_random(kind, ranks, experts, (uint64_t)(ranks + experts));
    rig_call(&r, load, NULL, NULL, NULL);
    rule_case c = {&r.env, load, rule, calloc((size_t)experts, sizeof(int32_t))};
    mz_layout_mains(ranks, experts, c.home);
    bool *shadowed = calloc((size_t)experts, sizeof *shadowed);
    if (strcmp(rule, "fastmoe") == 0)
        greedy_list(&c, shadowed);
    else if (strcmp(rule, "prototype") == 0)
        greedy_ranks(&c, shadowed);
    else
        greedy(&c, strcmp(rule, "port") == 0 ? 2 : experts, shadowed);
    int32_t n = 0;
    for (int32_t e = 0; e < experts; e++) {
        assert_int_equal(r.plan->begin[e + 1] - r.plan->begin[e], shadowed[e] ? ranks : 1);
        n += shadowed[e];
    }
    stopped[n == 0 ? 0 : (n < experts - 1 ? 1 : 2)]++;
    assert_int_equal(r.plan->peak_forward, busiest(&c, shadowed));
    free(shadowed);
    free(c.home);
    load_free(load);
    rig_close(&r);
}

static void rules_match_a_plain_computation(void **unused) {
    static const char *const rules[] = {"model", "fastmoe", "prototype", "port"};
    static const int32_t shapes[][3] = {{2, 4, 0}, {2, 6, 0}, {3, 6, 0},  {1, 5, 0}, {4, 8, 2},
                                        {3, 7, 0}, {7, 3, 2}, {8, 16, 4}, {5, 13, 0}};
    static const double scales[] = {0.25, 1, 4, 16, 128};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        int32_t seen[3] = {0};
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int kind = 0; kind < LOAD_KINDS; kind++)
                for (size_t k = 0; k < sizeof scales / sizeof *scales; k++)
                    one_rule(rules[i], shapes[s][0], shapes[s][1], shapes[s][2], kind, scales[k],
                             seen);
        print_message("%s: %d cases without shadows, %d with some, %d with nearly all\n", rules[i],
                      seen[0], seen[1], seen[2]);
        assert_true(seen[0] > 0);
        assert_true(seen[1] > 0 || strcmp(rules[i], "fastmoe") == 0);
    }
}

/* FastMoE's own constants: one transfer is 2 * 2 * 2048^2 * 4 / 6.25e9 = 10.737 ms, a row costs
 * 3 * 2.9178 us + 4 * 1.31072 us = 13.996 us, so a shadow must lower B by 767.1 rows. */
static void fastmoe_break_even(void **unused) {
    for (int64_t more = 767; more <= 768; more++) {
        rig r;
        const int64_t total[] = {5000 + 2 * more, 5000 + more, 5000, 4000};
        mz_load *load = load_even(4, 4, total);
        rig_open(&r, "fastermoe[rule=fastmoe]", 4, 4, 0);
        rig_call(&r, load, NULL, NULL, NULL);
        assert_int_equal(r.plan->begin[4], more == 767 ? 4 : 4 + 3 * 3);
        rig_close(&r);
        load_free(load);
    }
}

static void slot_sweep(void **unused) {
    static const double published[] = {3.65, 2.50, 2.05, 1.82}; /* 9.6, "FasterMoE port" */
    mz_load *load = sweep_load(1.5, SWEEP_MODULO, 1);
    for (int slots = 1; slots <= 4; slots++) {
        rig r;
        char text[64];
        snprintf(text, sizeof text, "fastermoe[rule=port,slots=%d]", 20 + slots);
        rig_prepare(&r, SWEEP_RANKS, SWEEP_EXPERTS, SWEEP_NODE);
        r.env.weight_bytes = SWEEP_WEIGHT_BYTES;
        r.env.token_bytes = SWEEP_TOKEN_BYTES;
        assert_int_equal(rig_start(&r, text), MZ_OK);
        rig_call(&r, load, NULL, NULL, NULL);
        const double ours = sweep_imbalance(r.plan, load);
        print_message("FasterMoE port, %d slots: %.3f (%.2f)\n", slots, ours, published[slots - 1]);
        assert_true(fabs(ours - published[slots - 1]) < 0.02); /* other random draws */
        rig_close(&r);
    }
    load_free(load);
}

/* One slot beside two mains on each of two ranks. A shadow takes a slot of the other rank only, so
 * one expert of each rank fits, and a second one of rank 0 does not. */
static void slots_of_the_port(void **unused) {
    static const int64_t totals[2][4] = {{20000, 0, 10000, 0}, {20000, 20000, 0, 0}};
    for (int both_at_home = 0; both_at_home < 2; both_at_home++) {
        rig r;
        mz_load *load = load_even(2, 4, totals[both_at_home]);
        rig_open(&r, "fastermoe[rule=port,slots=3]", 2, 4, 0);
        rig_call(&r, load, NULL, NULL, NULL);
        assert_int_equal(r.plan->begin[4], both_at_home ? 5 : 6);
        rig_close(&r);
        load_free(load);
    }
}

/* ---- movement
 * ------------------------------------------------------------------------------------*/

static void check_moves(const rig *r, mz_move_hide hide, mz_move_hide hide_back) {
    const mz_plan *p = r->plan;
    const int32_t R = p->ranks;
    const int64_t W = r->env.weight_bytes;
    int32_t *home = calloc((size_t)p->experts, sizeof *home);
    int64_t *in = calloc((size_t)(R * p->experts), sizeof *in);
    int64_t *back = calloc((size_t)(R * p->experts), sizeof *back), out[2] = {0};
    mz_layout_mains(R, p->experts, home);
    for (int32_t i = 0; i < p->moves; i++) {
        const mz_move *m = &p->move[i];
        const bool forward = m->phase == MZ_MOVE_FORWARD;
        assert_true(forward || m->phase == MZ_MOVE_REDUCE);
        assert_int_equal(m->kind, forward ? MZ_MOVE_WEIGHTS : MZ_MOVE_GRADIENTS);
        assert_int_equal(m->hide, forward ? hide : hide_back);
        assert_int_equal(m->bytes, W);
        (forward ? in : back)[m->expert * R + (forward ? m->dst : m->src)] += W;
        out[forward]++;
    }
    for (int32_t e = 0; e < p->experts; e++)
        for (int32_t g = 0; g < R; g++) {
            const bool copy = p->begin[e + 1] - p->begin[e] > 1 && g != home[e];
            assert_int_equal(in[e * R + g], copy ? W : 0); /* weights in, gradients out, once */
            assert_int_equal(back[e * R + g], copy ? W : 0);
        }
    assert_int_equal(out[0], out[1]);
    free(home);
    free(in);
    free(back);
}

static void movement(void **unused) {
    int64_t total[] = {90000, 4, 4, 4, 4, 4, 4, 4};
    mz_load *load = load_even(4, 8, total);
    rig r;
    rig_open(&r, "fastermoe", 4, 8, 2);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->moves, 2 * 3); /* one shadow: W to three ranks and back */
    assert_int_equal(r.plan->begin[1], 4);
    check_moves(&r, MZ_HIDE_DISPATCH, MZ_HIDE_LAYERS);
    assert_int_equal(r.traits.replica_memory, MZ_REPLICAS_PER_LAYER);
    assert_int_equal(r.traits.replica_gradient_bytes, r.env.weight_bytes);
    assert_int_equal(local_pairs(r.plan), 90000 + 7);
    rig_close(&r);
    rig_open(&r, "fastermoe[schedule=none,rule=prototype]", 4, 8, 2);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_true(r.plan->moves > 0);
    check_moves(&r, MZ_HIDE_NOTHING, MZ_HIDE_NOTHING);
    assert_int_equal(r.traits.chunks, 0);
    rig_close(&r);
    load_free(load);
}

static void parts_of_the_schedule(void **unused) {
    static const struct {
        const char *text;
        int32_t ranks, chunks;
    } cases[] = {{"fastermoe", 4, 0},           {"fastermoe", 5, 2},
                 {"fastermoe", 64, 16},         {"fastermoe[group=8]", 64, 8},
                 {"fastermoe[group=99]", 8, 0}, {"fastermoe[schedule=none]", 64, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig r;
        rig_open(&r, cases[i].text, cases[i].ranks, 64, 0);
        assert_int_equal(r.traits.chunks, cases[i].chunks);
        rig_close(&r);
    }
}

/* ---- gates
 * ---------------------------------------------------------------------------------------*/

typedef struct choices {
    mz_pairs pairs;
    mz_load *load;
    int64_t *token_begin, *pair_begin;
    uint16_t *token_pairs, *expert;
    float *weight;
} choices;

/* Tokens with k different experts each (0: one to five of them); coarse weights tie often. */
static choices choices_new(int32_t sources, int32_t experts, int32_t tokens, int32_t k,
                           uint64_t seed) {
    choices c = {.load = load_new(sources, experts)};
    mz_rng rng = mz_rng_make(seed, 3);
    const size_t all = (size_t)sources * (size_t)tokens;
    c.token_begin = calloc((size_t)sources + 1, sizeof(int64_t));
    c.pair_begin = calloc((size_t)sources + 1, sizeof(int64_t));
    c.token_pairs = calloc(all + 1, sizeof(uint16_t));
    c.expert = calloc(all * 8 + 1, sizeof(uint16_t));
    c.weight = calloc(all * 8 + 1, sizeof(float));
    int64_t token = 0, at = 0;
    for (int32_t s = 0; s < sources; s++) {
        const int64_t n = (int64_t)mz_rng_below(&rng, (uint64_t)tokens + 1);
        for (int64_t t = 0; t < n; t++, token++) {
            const int32_t m = k > 0 ? k : 1 + (int32_t)mz_rng_below(&rng, 5);
            const int32_t first = (int32_t)mz_rng_below(&rng, (uint64_t)experts);
            c.token_pairs[token] = (uint16_t)m;
            for (int32_t i = 0; i < m; i++, at++) {
                c.expert[at] = (uint16_t)((first + i * 3) % experts);
                c.weight[at] = (float)mz_rng_below(&rng, 32) / 32;
                c.load->count[(int64_t)s * experts + c.expert[at]]++;
            }
        }
        c.token_begin[s + 1] = token;
        c.pair_begin[s + 1] = at;
    }
    mz_load_sum(c.load);
    c.pairs = (mz_pairs){.sources = sources,
                         .top_k = k,
                         .tokens = token,
                         .pairs = at,
                         .token_begin = c.token_begin,
                         .pair_begin = c.pair_begin,
                         .token_pairs = k > 0 ? NULL : c.token_pairs,
                         .expert = c.expert,
                         .weight = c.weight};
    return c;
}

static void choices_free(choices *c) {
    void *arrays[] = {c->token_begin, c->pair_begin, c->token_pairs, c->expert, c->weight};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    load_free(c->load);
}

typedef struct ranked {
    float score;
    int64_t pair, token;
} ranked;

static int by_score(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->pair < y->pair ? -1 : 1;
}

/* What the gate keeps, from sorted lists: kept[pair]. */
static void brute_gate(const choices *c, const rig *r, double fraction, bool topology,
                       uint8_t *kept) {
    int32_t *home = calloc((size_t)r->env.experts, sizeof *home);
    mz_layout_mains(r->env.ranks, r->env.experts, home);
    ranked *outside = calloc((size_t)c->pairs.tokens + 1, sizeof *outside);
    for (int32_t s = 0; s < r->env.ranks; s++) {
        const int64_t tokens = c->token_begin[s + 1] - c->token_begin[s];
        const int64_t limit = (int64_t)floor(fraction * (double)tokens);
        int64_t n = 0;
        for (int pass = 0; pass < 2; pass++) {
            const bool limited = topology && n >= limit && pass == 1;
            if (pass == 1)
                qsort(outside, (size_t)n, sizeof *outside, by_score);
            int64_t p = c->pair_begin[s];
            for (int64_t t = c->token_begin[s]; t < c->token_begin[s + 1]; t++) {
                ranked list[8];
                const int32_t k = c->token_pairs[t];
                for (int32_t i = 0; i < k; i++)
                    list[i] = (ranked){c->weight[p + i], p + i, t};
                p += k;
                qsort(list, (size_t)k, sizeof *list, by_score);
                const bool out = r->domain[home[c->expert[list[0].pair]]] != r->domain[s];
                if (pass == 0) {
                    if (out)
                        outside[n++] = list[0];
                    continue;
                }
                bool back = false;
                for (int64_t i = 0; limited && i < limit; i++)
                    back = back || outside[i].token == t;
                int32_t taken = back ? 1 : 0;
                for (int32_t i = 0; i < k && taken < 2; i++)
                    if (!limited || r->domain[home[c->expert[list[i].pair]]] == r->domain[s]) {
                        kept[list[i].pair] = 1;
                        taken++;
                    }
                if (back)
                    kept[list[0].pair] = 1;
            }
        }
    }
    free(outside);
    free(home);
}

static void one_gate(int32_t ranks, int32_t experts, int32_t domain, int32_t k, double fraction,
                     bool topology) {
    rig r;
    char text[96];
    choices c = choices_new(ranks, experts, 60, k, (uint64_t)(ranks * 10 + k));
    snprintf(text, sizeof text, "fastermoe[gate=%s,fraction=%g]", topology ? "topology" : "top2",
             fraction);
    rig_open(&r, text, ranks, experts, domain);
    assert_true(r.traits.lossy && r.traits.needs_weights && r.traits.route_plans);
    rig_call(&r, c.load, NULL, NULL, &c.pairs);
    uint8_t *kept = calloc((size_t)c.pairs.pairs + 1, 1);
    int64_t *rows = calloc((size_t)(ranks * experts), sizeof *rows), sum = 0;
    double score = 0, all = 0;
    brute_gate(&c, &r, fraction, topology, kept);
    for (int32_t s = 0; s < ranks; s++)
        for (int64_t p = c.pair_begin[s]; p < c.pair_begin[s + 1]; p++) {
            rows[s * experts + c.expert[p]] += kept[p];
            sum += kept[p];
            score += kept[p] ? (double)c.weight[p] * c.weight[p] : 0;
            all += (double)c.weight[p] * c.weight[p];
        }
    for (int32_t i = 0; i < ranks * experts; i++)
        assert_int_equal(c.load->count[i] - r.plan->dropped[i], rows[i]);
    assert_int_equal(r.plan->kept_pairs, sum);
    assert_int_equal(r.plan->dropped_pairs, c.load->pairs - sum);
    assert_true(fabs(r.plan->kept_score - score) < 1e-9 * (1 + score));
    assert_true(fabs(r.plan->total_score - all) < 1e-9 * (1 + all));
    assert_string_equal(r.traits.score_source, "gate weights");
    free(kept);
    free(rows);
    rig_close(&r);
    choices_free(&c);
}

static void gates_match_sorted_lists(void **unused) {
    static const int32_t shapes[][3] = {{4, 16, 2}, {6, 13, 2}, {1, 8, 0}, {5, 9, 3}, {8, 5, 4}};
    static const double fractions[] = {0, 0.05, 0.14, 0.5, 0.9, 1};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (size_t f = 0; f < sizeof fractions / sizeof *fractions; f++)
            for (int32_t k = 0; k <= 6; k += 3)
                for (int topology = 0; topology < 2; topology++)
                    one_gate(shapes[s][0], shapes[s][1], shapes[s][2], k, fractions[f], topology);
}

/* Two domains of one rank with two experts each; ten tokens of source 0, 14 % of them: one returns.
 * Token 0 has its first choice inside. Tokens 1 to 9 look outside first, token 4 with the largest
 * score. Inside choices of theirs: expert 0 alone. */
static void topology_by_hand(void **unused) {
    enum { TOKENS = 10 };
    uint16_t expert[TOKENS * 3];
    float weight[TOKENS * 3];
    for (int t = 0; t < TOKENS; t++) {
        const uint16_t order[3] = {t == 0 ? 1 : 2, t == 0 ? 0 : 3, t == 0 ? 3 : 0};
        for (int i = 0; i < 3; i++) {
            expert[3 * t + i] = order[i];
            weight[3 * t + i] = 0.5f - 0.1f * (float)i + (t == 4 && i == 0 ? 0.25f : 0);
        }
    }
    const int64_t token_begin[] = {0, TOKENS, TOKENS}, pair_begin[] = {0, 3 * TOKENS, 3 * TOKENS};
    mz_pairs pairs = {.sources = 2,
                      .top_k = 3,
                      .tokens = TOKENS,
                      .pairs = 3 * TOKENS,
                      .token_begin = token_begin,
                      .pair_begin = pair_begin,
                      .expert = expert,
                      .weight = weight};
    mz_load *load = load_new(2, 4);
    for (int p = 0; p < 3 * TOKENS; p++)
        load->count[expert[p]]++;
    mz_load_sum(load);
    rig r;
    rig_open(&r, "fastermoe[gate=topology]", 2, 4, 1);
    rig_call(&r, load, NULL, NULL, &pairs);
    /* Token 0: experts 1 and 0. Token 4: 0 and, returned, 2. The eight others: 0 alone. */
    const int64_t kept[] = {10, 1, 1, 0};
    for (int e = 0; e < 4; e++)
        assert_int_equal(r.plan->quota[e], kept[e]);
    assert_non_null(strstr(r.plan->why, "8 tokens short of choices"));
    rig_close(&r);
    load_free(load);
}

static void expect_refusal(const char *text, choices *c, const mz_pairs *pairs, const char *said) {
    rig r;
    rig_open(&r, text, 2, 8, 1);
    const mz_view view = {.current = c->load};
    const mz_call call = {.load = c->load, .pairs = pairs};
    assert_int_equal(r.policy->decide(r.state, &view, r.plan, &r.err), MZ_OK);
    assert_int_equal(r.policy->route(r.state, &call, r.plan, &r.err), MZ_EINPUT);
    if (!strstr(r.err.msg, said))
        fail_msg("\"%s\" does not say \"%s\"", r.err.msg, said);
    rig_close(&r);
}

static void gates_say_what_they_need(void **unused) {
    choices c = choices_new(2, 8, 20, 2, 5), d = choices_new(2, 8, 20, 4, 5);
    expect_refusal("fastermoe[gate=topology]", &c, NULL, "counts only");
    expect_refusal("fastermoe[gate=top2]", &c, NULL, "counts only");
    expect_refusal("fastermoe[gate=topology]", &c, &c.pairs, "at least 3 recorded choices");
    mz_pairs bare = d.pairs;
    bare.weight = NULL;
    expect_refusal("fastermoe[gate=topology]", &d, &bare, "this trace has none");
    /* Without weights top2 trusts the router's order. */
    rig r;
    rig_open(&r, "fastermoe[gate=top2]", 2, 8, 1);
    rig_call(&r, d.load, NULL, NULL, &bare);
    assert_int_equal(r.plan->kept_pairs, 2 * d.pairs.tokens);
    int64_t rows[8] = {0};
    for (int64_t p = 0; p < d.pairs.pairs; p++)
        rows[d.expert[p]] += p % 4 < 2;
    for (int e = 0; e < 8; e++)
        assert_int_equal(r.plan->quota[e], rows[e]);
    assert_string_equal(r.traits.score_source, "");
    rig_close(&r);
    choices_free(&c);
    choices_free(&d);
}

/* Large groups: shadows are bounded by the room of a plan, and said to be. */
static void large_groups(void **unused) {
    rig r;
    mz_load *load = load_new(1024, 64);
    for (int32_t s = 0; s < 1024; s++)
        for (int32_t e = 0; e < 64; e++)
            load->count[s * 64 + e] = 100000 - 1000 * e;
    mz_load_sum(load);
    rig_prepare(&r, 1024, 64, 8);
    r.env.weight_bytes = 1;
    assert_int_equal(rig_start(&r, "fastermoe[slots=3]"), MZ_OK);
    rig_call(&r, load, NULL, NULL, NULL);
    assert_int_equal(r.plan->begin[64], 64 + 2 * 1023);
    assert_non_null(strstr(r.plan->why, "no slot"));
    rig_close(&r);
    rig_open(&r, "fastermoe", 1024, 64, 8);
    assert_in_range(r.traits.slots, 2, 64);
    rig_close(&r);
    load_free(load);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules_match_a_plain_computation),
        cmocka_unit_test(fastmoe_break_even),
        cmocka_unit_test(slot_sweep),
        cmocka_unit_test(slots_of_the_port),
        cmocka_unit_test(movement),
        cmocka_unit_test(parts_of_the_schedule),
        cmocka_unit_test(gates_match_sorted_lists),
        cmocka_unit_test(topology_by_hand),
        cmocka_unit_test(gates_say_what_they_need),
        cmocka_unit_test(large_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
