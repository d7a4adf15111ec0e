#include "common/base/rng.h"

#include <math.h>

void mz_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

mz_rng mz_rng_make(uint64_t seed, uint64_t stream) {
    return (mz_rng){.seed = seed, .stream = stream};
}

/* Finaliser of SplitMix64 (Steele, Lea, Flood 2014). */
static uint64_t mix(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

uint64_t mz_rng_stream(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return mix(mix(mix(mix(a) ^ b) ^ c) ^ d);
}

uint32_t mz_rng_u32(mz_rng *rng) {
    if (rng->left == 0) {
        uint32_t counter[4] = {(uint32_t)rng->index, (uint32_t)(rng->index >> 32),
                               (uint32_t)rng->stream, (uint32_t)(rng->stream >> 32)};
        uint32_t key[2] = {(uint32_t)rng->seed, (uint32_t)(rng->seed >> 32)};
        mz_philox(counter, key, rng->block);
        rng->index++;
        rng->left = 4;
    }
    return rng->block[4 - rng->left--];
}

uint64_t mz_rng_u64(mz_rng *rng) {
    uint64_t high = mz_rng_u32(rng);
    return high << 32 | mz_rng_u32(rng);
}

double mz_rng_uniform(mz_rng *rng) {
    return (double)(mz_rng_u64(rng) >> 11) * 0x1.0p-53;
}

uint64_t mz_rng_below(mz_rng *rng, uint64_t n) {
    /* Values below 2^64 mod n would make the low residues more likely: draw again. */
    uint64_t threshold = (0 - n) % n;
    for (;;) {
        uint64_t x = mz_rng_u64(rng);
        if (x >= threshold)
            return x % n;
    }
}

double mz_rng_normal(mz_rng *rng) {
    double radius = sqrt(-2.0 * log(1.0 - mz_rng_uniform(rng)));
    return radius * cos(6.283185307179586 * mz_rng_uniform(rng));
}
