/* Formulas.
 *
 * Rates: a device's products run at peak * gemm_efficiency * speed, kernels that are bound by
 * device memory at bandwidth * memory_efficiency * speed.
 *
 * Tiles: a product is cut into tile_m x tile_n tiles of the output; one tile of depth k takes
 * 2 tile_m tile_n k FLOPs on one SM, at the device's rate divided by its SMs, whether or not rows
 * and columns fill it. Equal tiles run in ceil(tiles / SMs) waves, which is what list scheduling
 * gives. So a group of r rows costs ceil(r / tile_m) tiles per column: with r anywhere, half a tile
 * more on average, x1.125 at 512 rows and x1.5 at 128. In wgrad the output is n x k, the tile count
 * is fixed and the depth is the group's rows: tiles of different length, list-scheduled
 * (schedule.h; Graham, Bounds on multiprocessing timing anomalies, 1969).
 *
 * Floors: operands and results cross device memory once: bf16, 2 bytes. The time is the larger of
 * the two, as tiles of one kernel overlap their loads with others' arithmetic.
 *
 * Depth splitting (library products only): with fewer tiles than SMs a library gives one tile to
 * several SMs, each at least 512 deep, and adds fp32 partial results up through memory. */
#include "sim/cost/cost.h"

#include "sim/cost/schedule.h"
#include "sim/cost/work.h"

#include <math.h>
#include <string.h>

static const double bf16_bytes = 2, partial_bytes = 4, split_depth = 512;

static double product_rate(const mz_device *device) {
    return device->bf16_flops * device->gemm_efficiency * device->speed;
}

double mz_cost_memory(const mz_device *device, double bytes) {
    return bytes / (device->memory_bytes_per_s * device->memory_efficiency * device->speed);
}

double mz_cost_attention(const mz_device *device, double flops, bool backward) {
    double efficiency =
        backward ? device->attention_backward_efficiency : device->attention_efficiency;
    return flops / (device->bf16_flops * efficiency * device->speed);
}

/* Seconds of one tile of depth k on one SM. */
static double tile_time(const mz_device *device, double k) {
    double flops = 2.0 * device->tile_m * device->tile_n * k;
    return flops * device->sms / product_rate(device);
}

double mz_cost_gemm(const mz_device *device, mz_cost_effects effects, double m, double n,
                    double k) {
    double bytes = bf16_bytes * (m * k + k * n + m * n);
    double seconds = 2 * m * n * k / product_rate(device);
    if (!(m > 0 && n > 0 && k > 0))
        return 0;
    if (effects.tiles) {
        double tiles = ceil(m / device->tile_m) * ceil(n / device->tile_n);
        double split = floor(fmin(device->sms / tiles, k / split_depth));
        if (split > 1) {
            seconds = tile_time(device, ceil(k / split));
            bytes += 2 * partial_bytes * split * m * n;
        } else {
            seconds = ceil(tiles / device->sms) * tile_time(device, k);
        }
    }
    return effects.floor ? fmax(seconds, mz_cost_memory(device, bytes)) : seconds;
}

static int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static int64_t aligned(const mz_device *device, int64_t rows) {
    return device->row_alignment > 1
               ? divide_up(rows, device->row_alignment) * device->row_alignment
               : rows;
}

/* Sums that forward, dgrad and wgrad share. */
typedef struct group_sums {
    int64_t rows;      /* of all groups */
    int64_t row_tiles; /* of tile_m rows, padded */
    int32_t used;      /* groups with rows */
} group_sums;

static group_sums sum_groups(const mz_device *device, const int64_t *rows, int32_t groups) {
    group_sums sums = {0};
    for (int32_t g = 0; g < groups; g++) {
        sums.rows += rows[g];
        sums.row_tiles += divide_up(aligned(device, rows[g]), device->tile_m);
        sums.used += rows[g] > 0;
    }
    return sums;
}

static double wgrad_tiles_time(const mz_device *device, const int64_t *rows, int32_t groups,
                               int64_t n, int64_t k) {
    int64_t tiles = divide_up(k, device->tile_m) * divide_up(n, device->tile_n);
    mz_schedule schedule = mz_schedule_start(device->sms);
    double row = tile_time(device, 1);
    for (int32_t g = 0; g < groups; g++)
        if (rows[g] > 0)
            mz_schedule_add(&schedule, tiles, row * (double)aligned(device, rows[g]));
    return mz_schedule_end(&schedule);
}

double mz_cost_grouped_gemm(const mz_device *device, mz_cost_effects effects, mz_gemm_kind kind,
                            const int64_t *rows, int32_t groups, int64_t n, int64_t k,
                            mz_cost_turn *turn) {
    static const mz_work measured[] = {[MZ_GEMM_FORWARD] = MZ_WORK_FORWARD,
                                       [MZ_GEMM_DGRAD] = MZ_WORK_DGRAD,
                                       [MZ_GEMM_WGRAD] = MZ_WORK_WGRAD};
    double tiles_s;
    if (mz_cost_tiles(device, measured[kind], rows, groups, n, k, turn, &tiles_s))
        return tiles_s;
    group_sums sums = sum_groups(device, rows, groups);
    double weights = (double)n * (double)k, seconds;
    if (!effects.tiles) {
        seconds = 2 * (double)sums.rows * weights / product_rate(device);
    } else if (kind == MZ_GEMM_WGRAD) {
        seconds = wgrad_tiles_time(device, rows, groups, n, k);
    } else {
        int64_t tiles = sums.row_tiles * divide_up(n, device->tile_n);
        seconds = (double)divide_up(tiles, device->sms) * tile_time(device, (double)k);
    }
    if (!effects.floor)
        return seconds;
    int32_t written = kind == MZ_GEMM_WGRAD ? groups : sums.used;
    double bytes = bf16_bytes * (written * weights + (double)sums.rows * (double)(n + k));
    return fmax(seconds, mz_cost_memory(device, bytes));
}

mz_code mz_cost_planner(const mz_cluster *cluster, const char *policy, int32_t ranks,
                        int32_t experts, double *seconds, mz_err *err) {
    for (int32_t i = 0; i < cluster->planners; i++) {
        const mz_planner_cost *cost = &cluster->planner[i];
        if (strcmp(cost->policy, policy) == 0) {
            *seconds = cost->fixed_s + cost->per_cell_s * ranks * experts;
            return MZ_OK;
        }
    }
    return mz_fail(err, MZ_EINPUT,
                   "cluster %s has no planning time for policy %s: add it to \"planner\" in the "
                   "profile, or measure one with mizan calibrate",
                   cluster->name, policy);
}
