/* Importers on hand-made files: what they write is read back; bad input of every kind is one
 * message and leaves nothing behind. */
#include "tests/harness.h"

#include "traces/importer.h"
#include "traces/importers/table.h"
#include "traces/trace.h"

#include <dirent.h>

typedef struct fixture {
    char directory[256], output[300];
    mz_app app;
    mz_import_options options;
    mz_import_report report;
} fixture;

static int setup(void **state) {
    static fixture f;
    f = (fixture){.app = {.log = mz_log_make(NULL, -1), .version = "0"},
                  .options = {.experts = -1,
                              .top_k = -1,
                              .hidden = -1,
                              .intermediate = -1,
                              .step_stride = -1,
                              .weights_normalized = -1}};
    make_directory(f.directory, sizeof f.directory);
    snprintf(f.output, sizeof f.output, "%s/out.h5", f.directory);
    *state = &f;
    return 0;
}

static int teardown(void **state) {
    remove_directory(((fixture *)*state)->directory);
    return 0;
}

static char *file(fixture *f, const char *name, char *path) {
    snprintf(path, 400, "%s/%s", f->directory, name);
    return path;
}

static void put_text(fixture *f, const char *name, const char *text) {
    char path[400];
    write_bytes(file(f, name, path), text, strlen(text));
}

static void put_npy(fixture *f, const char *name, const char *type, const char *shape,
                    const void *data, size_t size) {
    unsigned char bytes[8192] = "\x93NUMPY\x01";
    char header[256], path[400];
    int n = snprintf(header, sizeof header,
                     "{'descr': '%s', 'fortran_order': False, 'shape': %s, }\n", type, shape);
    assert_true(10 + (size_t)n + size <= sizeof bytes);
    bytes[8] = (unsigned char)n;
    memcpy(bytes + 10, header, (size_t)n);
    memcpy(bytes + 10 + n, data, size);
    write_bytes(file(f, name, path), bytes, 10 + (size_t)n + size);
}

/* Imports files of the fixture's directory, names separated by spaces. */
static mz_code import(fixture *f, const mz_importer *importer, const char *names, mz_err *err) {
    static char path[64][400];
    char *files[64], list[2048];
    int count = 0;
    f->report = (mz_import_report){0};
    snprintf(list, sizeof list, "%s", names);
    for (char *name = strtok(list, " "); name; name = strtok(NULL, " ")) {
        files[count] = file(f, name, path[count]);
        count++;
    }
    mz_trace_write_options write = {.deflate = 1};
    mz_import_options options = f->options;
    if (!options.phase)
        options.phase = importer->phase ? importer->phase : "decode";
    return importer->import(&f->app, files, count, &options, f->output, &write, &f->report, err);
}

/* The import must fail with the text in its message and leave no trace, whole or partial. */
static void refused(fixture *f, const mz_importer *importer, const char *names, const char *text) {
    mz_err err = {0};
    assert_fails(import(f, importer, names, &err), MZ_EINPUT, text, &err);
    DIR *directory = opendir(f->directory);
    assert_non_null(directory);
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
        if (strncmp(entry->d_name, "out.h5", 6) == 0)
            fail_msg("%s is left behind after: %s", entry->d_name, err.msg);
    closedir(directory);
}

static mz_trace *imported(fixture *f, const mz_importer *importer, const char *names) {
    mz_err err = {0};
    mz_trace *trace = NULL;
    assert_ok(import(f, importer, names, &err), &err);
    assert_ok(mz_trace_open(f->output, &trace, &err), &err);
    return trace;
}

static void counts_of(mz_trace *trace, int64_t index, int64_t *count, int32_t experts) {
    mz_err err;
    memset(count, 0, (size_t)experts * sizeof *count);
    assert_ok(mz_trace_add_counts(trace, index, count, &err), &err);
}

static int recognised(const mz_importer *importer, fixture *f, const char *name) {
    char path[400];
    size_t size;
    char *bytes = read_bytes(file(f, name, path), &size);
    int confidence = importer->recognise(path, (const unsigned char *)bytes, size);
    free(bytes);
    return confidence;
}

/* ---- SmartMoE -------------------------------------------------------------------------------- */

