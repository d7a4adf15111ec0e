/* What importers share: facts from the user's answers, names of files, and the block that turns
 * sequences of a log without steps into calls. */
#ifndef MIZAN_TRACES_IMPORTERS_COMMON_H
#define MIZAN_TRACES_IMPORTERS_COMMON_H

#include "traces/importer.h"
#include "traces/jsonl.h"
#include "traces/schema.h"

/* Tokens that one block of whole sequences holds at most (a longer sequence is a block by itself).
 */
enum { MZ_BLOCK_TOKENS = 8192, MZ_MAX_TOP_K = 4096 };

/* Facts every importer starts from: the answers in `options` over the importer's own defaults.
 * `meaning` is used where the user did not say. Answers that no importer notes by itself are noted
 * here. MZ_EINPUT: an answer is not known, or there is no phase. */
typedef struct mz_import_defaults {
    const char *name, *source, *licence, *router;
    mz_trace_kind kind;
    mz_step_meaning meaning;
} mz_import_defaults;

mz_code mz_import_facts(const mz_app *app, const mz_import_options *options,
                        const mz_import_defaults *defaults, mz_trace_facts *facts, mz_err *err);

/* MZ_EINPUT that asks for a missing answer: "PATH: WHAT is not in the file: pass --OPTION N". */
mz_code mz_import_ask(mz_err *err, const char *path, const char *what, const char *option);

/* --top-k, which the file does not hold. MZ_EINPUT: not given, or more than `experts` (0 or less:
 * not known yet). */
mz_code mz_import_top_k(const char *path, const mz_import_options *options, int64_t experts,
                        int32_t *top_k, mz_err *err);

/* The experts of a file that does not hold top-k, and --top-k, into the facts. MZ_EINPUT: --experts
 * says otherwise, and as mz_import_top_k. */
mz_code mz_import_experts(const char *path, const mz_import_options *options, int64_t experts,
                          mz_trace_facts *facts, mz_err *err);

/* MZ_EINPUT: --normalized was said of weights, and the facts have none. */
mz_code mz_import_normalized(const char *path, const mz_import_options *options,
                             const mz_trace_facts *facts, mz_err *err);

/* MZ_EABORTED once the user has interrupted. */
mz_code mz_import_stopped(const mz_app *app, mz_err *err);

/* Closes the trace. MZ_EINPUT: no token came into it, and a trace without any is none. */
mz_code mz_import_close(const char *path, const mz_import_report *report, mz_trace_writer **writer,
                        mz_err *err);

/* Hands every line of a JSON-lines file to `take`, until one fails or the user interrupts. */
mz_code mz_import_lines(const mz_app *app, const char *path,
                        mz_code (*take)(void *self, const mz_jsonl *line, mz_err *err), void *self,
                        mz_err *err);

/* MZ_EINPUT, without a place: the facts say that the weights of a token sum to 1, and these do not.
 * Weights that are all 0, as those of a token that was not weighed, are not held against that. */
mz_code mz_weights_fit(const char *what, const float *weight, const mz_trace_facts *facts,
                       mz_err *err);
/* The same with the place of the line before the message. */
mz_code mz_jsonl_fit(const mz_jsonl *lines, const char *what, const float *weight,
                     const mz_trace_facts *facts, mz_err *err);

const char *mz_base_name(const char *path);

/* Appends "key=value" to the notes that the trace carries; "..." stands for what does not fit. */
void mz_import_note(mz_trace_facts *facts, const char *fmt, ...) MZ_PRINTF(2, 3);

/* Whether `text` stands in the first bytes of a file. */
bool mz_head_has(const unsigned char *head, size_t size, const char *text);
/* The first byte that is no white space, 0 if there is none. */
int mz_head_first(const unsigned char *head, size_t size);

/* Domains of sequences are numbered in order of first appearance; linear search, at most
 * MZ_MAX_DOMAINS different names (then -1, unknown). */
enum { MZ_MAX_DOMAINS = 1024 };
typedef struct mz_domains {
    char *name[MZ_MAX_DOMAINS];
    int count;
} mz_domains;
mz_code mz_domain_of(mz_domains *domains, const char *name, int32_t *domain, mz_err *err);
void mz_domains_free(mz_domains *domains);

