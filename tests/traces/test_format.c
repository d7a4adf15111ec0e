/* Traces written, read back by us and by h5py, killed in the middle of writing, and cut. */
#include "tests/traces/trace_fixture.h"

#include "traces/check.h"
#include "traces/cut.h"
#include "traces/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

static const fixture_shape shapes[] = {
    {MZ_TRACE_PAIRS, 2, 2, 3, 4, 16, 2, 30, true, true},
    {MZ_TRACE_PAIRS, 3, 1, 2, 1, 300, 0, 40, true, false},
    {MZ_TRACE_PAIRS, 1, 3, 1, 3, 256, 8, 20, false, true},
    {MZ_TRACE_PAIRS, 1, 1, 4, 2, 2, 0, 50, false, false},
    {MZ_TRACE_COUNTS, 3, 2, 2, 4, 7, 2, 25, false, false},
    {MZ_TRACE_COUNTS, 2, 1, 3, 2, 600, 0, 25, false, true},
};

static void check_calls(const fixture *f, mz_trace *trace) {
    const mz_trace_call *calls;
    int64_t rows = 0, pairs = 0;
    assert_int_equal(mz_trace_calls(trace, &calls), f->calls);
    for (int i = 0; i < f->calls; i++) {
        assert_int_equal(calls[i].step, f->call[i].step);
        assert_int_equal(calls[i].micro_batch, f->call[i].micro_batch);
        assert_int_equal(calls[i].layer, f->call[i].layer);
        assert_int_equal(calls[i].rank, f->call[i].rank);
        assert_int_equal(calls[i].token_begin, f->call[i].token_begin);
        assert_int_equal(calls[i].tokens, f->call[i].tokens);
        assert_int_equal(calls[i].pairs, f->call[i].pairs);
        assert_int_equal(calls[i].row_begin, rows);
        assert_int_equal(calls[i].pair_begin, pairs);
        rows += calls[i].tokens;
        pairs += calls[i].pairs;
    }
}

static void same_floats(const float *got, const float *want, int64_t n) {
    for (int64_t i = 0; i < n && want; i++)
        assert_true(got[i] == want[i]);
}

static void read_part(mz_trace *trace, const mz_trace_call_data *call, int64_t index, int64_t first,
                      int64_t tokens) {
    enum { MOST = 4096 };
    static uint16_t expert[MOST], token_pairs[MOST];
    static float weight[MOST], hidden[MOST], grad[MOST], input[MOST];
    mz_err err;
    mz_trace_pairs_out out = {
        expert,      call->weight ? weight : NULL,   call->hidden_norm2 ? hidden : NULL,
        token_pairs, call->grad_norm2 ? grad : NULL, call->input_norm2 ? input : NULL};
    int64_t begin = 0, pairs = 0, got_begin, got_pairs;
    for (int64_t t = 0; t < first + tokens; t++)
        *(t < first ? &begin : &pairs) += call->token_pairs[t];
    assert_ok(mz_trace_count_pairs(trace, index, first, tokens, &got_begin, &got_pairs, &err),
              &err);
    assert_int_equal(got_begin, begin);
    assert_int_equal(got_pairs, pairs);
    assert_ok(mz_trace_read_pairs(trace, index, first, tokens, &out, &err), &err);
    assert_memory_equal(expert, call->expert + begin, sizeof *expert * (size_t)pairs);
    assert_memory_equal(token_pairs, call->token_pairs + first, 2 * (size_t)tokens);
    same_floats(weight, call->weight ? call->weight + begin : NULL, pairs);
    same_floats(hidden, call->hidden_norm2 ? call->hidden_norm2 + begin : NULL, pairs);
    same_floats(grad, call->grad_norm2 ? call->grad_norm2 + first : NULL, tokens);
    same_floats(input, call->input_norm2 ? call->input_norm2 + first : NULL, tokens);
}

