/* Loads out of traces: conservation under every re-shaping, dealing and splitting against brute
 * force, the same bytes with and without reading ahead. */
#include "tests/traces/trace_fixture.h"

#include "traces/reader.h"
#include "traces/split.h"
#include "traces/stream.h"

#include <signal.h>
#include <gsl/gsl_randist.h>
#include <math.h>

typedef struct place {
    char directory[256], path[300];
    fixture *f;
    mz_trace *trace;
} place;

static const fixture_shape shapes[] = {
    {MZ_TRACE_PAIRS, 2, 2, 3, 4, 16, 2, 40, true, true},
    {MZ_TRACE_PAIRS, 2, 1, 2, 3, 300, 0, 40, true, false},
    {MZ_TRACE_COUNTS, 2, 2, 2, 6, 7, 2, 25, false, false},
    {MZ_TRACE_COUNTS, 1, 1, 3, 1, 40, 0, 25, false, false},
};

static place open_place(uint64_t seed, fixture_shape shape, mz_step_meaning meaning) {
    place p;
    mz_err err;
    make_directory(p.directory, sizeof p.directory);
    snprintf(p.path, sizeof p.path, "%s/t.h5", p.directory);
    p.f = fixture_make(seed, shape);
    p.f->facts.step_meaning = meaning;
    fixture_write(p.f, p.path, 1, false);
    assert_ok(mz_trace_open(p.path, &p.trace, &err), &err);
    return p;
}

static void close_place(place *p) {
    mz_trace_close(&p->trace);
    fixture_free(p->f);
    remove_directory(p->directory);
}

static mz_stream *open_stream(place *p, mz_stream_options options) {
    mz_err err;
    mz_stream *stream;
    assert_ok(mz_stream_open(p->trace, &options, &stream, &err), &err);
    return stream;
}

/* Pairs of one (step ordinal, micro-batch, layer) to each expert, over all ranks. */
static void expected_total(const fixture *f, int step, int micro_batch, int layer, int64_t *total) {
    for (int i = 0; i < f->calls; i++)
        if (f->call[i].step == 5 + 10 * step && f->call[i].micro_batch == micro_batch &&
            f->call[i].layer == layer)
            fixture_count(f, &f->call[i], 0, f->call[i].tokens, total);
}

/* The pairs must say exactly what the counts say. */
static void check_pairs(const mz_pairs *pairs, const mz_load *load, const int64_t *tokens) {
    int64_t *row = calloc((size_t)load->experts, 8);
    assert_int_equal(pairs->pairs, load->pairs);
    assert_int_equal(pairs->sources, load->sources);
    for (int s = 0; s < load->sources; s++) {
        memset(row, 0, 8 * (size_t)load->experts);
        for (int64_t i = pairs->pair_begin[s]; i < pairs->pair_begin[s + 1]; i++)
            row[pairs->expert[i]]++;
        assert_memory_equal(row, load->count + (int64_t)s * load->experts,
                            8 * (size_t)load->experts);
        int64_t begin = pairs->token_begin[s], end = pairs->token_begin[s + 1], sum = 0;
        assert_int_equal(end - begin, tokens[s]);
        for (int64_t t = begin; t < end; t++)
            sum += pairs->top_k ? pairs->top_k : pairs->token_pairs[t];
        assert_int_equal(sum, pairs->pair_begin[s + 1] - pairs->pair_begin[s]);
    }
    free(row);
}

/* Sum over pairs of weight times (expert + 1): survives any re-ordering. */
static double weigh(const uint16_t *expert, const float *weight, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n && weight; i++)
        sum += (double)weight[i] * (expert[i] + 1);
    return sum;
}

/* Lengths of one (micro-batch, rank): all of its tokens where sequences were dealt; as recorded
 * those of the sequence table that lie in its block, in order, cut to `cut` tokens (0: whole). */
