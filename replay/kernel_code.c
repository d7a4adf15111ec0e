#include "replay/kernel_code.h"

mz_code mz_kstatus_code(mz_kstatus status) {
    static const mz_code codes[] = {[MZ_K_OK] = MZ_OK,
                                    [MZ_K_EINVAL] = MZ_EINTERNAL,
                                    [MZ_K_EHARDWARE] = MZ_EHARDWARE,
                                    [MZ_K_EFAILED] = MZ_EINTERNAL,
                                    [MZ_K_ENOMEM] = MZ_ENOMEM};
    return codes[status];
}

mz_code mz_kernel_code(const mz_kernels *kernels, mz_kstatus status, mz_err *err) {
    const mz_code code = mz_kstatus_code(status);
    return code == MZ_OK ? MZ_OK : mz_fail(err, code, "%s", mz_kernels_error(kernels));
}
