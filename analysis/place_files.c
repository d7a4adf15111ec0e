/* Files of counts: CSV, JSON (SGLang's logical_count too), .npy. */
#include "analysis/place.h"

#include "common/io/input.h"
#include "common/io/json.h"
#include "traces/jsonl.h"
#include "traces/npy.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { DIMS = 4, EXPERTS_MAX = 65536, LAYERS_MAX = 65536 };
static const int64_t CELLS_MAX = (int64_t)1 << 31;

/* ---- shapes ------------------------------------------------------------------------------------
 */

typedef struct shape {
    int dims;
    int64_t extent[DIMS];
} shape;

/* Extents to steps, layers, sources, experts. */
static mz_code take_shape(const char *path, const shape *s, place_axes axes, place_counts *counts,
                          mz_err *err) {
    static const char *const names[] = {"", "layers,experts", "layers,sources,experts",
                                        "steps,layers,experts", "steps,layers,sources,experts"};
    static const int wanted[] = {0, 2, 3, 3, 4};
    if (axes == PLACE_AXES_AUTO && s->dims > 2)
        return mz_fail(err, MZ_EINPUT,
                       "%s: counts with %d axes: say what they are with --axes "
                       "(layers,sources,experts, steps,layers,experts or "
                       "steps,layers,sources,experts)",
                       path, s->dims);
    if (axes != PLACE_AXES_AUTO && s->dims != wanted[axes])
        return mz_fail(err, MZ_EINPUT, "%s: it has %d axes, --axes %s has %d", path, s->dims,
                       names[axes], wanted[axes]);
    const int64_t *x = s->extent;
    const bool steps = axes == PLACE_AXES_SLE || axes == PLACE_AXES_SLSE;
    const bool sources = axes == PLACE_AXES_LSE || axes == PLACE_AXES_SLSE;
    const int64_t layers = s->dims == 1 ? 1 : x[steps], S = sources ? x[steps + 1] : 1;
    counts->steps = steps ? x[0] : 1;
    const int64_t experts = x[s->dims - 1];
    if (counts->steps < 1 || layers < 1 || S < 1 || experts < 1)
        return mz_fail(err, MZ_EINPUT, "%s: it holds no counts: no layer, or no expert", path);
    if (layers > LAYERS_MAX || experts > EXPERTS_MAX || S > 1 << 20 ||
        counts->steps > CELLS_MAX / (layers * S * experts))
        return mz_fail(err, MZ_EINPUT,
                       "%s: %lld steps of %lld layers, %lld sources, %lld experts "
                       "are too many",
                       path, (long long)counts->steps, (long long)layers, (long long)S,
                       (long long)experts);
    counts->layers = counts->rows = (int32_t)layers;
    counts->sources = (int32_t)S;
    counts->experts = (int32_t)experts;
    return MZ_OK;
}

static mz_code allocate(place_counts *counts, mz_arena *arena, mz_err *err) {
    counts->count =
        MZ_NEW(arena, int64_t, counts->steps * counts->layers * counts->sources * counts->experts);
    return counts->count ? MZ_OK : mz_fail_nomem(err, "the counts");
}

/* ---- .npy --------------------------------------------------------------------------------------
 */

static mz_code check_counts(const char *path, const int64_t *count, int64_t n, mz_err *err) {
    for (int64_t i = 0; i < n; i++)
        if (count[i] < 0 || count[i] > UINT32_MAX)
            return mz_fail(
                err, MZ_EINPUT,
                "%s: element %lld is %lld, not a count (a whole number from 0 to 2^32-1)", path,
                (long long)i, (long long)count[i]);
    return MZ_OK;
}

static mz_code read_npy(const char *path, place_axes axes, mz_arena *arena, place_counts *counts,
                        mz_err *err) {
    mz_npy npy;
    mz_code code = mz_npy_open(path, &npy, err);
    if (code != MZ_OK)
        return code;
    shape s = {.dims = npy.shape.dims};
    if (npy.shape.kind == 'f')
        code =
            mz_fail(err, MZ_EINPUT,
                    "%s: it holds floats; counts are whole: save array.astype(numpy.int64)", path);
    else if (s.dims < 1 || s.dims > DIMS)
        code = mz_fail(err, MZ_EINPUT, "%s: %d axes; counts have 1 to %d", path, s.dims, DIMS);
    for (int i = 0; code == MZ_OK && i < s.dims; i++)
        s.extent[i] = npy.shape.extent[i];
    if (code == MZ_OK)
        code = take_shape(path, &s, axes, counts, err);
    if (code == MZ_OK)
        code = allocate(counts, arena, err);
    if (code == MZ_OK)
        code = mz_npy_read_int(&npy, counts->count, npy.shape.elements, err);
    if (code == MZ_OK)
        code = mz_npy_finish(&npy, err);
    if (code == MZ_OK)
        code = check_counts(path, counts->count, npy.shape.elements, err);
    mz_npy_close(&npy);
    return code;
}

