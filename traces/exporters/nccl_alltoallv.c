/* The matrix that nccl-tests' alltoallv_perf reads (NCCL_TESTS_ALLTOALLV_MATRIX_FILE): R lines of R
 * numbers between blanks, number j of line i being the bytes that rank i sends to rank j. It is the
 * dispatch of one layer call under the static placement: every pair of (token, expert) sends one
 * row of hidden x element bytes from the token's rank to the expert's, rank to itself included; the
 * combine is the transposed matrix. */
#include "traces/exporters/common.h"
#include "traces/exporters/table.h"

#include "common/base/arena.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Advances to the wanted micro-batch and layer of the stream's first step; *tokens of that batch.
 */
static mz_code find_call(mz_load_source *loads, const mz_export_options *options,
                         mz_layer_call *call, int64_t *step, int64_t *tokens, mz_err *err) {
    mz_step_head head;
    bool end;
    mz_code code = loads->next_step(loads->self, &head, &end, err);
    if (code)
        return code;
    if (end || options->micro_batch >= head.micro_batches || options->layer >= head.layers)
        return mz_fail(err, MZ_EINPUT,
                       "no layer %" PRId64 " of micro-batch %" PRId64
                       ": the step has %d layers and %d micro-batches",
                       options->layer, options->micro_batch, end ? 0 : head.layers,
                       end ? 0 : head.micro_batches);
    *step = head.step;
    *tokens = 0;
    for (int32_t r = 0; r < loads->ranks; r++)
        *tokens += head.tokens[options->micro_batch * loads->ranks + r];
    do
        code = loads->next_call(loads->self, call, err);
    while (!code && (call->micro_batch != options->micro_batch || call->layer != options->layer));
    return code;
}

typedef struct matrix {
    int64_t *bytes;
    int32_t ranks;
} matrix;

static mz_code write_matrix(void *self, FILE *out, mz_err *err) {
    const matrix *m = self;
    for (int64_t i = 0; i < (int64_t)m->ranks * m->ranks; i++)
        fprintf(out, "%" PRId64 "%c", m->bytes[i], (i + 1) % m->ranks ? ' ' : '\n');
    return MZ_OK;
}

/* The most that one rank sends or receives: what alltoallv_perf's -b and -e must reach. */
static int64_t largest(const int64_t *bytes, int32_t ranks) {
    int64_t most = 0;
    for (int32_t i = 0; i < ranks; i++) {
        int64_t sent = 0, received = 0;
        for (int32_t j = 0; j < ranks; j++) {
            sent += bytes[(int64_t)i * ranks + j];
            received += bytes[(int64_t)j * ranks + i];
        }
        most = sent > most ? sent : most;
        most = received > most ? received : most;
    }
    return most;
}

static mz_code export(mz_app *app, mz_trace *trace, const mz_export_options *options,
                      const char *output, mz_export_report *report, mz_err *err) {
    mz_export_options one = *options;
    mz_stream *stream;
    mz_layer_call call;
    int64_t row_bytes, step = 0, *bytes = NULL;
    one.steps = 1;
    mz_code code = mz_export_loads(trace, &one, &stream, &row_bytes, err);
    if (code)
        return code;
    mz_load_source loads = mz_stream_source(stream);
    code = find_call(&loads, options, &call, &step, &report->tokens, err);
    if (!code) {
        bytes = mz_calloc((size_t)loads.ranks, (size_t)loads.ranks * sizeof *bytes);
        code = bytes ? MZ_OK : mz_fail_nomem(err, "the matrix");
    }
    if (!code)
        code = mz_export_matrix(call.load, row_bytes, bytes, err);
    if (!code)
        code = mz_export_file(output, write_matrix, &(matrix){bytes, loads.ranks}, err);
    if (!code) {
        report->calls = loads.ranks;
        report->pairs = call.load->pairs;
        mz_remark(report->note, sizeof report->note,
                  "step %" PRId64 ", micro-batch %d, layer %d on %d ranks%s, %" PRId64
                  " bytes a row; run NCCL_TESTS_ALLTOALLV_MATRIX_FILE=%s alltoallv_perf -b "
                  "%" PRId64 " -e %" PRId64 " -a 3 on %d GPUs",
                  step, call.micro_batch, call.layer, loads.ranks,
                  mz_stream_reshaped(stream) ? " (re-shaped)" : "", row_bytes, output,
                  largest(bytes, loads.ranks), largest(bytes, loads.ranks), loads.ranks);
    }
    free(bytes);
    mz_stream_close(&stream);
    return code;
}

const mz_exporter mz_export_nccl_alltoallv = {
    .name = "nccl-alltoallv",
    .summary = "bytes between ranks of one dispatch, as nccl-tests' alltoallv_perf reads them",
    .options = "first-step micro-batch layer ranks step-tokens hidden element-bytes seed",
    .export = export,
};
