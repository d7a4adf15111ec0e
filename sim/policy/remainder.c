#include "sim/policy/policy.h"

#include <string.h>

enum { INDEX_BITS = 20 };

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

/* Products of total and weight fit into 63 bits, remainder and index into one word. */
static void shares_small(int64_t total, const int64_t *weight, int64_t sum, int32_t n,
                         int64_t *share, uint64_t *key) {
    const uint64_t mask = ((uint64_t)1 << INDEX_BITS) - 1;
    double ratio = (double)total / (double)sum;
    int64_t given = 0;
    int32_t keys = 0;
    for (int32_t i = 0; i < n; i++) {
        int64_t floor_share = (int64_t)((double)weight[i] * ratio);
        int64_t rest = total * weight[i] - floor_share * sum;
        while (rest < 0) {
            floor_share--;
            rest += sum;
        }
        while (rest >= sum) {
            floor_share++;
            rest -= sum;
        }
        share[i] = floor_share;
        given += floor_share;
        key[keys] = (uint64_t)rest << INDEX_BITS | (mask - (uint64_t)i);
        keys += rest > 0;
    }
    int64_t extra = total - given;
    if (extra > 0)
        largest_first(key, keys, extra);
    for (int64_t i = 0; i < extra; i++)
        share[mask - (key[i] & mask)]++;
}

static void shares_large(int64_t total, const int64_t *weight, int64_t sum, int32_t n,
                         int64_t *share, uint64_t *remainder) {
    int64_t given = 0;
    for (int32_t i = 0; i < n; i++) {
        unsigned __int128 product = (unsigned __int128)(uint64_t)total * (uint64_t)weight[i];
        share[i] = (int64_t)(product / (uint64_t)sum);
        remainder[i] = (uint64_t)(product % (uint64_t)sum);
        given += share[i];
    }
    if (total > given)
        hand_out(total - given, sum, n, share, remainder);
}

void mz_largest_remainder(int64_t total, const int64_t *weight, int32_t n, int64_t *share,
                          uint64_t *scratch) {
    int64_t sum = 0, most = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += weight[i];
        most = weight[i] > most ? weight[i] : most;
    }
    if (sum == 0)
        equal_shares(total, n, share);
    else if (sum < (int64_t)1 << (63 - INDEX_BITS) && n < 1 << INDEX_BITS &&
             (total == 0 || most <= (INT64_MAX >> 1) / total))
        shares_small(total, weight, sum, n, share, scratch);
    else
        shares_large(total, weight, sum, n, share, scratch);
}
