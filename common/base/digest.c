#include "common/base/digest.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t round_constant[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t turn(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

static void take_block(uint32_t state[8], const unsigned char *block) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10) + w[i - 7] +
               (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 16];
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; i++) {
        const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
        const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        const uint32_t one = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) + choice +
                             round_constant[i] + w[i];
        const uint32_t two = (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) + majority;
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += one;
        v[0] = one + two;
    }
    for (int i = 0; i < 8; i++)
        state[i] += v[i];
}

mz_digest mz_digest_start(void) {
    return (mz_digest){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                                 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void mz_digest_add(mz_digest *d, const void *data, size_t bytes) {
    const unsigned char *at = data;
    size_t held = d->bytes % 64;
    d->bytes += bytes;
    while (bytes > 0) {
        const size_t part = bytes < 64 - held ? bytes : 64 - held;
        memcpy(d->block + held, at, part);
        held += part;
        at += part;
        bytes -= part;
        if (held == 64) {
            take_block(d->state, d->block);
            held = 0;
        }
    }
}

void mz_digest_of(const mz_digest *digest, unsigned char out[MZ_DIGEST_BYTES]) {
    mz_digest d = *digest;
    const uint64_t bits = 8 * d.bytes;
    unsigned char end[72] = {0x80}, *length = end + 1;
    const size_t zeros = (119 - d.bytes % 64) % 64;
    length += zeros;
    for (int i = 0; i < 8; i++)
        length[i] = (unsigned char)(bits >> (56 - 8 * i));
    mz_digest_add(&d, end, 1 + zeros + 8);
    for (int i = 0; i < MZ_DIGEST_BYTES; i++)
        out[i] = (unsigned char)(d.state[i / 4] >> (24 - 8 * (i % 4)));
}

void mz_digest_text(const unsigned char digest[MZ_DIGEST_BYTES], char text[MZ_DIGEST_TEXT]) {
    for (int i = 0; i < MZ_DIGEST_BYTES; i++)
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
}

void mz_digest_text_of(const void *data, size_t bytes, char text[MZ_DIGEST_TEXT]) {
    unsigned char out[MZ_DIGEST_BYTES];
    mz_digest digest = mz_digest_start();
    mz_digest_add(&digest, data, bytes);
    mz_digest_of(&digest, out);
    mz_digest_text(out, text);
}

mz_code mz_digest_file(const char *path, char text[MZ_DIGEST_TEXT], mz_err *err) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return mz_fail(err, MZ_EINPUT, "%s: %s", path, strerror(errno));
    mz_digest d = mz_digest_start();
    unsigned char buffer[16384], digest[MZ_DIGEST_BYTES];
    size_t got = 0;
    while ((got = fread(buffer, 1, sizeof buffer, file)) > 0)
        mz_digest_add(&d, buffer, got);
    const int failed = ferror(file);
    fclose(file);
    if (failed)
        return mz_fail(err, MZ_EINPUT, "%s: cannot be read", path);
    mz_digest_of(&d, digest);
    mz_digest_text(digest, text);
    return MZ_OK;
}
