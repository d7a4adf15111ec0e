#include "traces/datafile.h"

#include "common/base/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WINDOW = 1 << 16 };

struct mz_datafile {
    int fd;
    int64_t size;
    char *path;
    int64_t window_at, window_size; /* bytes of the file that `window` holds */
    unsigned char window[WINDOW];
};

static mz_code open_plain(mz_datafile *file, mz_err *err) {
    struct stat info;
    unsigned char head[6] = {0};
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0 || fstat(file->fd, &info) != 0)
        return mz_fail(err, MZ_EINPUT, "%s: cannot open: %s", file->path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return mz_fail(err, MZ_EINPUT, "%s: not a regular file", file->path);
    file->size = (int64_t)info.st_size;
    mz_code code =
        mz_datafile_read(file, 0, head, file->size < 6 ? (size_t)file->size : sizeof head, err);
    if (code)
        return code;
    if (memcmp(head, "\x1f\x8b", 2) == 0 || memcmp(head,
                                                   "\xfd"
                                                   "7zXZ",
                                                   6) == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: packed; this format is read at many places: unpack it first",
                       file->path);
    return MZ_OK;
}

mz_code mz_datafile_open(const char *path, mz_datafile **out, mz_err *err) {
    mz_datafile *file = mz_calloc(1, sizeof *file);
    *out = NULL;
    if (!file || !(file->path = strdup(path))) {
        free(file);
        return mz_fail_nomem(err, "an open file");
    }
    mz_code code = open_plain(file, err);
    if (code)
        mz_datafile_close(&file);
    *out = file;
    return code;
}

void mz_datafile_close(mz_datafile **file) {
    if (!*file)
        return;
    if ((*file)->fd >= 0)
        close((*file)->fd);
    free((*file)->path);
    free(*file);
    *file = NULL;
}

const char *mz_datafile_path(const mz_datafile *file) {
    return file->path;
}

int64_t mz_datafile_size(const mz_datafile *file) {
    return file->size;
}

mz_code mz_datafile_read(mz_datafile *file, int64_t offset, void *data, size_t size, mz_err *err) {
    if (offset < 0 || offset > file->size || size > (uint64_t)(file->size - offset))
        return mz_fail(
            err, MZ_EINPUT,
            "%s: the file has %lld bytes, but bytes %lld to %lld are needed (is it truncated?)",
            file->path, (long long)file->size, (long long)offset,
            (long long)offset + (long long)size);
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(file->fd, (char *)data + done, size - done, offset + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return mz_fail(err, MZ_EINPUT, "%s: cannot read at byte %lld: %s", file->path,
                           (long long)offset + (long long)done,
                           n < 0 ? strerror(errno) : "the file became shorter");
        done += (size_t)n;
    }
    return MZ_OK;
}

uint16_t mz_le16(const unsigned char *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}

uint32_t mz_le32(const unsigned char *p) {
    return mz_le16(p) | (uint32_t)mz_le16(p + 2) << 16;
}

uint64_t mz_le64(const unsigned char *p) {
    return mz_le32(p) | (uint64_t)mz_le32(p + 4) << 32;
}

/* ---- tensors --------------------------------------------------------------------------------- */

bool mz_tensor_contiguous(mz_tensor *tensor) {
    int64_t elements = 1;
    for (int d = tensor->shape.dims - 1; d >= 0; d--) {
        int64_t extent = tensor->shape.extent[d];
        tensor->stride[d] = elements;
        if (extent < 0 || (extent > 0 && elements > INT64_MAX / 8 / extent))
            return false;
        elements *= extent;
    }
    tensor->shape.elements = elements;
    return true;
}

