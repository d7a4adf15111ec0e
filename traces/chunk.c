#include "traces/chunk.h"

#include "common/base/arena.h"

#include <libdeflate.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, BLOCK_WORDS = 320 * LANES };

struct mz_codec {
    struct libdeflate_decompressor *inflate;
    struct libdeflate_compressor *deflate;
    uint8_t *scratch[2];
    size_t size[2];
};

/* Sums of up to BLOCK_WORDS little-endian words: *a = sum of w_i, *b = sum of (words - i) w_i. The
 * lanes run side by side; within 320 rounds neither sum of a lane leaves 32 bits. */
static void fletcher_block(const uint8_t *data, size_t words, uint64_t *a, uint64_t *b) {
    uint32_t sum[LANES] = {0}, sums[LANES] = {0};
    size_t rounds = words / LANES;
    for (size_t i = 0; i < rounds; i++) {
        uint16_t w[LANES];
        memcpy(w, data + i * sizeof w, sizeof w);
        for (int j = 0; j < LANES; j++) {
            sum[j] += w[j];
            sums[j] += sum[j];
        }
    }
    uint64_t first = 0, second = 0;
    for (int j = 0; j < LANES; j++) {
        first += sum[j];
        second += (uint64_t)LANES * sums[j] - (uint64_t)j * sum[j];
    }
    for (size_t i = rounds * LANES; i < words; i++) {
        uint16_t w;
        memcpy(&w, data + 2 * i, 2);
        first += w; /* every word before this one counts once more */
        second += first;
    }
    *a = first;
    *b = second;
}

/* Byte order of the words: swapping the bytes of a 16-bit word multiplies it by 256 modulo 65535,
 * so the sums of little-endian words are turned into those of big-endian ones at the end. */
uint32_t mz_fletcher32(const uint8_t *data, size_t size) {
    uint64_t first = 0, second = 0;
    bool zero = true;
    size_t words = size / 2;
    for (size_t done = 0; done < words;) {
        size_t n = words - done < BLOCK_WORDS ? words - done : BLOCK_WORDS;
        uint64_t a, b;
        fletcher_block(data + 2 * done, n, &a, &b);
        second = (second + n * first + b) % 65535;
        first = (first + a) % 65535;
        zero = zero && a == 0;
        done += n;
    }
    if (size % 2) {
        first = (first + data[size - 1]) % 65535;
        second = (second + first) % 65535;
        zero = zero && data[size - 1] == 0;
    }
    if (zero)
        return 0;
    first = first * 256 % 65535;
    second = second * 256 % 65535;
    uint32_t low = first ? (uint32_t)first : 65535, high = second ? (uint32_t)second : 65535;
    return high << 16 | low;
}

void mz_shuffle(const uint8_t *in, uint8_t *out, size_t size, size_t elem_size) {
    size_t n = size / elem_size;
    for (size_t b = 0; b < elem_size; b++)
        for (size_t i = 0; i < n; i++)
            out[b * n + i] = in[i * elem_size + b];
    memcpy(out + n * elem_size, in + n * elem_size, size - n * elem_size);
}

static void unshuffle2(const uint8_t *in, uint8_t *out, size_t n) {
    const uint8_t *p0 = in, *p1 = in + n;
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = p0[i];
        out[2 * i + 1] = p1[i];
    }
}

static void unshuffle4(const uint8_t *in, uint8_t *out, size_t n) {
    const uint8_t *p0 = in, *p1 = in + n, *p2 = in + 2 * n, *p3 = in + 3 * n;
    for (size_t i = 0; i < n; i++) {
        out[4 * i] = p0[i];
        out[4 * i + 1] = p1[i];
        out[4 * i + 2] = p2[i];
        out[4 * i + 3] = p3[i];
    }
}

void mz_unshuffle(const uint8_t *in, uint8_t *restrict out, size_t size, size_t elem_size) {
    size_t n = size / elem_size;
    if (elem_size == 2) {
        unshuffle2(in, out, n);
    } else if (elem_size == 4) {
        unshuffle4(in, out, n);
    } else {
        for (size_t b = 0; b < elem_size; b++)
            for (size_t i = 0; i < n; i++)
                out[i * elem_size + b] = in[b * n + i];
    }
    memcpy(out + n * elem_size, in + n * elem_size, size - n * elem_size);
}

mz_codec *mz_codec_new(int deflate_level) {
    mz_codec *codec = mz_calloc(1, sizeof *codec);
    if (!codec)
        return NULL;
    codec->inflate = libdeflate_alloc_decompressor();
    if (deflate_level > 0)
        codec->deflate = libdeflate_alloc_compressor(deflate_level);
    if (!codec->inflate || (deflate_level > 0 && !codec->deflate)) {
        mz_codec_free(codec);
        return NULL;
    }
    return codec;
}

