/* Models and histories made from documented parameters instead of a recorded trace. The values are
 * those that recorded traces show; the comments in synth_profile.c name each.
 * Threads: as synth_model.h. */
#ifndef MIZAN_TRACES_SYNTH_PROFILE_H
#define MIZAN_TRACES_SYNTH_PROFILE_H

#include "traces/synth_history.h"

typedef enum mz_profile {
    MZ_PROFILE_MIXED,      /* pairs: sequences of several text domains */
    MZ_PROFILE_ONE_DOMAIN, /* pairs: one of these domains, more skewed */
    MZ_PROFILE_COLLAPSE,   /* counts: training without balance loss */
    MZ_PROFILE_BALANCED    /* counts: training with a balance bias, MaxVio 0.04 */
} mz_profile;

/* facts: layers, experts, top_k, ranks; sequence: mean tokens of a sequence. */
mz_code mz_profile_model(const mz_app *app, mz_profile profile, const mz_trace_facts *facts,
                         int64_t sequence, uint64_t seed, mz_synth_model *model, mz_err *err);
mz_code mz_profile_history(const mz_app *app, mz_profile profile, const mz_trace_facts *facts,
                           int64_t steps, int64_t tokens, uint64_t seed, mz_synth_history *history,
                           mz_err *err);

#endif
