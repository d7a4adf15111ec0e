/* Calls gathered in any order, then sorted, checked and written. Layers are known by the number
 * that the source gives them (a label) and renumbered from 0 without gaps. */
#ifndef MIZAN_TRACES_IMPORTERS_GATHER_H
#define MIZAN_TRACES_IMPORTERS_GATHER_H

#include "traces/importers/common.h"

typedef struct mz_gather_key {
    int64_t step, layer; /* layer: the source's number */
    int32_t micro_batch, rank;
} mz_gather_key;

/* Different numbers, ascending; linear in their number when one is new. */
typedef struct mz_labels {
    int64_t *value;
    size_t count, room;
} mz_labels;
mz_code mz_labels_add(mz_labels *labels, int64_t value, mz_err *err);
/* The place of a number, or -1. */
int64_t mz_labels_find(const mz_labels *labels, int64_t value);
void mz_labels_free(mz_labels *labels);

typedef struct mz_gather_entry mz_gather_entry;

/* Owns what it gathered. Memory: 2 top_k bytes per token and call, 4 more per weight; 8 bytes per
 * count, 2 per token of rows. The trace's facts must outlive it. */
typedef struct mz_gather {
    mz_trace_facts *facts; /* kind, top_k, experts, has_weight before the first call; ranks before
                              the first write */
    mz_gather_entry *entry;
    size_t entries, entry_room;
    uint16_t *expert;
    float *weight;
    int64_t *count;
    uint16_t *row; /* experts of each token, of calls that were gathered as rows */
    size_t expert_room, weight_room, count_room, row_room, pairs, counts, rows;
    mz_labels label; /* of each layer of the trace */
    int32_t layers;
    int64_t token;           /* next number on the token axis */
    const char *const *path; /* a file of each source rank, named by messages; may be NULL */
} mz_gather;

/* A call of `tokens` tokens; *expert (and *weight, where the trace has weights) is room for tokens
 * x top_k values that the caller fills at once (valid until the next call of these functions). */
mz_code mz_gather_pairs(mz_gather *gather, const mz_gather_key *key, int64_t tokens,
                        uint16_t **expert, float **weight, mz_err *err);
/* A call of tokens that may lack experts: *row is room for the number of each token, *expert for
 * `pairs` values. Tokens without an expert in every layer of their micro-batch are padding and left
 * out when it is written; facts->top_k > 0 demands that all others have so many. */
mz_code mz_gather_rows(mz_gather *gather, const mz_gather_key *key, int64_t tokens, int64_t pairs,
                       uint16_t **row, uint16_t **expert, float **weight, mz_err *err);
/* A call of counts; *count is room for E zeros that the caller fills at once. tokens < 0: they are
 * the call's pairs over top_k, rounded up, or those of its fullest expert if that is more, of the
 * layer that has most. */
mz_code mz_gather_counts(mz_gather *gather, const mz_gather_key *key, int64_t tokens,
                         int64_t **count, mz_err *err);
/* The `tokens` for mz_gather_counts out of the user's answers (--tokens, --dropped) and the call's
 * pairs. MZ_EINPUT, without a place: pairs are no multiple of top-k, or more than the tokens make.
 */
mz_code mz_gather_tokens(const mz_import_options *options, int32_t top_k, int64_t pairs,
                         int64_t *tokens, mz_err *err);
/* Settles the layers of the trace from what is gathered: gather->layers and label, facts->layers
 * and the note that names them. MZ_EINPUT when there are none or too many. */
mz_code mz_gather_settle(mz_gather *gather, mz_err *err);
/* The same from gather->label as it is: where calls are gathered step by step. */
mz_code mz_gather_settle_labels(mz_gather *gather, mz_err *err);
/* Writes what is gathered and forgets it. MZ_EINPUT: a call twice, a layer that was not settled, a
 * rank that lacks a layer or has another number of tokens in it, an expert counted more often than
 * its call has tokens. Tokens of one (step, micro-batch)
 * are numbered by rank. */
mz_code mz_gather_write(mz_gather *gather, mz_trace_writer *writer, mz_import_report *report,
                        mz_err *err);
/* A trace of all that is gathered, settled before. */
mz_code mz_gather_write_all(mz_gather *gather, const char *output,
                            const mz_trace_write_options *write, mz_import_report *report,
                            mz_err *err);
void mz_gather_free(mz_gather *gather);

#endif