static void check_data(fixture *f, mz_trace *trace) {
    mz_err err;
    int64_t *count = calloc((size_t)f->facts.experts, 8),
            *want = calloc((size_t)f->facts.experts, 8);
    for (int round = 0; round < 2 * f->calls; round++) {
        int i = round < f->calls ? round : (int)draw_range(f, 0, f->calls - 1); /* then at random */
        mz_trace_call_data *call = &f->call[i];
        memset(count, 0, 8 * (size_t)f->facts.experts);
        memset(want, 0, 8 * (size_t)f->facts.experts);
        fixture_count(f, call, 0, call->tokens, want);
        assert_ok(mz_trace_add_counts(trace, i, count, &err), &err);
        assert_memory_equal(count, want, 8 * (size_t)f->facts.experts);
        if (f->facts.kind == MZ_TRACE_COUNTS)
            continue;
        read_part(trace, call, i, 0, call->tokens);
        int64_t first = draw_range(f, 0, call->tokens);
        read_part(trace, call, i, first, draw_range(f, 0, call->tokens - first));
    }
    free(count);
    free(want);
}

static void check_facts(const fixture *f, const mz_trace *trace) {
    const mz_trace_facts *got = mz_trace_facts_of(trace), *want = &f->facts;
    assert_string_equal(got->name, want->name);
    assert_string_equal(got->source, want->source);
    assert_string_equal(got->producer, want->producer);
    assert_string_equal(got->router, want->router);
    assert_string_equal(got->licence, "");
    assert_int_equal(got->kind, want->kind);
    assert_int_equal(got->layers, want->layers);
    assert_int_equal(got->model_layers, want->model_layers);
    assert_int_equal(got->experts, want->experts);
    assert_int_equal(got->top_k, want->top_k);
    assert_int_equal(got->ranks, want->ranks);
    assert_int_equal(got->hidden, 64);
    assert_int_equal(got->step_stride, 10);
    assert_true(got->weights_normalized);
    assert_int_equal(got->has_weight, want->has_weight);
    assert_int_equal(got->has_grad_norm2, want->has_grad_norm2);
    assert_int_equal(got->has_input_norm2, want->has_input_norm2);
    assert_int_equal(got->has_hidden_norm2, want->has_hidden_norm2);
    assert_int_equal(got->has_sequences, want->has_sequences);
}

static void check_tables(const fixture *f, const mz_trace *trace) {
    const mz_trace_sequence *sequences;
    const mz_trace_step *steps;
    assert_int_equal(mz_trace_sequences(trace, &sequences), f->sequences);
    for (int i = 0; i < f->sequences; i++) {
        assert_int_equal(sequences[i].token_begin, f->sequence[i].token_begin);
        assert_int_equal(sequences[i].tokens, f->sequence[i].tokens);
        assert_int_equal(sequences[i].domain, f->sequence[i].domain);
    }
    assert_int_equal(mz_trace_steps(trace, &steps), 2);
    assert_int_equal(steps[0].step, 5);
    assert_true(steps[0].loss == 2.5 && steps[0].learning_rate == 1e-3);
    assert_true(steps[0].wall_time == 0.25);
}

static void with_file(void (*body)(fixture *f, const char *path, void *arg), fixture_shape shape,
                      uint64_t seed, int deflate, void *arg) {
    char directory[256], path[300];
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/trace.h5", directory);
    fixture *f = fixture_make(seed, shape);
    fixture_write(f, path, deflate, seed % 2 == 0);
    body(f, path, arg);
    fixture_free(f);
    remove_directory(directory);
}

static void round_trip(fixture *f, const char *path, void *arg) {
    mz_err err;
    mz_trace *trace;
    int64_t faults;
    assert_ok(mz_trace_open(path, &trace, &err), &err);
    assert_true(mz_trace_complete(trace));
    assert_string_equal(mz_trace_path(trace), path);
    check_facts(f, trace);
    check_calls(f, trace);
    check_tables(f, trace);
    check_data(f, trace);
    mz_trace_close(&trace);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child is left, not even a dead one */
    assert_int_equal(errno, ECHILD);
    FILE *out = tmpfile();
    assert_ok(mz_trace_check(NULL, path, 100, out, &faults, &err), &err);
    assert_int_equal(faults, 0);
    assert_int_equal(ftell(out), 0);
    fclose(out);
}

