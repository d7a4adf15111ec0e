/* The Mizan trace: an HDF5 file of recorded routing. FORMAT.md is the specification; this header is
 * the C side of it: facts, reader, writer.
 *
 * Layout in short (FORMAT.md has every attribute):
 *   /                 attributes format "mizan-trace", format_version 1, producer, source, licence
 *   /model, /run      attributes: the facts of mz_trace_facts
 *   /calls/{step,micro_batch,layer,rank,token_begin,tokens,pairs}   one row per call, sorted and
 *                     unique by (step, micro_batch, layer, rank). First row and first pair of a
 * call are the running sums of `tokens` and `pairs`. /pairs/{expert,weight,hidden_norm2} kind
 * "pairs": per pair, calls one after another /rows/{pairs,grad_norm2,input_norm2}           per
 * (call, token); `pairs` only when top_k is 0 /counts           [calls][E], kind "counts": pairs of
 * this source rank to each expert /sequences/{token_begin,tokens,domain}         a sequence lies
 * within one (step, micro-batch, rank) /steps/{step,loss,learning_rate,wall_time}     optional
 * Integers and floats little-endian; chunks near 1 MiB; shuffle + deflate (or neither) and
 * Fletcher-32 on every dataset.
 *
 * What is not trusted is read by a child process: HDF5 runs there, hands over raw chunks through
 * shared memory, and this process checks (Fletcher-32), inflates and bounds-checks them itself. A
 * crash of the HDF5 library on a hostile file is an ordinary MZ_EINPUT here.
 * Threads: one reader belongs to one thread at a time. Open readers before starting threads (fork).
 */
#ifndef MIZAN_TRACES_TRACE_H
#define MIZAN_TRACES_TRACE_H

#include "common/base/err.h"
#include "common/base/load.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum mz_trace_kind { MZ_TRACE_PAIRS, MZ_TRACE_COUNTS } mz_trace_kind;
typedef enum mz_trace_phase { MZ_PHASE_TRAIN, MZ_PHASE_PREFILL, MZ_PHASE_DECODE } mz_trace_phase;

/* What one recorded step is; MZ_STEP_NONE: the trace has none (decode logs), the sim demands
 * --step-tokens and calls are blocks of whole sequences. */
typedef enum mz_step_meaning {
    MZ_STEP_ITERATION, /* optimizer step of training */
    MZ_STEP_FORWARD,   /* forward pass / scheduler step */
    MZ_STEP_NONE
} mz_step_meaning;

typedef struct mz_trace_facts {
    char name[128];   /* model name, "unknown" if the source does not say */
    char source[256]; /* provenance: where the routing came from */
    char licence[128];
    char producer[128];     /* program and version that wrote this file */
    char router[64];        /* "softmax", "sigmoid", "unknown", ... */
    char group_note[128];   /* "" or e.g. "experts are groups of experts (LAER-MoE CSV)" */
    char import_notes[256]; /* "" or what an importer was told or decided: "key=value; key=value" */
    mz_trace_kind kind;
    mz_trace_phase phase;
    mz_step_meaning step_meaning;
    int32_t layers;       /* MoE layers recorded */
    int32_t model_layers; /* all layers, 0 unknown */
    int32_t experts;
    int32_t top_k; /* 0: variable */
    int32_t ranks; /* source ranks recorded */
    int32_t shared_experts;
    int64_t hidden, intermediate; /* 0 unknown */
    int64_t sequence_length;      /* 0 unknown or ragged */
    int64_t step_stride;          /* iterations between recorded steps: 10 for SmartMoE, else 1 */
    bool weights_normalized;      /* weights of a token sum to 1 over its chosen experts */
    bool has_weight, has_grad_norm2, has_input_norm2, has_hidden_norm2, has_sequences;
} mz_trace_facts;

typedef struct mz_trace_call {
    int64_t step;
    int32_t micro_batch, layer, rank;
    int64_t token_begin, tokens; /* range on the global token axis, shared by all layers */
    int64_t row_begin;           /* derived: running sum of tokens over calls */
    int64_t pair_begin, pairs;   /* pair_begin derived */
} mz_trace_call;

typedef struct mz_trace_sequence {
    int64_t token_begin, tokens;
    int32_t domain; /* -1 unknown */
} mz_trace_sequence;

