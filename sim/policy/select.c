/* Scores of pairs and exact selection: the q largest of each (source, expert) or of each expert. */
#include "sim/policy/lrmoe.h"

#include "common/base/rng.h"

#include <math.h>
#include <string.h>

enum {
    SMALL = 24,        /* sorted by insertion below this */
    SAMPLES = 9,       /* candidates for a pivot */
    COARSE_SHIFT = 22, /* of float bits: exponent and one bit of mantissa */
    COARSE = 512
};

struct mz_select {
    int32_t ranks, experts, layers;
    mz_score_kind kind;
    bool global;
    uint64_t seed;
    char source[16];
    mz_arena *arena;
    int64_t cap;                    /* pairs that the arrays below hold */
    uint32_t *key, *bucket, *spare; /* float bits: in pair order, by expert, scratch */
    float *mass;                    /* in pair order, where it is not the key */
    int64_t *begin, *fill, *quota;  /* [E+1], [E], [E] of the group of sources in work */
    int64_t *count;                 /* [E] */
    uint32_t *threshold;            /* [E] smallest key that stays */
    int64_t *ties;                  /* [E] pairs at the threshold that stay */
    uint32_t *coarse;               /* [E][COARSE], NULL without histograms */
    uint32_t *histogram;            /* [layers][E][MZ_SCORE_BINS] */
    int32_t *top;                   /* [layers] coarse bin of the first histogram bin, -1: none */
};

mz_code mz_select_create(mz_arena *arena, const mz_policy_env *env, mz_score_kind kind, bool global,
                         bool histograms, mz_select **out, mz_err *err) {
    mz_select *x = MZ_NEW(arena, mz_select, 1);
    if (!x)
        return mz_fail_nomem(err, "the selection of pairs");
    int32_t E = env->experts;
    *x = (mz_select){.ranks = env->ranks,
                     .experts = E,
                     .layers = env->layers,
                     .kind = kind,
                     .global = global,
                     .seed = env->seed,
                     .arena = arena};
    x->begin = MZ_NEW(arena, int64_t, E + 1);
    x->fill = MZ_NEW(arena, int64_t, E);
    x->quota = MZ_NEW(arena, int64_t, E);
    x->count = MZ_NEW(arena, int64_t, E);
    x->threshold = MZ_NEW(arena, uint32_t, E);
    x->ties = MZ_NEW(arena, int64_t, E);
    if (!x->begin || !x->fill || !x->quota || !x->count || !x->threshold || !x->ties)
        return mz_fail_nomem(err, "the selection of pairs");
    *out = x;
    if (!histograms)
        return MZ_OK;
    x->coarse = MZ_NEW(arena, uint32_t, (int64_t)E * COARSE);
    x->histogram = MZ_NEW(arena, uint32_t, (int64_t)env->layers * E * MZ_SCORE_BINS);
    x->top = MZ_NEW(arena, int32_t, env->layers);
    if (!x->coarse || !x->histogram || !x->top)
        return mz_fail_nomem(err, "the distributions of scores");
    memset(x->top, 0xff, sizeof(int32_t) * (size_t)env->layers);
    return MZ_OK;
}

bool mz_select_possible(const mz_pairs *pairs) {
    return pairs && pairs->weight;
}

const char *mz_select_source(const mz_select *x) {
    return x->source;
}

/* ---- scores
 * ------------------------------------------------------------------------------------*/

/* Factors of a product score; NULL: not used. */
typedef struct factors {
    const float *weight, *hidden; /* per pair; weight enters squared */
    const float *grad, *input;    /* per token */
} factors;

static factors factors_of(mz_score_kind kind, const mz_pairs *p) {
    factors f = {0};
    bool wants_grad = kind == MZ_SCORE_DOWN || kind == MZ_SCORE_UP || kind == MZ_SCORE_G;
    bool wants_hidden = kind == MZ_SCORE_DOWN || kind == MZ_SCORE_WH || kind == MZ_SCORE_H;
    bool wants_input = kind == MZ_SCORE_UP;
    bool recorded = (!wants_grad || p->grad_norm2) && (!wants_hidden || p->hidden_norm2) &&
                    (!wants_input || p->input_norm2);
    f.weight = !recorded || (kind != MZ_SCORE_G && kind != MZ_SCORE_H) ? p->weight : NULL;
    f.grad = recorded && wants_grad ? p->grad_norm2 : NULL;
    f.hidden = recorded && wants_hidden ? p->hidden_norm2 : NULL;
    f.input = recorded && wants_input ? p->input_norm2 : NULL;
    return f;
}