static void test_round_trip(void **state) {
    for (int i = 0; i < COUNT_OF(shapes); i++)
        for (int deflate = 0; deflate < 10; deflate += 4)
            with_file(round_trip, shapes[i], (uint64_t)(10 * i + deflate / 4), deflate, NULL);
}

/* More than one chunk per dataset: some 400,000 pairs, chunks of 262,144. */
static void test_many_chunks(void **state) {
    with_file(round_trip, (fixture_shape){MZ_TRACE_PAIRS, 40, 4, 4, 4, 64, 8, 48, true, true}, 5, 1,
              NULL);
    with_file(round_trip, (fixture_shape){MZ_TRACE_COUNTS, 40, 4, 4, 4, 300, 0, 24, false, true}, 6,
              0, NULL);
}

static bool have_h5py(void) {
    return system("/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null") == 0;
}

static const char *const script =
    "import h5py, numpy as np, sys\n"
    "f = h5py.File(sys.argv[1], 'r')\n"
    "o = open(sys.argv[2], 'wb')\n"
    "def put(name, dtype):\n"
    "    if name in f: o.write(f[name][...].astype(dtype).tobytes())\n"
    "for n in ('step', 'micro_batch', 'layer', 'rank', 'token_begin', 'tokens', 'pairs'):\n"
    "    put('calls/' + n, '<i8')\n"
    "put('pairs/expert', '<u2'); put('pairs/weight', '<f4'); put('pairs/hidden_norm2', '<f4')\n"
    "put('rows/pairs', '<u2'); put('rows/grad_norm2', '<f4'); put('rows/input_norm2', '<f4')\n"
    "put('counts', '<i8')\n"
    "for n in ('token_begin', 'tokens', 'domain'): put('sequences/' + n, '<i8')\n"
    "assert f.attrs['format'] == b'mizan-trace' and f.attrs['complete'] == 1\n"
    "assert f['run'].attrs['kind'] in (b'pairs', b'counts') and f['calls/step'].attrs['units']\n";

static void append(FILE *out, const void *data, size_t size, int64_t n) {
    if (data && n > 0)
        assert_int_equal(fwrite(data, size, (size_t)n, out), n);
}

static void write_expected(const fixture *f, const char *path) {
    FILE *out = fopen(path, "wb");
    for (int field = 0; field < 7; field++)
        for (int i = 0; i < f->calls; i++) {
            const mz_trace_call_data *c = &f->call[i];
            int64_t value[] = {c->step,        c->micro_batch, c->layer, c->rank,
                               c->token_begin, c->tokens,      c->pairs};
            append(out, &value[field], 8, 1);
        }
    bool pairs = f->facts.kind == MZ_TRACE_PAIRS;
    for (int part = 0; part < 7; part++)
        for (int i = 0; i < f->calls; i++) {
            const mz_trace_call_data *c = &f->call[i];
            const void *data[] = {c->expert,       c->weight,
                                  c->hidden_norm2, f->facts.top_k ? NULL : c->token_pairs,
                                  c->grad_norm2,   c->input_norm2,
                                  c->count};
            const size_t size[] = {2, 4, 4, 2, 4, 4, 8};
            const int64_t n[] = {c->pairs,
                                 c->pairs,
                                 c->pairs,
                                 c->tokens,
                                 c->tokens,
                                 c->tokens,
                                 pairs ? 0 : f->facts.experts};
            append(out, data[part], size[part], n[part]);
        }
    for (int field = 0; field < 3; field++)
        for (int i = 0; i < f->sequences; i++) {
            const mz_trace_sequence *q = &f->sequence[i];
            int64_t value[] = {q->token_begin, q->tokens, q->domain};
            append(out, &value[field], 8, 1);
        }
    fclose(out);
}

static void read_by_h5py(fixture *f, const char *path, void *arg) {
    char program[400], got[400], want[400], command[2400];
    snprintf(program, sizeof program, "%s.py", path);
    snprintf(got, sizeof got, "%s.got", path);
    snprintf(want, sizeof want, "%s.want", path);
    write_bytes(program, script, strlen(script));
    write_expected(f, want);
    snprintf(command, sizeof command, "/usr/bin/python3 '%s' '%s' '%s' && cmp '%s' '%s'", program,
             path, got, got, want);
    assert_int_equal(system(command), 0);
}