static void check_sequences(const place *p, const mz_step_head *head, int32_t ranks, bool dealt,
                            int64_t cut) {
    const fixture *f = p->f;
    for (int64_t cell = 0; cell < (int64_t)head->micro_batches * ranks; cell++) {
        int64_t i = head->sequence_begin[cell], end = head->sequence_begin[cell + 1], sum = 0;
        for (int64_t k = i; k < end; k++)
            sum += head->sequence_tokens[k];
        for (int64_t k = i; k < end && cut > 0; k++)
            assert_true(head->sequence_tokens[k] <= cut);
        assert_true(dealt ? sum == head->tokens[cell] : sum <= head->tokens[cell]);
        for (int c = 0; c < f->calls && !dealt; c++) {
            const mz_trace_call_data *call = &f->call[c];
            if (call->step != head->step || call->layer != 0 ||
                call->micro_batch * ranks + call->rank != cell)
                continue;
            for (int q = 0; q < f->sequences; q++)
                if (f->sequence[q].token_begin >= call->token_begin &&
                    f->sequence[q].token_begin < call->token_begin + call->tokens) {
                    for (int64_t left = f->sequence[q].tokens; left > 0;) {
                        assert_true(i < end);
                        const int64_t want = cut > 0 && cut < left ? cut : left;
                        assert_int_equal(head->sequence_tokens[i++], want);
                        left -= want;
                    }
                }
        }
        assert_true(dealt || i == end);
    }
}

static void test_sequences(void **state) {
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        place p = open_place((uint64_t)(40 + i), shapes[i], MZ_STEP_ITERATION);
        for (int32_t run = 0; run <= 19; run++) {
            const int32_t ranks = run / 2;
            const int64_t cut = run % 2 ? 5 : 0;
            mz_err err;
            mz_stream *stream =
                open_stream(&p, (mz_stream_options){.ranks = ranks, .sequence_length = cut});
            mz_load_source source = mz_stream_source(stream);
            const mz_trace_facts *facts = &p.f->facts;
            const bool known = facts->kind == MZ_TRACE_PAIRS && facts->has_sequences;
            for (bool end = false; !end;) {
                mz_step_head head;
                assert_ok(source.next_step(source.self, &head, &end, &err), &err);
                if (end)
                    continue;
                assert_int_equal(head.sequence_begin != NULL, known);
                if (known)
                    check_sequences(&p, &head, source.ranks, mz_stream_reshaped(stream), cut);
            }
            mz_stream_close(&stream);
        }
        close_place(&p);
    }
}

static void conserve(place *p, mz_stream_options options) {
    mz_err err;
    mz_stream *stream = open_stream(p, options);
    mz_load_source source = mz_stream_source(stream);
    const fixture *f = p->f;
    int64_t *want = calloc((size_t)f->facts.experts, 8);
    mz_step_head head;
    mz_layer_call call;
    bool end;
    for (int step = 0;; step++) {
        assert_ok(source.next_step(source.self, &head, &end, &err), &err);
        if (end)
            break;
        assert_int_equal(head.step, 5 + 10 * step);
        assert_int_equal(head.layers, options.layers ? options.layers : f->facts.layers);
        assert_int_equal(head.layers, source.layers);
        for (int i = 0; i < head.micro_batches * head.layers; i++) {
            assert_ok(source.next_call(source.self, &call, &err), &err);
            assert_int_equal(call.micro_batch, i / head.layers);
            assert_int_equal(call.layer, i % head.layers);
            memset(want, 0, 8 * (size_t)f->facts.experts);
            expected_total(f, step, call.micro_batch, call.layer, want);
            assert_memory_equal(call.load->total, want, 8 * (size_t)f->facts.experts);
            for (int64_t c = 0; c < (int64_t)call.load->sources * call.load->experts; c++)
                assert_true(call.load->count[c] >= 0);
            bool pairs = options.want_pairs && f->facts.kind == MZ_TRACE_PAIRS;
            assert_int_equal(call.pairs != NULL, pairs);
            if (!pairs)
                continue;
            check_pairs(call.pairs, call.load, head.tokens + call.micro_batch * source.ranks);
            double all = 0;
            for (int c = 0; c < f->calls; c++)
                if (f->call[c].step == head.step && f->call[c].micro_batch == call.micro_batch &&
                    f->call[c].layer == call.layer)
                    all += weigh(f->call[c].expert, f->call[c].weight, f->call[c].pairs);
            assert_true(weigh(call.pairs->expert, call.pairs->weight, call.pairs->pairs) == all);
        }
    }
    free(want);
    mz_stream_close(&stream);
}

