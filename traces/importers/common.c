#include "traces/importers/common.h"

#include "common/base/arena.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static mz_code copy_fact(char *fact, size_t size, const char *option, const char *given,
                         const char *dflt, mz_err *err) {
    const char *text = given ? given : dflt ? dflt : "";
    if (strlen(text) >= size)
        return mz_fail(err, MZ_EINPUT, "--%s: longer than %zu characters", option, size - 1);
    memcpy(fact, text, strlen(text) + 1);
    return MZ_OK;
}

/* Index of `text` among the `count` names, or MZ_EINPUT that lists them. */
static mz_code choice(const char *option, const char *text, const char *const *names, int count,
                      int *index, mz_err *err) {
    char list[160] = "";
    for (int i = 0; i < count; i++) {
        if (strcmp(text, names[i]) == 0) {
            *index = i;
            return MZ_OK;
        }
        strcat(strcat(list, i ? ", " : ""), names[i]);
    }
    return mz_fail(err, MZ_EINPUT, "--%s: '%.40s' is not one of %s", option, text, list);
}

/* Answers that mean the same whichever importer reads them. */
static void note_answers(const mz_import_options *options, mz_trace_facts *facts) {
    if (options->phase_by_format)
        mz_import_note(facts, "phase=%s by format", options->phase);
    if (options->tokens > 0)
        mz_import_note(facts, "tokens=%lld", (long long)options->tokens);
    if (options->dropped)
        mz_import_note(facts, "dropped=yes");
    if (options->dense_layers)
        mz_import_note(facts, "dense-layers=%s", options->dense_layers);
    if (options->id_bytes > 0)
        mz_import_note(facts, "id-bytes=%lld", (long long)options->id_bytes);
}

mz_code mz_import_facts(const mz_app *app, const mz_import_options *options,
                        const mz_import_defaults *defaults, mz_trace_facts *facts, mz_err *err) {
    static const char *const phases[] = {"train", "prefill", "decode"};
    static const char *const meanings[] = {"iteration", "forward", "none"};
    int phase = 0, meaning = (int)defaults->meaning;
    *facts = (mz_trace_facts){.kind = defaults->kind, .step_stride = 1};
    mz_code code =
        copy_fact(facts->name, sizeof facts->name, "name", options->name, defaults->name, err);
    if (!code)
        code = copy_fact(facts->source, sizeof facts->source, "source", options->source,
                         defaults->source, err);
    if (!code)
        code = copy_fact(facts->licence, sizeof facts->licence, "licence", options->licence,
                         defaults->licence, err);
    if (!code)
        code =
            copy_fact(facts->router, sizeof facts->router, "router", NULL, defaults->router, err);
    if (!code && !options->phase)
        code = mz_fail(err, MZ_EINPUT, "no phase given: pass --phase train, prefill or decode");
    if (!code)
        code = choice("phase", options->phase, phases, 3, &phase, err);
    if (!code && options->step_meaning)
        code = choice("step-meaning", options->step_meaning, meanings, 3, &meaning, err);
    if (code)
        return code;
    strcpy(facts->producer, "mizan ");
    strncat(facts->producer, app->version, sizeof facts->producer - 8);
    facts->phase = (mz_trace_phase)phase;
    facts->step_meaning = (mz_step_meaning)meaning;
    facts->hidden = options->hidden > 0 ? options->hidden : 0;
    facts->intermediate = options->intermediate > 0 ? options->intermediate : 0;
    if (options->step_stride > 0)
        facts->step_stride = options->step_stride;
    facts->weights_normalized = options->weights_normalized == 1;
    note_answers(options, facts);
    return MZ_OK;
}

mz_code mz_import_ask(mz_err *err, const char *path, const char *what, const char *option) {
    return mz_fail(err, MZ_EINPUT, "%s: %s not in the file: pass --%s N", path, what, option);
}

mz_code mz_import_top_k(const char *path, const mz_import_options *options, int64_t experts,
                        int32_t *top_k, mz_err *err) {
    if (options->top_k <= 0)
        return mz_import_ask(err, path, "the number of experts per token is", "top-k");
    if (experts > 0 && options->top_k > experts)
        return mz_fail(err, MZ_EINPUT, "%s: --top-k %lld, but there are %lld experts", path,
                       (long long)options->top_k, (long long)experts);
    *top_k = (int32_t)options->top_k;
    return MZ_OK;
}