static bool same_factors(factors a, factors b) {
    return a.weight == b.weight && a.hidden == b.hidden && a.grad == b.grad && a.input == b.input;
}

/* Product scores of pairs [p0, p1) of one token. + 0 turns -0, which the order of bits would put
 * first, into 0. */
static void token_scores(factors f, float token, int64_t p0, int64_t p1, float *out) {
    if (f.weight && f.hidden)
        for (int64_t p = p0; p < p1; p++)
            out[p - p0] = token * f.weight[p] * f.weight[p] * f.hidden[p] + 0.0f;
    else if (f.weight)
        for (int64_t p = p0; p < p1; p++)
            out[p - p0] = token * f.weight[p] * f.weight[p] + 0.0f;
    else
        for (int64_t p = p0; p < p1; p++)
            out[p - p0] = (f.hidden ? token * f.hidden[p] : token) + 0.0f;
}

/* Product scores of one source, in pair order. */
static void source_scores(factors f, const mz_pairs *pairs, int32_t s, float *out) {
    int64_t p = pairs->pair_begin[s], start = p;
    if (f.weight && !f.hidden && !f.grad && !f.input) { /* gate weights alone */
        for (; p < pairs->pair_begin[s + 1]; p++)
            out[p - start] = f.weight[p] * f.weight[p];
        return;
    }
    for (int64_t t = pairs->token_begin[s]; t < pairs->token_begin[s + 1]; t++) {
        int64_t k = pairs->top_k > 0 ? pairs->top_k : pairs->token_pairs[t];
        float token = (f.grad ? f.grad[t] : 1) * (f.input ? f.input[t] : 1);
        token_scores(f, token, p, p + k, out + (p - start));
        p += k;
    }
}

/* Uniform numbers in (0, 1], a function of (seed, call, pair of the call). */
static void random_keys(const mz_select *x, const mz_call *call, int64_t first, int64_t n,
                        const float *mass, float *key) {
    uint64_t stream = mz_rng_stream((uint64_t)call->step, (uint64_t)call->micro_batch,
                                    (uint64_t)call->layer, 0x73656c);
    const uint32_t seed[2] = {(uint32_t)x->seed, (uint32_t)(x->seed >> 32)};
    uint32_t block[4];
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)(first + i);
        if (i == 0 || at % 4 == 0) {
            const uint32_t counter[4] = {(uint32_t)(at / 4), (uint32_t)(at / 4 >> 32),
                                         (uint32_t)stream, (uint32_t)(stream >> 32)};
            mz_philox(counter, seed, block);
        }
        float u = ((float)(block[at % 4] >> 8) + 1) * 0x1p-24f;
        key[i] = mass ? sqrtf(mass[i]) / u : u;
    }
}

/* ---- the q largest of one bucket
 * ---------------------------------------------------------------*/

typedef struct largest {
    uint32_t threshold; /* smallest value that stays */
    int64_t ties;       /* how many of that value stay */
    double sum;         /* of all that stay, as floats */
} largest;

static float as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static double sum_of(const uint32_t *a, int64_t n) {
    double sum[4] = {0};
    for (int64_t i = 0; i < n; i++)
        sum[i & 3] += as_float(a[i]);
    return sum[0] + sum[1] + sum[2] + sum[3];
}

static void sort_down(uint32_t *a, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        uint32_t v = a[i];
        int64_t at = i;
        for (; at > 0 && a[at - 1] < v; at--)
            a[at] = a[at - 1];
        a[at] = v;
    }
}

/* A sample value whose place among the samples is that of the q-th among n. */
static uint32_t pivot_of(const uint32_t *a, int64_t n, int64_t q) {
    uint32_t sample[SAMPLES];
    for (int i = 0; i < SAMPLES; i++)
        sample[i] = a[(n - 1) * i / (SAMPLES - 1)];
    sort_down(sample, SAMPLES);
    return sample[(q - 1) * SAMPLES / n];
}

/* Keeps values below `pivot`'s side in place and copies the others away; branch-free, because which
 * side a score falls on cannot be predicted. Values > pivot (or >= with `equal`) go to `high`. */
