#include "traces/zip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { END_BYTES = 22, END_SEARCH = 65535 + END_BYTES, ENTRY_BYTES = 46, LOCAL_BYTES = 30 };

static const int64_t DIRECTORY_MAX = (int64_t)256 << 20;

typedef struct directory {
    int64_t offset, size, entries;
} directory;

static mz_code no_zip(const mz_datafile *file, const char *why, mz_err *err) {
    return mz_fail(err, MZ_EINPUT, "%s: not a whole zip file: %s (is it truncated?)",
                   mz_datafile_path(file), why);
}

/* The 64-bit end record, when a locator stands before the classic one at `end`. */
static mz_code find_directory64(mz_datafile *file, int64_t end, directory *found, mz_err *err) {
    unsigned char locator[20], record[56];
    if (end < (int64_t)sizeof locator)
        return MZ_OK;
    mz_code code = mz_datafile_read(file, end - 20, locator, sizeof locator, err);
    if (code || memcmp(locator, "PK\6\7", 4) != 0)
        return code;
    uint64_t at = mz_le64(locator + 8);
    if (at > INT64_MAX)
        return no_zip(file, "the directory is misplaced", err);
    code = mz_datafile_read(file, (int64_t)at, record, sizeof record, err);
    if (code)
        return code;
    if (memcmp(record, "PK\6\6", 4) != 0)
        return no_zip(file, "the directory is misplaced", err);
    found->entries = (int64_t)(mz_le64(record + 32) & INT64_MAX);
    found->size = (int64_t)(mz_le64(record + 40) & INT64_MAX);
    found->offset = (int64_t)(mz_le64(record + 48) & INT64_MAX);
    return MZ_OK;
}

static mz_code find_directory(mz_datafile *file, directory *found, mz_err *err) {
    int64_t size = mz_datafile_size(file), want = size < END_SEARCH ? size : END_SEARCH;
    unsigned char *tail = malloc((size_t)want + 1);
    if (!tail)
        return mz_fail_nomem(err, "the end of a zip file");
    mz_code code = mz_datafile_read(file, size - want, tail, (size_t)want, err);
    int64_t at = want - END_BYTES;
    while (!code && at >= 0 && memcmp(tail + at, "PK\5\6", 4) != 0)
        at--;
    if (!code && at < 0)
        code = no_zip(file, "it has no directory", err);
    if (!code) {
        *found = (directory){.entries = mz_le16(tail + at + 10),
                             .size = mz_le32(tail + at + 12),
                             .offset = mz_le32(tail + at + 16)};
        code = find_directory64(file, size - want + at, found, err);
    }
    free(tail);
    if (!code && (found->size > DIRECTORY_MAX || found->size > size ||
                  found->offset > size - found->size || found->entries > found->size / ENTRY_BYTES))
        code = no_zip(file, "its directory lies beyond the end", err);
    return code;
}

/* Sizes and place that do not fit 32 bits stand in the extra field 1, in this order. */
static bool wide_fields(const unsigned char *extra, size_t size, uint64_t *plain, uint64_t *packed,
                        uint64_t *header) {
    while (size >= 4) {
        size_t length = mz_le16(extra + 2);
        if (length > size - 4)
            return false;
        if (mz_le16(extra) == 1) {
            const unsigned char *p = extra + 4, *end = p + length;
            uint64_t *fields[] = {plain, packed, header};
            for (int i = 0; i < 3; i++) {
                if (*fields[i] != UINT32_MAX)
                    continue;
                if (end - p < 8)
                    return false;
                *fields[i] = mz_le64(p);
                p += 8;
            }
        }
        extra += 4 + length;
        size -= 4 + length;
    }
    return true;
}

/* One entry of the directory at *p; moves on. */
static mz_code read_entry(mz_zip *zip, const unsigned char **p, const unsigned char *end,
                          mz_err *err) {
    const unsigned char *e = *p;
    if (end - e < ENTRY_BYTES || memcmp(e, "PK\1\2", 4) != 0)
        return no_zip(zip->file, "its directory is damaged", err);
    size_t name = mz_le16(e + 28), extra = mz_le16(e + 30), comment = mz_le16(e + 32);
    uint64_t packed = mz_le32(e + 20), plain = mz_le32(e + 24), header = mz_le32(e + 42);
    if ((size_t)(end - e) - ENTRY_BYTES < name + extra + comment ||
        !wide_fields(e + ENTRY_BYTES + name, extra, &plain, &packed, &header) ||
        packed > INT64_MAX || header > INT64_MAX)
        return no_zip(zip->file, "its directory is damaged", err);
    char *copy = mz_arena_alloc(&zip->arena, name + 1, 1);
    if (!copy)
        return mz_fail_nomem(err, "names of a zip file");
    memcpy(copy, e + ENTRY_BYTES, name);
    const char *slash = strchr(copy, '/');
    int method = mz_le16(e + 8) & 1 ? -1 : mz_le16(e + 10);
    zip->member[zip->count++] = (mz_zip_member){.name = copy,
                                                .key = slash ? slash + 1 : copy,
                                                .header = (int64_t)header,
                                                .size = (int64_t)packed,
                                                .method = method};
    *p = e + ENTRY_BYTES + name + extra + comment;
    return MZ_OK;
}