mz_code mz_import_experts(const char *path, const mz_import_options *options, int64_t experts,
                          mz_trace_facts *facts, mz_err *err) {
    if (options->experts > 0 && options->experts != experts)
        return mz_fail(err, MZ_EINPUT, "%s: %lld experts in the file, but --experts %lld", path,
                       (long long)experts, (long long)options->experts);
    facts->experts = (int32_t)experts;
    return mz_import_top_k(path, options, experts, &facts->top_k, err);
}

mz_code mz_import_normalized(const char *path, const mz_import_options *options,
                             const mz_trace_facts *facts, mz_err *err) {
    if (options->weights_normalized < 0 || facts->has_weight)
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "%s: --normalized says something of weights, and there are none: leave it out",
                   path);
}

mz_code mz_import_stopped(const mz_app *app, mz_err *err) {
    if (app->stop && *app->stop)
        return mz_fail(err, MZ_EABORTED, "interrupted; nothing was written");
    return MZ_OK;
}

mz_code mz_import_close(const char *path, const mz_import_report *report, mz_trace_writer **writer,
                        mz_err *err) {
    if (report->tokens == 0)
        return mz_fail(err, MZ_EINPUT, "%s: no token in it", path);
    return mz_trace_writer_close(writer, err);
}

mz_code mz_import_lines(const mz_app *app, const char *path,
                        mz_code (*take)(void *self, const mz_jsonl *line, mz_err *err), void *self,
                        mz_err *err) {
    mz_jsonl lines;
    mz_code code = mz_jsonl_open(path, &lines, err);
    if (!code)
        code = mz_jsonl_next(&lines, err);
    while (!code && lines.object) {
        code = take(self, &lines, err);
        if (!code)
            code = mz_import_stopped(app, err);
        if (!code)
            code = mz_jsonl_next(&lines, err);
    }
    mz_jsonl_close(&lines);
    return code;
}

static double sum_of(const float *weight, int32_t top_k) {
    double sum = 0;
    for (int32_t i = 0; i < top_k; i++)
        sum += weight[i];
    return sum;
}

static bool is_one(double sum) {
    return fabs(sum - 1) < 0.01; /* bfloat16, cut off, leaves up to 2^-7 away */
}

mz_code mz_weights_fit(const char *what, const float *weight, const mz_trace_facts *facts,
                       mz_err *err) {
    double sum = facts->weights_normalized ? sum_of(weight, facts->top_k) : 1;
    if (sum == 0 || is_one(sum))
        return MZ_OK;
    return mz_fail(err, MZ_EINPUT,
                   "%s sum to %.4g, not to 1 as --normalized yes or the tokens before say: pass "
                   "--normalized no",
                   what, sum);
}

mz_code mz_jsonl_fit(const mz_jsonl *lines, const char *what, const float *weight,
                     const mz_trace_facts *facts, mz_err *err) {
    mz_code code = mz_weights_fit(what, weight, facts, err);
    return code ? mz_err_prefix(err, "%s: line %lld", mz_input_path(lines->input),
                                (long long)mz_input_line_number(lines->input))
                : MZ_OK;
}

const char *mz_base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

void mz_import_note(mz_trace_facts *facts, const char *fmt, ...) {
    static const char more[] = "; ...";
    size_t used = strlen(facts->import_notes), tail = sizeof more - 1;
    size_t room = sizeof facts->import_notes - used;
    va_list list;
    if (strcmp(facts->import_notes, more + 2) == 0 ||
        (used >= tail && strcmp(facts->import_notes + used - tail, more) == 0))
        return;
    room -= room < tail ? room : tail;
    char text[sizeof facts->import_notes] = "";
    va_start(list, fmt);
    int length = vsnprintf(text, sizeof text, fmt, list);
    va_end(list);
    const char *between = used > 0 ? "; " : "";
    if (length < 0 || strlen(between) + (size_t)length >= room)
        strcpy(facts->import_notes + used, used > 0 ? more : more + 2);
    else
        snprintf(facts->import_notes + used, room, "%s%s", between, text);
}

bool mz_head_has(const unsigned char *head, size_t size, const char *text) {
    size_t length = strlen(text);
    for (size_t i = 0; i + length <= size; i++)
        if (memcmp(head + i, text, length) == 0)
            return true;
    return false;
}

