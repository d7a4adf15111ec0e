/* From a trace to loads: choice of steps, re-shaping to R ranks, reading ahead.
 *
 * Re-shaping (DESIGN section 3):
 * - Pair traces deal the whole sequences of a micro-batch, longest first, to the least loaded rank
 *   (ties: lower sequence, lower rank). Tokens outside every sequence, and traces without a table
 * of sequences, are dealt in runs of sequence_length tokens (option, else the trace's, else 512).
 * - Count traces merge exactly when R divides the recorded ranks; otherwise a rank takes its share
 * of the tokens, laid out rank after rank, and the pairs of a source that several ranks share are
 * split by a seeded multivariate hypergeometric draw.
 * - step_tokens on a trace with steps: sequences of each micro-batch in order until its share is
 *   reached, then more of them drawn with replacement; counts scale by a whole factor or not at
 * all.
 * - tokens_per_rank: sequences drawn with replacement, each to the least loaded rank, until every
 * rank holds its share (1/micro-batches) of that many tokens; counts scale by the smallest whole
 * factor.
 * - Traces with MZ_STEP_NONE need step_tokens: a step is one micro-batch of the next whole
 * sequences (counts: recorded micro-batches) in file order until step_tokens tokens are reached;
 * what remains at the end and is less is left out, unless it is all there is. A draw depends on the
 * seed, the step, the micro-batch, the layer and the source, never on the order of reading. Loads
 * as recorded are not `reshaped`. */
#ifndef MIZAN_TRACES_STREAM_H
#define MIZAN_TRACES_STREAM_H

#include "traces/trace.h"

#include <signal.h>

typedef struct mz_stream_options {
    int32_t ranks;             /* R; 0: as recorded */
    int32_t layers;            /* the first so many MoE layers; 0: all */
    int64_t step_tokens;       /* tokens of the whole job per step; 0: as recorded */
    int64_t tokens_per_rank;   /* resample whole sequences to at least this many; 0: as recorded */
    int64_t sequence_length;   /* cut sequences to this many tokens; 0: as recorded */
    int64_t first_step, steps; /* window over the steps, by ordinal; steps 0: all */
    uint64_t seed;
    bool want_pairs;                   /* fill mz_layer_call.pairs */
    bool want_weights;                 /* ... with weights and norms where recorded */
    bool read_ahead;                   /* a second thread decodes the next layer call */
    const volatile sig_atomic_t *stop; /* or NULL: once it is set, a step or layer call that is
                                          under way ends with MZ_EABORTED */
} mz_stream_options;

typedef struct mz_stream mz_stream;

/* The trace must outlive the stream and, with read_ahead, is not to be used by others meanwhile.
 * MZ_EINPUT: no tokens at all, a window outside the trace, a micro-batch of a rank that lacks a
 * layer, a missing step_tokens, counts that would need a fraction. */
mz_code mz_stream_open(mz_trace *trace, const mz_stream_options *options, mz_stream **stream,
                       mz_err *err);
mz_load_source mz_stream_source(mz_stream *stream); /* valid while the stream lives */
bool mz_stream_reshaped(const mz_stream *stream);
int64_t mz_stream_steps(const mz_stream *stream); /* steps it will give */
void mz_stream_close(mz_stream **stream);

#endif
