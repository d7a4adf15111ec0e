/* Opening a trace: attributes, then datasets, then the tables that everything hangs on. */
#include "traces/reader.h"

#include "common/base/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

mz_code mz_fault_line(mz_faults *faults, const mz_err *line) {
    if (!faults->out) {
        *faults->err = *line;
        return line->code;
    }
    if (faults->found++ < faults->limit)
        fprintf(faults->out, "%s\n", line->msg);
    return MZ_OK;
}

mz_code mz_fault(mz_faults *faults, const char *fmt, ...) {
    char text[MZ_ERR_MAX];
    mz_err line; /* one problem is one line, whatever the file's names hold */
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    mz_fail(&line, MZ_EINPUT, "%s: %s", faults->path, text);
    return mz_fault_line(faults, &line);
}

/* ---- attributes ------------------------------------------------------------------------------ */

typedef struct text_rule {
    const char *group, *name;
    size_t offset, size;
    const char *dflt; /* of a missing attribute */
} text_rule;

typedef struct int_rule {
    const char *group, *name;
    size_t offset, size; /* of the field: 1 (bool), 4 or 8 bytes */
    int64_t low, high;
    int64_t dflt; /* of a missing attribute; below low: required */
} int_rule;

typedef struct enum_rule {
    const char *name; /* in /run, required */
    const char *const *names;
    int count;
} enum_rule;

#define FIELD(member) offsetof(mz_trace_facts, member), sizeof((mz_trace_facts *)0)->member

static const text_rule text_rules[] = {
    {"/", "producer", FIELD(producer), "unknown"},
    {"/", "source", FIELD(source), "unknown"},
    {"/", "licence", FIELD(licence), "unknown"},
    {"/model", "name", FIELD(name), "unknown"},
    {"/model", "router", FIELD(router), "unknown"},
    {"/model", "group_note", FIELD(group_note), ""},
    {"/run", "import_notes", FIELD(import_notes), ""},
};

static const int_rule int_rules[] = {
    {"/model", "layers", FIELD(layers), 1, MZ_LAYERS_MAX, 0},
    {"/model", "model_layers", FIELD(model_layers), 0, INT32_MAX, 0},
    {"/model", "experts", FIELD(experts), 1, MZ_EXPERTS_MAX, 0},
    {"/model", "top_k", FIELD(top_k), 0, 65535, -1},
    {"/model", "shared_experts", FIELD(shared_experts), 0, INT32_MAX, 0},
    {"/model", "hidden", FIELD(hidden), 0, INT32_MAX, 0},
    {"/model", "intermediate", FIELD(intermediate), 0, INT32_MAX, 0},
    {"/model", "weights_normalized", FIELD(weights_normalized), 0, 1, 0},
    {"/run", "ranks", FIELD(ranks), 1, MZ_RANKS_MAX, 0},
    {"/run", "sequence_length", FIELD(sequence_length), 0, INT64_MAX, 0},
    {"/run", "step_stride", FIELD(step_stride), 1, INT64_MAX, 1},
};

static mz_code read_int(mz_trace *trace, const char *group, const char *name, int64_t low,
                        int64_t high, int64_t dflt, int64_t *value, mz_faults *faults,
                        mz_err *err) {
    mz_attr attr;
    mz_code code = mz_server_attr(trace->server, group, name, &attr, err);
    *value = dflt < low ? low : dflt;
    if (code != MZ_OK || (attr.kind == MZ_ATTR_MISSING && dflt >= low))
        return code;
    if (attr.kind == MZ_ATTR_INT && attr.integer >= low && attr.integer <= high) {
        *value = attr.integer;
        return MZ_OK;
    }
    trace->consistent = false;
    if (attr.kind == MZ_ATTR_MISSING)
        return mz_fault(faults, "attribute %s of %s is missing", name, group);
    if (attr.kind != MZ_ATTR_INT)
        return mz_fault(faults, "attribute %s of %s must be one integer", name, group);
    return mz_fault(faults, "attribute %s of %s is %" PRId64 ", must be %" PRId64 " to %" PRId64,
                    name, group, attr.integer, low, high);
}