mz_code mz_tensor_check(const mz_datafile *file, const mz_tensor *tensor, const char *what,
                        mz_err *err) {
    const mz_npy_shape *shape = &tensor->shape;
    int64_t room = tensor->data ? tensor->data_bytes : file->size - tensor->offset, last = 0;
    bool inside = tensor->data || (tensor->offset >= 0 && tensor->offset <= file->size);
    if (shape->elements == 0)
        return MZ_OK;
    for (int d = 0; d < shape->dims && inside; d++) {
        int64_t steps = shape->extent[d] - 1;
        inside = tensor->stride[d] >= 0 &&
                 (steps == 0 || tensor->stride[d] <= (INT64_MAX / 16 - last) / steps);
        if (inside)
            last += tensor->stride[d] * steps;
    }
    if (!inside || (last + 1) * shape->size > room)
        return mz_fail(err, MZ_EINPUT,
                       "%s: %s: the elements reach beyond the end of the data (is "
                       "the file truncated?)",
                       file->path, what);
    return MZ_OK;
}

/* The bytes of one element, through the window of the file. */
static mz_code element(mz_datafile *file, const mz_tensor *tensor, int64_t index,
                       const unsigned char **p, mz_err *err) {
    int64_t size = tensor->shape.size, at = tensor->offset + index * size;
    if (tensor->data) {
        *p = tensor->data + index * size;
        return MZ_OK;
    }
    if (at < file->window_at || at + size > file->window_at + file->window_size) {
        int64_t want = file->size - at < WINDOW ? file->size - at : WINDOW;
        file->window_size = 0;
        mz_code code = mz_datafile_read(file, at, file->window, (size_t)want, err);
        if (code)
            return code;
        file->window_at = at;
        file->window_size = want;
    }
    *p = file->window + (at - file->window_at);
    return MZ_OK;
}

/* Walks elements in C order. */
typedef struct cursor {
    int64_t at[MZ_NPY_DIMS], index;
} cursor;

static cursor cursor_at(const mz_tensor *tensor, int64_t first) {
    cursor c = {.index = 0};
    for (int d = tensor->shape.dims - 1; d >= 0; d--) {
        int64_t extent = tensor->shape.extent[d];
        c.at[d] = extent ? first % extent : 0;
        first = extent ? first / extent : 0;
        c.index += c.at[d] * tensor->stride[d];
    }
    return c;
}

static void cursor_next(const mz_tensor *tensor, cursor *c) {
    for (int d = tensor->shape.dims - 1; d >= 0; d--) {
        c->index += tensor->stride[d];
        if (++c->at[d] < tensor->shape.extent[d])
            return;
        c->index -= tensor->stride[d] * tensor->shape.extent[d];
        c->at[d] = 0;
    }
}

mz_code mz_tensor_read_int(mz_datafile *file, const mz_tensor *tensor, const char *what,
                           int64_t first, int64_t count, int64_t *out, mz_err *err) {
    cursor c = cursor_at(tensor, first);
    const unsigned char *p;
    if (tensor->shape.kind != 'i' && tensor->shape.kind != 'u')
        return mz_fail(err, MZ_EINPUT, "%s: %s: floats where integers are expected", file->path,
                       what);
    for (int64_t i = 0; i < count; i++, cursor_next(tensor, &c)) {
        mz_code code = element(file, tensor, c.index, &p, err);
        if (code)
            return code;
        if (!mz_npy_to_int(&tensor->shape, p, &out[i]))
            return mz_fail(err, MZ_EINPUT, "%s: %s: element %lld is too large", file->path, what,
                           (long long)(first + i));
    }
    return MZ_OK;
}

mz_code mz_tensor_read_float(mz_datafile *file, const mz_tensor *tensor, const char *what,
                             int64_t first, int64_t count, float *out, mz_err *err) {
    cursor c = cursor_at(tensor, first);
    const unsigned char *p;
    if (tensor->shape.kind == 'b')
        return mz_fail(err, MZ_EINPUT, "%s: %s: bfloat16; save it as float32", file->path, what);
    for (int64_t i = 0; i < count; i++, cursor_next(tensor, &c)) {
        mz_code code = element(file, tensor, c.index, &p, err);
        if (code)
            return code;
        out[i] = mz_npy_to_float(&tensor->shape, p);
    }
    return MZ_OK;
}