static void smartmoe_tables(void **state) {
    fixture *f = *state;
    int64_t count[3];
    put_text(f, "table_iter11_rank0.log",
             "0:[[1.0, 2.0, 1.0], [2.0, 2.0, 0.0]]\n"
             "1:[[0.0, 2.0, 2.0], [2.0, 2.0, 0.0]]\n");
    put_text(f, "table_iter11_rank1.log", "0:[[3, 0, 3], [0, 0, 0]]\n1:[[0, 3, 3], [0, 0, 0]]\n");
    put_text(f, "table_iter1_rank0.log",
             "0:[[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]\n"
             "1:[[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]\n");
    put_text(f, "table_iter1_rank1.log", "0:[[0, 1, 1], [1, 0, 1]]\n1:[[1, 1, 0], [1, 0, 1]]");
    f->options.top_k = 2;
    mz_trace *trace =
        imported(f, &mz_import_smartmoe_log,
                 "table_iter11_rank1.log table_iter1_rank0.log table_iter11_rank0.log "
                 "table_iter1_rank1.log");
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    const mz_trace_call *calls;
    assert_int_equal(facts->layers, 2);
    assert_int_equal(facts->ranks, 2);
    assert_int_equal(facts->experts, 3);
    assert_int_equal(facts->top_k, 2);
    assert_int_equal(facts->step_stride, 10);
    assert_int_equal(facts->kind, MZ_TRACE_COUNTS);
    assert_int_equal(facts->step_meaning, MZ_STEP_ITERATION);
    assert_int_equal(mz_trace_calls(trace, &calls), 16);
    /* Iteration 11, micro-batch 0, layer 1, rank 1. */
    assert_true(calls[11].step == 11 && calls[11].micro_batch == 0 && calls[11].layer == 1 &&
                calls[11].rank == 1);
    assert_int_equal(calls[11].tokens, 3);
    counts_of(trace, 11, count, 3);
    assert_true(count[0] == 0 && count[1] == 3 && count[2] == 3);
    counts_of(trace, 12, count, 3); /* micro-batch 1, layer 0, rank 0 */
    assert_true(count[0] == 2 && count[1] == 2 && count[2] == 0);
    assert_int_equal(calls[13].tokens, 0);
    assert_int_equal(f->report.calls, 16);
    assert_int_equal(f->report.pairs, 2 * (4 * 2 + 4 + 4 + 6));
    assert_int_equal(f->report.tokens, 4 + 2 + 2 + 3);
    mz_trace_close(&trace);
    assert_int_equal(recognised(&mz_import_smartmoe_log, f, "table_iter1_rank0.log"), 95);
}

static void smartmoe_tables_refused(void **state) {
    fixture *f = *state;
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"0:[[1, 1], [2, x]]\n", "line 1: layer 0: not a list of lists"},
        {"0:[[1, 1], [2, 0]]\n1:[[1, 1]]\n", "line 2: layer 1 lists 1 micro-batches, not 2"},
        {"0:[[1, 1], [2, 0, 0]]\n", "line 1: micro-batch 1 lists 3 experts, not 2"},
        {"0:[[1, 1], [2, 0]]\n3:[[1, 1], [2, 0]]\n", "line 2: expected '1:[[...]]'"},
        {"0:[[1.5, 1], [2, 0]]\n", "line 1"},
        {"0:[[-1, 3], [2, 0]]\n", "line 1"},
        {"0:[[nan, 3], [2, 0]]\n", "line 1"},
        {"0:[[1e300, 3], [2, 0]]\n", "line 1"},
        {"0:[[1, 1], [2, 0]] and more\n", "line 1"},
        {"0:[[1, 1], [2, 0]\n", "line 1"},
        {"0:[[]]\n", "line 1"},
        {"hello\n", "line 1: expected '0:[[...]]'"},
        {"\n", "has no layers"},
        {"0:[[1, 1], [2, 1]]\n", "3 selections are no multiple of top-2"},
        {"0:[[1, 1], [2, 0]]\n1:[[2, 2], [2, 0]]\n", "2 tokens, but 1 in layer 0"},
    };
    f->options.top_k = 2;
    for (int i = 0; i < COUNT_OF(cases); i++) {
        put_text(f, "table_iter5_rank0.log", cases[i].text);
        refused(f, &mz_import_smartmoe_log, "table_iter5_rank0.log", cases[i].message);
    }
    put_text(f, "table_iter5_rank0.log", "0:[[1, 1]]\n");
    put_text(f, "table_iter5_rank1.log", "0:[[1, 1]]\n");
    put_text(f, "table_iter6_rank0.log", "0:[[1, 1]]\n");
    put_text(f, "table_iter6_rank1.log", "0:[[1, 1, 0]]\n");
    put_text(f, "other.log", "0:[[1, 1]]\n");
    const mz_importer *logs = &mz_import_smartmoe_log;
    refused(f, logs, "table_iter5_rank0.log table_iter5_rank1.log table_iter6_rank0.log",
            "iteration 6 does not have the ranks that iteration 5 has");
    refused(f, logs, "table_iter5_rank0.log table_iter6_rank1.log", "first difference: rank 0");
    refused(f, logs, "table_iter5_rank0.log table_iter5_rank0.log",
            "are both rank 0 of iteration 5");
    refused(f, logs,
            "table_iter5_rank0.log table_iter5_rank1.log table_iter6_rank0.log "
            "table_iter6_rank1.log",
            "but the first file has 1 x 1 x 2");
    refused(f, logs, "other.log", "table_iter{I}_rank{R}.log");
    refused(f, logs, "table_iter9_rank0.log", "table_iter9_rank0.log");
    f->options.top_k = -1;
    refused(f, logs, "table_iter5_rank0.log", "pass --top-k");
    f->options.top_k = 2;
    f->options.experts = 7;
    refused(f, logs, "table_iter5_rank0.log", "2 experts in the file, but --experts 7");
}

