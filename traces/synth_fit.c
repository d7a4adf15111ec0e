/* Fits a model of routing to a trace.
 *
 * 1. In one pass over the trace whole sequences, evenly spaced, up to SAMPLE_TOKENS tokens are
 * kept, and where there are steps all loads are counted for the course (synth_course.c).
 * 2. Classes: a mixture with one class per token, by rounds of assignment and counting (hard
 *    expectation maximisation) on some of these tokens, begun from tokens drawn at random; odds of
 *    a class are its counts plus SMOOTH tokens of the layer's own.
 * 3. Every sampled sequence gives a mix of classes; how often classes return gives stay and recall.
 * 4. The loads give the course, less what the choice of sequences gives already.
 * 5. Sequences are drawn from the model, and every layer's parameters are moved until popularity,
 *    its course, reuse at lags 1, 4 and 64, correlation of halves, mutual information and best
 *    partners agree with the sample's. */
#include "common/base/arena.h"
#include "common/base/rng.h"
#include "traces/reader.h"
#include "traces/stats_private.h"
#include "traces/synth_model.h"

#include <stdlib.h>

enum {
    SAMPLE_TOKENS = 200000,
    SAMPLE_BYTES = 192 << 20,
    LEARN_TOKENS = 24000,
    CLASSES = 384,
    CLASS_TOKENS = 24, /* fewer classes where a class would have fewer tokens to learn from */
    ROUNDS = 12,
    PROFILES = 4096,
    TUNE_ROUNDS = 20,
    FULL_ROUNDS = 10,
    TUNE_TOKENS = 24000,
    TUNE_LEAST = 1000,
    TUNE_ODDS = 300000000 /* tokens x layers x experts of a round, which its time goes with */
};

static const double SMOOTH = 1.5, LINK_SMOOTH = 8;

typedef struct fit {
    mz_app *app;
    mz_trace *trace;
    const mz_trace_facts *facts;
    mz_arena arena;
    mz_synth_model *model;
    mz_course *course; /* NULL: every step is alike */
    int64_t *step;     /* [profiles] that each is of, counted from 0 */
    int64_t *load;     /* [E] of the call at hand */
    int32_t classes, profiles;
    int64_t *sequence; /* [profiles] which of the trace's */
    int64_t *begin;    /* [profiles + 1] first sampled token of each */
    int32_t *found;    /* [profiles] layers in which it was found */
    int64_t tokens;    /* sampled */
    uint16_t *expert;  /* [tokens][layers][k], first expert first */
    int32_t *class;    /* [tokens] */
    double *odds;      /* [layers][2][E] counts over all sampled tokens */
    float *score;      /* [layers][2][E][classes] log odds */
    double *count;     /* [classes][layers][2][E] */
    double *size;      /* [classes] */
    float *sums;       /* [classes] scratch */
} fit;

static bool stopped(const fit *f) {
    return f->app->stop && *f->app->stop;
}

static int64_t place(const fit *f, int32_t layer, int64_t j, int32_t e) {
    return (2 * (int64_t)layer + (j > 0)) * f->facts->experts + e;
}

/* ---- sample ---------------------------------------------------------------------------------- */

static mz_code choose_sample(fit *f, mz_err *err) {
    const mz_trace_sequence *all;
    int64_t count = mz_trace_sequences(f->trace, &all), tokens = 0, most = SAMPLE_TOKENS;
    int64_t token_bytes = 2 * (int64_t)f->facts->layers * f->facts->top_k, stride = 1;
    most = most * token_bytes > SAMPLE_BYTES ? SAMPLE_BYTES / token_bytes : most;
    for (int64_t s = 0; s < count; s++)
        tokens += all[s].tokens;
    while (tokens / stride > most || count / stride > PROFILES)
        stride++;
    int64_t kept = (count + stride - 1) / stride;
    f->sequence = MZ_NEW(&f->arena, int64_t, kept);
    f->begin = MZ_NEW(&f->arena, int64_t, kept + 1);
    f->found = MZ_NEW(&f->arena, int32_t, kept);
    if (!f->sequence || !f->begin || !f->found)
        return mz_fail_nomem(err, "a sample of sequences");
    for (int64_t s = 0; s < count; s += stride) {
        if (f->tokens > 0 && f->tokens + all[s].tokens > most)
            continue;
        f->sequence[f->profiles++] = s;
        f->tokens += all[s].tokens;
        f->begin[f->profiles] = f->tokens;
    }
    if (f->tokens * token_bytes > 4 * (int64_t)SAMPLE_BYTES)
        return mz_fail(err, MZ_EINPUT,
                       "%s: a sequence of %lld tokens is too long to be fitted; --kind counts fits "
                       "the loads of steps alone",
                       mz_trace_path(f->trace), (long long)f->tokens);
    f->expert = MZ_NEW(&f->arena, uint16_t, f->tokens * token_bytes / 2);
    f->class = MZ_NEW(&f->arena, int32_t, f->tokens);
    return f->expert && f->class ? MZ_OK : mz_fail_nomem(err, "a sample of tokens");
}

