#include "common/io/result_file.h"

#include "common/base/child.h"
#include "common/io/input.h"
#include "common/io/json.h"
#include "common/io/result_wire.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PATIENCE_MS = 60000 };

/* One file being read. */
typedef struct reading {
    const char *path;
    mz_result_file *file;
    mz_err *err;
} reading;

static mz_code wrong(const reading *r, const char *what) {
    return mz_fail(r->err, MZ_EINPUT, "%s: %s; is it what mizan sim or mizan replay wrote?",
                   r->path, what);
}

static mz_code wrong_about(const reading *r, const char *key, const char *what) {
    char text[96];
    snprintf(text, sizeof text, "%s %s", key, what);
    return wrong(r, text);
}

static mz_code nomem(const reading *r) {
    return mz_fail_nomem(r->err, "a result file");
}

/* ---- what both kinds of files are checked for --------------------------------------------------
 */

static mz_code note_json(reading *r, json_t *root) {
    mz_result_file *f = r->file;
    json_decref(f->root);
    f->root = root;
    const char *schema = json_string_value(json_object_get(root, "schema"));
    json_t *runs = json_object_get(root, "runs"), *run;
    if (!schema || strcmp(schema, "mizan-result/1") != 0 || !json_is_array(runs))
        return wrong(r, "its schema is not mizan-result/1");
    const size_t count = json_array_size(runs);
    f->run = MZ_NEW(&f->arena, mz_run_file, (int64_t)count);
    if (count == 0 || count > 10000)
        return wrong(r, "it holds no runs");
    if (!f->run)
        return nomem(r);
    size_t i;
    json_array_foreach(runs, i, run) {
        mz_run_file *to = &f->run[i];
        to->json = run;
        to->policy = json_string_value(json_object_get(run, "policy"));
        to->steps = json_integer_value(json_object_get(run, "steps"));
        if (!to->policy || to->steps < 1)
            return wrong(r, "a run has no policy or no steps");
    }
    f->runs = (int)count;
    return MZ_OK;
}

static bool all_times(const double *value, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(isfinite(value[i]) && value[i] >= 0))
            return false;
    return true;
}

static mz_code check_run(reading *r, mz_run_file *run) {
    if (run->step_s && !run->ordinal) {
        run->ordinal = MZ_NEW(&r->file->arena, int64_t, run->steps);
        for (int64_t i = 0; run->ordinal && i < run->steps; i++)
            run->ordinal[i] = i;
        if (!run->ordinal)
            return nomem(r);
    }
    if (run->step_s && !all_times(run->step_s, run->steps))
        return wrong(r, "step_time_s has a number that is no time");
    for (int k = 0; k < MZ_SPEEDS; k++)
        if (run->probe_s[k] && !all_times(run->probe_s[k], run->steps))
            return wrong_about(r, mz_speed_key((mz_speed)k), "is not all times");
    for (int64_t i = 0; run->step_s && i < run->steps; i++)
        if (run->ordinal[i] < 0 || run->ordinal[i] >= run->steps)
            return wrong(r, "step_ordinal names a step that is not there");
    if (run->rank_busy_s && !all_times(run->rank_busy_s, run->ranks))
        return wrong(r, "rank_busy_s has a number that is no time");
    for (int64_t i = 0; run->rank_memory && i < (int64_t)run->ranks * MZ_MEM_CATEGORIES; i++)
        if (run->rank_memory[i] < 0)
            return wrong(r, "rank_memory_bytes has a negative number");
    const int64_t cells = run->steps * run->layers * run->ranks * MZ_PHASES;
    if (run->detail_s && !all_times(run->detail_s, cells))
        return wrong(r, "detail_s has a number that is no time");
    /* Files of whole steps are compared with nothing. */
    if (!json_object_get(r->file->root, "kind"))
        return MZ_OK;
    const mz_code code = mz_result_adds_up(run, r->err);
    return code == MZ_EINPUT ? mz_err_prefix(r->err, "%s", r->path) : code;
}

