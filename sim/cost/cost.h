/* Time of one kernel on one device. Formulas, each with its source, are in cost.c; every function
 * is a pure function of the device and its arguments. Seconds; rows, sizes and bytes are per call.
 */
#ifndef MIZAN_SIM_COST_COST_H
#define MIZAN_SIM_COST_COST_H

#include "sim/cluster/cluster.h"
#include "sim/model/model.h"

typedef struct mz_cost_effects {
    bool tiles; /* tile and wave quantisation of GEMMs, row alignment; off: FLOPs / rate */
    bool floor; /* floor of weight, gradient and row bytes through device memory */
} mz_cost_effects;

typedef enum mz_gemm_kind { MZ_GEMM_FORWARD, MZ_GEMM_DGRAD, MZ_GEMM_WGRAD } mz_gemm_kind;

/* One product of m x k by k x n in bf16 with fp32 accumulation, by a library that splits the depth
 * over idle SMs when there are few tiles. */
double mz_cost_gemm(const mz_device *device, mz_cost_effects effects, double m, double n, double k);

/* A group's place in the order in which tiles are taken; scratch. */
typedef struct mz_cost_turn {
    int64_t length; /* rows in its tiles */
    int32_t group;
} mz_cost_turn;

/* Grouped GEMM: group g multiplies rows[g] x k by k x n (forward, dgrad) or accumulates the k x n
 * weight gradient over rows[g] rows (wgrad: tile count fixed by n and k, uneven depth). Groups with
 * 0 rows cost nothing (forward, dgrad) or their share of the floor, a memset of the gradient
 * (wgrad). Rows are padded to the device's row alignment. Tiles are list-scheduled over the SMs in
 * group order: exactly while their ends take at most 32 different values, closely beyond.
 * turn: [groups], scratch. O(groups); what a profile has measured: as mz_cost_tiles. */
double mz_cost_grouped_gemm(const mz_device *device, mz_cost_effects effects, mz_gemm_kind kind,
                            const int64_t *rows, int32_t groups, int64_t n, int64_t k,
                            mz_cost_turn *turn);

double mz_cost_memory(const mz_device *device, double bytes); /* memory-bound kernel: bytes moved */
/* flops: of this pass, so the backward's own where `backward`. */
double mz_cost_attention(const mz_device *device, double flops, bool backward);

/* Charged planning time of a policy for R ranks and E experts; MZ_EINPUT when the profile has no
 * entry. */
mz_code mz_cost_planner(const mz_cluster *cluster, const char *policy, int32_t ranks,
                        int32_t experts, double *seconds, mz_err *err);

#endif