static void test_conservation(void **state) {
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        place p = open_place((uint64_t)i, shapes[i], MZ_STEP_ITERATION);
        for (int ranks = 0; ranks <= 9; ranks++)
            conserve(&p, (mz_stream_options){.ranks = ranks,
                                             .layers = ranks % 5 == 4 ? 1 : 0,
                                             .seed = (uint64_t)ranks,
                                             .sequence_length = ranks % 3 == 2 ? 5 : 0,
                                             .want_pairs = ranks % 2 == 0,
                                             .want_weights = ranks % 2 == 0,
                                             .read_ahead = ranks % 4 >= 2});
        close_place(&p);
    }
}

/* As recorded: every rank's own counts and pairs, in the recorded order. */
static void test_as_recorded(void **state) {
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        place p = open_place((uint64_t)(20 + i), shapes[i], MZ_STEP_FORWARD);
        mz_err err;
        mz_stream *stream =
            open_stream(&p, (mz_stream_options){.want_pairs = true, .want_weights = true});
        mz_load_source source = mz_stream_source(stream);
        assert_false(mz_stream_reshaped(stream));
        assert_int_equal(mz_stream_steps(stream), shapes[i].steps);
        mz_step_head head;
        mz_layer_call call;
        bool end;
        int64_t *want = calloc((size_t)p.f->facts.experts, 8);
        int next = 0;
        while (source.next_step(source.self, &head, &end, &err) == MZ_OK && !end)
            for (int c = 0; c < head.micro_batches * head.layers; c++) {
                assert_ok(source.next_call(source.self, &call, &err), &err);
                for (int r = 0; r < source.ranks; r++) {
                    const mz_trace_call_data *d = next < p.f->calls ? &p.f->call[next] : NULL;
                    bool there = d && d->step == head.step && d->micro_batch == call.micro_batch &&
                                 d->layer == call.layer && d->rank == r;
                    next += there;
                    memset(want, 0, 8 * (size_t)p.f->facts.experts);
                    if (there)
                        fixture_count(p.f, d, 0, d->tokens, want);
                    assert_memory_equal(call.load->count + (int64_t)r * call.load->experts, want,
                                        8 * (size_t)p.f->facts.experts);
                    if (!there || !call.pairs)
                        continue;
                    int64_t at = call.pairs->pair_begin[r], token = call.pairs->token_begin[r];
                    assert_memory_equal(call.pairs->expert + at, d->expert, 2 * (size_t)d->pairs);
                    assert_memory_equal(call.pairs->weight + at, d->weight, 4 * (size_t)d->pairs);
                    assert_memory_equal(call.pairs->hidden_norm2 + at, d->hidden_norm2,
                                        4 * (size_t)d->pairs);
                    assert_memory_equal(call.pairs->grad_norm2 + token, d->grad_norm2,
                                        4 * (size_t)d->tokens);
                    assert_memory_equal(call.pairs->input_norm2 + token, d->input_norm2,
                                        4 * (size_t)d->tokens);
                }
            }
        assert_int_equal(next, p.f->calls);
        free(want);
        mz_stream_close(&stream);
        close_place(&p);
    }
}

/* ---- dealing by brute force --------------------------------------------------------------------
 */

typedef struct run {
    const mz_trace_call_data *block; /* its call of layer 0 */
    int64_t first, tokens;
    int order, rank;
} run;

static int add_run(run *runs, int n, const mz_trace_call_data *block, int64_t first, int64_t tokens,
                   int64_t most) {
    for (; tokens > 0; n++) {
        int64_t take = most && tokens > most ? most : tokens;
        runs[n] = (run){block, first, take, n, 0};
        first += take;
        tokens -= take;
    }
    return n;
}

/* Sequences and gaps of one micro-batch, straight from the fixture. */
static int list_runs(const fixture *f, int64_t step, int micro_batch, int64_t cut, int64_t gap,
                     run *runs) {
    int n = 0;
    for (int i = 0; i < f->calls; i++) {
        const mz_trace_call_data *d = &f->call[i];
        if (d->step != step || d->micro_batch != micro_batch || d->layer != 0)
            continue;
        int64_t done = 0;
        for (int q = 0; q < f->sequences; q++) {
            int64_t first = f->sequence[q].token_begin - d->token_begin;
            if (first < 0 || first >= d->tokens)
                continue;
            n = add_run(runs, n, d, done, first - done, gap);
            n = add_run(runs, n, d, first, f->sequence[q].tokens, cut);
            done = first + f->sequence[q].tokens;
        }
        n = add_run(runs, n, d, done, d->tokens - done, gap);
    }
    return n;
}

