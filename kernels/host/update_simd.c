/* Inner loops of the optimizers, compiled once per instruction set with MZ_SIMD naming the table.
 *
 * A row is taken in chunks that stay in the first-level cache: the update is made there in fp32,
 * random bits are drawn beside it, and the parameters are written from both. So there is one short
 * loop without choices for each type that is read and for each way of writing. */
#include "kernels/host/host.h"
#include "kernels/host/lanes.h"

enum { CHUNK = 512 };

/* ---- random bits --------------------------------------------------------------------------------
 */

/* Room for the bits of a chunk: those of its first element stand at LEAD. One before it belongs to
 * the word of an odd one, whole registers reach beyond the last. */
enum { LEAD = 2 * LANES, DRAWN = LEAD + CHUNK + 2 * LANES };

/* Words i and on of a substream, at least n of their halves; whole registers. */
static void draw_words(const mz_substream *s, uint32_t i, int64_t n, uint16_t *to) {
    const bits first = (bits){0} + s->mask[0], second = (bits){0} + s->mask[1];
    const bits step = (bits){0} + LANES * s->increment;
    bits counter;
    for (uint32_t l = 0; l < LANES; l++)
        counter[l] = s->start + (i + l) * s->increment;
    for (; n > 0; n -= 2 * LANES, to += 2 * LANES, counter += step) {
        bits x = (counter ^ counter >> 17) * 0xed5ad4bbu;
        x = (x ^ x >> 11 ^ first) * 0xac4c1b51u;
        x = (x ^ x >> 15 ^ second) * 0x31848babu;
        x ^= x >> 14;
        memcpy(to, &x, sizeof x);
    }
}

/* The bits of elements [element, element + n), n <= CHUNK, as mz_random_word has them; returns
 * where the first stands. */
static const uint16_t *draw(mz_random *random, uint64_t element, int64_t n, uint16_t room[DRAWN]) {
    for (int64_t done = 0; done < n;) {
        mz_random_reach(random, element + (uint64_t)done);
        const int64_t inside = (int64_t)((element + (uint64_t)done) % MZ_SUBSTREAM);
        const int64_t left = MZ_SUBSTREAM - inside, some = n - done < left ? n - done : left;
        draw_words(&random->at, (uint32_t)(inside / 2), inside % 2 + some,
                   room + LEAD + done - inside % 2);
        done += some;
    }
    return room + LEAD;
}

/* The others become zero. */
INLINE lanes first_lanes(lanes v, int64_t n) {
    float value[LANES];
    store_f32(value, v);
    return load_some_f32(value, n < LANES ? n : LANES);
}

INLINE lanes at_least(lanes x, float least) {
    return larger(all_lanes(least), x);
}

/* ---- writing parameters -------------------------------------------------------------------------
 */

/* What is written for q in the upper half; the lower is left over. `drawn`: 16 random bits, of
 * dither below MZ_DITHER_ONE. `half_nans`: a NaN's lower half is zero. */
INLINE bits written(lanes q, bits drawn, mz_rounding rounding, bool half_nans) {
    if (rounding == MZ_ROUND_STOCHASTIC) {
        const bits special = (bits)(((bits)q & 0x7f800000u) == 0x7f800000u);
        return (bits)q + (half_nans ? drawn : drawn & ~special);
    }
    if (rounding == MZ_ROUND_DITHER)
        q = q * ((lanes)drawn - 0x1p-8f);
    return half_nans ? round_number(q) : round_bf16(q);
}

/* What stands above the random bits. */
INLINE uint32_t above_bits(mz_rounding rounding) {
    return rounding == MZ_ROUND_DITHER ? MZ_DITHER_ONE : 0;
}

/* What columns i to i + n of p become, at most LANES. */
INLINE lanes written_f32(const float *p, const float *update, int64_t i, int64_t n, float keep,
                         float rate) {
    return load(MZ_F32, p, i, n) * keep - load(MZ_F32, update, i, n) * rate;
}

