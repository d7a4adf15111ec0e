/* Checksums, filters and number formats against HDF5 itself and against plain definitions. */
#include "tests/harness.h"

#include "common/base/rng.h"
#include "traces/chunk.h"

#include <hdf5.h>
#include <math.h>

static void fill(uint8_t *data, size_t n, uint64_t seed) {
    mz_rng rng = mz_rng_make(seed, 1);
    for (size_t i = 0; i < n; i++)
        data[i] = (uint8_t)(mz_rng_u32(&rng) % 23);
}

/* The definition in FORMAT.md, word by word. */
static uint32_t fletcher_by_definition(const uint8_t *data, size_t size) {
    uint64_t s1 = 0, s2 = 0;
    bool zero = true;
    for (size_t i = 0; i < size; i += 2) {
        uint64_t word = (uint64_t)data[i] << 8 | (i + 1 < size ? data[i + 1] : 0);
        s1 = (s1 + word) % 65535;
        s2 = (s2 + s1) % 65535;
        zero = zero && word == 0;
    }
    if (zero)
        return 0;
    return (uint32_t)((s2 ? s2 : 65535) << 16 | (s1 ? s1 : 65535));
}

static void test_fletcher_definition(void **state) {
    static uint8_t data[40000];
    const size_t sizes[] = {0, 1, 2, 3, 31, 32, 33, 63, 64, 719, 720, 10239, 10240, 10241, 39999};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        fill(data, sizes[i], i);
        assert_int_equal(mz_fletcher32(data, sizes[i]), fletcher_by_definition(data, sizes[i]));
    }
    memset(data, 0, sizeof data);
    assert_int_equal(mz_fletcher32(data, sizeof data), 0);
    memset(data, 0xff, sizeof data); /* every word is 65535, which is 0 modulo 65535 */
    assert_int_equal(mz_fletcher32(data, sizeof data), 0xffffffff);
}

/* HDF5 writes a chunk through its own filters, we decode its raw bytes, for every pipeline. */
static void round_with_hdf5(int shuffle, int deflate, size_t elem, uint64_t seed) {
    enum { N = 5000 };
    static uint8_t data[8 * N], raw[8 * N + 4096], back[8 * N];
    char directory[256], path[300];
    make_directory(directory, sizeof directory);
    snprintf(path, sizeof path, "%s/x.h5", directory);
    fill(data, elem * N, seed);
    mz_pipeline pipeline = {.elem_size = elem};
    hsize_t n = N, offset = 0, stored = 0;
    hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t space = H5Screate_simple(1, &n, NULL), plist = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(plist, 1, &n);
    if (shuffle) {
        H5Pset_shuffle(plist);
        pipeline.filter[pipeline.count++] = MZ_FILTER_SHUFFLE;
    }
    if (deflate) {
        H5Pset_deflate(plist, 4);
        pipeline.filter[pipeline.count++] = MZ_FILTER_DEFLATE;
    }
    H5Pset_fletcher32(plist);
    pipeline.filter[pipeline.count++] = MZ_FILTER_FLETCHER32;
    hid_t type = H5Tcopy(H5T_STD_U8LE);
    H5Tset_size(type, elem);
    hid_t set = H5Dcreate2(file, "x", type, space, H5P_DEFAULT, plist, H5P_DEFAULT);
    assert_true(H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
    H5Fflush(file, H5F_SCOPE_GLOBAL);
    uint32_t mask = 0;
    assert_true(H5Dget_chunk_storage_size(set, &offset, &stored) >= 0 && stored < sizeof raw);
    assert_true(H5Dread_chunk(set, H5P_DEFAULT, &offset, &mask, raw) >= 0);
    mz_codec *codec = mz_codec_new(4);
    const char *wrong =
        mz_chunk_decode(codec, &pipeline, mask, raw, (size_t)stored, back, elem * N);
    assert_null(wrong);
    assert_memory_equal(back, data, elem * N);
    /* A changed byte anywhere is noticed. */
    for (hsize_t at = 0; at < stored; at += 1 + stored / 97) {
        raw[at] ^= 0x10;
        assert_non_null(
            mz_chunk_decode(codec, &pipeline, mask, raw, (size_t)stored, back, elem * N));
        raw[at] ^= 0x10;
    }
    /* And the other way: HDF5 reads what we encode. */
    const uint8_t *encoded;
    size_t size;
    assert_true(mz_chunk_encode(codec, &pipeline, data, elem * N, &encoded, &size, &mask));
    assert_true(H5Dwrite_chunk(set, H5P_DEFAULT, mask, &offset, size, encoded) >= 0);
    memset(back, 0, sizeof back);
    assert_true(H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, back) >= 0);
    assert_memory_equal(back, data, elem * N);
    mz_codec_free(codec);
    H5Dclose(set);
    H5Tclose(type);
    H5Pclose(plist);
    H5Sclose(space);
    H5Fclose(file);
    remove_directory(directory);
}