/* Bytes of ids and weights that are held of one sequence; a longer one is refused. */
#define MZ_SEQUENCE_BYTES ((size_t)256 << 20)

/* Ids and weights of the sequence being read, [tokens][layers][top_k]. */
typedef struct mz_sequence {
    uint16_t *expert;
    float *weight; /* of sequences with weights */
    size_t expert_room, weight_room;
} mz_sequence;

/* Room for `tokens` tokens of `row` ids, and as many weights. MZ_EINPUT: more than
 * MZ_SEQUENCE_BYTES. */
mz_code mz_sequence_grow(mz_sequence *sequence, int64_t tokens, size_t row, bool weights,
                         mz_err *err);
void mz_sequence_free(mz_sequence *sequence);

/* Whether each of `rows` rows of top_k weights sums to 1 within what 16-bit floats round. */
bool mz_weights_normalized(const float *weight, int64_t rows, int32_t top_k);

/* Whole sequences waiting to become the calls of one block, token-major: expert and weight are
 * [tokens][layers][top_k]. Memory: MZ_BLOCK_TOKENS tokens, or the longest sequence; no more than
 * MZ_SEQUENCE_BYTES. */
typedef struct mz_block {
    int32_t layers, top_k;
    bool weights, step_per_block; /* blocks are steps, not micro-batches of step 0 */
    int64_t off;                  /* rows of weights held that do not */
    int64_t tokens, room;         /* tokens held and allocated */
    uint16_t *expert, *layer_expert;
    float *weight, *layer_weight;
    mz_trace_sequence *sequence;
    size_t sequences, sequence_room;
    int64_t blocks, written; /* blocks and tokens written so far */
} mz_block;

/* Tokens that a block takes of a source without sequences. */
int64_t mz_block_most(const mz_block *block);
/* Room for a sequence of `tokens` more tokens, writing out what is held if the block would grow
 * beyond mz_block_most. The caller then fills from mz_block_expert / mz_block_weight. MZ_EINPUT:
 * more than MZ_SEQUENCE_BYTES. */
mz_code mz_block_begin(mz_block *block, int64_t tokens, mz_trace_writer *writer,
                       mz_import_report *report, mz_err *err);
uint16_t *mz_block_expert(mz_block *block);
float *mz_block_weight(mz_block *block);
/* The tokens just filled in become one sequence; `named` false: they belong to none. */
mz_code mz_block_end(mz_block *block, int64_t tokens, bool named, int32_t domain, mz_err *err);
/* All three at once: a named sequence of `tokens` tokens [tokens][layers][top_k] (weight may be
 * NULL where the trace has none). */
mz_code mz_block_add(mz_block *block, const uint16_t *expert, const float *weight, int64_t tokens,
                     int32_t domain, mz_trace_writer *writer, mz_import_report *report,
                     mz_err *err);
mz_code mz_block_write(mz_block *block, mz_trace_writer *writer, mz_import_report *report,
                       mz_err *err);
void mz_block_free(mz_block *block);

/* One step of counts: micro_batches x layers x ranks rows of E counts, wherever they lie (strides
 * in elements; the row of experts itself is contiguous). */
typedef struct mz_counts_step {
    int64_t step;
    int32_t micro_batches;
    const int64_t *count;
    int64_t batch_stride, layer_stride, rank_stride;
    const char *const *path; /* a file of each rank, named by messages; may be NULL */
} mz_counts_step;

/* Writes the calls of one step; tokens of a call are its pairs over top-k. MZ_EINPUT: a row is not
 * a multiple of top-k, counts one expert more often than there are tokens (unless experts are
 * groups: facts->group_note), or a rank has another number of tokens in another layer. *token
 * numbers the tokens of the trace and moves on. */
mz_code mz_counts_write(const mz_counts_step *counts, const mz_trace_facts *facts,
                        mz_trace_writer *writer, int64_t *token, mz_import_report *report,
                        mz_err *err);

/* MZ_EINPUT, without a place: `expert` was counted more often than the call has tokens.
 * `droppable`: the format takes --dropped and --tokens. */
mz_code mz_counts_fit(int32_t expert, int64_t count, int64_t tokens, bool droppable, mz_err *err);

/* NULL when `id` may follow the first `place` ids of a token, else what is wrong with it. */
const char *mz_id_fault(int64_t id, int32_t experts, const uint16_t *ids, int32_t place);

#endif
