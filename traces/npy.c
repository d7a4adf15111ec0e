#include "traces/npy.h"

#include <stdlib.h>
#include <string.h>

enum { NPY_MAX_HEADER = 4096, NPY_BUFFER = 1 << 16 };

float mz_half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = half >> 10 & 0x1fu, fraction = half & 0x3ffu;
    uint32_t bits;
    if (exponent == 0) {
        float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    if (exponent == 31)
        bits = sign | 0x7f800000u | fraction << 13;
    else
        bits = sign | (exponent + 112u) << 23 | fraction << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The text after "'key':" of the header's dictionary, or NULL. */
static const char *find_key(const char *text, const char *key) {
    size_t n = strlen(key);
    for (const char *p = text; (p = strstr(p, key)) != NULL; p += n) {
        if (p == text || (p[-1] != '\'' && p[-1] != '"') || (p[n] != '\'' && p[n] != '"'))
            continue;
        const char *value = p + n + 1;
        value += strspn(value, " ");
        if (*value == ':')
            return value + 1 + strspn(value + 1, " ");
    }
    return NULL;
}

static mz_code parse_type(const char *path, const char *text, mz_npy_shape *shape, mz_err *err) {
    if (*text != '\'' && *text != '"')
        return mz_fail(
            err, MZ_EINPUT,
            "%s: a structured array (fields); save the array of one field with numpy.save", path);
    char order = text[1], kind = text[2];
    int size = text[2] ? atoi(text + 3) : 0;
    if (kind == 'O')
        return mz_fail(err, MZ_EINPUT,
                       "%s: an array of Python objects; save numbers (array.astype(...)) instead",
                       path);
    bool known =
        ((kind == 'u' || kind == 'i') && (size == 1 || size == 2 || size == 4 || size == 8)) ||
        (kind == 'f' && (size == 2 || size == 4 || size == 8));
    if (!known)
        return mz_fail(
            err, MZ_EINPUT,
            "%s: element type %.*s is not supported; use integers or floats (u1 u2 u4 u8 "
            "i1 i2 i4 i8 f2 f4 f8)",
            path, (int)strcspn(text + 1, "'\",}") + 2, text);
    if (order == '>' && size > 1)
        return mz_fail(
            err, MZ_EINPUT,
            "%s: big-endian elements; save it with array.astype(array.dtype.newbyteorder("
            "'<'))",
            path);
    shape->kind = kind;
    shape->size = size;
    return MZ_OK;
}

static mz_code parse_extents(const char *path, const char *text, mz_npy_shape *shape, mz_err *err) {
    if (*text != '(')
        return mz_fail(err, MZ_EINPUT, "%s: the .npy header has no valid shape", path);
    shape->dims = 0;
    shape->elements = 1;
    for (const char *p = text + 1;;) {
        p += strspn(p, " ,");
        if (*p == ')')
            return MZ_OK;
        char *end;
        long long extent = strtoll(p, &end, 10);
        if (end == p || extent < 0)
            return mz_fail(err, MZ_EINPUT, "%s: the .npy header has no valid shape", path);
        if (shape->dims == MZ_NPY_DIMS)
            return mz_fail(err, MZ_EINPUT, "%s: more than %d dimensions", path, MZ_NPY_DIMS);
        if (extent > 0 && shape->elements > INT64_MAX / 8 / extent)
            return mz_fail(err, MZ_EINPUT, "%s: the shape in the .npy header is too large", path);
        shape->extent[shape->dims++] = extent;
        shape->elements *= extent;
        p = *end == 'L' ? end + 1 : end;
    }
}

/* Length of magic, version and length field together, or 0; *text_bytes: what follows. */
static size_t preamble(const unsigned char *data, size_t size, size_t *text_bytes) {
    if (size < 12 || memcmp(data, "\x93NUMPY", 6) != 0)
        return 0;
    *text_bytes = (size_t)data[8] | (size_t)data[9] << 8;
    if (data[6] == 1)
        return 10;
    *text_bytes |= (size_t)data[10] << 16 | (size_t)data[11] << 24;
    return data[6] == 2 || data[6] == 3 ? 12 : 0;
}

mz_code mz_npy_parse(const char *path, const unsigned char *data, size_t size, mz_npy_shape *shape,
                     mz_err *err) {
    size_t bytes = 0, start = preamble(data, size, &bytes);
    if (start == 0)
        return mz_fail(err, MZ_EINPUT, "%s: not a .npy file of format 1, 2 or 3", path);
    if (bytes > NPY_MAX_HEADER - start)
        return mz_fail(err, MZ_EINPUT, "%s: the .npy header is longer than %d bytes", path,
                       NPY_MAX_HEADER);
    if (start + bytes > size)
        return mz_fail(err, MZ_EINPUT, "%s: the file ends within the .npy header: it is truncated",
                       path);
    char text[NPY_MAX_HEADER + 1];
    memcpy(text, data + start, bytes);
    text[bytes] = '\0';
    *shape = (mz_npy_shape){.header_bytes = start + bytes};
    const char *type = find_key(text, "descr"), *order = find_key(text, "fortran_order");
    const char *extents = find_key(text, "shape");
    if (!type || !order || !extents)
        return mz_fail(err, MZ_EINPUT, "%s: the .npy header lacks descr, fortran_order or shape",
                       path);
    if (strncmp(order, "False", 5) != 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: Fortran order; save it with numpy.ascontiguousarray(array)", path);
    mz_code code = parse_type(path, type, shape, err);
    return code ? code : parse_extents(path, extents, shape, err);
}

mz_code mz_npy_open(const char *path, mz_npy *npy, mz_err *err) {
    *npy = (mz_npy){0};
    mz_code code = mz_input_open(path, &npy->input, err);
    if (code)
        return code;
    const unsigned char *head;
    size_t size, got = 0;
    unsigned char skipped[NPY_MAX_HEADER];
    code = mz_input_peek(npy->input, &head, &size, err);
    if (!code)
        code = mz_npy_parse(path, head, size, &npy->shape, err);
    if (!code)
        code = mz_input_read(npy->input, skipped, npy->shape.header_bytes, &got, err);
    if (code)
        mz_npy_close(npy);
    return code;
}

bool mz_npy_to_int(const mz_npy_shape *shape, const unsigned char *p, int64_t *value) {
    uint64_t raw = 0;
    for (int i = shape->size - 1; i >= 0; i--)
        raw = raw << 8 | p[i];
    if (shape->kind == 'i' && shape->size < 8) {
        uint64_t sign = UINT64_C(1) << (8 * shape->size - 1);
        raw = (raw ^ sign) - sign;
    }
    *value = (int64_t)raw;
    return shape->kind == 'i' || raw <= INT64_MAX;
}

float mz_npy_to_float(const mz_npy_shape *shape, const unsigned char *p) {
    if (shape->kind != 'f') {
        int64_t value;
        mz_npy_to_int(shape, p, &value);
        return (float)value;
    }
    if (shape->size == 2)
        return mz_half_to_float((uint16_t)(p[0] | p[1] << 8));
    if (shape->size == 4) {
        float value;
        memcpy(&value, p, 4);
        return value;
    }
    double value;
    memcpy(&value, p, 8);
    return (float)value;
}

/* Fills `buffer` with up to its size of whole elements, no more than `count`. */
static mz_code next_elements(mz_npy *npy, unsigned char *buffer, int64_t count, int64_t *have,
                             mz_err *err) {
    int64_t size = npy->shape.size, most = NPY_BUFFER / size;
    *have = count < most ? count : most;
    size_t got = 0;
    mz_code code = mz_input_read(npy->input, buffer, (size_t)(*have * size), &got, err);
    if (code)
        return code;
    if ((int64_t)got < *have * size)
        return mz_fail(err, MZ_EINPUT, "%s: the file ends at element %lld of %lld: it is truncated",
                       mz_input_path(npy->input), (long long)(npy->done + (int64_t)got / size),
                       (long long)npy->shape.elements);
    return MZ_OK;
}

mz_code mz_npy_read_int(mz_npy *npy, int64_t *out, int64_t count, mz_err *err) {
    unsigned char buffer[NPY_BUFFER];
    if (npy->shape.kind == 'f')
        return mz_fail(err, MZ_EINPUT, "%s: floats where integers are expected",
                       mz_input_path(npy->input));
    for (int64_t have; count > 0; count -= have) {
        mz_code code = next_elements(npy, buffer, count, &have, err);
        if (code)
            return code;
        for (int64_t i = 0; i < have; i++)
            if (!mz_npy_to_int(&npy->shape, buffer + i * npy->shape.size, out++))
                return mz_fail(err, MZ_EINPUT, "%s: element %lld is too large",
                               mz_input_path(npy->input), (long long)(npy->done + i));
        npy->done += have;
    }
    return MZ_OK;
}

mz_code mz_npy_read_float(mz_npy *npy, float *out, int64_t count, mz_err *err) {
    unsigned char buffer[NPY_BUFFER];
    for (int64_t have; count > 0; count -= have) {
        mz_code code = next_elements(npy, buffer, count, &have, err);
        if (code)
            return code;
        for (int64_t i = 0; i < have; i++)
            *out++ = mz_npy_to_float(&npy->shape, buffer + i * npy->shape.size);
        npy->done += have;
    }
    return MZ_OK;
}

mz_code mz_npy_finish(mz_npy *npy, mz_err *err) {
    unsigned char byte;
    size_t got = 0;
    if (npy->done != npy->shape.elements)
        return mz_fail(err, MZ_EINTERNAL, "%s: only %lld of %lld elements were read",
                       mz_input_path(npy->input), (long long)npy->done,
                       (long long)npy->shape.elements);
    mz_code code = mz_input_read(npy->input, &byte, 1, &got, err);
    if (code)
        return code;
    if (got)
        return mz_fail(err, MZ_EINPUT, "%s: bytes follow the last of %lld elements",
                       mz_input_path(npy->input), (long long)npy->shape.elements);
    return MZ_OK;
}

void mz_npy_close(mz_npy *npy) {
    if (npy->input)
        mz_input_close(&npy->input);
    npy->input = NULL;
}