/* Experts and weights of sampled sequence `i` in one call, first expert first. */
static mz_code read_sequence(fit *f, int64_t call, const mz_trace_call *at, int64_t i,
                             uint16_t *expert, float *weight, mz_err *err) {
    const mz_trace_sequence *all;
    mz_trace_sequences(f->trace, &all);
    const mz_trace_sequence *s = &all[f->sequence[i]];
    int64_t k = f->facts->top_k;
    mz_trace_pairs_out out = {.expert = expert, .weight = f->facts->has_weight ? weight : NULL};
    mz_code code =
        mz_trace_read_pairs(f->trace, call, s->token_begin - at->token_begin, s->tokens, &out, err);
    for (int64_t t = 0; t < s->tokens && !code; t++) {
        uint16_t *to = f->expert + ((f->begin[i] + t) * f->facts->layers + at->layer) * k;
        float *w = weight + t * k;
        memcpy(to, expert + t * k, (size_t)k * sizeof *to);
        for (int64_t a = 1; a < k && f->facts->has_weight; a++)
            for (int64_t b = a; b > 0 && w[b] > w[b - 1]; b--) {
                float held = w[b];
                uint16_t id = to[b];
                w[b] = w[b - 1];
                to[b] = to[b - 1];
                w[b - 1] = held;
                to[b - 1] = id;
            }
        /* Some of the layer's weight vectors, evenly spaced. */
        int64_t token = f->begin[i] + t, slot = token * MZ_MODEL_GATES / f->tokens;
        for (; f->facts->has_weight && slot < (token + 1) * MZ_MODEL_GATES / f->tokens; slot++)
            memcpy(f->model->gate + ((int64_t)at->layer * MZ_MODEL_GATES + slot) * k, w,
                   (size_t)k * sizeof *w);
    }
    return code;
}

