#include "common/io/phase.h"

#include <stddef.h>

const char *mz_phase_name(mz_phase phase) {
    static const char *const names[] = {
        [MZ_PHASE_ATTENTION] = "attention",
        [MZ_PHASE_ROUTER] = "router",
        [MZ_PHASE_COUNT_EXCHANGE] = "count_exchange",
        [MZ_PHASE_PLANNER] = "planner",
        [MZ_PHASE_WEIGHT_MOVE] = "weight_move",
        [MZ_PHASE_PACK] = "pack",
        [MZ_PHASE_DISPATCH] = "dispatch",
        [MZ_PHASE_EXPERTS] = "experts",
        [MZ_PHASE_COMBINE] = "combine",
        [MZ_PHASE_UNPACK] = "unpack",
        [MZ_PHASE_DENSE] = "dense",
        [MZ_PHASE_LOSS] = "loss",
        [MZ_PHASE_SCORE] = "score",
        [MZ_PHASE_BACKWARD_PACK] = "backward_pack",
        [MZ_PHASE_BACKWARD_DISPATCH] = "backward_dispatch",
        [MZ_PHASE_BACKWARD_EXPERTS] = "backward_experts",
        [MZ_PHASE_BACKWARD_COMBINE] = "backward_combine",
        [MZ_PHASE_BACKWARD_OTHER] = "backward_other",
        [MZ_PHASE_REPLICA_REDUCE] = "replica_reduce",
        [MZ_PHASE_GRADIENT_REDUCE] = "gradient_reduce",
        [MZ_PHASE_OPTIMIZER] = "optimizer",
        [MZ_PHASE_PARAMETER_GATHER] = "parameter_gather",
        [MZ_PHASE_LAUNCH_WAIT] = "launch_wait",
    };
    _Static_assert(sizeof names / sizeof names[0] == MZ_PHASES, "one name per phase");
    return (unsigned)phase < MZ_PHASES ? names[phase] : NULL;
}

bool mz_phase_computes(mz_phase phase) {
    switch (phase) {
    case MZ_PHASE_COUNT_EXCHANGE:
    case MZ_PHASE_PLANNER:
    case MZ_PHASE_WEIGHT_MOVE:
    case MZ_PHASE_DISPATCH:
    case MZ_PHASE_COMBINE:
    case MZ_PHASE_BACKWARD_DISPATCH:
    case MZ_PHASE_BACKWARD_COMBINE:
    case MZ_PHASE_REPLICA_REDUCE:
    case MZ_PHASE_GRADIENT_REDUCE:
    case MZ_PHASE_PARAMETER_GATHER:
    case MZ_PHASE_LAUNCH_WAIT:
        return false;
    default:
        return true;
    }
}