int mz_head_first(const unsigned char *head, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (head[i] == '\0' || !strchr(" \t\r\n", head[i]))
            return head[i];
    return 0;
}

mz_code mz_domain_of(mz_domains *domains, const char *name, int32_t *domain, mz_err *err) {
    *domain = -1;
    for (int i = 0; i < domains->count; i++)
        if (strcmp(domains->name[i], name) == 0) {
            *domain = i;
            return MZ_OK;
        }
    if (domains->count == MZ_MAX_DOMAINS)
        return MZ_OK;
    char *copy = strdup(name);
    if (!copy)
        return mz_fail_nomem(err, "names of domains");
    domains->name[domains->count] = copy;
    *domain = domains->count++;
    return MZ_OK;
}

void mz_domains_free(mz_domains *domains) {
    for (int i = 0; i < domains->count; i++)
        free(domains->name[i]);
    domains->count = 0;
}

/* ---- sequences and blocks of them ------------------------------------------------------------ */

static size_t pair_bytes(bool weights) {
    return sizeof(uint16_t) + (weights ? sizeof(float) : 0);
}

mz_code mz_sequence_grow(mz_sequence *sequence, int64_t tokens, size_t row, bool weights,
                         mz_err *err) {
    size_t most = MZ_SEQUENCE_BYTES / (row * pair_bytes(weights)), values = (size_t)tokens * row;
    if ((size_t)tokens > most)
        return mz_fail(err, MZ_EINPUT,
                       "a sequence of more than %zu tokens (%zu MiB), which is more than is held",
                       most, MZ_SEQUENCE_BYTES >> 20);
    if (!mz_grow((void **)&sequence->expert, &sequence->expert_room, values,
                 sizeof *sequence->expert) ||
        (weights && !mz_grow((void **)&sequence->weight, &sequence->weight_room, values,
                             sizeof *sequence->weight)))
        return mz_fail_nomem(err, "a sequence");
    return MZ_OK;
}

void mz_sequence_free(mz_sequence *sequence) {
    free(sequence->expert);
    free(sequence->weight);
    *sequence = (mz_sequence){0};
}

bool mz_weights_normalized(const float *weight, int64_t rows, int32_t top_k) {
    for (int64_t r = 0; r < rows; r++)
        if (!is_one(sum_of(weight + r * top_k, top_k)))
            return false;
    return true;
}

static bool widen(void **array, size_t count, size_t size) {
    if (size && count > SIZE_MAX / size)
        return false;
    void *grown = realloc(*array, count * size);
    if (grown)
        *array = grown;
    return grown != NULL;
}

/* Tokens of MZ_SEQUENCE_BYTES. */
static int64_t tokens_held(const mz_block *block) {
    size_t row = (size_t)block->layers * (size_t)block->top_k;
    return (int64_t)(MZ_SEQUENCE_BYTES / (row * pair_bytes(block->weights)));
}

int64_t mz_block_most(const mz_block *block) {
    int64_t most = tokens_held(block);
    most = most > 0 ? most : 1;
    return most < MZ_BLOCK_TOKENS ? most : MZ_BLOCK_TOKENS;
}

mz_code mz_block_begin(mz_block *block, int64_t tokens, mz_trace_writer *writer,
                       mz_import_report *report, mz_err *err) {
    int64_t most = mz_block_most(block);
    if (tokens > tokens_held(block))
        return mz_fail(err, MZ_EINPUT,
                       "%lld tokens of %d layers x top-%d at once: more than the %zu MiB that are "
                       "held",
                       (long long)tokens, block->layers, block->top_k, MZ_SEQUENCE_BYTES >> 20);
    if (block->tokens > 0 && tokens > most - block->tokens) {
        mz_code code = mz_block_write(block, writer, report, err);
        if (code)
            return code;
    }
    if (block->tokens + tokens <= block->room)
        return MZ_OK;
    int64_t room = tokens > most ? tokens : most;
    size_t row = (size_t)block->layers * (size_t)block->top_k, call = (size_t)block->top_k;
    bool ok = widen((void **)&block->expert, (size_t)room, row * sizeof(uint16_t)) &&
              widen((void **)&block->layer_expert, (size_t)room, call * sizeof(uint16_t));
    if (ok && block->weights)
        ok = widen((void **)&block->weight, (size_t)room, row * sizeof(float)) &&
             widen((void **)&block->layer_weight, (size_t)room, call * sizeof(float));
    if (!ok)
        return mz_fail_nomem(err, "a block of whole sequences");
    block->room = room;
    return MZ_OK;
}

