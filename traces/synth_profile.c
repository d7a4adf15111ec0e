#include "traces/synth_profile.h"

#include "common/base/rng.h"

#include <math.h>

enum { DOMAINS = 5, DOMAIN_CLASSES = 64, PROFILES = 320, SEQUENCE_CLASSES = 64 };

/* Of the pairs profiles. Ranges over layers run from the first value to the second. */
static const double SIGMA[2] = {0.45, 1.2}; /* of log popularity */
static const double DOMAIN_RATIO = 1.95;    /* ... of a domain's own, over the layer's */
static const double CLASS_SIGMA = 1.4;      /* ... of a class of tokens */
static const double FIRST_POWER = 1.1;      /* first experts are more concentrated */
static const double LINK_SIGMA = 2.8, TEAM_SIGMA = 2.6;
static const double TASTE[2] = {0.8, 1.8}, WANDER = 1.0, LOCAL = 0.6, KEEP = 0.08;
static const double STAY = 0.1, RECALL = 0.1;
static const double LENGTH_SIGMA = 0.6; /* of log tokens of a sequence */
static const double GATE_FALL = 0.5;    /* weight of rank j: j^-a, a from 0.1 to 0.9 */

static double between(const double *range, int64_t at, int64_t count) {
    return range[0] + (range[1] - range[0]) * (count > 1 ? (double)at / (double)(count - 1) : 0.5);
}

static mz_rng stream(uint64_t seed, uint64_t what, int64_t a, int64_t b) {
    return mz_rng_make(seed, mz_rng_stream(what, (uint64_t)a, (uint64_t)b, 0x70));
}

static bool stopped(const mz_app *app) {
    return app->stop && *app->stop;
}

/* Odds of every class in one layer: popularity of the layer, of the domain, of the class. */
static void make_layer(const mz_app *app, mz_synth_model *m, uint64_t seed, int32_t layer,
                       double sigma) {
    int64_t experts = m->facts.experts;
    mz_rng popular = stream(seed, 1, layer, 0);
    for (int64_t e = 0; e < experts && !stopped(app); e++) {
        double base = sigma * mz_rng_normal(&popular);
        for (int32_t c = 0; c < m->classes; c++) {
            mz_rng domain = stream(seed, 2, layer * experts + e, c / DOMAIN_CLASSES);
            mz_rng own = stream(seed, 3, layer * experts + e, c);
            double all = base + DOMAIN_RATIO * sigma * mz_rng_normal(&domain) +
                         CLASS_SIGMA * mz_rng_normal(&own);
            float *odds = m->odds + 2 * ((int64_t)c * m->facts.layers + layer) * experts + e;
            odds[0] = expf((float)(FIRST_POWER * all));
            odds[experts] = expf((float)all);
        }
    }
    for (int64_t i = 0; i < experts * experts && m->link && !stopped(app); i++) {
        mz_rng pair = stream(seed, 4, layer, i);
        m->link[layer * experts * experts + i] = (float)(LINK_SIGMA * mz_rng_normal(&pair));
        m->team[layer * experts * experts + i] = (float)(TEAM_SIGMA * mz_rng_normal(&pair));
    }
}

static void make_gates(const mz_app *app, mz_synth_model *m, uint64_t seed) {
    int64_t k = m->facts.top_k;
    for (int64_t g = 0; g < (int64_t)m->facts.layers * MZ_MODEL_GATES && !stopped(app); g++) {
        mz_rng rng = stream(seed, 5, g, 0);
        double fall = GATE_FALL + 0.4 * (2 * mz_rng_uniform(&rng) - 1), sum = 0;
        for (int64_t j = 0; j < k; j++)
            sum += pow((double)(j + 1), -fall);
        for (int64_t j = 0; j < k; j++)
            m->gate[g * k + j] = (float)(pow((double)(j + 1), -fall) / sum);
    }
}

/* Mixes of a few classes of one domain each, with shares falling like those of words, and a little
 * of all of its classes. */
static void make_profiles(mz_synth_model *m, int32_t domains, int64_t sequence, uint64_t seed) {
    for (int32_t p = 0; p < m->profiles; p++) {
        float *mix = m->profile + (int64_t)p * m->classes;
        int64_t first = (int64_t)(p % domains) * DOMAIN_CLASSES;
        mz_rng rng = stream(seed, 6, p, 0);
        double sum = 0, all = 0;
        for (int64_t c = 0; c < DOMAIN_CLASSES; c++)
            mix[first + c] = 0.01f;
        for (int i = 0; i < SEQUENCE_CLASSES; i++)
            mix[first + (int64_t)mz_rng_below(&rng, DOMAIN_CLASSES)] += 1.f / (float)(i + 1);
        for (int32_t c = 0; c < m->classes; c++)
            all += (double)mix[c];
        for (int32_t c = 0; c < m->classes; c++) {
            sum += (double)mix[c];
            mix[c] = (float)(sum / all);
        }
        m->domain[p] = p % domains;
        double spread = LENGTH_SIGMA * mz_rng_normal(&rng) - 0.5 * LENGTH_SIGMA * LENGTH_SIGMA;
        m->length[p] = (int64_t)fmax(1, round((double)sequence * exp(spread)));
    }
}

