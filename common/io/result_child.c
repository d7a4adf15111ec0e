/* The HDF5 side of reading a result file. Runs in a child: whatever a hostile file does to the
 * library ends here. Values are handed over as they are; the parent checks them. */
#include "common/io/result_wire.h"

#include "common/base/child.h"
#include "common/base/digest.h"

#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int64_t BYTES_MAX = INT64_C(1) << 31;

static bool say(int fd, mz_result_block block, const void *data) {
    if (!mz_parent_send(fd, &block, sizeof block))
        return false;
    for (int64_t at = 0; at < block.bytes; at += MZ_RESULT_PIECE) {
        const int64_t left = block.bytes - at;
        const size_t piece = (size_t)(left < MZ_RESULT_PIECE ? left : MZ_RESULT_PIECE);
        if (!mz_parent_send(fd, (const char *)data + at, piece))
            return false;
    }
    return true;
}

static void fail(int fd, const char *text) {
    say(fd, (mz_result_block){.what = MZ_RESULT_FAILED, .bytes = (int64_t)strlen(text)}, text);
}

static bool exists(hid_t group, const char *name) {
    return H5Lexists(group, name, H5P_DEFAULT) > 0;
}

/* A whole dataset of 8-byte values; false: it is not as it should be. */
static bool say_dataset(int fd, hid_t group, const char *name, hid_t type, int dimensions,
                        mz_result_block block) {
    hsize_t size[4] = {0};
    void *data = NULL;
    bool good = false;
    const hid_t dataset = H5Dopen2(group, name, H5P_DEFAULT);
    const hid_t space = dataset >= 0 ? H5Dget_space(dataset) : -1;
    if (space >= 0 && H5Sget_simple_extent_ndims(space) == dimensions &&
        H5Sget_simple_extent_dims(space, size, NULL) == dimensions) {
        block.bytes = 8;
        for (int i = 0; i < dimensions; i++) {
            block.size[i] = (int64_t)size[i];
            good = i == 0 || good;
            good = good && size[i] <= (hsize_t)BYTES_MAX &&
                   (size[i] == 0 || block.bytes <= BYTES_MAX / (int64_t)size[i]);
            block.bytes *= good ? (int64_t)size[i] : 1;
        }
    }
    if (good)
        data = malloc(block.bytes > 0 ? (size_t)block.bytes : 1);
    good = data &&
           (block.bytes == 0 || H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0) &&
           say(fd, block, data);
    free(data);
    H5Sclose(space);
    H5Dclose(dataset);
    return good;
}

/* A text attribute shorter than `size`; text is all zeros before. Closes the attribute. */
static bool read_text(hid_t attribute, char *text, size_t size) {
    const hid_t type = attribute >= 0 ? H5Aget_type(attribute) : -1;
    const bool good = type >= 0 && H5Tget_class(type) == H5T_STRING && !H5Tis_variable_str(type) &&
                      H5Tget_size(type) < size && H5Aread(attribute, type, text) >= 0;
    H5Tclose(type);
    H5Aclose(attribute);
    return good;
}

static bool say_columns(int fd, hid_t group, int32_t run) {
    char text[4096] = "";
    const hid_t attribute = H5Aopen_by_name(group, "detail_s", "columns", H5P_DEFAULT, H5P_DEFAULT);
    const bool good = read_text(attribute, text, sizeof text);
    const mz_result_block block = {
        .what = MZ_RESULT_COLUMNS, .run = run, .bytes = (int64_t)strlen(text)};
    return good && say(fd, block, text);
}