/* ---- JSON --------------------------------------------------------------------------------------
 */

/* Extents along the first entries; the rest must be alike. */
static mz_code json_shape(const char *path, const json_t *value, shape *s, mz_err *err) {
    for (const json_t *at = value; json_is_array(at); at = json_array_get(at, 0)) {
        if (s->dims == DIMS)
            return mz_fail(err, MZ_EINPUT, "%s: lists within lists, more than %d deep", path, DIMS);
        s->extent[s->dims++] = (int64_t)json_array_size(at);
    }
    return s->dims > 0 ? MZ_OK
                       : mz_fail(err, MZ_EINPUT,
                                 "%s: neither a list of counts nor an object with "
                                 "\"logical_count\"",
                                 path);
}

/* `where` is the path of indices so far, such as "[3][0]". */
static mz_code fill(const char *path, const json_t *value, const shape *s, int depth,
                    const char *where, int64_t **out, mz_err *err) {
    size_t at;
    if (depth == s->dims - 1) {
        if (!json_is_array(value))
            return mz_fail(err, MZ_EINPUT, "%s: entry %s is no list, the first is", path, where);
        const char *fault = mz_json_counts(value, (size_t)s->extent[depth], *out, &at);
        if (fault && json_array_size(value) != (size_t)s->extent[depth])
            return mz_fail(err, MZ_EINPUT, "%s: list %s has %zu entries, the first has %lld", path,
                           where, json_array_size(value), (long long)s->extent[depth]);
        if (fault)
            return mz_fail(err, MZ_EINPUT, "%s: entry %s[%zu] %s", path, where, at, fault);
        *out += s->extent[depth];
        return MZ_OK;
    }
    if (!json_is_array(value) || json_array_size(value) != (size_t)s->extent[depth])
        return mz_fail(err, MZ_EINPUT, "%s: %s is not a list of %lld entries as the first is", path,
                       where, (long long)s->extent[depth]);
    mz_code code = MZ_OK;
    for (size_t i = 0; code == MZ_OK && i < json_array_size(value); i++) {
        char inner[96];
        snprintf(inner, sizeof inner, "%.60s[%zu]", where, i);
        code = fill(path, json_array_get(value, i), s, depth + 1, inner, out, err);
    }
    return code;
}

/* SGLang counts all layers of the model; dense ones are rows of zeros, in every step. */
static mz_code drop_dense(const char *path, mz_arena *arena, place_counts *c, mz_err *err) {
    const int64_t E = c->experts, row = c->layers * E;
    bool *used = MZ_NEW(arena, bool, c->layers);
    c->number = MZ_NEW(arena, int32_t, c->layers);
    if (!used || !c->number)
        return mz_fail_nomem(err, "the layers");
    for (int64_t i = 0; i < c->steps * row; i++)
        used[i % row / E] |= c->count[i] > 0;
    int32_t kept = 0;
    for (int32_t l = 0; l < c->layers; l++)
        if (used[l])
            c->number[kept++] = l;
    if (kept == 0)
        return mz_fail(err, MZ_EINPUT, "%s: all counts are 0", path);
    for (int64_t s = 0; s < c->steps; s++)
        for (int32_t l = 0; l < kept; l++)
            memmove(c->count + (s * kept + l) * E, c->count + s * row + c->number[l] * E,
                    (size_t)E * sizeof *c->count);
    c->layers = kept;
    return MZ_OK;
}

static mz_code read_json(const char *path, place_axes axes, mz_arena *arena, place_counts *counts,
                         mz_err *err) {
    json_t *root = NULL;
    mz_code code = mz_json_load(path, &root, err);
    if (code != MZ_OK)
        return code;
    shape s = {0};
    const json_t *logical = json_object_get(root, "logical_count");
    code = json_shape(path, logical ? logical : root, &s, err);
    if (code == MZ_OK && logical && axes == PLACE_AXES_AUTO && s.dims == 3)
        axes = PLACE_AXES_SLE; /* as the recorder writes it */
    if (code == MZ_OK)
        code = take_shape(path, &s, axes, counts, err);
    if (code == MZ_OK)
        code = allocate(counts, arena, err);
    int64_t *out = counts->count;
    if (code == MZ_OK)
        code =
            fill(path, logical ? logical : root, &s, 0, logical ? "logical_count" : "", &out, err);
    if (code == MZ_OK && logical && counts->sources == 1)
        code = drop_dense(path, arena, counts, err);
    json_decref(root);
    return code;
}

