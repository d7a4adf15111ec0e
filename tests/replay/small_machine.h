/* The host as a small calibration of two ranks in this process takes it. */
#ifndef MIZAN_TESTS_REPLAY_SMALL_MACHINE_H
#define MIZAN_TESTS_REPLAY_SMALL_MACHINE_H

#include "replay/calibrate.h"
#include "replay/kernel_code.h"
#include "tests/harness.h"

typedef struct small_machine {
    mz_transport *transport;
    mz_kernels *kernels;
    mz_calibration_options options;
} small_machine;

/* MZ_OK, or what failed; closes in either case. */
static inline mz_code small_machine_open(small_machine *m, int32_t threads, int32_t rounds,
                                         int64_t pool_bytes, mz_err *err) {
    const mz_transport_options to = {.name = "local", .ranks = 2, .timeout_s = 10};
    const mz_kernels_options ko = {.backend = MZ_BACKEND_HOST, .threads = threads, .streams = 1};
    char why[256] = "";
    *m = (small_machine){.options = mz_calibration_defaults()};
    m->options.rounds = rounds;
    m->options.pool_bytes = pool_bytes;
    const mz_code code = mz_transport_open(&to, &m->transport, err);
    if (code != MZ_OK)
        return code;
    const mz_kstatus status = mz_kernels_open(&ko, &m->kernels, why, sizeof why);
    if (status != MZ_K_OK)
        return mz_fail(err, mz_kstatus_code(status), "%s", why);
    return mz_transport_attach(m->transport, m->kernels, err);
}

static inline void small_machine_close(small_machine *m) {
    mz_kernels_close(&m->kernels);
    mz_transport_close(&m->transport);
}

#endif
