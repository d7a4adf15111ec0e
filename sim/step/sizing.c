#include "sim/step/sizing.h"

bool mz_sizing_init(mz_sizing *sizing, int32_t ranks, mz_arena *arena) {
    *sizing = (mz_sizing){.ranks = ranks, .most = MZ_NEW(arena, int64_t, ranks)};
    return sizing->most;
}

void mz_sizing_add(mz_sizing *sizing, const int64_t *rank_bytes) {
    int64_t sum = 0, worst = 0;
    for (int32_t r = 0; r < sizing->ranks; r++) {
        sum += rank_bytes[r];
        worst = rank_bytes[r] > worst ? rank_bytes[r] : worst;
        if (rank_bytes[r] > sizing->most[r])
            sizing->most[r] = rank_bytes[r];
    }
    sizing->sum += (double)sum;
    sizing->worst += (double)worst;
    sizing->steps++;
}

mz_sized mz_sizing_result(const mz_sizing *sizing) {
    mz_sized sized = {0};
    if (sizing->steps == 0)
        return sized;
    for (int32_t r = 0; r < sizing->ranks; r++) {
        sized.highwater_sum += sizing->most[r];
        if (sizing->most[r] > sized.highwater_worst)
            sized.highwater_worst = sizing->most[r];
    }
    sized.dynamic_sum = sizing->sum / (double)sizing->steps;
    sized.dynamic_worst = sizing->worst / (double)sizing->steps;
    sized.provisioned_worst = sized.highwater_worst;
    sized.provisioned_sum = sizing->ranks * sized.highwater_worst;
    return sized;
}
