/* From a trace to loads: choice of steps, re-shaping to R ranks, reading ahead.
 *
 * Re-shaping (DESIGN section 3): pair traces deal whole sequences of a micro-batch, longest first,
 * to the least loaded rank (ties: lower sequence, lower rank; without a sequence table each recorded
 * (rank, call) range is cut into runs of `cut_tokens`); count traces merge exactly when R divides S,
 * and split by a seeded multivariate hypergeometric draw otherwise. `tokens_per_rank` > 0 resamples
 * whole sequences (with replacement, seeded) until every rank holds at least that many tokens;
 * count traces scale by whole multiples only. Traces with MZ_STEP_NONE need step_tokens > 0: a step
 * is the next whole sequences in file order until step_tokens tokens are reached. */
#ifndef MIZAN_TRACES_STREAM_H
#define MIZAN_TRACES_STREAM_H

#include "traces/trace.h"

typedef struct mz_stream_options {
    int32_t ranks;            /* R; 0: as recorded */
    int64_t step_tokens;      /* tokens of the whole job per step; 0: as recorded */
    int64_t tokens_per_rank;  /* resample whole sequences to at least this many; 0: as recorded */
    int64_t sequence_length;  /* cut sequences to this many tokens; 0: as recorded */
    int64_t first_step, steps; /* window over recorded steps, by ordinal; steps 0: all */
    uint64_t seed;
    bool want_pairs;          /* fill mz_layer_call.pairs */
    bool want_weights;        /* ... with weights and norms where recorded */
    bool read_ahead;          /* a second thread decodes the next layer call */
} mz_stream_options;

typedef struct mz_stream mz_stream;

mz_code mz_stream_open(mz_trace *trace, const mz_stream_options *options, mz_stream **stream,
                       mz_err *err);
mz_load_source mz_stream_source(mz_stream *stream); /* valid while the stream lives */
bool mz_stream_reshaped(const mz_stream *stream);
int64_t mz_stream_steps(const mz_stream *stream);   /* steps it will give */
void mz_stream_close(mz_stream **stream);

#endif
