/* Recorded traces, where they are (MIZAN_TRACES, or shared/traces beside the sources): imported
 * whole and compared with figures that numpy gives for the same files, and with published ones. */
#include "tests/harness.h"

#include "traces/importer.h"
#include "traces/importers/table.h"
#include "traces/info.h"

#include <math.h>

typedef struct fixture {
    char directory[256], output[300], traces[1024];
    mz_app app;
    mz_import_options options;
    mz_import_report report;
} fixture;

static int setup(void **state) {
    static fixture f;
    const char *traces = getenv("MIZAN_TRACES");
    f = (fixture){.app = {.log = mz_log_make(NULL, -1), .version = "0"},
                  .options = {.experts = -1,
                              .top_k = -1,
                              .hidden = -1,
                              .intermediate = -1,
                              .step_stride = -1,
                              .weights_normalized = -1}};
    snprintf(f.traces, sizeof f.traces, "%s",
             traces && *traces ? traces : MZ_SOURCE_DIR "/../shared/traces");
    make_directory(f.directory, sizeof f.directory);
    snprintf(f.output, sizeof f.output, "%s/out.h5", f.directory);
    *state = &f;
    return 0;
}

static int teardown(void **state) {
    remove_directory(((fixture *)*state)->directory);
    return 0;
}

/* Path of a recorded file; skips the test where it is absent. */
static char *recorded(const fixture *f, const char *name) {
    char *path = NULL;
    if (asprintf(&path, "%s/%s", f->traces, name) < 0)
        fail_msg("out of memory");
    if (access(path, R_OK) != 0) {
        print_message("skipped: no %s (set MIZAN_TRACES)\n", path);
        free(path);
        skip();
    }
    return path;
}

static mz_trace *imported(fixture *f, const mz_importer *importer, char **files, int count) {
    mz_err err = {0};
    mz_trace *trace = NULL;
    mz_trace_write_options write = {.deflate = 1, .half_weights = true};
    f->options.phase = importer->phase ? importer->phase : "decode";
    assert_ok(
        importer->import(&f->app, files, count, &f->options, f->output, &write, &f->report, &err),
        &err);
    for (int i = 0; i < count; i++)
        free(files[i]);
    assert_ok(mz_trace_open(f->output, &trace, &err), &err);
    return trace;
}

static void near(double value, double wanted, double relative) {
    if (!(fabs(value - wanted) <= relative * fabs(wanted)))
        fail_msg("%.9g is not %.9g", value, wanted);
}

static mz_trace_info info_of(fixture *f, mz_trace *trace, int64_t from_step, int32_t ranks) {
    mz_trace_info info;
    mz_err err;
    mz_info_options options = {.ranks = ranks, .from_step = from_step, .to_step = INT64_MAX};
    assert_ok(mz_trace_info_read(&f->app, trace, &options, &info, &err), &err);
    return info;
}

/* All 501 snapshots; digest = sum of count x (1 + step index mod 7) x (1 + layer) x (1 + rank) x
 * (1 + micro-batch) x (1 + expert). */
static void smartmoe_history(void **state) {
    fixture *f = *state;
    mz_err err;
    const mz_trace_call *calls;
    char *file = recorded(f, "smartmoe-training-history/"
                             "counts_iter_layer_rank_microbatch_expert.u16.npy.xz");
    f->options.top_k = 2;
    mz_trace *trace = imported(f, &mz_import_smartmoe_npy, &file, 1);
    int64_t count = mz_trace_calls(trace, &calls), digest = 0, expert[32];
    assert_int_equal(count, 501 * 4 * 24 * 16);
    for (int64_t i = 0; i < count; i++) {
        memset(expert, 0, sizeof expert);
        assert_ok(mz_trace_add_counts(trace, i, expert, &err), &err);
        assert_int_equal(calls[i].step % 10, 1);
        int64_t step = (1 + (calls[i].step - 1) / 10 % 7) * (1 + calls[i].layer) *
                       (1 + calls[i].rank) * (1 + calls[i].micro_batch);
        for (int e = 0; e < 32; e++)
            digest += expert[e] * (1 + e) * step;
    }
    assert_true(digest == 59044633347441);
    assert_int_equal(f->report.pairs, 3152019456);
    assert_int_equal(f->report.tokens, 501 * 4 * 16 * 2048);
    assert_int_equal(calls[count - 1].step, 5001);
    mz_trace_info info = info_of(f, trace, 501, 16);
    assert_int_equal(info.steps, 451);
    near(info.mean[0], 11.667207005987853, 1e-9);
    near(info.low[0], 4.55247264109271, 1e-9);
    near(info.high[0], 15.60666996518154, 1e-9);
    near(info.mean[2], 2.370660313959835, 1e-9);
    near(info.mean[3], 0.797357076838205, 1e-9);
    near(info.mean[4], 0.5860951361635175, 1e-9);
    near(info.mean[5], 0.5, 1e-9);
    near(info.mean[7], 11.728394017075047, 1e-9);
    near(info.mean[8], 6.210945868086832, 1e-9);
    near(info.high[9], 8.912841796875, 1e-9);
    mz_trace_info_free(&info);
    mz_trace_close(&trace);
}

