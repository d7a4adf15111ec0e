/* Replays requests from standard input on the caching allocator; reference_caching.py compares.
 *
 * Lines "room BYTES" (what the device has in all), "take ID BYTES", "give ID", IDs below 65536;
 * after each take and give one line: reserved, allocated, and of a take the address and size it
 * got. */
#include "sim/memory/caching.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { IDS = 65536 };

int main(void) {
    static int32_t block[IDS];
    mz_caching c = {0};
    int64_t device = INT64_MAX / 8;
    char word[8];
    mz_err err = {0};
    while (scanf("%7s", word) == 1) {
        int64_t bytes = 0;
        int id = 0;
        if (strcmp(word, "room") == 0) {
            if (scanf("%" SCNd64, &device) != 1)
                return 2;
            continue;
        }
        if (scanf("%d", &id) != 1 || id < 0 || id >= IDS)
            return 2;
        if (strcmp(word, "give") == 0) {
            mz_caching_give(&c, block[id]);
            printf("%" PRId64 " %" PRId64 "\n", c.reserved, c.allocated);
        } else if (scanf("%" SCNd64, &bytes) == 1 &&
                   mz_caching_take(&c, bytes, device - c.reserved, &block[id], &err) == MZ_OK) {
            const mz_caching_block *b = &c.block[block[id]];
            printf("%" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 "\n", c.reserved, c.allocated,
                   b->address, b->bytes);
        } else {
            fprintf(stderr, "%s\n", err.msg);
            return 2;
        }
    }
    mz_caching_free(&c);
    return 0;
}