static void smartmoe_array(void **state) {
    fixture *f = *state;
    int64_t count[2];
    /* [steps 2][layers 1][ranks 2][micro-batches 2][experts 2] */
    const uint16_t data[16] = {1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0, 0, 65534, 65534, 3, 3};
    put_npy(f, "c.npy", "<u2", "(2, 1, 2, 2, 2)", data, sizeof data);
    f->options.top_k = 2;
    mz_trace *trace = imported(f, &mz_import_smartmoe_npy, "c.npy");
    const mz_trace_call *calls;
    assert_int_equal(mz_trace_calls(trace, &calls), 8);
    assert_int_equal(mz_trace_facts_of(trace)->step_stride, 10);
    assert_int_equal(calls[0].step, 1);
    assert_int_equal(calls[7].step, 11);
    assert_true(calls[5].rank == 1 && calls[5].micro_batch == 0);
    assert_int_equal(calls[5].tokens, 65534);
    counts_of(trace, 5, count, 2);
    assert_true(count[0] == 65534 && count[1] == 65534);
    counts_of(trace, 2, count, 2); /* step 1, micro-batch 1, rank 0 */
    assert_true(count[0] == 1 && count[1] == 1);
    mz_trace_close(&trace);
    assert_true(recognised(&mz_import_smartmoe_npy, f, "c.npy") > 0);
    assert_int_equal(recognised(&mz_import_npy_ids, f, "c.npy"), 0);
}

static void smartmoe_array_refused(void **state) {
    fixture *f = *state;
    const uint16_t odd[8] = {1, 1, 1, 1, 0, 3, 2, 2};
    const int16_t negative[4] = {1, 1, -1, 3};
    f->options.top_k = 2;
    put_npy(f, "c.npy", "<u2", "(1, 1, 2, 2, 2)", odd, sizeof odd);
    refused(f, &mz_import_smartmoe_npy, "c.npy",
            "index 0: step 1, layer 0, rank 1, micro-batch 0: 3 selections");
    put_npy(f, "c.npy", "<u2", "(2, 1, 2, 2, 2)", odd, sizeof odd);
    refused(f, &mz_import_smartmoe_npy, "c.npy", "3 selections");
    put_npy(f, "c.npy", "<i2", "(1, 1, 1, 2, 2)", negative, sizeof negative);
    refused(f, &mz_import_smartmoe_npy, "c.npy", "count -1 is negative");
    put_npy(f, "c.npy", "<u2", "(1, 1, 1, 2, 8)", odd, sizeof odd);
    refused(f, &mz_import_smartmoe_npy, "c.npy", "ends at element 8 of 16");
    put_npy(f, "c.npy", "<u2", "(1, 1, 1, 2, 2)", (uint16_t[5]){1, 1, 1, 1, 2}, 10);
    refused(f, &mz_import_smartmoe_npy, "c.npy", "bytes follow");
    put_npy(f, "c.npy", "<u2", "(0, 1, 1, 2, 2)", odd, 0);
    refused(f, &mz_import_smartmoe_npy, "c.npy", "is empty");
    put_npy(f, "c.npy", "<f4", "(1, 1, 1, 1, 2)", odd, 8);
    refused(f, &mz_import_smartmoe_npy, "c.npy", "not an integer array");
    f->options.top_k = -1;
    put_npy(f, "c.npy", "<u2", "(1, 1, 2, 2, 2)", odd, sizeof odd);
    refused(f, &mz_import_smartmoe_npy, "c.npy", "pass --top-k");
    refused(f, &mz_import_smartmoe_npy, "c.npy c.npy", "takes one file");
}

