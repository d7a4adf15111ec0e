/* One step of a trace in host memory, so that nothing is read while the clock runs. */
#ifndef MIZAN_REPLAY_STEPS_H
#define MIZAN_REPLAY_STEPS_H

#include "common/base/arena.h"
#include "replay/job.h"

typedef struct mz_replay_step {
    int64_t step; /* as the trace numbers it */
    int32_t micro_batches, layers;
    int64_t tokens;             /* of all ranks and micro-batches */
    const mz_replay_call *call; /* [micro_batches][layers] */
    bool dealt;                 /* pairs were made from counts: no policy may see them */
} mz_replay_step;

typedef struct mz_replay_steps mz_replay_steps;

/* top_k: pairs of a token where only counts are known (>= 1). */
mz_code mz_replay_steps_create(int32_t top_k, mz_replay_steps **steps, mz_err *err);
void mz_replay_steps_free(mz_replay_steps **steps);

/* The source's next step, valid until the next call. *end: there is none. */
mz_code mz_replay_steps_next(mz_replay_steps *steps, const mz_load_source *source,
                             mz_replay_step *step, bool *end, mz_err *err);

#endif