static bool say_run(int fd, hid_t group, int32_t run) {
    const struct {
        const char *name;
        hid_t type;
        int dimensions, what;
    } list[] = {
        {"step_time_s", H5T_NATIVE_DOUBLE, 1, MZ_RESULT_STEPS},
        {"step_ordinal", H5T_NATIVE_INT64, 1, MZ_RESULT_ORDINAL},
        {mz_speed_key(MZ_SPEED_PRODUCT), H5T_NATIVE_DOUBLE, 1, MZ_RESULT_PROBE + MZ_SPEED_PRODUCT},
        {mz_speed_key(MZ_SPEED_MEMORY), H5T_NATIVE_DOUBLE, 1, MZ_RESULT_PROBE + MZ_SPEED_MEMORY},
        {mz_speed_key(MZ_SPEED_CACHE), H5T_NATIVE_DOUBLE, 1, MZ_RESULT_PROBE + MZ_SPEED_CACHE},
        {"rank_busy_s", H5T_NATIVE_DOUBLE, 1, MZ_RESULT_BUSY},
        {"rank_memory_bytes", H5T_NATIVE_INT64, 2, MZ_RESULT_MEMORY},
        {"detail_s", H5T_NATIVE_DOUBLE, 4, MZ_RESULT_DETAIL},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        if (exists(group, list[i].name) &&
            !say_dataset(fd, group, list[i].name, list[i].type, list[i].dimensions,
                         (mz_result_block){.what = list[i].what, .run = run})) {
            char text[96];
            snprintf(text, sizeof text, "/runs/%04d/%s cannot be read", (int)run, list[i].name);
            fail(fd, text);
            return false;
        }
    if (!exists(group, "detail_s") || say_columns(fd, group, run))
        return true;
    fail(fd, "detail_s has no list of its columns");
    return false;
}

/* Files of before have no digest. */
static bool is_whole(hid_t dataset, const char *json) {
    char text[MZ_DIGEST_TEXT], written[MZ_DIGEST_TEXT + 1] = "";
    if (H5Aexists(dataset, "sha256") == 0)
        return true;
    const bool read = read_text(H5Aopen(dataset, "sha256", H5P_DEFAULT), written, sizeof written);
    mz_digest_text_of(json, strlen(json), text);
    return read && strcmp(text, written) == 0;
}

static bool say_json(int fd, hid_t file) {
    const hid_t dataset = H5Dopen2(file, "json", H5P_DEFAULT);
    const hid_t type = dataset >= 0 ? H5Dget_type(dataset) : -1;
    const hid_t space = dataset >= 0 ? H5Dget_space(dataset) : -1;
    bool good = type >= 0 && space >= 0 && H5Tget_class(type) == H5T_STRING &&
                !H5Tis_variable_str(type) && H5Sget_simple_extent_npoints(space) == 1;
    const size_t size = good ? H5Tget_size(type) : 0;
    char *text = good && (int64_t)size < BYTES_MAX ? calloc(size + 1, 1) : NULL;
    good = text && H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text) >= 0 &&
           is_whole(dataset, text) &&
           say(fd, (mz_result_block){.what = MZ_RESULT_JSON, .bytes = (int64_t)strlen(text)}, text);
    free(text);
    H5Sclose(space);
    H5Tclose(type);
    H5Dclose(dataset);
    return good;
}

static void say_file(int fd, hid_t file) {
    if (!exists(file, "json") || !exists(file, "runs") || !say_json(fd, file)) {
        fail(fd, "not a result of mizan: no json in it, or not as it was written");
        return;
    }
    const hid_t runs = H5Gopen2(file, "runs", H5P_DEFAULT);
    for (int32_t i = 0; i < 10000; i++) {
        char name[16];
        snprintf(name, sizeof name, "%04d", (int)i);
        if (runs < 0 || !exists(runs, name))
            break;
        const hid_t group = H5Gopen2(runs, name, H5P_DEFAULT);
        const bool good = say_run(fd, group, i);
        H5Gclose(group);
        if (!good)
            return;
    }
    H5Gclose(runs);
    say(fd, (mz_result_block){.what = MZ_RESULT_END}, NULL);
}

void mz_result_child(int fd, const char *path) {
    setenv("HDF5_USE_FILE_LOCKING", "FALSE", 1); /* locks are for writers */
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    const hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (file < 0) {
        fail(fd, "not a readable HDF5 file");
        return;
    }
    say_file(fd, file);
    H5Fclose(file);
}