/* ---- ids ------------------------------------------------------------------------------------- */

enum { TOKENS = 6, LAYERS = 2, K = 2 };
static const uint8_t ids[TOKENS * LAYERS * K] = {0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1,
                                                 3, 0, 1, 2, 0, 2, 1, 3, 1, 3, 0, 2};

static void put_ids(fixture *f, const char *sequences) {
    char path[400];
    float weight[TOKENS * LAYERS * K];
    for (int i = 0; i < TOKENS * LAYERS * K; i++)
        weight[i] = i % 2 ? 0.25f : 0.75f;
    put_npy(f, "ids.npy", "|u1", "(6, 2, 2)", ids, sizeof ids);
    put_npy(f, "w.npy", "<f4", "(6, 2, 2)", weight, sizeof weight);
    put_text(f, "s.csv", sequences);
    f->options.experts = 4;
    f->options.weights = strdup(file(f, "w.npy", path));
    f->options.sequences = strdup(file(f, "s.csv", path));
    assert_true(f->options.weights && f->options.sequences);
}

static void drop_ids(fixture *f) {
    free((char *)f->options.weights);
    free((char *)f->options.sequences);
    f->options.weights = f->options.sequences = NULL;
}

static void ids_with_weights_and_sequences(void **state) {
    fixture *f = *state;
    mz_err err;
    const mz_trace_call *calls;
    const mz_trace_sequence *sequences;
    uint16_t expert[16];
    float weight[16];
    put_ids(f, "seq,first_row,num_tokens,dataset\n0,0,2,wiki\n1,3,2,code\n2,5,1,wiki\n");
    mz_trace *trace = imported(f, &mz_import_npy_ids, "ids.npy");
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    assert_true(facts->has_weight && facts->weights_normalized && facts->has_sequences);
    assert_int_equal(facts->step_meaning, MZ_STEP_NONE);
    assert_int_equal(facts->top_k, 2);
    assert_int_equal(f->report.skipped, 1);
    assert_int_equal(f->report.tokens, 5);
    assert_int_equal(mz_trace_calls(trace, &calls), 2);
    assert_int_equal(calls[0].tokens, 5);
    assert_int_equal(mz_trace_sequences(trace, &sequences), 3);
    assert_true(sequences[1].token_begin == 2 && sequences[1].tokens == 2);
    assert_true(sequences[0].domain == 0 && sequences[1].domain == 1 && sequences[2].domain == 0);
    mz_trace_pairs_out out = {.expert = expert, .weight = weight};
    assert_ok(mz_trace_read_pairs(trace, 1, 0, 5, &out, &err), &err);
    static const int kept[5] = {0, 1, 3, 4, 5}; /* row 2 belongs to no sequence */
    for (int t = 0; t < 5; t++)
        for (int j = 0; j < K; j++) {
            assert_int_equal(expert[t * K + j], ids[(kept[t] * LAYERS + 1) * K + j]);
            assert_true(weight[t * K + j] == (j ? 0.25f : 0.75f));
        }
    mz_trace_close(&trace);
    drop_ids(f);
}