/* Longest first to the least loaded rank, by looking at all runs and all ranks each time. */
static void deal_runs(run *runs, int n, int ranks, int64_t *load) {
    bool *dealt = calloc((size_t)n + 1, sizeof *dealt);
    for (int done = 0; done < n; done++) {
        int best = -1, rank = 0;
        for (int i = 0; i < n; i++)
            if (!dealt[i] && (best < 0 || runs[i].tokens > runs[best].tokens))
                best = i;
        for (int r = 1; r < ranks; r++)
            if (load[r] < load[rank])
                rank = r;
        dealt[best] = true;
        runs[best].rank = rank;
        load[rank] += runs[best].tokens;
    }
    free(dealt);
}

static const mz_trace_call_data *same_block(const fixture *f, const mz_trace_call_data *block,
                                            int layer) {
    for (int i = 0; i < f->calls; i++)
        if (f->call[i].step == block->step && f->call[i].micro_batch == block->micro_batch &&
            f->call[i].rank == block->rank && f->call[i].layer == layer)
            return &f->call[i];
    return NULL;
}

static void deal_and_compare(place *p, int ranks, int64_t cut) {
    static run runs[4096];
    mz_err err;
    mz_stream *stream = open_stream(p, (mz_stream_options){.ranks = ranks, .sequence_length = cut});
    mz_load_source source = mz_stream_source(stream);
    assert_true(mz_stream_reshaped(stream));
    mz_step_head head;
    mz_layer_call call;
    bool end;
    size_t cells = (size_t)ranks * (size_t)p->f->facts.experts;
    int64_t *want = calloc(cells, 8), *load = calloc((size_t)ranks, 8);
    while (source.next_step(source.self, &head, &end, &err) == MZ_OK && !end)
        for (int c = 0; c < head.micro_batches * head.layers; c++) {
            assert_ok(source.next_call(source.self, &call, &err), &err);
            int n = list_runs(p->f, head.step, call.micro_batch, cut, cut ? cut : 512, runs);
            memset(want, 0, 8 * cells);
            memset(load, 0, 8 * (size_t)ranks);
            deal_runs(runs, n, ranks, load);
            for (int i = 0; i < n; i++)
                fixture_count(p->f, same_block(p->f, runs[i].block, call.layer), runs[i].first,
                              runs[i].tokens,
                              want + (size_t)runs[i].rank * (size_t)p->f->facts.experts);
            assert_memory_equal(call.load->count, want, 8 * cells);
            assert_memory_equal(head.tokens + call.micro_batch * ranks, load, 8 * (size_t)ranks);
        }
    free(want);
    free(load);
    mz_stream_close(&stream);
}

static void test_dealing(void **state) {
    for (int i = 0; i < 2; i++)
        for (uint64_t seed = 0; seed < 4; seed++) {
            place p = open_place(seed, shapes[i], MZ_STEP_ITERATION);
            for (int ranks = 1; ranks < 12; ranks += 3)
                if (ranks != shapes[i].ranks)
                    deal_and_compare(&p, ranks, ranks % 2 ? 0 : 7);
            close_place(&p);
        }
}

/* ---- counts ------------------------------------------------------------------------------------
 */

static void test_merging(void **state) {
    place p = open_place(4, shapes[2], MZ_STEP_ITERATION);
    mz_err err;
    for (int ranks = 1; ranks <= 3; ranks++) {
        mz_stream *stream = open_stream(&p, (mz_stream_options){.ranks = ranks});
        mz_load_source source = mz_stream_source(stream);
        mz_step_head head;
        mz_layer_call call;
        bool end;
        int64_t want[3 * 7];
        assert_true(mz_stream_reshaped(stream));
        assert_ok(source.next_step(source.self, &head, &end, &err), &err);
        assert_ok(source.next_call(source.self, &call, &err), &err);
        memset(want, 0, sizeof want);
        for (int i = 0; i < p.f->calls; i++) {
            const mz_trace_call_data *d = &p.f->call[i];
            if (d->step == head.step && d->micro_batch == 0 && d->layer == 0)
                fixture_count(p.f, d, 0, d->tokens, want + 7 * (d->rank / (6 / ranks)));
        }
        assert_memory_equal(call.load->count, want, 8 * 7 * (size_t)ranks);
        mz_stream_close(&stream);
    }
    close_place(&p);
}