/* In the upper halves. A decayed NaN of 16 bits has none below them, so rounding leaves it. */
INLINE bits written_bf16(const uint16_t *p, const float *update, const uint16_t *drawn, int64_t i,
                         int64_t n, float keep, float rate, mz_rounding rounding,
                         bool decay_first) {
    lanes q = load(MZ_BF16, p, i, n) * keep;
    if (decay_first)
        q = (lanes)(round_number(q) & 0xffff0000u);
    q = q - load(MZ_F32, update, i, n) * rate;
    bits random = {0};
    if (rounding != MZ_ROUND_NEAREST)
        random = load_u16(drawn + i) | above_bits(rounding);
    return written(q, random, rounding, false);
}

/* Decay, rounded to bf16 where `decay_first`, then p - rate * update, rounded. */
INLINE void write_halves(const mz_update_row *r, int64_t first, int64_t n, const float *update,
                         const uint16_t *drawn, mz_rounding rounding, bool decay_first) {
    uint16_t *p = (uint16_t *)r->parameter + first;
    const float keep = r->keep, rate = r->rate;
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        const bits a = written_bf16(p, update, drawn, i, LANES, keep, rate, rounding, decay_first);
        const bits b =
            written_bf16(p, update, drawn, i + LANES, LANES, keep, rate, rounding, decay_first);
        store_upper2(p + i, a, b);
    }
    for (; i < n; i += LANES) {
        const int64_t some = n - i < LANES ? n - i : LANES;
        store_some_upper(p + i,
                         written_bf16(p, update, drawn, i, some, keep, rate, rounding, decay_first),
                         some);
    }
}

static void write_nearest(const mz_update_row *r, int64_t first, int64_t n, const float *update) {
    if (r->decay_first)
        write_halves(r, first, n, update, NULL, MZ_ROUND_NEAREST, true);
    else
        write_halves(r, first, n, update, NULL, MZ_ROUND_NEAREST, false);
}

static void write_dither(const mz_update_row *r, int64_t first, int64_t n, const float *update,
                         const uint16_t *drawn) {
    if (r->decay_first)
        write_halves(r, first, n, update, drawn, MZ_ROUND_DITHER, true);
    else
        write_halves(r, first, n, update, drawn, MZ_ROUND_DITHER, false);
}

static void write_stochastic(const mz_update_row *r, int64_t first, int64_t n, const float *update,
                             const uint16_t *drawn) {
    if (r->decay_first)
        write_halves(r, first, n, update, drawn, MZ_ROUND_STOCHASTIC, true);
    else
        write_halves(r, first, n, update, drawn, MZ_ROUND_STOCHASTIC, false);
}

static void write_singles(const mz_update_row *r, int64_t first, int64_t n, const float *update) {
    float *p = (float *)r->parameter + first;
    const float keep = r->keep, rate = r->rate;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_f32(p + i, written_f32(p, update, i, LANES, keep, rate));
    if (i < n)
        store_some_f32(p + i, written_f32(p, update, i, n - i, keep, rate), n - i);
}

/* Columns [first, first + n) of the row, n <= CHUNK. */
static void write_chunk(const mz_update_row *r, int64_t first, int64_t n, const float *update) {
    if (r->args->type == MZ_F32) {
        write_singles(r, first, n, update);
        return;
    }
    if (r->args->rounding == MZ_ROUND_NEAREST) {
        write_nearest(r, first, n, update);
        return;
    }
    _Alignas(4 * LANES) uint16_t room[DRAWN];
    const uint16_t *drawn = draw(r->random, (uint64_t)(r->element + first), n, room);
    if (r->args->rounding == MZ_ROUND_DITHER)
        write_dither(r, first, n, update, drawn);
    else
        write_stochastic(r, first, n, update, drawn);
}

/* ---- sweep 1 ------------------------------------------------------------------------------------
 * Loops take the row by value: nothing that they store can change it. */

/* What an update is made of. */
typedef enum base { OF_M, OF_BF16, OF_F32 } base;

static base base_of(const mz_update_row *r) {
    return r->m ? OF_M : r->args->gradient_type == MZ_BF16 ? OF_BF16 : OF_F32;
}

INLINE lanes gradient_at(mz_update_row r, mz_dtype type, int64_t i, int64_t n) {
    return load(type, r.gradient, i, n) * r.scale;
}

