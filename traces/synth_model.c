/* Drawing sequences from a model: synth_model.h says what it is made of. */
#include "traces/synth_model.h"

#include "common/base/arena.h"
#include "common/base/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RECENT = 24, WANDER_TOKENS = 256, LOCAL_TOKENS = 6, LINK_BYTES = 256 << 20 };

/* Names of the random streams. */
enum { DRAW_PROFILE = 1, DRAW_CLASS, DRAW_TASTE, DRAW_EXPERT, DRAW_GATE };

mz_code mz_synth_model_make(const mz_trace_facts *facts, int32_t classes, int32_t profiles,
                            mz_synth_model *m, mz_err *err) {
    size_t layers = (size_t)facts->layers, experts = (size_t)facts->experts;
    *m = (mz_synth_model){.facts = *facts, .classes = classes, .profiles = profiles};
    m->odds = mz_calloc((size_t)classes * layers, 2 * experts * sizeof *m->odds);
    m->profile = mz_calloc((size_t)profiles * (size_t)classes, sizeof *m->profile);
    m->length = mz_calloc((size_t)profiles, sizeof *m->length);
    m->domain = mz_calloc((size_t)profiles, sizeof *m->domain);
    m->gate = mz_calloc(layers * MZ_MODEL_GATES, (size_t)facts->top_k * sizeof *m->gate);
    m->link_power = mz_calloc(layers * 7, sizeof *m->link_power);
    bool linked = (double)layers * (double)(experts * experts) * sizeof *m->link < LINK_BYTES;
    if (linked) {
        m->link = mz_calloc(layers, experts * experts * sizeof *m->link);
        m->team = mz_calloc(layers, experts * experts * sizeof *m->team);
    }
    if (m->odds && m->profile && m->length && m->domain && m->gate && m->link_power &&
        (!linked || (m->link && m->team))) {
        m->team_power = m->link_power + layers;
        m->taste = m->team_power + layers;
        m->wander = m->taste + layers;
        m->local = m->wander + layers;
        m->keep = m->local + layers;
        m->bend = m->keep + layers;
        m->steps = m->micro_batches = 1;
        return MZ_OK;
    }
    mz_synth_model_free(m);
    return mz_fail_nomem(err, "the model of a trace");
}

void mz_synth_model_free(mz_synth_model *m) {
    free(m->odds);
    free(m->profile);
    free(m->length);
    free(m->domain);
    free(m->path);
    free(m->tilt);
    free(m->window);
    free(m->rank_share);
    free(m->gate);
    free(m->link);
    free(m->team);
    free(m->link_power); /* and the parameters after it */
    *m = (mz_synth_model){0};
}

struct mz_model_draw {
    const mz_synth_model *model;
    uint64_t seed;
    mz_model_shuffle shuffle;
    float *link, *team;                /* [layers][E][E] factors on odds, or NULL */
    double *lasting, *wander, *normal; /* [E] normal deviates: per sequence, slow, fast */
    float *taste;                      /* [E] factor on odds that they make */
    float *sum;                        /* [E] running sums of odds */
    int32_t *recent;                   /* [RECENT] classes of the last tokens */
    int64_t longest;                   /* sequence of these profiles */
    const float *tilt;                 /* [layers][E] of the step; NULL: none */
    int32_t first, last;               /* profiles of the step's sequences: first to last - 1 */
};

/* exp(power_l x table), or NULL with MZ_OK without a table. */
static mz_code powers(const mz_synth_model *m, const float *table, const double *power, float **out,
                      mz_err *err) {
    int64_t square = (int64_t)m->facts.experts * m->facts.experts;
    *out = NULL;
    if (!table)
        return MZ_OK;
    *out = mz_calloc((size_t)(m->facts.layers * square), sizeof **out);
    if (!*out)
        return mz_fail_nomem(err, "a generator");
    for (int64_t i = 0; i < m->facts.layers * square; i++)
        (*out)[i] = expf((float)power[i / square] * table[i]);
    return MZ_OK;
}

static void find_longest(mz_model_draw *d) {
    const int64_t *length = d->model->length;
    d->longest = 0;
    for (int32_t p = d->first; p < d->last; p++)
        d->longest = length[p] > d->longest ? length[p] : d->longest;
}

