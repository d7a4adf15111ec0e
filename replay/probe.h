/* The machine's speeds, told by small fixed pieces of work (common/io/speed.h): a shared machine
 * runs slower and faster from second to second for reasons that are not the step's, and its memory
 * other than its arithmetic. Calibration keeps the probes' means beside its samples, a replay takes
 * all of them before every step that it records; `mizan check` compares the two (analysis/check.h).
 * Not thread-safe; collective: all processes of the transport together. */
#ifndef MIZAN_REPLAY_PROBE_H
#define MIZAN_REPLAY_PROBE_H

#include "common/base/rng.h"
#include "common/io/speed.h"
#include "replay/transport.h"

typedef struct mz_probe mz_probe;

/* Operands of what is timed: a bf16 value from 1/8 to below 2, of either sign; two of them read as
 * fp32 are such a value as well. */
static inline uint16_t mz_probe_operand(mz_rng *rng) {
    return (uint16_t)(0x3e00u + (mz_rng_u32(rng) & 0x81ffu));
}

/* Bytes in and out of one call that packs rows: MZ_PROBE_LONG of 4096 rows from memory to memory,
 * MZ_PROBE_SHORT of 128 rows which have just been written. */
#define MZ_PROBE_LONG MZ_SPEED_MEMORY_BYTES
#define MZ_PROBE_SHORT MZ_SPEED_CACHE_BYTES

/* Memory that rows are packed from and to, of the context, `bytes` of each, at least
 * MZ_PROBE_ROOM; values in it are operands as above, but for results. Every call takes the parts
 * that follow those of the call before, so that nothing of a long one is in a cache yet. */
typedef struct mz_probe_room {
    char *in, *out;
    int64_t bytes;
} mz_probe_room;

#define MZ_PROBE_ROOM (INT64_C(4) * MZ_PROBE_LONG / 2)

/* Both outlive the probe, and so does the room that is lent; NULL: 128 MiB of its own. Some 6 MiB
 * besides. All of the context's memory, of no heap. MZ_ENOMEM. */
mz_code mz_probe_create(mz_kernels *kernels, mz_transport *transport, const mz_probe_room *lent,
                        mz_probe **probe, mz_err *err);
void mz_probe_free(mz_probe **probe); /* NULL is allowed */

/* *seconds: the mean over processes, all of which run at once, of
 * - eight products of 128 rows with weights of 512 x 512, bf16; once untimed before it, so that
 *   what ran before does not matter;
 * - 4096 rows of 4 KiB packed from where nobody has been for long to where nobody has; others
 *   untimed before them, for the same reason;
 * - 128 rows of 1 KiB packed, as a phase of a step has it: rows of 16 calls have just been written,
 *   the host is on its own for a moment before each. The median of three times.
 * Some 5 ms each on two cores; accelerators repeat them. */
mz_code mz_probe_run(mz_probe *probe, mz_speed speed, double *seconds, mz_err *err);
/* Between two kernels of a phase the host is busy with lists and buffers while the workers of a
 * host's pool fall asleep: 20 us. */
void mz_probe_work_alone(void);
const double *
mz_probe_ranks(const mz_probe *probe); /* [ranks] seconds of the last run, by process */

#endif