/* Twice the ranks: a source's pairs stay on its two ranks, tokens are halved. */
static void test_splitting(void **state) {
    place p = open_place(5, shapes[2], MZ_STEP_ITERATION);
    mz_err err;
    mz_step_head head;
    mz_layer_call call;
    bool end;
    int64_t kept[12 * 7];
    for (int round = 0; round < 3; round++) {
        uint64_t seed = round == 2 ? 8 : 7;
        mz_stream *stream = open_stream(&p, (mz_stream_options){.ranks = 12, .seed = seed});
        mz_load_source source = mz_stream_source(stream);
        assert_ok(source.next_step(source.self, &head, &end, &err), &err);
        assert_ok(source.next_call(source.self, &call, &err), &err);
        for (int i = 0; i < p.f->calls; i++) {
            const mz_trace_call_data *d = &p.f->call[i];
            if (d->step != head.step || d->micro_batch != 0 || d->layer != 0)
                continue;
            for (int e = 0; e < 7; e++)
                assert_int_equal(call.load->count[14 * d->rank + e] +
                                     call.load->count[14 * d->rank + 7 + e],
                                 d->count[e]);
            assert_int_equal(head.tokens[2 * d->rank], d->tokens / 2);
            assert_int_equal(head.tokens[2 * d->rank + 1], d->tokens - d->tokens / 2);
            assert_int_equal(call.load->source[2 * d->rank],
                             d->tokens ? d->pairs * (d->tokens / 2) / d->tokens : 0);
        }
        int differs = memcmp(kept, call.load->count, sizeof kept) != 0;
        if (round == 1)
            assert_false(differs); /* the same seed, the same draw */
        if (round == 2)
            assert_true(differs);
        memcpy(kept, call.load->count, sizeof kept);
        mz_stream_close(&stream);
    }
    close_place(&p);
}

/* Chi-square of the sampler against GSL's probabilities. */
static void sample(int64_t good, int64_t total, int64_t draws) {
    enum { N = 20000, MOST = 400 };
    static int seen[MOST];
    memset(seen, 0, sizeof seen);
    mz_rng rng = mz_rng_make(1, (uint64_t)(good * 31 + draws));
    for (int i = 0; i < N; i++) {
        int64_t x = mz_hypergeometric(&rng, good, total, draws);
        assert_true(x >= 0 && x <= good && x <= draws && draws - x <= total - good && x < MOST);
        seen[x]++;
    }
    double chi = 0, expected = 0, observed = 0;
    int cells = 0;
    for (unsigned x = 0; x < MOST; x++) {
        expected += N * gsl_ran_hypergeometric_pdf(x, (unsigned)good, (unsigned)(total - good),
                                                   (unsigned)draws);
        observed += seen[x];
        if (expected < 10)
            continue;
        chi += (observed - expected) * (observed - expected) / expected;
        expected = observed = 0;
        cells++;
    }
    if (cells > 1)
        assert_true(chi < cells + 5 * sqrt(2.0 * cells)); /* five standard deviations */
}

static void test_hypergeometric(void **state) {
    sample(5, 20, 10);
    sample(1, 1000, 500);
    sample(300, 1000, 350);
    sample(999, 1000, 300);
    sample(40, 64, 64);
    sample(0, 10, 5);
    sample(3, 100000, 90000);
    sample(200, 4096, 2048);
    int64_t urn[] = {100, 0, 50, 7}, part[4] = {0}, all = 0;
    mz_rng rng = mz_rng_make(2, 2);
    mz_split_counts(&rng, urn, 4, 157, 80, part);
    for (int i = 0; i < 4; i++)
        all += part[i];
    assert_int_equal(all, 80);
    assert_int_equal(urn[0] + part[0], 100);
    assert_int_equal(urn[2] + part[2], 50);
}

