/* Optimizers' updates, as replay/update.h runs them, with default options: weights, gradient and
 * state of several equal matrices. */
#include "replay/calibrate_inside.h"
#include "replay/update.h"
#include "sim/cost/work.h"

typedef struct update_sizes {
    const mz_optimizer *optimizer;
    int64_t matrices, rows, cols;
} update_sizes;

enum { VALUE = 2, MOST = 16 };

static int64_t weight_bytes(const update_sizes *s) {
    return (VALUE * s->matrices * s->rows * s->cols + 255) / 256 * 256;
}

static mz_update_call call_of(const update_sizes *s, char *in, char *out) {
    return (mz_update_call){.optimizer = s->optimizer,
                            .type = MZ_BF16,
                            .held = s->matrices,
                            .matrices = s->matrices,
                            .rows = s->rows,
                            .cols = s->cols,
                            .step = 2,
                            .seed = 1,
                            .weights = out,
                            .block = out ? out + weight_bytes(s) : NULL,
                            .gradient = in};
}

static mz_kstatus run_update(calibration *c, const void *sizes, char *in, char *out) {
    const mz_update_call call = call_of(sizes, in, out);
    return mz_update_run(c->kernels, &call, c->scratch);
}

/* What the simulator counts of the same update. */
static double traffic(const update_sizes *s) {
    const mz_tensor t = {.rows = s->rows,
                         .cols = s->cols,
                         .count = 1,
                         .tier = MZ_TIER_EXPERT,
                         .bytes_per_value = VALUE,
                         .trainable = true};
    return mz_optimizer_update(s->optimizer, &t, s->matrices, 1, MZ_TEMPORARIES_FUSED)
        .traffic_bytes;
}

static mz_code sample_update(calibration *c, const update_sizes *s, mz_err *err) {
    const int64_t out = weight_bytes(s) +
                        mz_update_block_bytes(s->optimizer, MZ_BF16, s->matrices, s->rows, s->cols);
    const mz_update_call call = call_of(s, c->inputs, c->results);
    double seconds = 0;
    if (weight_bytes(s) > c->options.pool_bytes || out > c->options.pool_bytes)
        return MZ_OK;
    mz_code code = calibrate_scratch(c, mz_update_scratch(c->kernels, &call), err);
    const calibrate_call timed = {
        .run = run_update, .sizes = s, .in_bytes = weight_bytes(s), .out_bytes = out};
    if (code == MZ_OK)
        code = calibrate_time(c, &timed, &seconds, err);
    if (code == MZ_OK)
        calibrate_add(c, mz_work_update(s->optimizer->rule), (double)s->matrices,
                      (double)(s->rows * s->cols), traffic(s), seconds);
    return code;
}

/* Of the optimizers that share a rule, whose kernels are the same, the first one stands for all. */
static bool first_of_rule(const mz_optimizer *const *optimizer, int i) {
    mz_err unsupported;
    if (mz_update_supported(optimizer[i], &unsupported) != MZ_OK)
        return false;
    for (int k = 0; k < i; k++)
        if (optimizer[k]->rule == optimizer[i]->rule &&
            mz_update_supported(optimizer[k], &unsupported) == MZ_OK)
            return false;
    return true;
}

/* Updates that are products themselves take most of a calibration where matrices are large: of
 * those one at a time. */
static int64_t matrices_of(mz_optimizer_rule rule, const int64_t shape[3]) {
    enum { LARGE = 1 << 20 };
    return rule == MZ_RULE_MUON && shape[0] * shape[1] * shape[2] > LARGE ? 1 : shape[0];
}

/* State is read as well as written: what other samples left there may be anything. */
mz_code calibrate_updates(calibration *c, mz_err *err) {
    static const int64_t shapes[][3] = {{1, 256, 256},  {4, 256, 256},   {2, 1024, 512},
                                        {8, 512, 1024}, {2, 2048, 1024}, {4, 1024, 2048}};
    int count = 0;
    const mz_optimizer *const *optimizer = mz_optimizers(&count);
    mz_code code = MZ_OK;
    if (mz_kernels_zero(c->kernels, 0, c->results, (size_t)c->options.pool_bytes) != MZ_K_OK)
        code = calibrate_failed(c, "updates", err);
    for (int i = 0; code == MZ_OK && i < count; i++) {
        const mz_work work = mz_work_update(optimizer[i]->rule);
        if (!first_of_rule(optimizer, i))
            continue;
        code = calibrate_begin(c, work, MOST, err);
        for (size_t k = 0; code == MZ_OK && k < sizeof shapes / sizeof shapes[0]; k++) {
            const update_sizes s = {optimizer[i], matrices_of(optimizer[i]->rule, shapes[k]),
                                    shapes[k][1], shapes[k][2]};
            code = sample_update(c, &s, err);
        }
    }
    return code;
}