/* All datasets by rank have the same ranks. */
static bool fits_ranks(mz_run_file *run, int64_t ranks) {
    if (ranks < 1 || ranks > 1 << 20 || (run->ranks && run->ranks != ranks))
        return false;
    run->ranks = (int32_t)ranks;
    return true;
}

/* ---- detail: columns of the file's phases to ours ----------------------------------------------
 */

static int phase_named(const char *name, size_t length) {
    for (int p = 0; p < MZ_PHASES; p++) {
        const char *known = mz_phase_name((mz_phase)p);
        if (strlen(known) == length && strncmp(known, name, length) == 0)
            return p;
    }
    return -1;
}

/* from: [rows][count]; names: the columns, separated by commas. */
static mz_code spread_columns(reading *r, const char *names, const double *from, int64_t rows,
                              int64_t count, double *to) {
    int64_t c = 0;
    for (const char *at = names; *at && c < count; c++) {
        const size_t length = strcspn(at, ",");
        const int phase = phase_named(at, length);
        if (phase < 0)
            return wrong(r, "detail_s has a phase that is not known");
        for (int64_t i = 0; i < rows; i++)
            to[i * MZ_PHASES + phase] = from[i * count + c];
        at += length + (at[length] == ',');
    }
    return c == count ? MZ_OK : wrong(r, "detail_s does not name all its phases");
}

/* ---- HDF5 --------------------------------------------------------------------------------------
 */

typedef struct conversation {
    reading *r;
    mz_child child;
    double *raw; /* detail_s as it came, whose columns are still to be named */
    int32_t raw_run;
    int64_t raw_rows, raw_columns;
} conversation;

static void run_child(void *context, int fd) {
    const reading *r = context;
    mz_result_child(fd, r->path);
}

static mz_code died(const conversation *c) {
    return mz_fail(c->r->err, MZ_EINPUT,
                   "%s: the HDF5 library failed on this file (%s): it is "
                   "damaged",
                   c->r->path, c->child.death);
}

static mz_code receive(conversation *c, const mz_result_block *block, void *data) {
    for (int64_t at = 0; at < block->bytes; at += MZ_RESULT_PIECE) {
        const int64_t left = block->bytes - at;
        const size_t piece = (size_t)(left < MZ_RESULT_PIECE ? left : MZ_RESULT_PIECE);
        if (!mz_child_receive(&c->child, (char *)data + at, piece))
            return died(c);
    }
    return MZ_OK;
}

static mz_code take_json(conversation *c, const char *text, int64_t bytes) {
    json_error_t why;
    if (c->r->file->root)
        return wrong(c->r, "it has two texts");
    json_t *root = mz_json_parse(text, (size_t)bytes, 0, &why);
    if (!root && json_error_code(&why) == json_error_out_of_memory)
        return nomem(c->r);
    if (!root)
        return wrong(c->r, "its json is not valid");
    return note_json(c->r, root);
}

/* The block's data, one more byte for text; NULL: not to be had or not as announced. */
static mz_code take_data(conversation *c, const mz_result_block *block, void **data) {
    const int64_t most = INT64_C(1) << 31;
    *data = NULL;
    if (block->bytes < 0 || block->bytes > most)
        return wrong(c->r, "it is too large");
    *data = mz_arena_alloc(&c->r->file->arena, (size_t)block->bytes + 1, 1);
    if (!*data)
        return nomem(c->r);
    return receive(c, block, *data);
}

static mz_code take_detail(conversation *c, mz_run_file *run, const mz_result_block *b,
                           double *data) {
    if (c->raw || run->detail_s || b->size[0] != run->steps || b->size[1] < 1 ||
        b->size[1] > 1 << 20 || b->size[3] < 1 || b->size[3] > MZ_PHASES ||
        !fits_ranks(run, b->size[2]))
        return wrong(c->r, "detail_s does not fit the run");
    run->layers = (int32_t)b->size[1];
    c->raw = data;
    c->raw_run = b->run;
    c->raw_rows = b->size[0] * b->size[1] * b->size[2];
    c->raw_columns = b->size[3];
    return MZ_OK;
}

