#include "sim/cluster/profile.h"

#include "common/io/json.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef enum mz_field_kind { QUANTITY, WHOLE, YES_NO } mz_field_kind;

typedef struct field_row {
    const char *section, *key;
    mz_field_kind kind;
    mz_unit unit;
    double low, high;
} field_row;

static const char *const sections[] = {"device", "node", "scale_out"};

enum { SECTIONS = sizeof sections / sizeof sections[0] };

static const field_row rows[MZ_FIELDS] = {
    [MZ_FIELD_MEMORY] = {"device", "memory", QUANTITY, MZ_UNIT_BYTES, 1, 1e15},
    [MZ_FIELD_MEMORY_BANDWIDTH] = {"device", "memory_bandwidth", QUANTITY, MZ_UNIT_RATE, 1, 1e18},
    [MZ_FIELD_MEMORY_EFFICIENCY] = {"device", "memory_efficiency", QUANTITY, MZ_UNIT_NONE, 1e-3, 1},
    [MZ_FIELD_BF16] = {"device", "bf16", QUANTITY, MZ_UNIT_FLOPS, 1, 1e20},
    [MZ_FIELD_GEMM_EFFICIENCY] = {"device", "gemm_efficiency", QUANTITY, MZ_UNIT_NONE, 1e-3, 1},
    [MZ_FIELD_ATTENTION_EFFICIENCY] = {"device", "attention_efficiency", QUANTITY, MZ_UNIT_NONE,
                                       1e-3, 1},
    [MZ_FIELD_ATTENTION_BACKWARD_EFFICIENCY] = {"device", "attention_backward_efficiency", QUANTITY,
                                                MZ_UNIT_NONE, 1e-3, 1},
    [MZ_FIELD_SMS] = {"device", "sms", WHOLE, MZ_UNIT_NONE, 1, 4096},
    [MZ_FIELD_TILE_M] = {"device", "tile_m", WHOLE, MZ_UNIT_NONE, 1, 4096},
    [MZ_FIELD_TILE_N] = {"device", "tile_n", WHOLE, MZ_UNIT_NONE, 1, 4096},
    [MZ_FIELD_ROW_ALIGNMENT] = {"device", "row_alignment", WHOLE, MZ_UNIT_NONE, 1, 4096},
    [MZ_FIELD_LAUNCH] = {"device", "launch", QUANTITY, MZ_UNIT_SECONDS, 0, 1},
    [MZ_FIELD_SYNC] = {"device", "sync", QUANTITY, MZ_UNIT_SECONDS, 0, 1},
    [MZ_FIELD_CONTEXT] = {"device", "context", QUANTITY, MZ_UNIT_BYTES, 0, 1e15},
    [MZ_FIELD_COMMUNICATOR] = {"device", "communicator", QUANTITY, MZ_UNIT_BYTES, 0, 1e15},
    [MZ_FIELD_WORKSPACE] = {"device", "workspace", QUANTITY, MZ_UNIT_BYTES, 0, 1e15},
    [MZ_FIELD_NOISE_PERSISTENT] = {"device", "noise_persistent", QUANTITY, MZ_UNIT_NONE, 0, 1},
    [MZ_FIELD_NOISE_JITTER] = {"device", "noise_jitter", QUANTITY, MZ_UNIT_NONE, 0, 1},
    [MZ_FIELD_SPEED] = {"device", "speed", QUANTITY, MZ_UNIT_NONE, 1e-3, 1e3},
    [MZ_FIELD_RANKS_PER_DEVICE] = {"device", "ranks_per_device", WHOLE, MZ_UNIT_NONE, 1, 4096},
    [MZ_FIELD_GPUS] = {"node", "gpus", WHOLE, MZ_UNIT_NONE, 1, 65536},
    [MZ_FIELD_INSIDE_BANDWIDTH] = {"node", "bandwidth", QUANTITY, MZ_UNIT_RATE, 1, 1e18},
    [MZ_FIELD_INSIDE_EFFICIENCY] = {"node", "efficiency", QUANTITY, MZ_UNIT_NONE, 1e-3, 1},
    [MZ_FIELD_INSIDE_LATENCY] = {"node", "latency", QUANTITY, MZ_UNIT_SECONDS, 0, 1},
    [MZ_FIELD_HALF_DUPLEX] = {"node", "half_duplex", YES_NO, MZ_UNIT_NONE, 0, 1},
    [MZ_FIELD_GPUS_PER_BRIDGE] = {"node", "gpus_per_bridge", WHOLE, MZ_UNIT_NONE, 0, 65536},
    [MZ_FIELD_BRIDGE_BANDWIDTH] = {"node", "bridge_bandwidth", QUANTITY, MZ_UNIT_RATE, 0, 1e18},
    [MZ_FIELD_HOST_LINK] = {"node", "host_link", QUANTITY, MZ_UNIT_RATE, 1, 1e18},
    [MZ_FIELD_NICS] = {"scale_out", "nics", WHOLE, MZ_UNIT_NONE, 0, 65536},
    [MZ_FIELD_NIC_BANDWIDTH] = {"scale_out", "nic_bandwidth", QUANTITY, MZ_UNIT_RATE, 1, 1e18},
    [MZ_FIELD_NIC_EFFICIENCY] = {"scale_out", "efficiency", QUANTITY, MZ_UNIT_NONE, 1e-3, 1},
    [MZ_FIELD_OUTSIDE_LATENCY] = {"scale_out", "latency", QUANTITY, MZ_UNIT_SECONDS, 0, 1},
    [MZ_FIELD_RAILS] = {"scale_out", "rails", YES_NO, MZ_UNIT_NONE, 0, 1},
    [MZ_FIELD_NODES_PER_LEAF] = {"scale_out", "nodes_per_leaf", WHOLE, MZ_UNIT_NONE, 1, 1 << 20},
    [MZ_FIELD_SPINE_OVERSUBSCRIPTION] = {"scale_out", "spine_oversubscription", QUANTITY,
                                         MZ_UNIT_NONE, 1, 1e6},
};