/* ---- sizes --------------------------------------------------------------------------------------
 */

static void test_resampling(void **state) {
    mz_err err;
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        place p = open_place((uint64_t)(40 + i), shapes[i], MZ_STEP_ITERATION);
        bool pairs = shapes[i].kind == MZ_TRACE_PAIRS;
        int ranks = shapes[i].ranks;
        mz_stream *stream =
            open_stream(&p, (mz_stream_options){.ranks = ranks, .tokens_per_rank = 300, .seed = 1});
        mz_load_source source = mz_stream_source(stream);
        mz_step_head head;
        mz_layer_call call;
        bool end;
        assert_true(mz_stream_reshaped(stream));
        while (source.next_step(source.self, &head, &end, &err) == MZ_OK && !end) {
            int64_t all = 0;
            for (int c = 0; c < head.micro_batches * ranks; c++) {
                all += head.tokens[c];
                if (pairs)
                    assert_true(head.tokens[c] >= 300 / head.micro_batches);
            }
            assert_true(all >= 300 * ranks);
            for (int c = 0; c < head.micro_batches * head.layers; c++) {
                assert_ok(source.next_call(source.self, &call, &err), &err);
                const int64_t *tokens = head.tokens + call.micro_batch * ranks;
                for (int r = 0; r < ranks && pairs && shapes[i].top_k; r++)
                    assert_int_equal(call.load->source[r], tokens[r] * shapes[i].top_k);
            }
        }
        mz_stream_close(&stream);
        close_place(&p);
    }
}

static void test_step_tokens(void **state) {
    mz_err err;
    place p = open_place(50, shapes[2], MZ_STEP_ITERATION);
    int64_t tokens = 0;
    for (int i = 0; i < p.f->calls; i++)
        tokens += p.f->call[i].step == 5 && p.f->call[i].layer == 0 ? p.f->call[i].tokens : 0;
    mz_stream_options options = {.step_tokens = 3 * tokens, .steps = 1};
    mz_stream *stream = open_stream(&p, options);
    mz_load_source source = mz_stream_source(stream);
    mz_step_head head;
    mz_layer_call call;
    bool end;
    int64_t want[7] = {0};
    assert_ok(source.next_step(source.self, &head, &end, &err), &err);
    assert_ok(source.next_call(source.self, &call, &err), &err);
    expected_total(p.f, 0, 0, 0, want);
    for (int e = 0; e < 7; e++)
        assert_int_equal(call.load->total[e], 3 * want[e]);
    mz_stream_close(&stream);
    options.step_tokens++;
    stream = open_stream(&p, options);
    source = mz_stream_source(stream);
    assert_fails(source.next_step(source.self, &head, &end, &err), MZ_EINPUT, "whole factors",
                 &err);
    mz_stream_close(&stream);
    close_place(&p);
}

/* A log without steps: its steps are whole sequences in file order, each of them once. */
static void test_no_steps(void **state) {
    mz_err err;
    place p = open_place(60, shapes[0], MZ_STEP_NONE);
    mz_stream_options options = {.ranks = 1, .step_tokens = 50, .want_pairs = true};
    mz_stream *stream = open_stream(&p, options);
    mz_load_source source = mz_stream_source(stream);
    mz_step_head head;
    mz_layer_call call;
    bool end;
    uint16_t *stream_ids = calloc(100000, 2), *file_ids = calloc(100000, 2);
    int64_t got = 0, n = 0, steps = 0;
    while (source.next_step(source.self, &head, &end, &err) == MZ_OK && !end) {
        assert_int_equal(head.step, steps++);
        assert_int_equal(head.micro_batches, 1);
        assert_true(head.tokens[0] >= 50 &&
                    head.tokens[0] < 62); /* the last sequence: at most 12 */
        for (int l = 0; l < head.layers; l++) {
            assert_ok(source.next_call(source.self, &call, &err), &err);
            if (l == 1) {
                memcpy(stream_ids + got, call.pairs->expert, 2 * (size_t)call.pairs->pairs);
                got += call.pairs->pairs;
            }
        }
    }
    /* File order here: by step, micro-batch, rank. */
    for (int i = 0; i < p.f->calls; i++)
        if (p.f->call[i].layer == 1) {
            memcpy(file_ids + n, p.f->call[i].expert, 2 * (size_t)p.f->call[i].pairs);
            n += p.f->call[i].pairs;
        }
    assert_int_equal(mz_stream_steps(stream), steps);
    assert_true(got <= n && n - got < 50 * 2);
    assert_memory_equal(stream_ids, file_ids, 2 * (size_t)got);
    mz_stream_close(&stream);
    options = (mz_stream_options){.ranks = 1};
    assert_fails(mz_stream_open(p.trace, &options, &stream, &err), MZ_EINPUT, "--step-tokens",
                 &err);
    free(stream_ids);
    free(file_ids);
    close_place(&p);
}

