/* Measuring a machine: the time of every kind of work of sim/cluster/work.h over sizes, as the
 * replay calls it, and a model fitted to the samples (GSL). All processes of the transport measure
 * at once, in step, so that what they share (memory bandwidth, clocks) is in the numbers. All
 * samples are taken once per round, in rounds one after another, so that an episode in which a
 * shared machine is slow falls on single rounds of many samples and not on all of one: a sample is
 * the mean over rounds, the fastest and the slowest left out, of the mean over processes. The mean,
 * not the median: a step is made of many kernels and contains such episodes in their proportion.
 * Operands are taken from memory larger than the caches, a different part for every call, but for
 * what the kernel before would just have written; those of
 * up to 15 MiB from blocks of that size, as a replay has them, not from where long ones have huge
 * pages.
 *
 * Shapes are chosen over a grid of powers of two and odd sizes between them, not for one model;
 * `hidden` and `intermediate` may add a model's own. */
#ifndef MIZAN_REPLAY_CALIBRATE_H
#define MIZAN_REPLAY_CALIBRATE_H

#include "common/base/app.h"
#include "common/base/arena.h"
#include "replay/transport.h"
#include "sim/cluster/measured.h"

typedef struct mz_calibration_options {
    int64_t hidden, intermediate; /* further shape; 0: none */
    int32_t rounds;               /* over all samples; >= 3 */
    double limit_s;               /* no round is begun that would end later, were it as long as the
                                     longest so far; three are run in any case */
    int64_t pool_bytes;           /* of each of two pools, inputs and results; at least 1 MiB.
                                     Samples that do not fit are left out. Half as much beside
                                     them, 30 to 120 MiB, is blocks for short parts; none
                                     where that is less */
} mz_calibration_options;

/* The grid without further shapes, seven rounds in 110 s, pools of 256 MiB. */
mz_calibration_options mz_calibration_defaults(void);

/* One message between two processes: seconds = latency_s + bytes / bytes_per_s while all send at
 * once. Within one process: of copies. */
typedef struct mz_wire {
    double latency_s, bytes_per_s;
} mz_wire;

/* The transport is attached to `kernels`. Fills `measured` (samples live in arena) but for its
 * texts. About a minute; says on the log how many rounds there were. MZ_EABORTED once *app->stop is
 * set. */
mz_code mz_calibrate(mz_kernels *kernels, mz_transport *transport,
                     const mz_calibration_options *options, mz_app *app, mz_arena *arena,
                     mz_measured *measured, mz_wire *wire, mz_err *err);

/* The speed alone: probe_s, the probes' means and uneven of `now`, all else as it is. Collective,
 * some fifteen seconds with seven rounds. MZ_EABORTED once *app->stop is set. */
mz_code mz_calibrate_speed(mz_kernels *kernels, mz_transport *transport,
                           const mz_calibration_options *options, mz_app *app, mz_arena *arena,
                           mz_measured *now, mz_err *err);

/* Seconds now over seconds when it was calibrated: of products; of what memory binds; of short rows
 * that lie in a cache. */
typedef struct mz_factors {
    double product, rows, cache;
} mz_factors;

/* calibrate_speed.c: what was measured, as it would be at the speed of `now` (mz_calibrate_speed),
 * whose references it takes; fits anew where a kind's samples have factors of their own. Where
 * either has no time of rows, what memory binds stays as it is; where either has none of a cache,
 * what lies there goes with memory. MZ_EINPUT where `measured` has no probe. MZ_ENOMEM. */
mz_code mz_calibrate_rescale(mz_measured *measured, const mz_measured *now, mz_factors *factors,
                             mz_err *err);

/* fit.c: terms >= 0 that minimise the squared relative errors of the samples (active set over GSL's
 * weighted least squares), then mz_fit_finish. samples >= 1, seconds > 0. */
mz_code mz_fit_terms(mz_fit *fit, mz_work work, mz_err *err);

#endif
