#include "sim/cost/work.h"

#include "sim/cost/schedule.h"

static const double bf16_bytes = 2;

double mz_work_bytes(mz_work work, int64_t rows, int64_t cols, int64_t tokens) {
    const double n = (double)rows, values = n * (double)cols;
    switch (work) {
    case MZ_WORK_GROUP_PAIRS: /* experts in, order out; count and begin */
        return 12 * n + 16 * (double)cols;
    case MZ_WORK_ARRANGE:
    case MZ_WORK_INVERT:
        return 16 * n;
    case MZ_WORK_PACK:
    case MZ_WORK_PACK_SCALED:
        return 2 * bf16_bytes * values;
    case MZ_WORK_COMBINE:
        return bf16_bytes * (values + (double)tokens * (double)cols);
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
        return 3 * bf16_bytes * values;
    case MZ_WORK_COPY:
        return 2 * (double)cols;
    case MZ_WORK_ZERO:
        return (double)cols;
    default:
        return 0;
    }
}

double mz_cost_work(const mz_device *device, mz_work work, int64_t rows, int64_t cols,
                    double bytes) {
    if (rows <= 0 || cols <= 0 || bytes <= 0)
        return 0;
    const mz_fit *fit = device->measured ? &device->measured->fit[work] : NULL;
    if (!fit || fit->samples == 0)
        return mz_cost_memory(device, bytes);
    const double size[MZ_FIT_SIZES] = {(double)rows, (double)cols, bytes};
    return mz_fit_seconds(fit, work, size) / device->speed;
}

static double tile_seconds(const mz_fit *fit, mz_work work, int64_t m, int64_t n, int64_t k) {
    const double size[MZ_FIT_SIZES] = {(double)m, (double)n, (double)k};
    return mz_fit_seconds(fit, work, size);
}

/* `total` in parts of `most`: so many whole ones, and a rest. */
static void cut(int64_t total, int32_t most, int64_t *whole, int64_t *part, int64_t *rest) {
    *part = most > 0 && most < total ? most : total;
    *whole = total > 0 ? total / *part : 0;
    *rest = total - *whole * *part;
}

bool mz_cost_tiles(const mz_device *device, mz_work work, const int64_t *rows, int32_t groups,
                   int64_t n, int64_t k, double *seconds) {
    const mz_measured *m = device->measured;
    if (!m || m->fit[work].samples == 0)
        return false;
    const mz_fit *fit = &m->fit[work];
    const mz_tiling tiling = m->tiling[work];
    mz_schedule schedule = mz_schedule_start(m->workers);
    int64_t row_tiles, tile_rows, rest_rows, col_tiles, tile_cols, rest_cols;
    cut(n, tiling.cols, &col_tiles, &tile_cols, &rest_cols);
    for (int32_t g = 0; g < groups; g++) {
        /* A weight's gradient is written whether or not there are rows; other products are not. */
        if (rows[g] <= 0 && work != MZ_WORK_WGRAD)
            continue;
        cut(rows[g], tiling.rows, &row_tiles, &tile_rows, &rest_rows);
        const int64_t part[2] = {row_tiles > 0 ? row_tiles : rows[g] <= 0, rest_rows > 0};
        const int64_t depth[2] = {tile_rows, rest_rows};
        for (int i = 0; i < 2; i++) {
            if (part[i] == 0)
                continue;
            mz_schedule_add(&schedule, part[i] * col_tiles,
                            tile_seconds(fit, work, depth[i], tile_cols, k));
            if (rest_cols > 0)
                mz_schedule_add(&schedule, part[i],
                                tile_seconds(fit, work, depth[i], rest_cols, k));
        }
    }
    *seconds = (m->call_s + mz_schedule_end(&schedule)) / device->speed;
    return true;
}

double mz_cost_expert_up(const mz_device *device, mz_cost_effects effects, const int64_t *rows,
                         int32_t groups, int64_t intermediate, int64_t hidden) {
    double seconds;
    int64_t total = 0;
    for (int32_t g = 0; g < groups; g++)
        total += rows[g];
    if (total == 0)
        return 0;
    if (mz_cost_tiles(device, MZ_WORK_UP, rows, groups, 2 * intermediate, hidden, &seconds))
        return seconds;
    return mz_cost_grouped_gemm(device, effects, MZ_GEMM_FORWARD, rows, groups, 2 * intermediate,
                                hidden) +
           mz_cost_memory(device, bf16_bytes * 3 * (double)total * (double)intermediate);
}