/* More than one block: whole sequences of at most 8192 tokens together; a longer one is alone. */
static void long_logs_become_blocks(void **state) {
    fixture *f = *state;
    static const int64_t length[] = {5000, 3192, 1, 9000, 100, 100};
    static const int64_t blocks[] = {8192, 1, 9000, 200};
    const mz_trace_call *calls;
    char table[512] = "token_begin,tokens\n", path[400], header[128];
    int64_t total = 0, before = 0;
    for (int i = 0; i < COUNT_OF(length); i++) {
        snprintf(table + strlen(table), 64, "%d,%d\n", (int)total, (int)length[i]);
        total += length[i];
    }
    put_text(f, "s.csv", table);
    int n = snprintf(header, sizeof header,
                     "{'descr': '<i4', 'fortran_order': False, 'shape': (%d, 1, 1)}\n", (int)total);
    unsigned char *bytes = calloc(1, 10 + (size_t)n + (size_t)total * 4);
    assert_non_null(bytes);
    memcpy(bytes, "\x93NUMPY\x01", 7);
    bytes[8] = (unsigned char)n;
    memcpy(bytes + 10, header, (size_t)n);
    for (int64_t t = 0; t < total; t++)
        bytes[10 + n + 4 * t] = (unsigned char)(t % 7);
    write_bytes(file(f, "ids.npy", path), bytes, 10 + (size_t)n + (size_t)total * 4);
    free(bytes);
    f->options.experts = 7;
    f->options.sequences = file(f, "s.csv", path);
    mz_trace *trace = imported(f, &mz_import_npy_ids, "ids.npy");
    assert_int_equal(mz_trace_calls(trace, &calls), 4);
    for (int i = 0; i < 4; i++) {
        int64_t count[7] = {0};
        assert_int_equal(calls[i].tokens, blocks[i]);
        assert_int_equal(calls[i].micro_batch, i);
        counts_of(trace, i, count, 7);
        for (int e = 0; e < 7; e++) { /* how many t in [before, before + tokens) have t % 7 == e */
            int64_t wanted = 0;
            for (int64_t t = before; t < before + blocks[i]; t++)
                wanted += t % 7 == e;
            assert_int_equal(count[e], wanted);
        }
        before += blocks[i];
    }
    mz_trace_close(&trace);
}

static void ids_refused(void **state) {
    fixture *f = *state;
    const mz_importer *importer = &mz_import_npy_ids;
    static const char *const all = "first_row,num_tokens\n0,6\n";
    static const char *const tables[][2] = {
        {"first_row,num_tokens\n0,4\n3,3\n", "line 3: rows 3 to 5 overlap"},
        {"first_row,num_tokens\n0,7\n", "line 2: num_tokens is '7'"},
        {"first_row,num_tokens\n2,5\n", "line 2: rows 2 to 6"},
        {"first_row,num_tokens\n0,0\n", "line 2: rows 0 to -1"},
        {"first_row,num_tokens\n0\n", "line 2: the header has 2 columns"},
        {"first_row,num_tokens\nx,3\n", "line 2: first_row is 'x'"},
        {"first_row,other\n0,6\n", "no column named num_tokens"},
        {"row,num_tokens\n0,6\n", "no column named first_row (with num_tokens) or token_begin"},
    };
    for (int i = 0; i < COUNT_OF(tables); i++) {
        put_ids(f, tables[i][0]);
        refused(f, importer, "ids.npy", tables[i][1]);
        drop_ids(f);
    }
    put_ids(f, all);
    f->options.experts = 3;
    refused(f, importer, "ids.npy", "[0, 1, 1]: expert id 3 is not below");
    f->options.experts = -1;
    refused(f, importer, "ids.npy", "pass --experts");
    f->options.experts = 4;
    f->options.top_k = 3;
    refused(f, importer, "ids.npy", "top-2 in the file, but --top-k 3");
    f->options.top_k = -1;
    f->options.phase = "training";
    refused(f, importer, "ids.npy", "--phase: 'training' is not one of train, prefill, decode");
    f->options.phase = NULL;
    float weight[24] = {0};
    weight[13] = -0.5f;
    put_npy(f, "w.npy", "<f4", "(6, 2, 2)", weight, sizeof weight);
    refused(f, importer, "ids.npy", "[3, 0, 1]: weight -0.5 is not finite");
    weight[13] = 0;
    memcpy(weight + 20, (unsigned char[]){0, 0, 0xc0, 0x7f}, 4);
    put_npy(f, "w.npy", "<f4", "(6, 2, 2)", weight, sizeof weight);
    refused(f, importer, "ids.npy", "[5, 0, 0]: weight");
    put_npy(f, "w.npy", "<f4", "(6, 2, 1)", weight, 48);
    refused(f, importer, "ids.npy", "not a float array [6, 2, 2]");
    drop_ids(f);
    f->options.weights = f->options.sequences = NULL;
    const int8_t unused[4] = {0, 1, 2, -1}, twice[4] = {0, 1, 2, 2};
    put_npy(f, "ids.npy", "|i1", "(1, 2, 2)", unused, 4);
    refused(f, importer, "ids.npy", "[0, 1, 1]: expert id -1 is negative");
    put_npy(f, "ids.npy", "|i1", "(1, 2, 2)", twice, 4);
    refused(f, importer, "ids.npy", "[0, 1, 1]: expert id 2 stands twice");
    put_npy(f, "ids.npy", "|u1", "(1, 2, 2)", ids, 5);
    refused(f, importer, "ids.npy", "bytes follow the last of 4 elements");
    put_npy(f, "ids.npy", "|u1", "(3, 2, 2)", ids, 10);
    refused(f, importer, "ids.npy", "the file ends at element 10 of 12");
    put_npy(f, "ids.npy", "|i1", "(4,)", unused, 4);
    refused(f, importer, "ids.npy", "not an integer array [tokens, layers, top_k]");
    refused(f, importer, "none.npy", "none.npy");
}

