/* In place of the host backend, which needs OpenBLAS: a machine with a GPU need not have it. */
#include "kernels/backend.h"

static mz_kstatus refuse(mz_kernels *k, const mz_kernels_options *options) {
    (void)options;
    return mz_kernels_fail(k, MZ_K_EHARDWARE, "this build has no host backend");
}

const mz_backend_ops mz_host_ops = {.name = "host", .open = refuse};
