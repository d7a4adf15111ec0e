#include "common/io/memcat.h"

const char *mz_memcat_name(mz_memcat category) {
    static const char *const names[] = {
        [MZ_MEM_WEIGHTS] = "weights",
        [MZ_MEM_GRADIENTS] = "gradients",
        [MZ_MEM_OPTIMIZER_STATE] = "optimizer_state",
        [MZ_MEM_REPLICAS] = "replicas",
        [MZ_MEM_ACTIVATIONS] = "activations",
        [MZ_MEM_TOKEN_BUFFERS] = "token_buffers",
        [MZ_MEM_TEMPORARIES] = "temporaries",
        [MZ_MEM_WORKSPACE] = "workspace",
        [MZ_MEM_COMMUNICATION] = "communication",
        [MZ_MEM_CONTEXT] = "context",
    };
    _Static_assert(sizeof names / sizeof names[0] == MZ_MEM_CATEGORIES, "one name per category");
    return (unsigned)category < MZ_MEM_CATEGORIES ? names[category] : "unknown";
}
