/* The one enumeration of a step's phases: simulator and replay report the same ones, in the order
 * of a step. What runs in each is in replay/README.md and sim/step. */
#ifndef MIZAN_IO_PHASE_H
#define MIZAN_IO_PHASE_H

#include <stdbool.h>

typedef enum mz_phase {
    MZ_PHASE_ATTENTION,
    MZ_PHASE_ROUTER,
    MZ_PHASE_COUNT_EXCHANGE,
    MZ_PHASE_PLANNER,
    MZ_PHASE_WEIGHT_MOVE,
    MZ_PHASE_PACK,
    MZ_PHASE_DISPATCH,
    MZ_PHASE_EXPERTS,
    MZ_PHASE_COMBINE,
    MZ_PHASE_UNPACK,
    MZ_PHASE_DENSE,
    MZ_PHASE_LOSS,
    MZ_PHASE_SCORE,
    MZ_PHASE_BACKWARD_PACK,
    MZ_PHASE_BACKWARD_DISPATCH,
    MZ_PHASE_BACKWARD_EXPERTS,
    MZ_PHASE_BACKWARD_COMBINE,
    MZ_PHASE_BACKWARD_OTHER,
    MZ_PHASE_REPLICA_REDUCE,
    MZ_PHASE_GRADIENT_REDUCE,
    MZ_PHASE_OPTIMIZER,
    MZ_PHASE_PARAMETER_GATHER,
    MZ_PHASE_LAUNCH_WAIT,
    MZ_PHASES
} mz_phase;

const char *mz_phase_name(mz_phase phase); /* "attention", ... ; NULL from MZ_PHASES on */
/* Kernels of the rank itself: no exchange, no planning, no waiting. */
bool mz_phase_computes(mz_phase phase);

#endif
