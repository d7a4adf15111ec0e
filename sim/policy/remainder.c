/* Whole rows: largest-remainder shares, exact in whole numbers, and rounding up. */
#include "sim/policy/parts.h"

#include <math.h>

enum { INDEX_BITS = 20, FEW = 8, BUCKETS = 64 };

/* Rearranges a[0..n-1] so that the k largest stand first. All elements differ. */
static void largest_first(uint64_t *a, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        uint64_t x = a[low], y = a[low + (high - low) / 2], z = a[high];
        uint64_t pivot = x < y ? (y < z ? y : (x < z ? z : x)) : (x < z ? x : (y < z ? z : y));
        int64_t i = low, j = high;
        while (i <= j) {
            while (a[i] > pivot)
                i++;
            while (a[j] < pivot)
                j--;
            if (i <= j) {
                uint64_t t = a[i];
                a[i++] = a[j];
                a[j--] = t;
            }
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            return;
    }
}

/* Gives one more to the `extra` largest remainders; exact for any size, 63 passes. */
static void hand_out(int64_t extra, int64_t sum, int32_t n, int64_t *share,
                     const uint64_t *remainder) {
    uint64_t low = 0, high = (uint64_t)sum; /* fewer than `extra` remainders are >= high */
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        int64_t above = 0;
        for (int32_t i = 0; i < n; i++)
            above += remainder[i] >= middle;
        if (above >= extra)
            low = middle;
        else
            high = middle;
    }
    for (int32_t i = 0; i < n; i++)
        if (remainder[i] > low) {
            share[i]++;
            extra--;
        }
    for (int32_t i = 0; i < n && extra > 0; i++)
        if (remainder[i] == low) {
            share[i]++;
            extra--;
        }
}

static void equal_shares(int64_t total, int32_t n, int64_t *share) {
    for (int32_t i = 0; i < n; i++)
        share[i] = total / n + (i < total % n);
}

/* floor(total * w / sum), and what is left of the product. */
static inline int64_t floor_share(int64_t total, int64_t w, int64_t sum, double ratio,
                                  int64_t *rest) {
    int64_t floor = (int64_t)((double)w * ratio), left = total * w - floor * sum;
    while (left < 0) {
        floor--;
        left += sum;
    }
    while (left >= sum) {
        floor++;
        left -= sum;
    }
    *rest = left;
    return floor;
}

static void split_few(const mz_shares *s, int64_t total, double ratio, int64_t *share) {
    int64_t rest[FEW], extra = total;
    for (int32_t i = 0; i < s->n; i++) {
        share[i] = floor_share(total, s->weight[i], s->sum, ratio, &rest[i]);
        extra -= share[i];
    }
    for (; extra > 0; extra--) {
        int32_t best = 0;
        for (int32_t i = 1; i < s->n; i++)
            best = rest[i] > rest[best] ? i : best;
        share[best]++;
        rest[best] = -1;
    }
}

/* The remainders are counted by their highest bits; only those of the bucket in which the last
 * `extra` falls are ordered. Remainder and index share a word there. */
static void split_many(const mz_shares *s, int64_t total, double ratio, int64_t *share,
                       uint64_t *scratch) {
    const uint64_t mask = ((uint64_t)1 << INDEX_BITS) - 1;
    int32_t bucket[BUCKETS] = {0};
    int64_t extra = total, rest;
    for (int32_t i = 0; i < s->n; i++) {
        share[i] = floor_share(total, s->weight[i], s->sum, ratio, &rest);
        extra -= share[i];
        scratch[i] = (uint64_t)rest;
        bucket[(uint64_t)rest >> s->shift]++;
    }
    if (extra == 0)
        return;
    uint64_t last = BUCKETS - 1;
    for (; extra > bucket[last]; last--)
        extra -= bucket[last];
    int64_t listed = 0;
    for (int32_t i = 0; i < s->n; i++) {
        uint64_t r = scratch[i], b = r >> s->shift;
        share[i] += b > last;
        scratch[listed] = r << INDEX_BITS | (mask - (uint64_t)i);
        listed += b == last;
    }
    largest_first(scratch, listed, extra);
    for (int64_t k = 0; k < extra; k++)
        share[mask - (scratch[k] & mask)]++;
}

static void split_large(const mz_shares *s, int64_t total, int64_t *share, uint64_t *remainder) {
    int64_t given = 0;
    for (int32_t i = 0; i < s->n; i++) {
        unsigned __int128 product = (unsigned __int128)(uint64_t)total * (uint64_t)s->weight[i];
        share[i] = (int64_t)(product / (uint64_t)s->sum);
        remainder[i] = (uint64_t)(product % (uint64_t)s->sum);
        given += share[i];
    }
    if (total > given)
        hand_out(total - given, s->sum, s->n, share, remainder);
}

mz_shares mz_shares_of(const int64_t *weight, int32_t n) {
    mz_shares s = {.weight = weight, .n = n};
    int64_t most = 1;
    for (int32_t i = 0; i < n; i++) {
        s.sum += weight[i];
        most = weight[i] > most ? weight[i] : most;
    }
    s.inverse = s.sum > 0 ? 1 / (double)s.sum : 0;
    s.product_limit = (INT64_MAX >> 1) / most;
    if (s.sum >= (int64_t)1 << (63 - INDEX_BITS) || n >= 1 << INDEX_BITS)
        s.product_limit = -1; /* remainder and index do not share a word */
    while (s.sum >> s.shift >= BUCKETS)
        s.shift++;
    return s;
}

void mz_shares_split(const mz_shares *s, int64_t total, int64_t *share, uint64_t *scratch) {
    double ratio = (double)total * s->inverse;
    if (s->sum == 0)
        equal_shares(total, s->n, share);
    else if (total > s->product_limit)
        split_large(s, total, share, scratch);
    else if (s->n <= FEW)
        split_few(s, total, ratio, share);
    else
        split_many(s, total, ratio, share, scratch);
}

void mz_largest_remainder(int64_t total, const int64_t *weight, int32_t n, int64_t *share,
                          uint64_t *scratch) {
    mz_shares s = mz_shares_of(weight, n);
    mz_shares_split(&s, total, share, scratch);
}

int64_t mz_rows_up(double x) {
    return (int64_t)ceil(x - 1e-15 * x);
}
