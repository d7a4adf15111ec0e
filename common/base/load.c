#include "common/base/load.h"

#include <string.h>

void mz_load_sum(mz_load *load) {
    memset(load->total, 0, sizeof(int64_t) * (size_t)load->experts);
    load->pairs = 0;
    for (int32_t s = 0; s < load->sources; s++) {
        const int64_t *row = load->count + (int64_t)s * load->experts;
        int64_t sum = 0;
        for (int32_t e = 0; e < load->experts; e++) {
            load->total[e] += row[e];
            sum += row[e];
        }
        load->source[s] = sum;
        load->pairs += sum;
    }
}
