/* A model of the routing of single tokens, fitted to a recorded trace or made from parameters, and
 * traces generated from it.
 *
 * Tokens belong to classes. A class has, in every layer, odds for the token's first expert and odds
 * for the others. On top, per layer,
 * - link: the first expert's odds times (P(b | a) / P(b))^link_l, a the first expert that the layer
 *   before gave to the token, which makes layers depend on each other;
 * - team: the others' odds times (P(b | first) / P(b))^team_l, which makes experts come in teams;
 * - taste: all odds times exp(taste_l (sqrt(1 - wander_l) x + sqrt(wander_l) y) + local_l z), x, y,
 * z normal per expert: x per sequence, y drawn anew after 256 tokens on average, z after 6;
 * - keep: with probability keep_l the experts of the token before.
 * - tilt: all odds times exp(bend_l tilt_s,e), tilt of the step s, where popularity moves.
 * A sequence has its own mix of classes, one of `profiles` recorded ones, of steps near its own.
 * Along it the class of the token before goes on with probability `stay`, that of one of the last
 * 24 tokens comes back with probability `recall`. Gate weights are drawn from recorded vectors of
 * the layer.
 *
 * Only recorded traces support claims about training. Threads: one model belongs to one thread. */
#ifndef MIZAN_TRACES_SYNTH_MODEL_H
#define MIZAN_TRACES_SYNTH_MODEL_H

#include "common/base/app.h"
#include "traces/trace.h"

#include <stdbool.h>

enum { MZ_MODEL_GATES = 1024 };

typedef struct mz_synth_model {
    mz_trace_facts facts; /* that a trace made from it has */
    int32_t classes, profiles;
    float *odds;        /* [classes][layers][2][E]: first expert, others */
    float *profile;     /* [profiles][classes] running sums of the mix, last one 1 */
    int64_t *length;    /* [profiles] tokens of the sequence */
    float *gate;        /* [layers][MZ_MODEL_GATES][top_k], largest first */
    float *link, *team; /* [layers][E][E] logarithms of P(b | a) / P(b); NULL: E too large */
    double *link_power, *team_power, *taste, *wander, *local, *keep, *bend; /* [layers] */
    double stay, recall;
    int32_t *domain; /* [profiles] -1 unknown */
    /* The course over the steps; points 0: every step is alike, tilt and window NULL. Step s,
     * counted from 0, has point s * points / steps, later ones the last. */
    int32_t points;
    float *path;     /* [points][layers][E] share of pairs */
    float *tilt;     /* [points][layers][E] logarithm of a factor on odds, for a bend of 1 */
    int32_t *window; /* [points][2] first and one past the last of the profiles of its sequences */
    /* Of the trace that it was fitted to. */
    int64_t tokens, steps, first_step,
        micro_batches;  /* in all; steps; the first's number; a step's */
    double *rank_share; /* [facts.ranks] tokens of a rank over the mean; NULL: all the same */
} mz_synth_model;

/* What is taken apart so that correlations vanish and popularity stays. */
typedef struct mz_model_shuffle {
    bool sequences; /* every token belongs to a sequence of its own */
    bool layers;    /* every layer has classes and sequences of its own */
} mz_model_shuffle;

typedef struct mz_model_options {
    int64_t ranks, steps, micro_batches; /* 0: as recorded */
    int64_t tokens;                      /* per rank and micro-batch, at least; 0: as recorded */
    uint64_t seed;
    mz_model_shuffle shuffle;
} mz_model_options;

/* Room for a model of these sizes, all zero. */
mz_code mz_synth_model_make(const mz_trace_facts *facts, int32_t classes, int32_t profiles,
                            mz_synth_model *model, mz_err *err);
void mz_synth_model_free(mz_synth_model *model);

/* Fits a model to a trace of kind pairs with fixed top-k and sequences. */
mz_code mz_synth_fit(mz_app *app, mz_trace *trace, uint64_t seed, mz_synth_model *model,
                     mz_err *err);

/* The course over the steps: opened before the one pass over a trace, told every call's load during
 * it, finished once classes and profiles are learnt. */
typedef struct mz_course mz_course;

/* The model's steps are known. *course NULL: no steps enough to tell a course from noise. */
mz_code mz_course_open(const mz_app *app, mz_synth_model *model, mz_course **course, mz_err *err);
/* load: [E] pairs of one call of a step, counted from 0. */
void mz_course_add(mz_course *course, int64_t step, int32_t layer, const int64_t *load);
/* step: [profiles] steps of the profiles, counted from 0, not falling. */
void mz_course_finish(mz_course *course, const int64_t *step);
void mz_course_close(mz_course **course);

mz_code mz_synth_model_write(mz_app *app, const mz_synth_model *model,
                             const mz_model_options *options, const char *path,
                             const mz_trace_write_options *write, mz_err *err);

/* ---- one sequence, for the fit and the writer ------------------------------------------------ */

typedef struct mz_model_draw mz_model_draw;

mz_code mz_model_draw_open(const mz_synth_model *model, uint64_t seed, mz_model_shuffle shuffle,
                           mz_model_draw **draw, mz_err *err);
void mz_model_draw_close(mz_model_draw **draw);
/* Sequences drawn from now on are of that step, counted from 0; before the first call, of none. */
void mz_model_draw_at(mz_model_draw *draw, int64_t step);
/* Which profile sequence number `index` has; its length is model->length[it]. */
int32_t mz_model_profile(const mz_model_draw *draw, int64_t index);
/* Experts of one layer of the first `tokens` tokens of sequence `index`: [tokens][top_k]. first:
 * [tokens] first experts in the layer before (not read for layer 0), replaced by this layer's. */
void mz_model_sequence(mz_model_draw *draw, int64_t index, int32_t layer, int64_t tokens,
                       uint16_t *expert, uint16_t *first);
/* Gate weights of those tokens. */
void mz_model_weights(const mz_model_draw *draw, int64_t index, int32_t layer, int64_t tokens,
                      float *weight);

#endif