/* ---- reading ahead
 * ------------------------------------------------------------------------------- */

/* A number that changes when anything given out changes; skips some calls on the way. */
static uint64_t digest(place *p, mz_stream_options options, int skip) {
    mz_err err;
    mz_stream *stream = open_stream(p, options);
    mz_load_source source = mz_stream_source(stream);
    mz_step_head head;
    mz_layer_call call;
    bool end;
    uint64_t sum = 0;
    for (int step = 0;; step++) {
        assert_ok(source.next_step(source.self, &head, &end, &err), &err);
        if (end)
            break;
        int calls = head.micro_batches * head.layers - (step == 0 ? skip : 0);
        for (int i = 0; i < calls; i++) {
            assert_ok(source.next_call(source.self, &call, &err), &err);
            for (int64_t c = 0; c < (int64_t)call.load->sources * call.load->experts; c++)
                sum = sum * 31 + (uint64_t)call.load->count[c];
            for (int64_t c = 0; call.pairs && c < call.pairs->pairs; c++)
                sum = sum * 31 + call.pairs->expert[c];
        }
        for (int r = 0; r < source.ranks * head.micro_batches; r++)
            sum = sum * 31 + (uint64_t)head.tokens[r];
    }
    mz_stream_close(&stream);
    return sum;
}

static void test_reading_ahead(void **state) {
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        place p = open_place((uint64_t)(80 + i), shapes[i], MZ_STEP_ITERATION);
        for (int ranks = 0; ranks < 6; ranks += 5)
            for (int skip = 0; skip < 3; skip++) {
                mz_stream_options options = {.ranks = ranks, .seed = 3, .want_pairs = true};
                uint64_t plain = digest(&p, options, skip);
                options.read_ahead = true;
                assert_true(digest(&p, options, skip) == plain);
            }
        /* Closed in the middle. */
        mz_err err;
        mz_step_head head;
        bool end;
        mz_stream *stream = open_stream(&p, (mz_stream_options){.read_ahead = true});
        mz_load_source source = mz_stream_source(stream);
        assert_ok(source.next_step(source.self, &head, &end, &err), &err);
        mz_stream_close(&stream);
        close_place(&p);
    }
}

/* ---- interrupts
 * ----------------------------------------------------------------------------------- */

/* Resampling to many tokens, and reading what was planned, end soon after the user interrupts. */
static void test_interrupts(void **state) {
    mz_err err;
    mz_step_head head;
    mz_layer_call call;
    bool end;
    for (int i = 0; i < COUNT_OF(shapes); i++)
        for (int ahead = 0; ahead < 2; ahead++) {
            place p = open_place((uint64_t)(95 + i), shapes[i], MZ_STEP_ITERATION);
            volatile sig_atomic_t stop = 0;
            mz_stream_options options = {.tokens_per_rank = 500, .stop = &stop};
            mz_stream *stream = open_stream(&p, options);
            mz_load_source source = mz_stream_source(stream);
            assert_ok(source.next_step(source.self, &head, &end, &err), &err);
            stop = 1;
            assert_fails(source.next_call(source.self, &call, &err), MZ_EABORTED, "interrupted",
                         &err);
            mz_stream_close(&stream);
            if (shapes[i].kind == MZ_TRACE_PAIRS) {
                options.read_ahead = ahead;
                stream = open_stream(&p, options);
                source = mz_stream_source(stream);
                assert_fails(source.next_step(source.self, &head, &end, &err), MZ_EABORTED,
                             "interrupted", &err);
                mz_stream_close(&stream);
            }
            close_place(&p);
        }
}

/* ---- refusals
 * ------------------------------------------------------------------------------------- */

