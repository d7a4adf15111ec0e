/* The random bits of a parameter's elements (arithmetic.h): the same as the plain reference, and
 * statistics of them. Every statistic is also shown to find a weakness planted in the same
 * generator. */
#include "tests/harness.h"
#include "tests/kernels/reference.h"
#include "kernels/arithmetic.h"

#include <math.h>

typedef struct place {
    uint64_t seed, tensor, step, element;
} place;

/* What is wrong on purpose. */
typedef enum weakness {
    SOUND,
    BIASED,   /* bit 15 is one in 33 of 64 */
    LINKED,   /* bit 0 is the exclusive or of bits 7 and 12 */
    UNMIXED,  /* the counter as it is */
    ONE_LESS, /* one product instead of three */
    NO_SEED,  /* a part of the place does not count */
    NO_TENSOR,
    NO_STEP,
    NO_SUBSTREAM,
    LOW_ONLY, /* the upper halves of seed, tensor and step do not count */
    SHIFTED,  /* substreams are windows of one sequence, a part of a window apart */
    NO_REPEAT /* all words differ, as of a counter that a whole tensor shares */
} weakness;

/* ---- generators ---------------------------------------------------------------------------------
 */

static mz_random generator_of(place at, weakness weak) {
    if (weak == NO_SEED)
        at.seed = 1;
    if (weak == NO_TENSOR)
        at.tensor = 1;
    if (weak == NO_STEP)
        at.step = 1;
    if (weak == LOW_ONLY)
        return mz_random_of((uint32_t)at.seed, (uint32_t)at.tensor, (uint32_t)at.step);
    return mz_random_of(at.seed, at.tensor, at.step);
}

static void reach(mz_random *r, uint64_t element, weakness weak) {
    const uint64_t number = element / MZ_SUBSTREAM;
    if (weak == NO_SUBSTREAM || weak == SHIFTED || weak == NO_REPEAT) {
        mz_random_enter(r, 0);
        r->at.start += r->at.increment * (uint32_t)number *
                       (weak == NO_SUBSTREAM ? 0
                        : weak == SHIFTED    ? 999
                                             : 4096);
        return;
    }
    mz_random_reach(r, element);
}

static uint32_t word_of(const mz_substream *s, uint32_t i, weakness weak) {
    const uint32_t counter = s->start + i * s->increment;
    if (weak == UNMIXED)
        return counter;
    if (weak == ONE_LESS)
        return (counter ^ counter >> 17) * 0xed5ad4bbu;
    return mz_random_word(s, i);
}

static void draw(place at, weakness weak, int64_t n, uint16_t *to) {
    mz_random r = generator_of(at, weak);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t element = at.element + (uint64_t)i;
        if (i == 0 || element % MZ_SUBSTREAM == 0)
            reach(&r, element, weak);
        const uint32_t word = word_of(&r.at, (uint32_t)(element % MZ_SUBSTREAM / 2), weak);
        uint32_t bits = word >> (element % 2 * 16) & 0xffffu;
        if (weak == BIASED && (bits & 0x1fu << 3) == 0)
            bits |= 0x8000u;
        if (weak == LINKED)
            bits = (bits & 0xfffeu) | ((bits >> 7 ^ bits >> 12) & 1u);
        to[i] = (uint16_t)bits;
    }
}

static uint16_t *draw_new(place at, weakness weak, int64_t n) {
    uint16_t *bits = malloc(sizeof *bits * (size_t)n);
    assert_non_null(bits);
    draw(at, weak, n, bits);
    return bits;
}

static const place origin = {0, 0, 1, 0};

/* ---- statistics: standard deviations from what is expected -------------------------------------
 */

enum { SAMPLES = 1 << 20, PAIRS = 1 << 18 };
#define LIMIT 5.5

static double larger_of(double worst, double z) {
    return fabs(z) > worst ? fabs(z) : worst;
}

/* Ones of each bit. */
static double balance(weakness weak) {
    uint16_t *x = draw_new(origin, weak, SAMPLES);
    double worst = 0;
    for (int b = 0; b < 16; b++) {
        int64_t ones = 0;
        for (int64_t i = 0; i < SAMPLES; i++)
            ones += x[i] >> b & 1;
        worst = larger_of(worst, (2.0 * (double)ones - SAMPLES) / sqrt(SAMPLES));
    }
    free(x);
    return worst;
}

/* Chi-square of how often each of 65536 values comes. */
static double spread(const uint32_t count[65536], int64_t n) {
    const double expected = (double)n / 65536;
    double sum = 0;
    for (int v = 0; v < 65536; v++)
        sum += ((double)count[v] - expected) * ((double)count[v] - expected) / expected;
    return (sum - 65535) / sqrt(2.0 * 65535);
}

static double values(weakness weak) {
    static uint32_t count[65536];
    uint16_t *x = draw_new(origin, weak, 4 * SAMPLES);
    memset(count, 0, sizeof count);
    for (int64_t i = 0; i < 4 * SAMPLES; i++)
        count[x[i]]++;
    free(x);
    return fabs(spread(count, 4 * SAMPLES));
}