mz_code mz_model_draw_open(const mz_synth_model *model, uint64_t seed, mz_model_shuffle shuffle,
                           mz_model_draw **out, mz_err *err) {
    size_t experts = (size_t)model->facts.experts;
    mz_code code = MZ_ENOMEM;
    mz_model_draw *d = *out = calloc(1, sizeof *d);
    if (d) {
        *d = (mz_model_draw){.model = model, .seed = seed, .shuffle = shuffle};
        d->lasting = mz_calloc(experts * 3, sizeof *d->lasting);
        d->taste = mz_calloc(experts, sizeof *d->taste);
        d->sum = mz_calloc(experts, sizeof *d->sum);
        d->last = model->profiles;
        d->recent = mz_calloc(RECENT, sizeof *d->recent);
        find_longest(d);
    }
    if (!d || !d->lasting || !d->taste || !d->sum || !d->recent)
        code = mz_fail_nomem(err, "a generator");
    else
        code = powers(model, model->link, model->link_power, &d->link, err);
    if (!code)
        code = powers(model, model->team, model->team_power, &d->team, err);
    if (code) {
        mz_model_draw_close(out);
        return code;
    }
    d->wander = d->lasting + experts;
    d->normal = d->wander + experts;
    return MZ_OK;
}

void mz_model_draw_close(mz_model_draw **draw) {
    mz_model_draw *d = *draw;
    if (!d)
        return;
    free(d->link);
    free(d->team);
    free(d->lasting); /* and wander and normal behind it */
    free(d->taste);
    free(d->sum);
    free(d->recent);
    free(d);
    *draw = NULL;
}

static mz_rng stream(const mz_model_draw *d, int what, int64_t index, int64_t layer) {
    return mz_rng_make(d->seed, mz_rng_stream((uint64_t)what, (uint64_t)index, (uint64_t)layer, 7));
}

/* Layer number in the streams of what layers share. */
static int64_t shared_layer(const mz_model_draw *d, int32_t layer) {
    return d->shuffle.layers ? layer : -1;
}

void mz_model_draw_at(mz_model_draw *d, int64_t step) {
    const mz_synth_model *m = d->model;
    if (m->points == 0)
        return;
    int64_t point = step < m->steps ? step * m->points / m->steps : m->points - 1;
    d->tilt = m->tilt + point * m->facts.layers * m->facts.experts;
    d->first = m->window[2 * point];
    d->last = m->window[2 * point + 1];
    find_longest(d);
}

static int32_t any_profile(const mz_model_draw *d, mz_rng *rng) {
    return d->first + (int32_t)mz_rng_below(rng, (uint64_t)(d->last - d->first));
}

int32_t mz_model_profile(const mz_model_draw *d, int64_t index) {
    mz_rng rng = stream(d, DRAW_PROFILE, index, -1);
    return any_profile(d, &rng);
}

/* First place whose running sum exceeds value. */
static int32_t find(const float *sum, int64_t count, double value) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if ((double)sum[middle] <= value)
            low = middle + 1;
        else
            high = middle;
    }
    return (int32_t)low;
}

static void draw_normals(const mz_model_draw *d, mz_rng *rng, double *normal) {
    for (int32_t e = 0; e < d->model->facts.experts; e++)
        normal[e] = mz_rng_normal(rng);
}

/* Taste at the next token of a sequence, tilt included; `first`: of its first one. */
static void next_taste(mz_model_draw *d, mz_rng *rng, int32_t layer, bool first) {
    const mz_synth_model *m = d->model;
    double taste = m->taste[layer], local = m->local[layer];
    if (first)
        draw_normals(d, rng, d->lasting);
    bool wandered = first || mz_rng_below(rng, WANDER_TOKENS) == 0;
    if (wandered)
        draw_normals(d, rng, d->wander);
    bool moved = first || mz_rng_below(rng, LOCAL_TOKENS) == 0;
    if (moved)
        draw_normals(d, rng, d->normal);
    double lasting = taste * sqrt(1 - m->wander[layer]), wander = taste * sqrt(m->wander[layer]);
    const float *tilt = d->tilt ? d->tilt + (int64_t)layer * m->facts.experts : NULL;
    for (int32_t e = 0; e < m->facts.experts && (wandered || moved); e++) {
        double power = lasting * d->lasting[e] + wander * d->wander[e] + local * d->normal[e];
        d->taste[e] = expf((float)(power + (tilt ? m->bend[layer] * (double)tilt[e] : 0)));
    }
}

static bool holds(const uint16_t *expert, int64_t count, int32_t e) {
    for (int64_t i = 0; i < count; i++)
        if (expert[i] == e)
            return true;
    return false;
}

/* In LANES partial sums, which the compiler may keep in one register. */
static float sum_of(const float *value, int64_t count) {
    enum { LANES = 8 };
    float lane[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t j = 0; j < LANES; j++)
            lane[j] += value[i + j];
    for (; i < count; i++)
        sum += value[i];
    for (int64_t j = 0; j < LANES; j++)
        sum += lane[j];
    return sum;
}

/* First expert by its odds, the others by theirs, none twice; before: first expert in the layer
 * before, -1 none. */
