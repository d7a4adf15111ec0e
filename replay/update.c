#include "replay/update.h"

mz_code mz_update_supported(const mz_optimizer *o, mz_err *err) {
    if (o->rule == MZ_RULE_GALORE || o->rule == MZ_RULE_ADAM8BIT || o->rule == MZ_RULE_SGDM)
        return mz_fail(err, MZ_EINPUT,
                       "--optimizer %s: its update has no kernel; a replay takes adamw, "
                       "adamw-bf16, skewadam, adafactor, lion and muon",
                       o->name);
    if (o->rule == MZ_RULE_ADAMW && o->options.moments)
        return mz_fail(err, MZ_EINPUT,
                       "--optimizer %s: the kernels keep moments in fp32; leave out moments=bf16",
                       o->name);
    return MZ_OK;
}

bool mz_update_is_elementwise(const mz_optimizer *o) {
    return o->rule == MZ_RULE_ADAMW || o->rule == MZ_RULE_LION;
}

bool mz_update_has_master(const mz_optimizer *o, mz_dtype type) {
    return type == MZ_BF16 && o->options.master;
}

bool mz_update_is_dithered(const mz_optimizer *o, mz_dtype type) {
    return type == MZ_BF16 && !o->options.master && o->rule != MZ_RULE_ADAFACTOR;
}

/* All but sizes and pointers. */
static mz_update settings_of(const mz_optimizer *o, mz_dtype type) {
    mz_update u = {.rate = 1e-4F, .clip_rms = false, .rounding = MZ_ROUND_DITHER};
    u.type = mz_update_has_master(o, type) ? MZ_F32 : type;
    u.gradient_type = type;
    switch (o->rule) {
    case MZ_RULE_SKEWADAM:
        u.kind = MZ_UPDATE_SKEWADAM;
        u.beta1 = 0.9F;
        u.beta2 = 0.999F;
        u.eps = 1e-8F;
        u.momentum = o->options.experts || o->options.uniform;
        u.factored = u.clip_rms = true;
        break;
    case MZ_RULE_ADAFACTOR:
        u.kind = MZ_UPDATE_ADAFACTOR;
        u.eps = 1e-30F;
        u.factored = u.clip_rms = true;
        u.rounding = MZ_ROUND_NEAREST;
        break;
    case MZ_RULE_LION:
        u.kind = MZ_UPDATE_LION;
        u.beta1 = 0.9F;
        u.beta2 = 0.99F;
        break;
    case MZ_RULE_MUON:
        u.kind = MZ_UPDATE_MUON;
        u.beta1 = 0.95F;
        u.newton_schulz = (int32_t)o->options.iterations;
        u.update_scale = 1;
        break;
    default:
        u.kind = MZ_UPDATE_ADAMW;
        u.beta1 = 0.9F;
        u.beta2 = 0.999F;
        u.eps = 1e-8F;
        u.decay = 0.01F;
        break;
    }
    return u;
}

void mz_update_parts(const mz_optimizer *o, mz_dtype type, int64_t rows, int64_t cols,
                     int64_t part[MZ_UPDATE_STATES]) {
    const mz_update u = settings_of(o, type);
    const bool factored = u.factored && cols > 1, skewed = u.kind == MZ_UPDATE_SKEWADAM;
    const bool adafactor = u.kind == MZ_UPDATE_ADAFACTOR;
    part[0] = mz_update_has_master(o, type) ? rows * cols : 0;
    part[1] = adafactor || (skewed && !u.momentum) ? 0 : rows * cols;
    part[2] = u.kind == MZ_UPDATE_ADAMW || ((skewed || adafactor) && !factored) ? rows * cols : 0;
    part[3] = factored ? rows : 0;
    part[4] = factored ? cols : 0;
}

int64_t mz_update_block_bytes(const mz_optimizer *o, mz_dtype type, int64_t matrices, int64_t rows,
                              int64_t cols) {
    int64_t part[MZ_UPDATE_STATES], values = 0;
    mz_update_parts(o, type, rows, cols, part);
    for (int i = 0; i < MZ_UPDATE_STATES; i++)
        values += part[i];
    return (int64_t)sizeof(float) * matrices * values;
}

mz_update_state mz_update_state_of(const mz_optimizer *o, mz_dtype type, int64_t matrices,
                                   int64_t rows, int64_t cols, void *block) {
    int64_t part[MZ_UPDATE_STATES];
    float *at[MZ_UPDATE_STATES], *next = block;
    mz_update_parts(o, type, rows, cols, part);
    for (int i = 0; i < MZ_UPDATE_STATES; i++) {
        at[i] = part[i] > 0 && block ? next : NULL;
        next = at[i] ? next + matrices * part[i] : next;
    }
    return (mz_update_state){at[0], at[1], at[2], at[3], at[4]};
}

/* The kernel's arguments and, where there are any, the master weights. */
static mz_update arguments(const mz_update_call *c, float **master) {
    mz_update u = settings_of(c->optimizer, c->type);
    const mz_update_state s =
        mz_update_state_of(c->optimizer, c->type, c->held, c->rows, c->cols, c->block);
    const int64_t values = c->first * c->rows * c->cols;
    u.matrices = c->matrices;
    u.rows = c->rows;
    u.cols = c->cols;
    u.step = c->step;
    u.seed = c->seed;
    u.tensor = c->tensor;
    *master = s.master ? s.master + values : NULL;
    u.parameter = *master ? *master : c->weights;
    u.gradient = c->gradient;
    u.m = s.m ? s.m + values : NULL;
    u.v = s.v ? s.v + values : NULL;
    u.row = s.row ? s.row + c->first * c->rows : NULL;
    u.col = s.col ? s.col + c->first * c->cols : NULL;
    return u;
}

size_t mz_update_scratch(const mz_kernels *kernels, const mz_update_call *call) {
    float *master;
    const mz_update u = arguments(call, &master);
    return mz_update_workspace(kernels, &u);
}

mz_kstatus mz_update_run(mz_kernels *kernels, const mz_update_call *call, void *scratch) {
    float *master;
    const mz_update u = arguments(call, &master);
    const mz_kstatus status = mz_update_step(kernels, 0, &u, scratch);
    if (status != MZ_K_OK || !master)
        return status;
    return mz_convert(kernels, 0, call->type, call->weights, MZ_F32, master,
                      call->matrices * call->rows * call->cols);
}
