/* Chunks of HDF5 datasets as they lie in the file: Fletcher-32, shuffle, deflate, and numbers.
 * Private to this room. Everything here works on untrusted bytes and never reads or writes outside
 * the buffers given. */
#ifndef MIZAN_TRACES_CHUNK_H
#define MIZAN_TRACES_CHUNK_H

#include "traces/schema.h"

/* HDF5 filter numbers (H5Z_FILTER_...). */
enum { MZ_FILTER_DEFLATE = 1, MZ_FILTER_SHUFFLE = 2, MZ_FILTER_FLETCHER32 = 3, MZ_FILTERS_MAX = 8 };

typedef struct mz_pipeline {
    int count; /* filters in the order in which a writer applies them */
    int filter[MZ_FILTERS_MAX];
    size_t elem_size; /* of the dataset, for shuffle */
} mz_pipeline;

/* HDF5's variant of Fletcher's checksum: 16-bit big-endian words, sums modulo 65535 that are zero
 * only for all-zero data, an odd last byte counts as the high byte of a word. */
uint32_t mz_fletcher32(const uint8_t *data, size_t size);

void mz_shuffle(const uint8_t *in, uint8_t *out, size_t size, size_t elem_size);
void mz_unshuffle(const uint8_t *in, uint8_t *out, size_t size, size_t elem_size);

/* Works of decoding and encoding that outlive a call: deflate states and a scratch buffer. */
typedef struct mz_codec mz_codec;
mz_codec *mz_codec_new(int deflate_level); /* level 0: for reading; NULL when memory is short */
void mz_codec_free(mz_codec *codec);

/* Undoes the pipeline (filters whose bit in `mask` is set were not applied) on in[0..size), which
 * must give exactly out_size bytes. Returns NULL, or what is wrong with the chunk; that very text
 * mz_chunk_no_memory when nothing is. */
extern const char mz_chunk_no_memory[];
const char *mz_chunk_decode(mz_codec *codec, const mz_pipeline *pipeline, uint32_t mask,
                            const uint8_t *in, size_t size, uint8_t *out, size_t out_size);

/* Applies the pipeline to data[0..size); *out points into the codec until the next call. A deflate
 * that does not shrink the chunk is left out and its bit set in *mask. False: memory is short. */
bool mz_chunk_encode(mz_codec *codec, const mz_pipeline *pipeline, const uint8_t *data, size_t size,
                     const uint8_t **out, size_t *out_size, uint32_t *mask);

/* Upper bound of the stored size of a chunk of `size` bytes that a sane writer makes. */
size_t mz_chunk_bound(size_t size);

/* Reads integers of any element type as int64; values beyond int64 become -1. */
void mz_read_ints(mz_elem elem, const uint8_t *in, int64_t n, int64_t *out);
void mz_read_reals(mz_elem elem, const uint8_t *in, int64_t n, double *out);

/* ids[0..n) of uint8 or uint16 as uint16 (out may be NULL: only looks). Returns the largest. */
unsigned mz_read_ids(mz_elem elem, const uint8_t *in, int64_t n, uint16_t *out);

/* Non-negative floats stored as float16 or float32 (out may be NULL). False when any value is
 * negative, infinite or not a number. */
bool mz_read_norms(mz_elem elem, const uint8_t *in, int64_t n, float *out);

uint16_t mz_half_from_float(float value); /* nearest, ties to even; infinity above 65504 */
float mz_float_from_half(uint16_t half);

#endif