INLINE lanes base_at(mz_update_row r, base from, int64_t i, int64_t n) {
    return from == OF_M ? load(MZ_F32, r.m, i, n)
                        : gradient_at(r, from == OF_BF16 ? MZ_BF16 : MZ_F32, i, n);
}

/* m <- beta m + (1 - beta) g, stored. */
INLINE lanes average(float *at, int64_t i, int64_t n, float beta, lanes g) {
    const lanes value = load(MZ_F32, at, i, n) * beta + g * (1 - beta);
    store(at, i, value, n);
    return value;
}

/* m and the columns' sums take g, `square` what the update is made of. Returns g^2 + floor. */
INLINE lanes statistics_at(mz_update_row r, float *square, float *col, int64_t i, int64_t n,
                           mz_dtype type, bool momentum) {
    const lanes g = gradient_at(r, type, i, n);
    const lanes g2 = g * g + r.floor;
    store(col, i, load(MZ_F32, col, i, n) + g2, n);
    const lanes value = momentum ? average(r.m, i, n, r.beta1, g) : g;
    store(square, i, value * value, n);
    return g2;
}

INLINE float statistics_of(mz_update_row r, float *square, float *col, mz_dtype type,
                           bool momentum) {
    sums sum = {0};
    int64_t i = 0;
    for (; i + SUMS <= r.n; i += SUMS)
        for (int s = 0; s < PER_SUM; s++)
            sum.part[s] += statistics_at(r, square, col, i + s * LANES, LANES, type, momentum);
    for (int s = 0; i < r.n; i += LANES, s++)
        sum.part[s] +=
            first_lanes(statistics_at(r, square, col, i, r.n - i, type, momentum), r.n - i);
    return total(&sum);
}

/* ---- by place: bf16 gradients, no momentum ---- */

/* 1 for columns [0, n) of a group, 0 for the others. */
INLINE sums inside(int64_t n) {
    static const uint16_t one[SUMS] = {0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80,
                                       0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80,
                                       0x3f80, 0x3f80, 0x3f80, 0x3f80};
    return load16(MZ_BF16, one, 0, n);
}

enum { FETCHED = 32 }; /* columns of a cache line */

/* Columns [i, i + n) of `rows` rows. `plain`: no scale, no floor. */
INLINE void statistics16(const mz_update_row *r, int rows, bool plain, float *square, float *col,
                         sums *sum, int64_t i, int64_t n) {
    const int64_t width = (r->n + SUMS - 1) / SUMS * SUMS;
    sums column = load16_f32(col + i);
    for (int k = 0; k < rows; k++) {
        sums g = load16(MZ_BF16, (const uint16_t *)r->gradient + k * r->n, i, n);
        if (i % FETCHED == 0) /* a processor that reads several rows at once looks ahead in none */
            __builtin_prefetch((const uint16_t *)r->next + k * r->n + i);
        for (int s = 0; s < PER_SUM; s++) {
            const lanes scaled = plain ? g.part[s] : g.part[s] * r->scale;
            g.part[s] = scaled * scaled;
            lanes g2 = plain ? g.part[s] : g.part[s] + r->floor;
            if (n < SUMS)
                g2 = g2 * inside(n).part[s];
            sum[k].part[s] += g2;
            column.part[s] += g2;
        }
        put16_f32(square + k * width + i, g, CACHED);
    }
    put16_f32(col + i, column, CACHED);
}

INLINE void statistics_by_place(const mz_update_row *row, int rows, bool plain, float *square,
                                float *col, float *g2) {
    const mz_update_row r = *row;
    sums sum[MZ_ROWS] = {0};
    int64_t i = 0;
    for (; i + SUMS <= r.n; i += SUMS)
        statistics16(&r, rows, plain, square, col, sum, i, SUMS);
    if (i < r.n)
        statistics16(&r, rows, plain, square, col, sum, i, r.n - i);
    for (int k = 0; k < rows; k++)
        g2[k] = total(&sum[k]);
}

