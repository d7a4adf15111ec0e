#include "sim/cost/work.h"

#include "common/base/sort.h"
#include "sim/cost/schedule.h"

static const double bf16_bytes = 2;

double mz_work_bytes(mz_work work, int64_t rows, int64_t cols, int64_t more) {
    const double n = (double)rows, values = n * (double)cols;
    switch (work) {
    case MZ_WORK_GROUP_PAIRS: /* experts in, order out; count and begin */
        return 12 * n + 16 * (double)cols;
    case MZ_WORK_ARRANGE:
        return 16 * n;
    case MZ_WORK_INVERT: /* rows' pairs in, a row for every pair out */
        return 8 * n + 8 * (more > 0 ? (double)more : n);
    case MZ_WORK_PACK: /* of several rows of a token the first one reads it */
    case MZ_WORK_PACK_SCALED:
        return bf16_bytes *
               (values + (double)(more > 0 && more < rows ? more : rows) * (double)cols);
    case MZ_WORK_GATHER:
        return 2 * bf16_bytes * values;
    case MZ_WORK_COMBINE:
        return bf16_bytes * (values + (double)more * (double)cols);
    case MZ_WORK_ROW_NORMS:
        return bf16_bytes * values + 4 * n;
    case MZ_WORK_SCORE: /* weight, norms, score */
        return 20 * n;
    case MZ_WORK_SELECT:
        return 24 * n;
    case MZ_WORK_SWIGLU_FORWARD:
        return 3 * bf16_bytes * values;
    case MZ_WORK_SWIGLU_BACKWARD:
        return 5 * bf16_bytes * values;
    case MZ_WORK_CONVERT: /* fp32 to bf16 */
        return 6 * values;
    case MZ_WORK_ADD:
        return bf16_bytes * (n + 2) * (double)cols;
    case MZ_WORK_COPY:
    case MZ_WORK_SEND:
    case MZ_WORK_EXCHANGE:
        return 2 * (double)cols;
    case MZ_WORK_ZERO:
        return (double)cols;
    default:
        return 0;
    }
}

/* Profiles of earlier versions, without gathers, have packs at a row in for every row out. */
static double bytes_as_measured(const mz_measured *m, mz_work work, int64_t rows, int64_t cols,
                                double bytes) {
    const bool packs = work == MZ_WORK_PACK || work == MZ_WORK_PACK_SCALED;
    return packs && m->fit[MZ_WORK_GATHER].samples == 0
               ? mz_work_bytes(MZ_WORK_GATHER, rows, cols, 0)
               : bytes;
}

double mz_cost_work(const mz_device *device, mz_work work, int64_t rows, int64_t cols,
                    double bytes) {
    if (rows <= 0 || cols <= 0 || bytes <= 0)
        return 0;
    const mz_fit *fit = device->measured ? &device->measured->fit[work] : NULL;
    if (fit && fit->samples == 0) /* profiles of earlier versions */
        fit = &device->measured->fit[work == MZ_WORK_GATHER ? MZ_WORK_PACK
                                     : work == MZ_WORK_SEND ? MZ_WORK_COPY
                                                            : work];
    if (!fit || fit->samples == 0)
        return mz_cost_memory(device, bytes);
    const double size[MZ_FIT_SIZES] = {
        (double)rows, (double)cols, bytes_as_measured(device->measured, work, rows, cols, bytes)};
    return mz_fit_seconds(fit, work, size) / device->speed;
}

double mz_cost_update(const mz_device *device, mz_optimizer_rule rule, int64_t matrices,
                      int64_t values, double bytes, double flops) {
    const mz_work work = mz_work_update(rule);
    const double seconds = mz_cost_work(device, work, matrices, values, bytes);
    if (device->measured && device->measured->fit[work].samples > 0)
        return seconds;
    return seconds + flops / (device->bf16_flops * device->gemm_efficiency * device->speed);
}

/* The tiles of one group behind those that are there. */
static void add_group(mz_schedule *schedule, const mz_measured *m, mz_work work, int64_t rows,
                      int64_t n, int64_t k) {
    const mz_tiling *t = &m->tiling[work];
    const mz_cut side[3] = {mz_cut_side(m, rows, t->rows), mz_cut_side(m, n, t->n),
                            mz_cut_side(m, k, t->k)};
    for (int which = 0; which < 8; which++) {
        double size[MZ_FIT_SIZES];
        int64_t tiles = 1;
        for (int i = 0; i < 3; i++) {
            const int rest = which >> i & 1;
            tiles *= side[i].count[rest];
            size[i] = (double)side[i].part[rest];
        }
        if (tiles > 0)
            mz_schedule_add(schedule, tiles, mz_fit_seconds(&m->fit[work], work, size));
    }
}

static int by_length(const void *one, const void *other) {
    const mz_cost_turn *a = one, *b = other;
    if (a->length != b->length)
        return a->length > b->length ? -1 : 1;
    return (a->group > b->group) - (a->group < b->group);
}

/* The groups that have tiles, in the order in which these are taken; how many. A weight's gradient
 * is written whether or not there are rows; other products are not. */
static int32_t order_groups(const mz_measured *m, mz_work work, const int64_t *rows, int32_t groups,
                            mz_cost_turn *turn) {
    int32_t used = 0;
    for (int32_t g = 0; g < groups; g++)
        if (rows[g] > 0 || work == MZ_WORK_WGRAD)
            turn[used++] = (mz_cost_turn){mz_cut_side(m, rows[g], m->tiling[work].rows).part[0], g};
    if (mz_on_host(m))
        mz_sort_in_place(turn, (size_t)used, sizeof *turn, by_length);
    return used;
}

bool mz_cost_tiles(const mz_device *device, mz_work work, const int64_t *rows, int32_t groups,
                   int64_t n, int64_t k, mz_cost_turn *turn, double *seconds) {
    const mz_measured *m = device->measured;
    if (!m || m->fit[work].samples == 0)
        return false;
    mz_schedule schedule = mz_schedule_start(m->workers);
    const int32_t used = order_groups(m, work, rows, groups, turn);
    for (int32_t i = 0; i < used; i++)
        add_group(&schedule, m, work, rows[turn[i].group], n, k);
    *seconds = (m->call_s + mz_schedule_end_alone(&schedule, m->alone)) / device->speed;
    return true;
}

double mz_cost_expert_up(const mz_device *device, mz_cost_effects effects, const int64_t *rows,
                         int32_t groups, int64_t intermediate, int64_t hidden, mz_cost_turn *turn) {
    double seconds;
    int64_t total = 0;
    for (int32_t g = 0; g < groups; g++)
        total += rows[g];
    if (total == 0)
        return 0;
    if (mz_cost_tiles(device, MZ_WORK_UP, rows, groups, 2 * intermediate, hidden, turn, &seconds))
        return seconds;
    return mz_cost_grouped_gemm(device, effects, MZ_GEMM_FORWARD, rows, groups, 2 * intermediate,
                                hidden, turn) +
           mz_cost_memory(device, bf16_bytes * 3 * (double)total * (double)intermediate);
}
