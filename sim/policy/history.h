/* What was routed before: the loads that policies may look back on. Counts are those of the whole
 * job, [ranks][experts] per MoE layer; a view is one group's rows.
 *
 * Two memories, each kept only as deep as somebody looks: finished steps (sums over micro-batches)
 * and calls (micro-batches of a layer, whichever step they belong to). */
#ifndef MIZAN_SIM_POLICY_HISTORY_H
#define MIZAN_SIM_POLICY_HISTORY_H

#include "common/base/arena.h"
#include "common/base/load.h"

typedef struct mz_history mz_history;

/* group: ranks of one. steps, calls: how far back somebody looks (lag + window - 1); 0: nobody.
 * Everything lives in arena. */
mz_code mz_history_create(mz_arena *arena, int32_t layers, int32_t ranks, int32_t group,
                          int32_t experts, int64_t steps, int64_t calls, mz_history **history,
                          mz_err *err);
/* This call has been planned by everybody: from now on it is the past. Calls come in order of
 * (step, micro-batch, layer). */
void mz_history_add(mz_history *history, const mz_layer_call *call);
void mz_history_end_step(mz_history *history);
/* Group `group` and `layer`: the load of the step (with `by_calls` the call of that layer) `lag`
 * ago, or the mean over `window` of them ending there, or as many as there are; each source's row
 * rounded by largest remainder. NULL before there is any. lag, window >= 1. The load lives until
 * the next view. O(window * group * experts). */
const mz_load *mz_history_view(mz_history *history, bool by_calls, int64_t lag, int64_t window,
                               int32_t group, int32_t layer);

#endif