/* ---- gpt-oss JSON ---------------------------------------------------------------------------- */

static void fingerprints(void **state) {
    fixture *f = *state;
    mz_err err;
    uint16_t expert[8];
    float weight[8];
    const mz_trace_call *calls;
    const mz_trace_sequence *sequences;
    put_text(
        f, "a.json",
        "{\"dataset\": \"x\", \"full_text\": [], \"router_data\": ["
        "{\"token_7\": {\"layer_0\": {\"selected_experts\": [3, 1], \"selected_probs\": [0.75, "
        "0.25]}}},"
        "{\"token_8\": {\"layer_0\": {\"selected_experts\": [0, 2], \"selected_probs\": [0.5, "
        "0.5]}}}]}");
    put_text(f, "b.json",
             "{\"dataset\": \"y\", \"router_data\": [{\"token_0\": {\"layer_0\": "
             "{\"selected_probs\": [1, 0], \"selected_experts\": [2, 3]}}}]}");
    f->options.experts = 4;
    mz_trace *trace = imported(f, &mz_import_gpt_oss_json, "a.json b.json");
    assert_int_equal(mz_trace_calls(trace, &calls), 1);
    assert_int_equal(calls[0].tokens, 3);
    assert_int_equal(mz_trace_sequences(trace, &sequences), 2);
    assert_true(sequences[1].token_begin == 2 && sequences[1].tokens == 1);
    mz_trace_pairs_out out = {.expert = expert, .weight = weight};
    assert_ok(mz_trace_read_pairs(trace, 0, 0, 3, &out, &err), &err);
    static const uint16_t wanted[6] = {3, 1, 0, 2, 2, 3};
    static const float shares[6] = {0.75f, 0.25f, 0.5f, 0.5f, 1, 0};
    assert_memory_equal(expert, wanted, sizeof wanted);
    assert_memory_equal(weight, shares, sizeof shares);
    mz_trace_close(&trace);
    assert_true(recognised(&mz_import_gpt_oss_json, f, "a.json") > 0);
}