/* Opens `key` of `parent` as a view called "FILE: SECTION.KEY". */
static mz_code open_member(mz_json *parent, const char *where, const char *key, mz_json *view,
                           mz_err *err) {
    json_t *value;
    char text[256];
    mz_code code = mz_json_get(parent, key, JSON_OBJECT, &value, err);
    if (code)
        return code;
    snprintf(text, sizeof text, "%s%s", where, key);
    return mz_json_object(value, text, view, err);
}

/* A value without a source is a value nobody can check. */
static mz_code close_sourced(mz_json *view, mz_err *err) {
    const char *source;
    mz_code code = mz_json_no_more(view, err);
    if (code == MZ_OK)
        code = mz_json_string(view, "source", &source, err);
    if (code == MZ_OK && source[0] == '\0')
        code = mz_fail(err, MZ_EINPUT, "%s: 'source' is empty; say where the value is from",
                       view->where);
    return code;
}

static mz_code read_value(mz_json *view, const field_row *row, double *value, json_t *resolved,
                          mz_err *err) {
    mz_code code;
    json_t *out;
    if (row->kind == YES_NO) {
        bool yes = false;
        json_t *given = json_object_get(view->object, "value");
        if (!json_is_boolean(given))
            return mz_fail(err, MZ_EINPUT, "%s: 'value' must be true or false", view->where);
        code = mz_json_bool_or(view, "value", false, &yes, err);
        *value = yes;
        out = json_boolean(yes);
    } else {
        code = mz_json_quantity(view, "value", row->unit, value, err);
        if (code)
            return code;
        if (*value < row->low || *value > row->high ||
            (row->kind == WHOLE && *value != floor(*value)))
            return mz_fail(err, MZ_EINPUT, "%s: 'value' is %g, must be %s from %g to %g",
                           view->where, *value, row->kind == WHOLE ? "a whole number" : "a number",
                           row->low, row->high);
        out = row->kind == WHOLE ? json_integer((json_int_t)*value) : json_real(*value);
    }
    if (code == MZ_OK && json_object_set_new(resolved, row->key, out))
        return mz_fail_nomem(err, "a profile's values");
    return code;
}

static mz_code read_field(mz_json *section, const char *where, mz_field field, mz_profile *profile,
                          json_t *resolved, mz_err *err) {
    mz_json view;
    mz_code code = open_member(section, where, rows[field].key, &view, err);
    if (code == MZ_OK)
        code = read_value(&view, &rows[field], &profile->value[field], resolved, err);
    return code ? code : close_sourced(&view, err);
}

