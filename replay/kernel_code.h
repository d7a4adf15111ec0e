/* What a kernel call says, as one of the project's codes. */
#ifndef MIZAN_REPLAY_KERNEL_CODE_H
#define MIZAN_REPLAY_KERNEL_CODE_H

#include "common/base/err.h"
#include "kernels/kernels.h"

/* Short memory MZ_ENOMEM, no such device or library MZ_EHARDWARE, all else MZ_EINTERNAL. */
mz_code mz_kstatus_code(mz_kstatus status);
/* The same; the message is the context's. */
mz_code mz_kernel_code(const mz_kernels *kernels, mz_kstatus status, mz_err *err);

#endif
