/* The realistic generator: what recorded traces of trained models show (popularity, sequences,
 * teams, dependence across layers), from as few parts as do it:
 *
 *   log popularity of expert e in layer l   sigma_l * normal, turning slowly with the step
 * + taste of the sequence                   TASTE * normal, per (sequence, layer, expert)
 * + team of the token's topic               a quarter of the experts of (topic, layer), popular
 * ones first; from TEAM for the first member down to TEAM/10
 *
 * A token draws its k experts from the softmax of that sum without replacement, except that it
 * keeps the previous token's choice in a place with probability keep_l. Topics are a Markov chain
 * within the sequence over some topics of its own, the same for all layers: they make the experts
 * of one token come in teams and tie the layers together. The constants were chosen so that the
 * statistics of recorded traces come out; tests/traces/test_synth.c checks the ranges. */
#include "traces/synth_private.h"

#include "common/base/arena.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    TOPICS = 64,         /* of the whole workload */
    SEQUENCE_TOPICS = 24 /* of one sequence */
};

static const double SIGMA_LOW = 0.3, SIGMA_HIGH = 0.9; /* over layers */
static const double TASTE = 0.6;
static const double TEAM = 14.0, TEAM_FALL = 0.9;
static const double TOPIC_SKEW = 1.2;                 /* topics of low number come more often */
static const double STAY = 0.2;                       /* the previous token's topic goes on */
static const double KEEP_LOW = 0.0, KEEP_HIGH = 0.05; /* over layers; the first: KEEP_LOW */
static const double PERIOD_LOW = 4000, PERIOD_HIGH = 40000; /* steps for one turn of popularity */

typedef struct ranked {
    double key;
    int32_t expert;
} ranked;

struct mz_realistic {
    int64_t step, layer; /* what the arrays below hold; -1: nothing */
    double *popularity;  /* [E] log popularity */
    double *team;        /* [TOPICS][E] factor on an expert's odds */
    ranked *ranked;      /* [E] scratch */
    double keep;         /* of this layer */
    double *base;        /* [E] odds by popularity and taste of the current sequence */
    double *sum;         /* [SEQUENCE_TOPICS][E] running sums of odds */
    bool built[SEQUENCE_TOPICS];
    int32_t topic[SEQUENCE_TOPICS]; /* of the current sequence, in order of draw */
};

mz_code mz_realistic_open(const mz_synth *synth, mz_realistic **out, mz_err *err) {
    size_t experts = (size_t)synth->options.experts;
    mz_realistic *r = calloc(1, sizeof *r);
    *out = r;
    if (!r)
        return mz_fail_nomem(err, "the realistic generator");
    r->step = r->layer = -1;
    r->popularity = mz_calloc(experts, sizeof *r->popularity);
    r->team = mz_calloc(TOPICS * experts, sizeof *r->team);
    r->ranked = mz_calloc(experts, sizeof *r->ranked);
    r->base = mz_calloc(experts, sizeof *r->base);
    r->sum = mz_calloc(SEQUENCE_TOPICS * experts, sizeof *r->sum);
    if (!r->popularity || !r->team || !r->ranked || !r->base || !r->sum)
        return mz_fail_nomem(err, "the realistic generator");
    return MZ_OK;
}

void mz_realistic_close(mz_realistic **realistic) {
    mz_realistic *r = *realistic;
    if (!r)
        return;
    free(r->popularity);
    free(r->team);
    free(r->ranked);
    free(r->base);
    free(r->sum);
    free(r);
    *realistic = NULL;
}

static double between(mz_rng *rng, double low, double high) {
    return low + (high - low) * mz_rng_uniform(rng);
}