static int64_t split(uint32_t *a, int64_t n, uint32_t pivot, bool equal, uint32_t *high) {
    int64_t lows = 0, highs = 0;
    uint32_t limit = equal ? pivot : pivot + 1; /* pivot is no NaN, so + 1 does not wrap */
    for (int64_t i = 0; i < n; i++) {
        uint32_t v = a[i];
        bool is_high = v >= limit;
        high[highs] = v;
        a[lows] = v;
        highs += is_high;
        lows += !is_high;
    }
    return highs;
}

/* The q largest of a[0..n), 0 < q <= n. a and spare (n elements) are overwritten. */
static largest select_largest(uint32_t *a, int64_t n, int64_t q, uint32_t *spare) {
    double sum = 0;
    while (n > SMALL) {
        uint32_t pivot = pivot_of(a, n, q);
        int64_t highs = split(a, n, pivot, false, spare);
        if (highs >= q) { /* the answer is among the high ones: they become the array */
            uint32_t *t = a;
            a = spare;
            spare = t;
            n = highs;
            continue;
        }
        sum += sum_of(spare, highs);
        q -= highs;
        n -= highs;
        int64_t equals = split(a, n, pivot, true, spare);
        if (equals >= q)
            return (largest){pivot, q, sum + (double)q * as_float(pivot)};
        sum += (double)equals * as_float(pivot);
        q -= equals;
        n -= equals;
    }
    sort_down(a, n);
    uint32_t threshold = a[q - 1];
    int64_t ties = 0;
    for (int64_t i = 0; i < q; i++)
        ties += a[i] == threshold;
    return (largest){threshold, ties, sum + sum_of(a, q)};
}

/* ---- one group of sources
 * ----------------------------------------------------------------------*/

static mz_code make_room(mz_select *x, int64_t pairs, mz_err *err) {
    if (pairs <= x->cap)
        return MZ_OK;
    int64_t cap = pairs + pairs / 4; /* sizes vary from call to call: grow rarely */
    x->key = MZ_NEW(x->arena, uint32_t, cap);
    x->bucket = MZ_NEW(x->arena, uint32_t, cap + 1);
    x->spare = MZ_NEW(x->arena, uint32_t, cap + 1);
    x->mass = MZ_NEW(x->arena, float, cap);
    if (!x->key || !x->bucket || !x->spare || !x->mass)
        return mz_fail_nomem(err, "the scores of a layer call");
    x->cap = cap;
    return MZ_OK;
}

static mz_code disagree(const mz_call *call, int32_t expert, mz_err *err) {
    return mz_fail(err, MZ_EINTERNAL,
                   "step %lld, micro-batch %d, layer %d: pairs and counts of expert %d disagree",
                   (long long)call->step, call->micro_batch, call->layer, expert);
}

/* Buckets of the experts that are cut: x->begin from x->count; the others get none. */
static void lay_buckets(mz_select *x) {
    int64_t at = 0;
    for (int32_t e = 0; e < x->experts; e++) {
        x->begin[e] = x->fill[e] = at;
        if (x->quota[e] < x->count[e])
            at += x->count[e];
        x->threshold[e] = 0;
        x->ties[e] = INT64_MAX;
    }
    x->begin[x->experts] = at;
}

/* Fills the buckets; *uncut: sum of the keys of experts that are not cut. */
static mz_code fill_buckets(mz_select *x, const mz_call *call, const uint16_t *expert, int64_t n,
                            double *uncut, mz_err *err) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t e = expert[i];
        if (e >= (uint32_t)x->experts)
            return disagree(call, (int32_t)e, err);
        if (x->quota[e] == x->count[e]) {
            sum += as_float(x->key[i]);
            continue;
        }
        if (x->fill[e] == x->begin[e + 1])
            return disagree(call, (int32_t)e, err);
        x->bucket[x->fill[e]++] = x->key[i];
    }
    for (int32_t e = 0; e < x->experts; e++)
        if (x->fill[e] != x->begin[e + 1])
            return disagree(call, e, err);
    *uncut = sum;
    return MZ_OK;
}

/* Thresholds of the cut experts; the sum of the keys that they keep. */
static double find_thresholds(mz_select *x) {
    double sum = 0;
    for (int32_t e = 0; e < x->experts; e++) {
        int64_t n = x->begin[e + 1] - x->begin[e];
        if (n == 0)
            continue;
        if (x->quota[e] == 0) {
            x->threshold[e] = UINT32_MAX;
            x->ties[e] = 0;
            continue;
        }
        largest l = select_largest(x->bucket + x->begin[e], n, x->quota[e], x->spare);
        x->threshold[e] = l.threshold;
        x->ties[e] = l.ties;
        sum += l.sum;
    }
    return sum;
}

