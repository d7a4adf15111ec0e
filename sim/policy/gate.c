/* FasterMoE's gates on recorded choices: each token keeps two of the choices that its router made
 * (balancing-systems.md 6.2).
 *
 * Scores are the recorded gate weights; equal ones go to the earlier choice, and among tokens to
 * the earlier token. The largest outside scores of a source are found by counting the bits of
 * floats (>= 0, so their order is that of their bits) in three passes: no memory per token. */
#include "sim/policy/parts.h"

#include <math.h>
#include <string.h>

enum { DIGITS = 3, BINS = 1 << 11, CHOICES_NEEDED = 3, KEPT = 2 };
static const int digit_shift[DIGITS] = {21, 10, 0};
static const int digit_bits[DIGITS] = {11, 11, 10};

struct mz_gate {
    int32_t ranks, experts;
    bool topology;
    double fraction;
    int32_t *domain; /* [R] */
    int32_t *home;   /* [E] domain of the expert's main */
    int64_t *bin;    /* [BINS] */
};

mz_code mz_gate_create(mz_arena *arena, const mz_policy_env *env, bool topology, double fraction,
                       mz_gate **out, mz_err *err) {
    mz_gate *g = MZ_NEW(arena, mz_gate, 1);
    if (!g)
        return mz_fail_nomem(err, "a gate");
    *g = (mz_gate){
        .ranks = env->ranks, .experts = env->experts, .topology = topology, .fraction = fraction};
    g->home = MZ_NEW(arena, int32_t, env->experts);
    g->bin = MZ_NEW(arena, int64_t, BINS);
    if (!g->home || !g->bin)
        return mz_fail_nomem(err, "a gate");
    mz_code code = mz_copy_domains(env, arena, &g->domain, err);
    if (code != MZ_OK)
        return code;
    mz_layout_mains(env->ranks, env->experts, g->home);
    for (int32_t e = 0; e < env->experts; e++)
        g->home[e] = g->domain[g->home[e]];
    *out = g;
    return MZ_OK;
}

static float score(const mz_pairs *pairs, int64_t p) {
    return pairs->weight ? pairs->weight[p] + 0.0f : 0.0f; /* -0 becomes 0 */
}

