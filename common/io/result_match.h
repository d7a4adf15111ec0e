/* Do a prediction and a measurement belong together? Asked by `mizan check` of two files, and by
 * `mizan replay` before its first step of what it is about to measure. */
#ifndef MIZAN_IO_RESULT_MATCH_H
#define MIZAN_IO_RESULT_MATCH_H

#include "common/io/result_file.h"

/* Roots of result files (mizan-result/1), of which kind, trace, model, cluster.ranks_per_device,
 * settings and the policies of runs are read; transport, machine and the like need not be the same.
 * MZ_EINPUT names the first difference. Pure. */
mz_code mz_result_belong(const json_t *prediction, const json_t *measurement, mz_err *err);

/* Whether a run has what check compares; of: "prediction" or "measurement", for the message. */
mz_code mz_result_detailed(const mz_run_file *run, const char *of, mz_err *err);

#endif
