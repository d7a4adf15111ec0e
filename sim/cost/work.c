#include "sim/cost/work.h"

#include "sim/cost/cost.h"

#include <stddef.h>

const char *mz_work_name(mz_work work) {
    static const char *const names[] = {
        [MZ_WORK_GROUP_PAIRS] = "group_pairs",
        [MZ_WORK_ARRANGE] = "arrange",
        [MZ_WORK_INVERT] = "invert",
        [MZ_WORK_PACK] = "pack",
        [MZ_WORK_PACK_SCALED] = "pack_scaled",
        [MZ_WORK_COMBINE] = "combine",
        [MZ_WORK_ROW_NORMS] = "row_norms",
        [MZ_WORK_SCORE] = "score",
        [MZ_WORK_SELECT] = "select",
        [MZ_WORK_SWIGLU_FORWARD] = "swiglu_forward",
        [MZ_WORK_SWIGLU_BACKWARD] = "swiglu_backward",
        [MZ_WORK_CONVERT] = "convert",
        [MZ_WORK_ADD] = "add",
        [MZ_WORK_COPY] = "copy",
        [MZ_WORK_ZERO] = "zero",
        [MZ_WORK_UPDATE + MZ_RULE_ADAMW] = "update_adamw",
        [MZ_WORK_UPDATE + MZ_RULE_SKEWADAM] = "update_skewadam",
        [MZ_WORK_UPDATE + MZ_RULE_ADAFACTOR] = "update_adafactor",
        [MZ_WORK_UPDATE + MZ_RULE_LION] = "update_lion",
        [MZ_WORK_UPDATE + MZ_RULE_MUON] = "update_muon",
        [MZ_WORK_UPDATE + MZ_RULE_GALORE] = "update_galore",
        [MZ_WORK_UPDATE + MZ_RULE_ADAM8BIT] = "update_adam8bit",
        [MZ_WORK_UPDATE + MZ_RULE_SGDM] = "update_sgdm",
    };
    _Static_assert(sizeof names / sizeof names[0] == MZ_WORKS, "one name per kind");
    return (unsigned)work < MZ_WORKS ? names[work] : NULL;
}

double mz_cost_work(const mz_device *device, mz_work work, int64_t rows, int64_t cols,
                    double bytes) {
    if (rows <= 0 || cols <= 0 || bytes <= 0)
        return 0;
    return mz_cost_memory(device, bytes);
}