uint16_t *mz_block_expert(mz_block *block) {
    return block->expert + block->tokens * block->layers * block->top_k;
}

float *mz_block_weight(mz_block *block) {
    return block->weight + block->tokens * block->layers * block->top_k;
}

/* Counts the rows of weights just filled in that do not sum to 1. */
static void count_off(mz_block *block, int64_t tokens) {
    const float *weight = mz_block_weight(block);
    for (int64_t r = 0; r < tokens * block->layers; r++, weight += block->top_k)
        block->off += !is_one(sum_of(weight, block->top_k));
}

mz_code mz_block_end(mz_block *block, int64_t tokens, bool named, int32_t domain, mz_err *err) {
    if (block->weights)
        count_off(block, tokens);
    if (named) {
        if (!mz_grow((void **)&block->sequence, &block->sequence_room, block->sequences + 1,
                     sizeof *block->sequence))
            return mz_fail_nomem(err, "sequence bounds");
        block->sequence[block->sequences++] = (mz_trace_sequence){
            .token_begin = block->written + block->tokens, .tokens = tokens, .domain = domain};
    }
    block->tokens += tokens;
    return MZ_OK;
}

mz_code mz_block_add(mz_block *block, const uint16_t *expert, const float *weight, int64_t tokens,
                     int32_t domain, mz_trace_writer *writer, mz_import_report *report,
                     mz_err *err) {
    size_t values = (size_t)tokens * (size_t)block->layers * (size_t)block->top_k;
    mz_code code = mz_block_begin(block, tokens, writer, report, err);
    if (code || tokens == 0)
        return code;
    memcpy(mz_block_expert(block), expert, values * sizeof *expert);
    if (block->weights)
        memcpy(mz_block_weight(block), weight, values * sizeof *weight);
    return mz_block_end(block, tokens, true, domain, err);
}

/* Copies one layer of the block to the layer_ arrays. */
static void gather_layer(mz_block *block, int32_t layer) {
    int64_t k = block->top_k, row = block->layers * k;
    for (int64_t t = 0; t < block->tokens; t++) {
        memcpy(block->layer_expert + t * k, block->expert + t * row + layer * k,
               (size_t)k * sizeof(uint16_t));
        if (block->weights)
            memcpy(block->layer_weight + t * k, block->weight + t * row + layer * k,
                   (size_t)k * sizeof(float));
    }
}

mz_code mz_block_write(mz_block *block, mz_trace_writer *writer, mz_import_report *report,
                       mz_err *err) {
    if (block->tokens == 0)
        return MZ_OK;
    if (block->blocks == INT32_MAX)
        return mz_fail(err, MZ_EINPUT, "more than %d blocks of sequences", INT32_MAX);
    mz_code code = MZ_OK;
    for (int32_t layer = 0; layer < block->layers && !code; layer++) {
        gather_layer(block, layer);
        mz_trace_call_data call = {.step = block->step_per_block ? block->blocks : 0,
                                   .micro_batch =
                                       block->step_per_block ? 0 : (int32_t)block->blocks,
                                   .layer = layer,
                                   .token_begin = block->written,
                                   .tokens = block->tokens,
                                   .pairs = block->tokens * block->top_k,
                                   .expert = block->layer_expert,
                                   .weight = block->weights ? block->layer_weight : NULL};
        code = mz_trace_write_call(writer, &call, err);
        report->calls++;
        report->pairs += call.pairs;
    }
    for (size_t i = 0; i < block->sequences && !code; i++)
        code = mz_trace_write_sequence(writer, &block->sequence[i], err);
    block->written += block->tokens;
    report->tokens += block->tokens;
    report->weight_rows += block->weights ? block->tokens * block->layers : 0;
    report->weight_rows_off += block->off;
    block->off = 0;
    block->blocks++;
    block->tokens = 0;
    block->sequences = 0;
    return code;
}

