/* Synthetic traces: eight loads that each test one mechanism, and a realistic one.
 *
 * Everything is a pure function of (load, options, seed, step): step 7 is the same whether steps
 * 0-6 were made or not. Random numbers are Philox streams named by their coordinates. A call holds
 * its tokens in memory, nothing else grows with the trace.
 *
 * Only recorded traces support claims about training; these serve tests and explanations.
 * Threads: one mz_synth belongs to one thread at a time. */
#ifndef MIZAN_TRACES_SYNTH_H
#define MIZAN_TRACES_SYNTH_H

#include "common/base/app.h"
#include "traces/trace.h"

typedef struct mz_synth_options {
    const char *load; /* one of mz_synth_loads */
    const char *name; /* model name in the facts; NULL: "synthetic-LOAD" */
    int64_t layers, experts, top_k, ranks;
    int64_t tokens;   /* per rank and micro-batch, on average over ranks */
    int64_t sequence; /* tokens per sequence; the last one of a rank may be shorter */
    int64_t steps, micro_batches;
    int64_t hidden, intermediate; /* only noted in the facts; 0: unknown */
    uint64_t seed;
    mz_trace_kind kind;
} mz_synth_options;

typedef struct mz_synth mz_synth;

/* One load. Those without `popularity` deal experts out in turn, exactly evenly. */
typedef struct mz_synth_load {
    const char *name, *summary;
    /* Tokens of a rank; NULL: the same for all. */
    int64_t (*tokens)(const mz_synth *synth, int32_t rank);
    /* Relative popularity of every expert of a layer in a step, at least top-k of them above 0. */
    void (*popularity)(const mz_synth *synth, int64_t step, int32_t layer, double *weight);
    bool realistic; /* sequences, topics, drift: synth_realistic.c */
} mz_synth_load;

extern const mz_synth_load *const mz_synth_loads[]; /* NULL-terminated; synth_loads.c */

/* Checks the options (MZ_EINPUT names the wrong one); strings in them must outlive the generator.
 */
mz_code mz_synth_open(const mz_synth_options *options, mz_synth **synth, mz_err *err);
void mz_synth_close(mz_synth **synth);

/* Tokens of a rank in every micro-batch. */
int64_t mz_synth_tokens(const mz_synth *synth, int32_t rank);

/* Experts and gate weights of one call, [tokens][top_k], highest weight first within a token; the
 * weights of a token sum to 1. */
void mz_synth_call(mz_synth *synth, int64_t step, int32_t micro_batch, int32_t layer, int32_t rank,
                   uint16_t *expert, float *weight);

/* Domain of sequence `index` of a rank, -1 for the loads without domains. */
int32_t mz_synth_domain(const mz_synth *synth, int64_t step, int32_t micro_batch, int32_t rank,
                        int64_t index);

/* Names the model of the facts PREFIXNAME; MZ_EINPUT when that is too long. */
mz_code mz_synth_name(mz_trace_facts *facts, const char *name, const char *prefix, mz_err *err);

/* Writes a whole trace. MZ_EABORTED when the user interrupts; then nothing is left behind. */
mz_code mz_synth_write(mz_app *app, const mz_synth_options *options, const char *path,
                       const mz_trace_write_options *write, mz_err *err);

#endif
