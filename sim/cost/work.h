/* Time of one kernel by what it does (sim/cluster/work.h). A profile may know a kind better than by
 * its bytes alone; where it does not, a kernel takes its bytes at the device's rate. Pure
 * functions; seconds per call. */
#ifndef MIZAN_SIM_COST_WORK_H
#define MIZAN_SIM_COST_WORK_H

#include "sim/cluster/cluster.h"
#include "sim/cluster/work.h"
#include "sim/cost/cost.h"
#include "sim/model/optimizer.h"

_Static_assert(MZ_WORK_UPDATE + (int)MZ_RULE_SGDM + 1 == (int)MZ_WORK_FORWARD,
               "one kind of work per optimizer");
static inline mz_work mz_work_update(mz_optimizer_rule rule) {
    return (mz_work)(MZ_WORK_UPDATE + (int)rule);
}

/* Bytes that a kernel of these sizes moves with bf16 rows, each operand once: what calibration and
 * simulator both pass to mz_cost_work, so that they mean the same. more: rows written of
 * MZ_WORK_COMBINE; pairs of MZ_WORK_INVERT, 0: as many as rows. Optimizers' bytes are theirs to say
 * (mz_optimizer_update): 0 here. */
double mz_work_bytes(mz_work work, int64_t rows, int64_t cols, int64_t more);

/* bytes: that the kernel moves through device memory, the caller's count. Nothing to do (rows, cols
 * or bytes 0) takes no time. Measured: O(samples). */
double mz_cost_work(const mz_device *device, mz_work work, int64_t rows, int64_t cols,
                    double bytes);

/* One optimizer's update of `matrices` equal matrices of `values` values: what was measured, else
 * its bytes through memory and its FLOPs at the rate of large products. */
double mz_cost_update(const mz_device *device, mz_optimizer_rule rule, int64_t matrices,
                      int64_t values, double bytes, double flops);

/* Gate and up of experts with SwiGLU in one pass; rows[g] of expert g, weights [2I][H]. Not
 * measured: the product, then gate, up and activation through memory. turn: [groups], scratch. */
double mz_cost_expert_up(const mz_device *device, mz_cost_effects effects, const int64_t *rows,
                         int32_t groups, int64_t intermediate, int64_t hidden, mz_cost_turn *turn);

/* A grouped product of a kind that the profile has measured: its tiles taken in turn by the
 * workers, of the host's those of the groups with the longest ones first. false where it has not.
 * turn: [groups], scratch. O(groups (samples + log groups)). */
bool mz_cost_tiles(const mz_device *device, mz_work work, const int64_t *rows, int32_t groups,
                   int64_t n, int64_t k, mz_cost_turn *turn, double *seconds);

#endif
