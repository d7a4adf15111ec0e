/* Time of one memory-bound kernel by what it does. A profile may know a kind better than by its
 * bytes alone; where it does not, a kernel takes its bytes at the device's rate. The kinds are the
 * operations of kernels/kernels.h that an MoE layer's step runs beside its products. Pure
 * functions; seconds per call. */
#ifndef MIZAN_SIM_COST_WORK_H
#define MIZAN_SIM_COST_WORK_H

#include "sim/cluster/cluster.h"
#include "sim/model/optimizer.h"

typedef enum mz_work {                          /* what rows and cols are */
                       MZ_WORK_GROUP_PAIRS,     /* pairs, experts */
                       MZ_WORK_ARRANGE,         /* pair numbers, 1 */
                       MZ_WORK_INVERT,          /* pair numbers, 1 */
                       MZ_WORK_PACK,            /* rows written, values of a row */
                       MZ_WORK_PACK_SCALED,     /* the same; every row times its pair's weight */
                       MZ_WORK_COMBINE,         /* rows read, values of a row */
                       MZ_WORK_ROW_NORMS,       /* rows, values of a row */
                       MZ_WORK_SCORE,           /* pairs, 1 */
                       MZ_WORK_SELECT,          /* pairs, experts */
                       MZ_WORK_SWIGLU_FORWARD,  /* rows, I */
                       MZ_WORK_SWIGLU_BACKWARD, /* rows, I */
                       MZ_WORK_CONVERT,         /* 1, values */
                       MZ_WORK_ADD,             /* 1, values */
                       MZ_WORK_COPY,            /* 1, bytes */
                       MZ_WORK_ZERO,            /* 1, bytes */
                       MZ_WORK_UPDATE, /* matrices, values of one; of MZ_RULE_ADAMW, then one kind
                                          for every rule: mz_work_update */
                       MZ_WORKS = MZ_WORK_UPDATE + MZ_RULE_SGDM + 1
} mz_work;

static inline mz_work mz_work_update(mz_optimizer_rule rule) {
    return (mz_work)(MZ_WORK_UPDATE + (int)rule);
}

/* "pack", "update_adamw", ...: as profiles and reports call it; NULL beyond MZ_WORKS. */
const char *mz_work_name(mz_work work);

/* bytes: that the kernel moves through device memory, the caller's count. Nothing to do (rows, cols
 * or bytes 0) takes no time. */
double mz_cost_work(const mz_device *device, mz_work work, int64_t rows, int64_t cols,
                    double bytes);

#endif