static mz_code take_columns(conversation *c, mz_run_file *run, const mz_result_block *b,
                            const char *names) {
    if (!c->raw || c->raw_run != b->run)
        return wrong(c->r, "columns without detail_s");
    run->detail_s = MZ_NEW(&c->r->file->arena, double, c->raw_rows *MZ_PHASES);
    if (!run->detail_s)
        return nomem(c->r);
    const double *raw = c->raw;
    c->raw = NULL;
    return spread_columns(c->r, names, raw, c->raw_rows, c->raw_columns, run->detail_s);
}

/* As many values of eight bytes as its sizes say: the reading process handles files of strangers,
 * so what it announces is held against what it sent. */
static bool sizes_hold(const mz_result_block *b) {
    const int dimensions = b->what == MZ_RESULT_DETAIL ? 4 : b->what == MZ_RESULT_MEMORY ? 2 : 1;
    int64_t values = 1;
    for (int i = 0; i < dimensions; i++) {
        if (b->size[i] < 0 || (b->size[i] > 0 && values > INT64_MAX / 8 / b->size[i]))
            return false;
        values *= b->size[i];
    }
    return b->bytes == 8 * values;
}

static mz_code take_probe(conversation *c, mz_run_file *run, const mz_result_block *b,
                          double *data) {
    const int speed = b->what - MZ_RESULT_PROBE;
    run->probe_s[speed] = data;
    return b->size[0] == run->steps
               ? MZ_OK
               : wrong_about(c->r, mz_speed_key((mz_speed)speed), "does not fit the run");
}

static mz_code take_run_data(conversation *c, const mz_result_block *b, void *data) {
    if (b->run < 0 || b->run >= c->r->file->runs)
        return wrong(c->r, "it has datasets of a run that its json lacks");
    if (b->what != MZ_RESULT_COLUMNS && !sizes_hold(b))
        return wrong(c->r, "a dataset is not of the size that it says");
    mz_run_file *run = &c->r->file->run[b->run];
    if (b->what >= MZ_RESULT_PROBE && b->what <= MZ_RESULT_PROBE_LAST)
        return take_probe(c, run, b, data);
    switch ((mz_result_what)b->what) {
    case MZ_RESULT_STEPS:
        if (b->size[0] == run->steps)
            run->step_s = data;
        return b->size[0] == run->steps || b->size[0] == 0
                   ? MZ_OK
                   : wrong(c->r, "step_time_s does not fit the run");
    case MZ_RESULT_ORDINAL:
        run->ordinal = data;
        return b->size[0] == run->steps ? MZ_OK : wrong(c->r, "step_ordinal does not fit the run");
    case MZ_RESULT_BUSY:
        run->rank_busy_s = b->size[0] > 0 ? data : NULL;
        return b->size[0] == 0 || fits_ranks(run, b->size[0])
                   ? MZ_OK
                   : wrong(c->r, "rank_busy_s does not fit the run");
    case MZ_RESULT_MEMORY:
        run->rank_memory = data;
        return b->size[1] == MZ_MEM_CATEGORIES && fits_ranks(run, b->size[0])
                   ? MZ_OK
                   : wrong(c->r, "rank_memory_bytes does not fit the run");
    case MZ_RESULT_DETAIL:
        return take_detail(c, run, b, data);
    case MZ_RESULT_COLUMNS:
        return take_columns(c, run, b, data);
    default:
        return wrong(c->r, "it makes no sense");
    }
}

static mz_code take_block(conversation *c, bool *end) {
    mz_result_block block;
    void *data = NULL;
    if (!mz_child_receive(&c->child, &block, sizeof block))
        return died(c);
    *end = block.what == MZ_RESULT_END;
    if (*end)
        return c->r->file->runs > 0 ? MZ_OK : wrong(c->r, "it has no json");
    mz_code code = take_data(c, &block, &data);
    if (code != MZ_OK)
        return code;
    if (block.what == MZ_RESULT_FAILED)
        return wrong(c->r, data);
    if (block.what == MZ_RESULT_JSON)
        return take_json(c, data, block.bytes);
    return take_run_data(c, &block, data);
}

