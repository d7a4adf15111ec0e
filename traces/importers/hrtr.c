/* Hearth's .hrtr: 24 bytes of header, six little-endian 32-bit numbers (magic "HRTR" as 0x52545248,
 * version 1, layers, experts, k, and once more the layers recorded), then 16-bit ids [tokens]
 * [layers][k], the places of a token in order of rank. No sequences: blocks of tokens become the
 * micro-batches of step 0. */
#include "traces/importers/common.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "common/io/input.h"
#include "traces/datafile.h"

#include <stdlib.h>
#include <string.h>

enum { HEADER = 24 };

typedef struct hrtr_import {
    mz_app *app;
    mz_input *input;
    mz_trace_facts facts;
    mz_block block;
    mz_trace_writer *writer;
    mz_import_report *report;
    unsigned char *bytes; /* of one token */
    int64_t token;
} hrtr_import;

static int recognise(const char *path, const unsigned char *head, size_t size) {
    (void)path;
    return size >= HEADER && memcmp(head, "HRTR", 4) == 0 ? 95 : 0;
}

static mz_code read_header(hrtr_import *in, const char *path, const mz_import_options *options,
                           mz_err *err) {
    unsigned char head[HEADER];
    size_t got = 0;
    mz_code code = mz_input_read(in->input, head, sizeof head, &got, err);
    if (code)
        return code;
    if (got < sizeof head || memcmp(head, "HRTR", 4) != 0)
        return mz_fail(err, MZ_EINPUT, "%s: no .hrtr header of 24 bytes", path);
    uint32_t version = mz_le32(head + 4), model = mz_le32(head + 8), experts = mz_le32(head + 12);
    uint32_t k = mz_le32(head + 16), layers = mz_le32(head + 20);
    if (version != 1)
        return mz_fail(err, MZ_EINPUT, "%s: .hrtr version %u; 1 is read", path, version);
    if (layers < 1 || layers > MZ_LAYERS_MAX || model < layers || model > INT32_MAX ||
        experts < 1 || experts > MZ_EXPERTS_MAX || k < 1 || k > MZ_MAX_TOP_K || k > experts)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %u of %u layers, %u experts and top-%u are not plausible", path, layers,
                       model, experts, k);
    if ((options->experts > 0 && options->experts != experts) ||
        (options->top_k > 0 && options->top_k != k))
        return mz_fail(err, MZ_EINPUT,
                       "%s: %u experts and top-%u in the file, but --experts or --top-k say "
                       "otherwise",
                       path, experts, k);
    in->facts.layers = in->block.layers = (int32_t)layers;
    in->facts.model_layers = (int32_t)model;
    in->facts.experts = (int32_t)experts;
    in->facts.top_k = in->block.top_k = (int32_t)k;
    in->facts.ranks = 1;
    in->block.step_per_block = in->facts.step_meaning != MZ_STEP_NONE;
    mz_import_note(&in->facts, "ids within a token=in order of rank");
    in->bytes = mz_calloc((size_t)layers * k, 2);
    return in->bytes ? MZ_OK : mz_fail_nomem(err, "one token's ids");
}

static mz_code read_token(hrtr_import *in, const char *path, uint16_t *expert, bool *end,
                          mz_err *err) {
    int32_t k = in->facts.top_k, row = in->facts.layers * k;
    size_t got = 0;
    mz_code code = mz_input_read(in->input, in->bytes, (size_t)row * 2, &got, err);
    *end = got == 0;
    if (code || *end)
        return code;
    if (got < (size_t)row * 2)
        return mz_fail(err, MZ_EINPUT, "%s: the file ends within token %lld: it is truncated", path,
                       (long long)in->token);
    for (int32_t i = 0; i < row; i++) {
        uint16_t id = mz_le16(in->bytes + 2 * i);
        const char *fault = mz_id_fault(id, in->facts.experts, expert + i - i % k, i % k);
        if (fault)
            return mz_fail(err, MZ_EINPUT, "%s: token %lld, layer %d, place %d: expert id %u %s",
                           path, (long long)in->token, i / k, i % k, id, fault);
        expert[i] = id;
    }
    in->token++;
    return MZ_OK;
}

static mz_code read_tokens(hrtr_import *in, const char *path, mz_err *err) {
    int64_t row = (int64_t)in->facts.layers * in->facts.top_k;
    bool end = false;
    mz_code code = MZ_OK;
    mz_progress progress = mz_progress_start(&in->app->log, "importing", "tokens", 0);
    while (!code && !end) {
        int64_t tokens = 0, most = mz_block_most(&in->block);
        code = mz_block_begin(&in->block, most, in->writer, in->report, err);
        if (code == MZ_EINPUT)
            mz_err_prefix(err, "%s", path);
        while (!code && !end && tokens < most) {
            code = read_token(in, path, mz_block_expert(&in->block) + tokens * row, &end, err);
            tokens += !code && !end;
        }
        if (!code)
            code = mz_block_end(&in->block, tokens, false, -1, err);
        if (!code)
            code = mz_import_stopped(in->app, err);
        mz_progress_update(&progress, in->token);
    }
    mz_progress_end(&progress);
    return code ? code : mz_block_write(&in->block, in->writer, in->report, err);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "unknown",
                                                .source = "Hearth routing recording",
                                                .router = "unknown",
                                                .kind = MZ_TRACE_PAIRS,
                                                .meaning = MZ_STEP_NONE};
    hrtr_import in = {.app = app, .report = report};
    if (count != 1)
        return mz_fail(err, MZ_EINPUT, "hrtr takes one file, got %d", count);
    mz_code code = mz_import_facts(app, options, &defaults, &in.facts, err);
    if (!code)
        code = mz_input_open(files[0], &in.input, err);
    if (!code)
        code = read_header(&in, files[0], options, err);
    if (!code)
        code = mz_trace_create(output, &in.facts, write, &in.writer, err);
    if (!code)
        code = read_tokens(&in, files[0], err);
    if (!code)
        code = mz_import_close(files[0], report, &in.writer, err);
    if (in.writer)
        mz_trace_writer_abandon(&in.writer);
    if (in.input)
        mz_input_close(&in.input);
    mz_block_free(&in.block);
    free(in.bytes);
    return code;
}

const mz_importer mz_import_hrtr = {
    .name = "hrtr",
    .summary = "Hearth's .hrtr: 16-bit ids [tokens, layers, k] behind a header of 24 bytes",
    .answers = "experts top-k",
    .recognise = recognise,
    .import = import_files,
};