static int by_key(const void *a, const void *b) {
    return strcmp(((const mz_zip_member *)a)->key, ((const mz_zip_member *)b)->key);
}

mz_code mz_zip_open(mz_datafile *file, mz_zip *zip, mz_err *err) {
    directory found = {0};
    *zip = (mz_zip){.file = file};
    mz_code code = find_directory(file, &found, err);
    if (code)
        return code;
    unsigned char *bytes = malloc((size_t)found.size + 1);
    zip->member = MZ_NEW(&zip->arena, mz_zip_member, found.entries + 1);
    if (!bytes || !zip->member)
        code = mz_fail_nomem(err, "the directory of a zip file");
    else
        code = mz_datafile_read(file, found.offset, bytes, (size_t)found.size, err);
    const unsigned char *p = bytes;
    for (int64_t i = 0; i < found.entries && !code; i++)
        code = read_entry(zip, &p, bytes + found.size, err);
    free(bytes);
    if (!code)
        qsort(zip->member, (size_t)zip->count, sizeof *zip->member, by_key);
    return code;
}

const mz_zip_member *mz_zip_find(const mz_zip *zip, const char *key) {
    const mz_zip_member wanted = {.key = key};
    return bsearch(&wanted, zip->member, (size_t)zip->count, sizeof wanted, by_key);
}

mz_code mz_zip_place(const mz_zip *zip, const mz_zip_member *member, int64_t *offset, mz_err *err) {
    unsigned char local[LOCAL_BYTES];
    const char *path = mz_datafile_path(zip->file);
    if (member->method != 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %s is %s; write it uncompressed (numpy.savez, torch.save)", path,
                       member->name, member->method < 0 ? "encrypted" : "compressed");
    mz_code code = mz_datafile_read(zip->file, member->header, local, sizeof local, err);
    if (code)
        return code;
    if (memcmp(local, "PK\3\4", 4) != 0)
        return no_zip(zip->file, "a member is misplaced", err);
    *offset = member->header + LOCAL_BYTES + mz_le16(local + 26) + mz_le16(local + 28);
    if (*offset > mz_datafile_size(zip->file) ||
        member->size > mz_datafile_size(zip->file) - *offset)
        return no_zip(zip->file, "a member lies beyond the end", err);
    return MZ_OK;
}

mz_code mz_zip_npy(const mz_zip *zip, const char *name, mz_tensor *tensor, mz_err *err) {
    char wanted[128];
    unsigned char head[4096];
    int64_t offset;
    snprintf(wanted, sizeof wanted, "%s.npy", name);
    const mz_zip_member *member = mz_zip_find(zip, wanted);
    if (!member)
        return mz_fail(err, MZ_EINPUT, "%s: the .npz holds no array called %s",
                       mz_datafile_path(zip->file), name);
    mz_code code = mz_zip_place(zip, member, &offset, err);
    if (code)
        return code;
    size_t size = member->size < (int64_t)sizeof head ? (size_t)member->size : sizeof head;
    code = mz_datafile_read(zip->file, offset, head, size, err);
    *tensor = (mz_tensor){0};
    if (!code)
        code = mz_npy_parse(mz_datafile_path(zip->file), head, size, &tensor->shape, err);
    if (code)
        return mz_err_prefix(err, "%s", name);
    tensor->offset = offset + (int64_t)tensor->shape.header_bytes;
    if (!mz_tensor_contiguous(tensor) || tensor->shape.elements * tensor->shape.size !=
                                             member->size - (int64_t)tensor->shape.header_bytes)
        return mz_fail(err, MZ_EINPUT, "%s: %s: the data are not as large as the shape says",
                       mz_datafile_path(zip->file), name);
    return mz_tensor_check(zip->file, tensor, name, err);
}

void mz_zip_close(mz_zip *zip) {
    mz_arena_free(&zip->arena);
    *zip = (mz_zip){0};
}
