/* Cutting a smaller trace out of a trace. */
#ifndef MIZAN_TRACES_CUT_H
#define MIZAN_TRACES_CUT_H

#include "common/base/app.h"
#include "traces/trace.h"

typedef struct mz_cut_options {
    int64_t first_step, steps;   /* recorded steps by ordinal; steps 0: to the end */
    int32_t first_layer, layers; /* layers 0: to the last; layers are renumbered from 0 */
    int32_t first_rank, ranks;   /* ranks 0: to the last; ranks are renumbered from 0 */
    int64_t max_tokens;          /* stop before more tokens than this; 0: no limit */
} mz_cut_options;

/* Writes what lies in all windows to `output`, tokens renumbered from 0 without gaps. max_tokens
 * ends the trace after the last whole micro-batch of a rank, or sequence of it (kind pairs), that
 * still fits. MZ_EINPUT when a window lies outside the trace or nothing is left; MZ_EABORTED when
 * app->stop is set (no file appears). `app` and `write` may be NULL. */
mz_code mz_trace_cut(mz_app *app, mz_trace *trace, const mz_cut_options *options,
                     const char *output, const mz_trace_write_options *write, mz_err *err);

#endif
