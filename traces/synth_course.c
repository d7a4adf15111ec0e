/* The course of a pair trace over its steps, for the model of synth_model.h.
 *
 * Recorded steps become points of the course (each of one step, or of several where there are
 * many). x = sqrt(share) of an expert, whose sampling noise is about the same for all experts, is
 * taken for a random walk seen through white noise. The mean square difference of points n apart is
 * n q^2 + 2 r^2; its values at 1 and at a larger n give, per layer, the walk's step q and the noise
 * r. A Kalman smoother with the steady gain of q / r gives the path of x. The noise itself comes
 * back with the sequences that are drawn.
 *
 * Sequences of a point are like recorded ones of steps near it, so that a change of domain is a
 * change of sequences; what these leave of the path is a factor on every expert's odds. */
#include "traces/synth_model.h"

#include "common/base/arena.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    LEAST_STEPS = 4, /* fewer cannot tell a walk from noise */
    MOST_POINTS = 512,
    POINT_BYTES = 64 << 20, /* of the table of points */
    FAR = 10,               /* the larger n */
    NEAR_PROFILES = 64      /* sequences that those of a point are like, at least */
};

static const double TILT_MOST = 50;

struct mz_course {
    const mz_app *app;
    mz_synth_model *model;
    double *x;    /* [points][layers][E]: pairs, then sqrt of shares, then their path */
    double *mean; /* [layers][E] pairs, then share over the whole trace */
    double *base; /* [2][E] shares of the classes, scratch */
};

static double *at(const mz_course *c, int64_t point, int32_t layer) {
    return c->x + (point * c->model->facts.layers + layer) * c->model->facts.experts;
}

static int64_t point_of(const mz_synth_model *m, int64_t step) {
    return step < m->steps ? step * m->points / m->steps : m->points - 1;
}

void mz_course_add(mz_course *c, int64_t step, int32_t layer, const int64_t *load) {
    int64_t experts = c->model->facts.experts;
    double *x = at(c, point_of(c->model, step), layer), *mean = c->mean + layer * experts;
    for (int64_t e = 0; e < experts; e++) {
        x[e] += (double)load[e];
        mean[e] += (double)load[e];
    }
}

static void to_shares(double *x, int64_t experts) {
    double sum = 0;
    for (int64_t e = 0; e < experts; e++)
        sum += x[e];
    for (int64_t e = 0; e < experts; e++)
        x[e] = sum > 0 ? x[e] / sum : -1; /* -1: no pairs */
}

/* Pairs to sqrt(share); a point without pairs has the mean of all. */
static void to_roots(const mz_course *c, int32_t layer) {
    int64_t experts = c->model->facts.experts;
    double *mean = c->mean + layer * experts;
    to_shares(mean, experts);
    for (int64_t p = 0; p < c->model->points; p++) {
        double *x = at(c, p, layer);
        to_shares(x, experts);
        for (int64_t e = 0; e < experts; e++)
            x[e] = sqrt(fmax(x[e] < 0 ? mean[e] : x[e], 0));
    }
}

/* Mean square difference of points n apart. */
static double difference(const mz_course *c, int32_t layer, int64_t n) {
    double sum = 0;
    int64_t pairs = c->model->points - n, experts = c->model->facts.experts;
    for (int64_t p = 0; p < pairs; p++)
        for (int64_t e = 0; e < experts; e++) {
            double d = at(c, p + n, layer)[e] - at(c, p, layer)[e];
            sum += d * d;
        }
    return sum / (double)(pairs * experts);
}

/* The path of x in place. Forward: m += K (x - m); backward: s = m + (1 - K)(next s - m). */
static void smooth(const mz_course *c, int32_t layer) {
    int64_t points = c->model->points, far = points / 2 < FAR ? points / 2 : FAR;
    double near = difference(c, layer, 1);
    double walk = fmax((difference(c, layer, far) - near) / (double)(far - 1), 0);
    double noise = fmax((near - walk) / 2, 0), ratio = noise > 0 ? walk / noise : 1e9;
    double ahead = (ratio + sqrt(ratio * ratio + 4 * ratio)) / 2, gain = ahead / (1 + ahead);
    for (int64_t e = 0; e < c->model->facts.experts; e++) {
        double mean = 0;
        for (int64_t p = 0; p < points; p++)
            mean += at(c, p, layer)[e] / (double)points;
        at(c, 0, layer)[e] = mean + fmax(gain, 1 / (double)points) * (at(c, 0, layer)[e] - mean);
        for (int64_t p = 1; p < points; p++) {
            double before = at(c, p - 1, layer)[e];
            at(c, p, layer)[e] = before + gain * (at(c, p, layer)[e] - before);
        }
        for (int64_t p = points - 2; p >= 0; p--)
            at(c, p, layer)[e] += (1 - gain) * (at(c, p + 1, layer)[e] - at(c, p, layer)[e]);
    }
    mz_note(&c->app->log, "layer %d: course with gain %.3f", layer, gain);
}