static void test_hdf5_filters(void **state) {
    const size_t sizes[] = {1, 2, 4, 8};
    for (int shuffle = 0; shuffle < 2; shuffle++)
        for (int deflate = 0; deflate < 2; deflate++)
            for (int i = 0; i < 4; i++)
                round_with_hdf5(shuffle, deflate, sizes[i], (uint64_t)i);
}

static void test_incompressible_chunk(void **state) {
    enum { N = 4096 };
    uint8_t data[N], back[N];
    mz_rng rng = mz_rng_make(3, 3);
    for (int i = 0; i < N; i++)
        data[i] = (uint8_t)mz_rng_u32(&rng);
    mz_pipeline pipeline = {
        3, {MZ_FILTER_SHUFFLE, MZ_FILTER_DEFLATE, MZ_FILTER_FLETCHER32}, .elem_size = 2};
    mz_codec *codec = mz_codec_new(9);
    const uint8_t *encoded;
    size_t size;
    uint32_t mask;
    assert_true(mz_chunk_encode(codec, &pipeline, data, N, &encoded, &size, &mask));
    assert_int_equal(mask, 2); /* deflate left out */
    assert_int_equal(size, N + 4);
    uint8_t *copy = malloc(size);
    memcpy(copy, encoded, size);
    assert_null(mz_chunk_decode(codec, &pipeline, mask, copy, size, back, N));
    assert_memory_equal(back, data, N);
    free(copy);
    mz_codec_free(codec);
}

static double half_by_definition(uint16_t h) {
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double magnitude = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
    return h & 0x8000 ? -magnitude : magnitude;
}

static void test_half(void **state) {
    for (uint32_t h = 0; h < 0x7c00; h++) {
        float value = mz_float_from_half((uint16_t)h);
        assert_true((double)value == half_by_definition((uint16_t)h));
        assert_int_equal(mz_half_from_float(value), h);
        /* Halfway to the next goes to the even one, a hair beside it to the nearer one. */
        if (h + 1 < 0x7c00) {
            float next = mz_float_from_half((uint16_t)(h + 1));
            float middle = (value + next) / 2;
            assert_int_equal(mz_half_from_float(middle), h + (h & 1));
            assert_int_equal(mz_half_from_float(nextafterf(middle, 0)), h);
            assert_int_equal(mz_half_from_float(nextafterf(middle, 1e9f)), h + 1);
        }
    }
    assert_int_equal(mz_half_from_float(65519.f), 0x7bff);
    assert_int_equal(mz_half_from_float(65520.f), 0x7c00);
    assert_int_equal(mz_half_from_float(-1.5f), 0xbe00);
    assert_true((mz_half_from_float(NAN) & 0x7fff) > 0x7c00);
}

static void test_norms(void **state) {
    const float good[] = {0, 1, -0.f, 3.4e38f, 1e-45f};
    const float bad[] = {-1, NAN, INFINITY, -1e-45f, -INFINITY};
    const uint16_t good_half[] = {0, 0x8000, 0x7bff, 1},
                   bad_half[] = {0x7c00, 0x7e00, 0x8001, 0xfc00};
    float out[64];
    for (int i = 0; i < 5; i++) {
        float values[37] = {0};
        values[3 * i + 7] = good[i];
        assert_true(mz_read_norms(MZ_ELEM_F32, (const uint8_t *)values, 37, out));
        assert_true(out[3 * i + 7] == good[i]);
        values[3 * i + 7] = bad[i];
        assert_false(mz_read_norms(MZ_ELEM_F32, (const uint8_t *)values, 37, out));
    }
    for (int i = 0; i < 4; i++) {
        uint16_t values[37] = {0};
        values[5 * i + 9] = good_half[i];
        assert_true(mz_read_norms(MZ_ELEM_F16, (const uint8_t *)values, 37, out));
        values[5 * i + 9] = bad_half[i];
        assert_false(mz_read_norms(MZ_ELEM_F16, (const uint8_t *)values, 37, NULL));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_fletcher_definition),
                                       cmocka_unit_test(test_hdf5_filters),
                                       cmocka_unit_test(test_incompressible_chunk),
                                       cmocka_unit_test(test_half), cmocka_unit_test(test_norms)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
