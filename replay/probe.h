/* The machine's speed, told by one small fixed product: a shared machine runs slower and faster
 * from second to second for reasons that are not the step's. Calibration keeps the probe's median
 * beside its samples, a replay takes a probe before every step that it records; `mizan check`
 * compares the two (analysis/check.h). Not thread-safe; collective: all processes of the transport
 * together. */
#ifndef MIZAN_REPLAY_PROBE_H
#define MIZAN_REPLAY_PROBE_H

#include "common/base/rng.h"
#include "replay/transport.h"

typedef struct mz_probe mz_probe;

/* Operands of what is timed: a bf16 value from 1/8 to below 2, of either sign; two of them read as
 * fp32 are such a value as well. */
static inline uint16_t mz_probe_operand(mz_rng *rng) {
    return (uint16_t)(0x3e00u + (mz_rng_u32(rng) & 0x81ffu));
}

/* Both outlive the probe. About 6 MiB of the context's memory, of no heap. MZ_ENOMEM. */
mz_code mz_probe_create(mz_kernels *kernels, mz_transport *transport, mz_probe **probe,
                        mz_err *err);
void mz_probe_free(mz_probe **probe); /* NULL is allowed */

/* *seconds: of eight products of 128 rows with weights of 512 x 512, bf16, all processes at once,
 * the mean over processes; once untimed before it, so that what ran before does not
 * matter. Some 5 ms on two cores; accelerators repeat it. */
mz_code mz_probe_run(mz_probe *probe, double *seconds, mz_err *err);
const double *
mz_probe_ranks(const mz_probe *probe); /* [ranks] seconds of the last run, by process */

#endif
