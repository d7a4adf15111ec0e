/* Random traces held in memory, to be written, read back and compared. */
#ifndef MIZAN_TESTS_TRACE_FIXTURE_H
#define MIZAN_TESTS_TRACE_FIXTURE_H

#include "tests/harness.h"

#include "common/base/arena.h"
#include "common/base/rng.h"
#include "traces/trace.h"

typedef struct fixture {
    mz_arena arena;
    mz_trace_facts facts;
    mz_trace_call_data *call;
    int calls;
    mz_trace_sequence *sequence;
    int sequences;
    mz_rng rng;
} fixture;

static inline int64_t draw_range(fixture *f, int64_t low, int64_t high) {
    return low + (int64_t)mz_rng_below(&f->rng, (uint64_t)(high - low + 1));
}

/* Squares of small fractions: exact in half precision, so that reading gives back what was written.
 */
static inline float *draw_norms(fixture *f, int64_t n) {
    float *values = MZ_NEW(&f->arena, float, n + 1);
    for (int64_t i = 0; i < n; i++)
        values[i] = (float)draw_range(f, 0, 1023) / 1024.f;
    return values;
}

static inline void draw_call(fixture *f, mz_trace_call_data *call) {
    const mz_trace_facts *facts = &f->facts;
    if (facts->kind == MZ_TRACE_COUNTS) {
        int64_t *count = MZ_NEW(&f->arena, int64_t, facts->experts);
        for (int e = 0; e < facts->experts && call->tokens > 0; e++)
            call->pairs += count[e] = draw_range(f, 0, 9) * draw_range(f, 0, 9);
        call->count = count;
        return;
    }
    uint16_t *token_pairs = MZ_NEW(&f->arena, uint16_t, call->tokens + 1);
    for (int64_t t = 0; t < call->tokens; t++) {
        int64_t most = facts->experts < 5 ? facts->experts : 5;
        token_pairs[t] = (uint16_t)(facts->top_k ? facts->top_k : draw_range(f, 0, most));
        call->pairs += token_pairs[t];
    }
    uint16_t *expert = MZ_NEW(&f->arena, uint16_t, call->pairs + 1);
    for (int64_t p = 0; p < call->pairs; p++)
        expert[p] = (uint16_t)draw_range(f, 0, facts->experts - 1);
    call->token_pairs = token_pairs;
    call->expert = expert;
    call->weight = facts->has_weight ? draw_norms(f, call->pairs) : NULL;
    call->hidden_norm2 = facts->has_hidden_norm2 ? draw_norms(f, call->pairs) : NULL;
    call->grad_norm2 = facts->has_grad_norm2 ? draw_norms(f, call->tokens) : NULL;
    call->input_norm2 = facts->has_input_norm2 ? draw_norms(f, call->tokens) : NULL;
}

/* Cuts a block into sequences of 1 to 12 tokens, sometimes with padding between them. */
static inline void draw_sequences(fixture *f, int64_t begin, int64_t tokens) {
    for (int64_t done = 0; done < tokens;) {
        if (draw_range(f, 0, 5) == 0) {
            done += draw_range(f, 1, 3);
            continue;
        }
        int64_t n = draw_range(f, 1, 12);
        n = n < tokens - done ? n : tokens - done;
        f->sequence[f->sequences++] =
            (mz_trace_sequence){begin + done, n, (int32_t)draw_range(f, -1, 3)};
        done += n;
    }
}

typedef struct fixture_shape {
    mz_trace_kind kind;
    int steps, micro_batches, layers, ranks, experts, top_k, tokens; /* tokens: most per block */
    bool members, sequences;
} fixture_shape;