static mz_code read_text(mz_trace *trace, const text_rule *rule, mz_faults *faults, mz_err *err) {
    mz_attr attr;
    char *field = (char *)&trace->facts + rule->offset;
    mz_code code = mz_server_attr(trace->server, rule->group, rule->name, &attr, err);
    snprintf(field, rule->size, "%s", rule->dflt);
    if (code != MZ_OK || attr.kind == MZ_ATTR_MISSING)
        return code;
    if (attr.kind != MZ_ATTR_TEXT || strlen(attr.text) >= rule->size ||
        !mz_text_is_clean(attr.text))
        return mz_fault(faults,
                        "attribute %s of %s must be a UTF-8 string of at most %zu bytes without "
                        "control characters",
                        rule->name, rule->group, rule->size - 1);
    memcpy(field, attr.text, strlen(attr.text) + 1);
    return MZ_OK;
}

static mz_code read_enum(mz_trace *trace, const enum_rule *rule, int *value, mz_faults *faults,
                         mz_err *err) {
    mz_attr attr;
    mz_code code = mz_server_attr(trace->server, "/run", rule->name, &attr, err);
    if (code != MZ_OK)
        return code;
    for (*value = 0; attr.kind == MZ_ATTR_TEXT && *value < rule->count; (*value)++)
        if (strcmp(attr.text, rule->names[*value]) == 0)
            return MZ_OK;
    *value = 0;
    trace->consistent = false;
    if (attr.kind == MZ_ATTR_MISSING)
        return mz_fault(faults, "attribute %s of /run is missing", rule->name);
    return mz_fault(faults, "attribute %s of /run is not one of %s, %s%s%s", rule->name,
                    rule->names[0], rule->names[1], rule->count > 2 ? ", " : "",
                    rule->count > 2 ? rule->names[2] : "");
}

/* What kind of file this is decides whether anything else makes sense: never gone past. */
static mz_code check_format(mz_trace *trace, mz_err *err) {
    mz_attr attr;
    mz_code code = mz_server_attr(trace->server, "/", "format", &attr, err);
    if (code != MZ_OK)
        return code;
    if (attr.kind != MZ_ATTR_TEXT || strcmp(attr.text, "mizan-trace") != 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: an HDF5 file, but not a Mizan trace (no attribute format "
                       "\"mizan-trace\"); other recordings are read with mizan trace import",
                       trace->path);
    code = mz_server_attr(trace->server, "/", "format_version", &attr, err);
    if (code != MZ_OK)
        return code;
    if (attr.kind != MZ_ATTR_INT || attr.integer < 1)
        return mz_fail(err, MZ_EINPUT, "%s: attribute format_version of / is missing or no version",
                       trace->path);
    if (attr.integer > MZ_TRACE_VERSION)
        return mz_fail(err, MZ_EINPUT,
                       "%s: trace format version %" PRId64
                       ", this program reads up to %d: use a newer Mizan",
                       trace->path, attr.integer, MZ_TRACE_VERSION);
    return MZ_OK;
}

static void store(mz_trace_facts *facts, const int_rule *rule, int64_t value) {
    void *field = (char *)facts + rule->offset;
    if (rule->size == sizeof(bool))
        *(bool *)field = value != 0;
    else if (rule->size == 4)
        *(int32_t *)field = (int32_t)value;
    else
        *(int64_t *)field = value;
}

static mz_code read_facts(mz_trace *trace, mz_faults *faults, mz_err *err) {
    const enum_rule enums[] = {
        {"kind", mz_kind_names, 2}, {"phase", mz_phase_names, 3}, {"step", mz_step_names, 3}};
    int chosen[3] = {0};
    int64_t value = 0;
    mz_code code = MZ_OK;
    for (int i = 0; i < 3 && code == MZ_OK; i++)
        code = read_enum(trace, &enums[i], &chosen[i], faults, err);
    for (size_t i = 0; i < sizeof text_rules / sizeof text_rules[0] && code == MZ_OK; i++)
        code = read_text(trace, &text_rules[i], faults, err);
    for (size_t i = 0; i < sizeof int_rules / sizeof int_rules[0] && code == MZ_OK; i++) {
        const int_rule *rule = &int_rules[i];
        code = read_int(trace, rule->group, rule->name, rule->low, rule->high, rule->dflt, &value,
                        faults, err);
        store(&trace->facts, rule, value);
    }
    trace->facts.kind = (mz_trace_kind)chosen[0];
    trace->facts.phase = (mz_trace_phase)chosen[1];
    trace->facts.step_meaning = (mz_step_meaning)chosen[2];
    if (code == MZ_OK)
        code = read_int(trace, "/", "complete", 0, 1, 1, &value, faults, err);
    trace->complete = value != 0;
    if (code == MZ_OK && trace->facts.top_k > trace->facts.experts) {
        trace->consistent = false;
        code = mz_fault(faults, "attribute top_k of /model is %d, more than its %d experts",
                        trace->facts.top_k, trace->facts.experts);
    }
    return code;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Refuses what cannot be a trace before a child is started for it. */
static mz_code check_file(const char *path, int64_t *size, mz_err *err) {
    struct stat about;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &about) != 0) {
        int cause = errno;
        if (fd >= 0)
            close(fd);
        return mz_fail(err, MZ_EINPUT, "%s: cannot open: %s", path, strerror(cause));
    }
    close(fd);
    if (!S_ISREG(about.st_mode))
        return mz_fail(err, MZ_EINPUT, "%s: is a %s, not a file", path,
                       S_ISDIR(about.st_mode) ? "directory" : "pipe or device");
    if (about.st_size == 0)
        return mz_fail(err, MZ_EINPUT, "%s: the file is empty", path);
    *size = (int64_t)about.st_size;
    return MZ_OK;
}