/* Which profiles a point has: those of its own steps, and of steps near it where these are few. */
static void choose_profiles(const mz_course *c, const int64_t *step) {
    mz_synth_model *m = c->model;
    int64_t least = m->profiles < NEAR_PROFILES ? m->profiles : NEAR_PROFILES, low = 0, high = 0;
    for (int64_t p = 0; p < m->points; p++) {
        while (low < m->profiles && point_of(m, step[low]) < p)
            low++;
        while (high < m->profiles && point_of(m, step[high]) <= p)
            high++;
        int64_t first = low, last = high;
        while (last - first < least) { /* both ways, so that the middle stays the point */
            first -= first > 0;
            last += last < m->profiles && last - first < least;
        }
        m->window[2 * p] = (int32_t)first;
        m->window[2 * p + 1] = (int32_t)last;
    }
}

/* Shares that the classes of profiles first to last - 1 give, by their tokens. */
static void shares_of(const mz_course *c, int32_t layer, int32_t first, int32_t last,
                      double *share) {
    const mz_synth_model *m = c->model;
    int64_t experts = c->model->facts.experts;
    double others = m->facts.top_k - 1;
    memset(share, 0, (size_t)experts * sizeof *share);
    for (int32_t class = 0; class < m->classes; class ++) {
        double size = 0;
        for (int32_t p = first; p < last; p++) {
            const float *mix = m->profile + (int64_t)p * m->classes;
            size += (double)m->length[p] * (double)(mix[class] - (class ? mix[class - 1] : 0));
        }
        const float *odds = m->odds + 2 * ((int64_t) class * m->facts.layers + layer) * experts;
        for (int64_t e = 0; e < experts && size > 0; e++)
            share[e] += size * ((double)odds[e] + others * (double)odds[experts + e]);
    }
    to_shares(share, experts);
}

/* Factor on odds: the path over the mean share, less what the choice of profiles does already. */
static void tilt_layer(const mz_course *c, int32_t layer) {
    mz_synth_model *m = c->model;
    int64_t experts = c->model->facts.experts;
    double *whole = c->base + experts;
    shares_of(c, layer, 0, m->profiles, whole);
    for (int64_t p = 0; p < m->points; p++) {
        const double *x = at(c, p, layer), *mean = c->mean + layer * experts;
        float *tilt = m->tilt + (p * c->model->facts.layers + layer) * experts;
        float *path = m->path + (p * c->model->facts.layers + layer) * experts;
        shares_of(c, layer, m->window[2 * p], m->window[2 * p + 1], c->base);
        for (int64_t e = 0; e < experts; e++) {
            double wanted = mean[e] > 0 ? x[e] * x[e] / mean[e] : 1;
            double have = whole[e] > 0 && c->base[e] > 0 ? c->base[e] / whole[e] : 1;
            path[e] = (float)(x[e] * x[e]);
            tilt[e] = (float)log(fmin(fmax(wanted / have, 1 / TILT_MOST), TILT_MOST));
        }
    }
}

void mz_course_finish(mz_course *c, const int64_t *step) {
    choose_profiles(c, step);
    for (int32_t l = 0; l < c->model->facts.layers; l++) {
        to_roots(c, l);
        smooth(c, l);
        tilt_layer(c, l);
        c->model->bend[l] = 1;
    }
}

static mz_code make_room(mz_course *c, mz_err *err) {
    mz_synth_model *m = c->model;
    size_t cells = (size_t)m->facts.layers * (size_t)m->facts.experts, points = (size_t)m->points;
    c->x = mz_calloc(points, cells * sizeof *c->x);
    c->mean = mz_calloc(cells, sizeof *c->mean);
    c->base = mz_calloc((size_t)m->facts.experts, 2 * sizeof *c->base);
    m->tilt = mz_calloc(points, cells * sizeof *m->tilt);
    m->path = mz_calloc(points, cells * sizeof *m->path);
    m->window = mz_calloc(points, 2 * sizeof *m->window);
    if (!c->x || !c->mean || !c->base || !m->tilt || !m->path || !m->window)
        return mz_fail_nomem(err, "the course of a trace");
    return MZ_OK;
}

mz_code mz_course_open(const mz_app *app, mz_synth_model *m, mz_course **course, mz_err *err) {
    double room = POINT_BYTES / ((double)m->facts.layers * m->facts.experts * sizeof(double));
    int64_t most = room < MOST_POINTS ? (int64_t)room : MOST_POINTS;
    *course = NULL;
    if (m->facts.step_meaning == MZ_STEP_NONE || m->steps < LEAST_STEPS || most < LEAST_STEPS)
        return MZ_OK;
    mz_course *c = mz_calloc(1, sizeof *c);
    if (!c)
        return mz_fail_nomem(err, "the course of a trace");
    *c = (mz_course){.app = app, .model = m};
    m->points = (int32_t)(m->steps < most ? m->steps : most);
    *course = c;
    return make_room(c, err);
}

void mz_course_close(mz_course **course) {
    mz_course *c = *course;
    if (!c)
        return;
    free(c->x);
    free(c->mean);
    free(c->base);
    free(c);
    *course = NULL;
}