static mz_code read_section(mz_json *root, const char *path, const char *name, mz_profile *profile,
                            json_t *resolved, mz_err *err) {
    mz_json view;
    char where[200];
    snprintf(where, sizeof where, "%s: ", path);
    mz_code code = open_member(root, where, name, &view, err);
    if (code)
        return code;
    /* Misspelt keys first, as they come with a suggestion; only then what is missing. */
    for (int f = 0; f < MZ_FIELDS; f++)
        if (strcmp(rows[f].section, name) == 0)
            mz_json_has(&view, rows[f].key);
    code = mz_json_no_more(&view, err);
    if (code)
        return code;
    json_t *values = json_object();
    if (json_object_set_new(resolved, name, values))
        return mz_fail_nomem(err, "a profile's values");
    snprintf(where, sizeof where, "%s: %s.", path, name);
    for (int f = 0; f < MZ_FIELDS && code == MZ_OK; f++)
        if (strcmp(rows[f].section, name) == 0)
            code = read_field(&view, where, (mz_field)f, profile, values, err);
    return code;
}

static mz_code read_planner(mz_json *entry, mz_planner_cost *cost, json_t *resolved, mz_err *err) {
    mz_json_has(entry, "fixed");
    mz_json_has(entry, "per_cell");
    mz_code code = close_sourced(entry, err);
    if (code == MZ_OK)
        code = mz_json_quantity(entry, "fixed", MZ_UNIT_SECONDS, &cost->fixed_s, err);
    if (code == MZ_OK)
        code = mz_json_quantity(entry, "per_cell", MZ_UNIT_SECONDS, &cost->per_cell_s, err);
    if (code == MZ_OK && !(fmax(cost->fixed_s, cost->per_cell_s) <= 1e6))
        return mz_fail(err, MZ_EINPUT, "%s: %g s are no planning time: at most 1e6", entry->where,
                       fmax(cost->fixed_s, cost->per_cell_s));
    if (code)
        return code;
    json_t *out = json_pack("{s:f,s:f}", "fixed", cost->fixed_s, "per_cell", cost->per_cell_s);
    if (json_object_set_new(resolved, cost->policy, out))
        return mz_fail_nomem(err, "a profile's planners");
    return MZ_OK;
}

static mz_code read_planners(mz_json *root, const char *path, mz_cluster *cluster, mz_err *err) {
    json_t *table, *value, *resolved = json_object();
    const char *policy;
    if (json_object_set_new(cluster->resolved, "planner", resolved))
        return mz_fail_nomem(err, "a profile's planners");
    mz_code code = mz_json_get(root, "planner", JSON_OBJECT, &table, err);
    if (code)
        return code;
    cluster->planner = MZ_NEW(&cluster->arena, mz_planner_cost, json_object_size(table));
    if (!cluster->planner)
        return mz_fail_nomem(err, "a profile's planners");
    json_object_foreach(table, policy, value) {
        mz_planner_cost *cost = &cluster->planner[cluster->planners++];
        mz_json entry;
        char where[256];
        snprintf(where, sizeof where, "%s: planner.%s", path, policy);
        if (strlen(policy) >= sizeof cost->policy)
            return mz_fail(err, MZ_EINPUT, "%s: the name is longer than %zu bytes", where,
                           sizeof cost->policy - 1);
        snprintf(cost->policy, sizeof cost->policy, "%s", policy);
        code = mz_json_object(value, where, &entry, err);
        if (code == MZ_OK)
            code = read_planner(&entry, cost, resolved, err);
        if (code)
            return code;
    }
    return MZ_OK;
}

/* Of the measurements the result file says where they come from; the numbers stay in the profile.
 */