/* ---- CSV ---------------------------------------------------------------------------------------
 */

typedef struct table {
    int64_t *cell; /* [rows][columns] */
    size_t cap, rows, columns;
    bool by_source; /* the header says so */
} table;

static mz_code bad_line(const mz_input *input, mz_err *err, const char *fmt, ...) MZ_PRINTF(3, 4);
static mz_code bad_line(const mz_input *input, mz_err *err, const char *fmt, ...) {
    char text[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return mz_fail(err, MZ_EINPUT, "%s: line %lld: %s", mz_input_path(input),
                   (long long)mz_input_line_number(input), text);
}

static const char *skip_blanks(const char *at) {
    return at + strspn(at, " \t");
}

/* One field: digits alone, with blanks around them. *at moves behind it. */
static mz_code take_count(const mz_input *input, const char **at, size_t field, int64_t *value,
                          mz_err *err) {
    const char *p = skip_blanks(*at);
    const size_t digits = strspn(p, "0123456789");
    const char *end = skip_blanks(p + digits);
    *value = 0;
    for (size_t i = 0; i < digits && *value <= UINT32_MAX; i++)
        *value = *value * 10 + (p[i] - '0');
    if (digits == 0 || (*end && *end != ',') || *value > UINT32_MAX)
        return bad_line(input, err,
                        "field %zu is '%.*s', not a count (a whole number from 0 to 2^32-1)",
                        field + 1, (int)(strcspn(p, ",") < 24 ? strcspn(p, ",") : 24), p);
    *at = end;
    return MZ_OK;
}

static mz_code take_line(const mz_input *input, const char *line, table *t, mz_err *err) {
    size_t fields = 1;
    for (const char *p = line; *p; p++)
        fields += *p == ',';
    if (t->columns == 0)
        t->columns = fields;
    if (fields != t->columns)
        return bad_line(input, err, "%zu fields, the lines before have %zu", fields, t->columns);
    if (fields > EXPERTS_MAX + 2 || (int64_t)((t->rows + 1) * fields) > CELLS_MAX)
        return bad_line(input, err, "too many counts");
    if (!mz_grow((void **)&t->cell, &t->cap, (t->rows + 1) * fields, sizeof *t->cell))
        return mz_fail_nomem(err, "the counts");
    mz_code code = MZ_OK;
    for (size_t i = 0; code == MZ_OK && i < fields; i++) {
        code = take_count(input, &line, i, &t->cell[t->rows * fields + i], err);
        line += *line == ',';
    }
    t->rows++;
    return code;
}

static mz_code read_table(mz_input *input, table *t, mz_err *err) {
    char *line;
    size_t length;
    for (;;) {
        mz_code code = mz_input_line(input, &line, &length, err);
        if (code != MZ_OK || !line)
            return code;
        if (strlen(line) != length)
            return bad_line(input, err, "a byte 0: this is no text");
        if (mz_input_line_number(input) == 1 && strncmp(line, "\xef\xbb\xbf", 3) == 0)
            line += 3; /* the mark of UTF-8 that spreadsheets write */
        if (*skip_blanks(line) == 0)
            continue;
        if (t->rows == 0 && !t->by_source && strncmp(line, "layer,source,", 13) == 0) {
            t->by_source = true;
            continue;
        }
        code = take_line(input, line, t, err);
        if (code != MZ_OK)
            return code;
    }
}

/* Do the first two columns run over all (layer, source), each once? place[layer * S + source] is
 * then the row. */
static bool is_grid(const table *t, int64_t *layers, int64_t *sources, size_t *place) {
    *layers = *sources = 0;
    if (t->columns < 3)
        return false;
    for (size_t i = 0; i < t->rows; i++) {
        const int64_t *row = t->cell + i * t->columns;
        *layers = row[0] >= *layers ? row[0] + 1 : *layers;
        *sources = row[1] >= *sources ? row[1] + 1 : *sources;
    }
    if (*layers > (int64_t)t->rows || *layers * *sources != (int64_t)t->rows)
        return false;
    memset(place, 0xff, t->rows * sizeof *place);
    for (size_t i = 0; i < t->rows; i++) {
        const int64_t *row = t->cell + i * t->columns;
        size_t *at = &place[row[0] * *sources + row[1]];
        if (*at != SIZE_MAX)
            return false;
        *at = i;
    }
    return true;
}

static mz_code take_rows(const char *path, const table *t, const size_t *place, shape *s,
                         place_axes axes, mz_arena *arena, place_counts *counts, mz_err *err) {
    mz_code code = take_shape(path, s, axes, counts, err);
    if (code == MZ_OK)
        code = allocate(counts, arena, err);
    const size_t skip = place ? 2 : 0, n = t->columns - skip;
    for (size_t i = 0; code == MZ_OK && i < t->rows; i++)
        memcpy(counts->count + i * n, t->cell + (place ? place[i] : i) * t->columns + skip,
               n * sizeof *counts->count);
    return code;
}

/* Lines by source are known by their header, by --axes, or by their first two columns, which run
 * over every layer and source once; those of one source could be anything and count as plain. */
static mz_code take_table(const char *path, const table *t, place_axes axes, int64_t ranks,
                          mz_arena *arena, place_counts *counts, mz_err *err) {
    int64_t layers, sources;
    if (t->rows == 0)
        return mz_fail(err, MZ_EINPUT, "%s: the file is empty: no line of counts", path);
    if (axes == PLACE_AXES_SLE || axes == PLACE_AXES_SLSE)
        return mz_fail(err, MZ_EINPUT,
                       "%s: a CSV has no steps: --axes layers,experts or layers,sources,experts",
                       path);
    size_t *place = MZ_NEW(arena, size_t, t->rows);
    if (!place)
        return mz_fail_nomem(err, "the lines");
    const bool grid = is_grid(t, &layers, &sources, place);
    const bool said = t->by_source || axes == PLACE_AXES_LSE;
    if (said && !grid)
        return mz_fail(err, MZ_EINPUT,
                       "%s: by source, every layer needs one line for every source: "
                       "layer,source,count,count,... (layers and sources from 0)",
                       path);
    const bool guess =
        axes == PLACE_AXES_AUTO && grid && sources > 1 && (ranks == 0 || sources % ranks == 0);
    if (said || guess) {
        shape s = {3, {layers, sources, (int64_t)t->columns - 2}};
        return take_rows(path, t, place, &s, PLACE_AXES_LSE, arena, counts, err);
    }
    shape s = {2, {(int64_t)t->rows, (int64_t)t->columns}};
    return take_rows(path, t, NULL, &s, PLACE_AXES_LE, arena, counts, err);
}

/* ---- which of them -----------------------------------------------------------------------------
 */

/* All but CSV is opened again by its own reader, which a pipe does not allow. */
static bool is_file(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode);
}

