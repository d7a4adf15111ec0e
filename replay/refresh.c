#include "replay/refresh.h"

#include "common/io/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* {"value": number} of a section; as read by mz_cluster_load, units and all. */
static mz_code section_number(const mz_refresh *r, const char *section, const char *key,
                              mz_unit unit, double *value, mz_err *err) {
    mz_json view;
    char where[256];
    snprintf(where, sizeof where, "%.180s: %s.%s", r->path, section, key);
    json_t *object = json_object_get(json_object_get(r->profile, section), key);
    if (!object)
        return mz_fail(err, MZ_EINPUT, "%s is missing: not a hardware profile", where);
    const mz_code code = mz_json_object(object, where, &view, err);
    return code == MZ_OK ? mz_json_quantity(&view, "value", unit, value, err) : code;
}

static mz_code read_measured(mz_refresh *r, mz_arena *arena, mz_err *err) {
    char where[256];
    json_t *object = json_object_get(r->profile, "measured");
    snprintf(where, sizeof where, "%.200s: measured", r->path);
    if (!object)
        return mz_fail(err, MZ_EINPUT, "%s: nothing in it was measured by mizan calibrate",
                       r->path);
    const mz_code code = mz_measured_read(object, where, arena, &r->measured, err);
    if (code == MZ_OK && !(r->measured->probe_s > 0))
        return mz_fail(err, MZ_EINPUT, "%s: does not say how fast the machine was: calibrate anew",
                       r->path);
    return code;
}

mz_code mz_refresh_load(const char *path, mz_arena *arena, mz_refresh *refresh, mz_err *err) {
    double each = 1;
    *refresh = (mz_refresh){.path = path};
    mz_code code = mz_json_load(path, &refresh->profile, err);
    if (code == MZ_OK)
        code = read_measured(refresh, arena, err);
    if (code == MZ_OK)
        code = section_number(refresh, "device", "memory", MZ_UNIT_BYTES, &refresh->memory, err);
    if (code == MZ_OK)
        code = section_number(refresh, "device", "ranks_per_device", MZ_UNIT_NONE, &each, err);
    if (code == MZ_OK)
        refresh->ranks = (int64_t)each * refresh->measured->processes;
    if (code != MZ_OK)
        mz_refresh_free(refresh);
    return code;
}

static mz_code differs(const mz_refresh *r, const char *what, const char *then, const char *now,
                       mz_err *err) {
    return mz_fail(err, MZ_EINPUT,
                   "%s: %s was %s when it was measured and is %s now: refresh it where and as it "
                   "was measured, or calibrate anew",
                   r->path, what, then, now);
}

mz_code mz_refresh_same(const mz_refresh *r, const mz_refresh_here *here, mz_err *err) {
    const mz_measured *m = r->measured;
    const struct {
        const char *what, *then, *now;
    } texts[] = {{"the backend", m->backend, here->backend},
                 {"the transport", m->transport, here->transport}};
    const struct {
        const char *what;
        int64_t then, now;
    } numbers[] = {{"the number of processes", m->processes, here->processes},
                   {"--ranks", r->ranks, here->ranks},
                   {"the number of workers (--threads)", m->workers, here->workers}};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (strcmp(texts[i].then, texts[i].now) != 0)
            return differs(r, texts[i].what, texts[i].then, texts[i].now, err);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].then != numbers[i].now) {
            char then[24], now[24];
            snprintf(then, sizeof then, "%lld", (long long)numbers[i].then);
            snprintf(now, sizeof now, "%lld", (long long)numbers[i].now);
            return differs(r, numbers[i].what, then, now, err);
        }
    if (strcmp(m->machine, here->machine) != 0)
        return differs(r, "the machine", m->machine, here->machine, err);
    if (fabs(r->memory - here->memory) >
        0.02 * here->memory) { /* kernels differ in what they take */
        char then[32], now[32];
        snprintf(then, sizeof then, "%.2f GiB", r->memory / (1 << 30));
        snprintf(now, sizeof now, "%.2f GiB", here->memory / (1 << 30));
        return differs(r, "a device's memory", then, now, err);
    }
    return MZ_OK;
}

static mz_code scale_number(mz_refresh *r, const char *section, const char *key, mz_unit unit,
                            double factor, mz_err *err) {
    double value = 0;
    const mz_code code = section_number(r, section, key, unit, &value, err);
    json_t *object = json_object_get(json_object_get(r->profile, section), key);
    if (code == MZ_OK && json_object_set_new(object, "value", json_real(value * factor)) != 0)
        return mz_fail_nomem(err, "a profile");
    return code;
}

mz_code mz_refresh_apply(mz_refresh *r, const mz_measured *now, const char *at, mz_factors *factors,
                         mz_err *err) {
    mz_rescaled *total = &r->measured->rescaled;
    mz_code code = mz_calibrate_rescale(r->measured, now, factors, err);
    if (code != MZ_OK)
        return mz_err_prefix(err, "%s", r->path);
    snprintf(total->at, sizeof total->at, "%s", at);
    total->product *= factors->product;
    total->rows *= factors->rows;
    total->cache *= factors->cache;
    code = scale_number(r, "device", "bf16", MZ_UNIT_FLOPS, 1 / factors->product, err);
    if (code == MZ_OK)
        code = scale_number(r, "device", "memory_bandwidth", MZ_UNIT_RATE, 1 / factors->rows, err);
    if (code == MZ_OK &&
        json_object_set_new(r->profile, "measured", mz_measured_json(r->measured)) != 0)
        return mz_fail_nomem(err, "a profile");
    return code;
}

void mz_refresh_free(mz_refresh *refresh) {
    json_decref(refresh->profile);
    refresh->profile = NULL;
}
