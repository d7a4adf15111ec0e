/* Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
 * 1, 2, 3", SC'11). A stream is (seed, stream id); draw i of a stream is a pure function of
 * (seed, stream, i), so results do not depend on threads or order of use. No global state. */
#ifndef MIZAN_BASE_RNG_H
#define MIZAN_BASE_RNG_H

#include <stdint.h>

typedef struct mz_rng {
    uint64_t seed, stream; /* key and high counter */
    uint64_t index;        /* number of 128-bit blocks used */
    uint32_t block[4];
    int left; /* unused 32-bit words of block */
} mz_rng;

/* One Philox block: out = philox4x32-10(counter, key). Known-answer vectors are in the paper's
 * code. */
void mz_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

mz_rng mz_rng_make(uint64_t seed, uint64_t stream);

/* Mixes up to four coordinates (step, layer, rank, ...) into one stream id. */
uint64_t mz_rng_stream(uint64_t a, uint64_t b, uint64_t c, uint64_t d);

uint32_t mz_rng_u32(mz_rng *rng);
uint64_t mz_rng_u64(mz_rng *rng);
double mz_rng_uniform(mz_rng *rng);             /* [0, 1), 53 bits */
uint64_t mz_rng_below(mz_rng *rng, uint64_t n); /* unbiased, n > 0 */
double mz_rng_normal(mz_rng *rng);              /* mean 0, standard deviation 1 */

#endif
