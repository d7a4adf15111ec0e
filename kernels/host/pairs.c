/* Operations on pairs: scores, grouping by expert, prefix sums, selection, arrangement. */
#include "kernels/host/host.h"
#include "kernels/arithmetic.h"
#include "kernels/scores.h"

#include <stdlib.h>

/* ---- scores -------------------------------------------------------------------------------------
 */

/* Pairs whose factors stand beside each other in the first-level cache. */
enum { SCORED = 512 };

typedef struct scoring {
    const mz_simd *simd;
    const mz_score_args *args;
    float one[SCORED]; /* factors that a score has not; they change no bit */
} scoring;

static int64_t pairs_before(const mz_score_args *a, int64_t token) {
    return a->token_begin ? a->token_begin[token] : token * a->k;
}

/* n copies, four at a time: `to` has room for three more. */
static inline void put_copies(float value, int64_t n, float *to) {
    const float four[4] = {value, value, value, value};
    for (int64_t i = 0; i < n; i += 4)
        memcpy(to + i, four, sizeof four);
}

static inline void put_tokens(const float *value, int64_t tokens, int64_t k, float *to) {
    for (int64_t t = 0; t < tokens; t++)
        put_copies(value[t], k, to + t * k);
}

/* k copies of each; the usual ones have loops of their own. */
static void spread_tokens(const float *value, int64_t tokens, int64_t k, float *to) {
    if (k == 8)
        put_tokens(value, tokens, 8, to);
    else if (k == 4)
        put_tokens(value, tokens, 4, to);
    else if (k == 2)
        put_tokens(value, tokens, 2, to);
    else
        put_tokens(value, tokens, k, to);
}

/* to[i] = value of the token of pair first + i; `token` is that of the first pair. `to` has room
 * for three more, and what a token writes too much the next one overwrites. */
static void spread(const mz_score_args *a, const float *value, int64_t token, int64_t first,
                   int64_t n, float *to) {
    const int64_t k = a->k;
    for (int64_t i = 0; i < n;) {
        if (!a->token_begin && first + i == token * k && i + k <= n) {
            const int64_t whole = (n - i) / k;
            spread_tokens(value + token, whole, k, to + i);
            token += whole;
            i += whole * k;
            continue;
        }
        const int64_t stop = pairs_before(a, token + 1) - first, end = stop < n ? stop : n;
        put_copies(value[token++], end - i, to + i);
        i = end;
    }
}

/* Scores of n pairs, n <= SCORED: as mz_score_of. */
static void score_some(const scoring *s, int64_t token, int64_t first, int64_t n) {
    const mz_score_args *a = s->args;
    const mz_score kind = a->kind;
    float *score = a->score + first, grad[SCORED + 3], input[SCORED + 3];
    const uint64_t number = a->first_pair + (uint64_t)first;
    if (kind == MZ_SCORED_RANDOM) {
        s->simd->draws(score, a->seed, number, n);
        return;
    }
    const bool of_grad = kind == MZ_SCORED_DOWN || kind == MZ_SCORED_UP || kind == MZ_SCORED_G ||
                         kind == MZ_SCORED_SAMPLE;
    const bool of_hidden = kind == MZ_SCORED_DOWN || kind == MZ_SCORED_WH || kind == MZ_SCORED_H ||
                           kind == MZ_SCORED_SAMPLE;
    const bool of_weight = a->weight && kind != MZ_SCORED_G && kind != MZ_SCORED_H;
    if (of_grad)
        spread(a, a->grad_norm2, token, first, n, grad);
    if (kind == MZ_SCORED_UP)
        spread(a, a->input_norm2, token, first, n, input);
    s->simd->products(score, of_weight ? a->weight + first : s->one, of_grad ? grad : s->one,
                      of_hidden              ? a->hidden_norm2 + first
                      : kind == MZ_SCORED_UP ? input
                                             : s->one,
                      n);
    if (kind == MZ_SCORED_SAMPLE) {
        s->simd->draws(grad, a->seed, number, n);
        s->simd->priorities(score, grad, n);
    }
}

static void score_range(void *argument, int64_t first, int64_t end) {
    const scoring *s = argument;
    const int64_t stop = pairs_before(s->args, end);
    int64_t token = first;
    for (int64_t pair = pairs_before(s->args, first); pair < stop; pair += SCORED) {
        if (!s->args->token_begin)
            token = pair / s->args->k;
        while (pairs_before(s->args, token + 1) <= pair)
            token++;
        score_some(s, token, pair, stop - pair < SCORED ? stop - pair : SCORED);
    }
}