mz_code place_read_file(const char *path, place_axes axes, int64_t ranks, mz_arena *arena,
                        place_counts *counts, bool *trace, mz_err *err) {
    mz_input *input = NULL;
    const unsigned char *head;
    size_t size;
    *trace = false;
    mz_code code = mz_input_open(path, &input, err);
    if (code == MZ_OK)
        code = mz_input_peek(input, &head, &size, err);
    if (code != MZ_OK) {
        mz_input_close(&input);
        return code;
    }
    size_t at = 0;
    while (at < size && strchr(" \t\r\n", head[at]))
        at++;
    const bool npy = size >= 6 && memcmp(head, "\x93NUMPY", 6) == 0;
    const bool json = !npy && at < size && (head[at] == '{' || head[at] == '[');
    const bool hdf5 = size >= 4 && memcmp(head, "\x89HDF", 4) == 0;
    const bool zip = size >= 4 && memcmp(head, "PK\3\4", 4) == 0;
    if (zip)
        code = mz_fail(err, MZ_EINPUT,
                       "%s: an archive, as PyTorch writes: make a trace of it with mizan trace "
                       "import",
                       path);
    else if ((npy || json || hdf5) && !is_file(path))
        code =
            mz_fail(err, MZ_EINPUT,
                    "%s: only CSV is read from a pipe or device: save it and give the file's name",
                    mz_input_path(input));
    else if (!npy && !json && !hdf5) {
        table t = {0};
        code = read_table(input, &t, err);
        if (code == MZ_OK)
            code = take_table(path, &t, axes, ranks, arena, counts, err);
        free(t.cell);
    }
    mz_input_close(&input);
    *trace = hdf5 && code == MZ_OK;
    if (code == MZ_OK && npy)
        code = read_npy(path, axes, arena, counts, err);
    if (code == MZ_OK && json)
        code = read_json(path, axes, arena, counts, err);
    return code;
}