static void test_h5py_reads(void **state) {
    if (!have_h5py()) {
        print_message("skipped: no /usr/bin/python3 with h5py\n");
        skip();
    }
    for (int i = 0; i < COUNT_OF(shapes); i++)
        with_file(read_by_h5py, shapes[i], (uint64_t)(40 + i), i % 2 ? 6 : 0, NULL);
}

static void test_same_bytes(void **state) {
    char directory[256], path[2][300];
    size_t size[2];
    char *data[2];
    make_directory(directory, sizeof directory);
    fixture *f = fixture_make(3, shapes[0]);
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof path[i], "%s/%d.h5", directory, i);
        fixture_write(f, path[i], 4, false);
        data[i] = read_bytes(path[i], &size[i]);
        if (i == 0)
            nanosleep(&(struct timespec){1, 100000000}, NULL); /* a clock in the file would tick */
    }
    assert_int_equal(size[0], size[1]);
    assert_memory_equal(data[0], data[1], size[0]);
    free(data[0]);
    free(data[1]);
    fixture_free(f);
    remove_directory(directory);
}

/* ---- killed writers -------------------------------------------------------------------------- */

/* Writes `flushed` calls, flushes, goes on for `more` calls and dies without warning. */
static void write_and_die(const fixture *f, const char *path, int flushed, int more) {
    mz_err err;
    mz_trace_writer *writer;
    mz_trace_write_options options = {.deflate = 4};
    if (mz_trace_create(path, &f->facts, &options, &writer, &err) != MZ_OK)
        _exit(1);
    for (int i = 0; i < f->sequences; i++)
        if (mz_trace_write_sequence(writer, &f->sequence[i], &err) != MZ_OK)
            _exit(1);
    for (int i = 0; i < flushed + more; i++) {
        if (mz_trace_write_call(writer, &f->call[i], &err) != MZ_OK)
            _exit(1);
        if (i + 1 == flushed && mz_trace_flush(writer, &err) != MZ_OK)
            _exit(1);
    }
    kill(getpid(), SIGKILL);
}

/* With one layer, ranks that come later look like ranks without tokens. */
static int last_whole_group(const fixture *f, int calls) {
    while (f->facts.layers > 1 && calls > 0 && calls < f->calls &&
           f->call[calls].step == f->call[calls - 1].step &&
           f->call[calls].micro_batch == f->call[calls - 1].micro_batch)
        calls--;
    return calls;
}

static void killed_after(fixture *f, int flushed, int more) {
    char directory[256], path[300], partial[340];
    mz_err err;
    mz_trace *trace;
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/killed.h5", directory);
    pid_t pid = fork();
    if (pid == 0)
        write_and_die(f, path, flushed, more);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(access(path, F_OK), -1); /* nothing under the final name */
    snprintf(partial, sizeof partial, "%s.partial-%ld", path, (long)pid);
    assert_ok(mz_trace_open(partial, &trace, &err), &err);
    assert_false(mz_trace_complete(trace));
    int all = f->calls;
    f->calls = last_whole_group(f, flushed);
    check_calls(f, trace);
    if (f->calls > 0)
        check_data(f, trace);
    int kept = 0; /* the sequences were all written; those of calls that are gone go too */
    for (int q = 0; q < f->sequences; q++)
        for (int i = 0; i < f->calls; i++)
            kept += f->call[i].layer == 0 && f->sequence[q].token_begin >= f->call[i].token_begin &&
                    f->sequence[q].token_begin < f->call[i].token_begin + f->call[i].tokens;
    assert_int_equal(mz_trace_sequences(trace, NULL), kept);
    int64_t faults;
    char text[512] = {0};
    FILE *out = tmpfile();
    assert_ok(mz_trace_check(NULL, partial, 100, out, &faults, &err), &err);
    rewind(out);
    assert_non_null(fgets(text, sizeof text, out));
    if (f->calls > 0) {
        assert_int_equal(faults, 0);
        assert_non_null(strstr(text, "note:"));
    }
    fclose(out);
    f->calls = all;
    mz_trace_close(&trace);
    remove_directory(directory);
}

