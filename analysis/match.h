/* What commands that take a trace and a model check alike. */
#ifndef MIZAN_ANALYSIS_MATCH_H
#define MIZAN_ANALYSIS_MATCH_H

#include "sim/model/model.h"
#include "traces/trace.h"

/* A trace and a model that disagree are MZ_EINPUT that says what to pass, never a silent remap.
 * file: the trace's name in messages. */
mz_code mz_match_model(const mz_trace *trace, const char *file, const mz_model *model, mz_err *err);

#endif
