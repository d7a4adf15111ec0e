#include "traces/describe.h"

#include "common/base/digest.h"
#include "common/io/json.h"
#include "traces/schema.h"

#include <stdio.h>

mz_code mz_trace_describe(const mz_trace *trace, const char *path, bool reshaped, bool digest,
                          json_t **json, mz_err *err) {
    const mz_trace_facts *t = mz_trace_facts_of(trace);
    char hex[MZ_DIGEST_TEXT], text[MZ_DIGEST_TEXT + 8] = "";
    *json = NULL;
    if (digest) {
        const mz_code code = mz_digest_file(path, hex, err);
        if (code != MZ_OK)
            return code;
        snprintf(text, sizeof text, "sha256:%s", hex);
    }
    *json = json_pack("{s:o, s:o, s:o, s:s, s:s, s:i, s:i, s:i, s:i, s:I, s:b}", "path",
                      mz_json_text(path), "model", mz_json_text(t->name), "source",
                      mz_json_text(t->source), "kind", mz_kind_names[t->kind], "phase",
                      mz_phase_names[t->phase], "ranks", t->ranks, "layers", t->layers, "experts",
                      t->experts, "top_k", t->top_k, "step_stride", (json_int_t)t->step_stride,
                      "reshaped", (int)reshaped);
    if (*json && (!digest || json_object_set_new(*json, "digest", json_string(text)) == 0))
        return MZ_OK;
    json_decref(*json);
    *json = NULL;
    return mz_fail_nomem(err, "the trace's description");
}