/* Bit b of 64 values beside each other. */
static void turn(const uint16_t *x, uint64_t bit[16]) {
    memset(bit, 0, 16 * sizeof *bit);
    for (int i = 0; i < 64; i++)
        for (int b = 0; b < 16; b++)
            bit[b] |= (uint64_t)(x[i] >> b & 1) << i;
}

/* Every bit of one against every bit of the other. */
static double agreement(const uint16_t *x, const uint16_t *y) {
    static int64_t differ[16][16];
    double worst = 0;
    memset(differ, 0, sizeof differ);
    for (int64_t first = 0; first < PAIRS; first += 64) {
        uint64_t a[16], b[16];
        turn(x + first, a);
        turn(y + first, b);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++)
                differ[i][j] += __builtin_popcountll(a[i] ^ b[j]);
    }
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++)
            worst = larger_of(worst, (2.0 * (double)differ[i][j] - PAIRS) / sqrt(PAIRS));
    return worst;
}

/* Chi-square of the pairs of eight bits from `shift` on. */
static double joint(const uint16_t *x, const uint16_t *y, int shift, int64_t n) {
    static uint32_t count[65536];
    memset(count, 0, sizeof count);
    for (int64_t i = 0; i < n; i++)
        count[(x[i] >> shift & 0xff) << 8 | (y[i] >> shift & 0xff)]++;
    return spread(count, n);
}

/* The bits of elements and of others, `apart` from them. */
static double dependence(weakness weak, place apart) {
    const place other = {origin.seed + apart.seed, origin.tensor + apart.tensor,
                         origin.step + apart.step, origin.element + apart.element};
    uint16_t *x = draw_new(origin, weak, SAMPLES), *y = draw_new(other, weak, SAMPLES);
    double worst = agreement(x, y);
    worst = larger_of(worst, joint(x, y, 8, SAMPLES));
    worst = larger_of(worst, joint(x, y, 0, SAMPLES));
    free(x);
    free(y);
    return worst;
}

static const place elements_apart[] = {{.element = 1},  {.element = 2},   {.element = 3},
                                       {.element = 16}, {.element = 768}, {.element = 4099}};
static const place substreams_apart[] = {{.element = MZ_SUBSTREAM}, {.element = 5 * MZ_SUBSTREAM}};
static const place steps_apart[] = {{.step = 1}, {.step = 2}};
static const place tensors_apart[] = {{.tensor = 1}, {.tensor = 256}};
static const place seeds_apart[] = {{.seed = 1}, {.seed = 1 << 16}};
static const place upper_apart[] = {{.step = UINT64_C(1) << 32},
                                    {.tensor = UINT64_C(1) << 32},
                                    {.seed = UINT64_C(1) << 32},
                                    {.element = UINT64_C(1) << 46}};

static double dependence_of(weakness weak, const place *apart, int n) {
    double worst = 0;
    for (int i = 0; i < n; i++)
        worst = larger_of(worst, dependence(weak, apart[i]));
    return worst;
}
#define DEPENDENCE(weak, apart) dependence_of(weak, apart, COUNT_OF(apart))

/* ---- substreams that share words ----------------------------------------------------------------
 */

enum { WORDS = MZ_SUBSTREAM / 2, NUMBERS = 512, ALL = NUMBERS * WORDS };

