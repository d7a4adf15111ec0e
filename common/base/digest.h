/* SHA-256 (FIPS 180-4), for two purposes: which prediction a replay was held against, and whether
 * two replays computed the same bytes. */
#ifndef MIZAN_BASE_DIGEST_H
#define MIZAN_BASE_DIGEST_H

#include "common/base/err.h"

#include <stddef.h>
#include <stdint.h>

enum { MZ_DIGEST_BYTES = 32, MZ_DIGEST_TEXT = 65 };

typedef struct mz_digest {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
} mz_digest;

mz_digest mz_digest_start(void);
void mz_digest_add(mz_digest *digest, const void *data, size_t bytes);
/* The digest of what was added so far; more may be added after it. */
void mz_digest_of(const mz_digest *digest, unsigned char out[MZ_DIGEST_BYTES]);
/* Lower-case hexadecimal. */
void mz_digest_text(const unsigned char digest[MZ_DIGEST_BYTES], char text[MZ_DIGEST_TEXT]);
/* Both at once, of bytes that are at hand. */
void mz_digest_text_of(const void *data, size_t bytes, char text[MZ_DIGEST_TEXT]);
/* Of a whole file; MZ_EINPUT where it cannot be read. */
mz_code mz_digest_file(const char *path, char text[MZ_DIGEST_TEXT], mz_err *err);

#endif
