/* The SmartMoE training history as one array [steps, layers, ranks, micro-batches, experts] of
 * selection counts. Steps were recorded every tenth iteration from 1 on (--step-stride says
 * otherwise); tokens are pairs over top-k. */
#include "traces/importers/common.h"
#include "traces/importers/table.h"

#include "common/base/arena.h"
#include "traces/npy.h"

#include <stdlib.h>
#include <string.h>

enum { RECORDED_STRIDE = 10, CHUNK_COUNTS = 1 << 20 };

static int recognise(const char *path, const unsigned char *head, size_t size) {
    mz_npy_shape shape;
    mz_err err;
    if (mz_npy_parse(path, head, size, &shape, &err))
        return 0;
    return shape.dims == 5 && shape.kind != 'f' ? 60 : 0;
}

static mz_code take_shape(const char *path, const mz_npy_shape *shape,
                          const mz_import_options *options, mz_trace_facts *facts, mz_err *err) {
    const int64_t *extent = shape->extent;
    if (shape->dims != 5 || shape->kind == 'f')
        return mz_fail(err, MZ_EINPUT,
                       "%s: not an integer array [steps, layers, ranks, micro-batches, experts]",
                       path);
    if (shape->elements == 0)
        return mz_fail(err, MZ_EINPUT, "%s: the array is empty", path);
    if (extent[1] > MZ_LAYERS_MAX || extent[2] > MZ_RANKS_MAX || extent[3] > MZ_RANKS_MAX ||
        extent[4] > MZ_EXPERTS_MAX)
        return mz_fail(err, MZ_EINPUT,
                       "%s: the shape is not plausible; the axes must be steps, layers, ranks, "
                       "micro-batches, experts",
                       path);
    facts->layers = (int32_t)extent[1];
    facts->ranks = (int32_t)extent[2];
    facts->step_stride = options->step_stride > 0 ? options->step_stride : RECORDED_STRIDE;
    return mz_import_experts(path, options, extent[4], facts, err);
}

/* The next `each` counts into *count, which grows with what the file really holds. */
static mz_code read_step(mz_npy *npy, int64_t each, int64_t **count, size_t *room, mz_err *err) {
    mz_code code = MZ_OK;
    for (int64_t done = 0, n; done < each && !code; done += n) {
        n = each - done < CHUNK_COUNTS ? each - done : CHUNK_COUNTS;
        if (!mz_grow((void **)count, room, (size_t)(done + n), sizeof **count))
            return mz_fail_nomem(err, "one step of counts");
        code = mz_npy_read_int(npy, *count + done, n, err);
    }
    return code;
}

static mz_code read_steps(mz_app *app, mz_npy *npy, const mz_trace_facts *facts,
                          mz_trace_writer *writer, mz_import_report *report, mz_err *err) {
    int64_t *count = NULL;
    size_t room = 0;
    const int64_t *extent = npy->shape.extent;
    int64_t steps = extent[0], each = npy->shape.elements / steps, token = 0;
    mz_progress progress = mz_progress_start(&app->log, "importing", "steps", steps);
    mz_code code = MZ_OK;
    for (int64_t s = 0; s < steps && !code; s++) {
        code = read_step(npy, each, &count, &room, err);
        mz_counts_step step = {.step = 1 + facts->step_stride * s,
                               .micro_batches = (int32_t)extent[3],
                               .count = count,
                               .batch_stride = extent[4],
                               .rank_stride = extent[3] * extent[4],
                               .layer_stride = extent[2] * extent[3] * extent[4]};
        if (!code) {
            code = mz_counts_write(&step, facts, writer, &token, report, err);
            if (code == MZ_EINPUT)
                mz_err_prefix(err, "%s: index %lld", mz_input_path(npy->input), (long long)s);
        }
        if (!code)
            code = mz_import_stopped(app, err);
        mz_progress_update(&progress, s + 1);
    }
    mz_progress_end(&progress);
    free(count);
    return code ? code : mz_npy_finish(npy, err);
}

static mz_code import_files(mz_app *app, char **files, int count, const mz_import_options *options,
                            const char *output, const mz_trace_write_options *write,
                            mz_import_report *report, mz_err *err) {
    static const mz_import_defaults defaults = {.name = "smartmoe-32e2k",
                                                .source = "SmartMoE artifact, training history",
                                                .licence = "GPL-3.0",
                                                .router = "softmax",
                                                .kind = MZ_TRACE_COUNTS,
                                                .meaning = MZ_STEP_ITERATION};
    mz_npy npy = {0};
    mz_trace_facts facts;
    mz_trace_writer *writer = NULL;
    if (count != 1)
        return mz_fail(err, MZ_EINPUT, "smartmoe-npy takes one file, got %d", count);
    mz_code code = mz_import_facts(app, options, &defaults, &facts, err);
    if (!code)
        code = mz_npy_open(files[0], &npy, err);
    if (!code)
        code = take_shape(files[0], &npy.shape, options, &facts, err);
    if (!code)
        code = mz_trace_create(output, &facts, write, &writer, err);
    if (!code)
        code = read_steps(app, &npy, &facts, writer, report, err);
    if (!code)
        code = mz_import_close(files[0], report, &writer, err);
    if (writer)
        mz_trace_writer_abandon(&writer);
    mz_npy_close(&npy);
    return code;
}

const mz_importer mz_import_smartmoe_npy = {
    .name = "smartmoe-npy",
    .summary =
        "SmartMoE counts [steps, layers, ranks, micro-batches, experts] (.npy); needs --top-k",
    .answers = "experts top-k",
    .phase = "train",
    .recognise = recognise,
    .import = import_files,
};
