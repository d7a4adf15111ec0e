/* Does a recorded routing fit a model? */
#ifndef MIZAN_SIM_MODEL_MATCH_H
#define MIZAN_SIM_MODEL_MATCH_H

#include "sim/model/model.h"

typedef struct mz_recorded {
    const char *file, *model;       /* for messages: what was read, whose routing it says it is */
    int32_t experts, layers, top_k; /* top_k 0: varies */
    int64_t hidden;                 /* 0: unknown */
} mz_recorded;

/* MZ_EINPUT says what differs and what to pass. */
mz_code mz_model_match(const mz_model *model, const mz_recorded *recorded, mz_err *err);

#endif