/* A NaN's lower half becomes zero. */
static float half_nan(float x) {
    return x == x ? x : NAN;
}

typedef enum decay_form { NO_DECAY, PLAIN_DECAY, ROUNDED_DECAY } decay_form;

/* Columns [i, i + n) in groups of 16, of which the last may be shorter; drawn: theirs; rate: of
 * the gradient as it is stored. One step of all registers after the other: a processor looks ahead
 * less far than one of these chains is long. */
enum { GROUPS = 2, HELD = GROUPS * PER_SUM };
INLINE void write_groups(const mz_update_row *r, float rate, float keep, const float *col_factor,
                         const uint16_t *drawn, int64_t i, int64_t n, int groups,
                         mz_rounding rounding, decay_form decay) {
    lanes q[HELD], u[HELD], random[HELD];
    const int held = groups * PER_SUM;
    const int64_t each = groups > 1 ? SUMS : n;
    for (int k = 0; k < groups; k++) {
        const sums p = load16(MZ_BF16, r->parameter, i + k * SUMS, each);
        const sums g = load16(MZ_BF16, r->gradient, i + k * SUMS, each);
        sums drew = {0};
        if (rounding != MZ_ROUND_NEAREST)
            drew = load16_u16(drawn + k * SUMS, above_bits(rounding));
        memcpy(q + k * PER_SUM, p.part, sizeof p.part);
        memcpy(u + k * PER_SUM, g.part, sizeof g.part);
        memcpy(random + k * PER_SUM, drew.part, sizeof drew.part);
    }
    for (int k = 0; k < held && decay != NO_DECAY; k++)
        q[k] = q[k] * keep;
    for (int k = 0; k < held && decay == ROUNDED_DECAY; k++)
        q[k] = (lanes)(round_number(q[k]) & 0xffff0000u);
    for (int k = 0; k < held; k++)
        u[k] = u[k] * load_f32(col_factor + i + k * LANES);
    for (int k = 0; k < held; k++)
        q[k] = q[k] - u[k] * rate;
    for (int k = 0; k < held; k++)
        q[k] = (lanes)written(q[k], (bits)random[k], rounding, true);
    for (int k = 0; k < groups; k++) {
        sums result;
        memcpy(result.part, q + k * PER_SUM, sizeof result.part);
        store16(MZ_BF16, r->parameter, i + k * SUMS, result, each, CACHED);
    }
}

INLINE void write_by_place(const mz_update_row *row, const float *col_factor, mz_rounding rounding,
                           decay_form decay) {
    const mz_update_row r = *row;
    const float rate = half_nan(r.scale * r.rate), keep = r.keep;
    _Alignas(4 * LANES) uint16_t room[DRAWN];
    const uint16_t *drawn = room;
    for (int64_t first = 0; first < r.n; first += CHUNK) {
        const int64_t n = r.n - first < CHUNK ? r.n - first : CHUNK;
        if (rounding != MZ_ROUND_NEAREST)
            drawn = draw(r.random, (uint64_t)(r.element + first), n, room);
        int64_t i = 0;
        for (; i + GROUPS * SUMS <= n; i += GROUPS * SUMS)
            write_groups(&r, rate, keep, col_factor, drawn + i, first + i, GROUPS * SUMS, GROUPS,
                         rounding, decay);
        for (; i < n; i += SUMS)
            write_groups(&r, rate, keep, col_factor, drawn + i, first + i,
                         n - i < SUMS ? n - i : SUMS, 1, rounding, decay);
    }
}

INLINE void write_rounded(const mz_update_row *r, const float *col_factor, mz_rounding rounding) {
    if (r->decay_first)
        write_by_place(r, col_factor, rounding, ROUNDED_DECAY);
    else if (r->keep != 1)
        write_by_place(r, col_factor, rounding, PLAIN_DECAY);
    else
        write_by_place(r, col_factor, rounding, NO_DECAY);
}

static void apply_by_place(const mz_update_row *r, const float *col_factor) {
    if (r->args->rounding == MZ_ROUND_NEAREST)
        write_rounded(r, col_factor, MZ_ROUND_NEAREST);
    else if (r->args->rounding == MZ_ROUND_DITHER)
        write_rounded(r, col_factor, MZ_ROUND_DITHER);
    else
        write_rounded(r, col_factor, MZ_ROUND_STOCHASTIC);
}

