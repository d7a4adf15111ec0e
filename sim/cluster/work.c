#include "sim/cluster/work.h"

#include <stddef.h>

const char *mz_work_name(mz_work work) {
    static const char *const names[] = {
        [MZ_WORK_GROUP_PAIRS] = "group_pairs",
        [MZ_WORK_ARRANGE] = "arrange",
        [MZ_WORK_INVERT] = "invert",
        [MZ_WORK_PACK] = "pack",
        [MZ_WORK_PACK_SCALED] = "pack_scaled",
        [MZ_WORK_GATHER] = "gather",
        [MZ_WORK_COMBINE] = "combine",
        [MZ_WORK_ROW_NORMS] = "row_norms",
        [MZ_WORK_SCORE] = "score",
        [MZ_WORK_SELECT] = "select",
        [MZ_WORK_SWIGLU_FORWARD] = "swiglu_forward",
        [MZ_WORK_SWIGLU_BACKWARD] = "swiglu_backward",
        [MZ_WORK_CONVERT] = "convert",
        [MZ_WORK_ADD] = "add",
        [MZ_WORK_COPY] = "copy",
        [MZ_WORK_SEND] = "send",
        [MZ_WORK_EXCHANGE] = "exchange",
        [MZ_WORK_ZERO] = "zero",
        [MZ_WORK_UPDATE] = "update_adamw",
        "update_skewadam",
        "update_adafactor",
        "update_lion",
        "update_muon",
        "update_galore",
        "update_adam8bit",
        "update_sgdm",
        [MZ_WORK_FORWARD] = "product_forward",
        [MZ_WORK_DGRAD] = "product_dgrad",
        [MZ_WORK_WGRAD] = "product_wgrad",
        [MZ_WORK_UP] = "product_up",
    };
    _Static_assert(sizeof names / sizeof names[0] == MZ_WORKS, "one name per kind");
    return (unsigned)work < MZ_WORKS ? names[work] : NULL;
}
