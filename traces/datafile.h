/* A binary file that is read at any place, and the arrays in it (.npy, safetensors, GGUF, .pt).
 *
 * Sizes and offsets that a file states are checked against its real size before anything is
 * allocated or read. Plain files only: a packed one is MZ_EINPUT that says to unpack it.
 * Threads: one file belongs to one thread at a time. */
#ifndef MIZAN_TRACES_DATAFILE_H
#define MIZAN_TRACES_DATAFILE_H

#include "traces/npy.h"

typedef struct mz_datafile mz_datafile;

mz_code mz_datafile_open(const char *path, mz_datafile **file, mz_err *err);
void mz_datafile_close(mz_datafile **file); /* NULL is fine */
const char *mz_datafile_path(const mz_datafile *file);
int64_t mz_datafile_size(const mz_datafile *file);
/* Exactly `size` bytes from `offset`; MZ_EINPUT when the file does not hold them. */
mz_code mz_datafile_read(mz_datafile *file, int64_t offset, void *data, size_t size, mz_err *err);

uint16_t mz_le16(const unsigned char *p);
uint32_t mz_le32(const unsigned char *p);
uint64_t mz_le64(const unsigned char *p);

/* An array of little-endian numbers; element [i, j, ...] lies stride[0]*i + stride[1]*j + ...
 * elements behind `offset`. Integers and floats as in .npy. */
typedef struct mz_tensor {
    mz_npy_shape shape;
    int64_t stride[MZ_NPY_DIMS];
    int64_t offset;            /* bytes from the beginning of the file */
    const unsigned char *data; /* not NULL: the elements lie here, not in the file */
    int64_t data_bytes;
} mz_tensor;

/* Fills shape.elements and C-order strides from dims and extents. False: too large. */
bool mz_tensor_contiguous(mz_tensor *tensor);
/* MZ_EINPUT naming `what` unless every element lies within the file (or within data). */
mz_code mz_tensor_check(const mz_datafile *file, const mz_tensor *tensor, const char *what,
                        mz_err *err);
/* Elements [first, first + count) in C order, of a tensor that was checked. Floats where integers
 * are wanted, or a value that does not fit: MZ_EINPUT naming file and `what`. */
mz_code mz_tensor_read_int(mz_datafile *file, const mz_tensor *tensor, const char *what,
                           int64_t first, int64_t count, int64_t *out, mz_err *err);
mz_code mz_tensor_read_float(mz_datafile *file, const mz_tensor *tensor, const char *what,
                             int64_t first, int64_t count, float *out, mz_err *err);

#endif
