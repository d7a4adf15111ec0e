#include "sim/model/match.h"

mz_code mz_model_match(const mz_model *m, const mz_recorded *t, mz_err *err) {
    if (t->experts != m->experts)
        return mz_fail(
            err, MZ_EINPUT,
            "%s has %d experts per layer, model %s has %d: pass --model with a config that "
            "fits the trace (recorded model: %s)",
            t->file, t->experts, m->name, m->experts, t->model);
    if (t->layers != m->moe_layers)
        return mz_fail(
            err, MZ_EINPUT,
            "%s has %d MoE layers, model %s has %d: pass --model with a config that fits, "
            "or cut the trace with mizan trace cut --layers",
            t->file, t->layers, m->name, m->moe_layers);
    if (t->top_k > 0 && m->top_k > 0 && t->top_k != m->top_k)
        return mz_fail(err, MZ_EINPUT,
                       "%s has top-%d routing, model %s top-%d: pass --model that fits", t->file,
                       t->top_k, m->name, m->top_k);
    if (t->hidden > 0 && t->hidden != m->hidden)
        return mz_fail(err, MZ_EINPUT,
                       "%s was recorded at hidden size %lld, model %s has %lld: pass "
                       "--model that fits",
                       t->file, (long long)t->hidden, m->name, (long long)m->hidden);
    return MZ_OK;
}