mz_kstatus mz_host_score_pairs(mz_kernels *k, mz_kstream stream, const mz_score_args *a) {
    (void)stream;
    scoring s = {.simd = mz_host_of(k)->simd, .args = a};
    for (int i = 0; i < SCORED; i++)
        s.one[i] = 1;
    const int64_t each = a->tokens > 0 ? a->pairs / a->tokens + 1 : 1;
    mz_pool_range(mz_host_of(k)->pool, score_range, &s, a->tokens, 16 * each);
    return MZ_K_OK;
}

/* ---- grouping: a counting sort in blocks of pairs
 * -------------------------------------------------
 */

enum { BLOCK_PAIRS = 1 << 15, BLOCKS_MOST = 64 };

static int64_t blocks_of(int64_t pairs) {
    const int64_t blocks = (pairs + BLOCK_PAIRS - 1) / BLOCK_PAIRS;
    return blocks < 1 ? 1 : blocks < BLOCKS_MOST ? blocks : BLOCKS_MOST;
}

typedef struct sorting {
    const mz_grouping *args;
    int64_t blocks, block;
    int64_t
        *place; /* [blocks][experts]: counts, then where a block's next pair of an expert goes */
} sorting;

static void count_block(void *argument, int64_t b, int32_t thread) {
    (void)thread;
    const sorting *s = argument;
    const mz_grouping *a = s->args;
    int64_t *count = s->place + b * a->experts;
    const int64_t first = b * s->block;
    const int64_t end = first + s->block < a->pairs ? first + s->block : a->pairs;
    memset(count, 0, sizeof *count * (size_t)a->experts);
    for (int64_t i = first; i < end; i++)
        if (a->expert[i] >= 0 && a->expert[i] < a->experts)
            count[a->expert[i]]++;
}

static void place_block(void *argument, int64_t b, int32_t thread) {
    (void)thread;
    const sorting *s = argument;
    const mz_grouping *a = s->args;
    int64_t *next = s->place + b * a->experts;
    const int64_t first = b * s->block;
    const int64_t end = first + s->block < a->pairs ? first + s->block : a->pairs;
    for (int64_t i = first; i < end; i++)
        if (a->expert[i] >= 0 && a->expert[i] < a->experts)
            a->order[next[a->expert[i]]++] = i;
}

/* Counts become the places of each block's first pair of each expert. */
static void place_experts(const sorting *s) {
    const mz_grouping *a = s->args;
    int64_t at = 0;
    for (int32_t e = 0; e < a->experts; e++) {
        const int64_t begin = at;
        for (int64_t b = 0; b < s->blocks; b++) {
            int64_t *place = s->place + b * a->experts + e;
            const int64_t n = *place;
            *place = at;
            at += n;
        }
        if (a->begin)
            a->begin[e] = begin;
        if (a->count)
            a->count[e] = at - begin;
    }
    if (a->begin)
        a->begin[a->experts] = at;
}

size_t mz_host_group_pairs_workspace(const mz_kernels *k, const mz_grouping *a) {
    (void)k;
    return sizeof(int64_t) * (size_t)(blocks_of(a->pairs) * a->experts);
}

mz_kstatus mz_host_group_pairs(mz_kernels *k, mz_kstream stream, const mz_grouping *a,
                               void *workspace) {
    (void)stream;
    if (a->experts == 0) { /* nothing is listed */
        if (a->begin)
            a->begin[0] = 0;
        return MZ_K_OK;
    }
    sorting s = {.args = a, .blocks = blocks_of(a->pairs), .place = workspace};
    s.block = (a->pairs + s.blocks - 1) / s.blocks;
    mz_pool *pool = mz_host_of(k)->pool;
    mz_pool_run(pool, count_block, &s, s.blocks);
    place_experts(&s);
    if (a->order)
        mz_pool_run(pool, place_block, &s, s.blocks);
    return MZ_K_OK;
}

size_t mz_host_prefix_sums_workspace(const mz_kernels *k, int64_t n) {
    (void)k, (void)n;
    return 0;
}

mz_kstatus mz_host_prefix_sums(mz_kernels *k, mz_kstream stream, const int64_t *count, int64_t n,
                               int64_t *begin, void *workspace) {
    (void)k, (void)stream, (void)workspace;
    begin[0] = 0;
    for (int64_t i = 0; i < n; i++)
        begin[i + 1] = begin[i] + count[i];
    return MZ_K_OK;
}

/* ---- selection: per expert, a radix search for the last score that stays
 * -------------------------- Scores are not negative, so their bits order them; -0 counts as 0. */

enum { DIGIT = 11, DIGITS = 3, BINS = 1 << DIGIT };

static uint32_t key_of(const mz_selection *a, int64_t position) {
    return mz_float_bits(a->score[a->order[position]]) & 0x7fffffffu;
}

/* The key of which some stay: those above do all; `equal` of that key, the first ones, stay. Three
 * passes over the expert's scores. 0 < quota < n. */