static void test_killed_writer(void **state) {
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        fixture *f = fixture_make((uint64_t)(70 + i), shapes[i]);
        for (int round = 0; round < 4; round++) {
            int flushed = round == 0 ? last_whole_group(f, f->calls - 1)
                                     : (int)draw_range(f, 1, f->calls - 1);
            killed_after(f, flushed, (int)draw_range(f, 0, f->calls - flushed));
        }
        fixture_free(f);
    }
}

/* A reader sees what was flushed while the writer lives. */
static void test_read_while_written(void **state) {
    char directory[256], path[300], partial[340];
    mz_err err;
    mz_trace *trace;
    int ready[2], done[2];
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/live.h5", directory);
    fixture *f = fixture_make(8, shapes[0]);
    int flushed = last_whole_group(f, f->calls - 1);
    assert_true(flushed > 0 && pipe(ready) == 0 && pipe(done) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        mz_trace_writer *writer;
        char byte = 0;
        bool ok = mz_trace_create(path, &f->facts, NULL, &writer, &err) == MZ_OK;
        for (int i = 0; i < f->calls && ok; i++) {
            ok = mz_trace_write_call(writer, &f->call[i], &err) == MZ_OK;
            if (i + 1 == flushed)
                ok = mz_trace_flush(writer, &err) == MZ_OK && write(ready[1], &byte, 1) == 1 &&
                     read(done[0], &byte, 1) == 1;
        }
        _exit(ok && mz_trace_writer_close(&writer, &err) == MZ_OK ? 0 : 1);
    }
    char byte = 0;
    assert_int_equal(read(ready[0], &byte, 1), 1);
    snprintf(partial, sizeof partial, "%s.partial-%ld", path, (long)pid);
    assert_ok(mz_trace_open(partial, &trace, &err), &err);
    int all = f->calls;
    f->calls = flushed;
    check_calls(f, trace);
    check_data(f, trace);
    mz_trace_close(&trace);
    f->calls = all;
    assert_int_equal(write(done[1], &byte, 1), 1);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_ok(mz_trace_open(path, &trace, &err), &err);
    check_calls(f, trace);
    mz_trace_close(&trace);
    assert_int_equal(access(partial, F_OK), -1);
    fixture_free(f);
    remove_directory(directory);
}

/* ---- what the writer refuses ------------------------------------------------------------------
 */

static void test_writer_refuses(void **state) {
    char directory[256], path[300];
    mz_err err;
    mz_trace_writer *writer;
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/t.h5", directory);
    mz_trace_facts facts = {
        .layers = 2, .experts = 4, .top_k = 1, .ranks = 2, .step_stride = 1, .has_weight = true};
    mz_trace_facts bad = facts;
    bad.experts = 0;
    assert_fails(mz_trace_create(path, &bad, NULL, &writer, &err), MZ_EINPUT, "experts", &err);
    assert_null(writer);
    const uint16_t expert[] = {0, 3}, beyond[] = {0, 4};
    const float weight[] = {0.5f, 0.5f}, negative[] = {0.5f, -1.f};
    assert_ok(mz_trace_create(path, &facts, NULL, &writer, &err), &err);
    mz_trace_call_data good = {.tokens = 2, .pairs = 2, .expert = expert, .weight = weight}, call;
#define REFUSES(text, change)                                                                      \
    call = good;                                                                                   \
    change;                                                                                        \
    assert_fails(mz_trace_write_call(writer, &call, &err), MZ_EINPUT, text, &err)
    REFUSES("expert 4 of 4", call.expert = beyond);
    REFUSES("weight 1 is -1", call.weight = negative);
    REFUSES("layer", call.layer = 2);
    REFUSES("rank", call.rank = -1);
    REFUSES("tokens times top_k", call.pairs = 1);
    REFUSES("missing", call.weight = NULL);
    REFUSES("negative", call.step = -1);
    assert_ok(mz_trace_write_call(writer, &good, &err), &err);
    REFUSES("ordered", call.pairs = 2);
    REFUSES("token range", call.layer = 1; call.token_begin = 7);
    mz_trace_writer_abandon(&writer);
    assert_null(writer);
    assert_int_equal(access(path, F_OK), -1);
    char command[600];
    snprintf(command, sizeof command, "test -z \"$(ls -A '%s')\"", directory);
    assert_int_equal(system(command), 0); /* abandoned: no partial file either */
    assert_fails(mz_trace_create("/nonexistent/x.h5", &facts, NULL, &writer, &err), MZ_EINPUT,
                 "/nonexistent/x.h5", &err);
    remove_directory(directory);
}