/* The least stride from 7 on that visits each of `count` places once. */
static int64_t scattering(int64_t count) {
    for (int64_t stride = 7;; stride++) {
        int64_t a = stride, b = count;
        while (b) {
            int64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1)
            return stride;
    }
}

mz_code mz_profile_model(const mz_app *app, mz_profile profile, const mz_trace_facts *facts,
                         int64_t sequence, uint64_t seed, mz_synth_model *m, mz_err *err) {
    int32_t domains = profile == MZ_PROFILE_MIXED ? DOMAINS : 1;
    mz_code code = mz_synth_model_make(facts, domains * DOMAIN_CLASSES, PROFILES, m, err);
    if (code)
        return code;
    const int64_t stride = scattering(facts->layers);
    for (int32_t l = 0; l < facts->layers && !stopped(app); l++) {
        m->link_power[l] = m->team_power[l] = 1;
        m->taste[l] = between(TASTE, l < facts->layers / 2 ? l : facts->layers - 1 - l,
                              facts->layers / 2 + 1);
        m->wander[l] = WANDER;
        m->local[l] = LOCAL;
        m->keep[l] = l > 0 ? KEEP : 0;
        make_layer(app, m, seed, l, between(SIGMA, l * stride % facts->layers, facts->layers));
    }
    make_gates(app, m, seed);
    make_profiles(m, domains, sequence, seed);
    m->stay = STAY;
    m->recall = RECALL;
    return stopped(app) ? mz_fail(err, MZ_EABORTED, "interrupted; nothing was written") : MZ_OK;
}

/* ---- histories ------------------------------------------------------------------------------- */

/* Training without balance loss, one step standing for ten iterations: sigma of the log shares
 * before, at the worst, after the recovery, per tenfold step after it. */
static double collapse_sigma(double step) {
    if (step < 1)
        return 0.2;
    return 2.2 + 2.6 * exp(-(step - 1) / 8) + 0.45 * log10(1 + step / 30);
}

/* Angle by which preferences have turned: fast at first, then hardly. */
static double collapse_angle(double step) {
    return 1.4 * (1 - exp(-step / 12)) + 0.25 * log1p(step / 100);
}

/* Shares of a layer: the softmax of sigma (cos(angle) a + sin(angle) b). */
static void make_shares(const mz_synth_history *h, int32_t layer, double sigma, double angle,
                        uint64_t seed, double *share) {
    int64_t experts = h->facts.experts;
    mz_rng rng = stream(seed, 7, layer, 0);
    double sum = 0;
    for (int64_t e = 0; e < experts; e++) {
        double a = mz_rng_normal(&rng), b = mz_rng_normal(&rng);
        sum += share[e] = exp(sigma * (cos(angle) * a + sin(angle) * b));
    }
    for (int64_t e = 0; e < experts; e++)
        share[e] /= sum;
    mz_history_cap(share, experts, h->facts.top_k);
}

/* Scales the distance from even until the busiest expert has (1 + violation) times the mean. */
static void limit_violation(double *share, int64_t experts, double violation) {
    double even = 1.0 / (double)experts, most = 0;
    for (int64_t e = 0; e < experts; e++)
        most = fmax(most, share[e] - even);
    for (int64_t e = 0; e < experts && most > 0; e++)
        share[e] = even + (share[e] - even) * fmin(violation * even / most, 1);
}

mz_code mz_profile_history(const mz_app *app, mz_profile profile, const mz_trace_facts *facts,
                           int64_t steps, int64_t tokens, uint64_t seed, mz_synth_history *h,
                           mz_err *err) {
    int64_t experts = facts->experts, cells = facts->layers * experts;
    bool collapse = profile == MZ_PROFILE_COLLAPSE;
    mz_code code = mz_history_make(facts, steps, h, err);
    if (code)
        return code;
    h->first_step = 0;
    h->tokens = tokens;
    h->pairs = tokens * facts->top_k;
    h->micro_batches = 1;
    for (int32_t span = 0; span < h->spans; span++)
        for (int32_t l = 0; l < facts->layers && !stopped(app); l++) {
            double *share = h->share + span * cells + l * experts;
            double middle = 0.5 * (double)(h->first[span] + h->first[span + 1] - 1);
            mz_rng rng = stream(seed, 8, l, 0);
            /* Layers differ lastingly. */
            double own = 0.7 + 0.6 * mz_rng_uniform(&rng);
            make_shares(h, l, collapse ? own * collapse_sigma(middle) : 0.3,
                        collapse ? collapse_angle(middle) : middle / 2000, seed, share);
            if (!collapse)
                limit_violation(share, experts, 0.04);
            /* Noise of 4.5 % of a share; balanced: none beyond the sources' scatter. */
            for (int64_t e = 0; e < experts && collapse; e++)
                h->change[span * cells + l * experts + e] = 0.045 * share[e] / 0.886;
            /* Scatter between sources: 2 x binomial, at the start of a collapse 16 x. */
            double scatter = collapse && span < 20 ? 16 : 2, n = (double)h->pairs;
            h->micro_batch[(int64_t)span * facts->layers + l] =
                n > 1 ? fmin((scatter - 1) / (n - 1), 0.5) : 0;
        }
    return stopped(app) ? mz_fail(err, MZ_EABORTED, "interrupted; nothing was written") : MZ_OK;
}