static void fingerprints_refused(void **state) {
    fixture *f = *state;
#define LAYER(ids, probs)                                                                          \
    "{\"layer_0\": {\"selected_experts\": " ids ", \"selected_probs\": " probs "}}"
#define TOKEN(n, layer) "{\"token_" n "\": " layer "}"
#define DATA(tokens) "{\"router_data\": [" tokens "]}"
#define GOOD TOKEN("0", LAYER("[0, 1]", "[0.5, 0.5]"))
    static const struct {
        const char *text, *message;
    } cases[] = {
        {DATA(GOOD "," TOKEN("1", LAYER("[0, 4]", "[0.5, 0.5]"))),
         "router_data[1].token_1.layer_0: selected_experts[1]: expert id 4 is not below"},
        {DATA(GOOD "," TOKEN("1", LAYER("[1, 1]", "[0.5, 0.5]"))), "stands twice"},
        {DATA(GOOD "," TOKEN("1", LAYER("[-1, 1]", "[0.5, 0.5]"))), "is negative"},
        {DATA(GOOD "," TOKEN("1", LAYER("[0.5, 1]", "[0.5, 0.5]"))), "is not a whole number"},
        {DATA(GOOD "," TOKEN("1", LAYER("[0, 1]", "[-0.5, 0.5]"))), "selected_probs[0]"},
        {DATA(GOOD "," TOKEN("1", LAYER("[0, 1]", "[0.5, null]"))), "selected_probs[1]"},
        {DATA(GOOD "," TOKEN("1", LAYER("[0]", "[0.5]"))), "must list 2 entries"},
        {DATA(GOOD "," TOKEN("3", LAYER("[0, 1]", "[0.5, 0.5]"))), "token_3 follows token_0"},
        {DATA(GOOD "," TOKEN("1", "{}")), "0 layers, not 1"},
        {DATA(GOOD "," TOKEN("1", "{\"layer_9\": {}}")), "layer_0: not there"},
        {DATA(GOOD ", 7"), "router_data[1]: not an object"},
        {DATA(GOOD "," TOKEN("x", "{}")), "router_data[1]: not an object"},
        {DATA(""), "no token in it"},
        {"{\"other\": 1}", "no router_data"},
        {"[1, 2]", "a.json"},
        {"{\"router_data\": [", "a.json"},
    };
    f->options.experts = 4;
    for (int i = 0; i < COUNT_OF(cases); i++) {
        put_text(f, "a.json", cases[i].text);
        refused(f, &mz_import_gpt_oss_json, "a.json", cases[i].message);
    }
    put_text(f, "b.json", DATA(GOOD));
    refused(f, &mz_import_gpt_oss_json, "b.json a.json", "a.json");
    f->options.experts = -1;
    refused(f, &mz_import_gpt_oss_json, "b.json", "pass --experts");
}

/* ---- LAER ------------------------------------------------------------------------------------ */

static const char laer[] = "rank,method,model_name,layer,iter,token_num\n"
                           "0,FSDP,m-e4k2,0,0,7\n1,FSDP,m-e4k2,0,0,1\n"
                           "2,FSDP,m-e4k2,0,0,5\n3,FSDP,m-e4k2,0,0,3\n"
                           "0,LAER,m-e4k2,0,0,5\n1,LAER,m-e4k2,0,0,2\n"
                           "2,LAER,m-e4k2,0,0,5\n3,LAER,m-e4k2,0,0,4\n";

static void token_log(void **state) {
    fixture *f = *state;
    const mz_trace_call *calls;
    int64_t count[4];
    put_text(f, "t.csv", laer);
    assert_true(recognised(&mz_import_laer_csv, f, "t.csv") > 0);
    refused(f, &mz_import_laer_csv, "t.csv",
            "choose with --method and --model-name one of: FSDP m-e4k2, LAER m-e4k2");
    f->options.method = "FSDP";
    mz_trace *trace = imported(f, &mz_import_laer_csv, "t.csv");
    const mz_trace_facts *facts = mz_trace_facts_of(trace);
    assert_true(facts->ranks == 4 && facts->experts == 4 && facts->layers == 1);
    assert_int_equal(facts->top_k, 2);
    assert_string_equal(facts->name, "m-e4k2");
    assert_int_equal(mz_trace_calls(trace, &calls), 4);
    /* Ranks 0 and 1 compute 8 pairs, exactly their own: tokens stay in blocks of two. */
    static const int64_t block[4][4] = {{4, 0, 0, 0}, {3, 1, 0, 0}, {0, 0, 3, 1}, {0, 0, 2, 2}};
    for (int r = 0; r < 4; r++) {
        counts_of(trace, r, count, 4);
        assert_memory_equal(count, block[r], sizeof count);
        assert_int_equal(calls[r].tokens, 2);
    }
    mz_trace_close(&trace);
    /* Here only all four together do: 5 + 2 + 5 + 4 pairs dealt over four sources in turn. */
    f->options.method = "LAER";
    trace = imported(f, &mz_import_laer_csv, "t.csv");
    static const int64_t whole[4][4] = {{2, 0, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}, {1, 0, 2, 1}};
    for (int r = 0; r < 4; r++) {
        counts_of(trace, r, count, 4);
        assert_memory_equal(count, whole[r], sizeof count);
    }
    mz_trace_close(&trace);
}