/* ---- cutting ----------------------------------------------------------------------------------
 */

static void cut(fixture *f, const char *path, void *arg) {
    char output[400];
    mz_err err;
    mz_trace *trace, *small;
    snprintf(output, sizeof output, "%s.cut", path);
    assert_ok(mz_trace_open(path, &trace, &err), &err);
    mz_cut_options options = {
        .first_step = 1, .steps = 1, .first_layer = 1, .first_rank = 0, .ranks = 2};
    assert_ok(mz_trace_cut(NULL, trace, &options, output, NULL, &err), &err);
    assert_ok(mz_trace_open(output, &small, &err), &err);
    assert_int_equal(mz_trace_facts_of(small)->layers, f->facts.layers - 1);
    assert_int_equal(mz_trace_facts_of(small)->ranks, 2);
    const mz_trace_call *calls;
    int64_t n = mz_trace_calls(small, &calls), i = 0;
    int64_t *got = calloc((size_t)f->facts.experts, 8), *want = calloc((size_t)f->facts.experts, 8);
    for (int c = 0; c < f->calls; c++) {
        const mz_trace_call_data *call = &f->call[c];
        if (call->step != 15 || call->layer < 1 || call->rank > 1)
            continue;
        assert_true(i < n);
        assert_int_equal(calls[i].layer, call->layer - 1);
        assert_int_equal(calls[i].rank, call->rank);
        assert_int_equal(calls[i].tokens, call->tokens);
        memset(got, 0, 8 * (size_t)f->facts.experts);
        memset(want, 0, 8 * (size_t)f->facts.experts);
        fixture_count(f, call, 0, call->tokens, want);
        assert_ok(mz_trace_add_counts(small, i, got, &err), &err);
        assert_memory_equal(got, want, 8 * (size_t)f->facts.experts);
        i++;
    }
    assert_int_equal(i, n);
    mz_trace_close(&small);
    options.first_step = 7;
    assert_fails(mz_trace_cut(NULL, trace, &options, output, NULL, &err), MZ_EINPUT, "steps 7",
                 &err);
    options = (mz_cut_options){.max_tokens = 25};
    assert_ok(mz_trace_cut(NULL, trace, &options, output, NULL, &err), &err);
    assert_ok(mz_trace_open(output, &small, &err), &err);
    n = mz_trace_calls(small, &calls);
    int64_t tokens = 0;
    for (i = 0; i < n; i++)
        tokens += calls[i].layer == 0 ? calls[i].tokens : 0;
    assert_true(tokens > 0 && tokens <= 25);
    /* Steps that are cut off are not described any more. */
    const mz_trace_step *steps;
    int64_t described = mz_trace_steps(small, &steps);
    for (i = 0; i < described; i++)
        assert_true(steps[i].step <= calls[n - 1].step);
    mz_trace_close(&small);
    mz_trace_close(&trace);
    free(got);
    free(want);
}

static void test_cut(void **state) {
    with_file(cut, (fixture_shape){MZ_TRACE_PAIRS, 3, 2, 3, 3, 9, 2, 20, true, true}, 1, 4, NULL);
    with_file(cut, (fixture_shape){MZ_TRACE_PAIRS, 2, 1, 2, 2, 9, 0, 20, true, false}, 2, 4, NULL);
    with_file(cut, (fixture_shape){MZ_TRACE_COUNTS, 2, 2, 2, 3, 9, 2, 20, false, false}, 3, 4,
              NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),     cmocka_unit_test(test_many_chunks),
        cmocka_unit_test(test_h5py_reads),     cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_killed_writer),  cmocka_unit_test(test_read_while_written),
        cmocka_unit_test(test_writer_refuses), cmocka_unit_test(test_cut)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