static int by_value(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Words of NUMBERS substreams of so many neighbouring (seed, tensor, step), each before the one
 * that follows it in its substream; sorted. */
static uint64_t *successions(weakness weak, uint64_t places) {
    uint64_t *all = malloc(sizeof *all * ALL), *to = all;
    assert_non_null(all);
    for (uint64_t p = 0; p < places; p++) {
        const place at = {3 + (p & 1), 7 + (p >> 1 & 1), 1 + (p >> 2), 0};
        const int64_t n = ALL / (int64_t)places;
        uint16_t *x = draw_new(at, weak, 2 * n);
        for (int64_t i = 0; i < n; i++) {
            const int64_t next = i % WORDS == WORDS - 1 ? i - WORDS + 1 : i + 1;
            *to++ = (uint64_t)((uint32_t)x[2 * i + 1] << 16 | x[2 * i]) << 32 |
                    ((uint32_t)x[2 * next + 1] << 16 | x[2 * next]);
        }
        free(x);
    }
    qsort(all, ALL, sizeof *all, by_value);
    return all;
}

/* Two words in succession that come again: none are expected. */
static double overlap(weakness weak) {
    uint64_t *all = successions(weak, 8);
    int64_t again = 0;
    for (int64_t i = 1; i < ALL; i++)
        again += all[i] == all[i - 1];
    free(all);
    return again > 0 ? INFINITY : 0;
}

/* Words of one tensor that come again: as many as of independent ones. */
static double repeats(weakness weak) {
    uint64_t *all = successions(weak, 1);
    double again = 0;
    for (int64_t i = 1; i < ALL; i++)
        again += all[i] >> 32 == all[i - 1] >> 32;
    free(all);
    const double expected = (double)ALL * ALL / 2 * 0x1p-32;
    return fabs(again - expected) / sqrt(expected);
}

/* ---- writing ------------------------------------------------------------------------------------
 */

static double value_of(uint16_t bf16) {
    return (double)mz_from_bf16(bf16);
}

/* What stochastic rounding adds to many values over many steps, in units of the last place. */
static double drift(weakness weak) {
    enum { VALUES = 4096, STEPS = 256 };
    static uint16_t x[VALUES];
    double sum = 0, variance = 0;
    for (int step = 1; step <= STEPS; step++) {
        draw((place){5, 6, (uint64_t)step, 0}, weak, VALUES, x);
        for (uint32_t i = 0; i < VALUES; i++) {
            const float q = mz_bits_float((i * 2654435769u & 0xbfffffffu) | 0x00800000u);
            const uint16_t cut = (uint16_t)(mz_float_bits(q) >> 16);
            const double unit = value_of(cut + 1) - value_of(cut);
            const double part = ((double)q - value_of(cut)) / unit;
            sum += (value_of(mz_bf16_stochastic(q, x[i])) - (double)q) / unit;
            variance += part * (1 - part);
        }
    }
    return fabs(sum) / sqrt(variance);
}

/* ---- tests --------------------------------------------------------------------------------------
 */

static void as_defined(void **state) {
    (void)state;
    const place list[] = {{0, 0, 1, 0},
                          {1, 2, 3, MZ_SUBSTREAM - 5},
                          {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX - 40},
                          {UINT64_C(1) << 40, UINT64_C(1) << 41, UINT64_C(1) << 42, INT64_MAX}};
    for (int p = 0; p < COUNT_OF(list); p++) {
        uint16_t bits[33];
        draw(list[p], SOUND, 33, bits);
        for (uint64_t i = 0; i < 33; i++)
            assert_int_equal(bits[i], ref_element_bits(list[p].seed, list[p].tensor, list[p].step,
                                                       list[p].element + i));
    }
}

#define SOUND_UNDER(statistic)                                                                     \
    do {                                                                                           \
        const double z_ = (statistic);                                                             \
        if (!(z_ < LIMIT))                                                                         \
            fail_msg("%s: %.1f standard deviations", #statistic, z_);                              \
    } while (0)
#define FOUND_BY(statistic)                                                                        \
    do {                                                                                           \
        const double z_ = (statistic);                                                             \
        if (!(z_ > 2 * LIMIT))                                                                     \
            fail_msg("%s: only %.1f standard deviations", #statistic, z_);                         \
    } while (0)

static void one_by_one(void **state) {
    (void)state;
    SOUND_UNDER(balance(SOUND));
    FOUND_BY(balance(BIASED));
    SOUND_UNDER(values(SOUND));
    SOUND_UNDER(balance(LINKED));
    FOUND_BY(values(LINKED));
}

static void beside_each_other(void **state) {
    (void)state;
    SOUND_UNDER(DEPENDENCE(SOUND, elements_apart));
    FOUND_BY(DEPENDENCE(UNMIXED, elements_apart));
    FOUND_BY(DEPENDENCE(ONE_LESS, elements_apart));
    SOUND_UNDER(DEPENDENCE(SOUND, substreams_apart));
    FOUND_BY(DEPENDENCE(NO_SUBSTREAM, substreams_apart));
}

static void other_places(void **state) {
    (void)state;
    SOUND_UNDER(DEPENDENCE(SOUND, steps_apart));
    FOUND_BY(DEPENDENCE(NO_STEP, steps_apart));
    SOUND_UNDER(DEPENDENCE(SOUND, tensors_apart));
    FOUND_BY(DEPENDENCE(NO_TENSOR, tensors_apart));
    SOUND_UNDER(DEPENDENCE(SOUND, seeds_apart));
    FOUND_BY(DEPENDENCE(NO_SEED, seeds_apart));
    SOUND_UNDER(DEPENDENCE(SOUND, upper_apart));
    FOUND_BY(DEPENDENCE(LOW_ONLY, upper_apart));
}

static void no_copies(void **state) {
    (void)state;
    SOUND_UNDER(overlap(SOUND));
    FOUND_BY(overlap(SHIFTED));
    SOUND_UNDER(repeats(SOUND));
    FOUND_BY(repeats(NO_SUBSTREAM));
    FOUND_BY(repeats(NO_REPEAT));
}

static void no_drift(void **state) {
    (void)state;
    SOUND_UNDER(drift(SOUND));
    FOUND_BY(drift(BIASED));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_defined),        cmocka_unit_test(one_by_one),
        cmocka_unit_test(beside_each_other), cmocka_unit_test(other_places),
        cmocka_unit_test(no_copies),         cmocka_unit_test(no_drift),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