static void token_log_refused(void **state) {
    fixture *f = *state;
#define HEAD "rank,method,model_name,layer,iter,token_num\n"
    static const struct {
        const char *text, *message;
    } cases[] = {
        {HEAD "0,A,e4k1,0,0,4\n", NULL},
        {HEAD "0,A,e4k2,0,0,4\n1,A,e4k2,1,0,4\n", "rows are missing or doubled"},
        {HEAD "0,A,e4k2,0,0,4\n1,A,e4k2,0,0,4\n0,A,e4k2,0,0,4\n1,A,e4k2,1,0,4\n",
         "line 4: iteration 0, layer 0, rank 0 a second time"},
        {HEAD "0,A,e4k2,0,0,4\n1,A,e4k2,0,0,5\n", "9 pairs over all ranks"},
        {HEAD "0,A,e4k2,0,0,4\n0,A,e4k2,1,0,6\n", "layer 1: 6 pairs"},
        {HEAD "0,A,e4k2,0,0,-4\n", "line 2: token_num is '-4'"},
        {HEAD "0,A,e4k2,0,0,nan\n", "line 2: token_num is 'nan'"},
        {HEAD "zero,A,e4k2,0,0,4\n", "line 2: rank is 'zero'"},
        {HEAD "0,A,e4k2,0,0\n", "line 2: the header has 6 columns"},
        {HEAD "0,A,model,0,0,4\n", "pass --top-k"},
        {HEAD "0,B,e4k2,0,0,4\n", "no row has --method A"},
        {HEAD, "no row has --method A"},
        {"rank,method,model_name,layer,token_num\n", "no column named iter"},
    };
    f->options.method = "A";
    for (int i = 0; i < COUNT_OF(cases); i++) {
        put_text(f, "t.csv", cases[i].text);
        if (cases[i].message)
            refused(f, &mz_import_laer_csv, "t.csv", cases[i].message);
        else
            mz_trace_close(&(mz_trace *){imported(f, &mz_import_laer_csv, "t.csv")});
        unlink(f->output);
    }
}

/* Every importer of the table has a name and a summary that fit a line, and survives any bytes. */
static void table_is_sound(void **state) {
    fixture *f = *state;
    static const char *const texts[] = {"",
                                        "{",
                                        "rank",
                                        "0:[[",
                                        "\x93NUMPY",
                                        "\x93NUMPY\x01\x00",
                                        "{\"router_data\": []}",
                                        "\xff\xfe\x00\x01"};
    for (int i = 0; mz_importers[i]; i++) {
        assert_true(strlen(mz_importers[i]->name) < 16);
        assert_true(strlen(mz_importers[i]->summary) < 90);
        for (int t = 0; t < COUNT_OF(texts); t++)
            mz_importers[i]->recognise("x", (const unsigned char *)texts[t], strlen(texts[t]));
        for (int t = 1; t < COUNT_OF(texts); t++) {
            put_text(f, "table_iter1_rank0.log", texts[t]);
            f->options.top_k = f->options.experts = 2;
            mz_err err = {0};
            assert_int_equal(import(f, mz_importers[i], "table_iter1_rank0.log", &err), MZ_EINPUT);
            assert_true(err.msg[0] != '\0');
        }
    }
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_FILES(smartmoe_tables),
        WITH_FILES(smartmoe_tables_refused),
        WITH_FILES(smartmoe_array),
        WITH_FILES(smartmoe_array_refused),
        WITH_FILES(ids_with_weights_and_sequences),
        WITH_FILES(long_logs_become_blocks),
        WITH_FILES(ids_refused),
        WITH_FILES(fingerprints),
        WITH_FILES(fingerprints_refused),
        WITH_FILES(token_log),
        WITH_FILES(token_log_refused),
        WITH_FILES(table_is_sound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
