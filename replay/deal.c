#include "replay/deal.h"

#include "common/base/arena.h"

#include <stdlib.h>

static mz_code make_room(mz_dealt *d, int64_t sources, int64_t tokens, int64_t pairs, mz_err *err) {
    const size_t ends = (size_t)sources + 1;
    if (mz_grow((void **)&d->token_begin, &d->sources_cap[0], ends, sizeof *d->token_begin) &&
        mz_grow((void **)&d->pair_begin, &d->sources_cap[1], ends, sizeof *d->pair_begin) &&
        mz_grow((void **)&d->token_pairs, &d->tokens_cap, (size_t)tokens + 1,
                sizeof *d->token_pairs) &&
        mz_grow((void **)&d->expert, &d->pairs_cap, (size_t)pairs + 1, sizeof *d->expert))
        return MZ_OK;
    return mz_fail_nomem(err, "pairs dealt to tokens");
}

/* One source: `count` pairs of each expert; the first `more` tokens have one pair more than the
 * others' `each`. */
static void deal_source(const int64_t *count, int32_t experts, int64_t tokens, int64_t pairs,
                        uint16_t *expert, uint16_t *token_pairs) {
    const int64_t each = tokens > 0 ? pairs / tokens : 0, more = tokens > 0 ? pairs % tokens : 0;
    for (int64_t t = 0; t < tokens; t++)
        token_pairs[t] = (uint16_t)(each + (t < more));
    int64_t token = 0, turn = 0;
    for (int32_t e = 0; e < experts; e++)
        for (int64_t j = 0; j < count[e]; j++) {
            const int64_t first = token * each + (token < more ? token : more);
            expert[first + turn] = (uint16_t)e;
            if (++token == tokens) {
                token = 0;
                turn++;
            }
        }
}

mz_code mz_deal_pairs(mz_dealt *d, const mz_load *load, int32_t k, mz_pairs *pairs, mz_err *err) {
    int64_t all = 0;
    bool even = true;
    for (int32_t s = 0; s < load->sources; s++) {
        all += (load->source[s] + k - 1) / k;
        even = even && load->source[s] % k == 0;
    }
    const mz_code code = make_room(d, load->sources, all, load->pairs, err);
    if (code != MZ_OK)
        return code;
    int64_t token = 0, pair = 0;
    for (int32_t s = 0; s < load->sources; s++) {
        const int64_t n = load->source[s], tokens = (n + k - 1) / k;
        d->token_begin[s] = token;
        d->pair_begin[s] = pair;
        deal_source(load->count + (int64_t)s * load->experts, load->experts, tokens, n,
                    d->expert + pair, d->token_pairs + token);
        token += tokens;
        pair += n;
    }
    d->token_begin[load->sources] = token;
    d->pair_begin[load->sources] = pair;
    *pairs = (mz_pairs){.sources = load->sources,
                        .top_k = even ? k : 0,
                        .tokens = token,
                        .pairs = pair,
                        .token_begin = d->token_begin,
                        .pair_begin = d->pair_begin,
                        .token_pairs = even ? NULL : d->token_pairs,
                        .expert = d->expert};
    return MZ_OK;
}

void mz_dealt_free(mz_dealt *d) {
    free(d->token_begin);
    free(d->pair_begin);
    free(d->token_pairs);
    free(d->expert);
    *d = (mz_dealt){0};
}