static float statistics_row(const mz_update_row *r, float *square, float *col) {
    if (r->args->gradient_type == MZ_BF16)
        return r->m ? statistics_of(*r, square, col, MZ_BF16, true)
                    : statistics_of(*r, square, col, MZ_BF16, false);
    return r->m ? statistics_of(*r, square, col, MZ_F32, true)
                : statistics_of(*r, square, col, MZ_F32, false);
}

static void statistics(const mz_update_row *r, int64_t rows, float *square, float *col, float *g2) {
    const bool plain = r->scale == 1 && r->floor == 0;
    if (r->by_place && rows == MZ_ROWS && plain)
        statistics_by_place(r, MZ_ROWS, true, square, col, g2);
    else if (r->by_place && rows == MZ_ROWS)
        statistics_by_place(r, MZ_ROWS, false, square, col, g2);
    else if (r->by_place)
        statistics_by_place(r, 1, false, square, col, g2);
    else
        *g2 = statistics_row(r, square, col);
}

static void squares(const mz_update_row *r, float *square) {
    const base from = base_of(r);
    for (int64_t i = 0; r->by_place && i < r->n; i += SUMS) {
        sums g = load16(MZ_BF16, r->gradient, i, r->n - i < SUMS ? r->n - i : SUMS);
        for (int s = 0; s < PER_SUM; s++) {
            g.part[s] *= r->scale;
            g.part[s] *= g.part[s];
        }
        put16_f32(square + i, g, CACHED);
    }
    for (int64_t i = 0; !r->by_place && i < r->n; i += LANES) {
        const lanes value = base_at(*r, from, i, r->n - i);
        store(square, i, value * value, r->n - i);
    }
}

INLINE void weigh_rows(float *weighted, const float *square, const float *factor, int rows,
                       int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        lanes sum = load_f32(weighted + i);
        for (int k = 0; k < rows; k++)
            sum += load_f32(square + k * n + i) * factor[k];
        store_f32(weighted + i, sum);
    }
    if (i < n) {
        lanes sum = load(MZ_F32, weighted, i, n - i);
        for (int k = 0; k < rows; k++)
            sum += load(MZ_F32, square + k * n, i, n - i) * factor[k];
        store(weighted, i, sum, n - i);
    }
}

static void weigh(float *weighted, const float *square, const float *factor, int64_t rows,
                  int64_t n) {
    if (rows == MZ_ROWS)
        weigh_rows(weighted, square, factor, MZ_ROWS, n);
    else
        weigh_rows(weighted, square, factor, 1, n);
}

INLINE lanes statistics_full_at(mz_update_row r, int64_t i, int64_t n, mz_dtype type,
                                bool momentum) {
    const lanes g = gradient_at(r, type, i, n);
    const lanes v = average(r.v, i, n, r.beta2, g * g + r.floor);
    const lanes value = momentum ? average(r.m, i, n, r.beta1, g) : g;
    return value * value / at_least(v, r.least);
}

INLINE float statistics_full_of(mz_update_row r, mz_dtype type, bool momentum) {
    sums sum = {0};
    int64_t i = 0;
    for (; i + SUMS <= r.n; i += SUMS)
        for (int s = 0; s < PER_SUM; s++)
            sum.part[s] += statistics_full_at(r, i + s * LANES, LANES, type, momentum);
    for (int s = 0; i < r.n; i += LANES, s++)
        sum.part[s] += first_lanes(statistics_full_at(r, i, r.n - i, type, momentum), r.n - i);
    return total(&sum);
}

static float statistics_full(const mz_update_row *r) {
    if (r->args->gradient_type == MZ_BF16)
        return r->m ? statistics_full_of(*r, MZ_BF16, true)
                    : statistics_full_of(*r, MZ_BF16, false);
    return r->m ? statistics_full_of(*r, MZ_F32, true) : statistics_full_of(*r, MZ_F32, false);
}