static void smartmoe_tables(void **state) {
    fixture *f = *state;
    static const char *const names[] = {"1_rank0",    "1_rank1",    "11_rank0",   "11_rank1",
                                        "1001_rank0", "1001_rank1", "5001_rank0", "5001_rank1"};
    char *files[8], name[128];
    mz_err err;
    const mz_trace_call *calls;
    for (int i = 0; i < 8; i++) {
        snprintf(name, sizeof name, "smartmoe-training-history/original-sample/table_iter%s.log",
                 names[i]);
        files[i] = recorded(f, name);
    }
    f->options.top_k = 2;
    mz_trace *trace = imported(f, &mz_import_smartmoe_log, files, 8);
    int64_t count = mz_trace_calls(trace, &calls), digest = 0, expert[32];
    for (int64_t i = 0; i < count; i++) {
        memset(expert, 0, sizeof expert);
        assert_ok(mz_trace_add_counts(trace, i, expert, &err), &err);
        for (int e = 0; e < 32; e++)
            digest += expert[e] * (1 + e) * (1 + calls[i].layer) * (1 + calls[i].micro_batch) *
                      (1 + calls[i].rank) * (1 + calls[i].step % 7);
    }
    assert_int_equal(mz_trace_facts_of(trace)->step_stride, 10);
    assert_int_equal(f->report.pairs, 3145728);
    assert_true(digest == 7429318525);
    mz_trace_close(&trace);
}

/* Sums of id and weight x (1 + token mod `period`) x (1 + layer) x (1 + place). */
static void digest_pairs(mz_trace *trace, int period, int64_t *ids, double *weights) {
    mz_err err;
    const mz_trace_call *calls;
    int64_t count = mz_trace_calls(trace, &calls);
    *ids = 0;
    *weights = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t *expert = calloc((size_t)calls[i].pairs, sizeof *expert);
        float *weight = calloc((size_t)calls[i].pairs, sizeof *weight);
        assert_true(expert && weight);
        mz_trace_pairs_out out = {.expert = expert, .weight = weight};
        assert_ok(mz_trace_read_pairs(trace, i, 0, calls[i].tokens, &out, &err), &err);
        for (int64_t p = 0; p < calls[i].pairs; p++) {
            int64_t factor =
                (1 + (calls[i].token_begin + p / 4) % period) * (1 + calls[i].layer) * (1 + p % 4);
            *ids += expert[p] * factor;
            *weights += (double)weight[p] * (double)factor;
        }
        free(expert);
        free(weight);
    }
}

