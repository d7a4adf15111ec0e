/* Streaming reader of NumPy's .npy files (format versions 1.0, 2.0 and 3.0), plain, gzip or xz.
 *
 * C order only; little-endian u1, u2, u4, u8, i1, i2, i4, i8, f2, f4, f8. Fortran order,
 * big-endian, boolean, complex, structured and object arrays are MZ_EINPUT and the message says how
 * to convert. Elements are read in file order, converted; nothing is kept beyond a small buffer.
 * Format: numpy.lib.format of the NumPy manual.
 * Threads: one reader belongs to one thread at a time. */
#ifndef MIZAN_TRACES_NPY_H
#define MIZAN_TRACES_NPY_H

#include "common/base/err.h"
#include "common/io/input.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MZ_NPY_DIMS = 8 };

typedef struct mz_npy_shape {
    int dims;                    /* 0 to MZ_NPY_DIMS */
    int64_t extent[MZ_NPY_DIMS]; /* slowest first */
    int64_t elements;            /* their product */
    char kind;                   /* 'u', 'i' or 'f' */
    int size;                    /* bytes of one element */
    size_t header_bytes;         /* where the data begins */
} mz_npy_shape;

typedef struct mz_npy {
    mz_input *input;
    mz_npy_shape shape;
    int64_t done; /* elements read so far */
} mz_npy;

/* Reads a header that lies wholly in `data`. `path` only names the file in the message. */
mz_code mz_npy_parse(const char *path, const unsigned char *data, size_t size, mz_npy_shape *shape,
                     mz_err *err);

mz_code mz_npy_open(const char *path, mz_npy *npy, mz_err *err);
/* The next `count` elements. Integers: MZ_EINPUT if the array holds floats or a value does not fit.
 * Floats: any type is converted. A file that ends early is MZ_EINPUT with the element's index. */
mz_code mz_npy_read_int(mz_npy *npy, int64_t *out, int64_t count, mz_err *err);
mz_code mz_npy_read_float(mz_npy *npy, float *out, int64_t count, mz_err *err);
/* After the last element: MZ_EINPUT if elements are left or bytes follow. */
mz_code mz_npy_finish(mz_npy *npy, mz_err *err);
void mz_npy_close(mz_npy *npy);

/* One element at `p`. An integer that int64 cannot hold: false. */
bool mz_npy_to_int(const mz_npy_shape *shape, const unsigned char *p, int64_t *value);
float mz_npy_to_float(const mz_npy_shape *shape, const unsigned char *p);

/* IEEE 754 binary16 to binary32. */
float mz_half_to_float(uint16_t half);

#endif