static void draw_token(const mz_model_draw *d, mz_rng *rng, int32_t layer, int32_t class,
                       int32_t before, uint16_t *expert) {
    const mz_synth_model *m = d->model;
    int64_t experts = m->facts.experts, k = m->facts.top_k;
    const float *odds = m->odds + 2 * ((int64_t) class * m->facts.layers + layer) * experts;
    const float *factor =
        d->link && before >= 0 ? d->link + (layer * experts + before) * experts : NULL;
    for (int64_t j = 0; j < k; j++) {
        if (j == 1) {
            odds += experts;
            factor = d->team ? d->team + (layer * experts + expert[0]) * experts : NULL;
        }
        for (int64_t e = 0; e < experts && j < 2; e++)
            d->sum[e] = odds[e] * d->taste[e] * (factor ? factor[e] : 1.f);
        if (j == 1)
            d->sum[expert[0]] = 0;
        float value = (float)mz_rng_uniform(rng) * sum_of(d->sum, experts);
        int32_t e = 0;
        for (; e + 1 < experts && (value -= d->sum[e]) >= 0; e++)
            ;
        while (holds(expert, j, e)) /* rounding, or no odds left: the next one that is free */
            e = e + 1 < experts ? e + 1 : 0;
        expert[j] = (uint16_t)e;
        d->sum[e] = 0;
    }
}

/* Class of token t given those before it. */
static int32_t next_class(mz_model_draw *d, mz_rng *rng, int64_t t, const float *profile) {
    const mz_synth_model *m = d->model;
    double u = mz_rng_uniform(rng);
    int32_t class;
    if (t > 0 && u < m->stay)
        class = d->recent[(t - 1) % RECENT];
    else if (t > 0 && u < m->stay + m->recall)
        class = d->recent[mz_rng_below(rng, (uint64_t)(t < RECENT ? t : RECENT))];
    else
        class = find(profile, m->classes, mz_rng_uniform(rng));
    d->recent[t % RECENT] = class;
    return class;
}

/* A sequence in proportion to its tokens. */
static int64_t long_profile(const mz_model_draw *d, mz_rng *rng) {
    const mz_synth_model *m = d->model;
    int64_t p;
    do
        p = any_profile(d, rng);
    while ((int64_t)mz_rng_below(rng, (uint64_t)d->longest) >= m->length[p]);
    return p;
}

/* Tokens of as many sequences, one each. */
static void draw_apart(mz_model_draw *d, int64_t index, int32_t layer, int64_t tokens,
                       uint16_t *expert, uint16_t *first) {
    const mz_synth_model *m = d->model;
    int64_t about = shared_layer(d, layer);
    for (int64_t t = 0; t < tokens; t++, expert += m->facts.top_k) {
        int64_t own = (int64_t)mz_rng_stream((uint64_t)index, (uint64_t)t, (uint64_t)about, 9);
        mz_rng classes = stream(d, DRAW_CLASS, own, -1), rng = stream(d, DRAW_EXPERT, own, layer);
        const float *profile = m->profile + long_profile(d, &classes) * m->classes;
        next_taste(d, &rng, layer, true);
        int32_t class = find(profile, m->classes, mz_rng_uniform(&classes));
        draw_token(d, &rng, layer, class, layer > 0 && about < 0 ? first[t] : -1, expert);
        first[t] = expert[0];
    }
}

void mz_model_sequence(mz_model_draw *d, int64_t index, int32_t layer, int64_t tokens,
                       uint16_t *expert, uint16_t *first) {
    const mz_synth_model *m = d->model;
    int64_t k = m->facts.top_k, about = shared_layer(d, layer);
    if (d->shuffle.sequences) {
        draw_apart(d, index, layer, tokens, expert, first);
        return;
    }
    mz_rng classes = stream(d, DRAW_CLASS, index, about);
    mz_rng rng = stream(d, DRAW_EXPERT, index, layer), taste = stream(d, DRAW_TASTE, index, layer);
    int64_t which = d->shuffle.layers ? long_profile(d, &classes) : mz_model_profile(d, index);
    const float *profile = m->profile + which * m->classes;
    for (int64_t t = 0; t < tokens; t++, expert += k) {
        int32_t class = next_class(d, &classes, t, profile);
        next_taste(d, &taste, layer, t == 0);
        if (mz_rng_uniform(&rng) < m->keep[layer] && t > 0)
            memcpy(expert, expert - k, (size_t)k * sizeof *expert);
        else
            draw_token(d, &rng, layer, class, layer > 0 && about < 0 ? first[t] : -1, expert);
        first[t] = expert[0];
    }
}

void mz_model_weights(const mz_model_draw *d, int64_t index, int32_t layer, int64_t tokens,
                      float *weight) {
    const mz_synth_model *m = d->model;
    int64_t k = m->facts.top_k;
    mz_rng rng = stream(d, DRAW_GATE, index, layer);
    for (int64_t t = 0; t < tokens; t++)
        memcpy(weight + t * k,
               m->gate +
                   ((int64_t)layer * MZ_MODEL_GATES + (int64_t)mz_rng_below(&rng, MZ_MODEL_GATES)) *
                       k,
               (size_t)k * sizeof *weight);
}
