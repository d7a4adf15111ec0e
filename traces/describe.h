/* What a result says about the trace that it came from. */
#ifndef MIZAN_TRACES_DESCRIBE_H
#define MIZAN_TRACES_DESCRIBE_H

#include "traces/trace.h"

#include <jansson.h>

/* path: as the user gave it, and where the file is. digest: with the SHA-256 of its bytes, so that
 * a prediction and a measurement are known to be of the same trace. */
mz_code mz_trace_describe(const mz_trace *trace, const char *path, bool reshaped, bool digest,
                          json_t **json, mz_err *err);

#endif