/* Walks pairs of one source in order (ties are given in that order): kept score, kept counts
 * (global), marks. */
static double walk_pairs(mz_select *x, const uint16_t *expert, const uint32_t *key,
                         const float *mass, int64_t n, int64_t *kept, uint8_t *keep) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t e = expert[i];
        bool in = key[i] > x->threshold[e];
        if (key[i] == x->threshold[e])
            in = x->ties[e]-- > 0;
        sum += in ? mass[i] : 0;
        if (kept)
            kept[e] += in;
        if (keep)
            keep[i] = in;
    }
    return sum;
}

/* ---- distributions
 * -----------------------------------------------------------------------------*/

static void count_scores(mz_select *x, const uint16_t *expert, const float *mass, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &mass[i], sizeof bits);
        bits &= INT32_MAX; /* a product that overflowed may be a negative NaN */
        x->coarse[(size_t)expert[i] * COARSE + (bits >> COARSE_SHIFT)]++;
    }
}

/* Shrinks the coarse counts to the MZ_SCORE_BINS half octaves below the highest one in use. */
static void store_histogram(mz_select *x, int32_t layer) {
    int32_t top = 0;
    for (int32_t e = 0; e < x->experts; e++)
        for (int32_t b = COARSE - 1; b > top; b--)
            if (x->coarse[(size_t)e * COARSE + (size_t)b])
                top = b;
    x->top[layer] = top;
    for (int32_t e = 0; e < x->experts; e++) {
        uint32_t *to =
            x->histogram + ((size_t)layer * (size_t)x->experts + (size_t)e) * MZ_SCORE_BINS;
        memset(to, 0, sizeof(uint32_t) * MZ_SCORE_BINS);
        for (int32_t b = 0; b <= top; b++) {
            int32_t bin = top - b < MZ_SCORE_BINS ? top - b : MZ_SCORE_BINS - 1;
            to[bin] += x->coarse[(size_t)e * COARSE + (size_t)b];
        }
    }
    memset(x->coarse, 0, sizeof(uint32_t) * COARSE * (size_t)x->experts);
}

const uint32_t *mz_select_histogram(const mz_select *x, int32_t layer, double *value) {
    if (!x->histogram || layer < 0 || layer >= x->layers || x->top[layer] < 0)
        return NULL;
    for (int bin = 0; bin < MZ_SCORE_BINS; bin++) {
        int32_t coarse = x->top[layer] - bin;
        uint32_t middle = ((uint32_t)coarse << COARSE_SHIFT) | 1u << (COARSE_SHIFT - 1);
        value[bin] = coarse > 0 ? as_float(middle) : 0;
    }
    return x->histogram + (size_t)layer * (size_t)x->experts * MZ_SCORE_BINS;
}

/* ---- the whole call
 * ----------------------------------------------------------------------------*/

typedef struct work {
    const mz_call *call;
    mz_plan *plan;
    uint8_t *keep;
    factors key, mass; /* mass: the yardstick s */
    bool own_mass;     /* key and mass differ */
    bool summing;      /* nothing is cut */
    int64_t first;     /* first pair of the call */
} work;

/* Keys and masses of sources [s0, s1), which start at pair `at` of the arrays' use. */
static double score_sources(mz_select *x, const work *w, int32_t s0, int32_t s1) {
    const mz_pairs *pairs = w->call->pairs;
    int64_t from = pairs->pair_begin[s0];
    double total = 0;
    for (int32_t s = s0; s < s1; s++) {
        int64_t at = pairs->pair_begin[s] - from, n = pairs->pair_begin[s + 1] - from - at;
        float *key = (float *)x->key + at;
        float *mass = w->own_mass ? x->mass + at : key;
        source_scores(w->mass, pairs, s, mass);
        if (x->kind == MZ_SCORE_RANDOM || x->kind == MZ_SCORE_SAMPLE)
            random_keys(x, w->call, pairs->pair_begin[s] - w->first, n,
                        x->kind == MZ_SCORE_SAMPLE ? mass : NULL, key);
        else if (w->own_mass)
            source_scores(w->key, pairs, s, key);
        total += sum_of((const uint32_t *)mass, n);
        if (x->coarse)
            count_scores(x, pairs->expert + pairs->pair_begin[s], mass, n);
    }
    return total;
}