void mz_codec_free(mz_codec *codec) {
    if (!codec)
        return;
    libdeflate_free_decompressor(codec->inflate);
    libdeflate_free_compressor(codec->deflate);
    free(codec->scratch[0]);
    free(codec->scratch[1]);
    free(codec);
}

static uint8_t *scratch_of(mz_codec *codec, int which, size_t size) {
    if (codec->size[which] < size) {
        free(codec->scratch[which]);
        codec->scratch[which] = malloc(size);
        codec->size[which] = codec->scratch[which] ? size : 0;
    }
    return codec->scratch[which];
}

static const char *undo_fletcher(const uint8_t *in, size_t *size) {
    if (*size < 4)
        return "the chunk is shorter than its checksum";
    const uint8_t *end = in + *size - 4;
    uint32_t stored =
        end[0] | (uint32_t)end[1] << 8 | (uint32_t)end[2] << 16 | (uint32_t)end[3] << 24;
    *size -= 4;
    return mz_fletcher32(in, *size) == stored ? NULL : "the checksum does not match: damaged data";
}

/* Whether undoing filter i is the last work on the chunk: its result goes straight to the caller.
 */
static bool last_filter(const mz_pipeline *pipeline, uint32_t mask, int i) {
    while (--i >= 0) {
        bool idle = pipeline->filter[i] == MZ_FILTER_SHUFFLE && pipeline->elem_size == 1;
        if (!(mask >> i & 1) && !idle)
            return false;
    }
    return true;
}

const char mz_chunk_no_memory[] = "out of memory";

const char *mz_chunk_decode(mz_codec *codec, const mz_pipeline *pipeline, uint32_t mask,
                            const uint8_t *in, size_t size, uint8_t *out, size_t out_size) {
    int which = 0;
    for (int i = pipeline->count - 1; i >= 0; i--) {
        if (mask >> i & 1)
            continue;
        if (pipeline->filter[i] == MZ_FILTER_FLETCHER32) {
            const char *wrong = undo_fletcher(in, &size);
            if (wrong)
                return wrong;
            continue;
        }
        if (pipeline->filter[i] == MZ_FILTER_SHUFFLE && pipeline->elem_size == 1)
            continue;
        /* A checksum may lie inside; more than that cannot be a valid chunk. */
        bool last = last_filter(pipeline, mask, i);
        size_t room = last ? out_size : out_size + 4;
        uint8_t *to = last ? out : scratch_of(codec, which, room);
        which = 1 - which;
        if (!to)
            return mz_chunk_no_memory;
        if (pipeline->filter[i] == MZ_FILTER_SHUFFLE) {
            if (size > room)
                return "the chunk is larger than its shape says";
            mz_unshuffle(in, to, size, pipeline->elem_size);
        } else {
            size_t got = 0;
            if (libdeflate_zlib_decompress(codec->inflate, in, size, to, room, &got))
                return "the compressed data is damaged";
            size = got;
        }
        in = to;
    }
    if (size != out_size)
        return "the chunk has another size than its shape says";
    if (in != out)
        memcpy(out, in, out_size);
    return NULL;
}

static bool deflate_into(mz_codec *codec, const uint8_t **data, size_t *size, uint8_t *to,
                         size_t room) {
    size_t got = libdeflate_zlib_compress(codec->deflate, *data, *size, to, room);
    if (got == 0 || got >= *size)
        return false;
    *data = to;
    *size = got;
    return true;
}

bool mz_chunk_encode(mz_codec *codec, const mz_pipeline *pipeline, const uint8_t *data, size_t size,
                     const uint8_t **out, size_t *out_size, uint32_t *mask) {
    int which = 0;
    *mask = 0;
    for (int i = 0; i < pipeline->count; i++) {
        uint8_t *to = scratch_of(codec, which, size + 4);
        if (!to)
            return false;
        if (pipeline->filter[i] == MZ_FILTER_SHUFFLE) {
            if (pipeline->elem_size == 1)
                continue;
            mz_shuffle(data, to, size, pipeline->elem_size);
            data = to;
        } else if (pipeline->filter[i] == MZ_FILTER_DEFLATE) {
            if (!deflate_into(codec, &data, &size, to, size)) {
                *mask |= 1u << i;
                continue;
            }
        } else {
            uint32_t sum = mz_fletcher32(data, size);
            memcpy(to, data, size);
            for (int b = 0; b < 4; b++)
                to[size + (size_t)b] = (uint8_t)(sum >> 8 * b);
            data = to;
            size += 4;
        }
        which = 1 - which;
    }
    *out = data;
    *out_size = size;
    return true;
}