static mz_code load_hdf5(reading *r) {
    conversation c = {.r = r};
    mz_code code = mz_child_start(&c.child, run_child, r, -1, PATIENCE_MS, r->err);
    for (bool end = false; code == MZ_OK && !end;)
        code = take_block(&c, &end);
    mz_child_stop(&c.child);
    return code;
}

/* ---- JSON --------------------------------------------------------------------------------------
 */

/* A list of `count` numbers (-1: as many as there are) into arrays of the file; NULL: absent. */
static mz_code list_of(reading *r, const json_t *list, int64_t count, double **reals,
                       int64_t **integers) {
    const int64_t n = (int64_t)json_array_size(list);
    if (!json_is_array(list) || (count >= 0 && n != count))
        return wrong(r, "a list of its detail is missing or not as long as it should be");
    double *x = reals ? *reals = MZ_NEW(&r->file->arena, double, n + 1) : NULL;
    int64_t *i = integers ? *integers = MZ_NEW(&r->file->arena, int64_t, n + 1) : NULL;
    if (!x && !i)
        return nomem(r);
    for (int64_t k = 0; k < n; k++) {
        const json_t *value = json_array_get(list, (size_t)k);
        if (x ? !json_is_number(value) : !json_is_integer(value))
            return wrong(r, "a list of its detail holds what is not a number");
        if (x)
            x[k] = json_number_value(value);
        else
            i[k] = json_integer_value(value);
    }
    return MZ_OK;
}

static mz_code load_memory(reading *r, const json_t *rows, mz_run_file *run) {
    if (!fits_ranks(run, (int64_t)json_array_size(rows)))
        return wrong(r, "rank_memory_bytes does not fit the run");
    run->rank_memory = MZ_NEW(&r->file->arena, int64_t, (int64_t)run->ranks * MZ_MEM_CATEGORIES);
    if (!run->rank_memory)
        return nomem(r);
    mz_code code = MZ_OK;
    for (int32_t k = 0; code == MZ_OK && k < run->ranks; k++) {
        int64_t *row = NULL;
        code = list_of(r, json_array_get(rows, (size_t)k), MZ_MEM_CATEGORIES, NULL, &row);
        if (code == MZ_OK)
            memcpy(run->rank_memory + (int64_t)k * MZ_MEM_CATEGORIES, row,
                   sizeof *row * MZ_MEM_CATEGORIES);
    }
    return code;
}

/* The columns of detail_s are the keys of phases_s. */
static mz_code phase_keys(reading *r, const mz_run_file *run, char *names, size_t size,
                          int64_t *count) {
    json_t *phases = json_object_get(run->json, "phases_s"), *value;
    const char *key;
    size_t used = 0;
    *count = (int64_t)json_object_size(phases);
    json_object_foreach(phases, key, value) {
        used += (size_t)snprintf(names + used, size - used, "%s%s", used ? "," : "", key);
        if (used >= size)
            return wrong(r, "phases_s has too many keys");
    }
    return *count >= 1 && *count <= MZ_PHASES ? MZ_OK : wrong(r, "phases_s is not as it should be");
}

static mz_code load_row(reading *r, const json_t *list, const char *names, int64_t columns,
                        double *to) {
    double *row = NULL;
    const mz_code code = list_of(r, list, columns, &row, NULL);
    return code == MZ_OK ? spread_columns(r, names, row, 1, columns, to) : code;
}