static uint32_t last_key(const mz_selection *a, int64_t begin, int64_t end, int64_t quota,
                         int64_t *equal) {
    int64_t bin[BINS];
    uint32_t prefix = 0;
    int64_t wanted = quota;
    for (int d = DIGITS - 1; d >= 0; d--) {
        const int shift = d * DIGIT, above = shift + DIGIT;
        memset(bin, 0, sizeof bin);
        for (int64_t i = begin; i < end; i++) {
            const uint32_t key = key_of(a, i);
            if (above >= 32 || key >> above == prefix >> above)
                bin[key >> shift & (BINS - 1)]++;
        }
        int digit = BINS - 1;
        while (wanted > bin[digit])
            wanted -= bin[digit--];
        prefix |= (uint32_t)digit << shift;
    }
    *equal = wanted;
    return prefix;
}

/* Writes what stays of [begin, end) and answers the largest key left out. */
static uint32_t write_kept(const mz_selection *a, int64_t begin, int64_t end, uint32_t last,
                           int64_t equal, int64_t *kept) {
    uint32_t out = 0;
    for (int64_t i = begin; i < end; i++) {
        const uint32_t key = key_of(a, i);
        const bool stays = key > last || (key == last && equal-- > 0);
        if (stays && kept)
            *kept++ = a->order[i];
        if (a->keep)
            a->keep[a->order[i]] = stays;
        if (!stays && key > out)
            out = key;
    }
    return out;
}

static void select_expert(void *argument, int64_t e, int32_t thread) {
    (void)thread;
    const mz_selection *a = argument;
    const int64_t begin = a->begin[e], end = a->begin[e + 1], n = end - begin;
    const int64_t quota = a->quota[e] < 0 ? 0 : a->quota[e] < n ? a->quota[e] : n;
    uint32_t last = 0;
    int64_t equal = quota; /* quota == n: the key 0 and all above stay */
    if (quota == 0)
        last = UINT32_MAX;
    else if (quota < n)
        last = last_key(a, begin, end, quota, &equal);
    int64_t *kept = a->kept ? a->kept + a->kept_begin[e] : NULL;
    const float threshold = mz_bits_float(write_kept(a, begin, end, last, equal, kept));
    if (a->threshold)
        a->threshold[e] = threshold;
    for (int64_t i = 0; a->scaled && i < quota; i++)
        a->scaled[kept[i]] = mz_sample_scale(a, kept[i], threshold);
}

size_t mz_host_select_workspace(const mz_kernels *k, const mz_selection *a) {
    (void)k, (void)a;
    return 0;
}

mz_kstatus mz_host_select_pairs(mz_kernels *k, mz_kstream stream, const mz_selection *a,
                                void *workspace) {
    (void)stream, (void)workspace;
    mz_selection args = *a;
    if (a->kept) {
        a->kept_begin[0] = 0;
        for (int32_t e = 0; e < a->experts; e++) {
            const int64_t n = a->begin[e + 1] - a->begin[e];
            const int64_t quota = a->quota[e] < 0 ? 0 : a->quota[e] < n ? a->quota[e] : n;
            a->kept_begin[e + 1] = a->kept_begin[e] + quota;
        }
    }
    mz_pool_run(mz_host_of(k)->pool, select_expert, &args, a->experts);
    return MZ_K_OK;
}

/* ---- arrangement --------------------------------------------------------------------------------
 */

typedef struct arrangement {
    const mz_segment *segment;
    const int64_t *in;
    int64_t *out;
} arrangement;

static void arrange_range(void *argument, int64_t first, int64_t end) {
    const arrangement *a = argument;
    for (int64_t i = first; i < end; i++)
        if (a->segment[i].length > 0)
            memcpy(a->out + a->segment[i].to, a->in + a->segment[i].from,
                   sizeof *a->out * (size_t)a->segment[i].length);
}

mz_kstatus mz_host_arrange(mz_kernels *k, mz_kstream stream, const mz_segment *segment,
                           int64_t segments, const int64_t *in, int64_t *out) {
    (void)stream;
    arrangement a = {segment, in, out};
    mz_pool_range(mz_host_of(k)->pool, arrange_range, &a, segments, 1024);
    return MZ_K_OK;
}

mz_kstatus mz_host_invert(mz_kernels *k, mz_kstream stream, const int64_t *row_pair, int64_t rows,
                          int64_t pairs, int64_t *position) {
    (void)k, (void)stream;
    memset(position, 0xff, sizeof *position * (size_t)pairs);
    for (int64_t i = 0; i < rows; i++)
        if (row_pair[i] >= 0)
            position[row_pair[i]] = i;
    return MZ_K_OK;
}
