/* Are the results of a replay right? In every step one MoE layer, chosen by seed, is looked at in
 * all its micro-batches: for a few tokens of every rank y, dx and the gate weights' gradients, and
 * for a few experts some values of the weight gradients, are computed again from the trace and the
 * seed by plain loops in double precision - rows, weights and sums made anew, nothing of the
 * engine's buffers used but its results. Intermediate values are rounded where the engine stores
 * them.
 *
 * Of one expert of the layer, chosen as the step begins, all weights and the optimizer's state
 * after the step are held against what the rule makes of those before it and of its gradient
 * (verify_update.h says of which optimizers). All copies of the experts that are looked at - one of
 * them, where several ranks had rows of some, is one of these - must have their owner's weights to
 * the bit, and every process the others' parts of the gradient's norm.
 *
 * Not looked at: the other layers and experts of the step; what Muon, SkewAdam and Adafactor make
 * of a matrix as a whole; the value of the gradient's norm, which nothing depends on.
 *
 * Where a quota binds, every source must keep as many pairs of every expert as the plan says. On
 * every rank one expert is drawn from those whose pairs it keeps in part (and of whose pairs none
 * was dropped in forward), and scores are computed again: up to 1,024 of the kept pairs or of those
 * left out, whichever are fewer, and 96 of the others. None left out may have a higher score than
 * one that is kept; of equal gate weights, where they are the score, the first stays. Random scores
 * are not compared. Of a sample the weight by which the lowest kept one's gradient was multiplied
 * is computed again, too.
 *
 * A value may differ from the reference by `tolerance` times (its size + the root mean square of
 * what was summed): 2^-5 for bf16, 2^-14 for fp32; the score of a pair left out may be higher by
 * `tolerance` times the kept one's. The first that differs by more ends the run (MZ_ECHECK) and is
 * named with its place, both values and the error over what is allowed.
 *
 * A rank's rows and pairs are compared by its process, an expert's gradient by its owner's: what is
 * compared by all processes together does not depend on how many there are.
 *
 * Cost: every process holds, for each policy, the layer's weights as floats (4 E 3HI bytes); 4 B of
 * each of one expert's 3HI values and, where the optimizer's step is looked at, 24 B more and 4 for
 * every part of its state that is (AdamW with master weights: 36); and 4 B of every pair of
 * the layer. A step reads E experts. On one thread it computes 3HI products of each pair of a token
 * that is looked at in forward and 5HI in backward, 2HI for a score that takes activations, and
 * for a value of a gradient 2H to 3H of every row of its expert, on whatever rank. OLMoE with H 512
 * and I 256, 2,048 tokens, 8 ranks of one process, static and AdamW on two cores: 0.12 GiB, and
 * 0.1 to 0.3 s beside a step of 4 layers that takes 1.4 s.
 *
 * Two calls are collective (begin_step, end_step). Everything is outside the engine's clock but the
 * weights' way to all processes is real traffic; step times leave it out. */
#ifndef MIZAN_REPLAY_VERIFY_H
#define MIZAN_REPLAY_VERIFY_H

#include "replay/engine.h"
#include "replay/experts.h"

typedef struct mz_verify mz_verify;

typedef struct mz_verify_options {
    int32_t tokens;    /* of every rank and micro-batch; 3 */
    int32_t gradients; /* experts whose weight gradients are looked at, at least 1; 2 */
    int32_t values;    /* of each of their two matrices; 4 */
} mz_verify_options;
mz_verify_options mz_verify_defaults(void);

/* What was compared so far by this process, and how near it came. A selection is the pairs of one
 * rank, micro-batch and expert of which kept ones and ones left out were scored. */
typedef struct mz_verified {
    int64_t tokens, values, selections;
    double largest; /* error over what is allowed; <= 1 */
} mz_verified;

/* Does it compare anything of what the optimizer's step makes of an expert? Of SkewAdam without
 * momentum and of Adafactor it does not; that weights are the master weights is no news of them. */
bool mz_verify_sees_updates(const mz_optimizer *optimizer, mz_dtype type, int64_t hidden,
                            int64_t intermediate);

/* Sets the engine's watch. What is given outlives it. */
mz_code mz_verify_create(const mz_replay_job *job, mz_engine *engine, mz_transport *transport,
                         const mz_verify_options *options, mz_verify **verify, mz_err *err);
void mz_verify_free(mz_verify **verify);

/* After the engine's begin_step, before the first forward: reads the weights of the step's layer.
 */
mz_code mz_verify_begin_step(mz_verify *verify, int64_t ordinal, int32_t micro_batches,
                             mz_err *err);
/* After the engine's update, before its next begin_step. call: [micro_batches][layers]. */
mz_code mz_verify_end_step(mz_verify *verify, const mz_replay_call *call, mz_err *err);

mz_verified mz_verify_figures(const mz_verify *verify);
/* The one that is looked at in the step that was begun last. */
int32_t mz_verify_layer(const mz_verify *verify);

#endif