static mz_code read_measured(mz_json *root, const char *path, mz_cluster *cluster, mz_err *err) {
    json_t *object;
    char where[200];
    mz_measured *m = NULL;
    if (!mz_json_has(root, "measured"))
        return MZ_OK;
    snprintf(where, sizeof where, "%s: measured", path);
    mz_code code = mz_json_get(root, "measured", JSON_OBJECT, &object, err);
    if (code == MZ_OK)
        code = mz_measured_read(object, where, &cluster->arena, &m, err);
    if (code != MZ_OK)
        return code;
    cluster->device.measured = m;
    json_t *out = json_pack("{s:o,s:s,s:s,s:i,s:i}", "machine", mz_json_text(m->machine), "backend",
                            m->backend, "transport", m->transport, "processes", m->processes,
                            "workers", m->workers);
    if (json_object_set_new(cluster->resolved, "measured", out))
        return mz_fail_nomem(err, "a profile's values");
    return MZ_OK;
}

bool mz_profile_is_name(const char *text) {
    const char *c = text;
    while (*c && !iscntrl((unsigned char)*c))
        c++;
    return c > text && !*c;
}

static mz_code read_texts(mz_json *root, mz_cluster *cluster, mz_err *err) {
    const char *name, *description;
    mz_code code = mz_json_string(root, "name", &name, err);
    if (code == MZ_OK && !mz_profile_is_name(name))
        return mz_fail(err, MZ_EINPUT,
                       "%s: 'name' is empty or holds control characters; give one line of text",
                       root->where);
    if (code == MZ_OK)
        code = mz_json_string(root, "description", &description, err);
    if (code)
        return code;
    snprintf(cluster->name, sizeof cluster->name, "%s", name);
    snprintf(cluster->device.name, sizeof cluster->device.name, "%s", name);
    snprintf(cluster->source, sizeof cluster->source, "%s", description);
    if (json_object_set_new(cluster->resolved, "name", json_string(name)) ||
        json_object_set_new(cluster->resolved, "description", json_string(description)))
        return mz_fail_nomem(err, "a profile's values");
    return MZ_OK;
}

/* Rules that tie fields together. */
static mz_code check_together(const char *path, const mz_profile *profile, mz_err *err) {
    const double *value = profile->value;
    double gpus = value[MZ_FIELD_GPUS], bridged = value[MZ_FIELD_GPUS_PER_BRIDGE];
    double nics = value[MZ_FIELD_NICS];
    if (bridged && fmod(gpus, bridged) != 0)
        return mz_fail(err, MZ_EINPUT, "%s: node.gpus_per_bridge %g does not divide node.gpus %g",
                       path, bridged, gpus);
    if (bridged && value[MZ_FIELD_BRIDGE_BANDWIDTH] < 1)
        return mz_fail(err, MZ_EINPUT,
                       "%s: node.bridge_bandwidth must be above 0 where gpus_per_bridge is", path);
    if (bridged && value[MZ_FIELD_OUTSIDE_LATENCY] < value[MZ_FIELD_INSIDE_LATENCY])
        return mz_fail(err, MZ_EINPUT,
                       "%s: scale_out.latency is below node.latency, but what leaves the node "
                       "crosses its host bridges too",
                       path);
    if (nics && fmod(gpus, nics) != 0 && fmod(nics, gpus) != 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: scale_out.nics %g and node.gpus %g: one must divide the other", path,
                       nics, gpus);
    return MZ_OK;
}

mz_code mz_profile_read(const char *path, mz_profile *profile, mz_cluster *cluster, mz_err *err) {
    json_t *root = NULL;
    mz_json view;
    mz_code code = mz_json_load(path, &root, err);
    if (code)
        return code;
    cluster->resolved = json_object();
    code = mz_json_object(root, path, &view, err);
    if (code == MZ_OK) {
        static const char *const keys[] = {"name", "description", "planner", "measured"};
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            mz_json_has(&view, keys[i]);
        for (int i = 0; i < SECTIONS; i++)
            mz_json_has(&view, sections[i]);
        code = mz_json_no_more(&view, err);
    }
    if (code == MZ_OK)
        code = read_texts(&view, cluster, err);
    for (int i = 0; i < SECTIONS && code == MZ_OK; i++)
        code = read_section(&view, path, sections[i], profile, cluster->resolved, err);
    if (code == MZ_OK)
        code = check_together(path, profile, err);
    if (code == MZ_OK)
        code = read_planners(&view, path, cluster, err);
    if (code == MZ_OK)
        code = read_measured(&view, path, cluster, err);
    json_decref(root);
    return code;
}
