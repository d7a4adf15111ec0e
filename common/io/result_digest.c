#include "common/io/result_file.h"

#include "common/base/digest.h"
#include "common/io/json.h"

#include <stdlib.h>
#include <string.h>

/* ---- arrays: what, sizes, values, each of eight bytes with the least significant first ---------
 */

static void add64(mz_digest *d, uint64_t value) {
    unsigned char byte[8];
    for (int i = 0; i < 8; i++)
        byte[i] = (unsigned char)(value >> 8 * i);
    mz_digest_add(d, byte, sizeof byte);
}

static void add_real(mz_digest *d, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    add64(d, bits);
}

/* The name with its end, the number of sizes, the sizes. */
static void add_head(mz_digest *d, const char *name, int sizes, const int64_t *size) {
    mz_digest_add(d, name, strlen(name) + 1);
    add64(d, (uint64_t)sizes);
    for (int i = 0; i < sizes; i++)
        add64(d, (uint64_t)size[i]);
}

static void add_reals(mz_digest *d, const char *name, const double *value, int64_t count) {
    if (!value)
        return;
    add_head(d, name, 1, &count);
    for (int64_t i = 0; i < count; i++)
        add_real(d, value[i]);
}

static void add_integers(mz_digest *d, const char *name, const int64_t *value, int sizes,
                         const int64_t *size) {
    const int64_t count = sizes > 1 ? size[0] * size[1] : size[0];
    if (!value)
        return;
    add_head(d, name, sizes, size);
    for (int64_t i = 0; i < count; i++)
        add64(d, (uint64_t)value[i]);
}

/* Phase by phase under its name, those with some time in them: a file has columns for some phases,
 * and what it has none for takes no time. */
static void add_detail(mz_digest *d, const mz_run_file *run) {
    const int64_t size[3] = {run->steps, run->layers, run->ranks};
    const int64_t cells = size[0] * size[1] * size[2];
    for (int p = 0; run->detail_s && p < MZ_PHASES; p++) {
        int64_t c = 0;
        while (c < cells && !(run->detail_s[c * MZ_PHASES + p] > 0))
            c++;
        if (c == cells)
            continue;
        add_head(d, mz_phase_name((mz_phase)p), 3, size);
        for (c = 0; c < cells; c++)
            add_real(d, run->detail_s[c * MZ_PHASES + p]);
    }
}

static void add_run(mz_digest *d, const mz_run_file *run) {
    const int64_t memory[2] = {run->ranks, MZ_MEM_CATEGORIES};
    add_reals(d, "step_time_s", run->step_s, run->steps);
    add_integers(d, "step_ordinal", run->step_s ? run->ordinal : NULL, 1, &run->steps);
    add_reals(d, "rank_busy_s", run->rank_busy_s, run->ranks);
    add_integers(d, "rank_memory_bytes", run->rank_memory, 2, memory);
    add_detail(d, run);
}

/* ---- the text ----------------------------------------------------------------------------------
 */

/* The object without any `detail`: HDF5 files have that in datasets. */
static mz_code plain_text(const json_t *root, char **text, size_t *size, mz_err *err) {
    size_t index;
    json_t *copy = json_deep_copy(root), *run;
    FILE *memory = copy ? open_memstream(text, size) : NULL;
    if (!memory) {
        json_decref(copy);
        return mz_fail_nomem(err, "the digest of a result");
    }
    json_array_foreach(json_object_get(copy, "runs"), index, run) {
        json_object_del(run, "detail");
    }
    mz_code code = mz_json_write(copy, memory, err);
    if (fclose(memory) != 0 && code == MZ_OK)
        code = mz_fail_nomem(err, "the digest of a result");
    json_decref(copy);
    return code;
}

mz_code mz_result_digest(const mz_result_file *file, char text[80], mz_err *err) {
    char *json = NULL, hex[MZ_DIGEST_TEXT];
    unsigned char bytes[MZ_DIGEST_BYTES];
    size_t size = 0;
    const mz_code code = plain_text(file->root, &json, &size, err);
    if (code == MZ_OK) {
        mz_digest d = mz_digest_start();
        mz_digest_add(&d, json, size);
        for (int i = 0; i < file->runs; i++)
            add_run(&d, &file->run[i]);
        mz_digest_of(&d, bytes);
        mz_digest_text(bytes, hex);
        snprintf(text, 80, MZ_RESULT_DIGEST "%s", hex);
    }
    free(json);
    return code;
}
