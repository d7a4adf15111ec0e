#include "analysis/match.h"

#include "sim/model/match.h"

mz_code mz_match_model(const mz_trace *trace, const char *file, const mz_model *m, mz_err *err) {
    const mz_trace_facts *t = mz_trace_facts_of(trace);
    const mz_recorded recorded = {file, t->name, t->experts, t->layers, t->top_k, t->hidden};
    return mz_model_match(m, &recorded, err);
}