/* Facts of a step, where recorded; NaN: unknown. */
typedef struct mz_trace_step {
    int64_t step;
    double loss, learning_rate, wall_time; /* nat per token, -, s */
} mz_trace_step;

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct mz_trace mz_trace;

/* Opens and validates everything but the bulk data: format, version, attributes, shapes, types,
 * order of calls, sums against dataset lengths, sequences. MZ_EINPUT names file, dataset, index. */
mz_code mz_trace_open(const char *path, mz_trace **trace, mz_err *err);
void mz_trace_close(mz_trace **trace);

const mz_trace_facts *mz_trace_facts_of(const mz_trace *trace);
const char *mz_trace_path(const mz_trace *trace);
int64_t mz_trace_calls(const mz_trace *trace, const mz_trace_call **calls);
int64_t mz_trace_sequences(const mz_trace *trace, const mz_trace_sequence **sequences);
int64_t mz_trace_steps(const mz_trace *trace, const mz_trace_step **steps);
/* False when the writer never closed the file: it then holds what was flushed, without a last
 * micro-batch that lacks layers. */
bool mz_trace_complete(const mz_trace *trace);

/* Buffers for a range of tokens of one call; NULL members are not read. Sizes: pairs or tokens of
 * the range. Values are validated (expert < E, weight finite and >= 0, norms likewise); the first
 * bad one is MZ_EINPUT with dataset and index. */
typedef struct mz_trace_pairs_out {
    uint16_t *expert;
    float *weight, *hidden_norm2;    /* per pair */
    uint16_t *token_pairs;           /* per token */
    float *grad_norm2, *input_norm2; /* per token */
} mz_trace_pairs_out;

/* Number of pairs of tokens [first, first+tokens) of call `index` (call-relative). O(1) when top_k
 * is fixed; otherwise reads /rows/pairs. */
mz_code mz_trace_count_pairs(mz_trace *trace, int64_t index, int64_t first, int64_t tokens,
                             int64_t *pair_first, int64_t *pairs, mz_err *err);
mz_code mz_trace_read_pairs(mz_trace *trace, int64_t index, int64_t first, int64_t tokens,
                            const mz_trace_pairs_out *out, mz_err *err);
/* Adds the counts of whole call `index` to count[0..E-1]; works for both kinds. */
mz_code mz_trace_add_counts(mz_trace *trace, int64_t index, int64_t *count, mz_err *err);

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct mz_trace_writer mz_trace_writer;

typedef struct mz_trace_write_options {
    int deflate;       /* 0 (no compression) to 9; default 4 */
    bool half_weights; /* store weights as IEEE half instead of float */
} mz_trace_write_options;

/* Every dataset that `facts` announces is created at once (SWMR); the file appears under its name
 * at mz_trace_writer_close (written to PATH.partial-PID before), so nothing half-written is left.
 * options may be NULL. */
mz_code mz_trace_create(const char *path, const mz_trace_facts *facts,
                        const mz_trace_write_options *options, mz_trace_writer **writer,
                        mz_err *err);

/* One call's data. Calls must come in order (step, micro_batch, layer, rank). For kind pairs:
 * `pairs` entries in the arrays that facts announce; for kind counts: count[E]. token_begin is the
 * caller's numbering of tokens, equal for all layers of one (step, micro-batch, rank). */
typedef struct mz_trace_call_data {
    int64_t step;
    int32_t micro_batch, layer, rank;
    int64_t token_begin, tokens, pairs;
    const int64_t *count;
    const uint16_t *expert, *token_pairs;
    const float *weight, *hidden_norm2, *grad_norm2, *input_norm2;
} mz_trace_call_data;

mz_code mz_trace_write_call(mz_trace_writer *writer, const mz_trace_call_data *call, mz_err *err);
mz_code mz_trace_write_sequence(mz_trace_writer *writer, const mz_trace_sequence *sequence,
                                mz_err *err);
mz_code mz_trace_write_step(mz_trace_writer *writer, int64_t step, double loss,
                            double learning_rate, double wall_time, mz_err *err);
/* Makes every call so far readable, even if this process dies. Writes the unfinished chunk of every
 * dataset once more: meant for once per step or per some seconds, not per call. */
mz_code mz_trace_flush(mz_trace_writer *writer, mz_err *err);
mz_code mz_trace_writer_close(mz_trace_writer **writer, mz_err *err);
void mz_trace_writer_abandon(mz_trace_writer **writer);

#endif