size_t mz_chunk_bound(size_t size) {
    return size + size / 256 + 1024;
}

#define READ_INTS(type)                                                                            \
    for (int64_t i = 0; i < n; i++) {                                                              \
        type v;                                                                                    \
        memcpy(&v, in + (size_t)i * sizeof v, sizeof v);                                           \
        out[i] = (int64_t)v;                                                                       \
    }                                                                                              \
    break

void mz_read_ints(mz_elem elem, const uint8_t *in, int64_t n, int64_t *out) {
    switch (elem) {
    case MZ_ELEM_U8:
        READ_INTS(uint8_t);
    case MZ_ELEM_U16:
        READ_INTS(uint16_t);
    case MZ_ELEM_U32:
        READ_INTS(uint32_t);
    case MZ_ELEM_I8:
        READ_INTS(int8_t);
    case MZ_ELEM_I16:
        READ_INTS(int16_t);
    case MZ_ELEM_I32:
        READ_INTS(int32_t);
    case MZ_ELEM_I64:
        READ_INTS(int64_t);
    case MZ_ELEM_U64:
        for (int64_t i = 0; i < n; i++) {
            uint64_t v;
            memcpy(&v, in + 8 * (size_t)i, 8);
            out[i] = v > INT64_MAX ? -1 : (int64_t)v;
        }
        break;
    default:
        memset(out, 0xff, 8 * (size_t)n);
    }
}

void mz_read_reals(mz_elem elem, const uint8_t *in, int64_t n, double *out) {
    if (elem == MZ_ELEM_F64) {
        memcpy(out, in, 8 * (size_t)n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float v;
        memcpy(&v, in + 4 * (size_t)i, 4);
        out[i] = (double)v;
    }
}

unsigned mz_read_ids(mz_elem elem, const uint8_t *in, int64_t n, uint16_t *restrict out) {
    if (elem == MZ_ELEM_U8) {
        uint8_t largest = 0;
        for (int64_t i = 0; i < n; i++)
            largest = in[i] > largest ? in[i] : largest;
        if (out)
            for (int64_t i = 0; i < n; i++)
                out[i] = in[i];
        return largest;
    }
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, in + 2 * (size_t)i, 2);
        largest = v > largest ? v : largest;
    }
    if (out)
        memcpy(out, in, 2 * (size_t)n);
    return largest;
}

float mz_float_from_half(uint16_t half) {
    /* The exponent of a half, moved to where a float has it, is too small by 127 - 15 = 112: one
     * exact multiplication sets it right, for subnormal halves too. */
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, 4);
    return value * 0x1p112f;
}

uint16_t mz_half_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return sign | 0x7e00;
    if (bits >= 0x477ff000) /* 65520 and above round to infinity */
        return sign | 0x7c00;
    if (bits < 0x38800000) { /* below 2^-14: counted in units of 2^-24, ties to even */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        return sign | (uint16_t)lrintf(magnitude * 0x1p24f);
    }
    uint32_t odd = bits >> 13 & 1;
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + odd) >> 13);
}

/* Plain comparison decides about rare values (minus zero is fine) once the fast test has failed. */
static bool norms_fine(mz_elem elem, const uint8_t *in, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (elem == MZ_ELEM_F16) {
            uint16_t v;
            memcpy(&v, in + 2 * (size_t)i, 2);
            if (v >= 0x7c00 && v != 0x8000)
                return false;
        } else {
            float v;
            memcpy(&v, in + 4 * (size_t)i, 4);
            if (!(v >= 0 && v <= 3.402823466e38f))
                return false;
        }
    }
    return true;
}

static uint32_t read_halves(const uint8_t *in, int64_t n, float *restrict out) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, in + 2 * (size_t)i, 2);
        largest = v > largest ? v : largest;
    }
    if (out)
        for (int64_t i = 0; i < n; i++) {
            uint16_t v;
            memcpy(&v, in + 2 * (size_t)i, 2);
            out[i] = mz_float_from_half(v);
        }
    return largest;
}

static uint32_t largest_bits(const uint8_t *in, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t v;
        memcpy(&v, in + 4 * (size_t)i, 4);
        largest = v > largest ? v : largest;
    }
    return largest;
}

bool mz_read_norms(mz_elem elem, const uint8_t *in, int64_t n, float *out) {
    bool fast;
    if (elem == MZ_ELEM_F16) {
        fast = read_halves(in, n, out) < 0x7c00;
    } else {
        fast = largest_bits(in, n) < 0x7f800000;
        if (out)
            memcpy(out, in, 4 * (size_t)n);
    }
    return fast || norms_fine(elem, in, n);
}