/* Ranks may have no tokens or be absent from a micro-batch; rank 0 always has some. */
static inline fixture *fixture_make(uint64_t seed, fixture_shape s) {
    fixture *f = calloc(1, sizeof *f);
    f->rng = mz_rng_make(seed, 99);
    f->facts = (mz_trace_facts){.name = "random",
                                .source = "drawn with a seed, \xc3\xa9"
                                          "crit en C",
                                .producer = "test",
                                .router = "softmax",
                                .kind = s.kind,
                                .layers = s.layers,
                                .model_layers = s.layers + 1,
                                .experts = s.experts,
                                .top_k = s.top_k,
                                .ranks = s.ranks,
                                .hidden = 64,
                                .step_stride = 10,
                                .weights_normalized = true};
    bool members = s.members && s.kind == MZ_TRACE_PAIRS;
    f->facts.has_weight = f->facts.has_hidden_norm2 = members;
    f->facts.has_grad_norm2 = f->facts.has_input_norm2 = members;
    f->facts.has_sequences = s.sequences;
    int blocks = s.steps * s.micro_batches * s.ranks;
    f->call = MZ_NEW(&f->arena, mz_trace_call_data, blocks * s.layers);
    f->sequence = MZ_NEW(&f->arena, mz_trace_sequence, blocks * (s.tokens + 1));
    int64_t *begin = MZ_NEW(&f->arena, int64_t, s.ranks), *n = MZ_NEW(&f->arena, int64_t, s.ranks);
    int64_t at = 0;
    for (int group = 0; group < s.steps * s.micro_batches; group++) {
        for (int r = 0; r < s.ranks; r++) {
            at += draw_range(f, 0, 2);
            begin[r] = at;
            n[r] = r == 0                     ? draw_range(f, 1, s.tokens)
                   : draw_range(f, 0, 3) == 0 ? -draw_range(f, 0, 1)
                                              : draw_range(f, 1, s.tokens);
            at += n[r] > 0 ? n[r] : 0;
            if (s.sequences && n[r] > 0)
                draw_sequences(f, begin[r], n[r]);
        }
        for (int l = 0; l < s.layers; l++)
            for (int r = 0; r < s.ranks; r++) {
                if (n[r] < 0)
                    continue;
                mz_trace_call_data *call = &f->call[f->calls++];
                *call = (mz_trace_call_data){.step = 5 + 10 * (group / s.micro_batches),
                                             .micro_batch = group % s.micro_batches,
                                             .layer = l,
                                             .rank = r,
                                             .token_begin = begin[r],
                                             .tokens = n[r]};
                draw_call(f, call);
            }
    }
    return f;
}

static inline void fixture_free(fixture *f) {
    mz_arena_free(&f->arena);
    free(f);
}

static inline void fixture_write(const fixture *f, const char *path, int deflate, bool half) {
    mz_err err;
    mz_trace_writer *writer;
    mz_trace_write_options options = {.deflate = deflate, .half_weights = half};
    assert_ok(mz_trace_create(path, &f->facts, &options, &writer, &err), &err);
    for (int i = 0; i < f->calls; i++) {
        assert_ok(mz_trace_write_call(writer, &f->call[i], &err), &err);
        if (i % 7 == 3 && i < 40)
            assert_ok(mz_trace_flush(writer, &err), &err);
    }
    for (int i = 0; i < f->sequences; i++)
        assert_ok(mz_trace_write_sequence(writer, &f->sequence[i], &err), &err);
    assert_ok(mz_trace_write_step(writer, 5, 2.5, 1e-3, 0.25, &err), &err);
    assert_ok(mz_trace_write_step(writer, 25, 2.25, 1e-4, 0.5, &err), &err);
    assert_ok(mz_trace_writer_close(&writer, &err), &err);
}

/* Counts of tokens [first, first+tokens) of a call, added up from the fixture. */
static inline void fixture_count(const fixture *f, const mz_trace_call_data *call, int64_t first,
                                 int64_t tokens, int64_t *count) {
    if (f->facts.kind == MZ_TRACE_COUNTS) {
        for (int e = 0; e < f->facts.experts; e++)
            count[e] += call->count[e];
        return;
    }
    int64_t p = 0;
    for (int64_t t = 0; t < first + tokens; t++)
        for (int k = 0; k < call->token_pairs[t]; k++, p++)
            if (t >= first)
                count[call->expert[p]]++;
}

#endif
