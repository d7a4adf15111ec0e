/* Kinds of work that are measured one by one: the operations of kernels/kernels.h that an MoE
 * layer's step runs (replay/README.md). `mizan calibrate` fills a profile's "measured" table by
 * these names; sim/cost answers by them. */
#ifndef MIZAN_SIM_CLUSTER_WORK_H
#define MIZAN_SIM_CLUSTER_WORK_H

#include <stdbool.h>

typedef enum mz_work {                          /* what rows and cols are */
                       MZ_WORK_GROUP_PAIRS,     /* pairs, experts */
                       MZ_WORK_ARRANGE,         /* pair numbers, 1 */
                       MZ_WORK_INVERT,          /* pair numbers, 1 */
                       MZ_WORK_PACK,            /* rows written, values of a row; more: tokens
                                                   that they are of */
                       MZ_WORK_PACK_SCALED,     /* the same, times the pair's weight */
                       MZ_WORK_GATHER,          /* rows of saved activations side by side, the
                                                   same sizes */
                       MZ_WORK_COMBINE,         /* rows read, values of a row */
                       MZ_WORK_ROW_NORMS,       /* rows, values of a row */
                       MZ_WORK_SCORE,           /* pairs, 1 */
                       MZ_WORK_SELECT,          /* pairs, experts */
                       MZ_WORK_SWIGLU_FORWARD,  /* rows, I */
                       MZ_WORK_SWIGLU_BACKWARD, /* rows, I */
                       MZ_WORK_CONVERT,         /* 1, values */
                       MZ_WORK_ADD,             /* buffers added to one, values; an fp32
                                                   value counts as two */
                       MZ_WORK_COPY,            /* lanes, bytes */
                       MZ_WORK_SEND,            /* the same, of rows that have just been packed */
                       MZ_WORK_EXCHANGE,        /* the same between processes: what each sends
                                                   while each receives as much */
                       MZ_WORK_ZERO,            /* 1, bytes */
                       MZ_WORK_UPDATE,          /* matrices, values of one; AdamW, then
                                                   one kind for every optimizer in the
                                                   order of mz_optimizer_rule */
                       MZ_WORK_FORWARD = MZ_WORK_UPDATE + 8, /* products: rows, n, k */
                       MZ_WORK_DGRAD,
                       MZ_WORK_WGRAD,
                       MZ_WORK_UP, /* gate and up with SwiGLU: rows, 2I, H */
                       MZ_WORKS
} mz_work;

static inline bool mz_work_is_product(mz_work work) {
    return work >= MZ_WORK_FORWARD;
}

/* "pack", "update_adamw", "product_forward", ...; NULL beyond MZ_WORKS. */
const char *mz_work_name(mz_work work);

#endif