static uint32_t score_bits(const mz_pairs *pairs, int64_t p) {
    const float value = score(pairs, p);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The best of the choices [p, p + k) other than `skip`, of experts of `domain` where that is >= 0;
 * -1 where there is none. */
static int64_t best_choice(const mz_gate *g, const mz_pairs *pairs, int64_t p, int64_t k,
                           int64_t skip, int32_t domain) {
    int64_t best = -1;
    for (int64_t i = p; i < p + k; i++)
        if (i != skip && (domain < 0 || g->home[pairs->expert[i]] == domain) &&
            (best < 0 || score(pairs, i) > score(pairs, best)))
            best = i;
    return best;
}

/* Walks the tokens of one source. */
typedef struct walk {
    int64_t token, end, pair, choices;
} walk;

static walk walk_of(const mz_pairs *pairs, int32_t s) {
    return (walk){.token = pairs->token_begin[s] - 1,
                  .end = pairs->token_begin[s + 1],
                  .pair = pairs->pair_begin[s]};
}

static bool next_token(walk *w, const mz_pairs *pairs) {
    w->pair += w->choices;
    if (++w->token >= w->end)
        return false;
    w->choices = pairs->top_k > 0 ? pairs->top_k : pairs->token_pairs[w->token];
    return true;
}

/* The first choice of a token if its expert is outside the domain of source s, or -1. */
static int64_t outside_choice(const mz_gate *g, const mz_pairs *pairs, const walk *w, int32_t s) {
    const int64_t first = best_choice(g, pairs, w->pair, w->choices, -1, -1);
    return first >= 0 && g->home[pairs->expert[first]] != g->domain[s] ? first : -1;
}

/* Which outside first choices of a source return: those above `bits`, and `ties` at it. */
typedef struct gate_limit {
    uint32_t bits;
    int64_t ties;
} gate_limit;

/* The `most` largest of the source's outside first choices; false where there are fewer. */
static bool find_limit(const mz_gate *g, const mz_pairs *pairs, int32_t s, int64_t most,
                       gate_limit *out) {
    uint32_t known = 0, known_mask = 0;
    int64_t wanted = most;
    for (int d = 0; d < DIGITS; d++) {
        memset(g->bin, 0, sizeof *g->bin * BINS);
        int64_t outside = 0;
        for (walk w = walk_of(pairs, s); next_token(&w, pairs);) {
            const int64_t first = outside_choice(g, pairs, &w, s);
            outside += first >= 0;
            const uint32_t bits = first >= 0 ? score_bits(pairs, first) : 0;
            if (first >= 0 && (bits & known_mask) == known)
                g->bin[bits >> digit_shift[d] & ((1u << digit_bits[d]) - 1)]++;
        }
        if (d == 0 && outside < most)
            return false;
        if (most == 0)
            break;
        uint32_t digit = (1u << digit_bits[d]) - 1;
        for (; g->bin[digit] < wanted; digit--)
            wanted -= g->bin[digit];
        known |= digit << digit_shift[d];
        known_mask |= ((1u << digit_bits[d]) - 1) << digit_shift[d];
    }
    *out = (gate_limit){most > 0 ? known : UINT32_MAX, wanted};
    return true;
}

/* Does this outside first choice return? */
static bool returns(gate_limit *limit, uint32_t bits) {
    if (bits != limit->bits)
        return bits > limit->bits;
    return limit->ties-- > 0;
}

static void gate_source(const mz_gate *g, const mz_pairs *pairs, int32_t s, mz_kept *out) {
    int64_t *row = out->pairs + (int64_t)s * g->experts;
    const int64_t tokens = pairs->token_begin[s + 1] - pairs->token_begin[s];
    gate_limit limit = {0};
    const bool limited =
        g->topology &&
        find_limit(g, pairs, s, (int64_t)floor(g->fraction * (double)tokens), &limit);
    const int32_t domain = limited ? g->domain[s] : -1;
    for (walk w = walk_of(pairs, s); next_token(&w, pairs);) {
        const int64_t outside = limited ? outside_choice(g, pairs, &w, s) : -1;
        int64_t kept[KEPT];
        kept[0] = best_choice(g, pairs, w.pair, w.choices, -1, domain);
        kept[1] = kept[0] < 0 ? -1 : best_choice(g, pairs, w.pair, w.choices, kept[0], domain);
        if (outside >= 0 && returns(&limit, score_bits(pairs, outside)))
            kept[1] = outside;
        int found = 0;
        for (int i = 0; i < KEPT; i++) {
            if (kept[i] < 0)
                continue;
            row[pairs->expert[kept[i]]]++;
            out->score += (double)score(pairs, kept[i]) * score(pairs, kept[i]);
            found++;
        }
        out->short_tokens += found < KEPT && found < w.choices;
    }
    for (int64_t p = pairs->pair_begin[s]; p < pairs->pair_begin[s + 1]; p++)
        out->total_score += (double)score(pairs, p) * score(pairs, p);
}

/* Can the topology gate choose at all? */
static mz_code check_pairs(const mz_gate *g, const mz_pairs *pairs, mz_err *err) {
    const char *name = g->topology ? "topology" : "top2";
    if (!pairs)
        return mz_fail(err, MZ_EINPUT,
                       "gate=%s chooses among the recorded choices of each token, but this load "
                       "has counts only (mizan place shows no more); give mizan sim a trace with "
                       "pairs%s, or gate=recorded",
                       name, g->topology ? " and gate weights" : "");
    if (!g->topology)
        return MZ_OK;
    if (!pairs->weight)
        return mz_fail(err, MZ_EINPUT,
                       "gate=topology compares gate weights, but this trace has none; give a trace "
                       "with weights, or gate=top2 or gate=recorded");
    int64_t most = pairs->top_k;
    for (int64_t t = pairs->token_begin[0]; pairs->top_k == 0 && t < pairs->token_begin[g->ranks];
         t++)
        most = pairs->token_pairs[t] > most ? pairs->token_pairs[t] : most;
    if (most < CHOICES_NEEDED && pairs->tokens > 0)
        return mz_fail(err, MZ_EINPUT,
                       "gate=topology chooses two of at least %d recorded choices of a token, but "
                       "this trace has %lld; give a trace with more choices, or gate=recorded",
                       CHOICES_NEEDED, (long long)most);
    return MZ_OK;
}

mz_code mz_gate_choose(const mz_gate *g, const mz_pairs *pairs, mz_kept *out, mz_err *err) {
    mz_code code = check_pairs(g, pairs, err);
    if (code != MZ_OK)
        return code;
    memset(out->pairs, 0, sizeof(int64_t) * (size_t)g->ranks * (size_t)g->experts);
    out->score = out->total_score = 0;
    out->short_tokens = 0;
    for (int32_t s = 0; s < g->ranks; s++)
        gate_source(g, pairs, s, out);
    return MZ_OK;
}