/* When listing problems, a chunk of a table that cannot be read does not end it: the scan of all
 * chunks names it again. */
static mz_code load_tables(mz_trace *trace, mz_faults *faults, mz_err *err) {
    mz_code code = mz_tables_load(trace, faults, err);
    if (code != MZ_EINPUT || !faults->out)
        return code;
    trace->consistent = false;
    return mz_server_pid(trace->server) == 0 ? mz_fault_line(faults, err) : MZ_OK;
}

mz_code mz_trace_load(const char *path, mz_faults *faults, mz_trace **out, mz_err *err) {
    *out = NULL;
    mz_trace *trace = mz_calloc(1, sizeof *trace);
    if (!trace)
        return mz_fail_nomem(err, "a trace reader");
    trace->path = strdup(path);
    trace->codec = mz_codec_new(0);
    trace->consistent = true;
    trace->mark[0].index = trace->mark[1].index = -1;
    mz_code code = MZ_OK;
    if (!trace->path || !trace->codec)
        code = mz_fail_nomem(err, "a trace reader");
    if (code == MZ_OK)
        code = check_file(path, &trace->file_size, err);
    if (code == MZ_OK)
        code = mz_server_start(path, &trace->server, err);
    if (code == MZ_OK)
        code = check_format(trace, err);
    if (code == MZ_OK)
        code = read_facts(trace, faults, err);
    if (code == MZ_OK)
        code = mz_columns_open(trace, faults, err);
    if (code == MZ_OK && trace->consistent)
        code = load_tables(trace, faults, err);
    if (code != MZ_OK)
        mz_trace_close(&trace);
    *out = trace;
    return code;
}

mz_code mz_trace_open(const char *path, mz_trace **trace, mz_err *err) {
    mz_faults faults = {.path = path, .err = err};
    return mz_trace_load(path, &faults, trace, err);
}

void mz_trace_close(mz_trace **trace) {
    mz_trace *t = *trace;
    *trace = NULL;
    if (!t)
        return;
    mz_server_stop(&t->server);
    mz_columns_free(t);
    mz_codec_free(t->codec);
    free(t->calls);
    free(t->sequences);
    free(t->steps);
    free(t->path);
    free(t);
}