/* Scaled so that the layer's standard deviation is sigma however few experts there are. */
static void make_popularity(const mz_synth *synth, mz_realistic *r, double sigma) {
    int64_t experts = synth->options.experts;
    double mean = 0, square = 0;
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_DRIFT, r->layer, 0, 0, 0);
    for (int64_t e = 0; e < experts; e++) {
        double a = mz_rng_normal(&rng), b = mz_rng_normal(&rng);
        double angle = 6.283185307179586 * (double)r->step / between(&rng, PERIOD_LOW, PERIOD_HIGH);
        r->popularity[e] = a * cos(angle) + b * sin(angle);
        mean += r->popularity[e] / (double)experts;
    }
    for (int64_t e = 0; e < experts; e++)
        square += (r->popularity[e] - mean) * (r->popularity[e] - mean) / (double)experts;
    double scale = square > 0 ? sigma / sqrt(square) : 0;
    for (int64_t e = 0; e < experts; e++)
        r->popularity[e] = scale * (r->popularity[e] - mean);
}

static int by_key(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->key != y->key)
        return x->key > y->key ? -1 : 1;
    return x->expert - y->expert;
}

/* Members of a topic's team: drawn without replacement by popularity (the largest of log popularity
 * plus Gumbel noise), so that popular experts serve many topics. */
static void make_teams(const mz_synth *synth, mz_realistic *r) {
    int64_t experts = synth->options.experts, members = experts / 4;
    members = members < synth->options.top_k ? synth->options.top_k : members;
    for (int64_t topic = 0; topic < TOPICS; topic++) {
        double *team = r->team + topic * experts;
        mz_rng rng = mz_synth_rng(synth, MZ_DRAW_TEAM, r->layer, topic, 0, 0);
        for (int32_t e = 0; e < experts; e++) {
            double u = ((double)mz_rng_u32(&rng) + 0.5) * 0x1p-32;
            r->ranked[e] = (ranked){.key = r->popularity[e] - log(-log(u)), .expert = e};
            team[e] = 1.0;
        }
        qsort(r->ranked, (size_t)experts, sizeof *r->ranked, by_key);
        for (int64_t i = 0; i < members; i++)
            team[r->ranked[i].expert] = exp(TEAM * (1.0 - TEAM_FALL * (double)i / (double)members));
    }
}

static void make_layer(const mz_synth *synth, mz_realistic *r, int64_t step, int32_t layer) {
    if (r->step == step && r->layer == layer)
        return;
    r->step = step;
    r->layer = layer;
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_LAYER, layer, 0, 0, 0);
    double sigma = between(&rng, SIGMA_LOW, SIGMA_HIGH);
    r->keep = layer == 0 ? KEEP_LOW : between(&rng, KEEP_LOW, KEEP_HIGH);
    make_popularity(synth, r, sigma);
    make_teams(synth, r);
}

static void draw_topics(const mz_synth *synth, int64_t step, int32_t micro_batch, int32_t rank,
                        int64_t index, int32_t *topic) {
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_SEQUENCE, step, micro_batch, rank, index);
    for (int i = 0; i < SEQUENCE_TOPICS; i++)
        topic[i] = (int32_t)(TOPICS * pow(mz_rng_uniform(&rng), TOPIC_SKEW));
}

int32_t mz_realistic_domain(const mz_synth *synth, int64_t step, int32_t micro_batch, int32_t rank,
                            int64_t index) {
    int32_t topic[SEQUENCE_TOPICS];
    draw_topics(synth, step, micro_batch, rank, index, topic);
    return topic[0];
}

/* The sequence's own taste on top of the layer's popularity; its topics' sums are built on demand.
 */
static void make_sequence(const mz_synth *synth, mz_realistic *r, int32_t micro_batch, int32_t rank,
                          int64_t index) {
    int64_t key = r->step * synth->options.layers + r->layer;
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_BIAS, key, micro_batch, rank, index);
    for (int64_t e = 0; e < synth->options.experts; e++)
        r->base[e] = exp(r->popularity[e] + TASTE * mz_rng_normal(&rng));
    memset(r->built, 0, sizeof r->built);
    draw_topics(synth, r->step, micro_batch, rank, index, r->topic);
}