void mz_block_free(mz_block *block) {
    free(block->expert);
    free(block->layer_expert);
    free(block->weight);
    free(block->layer_weight);
    free(block->sequence);
    *block = (mz_block){0};
}

const char *mz_id_fault(int64_t id, int32_t experts, const uint16_t *ids, int32_t place) {
    if (id < 0)
        return "is negative (places without an expert are not supported here)";
    if (id >= experts)
        return "is not below the number of experts (--experts)";
    for (int32_t i = 0; i < place; i++)
        if (ids[i] == id)
            return "stands twice in one token";
    return NULL;
}

mz_code mz_counts_fit(int32_t expert, int64_t count, int64_t tokens, bool droppable, mz_err *err) {
    if (count <= tokens)
        return MZ_OK;
    return mz_fail(
        err, MZ_EINPUT,
        "expert %d is counted %lld times, but there are %lld tokens, and none chooses an "
        "expert twice: check --top-k%s",
        expert, (long long)count, (long long)tokens,
        droppable ? "; counts after dropping need --dropped or --tokens N" : "");
}

/* Tokens behind one row of counts. */
static mz_code row_tokens(const int64_t *row, const mz_trace_facts *facts, int64_t *tokens,
                          mz_err *err) {
    int64_t sum = 0;
    int32_t fullest = 0;
    for (int32_t e = 0; e < facts->experts; e++) {
        if (row[e] < 0 || row[e] > INT64_MAX / 2 - sum)
            return mz_fail(err, MZ_EINPUT, "expert %d: count %lld is negative or too large", e,
                           (long long)row[e]);
        sum += row[e];
        fullest = row[e] > row[fullest] ? e : fullest;
    }
    *tokens = sum / facts->top_k;
    if (sum % facts->top_k)
        return mz_fail(err, MZ_EINPUT, "%lld selections are no multiple of top-%d", (long long)sum,
                       facts->top_k);
    return facts->group_note[0] ? MZ_OK : mz_counts_fit(fullest, row[fullest], *tokens, false, err);
}

static mz_code write_layer(const mz_counts_step *counts, const mz_trace_facts *facts, int32_t batch,
                           int32_t layer, mz_trace_writer *writer, int64_t token, int64_t *held,
                           mz_import_report *report, mz_err *err) {
    for (int32_t rank = 0; rank < facts->ranks; rank++) {
        const int64_t *row = counts->count + batch * counts->batch_stride +
                             layer * counts->layer_stride + rank * counts->rank_stride;
        int64_t tokens = 0;
        mz_code code = row_tokens(row, facts, &tokens, err);
        if (!code && layer > 0 && tokens != held[rank])
            code = mz_fail(err, MZ_EINPUT, "%lld tokens, but %lld in layer 0", (long long)tokens,
                           (long long)held[rank]);
        if (code) {
            mz_err_prefix(err, "step %lld, layer %d, rank %d, micro-batch %d",
                          (long long)counts->step, layer, rank, batch);
            return counts->path ? mz_err_prefix(err, "%s", counts->path[rank]) : code;
        }
        held[rank] = tokens;
        mz_trace_call_data call = {.step = counts->step,
                                   .micro_batch = batch,
                                   .layer = layer,
                                   .rank = rank,
                                   .token_begin = token,
                                   .tokens = tokens,
                                   .pairs = tokens * facts->top_k,
                                   .count = row};
        code = mz_trace_write_call(writer, &call, err);
        if (code)
            return code;
        token += tokens;
        report->calls++;
        report->pairs += call.pairs;
    }
    return MZ_OK;
}

mz_code mz_counts_write(const mz_counts_step *counts, const mz_trace_facts *facts,
                        mz_trace_writer *writer, int64_t *token, mz_import_report *report,
                        mz_err *err) {
    int64_t *held = mz_calloc((size_t)facts->ranks, sizeof *held);
    if (!held)
        return mz_fail_nomem(err, "tokens per rank");
    mz_code code = MZ_OK;
    for (int32_t m = 0; m < counts->micro_batches && !code; m++) {
        for (int32_t l = 0; l < facts->layers && !code; l++)
            code = write_layer(counts, facts, m, l, writer, *token, held, report, err);
        for (int32_t r = 0; r < facts->ranks; r++) {
            *token += held[r];
            report->tokens += held[r];
        }
    }
    free(held);
    return code;
}