/* Selects among the pairs of sources [s0, s1); x->quota and x->count are set. */
static mz_code select_group(mz_select *x, const work *w, int32_t s0, int32_t s1, mz_err *err) {
    const mz_pairs *pairs = w->call->pairs;
    int64_t from = pairs->pair_begin[s0], n = pairs->pair_begin[s1] - from;
    double total = score_sources(x, w, s0, s1);
    w->plan->total_score += total;
    if (w->summing) {
        w->plan->kept_score += total;
        if (w->keep)
            memset(w->keep + (from - w->first), 1, (size_t)n);
        return MZ_OK;
    }
    lay_buckets(x);
    double uncut = 0;
    mz_code code = fill_buckets(x, w->call, pairs->expert + from, n, &uncut, err);
    if (code != MZ_OK)
        return code;
    double cut = find_thresholds(x);
    if (!x->global && !w->keep && !w->own_mass) {
        w->plan->kept_score += uncut + cut;
        return MZ_OK;
    }
    for (int32_t s = s0; s < s1; s++) {
        int64_t p = pairs->pair_begin[s], at = p - from;
        w->plan->kept_score += walk_pairs(
            x, pairs->expert + p, x->key + at, w->own_mass ? x->mass + at : (float *)x->key + at,
            pairs->pair_begin[s + 1] - p,
            x->global ? w->plan->kept + (int64_t)s * x->experts : NULL,
            w->keep ? w->keep + (p - w->first) : NULL);
    }
    return MZ_OK;
}

static mz_code run_per_source(mz_select *x, const work *w, mz_err *err) {
    mz_code code = MZ_OK;
    for (int32_t s = 0; code == MZ_OK && s < x->ranks; s++) {
        size_t row = sizeof(int64_t) * (size_t)x->experts;
        memcpy(x->count, w->call->load->count + (int64_t)s * x->experts, row);
        memcpy(x->quota, w->summing ? x->count : w->plan->kept + (int64_t)s * x->experts, row);
        code = select_group(x, w, s, s + 1, err);
    }
    return code;
}

static mz_code run_global(mz_select *x, const work *w, mz_err *err) {
    memcpy(x->count, w->call->load->total, sizeof(int64_t) * (size_t)x->experts);
    memcpy(x->quota, w->plan->quota, sizeof(int64_t) * (size_t)x->experts);
    if (!w->summing)
        memset(w->plan->kept, 0, sizeof(int64_t) * (size_t)x->ranks * (size_t)x->experts);
    return select_group(x, w, 0, x->ranks, err);
}

mz_code mz_select_run(mz_select *x, const mz_call *call, mz_plan *plan, uint8_t *keep,
                      mz_err *err) {
    const mz_pairs *pairs = call->pairs;
    work w = {.call = call,
              .plan = plan,
              .keep = keep,
              .first = pairs->pair_begin[0],
              .summing = !plan->has_backward};
    w.mass = factors_of(MZ_SCORE_DOWN, pairs);
    w.key = factors_of(x->kind, pairs);
    w.own_mass =
        x->kind == MZ_SCORE_RANDOM || x->kind == MZ_SCORE_SAMPLE || !same_factors(w.mass, w.key);
    snprintf(x->source, sizeof x->source, "%s",
             w.key.grad || w.key.hidden || w.mass.grad ? "trace" : "gate weights");
    int64_t most = 0;
    for (int32_t s = 0; s < x->ranks; s++) {
        int64_t n = pairs->pair_begin[s + 1] - pairs->pair_begin[s];
        if (n != call->load->source[s])
            return mz_fail(err, MZ_EINTERNAL,
                           "layer %d: source %d has %lld pairs and counts of %lld", call->layer, s,
                           (long long)n, (long long)call->load->source[s]);
        most = n > most ? n : most;
    }
    if (x->coarse && (call->layer < 0 || call->layer >= x->layers))
        return mz_fail(err, MZ_EINTERNAL, "layer %d of %d", call->layer, x->layers);
    plan->kept_score = plan->total_score = 0;
    bool whole = x->global && !w.summing;
    mz_code code = make_room(x, whole ? call->load->pairs : most, err);
    if (code == MZ_OK)
        code = whole ? run_global(x, &w, err) : run_per_source(x, &w, err);
    if (code == MZ_OK && x->coarse)
        store_histogram(x, call->layer);
    return code;
}