static void gpt_oss_array(void **state) {
    fixture *f = *state;
    const mz_trace_sequence *sequences;
    char *file = recorded(f, "gpt-oss-20b/ids.npy.xz");
    char *weights = recorded(f, "gpt-oss-20b/weights.npy.xz");
    char *bounds = recorded(f, "gpt-oss-20b/sequences.csv");
    f->options.experts = 32;
    f->options.weights = weights;
    f->options.sequences = bounds;
    mz_trace *trace = imported(f, &mz_import_npy_ids, &file, 1);
    free(weights);
    free(bounds);
    int64_t ids;
    double sum;
    digest_pairs(trace, 11, &ids, &sum);
    assert_true(ids == 44829148520);
    near(sum, 651004864.0475464, 1e-9); /* half in, half out: exact */
    assert_int_equal(f->report.tokens, 162219);
    assert_int_equal(f->report.skipped, 0);
    assert_int_equal(mz_trace_sequences(trace, &sequences), 494);
    assert_true(sequences[493].token_begin == 162011 && sequences[493].tokens == 208);
    assert_true(mz_trace_facts_of(trace)->weights_normalized);
    mz_trace_info info = info_of(f, trace, 0, 8);
    near(info.mean[0], 2.6065216363886683, 1e-9);
    near(info.low[0], 1.913709244909659, 1e-9);
    near(info.high[0], 3.898285650879367, 1e-9);
    near(info.mean[1], 0.08145380113714588, 1e-9);
    near(info.mean[2], 0.7229510743500343, 1e-9);
    near(info.mean[3], 0.4045957130740953, 1e-9);
    near(info.mean[4], 0.9163240977294236, 1e-9);
    near(info.mean[5], 0.09375, 1e-9);
    mz_trace_info_free(&info);
    mz_trace_close(&trace);
}

static void gpt_oss_files(void **state) {
    fixture *f = *state;
    static const char *const names[] = {"gpqa_main__Astrophysics", "mmlu_test__anatomy",
                                        "tulu3_persona_if__instruction-following"};
    char *files[3], name[160];
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "gpt-oss-20b/original-sample/%s__False_False_examples.json.xz",
                 names[i]);
        files[i] = recorded(f, name);
    }
    mz_trace *trace = imported(f, &mz_import_gpt_oss_json, files, 3);
    int64_t ids;
    double sum;
    digest_pairs(trace, 1, &ids, &sum);
    assert_int_equal(f->report.tokens, 1533);
    assert_int_equal(ids, 71388766);
    near(sum, 1017959.3679199219, 1e-4); /* stored in half precision */
    assert_int_equal(mz_trace_facts_of(trace)->experts, 32);
    mz_trace_close(&trace);
}

/* Mean over layer calls of max/mean over the 32 ranks: as published, for the two static runs and
 * the four of the balancers, and to the last digit by numpy where it was asked (else 0). */
static void laer_token_log(void **state) {
    fixture *f = *state;
    static const struct {
        const char *method, *model;
        double published, imbalance;
        int layers, top_k;
    } runs[] = {
        {"FSDP", "mixtral-8x7b-e16k4", 1.729, 1.7287845187717015, 24, 4},
        {"FSDP", "mixtral-8x7b-e8k2", 1.664, 1.6638357162475585, 32, 2},
        {"FLEX", "mixtral-8x7b-e16k4", 1.657, 1.6566708670722115, 24, 4},
        {"FLEX", "mixtral-8x7b-e8k2", 1.503, 0, 32, 2},
        {"LAER", "mixtral-8x7b-e16k4", 1.288, 1.2881770451863608, 24, 4},
        {"LAER", "mixtral-8x7b-e8k2", 1.413, 0, 32, 2},
    };
    for (int i = 0; i < COUNT_OF(runs); i++) {
        char *file = recorded(f, "laer-moe-training-rank-tokens/token_analysis_backup.csv.xz");
        f->options.method = runs[i].method;
        f->options.model_name = runs[i].model;
        mz_trace *trace = imported(f, &mz_import_laer_csv, &file, 1);
        const mz_trace_facts *facts = mz_trace_facts_of(trace);
        const mz_trace_call *calls;
        int64_t count = mz_trace_calls(trace, &calls);
        assert_int_equal(facts->layers, runs[i].layers);
        assert_int_equal(facts->top_k, runs[i].top_k);
        assert_true(facts->experts == 32 && facts->ranks == 32);
        for (int64_t c = 0; c < count; c++)
            assert_int_equal(calls[c].tokens, 16384);
        mz_trace_info info = info_of(f, trace, 0, 0);
        near(info.mean[8], runs[i].published, 5e-4 / runs[i].published); /* half a digit */
        if (runs[i].imbalance > 0)
            near(info.mean[8], runs[i].imbalance, 1e-9);
        mz_trace_info_free(&info);
        mz_trace_close(&trace);
    }
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_FILES(smartmoe_history), WITH_FILES(smartmoe_tables), WITH_FILES(gpt_oss_array),
        WITH_FILES(gpt_oss_files),    WITH_FILES(laer_token_log),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