static const double *topic_sums(const mz_synth *synth, mz_realistic *r, int slot) {
    int64_t experts = synth->options.experts;
    double *sum = r->sum + slot * experts, total = 0;
    if (r->built[slot])
        return sum;
    const double *team = r->team + r->topic[slot] * experts;
    for (int64_t e = 0; e < experts; e++) {
        total += r->base[e] * team[e];
        sum[e] = total;
    }
    r->built[slot] = true;
    return sum;
}

static int32_t find(const double *sum, int64_t experts, double value) {
    int64_t low = 0, high = experts - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (sum[middle] <= value)
            low = middle + 1;
        else
            high = middle;
    }
    return (int32_t)low;
}

static bool holds(const uint16_t *expert, int64_t count, int32_t e) {
    for (int64_t i = 0; i < count; i++)
        if (expert[i] == e)
            return true;
    return false;
}

/* An expert by its share of what is left once the `count` chosen ones, ascending in `chosen`, are
 * taken out: the chosen intervals are skipped. */
static int32_t draw_expert(const double *sum, int64_t experts, const int32_t *chosen, int64_t count,
                           double u) {
    double left = sum[experts - 1], value;
    for (int64_t i = 0; i < count; i++)
        left -= sum[chosen[i]] - (chosen[i] ? sum[chosen[i] - 1] : 0.0);
    value = u * left;
    int64_t i = 0;
    for (; i < count; i++) {
        double before = chosen[i] ? sum[chosen[i] - 1] : 0.0;
        if (value < before)
            break;
        value += sum[chosen[i]] - before;
    }
    int32_t e = find(sum, experts, value);
    /* Rounding may end on a chosen one: take the next that is free. */
    for (i = 0; i < count; i++)
        if (chosen[i] == e) {
            e = e + 1 < experts ? e + 1 : 0;
            i = -1;
        }
    return e;
}

/* Keeps the chosen ones in ascending order. */
static void choose(int32_t *chosen, int64_t count, int32_t e) {
    for (; count > 0 && chosen[count - 1] > e; count--)
        chosen[count] = chosen[count - 1];
    chosen[count] = e;
}

static void draw_sequence(mz_synth *synth, int32_t micro_batch, int32_t rank, int64_t index,
                          int64_t tokens, uint16_t *expert) {
    mz_realistic *r = synth->realistic;
    int64_t experts = synth->options.experts, k = synth->options.top_k;
    int64_t key = r->step * synth->options.layers + r->layer;
    mz_rng topics = mz_synth_rng(synth, MZ_DRAW_TOPIC, r->step, micro_batch, rank, index);
    mz_rng rng = mz_synth_rng(synth, MZ_DRAW_TOKENS, key, micro_batch, rank, index);
    uint32_t keep = (uint32_t)(r->keep * 256), stay = (uint32_t)(STAY * 65536);
    int slot = 0;
    make_sequence(synth, r, micro_batch, rank, index);
    for (int64_t t = 0; t < tokens; t++, expert += k) {
        uint32_t topic = mz_rng_u32(&topics);
        if ((topic & 0xffff) >= stay)
            slot = (int)((topic >> 16) % SEQUENCE_TOPICS);
        const double *sum = topic_sums(synth, r, slot);
        for (int64_t j = 0; j < k; j++) {
            uint32_t bits = mz_rng_u32(&rng);
            if (t > 0 && (bits & 255) < keep && !holds(expert, j, expert[j - k]))
                expert[j] = expert[j - k];
            else
                expert[j] = (uint16_t)draw_expert(sum, experts, synth->order, j,
                                                  (double)(bits >> 8) * 0x1p-24);
            choose(synth->order, j, expert[j]);
        }
    }
}

void mz_realistic_call(mz_synth *synth, int64_t step, int32_t micro_batch, int32_t layer,
                       int32_t rank, uint16_t *expert) {
    int64_t tokens = mz_synth_tokens(synth, rank), length = synth->options.sequence;
    make_layer(synth, synth->realistic, step, layer);
    for (int64_t first = 0, index = 0; first < tokens; first += length, index++)
        draw_sequence(synth, micro_batch, rank, index,
                      tokens - first < length ? tokens - first : length,
                      expert + first * synth->options.top_k);
}