static mz_code load_detail(reading *r, const json_t *steps, mz_run_file *run) {
    char names[2048] = "";
    int64_t columns = 0;
    const json_t *layers = json_array_get(steps, 0);
    mz_code code = phase_keys(r, run, names, sizeof names, &columns);
    if (code != MZ_OK)
        return code;
    if ((int64_t)json_array_size(steps) != run->steps || json_array_size(layers) < 1 ||
        json_array_size(layers) > 1 << 20 ||
        !fits_ranks(run, (int64_t)json_array_size(json_array_get(layers, 0))))
        return wrong(r, "detail_s does not fit the run");
    run->layers = (int32_t)json_array_size(layers);
    const int64_t each = (int64_t)run->layers * run->ranks; /* of a step */
    if (run->steps > INT64_MAX / (int64_t)sizeof(double) / MZ_PHASES / each)
        return wrong(r, "detail_s is too large");
    const int64_t rows = run->steps * each;
    run->detail_s = MZ_NEW(&r->file->arena, double, rows *MZ_PHASES);
    if (!run->detail_s)
        return nomem(r);
    for (int64_t i = 0; code == MZ_OK && i < rows; i++) {
        const json_t *step = json_array_get(steps, (size_t)(i / run->ranks / run->layers));
        const json_t *layer = json_array_get(step, (size_t)(i / run->ranks % run->layers));
        code = load_row(r, json_array_get(layer, (size_t)(i % run->ranks)), names, columns,
                        run->detail_s + i * MZ_PHASES);
    }
    return code;
}

static mz_code load_json_run(reading *r, mz_run_file *run) {
    const json_t *detail = json_object_get(run->json, "detail"), *list;
    mz_code code = MZ_OK;
    if (!detail)
        return MZ_OK;
    if ((list = json_object_get(detail, "step_time_s")))
        code = list_of(r, list, run->steps, &run->step_s, NULL);
    if (code == MZ_OK && (list = json_object_get(detail, "step_ordinal")))
        code = list_of(r, list, run->steps, NULL, &run->ordinal);
    for (int k = 0; k < MZ_SPEEDS; k++)
        if (code == MZ_OK && (list = json_object_get(detail, mz_speed_key((mz_speed)k))))
            code = list_of(r, list, run->steps, &run->probe_s[k], NULL);
    if (code == MZ_OK && (list = json_object_get(detail, "rank_busy_s"))) {
        if (!fits_ranks(run, (int64_t)json_array_size(list)))
            return wrong(r, "rank_busy_s does not fit the run");
        code = list_of(r, list, run->ranks, &run->rank_busy_s, NULL);
    }
    if (code == MZ_OK && (list = json_object_get(detail, "rank_memory_bytes")))
        code = load_memory(r, list, run);
    if (code == MZ_OK && (list = json_object_get(detail, "detail_s")))
        code = load_detail(r, list, run);
    return code;
}

static mz_code load_json(reading *r) {
    json_t *root = NULL;
    mz_code code = mz_json_load(r->path, &root, r->err);
    if (code == MZ_OK)
        code = note_json(r, root);
    for (int i = 0; code == MZ_OK && i < r->file->runs; i++)
        code = load_json_run(r, &r->file->run[i]);
    return code;
}

/* ---- either ------------------------------------------------------------------------------------
 */

static mz_code is_hdf5(const char *path, bool *yes, mz_err *err) {
    static const unsigned char mark[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
    mz_input *input;
    const unsigned char *data;
    size_t size = 0;
    mz_code code = mz_input_open(path, &input, err);
    if (code != MZ_OK)
        return code;
    code = mz_input_peek(input, &data, &size, err);
    *yes = code == MZ_OK && size >= sizeof mark && memcmp(data, mark, sizeof mark) == 0;
    mz_input_close(&input);
    return code;
}

mz_code mz_result_load(const char *path, mz_result_file *file, mz_err *err) {
    bool hdf5 = false;
    reading r = {path, file, err};
    *file = (mz_result_file){0};
    mz_code code = is_hdf5(path, &hdf5, err);
    if (code == MZ_OK)
        code = hdf5 ? load_hdf5(&r) : load_json(&r);
    for (int i = 0; code == MZ_OK && i < file->runs; i++)
        code = check_run(&r, &file->run[i]);
    if (code == MZ_OK)
        code = mz_result_digest(file, file->digest, err);
    if (code != MZ_OK)
        mz_result_file_free(file);
    return code;
}

void mz_result_file_free(mz_result_file *file) {
    json_decref(file->root);
    mz_arena_free(&file->arena);
    *file = (mz_result_file){0};
}
