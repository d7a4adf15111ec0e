/* One expert's optimizer step against the formula, value by value, in double precision: weights and
 * state after the step must be what the rule makes of those before it and of the reduced gradient.
 * Constants and formulas are written anew here (moe-variants-and-optimizers.md section 6.3); which
 * state there is, is taken from update.h. Private to verify.c.
 *
 * Of AdamW and Lion all is looked at: moments, master weights, weights. Of SkewAdam with momentum
 * and of Muon it is the momentum alone, and where there are master weights that the weights are
 * these, rounded; of the rest nothing: what a value moves by depends on its whole matrix there.
 *
 * fp32 values may differ by rounding: 2^-20 of what is summed, weights by 2^-22 of themselves and
 * 2^-12 of what they move by. bf16 weights that are converted from master weights are these to the
 * bit. bf16 weights without master weights are written with random bits and may lie one rounding
 * step beside the result; that they are right on the average, which a wrong rate is not, is looked
 * at over all values of the expert together: their sum of errors, each weighed by where its update
 * points to, may be six standard deviations of what the random bits make of it. */
#ifndef MIZAN_REPLAY_VERIFY_UPDATE_H
#define MIZAN_REPLAY_VERIFY_UPDATE_H

#include "common/base/arena.h"
#include "replay/experts.h"

enum { VERIFY_MASTER, VERIFY_M, VERIFY_V, VERIFY_STATES };

/* All arrays: [2I*H + H*I], up then down; those of what the optimizer has not are NULL. */
typedef struct verify_update {
    const mz_replay_job *job;
    int64_t values;
    float *weight;               /* before the step */
    float *state[VERIFY_STATES]; /* before the step */
    float *after;                /* what is compared now */
    double *wanted, *allowed;    /* of it */
} verify_update;

/* A value that is wrong: what it is of, its place in the expert, the error over what is allowed. */
typedef struct verify_difference {
    const char *what; /* NULL: none */
    int64_t place;    /* -1: of the whole expert */
    double value, wanted, error;
} verify_difference;

/* Memory comes from the arena; the job outlives it. */
mz_code verify_update_create(const mz_replay_job *job, mz_arena *arena, verify_update *update,
                             mz_err *err);
/* Has the optimizer anything that is looked at? */
bool verify_update_looks(const verify_update *update);
/* Collective: the expert's state before the step, and its weights, which the caller has. */
mz_code verify_update_begin(verify_update *update, mz_experts *experts, int32_t layer,
                            int32_t expert, const float *weight, mz_err *err);
/* Collective: reads what there is now and, with `own`, compares it. gradient: as reduced; step: t,
 * from 1. The first difference beyond what is allowed is left in *found (and nothing more is
 * compared), else the largest error. *compared: values. */
mz_code verify_update_end(verify_update *update, mz_experts *experts, int32_t layer, int32_t expert,
                          const float *gradient, int64_t step, bool own, verify_difference *found,
                          int64_t *compared, mz_err *err);

#endif