/* ---- updates, to be written
 * ----------------------------------------------------------------------- Each loop makes those of
 * columns [first, first + n), whole registers of them. */

typedef enum rule { FACTORED, FULL, ADAMW, LION } rule;

/* Of NaN one. */
INLINE lanes sign_of(lanes x) {
    const ints up = x > 0.0f, down = x < 0.0f, nan = x != x;
    return (lanes)((ints) __builtin_convertvector(down - up, lanes) | nan); /* true is -1 */
}

/* `other` is the columns' factors, or AdamW's root. */
INLINE lanes update_at(mz_update_row r, rule how, base from, const float *other, int64_t i,
                       int64_t n) {
    const mz_dtype type = from == OF_BF16 ? MZ_BF16 : MZ_F32; /* of the gradient */
    if (how == FACTORED)
        return base_at(r, from, i, n) * load(MZ_F32, other, i, n);
    if (how == FULL)
        return base_at(r, from, i, n) / root_of(at_least(load(MZ_F32, r.v, i, n), r.least));
    const lanes g = gradient_at(r, type, i, n);
    if (how == LION) {
        const lanes m = load(MZ_F32, r.m, i, n), mixed = m * r.beta1 + g * (1 - r.beta1);
        store(r.m, i, m * r.beta2 + g * (1 - r.beta2), n);
        return sign_of(mixed);
    }
    const lanes m = average(r.m, i, n, r.beta1, g), v = average(r.v, i, n, r.beta2, g * g);
    return m / (root_of(v) * *other + r.eps);
}

INLINE void updates(mz_update_row r, rule how, base from, const float *other, int64_t first,
                    int64_t n, float *update) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_f32(update + i, update_at(r, how, from, other, first + i, LANES));
    if (i < n)
        store_f32(update + i, update_at(r, how, from, other, first + i, n - i));
}

/* Makes and writes the row's updates. */
INLINE void apply_rule(const mz_update_row *r, rule how, base from, const float *other) {
    float update[CHUNK];
    for (int64_t first = 0; first < r->n; first += CHUNK) {
        const int64_t n = r->n - first < CHUNK ? r->n - first : CHUNK;
        updates(*r, how, from, other, first, n, update);
        write_chunk(r, first, n, update);
    }
}

static void apply_factored(const mz_update_row *r, const float *col_factor) {
    const base from = base_of(r);
    if (r->by_place)
        apply_by_place(r, col_factor);
    else if (from == OF_M)
        apply_rule(r, FACTORED, OF_M, col_factor);
    else if (from == OF_BF16)
        apply_rule(r, FACTORED, OF_BF16, col_factor);
    else
        apply_rule(r, FACTORED, OF_F32, col_factor);
}

static void apply_full(const mz_update_row *r) {
    const base from = base_of(r);
    if (from == OF_M)
        apply_rule(r, FULL, OF_M, NULL);
    else if (from == OF_BF16)
        apply_rule(r, FULL, OF_BF16, NULL);
    else
        apply_rule(r, FULL, OF_F32, NULL);
}

static void adamw(const mz_update_row *r, float root) {
    if (r->args->gradient_type == MZ_BF16)
        apply_rule(r, ADAMW, OF_BF16, &root);
    else
        apply_rule(r, ADAMW, OF_F32, &root);
}

static void lion(const mz_update_row *r) {
    if (r->args->gradient_type == MZ_BF16)
        apply_rule(r, LION, OF_BF16, NULL);
    else
        apply_rule(r, LION, OF_F32, NULL);
}

static void apply(const mz_update_row *r, const float *update) {
    for (int64_t first = 0; first < r->n; first += CHUNK)
        write_chunk(r, first, r->n - first < CHUNK ? r->n - first : CHUNK, update + first);
}

const mz_update_simd MZ_TABLE(mz_update_simd) = {.statistics = statistics,
                                                 .squares = squares,
                                                 .weigh = weigh,
                                                 .apply_factored = apply_factored,
                                                 .statistics_full = statistics_full,
                                                 .apply_full = apply_full,
                                                 .adamw = adamw,
                                                 .lion = lion,
                                                 .apply = apply};
