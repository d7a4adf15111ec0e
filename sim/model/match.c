#include "sim/model/match.h"

mz_code mz_model_match(const mz_model *m, const mz_recorded *t, mz_err *err) {
    if (t->experts != m->experts)
        return mz_fail(
            err, MZ_EINPUT,
            "%s has %d experts per layer, model %s has %d: pass --model with a config that "
            "fits the trace (recorded model: %s)",
            t->file, t->experts, m->name, m->experts, t->model);
    if (t->layers != m->moe_layers)
        return mz_fail(err, MZ_EINPUT,
                       "%s has %d MoE layer%s, model %s has %d: pass --model with a config that %s",
                       t->file, t->layers, t->layers == 1 ? "" : "s", m->name, m->moe_layers,
                       t->layers > m->moe_layers
                           ? "fits, or cut the trace with mizan trace cut --layers"
                           : "fits (a copy of its config.json with fewer layers, for example)");
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
