/* Counts over training: the course of the experts' shares, fitted to a recorded history or made
 * from parameters, and traces of kind counts drawn from it.
 *
 * Steps fall into spans (single steps at first, longer ones later). A span has, per layer and
 * expert, the mean share and the size of its changes from one recorded step to the next. Shares of
 * a step are interpolated between the middles of spans, plus white noise that explains what changes
 * the sampling of sources does not. A rank draws its shares around the step's (Dirichlet), a
 * micro-batch around its rank's (Dirichlet), its counts from those (multinomial); where
 * ranks drawn apart would move the step's shares more than these were seen to move, they are scaled
 * so that together they have the step's. The two concentrations give the recorded
 * scatter between micro-batches and between ranks. After the last span its shares stay. Threads:
 * like an ordinary object. */
#ifndef MIZAN_TRACES_SYNTH_HISTORY_H
#define MIZAN_TRACES_SYNTH_HISTORY_H

#include "traces/synth_model.h"

typedef struct mz_synth_history {
    mz_trace_facts facts;
    int32_t spans;
    int64_t *first;         /* [spans + 1] first step of each, by ordinal */
    double *share, *change; /* [spans][layers][E] mean share; mean size of changes, 0: unknown */
    double *micro_batch, *rank; /* [spans][layers] correlation within a micro-batch and a rank that
                                   the scatter implies: 0 for independent draws */
    int64_t first_step, pairs, tokens; /* number of the first step; of a call */
    int64_t micro_batches;             /* of a step */
} mz_synth_history;

mz_code mz_history_make(const mz_trace_facts *facts, int64_t steps, mz_synth_history *history,
                        mz_err *err);
void mz_history_free(mz_synth_history *history);

/* Cuts shares to at most 1 / top_k, which is all that one expert can get, and gives the rest to the
 * others in proportion; as they are when top_k is 0 or E. */
void mz_history_cap(double *share, int64_t experts, int64_t top_k);

/* MZ_EINPUT: the trace has no steps. */
mz_code mz_history_fit(mz_app *app, mz_trace *trace, mz_synth_history *history, mz_err *err);

/* options->shuffle is not used. */
mz_code mz_history_write(mz_app *app, const mz_synth_history *history,
                         const mz_model_options *options, const char *path,
                         const mz_trace_write_options *write, mz_err *err);

#endif