/* The first profile that begins at `token` or later. */
static int64_t first_profile(const fit *f, int64_t token) {
    const mz_trace_sequence *all;
    int64_t low = 0, high = f->profiles;
    mz_trace_sequences(f->trace, &all);
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (all[f->sequence[middle]].token_begin < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* One call in the order of its tokens: sampled sequences are kept, and with a course all pairs are
 * counted. */
static mz_code read_call(fit *f, int64_t c, const mz_trace_call *call, int64_t step,
                         uint16_t *expert, float *weight, mz_err *err) {
    const mz_trace_sequence *all;
    int64_t end = call->token_begin + call->tokens, done = 0;
    mz_code code = MZ_OK;
    mz_trace_sequences(f->trace, &all);
    memset(f->load, 0, (size_t)f->facts->experts * sizeof *f->load);
    for (int64_t i = first_profile(f, call->token_begin); i < f->profiles && !code; i++) {
        const mz_trace_sequence *s = &all[f->sequence[i]];
        if (s->token_begin >= end)
            break;
        if (f->course)
            code = mz_trace_add_range(f->trace, c, done, s->token_begin - call->token_begin - done,
                                      f->load, err);
        if (!code)
            code = read_sequence(f, c, call, i, expert, weight, err);
        f->found[i] += !code;
        for (int64_t j = 0; f->course && !code && j < s->tokens * f->facts->top_k; j++)
            f->load[expert[j]]++;
        done = s->token_begin - call->token_begin + s->tokens;
    }
    if (!code && f->course)
        code = mz_trace_add_range(f->trace, c, done, call->tokens - done, f->load, err);
    if (!code && f->course)
        mz_course_add(f->course, step, call->layer, f->load);
    return code;
}

/* A token without experts in some layer says nothing about what depends on them. */
static mz_code check_layers(const fit *f, mz_err *err) {
    const mz_trace_sequence *all;
    mz_trace_sequences(f->trace, &all);
    for (int64_t i = 0; i < f->profiles; i++)
        if (f->found[i] < f->facts->layers)
            return mz_fail(err, MZ_EINPUT,
                           "%s: the sequence at token %lld has calls for %d of %d layers; choose "
                           "layers that every step has with mizan trace cut, or --kind counts",
                           mz_trace_path(f->trace), (long long)all[f->sequence[i]].token_begin,
                           f->found[i], f->facts->layers);
    return MZ_OK;
}

static mz_code read_sample(fit *f, mz_err *err) {
    const mz_trace_call *calls;
    const mz_trace_sequence *all;
    int64_t count = mz_trace_calls(f->trace, &calls), longest = 0, k = f->facts->top_k, step = -1;
    mz_trace_sequences(f->trace, &all);
    for (int64_t i = 0; i < f->profiles; i++) {
        f->model->length[i] = all[f->sequence[i]].tokens;
        f->model->domain[i] = all[f->sequence[i]].domain;
        longest = f->model->length[i] > longest ? f->model->length[i] : longest;
    }
    uint16_t *expert = MZ_NEW(&f->arena, uint16_t, longest * k);
    float *weight = MZ_NEW(&f->arena, float, longest *k);
    f->load = MZ_NEW(&f->arena, int64_t, f->facts->experts);
    if (!expert || !weight || !f->load)
        return mz_fail_nomem(err, "a sequence");
    mz_progress progress = mz_progress_start(&f->app->log, "reading", "calls", count);
    mz_code code = MZ_OK;
    for (int64_t c = 0; c < count && !code; c++) {
        step += c == 0 || calls[c].step != calls[c - 1].step;
        code = read_call(f, c, &calls[c], step, expert, weight, err);
        mz_progress_update(&progress, c);
        if (!code && stopped(f))
            code = mz_fail(err, MZ_EABORTED, "interrupted");
    }
    mz_progress_end(&progress);
    return code ? code : check_layers(f, err);
}

/* ---- classes --------------------------------------------------------------------------------- */

static void count_token(const fit *f, int64_t token, double *count) {
    const uint16_t *expert = f->expert + token * f->facts->layers * f->facts->top_k;
    for (int32_t l = 0; l < f->facts->layers; l++, expert += f->facts->top_k)
        for (int64_t j = 0; j < f->facts->top_k; j++)
            count[place(f, l, j, expert[j])]++;
}

/* Smoothed odds of every class, and their logarithms laid out for scoring. */
static void make_odds(fit *f, double scale) {
    int64_t cells = 2 * (int64_t)f->facts->layers * f->facts->experts;
    double others = f->facts->top_k > 1 ? f->facts->top_k - 1 : 1;
    for (int64_t i = 0; i < cells; i++) {
        bool first = i / f->facts->experts % 2 == 0;
        double own = f->odds[i] / (double)f->tokens * SMOOTH + 1e-7;
        for (int32_t c = 0; c < f->classes; c++) {
            double total = (f->size[c] * scale + SMOOTH) * (first ? 1 : others);
            double odds = (f->count[c * cells + i] * scale + own) / total;
            f->model->odds[c * cells + i] = (float)odds;
            f->score[i * f->classes + c] = (float)log(odds);
        }
    }
}

static int32_t best_class(const fit *f, int64_t token) {
    const uint16_t *expert = f->expert + token * f->facts->layers * f->facts->top_k;
    int32_t best = 0;
    memset(f->sums, 0, (size_t)f->classes * sizeof *f->sums);
    for (int32_t l = 0; l < f->facts->layers; l++, expert += f->facts->top_k)
        for (int64_t j = 0; j < f->facts->top_k; j++) {
            const float *row = f->score + place(f, l, j, expert[j]) * f->classes;
            for (int32_t c = 0; c < f->classes; c++)
                f->sums[c] += row[c];
        }
    for (int32_t c = 1; c < f->classes; c++)
        best = f->sums[c] > f->sums[best] ? c : best;
    return best;
}

static void assign(fit *f, int64_t stride) {
    int64_t cells = 2 * (int64_t)f->facts->layers * f->facts->experts;
    for (int64_t t = 0; t < f->tokens && !stopped(f); t += stride)
        f->class[t] = best_class(f, t);
    memset(f->count, 0, (size_t)(f->classes * cells) * sizeof *f->count);
    memset(f->size, 0, (size_t)f->classes * sizeof *f->size);
    for (int64_t t = 0; t < f->tokens; t += stride) {
        count_token(f, t, f->count + f->class[t] * cells);
        f->size[f->class[t]]++;
    }
}

static mz_code learn_classes(fit *f, uint64_t seed, mz_err *err) {
    int64_t cells = 2 * (int64_t)f->facts->layers * f->facts->experts;
    int64_t stride = (f->tokens + LEARN_TOKENS - 1) / LEARN_TOKENS;
    mz_rng rng = mz_rng_make(seed, 77);
    f->odds = MZ_NEW(&f->arena, double, cells);
    f->score = MZ_NEW(&f->arena, float, cells * f->classes);
    f->count = MZ_NEW(&f->arena, double, cells * f->classes);
    f->size = MZ_NEW(&f->arena, double, f->classes);
    f->sums = MZ_NEW(&f->arena, float, f->classes);
    if (!f->odds || !f->score || !f->count || !f->size || !f->sums)
        return mz_fail_nomem(err, "the classes of a model");
    for (int64_t t = 0; t < f->tokens; t++)
        count_token(f, t, f->odds);
    for (int32_t c = 0; c < f->classes; c++) {
        count_token(f, (int64_t)mz_rng_below(&rng, (uint64_t)f->tokens), f->count + c * cells);
        f->size[c] = 1;
    }
    make_odds(f, 1);
    mz_progress progress = mz_progress_start(&f->app->log, "fitting", "rounds", ROUNDS + 1);
    for (int round = 0; round <= ROUNDS; round++) {
        assign(f, round < ROUNDS ? stride : 1);
        make_odds(f, 1);
        mz_progress_update(&progress, round);
        if (stopped(f))
            break;
    }
    mz_progress_end(&progress);
    return stopped(f) ? mz_fail(err, MZ_EABORTED, "interrupted") : MZ_OK;
}

/* log of P(b | a) / P(b) from counts of (a, b), with LINK_SMOOTH pairs of independent ones added.
 */
static void make_ratios(int64_t experts, const double *count, float *ratio, double *scratch) {
    double all = 0;
    memset(scratch, 0, (size_t)(2 * experts) * sizeof *scratch);
    for (int64_t a = 0; a < experts; a++)
        for (int64_t b = 0; b < experts; b++) {
            scratch[a] += count[a * experts + b];
            scratch[experts + b] += count[a * experts + b];
            all += count[a * experts + b];
        }
    for (int64_t a = 0; a < experts; a++)
        for (int64_t b = 0; b < experts; b++) {
            double p = (scratch[experts + b] + 1e-3) / all;
            ratio[a * experts + b] = (float)log((count[a * experts + b] + LINK_SMOOTH * p) /
                                                ((scratch[a] + LINK_SMOOTH) * p));
        }
}

/* What first experts follow each other from layer to layer, and who comes with whom. */
static mz_code learn_links(fit *f, mz_err *err) {
    int64_t experts = f->facts->experts, k = f->facts->top_k, square = experts * experts;
    int64_t token = f->facts->layers * k;
    if (!f->model->link)
        return MZ_OK;
    double *count = mz_calloc((size_t)(square + 2 * experts), sizeof *count);
    if (!count)
        return mz_fail_nomem(err, "the links between layers");
    for (int32_t l = 0; l < f->facts->layers; l++) {
        memset(count, 0, (size_t)square * sizeof *count);
        for (int64_t t = 0; t < f->tokens && l > 0; t++)
            count[f->expert[t * token + (l - 1) * k] * experts + f->expert[t * token + l * k]]++;
        if (l > 0)
            make_ratios(experts, count, f->model->link + l * square, count + square);
        memset(count, 0, (size_t)square * sizeof *count);
        for (int64_t t = 0; t < f->tokens; t++)
            for (int64_t j = 1; j < k; j++)
                count[f->expert[t * token + l * k] * experts + f->expert[t * token + l * k + j]]++;
        if (k > 1)
            make_ratios(experts, count, f->model->team + l * square, count + square);
        f->model->link_power[l] = f->model->team_power[l] = 0.5;
    }
    free(count);
    return MZ_OK;
}

/* Share of tokens whose class is that of the token `lag` before, within sequences. */
static double class_return(const fit *f, int64_t lag) {
    double same = 0, all = 0;
    for (int32_t i = 0; i < f->profiles; i++)
        for (int64_t t = f->begin[i] + lag; t < f->begin[i + 1]; t++) {
            same += f->class[t] == f->class[t - lag];
            all++;
        }
    return all > 0 ? same / all : 0;
}

static void make_profiles(fit *f) {
    mz_synth_model *m = f->model;
    for (int32_t i = 0; i < f->profiles; i++) {
        float *mix = m->profile + (int64_t)i * f->classes;
        double sum = 0;
        for (int64_t t = f->begin[i]; t < f->begin[i + 1]; t++)
            mix[f->class[t]]++;
        for (int32_t c = 0; c < f->classes; c++) {
            sum += (double)mix[c] / (double)m->length[i];
            mix[c] = (float)sum;
        }
        mix[f->classes - 1] = 1;
    }
    double near = class_return(f, 1), middle = class_return(f, 8), far = class_return(f, 64);
    m->stay = near > middle ? (near - middle) / (1 - middle) : 0;
    m->recall = middle > far ? (middle - far) / (1 - far) : 0;
}

/* ---- tuning ---------------------------------------------------------------------------------- */

enum { MOVED = 5 };

typedef struct tune {
    mz_stats_sequence *sequence;
    mz_stats_token *token;
    int64_t sequences; /* drawn for every layer, each round others */
    int64_t from;      /* the first of the round */
    double gain; /* of the round: less and less, so that the noise of what was drawn averages out */
    double *count;        /* [2][E] of the layer at hand */
    double *drawn;        /* [layers][2][E] of all rounds with a gain below 1 */
    double *drawn_tokens; /* [layers] likewise */
    double *moved;    /* [E][MOVED] sums over sequences, of how their shares follow the course */
    int64_t *own;     /* [E] of a sequence */
    uint16_t *expert; /* of a sequence */
    uint16_t *first;  /* of all tokens drawn, in the layer before */
    double *metric;
} tune;

/* Sequence i of the tuning is of a step like any other; neighbours are of steps far apart. */
static void tune_at(const fit *f, mz_model_draw *draw, int64_t i) {
    mz_model_draw_at(draw, i * 7919 % f->model->steps);
}

/* One sequence's shares beside those that the course has at its step. */
static void add_moved(const fit *f, const tune *u, int64_t i, int32_t layer, int64_t pairs) {
    const mz_synth_model *m = f->model;
    int64_t experts = f->facts->experts, point = i * 7919 % m->steps * m->points / m->steps;
    const float *path = m->path + (point * m->facts.layers + layer) * experts;
    for (int64_t e = 0; e < experts; e++) {
        double n = (double)pairs, d = (double)u->own[e], w = (double)path[e];
        double *sum = u->moved + e * MOVED;
        sum[0] += n;
        sum[1] += d;
        sum[2] += n * w;
        sum[3] += d * w;
        sum[4] += n * w * w;
    }
}

/* Slope of the sequences' shares over the course's: 1 when the model follows it. */
static double slope(const tune *u, int64_t experts) {
    double both = 0, own = 0;
    for (int64_t e = 0; e < experts; e++) {
        const double *sum = u->moved + e * MOVED;
        double mean = sum[2] / sum[0];
        if (!(mean > 0))
            continue;
        both += (sum[3] - sum[1] * mean) / mean;
        own += (sum[4] - sum[2] * mean) / mean;
    }
    return own > 0 ? both / own : (double)NAN;
}

static void draw_layer(const fit *f, const tune *u, mz_model_draw *draw, int32_t layer) {
    int64_t experts = f->facts->experts, k = f->facts->top_k, done = 0;
    memset(u->count, 0, (size_t)(2 * experts) * sizeof *u->count);
    memset(u->moved, 0, (size_t)(MOVED * experts) * sizeof *u->moved);
    for (int64_t i = u->from; i < u->from + u->sequences && !stopped(f); i++) {
        tune_at(f, draw, i);
        memset(u->own, 0, (size_t)experts * sizeof *u->own);
        int64_t n = f->model->length[mz_model_profile(draw, i)];
        uint16_t *first = u->first + done;
        done += n;
        mz_stats_sequence_begin(u->sequence, layer, n);
        /* The layer before is needed by the statistics, and replaced by the draw. */
        for (int64_t t = 0; t < n; t++)
            u->expert[n * k + t] = first[t];
        mz_model_sequence(draw, i, layer, n, u->expert, first);
        for (int64_t t = 0; t < n; t++) {
            const uint16_t *expert = u->expert + t * k;
            mz_stats_sequence_token(u->sequence, expert, k);
            mz_stats_token_add(u->token, layer, expert, NULL, k, layer ? u->expert[n * k + t] : -1);
            for (int64_t j = 0; j < k; j++) {
                u->count[(j > 0) * experts + expert[j]]++;
                u->own[expert[j]]++;
            }
        }
        if (f->model->points)
            add_moved(f, u, i, layer, n * k);
    }
}

/* The odds of expert i of [2][E], of all classes, times a ratio that is not too far from 1. */
static void scale_odds(const fit *f, int32_t layer, int64_t i, double ratio) {
    const mz_synth_model *m = f->model;
    float factor = (float)fmin(fmax(ratio, 0.25), 4);
    for (int32_t c = 0; c < f->classes; c++)
        m->odds[2 * ((int64_t)c * m->facts.layers + layer) * f->facts->experts + i] *= factor;
}

/* Moves popularity towards the trace's, and adds up what was drawn once the steps are small. */
static void tune_popularity(const fit *f, const tune *u, int32_t layer, double tokens) {
    int64_t cells = 2 * (int64_t)f->facts->experts;
    for (int64_t i = 0; i < cells; i++) {
        double share = (f->odds[layer * cells + i] + 1) / (double)f->tokens;
        scale_odds(f, layer, i, 1 + u->gain * (1 - (u->count[i] + 1) / (tokens * share)));
        u->drawn[layer * cells + i] += u->gain < 1 ? u->count[i] : 0;
    }
    u->drawn_tokens[layer] += u->gain < 1 ? tokens : 0;
}

/* What rounds of few sequences leave, popularity too flat, is seen in all of them together. */
static void correct_popularity(const fit *f, const tune *u, int32_t layer) {
    int64_t cells = 2 * (int64_t)f->facts->experts;
    for (int64_t i = 0; i < cells; i++) {
        double share = (f->odds[layer * cells + i] + 1) / (double)f->tokens;
        double have = (u->drawn[layer * cells + i] + 1) / u->drawn_tokens[layer];
        scale_odds(f, layer, i, share / have);
    }
}

static void move(const tune *u, double *parameter, double by, double low, double high) {
    if (isfinite(by))
        *parameter = fmin(fmax(*parameter + u->gain * by, low), high);
}

/* The token's experts without repetitions; how many. */
static int64_t each_once(const uint16_t *expert, int64_t k, uint16_t *once) {
    int64_t n = 0;
    for (int64_t i = 0; i < k; i++) {
        int64_t j = 0;
        while (j < n && once[j] != expert[i])
            j++;
        if (j == n)
            once[n++] = expert[i];
    }
    return n;
}

/* The statistics that the tuning aims at, of the sample: the trace itself, where it is longer,
 * would take a pass over all pairs that says little more. */
static mz_code measure_layer(const fit *f, mz_stats_sequence *sequence, mz_stats_token *token,
                             int32_t layer, uint16_t *once, double *metric, mz_err *err) {
    int64_t layers = f->facts->layers, k = f->facts->top_k, tokens;
    for (int32_t i = 0; i < f->profiles; i++) {
        mz_stats_sequence_begin(sequence, layer, f->begin[i + 1] - f->begin[i]);
        for (int64_t t = f->begin[i]; t < f->begin[i + 1]; t++) {
            const uint16_t *expert = f->expert + (t * layers + layer) * k;
            int64_t n = each_once(expert, k, once);
            mz_stats_sequence_token(sequence, once, n);
            mz_stats_token_add(token, layer, once, NULL, n, layer ? *(expert - k) : -1);
        }
    }
    const int64_t *chose = mz_stats_token_chose(token, layer, &tokens);
    mz_stats_sequence_finish(sequence, layer, chose, tokens, metric);
    return mz_stats_token_finish(token, layer, metric, err);
}

/* *wanted: [layers][MZ_STATS_METRICS] in f's arena. */
static mz_code measure_sample(fit *f, double **wanted, mz_err *err) {
    mz_arena arena = {0};
    mz_stats_sequence *sequence;
    mz_stats_token *token;
    int64_t values = (int64_t)f->facts->layers * MZ_STATS_METRICS;
    uint16_t *once = MZ_NEW(&f->arena, uint16_t, f->facts->top_k);
    *wanted = MZ_NEW(&f->arena, double, values);
    if (!*wanted || !once)
        return mz_fail_nomem(err, "the statistics of a sample");
    for (int64_t i = 0; i < values; i++)
        (*wanted)[i] = NAN;
    mz_code code =
        mz_stats_sequence_make(&arena, f->facts->layers, f->facts->experts, &sequence, err);
    if (!code)
        code = mz_stats_token_make(&arena, f->facts->layers, f->facts->experts, false, &token, err);
    for (int32_t l = 0; l < f->facts->layers && !code; l++)
        code = measure_layer(f, sequence, token, l, once, *wanted + (int64_t)l * MZ_STATS_METRICS,
                             err);
    mz_arena_free(&arena);
    return code;
}

/* Draws sequences of one layer and moves its parameters towards the trace's statistics. */
static mz_code tune_layer(fit *f, tune *u, mz_model_draw *draw, int32_t layer, const double *wanted,
                          mz_err *err) {
    const mz_synth_model *m = f->model;
    int64_t tokens;
    int far = MZ_REUSE + 4;
    draw_layer(f, u, draw, layer);
    for (int i = 0; i < MZ_STATS_METRICS; i++)
        u->metric[i] = NAN;
    const int64_t *chose = mz_stats_token_chose(u->token, layer, &tokens);
    mz_stats_sequence_finish(u->sequence, layer, chose, tokens, u->metric);
    mz_code code = mz_stats_token_finish(u->token, layer, u->metric, err);
    tune_popularity(f, u, layer, (double)tokens);
    while (far > MZ_REUSE + 2 && !isfinite(wanted[far]))
        far--;
    double gap1 = wanted[MZ_REUSE] - u->metric[MZ_REUSE];
    double gap4 = wanted[MZ_REUSE + 2] - u->metric[MZ_REUSE + 2];
    double gap = wanted[far] - u->metric[far];
    move(u, &m->taste[layer], 10 * gap, 0, 8);
    move(u, &m->local[layer], 5 * (gap4 - gap), 0, 3);
    move(u, &m->keep[layer], gap1 - gap4, 0, 0.9);
    move(u, &m->wander[layer], u->metric[MZ_HALF_SAME] - wanted[MZ_HALF_SAME], 0, 1);
    move(u, &m->link_power[layer], 0.8 * (wanted[MZ_MI_BITS] - u->metric[MZ_MI_BITS]), 0, 3);
    move(u, &m->team_power[layer], 3 * (wanted[MZ_TEAM_PARTNER] - u->metric[MZ_TEAM_PARTNER]), 0,
         3);
    move(u, &m->bend[layer], 0.5 * (1 - slope(u, m->facts.experts)), 0, 4);
    mz_note(&f->app->log,
            "layer %d: reuse %+.3f %+.3f %+.3f halves %+.2f bits %+.2f partner %+.2f; taste %.2f "
            "wander %.2f local %.2f keep %.2f link %.2f team %.2f bend %.2f",
            layer, gap1, gap4, gap, wanted[MZ_HALF_SAME] - u->metric[MZ_HALF_SAME],
            wanted[MZ_MI_BITS] - u->metric[MZ_MI_BITS],
            wanted[MZ_TEAM_PARTNER] - u->metric[MZ_TEAM_PARTNER], m->taste[layer], m->wander[layer],
            m->local[layer], m->keep[layer], m->link_power[layer], m->team_power[layer],
            m->bend[layer]);
    return code;
}

static mz_code tune_model(fit *f, uint64_t seed, const double *wanted, mz_err *err) {
    tune u = {0};
    int64_t longest = 0, tokens = 0, k = f->facts->top_k;
    mz_model_draw *lengths = NULL;
    mz_code code = mz_model_draw_open(f->model, seed, (mz_model_shuffle){0}, &lengths, err);
    if (code)
        return code;
    for (int32_t i = 0; i < f->profiles; i++)
        longest = f->model->length[i] > longest ? f->model->length[i] : longest;
    int64_t most = TUNE_ODDS / ((int64_t)f->facts->layers * f->facts->experts);
    most = most < TUNE_LEAST ? TUNE_LEAST : most < TUNE_TOKENS ? most : TUNE_TOKENS;
    for (; tokens < most; u.sequences++) {
        tune_at(f, lengths, u.sequences);
        tokens += f->model->length[mz_model_profile(lengths, u.sequences)];
    }
    for (int round = 1; round < TUNE_ROUNDS; round++) {
        int64_t sum = 0;
        for (int64_t i = round * u.sequences; i < (round + 1) * u.sequences; i++) {
            tune_at(f, lengths, i);
            sum += f->model->length[mz_model_profile(lengths, i)];
        }
        tokens = sum > tokens ? sum : tokens;
    }
    mz_model_draw_close(&lengths);
    u.count = MZ_NEW(&f->arena, double, 2 * (int64_t)f->facts->experts);
    u.drawn = MZ_NEW(&f->arena, double, 2 * (int64_t)f->facts->layers * f->facts->experts);
    u.drawn_tokens = MZ_NEW(&f->arena, double, f->facts->layers);
    u.moved = MZ_NEW(&f->arena, double, MOVED *(int64_t)f->facts->experts);
    u.own = MZ_NEW(&f->arena, int64_t, f->facts->experts);
    u.expert = MZ_NEW(&f->arena, uint16_t, longest * (k + 1));
    u.first = MZ_NEW(&f->arena, uint16_t, tokens);
    u.metric = MZ_NEW(&f->arena, double, MZ_STATS_METRICS);
    if (!u.count || !u.drawn || !u.drawn_tokens || !u.moved || !u.own || !u.expert || !u.first ||
        !u.metric)
        return mz_fail_nomem(err, "the statistics of a model");
    mz_progress progress = mz_progress_start(&f->app->log, "tuning", "rounds", TUNE_ROUNDS);
    for (int round = 0; round < TUNE_ROUNDS && !code; round++) {
        mz_arena arena = {0};
        mz_model_draw *draw = NULL;
        u.from = round * u.sequences;
        u.gain = round < FULL_ROUNDS ? 1 : (double)FULL_ROUNDS / (round + 1);
        code =
            mz_stats_sequence_make(&arena, f->facts->layers, f->facts->experts, &u.sequence, err);
        if (!code)
            code = mz_stats_token_make(&arena, f->facts->layers, f->facts->experts, false, &u.token,
                                       err);
        if (!code)
            code = mz_model_draw_open(f->model, seed, (mz_model_shuffle){0}, &draw, err);
        for (int32_t l = 0; l < f->facts->layers && !code && !stopped(f); l++)
            code = tune_layer(f, &u, draw, l, wanted + (int64_t)l * MZ_STATS_METRICS, err);
        mz_model_draw_close(&draw);
        mz_arena_free(&arena);
        mz_progress_update(&progress, round + 1);
        if (!code && stopped(f))
            code = mz_fail(err, MZ_EABORTED, "interrupted");
    }
    mz_progress_end(&progress);
    for (int32_t l = 0; l < f->facts->layers && !code; l++)
        correct_popularity(f, &u, l);
    return code;
}

/* ---- steps and ranks ------------------------------------------------------------------------- */

/* How many steps, micro-batches and tokens there are, and how the ranks share the tokens. Numbers
 * of steps mean nothing where none were recorded. */
static mz_code measure_steps(fit *f, mz_err *err) {
    const mz_trace_call *call;
    mz_synth_model *m = f->model;
    int64_t count = mz_trace_calls(f->trace, &call), batches = 0, steps = 0;
    int32_t ranks = f->facts->ranks;
    m->rank_share = mz_calloc((size_t)ranks, sizeof *m->rank_share);
    if (!m->rank_share)
        return mz_fail_nomem(err, "the ranks of a trace");
    for (int64_t i = 0; i < count; i++) {
        bool step = i == 0 || call[i].step != call[i - 1].step;
        steps += step;
        batches += step || call[i].micro_batch != call[i - 1].micro_batch;
        if (call[i].layer > 0)
            continue;
        m->tokens += call[i].tokens;
        m->rank_share[call[i].rank] += (double)call[i].tokens;
    }
    for (int32_t r = 0; r < ranks; r++)
        m->rank_share[r] *= m->tokens > 0 ? ranks / (double)m->tokens : 0;
    bool recorded = f->facts->step_meaning != MZ_STEP_NONE;
    m->steps = recorded ? steps : 1;
    m->first_step = recorded ? call[0].step : 0;
    m->micro_batches = (batches + m->steps / 2) / m->steps;
    return MZ_OK;
}

/* Finds the step of every profile, and opens the course unless the token axis does not run with the
 * steps. */
static mz_code open_course(fit *f, mz_err *err) {
    const mz_trace_call *call;
    const mz_trace_sequence *all;
    int64_t count = mz_trace_calls(f->trace, &call), step = -1;
    f->step = MZ_NEW(&f->arena, int64_t, f->profiles);
    mz_trace_sequences(f->trace, &all);
    if (!f->step)
        return mz_fail_nomem(err, "the steps of a sample");
    for (int64_t c = 0; c < count; c++) {
        int64_t end = call[c].token_begin + call[c].tokens;
        step += c == 0 || call[c].step != call[c - 1].step;
        for (int64_t i = first_profile(f, call[c].token_begin);
             i < f->profiles && all[f->sequence[i]].token_begin < end; i++)
            f->step[i] = step;
    }
    for (int64_t i = 1; i < f->profiles; i++)
        if (f->step[i] < f->step[i - 1])
            return MZ_OK;
    return mz_course_open(f->app, f->model, &f->course, err);
}

static mz_code run_fit(fit *f, uint64_t seed, mz_err *err) {
    double *wanted;
    mz_code code = choose_sample(f, err);
    f->classes = f->tokens / CLASS_TOKENS < CLASSES ? (int32_t)(f->tokens / CLASS_TOKENS) : CLASSES;
    f->classes = f->classes < 1 ? 1 : f->classes;
    if (!code)
        code = mz_synth_model_make(f->facts, f->classes, f->profiles, f->model, err);
    if (!code)
        code = measure_steps(f, err);
    if (!code)
        code = open_course(f, err);
    if (!code)
        code = read_sample(f, err);
    if (!code)
        code = learn_classes(f, seed, err);
    if (!code)
        code = learn_links(f, err);
    if (!code) {
        make_profiles(f);
        if (f->course)
            mz_course_finish(f->course, f->step);
        code = measure_sample(f, &wanted, err);
    }
    return code ? code : tune_model(f, seed, wanted, err);
}

mz_code mz_synth_fit(mz_app *app, mz_trace *trace, uint64_t seed, mz_synth_model *model,
                     mz_err *err) {
    const mz_trace_sequence *sequences;
    fit f = {.app = app, .trace = trace, .facts = mz_trace_facts_of(trace), .model = model};
    *model = (mz_synth_model){0};
    if (f.facts->top_k == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: tokens with a variable number of experts cannot be fitted; --kind "
                       "counts fits the loads of steps alone",
                       mz_trace_path(trace));
    if (mz_trace_sequences(trace, &sequences) == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: pairs without sequences cannot be fitted; --kind counts fits the loads "
                       "of steps alone",
                       mz_trace_path(trace));
    mz_code code = run_fit(&f, seed, err);
    mz_course_close(&f.course);
    mz_arena_free(&f.arena);
    if (code)
        mz_synth_model_free(model);
    return code;
}