static void test_refusals(void **state) {
    mz_err err;
    mz_stream *stream;
    place p = open_place(90, shapes[0], MZ_STEP_ITERATION);
    mz_stream_options options = {.first_step = 1, .steps = 2};
    assert_fails(mz_stream_open(p.trace, &options, &stream, &err), MZ_EINPUT,
                 "steps 1 to 2 are asked for, the trace has 2", &err);
    options = (mz_stream_options){.ranks = -1};
    assert_fails(mz_stream_open(p.trace, &options, &stream, &err), MZ_EINPUT, "negative", &err);
    options = (mz_stream_options){.step_tokens = 4, .tokens_per_rank = 4};
    assert_fails(mz_stream_open(p.trace, &options, &stream, &err), MZ_EINPUT, "exclude", &err);
    options = (mz_stream_options){.ranks = 8, .tokens_per_rank = ((int64_t)1 << 27) + 1};
    assert_fails(mz_stream_open(p.trace, &options, &stream, &err), MZ_EINPUT,
                 "fewer tokens per step or per rank", &err);
    options = (mz_stream_options){.step_tokens = ((int64_t)1 << 30) + 1};
    assert_fails(mz_stream_open(p.trace, &options, &stream, &err), MZ_EINPUT,
                 "fewer tokens per step or per rank", &err);
    close_place(&p);

    char directory[256], path[300];
    mz_trace *trace;
    mz_trace_writer *writer;
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/t.h5", directory);
    for (int round = 0; round < 3; round++) { /* no calls; no tokens; a layer missing */
        mz_trace_facts facts = {
            .layers = 2, .experts = 4, .top_k = 1, .ranks = 1, .step_stride = 1};
        const uint16_t expert[] = {1};
        int64_t tokens = round == 2;
        mz_trace_call_data call = {.tokens = tokens, .pairs = tokens, .expert = expert};
        assert_ok(mz_trace_create(path, &facts, NULL, &writer, &err), &err);
        if (round > 0)
            assert_ok(mz_trace_write_call(writer, &call, &err), &err);
        assert_ok(mz_trace_writer_close(&writer, &err), &err);
        assert_ok(mz_trace_open(path, &trace, &err), &err);
        options = (mz_stream_options){0};
        assert_fails(mz_stream_open(trace, &options, &stream, &err), MZ_EINPUT,
                     round == 2 ? "no call for layer 1" : "holds no token", &err);
        assert_null(stream);
        mz_trace_close(&trace);
    }
    remove_directory(directory);
}

/* A chunk that turns out damaged ends the stream with the reader's message. */
static void test_damage_while_reading(void **state) {
    mz_err err;
    place p = open_place(95, shapes[0], MZ_STEP_ITERATION);
    for (int ahead = 0; ahead < 2; ahead++) {
        mz_trace *trace;
        assert_ok(mz_trace_open(p.path, &trace, &err), &err);
        mz_stream_options options = {.read_ahead = ahead};
        mz_stream *stream;
        assert_ok(mz_stream_open(trace, &options, &stream, &err), &err);
        mz_load_source source = mz_stream_source(stream);
        mz_step_head head;
        mz_layer_call call;
        bool end;
        kill(mz_server_pid(trace->server), SIGKILL);
        mz_code code = source.next_step(source.self, &head, &end, &err);
        for (int i = 0; i < head.micro_batches * head.layers && code == MZ_OK; i++)
            code = source.next_call(source.self, &call, &err);
        assert_int_equal(code, MZ_EINPUT);
        assert_non_null(strstr(err.msg, "signal 9"));
        mz_stream_close(&stream);
        mz_trace_close(&trace);
    }
    close_place(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conservation), cmocka_unit_test(test_as_recorded),
        cmocka_unit_test(test_dealing),      cmocka_unit_test(test_merging),
        cmocka_unit_test(test_splitting),    cmocka_unit_test(test_hypergeometric),
        cmocka_unit_test(test_resampling),   cmocka_unit_test(test_step_tokens),
        cmocka_unit_test(test_no_steps),     cmocka_unit_test(test_reading_ahead),
        cmocka_unit_test(test_interrupts),   cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_sequences),    cmocka_unit_test(test_damage_while_reading)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
